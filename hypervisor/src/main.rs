//! A thin arm64 hypervisor on the engine's tables. It boots one guest, which need not know of it:
//! an unmodified Linux.
//!
//! It starts at EL2, on the `virt` machine of QEMU, with a device tree that says where the guest's
//! kernel was loaded. All memory below that is its own, and does not exist for the guest: it is in
//! no node of the guest's tree, and in no entry of stage 2. What is above is mapped when it is
//! touched, and nothing is mapped before ([`vm`]).
//!
//! | | |
//! |---|---|
//! | [`machine`] | what the engine asks for: frames, barriers, invalidations |
//! | [`vm`] | the guest's memory |
//! | [`guests`] | several guests in turn, with their interrupts and devices |
//! | [`identifiers`] | VMIDs of several guests |
//! | [`common`](tablewright_hypervisor_common) | which frames it is on, and how they are taken away; what it writes, logged, and copied while it runs |
//! | [`exits`] | what brings the guest here |
//! | [`firmware`] | the guest's firmware calls |
//! | [`features`] | what it is told that its CPUs can do |
//! | [`power`] | which of its CPUs are on |
//! | [`cpu`] | registers of EL2, and the way into the guest |
//! | [`measure`] | flushes, for an emulator that counts |
//! | [`report`] | what an emulator that watches cannot see |
//! | [`plant`] | bugs that are made on purpose |
//! | [`check`] | tables of the engine, read by the processor and by the judge |
//! | [`tree`] | the device tree, and what of it the guest is told |
//!
//! The order of the boot: the startup code turns the MMU on with a map of two blocks. On it the
//! engine builds the map of all memory ([`own_map`]), which is loaded; then the guest's tree is
//! written into the guest's memory, and the guest is entered. Further processors are started when
//! the guest asks for them.
#![no_std]
#![no_main]

extern crate alloc;

mod check;
mod counters;
mod cpu;
mod edits;
mod exits;
mod features;
mod firmware;
mod guests;
mod identifiers;
mod machine;
mod measure;
mod plant;
mod power;
mod report;
mod reports;
mod rest;
mod tree;
mod vm;

use alloc::vec::Vec;
use core::fmt::Write as _;
use core::ops::Range;
use core::panic::PanicInfo;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use aarch64_rt::{InitialPagetable, entry, initial_pagetable};
use arm_pl011_uart::{Uart, UniqueMmioPointer};
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
use tablewright_hypervisor_common::memory::{Evictions, Leaves};
use tablewright_hypervisor_common::pieces::Pieces;
use tablewright_hypervisor_common::snapshot::{self, Begin, Kind, Log, Slots, Watched};

use cpu::Own;
use guests::Several;
use identifiers::GUESTS;
use machine::{MARKS, Machine, Omit, VMID};
use power::{Power, State};
use tree::{Reason, Tree};
use vm::{CONTROL_SLOT, MEMORY_SLOT, Memory, PAGE, PIECE_SLOT, Pace, Stage2, Vm};

/// Where the device tree is by default: at the start of memory.
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

/// Where the UART is by default: where the machine has it.
static UART: AtomicU64 = AtomicU64::new(0x900_0000);

/// One of the guest's CPUs.
pub struct Vcpu {
    /// By which it is told from others.
    pub affinity: u64,
    /// Whether it is on.
    pub power: Power,
}

/// Everything, once it is there.
pub struct World {
    /// The guest, or several.
    pub vms: Vec<Vm>,
    /// The guest's CPUs, each a processor; its place is its number.
    pub cpus: Vec<Vcpu>,
    /// The root of the map that the hypervisor runs on.
    pub map: Pa,
}

/// The number of the guest that each processor has.
static GUEST: [AtomicUsize; cpu::MOST] = [const { AtomicUsize::new(0) }; cpu::MOST];

/// This processor has that guest from here on.
pub fn become_guest(guest: usize) {
    GUEST[cpu::number()].store(guest, Ordering::Relaxed);
}

impl World {
    /// The guest of this processor.
    pub fn vm(&self) -> &Vm {
        &self.vms[GUEST[cpu::number()].load(Ordering::Relaxed)]
    }
}

