//! A kernel that makes its linear map, at EL1, with no hypervisor: in each of the ways that were
//! published and in the engine's, one after the other, in tables that the processor runs on.
//!
//! It has what a kernel has before it knows its memory: its own image, mapped in the upper half,
//! and a fixmap. Table memory is reached through slots of the fixmap, through the coarse map in the
//! lower half, or through the linear map, and in no other way: what is not mapped there, or
//! remembered from before, is an exception or a wrong table. Before and after each step there is a
//! mark, by which the emulator tells what to count (`xtask/plugin`). Then the processor is asked
//! where each page is (`AT S1E1W`).
//!
//! How long each step takes is printed, in ticks of the generic timer: on a board that is the
//! published table for it.
//!
//! The steps are those of the crate `tablewright-linear`, which the software machine runs as well,
//! and in the same order.
#![no_std]
#![no_main]

extern crate alloc;

#[macro_use]
mod common;
mod payload;

use alloc::format;
use alloc::string::{String, ToString as _};
use core::arch::{asm, global_asm};
use core::cell::Cell;
use core::fmt::Write as _;
use core::ops::Range;
use core::panic::PanicInfo;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU64, Ordering};

use arm_sysregs::el1::accessors::{write_ttbr0_el1, write_ttbr1_el1};
use arm_sysregs::el1::registers::{Ttbr0El1, Ttbr1El1};
use buddy_system_allocator::LockedHeap;
use tablewright::arch::arm64::{Domain, execute};
use tablewright::format::{Arm64K4, MAIR};
use tablewright::linear::{LinearError, MemoryMap, OneToOne, SlotMemory, Slots, Window};
use tablewright::shootdown::arm64::{Encoder, Regime};
use tablewright::{
    Attrs, Barrier, Entry, Format, Hooks, Invalidation, Level, Pa, Platform, Span, Stale, Va, What,
};
use tablewright_linear::alternatives;
use tablewright_linear::engine::{self, COARSE_ID};
use tablewright_linear::{Fixmap, Goal, LAST_LEVEL, Technique, Techniques};

use common::{BLOCK, OFFSET, PAGE, REGISTERS, SCTLR, TCR, console, physical};

/// The beginning of the console's line.
const NAME: &str = "linear";
/// The first address of the fixmap's slots.
const FIXMAP: u64 = 0xffff_fdff_fe00_0000;
/// The address of physical address 0 in the linear map.
const LINEAR: u64 = 0xffff_0000_0000_0000;
/// The memory that is mapped: three of the machine's four gibibytes. `xtask` tells the software
/// machine the same.
const RAM: Range<u64> = 1 << 30..4 << 30;
/// The fourth, which is added when the map is there.
const ADDED: Range<u64> = 4 << 30..5 << 30;
/// Memory for tables, at the end of what is mapped at first, as on the software machine.
const TABLES: u64 = 16 << 20;
global_asm!(
    payload::head!(),
    "start:",
    "adrp x0, identity",
    "msr ttbr0_el1, x0",
    "adrp x0, early",
    "msr ttbr1_el1, x0",
    "ldr x0, ={mair}",
    "msr mair_el1, x0",
    "ldr x0, ={tcr}",
    "msr tcr_el1, x0",
    "isb",
    "tlbi vmalle1",
    "dsb nsh",
    "ldr x0, ={sctlr}",
    "msr sctlr_el1, x0",
    "isb",
    "ldr x0, =upper",
    "br x0",
    "upper:",
    "adrp x0, stack_end",
    "add x0, x0, :lo12:stack_end",
    "mov sp, x0",
    "adrp x0, vectors",
    "add x0, x0, :lo12:vectors",
    "msr vbar_el1, x0",
    "isb",
    "bl main",
    ".balign 2048",
    "vectors:",
    ".rept 16",
    ".balign 128",
    "mrs x0, esr_el1",
    "mrs x1, far_el1",
    "mrs x2, elr_el1",
    "b exception",
    ".endr",
    // The tables that are there before anything else, by physical addresses: two blocks for the
    // image and the devices, at OFFSET and, for the time when the MMU comes on, at 0; and those of
    // the fixmap, down to its slots.
    ".section .tables, \"aw\"",
    ".balign 4096",
    "identity: .quad blocks - {offset} + 3",
    ".fill 511, 8, 0",
    "early: .fill {image_index}, 8, 0",
    ".quad blocks - {offset} + 3",
    ".fill {fixmap_3} - {image_index} - 1, 8, 0",
    ".quad fixmap_2 - {offset} + 3",
    ".fill 511 - {fixmap_3}, 8, 0",
    "blocks: .quad {registers}, 0x40000000 + {block}",
    ".fill 510, 8, 0",
    "fixmap_2: .fill {fixmap_2}, 8, 0",
    ".quad fixmap_1 - {offset} + 3",
    ".fill 511 - {fixmap_2}, 8, 0",
    "fixmap_1: .fill {fixmap_1}, 8, 0",
    ".quad fixmap_0 - {offset} + 3",
    ".fill 511 - {fixmap_1}, 8, 0",
    ".global early, fixmap_0, empty",
    "fixmap_0: .fill 512, 8, 0",
    "empty: .fill 512, 8, 0",
    mair = const MAIR,
    tcr = const TCR,
    sctlr = const SCTLR,
    offset = const OFFSET,
    block = const BLOCK,
    registers = const REGISTERS,
    image_index = const OFFSET >> 39 & 511,
    fixmap_3 = const FIXMAP >> 39 & 511,
    fixmap_2 = const FIXMAP >> 30 & 511,
    fixmap_1 = const FIXMAP >> 21 & 511,
);

