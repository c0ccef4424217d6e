//! Guest memory: slots, faults and what they map, zaps.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tablewright::format::{Ept, Npt, Stage2K4, Stage2K16, Stage2K64};
use tablewright::guest::{
    Abort, Access, Backing, CLAIM, Cause, Declined, Fault, Gather, Guest, Log, Pass, Slot,
    SlotCell, SlotError, Zap,
};
use tablewright::shared::{CacheMaintenance, Mapped, Refused, SharedPlatform, SharedSpace};
use tablewright::{
    AddressSpace, Attrs, Change, Entry, Format, Ipa, Level, Memory, Pa, Perms, Platform, Span,
};
use tablewright_hosted::Threads;

type K4 = Stage2K4<40>;
type K16 = Stage2K16<40>;
type K64 = Stage2K64<40>;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn span(first: u64, size: u64) -> Span<Ipa> {
    Span::new(Ipa::new(first), size).unwrap()
}

fn cells<const N: usize>() -> [SlotCell; N] {
    [const { SlotCell::new() }; N]
}

type Vm<'s, F> = Guest<'s, F, &'s Threads>;

fn platform<F: Format>(clean: bool) -> Threads {
    Threads::new(700, F::PAGE_SHIFT, 2)
        .with_cache_maintenance(CacheMaintenance { clean, ..CacheMaintenance::NONE })
}

fn vm<'s, F: Format<Input = Ipa>>(platform: &'s Threads, cells: &'s mut [SlotCell]) -> Vm<'s, F> {
    let space = AddressSpace::new(platform).unwrap();
    Guest::new(SharedSpace::new(space).ok().unwrap(), cells)
}

/// A virtual CPU.
struct Vcpu<'g, 's, F: Format<Input = Ipa>> {
    gather: Gather<'g, 's, F, &'s Threads>,
    top_ups: u32,
}

impl<'g, 's, F: Format<Input = Ipa>> Vcpu<'g, 's, F> {
    fn of(vm: &'g Vm<'s, F>) -> Self {
        Self { gather: vm.gather(), top_ups: 0 }
    }

    /// Handles a fault on memory that lies in pages of `size` bytes, at guest address + 1 TiB / 16.
    fn fault(&mut self, fault: Fault, size: u64) -> Result<Mapped<F>, Refused<Ipa>> {
        self.fault_on(fault, Backing::new(Pa::new(fault.at.get() + (1 << 36)), size))
    }

    fn fault_on(&mut self, fault: Fault, page: Backing) -> Result<Mapped<F>, Refused<Ipa>> {
        let request = self.gather.guest().request(&fault).expect("a slot");
        assert!(self.gather.top_up(request.tables()));
        let mut mapped = Err(Refused::Retry);
        for _ in 0..4 {
            mapped = self.gather.map(&request, &page);
            let Err(Refused::NeedsTables(count)) = mapped else {
                break;
            };
            self.top_ups += 1;
            assert!(self.gather.top_up(count));
        }
        assert!(self.gather.finish(|_| ()).is_ok(), "no other walk");
        mapped
    }
}

fn size<F: Format<Input = Ipa>>(vm: &Vm<'_, F>, at: u64) -> Option<u64> {
    let leaf = vm.space().query(Ipa::new(at))?;
    assert_eq!(leaf.frame().get(), leaf.input().get() + (1 << 36));
    Some(leaf.size())
}

fn write(at: u64) -> Fault {
    Fault::new(Ipa::new(at), Access::Write)
}

fn read(at: u64) -> Fault {
    Fault::new(Ipa::new(at), Access::Read)
}

