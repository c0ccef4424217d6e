//! The guest's acts: accesses, judged by what was mapped while they were made, and faults that are
//! served.

use super::*;

impl<'a, 'm, F: Format<Input = Ipa>> Vm<'a, 'm, F> {
    /// An address that the guest uses, and the page of the host behind it if it is one of those
    /// that move.
    pub(super) fn spot(&self, dice: &Dice) -> (u64, Option<usize>) {
        let id = dice.pick(&[0, 0, 0, 0, 1, 1, 2, 3]);
        let known = self.known(id).filter(|_| !dice.once_in(8));
        let slot = known.unwrap_or_else(|| self.slot(id, dice));
        let (page, block) = (self.host.page, self.host.block);
        let inside = match id {
            0 => self.host.at(dice.below(PAGES as u64) as usize),
            1 => dice.below(6) * page,
            2 => dice.below(2) * block + dice.pick(&[0, 1, 5]) * page,
            _ => dice.below(2) * block + dice.below(3) * page,
        };
        let at = slot.guest.start().get() + inside;
        (at, self.host.page_at(slot.host + inside))
    }

    /// Whether slot 1 may show the page of code at an address, now or after a change.
    pub(super) fn may_be_code(&self, at: u64) -> bool {
        let number = (at & ((1 << 33) - 1)) / self.host.page;
        BEHIND.iter().any(|first| first + number == CODE as u64)
    }

    pub(super) fn step(&self, cpu: Cpu<'_>, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        let (at, page) = self.spot(dice);
        let va = at + 8 * cpu.id() as u64;
        let request = dice.pick(&[Request::read(va), Request::write(va), Request::execute(va)]);
        // What it fetches it must not have written. Behind slot 1 there may be other pages when the
        // access is made.
        let steady = at >> 33 < Self::place(1, 0) >> 33;
        let (fetches, writes) = match page {
            Some(CODE) => (steady, false),
            Some(_) => (false, steady || !self.may_be_code(at)),
            None => (false, true),
        };
        let deed = match dice.below(8) {
            0..=2 => Deed::Read,
            3..=5 if writes => Deed::Write(dice.below(1 << 60) + 1),
            _ => match request.want {
                Want::Execute if !fetches => Deed::Touch(Request::read(va)),
                Want::Write if !writes => Deed::Touch(Request::read(va)),
                _ => Deed::Touch(request),
            },
        };
        self.access(va, &deed, dice, gather);
    }

    /// One access, until it succeeds or the guest is told that there is nothing. Whether it has
    /// succeeded.
    pub(super) fn access(
        &self,
        va: u64,
        deed: &Deed,
        dice: &Dice,
        gather: &mut Edits<'_, 'a, 'm, F>,
    ) -> bool {
        let machine = self.machine;
        for _ in 0..1000 {
            self.cpu().order();
            let before = self.seen(va);
            let (result, want) = match *deed {
                Deed::Read => (machine.read(va).map(Some), Want::Read),
                Deed::Write(value) => (machine.write(va, value).map(|()| None), Want::Write),
                Deed::Touch(request) => (machine.access(request).map(Some), request.want),
            };
            let fault = match result {
                Ok(got) => {
                    self.judge(va, want, deed, got, &before);
                    return true;
                }
                Err(fault) => fault,
            };
            self.cpu().spend(machine.costs().exception);
            machine.dsb_stores();
            match self.serve(va, want, fault, dice, gather) {
                Served::Again => {}
                Served::Later if self.calm.get() => {}
                // Out of memory, perhaps.
                Served::Later if dice.once_in(8) => return false,
                Served::Later => self.cpu().spend(Time::ns(500)),
                Served::Declined => {
                    let after = self.seen(va);
                    let should = before.version == after.version
                        && before.slots.iter().any(|&(slot, phase)| {
                            phase == Phase::Steady && slot.perms.contains(perm(want))
                        });
                    machine.check(!should, || {
                        format!("{want:?} of {va:#x} is declined, and there is a slot")
                    });
                    return false;
                }
            }
        }
        machine.report(Rule::NoProgress, format!("an access to {va:#x} faults for ever"));
        false
    }

