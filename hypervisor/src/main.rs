//! A thin arm64 hypervisor on the engine's tables. It boots one guest, which need not know of it:
//! an unmodified Linux.
//!
//! It starts at EL2, on the `virt` machine of QEMU, with a device tree that says where the guest's
//! kernel was loaded. All memory below that is its own, and does not exist for the guest: it is in
//! no node of the guest's tree, and in no entry of stage 2. Memory above is mapped when it is
//! touched, and nothing is mapped before ([`common::vm`]).
//!
//! | | |
//! |---|---|
//! | [`machine`] | frames, barriers and invalidations, for the engine |
//! | [`world`] | the guests |
//! | [`guests`] | several guests in turn, with their interrupts and devices |
//! | [`identifiers`] | VMIDs of several guests |
//! | [`common`] | the guest's memory, its logs and its copy |
//! | [`exits`], [`trapped`] | exits of the guest, and its registers there |
//! | [`firmware`], [`power`] | the guest's firmware calls, and which of its CPUs are on |
//! | [`features`] | the features that it sees |
//! | [`cpu`] | registers of EL2, and the way into the guest |
//! | [`stage2`] | formats and capabilities |
//! | [`measure`] | flushes, for an emulator that counts |
//! | [`plant`] | planted bugs |
//! | [`check`] | tables of the engine, read by the processor and by the judge |
//! | [`tree`] | the device tree, the machine's and the guest's |
//!
//! The order of the boot: the startup code turns the MMU on with a map of two blocks. On it the
//! engine builds the map of all memory ([`own_map`]), which is loaded; then the guest's tree is
//! written into the guest's memory, and the guest is entered. Further processors are started when
//! the guest asks for them.
#![no_std]
#![no_main]

extern crate alloc;

mod check;
mod console;
mod count;
mod counters;
mod cpu;
mod exits;
mod features;
mod firmware;
mod guests;
mod identifiers;
mod machine;
mod measure;
mod options;
mod plant;
mod power;
mod rest;
mod stage2;
mod trapped;
mod tree;
mod world;

use alloc::vec::Vec;
use core::ops::Range;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use aarch64_rt::{InitialPagetable, entry, initial_pagetable};
use buddy_system_allocator::LockedHeap;
use dtoolkit::fdt::Fdt;
use tablewright::arch::arm64::Ids;
use tablewright::guest::{Guest, Slot, SlotCell};
use tablewright::linear::{LinearMap, MemoryMap};
use tablewright::shared::SharedSpace;
use tablewright::{
    AddressSpace, Attrs, Format as _, Ipa, Level, Mapping, Memory as MemoryType, Pa, Perms, Span,
    Va, format,
};
use tablewright_hypervisor_common as common;
use tablewright_hypervisor_common::host::Reason;
use tablewright_hypervisor_common::log::{Kind, Log};
use tablewright_hypervisor_common::memory::{Evictions, Leaves, Memory};
use tablewright_hypervisor_common::pieces::Pieces;
use tablewright_hypervisor_common::snapshot;
use tablewright_hypervisor_common::vm::Slots;

use identifiers::GUESTS;
use machine::Machine;
use options::{Measure, Options};
use power::{Power, State};
use stage2::{MARKS, Own, PAGE, Stage2, VMID};
use tree::Tree;
use world::{CONTROL_SLOT, MEMORY_SLOT, PIECE_SLOT, Vcpu, Vm};

/// The default address of the device tree: the start of memory.
const DEVICE_TREE: u64 = 0x4000_0000;

/// From one piece of the guest's memory to the next.
const APART: u64 = 16 << 30;

/// Registers of a device.
const REGISTERS: u64 = 4096;

/// The registers of one redistributor of the interrupt controller.
const REDISTRIBUTOR: u64 = 128 << 10;

entry!(main);

/// The map of the startup code, in blocks of 1 GiB: devices below, and the memory in which this was
/// loaded.
const BOOT_MAP: InitialPagetable = {
    // Accessed, a single privilege level, valid.
    let block = 1 << 10 | 1 << 6 | 1;
    let mut map = [0; 512];
    map[0] = block | 1 << 54 | 1 << 2; // never executed, Device-nGnRE
    map[1] = block | 1 << 30 | 3 << 8; // inner shareable, write-back
    InitialPagetable(map)
};

