//! A hypervisor of a few lines: its guest's stage 2, and its own stage 1 of EL2.

#[path = "common/arm64.rs"]
mod arm64;
mod common;

use arm64::*;
use common::Machine as Hypervisor;
use tablewright_watch::Rule;

/// A stage 2 of 39 bits: a root of level 1, a table of level 2, one of level 3.
const ROOT: u64 = 0x10_0000;
const MIDDLE: u64 = 0x10_1000;
const LAST: u64 = 0x10_2000;
/// The root of another guest with the same tables.
const OTHER: u64 = 0x10_8000;
const PAGE: u64 = 0x4000_0000;
const PC: u64 = 0x4100_0000;

/// A page of a guest: AF, inner shareable, read and written, write-back.
const LEAF: u64 = 1 << 10 | 3 << 8 | 3 << 6 | 0xf << 2 | 3;
const WRITE: u64 = 1 << 7;
const UNCACHED: u64 = 0b1010 << 2;
const TABLE: u64 = 3;

/// Without the register, which is x0.
const IPAS2E1IS: u32 = 0xd50c_8020;
const IPAS2LE1IS: u32 = 0xd50c_80a0;
const VMALLS12E1: u32 = 0xd50c_87c0;
const VMALLS12E1IS: u32 = 0xd50c_83c0;
const ALLE1IS: u32 = 0xd50c_8380;
const VAAE1IS: u32 = 0xd508_8360;
const ALLE2: u32 = 0xd50c_8700;
const VAE2IS: u32 = 0xd50c_8320;
const SCTLR_EL2: u32 = 0xd51c_1000;
const HCR: u32 = 0xd51c_1100;
const TTBR0_EL2: u32 = 0xd51c_2000;
const MAIR_EL2: u32 = 0xd51c_a200;
const TCR_EL2: u32 = 0xd51c_2040;
const ISB: u32 = 0xd503_3fdf;
const VTTBR: u32 = 0xd51c_2100;
const VTCR: u32 = 0xd51c_2140;

const VM: u64 = 1;
/// A root of stage 1, a table below it, and one of the last level.
const OWN: [u64; 3] = [0x20_0000, 0x20_1000, 0x20_2000];

impl Hypervisor {
    /// Two processors with a guest of VMID 7 whose page 0 is there.
    fn new() -> Self {
        let mut of = Self::with(
            PC,
            [
                (ROOT, MIDDLE | TABLE),
                (MIDDLE, LAST | TABLE),
                (LAST, PAGE | LEAF),
                (OTHER, MIDDLE | TABLE),
            ],
        );
        for cpu in [1, 0] {
            of.cpu = cpu;
            // 39 bits from level 1 on, VMIDs of 16 bits.
            of.run(VTCR, 25 | 1 << 6 | 1 << 19);
            of.load(7 << 48 | ROOT);
            of.run(HCR, VM);
        }
        of
    }

    /// With tables of stage 1 besides, which map one page at 0.
    fn with_tables(leaf: u64) -> Self {
        let mut of = Self::new();
        let [_, middle, last] = OWN;
        of.memory.extend([(OWN[0], middle | TABLE), (middle, last | TABLE), (last, leaf)]);
        of
    }

    /// A root under a VMID, and an ISB.
    fn load(&mut self, vttbr: u64) {
        self.run(VTTBR, vttbr);
        self.run(ISB, 0);
    }

    /// These instructions, each complete before the next.
    fn flush(&mut self, all: &[(u32, u64)]) {
        self.run(DSB_ISHST, 0);
        for &(tlbi, operand) in all {
            self.run(tlbi, operand);
            self.run(DSB_ISH, 0);
        }
    }
}

#[test]
fn what_is_done_as_the_manual_says_is_clean() {
    let mut of = Hypervisor::new();
    let next = PAGE + 0x1000;
    for flush in [
        &[(IPAS2LE1IS, 0), (VMALLE1IS, 0)][..],
        &[(IPAS2E1IS, 0), (VMALLE1IS, 0)],
        &[(VMALLS12E1IS, 0)],
        &[(ALLE1IS, 0)],
    ] {
        of.store(LAST, 0);
        of.flush(flush);
        of.store(LAST, next | LEAF);
        // A log: writing is taken away, and given back.
        of.store(LAST, (next | LEAF) & !WRITE);
        of.flush(flush);
        of.store(LAST, next | LEAF);
    }
    // A table is cut off, and given back.
    of.store(MIDDLE, 0);
    of.flush(&[(IPAS2E1IS, 0), (VMALLE1IS, 0)]);
    of.clear(LAST);
    assert_eq!(of.found(), []);
}

