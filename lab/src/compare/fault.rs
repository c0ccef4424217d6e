//! A fault of a guest on one page, through [`Guest`], as the handler of many virtual CPUs makes it:
//! classify, find the memory, map, finish. One processor faults here, at the price of many.

use std::time::Instant;

use tablewright::arch::riscv64::guest_fault;
use tablewright::format::{Ept, Stage2K4, Sv48x4};
use tablewright::guest::{Backing, Fault, Gather, Guest, Slot as Memory, SlotCell};
use tablewright::shared::{Epochs, Refused, SharedSpace, WalkSlot};
use tablewright::{AddressSpace, Format, Ipa, Pa, Span};
use tablewright_walker::{Granule, Half, Regime};

use crate::compare::calls::{Calls, MOST, PAGE, PHYSICAL, TABLES, VIRTUAL, physical};
use crate::compare::shared::{Quiescence, Shared, States};
use crate::format::Architecture;
use crate::memory::arena::Arena;
use crate::memory::judge::Tree;
use crate::stats::Samples;

/// The ways in which a processor announces its walks, as tables name them.
pub const WAYS: [&str; 2] = ["epochs", "quiescent states"];

/// Faults once on the first page of each call, in tables that exist, in the way of this number.
/// Returns nanoseconds for each, the median of the parts. All tables are freed.
///
/// # Safety
/// 1. No frame of the arena is in use.
pub unsafe fn round(
    architecture: Architecture,
    way: usize,
    arena: Arena,
    parts: &[Calls],
    kept: &Calls,
) -> Result<f64, String> {
    let slots = [const { WalkSlot::new() }];
    let epochs = || Epochs::new(&slots);
    let states = Quiescence::new;
    // SAFETY: no frame is in use (1.), and one of the two uses the local slots (2.).
    unsafe {
        match (architecture, way) {
            (Architecture::Arm64, 0) => {
                faults::<Stage2K4<48>, _>(epochs(), ARM64, arena, parts, kept, arm64)
            }
            (Architecture::Arm64, _) => {
                faults::<Stage2K4<48>, _>(states(), ARM64, arena, parts, kept, arm64)
            }
            (Architecture::X86_64, 0) => {
                faults::<Ept<4>, _>(epochs(), EPT, arena, parts, kept, ept)
            }
            (Architecture::X86_64, _) => {
                faults::<Ept<4>, _>(states(), EPT, arena, parts, kept, ept)
            }
            (Architecture::Riscv64, 0) => {
                faults::<Sv48x4, _>(epochs(), SV48X4, arena, parts, kept, riscv64)
            }
            (Architecture::Riscv64, _) => {
                faults::<Sv48x4, _>(states(), SV48X4, arena, parts, kept, riscv64)
            }
        }
    }
}

const ARM64: Regime = Regime::Arm64Stage2 {
    granule: Granule::K4,
    input_bits: 48,
    wide: false,
    forced_write_back: false,
};

const EPT: Regime = Regime::Ept { levels: 4, mode_based: false };

const SV48X4: Regime = Regime::Riscv { levels: 4, guest: true };

/// A write that ended at the last level.
#[inline(always)]
fn arm64(at: u64) -> Option<Fault> {
    Fault::arm64(0x24 << 26 | 1 << 6 | 0b00_0111, at >> 12 << 4, at)
}

/// A write that no entry allows.
#[inline(always)]
fn ept(at: u64) -> Option<Fault> {
    Some(Fault::ept(1 << 1, at))
}

/// A store.
#[inline(always)]
fn riscv64(at: u64) -> Option<Fault> {
    guest_fault(23, at, at >> 2, 0)
}

#[inline(always)]
fn abort<'s, F: Format<Input = Ipa>, S: States>(
    gather: &mut Gather<'_, 's, F, &'s Shared<S, 1>>,
    fault: Option<Fault>,
) -> Result<(), String> {
    let fault = fault.ok_or("is no fault")?;
    let request = gather.guest().request(&fault).map_err(|declined| format!("{declined:?}"))?;
    gather.top_up(request.tables());
    let page = Backing::new(Pa::new(request.host()), PAGE);
    loop {
        match gather.map(&request, &page) {
            Ok(_) => break,
            Err(Refused::NeedsTables(count)) if gather.top_up(count) => {}
            Err(refused) => return Err(refused.to_string()),
        }
    }
    gather.finish(|_| ()).map_err(|_| "has detached something".to_owned())
}

/// # Safety
/// 1. No frame of the arena is in use.
/// 2. No other value uses the slots of the states.
unsafe fn faults<F: Format<Input = Ipa>, S: States>(
    states: S,
    regime: Regime,
    arena: Arena,
    parts: &[Calls],
    kept: &Calls,
    fault: impl Fn(u64) -> Option<Fault>,
) -> Result<f64, String> {
    // SAFETY: no frame is in use (1.); there is one thread (2.) and nothing else uses the slots
    // (3.).
    let platform = unsafe { Shared::<S, 1>::new(arena, states) }?;
    let mut cells = [const { SlotCell::new() }];
    let space = AddressSpace::<F, _>::new(&platform).ok_or("out of tables")?;
    let root = space.root().get();
    let Ok(space) = SharedSpace::new(space) else {
        return Err("a dead space is not shared".to_owned());
    };
    let guest = Guest::new(space, &mut cells);
    let bytes = TABLES * MOST * PAGE;
    let memory = Span::new(Ipa::new(VIRTUAL), bytes).map_err(|error| error.to_string())?;
    guest.insert(Memory::memory(memory, PHYSICAL)).map_err(|error| format!("{error:?}"))?;
    platform.pass();
    let mut gather = guest.gather();
    for &at in &kept.starts {
        abort(&mut gather, fault(at))?;
    }

    let mut samples = Samples::default();
    for calls in parts {
        let started = Instant::now();
        for &at in &calls.starts {
            platform.pass();
            abort(&mut gather, fault(at))?;
        }
        let elapsed = started.elapsed();
        samples.push(elapsed.as_nanos() as f64 / calls.count() as f64);
    }

    gather.release_tables();
    drop(gather);
    let tree = Tree { arena, root, regime, half: Half::Lower, hardware_dirty: false };
    let mut count = 0;
    tree.leaves(Half::Lower, |leaf| {
        count += 1;
        let right = leaf.pa == physical(leaf.va) && leaf.size == PAGE;
        if right && leaf.access.privileged.write {
            Ok(())
        } else {
            Err(format!("{:#x} is mapped to {:#x}", leaf.va, leaf.pa))
        }
    })?;
    let calls: usize = parts.iter().map(Calls::count).sum();
    if count != calls + kept.count() {
        return Err(format!("{count} pages are mapped"));
    }
    let mut space = guest.into_space().into_exclusive();
    // SAFETY: no processor has ever walked these tables.
    unsafe { space.make_dead() };
    if space.destroy(|_| ()).is_err() || platform.held() != 0 {
        return Err(format!("kept {} tables", platform.held()));
    }
    Ok(samples.median())
}
