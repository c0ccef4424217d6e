//! Memory maps as people post them: what a kernel's log says of its firmware's, and device trees.
//!
//! ```text
//! [    0.000000] BIOS-e820: [mem 0x0000000000000000-0x000000000009fbff] usable
//! efi: mem00: [Conventional Memory|   |  |WB|WT|WC|UC] range=[0x0000-0x9ffff] (0MB)
//! memory@80000000 { device_type = "memory"; reg = <0x0 0x80000000 0x0 0x40000000>; };
//! ```
//!
//! Other lines of a log are passed over. Ranges may be unsorted, overlap, and end anywhere.

use tablewright::linear::{FirmwareRange, usable_ram};
use tablewright::{Pa, Span};

use super::iomem::{Extent, MemoryMap};

/// Text of a known form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// `BIOS-e820:` lines of x86.
    E820,
    /// Lines that `efi=debug` prints.
    Efi,
    /// Device-tree source.
    DeviceTree,
}

/// The mark of an EFI line, behind whatever a log puts before it.
const EFI: &str = "efi: mem";

/// Reads a map in one of these forms; `None` for text of another.
pub fn parse(bytes: &[u8]) -> Option<Result<MemoryMap, String>> {
    let text = String::from_utf8_lossy(bytes);
    let form = match () {
        () if text.contains("BIOS-e820:") => Form::E820,
        () if text.contains(EFI) && text.contains("range=[") => Form::Efi,
        () if text.contains("reg = <") || text.contains("/memreserve/") => Form::DeviceTree,
        () => return None,
    };
    let ranges = match form {
        Form::E820 => lines(&text, "BIOS-e820:", e820),
        Form::Efi => lines(&text, EFI, efi),
        Form::DeviceTree => device_tree(&text),
    };
    Some(ranges.and_then(|ranges| usable(&ranges)))
}

/// Reads the lines that have `mark`.
fn lines(
    text: &str,
    mark: &str,
    read: fn(&str) -> Option<FirmwareRange>,
) -> Result<Vec<FirmwareRange>, String> {
    let marked = text.lines().enumerate().filter_map(|(at, line)| {
        let (_, rest) = line.split_once(mark)?;
        Some((at + 1, line, read(rest)))
    });
    marked
        .map(|(at, line, range)| match range {
            Some(range) if range.start <= range.last => Ok(range),
            Some(_) => Err(format!("line {at}: ends before it starts: {}", line.trim())),
            None => {
                let line: String = line.trim().chars().take(60).collect();
                Err(format!("line {at}: no range of memory behind '{mark}': '{line}'"))
            }
        })
        .collect()
}

/// `0xSTART-0xLAST` at the start of `text`, up to `end`, and what follows.
fn range(text: &str, end: char) -> Option<((u64, u64), &str)> {
    let (range, rest) = text.split_once(end)?;
    let (start, last) = range.split_once('-')?;
    Some(((number(start)?, number(last)?), rest))
}

/// A number as C has it.
fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    match text.strip_prefix("0x") {
        Some(digits) if digits.bytes().all(|it| it.is_ascii_hexdigit()) => {
            u64::from_str_radix(digits, 16).ok()
        }
        None if text.bytes().all(|it| it.is_ascii_digit()) => text.parse().ok(),
        _ => None,
    }
}

/// ` [mem 0x0-0xfff] usable`, or with no bracket, as older kernels have it.
fn e820(rest: &str) -> Option<FirmwareRange> {
    let rest = rest.trim_start().strip_prefix("[mem ")?;
    let ((start, last), kind) = range(rest, ']')?;
    Some(FirmwareRange { start, last, usable: kind.trim() == "usable" })
}

/// Types of memory that a kernel has when the firmware's boot services have ended (UEFI 2.10,
/// 7.2.3).
const EFI_USABLE: [&str; 5] =
    ["Conventional Memory", "Loader Code", "Loader Data", "Boot Code", "Boot Data"];

/// `00: [Conventional Memory|...] range=[0x0-0xfff] (0MB)`.
fn efi(rest: &str) -> Option<FirmwareRange> {
    let kind = rest.split_once('[')?.1.split(['|', ']']).next()?.trim();
    let ((start, last), _) = range(rest.split_once("range=[")?.1, ']')?;
    Some(FirmwareRange { start, last, usable: EFI_USABLE.contains(&kind) })
}

/// A node that is being read.
#[derive(Clone, Copy)]
struct Node {
    is_memory: bool,
    /// It is `reserved-memory`, or a node in that.
    holds_reserved: bool,
    is_reserved: bool,
    no_map: bool,
    /// Cells of an address and of a size, in its own ranges and in those of its children.
    own: (usize, usize),
    cells: (usize, usize),
    /// Ranges from this one on are its own.
    first: usize,
}

