//! The slots, read by every fault and changed seldom.
//!
//! They stand in order of their addresses in memory that the embedder gives, so that a look-up is a
//! binary search and nothing is allocated. A reader takes no lock: it reads the version, the slots,
//! and the version again. The version is odd while the slots are changed, and another one
//! afterwards; then what was read may be half of one slot and half of another, and is thrown away.
//! Each word is an atomic of its own, so that reading in the middle of a change is no worse.
//!
//! # Orderings
//!
//! The writer makes the version odd, then a release fence, then the slots, and stores the even
//! version with release. A reader loads the version with acquire, then the slots, then an acquire
//! fence, then the version. If it has read any word of a change, the two fences order the odd
//! version before its second load, which differs from the first.

use core::fmt;

use crate::addr::{Ipa, Span};
use crate::flush::next_serial;
use crate::format::{Memory, Perms};
use crate::sync::{AtomicU64, Ordering, const_new, fence};

/// A range of guest addresses with what backs it.
///
/// ```
/// use tablewright::guest::Slot;
/// use tablewright::{Ipa, Perms, Span};
/// let rom = Span::new(Ipa::new(0), 16 << 20)?;
/// let slot =
///     Slot::memory(rom, 0x7f12_0000_0000).with_id(3).with_perms(Perms::READ | Perms::EXEC);
/// assert_eq!(slot.log, tablewright::guest::Log::Off);
/// # Ok::<(), tablewright::AddressError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Names it; no two slots have the same.
    pub id: u16,
    /// The guest's addresses.
    pub guest: Span<Ipa>,
    /// The address that backs the first of them, in the embedder's own numbers.
    pub host: u64,
    /// The permissions of the guest: [`Perms::READ`], [`Perms::WRITE`], [`Perms::EXEC`].
    pub perms: Perms,
    /// The memory type of its leaves.
    pub memory: Memory,
    /// The size of the pages that most likely back it, a power of two. A hint.
    pub page: u64,
    /// Whether writes are logged, and how.
    pub log: Log,
}

/// How writes to a slot are logged. Where they are, leaves are pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Log {
    /// They are not.
    #[default]
    Off,
    /// No page is writable before it is written: the first write faults.
    ByFault,
    /// Hardware marks in the leaf that the page was written
    /// ([`Caps::hardware_dirty`](crate::Caps::hardware_dirty)).
    ByHardware,
    /// Writes are found like those of [`ByHardware`](Self::ByHardware), and each virtual CPU has
    /// the pages written to its [modification log](crate::dirty::ModificationLog): leaves need not
    /// be looked through.
    ByModification,
}

impl Log {
    /// Whether writes are logged.
    pub const fn is_on(self) -> bool {
        !matches!(self, Self::Off)
    }

    #[inline]
    fn from_bits(bits: u64) -> Self {
        const LOGS: [Log; 4] = [Log::Off, Log::ByFault, Log::ByHardware, Log::ByModification];
        LOGS[bits as usize % LOGS.len()]
    }
}

impl Slot {
    /// Memory of which the guest may do everything, backed from `host` on by pages of 2 MiB if all
    /// goes well, with number 0.
    pub const fn memory(guest: Span<Ipa>, host: u64) -> Self {
        Self {
            id: 0,
            guest,
            host,
            perms: Perms::READ.union(Perms::WRITE).union(Perms::EXEC),
            memory: Memory::Normal,
            page: 2 << 20,
            log: Log::Off,
        }
    }

    /// This slot with another number.
    #[must_use]
    pub const fn with_id(mut self, id: u16) -> Self {
        self.id = id;
        self
    }

    /// This slot with other permissions.
    #[must_use]
    pub const fn with_perms(mut self, perms: Perms) -> Self {
        self.perms = perms;
        self
    }

    /// This slot with writes logged in this way, or not.
    #[must_use]
    pub const fn with_log(mut self, log: Log) -> Self {
        self.log = log;
        self
    }
}

