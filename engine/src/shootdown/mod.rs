//! Remote TLB flushes: who has to be told, and by which messenger.
//!
//! Where hardware tells every processor (arm64), [`Identifiers`] and [`arm64`] are all there is to it. Elsewhere it is
//! software that knows who may hold translations of a space, and tells them. The rest of this page is about that.
//!
//! # Who is told
//!
//! A [`Space`] has a set of processors that have it loaded, and a **generation**, which each flush moves on. A processor
//! remembers, for the spaces it has had lately, up to which generation it has forgotten: its *view*. From this follows
//! everything:
//!
//! * Who has the space loaded is in the set, and told. He flushes what the message names if his view is the generation before
//!   it. Otherwise he has missed a flush, or is still to be told of one, and forgets all of the space, which makes up for all.
//! * Who has another space loaded is not in the set. He keeps what he has under its identifier, does not use it, and looks at the
//!   generation when he comes back.
//! * Who is *lazy* (a kernel thread runs, and the root of the last space is still loaded) is not told if only leaves have gone,
//!   and looks at the generation before he uses the space again. If tables have gone he is told: his walker may go on by
//!   itself, through tables that are used for something else by then.
//! * Who is asleep has no space loaded, which is the second case.
//!
//! # Why nobody is missed
//!
//! Two processors write one word each and then read the other's, with a full fence between (Dekker's pattern): one of them at least
//! sees what the other has written.
//!
//! | who flushes | who loads the space, or leaves off being lazy |
//! |---|---|
//! | changes entries, moves the generation on | puts itself into the set, and says that it is not lazy |
//! | full fence | full fence |
//! | reads the set, and who is lazy | reads the generation; then its walker reads entries |
//!
//! If the first does not see the second in the set, then the second reads the new generation, and forgets. If the second reads the
//! old generation, it is seen, and told. And the walker of a processor that has read the new generation finds the new entries,
//! because they came before it.
//!
//! The [identifier](Identifiers) of the space may be given anew at any time. It is read behind the same fence, and given before one: it is
//! either seen, or nothing is remembered under it but what is in the new tables.
//!
//! # How they are told
//!
//! A [`Messenger`] takes out of a set of processors those whom it has told, or who will forget before they use the
//! space. Whom it leaves is told by the next. Last come [interrupts](Actions::interrupt), which leave nobody. So a messenger that
//! fails needs no other care, and one may know the way to some processors only.
//!
//! A message by interrupt stays with its sender, until all whom it is for have done what it says. What is *queued* at a processor
//! is a bit for each sender, so a queue is never full. Who waits for others takes what is in his own queue meanwhile: two that flush
//! at once do not wait for each other.
//!
//! # Tables
//!
//! A flush by interrupt waits for every processor that has interrupts held off, and software that walks tables without locks used to be
//! safe behind that. With any other messenger it is not. Tables are freed when their walks are over: see
//! [`Cut`](crate::shared::Cut), which a [`Completed`](crate::flush::Completed) can be made into.

pub mod amd;
pub mod arm64;
mod cpus;
mod deferred;
mod here;
mod hypercall;
mod identifiers;

pub use cpus::{Cpus, Space};
pub use deferred::{Deferred, PreemptedFlag};
pub use here::{Cpu, Here, Shootdown, inbox_words};
pub use hypercall::{Hypercall, Hypercalls};
pub use identifiers::{Allocator, Holder, Identifiers, Identity};

use crate::addr::Pa;
use crate::flush::{Invalidation, MAX_RANGES, What};

/// What a processor has to forget, for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forget {
    /// All translations under all identifiers, but global ones may stay (`MOV` to CR3 of every PCID, or `INVPCID` type 3; `tlbi
    /// vmalle1`).
    All,
    /// All under one identifier (`INVPCID` type 1, a load of CR3; `tlbi aside1`).
    Space(u16),
    /// A range, under the identifier that it names.
    Range(Invalidation),
}

/// What the embedder's processors do for a flush.
///
/// # Safety
/// 1. When [`forget`](Actions::forget) returns, this processor has forgotten, its walkers included.
/// 2. Every processor that is [interrupted](Actions::interrupt) calls [`Here::receive`] before it goes on with
///    anything that uses the space it has loaded.
/// 3. [`allocator`](Actions::allocator) runs the function once, with the one allocator of the identifiers, while nobody else has
///    it.
pub unsafe trait Actions {
    /// Forgets on this processor, and waits until that is done.
    fn forget(&self, what: Forget);

