//! An address space: a root and what is known about it.
//!
//! The edits themselves are in [`edit`](crate::edit). They take the space by exclusive borrow: it
//! has no other editor meanwhile. Whether walkers use it meanwhile is its [`Liveness`], and decides
//! what an edit has to pay.

use core::fmt;
use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};

use crate::addr::{Address, Level, Pa, Span};
use crate::bbm::{Contents, State, Transition, transition};
pub use crate::edit::cache::Half;
use crate::edit::cache::{Cache, Reach, bits_of_half};
pub use crate::edit::error::EditError;
use crate::flush::{Debt, Leaf, Target, reclaim_all};
use crate::format::{Format, Inexpressible, Kind, Perms, address_of, denied_of, kind_of};
use crate::invalidation::What;
use crate::platform::{Barrier, Caps, Platform};
use crate::table::{Table, UpperCache};
use crate::walk::{Place, Slice, Visit, descend, descend_near, descend_to_tables, walk};

/// Whether table walkers use a space while it is edited.
///
/// ```
/// use tablewright::{AddressSpace, Liveness, format::Arm64K4};
/// use tablewright_hosted::Hosted;
/// let platform = Hosted::new(8, 12);
/// let space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
/// assert_eq!(space.liveness(), Liveness::Dead);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// No walker can reach the tables: edits are plain stores.
    Dead,
    /// Walkers use the tables. Where the architecture demands a break, an edit makes one: briefly
    /// the addresses being changed, and the rest of the block they are part of, are not mapped.
    Live,
    /// The space is [`Live`](Liveness::Live), and a break would pull the ground from under the code
    /// that edits, so an edit that needs one is refused before anything has changed.
    Own,
}

/// A tree of tables, and the right to edit it.
///
/// Dropping it frees nothing: a walker may be using the tables. [`destroy`](AddressSpace::destroy)
/// frees them.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::Arm64K4};
/// use tablewright_hosted::Hosted;
///
/// let platform = Hosted::new(64, 12);
/// let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
/// let span = Span::new(Va::new(0x4000_0000), 3 << 20)?;
/// space.map(span, Pa::new(0x8000_0000), Attrs::KERNEL_DATA)?;
///
/// // The largest leaves that fit: a block of 2 MiB, and contiguous runs of pages for the rest.
/// assert_eq!(space.query(Va::new(0x4012_3456)).unwrap().size(), 2 << 20);
/// assert_eq!(space.query(Va::new(0x4022_3456)).unwrap().size(), 64 << 10);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct AddressSpace<F: Format, P: Platform> {
    pub(crate) platform: P,
    pub(crate) root: Pa,
    pub(crate) id: u16,
    pub(crate) reach: Reach,
    pub(crate) cache: Cache,
    /// The tables that the root's entries point to are part of other roots, too.
    pub(crate) pinned: bool,
    liveness: Liveness,
    /// The number of the last flush that needed one.
    pub(crate) serial: u64,
    pub(crate) debt: Debt,
    format: PhantomData<F>,
}

/// The conditions under which a space is edited.
#[derive(Clone, Copy)]
pub(crate) struct Conditions {
    pub caps: Caps,
    pub live: bool,
    pub may_break: bool,
}

impl Conditions {
    /// How an entry may change into one that translates the same memory. A dead space has no walker
    /// to mind.
    pub fn transition<F: Format>(&self, old: &State, new: &State, level: Level) -> Transition {
        if self.live {
            transition(F::RULE, old, new, level, &self.caps, Contents::Same)
        } else {
            Transition::Store
        }
    }

    /// How the leaf of a page may change into one of other memory.
    #[inline]
    pub fn replacement<F: Format>(&self, old: u64, new: u64) -> Transition {
        if (old ^ new) & F::address_mask(Level::PAGE) == 0 {
            return self.replacement_of_same::<F>(old, new);
        }
        // What is mapped changes: that decides it whatever the attributes are.
        let how = match F::RULE.breaks {
            true => Transition::Break,
            false => Transition::Invalidate,
        };
        debug_assert_eq!(how, self.replacement_of_same::<F>(old, new), "the rules know no other");
        how
    }

    /// Returns the rule for an entry that replaces one of the same memory, by all that the rules
    /// look at.
    #[cold]
    #[inline(never)]
    fn replacement_of_same<F: Format>(&self, old: u64, new: u64) -> Transition {
        let [old, new] = [old, new].map(|it| State::remembered::<F>(it, Level::PAGE));
        let different = Contents::Different;
        transition(F::RULE, &old, &new, Level::PAGE, &self.caps, different)
    }

