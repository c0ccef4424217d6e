//! Remote flushes: CPUs go from space to space, are lazy, are taken off by a hypervisor, and edit
//! spaces that others have loaded. Hardware tells no CPU, or all, and a program tells the rest, in
//! every way there is.
//!
//! Each page holds the number of its space, so that a CPU that finds another has come to where it
//! must not.

mod messengers;

use std::cell::{Cell, OnceCell, RefCell};
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;

use tablewright::hyperv::{
    self, FlushEncoder, HostCaps, Hypercall, Hypercalls, Input, Output, PAGE_WORDS, Status,
};
use tablewright::shootdown::{
    Actions, Allocator, Batch, CpuCell, Cpus, Deferred, Holder, Identifiers, LocalFlush, Messenger,
    PerCpu, PreemptedFlag, Shootdown, Space, amd, arm64, inbox_words,
};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, Entry, Format, Half, Hooks, Invalidation, Level,
    Mapping, Pa, Platform, Span, TableLink, Va, What,
};
use tablewright_machine::{Cpu, CpuState, Globals, Machine, Mapper, Outcome, RunError, Tlbi};
use tablewright_machine::{Granule, Regime, Time};

use super::{Dice, announce, check_no_frames};
use messengers::{Handler, Link, Of, Running};

pub const MOST_CPUS: u64 = 16;
/// Spaces at a time, and in all.
const SLOTS: usize = 4;
const SPACES: usize = 60;
/// Pages of a space, in two tables, and large leaves of memory that the machine does not have.
const PAGES: u64 = 6;
const BLOCKS: u64 = 12;
const FAR: u64 = 1 << 44;
/// The address of a space's page that is global, if it has one: no two spaces have theirs at the
/// same place.
const GLOBAL: u64 = 1 << 43;

/// How CPUs are told, besides by interrupts.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Interrupts,
    Hypercall,
    Deferred,
    Both,
    Amd,
    Arm64,
}

/// Knowledge of all CPUs, whatever the format.
struct Kernel<'a, 'm> {
    machine: &'m Machine,
    shootdown: &'a Shootdown<'a>,
    allocator: RefCell<Allocator<'a>>,
    /// Spaces that there are.
    links: RefCell<Vec<Rc<Link<'a, 'm>>>>,
    flags: Vec<PreemptedFlag>,
    /// The input page of each CPU.
    inputs: Vec<RefCell<[u64; PAGE_WORDS]>>,
    way: Way,
    /// Loads of roots keep what is remembered under other identifiers.
    identified: bool,
    hypercall: u64,
    /// See [`Caps::invalidate_all_above`].
    all_above: u64,
    amd: (u16, u64),
    arm64: arm64::Encoder,
    /// The hypervisor refuses every so many calls.
    refuses: u64,
    calls: Cell<u64>,
    /// Flushes of each CPU that are under way: one, and those of handlers in it.
    flushes: Vec<Cell<u32>>,
    /// The handler that interrupts a flush.
    handler: Cell<Option<Handler>>,
    dice: Dice,
}

/// A space, and what its tables map.
struct Process<'a, 'm, F: Format> {
    link: Rc<Link<'a, 'm>>,
    tables: RefCell<AddressSpace<F, Of<'a, 'm>>>,
}

impl<F: Format> Process<'_, '_, F> {
    fn space(&self) -> &Space<'_> {
        self.link.space.get().expect("it is set when it is made")
    }

    fn add_user(&self, count: i32) {
        let users = &self.link.users;
        users.set(users.get().wrapping_add_signed(count));
    }
}

type Shared<'a, 'm, F> = Rc<Process<'a, 'm, F>>;

