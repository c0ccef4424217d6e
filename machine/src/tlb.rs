//! Translations that a CPU remembers, and how it is made to forget them.
//!
//! # Stamps instead of broadcasts
//!
//! An invalidation that reaches 416 CPUs would have to search 416 TLBs. Instead it is written down
//! once, with the next number of one sequence, and every remembered entry carries the number up to
//! which it has been held against the record. Before an entry is used, it is held against what came
//! since. The last [`KEPT`] invalidations are kept; an entry that was not looked at for longer is
//! given up, which a TLB may do with any entry at any time.
//!
//! # What an invalidation covers
//!
//! [`Tlbi::covers`] is the one place that knows. It follows the manual and drops no more than it
//! must: an identifier spares the entries of others and, without an address, global ones; a level
//! hint spares leaves of other levels (a wrong hint invalidates nothing); an operation on leaves
//! spares what is remembered of tables (DDI 0487 D8.17, TLBI VAE1 and VALE1; SDM vol. 3A 5.10.4.1).
//!
//! x86 names single addresses, and each takes the one leaf around it, whatever its size. A range of
//! pages is as many addresses; a [stride](Tlbi::stride) of large leaves is fewer, and passes over
//! the small leaves between them (APM vol. 3, INVLPGB). Which instructions spare [global](Globals)
//! translations differs from one to the next.
//!
//! # Two stages
//!
//! With a guest's stage 1 above stage 2, a TLB holds what it found of stage 2 alone, from an
//! address that the guest takes for physical, and what both stages *combined* come to, from the
//! guest's virtual address. An invalidation of one kind need not be one of the other: [`Stages`]
//! says of which.

use std::cell::Cell;

use tablewright_walker::Denied;

/// The stages that an invalidation is about, where a guest has a stage 1 of its own above stage 2.
/// Without a guest there is one stage, and all is [`Both`](Stages::Both).
///
/// ```
/// use tablewright_machine::{Stages, Tlbi};
/// // TLBI IPAS2E1IS of one page: what was combined with stage 1 stays.
/// let by_ipa = Tlbi {
///     id: Some(7),
///     range: Some((0x1000, 0x1fff)),
///     stages: Stages::Second,
///     broadcast: true,
///     ..Tlbi::default()
/// };
/// assert!(by_ipa.covers(7, false, (0x1000, 0x1fff), 0, false));
/// // TLBI VMALLE1IS: what was found of stage 2 alone stays.
/// let combined =
///     Tlbi { id: Some(7), stages: Stages::First, broadcast: true, ..Tlbi::default() };
/// assert!(!combined.covers(7, false, (0x1000, 0x1fff), 0, false));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Stages {
    /// All that stage 2 had a part in, alone or combined (TLBI VMALLS12E1, by VMID; INVEPT, by
    /// EPTP; a flush by ASID of AMD), without addresses; and everything where there is one stage.
    #[default]
    Both,
    /// Translations of stage 2 alone, by addresses that the guest takes for physical (TLBI
    /// IPAS2E1).
    Second,
    /// Translations in which stage 1 has a part, by virtual addresses of the guest or all (TLBI
    /// VAE1, ASIDE1, VMALLE1; INVVPID).
    First,
}

/// The fate of global translations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Globals {
    /// They go with an address, under whatever identifier, and where no identifier is named (TLBI
    /// VAE1, and not ASIDE1; INVLPG, and INVPCID type 2).
    #[default]
    ByAddress,
    /// They stay (a load of CR3; INVPCID types 0, 1 and 3; INVLPGB without bit 3).
    Spared,
    /// They go, whatever identifier is named (INVLPGB with bit 3).
    Included,
}

