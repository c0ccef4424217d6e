//! The log: how it is started, harvested, and what is protected when.

use std::ops::Range;

use tablewright::guest::{Gather, Harvest, Log, Slot};
use tablewright::{Format, Ipa, Span};
#[cfg(test)]
use tablewright_machine::Time;
use tablewright_machine::{Cpu, MachineHeld, Mapper};

use super::host::Sending;
use super::image::CLOSING;
use super::job::{FLUSH, Logging, PAUSE, Ran};
#[cfg(test)]
use super::job::{ON_LINK, Order};
use super::state::Migration;

impl<'t, 'm, F: Format<Input = Ipa>> Migration<'t, 'm, F> {
    fn logged(&self) -> Slot {
        self.slot.with_log(Log::ByFault)
    }

    /// Words of the bitmap.
    pub(super) fn words(&self) -> usize {
        self.bitmap.pages().div_ceil(64) as usize
    }

    /// From when it returns on, nothing is written that is not marked.
    pub(super) fn start_log(&self, cpu: Cpu<'_>) -> Result<(), String> {
        let slot = self.logged();
        if self.job.logging == Logging::AllSet {
            self.bitmap.mark_all();
            cpu.spend(self.machine.costs().load * self.words() as u64);
        }
        // Nothing is taken back for good, so nothing is zapped.
        drop(self.guest.replace(slot).map_err(|it| it.to_string())?);
        cpu.spend(self.job.host.start);
        // A fault that looked the slot up without a log may still map by that.
        self.wait(cpu);
        match self.job.logging {
            Logging::AllSet => {}
            Logging::ProtectAll => {
                self.image.turn_all();
                self.protect_all(cpu)?;
                self.image.turn_all();
            }
            Logging::Manual | Logging::Ring | Logging::EagerSplit => {
                if self.job.logging == Logging::EagerSplit {
                    self.split(cpu)?;
                }
                let mut gather = self.gather(cpu);
                for chunk in 0..self.image.epochs.len() as u64 {
                    self.image.turn(chunk);
                    for pages in pieces(self.pages(chunk)) {
                        loop {
                            let held = self.alone();
                            let passed_over = self.protect(&mut gather, pages.clone())?;
                            self.finish(cpu, &mut gather);
                            drop(held);
                            if !passed_over {
                                break;
                            }
                            self.wait(cpu);
                        }
                    }
                    self.image.turn(chunk);
                }
            }
        }
        Ok(())
    }