    /// Whether a walker may write this leaf under the edit's hands, so that it has to be exchanged.
    #[inline]
    pub fn is_contended<F: Format>(&self, leaf: u64, level: Level) -> bool {
        self.live && F::hardware_writes(leaf, level, &self.caps)
    }
}

impl<F: Format, P: Platform + Clone> AddressSpace<F, P> {
    /// An empty space for the lower half. `None` if the platform has no frame for the root.
    pub fn new(platform: P) -> Option<Self> {
        Self::new_in(platform, Half::Lower)
    }

    /// An empty space for one half; of formats with one root for both it is all of the input space
    /// whatever `half` says.
    pub fn new_in(platform: P, half: Half) -> Option<Self> {
        let level = F::root_level();
        let root = platform.alloc_root(level, F::root_tables())?;
        // SAFETY: the frames were just allocated for the root of this space, whose entries these
        // are (1. of both).
        unsafe { Table::open(&platform, root, level).clear(F::entries(level)) };
        // SAFETY: an empty root is a tree of any format.
        let mut space = unsafe { Self::take_over(platform, root, half, Liveness::Dead) };
        space.cache = Cache::new(space.reach, true);
        space.debt = Debt::NONE;
        Some(space)
    }

    /// Takes over a tree that exists already.
    ///
    /// # Errors
    /// [`EditError::Recursive`] if an entry of the root leads to the root again, as where tables
    /// are edited through a recursive mapping. Such a tree shows its tables as memory, and would be
    /// freed through itself: take the entry out, and reach tables by a
    /// [`Window`](crate::linear::Window).
    ///
    /// ```
    /// use tablewright::{AddressSpace, EditError, Half, Level, Liveness, Pa, Perms, Platform, Va};
    /// use tablewright::{Format, format::X86_64};
    /// use tablewright_hosted::Hosted;
    /// let platform = Hosted::new(8, 12);
    /// let root = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap().root();
    /// // SAFETY: a table of the platform's, which nothing else uses.
    /// let entry = unsafe { (&platform).table(root, Level::new(3)).add(510).as_ref() };
    /// entry.store(X86_64::<4>::table(root, Perms::empty()));
    /// // SAFETY: a tree of this format (1.), edited by no other (2.), and not loaded (3.).
    /// let adopted = unsafe {
    ///     AddressSpace::<X86_64<4>, _>::adopt(&platform, root, Half::Lower, Liveness::Dead)
    /// };
    /// let at = Va::new(0xffff_ff00_0000_0000);
    /// assert_eq!(adopted.err(), Some(EditError::Recursive(at)));
    /// ```
    ///
    /// # Safety
    /// 1. `root` holds the first table of a tree of this format, in which entries that hardware
    ///    ignores are holes, or what this engine has left there; and the frames that its
    ///    descriptors point to hold its tables, all reachable through [`Platform::table`] and, if
    ///    they are to be freed, known to [`Platform::free_root`] and [`Platform::free_table`].
    /// 2. Nothing else edits it while the space exists.
    /// 3. `liveness` is true: a space that is said to be dead is not used by any walker until it is
    ///    made live; and one that is not was loaded under the [identity](Platform::identity_of) of
    ///    its root, if that has one, or else under 0, which [`with_id`](Self::with_id) no longer
    ///    changes.
    pub unsafe fn adopt(
        platform: P,
        root: Pa,
        half: Half,
        liveness: Liveness,
    ) -> Result<Self, EditError<F::Input>> {
        let level = F::root_level();
        let recursive = {
            // SAFETY: the first table of a tree of the format, by (1.).
            let table = unsafe { Table::open(&platform, root, level) };
            (0..F::entries(level))
                .find(|&index| F::table_below(table.load(index), level) == Some(root))
        };
        if let Some(index) = recursive {
            let low = (index as u64) << F::shift(level);
            let at = match Reach::of_root::<F>(half).holds(low, low) {
                true => low,
                false => low | u64::MAX << F::INPUT_BITS,
            };
            return Err(EditError::Recursive(F::Input::from_bits(at)));
        }
        // SAFETY: passed on.
        Ok(unsafe { Self::take_over(platform, root, half, liveness) })
    }

