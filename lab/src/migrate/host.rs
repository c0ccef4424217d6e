//! The host: the rounds, the link, and the comparison at the end.

use std::cell::{Cell, RefMut};

use tablewright::guest::{Gather, HOST_WRITES};
use tablewright::{Attrs, Format, Ipa, Mapping, Pa, Span};
use tablewright_machine::{Cpu, Mapper, Time};

use super::job::{BATCH, ON_LINK, PAGE, PHYSICAL, Ran, Round, ZEROS_ON_LINK};
use super::state::Migration;

/// Pages that the host is about to send.
pub struct Sending {
    to_send: Vec<u64>,
    pub(super) remaining: u64,
    /// Chunks that were harvested since the last look at the log.
    pub(super) harvested: Vec<bool>,
    pub(super) destination: Vec<Option<u32>>,
    cursor: u64,
    /// Pages found dirty, and bytes sent.
    found: u64,
    sent: u64,
    /// Dirty pages when the period began, and when that was.
    before: (u64, u64),
    since: Time,
    /// Periods with too many dirty pages.
    high: u32,
}

impl<'t, 'm, F: Format<Input = Ipa>> Migration<'t, 'm, F> {
    /// The gather of the running CPU.
    pub(super) fn gather(&self, cpu: Cpu<'_>) -> RefMut<'_, Gather<'t, 't, F, Mapper<'m>>> {
        self.gathers[cpu.id()].borrow_mut()
    }

    /// Completes what was gathered. What may still be walked is kept for later.
    pub(super) fn finish(&self, cpu: Cpu<'_>, gather: &mut Gather<'t, 't, F, Mapper<'m>>) {
        if !gather.is_clean() {
            self.kick(cpu);
        }
        let mut later = self.later.take();
        later.extend(gather.finish(|_| ()).err());
        for deferred in later {
            match deferred.try_complete() {
                Ok(completed) => completed.finish(|_| ()),
                Err(deferred) => self.later.borrow_mut().push(deferred),
            }
        }
    }

    /// Kicks every vCPU out of the guest, one after the other, where kicks flush TLBs.
    pub(super) fn kick(&self, cpu: Cpu<'_>) {
        if !self.machine.architecture().is_x86() {
            return;
        }
        let costs = self.machine.costs();
        cpu.order();
        for (id, vcpu) in self.vcpus.iter().enumerate() {
            if id != cpu.id() {
                cpu.spend(costs.interrupt);
                vcpu.owed.set(vcpu.owed.get() + costs.exception);
                self.kicks.set(self.kicks.get() + 1);
            }
        }
    }

    pub(super) fn host(&self, cpu: Cpu<'_>) {
        if let Err(problem) = self.prepare(cpu).and_then(|()| self.migrate(cpu)) {
            self.fail(problem);
        }
        // CPUs that still wait come to their end.
        self.stop.set(true);
        self.start_guest(cpu);
        for gather in &self.gathers {
            gather.borrow_mut().release_tables();
        }
        for deferred in self.later.take() {
            if let Ok(completed) = deferred.try_complete() {
                completed.finish(|_| ());
            }
        }
    }

    fn start_guest(&self, cpu: Cpu<'_>) {
        cpu.order();
        self.started.set(Some(cpu.now()));
        for vcpu in 0..self.vcpus.len() {
            cpu.wake(vcpu, cpu.now());
        }
    }

    /// The guest's memory, as much as is mapped from the beginning, writable.
    fn prepare(&self, cpu: Cpu<'_>) -> Result<(), String> {
        let attrs = Attrs { software: HOST_WRITES, ..Attrs::GUEST_MEMORY };
        let mapping = Mapping::new(attrs);
        let mapping = match self.job.large {
            true => mapping,
            false => mapping.pages_only(),
        };
        let space = self.guest.space();
        if self.job.mapped > 0 {
            let mapped = Span::new(self.slot.guest.start(), self.job.mapped * PAGE)
                .map_err(|it| it.to_string())?;
            space.map_range(mapped, Pa::new(PHYSICAL), mapping).map_err(|it| it.to_string())?;
        }
        self.start_guest(cpu);
        Ok(())
    }

