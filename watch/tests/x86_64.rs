//! All that a kernel of x86-64 may leave out, and the kernel that leaves out nothing.

mod common;

use common::{Machine as Kernel, reader};
use tablewright_watch::{Control, Flushes, Rule};

const ROOT: u64 = 0x10_0000;
const TABLES: [u64; 3] = [0x10_1000, 0x10_2000, 0x10_3000];
const OTHER: u64 = 0x10_8000;
const PAGE: u64 = 0x4000_0000;
/// The upper half: one page of the kernel's, in tables that both roots have.
const UPPER: [u64; 3] = [0x11_1000, 0x11_2000, 0x11_3000];
const PC: u64 = 0xffff_ffff_8100_0000;

/// P, R/W, U/S.
const USER: u64 = 7;
const ON: Control = Control { cr0: 1 << 31 | 1, cr3: ROOT, cr4: 1 << 5 | 1 << 7, efer: 1 << 10 };

impl Kernel {
    /// Two processors in user mode with a root that maps one page at 0.
    fn new() -> Self {
        let mut kernel = Self::with(
            PC,
            [
                (OTHER + 0xff8, UPPER[0] | 7),
                (ROOT + 0xff8, UPPER[0] | 7),
                (ROOT, TABLES[0] | 7),
                (TABLES[2], PAGE | USER),
                (UPPER[2], PAGE | 0x103),
            ],
        );
        for [first, second, third] in [TABLES, UPPER] {
            kernel.memory.extend([(first, second | 7), (second, third | 7)]);
        }
        for cpu in [1, 0] {
            kernel.cpu = cpu;
            kernel.load(ROOT);
            kernel.returns();
        }
        kernel.watcher.in_kernel(0);
        kernel
    }

    fn load(&mut self, root: u64) {
        let at = self.at();
        let now = Control { cr3: root, ..ON };
        let flushes = now.flushes(&ON, 3);
        self.watcher.control(at, now, flushes, &mut reader(&self.memory));
    }

    fn invlpg(&mut self, address: u64) {
        let at = self.at();
        self.watcher.forgets(at, ON.invlpg(address));
    }

    fn returns(&mut self) {
        let at = self.at();
        self.watcher.to_user(at);
    }
}

/// Each processor forgets by itself: the one that unmaps, and the other by an interrupt.
#[test]
fn a_page_is_used_anew_when_each_processor_has_forgotten() {
    for (here, there, is_wrong) in
        [(true, true, false), (false, true, true), (true, false, true), (false, false, true)]
    {
        for all in [false, true] {
            let mut kernel = Kernel::new();
            kernel.store(TABLES[2], 0);
            for (cpu, forgets) in [(0, here), (1, there)] {
                kernel.cpu = cpu;
                match (forgets, all) {
                    (false, _) => {}
                    (true, true) => kernel.load(ROOT),
                    (true, false) => kernel.invlpg(0x123),
                }
            }
            kernel.cpu = 0;
            kernel.clear(PAGE);
            // One that is in the kernel may forget before it goes back.
            assert_eq!(kernel.found().is_empty(), there, "{here} {there}");
            kernel.returns();
            let found: &[Rule] = if is_wrong { &[Rule::PageReused] } else { &[] };
            assert_eq!(kernel.found(), found, "{here} {there}");
        }
    }
    let mut kernel = Kernel::new();
    kernel.store(TABLES[2], 0);
    kernel.invlpg(0x1000);
    kernel.cpu = 1;
    kernel.invlpg(0);
    kernel.cpu = 0;
    kernel.clear(PAGE);
    kernel.returns();
    assert_eq!(kernel.found(), [Rule::PageReused], "another page's");
}

#[test]
fn a_thread_of_the_kernel_keeps_the_root_of_another_and_may_forget_later() {
    let mut kernel = Kernel::new();
    // The other processor is in the kernel, with the root still loaded.
    kernel.watcher.in_kernel(1);
    kernel.store(TABLES[2], 0);
    kernel.invlpg(0);
    kernel.clear(PAGE);
    kernel.cpu = 1;
    kernel.load(OTHER);
    kernel.load(ROOT);
    kernel.returns();
    assert_eq!(kernel.found(), []);
    // A table has to be forgotten at once: a walk may begin at any time.
    let mut kernel = Kernel::new();
    kernel.watcher.in_kernel(1);
    kernel.store(TABLES[1], 0);
    kernel.invlpg(0);
    kernel.clear(TABLES[2]);
    assert_eq!(kernel.found(), [Rule::TableReused]);
}