#[test]
fn slots_are_found_by_their_addresses_and_do_not_overlap() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<3>());
    let guest = vm::<K4>(&platform, &mut cells);
    let slot = |id, first, size| Slot::memory(span(first, size), u64::from(id) << 40).with_id(id);
    assert_eq!(guest.insert(slot(1, 4 * GIB, GIB)), Ok(()));
    assert_eq!(guest.insert(slot(2, 0, MIB)), Ok(()));
    assert_eq!(guest.insert(slot(3, 4 * GIB + GIB - 0x1000, 0x2000)), Err(SlotError::Overlap(1)));
    assert_eq!(guest.insert(slot(2, GIB, MIB)), Err(SlotError::Overlap(2)));
    assert_eq!(guest.insert(slot(3, 1 << 40, MIB)), Err(SlotError::OutOfRange));
    assert_eq!(guest.insert(slot(3, MIB, MIB)), Ok(()));
    assert_eq!(guest.insert(slot(4, GIB, MIB)), Err(SlotError::Full));
    let found = |at| guest.slot(Ipa::new(at)).map(|slot| slot.id);
    assert_eq!(found(0), Ok(2));
    assert_eq!(found(MIB - 1), Ok(2));
    assert_eq!(found(MIB), Ok(3));
    assert_eq!(found(2 * MIB), Err(SlotError::Unknown));
    assert_eq!(found(5 * GIB - 1), Ok(1));
    assert_eq!(found(5 * GIB), Err(SlotError::Unknown));
    assert!(guest.remove(7).is_err());
    assert!(guest.remove(3).is_ok());
    assert_eq!(found(MIB), Err(SlotError::Unknown));
    assert_eq!(found(4 * GIB), Ok(1));
    // One that does not fit leaves the old one.
    assert_eq!(guest.replace(slot(1, 0, MIB)).err(), Some(SlotError::Overlap(2)));
    assert_eq!(found(4 * GIB), Ok(1));
    assert!(guest.replace(slot(1, GIB, GIB)).is_ok());
    assert_eq!(found(GIB), Ok(1));
    assert_eq!(found(4 * GIB), Err(SlotError::Unknown));
    // The words of a slot survive.
    let device = Slot {
        memory: Memory::Device,
        page: 1 << 30,
        ..slot(9, 8 * GIB, GIB).with_log(Log::ByFault).with_perms(Perms::READ)
    };
    assert_eq!(guest.insert(device), Ok(()));
    assert_eq!(guest.slot(Ipa::new(8 * GIB)), Ok(device));
    let askew = Slot::memory(span(0x1000, 0x1000), 0);
    let (platform, mut cells) = (self::platform::<K64>(false), self::cells::<1>());
    let vm = vm::<K64>(&platform, &mut cells);
    assert_eq!(vm.insert(askew), Err(SlotError::Misaligned));
}

#[test]
fn a_fault_is_declined_where_nothing_is_or_nothing_is_allowed() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<2>());
    let vm = vm::<K4>(&platform, &mut cells);
    let rom = Slot::memory(span(0, MIB), 0x5000).with_perms(Perms::READ | Perms::EXEC);
    vm.insert(rom).unwrap();
    let asked = |fault: Fault| vm.request(&fault).map(|request| request.host());
    assert_eq!(asked(read(0x123)), Ok(0x5123));
    assert_eq!(asked(write(0x123)), Err(Declined::Denied(rom)));
    assert_eq!(asked(read(MIB)), Err(Declined::NoSlot));
}

#[test]
fn an_arm64_syndrome_is_classified() {
    let fault = |class: u64, iss: u64| Fault::arm64(class << 26 | iss, 0xabcd_1230, 0x7_7fff);
    let (data, instruction) = (0x24, 0x20);
    let page = 0xab_cd12_3000;
    let got = fault(data, 0b000100).unwrap();
    assert_eq!(got.at, Ipa::new(page | 0xfff));
    assert_eq!(
        (got.access, got.cause, got.level),
        (Access::Read, Cause::Translation, Some(Level::new(3)))
    );
    let got = fault(data, 1 << 6 | 0b001111).unwrap();
    assert_eq!(
        (got.access, got.cause, got.level),
        (Access::Write, Cause::Permission, Some(Level::PAGE))
    );
    let got = fault(instruction, 0b001010).unwrap();
    assert_eq!(
        (got.access, got.cause, got.level),
        (Access::Execute, Cause::AccessFlag, Some(Level::new(1)))
    );
    // With the root one level higher.
    assert_eq!(fault(data, 0b101011).unwrap().level, Some(Level::new(4)));
    // In a walk of stage 1: a read, unless it was a flag that could not be written.
    let got = fault(data, 1 << 7 | 1 << 6 | 0b000111).unwrap();
    assert_eq!((got.at, got.access), (Ipa::new(page), Access::Read));
    assert_eq!(fault(data, 1 << 7 | 0b001111).unwrap().access, Access::Write);
    assert_eq!(fault(instruction, 1 << 7 | 0b000111).unwrap().access, Access::Read);
    // The page is known but of a permission fault outside of a walk.
    let known = |iss| Abort::new(data << 26 | iss).unwrap().is_page_known();
    assert!(known(0b000111) && known(0b001011) && known(1 << 7 | 0b001111));
    assert!(!known(0b001111));
    // Cache maintenance.
    assert_eq!(fault(data, 1 << 8 | 1 << 6 | 0b000111).unwrap().access, Access::Read);
    // An external abort, an alignment fault, a TLB conflict, and an abort from the same level.
    for (class, iss) in [(data, 0b010000), (data, 0b100001), (data, 0b110000), (0x25, 0b000111)] {
        assert_eq!(fault(class, iss), None);
    }
}

