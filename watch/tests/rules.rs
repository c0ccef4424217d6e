//! All that a kernel may leave out, one thing after the other: each is found, and the kernel that
//! leaves out nothing is clean.

#[path = "common/arm64.rs"]
mod arm64;
mod common;

use arm64::*;
use common::{Machine as Kernel, reader};
use tablewright_watch::arm64::decode;
use tablewright_watch::{At, Control, Flushes, Invalidation, Rule};

const ROOT: u64 = 0x10_0000;
const MIDDLE: u64 = 0x10_1000;
const LAST: u64 = 0x10_2000;
const OTHER: u64 = 0x10_8000;
const PAGE: u64 = 0x4000_0000;
/// The kernel's code.
const PC: u64 = 0xffff_8000_0000_0000;

/// A page of user memory, read and written: PXN, nG, AF, inner shareable, AP[1].
const USER: u64 = 1 << 53 | 1 << 11 | 1 << 10 | 3 << 8 | 1 << 6 | 3;
const READ_ONLY: u64 = 1 << 7;
const TABLE: u64 = 3;

const DSB_NSH: u32 = 0xd503_379f;
/// Without the register, which is x0.
const VALE1IS: u32 = 0xd508_83a0;
const RVALE1IS: u32 = 0xd508_82a0;
const VALE1: u32 = 0xd508_87a0;
const VMALLE1: u32 = 0xd508_8700;

impl Kernel {
    /// Two processors with a root loaded that maps one page of user memory at 0.
    fn new() -> Self {
        let mut kernel = Self::with(
            PC,
            [
                (ROOT, MIDDLE | TABLE),
                (MIDDLE, LAST | TABLE),
                (LAST, PAGE | USER),
                (OTHER, MIDDLE | TABLE),
            ],
        );
        for cpu in [0, 1] {
            kernel.cpu = cpu;
            // 39 bits of address, no TTBR1, ASIDs of 16 bits in TTBR0.
            kernel.run(TCR, 25 | 25 << 16 | 1 << 23 | 1 << 36);
            // Device, Normal, and Normal with tags.
            kernel.run(MAIR, 0xf0_ff_04);
            kernel.run(SCTLR, 1);
            kernel.load(ROOT, 7);
        }
        kernel.cpu = 0;
        kernel
    }

    fn load(&mut self, root: u64, asid: u64) {
        self.run(TTBR0, root | asid << 48);
    }

    /// Has one page of an address space forgotten everywhere.
    fn flush(&mut self, tlbi: u32, operand: u64) {
        self.run(DSB_ISHST, 0);
        self.run(tlbi, operand);
        self.run(DSB_ISH, 0);
    }
}

const fn asid(number: u64) -> u64 {
    number << 48
}

#[test]
fn what_is_done_as_the_manual_says_is_clean() {
    let mut kernel = Kernel::new();
    kernel.store(LAST, 0);
    kernel.flush(VALE1IS, asid(7));
    kernel.clear(PAGE);
    kernel.store(LAST, (PAGE + 0x1000) | USER);
    // Less is allowed, then more, then it is not mapped: one flush for each that takes away.
    kernel.store(LAST, (PAGE + 0x1000) | USER | READ_ONLY);
    kernel.flush(VALE1IS, asid(7));
    kernel.store(LAST, (PAGE + 0x1000) | USER);
    kernel.store(LAST, 0);
    kernel.store(MIDDLE, 0);
    kernel.flush(VAE1IS, asid(7));
    kernel.clear(LAST);
    kernel.clear(PAGE + 0x1000);
    assert_eq!(kernel.found(), []);
    let counts = kernel.watcher.counts();
    assert_eq!((counts.changes, counts.debts, counts.invalidations), (6, 4, 3));
}

