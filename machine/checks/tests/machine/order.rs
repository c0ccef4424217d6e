//! The order of shared accesses, against a model that looks for the earliest event among all of
//! them, each time.
//!
//! Random programs do everything that a CPU can do, in steps of a few picoseconds, so that most
//! things happen at the same time. The model has no coroutines, no tree and no queues: it searches.

use std::cell::RefCell;

use proptest::prelude::*;
use tablewright_machine::{
    Config, Cpu, Line, LineCosts, Lock, LockCosts, MAX_CPUS, Resource, RunError, Scheduler, Time,
    Usage,
};

#[derive(Clone, Debug)]
enum Op {
    Spend(u64),
    WaitUntil(u64),
    Access,
    Acquire(usize, u64),
    Reserve(usize, u64),
    Line(usize),
    Lock(usize),
    Unlock,
    Park(Option<u64>),
    Wake(usize, u64),
}

/// When it was done, by which CPU, which of its operations it was, and what it returned.
type Entry = (u64, usize, usize, u64);

/// The log, how each CPU finished, and the use of each lock and resource; or why not.
type Run = (Vec<Entry>, Result<Vec<u64>, RunError>, Vec<Usage>);

const SHARED: usize = 2;
const LINE: LineCosts = LineCosts { owned: Time::ps(1), transfer: Time::ps(5) };
const LOCK: [LockCosts; SHARED] = [
    LockCosts { take: Time::ps(1), hand_over: Time::ps(3) },
    LockCosts { take: Time::ps(0), hand_over: Time::ps(0) },
];

fn on_the_machine(programs: &[Vec<Op>], limit: u64) -> Run {
    let log = RefCell::new(Vec::new());
    let resources = [(); SHARED].map(|()| Resource::new());
    let lines = [(); SHARED].map(|()| Line::new(LINE));
    let locks = LOCK.map(Lock::new);
    let mut config = Config::new(programs.len());
    config.limit = Time::ps(limit);
    let result = Scheduler::new(config).run(|cpu: Cpu<'_>| {
        let mut held = None;
        for (index, op) in programs[cpu.id()].iter().enumerate() {
            let value = match *op {
                Op::Spend(cost) => {
                    cpu.spend(Time::ps(cost));
                    continue;
                }
                Op::WaitUntil(time) => {
                    cpu.wait_until(Time::ps(time));
                    continue;
                }
                Op::Access => {
                    cpu.order();
                    0
                }
                Op::Acquire(which, service) => {
                    resources[which].acquire(cpu, Time::ps(service)).as_ps()
                }
                Op::Reserve(which, service) => {
                    resources[which].reserve(cpu, Time::ps(service)).as_ps()
                }
                Op::Line(which) => lines[which].access(cpu).as_ps(),
                Op::Lock(which) => {
                    held = Some(locks[which].acquire(cpu));
                    0
                }
                Op::Unlock => {
                    held = None;
                    0
                }
                Op::Park(None) => {
                    cpu.park();
                    0
                }
                Op::Park(Some(until)) => u64::from(cpu.park_until(Time::ps(until))),
                Op::Wake(other, delay) => {
                    u64::from(cpu.wake(other % programs.len(), cpu.now() + Time::ps(delay)))
                }
            };
            log.borrow_mut().push((cpu.now().as_ps(), cpu.id(), index, value));
        }
        drop(held);
    });
    let usages = (resources.iter().map(Resource::usage))
        .chain(lines.iter().map(Line::usage))
        .chain(locks.iter().map(Lock::usage))
        .collect();
    let clocks = result.map(|outcome| outcome.clocks.iter().map(|clock| clock.as_ps()).collect());
    (log.into_inner(), clocks, usages)
}

/// The next step of a CPU of the model.
#[derive(Clone, Copy, Debug)]
enum Next {
    /// The operation at its place in the program.
    Op,
    /// To look whether it has the lock that it asked for: only once it is woken.
    Lock {
        asked: u64,
        woken: Option<u64>,
    },
    /// To go on, at the deadline or when woken.
    Resume {
        at: Option<u64>,
        woken: bool,
    },
    Nothing,
}

struct ModelCpu {
    clock: u64,
    place: usize,
    next: Next,
}

impl ModelCpu {
    fn when(&self, cpu: usize) -> Option<(u64, usize)> {
        let time = match self.next {
            Next::Op => Some(self.clock),
            Next::Lock { woken, .. } => woken,
            Next::Resume { at, .. } => at,
            Next::Nothing => None,
        };
        time.map(|time| (time, cpu))
    }
}

