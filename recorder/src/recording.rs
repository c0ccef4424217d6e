//! A recording: which pages a program wrote in each interval, in a file.
//!
//! ```text
//! file     = "TWRECORD" version(1 byte) header record* end crc
//! header   = method blind kernel command pid page start interval
//! record   = 'R' first pages name      part of the address space gets the next page numbers
//!          | 'P' runs                  these pages were there when the recording began
//!          | 'I' length runs           these pages were written in the next `length` nanoseconds
//! end      = 'E' intervals written reason cost warnings
//! cost     = stopped harvested faults fault huge-before huge-after
//! runs     = count (gap pages)*             gap: from the end of the run before, or from page 0
//! blind, warnings = count text*
//! text     = length bytes(UTF-8)
//! crc      = 4 bytes, little-endian: CRC-32 of everything before
//! ```
//!
//! A field without a size beside it is an integer in LEB128: seven bits a byte, lowest first, the
//! eighth bit set in all bytes but the last. `page` is in bytes, `start` in nanoseconds since 1970,
//! `interval` and the rest in nanoseconds.
//!
//! # Page numbers
//!
//! The pages of a recording are numbered as a guest would see them, without the holes of an address
//! space: `R` records hand out the numbers from 0 on, in the order in which they come, and only a
//! number that was handed out is used. A part that is unmapped keeps its numbers: what is mapped
//! there later has them again, as memory of a guest that its kernel gives to another process.
//!
//! # What a reader may rely on
//!
//! [`Recording::parse`] looks at every byte, so what it returns is whole: runs ascend, do not touch
//! each other, are not empty and have numbers that were handed out before; parts do not overlap;
//! the totals at the end are those of the intervals. It reserves no memory on the word of the file,
//! so a damaged one costs as much as it is long.

use std::collections::BTreeMap;

use serde::Serialize;

const MAGIC: &[u8; 8] = b"TWRECORD";
const VERSION: u8 = 1;
const REGION: u8 = b'R';
const PRESENT: u8 = b'P';
const INTERVAL: u8 = b'I';
const END: u8 = b'E';
/// Page numbers fit into 52 bits, as those of addresses of 64 bits do.
const MOST_PAGES: u64 = 1 << 52;
/// The longest recording that is made or read.
pub const LONGEST: u64 = 1 << 30;

/// How, what and when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Header {
    /// How writes were seen.
    pub method: String,
    /// Which writes were not, or more than were there.
    pub blind: Vec<String>,
    /// The kernel that watched.
    pub kernel: String,
    /// The command that was recorded.
    pub command: String,
    /// Its number then.
    pub pid: u64,
    /// Bytes of a page.
    pub page_size: u64,
    /// When the first interval begins, in nanoseconds since 1970.
    pub start_ns: u64,
    /// How long an interval should be, in nanoseconds.
    pub interval_ns: u64,
}

/// Consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// The first one.
    pub first: u64,
    /// How many.
    pub pages: u64,
}

impl Run {
    /// The page behind the last one.
    pub const fn end(self) -> u64 {
        self.first + self.pages
    }
}

/// Sorts runs and joins those that touch or overlap.
pub fn join(runs: &mut Vec<Run>) {
    runs.sort_unstable();
    runs.dedup_by(|next, run| {
        let joined = next.first <= run.end();
        if joined {
            run.pages = run.pages.max(next.end() - run.first);
        }
        joined
    });
}

/// How many pages they are.
pub fn pages(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.pages).sum()
}

/// A part of the address space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Region {
    /// The number of its first page in the recording.
    pub page: u64,
    /// The number of its first page in the address space: the address over the page's size.
    pub first: u64,
    /// How many.
    pub pages: u64,
    /// The kernel's name for it.
    pub name: String,
}

/// The writes between two harvests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interval {
    /// When it began, in nanoseconds after the start.
    pub start_ns: u64,
    /// How long it was.
    pub length_ns: u64,
    /// The pages that were written in it, ascending.
    pub runs: Vec<Run>,
}

/// The effect of the recording on the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// How long it was stopped in all, in nanoseconds.
    pub stopped_ns: u64,
    /// How long the recorder looked at its memory while it ran.
    pub harvest_ns: u64,
    /// At most so many page faults that it would not have had.
    pub faults: u64,
    /// The cost of one, measured on this computer.
    pub fault_ns: u64,
    /// Bytes of huge pages that it had when the recording began.
    pub huge_before: u64,
    /// And when it ended: single writes split them.
    pub huge_after: u64,
}