unsafe extern "C" {
    // The tables above.
    static early: [Entry; 512];
    static fixmap_0: [Entry; 512];
    static empty: [Entry; 512];
}

/// For the lists of regions.
#[global_allocator]
static HEAP: LockedHeap<32> = LockedHeap::empty();

/// Frames one after the other, and the instructions that the steps are counted in.
struct Machine {
    next: Cell<u64>,
}

// SAFETY: a frame is handed out once (1.). Tables are reached through windows alone, so `table` is
// never asked (2.); no links (3.); `dsb` waits for what was stored (4.), and issued (6.); what is
// issued is the engine's (5.); there is no clone (7.).
unsafe impl Platform for Machine {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let frame = self.next.get();
        self.next.set(frame + PAGE);
        (frame < RAM.end).then_some(Pa::new(frame))
    }

    unsafe fn free_table(&self, _: Pa, _: Level) {}

    unsafe fn table(&self, _: Pa, _: Level) -> NonNull<Entry> {
        panic!("a table is reached without a window")
    }

    fn barrier(&self, what: Barrier) {
        match what {
            Barrier::Publish => instruct!("dsb ishst"),
            Barrier::Complete => instruct!("dsb ish"),
        }
        // This processor uses all that is changed.
        instruct!("isb");
    }

    fn invalidate(&self, flush: &Invalidation<'_>) {
        let encoder = Encoder {
            regime: Regime::El1,
            page_shift: PAGE.trailing_zeros(),
            ranges: true,
            wide: false,
        };
        // A range instruction takes pairs of pages: with an odd number one page more is forgotten,
        // and no instruction more made.
        if let What::Ranges(&[stale]) = flush.what
            && stale.last - stale.first >= PAGE
        {
            let pages = (stale.last - stale.first) / PAGE + 1;
            let last = stale.first + pages.next_multiple_of(2) * PAGE - 1;
            let even = Invalidation { what: What::Ranges(&[Stale { last, ..stale }]), ..*flush };
            return encoder.encode(&even, |one| execute(one, Domain::Inner));
        }
        encoder.encode(flush, |one| execute(one, Domain::Inner));
    }
}

// SAFETY: nothing is overridden (1.).
unsafe impl Hooks for Machine {}

