//! Invalidations by identity: a processor that is given an identifier, or another, while a space is
//! edited, uses nothing under it that the editor has given back.
//!
//! Hardware tells all processors, of one identifier. The page that goes is a cell: the processor
//! looks at it when it uses the translation, the editor writes it when it has it back. loom finds
//! the two at once, or the wrong way round.

// What a model shares are cells of its own kind, which are for one thread: its threads are
// coroutines.
#![allow(clippy::arc_with_non_send_sync)]

use std::cell::Cell;
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;
use tablewright::shootdown::{Allocator, Holder, Identifiers, Identity};
use tablewright::{AddressSpace, Barrier, Entry, Invalidation, Level, Mapping, Pa, Platform};

use crate::tables::{Access, FRAMES, FRESH, PAGE, TARGET, Tables, Tiny, frame, span};

/// Translations that the walking processor remembers: under which identifier, and whether the page
/// is there.
type Tlb = Mutex<Vec<(u16, bool)>>;

struct World {
    tables: Arc<Tables>,
    /// The first is that of the space.
    identities: [Identity; 4],
    identifiers: Identifiers<'static>,
    allocator: Mutex<Allocator<'static>>,
    tlb: Tlb,
    page: UnsafeCell<()>,
}

impl World {
    fn new() -> Arc<Self> {
        // What a model borrows has to live for ever.
        let holders = Vec::leak(vec![Holder::new()]);
        let allocator = Allocator::new(2, vec![0; 1].leak()).unwrap();
        Arc::new(Self {
            tables: Tables::new(),
            identities: std::array::from_fn(|_| Identity::new()),
            identifiers: Identifiers::new(&allocator, holders).unwrap(),
            allocator: Mutex::new(allocator),
            tlb: Mutex::new(Vec::new()),
            page: UnsafeCell::new(()),
        })
    }

    /// The processor that walks loads what goes by this identity. Whether a space does.
    fn switch(&self, number: usize) -> Option<u16> {
        // SAFETY: the thread that walks is CPU 0 (1. to 4.).
        let switch = unsafe {
            self.identifiers.switch(
                0,
                &self.identities[number],
                |with| with(&mut self.allocator.lock().unwrap()),
                || self.tlb.lock().unwrap().clear(),
            )
        };
        switch.map(|(_, id)| id)
    }

    /// Its program uses the page, if it is there. A walk does not overlap an invalidation.
    fn use_page(&self, id: u16) {
        let mut tlb = self.tlb.lock().unwrap();
        let known = tlb.iter().find(|one| one.0 == id).map(|one| one.1);
        let there = known.unwrap_or_else(|| {
            let there = self.tables.walk(Access::Look).is_some();
            tlb.push((id, there));
            there
        });
        // Under the lock: an instruction is over before the invalidation is.
        if there {
            self.page.with(|_| ());
        }
    }
}

#[derive(Clone)]
struct Editor {
    world: Arc<World>,
    used: Rc<Cell<u64>>,
    identity: usize,
}

// SAFETY: each frame is handed out once (1.); its four entries lie in the vector (2.); there are no
// links (3.); a walker reads what was stored (4.), and what it remembers goes in `invalidate` (5.,
// 6.); a clone shares all of it (7.); each space has an identity (9.).
unsafe impl Platform for Editor {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let number = self.used.replace(self.used.get() + 1);
        (number < FRAMES).then(|| frame(number))
    }
    unsafe fn free_table(&self, frame: Pa, _: Level) {
        self.world.tables.poison(frame);
    }
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        NonNull::from(self.world.tables.entry(frame, 0))
    }
    fn barrier(&self, _: Barrier) {}
    fn invalidate(&self, flush: &Invalidation<'_>) {
        let mut tlb = self.world.tlb.lock().unwrap();
        tlb.retain(|one| one.0 != flush.id);
    }
    fn identity_of(&self, _: Pa) -> Option<&Identity> {
        Some(&self.world.identities[self.identity])
    }
}

/// One processor takes a page back, while another goes through these spaces and uses the page where
/// it is.
fn explore(before: &'static [usize], meanwhile: &'static [usize]) {
    loom::model(move || {
        let world = World::new();
        let editor = |identity| Editor { world: Arc::clone(&world), used: Rc::default(), identity };
        let mut space = AddressSpace::<Tiny<true>, _>::new(editor(0)).unwrap();
        let pages = Mapping::new(FRESH).pages_only();
        space.map(span(PAGE, PAGE), Pa::new(TARGET + PAGE), pages).unwrap();
        space.make_live();
        // Of the others only the identifiers matter.
        let others = [1, 2, 3].map(|number| Editor {
            used: Rc::new(Cell::new(number + 1)),
            ..editor(number as usize)
        });
        let others = others.map(|editor| {
            let mut other = AddressSpace::<Tiny<true>, _>::new(editor).unwrap();
            other.make_live();
            other
        });
        let goes = |world: &World, through: &[usize]| {
            for &number in through {
                let id = world.switch(number).unwrap();
                if number == 0 {
                    // The second time by what is remembered.
                    (0..2).for_each(|_| world.use_page(id));
                }
            }
        };
        goes(&world, before);
        let walker = {
            let world = Arc::clone(&world);
            thread::spawn(move || goes(&world, meanwhile))
        };
        let mut gather = space.gather();
        let mut held = None;
        let progress = gather.unmap(span(PAGE, PAGE), |leaf| {
            held = Some(leaf);
            ControlFlow::Continue(())
        });
        assert!(progress.unwrap().is_done());
        let completed = gather.issue().complete();
        if completed.release(held.unwrap()).is_ok() {
            world.page.with_mut(|_| ());
        }
        completed.finish(|_| ());
        walker.join().unwrap();
        drop(others);
    });
}

#[test]
fn a_space_that_is_loaded_for_the_first_time_is_invalidated_or_walked_anew() {
    explore(&[], &[0]);
}

#[test]
fn a_space_that_was_loaded_before_is_invalidated_where_it_is() {
    explore(&[0], &[0]);
    explore(&[0, 1], &[0]);
}

/// A generation begins, and the space is given another identifier, while its page is invalidated
/// under the one that it had.
#[test]
fn a_space_is_given_another_identifier_while_it_is_invalidated() {
    explore(&[0, 1, 2, 3, 1], &[2, 0]);
    explore(&[0, 1, 2], &[3, 0]);
}

/// The root may be loaded as soon as it is said to be live: its tables are there.
#[test]
fn what_is_joined_is_written() {
    loom::model(|| {
        let world = World::new();
        let walker = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                if let Some(id) = world.switch(0) {
                    assert_ne!(id, 0);
                    assert!(world.tables.walk(Access::Look).is_some());
                }
            })
        };
        let editor = Editor { world, used: Rc::default(), identity: 0 };
        let mut space = AddressSpace::<Tiny<true>, _>::new(editor).unwrap();
        let pages = Mapping::new(FRESH).pages_only();
        space.map(span(PAGE, PAGE), Pa::new(TARGET + PAGE), pages).unwrap();
        space.make_live();
        walker.join().unwrap();
    });
}
