//! The log is read, round by round, and what was sent is what was written.

use super::*;

impl<'a, 'm, F: Format<Input = Ipa>> Vm<'a, 'm, F> {
    /// A harvest, and what comes after it.
    pub(super) fn round(&self, plan: Plan, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        let must = self.must(plan);
        let mut found = Found::default();
        for slot in &self.slots {
            let slot = slot.with_log(plan.log());
            match plan.marks {
                Marks::Flip => self.turn(plan, &slot, dice, gather, &mut found),
                // Beside rings, it has the host's own marks.
                Marks::Bitmap | Marks::Ring => {
                    self.harvest(plan, &slot, dice, gather, &mut found);
                }
            }
        }
        if plan.marks == Marks::Ring {
            for ring in &self.rings {
                self.empty(plan, ring, dice, gather, &mut found);
            }
        }
        self.check_found(plan, must, &found.all);
        if plan.keep && !self.is(Bug::KeptAndNotProtected) {
            self.protect_all();
        }
        for page in found.left {
            self.copy(page);
            if dice.once_in(2) {
                self.pause(dice, 4);
            }
        }
    }

    /// The pages of a word that are used.
    pub(super) fn used(&self, slot: &Slot, first: u64, bits: u64) -> impl Iterator<Item = usize> {
        let slot = usize::from(slot.id);
        let pages = (0..64).filter(move |bit| bits >> bit & 1 != 0);
        pages.filter_map(move |bit| self.number(slot, first + bit))
    }

    /// Finishes what was gathered, and then copies pages, now or in the end.
    pub(super) fn finish_and_copy(
        &self,
        plan: Plan,
        gather: &mut Edits<'_, 'a, 'm, F>,
        pages: Vec<usize>,
        dice: &Dice,
        found: &mut Found,
    ) {
        found.all.extend(&pages);
        let now = !plan.keep && dice.once_in(2);
        if self.is(Bug::CopiedBeforeFlush) && !plan.keep {
            pages.iter().for_each(|&page| self.copy(page));
            self.pause(dice, 8);
            return self.put_off(gather);
        }
        if dice.once_in(3) {
            self.pause(dice, 8);
        }
        self.put_off(gather);
        if now {
            pages.iter().for_each(|&page| self.copy(page));
        } else {
            found.left.extend(&pages);
        }
    }

    pub(super) fn harvest(
        &self,
        plan: Plan,
        slot: &Slot,
        dice: &Dice,
        gather: &mut Edits<'_, 'a, 'm, F>,
        found: &mut Found,
    ) {
        let record = &self.records[usize::from(slot.id)];
        let count = self.count(slot);
        let chunk = dice.pick(&[count, count, count / 3 + 1, 64]);
        let how = match plan.keep {
            true => Harvest::KEEP,
            false => Harvest::empty(),
        };
        for first in (0..count).step_by(chunk as usize) {
            let pages = first..count.min(first + chunk);
            let mut used = Vec::new();
            let each = |first, bits| used.extend(self.used(slot, first, bits));
            if self.is(Bug::HarvestedAfterProtection) && !plan.keep && plan.log() == Log::ByFault {
                let _protected = gather.protect(slot, pages.clone());
                self.put_off(gather);
                self.pause(dice, 8);
                record.bitmap.harvest(pages, each);
                found.all.extend(&used);
                found.left.extend(&used);
                continue;
            }
            if self.is(Bug::CleanedBeforeHarvest) && plan.log() == Log::ByModification {
                let _cleaned = gather.begin_modification_log(slot);
                self.put_off(gather);
                self.pause(dice, 8);
                record.bitmap.harvest(pages, each);
                found.all.extend(&used);
                found.left.extend(&used);
                continue;
            }
            let bitmap = &record.bitmap;
            let harvested = gather.harvest(slot, bitmap, pages, how, each);
            self.machine.check(harvested.is_ok(), || format!("a harvest: {harvested:?}"));
            self.finish_and_copy(plan, gather, used, dice, found);
        }
    }

    pub(super) fn turn(
        &self,
        plan: Plan,
        slot: &Slot,
        dice: &Dice,
        gather: &mut Edits<'_, 'a, 'm, F>,
        found: &mut Found,
    ) {
        let flip = &self.records[usize::from(slot.id)].flip;
        let mut words = Vec::new();
        while !flip.drain(&self.mapper, |first, bits| words.push((first, bits))) {
            self.wait();
        }
        let mut used = Vec::new();
        for (first, bits) in words {
            used.extend(self.used(slot, first, bits));
            if plan.keep {
                continue;
            }
            let mut protect = |pages| self.protect_pages(slot, pages, gather);
            if bits == u64::MAX {
                protect(first..first + 64);
                continue;
            }
            for bit in (0..64).filter(|bit| bits >> bit & 1 != 0) {
                protect(first + bit..first + bit + 1);
            }
        }
        self.finish_and_copy(plan, gather, used, dice, found);
    }

