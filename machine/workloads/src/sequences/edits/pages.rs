//! Pages that are alike, edited one by one: what kernels do all day, and what the engine keeps the
//! last answer for.
//!
//! Most pages of a process are mapped, protected and unmapped in the same few ways, and each is an
//! edit of its own. What is right for one of a pattern is done again to the next without being
//! asked anew; so whatever such an edit forgets to say, it forgets where the gather has nothing
//! else to tell. Gathers end in every way here, often after a single edit, and the pages are used
//! between any two.

use super::*;

impl<'m, F: Format, G: Guests<'m, F>> World<'m, F, G> {
    pub(super) fn page_by_page(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Some(index) = self.slots.iter().position(|it| std::ptr::eq(it, slot)) else {
                return;
            };
            if slot.silent.get() {
                return;
            }
            let mut attrs = self.attrs(dice);
            // What is fetched would have to be made coherent.
            attrs.perms -= Perms::ANY_EXEC;
            let changes = [self.change(dice), self.change(dice)];
            self.load_at(cpu, index);
            for _ in 0..6 + dice.below(10) {
                let page = self.page(slot.base, dice);
                let at = page.start().bits();
                let is_mapped = slot.model.borrow().at(at).is_some();
                exclusive.touch();
                match (is_mapped, dice.below(2)) {
                    (false, _) => self.map_alike(slot, exclusive, page, attrs),
                    (true, 0) => self.unmap_alike(cpu, slot, exclusive, page),
                    (true, _) => {
                        // Mostly the same.
                        let change = changes[usize::from(dice.once_in(4))];
                        self.protect_alike(slot, exclusive, page, change);
                    }
                }
                self.end_gather(cpu, slot, exclusive, dice);
                let user = F::Input::SIGNED && dice.once_in(2);
                let want = dice.pick(&[Want::Read, Want::Write]);
                let used = self.page(slot.base, dice).start().bits();
                self.touch(cpu, slot, used, want, user);
            }
            self.account_for(cpu, slot, exclusive, dice);
        });
    }

    pub(super) fn map_alike(
        &self,
        slot: &Slot<'m, F, G>,
        exclusive: &mut Exclusive<'m, F>,
        page: Span<F::Input>,
        attrs: Attrs,
    ) {
        let Some(frame) = self.take_page() else {
            return;
        };
        if !F::Input::SIGNED {
            self.machine.clean(frame);
        }
        let mapped = self.edit(slot, exclusive, |gather| {
            gather.map_page(page.start(), frame, Mapping::new(attrs))
        });
        self.judge_map(slot, page, frame, attrs, mapped);
        if mapped.is_err() {
            self.give_back(frame);
        }
    }

    pub(super) fn unmap_alike(
        &self,
        cpu: usize,
        slot: &Slot<'m, F, G>,
        exclusive: &mut Exclusive<'m, F>,
        page: Span<F::Input>,
    ) {
        let taken = self.edit(slot, exclusive, |gather| gather.unmap_page(page.start()));
        match taken {
            Ok(leaf) => {
                self.check(leaf.is_some(), || format!("{page} was mapped, and is not"));
                let batch = exclusive.gather.as_ref().map_or(0, |(batch, _)| *batch);
                let held = leaf.map(|leaf| (batch, leaf));
                self.local(cpu).held.borrow_mut().extend(held);
                let (first, last) = (page.start().bits(), page.last().bits());
                slot.model.borrow_mut().remove(first, last);
            }
            Err(error) => self.judge_refusal(slot, exclusive, page, error),
        }
    }

    pub(super) fn protect_alike(
        &self,
        slot: &Slot<'m, F, G>,
        exclusive: &mut Exclusive<'m, F>,
        page: Span<F::Input>,
        change: Change,
    ) {
        let protected =
            self.edit(slot, exclusive, |gather| gather.protect_page(page.start(), change));
        self.judge_protect(slot, exclusive, page, change, protected);
    }

    /// A gather comes to its end in some way, or goes on.
    pub(super) fn end_gather(
        &self,
        cpu: usize,
        slot: &Slot<'m, F, G>,
        exclusive: &mut Exclusive<'m, F>,
        dice: &Dice,
    ) {
        match dice.below(8) {
            0..=2 => self.complete(cpu, slot, exclusive),
            3..=4 if exclusive.gather.take().is_some() => exclusive.dropped(),
            5 => {
                if let Some((_, gather)) = exclusive.gather.take() {
                    std::mem::forget(gather);
                    self.leaked.set(true);
                    exclusive.murky = true;
                }
            }
            _ => {}
        }
    }
}