/// The error of a slot that was not changed, and of a harvest or protection that has done nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotError {
    /// There are as many slots as there are cells.
    Full,
    /// It overlaps the slot of this number, or has its number.
    Overlap(u16),
    /// It does not begin or end with a page of the format.
    Misaligned,
    /// It ends beyond the addresses that the format translates.
    OutOfRange,
    /// There is no such slot: none, or the guest's own is another.
    Unknown,
    /// Another processor is changing the slots.
    Busy,
    /// Its writes are to be logged by hardware, which does not mark them
    /// ([`Caps::hardware_dirty`](crate::Caps::hardware_dirty)).
    NoHardware,
    /// Writes to this slot are not logged.
    NotLogged(u16),
    /// The slot has so many pages, fewer than were asked for.
    Pages(u64),
    /// These flags of a harvest are not known.
    Flags(u32),
}

impl fmt::Display for SlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => write!(f, "there is no cell left for a slot"),
            Self::Overlap(id) => write!(f, "it overlaps slot {id}"),
            Self::Misaligned => write!(f, "it does not begin or end with a page"),
            Self::OutOfRange => write!(f, "it ends beyond what the format translates"),
            Self::Unknown => write!(f, "there is no such slot"),
            Self::Busy => write!(f, "another processor is changing the slots"),
            Self::NoHardware => write!(f, "hardware does not mark what is written"),
            Self::NotLogged(id) => write!(f, "writes to slot {id} are not logged"),
            Self::Pages(count) => write!(f, "the slot has {count} pages"),
            Self::Flags(bits) => write!(f, "unknown flags {bits:#x}"),
        }
    }
}

impl core::error::Error for SlotError {}

/// A slot as it stands in its cell: of most, a fault needs no more than what it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packed {
    pub guest: Span<Ipa>,
    pub host: u64,
    /// The number, the permissions, the memory, the log and the size of pages: what is not an
    /// address.
    pub rest: u64,
}

impl Packed {
    pub fn new(slot: Slot) -> Self {
        let memory = MEMORY.iter().position(|&kind| kind == slot.memory);
        Self {
            guest: slot.guest,
            host: slot.host,
            rest: u64::from(slot.id)
                | u64::from(slot.perms.bits()) << 16
                | (memory.unwrap_or(0) as u64) << 24
                | (slot.log as u64) << 27
                | u64::from(slot.page.max(1).ilog2()) << 32,
        }
    }

    #[inline]
    pub fn perms(&self) -> Perms {
        Perms::from_bits_truncate((self.rest >> 16) as u8)
    }

    #[inline]
    pub fn log(&self) -> Log {
        Log::from_bits(self.rest >> 27)
    }

    pub fn slot(&self) -> Slot {
        let Self { guest, host, rest } = *self;
        Slot {
            id: rest as u16,
            guest,
            host,
            perms: self.perms(),
            memory: MEMORY[(rest >> 24) as usize % MEMORY.len()],
            page: 1 << (rest >> 32 & 63),
            log: self.log(),
        }
    }
}

/// Memory for one slot, of one guest at a time. All zeroes is an empty one.
///
/// ```compile_fail,E0499
/// # use tablewright::guest::{Guest, SlotCell};
/// # use tablewright::{AddressSpace, format::Ept, shared::SharedSpace};
/// # use tablewright_hosted::Threads;
/// # let platform = Threads::new(8, 12, 1);
/// # let space = || SharedSpace::new(AddressSpace::<Ept<4>, _>::new(&platform).unwrap()).unwrap();
/// let mut cells = [const { SlotCell::new() }; 32];
/// let first = Guest::new(space(), &mut cells);
/// let second = Guest::new(space(), &mut cells); // the slots of the first
/// # let _ = first.space();
/// ```
#[derive(Debug, Default)]
pub struct SlotCell {
    first: AtomicU64,
    /// 0: no slot, here and in all cells after it.
    size: AtomicU64,
    host: AtomicU64,
    rest: AtomicU64,
}

