//! Taking the permission to write from all CPUs at once, in a time that does not grow with memory.
//!
//! To log what a guest writes, all of its memory has to be write-protected. One pass over all
//! leaves takes as long as there is memory. So only the entries of the root are changed: the tables
//! below them are [write-protected](Format::protect_table), and nothing is written below a
//! write-protected table. The first write *opens* the tables on its way, one on each level. To open
//! a table, its own entries are protected first: leaves lose the permission to write, tables are
//! write-protected in their turn. So the work is done where it is needed, a table at a time, and
//! memory that is not written costs nothing.
//!
//! There are two kinds of protection, and a format says which it has ([`Format::TABLES_RESTRICT`]).
//! Where descriptors of tables take permissions away, a write-protected table may still be read
//! through. Where they do not, in arm64 stage 2, it is invalid, and any access opens it. To an
//! editor both are tables like any other.
//!
//! # The invariant
//!
//! *What is below a table that is open was protected after the last start, or made writable after
//! it.*
//!
//! * A start makes the generation odd and waits for the walks that began before. In them, a fault
//!   may be opening a table, or making something writable that it has looked up before. A later one
//!   sees the odd generation and **opens nothing**, until the start has protected the root's tables
//!   and every CPU has forgotten.
//! * One processor opens a table, and marks it meanwhile ([`Format::OPENING`]); others are told
//!   that it is busy. Of two, the slower would protect a page again that the faster has let the
//!   guest write, and no CPU would forget it.
//! * An entry that is claimed may become anything. A table with such an entry stays protected for
//!   now, and a start that meets one at the root waits for the walks that are under way, and looks
//!   again. What an unmap has taken is no such claim: it becomes a hole, and a hole is filled by
//!   walks that began after the start. Nor does the invalidation that it waits for end with a walk:
//!   it takes as long as its gather is kept.
//!
//! # Nothing to forget
//!
//! To open a table takes no invalidation: what is changed in it was out of the reach of writers,
//! and no TLB holds it as writable, since the start has had that forgotten. To open it only allows
//! more.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::addr::{Address, Level};
use crate::edit::Change;
use crate::flush::Ranges;
use crate::format::in_place_of;
use crate::format::{Format, Kind};
use crate::platform::Barrier;
use crate::table::Table;

use super::gather::{Count, is_taken};
use super::{GracePeriod, Refused, SharedPlatform, SharedSpace};

/// A start is under way.
const STARTING: u64 = 1;
/// Nothing is protected any more when it is opened.
const OFF: u64 = 2;
/// A start was dropped before its end, and may have protected some tables.
const DROPPED: u64 = 4;
/// From one start to the next. Sixty-one bits outlive the machine.
const NEXT: u64 = 8;

/// The error where everything cannot be protected in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unprotectable {
    /// Another start is under way.
    Busy,
    /// Hardware marks what is written ([`Caps::hardware_dirty`](crate::Caps::hardware_dirty)): it
    /// would take the protection for a page that is clean.
    HardwareDirty,
    /// A slot still logs what is written.
    Logged,
}

impl core::fmt::Display for Unprotectable {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Busy => write!(f, "all memory is being protected already"),
            Self::HardwareDirty => write!(
                f,
                "hardware marks what is written: write protection of all memory cannot be combined \
                 with that"
            ),
            Self::Logged => write!(f, "a slot still logs what is written"),
        }
    }
}

impl core::error::Error for Unprotectable {}

/// A start: all memory is being write-protected.
///
/// It is driven to its end, and before that no processor can write below a write-protected table.
/// Dropped before, it has not protected everything, and what it has protected can be opened.
#[must_use = "the guest cannot write before it is over"]
pub struct Protecting<'s, F: Format, P: SharedPlatform + Clone> {
    space: &'s SharedSpace<F, P>,
    /// An edit that finds memory protected already finds it so by this, which counts from the start
    /// to the end.
    count: Count<'s>,
    /// Walks from before this have to be over; then the root is protected. `None`: it is.
    since: Option<GracePeriod>,
    /// Some of it may be.
    partly: bool,
}

