//! A fault of a guest on one page, through [`Guest`], as a handler makes it that many virtual CPUs
//! run: classify, look up, map, finish. One processor faults here; what it does is what it would do
//! beside others.

use std::ptr::{self, NonNull};
use std::time::Instant;

use tablewright::format::{Ept, Stage2K4};
use tablewright::guest::{Backing, Fault, Gather, Guest, Slot as Memory, SlotCell};
use tablewright::shared::{
    Epochs, GracePeriod, Quiescence, Refused, SharedPlatform, SharedSpace, WalkSlot, Walking,
};
use tablewright::{
    AddressSpace, Barrier, Entry, Format, Invalidation, Ipa, Level, Pa, Platform, Span,
};
use tablewright_walker::{Granule, Half, Regime};

use super::super::subject::Work;
use super::calls::{Calls, MOST, TABLES, physical};
use crate::arena::Arena;
use crate::format::Architecture;
use crate::judge::Tree;
use crate::stats::Samples;

/// How a processor tells others that it walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// By an announcement at each walk.
    Epochs,
    /// By states that it passes between faults.
    QuiescentStates,
}

impl Told {
    /// Both ways.
    pub const BOTH: [Self; 2] = [Self::Epochs, Self::QuiescentStates];

    /// Its name in tables and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Epochs => "epochs",
            Self::QuiescentStates => "quiescent states",
        }
    }
}

/// When walks are over.
trait States {
    type Walk<'a>
    where
        Self: 'a;
    fn enter(&self) -> Self::Walk<'_>;
    fn grace_period(&self) -> GracePeriod;
    fn is_over(&self, period: GracePeriod) -> bool;
    /// Between two faults.
    fn pass(&self);
}

impl<'s> States for Epochs<'s> {
    type Walk<'a>
        = Option<Walking<'a>>
    where
        Self: 'a;

    #[inline(always)]
    fn enter(&self) -> Option<Walking<'_>> {
        // SAFETY: there is one thread (1.), without interrupts (2.); a walk ends in the edit that
        // starts it (3.); the slots are local to `faults`, and these epochs' alone (4.).
        unsafe { Epochs::enter(self, 0) }
    }

    fn grace_period(&self) -> GracePeriod {
        self.advance()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        Epochs::is_over(self, period)
    }

    #[inline(always)]
    fn pass(&self) {}
}

impl<'s> States for Quiescence<'s> {
    type Walk<'a>
        = ()
    where
        Self: 'a;

    #[inline(always)]
    fn enter(&self) {}

    fn grace_period(&self) -> GracePeriod {
        self.advance()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        Quiescence::is_over(self, period)
    }

    #[inline(always)]
    fn pass(&self) {
        // SAFETY: there is one thread, without interrupts (1.), which calls this between faults,
        // outside of any walk (2.); the slots are local to `faults`, and these states' alone (3.).
        unsafe { Quiescence::pass(self, 0) };
    }
}

/// An arena for tables that processors share.
struct Shared<S> {
    arena: Arena,
    states: S,
}

// SAFETY: the arena hands out each frame once until it is given back (1.), where it is as long as
// the program runs, at the address that is its number (2.). There are no links (3.). No processor
// walks (4. to 6.). A reference is the platform (7.).
unsafe impl<S> Platform for Shared<S> {
    #[inline]
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        Some(Pa::new(self.arena.take()?.addr().get() as u64))
    }

    #[inline]
    unsafe fn free_table(&self, frame: Pa, _: Level) {
        self.arena.give_back(frame.get() as usize);
    }

    #[inline(always)]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        let table: *mut Entry = ptr::with_exposed_provenance_mut(frame.get() as usize);
        // SAFETY: a frame of the arena, which is not at address 0.
        unsafe { NonNull::new_unchecked(table) }
    }

    #[inline(always)]
    fn barrier(&self, _: Barrier) {}

    #[inline(always)]
    fn invalidate(&self, _: &Invalidation<'_>) {}
}

// SAFETY: the states keep both promises; the one thread has a slot.
unsafe impl<S: States> SharedPlatform for Shared<S> {
    type Walk<'a>
        = S::Walk<'a>
    where
        S: 'a;

    #[inline(always)]
    fn enter(&self) -> S::Walk<'_> {
        self.states.enter()
    }

    fn grace_period(&self) -> GracePeriod {
        self.states.grace_period()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        self.states.is_over(period)
    }
}

