//! Break-before-make: may an entry be changed while walkers use it?
//!
//! You need this if you write a [format](mod@crate::format) or a check of your own tables; edits
//! ask it by themselves.
//!
//! A processor may hold the old translation and load the new one. Where the two contradict each
//! other (two memory types for one page, two sizes for one address, two frames for one byte), the
//! architecture allows it to do anything within the limits of its own protection. The cure is to
//! break the translation first: write an invalid entry, invalidate, wait until that is complete,
//! and only then write the new one. It is expensive, and the time between is a hole in the address
//! space; so it is done exactly where it is needed, and [`transition`] is the one place that knows
//! where.
//!
//! It is a pure function of two [`State`]s, the level, the capabilities of the hardware and what
//! the caller knows about the contents. A format only names its [`Rule`].
//!
//! Sources: DDI 0487 D8.17 (R_WHZWS and what follows), FEAT_BBM levels in ID_AA64MMFR2_EL1; the
//! Arm-maintained catalogue of litmus tests, for what "can be cached" means: an invalid entry
//! cannot. SDM vol. 3A 5.10.2.4 and 5.10.4 for x86.
//!
//! Where software manages the access flag, a leaf cannot be cached either while its flag is clear.
//! An entry does not say whether the flag was clear before, nor whether it will be when the
//! invalidation is complete: leaves that were aged without a flush are still in TLBs, and the next
//! fault sets the flag again. So nothing is made of it.

use crate::addr::{Level, Pa};
use crate::format::packed::{ACCESSED, GLOBAL, PERMS, Packed, TYPE};
use crate::format::{Attrs, Format, Kind, Perms, meaning};
use crate::platform::Caps;

pub use crate::format::Rule;

/// An entry's state, as far as a change of it matters to a walker.
///
/// ```
/// use tablewright::{Level, bbm::State, format::X86_64};
/// assert_eq!(State::of::<X86_64<4>>(0, Level::PAGE), State::Absent);
/// assert!(matches!(
///     State::of::<X86_64<4>>(0x1063, Level::PAGE),
///     State::Leaf { contiguous: false, .. }
/// ));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing is translated: a hole, or a parked leaf.
    Absent,
    /// A table.
    Table {
        /// The physical address of the table.
        frame: Pa,
        /// Permissions that it takes away from everything below it.
        denied: Perms,
    },
    /// A page or a block.
    Leaf {
        /// The frame it translates to.
        frame: Pa,
        /// Its attributes. The software bits do not matter to a walker.
        attrs: Attrs,
        /// It is a member of a contiguous run.
        contiguous: bool,
    },
}

impl State {
    /// A leaf, where it does not matter which.
    pub(crate) const ANY_LEAF: Self =
        Self::Leaf { frame: Pa::new(0), attrs: Attrs::USER_DATA, contiguous: false };

    /// The state that `entry` describes at `level`.
    pub fn of<F: Format>(entry: u64, level: Level) -> Self {
        match F::kind(entry, level) {
            Kind::Invalid => Self::Absent,
            Kind::Leaf if F::is_parked(entry) => Self::Absent,
            Kind::Table => {
                Self::Table { frame: F::address(entry, level), denied: F::denied(entry) }
            }
            Kind::Leaf => Self::leaf::<F>(entry, level),
        }
    }

    /// Describes an entry like [`of`](Self::of), but as what may still be remembered of a parked
    /// leaf, because the edit that has parked it is perhaps not complete: a leaf without
    /// permissions.
    pub(crate) fn remembered<F: Format>(entry: u64, level: Level) -> Self {
        match F::kind(entry, level) {
            Kind::Leaf => Self::leaf::<F>(entry, level),
            _ => Self::of::<F>(entry, level),
        }
    }

    /// Describes an entry that is a leaf, valid or parked.
    #[inline(never)]
    pub(crate) fn leaf<F: Format>(entry: u64, level: Level) -> Self {
        Self::Leaf {
            frame: F::address(entry, level),
            attrs: Attrs { software: 0, ..meaning::<F>(entry, level) },
            contiguous: entry & F::CONTIGUOUS != 0,
        }
    }
}

/// Knowledge that the caller has of the memory behind the two entries.
///
/// ```
/// use tablewright::{Attrs, Caps, Level, Pa};
/// use tablewright::bbm::{Contents, Rule, State, Transition, transition};
/// // Another frame: fine if neither is written and both hold the same, as when equal pages are
/// // merged.
/// let leaf = |frame| State::Leaf { frame: Pa::new(frame), attrs: Attrs::USER_RODATA,
///     contiguous: false };
/// let change = |contents| {
///     transition(Rule::ARM, &leaf(0x1000), &leaf(0x2000), Level::PAGE, &Caps::CONSERVATIVE,
///         contents)
/// };
/// assert_eq!(change(Contents::Same), Transition::Invalidate);
/// assert_eq!(change(Contents::Different), Transition::Break);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Every address reads the same bytes with the same attributes through the old and the new
    /// entry; only the way they are described differs.
    Same,
    /// Anything else.
    Different,
}

/// How an entry may be changed while walkers use it.
///
/// ```
/// use tablewright::bbm::Transition;
/// // The dearer, the greater.
/// assert!(
///     Transition::Store < Transition::Invalidate
///         && Transition::Invalidate < Transition::Break
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transition {
    /// Nothing changes for a walker, or the old entry is a hole, which is not cached: a store, and
    /// no invalidation.
    Store,
    /// Stored in place, and invalidated afterwards for the change to take effect everywhere.
    Invalidate,
    /// Broken first: invalid, invalidated, complete; then made.
    Break,
}