initial_pagetable!(BOOT_MAP, format::MAIR);

/// For the device tree, which is read and written once.
#[global_allocator]
static HEAP: LockedHeap<32> = LockedHeap::empty();

unsafe extern "C" {
    // Of the linker's script: only their addresses mean anything.
    static text_begin: u8;
    static rodata_begin: u8;
    static data_begin: u8;
    static dma_region: u8; // the end of the image
}

fn address(symbol: *const u8) -> u64 {
    symbol.expose_provenance() as u64
}

/// Memory of the hypervisor's that is given out once, from below.
struct Rest {
    next: u64,
    end: u64,
}

impl Rest {
    /// Takes a number of bytes from the end, at a multiple of that.
    fn take_end(&mut self, size: u64, multiple: u64) -> Option<Span<Pa>> {
        let first = self.end.checked_sub(size)? & !(multiple - 1);
        if first < self.next {
            return None;
        }
        self.end = first;
        Span::new(Pa::new(first), size).ok()
    }

    /// Room for so many atomics, zeroed.
    ///
    /// # Safety
    /// 1. All zeroes is a `T`.
    /// 2. What lies between `next` and `end` is free, and is mapped one to one.
    unsafe fn take<T>(&mut self, count: u64) -> &'static mut [T] {
        let first = self.next.next_multiple_of(PAGE);
        self.next = first + (count * size_of::<T>() as u64).next_multiple_of(PAGE);
        assert!(self.next <= self.end, "the hypervisor's memory is too small");
        let first = ptr::with_exposed_provenance_mut::<T>(first as usize);
        // SAFETY: in the memory that is free (2.), and given out only here.
        unsafe {
            first.write_bytes(0, count as usize);
            core::slice::from_raw_parts_mut(first, count as usize)
        }
    }
}

/// The map that the hypervisor runs on: all memory one to one, its code executable and not
/// writable, its constants neither.
fn own_map(
    machine: &'static Machine,
    tree: &Tree,
) -> Result<AddressSpace<Own, &'static Machine>, Reason> {
    let [text, rodata, data] =
        [&raw const text_begin, &raw const rodata_begin, &raw const data_begin].map(address);
    let span = |from: u64, to: u64| {
        Span::new(Pa::new(from), to - from).map_err(|_| "the image is not laid out in pages")
    };
    let special =
        [(span(text, rodata)?, Attrs::KERNEL_TEXT), (span(rodata, data)?, Attrs::KERNEL_RODATA)];
    let memory = MemoryMap { ram: &[tree.ram], reserved: &[], special: &special };
    let mut space = AddressSpace::<Own, _>::new(machine).ok_or("no memory for the root")?;
    LinearMap::new(Va::new(0), Mapping::new(Attrs::KERNEL_DATA))
        .build(&mut space, &memory)
        .map_err(|_| "the map of all memory cannot be made")?;
    // The devices that the hypervisor uses.
    for registers in [
        tree.uart.get()..tree.uart.get() + REGISTERS,
        tree.distributor..tree.distributor + (64 << 10),
        tree.redistributors.clone(),
    ] {
        let span = Span::new(Va::new(registers.start), registers.end - registers.start);
        span.ok()
            .and_then(|span| {
                let registers = Pa::new(registers.start);
                space.map(span, registers, Attrs::KERNEL_DEVICE).ok()
            })
            .ok_or("registers cannot be mapped")?;
    }
    space.make_own();
    Ok(space)
}

fn main(device_tree: u64, _: u64, _: u64, _: u64) -> ! {
    cpu::become_number(0);
    let at = match device_tree {
        0 => DEVICE_TREE,
        at => at,
    };
    match boot(at) {
        Ok(None) => guests::schedule::run(),
        Ok(Some((entry, argument))) => {
            let root = world::world().vm().guest.space().root();
            // SAFETY: the guest's tables, which map only what its slots hold.
            unsafe { cpu::enter(root, entry, argument) }
        }
        Err(reason) => panic!("{reason}"),
    }
}

