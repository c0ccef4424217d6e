//! An address space with its lock, and threads that map a file, touch it and unmap it, over and over.
//!
//! The published program is `pthread_mmap`: each round of a thread maps one part of a file after the other, reads the first
//! byte, and unmaps it. Mapping and unmapping hold the lock of the address space alone, the fault of the first touch holds it together
//! with others. Unmapping ends when every CPU that may remember has forgotten, still under the lock: so there is one flush at a
//! time, and it keeps all others waiting.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use tablewright_machine::{Config, Cpu, Profile, Scheduler, Time};

use super::host::{Host, Memory, Tally};
use super::messenger::{self, How};
use crate::error::Error;
use crate::map_mem::machine::Threads;
use crate::random::Random;

/// What of the fixed work of a cycle mapping takes, and the first touch, in percent; unmapping has the rest. Assumed.
const MAP: u64 = 25;
const TOUCH: u64 = 25;

/// One run to be made.
#[derive(Clone, Debug)]
pub struct Job {
    pub profile: Profile,
    pub how: How,
    pub threads: u16,
    pub rounds: u32,
    pub chunks: u32,
    /// Pages of a part.
    pub pages: u64,
    pub vcpus: u16,
    pub physical: u16,
    /// Until a vCPU has to give its physical CPU to one that waits.
    pub slice: Time,
    /// What a thread computes between two cycles, on average: from nothing to twice as much.
    pub work: Time,
    /// Ranges in one hypercall, at most.
    pub ranges: usize,
}

impl Job {
    pub fn cycles(&self) -> u64 {
        u64::from(self.threads) * u64::from(self.rounds) * u64::from(self.chunks)
    }
}

/// What a run showed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ran {
    pub time: Time,
    pub tally: Tally,
}

/// Makes runs, and gives what each showed, in their order.
pub type Run<'r> = &'r dyn Fn(&[Job]) -> Result<Vec<Ran>, Error>;

/// The software machine.
pub fn software(threads: Threads) -> impl Fn(&[Job]) -> Result<Vec<Ran>, Error> {
    move |jobs| {
        threads.each(
            jobs,
            |_: &mut (), job| run(job),
            |job| format!("{} on {} CPUs", job.how.name(), job.physical),
        )
    }
}

/// A lock that is held alone or together. A thread that waits sleeps, and the first is woken; it does not have it by that: one
/// that comes meanwhile, and runs, may be before it.
#[derive(Default)]
struct SpaceLock {
    alone: Cell<bool>,
    together: Cell<u32>,
    queue: RefCell<VecDeque<(usize, bool)>>,
}

struct Program<'j> {
    job: &'j Job,
    host: Host<'j>,
    lock: SpaceLock,
    asleep: Box<[Cell<bool>]>,
    running: Cell<usize>,
}

/// Makes a run.
pub fn run(job: &Job) -> Result<Ran, Error> {
    let threads = usize::from(job.threads);
    let failed = |problem: String| Error::Machine {
        machine: job.profile.name.clone(),
        step: job.how.name(),
        problem,
    };
    let memory = Memory::new(job.vcpus.into());
    let host = Host::new(
        &job.profile.costs,
        &memory,
        job.slice,
        job.physical.into(),
        threads,
        job.how == How::Tablewright,
    )
    .ok_or_else(|| failed(format!("{} vCPUs are too many", job.vcpus)))?;
    let program = Program {
        job,
        host,
        lock: SpaceLock::default(),
        asleep: (0..threads).map(|_| Cell::new(false)).collect(),
        running: Cell::new(threads),
    };
    let scheduler = Scheduler::new(Config {
        max_accesses: u64::MAX,
        ..Config::new(threads + usize::from(job.vcpus))
    });
    let outcome = scheduler.run(|cpu| match cpu.id() < threads {
        true => program.thread(cpu),
        false => program.host.idle(cpu, || program.running.get() == 0),
    });
    let outcome = outcome.map_err(|error| failed(error.to_string()))?;
    match program.host.problem.take() {
        Some(problem) => Err(failed(problem)),
        None => Ok(Ran {
            time: outcome.end,
            tally: program.host.tally.get(),
        }),
    }
}

impl Program<'_> {
    fn thread(&self, cpu: Cpu<'_>) {
        let host = &self.host;
        let fixed = host.costs.cycle;
        let part = |percent: u64| Time::ps(fixed.as_ps() * percent / 100);
        let mut random = Random(cpu.id() as u64);
        host.begin(cpu);
        for _ in 0..u64::from(self.job.rounds) * u64::from(self.job.chunks) {
            // Not all of them at once.
            host.work(cpu, Time::ps(random.below(2 * self.job.work.as_ps() + 1)));
            self.with(cpu, true, || host.work(cpu, part(MAP)));
            host.hold(cpu);
            self.with(cpu, false, || host.work(cpu, part(TOUCH)));
            self.with(cpu, true, || {
                host.work(cpu, part(100 - MAP - TOUCH));
                messenger::flush(self.job, cpu, host, self.job.pages);
            });
        }
        cpu.order();
        self.running.set(self.running.get() - 1);
        host.leave(cpu, self.running.get() == 0);
    }

    fn with(&self, cpu: Cpu<'_>, alone: bool, what: impl FnOnce()) {
        let lock = &self.lock;
        let host = &self.host;
        let me = (cpu.id(), alone);
        host.work(cpu, host.costs.lock_take);
        let mut queued = false;
        loop {
            cpu.order();
            if lock.take(alone) {
                lock.queue.borrow_mut().retain(|other| *other != me);
                break;
            }
            if !queued {
                lock.queue.borrow_mut().push_back(me);
                queued = true;
            }
            self.asleep[cpu.id()].set(true);
            host.sleep(cpu, &self.asleep[cpu.id()]);
            host.work(cpu, host.costs.lock_hand_over);
            // The space is loaded again, as it is now.
            host.hold(cpu);
        }
        what();
        cpu.order();
        lock.release(alone);
        host.work(cpu, self.wake_first(cpu));
    }

    /// Wakes the first that wait: one that will hold it alone, or all before that.
    fn wake_first(&self, cpu: Cpu<'_>) -> Time {
        let first: Vec<_> = {
            let queue = self.lock.queue.borrow();
            let together = queue.iter().take_while(|(_, alone)| !alone).count();
            queue.iter().take(together.max(1)).copied().collect()
        };
        let mut takes = Time::ZERO;
        for (thread, _) in first {
            // Not those that are on their way.
            if self.asleep[thread].replace(false) {
                takes += self.host.wake(cpu, thread);
            }
        }
        takes
    }
}

impl SpaceLock {
    fn take(&self, alone: bool) -> bool {
        let together = self.together.get();
        let free = !self.alone.get() && (!alone || together == 0);
        match (free, alone) {
            (true, true) => self.alone.set(true),
            (true, false) => self.together.set(together + 1),
            (false, _) => {}
        }
        free
    }

    fn release(&self, alone: bool) {
        match alone {
            true => self.alone.set(false),
            false => self.together.set(self.together.get() - 1),
        }
    }
}