/// Faults once on the first page of each call, in tables that exist. Nanoseconds for each, of the
/// part in the middle; all tables are given back.
pub fn round(
    architecture: Architecture,
    told: Told,
    arena: Arena,
    parts: &[Calls],
    kept: &Calls,
) -> Result<f64, String> {
    let slots = [const { WalkSlot::new() }];
    match (architecture, told) {
        (Architecture::Arm64, Told::Epochs) => {
            faults::<Stage2K4<48>, _>(Epochs::new(&slots), ARM64, arena, parts, kept, arm64)
        }
        (Architecture::Arm64, Told::QuiescentStates) => {
            let states = Quiescence::new(&slots);
            faults::<Stage2K4<48>, _>(states, ARM64, arena, parts, kept, arm64)
        }
        (Architecture::X86_64, Told::Epochs) => {
            faults::<Ept<4>, _>(Epochs::new(&slots), EPT, arena, parts, kept, ept)
        }
        (Architecture::X86_64, Told::QuiescentStates) => {
            faults::<Ept<4>, _>(Quiescence::new(&slots), EPT, arena, parts, kept, ept)
        }
    }
}

const ARM64: Regime = Regime::Arm64Stage2 {
    granule: Granule::K4,
    input_bits: 48,
    wide: false,
    forced_write_back: false,
};

const EPT: Regime = Regime::Ept {
    levels: 4,
    mode_based: false,
};

/// A write, which ended at the last level.
#[inline(always)]
fn arm64(at: u64) -> Option<Fault> {
    Fault::arm64(0x24 << 26 | 1 << 6 | 0b00_0111, at >> 12 << 4, at)
}

/// A write to what no entry allows.
#[inline(always)]
fn ept(at: u64) -> Option<Fault> {
    Some(Fault::ept(1 << 1, at))
}

type Vcpu<'g, 's, F, S> = Gather<'g, 's, F, &'s Shared<S>>;

#[inline(always)]
fn abort<'s, F: Format<Input = Ipa>, S: States>(
    gather: &mut Vcpu<'_, 's, F, S>,
    fault: Option<Fault>,
) -> Result<(), String> {
    let fault = fault.ok_or("is no fault")?;
    let request = gather
        .guest()
        .request(&fault)
        .map_err(|declined| format!("{declined:?}"))?;
    gather.top_up(request.tables());
    let page = Backing::new(Pa::new(request.host()), Work::PAGE);
    loop {
        match gather.map(&request, &page) {
            Ok(_) => break,
            Err(Refused::NeedsTables(count)) if gather.top_up(count) => {}
            Err(refused) => return Err(refused.to_string()),
        }
    }
    gather
        .finish(|_| ())
        .map_err(|_| "has detached something".to_owned())
}

fn faults<F: Format<Input = Ipa>, S: States>(
    states: S,
    regime: Regime,
    arena: Arena,
    parts: &[Calls],
    kept: &Calls,
    fault: impl Fn(u64) -> Option<Fault>,
) -> Result<f64, String> {
    let platform = Shared { arena, states };
    let mut cells = [const { SlotCell::new() }];
    let space = AddressSpace::<F, _>::new(&platform).ok_or("out of tables")?;
    let root = space.root().get();
    let Ok(space) = SharedSpace::new(space) else {
        return Err("a dead space is not shared".to_owned());
    };
    let guest = Guest::new(space, &mut cells);
    let bytes = TABLES * MOST * Work::PAGE;
    let memory = Span::new(Ipa::new(Work::VIRTUAL), bytes).map_err(|error| error.to_string())?;
    guest
        .insert(Memory::memory(memory, Work::PHYSICAL))
        .map_err(|error| format!("{error:?}"))?;
    platform.states.pass();
    let mut gather = guest.gather();
    for &at in &kept.starts {
        abort(&mut gather, fault(at))?;
    }

    let mut samples = Samples::default();
    for calls in parts {
        let started = Instant::now();
        for &at in &calls.starts {
            platform.states.pass();
            abort(&mut gather, fault(at))?;
        }
        let elapsed = started.elapsed();
        samples.push(elapsed.as_nanos() as f64 / calls.count() as f64);
    }

    gather.release_tables();
    drop(gather);
    let tree = Tree {
        arena,
        root,
        regime,
        half: Half::Lower,
        hardware_dirty: false,
    };
    let mut count = 0;
    tree.leaves(Half::Lower, |leaf| {
        count += 1;
        let right = leaf.pa == physical(leaf.va) && leaf.size == Work::PAGE;
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
    if space.destroy(|_| ()).is_err() || arena.held() != 0 {
        return Err(format!("kept {} tables", arena.held()));
    }
    Ok(samples.median())
}
