//! Remote TLB flushes: which CPUs have to be told, and by which messenger.
//!
//! You need this with more than one processor where hardware does not tell the others (x86-64), and
//! for identifiers (ASID, PCID, VMID), of which there are fewer than spaces, everywhere.
//!
//! Where hardware tells every CPU (arm64), [`Identifiers`] and [`arm64`] are all there is to it.
//! Elsewhere software knows which CPUs may hold translations of a space, and tells them.
//! The rest of this page is about that.
//!
//! # Which CPUs are told
//!
//! A [`Space`] has a set of CPUs that have it loaded, and a **generation**, which each flush moves
//! on. A CPU keeps, for the spaces it has had lately, the generation up to which it has flushed:
//! its *view*. From this follows everything:
//!
//! * A CPU that has the space loaded is in the set, and told. It flushes what the message names if
//!   its view is the generation before it. Otherwise it has missed a flush, or is still to be told
//!   of one, and flushes all of the space, which makes up for all of them.
//! * A CPU that has another space loaded is not in the set. It keeps what it has under the
//!   identifier of this one, does not use it, and looks at the generation when it loads the space
//!   again.
//! * A CPU that is *lazy* (a kernel thread runs, and the root of the last space is still loaded) is
//!   not told if only leaves have gone, and looks at the generation before it uses the space again.
//!   If tables have gone it is told: its walker may go on by itself, through tables that are used
//!   for something else by then.
//! * An idle CPU that has left its space has no space loaded, which is the second case.
//!
//! # Global translations
//!
//! Global translations are used whatever space is loaded, so neither set nor generation says whose
//! TLBs hold them. A flush with [`global`](Invalidation::global) set is told to **every CPU that is
//! [online](PerCpu::go_online)**, the lazy and the idle ones included, and each flushes at
//! once, whatever its view says:
//!
//! * the ranges, global translations of them included. INVLPG does that; what the TLB holds of
//!   the ranges under the identifier of a space that is not loaded stays, and goes when the CPU
//!   loads that space, because the generation moves on as with any other flush;
//! * everything under all identifiers, if the flush is of everything, or if tables were detached:
//!   table descriptors are cached under the identifier that was loaded when the walker read them,
//!   those of global leaves too (SDM vol. 3A 4.10.4.1: INVLPG drops those of the current PCID).
//!
//! # Why no CPU is missed
//!
//! Two CPUs write one word each and then read the other's, with a full fence between (Dekker's
//! pattern): one of them at least sees what the other has written.
//!
//! | a CPU that flushes | a CPU that loads the space, or leaves off being lazy |
//! |---|---|
//! | changes entries, moves the generation on | enters the set, and says that it is not lazy |
//! | full fence | full fence |
//! | reads the set, and which are lazy | reads the generation; then its walker reads entries |
//!
//! If the first does not see the second in the set, then the second reads the new generation, and
//! flushes. If the second reads the old generation, it is seen, and told. And the walker of a CPU
//! that has read the new generation finds the new entries, because they came before it. A CPU that
//! goes online is in the place of one that loads the space: it says that it is online, and flushes
//! everything behind the fence.
//!
//! The [identifier](Identifiers) of the space may be given anew at any time. It is read behind the
//! same fence, and given before one: it is either seen, or TLBs hold nothing under it but what is
//! in the new tables.
//!
//! # How they are told
//!
//! A [`Messenger`] takes out of a set of CPUs those that it has told, and those that will flush
//! before they use the space. Those that it leaves are told by the next. Last come
//! [interrupts](Actions::interrupt), which leave none. So a messenger that fails needs no other
//! care, and one may know the way to some CPUs only.
//!
//! A message by interrupt stays in the *outbox* of its sender, until all CPUs that it is for have
//! done what it says. What is *queued* at a CPU is a bit for each sender, so a queue is never full.
//! A CPU that waits for others takes what is in its own queue meanwhile: two that flush at once do
//! not wait for each other.
//!
//! # Flushes in interrupt handlers
//!
//! A flush may be interrupted, and the handler may flush. The outbox is in use then, and what
//! stands in it may not have been read by all it is for; waiting for them is not possible either if
//! the flush was interrupted before they were told. So a flush that finds another under way on its
//! own CPU leaves the outbox alone, and rings a *doorbell* at each CPU that it has to tell: a CPU
//! that finds it rung flushes everything. That says nothing of what is stale, so there is nothing
//! to overwrite, and it works at any depth and from any number of CPUs. It costs the CPUs
//! that are told their whole TLB, which is why it is for this case alone.
//!
//! There is one counter of tickets, and each CPU has two words, `must` and `did`:
//!
//! | a CPU that flushes | a CPU that is told |
//! |---|---|
//! | changes entries | |
//! | takes the next ticket *t* (acquire and release) | |
//! | at each CPU: raises `must` to *t* (release) | *m* is `must` (acquire); done if it `did` that |
//! | interrupts them | flushes everything |
//! | waits until `did` is *t* or more (acquire) | raises `did` to *m*, if it is less (release) |
//!
//! * *A CPU that did t has flushed what ticket t is about.* It read an *m* of at least *t* before
//!   it flushed. If *m* is *t*, it read what the flushing CPU wrote, or what a read-modify-write
//!   made of it, and sees the changed entries. If *m* is a later ticket, that was taken after *t*
//!   from the same counter, and the CPU that took it saw whatever came before *t* was taken; so
//!   does, through its `must`, the CPU that flushes. It need not have been told by the first CPU at
//!   all.
//! * *`did` claims nothing that was not flushed, and does not go backwards.* A handler may
//!   interrupt between any two steps of the right column and go through all of it. It reads an *m*
//!   at least as large, flushes, and raises `did` to it. What it has interrupted then flushes once
//!   more, for its own smaller *m*, and leaves `did` where it is. Were `did` stored and not raised,
//!   it would go back, and a CPU could wait for it that interrupts no more.
//! * *Nothing waits in a circle.* A flush waits for its own ticket, never for one that another CPU
//!   has taken and not yet interrupted for. Every CPU that waits, at whatever depth, does what it
//!   is asked meanwhile, by message and by doorbell.
//! * *The depth is that of this CPU alone.* It is read and written by this CPU, and a handler
//!   leaves it as it has found it, so that the interrupted read and write are as good as one. A
//!   handler that comes before the depth is written finds an outbox that is not written yet, and is
//!   through with it when it returns.
//! * *Views and generations are as with other flushes.* The generation of the space moves on; the
//!   view of a CPU that was rung does not, and when it is told of the next flush it flushes more
//!   than it would have to. A handler that moves a view on while what it interrupted does the same
//!   has it set back: that claims less than was flushed.
//!
//! # What interrupt handlers may do
//!
//! | the CPU is in | interrupts | a handler may |
//! |---|---|---|
//! | [`switch`], [`go_online`], [`go_offline`] | held off | |
//! | [`resume`], [`be_lazy`] | on or off | `receive`, `flush`; not use the space |
//! | [`flush`](PerCpu::flush) | on or off | `receive`, `flush` |
//! | [`receive`](PerCpu::receive) | on or off | `receive`, `flush` |
//!
//! `switch`, `resume`, `be_lazy` and going on- and offline are for the program that is interrupted,
//! never for the handler: they say what is loaded and used here. A flush may be made with
//! interrupts held off; it waits with them held off, and so must every other wait: a CPU that waits
//! for anything with interrupts held off, a lock say, calls `receive` meanwhile, or two CPUs wait
//! for each other for ever. A task that flushes stays on its CPU for as long.
//!
//! # Tables
//!
//! A flush by interrupt waits for every CPU that has interrupts held off, and software that walks
//! tables without locks used to be safe behind that. With any other messenger it is not. Tables are
//! freed when their walks are over: see [`DeferredReclaim`](crate::shared::DeferredReclaim), which
//! a [`Completed`](crate::flush::Completed) can be made into.
//!
//! # Ranges, or everything
//!
//! Whether ranges are better flushed with all the rest of the space is decided in one place, before
//! a flush comes here: [`Caps::invalidate_all_above`](crate::Caps::invalidate_all_above). It is the
//! cost to flush a space and to find again what was needed, divided by the cost to invalidate a
//! page. What CPUs are told does not change that ratio: each of them pays for it, at
//! the same time. Here ranges become everything only where they do not fit into a message.
//!
//! [`switch`]: PerCpu::switch
//! [`go_online`]: PerCpu::go_online
//! [`go_offline`]: PerCpu::go_offline
//! [`resume`]: PerCpu::resume
//! [`be_lazy`]: PerCpu::be_lazy

