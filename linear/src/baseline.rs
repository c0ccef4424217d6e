//! The map as kernels have made it: one walk for all techniques.
//!
//! The walk goes down from the root, region by region. A table that is missing is allocated,
//! zeroed, and linked while it is still empty; then it is filled where walkers can see it. So there
//! are two things to publish: the zeroes before the link, for a walker that follows the link reads
//! what the frame held before; and each entry, or all of a table together, before it is relied on.
//!
//! What the techniques mean where they meet:
//!
//! * The last two levels are filled in contiguous runs, and the table is shown anew for each run,
//!   even where no entry carries the hint. Formats that have no runs fill a table in one piece.
//!   With **no-cont-remap** all do.
//! * A new table is zeroed in a last-level slot, whatever its level: none is in use at that time.
//!   With **no-alloc-remap** it is zeroed in the slot of its own level and stays there for its
//!   first run. Alone, this saves one of 33 moves (4 KiB pages); with no-cont-remap one of two.
//! * **lazy-unmap** is about last-level slots, so about zeroing too where that uses one. A table
//!   that is shown anew takes the next slot, although an older one may still show it. Whatever is
//!   stale is cleared at the end of each region.
//! * Closing a slot at once publishes all stores before it. So with **batch-barriers** a table
//!   needs a barrier of its own only where nothing is closed at once: with lazy-unmap, and late.
//! * A link is published by itself, whatever the techniques: there is one for each table.
//!
//! A map that fails stays half made, as the original, which panics, would leave it; but no slot is
//! left open.

use core::marker::PhantomData;
use core::ptr::NonNull;

use tablewright::linear::{LinearError, SlotMemory, Window};
use tablewright::{
    Barrier, EditError, Entry, Format, Hooks, Kind, Level, Pa, Perms, Platform, Span, Va,
};

use super::fixmap::Fixmap;
use super::reach::{Early, Late, Open, Reach};
use super::technique::{Technique, Techniques};
use super::{Goal, Region};

