//! The scheduler: resumes the CPU whose clock is smallest, and lets it run until it is not.
//!
//! Invariants, from which the order of all shared accesses follows:
//!
//! * `now` is the key of the running CPU: its clock and its number. Every other CPU that can run is
//!   in the tree with the key of the shared access that it wants to do next, or of the time at
//!   which it wakes up.
//! * Shared state is touched only while `now` is not behind the first of the tree.
//! * A key enters the tree never before `now`: a CPU that wants to do an access behind the first
//!   enters itself, and one that is woken is woken after its waker's `now`. So the keys at which
//!   shared state is touched never decrease.
//!
//! The fast paths are one compare each, [`Cpu::order`] of `now` with the first of the tree,
//! [`Cpu::spend`] with the limit. What is rare hides behind the same two compares: the end of the
//! run is a key that plays in the tree, a perturbed run has a limit of zero for `spend`, and in a
//! run that is being torn down the clock is behind the end.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::thread;

use crate::coroutine::{ColouredStack, Coroutine, CoroutineResult, Yielder};
use crate::perturb::Perturbation;
use crate::time::{MAX_CPUS, Price, Time, cpu_of, time_of};
use crate::tree::{NEVER, Tree};

/// The inputs of a run, besides its program.
///
/// ```
/// use tablewright_machine::{Config, Time};
/// let mut config = Config::new(416);
/// config.limit = Time::s(1);
/// config.perturbation.seed = 42;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// How many CPUs, from 1 to [`MAX_CPUS`](crate::MAX_CPUS).
    pub cpus: usize,
    /// The run is stopped before the first shared access at this time or later. At most
    /// [`Time::MAX_RUN`].
    pub limit: Time,
    /// The run is stopped after so many ordered accesses: for programs that get nowhere in no time.
    pub max_accesses: u64,
    /// Bytes of stack for each CPU. Memory is used for what is touched.
    pub stack_size: usize,
    /// Other timings of the same program.
    pub perturbation: Perturbation,
}

impl Config {
    /// Returns a configuration with so many CPUs, no limits, no perturbation, and stacks on which a
    /// panic can print its backtrace.
    pub fn new(cpus: usize) -> Self {
        Self {
            cpus,
            limit: Time::MAX_RUN,
            max_accesses: u64::MAX,
            stack_size: 256 << 10,
            perturbation: Perturbation::default(),
        }
    }
}

/// The outcome of a run that came to its end.
///
/// ```
/// use tablewright_machine::{Config, Outcome, Scheduler, Time};
/// let outcome =
///     Scheduler::new(Config::new(2)).run(|cpu| cpu.spend(Time::ns(5) * cpu.id() as u64))?;
/// let clocks = vec![Time::ZERO, Time::ns(5)];
/// assert_eq!(outcome, Outcome { end: Time::ns(5), clocks, accesses: 0, switches: 2 });
/// # Ok::<(), tablewright_machine::RunError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// When the last CPU finished.
    pub end: Time,
    /// When each CPU finished.
    pub clocks: Vec<Time>,
    /// How many ordered accesses there were.
    pub accesses: u64,
    /// How often a CPU was resumed.
    pub switches: u64,
}

