//! Shared edits, each by what the platform is told in which order; and with another processor that
//! edits between a look and the exchange that follows it, or while an entry is claimed.
//!
//! One thread plays both: the platform runs an edit of the other in the midst of a call.

mod faults;
mod races;
mod starts;
mod told;

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::ptr::NonNull;

use tablewright::format::{Arm64K4, X86_64};
use tablewright::shared::{
    CacheMaintenance, Gather, GracePeriod, Mapped, NewLeaf, Refused, Relaxed, SharedPlatform,
    SharedSpace,
};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, EditError, Entry, Format, Hooks, Invalidation,
    Leaf, Level, Mapping, Pa, Perms, Platform, Span, TableLink, Va,
};
use tablewright_hosted::{Threads, Told};

type X86 = X86_64<4>;

const PAGE: u64 = 0x1000;
const BLOCK: u64 = 0x20_0000;
/// The memory of address 0.
const MEMORY: u64 = 1 << 30;

const NOTHING: CacheMaintenance = CacheMaintenance { clean: false, instructions: false };
const CLEAN: CacheMaintenance = CacheMaintenance { clean: true, instructions: false };
const BOTH: CacheMaintenance = CacheMaintenance { clean: true, instructions: true };

/// When the other processor edits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// Before a compare-and-exchange.
    Exchange,
    /// While memory is cleaned.
    Clean,
    /// While an invalidation is issued.
    Invalidation,
}

/// An order to the platform.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Did {
    Publish,
    Complete,
    Invalidate(Told),
    Here(Told),
    Clean(u64, u64),
    Instructions(u64, u64),
}

/// When the other edits, after how many such moments, and how.
type Meddler = (When, u32, Box<dyn FnOnce()>);

/// A platform on which another processor edits at a moment of the test's choice.
struct Meddled {
    frames: Threads,
    caps: Caps,
    maintenance: CacheMaintenance,
    meddler: RefCell<Option<Meddler>>,
    did: RefCell<Vec<Did>>,
    most: Cell<Option<u32>>,
}

impl Meddled {
    fn new(maintenance: CacheMaintenance, caps: Caps) -> &'static Self {
        Box::leak(Box::new(Self {
            frames: Threads::new(32, 12, 1),
            caps,
            maintenance,
            meddler: RefCell::default(),
            did: RefCell::default(),
            most: Cell::new(None),
        }))
    }

    /// Has the other processor edit when `when` comes the next time after so many.
    fn meddle(&self, when: When, after: u32, with: impl FnOnce() + 'static) {
        let before = self.meddler.replace(Some((when, after, Box::new(with))));
        assert!(before.is_none());
    }

    fn now(&self, when: When) {
        let mut meddler = self.meddler.borrow_mut();
        if let Some((_, after, _)) = meddler.as_mut().filter(|(of, ..)| *of == when) {
            if *after > 0 {
                *after -= 1;
                return;
            }
            let (.., with) = meddler.take().unwrap();
            drop(meddler);
            with();
        }
    }

    fn note(&self, did: Did) {
        self.did.borrow_mut().push(did);
    }

    /// The orders since the last look. The other processor has edited, if it was to.
    fn take(&self) -> Vec<Did> {
        assert!(self.meddler.borrow().is_none(), "the moment did not come");
        self.did.take()
    }

    fn share<F: Format<Input = Va>>(&'static self) -> &'static Space<F> {
        let space = AddressSpace::new(self).unwrap();
        let space = Box::leak(Box::new(SharedSpace::new(space).ok().unwrap()));
        self.take();
        space
    }
}

type Space<F> = SharedSpace<F, &'static Meddled>;

