//! The steps, on both processors. Before and after each step there is a mark, by which an emulator
//! tells what to count.

use alloc::format;
use alloc::string::{String, ToString as _};
use core::arch::asm;
use core::fmt;

use spin::relax::RelaxStrategy as _;
use tablewright::{Span, Va};
use tablewright_processes::{
    COPIES, HEAP, Memory as _, PAGE, PAGES, Process, ProcessError, Step, TEXT,
};

use crate::check::check;
use crate::frames::{Lock, POOL, Tables, Yield};
use crate::running::{Done, Faults, IDENTITIES, PROCESSES, exit, load, reads, refused, run, with};
use crate::user::{self, Program};
use crate::{boot, console};

const PARENT: usize = 0;
const CHILD: usize = 1;

/// Words in the first page: as the parent writes them first, the child, and the parent again. Each
/// page has the next.
const FIRST: u64 = 0x1000_0000;
const CHILDS: u64 = 0x2000_0000;
const AGAIN: u64 = 0x3000_0000;

/// Its task, and the result.
static TASK: Lock<Option<fn() -> Done>> = Lock::new(None);
static ANSWER: Lock<Option<Done>> = Lock::new(None);

/// Has the second processor do something, and this one something else, again and again, until that
/// is done.
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
    if let Err(why) = boot::configure() {
        console::end(format_args!("WRONG: {why}"));
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
    console::say(format_args!("{}: {what}", step.name()));
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
    let expected = Faults { mapped: PAGES, ..Faults::default() };
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
        let forked = with(PARENT, |parent| parent.fork(Tables::of(&IDENTITIES[CHILD]), 0))?;
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
            let expected = Faults { copied: COPIES, ..Faults::default() };
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
    say(Step::Copy, format_args!("{COPIES} {what}, {rounds} {round}"));
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
    let expected = Faults { owned: COPIES, ..Faults::default() };
    counted::<{ Step::Reuse.number() }, _>(|| {
        run(PARENT, Program::Write, 0..COPIES, AGAIN, expected)
    })?;
    if POOL.copied() != before {
        return Err("a page that has one user was copied".into());
    }
    check(PARENT, COPIES)?;
    let rest = Faults { copied: PAGES - COPIES, ..Faults::default() };
    run(PARENT, Program::Write, 0..PAGES, AGAIN, rest)?;
    reads(PARENT, 0..PAGES, AGAIN)?;
    check(PARENT, PAGES)?;
    childs_words()?;
    say(Step::Reuse, format_args!("{COPIES} pages taken over without a copy"));
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
    say(Step::ProtectPage, format_args!("1 page, which the program may not write"));

    counted::<{ Step::Allow.number() }, _>(|| protect(first, true))?;
    let owned = Faults { owned: 1, ..Faults::default() };
    run(PARENT, Program::Write, 0..PAGES, AGAIN, owned)?;
    check(PARENT, PAGES)?;
    say(Step::Allow, format_args!("1 page, which it may write again"));

    let all = heap()?;
    counted::<{ Step::ProtectAll.number() }, _>(|| protect(all, false))?;
    for page in (0..PAGES).step_by(64).chain([PAGES - 1]) {
        refused(PARENT, page)?;
    }
    reads(PARENT, 0..PAGES, AGAIN)?;
    check(PARENT, 0)?;
    childs_words()?;
    say(Step::ProtectAll, format_args!("{PAGES} pages, none of which it may write"));
    Ok(())
}

/// All of them.
pub fn all() -> Done {
    let before = POOL.free();
    start()?;
    demand()?;
    let alone = POOL.free();
    fork()?;
    copy()?;
    reuse()?;
    protect()?;
    on_second(|| counted::<{ Step::Exit.number() }, _>(|| exit(CHILD)), || Ok(()))?;
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
    say(Step::Exit, format_args!("{left} frames are free, as before the first process"));
    Ok(())
}
