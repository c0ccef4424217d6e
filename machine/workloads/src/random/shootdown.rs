//! Remote flushes: CPUs go from space to space, are lazy, are taken off by a hypervisor, and edit spaces that others have
//! loaded. Hardware tells no CPU, or all, and a program tells the rest, in every way there is.
//!
//! Each page holds the number of its space, so that a CPU that finds another has come to where it must not.

use std::cell::{Cell, OnceCell, RefCell};
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;

use tablewright::hyperv::{self, Encoder, HostCaps, Input, Output, PAGE_WORDS, Status};
use tablewright::shootdown::{
    Actions, Allocator, Batch, Cpu as Shot, Cpus, Deferred, Forget, Here, Holder, Hypercall,
    Hypercalls, Identifiers, Messenger, PreemptedFlag, Shootdown, Space, amd, arm64, inbox_words,
};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, Entry, Format, Half, Hooks, Invalidation, Level,
    Mapping, Pa, Platform, Span, TableLink, Va, What,
};
use tablewright_machine::{Cpu, CpuState, Globals, Machine, Mapper, Outcome, RunError, Tlbi};
use tablewright_machine::{Granule, Regime, Time};

use super::{Dice, announce, check_no_frames};

pub const MOST_CPUS: u64 = 16;
/// Spaces at a time, and in all.
const SLOTS: usize = 4;
const SPACES: usize = 60;
/// Pages of a space, in two tables, and large leaves of memory that the machine does not have.
const PAGES: u64 = 6;
const BLOCKS: u64 = 12;
const FAR: u64 = 1 << 44;
/// Where a space has a page that is global, if it has one: nowhere two spaces have theirs.
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

/// What all CPUs know, whatever the format.
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
    /// What a handler does that interrupts a flush.
    handler: Cell<Option<Handler>>,
    dice: Dice,
}

/// A function and what it is called with.
type Handler = (unsafe fn(*const ()), *const ());

/// What a platform needs to know of its space.
struct Link<'a, 'm> {
    kernel: &'a Kernel<'a, 'm>,
    mapper: Mapper<'m>,
    batch: RefCell<Batch>,
    space: OnceCell<Space<'a>>,
    number: u64,
    /// CPUs that have it loaded, or edit it.
    users: Cell<u32>,
    locked: Cell<bool>,
}

/// The platform of one space.
#[derive(Clone)]
struct Of<'a, 'm>(Rc<Link<'a, 'm>>);

/// What the running CPU does for flushes.
struct Running<'k, 'a, 'm>(&'k Kernel<'a, 'm>, Cell<Option<Tlbi>>);

impl<'k, 'a, 'm> Running<'k, 'a, 'm> {
    fn new(kernel: &'k Kernel<'a, 'm>) -> Self {
        Self(kernel, Cell::new(None))
    }

    /// One of several instructions for a range, which the machine is told as one.
    fn broadcast(&self, next: Tlbi) {
        if let Some(last) = self.1.take() {
            if let (Some((first, end)), Some((start, to))) = (last.range, next.range) {
                let joined = Tlbi {
                    range: Some((first, to)),
                    ..next
                };
                if end + 1 == start
                    && (Tlbi {
                        range: last.range,
                        ..joined
                    }) == last
                {
                    return self.1.set(Some(joined));
                }
            }
            self.0.machine.tlbi(last);
        }
        self.1.set(Some(next));
    }

    fn wait(&self) {
        if let Some(last) = self.1.take() {
            self.0.machine.tlbi(last);
        }
        self.0.machine.dsb();
    }
}

