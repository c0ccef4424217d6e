//! The host's acts while writes are logged: it writes, moves, splits, unmaps and protects, and
//! starts logs.

use super::*;

impl<'a, 'm, F: Format<Input = Ipa>> Vm<'a, 'm, F> {
    pub(super) fn manage<'g>(&'g self, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let page = dice.below(self.pages.len() as u64) as usize;
        // As long as large leaves can be written.
        let early = self.plan.get().is_some_and(|plan| plan.start == Start::Marked);
        if early && dice.once_in(2) {
            return self.split(dice, gather);
        }
        match dice.below(12) {
            0..=2 => self.write_for_device(page, dice),
            3..=5 => self.shift(page, dice, gather),
            6 | 7 => self.split(dice, gather),
            8 | 9 => self.collapse(page, dice, gather),
            10 => self.age(page, gather),
            _ => self.reclaim_one(),
        }
    }

    /// The host writes a word, and marks the page.
    pub(super) fn write_for_device(&self, number: usize, dice: &Dice) {
        if !self.can_write(number) {
            return;
        }
        let page = &self.pages[number];
        let pending = &self.pending[self.cpu().id()];
        let mark = || {
            self.cpu().order();
            if self.plan.get().is_some() && !self.is(Bug::DeviceUnmarked) {
                let at = Ipa::new(self.at(number));
                let marker = self.own_marker(page.slot);
                self.guest.mark(&marker, &self.slots[page.slot], at);
            }
        };
        if self.is(Bug::DeviceMarkedBefore) {
            mark();
            self.pause(dice, 30);
        }
        pending.set(Some(number));
        self.lock(number);
        self.machine.write_page(page.frame.get());
        self.word(page.frame.get(), HOST_WORDS + self.cpu().id()).store(dice.below(1 << 60) + 1);
        page.stale.set(true);
        self.unlock(number);
        if self.is(Bug::DeviceMarkedBefore) {
            return pending.set(None);
        }
        if dice.once_in(3) {
            self.pause(dice, 20);
        }
        mark();
        pending.set(None);
    }

    /// A page gets another frame, or the one back that it had at first.
    pub(super) fn shift<'g>(
        &'g self,
        number: usize,
        dice: &Dice,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        let page = &self.pages[number];
        if page.busy.replace(true) {
            return;
        }
        let old = page.frame.get();
        let new = match (page.copy.is_some(), old == page.home) {
            (_, false) => Some(page.home),
            (true, true) => self.machine.take_page(),
            (false, true) => Some(Pa::new(page.home.get() + self.block)),
        };
        if let Some(new) = new {
            page.moving.set(true);
            let zap = self.guest.zap(span(self.at(number), self.page));
            self.unmap(zap, dice, gather);
            if page.copy.is_some() {
                self.machine.copy_page(old, new);
            }
            page.frame.set(new);
            page.moving.set(false);
            if page.copy.is_some() && old != page.home {
                self.machine.give_page(old);
            }
        }
        self.unlock(number);
    }

    /// Leaves are split before they are written.
    pub(super) fn split(&self, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        let slot = dice.pick(&self.slots);
        let _few = gather.top_up(1 + dice.below(2) as u8);
        let split = gather.split_range(slot.guest);
        self.machine.check(split.is_ok(), || format!("a split: {split:?}"));
        self.put_off(gather);
    }

    /// Blocks are put in the place of tables, from the one of `page` on.
    pub(super) fn collapse(&self, page: usize, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        for page in (0..self.pages.len()).skip(page).take(1 << dice.below(4)) {
            let read = Fault::new(Ipa::new(self.at(page)), Access::Read);
            let Ok(request) = self.guest.request(&read) else {
                continue;
            };
            let Some(backing) = self.look_up(request.host()) else {
                continue;
            };
            if dice.once_in(2) {
                self.pause(dice, 8);
            }
            let _recovered = gather.collapse(&request, &backing);
        }
        self.put_off(gather);
    }

    pub(super) fn age(&self, page: usize, gather: &mut Edits<'_, 'a, 'm, F>) {
        let slot = &self.slots[self.pages[page].slot];
        let aged = gather.age(slot.guest, |_| ());
        self.machine.check(aged.is_ok(), || format!("{aged:?}"));
        self.put_off(gather);
    }

    // ---- Zaps, and what is gathered ----

    /// A leaf has gone that hardware may have marked.
    pub(super) fn report(&self, leaf: &Leaf<F>) {
        let by_hardware = self.plan.get().is_some_and(|plan| plan.log() == Log::ByHardware);
        if !by_hardware || !leaf.attrs().dirty || self.is(Bug::FlagOfLeafIgnored) {
            return;
        }
        for (slot, record) in self.slots.iter().zip(&self.records) {
            let start = slot.guest.start().get();
            let (from, to) = (leaf.input().get(), leaf.input().get() + leaf.size());
            let page = |at: u64| at.saturating_sub(start) / self.page;
            record.bitmap.mark_range(page(from)..page(to));
        }
    }

    pub(super) fn put_off(&self, gather: &mut Edits<'_, 'a, 'm, F>) {
        self.later.push(gather.issue().complete());
        self.reclaim_one();
    }

    pub(super) fn reclaim_one(&self) {
        self.later.reclaim_one(|leaf| self.report(&leaf));
    }

    pub(super) fn unmap<'g>(
        &'g self,
        mut zap: Zap<'g, 'a, F, Mapper<'m>>,
        dice: &Dice,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        loop {
            let mut held = Vec::new();
            let pass = zap.unmap(gather, |leaf| {
                held.push(leaf);
                ControlFlow::Continue(())
            });
            match pass {
                Ok(Pass::Went) => {}
                Ok(Pass::Waiting) => {
                    self.wait();
                    continue;
                }
                Ok(Pass::Over) => return,
                Err(error) => return self.machine.report(Rule::Program, error.to_string()),
            }
            let issued = gather.issue();
            if dice.once_in(4) {
                self.pause(dice, 4);
            }
            let deferred = issued.complete();
            for leaf in held {
                match deferred.release(leaf) {
                    Ok(leaf) => self.report(&leaf),
                    Err(_) => self.machine.report(
                        Rule::Program,
                        "a leaf is not that of the gather it came with".to_owned(),
                    ),
                }
            }
            self.later.push(deferred);
            self.reclaim_one();
        }
    }

    pub(super) fn protect<'g>(
        &'g self,
        mut zap: Zap<'g, 'a, F, Mapper<'m>>,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        loop {
            let pass = zap.protect(gather, Change::new().write_protect());
            self.put_off(gather);
            match pass {
                Ok(Pass::Waiting) => self.wait(),
                Ok(Pass::Went) => {}
                Ok(Pass::Over) => return,
                Err(error) => return self.machine.report(Rule::Program, error.to_string()),
            }
        }
    }

    /// In one step.
    pub(super) fn protect_all(&self) {
        match self.guest.space().protect_all() {
            Ok(start) => start.drive(|| self.wait()),
            Err(error) => self.machine.report(Rule::Program, error.to_string()),
        }
    }

    // ---- The migration ----

    pub(super) fn migrate<'g>(&'g self, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let hardware = self.machine.architecture().hardware_dirty;
        let mut plan = Plan::of(dice, hardware, !self.logs.is_empty());
        if self.is(Bug::RingStartsMarked) && plan.marks == Marks::Ring {
            plan.start = Start::Marked;
        }
        self.start(plan, gather);
        if plan.start == Start::Marked && plan.marks != Marks::Ring {
            self.pages.iter().for_each(|page| page.stale.set(true));
        } else {
            (0..self.pages.len()).for_each(|page| {
                self.copy(page);
                self.pause(dice, 4);
            });
        }
        let rounds = dice.below(4);
        for _ in 0..rounds {
            if dice.once_in(3) {
                self.during(|| self.split(dice, gather));
            }
            self.pause(dice, 20);
            self.round(plan, dice, gather);
        }
        // Some are given up.
        if dice.below(5) > 0 {
            self.finish(plan, dice, gather);
        }
        self.end(dice, gather);
        self.stop.set(false);
    }

    pub(super) fn start<'g>(&'g self, plan: Plan, gather: &mut Edits<'g, 'a, 'm, F>) {
        // A CPU that sees the slot logged sees where to mark.
        self.plan.set(Some(plan));
        if plan.start == Start::Marked {
            for record in &self.records {
                match plan.marks {
                    Marks::Bitmap => record.bitmap.mark_all(),
                    Marks::Flip => record.flip.current().mark_all(),
                    Marks::Ring => {}
                }
            }
        }
        for slot in &self.slots {
            let zap = match self.replace(slot.with_log(plan.log())) {
                Some(zap) => zap,
                None => return,
            };
            if plan.start == Start::Zap && !self.is(Bug::StartNotZapped) {
                self.protect(zap, gather);
            }
        }
        match plan.start {
            Start::Zap => {}
            Start::Step => self.protect_all(),
            // A CPU that has looked the slot up before, when nothing was logged, may be mapping.
            Start::Marked | Start::Hardware | Start::Modification
                if !self.is(Bug::StartNotAwaited) =>
            {
                self.wait_for_walks();
            }
            Start::Marked | Start::Hardware | Start::Modification => {}
        }
        if plan.start == Start::Modification && !self.is(Bug::StartNotCleaned) {
            self.begin(plan, gather);
        }
    }

    /// Hardware logs the next write to each page.
    fn begin(&self, plan: Plan, gather: &mut Edits<'_, 'a, 'm, F>) {
        for slot in &self.slots {
            let slot = slot.with_log(plan.log());
            loop {
                let begun = gather.begin_modification_log(&slot);
                self.put_off(gather);
                match begun {
                    Ok(begun) if begun.passed_over => self.wait(),
                    Ok(_) => break,
                    Err(error) => return self.machine.report(Rule::Program, error.to_string()),
                }
            }
        }
    }

    pub(super) fn wait_for_walks(&self) {
        let period = self.guest.space().grace_period();
        while !self.guest.space().is_over(period) {
            self.wait();
        }
    }

    pub(super) fn replace(&self, slot: Slot) -> Option<Zap<'_, 'a, F, Mapper<'m>>> {
        match self.guest.replace(slot) {
            Ok(zap) => Some(zap),
            Err(error) => {
                self.machine.report(Rule::Program, error.to_string());
                None
            }
        }
    }

    /// Returns the pages that a harvest which begins now has to find.
    pub(super) fn must(&self, plan: Plan) -> (Vec<usize>, u64) {
        self.cpu().order();
        let must = (0..self.pages.len()).filter(|&page| {
            let pending = || self.pending.iter().any(|at| at.get() == Some(page));
            self.pages[page].stale.get() && !pending() && !self.is_logged(page)
        });
        let unused = self.active.get() == 0 && self.later.is_empty();
        // Where hardware marks in leaves, those that are being edited are out of reach.
        let must = match plan.log() {
            Log::ByHardware if !unused => Vec::new(),
            _ => must.collect(),
        };
        (must, self.begun.get())
    }

    pub(super) fn check_found(
        &self,
        plan: Plan,
        (must, begun): (Vec<usize>, u64),
        found: &BTreeSet<usize>,
    ) {
        self.cpu().order();
        if plan.log() == Log::ByHardware && self.begun.get() != begun {
            return;
        }
        for number in must {
            let page = &self.pages[number];
            let record = &self.records[page.slot];
            let marked = match plan.marks {
                Marks::Flip => record.flip.current().is_marked(page.index),
                _ => record.bitmap.is_marked(page.index),
            };
            self.machine.check(marked || found.contains(&number), || {
                let (slot, index) = (page.slot, page.index);
                format!(
                    "page {index} of slot {slot} was written, and no harvest finds it ({plan:?})"
                )
            });
        }
    }
}