#[test]
fn the_exits_of_x86_are_classified() {
    let got = Fault::ept(0b000_010, 0x1234);
    assert_eq!(
        (got.at, got.access, got.cause),
        (Ipa::new(0x1234), Access::Write, Cause::Translation)
    );
    let got = Fault::ept(0b101_010, 0);
    assert_eq!((got.access, got.cause), (Access::Write, Cause::Permission));
    let got = Fault::ept(0b001_100, 0);
    assert_eq!((got.access, got.cause), (Access::Execute, Cause::Permission));
    assert_eq!(Fault::ept(0b000_001, 0).access, Access::Read);
    // Only the guest's user may fetch.
    assert_eq!(Fault::ept(1 << 6 | 0b100, 0).cause, Cause::Permission);
    let got = Fault::nested(1 << 32 | 0b110, 0x5000).unwrap();
    assert_eq!((got.access, got.cause), (Access::Write, Cause::Translation));
    let got = Fault::nested(0b1_0101, 0).unwrap();
    assert_eq!((got.access, got.cause), (Access::Execute, Cause::Permission));
    assert_eq!(Fault::nested(0b1000, 0), None);
}

/// Faults on memory of every size: how large the leaf is that comes.
fn sizes<F: Format<Input = Ipa> + PartialEq>(clean: bool) {
    let (platform, mut cells) = (platform::<F>(clean), cells::<2>());
    let vm = vm::<F>(&platform, &mut cells);
    let mut cpu = Vcpu::of(&vm);
    let page = 1 << F::PAGE_SHIFT;
    let block = 1u64 << F::shift(Level::new(1));
    let ram = Slot { page: block, ..Slot::memory(span(0, 8 * GIB), 0) };
    vm.insert(ram).unwrap();
    let large = if clean && block > CLAIM { page } else { block };
    assert_eq!(cpu.fault(write(block + 5), page), Ok(Mapped::Installed));
    assert_eq!(size(&vm, block), Some(page));
    assert_eq!(cpu.top_ups, 0);
    assert_eq!(cpu.fault(write(3 * block + page), block), Ok(Mapped::Installed));
    assert_eq!(size(&vm, 3 * block + page), Some(large));
    // Two pages of the host: smaller than a block.
    assert_eq!(cpu.fault(write(4 * block), 2 * page), Ok(Mapped::Installed));
    assert_eq!(size(&vm, 4 * block), Some(page));
    // The page lies in a block, but not where the guest has it.
    let shifted = Backing::new(Pa::new((1 << 36) + page), block);
    assert_eq!(cpu.fault_on(write(6 * block), shifted), Ok(Mapped::Installed));
    assert_eq!(vm.space().query(Ipa::new(6 * block)).unwrap().size(), page);
    if clean {
        // One that is there is not cleaned again, nor by another fault.
        let before = platform.cleaned();
        assert_eq!(cpu.fault(write(3 * block + page), block), Ok(Mapped::Already));
        assert_eq!(platform.cleaned(), before);
    } else {
        assert_eq!(platform.cleaned(), 0);
    }
}

#[test]
fn a_leaf_is_as_large_as_the_page_behind_it_and_where_it_lies_allow() {
    for clean in [false, true] {
        sizes::<K4>(clean);
        sizes::<K16>(clean);
        sizes::<K64>(clean);
    }
    sizes::<Ept<4>>(false);
    sizes::<Npt<4>>(false);
}

#[test]
fn a_slot_that_ends_in_a_block_has_pages_there() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    let mut cpu = Vcpu::of(&vm);
    let ram = Slot::memory(span(MIB, 4 * MIB), 0);
    vm.insert(ram).unwrap();
    for (at, fits) in [(MIB, 4096), (2 * MIB, 2 * MIB), (4 * MIB, 4096)] {
        assert_eq!(cpu.fault(read(at), GIB), Ok(Mapped::Installed));
        assert_eq!(size(&vm, at), Some(fits));
    }
}

