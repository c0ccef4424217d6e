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
mod counters;
mod cpuid;
mod exits;
mod flush;
mod hyperv;
mod linux;
mod machine;
mod options;
mod processor;
mod registers;
mod schedule;
mod trail;
mod vcpu;
mod vm;
mod vmcb;

use core::arch::x86_64::__cpuid;
use core::fmt::{self, Write as _};
use core::panic::PanicInfo;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use arrayvec::ArrayVec;
use tablewright::guest::{Slot as MemorySlot, SlotCell};
use tablewright::shared::SharedSpace;
use tablewright::shootdown::{Allocator, CpuCell, Holder, Identifiers, Shootdown, Space, inbox_words};
use tablewright::{AddressSpace, Ipa, Pa, Span};
use tablewright_hypervisor_common::memory::Evictions;
use tablewright_hypervisor_common::snapshot::{self, Log, Watched};
use x86_64::instructions::port::Port;

use clock::Clock;
use machine::{Machine, Mutex, PAGE};
use options::{Flush, Options, Plant};
use schedule::Stale;
use vcpu::{Context, Vcpu};
use vm::{Guest, Memory, Nested, Vm};
use vmcb::Block;

/// Why there is no guest.
type Reason = &'static str;

/// What a processor is doing, as far as others have to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It runs the host, and looks for events before it does anything else.
    Host,
    /// It runs a guest, or is about to.
    Guest,
    /// It sleeps, or is about to.
    Sleeping,
}

/// What is known of a processor.
pub struct Processor {
    mode: AtomicU8,
    /// The vCPU that it runs, as long as it is in a guest.
    running: AtomicU32,
    /// How often it has entered a guest, and left one: odd from before it loads a vCPU's space
    /// until it has left the guest.
    pub passages: AtomicU64,
    /// What it has to forget.
    pub stale: Stale,
}

impl Processor {
    const fn new() -> Self {
        Self {
            mode: AtomicU8::new(Mode::Host as u8),
            running: AtomicU32::new(0),
            passages: AtomicU64::new(0),
            stale: Stale::new(),
        }
    }

    /// Says what this processor is doing.
    pub fn set(&self, mode: Mode) {
        self.mode.store(mode as u8, Ordering::Release);
    }

    /// Says that this processor is about to enter this guest.
    pub fn run(&self, vcpu: &Vcpu) {
        self.running.store(vcpu.number, Ordering::Relaxed);
        self.set(Mode::Guest);
    }

    /// Whether it is in this guest.
    pub fn runs(&self, vcpu: &Vcpu) -> bool {
        self.mode.load(Ordering::Acquire) == Mode::Guest as u8
            && self.running.load(Ordering::Relaxed) == vcpu.number
    }
}

/// Everything, once it is there.
pub struct World {
    /// The guest's memory.
    pub vm: Vm,
    /// Its vCPUs, by their numbers.
    pub vcpus: &'static [Vcpu],
    /// Which processors may remember what of them.
    pub shootdown: Shootdown<'static>,
    allocator: Mutex<Allocator<'static>>,
    /// The processors, by their numbers.
    pub processors: [Processor; processor::MOST],
    /// Time.
    pub clock: Clock,
    /// A time slice, in cycles.
    pub slice: u64,
    /// Whether what stands under one identifier can be forgotten.
    pub by_identifier: bool,
    /// What was asked for.
    pub options: Options,
    /// What the guest has set for all of its vCPUs.
    pub partition: hyperv::Partition,
    /// The bitmaps of ports and registers.
    bitmaps: (u64, u64),
    /// The root of the nested tables.
    nested: u64,
    /// The slot of the guest's memory, without a log.
    slot: MemorySlot,
}

static WORLD: spin::once::Once<World> = spin::once::Once::new();

/// Everything, once it is there.
pub fn world() -> Option<&'static World> {
    WORLD.get()
}

impl World {
    /// An event was posted for a vCPU: its processor looks for it.
    pub fn wake(&self, vcpu: &Vcpu) {
        fence(Ordering::SeqCst);
        let Some(home) = self.processors.get(vcpu.home) else {
            return;
        };
        if vcpu.home != processor::number() && home.mode.load(Ordering::Acquire) != Mode::Host as u8
        {
            processor::kick(vcpu.home);
        }
    }

    /// What a log goes by, if there is one.
    fn watched(&'static self) -> Option<Watched<Machine>> {
        Some(Watched {
            guest: &self.vm.guest,
            memory: &self.vm.memory,
            log: self.vm.log.as_ref()?,
            plain: [Some(self.slot), None, None, None],
        })
    }