impl SlotCell {
    const_new! {
        /// An empty cell.
        {
            Self {
                first: AtomicU64::new(0),
                size: AtomicU64::new(0),
                host: AtomicU64::new(0),
                rest: AtomicU64::new(0),
            }
        }
    }

    /// Reads the slot, or pieces of two: the version tells.
    #[inline]
    fn load(&self) -> Option<Packed> {
        let first = Ipa::new(self.first.load(Ordering::Relaxed));
        Some(Packed {
            guest: Span::new(first, self.size.load(Ordering::Relaxed)).ok()?,
            host: self.host.load(Ordering::Relaxed),
            rest: self.rest.load(Ordering::Relaxed),
        })
    }

    fn store(&self, slot: Option<Packed>) {
        let (first, size, host, rest) = slot
            .map_or((0, 0, 0, 0), |Packed { guest, host, rest }| {
                (guest.start().get(), guest.size(), host, rest)
            });
        self.first.store(first, Ordering::Relaxed);
        self.size.store(size, Ordering::Relaxed);
        self.host.store(host, Ordering::Relaxed);
        self.rest.store(rest, Ordering::Relaxed);
    }
}

/// In the order of the numbers that stand for them, of three bits.
const MEMORY: [Memory; 8] = [
    Memory::Normal,
    Memory::WriteThrough,
    Memory::NonCacheable,
    Memory::Device,
    Memory::DeviceStrict,
    Memory::Tagged,
    Memory::Normal,
    Memory::Normal,
];

/// All slots of a guest, and the version of what faults look up.
pub(super) struct SlotTable<'s> {
    cells: &'s [SlotCell],
    version: AtomicU64,
    /// No other guest has this number: what was looked up in one says nothing about another.
    number: u64,
}

/// The version of a guest's slots under which something was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    guest: u64,
    number: u64,
}

impl<'s> SlotTable<'s> {
    pub fn new(cells: &'s mut [SlotCell]) -> Self {
        cells.fill_with(SlotCell::new);
        Self { cells, version: AtomicU64::new(0), number: next_serial(0) }
    }

    /// Looks into the cells until they were not written meanwhile. Returns what was found, and the
    /// version under which that is so.
    #[inline]
    fn read<T>(&self, look: impl Fn(&'s [SlotCell]) -> T) -> Result<(T, Version), SlotError> {
        loop {
            let number = self.version.load(Ordering::Acquire);
            if number & 1 != 0 {
                return Err(SlotError::Busy);
            }
            let found = look(self.cells);
            fence(Ordering::Acquire);
            if self.version.load(Ordering::Relaxed) == number {
                return Ok((found, Version { guest: self.number, number }));
            }
            // Outdated, by a zap or by a change that is over: not a reason to refuse.
        }
    }

    /// The slot that holds an address, if any, and the version under which that is so.
    #[inline]
    pub fn find(&self, at: u64) -> Result<(Option<Packed>, Version), SlotError> {
        self.read(|cells| {
            // Cells without a slot come last. Half-written cells make the search end anywhere, but
            // it ends.
            let after = cells.partition_point(|cell| {
                cell.size.load(Ordering::Relaxed) != 0 && cell.first.load(Ordering::Relaxed) <= at
            });
            let cell = after.checked_sub(1).and_then(|index| cells.get(index));
            cell.and_then(SlotCell::load).filter(|slot| slot.guest.contains(Ipa::new(at)))
        })
    }

    /// Whether some slot is so.
    pub fn any(&self, is_so: impl Fn(&Slot) -> bool) -> Result<bool, SlotError> {
        let of = |cell: &SlotCell| cell.load().is_some_and(|slot| is_so(&slot.slot()));
        self.read(|cells| cells.iter().any(of)).map(|(found, _)| found)
    }

    /// Whether nothing has changed since. Asked in a walk: a zap waits for the walks that began
    /// before it.
    #[inline]
    pub fn is_current(&self, version: Version) -> bool {
        version.guest == self.number && self.version.load(Ordering::Acquire) == version.number
    }

    /// Makes what was looked up before out of date, though the slots are as they were.
    pub fn outdate(&self) {
        // Two, so that it stays odd while the slots are being changed.
        self.version.fetch_add(2, Ordering::AcqRel);
    }

    /// Changes the slots.
    pub fn change<T>(
        &self,
        change: impl FnOnce(&mut SlotChange<'_>) -> Result<T, SlotError>,
    ) -> Result<T, SlotError> {
        let odd = |version: u64| (version & 1 == 0).then_some(version + 1);
        self.version
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, odd)
            .map_err(|_| SlotError::Busy)?;
        fence(Ordering::Release);
        let used = |cell: &&SlotCell| cell.size.load(Ordering::Relaxed) != 0;
        let done = change(&mut SlotChange {
            cells: self.cells,
            used: self.cells.iter().take_while(used).count(),
        });
        // Not a store: it may have been outdated meanwhile.
        self.version.fetch_add(1, Ordering::Release);
        done
    }
}

/// The slots, while they are being changed.
pub(super) struct SlotChange<'a> {
    cells: &'a [SlotCell],
    used: usize,
}