/// The slots of the fixmap.
struct FixmapSlots;

// SAFETY: the slots are mapped at these addresses (1.).
unsafe impl SlotMemory for FixmapSlots {
    fn pointer(&self, slot: usize, _: Pa) -> NonNull<Entry> {
        pointer(FIXMAP + slot as u64 * PAGE)
    }
}

/// The coarse map, in the lower half.
struct Lower;

// SAFETY: the coarse map translates each address to itself (1.).
unsafe impl OneToOne for Lower {
    fn pointer(&self, frame: Pa) -> NonNull<Entry> {
        pointer(frame.get())
    }
}

/// The linear map, when it is there.
struct Finished;

// SAFETY: each frame is at its own place in the linear map, which stays (1.).
unsafe impl Window for Finished {
    unsafe fn open(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        pointer(LINEAR + frame.get())
    }

    fn close(&self, _: Pa, _: NonNull<Entry>) {}
}

fn pointer(at: u64) -> NonNull<Entry> {
    let table = ptr::with_exposed_provenance_mut(at as usize);
    // SAFETY: neither half of the address space has tables at address 0: memory begins above.
    unsafe { NonNull::new_unchecked(table) }
}

/// Has the lower half translated by another table, under an identifier.
///
/// # Safety
/// 1. Nothing is used in the lower half but what the tables under `root` map, and they stay while
///    it is loaded.
unsafe fn load_lower(root: Pa, id: u16) {
    // SAFETY: passed on.
    unsafe { write_ttbr0_el1(Ttbr0El1::from_bits_retain(root.get() | u64::from(id) << 48)) };
    instruct!("isb");
}

/// Has the upper half translated by another table, of which nothing is remembered.
///
/// # Safety
/// 1. Everything that is used in the upper half, the image above all, is where it was.
unsafe fn load_upper(root: Pa) {
    // SAFETY: passed on.
    unsafe { write_ttbr1_el1(Ttbr1El1::from_bits_retain(root.get())) };
    instruct!("isb");
    instruct!("tlbi vmalle1");
    instruct!("dsb nsh");
    instruct!("isb");
}

/// Returns the processor's translation of an address of the kernel's, for a write.
fn translate(at: u64) -> Option<u64> {
    let result: u64;
    // SAFETY: asks, and writes a register that has no other user.
    unsafe {
        asm!("at s1e1w, {}", "isb", "mrs {}, par_el1", in(reg) at, out(reg) result,
            options(nostack))
    };
    (result & 1 == 0).then_some(result & 0xffff_ffff_f000 | at & 0xfff)
}

/// The outcome of a step.
type Done = Result<(), String>;

/// Whether each page of memory is mapped up to `end`, and none beside it.
fn check(end: u64) -> Done {
    static WORD: AtomicU64 = AtomicU64::new(0);

    for page in (RAM.start..end).step_by(PAGE as usize) {
        let got = translate(LINEAR + page);
        if got != Some(page) {
            return Err(format!("{page:#x} is mapped to {got:x?}"));
        }
    }
    for page in [0, RAM.start - PAGE, end] {
        if let Some(got) = translate(LINEAR + page) {
            return Err(format!("{page:#x} is no memory, and mapped to {got:#x}"));
        }
    }
    // A word of the image, by two ways.
    let new = WORD.fetch_add(1, Ordering::Relaxed) + 1;
    let there = pointer(LINEAR + physical(&raw const WORD).get());
    // SAFETY: the same word, by its address in the map that was just found to translate it.
    match unsafe { there.as_ref() }.load() == new {
        true => Ok(()),
        false => Err("what is written here is not read there".into()),
    }
}

/// Reads the generic timer, behind all that comes before.
fn ticks() -> u64 {
    let now: u64;
    // SAFETY: reads a counter.
    unsafe { asm!("isb", "mrs {}, cntvct_el0", out(reg) now, options(nostack)) };
    now
}