/// One invalidation, as the hardware is told.
///
/// ```
/// use tablewright_machine::Tlbi;
/// // TLBI VALE1IS, ASID 7, one page, level hint 3.
/// let page = Tlbi {
///     id: Some(7),
///     range: Some((0x1000, 0x1fff)),
///     depth: Some(0),
///     leaves_only: true,
///     broadcast: true,
///     ..Tlbi::default()
/// };
/// assert!(page.covers(7, false, (0x1000, 0x1fff), 0, false));
/// assert!(!page.covers(8, false, (0x1000, 0x1fff), 0, false)); // of another space
/// assert!(page.covers(8, true, (0x1000, 0x1fff), 0, false)); // but global
/// assert!(!page.covers(7, false, (0, 0x1f_ffff), 1, false)); // a block: the hint says page
/// assert_eq!(Tlbi::ALL, Tlbi { broadcast: true, ..Tlbi::default() });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tlbi {
    /// Only the entries of this identifier (ASID, PCID; VMID, EPTP); with addresses also global
    /// ones.
    pub id: Option<u16>,
    /// Of a guest with a stage 1: only the entries of this identifier of the guest's own; with
    /// addresses also global ones.
    pub asid: Option<u16>,
    /// Which entries of a guest with a stage 1.
    pub stages: Stages,
    /// Only the entries for these addresses, first and last.
    pub range: Option<(u64, u64)>,
    /// Of the range only the first address, and those that many bytes apart, as a power of two:
    /// each takes the one leaf around it. `None`: every address.
    pub stride: Option<u8>,
    /// The levels below the leaf: only leaves at this level. `None`: any.
    pub depth: Option<u8>,
    /// Leaves only, not what is remembered of tables.
    pub leaves_only: bool,
    /// All that is remembered of tables under the identifier, for whatever addresses.
    pub all_tables: bool,
    /// The fate of global translations.
    pub globals: Globals,
    /// On all CPUs, not only on the one that says it.
    pub broadcast: bool,
}

impl Tlbi {
    /// Everything on every CPU.
    pub const ALL: Self = Self {
        id: None,
        asid: None,
        stages: Stages::Both,
        range: None,
        stride: None,
        depth: None,
        leaves_only: false,
        all_tables: false,
        globals: Globals::ByAddress,
        broadcast: true,
    };

    /// INVLPG for each page of a range, on a processor that has this PCID loaded: the leaves under
    /// it and global ones, and all that is remembered of tables under it (SDM vol. 3A 5.10.4.1).
    ///
    /// ```
    /// use tablewright_machine::Tlbi;
    /// let page = Tlbi::invlpg(7, (0x1000, 0x1fff));
    /// assert!(page.covers(8, true, (0x1000, 0x1fff), 0, false)); // a global leaf, under any PCID
    /// assert!(!page.covers(8, false, (0x1000, 0x1fff), 0, false));
    /// assert!(page.covers(7, false, (1 << 40, (1 << 41) - 1), 1, true)); // a table elsewhere
    /// ```
    pub const fn invlpg(pcid: u16, range: (u64, u64)) -> Self {
        Self { id: Some(pcid), range: Some(range), all_tables: true, broadcast: false, ..Self::ALL }
    }

    /// INVPCID of types 0 (an address under a PCID, for each page of a range), 1 (a PCID; also what
    /// a load of CR3 does) and 3 (every PCID): no global translation goes. Type 2 is
    /// [`ALL`](Self::ALL), on one processor (SDM vol. 3A 5.10.4.1).
    ///
    /// ```
    /// use tablewright_machine::Tlbi;
    /// let (page, block) = ((0x1000, 0x1fff), (0, 0x1f_ffff));
    /// for tlbi in [
    ///     Tlbi::invpcid(Some(7), Some(page)),
    ///     Tlbi::invpcid(Some(7), None),
    ///     Tlbi::invpcid(None, None),
    /// ] {
    ///     assert!(tlbi.covers(7, false, page, 0, false));
    ///     assert!(tlbi.covers(7, false, block, 1, true)); // the table that leads to it
    ///     assert!(!tlbi.covers(7, true, page, 0, false));
    /// }
    /// ```
    pub const fn invpcid(pcid: Option<u16>, range: Option<(u64, u64)>) -> Self {
        Self { id: pcid, range, globals: Globals::Spared, broadcast: false, ..Self::ALL }
    }