#[test]
fn a_gigabyte_grows_by_cleaning_2_mib_at_a_time() {
    let (platform, mut cells) = (platform::<K4>(true), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    let mut cpu = Vcpu::of(&vm);
    vm.insert(Slot::memory(span(0, 4 * GIB), 0)).unwrap();
    // In an order that leaves holes everywhere.
    for block in 0..512 {
        let at = GIB + (block * 331 % 512) * CLAIM;
        let mapped = cpu.fault(write(at), GIB);
        assert_eq!(platform.cleaned(), (block + 1) * CLAIM);
        let last = block == 511;
        assert_eq!(mapped, Ok(if last { Mapped::Collapsed } else { Mapped::Installed }));
        assert_eq!(size(&vm, at), Some(if last { GIB } else { CLAIM }));
    }
    // It serves another fault in it as it is.
    assert_eq!(cpu.fault(write(GIB + 5 * CLAIM), GIB), Ok(Mapped::Already));
    assert_eq!(size(&vm, GIB), Some(GIB));
    // The root has two tables, and nothing is below.
    assert_eq!(platform.tables(), 2 + cpu.gather.tables() as u64);
}

#[test]
fn what_was_split_for_a_log_comes_together_without_being_cleaned() {
    let (platform, mut cells) = (platform::<K4>(true), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    let mut cpu = Vcpu::of(&vm);
    let ram = Slot::memory(span(0, 4 * GIB), 0);
    vm.insert(ram).unwrap();
    assert_eq!(cpu.fault(write(0), CLAIM), Ok(Mapped::Installed));
    let zap = vm.replace(ram.with_log(Log::ByFault)).unwrap();
    protect(zap, &mut cpu.gather);
    // A read of a logged slot gives no permission to write, and takes nothing apart.
    assert_eq!(cpu.fault(read(0x3000), CLAIM), Ok(Mapped::Already));
    assert_eq!(size(&vm, 0), Some(CLAIM));
    let fault = Fault { cause: Cause::Permission, level: Some(Level::new(1)), ..write(0x5000) };
    let request = vm.request(&fault).unwrap();
    assert!(request.is_logged_write());
    assert_eq!(request.tables(), 1);
    assert_eq!(cpu.fault(fault, CLAIM), Ok(Mapped::Relaxed));
    let writable = |at| {
        let leaf = vm.space().query(Ipa::new(at)).unwrap();
        leaf.attrs().perms.intersects(Perms::ANY_WRITE)
    };
    assert!(writable(0x5000) && !writable(0x4000));
    assert_eq!(size(&vm, 0x4000), Some(4096));
    assert_eq!(platform.cleaned(), CLAIM);
    // Logging is over.
    drop(vm.replace(ram).unwrap());
    assert_eq!(cpu.fault(write(0x4000), CLAIM), Ok(Mapped::Collapsed));
    assert_eq!(size(&vm, 0x4000), Some(CLAIM));
    assert_eq!(platform.cleaned(), CLAIM);
    unmap(vm.remove(0).unwrap(), &mut cpu.gather);
    assert_eq!(size(&vm, 0x4000), None);
    // Where a page was never mapped, it is cleaned when it becomes part of a block.
    vm.insert(ram.with_log(Log::ByFault)).unwrap();
    assert_eq!(cpu.fault(write(0), CLAIM), Ok(Mapped::Installed));
    drop(vm.replace(ram).unwrap());
    assert_eq!(cpu.fault(write(0x4000), CLAIM), Ok(Mapped::Collapsed));
    assert_eq!(platform.cleaned(), 2 * CLAIM);
}

fn protect<'g, 's, F: Format<Input = Ipa>>(
    mut zap: Zap<'g, 's, F, &'s Threads>,
    gather: &mut Gather<'g, 's, F, &'s Threads>,
) {
    let change = Change::new().write_protect();
    while zap.protect(gather, change).unwrap() != Pass::Over {
        assert!(gather.finish(|_| ()).is_ok());
    }
}

fn unmap<'g, 's, F: Format<Input = Ipa>>(
    mut zap: Zap<'g, 's, F, &'s Threads>,
    gather: &mut Gather<'g, 's, F, &'s Threads>,
) {
    let all = |_| ControlFlow::Continue(());
    while zap.unmap(gather, all) == Ok(Pass::Went) {
        assert!(gather.finish(|_| ()).is_ok());
    }
    assert_eq!(zap.unmap(gather, all), Ok(Pass::Over));
}

#[test]
fn what_was_looked_up_before_a_zap_is_not_mapped_after_it() {
    let (platform, mut cells) = (platform::<Ept<4>>(false), cells::<1>());
    let vm = vm::<Ept<4>>(&platform, &mut cells);
    vm.insert(Slot::memory(span(0, GIB), 0)).unwrap();
    let request = vm.request(&write(0x1000)).unwrap();
    let mut zap = vm.zap(span(0x1000, 0x1000));
    let mut gather = vm.gather();
    let page = Backing::new(Pa::new(0x9000), 4096);
    assert!(gather.top_up(3));
    assert_eq!(gather.map(&request, &page), Err(Refused::Retry));
    // One that has begun to map is waited for.
    let walk = platform.enter();
    let mut other = vm.zap(span(0x1000, 0x1000));
    let all = |_| ControlFlow::Continue(());
    assert_eq!(other.unmap(&mut gather, all), Ok(Pass::Waiting));
    drop(walk);
    assert_eq!(other.unmap(&mut gather, all), Ok(Pass::Went));
    assert_eq!(other.unmap(&mut gather, all), Ok(Pass::Over));
    assert_eq!(zap.unmap(&mut gather, all), Ok(Pass::Went));
    // Looked up after it, it is mapped.
    let request = vm.request(&write(0x1000)).unwrap();
    assert_eq!(gather.map(&request, &page), Ok(Mapped::Installed));
    assert!(gather.finish(|_| ()).is_ok());
}

/// The entry of the block at 0.
fn entry_of_first_block<'p>(vm: &Vm<'_, K4>, platform: &'p Threads) -> &'p Entry {
    let (mut frame, mut level) = (vm.space().root(), K4::root_level());
    loop {
        // SAFETY: a table of the guest's tree.
        let entry = unsafe { platform.table(frame, level).as_ref() };
        match level.down() {
            Some(below) if below != Level::PAGE => {
                (frame, level) = (K4::address(entry.load(), level), below);
            }
            _ => return entry,
        }
    }
}

/// A claim in one part is waited for, though the other parts had none.
#[test]
fn a_zap_in_parts_comes_again_for_what_it_has_passed_over() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    vm.insert(Slot::memory(span(0, GIB), 0)).unwrap();
    for block in 0..3 {
        Vcpu::of(&vm).fault(write(block * 2 * MIB), 2 * MIB).unwrap();
    }
    let first = entry_of_first_block(&vm, &platform);
    // A leaf that another is about to put back, split.
    let leaf = first.exchange(K4::FROZEN | 1 << 12);
    let (mut zap, mut gather) = (vm.zap(span(0, 6 * MIB)), vm.gather());
    let one = |_| ControlFlow::Break(());
    assert_eq!(zap.unmap(&mut gather, one), Ok(Pass::Went));
    let rest = |_| ControlFlow::Continue(());
    assert_eq!(zap.unmap(&mut gather, rest), Ok(Pass::Went));
    assert!(gather.finish(|_| ()).is_ok());
    // The claim is still there.
    assert_eq!(zap.unmap(&mut gather, rest), Ok(Pass::Went));
    assert!(gather.finish(|_| ()).is_ok());
    first.exchange(leaf);
    while zap.unmap(&mut gather, rest) == Ok(Pass::Went) {
        assert!(gather.finish(|_| ()).is_ok());
    }
    assert_eq!(zap.unmap(&mut gather, rest), Ok(Pass::Over));
    assert!(vm.space().query(Ipa::new(0)).is_none());
}

/// A fault for which there is a leaf takes no tables, and does not come again for the leaf that is
/// there.
#[test]
fn a_fault_on_a_leaf_that_is_there_takes_no_tables() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    let slot = Slot::memory(span(4 * GIB, GIB), 0x7000_0000);
    vm.insert(slot).unwrap();
    let at = 4 * GIB + 0x5123;
    let by = |cause| Fault { cause, ..write(at) };
    let tables = |cause| vm.request(&by(cause)).unwrap().tables();
    assert_eq!((tables(Cause::AccessFlag), tables(Cause::Permission)), (0, 0));
    assert!(tables(Cause::Translation) > 0 && tables(Cause::Unknown) > 0);
    assert_eq!(vm.request(&by(Cause::Translation)).unwrap().host(), 0x7000_5123);
    let mut vcpu = Vcpu::of(&vm);
    assert_eq!(vcpu.fault(by(Cause::Translation), 4096), Ok(Mapped::Installed));
    let accessed = || vm.space().query(Ipa::new(at)).unwrap().attrs().accessed;
    for cause in [Cause::Permission, Cause::Unknown] {
        assert!(vcpu.gather.age(slot.guest, |_| ()).is_ok());
        assert!(vcpu.gather.finish(|_| ()).is_ok() && !accessed());
        assert_eq!(vcpu.fault(by(cause), 4096), Ok(Mapped::Already));
        assert!(accessed(), "{cause:?}");
    }
    drop(vm.replace(slot.with_log(Log::ByFault)).unwrap());
    assert!(tables(Cause::Permission) > 0, "a large leaf is taken apart");
}

