//! The machine: the hardware in virtual time, and the engine's platform on it.
//!
//! Each operation of a program is put in its place in virtual time ([`Cpu::order`]), done on the
//! hardware (`hardware.rs`), and paid for from the [`Costs`]. The engine runs unchanged: a
//! [`Mapper`] is its [`Platform`], and every access that it makes to a table is one of these
//! operations.
//!
//! A run has two phases. With a seed, the hardware does whatever it may at the worst time, frames
//! run out, and time is stretched; from [`Machine::calm`] on nothing of that happens, and in
//! [`Machine::finish`] everything must have come to rest.

mod accesses;
mod interrupt;
mod kick;
mod mapper;
mod walks;

use std::cell::Cell;
use std::panic::Location;
use std::ptr::NonNull;
use std::rc::Rc;

use tablewright::linear::{OneToOne, SlotMemory};
use tablewright::{
    Barrier, Caps, Entry, Hooks, Invalidation, Level, Pa, Platform, Stale, TableLink, What,
};

use crate::architecture::Architecture;
use crate::costs::Costs;
use crate::hardware::{CpuState, Fault, Hardware, How, Look, Request, Spot, Translated, Want};
use crate::lines::Lines;
use crate::lock::{Held, Lock, LockCosts};
use crate::memory::{Memory, State};
use crate::resource::Resource;
use crate::rules::{Rule, Violation};
use crate::sched::{Config, Cpu, Outcome, RunError, Scheduler, is_cut_short};
use crate::time::{Price, Time};
use crate::tlb::{Globals, Stages, Tlbi};
use crate::trace::{Event, Sink};

use interrupt::Interrupts;
use kick::Kicks;
pub use mapper::{MachineHeld, MachineIdentity, MachineLock, MachineSlots, Mapper};
pub use walks::MachineWalk;
use walks::Walks;

/// The parts of a machine.
///
/// ```
/// use tablewright_machine::{Architecture, Granule, Memory, Regime, Setup};
/// let regime = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
/// let mut setup = Setup::new(Architecture::arm64(regime), Memory::new(64, 12, 1 << 30));
/// setup.scheduler.cpus = 4;
/// ```
pub struct Setup {
    /// Its rules.
    pub architecture: Architecture,
    /// Its prices.
    pub costs: Costs,
    /// How many CPUs, limits, and the seed.
    pub scheduler: Config,
    /// Its memory for tables, and for the pages that are tracked.
    pub memory: Memory,
    /// With a seed: a frame is refused once in so many requests. 0: never.
    pub refuse_once_in: u64,
    /// Hardware tells no CPU to forget what another has changed: vCPUs are
    /// [kicked](Machine::enter_guest).
    pub kicks: bool,
}

impl Setup {
    /// One CPU, no costs, no seed.
    pub fn new(architecture: Architecture, memory: Memory) -> Self {
        Self {
            architecture,
            costs: Costs::default(),
            scheduler: Config::new(1),
            memory,
            refuse_once_in: 0,
            kicks: false,
        }
    }
}

/// The number of pages, of those that were cleaned last, that are known: as much memory as a large
/// cache holds, 16 MiB in pages of 4 KiB.
const LATELY: usize = 1 << 12;

/// How often something was done.
///
/// ```
/// # use tablewright_machine::Counts;
/// assert_eq!(Counts::default().walks, 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Barriers after stores.
    pub publications: u64,
    /// Invalidations issued, each of one page, block or range.
    pub invalidations: u64,
    /// Waits for completion.
    pub completions: u64,
    /// Tables allocated.
    pub tables: u64,
    /// Entries written.
    pub entries: u64,
    /// Walks that were needed.
    pub walks: u64,
    /// Accesses that found a translation.
    pub accesses: u64,
    /// Accesses that faulted.
    pub faults: u64,
    /// Interrupts sent to have vCPUs leave their guest.
    pub kicks: u64,
    /// Times that a vCPU forgot everything before it entered its guest.
    pub flushes: u64,
}

