//! The memory of a guest, by the engine's `Guest`: virtual CPUs fault on it, and each of them does
//! what hosts do as well.
//!
//! The guest has no tables of its own: what it accesses is what stage 2 translates. Its host gives
//! pages and takes them back, shares them and copies them, puts blocks in their place and takes
//! them apart, changes slots, logs writes, and runs out of memory. It knows what may be reached
//! when, and which pages were written, and the guest knows what it has written:
//!
//! * an access that succeeds leads to a page that backs its address, with what was written there
//!   last;
//! * no page is given back while it may be reached, and none is lost;
//! * whatever was written is dirty in a leaf that the host is told of;
//! * whatever was written while writes are logged was marked by the handler of a fault.

mod accesses;
mod edits;
mod host;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;

use tablewright::guest::{
    Access, Backing, Cause, Declined, Fault, Gather, Guest, Log, Pass, Slot, SlotCell, Zap,
};
use tablewright::shared::{DeferredReclaim, Mapped, Refused, SharedPlatform, SharedSpace};
use tablewright::{AddressSpace, Change, Format, Half, Ipa, Leaf, Level, Memory, Pa, Perms, Span};
use tablewright_machine::{
    Architecture, Cause as Why, Cpu, Fault as Trap, Granule, Machine, Mapper, Memory as Frames,
    Outcome, Regime, Request, Rule, RunError, Time, Want,
};

use super::destroy;
use super::later::Later;
use crate::dice::Dice;
use crate::hardware::{architecture, memory, perhaps_nested, small, stage2};
use host::{Block, CODE, FAR, FIXED, Host, Now, PAGES, Page, SMALL};

/// The formats of stage 2. Without the feature `every-format` those with fewer levels and no
/// options stand for the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    K4,
    /// Sixteen first tables.
    #[cfg(feature = "every-format")]
    K4Forced,
    /// Four levels.
    #[cfg(feature = "every-format")]
    K4Deep,
    /// Sixteen first tables.
    K16,
    #[cfg(feature = "every-format")]
    K16Forced,
    /// Four first tables.
    #[cfg(feature = "every-format")]
    K64,
    #[cfg(feature = "every-format")]
    K64Forced,
    Ept4,
    #[cfg(feature = "every-format")]
    Ept5,
    Npt4,
    #[cfg(feature = "every-format")]
    Npt5,
}

/// Evaluates `$body` with `$format` bound to the format of `$kind`; it is compiled for each.
macro_rules! with_stage2 {
    ($kind:expr, $format:ident => $body:expr) => {{
        match $kind {
            Kind::K4 => {
                type $format = tablewright::format::Stage2K4<40>;
                $body
            }
            #[cfg(feature = "every-format")]
            Kind::K4Forced => {
                type $format =
                    tablewright::format::Stage2K4<43, { tablewright::format::FORCED_WRITE_BACK }>;
                $body
            }
            #[cfg(feature = "every-format")]
            Kind::K4Deep => {
                type $format = tablewright::format::Stage2K4<48>;
                $body
            }
            Kind::K16 => {
                type $format = tablewright::format::Stage2K16<40>;
                $body
            }
            #[cfg(feature = "every-format")]
            Kind::K16Forced => {
                type $format =
                    tablewright::format::Stage2K16<48, { tablewright::format::FORCED_WRITE_BACK }>;
                $body
            }
            #[cfg(feature = "every-format")]
            Kind::K64 => {
                type $format = tablewright::format::Stage2K64<44>;
                $body
            }
            #[cfg(feature = "every-format")]
            Kind::K64Forced => {
                type $format =
                    tablewright::format::Stage2K64<42, { tablewright::format::FORCED_WRITE_BACK }>;
                $body
            }
            Kind::Ept4 => {
                type $format = tablewright::format::Ept<4>;
                $body
            }
            #[cfg(feature = "every-format")]
            Kind::Ept5 => {
                type $format = tablewright::format::Ept<5>;
                $body
            }
            Kind::Npt4 => {
                type $format = tablewright::format::Npt<4>;
                $body
            }
            #[cfg(feature = "every-format")]
            Kind::Npt5 => {
                type $format = tablewright::format::Npt<5>;
                $body
            }
        }
    }};
}

