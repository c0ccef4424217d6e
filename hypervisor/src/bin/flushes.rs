//! Instructions of a flush of stage 2, counted by an emulator: 16 pages that do not adjoin are
//! unmapped in one gather.
//!
//! It runs at EL2 with its MMU off, so that an address is what it is, and no guest is there: what
//! has to be forgotten does not depend on that. Before and after the flush there is a mark, by
//! which the emulator tells what to count (`xtask/plugin`).
#![no_std]
#![no_main]

mod payload;

use core::arch::{asm, global_asm};
use core::ops::ControlFlow;
use core::ptr::{self, NonNull};

use tablewright::arch::arm64::{Cpu, Ids};
use tablewright::format::Stage2;
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Entry, Invalidation, Ipa, Level, Mapping, Pa, Platform,
    Span,
};

use payload::{Frames, Outcome, program};

type Format = Stage2<12, 40>;

const PAGE: u64 = 4096;
/// The ranges of the flush, each in a table of its own.
const RANGES: u64 = 16;
/// The memory that one table of pages translates.
const APART: u64 = 2 << 20;
/// Two frames for the root, one for each other level, and those of the pages.
const FRAMES: usize = 4 + RANGES as usize;

// There are no exceptions to take.
global_asm!(payload::start!());

static MEMORY: Frames<FRAMES> = Frames::new();

/// The processor, and frames that are not given out twice.
struct Machine {
    cpu: Cpu,
}

impl Machine {
    fn take(&self, count: u64) -> Option<Pa> {
        MEMORY.take(count)
    }
}

// SAFETY: frames are given out once and aligned, the root's first; the pointers are good because
// the MMU is off; barriers and invalidations are those of the processor, all of them.
unsafe impl Platform for Machine {
    payload::tables!(take);

    unsafe fn free_table(&self, _: Pa, _: Level) {}

    fn barrier(&self, barrier: Barrier) {
        self.cpu.barrier(barrier);
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        self.cpu.invalidate(what);
    }

    fn caps(&self) -> Caps {
        payload::CAPS
    }
}

fn mark<const NUMBER: u16>() {
    // SAFETY: writes the zero register.
    unsafe { asm!("movz xzr, #{}", const NUMBER, options(nostack, preserves_flags)) }
}

fn flush() -> Outcome {
    let machine = Machine { cpu: Cpu::of::<Format>(&Ids::read()) };
    let mut space = AddressSpace::<Format, _>::new(&machine).ok_or("no root")?.with_id(1);
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
    Ok(None)
}

program!("flushes", flush);
