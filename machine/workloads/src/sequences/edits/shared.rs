//! Edits of a space that several processors edit.

use super::*;

impl<'m, F: Format, G: Guests<'m, F>> World<'m, F, G> {
    /// A gather of a space that is shared: one that is there, or a new one.
    pub(super) fn with_gather(
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
        let it = match known {
            Some(it) => it,
            None => {
                let mut made = None;
                self.with_shared(dice, |slot, space: &'m SharedSpace<F, Faulty<'m>>| {
                    self.slots[slot].users.update(|users| users + 1);
                    let gather = space.gather();
                    made =
                        Some(Gathering { slot, batch: self.number_for(&self.slots[slot]), gather });
                });
                let Some(made) = made else { return };
                made
            }
        };
        let cell = RefCell::new(Some(it));
        let edit = || {
            if let Some(it) = cell.borrow_mut().as_mut() {
                what(self, it);
            }
        };
        guarded(edit, |_| local.gathers.borrow_mut().extend(cell.take()));
    }

    pub(super) fn shared_map(&self, cpu: usize, dice: &Dice) {
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
    pub(super) fn map_as_block(&self, cpu: usize, dice: &Dice) {
        self.with_gather(cpu, dice, |world, it| {
            let slot = &world.slots[it.slot];
            let (page, block) = (Self::PAGE, Self::BLOCK);
            let (at, _) = world.addresses(slot.base, dice);
            let inside = at.wrapping_sub(slot.base) < 16 * block;
            // Nor over what faults of a guest map there at the same time: that would be other
            // memory.
            if !inside || slot.mapping.get() || slot.silent.get() {
                return;
            }
            let first = at & !(block - 1);
            let frame = Pa::new(FAR + (first - slot.base));
            let pages = world.attrs(dice);
            let mapping = Mapping::new(pages).pages_only();
            slot.mapping.set(true);
            if let (Ok(span), true) =
                (Span::new(F::Input::from_bits(first), block), dice.once_in(2) && page < 1 << 16)
            {
                let _mapped = it.gather.space().map_range(span, frame, mapping);
                self.load_at(cpu, it.slot);
                for _ in 0..2 {
                    let at = first + dice.below(block / page) * page;
                    self.touch(cpu, slot, at, Want::Read, false);
                }
            }
            // The memory is not another's.
            let attrs = Attrs { native: pages.native, ..world.attrs(dice) };
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

    pub(super) fn map_range(&self, dice: &Dice) {
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
                Err(Refused::Edit(EditError::InputOutOfRange | EditError::Misaligned))
            );
            let right = outside || self.translates(&self.slots[index], span);
            self.check(right, || format!("{span} is mapped: {mapped:?}"));
            if let Ok(bytes) = mapped {
                self.check(bytes <= span.size(), || format!("{bytes:#x} of {span} were mapped"));
            }
        });
    }

    pub(super) fn shared_finish(&self, cpu: usize, it: &mut Gathering<'m, F>) {
        // First: what is held of a finish whose visitor unwinds is lost.
        let batch = std::mem::replace(&mut it.batch, self.number_for(&self.slots[it.slot]));
        let finished = it.gather.finish(|leaf| {
            self.out(batch, &leaf);
            self.visited();
        });
        self.reclaimed(cpu, batch);
        if let Err(deferred) = finished {
            self.release_all(cpu, batch, |held| deferred.release(held));
            self.local(cpu).deferred.borrow_mut().push((batch, deferred));
        }
        let clean = it.gather.is_clean();
        self.check(clean, || "a gather is finished, and is not clean".into());
    }

    pub(super) fn shared_unmap(&self, cpu: usize, dice: &Dice, unwind: bool) {
        let early = self.control.is(Bug::FreedBeforeCompletion);
        if unwind && dice.once_in(2) {
            // What another gather has not completed yet.
            self.map_as_block(cpu, dice);
        }
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
                        let aged =
                            it.gather.age(span, |_| std::panic::resume_unwind(Box::new(Planned)));
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

    /// Tables that map nothing are freed, and no leaf with them.
    pub(super) fn prune(&self, dice: &Dice) {
        self.with_shared(dice, |index, space| {
            let mut gather = space.gather();
            let low = Span::new(F::Input::from_bits(0), 1 << (F::INPUT_BITS - 1));
            let (Ok(all), Ok(some)) = (low, self.span(self.slots[index].base, dice)) else {
                return;
            };
            let span = match dice.once_in(2) {
                true => all,
                false => some,
            };
            let pruned = gather.prune(span);
            let makes_sense = self.translates(&self.slots[index], span);
            let makes_sense = makes_sense && span.is_aligned(F::PAGE_SHIFT);
            self.check(pruned.is_ok() == makes_sense, || format!("{span} is pruned: {pruned:?}"));
            let mut deferred = gather.issue().complete();
            // A walk that this has interrupted is not over before this is.
            for _ in 0..40 {
                deferred = match deferred.try_complete() {
                    Ok(completed) => {
                        return completed.finish(|leaf| {
                            let at = leaf.input();
                            self.fail(format!("{at} was mapped, and its table is freed"));
                        });
                    }
                    Err(deferred) => deferred,
                };
                self.machine.cpu().spend(Time::ns(200));
            }
        });
    }

    pub(super) fn shared_issue(&self, cpu: usize, dice: &Dice) {
        self.with_gather(cpu, dice, |world, it| {
            let issued = it.gather.issue();
            let batch = std::mem::replace(&mut it.batch, world.number_for(&world.slots[it.slot]));
            world.slots[it.slot].users.update(|users| users + 1);
            let mut local = world.local(cpu).issued_beside.borrow_mut();
            local.push((batch, it.slot, issued));
        });
    }

    /// All memory is protected, and a block is taken apart in the midst of which its table is
    /// opened. Nothing of that lets a guest write.
    pub(super) fn write_protect(&self, cpu: usize, dice: &Dice) {
        self.with_shared(dice, |index, space| {
            let (slot, page, block) = (&self.slots[index], Self::PAGE, Self::BLOCK);
            let first = slot.base + (4 + dice.below(2)) * block;
            let attrs = Attrs { accessed: true, ..self.attrs(dice) };
            if let (Ok(span), true) =
                (Span::new(F::Input::from_bits(first), block), dice.below(4) > 0)
            {
                let frame = Pa::new(FAR + (first - slot.base));
                let _mapped = space.map_range(span, frame, Mapping::new(attrs));
            }
            let alone = self.is_alone_in_writing(cpu);
            let begun = self.begun_to_let.get();
            let Ok(mut start) = space.protect_all() else {
                return;
            };
            // Dropped at once, it has ended: another may start.
            if dice.once_in(6) && slot.users.get() == 1 {
                drop(start);
                let again = space.protect_all();
                self.check(again.is_ok(), || "a start that was dropped has not ended".into());
                return;
            }
            // A claim at the root that was forgotten is waited for in vain.
            let mut over = false;
            for _ in 0..40 {
                over = start.step();
                if over {
                    break;
                }
                self.machine.cpu().spend(Time::ns(200));
            }
            drop(start);
            if !over || !alone || begun != self.begun_to_let.get() {
                return;
            }
            slot.protected.set(true);
            let mut gather = space.gather();
            let _few = gather.top_up(3);
            for _ in 0..2 + dice.below(4) {
                let at = first + dice.below(block / page) * page;
                if dice.once_in(2) {
                    slot.recent.set((at, page));
                    self.plan(cpu, Kind::Open, 1 + dice.below(12) as u32);
                }
                match dice.below(4) {
                    0..=1 => {
                        let _refused = gather.split(F::Input::from_bits(at), Level::PAGE);
                    }
                    2 => {
                        let _refused = space.open(F::Input::from_bits(at), true);
                    }
                    _ => {}
                }
                self.load_at(cpu, index);
                self.write_lulled(slot, at);
            }
            let _finished = gather.finish(|_| ());
        });
    }

    pub(super) fn protect_step(&self, cpu: usize, dice: &Dice) {
        let local = self.local(cpu);
        let Some((slot, mut start)) = take_any(dice, &local.protecting) else {
            return;
        };
        // A claim at the root that was forgotten, or is this CPU's own, would be waited for in
        // vain.
        let alone = self.slots[slot].users.get() == 1 && !self.leaked.get();
        if alone && dice.once_in(2) {
            // What waits for the start may unwind: the next start is not kept away by that.
            let mut left = dice.once_in(2).then(|| dice.below(2));
            let unwound = unwinds(|| {
                start.drive(|| {
                    self.machine.cpu().spend(Time::ns(200));
                    if left == Some(0) {
                        std::panic::resume_unwind(Box::new(Planned));
                    }
                    left = left.map(|left| left - 1);
                });
            });
            if unwound && let Some(space) = self.tables_at(slot) {
                let again = space.protect_all();
                self.check(again.is_ok(), || "a start that unwound has not ended".into());
            }
            self.slots[slot].users.update(|users| users - 1);
            return;
        }
        match start.step() {
            false => local.protecting.borrow_mut().push((slot, start)),
            true => {
                drop(start);
                self.slots[slot].users.update(|users| users - 1);
            }
        }
    }
}
