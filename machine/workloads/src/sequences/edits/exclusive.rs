//! Edits of a space by its own processor, each judged by what is mapped afterwards.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::*;

impl<'m, F: Format, G: Guests<'m, F>> World<'m, F, G> {
    /// An edit with the gather of a space, of which there is one if there was, or as the dice say.
    pub(super) fn edit<T>(
        &self,
        slot: &Slot<'m, F, G>,
        exclusive: &mut Exclusive<'m, F>,
        what: impl FnOnce(&mut Gather<'m, F, Faulty<'m>>) -> T,
    ) -> T {
        let (batch, mut gather) = match exclusive.gather.take() {
            Some(it) => it,
            None => (self.number_for(slot), exclusive.space().gather()),
        };
        let result = what(&mut gather);
        exclusive.gather = Some((batch, gather));
        result
    }

    /// Accounts for an edit, and often completes at once what it leaves.
    pub(super) fn account_for(
        &self,
        cpu: usize,
        slot: &Slot<'m, F, G>,
        exclusive: &mut Exclusive<'m, F>,
        dice: &Dice,
    ) {
        if self.hurried[cpu].get() {
            return;
        }
        match dice.below(8) {
            0..=1 => self.complete(cpu, slot, exclusive),
            // It is finished when it is dropped. What is held leaks.
            2 if exclusive.gather.take().is_some() => exclusive.dropped(),
            _ => {}
        }
    }

    pub(super) fn mapping(&self, attrs: Attrs, dice: &Dice) -> Mapping {
        let mut mapping = Mapping::new(attrs);
        match dice.below(8) {
            0..=1 => mapping = mapping.pages_only(),
            2 => mapping = mapping.largest(self.level(dice)),
            3 => mapping = mapping.without_runs(),
            _ => {}
        }
        if dice.below(12) < 3 && self.denying {
            mapping = mapping.tables_deny_execution();
        }
        if dice.once_in(12) {
            mapping = mapping.without_allocation();
        }
        mapping
    }

    pub(super) fn map(&self, cpu: usize, dice: &Dice, once: bool) {
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
            let is_page = span.size() == Self::PAGE;
            let at = span.start().bits();
            let looks = self.machine.architecture().invalid_entries_cached && is_page;
            if looks {
                // It may be remembered that there was nothing.
                self.touch(cpu, slot, at, Want::Read, false);
            }
            exclusive.touch();
            let mapped = if once {
                if exclusive.gather.is_some() {
                    self.complete(cpu, slot, exclusive);
                }
                if is_page && dice.once_in(2) {
                    (exclusive.space()).map_page(span.start(), frame, mapping)
                } else {
                    let mapped = exclusive.space().map(span, frame, mapping);
                    // Its gather is dropped. That completes what the space owes, and does not wait
                    // for what was issued before.
                    exclusive.dropped();
                    mapped
                }
            } else {
                let encoded = Encoded::<F>::new(mapping);
                let page = is_page && dice.once_in(2);
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
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    /// Pages that do not adjoin, mapped side by side.
    pub(super) fn map_frames(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let attrs =
                Attrs { perms: self.attrs(dice).perms - Perms::ANY_EXEC, ..self.attrs(dice) };
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
            if span.is_some() {
                exclusive.touch();
            }
            let mapping = self.mapping(attrs, dice);
            let mapped =
                self.edit(slot, exclusive, |gather| gather.map_frames(first, &frames, mapping));
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
                frames.iter().for_each(|frame| self.give_back(frame.start()));
            }
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    /// Forks mappings of one space into another.
    pub(super) fn fork(&self, cpu: usize, dice: &Dice) {
        self.with_two(cpu, dice, |parent, child| {
            if let Ok(span) = self.span(parent.0.base, dice) {
                self.fork_span(cpu, dice, span, parent, child);
            }
        });
    }

    pub(super) fn fork_span(
        &self,
        cpu: usize,
        dice: &Dice,
        span: Span<F::Input>,
        (slot, exclusive): (&Slot<'m, F, G>, &mut Exclusive<'m, F>),
        (other, child): (&Slot<'m, F, G>, &mut Exclusive<'m, F>),
    ) {
        if slot.silent.get() || other.silent.get() {
            return;
        }
        let change = self.change(dice);
        exclusive.touch();
        child.touch();
        let mut size = 0u64;
        let mut told = Vec::new();
        let fork = || {
            self.edit(slot, exclusive, |parent| {
                self.edit(other, child, |into| {
                    parent.fork(span, change, into, |leaf| {
                        size += leaf.size();
                        // Two spaces have what is global at one address.
                        if change.apply(leaf.attrs()).global || leaf.attrs().global {
                            other.wide.set(true);
                        }
                        self.share_page(&leaf);
                        told.push((leaf.input().bits(), leaf.size()));
                        self.visited();
                    })
                })
            })
        };
        let forked = match catch_unwind(AssertUnwindSafe(fork)) {
            Ok(forked) => forked,
            Err(payload) => {
                if payload.is::<Planned>() {
                    self.share_untold(span, other, child, &told);
                }
                resume_unwind(payload)
            }
        };
        let (first, last) = (span.start().bits(), span.last().bits());
        if let Ok(()) = forked {
            let becomes = |perms| change.apply(Attrs { perms, ..Attrs::USER_RODATA }).perms;
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
        self.account_for(cpu, slot, exclusive, dice);
        self.account_for(cpu, other, child, dice);
    }

    /// A fork was cut short: what has come to be in the child besides what was told of is shared.
    fn share_untold(
        &self,
        span: Span<F::Input>,
        other: &Slot<'m, F, G>,
        child: &Exclusive<'m, F>,
        told: &[(u64, u64)],
    ) {
        let before = other.model.borrow();
        let _walked = child.look().walk(span, |leaf| {
            let at = leaf.input().bits();
            let of = |&(first, size): &(u64, u64)| at.wrapping_sub(first) < size;
            if before.at(at).is_none() && !told.iter().any(of) {
                self.share_page(&leaf);
            }
            ControlFlow::Continue(())
        });
    }

    /// A map was refused if there is a reason, and not if there is none.
    pub(super) fn judge_map(
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
        let beyond =
            frame.get().checked_add(last - first).is_none_or(|end| end >> F::OUTPUT_BITS != 0);
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

    pub(super) fn unmap(&self, cpu: usize, dice: &Dice, unwind: bool) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            exclusive.touch();
            if self.control.is(Bug::FreedWhileMapped)
                && let Some((page, _)) = slot.model.borrow().at(span.start().bits())
            {
                self.release_page(page);
                return;
            }
            let mut room = dice.below(12);
            let (batch, mut gather) = match exclusive.gather.take() {
                Some(it) => it,
                None => (self.number_for(slot), exclusive.space().gather()),
            };
            let early = self.control.is(Bug::FreedBeforeCompletion);
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
                true => gather.unmap_page(span.start()).map(|leaf| {
                    let known = slot.model.borrow().at(span.start().bits());
                    self.check(leaf.is_some() == known.is_some(), || {
                        format!("{span} is {known:x?}, and {leaf:?} comes out of it")
                    });
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
                    self.check((first..=last).contains(&at), || format!("{span} stops at {at:#x}"));
                    if at > first {
                        slot.model.borrow_mut().remove(first, at - 1);
                    }
                }
                Err(error) => self.judge_refusal(slot, exclusive, span, error),
            }
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    /// Whether an edit of this range is made by the call for one page: every other one.
    pub(super) fn is_by_page(span: Span<F::Input>) -> bool {
        span.size() == Self::PAGE && span.start().bits() & Self::PAGE != 0
    }

    /// An edit of what is mapped was refused for a reason.
    pub(super) fn judge_refusal(
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
    pub(super) fn replace_page(&self, cpu: usize, dice: &Dice) {
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
            attrs.global |= F::GLOBALS && dice.once_in(3);
            exclusive.touch();
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
                    self.check(was.is_some(), || format!("{page} was not mapped, and is replaced"));
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
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    /// Flushes a gather for one of the leaves that are held, of this flush or of another.
    pub(super) fn flush_with_one(
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
                self.check(of == batch, || "a gather gives out what another holds".into());
                self.out(batch, &leaf);
                exclusive.touched = false;
                exclusive.murky = false;
                exclusive.gather = Some((self.number_for(slot), gather));
            }
            Err(held) => {
                self.local(cpu).held.borrow_mut().push((of, held));
                exclusive.gather = Some((batch, gather));
            }
        }
    }

    pub(super) fn protect(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            let change = self.change(dice);
            exclusive.touch();
            let protected = self.edit(slot, exclusive, |gather| match Self::is_by_page(span) {
                true => gather.protect_page(span.start(), change),
                false => gather.protect(span, change),
            });
            self.judge_protect(slot, exclusive, span, change, protected);
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    /// The model is changed as the space was, or the change was refused for a reason.
    pub(super) fn judge_protect(
        &self,
        slot: &Slot<'m, F, G>,
        exclusive: &Exclusive<'m, F>,
        span: Span<F::Input>,
        change: Change,
        protected: Result<(), EditError<F::Input>>,
    ) {
        if let Err(error) = protected {
            return self.judge_refusal(slot, exclusive, span, error);
        }
        let caps = exclusive.look().platform().caps();
        let becomes = |perms| {
            let attrs = Attrs { perms, ..Attrs::USER_RODATA };
            change.apply_on(attrs, F::RULE, &caps).perms
        };
        let (first, last) = (span.start().bits(), span.last().bits());
        slot.model.borrow_mut().protect(first, last, becomes);
        // What was changed is as it was to be: the same again would change nothing.
        let walked = exclusive.look().walk(span, |leaf| {
            let attrs = Attrs { accessed: true, dirty: true, ..leaf.attrs() };
            let again =
                Attrs { accessed: true, dirty: true, ..change.apply_on(attrs, F::RULE, &caps) };
            self.check(attrs == again, || {
                format!("{:?} at {} is not what {change:?} makes", leaf.attrs(), leaf.input())
            });
            ControlFlow::Continue(())
        });
        self.check(walked.is_ok(), || format!("{span} was changed, and not walked: {walked:?}"));
    }

    pub(super) fn relocate(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let (Ok(span), (to, _)) = (self.span(slot.base, dice), self.addresses(slot.base, dice))
            else {
                return;
            };
            if slot.silent.get() {
                return;
            }
            exclusive.touch();
            let at = F::Input::from_bits(to);
            let moved = self.edit(slot, exclusive, |gather| gather.relocate(span, at));
            self.judge_relocate(slot, exclusive, span, to, moved);
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    /// The model has moved as the space has, or the move was refused for a reason.
    fn judge_relocate(
        &self,
        slot: &Slot<'m, F, G>,
        exclusive: &Exclusive<'m, F>,
        span: Span<F::Input>,
        to: u64,
        moved: Result<(), EditError<F::Input>>,
    ) {
        let (first, last) = (span.start().bits(), span.last().bits());
        let end = to.checked_add(last - first);
        let overlap = end.is_some_and(|end| to <= last && first <= end);
        let aligned = to.is_multiple_of(Self::PAGE);
        let fits = end.is_some_and(|end| self.translates_all(slot, to, end));
        let mut model = slot.model.borrow_mut();
        let taken = end.is_some_and(|end| model.overlaps(to, end));
        let right = match moved {
            Ok(()) => aligned && fits && !overlap && !taken && self.translates(slot, span),
            Err(EditError::Overlaps) => overlap,
            Err(EditError::AlreadyMapped(at)) => model.at(at.bits()).is_some(),
            Err(EditError::InputOutOfRange) => !fits || !self.translates(slot, span),
            Err(EditError::Misaligned) => !aligned || !span.is_aligned(F::PAGE_SHIFT),
            Err(error) => {
                drop(model);
                return self.judge_refusal(slot, exclusive, span, error);
            }
        };
        self.check(right, || format!("a move of {span} to {to:#x} comes to {moved:?}"));
        if moved.is_err() {
            return;
        }
        if ![to, to + (last - first)].iter().all(|&at| Self::is_in_window(slot, at)) {
            slot.wide.set(true);
        }
        // Cut at both ends.
        model.protect(first, last, |perms| perms);
        let segments: Vec<_> = model.inside(first, last).collect();
        model.remove(first, last);
        for (at, segment) in segments {
            let (at, end) = (at - first + to, segment.last - first + to);
            model.insert(at, end, segment.pa, segment.perms);
        }
    }

    pub(super) fn split(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            let level = self.level(dice);
            exclusive.touch();
            if let Err(error) = self.edit(slot, exclusive, |gather| gather.split(span, level)) {
                self.judge_refusal(slot, exclusive, span, error);
            }
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    pub(super) fn collapse(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            let (level, runs) = (self.level(dice), dice.once_in(2));
            exclusive.touch();
            if let Err(error) =
                self.edit(slot, exclusive, |gather| gather.collapse(span, level, runs))
            {
                self.judge_refusal(slot, exclusive, span, error);
            }
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    pub(super) fn query(&self, cpu: usize, dice: &Dice) {
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

    pub(super) fn walk(&self, cpu: usize, dice: &Dice) {
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
                self.check(meets && ordered, || format!("a walk of {span} comes to {leaf:?}"));
                before = Some(last);
                self.visited();
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

    pub(super) fn linear(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let (page, block) = (Self::PAGE, Self::BLOCK);
            let at = |number: u64, count: u64| Span::new(Pa::new(number * page), count * page);
            let first = dice.below(6);
            let spans =
                [at(first, 1 + dice.below(4)), at(first + dice.below(8), 1 + dice.below(6))];
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
            exclusive.touch();
            if dice.once_in(2) {
                let change = self.change(dice);
                if self.edit(slot, exclusive, |gather| linear.protect(gather, low, change)).is_ok()
                {
                    let becomes = |perms| change.apply(Attrs { perms, ..Attrs::USER_RODATA }).perms;
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
            self.account_for(cpu, slot, exclusive, dice);
        });
    }
}
