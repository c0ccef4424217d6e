//! Whether a subject really did what it was asked for.
//!
//! Never within the timed part.

use tablewright_walker::{Granule, Half, Regime};

use super::subject::{Encoding, Leaf, Subject, Work};
use crate::arena::Arena;
use crate::judge::Tree;

impl Encoding {
    fn regime(self) -> Option<Regime> {
        match self {
            Self::Arm64 => Some(Regime::Arm64Stage1 {
                granule: Granule::K4,
                wide: false,
            }),
            Self::X86_64 => Some(Regime::X86_64 { levels: 4 }),
            Self::None => None,
        }
    }
}

/// Reads every entry below the root. Every page of `work`, and nothing else, must be mapped, in as
/// many tables as it takes.
pub fn full(subject: &dyn Subject, arena: Arena, work: Work, writable: bool) -> Result<(), String> {
    let (Some(root), Some(regime)) = (subject.root(), subject.encoding().regime()) else {
        return Ok(());
    };
    let tree = Tree {
        arena,
        root,
        regime,
        half: Half::Lower,
        hardware_dirty: false,
    };
    let found = tree.check([work.expected(writable)], true, |_| ())?;
    if found.tables != work.tables() {
        return Err(format!(
            "used {} tables, not {}",
            found.tables,
            work.tables()
        ));
    }
    Ok(())
}

/// Asks the subject itself about a few pages: the first, the last, some between, and the neighbours
/// of the range.
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

    use super::super::candidates::CANDIDATES;
    use super::super::subject::Users;
    use super::*;
    use crate::arena::Memory;

    const WORK: Work = Work { bytes: 4 << 20 };

    /// Maps with every subject, and lets `spoil` change one entry of the last table taken, a table
    /// of pages.
    fn verdicts(spoil: fn(Encoding, u64) -> u64) -> Vec<Result<(), String>> {
        CANDIDATES
            .iter()
            .map(|candidate| {
                let mut subject = (candidate.subject)();
                let arena = Arena::new(WORK.tables(), 12, Memory::Warm).unwrap();
                subject.begin(arena, WORK, Users::None).unwrap();
                subject.map().unwrap();
                let root = subject.root().unwrap();
                let last = root + (WORK.tables() - 1) * 4096;
                let frame =
                    std::ptr::NonNull::new(std::ptr::with_exposed_provenance_mut(last as usize));
                // SAFETY: the arena hands out its frames in order, so this is the last one taken;
                // it is held by the subject, which keeps no reference into it between calls.
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
                verdict.as_ref().unwrap_err().contains("mapped"),
                "{verdict:?}"
            );
        }
    }
}
