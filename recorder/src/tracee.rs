//! A thread of another process: stopped for a short time, and made to do a system call.
//!
//! # It goes on
//!
//! A thread is traced only while a [`Tracee`] lives, and dropping that lets it go. If the recorder
//! dies, the kernel lets it go: it was seized, not stopped by a signal. The one time at which a
//! death of the recorder (by a signal that cannot be caught) harms the program is between the first
//! change of a register and the last, some ten microseconds.
//!
//! # It does not notice
//!
//! The system call is made by an instruction that is in the process already, so no code of it is
//! changed. All signals are blocked meanwhile. A system call that was interrupted is restarted by
//! the kernel, which decides that when a thread leaves a stop that was asked for, by its registers.
//! After a stop at the end of a system call it need not decide anything. So registers are given
//! back in a second stop of the first kind. A restartable sequence that it was in is noted again,
//! so that the kernel aborts it as it does after any preemption.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use libc::{c_int, pid_t};

use crate::sys::{self, Go, Registers, Stop};

/// A thread stops at once unless it waits for a device.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a thread cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It is gone.
    #[error("it has ended")]
    Ended,
    /// It does not react.
    #[error("it did not stop for {} s: it waits for a device", PATIENCE.as_secs())]
    Stuck,
    /// The kernel refuses.
    #[error("{what}: {error}")]
    Kernel {
        /// The call that was tried.
        what: &'static str,
        /// Why not.
        error: io::Error,
    },
    /// There is no instruction for a system call in it.
    #[error("no instruction for system calls found in it")]
    NoGate,
    /// Its registers are not known here.
    #[error("this program does not know the registers of this processor")]
    Processor,
}

fn kernel(what: &'static str) -> impl Fn(io::Error) -> TraceError {
    move |error| match error.raw_os_error() {
        Some(libc::ESRCH | libc::ECHILD) => TraceError::Ended,
        _ => TraceError::Kernel { what, error },
    }
}

/// A thread that is stopped until this is dropped.
pub struct Tracee {
    tid: pid_t,
    since: Instant,
    /// Signals that came while none could be delivered.
    held: Vec<c_int>,
}

impl Tracee {
    /// Stops a thread. `past_seccomp`: its filter of system calls does not apply while it is
    /// traced.
    pub fn stop(tid: pid_t, past_seccomp: bool) -> Result<Self, TraceError> {
        sys::seize(tid, past_seccomp).map_err(kernel("ptrace"))?;
        let tracee = Self { tid, since: Instant::now(), held: Vec::new() };
        sys::interrupt(tid).map_err(kernel("ptrace"))?;
        tracee.pause()?;
        Ok(tracee)
    }

    /// Its number.
    pub fn tid(&self) -> pid_t {
        self.tid
    }

    /// For how long it has been stopped.
    pub fn stopped(&self) -> Duration {
        self.since.elapsed()
    }

    /// Waits for the stop that was asked for, and lets everything else pass.
    fn pause(&self) -> Result<(), TraceError> {
        loop {
            match self.wait()? {
                Stop::Asked => return Ok(()),
                Stop::Signal(signal) => self.go(Go::On, signal)?,
                Stop::SystemCall | Stop::Other => self.go(Go::On, 0)?,
                Stop::Ended => return Err(TraceError::Ended),
            }
        }
    }

    fn go(&self, how: Go, signal: c_int) -> Result<(), TraceError> {
        sys::go(self.tid, how, signal).map_err(kernel("ptrace"))
    }