// SAFETY: that of the platform it passes everything on to (1. to 7.).
unsafe impl Platform for Meddled {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        if let Some(most) = self.most.get() {
            self.most.set(Some(most.checked_sub(1)?));
        }
        self.frames.alloc_table(level)
    }

    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.frames.free_table(frame, level) };
    }

    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.frames.table(frame, level) }
    }

    fn barrier(&self, barrier: Barrier) {
        self.note(match barrier {
            Barrier::Publish => Did::Publish,
            Barrier::Complete => Did::Complete,
        });
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        self.note(Did::Invalidate(what.into()));
        self.now(When::Invalidation);
    }

    fn caps(&self) -> Caps {
        self.caps
    }

    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.frames.link_of(frame)
    }

    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(Meddling(self))
    }
}

// SAFETY: as above; the walks are those of that platform (1., 2.).
unsafe impl SharedPlatform for Meddled {
    type Walk<'a> = <Threads as SharedPlatform>::Walk<'a>;

    fn enter(&self) -> Self::Walk<'_> {
        self.frames.enter()
    }

    fn grace_period(&self) -> GracePeriod {
        self.frames.grace_period()
    }

    fn is_over(&self, period: GracePeriod) -> bool {
        self.frames.is_over(period)
    }

    fn maintenance(&self) -> CacheMaintenance {
        self.maintenance
    }

    fn clean(&self, frame: Pa, size: u64) {
        self.note(Did::Clean(frame.get() - MEMORY, size));
        self.now(When::Clean);
    }

    fn invalidate_instructions(&self, frame: Pa, size: u64) {
        self.note(Did::Instructions(frame.get() - MEMORY, size));
    }

    fn invalidate_here(&self, what: &Invalidation<'_>) {
        self.note(Did::Here(what.into()));
    }
}

struct Meddling<'p>(&'p Meddled);

// SAFETY: the exchange is made (1.).
unsafe impl Hooks for Meddling<'_> {
    unsafe fn compare_exchange(
        &self,
        entry: NonNull<Entry>,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        self.0.now(When::Exchange);
        // SAFETY: valid, as the caller vouches.
        unsafe { entry.as_ref() }.compare_exchange(current, new)
    }
}

fn span(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

fn leaf<F: Format<Input = Va>>(at: u64, level: Level, attrs: Attrs) -> NewLeaf<F> {
    NewLeaf::new(Va::new(at), Pa::new(MEMORY + at), level, attrs).unwrap()
}

/// Pages of user data; nothing in them is global.
const SMALL: Mapping = Mapping::new(Attrs::USER_DATA).pages_only();

fn map_range<F: Format<Input = Va>>(
    space: &Space<F>,
    first: u64,
    size: u64,
) -> Result<u64, Refused<Va>> {
    space.map_range(span(first, size), Pa::new(MEMORY + first), SMALL)
}

/// Maps a page or a block, with tables of the gather.
fn map<F: Format<Input = Va>>(
    gather: &mut Gather<'_, F, &'static Meddled>,
    new: &NewLeaf<F>,
) -> Result<Mapped<F>, Refused<Va>> {
    match gather.map(new) {
        Err(Refused::NeedsTables(count)) => {
            assert!(gather.top_up(count));
            gather.map(new)
        }
        other => other,
    }
}

/// Maps by a gather of its own.
fn map_alone<F: Format<Input = Va>>(
    space: &Space<F>,
    new: &NewLeaf<F>,
) -> Result<Mapped<F>, Refused<Va>> {
    let mut gather = space.gather();
    let mapped = map(&mut gather, new);
    gather.release_tables();
    mapped
}

fn unmap<F: Format<Input = Va>>(space: &Space<F>, span: Span<Va>) {
    let mut gather = space.gather();
    assert!(gather.unmap(span, |_| ControlFlow::Continue(())).unwrap().progress.is_done());
    assert!(gather.finish(|_| ()).is_ok());
}

fn frame<F: Format<Input = Va>>(space: &Space<F>, at: u64) -> Option<u64> {
    space.query(Va::new(at)).map(|leaf: Leaf<F>| leaf.frame().get() - MEMORY)
}
