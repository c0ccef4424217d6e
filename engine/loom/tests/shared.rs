//! Edits by several processors at once, against each other and against walkers.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use loom::thread::{self, JoinHandle};
use tablewright::shared::{
    Epochs, GracePeriod, Mapped, NewLeaf, Refused, SharedPlatform, SharedSpace, WalkSlot, Walking,
};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, Entry, Hooks, Invalidation, Level, Mapping, Pa,
    Perms, Platform, Va,
};

use crate::bounded;
use crate::tables::{
    Access, BLOCK_SIZE, FRAMES, FRESH, PAGE, POISON, ROOT, TARGET, Tables, Tiny, found, frame, set,
    span,
};

/// Processors: one for each thread.
const CPUS: usize = 3;

loom::thread_local! {
    static CPU: Cell<usize> = Cell::new(0);
}

/// Tables that several processors edit.
#[derive(Clone)]
pub struct Machine(Arc<Parts>);

struct Parts {
    tables: Arc<Tables>,
    used: AtomicU64,
    freed: AtomicU64,
    epochs: Epochs<'static>,
    caps: Caps,
    /// The word that a guest writes through a translation it remembers, until it is made to forget.
    last: Option<loom::sync::atomic::AtomicU64>,
}

// SAFETY: each frame is handed out once (1.); its four entries lie in the vector (2.); there are no
// links (3.); a store is seen by a walker when it is made (4.); in these models no processor
// remembers what an entry said (5., 6.), but for the one guest of `last`, which has made its last
// store when a completion returns; a clone shares the tables (7.).
unsafe impl Platform for Machine {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let number = self.0.used.fetch_add(1, Ordering::Relaxed);
        (number < FRAMES).then(|| frame(number))
    }
    unsafe fn free_table(&self, frame: Pa, _: Level) {
        self.0.freed.fetch_add(1, Ordering::Relaxed);
        self.0.tables.poison(frame);
    }
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        NonNull::from(self.0.tables.entry(frame, 0))
    }
    fn caps(&self) -> Caps {
        self.0.caps
    }
    fn barrier(&self, barrier: Barrier) {
        if let (Barrier::Complete, Some(last)) = (barrier, &self.0.last) {
            last.store(1, Ordering::Relaxed);
        }
    }
    fn invalidate(&self, _: &Invalidation<'_>) {}
    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(self)
    }
}

// SAFETY: what is loaded is returned (1.).
unsafe impl Hooks for Machine {
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: valid, as the caller vouches.
        whole(unsafe { entry.as_ref() }.load())
    }
    unsafe fn follow(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: valid, as the caller vouches.
        whole(unsafe { entry.as_ref() }.follow())
    }
}

fn whole(bits: u64) -> u64 {
    assert_ne!(bits, POISON, "software reads a table that was freed");
    bits
}

// SAFETY: the epochs keep both promises; each thread has a slot.
unsafe impl SharedPlatform for Machine {
    type Walk<'a> = Walking<'a>;

    fn enter(&self) -> Walking<'_> {
        // SAFETY: no two threads of a model have one number (1.), and none is interrupted (2.) or
        // sends a walk to another (3.); nothing else is made of the slots (4.).
        unsafe { self.0.epochs.enter(CPU.with(Cell::get)) }.unwrap()
    }
    fn grace_period(&self) -> GracePeriod {
        self.0.epochs.advance()
    }
    fn is_over(&self, period: GracePeriod) -> bool {
        self.0.epochs.is_over(period)
    }
}

type Space<const ARM: bool = false> = SharedSpace<Tiny<ARM>, Machine>;

impl Machine {
    pub fn new() -> Self {
        Self::with_caps(Caps::CONSERVATIVE)
    }

    /// The entry that maps a page, if it can be written through the tables as they are.
    pub fn can_write(&self, page: u64) -> bool {
        self.0.tables.can_write(page)
    }

    pub fn with_caps(caps: Caps) -> Self {
        Self::with(caps, None)
    }

    fn with(caps: Caps, last: Option<loom::sync::atomic::AtomicU64>) -> Self {
        // What a thread of a model borrows has to live for ever.
        let slots: &'static [WalkSlot] = Vec::leak((0..CPUS).map(|_| WalkSlot::new()).collect());
        Self(Arc::new(Parts {
            tables: Tables::new(),
            used: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            epochs: Epochs::new(slots),
            caps,
            last,
        }))
    }
}

/// A space in which the block is mapped as pages with `attrs`, if any.
fn space(attrs: Option<Attrs>) -> Arc<Space> {
    space_on(Machine::new(), attrs)
}

fn space_on<const ARM: bool>(machine: Machine, attrs: Option<Attrs>) -> Arc<Space<ARM>> {
    let mut space = AddressSpace::new(machine).unwrap();
    assert_eq!(space.root(), ROOT);
    if let Some(attrs) = attrs {
        let mapping = Mapping::new(attrs).pages_only();
        space.map(span(0, BLOCK_SIZE), Pa::new(TARGET), mapping).unwrap();
    }
    space.make_live();
    Arc::new(SharedSpace::new(space).ok().unwrap())
}