impl<F: Format, P: SharedPlatform + Clone> Protecting<'_, F, P> {
    /// Goes on until it is over, doing what the embedder does while it waits.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Caps, format::Ept};
    /// # use tablewright_hosted::Threads;
    /// # use tablewright::shared::SharedSpace;
    /// # let caps = Caps { hardware_dirty: false, ..Caps::CONSERVATIVE };
    /// # let platform = Threads::new(8, 12, 1).with_caps(caps);
    /// # let space = SharedSpace::new(AddressSpace::<Ept<4>, _>::new(&platform).unwrap()).unwrap();
    /// space.protect_all()?.drive(core::hint::spin_loop);
    /// # Ok::<(), tablewright::shared::Unprotectable>(())
    /// ```
    pub fn drive(mut self, mut wait: impl FnMut()) {
        while !self.step() {
            wait();
        }
    }

    /// Goes on: protects the root, when the walks that began before are over, and flushes every
    /// TLB. Returns whether it is over: no processor can write but what was made writable since.
    ///
    /// It waits for the walks of others, which take microseconds, or as long as it takes to clean
    /// 2 MiB.
    #[must_use = "a start is driven to its end"]
    pub fn step(&mut self) -> bool {
        let space = self.space;
        let Some(since) = self.since else {
            return true;
        };
        if !space.is_over(since) {
            return false;
        }
        self.partly = true;
        let protected = {
            let _walk = space.platform().enter();
            // SAFETY: the root; a walk is entered.
            let root = unsafe { Table::open(space.platform(), space.root(), F::root_level()) };
            space.write_protect(&root, F::root_level(), F::entries(F::root_level()))
        };
        if protected.is_err() {
            self.since = Some(space.grace_period());
            return false;
        }
        self.since = None;
        self.complete();
        // A walk that opens a table from now on finds all of the root protected.
        space.generation.fetch_add(NEXT - STARTING, Release);
        true
    }

    /// Flushes every TLB.
    fn complete(&mut self) {
        if core::mem::take(&mut self.partly) {
            let mut ranges = Ranges::new();
            ranges.everything = true;
            ranges.run::<F, P>(self.space.platform(), self.space.target(true));
        }
        self.count.end();
    }
}

impl<F: Format, P: SharedPlatform + Clone> Drop for Protecting<'_, F, P> {
    fn drop(&mut self) {
        let dropped = if self.partly { DROPPED } else { 0 };
        self.complete();
        if self.since.is_some() {
            // No TLB holds as writable what lies below the tables that were protected: they are
            // opened as after a start. Until it ends, no other CPU changes the generation.
            let generation = &self.space.generation;
            generation.store(generation.load(Relaxed) & !STARTING | dropped, Release);
        }
    }
}

