//! Detached tables that are forgotten, until no walk holds them.

use std::cell::RefCell;
use std::collections::VecDeque;

use tablewright::shared::{DeferredReclaim, Gather, SharedPlatform};
use tablewright::{Format, Leaf};

/// Reclaims that are complete, whose tables may still be walked.
pub struct Later<F: Format, P: SharedPlatform>(RefCell<VecDeque<DeferredReclaim<F, P>>>);

impl<F: Format, P: SharedPlatform> Default for Later<F, P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<F: Format, P: SharedPlatform> Later<F, P> {
    /// Nothing.
    pub fn new() -> Self {
        Self(RefCell::default())
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Keeps what is complete.
    pub fn push(&self, deferred: DeferredReclaim<F, P>) {
        self.0.borrow_mut().push_back(deferred);
    }

    /// Completes what was gathered, and keeps what may still be walked for later.
    pub fn put_off(&self, gather: &mut Gather<'_, F, P>)
    where
        P: Clone,
    {
        self.push(gather.issue().complete());
        self.reclaim_one(|_| ());
    }

    /// Reclaims the oldest, if no walk holds it. Whether that was so.
    pub fn reclaim_one(&self, leaves: impl FnMut(Leaf<F>)) -> bool {
        // It is taken out: others may come here while this CPU waits for its turn.
        let oldest = self.0.borrow_mut().pop_front();
        let Some(deferred) = oldest else {
            return false;
        };
        match deferred.try_complete() {
            Ok(completed) => {
                completed.finish(leaves);
                true
            }
            Err(again) => {
                self.push(again);
                false
            }
        }
    }
}
