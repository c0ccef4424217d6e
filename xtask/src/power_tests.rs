//! Threads race to start one virtual CPU, by the hypervisor's account of which are on.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use crate::power::{Power, State, Taken};

/// Starts that are made, by all threads together.
const STARTS: u32 = 20_000;

/// A virtual CPU, the stack that its start writes to, and what firmware says.
struct Cpu {
    power: Power,
    stack: AtomicBool,
    off: AtomicBool,
    starts: AtomicU32,
    broken: AtomicBool,
}

impl Cpu {
    fn is_off(&self) -> bool {
        let off = self.off.load(Ordering::Acquire);
        // What firmware says may be old when it arrives.
        thread::yield_now();
        off
    }

    /// Starts it, lets it run, and switches it off; or nothing, if it is not off.
    fn start(&self) {
        if self.power.claim(|| self.is_off()).is_err() {
            return;
        }
        if self.stack.swap(true, Ordering::AcqRel) {
            self.broken.store(true, Ordering::Relaxed);
        }
        self.off.store(false, Ordering::Release);
        self.power.set(State::On);
        self.starts.fetch_add(1, Ordering::Relaxed);
        self.power.set(State::Leaving);
        // It still uses its stack.
        thread::yield_now();
        self.stack.store(false, Ordering::Release);
        self.off.store(true, Ordering::Release);
    }
}

#[test]
fn of_those_that_start_a_cpu_one_does() {
    let cpu = Cpu {
        power: Power::off(),
        stack: AtomicBool::new(false),
        off: AtomicBool::new(true),
        starts: AtomicU32::new(0),
        broken: AtomicBool::new(false),
    };
    let goes_on =
        || cpu.starts.load(Ordering::Relaxed) < STARTS && !cpu.broken.load(Ordering::Relaxed);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while goes_on() {
                    cpu.start();
                }
            });
        }
    });
    assert!(!cpu.broken.load(Ordering::Relaxed), "a start writes to a stack that is in use");
}

#[test]
fn the_others_are_told_why() {
    let power = Power::off();
    assert_eq!(power.claim(|| unreachable!()), Ok(()));
    assert_eq!(power.claim(|| true), Err(Taken::Pending));
    assert_eq!(power.state(|| true), State::Pending);
    power.set(State::On);
    assert_eq!(power.claim(|| true), Err(Taken::On));
    power.set(State::Leaving);
    // It has asked to be switched off, and firmware has not done it yet.
    assert_eq!(power.claim(|| false), Err(Taken::On));
    assert_eq!(power.state(|| false), State::Leaving);
    assert_eq!(power.state(|| true), State::Off);
    assert_eq!(power.claim(|| true), Ok(()));
    // Its start was refused.
    power.set(State::Off);
    assert_eq!(power.claim(|| unreachable!()), Ok(()));
}
