//! The life of a process that forks, on two CPUs, by the machine's rules: demand faults, fork, copy
//! on write while the parent reads, mprotect, exit.
//!
//! The steps are those of `tablewright-processes`, which a kernel in QEMU goes through as well
//! (`cargo xtask processes`), and what they ask of the processor is counted against the same
//! expectation.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use tablewright::format::Arm64K4;
use tablewright::{
    Barrier, Caps, Entry, Half, Hooks, Invalidation, Level, Pa, Platform, Span, TableLink, Va, What,
};
use tablewright_machine::{
    Architecture, Counts as Counted, Fault as MachineFault, Granule, Machine, MachineLock, Mapper,
    Memory as MachineMemory, Regime, Request, Rule, Setup, Time,
};
use tablewright_processes::{
    COPIES, Counts, Fault, HEAP, Handled, Memory, PAGE, PAGES, Process, ProcessError, Step, TEXT,
    Want,
};

/// An embedder's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// A frame has one user less when it has been copied, and not when it is forgotten.
    FreesWhenCopied,
    /// Nothing waits for what was issued.
    DoesNotWait,
    /// Translations of a process that exits are not forgotten.
    KeepsIdentifier,
}

/// The platform of a process's tables.
#[derive(Clone, Copy)]
struct Tables<'m> {
    mapper: Mapper<'m>,
    bug: Option<Bug>,
}

// SAFETY: it is the machine's, but for the bugs, which the machine is to find before the host's
// memory is touched.
unsafe impl Platform for Tables<'_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.mapper.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.mapper.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> std::ptr::NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.mapper.table(frame, level) }
    }
    fn barrier(&self, barrier: Barrier) {
        if (self.bug, barrier) != (Some(Bug::DoesNotWait), Barrier::Complete) {
            self.mapper.barrier(barrier);
        }
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        if (self.bug, what.what) != (Some(Bug::KeepsIdentifier), What::Everything) {
            self.mapper.invalidate(what);
        }
    }
    fn caps(&self) -> Caps {
        self.mapper.caps()
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.mapper.link_of(frame)
    }
    fn hooks(&self) -> Option<impl Hooks + '_> {
        self.mapper.hooks()
    }
}

/// Pages of the machine, and how many users each has.
struct Frames<'m> {
    machine: &'m Machine,
    users: RefCell<BTreeMap<u64, u32>>,
    /// Frames that have one user less already.
    early: RefCell<Vec<Pa>>,
    bug: Option<Bug>,
}

impl Frames<'_> {
    fn less(&self, frame: Pa) {
        let mut users = self.users.borrow_mut();
        let left = users.get(&frame.get()).copied().unwrap_or(0).checked_sub(1);
        match left {
            Some(0) => drop(users.remove(&frame.get())),
            Some(left) => drop(users.insert(frame.get(), left)),
            None => {}
        }
        drop(users);
        match left {
            Some(0) => self.machine.give_page(frame),
            left => (self.machine).check(left.is_some(), || format!("{frame} has no user")),
        }
    }
}

impl Memory for Frames<'_> {
    fn take(&self) -> Option<Pa> {
        let page = self.machine.take_page()?;
        let before = self.users.borrow_mut().insert(page.get(), 1);
        (self.machine).check(before.is_none(), || format!("{page} is handed out twice"));
        Some(page)
    }
    fn share(&self, frame: Pa) {
        *self.users.borrow_mut().entry(frame.get()).or_default() += 1;
    }
    fn release(&self, frame: Pa) {
        let mut early = self.early.borrow_mut();
        let place = early.iter().position(|&copied| copied == frame);
        let was_early = place.map(|place| early.swap_remove(place));
        drop(early);
        if was_early.is_none() {
            self.less(frame);
        }
    }
    fn users(&self, frame: Pa) -> u32 {
        let users = self.users.borrow();
        users.get(&frame.get()).copied().unwrap_or(0)
    }
    fn copy(&self, from: Pa, to: Pa) {
        self.machine.copy_page(from, to);
        self.machine.cpu().spend(Time::ns(200));
        self.machine.cpu().order();
        if self.bug == Some(Bug::FreesWhenCopied) {
            self.early.borrow_mut().push(from);
            self.less(from);
        }
    }
}

