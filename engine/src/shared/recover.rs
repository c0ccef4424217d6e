//! Blocks that come back: many leaves in the place of tables, forgotten together.
//!
//! Where the architecture lets a leaf take the place of a table without a break, both say the same, and it does no harm to
//! remember either. Harm is done by the next edit: on arm64 an invalidation names the level of what it takes away, and what a
//! walker remembers of the table's leaves has another. Whoever takes away permissions from the new leaf would have that
//! forgotten, and not the old ones.
//!
//! A fault therefore invalidates before it returns. Who recovers a guest's blocks one after the other would wait as often as
//! there are blocks. Instead a [`Recovery`] counts as an edit that is not complete, from before its first leaf until all is
//! forgotten: every edit that may have seen one of its leaves has all levels forgotten there. On x86, where an
//! invalidation has no level, nothing of this is needed, and nothing is done.

use crate::bbm::Rule;
use crate::flush::Leaf;
use crate::format::Format;

use super::{Cut, SharedFlush, SharedPlatform, SharedSpace};

/// Leaves that take the place of tables, until every processor has forgotten the tables.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, format::X86_64, hosted::Threads, shared::SharedSpace};
/// let platform = Threads::new(8, 12, 1);
/// let space = SharedSpace::new(AddressSpace::<X86_64<4>, _>::new(&platform).ok_or("no memory")?);
/// let recovery = space.recovery(); // for tablewright::guest::Guest::recover
/// assert!(recovery.is_clean());
/// assert!(recovery.finish(|_| ()).is_ok());
/// # Ok::<(), &str>(())
/// ```
#[must_use = "until it is complete every other edit invalidates more than it has to; what it carries leaks"]
pub struct Recovery<'s, F: Format, P: SharedPlatform> {
    space: &'s SharedSpace<F, P>,
    pub(super) flush: SharedFlush<F, P>,
}

impl<F: Format, P: SharedPlatform + Clone> SharedSpace<F, P> {
    /// Begins to put leaves in the place of tables.
    pub fn recovery(&self) -> Recovery<'_, F, P> {
        if F::RULE == Rule::Arm {
            // It ends when it is complete. One that is dropped never ends, and costs others time but no correctness.
            core::mem::forget(self.begin());
        }
        Recovery {
            space: self,
            flush: self.flush(),
        }
    }
}

impl<F: Format, P: SharedPlatform + Clone> Recovery<'_, F, P> {
    /// Whether there is nothing to invalidate. It has to be completed all the same.
    pub fn is_clean(&self) -> bool {
        self.flush.is_clean()
    }

    /// Waits until every processor has forgotten the tables.
    pub fn complete(self) -> Cut<F, P> {
        let cut = self.flush.issue().complete();
        if F::RULE == Rule::Arm {
            self.space.end();
        }
        cut
    }

    /// Completes, and settles if every walk that may hold a table is over; if not, gives the rest back to be tried later.
    ///
    /// # Errors
    /// What is not quiet yet.
    // Without an allocator there is nowhere else to put what is given back.
    #[allow(clippy::result_large_err)]
    pub fn finish(self, leaves: impl FnMut(Leaf<F>)) -> Result<(), Cut<F, P>> {
        self.complete().quiet()?.finish(leaves);
        Ok(())
    }
}
