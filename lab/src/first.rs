//! The program without a command: does the engine work here, is it fast, and what is it for. A few
//! seconds, no rights.

use std::fs;

use crate::compare::{self, Against};
use crate::error::Error;
use crate::format::{Architecture, Format, Granule};
use crate::map_mem::iomem::MemoryMap;
use crate::map_mem::{input, native};
use crate::output::report::{self, print};
use crate::reproduce::{self, Problem};
use crate::size::{Size, human};
use crate::stats;

/// Most memory to map: the tables have to fit. With assertions each page takes ten times as long to
/// check.
const MOST: u64 = if cfg!(debug_assertions) { 2 << 30 } else { 64 << 30 };
/// And so much if this computer does not say how much it has.
const USUAL: u64 = 16 << 30;
/// Memory that is mapped beside the best other crate. With assertions the figures say nothing, and
/// a small part says as much.
const LARGE: u64 = if cfg!(debug_assertions) { 64 << 20 } else { 1 << 30 };
/// How often each crate is measured.
const ROUNDS: u32 = 5;
/// Columns of the longest bar.
const BAR: f64 = 29.0;

/// Answers the three questions.
pub fn run() -> Result<(), Error> {
    print("Does it work here?\n")?;
    print(&works()?)?;
    print("\nIs it fast? Nanoseconds for each page, beside the best other crate\n")?;
    for (size, rows) in [
        (human(LARGE), compare::large(LARGE, ROUNDS)?),
        ("1 page".to_owned(), compare::single(ROUNDS)?),
    ] {
        rows.iter().try_for_each(|row| print(&bars(&size, row)))?;
    }
    print("\nWhat is it for?\n")?;
    print(&problems(reproduce::problems()?))?;
    print(
        "
The machine is simulated, in virtual time. Published figures are by others.

What next:
  tablewright reproduce        every published figure, beside the machine's
  tablewright compare --pages  1 to 512 pages in a call
  tablewright page-table-test  one of the problems, in detail
  tablewright --help           every experiment
",
    )?;
    if let Some(warning) = stats::build_warning() {
        report::complain("note", &warning);
    }
    Ok(())
}

/// Builds the map of this computer's memory, or of as much, and has every page checked.
fn works() -> Result<String, Error> {
    let format = Format::new(Architecture::HOST, Granule::K4, 48)?;
    let own = input::read(None, None, format).ok().filter(|(_, map)| bytes(map) <= MOST);
    let (source, map) = match own {
        Some((source, map)) => (format!("The memory that {source} shows"), map),
        None => {
            let size = Size::of(memory().clamp(1 << 30, MOST) >> 21 << 21);
            let (_, map) = input::read(None, size, format)?;
            let source = match memory() > MOST {
                true => "A part of this computer's memory, in one range",
                false => "As much memory as this computer has, in one range",
            };
            (source.to_owned(), map)
        }
    };
    let built = native::build(&source, &map, format)?;
    Ok(format!(
        "  {source}: {}\n  in {} pages for {}, {} tables, built in {}.\n  Every page was looked up \
         by a walker that shares no code with the engine, and\n  is where it should be.\n",
        human(built.bytes),
        report::count(built.entries),
        format.architecture().name(),
        report::count(built.tables),
        report::time(built.nanoseconds),
    ))
}

fn bytes(map: &MemoryMap) -> u64 {
    let sizes = map.ram.iter().map(|part| part.last - part.start);
    sizes.fold(0, |sum: u64, size| sum.saturating_add(size))
}

/// Bytes of memory that this computer has.
pub fn memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kibibytes = total.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kibibytes.map_or(USUAL, |kibibytes| kibibytes << 10)
}

/// Two bars, the longer one as wide as there is room.
fn bars(size: &str, row: &Against) -> String {
    let (other, name) = &row.other;
    let most = row.ours.max(*other);
    let bar = |time: f64| "█".repeat((time / most * BAR).round().max(1.0) as usize);
    let line = |head: &str, name: &str, time: f64| {
        format!("  {head:15}{name:27.27}{:>5}  {}\n", report::figure(time), bar(time))
    };
    line(&format!("{size:6} {}", row.operation), "Tablewright", row.ours) + &line("", name, *other)
}

fn problems(rows: Vec<Problem>) -> String {
    let cells = rows.into_iter().map(|row| {
        let [a, b, c, d, e] = row.figures;
        [row.what.to_owned(), a, b, c, d, e]
    });
    report::table(
        [
            "",
            "published\nbefore",
            "published\nafter",
            "machine\nbefore",
            "machine\nafter",
            "Table-\nwright",
        ],
        1,
        cells.collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_bar_is_as_wide_as_there_is_room() {
        let row =
            Against { operation: "map", ours: 1.0, other: (29.0, "another 1.2.3".to_owned()) };
        let text = bars("1 GiB", &row);
        let widths: Vec<usize> = text.lines().map(|line| line.matches('█').count()).collect();
        assert_eq!(widths, [1, 29]);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn a_computer_has_memory() {
        assert!(memory() >= 1 << 20);
    }
}