/// Why a run did not come to its end. The stacks of the CPUs have been unwound.
///
/// ```
/// use tablewright_machine::{Config, RunError, Scheduler, Time};
/// let scheduler = Scheduler::new(Config::new(3));
/// let stopped = scheduler.run(|cpu| {
///     if cpu.id() > 0 {
///         cpu.park();
///     }
/// });
/// assert_eq!(stopped, Err(RunError::Deadlock { time: Time::ZERO, cpus: vec![1, 2] }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunError {
    /// These CPUs are parked and none is left to wake them.
    Deadlock {
        /// The clock of the CPU that ran last.
        time: Time,
        /// The CPUs.
        cpus: Vec<usize>,
    },
    /// These CPUs had not finished when virtual time was up.
    TimeLimit {
        /// The CPUs.
        cpus: Vec<usize>,
    },
    /// There have been more accesses than were allowed; this CPU was to do the next.
    AccessLimit {
        /// The CPU.
        cpu: usize,
        /// Its clock.
        time: Time,
    },
    /// The program panicked on a CPU.
    Panic {
        /// The CPU.
        cpu: usize,
        /// Its clock.
        time: Time,
        /// The panic's message.
        message: String,
    },
    /// The host has no memory for the stacks.
    NoStack(String),
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadlock { time, cpus } => {
                write!(f, "deadlock at {time}: CPUs {cpus:?} wait for each other or for nothing")
            }
            Self::TimeLimit { cpus } => {
                write!(f, "virtual time is up and CPUs {cpus:?} have not finished")
            }
            Self::AccessLimit { cpu, time } => {
                write!(f, "too many accesses; CPU {cpu} was to do the next at {time}")
            }
            Self::Panic { cpu, time, message } => {
                write!(f, "CPU {cpu} panicked at {time}: {message}")
            }
            Self::NoStack(why) => write!(f, "no stack for a CPU: {why}"),
        }
    }
}

impl std::error::Error for RunError {}

/// Whether a CPU is to be woken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Awake,
    /// In the tree at its deadline, if it has one.
    Parked,
    /// In the tree at the time at which it goes on.
    Woken,
}

/// The record of each CPU.
struct Slot {
    /// Its random numbers.
    stream: Cell<u64>,
    /// The next CPU in the queue in which this one is parked. It can be in one only.
    next: Cell<u16>,
    state: Cell<State>,
    finished: Cell<bool>,
}

/// A set of simulated CPUs and their virtual time.
///
/// It lives on one thread of the host; any number of them may run beside each other.
///
/// Outside of a run, as when a program sets up what it will share, CPU 0 is alone: its clock
/// advances with what it spends, and every access of it is in order.
///
/// ```
/// use std::cell::Cell;
/// use tablewright_machine::{Config, Scheduler, Time};
///
/// // A counter that is read and written back 2 ns later, without a lock, by two CPUs that take
/// // turns.
/// let counter = Cell::new(0);
/// let scheduler = Scheduler::new(Config::new(2));
/// let outcome = scheduler.run(|cpu| {
///     for _ in 0..100 {
///         cpu.order();
///         let seen = counter.get();
///         cpu.spend(Time::ns(2));
///         cpu.order();
///         counter.set(seen + 1);
///         cpu.spend(Time::ns(3));
///     }
/// })?;
/// assert_eq!(counter.get(), 100); // and not 200: both read before either writes, every time
/// assert_eq!(outcome.end, Time::ns(500));
/// # Ok::<(), tablewright_machine::RunError>(())
/// ```
pub struct Scheduler {
    /// The key of the running CPU.
    now: Cell<u64>,
    /// `spend` may advance the clock without further ado as long as the key stays below this.
    plain: Cell<u64>,
    accesses_left: Cell<u64>,
    tree: Tree,
    /// How the running CPU gives up the host's processor. `None` outside of a run.
    yielder: Cell<Option<NonNull<Yielder>>>,
    /// The key at which the run ends.
    limit: u64,
    running: Cell<bool>,
    /// The run has come to its end, and the stacks of CPUs that did not are being unwound.
    stopping: Cell<bool>,
    /// There have been as many accesses as were allowed.
    exhausted: Cell<bool>,
    slots: Box<[Slot]>,
    config: Config,
}