/// Knowledge at the end of the recording.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// How many.
    pub intervals: u64,
    /// Pages written, added up over the intervals.
    pub written: u64,
    /// Why the recording ended.
    pub ended: String,
    /// Its effect on the program.
    pub cost: Cost,
    /// Warnings to the reader.
    pub warnings: Vec<String>,
}

/// Writes a recording.
pub struct Writer {
    bytes: Vec<u8>,
    intervals: u64,
    written: u64,
}

impl Writer {
    /// A recording without records.
    pub fn new(header: &Header) -> Self {
        let mut writer = Self { bytes: Vec::new(), intervals: 0, written: 0 };
        writer.bytes.extend_from_slice(MAGIC);
        writer.bytes.push(VERSION);
        writer.text(&header.method);
        writer.texts(&header.blind);
        writer.text(&header.kernel);
        writer.text(&header.command);
        for number in [header.pid, header.page_size, header.start_ns, header.interval_ns] {
            writer.number(number);
        }
        writer
    }

    /// These pages of the address space have the next numbers.
    pub fn region(&mut self, first: u64, pages: u64, name: &str) {
        self.bytes.push(REGION);
        self.number(first);
        self.number(pages);
        self.text(name);
    }

    /// These pages were there at the start. Runs are as [`join`] leaves them, here and below.
    pub fn present(&mut self, runs: &[Run]) {
        self.bytes.push(PRESENT);
        self.runs(runs);
    }

    /// These pages were written in the next interval.
    pub fn interval(&mut self, length_ns: u64, runs: &[Run]) {
        self.bytes.push(INTERVAL);
        self.number(length_ns);
        self.runs(runs);
        self.intervals += 1;
        self.written += pages(runs);
    }

    /// Bytes so far.
    pub fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The whole file. The counts of the summary are those of what was written.
    pub fn finish(mut self, summary: &Summary) -> Vec<u8> {
        let cost = &summary.cost;
        self.bytes.push(END);
        self.number(self.intervals);
        self.number(self.written);
        self.text(&summary.ended);
        for number in [
            cost.stopped_ns,
            cost.harvest_ns,
            cost.faults,
            cost.fault_ns,
            cost.huge_before,
            cost.huge_after,
        ] {
            self.number(number);
        }
        self.texts(&summary.warnings);
        let crc = crc32fast::hash(&self.bytes);
        self.bytes.extend_from_slice(&crc.to_le_bytes());
        self.bytes
    }

    fn runs(&mut self, runs: &[Run]) {
        self.number(runs.len() as u64);
        let mut end = 0;
        for run in runs {
            self.number(run.first - end);
            self.number(run.pages);
            end = run.end();
        }
    }

    fn texts(&mut self, texts: &[String]) {
        self.number(texts.len() as u64);
        for text in texts {
            self.text(text);
        }
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.bytes.extend_from_slice(text.as_bytes());
    }

    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.bytes.push(number as u8);
    }
}

/// The place at which a file is not a recording.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {offset}: {problem}")]
pub struct RecordingError {
    /// From the beginning of the file.
    pub offset: usize,
    /// The problem there.
    pub problem: Problem,
}