    fn migrate(&self, cpu: Cpu<'_>) -> Result<(), String> {
        let job = self.job;
        let start = cpu.now();
        let words = self.words();
        let mut to_send = vec![u64::MAX; words];
        if !job.pages.is_multiple_of(64) {
            to_send[words - 1] = (1 << (job.pages % 64)) - 1;
        }
        let mut ran = Ran::default();
        let mut sending = Sending {
            to_send,
            remaining: job.pages,
            harvested: vec![false; self.image.epochs.len()],
            destination: vec![None; job.pages as usize],
            cursor: 0,
            found: 0,
            sent: 0,
            before: (0, 0),
            since: start,
            high: 0,
        };
        self.start_log(cpu)?;
        self.sync(cpu, &mut sending, &mut ran)?;
        ran.setup = cpu.now() - start;
        sending.since = cpu.now();
        self.note_round(start, cpu.now(), job.pages, &sending, &mut ran);

        let allowed = self.allowed();
        ran.converged = loop {
            if sending.remaining <= allowed {
                break true;
            }
            if cpu.now() - start >= job.timeout {
                break false;
            }
            let found = sending.found;
            self.send(cpu, allowed, Some(start + job.timeout), &mut sending, &mut ran)?;
            if self.stop.get() {
                return Ok(());
            }
            self.sync(cpu, &mut sending, &mut ran)?;
            let dirty = sending.found - found;
            self.period(cpu, false, &mut sending, &mut ran);
            self.note_round(start, cpu.now(), dirty, &sending, &mut ran);
        };
        self.period(cpu, true, &mut sending, &mut ran);
        ran.expected_downtime = self.time_on_link(sending.remaining * ON_LINK);

        let stopping = cpu.now();
        self.stop_guest(cpu);
        ran.running = cpu.now() - start;
        self.sync(cpu, &mut sending, &mut ran)?;
        self.send(cpu, 0, None, &mut sending, &mut ran)?;
        ran.downtime = cpu.now() - stopping;
        ran.total = cpu.now() - start;
        ran.remaining = sending.remaining;
        self.compare(&sending.destination)?;
        self.sum_up(&mut ran);
        *self.ran.borrow_mut() = ran;
        Ok(())
    }

    fn sum_up(&self, ran: &mut Ran) {
        let counts = self.machine.counts();
        ran.throttle = self.throttle.get();
        ran.writes = self.image.writes.get();
        ran.full = self.full.get();
        ran.kicks = self.kicks.get();
        (ran.invalidations, ran.waits) = (counts.invalidations, counts.completions);
        for vcpu in self.vcpus.iter() {
            ran.faults += vcpu.faults.get();
            ran.stall_total += vcpu.total.get();
            ran.stall_longest = ran.stall_longest.max(vcpu.longest.get());
        }
    }

    /// Pages that can be sent while the guest is stopped.
    fn allowed(&self) -> u64 {
        let bytes = u128::from(self.bandwidth()) * u128::from(self.job.downtime_limit.as_ps())
            / 1_000_000_000_000;
        u64::try_from(bytes / u128::from(ON_LINK)).unwrap_or(u64::MAX)
    }

    /// Bytes that are sent in a second, with the guest as it is.
    fn bandwidth(&self) -> u64 {
        match self.stop.get() {
            true => self.job.bandwidth,
            false => self.job.bandwidth.min(self.job.max_bandwidth),
        }
    }

    pub(super) fn time_on_link(&self, bytes: u64) -> Time {
        let ps = u128::from(bytes) * 1_000_000_000_000 / u128::from(self.bandwidth());
        Time::ps(u64::try_from(ps).unwrap_or(u64::MAX).min(Time::MAX_RUN.as_ps()))
    }

    fn note_round(&self, start: Time, now: Time, dirty: u64, sending: &Sending, ran: &mut Ran) {
        ran.rounds.push(Round {
            at: now - start,
            dirty,
            remaining: sending.remaining,
            throttle: self.throttle.get(),
        });
    }

    /// A period is over, if it was long enough or nothing else is known: rates, and how much to
    /// slow the guest down.
    fn period(&self, cpu: Cpu<'_>, last: bool, sending: &mut Sending, ran: &mut Ran) {
        let lasted = cpu.now() - sending.since;
        if lasted == Time::ZERO || lasted < self.job.period && !(last && ran.dirty_rate == 0.0) {
            return;
        }
        let dirty = sending.found - sending.before.0;
        let sent = sending.sent - sending.before.1;
        ran.dirty_rate = dirty as f64 / lasted.as_secs_f64();
        if self.job.auto_converge && dirty * PAGE > sent / 2 {
            sending.high += 1;
            if sending.high >= 2 {
                sending.high = 0;
                let percent = match self.throttle.get() {
                    0 => 20,
                    percent => (percent + 10).min(99),
                };
                self.throttle.set(percent);
            }
        }
        sending.before = (sending.found, sending.sent);
        sending.since = cpu.now();
    }

