//! A hypervisor that an unmodified Linux takes for Hyper-V: it boots one on the engine's nested
//! tables, and answers its flushes of other processors' TLBs.
//!
//! # What is where
//! The host's memory: the program from 1 MiB on, tables behind it, the guest's memory in a row
//! where the command line says, with its kernel and its first file system in it; a copy of the
//! guest behind it, or from 4 GiB on, where the command line says. The first 8 GiB are mapped one
//! to one.
//!
//! # The command line
//! `NAME=VALUE` words, then ` -- ` and what the guest's kernel is told.
#![no_std]
#![no_main]

mod acpi;
mod apic;
#[allow(dead_code, reason = "the check of tables maps the image by its parts")]
#[path = "../boot.rs"]
mod boot;
mod clock;
mod context;
mod count;
mod counters;
mod cpuid;
mod exits;
mod flush;
mod hyperv;
mod linux;
mod machine;
mod options;
mod ports;
mod processor;
mod registers;
mod schedule;
mod trail;
mod vcpu;
mod vmcb;
mod world;

use core::arch::x86_64::__cpuid;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use arrayvec::ArrayVec;
use tablewright::guest::{Guest, Slot as MemorySlot, SlotCell};
use tablewright::shared::SharedSpace;
use tablewright::shootdown::{
    Allocator, CpuCell, Holder, Identifiers, Shootdown, Space, inbox_words,
};
use tablewright::{AddressSpace, Ipa, Pa, Span};
use tablewright_hypervisor_common::host::Reason;
use tablewright_hypervisor_common::log::Log;
use tablewright_hypervisor_common::memory::Memory;
use tablewright_hypervisor_common::options::Options as Common;
use tablewright_hypervisor_common::snapshot;

use clock::Clock;
use machine::{Machine, Mutex, Nested, PAGE};
use options::Options;
use vcpu::Vcpu;
use world::{Partition, Processor, Vm, World};

/// Frames for tables and control blocks, behind the image.
const POOL: u64 = 16 << 20;
const SVM: u32 = 0x8000_000a;

fn set_up(options: Options) -> Result<&'static World, Reason> {
    const NO_MEMORY: Reason = "no memory for tables";
    static MACHINE: spin::once::Once<Machine> = spin::once::Once::new();
    static VCPUS: spin::once::Once<ArrayVec<Vcpu, { options::VCPUS }>> = spin::once::Once::new();

    // SVM's own leaf: nested paging, flushes by identifier; the number of identifiers.
    let has_svm = __cpuid(0x8000_0000).eax >= SVM && __cpuid(0x8000_0001).ecx & 1 << 2 != 0;
    let svm = __cpuid(SVM);
    if !has_svm || svm.edx & 1 == 0 {
        return Err("the processor has no nested paging");
    }
    let bits = svm.ebx.max(2).ilog2().min(16);

    let memory = options.memory;
    let pool = Span::new(Pa::new(POOL), memory.start().get().saturating_sub(POOL));
    // SAFETY: between the image and the guest's memory is nothing else.
    let machine = unsafe { Machine::new(pool.map_err(|_| NO_MEMORY)?) }.ok_or(NO_MEMORY)?;
    let machine = MACHINE.call_once(|| machine);
    let state = machine.take_frames(processor::MOST as u64).ok_or(NO_MEMORY)?;
    STATE.store(state.get(), Ordering::Relaxed);
    // SAFETY: there is no other processor yet; the frames are for this, and the processor has SVM.
    unsafe {
        processor::set_up_vectors();
        processor::set_up(state.get());
    }

    // SAFETY: zero is a word.
    let words = unsafe { machine.take(Allocator::words(bits) as u64) }.ok_or(NO_MEMORY)?;
    let allocator = Allocator::new(bits, words).ok_or(NO_MEMORY)?;
    let processors = options.all_processors();
    // SAFETY: zero is each of these.
    let (holders, cpus, inboxes, sets) = unsafe {
        (
            machine.take::<Holder>(processors as u64).ok_or(NO_MEMORY)?,
            machine.take::<CpuCell>(processors as u64).ok_or(NO_MEMORY)?,
            machine.take::<AtomicU64>(inbox_words(processors) as u64).ok_or(NO_MEMORY)?,
            machine.take::<AtomicU64>(options.vcpus as u64).ok_or(NO_MEMORY)?,
        )
    };
    let given = Identifiers::new(&allocator, holders)
        .ok_or("there are more processors than identifiers")?;
    let shootdown = Shootdown::new(cpus, inboxes, Some(given), 1).ok_or(NO_MEMORY)?;

    let space = AddressSpace::<Nested, _>::new(machine).ok_or(NO_MEMORY)?;
    let space = SharedSpace::new(space).map_err(|_| NO_MEMORY)?;
    let nested = space.root().get();
    // SAFETY: zero is a cell without a slot.
    let cells = unsafe { machine.take::<SlotCell>(4) }.ok_or(NO_MEMORY)?;
    let guest = Guest::new(space, cells);
    let addresses = Span::new(Ipa::new(0), memory.size()).map_err(|_| NO_MEMORY)?;
    let Common { leaves, evict, log, .. } = options.common;
    let slot = MemorySlot {
        page: leaves.largest::<Machine>(),
        ..MemorySlot::memory(addresses, memory.start().get())
    };
    guest.insert(slot).map_err(|_| "the guest's memory is no whole number of pages")?;

    let addresses = addresses.into();
    let (pages, blocks) = (memory.size() / PAGE, Memory::<Machine>::blocks(&addresses));
    let marks = log.map_or(0, |_| 2 * pages.div_ceil(64));
    // SAFETY: zero is each of these.
    let (numbers, scattered, marks) = unsafe {
        (
            machine.take::<AtomicU32>(pages).ok_or(NO_MEMORY)?,
            machine.take::<AtomicBool>(blocks).ok_or(NO_MEMORY)?,
            machine.take::<AtomicU64>(marks).ok_or(NO_MEMORY)?,
        )
    };
    let frames = Memory::new(addresses, leaves, evict, numbers, scattered, machine);
    frames.move_to(memory);

    let bitmaps = machine.take_frames(3 + 2).ok_or(NO_MEMORY)?.get();
    let bytes = |at: u64, pages: u64| {
        let at = ptr::with_exposed_provenance_mut::<u8>(at as usize);
        // SAFETY: frames of their own.
        unsafe { core::slice::from_raw_parts_mut(at, (pages * PAGE) as usize) }
    };
    exits::bitmap(bytes(bitmaps, 3));
    registers::bitmap(bytes(bitmaps + 3 * PAGE, 2));

    let vcpus = VCPUS.call_once(|| {
        let spaces = sets.iter_mut().enumerate();
        let vcpu = |(number, set)| {
            let space = Space::new(flush::NO_ROOT, core::slice::from_mut(set));
            let home = number % options.processors;
            Vcpu::new(number as u32, number as u32 * options.step, home, space)
        };
        spaces.map(vcpu).collect()
    });
    let log = match log {
        Some(kind) => {
            let log = Log::new::<Machine>(kind, &addresses, marks);
            Some(log.ok_or("no memory for the log")?)
        }
        None => None,
    };
    let vm = Vm::new(guest, frames, [Some(slot), None, None, None], log);
    let world = world::begin(World {
        vm,
        vcpus,
        shootdown,
        allocator: Mutex::new(allocator),
        processors: [const { Processor::new() }; processor::MOST],
        slice: Clock::get().cycles(options.slice_ns),
        by_identifier: svm.edx & 1 << 6 != 0,
        options,
        partition: Partition::default(),
        bitmaps: (bitmaps, bitmaps + 3 * PAGE),
        nested,
    });
    machine.flush_by(flush::nested);
    Ok(world)
}

