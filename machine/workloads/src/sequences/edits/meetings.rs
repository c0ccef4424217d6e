//! Meetings that random operations seldom come to: edits that nothing completes between, forks over
//! empty tables, values that move between CPUs, visitors that unwind or come back into the engine.

use std::marker::PhantomData;

use tablewright::flush::{Completed, Issued};
use tablewright::format::X86_64;
use tablewright::shared::{self, Beside, DeferredReclaim};
use tablewright::{AddressSpace, Gather};
use tablewright_hosted::Threads;

use super::*;

/// Tells whether a type is `Send`, of types that are known.
struct Probe<T>(PhantomData<T>);

/// For types that are not.
trait Stays {
    const MOVES: bool = false;
}

impl<T> Stays for Probe<T> {}

impl<T: Send> Probe<T> {
    const MOVES: bool = true;
}

/// A format and a platform that move, so that only the engine's types decide.
type Any = X86_64<4>;
type Of = &'static Threads;

impl<'m, F: Format, G: Guests<'m, F>> World<'m, F, G> {
    /// Edits of a few addresses with nothing complete between them.
    pub(super) fn one_gather(&self, cpu: usize, dice: &Dice) {
        let before = self.hurried[cpu].replace(true);
        for number in 0..3 + dice.below(8) {
            if number == 0 || dice.once_in(2) {
                // A block, or some pages of it: where the first pages are.
                let size = dice.pick(&[Self::BLOCK, Self::BLOCK, 16 * Self::PAGE]);
                let slots = self.slots.iter().filter(|slot| !slot.silent.get());
                slots.for_each(|slot| slot.recent.set((slot.base + Self::BLOCK, size)));
            }
            match dice.below(21) {
                14 => self.park_and_back(cpu, dice),
                15..=16 => self.unmap_and_forget(cpu, dice),
                17 => self.forget_a_page(cpu, dice),
                18..=19 => self.collapse_between(cpu, dice),
                20 => self.collapse_emptied(cpu, dice),
                0..=2 => self.map(cpu, dice, false),
                3..=4 => self.unmap(cpu, dice, false),
                5..=6 => self.protect(cpu, dice),
                7..=8 => self.split(cpu, dice),
                9 => self.collapse(cpu, dice),
                10..=11 => self.replace_page(cpu, dice),
                12 => self.fork(cpu, dice),
                _ => self.with_exclusive(cpu, dice, |slot, exclusive| {
                    self.end_gather(cpu, slot, exclusive, dice);
                }),
            }
        }
        self.hurried[cpu].set(before);
    }

    /// A page that was mapped, of a run perhaps, is parked, and comes back with other permissions.
    fn park_and_back(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Ok(span) = self.span(slot.base, dice) else {
                return;
            };
            exclusive.touch();
            let back = self.attrs(dice).perms;
            for change in [Perms::empty(), back].map(|perms| Change::new().perms(perms)) {
                let changed = self.edit(slot, exclusive, |gather| gather.protect(span, change));
                self.judge_protect(slot, exclusive, span, change, changed);
            }
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    /// A gather that has unmapped something is forgotten, and the next maps there.
    fn unmap_and_forget(&self, cpu: usize, dice: &Dice) {
        self.unmap(cpu, dice, false);
        self.with_exclusive(cpu, dice, |_, exclusive| {
            if let Some((_, gather)) = exclusive.gather.take() {
                std::mem::forget(gather);
                self.leaked.set(true);
                exclusive.murky = true;
            }
        });
        self.map(cpu, dice, false);
    }

    /// A gather that has unmapped a page in use is forgotten, and another page is mapped there by
    /// itself.
    fn forget_a_page(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let index = self.slots.iter().position(|it| std::ptr::eq(it, slot));
            let (Some(index), false) = (index, slot.silent.get()) else {
                return;
            };
            let page = self.page(slot.base, dice);
            let at = page.start().bits();
            let attrs = self.attrs(dice);
            let attrs = attrs.with_perms(attrs.perms - Perms::ANY_EXEC);
            self.load_at(cpu, index);
            exclusive.touch();
            if slot.model.borrow().at(at).is_none() {
                self.map_alike(slot, exclusive, page, attrs);
                self.complete(cpu, slot, exclusive);
            }
            self.touch(cpu, slot, at, Want::Read, false);
            if slot.model.borrow().at(at).is_some() {
                self.unmap_alike(cpu, slot, exclusive, page);
            }
            if let Some((_, gather)) = exclusive.gather.take() {
                std::mem::forget(gather);
                self.leaked.set(true);
                exclusive.murky = true;
            }
            let Some(frame) = self.take_page() else {
                return;
            };
            if !F::Input::SIGNED {
                self.machine.clean(frame);
            }
            let mapped = exclusive.space().map_page(page.start(), frame, attrs);
            self.judge_map(slot, page, frame, attrs, mapped);
            if mapped.is_err() {
                self.give_back(frame);
            }
            self.touch(cpu, slot, at, Want::Read, false);
        });
    }

    /// A table in use is collapsed between two edits of its pages, by the second of which the block
    /// may be split again.
    fn collapse_between(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let index = self.slots.iter().position(|it| std::ptr::eq(it, slot));
            let (page, block) = (Self::PAGE, Self::BLOCK);
            let first = slot.base + dice.pick(&[1, 4, 5]) * block;
            let span = Span::new(F::Input::from_bits(first), block);
            let (Some(index), Ok(span), false) =
                (index, span, slot.silent.get() || page >= 1 << 16)
            else {
                return;
            };
            let attrs = self.attrs(dice);
            let frame = Pa::new(FAR + (first - slot.base));
            self.load_at(cpu, index);
            exclusive.touch();
            let pages = Mapping::new(attrs).pages_only();
            let mapped = self.edit(slot, exclusive, |gather| gather.map(span, frame, pages));
            self.judge_map(slot, span, frame, attrs, mapped);
            let pages = [(); 2].map(|()| first + dice.below(block / page) * page);
            let pages = pages.map(|at| Span::new(F::Input::from_bits(at), page));
            let [Ok(one), Ok(other)] = pages else { return };
            self.touch(cpu, slot, one.start().bits(), Want::Read, false);
            // No change, by which the table is near.
            self.protect_alike(slot, exclusive, one, Change::new().perms(attrs.perms));
            let up = Level::new(1);
            let collapsed = self.edit(slot, exclusive, |gather| gather.collapse(span, up, false));
            if let Err(error) = collapsed {
                self.judge_refusal(slot, exclusive, span, error);
            }
            match dice.below(3) {
                0 => {
                    let split =
                        self.edit(slot, exclusive, |gather| gather.split(other, Level::PAGE));
                    if let Err(error) = split {
                        self.judge_refusal(slot, exclusive, other, error);
                    }
                }
                1 if slot.model.borrow().at(other.start().bits()).is_some() => {
                    self.unmap_alike(cpu, slot, exclusive, other);
                }
                _ => self.protect_alike(slot, exclusive, other, self.change(dice)),
            }
            self.touch(cpu, slot, one.start().bits(), Want::Read, false);
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    /// The tables above a page go when it is unmapped, and its neighbour is mapped.
    fn collapse_emptied(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            if slot.silent.get() || F::root_level() < Level::new(2) {
                return;
            }
            let size = 1u64 << F::shift(Level::new(2));
            let first = (slot.base & !(size - 1)) + size;
            let at = |first: u64, size| Span::new(F::Input::from_bits(first), size);
            let pages = [(); 2].map(|()| at(first + dice.below(4) * Self::PAGE, Self::PAGE));
            let (Ok(span), [Ok(one), Ok(other)]) = (at(first, size), pages) else {
                return;
            };
            let attrs = self.attrs(dice);
            let attrs = attrs.with_perms(attrs.perms - Perms::ANY_EXEC);
            exclusive.touch();
            self.map_alike(slot, exclusive, one, attrs);
            if slot.model.borrow().at(one.start().bits()).is_some() {
                self.unmap_alike(cpu, slot, exclusive, one);
            }
            let collapsed =
                self.edit(slot, exclusive, |gather| gather.collapse(span, Level::PAGE, false));
            if let Err(error) = collapsed {
                self.judge_refusal(slot, exclusive, span, error);
            }
            self.map_alike(slot, exclusive, other, attrs);
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    /// A large leaf of the parent, and an empty table in its place in the child.
    pub(super) fn fork_over(&self, cpu: usize, dice: &Dice) {
        self.with_two(cpu, dice, |(slot, exclusive), (other, child)| {
            if slot.silent.get() || other.silent.get() {
                return;
            }
            let size = match dice.once_in(3) {
                true => Self::PAGE << F::contiguous(Level::PAGE).max(2),
                false => Self::BLOCK,
            };
            let first = slot.base + dice.pick(&[1, 4, 5]) * Self::BLOCK;
            let at = |first: u64, size| Span::new(F::Input::from_bits(first), size);
            let (Ok(span), Ok(page)) =
                (at(first, size), at(first + dice.below(4) * Self::PAGE, Self::PAGE))
            else {
                return;
            };
            let attrs = Attrs { global: false, ..self.attrs(dice) };
            let forked = Attrs { global: F::GLOBALS && dice.once_in(3), ..attrs };
            let frame = Pa::new(FAR + (first - slot.base));
            exclusive.touch();
            let mapped = self.edit(slot, exclusive, |gather| gather.map(span, frame, forked));
            self.judge_map(slot, span, frame, forked, mapped);
            // The table comes, is found by walkers, and is left empty.
            child.touch();
            let mapped =
                self.edit(other, child, |gather| gather.map_page(page.start(), frame, attrs));
            let number = self.slots.iter().position(|it| std::ptr::eq(it, other));
            let wide = other.wide.get();
            self.judge_map(other, page, frame, attrs, mapped);
            other.wide.set(wide);
            self.load_at(cpu, number.unwrap_or_default());
            let read = |at: u64| {
                if other.attached.get() {
                    let _fault = self.machine.touch(Access::read(at));
                }
            };
            read(page.start().bits());
            if mapped.is_ok() {
                let taken = self.edit(other, child, |gather| gather.unmap_page(page.start()));
                if taken.is_ok() {
                    let (first, last) = (page.start().bits(), page.last().bits());
                    other.model.borrow_mut().remove(first, last);
                }
            }
            self.complete(cpu, other, child);
            read(page.start().bits());
            self.fork_span(cpu, dice, span, (slot, exclusive), (other, child));
            // What is near in the child is what is there.
            for _ in 0..2 {
                let at = first + dice.below(size / Self::PAGE) * Self::PAGE;
                let at = F::Input::from_bits(at);
                let known = other.model.borrow().at(at.bits());
                let found = child.look().query(at);
                self.check(found.is_some() == known.is_some(), || {
                    format!("{at} is {known:x?} in the child, and the engine says {found:?}")
                });
                read(at.bits());
            }
            self.complete(cpu, other, child);
            read(first);
            // A part of it goes: of a run, or of what is global.
            let at = first + dice.below(4) * Self::PAGE;
            if dice.once_in(2) && other.model.borrow().at(at).is_some() {
                child.touch();
                let page = F::Input::from_bits(at);
                let taken = self.edit(other, child, |gather| gather.unmap_page(page));
                if taken.is_ok() {
                    other.model.borrow_mut().remove(at, at + (Self::PAGE - 1));
                }
                self.complete(cpu, other, child);
                read(at);
            }
        });
    }

    /// Something that this CPU has goes to the other.
    pub(super) fn move_value(&self, cpu: usize, dice: &Dice) {
        let to = 1 - cpu;
        // First: the other CPU may take the value as soon as it is in its place.
        self.hand_over();
        if !self.takes_values(to) {
            return;
        }
        let (from, into) = (self.local(cpu), self.local(to));
        let mut batch = None;
        match dice.below(6) {
            0 if Probe::<Issued<Any, Of, Beside<'static, Any, Of>>>::MOVES => {
                let moved = take_any(dice, &from.issued_beside);
                batch = moved.as_ref().map(|it| it.0);
                into.issued_beside.borrow_mut().extend(moved);
            }
            1 if Probe::<Completed<Any, Of>>::MOVES => {
                let moved = take_any(dice, &from.completed);
                batch = moved.as_ref().map(|it| it.0);
                into.completed.borrow_mut().extend(moved);
            }
            2 if Probe::<DeferredReclaim<Any, Of>>::MOVES => {
                let moved = take_any(dice, &from.deferred);
                batch = moved.as_ref().map(|it| it.0);
                into.deferred.borrow_mut().extend(moved);
            }
            3 if Probe::<shared::Gather<'static, Any, Of>>::MOVES => {
                let moved = take_any(dice, &from.gathers);
                batch = moved.as_ref().map(|it| it.batch);
                into.gathers.borrow_mut().extend(moved);
            }
            _ if Probe::<AddressSpace<Any, Of>>::MOVES => {
                self.with_exclusive(cpu, dice, |_, exclusive| {
                    if !Probe::<Gather<'static, Any, Of>>::MOVES
                        && exclusive.gather.take().is_some()
                    {
                        exclusive.dropped();
                    }
                    batch = exclusive.gather.as_ref().map(|it| it.0);
                    exclusive.moves_to(to);
                });
            }
            _ => {}
        }
        if let Some(batch) = batch {
            self.pass_on(cpu, to, batch);
            let held =
                from.held.borrow_mut().extract_if(.., |it| it.0 == batch).collect::<Vec<_>>();
            into.held.borrow_mut().extend(held);
        }
    }

    /// A call whose visitor unwinds, or does something else.
    pub(super) fn visit(&self, cpu: usize, dice: &Dice) {
        const VISITED: [Kind; 9] = [
            Kind::Fork,
            Kind::Fork,
            Kind::Walk,
            Kind::Finish,
            Kind::Reclaim,
            Kind::FinishCompleted,
            Kind::Age,
            Kind::ClearDirty,
            Kind::SharedFinish,
        ];
        let kind = match dice.once_in(4) {
            true => Kind::Harvest,
            false => dice.pick(&VISITED),
        };
        // What comes out when its visitor unwinds may be leaked, by contract.
        self.leaked.set(true);
        self.visits[cpu].set(1 + dice.below(4) as u32);
        unwinds(|| self.operate(cpu, kind, dice));
        self.visits[cpu].set(0);
    }
}