    /// Returns what is known about an address at this time.
    pub(super) fn seen(&self, va: u64) -> Seen {
        let at = Ipa::new(va);
        let slots = self.slots.borrow();
        let slots: Vec<_> =
            slots.iter().filter(|(slot, _)| slot.guest.contains(at)).copied().collect();
        let backed = slots
            .iter()
            .map(|(slot, _)| slot.host + (va - slot.guest.start().get()))
            .collect::<Vec<_>>();
        let version = self.version.get();
        let pages = self.host.pages.borrow();
        let mut frames = Vec::new();
        let mut versions = 0;
        let mut behind = Vec::new();
        for at in backed {
            if at >= FIXED {
                let page = (FAR + (at - FIXED)) & !(self.host.page - 1);
                frames.push((Pa::new(page), true));
            } else if let Some(number) = self.host.page_at(at & !(self.host.page - 1)) {
                let it = &pages[number];
                versions += u64::from(it.version);
                frames.extend(&it.before);
                if let Now::Here { frame, writable } = it.now {
                    frames.push((frame, writable));
                }
                behind.push(number);
            }
        }
        let log = slots
            .iter()
            .find(|(slot, phase)| slot.log.is_on() && *phase == Phase::Steady)
            .map(|(slot, _)| (slot.id, self.logs.borrow()[usize::from(slot.id)].round))
            .filter(|&(id, _)| self.logs.borrow()[usize::from(id)].steady);
        Seen { version, slots, frames, versions, pages: behind, log }
    }

    /// An access has succeeded.
    pub(super) fn judge(&self, va: u64, want: Want, deed: &Deed, got: Option<u64>, before: &Seen) {
        let machine = self.machine;
        let after = self.seen(va);
        let same = before.version == after.version && before.pages == after.pages;
        let steady = same && before.versions == after.versions;
        let mut pages = self.host.pages.borrow_mut();
        // One slot, so that there is no doubt which page it is.
        let sure = same && after.slots.len() == 1;
        // Where a copy takes the place of a page, another address may still lead to the page.
        let one = |seen: &Seen| seen.frames.len() == 1;
        let simulated =
            |seen: &Seen| seen.frames.iter().all(|&(frame, _)| self.host.is_simulated(frame));
        let mine = (va % self.host.page / 8) as usize;
        if want == Want::Write && sure {
            after.pages.iter().for_each(|&page| pages[page].written = true);
        }
        if let Deed::Write(value) = *deed {
            let known = sure && simulated(before) && simulated(&after);
            for (number, page) in pages.iter_mut().enumerate() {
                if !sure || after.pages.contains(&number) {
                    page.words.insert(mine, known.then_some(value));
                }
            }
        }
        if want == Want::Write
            && before.log == after.log
            && let Some((id, _)) = after.log
            && before.version == after.version
        {
            let page = va & !(self.host.page - 1);
            self.logs.borrow_mut()[usize::from(id)].written.insert(page);
        }
        if !steady {
            return;
        }
        machine.check(after.slots.iter().any(|(slot, _)| slot.perms.contains(perm(want))), || {
            format!("{want:?} of {va:#x} succeeds, and no slot allows it")
        });
        machine.check(
            want != Want::Write || after.frames.iter().any(|&(_, writable)| writable),
            || format!("a write to {va:#x} succeeds, and its page is shared"),
        );
        match (deed, got) {
            (Deed::Touch(_), Some(pa)) => {
                let is = |&(frame, _): &(Pa, bool)| frame.get() == pa & !(self.host.page - 1);
                machine.check(after.frames.iter().any(is), || {
                    format!("{va:#x} leads to {pa:#x}, which does not back it: {:x?}", after.frames)
                });
            }
            (Deed::Read, Some(value))
                if sure && one(before) && one(&after) && simulated(&after) =>
            {
                for &number in &after.pages {
                    let written = pages[number].words.get(&mine).copied().unwrap_or(Some(0));
                    machine.check(written.is_none_or(|written| written == value), || {
                        format!("{va:#x} holds {value:#x} where {written:x?} was written")
                    });
                }
            }
            _ => {}
        }
    }

    /// The handler of a fault.
    pub(super) fn serve(
        &self,
        va: u64,
        want: Want,
        trap: Trap,
        dice: &Dice,
        gather: &mut Edits<'_, 'a, 'm, F>,
    ) -> Served {
        let Some(fault) = classify(va, want, trap, dice) else {
            return Served::Again;
        };
        if fault.cause == Cause::AccessFlag {
            let _touched = self.guest.set_accessed(&fault);
            return Served::Again;
        }
        let served = self.serve_with(&fault, dice, gather);
        self.put_off(gather);
        served
    }

