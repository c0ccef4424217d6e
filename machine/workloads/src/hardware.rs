//! The machines that programs run on: what their hardware has, what it costs, and their memory.

use std::cell::RefCell;

use tablewright_machine::{Architecture, Costs, Granule, Memory, Ordering, Regime, Setup, Time};

use crate::dice::Dice;

/// First address of the memory of each machine: nothing else begins there.
pub const MEMORY: u64 = 1 << 32;

pub const fn stage1(granule: Granule, wide: bool) -> Regime {
    Regime::Arm64Stage1 { granule, wide }
}

pub const fn stage2(
    granule: Granule,
    input_bits: u8,
    wide: bool,
    forced_write_back: bool,
) -> Regime {
    Regime::Arm64Stage2 { granule, input_bits, wide, forced_write_back }
}

/// Hardware with or without each of the options that there are. `marks` draws whether EPT has
/// accessed and dirty flags.
pub fn architecture(
    regime: Regime,
    dice: &Dice,
    marks: impl FnOnce(&Dice) -> bool,
) -> Architecture {
    match regime {
        Regime::X86_64 { levels } => Architecture::x86_64(levels),
        Regime::Ept { .. } => {
            let flags = marks(dice);
            Architecture {
                hardware_access: flags,
                hardware_dirty: flags,
                regime,
                ..Architecture::ept()
            }
        }
        Regime::Npt { .. } => Architecture { regime, ..Architecture::npt() },
        Regime::Riscv { levels, guest } => {
            // Svadu and Svvptc, or not.
            let flags = dice.once_in(2);
            Architecture {
                hardware_access: flags,
                hardware_dirty: flags,
                invalid_entries_cached: dice.once_in(2),
                permission_fault_drops_entry: dice.once_in(2),
                ..Architecture::riscv64(levels, guest)
            }
        }
        Regime::Arm64Stage1 { .. }
        | Regime::Arm64Stage1Sized { .. }
        | Regime::Arm64El2 { .. }
        | Regime::Arm64Stage2 { .. } => {
            let hardware_access = dice.once_in(2);
            let forced = matches!(regime, Regime::Arm64Stage2 { forced_write_back: true, .. });
            let nested = matches!(regime, Regime::Arm64Stage2 { .. });
            Architecture {
                ordering: dice.pick(&[Ordering::Base, Ordering::Ets2]),
                bbm: dice.below(if nested { 4 } else { 3 }) as u8,
                hardware_access,
                hardware_dirty: hardware_access && dice.below(3) > 0,
                invalidate_twice: dice.once_in(4),
                permission_fault_drops_entry: dice.once_in(2),
                forced_write_back: forced,
                // With forced write-back nothing is cleaned for the sake of fetches.
                idc: forced || dice.once_in(2),
                dic: dice.once_in(3),
                icache_aliasing: dice.once_in(4),
                guest: nested.then_some(stage1(Granule::K4, false)),
                ..Architecture::arm64(regime)
            }
        }
    }
}

/// One or another way to invalidate, and TLBs that are full soon.
pub fn small(base: Architecture, dice: &Dice) -> Architecture {
    Architecture {
        range_invalidation: dice.once_in(2),
        invalidate_all_above: dice.pick(&[4, 33, 512]),
        tlb_sets: 4,
        tlb_ways: dice.pick(&[1, 2, 4]),
        walk_cache: dice.pick(&[2, 16]),
        ..base
    }
}

/// A guest whose stage 1, and with it its caches, is off; or one that is known by stage 2 alone.
pub fn perhaps_nested(base: Architecture, dice: &Dice) -> Architecture {
    Architecture { guest: base.guest.filter(|_| dice.once_in(2)), ..base }
}

thread_local! {
    /// One for each size of pages: the host need not provide them for each run anew.
    static MEMORIES: RefCell<Vec<Memory>> = const { RefCell::new(Vec::new()) };
}

/// Memory of so many frames, which may have been used before.
pub fn memory(frames: usize, page_shift: u32) -> Memory {
    let fits = |memory: &Memory| (memory.frames(), memory.page_shift()) == (frames, page_shift);
    MEMORIES.with_borrow_mut(|memories| match memories.iter().position(fits) {
        Some(at) => memories.swap_remove(at),
        None => Memory::new(frames, page_shift, MEMORY),
    })
}

/// Keeps the memory of a machine for the next.
pub fn keep(memory: Memory) {
    MEMORIES.with_borrow_mut(|memories| memories.push(memory));
}

/// A machine's rules and memory, with costs of which the order of magnitude matters alone.
pub fn setup(architecture: Architecture, memory: Memory, seed: u64, cpus: usize) -> Setup {
    let mut setup = Setup::new(architecture, memory);
    setup.costs = Costs {
        entry: Time::ns(3),
        load: Time::ns(3),
        exchange: Time::ns(15),
        table: Time::ns(80),
        publish: Time::ns(20),
        issue: Time::ns(15),
        complete: Time::ns(300),
        walk: Time::ns(6),
        access: Time::ns(10),
        exception: Time::ns(400),
        lock_take: Time::ns(15),
        lock_hand_over: Time::ns(60),
        clean: Time::ns(200),
        ..Costs::default()
    };
    setup.scheduler.cpus = cpus;
    setup.scheduler.perturbation.seed = seed;
    setup.scheduler.perturbation.pause_once_in = 300;
    setup.scheduler.perturbation.pause = Time::us(4);
    setup
}
