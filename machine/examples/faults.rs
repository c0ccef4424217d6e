//! How fast the machine is: mappings a second of the host, with every shared access ordered.
//!
//! ```text
//! cargo run --release -p tablewright-machine --example faults [CPUS] [MAPPINGS] [lock|free]
//! ```
//!
//! A mapping is six accesses to two cache lines, that of the entry and that of the table's
//! counters, and private work. In the first variant all CPUs map under one lock; in the second each
//! works on lines of its own, without a lock.

use std::time::Instant;

use tablewright_machine::{
    Config, Cpu, Line, LineCosts, Lock, LockCosts, MAX_CPUS, Scheduler, Time,
};

const LINE: LineCosts = LineCosts { owned: Time::ps(1_300), transfer: Time::ns(60) };

fn map(cpu: Cpu<'_>, entry: &Line, counters: &Line) {
    for _ in 0..3 {
        entry.access(cpu);
        counters.access(cpu);
    }
}

fn private(cpu: Cpu<'_>, mapping: u64) {
    // Not the same for all, so that the CPUs do not march in step.
    cpu.spend(Time::ns(300) + Time::ps(977) * ((mapping * 31 + cpu.id() as u64 * 17) % 64));
}

fn usage(what: &str) -> ! {
    eprintln!("error: `{what}`: usage: faults [CPUS (1 to {MAX_CPUS})] [MAPPINGS] [lock|free]");
    std::process::exit(2);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: u64| match arguments.get(index) {
        None => default,
        Some(text) => text.parse().unwrap_or_else(|_| usage(text)),
    };
    let cpus = number(0, 416);
    let mappings = number(1, 5_000_000);
    let only = arguments.get(2);
    if !(1..=MAX_CPUS as u64).contains(&cpus) || arguments.len() > 3 {
        usage(&arguments.join(" "));
    }
    if let Some(only) = only
        && !["lock", "free"].contains(&only.as_str())
    {
        usage(only);
    }
    let each = mappings.div_ceil(cpus);
    let wanted = |name: &str| only.is_none_or(|only| only == name);
    let lines = || -> Vec<Line> { (0..2 * cpus).map(|_| Line::new(LINE)).collect() };

    if wanted("lock") {
        let lock = Lock::new(LockCosts { take: Time::ns(20), hand_over: Time::ns(120) });
        let lines = lines();
        report("under one lock", cpus, each, |cpu| {
            for mapping in 0..each {
                let held = lock.acquire(cpu);
                map(cpu, &lines[0], &lines[1]);
                drop(held);
                private(cpu, mapping);
            }
        });
    }
    if wanted("free") {
        let lines = lines();
        report("without a lock", cpus, each, |cpu| {
            let lines = &lines[2 * cpu.id()..][..2];
            for mapping in 0..each {
                map(cpu, &lines[0], &lines[1]);
                private(cpu, mapping);
            }
        });
    }
}

fn report(name: &str, cpus: u64, each: u64, program: impl Fn(Cpu<'_>)) {
    let start = Instant::now();
    let outcome = Scheduler::new(Config::new(cpus as usize)).run(program).expect("runs to its end");
    let took = start.elapsed().as_secs_f64();
    let mappings = (cpus * each) as f64;
    println!(
        "{name}: {mappings:.0} mappings on {cpus} CPUs in {took:.2} s: {:.2} million a second, \
         {:.0} ns each",
        mappings / took / 1e6,
        took / mappings * 1e9,
    );
    println!(
        "    {:.1} accesses and {:.1} switches a mapping, {:.1} ns a switch; {:.3} s of virtual \
         time",
        outcome.accesses as f64 / mappings,
        outcome.switches as f64 / mappings,
        took / outcome.switches as f64 * 1e9,
        outcome.end.as_secs_f64(),
    );
}