impl<'a> Kernel<'a, '_> {
    fn here(&self) -> Here<'a, 'a> {
        let cpu = self.machine.cpu().id();
        self.shootdown.on(cpu).expect("a CPU of the machine")
    }

    /// Between two instructions.
    fn poll(&self) {
        if self.machine.take_interrupt() {
            self.here().receive(&Running::new(self));
        }
    }

    fn forget_here(&self, tlbi: Tlbi) {
        let here = Tlbi {
            broadcast: false,
            ..tlbi
        };
        self.machine.tlbi(here);
        self.machine.dsb();
    }

    fn flush(&self, space: &Space<'_>, what: &Invalidation<'_>) {
        let running = Running::new(self);
        let hypercall = Hypercall {
            encoder: Encoder::default(),
            cost: self.hypercall,
            calls: Running::new(self),
        };
        let deferred = Deferred::new(|cpu| self.flags.get(cpu));
        let amd = amd::Broadcast {
            most: self.amd.0,
            cost: self.amd.1,
            hardware: Running::new(self),
        };
        let arm64 = arm64::Broadcast {
            encoder: self.arm64,
            cost: 0,
            hardware: Running::new(self),
        };
        let flushes = &self.flushes[self.machine.cpu().id()];
        flushes.update(|count| count + 1);
        let messengers: &[&dyn Messenger] = match self.way {
            Way::Interrupts => &[],
            Way::Hypercall => &[&hypercall],
            Way::Deferred => &[&deferred],
            Way::Both => &[&deferred, &hypercall],
            Way::Amd => &[&amd, &deferred],
            Way::Arm64 => &[&arm64],
        };
        self.here().flush(space, what, messengers, &running);
        flushes.update(|count| count - 1);
    }

    /// An interrupt may come here, in a flush, whose handler flushes.
    fn may_be_interrupted(&self) {
        let flushes = self.flushes[self.machine.cpu().id()].get();
        if (1..=2).contains(&flushes)
            && let Some((handler, data)) = self.handler.get()
            && self.dice.once_in(12)
        {
            // SAFETY: `run` has set it, and takes it away before what it points to is gone.
            unsafe { handler(data) };
        }
    }

    /// The number by which the hypervisor knows a CPU. It has given none to one of them.
    fn vp_index(&self, cpu: usize) -> Option<u32> {
        let known = self.refuses == 0 || cpu != 2;
        known.then_some((cpu as u32 * 67 + 3) % 1024)
    }
}

// SAFETY: the machine forgets (1.), interrupts are polled between any two accesses (2.), and no other CPU runs in the
// function (3.).
unsafe impl Actions for Running<'_, '_, '_> {
    fn forget(&self, what: Forget) {
        self.0.may_be_interrupted();
        let tlbi = match what {
            // INVPCID type 2.
            Forget::Everything => Tlbi::ALL,
            Forget::All => Tlbi::invpcid(None, None),
            Forget::Space(_) if !self.0.identified => Tlbi::invpcid(None, None),
            Forget::Space(id) => Tlbi::invpcid(Some(id), None),
            // An address for each leaf.
            Forget::Range { id, range, global } => {
                let addresses = (range.first, range.last);
                let stride = range.level.map(|level| 12 + 9 * level.height());
                let tlbi = match global {
                    true => Tlbi::invlpg(id, addresses),
                    false => Tlbi::invpcid(Some(id), Some(addresses)),
                };
                Tlbi { stride, ..tlbi }
            }
        };
        self.0.forget_here(tlbi);
        self.0.may_be_interrupted();
    }

    fn interrupt(&self, cpus: &Cpus) {
        self.0.may_be_interrupted();
        cpus.iter().for_each(|cpu| self.0.machine.interrupt(cpu));
        self.0.may_be_interrupted();
    }

    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>)) {
        with(&mut self.0.allocator.borrow_mut());
    }

    fn relax(&self) {
        let cpu = self.0.machine.cpu();
        cpu.spend(Time::ns(200));
        cpu.order();
        self.0.may_be_interrupted();
    }
}

