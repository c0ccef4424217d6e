//! The engine's way: a coarse map of table memory in a root of its own, the linear map built through it, and the coarse
//! map taken away again.

use tablewright::linear::{Coarse, Identity, LinearError, SlotMemory, Slots, Window, Windowed};
use tablewright::{AddressSpace, Attrs, EditError, Format, Half, Liveness, Pa, Platform, Va};

use super::Goal;
use super::fixmap::{Fixmap, LAST_LEVEL};

/// The identity (ASID, PCID) of the coarse map.
pub const COARSE_ID: u16 = 1;

/// Maps all memory of `goal` with the engine. `switch` is told to load the root of the coarse map, under the identity
/// [`COARSE_ID`], and at the end, with `None`, to unload it; `identity` is used in between. The fixmap serves until the
/// coarse map reaches its own tables, and again for taking them down.
///
/// # Errors
/// [`LinearError`]; nothing has changed then.
///
/// # Safety
/// 1. `goal.root` holds the first table of a tree of this format, and all its tables are frames that the fixmap and,
///    while it is loaded, the coarse map can show.
/// 2. So are the frames that the platform allocates.
/// 3. Nobody else edits the tree meanwhile.
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
    I: Identity,
{
    // SAFETY: the caller of `Fixmap::new` vouched for more entries than these, and nobody else uses them.
    let slots = unsafe {
        Slots::<F, _, _, LAST_LEVEL>::new(
            platform,
            &fixmap.memory,
            fixmap.base,
            fixmap.entry(0),
            &goal.attrs,
            0,
        )
    }
    .map_err(EditError::from)?;
    // In an address space of its own, so not global.
    let attrs = Attrs {
        global: false,
        ..goal.attrs
    };
    let window =
        Coarse::<F, _, _, _>::new(platform, identity, &slots, goal.memory, attrs, COARSE_ID)
            .ok_or(EditError::OutOfTables)?;
    switch(Some(window.root()));

    let half = if F::HALVES && goal.base.get() >> 63 != 0 {
        Half::Upper
    } else {
        Half::Lower
    };
    let through = Windowed::new(platform, &window);
    // SAFETY: passed on (1., 3.); processors may be using the root.
    let mut space = unsafe { AddressSpace::<F, _>::adopt(through, goal.root, half, Liveness::Own) };
    let mut flush = space.flush();
    let built = goal.linear().build(&mut space, &goal.memory, &mut flush);
    flush.finish(|_| ());

    switch(None);
    // SAFETY: unloaded, by (4.); the frames came from this platform, and the fixmap reaches them whether or not there
    // is a linear map now.
    unsafe { window.finish(Windowed::new(platform, &slots)) };
    slots.end_batch();
    built
}