/// RAM of nodes named `memory`, without what is reserved and must not be mapped, and without
/// `/memreserve/`. Devicetree Specification 0.4, 2.3.5, 3.4, 3.5.
fn device_tree(text: &str) -> Result<Vec<FirmwareRange>, String> {
    let mut ranges: Vec<FirmwareRange> = Vec::new();
    // A fragment without a root has the cells of 64-bit machines.
    let root = Node {
        is_memory: false,
        holds_reserved: false,
        is_reserved: false,
        no_map: false,
        own: (2, 2),
        cells: (2, 2),
        first: 0,
    };
    let mut path = vec![root];
    let mut statement = String::new();
    let mut number_of_line = 1;
    for character in text.chars() {
        let Some(node) = path.last_mut() else {
            return Err(format!("line {number_of_line}: a node ends that was not begun"));
        };
        match character {
            '{' => {
                let name = statement.rsplit(':').next().unwrap_or_default().trim();
                let is_memory = name == "memory" || name.starts_with("memory@");
                let child = Node {
                    is_memory: is_memory && !node.holds_reserved,
                    holds_reserved: name == "reserved-memory",
                    is_reserved: node.holds_reserved,
                    no_map: false,
                    own: node.cells,
                    cells: node.cells,
                    first: ranges.len(),
                };
                path.push(child);
                statement.clear();
            }
            '}' => {
                let node = *node;
                // What is reserved and may be mapped is in the linear map.
                if node.is_reserved && !node.no_map {
                    ranges.truncate(node.first);
                }
                path.pop();
                statement.clear();
            }
            ';' => {
                property(statement.trim(), node, &mut ranges)
                    .map_err(|why| format!("line {number_of_line}: {why}"))?;
                statement.clear();
            }
            '\n' => {
                number_of_line += 1;
                statement.push(' ');
            }
            other => statement.push(other),
        }
    }
    Ok(ranges)
}

/// One statement of a node.
fn property(
    statement: &str,
    node: &mut Node,
    ranges: &mut Vec<FirmwareRange>,
) -> Result<(), String> {
    let (name, value) = statement.split_once('=').unwrap_or((statement, ""));
    let cell_list = || -> Result<Vec<u64>, String> {
        let inner = value.trim().trim_start_matches('<').trim_end_matches('>');
        let words = inner.split(|it: char| it.is_whitespace() || "<>,".contains(it));
        let words = words.filter(|word| !word.is_empty());
        words
            .map(|word| number(word).filter(|it| *it <= u64::from(u32::MAX)))
            .collect::<Option<_>>()
            .ok_or_else(|| format!("{}: cells of 32 bits are needed", name.trim()))
    };
    let one_cell = || match cell_list()?[..] {
        [cells @ 1..=2] => Ok(cells as usize),
        _ => Err(format!("{}: 1 or 2 cells", name.trim())),
    };
    if let Some(rest) = statement.strip_prefix("/memreserve/") {
        let numbers: Option<Vec<u64>> = rest.split_whitespace().map(number).collect();
        let Some([start, size]) = numbers.as_deref() else {
            return Err("/memreserve/: an address and a size are needed".to_owned());
        };
        ranges.extend(of_size(*start, *size, false));
        return Ok(());
    }
    match name.trim() {
        "#address-cells" => node.cells.0 = one_cell()?,
        "#size-cells" => node.cells.1 = one_cell()?,
        "no-map" => node.no_map = true,
        "reg" if node.is_memory || node.is_reserved => {
            let list = cell_list()?;
            let (address, size) = node.own;
            if list.is_empty() || !list.len().is_multiple_of(address + size) {
                return Err(format!(
                    "reg: {} cells are no pairs of {address} for an address and {size} for a size",
                    list.len()
                ));
            }
            for pair in list.chunks(address + size) {
                let join = |cells: &[u64]| cells.iter().fold(0, |sum, cell| sum << 32 | cell);
                let (start, size) = pair.split_at(address);
                ranges.extend(of_size(join(start), join(size), node.is_memory));
            }
        }
        _ => {}
    }
    Ok(())
}

/// A range of so many bytes, up to the end of memory; none of nothing.
fn of_size(start: u64, size: u64, usable: bool) -> Option<FirmwareRange> {
    let last = start.saturating_add(size.checked_sub(1)?);
    Some(FirmwareRange { start, last, usable })
}