impl Scheduler {
    /// A scheduler.
    ///
    /// # Panics
    /// If the number of CPUs is 0 or more than [`MAX_CPUS`](crate::MAX_CPUS).
    pub fn new(config: Config) -> Self {
        assert!(
            (1..=MAX_CPUS).contains(&config.cpus),
            "{} CPUs: from 1 to {MAX_CPUS} can be simulated",
            config.cpus
        );
        let slot = |_| Slot {
            stream: Cell::new(0),
            next: Cell::new(0),
            state: Cell::new(State::Awake),
            finished: Cell::new(false),
        };
        let scheduler = Self {
            now: Cell::new(0),
            plain: Cell::new(0),
            accesses_left: Cell::new(0),
            tree: Tree::new(config.cpus),
            yielder: Cell::new(None),
            limit: config.limit.key(0),
            running: Cell::new(false),
            stopping: Cell::new(false),
            exhausted: Cell::new(false),
            slots: (0..config.cpus).map(slot).collect(),
            config,
        };
        scheduler.reset(NEVER);
        scheduler
    }

    /// Returns the configuration that it was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The CPU that runs.
    #[inline(always)]
    pub fn cpu(&self) -> Cpu<'_> {
        Cpu(self)
    }

    /// Back to time zero with no CPU in the tree.
    fn reset(&self, ceiling: u64) {
        let perturbation = &self.config.perturbation;
        for (cpu, slot) in self.slots.iter().enumerate() {
            slot.stream.set(perturbation.stream(cpu));
            slot.state.set(State::Awake);
            slot.finished.set(false);
        }
        self.tree.clear(ceiling);
        self.yielder.set(None);
        self.stopping.set(false);
        self.exhausted.set(false);
        self.now.set(0);
        self.plain.set(if perturbation.seed == 0 { self.limit } else { 0 });
        self.accesses_left.set(u64::MAX);
    }

    /// Outside of a run costs are what they are, until the next run.
    pub(crate) fn calm(&self) {
        if !self.running.get() {
            self.plain.set(self.limit);
        }
    }

    /// Runs the program on every CPU from time zero until all have finished.
    ///
    /// # Errors
    /// Why the run was stopped before that. The CPUs that had not finished are unwound: what is on
    /// their stacks is dropped, and whatever a destructor does with its CPU is without effect.
    ///
    /// # Panics
    /// If called by a CPU of a run of the same scheduler, or while the thread unwinds.
    pub fn run(&self, program: impl Fn(Cpu<'_>)) -> Result<Outcome, RunError> {
        assert!(!self.running.get(), "a run inside a run of the same scheduler");
        assert!(!thread::panicking(), "a run while the thread unwinds");
        self.running.set(true);
        self.reset(self.limit);
        self.accesses_left.set(self.config.max_accesses);
        let result = self.drive(&program);
        self.reset(NEVER);
        self.running.set(false);
        result
    }

    fn drive(&self, program: &dyn Fn(Cpu<'_>)) -> Result<Outcome, RunError> {
        let mut clocks = vec![Time::ZERO; self.config.cpus];
        let mut switches = 0;
        let mut cpus = Vec::with_capacity(self.config.cpus);
        for cpu in 0..self.config.cpus {
            let stack = ColouredStack::new(self.config.stack_size, cpu)
                .map_err(|error| RunError::NoStack(error.to_string()))?;
            let body = |yielder: &Yielder, ()| {
                self.yielder.set(Some(NonNull::from(yielder)));
                catch_unwind(AssertUnwindSafe(|| program(self.cpu())))
            };
            // SAFETY: the body borrows `self` and `program`, which outlive this function, and the
            // coroutine does not leave it: it is dropped at its end, or by unwinding.
            cpus.push(unsafe { Coroutine::with_stack_unchecked(stack, body) });
            self.tree.lower(cpu, Time::ZERO.key(cpu));
        }

        let panic = loop {
            let key = self.tree.first();
            if key >= self.limit {
                break None;
            }
            let cpu = cpu_of(key);
            self.tree.remove(cpu);
            self.now.set(key);
            switches += 1;
            match cpus[cpu].resume(()) {
                CoroutineResult::Yield(()) => {}
                CoroutineResult::Return(Ok(())) => {
                    clocks[cpu] = time_of(self.now.get());
                    self.slots[cpu].finished.set(true);
                }
                CoroutineResult::Return(Err(payload)) => break Some(payload),
            }
        };
        let result = self.judge(panic, clocks, switches);

        // Whatever destructors do from here on finds the run over: the clock is behind the first,
        // and beyond what can be spent, so that every operation takes its slow path.
        self.stopping.set(true);
        self.now.set(Time::MAX_RUN.high() + Time::ps(1).high());
        self.plain.set(0);
        drop(cpus);
        result
    }

    /// Why the loop ended, told from what it left behind.
    fn judge(
        &self,
        panic: Option<Box<dyn Any + Send>>,
        clocks: Vec<Time>,
        switches: u64,
    ) -> Result<Outcome, RunError> {
        let (cpu, time) = (cpu_of(self.now.get()), time_of(self.now.get()));
        if let Some(payload) = panic {
            let message = match payload.downcast::<String>() {
                Ok(message) => *message,
                Err(payload) => match payload.downcast::<&str>() {
                    Ok(message) => (*message).to_owned(),
                    Err(_) => "a payload that is not text".to_owned(),
                },
            };
            return Err(RunError::Panic { cpu, time, message });
        }
        if self.exhausted.get() {
            return Err(RunError::AccessLimit { cpu, time });
        }
        let unfinished: Vec<_> =
            (0..self.config.cpus).filter(|&cpu| !self.slots[cpu].finished.get()).collect();
        if unfinished.is_empty() {
            Ok(Outcome {
                end: clocks.iter().copied().max().unwrap_or_default(),
                clocks,
                accesses: self.config.max_accesses - self.accesses_left.get(),
                switches,
            })
        } else if unfinished.iter().all(|&cpu| self.tree.get(cpu) == NEVER) {
            Err(RunError::Deadlock { time, cpus: unfinished })
        } else {
            Err(RunError::TimeLimit { cpus: unfinished })
        }
    }

    /// Gives up the host's processor until the CPU is first again. Its key is in the tree, or it is
    /// parked.
    #[inline(always)]
    fn suspend(&self) {
        let yielder =
            self.yielder.get().expect("CPU 0 is alone outside of a run and would wait for ever");
        // SAFETY: the pointer was stored by the coroutine that runs: when it started, or below when
        // it was resumed, and every coroutine stores its own before it does anything else. Its
        // yielder lives at the base of its stack, which is the stack, or one below the stack, that
        // this code runs on. Outside of a run it is `None`.
        unsafe { yielder.as_ref() }.suspend(());
        self.yielder.set(Some(yielder));
    }

    /// Whether the CPU is being unwound, so that it must not be suspended any more. Code that
    /// stopped the unwinding of a run that is over is unwound again.
    #[cold]
    #[inline(never)]
    fn is_unwinding(&self) -> bool {
        if thread::panicking() {
            return true;
        }
        if self.stopping.get() {
            resume_unwind(Box::new("the run is over"));
        }
        false
    }

    /// Before this CPU's access come those of others.
    ///
    /// Inlined, with the switch: a return predictor pairs calls and returns, and a switch within a
    /// function called by the program would leave it off by one twice, for the way out of that
    /// function and for the next switch.
    #[inline(always)]
    fn wait_for_turn(&self) {
        if (thread::panicking() || self.stopping.get()) && self.is_unwinding() {
            return;
        }
        let key = self.now.get();
        self.tree.lower(cpu_of(key), key);
        self.suspend();
    }

    /// The CPU is first, but there have been as many accesses as were allowed.
    #[cold]
    #[inline(never)]
    fn stop_for_good(&self) {
        // It has been counted below zero.
        self.accesses_left.set(0);
        if !self.is_unwinding() {
            self.exhausted.set(true);
            // The loop finds that the end of the run is first.
            self.tree.clear(self.limit);
            self.suspend();
        }
    }

    /// A cost in a run that is perturbed, close to its limit, or over.
    #[inline(never)]
    fn spend_slowly(&self, cost: Time) {
        if self.stopping.get() {
            self.is_unwinding();
            return;
        }
        let perturbation = &self.config.perturbation;
        let cost = if perturbation.seed == 0 {
            cost
        } else {
            perturbation.apply(cost, &self.slots[cpu_of(self.now.get())].stream)
        };
        self.now.set(self.now.get() + cost.high());
        if self.now.get() >= self.limit {
            self.stop_at_limit();
        }
    }

    /// The clock of the running CPU is at the limit: it goes no further.
    #[cold]
    #[inline(never)]
    fn stop_at_limit(&self) {
        if self.is_unwinding() {
            return;
        }
        let key = self.now.get();
        if self.yielder.get().is_some() {
            self.tree.lower(cpu_of(key), key);
            self.suspend();
        } else {
            self.now.set(self.limit);
        }
    }

    /// Takes the running CPU out until it is woken, or until its key is first. Returns whether it
    /// was woken.
    fn park(&self, deadline: Option<Time>) -> bool {
        self.cpu().order();
        if thread::panicking() {
            return true;
        }
        let now = self.now.get();
        let cpu = cpu_of(now);
        if let Some(deadline) = deadline {
            self.tree.lower(cpu, deadline.key(cpu).max(now));
        }
        let state = &self.slots[cpu].state;
        state.set(State::Parked);
        self.suspend();
        state.replace(State::Awake) == State::Woken
    }

    fn wake(&self, cpu: usize, at: Time) -> bool {
        self.cpu().order();
        let slot = &self.slots[cpu];
        // An effect never comes before its cause, not even in the order of CPUs at one instant.
        let now = self.now.get();
        let mut key = at.max(time_of(now)).key(cpu);
        if key < now {
            key += Time::ps(1).high();
        }
        let wakes = slot.state.get() != State::Awake && key < self.tree.get(cpu);
        if wakes {
            slot.state.set(State::Woken);
            self.tree.lower(cpu, key);
        }
        wakes
    }
}

/// Whether the run is over in the midst of its programs, which complete what they have gathered: no
/// other CPU goes on that could be waited for.
pub(crate) fn is_cut_short() -> bool {
    thread::panicking()
}

/// Tells the compiler that what comes next is rare, or long: the code for it, and what that has to
/// save, goes out of the way of what is neither.
#[cold]
#[inline(always)]
pub(crate) fn cold() {}

/// The CPU that runs: what a simulated program does to time, and to other CPUs.
///
/// A handle and no more than a reference to the [`Scheduler`]; it acts for whichever CPU runs when
/// it is used. So what all CPUs share may ask the scheduler for it:
///
/// ```
/// use tablewright_machine::{Config, Scheduler, Time};
///
/// struct Memory<'s>(&'s Scheduler);
///
/// impl Memory<'_> {
///     fn load(&self) {
///         let cpu = self.0.cpu();
///         cpu.order();
///         cpu.spend(Time::ns(1) + Time::ns(1) * cpu.id() as u64);
///     }
/// }
///
/// let scheduler = Scheduler::new(Config::new(2));
/// let memory = Memory(&scheduler);
/// memory.load(); // setting up: CPU 0 is alone
/// let outcome = scheduler.run(|_| memory.load())?;
/// assert_eq!(outcome.clocks, [Time::ns(1), Time::ns(2)]);
/// # Ok::<(), tablewright_machine::RunError>(())
/// ```
#[derive(Clone, Copy)]
pub struct Cpu<'s>(&'s Scheduler);