// SAFETY: the call is made with the page that it is given, and nothing interrupts it (1.).
unsafe impl hyperv::Messenger for Running<'_, '_, '_> {
    fn call(&self, input: Input, page: &[u64; PAGE_WORDS]) -> Output {
        let Kernel {
            machine, refuses, ..
        } = self.0;
        self.0.calls.update(|calls| calls + 1);
        // 0: none.
        if self.0.calls.get().is_multiple_of(*refuses) {
            return Output::new(Status::PARAMETER, 0);
        }
        let host = HostCaps {
            processors: 1024,
            xmm_input: false,
            extended_ranges: false,
            guest_physical: false,
        };
        let flush = match hyperv::decode(input, 0, page, &host) {
            Ok(flush) => flush,
            Err(status) => return Output::new(status, 0),
        };
        let links = self.0.links.borrow();
        let of = |link: &&Rc<Link<'_, '_>>| {
            let space = link.space.get();
            space.is_some_and(|space| flush.space.is_none_or(|root| root == space.root().get()))
        };
        // Of all spaces it is under every identifier.
        let mut ids: Vec<Option<u16>> = (links.iter().filter(of))
            .filter_map(|link| link.space.get())
            .map(|space| self.0.identified.then(|| space.identity().id()))
            .collect();
        if flush.space.is_none() {
            ids = vec![None];
        }
        drop(links);
        for cpu in 0..self.0.flags.len() {
            let vp = (cpu as u32 * 67 + 3) % 1024;
            if !flush.targets.is_none_or(|set| set.contains(vp)) {
                continue;
            }
            for &id in &ids {
                let all = Tlbi {
                    id,
                    globals: if flush.non_global_only {
                        Globals::Spared
                    } else {
                        Globals::ByAddress
                    },
                    ..Tlbi::ALL
                };
                if flush.is_everything() {
                    machine.forget_on(cpu, all);
                }
                for pages in flush.ranges() {
                    let last = pages.first + (pages.count * pages.size - 1);
                    let range = Some((pages.first, last));
                    machine.forget_on(cpu, Tlbi { range, ..all });
                }
            }
        }
        Output::new(Status::SUCCESS, input.reps())
    }
}

impl Hypercalls for Running<'_, '_, '_> {
    fn vp_index(&self, cpu: usize) -> Option<u32> {
        self.0.vp_index(cpu)
    }

    fn with_page(&self, with: &mut dyn FnMut(&mut [u64; PAGE_WORDS])) {
        let cpu = self.0.machine.cpu().id();
        with(&mut self.0.inputs[cpu].borrow_mut());
    }
}

impl amd::Amd for Running<'_, '_, '_> {
    fn invlpgb(&self, operands: amd::Invlpgb) {
        let amd::Invlpgb { rax, ecx, edx } = operands;
        let large = ecx >> 31 != 0;
        let stride = if large { 21 } else { 12 };
        let first = rax & !0xfff;
        let last = first + ((u64::from(ecx & 0xffff) + 1) << stride) - 1;
        self.broadcast(Tlbi {
            id: (rax & 2 != 0).then_some((edx >> 16) as u16),
            range: (rax & 1 != 0).then_some((first, last)),
            stride: large.then_some(stride),
            leaves_only: rax & 16 != 0,
            globals: if rax & 8 != 0 {
                Globals::Included
            } else {
                Globals::Spared
            },
            ..Tlbi::ALL
        });
    }

    fn tlbsync(&self) {
        self.wait();
    }
}