    /// Without others that map or protect, where one lock is for all of that.
    pub(super) fn alone(&self) -> Option<MachineHeld<'_>> {
        self.job.one_lock.then(|| self.lock.acquire())
    }

    /// Until every walk is over.
    fn wait(&self, cpu: Cpu<'_>) {
        let period = self.guest.space().grace_period();
        while !self.guest.space().is_over(period) {
            cpu.spend(PAUSE);
        }
    }

    pub(super) fn pages(&self, chunk: u64) -> Range<u64> {
        let first = chunk * self.image.chunk;
        first..(first + self.image.chunk).min(self.job.pages)
    }

    /// Whether something was passed over.
    fn protect(
        &self,
        gather: &mut Gather<'t, 't, F, Mapper<'m>>,
        pages: Range<u64>,
    ) -> Result<bool, String> {
        let protected = gather.protect(&self.logged(), pages);
        Ok(protected.map_err(|it| it.to_string())?.passed_over)
    }

    fn protect_all(&self, cpu: Cpu<'_>) -> Result<(), String> {
        let space = self.guest.space();
        let start = space.protect_all().map_err(|it| it.to_string())?;
        self.kick(cpu);
        start.drive(|| cpu.spend(PAUSE));
        Ok(())
    }

    /// Splits what is large, ahead of the faults.
    fn split(&self, cpu: Cpu<'_>) -> Result<(), String> {
        let mut gather = self.gather(cpu);
        let mut from = Some(self.slot.guest.start());
        while let Some(at) = from {
            let rest = Span::inclusive(at, self.slot.guest.last()).map_err(|it| it.to_string())?;
            if !gather.top_up(8) {
                return Err("no memory for tables".to_owned());
            }
            from = gather.split_range(rest).map_err(|it| it.to_string())?;
            self.finish(cpu, &mut gather);
            if from == Some(at) {
                cpu.spend(PAUSE);
            }
        }
        gather.release_tables();
        Ok(())
    }

    /// Harvests the rings of some vCPUs, and protects what is found in them.
    pub(super) fn reap(&self, cpu: Cpu<'_>, rings: Range<usize>) -> Result<(), String> {
        let _one_at_a_time = self.reaping.acquire();
        let mut gather = self.gather(cpu);
        for ring in &self.rings[rings] {
            let found = ring.harvest(|_, page| {
                self.image.opened[page as usize].set(CLOSING);
                self.reaped.borrow_mut()[(page / 64) as usize] |= 1 << (page % 64);
            });
            cpu.spend(self.machine.costs().load * found);
            let mut pages = Vec::new();
            let collected = ring.collect(|_, page| pages.push(page));
            for piece in pages.chunks(FLUSH as usize) {
                for &page in piece {
                    while self.protect(&mut gather, page..page + 1)? {
                        cpu.spend(PAUSE);
                    }
                }
                self.finish(cpu, &mut gather);
            }
            collected.release();
            for page in pages {
                self.image.opened[page as usize].set(0);
            }
        }
        Ok(())
    }

    /// Looks at the log: what was written is to be sent. Where pages are protected by chunks, their
    /// marks stay until then.
    pub(super) fn sync(
        &self,
        cpu: Cpu<'_>,
        sending: &mut Sending,
        ran: &mut Ran,
    ) -> Result<(), String> {
        ran.syncs += 1;
        let per_word = self.job.host.word.unwrap_or(self.machine.costs().load);
        match self.job.logging {
            Logging::Manual | Logging::AllSet | Logging::EagerSplit => {
                cpu.order();
                for (index, (_, bits)) in self.bitmap.marks().enumerate() {
                    sending.add(index, bits);
                }
                sending.harvested.fill(false);
            }
            Logging::ProtectAll => {
                self.harvest(cpu, 0..self.job.pages, Harvest::KEEP, sending)?;
                // A guest that is stopped writes nothing.
                if !self.is_stopped() {
                    cpu.order();
                    self.image.turn_all();
                    self.protect_all(cpu)?;
                    cpu.order();
                    self.image.turn_all();
                }
            }
            Logging::Ring => {
                self.reap(cpu, 0..self.rings.len())?;
                cpu.order();
                let mut reaped = self.reaped.borrow_mut();
                for (index, word) in reaped.iter_mut().enumerate() {
                    sending.add(index, std::mem::take(word));
                }
            }
        }
        cpu.spend(per_word * self.words() as u64);
        Ok(())
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.get() == self.vcpus.len()
    }

    /// Takes marks, and protects what was marked unless it is kept. Every CPU has forgotten it when
    /// this returns.
    fn harvest(
        &self,
        cpu: Cpu<'_>,
        pages: Range<u64>,
        how: Harvest,
        sending: &mut Sending,
    ) -> Result<(), String> {
        let slot = self.logged();
        let mut gather = self.gather(cpu);
        for piece in pieces(pages) {
            cpu.order();
            let each = |first, bits| sending.add((first / 64) as usize, bits);
            let harvested = gather.harvest(&slot, &self.bitmap, piece.clone(), how, each);
            #[cfg(test)]
            if self.job.order == Order::SentEarly && how.is_empty() {
                self.send_now(cpu, piece, sending);
            }
            self.finish(cpu, &mut gather);
            harvested.map_err(|it| it.to_string())?;
        }
        Ok(())
    }

    /// Takes the marks of a chunk and protects it.
    pub(super) fn harvest_chunk(
        &self,
        cpu: Cpu<'_>,
        chunk: u64,
        sending: &mut Sending,
    ) -> Result<(), String> {
        let pages = self.pages(chunk);
        if self.is_stopped() {
            return self.harvest(cpu, pages, Harvest::KEEP, sending);
        }
        cpu.order();
        self.image.turn(chunk);
        #[cfg(test)]
        let how = self.protect_early(cpu, pages.clone())?;
        #[cfg(not(test))]
        let how = Harvest::empty();
        // All of it at once: the lock is not given up between two words of the bitmap.
        let held = self.alone();
        self.harvest(cpu, pages, how, sending)?;
        drop(held);
        cpu.order();
        self.image.turn(chunk);
        Ok(())
    }
}

/// Pages, as many at a time as one flush is for.
fn pieces(pages: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = pages.end;
    pages.step_by(FLUSH as usize).map(move |first| first..(first + FLUSH).min(end))
}

/// Bugs of a host.
#[cfg(test)]
impl<F: Format<Input = Ipa>> Migration<'_, '_, F> {
    /// Protects marked pages, and leaves their marks for later.
    fn protect_early(&self, cpu: Cpu<'_>, pages: Range<u64>) -> Result<Harvest, String> {
        if self.job.order != Order::ProtectedFirst {
            return Ok(Harvest::empty());
        }
        let mut gather = self.gather(cpu);
        self.protect(&mut gather, pages)?;
        self.finish(cpu, &mut gather);
        cpu.spend(Time::us(20));
        Ok(Harvest::KEEP)
    }

    fn send_now(&self, cpu: Cpu<'_>, pages: Range<u64>, sending: &mut Sending) {
        cpu.order();
        let mut count = 0;
        for page in pages {
            if sending.take(page) {
                let version = self.image.source[page as usize].get();
                sending.destination[page as usize] = Some(version);
                count += 1;
            }
        }
        sending.remaining -= count;
        cpu.spend(self.time_on_link(count * ON_LINK));
    }
}
