//! The kernel's half of the input space, where one root translates both halves: made once, part of
//! every root.
//!
//! On x86-64 a root has 512 entries, of which the upper 256 are the kernel's. A [`KernelHalf`] has
//! a table below each of them from the start, and these entries never change again. So they can be
//! copied into the root of every user space, and what is mapped, changed and unmapped below them is
//! so in all spaces at once.
//!
//! A user space that is made [beside](KernelHalf::user) it translates the lower half only, whatever
//! its root says: its edits refuse the kernel's addresses, and what is destroyed with it are its
//! own tables. What all share is global, and is invalidated as global: a processor remembers it
//! under whatever space it has loaded.
//!
//! On arm64, where each half has a root of its own, there is nothing to share.

use core::fmt;
use core::ops::Deref;

use crate::edit::Gather;
use crate::edit::space::{AddressSpace, EditError, Half, Liveness, check_shared};
use crate::format::{Format, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::table::Table;
use crate::{Address, Level};

/// The kernel's half of every address space. Its tables are never freed, because roots that are
/// made beside it keep them.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, EditError, KernelHalf, Pa, Span, Va, format::X86_64};
/// use tablewright_hosted::Hosted;
/// let platform = Hosted::new(512, 12);
/// let space = AddressSpace::<X86_64<4>, _>::new(&platform).ok_or("no memory")?;
/// let mut kernel = KernelHalf::new(space).map_err(|(refused, _)| refused)?;
/// let mut user = kernel.user().ok_or("no memory")?;
///
/// // Mapped after the user space was made, and there all the same: the roots share what is below
/// // them.
/// let stack = Span::new(Va::new(0xffff_c900_0000_0000), 0x4000)?;
/// kernel.gather().map(stack, Pa::new(0x10_0000), Attrs::KERNEL_DATA)?;
/// assert_eq!(platform.read(user.root(), 0x192), platform.read(kernel.root(), 0x192));
///
/// assert_eq!(user.map(stack, Pa::new(0), Attrs::USER_DATA), Err(EditError::InputOutOfRange));
/// user.map(Span::new(Va::new(0x40_0000), 0x1000)?, Pa::new(0x9000), Attrs::USER_DATA)?;
/// assert!(user.destroy(|leaf| assert_eq!(leaf.frame(), Pa::new(0x9000))).is_ok());
/// assert!(kernel.query(stack.start()).is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct KernelHalf<F: Format, P: Platform> {
    space: AddressSpace<F, P>,
}

impl<F: Format, P: Platform + Clone> KernelHalf<F, P> {
    const ONE_ROOT: () =
        assert!(F::SIGNED && !F::HALVES && F::LEVELS > 1, "each half has a root of its own");

    /// The upper half of `space` becomes the kernel's half; what is mapped in it stays so. Takes a
    /// table for each of the root's upper entries that has none. Walkers use it from now on, if
    /// none did: with the roots of user spaces, if not with this one.
    ///
    /// # Errors
    /// Gives the space back, in which nothing has changed, with the reason:
    /// [`EditError::InputOutOfRange`] if it is one that translates one half only, like that of a
    /// user; [`EditError::AlreadyMapped`] where something is mapped in the lower half, which no
    /// edit would reach any more, or where a leaf stands in the root; [`EditError::Inexpressible`]
    /// for a leaf that is not global; [`EditError::OutOfTables`].
    #[expect(clippy::result_large_err, clippy::type_complexity, reason = "the space comes back")]
    pub fn new(
        mut space: AddressSpace<F, P>,
    ) -> Result<Self, (EditError<F::Input>, AddressSpace<F, P>)> {
        let () = Self::ONE_ROOT;
        if let Err(refused) = check(&space).and_then(|()| fill_root(&space)) {
            return Err((refused, space));
        }
        space.pin();
        match space.liveness() {
            Liveness::Dead => space.make_live(),
            Liveness::Live | Liveness::Own => space.platform.barrier(Barrier::Publish),
        }
        Ok(Self { space })
    }

