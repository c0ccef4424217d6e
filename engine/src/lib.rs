//! Page tables for kernels and hypervisors: built, changed and taken down in bulk, with as few TLB,
//! barrier and cache operations as the architecture allows.
//!
//! A change to a live page table has five parts, each with its own price, and this crate keeps them
//! apart:
//!
//! | part | what happens | may it fail? |
//! |---|---|---|
//! | **prepare** | tables are filled where no walk reaches them | yes, and nothing has changed |
//! | **edit** | entries that others can see are stored | no |
//! | **publish** | the stores become visible to the table walkers | no |
//! | **invalidate** | *issue*: say what must be forgotten; *complete*: wait until it is | no |
//! | **reclaim** | leaves are accounted for, tables that were detached are freed | no |
//!
//! The crate is `no_std`, needs no allocator and has no features.
//!
//! # Ten minutes
//!
//! ## A space
//!
//! An [`AddressSpace`] is one tree of tables in one [format](mod@format), on one [`Platform`],
//! which is your kernel's. For a start it is `Hosted` of the crate `tablewright-hosted`:
//! frames of ordinary memory, in any program and any test.
//!
//! ```
//! use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64};
//! use tablewright_hosted::Hosted;
//!
//! let platform = Hosted::new(64, 12); // 64 frames of 2^12 bytes
//! let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).ok_or("no frame for the root")?;
//! let heap = Span::new(Va::new(0x4000_0000), 0x20_3000)?; // 2 MiB and 3 pages
//! space.map(heap, Pa::new(0x8000_0000), Attrs::USER_DATA)?;
//! let leaf = space.query(Va::new(0x4020_1234)).ok_or("a hole")?;
//! assert_eq!((leaf.frame(), leaf.size()), (Pa::new(0x8020_1000), 4096));
//! assert_eq!(space.query(heap.start()).ok_or("a hole")?.size(), 2 << 20); // the largest that fits
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Addresses have types ([`Va`], [`Ipa`], [`Pa`]), and a [`Span`] of them is not empty and does not
//! wrap. An edit that fails has changed nothing: [`EditError`] says why. Whether leaves are blocks,
//! runs or pages is [`Mapping`]'s, where the default is not what you want.
//!
//! ## Walkers
//!
//! [`make_live`](AddressSpace::make_live) says that processors use the tables from now on, and
//! publishes them: load the root after it. What takes something away is done through a [`Gather`],
//! because what processors remember has to be forgotten before memory is used for something else:
//!
//! ```
//! # use tablewright::{AddressSpace, Attrs, Pa, Span, Va, format::X86_64};
//! # use tablewright_hosted::Hosted;
//! # use core::ops::ControlFlow;
//! # let platform = Hosted::new(64, 12);
//! # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).ok_or("no frame for the root")?;
//! # space.map(Span::new(Va::new(0x4000_0000), 0x4000)?, Pa::new(0x8000_0000), Attrs::USER_DATA)?;
//! use tablewright::{Change, Perms};
//! space.make_live();
//!
//! let mut gather = space.gather();
//! let (mut held, two) = (Vec::new(), Span::new(Va::new(0x4000_0000), 0x2000)?);
//! let progress = gather.unmap(two, |leaf| { held.push(leaf); ControlFlow::Continue(()) })?;
//! // a visitor whose list is full breaks off, and the edit says where it goes on
//! assert!(progress.is_done());
//! gather.protect(Span::new(Va::new(0x4000_2000), 0x1000)?,
//!     Change::new().perms(Perms::READ | Perms::USER_READ))?;
//!
//! // both edits, one flush: every processor has forgotten
//! let completed = gather.issue().complete();
//! for leaf in held {
//!     let leaf = completed.release(leaf).map_err(|_| "of another gather")?;
//!     // not reached by any processor any more; `leaf.attrs().dirty` is final
//!     let _free = leaf.frame();
//! }
//! // frees tables; visits what was mapped below those that were detached as a whole
//! completed.finish(|_leaf| ());
//! assert_eq!(platform.counts().invalidations, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A leaf that is held and never released is a frame that is lost, and nothing worse. A gather that
//! is dropped is completed.
//!
//! ## Your platform
//!
//! A [`Platform`] is five functions and what you promise of them: take a frame and give it back,
//! reach it, and two that talk to the processor. For those two there is [`arch`]: `cpu.barrier(…)`
//! and `cpu.invalidate(…)` of its `Cpu`s are what these functions do, and what registers hold is
//! computed there as well.
//!
//! ```
//! use core::ptr::NonNull;
//! use tablewright::{Barrier, Entry, Invalidation, Level, Pa, Platform};
//! # struct Frames;
//! # impl Frames {
//! #     fn take(&self) -> Option<Pa> { None }
//! #     fn put(&self, _: Pa) {}
//! #     fn reach(&self, _: Pa) -> NonNull<Entry> { NonNull::dangling() }
//! # }
//! # struct Cpu;
//! # impl Cpu {
//! #     fn barrier(&self, _: Barrier) {}
//! #     fn invalidate(&self, _: &Invalidation<'_>) {}
//! # }
//! struct Kernel {
//!     frames: Frames,
//!     cpu: Cpu,
//! }
//!
//! // SAFETY: (the obligations of the trait are numbered: say here why each holds)
//! unsafe impl Platform for Kernel {
//!     fn alloc_table(&self, _: Level) -> Option<Pa> {
//!         self.frames.take()
//!     }
//!     unsafe fn free_table(&self, frame: Pa, _: Level) {
//!         self.frames.put(frame)
//!     }
//!     unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
//!         self.frames.reach(frame)
//!     }
//!     fn barrier(&self, barrier: Barrier) {
//!         self.cpu.barrier(barrier)
//!     }
//!     fn invalidate(&self, what: &Invalidation<'_>) {
//!         self.cpu.invalidate(what)
//!     }
//! }
//! ```
//!
//! # Where to go on
//!
//! | you have | you need |
//! |---|---|
//! | a kernel that boots | [`linear`]: all memory at one offset, and windows before it is there |
//! | processes | [`Gather::fork`], [`Gather::replace`]; on x86-64 [`KernelHalf`] |
//! | several processors without broadcast, or too few ASIDs, PCIDs, VMIDs | [`shootdown`] |
//! | page faults on many processors at once | [`shared`] |
//! | guests | [`guest`], on [`shared`]; their log of writes is [`dirty`] |
//! | a guest of Hyper-V's, or guests that take you for it | [`hyperv`] |
//! | tests | `tablewright-hosted`; with hardware that does all that it may, `tablewright-machine` |
//! | a format that is not here | [`mod@format`], and [`bbm`] for what may change in place |
//!
//! [`flush`] is what a gather becomes on its way, and is met by those that do something between
//! *issue* and *complete*.
#![cfg_attr(not(feature = "loom"), no_std)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod addr;
pub mod arch;
pub mod bbm;
mod cpus;
pub mod dirty;
mod edit;
mod entry;
pub mod flush;
pub mod format;
pub mod guest;
pub mod hyperv;
mod identity;
mod invalidation;
mod kernel_half;
pub mod linear;
mod offer;
mod platform;
mod run;
pub mod shared;
pub mod shootdown;
mod sync;
mod table;
mod walk;

pub use addr::{Address, AddressError, Ipa, Level, MIN_PAGE_SHIFT, Pa, Page, Span, Va};
pub use edit::{AddressSpace, Change, EditError, Encoded, Gather, Half, Liveness, Mapping};
pub use entry::{Entry, TableLink, fill, prefetch};
pub use flush::{Leaf, Progress};
pub use format::{Attrs, Format, Inexpressible, Kind, Memory, Perms, Shareability};
pub use invalidation::{Invalidation, Stale, What};
pub use kernel_half::KernelHalf;
pub use platform::{Barrier, Caps, Hooks, NoHooks, Platform};

/// The examples in the README and the book, compiled and run as tests.
#[cfg(all(doctest, target_arch = "x86_64"))]
#[doc = include_str!("../../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Package;

#[cfg(doctest)]
#[doc = include_str!("../../docs/GUIDE.md")]
struct Guide;

#[cfg(doctest)]
#[doc = include_str!("../../docs/GUESTS.md")]
struct Guests;

#[cfg(doctest)]
#[doc = include_str!("../../docs/SHOOTDOWN.md")]
struct RemoteFlushes;
