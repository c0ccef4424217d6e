//! The engine's way: a coarse map of table memory in a root of its own, the linear map built
//! through it, and the coarse map taken away again. Where one root serves both halves,
//! [slots](through_slots) have to do.

use tablewright::linear::{
    Coarse, LinearError, LinearMap, OneToOne, SlotMemory, Slots, Window, Windowed,
};
use tablewright::{
    AddressSpace, Attrs, EditError, Format, Half, Liveness, Mapping, Pa, Platform, Span, Va,
};

use super::Goal;
use super::fixmap::{Fixmap, LAST_LEVEL};

/// The identity (ASID, PCID) of the coarse map.
pub const COARSE_ID: u16 = 1;

/// Maps all memory of `goal` with the engine. `switch` is told to load the root of the coarse map,
/// under the identity [`COARSE_ID`], and at the end, with `None`, to unload it; `identity` is used
/// in between. The fixmap serves until the coarse map reaches its own tables, and again for taking
/// them down.
///
/// # Errors
/// [`LinearError`]; nothing has changed then.
///
/// # Safety
/// 1. `goal.root` holds the first table of a tree of this format, and all its tables are frames
///    that the fixmap and, while it is loaded, the coarse map can show.
/// 2. So are the frames that the platform allocates.
/// 3. The tree has no other editor meanwhile.
/// 4. When `switch` returns from unloading, no processor has the root loaded any more.
pub unsafe fn coarse<F, P, M, I>(
    platform: &P,
    fixmap: &Fixmap<M>,
    goal: &Goal<'_>,
    identity: I,
    mut switch: impl FnMut(Option<Pa>),
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform,
    M: SlotMemory,
    I: OneToOne,
{
    let slots = slots::<F, _, _>(platform, fixmap, goal)?;
    // In an address space of its own, so not global.
    let attrs = Attrs { global: false, ..goal.attrs };
    // SAFETY: the fixmap shows all frames (1. and 2. here), a slot for each table that is open
    // (1.); `switch` is told to load it under this identity (2.).
    let window = unsafe {
        Coarse::<F, _, _, _>::new(platform, identity, &slots, goal.memory, attrs, COARSE_ID)
    }
    .ok_or(EditError::OutOfTables)?;
    switch(Some(window.root()));

    // SAFETY: passed on (1. to 3.).
    let built = unsafe { edit::<F, _>(platform, &window, goal, None) };

    switch(None);
    // SAFETY: unloaded, by (4.); the frames came from this platform, and the fixmap shows them,
    // whether or not there is a linear map now.
    unsafe { window.finish(Windowed::new(platform, &slots as &dyn Window)) };
    slots.end_batch();
    built
}

/// Maps all memory of `goal` with the engine, through the slots of the fixmap alone.
///
/// # Errors
/// [`LinearError`]; nothing has changed then.
///
/// # Safety
/// 1. `goal.root` holds the first table of a tree of this format, and all its tables are frames
///    that the fixmap can show.
/// 2. So are the frames that the platform allocates.
/// 3. The tree has no other editor meanwhile.
pub unsafe fn through_slots<F, P, M>(
    platform: &P,
    fixmap: &Fixmap<M>,
    goal: &Goal<'_>,
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform,
    M: SlotMemory,
{
    let slots = slots::<F, _, _>(platform, fixmap, goal)?;
    // SAFETY: passed on (1. to 3.).
    let built = unsafe { edit::<F, _>(platform, &slots, goal, None) };
    slots.end_batch();
    built
}

/// Maps in blocks and contiguous runs, as large as fit: where the permissions of a page need not be
/// changed alone.
///
/// # Errors
/// [`LinearError`]; nothing has changed then.
///
/// # Safety
/// As for [`through_slots`].
pub unsafe fn largest<F, P, M>(
    platform: &P,
    fixmap: &Fixmap<M>,
    goal: &Goal<'_>,
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform,
    M: SlotMemory,
{
    let slots = slots::<F, _, _>(platform, fixmap, goal)?;
    let linear = LinearMap::new(goal.base, Mapping::new(goal.attrs));
    // SAFETY: passed on (1., 2.).
    let through = unsafe { Windowed::new(platform, &slots as &dyn Window) };
    // SAFETY: passed on (1., 3.); processors may be using the root, under identity 0.
    let space =
        unsafe { AddressSpace::<F, _>::adopt(through, goal.root, half::<F>(goal), Liveness::Own) };
    let built = space
        .map_err(LinearError::from)
        .and_then(|mut space| linear.build(&mut space, &goal.memory));
    slots.end_batch();
    built
}

/// Maps memory that was added after boot: what of `goal.memory` lies in `added`. Tables are reached
/// through `window`, the linear map itself.
///
/// # Errors
/// [`LinearError`]; nothing has changed then.
///
/// # Safety
/// As for [`add`](super::add).
pub unsafe fn add<F, P>(
    platform: &P,
    window: &dyn Window,
    goal: &Goal<'_>,
    added: Span<Pa>,
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform,
{
    // SAFETY: passed on (1. to 3.).
    unsafe { edit::<F, _>(platform, window, goal, Some(added)) }
}

pub(super) fn slots<'p, F, P, M>(
    platform: &'p P,
    fixmap: &'p Fixmap<M>,
    goal: &Goal<'_>,
) -> Result<Slots<'p, F, P, &'p M, LAST_LEVEL>, LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform,
    M: SlotMemory,
{
    let (memory, entries, tree) = (&fixmap.memory, fixmap.entry(0), (goal.root, 0));
    // SAFETY: the caller of `Fixmap::new` vouched for more entries than these, and nothing else
    // uses them (1.).
    let slots = unsafe { Slots::new(platform, memory, fixmap.base, entries, &goal.attrs, tree) };
    Ok(slots.map_err(EditError::from)?)
}

/// The half that the map is in.
fn half<F: Format>(goal: &Goal<'_>) -> Half {
    match F::HALVES && goal.base.get() >> 63 != 0 {
        true => Half::Upper,
        false => Half::Lower,
    }
}

/// Maps all memory of `goal`, or what of it lies in `added`, with tables that are reached through
/// `window`.
///
/// # Safety
/// 1. `goal.root` holds the first table of a tree of this format, and the window can show all its
///    tables.
/// 2. It can show the frames that the platform allocates.
/// 3. The tree has no other editor meanwhile.
unsafe fn edit<F, P>(
    platform: &P,
    window: &dyn Window,
    goal: &Goal<'_>,
    added: Option<Span<Pa>>,
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform,
{
    let half = half::<F>(goal);
    // SAFETY: passed on (1., 2.).
    let through = unsafe { Windowed::new(platform, window) };
    // SAFETY: passed on (1., 3.); processors may be using the root, under identity 0.
    let mut space =
        unsafe { AddressSpace::<F, _>::adopt(through, goal.root, half, Liveness::Own) }?;
    let (linear, memory) = (goal.linear(), &goal.memory);
    match added {
        None => linear.build(&mut space, memory),
        Some(added) => linear.add(&mut space, memory, added),
    }
}
