//! The host's acts on a guest: slots, reclaim, sharing, moving, splitting.

use super::*;

impl<'a, 'm, F: Format<Input = Ipa>> Vm<'a, 'm, F> {
    pub(super) fn insert(&self, id: u16, dice: &Dice) {
        let slot = self.slot(id, dice);
        self.say(slot, Phase::Coming);
        match self.guest.insert(slot) {
            Ok(()) => self.say(slot, Phase::Steady),
            Err(_) => self.forget(slot),
        }
    }

    /// Puts another slot in the place of one. What it gives back is to be zapped, and then
    /// forgotten.
    pub(super) fn replace(&self, old: Slot, new: Slot) -> Option<Zap<'_, 'a, F, Mapper<'m>>> {
        if new == old {
            return None;
        }
        self.say(old, Phase::Going);
        self.say(new, Phase::Coming);
        let replaced = self.guest.replace(new).ok();
        if replaced.is_some() {
            self.say(new, Phase::Steady);
        } else {
            self.forget(new);
            self.say(old, Phase::Steady);
        }
        replaced
    }

    pub(super) fn change_slot<'g>(
        &'g self,
        id: u16,
        dice: &Dice,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        let changing = &self.changing[usize::from(id)];
        if changing.replace(true) {
            return;
        }
        match self.known(id) {
            None => self.insert(id, dice),
            Some(slot) => self.change_known(slot, dice, gather),
        }
        changing.set(false);
    }

    pub(super) fn change_known<'g>(
        &'g self,
        slot: Slot,
        dice: &Dice,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        let log = usize::from(slot.id);
        match dice.below(8) {
            0 | 1 if slot.log.is_on() => {
                self.collect(slot, dice, gather);
                self.logs.borrow_mut()[log].steady = false;
                if let Some(_unchanged) = self.replace(slot, slot.with_log(Log::Off)) {
                    self.forget(slot);
                    if dice.once_in(2) {
                        let _still_logged = self.guest.protect_no_more();
                    }
                }
            }
            0..=2 if slot.log.is_on() => self.collect(slot, dice, gather),
            0..=2 => {
                if let Some(zap) = self.replace(slot, slot.with_log(Log::ByFault)) {
                    if dice.once_in(3) || !self.protect_all() {
                        self.protect(zap, gather);
                    }
                    self.forget(slot);
                    let mut logs = self.logs.borrow_mut();
                    logs[log].steady = true;
                    logs[log].round += 1;
                }
            }
            3 => {
                // Read-only, or not any more.
                let write = slot.perms.contains(Perms::WRITE);
                let perms = slot.perms ^ Perms::WRITE;
                if let Some(zap) = self.replace(slot, slot.with_perms(perms)) {
                    if write {
                        self.protect(zap, gather);
                    }
                    self.forget(slot);
                }
            }
            4 | 5 => {
                let place = Self::place(slot.id, dice.below(PLACES));
                let moved = Slot { guest: span(place, slot.guest.size()), ..slot };
                if let Some(zap) = self.replace(slot, moved) {
                    self.unmap(zap, dice, gather);
                    self.forget(slot);
                }
            }
            6 if slot.id == 1 => {
                // Other memory behind the same addresses.
                let host = dice.pick(&BEHIND) * self.host.page;
                if let Some(zap) = self.replace(slot, Slot { host, ..slot }) {
                    self.unmap(zap, dice, gather);
                    self.forget(slot);
                }
            }
            _ => {
                self.logs.borrow_mut()[log].steady = false;
                self.say(slot, Phase::Going);
                match self.guest.remove(slot.id) {
                    Ok(zap) => {
                        self.unmap(zap, dice, gather);
                        self.forget(slot);
                    }
                    Err(_) => {
                        self.say(slot, Phase::Steady);
                        self.logs.borrow_mut()[log].round += 1;
                        self.logs.borrow_mut()[log].steady = slot.log.is_on();
                    }
                }
            }
        }
    }

    /// The log of a slot is read: what was marked is written back, and faults again.
    pub(super) fn collect<'g>(
        &'g self,
        slot: Slot,
        dice: &Dice,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        let (mut marks, written) = {
            let log = &mut self.logs.borrow_mut()[usize::from(slot.id)];
            log.steady = false;
            (std::mem::take(&mut log.marks), std::mem::take(&mut log.written))
        };
        match dice.below(3) {
            0 if self.protect_all() => {}
            1 if self.protect_pages(slot, gather) => {}
            _ => self.protect(self.guest.zap(slot.guest), gather),
        }
        let log = &mut self.logs.borrow_mut()[usize::from(slot.id)];
        // A CPU that was at it when the marks were taken has marked by now.
        marks.extend(&log.marks);
        for page in written.difference(&marks) {
            self.machine.report(
                Rule::Program,
                format!("{page:#x} was written, and no fault has marked it in the log"),
            );
        }
        log.steady = true;
        log.round += 1;
    }

    // ---- Zaps ----

    pub(super) fn wait(&self) {
        self.cpu().spend(Time::ns(150));
    }

    /// In one step, if that can be.
    pub(super) fn protect_all(&self) -> bool {
        let started = self.guest.space().protect_all();
        started.map(|start| start.drive(|| self.wait())).is_ok()
    }

    /// For the log only, page by page: whether all were.
    pub(super) fn protect_pages(&self, slot: Slot, gather: &mut Edits<'_, 'a, 'm, F>) -> bool {
        let pages = slot.guest.size() / self.host.page;
        let protected = gather.protect(&slot, 0..pages);
        let period = self.guest.space().grace_period();
        self.put_off(gather);
        // A CPU that has made a page writable before that marks it in its walk.
        while !self.guest.space().is_over(period) {
            self.wait();
        }
        protected.is_ok_and(|protected| !protected.passed_over)
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

    pub(super) fn unmap<'g>(
        &'g self,
        mut zap: Zap<'g, 'a, F, Mapper<'m>>,
        dice: &Dice,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        let most = dice.pick(&[1, 3, 1000]);
        loop {
            let mut held = Vec::new();
            self.open.update(|open| open + 1);
            let pass = zap.unmap(gather, |leaf| {
                held.push(leaf);
                if held.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            if pass != Ok(Pass::Went) {
                self.open.update(|open| open - 1);
                match pass {
                    Ok(Pass::Over) => return,
                    Err(error) => return self.machine.report(Rule::Program, error.to_string()),
                    _ => self.wait(),
                }
                continue;
            }
            let issued = gather.issue();
            if dice.once_in(4) {
                self.cpu().spend(dice.time());
            }
            let deferred = issued.complete();
            for leaf in held {
                match deferred.release(leaf) {
                    Ok(leaf) => self.host.report(&leaf),
                    Err(_) => self.machine.report(
                        Rule::Program,
                        "a leaf is not that of the gather it came with".to_owned(),
                    ),
                }
            }
            self.keep(deferred);
        }
    }

    /// All that is mapped of some of the host's memory is zapped.
    pub(super) fn zap_host<'g>(
        &'g self,
        first: u64,
        size: u64,
        mut zap: impl FnMut(Zap<'g, 'a, F, Mapper<'m>>),
    ) {
        let slots: Vec<_> = self.slots.borrow().iter().map(|&(slot, _)| slot).collect();
        for slot in slots {
            let end = slot.host.saturating_add(slot.guest.size());
            let (from, to) = (first.max(slot.host), (first + size).min(end));
            if from < to {
                let at = slot.guest.start().get() + (from - slot.host);
                zap(self.guest.zap(span(at, to - from)));
            }
        }
    }

    /// Reclaims a complete gather when no walk holds its tables.
    pub(super) fn keep(&self, deferred: DeferredReclaim<F, Mapper<'m>>) {
        self.later.push(deferred);
        self.reclaim_some();
    }

    pub(super) fn put_off(&self, gather: &mut Edits<'_, 'a, 'm, F>) {
        self.open.update(|open| open + 1);
        self.keep(gather.issue().complete());
    }

    pub(super) fn reclaim_some(&self) {
        if self.later.reclaim_one(|leaf| self.host.report(&leaf)) {
            self.open.update(|open| open - 1);
        }
    }

    // ---- What the host does ----

    pub(super) fn manage<'g>(&'g self, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let page = dice.below(PAGES as u64) as usize;
        match dice.below(24) {
            0..=5 => self.reclaim(page, dice, gather),
            6 | 7 => self.share(page, dice, gather),
            8..=11 => self.change_slot(dice.below(SLOTS.into()) as u16, dice, gather),
            12 => self.unmap(self.guest.zap_all(), dice, gather),
            13..=17 => self.change_block(dice, gather),
            18 => self.age(dice, gather),
            19..=21 => self.split(dice, gather),
            22 => self.collapse(dice, gather),
            _ if dice.once_in(2) => self.prune(),
            _ => self.reclaim_some(),
        }
    }

    /// A page is taken from under the guest.
    pub(super) fn reclaim<'g>(
        &'g self,
        number: usize,
        dice: &Dice,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        let host = &self.host;
        let Some(frame) = host.lock(number) else {
            return;
        };
        host.change(number, Now::Moving);
        self.zap_host(host.at(number), host.page, |zap| {
            self.unmap(zap, dice, gather);
        });
        self.check_gone(number, frame);
        self.check_dirty(number, self.open.get() == 0);
        host.forget_past(number);
        let is_zero = host.pages.borrow()[number].words.is_empty();
        let away = if is_zero || !host.is_simulated(frame) {
            host.pages.borrow_mut()[number].words.clear();
            Some(Now::Empty)
        } else {
            self.machine.take_page().map(|to| {
                host.copy(frame, to);
                Now::Away(to)
            })
        };
        let new = away.unwrap_or(Now::Here { frame, writable: true });
        host.change(number, new);
        host.unlock(number);
        if away.is_some() {
            host.give(frame);
        }
    }

    /// A zap is over that took a page away: no entry leads there.
    pub(super) fn check_gone(&self, number: usize, frame: Pa) {
        let at = self.host.at(number);
        for &(slot, _) in self.slots.borrow().iter() {
            let va = at.wrapping_sub(slot.host).wrapping_add(slot.guest.start().get());
            let behind = slot.guest.contains(Ipa::new(va));
            self.machine.check(!behind || self.mapper.lookup(va) != Some(frame), || {
                format!("{va:#x} leads to {frame}, which was taken away")
            });
        }
    }

    /// No CPU reaches a page any more: if it was written, a leaf has said so.
    pub(super) fn check_dirty(&self, number: usize, all_seen: bool) {
        let page = &mut self.host.pages.borrow_mut()[number];
        if all_seen && page.written && !page.reported {
            self.machine.report(
                Rule::FlagLost,
                format!("page {number} of the host was written, and no leaf has said so"),
            );
        }
        (page.written, page.reported) = (false, false);
        page.past.clear();
    }

    /// A page becomes read-only, as one that is shared with others, and after a while is copied to
    /// be written again.
    pub(super) fn share<'g>(
        &'g self,
        number: usize,
        dice: &Dice,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        let host = &self.host;
        let Some(frame) = host.lock(number) else {
            return;
        };
        let here = |frame, writable| Now::Here { frame, writable };
        host.change(number, here(frame, false));
        self.zap_host(host.at(number), host.page, |zap| {
            self.protect(zap, gather);
        });
        host.forget_past(number);
        self.cpu().spend(dice.time() * 8);
        let copy = host.is_simulated(frame).then(|| self.machine.take_page()).flatten();
        if let Some(copy) = copy {
            host.copy(frame, copy);
        }
        host.change(number, here(copy.unwrap_or(frame), true));
        if copy.is_some() {
            // Faults of others may put the copy in the place of the page, or not.
            self.zap_host(host.at(number), host.page, |zap| {
                self.cpu().spend(dice.time() * dice.below(8));
                self.unmap(zap, dice, gather);
            });
        }
        host.forget_past(number);
        host.unlock(number);
        if copy.is_some() {
            host.give(frame);
        }
    }

    /// The host finds a block for the second part of its memory, moves it, or puts it together.
    pub(super) fn change_block<'g>(&'g self, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let host = &self.host;
        if host.busy.get() || !(SMALL..PAGES).all(|page| host.is_steady(page)) {
            return;
        }
        host.busy.set(true);
        let in_place = |base: Pa| {
            let pages = host.pages.borrow();
            (SMALL..PAGES).all(|number| {
                let frame = Pa::new(base.get() + host.inside(number - SMALL));
                let writable = true;
                pages[number].now == (Now::Here { frame, writable })
            })
        };
        match host.second.get() {
            Block::Parts(base) if host.lost.borrow().is_empty() && in_place(base) => {
                host.second.set(Block::Whole(base));
            }
            Block::Whole(base) if dice.once_in(2) => host.second.set(Block::Parts(base)),
            old => {
                if let Some(base) = host.take_block() {
                    self.move_to(base, old, dice, gather);
                }
            }
        }
        host.busy.set(false);
    }

    pub(super) fn move_to<'g>(
        &'g self,
        base: Pa,
        old: Block,
        dice: &Dice,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        let host = &self.host;
        let (first, size) = (host.block, host.block);
        // All its pages go at once, or are protected, copied, and replaced.
        let at_once = dice.once_in(2);
        let before: Vec<_> = (SMALL..PAGES).map(|number| host.pages.borrow()[number].now).collect();
        let here = |number: usize, writable| Now::Here {
            frame: Pa::new(base.get() + host.inside(number - SMALL)),
            writable,
        };
        for (number, &now) in (SMALL..PAGES).zip(&before) {
            let next = match now {
                Now::Here { frame, .. } if !at_once => Now::Here { frame, writable: false },
                _ => Now::Moving,
            };
            host.change(number, next);
        }
        if let Block::Whole(base) = old {
            host.second.set(Block::Parts(base));
        }
        if at_once {
            self.zap_host(first, size, |zap| self.unmap(zap, dice, gather));
        } else {
            self.zap_host(first, size, |zap| self.protect(zap, gather));
        }
        (SMALL..PAGES).for_each(|number| host.forget_past(number));
        for (number, &now) in (SMALL..PAGES).zip(&before) {
            let Now::Here { frame: to, .. } = here(number, true) else {
                continue;
            };
            if let Now::Here { frame, .. } | Now::Away(frame) = now {
                host.copy(frame, to);
                if !host.is_simulated(frame) || !host.is_simulated(to) {
                    host.pages.borrow_mut()[number].words.clear();
                }
            }
            if host.is_simulated(to) {
                self.machine.write_page(to);
            }
        }
        host.second.set(Block::Whole(base));
        (SMALL..PAGES).for_each(|number| host.change(number, here(number, true)));
        if !at_once {
            self.zap_host(first, size, |zap| {
                self.cpu().spend(dice.time() * dice.below(8));
                self.unmap(zap, dice, gather);
            });
        }
        (SMALL..PAGES).for_each(|number| host.forget_past(number));
        // What was there goes.
        for now in before {
            match now {
                Now::Here { frame, .. } | Now::Away(frame)
                    if host.is_simulated(frame) && !host.is_part(frame, old) =>
                {
                    self.machine.give_page(frame);
                }
                _ => {}
            }
        }
        if let Block::Whole(base) | Block::Parts(base) = old {
            host.give_block(base);
        }
    }

    /// Which pages are used?
    pub(super) fn age(&self, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        let slot = self.known(dice.below(SLOTS.into()) as u16);
        if let Some(slot) = slot {
            let aged = gather.age(slot.guest, |_| ());
            self.machine.check(aged.is_ok(), || format!("{aged:?}"));
            self.put_off(gather);
        }
    }

    /// A leaf is taken apart unasked; perhaps one that was not used for a while.
    pub(super) fn split(&self, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        let (mut at, _) = self.spot(dice);
        let block = self.host.block;
        if let (true, Some(slot)) = (dice.once_in(2), self.known(0)) {
            at = slot.guest.start().get() + block;
        }
        let level = Level::new(dice.below(2) as u8);
        gather.top_up(1);
        if dice.once_in(2) {
            let aged = gather.age(span(at & !(block - 1), block), |_| ());
            self.machine.check(aged.is_ok(), || format!("{aged:?}"));
        }
        let _split = gather.split(Ipa::new(at), level);
        // Others may be split with it, before it is forgotten.
        self.cpu().spend(dice.time() * dice.below(8));
        self.put_off(gather);
    }

    /// A block, in the place of a table, before a fault.
    pub(super) fn collapse(&self, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        let (mut at, _) = self.spot(dice);
        if let (true, Some(slot)) = (dice.once_in(2), self.known(0)) {
            at = slot.guest.start().get() + self.host.block;
        }
        let Ok(request) = self.guest.request(&Fault::new(Ipa::new(at), Access::Read)) else {
            return;
        };
        let Some(page) = self.host.look_up(request.host(), Access::Read) else {
            return;
        };
        if dice.once_in(2) {
            self.cpu().spend(dice.time());
        }
        self.open.update(|open| open + 1);
        let _recovered = gather.collapse(&request, &page);
        // Others edit the block before the table is forgotten.
        self.cpu().spend(dice.time() * dice.below(8));
        self.keep(gather.issue().complete());
    }

    /// Tables that map nothing are freed. What others map meanwhile is not in them.
    pub(super) fn prune(&self) {
        let mut gather = self.guest.gather();
        let pruned = gather.prune(span(0, 1 << F::INPUT_BITS));
        self.machine
            .check(pruned.is_ok_and(|progress| progress.is_done()), || format!("{pruned:?}"));
        let mut deferred = gather.issue().complete();
        loop {
            deferred = match deferred.try_complete() {
                Ok(completed) => {
                    return completed.finish(|leaf| {
                        let at = leaf.input();
                        self.machine.report(Rule::Program, format!("{at} was mapped, and is gone"));
                    });
                }
                Err(deferred) => deferred,
            };
            self.wait();
        }
    }

    // ---- What the guest does ----
}