    /// Takes over a tree whose root does not lead to itself.
    ///
    /// # Safety
    /// 1. to 3. of [`adopt`](Self::adopt).
    pub(crate) unsafe fn take_over(platform: P, root: Pa, half: Half, liveness: Liveness) -> Self {
        let reach = Reach::of_root::<F>(half);
        let space = Self {
            platform,
            root,
            id: 0,
            reach,
            cache: Cache::new(reach, !F::TABLES_RESTRICT),
            pinned: false,
            liveness,
            serial: 0,
            debt: Debt::of_unknown_tree(F::GLOBALS),
            format: PhantomData,
        };
        space.announce();
        space
    }

    /// Gives the space an identity (ASID, PCID, VMID), which its invalidations carry. 0 until it is
    /// set. A space that walkers use keeps the one that they know it by.
    ///
    /// For embedders that number their spaces by hand, and for good. A space whose root has an
    /// [`Identity`](crate::shootdown::Identity) goes by that one; see [`Platform::identity_of`].
    pub fn with_id(mut self, id: u16) -> Self {
        if self.liveness == Liveness::Dead {
            self.id = id;
        }
        self
    }

    /// The frame of the root: what goes into the translation table base register.
    #[inline]
    pub fn root(&self) -> Pa {
        self.root
    }

    /// Its identity: what [`with_id`](Self::with_id) has set, or where its root has an
    /// [`Identity`](crate::shootdown::Identity) the current identifier, 0 before it is loaded
    /// first.
    pub fn id(&self) -> u16 {
        (self.platform.identity_of(self.root)).map_or(self.id, |identity| identity.id())
    }

    /// The half of the input addresses that it translates; [`Half::Lower`] if all of them.
    pub fn half(&self) -> Half {
        self.reach.half().unwrap_or(Half::Lower)
    }

    /// Whether one root translates both halves, and no half of them is left out.
    pub(crate) fn translates_both_halves(&self) -> bool {
        self.reach.half().is_none()
    }

    /// The platform of the space.
    #[inline]
    pub fn platform(&self) -> &P {
        &self.platform
    }

    /// Whether walkers use the space.
    #[inline]
    pub fn liveness(&self) -> Liveness {
        self.liveness
    }

    /// Walkers use the space from now on: publishes everything written so far, so that the root may
    /// be loaded next.
    pub fn make_live(&mut self) {
        self.reach(Liveness::Live);
    }

    /// Makes the space live, like [`make_live`](Self::make_live), and says that the code that edits
    /// runs on it: no edit breaks a translation.
    pub fn make_own(&mut self) {
        self.reach(Liveness::Own);
    }

    fn reach(&mut self, liveness: Liveness) {
        if self.liveness == Liveness::Dead {
            self.platform.barrier(Barrier::Publish);
            self.debt.take_publish();
        }
        self.become_(liveness);
    }

    /// Changes the liveness, and publishes what walkers may use from then on.
    pub(crate) fn become_(&mut self, liveness: Liveness) {
        self.liveness = liveness;
        self.announce();
        // How a leaf is changed depends on it.
        self.cache.invalidate();
    }

    /// Registers the root with its identity, if it has one, while the space is live.
    fn announce(&self) {
        if let Some(identity) = self.platform.identity_of(self.root) {
            match self.liveness {
                Liveness::Dead => identity.part(self.root),
                Liveness::Live | Liveness::Own => identity.join(self.root),
            }
        }
    }

    /// Walkers no longer use the space.
    ///
    /// # Safety
    /// 1. No processor has the root loaded, and everything cached of it has been invalidated.
    pub unsafe fn make_dead(&mut self) {
        self.become_(Liveness::Dead);
    }

