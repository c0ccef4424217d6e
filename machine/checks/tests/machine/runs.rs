//! Runs as a whole: the same every time, and ending in an error that says why where they do not
//! come to their end.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use tablewright_machine::{
    Config, Cpu, Line, LineCosts, Lock, LockCosts, MAX_CPUS, Outcome, Perturbation, Resource,
    RunError, Scheduler, Time,
};

const LINE: LineCosts = LineCosts { owned: Time::ns(1), transfer: Time::ns(60) };
const LOCK: LockCosts = LockCosts { take: Time::ns(20), hand_over: Time::ns(120) };

type Log = Vec<(Time, usize, u32)>;

/// All CPUs at a lock, some lines and a port.
fn mixed(cpus: usize, seed: u64) -> (Log, Outcome) {
    let mut config = Config::new(cpus);
    config.perturbation = Perturbation { seed, pause_once_in: 50, ..Perturbation::default() };
    let log = RefCell::new(Vec::new());
    let (lock, port) = (Lock::new(LOCK), Resource::new());
    let lines: Vec<_> = (0..7).map(|_| Line::new(LINE)).collect();
    let outcome = Scheduler::new(config)
        .run(|cpu| {
            for step in 0..20 {
                let held = lock.acquire(cpu);
                lines[(cpu.id() + step) % 7].access(cpu);
                drop(held);
                cpu.spend(Time::ns(100));
                port.acquire(cpu, Time::ns(5));
                cpu.order();
                log.borrow_mut().push((cpu.now(), cpu.id(), step as u32));
            }
        })
        .unwrap();
    (log.into_inner(), outcome)
}

#[test]
fn a_run_is_a_function_of_program_configuration_and_seed() {
    for cpus in [1, 2, 416, MAX_CPUS] {
        for seed in [0, 1, u64::MAX] {
            let here = mixed(cpus, seed);
            assert_eq!(here.0.len(), 20 * cpus);
            assert!(
                here.0.is_sorted_by_key(|(time, cpu, _)| (*time, *cpu)),
                "{cpus} CPUs, seed {seed}"
            );
            assert_eq!(here, mixed(cpus, seed));
            // On two other threads at once, with other stacks at other addresses.
            let others = thread::scope(|scope| {
                [(); 2]
                    .map(|()| scope.spawn(|| mixed(cpus, seed)))
                    .map(|thread| thread.join().unwrap())
            });
            assert!(others.iter().all(|other| *other == here));
        }
        assert_ne!(mixed(cpus, 1), mixed(cpus, 2));
    }
}

/// Each CPU draws the same, however many others there are and whatever they do.
#[test]
fn each_cpu_has_random_numbers_of_its_own() {
    let clocks = |cpus, busy: usize| {
        let mut config = Config::new(cpus);
        config.perturbation.seed = 3;
        let program = |cpu: Cpu<'_>| {
            for _ in 0..if cpu.id() == busy { 50 } else { 10 } {
                cpu.order();
                cpu.spend(Time::ns(10));
            }
        };
        Scheduler::new(config).run(program).unwrap().clocks
    };
    let few = clocks(3, 2);
    assert_eq!(few[..2], clocks(8, 5)[..2]);
    assert_ne!(few[0], few[1]);
}

#[test]
fn a_cpu_that_shares_nothing_is_never_interrupted() {
    let outcome = Scheduler::new(Config::new(8))
        .run(|cpu| (0..1_000).for_each(|_| cpu.spend(Time::ns(1))))
        .unwrap();
    assert_eq!((outcome.switches, outcome.accesses), (8, 0));
    // And neither is one that does all it does before the others begin.
    let outcome = Scheduler::new(Config::new(8))
        .run(|cpu| {
            cpu.spend(Time::us(1) * cpu.id() as u64);
            for _ in 0..1_000 {
                cpu.order();
                cpu.spend(Time::ps(999));
            }
        })
        .unwrap();
    assert_eq!((outcome.switches, outcome.accesses), (16, 8_000));
}