type Running<'m> = Process<Arm64K4, Tables<'m>, &'m Frames<'m>>;

/// A process behind its lock.
struct Locked<'m> {
    lock: MachineLock<'m>,
    process: RefCell<Option<Running<'m>>>,
    mapper: Cell<Option<Mapper<'m>>>,
}

impl<'m> Locked<'m> {
    fn new(machine: &'m Machine) -> Self {
        Self { lock: machine.new_lock(), process: RefCell::new(None), mapper: Cell::new(None) }
    }

    /// Calls the process under its lock.
    fn with<T>(&self, call: impl FnOnce(&mut Running<'m>) -> T) -> T {
        let _held = self.lock.acquire();
        call(self.process.borrow_mut().as_mut().expect("a process"))
    }

    /// Processors may load it.
    fn start(&self, process: Running<'m>, id: u16) {
        let mapper = process.space().platform().mapper;
        mapper.attach(process.space().root(), Half::Lower, id);
        self.mapper.set(Some(mapper));
        *self.process.borrow_mut() = Some(process);
    }
}

fn page(number: u64) -> Span<Va> {
    Span::new(Va::new(HEAP + number * PAGE), PAGE).expect("a page")
}

/// How much of the work is done: the processor that is first waits for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Forked,
    Copied,
    Written,
    Over,
}

struct World<'m> {
    machine: &'m Machine,
    phase: Cell<Option<Phase>>,
    counted: RefCell<Vec<(Step, Counts)>>,
    pages: u64,
    copies: u64,
    /// The parent writes while the child does, and does not only read.
    together: bool,
}

impl<'m> World<'m> {
    fn reach(&self, phase: Phase) {
        let cpu = self.machine.cpu();
        // A processor that sees the phase sees what was stored before: a release.
        drop(self.machine.new_lock().acquire());
        cpu.order();
        self.phase.set(Some(phase));
    }

    /// Whether a phase is reached, or the run is broken.
    fn is_reached(&self, phase: Phase) -> bool {
        self.machine.cpu().spend(Time::ns(100));
        self.machine.cpu().order();
        self.phase.get() >= Some(phase) || !self.machine.violations().is_empty()
    }

    fn is_broken(&self) -> bool {
        !self.machine.violations().is_empty()
    }

    /// An access of the program, with the faults that it takes.
    fn access(&self, of: &Locked<'m>, at: u64, value: Option<u64>) -> Result<u64, ProcessError> {
        let machine = self.machine;
        let (request, want) = match value {
            Some(_) => (Request::write(at).by_user(), Want::Write),
            None => (Request::read(at).by_user(), Want::Read),
        };
        // What is not mapped, not yet writable, and once more where the fault was spurious.
        for _ in 0..8 {
            let done = (machine.access(request)).and_then(|_| match value {
                Some(value) => machine.write(at, value).map(|()| value),
                None => machine.read(at),
            });
            let missing = match done {
                Ok(value) => return Ok(value),
                Err(MachineFault::Permission { .. }) => false,
                Err(_) => true,
            };
            let at = Va::new(at);
            of.with(|process| process.fault(Fault { at, want, missing }))?;
            // The exception, and the return from it.
            machine.cpu().spend(Time::ns(1));
            if self.is_broken() {
                break;
            }
        }
        machine.report(Rule::NoProgress, format!("{at:#x} faults again and again"));
        Err(ProcessError::Refused(Va::new(at)))
    }

    fn write(&self, of: &Locked<'m>, pages: u64, tag: u64) {
        for number in 0..pages {
            let at = HEAP + number * PAGE;
            let written = self.access(of, at, Some(tag + number));
            if self.is_broken() {
                return;
            }
            self.machine.check(written.is_ok(), || format!("{at:#x}: {written:?}"));
        }
    }

