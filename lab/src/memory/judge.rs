//! Whether tables hold what they should, and nothing else: read as a processor reads them, by code
//! that shares nothing with what wrote them.
//!
//! Never within the timed part.

use std::ops::ControlFlow;

use tablewright_walker::{DirtyState, Half, Leaf, Regime, leaves, tables};

use crate::memory::arena::Arena;

/// A tree of tables in an arena.
#[derive(Clone, Copy)]
pub struct Tree {
    pub arena: Arena,
    /// The first of them.
    pub root: u64,
    /// How they are read.
    pub regime: Regime,
    /// The half of the address space in which everything is to be mapped.
    pub half: Half,
    /// Whether hardware sets dirty flags: on arm64 what it would make writable counts as writable.
    pub hardware_dirty: bool,
}

/// Consecutive virtual addresses that should translate to consecutive memory.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// The first virtual address.
    pub start: u64,
    pub frame: u64,
    /// How much is mapped; never zero.
    pub bytes: u64,
    /// Whether the kernel may write.
    pub writable: bool,
    /// Whether the kernel may execute.
    pub executable: bool,
    /// The number of the memory type, if it matters: what the numbers mean is up to the code that
    /// sets the registers.
    pub memory: Option<u8>,
}

/// Counts of a tree that is as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Leaves of any size; members of a contiguous run are counted one by one.
    pub entries: u64,
    /// Tables reachable from the root, with the root.
    pub tables: u64,
}

impl Tree {
    /// Reads every entry of every table. All of `expected` (ascending, apart) must be mapped as it
    /// says, for the kernel alone, and nothing else; with `pages_only` in single pages. Every table
    /// held by the arena must be in use. `progress` hears how many bytes have been found right so
    /// far.
    pub fn check(
        &self,
        expected: impl IntoIterator<Item = Expected>,
        pages_only: bool,
        mut progress: impl FnMut(u64),
    ) -> Result<Found, String> {
        let page = 1 << self.regime.page_shift();
        let mut expected = expected.into_iter();
        let mut rest = expected.next();
        let (mut entries, mut bytes) = (0, 0);
        self.leaves(self.half, |leaf| {
            let Some(want) = rest else {
                return Err(format!("{:#x} is mapped and should not be", leaf.va));
            };
            compare(leaf, want, self.hardware_dirty)?;
            if pages_only && (leaf.size != page || leaf.contiguous) {
                return Err(format!("{:#x} is not mapped with a single page", leaf.va));
            }
            entries += 1;
            bytes += leaf.size;
            progress(bytes);
            rest = if leaf.size == want.bytes {
                expected.next()
            } else {
                Some(Expected {
                    start: want.start + leaf.size,
                    frame: want.frame + leaf.size,
                    bytes: want.bytes - leaf.size,
                    ..want
                })
            };
            Ok(())
        })?;
        if let Some(want) = rest {
            return Err(format!("{:#x} is not mapped", want.start));
        }
        // Otherwise the other half has a root of its own, which is not ours.
        if self.regime.shares_root() {
            self.leaves(opposite(self.half), |leaf| {
                Err(format!("{:#x} is mapped and should not be", leaf.va))
            })?;
        }
        Ok(Found { entries, tables: self.tables()? })
    }

    /// Calls `visit` with each leaf of a half, upwards, until it finds fault with one.
    pub fn leaves(
        &self,
        half: Half,
        mut visit: impl FnMut(&Leaf) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut verdict = Ok(());
        let mut stray = None;
        let walked = leaves(
            self.regime,
            self.root,
            half,
            &mut |table, index| self.read(table, index, &mut stray),
            |leaf| {
                verdict = visit(leaf);
                if verdict.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            },
        );
        stray.map_or(Ok(()), Err)?;
        verdict?;
        walked.map_err(|fault| fault.to_string())
    }

    /// An entry for the walker, which takes whatever it is given: a table that is not ours reads as
    /// empty, and is remembered.
    #[inline]
    fn read(&self, table: u64, index: usize, stray: &mut Option<String>) -> u64 {
        self.arena.entry(table, index as u64).unwrap_or_else(|| {
            stray.get_or_insert_with(|| format!("a table at {table:#x}, which is not one of ours"));
            0
        })
    }

    /// How many tables are reachable; one that is reachable twice counts twice.
    fn tables(&self) -> Result<u64, String> {
        let mut count = 0;
        let held = self.arena.held();
        let mut stray = None;
        let walked = tables(
            self.regime,
            self.root,
            &mut |table, index| self.read(table, index, &mut stray),
            |_| {
                count += 1;
                // A table that points to itself would be followed for ever.
                if count > held { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            },
        );
        stray.map_or(Ok(()), Err)?;
        walked.map_err(|fault| fault.to_string())?;
        if count == held {
            Ok(count)
        } else {
            Err(format!(
                "took {held} tables and uses {}{count}",
                if count > held { "at least " } else { "" }
            ))
        }
    }
}

fn opposite(half: Half) -> Half {
    match half {
        Half::Lower => Half::Upper,
        Half::Upper => Half::Lower,
    }
}

#[inline]
fn compare(leaf: &Leaf, want: Expected, hardware_dirty: bool) -> Result<(), String> {
    let privileged = leaf.access.privileged;
    let user = leaf.access.user;
    let marked = matches!(leaf.dirty, DirtyState::Arm64 { dbm: true, .. });
    let write = privileged.write || (hardware_dirty && marked);
    let right = leaf.va == want.start
        && leaf.pa == want.frame
        && leaf.size <= want.bytes
        && privileged.read
        && write == want.writable
        && privileged.execute == want.executable
        && !(user.read || user.write || user.execute)
        && want.memory.is_none_or(|memory| memory == leaf.memory);
    if right { Ok(()) } else { Err(wrong(leaf, want)) }
}

#[cold]
fn wrong(leaf: &Leaf, want: Expected) -> String {
    if leaf.va > want.start {
        return format!("{:#x} is not mapped", want.start);
    }
    if leaf.va < want.start {
        return format!("{:#x} is mapped and should not be", leaf.va);
    }
    let memory =
        want.memory.map_or("any memory type".to_owned(), |memory| format!("memory type {memory}"));
    format!(
        "{:#x} is mapped to {:#x}, {:#x} bytes, {} for the kernel, {} for the user, memory type \
         {}; it should be mapped to {:#x}, at most {:#x} bytes, r{}{} for the kernel, --- for the \
         user, {memory}",
        leaf.va,
        leaf.pa,
        leaf.size,
        leaf.access.privileged,
        leaf.access.user,
        leaf.memory,
        want.frame,
        want.bytes,
        if want.writable { 'w' } else { '-' },
        if want.executable { 'x' } else { '-' },
    )
}