/// The most virtual CPUs.
const MOST_CPUS: u64 = 8;
const VMID: u16 = 3;
/// Frames for tables, and for pages that come one by one.
const FRAMES: usize = 200;
/// Blocks of pages, where a block is small enough to be made of them.
const BLOCKS: usize = 2;

impl Kind {
    fn of(dice: &Dice) -> Self {
        // Large tables take the host of the simulation several times as long.
        match dice.below(24) {
            #[cfg(feature = "every-format")]
            5..=6 => Self::K4Forced,
            #[cfg(feature = "every-format")]
            7..=8 => Self::K4Deep,
            #[cfg(feature = "every-format")]
            12 => Self::K16Forced,
            #[cfg(feature = "every-format")]
            13 => Self::K64,
            #[cfg(feature = "every-format")]
            14 => Self::K64Forced,
            #[cfg(feature = "every-format")]
            19 => Self::Ept5,
            #[cfg(feature = "every-format")]
            23.. => Self::Npt5,
            0..=8 => Self::K4,
            9..=14 => Self::K16,
            15..=19 => Self::Ept4,
            _ => Self::Npt4,
        }
    }

    fn regime(self) -> Regime {
        let arm = |granule, bits, forced| stage2(granule, bits, false, forced);
        let ept = |levels| Regime::Ept { levels, mode_based: false };
        match self {
            Self::K4 => arm(Granule::K4, 40, false),
            #[cfg(feature = "every-format")]
            Self::K4Forced => arm(Granule::K4, 43, true),
            #[cfg(feature = "every-format")]
            Self::K4Deep => arm(Granule::K4, 48, false),
            Self::K16 => arm(Granule::K16, 40, false),
            #[cfg(feature = "every-format")]
            Self::K16Forced => arm(Granule::K16, 48, true),
            #[cfg(feature = "every-format")]
            Self::K64 => arm(Granule::K64, 44, false),
            #[cfg(feature = "every-format")]
            Self::K64Forced => arm(Granule::K64, 42, true),
            Self::Ept4 => ept(4),
            #[cfg(feature = "every-format")]
            Self::Ept5 => ept(5),
            Self::Npt4 => Regime::Npt { levels: 4 },
            #[cfg(feature = "every-format")]
            Self::Npt5 => Regime::Npt { levels: 5 },
        }
    }

    fn architecture(self, dice: &Dice) -> Architecture {
        let base = architecture(self.regime(), dice, |dice| dice.below(3) > 0);
        perhaps_nested(small(base, dice), dice)
    }
}

/// The hardware that a seed stands for, and its memory.
pub fn setup(dice: &Dice) -> (Kind, Architecture, Frames, usize) {
    let kind = Kind::of(dice);
    let architecture = kind.architecture(dice);
    let page_shift = architecture.regime.page_shift();
    let frames = if page_shift == 12 { FRAMES + BLOCKS * 512 } else { FRAMES };
    let cpus = 2 + dice.below(MOST_CPUS - 1) as usize;
    (kind, architecture, memory(frames, page_shift), cpus)
}

pub fn run(
    machine: &Machine,
    dice: &Dice,
    kind: Kind,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    with_stage2!(kind, F => live::<F>(machine, dice, between))
}

// ---- The host's memory ----

/// A slot that the guest has, will have, or had just before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Coming,
    Steady,
    Going,
}

/// Slots, and places for each.
const SLOTS: u16 = 4;
const PLACES: u64 = 3;

/// The first of the host's pages behind slot 1.
const BEHIND: [u64; 3] = [0, 2, 4];

/// Knowledge of the writes to a slot.
#[derive(Default)]
struct Marks {
    /// Writes fault first, all of them.
    steady: bool,
    round: u32,
    /// By the handler of faults.
    marks: BTreeSet<u64>,
    /// Pages that have to be marked.
    written: BTreeSet<u64>,
}

struct Vm<'a, 'm, F: Format<Input = Ipa>> {
    machine: &'m Machine,
    mapper: Mapper<'m>,
    guest: Guest<'a, F, Mapper<'m>>,
    host: Host<'m>,
    slots: RefCell<Vec<(Slot, Phase)>>,
    /// Changes of that so far.
    version: Cell<u32>,
    /// A CPU is changing it.
    changing: [Cell<bool>; SLOTS as usize],
    logs: RefCell<Vec<Marks>>,
    /// Reclaims that are complete, whose tables may still be walked.
    later: Later<F, Mapper<'m>>,
    /// Leaves that were taken, and that the host has not seen.
    open: Cell<u32>,
    /// No fault is injected any more.
    calm: Cell<bool>,
}