/// Between a page that is unmapped and the page that is mapped there next, or its reuse, stand
/// these instructions: this is missing.
#[test]
fn a_flush_that_is_not_whole_is_found_and_named() {
    type Steps<'a> = &'a [(u32, u64)];
    let other_page = asid(7) | 1;
    // The hint of 4 KiB granules and level 2.
    let other_level = asid(7) | 0b0110 << 44;
    // An address of the upper half, not cut off: 64 KiB granules and level 3.
    let other_granule = asid(7) | 0b1111 << 44;
    let cases: &[(&str, Steps<'_>)] = &[
        ("neither a DSB nor an invalidation", &[]),
        ("no invalidation of it", &[(DSB_ISHST, 0), (DSB_ISH, 0)]),
        ("no DSB has completed it", &[(DSB_ISHST, 0), (VALE1IS, asid(7))]),
        // Stores alone complete nothing, and neither does the processor's own domain.
        ("no DSB has completed it", &[(DSB_ISHST, 0), (VALE1IS, asid(7)), (DSB_ISHST, 0)]),
        ("no DSB has completed it", &[(DSB_ISHST, 0), (VALE1IS, asid(7)), (DSB_NSH, 0)]),
        ("other CPUs", &[(DSB_ISHST, 0), (VALE1, asid(7)), (DSB_ISH, 0)]),
        ("not of the address space", &[(DSB_ISHST, 0), (VALE1IS, asid(8)), (DSB_ISH, 0)]),
    ];
    for (missing, steps) in cases {
        for reused in [false, true] {
            let mut kernel = Kernel::new();
            kernel.store(LAST, 0);
            for &(instruction, operand) in *steps {
                kernel.run(instruction, operand);
            }
            let rule = match reused {
                true => {
                    kernel.clear(PAGE);
                    Rule::PageReused
                }
                false => {
                    kernel.store(LAST, (PAGE + 0x1000) | USER);
                    Rule::BreakBeforeMake
                }
            };
            assert_eq!(kernel.found(), [rule], "{missing}");
            assert!(kernel.missing().contains(missing), "{missing}: {}", kernel.missing());
        }
    }
    // 64 KiB from address 0 on, in granules of that size.
    let other_range = asid(7) | 3 << 46;
    for (missing, tlbi, operand) in [
        ("no invalidation of it", VALE1IS, other_page),
        ("another level", VALE1IS, other_level),
        ("another granule", VALE1IS, other_granule),
        ("another granule", RVALE1IS, other_range),
    ] {
        let mut kernel = Kernel::new();
        kernel.store(LAST, 0);
        kernel.flush(tlbi, operand);
        kernel.clear(PAGE);
        assert_eq!(kernel.found(), [Rule::PageReused]);
        assert!(kernel.missing().contains(missing), "{}", kernel.missing());
    }
}

#[test]
fn an_invalidation_before_the_change_is_published_is_found_at_once() {
    let mut kernel = Kernel::new();
    kernel.store(LAST, 0);
    kernel.run(VALE1IS, asid(7));
    assert_eq!(kernel.found(), [Rule::Unpublished]);
    // And it does not count.
    kernel.run(DSB_ISH, 0);
    kernel.clear(PAGE);
    assert_eq!(kernel.found(), [Rule::Unpublished, Rule::PageReused]);
}

#[test]
fn an_invalidation_of_another_process_has_nothing_to_do_with_a_change() {
    let mut kernel = Kernel::new();
    kernel.store(LAST, 0);
    kernel.run(ASIDE1IS, asid(8));
    assert_eq!(kernel.found(), []);
    kernel.run(ASIDE1IS, asid(7));
    assert_eq!(kernel.found(), [Rule::Unpublished]);
}

#[test]
fn a_process_that_writes_to_its_page_does_not_reuse_it() {
    let mut kernel = Kernel::new();
    kernel.store(LAST, 0);
    kernel.pc = 0x40_0000;
    kernel.clear(PAGE);
    assert_eq!(kernel.found(), []);
    kernel.pc = PC;
    kernel.clear(PAGE);
    assert_eq!(kernel.found(), [Rule::PageReused]);
}

#[test]
fn what_needs_a_break_is_not_changed_at_once() {
    let page = PAGE | USER;
    for (new, is_wrong) in [
        (page | READ_ONLY, false),
        (page & !(1 << 10), false),
        (page | 1 << 55, false),
        (page + 0x1000, true),
        // Another type; another shareability; a run; global.
        (page | 1 << 2, true),
        (page ^ 1 << 8, true),
        (page | 1 << 52, true),
        (page & !(1 << 11), true),
    ] {
        let mut kernel = Kernel::new();
        kernel.store(LAST, new);
        let found: &[Rule] = if is_wrong { &[Rule::BreakBeforeMake] } else { &[] };
        assert_eq!(kernel.found(), found, "{new:#x}");
    }
    // Tags are no memory type.
    let mut kernel = Kernel::new();
    kernel.store(LAST + 8, page | 1 << 2);
    kernel.store(LAST + 8, page | 2 << 2);
    assert_eq!(kernel.found(), []);
    // Other sizes.
    for (entry, new) in [(MIDDLE, PAGE | USER & !2), (MIDDLE, OTHER | TABLE)] {
        let mut kernel = Kernel::new();
        kernel.store(entry, new);
        assert_eq!(kernel.found(), [Rule::BreakBeforeMake], "{new:#x}");
    }
}

/// The firmware of virtual machines changes the block that it runs in so.
#[test]
fn who_walks_nothing_may_invalidate_after_the_change() {
    let change = |kernel: &mut Kernel| {
        for cpu in [1, 0] {
            kernel.cpu = cpu;
            kernel.run(SCTLR, 0);
        }
        kernel.store(LAST, (PAGE + 0x1000) | USER);
    };
    let mut kernel = Kernel::new();
    change(&mut kernel);
    kernel.run(VMALLE1IS, 0);
    kernel.run(DSB_ISH, 0);
    kernel.run(SCTLR, 1);
    assert_eq!(kernel.found(), []);

    // At once, or after a break: not invalidated, and by one of two.
    for steps in [1, 2] {
        for tlbi in [None, Some(VMALLE1)] {
            let mut kernel = Kernel::new();
            if steps == 2 {
                kernel.store(LAST, 0);
            }
            change(&mut kernel);
            if let Some(tlbi) = tlbi {
                kernel.flush(tlbi, 0);
            }
            assert_eq!(kernel.found(), [], "{steps} {tlbi:?}");
            kernel.run(SCTLR, 1);
            assert_eq!(kernel.found(), [Rule::BreakBeforeMake], "{steps} {tlbi:?}");
        }
    }
}

#[test]
fn a_table_is_reached_until_more_than_its_leaves_are_forgotten() {
    for (tlbi, found) in [(VAE1IS, &[][..]), (VALE1IS, &[Rule::TableReused])] {
        let mut kernel = Kernel::new();
        kernel.store(LAST, 0);
        kernel.store(MIDDLE, 0);
        kernel.flush(tlbi, asid(7));
        // The allocator writes something else into it.
        kernel.store(LAST + 16, 0x1234_5003);
        assert_eq!(kernel.found(), found);
    }
    // With a leaf in it, the leaf is remembered by itself: another page's invalidation takes the
    // table, and not the leaf.
    let mut kernel = Kernel::new();
    kernel.store(MIDDLE, 0);
    kernel.flush(VAE1IS, asid(7) | 1);
    kernel.store(LAST + 16, 0x1234_5003);
    assert_eq!(kernel.found(), []);
    kernel.clear(PAGE);
    assert_eq!(kernel.found(), [Rule::PageReused]);
}

/// A fault on another processor is in a table that is cut off at the same time.
#[test]
fn a_walk_without_a_lock_stores_one_entry_late() {
    let mut kernel = Kernel::new();
    kernel.store(MIDDLE, 0);
    kernel.cpu = 1;
    kernel.store(LAST, 0);
    kernel.store(LAST + 8, PAGE | USER);
    assert_eq!(kernel.found(), []);
    kernel.store(LAST + 16, PAGE | USER);
    assert_eq!(kernel.found(), [Rule::TableReused]);
    // The processor that has cut it off stores nothing to it.
    let mut kernel = Kernel::new();
    kernel.store(MIDDLE, 0);
    kernel.store(LAST + 8, PAGE | USER);
    assert_eq!(kernel.found(), [Rule::TableReused]);
    // It moves, is in use again, and is cut off anew.
    let mut kernel = Kernel::new();
    for entry in [MIDDLE, MIDDLE + 8] {
        kernel.cpu = 0;
        kernel.store(entry, 0);
        kernel.cpu = 1;
        kernel.store(LAST + entry - MIDDLE + 8, PAGE | USER);
        kernel.cpu = 0;
        kernel.store(entry + 8, LAST | TABLE);
    }
    assert_eq!(kernel.found(), []);
}

#[test]
fn a_table_moves_within_its_root_and_not_to_another() {
    let mut kernel = Kernel::new();
    kernel.store(MIDDLE, 0);
    kernel.store(MIDDLE + 8, LAST | TABLE);
    kernel.flush(VAE1IS, asid(7));
    assert_eq!(kernel.found(), []);
    // It is followed where it is now: at 2 MiB.
    kernel.store(LAST, 0);
    kernel.flush(VALE1IS, asid(7) | 0x200);
    kernel.clear(PAGE);
    assert_eq!(kernel.found(), []);

    let mut kernel = Kernel::new();
    // Another root, on the other processor.
    kernel.memory.insert(OTHER, 0);
    kernel.memory.insert(OTHER + 8, (OTHER + 0x1000) | TABLE);
    kernel.cpu = 1;
    kernel.load(OTHER, 9);
    kernel.cpu = 0;
    kernel.store(MIDDLE, 0);
    kernel.store(OTHER + 0x1000, LAST | TABLE);
    assert_eq!(kernel.found(), [Rule::TableReused]);
}

#[test]
fn an_identifier_is_given_to_another_root_after_a_flush() {
    for (flush, is_wrong) in [
        (None, true),
        (Some(VMALLE1), false),
        (Some(VMALLE1IS), false),
        (Some(ASIDE1IS), false),
        (Some(VALE1IS), true),
    ] {
        let mut kernel = Kernel::new();
        kernel.memory.insert(OTHER, (OTHER + 0x1000) | TABLE);
        // Another identifier of another root in between: nothing is wrong with that.
        kernel.load(OTHER, 8);
        if let Some(flush) = flush {
            kernel.flush(flush, asid(7));
        }
        kernel.load(OTHER, 7);
        let found: &[Rule] = if is_wrong { &[Rule::IdentifierReused] } else { &[] };
        assert_eq!(kernel.found(), found, "{flush:x?}");
        // The other processor has it loaded still, and forgets by itself.
        kernel.cpu = 1;
        kernel.load(OTHER, 8);
        kernel.run(DSB_ISHST, 0);
        kernel.run(VMALLE1, 0);
        kernel.run(DSB_NSH, 0);
        kernel.load(OTHER, 7);
        assert_eq!(kernel.found(), found, "{flush:x?}");
    }
}

/// A load on another processor between an invalidation and its DSB was once taken for one on this:
/// what this processor held stayed.
#[test]
fn who_loads_a_root_before_a_flush_is_complete_holds_it_alone() {
    for (identifier, cpu, is_wrong) in [(7, 0, false), (7, 1, true), (9, 1, false)] {
        let mut kernel = Kernel::new();
        kernel.memory.insert(OTHER, (OTHER + 0x1000) | TABLE);
        for cpu in [1, 0] {
            kernel.cpu = cpu;
            kernel.load(OTHER, 8);
        }
        kernel.run(DSB_ISHST, 0);
        kernel.run(VMALLE1IS, 0);
        kernel.cpu = 1;
        kernel.load(ROOT, identifier);
        kernel.cpu = 0;
        kernel.run(DSB_ISH, 0);
        kernel.cpu = cpu;
        kernel.load(OTHER, 7);
        let found: &[Rule] = if is_wrong { &[Rule::IdentifierReused] } else { &[] };
        assert_eq!(kernel.found(), found, "CPU {cpu}, {identifier}");
    }
}

#[test]
fn a_root_that_was_emptied_is_forgotten_though_it_is_loaded() {
    let mut kernel = Kernel::new();
    kernel.store(LAST, 0);
    kernel.store(MIDDLE, 0);
    kernel.store(ROOT, 0);
    // A process ends: its identifier is flushed while its root is still loaded.
    kernel.flush(ASIDE1IS, asid(7));
    kernel.memory.insert(OTHER, (OTHER + 0x1000) | TABLE);
    kernel.load(OTHER, 7);
    kernel.clear(LAST);
    kernel.clear(MIDDLE);
    kernel.clear(PAGE);
    assert_eq!(kernel.found(), []);
}

#[test]
fn what_no_processor_can_hold_owes_nothing() {
    let mut kernel = Kernel::new();
    // A root that is not loaded is filled and emptied as one likes.
    kernel.store(OTHER, 0);
    kernel.store(OTHER, LAST | TABLE);
    // What was not mapped is mapped without a flush.
    kernel.store(LAST + 8, (PAGE + 0x1000) | USER);
    assert_eq!(kernel.found(), []);
    assert_eq!(kernel.watcher.counts().debts, 0);
    // A processor whose translation is off holds nothing.
    for cpu in [0, 1] {
        kernel.cpu = cpu;
        kernel.run(SCTLR, 0);
        kernel.run(VMALLE1, 0);
        kernel.run(DSB_NSH, 0);
    }
    kernel.store(LAST, (PAGE + 0x2000) | USER);
    assert_eq!(kernel.found(), []);
}

#[test]
fn processors_that_there_are_not_do_nothing() {
    for cpu in [2, 63, 64, 255] {
        let mut kernel = Kernel::new();
        kernel.cpu = cpu;
        let before = kernel.watcher.counts().changes;
        kernel.store(LAST, 0);
        kernel.clear(PAGE);
        kernel.clear(LAST);
        kernel.flush(VALE1IS, asid(7));
        kernel.load(OTHER, 7);
        let at = At { cpu, pc: PC };
        let mut read = reader(&kernel.memory);
        kernel.watcher.zeroed(at, LAST, 4096, &mut read);
        kernel.watcher.store(at, LAST, 1, &mut read);
        kernel.watcher.control(at, Control::default(), Flushes::All, &mut read);
        kernel.watcher.forgets(at, Invalidation::LOCAL);
        kernel.watcher.to_user(at);
        kernel.watcher.in_kernel(cpu);
        assert!(!kernel.watcher.is_any_in_user());
        assert_eq!((kernel.watcher.counts().changes, kernel.found()), (before, vec![]));
    }
}

#[test]
fn what_there_is_no_memory_for_is_no_table() {
    let mut kernel = Kernel::new();
    let at = At { cpu: 0, pc: PC };
    let mut none = |_: u64, _: &mut [u64]| false;
    // A root, and a table below one.
    kernel.watcher.execute(at, decode(TTBR0).unwrap(), OTHER, &mut none);
    kernel.load(ROOT, 7);
    kernel.watcher.store_word(at, MIDDLE + 8, OTHER | TABLE, &mut none);
    kernel.watcher.store_word(at, OTHER, PAGE | USER, &mut none);
    kernel.watcher.store(at, LAST, 8, &mut none);
    // Across the end of a table, and of all addresses.
    let mut read = reader(&kernel.memory);
    kernel.watcher.store(at, LAST + 4092, 8, &mut read);
    kernel.watcher.store(at, u64::MAX, 8, &mut read);
    kernel.watcher.zeroed(at, LAST + 4096 - 8, 64, &mut read);
    kernel.watcher.zeroed(at, u64::MAX, 64, &mut read);
    assert_eq!(kernel.found(), []);
}

#[test]
fn kinds_are_counted_and_said_once() {
    let mut kernel = Kernel::new();
    let pc = kernel.pc;
    for page in 1..5_u64 {
        kernel.pc = pc;
        kernel.store(LAST, (PAGE + page * 0x1000) | USER);
    }
    assert_eq!(kernel.found(), [Rule::BreakBeforeMake]);
    let finding = &kernel.watcher.findings()[0];
    assert_eq!(finding.count, 4);
    let change = finding.change.as_ref().expect("of an entry");
    assert_eq!((change.span.first, change.span.last, change.level), (0, 0xfff, 3));
    assert_eq!(change.old, "4 KiB at 0x40000000, kernel rw-, user rwx, device");
}