#[test]
fn two_locks_in_the_wrong_order_are_a_deadlock() {
    let locks = [Lock::new(LOCK), Lock::new(LOCK)];
    let stopped = Scheduler::new(Config::new(3)).run(|cpu| {
        let id = cpu.id();
        if id < 2 {
            let _first = locks[id].acquire(cpu);
            cpu.spend(Time::us(1));
            let _second = locks[1 - id].acquire(cpu);
        }
    });
    assert_eq!(stopped, Err(RunError::Deadlock { time: Time::ns(1_020), cpus: vec![0, 1] }));
    let message = stopped.unwrap_err().to_string();
    assert_eq!(message, "deadlock at 1.02 µs: CPUs [0, 1] wait for each other or for nothing");
}

#[test]
fn a_lock_that_is_asked_for_twice_is_a_panic() {
    let lock = Lock::new(LOCK);
    let stopped = Scheduler::new(Config::new(2)).run(|cpu| {
        let _first = lock.acquire(cpu);
        let _second = lock.acquire(cpu);
    });
    assert!(matches!(stopped, Err(RunError::Panic { cpu: 0, .. })), "{stopped:?}");
}

#[test]
fn a_livelock_ends_at_the_limit_of_time() {
    let mut config = Config::new(3);
    config.limit = Time::us(5);
    let latest = Cell::new(Time::ZERO);
    let stopped = Scheduler::new(config.clone()).run(|cpu| {
        while cpu.id() != 1 {
            cpu.order();
            latest.set(cpu.now());
            cpu.spend(Time::ns(3));
        }
    });
    assert_eq!(stopped, Err(RunError::TimeLimit { cpus: vec![0, 2] }));
    // The last access before the limit was done, and none at it or later.
    assert_eq!(latest.get(), Time::ns(4_998));
    // One that never looks at anything shared ends there as well, perturbed or not, and so does one
    // long wait.
    for seed in [0, 1] {
        config.perturbation.seed = seed;
        let spent = Scheduler::new(config.clone()).run(|cpu| {
            loop {
                cpu.spend(Time::ns(1));
            }
        });
        assert_eq!(spent, Err(RunError::TimeLimit { cpus: vec![0, 1, 2] }));
        let waited = Scheduler::new(config.clone()).run(|cpu| cpu.wait_until(Time::ps(u64::MAX)));
        assert_eq!(waited, spent);
        let spent_at_once = Scheduler::new(config.clone()).run(|cpu| cpu.spend(Time::ps(u64::MAX)));
        assert_eq!(spent_at_once, spent);
    }
}

#[test]
fn a_livelock_in_no_time_ends_at_the_limit_of_accesses() {
    for (cpus, allowed) in [(1, 0), (1, 1_000), (2, 1_000), (2, 1_001)] {
        let mut config = Config::new(cpus);
        config.max_accesses = allowed;
        let done = Cell::new(0);
        let stopped = Scheduler::new(config).run(|cpu| {
            cpu.spend(Time::ns(7));
            loop {
                cpu.order();
                done.set(done.get() + 1);
            }
        });
        // The smaller number comes first, every time.
        assert_eq!(stopped, Err(RunError::AccessLimit { cpu: 0, time: Time::ns(7) }));
        assert_eq!(done.get(), allowed);
    }
    // As many as are allowed are not too many.
    let mut config = Config::new(2);
    config.max_accesses = 10;
    let program = |cpu: Cpu<'_>| {
        (0..5).for_each(|_| {
            cpu.order();
            cpu.spend(Time::ns(1));
        })
    };
    assert_eq!(Scheduler::new(config.clone()).run(program).unwrap().accesses, 10);
    config.max_accesses = 9;
    let stopped = Scheduler::new(config).run(program);
    assert_eq!(stopped, Err(RunError::AccessLimit { cpu: 1, time: Time::ns(4) }));
}

/// Counts itself.
struct Alive<'c>(&'c Cell<i32>);