    /// Whether it drops an entry of this identifier that translates `span` (first and last
    /// address), made of a descriptor with `depth` levels below it; `table` for what is remembered
    /// of a table descriptor.
    #[inline]
    pub fn covers(&self, id: u16, global: bool, span: (u64, u64), depth: u8, table: bool) -> bool {
        self.stages != Stages::First
            && self.names(id, global)
            && self.suits(depth, table)
            && (table && self.all_tables || self.touches(span))
    }

    /// Whether one of its addresses is in `span`.
    #[inline]
    fn touches(&self, span: (u64, u64)) -> bool {
        let Some((first, last)) = self.range else {
            return true;
        };
        let (from, to) = (span.0.max(first), span.1.min(last));
        // How far it is to the next of its addresses.
        let next = |stride: u8| (from - first).wrapping_neg() & ((1 << stride) - 1);
        from <= to && self.stride.is_none_or(|stride| next(stride) <= to - from)
    }

    /// The parts of `span` whose leaves it drops, in order, if each leaf is of `1 << unit` bytes
    /// and as aligned.
    pub(crate) fn parts(&self, span: (u64, u64), unit: u8) -> impl Iterator<Item = (u64, u64)> {
        let (first, last) = self.range.unwrap_or((0, u64::MAX));
        let within = (1u64 << unit) - 1;
        let stride = self.stride.filter(|_| self.range.is_some());
        let dense = match stride {
            None => Some((first, last)),
            // Each leaf has one of its addresses at least.
            Some(stride) if stride <= unit => {
                let end = first + ((last - first) >> stride << stride);
                Some((first & !within, end | within))
            }
            Some(_) => None,
        };
        let apart = dense.is_none().then(|| 1u64 << stride.unwrap_or(0));
        let sparse = apart.into_iter().flat_map(move |apart| {
            let before = (span.0 & !within).saturating_sub(first);
            let next = first.saturating_add(before.div_ceil(apart).saturating_mul(apart));
            std::iter::successors(Some(next), move |at| at.checked_add(apart))
                .take_while(move |&at| at <= last && at & !within <= span.1)
                .map(move |at| (at & !within, at | within))
        });
        (dense.into_iter().chain(sparse))
            .map(move |(from, to)| (from.max(span.0), to.min(span.1)))
            .filter(|(from, to)| from <= to)
    }

    /// Whether it drops what is remembered of both stages combined, under `vmid` and what the guest
    /// has said, for `span` of the guest's virtual addresses.
    pub(crate) fn covers_combined(
        &self,
        vmid: u16,
        guest: Guest,
        global: bool,
        span: (u64, u64),
        table: bool,
    ) -> bool {
        self.id.is_none_or(|id| id == vmid)
            && match self.stages {
                Stages::Both => self.range.is_none(),
                Stages::Second => false,
                Stages::First => {
                    let named = match (self.asid, self.range) {
                        (None, _) => true,
                        (Some(asid), Some(_)) => global || guest.asid == Some(asid),
                        (Some(asid), None) => !global && guest.asid == Some(asid),
                    };
                    named && self.suits(guest.depth, table) && self.touches(span)
                }
            }
    }

    /// Whether it drops all that is combined under an identifier.
    pub(crate) fn is_all_combined(&self, vmid: u16) -> bool {
        self.stages == Stages::First
            && self.id.is_none_or(|id| id == vmid)
            && (self.asid, self.range) == (None, None)
    }

    /// Whether it drops everything on every CPU. What is rarest is asked first.
    fn is_everything(&self) -> bool {
        self.range.is_none() && self.id.is_none() && *self == Self::ALL
    }