/// All spaces, in slots.
struct Program<'k, 'a, 'm, F: Format> {
    kernel: &'a Kernel<'a, 'm>,
    slots: &'k [RefCell<Option<Shared<'a, 'm, F>>>],
    /// Those that no space has had.
    sets: &'k RefCell<std::slice::IterMut<'a, [AtomicU64; 1]>>,
    last: &'k Cell<u64>,
    /// The number of slots in use.
    most: u64,
    /// Some spaces have a page that is global.
    global: bool,
}

/// The place of a CPU.
struct At<'a, 'm, F: Format> {
    process: Option<Shared<'a, 'm, F>>,
    state: CpuState,
}

pub fn run<F: Format<Input = Va>>(
    machine: &Machine,
    dice: &Dice,
    cpus: usize,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    let mut shots: Vec<CpuCell> = (0..cpus).map(|_| CpuCell::new()).collect();
    let mut holders: Vec<Holder> = (0..cpus).map(|_| Holder::new()).collect();
    let mut inboxes: Vec<AtomicU64> = (0..inbox_words(cpus)).map(|_| AtomicU64::new(0)).collect();
    let mut sets: Vec<[AtomicU64; 1]> = (1..SPACES).map(|_| [AtomicU64::new(0)]).collect();
    // As few identifiers as will do.
    let bits = (2 * cpus + 2).next_power_of_two().trailing_zeros();
    let mut memory = vec![0; Allocator::words(bits)];
    let allocator = Allocator::new(bits, &mut memory).expect("so many bits");
    let identifiers = Identifiers::new(&allocator, &mut holders).expect("so many identifiers");
    let x86 = machine.architecture().is_x86();
    let way = match (x86, dice.below(6)) {
        (false, _) => Way::Arm64,
        (true, 0) => Way::Interrupts,
        (true, 1) => Way::Hypercall,
        (true, 2) => Way::Deferred,
        (true, 3 | 4) => Way::Both,
        _ => Way::Amd,
    };
    let identified = matches!(way, Way::Amd | Way::Arm64) || !dice.once_in(6);
    let all_above = dice.pick(&[2, 10, 1000]);
    let interrupt = dice.pick(&[100, 1000]);
    let identifiers = Some(identifiers).filter(|_| identified);
    let shootdown = Shootdown::new(&mut shots, &mut inboxes, identifiers, interrupt);
    let shootdown = shootdown.expect("so many CPUs");
    let wide = matches!(machine.architecture().regime,
        Regime::Arm64Stage1 { wide: true, granule } if granule != Granule::K64);
    let kernel = Kernel {
        machine,
        shootdown: &shootdown,
        allocator: RefCell::new(allocator),
        links: RefCell::default(),
        flags: (0..cpus).map(|_| PreemptedFlag::default()).collect(),
        inputs: (0..cpus).map(|_| RefCell::new([0; PAGE_WORDS])).collect(),
        way,
        identified,
        hypercall: dice.pick(&[0, 150]),
        all_above,
        amd: (dice.pick(&[0, 1, 7]), dice.pick(&[0, 50])),
        arm64: arm64::Encoder {
            regime: arm64::Regime::El1,
            page_shift: F::PAGE_SHIFT,
            ranges: machine.architecture().range_invalidation,
            wide,
        },
        refuses: dice.pick(&[0, 3]),
        calls: Cell::new(0),
        flushes: (0..cpus).map(|_| Cell::new(0)).collect(),
        handler: Cell::new(None),
        dice: Dice::of(dice.below(1 << 48), MOST_CPUS),
    };
    let slots = [const { RefCell::new(None) }; SLOTS];
    let program = Program::<F> {
        kernel: &kernel,
        slots: &slots,
        sets: &RefCell::new(sets.iter_mut()),
        last: &Cell::new(0),
        most: 1 + dice.below(SLOTS as u64),
        global: dice.once_in(2),
    };
    /// # Safety
    /// 1. The pointer is to a program of this format.
    unsafe fn handle<F: Format<Input = Va>>(program: *const ()) {
        // SAFETY: by (1.).
        unsafe { &*program.cast::<Program<'_, '_, '_, F>>() }.handle();
    }
    kernel.handler.set(Some((handle::<F>, std::ptr::from_ref(&program).cast())));
    let seed = dice.below(1 << 48);
    let steps = 20 + dice.below(40);
    let done = Cell::new(0);
    let outcome = machine.run(|cpu| {
        let dice = Dice::of(seed, cpu.id() as u64);
        let mut at = At { process: None, state: CpuState::Active };
        for _ in 0..steps {
            program.step(cpu, &mut at, &dice);
            cpu.spend(dice.time());
        }
        program.switch(&mut at, None);
        cpu.order();
        if cpu.id() == 0 {
            // What is global goes while there are CPUs to tell.
            while done.get() + 1 < cpus {
                kernel.poll();
                cpu.spend(Time::ns(500));
                cpu.order();
            }
            (0..SLOTS).for_each(|slot| program.unmap_global(slot));
        }
        done.set(done.get() + 1);
        while done.get() < cpus {
            kernel.poll();
            cpu.spend(Time::ns(500));
            cpu.order();
        }
    });
    kernel.handler.set(None);
    let outcome = match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            // Spaces hold what holds them.
            kernel.links.take();
            return Err(error);
        }
    };
    between(machine.digest());
    if machine.violations().is_empty() {
        machine.calm();
        for slot in 0..SLOTS {
            program.retire(slot);
        }
        check_no_frames(machine);
    }
    kernel.links.take();
    Ok(outcome)
}