impl<'s> Cpu<'s> {
    /// Its number, from 0.
    #[inline(always)]
    pub fn id(self) -> usize {
        cpu_of(self.0.now.get())
    }

    /// Its clock.
    #[inline(always)]
    pub fn now(self) -> Time {
        time_of(self.0.now.get())
    }

    /// Spends time on something private. No other CPU can tell when it happens, so none is asked.
    #[inline(always)]
    pub fn spend(self, cost: Time) {
        self.pay(cost.price());
    }

    /// Pays a cost that was worked out before.
    #[inline(always)]
    pub(crate) fn pay(self, price: Price) {
        let key = self.0.now.get() + price.high();
        if key < self.0.plain.get() {
            self.0.now.set(key);
        } else {
            cold();
            self.0.spend_slowly(price.time());
        }
    }

    /// Comes before every access to shared state: returns when this CPU is the first of all in
    /// virtual time.
    ///
    /// The access follows at once, before anything else is asked of the CPU, and so it is done at
    /// this time of virtual time. What it costs is spent afterwards.
    #[inline(always)]
    pub fn order(self) {
        if self.0.now.get() > self.0.tree.first() {
            self.0.wait_for_turn();
        }
        // The store does not wait for the look: both are one instruction.
        let (left, exhausted) = self.0.accesses_left.get().overflowing_sub(1);
        self.0.accesses_left.set(left);
        if exhausted {
            self.0.stop_for_good();
        }
    }

