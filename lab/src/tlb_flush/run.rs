//! An address space with its lock, and threads that map a file, touch it and unmap it, over and
//! over.
//!
//! The published program is `pthread_mmap`: each round of a thread maps one part of a file after
//! the other, reads the first byte, and unmaps it. Mapping and unmapping hold the lock of the
//! address space alone, the fault of the first touch holds it together with others. Unmapping ends
//! when every CPU that may remember has forgotten, still under the lock: so there is one flush at a
//! time, and it keeps all others waiting.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use tablewright::format::{Arm64K4, X86_64};
use tablewright::{Format, Va};
use tablewright_machine::{Config, Cpu, Machine, Setup, Time};

use super::host::{Guest, Host, Memory};
use super::job::{AT, How, Job, Ran};
use super::messenger;
use super::tables::{Tables, Tell};
use crate::error::Error;
use crate::guest::failed;
use crate::random::Random;
use crate::runs::Simulated;

/// Parts of the fixed work of a cycle, in percent: mapping, and the first touch; unmapping has the
/// rest. Assumed.
const MAP: u64 = 25;
const TOUCH: u64 = 25;

impl Simulated for Job {
    type Ran = Ran;
    type Kept = ();

    fn run(&self, (): &mut ()) -> Result<Ran, Error> {
        run(self)
    }

    fn name(&self) -> String {
        format!("{} on {} CPUs", self.how.name(), self.physical)
    }
}

/// A lock that is held alone or together. A thread that waits tries for a while, and then sleeps,
/// and the first is woken; it does not have it by that: one that comes meanwhile, and runs, may be
/// before it.
#[derive(Default)]
struct SpaceLock {
    alone: Cell<bool>,
    together: Cell<u32>,
    queue: RefCell<VecDeque<(usize, bool)>>,
    /// vCPUs whose threads try.
    trying: RefCell<Vec<usize>>,
}

/// Next step of a thread.
#[derive(Clone, Copy)]
enum Step {
    Compute,
    Map,
    Touch,
    Unmap,
}

/// A thread of the program. It leaves its vCPU where it has to wait for the lock, and nowhere else.
struct Thread {
    /// Cycles that it has yet to do.
    left: Cell<u64>,
    step: Cell<Step>,
    /// It waits in the queue of the lock.
    queued: Cell<bool>,
    sleeping: Cell<bool>,
    random: RefCell<Random>,
}

struct Program<'j, F: Format<Input = Va>> {
    job: &'j Job,
    host: &'j Host<'j>,
    tables: Tables<'j, F>,
    lock: SpaceLock,
    threads: Box<[Thread]>,
    /// Threads that are not through.
    left: Cell<usize>,
}

/// Makes a run.
pub fn run(job: &Job) -> Result<Ran, Error> {
    run_with(job, &messenger::flush)
}

fn run_with(job: &Job, tell: &Tell<'_>) -> Result<Ran, Error> {
    let ran = match job.is_arm64() {
        true => run_as::<Arm64K4>(job, tell),
        false => run_as::<X86_64<4>>(job, tell),
    };
    ran.map_err(failed(&job.profile, job.how.name()))
}

fn run_as<F: Format<Input = Va>>(job: &Job, tell: &Tell<'_>) -> Result<Ran, String> {
    // A page of each thread, and the tables that lead to it.
    let frames = 16 + 6 * usize::from(job.threads);
    let memory = tablewright_machine::Memory::new(frames, 12, 1 << 30);
    let mut setup = Setup::new(job.architecture(), memory);
    setup.costs = job.profile.costs.clone();
    setup.scheduler = Config { max_accesses: u64::MAX, ..Config::new(job.vcpus.into()) };
    let machine = Machine::new(setup);
    let mut memory = Memory::new(job.vcpus.into());
    let guest = Guest {
        slice: job.slice,
        physical: job.physical.into(),
        leaves: job.how == How::Tablewright,
        stays: job.stays,
        identified: job.how.has_identifiers(),
    };
    let host = Host::new(&machine, &mut memory, guest)
        .ok_or_else(|| format!("{} vCPUs are too many", job.vcpus))?;
    let tables = Tables::new(job, &host, tell).ok_or("no memory for a root")?;
    let cycles = u64::from(job.rounds) * u64::from(job.chunks);
    let thread = |number: u16| Thread {
        left: Cell::new(cycles),
        step: Cell::new(Step::Compute),
        queued: Cell::new(false),
        sleeping: Cell::new(false),
        random: RefCell::new(Random(number.into())),
    };
    let program = Program::<F> {
        job,
        host: &host,
        tables,
        lock: SpaceLock::default(),
        threads: (0..job.threads).map(thread).collect(),
        left: Cell::new(job.threads.into()),
    };
    (0..program.threads.len()).for_each(|thread| host.begin(thread));
    let outcome = machine.run(|cpu| program.vcpu(cpu));
    let outcome = outcome.map_err(|error| error.to_string())?;
    let broken = machine.finish().into_iter().next();
    let broken = broken.map(|violation| violation.to_string());
    match host.problem.take().or(broken) {
        Some(problem) => Err(problem),
        None => Ok(Ran { time: outcome.end, tally: host.tally() }),
    }
}

