//! Map, unmap and protect in little code: what the feature `small` links instead of what is fast over many entries.
//!
//! One loop serves all of them. It comes to every entry that the range has something to do with, starting from the root for each
//! table, and does there what belongs to the pass that it makes: an edit is a look, or a look that builds, and then the change.
//! What is changed goes into the gather at once, before a leaf is given out.

use core::ops::ControlFlow;

use super::Change;
use super::build::{Consecutive, Leaves, Seed, Source};
use super::live::Footprint;
use super::mapping::{Mapping, check_memory};
use super::plan::{How, Recent};
use super::take::take_any;
use crate::addr::{Address, Level, Pa, Span};
use crate::edit::Gather;
use crate::edit::space::{AddressSpace, EditError, Liveness};
use crate::flush::{Fate, Flush, Held, Leaf, Progress, Ranges, free_tree};
use crate::format::{Format, Kind, Perms, address_of, denied_of, saturate, withheld};
use crate::platform::{Barrier, Platform};
use crate::run::extent;
use crate::walk::Slice;

/// What receives leaves that were detached.
type Receive<'a, F> = &'a mut dyn FnMut(Held<Leaf<F>>) -> ControlFlow<()>;

/// What an edit does with its range.
pub(super) enum Task<'a, F: Format> {
    Map(&'a Mapping),
    /// And says how far it has come.
    Unmap(Receive<'a, F>, &'a mut Progress<F::Input>),
    Change(Change),
}

/// What is done at each entry.
#[derive(Clone, Copy)]
enum Pass {
    /// Checks that the range is free, and leaves what is missing suspended in the entries that will point to it.
    Build,
    /// Writes leaves, and links what was left.
    Link,
    /// Takes out what was left.
    Undo,
    /// Takes leaves out, and tables that lie in the range whole.
    Take,
    /// Checks that the change may be made.
    Look,
    /// Makes it.
    Rewrite,
    /// Makes valid what was broken.
    Resume,
}

