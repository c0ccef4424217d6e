//! Which fences a RISC-V hart executes, or has others execute, for a flush, against what a TLB then
//! holds.

use std::cell::RefCell;

use tablewright::arch::riscv64::*;
use tablewright::format::{Sv39, Sv39x4, Sv48, Sv57};
use tablewright::guest::{Access, Cause, Fault};
use tablewright::shootdown::{Cpus, LocalFlush, Messenger};
use tablewright::{Caps, Invalidation, Ipa, Level, Pa, Stale, What};

/// A translation that a hart remembers, or, without an address, what it remembers of tables.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Remembered {
    asid: u16,
    page: Option<u64>,
    global: bool,
}

/// Whether a fence is about it (PRIV 10.2.1): an address about leaves alone, an identifier about
/// what is not global.
fn is_fenced(one: &Remembered, at: Option<u64>, asid: Option<u16>) -> bool {
    at.is_none_or(|at| one.page == Some(at >> 12))
        && asid.is_none_or(|asid| !one.global && one.asid == asid)
}

/// Removes what an instruction invalidates. One without order does so when the order is made.
fn after(memory: &mut Vec<Remembered>, instruction: Instruction, open: &mut Option<Vec<u64>>) {
    match instruction {
        Instruction::Sfence { at, asid } | Instruction::Hfence { at, vmid: asid } => {
            assert!(open.is_none());
            memory.retain(|one| !is_fenced(one, at, asid));
        }
        Instruction::Begin => assert_eq!(open.replace(Vec::new()), None),
        Instruction::Sinval { at, asid } => {
            open.as_mut().expect("behind SFENCE.W.INVAL").push(at);
            memory.retain(|one| !is_fenced(one, Some(at), asid));
        }
        Instruction::End => assert!(open.take().is_some_and(|all| !all.is_empty())),
    }
}

/// Pages 0 to 7 and tables, under three identifiers, and global pages.
fn memory() -> Vec<Remembered> {
    let pages = || (0..8).map(Some).chain([None]);
    let one = |asid, page, global| Remembered { asid, page, global };
    let own = |asid| pages().map(move |page| one(asid, page, false));
    let global = pages().map(|page| one(0, page, true));
    [0, 5, 9].into_iter().flat_map(own).chain(global).collect()
}

fn is_named(flush: &Invalidation<'_>, one: &Remembered) -> bool {
    let whose = match one.global {
        true => flush.global,
        false => one.asid == flush.id,
    };
    whose
        && match (flush.what, one.page) {
            (What::Everything, _) => true,
            (What::Ranges(ranges), None) => ranges.iter().any(|range| range.tables),
            (What::Ranges(ranges), Some(page)) => {
                (ranges.iter()).any(|range| (range.first >> 12..=range.last >> 12).contains(&page))
            }
        }
}

fn range(first: u64, last: u64, tables: bool) -> Stale {
    Stale { first: first << 12, last: (last << 12) | 0xfff, level: None, tables }
}

