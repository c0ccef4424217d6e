//! Whether a subject really built what it was asked for, by reading its tables as a processor would.
//!
//! Never within the timed part. Shares no code with any subject.

use super::subject::{Encoding, Leaf, Subject, Work};
use crate::arena::Arena;

/// What one entry means.
enum Entry {
    Invalid,
    Table(u64),
    Page(Leaf),
}

impl Encoding {
    /// Decodes the bits that matter here; `level` 0 is the table of pages.
    fn decode(self, bits: u64, level: u32) -> Entry {
        match self {
            Self::Arm64 => match (bits & 0b11, level) {
                (0b11, 0) => Entry::Page(Leaf {
                    physical: bits & 0x0000_ffff_ffff_f000,
                    writable: bits & (1 << 7) == 0,
                }),
                (0b11, _) => Entry::Table(bits & 0x0000_ffff_ffff_f000),
                _ => Entry::Invalid,
            },
            Self::X86_64 => match (bits & 1, level) {
                (1, 0) => Entry::Page(Leaf {
                    physical: bits & 0x000f_ffff_ffff_f000,
                    writable: bits & 2 != 0,
                }),
                (1, _) => Entry::Table(bits & 0x000f_ffff_ffff_f000),
                _ => Entry::Invalid,
            },
            Self::None => Entry::Invalid,
        }
    }
}

/// Walks every entry below the root. Every page of `work`, and nothing else, must be mapped, in as many tables as it
/// takes.
pub fn full(subject: &dyn Subject, arena: Arena, work: Work, writable: bool) -> Result<(), String> {
    let Some(root) = subject.root() else {
        return Ok(());
    };
    let mut walk = Walk {
        arena,
        encoding: subject.encoding(),
        next: 0,
        tables: 0,
        writable,
    };
    walk.table(root, 3, 0)?;
    if walk.next != work.entries() {
        return Err(format!("mapped {} pages of {}", walk.next, work.entries()));
    }
    if walk.tables != work.tables() {
        return Err(format!(
            "used {} tables, not {}",
            walk.tables,
            work.tables()
        ));
    }
    Ok(())
}

struct Walk {
    arena: Arena,
    encoding: Encoding,
    next: u64,
    tables: u64,
    writable: bool,
}

impl Walk {
    fn table(&mut self, address: u64, level: u32, start: u64) -> Result<(), String> {
        self.tables += 1;
        for index in 0..512 {
            let at = start + (index << (12 + 9 * level));
            let bits = self
                .arena
                .entry(address, index)
                .ok_or_else(|| format!("a table at {address:#x}, which is not one of ours"))?;
            match self.encoding.decode(bits, level) {
                Entry::Invalid => {}
                Entry::Table(next) if level > 0 => self.table(next, level - 1, at)?,
                Entry::Table(_) => return Err(format!("a table where {at:#x} needs a page")),
                Entry::Page(leaf) => {
                    expect(at, Some(leaf), self.next * Work::PAGE, self.writable)?;
                    self.next += 1;
                }
            }
        }
        Ok(())
    }
}

/// Asks the subject itself about a few pages: the first, the last, some between, and the neighbours of the range.
pub fn spots(subject: &dyn Subject, work: Work, mapped: Option<bool>) -> Result<(), String> {
    if subject.encoding() == Encoding::None {
        return Ok(());
    }
    let last = work.bytes - Work::PAGE;
    for outside in [Work::VIRTUAL - Work::PAGE, Work::VIRTUAL + work.bytes] {
        if outside < 1 << 47 && subject.query(outside).is_some() {
            return Err(format!("{outside:#x} is mapped, outside the range"));
        }
    }
    for offset in [0, last / 3, last / 2, last].map(|offset| offset / Work::PAGE * Work::PAGE) {
        let at = Work::VIRTUAL + offset;
        let leaf = subject.query(at);
        match mapped {
            Some(writable) => expect(at, leaf, offset, writable)?,
            None if leaf.is_some() => return Err(format!("{at:#x} is still mapped")),
            None => {}
        }
    }
    Ok(())
}

fn expect(at: u64, found: Option<Leaf>, offset: u64, writable: bool) -> Result<(), String> {
    let right = Leaf {
        physical: Work::PHYSICAL + offset,
        writable,
    };
    if at == Work::VIRTUAL + offset && found == Some(right) {
        Ok(())
    } else {
        Err(format!("{at:#x} is mapped to {found:x?}, not {right:x?}"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::super::subject::CANDIDATES;
    use super::*;
    use crate::arena::Memory;

    const WORK: Work = Work { bytes: 4 << 20 };

    /// Maps with every subject, and lets `spoil` change one entry of the last table taken, a table of pages.
    fn verdicts(spoil: fn(Encoding, u64) -> u64) -> Vec<Result<(), String>> {
        CANDIDATES
            .iter()
            .map(|candidate| {
                let mut subject = (candidate.subject)();
                let arena = Arena::new(WORK.tables(), 12, Memory::Warm).unwrap();
                subject.begin(arena, WORK).unwrap();
                subject.map().unwrap();
                let root = subject.root().unwrap();
                let last = root + (WORK.tables() - 1) * 4096;
                let frame =
                    std::ptr::NonNull::new(std::ptr::with_exposed_provenance_mut(last as usize));
                // SAFETY: the arena hands out its frames in order, so this is the last one taken; it is held by the
                // subject, which keeps no reference into it between calls.
                let entry = &unsafe { arena.entries(frame.unwrap()) }[77];
                entry.store(spoil(subject.encoding(), entry.load(Relaxed)), Relaxed);
                let verdict = full(subject.as_ref(), arena, WORK, true);
                subject.finish();
                verdict
            })
            .collect()
    }

    #[test]
    fn what_is_right_passes() {
        assert!(verdicts(|_, entry| entry).iter().all(Result::is_ok));
    }

    #[test]
    fn one_wrong_entry_in_a_thousand_is_found() {
        let missing = verdicts(|_, _| 0);
        let elsewhere = verdicts(|_, entry| entry + 0x1000);
        let read_only = verdicts(|encoding, entry| match encoding {
            Encoding::Arm64 => entry | 1 << 7,
            _ => entry & !2,
        });
        for verdict in missing.iter().chain(&elsewhere).chain(&read_only) {
            assert!(
                verdict.as_ref().unwrap_err().contains("is mapped to"),
                "{verdict:?}"
            );
        }
    }
}