impl arm64::Arm64 for Running<'_, '_, '_> {
    /// The fields are those of the manual (DDI 0487 C5.5).
    fn tlbi(&self, tlbi: arm64::Tlbi) {
        use arm64::Op;
        let arm64::Tlbi { op, operand } = tlbi;
        let bits = |low: u32, count: u32| operand >> low & ((1 << count) - 1);
        let encoder = &self.0.arm64;
        let all = matches!(op, Op::Vaae1 | Op::Vaale1 | Op::Rvaae1 | Op::Rvaale1);
        let id = (!all).then_some((operand >> 48) as u16);
        let (range, ttl) = match op {
            Op::Vmalle1 => return self.broadcast(Tlbi::ALL),
            Op::Aside1 => return self.broadcast(Tlbi { id, ..Tlbi::ALL }),
            Op::Vae1 | Op::Vale1 | Op::Vaae1 | Op::Vaale1 => {
                // The leaf around an address, if its level is told.
                let (first, ttl) = (bits(0, 44) << 12, bits(44, 2));
                let below = if ttl == 0 { 0 } else { 3 - ttl as u32 };
                let size = 1 << (encoder.page_shift + below * (encoder.page_shift - 3));
                ((first, first + (size - 1)), ttl)
            }
            _ => {
                let base = if encoder.wide { 16 } else { encoder.page_shift };
                let pages = (bits(39, 5) + 1) << (5 * bits(44, 2) + 1);
                let first = bits(0, 37) << base;
                (
                    (first, first + ((pages << encoder.page_shift) - 1)),
                    bits(37, 2),
                )
            }
        };
        self.broadcast(Tlbi {
            id,
            range: Some(range),
            depth: (ttl != 0).then(|| 3 - ttl as u8),
            leaves_only: matches!(op, Op::Vale1 | Op::Rvale1 | Op::Vaale1 | Op::Rvaale1),
            ..Tlbi::ALL
        });
    }

    fn dsb(&self) {
        self.wait();
    }
}

// SAFETY: all but the last two functions pass on to the machine; a completion returns when all CPUs that have the space loaded
// have forgotten, and the others will before they load it (5., 6.); a clone is of the same space (7.).
unsafe impl Platform for Of<'_, '_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.0.mapper.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.0.mapper.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.0.mapper.table(frame, level) }
    }
    fn caps(&self) -> Caps {
        Caps {
            invalidate_all_above: self.0.kernel.all_above,
            ..self.0.mapper.caps()
        }
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.0.mapper.link_of(frame)
    }
    fn hooks(&self) -> Option<impl Hooks + '_> {
        self.0.mapper.hooks()
    }

    fn barrier(&self, barrier: Barrier) {
        let Link {
            kernel,
            mapper,
            batch,
            space,
            ..
        } = &*self.0;
        if barrier == Barrier::Publish {
            return mapper.barrier(barrier);
        }
        // The fence with which a flush begins.
        announce(kernel.machine);
        let batch = batch.borrow_mut().take();
        if let Some(space) = space.get() {
            kernel.flush(space, &batch.flush(space.root(), 0));
            mapper.claim(&batch.flush(space.root(), space.identity().id()));
            kernel.machine.dsb();
        }
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        self.0.batch.borrow_mut().add(what);
    }
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
    sets: &'a [[AtomicU64; 1]],
    last: &'k Cell<u64>,
    /// So many of the slots are used.
    most: u64,
    /// Some spaces have a page that is global.
    global: bool,
}