struct Edit<'e, 't, F: Format, P: Platform + Clone, S> {
    space: &'e mut AddressSpace<F, P>,
    left: &'e mut Flush,
    seed: Seed<F, S>,
    task: Task<'t, F>,
    /// What is given, if tables may take it away.
    perms: Perms,
    serial: u64,
    recent: Recent,
    changed: Footprint,
    /// Some of that was left suspended because it has to be broken.
    broken: bool,
    /// The receiver has broken off: stop before the next entry that is mapped.
    stop: bool,
    /// Why it is refused.
    end: Result<(), EditError<F::Input>>,
}

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// The same in a range that has not been checked. What is mapped starts at `frame`.
    #[inline(never)]
    pub(super) fn edit_span(
        &mut self,
        span: Span<F::Input>,
        frame: Pa,
        task: Task<'_, F>,
    ) -> Result<(), EditError<F::Input>> {
        let slice = self.space.check(span)?;
        if let Task::Map(_) = task {
            check_memory::<F>(frame, span.size())?;
        }
        self.edit(slice, Consecutive::new(slice.first, frame), task)
    }

    /// Does what is to be done in `slice`.
    #[inline(never)]
    pub(super) fn edit<S: Source>(
        &mut self,
        slice: Slice,
        source: S,
        task: Task<'_, F>,
    ) -> Result<(), EditError<F::Input>> {
        let serial = self.serial();
        let mut edit = Edit {
            space: self.space,
            left: &mut self.left,
            seed: Seed {
                leaves: Leaves::of_pages(source, 0, false),
                slice,
                deny: Perms::empty(),
            },
            task,
            perms: Perms::empty(),
            serial,
            recent: Recent::new(Change::new()),
            changed: Footprint::new(),
            broken: false,
            stop: false,
            end: Ok(()),
        };
        let space = &mut *edit.space;
        let mut attrs = F::PLAIN;
        let (mut largest, mut global, mut turns_global) = (Level::ANY, true, false);
        let mut look = Pass::Look;
        let mut change = Pass::Rewrite;
        match &edit.task {
            Task::Map(mapping) => {
                attrs = mapping.attrs;
                edit.perms = attrs.perms;
                edit.seed.deny = mapping.denied();
                (global, turns_global) = (attrs.global, attrs.global);
                largest = F::largest_leaf(&space.platform.caps()).min(mapping.largest);
                edit.seed.leaves.runs = mapping.runs;
                space.note_runs(mapping.runs);
                space.tables_deny |= !edit.seed.deny.is_empty();
                (look, change) = (Pass::Build, Pass::Link);
            }
            Task::Change(new) => {
                // The parts of a change are independent of each other and of what was there, so that what can be encoded on top
                // of one leaf can be on top of any.
                attrs = new.apply(attrs);
                edit.perms = new.new_perms().unwrap_or(Perms::empty());
                (global, turns_global) = (!new.turns_local(), new.turns_global());
                edit.recent.change = *new;
            }
            Task::Unmap(..) => change = Pass::Take,
        }
        space.check_global(global)?;
        edit.seed.leaves.encode(slice, &attrs, largest)?;
        edit.run(look);
        match (look, edit.end) {
            (Pass::Build, Ok(_)) => {}
            (Pass::Build, Err(_)) => change = Pass::Undo,
            (_, end) => {
                end?;
                edit.space.cleave(slice)?;
                edit.space.owed |= edit.space.liveness() != Liveness::Dead;
            }
        }
        edit.space.globals |= turns_global;
        // If the visitor unwinds, what was detached until then is not named: everything is, until it has come to its end.
        let before = core::mem::replace(&mut edit.left.ranges.everything, edit.space.owed);
        edit.run(change);
        edit.left.ranges.everything = before;
        let conditions = edit.space.conditions();
        if F::RULE.breaks()
            && edit.broken
            && let Some(changed) = edit.changed.slice()
        {
            let mut ranges = Ranges::new();
            ranges.add(changed, edit.changed.level(), false);
            edit.space.invalidate_now(&mut ranges);
            edit.run(Pass::Resume);
            edit.space.platform.barrier(Barrier::Publish);
        } else {
            edit.changed.add_to(conditions, edit.left);
        }
        edit.end
    }
}

