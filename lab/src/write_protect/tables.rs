//! One table: what it takes to protect it by a bitmap of the entries that may be writable, and by
//! looking at all 512.
//!
//! On the machine in virtual time, one CPU, with every line in its cache; and on this computer, in
//! turn, over tables that are in its cache and over more than fit.

use std::ptr::NonNull;
use std::time::Instant;

use serde_json::json;
use tablewright::format::{Ept, FORCED_WRITE_BACK, Npt, Stage2K4};
use tablewright::{Attrs, Entry, Format, Ipa, Level, Pa, Platform};
use tablewright_machine::{Machine, Memory, Profile, Setup};

use super::writable::{Host, Side, protect_by_bitmap, protect_by_scan, protect_leaf};
use crate::error::Error;
use crate::guest::{PAGE_SHIFT, Stage2, architecture, failed, nanoseconds};
use crate::output::columns::{self, Cell, columns};
use crate::output::progress::Progress;
use crate::output::report::{self, Report};
use crate::stats::{Samples, build_warning, noise_warning};

const ENTRIES: usize = 512;
const WRITABLE: [u16; 3] = [1, 16, 512];
pub const ROUNDS: u32 = 21;
/// Tables of 256 KiB, which a cache holds, and of 128 MiB.
const IN_CACHE: usize = 64;
const IN_MEMORY: usize = 1 << 15;

/// Nanoseconds for a table.
struct Row {
    writable: u16,
    scan: f64,
    /// By the bitmap, and to say of one entry that it may be writable.
    bitmap: f64,
    mark: f64,
    near: Native,
    far: Native,
}

columns! { row: Row;
    ["writable"] [1 "writable"] Cell::Count(row.writable.into());
    ["machine_scan_ns"] [1 "machine\nscan"] Cell::ns(row.scan);
    ["machine_bitmap_ns"] [1 "\nbitmap"] Cell::ns(row.bitmap);
    ["machine_mark_ns"] [1 "\nto mark"] Cell::ns(row.mark);
    ["in_cache_scan_ns"] [1 "in cache\nscan"] Cell::ns(row.near.scan.median());
    ["in_cache_bitmap_ns"] [1 "\nbitmap"] Cell::ns(row.near.bitmap.median());
    ["in_cache_ratio"] [] Cell::json(&row.near.ratio);
    [] [1 "\nratio"] Cell::text(format!("{:.2}", row.near.ratio.median()));
    ["in_memory_scan_ns"] [1 "in memory\nscan"] Cell::ns(row.far.scan.median());
    ["in_memory_bitmap_ns"] [1 "\nbitmap"] Cell::ns(row.far.bitmap.median());
    ["in_memory_ratio"] [] Cell::json(&row.far.ratio);
    [] [1 "\nratio"] Cell::text(format!("{:.2}", row.far.ratio.median()));
}

/// Runs it, and prints what it took.
pub fn run(
    profile: &Profile,
    format: Stage2,
    (writable, rounds): (&[u16], u32),
    json: bool,
) -> Result<(), Error> {
    let writable = if writable.is_empty() { &WRITABLE } else { writable };
    let rows = match format {
        Stage2::Ept => rows::<Ept<4>>,
        Stage2::Npt => rows::<Npt<4>>,
        Stage2::Arm64 => rows::<Stage2K4<48, FORCED_WRITE_BACK>>,
    }(profile, format, writable, rounds)?;
    let noisy = |row: &Row| {
        let what = format!("{} writable, in memory", row.writable);
        noise_warning(&what, &row.far.ratio)
    };
    let (format, machine) = (format.name(), &profile.name);
    let report = Report {
        experiment: "write-protect --tables",
        parameters: json!({"format": format, "machine": machine, "rounds": rounds}),
        warnings: rows.iter().filter_map(noisy).chain(build_warning()).collect(),
        rows,
    };
    report.print(json, |report| {
        let table = columns::table(1, 0, &report.rows);
        let head = format!(
            "a table of 512 pages, {format}; virtual time on {machine}, and {rounds} rounds \
             here\n\n"
        );
        report::title(&head) + &table
    })
}

fn rows<F: Format<Input = Ipa>>(
    profile: &Profile,
    format: Stage2,
    asked: &[u16],
    rounds: u32,
) -> Result<Vec<Row>, Error> {
    let mut progress = Progress::new(asked.len() as u64 * 2 * u64::from(rounds));
    let mut row = |&writable: &u16| {
        let (scan, _) = machine::<F>(profile, format, writable, false)?;
        let (bitmap, mark) = machine::<F>(profile, format, writable, true)?;
        Ok(Row {
            writable,
            scan,
            bitmap,
            mark,
            near: native::<F>(writable, IN_CACHE, rounds, &mut progress),
            far: native::<F>(writable, IN_MEMORY, rounds, &mut progress),
        })
    };
    asked.iter().map(&mut row).collect()
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

/// Costs on the machine: of a table, and of marking an entry.
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
        machine.check(is_protected::<F>(table), || "an entry is writable".to_owned());
        side.set(&Host, none);
        let marking = cpu.now();
        side.mark(&mapper, 7);
        let marked = cpu.now().saturating_sub(marking);
        took.set(Some((end.saturating_sub(begin), marked)));
    });
    let failed = failed(profile, "write-protect");
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

#[derive(Default)]
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
    let beside: Vec<Entry> = std::iter::repeat_with(new).take(tables * Side::SIZE).collect();
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
    let mut native = Native::default();
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
