//! Exclusive edits against walkers on other processors: the editor is one thread, every other a
//! walker.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use loom::thread::{self, JoinHandle};
use tablewright::{
    AddressSpace, Attrs, Barrier, Change, Entry, Invalidation, Level, Mapping, Memory, Pa, Perms,
    Platform, Va,
};

use crate::tables::{
    Access, BLOCK_SIZE, FRAMES, FRESH, PAGE, ROOT, TARGET, Tables, Tiny, found, frame, set, span,
};

/// The walkers of a model. To a completion a walk has either ended before it or begun behind it.
#[derive(Default)]
struct Walkers {
    /// Start as soon as a completion is over.
    late: Vec<Access>,
    walking: Vec<JoinHandle<Option<u64>>>,
    /// The values that the walks which have ended returned.
    ended: Vec<Option<u64>>,
}

/// The tables and their walkers, to the editor.
#[derive(Clone)]
struct Machine {
    tables: Arc<Tables>,
    used: Rc<Cell<u64>>,
    walkers: Rc<RefCell<Walkers>>,
}

impl Machine {
    fn start(&self, access: Access) -> JoinHandle<Option<u64>> {
        let tables = self.tables.clone();
        thread::spawn(move || tables.walk(access))
    }

    /// Waits for the walks under way, and starts those that are late.
    fn complete(&self) {
        let mut walkers = self.walkers.borrow_mut();
        let Walkers { late, walking, ended } = &mut *walkers;
        ended.extend(walking.drain(..).map(|walker| walker.join().unwrap()));
        walking.extend(late.drain(..).map(|access| self.start(access)));
    }
}

// SAFETY: each frame is handed out once (1.); its four entries lie in the vector (2.); there are no
// links (3.); a walker reads what was stored (4.) and holds nothing between two walks (5.), and a
// completion waits for those under way (6.); a clone shares the tables (7.).
unsafe impl Platform for Machine {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let number = self.used.replace(self.used.get() + 1);
        (number < FRAMES).then(|| frame(number))
    }
    unsafe fn free_table(&self, frame: Pa, _: Level) {
        self.tables.poison(frame);
    }
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        NonNull::from(self.tables.entry(frame, 0))
    }
    fn barrier(&self, barrier: Barrier) {
        if barrier == Barrier::Complete {
            self.complete();
        }
    }
    fn invalidate(&self, _: &Invalidation<'_>) {}
}