    /// Whether it is about this identifier.
    pub(crate) fn names(&self, id: u16, global: bool) -> bool {
        if !global {
            return self.id.is_none_or(|named| named == id);
        }
        match self.globals {
            Globals::ByAddress => self.id.is_none() || self.range.is_some(),
            Globals::Spared => false,
            Globals::Included => true,
        }
    }

    /// Whether it is about descriptors of this level and kind. Of a level that is hinted at it is
    /// about leaves, and about the tables above them (DDI 0487 C5.5, TTL).
    pub(crate) fn suits(&self, depth: u8, table: bool) -> bool {
        match self.depth {
            Some(hint) if table => !self.leaves_only && depth > hint,
            Some(hint) => hint == depth,
            None => !table || !self.leaves_only,
        }
    }
}

/// How many invalidations are kept to hold entries against.
const KEPT: u64 = 256;

/// Every CPU, in a [`Record`].
const ALL_CPUS: u16 = u16::MAX;

#[derive(Clone, Copy)]
struct Record {
    tlbi: Tlbi,
    cpu: u16,
}

/// The invalidations that have taken effect, in order.
pub(crate) struct Invalidations {
    /// How many there were: the stamp of an entry that is made now.
    now: Cell<u64>,
    /// The last that dropped everything everywhere.
    all: Cell<u64>,
    ring: Box<[Cell<Record>]>,
}

impl Invalidations {
    pub fn new() -> Self {
        let none = Record { tlbi: Tlbi::default(), cpu: 0 };
        Self {
            now: Cell::new(0),
            all: Cell::new(0),
            ring: (0..KEPT).map(|_| Cell::new(none)).collect(),
        }
    }

    #[inline(always)]
    pub fn now(&self) -> u64 {
        self.now.get()
    }

    /// From now on, what it covers is forgotten by `cpu`, or by all if it is broadcast.
    pub fn take_effect(&self, tlbi: &Tlbi, cpu: usize) {
        let now = self.now.get() + 1;
        self.now.set(now);
        if tlbi.is_everything() {
            self.all.set(now);
        }
        let cpu = if tlbi.broadcast { ALL_CPUS } else { cpu as u16 };
        self.ring[(now % KEPT) as usize].set(Record { tlbi: *tlbi, cpu });
    }

    /// Whether something that `cpu` remembers since `stamp` has not been invalidated.
    #[allow(clippy::too_many_arguments)] // What there is to know of something remembered.
    #[inline(always)]
    pub fn spare(
        &self,
        cpu: usize,
        stamp: u64,
        id: u16,
        global: bool,
        span: (u64, u64),
        depth: u8,
        table: bool,
    ) -> bool {
        stamp == self.now.get()
            || self
                .spared_since(cpu, stamp, move |tlbi| tlbi.covers(id, global, span, depth, table))
    }

    /// Whether nothing since `stamp` that this CPU was told `covers`.
    #[inline(never)]
    pub fn spared_since(&self, cpu: usize, stamp: u64, covers: impl Fn(&Tlbi) -> bool) -> bool {
        let now = self.now.get();
        if stamp < self.all.get() || now - stamp >= KEPT {
            return false;
        }
        (stamp + 1..=now).all(|number| {
            let record = self.ring[(number % KEPT) as usize].get();
            let here = record.cpu == ALL_CPUS || usize::from(record.cpu) == cpu;
            !(here && covers(&record.tlbi))
        })
    }
}

/// The part of a guest's stage 1 in a combined entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Guest {
    /// The identifier of the guest's own; `None` while its stage 1 is off.
    pub asid: Option<u16>,
    /// Levels below the descriptor of stage 1.
    pub depth: u8,
}

/// A translation that a TLB holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cached {
    /// The first address, and as a power of two how many bytes from there.
    pub first: u64,
    pub bits: u8,
    /// Levels below the descriptor.
    pub depth: u8,
    pub id: u16,
    pub space: u16,
    pub global: bool,
    pub contiguous: bool,
    /// Permissions: see `hardware`.
    pub rights: u8,
    /// Of a combined entry, whose addresses are virtual ones of the guest; `depth`, `raw` and `at`
    /// are of stage 2.
    pub guest: Option<Guest>,
    /// The output address of `first`.
    pub pa: u64,
    /// The descriptor, and where it stands.
    pub raw: u64,
    pub at: u64,
    pub stamp: u64,
}