impl SlotChange<'_> {
    fn slots(&self) -> impl Iterator<Item = Slot> {
        let cells = self.cells[..self.used].iter();
        cells.filter_map(SlotCell::load).map(|slot| slot.slot())
    }

    pub fn insert(&mut self, slot: Slot) -> Result<(), SlotError> {
        let alike =
            |other: &Slot| other.id == slot.id || other.guest.intersect(slot.guest).is_some();
        if let Some(other) = self.slots().find(alike) {
            return Err(SlotError::Overlap(other.id));
        }
        if self.used == self.cells.len() {
            return Err(SlotError::Full);
        }
        let place = self
            .slots()
            .position(|other| other.guest.start() > slot.guest.start())
            .unwrap_or(self.used);
        for index in (place..self.used).rev() {
            self.cells[index + 1].store(self.cells[index].load());
        }
        self.cells[place].store(Some(Packed::new(slot)));
        self.used += 1;
        Ok(())
    }

    pub fn remove(&mut self, id: u16) -> Result<Slot, SlotError> {
        let found = self.slots().enumerate().find(|(_, slot)| slot.id == id);
        let (place, slot) = found.ok_or(SlotError::Unknown)?;
        for index in place..self.used {
            let next = self.cells.get(index + 1).and_then(SlotCell::load);
            self.cells[index].store(next);
        }
        self.used -= 1;
        Ok(slot)
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::{Slot, SlotCell, SlotError, SlotTable};
    use crate::{Ipa, Span};

    fn slot() -> Slot {
        Slot::memory(Span::new(Ipa::new(0), 0x1000).unwrap(), 0)
    }

    #[test]
    fn slots_that_are_being_changed_are_busy_for_all() {
        let mut cells = [SlotCell::new()];
        let table = SlotTable::new(&mut cells);
        let changed = table.change(|slots| {
            for _ in 0..2 {
                assert_eq!(table.find(0).err(), Some(SlotError::Busy));
                assert_eq!(table.any(|_| true), Err(SlotError::Busy));
                assert_eq!(table.change(|_| Ok(())), Err(SlotError::Busy));
                // It stays so beside a zap.
                table.outdate();
            }
            slots.insert(slot())
        });
        assert_eq!((changed, table.any(|_| true)), (Ok(()), Ok(true)));
    }

    #[test]
    fn a_look_beside_a_change_is_taken_again() {
        let mut cells = [SlotCell::new()];
        let table = SlotTable::new(&mut cells);
        assert_eq!(table.change(|slots| slots.insert(slot())), Ok(()));
        let looks = Cell::new(0);
        let found = table.any(|_| {
            looks.set(looks.get() + 1);
            table.change(|slots| slots.remove(0)).unwrap();
            true
        });
        assert_eq!((found, looks.get()), (Ok(false), 1));
    }
}