    /// The vCPUs of this processor, in frames of their own: they are too large for a stack.
    #[expect(clippy::mut_from_ref, reason = "frames of their own, each time")]
    fn contexts(&'static self) -> Option<&'static mut [Context]> {
        let machine = *self.vm.guest.space().platform();
        let number = processor::number();
        let mine = || self.vcpus.iter().filter(|vcpu| vcpu.home == number);
        let count = mine().count();
        let frames = machine.take_frames(((count * size_of::<Context>()) as u64).div_ceil(PAGE))?;
        let first = ptr::with_exposed_provenance_mut::<Context>(frames.get() as usize);
        for (index, vcpu) in mine().enumerate() {
            let frame = machine.take_frames(1)?;
            let block = ptr::with_exposed_provenance_mut::<Block>(frame.get() as usize);
            // SAFETY: a frame of its own, zeroed, which is a block that does nothing.
            let block = unsafe { &mut *block };
            let (ports, registers) = self.bitmaps;
            let context = Context::new(vcpu, block, ports, registers, self.nested);
            // SAFETY: inside of the frames, which are for this.
            unsafe { first.add(index).write(context) };
        }
        // SAFETY: just written; the frames have no other user.
        Some(unsafe { core::slice::from_raw_parts_mut(first, count) })
    }
}

// ---- The beginning ----

/// Frames for tables and control blocks, behind the image.
const POOL: u64 = 16 << 20;
const SVM: u32 = 0x8000_000a;

fn set_up(options: Options) -> Result<&'static World, Reason> {
    const NO_MEMORY: Reason = "no memory for tables";
    static MACHINE: spin::once::Once<Machine> = spin::once::Once::new();
    static VCPUS: spin::once::Once<ArrayVec<Vcpu, { vcpu::MOST }>> = spin::once::Once::new();

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
    let state = machine
        .take_frames(processor::MOST as u64)
        .ok_or(NO_MEMORY)?;
    STATE.store(state.get(), Ordering::Relaxed);
    // SAFETY: there is no other processor yet; the frames are for this, and the processor has SVM.
    unsafe {
        processor::set_up_vectors();
        processor::set_up(state.get());
    }

    let words = Allocator::words(bits) as u64;
    let identifiers = machine
        .take_frames((8 * words).div_ceil(PAGE))
        .ok_or(NO_MEMORY)?;
    let identifiers = ptr::with_exposed_provenance_mut::<u64>(identifiers.get() as usize);
    // SAFETY: frames of its own, zeroed.
    let identifiers = unsafe { core::slice::from_raw_parts_mut(identifiers, words as usize) };
    let allocator = Allocator::new(bits, identifiers).ok_or(NO_MEMORY)?;
    let processors = options.all_processors();
    // SAFETY: zero is each of these; frames of their own.
    let (holders, cpus, inboxes, sets) = unsafe {
        (
            take::<Holder>(machine, processors as u64).ok_or(NO_MEMORY)?,
            take::<CpuCell>(machine, processors as u64).ok_or(NO_MEMORY)?,
            take::<AtomicU64>(machine, inbox_words(processors) as u64).ok_or(NO_MEMORY)?,
            take::<AtomicU64>(machine, options.vcpus as u64).ok_or(NO_MEMORY)?,
        )
    };
    let given = Identifiers::new(&allocator, holders)
        .ok_or("there are more processors than identifiers")?;
    let shootdown = Shootdown::new(cpus, inboxes, Some(given), 1).ok_or(NO_MEMORY)?;

    let space = AddressSpace::<Nested, _>::new(machine).ok_or(NO_MEMORY)?;
    let space = SharedSpace::new(space).map_err(|_| NO_MEMORY)?;
    let nested = space.root().get();
    // SAFETY: zero is a cell without a slot.
    let cells = unsafe { take::<SlotCell>(machine, 4) }.ok_or(NO_MEMORY)?;
    let guest = Guest::new(space, cells);
    let addresses = Span::new(Ipa::new(0), memory.size()).map_err(|_| NO_MEMORY)?;
    let slot = MemorySlot {
        page: options.leaves.largest::<Machine>(),
        ..MemorySlot::memory(addresses, memory.start().get())
    };
    guest
        .insert(slot)
        .map_err(|_| "the guest's memory is no whole number of pages")?;

