//! The hosts: what each published change brings on top of those before it, and the engine.

use std::fmt;
use std::str::FromStr;

use crate::dirty_log::job::{By, How, Options, Split};
use crate::tlb_flush::job::How as Flush;

/// A kernel's version: major and minor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u32, u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

impl FromStr for Version {
    type Err = String;

    /// Ignores what follows the second number: it is the distribution's.
    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let digits = text.bytes().take_while(u8::is_ascii_digit).count();
            text[..digits].parse::<u32>().ok()
        };
        let parts = text.split_once('.');
        parts
            .and_then(|(major, rest)| Some(Self(number(major)?, number(rest)?)))
            .ok_or_else(|| "a version is two numbers, as in 6.6".to_owned())
    }
}

/// One host.
#[derive(Debug)]
pub struct Way {
    /// In the legend and in the JSON.
    pub name: &'static str,
    /// At the head of its column.
    pub short: &'static str,
    /// First kernel that has it; none of the engine.
    pub kernel: Option<Version>,
    pub what: &'static str,
    pub how: How,
    split: Split,
    all_set: bool,
    /// How others are told of a shootdown.
    pub flush: Flush,
}

impl Way {
    pub fn options(&self, by: By) -> Options {
        Options { by, split: self.split, all_set: self.all_set, ..Options::default() }
    }
}

const X86: [Way; 6] = [
    Way {
        name: "by fault",
        short: "fault",
        kernel: Some(Version(5, 11)),
        what: "a start protects all, a first write splits, a stop zaps each leaf",
        how: How::LeafByLeaf,
        split: Split::Fault,
        all_set: false,
        flush: Flush::Interrupt,
    },
    Way {
        name: "all set",
        short: "all set",
        kernel: Some(Version(5, 11)),
        what: "+ KVM_DIRTY_LOG_INITIALLY_SET: protected when the log is read",
        how: How::LeafByLeaf,
        split: Split::Fault,
        all_set: true,
        flush: Flush::Interrupt,
    },
    Way {
        name: "split ahead",
        short: "ahead",
        kernel: Some(Version(5, 18)),
        what: "+ the host's thread splits, before it protects",
        how: How::LeafByLeaf,
        split: Split::Ahead,
        all_set: true,
        flush: Flush::Interrupt,
    },
    Way {
        name: "by table",
        short: "tables",
        kernel: Some(Version(6, 0)),
        what: "+ a stop zaps tables",
        how: How::Before,
        split: Split::Ahead,
        all_set: true,
        flush: Flush::Interrupt,
    },
    Way {
        name: "in place",
        short: "in place",
        kernel: Some(Version(6, 13)),
        what: "+ a stop puts the large leaf in the place of the table",
        how: How::InPlace,
        split: Split::Ahead,
        all_set: true,
        flush: Flush::Interrupt,
    },
    Way {
        name: "Tablewright",
        short: "engine",
        kernel: None,
        what: "one step to start, splits in place, 64 tables share a flush",
        how: How::Tablewright,
        split: Split::Fault,
        all_set: true,
        flush: Flush::Tablewright,
    },
];

const ARM64: [Way; 5] = [
    Way {
        name: "one lock",
        short: "lock",
        kernel: Some(Version(5, 11)),
        what: "a start protects all, and faults queue for a lock",
        how: How::Before,
        split: Split::Fault,
        all_set: false,
        flush: Flush::Broadcast,
    },
    Way {
        name: "all set",
        short: "all set",
        kernel: Some(Version(5, 11)),
        what: "+ KVM_DIRTY_LOG_INITIALLY_SET: protected when the log is read",
        how: How::Before,
        split: Split::Fault,
        all_set: true,
        flush: Flush::Broadcast,
    },
    Way {
        name: "beside",
        short: "beside",
        kernel: Some(Version(6, 2)),
        what: "+ faults hold the lock together",
        how: How::After,
        split: Split::Fault,
        all_set: true,
        flush: Flush::Broadcast,
    },
    Way {
        name: "split ahead",
        short: "ahead",
        kernel: Some(Version(6, 5)),
        what: "+ the host's thread splits, before it protects",
        how: How::After,
        split: Split::Ahead,
        all_set: true,
        flush: Flush::Broadcast,
    },
    Way {
        name: "Tablewright",
        short: "engine",
        kernel: None,
        what: "one step to start; a stop has large leaves back, a kernel leaves pages",
        how: How::Tablewright,
        split: Split::Fault,
        all_set: true,
        flush: Flush::Tablewright,
    },
];

/// Those of an architecture, in the order of the kernels that have them.
pub fn of(is_x86: bool) -> &'static [Way] {
    if is_x86 { &X86 } else { &ARM64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_kernels_say_them() {
        for (text, version) in
            [("6.6", Version(6, 6)), ("6.12.9-amd64", Version(6, 12)), ("5.4-rc1", Version(5, 4))]
        {
            assert_eq!(text.parse(), Ok(version));
        }
        for text in ["", "6", ".", "6.", "x.1", "99999999999.1"] {
            assert!(text.parse::<Version>().is_err(), "{text}");
        }
        assert!(Version(5, 18) < Version(6, 2));
        for ways in [&X86[..], &ARM64] {
            assert!(ways.is_sorted_by_key(|way| way.kernel.unwrap_or(Version(u32::MAX, 0))));
        }
    }
}
