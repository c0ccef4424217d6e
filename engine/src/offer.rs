//! How marks, entries and ranges are given out: a visitor that unwinds has accepted nothing.

use crate::sync::{AtomicBool, Ordering};

/// Calls a visitor, and `put_back` if it unwinds.
#[inline]
pub(crate) fn offer(put_back: impl Fn(), visit: impl FnOnce()) {
    struct Offered<B: Fn()>(B);
    impl<B: Fn()> Drop for Offered<B> {
        fn drop(&mut self) {
            (self.0)();
        }
    }
    let offered = Offered(put_back);
    visit();
    core::mem::forget(offered);
}

/// Admits one taker at a time.
#[derive(Debug, Default)]
pub(crate) struct Turn(AtomicBool);

impl Turn {
    /// Begins to take. `None` while another CPU takes, or inside of a visitor of this taker.
    pub fn begin(&self) -> Option<Taking<'_>> {
        // Acquire: the positions that the last taker has left.
        let busy = self.0.swap(true, Ordering::Acquire);
        (!busy).then(|| Taking(self))
    }
}

/// The right to take, until it is dropped or unwound.
pub(crate) struct Taking<'t>(&'t Turn);

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
    }
}