/// A problem with a recording.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// It is another file.
    #[error("not a recording: it does not begin with 'TWRECORD'")]
    Foreign,
    /// Its version, which is not known.
    #[error("version {0} of the format; this program knows {VERSION}")]
    Version(u8),
    /// It ends in the middle of this.
    #[error("the file ends in the middle of {0}: it is truncated")]
    Truncated(&'static str),
    /// This does not fit a number.
    #[error("{0} of more than 64 bits")]
    TooLarge(&'static str),
    /// This is not UTF-8.
    #[error("{0} that is not UTF-8")]
    NotText(&'static str),
    /// No pages are of so many bytes.
    #[error("a page size of {0} bytes")]
    PageSize(u64),
    /// No record is of this kind.
    #[error("a record of an unknown kind, {0:#04x}")]
    Kind(u8),
    /// A part of so many pages, which overlaps another or is too large.
    #[error("a part of the address space of {0} pages that overlaps another or is too large")]
    Region(u64),
    /// A run that is empty, or touches the one before.
    #[error("a run that is empty, or touches the one before")]
    Run,
    /// A run ends behind the pages that were handed out.
    #[error("a run up to page {end}, where there are {pages} pages")]
    Beyond {
        /// The end of it.
        end: u64,
        /// How many there are.
        pages: u64,
    },
    /// A record of what was there comes after an interval.
    #[error("pages that were there at the start, after the start")]
    Late,
    /// The times come to more than a number holds.
    #[error("intervals that last longer than 64 bits of nanoseconds")]
    Time,
    /// The totals are not those of so many intervals before.
    #[error("the totals are not those of the {0} intervals before")]
    Totals(u64),
    /// The bytes are not those that were written.
    #[error("the checksum is {found:#010x} and should be {expected:#010x}: the file was changed")]
    Checksum {
        /// The checksum of the file.
        expected: u32,
        /// The checksum of its bytes.
        found: u32,
    },
    /// Bytes follow the end.
    #[error("{0} bytes behind the end of the recording")]
    Trailing(usize),
}

/// A recording that was read, and is whole.
#[derive(Clone, Debug)]
pub struct Recording {
    bytes: Vec<u8>,
    header: Header,
    regions: Vec<Region>,
    pages: u64,
    present: Vec<Run>,
    /// The places of the intervals, behind their tags.
    intervals: Vec<usize>,
    summary: Summary,
}

impl Recording {
    /// Whether a recording may start with these bytes.
    pub fn may_start_with(bytes: &[u8]) -> bool {
        bytes.starts_with(MAGIC)
    }

    /// Reads what is in a file.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, RecordingError> {
        let mut cursor = Cursor { bytes: &bytes, at: 0 };
        let header = cursor.header()?;
        let mut regions: Vec<Region> = Vec::new();
        let mut taken = BTreeMap::new();
        let mut all = 0;
        let mut present = Vec::new();
        let mut intervals = Vec::new();
        let mut time = 0u64;
        let mut written = 0u64;
        let summary = loop {
            let at = cursor.at;
            match cursor.byte("the records")? {
                REGION => {
                    let first = cursor.number("an address")?;
                    let pages = cursor.number("a count of pages")?;
                    let name = cursor.text("a name")?;
                    let free = pages > 0
                        && first.checked_add(pages).is_some_and(|end| end <= MOST_PAGES)
                        && all + pages <= MOST_PAGES
                        && !overlaps(&taken, first, pages);
                    if !free {
                        return Err(error(at, Problem::Region(pages)));
                    }
                    taken.insert(first, pages);
                    regions.push(Region { page: all, first, pages, name });
                    all += pages;
                }
                PRESENT if intervals.is_empty() && present.is_empty() => {
                    present = cursor.runs(all)?;
                }
                PRESENT => return Err(error(at, Problem::Late)),
                INTERVAL => {
                    intervals.push(cursor.at);
                    let (length, runs) = cursor.interval(all)?;
                    time = time.checked_add(length).ok_or(error(at, Problem::Time))?;
                    // Each interval has fewer than 2^52 pages in fewer than 2^30 bytes.
                    written = written.saturating_add(pages(&runs));
                }
                END => {
                    let summary = cursor.summary()?;
                    if (summary.intervals, summary.written) != (intervals.len() as u64, written) {
                        return Err(error(at, Problem::Totals(intervals.len() as u64)));
                    }
                    break summary;
                }
                kind => return Err(error(at, Problem::Kind(kind))),
            }
        };
        cursor.end()?;
        Ok(Self { header, regions, pages: all, present, intervals, summary, bytes })
    }

    /// How, what and when.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The parts of the address space, in the order of their page numbers.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// One more than the largest page number.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the pages that were there when the recording began.
    pub fn present(&self) -> &[Run] {
        &self.present
    }

    /// Returns the summary at the end.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// The intervals, in order.
    pub fn intervals(&self) -> impl Iterator<Item = Interval> {
        let mut start_ns = 0;
        self.intervals.iter().map_while(move |&at| {
            let mut cursor = Cursor { bytes: &self.bytes, at };
            // It was read once before.
            let (length_ns, runs) = cursor.interval(self.pages).ok()?;
            let interval = Interval { start_ns, length_ns, runs };
            start_ns += length_ns;
            Some(interval)
        })
    }
}

fn overlaps(taken: &BTreeMap<u64, u64>, first: u64, pages: u64) -> bool {
    let before = taken.range(..first + pages).next_back();
    before.is_some_and(|(&other, &others)| other + others > first)
}

fn error(offset: usize, problem: Problem) -> RecordingError {
    RecordingError { offset, problem }
}

/// A place in the file.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn header(&mut self) -> Result<Header, RecordingError> {
        if !self.bytes.starts_with(MAGIC) {
            return Err(if MAGIC.starts_with(self.bytes) {
                error(self.bytes.len(), Problem::Truncated("the header"))
            } else {
                error(0, Problem::Foreign)
            });
        }
        self.at = MAGIC.len();
        match self.byte("the header")? {
            VERSION => (),
            version => return Err(error(self.at - 1, Problem::Version(version))),
        }
        let method = self.text("the method")?;
        let blind = self.texts("what the method does not see")?;
        let kernel = self.text("the kernel")?;
        let command = self.text("the command")?;
        let pid = self.number("the process")?;
        let at = self.at;
        let page_size = self.number("the page size")?;
        if !page_size.is_power_of_two() || !(1 << 9..=1 << 30).contains(&page_size) {
            return Err(error(at, Problem::PageSize(page_size)));
        }
        Ok(Header {
            method,
            blind,
            kernel,
            command,
            pid,
            page_size,
            start_ns: self.number("the start")?,
            interval_ns: self.number("the interval")?,
        })
    }

    fn interval(&mut self, all: u64) -> Result<(u64, Vec<Run>), RecordingError> {
        Ok((self.number("an interval's length")?, self.runs(all)?))
    }

    fn runs(&mut self, all: u64) -> Result<Vec<Run>, RecordingError> {
        let count = self.number("a count of runs")?;
        let mut runs: Vec<Run> = Vec::new();
        let mut end = 0u64;
        for number in 0..count {
            let at = self.at;
            let gap = self.number("a run")?;
            let pages = self.number("a run")?;
            if pages == 0 || (gap == 0 && number > 0) {
                return Err(error(at, Problem::Run));
            }
            let first = end.saturating_add(gap);
            end = first.saturating_add(pages);
            if end > all {
                return Err(error(at, Problem::Beyond { end, pages: all }));
            }
            runs.push(Run { first, pages });
        }
        Ok(runs)
    }

    fn summary(&mut self) -> Result<Summary, RecordingError> {
        const WHAT: &str = "the totals";
        Ok(Summary {
            intervals: self.number(WHAT)?,
            written: self.number(WHAT)?,
            ended: self.text(WHAT)?,
            cost: Cost {
                stopped_ns: self.number(WHAT)?,
                harvest_ns: self.number(WHAT)?,
                faults: self.number(WHAT)?,
                fault_ns: self.number(WHAT)?,
                huge_before: self.number(WHAT)?,
                huge_after: self.number(WHAT)?,
            },
            warnings: self.texts("the warnings")?,
        })
    }

    /// The checksum, and nothing behind it.
    fn end(&mut self) -> Result<(), RecordingError> {
        let at = self.at;
        let found = crc32fast::hash(&self.bytes[..at]);
        let mut expected = [0; 4];
        for byte in &mut expected {
            *byte = self.byte("the checksum")?;
        }
        let expected = u32::from_le_bytes(expected);
        if found != expected {
            return Err(error(at, Problem::Checksum { expected, found }));
        }
        match self.bytes.len() - self.at {
            0 => Ok(()),
            more => Err(error(self.at, Problem::Trailing(more))),
        }
    }

    fn texts(&mut self, what: &'static str) -> Result<Vec<String>, RecordingError> {
        let count = self.number(what)?;
        let mut texts = Vec::new();
        for _ in 0..count {
            texts.push(self.text(what)?);
        }
        Ok(texts)
    }

    fn text(&mut self, what: &'static str) -> Result<String, RecordingError> {
        let length = self.number(what)?;
        let rest = &self.bytes[self.at..];
        let Some(text) = usize::try_from(length).ok().and_then(|n| rest.get(..n)) else {
            return Err(error(self.bytes.len(), Problem::Truncated(what)));
        };
        let Ok(text) = std::str::from_utf8(text) else {
            return Err(error(self.at, Problem::NotText(what)));
        };
        self.at += text.len();
        Ok(text.to_owned())
    }

    fn number(&mut self, what: &'static str) -> Result<u64, RecordingError> {
        let start = self.at;
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte(what)?;
            let bits = u64::from(byte & 0x7f);
            // The tenth byte has one bit left.
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(error(start, Problem::TooLarge(what)))
    }

    fn byte(&mut self, what: &'static str) -> Result<u8, RecordingError> {
        let Some(&byte) = self.bytes.get(self.at) else {
            return Err(error(self.at, Problem::Truncated(what)));
        };
        self.at += 1;
        Ok(byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header {
            method: "scan".into(),
            blind: vec!["devices".into()],
            kernel: "6.18".into(),
            command: "sleep 1".into(),
            pid: 7,
            page_size: 4096,
            start_ns: 1 << 60,
            interval_ns: 100_000_000,
        }
    }

    fn run(first: u64, pages: u64) -> Run {
        Run { first, pages }
    }

    /// Two parts, pages that were there, and two intervals.
    fn small() -> Vec<u8> {
        let mut writer = Writer::new(&header());
        writer.region(0x7000, 10, "[heap]");
        writer.present(&[run(0, 3)]);
        writer.interval(5, &[run(0, 1), run(9, 1)]);
        writer.region(0x100, 300, "");
        writer.interval(6, &[run(200, 110)]);
        writer.finish(&Summary {
            ended: "asked to".into(),
            warnings: vec!["a child was not followed".into()],
            ..Summary::default()
        })
    }

    fn refused(bytes: &[u8]) -> RecordingError {
        Recording::parse(bytes.to_vec()).unwrap_err()
    }

    /// The checksum of changed bytes made right, so that what is below it is tried.
    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let body = bytes.len() - 4;
        let crc = crc32fast::hash(&bytes[..body]);
        bytes[body..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    #[test]
    fn pages_are_numbered_in_the_order_in_which_they_come_into_use() {
        let recording = Recording::parse(small()).unwrap();
        assert_eq!(recording.pages(), 310);
        assert_eq!(recording.regions()[0].page, 0);
        assert_eq!(recording.regions()[1].page, 10);
        assert_eq!(recording.regions()[1].first, 0x100);
        assert_eq!(recording.present(), [run(0, 3)]);
        let intervals: Vec<_> = recording.intervals().collect();
        assert_eq!(intervals[0].runs, [run(0, 1), run(9, 1)]);
        assert_eq!((intervals[1].start_ns, intervals[1].length_ns), (5, 6));
        assert_eq!(recording.summary().written, 112);
    }

    #[test]
    fn every_truncation_is_refused_and_says_where() {
        let bytes = small();
        for length in 0..bytes.len() {
            let error = refused(&bytes[..length]);
            assert!(matches!(error.problem, Problem::Truncated(_)), "{error}");
            assert_eq!(error.offset, length, "{error}");
        }
    }

    #[test]
    fn every_changed_bit_is_refused() {
        let bytes = small();
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            refused(&changed);
        }
    }

    #[test]
    fn what_is_no_recording_says_so() {
        assert_eq!(refused(b"GIF89a").problem, Problem::Foreign);
        assert_eq!(refused(b"").problem, Problem::Truncated("the header"));
        assert_eq!(refused(b"TWRECORD\x02").to_string().lines().count(), 1);
        let error = refused(b"TWRECORD\x02");
        assert_eq!((error.offset, error.problem), (8, Problem::Version(2)));
        let mut longer = small();
        longer.extend_from_slice(b"xy");
        assert_eq!(refused(&longer).problem, Problem::Trailing(2));
    }

    #[test]
    fn records_that_make_no_sense_say_where() {
        let start = Writer::new(&header()).size() as usize;
        let finish = |writer: Writer| refused(&writer.finish(&Summary::default()));

        let mut writer = Writer::new(&header());
        writer.interval(1, &[run(3, 1)]);
        let error = finish(writer);
        assert_eq!(error.problem, Problem::Beyond { end: 4, pages: 0 });
        assert_eq!(error.offset, start + 3);

        let mut writer = Writer::new(&header());
        writer.region(8, 8, "");
        writer.region(15, 1, "");
        assert_eq!(finish(writer).problem, Problem::Region(1));
        let mut writer = Writer::new(&header());
        writer.region(u64::MAX, 2, "");
        assert_eq!(finish(writer).problem, Problem::Region(2));

        let mut writer = Writer::new(&header());
        writer.region(0, 8, "");
        writer.interval(1, &[run(0, 1), run(1, 1)]);
        assert_eq!(finish(writer).problem, Problem::Run);

        let mut writer = Writer::new(&header());
        writer.region(0, 8, "");
        writer.interval(1, &[]);
        writer.present(&[]);
        assert_eq!(finish(writer).problem, Problem::Late);

        let mut writer = Writer::new(&header());
        writer.interval(u64::MAX, &[]);
        writer.interval(1, &[]);
        assert_eq!(finish(writer).problem, Problem::Time);

        let mut writer = Writer::new(&header());
        writer.interval(1, &[]);
        writer.intervals = 2;
        assert_eq!(finish(writer).problem, Problem::Totals(1));

        let mut writer = Writer::new(&header());
        writer.bytes.extend_from_slice(&[INTERVAL, 0xff]);
        writer.bytes.extend_from_slice(&[0xff; 9]);
        let error = finish(writer);
        let what = "an interval's length";
        assert_eq!((error.offset, error.problem), (start + 1, Problem::TooLarge(what)));

        let writer = Writer::new(&Header { page_size: 0, ..header() });
        assert_eq!(finish(writer).problem, Problem::PageSize(0));
    }

    #[test]
    fn runs_that_touch_are_one() {
        let mut runs = vec![run(8, 2), run(0, 4), run(4, 1), run(9, 1), run(20, 1)];
        join(&mut runs);
        assert_eq!(runs, [run(0, 5), run(8, 2), run(20, 1)]);
    }

    fn runs_below(pages: u64) -> impl Strategy<Value = Vec<Run>> {
        prop::collection::vec((0..pages, 1..40u64), 0..20).prop_map(move |pairs| {
            let mut runs: Vec<_> = pairs
                .into_iter()
                .map(|(first, length)| run(first, length.min(pages - first)))
                .collect();
            join(&mut runs);
            runs
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            method in ".{0,8}", blind in prop::collection::vec(".{0,8}", 0..3),
            command in ".{0,40}", pid: u64,
            page in 9u32..31, start_ns: u64, interval_ns: u64, ended in ".{0,20}",
            warnings in prop::collection::vec(".{0,9}", 0..3), numbers: [u64; 6],
            gap in 0u64..1 << 40,
            present in runs_below(5000),
            intervals in prop::collection::vec((0u64..1 << 50, runs_below(5000)), 0..10),
        ) {
            let header = Header {
                method, blind, kernel: String::new(), command, pid, page_size: 1 << page, start_ns,
                    interval_ns,
            };
            let mut writer = Writer::new(&header);
            writer.region(gap, 1000, "one");
            writer.region(gap + 1000, 4000, "two");
            writer.present(&present);
            for (length, runs) in &intervals {
                writer.interval(*length, runs);
            }
            let [stopped_ns, harvest_ns, faults, fault_ns, huge_before, huge_after] = numbers;
            let cost = Cost { stopped_ns, harvest_ns, faults, fault_ns, huge_before, huge_after };
            let mut summary = Summary { intervals: 0, written: 0, ended, cost, warnings };
            let recording = Recording::parse(writer.finish(&summary)).unwrap();
            summary.intervals = intervals.len() as u64;
            summary.written = intervals.iter().map(|(_, runs)| pages(runs)).sum();
            prop_assert_eq!(recording.header(), &header);
            prop_assert_eq!(recording.summary(), &summary);
            prop_assert_eq!(recording.present(), &present[..]);
            let read: Vec<_> = recording.intervals().map(|interval| (interval.length_ns,
                interval.runs)).collect();
            prop_assert_eq!(read, intervals);
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let foreign = Recording::parse(bytes.clone()).unwrap_err();
            prop_assert!(foreign.offset <= bytes.len());
            let mut ours = Writer::new(&header()).bytes;
            ours.extend_from_slice(&bytes);
            if let Err(error) = Recording::parse(ours.clone()) {
                prop_assert!(error.offset <= ours.len());
            }
        }

        /// Bytes changed and the checksum made right: whatever is accepted keeps the promises of
        /// the format.
        #[test]
        fn what_is_accepted_is_whole(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let mut bytes = small();
            let body = bytes.len() - 4;
            for (place, byte) in changes {
                let place = place.index(body);
                bytes[place] = byte;
            }
            if let Ok(recording) = Recording::parse(sealed(bytes)) {
                prop_assert_eq!(recording.intervals().count() as u64,
                    recording.summary().intervals);
                for interval in recording.intervals() {
                    let runs = &interval.runs;
                    prop_assert!(runs.windows(2).all(|pair| pair[0].end() < pair[1].first));
                    prop_assert!(runs.iter().all(|run| run.pages > 0));
                    prop_assert!(runs.iter().all(|run| run.end() <= recording.pages()));
                }
            }
        }
    }
}
