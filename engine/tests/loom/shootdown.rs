//! Remote flushes: whoever loads a space, is lazy, does not run, or flushes himself while another flushes, uses nothing
//! that the other has given back.
//!
//! A processor here remembers one translation under each identifier. What it leads to is a cell that the processor looks at when it uses
//! the translation, and that is written when it is given back: loom finds the two at once, or the wrong way round.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread::{self, JoinHandle};
use tablewright::hyperv::{FlushQueue, Pages};
use tablewright::shootdown::{
    Actions, Allocator, Cpu, Cpus, Deferred, Forget, Here, Holder, Identifiers, Identity, Message,
    Messenger, PreemptedFlag, Shootdown, Space, inbox_words,
};
use tablewright::{Invalidation, Pa, What};

const CPUS: usize = 2;
/// What the entry says before the edit, and after it.
const OLD: u64 = 1;
const NEW: u64 = 2;
const COSTS: tablewright::shootdown::Costs = tablewright::shootdown::Costs {
    page: 1,
    space: 10,
    interrupt: 1,
};

fn page(tables: bool) -> Invalidation {
    let what = What::Range {
        first: 0x1000,
        last: 0x1fff,
        level: None,
        tables,
    };
    Invalidation { id: 0, what }
}

/// What a model's threads share: entries, and what the old ones lead to. One for each processor that edits.
struct World {
    shootdown: Shootdown<'static>,
    space: Space<'static>,
    entries: [AtomicU64; CPUS],
    old: [UnsafeCell<()>; CPUS],
    flag: PreemptedFlag,
    /// A processor has no more to do, and waits for the others.
    done: [AtomicBool; CPUS],
}

impl World {
    fn new() -> Arc<Self> {
        // What a thread of a model borrows has to live for ever.
        fn leak<T>(count: usize, make: impl Fn() -> T) -> &'static [T] {
            Vec::leak((0..count).map(|_| make()).collect())
        }
        let inboxes = leak(inbox_words(CPUS), || AtomicU64::new(0));
        let shootdown = Shootdown::new(leak(CPUS, Cpu::new), inboxes, identifiers(3).1, COSTS);
        Arc::new(Self {
            shootdown: shootdown.unwrap(),
            space: Space::new(1, Pa::new(0x1000), leak(1, || AtomicU64::new(0))),
            entries: [AtomicU64::new(OLD), AtomicU64::new(OLD)],
            old: [UnsafeCell::new(()), UnsafeCell::new(())],
            flag: PreemptedFlag::default(),
            done: [AtomicBool::new(false), AtomicBool::new(false)],
        })
    }
}

fn identifiers(
    bits: u32,
) -> (
    &'static Mutex<Allocator<'static>>,
    Option<Identifiers<'static>>,
) {
    let holders = Vec::leak((0..CPUS).map(|_| Holder::new()).collect());
    let allocator = Allocator::new(bits, vec![0; 1].leak()).unwrap();
    let identifiers = Identifiers::new(&allocator, holders);
    (Box::leak(Box::new(Mutex::new(allocator))), identifiers)
}

/// A processor: what it remembers of the entry that another edits.
struct On<'w> {
    world: &'w World,
    cpu: usize,
    /// Whose entry it uses.
    of: usize,
    remembered: RefCell<Option<u64>>,
    /// It has the space loaded, and is not lazy, when it has done what it does.
    uses: Cell<bool>,
    /// It does what others ask.
    asked: Cell<bool>,
    allocator: RefCell<Allocator<'static>>,
}

impl<'w> On<'w> {
    fn new(world: &'w World, cpu: usize, of: usize) -> Self {
        Self {
            world,
            cpu,
            of,
            remembered: RefCell::new(None),
            uses: Cell::new(true),
            asked: Cell::new(false),
            allocator: RefCell::new(Allocator::new(3, vec![0; 1].leak()).unwrap()),
        }
    }

    fn here(&self) -> Here<'w, 'static> {
        self.world.shootdown.on(self.cpu).unwrap()
    }

    fn load(&self, loads: bool) {
        let space = Some(&self.world.space);
        let (from, to) = if loads { (None, space) } else { (space, None) };
        self.here().switch(from, to, self, |_| ());
    }

    /// What the processor, or its walker, goes through.
    fn look(&self) {
        let entry = &self.world.entries[self.of];
        let found = *self
            .remembered
            .borrow_mut()
            .get_or_insert_with(|| entry.load(Ordering::Relaxed));
        if found == OLD {
            self.world.old[self.of].with(|_| ());
        }
    }