    /// Advances the clock to this time, if it is not there yet. As private as
    /// [`spend`](Cpu::spend), but never perturbed.
    #[inline(always)]
    pub fn wait_until(self, time: Time) {
        let key = time.key(self.id());
        if key > self.0.now.get() {
            self.0.now.set(key);
            if key >= self.0.limit {
                self.0.stop_at_limit();
            }
        }
    }

    /// Stops until another CPU [wakes](Cpu::wake) this one.
    ///
    /// A wake-up that comes before is forgotten. A CPU that looks at shared state and then parks
    /// misses none, as long as it does nothing between the two: parking is an ordered access as
    /// well, at the same time.
    ///
    /// # Panics
    /// Outside of a run, where no CPU could wake it.
    pub fn park(self) {
        self.0.park(None);
    }

    /// Stops until another CPU wakes this one, but not beyond the deadline. Returns whether it was
    /// woken.
    ///
    /// # Panics
    /// As [`park`](Cpu::park).
    pub fn park_until(self, deadline: Time) -> bool {
        self.0.park(Some(deadline))
    }

    /// Wakes a parked CPU at the given time: an ordered access. Returns whether that is what wakes
    /// it: not if it is awake already, or goes on by then in any case, woken by another or at its
    /// deadline.
    ///
    /// A time that is past means at once. At once is a picosecond later for a CPU with a smaller
    /// number: the order of CPUs at one instant must not put what it does before what caused it.
    ///
    /// ```
    /// use std::cell::Cell;
    /// use tablewright_machine::{Config, Scheduler, Time};
    ///
    /// // CPU 0 sends an interrupt that takes 300 ns, and CPU 1 answers.
    /// let answered = Cell::new(Time::ZERO);
    /// Scheduler::new(Config::new(2)).run(|cpu| {
    ///     if cpu.id() == 1 {
    ///         cpu.park();
    ///         answered.set(cpu.now());
    ///     } else {
    ///         cpu.spend(Time::us(1));
    ///         assert!(cpu.wake(1, cpu.now() + Time::ns(300)));
    ///     }
    /// })?;
    /// assert_eq!(answered.get(), Time::ns(1_300));
    /// # Ok::<(), tablewright_machine::RunError>(())
    /// ```
    ///
    /// # Panics
    /// If there is no such CPU.
    pub fn wake(self, cpu: usize, at: Time) -> bool {
        self.0.wake(cpu, at)
    }

    /// Returns the place where a queue keeps the CPU behind this one.
    pub(crate) fn link(self, cpu: usize) -> &'s Cell<u16> {
        &self.0.slots[cpu].next
    }
}

impl fmt::Debug for Cpu<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CPU {} at {}", self.id(), self.now())
    }
}
