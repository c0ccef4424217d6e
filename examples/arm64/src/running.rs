//! Processes on processors: each behind its lock, with an identity of its own; programs, and what
//! they fault for.

use alloc::format;
use alloc::string::{String, ToString as _};
use core::fmt;
use core::ops::Range;

use spin::mutex::SpinMutexGuard;
use spin::once::Once;
use tablewright::Va;
use tablewright::format::Arm64K4;
use tablewright::shootdown::{Allocator, Holder, Identifiers, Identity};
use tablewright_processes::{HEAP, Handled, PAGE, Process, ProcessError};

use crate::boot;
use crate::frames::{self, Lock, Pool, Tables, ids};
use crate::user::{Program, Registers, Stop};

/// The result of work, or why it has failed.
pub type Done = Result<(), String>;

/// A process of this kernel.
pub type Running = Process<Arm64K4, Tables, &'static Pool>;

/// The processes, each behind its lock.
pub static PROCESSES: [Lock<Option<Running>>; 2] = [const { Lock::new(None) }; 2];
/// Identities under which processors have them loaded.
pub static IDENTITIES: [Identity; 2] = [const { Identity::new() }; 2];
static IDENTIFIERS: Once<Identifiers<'static>> = Once::new();
static ALLOCATOR: Once<Lock<Allocator<'static>>> = Once::new();

/// Makes the identifiers that processes are given: as many as the processors can tell apart.
pub fn set_up() -> Result<(), &'static str> {
    const BITS: u32 = 16;
    static WORDS: Lock<[u64; Allocator::words(BITS)]> = Lock::new([0; Allocator::words(BITS)]);
    static HOLDERS: Lock<[Holder; 2]> = Lock::new([const { Holder::new() }; 2]);
    let words = SpinMutexGuard::leak(WORDS.lock());
    let holders = SpinMutexGuard::leak(HOLDERS.lock());
    let allocator = Allocator::new(ids().asid_bits(), words).ok_or("too few identifiers")?;
    let identifiers = Identifiers::new(&allocator, holders).ok_or("too few identifiers")?;
    IDENTIFIERS.call_once(|| identifiers);
    ALLOCATOR.call_once(|| Lock::new(allocator));
    Ok(())
}

/// Does something with a process, under its lock.
pub fn with<T>(number: usize, call: impl FnOnce(&mut Running) -> T) -> Result<T, String> {
    match PROCESSES[number].lock().as_mut() {
        Some(process) => Ok(call(process)),
        None => Err(format!("there is no process {number}")),
    }
}

/// Loads a process on this processor.
pub fn load(cpu: usize, number: usize) -> Done {
    let identifiers = IDENTIFIERS.get().ok_or("no identifiers")?;
    let allocator = ALLOCATOR.get().ok_or("no identifiers")?;
    let identity = &IDENTITIES[number];
    let forget = || frames::cpu().forget_all();
    // SAFETY: this processor, which takes no interrupts here (1.), and the one allocator (2.);
    // `forget_all` waits (3.), and nothing else is loaded (4.).
    let switch =
        unsafe { identifiers.switch(cpu, identity, |with| with(&mut allocator.lock()), forget) };
    let (root, id) = switch.ok_or("no process is live, or a processor without identifiers")?;
    // SAFETY: a process is live, and exits when its processor has left it (1.); this is what this
    // processor was told last, with no interrupt between (2.).
    unsafe { boot::load(root, id) };
    Ok(())
}

/// Counts of the faults of a program.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    pub mapped: u64,
    pub copied: u64,
    pub owned: u64,
    pub already: u64,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mapped, copied, owned, already } = self;
        write!(f, "faults: {mapped} mapped, {copied} copied, ")?;
        write!(f, "{owned} owned, {already} done already")
    }
}

/// How a program ended.
#[derive(PartialEq, Eq)]
enum End {
    /// By itself, with so many pages left.
    Left(u64),
    /// It may not do what it tried at this address.
    Refused(Va),
}

/// Runs a program of the process that this processor has loaded, on these pages of its heap.
fn execute(
    number: usize,
    program: Program,
    pages: Range<u64>,
    word: u64,
) -> Result<(End, Faults), String> {
    let first = HEAP + pages.start * PAGE;
    let (count, word) = (pages.end - pages.start, word + pages.start);
    let mut registers = Registers::new(program, first, count, word);
    let mut faults = Faults::default();
    loop {
        // SAFETY: this processor has it loaded.
        let fault = match unsafe { registers.run() } {
            Stop::Ended(left) => return Ok((End::Left(left), faults)),
            Stop::Fault(fault) => fault,
            Stop::Other(syndrome) => return Err(format!("a program ends by {syndrome:#x}")),
        };
        *match with(number, |process| process.fault(fault))? {
            Ok(Handled::Mapped) => &mut faults.mapped,
            Ok(Handled::Copied) => &mut faults.copied,
            Ok(Handled::Owned) => &mut faults.owned,
            Ok(Handled::Already) => &mut faults.already,
            Err(ProcessError::Refused(at)) => return Ok((End::Refused(at), faults)),
            Err(error) => return Err(error.to_string()),
        } += 1;
        // A processor that remembers what it should have forgotten.
        if faults.already > count {
            return Err(format!("{} faults again and again", fault.at));
        }
    }
}

/// Runs one that comes to its end, and takes these faults.
pub fn run(
    number: usize,
    program: Program,
    pages: Range<u64>,
    word: u64,
    expected: Faults,
) -> Done {
    let (end, faults) = execute(number, program, pages.clone(), word)?;
    match end {
        End::Left(0) if faults == expected => Ok(()),
        End::Left(0) => Err(format!("{faults}; expected: {expected}")),
        End::Left(left) => {
            let at = pages.end - left;
            Err(format!("process {number} reads another word in page {at}"))
        }
        End::Refused(at) => Err(format!("process {number} may not use {at}")),
    }
}

/// Checks what the process reads in these pages.
pub fn reads(number: usize, pages: Range<u64>, word: u64) -> Done {
    run(number, Program::Read, pages, word, Faults::default())
}

/// The process may not write this page.
pub fn refused(number: usize, page: u64) -> Done {
    let (end, _) = execute(number, Program::Write, page..page + 1, 0)?;
    match end == End::Refused(Va::new(HEAP + page * PAGE)) {
        true => Ok(()),
        false => Err(format!("process {number} can write page {page}")),
    }
}

/// The process that this processor has loaded exits.
pub fn exit(number: usize) -> Done {
    boot::leave();
    let process = PROCESSES[number].lock().take();
    let process = process.ok_or_else(|| format!("there is no process {number}"))?;
    // SAFETY: each process is loaded on one processor, which has just left it (1.), under the
    // identifier of its platform (2.).
    unsafe { process.exit() };
    Ok(())
}