    /// Changes the entry of this processor, and gives back what it led to.
    fn edit(&self, tables: bool) {
        self.world.entries[self.cpu].store(NEW, Ordering::Relaxed);
        let deferred = Deferred::new(|cpu| (cpu == 1).then_some(&self.world.flag));
        self.here()
            .flush(&self.world.space, &[page(tables)], &[&deferred], self);
        self.world.old[self.cpu].with_mut(|_| ());
    }

    /// Takes an interrupt.
    fn receive(&self) {
        self.asked.set(true);
        self.here().receive(self);
        self.asked.set(false);
    }

    /// Takes interrupts until the other has no more to do.
    fn attend(&self) {
        self.world.done[self.cpu].store(true, Ordering::Relaxed);
        while !self.world.done[1 - self.cpu].load(Ordering::Relaxed) {
            self.receive();
            thread::yield_now();
        }
    }
}

// SAFETY: no memory depends on it.
unsafe impl Actions for On<'_> {
    fn forget(&self, what: Forget) {
        match what {
            Forget::Range(Invalidation { id, .. }) | Forget::Space(id) => assert_eq!(id, 1),
            Forget::All => {}
        }
        if self.asked.get() {
            // Until now its walker has gone on.
            self.look();
        }
        *self.remembered.borrow_mut() = None;
    }

    fn interrupt(&self, cpus: &Cpus) {
        assert!(cpus.iter().eq([1 - self.cpu]));
    }

    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>)) {
        // One space: who asks first has it all.
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

/// Processor 0 edits, while 1 does `what`, after it has done `before`.
fn while_edited(
    tables: bool,
    before: impl Fn(&On<'_>) + Send + Sync + 'static,
    what: impl Fn(&On<'_>) + Send + Sync + Copy + 'static,
) {
    loom::model(move || {
        let world = World::new();
        let other = On::new(&world, 1, 0);
        // It has used the space, which therefore has an identifier.
        other.load(true);
        other.look();
        before(&other);
        let remembered = other.remembered.take();
        let other = on(&world, move |world| {
            let other = On::new(world, 1, 0);
            *other.remembered.borrow_mut() = remembered;
            what(&other);
            other.attend();
            if other.uses.get() {
                other.look();
            }
        });
        let editor = On::new(&world, 0, 1);
        editor.edit(tables);
        editor.attend();
        other.join().unwrap();
    });
}

#[test]
fn who_has_the_space_loaded_is_told() {
    while_edited(
        false,
        |_| (),
        |other| {
            other.look();
            other.receive();
            other.look();
        },
    );
}

#[test]
fn who_loads_a_space_while_it_is_flushed_is_told_or_knows() {
    while_edited(
        false,
        |other| other.load(false),
        |other| {
            other.load(true);
            other.look();
        },
    );
}

#[test]
fn who_loads_another_space_has_left_before_its_tables_go() {
    while_edited(
        true,
        |_| (),
        |other| {
            let space = Some(&other.world.space);
            other.look();
            // Until another root is loaded, the walker goes on.
            other.here().switch(space, None, other, |_| other.look());
            other.uses.set(false);
        },
    );
}

#[test]
fn who_was_lazy_looks_before_he_uses_the_space() {
    while_edited(
        false,
        |other| other.here().be_lazy(),
        |other| {
            other.here().resume(&other.world.space, other);
            other.look();
        },
    );
}

#[test]
fn who_becomes_lazy_has_made_his_last_use() {
    while_edited(
        false,
        |_| (),
        |other| {
            other.look();
            other.here().be_lazy();
            other.uses.set(false);
        },
    );
}

#[test]
fn who_loads_a_space_is_not_lazy_any_more() {
    while_edited(
        false,
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
fn who_is_lazy_is_told_when_tables_go() {
    while_edited(
        true,
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
fn who_does_not_run_is_flushed_before_he_does() {
    while_edited(
        false,
        |_| (),
        |other| {
            other.look();
            other.world.flag.preempt();
            if other.world.flag.enter() {
                other.forget(Forget::All);
            }
            other.look();
        },
    );
}

#[test]
fn two_who_flush_at_once_do_not_wait_for_each_other() {
    loom::model(|| {
        let world = World::new();
        let start = |world: &World, cpu: usize| {
            let here = On::new(world, cpu, 1 - cpu);
            here.load(true);
            here.look();
            here.remembered.take()
        };
        let remembered = [start(&world, 0), start(&world, 1)];
        let run = move |world: &World, cpu: usize| {
            let here = On::new(world, cpu, 1 - cpu);
            *here.remembered.borrow_mut() = remembered[cpu];
            here.edit(false);
            here.look();
            here.attend();
            here.look();
        };
        let other = on(&world, move |world| run(world, 1));
        run(&world, 0);
        other.join().unwrap();
    });
}

// ---- Identifiers ----

/// Three identifiers for two processors.
struct Ids {
    identifiers: Identifiers<'static>,
    allocator: &'static Mutex<Allocator<'static>>,
    spaces: [Identity; 4],
}

impl Ids {
    fn new() -> Arc<Self> {
        let (allocator, identifiers) = identifiers(2);
        Arc::new(Self {
            identifiers: identifiers.unwrap(),
            allocator,
            spaces: std::array::from_fn(|_| Identity::new()),
        })
    }

    /// A processor loads a space. It remembers what it had under which identifier.
    fn load(&self, cpu: usize, space: usize, remembered: &mut Vec<(u16, usize)>) -> u16 {
        let mut forgets = false;
        let id = self.identifiers.load(
            cpu,
            &self.spaces[space],
            |with| with(&mut self.allocator.lock().unwrap()),
            || forgets = true,
        );
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

/// All identifiers are given; processor 0 loads spaces that have none, while 1 goes back to one that has.
fn roll_over(loads: &'static [usize]) {
    loom::model(move || {
        let ids = Ids::new();
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let _ = ids.load(1, 0, &mut second);
        let _ = ids.load(1, 1, &mut second);
        let _ = ids.load(0, 2, &mut first);
        let other = {
            let ids = Arc::clone(&ids);
            thread::spawn(move || ids.load(1, 0, &mut second))
        };
        let mut last = (2, 0);
        for &space in loads {
            last = (space, ids.load(0, space, &mut first));
        }
        let id = other.join().unwrap();
        // Each is in use.
        assert_eq!(last.0 == 0, last.1 == id);
    });
}

#[test]
fn an_identifier_that_is_being_loaded_is_not_given_to_another() {
    roll_over(&[3]);
}

#[test]
fn a_new_identifier_is_not_loaded_over_what_was_there() {
    roll_over(&[3, 0]);
}

/// Hardware that tells everybody: what processor 1 remembers, under which identifier. A walk does not overlap an invalidation.
struct Broadcast(Arc<Mutex<Option<(u16, u64)>>>);

impl Messenger for Broadcast {
    fn tell(&self, message: &Message<'_>, cpus: &mut Cpus) {
        self.0.lock().unwrap().take_if(|(id, _)| *id == message.id);
        cpus.clear();
    }

    fn reaches_all(&self) -> bool {
        true
    }
}

#[test]
fn who_tells_everybody_knows_the_identifier_or_is_too_early_to_matter() {
    loom::model(|| {
        let world = World::new();
        let tlb = Arc::new(Mutex::new(None));
        let other = {
            let tlb = Arc::clone(&tlb);
            on(&world, move |world| {
                let other = On::new(world, 1, 0);
                let mut loaded = 0;
                other
                    .here()
                    .switch(None, Some(&world.space), &other, |id| loaded = id);
                for _ in 0..2 {
                    let mut tlb = tlb.lock().unwrap();
                    let walk = || (loaded, world.entries[0].load(Ordering::Relaxed));
                    if tlb.get_or_insert_with(walk).1 == OLD {
                        world.old[0].with(|_| ());
                    }
                }
            })
        };
        let editor = On::new(&world, 0, 1);
        world.entries[0].store(NEW, Ordering::Relaxed);
        editor
            .here()
            .flush(&world.space, &[page(true)], &[&Broadcast(tlb)], &editor);
        world.old[0].with_mut(|_| ());
        other.join().unwrap();
    });
}

// ---- What a host has queued for a virtual processor ----

/// Editors push into a queue with room for one range, and do not wait for a virtual processor that does not run.
fn queued(editors: usize, all: bool) {
    struct Host {
        queue: FlushQueue<1>,
        runs: AtomicBool,
        entries: [AtomicU64; 2],
        old: [UnsafeCell<()>; 2],
    }
    fn edit(host: &Host, number: usize, all: bool) {
        host.entries[number].store(NEW, Ordering::Relaxed);
        let page = Pages {
            first: (number as u64) << 12,
            count: 1,
            size: 4096,
        };
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
                // What is found now is remembered the next time. With two editors that is too much to look through; and where an exchange
                // and a plain store meet, loom lets the exchange read what the store has replaced and stand behind it all the same.
                for _ in editors + usize::from(all)..3 {
                    host.runs.store(true, Ordering::Relaxed);
                    loom::sync::atomic::fence(Ordering::SeqCst);
                    if host
                        .queue
                        .take(|pages| remembered[(pages.first >> 12) as usize] = None)
                    {
                        remembered = [None; 2];
                    }
                    for number in 0..editors {
                        let walk = || host.entries[number].load(Ordering::Relaxed);
                        if *remembered[number].get_or_insert_with(walk) == OLD {
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