pub mod amd;
pub mod arm64;
mod deferred;
mod per_cpu;
mod space;

pub use crate::cpus::Cpus;
pub use crate::identity::{Allocator, Holder, Identifiers, Identity};
pub use deferred::{Deferred, PreemptedFlag};
pub use per_cpu::{CpuCell, PerCpu, Shootdown, inbox_words};
pub use space::{SetTooSmall, Space};

use crate::addr::Pa;
use crate::invalidation::{Invalidation, MAX_RANGES, Stale, What};

/// A flush of one CPU's own TLB.
///
/// | | x86 | arm64 |
/// |---|---|---|
/// | `Everything` | `INVPCID` type 2, or `CR4.PGE` cleared and set | `tlbi vmalle1` |
/// | `All` | `INVPCID` type 3, or a load of CR3 for every PCID | `tlbi vmalle1` |
/// | `Space` | `INVPCID` type 1, or a load of CR3 | `tlbi aside1` |
/// | `Range` | `INVLPG` of each page | `tlbi vae1` of each page; `tlbi vaae1` if `global` |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalFlush {
    /// All translations under all identifiers, global ones included, and everything cached of
    /// tables.
    Everything,
    /// All translations under all identifiers. Global ones may stay.
    All,
    /// All under one identifier. Global ones may stay.
    Space(u16),
    /// A range, which may be of large leaves, and everything cached of tables under the identifier
    /// if `range.tables` says that some were detached.
    Range {
        /// The identifier. It is that of the space which this CPU has loaded, except where `global`
        /// is set: then it may be another, whose translations may stay.
        id: u16,
        /// The range.
        range: Stale,
        /// Global translations of the range too. INVLPG invalidates them in any case, INVPCID type
        /// 0 in none.
        global: bool,
    },
}

