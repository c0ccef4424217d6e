//! One table: what it takes to protect it by a bitmap of the entries that may be writable, and by
//! looking at all 512.
//!
//! On the machine in virtual time, one CPU, with every line in its cache; and on this computer, in
//! turn, over tables that are in its cache and over more than fit.

use std::ptr::NonNull;
use std::time::Instant;

use serde::Serialize;
use tablewright::format::{Ept, FORCED_WRITE_BACK, Npt, Stage2K4};
use tablewright::{Attrs, Entry, Format, Ipa, Level, Pa, Platform};
use tablewright_experiments::write_protect::writable::{
    Host, Side, protect_by_bitmap, protect_by_scan, protect_leaf,
};
use tablewright_experiments::write_protect::{PAGE_SHIFT, Stage2, architecture};
use tablewright_machine::{Machine, Memory, Profile, Setup};

use super::nanoseconds;
use crate::error::Error;
use crate::progress::Progress;
use crate::report::{self, Report};
use crate::stats::{Samples, build_warning, noise_warning};

const ENTRIES: usize = 512;
const WRITABLE: [u16; 3] = [1, 16, 512];
pub const ROUNDS: u32 = 21;
/// Tables of 256 KiB, which a cache holds, and of 128 MiB.
const IN_CACHE: usize = 64;
const IN_MEMORY: usize = 1 << 15;

#[derive(Serialize)]
struct Parameters {
    format: &'static str,
    machine: String,
    rounds: u32,
}

/// Nanoseconds for a table.
#[derive(Serialize)]
struct Row {
    writable: u16,
    machine_scan_ns: f64,
    machine_bitmap_ns: f64,
    /// To say of one entry that it may be writable.
    machine_mark_ns: f64,
    in_cache_scan_ns: f64,
    in_cache_bitmap_ns: f64,
    /// Of the two, in each round.
    in_cache_ratio: Samples,
    in_memory_scan_ns: f64,
    in_memory_bitmap_ns: f64,
    in_memory_ratio: Samples,
}

/// Runs it, and prints what it took.
pub fn run(
    profile: &Profile,
    format: Stage2,
    asked: (&[u16], u32),
    json: bool,
) -> Result<(), Error> {
    let report = match format {
        Stage2::Ept => compare::<Ept<4>>(profile, format, asked),
        Stage2::Npt => compare::<Npt<4>>(profile, format, asked),
        Stage2::Arm64 => compare::<Stage2K4<48, FORCED_WRITE_BACK>>(profile, format, asked),
    }?;
    report.print(json, text)
}

fn compare<F: Format<Input = Ipa>>(
    profile: &Profile,
    format: Stage2,
    (asked, rounds): (&[u16], u32),
) -> Result<Report<Parameters, Row>, Error> {
    let asked = match asked {
        [] => &WRITABLE,
        asked => asked,
    };
    let mut progress = Progress::new(asked.len() as u64 * 2 * u64::from(rounds));
    let mut rows = Vec::new();
    for &writable in asked {
        let scan = machine::<F>(profile, format, writable, false)?;
        let bitmap = machine::<F>(profile, format, writable, true)?;
        let near = native::<F>(writable, IN_CACHE, rounds, &mut progress);
        let far = native::<F>(writable, IN_MEMORY, rounds, &mut progress);
        rows.push(Row {
            writable,
            machine_scan_ns: scan.0,
            machine_bitmap_ns: bitmap.0,
            machine_mark_ns: bitmap.1,
            in_cache_scan_ns: near.scan.median(),
            in_cache_bitmap_ns: near.bitmap.median(),
            in_cache_ratio: near.ratio,
            in_memory_scan_ns: far.scan.median(),
            in_memory_bitmap_ns: far.bitmap.median(),
            in_memory_ratio: far.ratio,
        });
    }
    let noisy = |row: &Row| {
        let what = format!("{} writable, in memory", row.writable);
        noise_warning(&what, &row.in_memory_ratio)
    };
    Ok(Report {
        experiment: "write-protect --tables",
        parameters: Parameters {
            format: format.name(),
            machine: profile.name.clone(),
            rounds,
        },
        warnings: rows
            .iter()
            .filter_map(noisy)
            .chain(build_warning())
            .collect(),
        rows,
    })
}