    pub(super) fn serve_with(
        &self,
        fault: &Fault,
        dice: &Dice,
        gather: &mut Edits<'_, 'a, 'm, F>,
    ) -> Served {
        for _ in 0..3 {
            let request = match self.guest.request(fault) {
                Ok(request) => request,
                Err(Declined::Busy) => return Served::Later,
                Err(_) => return Served::Declined,
            };
            if dice.once_in(2) {
                if dice.once_in(4) {
                    self.cpu().spend(dice.time());
                }
                let walk = request.slot().log.is_on().then(|| self.mapper.enter());
                let reopened = self.guest.reopen(&request);
                if reopened == Ok(true) && request.is_logged_write() {
                    self.mark(&request.slot(), fault);
                }
                drop(walk);
                match reopened {
                    Ok(true) => return Served::Again,
                    Ok(false) | Err(Refused::Retry) => {}
                    Err(Refused::Busy(_)) => return Served::Later,
                    Err(other) => self.machine.report(Rule::Program, other.to_string()),
                }
            }
            if dice.below(4) > 0 && !gather.top_up(request.tables()) {
                return Served::Later;
            }
            let Some(page) = self.host.look_up(request.host(), fault.access) else {
                return Served::Later;
            };
            if dice.once_in(4) {
                self.cpu().spend(dice.time());
            }
            for _ in 0..3 {
                // What is mapped is marked before a zap can go on.
                let walk = request.slot().log.is_on().then(|| self.mapper.enter());
                let mapped = gather.map(&request, &page);
                if mapped.is_ok() && request.is_logged_write() {
                    self.mark(&request.slot(), fault);
                }
                drop(walk);
                match mapped {
                    Ok(Mapped::Replaced(old)) => {
                        self.host.report(&old);
                        return Served::Again;
                    }
                    Ok(_) => return Served::Again,
                    Err(Refused::Busy(_)) => return Served::Later,
                    Err(Refused::Retry | Refused::Denied) => break,
                    Err(Refused::NeedsTables(count)) => {
                        if !gather.top_up(count) {
                            return Served::Later;
                        }
                    }
                    Err(other) => {
                        self.machine.report(Rule::Program, other.to_string());
                        return Served::Later;
                    }
                }
            }
        }
        Served::Later
    }

    /// The handler of a fault marks the page in the log.
    pub(super) fn mark(&self, slot: &Slot, fault: &Fault) {
        let marked = fault.at.get() & !(self.host.page - 1);
        let log = &mut self.logs.borrow_mut()[usize::from(slot.id)];
        log.marks.insert(marked);
    }

    // ---- The end ----

    /// Every page of every slot is there, and holds what it should.
    pub(super) fn check_all(&self, dice: &Dice) {
        for id in 0..SLOTS {
            if self.known(id).is_none() {
                self.insert(id, dice);
            }
        }
        let mut gather = self.guest.gather();
        self.mapper.load();
        for id in 0..SLOTS {
            let Some(slot) = self.known(id) else {
                self.machine.report(Rule::Program, format!("slot {id} is lost"));
                continue;
            };
            let (page, block) = (self.host.page, self.host.block);
            let spots: Vec<u64> = match id {
                0 => (0..PAGES).map(|number| self.host.at(number)).collect(),
                1 => (0..6).map(|number| number * page).collect(),
                _ => vec![0, page, block, block + 5 * page],
            };
            for inside in spots {
                let va = slot.guest.start().get() + inside + 8 * self.cpu().id() as u64;
                let mut good = self.access(va, &Deed::Read, dice, &mut gather);
                if slot.perms.contains(Perms::WRITE)
                    && self.host.page_at(slot.host + inside) != Some(CODE)
                {
                    good &= self.access(va, &Deed::Write(1), dice, &mut gather);
                    good &= self.access(va, &Deed::Read, dice, &mut gather);
                }
                self.machine.check(good, || format!("{va:#x} is lost"));
            }
            if slot.log.is_on() {
                self.collect(slot, dice, &mut gather);
            }
        }
    }
}