impl Cached {
    pub fn span(&self) -> (u64, u64) {
        (self.first, self.first + ((1u64 << self.bits) - 1))
    }

    pub fn pa(&self, va: u64) -> u64 {
        self.pa.wrapping_add(va.wrapping_sub(self.first))
    }

    /// Whether an invalidation is about it.
    pub fn is_covered(&self, tlbi: &Tlbi) -> bool {
        match self.guest {
            None => tlbi.covers(self.id, self.global, self.span(), self.depth, false),
            Some(guest) => tlbi.covers_combined(self.id, guest, self.global, self.span(), false),
        }
    }
}

/// A set-associative TLB. Entries of all sizes share its sets.
pub(crate) struct Tlb {
    entries: Box<[Cell<Option<Cached>>]>,
    /// Which way of each set is replaced next.
    next: Box<[Cell<u8>]>,
    ways: usize,
    /// Which sizes there may be, as a bit set of powers of two.
    sizes: Cell<u64>,
}

impl Tlb {
    pub fn new(sets: usize, ways: usize) -> Self {
        let sets = sets.max(1).next_power_of_two();
        let ways = ways.clamp(1, 255);
        Self {
            entries: (0..sets * ways).map(|_| Cell::new(None)).collect(),
            next: (0..sets).map(|_| Cell::new(0)).collect(),
            ways,
            sizes: Cell::new(0),
        }
    }

    fn set(&self, first: u64, bits: u8) -> usize {
        let number = first >> bits;
        // The upper bits too, so that equal offsets in different regions do not all meet in one
        // set.
        ((number ^ number >> 9 ^ number >> 18) as usize) & (self.next.len() - 1)
    }

    /// The entry that translates `va`, held against what was invalidated.
    #[inline(always)]
    pub fn find(
        &self,
        cpu: usize,
        va: u64,
        id: u16,
        invalidations: &Invalidations,
    ) -> Option<Cached> {
        let mut sizes = self.sizes.get();
        while sizes != 0 {
            let bits = sizes.trailing_zeros() as u8;
            sizes &= sizes - 1;
            if let Some(found) = self.find_sized(cpu, va, id, bits, invalidations) {
                return Some(found);
            }
        }
        None
    }

    #[inline(always)]
    pub fn find_sized(
        &self,
        cpu: usize,
        va: u64,
        id: u16,
        bits: u8,
        invalidations: &Invalidations,
    ) -> Option<Cached> {
        let first = va >> bits << bits;
        let set = self.set(first, bits) * self.ways;
        for slot in &self.entries[set..set + self.ways] {
            let Some(mut entry) = slot.get() else {
                continue;
            };
            if entry.first != first || entry.bits != bits || !(entry.global || entry.id == id) {
                continue;
            }
            let span = entry.span();
            if !invalidations.spare(
                cpu,
                entry.stamp,
                entry.id,
                entry.global,
                span,
                entry.depth,
                false,
            ) {
                slot.set(None);
                continue;
            }
            if entry.stamp != invalidations.now() {
                entry.stamp = invalidations.now();
                slot.set(Some(entry));
            }
            return Some(entry);
        }
        None
    }

    /// Remembers a translation, in the place of one with the same tag if there is any.
    pub fn insert(&self, entry: Cached) {
        self.sizes.update(|sizes| sizes | 1 << entry.bits);
        let set = self.set(entry.first, entry.bits);
        let slots = &self.entries[set * self.ways..(set + 1) * self.ways];
        let same = |slot: &Cell<Option<Cached>>| {
            slot.get().is_none_or(|other| {
                let named = other.id == entry.id || other.global && entry.global;
                other.first == entry.first && other.bits == entry.bits && named
            })
        };
        let way = slots.iter().position(same).unwrap_or_else(|| {
            let way = self.next[set].get();
            self.next[set].set((way + 1) % self.ways as u8);
            usize::from(way)
        });
        slots[way].set(Some(entry));
    }