#[test]
fn an_invalidation_of_any_page_takes_all_tables() {
    let mut kernel = Kernel::new();
    kernel.store(TABLES[2], 0);
    kernel.store(TABLES[1], 0);
    for cpu in [0, 1] {
        kernel.cpu = cpu;
        kernel.invlpg(0);
        // Of the other half: nothing that is used here.
        kernel.invlpg(0xffff_ffff_8000_0000);
    }
    kernel.clear(TABLES[2]);
    kernel.clear(PAGE);
    assert_eq!(kernel.found(), []);
    let mut kernel = Kernel::new();
    kernel.store(TABLES[2], 0);
    kernel.store(TABLES[1], 0);
    for cpu in [0, 1] {
        kernel.cpu = cpu;
        kernel.invlpg(0xffff_ffff_8000_0000);
    }
    kernel.clear(TABLES[2]);
    assert_eq!(kernel.found(), [], "the table is forgotten");
    kernel.clear(PAGE);
    assert_eq!(kernel.found(), [Rule::PageReused], "the page is not");
}

#[test]
fn the_upper_half_is_one_for_all_roots() {
    let mut kernel = Kernel::new();
    // A root goes, and another comes: the tables of the kernel's are known still.
    for cpu in [0, 1] {
        kernel.cpu = cpu;
        kernel.load(OTHER);
    }
    let known = kernel.watcher.tables().count();
    assert_eq!(known, 4, "a root and three tables of the upper half");
    kernel.store(UPPER[1], 0);
    kernel.cpu = 0;
    kernel.load(OTHER);
    kernel.clear(UPPER[2]);
    assert_eq!(kernel.found(), [Rule::TableReused], "the other processor's walks");
}

#[test]
fn what_a_write_to_a_control_register_flushes_is_what_the_manual_says() {
    let with = |cr0, cr3, cr4| Control { cr0, cr3, cr4, efer: 1 << 10 };
    let before = ON;
    for (now, number, flushes) in [
        (with(ON.cr0, OTHER, ON.cr4), 3, Flushes::Own),
        // Without PCIDs bit 63 is of no meaning here.
        (with(ON.cr0, OTHER | 1 << 63, ON.cr4), 3, Flushes::Own),
        (with(ON.cr0, OTHER | 1 << 63, ON.cr4 | 1 << 17), 3, Flushes::Nothing),
        (with(ON.cr0, ROOT, ON.cr4 & !(1 << 7)), 4, Flushes::All),
        (with(ON.cr0, ROOT, ON.cr4 | 1 << 9), 4, Flushes::Nothing),
        (with(0, ROOT, ON.cr4), 0, Flushes::All),
        (with(ON.cr0 | 1 << 16, ROOT, ON.cr4), 0, Flushes::Nothing),
    ] {
        assert_eq!(now.flushes(&before, number), flushes, "{now:x?}");
    }
    let all = ON.invpcid(2, [0; 2]);
    assert!(all.globals && all.asid.is_none() && all.span.is_none());
    let one = ON.invpcid(0, [5, 0x1234]);
    assert_eq!((one.asid, one.globals), (Some(5), false));
    assert_eq!(one.span.map(|span| (span.first, span.last)), Some((0x1000, 0x1fff)));
    assert_eq!(ON.invpcid(1, [5, 0]).asid, Some(5));
    assert!(!ON.invpcid(3, [5, 0]).globals);
}

/// With identifiers, a root may be loaded under one that another had only after a flush.
#[test]
fn an_identifier_is_given_to_another_root_after_a_flush() {
    for flushes in [true, false] {
        let mut kernel = Kernel::new();
        kernel.memory.insert(OTHER, TABLES[0] | 7);
        let cr4 = ON.cr4 | 1 << 17;
        for (root, bit) in
            [(ROOT | 5, 0), (OTHER | 6, 1 << 63), (OTHER | 5, u64::from(!flushes) << 63)]
        {
            let at = kernel.at();
            let now = Control { cr3: root | bit, cr4, ..ON };
            let flushes = now.flushes(&Control { cr4, ..ON }, 3);
            kernel.watcher.control(at, now, flushes, &mut reader(&kernel.memory));
        }
        let found: &[Rule] = if flushes { &[] } else { &[Rule::IdentifierReused] };
        assert_eq!(kernel.found(), found);
    }
}
