//! A kernel whose processes fork, at EL1 on two processors, with no hypervisor.
//!
//! A process is that of the crate `tablewright-processes`, behind a lock; its programs run at EL0. The parent writes its heap for
//! the first time, and forks; the child writes on the second processor while the parent reads on the first; the parent protects;
//! the child exits. Each program proves by what it reads, and by the faults that it takes, what it may do and whose memory it
//! has. Then the processor is asked what it makes of each page (`AT S1E0R`, `AT S1E0W`), and so is a walker that shares no code
//! with the engine. At the end there are as many free frames as at the start.
//!
//! Before and after each step there is a mark, by which the emulator tells what to count (`xtask/plugin`). The steps, and what is
//! expected of each, are those of that crate, which the software machine goes through as well.
#![no_std]
#![no_main]

extern crate alloc;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;
mod boot;
mod frames;
mod user;

use alloc::format;
use alloc::string::{String, ToString as _};
use core::arch::asm;
use core::fmt::{self, Write as _};
use core::ops::Range;
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, Ordering};

use buddy_system_allocator::LockedHeap;
use spin::mutex::SpinMutexGuard;
use spin::once::Once;
use spin::relax::RelaxStrategy as _;
use tablewright::format::Arm64K4;
use tablewright::shootdown::{Allocator, Holder, Identifiers, Identity};
use tablewright::{Pa, Span, Va};
use tablewright_processes::{
    COPIES, HEAP, Handled, Memory as _, PAGE, PAGES, Process, ProcessError, Step, TEXT,
};
use tablewright_walker::{Granule, Regime, translate};

use common::Console;
use frames::{Lock, POOL, Pool, Tables, Yield};
use user::{Program, Registers, Stop};

/// What the console's lines begin with.
const NAME: &str = "processes";

const PARENT: usize = 0;
const CHILD: usize = 1;

/// Words in the first page: as the parent writes them first, the child, and the parent again. Each page has the next.
const FIRST: u64 = 0x1000_0000;
const CHILDS: u64 = 0x2000_0000;
const AGAIN: u64 = 0x3000_0000;

/// What work comes to, and why it has failed.
type Done = Result<(), String>;

type Running = Process<Arm64K4, Tables, &'static Pool>;

/// The processes, each behind its lock.
static PROCESSES: [Lock<Option<Running>>; 2] = [const { Lock::new(None) }; 2];
static IDENTITIES: [Identity; 2] = [const { Identity::new() }; 2];
static HOLDERS: [Holder; 2] = [const { Holder::new() }; 2];
static IDENTIFIERS: Once<Identifiers<'static>> = Once::new();
static ALLOCATOR: Once<Lock<Allocator<'static>>> = Once::new();

/// For the lists of areas, and what is said of mistakes.
#[global_allocator]
static HEAP_MEMORY: LockedHeap<32> = LockedHeap::empty();

// ---- Processes on processors ----

fn with<T>(number: usize, call: impl FnOnce(&mut Running) -> T) -> Result<T, String> {
    match PROCESSES[number].lock().as_mut() {
        Some(process) => Ok(call(process)),
        None => Err(format!("there is no process {number}")),
    }
}

/// Loads a process on this processor.
fn load(cpu: usize, number: usize) -> Done {
    let identifiers = IDENTIFIERS.get().ok_or("no identifiers")?;
    let allocator = ALLOCATOR.get().ok_or("no identifiers")?;
    let identity = &IDENTITIES[number];
    let forget = || {
        instruct!("tlbi vmalle1");
        instruct!("dsb nsh");
        instruct!("isb");
    };
    let switch = identifiers.switch(cpu, identity, |with| with(&mut allocator.lock()), forget);
    let switch = switch.ok_or("no process is live, or a processor without identifiers")?;
    // SAFETY: a process is live, and exits when its processor has left it (1.); this is what this processor was told last, with
    // no interrupt between (2.).
    unsafe { boot::load(switch) };
    Ok(())
}