impl<F: Format, P: SharedPlatform + Clone> SharedSpace<F, P> {
    /// Takes the permission to write from all that is mapped, in one pass over the root.
    ///
    /// # Errors
    /// [`Unprotectable::Busy`], [`Unprotectable::HardwareDirty`].
    pub fn protect_all(&self) -> Result<Protecting<'_, F, P>, Unprotectable> {
        if self.caps().hardware_dirty {
            return Err(Unprotectable::HardwareDirty);
        }
        let generation = self.generation.load(Relaxed);
        let next = generation & !OFF | STARTING;
        if generation & STARTING != 0
            || self.generation.compare_exchange(generation, next, Acquire, Relaxed).is_err()
        {
            return Err(Unprotectable::Busy);
        }
        let mut count = Count::new(&self.unfinished);
        count.begin();
        Ok(Protecting {
            space: self,
            count,
            partly: false,
            // A walk that starts from now on sees the odd generation.
            since: Some(self.grace_period()),
        })
    }

    /// Ends the protection: an entry that is opened from now on passes none of it on.
    pub(crate) fn protect_no_more(&self) -> Result<(), Unprotectable> {
        let generation = self.generation.load(Relaxed);
        let next = generation | OFF;
        let off = || self.generation.compare_exchange(generation, next, Release, Relaxed);
        match generation & STARTING == 0 && off().is_ok() {
            true => Ok(()),
            false => Err(Unprotectable::Busy),
        }
    }

    /// The number of times that everything has been protected.
    pub fn generation(&self) -> u64 {
        self.generation.load(Relaxed) / NEXT
    }

    /// Whether something may be protected.
    #[inline]
    pub(crate) fn may_be_protected(&self) -> bool {
        self.generation.load(Relaxed) != 0
    }

    /// Opens the tables on the way to `input` that keep an access away, a write or any other.
    ///
    /// # Errors
    /// [`Refused::Busy`]: another processor does it, or a start is not over. [`Refused::Retry`].
    #[inline]
    pub fn open(&self, input: F::Input, writes: bool) -> Result<(), Refused<F::Input>> {
        if !self.translates(input) {
            return Err(crate::EditError::InputOutOfRange.into());
        }
        let _walk = self.platform().enter();
        // SAFETY: a walk is entered (1.).
        unsafe { self.open_walking(input, writes) }
    }

    /// # Safety
    /// 1. A walk has been entered.
    #[inline]
    pub(crate) unsafe fn open_walking(
        &self,
        input: F::Input,
        writes: bool,
    ) -> Result<(), Refused<F::Input>> {
        match self.may_be_protected() && (writes || !F::TABLES_RESTRICT) {
            true => self.open_path(input),
            false => Ok(()),
        }
    }

    /// The caller has entered a walk.
    #[inline(never)]
    fn open_path(&self, input: F::Input) -> Result<(), Refused<F::Input>> {
        let generation = self.generation.load(Acquire);
        let (mut frame, mut level) = (self.root(), F::root_level());
        while let Some(below) = level.down() {
            // SAFETY: the root, or a frame that was read from a descriptor of the tree; a walk is
            // entered.
            let table = unsafe { Table::open(self.platform(), frame, level) };
            let index = F::index(input.bits(), level);
            let entry = table.follow(index);
            if F::kind(entry, level) != Kind::Table {
                break;
            }
            frame = F::address(entry, level);
            if F::is_protected(entry) {
                if generation & STARTING != 0 {
                    return Err(Refused::Busy(input));
                }
                let protect = generation & OFF == 0;
                self.open_one(&table, index, entry, below, protect).map_err(|why| match why {
                    NotOpened::Busy => Refused::Busy(input),
                    NotOpened::Changed => Refused::Retry,
                })?;
            }
            level = below;
        }
        Ok(())
    }

    /// Opens the table at `below` that an entry points to.
    #[inline(never)]
    fn open_one(
        &self,
        table: &Table<'_, P>,
        index: usize,
        entry: u64,
        below: Level,
        protect: bool,
    ) -> Result<(), NotOpened> {
        if entry & F::OPENING != 0 {
            return Err(NotOpened::Busy);
        }
        let marked = entry | F::OPENING;
        table.compare_exchange(index, entry, marked).map_err(|_| NotOpened::Changed)?;
        let protected = match protect {
            true => {
                let frame = F::address(entry, below.up());
                // SAFETY: a frame that was read from a descriptor of the tree, in a walk.
                let child = unsafe { Table::open(self.platform(), frame, below) };
                self.write_protect(&child, below, 1 << F::INDEX_BITS)
            }
            false => Ok(()),
        };
        let mut now = marked;
        loop {
            let next = match protected {
                Ok(()) => F::open_table(now),
                Err(_) => now & !F::OPENING,
            };
            // It orders what was protected before. A walker may set the accessed flag of the
            // descriptor meanwhile.
            match table.compare_exchange(index, now, next) {
                Ok(()) => break,
                Err(other) if Self::is_same_table(other, marked, below.up()) => now = other,
                Err(_) => return Err(NotOpened::Changed),
            }
        }
        if protected.is_ok() {
            self.platform().barrier(Barrier::Publish);
        }
        protected
    }

    /// Whether an entry points to the table of another, whatever walkers have done to its flags.
    /// The table is not freed before this walk is over; so it still has the mark.
    fn is_same_table(entry: u64, marked: u64, level: Level) -> bool {
        F::kind(entry, level) == Kind::Table
            && F::address(entry, level) == F::address(marked, level)
    }

    /// Protects all entries of a table: leaves lose the permission to write, tables are
    /// write-protected.
    ///
    /// # Errors
    /// One of them is claimed, and may become anything.
    fn write_protect(
        &self,
        table: &Table<'_, P>,
        level: Level,
        entries: usize,
    ) -> Result<(), NotOpened> {
        let mut claimed = Ok(());
        // What to do with the last pattern: most entries are alike.
        let (mut pattern, mut flip) = (0, 0);
        let mask = F::address_mask(level);
        for index in 0..entries {
            let mut entry = table.load(index);
            while entry != 0 {
                let next = match F::kind(entry, level) {
                    Kind::Invalid => {
                        if !is_taken::<F>(entry) {
                            claimed = Err(NotOpened::Busy);
                        }
                        break;
                    }
                    // A protected table stays as it is. It bears no opening mark, because the walks
                    // that could set one are over.
                    Kind::Table => F::protect_table(entry),
                    Kind::Leaf => {
                        if (entry ^ pattern) & !mask != 0 {
                            pattern = entry;
                            flip = entry ^ read_only::<F>(entry, level);
                        }
                        entry ^ flip
                    }
                };
                if next == entry {
                    break;
                }
                match table.compare_exchange(index, entry, next) {
                    Ok(()) => break,
                    // A flag was set, or another edit was made.
                    Err(now) => entry = now,
                }
            }
        }
        claimed
    }
}

/// A leaf without the permission to write.
#[cold]
fn read_only<F: Format>(leaf: u64, level: Level) -> u64 {
    let attrs = Change::new().write_protect().apply(F::decode(leaf, level));
    // What can be written can be read, in every format.
    F::encode(&attrs, level).map_or(leaf, |bits| in_place_of::<F>(leaf, level, bits))
}

/// Why a table was not opened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NotOpened {
    /// Another processor is at it.
    Busy,
    /// It is not what it was.
    Changed,
}
