//! The engine's accesses to entries, each of which the CPU has to pay for, and which others see.

use super::*;

/// The accessors. What others can see is accessed in its turn, when the CPU has the line; what is
/// private, at once. What is not in the memory of the machine belongs to the program.
///
/// # Safety
/// For all: 1. the entry, or entries, are valid for what is done to them.
impl Machine {
    /// The CPU is first, and has the line.
    #[inline(always)]
    pub(super) fn share(&self, cpu: Cpu<'_>, spot: &Spot<'_>, write: bool) {
        cpu.order();
        self.lines.access(cpu, spot.pa, write);
    }

    #[inline(always)]
    pub(super) unsafe fn load(&self, entry: *const u64) -> u64 {
        let cpu = self.cpu();
        let value = match self.hardware.spot(entry) {
            Some(spot) if spot.state != State::Private => {
                self.share(cpu, &spot, false);
                // SAFETY: passed on.
                unsafe { self.hardware.load(cpu.id(), &spot, entry) }
            }
            // SAFETY: valid by (1.).
            _ => unsafe { entry.read() },
        };
        self.pay(self.prices.load);
        value
    }

    #[inline(always)]
    pub(super) unsafe fn store(&self, entry: *mut u64, bits: u64, how: How) {
        let cpu = self.cpu();
        match self.hardware.spot(entry) {
            Some(spot) if spot.state != State::Private => {
                self.share(cpu, &spot, true);
                // SAFETY: passed on.
                unsafe { self.hardware.store(cpu.id(), &spot, entry, bits, how) };
            }
            Some(spot) => {
                // SAFETY: passed on.
                unsafe { self.hardware.store_private(cpu.id(), &spot, entry, bits) };
            }
            // SAFETY: valid by (1.).
            None => unsafe { entry.write(bits) },
        }
        self.entries.update(|n| n + 1);
        self.pay(self.prices.entry);
    }

    pub(super) unsafe fn exchange(&self, entry: *mut u64, bits: u64) -> u64 {
        let cpu = self.cpu();
        let old = match self.hardware.spot(entry) {
            Some(spot) => {
                self.share(cpu, &spot, true);
                self.hardware.exchange(cpu.id(), &spot, bits)
            }
            // SAFETY: valid by (1.).
            None => unsafe { entry.replace(bits) },
        };
        self.entries.update(|n| n + 1);
        cpu.spend(self.costs.exchange);
        old
    }

    pub(super) unsafe fn compare_exchange(
        &self,
        entry: *mut u64,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        let cpu = self.cpu();
        let result = match self.hardware.spot(entry) {
            Some(spot) => {
                self.share(cpu, &spot, true);
                self.hardware.compare_exchange(cpu.id(), &spot, current, new)
            }
            None => {
                // SAFETY: valid by (1.).
                let old = unsafe { entry.read() };
                if old == current {
                    // SAFETY: valid by (1.).
                    unsafe { entry.write(new) };
                    Ok(())
                } else {
                    Err(old)
                }
            }
        };
        self.entries.update(|n| n + 1);
        cpu.spend(self.costs.exchange);
        result
    }

    #[inline(always)]
    pub(super) unsafe fn fill(&self, first: *mut u64, count: usize, value: u64, step: u64) {
        let cpu = self.cpu();
        match self.hardware.spot(first) {
            Some(spot) if spot.state == State::Private => {
                // SAFETY: passed on.
                unsafe {
                    self.hardware.fill_private(cpu.id(), &spot, first, count, value, step);
                }
            }
            _ => {
                for index in 0..count {
                    let value = value.wrapping_add(step.wrapping_mul(index as u64));
                    // SAFETY: passed on, entry by entry.
                    unsafe { self.store_for_free(first.add(index), value) };
                }
            }
        }
        // Zeros are the price of a table, not of its entries.
        if value != 0 || step != 0 {
            self.entries.update(|n| n + count as u64);
            cpu.spend(self.costs.entry * count as u64);
        }
    }

    /// A store of a run, which is paid for as a whole.
    #[inline(always)]
    pub(super) unsafe fn store_for_free(&self, entry: *mut u64, bits: u64) {
        let cpu = self.cpu();
        match self.hardware.spot(entry) {
            Some(spot) => {
                self.share(cpu, &spot, true);
                // SAFETY: passed on.
                unsafe {
                    self.hardware.store(cpu.id(), &spot, entry, bits, How::Plain);
                }
            }
            // SAFETY: valid by (1.).
            None => unsafe { entry.write(bits) },
        }
    }
}