static WORLD: spin::once::Once<World> = spin::once::Once::new();

/// Everything. There is something when the first guest runs.
pub fn world() -> &'static World {
    match WORLD.get() {
        Some(world) => world,
        None => panic!("there is no guest yet"),
    }
}

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
    /// So many bytes from the end, at a multiple of that.
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
        assert!(
            self.next <= self.end,
            "the hypervisor's memory is too small"
        );
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
    let span = |from: *const u8, to: *const u8| {
        Span::new(Pa::new(address(from)), address(to) - address(from))
            .map_err(|_| "the image is not laid out in pages")
    };
    let special = [
        (
            span(&raw const text_begin, &raw const rodata_begin)?,
            Attrs::KERNEL_TEXT,
        ),
        (
            span(&raw const rodata_begin, &raw const data_begin)?,
            Attrs::KERNEL_RODATA,
        ),
    ];
    let memory = MemoryMap {
        ram: &[tree.ram],
        reserved: &[],
        special: &special,
    };
    let mut space = AddressSpace::<Own, _>::new(machine).ok_or("no memory for the root")?;
    LinearMap::new(Va::new(0), Mapping::new(Attrs::KERNEL_DATA))
        .build(&mut space, &memory)
        .map_err(|_| "the map of all memory cannot be made")?;
    // What the hypervisor uses of the devices.
    for registers in [
        tree.uart.get()..tree.uart.get() + REGISTERS,
        tree.distributor..tree.distributor + (64 << 10),
        tree.redistributors.clone(),
    ] {
        Span::new(Va::new(registers.start), registers.end - registers.start)
            .ok()
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
    let at = if device_tree == 0 {
        DEVICE_TREE
    } else {
        device_tree
    };
    match boot(at) {
        Ok(None) => guests::schedule::run(),
        Ok(Some((entry, argument))) => {
            let root = world().vm().guest.space().root();
            // SAFETY: the guest's tables, which map only what its slots hold.
            unsafe { cpu::enter(root, entry, argument) }
        }
        Err(reason) => panic!("{reason}"),
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measure {
    /// The start of a log.
    Start,
    /// Flushes.
    Flush,
}

/// What the command line asks for.
struct Options {
    leaves: Leaves,
    evict: Evictions,
    /// So many frames in a second at most; any number if it is zero.
    evict_rate: u64,
    /// A planted bug.
    omit: Option<Omit>,
    /// What is written is logged.
    log: Option<Kind>,
    /// No guest is run: something is measured.
    measure: Option<Measure>,
    /// So many addresses of random tables are asked of the processor first.
    check: u64,
    /// The guest is copied, and goes on on the copy.
    snapshot: Option<Begin>,
    /// The guest's memory is in so many pieces.
    pieces: usize,
    /// There are several guests, if there is one of these.
    several: Several,
}

impl Options {
    /// Reads words of the form `NAME=VALUE`.
    fn read(line: &str) -> Result<Self, Reason> {
        let mut options = Self {
            leaves: Leaves::Pages,
            evict: Evictions::default(),
            evict_rate: 0,
            omit: None,
            log: None,
            measure: None,
            check: 0,
            snapshot: None,
            pieces: 1,
            several: Several::default(),
        };
        for word in line.split_ascii_whitespace() {
            let (name, value) = word.split_once('=').ok_or("an option is NAME=VALUE")?;
            let number = || value.parse().map_err(|_| "a number is asked for");
            match name {
                "mapping" => {
                    options.leaves = Leaves::named(value).ok_or("mapping is 4k, 2m, mixed or 1g")?
                }
                "evict" => options.evict.count = number()?,
                "evict_after" => options.evict.after = number()?,
                "evict_rate" => options.evict_rate = number()?,
                "evict_by" if value == "table" => options.evict.tables = true,
                "check" => options.check = number()?,
                "omit" => {
                    options.omit = Some(
                        Omit::named(value)
                            .ok_or("omit is leaves, permissions, tables or everything")?,
                    )
                }
                "plant" if plant::plant(value) => {}
                "log" => {
                    options.log =
                        Some(Kind::named(value).ok_or("log is bitmap, ring, all or hardware")?)
                }
                "measure" if value == "start" => options.measure = Some(Measure::Start),
                "measure" if value == "flush" => options.measure = Some(Measure::Flush),
                "snapshot" => {
                    let begin = Begin::named(value);
                    options.snapshot = Some(begin.ok_or("snapshot is bell, or milliseconds")?);
                }
                "pieces" => options.pieces = number()? as usize,
                "kernels" => options.several.kernels = number()? as usize,
                "small" => options.several.small = number()? as usize,
                "memory" => options.several.memory = number()?,
                "vmid_bits" => options.several.bits = number()? as u32,
                "seconds" => options.several.seconds = number()?,
                _ => return Err("an option is not known"),
            }
        }
        Ok(options)
    }
}

/// Everything up to the guest: where it starts, and with what; or nothing of it, if there are
/// several.
fn boot(device_tree: u64) -> Result<Option<(u64, u64)>, Reason> {
    static MACHINE: spin::once::Once<Machine> = spin::once::Once::new();
    const HEAP_SIZE: u64 = 4 << 20;

    let image_end = address(&raw const dma_region);
    // SAFETY: behind the image, where nothing else is; `Rest` begins behind it.
    unsafe { HEAP.lock().init(image_end as usize, HEAP_SIZE as usize) };
    // SAFETY: where the loader has put it, in the blocks that the startup code maps.
    let fdt = unsafe { Fdt::from_raw(ptr::with_exposed_provenance(device_tree as usize)) };
    let tree = Tree::read(&fdt.map_err(|_| "there is no device tree")?)?;
    UART.store(tree.uart.get(), Ordering::Relaxed);
    let options = Options::read(&tree.arguments)?;
    let guest = tree.guest()?;
    if tree.cpus.len() > cpu::MOST {
        return Err("there are more processors than the hypervisor has stacks for");
    }

    // What is left of the hypervisor's memory: room for a copy of the guest at the end, what the
    // guest's memory is on, and tables.
    let mut rest = Rest {
        next: image_end + HEAP_SIZE,
        end: guest.start().get(),
    };
    let copy = match options.snapshot {
        Some(_) => Some(
            rest.take_end(
                guest.size(),
                options.leaves.largest::<Machine>().max(2 << 20),
            )
            .ok_or("no memory for a copy of the guest")?,
        ),
        None => None,
    };
    let pieces = match options.pieces {
        1 => Pieces::from(guest),
        count => Pieces::divide(
            guest,
            count,
            APART,
            options.leaves.largest::<Machine>().max(2 << 20),
        )
        .ok_or("memory cannot be divided into so many pieces")?,
    };
    let pages = guest.size() / PAGE;
    let logged = if options.log.is_some() {
        pages.div_ceil(64)
    } else {
        0
    };
    // SAFETY: zero is an atomic (1.); behind the image and the heap, below the guest, is nothing
    // else (2.).
    let (frames, scattered, words): (&[AtomicU32], &[AtomicBool], &mut [AtomicU64]) = unsafe {
        (
            rest.take(pages),
            rest.take(Memory::blocks(&pieces)),
            rest.take(2 * logged),
        )
    };
    let tables =
        Span::new(Pa::new(rest.next), rest.end - rest.next).map_err(|_| "no memory for tables")?;
    if options.leaves == Leaves::Huge && !Stage2::is_leaf_level(Level::new(2)) {
        return Err("with this granule there are no blocks of a third size");
    }
    if MARKS != (options.log == Some(Kind::Hardware)) && options.log.is_some() {
        return Err(
            "log=hardware is of a hypervisor that is built with hardware-dirty, and no other is",
        );
    }
    if MARKS && !Ids::read().caps().hardware_dirty {
        return Err("the processor does not mark what is written");
    }
    // For pages only there is a table for each 2 MiB, and what is above them; and each processor
    // holds some in reserve.
    if tables.size() < guest.size() / 512 * 9 / 8 + (1 << 20) {
        return Err("the hypervisor's memory is too small for the guest's tables");
    }
    // SAFETY: the rest of it is the tables'.
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
    let (slots, plain) = slots(machine, &tree, &pieces, options.leaves)?;
    let memory = Memory::new(
        pieces,
        options.leaves,
        options.evict,
        frames,
        scattered,
        machine,
    );
    let log = match options.log {
        Some(kind) => {
            Some(Log::new::<Machine>(kind, &pieces, words).ok_or("the log has no memory")?)
        }
        None => None,
    };
    // The last processor is the hypervisor's where there is something to do beside the guest.
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
    let vcpus = tree.cpus.into_iter().take(cpus).map(|affinity| Vcpu {
        affinity,
        power: Power::off(),
    });
    let vcpus: Vec<_> = vcpus.collect();
    if let Some(first) = vcpus.first() {
        first.power.set(State::On);
    }
    let vm = Vm::new(slots, memory, log, Pace::new(options.evict_rate));
    let world = WORLD.call_once(|| World {
        vms: alloc::vec![vm],
        cpus: vcpus,
        map,
    });
    let vm = world.vm();
    if let Some(what) = options.measure {
        // SAFETY: the guest's tables, by whose VMID this processor invalidates.
        unsafe { cpu::confine(vm.guest.space().root()) };
        match (what, &vm.log) {
            (Measure::Start, Some(log)) => {
                cpu::count_instructions();
                let fault = |fault: &_| _ = vm.fault(fault);
                snapshot::start_one(watched(vm, log, plain), fault, cpu::instructions);
            }
            (Measure::Start, None) => {
                return Err("the start of a log is measured, and there is none");
            }
            (Measure::Flush, _) => match plain {
                [Some(plain), ..] => measure::flushes(vm, plain)?,
                _ => return Err("the guest has no memory"),
            },
        }
        smccc::psci::system_off::<smccc::Smc>().map_err(|_| "the machine cannot be powered off")?;
    }
    if let Some(helper) = helper {
        let run = move || {
            cpu::become_number(cpus);
            // SAFETY: the map that the first processor runs on; the guest's tables, by whose VMID
            // it invalidates; and what is its own of the interrupt controller, which it uses for
            // nothing else.
            unsafe {
                cpu::load_map(world.map);
                cpu::confine(vm.guest.space().root());
                rest::set_up(distributor, redistributor);
            }
            let Some(log) = &vm.log else { return };
            let watched = watched(vm, log, plain);
            match (options.snapshot, copy) {
                (Some(begin), Some(area)) => {
                    snapshot::take(watched, &vm.gate, area, begin);
                }
                _ => snapshot::log_for_ever(watched),
            }
            loop {
                wait();
            }
        };
        firmware::launch(helper, cpus, run).map_err(|_| "the last processor does not start")?;
    }
    Ok(Some((entry, at.get())))
}

/// What each guest's memory is kept in: the frame of each page, the blocks of which pages have
/// moved, marks.
type Given = (
    &'static [AtomicU32],
    &'static [AtomicBool],
    &'static mut [AtomicU64],
);

/// Several guests, up to where the first vCPU of each waits for its turn and the other processors
/// have theirs.
fn boot_several(
    machine: &'static Machine,
    tree: &Tree,
    options: &Options,
    all: Span<Ipa>,
    (mut frames, mut scattered, mut words): Given,
    map: Pa,
) -> Result<(), Reason> {
    let several = &options.several;
    if options.snapshot.is_some() || options.log == Some(Kind::Ring) {
        return Err("of several guests there are no snapshots, and no rings");
    }
    let processors = tree.cpus.len() - usize::from(options.log.is_some());
    let bits = match several.bits {
        0 => identifiers::BITS,
        bits => bits,
    };
    identifiers::set_up(machine, bits, processors)?;
    let areas = guests::areas(several, all)?;
    if areas.len() > GUESTS {
        return Err("too many guests");
    }
    let evict = Evictions {
        count: options.evict.count / areas.len() as u64,
        ..options.evict
    };
    let (mut vms, mut plain) = (Vec::new(), Vec::new());
    for (number, area) in areas.iter().enumerate() {
        let pages = area.size() / PAGE;
        let (own, blocks, marks);
        let memory = Span::new(all.start(), area.size()).map_err(|_| "a guest has no memory")?;
        (own, frames) = frames.split_at(pages as usize);
        (blocks, scattered) = scattered
            .split_at_checked(Memory::blocks(&memory.into()) as usize)
            .ok_or("the guests have more blocks than there are")?;
        let space =
            AddressSpace::<Stage2, _>::new(machine).ok_or("no memory for a guest's root")?;
        identifiers::give(number, space.root());
        let mut space = space;
        space.make_live();
        let space =
            SharedSpace::new(space).map_err(|_| "the guest's tables are the hypervisor's")?;
        let slots = Guest::new(space, Vec::leak(Vec::from([SlotCell::new()])));
        let slot = Slot {
            page: options.leaves.largest::<Machine>(),
            ..Slot::memory(memory, area.start().get())
        };
        slots
            .insert(slot)
            .map_err(|_| "the guest's memory is no slot")?;
        let log = match options.log {
            Some(kind) => {
                (marks, words) = core::mem::take(&mut words).split_at_mut(2 * pages.div_ceil(64) as usize);
                Some(
                    Log::new::<Machine>(kind, &memory.into(), marks)
                        .ok_or("the log has no memory")?,
                )
            }
            None => None,
        };
        let memory = Memory::new(memory.into(), options.leaves, evict, own, blocks, machine);
        memory.move_to(*area);
        vms.push(Vm::new(slots, memory, log, Pace::new(options.evict_rate)));
        plain.push([Some(slot), None, None, None]);
    }
    guests::prepare(several, tree, &areas)?;
    let world = WORLD.call_once(|| World {
        vms,
        cpus: Vec::new(),
        map,
    });
    cpu::confine_several();
    for (number, &affinity) in tree.cpus.iter().enumerate().skip(1) {
        let plain = plain.clone();
        let run = move || {
            cpu::become_number(number);
            // SAFETY: the map that the first processor runs on.
            unsafe { cpu::load_map(map) };
            cpu::confine_several();
            if number < processors {
                guests::schedule::run();
            }
            loop {
                for (vm, &plain) in world.vms.iter().zip(&plain) {
                    if let Some(log) = &vm.log {
                        snapshot::log_for_a_while(watched(vm, log, plain));
                    }
                }
            }
        };
        firmware::launch(affinity, number, run).map_err(|_| "a processor does not start")?;
    }
    Ok(())
}

/// What a log of the guest goes by.
fn watched(vm: &'static Vm, log: &'static Log, plain: Slots) -> Watched<Machine> {
    Watched {
        guest: &vm.guest,
        memory: &vm.memory,
        log,
        plain,
    }
}

/// What is where for the guest, and the slot of its memory. Nothing is mapped yet.
fn slots(
    machine: &'static Machine,
    tree: &Tree,
    pieces: &Pieces,
    leaves: Leaves,
) -> Result<(vm::Guest, Slots), Reason> {
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
        slots
            .insert(slot)
            .map_err(|_| "the guest's memory is no slot")?;
        *place = Some(slot);
    }
    let insert = |number, registers: Range<u64>, perms| {
        let (first, end) = (
            registers.start & !(PAGE - 1),
            registers.end.next_multiple_of(PAGE),
        );
        let registers =
            Span::new(Ipa::new(first), end - first).map_err(|_| "a device lies nowhere")?;
        let slot = Slot::memory(registers, first)
            .with_id(number)
            .with_perms(perms);
        slots
            .insert(Slot {
                memory: MemoryType::Device,
                page: PAGE,
                ..slot
            })
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

/// Waits for nothing.
fn wait() {
    // SAFETY: waits.
    unsafe { core::arch::asm!("wfi", options(nomem, nostack, preserves_flags)) };
}

/// Says something on the guest's console.
fn say(what: core::fmt::Arguments<'_>) {
    let address = UART.load(Ordering::Relaxed);
    let Some(registers) = NonNull::new(ptr::with_exposed_provenance_mut(address as usize)) else {
        return;
    };
    // SAFETY: the registers of the UART. The guest may use them at the same time: then what both
    // say is mixed up.
    let mut uart = Uart::new(unsafe { UniqueMmioPointer::new(registers) });
    let _ = write!(uart, "{what}\r\n");
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    say(format_args!("PANIC in the hypervisor: {info}"));
    let _ = smccc::psci::system_off::<smccc::Smc>();
    loop {
        wait();
    }
}
