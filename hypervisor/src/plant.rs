//! Bugs of TLB maintenance that an emulator does not show, because it remembers less than a
//! processor may. Each is planted by `plant=NAME`, for `cargo xtask check`, which watches what is
//! executed.

use core::sync::atomic::{AtomicUsize, Ordering};

macro_rules! plants {
    ($($(#[$doc:meta])* $plant:ident = $name:literal,)*) => {
        /// A planted bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Plant { $($(#[$doc])* $plant,)* }

        impl Plant {
            const ALL: &'static [(&'static str, Self)] = &[$(($name, Self::$plant)),*];
        }
    };
}

plants! {
    /// Combined translations are forgotten before those of stage 2.
    CombinedFirst = "combined-first",
    /// Each processor has another VMID.
    Vmids = "vmids",
    /// Leaves are forgotten, where a table was detached.
    LeavesOfTables = "leaves-of-tables",
    /// This processor forgets, and no other.
    Local = "local",
    /// Of each range the first page is forgotten.
    FirstPage = "first-page",
    /// When VMIDs roll over, a processor does not forget what it has under them.
    NotForgotten = "not-forgotten",
    /// A guest is loaded under the VMID that it had when it was loaded before.
    OldIdentifier = "old-identifier",
    /// A guest that is not loaded is flushed under whatever VMID is.
    WrongVmid = "wrong-vmid",
    /// A guest that is not loaded is flushed with its own root loaded.
    RootOfFlush = "root-of-flush",
    /// No ISB follows a write of `VTTBR_EL2`.
    NoIsb = "no-isb",
}

/// Which is planted: its place in the list, from 1.
static PLANTED: AtomicUsize = AtomicUsize::new(0);

/// Plants the bug of this name. Whether there is such a one.
pub fn plant(name: &str) -> bool {
    let found = Plant::ALL.iter().find(|(of, _)| *of == name);
    if let Some((_, plant)) = found {
        PLANTED.store(*plant as usize + 1, Ordering::Relaxed);
    }
    found.is_some()
}

/// Whether any is.
#[inline(always)]
pub fn is_any_planted() -> bool {
    PLANTED.load(Ordering::Relaxed) != 0
}

/// Whether this one is.
pub fn is_planted(plant: Plant) -> bool {
    PLANTED.load(Ordering::Relaxed) == plant as usize + 1
}
