//! Map, unmap and protect in little code: what the feature `small` links instead of what is fast
//! over many entries.
//!
//! One function serves all of them, and frees what was detached. It goes through the entries that
//! the range has something to do with, table by table, and does there what belongs to the pass that
//! it makes: an edit is a look, or a look that builds, and then the change. What is changed goes
//! into the gather at once, before a leaf is given out.

use core::ops::ControlFlow;

use super::Change;
use super::build::{Consecutive, Leaves, Seed, Source};
use super::mapping::{Mapping, check_memory};
use super::plan::{BREAK, EXCHANGE, INVALIDATE, NEWS, Recoded, recode};
use super::take::take_any;
use crate::addr::{Address, Level, Pa, Span};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, EditError, Liveness};
use crate::flush::{Fate, Flush, Held, Leaf, Progress};
use crate::format::packed::Packed;
use crate::format::{Format, Kind, Perms, address_of, denied_of, kind_of, saturate, withheld};
use crate::platform::{Barrier, Platform};
use crate::run::extent;
use crate::table::Table;
use crate::walk::Slice;

/// What receives leaves.
type Receive<'a, F> = Option<&'a mut (dyn FnMut(Leaf<F>) -> ControlFlow<()> + 'a)>;

/// What an edit does with its range.
pub(super) enum Task<'a, F: Format> {
    Map(Mapping),
    /// Gives out the leaves that it detaches one by one. Where it has stopped it says as it would
    /// that something is [not mapped](EditError::NotMapped), which it never says otherwise.
    Unmap(&'a mut dyn FnMut(Leaf<F>) -> ControlFlow<()>),
    Change(Change),
}

/// What is done at each entry. In this order: what looks, what changes, and what comes back to what
/// was left suspended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pass {
    /// Checks that the range is free, and leaves the tables that are missing suspended in the
    /// entries that will point to them.
    Build,
    /// Checks that a change may be made.
    Look,
    /// Makes it.
    Rewrite,
    /// Takes leaves out, and tables that lie in the range whole.
    Take,
    /// Gives out leaves and frees tables, which nothing else can reach.
    Free,
    /// Writes leaves, and links what was left.
    Link,
    /// Makes valid what was broken.
    Resume,
    /// Takes out what was left.
    Undo,
}