/// A bit of the software's says what the host may give back by itself: it goes when writing is
/// taken away for good, and stays when something else changes.
#[test]
fn a_zap_that_takes_no_writing_away_leaves_what_the_host_knows() {
    for (change, stays) in [
        (Change::new().write_protect(), false),
        (Change::new().perms(Attrs::GUEST_MEMORY.perms - Perms::ANY_WRITE), false),
        (Change::new().perms(Attrs::GUEST_MEMORY.perms), true),
        (Change::new().accessed(false), true),
    ] {
        let (platform, mut cells) = (platform::<K4>(false), cells::<1>());
        let vm = vm::<K4>(&platform, &mut cells);
        vm.insert(Slot::memory(span(0, GIB), 0)).unwrap();
        Vcpu::of(&vm).fault(write(0x1000), 4096).unwrap();
        let software = || vm.space().query(Ipa::new(0x1000)).unwrap().attrs().software;
        let before = software();
        assert_ne!(before, 0);
        let (mut zap, mut gather) = (vm.zap(span(0x1000, 0x1000)), vm.gather());
        while zap.protect(&mut gather, change).unwrap() != Pass::Over {
            assert!(gather.finish(|_| ()).is_ok());
        }
        assert_eq!(software(), if stays { before } else { 0 }, "{change:?}");
    }
}