/// The operations of the embedder's CPUs that a flush needs.
///
/// # Safety
/// 1. When [`flush_local`](Actions::flush_local) returns, the TLB of this CPU holds nothing of it,
///    and no walk in flight will bring it back.
/// 2. Every CPU that is [interrupted](Actions::interrupt) calls [`PerCpu::receive`] before it goes
///    on with anything that uses the space it has loaded, or global translations.
/// 3. [`allocator`](Actions::allocator) runs the function once, with the one allocator of the
///    identifiers, while no other CPU and no handler has it.
/// 4. None of these three unwinds.
pub unsafe trait Actions {
    /// Flushes the TLB of this CPU, and waits until that is done. A handler that interrupts this
    /// may call it.
    fn flush_local(&self, what: LocalFlush);

    /// Interrupts these CPUs. Stores from before are visible to the handler: an x2APIC wants a
    /// fence before the write of its register (SDM vol. 3A 12.12.3). A handler that interrupts this
    /// may call it.
    fn interrupt(&self, cpus: &Cpus);

    /// Runs a function with the allocator of identifiers, under a lock, interrupts held off. Rarely
    /// needed.
    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>));

    /// Waits a little for others.
    fn relax(&self) {
        core::hint::spin_loop();
    }
}

/// A way to have other CPUs invalidate what their TLBs hold: an interrupt, a hypercall, a
/// broadcast.
///
/// It may be asked by a handler that has interrupted it.
///
/// # Safety
/// 1. A CPU that [`tell`](Messenger::tell) takes out of the set has invalidated the flush on
///    return, or does before it uses the space, and before it uses global translations where the
///    flush is [`global`](Invalidation::global). A CPU that cannot be told this way stays in the
///    set.
/// 2. One that [reaches all](Messenger::reaches_all) does so for every CPU there is, those too that
///    are not in the set and have the space not loaded, and leaves none in the set.
pub unsafe trait Messenger {
    /// Has CPUs execute a flush, under the identifier that it names, and takes them out of the set.
    /// The identifier is 0 where only costs are asked for.
    fn tell(&self, flush: &Invalidation<'_>, cpus: &mut Cpus);

    /// Whether it tells every CPU there is, whatever the set says.
    fn reaches_all(&self) -> bool {
        false
    }

    /// The cost to tell so many, in the unit of the cost of an [interrupt](Shootdown::new). It is
    /// not asked if interrupts cost less.
    fn cost(&self, flush: &Invalidation<'_>, cpus: u32) -> u64 {
        let _ = (flush, cpus);
        0
    }
}

/// Flushes that are gathered for one message: a platform adds in
/// [`invalidate`](crate::Platform::invalidate), and sends in [`barrier`](crate::Platform::barrier).
///
/// One flush fits. If there are more before the barrier, and more ranges than [`MAX_RANGES`], it
/// becomes everything. If one is global, all are.
///
/// ```
/// use tablewright::shootdown::Batch;
/// use tablewright::{Invalidation, Pa, Stale, What};
/// let page = Stale { first: 0x7000, last: 0x7fff, level: None, tables: false };
/// let mut batch = Batch::new();
/// batch.add(&Invalidation {
///     root: Pa::new(0x1000),
///     id: 5,
///     global: false,
///     what: What::Ranges(&[page]),
/// });
/// let sent = batch.take();
/// assert_eq!(sent.flush(Pa::new(0x1000), 5).what, What::Ranges(&[page]));
/// assert!(!sent.is_empty() && batch.is_empty());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    ranges: [Stale; MAX_RANGES],
    len: usize,
    global: bool,
    everything: bool,
}