/// What was done for the faults of a program.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Faults {
    mapped: u64,
    copied: u64,
    owned: u64,
    already: u64,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            mapped,
            copied,
            owned,
            already,
        } = self;
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
fn run(number: usize, program: Program, pages: Range<u64>, word: u64, expected: Faults) -> Done {
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

/// What the process reads in these pages is what it should.
fn reads(number: usize, pages: Range<u64>, word: u64) -> Done {
    run(number, Program::Read, pages, word, Faults::default())
}

/// The process may not write this page.
fn refused(number: usize, page: u64) -> Done {
    let (end, _) = execute(number, Program::Write, page..page + 1, 0)?;
    match end == End::Refused(Va::new(HEAP + page * PAGE)) {
        true => Ok(()),
        false => Err(format!("process {number} can write page {page}")),
    }
}

/// Where the processor says that an address of the program's is, for a read and for a write.
fn asked(at: u64) -> (Option<u64>, Option<u64>) {
    let (read, write): (u64, u64);
    // SAFETY: asks, and writes a register that has no other user.
    unsafe {
        asm!(
            "at s1e0r, {at}", "isb", "mrs {read}, par_el1",
            "at s1e0w, {at}", "isb", "mrs {write}, par_el1",
            at = in(reg) at, read = out(reg) read, write = out(reg) write, options(nostack)
        );
    }
    let of = |result: u64| (result & 1 == 0).then_some(result & 0xffff_ffff_f000 | at & 0xfff);
    (of(read), of(write))
}

/// Whether the processor, which has the process loaded, and the walker say the same of each page of the heap, of those beside it
/// and of the program; and whether so many pages of the heap may be written.
fn check(number: usize, writable: u64) -> Done {
    let root = with(number, |process| process.space().root())?;
    let regime = Regime::Arm64Stage1 {
        granule: Granule::K4,
        wide: false,
    };
    let mut read = |table: u64, index: usize| {
        // SAFETY: a table of the process, or whatever memory the walker is led to.
        unsafe {
            frames::pointer::<u64>(Pa::new(table))
                .add(index)
                .read_volatile()
        }
    };
    let heap = (0..PAGES).map(|page| HEAP + page * PAGE);
    let others = [TEXT, TEXT + PAGE, HEAP - PAGE, HEAP + PAGES * PAGE, 0];
    let mut found = 0;
    for at in heap.chain(others).map(|page| page + 8) {
        let leaf = translate(regime, root.get(), at, &mut read).ok();
        let where_if = |may: bool| leaf.filter(|_| may).map(|leaf| leaf.physical(at));
        let user = leaf.map(|leaf| leaf.access.user);
        let expected = (
            where_if(user.is_some_and(|user| user.read)),
            where_if(user.is_some_and(|user| user.write)),
        );
        let got = asked(at);
        if got != expected {
            return Err(format!(
                "{at:#x} of process {number}: the processor says {got:x?}, the walker {expected:x?}"
            ));
        }
        found += u64::from(got.1.is_some());
    }
    match found == writable {
        true => Ok(()),
        false => Err(format!(
            "process {number} may write {found} pages, and should {writable}"
        )),
    }
}

// ---- The second processor ----

/// What it is to do, and what that has come to.
static TASK: Lock<Option<fn() -> Done>> = Lock::new(None);
static ANSWER: Lock<Option<Done>> = Lock::new(None);

/// Has the second processor do something, and this one something else, again and again, until that is done.
fn on_second(task: fn() -> Done, mut meanwhile: impl FnMut() -> Done) -> Done {
    *TASK.lock() = Some(task);
    loop {
        let answer = ANSWER.lock().take();
        match answer {
            Some(answer) => return answer,
            None => meanwhile()?,
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn second_main() -> ! {
    if let Err(why) = boot::settle() {
        end(format_args!("WRONG: {why}"));
    }
    loop {
        let task = TASK.lock().take();
        match task {
            Some(task) => {
                let answer = task();
                *ANSWER.lock() = Some(answer);
            }
            None => Yield::relax(),
        }
    }
}

// ---- The steps ----

fn mark<const NUMBER: u16>() {
    // SAFETY: does nothing. A compiler barrier: no `nomem`.
    unsafe { asm!("movz xzr, #{}", const NUMBER, options(nostack, preserves_flags)) }
}

/// Does what the emulator is to count.
fn counted<const STEP: u16, T>(step: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    mark::<STEP>();
    let done = step();
    mark::<0>();
    done
}

fn heap() -> Result<Span<Va>, String> {
    Span::new(Va::new(HEAP), PAGES * PAGE).map_err(|error| error.to_string())
}

fn page(at: u64) -> Result<Span<Va>, String> {
    Span::new(Va::new(at), PAGE).map_err(|error| error.to_string())
}

/// A step has come out right.
fn say(step: Step, what: fmt::Arguments<'_>) {
    let _ = writeln!(Console, "{NAME}: {}: {what}", step.name());
}

fn start() -> Done {
    let said = |error: ProcessError| error.to_string();
    let program = POOL.take().ok_or("no memory for the program")?;
    user::install(program);
    let mut parent = Process::new(Tables::of(&IDENTITIES[PARENT]), 0, &POOL).map_err(said)?;
    parent.map_text(page(TEXT)?, program).map_err(said)?;
    parent.reserve(heap()?, true).map_err(said)?;
    *PROCESSES[PARENT].lock() = Some(parent);
    load(0, PARENT)
}

fn demand() -> Done {
    check(PARENT, 0)?;
    let expected = Faults {
        mapped: PAGES,
        ..Faults::default()
    };
    counted::<{ Step::Demand.number() }, _>(|| {
        run(PARENT, Program::Write, 0..PAGES, FIRST, expected)
    })?;
    reads(PARENT, 0..PAGES, FIRST)?;
    check(PARENT, PAGES)?;
    say(Step::Demand, format_args!("{PAGES} pages mapped"));
    Ok(())
}

fn fork() -> Done {
    let child = counted::<{ Step::Fork.number() }, _>(|| {
        let forked = with(PARENT, |parent| {
            parent.fork(Tables::of(&IDENTITIES[CHILD]), 0)
        })?;
        forked.map_err(|error| error.to_string())
    })?;
    *PROCESSES[CHILD].lock() = Some(child);
    check(PARENT, 0)?;
    // Both have all of it; the second processor remembers what it reads.
    on_second(
        || {
            load(1, CHILD)?;
            check(CHILD, 0)?;
            reads(CHILD, 0..PAGES, FIRST)
        },
        || Ok(()),
    )?;
    reads(PARENT, 0..PAGES, FIRST)?;
    say(Step::Fork, format_args!("{PAGES} pages shared"));
    Ok(())
}

fn copy() -> Done {
    let before = POOL.copied();
    let mut rounds = 0u32;
    let write = || {
        counted::<{ Step::Copy.number() }, _>(|| {
            let expected = Faults {
                copied: COPIES,
                ..Faults::default()
            };
            run(CHILD, Program::Write, 0..COPIES, CHILDS, expected)
        })
    };
    on_second(write, || {
        rounds += 1;
        reads(PARENT, 0..PAGES, FIRST)
    })?;
    if POOL.copied() - before != COPIES {
        return Err(format!("{} pages were copied", POOL.copied() - before));
    }
    childs_words()?;
    reads(PARENT, 0..PAGES, FIRST)?;
    check(PARENT, 0)?;
    let what = "pages copied on the second processor; the first has read all of its own meanwhile";
    let round = if rounds == 1 { "time" } else { "times" };
    say(
        Step::Copy,
        format_args!("{COPIES} {what}, {rounds} {round}"),
    );
    Ok(())
}

/// The child has its own words where it has written, and its parent's first elsewhere.
fn childs_words() -> Done {
    on_second(
        || {
            reads(CHILD, 0..COPIES, CHILDS)?;
            reads(CHILD, COPIES..PAGES, FIRST)?;
            check(CHILD, COPIES)
        },
        || Ok(()),
    )
}

fn reuse() -> Done {
    let before = POOL.copied();
    let expected = Faults {
        owned: COPIES,
        ..Faults::default()
    };
    counted::<{ Step::Reuse.number() }, _>(|| {
        run(PARENT, Program::Write, 0..COPIES, AGAIN, expected)
    })?;
    if POOL.copied() != before {
        return Err("a page that has one user was copied".into());
    }
    check(PARENT, COPIES)?;
    let rest = Faults {
        copied: PAGES - COPIES,
        ..Faults::default()
    };
    run(PARENT, Program::Write, 0..PAGES, AGAIN, rest)?;
    reads(PARENT, 0..PAGES, AGAIN)?;
    check(PARENT, PAGES)?;
    childs_words()?;
    say(
        Step::Reuse,
        format_args!("{COPIES} pages taken over without a copy"),
    );
    Ok(())
}

fn protect() -> Done {
    let protect = |span, writable| {
        let done = with(PARENT, |parent| parent.protect(span, writable))?;
        done.map_err(|error| error.to_string())
    };
    let first = page(HEAP)?;
    counted::<{ Step::ProtectPage.number() }, _>(|| protect(first, false))?;
    refused(PARENT, 0)?;
    reads(PARENT, 0..PAGES, AGAIN)?;
    run(PARENT, Program::Write, 1..2, AGAIN, Faults::default())?;
    check(PARENT, PAGES - 1)?;
    say(
        Step::ProtectPage,
        format_args!("1 page, which the program may not write"),
    );

    counted::<{ Step::Allow.number() }, _>(|| protect(first, true))?;
    let owned = Faults {
        owned: 1,
        ..Faults::default()
    };
    run(PARENT, Program::Write, 0..PAGES, AGAIN, owned)?;
    check(PARENT, PAGES)?;
    say(
        Step::Allow,
        format_args!("1 page, which it may write again"),
    );

    let all = heap()?;
    counted::<{ Step::ProtectAll.number() }, _>(|| protect(all, false))?;
    for page in (0..PAGES).step_by(64).chain([PAGES - 1]) {
        refused(PARENT, page)?;
    }
    reads(PARENT, 0..PAGES, AGAIN)?;
    check(PARENT, 0)?;
    childs_words()?;
    say(
        Step::ProtectAll,
        format_args!("{PAGES} pages, none of which it may write"),
    );
    Ok(())
}

/// The process that this processor has loaded exits.
fn exit(number: usize) -> Done {
    boot::leave();
    let process = PROCESSES[number].lock().take();
    let process = process.ok_or_else(|| format!("there is no process {number}"))?;
    // SAFETY: each process is loaded on one processor, which has just left it (1.), under the identifier of its platform (2.).
    unsafe { process.exit() };
    Ok(())
}

fn all() -> Done {
    let before = POOL.free();
    start()?;
    demand()?;
    let alone = POOL.free();
    fork()?;
    copy()?;
    reuse()?;
    protect()?;
    on_second(
        || counted::<{ Step::Exit.number() }, _>(|| exit(CHILD)),
        || Ok(()),
    )?;
    // The parent has as many pages as before, each its own, and as many tables.
    reads(PARENT, 0..PAGES, AGAIN)?;
    check(PARENT, 0)?;
    let left = POOL.free();
    if left != alone {
        return Err(format!("{left} frames are free, and were {alone}"));
    }
    exit(PARENT)?;
    let left = POOL.free();
    if left != before {
        return Err(format!("{left} frames are free, and were {before}"));
    }
    say(
        Step::Exit,
        format_args!("{left} frames are free, as before the first process"),
    );
    Ok(())
}

/// What the kernel needs before there are processes.
fn boot() -> Result<(), &'static str> {
    const BITS: u32 = 16;
    const SIZE: usize = 64 << 10;
    static mut MEMORY: [u8; SIZE] = [0; SIZE];
    static WORDS: Lock<[u64; Allocator::words(BITS)]> = Lock::new([0; Allocator::words(BITS)]);
    // SAFETY: memory of its own, given away once: this function is called once.
    unsafe {
        HEAP_MEMORY
            .lock()
            .init((&raw mut MEMORY).expose_provenance(), SIZE);
    }
    let words = SpinMutexGuard::leak(WORDS.lock());
    POOL.fill();
    let allocator = Allocator::new(boot::ids().asid_bits(), words).ok_or("too few identifiers")?;
    let identifiers = Identifiers::new(&allocator, &HOLDERS).ok_or("too few identifiers")?;
    IDENTIFIERS.call_once(|| identifiers);
    ALLOCATOR.call_once(|| Lock::new(allocator));
    let root = boot::map(Tables::kernel())?;
    // SAFETY: the root of the kernel's map.
    unsafe { boot::switch(root) };
    boot::start_second(root)?;
    boot::settle()
}

/// One of the processors is saying how it ended.
static ENDED: AtomicBool = AtomicBool::new(false);

#[unsafe(no_mangle)]
extern "C" fn main() -> ! {
    let done = boot().map_err(String::from).and_then(|()| all());
    match done {
        Ok(()) => end(format_args!("done")),
        Err(why) => end(format_args!("WRONG: {why}")),
    }
}

#[unsafe(no_mangle)]
extern "C" fn exception(syndrome: u64, at: u64, from: u64) -> ! {
    end(format_args!(
        "WRONG: exception {syndrome:#x} at {at:#x}, from {from:#x}"
    ))
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    end(format_args!("WRONG: {info}"))
}

fn end(how: fmt::Arguments<'_>) -> ! {
    if !ENDED.swap(true, Ordering::Relaxed) {
        common::end(NAME, how)
    }
    loop {
        Yield::relax();
    }
}
