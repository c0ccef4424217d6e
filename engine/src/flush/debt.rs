//! The debt of a space: what its processors still have to see or to forget.
//!
//! A gather knows the ranges that it has changed. The debt is what remains true when that gather is
//! forgotten, or what it has issued is: the next gather starts with all of it. Only this file
//! changes it.

/// Work that is pending in a space, and what an invalidation of it has to reach.
#[derive(Clone, Copy)]
pub(crate) struct Debt {
    /// TLBs may hold what an edit has changed. Set before the change is stored, cleared when the
    /// invalidation that covers it is complete.
    flush_pending: bool,
    /// Walkers may not see what an edit has stored.
    needs_publish: bool,
    /// Some leaves may be members of contiguous runs.
    has_runs: bool,
    /// Some leaves may be global.
    has_globals: bool,
}

impl Debt {
    /// The debt of an empty tree.
    pub const NONE: Self =
        Self { flush_pending: false, needs_publish: false, has_runs: false, has_globals: false };

    /// The debt of a tree that other software has made, whose format may have global leaves.
    pub const fn of_unknown_tree(has_globals: bool) -> Self {
        Self { has_runs: true, has_globals, ..Self::NONE }
    }

    /// Notes that TLBs may hold what is about to be changed.
    #[inline]
    pub fn begin_change(&mut self) {
        self.flush_pending = true;
    }

    /// Notes that all that was changed is invalidated, on every processor.
    #[inline]
    pub fn complete(&mut self) {
        self.flush_pending = false;
    }

    #[inline]
    pub fn is_flush_pending(&self) -> bool {
        self.flush_pending
    }

    /// Notes a store that walkers have to see.
    #[inline]
    pub fn stored(&mut self) {
        self.needs_publish = true;
    }

    #[inline]
    pub fn needs_publish(&self) -> bool {
        self.needs_publish
    }

    /// Returns whether walkers have to be shown something, which the caller does now.
    #[inline]
    pub fn take_publish(&mut self) -> bool {
        core::mem::take(&mut self.needs_publish)
    }

    #[inline]
    pub fn has_runs(&self) -> bool {
        self.has_runs
    }

    pub fn set_runs(&mut self, has_runs: bool) {
        self.has_runs = has_runs;
    }

    #[inline]
    pub fn has_globals(&self) -> bool {
        self.has_globals
    }

    #[inline]
    pub fn add_globals(&mut self, global: bool) {
        self.has_globals |= global;
    }
}