impl<'c> Alive<'c> {
    fn new(count: &'c Cell<i32>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[test]
fn a_panic_comes_out_with_its_cpu_and_time_and_the_others_are_unwound() {
    let alive = Cell::new(0);
    let most = Cell::new(0);
    let lock = Lock::new(LOCK);
    let scheduler = Scheduler::new(Config::new(416));
    let stopped = scheduler.run(|cpu| {
        let _alive = Alive::new(&alive);
        most.set(alive.get().max(most.get()));
        if cpu.id() == 300 {
            cpu.spend(Time::us(3));
            cpu.order();
            panic!("no frame for table {}", 17);
        }
        // The others hold the lock, wait for it, or are parked, when they are unwound; and their
        // destructors do things to their CPU.
        let _held = (cpu.id() % 2 == 0).then(|| lock.acquire(cpu));
        if cpu.id() % 3 == 0 {
            cpu.park();
        }
        loop {
            cpu.order();
            cpu.spend(Time::ns(100));
        }
    });
    let expected =
        RunError::Panic { cpu: 300, time: Time::us(3), message: "no frame for table 17".into() };
    assert_eq!(stopped, Err(expected));
    assert_eq!((most.get(), alive.get()), (416, 0));
    assert!(!thread::panicking());
    // The scheduler is as good as new, with the literal that some panics are.
    let stopped = scheduler.run(|_| panic!("at once"));
    assert_eq!(
        stopped,
        Err(RunError::Panic { cpu: 0, time: Time::ZERO, message: "at once".into() })
    );
    assert!(scheduler.run(|cpu| cpu.order()).is_ok());
}

#[test]
fn a_run_that_is_over_cannot_be_survived() {
    let attempts = Cell::new(0);
    let stopped = Scheduler::new(Config::new(2)).run(|cpu| {
        if cpu.id() == 1 {
            cpu.spend(Time::us(1));
            cpu.order();
            panic!("over");
        }
        // Catches what unwinds it, and tries everything again.
        for _ in 0..3 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                loop {
                    cpu.order();
                    cpu.spend(Time::ns(100));
                }
            }));
            assert!(caught.is_err());
            attempts.set(attempts.get() + 1);
        }
        let operations: [fn(Cpu<'_>); 3] = [
            |cpu| cpu.park(),
            |cpu| cpu.spend(Time::ns(1)),
            |cpu| assert!(cpu.wake(1, Time::ZERO)),
        ];
        for operation in operations {
            assert!(catch_unwind(AssertUnwindSafe(|| operation(cpu))).is_err());
            attempts.set(attempts.get() + 1);
        }
    });
    assert!(matches!(stopped, Err(RunError::Panic { cpu: 1, .. })), "{stopped:?}");
    assert_eq!(attempts.get(), 6);
}

/// A panic that the program itself catches is its own affair.
#[test]
fn a_panic_that_is_caught_ends_nothing() {
    let lock = Lock::new(LOCK);
    let outcome = Scheduler::new(Config::new(4)).run(|cpu| {
        let caught = catch_unwind(AssertUnwindSafe(|| {
            let _held = lock.acquire(cpu);
            panic!("inside");
        }));
        assert!(caught.is_err());
        drop(lock.acquire(cpu));
    });
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(lock.usage().uses, 8);
}

#[test]
fn a_run_within_a_run_has_a_time_of_its_own() {
    let order = RefCell::new(Vec::new());
    let outer = Scheduler::new(Config::new(3));
    let outcome = outer
        .run(|cpu| {
            cpu.spend(Time::ns(10));
            let inner = Scheduler::new(Config::new(2));
            let inside = inner.run(|inner| {
                inner.spend(Time::us(1));
                inner.order();
                // The outer CPU may be suspended from here.
                cpu.order();
                order.borrow_mut().push((cpu.now(), cpu.id(), inner.id()));
                cpu.spend(Time::ns(1));
            });
            assert_eq!(inside.unwrap().end, Time::us(1));
            assert!(catch_unwind(AssertUnwindSafe(|| outer.run(|_| ()))).is_err());
        })
        .unwrap();
    assert_eq!(outcome.end, Time::ns(12));
    let expected: Vec<_> = [10, 11]
        .iter()
        .zip(0..)
        .flat_map(|(&ns, inner)| (0..3).map(move |cpu| (Time::ns(ns), cpu, inner)))
        .collect();
    assert_eq!(*order.borrow(), expected);
}