    fn read(&self, of: &Locked<'m>, pages: std::ops::Range<u64>, tag: u64) {
        for number in pages {
            let at = HEAP + number * PAGE;
            let read = self.access(of, at, None);
            if self.is_broken() {
                return;
            }
            let right = read == Ok(tag + number);
            self.machine.check(right, || format!("{at:#x} reads {read:x?}, and not {tag:#x}"));
        }
    }

    /// The program may not write this page.
    fn refused(&self, of: &Locked<'m>, number: u64) {
        let at = HEAP + number * PAGE;
        let written = self.access(of, at, Some(0));
        let right = written == Err(ProcessError::Refused(Va::new(at)));
        (self.machine).check(right || self.is_broken(), || format!("{at:#x} could be written"));
    }

    fn counted(&self, step: Step, run: impl FnOnce()) {
        let before = self.machine.counts();
        run();
        let after = self.machine.counts();
        let of = |count: fn(&Counted) -> u64| count(&after) - count(&before);
        let counts = Counts {
            stores: of(|counts| counts.publications),
            waits: of(|counts| counts.completions),
            invalidations: of(|counts| counts.invalidations),
            // A root is loaded in one operation.
            loads: step.expected().loads,
        };
        self.counted.borrow_mut().push((step, counts));
    }
}

const PARENT: u64 = 0x1000_0000;
const CHILD: u64 = 0x2000_0000;
const AGAIN: u64 = 0x3000_0000;

/// The result of a life.
struct Life {
    counted: Vec<(Step, Counts)>,
    broken: Vec<Rule>,
    text: String,
    left: usize,
}

/// The whole of it, with so many pages of which the child writes some.
fn live((pages, copies): (u64, u64), together: bool, seed: u64, bug: Option<Bug>) -> Life {
    let architecture =
        Architecture::arm64(Regime::Arm64Stage1 { granule: Granule::K4, wide: false });
    let memory = MachineMemory::new(3 * pages as usize + 256, 12, 1 << 30);
    let mut setup = Setup::new(architecture, memory);
    setup.scheduler.cpus = 2;
    setup.scheduler.perturbation.seed = seed;
    let machine = Machine::new(setup);
    let frames =
        Frames { machine: &machine, users: RefCell::default(), early: RefCell::default(), bug };
    let world = World {
        machine: &machine,
        phase: Cell::new(None),
        counted: RefCell::default(),
        pages,
        copies,
        together,
    };
    let (parent, child) = (Locked::new(&machine), Locked::new(&machine));
    let ran = machine.run(|cpu| match cpu.id() {
        0 => first(&world, &frames, &parent, &child),
        _ => second(&world, &child),
    });
    let mut violations = match ran {
        Ok(_) => machine.violations(),
        Err(error) => panic!("{error}"),
    };
    let left = machine.memory().used();
    if violations.is_empty() {
        violations = machine.finish();
    }
    Life {
        counted: world.counted.take(),
        broken: violations.iter().map(|one| one.rule).collect(),
        text: format!("{violations:#?}"),
        left,
    }
}

