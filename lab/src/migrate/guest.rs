//! The guest: virtual CPUs that write, and the handler of their faults.

use tablewright::dirty::Marker;
use tablewright::guest::{Backing, Cause, Declined, Request as GuestRequest};
use tablewright::shared::Refused;
use tablewright::{Format, Ipa, Pa};
use tablewright_machine::{Cpu, Fault as Trap, Request, Time};

use super::job::{BLOCK, PAGE, PAUSE, PHYSICAL, QUANTUM, TIMESLICE};
use super::state::{Migration, Vcpu};
use super::writes::{Due, Stream};
use crate::guest::host::fault_of;

impl<'m, F: Format<Input = Ipa>> Migration<'_, 'm, F> {
    pub(super) fn vcpu(&self, cpu: Cpu<'_>) {
        self.mapper.load();
        cpu.order();
        while self.started.get().is_none() {
            cpu.park();
        }
        let start = cpu.now();
        let own = &self.vcpus[cpu.id()];
        let mut stream = Stream::new(&self.job.writes, cpu.id() as u64, u64::from(self.job.vcpus));
        let mut slice = start;
        loop {
            self.pay_what_is_owed(cpu, own);
            cpu.order();
            if self.stop.get() {
                break;
            }
            if cpu.now().saturating_sub(slice) >= TIMESLICE {
                self.sleep(cpu, own);
                slice = cpu.now();
                continue;
            }
            self.write_what_is_open(cpu, own, start, &mut stream);
            cpu.order();
            if self.stop.get() {
                break;
            }
            let (page, due) = stream.next();
            match due_time(due, start, own.lost.get()) {
                Some(at) if at <= cpu.now() => {
                    self.write(cpu, own, page);
                    stream.advance();
                }
                // What stops the guest wakes it.
                Some(at) => {
                    cpu.park_until(at);
                }
                None => cpu.park(),
            }
        }
        self.stopped.set(self.stopped.get() + 1);
        if self.stopped.get() == self.vcpus.len() {
            cpu.wake(self.vcpus.len(), cpu.now());
        }
    }

    fn pay_what_is_owed(&self, cpu: Cpu<'_>, own: &Vcpu) {
        let owed = own.owed.take();
        cpu.spend(owed);
        own.lost.set(own.lost.get() + owed);
    }

    /// A throttled vCPU sleeps so long that it runs for the rest of the time.
    fn sleep(&self, cpu: Cpu<'_>, own: &Vcpu) {
        let percent = self.throttle.get();
        let away = Time::ps(TIMESLICE.as_ps() * percent / (100 - percent));
        own.lost.set(own.lost.get() + away);
        let until = cpu.now() + away;
        cpu.order();
        while !self.stop.get() && cpu.now() < until {
            cpu.park_until(until);
        }
    }

    /// Writes that need no translation, up to a quantum of them: as of now.
    fn write_what_is_open(&self, cpu: Cpu<'_>, own: &Vcpu, start: Time, stream: &mut Stream) {
        let mut at = cpu.now();
        let end = at + QUANTUM;
        while at < end {
            let (page, due) = stream.next();
            match due_time(due, start, own.lost.get()) {
                Some(due) if due < end && self.image.is_open(page) => at = at.max(due),
                _ => break,
            }
            self.image.write(page);
            at += self.job.work;
            stream.advance();
        }
        cpu.wait_until(at);
    }

    /// One write, as often as it takes.
    fn write(&self, cpu: Cpu<'_>, own: &Vcpu, page: u64) {
        let issued = cpu.now();
        let mut faults = 0;
        while let Err(trap) = self.machine.access(Request::write(page * PAGE)) {
            cpu.spend(self.machine.costs().exception);
            faults += 1;
            self.serve(cpu, page, trap);
        }
        self.image.write(page);
        self.image.found_writable(page);
        if faults > 0 {
            let stalled = cpu.now().saturating_sub(issued);
            own.faults.set(own.faults.get() + faults);
            own.lost.set(own.lost.get() + stalled);
            own.total.set(own.total.get() + stalled);
            own.longest.set(own.longest.get().max(stalled));
        }
        cpu.spend(self.job.work);
    }

    /// The handler of a fault: does what can be done, and the guest tries again.
    fn serve(&self, cpu: Cpu<'_>, page: u64, trap: Trap) {
        let at = Ipa::new(page * PAGE);
        let Some(fault) = fault_of(trap, at, true) else {
            return self.fail(format!("{trap:?} at {at}"));
        };
        if fault.cause == Cause::AccessFlag {
            let _again = self.guest.set_accessed(&fault);
            return;
        }
        let request = match self.guest.request(&fault) {
            Ok(request) => request,
            Err(Declined::Busy) => return cpu.spend(PAUSE),
            Err(declined) => return self.fail(declined.to_string()),
        };
        let marker = match self.rings.get(cpu.id()) {
            Some(ring) => Marker::Ring(ring, self.slot.id),
            None => Marker::Bitmap(&self.bitmap),
        };
        if request.is_logged_write() && marker.room().is_err() {
            self.full.set(self.full.get() + 1);
            if let Err(problem) = self.reap(cpu, cpu.id()..cpu.id() + 1) {
                return self.fail(problem);
            }
        }
        let opened = match self.guest.reopen(&request) {
            Ok(true) => true,
            Ok(false) => self.map(cpu, &request, at),
            Err(_) => {
                cpu.spend(PAUSE);
                false
            }
        };
        if opened && request.is_logged_write() {
            self.guest.mark(&marker, &request.slot(), at);
            cpu.spend(self.machine.costs().exchange);
        }
    }

    /// Maps the page, splitting what is in the way.
    fn map(&self, cpu: Cpu<'_>, request: &GuestRequest, at: Ipa) -> bool {
        let size = if self.job.large { BLOCK } else { PAGE };
        let page = Backing::new(Pa::new(PHYSICAL + at.get()), size);
        let _held = self.alone();
        let mut gather = self.gather(cpu);
        let mut mapped = false;
        for _ in 0..3 {
            match gather.map(request, &page) {
                Err(Refused::NeedsTables(count)) if gather.top_up(count) => {}
                done => {
                    mapped = done.is_ok();
                    break;
                }
            }
        }
        if !mapped {
            cpu.spend(PAUSE);
        }
        self.finish(cpu, &mut gather);
        mapped
    }

    /// Ends the run with a problem.
    pub(super) fn fail(&self, problem: String) {
        self.problem.borrow_mut().get_or_insert(problem);
        self.stop.set(true);
    }
}

/// When the next page is due, in the machine's time.
#[inline]
fn due_time(due: Due, start: Time, lost: Time) -> Option<Time> {
    match due {
        Due::Now => Some(Time::ZERO),
        Due::At(at) => Some(start + at),
        Due::InGuest(at) => Some(start + at + lost),
        Due::Never => None,
    }
}
