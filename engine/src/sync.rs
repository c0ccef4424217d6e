//! The atomics of `core`, or those of the model checker.

#[cfg(not(feature = "loom"))]
pub(crate) use core::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

/// A constructor that is `const` except under loom, whose atomics are allocated.
macro_rules! const_new {
    ($(#[$doc:meta])* $body:block) => {
        $(#[$doc])*
        #[cfg(not(feature = "loom"))]
        pub const fn new() -> Self $body

        $(#[$doc])*
        #[cfg(feature = "loom")]
        pub fn new() -> Self {
            Self::default()
        }
    };
}
pub(crate) use const_new;
