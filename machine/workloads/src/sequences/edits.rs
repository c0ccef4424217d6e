//! The operations on spaces, and on what was gathered.

// Every kind of value is forgotten and dropped, with a destructor or without.
#![allow(clippy::forget_non_drop)]

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use tablewright::flush::Held;
use tablewright::linear::{LinearMap, MemoryMap};
use tablewright::shared::{Mapped, NewLeaf, Refused, SharedSpace, Step};
use tablewright::{
    Address, Attrs, EditError, Encoded, Format, Gather, Half, Leaf, Level, Liveness, Mapping, Pa,
    Perms, Platform, Progress, Span,
};
use tablewright_machine::Time;

use super::guest::Guests;
use super::logs;
use super::operations::Kind;
use super::platform::{Bug, Plat};
use super::world::{
    Dice, Exclusive, Gathering, Place, Planned, SPACES, Slot, Way, World, take_any,
};

/// Whether something unwinds as it is meant to.
fn unwinds(what: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(what))
        && !payload.is::<Planned>()
    {
        resume_unwind(payload);
    }
}

/// Why a shared edit was refused, if by itself.
fn refusal<T, A: Copy>(result: &Result<T, Refused<A>>) -> Option<Refused<A>> {
    result.as_ref().err().copied()
}

impl<'m, F: Format, G: Guests<'m, F>> World<'m, F, G> {
    /// A shared edit of an address was refused for where that is, if and only if the root does not translate it.
    fn judge_address(&self, slot: usize, at: u64, refused: Option<Refused<F::Input>>) {
        let outside = refused == Some(Refused::Edit(EditError::InputOutOfRange));
        let right = outside != self.translates_at(&self.slots[slot], at);
        self.check(right, || format!("a shared edit at {at:#x}: {refused:?}"));
    }

    pub fn operate(&self, cpu: usize, kind: Kind, dice: &Dice) {
        match kind {
            Kind::Create => self.create(cpu, dice),
            Kind::MakeLive => {
                let is_dead =
                    |it: &Exclusive<'m, F>| it.is_of(cpu) && it.look().liveness() == Liveness::Dead;
                let index = self.place(
                    dice,
                    |place| matches!(place, Place::Exclusive(it) if is_dead(it)),
                );
                self.make_live(cpu, index, dice);
            }
            Kind::Describe => self.describe(cpu, dice),
            Kind::Destroy => {
                let way = Way {
                    refuses: dice.below(3) > 0,
                    retires: dice.once_in(2),
                    in_place: dice.once_in(2),
                };
                self.destroy(cpu, dice.index(SPACES), way);
            }
            Kind::Share => self.share(cpu, dice),
            Kind::Unshare => {
                self.unshare(
                    cpu,
                    self.place(dice, |place| matches!(place, Place::Shared(_))),
                );
            }
            Kind::MakeGuest => {
                self.make_guest(self.place(dice, |place| matches!(place, Place::Shared(_))));
            }
            Kind::IntoSpace => self.unguest(dice.index(SPACES)),
            Kind::MapOnce => self.map(cpu, dice, true),
            Kind::Map => self.map(cpu, dice, false),
            Kind::Gather => self.with_exclusive(cpu, dice, |slot, exclusive| {
                if exclusive.gather.is_none() {
                    exclusive.gather = Some((self.number_for(slot), exclusive.space().gather()));
                }
            }),
            Kind::MapFrames => self.map_frames(cpu, dice),
            Kind::Fork => self.fork(cpu, dice),
            Kind::Unmap => self.unmap(cpu, dice, false),
            Kind::UnwindUnmap => self.unmap(cpu, dice, true),
            Kind::ReplacePage => self.replace_page(cpu, dice),
            Kind::Protect => self.protect(cpu, dice),
            Kind::Split => self.split(cpu, dice),
            Kind::Collapse => self.collapse(cpu, dice),
            Kind::Query => self.query(cpu, dice),
            Kind::Walk => self.walk(cpu, dice),
            Kind::Linear => self.linear(cpu, dice),
            Kind::Issue => self.issue(cpu, dice),
            Kind::Finish => self.finish(cpu, dice),
            Kind::Complete => self.complete_one(cpu, dice),
            Kind::Release => self.release(cpu, dice),
            Kind::Settle => self.settle(cpu, dice, false),
            Kind::UnwindSettle => self.settle(cpu, dice, true),
            Kind::FinishCompleted => {
                if let Some((batch, completed)) = take_any(dice, &self.local(cpu).completed) {
                    if dice.below(4) > 0 {
                        self.release_all(cpu, batch, |held| completed.release(held));
                    }
                    completed.finish(|leaf| self.out(batch, &leaf));
                }
            }
            Kind::Quiet => self.quiet(cpu, dice),
            Kind::Drop => self.lose(cpu, dice, false),
            Kind::Forget => self.lose(cpu, dice, true),
            Kind::SharedGather => self.with_gather(cpu, dice, |_, _| ()),
            Kind::Tables => self.with_gather(cpu, dice, |_, it| {
                let tables = it.gather.tables();
                match dice.once_in(4) {
                    true => {
                        it.gather.release_tables();
                        self.check(it.gather.tables() == 0, || "tables were kept".into());
                    }
                    false => {
                        let count = dice.pick(&[1, 2, 4, 8, 255]);
                        let enough = it.gather.top_up(count);
                        let has = it.gather.tables();
                        let right = has >= tables && enough == (has >= usize::from(count).min(8));
                        self.check(right, || format!("{has} tables after a top-up to {count}"));
                    }
                }
            }),
            Kind::SharedMap => self.shared_map(cpu, dice),
            Kind::Coalesce => self.coalesce(cpu, dice),
            Kind::MapRange => self.map_range(dice),
            Kind::SharedUnmap => self.shared_unmap(cpu, dice, false),
            Kind::UnwindShared => self.shared_unmap(cpu, dice, true),
            Kind::SharedProtect => self.with_gather(cpu, dice, |world, it| {
                if let Ok(span) = world.span(world.slots[it.slot].base, dice) {
                    let change = world.change(dice);
                    let _refused = world.watch(cpu, (it.slot, it.batch), span, || {
                        it.gather.protect(span, change)
                    });
                }
            }),
            Kind::Age => self.with_gather(cpu, dice, |world, it| {
                if let Ok(span) = world.span(world.slots[it.slot].base, dice) {
                    let _refused = world.watch(cpu, (it.slot, it.batch), span, || {
                        it.gather.age(span, |leaf| {
                            world.check(leaf.attrs().accessed, || "an old leaf is young".into());
                        })
                    });
                }
            }),
            Kind::Wash => self.with_gather(cpu, dice, |world, it| {
                if let Ok(span) = world.span(world.slots[it.slot].base, dice) {
                    let _refused = world.watch(cpu, (it.slot, it.batch), span, || {
                        it.gather.clear_dirty(span, |leaf| {
                            world.check(leaf.attrs().dirty, || "a clean leaf is dirty".into());
                        })
                    });
                }
            }),
            Kind::SharedSplit => self.with_gather(cpu, dice, |world, it| {
                let (at, _) = world.addresses(world.slots[it.slot].base, dice);
                let level = world.level(dice);
                let mut split = it.gather.split(F::Input::from_bits(at), level);
                if let Err(Refused::NeedsTables(count)) = split
                    && it.gather.top_up(count)
                {
                    split = it.gather.split(F::Input::from_bits(at), level);
                }
                world.judge_address(it.slot, at, refusal(&split));
            }),
            Kind::SharedQuery => self.with_shared(dice, |index, space| {
                let (at, _) = self.addresses(self.slots[index].base, dice);
                if let Some(leaf) = space.query(F::Input::from_bits(at)) {
                    let inside = at.wrapping_sub(leaf.input().bits()) < leaf.size()
                        && self.translates_at(&self.slots[index], at);
                    self.check(inside, || format!("{at:#x} is not in {leaf:?}"));
                }
            }),
            Kind::Relax => self.with_shared(dice, |index, space| {
                let (at, _) = self.addresses(self.slots[index].base, dice);
                let perms = match dice.below(8) {
                    0..=2 => Perms::empty(),
                    3..=4 => self.attrs(dice).perms,
                    // Fetches of what was not mapped for that are the embedder's own.
                    _ => self.attrs(dice).perms - Perms::ANY_EXEC,
                };
                let relaxed = space.relax(F::Input::from_bits(at), perms, dice.once_in(2));
                self.judge_address(index, at, refusal(&relaxed));
            }),
            Kind::Wake => self.with_shared(dice, |index, space| {
                let (at, _) = self.addresses(self.slots[index].base, dice);
                let generation = space.generation();
                let woken = space.wake(F::Input::from_bits(at), dice.once_in(2));
                self.judge_address(index, at, refusal(&woken));
                self.check(space.generation() >= generation, || {
                    "a generation is back".into()
                });
            }),
            Kind::SharedIssue => self.shared_issue(cpu, dice),
            Kind::SharedFinish => {
                self.with_gather(cpu, dice, |world, it| world.shared_finish(cpu, it));
            }
            Kind::GracePeriod => self.with_shared(dice, |_, space| {
                let moment = space.grace_period();
                let quiet = space.is_over(moment);
                let again = tablewright::shared::GracePeriod::new(moment.get());
                // What is over stays so.
                self.check(!quiet || space.is_over(again), || {
                    "a moment is not past any more".into()
                });
            }),
            // The machine takes a table of stage 1 that takes permissions away from what is below it for one that was cut off.
            Kind::ProtectAll if self.is_arm() && F::Input::SIGNED => {}
            Kind::ProtectAll => self.with_shared(dice, |index, space| {
                if let Ok(start) = space.protect_all() {
                    self.slots[index].users.update(|users| users + 1);
                    self.local(cpu).protecting.borrow_mut().push((index, start));
                }
            }),
            Kind::ProtectStep => self.protect_step(cpu, dice),
            Kind::Lull if self.is_arm() && F::Input::SIGNED => {}
            Kind::Lull => self.lull(cpu, dice),
            Kind::Bitmaps => logs::bitmaps(self, dice),
            Kind::Rings => logs::rings(self, dice),
            Kind::Walks => logs::walks(self, dice),
            other => G::operate(self, cpu, other, dice),
        }
    }

    fn describe(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let space = exclusive.look();
            let plat = space.platform();
            let tables = space.count_tables();
            let right = self.machine.memory().used() as u64 >= tables
                && plat.mapper.machine().memory().first() <= space.root().get()
                && (!F::HALVES || (space.half() == Half::Upper) == (slot.base >> 63 != 0));
            self.check(right, || format!("{space:?} with {tables} tables"));
            if let Some((_, gather)) = &exclusive.gather {
                let _ = gather.is_clean();
            }
        });
        self.with_shared(dice, |_, space| {
            let same = std::ptr::eq(space.platform().control, self.control);
            let inside = self.machine.memory().first() <= space.root().get();
            self.check(same && inside, || "a space is not what it was".into());
        });
        let local = self.local(cpu);
        for it in local.gathers.borrow().iter() {
            let _ = (
                it.gather.space().root(),
                it.gather.is_clean(),
                it.gather.tables(),
            );
        }
        for (_, cut) in local.cuts.borrow().iter() {
            let _ = cut.grace_period();
        }
    }

    // ---- Exclusive edits ----

    /// An edit with the gather of a space, of which there is one if there was, or as the dice say.
    fn edit<T>(
        &self,
        slot: &Slot<'m, F, G>,
        exclusive: &mut Exclusive<'m, F>,
        what: impl FnOnce(&mut Gather<'m, F, Plat<'m>>) -> T,
    ) -> T {
        let (batch, mut gather) = match exclusive.gather.take() {
            Some(it) => it,
            None => (self.number_for(slot), exclusive.space().gather()),
        };
        let result = what(&mut gather);
        exclusive.gather = Some((batch, gather));
        result
    }

    /// What an edit leaves is often completed at once.
    fn settle_edit(
        &self,
        cpu: usize,
        slot: &Slot<'m, F, G>,
        exclusive: &mut Exclusive<'m, F>,
        dice: &Dice,
    ) {
        match dice.below(8) {
            0..=1 => self.complete(cpu, slot, exclusive),
            // It is finished when it is dropped. What is held leaks.
            2 if exclusive.gather.take().is_some() => exclusive.dropped(),
            _ => {}
        }
    }

    /// Has everything forgotten that was done to these addresses, if it matters to what is done next.
    ///
    /// arm64: whether an entry needs a break is seen from what it says. What it said before, and processors remember until it
    /// is complete, must not matter any more; and what is cut off is not mapped again before.
    fn forget_before(
        &self,
        cpu: usize,
        slot: &Slot<'m, F, G>,
        exclusive: &mut Exclusive<'m, F>,
        span: Span<F::Input>,
        maps: bool,
    ) {
        if exclusive.look().liveness() == Liveness::Dead {
            return;
        }
        // An edit may take apart the leaf that its end is in.
        let mask = Self::BLOCK - 1;
        let (mut first, mut last) = (span.start().bits() & !mask, span.last().bits() | mask);
        let large = |at: u64| {
            let segment = slot.model.borrow().segment(at);
            segment.is_some_and(|(first, segment)| segment.last - first > 8 * Self::BLOCK)
        };
        if last - first > 32 * Self::BLOCK
            || large(span.start().bits())
            || large(span.last().bits())
        {
            (first, last) = (0, u64::MAX);
        }
        let touched = exclusive
            .touched
            .iter()
            .any(|&(from, to, _)| from <= last && first <= to);
        let spared = !self.is_arm() || maps && self.control.is(Bug::ReusesEarly);
        if (touched || exclusive.murky) && !spared {
            self.complete(cpu, slot, exclusive);
        }
        exclusive.touched.push((first, last, false));
    }

    fn mapping(&self, attrs: Attrs, dice: &Dice) -> Mapping {
        let mut mapping = Mapping::new(attrs);
        match dice.below(8) {
            0..=1 => mapping = mapping.pages_only(),
            2 => mapping = mapping.largest(self.level(dice)),
            3 => mapping = mapping.without_runs(),
            _ => {}
        }
        if dice.once_in(12) {
            mapping = mapping.tables_deny_execution();
        }
        if dice.once_in(12) {
            mapping = mapping.without_allocation();
        }
        mapping
    }

    fn map(&self, cpu: usize, dice: &Dice, once: bool) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let tracked = dice.once_in(2) && !slot.silent.get();
            let mut attrs = self.attrs(dice);
            let (span, frame) = if tracked {
                let Some(page) = self.take_page() else { return };
                // Code would have to be fetched anew, and what is not cached cleaned.
                attrs.perms -= Perms::ANY_EXEC;
                if !F::Input::SIGNED {
                    self.machine.clean(page);
                }
                (self.page(slot.base, dice), page)
            } else {
                let Ok(span) = self.span(slot.base, dice) else {
                    return;
                };
                (span, self.far(slot.base, span.start().bits(), dice))
            };
            let mapping = self.mapping(attrs, dice);
            self.forget_before(cpu, slot, exclusive, span, true);
            let mapped = if once {
                if exclusive.gather.is_some() {
                    self.complete(cpu, slot, exclusive);
                }
                if span.size() == Self::PAGE && dice.once_in(2) {
                    (exclusive.space()).map_page(span.start(), frame, mapping)
                } else {
                    let mapped = exclusive.space().map(span, frame, mapping);
                    // Its gather is dropped. That completes what the space owes, and does not wait for what was issued before.
                    exclusive.dropped();
                    mapped
                }
            } else {
                let encoded = Encoded::<F>::new(mapping);
                let page = span.size() == Self::PAGE && dice.once_in(2);
                self.edit(slot, exclusive, |gather| match encoded {
                    _ if page => gather.map_page(span.start(), frame, mapping),
                    Ok(encoded) if dice.once_in(2) => gather.map(span, frame, encoded),
                    _ => gather.map(span, frame, mapping),
                })
            };
            self.judge_map(slot, span, frame, attrs, mapped);
            if mapped.is_err() && tracked {
                self.give_back(frame);
            }
            self.settle_edit(cpu, slot, exclusive, dice);
        });
    }

    /// Pages that do not adjoin, mapped side by side.
    fn map_frames(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let attrs = Attrs {
                perms: self.attrs(dice).perms - Perms::ANY_EXEC,
                ..self.attrs(dice)
            };
            let tracked = dice.once_in(2) && !slot.silent.get();
            let mut frames = Vec::new();
            for _ in 0..dice.below(4) {
                let page = match tracked {
                    true => self.take_page(),
                    false => Some(self.far(slot.base, dice.below(16) * Self::PAGE, dice)),
                };
                let span = page.and_then(|page| Span::new(page, Self::PAGE).ok());
                frames.extend(span);
                if let (Some(page), true, false) = (page, tracked, F::Input::SIGNED) {
                    self.machine.clean(page);
                }
            }
            let first = match tracked {
                true => self.page(slot.base, dice).start(),
                false => F::Input::from_bits(self.addresses(slot.base, dice).0),
            };
            let size = frames.len() as u64 * Self::PAGE;
            let span = Span::new(first, size).ok();
            if let Some(span) = span {
                self.forget_before(cpu, slot, exclusive, span, true);
            }
            let mapping = self.mapping(attrs, dice);
            let mapped = self.edit(slot, exclusive, |gather| {
                gather.map_frames(first, &frames, mapping)
            });
            match (mapped, span) {
                (Ok(mapped), _) if mapped != size => {
                    self.fail(format!("{mapped:#x} bytes of {size:#x} were mapped"));
                }
                (Ok(_), Some(span)) => {
                    let first = span.start().bits();
                    let mut model = slot.model.borrow_mut();
                    let taken = model.overlaps(first, span.last().bits());
                    self.check(!taken, || format!("{span} was mapped twice"));
                    for (number, frame) in frames.iter().enumerate() {
                        let at = first + number as u64 * Self::PAGE;
                        let last = at + (Self::PAGE - 1);
                        model.insert(at, last, frame.start().get(), attrs.perms);
                    }
                }
                _ => {}
            }
            if let (Err(_), true) = (mapped, tracked) {
                frames
                    .iter()
                    .for_each(|frame| self.give_back(frame.start()));
            }
            self.settle_edit(cpu, slot, exclusive, dice);
        });
    }

    /// What is mapped in one space is mapped in another as well.
    fn fork(&self, cpu: usize, dice: &Dice) {
        self.with_two(cpu, dice, |(slot, exclusive), (other, child)| {
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            if slot.silent.get() || other.silent.get() {
                return;
            }
            let change = self.change(dice);
            self.forget_before(cpu, slot, exclusive, span, false);
            self.forget_before(cpu, other, child, span, true);
            let mut size = 0u64;
            let forked = self.edit(slot, exclusive, |parent| {
                self.edit(other, child, |into| {
                    parent.fork(span, change, into, |leaf| {
                        size += leaf.size();
                        self.share_page(&leaf);
                    })
                })
            });
            let (first, last) = (span.start().bits(), span.last().bits());
            if let Ok(()) = forked {
                let becomes = |perms| {
                    change
                        .apply(Attrs {
                            perms,
                            ..Attrs::USER_RODATA
                        })
                        .perms
                };
                let mut model = slot.model.borrow_mut();
                model.protect(first, last, becomes);
                let mut copy = other.model.borrow_mut();
                let mut copied = 0;
                for (at, segment) in model.inside(first, last) {
                    let taken = copy.overlaps(at, segment.last);
                    self.check(!taken, || format!("{at:#x} was taken in the child"));
                    copy.insert(at, segment.last, segment.pa, segment.perms);
                    copied += segment.last - at + 1;
                }
                self.check(copied == size, || {
                    format!("{size:#x} bytes were said to be forked, and {copied:#x} were")
                });
            } else {
                self.check(size == 0, || "a fork failed, and told of leaves".into());
            }
            self.settle_edit(cpu, slot, exclusive, dice);
            self.settle_edit(cpu, other, child, dice);
        });
    }

    /// A map was refused if there is a reason, and not if there is none.
    fn judge_map(
        &self,
        slot: &Slot<'m, F, G>,
        span: Span<F::Input>,
        frame: Pa,
        attrs: Attrs,
        mapped: Result<(), EditError<F::Input>>,
    ) {
        let (first, last) = (span.start().bits(), span.last().bits());
        if ![first, last].iter().all(|&at| Self::is_in_window(slot, at)) {
            slot.wide.set(true);
        }
        let mut model = slot.model.borrow_mut();
        let taken = model.overlaps(first, last);
        let aligned = span.is_aligned(F::PAGE_SHIFT) && frame.is_aligned(F::PAGE_SHIFT);
        let beyond = frame
            .get()
            .checked_add(last - first)
            .is_none_or(|end| end >> F::OUTPUT_BITS != 0);
        let right = match mapped {
            Ok(()) => !taken && aligned && !beyond && self.translates(slot, span),
            Err(EditError::Misaligned) => !aligned,
            Err(EditError::AlreadyMapped(at)) => model.at(at.bits()).is_some(),
            Err(EditError::OutputOutOfRange) => beyond,
            Err(EditError::InputOutOfRange) => !self.translates(slot, span),
            Err(EditError::OutOfTables | EditError::NeedsTable(_)) => true,
            Err(EditError::Denied(_)) => attrs.perms.intersects(Perms::ANY_EXEC),
            Err(_) => false,
        };
        self.check(right, || {
            format!(
                "a map of {span} to {frame} comes to {mapped:?}, and the range is taken: {taken}"
            )
        });
        if mapped.is_ok() && !taken {
            model.insert(first, last, frame.get(), attrs.perms);
        }
    }

    fn unmap(&self, cpu: usize, dice: &Dice, unwind: bool) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            self.forget_before(cpu, slot, exclusive, span, false);
            let mut room = dice.below(12);
            let (batch, mut gather) = match exclusive.gather.take() {
                Some(it) => it,
                None => (self.number_for(slot), exclusive.space().gather()),
            };
            let early = self.control.is(Bug::FreesEarly);
            let held = |leaf: Held<Leaf<F>>| {
                if early {
                    // SAFETY: what it names is reused too early, which is the bug.
                    self.out(batch, &unsafe { leaf.assume_complete() });
                } else {
                    self.local(cpu).held.borrow_mut().push((batch, leaf));
                }
                if room == 0 {
                    if unwind {
                        std::panic::resume_unwind(Box::new(Planned));
                    }
                    return ControlFlow::Break(());
                }
                room -= 1;
                ControlFlow::Continue(())
            };
            if unwind {
                self.leaked.set(true);
                if dice.once_in(2) {
                    unwinds(|| {
                        let _refused = gather.unmap(span, held);
                    });
                    exclusive.gather = Some((batch, gather));
                } else {
                    // The gather is dropped on the way.
                    unwinds(move || {
                        let _refused = gather.unmap(span, held);
                    });
                    exclusive.dropped();
                }
                self.look_anew(slot, exclusive);
                return;
            }
            let progress = match Self::is_by_page(span) {
                true => (gather.unmap_page(span.start())).map(|leaf| {
                    let _: Option<ControlFlow<()>> = leaf.map(held);
                    Progress::Done
                }),
                false => gather.unmap(span, held),
            };
            exclusive.gather = Some((batch, gather));
            let (first, last) = (span.start().bits(), span.last().bits());
            match progress {
                Ok(Progress::Done) => slot.model.borrow_mut().remove(first, last),
                Ok(Progress::Stopped(at)) => {
                    let at = at.bits();
                    self.check((first..=last).contains(&at), || {
                        format!("{span} stops at {at:#x}")
                    });
                    if at > first {
                        slot.model.borrow_mut().remove(first, at - 1);
                    }
                }
                Err(error) => self.judge_refusal(slot, exclusive, span, error),
            }
            self.settle_edit(cpu, slot, exclusive, dice);
        });
    }

    /// Whether an edit of this range is made by the call for one page: every other one.
    fn is_by_page(span: Span<F::Input>) -> bool {
        span.size() == Self::PAGE && span.start().bits() & Self::PAGE != 0
    }

    /// An edit of what is mapped was refused for a reason.
    fn judge_refusal(
        &self,
        slot: &Slot<'m, F, G>,
        exclusive: &Exclusive<'m, F>,
        span: Span<F::Input>,
        error: EditError<F::Input>,
    ) {
        let own = exclusive.look().liveness() == Liveness::Own;
        let right = match error {
            EditError::Misaligned => !span.is_aligned(F::PAGE_SHIFT),
            EditError::InputOutOfRange => !self.translates(slot, span),
            EditError::NeedsBreak(_) => own && self.is_arm(),
            EditError::OutOfTables
            | EditError::Inexpressible(_)
            | EditError::NoSuchLeaf
            | EditError::Denied(_) => true,
            _ => false,
        };
        self.check(right, || format!("an edit of {span} is refused: {error}"));
    }

    /// A page is in another frame from now on; the old one comes out when it is forgotten.
    fn replace_page(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            if slot.silent.get() {
                return;
            }
            let (page, Some(frame)) = (self.page(slot.base, dice), self.take_page()) else {
                return;
            };
            if !F::Input::SIGNED {
                self.machine.clean(frame);
            }
            let mut attrs = self.attrs(dice);
            attrs.perms -= Perms::ANY_EXEC;
            self.forget_before(cpu, slot, exclusive, page, false);
            let (batch, mut gather) = match exclusive.gather.take() {
                Some(it) => it,
                None => (self.number_for(slot), exclusive.space().gather()),
            };
            let replaced = gather.replace(page.start(), frame, attrs);
            exclusive.gather = Some((batch, gather));
            let (first, last) = (page.start().bits(), page.last().bits());
            let was = slot.model.borrow().at(first);
            match replaced {
                Ok(leaf) => {
                    self.check(was.is_some(), || {
                        format!("{page} was not mapped, and is replaced")
                    });
                    {
                        let mut model = slot.model.borrow_mut();
                        model.remove(first, last);
                        model.insert(first, last, frame.get(), attrs.perms);
                    }
                    self.local(cpu).held.borrow_mut().push((batch, leaf));
                }
                Err(error) => {
                    self.give_back(frame);
                    match error {
                        EditError::NotMapped(_) => self.check(was.is_none(), || {
                            format!("{page} is mapped, and is said not to be")
                        }),
                        error => self.judge_refusal(slot, exclusive, page, error),
                    }
                }
            }
            if dice.once_in(3) {
                self.flush_with_one(cpu, slot, exclusive, dice);
            }
            self.settle_edit(cpu, slot, exclusive, dice);
        });
    }

    /// Flushes a gather for one of the leaves that are held, of this flush or of another.
    fn flush_with_one(
        &self,
        cpu: usize,
        slot: &Slot<'m, F, G>,
        exclusive: &mut Exclusive<'m, F>,
        dice: &Dice,
    ) {
        let Some((batch, mut gather)) = exclusive.gather.take() else {
            return;
        };
        let Some((of, held)) = take_any(dice, &self.local(cpu).held) else {
            exclusive.gather = Some((batch, gather));
            return;
        };
        match gather.flush_with(held, |leaf| self.out(batch, &leaf)) {
            Ok(leaf) => {
                self.check(of == batch, || {
                    "a gather gives out what another holds".into()
                });
                self.out(batch, &leaf);
                exclusive.touched.clear();
                exclusive.murky = false;
                exclusive.gather = Some((self.number_for(slot), gather));
            }
            Err(held) => {
                self.local(cpu).held.borrow_mut().push((of, held));
                exclusive.gather = Some((batch, gather));
            }
        }
    }

    fn protect(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            let change = self.change(dice);
            self.forget_before(cpu, slot, exclusive, span, false);
            let protected = self.edit(slot, exclusive, |gather| match Self::is_by_page(span) {
                true => gather.protect_page(span.start(), change),
                false => gather.protect(span, change),
            });
            match protected {
                Ok(()) => {
                    let caps = exclusive.look().platform().caps();
                    let becomes = |perms| {
                        let attrs = Attrs {
                            perms,
                            ..Attrs::USER_RODATA
                        };
                        change.apply_on(attrs, F::RULE, &caps).perms
                    };
                    let (first, last) = (span.start().bits(), span.last().bits());
                    slot.model.borrow_mut().protect(first, last, becomes);
                }
                Err(error) => self.judge_refusal(slot, exclusive, span, error),
            }
            self.settle_edit(cpu, slot, exclusive, dice);
        });
    }

    fn split(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            let level = self.level(dice);
            self.forget_before(cpu, slot, exclusive, span, false);
            if let Err(error) = self.edit(slot, exclusive, |gather| gather.split(span, level)) {
                self.judge_refusal(slot, exclusive, span, error);
            }
            self.settle_edit(cpu, slot, exclusive, dice);
        });
    }

    fn collapse(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            let (level, runs) = (self.level(dice), dice.once_in(2));
            self.forget_before(cpu, slot, exclusive, span, false);
            if let Err(error) =
                self.edit(slot, exclusive, |gather| gather.collapse(span, level, runs))
            {
                self.judge_refusal(slot, exclusive, span, error);
            }
            self.settle_edit(cpu, slot, exclusive, dice);
        });
    }

    fn query(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let (at, _) = self.addresses(slot.base, dice);
            let leaf = exclusive.look().query(F::Input::from_bits(at));
            let found = leaf.map(|leaf| {
                let pa = leaf.frame().get() + (at - leaf.input().bits());
                let fits = leaf.is_contiguous() || leaf.size() == 1 << F::shift(leaf.level());
                let valid = F::kind(leaf.descriptor(), leaf.level()) == tablewright::Kind::Leaf;
                self.check(fits && valid, || format!("{leaf:?} is no leaf"));
                (pa, leaf.attrs().perms)
            });
            let known = slot.model.borrow().at(at);
            self.check(found == known, || {
                format!("{at:#x} is {known:x?}, and the engine says {found:x?}")
            });
        });
    }

    fn walk(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            self.compare(slot, exclusive);
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            let (mut before, mut room) = (None, dice.below(64));
            let walked = exclusive.look().walk(span, |leaf| {
                let (first, last) = (leaf.input().bits(), leaf.input().bits() + (leaf.size() - 1));
                let meets = first <= span.last().bits() && span.start().bits() <= last;
                let ordered = before.is_none_or(|before| before < first);
                self.check(meets && ordered, || {
                    format!("a walk of {span} comes to {leaf:?}")
                });
                before = Some(last);
                room -= u64::from(room > 0);
                match room {
                    0 => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                }
            });
            if let Err(error) = walked {
                self.judge_refusal(slot, exclusive, span, error);
            }
        });
    }

    fn linear(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let (page, block) = (Self::PAGE, Self::BLOCK);
            let at = |number: u64, count: u64| Span::new(Pa::new(number * page), count * page);
            let first = dice.below(6);
            let spans = [
                at(first, 1 + dice.below(4)),
                at(first + dice.below(8), 1 + dice.below(6)),
            ];
            let [Ok(low), Ok(high)] = spans else { return };
            let large = Span::new(Pa::new(block), block).unwrap_or(high);
            let ram = [low, high, large];
            let reserved = [at(first + dice.below(8), 1).unwrap_or(low)];
            let rest = self.attrs(dice);
            let special = [(at(first, 1).unwrap_or(low), self.attrs(dice))];
            let memory = MemoryMap {
                ram: &ram[..1 + dice.index(3)],
                reserved: &reserved[..dice.index(2)],
                special: &special[..dice.index(2)],
            };
            let offset = match dice.below(8) {
                0 => dice.pick(&[u64::MAX - 0xfff, slot.base + 0x1000, slot.base + 1]),
                _ => slot.base + 8 * block,
            };
            let mapping = self.mapping(rest, dice);
            let linear = LinearMap::new(F::Input::from_bits(offset), mapping);
            if linear.input(low.start()).is_none() || linear.span(low).is_err() {
                return;
            }
            let regions = memory.regions::<F::Input>(rest);
            self.complete(cpu, slot, exclusive);
            if dice.below(3) > 0 {
                let added = dice.once_in(2).then_some(high);
                let built = match added {
                    Some(added) => linear.add(exclusive.space(), &memory, added),
                    None => linear.build(exclusive.space(), &memory),
                };
                let Ok(regions) = regions else {
                    return self.check(built.is_err(), || "a map was built out of order".into());
                };
                if built.is_ok() {
                    let mut model = slot.model.borrow_mut();
                    for (span, attrs) in regions {
                        let part = match added {
                            Some(added) => span.intersect(added),
                            None => Some(span),
                        };
                        let Some(part) = part else { continue };
                        let first = offset + part.start().get();
                        let last = first + (part.size() - 1);
                        let free = !model.overlaps(first, last);
                        self.check(free, || format!("{part} was mapped over something"));
                        model.insert(first, last, part.start().get(), attrs.perms);
                    }
                }
                return;
            }
            let Ok(input) = linear.span(low) else { return };
            let (first, last) = (input.start().bits(), input.last().bits());
            self.forget_before(cpu, slot, exclusive, input, false);
            if dice.once_in(2) {
                let change = self.change(dice);
                if self
                    .edit(slot, exclusive, |gather| {
                        linear.protect(gather, low, change)
                    })
                    .is_ok()
                {
                    let becomes = |perms| {
                        change
                            .apply(Attrs {
                                perms,
                                ..Attrs::USER_RODATA
                            })
                            .perms
                    };
                    slot.model.borrow_mut().protect(first, last, becomes);
                }
            } else {
                let visit = |_| ControlFlow::Continue(());
                match self.edit(slot, exclusive, |gather| linear.remove(gather, low, visit)) {
                    Ok(Progress::Done) => slot.model.borrow_mut().remove(first, last),
                    Ok(Progress::Stopped(at)) if at.bits() > first => {
                        slot.model.borrow_mut().remove(first, at.bits() - 1);
                    }
                    _ => {}
                }
            }
            self.settle_edit(cpu, slot, exclusive, dice);
        });
    }

    fn issue(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |_, exclusive| {
            let root = exclusive.look().root().get();
            let Some((batch, gather)) = exclusive.gather.take() else {
                return;
            };
            // Which space it is of, to know what is complete with it.
            let issued = (batch, root, gather.issue());
            self.local(cpu).issued.borrow_mut().push(issued);
            exclusive.touched.iter_mut().for_each(|it| it.2 = true);
        });
    }

    fn finish(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Some((batch, mut gather)) = exclusive.gather.take() else {
                return;
            };
            if dice.once_in(2) {
                gather.flush(|leaf| self.out(batch, &leaf));
                let clean = gather.is_clean();
                self.check(clean, || "a gather was flushed, and is not clean".into());
                exclusive.gather = Some((self.number_for(slot), gather));
            } else {
                gather.finish(|leaf| self.out(batch, &leaf));
            }
            exclusive.touched.clear();
            exclusive.murky = false;
        });
    }

    // ---- What was gathered ----

    fn complete_one(&self, cpu: usize, dice: &Dice) {
        let local = self.local(cpu);
        if local.issued_beside.borrow().is_empty() || dice.once_in(2) {
            let Some((batch, root, issued)) = take_any(dice, &local.issued) else {
                return;
            };
            let before = self.control.completes[cpu].get();
            let completed = issued.complete();
            local.completed.borrow_mut().push((batch, completed));
            if self.control.completes[cpu].get() == before {
                // It had nothing to wait for, and so says nothing about what was issued after it.
                return;
            }
            for slot in &self.slots {
                let Ok(mut place) = slot.place.try_borrow_mut() else {
                    continue;
                };
                if let Place::Exclusive(exclusive) = &mut *place
                    && exclusive.look().root().get() == root
                    && exclusive.is_of(cpu)
                {
                    // The completion is of what this CPU has issued before it.
                    exclusive.touched.retain(|it| !it.2);
                }
            }
        } else if let Some((batch, slot, issued)) = take_any(dice, &local.issued_beside) {
            let cut = issued.complete();
            self.settled(cpu, batch);
            self.slots[slot].users.update(|users| users - 1);
            local.cuts.borrow_mut().push((batch, cut));
        }
    }

    fn release(&self, cpu: usize, dice: &Dice) {
        let local = self.local(cpu);
        if let Some((batch, completed)) = take_any(dice, &local.completed) {
            self.release_all(cpu, batch, |held| completed.release(held));
            self.refuse(cpu, batch, |held| completed.release(held));
            local.completed.borrow_mut().push((batch, completed));
        }
        if let Some((batch, cut)) = take_any(dice, &local.cuts) {
            self.release_all(cpu, batch, |held| cut.release(held));
            self.refuse(cpu, batch, |held| cut.release(held));
            local.cuts.borrow_mut().push((batch, cut));
        }
    }

    /// What is held of other flushes is not released.
    pub fn refuse(
        &self,
        cpu: usize,
        batch: u64,
        release: impl Fn(Held<Leaf<F>>) -> Result<Leaf<F>, Held<Leaf<F>>>,
    ) {
        let held = &self.local(cpu).held;
        let all = std::mem::take(&mut *held.borrow_mut());
        for (of, leaf) in all {
            match release(leaf) {
                Ok(_) => self.check(of == batch, || "a leaf of another flush is released".into()),
                Err(leaf) => held.borrow_mut().push((of, leaf)),
            }
        }
    }

    fn settle(&self, cpu: usize, dice: &Dice, unwind: bool) {
        let local = self.local(cpu);
        let Some((batch, mut completed)) = take_any(dice, &local.completed) else {
            return;
        };
        let mut room = dice.below(8);
        let mut visit = |leaf: Leaf<F>| {
            self.out(batch, &leaf);
            if room == 0 && unwind {
                std::panic::resume_unwind(Box::new(Planned));
            }
            room -= u64::from(room > 0);
            match room {
                0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        if unwind {
            self.leaked.set(true);
            unwinds(|| {
                let _reclaimed = completed.reclaim(&mut visit);
            });
        } else {
            let _reclaimed = completed.reclaim(visit);
        }
        local.completed.borrow_mut().push((batch, completed));
    }

    fn quiet(&self, cpu: usize, dice: &Dice) {
        let local = self.local(cpu);
        let Some((batch, cut)) = take_any(dice, &local.cuts) else {
            return;
        };
        match cut.try_complete() {
            Ok(completed) => local.completed.borrow_mut().push((batch, completed)),
            Err(cut) => local.cuts.borrow_mut().push((batch, cut)),
        }
    }

    /// Drops something, or forgets it.
    fn lose(&self, cpu: usize, dice: &Dice, forget: bool) {
        const KINDS: u64 = 9;
        let first = dice.below(KINDS);
        let mut kinds = (0..KINDS).map(|n| (first + n) % KINDS);
        let _nothing = kinds.any(|kind| self.lose_one(cpu, dice, forget, kind));
    }

    /// Whether there was one of this kind.
    fn lose_one(&self, cpu: usize, dice: &Dice, forget: bool, kind: u64) -> bool {
        let local = self.local(cpu);
        macro_rules! lose {
            ($value:expr) => {
                match forget {
                    true => std::mem::forget($value),
                    false => drop($value),
                }
            };
        }
        let mut lost = true;
        match kind {
            0 => {
                lost = false;
                self.with_exclusive(cpu, dice, |_, exclusive| {
                    let Some((_, gather)) = exclusive.gather.take() else {
                        return;
                    };
                    lost = true;
                    lose!(gather);
                    if forget {
                        self.leaked.set(true);
                        exclusive.murky = true;
                    } else {
                        exclusive.dropped();
                    }
                });
            }
            1 => match take_any(dice, &local.issued) {
                Some((_, _, issued)) => {
                    self.leaked.set(true);
                    lose!(issued);
                }
                None => lost = false,
            },
            2 => match take_any(dice, &local.issued_beside) {
                Some((batch, slot, issued)) => {
                    self.leaked.set(true);
                    lose!(issued);
                    if !forget {
                        self.settled(cpu, batch);
                    }
                    self.slots[slot].users.update(|users| users - 1);
                }
                None => lost = false,
            },
            3 => match take_any(dice, &local.completed) {
                Some((_, completed)) => {
                    self.leaked.set(true);
                    lose!(completed);
                }
                None => lost = false,
            },
            4 => match take_any(dice, &local.cuts) {
                Some((_, cut)) => {
                    self.leaked.set(true);
                    lose!(cut);
                }
                None => lost = false,
            },
            5 => match take_any(dice, &local.held) {
                Some((_, held)) => lose!(held),
                None => lost = false,
            },
            6 => match take_any(dice, &local.protecting) {
                Some((slot, start)) => {
                    lose!(start);
                    self.slots[slot].users.update(|users| users - 1);
                }
                None => lost = false,
            },
            7 => match take_any(dice, &local.gathers) {
                Some(it) => {
                    // What is not quiet when it is dropped leaks as well.
                    self.leaked.set(true);
                    lose!(it.gather);
                    if !forget {
                        self.settled(cpu, it.batch);
                    }
                    self.slots[it.slot].users.update(|users| users - 1);
                }
                None => lost = false,
            },
            _ => lost = G::lose(self, cpu, dice, forget),
        }
        lost
    }

    // ---- Shared edits ----

    /// A gather of a space that is shared: one that is there, or a new one.
    fn with_gather(
        &self,
        cpu: usize,
        dice: &Dice,
        what: impl FnOnce(&Self, &mut Gathering<'m, F>),
    ) {
        let local = self.local(cpu);
        let known = match dice.once_in(4) {
            true => None,
            false => take_any(dice, &local.gathers),
        };
        let mut it = match known {
            Some(it) => it,
            None => {
                let mut made = None;
                self.with_shared(dice, |slot, space: &'m SharedSpace<F, Plat<'m>>| {
                    self.slots[slot].users.update(|users| users + 1);
                    let gather = space.gather();
                    made = Some(Gathering {
                        slot,
                        batch: self.number_for(&self.slots[slot]),
                        gather,
                    });
                });
                let Some(made) = made else { return };
                made
            }
        };
        what(self, &mut it);
        local.gathers.borrow_mut().push(it);
    }

    fn shared_map(&self, cpu: usize, dice: &Dice) {
        self.with_gather(cpu, dice, |world, it| {
            let base = world.slots[it.slot].base;
            let attrs = world.attrs(dice);
            let page = match dice.once_in(2) && !world.slots[it.slot].silent.get() {
                true => world.take_page(),
                false => None,
            };
            let leaf = match page {
                Some(page) => {
                    let at = world.page(base, dice).start();
                    NewLeaf::<F>::new(at, page, Level::PAGE, attrs)
                }
                None => {
                    let (at, _) = world.addresses(base, dice);
                    let level = world.level(dice);
                    let size = match F::is_leaf_level(level) {
                        true => 1u64 << F::shift(level),
                        false => Self::PAGE,
                    };
                    let frame = world.far(base, at & !(size - 1), dice);
                    NewLeaf::new(F::Input::from_bits(at), frame, level, attrs)
                }
            };
            let Ok(leaf) = leaf else {
                return world.check(page.is_none(), || format!("a page is refused: {leaf:?}"));
            };
            let mapping = &world.slots[it.slot].mapping;
            if mapping.replace(true) {
                page.into_iter().for_each(|page| world.give_back(page));
                return;
            }
            let mut mapped = it.gather.map(&leaf);
            for _ in 0..4 {
                mapped = match mapped {
                    Err(Refused::NeedsTables(count)) if it.gather.top_up(count) => {
                        it.gather.map(&leaf)
                    }
                    Err(Refused::Larger(level)) if dice.below(4) > 0 => {
                        let below = level.down().unwrap_or(Level::PAGE);
                        match it.gather.split(leaf.input(), below) {
                            Err(Refused::NeedsTables(count)) if it.gather.top_up(count) => {
                                let _refused = it.gather.split(leaf.input(), below);
                            }
                            _ => {}
                        }
                        it.gather.map(&leaf)
                    }
                    other => {
                        mapped = other;
                        break;
                    }
                };
            }
            mapping.set(false);
            world.judge_address(it.slot, leaf.input().bits(), refusal(&mapped));
            let mut used = true;
            match &mapped {
                Ok(Mapped::Replaced(leaf)) => world.out(it.batch, leaf),
                Ok(Mapped::Installed | Mapped::Collapsed) => {}
                Ok(Mapped::Already | Mapped::Relaxed) => {
                    world.check(page.is_none(), || "a new page was mapped already".into());
                    used = false;
                }
                Err(error) => {
                    used = false;
                    let right = !matches!(
                        error,
                        Refused::Edit(EditError::AlreadyMapped(_) | EditError::NeedsBreak(_))
                    );
                    world.check(right, || format!("a shared map is refused: {error}"));
                }
            }
            if let (Some(page), false) = (page, used) {
                world.give_back(page);
            }
        });
    }

    /// A block in the place of a table, of the same memory if that has not come from the machine.
    fn coalesce(&self, cpu: usize, dice: &Dice) {
        self.with_gather(cpu, dice, |world, it| {
            let slot = &world.slots[it.slot];
            let (page, block) = (Self::PAGE, Self::BLOCK);
            let (at, _) = world.addresses(slot.base, dice);
            let inside = at.wrapping_sub(slot.base) < 16 * block;
            // Nor over what faults of a guest map there at the same time: that would be other memory.
            if !inside || slot.mapping.get() || slot.silent.get() {
                return;
            }
            let first = at & !(block - 1);
            let frame = Pa::new(super::world::FAR + (first - slot.base));
            let mapping = Mapping::new(world.attrs(dice)).pages_only();
            slot.mapping.set(true);
            if let (Ok(span), true) = (
                Span::new(F::Input::from_bits(first), block),
                dice.once_in(2) && page < 1 << 16,
            ) {
                let _mapped = it.gather.space().map_range(span, frame, mapping);
            }
            let attrs = world.attrs(dice);
            let leaf = NewLeaf::<F>::new(F::Input::from_bits(first), frame, Level::new(1), attrs);
            if let Ok(leaf) = leaf {
                let mapped = it.gather.map(&leaf);
                if let Ok(Mapped::Replaced(leaf)) = mapped {
                    world.out(it.batch, &leaf);
                }
            }
            slot.mapping.set(false);
            slot.recent.set((first, block));
        });
    }

    fn map_range(&self, dice: &Dice) {
        self.with_shared(dice, |index, space| {
            let base = self.slots[index].base;
            let Ok(span) = self.span(base, dice) else {
                return;
            };
            let frame = self.far(base, span.start().bits(), dice);
            let mapping = self.mapping(self.attrs(dice), dice);
            if self.slots[index].mapping.replace(true) {
                return;
            }
            let mapped = space.map_range(span, frame, mapping);
            self.slots[index].mapping.set(false);
            let outside = matches!(
                mapped,
                Err(Refused::Edit(
                    EditError::InputOutOfRange | EditError::Misaligned
                ))
            );
            let right = outside || self.translates(&self.slots[index], span);
            self.check(right, || format!("{span} is mapped: {mapped:?}"));
            if let Ok(bytes) = mapped {
                self.check(bytes <= span.size(), || {
                    format!("{bytes:#x} of {span} were mapped")
                });
            }
        });
    }

    fn shared_finish(&self, cpu: usize, it: &mut Gathering<'m, F>) {
        let batch = it.batch;
        let finished = it.gather.finish(|leaf| self.out(batch, &leaf));
        self.settled(cpu, batch);
        if let Err(cut) = finished {
            self.release_all(cpu, batch, |held| cut.release(held));
            self.local(cpu).cuts.borrow_mut().push((batch, cut));
        }
        it.batch = self.number_for(&self.slots[it.slot]);
        let clean = it.gather.is_clean();
        self.check(clean, || "a gather is finished, and is not clean".into());
    }

    fn shared_unmap(&self, cpu: usize, dice: &Dice, unwind: bool) {
        let early = self.control.is(Bug::FreesEarly);
        self.with_gather(cpu, dice, |world, it| {
            let Ok(span) = world.span(world.slots[it.slot].base, dice) else {
                return;
            };
            let batch = it.batch;
            let mut room = dice.below(if unwind { 4 } else { 12 });
            let mut held = |leaf: Held<Leaf<F>>| {
                if early {
                    // SAFETY: what it names is reused too early, which is the bug.
                    world.out(batch, &unsafe { leaf.assume_complete() });
                } else {
                    world.local(cpu).held.borrow_mut().push((batch, leaf));
                }
                if room == 0 {
                    if unwind {
                        std::panic::resume_unwind(Box::new(Planned));
                    }
                    return ControlFlow::Break(());
                }
                room -= 1;
                ControlFlow::Continue(())
            };
            if unwind {
                // This CPU is alone, and in one edit.
                world.control.interrupt[cpu].set(0);
                // What unwinds has begun; what is refused has not.
                let mut begun = true;
                unwinds(|| match dice.once_in(3) {
                    true => {
                        let aged = it
                            .gather
                            .age(span, |_| std::panic::resume_unwind(Box::new(Planned)));
                        begun = aged.is_ok();
                    }
                    false => begun = it.gather.unmap(span, &mut held).is_ok(),
                });
                if !begun {
                    return;
                }
                // What was changed until then is forgotten with the rest.
                world.note(cpu, batch, span, world.begin(it.slot));
                // Before more is gathered, for which everything is forgotten.
                if dice.once_in(2) {
                    world.shared_finish(cpu, it);
                }
                return;
            }
            let (first, last) = (span.start().bits(), span.last().bits());
            let taken = world.watch(cpu, (it.slot, batch), span, || it.gather.unmap(span, held));
            if let Ok(taken) = taken
                && let Progress::Stopped(at) = taken.progress
            {
                let inside = (first..=last).contains(&at.bits()) && !taken.progress.is_done();
                world.check(inside, || format!("{span} stops at {at}"));
            }
        });
    }

    fn shared_issue(&self, cpu: usize, dice: &Dice) {
        self.with_gather(cpu, dice, |world, it| {
            let issued = it.gather.issue();
            let batch = std::mem::replace(&mut it.batch, world.number_for(&world.slots[it.slot]));
            world.slots[it.slot].users.update(|users| users + 1);
            let mut local = world.local(cpu).issued_beside.borrow_mut();
            local.push((batch, it.slot, issued));
        });
    }

    /// All memory is protected, and a block is taken apart in the midst of which its table is woken. Nothing of that lets a
    /// guest write.
    fn lull(&self, cpu: usize, dice: &Dice) {
        self.with_shared(dice, |index, space| {
            let (slot, page, block) = (&self.slots[index], Self::PAGE, Self::BLOCK);
            let first = slot.base + (4 + dice.below(2)) * block;
            let attrs = Attrs {
                accessed: true,
                ..self.attrs(dice)
            };
            if let (Ok(span), true) = (
                Span::new(F::Input::from_bits(first), block),
                dice.below(4) > 0,
            ) {
                let frame = Pa::new(super::world::FAR + (first - slot.base));
                let _mapped = space.map_range(span, frame, Mapping::new(attrs));
            }
            let alone = self.is_alone_in_writing(cpu);
            let begun = self.begun_to_let.get();
            let Ok(mut start) = space.protect_all() else {
                return;
            };
            // A claim at the root that was forgotten is waited for in vain.
            let mut over = false;
            for _ in 0..40 {
                over = start.step() == Step::Over;
                if over {
                    break;
                }
                self.machine.cpu().spend(Time::ns(200));
            }
            drop(start);
            if !over || !alone || begun != self.begun_to_let.get() {
                return;
            }
            slot.lulled.set(true);
            let mut gather = space.gather();
            let _few = gather.top_up(3);
            for _ in 0..2 + dice.below(4) {
                let at = first + dice.below(block / page) * page;
                if dice.once_in(2) {
                    slot.recent.set((at, page));
                    self.plan(cpu, Kind::Wake, 1 + dice.below(12) as u32);
                }
                match dice.below(4) {
                    0..=1 => {
                        let _refused = gather.split(F::Input::from_bits(at), Level::PAGE);
                    }
                    2 => {
                        let _refused = space.wake(F::Input::from_bits(at), true);
                    }
                    _ => {}
                }
                self.load_at(cpu, index);
                self.write_lulled(slot, at);
            }
            let _finished = gather.finish(|_| ());
        });
    }

    fn protect_step(&self, cpu: usize, dice: &Dice) {
        let local = self.local(cpu);
        let Some((slot, mut start)) = take_any(dice, &local.protecting) else {
            return;
        };
        // A claim at the root that was forgotten, or is this CPU's own, would be waited for in vain.
        let alone = self.slots[slot].users.get() == 1 && !self.leaked.get();
        if alone && dice.once_in(2) {
            start.drive(|| self.machine.cpu().spend(Time::ns(200)));
            self.slots[slot].users.update(|users| users - 1);
            return;
        }
        match start.step() {
            Step::Waiting => local.protecting.borrow_mut().push((slot, start)),
            Step::Over => {
                drop(start);
                self.slots[slot].users.update(|users| users - 1);
            }
        }
    }
}
