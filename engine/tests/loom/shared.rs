//! Edits by several processors at once, against each other and against walkers.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use loom::thread::{self, JoinHandle};
use tablewright::shared::{
    Epochs, Mapped, Moment, NewLeaf, Refused, SharedPlatform, SharedSpace, Slot, TableCache,
    Walking,
};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, Entry, Invalidation, Level, Mapping, Pa, Perms,
    Platform, Va,
};

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
}

// SAFETY: each frame is handed out once (1.); its four entries lie in the vector (2.); there are no links (3.) and no
// overridden accessors (4.); in these models nobody remembers what an entry said (5.); a clone shares the tables (6.).
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
    fn barrier(&self, _: Barrier) {}
    fn invalidate(&self, _: &Invalidation) {}
}

// SAFETY: the epochs keep both promises; each thread has a slot.
unsafe impl SharedPlatform for Machine {
    type Walk<'a> = Walking<'a>;

    fn enter(&self) -> Walking<'_> {
        self.0.epochs.enter(CPU.with(Cell::get)).unwrap()
    }
    fn cut(&self) -> Moment {
        self.0.epochs.advance()
    }
    fn is_past(&self, moment: Moment) -> bool {
        self.0.epochs.is_past(moment)
    }
}

type Space = SharedSpace<Tiny<false>, Machine>;

impl Machine {
    pub fn new() -> Self {
        Self::with_caps(Caps::CONSERVATIVE)
    }

    /// The entry that maps a page, if it can be written through the tables as they are.
    pub fn can_write(&self, page: u64) -> bool {
        self.0.tables.can_write(page)
    }

    pub fn with_caps(caps: Caps) -> Self {
        // What a thread of a model borrows has to live for ever.
        let slots: &'static [Slot] = Vec::leak((0..CPUS).map(|_| Slot::new()).collect());
        Self(Arc::new(Parts {
            tables: Tables::new(),
            used: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            epochs: Epochs::new(slots),
            caps,
        }))
    }
}

/// A space in which the block is mapped as pages with `attrs`, if any.
fn space(attrs: Option<Attrs>) -> Arc<Space> {
    let mut space = AddressSpace::new(Machine::new()).unwrap();
    assert_eq!(space.root(), ROOT);
    if let Some(attrs) = attrs {
        let mut flush = space.flush();
        let mapping = Mapping::new(attrs).pages_only();
        space
            .map(span(0, BLOCK_SIZE), Pa::new(TARGET), mapping, &mut flush)
            .unwrap();
        flush.finish(|_| ());
    }
    space.make_live();
    Arc::new(SharedSpace::new(space))
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
    threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect()
}

/// Maps the second page, as a fault asks for.
fn fault(space: &Space) -> Result<Mapped<Tiny<false>>, Refused<Va>> {
    let leaf = NewLeaf::new(Va::new(PAGE), Pa::new(TARGET + PAGE), Level::PAGE, FRESH).unwrap();
    let (mut tables, mut flush) = (TableCache::new(), space.flush());
    assert!(tables.top_up::<Tiny<false>, _>(space.platform(), 1));
    let mapped = space.map(&leaf, &mut tables, &mut flush);
    tables.release(space.platform());
    assert!(flush.is_clean());
    mapped
}

#[test]
fn a_page_that_several_processors_fault_on_is_installed_once() {
    // Where the table is missing, one of several is linked, and the others go back.
    for (others, with_table) in [(1, true), (1, false), (2, true), (2, false)] {
        loom::model(move || {
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
        });
    }
}

const WALKERS: [&[Access]; 3] = [
    &[Access::Write],
    &[Access::Write, Access::Write],
    &[Access::Write, Access::Look],
];

#[test]
fn a_shared_change_loses_no_flag() {
    for walkers in WALKERS {
        loom::model(move || {
            let space = space(Some(FRESH));
            let walks = walk(&space, walkers);
            let mut flush = space.flush();
            let change = Change::new().write_protect();
            let protected = space.protect(span(PAGE, PAGE), change, &mut flush);
            assert!(protected.unwrap().changed);
            assert!(flush.finish(|_| ()).is_ok());
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
            let mut held = Vec::new();
            let taken = space
                .unmap(span(PAGE, PAGE), |leaf| {
                    held.push(leaf);
                    ControlFlow::Continue(())
                })
                .unwrap();
            let cut = taken.issue().complete();
            let attrs = cut.release(held.pop().unwrap()).ok().unwrap().attrs();
            assert_eq!(found(attrs), set(&join(walks)));
            assert!(cut.quiet().is_ok());
        });
    }
}

#[test]
fn no_table_is_settled_under_a_walk_of_software() {
    for others in 1..=2 {
        loom::model(move || {
            let space = space(Some(FRESH));
            let look = |space: &Space| {
                let leaf = space.query(Va::new(PAGE));
                assert!(leaf.is_none_or(|leaf| leaf.frame() == Pa::new(TARGET + PAGE)));
            };
            let others = (1..=others).map(|cpu| on(cpu, &space, look)).collect();
            let taken = space
                .unmap(span(0, BLOCK_SIZE), |_| ControlFlow::Continue(()))
                .unwrap();
            let cut = taken.issue().complete().quiet();
            // Either it is quiet at once, or when every walk is over.
            let held = cut.map(|completed| completed.finish(|_| ())).err();
            join::<()>(others);
            if let Some(cut) = held {
                assert!(
                    cut.quiet()
                        .map(|completed| completed.finish(|_| ()))
                        .is_ok()
                );
            }
            let child = space.platform().0.tables.entry(frame(1), 1);
            assert_eq!(child.load(), POISON);
        });
    }
}