#[test]
fn a_flush_of_half_of_it_is_found_and_named() {
    type Steps<'a> = &'a [(u32, u64)];
    let cases: &[(&str, Steps<'_>)] = &[
        ("no invalidation of it", &[]),
        ("it leaves what is combined", &[(IPAS2LE1IS, 0)]),
        ("it leaves what is combined", &[(IPAS2LE1IS, 0), (VAE1IS, 0)]),
        ("it leaves what is combined", &[(IPAS2LE1IS, 0), (VAAE1IS, 0)]),
        ("it leaves what is combined", &[(IPAS2LE1IS, 0), (ASIDE1IS, 0)]),
        // Combined entries are made anew as long as stage 2 is remembered.
        ("it leaves what is combined", &[(VMALLE1IS, 0), (IPAS2LE1IS, 0)]),
        ("no invalidation of it", &[(VMALLE1IS, 0)]),
        ("no invalidation of it", &[(IPAS2LE1IS, 1), (VMALLE1IS, 0)]),
        ("other CPUs", &[(VMALLS12E1, 0)]),
        ("no invalidation of it", &[(ALLE2, 0)]),
    ];
    for (missing, steps) in cases {
        let mut of = Hypervisor::new();
        of.store(LAST, 0);
        of.flush(steps);
        of.store(LAST, (PAGE + 0x1000) | LEAF);
        assert_eq!(of.found(), [Rule::BreakBeforeMake], "{missing}");
        assert!(of.missing().contains(missing), "{missing}: {}", of.missing());
    }
    // The second is issued before the first is complete.
    let mut of = Hypervisor::new();
    of.store(LAST, 0);
    of.run(DSB_ISHST, 0);
    of.run(IPAS2LE1IS, 0);
    of.run(VMALLE1IS, 0);
    of.run(DSB_ISH, 0);
    of.store(LAST, (PAGE + 0x1000) | LEAF);
    assert_eq!(of.found(), [Rule::BreakBeforeMake]);
}

/// It is of the guest whose VMID is loaded, in all its 16 bits.
#[test]
fn a_flush_of_another_guest_is_found() {
    let bad = &[Rule::BreakBeforeMake];
    for (vmids, found) in
        [([7, 7], &[][..]), ([8, 8], bad), ([8, 7], bad), ([7, 8], bad), ([0x107, 0x107], bad)]
    {
        for flush in [[IPAS2LE1IS, VMALLE1IS], [VMALLS12E1IS; 2]] {
            if flush[0] == VMALLS12E1IS && vmids[0] != vmids[1] {
                continue;
            }
            let mut of = Hypervisor::new();
            of.store(LAST, 0);
            for (vmid, tlbi) in vmids.into_iter().zip(flush) {
                // A root in which nothing is.
                of.load(vmid << 48 | 0x30_0000);
                of.flush(&[(tlbi, 0)]);
            }
            of.load(7 << 48 | ROOT);
            of.store(LAST, (PAGE + 0x1000) | LEAF);
            assert_eq!(of.found(), found, "{vmids:?}");
        }
    }
}

/// A host at EL1 has VMID 0.
#[test]
fn what_is_done_to_a_guest_does_not_flush_the_host() {
    let page = |pa: u64| pa | 1 << 11 | 1 << 10 | 3 << 8 | 1 << 6 | 3;
    for (vmid, tlbi, found) in [
        (0, VMALLE1IS, &[][..]),
        (7, ALLE1IS, &[]),
        (7, VMALLE1IS, &[Rule::BreakBeforeMake]),
        (7, VMALLS12E1IS, &[Rule::BreakBeforeMake]),
    ] {
        let mut of = Hypervisor::with_tables(page(PAGE));
        let [root, _, last] = OWN;
        of.run(HCR, 0);
        of.load(0);
        of.run(TCR, 25 | 1 << 23);
        of.run(TTBR0, root);
        of.run(SCTLR, 1);
        // While a guest is there these are the guest's.
        of.run(HCR, VM);
        of.run(TTBR0, LAST);
        of.run(MAIR, 0xff << 56);
        of.run(HCR, 0);
        of.store(last, 0);
        of.run(DSB_ISHST, 0);
        of.load(vmid << 48);
        of.run(tlbi, 0);
        of.run(DSB_ISH, 0);
        of.load(0);
        of.store(last, page(PAGE + 0x1000));
        assert_eq!(of.found(), found, "{vmid} {tlbi:#x}");
        // One memory type of the host's; the guest's has another for number 7.
        let before = of.found();
        of.store(last, page(PAGE + 0x1000) | 7 << 2);
        assert_eq!(of.found(), before);
    }
}

/// The VMID of its last guest stays loaded.
#[test]
fn a_host_at_el2_has_no_vmid() {
    const HOST: u64 = 1 << 34 | 1 << 27;
    let page = |pa: u64| pa | 1 << 11 | 1 << 10 | 3 << 8 | 1 << 6 | 3;
    // With its own bits set, or one of them, as while it invalidates for a guest.
    for (hcr, found) in [(HOST | VM, &[][..]), (1 << 34, &[Rule::BreakBeforeMake])] {
        let mut of = Hypervisor::with_tables(page(PAGE));
        let [root, _, last] = OWN;
        of.run(HCR, HOST | VM);
        of.run(TCR, 25 | 1 << 23);
        of.run(TTBR0, root);
        of.run(SCTLR, 1);
        of.store(last, 0);
        of.run(HCR, hcr);
        of.flush(&[(VMALLE1IS, 0)]);
        of.run(HCR, HOST);
        of.store(last, page(PAGE + 0x1000));
        assert_eq!(of.found(), found, "{hcr:#x}");
    }
}

/// Its tables are at addresses of the guest's, and what it loses is written by itself.
#[test]
fn a_guests_own_tables_and_pages_are_not_looked_at() {
    let mut of = Hypervisor::new();
    of.memory.insert(0x20_0000, 0x20_1000 | TABLE);
    of.run(TCR, 25 | 1 << 23);
    of.run(TTBR0, 0x20_0000);
    of.run(SCTLR, 1);
    of.store(0x20_0000, 0x20_2000 | TABLE);
    of.store(LAST, 0);
    of.pc = 0xffff_8000_0000_0000;
    of.clear(PAGE);
    assert_eq!(of.found(), []);
}

/// Its guest executes what it likes, and that is about its own tables, and not about the change.
#[test]
fn an_invalidation_of_the_guests_is_not_the_hypervisors() {
    let mut of = Hypervisor::new();
    of.store(LAST, 0);
    of.cpu = 1;
    of.run(VMALLE1IS, 0);
    of.run(VAE1IS, 0);
    of.run(SCTLR, 1);
    of.run(TTBR0, 1 << 48 | MIDDLE);
    of.cpu = 0;
    of.run(VMALLE1IS, 0);
    assert_eq!(of.found(), []);
    of.run(IPAS2E1IS, 0);
    assert_eq!(of.found(), [Rule::Unpublished]);
}

#[test]
fn a_change_of_a_guests_page_has_its_break() {
    let mut of = Hypervisor::new();
    of.store(LAST, (PAGE | LEAF) ^ UNCACHED);
    assert_eq!(of.found(), [Rule::BreakBeforeMake]);
    assert!(of.watcher.findings()[0].then.contains("another memory type"));

    let mut of = Hypervisor::new();
    of.store(MIDDLE, 0);
    of.flush(&[(IPAS2LE1IS, 0), (VMALLE1IS, 0)]);
    of.clear(LAST);
    assert_eq!(of.found(), [Rule::TableReused]);
    assert!(of.missing().contains("of leaves alone, and this was a table"), "{}", of.missing());
}

/// A hypervisor flushes a guest that is not loaded, without its ISB.
#[test]
fn a_flush_under_a_vmid_waits_for_the_write_of_it() {
    const ERET: u32 = 0xd69f_03e0;
    let bad = &[Rule::Unsynchronized][..];
    for (vmid, between, tlbi, found) in [
        (8, None, VMALLS12E1IS, bad),
        (8, None, IPAS2LE1IS, bad),
        (8, None, VMALLE1IS, bad),
        (8, Some(DSB_ISH), VMALLS12E1IS, bad),
        (8, Some(ISB), VMALLS12E1IS, &[]),
        (8, Some(ERET), VMALLE1IS, &[]),
        // Of every VMID, and of none.
        (8, None, ALLE1IS, &[]),
        (8, None, ALLE2, &[]),
        (7, None, VMALLS12E1IS, &[]),
    ] {
        let mut of = Hypervisor::new();
        of.run(VTTBR, vmid << 48 | 0x20_0000);
        if let Some(between) = between {
            of.run(between, 0);
        }
        of.run(tlbi, 0);
        assert_eq!(of.found(), found, "{vmid} {between:x?} {tlbi:#x}");
    }
}

#[test]
fn a_vmid_is_given_to_another_guest_after_a_flush() {
    for (flush, found) in [
        (&[][..], &[Rule::IdentifierReused][..]),
        (&[(VMALLE1IS, 0)], &[Rule::IdentifierReused]),
        (&[(VMALLS12E1, 0)], &[]),
        (&[(ALLE1IS, 0)], &[]),
    ] {
        let mut of = Hypervisor::new();
        // One in which nothing is.
        of.load(7 << 48 | 0x20_0000);
        of.flush(flush);
        of.load(7 << 48 | OTHER);
        assert_eq!(of.found(), found);
        // Bits above the root's address are the identifier.
        of.load(8 << 48 | OTHER);
        assert_eq!(of.found(), found);
    }
}

#[test]
fn el2_has_one_half_and_no_identifiers() {
    let page = |pa: u64| pa | 1 << 10 | 3 << 8 | 1 << 6 | 3;
    for (flush, operand, found) in [
        (VAE2IS, 0, &[][..]),
        (ALLE2, 0, &[Rule::BreakBeforeMake]),
        (VAE2IS, 1, &[Rule::BreakBeforeMake]),
        (ALLE1IS, 0, &[Rule::BreakBeforeMake]),
        (VAAE1IS, 0, &[Rule::BreakBeforeMake]),
    ] {
        let mut of = Hypervisor::with_tables(page(PAGE));
        let [root, _, last] = OWN;
        for cpu in [1, 0] {
            of.cpu = cpu;
            of.run(TCR_EL2, 25);
            of.run(TTBR0_EL2, root);
            of.run(SCTLR_EL2, 1);
        }
        of.store(last, 0);
        of.flush(&[(flush, operand)]);
        of.store(last, page(PAGE + 0x1000));
        assert_eq!(of.found(), found, "{flush:#x}");
        let is_near = flush == ALLE2 || found.is_empty();
        assert!(is_near || of.missing().contains("no invalidation of it"), "{}", of.missing());
    }
}

#[test]
fn el2_has_types_of_its_own_and_one_root() {
    const E2H: u64 = 1 << 34;
    let page = |pa: u64| pa | 1 << 10 | 3 << 8 | 1 << 6 | 3;
    let [root, middle, last] = OWN;
    let start = |hcr, sctlr| {
        let mut of = Hypervisor::with_tables(page(PAGE));
        of.memory.insert(0x28_0000, middle | TABLE);
        of.run(HCR, hcr);
        // Numbers 0 and 1 are one type, and 2 another.
        of.run(MAIR_EL2, 0x44_ff_ff);
        of.run(TCR_EL2, 25);
        of.run(TTBR0_EL2, root);
        of.run(SCTLR_EL2, sctlr);
        of
    };
    for (number, found) in [(1, &[][..]), (2, &[Rule::BreakBeforeMake])] {
        let mut of = start(0, 1);
        of.store(last, page(PAGE) | number << 2);
        assert_eq!(of.found(), found, "{number}");
    }
    // Its MMU is off; and of EL2&0 the registers have other names.
    for (hcr, sctlr) in [(0, 0), (E2H, 1)] {
        let mut of = start(hcr, sctlr);
        of.store(last, page(PAGE + 0x1000));
        assert_eq!(of.found(), []);
    }
    let mut of = start(0, 1);
    of.run(TTBR0_EL2, 0x28_0000);
    assert_eq!(of.found(), [Rule::IdentifierReused]);
    assert!(of.missing().contains("an invalidation of EL2"), "{}", of.missing());
}