/// A CPU's edits.
type Edits<'g, 'a, 'm, F> = Gather<'g, 'a, F, Mapper<'m>>;

/// The act of a virtual CPU.
enum Deed {
    Read,
    Write(u64),
    /// Its translation is looked at, and nothing else.
    Touch(Request),
}

fn live<F: Format<Input = Ipa>>(
    machine: &Machine,
    dice: &Dice,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    let mapper = machine.new_space();
    let space = loop {
        if let Some(space) = AddressSpace::<F, _>::new(mapper) {
            break space.with_id(VMID);
        }
    };
    mapper.attach(space.root(), Half::Lower, VMID);
    let (page, block) = (1 << F::PAGE_SHIFT, 1u64 << F::shift(Level::new(1)));
    let empty = || Page {
        now: Now::Empty,
        before: Vec::new(),
        past: Vec::new(),
        version: 0,
        busy: false,
        written: false,
        reported: false,
        words: HashMap::new(),
    };
    let far = |n| Pa::new(FAR + (1 << 40) + n * block);
    let mut cells = [const { SlotCell::new() }; SLOTS as usize];
    let space = SharedSpace::new(space).expect("no code runs on it");
    let vm = Vm::<F> {
        machine,
        mapper,
        guest: Guest::new(space, &mut cells),
        host: Host {
            machine,
            page,
            block,
            simulated: page == 1 << 12,
            pages: RefCell::new((0..PAGES).map(|_| empty()).collect()),
            second: Cell::new(Block::Gone),
            busy: Cell::new(false),
            lost: RefCell::default(),
            far: RefCell::new((0..3).map(far).collect()),
        },
        slots: RefCell::default(),
        version: Cell::new(0),
        changing: [const { Cell::new(false) }; SLOTS as usize],
        logs: RefCell::new((0..SLOTS).map(|_| Marks::default()).collect()),
        later: Later::new(),
        open: Cell::new(0),
        calm: Cell::new(false),
    };
    for id in 0..SLOTS {
        vm.insert(id, dice);
    }
    let seed = dice.below(1 << 48);
    let steps = 8 + dice.below(24);
    let host_once_in = dice.pick(&[3, 6, 12]);
    let outcome = machine.run(|cpu| {
        mapper.load();
        let dice = Dice::of(seed, cpu.id() as u64);
        let mut gather = vm.guest.gather();
        for _ in 0..steps {
            if dice.once_in(host_once_in) {
                vm.manage(&dice, &mut gather);
            } else {
                vm.step(cpu, &dice, &mut gather);
            }
            cpu.spend(dice.time());
        }
    })?;
    between(machine.digest());
    if machine.violations().is_empty() {
        machine.calm();
        vm.calm.set(true);
        vm.check_all(dice);
        vm.tear_down();
    }
    Ok(outcome)
}