impl Batch {
    const NONE: Stale = Stale { first: 0, last: 0, level: None, tables: false };

    /// An empty batch.
    pub const fn new() -> Self {
        Self { ranges: [Self::NONE; MAX_RANGES], len: 0, global: false, everything: false }
    }

    /// Adds a flush. If there is no room for its ranges, the batch becomes a flush of everything.
    pub fn add(&mut self, flush: &Invalidation<'_>) {
        let ranges = match flush.what {
            What::Ranges([]) => return,
            What::Ranges(ranges) => ranges,
            What::Everything => &[],
        };
        self.global |= flush.global;
        self.everything |= flush.what == What::Everything;
        ranges.iter().for_each(|&range| self.push(range));
    }

    fn push(&mut self, range: Stale) {
        match self.ranges.get_mut(self.len) {
            Some(place) => {
                *place = range;
                self.len += 1;
            }
            None => self.everything = true,
        }
    }

    /// Takes the flushes out, and leaves the batch empty.
    #[must_use = "what is taken out has to be sent"]
    pub fn take(&mut self) -> Self {
        core::mem::take(self)
    }

    /// Whether the batch is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0 && !self.everything
    }

    /// The flushes of the batch as one, of the space with this root and this identifier.
    pub fn flush(&self, root: Pa, id: u16) -> Invalidation<'_> {
        let what = match self.everything {
            true => What::Everything,
            false => What::Ranges(&self.ranges[..self.len]),
        };
        Invalidation { root, id, global: self.global, what }
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}