/// Does something on another processor, with what is shared.
pub fn on<S: 'static, T: 'static>(
    cpu: usize,
    shared: &Arc<S>,
    what: impl FnOnce(&S) -> T + 'static,
) -> JoinHandle<T> {
    let shared = shared.clone();
    thread::spawn(move || {
        CPU.with(|this| this.set(cpu));
        what(&shared)
    })
}

/// Starts walkers for an access each.
fn walk(space: &Space, accesses: &[Access]) -> Vec<JoinHandle<Option<u64>>> {
    let start = |&access| {
        let tables = space.platform().0.tables.clone();
        thread::spawn(move || tables.walk(access))
    };
    accesses.iter().map(start).collect()
}

fn join<T>(threads: Vec<JoinHandle<T>>) -> Vec<T> {
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Maps the second page, as a fault asks for.
fn fault(space: &Space) -> Result<Mapped<Tiny<false>>, Refused<Va>> {
    let leaf = NewLeaf::new(Va::new(PAGE), Pa::new(TARGET + PAGE), Level::PAGE, FRESH).unwrap();
    let mut gather = space.gather();
    assert!(gather.top_up(1));
    let mapped = gather.map(&leaf);
    assert!(gather.is_clean());
    mapped
}

#[test]
fn a_page_that_several_processors_fault_on_is_installed_once() {
    // Where the table is missing, one of several is linked, and the others go back.
    for (others, with_table) in [(1, true), (1, false), (2, true), (2, false)] {
        let model = move || {
            let space = space(None);
            if with_table {
                let mapping = Mapping::new(FRESH);
                let neighbour = space.map_range(span(0, PAGE), Pa::new(TARGET), mapping);
                assert_eq!(neighbour, Ok(PAGE));
            }
            let others = (1..=others).map(|cpu| on(cpu, &space, fault)).collect();
            let mut mapped = vec![fault(&space)];
            mapped.extend(join(others));
            let count = |what| mapped.iter().filter(|mapped| **mapped == Ok(what)).count();
            assert_eq!(count(Mapped::Installed), 1);
            assert_eq!(count(Mapped::Already), mapped.len() - 1);
            let leaf = space.query(Va::new(PAGE)).unwrap();
            assert_eq!(leaf.frame(), Pa::new(TARGET + PAGE));
            // The root and one table.
            let parts = &space.platform().0;
            let used = parts.used.load(Ordering::Relaxed) - parts.freed.load(Ordering::Relaxed);
            assert_eq!(used, 2);
        };
        match others {
            1 => loom::model(model),
            _ => bounded(3, model),
        }
    }
}

const WALKERS: [&[Access]; 3] =
    [&[Access::Write], &[Access::Write, Access::Write], &[Access::Write, Access::Look]];

#[test]
fn a_shared_change_loses_no_flag() {
    for walkers in WALKERS {
        loom::model(move || {
            let space = space(Some(FRESH));
            let walks = walk(&space, walkers);
            let mut gather = space.gather();
            let change = Change::new().write_protect();
            let protected = gather.protect(span(PAGE, PAGE), change);
            assert!(protected.unwrap().changed);
            assert!(gather.finish(|_| ()).is_ok());
            let walks = join(walks);
            let attrs = space.query(Va::new(PAGE)).unwrap().attrs();
            assert_eq!(found(attrs), set(&walks));
            assert!(!attrs.perms.contains(Perms::WRITE));
        });
    }
}

#[test]
fn a_shared_unmap_takes_the_last_word_of_the_walker_with_it() {
    for walkers in WALKERS {
        loom::model(move || {
            let space = space(Some(FRESH));
            let walks = walk(&space, walkers);
            let (mut held, mut gather) = (Vec::new(), space.gather());
            let taken = gather.unmap(span(PAGE, PAGE), |leaf| {
                held.push(leaf);
                ControlFlow::Continue(())
            });
            assert!(taken.unwrap().progress.is_done());
            let deferred = gather.issue().complete();
            let attrs = deferred.release(held.pop().unwrap()).ok().unwrap().attrs();
            assert_eq!(found(attrs), set(&join(walks)));
            assert!(deferred.try_complete().is_ok());
        });
    }
}

#[test]
fn no_table_is_reclaimed_under_a_walk_of_software() {
    for others in 1..=2 {
        loom::model(move || {
            let space = space(Some(FRESH));
            let look = |space: &Space| {
                let leaf = space.query(Va::new(PAGE));
                assert!(leaf.is_none_or(|leaf| leaf.frame() == Pa::new(TARGET + PAGE)));
            };
            let others = (1..=others).map(|cpu| on(cpu, &space, look)).collect();
            let mut gather = space.gather();
            let taken = gather.unmap(span(0, BLOCK_SIZE), |_| ControlFlow::Continue(()));
            assert!(taken.unwrap().progress.is_done());
            let deferred = gather.issue().complete().try_complete();
            // Either it is over at once, or when every walk is over.
            let held = deferred.map(|completed| completed.finish(|_| ())).err();
            join::<()>(others);
            if let Some(deferred) = held {
                assert!(deferred.try_complete().map(|completed| completed.finish(|_| ())).is_ok());
            }
            let child = space.platform().0.tables.entry(frame(1), 1);
            assert_eq!(child.load(), POISON);
        });
    }
}

/// A table is empty, and goes, while another processor maps a page of it: either the page is mapped
/// at the end, or the other is told that it is not. No table that goes has a leaf, and one that
/// stays can be filled.
#[test]
fn what_is_mapped_while_a_table_is_pruned_stays_mapped() {
    fn map_one(space: &Space) -> bool {
        fault(space) == Ok(Mapped::Installed)
    }
    fn map_range(space: &Space) -> bool {
        space.map_range(span(PAGE, PAGE), Pa::new(TARGET + PAGE), Mapping::new(FRESH)).is_ok()
    }
    fn prune(space: &Space) {
        let mut gather = space.gather();
        assert!(gather.prune(span(0, BLOCK_SIZE)).unwrap().is_done());
        let deferred = gather.issue().complete();
        let leaves = |_| panic!("a table with a leaf has gone");
        drop(deferred.try_complete().map(|completed| completed.finish(leaves)));
    }
    for map in [map_one, map_range] {
        for pruners in 1..=2 {
            bounded(3, move || {
                let space = space(None);
                let page = space.map_range(span(0, PAGE), Pa::new(TARGET), Mapping::new(FRESH));
                assert_eq!(page, Ok(PAGE));
                let mut gather = space.gather();
                let taken = gather.unmap(span(0, PAGE), |_| ControlFlow::Continue(()));
                assert!(taken.unwrap().progress.is_done());
                assert!(gather.finish(|_| ()).is_ok());

                let others = (1..pruners).map(|cpu| on(cpu, &space, prune)).collect();
                let mapped = on(2, &space, map);
                prune(&space);
                let mapped = mapped.join().unwrap();
                join::<()>(others);
                let leaf = space.query(Va::new(PAGE));
                assert_eq!(leaf.map(|leaf| leaf.frame()), mapped.then_some(Pa::new(TARGET + PAGE)));
                let rest =
                    space.map_range(span(0, BLOCK_SIZE), Pa::new(TARGET), Mapping::new(FRESH));
                assert_eq!(rest, Ok(BLOCK_SIZE - if mapped { PAGE } else { 0 }));
            });
        }
    }
}

/// Two processors unmap one page. The one that finds it gone, and the edit of the other complete,
/// reads what the guest wrote last. (The counter was once read relaxed behind its fence, and
/// ordered nothing.)
#[test]
fn what_relies_on_the_completion_of_another_edit_sees_what_was_before_it() {
    fn unmap(space: &Space) {
        let mut gather = space.gather();
        let taken = gather.unmap(span(PAGE, PAGE), |_| ControlFlow::Continue(()));
        assert!(taken.unwrap().progress.is_done());
        if gather.is_clean() {
            // No processor reaches the page: it is swapped out, say.
            let last = space.platform().0.last.as_ref();
            let last = last.map(|last| last.load(Ordering::Relaxed));
            assert_eq!(last, Some(1), "the guest's last store is not in the copy");
        }
        assert!(gather.finish(|_| ()).is_ok());
    }
    loom::model(|| {
        let last = loom::sync::atomic::AtomicU64::new(0);
        let machine = Machine::with(Caps::CONSERVATIVE, Some(last));
        let space = space_on(machine, Some(FRESH));
        let other = on(1, &space, unmap);
        unmap(&space);
        other.join().unwrap();
    });
}

/// Two gathers of one processor, completed in either order, while another takes the table that they
/// have edited: the second completion once went through tables in a walk that the first had ended.
#[test]
fn edits_under_way_may_be_completed_in_any_order() {
    for first in 0..2 {
        loom::model(move || {
            let space = space_on::<true>(Machine::new(), Some(FRESH));
            let unmap = |page| {
                let mut gather = space.gather();
                let taken = gather.unmap(span(page, PAGE), |_| ControlFlow::Continue(()));
                assert!(taken.unwrap().progress.is_done());
                gather.issue()
            };
            let mut issued = vec![unmap(0), unmap(PAGE)];
            let other = on(1, &space, |space| {
                let mut gather = space.gather();
                let taken = gather.unmap(span(0, BLOCK_SIZE), |_| ControlFlow::Continue(()));
                assert!(taken.unwrap().progress.is_done());
                let _later = gather.finish(|_| ());
            });
            let _first = issued.swap_remove(first).complete();
            let _second = issued.swap_remove(0).complete();
            other.join().unwrap();
        });
    }
}