impl<F: Format, P: Platform + Clone, S: Source> Edit<'_, '_, F, P, S> {
    /// Does what belongs to a pass at each entry.
    #[inline(never)]
    fn run(&mut self, pass: Pass) {
        let Self {
            space,
            left,
            seed,
            task,
            recent,
            changed,
            ..
        } = self;
        let space = &**space;
        let mut slice = seed.slice;
        // Tables are of interest where they are taken; but the root's entries stay, if what they point to is part of other roots.
        let top = match (pass, space.pinned, F::root_level().down()) {
            (Pass::Take, true, Some(below)) => below,
            (Pass::Take, _, _) => F::root_level(),
            _ => Level::PAGE,
        };
        let mut at = space.start();
        space.descend(&mut at, slice, top);
        loop {
            let (table, index, level) = (&at.table, at.index, at.level);
            let input = F::Input::from_bits(at.part.first);
            match (pass, at.kind) {
                (Pass::Build | Pass::Look, _) if at.denied.intersects(self.perms) => {
                    self.end = Err(EditError::Denied(input));
                    return;
                }
                (Pass::Build, Kind::Invalid) if seed.fits(level, at.part) => {}
                (Pass::Build, Kind::Invalid) => {
                    if let Task::Map(mapping) = task
                        && !mapping.allocate
                    {
                        self.end = Err(EditError::NeedsTable(input));
                        return;
                    }
                    let Some(child) = seed.build(&space.platform, level, at.part) else {
                        self.end = Err(EditError::OutOfTables);
                        return;
                    };
                    table.store(index, F::suspend(child));
                }
                (Pass::Build, _) => {
                    self.end = Err(EditError::AlreadyMapped(input));
                    return;
                }
                (Pass::Link | Pass::Undo | Pass::Resume, Kind::Invalid) => {
                    let link = F::resume(at.entry);
                    match (pass, level.down()) {
                        (Pass::Undo, Some(below)) if at.entry != 0 => {
                            table.store(index, 0);
                            let child = address_of::<F>(link, level);
                            free_tree::<F, P>(&space.platform, child, below);
                        }
                        (Pass::Undo, _) => {}
                        // What was left here was filled before; the link publishes it.
                        _ if at.entry != 0 => table.link(index, link),
                        (Pass::Link, _) => {
                            let leaf = seed.leaf(table, index, level, at.part.first);
                            table.store(index, leaf);
                        }
                        _ => {}
                    }
                }
                (Pass::Take, Kind::Invalid) => {}
                (Pass::Take, kind) => {
                    let (mut taken, mut done) = (at.part, !self.stop);
                    if let (true, Kind::Table, Some(below)) = (done, kind, level.down()) {
                        // It is carried before it is detached, so that there is room.
                        let child = address_of::<F>(at.entry, level);
                        let denied = at.denied | denied_of::<F>(at.entry);
                        let (platform, fate) = (&space.platform, Fate::Unmapped);
                        done = left.try_carry(platform, child, below, taken.first, denied, fate);
                        if done {
                            table.store(index, 0);
                            changed.add(taken, None);
                        }
                    } else if done {
                        let conditions = space.conditions();
                        let entry = take_any::<F, P>(table, conditions, index, level, at.entry);
                        if entry & F::CONTIGUOUS != 0 {
                            taken = extent::<F>(taken.first, level);
                        }
                        changed.add(taken, Some(level));
                        if let Task::Unmap(held, _) = task {
                            let leaf = Leaf::new(taken.first, entry, level, at.denied);
                            self.stop = held(Held::new(leaf, self.serial)).is_break();
                        }
                    }
                    if !done {
                        if let Task::Unmap(_, progress) = task {
                            **progress = Progress::Stopped(input);
                        }
                        return;
                    }
                }
                (Pass::Look, Kind::Leaf)
                    if F::RULE.breaks() && space.liveness() == Liveness::Own =>
                {
                    // Also if a walker sets flags between the look and the edit, which must not come as a surprise.
                    let mut breaks = look_up(recent, space, at.entry, level) == How::Break;
                    if space.conditions().is_contended::<F>(at.entry, level) {
                        let flagged = saturate::<F>(at.entry, level);
                        breaks |= look_up(recent, space, flagged, level) == How::Break;
                    }
                    if breaks {
                        self.end = Err(EditError::NeedsBreak(input));
                        return;
                    }
                }
                (Pass::Rewrite, Kind::Leaf) => {
                    let mut entry = at.entry;
                    loop {
                        let how = look_up(recent, space, entry, level);
                        let plan = &recent.plan;
                        let next = entry ^ plan.flip;
                        if plan.flip == 0 {
                            break;
                        }
                        if F::RULE.breaks() && how == How::Break {
                            // Once the entry is invalid no walker writes it any more, and what the exchange returns is final.
                            let last = table.exchange(index, F::suspend(entry));
                            look_up(recent, space, last, level);
                            let next = last ^ recent.plan.flip;
                            table.store(index, withheld::<F>(next));
                            changed.add(at.part, Some(level));
                            self.broken = true;
                            break;
                        }
                        if how == How::Store {
                            table.store(index, next);
                        } else if let Err(now) = table.compare_exchange(index, entry, next) {
                            // A walker has changed it meanwhile.
                            entry = now;
                            continue;
                        }
                        if plan.invalidate {
                            changed.add(at.part, Some(level));
                        } else if plan.news {
                            changed.add_news();
                        }
                        break;
                    }
                }
                _ => {}
            }
            if !space.next(&mut at, &mut slice, top) {
                return;
            }
        }
    }
}

/// Finds out what a change makes of a leaf.
#[inline(never)]
fn look_up<F: Format, P: Platform + Clone>(
    recent: &mut Recent,
    space: &AddressSpace<F, P>,
    entry: u64,
    level: Level,
) -> How {
    recent.look_up_leaf::<F>(&space.conditions(), entry, level);
    recent.plan.how()
}