/// Does what is to be timed, and says how long it took.
fn timed(name: &str, step: impl FnOnce() -> Result<(), LinearError<Va>>) -> Done {
    let before = ticks();
    let done = step();
    let took = ticks() - before;
    let per_second: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, cntfrq_el0", out(reg) per_second, options(nostack)) };
    let _ = writeln!(
        console(),
        "{NAME}: {name}: {took} ticks, {} us",
        took * 1_000_000 / per_second.max(1)
    );
    done.map_err(|error| error.to_string())
}

/// Does what the emulator is to count as well.
fn counted(name: &str, step: impl FnOnce() -> Result<(), LinearError<Va>>) -> Done {
    timed(name, || {
        instruct!("movz xzr, #1");
        let done = step();
        instruct!("movz xzr, #0");
        done
    })
}

fn span(range: &Range<u64>) -> Result<Span<Pa>, String> {
    let span = Span::new(Pa::new(range.start), range.end - range.start);
    span.map_err(|error| error.to_string())
}

/// A kernel that has just been booted: with a root that has nothing in it but the image and the
/// fixmap.
struct Kernel {
    machine: Machine,
    fixmap: Fixmap<FixmapSlots>,
    root: Pa,
}

impl Kernel {
    fn boot() -> Result<Self, String> {
        // SAFETY: nothing uses the lower half; the first of all roots has the image.
        unsafe {
            load_lower(physical(&raw const empty), 0);
            load_upper(physical(&raw const early));
        }
        let machine = Machine { next: Cell::new(RAM.end - TABLES) };
        let level = Arm64K4::root_level();
        let root = machine.alloc_table(level).ok_or("no memory for the root")?;
        let (at, data) = (Va::new(FIXMAP), &Attrs::KERNEL_DATA);
        // SAFETY: the slots of the fixmap: all zero, and for these users alone, one after the
        // other.
        let (slots, fixmap) = unsafe {
            let entries = NonNull::from(&fixmap_0[0]);
            let slots: Result<Slots<'_, Arm64K4, _, _, LAST_LEVEL>, _> =
                Slots::new(&machine, FixmapSlots, at, entries, data, (root, 0));
            (slots, Fixmap::new(at, entries, FixmapSlots))
        };
        let slots = slots.map_err(|error| error.to_string())?;
        // SAFETY: the frame was just allocated for a table, and has as many entries as the other
        // root.
        unsafe {
            let table = slots.open(root, level);
            for (number, entry) in early.iter().enumerate() {
                table.add(number).as_ref().store(entry.load());
            }
            slots.close(root, table);
        }
        slots.end_batch();
        // SAFETY: it says the same as the first.
        unsafe { load_upper(root) };
        Ok(Self { machine, fixmap, root })
    }

    fn goal<'m>(&self, ram: &'m [Span<Pa>]) -> Goal<'m> {
        Goal {
            root: self.root,
            base: Va::new(LINEAR),
            memory: MemoryMap { ram, reserved: &[], special: &[] },
            attrs: Attrs::KERNEL_DATA,
        }
    }
}

