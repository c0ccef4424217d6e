//! More CPUs than a word has bits, memory that was used before, and waits for other CPUs.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

/// More than there are bits in a word.
const MANY: usize = 70;

/// A CPU of a machine that remembers what each of them was told, and takes interrupts at once.
struct Plain<'s, 'm> {
    shootdown: &'s Shootdown<'m>,
    cpu: usize,
    told: &'s RefCell<Vec<(usize, LocalFlush)>>,
    /// Runs on the CPU that interrupts, and then those that are interrupted.
    before: Option<&'s dyn Fn()>,
}

impl<'s, 'm> Plain<'s, 'm> {
    fn of(&self, cpu: usize) -> Self {
        Self { cpu, before: None, ..*self }
    }

    fn here(&self) -> PerCpu<'_, 'm> {
        // SAFETY: one thread plays all CPUs (1.), without handlers (2.), by the test (3., 4.).
        unsafe { self.shootdown.on(self.cpu) }.unwrap()
    }

    fn load(&self, space: &Space<'_>) {
        self.here().switch(None, Some(space), self, |_| ()).unwrap();
    }

    /// Flushes a page of a space.
    fn flush(&self, space: &Space<'_>) {
        self.here().flush(space, &of(What::Ranges(&[range(3, 1, false)]), false), &[], self);
    }
}

// SAFETY: no memory depends on it.
unsafe impl Actions for Plain<'_, '_> {
    fn flush_local(&self, what: LocalFlush) {
        self.told.borrow_mut().push((self.cpu, what));
    }

    fn interrupt(&self, cpus: &Cpus) {
        self.before.iter().for_each(|before| before());
        cpus.iter().for_each(|cpu| self.of(cpu).here().receive(&self.of(cpu)));
    }