/// Those of the [`Costs`] that a program pays for each entry.
struct Prices {
    entry: Price,
    load: Price,
    publish: Price,
}

/// A computer: CPUs with their memory management units around one memory, in virtual time.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, Half, Pa, Span, Va, format::Arm64K4};
/// use tablewright_machine::{Architecture, Granule, Machine, Memory, Regime, Request, Setup};
///
/// let regime = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
/// let mut setup = Setup::new(Architecture::arm64(regime), Memory::new(64, 12, 1 << 30));
/// setup.scheduler.cpus = 2;
/// let machine = Machine::new(setup);
///
/// // The engine maps a page, on the machine.
/// let mapper = machine.new_space();
/// let mut space = AddressSpace::<Arm64K4, _>::new(mapper).unwrap();
/// mapper.attach(space.root(), Half::Lower, 1);
/// let page = Span::new(Va::new(0x1000), 0x1000)?;
/// space.map(page, Pa::new(0x8000_0000), Attrs::KERNEL_DATA)?;
/// space.make_live();
///
/// // Both CPUs use it.
/// machine.run(|cpu| {
///     mapper.load();
///     assert_eq!(machine.access(Request::read(0x1008)).unwrap(), 0x8000_0008);
/// })?;
/// assert_eq!(machine.finish(), []);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Machine {
    scheduler: Rc<Scheduler>,
    pub(crate) hardware: Hardware,
    costs: Costs,
    prices: Prices,
    /// The system's bus for invalidations.
    bus: Resource,
    /// When the invalidations of each CPU will have gone over the bus.
    bus_until: Box<[Cell<Time>]>,
    /// The port through which caches are cleaned.
    port: Resource,
    /// The pages that were cleaned last, if that makes a difference.
    cleaned: Box<[Cell<u64>]>,
    lines: Lines,
    pub(crate) kicks: Kicks,
    pub(crate) interrupts: Interrupts,
    pub(crate) software_walks: Walks,
    links: Box<[TableLink]>,
    refuse_once_in: Cell<u64>,
    publications: Cell<u64>,
    invalidations: Cell<u64>,
    completions: Cell<u64>,
    tables: Cell<u64>,
    entries: Cell<u64>,
    walks: Cell<u64>,
    accesses: Cell<u64>,
    faults: Cell<u64>,
}

impl Machine {
    /// A machine at rest.
    ///
    /// # Panics
    /// If the pages of the memory are not those of the architecture, or as [`Scheduler::new`].
    pub fn new(setup: Setup) -> Self {
        let Setup { architecture, costs, scheduler, memory, refuse_once_in, kicks } = setup;
        assert_eq!(
            memory.page_shift(),
            architecture.regime.page_shift(),
            "the memory has the pages of the architecture"
        );
        let (seed, cpus) = (scheduler.perturbation.seed, scheduler.cpus);
        let scheduler = Rc::new(Scheduler::new(scheduler));
        let links = (0..memory.frames()).map(|_| TableLink::new()).collect();
        let clock = Some(Rc::clone(&scheduler));
        Self {
            hardware: Hardware::new(architecture, cpus, memory, seed, clock),
            lines: Lines::new(costs.transfer, cpus),
            kicks: Kicks::new(kicks, cpus),
            interrupts: Interrupts::new(cpus),
            software_walks: Walks::new(cpus),
            scheduler,
            bus: Resource::new(),
            bus_until: (0..cpus).map(|_| Cell::new(Time::ZERO)).collect(),
            port: Resource::new(),
            cleaned: (0..if costs.clean_again == Time::ZERO { 0 } else { LATELY })
                .map(|_| Cell::new(u64::MAX))
                .collect(),
            prices: Prices {
                entry: costs.entry.price(),
                load: costs.load.price(),
                publish: costs.publish.price(),
            },
            costs,
            links,
            refuse_once_in: Cell::new(refuse_once_in),
            publications: Cell::new(0),
            invalidations: Cell::new(0),
            completions: Cell::new(0),
            tables: Cell::new(0),
            entries: Cell::new(0),
            walks: Cell::new(0),
            accesses: Cell::new(0),
            faults: Cell::new(0),
        }
    }