/// The host has to be asked where a page may not be written for its sake.
#[test]
fn what_the_host_does_not_let_be_written_is_not_reopened() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    vm.insert(Slot::memory(span(0, GIB), 0)).unwrap();
    for (at, perms, expected) in
        [(0x1000, Perms::all() - Perms::ANY_WRITE, false), (0x2000, Perms::all(), true)]
    {
        let page = Backing::new(Pa::new(at + (1 << 36)), 4096).with_perms(perms);
        assert_eq!(Vcpu::of(&vm).fault_on(read(at), page), Ok(Mapped::Installed));
        assert_eq!(vm.reopen(&vm.request(&write(at)).unwrap()), Ok(expected));
    }
}

/// Leaves that another is about to put back are passed over by the start of a log, which says so.
#[test]
fn a_log_that_passes_over_a_claim_when_it_starts_says_so() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    let slot = Slot::memory(span(0, GIB), 0).with_log(Log::ByModification);
    vm.insert(slot).unwrap();
    let mut cpu = Vcpu::of(&vm);
    cpu.fault(write(0x5000), 4096).unwrap();
    assert!(!cpu.gather.begin_modification_log(&slot).unwrap().passed_over);
    let first = entry_of_first_block(&vm, &platform);
    let table = first.exchange(K4::FROZEN | 1 << 12);
    assert!(cpu.gather.begin_modification_log(&slot).unwrap().passed_over);
    first.exchange(table);
    assert!(cpu.gather.finish(|_| ()).is_ok());
}

/// A gather keeps the tables that it has not used, until it is told to give them back.
#[test]
fn tables_that_were_not_used_are_given_back() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    let before = platform.tables();
    let mut gather = vm.gather();
    assert!(gather.top_up(3));
    assert!(gather.finish(|_| ()).is_ok());
    assert_eq!(platform.tables(), before + 3);
    gather.release_tables();
    assert_eq!(platform.tables(), before);
}