    fn allocator(&self, _: &mut dyn FnMut(&mut Allocator<'_>)) {
        panic!("there are no identifiers");
    }

    fn relax(&self) {
        panic!("CPU {} waits", self.cpu);
    }
}

fn words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

#[test]
fn cpus_beyond_a_word_tell_and_are_told() {
    let mut cells: Vec<_> = (0..MANY).map(|_| CpuCell::new()).collect();
    let mut inboxes = words(inbox_words(MANY));
    let mut set = words(Space::words(MANY));
    let shootdown = Shootdown::new(&mut cells, &mut inboxes, None, 10).unwrap();
    let told = RefCell::default();
    let machine = Plain { shootdown: &shootdown, cpu: 0, told: &told, before: None };
    let space = Space::new(Pa::new(0x1000), &mut set);
    let all = [1, 63, 64, 65, 69];
    all.iter().for_each(|&cpu| machine.of(cpu).load(&space));
    told.take();
    for sender in all {
        machine.of(sender).flush(&space);
        let mut told: Vec<_> = told.take().into_iter().map(|(cpu, _)| cpu).collect();
        told.sort();
        assert_eq!(told, all, "from CPU {sender}");
    }
}

/// An embedder makes a second machine of the memory of the first, with messages still in it.
#[test]
fn memory_of_before_means_nothing() {
    let mut cells: Vec<_> = (0..3).map(|_| CpuCell::new()).collect();
    let mut inboxes = words(inbox_words(3));
    inboxes.iter_mut().for_each(|word| *word.get_mut() = 0b111);
    let (mut set, mut other) = (words(Space::words(3)), words(Space::words(3)));
    let (told, space) = (RefCell::default(), Space::new(Pa::new(0x1000), &mut set));
    for _ in 0..2 {
        let shootdown = Shootdown::new(&mut cells, &mut inboxes, None, 10).unwrap();
        let machine = Plain { shootdown: &shootdown, cpu: 0, told: &told, before: None };
        (0..3).for_each(|cpu| machine.of(cpu).here().receive(&machine.of(cpu)));
        // Nothing is loaded, and all are online.
        assert_eq!(told.take(), []);
        machine.of(1).here().flush(&space, &of(What::Everything, true), &[], &machine.of(1));
        assert_eq!(told.take().len(), 3);
        machine.of(1).load(&space);
        machine.of(2).here().go_offline(&machine.of(2));
        told.take();
    }
    other.iter_mut().for_each(|word| *word.get_mut() = 0b111);
    assert!(Space::new(Pa::new(0x2000), &mut other).is_idle());
}

#[test]
fn there_may_be_as_many_cpus_as_a_set_has() {
    let mut cells: Vec<_> = (0..=Cpus::MOST).map(|_| CpuCell::new()).collect();
    let mut inboxes = words(inbox_words(Cpus::MOST + 1));
    assert!(Shootdown::new(&mut cells, &mut inboxes, None, 10).is_none());
    assert!(Shootdown::new(&mut cells[1..], &mut inboxes, None, 10).is_some());
    let few = inbox_words(Cpus::MOST) - 1;
    assert!(Shootdown::new(&mut cells[1..], &mut inboxes[..few], None, 10).is_none());
}

/// A CPU without a holder would have every space under one identifier, and forget none of them.
#[test]
fn every_cpu_has_a_holder_of_an_identifier() {
    let mut cells: Vec<_> = (0..3).map(|_| CpuCell::new()).collect();
    let mut inboxes = words(inbox_words(3));
    for (holders, enough) in [(2, false), (3, true), (4, true)] {
        let mut memory = [0; Allocator::words(8)];
        let allocator = Allocator::new(8, &mut memory).unwrap();
        let mut holders: Vec<_> = (0..holders).map(|_| Holder::new()).collect();
        let identifiers = Identifiers::new(&allocator, &mut holders);
        assert!(identifiers.is_some());
        let shootdown = Shootdown::new(&mut cells, &mut inboxes, identifiers, 10);
        assert_eq!(shootdown.is_some(), enough);
    }
}

/// A CPU goes offline while another is about to tell it something: it waits, and executes what it
/// is told meanwhile.
#[test]
fn a_cpu_does_not_go_offline_in_a_flush_of_another() {
    let mut cells: Vec<_> = (0..3).map(|_| CpuCell::new()).collect();
    let mut inboxes = words(inbox_words(3));
    let mut set = words(Space::words(3));
    let shootdown = Shootdown::new(&mut cells, &mut inboxes, None, 10).unwrap();
    let told = RefCell::default();
    let machine = Plain { shootdown: &shootdown, cpu: 0, told: &told, before: None };
    let space = Space::new(Pa::new(0x1000), &mut set);
    (1..3).for_each(|cpu| machine.of(cpu).load(&space));
    told.take();
    let goes = Cell::new(false);
    let go = || {
        let gone = catch_unwind(AssertUnwindSafe(|| {
            machine.of(2).here().go_offline(&machine.of(2));
        }));
        // It has waited, and heard of the flush before.
        assert!(gone.is_err());
        assert_eq!(told.borrow().len(), 1);
        goes.set(true);
    };
    Plain { before: Some(&go), ..machine.of(1) }.flush(&space);
    assert!(goes.get());
    assert_eq!(told.take().iter().map(|(cpu, _)| *cpu).collect::<Vec<_>>(), [2, 1]);
    // Its own flush is none of another's.
    let go = || machine.of(1).here().go_offline(&machine.of(1));
    Plain { before: Some(&go), ..machine.of(1) }.flush(&space);
}

/// A CPU with interrupts held off, in a thread of its own. A handler that came before flushes too.
struct HeldOff<'s, 'm> {
    here: PerCpu<'s, 'm>,
    space: &'s Space<'m>,
    in_handler: Cell<bool>,
    told: Cell<u32>,
}

impl HeldOff<'_, '_> {
    fn flush(&self) {
        self.here.flush(self.space, &of(What::Ranges(&[range(3, 1, false)]), false), &[], self);
    }
}

// SAFETY: no memory depends on it.
unsafe impl Actions for HeldOff<'_, '_> {
    fn flush_local(&self, _: LocalFlush) {
        self.told.set(self.told.get() + 1);
    }

    fn interrupt(&self, _: &Cpus) {
        if !self.in_handler.replace(true) {
            self.flush();
            self.in_handler.set(false);
        }
    }

    fn allocator(&self, _: &mut dyn FnMut(&mut Allocator<'_>)) {}

    fn relax(&self) {
        std::thread::yield_now();
    }
}

#[test]
fn cpus_that_wait_for_each_other_are_told_meanwhile() {
    const FLUSHES: u32 = 50;
    let mut cells: Vec<_> = (0..2).map(|_| CpuCell::new()).collect();
    let mut inboxes = words(inbox_words(2));
    let mut set = words(Space::words(2));
    let shootdown = Shootdown::new(&mut cells, &mut inboxes, None, 10).unwrap();
    let space = Space::new(Pa::new(0x1000), &mut set);
    let (begun, done) = (std::sync::Barrier::new(2), AtomicU64::new(0));
    std::thread::scope(|threads| {
        for cpu in 0..2 {
            let (shootdown, space, begun, done) = (&shootdown, &space, &begun, &done);
            threads.spawn(move || {
                // SAFETY: a thread for each CPU (1.) without handlers (2.), by the test (3., 4.).
                let here = unsafe { shootdown.on(cpu) }.unwrap();
                let me = HeldOff { here, space, in_handler: Cell::new(false), told: Cell::new(0) };
                me.here.switch(None, Some(space), &me, |_| ()).unwrap();
                begun.wait();
                (0..FLUSHES).for_each(|_| me.flush());
                done.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                while done.load(std::sync::atomic::Ordering::SeqCst) < 2 {
                    me.here.receive(&me);
                    me.relax();
                }
                assert!(me.told.get() >= 2 * FLUSHES);
            });
        }
    });
}
