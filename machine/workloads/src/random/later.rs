//! What was cut off and is forgotten, until no walk holds it.

use std::cell::RefCell;
use std::collections::VecDeque;

use tablewright::shared::{Cut, Gather, SharedPlatform};
use tablewright::{Format, Leaf};

/// What is complete and may still be walked.
pub struct Later<F: Format, P: SharedPlatform>(RefCell<VecDeque<Cut<F, P>>>);

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
    pub fn push(&self, cut: Cut<F, P>) {
        self.0.borrow_mut().push_back(cut);
    }

    /// Completes what was gathered, and keeps what may still be walked for later.
    pub fn put_off(&self, gather: &mut Gather<'_, F, P>)
    where
        P: Clone,
    {
        self.push(gather.issue().complete());
        self.settle_one(|_| ());
    }

    /// Reclaims the oldest, if no walk holds it. Whether that was so.
    pub fn settle_one(&self, leaves: impl FnMut(Leaf<F>)) -> bool {
        // It is taken out: others may come here while this CPU waits for its turn.
        let oldest = self.0.borrow_mut().pop_front();
        let Some(cut) = oldest else {
            return false;
        };
        match cut.try_complete() {
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