/// A harvest beside an eviction was told that the slots were being changed.
#[test]
fn a_zap_is_no_change_of_the_slots() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<2>());
    let guest = vm::<K4>(&platform, &mut cells);
    let slot = Slot::memory(span(0, MIB), 0).with_log(Log::ByFault);
    guest.insert(slot).unwrap();
    let mut gather = guest.gather();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                drop(guest.zap(span(0, MIB)));
            }
        });
        let looked_up = (0..20_000).try_for_each(|_| {
            guest.slot(Ipa::new(0))?;
            gather.protect(&slot, 0..1)?;
            guest.replace(slot).map(drop)
        });
        done.store(true, Ordering::Relaxed);
        assert_eq!(looked_up, Ok(()));
    });
}

#[test]
fn everything_is_dropped_at_once_and_reclaimed_later() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    let mut cpu = Vcpu::of(&vm);
    vm.insert(Slot::memory(span(0, 64 * GIB), 0)).unwrap();
    for gigabyte in 0..64 {
        cpu.fault(write(gigabyte * GIB + 0x5000), 4096).unwrap();
    }
    let held = platform.tables();
    assert!(held > 128);
    let mut zap = vm.zap_all();
    let (all, mut gather) = (|_| ControlFlow::Continue(()), vm.gather());
    assert_eq!(zap.unmap(&mut gather, all), Ok(Pass::Went));
    assert_eq!(zap.unmap(&mut gather, all), Ok(Pass::Over));
    let deferred = gather.issue().complete();
    assert_eq!(platform.tables(), held);
    assert_eq!(size(&vm, 0x5000), None);
    drop(zap);
    // The guest goes on while what was below waits.
    cpu.fault(write(0x5000), 4096).unwrap();
    let mut pages = 0;
    deferred.try_complete().ok().unwrap().finish(|_| pages += 1);
    assert_eq!(pages, 64);
    assert!(platform.tables() < 8);
}

#[test]
fn a_page_that_the_host_replaced_is_cleaned_like_a_new_one() {
    let (platform, mut cells) = (platform::<K4>(true), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    let mut cpu = Vcpu::of(&vm);
    vm.insert(Slot::memory(span(0, GIB), 0)).unwrap();
    // Shared with others until it is written.
    let zero = Backing::new(Pa::new(0x10_0000), 4096).with_perms(Perms::READ);
    assert_eq!(cpu.fault_on(read(0x7000), zero), Ok(Mapped::Installed));
    assert_eq!(cpu.fault_on(write(0x7000), zero), Err(Refused::Denied));
    let own = Backing::new(Pa::new(0x20_0000), 4096);
    assert!(matches!(cpu.fault_on(write(0x7000), own),
            Ok(Mapped::Replaced(old)) if old.frame() == Pa::new(0x10_0000)));
    assert_eq!(platform.cleaned(), 2 * 4096);
}

#[test]
fn a_device_is_never_cleaned() {
    let (platform, mut cells) = (platform::<K4>(true), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    let mut cpu = Vcpu::of(&vm);
    let device = Slot {
        memory: Memory::Device,
        ..Slot::memory(span(0, GIB), 0).with_perms(Perms::READ | Perms::WRITE)
    };
    vm.insert(device).unwrap();
    assert_eq!(cpu.fault(write(0), GIB), Ok(Mapped::Installed));
    assert_eq!(size(&vm, 0), Some(GIB));
    assert_eq!(platform.cleaned(), 0);
}

#[test]
fn accessed_pages_are_found_once() {
    let (platform, mut cells) = (platform::<K4>(false), cells::<1>());
    let vm = vm::<K4>(&platform, &mut cells);
    let mut cpu = Vcpu::of(&vm);
    vm.insert(Slot::memory(span(0, GIB), 0)).unwrap();
    for page in 0..10 {
        cpu.fault(read(page << 12), 4096).unwrap();
    }
    let age = || {
        let (mut young, mut gather) = (Vec::new(), vm.gather());
        let aged = gather.age(span(0, GIB), |leaf| young.push(leaf.input().get() >> 12));
        assert_eq!(aged.unwrap().changed, !young.is_empty());
        assert!(gather.finish(|_| ()).is_ok());
        young
    };
    assert_eq!(age(), (0..10).collect::<Vec<_>>());
    assert_eq!(age(), []);
    let touched = Fault { cause: Cause::AccessFlag, ..read(3 << 12) };
    vm.set_accessed(&touched).unwrap();
    assert_eq!(age(), [3]);
}
