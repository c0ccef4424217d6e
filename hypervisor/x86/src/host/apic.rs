//! The interrupt controller of a vCPU, an x2APIC: it is there from the beginning, in that mode, and
//! has no memory (APM vol. 2 16.9; SDM vol. 3A 12.12).
//!
//! Other processors request interrupts of a vCPU in its [`Vcpu`]; the rest is its own processor's.

use core::sync::atomic::Ordering;

use crate::clock::{self, Clock};
use crate::count::count;
use crate::counters::Count;
use crate::vcpu::{Vcpu, highest};
use crate::vmcb::NoRegister;
use crate::world::World;

// Registers, by their numbers from 0x800 on.
const ID: u32 = 0x02;
const VERSION: u32 = 0x03;
const TASK: u32 = 0x08;
const PRIORITY: u32 = 0x0a;
const END: u32 = 0x0b;
const LOGICAL: u32 = 0x0d;
const SPURIOUS: u32 = 0x0f;
const IN_SERVICE: u32 = 0x10;
const LEVEL: u32 = 0x18;
const REQUESTED: u32 = 0x20;
const ERRORS: u32 = 0x28;
const COMMAND: u32 = 0x30;
const LOCAL: u32 = 0x32;
const LOCAL_LAST: u32 = 0x37;
const TIMER_FROM: u32 = 0x38;
const TIMER_NOW: u32 = 0x39;
const TIMER_DIVIDE: u32 = 0x3e;
const SELF: u32 = 0x3f;

/// 6 local vectors, an integrated controller.
const VERSION_VALUE: u64 = 0x0005_0014;
const MASKED: u32 = 1 << 16;
/// Of the timer's local vector: how it counts.
const PERIODIC: u32 = 1 << 17;
const DEADLINE: u32 = 1 << 18;

/// The part that only the vCPU's own processor uses.
pub struct Apic {
    in_service: [u32; 8],
    spurious: u32,
    /// Timer, thermal, performance, LINT0, LINT1, errors.
    local: [u32; 6],
    divide: u32,
    timer_from: u32,
    /// Cycles from one tick of a timer that comes again to the next; 0 if it does not.
    period: u64,
    /// When the timer is due, by the guest's counter; 0 is never.
    due: u64,
}

impl Apic {
    /// A controller after a reset.
    pub fn new() -> Self {
        Self {
            in_service: [0; 8],
            spurious: 0xff,
            local: [MASKED; 6],
            divide: 0,
            timer_from: 0,
            period: 0,
            due: 0,
        }
    }

    /// The vector that is to be delivered, if its class is above the task's and that of what is in
    /// service.
    pub fn pending(&self, vcpu: &Vcpu, task: u64) -> Option<u8> {
        let vector = vcpu.requests.highest()?;
        let served = highest(self.in_service.iter().rev().copied()).unwrap_or(0);
        let class = (task as u8 >> 4).max(served >> 4);
        (vector >> 4 > class).then_some(vector)
    }

    /// Delivers it.
    pub fn take(&mut self, vcpu: &Vcpu, vector: u8) {
        vcpu.requests.take(vector);
        self.in_service[usize::from(vector) / 32] |= 1 << (vector % 32);
    }

    fn end(&mut self) {
        if let Some(vector) = highest(self.in_service.iter().rev().copied()) {
            self.in_service[usize::from(vector) / 32] &= !(1 << (vector % 32));
        }
    }

    // ---- The timer ----

    /// When the timer is due, by the guest's counter.
    pub fn due(&self) -> Option<u64> {
        Some(self.due).filter(|due| *due != 0)
    }

    /// Posts the timer's interrupt, if it is due.
    pub fn tick(&mut self, vcpu: &Vcpu, now: u64) {
        if self.due == 0 || now < self.due {
            return;
        }
        self.due = match self.period {
            0 => 0,
            period => now + period - (now - self.due) % period,
        };
        let timer = self.local[0];
        if timer & MASKED == 0 {
            vcpu.requests.post(timer as u8);
        }
    }

    fn start_timer(&mut self) {
        let timer = self.local[0];
        if timer & DEADLINE != 0 {
            return;
        }
        // Bits 3, 1 and 0: 2, 4, 8, ... 128, 1.
        let shift = ((self.divide & 3 | self.divide >> 1 & 4) + 1) % 8;
        let ns = u64::from(self.timer_from) << shift;
        let cycles = Clock::get().cycles(ns);
        self.period = match timer & PERIODIC {
            0 => 0,
            _ => cycles.max(1),
        };
        self.due = match self.timer_from {
            0 => 0,
            _ => clock::guest_now() + cycles,
        };
    }