/// The usable pages of 4 KiB.
fn usable(ranges: &[FirmwareRange]) -> Result<MemoryMap, String> {
    let nothing = Span::new(Pa::new(0), 4096).map_err(|error| error.to_string())?;
    // Each range begins a stretch, or is behind one that is cut.
    let mut into = vec![nothing; 2 * ranges.len()];
    let ram = usable_ram(ranges.iter().copied(), 4096, &mut into)
        .map_err(|count| format!("{count} stretches of memory"))?;
    if ram.is_empty() {
        let count = crate::output::report::counted(ranges.len() as u64, "range", "ranges");
        return Err(format!("no usable memory in {count}"));
    }
    let extent = |span: &Span<Pa>| Extent { start: span.start().get(), last: span.last().get() };
    Ok(MemoryMap { ram: ram.iter().map(extent).collect(), ..MemoryMap::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ram(text: &str) -> Vec<(u64, u64)> {
        let map = parse(text.as_bytes()).expect("a known form").expect(text);
        map.ram.iter().map(|it| (it.start, it.last)).collect()
    }

    fn refused(text: &str) -> String {
        parse(text.as_bytes()).expect("a known form").unwrap_err()
    }

    #[test]
    fn a_log_of_a_computer_with_a_bios() {
        let log = "\
[    0.000000] Linux version 6.12
[    0.000000] BIOS-provided physical RAM map:
[    0.000000] BIOS-e820: [mem 0x0000000100000000-0x000000063fffffff] usable
[    0.000000] BIOS-e820: [mem 0x0000000000000000-0x000000000009fbff] usable
[    0.000000] BIOS-e820: [mem 0x000000000009fc00-0x000000000009ffff] reserved
[    0.000000] BIOS-e820: [mem 0x0000000000100000-0x00000000bfffcfff] usable
[    0.000000] BIOS-e820: [mem 0x00000000bfffd000-0x00000000bfffffff] ACPI NVS
[    0.000000] NX (Execute Disable) protection: active
";
        let expected = [(0, 0x9_efff), (0x10_0000, 0xbfff_cfff), (0x1_0000_0000, 0x6_3fff_ffff)];
        assert_eq!(ram(log), expected);
        assert!(refused("BIOS-e820: [mem 0x10-0x0f] usable").starts_with("line 1: ends before"));
        assert!(refused("\nBIOS-e820: hello").starts_with("line 2: no range of memory"));
        let none = "BIOS-e820: [mem 0x0-0xfff] reserved";
        assert_eq!(refused(none), "no usable memory in 1 range");
    }

    #[test]
    fn a_log_of_a_computer_with_efi() {
        let log = "\
[    0.000000] efi: mem00: [Boot Data          |   |  |  |  |  |  |  |  |  |   |WB|WT|WC|UC] \
                   range=[0x0000000040000000-0x0000000043ffffff] (64MB)
efi: mem01: [Runtime Data|RUN|WB] range=[0x0000000044000000-0x00000000440fffff] (1MB)
efi: mem02: [Conventional Memory|   |WB] range=[0x0000000044100000-0x000000007fffffff] (959MB)
";
        assert_eq!(ram(log), [(0x4000_0000, 0x43ff_ffff), (0x4410_0000, 0x7fff_ffff)]);
    }

    #[test]
    fn a_device_tree() {
        let source = r#"
/memreserve/ 0x80000000 0x10000;
/ {
    #address-cells = <2>;
    #size-cells = <1>;
    cpus { #address-cells = <1>; #size-cells = <0>; cpu@0 { reg = <0>; }; };
    memory@80000000 { device_type = "memory"; reg = <0x0 0x80000000 0x10000000>,
        <0x1 0x0 0x80000000>; };
    reserved-memory {
        #address-cells = <2>;
        #size-cells = <1>;
        ranges;
        secure@88000000 { reg = <0x0 0x88000000 0x200000>; no-map; };
        cma: pool@8a000000 { reg = <0x0 0x8a000000 0x200000>; reusable; };
    };
};"#;
        // `#size-cells` of nothing is for processors, and does not matter.
        let source = source.replace("#size-cells = <0>", "");
        let expected = [
            (0x8001_0000, 0x87ff_ffff),
            (0x8820_0000, 0x8fff_ffff),
            (0x1_0000_0000, 0x1_7fff_ffff),
        ];
        assert_eq!(ram(&source), expected);
        assert!(refused("memory@0 { reg = <1 2 3>; };").starts_with("line 1: reg: 3 cells"));
        assert!(refused("memory@0 { reg = <&x>; };").contains("cells of 32 bits"));
        assert!(refused("reg = <1>; };};").contains("a node ends that was not begun"));
    }

    proptest! {
        #[test]
        fn no_text_panics_and_each_refusal_is_one_line(
            text in "(BIOS-e820: |efi: mem|range=\\[|\\[mem |0x[0-9a-f]{1,17}|-|\\]| usable|\
                     reg = <|>|memory@|\\{|\\}|;|/memreserve/|\n| ){0,40}"
        ) {
            match parse(text.as_bytes()) {
                Some(Ok(map)) => {
                    prop_assert!(map.ram.windows(2).all(|two| two[0].last < two[1].start));
                }
                Some(Err(why)) => prop_assert!(!why.contains('\n'), "{why}"),
                None => {}
            }
        }
    }
}
