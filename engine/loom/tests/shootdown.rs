//! Remote flushes: a CPU that loads a space, is lazy, does not run, is online or not, or flushes
//! while another flushes, uses nothing that the other has given back.
//!
//! A CPU here remembers one translation of each entry. What it leads to is a cell that the CPU
//! looks at when it uses the translation, and that is written when it is given back: loom finds the
//! two at once, or the wrong way round.

// What a model shares are cells of its own kind, which are for one thread: its threads are
// coroutines.
#![allow(clippy::arc_with_non_send_sync)]

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread::{self, JoinHandle};
use tablewright::hyperv::{FlushQueue, Pages};
use tablewright::shootdown::{
    Actions, Allocator, CpuCell, Cpus, Deferred, Holder, Identifiers, Identity, LocalFlush,
    Messenger, PerCpu, PreemptedFlag, Shootdown, Space, inbox_words,
};
use tablewright::{Invalidation, Pa, Stale, What};

use crate::bounded;

const CPUS: usize = 2;
/// The entry before the edit, and after it.
const OLD: u64 = 1;
const NEW: u64 = 2;
/// The page that an entry maps.
fn page(entry: usize, tables: bool) -> Stale {
    let first = (entry as u64 + 1) << 12;
    Stale { first, last: first + 0xfff, level: None, tables }
}

/// An edit's detached or changed entry.
#[derive(Clone, Copy, Default)]
struct Edit {
    tables: bool,
    global: bool,
}

const LEAF: Edit = Edit { tables: false, global: false };
const TABLE: Edit = Edit { tables: true, ..LEAF };
const GLOBAL: Edit = Edit { global: true, ..LEAF };

/// State that the threads of a model share: entries, and the memory that the old ones lead to. One
/// for each edit.
struct World {
    shootdown: Shootdown<'static>,
    space: Space<'static>,
    entries: [AtomicU64; CPUS],
    old: [UnsafeCell<()>; CPUS],
    flag: PreemptedFlag,
    /// A CPU has been interrupted, once.
    interrupted: [AtomicBool; CPUS],
    /// A CPU has no more to do, and waits for the others.
    done: [AtomicBool; CPUS],
}

impl World {
    fn new() -> Arc<Self> {
        // What a thread of a model borrows has to live for ever.
        fn leak<T>(count: usize, make: impl Fn() -> T) -> &'static mut [T] {
            Vec::leak((0..count).map(|_| make()).collect())
        }
        let inboxes = leak(inbox_words(CPUS), || AtomicU64::new(0));
        let shootdown = Shootdown::new(leak(CPUS, CpuCell::new), inboxes, identifiers(3).1, 1);
        Arc::new(Self {
            shootdown: shootdown.unwrap(),
            space: Space::new(Pa::new(0x1000), leak(1, || AtomicU64::new(0))),
            entries: [AtomicU64::new(OLD), AtomicU64::new(OLD)],
            old: [UnsafeCell::new(()), UnsafeCell::new(())],
            flag: PreemptedFlag::default(),
            interrupted: [AtomicBool::new(false), AtomicBool::new(false)],
            done: [AtomicBool::new(false), AtomicBool::new(false)],
        })
    }
}

fn identifiers(bits: u32) -> (&'static Mutex<Allocator<'static>>, Option<Identifiers<'static>>) {
    let holders = Vec::leak((0..CPUS).map(|_| Holder::new()).collect());
    let allocator = Allocator::new(bits, vec![0; 1].leak()).unwrap();
    let identifiers = Identifiers::new(&allocator, holders);
    (Box::leak(Box::new(Mutex::new(allocator))), identifiers)
}

/// The point of a flush at which a handler interrupts it.
#[derive(Clone, Copy, PartialEq)]
enum Point {
    /// The message is not written yet.
    Before,
    /// It is written and queued, and no CPU is interrupted yet.
    Queued,
}

/// A CPU: what it remembers of the entries that it uses.
struct On<'w> {
    world: &'w World,
    cpu: usize,
    of: &'static [usize],
    remembered: RefCell<[Option<u64>; 2]>,
    /// It has the space loaded, and is not lazy, when it has done what it does.
    uses: Cell<bool>,
    /// It does what others ask.
    asked: Cell<bool>,
    /// A handler that flushes another entry, once.
    handler: Cell<Option<(Point, usize, Edit)>>,
    /// A handler that does what others ask, once, in the midst of doing what others ask.
    receives: Cell<bool>,
    allocator: RefCell<Allocator<'static>>,
}