/// What a CPU is at.
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
    let shots: Vec<Shot> = (0..cpus).map(|_| Shot::new()).collect();
    let holders: Vec<Holder> = (0..cpus).map(|_| Holder::new()).collect();
    let inboxes: Vec<AtomicU64> = (0..inbox_words(cpus)).map(|_| AtomicU64::new(0)).collect();
    let sets: Vec<[AtomicU64; 1]> = (0..SPACES).map(|_| [AtomicU64::new(0)]).collect();
    // As few identifiers as will do.
    let bits = (cpus + 2).next_power_of_two().trailing_zeros();
    let mut memory = vec![0; Allocator::words(bits)];
    let allocator = Allocator::new(bits, &mut memory).expect("so many bits");
    let identifiers = Identifiers::new(&allocator, &holders).expect("so many identifiers");
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
    let shootdown = Shootdown::new(&shots, &inboxes, identifiers, interrupt).expect("so many CPUs");
    let wide = matches!(machine.architecture().regime, Regime::Arm64Stage1 { wide: true, granule } if granule != Granule::K64);
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
        dice: Dice::new(dice.below(1 << 48), MOST_CPUS),
    };
    let slots = [const { RefCell::new(None) }; SLOTS];
    let program = Program::<F> {
        kernel: &kernel,
        slots: &slots,
        sets: &sets,
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
    kernel
        .handler
        .set(Some((handle::<F>, std::ptr::from_ref(&program).cast())));
    let seed = dice.below(1 << 48);
    let steps = 20 + dice.below(40);
    let done = Cell::new(0);
    let outcome = machine.run(|cpu| {
        let dice = Dice::new(seed, cpu.id() as u64);
        let mut at = At {
            process: None,
            state: CpuState::Active,
        };
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
                // The same moment.
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
        let Kernel {
            machine,
            identified,
            ..
        } = self.kernel;
        if let Some(to) = &to {
            to.add_user(1);
        }
        let from = at.process.take();
        let space = |process: &Option<Shared<'a, 'm, F>>| process.clone();
        let (here, running) = (self.kernel.here(), Running::new(self.kernel));
        let (old, new) = (space(&from), space(&to));
        here.switch(
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
                    to.as_ref()
                        .is_some_and(|to| to.link.number == from.link.number)
                };
                if let Some(from) = from.as_ref().filter(|from| !same(from)) {
                    from.link.mapper.leave();
                }
                machine.set_state(CpuState::Active);
            },
        );
        if let Some(from) = from {
            from.add_user(-1);
        }
        *at = At {
            process: to,
            state: CpuState::Active,
        };
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
        // The same moment.
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
                    let _fault = self
                        .kernel
                        .machine
                        .write(page::<F>(first), process.link.number);
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
                self.unmap(process, &[global::<F>(process.link.number)]);
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
                let far = Span::new(Va::new(FAR), BLOCKS * block::<F>()).expect("blocks");
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
        let attrs = Attrs {
            global: true,
            ..Attrs::USER_DATA
        };
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
        let Some(set) = self.sets.get(number as usize) else {
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
        if link.space.set(Space::new(number, root, set)).is_err() {
            return;
        }
        tables.make_live();
        link.mapper.track(root, Half::Lower);
        announce(machine);
        machine.cpu().order();
        if self.slots[slot].borrow().is_some() {
            // Another CPU was faster.
            return self.take_down(Process {
                link,
                tables: RefCell::new(tables),
            });
        }
        let process = Rc::new(Process {
            link,
            tables: RefCell::new(tables),
        });
        self.kernel
            .links
            .borrow_mut()
            .push(Rc::clone(&process.link));
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
        // SAFETY: no CPU has the root loaded; what is remembered of it is under an identifier that none uses before it is
        // forgotten.
        unsafe { tables.make_dead() };
        let mut frames = Vec::new();
        let destroyed = tables.destroy(|leaf| frames.push(leaf.frame()));
        machine.check(destroyed.is_ok(), || "a dead space is not".to_owned());
        for frame in frames.into_iter().filter(|frame| frame.get() < FAR) {
            machine.give_page(frame);
        }
    }
}

/// What a large leaf of the level above pages translates.
fn block<F: Format>() -> u64 {
    1 << (F::PAGE_SHIFT + F::INDEX_BITS)
}

/// Where a page is: every second in the next table.
fn page<F: Format>(number: u64) -> u64 {
    (1 << 42) + number % 2 * block::<F>() + ((number / 2) << F::PAGE_SHIFT)
}

/// Where a space has its page that is global.
fn global<F: Format>(number: u64) -> Span<Va> {
    let at = GLOBAL + (number << F::PAGE_SHIFT);
    Span::new(Va::new(at), 1 << F::PAGE_SHIFT).expect("a page")
}

fn span<F: Format>(number: u64) -> Span<Va> {
    Span::new(Va::new(page::<F>(number)), 1 << F::PAGE_SHIFT).expect("a page")
}