/// Frames in which processors keep their own state while guests run, one each.
static STATE: AtomicU64 = AtomicU64::new(0);

/// The first processor has set the guest up; the others wait for that.
static READY: AtomicBool = AtomicBool::new(false);

fn boot(info: u64) -> Result<(), Reason> {
    // SAFETY: the loader's.
    let text = unsafe { boot::command_line(info) };
    let (options, line) = Options::read(text)?;
    let kernel = options.kernel;
    let initrd = options.initrd;
    let count_of = options.all_processors();
    let world = set_up(options)?;
    if world.options.measures {
        return measure(world);
    }
    let contexts = context::all(world).ok_or("no memory for vCPUs")?;
    let first = contexts.first_mut().ok_or("there is no vCPU")?;
    let files = linux::Files { initrd, line };
    linux::load(&world.vm, first, world.vcpus.len() as u32, &files, kernel)?;
    // SAFETY: what is below 1 MiB was read, and all is mapped one to one.
    if !unsafe { processor::start_others(count_of, other) } {
        return Err("a processor does not start");
    }
    READY.store(true, Ordering::Release);
    schedule::run(world, contexts)
}

extern "C" fn other(number: u64) -> ! {
    // SAFETY: a frame of its own; the first processor has set the vectors up.
    unsafe { processor::set_up(STATE.load(Ordering::Relaxed) + number * PAGE) };
    assert_eq!(processor::controller_id(), processor::number(), "the numbers of processors");
    let Some(world) = world::world() else {
        panic!("a processor has started too early");
    };
    let contexts = match number as usize == world.options.processors {
        true => None,
        false => Some(context::all(world)),
    };
    processor::has_started();
    while !READY.load(Ordering::Acquire) {
        core::hint::spin_loop();
    }
    match contexts {
        Some(Some(contexts)) => schedule::run(world, contexts),
        Some(None) => panic!("no memory for vCPUs"),
        // The last processor runs no vCPU: it logs the guest's writes, or copies it.
        None => snapshot::watch(&world.vm, world.options.common.snapshot, world.options.copy),
    }
    loop {
        processor::sleep();
    }
}

/// Measures the start of a log. Time is counted in instructions, where the emulator's clock goes by
/// them.
fn measure(world: &'static World) -> Result<(), Reason> {
    if world.vm.log.is_none() {
        return Err("there is no log to measure");
    }
    let fault = |fault: &_| _ = world.vm.fault(fault, processor::number());
    snapshot::start_one(&world.vm, fault, || processor::now() as u32);
    ports::end(ports::End::Off)
}

#[unsafe(no_mangle)]
extern "C" fn main(info: u64) -> ! {
    // SAFETY: the first processor is number 0.
    unsafe { processor::run_on_stack(0, begin, info) }
}

extern "C" fn begin(info: u64) -> ! {
    match boot(info) {
        Ok(()) => panic!("there is nothing more to do"),
        Err(reason) => panic!("{reason}"),
    }
}