impl<'a, 'm, F: Format<Input = Va>> Program<'_, 'a, 'm, F> {
    fn step(&self, cpu: Cpu<'_>, at: &mut At<'a, 'm, F>, dice: &Dice) {
        let machine = self.kernel.machine;
        self.kernel.poll();
        let slot = dice.below(self.most) as usize;
        match dice.below(20) {
            0..=7 => self.look(at, dice),
            8..=10 => {
                let to = self.slots[slot].borrow().clone();
                self.switch(at, to.filter(|_| !dice.once_in(6)));
            }
            11 | 12 if at.process.is_some() => {
                machine.set_state(CpuState::Lazy);
                // The same time.
                self.kernel.here().be_lazy();
                at.state = CpuState::Lazy;
            }
            13 if self.kernel.way != Way::Arm64 => self.be_preempted(cpu, at, dice),
            13..=18 => {
                let process = self.slots[slot].borrow().clone();
                match process {
                    Some(process) => self.edit(at, &process, dice),
                    None => self.begin(slot),
                }
            }
            _ => {
                if self.retire(slot) {
                    self.begin(slot);
                }
            }
        }
    }

    /// A handler, which does not wait for what it has interrupted.
    fn handle(&self) {
        let kernel = self.kernel;
        let slot = kernel.dice.below(self.most) as usize;
        let Some(process) = self.slots[slot].borrow().clone() else {
            return;
        };
        process.add_user(1);
        kernel.machine.cpu().order();
        if !process.link.locked.replace(true) {
            let first = kernel.dice.below(PAGES);
            self.unmap(&process, &[span::<F>(first)]);
            self.unlock(&process.link);
        }
        process.add_user(-1);
    }

    /// Whether a space has a page that is global.
    fn has_global(&self, process: &Process<'a, 'm, F>) -> bool {
        self.global && process.link.number % 3 == 1
    }

    fn switch(&self, at: &mut At<'a, 'm, F>, to: Option<Shared<'a, 'm, F>>) {
        let Kernel { machine, identified, .. } = self.kernel;
        if let Some(to) = &to {
            to.add_user(1);
        }
        let from = at.process.take();
        let space = |process: &Option<Shared<'a, 'm, F>>| process.clone();
        let (here, running) = (self.kernel.here(), Running::new(self.kernel));
        let (old, new) = (space(&from), space(&to));
        let switched = here.switch(
            old.as_ref().map(|process| process.space()),
            new.as_ref().map(|process| process.space()),
            &running,
            |id| {
                if to.is_none() || !identified {
                    machine.unload();
                    // What a load of CR3 does.
                    if !identified {
                        self.kernel.forget_here(Tlbi::invpcid(None, None));
                    }
                }
                if let Some(to) = &to {
                    to.link.mapper.load_as(id);
                }
                let same = |from: &&Shared<'a, 'm, F>| {
                    to.as_ref().is_some_and(|to| to.link.number == from.link.number)
                };
                if let Some(from) = from.as_ref().filter(|from| !same(from)) {
                    from.link.mapper.leave();
                }
                machine.set_state(CpuState::Active);
            },
        );
        switched.expect("a word for each CPU");
        if let Some(from) = from {
            from.add_user(-1);
        }
        *at = At { process: to, state: CpuState::Active };
    }

    /// Accesses of the space that is loaded.
    fn look(&self, at: &mut At<'a, 'm, F>, dice: &Dice) {
        let machine = self.kernel.machine;
        let Some(process) = at.process.clone() else {
            return;
        };
        if at.state == CpuState::Lazy {
            // A kernel thread runs for some time.
            if !dice.once_in(6) {
                return;
            }
            let running = Running::new(self.kernel);
            self.kernel.here().resume(process.space(), &running);
            machine.set_state(CpuState::Active);
            at.state = CpuState::Active;
        }
        for _ in 0..1 + dice.below(4) {
            self.kernel.poll();
            let mut number = process.link.number;
            let va = match dice.below(8) {
                0 => FAR + dice.below(BLOCKS) * block::<F>(),
                1 if self.global => {
                    // Of whatever space: it may be remembered.
                    number = 1 + dice.below(self.last.get());
                    global::<F>(number).start().get()
                }
                _ => page::<F>(dice.below(PAGES)),
            };
            if dice.once_in(3) {
                let _fault = machine.write(va, number);
            } else if let Ok(found) = machine.read(va) {
                machine.check(found == 0 || found == number, || {
                    format!("{va:#x} of space {number} reads {found}")
                });
            }
        }
    }

    /// A hypervisor takes the CPU off for a time slice.
    fn be_preempted(&self, cpu: Cpu<'_>, at: &At<'a, 'm, F>, dice: &Dice) {
        let (machine, flag) = (self.kernel.machine, &self.kernel.flags[cpu.id()]);
        machine.set_state(CpuState::Stopped);
        // The same time.
        flag.preempt();
        cpu.spend(Time::us(2 + dice.below(20)));
        cpu.order();
        if flag.enter() {
            self.kernel.forget_here(Tlbi::ALL);
        }
        machine.set_state(at.state);
    }

    fn lock(&self, link: &Link<'_, '_>) {
        let cpu = self.kernel.machine.cpu();
        cpu.order();
        while link.locked.replace(true) {
            // A CPU that waits for a lock has interrupts on.
            self.kernel.poll();
            cpu.spend(Time::ns(300));
            cpu.order();
        }
    }

    fn unlock(&self, link: &Link<'_, '_>) {
        announce(self.kernel.machine);
        self.kernel.machine.cpu().order();
        link.locked.set(false);
    }

    fn edit(&self, at: &At<'a, 'm, F>, process: &Shared<'a, 'm, F>, dice: &Dice) {
        process.add_user(1);
        self.lock(&process.link);
        let first = dice.below(PAGES);
        match dice.below(12) {
            0..=5 => {
                self.map(process, first);
                // Only a CPU that has it loaded, and uses it, can write to it.
                let own = at.process.as_ref();
                let own = own.is_some_and(|own| own.link.number == process.link.number);
                if own && at.state == CpuState::Active {
                    let _fault = self.kernel.machine.write(page::<F>(first), process.link.number);
                }
            }
            6..=7 => {
                // Two pages of different tables, or one.
                let two = [span::<F>(first), span::<F>((first + 3) % PAGES)];
                self.unmap(process, &two[..1 + dice.below(2) as usize]);
            }
            8 | 9 => {
                // A table, with whatever is in it.
                let at = page::<F>(first) & !(block::<F>() - 1);
                let table = Span::new(Va::new(at), block::<F>()).expect("a block");
                self.unmap(process, &[table]);
            }
            10 if self.has_global(process) && dice.once_in(2) => {
                // With all else of its space, it may be one invalidation of everything.
                let all = [global::<F>(process.link.number), far::<F>()];
                self.unmap(process, &all[..1 + dice.below(2) as usize]);
                if dice.once_in(2) {
                    self.map_global(process);
                }
            }
            10 => {
                let mut tables = process.tables.borrow_mut();
                let mut gather = tables.gather();
                let change = Change::new().write_protect();
                let _no_memory = gather.protect(span::<F>(first), change);
                gather.finish(|_| ());
            }
            _ => {
                let far = far::<F>();
                if dice.once_in(2) {
                    let mut tables = process.tables.borrow_mut();
                    let _there = tables.map(far, Pa::new(FAR), Attrs::USER_DATA);
                } else {
                    self.unmap(process, &[far]);
                }
            }
        }
        self.unlock(&process.link);
        process.add_user(-1);
    }

    fn map(&self, process: &Shared<'a, 'm, F>, number: u64) {
        self.map_page(process, span::<F>(number), Attrs::USER_DATA);
    }

    fn map_global(&self, process: &Shared<'a, 'm, F>) {
        let attrs = Attrs { global: true, ..Attrs::USER_DATA };
        self.map_page(process, global::<F>(process.link.number), attrs);
    }

    fn map_page(&self, process: &Shared<'a, 'm, F>, at: Span<Va>, attrs: Attrs) {
        let machine = self.kernel.machine;
        let Some(frame) = machine.take_page() else {
            return;
        };
        let mapping = Mapping::new(attrs).pages_only();
        let mut tables = process.tables.borrow_mut();
        let mapped = tables.map(at, frame, mapping);
        drop(tables);
        if mapped.is_err() {
            machine.give_page(frame);
        }
    }

    /// Unmaps these with one gather.
    fn unmap(&self, process: &Shared<'a, 'm, F>, spans: &[Span<Va>]) {
        let machine = self.kernel.machine;
        let (mut held, mut frames) = (Vec::new(), Vec::new());
        let mut tables = process.tables.borrow_mut();
        let mut gather = tables.gather();
        for &span in spans {
            let _no_memory = gather.unmap(span, |leaf| {
                held.push(leaf);
                ControlFlow::Continue(())
            });
        }
        let completed = gather.issue().complete();
        for leaf in held {
            if let Ok(leaf) = completed.release(leaf) {
                frames.push(leaf.frame());
            }
        }
        completed.finish(|leaf| frames.push(leaf.frame()));
        drop(tables);
        for frame in frames.into_iter().filter(|frame| frame.get() < FAR) {
            machine.give_page(frame);
        }
    }

    /// A new space.
    fn begin(&self, slot: usize) {
        let machine = self.kernel.machine;
        let number = self.last.get() + 1;
        let Some(set) = self.sets.borrow_mut().next() else {
            return;
        };
        self.last.set(number);
        let link = Rc::new(Link {
            kernel: self.kernel,
            mapper: machine.new_space(),
            batch: RefCell::default(),
            space: OnceCell::new(),
            number,
            users: Cell::new(0),
            locked: Cell::new(false),
        });
        let Some(mut tables) = AddressSpace::<F, _>::new(Of(Rc::clone(&link))) else {
            return;
        };
        let root = tables.root();
        if link.space.set(Space::new(root, set)).is_err() {
            return;
        }
        tables.make_live();
        link.mapper.track(root, Half::Lower);
        announce(machine);
        machine.cpu().order();
        if self.slots[slot].borrow().is_some() {
            // Another CPU was faster.
            return self.take_down(Process { link, tables: RefCell::new(tables) });
        }
        let process = Rc::new(Process { link, tables: RefCell::new(tables) });
        self.kernel.links.borrow_mut().push(Rc::clone(&process.link));
        process.add_user(1);
        *self.slots[slot].borrow_mut() = Some(Rc::clone(&process));
        self.lock(&process.link);
        (0..PAGES).for_each(|number| self.map(&process, number));
        if self.has_global(&process) {
            self.map_global(&process);
        }
        self.unlock(&process.link);
        process.add_user(-1);
    }

    /// The page of a space that is global goes.
    fn unmap_global(&self, slot: usize) {
        let process = self.slots[slot].borrow().clone();
        if let Some(process) = process.filter(|it| self.has_global(it)) {
            self.lock(&process.link);
            self.unmap(&process, &[global::<F>(process.link.number)]);
            self.unlock(&process.link);
        }
    }

    /// A space that no CPU uses goes. False if one does.
    fn retire(&self, slot: usize) -> bool {
        self.kernel.machine.cpu().order();
        let unused = |process: &mut Shared<'a, 'm, F>| process.link.users.get() == 0;
        let process = self.slots[slot].borrow_mut().take_if(unused);
        if let Some(process) = process.as_ref().filter(|it| self.has_global(it)) {
            // It is remembered under identifiers of others.
            self.unmap(process, &[global::<F>(process.link.number)]);
        }
        let Some(process) = process.and_then(Rc::into_inner) else {
            return false;
        };
        let number = process.link.number;
        let mut links = self.kernel.links.borrow_mut();
        links.retain(|link| link.number != number);
        drop(links);
        self.take_down(process);
        true
    }

    fn take_down(&self, process: Process<'a, 'm, F>) {
        let machine = self.kernel.machine;
        machine.check(process.space().is_idle(), || {
            format!("space {} is loaded somewhere", process.link.number)
        });
        if self.kernel.way == Way::Arm64 {
            // Walks that were not waited for may be on their way.
            let everything = Invalidation {
                root: process.space().root(),
                id: 0,
                global: false,
                what: What::Everything,
            };
            self.kernel.flush(process.space(), &everything);
        }
        process.link.mapper.detach();
        let mut tables = process.tables.into_inner();
        // SAFETY: no CPU has the root loaded; what is remembered of it is under an identifier that
        // none uses before it is forgotten.
        unsafe { tables.make_dead() };
        let mut frames = Vec::new();
        let destroyed = tables.destroy(|leaf| frames.push(leaf.frame()));
        machine.check(destroyed.is_ok(), || "a dead space is not".to_owned());
        for frame in frames.into_iter().filter(|frame| frame.get() < FAR) {
            machine.give_page(frame);
        }
    }
}

/// The memory that a large leaf of the level above pages translates.
fn block<F: Format>() -> u64 {
    1 << (F::PAGE_SHIFT + F::INDEX_BITS)
}

/// The address of a page: every second in the next table.
fn page<F: Format>(number: u64) -> u64 {
    (1 << 42) + number % 2 * block::<F>() + ((number / 2) << F::PAGE_SHIFT)
}

/// Many leaves.
fn far<F: Format>() -> Span<Va> {
    Span::new(Va::new(FAR), BLOCKS * block::<F>()).expect("blocks")
}

/// The addresses of a space's page that is global.
fn global<F: Format>(number: u64) -> Span<Va> {
    let at = GLOBAL + (number << F::PAGE_SHIFT);
    Span::new(Va::new(at), 1 << F::PAGE_SHIFT).expect("a page")
}

fn span<F: Format>(number: u64) -> Span<Va> {
    Span::new(Va::new(page::<F>(number)), 1 << F::PAGE_SHIFT).expect("a page")
}