impl<'w> On<'w> {
    fn new(world: &'w World, cpu: usize, of: &'static [usize]) -> Self {
        Self {
            world,
            cpu,
            of,
            remembered: RefCell::new([None; 2]),
            uses: Cell::new(true),
            asked: Cell::new(false),
            handler: Cell::new(None),
            receives: Cell::new(false),
            allocator: RefCell::new(Allocator::new(3, vec![0; 1].leak()).unwrap()),
        }
    }

    fn here(&self) -> PerCpu<'w, 'static> {
        // SAFETY: a thread is a CPU (1.), and handlers are played as the CPU may be interrupted
        // (2.); it loads nothing but in the model (3., 4.).
        unsafe { self.world.shootdown.on(self.cpu) }.unwrap()
    }

    fn load(&self, loads: bool) {
        let space = Some(&self.world.space);
        let (from, to) = if loads { (None, space) } else { (space, None) };
        let switched = self.here().switch(from, to, self, |_| ());
        switched.unwrap();
    }

    /// Looks at the entry, as the CPU or its walker does.
    fn look(&self) {
        for &of in self.of {
            let entry = &self.world.entries[of];
            let found = *self.remembered.borrow_mut()[of]
                .get_or_insert_with(|| entry.load(Ordering::Relaxed));
            if found == OLD {
                self.world.old[of].with(|_| ());
            }
        }
    }

    /// Changes an entry, and gives back what it led to.
    fn edit(&self, entry: usize, edit: Edit) {
        self.world.entries[entry].store(NEW, Ordering::Relaxed);
        let flush = Invalidation {
            root: self.world.space.root(),
            id: 0,
            global: edit.global,
            what: What::Ranges(&[page(entry, edit.tables)]),
        };
        // SAFETY: CPU 1 plays its host (1.).
        let deferred = unsafe { Deferred::new(|cpu| (cpu == 1).then_some(&self.world.flag)) };
        let messengers: [&dyn Messenger; 2] = [&deferred, &Interrupted(self)];
        self.here().flush(&self.world.space, &flush, &messengers, self);
        self.world.old[entry].with_mut(|_| ());
    }

    /// Is interrupted, if that is to be here.
    fn interrupted(&self, at: Point) {
        if let Some((point, entry, edit)) = self.handler.take() {
            if point == at {
                self.edit(entry, edit);
            } else {
                self.handler.set(Some((point, entry, edit)));
            }
        }
    }

    /// Does what others ask: in a handler, or because it waits for something.
    fn receive(&self) {
        self.asked.set(true);
        self.here().receive(self);
        self.asked.set(false);
    }

    fn take_interrupt(&self) -> bool {
        let flag = &self.world.interrupted[self.cpu];
        // loom takes an exchange in a loop for progress, and goes round for ever.
        flag.load(Ordering::Relaxed) && flag.swap(false, Ordering::Acquire)
    }

    /// Takes interrupts until the other has no more to do. One that is not sent is not taken.
    fn attend(&self) {
        self.world.done[self.cpu].store(true, Ordering::Relaxed);
        while !self.world.done[1 - self.cpu].load(Ordering::Relaxed) {
            if self.take_interrupt() {
                self.receive();
            }
            thread::yield_now();
        }
    }
}

/// A messenger that tells no CPU: a handler comes while it is asked.
struct Interrupted<'o, 'w>(&'o On<'w>);

// SAFETY: no CPU is taken out (1., 2.).
unsafe impl Messenger for Interrupted<'_, '_> {
    fn tell(&self, _: &Invalidation<'_>, _: &mut Cpus) {
        self.0.interrupted(Point::Before);
    }
}