/// How an entry at `level` may change from `old` to `new` while walkers use it.
///
/// ```
/// use tablewright::bbm::{Contents, Rule, State, Transition, transition};
/// use tablewright::{Attrs, Caps, Level, Pa};
///
/// let block = State::Leaf { frame: Pa::new(0), attrs: Attrs::KERNEL_DATA, contiguous: false };
/// let table = State::Table { frame: Pa::new(0x1000), denied: tablewright::Perms::empty() };
/// let split = |rule, bbm| {
///     let caps = Caps { bbm, ..Caps::CONSERVATIVE };
///     transition(rule, &block, &table, Level::new(1), &caps, Contents::Same)
/// };
/// assert_eq!(split(Rule::ARM, 0), Transition::Break);
/// assert_eq!(split(Rule::ARM, 2), Transition::Invalidate);
/// assert_eq!(split(Rule::X86, 0), Transition::Invalidate);
/// ```
pub fn transition(
    rule: Rule,
    old: &State,
    new: &State,
    level: Level,
    caps: &Caps,
    contents: Contents,
) -> Transition {
    match rule.breaks {
        true => with_breaks(old, new, level, caps, contents),
        false => without_breaks(old, new, contents),
    }
}

/// Judges, like [`transition`], the change of a leaf, or of a member of a run, that stays one and
/// translates the same memory as before, by the attributes that it had and has.
#[inline]
pub(crate) fn recoding(
    rule: Rule,
    was: Packed,
    now: Packed,
    in_run: bool,
    caps: &Caps,
) -> Transition {
    let differences = was.differences(now);
    if differences == 0 {
        return Transition::Store;
    }
    let turns_global = differences & now.word & GLOBAL;
    let of_run = PERMS | GLOBAL;
    if !rule.breaks {
        Transition::Invalidate
    } else if differences & TYPE | turns_global != 0
        || in_run && differences & of_run != 0 && caps.bbm < 1
    {
        Transition::Break
    } else if differences == now.word & ACCESSED && !in_run {
        // A copy from when the flag was set before says the same.
        Transition::Store
    } else {
        Transition::Invalidate
    }
}

/// Judges, like [`transition`], a leaf that becomes a table which translates the same, or an entry
/// that becomes or ceases to be a member of a run, where level `needed` of FEAT_BBM allows it.
#[inline]
pub(crate) fn resizing(rule: Rule, needed: u8, caps: &Caps) -> Transition {
    match rule.breaks && caps.bbm < needed {
        true => Transition::Break,
        false => Transition::Invalidate,
    }
}

fn with_breaks(
    old: &State,
    new: &State,
    level: Level,
    caps: &Caps,
    contents: Contents,
) -> Transition {
    use Transition::{Break, Invalidate, Store};
    let break_below = |needed: u8| {
        if caps.bbm < needed { Break } else { Invalidate }
    };
    match (old, new) {
        _ if old == new => Store,
        (State::Absent, _) => Store,
        // This is the break itself.
        (_, State::Absent) => Invalidate,
        (State::Table { frame: was, .. }, State::Table { frame: is, .. }) => {
            // Another table may translate differently at any size. The same table with other limits
            // is a change of permissions.
            if was == is { Invalidate } else { Break }
        }
        (
            &State::Leaf { frame: was, attrs: from, contiguous: was_contiguous },
            &State::Leaf { frame: is, attrs: to, contiguous: is_contiguous },
        ) => {
            let type_changes = (from.memory, from.shareability) != (to.memory, to.shareability);
            let writable = (from.perms | to.perms).intersects(Perms::ANY_WRITE);
            let address_changes = was != is && (writable || contents == Contents::Different);
            // A global entry must not overlap a cached one that is not.
            let turns_global = to.global && !from.global;
            // Bits of the format's own may mean another physical address space (NS), or a type.
            let native_changes = from.native != to.native;
            // Hardware sets flags in one member of a run for all of it, so that members may differ
            // in them: changing those that differ, and only those, must not break a part of the
            // run.
            let but_for_flags = |accessed, dirty| {
                let flagged = Attrs { accessed, dirty, ..from };
                was_contiguous == is_contiguous && to == flagged
            };
            let run = was_contiguous || is_contiguous;
            if type_changes || native_changes || address_changes || turns_global {
                Break
            } else if !run && was == is && but_for_flags(true, from.dirty) {
                // A copy from when the flag was set before says the same.
                Store
            } else if run && !but_for_flags(to.accessed, to.dirty) {
                // Setting or clearing the bit changes the size of what is cached. Changing a member
                // of a run leaves the members different until the last of them is written, which is
                // the same thing.
                break_below(1)
            } else {
                Invalidate
            }
        }
        // A change of size. Level 1 is allowed with the nT bit only, which costs the walker its TLB
        // entry while it is set; the engine does not use it. At the level of pages there is no
        // table to change to.
        (State::Table { .. }, _) | (_, State::Table { .. }) => {
            if level == Level::PAGE || contents == Contents::Different {
                Break
            } else {
                break_below(2)
            }
        }
    }
}

fn without_breaks(old: &State, new: &State, contents: Contents) -> Transition {
    use Transition::{Break, Invalidate, Store};
    match (old, new) {
        _ if old == new => Store,
        (State::Absent, _) => Store,
        // SDM 5.10.2.4: software should not change the page size and the frame or another attribute
        // at once.
        (State::Table { .. }, State::Leaf { .. }) | (State::Leaf { .. }, State::Table { .. })
            if contents == Contents::Different =>
        {
            Break
        }
        _ => Invalidate,
    }
}