    /// Pages whose marks were taken are protected; those that could not be are marked until they
    /// are.
    pub(super) fn protect_pages(
        &self,
        slot: &Slot,
        pages: std::ops::Range<u64>,
        gather: &mut Edits<'_, 'a, 'm, F>,
    ) {
        let protected = gather.protect(slot, pages.clone());
        self.machine.check(protected.is_ok(), || format!("{protected:?}"));
        let passed_over = protected.is_ok_and(|protected| protected.passed_over);
        if passed_over {
            for page in pages {
                let at = slot.guest.start().get() + page * self.page;
                let marker = self.own_marker(usize::from(slot.id));
                self.guest.mark(&marker, slot, Ipa::new(at));
            }
        }
    }

    /// A ring is harvested, and its entries are free again.
    pub(super) fn empty(
        &self,
        plan: Plan,
        ring: &Ring<'_>,
        dice: &Dice,
        gather: &mut Edits<'_, 'a, 'm, F>,
        found: &mut Found,
    ) {
        let mut harvested = 0;
        let count = ring.harvest(|_, _| harvested += 1);
        self.machine.check(count == harvested, || {
            format!("a ring gives out {harvested} entries and says {count}")
        });
        if dice.once_in(3) {
            self.pause(dice, 4);
        }
        let mut entries = Vec::new();
        let collected = ring.collect(|slot, page| entries.push((slot, page)));
        let page_of = |&(slot, page): &(u16, u64)| self.number(usize::from(slot), page);
        let mut used: Vec<usize> = entries.iter().filter_map(page_of).collect();
        if self.is(Bug::ReleasedBeforeProtection) && !plan.keep {
            // So they may be copied.
            found.all.extend(&used);
            used.drain(..).for_each(|page| self.copy(page));
        }
        if !plan.keep {
            for (slot, page) in entries {
                let slot = self.slots[usize::from(slot)].with_log(plan.log());
                self.protect_pages(&slot, page..page + 1, gather);
            }
        }
        self.finish_and_copy(plan, gather, used, dice, found);
        if plan.keep && !self.is(Bug::KeptAndNotProtected) {
            self.protect_all();
        }
        collected.release();
    }

    /// The guest stops, and what is left is copied.
    pub(super) fn finish(&self, plan: Plan, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        if self.is(Bug::LastHarvestBeforeStop) {
            self.round(plan, dice, gather);
        }
        self.stop.set(true);
        while self.stopped.get() != self.pending.len() - 1 {
            self.wait();
        }
        // No walk is under way: all of it can be drained, and what hardware has marked in what was
        // detached comes out.
        while !self.later.is_empty() {
            self.reclaim_one();
        }
        if !self.is(Bug::LastHarvestBeforeStop) {
            self.round(plan, dice, gather);
        }
        for page in &self.pages {
            let (slot, index) = (page.slot, page.index);
            self.machine.check(!page.stale.get(), || {
                format!(
                    "page {index} of slot {slot} was written, and not copied after it ({plan:?})"
                )
            });
            let Some(copy) = page.copy else {
                continue;
            };
            let words = (self.page / 8) as usize;
            let differs = |&word: &usize| {
                self.word(page.frame.get(), word).load() != self.word(copy, word).load()
            };
            let first = (0..words).find(differs);
            self.machine.check(first.is_none(), || {
                format!(
                    "page {index} of slot {slot} and its copy differ in word {first:?} ({plan:?})"
                )
            });
        }
        if dice.once_in(2) {
            self.stop.set(false);
        }
    }

    /// The log ends, and blocks are put together.
    pub(super) fn end(&self, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        for &slot in &self.slots {
            // What is mapped is what it was.
            let _unchanged = self.replace(slot);
        }
        self.plan.set(None);
        if dice.below(3) > 0 {
            let off = self.guest.protect_no_more();
            self.machine.check(off.is_ok(), || format!("the log ends: {off:?}"));
        }
        if dice.once_in(2) {
            let mut collapse = |page| self.collapse(page, dice, gather);
            self.during(|| (0..self.pages.len()).for_each(&mut collapse));
        }
    }

    /// Everything goes: no table, no page is left.
    pub(super) fn tear_down(self, base: Option<Pa>) {
        let dice = Dice::of(1, 1);
        let mut gather = self.guest.gather();
        for slot in &self.slots {
            match self.guest.remove(slot.id) {
                Ok(zap) => self.unmap(zap, &dice, &mut gather),
                Err(error) => self.machine.report(Rule::Program, error.to_string()),
            }
        }
        drop(gather);
        for _ in 0..10_000 {
            if self.later.is_empty() {
                break;
            }
            self.reclaim_one();
        }
        let Self { machine, mapper, guest, pages, page, block, logs, .. } = self;
        logs.into_iter().for_each(|log| machine.give_page(log));
        let block = base.map_or(0..0, |base| base.get()..base.get() + block);
        for page in pages {
            let own = !block.contains(&page.frame.get().get());
            if page.copy.is_some() && own {
                machine.give_page(page.frame.get());
            }
            if page.copy.is_some()
                && page.frame.get() != page.home
                && !block.contains(&page.home.get())
            {
                machine.give_page(page.home);
            }
            page.copy.into_iter().for_each(|copy| machine.give_page(copy));
        }
        block.step_by(page as usize).for_each(|frame| machine.give_page(Pa::new(frame)));
        destroy(machine, guest.into_space().into_exclusive(), &mapper);
    }
}