struct Edit<'e, 'v, F: Format, P: Platform + Clone, S> {
    space: &'e AddressSpace<F, P>,
    left: &'e mut Flush,
    visit: Receive<'v, F>,
    seed: Seed<F, S>,
    change: Change,
    end: Result<(), EditError<F::Input>>,
    pass: Pass,
    /// What is given, if tables may take it away.
    perms: Perms,
    /// Tables may be allocated.
    allocate: bool,
    /// Some of that was left suspended because it has to be broken.
    broken: bool,
    /// What the gather has noted last is of this edit.
    noted: bool,
    /// The receiver has broken off: stop before the next entry that is mapped.
    stop: bool,
}

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Does what is to be done in `span`. What is mapped there is memory of `source`.
    #[inline(never)]
    pub(super) fn edit<S: Source>(
        &mut self,
        span: Span<F::Input>,
        source: S,
        task: Task<'_, F>,
    ) -> Result<(), EditError<F::Input>> {
        let space = &mut *self.space;
        let slice = space.check(span)?;
        let mut seed = Seed {
            leaves: Leaves::of_pages(source, 0, false),
            slice,
            deny: Perms::empty(),
        };
        let (mut change, mut visit, mut allocate) = (Change::new(), None, true);
        let mut largest = Level::ANY;
        let (mut look, mut then) = (Pass::Look, Pass::Rewrite);
        match task {
            Task::Map(mapping) => {
                if S::ONE {
                    check_memory::<F>(seed.leaves.memory(slice.first), span.size())?;
                }
                change = Change::to(&mapping.attrs);
                seed.deny = mapping.denied();
                allocate = mapping.allocate;
                largest = F::largest_leaf(&space.platform.caps()).min(mapping.largest);
                seed.leaves.runs = mapping.runs;
                space.note_runs(mapping.runs);
                if !seed.deny.is_empty() {
                    space.open.close::<F>();
                }
                (look, then) = (Pass::Build, Pass::Link);
            }
            Task::Change(new) => change = new,
            Task::Unmap(held) => {
                visit = Some(held);
                then = Pass::Take;
            }
        }
        space.check_global(!change.turns_local())?;
        // The parts of a change are independent of each other and of what was there, so that what
        // can be encoded on top of one leaf can be on top of any.
        let attrs = change.apply_to(Packed::of(&F::PLAIN));
        seed.leaves.encode(slice, attrs, largest)?;
        space.globals |= change.turns_global();
        // Whatever becomes of it: if the visitor unwinds, for instance, the gather is still there
        // to be finished.
        space.owed |= space.liveness() != Liveness::Dead;
        let mut edit = Edit {
            space,
            left: &mut self.left,
            visit,
            seed,
            perms: change.gives(),
            change,
            end: Ok(()),
            pass: look,
            allocate,
            broken: false,
            noted: false,
            stop: false,
        };
        edit.pass(look);
        match (look, edit.end) {
            (Pass::Build, Err(_)) => then = Pass::Undo,
            (Pass::Look, Err(_)) => return edit.end,
            (Pass::Look, Ok(_)) => edit.space.cleave(slice)?,
            _ => {}
        }
        edit.pass(then);
        if F::RULE.breaks() && edit.broken {
            // With what else the gather has to say.
            let platform = &edit.space.platform;
            edit.left.issue::<F, P>(platform, edit.space.target());
            platform.barrier(Barrier::Complete);
            edit.pass(Pass::Resume);
            platform.barrier(Barrier::Publish);
        }
        edit.end
    }

    /// Unmaps what is mapped in `span`.
    #[inline(always)]
    pub(super) fn unmap_span(
        &mut self,
        span: Span<F::Input>,
        mut held: impl FnMut(Held<Leaf<F>>) -> ControlFlow<()>,
    ) -> Result<Progress<F::Input>, EditError<F::Input>> {
        let serial = self.serial();
        let mut hold = |leaf| held(Held::new(leaf, serial));
        let task = Task::Unmap(&mut hold);
        match self.edit(span, Consecutive::NONE, task) {
            Ok(()) => Ok(Progress::Done),
            Err(EditError::NotMapped(at)) => Ok(Progress::Stopped(at)),
            Err(error) => Err(error),
        }
    }

    /// Makes the edits visible, has every processor forget, waits until they have, and gives out
    /// and frees what was detached.
    #[inline(never)]
    pub(super) fn flush_all(&mut self, visit: Receive<'_, F>) {
        self.issue_and_complete();
        let space = &*self.space;
        let mut edit = Edit {
            space,
            left: &mut self.left,
            visit,
            seed: Seed {
                leaves: Leaves::of_pages(Consecutive::new(0, Pa::new(0)), 0, false),
                slice: Slice { first: 0, last: 0 },
                deny: Perms::empty(),
            },
            perms: Perms::empty(),
            change: Change::new(),
            end: Ok(()),
            pass: Pass::Free,
            allocate: false,
            broken: false,
            noted: false,
            stop: false,
        };
        while let Some((root, _)) = edit.left.detached.pop(&space.platform) {
            let slice = root.slice::<F>();
            edit.stop = root.fate == Fate::Replaced;
            edit.run(root.frame, root.level, slice, root.denied);
            // SAFETY: the invalidation that covers it is complete, and no software walks a space
            // that is borrowed exclusively (2.); the chain held it once (1.).
            unsafe { space.platform.free_table(root.frame, root.level) };
        }
    }
}

