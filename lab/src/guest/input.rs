//! Options of the well-known test, with their letters, names and numbers.

use std::str::FromStr;

use tablewright::Level;

use crate::error::Error;
use crate::size::{Size, human};

/// Bytes, in decimal or hexadecimal, or as a size.
pub fn offset(text: &str) -> Result<u64, String> {
    let bytes = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    let size = || text.parse().map(Size::bytes).map_err(|error| error.to_string());
    bytes.map_or_else(size, Ok)
}

/// A page of the host.
pub const PAGE: u64 = 4096;
/// A huge page of the host.
pub const BLOCK: u64 = 2 << 20;

/// A guest mode: sizes of its addresses, by the name and the number of the published test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Its name.
    pub name: &'static str,
    /// Bits of a guest's physical address.
    pub bits: u32,
}

/// The modes, in the order of their numbers in the version of 2021, with which the published
/// figures were made; the last ones came later and have no number here.
const MODES: [(Mode, Option<u32>); 12] = [
    (mode("P52V48_4K", 52), Some(0)),
    (mode("P52V48_64K", 52), Some(1)),
    (mode("P48V48_4K", 48), Some(2)),
    (mode("P48V48_64K", 48), Some(3)),
    (mode("P40V48_4K", 40), Some(4)),
    (mode("P40V48_64K", 40), Some(5)),
    (mode("PXXV48_4K", 48), Some(6)),
    (mode("P48V48_16K", 48), None),
    (mode("P40V48_16K", 40), None),
    (mode("P36V48_4K", 36), None),
    (mode("P36V48_16K", 36), None),
    (mode("P36V48_64K", 36), None),
];

const fn mode(name: &'static str, bits: u32) -> Mode {
    Mode { name, bits }
}

impl Mode {
    /// Bits of a guest's physical address, of a mode that has so many on every computer.
    pub fn fixed_bits(self) -> Option<u32> {
        (self.name != "PXXV48_4K").then_some(self.bits)
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.parse::<u32>().ok();
        let named = |(mode, of): &&(Mode, Option<u32>)| {
            mode.name.eq_ignore_ascii_case(text) || of.is_some() && *of == number
        };
        match MODES.iter().find(named) {
            Some((mode, _)) => Ok(*mode),
            None => {
                let names: Vec<_> = MODES.iter().map(|(mode, _)| mode.name).collect();
                Err(format!("no such mode: use 0 to 6, or one of {}", names.join(", ")))
            }
        }
    }
}

/// Kind of memory behind a guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Pages, zeros until they are written.
    Anonymous,
    /// Anonymous memory in huge pages, if it can be.
    Thp,
    /// Pages of one size, for the guest alone or shared, given when they are first used.
    Fixed {
        /// Its binary logarithm.
        shift: u32,
    },
}

impl Source {
    /// The size of its pages.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Anonymous => PAGE,
            Self::Thp => BLOCK,
            Self::Fixed { shift } => 1 << shift,
        }
    }
}

impl Source {
    /// The largest leaf that fits into one of its pages.
    pub fn level(self) -> Level {
        Level::new(match self.bytes() {
            ..BLOCK => 0,
            BLOCK..0x4000_0000 => 1,
            _ => 2,
        })
    }
}

/// A [`Source`] by the name of the published test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Its name.
    pub name: &'static str,
    pub source: Source,
}

const BACKINGS: [Backing; 17] = [
    Backing::ANONYMOUS,
    backing("anonymous_thp", Source::Thp),
    backing("anonymous_hugetlb", Source::Fixed { shift: 21 }),
    backing("anonymous_hugetlb_16kb", Source::Fixed { shift: 14 }),
    backing("anonymous_hugetlb_64kb", Source::Fixed { shift: 16 }),
    backing("anonymous_hugetlb_512kb", Source::Fixed { shift: 19 }),
    backing("anonymous_hugetlb_1mb", Source::Fixed { shift: 20 }),
    Backing::HUGETLB_2MB,
    backing("anonymous_hugetlb_8mb", Source::Fixed { shift: 23 }),
    backing("anonymous_hugetlb_16mb", Source::Fixed { shift: 24 }),
    backing("anonymous_hugetlb_32mb", Source::Fixed { shift: 25 }),
    backing("anonymous_hugetlb_256mb", Source::Fixed { shift: 28 }),
    backing("anonymous_hugetlb_512mb", Source::Fixed { shift: 29 }),
    Backing::HUGETLB_1GB,
    backing("anonymous_hugetlb_2gb", Source::Fixed { shift: 31 }),
    backing("anonymous_hugetlb_16gb", Source::Fixed { shift: 34 }),
    backing("shmem", Source::Fixed { shift: 12 }),
];
/// Shared huge pages are those of `anonymous_hugetlb`, for this test.
const SHARED_HUGETLB: Backing = backing("shared_hugetlb", Source::Fixed { shift: 21 });