/// Flushes of every kind, of the space with identifier 5.
fn each_flush(mut check: impl FnMut(&Invalidation<'_>)) {
    let some = [range(1, 1, false), range(4, 6, false)];
    let cut = [range(1, 1, false), range(4, 6, true)];
    for what in [What::Everything, What::Ranges(&some), What::Ranges(&cut)] {
        for global in [false, true] {
            check(&Invalidation { root: Pa::new(0x1000), id: 5, global, what });
        }
    }
}

#[test]
fn what_a_flush_names_is_forgotten_and_no_other_space() {
    for svinval in [false, true] {
        let features = Features { svinval, ..Features::LEAST };
        for cpu in [Cpu::new(features), Cpu::of_guests(features)] {
            each_flush(|flush| {
                let (mut memory, mut open) = (memory(), None);
                cpu.instructions(flush, |one| after(&mut memory, one, &mut open));
                assert_eq!(open, None, "the order is made");
                for one in &memory {
                    assert!(!is_named(flush, one), "{flush:x?} {one:?}");
                }
                if !flush.global {
                    assert_eq!(memory.iter().filter(|one| one.global).count(), 9);
                    assert_eq!(memory.iter().filter(|one| one.asid == 9).count(), 9);
                }
            });
        }
    }
}

#[test]
fn what_a_hart_is_told_is_forgotten() {
    let cpu = Cpu::new(Features::LEAST);
    let left = |what| {
        let (mut memory, mut open) = (memory(), None);
        cpu.forgetting(&what, |one| after(&mut memory, one, &mut open));
        memory
    };
    assert!(left(LocalFlush::Everything).is_empty() && left(LocalFlush::All).is_empty());
    assert!(left(LocalFlush::Space(5)).iter().all(|one| one.global || one.asid != 5));
    for global in [false, true] {
        let (id, range) = (5, range(3, 4, false));
        for one in left(LocalFlush::Range { id, range, global }) {
            let whose = if one.global { global } else { one.asid == 5 };
            assert!(!(whose && matches!(one.page, Some(3..=4))), "{one:?}");
        }
    }
}

#[test]
fn a_large_leaf_takes_one_fence() {
    let large = |first, last, level| {
        let level = Some(Level::new(level));
        let stale = [Stale { first, last, level, tables: false }];
        let what = What::Ranges(&stale);
        let flush = Invalidation { root: Pa::new(0), id: 0, global: true, what };
        let mut all = Vec::new();
        Cpu::of_guests(Features::LEAST).instructions(&flush, |one| all.push(one));
        all
    };
    let fence = |at| Instruction::Hfence { at: Some(at), vmid: None };
    assert_eq!(large(0x20_0000, 0x5f_ffff, 1), [fence(0x20_0000), fence(0x40_0000)]);
    assert_eq!(large(0x4020_0000, 0x4020_0fff, 2), [fence(0x4000_0000)]);
    assert_eq!(large(u64::MAX - 0xfff, u64::MAX, 0), [fence(u64::MAX - 0xfff)]);
}

/// A message: the mask, the first hart, the fence.
type Sent = (u64, u64, Fence);

struct Firmware(RefCell<Vec<Sent>>, u64);

// SAFETY: there are no harts.
unsafe impl Fences for Firmware {
    fn fence(&self, mask: u64, base: u64, what: &Fence) -> bool {
        self.0.borrow_mut().push((mask, base, *what));
        base != self.1
    }
}

fn set(cpus: &[usize]) -> Cpus {
    let mut all = Cpus::EMPTY;
    cpus.iter().for_each(|&cpu| assert!(all.insert(cpu)));
    all
}

#[test]
fn the_firmware_tells_the_harts_that_it_is_told_of_all_of_a_flush() {
    each_flush(|flush| {
        let firmware = Rfence::new(Firmware(RefCell::default(), 999), &[3, 1, 2, 70], false);
        let mut cpus = set(&[0, 1, 3, 4]);
        firmware.tell(flush, &mut cpus);
        assert_eq!(cpus, set(&[4]), "one without a hart is left");
        let sent = firmware.fences().0.take();
        for hart in [1, 3, 70] {
            let mut memory = memory();
            for (mask, base, fence) in &sent {
                if hart >= *base && hart - base < 64 && mask >> (hart - base) & 1 != 0 {
                    assert!(!fence.guest);
                    let (start, size) = fence.range.unwrap_or((0, u64::MAX));
                    memory.retain(|one| {
                        let about = match one.page {
                            Some(page) => page << 12 >= start && (page << 12) - start < size,
                            None => fence.range.is_none(),
                        };
                        !(about && is_fenced(one, None, fence.id))
                    });
                }
            }
            assert!(!memory.iter().any(|one| is_named(flush, one)), "hart {hart}: {flush:x?}");
        }
        let harts = sent.iter().map(|(mask, base, _)| (mask, base));
        assert!(!harts.clone().any(|(mask, base)| *base <= 2 && mask >> (2 - base) & 1 != 0));
    });
}

#[test]
fn a_hart_that_the_firmware_cannot_tell_is_left() {
    let flush = Invalidation { root: Pa::new(0), id: 5, global: false, what: What::Everything };
    let firmware = Rfence::new(Firmware(RefCell::default(), 70), &[1, 70], true);
    let mut cpus = set(&[0, 1]);
    firmware.tell(&flush, &mut cpus);
    assert_eq!(cpus, set(&[1]));
    assert!(firmware.fences().0.borrow().iter().all(|(.., fence)| fence.guest));
}

#[test]
fn a_call_of_the_firmware_is_that_of_the_specification() {
    // SBI 8: function numbers 1 to 4.
    let call = |guest, id| Fence { range: Some((0x1000, 0x2000)), id, guest }.call();
    assert_eq!(call(false, None), (1, [0x1000, 0x2000, 0]));
    assert_eq!(call(false, Some(7)), (2, [0x1000, 0x2000, 7]));
    assert_eq!(call(true, Some(7)), (3, [0x1000, 0x2000, 7]));
    assert_eq!(call(true, None), (4, [0x1000, 0x2000, 0]));
}

#[test]
fn the_register_holds_mode_identifier_and_root() {
    let root = Pa::new(0x1234_5000);
    assert_eq!(satp::<Sv39>(root, 0xffff), Some(0x8fff_f000_0001_2345));
    assert_eq!(satp::<Sv48>(root, 0), Some(0x9000_0000_0001_2345));
    assert_eq!(satp::<Sv57>(root, 1), Some(0xa000_1000_0001_2345));
    assert_eq!(satp::<Sv39x4>(Pa::new(0x1234_4000), 0x3fff), Some(0x83ff_f000_0001_2344));
    assert_eq!(satp::<Sv39x4>(root, 0x4000), None);
}

#[test]
fn extensions_are_found_by_their_names_alone() {
    let of = Features::from_isa;
    assert_eq!(of("rv64imac"), Features::LEAST);
    // The letters of longer names are none.
    assert_eq!(of("rv64imafdc_zihintpause_sstc"), Features::LEAST);
    assert_eq!(of("rv64imafdcsvinvalh"), Features::LEAST);
    assert_eq!(of(""), Features::LEAST);
    assert_eq!(of("rv\u{e9}64h"), Features::LEAST);
    assert!(of("RV64IMAFDCH_SVPBMT").hypervisor && of("rv64h_Svvptc_svnapot").svvptc);
    let caps = of("rv64imac_svade_svvptc").caps();
    assert!(!caps.hardware_access && !caps.hardware_dirty && !caps.invalid_entries_cached);
    assert!(of("rv64imac_svade_svadu").caps().hardware_dirty);
    let most = Caps { invalid_entries_cached: true, ..Caps::CONSERVATIVE };
    assert_eq!(Features::LEAST.caps(), Caps { largest_leaf: Level::ANY, ..most });
    let both = of("rv64_svade_svinval").and(of("rv64_svinval_svpbmt"));
    assert_eq!(both, Features { svinval: true, ..Features::LEAST });
    // Hardware sets no flags if neither hart does.
    let faults = of("rv64_svade");
    assert!(!faults.and(faults).caps().hardware_access);
    for other in ["rv64", "rv64_svade_svadu", "rv64_svadu"] {
        for both in [faults.and(of(other)), of(other).and(faults)] {
            assert!(both.caps().hardware_access && both.caps().hardware_dirty, "{other}");
        }
    }
}

#[test]
fn a_fault_of_a_guest_is_classified() {
    let got = |scause, htinst| guest_fault(scause, 0x7_1236, 0x1234_5678, htinst);
    let at = 0x1234_5678 << 2;
    // Instructions of the guest: a load (LW) may be told, in full or not at all.
    for (scause, htinst, access, low) in [
        (20, 0, Access::Execute, 2),
        (21, 0, Access::Read, 2),
        (23, 0, Access::Write, 2),
        (21, 0x2003, Access::Read, 2),
        // Its tables are read, or a flag is set in them, for whatever access.
        (20, 0x3000, Access::Read, 0),
        (23, 0x2000, Access::Read, 0),
        (20, 0x3020, Access::Write, 0),
        (21, 0x2020, Access::Write, 0),
    ] {
        let fault = got(scause, htinst).unwrap();
        let expected = Fault { cause: Cause::Unknown, ..Fault::new(Ipa::new(at | low), access) };
        assert_eq!(fault, expected, "{scause}, {htinst:#x}");
    }
    // Page faults of its own, a virtual instruction, an interrupt.
    for scause in [12, 13, 15, 22, 1 << 63 | 21] {
        assert_eq!(got(scause, 0), None);
    }
}
