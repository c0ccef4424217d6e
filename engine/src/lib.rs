//! Page tables for kernels and hypervisors: built, changed and taken down in bulk, with as few TLB, barrier and cache
//! operations as the architecture allows.
//!
//! A change to a live page table has five parts, each with its own price, and this crate keeps them apart:
//!
//! | part | what happens | may it fail? |
//! |---|---|---|
//! | **prepare** | tables are allocated and filled where no walk can reach them | yes, and then nothing has changed |
//! | **edit** | entries that others can see are stored | no |
//! | **publish** | the stores become visible to the table walkers | no |
//! | **invalidate** | *issue*: say what must be forgotten; *complete*: wait until it is | no |
//! | **settle** | leaves are accounted for, tables that were cut off are freed | no |
//!
//! Start at [`AddressSpace`] for the edits, at [`Platform`] for what an embedder provides, at [`Gather`] for the edits and what they
//! leaves behind, at [`mod@format`] for the descriptor formats, and at [`linear`] for the map of all memory that a kernel
//! makes when it boots; [`shared`] has the edits that many processors make at once, [`guest`] what a hypervisor makes of
//! them, [`shootdown`] what it takes to have other processors forget, and [`arch`] what is executed for all of it.
//!
//! The crate is `no_std` and needs no allocator. The feature `hosted`, on by default, adds a platform on ordinary memory for tests, in
//! the module `hosted`, and needs `std`.
#![cfg_attr(not(feature = "hosted"), no_std)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod addr;
pub mod arch;
pub mod bbm;
pub mod dirty;
mod edit;
mod entry;
pub mod flush;
pub mod format;
mod gather;
pub mod guest;
#[cfg(feature = "hosted")]
pub mod hosted;
pub mod hyperv;
mod invalidation;
mod kernel_half;
pub mod linear;
mod platform;
pub mod shared;
pub mod shootdown;
mod space;
mod table;
mod walk;

pub use addr::{Address, AddressError, Ipa, Level, MIN_PAGE_SHIFT, Pa, Page, Span, Va};
pub use edit::{Change, Encoded, Mapping, Template};
pub use entry::{Entry, TableLink, fill, prefetch};
pub use flush::{Leaf, Progress};
pub use format::{Attrs, Format, Inexpressible, Kind, Memory, Perms, Shareability};
pub use gather::Gather;
pub use invalidation::{Invalidation, Stale, What};
pub use kernel_half::KernelHalf;
pub use platform::{Barrier, Caps, Hooks, NoHooks, Platform};
pub use space::{AddressSpace, EditError, Half, Liveness};

/// The examples in the README and the book, compiled and run as tests.
#[cfg(all(doctest, feature = "hosted", target_arch = "x86_64"))]
#[doc = include_str!("../../README.md")]
struct Readme;

#[cfg(all(doctest, feature = "hosted"))]
#[doc = include_str!("../README.md")]
struct Package;

#[cfg(all(doctest, feature = "hosted"))]
#[doc = include_str!("../../docs/embedding.md")]
struct Embedding;

#[cfg(all(doctest, feature = "hosted"))]
#[doc = include_str!("../../docs/process.md")]
struct Processes;

#[cfg(all(doctest, feature = "hosted"))]
#[doc = include_str!("../../docs/guest.md")]
struct GuestMemory;

#[cfg(all(doctest, feature = "hosted"))]
#[doc = include_str!("../../docs/log.md")]
struct Logging;

#[cfg(all(doctest, feature = "hosted"))]
#[doc = include_str!("../../docs/shootdown.md")]
struct RemoteFlushes;

#[cfg(all(doctest, feature = "hosted"))]
#[doc = include_str!("../../docs/hyper-v.md")]
struct Hypercalls;
