//! The memory map of a Linux computer, in the format of `/proc/iomem`.
//!
//! ```text
//! 00100000-bfffffff : System RAM
//!   01000000-02209987 : Kernel code
//! ```
//!
//! Two spaces of indentation are one level of nesting; addresses are hexadecimal and *both*
//! inclusive. RAM is what is named `System RAM`, with whatever the driver that plugged it adds in
//! brackets, at any depth: hot-plugged memory sits below the device that brought it. What is
//! `reserved` inside RAM is RAM that is in use; what is `Reserved` outside is not RAM.

use std::fmt;

/// Addresses of RAM and of the kernel's own image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryMap {
    /// RAM, by address, without overlaps.
    pub ram: Vec<Extent>,
    /// `Kernel code`: inside RAM.
    pub text: Vec<Extent>,
    /// `Kernel rodata`: inside RAM.
    pub rodata: Vec<Extent>,
}

/// Physical addresses from `start` to `last`, both inclusive, so that the last byte of the address
/// space has a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// The first byte.
    pub start: u64,
    /// The last byte.
    pub last: u64,
}

impl Extent {
    fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.last <= self.last
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.start, self.last)
    }
}

/// Problem of a memory map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IomemError {
    /// Nothing in the file.
    #[error("empty; expected lines such as '00100000-bfffffff : System RAM'")]
    Empty,
    /// Lines, but no memory.
    #[error("no 'System RAM' in {}", crate::output::report::counted(*.0 as u64, "line", "lines"))]
    NoRam(usize),
    /// The kernel hides addresses from this user.
    #[error("every address is zero: the kernel shows them to root only; use sudo, or --ram SIZE")]
    Hidden,
    /// One line is wrong.
    #[error("line {line}: {problem}")]
    Line {
        /// Counted from one.
        line: usize,
        problem: LineError,
    },
}

/// Problem of one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// Not of the form at all.
    #[error("expected 'START-END : NAME' in hexadecimal, found '{0}'")]
    Form(String),
    /// An end below its start.
    #[error("ends before it starts: {0}")]
    Backwards(Extent),
    /// Nested deeper than one below the line above, or by an odd number of spaces.
    #[error("indented by {0} spaces, which is not below any line above")]
    Indentation(usize),
    /// A child reaches beyond its parent.
    #[error("{child} reaches outside {parent}, in which it is nested")]
    Outside {
        /// The child.
        child: Extent,
        /// The line it is nested in.
        parent: Extent,
    },
    /// Two ranges of RAM share bytes.
    #[error("RAM {this} overlaps RAM {other} of line {other_line}")]
    Overlap {
        /// This line.
        this: Extent,
        /// The other line.
        other: Extent,
        other_line: usize,
    },
}

/// A line on the path from the top level to the line being read.
struct Ancestor {
    extent: Extent,
    is_ram: bool,
}

/// Reads a memory map.
pub fn parse(bytes: &[u8]) -> Result<MemoryMap, IomemError> {
    let mut map = MemoryMap::default();
    let mut ram: Vec<(Extent, usize)> = Vec::new();
    let mut path: Vec<Ancestor> = Vec::new();
    let mut lines = 0;
    let mut all_zero = true;

    for (index, raw) in bytes.split(|&byte| byte == b'\n').enumerate() {
        let text = String::from_utf8_lossy(raw);
        let text = text.trim_end();
        if text.is_empty() {
            continue;
        }
        lines += 1;
        let line = index + 1;
        let at = |problem| IomemError::Line { line, problem };

        let spaces = text.bytes().take_while(|&byte| byte == b' ').count();
        let (extent, name) = parse_line(&text[spaces..]).map_err(at)?;
        let depth = spaces / 2;
        if spaces % 2 != 0 || depth > path.len() {
            return Err(at(LineError::Indentation(spaces)));
        }
        path.truncate(depth);
        if let Some(parent) = path.last()
            && !parent.extent.contains(extent)
        {
            let parent = parent.extent;
            return Err(at(LineError::Outside { child: extent, parent }));
        }
        all_zero &= extent == Extent { start: 0, last: 0 };

        let inside_ram = path.iter().any(|ancestor| ancestor.is_ram);
        let is_ram = is_ram(name);
        match name {
            "Kernel code" if inside_ram => map.text.push(extent),
            "Kernel rodata" if inside_ram => map.rodata.push(extent),
            _ if is_ram && !inside_ram => ram.push((extent, line)),
            _ => {}
        }
        path.push(Ancestor { extent, is_ram });
    }

    if lines == 0 {
        return Err(IomemError::Empty);
    }
    if ram.is_empty() {
        return Err(IomemError::NoRam(lines));
    }
    if all_zero {
        return Err(IomemError::Hidden);
    }
    map.ram = sorted_without_overlap(ram)?;
    Ok(map)
}

fn is_ram(name: &str) -> bool {
    name.strip_prefix("System RAM").is_some_and(|rest| rest.is_empty() || rest.starts_with(" ("))
}

fn parse_line(text: &str) -> Result<(Extent, &str), LineError> {
    let form = || LineError::Form(text.chars().take(60).collect());
    let (range, name) = text.split_once(" : ").ok_or_else(form)?;
    let (start, last) = range.split_once('-').ok_or_else(form)?;
    let address = |digits: &str| {
        // `from_str_radix` would take a sign.
        if digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            u64::from_str_radix(digits, 16).ok()
        } else {
            None
        }
    };
    let extent =
        Extent { start: address(start).ok_or_else(form)?, last: address(last).ok_or_else(form)? };
    if extent.last < extent.start {
        return Err(LineError::Backwards(extent));
    }
    Ok((extent, name.trim()))
}