    /// Takes the memory out, for another machine. What was in it is lost.
    pub fn into_memory(self) -> Memory {
        let mut memory = self.hardware.memory;
        memory.clear();
        memory
    }

    /// The CPU that runs.
    #[inline(always)]
    pub fn cpu(&self) -> Cpu<'_> {
        self.scheduler.cpu()
    }

    /// Runs a program on every CPU.
    ///
    /// # Errors
    /// As [`Scheduler::run`].
    pub fn run(&self, program: impl Fn(Cpu<'_>)) -> Result<Outcome, RunError> {
        self.scheduler.run(program)
    }

    /// Its rules.
    pub fn architecture(&self) -> &Architecture {
        &self.hardware.architecture
    }

    /// Its prices.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Its memory.
    pub fn memory(&self) -> &Memory {
        &self.hardware.memory
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        Counts {
            publications: self.publications.get(),
            invalidations: self.invalidations.get(),
            completions: self.completions.get(),
            tables: self.tables.get(),
            entries: self.entries.get(),
            walks: self.walks.get(),
            accesses: self.accesses.get(),
            faults: self.faults.get(),
            kicks: self.kicks.sent.get(),
            flushes: self.kicks.flushes.get(),
        }
    }

    /// Has every step written to `sink`, in the [format](crate::trace) of traces.
    pub fn trace(&self, sink: Sink) {
        self.hardware.tracer.start(sink);
        self.hardware.look_around();
    }

    /// A space to come: the platform for its [`AddressSpace`](tablewright::AddressSpace).
    pub fn new_space(&self) -> Mapper<'_> {
        Mapper { machine: self, space: self.hardware.new_space() }
    }

    // ---- What programs do ----

    /// An access to memory by the running CPU: gives the physical address.
    ///
    /// # Errors
    /// The fault that it takes. On a machine whose walks are not ordered after what comes before, a
    /// fault may be spurious: the entry is valid by now. See [`touch`](Machine::touch).
    #[track_caller]
    pub fn access(&self, request: Request) -> Result<u64, Fault> {
        self.hardware.tracer.set_place(Location::caller());
        let translated = self.translate(request)?;
        self.do_access(translated, None);
        Ok(translated.pa())
    }

    /// Loads 8 bytes through a translation. 0 where the machine has no memory.
    ///
    /// # Errors
    /// As [`access`](Machine::access).
    #[track_caller]
    pub fn read(&self, va: u64) -> Result<u64, Fault> {
        self.hardware.tracer.set_place(Location::caller());
        let translated = self.translate(Request::read(va))?;
        Ok(self.do_access(translated, None))
    }

    /// Stores 8 bytes through a translation.
    ///
    /// # Errors
    /// As [`access`](Machine::access).
    #[track_caller]
    pub fn write(&self, va: u64, value: u64) -> Result<(), Fault> {
        self.hardware.tracer.set_place(Location::caller());
        let translated = self.translate(Request::write(va))?;
        self.do_access(translated, Some(value));
        Ok(())
    }

    /// An access as a program makes it whose fault handler returns and tries again: a fault that is
    /// there the second time is no spurious one.
    ///
    /// # Errors
    /// The fault.
    #[track_caller]
    pub fn touch(&self, request: Request) -> Result<u64, Fault> {
        self.access(request).or_else(|_| {
            let cpu = self.cpu();
            cpu.spend(self.costs.exception);
            self.hardware.synchronise(cpu.id());
            self.access(request)
        })
    }

    #[inline(always)]
    pub(crate) fn translate(&self, request: Request) -> Result<Translated, Fault> {
        if self.hardware.is_nested() {
            return self.translate_for_guest(request);
        }
        self.translate_by(request, Hardware::look, Hardware::step)
    }

    /// Translates over the two stages of a guest.
    #[inline(never)]
    fn translate_for_guest(&self, request: Request) -> Result<Translated, Fault> {
        self.translate_by(request, Hardware::guest_look, Hardware::guest_step)
    }

    /// A look for the translation, and steps of a walk until there is one.
    #[inline(always)]
    fn translate_by<W>(
        &self,
        request: Request,
        look_for: impl Fn(&Hardware, usize, Request) -> Look<W>,
        step: impl Fn(&Hardware, usize, W) -> Look<W>,
    ) -> Result<Translated, Fault> {
        let cpu = self.cpu();
        cpu.order();
        let id = cpu.id();
        let mut look = look_for(&self.hardware, id, request);
        if matches!(look, Look::Walking(_)) {
            self.walks.update(|walks| walks + 1);
        }
        loop {
            match look {
                Look::Found(translated) => return Ok(translated),
                // A fault is that of a walk after everything that comes first in program order.
                Look::Fault(_) if self.hardware.fault_is_early(id) => {
                    self.hardware.drain(id);
                    look = look_for(&self.hardware, id, request);
                }
                Look::Fault(fault) => {
                    self.fault(id, request, fault);
                    return Err(fault);
                }
                Look::Walking(walk) => {
                    cpu.spend(self.costs.walk);
                    cpu.order();
                    look = step(&self.hardware, id, walk);
                }
            }
        }
    }

    fn fault(&self, cpu: usize, request: Request, fault: Fault) {
        self.faults.update(|faults| faults + 1);
        self.hardware.trace(cpu, || Event::Access {
            va: request.va,
            want: name(request.want),
            result: Err(format!("{fault:?}").replace(' ', "")),
        });
    }

    #[inline(always)]
    pub(crate) fn do_access(&self, translated: Translated, stored: Option<u64>) -> u64 {
        let cpu = self.cpu();
        let id = cpu.id();
        cpu.spend(self.costs.access);
        self.hardware.set_out(id, translated, cpu.now());
        cpu.order();
        self.accesses.update(|accesses| accesses + 1);
        self.hardware.trace(id, || Event::Access {
            va: translated.request().va,
            want: name(translated.request().want),
            result: Ok(translated.pa()),
        });
        self.hardware.perform(id, translated, stored)
    }

    /// The guest that the running CPU is in loads a root for its stage 1, and an identifier (TTBR0
    /// and ASID, CR3 and PCID): from now on it accesses virtual addresses. `None` turns its stage 1
    /// off, as it is at first: what it accesses then is what it takes for physical addresses. A
    /// context synchronisation event; nothing is invalidated.
    ///
    /// The tables are in the guest's memory, at addresses that it takes for physical, in the format
    /// of [`Architecture::guest`]; it writes them like any data.
    pub fn load_guest(&self, root: Option<(u64, u16)>) {
        let cpu = self.cpu();
        cpu.order();
        self.hardware.load_guest(cpu.id(), root);
    }

    /// The running CPU loads the tables of a kernel that are no space: there is no root.
    pub fn unload(&self) {
        let cpu = self.cpu();
        cpu.order();
        self.hardware.unload(cpu.id());
    }

    /// Whether the running CPU uses the space that it has loaded.
    pub fn set_state(&self, state: CpuState) {
        let cpu = self.cpu();
        cpu.order();
        self.hardware.set_state(cpu.id(), state);
    }

    /// Sets the state of another CPU: a hypervisor has taken it off between two instructions, or is
    /// about to let it go on.
    pub fn set_state_of(&self, other: usize, state: CpuState) {
        self.cpu().order();
        self.hardware.set_state(other, state);
    }

    /// A hypervisor has one of its virtual processors forget, between two instructions of it: as an
    /// invalidation of its own. It costs an [exit](Costs::exit).
    pub fn forget_on(&self, other: usize, tlbi: Tlbi) {
        self.cpu().spend(self.costs.exit);
        self.forget_for(other, tlbi);
    }

    /// Has another CPU forget, at a cost that is for the program to spend.
    pub fn forget_for(&self, other: usize, tlbi: Tlbi) {
        let cpu = self.cpu();
        cpu.order();
        while let Some(until) = self.hardware.busy_until(other) {
            cpu.wait_until(until.max(cpu.now() + Time::ps(1)));
            cpu.order();
        }
        let here = Tlbi { broadcast: false, ..tlbi };
        self.hardware.invalidate(other, here);
        self.hardware.complete(other);
        self.hardware.synchronise(other);
    }

    /// The kernel copies a page through its own cacheable mapping, which is not simulated.
    pub fn copy_page(&self, from: Pa, to: Pa) {
        self.cpu().order();
        self.hardware.memory.copy(from.get(), to.get());
        self.hardware.caches.write(to.get());
    }

    /// A page of memory for data, all zero. `None` if there is none left, or it is refused.
    pub fn take_page(&self) -> Option<Pa> {
        let cpu = self.cpu();
        cpu.order();
        if self.refuses() {
            return None;
        }
        self.hardware.take_page(cpu.id()).map(Pa::new)
    }

    /// Takes a number of pages beside each other, a power of two, aligned to the size of all: each
    /// is to be given back by itself.
    pub fn take_pages(&self, count: usize) -> Option<Pa> {
        let cpu = self.cpu();
        cpu.order();
        if self.refuses() {
            return None;
        }
        self.hardware.take_run(cpu.id(), count, State::Data, 0).map(Pa::new)
    }

    /// Gives a page back. No CPU may be able to reach it.
    pub fn give_page(&self, page: Pa) {
        let cpu = self.cpu();
        cpu.order();
        self.hardware.give_frame(cpu.id(), page.get());
    }

    /// From now on none of these addresses may be mapped, used or not.
    pub fn forbid(&self, first: Pa, last: Pa) {
        self.hardware.forbid(first.get(), last.get());
    }

    /// They may be mapped again.
    pub fn allow(&self, first: Pa, last: Pa) {
        self.hardware.allow(first.get(), last.get());
    }

    /// Two pages hold the same and are not written.
    pub fn declare_alike(&self, a: Pa, b: Pa) {
        self.hardware.declare_alike(a.get(), b.get());
    }

    /// The kernel writes to a page through its own cacheable mapping, which is not simulated.
    pub fn write_page(&self, page: Pa) {
        self.cpu().order();
        self.hardware.caches.write(page.get());
    }

    /// Cleans a page and invalidates it to the point of coherency, through the port that all CPUs
    /// share.
    #[track_caller]
    pub fn clean(&self, page: Pa) {
        self.hardware.tracer.set_place(Location::caller());
        let cpu = self.cpu();
        let shift = self.hardware.memory.page_shift();
        cpu.order();
        let number = page.get() >> shift;
        let again = match self.cleaned.get(number as usize % LATELY) {
            Some(place) => place.replace(number) == number,
            None => false,
        };
        let each = if again { self.costs.clean_again } else { self.costs.clean };
        self.port.acquire(cpu, each * (1 << (shift - 12)));
        cpu.order();
        self.hardware.clean_page(cpu.id(), page.get());
    }

    /// Has the instruction caches forget a page, or everything.
    #[track_caller]
    pub fn invalidate_instructions(&self, page: Option<Pa>) {
        self.hardware.tracer.set_place(Location::caller());
        let cpu = self.cpu();
        cpu.order();
        let (pa, all) = page.map_or((0, true), |page| (page.get(), false));
        self.hardware.refetch_page(cpu.id(), pa, all);
    }

    /// An invalidation as the hardware knows it, for programs that do not use the engine.
    #[track_caller]
    pub fn tlbi(&self, tlbi: Tlbi) {
        self.hardware.tracer.set_place(Location::caller());
        let operations = self.operations(&tlbi);
        self.issue(tlbi, operations);
    }

    /// DSB and ISB: stores are visible, invalidations complete.
    #[track_caller]
    pub fn dsb(&self) {
        self.hardware.tracer.set_place(Location::caller());
        self.complete();
    }

    /// DSB for stores, and ISB.
    #[track_caller]
    pub fn dsb_stores(&self) {
        self.hardware.tracer.set_place(Location::caller());
        self.publish();
    }

    /// Runs a handler in the midst of an edit. A contiguous run of which the edit has changed a
    /// part so far has to be whole at the edit's own next barrier, and not at those of the handler.
    pub fn handle<T>(&self, handler: impl FnOnce() -> T) -> T {
        self.hardware.handle(self.cpu().id(), handler)
    }

    /// A program's own rule.
    pub fn check(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.report(Rule::Program, what());
        }
    }

    /// Reports that a rule is broken, by the running CPU.
    pub fn report(&self, rule: Rule, what: String) {
        self.hardware.violate(rule, self.cpu().id(), what);
    }

    /// From now on hardware does nothing unasked and frames are not refused: what was begun must
    /// come to its end.
    pub fn calm(&self) {
        self.hardware.calm();
        self.scheduler.calm();
        self.refuse_once_in.set(0);
    }

    /// Everything must have come to rest. Gives the rules that were broken, now or before.
    pub fn finish(&self) -> Vec<Violation> {
        self.calm();
        self.hardware.finish(self.cpu().id());
        self.violations()
    }

    /// The rules that were broken so far, the first ones.
    pub fn violations(&self) -> Vec<Violation> {
        self.hardware.violations()
    }

    /// A digest of all memory that is handed out, for comparing two runs: where each frame is, what
    /// it is used for, and what is in it.
    pub fn digest(&self) -> u64 {
        let memory = &self.hardware.memory;
        // FNV-1a (Fowler, Noll, Vo), by words.
        let add = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        let state = |&frame: &usize| memory.meta(frame).state.get();
        let taken = (0..memory.frames()).filter(|frame| state(frame) != State::Free);
        taken.fold(0xcbf2_9ce4_8422_2325, |hash, frame| {
            let pa = memory.address(frame);
            let words = (0..memory.entries() as u64).map(|index| memory.read(pa + index * 8));
            words.fold(add(add(hash, pa), state(&frame) as u64), add)
        })
    }

    /// A lock whose release makes what its holder stored visible to the next.
    pub fn new_lock(&self) -> MachineLock<'_> {
        MachineLock {
            machine: self,
            lock: Lock::new(LockCosts {
                take: self.costs.lock_take,
                hand_over: self.costs.lock_hand_over,
            }),
        }
    }

    // ---- What all that is made of ----

    /// Spends what something costs. Many profiles leave some costs out.
    #[inline(always)]
    fn pay(&self, price: Price) {
        if price != Price::FREE {
            self.cpu().pay(price);
        }
    }

    fn refuses(&self) -> bool {
        let once_in = self.refuse_once_in.get();
        once_in != 0 && self.hardware.dice.is_on() && self.hardware.dice.once_in(once_in)
    }

    #[inline(always)]
    fn publish(&self) {
        let cpu = self.cpu();
        self.publications.update(|n| n + 1);
        self.pay(self.prices.publish);
        cpu.order();
        self.hardware.publish_and_synchronise(cpu.id());
    }

    /// How many instructions an invalidation takes.
    fn operations(&self, tlbi: &Tlbi) -> u64 {
        let twice = 1 + u64::from(self.architecture().invalidate_twice);
        let Some((first, last)) = tlbi.range else {
            return twice;
        };
        if self.architecture().range_invalidation {
            return twice;
        }
        let page = self.hardware.memory.page_shift();
        let shift = match tlbi.stride {
            Some(stride) => u32::from(stride),
            None => page + (page - 3) * u32::from(tlbi.depth.unwrap_or(0)),
        };
        (((last - first) >> shift) + 1) * twice
    }

    #[inline(always)]
    fn issue(&self, tlbi: Tlbi, operations: u64) {
        let cpu = self.cpu();
        let id = cpu.id();
        self.invalidations.update(|n| n + operations);
        cpu.spend(self.costs.issue * operations);
        if self.costs.bus != Time::ZERO && tlbi.broadcast {
            let until = self.bus.reserve(cpu, self.costs.bus * operations);
            self.bus_until[id].set(until);
        } else {
            cpu.order();
        }
        self.hardware.invalidate(id, tlbi);
    }

    #[inline(always)]
    fn complete(&self) {
        self.wait_for_completion();
        self.hardware.synchronise(self.cpu().id());
    }

    /// The DSB without the ISB.
    #[inline(always)]
    pub(crate) fn wait_for_completion(&self) {
        let cpu = self.cpu();
        let id = cpu.id();
        self.completions.update(|n| n + 1);
        cpu.spend(self.costs.complete);
        cpu.wait_until(self.bus_until[id].get());
        cpu.order();
        self.hardware.take_effect(id);
        // Accesses of others that were translated before that come to their end.
        if self.hardware.cpus() > 1 && !is_cut_short() {
            while let Some(until) = self.hardware.under_way(id) {
                cpu.wait_until(until.max(cpu.now() + Time::ps(1)));
                cpu.order();
            }
        }
        self.hardware.complete(id);
    }
}

