//! Stacks are mappings of the process: after a run there are as many as before. Alone in its
//! process, to count them.
#![cfg(target_os = "linux")]

use std::cell::Cell;

use tablewright_machine::{Config, MAX_CPUS, Scheduler, Time};

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Returns how many mappings there were during a run, which ends well or in a panic of one CPU.
fn run(panics: bool) -> usize {
    let during = Cell::new(0);
    let result = Scheduler::new(Config::new(MAX_CPUS)).run(|cpu| {
        cpu.spend(Time::ns(1));
        cpu.order();
        if cpu.id() == 0 {
            during.set(mappings());
        }
        assert!(!panics || cpu.id() < 500);
    });
    assert_eq!(result.is_err(), panics);
    during.get()
}

#[test]
fn stacks_are_given_back() {
    for panics in [false, true] {
        // What the first run and the first panic leave behind for good is there before.
        run(panics);
        let before = mappings();
        for _ in 0..3 {
            // Each has a guard, which is a mapping of its own.
            assert!(run(panics) >= before + 2 * MAX_CPUS - 2);
        }
        assert!(mappings() <= before + 4, "{before} before, {} after", mappings());
    }
}