fn in_the_model(programs: &[Vec<Op>], limit: u64) -> Run {
    let mut log = Vec::new();
    let mut cpus: Vec<_> =
        programs.iter().map(|_| ModelCpu { clock: 0, place: 0, next: Next::Op }).collect();
    let mut free = [0; 2 * SHARED];
    let mut line_owner = [None; SHARED];
    let mut lock_owner = [None; SHARED];
    let mut granted = [0; SHARED];
    let mut usages = vec![Usage::default(); 3 * SHARED];
    let mut last = 0;

    let count = |usage: &mut Usage, waited: u64| {
        usage.uses += 1;
        usage.waits += u64::from(waited > 0);
        usage.waited += Time::ps(waited);
        usage.longest = usage.longest.max(Time::ps(waited));
    };
    // Wakes a CPU; returns whether that had an effect.
    let wake = |cpus: &mut [ModelCpu], now: (u64, usize), other: usize, at: u64| {
        let at = if (at, other) < now { at + 1 } else { at };
        match &mut cpus[other].next {
            Next::Lock { woken, .. } if woken.is_none_or(|before| at < before) => *woken = Some(at),
            Next::Resume { at: until, woken } if until.is_none_or(|before| at < before) => {
                (*until, *woken) = (Some(at), true);
            }
            _ => return false,
        }
        true
    };

    loop {
        // What is private each CPU does now.
        for (cpu, state) in cpus.iter_mut().enumerate() {
            while let Next::Op = state.next {
                // At the limit nothing happens any more.
                if state.clock >= limit {
                    break;
                }
                match programs[cpu].get(state.place) {
                    Some(Op::Spend(cost)) => state.clock += cost,
                    Some(Op::WaitUntil(time)) => state.clock = state.clock.max(*time),
                    Some(_) => break,
                    None => {
                        // What it still holds is released.
                        if !lock_owner.contains(&Some(cpu)) {
                            state.next = Next::Nothing;
                        }
                        break;
                    }
                }
                state.place += 1;
            }
        }
        let first = cpus.iter().enumerate().filter_map(|(cpu, state)| state.when(cpu)).min();
        let Some((time, cpu)) = first.filter(|(time, _)| *time < limit) else {
            break;
        };
        last = time;
        let now = (time, cpu);
        cpus[cpu].clock = time;
        let place = cpus[cpu].place;
        let op = programs[cpu].get(place).cloned();
        let mut value = 0;
        match (cpus[cpu].next, op) {
            (Next::Resume { woken, .. }, Some(op)) => {
                cpus[cpu].next = Next::Op;
                value = u64::from(woken && matches!(op, Op::Park(Some(_))));
            }
            (Next::Lock { asked, .. }, Some(Op::Lock(which))) => {
                if lock_owner[which] != Some(cpu) {
                    cpus[cpu].next = Next::Lock { asked, woken: None };
                    continue;
                }
                cpus[cpu].clock = time.max(granted[which]);
                count(&mut usages[2 * SHARED + which], cpus[cpu].clock - asked);
                cpus[cpu].next = Next::Op;
            }
            (Next::Op, Some(Op::Access)) => {}
            (Next::Op, Some(Op::Acquire(which, service) | Op::Reserve(which, service))) => {
                let waits = free[which].max(time) - time;
                count(&mut usages[which], waits);
                free[which] = time + waits + service;
                if let Some(Op::Acquire(..)) = programs[cpu].get(place) {
                    cpus[cpu].clock = free[which];
                    value = waits;
                } else {
                    value = free[which];
                }
            }
            (Next::Op, Some(Op::Line(line))) => {
                let which = SHARED + line;
                value = free[which].max(time) - time;
                count(&mut usages[which], value);
                let cost = if line_owner[line] == Some(cpu) { LINE.owned } else { LINE.transfer };
                line_owner[line] = Some(cpu);
                free[which] = time + value + cost.as_ps();
                cpus[cpu].clock = free[which];
            }
            (Next::Op, Some(Op::Lock(which))) => {
                if lock_owner[which].is_some() {
                    cpus[cpu].next = Next::Lock { asked: time, woken: None };
                    continue;
                }
                lock_owner[which] = Some(cpu);
                count(&mut usages[2 * SHARED + which], 0);
                cpus[cpu].clock += LOCK[which].take.as_ps();
            }
            // At its end a program releases what it holds.
            (Next::Op, Some(Op::Unlock) | None) => {
                if let Some(which) = lock_owner.iter().position(|owner| *owner == Some(cpu)) {
                    // Of all that wait for this lock, the one that asked first.
                    lock_owner[which] = (0..cpus.len())
                        .filter_map(|cpu| {
                            match (cpus[cpu].next, &programs[cpu].get(cpus[cpu].place)) {
                                (Next::Lock { asked, .. }, Some(Op::Lock(lock)))
                                    if *lock == which =>
                                {
                                    Some((asked, cpu))
                                }
                                _ => None,
                            }
                        })
                        .min()
                        .map(|(_, cpu)| cpu);
                    if let Some(next) = lock_owner[which] {
                        granted[which] = time + LOCK[which].hand_over.as_ps();
                        wake(&mut cpus, now, next, granted[which]);
                    }
                }
                if place == programs[cpu].len() {
                    continue;
                }
            }
            (Next::Op, Some(Op::Park(until))) => {
                let at = until.map(|until| until.max(time));
                cpus[cpu].next = Next::Resume { at, woken: false };
                continue;
            }
            (Next::Op, Some(Op::Wake(other, delay))) => {
                let other = other % cpus.len();
                value = u64::from(other != cpu && wake(&mut cpus, now, other, time + delay));
            }
            (next, op) => unreachable!("{next:?} {op:?}"),
        }
        // An operation that lasts beyond the limit does not come back.
        if cpus[cpu].clock < limit {
            log.push((cpus[cpu].clock, cpu, place, value));
        }
        cpus[cpu].place += 1;
    }

    let unfinished: Vec<_> =
        (0..cpus.len()).filter(|&cpu| !matches!(cpus[cpu].next, Next::Nothing)).collect();
    let result = if unfinished.is_empty() {
        Ok(cpus.iter().map(|cpu| cpu.clock).collect())
    } else if unfinished.iter().all(|&cpu| cpus[cpu].when(cpu).is_none()) {
        // The machine tells the clock of the CPU that ran last, which may have been ahead; compared
        // without it.
        Err(RunError::Deadlock { time: Time::ps(last), cpus: unfinished })
    } else {
        Err(RunError::TimeLimit { cpus: unfinished })
    };
    (log, result, usages)
}