/// Boots a kernel, and has it map memory in one step.
fn step(build: impl FnOnce(&Kernel, &Goal<'_>) -> Done) -> Done {
    let kernel = Kernel::boot()?;
    let ram = [span(&RAM)?];
    build(&kernel, &kernel.goal(&ram))?;
    check(RAM.end)
}

fn published(name: &str, techniques: Techniques) -> Done {
    step(|Kernel { machine, fixmap, .. }, goal| {
        // SAFETY: the root is that which is in use; the fixmap shows any frame, and there is no
        // other editor.
        counted(name, || unsafe {
            tablewright_linear::build::<Arm64K4, _, _>(techniques, machine, fixmap, goal)
        })
    })
}

/// Loads a coarse map in the lower half, or takes it out again.
fn switch(root: Option<Pa>) {
    // SAFETY: the lower half is used by the coarse map alone; the only processor has unloaded a
    // root when its register holds another.
    unsafe {
        match root {
            Some(root) => load_lower(root, COARSE_ID),
            None => load_lower(physical(&raw const empty), 0),
        }
    }
}

fn coarse() -> Done {
    step(|Kernel { machine, fixmap, .. }, goal| {
        // SAFETY: as in `published`, and `switch` has unloaded the root when it says so.
        counted("tablewright", || unsafe {
            engine::coarse::<Arm64K4, _, _, _>(machine, fixmap, goal, Lower, switch)
        })
    })
}

/// Adds memory when the map is there.
fn late(is_published: bool) -> Done {
    let kernel = Kernel::boot()?;
    let machine = &kernel.machine;
    let ram = [span(&RAM)?];
    let goal = kernel.goal(&ram);
    // SAFETY: as in `published`.
    unsafe { engine::through_slots::<Arm64K4, _, _>(machine, &kernel.fixmap, &goal) }
        .map_err(|error| error.to_string())?;
    check(RAM.end)?;
    let added = span(&ADDED)?;
    let ram = [span(&RAM)?, added];
    let goal = kernel.goal(&ram);
    let all = Technique::ALL.into_iter().collect();
    match is_published {
        // SAFETY: as in `published`; the linear map has all tables, those that are allocated too.
        true => counted("late", || unsafe {
            tablewright_linear::add::<Arm64K4, _, _>(all, machine, &Finished, &goal, added)
        }),
        // SAFETY: as for the other.
        false => counted("late-tablewright", || unsafe {
            engine::add::<Arm64K4, _>(machine, &Finished, &goal, added)
        }),
    }?;
    check(ADDED.end)
}

/// Maps one to one, which was discussed beside the techniques, and is not counted.
fn one_to_one() -> Done {
    step(|Kernel { machine, fixmap, .. }, goal| {
        // SAFETY: as in `coarse`; all tables are of the memory that is mapped.
        timed("one-to-one", || unsafe {
            alternatives::one_to_one::<Arm64K4, _, _, _>(machine, fixmap, goal, Lower, switch)
        })
    })
}

/// Maps in blocks and contiguous runs, as published and by the engine; not counted.
fn blocks() -> Done {
    let techniques = Technique::ALL.into_iter().collect();
    step(|Kernel { machine, fixmap, .. }, goal| {
        // SAFETY: as in `published`.
        timed("blocks", || unsafe {
            alternatives::blocks::<Arm64K4, _, _>(techniques, machine, fixmap, goal)
        })
    })?;
    step(|Kernel { machine, fixmap, .. }, goal| {
        // SAFETY: as in `published`.
        timed("blocks-tablewright", || unsafe {
            engine::largest::<Arm64K4, _, _>(machine, fixmap, goal)
        })
    })
}

fn all() -> Done {
    let mut techniques = Techniques::default();
    published("base", techniques)?;
    for technique in Technique::ALL {
        techniques = techniques.with(technique);
        published(technique.name(), techniques)?;
    }
    coarse()?;
    late(true)?;
    late(false)?;
    one_to_one()?;
    blocks()
}

#[unsafe(no_mangle)]
extern "C" fn main() -> ! {
    const SIZE: usize = 64 << 10;
    static mut MEMORY: [u8; SIZE] = [0; SIZE];
    // SAFETY: memory of its own, given away once.
    unsafe { HEAP.lock().init((&raw mut MEMORY).expose_provenance(), SIZE) };
    match all() {
        Ok(()) => common::end(NAME, format_args!("done")),
        Err(why) => common::end(NAME, format_args!("WRONG: {why}")),
    }
}

#[unsafe(no_mangle)]
extern "C" fn exception(syndrome: u64, at: u64, from: u64) -> ! {
    common::end(NAME, format_args!("WRONG: exception {syndrome:#x} at {at:#x}, from {from:#x}"))
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    common::end(NAME, format_args!("WRONG: {info}"))
}