/// Prepares the guest: returns its entry and its argument, or nothing if there are several.
fn boot(device_tree: u64) -> Result<Option<(u64, u64)>, Reason> {
    static MACHINE: spin::once::Once<Machine> = spin::once::Once::new();
    const HEAP_SIZE: u64 = 4 << 20;

    let image_end = address(&raw const dma_region);
    // SAFETY: behind the image, where nothing else is; `Rest` begins behind it.
    unsafe { HEAP.lock().init(image_end as usize, HEAP_SIZE as usize) };
    // SAFETY: put there by the loader, in the blocks that the startup code maps.
    let fdt = unsafe { Fdt::from_raw(ptr::with_exposed_provenance(device_tree as usize)) };
    let tree = Tree::read(&fdt.map_err(|_| "there is no device tree")?)?;
    console::set_up(tree.uart);
    let options = Options::read(&tree.arguments)?;
    let asked = options.common;
    let guest = tree.guest()?;
    if tree.cpus.len() > cpu::MOST {
        return Err("there are more processors than the hypervisor has stacks for");
    }

    // The rest of the hypervisor's memory: room for a copy of the guest at the end, side memory of
    // the guest's pages, and tables.
    let mut rest = Rest { next: image_end + HEAP_SIZE, end: guest.start().get() };
    let largest = asked.leaves.largest::<Machine>().max(2 << 20);
    let copy = match asked.snapshot {
        Some(_) => {
            let copy = rest.take_end(guest.size(), largest);
            Some(copy.ok_or("no memory for a copy of the guest")?)
        }
        None => None,
    };
    let pieces = match options.pieces {
        1 => Pieces::from(guest),
        count => Pieces::divide(guest, count, APART, largest)
            .ok_or("memory cannot be divided into so many pieces")?,
    };
    let pages = guest.size() / PAGE;
    let logged = asked.log.map_or(0, |_| pages.div_ceil(64));
    // SAFETY: zero is an atomic (1.); behind the image and the heap, below the guest, is nothing
    // else (2.).
    let (frames, scattered, words): (&[AtomicU32], &[AtomicBool], &mut [AtomicU64]) = unsafe {
        (rest.take(pages), rest.take(Memory::<Machine>::blocks(&pieces)), rest.take(2 * logged))
    };
    let tables =
        Span::new(Pa::new(rest.next), rest.end - rest.next).map_err(|_| "no memory for tables")?;
    if asked.leaves == Leaves::Huge && !Stage2::is_leaf_level(Level::new(2)) {
        return Err("with this granule there are no blocks of a third size");
    }
    if MARKS != (asked.log == Some(Kind::Hardware)) && asked.log.is_some() {
        return Err(
            "log=hardware is of a hypervisor that is built with hardware-dirty, and no other is",
        );
    }
    if MARKS && !Ids::read().caps().hardware_dirty {
        return Err("the processor does not mark what is written");
    }
    // With pages only there is a table for each 2 MiB, and those above them; and each processor
    // holds some in reserve.
    if tables.size() < guest.size() / 512 * 9 / 8 + (1 << 20) {
        return Err("the hypervisor's memory is too small for the guest's tables");
    }
    // SAFETY: the rest of the memory is the tables'.
    let machine = unsafe { Machine::new(tables, options.omit) }.ok_or("no memory for tables")?;
    let machine = MACHINE.call_once(|| machine);

    let mut own = own_map(machine, &tree)?;
    let map = own.root();
    // SAFETY: everything is where it was.
    unsafe { cpu::load_map(map) };

    if options.check != 0 {
        check::run(machine, tables, &mut own, options.check)?;
    }
    if options.several.count() != 0 {
        let given = (frames, scattered, words);
        boot_several(machine, &tree, &options, guest, given, map)?;
        return Ok(None);
    }
    let (guest, slots) = slots(machine, &tree, &pieces, asked.leaves)?;
    let memory = Memory::new(pieces, asked.leaves, asked.evict, frames, scattered, machine);
    let log = log(&options, &pieces, words)?;
    // The last processor is the hypervisor's where there is a log.
    let cpus = tree.cpus.len() - usize::from(log.is_some());
    let (blob, at) = tree.for_guest(&pieces, cpus)?;
    // SAFETY: memory of the guest's, behind everything that was loaded.
    unsafe {
        let to = ptr::with_exposed_provenance_mut::<u8>(at.get() as usize);
        ptr::copy_nonoverlapping(blob.as_ptr(), to, blob.len());
    }
    let entry = tree.kernel.start;
    let helper = tree.cpus.get(cpus).copied();
    let distributor = tree.distributor;
    let redistributor = tree.redistributors.start + cpus as u64 * REDISTRIBUTOR;
    let vcpu = |affinity| Vcpu { affinity, power: Power::off() };
    let vcpus: Vec<_> = tree.cpus.into_iter().take(cpus).map(vcpu).collect();
    if let Some(first) = vcpus.first() {
        first.power.set(State::On);
    }
    let vm = Vm::new(guest, memory, slots, log);
    let world = world::begin(alloc::vec![vm], vcpus, map);
    let vm = world.vm();
    if let Some(what) = options.measure {
        // SAFETY: the guest's tables, by whose VMID this processor invalidates.
        unsafe { cpu::confine(vm.guest.space().root()) };
        match (what, &vm.log) {
            (Measure::Start, Some(_)) => {
                cpu::count_instructions();
                let fault = |fault: &_| _ = world::fault(fault);
                snapshot::start_one(vm, fault, cpu::instructions);
            }
            (Measure::Start, None) => {
                return Err("the start of a log is measured, and there is none");
            }
            (Measure::Flush, _) => measure::flushes(vm)?,
        }
        smccc::psci::system_off::<smccc::Smc>().map_err(|_| "the machine cannot be powered off")?;
    }
    if let Some(helper) = helper {
        let run = move || {
            cpu::become_number(cpus);
            // SAFETY: the map that the first processor runs on; the guest's tables, by whose VMID
            // it invalidates; and its own part of the interrupt controller, which it uses for
            // nothing else.
            unsafe {
                cpu::load_map(world.map);
                cpu::confine(vm.guest.space().root());
                rest::set_up(distributor, redistributor);
            }
            snapshot::watch(vm, asked.snapshot, copy);
            loop {
                console::wait();
            }
        };
        firmware::launch(helper, cpus, run).map_err(|_| "the last processor does not start")?;
    }
    Ok(Some((entry, at.get())))
}

