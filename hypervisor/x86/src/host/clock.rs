//! Time: the processors' counter, whose rate is measured once.
//!
//! The guest reads the counter itself. It learns the rate by a register, so that it need not
//! measure; what it is told is measured with the interval timer that every PC has (channel 2,
//! 1.193182 MHz).
//!
//! While the guest stands still its time does not pass: what it reads is set back by so much
//! ([`stood`]), and its timers go by what it reads. To compare 2 GiB takes an emulator a minute,
//! which a guest's watchdog would take for a fault.

use core::sync::atomic::{AtomicU64, Ordering};

use spin::once::Once;
use x86_64::instructions::port::Port;

use crate::processor;

static CLOCK: Once<Clock> = Once::new();

/// How far the guest's counter is behind the processors'.
static BEHIND: AtomicU64 = AtomicU64::new(0);

/// The guest stood still for `cycles`.
pub fn stood(cycles: u64) {
    BEHIND.fetch_add(cycles, Ordering::Release);
}

/// How far the guest's counter is behind the processors', in cycles.
pub fn behind() -> u64 {
    BEHIND.load(Ordering::Acquire)
}

/// Returns the guest's counter.
pub fn guest_now() -> u64 {
    processor::now().wrapping_sub(behind())
}

const INTERVAL_HZ: u64 = 1_193_182;
/// 20 ms.
const INTERVAL: u16 = 23_864;

/// The rates, and where the counter was when the guest began.
#[derive(Clone, Copy)]
pub struct Clock {
    /// Of the counter, in Hz.
    pub counter_hz: u64,
    /// Of the timer of the processor's interrupt controller, in Hz.
    pub timer_hz: u64,
    start: u64,
    /// Units of 100 ns in a cycle, times 2^64.
    scale: u64,
}

/// Waits for the interval timer to run down.
fn wait_interval() {
    let (mut gate, mut command, mut data) =
        (Port::<u8>::new(0x61), Port::<u8>::new(0x43), Port::<u8>::new(0x42));
    // SAFETY: the ports of the interval timer, which has no other user; its loudspeaker is off.
    unsafe {
        let control = gate.read() & !0b11;
        gate.write(control | 1);
        // Channel 2, both bytes, counts down once.
        command.write(0b1011_0000);
        data.write(INTERVAL as u8);
        data.write((INTERVAL >> 8) as u8);
        while gate.read() & 1 << 5 == 0 {
            core::hint::spin_loop();
        }
    }
}

impl Clock {
    /// The clock, which is measured when it is first asked for.
    pub fn get() -> &'static Self {
        CLOCK.call_once(Self::measure)
    }

    /// Measures. The smallest of some counts is taken: whatever disturbs makes them larger.
    fn measure() -> Self {
        let (mut cycles, mut ticks) = (u64::MAX, u64::MAX);
        for _ in 0..4 {
            let from = processor::now();
            ticks = ticks.min(processor::timed(wait_interval).into());
            cycles = cycles.min(processor::now() - from);
        }
        let rate = |count: u64| count * INTERVAL_HZ / u64::from(INTERVAL);
        let counter_hz = rate(cycles).max(1);
        Self {
            counter_hz,
            timer_hz: rate(ticks).max(1),
            start: processor::now(),
            scale: ((10_000_000u128 << 64) / u128::from(counter_hz)) as u64,
        }
    }

    /// Returns the time of the guest, in units of 100 ns (TLFS, "Partition Reference Counter").
    pub fn reference(&self) -> u64 {
        let cycles = guest_now().wrapping_sub(self.start);
        ((u128::from(cycles) * u128::from(self.scale)) >> 64) as u64
    }

    /// Returns the page by which the guest finds that time itself ("Partition Reference TSC
    /// Mechanism"): its sequence, scale and offset.
    pub fn reference_page(&self) -> [u64; 3] {
        let offset = ((u128::from(self.start) * u128::from(self.scale)) >> 64) as u64;
        [1, self.scale, offset.wrapping_neg()]
    }

    /// Cycles in so many nanoseconds.
    pub fn cycles(&self, ns: u64) -> u64 {
        (u128::from(ns) * u128::from(self.counter_hz) / 1_000_000_000) as u64
    }

    /// Nanoseconds in so many cycles.
    pub fn ns(&self, cycles: u64) -> u64 {
        (u128::from(cycles) * 1_000_000_000 / u128::from(self.counter_hz)) as u64
    }

    /// Ticks of the timer in so many cycles, one at least.
    pub fn ticks(&self, cycles: u64) -> u32 {
        let ticks = u128::from(cycles) * u128::from(self.timer_hz) / u128::from(self.counter_hz);
        ticks.clamp(1, u128::from(u32::MAX)) as u32
    }
}