impl<F: Format, P: Platform + Clone, S: Source> Edit<'_, '_, F, P, S> {
    /// Goes through all of the range.
    #[inline(never)]
    fn pass(&mut self, pass: Pass) {
        self.pass = pass;
        let space = self.space;
        self.run(space.root, F::root_level(), self.seed.slice, Perms::empty());
    }

    /// Does what belongs to the pass at each entry of a table, and in what is below. Whether it has
    /// come to the end.
    #[inline(never)]
    fn run(&mut self, frame: Pa, level: Level, mut slice: Slice, denied: Perms) -> bool {
        let space = self.space;
        // SAFETY: the root of the space or of a tree that was detached, or what a descriptor in it
        // points to, suspended or not.
        let table = unsafe { Table::open(&space.platform, frame, level) };
        loop {
            let mut part = slice.part::<F>(level);
            let last = part.last;
            let index = F::index(part.first, level);
            let mut entry = table.load(index);
            let mut kind = kind_of::<F>(entry, level);
            let is_left = kind == Kind::Invalid && entry != 0 && self.pass >= Pass::Link;
            if is_left {
                entry = F::resume(entry);
                kind = kind_of::<F>(entry, level);
            } else if kind == Kind::Invalid && self.pass == Pass::Build && !self.fits(level, part) {
                let Some(link) = self.build(level, part.first) else {
                    return false;
                };
                table.store(index, F::suspend(link));
                entry = link;
                kind = Kind::Table;
            }
            let input = F::Input::from_bits(part.first);
            match (kind, level.down()) {
                (Kind::Table, Some(below))
                    if !(self.pass == Pass::Take
                        && part.is_whole::<F>(level)
                        && !(space.pinned && level == F::root_level())) =>
                {
                    let child = address_of::<F>(entry, level);
                    let denied = denied | denied_of::<F>(entry);
                    if self.pass <= Pass::Look && denied.intersects(self.perms) {
                        self.end = Err(EditError::Denied(input));
                        return false;
                    }
                    if !self.run(child, below, part, denied) {
                        return false;
                    }
                    if is_left && self.pass == Pass::Undo {
                        table.store(index, 0);
                    }
                    if self.pass == Pass::Free || is_left && self.pass == Pass::Undo {
                        // SAFETY: what was left was never linked, and what is freed can be reached
                        // by nothing else; the walk comes to each table once (1., 2.).
                        unsafe { space.platform.free_table(child, below) };
                    }
                }
                (Kind::Invalid, _) => {
                    if self.pass == Pass::Link {
                        let leaf = self.seed.leaf(&table, index, level, part.first);
                        table.store(index, leaf);
                    }
                }
                (kind, below) => match self.pass {
                    Pass::Build => {
                        self.end = Err(EditError::AlreadyMapped(input));
                        return false;
                    }
                    Pass::Look
                        if F::RULE.breaks()
                            && space.liveness() == Liveness::Own
                            && self.breaks(entry, level) =>
                    {
                        self.end = Err(EditError::NeedsBreak(input));
                        return false;
                    }
                    Pass::Rewrite => self.rewrite(&table, index, level, part, entry),
                    Pass::Take | Pass::Free => {
                        if self.stop {
                            if self.pass == Pass::Take {
                                self.end = Err(EditError::NotMapped(input));
                                return false;
                            }
                        } else if let (Kind::Table, Some(below)) = (kind, below) {
                            // It is carried before it is detached, so that there is room.
                            let child = address_of::<F>(entry, level);
                            let denied = denied | denied_of::<F>(entry);
                            let (platform, fate) = (&space.platform, Fate::Unmapped);
                            let is_carried = (self.left)
                                .try_carry(platform, child, below, part.first, denied, fate);
                            if !is_carried {
                                self.end = Err(EditError::NotMapped(input));
                                return false;
                            }
                            table.store(index, 0);
                            self.note(part, None);
                        } else {
                            let conditions = space.conditions();
                            // What is taken out of a run is all of it.
                            entry = take_any::<F, P>(&table, conditions, index, level, entry);
                            if entry & F::CONTIGUOUS != 0 {
                                part = extent::<F>(part.first, level);
                            }
                            if self.pass == Pass::Take {
                                self.note(part, Some(level));
                            }
                            if let Some(visit) = &mut self.visit {
                                let leaf = Leaf::new(part.first, entry, level, denied);
                                self.stop = visit(leaf).is_break();
                            }
                        }
                    }
                    _ => {}
                },
            }
            if is_left && self.pass != Pass::Undo {
                // What was left here was filled before; the link publishes it.
                table.link(index, entry);
            }
            if last == slice.last {
                return true;
            }
            slice.first = last + 1;
        }
    }