/// Maps all memory of `goal` as a kernel does that has these `techniques`: all tables, the root
/// among them, are reached through the fixmap.
///
/// # Errors
/// [`LinearError`] as [`LinearMap::build`](tablewright::linear::LinearMap::build) says it. Where
/// the memory map or the format is to blame, nothing has changed.
///
/// # Safety
/// 1. `goal.root` holds the first table of a tree of this format, and all its tables are frames
///    that the fixmap can show.
/// 2. So are the frames that the platform allocates.
/// 3. The tree has no other editor meanwhile.
pub unsafe fn build<F, P, M>(
    techniques: Techniques,
    platform: &P,
    fixmap: &Fixmap<M>,
    goal: &Goal<'_>,
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform + Hooks,
    M: SlotMemory,
{
    // SAFETY: passed on (1., 2., 3.).
    unsafe { through_fixmap::<F, P, M>(techniques, Leaves::Pages, platform, fixmap, goal) }
}

/// Maps with leaves of a page or as large as fit.
///
/// # Safety
/// As for [`build`].
pub(crate) unsafe fn through_fixmap<F, P, M>(
    techniques: Techniques,
    leaves: Leaves,
    platform: &P,
    fixmap: &Fixmap<M>,
    goal: &Goal<'_>,
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform + Hooks,
    M: SlotMemory,
{
    let regions = goal.regions::<F>(Some)?;
    let page = F::encode(&goal.attrs, Level::PAGE).map_err(EditError::from)?;
    let lazy = techniques.has(Technique::LazyUnmap);
    let mut reach = Early::<F, P, M>::new(platform, fixmap, goal, page, lazy);
    // SAFETY: passed on (1., 2., 3.).
    unsafe { map::<F, P>(techniques, leaves, platform, &mut reach, goal.root, &regions) }
}

/// Maps memory that was added after boot: what of `goal.memory` lies in `added`. Tables are reached
/// through `window`, the linear map itself, so that nothing is moved and nothing invalidated.
///
/// # Errors
/// As [`build`], and [`LinearError::NotRam`] if nothing of the range is memory.
///
/// # Safety
/// 1. `goal.root` holds the first table of a tree of this format, and all its tables can be reached
///    through `window`.
/// 2. So can the frames that the platform allocates.
/// 3. The tree has no other editor meanwhile.
pub unsafe fn add<F, P, W>(
    techniques: Techniques,
    platform: &P,
    window: &W,
    goal: &Goal<'_>,
    added: Span<Pa>,
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform + Hooks,
    W: Window,
{
    let mut ram = goal.memory.ram.iter();
    if !ram.any(|ram| ram.intersect(added).is_some()) {
        return Err(LinearError::NotRam(added));
    }
    let regions = goal.regions::<F>(|span| span.intersect(added))?;
    // SAFETY: passed on (1., 2., 3.).
    unsafe {
        map::<F, P>(techniques, Leaves::Pages, platform, &mut Late(window), goal.root, &regions)
    }
}

/// How large leaves may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// Pages alone, without the hint of a contiguous run.
    Pages,
    /// Leaves as large as fit, with the hint where a run fits.
    Largest,
}

/// # Safety
/// As [`build`], with `reach` in place of the fixmap.
pub unsafe fn map<F, P>(
    techniques: Techniques,
    leaves: Leaves,
    platform: &P,
    reach: &mut dyn Reach,
    root: Pa,
    regions: &[Region],
) -> Result<(), LinearError<Va>>
where
    F: Format<Input = Va>,
    P: Platform + Hooks,
{
    // SAFETY: the root of a tree, by (1.).
    let root = unsafe { reach.open(root, F::root_level()) };
    let mut walk = Walk::<F, P> { techniques, leaves, platform, reach, format: PhantomData };
    let mapped = regions.iter().try_for_each(|region| {
        let mapped = walk.entries(&root, (region.first, region.last), region);
        walk.reach.clean();
        mapped
    });
    walk.reach.close(root);
    Ok(mapped?)
}

/// The parts of the addresses `first` to `last` that lie in different blocks of `1 << shift` bytes.
fn parts((first, last): (u64, u64), shift: u32) -> impl Iterator<Item = (u64, u64)> {
    let mut rest = Some(first);
    core::iter::from_fn(move || {
        let first = rest?;
        let end = (first | ((1 << shift) - 1)).min(last);
        rest = (end < last).then(|| end + 1);
        Some((first, end))
    })
}

/// The walk. Invariant: every table it opens is the root, was read from a table descriptor of the
/// tree, or was allocated, so that it can be reached; `map` was promised that.
struct Walk<'a, F, P> {
    techniques: Techniques,
    leaves: Leaves,
    platform: &'a P,
    reach: &'a mut dyn Reach,
    format: PhantomData<F>,
}

impl<F: Format<Input = Va>, P: Platform + Hooks> Walk<'_, F, P> {
    /// Maps the addresses `part`, which lie in one table, in that table and below.
    fn entries(
        &mut self,
        open: &Open,
        part: (u64, u64),
        region: &Region,
    ) -> Result<(), EditError<Va>> {
        for part in parts(part, F::shift(open.level)) {
            let entry = open.at(F::index(part.0, open.level));
            match open.level.down() {
                Some(_) if self.is_leaf(part, open.level, region) => {
                    self.leaf(entry, open.level, part.0, region)?;
                }
                Some(below) => self.table(entry, below, part, region)?,
                None => self.leaf(entry, open.level, part.0, region)?,
            }
        }
        Ok(())
    }

    /// Maps the addresses `part` in the table at `level` that `entry` points to, or is going to.
    fn table(
        &mut self,
        entry: NonNull<Entry>,
        level: Level,
        part: (u64, u64),
        region: &Region,
    ) -> Result<(), EditError<Va>> {
        // SAFETY: an entry of an open table.
        let bits = unsafe { self.platform.load(entry) };
        let (frame, mut shown) = match F::kind(bits, level.up()) {
            Kind::Invalid => self.allocate(entry, level)?,
            Kind::Table => (F::address(bits, level.up()), None),
            Kind::Leaf => return Err(EditError::AlreadyMapped(Va::new(part.0))),
        };
        let mapped = parts(part, self.piece(level)).try_for_each(|piece| {
            let open = shown.take().unwrap_or_else(|| {
                // SAFETY: the frame was allocated for this table or read from its descriptor.
                unsafe { self.reach.open(frame, level) }
            });
            let mapped = self.entries(&open, piece, region);
            self.reach.close(open);
            mapped
        });
        let batched = level == Level::PAGE && self.techniques.has(Technique::BatchBarriers);
        if batched && !self.reach.publishes() {
            self.platform.barrier(Barrier::Publish);
        }
        mapped
    }

    /// How much a table at `level` translates each time that it is shown, as a power of two.
    fn piece(&self, level: Level) -> u32 {
        let run = F::contiguous(level);
        // The originals know of runs at the last two levels.
        if run == 0 || level.height() > 1 || self.techniques.has(Technique::NoContRemap) {
            F::shift(level.up())
        } else {
            F::shift(level) + run
        }
    }

    /// An empty table at `level`, linked in `entry`, and still open with no-alloc-remap.
    fn allocate(
        &mut self,
        entry: NonNull<Entry>,
        level: Level,
    ) -> Result<(Pa, Option<Open>), EditError<Va>> {
        let frame = self.platform.alloc_table(level);
        let frame = frame.ok_or(EditError::OutOfTables)?;
        let keep = self.techniques.has(Technique::NoAllocRemap);
        let slot = if keep { level } else { Level::PAGE };
        // SAFETY: the frame was allocated for a table.
        let open = unsafe { self.reach.open(frame, slot) };
        // SAFETY: the table is open, and below the root all tables fill their frame.
        unsafe { self.platform.fill(open.table, 1 << F::INDEX_BITS, 0, 0) };
        let shown = if keep {
            Some(open)
        } else {
            self.reach.close(open);
            None
        };
        if keep || !self.reach.publishes() {
            self.platform.barrier(Barrier::Publish);
        }
        let link = F::table(frame, Perms::empty());
        // SAFETY: an entry of an open table.
        unsafe { self.platform.link(entry, link) };
        self.platform.barrier(Barrier::Publish);
        Ok((frame, shown))
    }

    /// Whether a block fits: all that an entry translates is wanted, and lies as it should in
    /// memory.
    fn is_leaf(&self, part: (u64, u64), level: Level, region: &Region) -> bool {
        let low = (1u64 << F::shift(level)) - 1;
        let whole = part.0 & low == 0 && part.1 & low == low && region.delta & low == 0;
        self.leaves == Leaves::Largest && F::is_leaf_level(level) && whole
    }

    /// The hint of a run, where all that it would translate is of the region, and lies as it
    /// should.
    fn hint(&self, first: u64, level: Level, region: &Region) -> u64 {
        let run = F::contiguous(level);
        if self.leaves == Leaves::Pages || run == 0 || level.height() > 1 {
            return 0;
        }
        let low = (1u64 << (F::shift(level) + run)) - 1;
        let inside = region.first <= first & !low && first | low <= region.last;
        match inside && region.delta & low == 0 {
            true => F::CONTIGUOUS,
            false => 0,
        }
    }

    /// Maps what an entry at `level` translates from `first` on.
    fn leaf(
        &self,
        entry: NonNull<Entry>,
        level: Level,
        first: u64,
        region: &Region,
    ) -> Result<(), EditError<Va>> {
        // The original looks at each entry as well, to see that it changes no mapping in use.
        // SAFETY: an entry of an open table.
        let before = unsafe { self.platform.load(entry) };
        if F::kind(before, level) != Kind::Invalid {
            return Err(EditError::AlreadyMapped(Va::new(first)));
        }
        let bits = match level {
            Level::PAGE => region.page,
            _ => F::encode(&region.attrs, level).map_err(EditError::from)?,
        };
        let frame = Pa::new(first.wrapping_add(region.delta));
        let bits = bits | self.hint(first, level, region) | F::put_address(frame);
        // SAFETY: as above.
        unsafe { self.platform.store(entry, bits) };
        // Tables of pages are published as a whole.
        if level != Level::PAGE || !self.techniques.has(Technique::BatchBarriers) {
            self.platform.barrier(Barrier::Publish);
        }
        Ok(())
    }
}