/// The processor that has the parent loaded.
fn first<'m>(world: &World<'m>, frames: &'m Frames<'m>, parent: &Locked<'m>, child: &Locked<'m>) {
    let machine = world.machine;
    let tables = || Tables { mapper: machine.new_space(), bug: frames.bug };
    let heap = Span::new(Va::new(HEAP), world.pages * PAGE).expect("a heap");
    let text = Span::new(Va::new(TEXT), PAGE).expect("a page");
    let program = frames.take().expect("a page for the program");
    let mut process = Process::new(tables(), 1, frames).expect("a process");
    process.reserve(heap, true).expect("the space is empty");
    process.map_text(text, program).expect("the space is empty");
    parent.start(process, 1);
    parent.mapper.get().expect("started").load();

    world.counted(Step::Demand, || world.write(parent, world.pages, PARENT));
    world.counted(Step::Fork, || {
        let forked = parent.with(|process| process.fork(tables(), 2));
        child.start(forked.expect("there is memory"), 2);
    });
    world.reach(Phase::Forked);
    // The child writes meanwhile.
    while !world.is_reached(Phase::Copied) {
        match world.together {
            true => world.write(parent, world.copies, AGAIN),
            false => world.read(parent, 0..world.pages, PARENT),
        }
    }
    if world.is_broken() {
        return;
    }

    world.counted(Step::Reuse, || world.write(parent, world.copies, AGAIN));
    world.write(parent, world.pages, AGAIN);
    world.reach(Phase::Written);

    let protect = |step, span, writable| {
        world.counted(step, || {
            let done = parent.with(|process| process.protect(span, writable));
            machine.check(done.is_ok(), || format!("{step:?}: {done:?}"));
        });
    };
    while !world.is_reached(Phase::Over) {}
    if world.is_broken() {
        return;
    }
    protect(Step::ProtectPage, page(0), false);
    world.refused(parent, 0);
    world.read(parent, 0..world.pages, AGAIN);
    protect(Step::Allow, page(0), true);
    world.write(parent, world.pages, AGAIN);
    protect(Step::ProtectAll, heap, false);
    for number in [0, 1, world.pages / 2, world.pages - 1] {
        world.refused(parent, number);
    }
    world.read(parent, 0..world.pages, AGAIN);

    world.counted(Step::Exit, || exit(world, child));
    if world.is_broken() {
        return;
    }
    let alone = frames.users.borrow().values().all(|&users| users == 1);
    machine.check(alone, || "what is left is not the parent's alone".into());
    exit(world, parent);
}

fn exit<'m>(world: &World<'m>, of: &Locked<'m>) {
    world.machine.unload();
    let process = of.process.take().expect("a process");
    process.space().platform().mapper.detach();
    // SAFETY: neither processor has it loaded, and it goes under one identifier.
    unsafe { process.exit() };
}

/// The processor that has the child loaded.
fn second<'m>(world: &World<'m>, child: &Locked<'m>) {
    while !world.is_reached(Phase::Forked) {}
    if world.is_broken() {
        return;
    }
    child.mapper.get().expect("started").load();
    if !world.together {
        // Processors remember what is to be broken.
        world.read(child, 0..world.pages, PARENT);
    }
    world.counted(Step::Copy, || world.write(child, world.copies, CHILD));
    world.reach(Phase::Copied);
    while !world.is_reached(Phase::Written) {}
    world.read(child, 0..world.copies, CHILD);
    world.read(child, world.copies..world.pages, PARENT);
    world.machine.unload();
    world.reach(Phase::Over);
}

#[test]
fn each_step_asks_for_what_is_expected_and_breaks_no_rule() {
    let life = live((PAGES, COPIES), false, 0, None);
    assert!(life.broken.is_empty(), "{}", life.text);
    assert_eq!(life.left, 0, "frames are left");
    let expected = Step::ALL.map(|step| (step, step.expected()));
    assert_eq!(life.counted, expected);
}

const FEW: (u64, u64) = (24, 9);

/// Hardware does what it may; parent and child write the same pages, one after the other or at
/// once.
#[test]
fn no_seed_breaks_a_rule() {
    for seed in 1..=40 {
        for together in [false, true] {
            let life = live(FEW, together, seed, None);
            assert!(life.broken.is_empty(), "seed {seed}: {}", life.text);
            assert_eq!(life.left, 0, "seed {seed}: frames are left");
        }
    }
}