fn compare(programs: &[Vec<Op>], limit: u64) -> Result<(), TestCaseError> {
    let (log, result, usages) = on_the_machine(programs, limit);
    let (model_log, model_result, model_usages) = in_the_model(programs, limit);
    for (place, (entry, expected)) in log.iter().zip(&model_log).enumerate() {
        prop_assert_eq!(entry, expected, "entry {}", place);
    }
    prop_assert_eq!(log.len(), model_log.len());
    match (&result, &model_result) {
        (Err(RunError::Deadlock { cpus, .. }), Err(RunError::Deadlock { cpus: expected, .. })) => {
            prop_assert_eq!(cpus, expected);
        }
        _ => prop_assert_eq!(&result, &model_result),
    }
    prop_assert_eq!(usages, model_usages);
    Ok(())
}

fn op(park: u32) -> impl Strategy<Value = Vec<Op>> {
    let time = 0..8_u64;
    let which = 0..SHARED;
    let private = prop_oneof![
        4 => time.clone().prop_map(Op::Spend),
        1 => (0..60_u64).prop_map(Op::WaitUntil),
    ];
    let simple = prop_oneof![
        3 => private,
        3 => Just(Op::Access),
        2 => (which.clone(), time.clone()).prop_map(|(which, service)| Op::Acquire(which, service)),
        1 => (which.clone(), time.clone()).prop_map(|(which, service)| Op::Reserve(which, service)),
        2 => which.clone().prop_map(Op::Line),
        1 => (0..60_u64).prop_map(|until| Op::Park(Some(until))),
        2 => (any::<usize>(), time).prop_map(|(cpu, delay)| Op::Wake(cpu, delay)),
        park => Just(Op::Park(None)),
    ];
    prop_oneof![
        4 => simple.clone().prop_map(|op| vec![op]),
        1 => (which, prop::collection::vec(simple, 0..4)).prop_map(|(which, inside)| {
            let mut ops = vec![Op::Lock(which)];
            ops.extend(inside);
            ops.push(Op::Unlock);
            ops
        }),
    ]
}

fn program(park: u32, length: usize) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(park), 0..length).prop_map(|ops| ops.concat())
}

proptest! {
    #[test]
    fn shared_accesses_are_in_the_order_of_time_and_cpu(
        programs in prop::collection::vec(program(0, 20), 1..6),
    ) {
        compare(&programs, u64::MAX)?;
    }

    /// With CPUs that are never woken, and an end of time in the middle.
    #[test]
    fn deadlocks_and_limits_are_those_of_the_model(
        programs in prop::collection::vec(program(1, 20), 1..6),
        limit in prop_oneof![Just(Time::MAX_RUN.as_ps()), 0..80_u64],
    ) {
        compare(&programs, limit)?;
    }

    #[test]
    fn a_few_steps_of_many_cpus(programs in prop::collection::vec(program(0, 4), 100..120)) {
        compare(&programs, u64::MAX)?;
    }
}

/// Every size that is named, with a program that is a formula: too large for random search, and no
/// less mixed.
#[test]
fn any_number_of_cpus() {
    for cpus in [1, 2, 3, 4, 63, 64, 65, 416, MAX_CPUS] {
        let programs: Vec<Vec<Op>> = (0..cpus)
            .map(|cpu| {
                (0..16)
                    .map(|step| match (cpu * 7 + step * 5 + cpu * step) % 11 {
                        0..=2 => Op::Spend((cpu * step % 13) as u64),
                        3 | 4 => Op::Access,
                        5 => Op::Acquire(cpu % SHARED, (step % 5) as u64),
                        6 => Op::Line(step % SHARED),
                        7 => Op::Reserve(step % SHARED, 2),
                        8 => Op::Park(Some((cpu * 3 + step) as u64)),
                        9 => Op::Wake(cpu * 31 + step, (step % 3) as u64),
                        _ => Op::WaitUntil((cpu + step * 20) as u64),
                    })
                    .chain([Op::Lock(0), Op::Line(0), Op::Unlock, Op::Access])
                    .collect()
            })
            .collect();
        compare(&programs, u64::MAX).unwrap();
    }
}