    let pages = memory.size() / PAGE;
    // SAFETY: zero is each of these; frames of their own.
    let (numbers, scattered) = unsafe {
        (
            take::<AtomicU32>(machine, pages).ok_or(NO_MEMORY)?,
            take::<AtomicBool>(machine, Memory::blocks(&addresses.into())).ok_or(NO_MEMORY)?,
        )
    };
    let evictions = Evictions {
        count: options.evict,
        ..Evictions::default()
    };
    let frames = Memory::new(
        addresses.into(),
        options.leaves,
        evictions,
        numbers,
        scattered,
        machine,
    );
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
    let clock = Clock::measure();
    let log = match options.log {
        Some(kind) => {
            // SAFETY: zero is an atomic; frames of their own.
            let words = unsafe { take::<AtomicU64>(machine, 2 * pages.div_ceil(64)) };
            let log = words.and_then(|words| Log::new::<Machine>(kind, &addresses.into(), words));
            Some(log.ok_or("no memory for the log")?)
        }
        None => None,
    };
    // SAFETY: the memory is the guest's.
    let vm = unsafe { Vm::new(guest, frames, log, memory.size()) };
    Ok(WORLD.call_once(|| World {
        vm,
        vcpus,
        shootdown,
        allocator: Mutex::new(allocator),
        processors: [const { Processor::new() }; processor::MOST],
        clock,
        slice: clock.cycles(options.slice_ns),
        by_identifier: svm.edx & 1 << 6 != 0,
        options,
        partition: hyperv::Partition::default(),
        bitmaps: (bitmaps, bitmaps + 3 * PAGE),
        nested,
        slot,
    }))
}

/// Room for so many of these, zeroed.
///
/// # Safety
/// 1. All zeroes is a `T`.
unsafe fn take<T>(machine: &Machine, count: u64) -> Option<&'static mut [T]> {
    let frames = machine.take_frames((count * size_of::<T>() as u64).div_ceil(PAGE))?;
    let first = ptr::with_exposed_provenance_mut::<T>(frames.get() as usize);
    // SAFETY: frames of their own, zeroed (1.).
    Some(unsafe { core::slice::from_raw_parts_mut(first, count as usize) })
}

/// Where processors keep their own state while guests run: a frame each.
static STATE: AtomicU64 = AtomicU64::new(0);

/// What the others wait for: the first has set the guest up.
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
    let contexts = world.contexts().ok_or("no memory for vCPUs")?;
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
    assert_eq!(
        processor::controller_id(),
        processor::number(),
        "the numbers of processors"
    );
    let Some(world) = world() else {
        panic!("a processor has started too early");
    };
    let contexts = if number as usize == world.options.processors {
        None
    } else {
        world.contexts()
    };
    processor::has_started();
    while !READY.load(Ordering::Acquire) {
        core::hint::spin_loop();
    }
    match contexts {
        Some(contexts) => schedule::run(world, contexts),
        None if number as usize == world.options.processors => watch(world),
        None => panic!("no memory for vCPUs"),
    }
}

/// The last processor runs no vCPU: it logs what the guest writes, or copies it.
fn watch(world: &'static World) -> ! {
    let Some(watched) = world.watched() else {
        panic!("there is a processor too many");
    };
    match (world.options.snapshot, world.options.copy) {
        (Some(begin), Some(area)) => snapshot::take(watched, &world.vm.gate, area, begin),
        _ => snapshot::log_for_ever(watched),
    }
    loop {
        processor::sleep();
    }
}

/// Measures what it takes to start a log. Time is counted in instructions, where the emulator's
/// clock goes by them.
fn measure(world: &'static World) -> Result<(), Reason> {
    let watched = world.watched().ok_or("there is no log to measure")?;
    let gather = Mutex::new(world.vm.guest.gather());
    let fault = |fault: &_| _ = world.vm.map(fault, &mut gather.lock());
    snapshot::start_one(watched, fault, || processor::now() as u32);
    exits::end(exits::End::Off)
}

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

/// The serial port, of which the guest does not know that others use it.
struct Serial;

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: the ports of the UART.
            unsafe {
                let mut patience = 100_000;
                while Port::<u8>::new(exits::SERIAL + 5).read() & 1 << 5 == 0 && patience != 0 {
                    patience -= 1;
                }
                Port::new(exits::SERIAL).write(byte);
            }
        }
        Ok(())
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = write!(Serial, "PANIC in the hypervisor: {info}\r\n");
    exits::end(exits::End::Off)
}