/// The places of so many writable entries, spread over a table.
fn places(writable: u16) -> impl Iterator<Item = usize> + Clone {
    let writable = usize::from(writable);
    (0..writable).map(move |number| number * ENTRIES / writable)
}

/// A table of pages, of which so many may be written.
fn entries<F: Format<Input = Ipa>>(writable: u16) -> [u64; ENTRIES] {
    let open = F::encode(&Attrs::GUEST_MEMORY, Level::PAGE).unwrap_or_default();
    let shut = protect_leaf::<F>(open | F::put_address(Pa::new(0)), Level::PAGE);
    let address =
        |index: usize| F::put_address(Pa::new((1 << 40) + ((index as u64) << PAGE_SHIFT)));
    let mut table = std::array::from_fn(|index| shut | address(index));
    places(writable).for_each(|index| table[index] = open | address(index));
    table
}

/// What it takes on the machine, and what saying of an entry that it may be writable does.
fn machine<F: Format<Input = Ipa>>(
    profile: &Profile,
    format: Stage2,
    writable: u16,
    by_bitmap: bool,
) -> Result<(f64, f64), Error> {
    let memory = Memory::new(4, PAGE_SHIFT, 1 << 30);
    let mut setup = Setup::new(architecture(profile, format), memory);
    setup.costs = profile.costs.clone();
    let machine = Machine::new(setup);
    let mapper = machine.new_space();
    let took = std::cell::Cell::new(None);
    let done = machine.run(|cpu| {
        let (Some(table), Some(beside)) = (machine.take_page(), machine.take_page()) else {
            return;
        };
        // SAFETY: pages of ours.
        let (table, beside) = unsafe {
            let of = |page| mapper.table(page, Level::PAGE);
            (of(table), of(beside))
        };
        // SAFETY: all of a page.
        let side = unsafe { fill::<F>(table, beside, writable) };
        let begin = cpu.now();
        // SAFETY: a table, and what is kept of it.
        unsafe {
            match by_bitmap {
                true => protect_by_bitmap::<F>(&mapper, table, Level::PAGE, side),
                false => protect_by_scan::<F>(&mapper, table, Level::PAGE),
            }
        }
        let (end, none) = (cpu.now(), std::iter::empty());
        machine.check(is_protected::<F>(table), || {
            "an entry is writable".to_owned()
        });
        side.set(&Host, none);
        let marking = cpu.now();
        side.mark(&mapper, 7);
        let marked = cpu.now().saturating_sub(marking);
        took.set(Some((end.saturating_sub(begin), marked)));
    });
    let failed = |problem: String| Error::Machine {
        machine: profile.name.clone(),
        step: "write-protect",
        problem,
    };
    done.map_err(|error| failed(error.to_string()))?;
    if let Some(violation) = machine.finish().first() {
        return Err(failed(violation.to_string()));
    }
    let (took, marked) = took.take().ok_or_else(|| failed("no memory".to_owned()))?;
    Ok((nanoseconds(took), nanoseconds(marked)))
}

/// Writes a table, and says of it which entries may be writable.
///
/// # Safety
/// 1. `table` is of 512 entries, `beside` of [`Side::SIZE`], and nothing else uses them.
unsafe fn fill<F: Format<Input = Ipa>>(
    table: NonNull<Entry>,
    beside: NonNull<Entry>,
    writable: u16,
) -> Side {
    for (index, bits) in entries::<F>(writable).into_iter().enumerate() {
        // SAFETY: (1.).
        unsafe { table.add(index).as_ref() }.store(bits);
    }
    // SAFETY: (1.).
    let side = unsafe { Side::new(beside) };
    side.set(&Host, places(writable));
    side
}