fn name(want: Want) -> &'static str {
    match want {
        Want::Read => "read",
        Want::Write => "write",
        Want::Execute => "execute",
    }
}

/// Page-modification logging.
impl Machine {
    /// The running CPU logs in this page, from entry `index` down, which pages of its guest it
    /// makes dirty; or logs nothing any more. Only where tables are EPT, and hardware sets dirty
    /// flags.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Half, Ipa, Mapping, Pa, Span, format::Ept};
    /// # use tablewright_machine::{Architecture, Machine, Memory, Request, Setup};
    /// let architecture =
    ///     Architecture { hardware_access: true, hardware_dirty: true, ..Architecture::ept() };
    /// let machine = Machine::new(Setup::new(architecture, Memory::new(16, 12, 1 << 30)));
    /// let mapper = machine.new_space();
    /// let mut space = AddressSpace::<Ept<4>, _>::new(mapper).unwrap();
    /// mapper.attach(space.root(), Half::Lower, 0);
    /// let span = Span::new(Ipa::new(0), 4 << 12)?;
    /// let clean = Attrs { dirty: false, ..Attrs::GUEST_MEMORY };
    /// space.map(span, Pa::new(1 << 40), Mapping::new(clean))?;
    /// let log = machine.take_page().unwrap();
    /// machine.run(|_| {
    ///     mapper.load();
    ///     machine.log_modifications(Some(log), 511);
    ///     for at in [0x2008, 0x1000, 0x2010] {
    ///         machine.access(Request::write(at)).unwrap();
    ///     }
    ///     assert_eq!(machine.modification_index(0), 509);
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn log_modifications(&self, page: Option<Pa>, index: u16) {
        let cpu = self.cpu();
        cpu.order();
        self.hardware.set_modification_log(cpu.id(), page.map(Pa::get), index);
    }

    /// The entry of its log that a CPU would write next, or a number from 512 on: it is full.
    pub fn modification_index(&self, of: usize) -> u16 {
        self.cpu().order();
        self.hardware.modification_index(of)
    }
}