    /// Interrupts these processors.
    fn interrupt(&self, cpus: &Cpus);

    /// Runs a function with the allocator of identifiers, under a lock. Rarely needed.
    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>));

    /// Waits a moment for others.
    fn relax(&self) {
        core::hint::spin_loop();
    }
}

/// A flush, as a messenger passes it on.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// Who sends it.
    pub from: usize,
    /// The identifier of the space; 0 where only costs are asked for.
    pub id: u16,
    /// The root of its tables.
    pub root: Pa,
    /// What is to be forgotten; the identifiers in it mean nothing. [`What::Everything`] is all of the space.
    pub what: &'a [Invalidation],
}

impl Message<'_> {
    /// Whether all of the space is to be forgotten.
    pub fn is_whole(&self) -> bool {
        let whole = |one: &Invalidation| one.what == What::Everything;
        self.what.iter().any(whole)
    }

    /// Whether tables have gone.
    pub(crate) fn has_tables(&self) -> bool {
        let tables = |one: &Invalidation| match one.what {
            What::Everything => true,
            What::Range { tables, .. } => tables,
        };
        self.what.iter().any(tables)
    }
}

/// A way to have other processors forget.
pub trait Messenger {
    /// Has processors forget, and takes them out of the set. Who is taken out has forgotten on return, or will before he uses the
    /// space. Who cannot be told this way stays in the set.
    fn tell(&self, message: &Message<'_>, cpus: &mut Cpus);

    /// Whether it tells every processor there is, whatever the set says, those too that have the space not loaded; it leaves
    /// nobody.
    fn reaches_all(&self) -> bool {
        false
    }

    /// What it costs to tell so many, in the unit of [`Costs`]. It is not asked if interrupts cost less.
    fn cost(&self, message: &Message<'_>, cpus: u32) -> u64 {
        let _ = (message, cpus);
        0
    }
}

/// What flushes cost on this machine, in any unit.
///
/// ```
/// use tablewright::shootdown::Costs;
/// // In cycles: beyond 33 pages the whole space is cheaper.
/// let costs = Costs { page: 200, space: 6600, interrupt: 2000 };
/// # let _ = costs;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// To forget one page.
    pub page: u64,
    /// To forget a whole space, and to find again what was still needed of it.
    pub space: u64,
    /// To interrupt one processor and have its answer.
    pub interrupt: u64,
}

impl Costs {
    /// Whether these are better forgotten with all the rest of the space.
    fn prefer_whole(&self, what: &[Invalidation], page_shift: u32) -> bool {
        let pages = what.iter().try_fold(0u64, |sum, one| match one.what {
            What::Everything => None,
            What::Range {
                first, last, level, ..
            } => {
                let bits = page_shift - 3;
                let shift = page_shift + bits * level.map_or(0, |level| u32::from(level.height()));
                sum.checked_add(((last - first) >> shift) + 1)
            }
        });
        what.len() > MAX_RANGES
            || pages.is_none_or(|pages| pages.saturating_mul(self.page) > self.space)
    }
}

/// What one flush asks for, gathered for one message: a platform adds in [`invalidate`](crate::Platform::invalidate), and sends in
/// [`barrier`](crate::Platform::barrier).
///
/// ```
/// use tablewright::shootdown::Batch;
/// use tablewright::{Invalidation, What};
/// let mut batch = Batch::new();
/// batch.add(&Invalidation { id: 0, what: What::Everything });
/// assert_eq!(batch.take().as_slice().len(), 1);
/// assert!(batch.as_slice().is_empty());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    list: [Invalidation; MAX_RANGES],
    len: usize,
}

impl Batch {
    const NONE: Invalidation = Invalidation {
        id: 0,
        what: What::Everything,
    };

    /// Nothing.
    pub const fn new() -> Self {
        Self {
            list: [Self::NONE; MAX_RANGES],
            len: 0,
        }
    }

    /// Adds one; everything, if there is no room.
    pub fn add(&mut self, what: &Invalidation) {
        match self.list.get_mut(self.len) {
            Some(place) => {
                *place = *what;
                self.len += 1;
            }
            None => self.list[0].what = What::Everything,
        }
    }

    /// Takes out all that is in it.
    #[must_use = "what is taken out has to be sent"]
    pub fn take(&mut self) -> Self {
        core::mem::take(self)
    }

    /// What is in it.
    pub fn as_slice(&self) -> &[Invalidation] {
        &self.list[..self.len]
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}