    /// When the timer is due, as the guest has set it.
    pub fn deadline(&self) -> u64 {
        match self.local[0] & DEADLINE {
            0 => 0,
            _ => self.due,
        }
    }

    /// Sets when the timer is due.
    pub fn set_deadline(&mut self, at: u64) {
        if self.local[0] & DEADLINE != 0 {
            (self.due, self.period) = (at, 0);
        }
    }

    // ---- Registers ----

    /// Reads one.
    ///
    /// # Errors
    /// There is no such register that can be read.
    pub fn read(&self, vcpu: &Vcpu, register: u32, task: u64) -> Result<u64, NoRegister> {
        let word = |words: &[u32; 8], from: u32| u64::from(words[(register - from) as usize]);
        Ok(match register {
            ID => vcpu.number.into(),
            VERSION => VERSION_VALUE,
            TASK | PRIORITY => task,
            LOGICAL => logical(vcpu.number).into(),
            SPURIOUS => self.spurious.into(),
            IN_SERVICE..LEVEL => word(&self.in_service, IN_SERVICE),
            LEVEL..REQUESTED | ERRORS => 0,
            REQUESTED..ERRORS => vcpu.requests.word((register - REQUESTED) as usize).into(),
            COMMAND => 0,
            LOCAL..=LOCAL_LAST => self.local[(register - LOCAL) as usize].into(),
            TIMER_FROM => self.timer_from.into(),
            TIMER_NOW => match self.due {
                0 => 0,
                due => Clock::get().ns(due.saturating_sub(clock::guest_now())),
            },
            TIMER_DIVIDE => self.divide.into(),
            _ => return Err(NoRegister),
        })
    }

    /// Writes one; that of the task's priority is its owner's.
    ///
    /// # Errors
    /// There is no such register that can be written.
    pub fn write(
        &mut self,
        world: &World,
        vcpu: &Vcpu,
        register: u32,
        value: u64,
    ) -> Result<(), NoRegister> {
        if register != COMMAND && value >> 32 != 0 {
            return Err(NoRegister);
        }
        let low = value as u32;
        match register {
            END => {
                count(Count::Ends, 1);
                self.end();
            }
            SPURIOUS => self.spurious = low,
            ERRORS => {}
            COMMAND => {
                count(Count::Commands, 1);
                command(world, vcpu, value);
            }
            LOCAL..=LOCAL_LAST => {
                let index = (register - LOCAL) as usize;
                if index == 0 && (low ^ self.local[0]) & (PERIODIC | DEADLINE) != 0 {
                    (self.due, self.period) = (0, 0);
                }
                self.local[index] = low & 0x0007_f7ff;
            }
            TIMER_FROM => {
                count(Count::Timers, 1);
                self.timer_from = low;
                self.start_timer();
            }
            TIMER_DIVIDE => self.divide = low & 0b1011,
            SELF => {
                count(Count::Ipis, 1);
                vcpu.requests.post(low as u8);
            }
            _ => return Err(NoRegister),
        }
        Ok(())
    }
}

/// The logical number: the cluster, and a bit in it (SDM vol. 3A 12.12.10.2).
fn logical(number: u32) -> u32 {
    number >> 4 << 16 | 1 << (number & 0xf)
}

/// Carries out a command to other vCPUs.
fn command(world: &World, from: &Vcpu, value: u64) {
    let (vector, mode, to) = (value as u8, value >> 8 & 7, (value >> 32) as u32);
    let is_logical = value >> 11 & 1 != 0;
    let is_for = |vcpu: &Vcpu| match value >> 18 & 3 {
        1 => vcpu.number == from.number,
        2 => true,
        3 => vcpu.number != from.number,
        _ if to == u32::MAX => true,
        _ if is_logical => {
            let number = logical(vcpu.number);
            number >> 16 == to >> 16 && number & to & 0xffff != 0
        }
        _ => vcpu.number == to,
    };
    for vcpu in world.vcpus.iter().filter(|vcpu| is_for(vcpu)) {
        count(Count::Ipis, 1);
        match mode {
            // Fixed, and to one of the lowest priority, which here is each that is named.
            0 | 1 => vcpu.requests.post(vector),
            4 => vcpu.nmi.store(true, Ordering::Release),
            // INIT; the one that ends it changes nothing.
            5 if value >> 14 & 1 != 0 => vcpu.reset(),
            6 => vcpu.start(vector),
            _ => continue,
        }
        world.wake(vcpu);
    }
}