    /// Sends until so few pages are left at the end of a slice, or none at any time, or time is up.
    ///
    /// To stop at the page with which few enough are left would be to look at the log for ever:
    /// while that is done the guest writes one more.
    fn send(
        &self,
        cpu: Cpu<'_>,
        down_to: u64,
        until: Option<Time>,
        sending: &mut Sending,
        ran: &mut Ran,
    ) -> Result<(), String> {
        let mut slice = cpu.now();
        while sending.remaining > 0 && until.is_none_or(|until| cpu.now() < until) {
            if cpu.now() - slice >= self.job.slice {
                if sending.remaining <= down_to {
                    break;
                }
                slice = cpu.now();
            }
            let Some(first) = sending.next() else {
                return Err("pages to be sent were lost".to_owned());
            };
            let chunk = first / self.image.chunk;
            if self.job.logging.harvests_by_chunk() && !sending.harvested[chunk as usize] {
                self.harvest_chunk(cpu, chunk, sending)?;
                sending.harvested[chunk as usize] = true;
                continue;
            }
            let end = self.pages(chunk).end;
            let (mut bytes, mut count, mut empty) = (0, 0, 0);
            cpu.order();
            let mut page = first;
            while page < end && count < BATCH {
                if sending.take(page) {
                    let version = self.image.source[page as usize].get();
                    sending.destination[page as usize] = Some(version);
                    count += 1;
                    let zeros = version == 0 && page >= self.job.used;
                    ran.duplicate += u64::from(zeros);
                    empty += u64::from(zeros);
                    ran.normal += u64::from(!zeros);
                    bytes += if zeros { ZEROS_ON_LINK } else { ON_LINK };
                }
                page += 1;
            }
            sending.remaining -= count;
            sending.cursor = page % self.job.pages;
            sending.sent += bytes;
            ran.transferred += bytes;
            cpu.spend(self.time_on_link(bytes) + self.job.zeros * empty);
        }
        Ok(())
    }

    fn stop_guest(&self, cpu: Cpu<'_>) {
        cpu.order();
        self.stop.set(true);
        for vcpu in 0..self.vcpus.len() {
            cpu.spend(self.machine.costs().interrupt);
            self.kicks.set(self.kicks.get() + 1);
            cpu.wake(vcpu, cpu.now());
        }
        cpu.order();
        while self.stopped.get() < self.vcpus.len() {
            cpu.park();
        }
    }

    /// The memory at the destination is that of the source.
    fn compare(&self, destination: &[Option<u32>]) -> Result<(), String> {
        let pages = || self.image.source.iter().map(Cell::get).zip(destination);
        let differs = |(source, there): (u32, &Option<u32>)| Some(source) != *there;
        let Some(first) = pages().position(differs) else {
            return Ok(());
        };
        let count = pages().filter(|page| differs(*page)).count();
        let there = match destination[first] {
            Some(version) => format!("has {version} of them"),
            None => "was never sent".to_owned(),
        };
        Err(format!(
            "the destination differs from the source in {count} of {} pages; the first is page \
             {first}, which was written {} times and {there}",
            destination.len(),
            self.image.source[first].get(),
        ))
    }
}

impl Sending {
    /// These pages of a word are to be sent.
    pub(super) fn add(&mut self, index: usize, bits: u64) {
        let word = &mut self.to_send[index];
        let new = u64::from((bits & !*word).count_ones());
        *word |= bits;
        self.remaining += new;
        self.found += new;
    }

    /// Whether a page is to be sent. It is not any more; that there are fewer is for the caller to
    /// say, once for many: rustc 1.95 loses the subtraction where both are in one loop.
    pub(super) fn take(&mut self, page: u64) -> bool {
        let word = &mut self.to_send[(page / 64) as usize];
        let bit = 1 << (page % 64);
        let there = *word & bit != 0;
        *word &= !bit;
        there
    }

    /// The next page to be sent, from where it was on and round.
    fn next(&self) -> Option<u64> {
        let (start, words) = ((self.cursor / 64) as usize, self.to_send.len());
        let here = self.to_send[start] & u64::MAX << (self.cursor % 64);
        if here != 0 {
            return Some(start as u64 * 64 + u64::from(here.trailing_zeros()));
        }
        (1..=words)
            .map(|distance| (start + distance) % words)
            .find(|&index| self.to_send[index] != 0)
            .map(|index| index as u64 * 64 + u64::from(self.to_send[index].trailing_zeros()))
    }
}