const fn backing(name: &'static str, source: Source) -> Backing {
    Backing { name, source }
}

impl FromStr for Backing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = || BACKINGS.iter().chain([&SHARED_HUGETLB]);
        all().find(|backing| backing.name == text).copied().ok_or_else(|| {
            let names: Vec<_> = all().map(|backing| backing.name).collect();
            format!("no such backing: use one of {}", names.join(", "))
        })
    }
}

impl Backing {
    /// Pages, zeros until they are written: what the published tests have if nothing else is said.
    pub const ANONYMOUS: Self = backing("anonymous", Source::Anonymous);
    /// Huge pages of a pool.
    pub const HUGETLB_2MB: Self = backing("anonymous_hugetlb_2mb", Source::Fixed { shift: 21 });
    /// Huge pages of a gigabyte.
    pub const HUGETLB_1GB: Self = backing("anonymous_hugetlb_1gb", Source::Fixed { shift: 30 });
}

/// The guest of a run.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    pub source: Backing,
    /// How much of it.
    pub bytes: u64,
    /// How many vCPUs use it.
    pub vcpus: u16,
}

impl Guest {
    /// Takes the options that are given, and the rest of the published tests; without any, `shown`.
    pub fn new(
        source: Option<Backing>,
        bytes: Option<Size>,
        vcpus: Option<u16>,
        shown: Self,
    ) -> Self {
        match (source, bytes, vcpus) {
            (None, None, None) => shown,
            _ => Self {
                source: source.unwrap_or(Backing::ANONYMOUS),
                bytes: bytes.map_or(1 << 30, Size::bytes),
                vcpus: vcpus.unwrap_or(1),
            },
        }
    }
}

/// The guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first address, as the guest has it.
    pub first: u64,
    /// Its size.
    pub bytes: u64,
}

impl Region {
    /// `bytes` of memory from `offset` on, or where the published test puts it: as far up as
    /// addresses go.
    ///
    /// # Errors
    /// The memory is not whole pages of its backing, or does not fit.
    pub fn new(
        mode: Mode,
        backing: Backing,
        bytes: u64,
        offset: Option<u64>,
    ) -> Result<Self, Error> {
        let size = backing.source.bytes();
        let usage = |text: String| Err(Error::Usage(text));
        if !bytes.is_multiple_of(size) {
            return usage(format!(
                "-b {}: not a multiple of the {} that {} has",
                human(bytes),
                human(size),
                backing.name
            ));
        }
        let top = 1u64 << mode.bits;
        let room = |first: u64| first.checked_add(bytes).is_some_and(|end| end <= top);
        if !room(0) {
            return usage(format!(
                "-b {}: {} has addresses for {}",
                human(bytes),
                mode.name,
                human(top)
            ));
        }
        let first = match offset {
            Some(offset) => offset,
            // Whole large pages, so that leaves can be as large.
            None => (top - bytes) & !(size.max(BLOCK) - 1),
        };
        if !first.is_multiple_of(size) {
            return usage(format!("-p {first:#x}: not a multiple of {}", human(size)));
        }
        if !room(first) {
            return usage(format!(
                "-p {first:#x}: {} from there reach beyond the {} bits of {}",
                human(bytes),
                mode.bits,
                mode.name
            ));
        }
        Ok(Self { first, bytes })
    }

    /// One `scale`th of it, at the same place.
    ///
    /// # Errors
    /// That is no whole number of pages of its backing.
    pub fn scaled(self, backing: Backing, scale: u64) -> Result<Self, Error> {
        let bytes = self.bytes / scale;
        if bytes == 0
            || !self.bytes.is_multiple_of(scale)
            || !bytes.is_multiple_of(backing.source.bytes())
        {
            return Err(Error::Usage(format!(
                "--scale {scale}: {} of {} is no multiple of {}",
                human(self.bytes),
                backing.name,
                human(backing.source.bytes())
            )));
        }
        Ok(Self { bytes, ..self })
    }
}