impl<F: Format<Input = Va>> Program<'_, F> {
    fn vcpu(&self, cpu: Cpu<'_>) {
        while let Some(thread) = self.host.next_thread(cpu, || self.left.get() == 0) {
            self.go_on(cpu, thread);
        }
    }

    /// A thread runs until it waits for the lock, or is through.
    fn go_on(&self, cpu: Cpu<'_>, number: usize) {
        let (host, thread) = (self.host, &self.threads[number]);
        let costs = host.costs();
        let part = |percent: u64| Time::ps(costs.cycle.as_ps() * percent / 100);
        let at = AT + number as u64 * (self.job.pages << 12);
        if thread.queued.get() {
            host.work(cpu, costs.lock_hand_over);
        }
        // The space is loaded again, as it is now.
        host.hold(cpu);
        while thread.left.get() > 0 {
            let step = thread.step.get();
            let alone = !matches!(step, Step::Touch);
            if !matches!(step, Step::Compute) && !self.take(cpu, number, alone) {
                return;
            }
            match step {
                // Not all of them at once.
                Step::Compute => {
                    let most = 2 * self.job.work.as_ps() + 1;
                    let work = thread.random.borrow_mut().below(most);
                    host.work(cpu, Time::ps(work));
                }
                Step::Map => host.work(cpu, part(MAP)),
                Step::Touch => {
                    host.work(cpu, part(TOUCH));
                    self.tables.touch(at);
                }
                Step::Unmap => {
                    host.work(cpu, part(100 - MAP - TOUCH));
                    self.tables.unmap(at);
                }
            }
            if !matches!(step, Step::Compute) {
                cpu.order();
                self.lock.release(alone);
                let trying = self.lock.trying.borrow().clone();
                for vcpu in trying {
                    cpu.wake(vcpu, cpu.now());
                }
                host.work(cpu, self.wake_first(cpu));
            }
            thread.step.set(match step {
                Step::Compute => Step::Map,
                Step::Map => Step::Touch,
                Step::Touch => Step::Unmap,
                Step::Unmap => {
                    thread.left.set(thread.left.get() - 1);
                    Step::Compute
                }
            });
        }
        cpu.order();
        self.left.set(self.left.get() - 1);
        if self.left.get() == 0 {
            host.wake_idle(cpu);
        }
    }

    /// Takes the lock. If that is not possible the thread is in the queue, and sleeping.
    fn take(&self, cpu: Cpu<'_>, number: usize, alone: bool) -> bool {
        let (lock, thread) = (&self.lock, &self.threads[number]);
        if !thread.queued.get() {
            self.host.work(cpu, self.host.costs().lock_take);
        }
        cpu.order();
        let taken = lock.take(alone) || self.spin(cpu, alone);
        if taken {
            if thread.queued.take() {
                let mut queue = lock.queue.borrow_mut();
                queue.retain(|(other, _)| *other != number);
            }
        } else {
            if !thread.queued.replace(true) {
                lock.queue.borrow_mut().push_back((number, alone));
            }
            thread.sleeping.set(true);
        }
        taken
    }

    /// Tries to take the lock for as long as a thread does before it sleeps. It is interrupted and
    /// preempted meanwhile as any other.
    fn spin(&self, cpu: Cpu<'_>, alone: bool) -> bool {
        let (lock, mut left) = (&self.lock, self.job.spin);
        if left == Time::ZERO {
            return false;
        }
        lock.trying.borrow_mut().push(cpu.id());
        let taken = loop {
            self.host.be_on(cpu);
            let taken = lock.take(alone);
            if taken || left == Time::ZERO {
                break taken;
            }
            left = left.saturating_sub(self.host.run(cpu, left, || lock.is_free(alone)));
        };
        lock.trying.borrow_mut().retain(|&vcpu| vcpu != cpu.id());
        taken
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
            if self.threads[thread].sleeping.replace(false) {
                takes += self.host.wake(cpu, thread);
            }
        }
        takes
    }
}

impl SpaceLock {
    fn is_free(&self, alone: bool) -> bool {
        !self.alone.get() && (!alone || self.together.get() == 0)
    }

    fn take(&self, alone: bool) -> bool {
        let free = self.is_free(alone);
        match (free, alone) {
            (true, true) => self.alone.set(true),
            (true, false) => self.together.set(self.together.get() + 1),
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

#[cfg(test)]
mod tests {
    use tablewright::Invalidation;
    use tablewright::shootdown::{Cpus, Messenger};

    use tablewright_machine::Profile;

    use super::super::host::Doing;
    use super::*;

    /// Says that it has told all, and has told those that `tells` says.
    struct Planted<'t>(&'t dyn Fn(usize));

    // SAFETY: none: that is planted.
    unsafe impl Messenger for Planted<'_> {
        fn tell(&self, _: &Invalidation<'_>, cpus: &mut Cpus) {
            cpus.iter().for_each(self.0);
            cpus.clear();
        }
    }

    /// Returns the problem of flushes of two threads' space on two vCPUs.
    fn problem_with(tells: impl Fn(&Doing<'_, '_>, usize)) -> Option<String> {
        let profile = Profile::load("hyperv-16-vcpus").expect("built in");
        let job = Job {
            profile,
            how: How::Interrupt,
            threads: 2,
            rounds: 20,
            chunks: 10,
            pages: 16,
            vcpus: 2,
            physical: 2,
            slice: Time::ms(4),
            work: Time::us(100),
            spin: Time::ZERO,
            stays: false,
            ranges: 16,
        };
        let ran = run_with(&job, &|_, doing, here, _, unmapped| {
            let space = doing.host.space().expect("it has a root");
            here.flush(space, unmapped, &[&Planted(&|vcpu| tells(doing, vcpu))], doing);
        });
        ran.err().map(|error| error.to_string())
    }

    #[test]
    fn a_vcpu_that_is_left_out_is_found() {
        let nothing = problem_with(|_, _| ()).expect("a broken rule");
        assert!(nothing.contains("is said to be invalidated, and is not"), "{nothing}");
        let all = tablewright_machine::Tlbi::ALL;
        assert_eq!(problem_with(|doing, vcpu| doing.host.machine.forget_for(vcpu, all)), None);
    }
}
