//! Whether a virtual CPU is on, by the hypervisor's own account. The file is part of two programs:
//! the hypervisor, and the tests of `xtask`, in which threads race for it.
//!
//! Firmware cannot be asked alone. Between its answer that a processor is off and the call that
//! starts it, another processor may have started it: the second start would write to a stack that
//! is in use. So a start is a claim first: one store by compare-exchange, which one caller wins;
//! the others are told `ON_PENDING` or `ALREADY_ON` (PSCI, DEN0022, 5.6).
//!
//! A processor that switches itself off uses its stack until firmware has it: it is
//! [`Leaving`](State::Leaving) until firmware says that it is off. Such an answer may be old when
//! it is used: the processor may have been started and have left again. So each change counts, and
//! a claim names the change that it was made upon.

use core::sync::atomic::{AtomicU64, Ordering};

/// The state of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Off, and its stack is not in use.
    Off,
    /// Claimed: it is being started.
    Pending,
    /// On.
    On,
    /// It has asked to be switched off. Firmware knows when it is.
    Leaving,
}

/// Why one cannot be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is being started.
    Pending,
    /// It is on.
    On,
}

/// One virtual CPU.
pub struct Power(AtomicU64);

/// A change takes two bits for the state; the others count.
const CHANGE: u64 = 4;

impl State {
    const fn of(word: u64) -> Self {
        match word % CHANGE {
            0 => Self::Off,
            1 => Self::Pending,
            2 => Self::On,
            _ => Self::Leaving,
        }
    }
}

impl Power {
    /// One that is off.
    pub const fn off() -> Self {
        Self(AtomicU64::new(State::Off as u64))
    }

    /// The next change after `word`. Whether it was made.
    fn change(&self, word: u64, to: State) -> bool {
        let next = (word - word % CHANGE).wrapping_add(CHANGE) + to as u64;
        // Acquire: what the processor did before it was off. Release: what was done before it is
        // this.
        let changed = self.0.compare_exchange(word, next, Ordering::AcqRel, Ordering::Relaxed);
        changed.is_ok()
    }

    /// Returns its state. `is_off` asks firmware whether it is off, and is asked only while it
    /// [leaves](State::Leaving).
    pub fn state(&self, is_off: impl FnOnce() -> bool) -> State {
        match State::of(self.0.load(Ordering::Acquire)) {
            State::Leaving if is_off() => State::Off,
            state => state,
        }
    }

    /// Claims it for a start. Of all that claim one that is off, one succeeds; it starts it, or
    /// [gives up](Self::set).
    ///
    /// # Errors
    /// It is not off.
    pub fn claim(&self, is_off: impl Fn() -> bool) -> Result<(), Taken> {
        loop {
            let word = self.0.load(Ordering::Acquire);
            match State::of(word) {
                State::Pending => return Err(Taken::Pending),
                State::On => return Err(Taken::On),
                State::Leaving if !is_off() => return Err(Taken::On),
                State::Off | State::Leaving => {}
            }
            if self.change(word, State::Pending) {
                return Ok(());
            }
        }
    }

    /// Says what it is now. The caller is the CPU itself, or the one that has
    /// [claimed](Self::claim) it: no other changes it meanwhile.
    pub fn set(&self, state: State) {
        self.change(self.0.load(Ordering::Relaxed), state);
    }
}
