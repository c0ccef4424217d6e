//! The kernel's half of the input space, where one root translates both halves: made once, part of every root.
//!
//! On x86-64 a root has 512 entries, of which the upper 256 are the kernel's. A [`KernelHalf`] has a table below each of them
//! from the start, and these entries never change again. So they can be copied into the root of every user space, and what is
//! mapped, changed and unmapped below them is so in all spaces at once.
//!
//! A user space that is made [beside](KernelHalf::user) it translates the lower half only, whatever its root says: its edits
//! refuse the kernel's addresses, and what is destroyed with it are its own tables. What all share is global, and is
//! invalidated as global: a processor remembers it under whatever space it has loaded.
//!
//! On arm64, where each half has a root of its own, there is nothing to share.

use core::ops::Deref;

use crate::edit::Gather;
use crate::edit::space::{AddressSpace, EditError, Half, Liveness};
use crate::format::{Format, Kind, Perms};
use crate::platform::{Barrier, Platform};
use crate::table::Table;
use crate::{Address, Level};

/// The kernel's half of every address space. Its tables are never freed, because roots that are made beside it keep them.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, EditError, KernelHalf, Pa, Span, Va, format::X86_64, hosted::Hosted};
/// let platform = Hosted::new(512, 12);
/// let space = AddressSpace::<X86_64<4>, _>::new(&platform).ok_or("no memory")?;
/// let mut kernel = KernelHalf::new(space)?;
/// let mut user = kernel.user().ok_or("no memory")?;
///
/// // Mapped after the user space was made, and there all the same: the roots share what is below them.
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
#[derive(Debug)]
pub struct KernelHalf<F: Format, P: Platform> {
    space: AddressSpace<F, P>,
}

impl<F: Format, P: Platform + Clone> KernelHalf<F, P> {
    const ONE_ROOT: () = assert!(
        F::SIGNED && !F::HALVES && F::LEVELS > 1,
        "each half has a root of its own"
    );

    /// The upper half of `space` becomes the kernel's half; what is mapped in it stays so. Takes a table for each of the
    /// root's upper entries that has none.
    ///
    /// # Errors
    /// [`EditError::OutOfTables`]; [`EditError::AlreadyMapped`] where a leaf stands in the root;
    /// [`EditError::Inexpressible`] for a leaf that is not global.
    pub fn new(mut space: AddressSpace<F, P>) -> Result<Self, EditError<F::Input>> {
        let () = Self::ONE_ROOT;
        space.limit_to(Half::Upper);
        let mut local = None;
        space.walk_all(|leaf| {
            if !leaf.attrs().global {
                local = Some(leaf);
            }
        });
        space.pin();
        space.check_global(local.is_none())?;
        let level = F::root_level();
        let below = level.down().unwrap_or(Level::PAGE);
        // SAFETY: the root of the space.
        let root = unsafe { Table::open(&space.platform, space.root, level) };
        for index in F::entries(level) / 2..F::entries(level) {
            match F::kind(root.load(index), level) {
                Kind::Table => {}
                Kind::Leaf => {
                    let sign = u64::MAX << (F::INPUT_BITS - 1);
                    let at = (index as u64) << F::shift(level) | sign;
                    return Err(EditError::AlreadyMapped(F::Input::from_bits(at)));
                }
                Kind::Invalid => {
                    let frame = space
                        .platform
                        .alloc_table(below)
                        .ok_or(EditError::OutOfTables)?;
                    // SAFETY: just allocated.
                    let table = unsafe { Table::open(&space.platform, frame, below) };
                    table.fill(0..1 << F::INDEX_BITS, 0, 0);
                    drop(table);
                    root.link(index, F::table(frame, Perms::empty()));
                }
            }
        }
        drop(root);
        space.globals = true;
        space.platform.barrier(Barrier::Publish);
        Ok(Self { space })
    }

    /// Edits of the kernel's half, in all spaces at once.
    pub fn gather(&mut self) -> Gather<'_, F, P> {
        self.space.gather()
    }

    /// An empty user space: the lower half, beside this upper half. `None` if the platform has no frame for the root.
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

    /// Walkers use it from now on, with this root or with those of user spaces: see
    /// [`AddressSpace::make_live`].
    pub fn make_live(&mut self, liveness: Liveness) {
        match liveness {
            Liveness::Dead => {}
            Liveness::Live => self.space.make_live(),
            Liveness::Own => self.space.make_own(),
        }
    }
}

/// The kernel's own space, to be looked at.
impl<F: Format, P: Platform> Deref for KernelHalf<F, P> {
    type Target = AddressSpace<F, P>;

    fn deref(&self) -> &AddressSpace<F, P> {
        &self.space
    }
}