impl<'a, 'm, F: Format<Input = Ipa>> Vm<'a, 'm, F> {
    fn cpu(&self) -> Cpu<'m> {
        self.machine.cpu()
    }

    // ---- Slots ----

    /// The address of a slot at one of its places.
    fn place(id: u16, place: u64) -> u64 {
        (1 + u64::from(id) * PLACES + place) << 33
    }

    /// A slot as it may be.
    fn slot(&self, id: u16, dice: &Dice) -> Slot {
        let (page, block) = (self.host.page, self.host.block);
        let has_giant = F::is_leaf_level(Level::new(2));
        let (size, host, hint) = match id {
            // Single pages, and a block.
            0 => (2 * block, 0, block),
            // Some of the same pages, and not where they fit.
            1 => (6 * page, 2 * page, page),
            2 if has_giant => (1 << F::shift(Level::new(2)), FIXED, 1 << 30),
            2 => (2 * block, FIXED, block),
            _ => (2 * block, FIXED + (1 << 38), block),
        };
        let guest = span(Self::place(id, dice.below(PLACES)), size);
        Slot {
            memory: if id == 3 { Memory::Device } else { Memory::Normal },
            page: hint,
            perms: if id == 3 {
                Perms::READ | Perms::WRITE
            } else {
                Perms::READ | Perms::WRITE | Perms::EXEC
            },
            ..Slot::memory(guest, host).with_id(id)
        }
    }

    fn known(&self, id: u16) -> Option<Slot> {
        let slots = self.slots.borrow();
        let mut of = slots.iter().filter(|(slot, phase)| slot.id == id && *phase == Phase::Steady);
        of.next().map(|&(slot, _)| slot)
    }

    fn say(&self, slot: Slot, phase: Phase) {
        self.version.update(|version| version + 1);
        let mut slots = self.slots.borrow_mut();
        match slots.iter_mut().find(|(other, _)| *other == slot) {
            Some((_, is)) => *is = phase,
            None => slots.push((slot, phase)),
        }
    }

    fn forget(&self, slot: Slot) {
        self.version.update(|version| version + 1);
        self.slots.borrow_mut().retain(|(other, _)| *other != slot);
    }

    /// Everything goes: no table, no page is left.
    fn tear_down(self) {
        let dice = Dice::of(1, 1);
        let mut gather = self.guest.gather();
        for id in 0..SLOTS {
            if let Ok(zap) = self.guest.remove(id) {
                self.unmap(zap, &dice, &mut gather);
            }
        }
        drop(gather);
        for _ in 0..10_000 {
            if self.later.is_empty() {
                break;
            }
            self.reclaim_some();
        }
        for number in 0..PAGES {
            self.check_dirty(number, true);
        }
        let Self { machine, mapper, guest, host, .. } = self;
        let block = host.second.get();
        for page in host.pages.borrow().iter() {
            match page.now {
                Now::Here { frame, .. } | Now::Away(frame) => {
                    if host.is_simulated(frame) && !host.is_part(frame, block) {
                        machine.give_page(frame);
                    }
                }
                Now::Empty | Now::Moving => {}
            }
        }
        if let Block::Whole(base) | Block::Parts(base) = block {
            host.give_block(base);
        }
        destroy(machine, guest.into_space().into_exclusive(), &mapper);
    }
}

/// Knowledge about an address at one time.
struct Seen {
    version: u32,
    slots: Vec<(Slot, Phase)>,
    /// Frames to which it may lead, and whether they may be written there.
    frames: Vec<(Pa, bool)>,
    /// Changes of the pages behind it so far.
    versions: u64,
    pages: Vec<usize>,
    /// Writes to it are logged: the slot, and how often its log was read.
    log: Option<(u16, u32)>,
}

/// The outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Served {
    /// The guest goes on.
    Again,
    /// It is to be taken again after a while.
    Later,
    /// There is nothing for it.
    Declined,
}

pub fn span(first: u64, size: u64) -> Span<Ipa> {
    Span::new(Ipa::new(first), size).expect("the span of a slot is no empty one")
}

fn perm(want: Want) -> Perms {
    match want {
        Want::Read => Perms::READ,
        Want::Write => Perms::WRITE,
        Want::Execute => Perms::EXEC,
    }
}

/// Classifies the machine's fault as the engine takes it. The level is told, or not.
pub fn classify(va: u64, want: Want, trap: Trap, dice: &Dice) -> Option<Fault> {
    let (at, want, cause, depth) = match trap {
        Trap::Translation { depth } => (va, want, Cause::Translation, depth),
        Trap::AccessFlag { depth } => (va, want, Cause::AccessFlag, depth),
        Trap::Permission { depth } => (va, want, Cause::Permission, depth),
        Trap::Address | Trap::LogFull => return None,
        Trap::Second { ipa, want, cause, depth, .. } => {
            let cause = match cause {
                Why::Translation => Cause::Translation,
                Why::AccessFlag => Cause::AccessFlag,
                Why::Permission => Cause::Permission,
            };
            (ipa, want, cause, depth)
        }
    };
    let access = match want {
        Want::Read => Access::Read,
        Want::Write => Access::Write,
        Want::Execute => Access::Execute,
    };
    Some(Fault {
        cause,
        level: (!dice.once_in(3)).then_some(Level::new(depth)),
        ..Fault::new(Ipa::new(at), access)
    })
}
