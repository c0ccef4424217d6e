//! What a flush of stage 2 takes, counted by an emulator: 16 pages that do not adjoin are unmapped
//! in one gather.
//!
//! It runs at EL2 with its MMU off, so that an address is what it is, and no guest is there: what
//! has to be forgotten does not depend on that. Before and after the flush there is a mark, by
//! which the emulator tells what to count (`xtask/plugin`).
#![no_std]
#![no_main]

mod payload;

use core::arch::{asm, global_asm};
use core::cell::Cell;
use core::fmt;
use core::ops::ControlFlow;
use core::panic::PanicInfo;
use core::ptr::{self, NonNull};

use tablewright::arch::arm64::{Cpu, Ids};
use tablewright::format::Stage2;
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Entry, Invalidation, Ipa, Level, Mapping, Pa, Platform,
    Span,
};

type Format = Stage2<12, 40>;

const PAGE: u64 = 4096;
/// The ranges of the flush, each in a table of its own.
const RANGES: u64 = 16;
/// What one table of pages translates.
const APART: u64 = 2 << 20;
/// Two frames for the root, one for each other level, and those of the pages.
const FRAMES: usize = 4 + RANGES as usize;

// There are no exceptions to take.
global_asm!(
    payload::head!(),
    "start:",
    "adrp x0, stack_end",
    "add x0, x0, :lo12:stack_end",
    "mov sp, x0",
    "bl main",
    "b .",
);

#[repr(C, align(8192))]
struct Frames([[u8; PAGE as usize]; FRAMES]);

static mut MEMORY: Frames = Frames([[0; PAGE as usize]; FRAMES]);

/// Frames from a static array, which are not given out twice.
struct Machine {
    cpu: Cpu,
    used: Cell<usize>,
}

impl Machine {
    fn take(&self, count: usize) -> Option<Pa> {
        let first = self.used.get();
        self.used.set(first + count);
        let frames = (&raw const MEMORY).cast::<[u8; PAGE as usize]>();
        (first + count <= FRAMES)
            .then(|| Pa::new(frames.wrapping_add(first).expose_provenance() as u64))
    }
}

// SAFETY: frames are given out once and aligned, the root's first; the pointers are good because
// the MMU is off; barriers and invalidations are those of the processor, all of them.
unsafe impl Platform for Machine {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        self.take(1)
    }

    unsafe fn free_table(&self, _: Pa, _: Level) {}

    fn alloc_root(&self, _: Level, tables: usize) -> Option<Pa> {
        self.take(tables)
    }

    unsafe fn free_root(&self, _: Pa, _: Level, _: usize) {}

    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        let table = ptr::with_exposed_provenance_mut(frame.get() as usize);
        // SAFETY: a frame of the array is not at 0.
        unsafe { NonNull::new_unchecked(table) }
    }

    fn barrier(&self, barrier: Barrier) {
        self.cpu.barrier(barrier);
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        self.cpu.invalidate(what);
    }

    fn caps(&self) -> Caps {
        // VTCR_EL2.HA and HD are clear.
        Caps {
            hardware_access: false,
            hardware_dirty: false,
            ..Caps::CONSERVATIVE
        }
    }
}

fn mark<const NUMBER: u16>() {
    // SAFETY: writes the zero register.
    unsafe { asm!("movz xzr, #{}", const NUMBER, options(nostack, preserves_flags)) }
}

fn flush() -> Result<(), &'static str> {
    let machine = Machine {
        cpu: Cpu::of::<Format>(&Ids::read()),
        used: Cell::new(0),
    };
    let mut space = AddressSpace::<Format, _>::new(&machine)
        .ok_or("no root")?
        .with_id(1);
    let page = |index| Span::new(Ipa::new(index * APART), PAGE).map_err(|_| "no such page");
    for index in 0..RANGES {
        let mapping = Mapping::new(Attrs::GUEST_MEMORY).pages_only();
        let frame = Pa::new(index * PAGE);
        let mapped = space.map(page(index)?, frame, mapping);
        mapped.map_err(|_| "a page cannot be mapped")?;
    }
    space.make_live();
    let mut gather = space.gather();
    for index in 0..RANGES {
        let unmapped = gather.unmap(page(index)?, |_| ControlFlow::Continue(()));
        let progress = unmapped.map_err(|_| "a page cannot be unmapped")?;
        if !progress.is_done() {
            return Err("a page is unmapped in part");
        }
    }
    mark::<1>();
    gather.finish(|_| ());
    mark::<2>();
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn main() -> ! {
    match flush() {
        Ok(()) => end(format_args!("done")),
        Err(why) => end(format_args!("WRONG: {why}")),
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    end(format_args!("WRONG: {info}"))
}

/// Says how it ended, and switches the machine off.
fn end(how: fmt::Arguments<'_>) -> ! {
    payload::end("flushes", how)
}