    /// Has every processor forget what it remembers of the space, waits until they have, and makes
    /// it dead: the end of a process, before its tables are [destroyed](Self::destroy). One
    /// invalidation, of the identifier.
    ///
    /// # Safety
    /// 1. No processor has the root loaded, and none loads it any more.
    /// 2. It was loaded under the identifier that the platform invalidates.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Liveness, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// # space.map(Span::new(Va::new(0x5000), 0x1000)?, Pa::new(0x8000), Attrs::USER_DATA)?;
    /// space.make_live();
    /// // The process has ended, and another root is loaded where it ran.
    /// // SAFETY: as this says, under the space's own identifier.
    /// unsafe { space.retire() };
    /// assert_eq!((space.liveness(), platform.counts().invalidations), (Liveness::Dead, 1));
    /// assert!(space.destroy(|leaf| assert_eq!(leaf.frame(), Pa::new(0x8000))).is_ok());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub unsafe fn retire(&mut self) {
        if self.liveness == Liveness::Dead {
            return;
        }
        self.flush_everything();
        // SAFETY: the root is not loaded (1.), and what was cached of it is forgotten (2.).
        unsafe { self.make_dead() };
    }

    /// Has every processor forget the space, and waits: what gathers owe that were forgotten.
    #[cold]
    #[inline(never)]
    pub(crate) fn flush_everything(&mut self) {
        // Unless a gather was forgotten, what was stored last is visible.
        if self.debt.take_publish() || self.debt.is_flush_pending() {
            self.platform.barrier(Barrier::Publish);
        }
        let everything = self.target().forgetting(&self.platform, What::Everything);
        self.platform.invalidate(&everything);
        self.platform.barrier(Barrier::Complete);
        self.debt.complete();
    }

    /// Frees every table, visiting the leaves. The space has to be [dead](Liveness::Dead).
    ///
    /// # Errors
    /// Gives a space back that is not dead.
    #[expect(clippy::result_large_err, reason = "the space comes back")]
    pub fn destroy(mut self, leaves: impl FnMut(Leaf<F>)) -> Result<(), Self> {
        // SAFETY: the space is gone after it (1.).
        match unsafe { self.tear_down(leaves) } {
            true => Ok(()),
            false => Err(self),
        }
    }

    /// Tears a space down like [`retire`](Self::retire), for one that cannot be given away: in the
    /// `Drop` of its owner. Whether it was dead; nothing has happened if not.
    ///
    /// # Safety
    /// 1. If it was dead, the space is not used any more but to be dropped.
    ///
    /// ```
    /// use tablewright::{AddressSpace, format::Arm64K4};
    /// use tablewright_hosted::Hosted;
    /// struct Process<'p>(AddressSpace<Arm64K4, &'p Hosted>);
    /// impl Drop for Process<'_> {
    ///     fn drop(&mut self) {
    ///         // SAFETY: 1. of both: it does not run any more, and is not used after this.
    ///         unsafe {
    ///             self.0.retire();
    ///             let _was_dead = self.0.tear_down(|_leaf| ());
    ///         }
    ///     }
    /// }
    /// let platform = Hosted::new(64, 12);
    /// drop(Process(AddressSpace::new(&platform).unwrap()));
    /// assert_eq!(platform.counts().tables, 0);
    /// ```
    #[must_use = "a space that is not dead is not torn down"]
    pub unsafe fn tear_down(&mut self, mut leaves: impl FnMut(Leaf<F>)) -> bool {
        if self.liveness != Liveness::Dead {
            return false;
        }
        // SAFETY: no walker uses a dead space, it is borrowed exclusively, and is not used again
        // (1.). What is not its own of a root is in no slice.
        unsafe { reclaim_all::<F, P>(&self.platform, self.root, self.everything(), &mut leaves) };
        // SAFETY: as above; the space owns the root.
        unsafe {
            self.platform.free_root(self.root, F::root_level(), F::root_tables());
        };
        true
    }

    /// From now on its upper half alone is edited, and holds what all spaces share.
    pub(crate) fn pin(&mut self) {
        // Forgets the last change as well, which may have made leaves local.
        self.limit_to(Half::Upper);
        self.pinned = true;
        self.debt.add_globals(true);
    }

    /// Notes that some leaves may be members of runs, if `any`.
    #[inline]
    pub(crate) fn note_runs(&mut self, any: bool) {
        if F::CONTIGUOUS != 0 && any && !self.debt.has_runs() {
            self.debt.set_runs(true);
            // A run may have to be broken where a page has not.
            self.cache.invalidate();
        }
    }

    /// Limits the space to one half of what its root translates.
    pub(crate) fn limit_to(&mut self, half: Half) {
        self.reach = Reach::of_half::<F>(half);
        self.cache = Cache::new(self.reach, self.cache.is_open());
    }

    /// Whether some table may take permissions away, or other software has encoded leaves.
    #[inline]
    pub(crate) fn may_deny(&self) -> bool {
        F::TABLES_RESTRICT && !self.cache.is_open()
    }

    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.liveness != Liveness::Dead
    }

    #[inline]
    pub(crate) fn conditions(&self) -> Conditions {
        Conditions {
            caps: self.platform.caps(),
            live: self.is_live(),
            may_break: self.liveness != Liveness::Own,
        }
    }

    /// Checks a range that an edit was given.
    #[inline]
    pub(crate) fn check(&self, span: Span<F::Input>) -> Result<Slice, EditError<F::Input>> {
        self.reach.check::<F>(span)
    }

    /// Checks one page, like [`check`](Self::check).
    #[inline]
    pub(crate) fn check_page(&self, page: F::Input) -> Result<Slice, EditError<F::Input>> {
        if page.bits() & ((1 << F::PAGE_SHIFT) - 1) != 0 {
            return Err(EditError::Misaligned);
        }
        if !self.translates(page.bits()) {
            return Err(EditError::InputOutOfRange);
        }
        Ok(Slice::around::<F>(page.bits(), Level::PAGE))
    }

    /// Refuses a leaf that is not global in a space that many roots share: it is remembered under
    /// many identities, and an invalidation finds all of it only if it is global.
    #[inline]
    pub(crate) fn check_global(&self, global: bool) -> Result<(), Inexpressible> {
        match self.pinned {
            true => check_shared(global),
            false => Ok(()),
        }
    }

    /// Whether the root translates this address.
    #[inline]
    pub(crate) fn translates(&self, input: u64) -> bool {
        self.reach.holds(input, input)
    }

    /// The translations that a flush of the space is about: its root and identifier.
    #[inline]
    pub(crate) fn target(&self) -> Target {
        Target { root: self.root, id: self.id, global: self.debt.has_globals() }
    }

    /// All addresses that the root translates, in pieces that do not wrap.
    pub(crate) fn everything(&self) -> impl Iterator<Item = Slice> + use<F, P> {
        let (first, last) = (0, (1u64 << bits_of_half::<F>()) - 1);
        let lower = Slice { first, last };
        let upper = Slice { first: !last, last: u64::MAX };
        let half = self.reach.half();
        let with_lower = half != Some(Half::Upper);
        let with_upper = half != Some(Half::Lower);
        [with_lower.then_some(lower), with_upper.then_some(upper)].into_iter().flatten()
    }

    /// Walks the space over `slice`, which has been checked.
    #[inline]
    pub(crate) fn visit(&self, slice: Slice, visitor: &mut dyn Visit<F, P>) -> ControlFlow<()> {
        // SAFETY: the root of a space holds a tree of its format: `new` made it so, or the caller
        // of `adopt` vouched.
        unsafe { walk::<F, P>(&self.platform, self.root, F::root_level(), slice, visitor) }
    }

    /// Goes straight down from the root to the table of pages that covers `slice`, which has been
    /// checked. `None` as [`descend`] says.
    #[inline]
    pub(crate) fn place(&self, slice: Slice) -> Option<Place<'_, P>> {
        // SAFETY: as in `visit`.
        unsafe { descend::<F, P, false, false>(&self.platform, self.root, slice) }
    }

    /// Finds the entry of the page around `input`, which the root translates. `None` if it is not
    /// in a table of pages.
    #[inline]
    pub(crate) fn locate(&self, input: u64) -> Option<Located> {
        let page = Slice::around::<F>(input, Level::PAGE);
        // SAFETY: as in `pages_of` and `visit`.
        let place = unsafe {
            match self.cache.upper.number_of::<F>(input) {
                Some(number) => descend_near::<F, P, true>(
                    &self.platform,
                    self.cache.upper.tables,
                    number,
                    page,
                ),
                None => descend::<F, P, false, true>(&self.platform, self.root, page),
            }
        };
        Some(Located::of(&place?))
    }

    /// Finds the entry of `page` for an edit, and caches the table that it lies below. `None` also
    /// if that is no address of a page, or the space is not open there.
    #[inline(always)]
    pub(crate) fn locate_open(&mut self, page: u64) -> Option<Located> {
        // The lowest bits of what is no page become the highest: more than there are pages.
        let number = page.wrapping_sub(self.cache.upper.first);
        let mut number = number.rotate_right(F::PAGE_SHIFT);
        if number >= self.cache.upper.pages {
            if !self.approach(page) {
                return None;
            }
            number = page.wrapping_sub(self.cache.upper.first) >> F::PAGE_SHIFT;
        }
        let slice = Slice::around::<F>(page, Level::PAGE);
        // SAFETY: as in `pages_of`.
        let place = unsafe {
            descend_near::<F, P, true>(&self.platform, self.cache.upper.tables, number, slice)
        };
        Some(Located::of(&place?))
    }

    /// Fast path of an edit. Finds the table of pages that covers `slice`, which has been checked,
    /// and the entries. `None` if there is no such table, or the space is not open.
    #[inline]
    pub(crate) fn pages_of(&mut self, slice: Slice) -> Option<(Pa, Range<usize>)> {
        let mut number = self.cache.upper.number_of::<F>(slice.first);
        if number.is_none() {
            self.approach(slice.first);
            number = self.cache.upper.number_of::<F>(slice.first);
        }
        // SAFETY: a cached table is part of this tree (1.), and has the page (2.).
        let place = unsafe {
            descend_near::<F, P, false>(&self.platform, self.cache.upper.tables, number?, slice)
        };
        place.map(|Place { table, range }| (table.frame(), range))
    }

    /// Opens a table of pages that a walk has come to.
    #[inline]
    pub(crate) fn open(&self, frame: Pa) -> Table<'_, P> {
        // SAFETY: a table of this tree, as all are that walks come to.
        unsafe { Table::open(&self.platform, frame, Level::PAGE) }
    }

    /// Caches the table of tables that `page` lies below, if the space is open there. Returns
    /// whether it has, which it has not of what is no page.
    #[inline(never)]
    pub(crate) fn approach(&mut self, page: u64) -> bool {
        let is_page = page & ((1 << F::PAGE_SHIFT) - 1) == 0;
        if !is_page || !self.cache.is_open_at(page, self.reach.offset) {
            return false;
        }
        // SAFETY: as in `visit`.
        let tables =
            unsafe { descend_to_tables::<F, P, false, true>(&self.platform, self.root, page) };
        let Some(tables) = tables else {
            return false;
        };
        let pages = 1 << (2 * F::INDEX_BITS);
        let (first, pages) = match F::LEVELS {
            // The root has entries for what it translates, no more and no less.
            ..3 => (self.reach.offset.wrapping_neg(), self.reach.size >> F::PAGE_SHIFT),
            3.. => (page & !((pages << F::PAGE_SHIFT) - 1), pages),
        };
        self.cache.upper = UpperCache { first, pages, tables };
        true
    }

    /// The permissions that the tables above a page deny. Few spaces have a table that does.
    #[inline]
    pub(crate) fn denied(&self, input: u64) -> Perms {
        match self.may_deny() {
            true => self.denied_above(input),
            false => Perms::empty(),
        }
    }

    #[cold]
    #[inline(never)]
    fn denied_above(&self, input: u64) -> Perms {
        self.find(input).denied
    }

    /// Finds the entry at which the way down to `input` ends.
    #[inline(never)]
    pub(super) fn find(&self, input: u64) -> Reached<'_, P> {
        let mut denied = Perms::empty();
        let (mut frame, mut level) = (self.root, F::root_level());
        loop {
            // SAFETY: the root, or what a table descriptor of the tree points to.
            let table = unsafe { Table::open(&self.platform, frame, level) };
            let index = F::index(input, level);
            let entry = table.load(index);
            let kind = kind_of::<F>(entry, level);
            let below = match (kind, level.down()) {
                (Kind::Table, Some(below)) => below,
                _ => {
                    return Reached { table, index, level, entry, kind, denied };
                }
            };
            denied |= denied_of::<F>(entry);
            (frame, level) = (address_of::<F>(entry, level), below);
        }
    }
}

/// Refuses leaves that are not global in the part that all spaces share.
#[cold]
#[inline(never)]
pub(crate) fn check_shared(global: bool) -> Result<(), Inexpressible> {
    match global {
        true => Ok(()),
        false => Err(Inexpressible(&"what all spaces share has to be global")),
    }
}

/// An entry of a table of pages.
#[derive(Clone, Copy)]
pub(crate) struct Located {
    pub frame: Pa,
    pub index: usize,
}

impl Located {
    #[inline]
    pub(super) fn of<P: Platform>(place: &Place<'_, P>) -> Self {
        Self { frame: place.table.frame(), index: place.range.start }
    }
}

/// The entry that the tables lead to.
pub(super) struct Reached<'p, P: Platform> {
    pub table: Table<'p, P>,
    pub index: usize,
    pub level: Level,
    pub entry: u64,
    pub kind: Kind,
    /// Permissions that the tables above take away.
    pub denied: Perms,
}

impl<F: Format, P: Platform> fmt::Debug for AddressSpace<F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace")
            .field("format", &F::NAME)
            .field("root", &self.root)
            .field("id", &self.id)
            .field("half", &self.reach.half())
            .field("liveness", &self.liveness)
            .finish_non_exhaustive()
    }
}