    /// Edits of the kernel's half, in all spaces at once.
    pub fn gather(&mut self) -> Gather<'_, F, P> {
        self.space.gather()
    }

    /// An empty user space: the lower half, beside this upper half. `None` if the platform has no
    /// frame for the root.
    pub fn user(&self) -> Option<AddressSpace<F, P>> {
        let mut user = AddressSpace::new(self.space.platform.clone())?;
        user.limit_to(Half::Lower);
        let level = F::root_level();
        // SAFETY: the roots of the two spaces.
        let (from, to) = unsafe {
            (
                Table::open(&self.space.platform, self.space.root, level),
                Table::open(&user.platform, user.root, level),
            )
        };
        for index in F::entries(level) / 2..F::entries(level) {
            to.store(index, from.load(index));
        }
        drop((from, to));
        Some(user)
    }

    /// Whether the code that edits runs on it: see [`AddressSpace::make_own`]. It stays
    /// [live](Liveness::Live) where it is said to be dead, as long as there may be user spaces.
    pub fn make_live(&mut self, liveness: Liveness) {
        match liveness {
            Liveness::Dead => {}
            Liveness::Live => self.space.make_live(),
            Liveness::Own => self.space.make_own(),
        }
    }
}

/// Checks that what is mapped in `space` can be the kernel's half, and nothing else.
fn check<F: Format, P: Platform + Clone>(
    space: &AddressSpace<F, P>,
) -> Result<(), EditError<F::Input>> {
    if !space.translates_both_halves() {
        return Err(EditError::InputOutOfRange);
    }
    let (mut below, mut in_root, mut local) = (None, None, false);
    space.walk_all(|leaf| {
        let at = leaf.input();
        if at.bits() >> 63 == 0 {
            below = Some(at);
        }
        if leaf.level() == F::root_level() {
            in_root = Some(at);
        }
        local |= !leaf.attrs().global;
    });
    match below.or(in_root) {
        Some(at) => Err(EditError::AlreadyMapped(at)),
        None => Ok(check_shared(!local)?),
    }
}

/// Puts a table below each of the root's upper entries that has none; below none, if there are not
/// as many.
fn fill_root<F: Format, P: Platform>(
    space: &AddressSpace<F, P>,
) -> Result<(), EditError<F::Input>> {
    let level = F::root_level();
    let below = level.down().unwrap_or(Level::PAGE);
    let upper = F::entries(level) / 2..F::entries(level);
    // SAFETY: the root of the space.
    let root = unsafe { Table::open(&space.platform, space.root, level) };
    // As in a map: no walker goes to a table that is suspended, so that it can be taken back.
    let is_hole = |index: &usize| F::kind(root.load(*index), level) == Kind::Invalid;
    for index in upper.clone().filter(is_hole) {
        let Some(frame) = space.platform.alloc_table(below) else {
            for index in upper.clone().filter(is_hole) {
                let fresh = root.load(index);
                if fresh != 0 {
                    root.store(index, 0);
                    let frame = F::address(F::resume(fresh), level);
                    // SAFETY: it was allocated below, and no walker has come to it.
                    unsafe { space.platform.free_table(frame, below) };
                }
            }
            return Err(EditError::OutOfTables);
        };
        // SAFETY: just allocated: a table like any below the root (1. of both).
        unsafe { Table::open(&space.platform, frame, below).clear(1 << F::INDEX_BITS) };
        root.store(index, F::suspend(F::table(frame, Perms::empty())));
    }
    for index in upper.filter(is_hole) {
        root.link(index, F::resume(root.load(index)));
    }
    Ok(())
}

/// The kernel's own space, to be looked at.
impl<F: Format, P: Platform> Deref for KernelHalf<F, P> {
    type Target = AddressSpace<F, P>;

    fn deref(&self) -> &AddressSpace<F, P> {
        &self.space
    }
}

impl<F: Format, P: Platform> fmt::Debug for KernelHalf<F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KernelHalf").field(&self.space).finish()
    }
}