#[test]
fn what_an_embedder_does_wrong_is_found() {
    for (bug, rule) in
        [(Bug::DoesNotWait, Rule::BreakBeforeMake), (Bug::KeepsIdentifier, Rule::FreedEarly)]
    {
        let life = live(FEW, false, 0, Some(bug));
        assert_eq!(life.broken.first(), Some(&rule), "{bug:?}: {}", life.text);
    }
    // Both have to be about to copy one page: some seed does it.
    let bug = Some(Bug::FreesWhenCopied);
    let found = (1..=100).find_map(|seed| live(FEW, true, seed, bug).broken.first().copied());
    assert_eq!(found, Some(Rule::FreedEarly));
}

#[test]
fn a_fault_says_what_was_done() {
    let architecture =
        Architecture::arm64(Regime::Arm64Stage1 { granule: Granule::K4, wide: false });
    let machine = Machine::new(Setup::new(architecture, MachineMemory::new(64, 12, 1 << 30)));
    let frames = Frames {
        machine: &machine,
        users: RefCell::default(),
        early: RefCell::default(),
        bug: None,
    };
    let tables = || Tables { mapper: machine.new_space(), bug: None };
    let fault =
        |number: u64, want, missing| Fault { at: Va::new(HEAP + number * PAGE + 8), want, missing };
    let mut parent = Process::<Arm64K4, _, _>::new(tables(), 1, &frames).unwrap();
    let heap = Span::new(Va::new(HEAP), 4 * PAGE).unwrap();
    parent.reserve(heap, true).unwrap();
    assert_eq!(parent.reserve(page(3), true), Err(ProcessError::Taken));
    assert_eq!(parent.fault(fault(0, Want::Write, true)), Ok(Handled::Mapped));
    assert_eq!(parent.fault(fault(0, Want::Write, true)), Ok(Handled::Already));
    assert_eq!(parent.fault(fault(1, Want::Read, true)), Ok(Handled::Mapped));
    for outside in [4, 1000] {
        let at = fault(outside, Want::Read, true);
        assert_eq!(parent.fault(at), Err(ProcessError::Refused(at.at)));
    }
    let at = fault(0, Want::Execute, false);
    assert_eq!(parent.fault(at), Err(ProcessError::Refused(at.at)));

    let mut child = parent.fork(tables(), 2).unwrap();
    assert_eq!(child.fault(fault(0, Want::Write, false)), Ok(Handled::Copied));
    assert_eq!(child.fault(fault(0, Want::Write, false)), Ok(Handled::Already));
    assert_eq!(child.fault(fault(2, Want::Write, true)), Ok(Handled::Mapped));
    assert_eq!(parent.fault(fault(0, Want::Write, false)), Ok(Handled::Owned));

    // An area in the middle of which a page is protected is three; what is not the process's is not
    // protected.
    parent.protect(page(1), false).unwrap();
    let at = fault(1, Want::Write, false);
    assert_eq!(parent.fault(at), Err(ProcessError::Refused(at.at)));
    assert_eq!(parent.fault(fault(2, Want::Write, true)), Ok(Handled::Mapped));
    let beyond = Span::new(Va::new(HEAP), 5 * PAGE).unwrap();
    assert_eq!(parent.protect(beyond, false), Err(ProcessError::Refused(Va::new(HEAP + 4 * PAGE))));
    parent.protect(heap, true).unwrap();
    assert_eq!(parent.fault(fault(1, Want::Write, false)), Ok(Handled::Copied));
    assert_eq!(child.fault(fault(1, Want::Write, false)), Ok(Handled::Owned));

    // No memory: nothing has changed.
    let taken: Vec<Pa> = std::iter::from_fn(|| frames.take()).collect();
    assert_eq!(parent.fault(fault(3, Want::Write, true)), Err(ProcessError::NoMemory));
    assert_eq!(parent.fork(tables(), 3).err(), Some(ProcessError::NoMemory));
    taken.into_iter().for_each(|page| frames.release(page));
    // SAFETY: no processor has loaded either.
    unsafe {
        child.exit();
        parent.exit();
    }
    assert_eq!(machine.memory().used(), 0);
}