/// Side memory of guests: the frame of each page, the blocks of which pages have moved, marks.
type Given = (&'static [AtomicU32], &'static [AtomicBool], &'static mut [AtomicU64]);

/// Prepares several guests: the first vCPU of each waits for its turn, and the other processors
/// have theirs.
fn boot_several(
    machine: &'static Machine,
    tree: &Tree,
    options: &Options,
    all: Span<Ipa>,
    (mut frames, mut scattered, mut words): Given,
    map: Pa,
) -> Result<(), Reason> {
    let (several, common) = (&options.several, &options.common);
    if common.snapshot.is_some() || common.log == Some(Kind::Ring) {
        return Err("of several guests there are no snapshots, and no rings");
    }
    let processors = tree.cpus.len() - usize::from(common.log.is_some());
    let bits = match several.bits {
        0 => identifiers::BITS,
        bits => bits,
    };
    identifiers::set_up(machine, bits, processors)?;
    let areas = guests::start::areas(several, all)?;
    if areas.len() > GUESTS {
        return Err("too many guests");
    }
    let evict = Evictions { count: common.evict.count / areas.len() as u64, ..common.evict };
    let mut vms = Vec::new();
    for (number, area) in areas.iter().enumerate() {
        let pages = area.size() / PAGE;
        let (own, blocks, marks);
        let memory = Span::new(all.start(), area.size()).map_err(|_| "a guest has no memory")?;
        (own, frames) = frames.split_at(pages as usize);
        (blocks, scattered) = scattered
            .split_at_checked(Memory::<Machine>::blocks(&memory.into()) as usize)
            .ok_or("the guests have more blocks than there are")?;
        let mut space =
            AddressSpace::<Stage2, _>::new(machine).ok_or("no memory for a guest's root")?;
        identifiers::give(number, space.root());
        space.make_live();
        let space =
            SharedSpace::new(space).map_err(|_| "the guest's tables are the hypervisor's")?;
        let guest = Guest::new(space, Vec::leak(Vec::from([SlotCell::new()])));
        let slot = Slot {
            page: common.leaves.largest::<Machine>(),
            ..Slot::memory(memory, area.start().get())
        };
        guest.insert(slot).map_err(|_| "the guest's memory is no slot")?;
        let marked = common.log.map_or(0, |_| 2 * pages.div_ceil(64));
        (marks, words) = core::mem::take(&mut words).split_at_mut(marked as usize);
        let log = log(options, &memory.into(), marks)?;
        let memory = Memory::new(memory.into(), common.leaves, evict, own, blocks, machine);
        memory.move_to(*area);
        vms.push(Vm::new(guest, memory, [Some(slot), None, None, None], log));
    }
    guests::start::prepare(several, tree, &areas)?;
    let world = world::begin(vms, Vec::new(), map);
    let confine = || {
        identifiers::park();
        // SAFETY: the root that is loaded now maps nothing.
        unsafe { cpu::confine_several() };
    };
    confine();
    for (number, &affinity) in tree.cpus.iter().enumerate().skip(1) {
        let run = move || {
            cpu::become_number(number);
            // SAFETY: the map that the first processor runs on.
            unsafe { cpu::load_map(map) };
            confine();
            if number < processors {
                guests::schedule::run();
            }
            loop {
                for vm in world.vms.iter().filter(|vm| vm.log.is_some()) {
                    snapshot::log_for_a_while(vm);
                }
            }
        };
        firmware::launch(affinity, number, run).map_err(|_| "a processor does not start")?;
    }
    Ok(())
}

/// Makes the log that the options ask for.
fn log(
    options: &Options,
    guest: &Pieces,
    words: &'static mut [AtomicU64],
) -> Result<Option<Log>, Reason> {
    let Some(kind) = options.common.log else {
        return Ok(None);
    };
    let log = Log::new::<Machine>(kind, guest, words);
    log.map(Some).ok_or("the log has no memory")
}

/// Makes the guest, with slots of its memory and its devices. Nothing is mapped yet.
fn slots(
    machine: &'static Machine,
    tree: &Tree,
    pieces: &Pieces,
    leaves: Leaves,
) -> Result<(common::host::Guest<Machine>, Slots), Reason> {
    const USED: Perms = Perms::READ.union(Perms::WRITE);
    // Of each redistributor: control registers, and those of its own interrupts.
    const HALF: u64 = REDISTRIBUTOR / 2;

    let space = AddressSpace::<Stage2, _>::new(machine).ok_or("no memory for the guest's root")?;
    let mut space = space.with_id(VMID);
    space.make_live();
    let space = SharedSpace::new(space).map_err(|_| "the guest's tables are the hypervisor's")?;
    let cells = (0..32).map(|_| SlotCell::new()).collect();
    let slots = Guest::new(space, Vec::leak(cells));
    let mut memory = Slots::default();
    for (index, (place, (before, piece))) in memory.iter_mut().zip(pieces.iter()).enumerate() {
        let slot = Slot {
            page: leaves.largest::<Machine>(),
            ..Slot::memory(piece, pieces.start().get() + before)
        };
        let slot = match index {
            0 => slot.with_id(MEMORY_SLOT),
            more => slot.with_id(PIECE_SLOT + more as u16),
        };
        slots.insert(slot).map_err(|_| "the guest's memory is no slot")?;
        *place = Some(slot);
    }
    let insert = |number, registers: Range<u64>, perms| {
        let (first, end) = (registers.start & !(PAGE - 1), registers.end.next_multiple_of(PAGE));
        let registers =
            Span::new(Ipa::new(first), end - first).map_err(|_| "a device lies nowhere")?;
        let slot = Slot::memory(registers, first).with_id(number).with_perms(perms);
        slots
            .insert(Slot { memory: MemoryType::Device, page: PAGE, ..slot })
            .map_err(|_| "a device is no slot")
    };
    for (number, device) in (1..CONTROL_SLOT).zip(&tree.devices) {
        insert(number, device.clone(), USED)?;
    }
    for (number, _) in (0..).zip(&tree.cpus) {
        let first = tree.redistributors.start + u64::from(number) * REDISTRIBUTOR;
        insert(CONTROL_SLOT + number, first..first + HALF, Perms::READ)?;
        insert(
            CONTROL_SLOT + cpu::MOST as u16 + number,
            first + HALF..first + REDISTRIBUTOR,
            USED,
        )?;
    }
    Ok((slots, memory))
}