fn sorted_without_overlap(mut ram: Vec<(Extent, usize)>) -> Result<Vec<Extent>, IomemError> {
    ram.sort_unstable();
    for pair in ram.windows(2) {
        let (low, high) = (pair[0], pair[1]);
        if high.0.start <= low.0.last {
            // Name the later line: the earlier one was right when it was written.
            let (this, other) = if low.1 > high.1 { (low, high) } else { (high, low) };
            return Err(IomemError::Line {
                line: this.1,
                problem: LineError::Overlap { this: this.0, other: other.0, other_line: other.1 },
            });
        }
    }
    Ok(ram.into_iter().map(|(extent, _)| extent).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const X86: &str = "\
00000000-00000fff : Reserved
00001000-0009fbff : System RAM
0009fc00-000fffff : Reserved
  000f0000-000fffff : System ROM
00100000-bfffffff : System RAM
  01000000-02209987 : Kernel code
  02400000-02e09fff : Kernel rodata
  03000000-0327c0ff : Kernel data
  03b34000-03c57fff : Kernel bss
c0001000-eebfffff : PCI Bus 0000:00
100000000-63fffffff : System RAM
";

    const ARM: &str = "\
09000000-09000fff : pl011@9000000
40000000-7fffffff : System RAM
  40210000-417fffff : Kernel code
  41800000-41b9ffff : reserved
  41ba0000-4211ffff : Kernel data
  48000000-4800ffff : reserved
80000000-800fffff : reserved
880000000-8ffffffff : CXL Window 0
  880000000-8ffffffff : dax0.0
    880000000-8ffffffff : System RAM (kmem)
";

    fn extent(start: u64, last: u64) -> Extent {
        Extent { start, last }
    }

    fn line_error(text: &str) -> (usize, LineError) {
        match parse(text.as_bytes()).unwrap_err() {
            IomemError::Line { line, problem } => (line, problem),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_computer_with_an_x86_processor() {
        let map = parse(X86.as_bytes()).unwrap();
        assert_eq!(
            map.ram,
            [
                extent(0x1000, 0x9fbff),
                extent(0x10_0000, 0xbfff_ffff),
                extent(0x1_0000_0000, 0x6_3fff_ffff)
            ]
        );
        assert_eq!(map.text, [extent(0x100_0000, 0x220_9987)]);
        assert_eq!(map.rodata, [extent(0x240_0000, 0x2e0_9fff)]);
    }

    #[test]
    fn a_computer_with_an_arm_processor_and_memory_plugged_in_later() {
        let map = parse(ARM.as_bytes()).unwrap();
        assert_eq!(
            map.ram,
            [extent(0x4000_0000, 0x7fff_ffff), extent(0x8_8000_0000, 0x8_ffff_ffff)]
        );
        assert_eq!(map.text, [extent(0x4021_0000, 0x417f_ffff)]);
    }

    #[test]
    fn without_root_the_kernel_shows_zeros() {
        let hidden = "00000000-00000000 : System RAM\n  00000000-00000000 : Kernel code\n";
        assert_eq!(parse(hidden.as_bytes()), Err(IomemError::Hidden));
    }

    #[test]
    fn nothing_to_read() {
        assert_eq!(parse(b""), Err(IomemError::Empty));
        assert_eq!(parse(b"\n \n"), Err(IomemError::Empty));
        assert_eq!(
            parse(b"0-fff : Reserved\n1000-1fff : System RAMdisk\n"),
            Err(IomemError::NoRam(2))
        );
    }

    #[test]
    fn a_line_that_is_wrong_is_named() {
        for bad in [
            "hello",
            "0-fff System RAM",
            "0fff : System RAM",
            "0-xyz : System RAM",
            "+0-fff : System RAM",
            "0x0-0xfff : System RAM",
            "-fff : System RAM",
            "10000000000000000-2 : System RAM",
        ] {
            let text = format!("1000-1fff : System RAM\n{bad}\n");
            assert_eq!(line_error(&text), (2, LineError::Form(bad.into())));
        }
        assert_eq!(
            line_error("2000-1fff : System RAM"),
            (1, LineError::Backwards(extent(0x2000, 0x1fff)))
        );
        assert_eq!(line_error("  0-1 : x"), (1, LineError::Indentation(2)));
        assert_eq!(line_error("0-1 : x\n   0-1 : y"), (2, LineError::Indentation(3)));
        let (line, problem) = line_error("0-fff : System RAM\n  0-1000 : Kernel code");
        assert_eq!(line, 2);
        assert!(matches!(problem, LineError::Outside { .. }));
    }

    #[test]
    fn overlapping_ram_names_both_lines() {
        let (line, problem) = line_error("1000-2fff : System RAM\n\n2000-3fff : System RAM\n");
        assert_eq!(line, 3);
        assert!(matches!(problem, LineError::Overlap { other_line: 1, .. }));
    }

    #[test]
    fn the_last_byte_of_the_address_space_is_a_byte() {
        let map = parse(b"fffffffffffff000-ffffffffffffffff : System RAM").unwrap();
        assert_eq!(map.ram, [extent(!0xfff, u64::MAX)]);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn nearly_right_bytes_do_not_panic(
            text in "( {0,6}[0-9a-f]{1,17}-[0-9a-f]{1,17} : (System RAM|Kernel \
                     code|reserved|é)\r?\n){0,8}"
        ) {
            if let Ok(map) = parse(text.as_bytes()) {
                prop_assert!(map.ram.windows(2).all(|pair| pair[0].last < pair[1].start));
            }
        }
    }
}