    fn wait(&self) -> Result<Stop, TraceError> {
        let start = Instant::now();
        loop {
            if let Some(stop) = sys::reported(self.tid).map_err(kernel("waitpid"))? {
                return Ok(stop);
            }
            let waited = start.elapsed();
            if waited > PATIENCE {
                return Err(TraceError::Stuck);
            }
            // Usually it is there before one could sleep.
            if waited > Duration::from_micros(200) {
                std::thread::sleep(Duration::from_micros(100));
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Has it make system calls at `gate`, an instruction of it for that, and puts everything back.
    pub fn calls<T>(
        &mut self,
        memory: &File,
        gate: u64,
        make: impl FnOnce(&mut Caller) -> Result<T, TraceError>,
    ) -> Result<T, TraceError> {
        let tid = self.tid;
        let registers = sys::registers(tid).map_err(kernel("registers"))?;
        let mask = sys::signal_mask(tid).map_err(kernel("signal mask"))?;
        let sequence = sys::restartable_sequence(tid).and_then(|place| {
            let mut address = [0; 8];
            memory.read_exact_at(&mut address, place).ok()?;
            (address != [0; 8]).then_some((place, address))
        });
        sys::set_signal_mask(tid, u64::MAX).map_err(kernel("signal mask"))?;
        let result = make(&mut Caller { tracee: self, registers, gate });
        // Whatever came of it.
        let back = sys::interrupt(tid)
            .map_err(kernel("ptrace"))
            .and_then(|()| self.go(Go::On, 0))
            .and_then(|()| self.pause());
        sys::set_registers(tid, registers).map_err(kernel("registers"))?;
        sys::set_signal_mask(tid, mask).map_err(kernel("signal mask"))?;
        if let Some((place, address)) = sequence {
            memory.write_all_at(&address, place).map_err(kernel("memory"))?;
        }
        back?;
        result
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        // It may be gone, and then all is well.
        let _ = sys::go(self.tid, Go::Free, 0);
        for &signal in &self.held {
            sys::send(self.tid, signal);
        }
    }
}

/// Makes system calls in another process.
pub struct Caller<'a> {
    tracee: &'a mut Tracee,
    registers: Registers,
    gate: u64,
}

impl Caller<'_> {
    /// One system call. What it returns is an error number if it is negative.
    pub fn call(&mut self, number: i64, argument: u64) -> Result<i64, TraceError> {
        let tid = self.tracee.tid;
        let mut registers = self.registers;
        arch::prepare(&mut registers, self.gate, number, argument);
        sys::set_registers(tid, registers).map_err(kernel("registers"))?;
        let mut ends = 2;
        self.tracee.go(Go::ToSystemCall, 0)?;
        loop {
            match self.tracee.wait()? {
                Stop::SystemCall => ends -= 1,
                Stop::Ended => return Err(TraceError::Ended),
                // The instruction was not there.
                Stop::Signal(libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGTRAP) => {
                    return Err(TraceError::NoGate);
                }
                // Only those that cannot be blocked come here.
                Stop::Signal(signal) => self.tracee.held.push(signal),
                Stop::Asked | Stop::Other => (),
            }
            if ends == 0 {
                break;
            }
            self.tracee.go(Go::ToSystemCall, 0)?;
        }
        let registers = sys::registers(tid).map_err(kernel("registers"))?;
        Ok(arch::result(&registers))
    }
}

/// Finds an instruction for system calls in executable memory, given as addresses.
pub fn gate(
    memory: &File,
    executable: impl Iterator<Item = (u64, u64)>,
) -> Result<u64, TraceError> {
    if arch::GATE.is_empty() {
        return Err(TraceError::Processor);
    }
    for (start, end) in executable {
        // The first MiB of each will do: the vDSO has two pages, and the C library has hundreds of
        // them.
        let mut code = vec![0; (end - start).min(1 << 20) as usize];
        if memory.read_exact_at(&mut code, start).is_err() {
            continue;
        }
        let places = code.windows(arch::GATE.len()).enumerate();
        let aligned = places.step_by(arch::ALIGN);
        for (offset, bytes) in aligned {
            if bytes == arch::GATE {
                return Ok(start + offset as u64);
            }
        }
    }
    Err(TraceError::NoGate)
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use super::Registers;

    /// `syscall`
    pub const GATE: &[u8] = &[0x0f, 0x05];
    pub const ALIGN: usize = 1;

    pub fn prepare(registers: &mut Registers, gate: u64, number: i64, argument: u64) {
        registers.rip = gate;
        // No error code any more, so what was interrupted is not restarted now.
        registers.rax = number as u64;
        registers.rdi = argument;
    }

    pub fn result(registers: &Registers) -> i64 {
        registers.rax as i64
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use super::Registers;

    /// `svc #0`
    pub const GATE: &[u8] = &[0x01, 0x00, 0x00, 0xd4];
    pub const ALIGN: usize = 4;

    pub fn prepare(registers: &mut Registers, gate: u64, number: i64, argument: u64) {
        registers.pc = gate;
        registers.regs[8] = number as u64;
        registers.regs[0] = argument;
    }

    pub fn result(registers: &Registers) -> i64 {
        registers.regs[0] as i64
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod arch {
    use super::Registers;

    pub const GATE: &[u8] = &[];
    pub const ALIGN: usize = 1;

    pub fn prepare(_: &mut Registers, _: u64, _: i64, _: u64) {}

    pub fn result(_: &Registers) -> i64 {
        -1
    }
}