// SAFETY: no memory depends on it.
unsafe impl Actions for On<'_> {
    fn flush_local(&self, what: LocalFlush) {
        if let LocalFlush::Range { id, .. } | LocalFlush::Space(id) = what {
            assert_eq!(id, 1);
        }
        if self.asked.get() {
            // Until now its walker has gone on.
            self.look();
        }
        if self.receives.get() && self.take_interrupt() {
            self.receives.set(false);
            self.here().receive(self);
        }
        match what {
            LocalFlush::Range { range, .. } => {
                let all = &mut *self.remembered.borrow_mut();
                (all.iter_mut().enumerate())
                    .filter(|&(entry, _)| page(entry, false).first == range.first)
                    .for_each(|(_, remembered)| *remembered = None);
            }
            _ => *self.remembered.borrow_mut() = [None; 2],
        }
    }

    fn interrupt(&self, cpus: &Cpus) {
        assert!(cpus.iter().eq([1 - self.cpu]));
        self.interrupted(Point::Queued);
        // An exchange, because loom lets one stand behind a store that it has not read.
        self.world.interrupted[1 - self.cpu].swap(true, Ordering::Release);
    }

    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>)) {
        // One space: the CPU that asks first has it all.
        with(&mut self.allocator.borrow_mut());
    }

    fn relax(&self) {
        thread::yield_now();
    }
}

fn on(world: &Arc<World>, what: impl FnOnce(&World) + 'static) -> JoinHandle<()> {
    let world = Arc::clone(world);
    thread::spawn(move || what(&world))
}