/// Whether nothing in a table can be written.
fn is_protected<F: Format<Input = Ipa>>(table: NonNull<Entry>) -> bool {
    (0..ENTRIES).all(|index| {
        // SAFETY: a table of ours.
        let bits = unsafe { table.add(index).as_ref() }.load();
        protect_leaf::<F>(bits, Level::PAGE) == bits
    })
}

struct Native {
    scan: Samples,
    bitmap: Samples,
    ratio: Samples,
}

/// Nanoseconds for a table on this computer, of so many.
fn native<F: Format<Input = Ipa>>(
    writable: u16,
    tables: usize,
    rounds: u32,
    progress: &mut Progress,
) -> Native {
    let new = || Entry::new(0);
    let memory: Vec<Entry> = std::iter::repeat_with(new).take(tables * ENTRIES).collect();
    let beside: Vec<Entry> = std::iter::repeat_with(new)
        .take(tables * Side::SIZE)
        .collect();
    let each = || memory.chunks(ENTRIES).zip(beside.chunks(Side::SIZE));
    let of = |by_bitmap: bool| {
        for (table, beside) in each() {
            let (table, beside) = whole(table, beside);
            // SAFETY: all of a chunk.
            unsafe { fill::<F>(table, beside, writable) };
        }
        let begin = Instant::now();
        for (table, beside) in each() {
            let (table, beside) = whole(table, beside);
            // SAFETY: a table, and what was said of it.
            unsafe {
                match by_bitmap {
                    true => {
                        let side = Side::new(beside);
                        protect_by_bitmap::<F>(&Host, table, Level::PAGE, side);
                    }
                    false => protect_by_scan::<F>(&Host, table, Level::PAGE),
                }
            }
        }
        begin.elapsed().as_secs_f64() * 1e9 / tables as f64
    };
    let mut native = Native {
        scan: Samples::default(),
        bitmap: Samples::default(),
        ratio: Samples::default(),
    };
    for _ in 0..rounds {
        progress.step(&format!("{writable} writable"));
        let (scan, bitmap) = (of(false), of(true));
        native.scan.push(scan);
        native.bitmap.push(bitmap);
        native.ratio.push(bitmap / scan);
    }
    native
}

/// The first entries, from which all others are reached.
fn whole(table: &[Entry], beside: &[Entry]) -> (NonNull<Entry>, NonNull<Entry>) {
    let first = |entries: &[Entry]| match NonNull::new(entries.as_ptr().cast_mut()) {
        Some(first) => first,
        None => unreachable!("a slice is not at null"),
    };
    (first(table), first(beside))
}

fn text(report: &Report<Parameters, Row>) -> String {
    let Parameters {
        format,
        machine,
        rounds,
    } = &report.parameters;
    let head = format!(
        "a table of 512 pages, {format}; virtual time on {machine}, and {rounds} rounds here\n\n"
    );
    let rows = report.rows.iter().map(|row| {
        let ratio = |ratio: &Samples| format!("{:.2}", ratio.median());
        [
            row.writable.to_string(),
            report::time(row.machine_scan_ns),
            report::time(row.machine_bitmap_ns),
            report::time(row.machine_mark_ns),
            report::time(row.in_cache_scan_ns),
            report::time(row.in_cache_bitmap_ns),
            ratio(&row.in_cache_ratio),
            report::time(row.in_memory_scan_ns),
            report::time(row.in_memory_bitmap_ns),
            ratio(&row.in_memory_ratio),
        ]
    });
    let header = [
        "writable",
        "machine\nscan",
        "\nbitmap",
        "\nto mark",
        "in cache\nscan",
        "\nbitmap",
        "\nratio",
        "in memory\nscan",
        "\nbitmap",
        "\nratio",
    ];
    head + &report::table(header, 0, rows.collect())
}