    /// Whether one leaf at `level` translates what is missing.
    #[inline(always)]
    fn fits(&self, level: Level, part: Slice) -> bool {
        let has_larger = F::is_leaf_level(Level::PAGE.up());
        level == Level::PAGE || has_larger && self.seed.fits(level, part)
    }

    /// A table for what is missing below an entry at `level`.
    #[inline(always)]
    fn build(&mut self, level: Level, input: u64) -> Option<u64> {
        let below = level.down()?;
        if !self.allocate {
            self.end = Err(EditError::NeedsTable(F::Input::from_bits(input)));
            return None;
        }
        self.end = Err(EditError::OutOfTables);
        let frame = self.space.platform.alloc_table(below)?;
        self.end = Ok(());
        // SAFETY: the frame was allocated for this table.
        let table = unsafe { Table::open(&self.space.platform, frame, below) };
        table.fill(0..1 << F::INDEX_BITS, 0, 0);
        Some(F::table(frame, self.seed.deny & Perms::ANY_EXEC))
    }

    /// Changes a leaf.
    #[inline(always)]
    fn rewrite(
        &mut self,
        table: &Table<'_, P>,
        index: usize,
        level: Level,
        part: Slice,
        mut entry: u64,
    ) {
        loop {
            let Recoded { flip, what } = self.recode(entry, level);
            let next = entry ^ flip;
            if F::RULE.breaks() && what & BREAK != 0 {
                // Once the entry is invalid no walker writes it any more, and what the exchange
                // returns is final.
                let last = table.exchange(index, F::suspend(entry));
                let next = last ^ self.recode(last, level).flip;
                table.store(index, withheld::<F>(next));
                self.note(part, Some(level));
                self.broken = true;
                return;
            }
            if flip == 0 {
                return;
            }
            if what & EXCHANGE == 0 {
                table.store(index, next);
            } else if let Err(now) = table.compare_exchange(index, entry, next) {
                // A walker has changed it meanwhile.
                entry = now;
                continue;
            }
            if what & INVALIDATE != 0 {
                self.note(part, Some(level));
            }
            self.left.news |= what & NEWS != 0;
            return;
        }
    }

    /// Whether the change breaks a leaf, which flags that walkers set between the look and the edit
    /// have no say in.
    #[inline(always)]
    fn breaks(&self, entry: u64, level: Level) -> bool {
        let breaks = |entry| self.recode(entry, level).what & BREAK != 0;
        debug_assert_eq!(breaks(entry), breaks(saturate::<F>(entry, level)));
        breaks(entry)
    }

    /// What the change makes of a leaf.
    #[inline(never)]
    fn recode(&self, entry: u64, level: Level) -> Recoded {
        recode::<F>(&self.change, &self.space.conditions(), entry, level)
    }

    /// What was changed has to be forgotten, if there is any walker.
    #[inline(never)]
    fn note(&mut self, part: Slice, level: Option<Level>) {
        if self.space.liveness() != Liveness::Dead {
            let (tables, belongs) = (level.is_none(), self.noted);
            self.left.ranges.note(part, level, tables, belongs);
            self.noted = true;
        }
    }
}