/// CPU 0 edits, while 1 does `what`, after it has done `before`.
fn while_edited(
    edit: Edit,
    before: impl Fn(&On<'_>) + Send + Sync + 'static,
    what: impl Fn(&On<'_>) + Send + Sync + Copy + 'static,
) {
    loom::model(move || {
        let world = World::new();
        let other = On::new(&world, 1, &[0]);
        // It has used the space, which therefore has an identifier.
        other.load(true);
        other.look();
        before(&other);
        let remembered = other.remembered.take();
        let other = on(&world, move |world| {
            let other = On::new(world, 1, &[0]);
            *other.remembered.borrow_mut() = remembered;
            what(&other);
            other.attend();
            if other.uses.get() {
                other.look();
            }
        });
        let editor = On::new(&world, 0, &[1]);
        editor.edit(0, edit);
        editor.attend();
        other.join().unwrap();
    });
}

#[test]
fn a_cpu_that_has_the_space_loaded_is_told() {
    while_edited(
        LEAF,
        |_| (),
        |other| {
            other.look();
            other.receive();
            other.look();
        },
    );
}

#[test]
fn a_cpu_that_loads_a_space_while_it_is_flushed_is_told_or_knows() {
    while_edited(
        LEAF,
        |other| other.load(false),
        |other| {
            other.load(true);
            other.look();
        },
    );
}

#[test]
fn a_cpu_that_loads_another_space_has_left_before_its_tables_go() {
    while_edited(
        TABLE,
        |_| (),
        |other| {
            let space = Some(&other.world.space);
            other.look();
            // Until another root is loaded, the walker goes on.
            let here = other.here();
            here.switch(space, None, other, |_| other.look()).unwrap();
            other.uses.set(false);
        },
    );
}

#[test]
fn a_cpu_that_was_lazy_looks_before_it_uses_the_space() {
    while_edited(
        LEAF,
        |other| other.here().be_lazy(),
        |other| {
            other.here().resume(&other.world.space, other);
            other.look();
        },
    );
}

#[test]
fn a_cpu_that_becomes_lazy_has_made_its_last_use() {
    while_edited(
        LEAF,
        |_| (),
        |other| {
            other.look();
            other.here().be_lazy();
            other.uses.set(false);
        },
    );
}

#[test]
fn a_cpu_that_loads_a_space_is_not_lazy_any_more() {
    while_edited(
        LEAF,
        |other| {
            other.load(false);
            other.here().be_lazy();
        },
        |other| {
            other.load(true);
            other.look();
        },
    );
}

#[test]
fn a_cpu_that_is_lazy_is_told_when_tables_go() {
    while_edited(
        TABLE,
        |other| other.here().be_lazy(),
        |other| {
            // Its walker, by itself.
            other.look();
            other.receive();
            other.look();
        },
    );
}

#[test]
fn a_cpu_that_does_not_run_is_flushed_before_it_does() {
    while_edited(
        LEAF,
        |_| (),
        |other| {
            other.look();
            other.world.flag.preempt();
            if other.world.flag.enter() {
                other.flush_local(LocalFlush::Everything);
            }
            other.look();
        },
    );
}

#[test]
fn a_cpu_that_has_no_space_loaded_is_told_of_what_is_global() {
    while_edited(
        GLOBAL,
        |other| other.load(false),
        |other| {
            other.look();
            other.receive();
            other.look();
        },
    );
}

#[test]
fn a_cpu_that_goes_online_is_told_or_finds_what_is_new() {
    while_edited(
        GLOBAL,
        |other| {
            other.load(false);
            other.here().go_offline(other);
        },
        |other| {
            other.here().go_online(other);
            other.look();
        },
    );
}

#[test]
fn a_cpu_goes_offline_when_no_flush_waits_for_it() {
    while_edited(
        GLOBAL,
        |other| other.load(false),
        |other| {
            other.look();
            other.asked.set(true);
            other.here().go_offline(other);
            other.asked.set(false);
            other.uses.set(false);
            // No interrupt comes to it any more.
            other.world.done[1].store(true, Ordering::Relaxed);
            while !other.world.done[0].load(Ordering::Relaxed) {
                thread::yield_now();
            }
        },
    );
}

#[test]
fn two_that_flush_at_once_do_not_wait_for_each_other() {
    two_that_flush(None);
}

/// CPUs 0 and 1 flush an entry each, and use that of the other.
fn two_that_flush(handler: Option<(Point, usize, Edit)>) {
    let model = move || {
        let world = World::new();
        let others = |cpu: usize| -> &'static [usize] { if cpu == 0 { &[1] } else { &[0] } };
        let start = |world: &World, cpu: usize| {
            let here = On::new(world, cpu, others(cpu));
            here.load(true);
            here.look();
            here.remembered.take()
        };
        let remembered = [start(&world, 0), start(&world, 1)];
        let run = move |world: &World, cpu: usize| {
            let here = On::new(world, cpu, others(cpu));
            *here.remembered.borrow_mut() = remembered[cpu];
            here.handler.set(handler.filter(|_| cpu == 0));
            here.edit(cpu, LEAF);
            here.look();
            here.attend();
            here.look();
        };
        let other = on(&world, move |world| run(world, 1));
        run(&world, 0);
        other.join().unwrap();
    };
    match handler {
        None => loom::model(model),
        Some(_) => bounded(3, model),
    }
}

// ---- Flushes in handlers ----

/// CPU 0 edits one entry, and in the midst of it, in a handler, another. CPU 1 uses both; a handler
/// may interrupt it too.
fn while_edited_in_a_handler(point: Point, edit: Edit, loaded: bool, receives: bool) {
    loom::model(move || {
        let world = World::new();
        let other = On::new(&world, 1, &[0, 1]);
        other.load(true);
        other.look();
        if !loaded {
            other.load(false);
        }
        let remembered = other.remembered.take();
        let other = on(&world, move |world| {
            let other = On::new(world, 1, &[0, 1]);
            *other.remembered.borrow_mut() = remembered;
            other.receives.set(receives);
            other.receive();
            other.look();
            other.attend();
            other.look();
        });
        let editor = On::new(&world, 0, &[]);
        editor.handler.set(Some((point, 1, edit)));
        editor.edit(0, edit);
        assert!(editor.handler.take().is_none());
        editor.attend();
        other.join().unwrap();
    });
}

#[test]
fn a_flush_in_a_handler_is_told_before_the_message_that_it_interrupts_is_written() {
    while_edited_in_a_handler(Point::Before, LEAF, true, false);
}

#[test]
fn a_flush_in_a_handler_leaves_the_message_that_it_interrupts() {
    while_edited_in_a_handler(Point::Queued, LEAF, true, false);
}

#[test]
fn a_cpu_that_is_told_may_be_interrupted_itself() {
    while_edited_in_a_handler(Point::Queued, LEAF, true, true);
}

#[test]
fn a_flush_in_a_handler_of_what_is_global_is_told_to_all() {
    while_edited_in_a_handler(Point::Queued, GLOBAL, false, true);
}

/// A handler in a handler rings again, while the CPU that is told answers and is interrupted in it:
/// what it did does not go back, and the one interrupt that was sent is enough.
#[test]
fn a_doorbell_is_rung_while_it_is_answered() {
    let mut model = loom::model::Builder::new();
    // Three flushes of one CPU are more than can be explored whole.
    model.preemption_bound = Some(3);
    model.check(|| {
        let world = World::new();
        let other = On::new(&world, 1, &[0, 1]);
        other.load(true);
        other.look();
        let remembered = other.remembered.take();
        let other = on(&world, move |world| {
            let other = On::new(world, 1, &[0, 1]);
            *other.remembered.borrow_mut() = remembered;
            other.receives.set(true);
            other.receive();
            other.attend();
            other.look();
        });
        let editor = On::new(&world, 0, &[]);
        editor.handler.set(Some((Point::Queued, 1, LEAF)));
        let flush = Invalidation {
            root: world.space.root(),
            id: 0,
            global: false,
            what: What::Ranges(&[page(2, false)]),
        };
        let handler: &dyn Messenger = &Handler(&editor);
        (editor.here()).flush(&world.space, &flush, &[handler], &editor);
        editor.attend();
        other.join().unwrap();
    });
}

/// A messenger that tells no CPU: in a handler that comes while it is asked, an entry is edited.
struct Handler<'o, 'w>(&'o On<'w>);

// SAFETY: no CPU is taken out (1., 2.).
unsafe impl Messenger for Handler<'_, '_> {
    fn tell(&self, _: &Invalidation<'_>, _: &mut Cpus) {
        self.0.edit(0, LEAF);
    }
}

#[test]
fn two_that_flush_at_once_one_of_them_in_a_handler_do_not_wait_for_each_other() {
    // The handler's flush is of an entry that is changed already: what counts is that it ends.
    two_that_flush(Some((Point::Queued, 0, LEAF)));
}

// ---- Identifiers ----

/// Seven identifiers for two CPUs.
struct Ids {
    identifiers: Identifiers<'static>,
    allocator: &'static Mutex<Allocator<'static>>,
    spaces: [Identity; 8],
}

impl Ids {
    fn new() -> Arc<Self> {
        let (allocator, identifiers) = identifiers(3);
        Arc::new(Self {
            identifiers: identifiers.unwrap(),
            allocator,
            spaces: std::array::from_fn(|_| Identity::new()),
        })
    }

    /// A CPU loads a space. It remembers what it had under which identifier.
    fn load(&self, cpu: usize, space: usize, remembered: &mut Vec<(u16, usize)>) -> u16 {
        let mut forgets = false;
        // SAFETY: a thread is a CPU, which holds what the model says (1. to 4.).
        let id = unsafe {
            self.identifiers.load(
                cpu,
                &self.spaces[space],
                |with| with(&mut self.allocator.lock().unwrap()),
                || forgets = true,
            )
        };
        let id = id.unwrap();
        if forgets {
            remembered.clear();
        }
        for &(its, other) in &*remembered {
            assert!(its != id || other == space, "{id} of {other} for {space}");
        }
        remembered.push((id, space));
        id
    }
}

/// All identifiers are given; CPU 0 loads spaces that have none, while 1 goes back to one that has.
fn roll_over(loads: &'static [usize]) {
    loom::model(move || {
        let ids = Ids::new();
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let _ = ids.load(1, 0, &mut second);
        let left = ids.load(1, 1, &mut second);
        (2..7).for_each(|space| _ = ids.load(0, space, &mut first));
        let other = {
            let ids = Arc::clone(&ids);
            thread::spawn(move || ids.load(1, 0, &mut second))
        };
        let mut last = (2, 0);
        for &space in loads {
            last = (space, ids.load(0, space, &mut first));
        }
        let id = other.join().unwrap();
        // Each is in use; and CPU 1 has what it leaves loaded until it has loaded the other.
        assert_eq!(last.0 == 0, last.1 == id);
        assert_ne!(last.1, left);
    });
}

#[test]
fn an_identifier_that_is_being_loaded_is_not_given_to_another() {
    roll_over(&[7]);
}

#[test]
fn a_new_identifier_is_not_loaded_over_what_was_there() {
    roll_over(&[7, 0]);
}

/// Hardware that tells all CPUs: what CPU 1 remembers, under which identifier. A walk does not
/// overlap an invalidation.
struct Broadcast(Arc<Mutex<Option<(u16, u64)>>>);

// SAFETY: there is one TLB, which is invalidated (1., 2.).
unsafe impl Messenger for Broadcast {
    fn tell(&self, flush: &Invalidation<'_>, cpus: &mut Cpus) {
        self.0.lock().unwrap().take_if(|(id, _)| *id == flush.id);
        cpus.clear();
    }

    fn reaches_all(&self) -> bool {
        true
    }
}

#[test]
fn a_broadcast_knows_the_identifier_or_is_too_early_to_matter() {
    loom::model(|| {
        let world = World::new();
        let tlb = Arc::new(Mutex::new(None));
        let other = {
            let tlb = Arc::clone(&tlb);
            on(&world, move |world| {
                let other = On::new(world, 1, &[0]);
                let mut loaded = 0;
                other.here().switch(None, Some(&world.space), &other, |id| loaded = id).unwrap();
                for _ in 0..2 {
                    let mut tlb = tlb.lock().unwrap();
                    let walk = || (loaded, world.entries[0].load(Ordering::Relaxed));
                    if tlb.get_or_insert_with(walk).1 == OLD {
                        world.old[0].with(|_| ());
                    }
                }
            })
        };
        let editor = On::new(&world, 0, &[]);
        world.entries[0].store(NEW, Ordering::Relaxed);
        let flush = Invalidation {
            root: world.space.root(),
            id: 0,
            global: false,
            what: What::Ranges(&[page(0, true)]),
        };
        (editor.here()).flush(&world.space, &flush, &[&Broadcast(tlb)], &editor);
        world.old[0].with_mut(|_| ());
        other.join().unwrap();
    });
}

// ---- What a host has queued for a virtual processor ----

/// Editors push into a queue with room for one range, and do not wait for a virtual processor that
/// does not run.
fn queued(editors: usize, all: bool) {
    struct Host {
        queue: FlushQueue<1>,
        runs: AtomicBool,
        entries: [AtomicU64; 2],
        old: [UnsafeCell<()>; 2],
    }
    fn edit(host: &Host, number: usize, all: bool) {
        host.entries[number].store(NEW, Ordering::Relaxed);
        let page = Pages { first: (number as u64) << 12, count: 1, size: 4096 };
        if all {
            host.queue.push_all();
        } else {
            host.queue.push(page);
        }
        loom::sync::atomic::fence(Ordering::SeqCst);
        // Otherwise it would be kicked, and waited for until it is outside.
        if (0..2).any(|_| !host.runs.load(Ordering::Acquire)) {
            host.old[number].with_mut(|_| ());
        }
    }
    loom::model(move || {
        let host = Arc::new(Host {
            queue: FlushQueue::new(),
            runs: AtomicBool::new(false),
            entries: [AtomicU64::new(OLD), AtomicU64::new(OLD)],
            old: [UnsafeCell::new(()), UnsafeCell::new(())],
        });
        let others: Vec<_> = (1..editors)
            .map(|number| {
                let host = Arc::clone(&host);
                thread::spawn(move || edit(&host, number, all))
            })
            .collect();
        let guest = {
            let host = Arc::clone(&host);
            thread::spawn(move || {
                let mut remembered = [Some(OLD); 2];
                // What is found now is remembered the next time. With two editors that is too much
                // to look through; and where an exchange and a plain store meet, loom lets the
                // exchange read what the store has replaced and stand behind it all the same.
                for _ in editors + usize::from(all)..3 {
                    host.runs.store(true, Ordering::Relaxed);
                    loom::sync::atomic::fence(Ordering::SeqCst);
                    if host.queue.take(|pages| remembered[(pages.first >> 12) as usize] = None) {
                        remembered = [None; 2];
                    }
                    for (number, page) in remembered.iter_mut().enumerate().take(editors) {
                        let walk = || host.entries[number].load(Ordering::Relaxed);
                        if *page.get_or_insert_with(walk) == OLD {
                            host.old[number].with(|_| ());
                        }
                    }
                    host.runs.store(false, Ordering::Release);
                }
            })
        };
        edit(&host, 0, all);
        others.into_iter().for_each(|other| other.join().unwrap());
        guest.join().unwrap();
    });
}

#[test]
fn what_a_host_has_queued_is_forgotten_before_the_guest_runs() {
    queued(1, false);
}

#[test]
fn everything_is_forgotten_before_the_guest_runs() {
    queued(1, true);
}

#[test]
fn a_queue_that_is_full_forgets_everything() {
    queued(2, false);
}