/// Nothing of a run is left when the next begins: CPUs that were parked for ever are awake.
#[test]
fn a_scheduler_can_be_used_again() {
    let scheduler = Scheduler::new(Config::new(3));
    for _ in 0..2 {
        let stopped = scheduler.run(|cpu| {
            if cpu.id() == 0 {
                cpu.spend(Time::ns(1));
                assert!(!cpu.wake(1, Time::ns(5)));
            } else {
                cpu.spend(Time::ns(10));
            }
            cpu.park();
        });
        let expected = RunError::Deadlock { time: Time::ns(10), cpus: vec![0, 1, 2] };
        assert_eq!(stopped, Err(expected));
    }
    assert_eq!(scheduler.run(|cpu| cpu.spend(Time::ns(10))).unwrap().clocks, [Time::ns(10); 3]);
}

/// A seed changes what a program spends, not what the machine is made of.
#[test]
fn resources_lines_and_locks_are_not_perturbed() {
    let mut config = Config::new(1);
    config.perturbation.seed = 9;
    let (line, port, lock) = (Line::new(LINE), Resource::new(), Lock::new(LOCK));
    let outcome = Scheduler::new(config).run(|cpu| {
        let _held = lock.acquire(cpu);
        line.access(cpu);
        port.acquire(cpu, Time::ns(9));
    });
    assert_eq!(outcome.unwrap().end, Time::ns(20 + 60 + 9));
}

#[test]
fn outside_of_a_run_one_cpu_is_alone() {
    let scheduler = Scheduler::new(Config::new(4));
    let cpu = scheduler.cpu();
    let (line, port, lock) = (Line::new(LINE), Resource::new(), Lock::new(LOCK));
    drop(lock.acquire(cpu));
    line.access(cpu);
    line.access(cpu);
    port.acquire(cpu, Time::ns(9));
    cpu.order();
    assert!(!cpu.wake(1, Time::ZERO));
    assert_eq!((cpu.id(), cpu.now()), (0, Time::ns(20 + 60 + 1 + 9)));
    assert_eq!(format!("{cpu:?}"), "CPU 0 at 90 ns");
    assert!(catch_unwind(AssertUnwindSafe(|| cpu.park())).is_err());
    // Time ends here, too.
    cpu.spend(Time::ps(u64::MAX));
    cpu.spend(Time::ps(u64::MAX));
    assert_eq!(cpu.now(), Time::MAX_RUN);
    assert!(scheduler.run(|cpu| cpu.spend(Time::ns(1))).is_ok());
    assert_eq!(cpu.now(), Time::ZERO);
}

#[test]
fn no_cpus_and_too_many_are_refused() {
    for cpus in [0, MAX_CPUS + 1] {
        assert!(catch_unwind(|| Scheduler::new(Config::new(cpus))).is_err());
    }
}

/// A stack of the default size holds a panic that prints its backtrace, which is what needs most.
#[test]
fn a_backtrace_fits_on_the_stack() {
    fn deep(levels: u32) -> usize {
        let frame = std::hint::black_box([levels; 64]);
        if levels == 0 {
            let trace = std::backtrace::Backtrace::force_capture().to_string();
            trace.matches("deep").count()
        } else {
            deep(levels - 1) + (frame[7] - levels) as usize
        }
    }
    let outcome = Scheduler::new(Config::new(2)).run(|cpu| {
        assert!(deep(50) >= 50);
        cpu.order();
    });
    assert!(outcome.is_ok(), "{outcome:?}");
}