    /// Forgets what it holds in one place, if anything.
    pub fn evict(&self, place: usize) {
        self.entries[place % self.entries.len()].set(None);
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.entries.iter().for_each(|slot| slot.set(None));
    }

    /// Forgets the entry that translates an address.
    pub fn drop_entry(&self, entry: &Cached) {
        let set = self.set(entry.first, entry.bits) * self.ways;
        for slot in &self.entries[set..set + self.ways] {
            if slot.get().is_some_and(|other| other.first == entry.first && other.at == entry.at) {
                slot.set(None);
            }
        }
    }

    /// Everything that it holds and that was not invalidated.
    pub fn iter<'a>(
        &'a self,
        cpu: usize,
        invalidations: &'a Invalidations,
    ) -> impl Iterator<Item = Cached> + 'a {
        self.entries.iter().filter_map(Cell::get).filter(move |e| {
            invalidations.spare(cpu, e.stamp, e.id, e.global, e.span(), e.depth, false)
        })
    }
}

/// A table whose address a walk cache remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Remembered {
    /// The first address that the table translates.
    pub first: u64,
    /// Levels below the table.
    pub depth: u8,
    pub id: u16,
    pub space: u16,
    pub table: u64,
    pub denied: Denied,
    pub stamp: u64,
}

/// Direct-mapped; tables of all levels share it.
pub(crate) struct WalkCache {
    entries: Box<[Cell<Option<Remembered>>]>,
}

impl WalkCache {
    pub fn new(entries: usize) -> Self {
        let entries = entries.max(1).next_power_of_two();
        Self { entries: (0..entries).map(|_| Cell::new(None)).collect() }
    }

    fn place(&self, first: u64, depth: u8, bits: u32) -> &Cell<Option<Remembered>> {
        let number = (first >> bits) as usize ^ (usize::from(depth) * 5);
        &self.entries[number & (self.entries.len() - 1)]
    }

    /// The table with `depth` levels below it that translates `va`; it translates `1 << bits`
    /// bytes.
    #[inline(always)]
    pub fn find(
        &self,
        cpu: usize,
        va: u64,
        id: u16,
        depth: u8,
        bits: u32,
        invalidations: &Invalidations,
    ) -> Option<Remembered> {
        let first = va >> bits << bits;
        let place = self.place(first, depth, bits);
        let mut entry = place.get()?;
        if entry.first != first || entry.depth != depth || entry.id != id {
            return None;
        }
        let span = (first, first + ((1u64 << bits) - 1));
        if !invalidations.spare(cpu, entry.stamp, id, false, span, depth + 1, true) {
            place.set(None);
            return None;
        }
        if entry.stamp != invalidations.now() {
            entry.stamp = invalidations.now();
            place.set(Some(entry));
        }
        Some(entry)
    }

    /// Forgets the table with `depth` levels below it that translates `va`.
    pub fn drop_entry(&self, va: u64, depth: u8, bits: u32) {
        let first = va >> bits << bits;
        let place = self.place(first, depth, bits);
        if place.get().is_some_and(|entry| entry.first == first && entry.depth == depth) {
            place.set(None);
        }
    }

    pub fn insert(&self, entry: Remembered, bits: u32) {
        self.place(entry.first, entry.depth, bits).set(Some(entry));
    }

    pub fn evict(&self, place: usize) {
        self.entries[place & (self.entries.len() - 1)].set(None);
    }

    pub fn clear(&self) {
        self.entries.iter().for_each(|place| place.set(None));
    }

    /// Every table that it remembers the way to.
    pub fn iter(&self) -> impl Iterator<Item = Remembered> + '_ {
        self.entries.iter().filter_map(Cell::get)
    }
}
