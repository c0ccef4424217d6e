//! Instructions that start a log: everything in one step, and leaf by leaf.
//!
//! No guest is run. All memory of one is mapped with pages, as its faults would map it, and one log
//! is started. The emulator counts the instructions of the hypervisor meanwhile, exactly: its clock
//! goes by them, and no other CPU has a turn.

use std::time::Duration;

use tablewright_hypervisor_common::counters::Event;

use crate::counters::Count;
use crate::fetch::{self, Files};
use crate::hyperv;
use crate::qemu::{self, Boot, End};
use crate::{Arch, Error, Leaves, Log, Result, out, say};

/// The name of the test.
pub const NAME: &str = "log-start";

/// The name of that of nested paging, one of the guests that take the hypervisor for Hyper-V.
pub const NAME_X86: &str = "hyperv-log-start";

/// The limit for mapping a guest, and one start.
const LIMIT_X86: Duration = Duration::from_secs(120);

/// The most instructions of one step: each of the 1024 entries of the root is looked at.
const MOST: u64 = 10_000;
/// And for one more entry of the root: a store.
const MOST_EACH: u64 = 32;

/// One start.
#[derive(Clone, Copy)]
pub struct Start {
    /// The pages that were mapped.
    pages: u64,
    /// The entries of the root in use.
    roots: u64,
    instructions: u64,
}

fn measure(files: &Files, memory: u64, log: Log) -> Result<Start> {
    let clock = ["-icount", "shift=0,sleep=off"].map(String::from);
    let boot =
        Boot { memory, log: Some(log), measure: Some("start"), more: &clock, ..Boot::of(files) };
    let ran = out::clocked("counting", || qemu::run(&boot, |_| (), |_| ()))?;
    match (ran.end, ran.count(Count::Starting)) {
        (End::PoweredOff, instructions) if instructions != 0 => Ok(Start {
            pages: ran.count(Count::Installed),
            roots: ran.count(Count::Roots),
            instructions,
        }),
        (end, _) => Err(Error::Failed(format!("no start was measured; it ended so: {end:?}"))),
    }
}

/// Measures on nested paging. The guest's frames are only named, so that it may be larger than the
/// emulator's memory.
fn measure_x86(files: &Files, memory: u64, log: Log) -> Result<Start> {
    let clock = ["-icount", "shift=0,sleep=off"].map(String::from);
    let boot = hyperv::Boot {
        memory,
        leaves: Leaves::Pages,
        log: Some(log),
        measures: true,
        limit: Some(LIMIT_X86),
        more: &clock,
        ..hyperv::Boot::of(files)
    };
    let ran = out::clocked("counting", || hyperv::run(&boot, |_| (), |_| ()))?;
    match (ran.end, ran.event(Event::Starting)) {
        (End::PoweredOff, instructions) if instructions != 0 => Ok(Start {
            pages: ran.event(Event::Installed),
            roots: ran.event(Event::Roots),
            instructions,
        }),
        (end, _) => Err(Error::Failed(format!(
            "no start was measured; it ended so: {end:?}; {:?}",
            ran.console.last()
        ))),
    }
}

/// Measures guests of these sizes, in MiB and growing, and hands on what one step takes, and what
/// each leaf does.
///
/// # Errors
/// What went wrong, or that one step takes more than a store for each entry of the root that is in
/// use.
pub fn run(
    arch: Arch,
    files: &Files,
    sizes: &[u64],
    mut row: impl FnMut(u64, Start, Start),
) -> Result<()> {
    let measure = match arch {
        Arch::Arm64 => measure,
        Arch::X86_64 => measure_x86,
    };
    let mut last: Option<Start> = None;
    for &memory in sizes {
        let all = measure(files, memory, Log::All)?;
        let each = measure(files, memory, Log::Bitmap)?;
        row(memory, all, each);
        let most =
            last.map_or(MOST, |last| last.instructions + MOST_EACH * (all.roots - last.roots));
        if all.instructions > most || each.instructions < each.pages {
            return Err(Error::Failed(format!(
                "{memory} MiB: {} instructions in one step, at most {most} expected; {} for {} \
                 leaves",
                all.instructions, each.instructions, each.pages
            )));
        }
        last = Some(all);
    }
    Ok(())
}

/// Measures guests of several sizes, as a table.
///
/// # Errors
/// What is missing, or went wrong.
pub fn table(arch: Arch) -> Result<()> {
    let files = match arch {
        Arch::Arm64 => fetch::everything(fetch::Choice::default())?,
        Arch::X86_64 => fetch::everything_x86(None)?,
    };
    say!(
        "| guest memory | pages mapped | entries of the root in use | `all` | `bitmap`: each leaf |"
    );
    say!("|---|---|---|---|---|");
    run(arch, &files, &[256, 512, 1024, 2048, 4096], |memory, all, each| {
        let Start { pages, roots, instructions } = all;
        say!("| {memory} MiB | {pages} | {roots} | {instructions} | {} |", each.instructions);
    })
}