/// The walks of a model: the kinds of access, and which of them, as a bit set, start before the
/// edit.
type Cast = (&'static [Access], usize);

/// Explores a model with one walker and with two, of all kinds, before and behind completions.
fn explore(model: impl Fn(Cast) + Copy + Send + Sync + 'static) {
    use Access::{Look, Read, Write};
    for walkers in [&[Write][..], &[Look], &[Write, Read], &[Write, Write], &[Write, Look]] {
        for early in 0..1 << walkers.len() {
            loom::model(move || model((walkers, early)));
        }
    }
}

/// A live space in which one block may be mapped, and walkers that access the second page of it.
struct Scene<const ARM: bool> {
    space: AddressSpace<Tiny<ARM>, Machine>,
    machine: Machine,
}

impl<const ARM: bool> Scene<ARM> {
    fn new(mapping: Option<Mapping>, (accesses, early): Cast) -> Self {
        let machine =
            Machine { tables: Tables::new(), used: Rc::default(), walkers: Rc::default() };
        let mut space = AddressSpace::new(machine.clone()).unwrap();
        assert_eq!(space.root(), ROOT);
        if let Some(mapping) = mapping {
            space.map(span(0, BLOCK_SIZE), Pa::new(TARGET), mapping).unwrap();
        }
        space.make_live();
        for (number, &access) in accesses.iter().enumerate() {
            let mut walkers = machine.walkers.borrow_mut();
            if early >> number & 1 == 0 {
                walkers.late.push(access);
            } else {
                walkers.walking.push(machine.start(access));
            }
        }
        Self { space, machine }
    }

    fn pages(cast: Cast) -> Self {
        Self::new(Some(Mapping::new(FRESH).pages_only()), cast)
    }

    fn block(cast: Cast) -> Self {
        Self::new(Some(Mapping::new(FRESH)), cast)
    }

    /// Lets all walkers end, those included that have not begun, and returns what they did.
    fn join(&self) -> Vec<Option<u64>> {
        self.machine.complete();
        self.machine.complete();
        self.machine.walkers.take().ended
    }

    fn attrs(&self) -> Attrs {
        self.space.query(Va::new(PAGE)).unwrap().attrs()
    }
}

#[test]
fn a_walker_never_sees_a_table_before_its_entries() {
    explore(|cast| {
        let mut scene = Scene::<false>::new(None, cast);
        let mapping = Mapping::new(FRESH).pages_only();
        scene.space.map(span(0, BLOCK_SIZE), Pa::new(TARGET), mapping).unwrap();
        // The walkers check where the page leads.
        let walks = scene.join();
        assert_eq!(found(scene.attrs()), set(&walks));
    });
}

#[test]
fn an_unmap_takes_the_last_word_of_the_walker_with_it() {
    explore(|cast| {
        let mut scene = Scene::<false>::pages(cast);
        let mut gather = scene.space.gather();
        let mut deferred = Vec::new();
        let progress = gather
            .unmap(span(PAGE, PAGE), |leaf| {
                deferred.push(leaf);
                ControlFlow::Continue(())
            })
            .unwrap();
        assert!(progress.is_done());
        let completed = gather.issue().complete();
        let attrs = completed.release(deferred.pop().unwrap()).unwrap().attrs();
        completed.finish(|_| ());
        assert_eq!(found(attrs), set(&scene.join()));
    });
}

#[test]
fn no_table_is_reclaimed_under_a_walk() {
    explore(|cast| {
        let mut scene = Scene::<false>::pages(cast);
        let mut gather = scene.space.gather();
        let progress = gather.unmap(span(0, BLOCK_SIZE), |_| ControlFlow::Break(())).unwrap();
        assert!(progress.is_done());
        let mut leaves = Vec::new();
        gather.finish(|leaf| leaves.push(found(leaf.attrs())));
        let untouched = (false, false);
        let touched = set(&scene.join());
        assert_eq!(leaves, [untouched, touched, untouched, untouched]);
    });
}

#[test]
fn a_gather_that_is_dropped_frees_no_table_under_a_walk() {
    explore(|cast| {
        let mut scene = Scene::<false>::pages(cast);
        let mut gather = scene.space.gather();
        let progress = gather.unmap(span(0, BLOCK_SIZE), |_| ControlFlow::Break(())).unwrap();
        assert!(progress.is_done());
        // A walker that comes to a table which is freed finds poison.
        drop(gather);
        scene.join();
        assert_eq!(scene.space.count_tables(), 1);
    });
}

/// Changes the attributes of the page while it is accessed, and returns what they are at the end.
fn change<const ARM: bool>(cast: Cast, change: Change) -> Attrs {
    let mut scene = Scene::<ARM>::pages(cast);
    let mut gather = scene.space.gather();
    gather.protect(span(0, BLOCK_SIZE), change).unwrap();
    gather.finish(|_| ());
    let walks = scene.join();
    assert_eq!(found(scene.attrs()), set(&walks));
    scene.attrs()
}

#[test]
fn a_change_of_permissions_loses_no_flag() {
    explore(|cast| {
        let attrs = change::<false>(cast, Change::new().write_protect());
        assert!(!attrs.perms.contains(Perms::WRITE));
    });
}

#[test]
fn a_change_by_a_break_loses_no_flag() {
    explore(|cast| {
        let attrs = change::<true>(cast, Change::new().memory(Memory::NonCacheable));
        assert_eq!(attrs.memory, Memory::NonCacheable);
    });
}

/// Splits the block while the page is accessed, and returns the walks. They mark the block, which
/// stands for all of it, or the page.
fn split<const ARM: bool>(cast: Cast) -> Vec<Option<u64>> {
    let mut scene = Scene::<ARM>::block(cast);
    let mut gather = scene.space.gather();
    gather.split(span(0, BLOCK_SIZE), Level::PAGE).unwrap();
    gather.finish(|_| ());
    let walks = scene.join();
    assert_eq!(scene.space.query(Va::new(PAGE)).unwrap().size(), PAGE);
    assert_eq!(found(scene.attrs()), set(&walks));
    walks
}

#[test]
fn a_split_in_place_loses_no_flag() {
    explore(|cast| {
        let walks = split::<false>(cast);
        assert!(walks.iter().all(Option::is_some), "a walk faulted");
    });
}

#[test]
fn a_split_by_a_break_loses_no_flag() {
    explore(|cast| drop(split::<true>(cast)));
}

/// Collapses the pages while one is accessed, and returns the walks and the flags of the block.
fn collapse<const ARM: bool>(cast: Cast) -> (Vec<Option<u64>>, (bool, bool)) {
    let mut scene = Scene::<ARM>::pages(cast);
    let mut gather = scene.space.gather();
    let block = span(0, BLOCK_SIZE);
    assert_eq!(gather.collapse(block, Level::new(1), false), Ok(1));
    gather.finish(|_| ());
    let walks = scene.join();
    let leaf = scene.space.query(Va::new(PAGE)).unwrap();
    assert_eq!(leaf.size(), BLOCK_SIZE);
    (walks, found(leaf.attrs()))
}

#[test]
fn a_collapse_in_place_loses_no_flag() {
    explore(|cast| {
        let (walks, (accessed, dirty)) = collapse::<false>(cast);
        assert!(walks.iter().all(Option::is_some), "a walk faulted");
        let walked = set(&walks);
        assert!(accessed >= walked.0 && dirty >= walked.1);
    });
}

#[test]
fn a_collapse_by_a_break_loses_no_flag() {
    explore(|cast| {
        let (walks, flags) = collapse::<true>(cast);
        assert_eq!(flags, set(&walks));
    });
}
