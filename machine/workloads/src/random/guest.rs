//! The memory of a guest, by the engine's `Guest`: virtual CPUs fault on it, and each of them does what hosts do as well.
//!
//! The guest has no tables of its own: what it accesses is what stage 2 translates. Its host gives pages and takes them
//! back, shares them and copies them, puts blocks in their place and takes them apart, changes slots, logs writes, and
//! runs out of memory. It knows what may be reached when, and which pages were written, and the guest knows what it has
//! written:
//!
//! * an access that succeeds leads to a page that backs its address, with what was written there last;
//! * no page is given back while it may be reached, and none is lost;
//! * whatever was written is dirty in a leaf that the host is told of;
//! * whatever was written while writes are logged was marked by the handler of a fault.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;

use tablewright::guest::{
    Access, Backing, Cause, Declined, Fault, Gather, Guest, Log, Pass, Slot, SlotCell, Zap,
};
use tablewright::shared::{Cut, Mapped, Refused, SharedPlatform, SharedSpace};
use tablewright::{AddressSpace, Change, Format, Half, Ipa, Leaf, Level, Memory, Pa, Perms, Span};
use tablewright_machine::{
    Architecture, Cause as Why, Cpu, Fault as Trap, Granule, Machine, Mapper, Memory as Frames,
    Ordering, Outcome, Regime, Request, Rule, RunError, Time, Want,
};

use super::later::Later;
use super::{Dice, destroy, memory, small};

/// The formats of stage 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    K4,
    /// Sixteen first tables.
    K4Forced,
    /// Four levels.
    K4Deep,
    /// Sixteen first tables.
    K16,
    K16Forced,
    /// Four first tables.
    K64,
    K64Forced,
    Ept4,
    Ept5,
    Npt4,
    Npt5,
}

/// Evaluates `$body` with `$format` bound to the format of `$kind`; it is compiled for each.
macro_rules! with_stage2 {
    ($kind:expr, $format:ident => $body:expr) => {{
        use tablewright::format::{Ept, Npt, Stage2K4, Stage2K16, Stage2K64};
        match $kind {
            Kind::K4 => {
                type $format = Stage2K4<40, false>;
                $body
            }
            Kind::K4Forced => {
                type $format = Stage2K4<43, true>;
                $body
            }
            Kind::K4Deep => {
                type $format = Stage2K4<48, false>;
                $body
            }
            Kind::K16 => {
                type $format = Stage2K16<40, false>;
                $body
            }
            Kind::K16Forced => {
                type $format = Stage2K16<48, true>;
                $body
            }
            Kind::K64 => {
                type $format = Stage2K64<44, false>;
                $body
            }
            Kind::K64Forced => {
                type $format = Stage2K64<42, true>;
                $body
            }
            Kind::Ept4 => {
                type $format = Ept<4>;
                $body
            }
            Kind::Ept5 => {
                type $format = Ept<5>;
                $body
            }
            Kind::Npt4 => {
                type $format = Npt<4>;
                $body
            }
            Kind::Npt5 => {
                type $format = Npt<5>;
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
            0..=4 => Self::K4,
            5..=6 => Self::K4Forced,
            7..=8 => Self::K4Deep,
            9..=11 => Self::K16,
            12 => Self::K16Forced,
            13 => Self::K64,
            14 => Self::K64Forced,
            15..=18 => Self::Ept4,
            19 => Self::Ept5,
            20..=22 => Self::Npt4,
            _ => Self::Npt5,
        }
    }

    fn regime(self) -> Regime {
        let arm = |granule, input_bits, forced_write_back| Regime::Arm64Stage2 {
            granule,
            input_bits,
            wide: false,
            forced_write_back,
        };
        let ept = |levels| Regime::Ept {
            levels,
            mode_based: false,
        };
        match self {
            Self::K4 => arm(Granule::K4, 40, false),
            Self::K4Forced => arm(Granule::K4, 43, true),
            Self::K4Deep => arm(Granule::K4, 48, false),
            Self::K16 => arm(Granule::K16, 40, false),
            Self::K16Forced => arm(Granule::K16, 48, true),
            Self::K64 => arm(Granule::K64, 44, false),
            Self::K64Forced => arm(Granule::K64, 42, true),
            Self::Ept4 => ept(4),
            Self::Ept5 => ept(5),
            Self::Npt4 => Regime::Npt { levels: 4 },
            Self::Npt5 => Regime::Npt { levels: 5 },
        }
    }

    fn architecture(self, dice: &Dice) -> Architecture {
        let regime = self.regime();
        let base = match regime {
            Regime::Ept { .. } => {
                let flags = dice.below(3) > 0;
                Architecture {
                    hardware_access: flags,
                    hardware_dirty: flags,
                    regime,
                    ..Architecture::ept()
                }
            }
            Regime::Npt { .. } => Architecture {
                regime,
                ..Architecture::npt()
            },
            _ => {
                let hardware_access = dice.once_in(2);
                let forced = matches!(
                    regime,
                    Regime::Arm64Stage2 {
                        forced_write_back: true,
                        ..
                    }
                );
                Architecture {
                    ordering: dice.pick(&[Ordering::Base, Ordering::Ets2]),
                    bbm: dice.below(4) as u8,
                    hardware_access,
                    hardware_dirty: hardware_access && dice.below(3) > 0,
                    invalidate_twice: dice.once_in(4),
                    permission_fault_drops_entry: dice.once_in(2),
                    forced_write_back: forced,
                    // With forced write-back nothing is cleaned for the sake of fetches.
                    idc: forced || dice.once_in(2),
                    dic: dice.once_in(3),
                    icache_aliasing: dice.once_in(4),
                    guest: Some(Regime::Arm64Stage1 {
                        granule: Granule::K4,
                        wide: false,
                    }),
                    ..Architecture::arm64(regime)
                }
            }
        };
        let base = small(base, dice);
        Architecture {
            // A guest whose stage 1, and with it its caches, is off; or one that is known by stage 2 alone.
            guest: base.guest.filter(|_| dice.once_in(2)),
            ..base
        }
    }
}

/// The hardware that a seed stands for, and its memory.
pub fn setup(dice: &Dice) -> (Kind, Architecture, Frames, usize) {
    let kind = Kind::of(dice);
    let architecture = kind.architecture(dice);
    let page_shift = architecture.regime.page_shift();
    let frames = if page_shift == 12 {
        FRAMES + BLOCKS * 512
    } else {
        FRAMES
    };
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

/// Pages of the host that come one by one, and those of a block that are used.
const SMALL: usize = 10;
const IN_BLOCK: [u64; 6] = [0, 1, 2, 17, 255, 511];
const PAGES: usize = SMALL + IN_BLOCK.len();
/// The guest does not write to this one, and fetches from it.
const CODE: usize = 3;
/// Where the host keeps memory that never moves.
const FIXED: u64 = 1 << 40;
/// Where that is, and where blocks are that are too large for the machine's memory.
const FAR: u64 = 1 << 41;

/// What the host has for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Now {
    /// Nothing yet: it is zero.
    Empty,
    /// A frame.
    Here { frame: Pa, writable: bool },
    /// It is on its way.
    Moving,
    /// Another frame, which the guest does not see.
    Away(Pa),
}

struct Page {
    now: Now,
    /// What it was, and may still be reached, with or without the permission to write.
    before: Vec<(Pa, bool)>,
    /// All frames that it had since the host has last looked whether it was written: leaves may be seen late.
    past: Vec<Pa>,
    /// Changes so far.
    version: u32,
    /// A CPU is at it.
    busy: bool,
    /// It was written since the host has last looked, and a leaf has said so.
    written: bool,
    reported: bool,
    /// What each CPU has written; `None`: something that was lost with memory that is not simulated.
    words: HashMap<usize, Option<u64>>,
}

/// What the host has for the second block of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    /// Nothing, but for single pages.
    Gone,
    Whole(Pa),
    /// Taken apart: each page by itself, some of them given back.
    Parts(Pa),
}

struct Host<'m> {
    machine: &'m Machine,
    page: u64,
    /// The size of a block.
    block: u64,
    /// A block is made of frames of the machine.
    simulated: bool,
    pages: RefCell<Vec<Page>>,
    second: Cell<Block>,
    /// A CPU is changing the second block.
    busy: Cell<bool>,
    /// Pages of it that were given back one by one.
    lost: RefCell<HashSet<u64>>,
    /// Blocks that are not made of frames of the machine.
    far: RefCell<Vec<Pa>>,
}

impl Host<'_> {
    /// Where a page is in the host's own numbers.
    fn at(&self, page: usize) -> u64 {
        match page.checked_sub(SMALL) {
            None => page as u64 * self.page,
            Some(part) => self.block + self.inside(part),
        }
    }

    fn inside(&self, part: usize) -> u64 {
        // The last of a table, whatever its size.
        let last = self.block / self.page - 1;
        IN_BLOCK[part].min(last) * self.page
    }

    fn page_at(&self, at: u64) -> Option<usize> {
        (0..PAGES).find(|&page| self.at(page) == at)
    }

    /// Whether a page stands in its place in a block that was taken apart, and goes with the block.
    fn is_part(&self, frame: Pa, of: Block) -> bool {
        let (Block::Whole(base) | Block::Parts(base)) = of else {
            return false;
        };
        let block = base.get()..base.get() + self.block;
        block.contains(&frame.get()) && !self.lost.borrow().contains(&frame.get())
    }

    fn is_simulated(&self, frame: Pa) -> bool {
        let memory = self.machine.memory();
        (memory.first()..memory.end()).contains(&frame.get())
    }

    fn take_block(&self) -> Option<Pa> {
        if self.simulated {
            return self.machine.take_pages((self.block / self.page) as usize);
        }
        self.far.borrow_mut().pop()
    }

    /// Gives a block back, but for what was given back before.
    fn give_block(&self, base: Pa) {
        if !self.simulated {
            self.far.borrow_mut().push(base);
            return;
        }
        let lost = std::mem::take(&mut *self.lost.borrow_mut());
        for frame in (base.get()..base.get() + self.block).step_by(self.page as usize) {
            if !lost.contains(&frame) {
                self.machine.give_page(Pa::new(frame));
            }
        }
    }

    /// Gives a page back.
    fn give(&self, frame: Pa) {
        if let Block::Parts(base) = self.second.get()
            && (base.get()..base.get() + self.block).contains(&frame.get())
        {
            self.lost.borrow_mut().insert(frame.get());
        }
        if self.is_simulated(frame) {
            self.machine.give_page(frame);
        }
    }

    fn copy(&self, from: Pa, to: Pa) {
        if self.is_simulated(from) && self.is_simulated(to) {
            self.machine.copy_page(from, to);
        }
    }

    /// No CPU is at a page.
    fn is_steady(&self, page: usize) -> bool {
        let page = &self.pages.borrow()[page];
        !page.busy && page.now != Now::Moving
    }

    /// Takes a page, if no other CPU has it. Gives its frame.
    fn lock(&self, number: usize) -> Option<Pa> {
        if !self.is_steady(number) || (number >= SMALL && self.busy.get()) {
            return None;
        }
        let page = &mut self.pages.borrow_mut()[number];
        let Now::Here { frame, .. } = page.now else {
            return None;
        };
        page.busy = true;
        // A page of a block is one by itself from now on.
        if let (true, Block::Whole(base)) = (number >= SMALL, self.second.get()) {
            self.second.set(Block::Parts(base));
        }
        Some(frame)
    }

    fn unlock(&self, page: usize) {
        self.pages.borrow_mut()[page].busy = false;
    }

    /// A page becomes something else; what it was may be reached for some time.
    fn change(&self, page: usize, now: Now) {
        let page = &mut self.pages.borrow_mut()[page];
        if let Now::Here { frame, writable } = page.now {
            page.before.push((frame, writable));
            page.past.push(frame);
        }
        page.now = now;
        page.version += 1;
    }

    /// What it was cannot be reached any more.
    fn settle(&self, page: usize) {
        let page = &mut self.pages.borrow_mut()[page];
        page.before.clear();
        page.version += 1;
    }

    /// The host looks a page up, for an access.
    fn look_up(&self, at: u64, access: Access) -> Option<Backing> {
        if at >= FIXED {
            let frame = Pa::new(FAR + (at - FIXED));
            return Some(Backing::new(frame, 1 << 39));
        }
        let number = self.page_at(at & !(self.page - 1))?;
        let now = self.pages.borrow()[number].now;
        match now {
            Now::Moving => None,
            Now::Here { frame, writable } => {
                let whole = matches!(self.second.get(), Block::Whole(_)) && number >= SMALL;
                let size = if whole { self.block } else { self.page };
                let backing = Backing::new(Pa::new(frame.get() + at % self.page), size);
                if writable {
                    return Some(backing);
                }
                let perms = Perms::all().difference(Perms::ANY_WRITE);
                (access != Access::Write).then_some(backing.with_perms(perms))
            }
            Now::Empty | Now::Away(_) => {
                let frame = self.machine.take_page()?;
                let mut pages = self.pages.borrow_mut();
                let page = &mut pages[number];
                if page.now != now {
                    // Another CPU was first.
                    drop(pages);
                    self.machine.give_page(frame);
                    return None;
                }
                page.now = Now::Moving;
                drop(pages);
                if let Now::Away(from) = now {
                    self.copy(from, frame);
                    self.machine.give_page(from);
                }
                self.machine.write_page(frame);
                let mut pages = self.pages.borrow_mut();
                pages[number].now = Now::Here {
                    frame,
                    writable: true,
                };
                pages[number].version += 1;
                drop(pages);
                self.look_up(at, access)
            }
        }
    }

    /// A leaf is gone, and says whether its memory was written.
    fn report<F: Format>(&self, leaf: &Leaf<F>) {
        if !leaf.attrs().dirty {
            return;
        }
        let memory = leaf.frame().get()..leaf.frame().get() + leaf.size();
        for page in self.pages.borrow_mut().iter_mut() {
            let now = match page.now {
                Now::Here { frame, .. } => Some(frame),
                _ => None,
            };
            let mut frames = page.past.iter().copied().chain(now);
            page.reported |= frames.any(|frame| memory.contains(&frame.get()));
        }
    }
}

// ---- The guest ----

/// A slot that the guest has, will have, or had a moment ago.
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

/// What is known of the writes to a slot.
#[derive(Default)]
struct Marks {
    /// Writes fault first, all of them.
    steady: bool,
    round: u32,
    /// By the handler of faults.
    marks: BTreeSet<u64>,
    /// What has to be marked.
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
    /// What is complete and not quiet.
    later: Later<F, Mapper<'m>>,
    /// What was taken, and whose leaves the host has not seen.
    open: Cell<u32>,
    /// No fault is injected any more.
    calm: Cell<bool>,
}

/// A CPU's edits.
type Edits<'g, 'a, 'm, F> = Gather<'g, 'a, F, Mapper<'m>>;

/// What a virtual CPU does.
enum Deed {
    Read,
    Write(u64),
    /// Where it leads is looked at, and nothing else.
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
    let cells = [const { SlotCell::new() }; SLOTS as usize];
    let space = SharedSpace::new(space).expect("no code runs on it");
    let vm = Vm::<F> {
        machine,
        mapper,
        guest: Guest::new(space, &cells),
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
        let dice = Dice::new(seed, cpu.id() as u64);
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

    /// Where a slot is at one of its places.
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
            memory: if id == 3 {
                Memory::Device
            } else {
                Memory::Normal
            },
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
        let mut of = slots
            .iter()
            .filter(|(slot, phase)| slot.id == id && *phase == Phase::Steady);
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

    fn insert(&self, id: u16, dice: &Dice) {
        let slot = self.slot(id, dice);
        self.say(slot, Phase::Coming);
        match self.guest.insert(slot) {
            Ok(()) => self.say(slot, Phase::Steady),
            Err(_) => self.forget(slot),
        }
    }

    /// Puts another slot in the place of one. What it gives back is to be zapped, and then forgotten.
    fn replace(&self, old: Slot, new: Slot) -> Option<Zap<'_, 'a, F, Mapper<'m>>> {
        if new == old {
            return None;
        }
        self.say(old, Phase::Going);
        self.say(new, Phase::Coming);
        let replaced = self.guest.replace(new).ok();
        if replaced.is_some() {
            self.say(new, Phase::Steady);
        } else {
            self.forget(new);
            self.say(old, Phase::Steady);
        }
        replaced
    }

    fn change_slot<'g>(&'g self, id: u16, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let changing = &self.changing[usize::from(id)];
        if changing.replace(true) {
            return;
        }
        match self.known(id) {
            None => self.insert(id, dice),
            Some(slot) => self.change_known(slot, dice, gather),
        }
        changing.set(false);
    }

    fn change_known<'g>(&'g self, slot: Slot, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let log = usize::from(slot.id);
        match dice.below(8) {
            0 | 1 if slot.log.is_on() => {
                self.collect(slot, dice, gather);
                self.logs.borrow_mut()[log].steady = false;
                if let Some(_unchanged) = self.replace(slot, slot.with_log(Log::Off)) {
                    self.forget(slot);
                    if dice.once_in(2) {
                        let _still_logged = self.guest.protect_no_more();
                    }
                }
            }
            0..=2 if slot.log.is_on() => self.collect(slot, dice, gather),
            0..=2 => {
                if let Some(zap) = self.replace(slot, slot.with_log(Log::ByFault)) {
                    if dice.once_in(3) || !self.protect_all() {
                        self.protect(zap, gather);
                    }
                    self.forget(slot);
                    let mut logs = self.logs.borrow_mut();
                    logs[log].steady = true;
                    logs[log].round += 1;
                }
            }
            3 => {
                // Read-only, or not any more.
                let write = slot.perms.contains(Perms::WRITE);
                let perms = slot.perms ^ Perms::WRITE;
                if let Some(zap) = self.replace(slot, slot.with_perms(perms)) {
                    if write {
                        self.protect(zap, gather);
                    }
                    self.forget(slot);
                }
            }
            4 | 5 => {
                let place = Self::place(slot.id, dice.below(PLACES));
                let moved = Slot {
                    guest: span(place, slot.guest.size()),
                    ..slot
                };
                if let Some(zap) = self.replace(slot, moved) {
                    self.unmap(zap, dice, gather);
                    self.forget(slot);
                }
            }
            6 if slot.id == 1 => {
                // Other memory behind the same addresses.
                let host = dice.pick(&BEHIND) * self.host.page;
                if let Some(zap) = self.replace(slot, Slot { host, ..slot }) {
                    self.unmap(zap, dice, gather);
                    self.forget(slot);
                }
            }
            _ => {
                self.logs.borrow_mut()[log].steady = false;
                self.say(slot, Phase::Going);
                match self.guest.remove(slot.id) {
                    Ok(zap) => {
                        self.unmap(zap, dice, gather);
                        self.forget(slot);
                    }
                    Err(_) => {
                        self.say(slot, Phase::Steady);
                        self.logs.borrow_mut()[log].round += 1;
                        self.logs.borrow_mut()[log].steady = slot.log.is_on();
                    }
                }
            }
        }
    }

    /// The log of a slot is read: what was marked is written back, and faults again.
    fn collect<'g>(&'g self, slot: Slot, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let (mut marks, written) = {
            let log = &mut self.logs.borrow_mut()[usize::from(slot.id)];
            log.steady = false;
            (
                std::mem::take(&mut log.marks),
                std::mem::take(&mut log.written),
            )
        };
        match dice.below(3) {
            0 if self.protect_all() => {}
            1 if self.protect_pages(slot, gather) => {}
            _ => self.protect(self.guest.zap(slot.guest), gather),
        }
        let log = &mut self.logs.borrow_mut()[usize::from(slot.id)];
        // A CPU that was at it when the marks were taken has marked by now.
        marks.extend(&log.marks);
        for page in written.difference(&marks) {
            self.machine.report(
                Rule::Program,
                format!("{page:#x} was written, and no fault has marked it in the log"),
            );
        }
        log.steady = true;
        log.round += 1;
    }

    // ---- Zaps ----

    fn wait(&self) {
        self.cpu().spend(Time::ns(150));
    }

    /// In one step, if that can be.
    fn protect_all(&self) -> bool {
        let started = self.guest.space().protect_all();
        started.map(|start| start.drive(|| self.wait())).is_ok()
    }

    /// For the log only, page by page: whether all were.
    fn protect_pages(&self, slot: Slot, gather: &mut Edits<'_, 'a, 'm, F>) -> bool {
        let pages = slot.guest.size() / self.host.page;
        let protected = gather.protect(&slot, 0..pages);
        let moment = self.guest.space().grace_period();
        self.put_off(gather);
        // A CPU that has made a page writable before that marks it in its walk.
        while !self.guest.space().is_over(moment) {
            self.wait();
        }
        protected.is_ok_and(|protected| !protected.passed_over)
    }

    fn protect<'g>(
        &'g self,
        mut zap: Zap<'g, 'a, F, Mapper<'m>>,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        loop {
            let pass = zap.protect(gather, Change::new().write_protect());
            self.put_off(gather);
            match pass {
                Ok(Pass::Waiting) => self.wait(),
                Ok(Pass::Went) => {}
                Ok(Pass::Over) => return,
                Err(error) => return self.machine.report(Rule::Program, error.to_string()),
            }
        }
    }

    fn unmap<'g>(
        &'g self,
        mut zap: Zap<'g, 'a, F, Mapper<'m>>,
        dice: &Dice,
        gather: &mut Edits<'g, 'a, 'm, F>,
    ) {
        let most = dice.pick(&[1, 3, 1000]);
        loop {
            let mut held = Vec::new();
            self.open.update(|open| open + 1);
            let pass = zap.unmap(gather, |leaf| {
                held.push(leaf);
                if held.len() < most {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            });
            if pass != Ok(Pass::Went) {
                self.open.update(|open| open - 1);
                match pass {
                    Ok(Pass::Over) => return,
                    Err(error) => return self.machine.report(Rule::Program, error.to_string()),
                    _ => self.wait(),
                }
                continue;
            }
            let issued = gather.issue();
            if dice.once_in(4) {
                self.cpu().spend(dice.time());
            }
            let cut = issued.complete();
            for leaf in held {
                match cut.release(leaf) {
                    Ok(leaf) => self.host.report(&leaf),
                    Err(_) => self.machine.report(
                        Rule::Program,
                        "a leaf is not that of the gather it came with".to_owned(),
                    ),
                }
            }
            self.keep(cut);
        }
    }

    /// All that is mapped of some of the host's memory is zapped.
    fn sweep_host<'g>(
        &'g self,
        first: u64,
        size: u64,
        mut zap: impl FnMut(Zap<'g, 'a, F, Mapper<'m>>),
    ) {
        let slots: Vec<_> = self.slots.borrow().iter().map(|&(slot, _)| slot).collect();
        for slot in slots {
            let end = slot.host.saturating_add(slot.guest.size());
            let (from, to) = (first.max(slot.host), (first + size).min(end));
            if from < to {
                let at = slot.guest.start().get() + (from - slot.host);
                zap(self.guest.zap(span(at, to - from)));
            }
        }
    }

    /// What is complete is settled when it is quiet.
    fn keep(&self, cut: Cut<F, Mapper<'m>>) {
        self.later.push(cut);
        self.settle_some();
    }

    fn put_off(&self, gather: &mut Edits<'_, 'a, 'm, F>) {
        self.open.update(|open| open + 1);
        self.keep(gather.issue().complete());
    }

    fn settle_some(&self) {
        if self.later.settle_one(|leaf| self.host.report(&leaf)) {
            self.open.update(|open| open - 1);
        }
    }

    // ---- What the host does ----

    fn manage<'g>(&'g self, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let page = dice.below(PAGES as u64) as usize;
        match dice.below(24) {
            0..=5 => self.reclaim(page, dice, gather),
            6 | 7 => self.share(page, dice, gather),
            8..=11 => self.change_slot(dice.below(SLOTS.into()) as u16, dice, gather),
            12 => self.unmap(self.guest.zap_all(), dice, gather),
            13..=17 => self.change_block(dice, gather),
            18 => self.age(dice, gather),
            19..=21 => self.split(dice, gather),
            22 => self.recover(dice, gather),
            _ => self.settle_some(),
        }
    }

    /// A page is taken from under the guest.
    fn reclaim<'g>(&'g self, number: usize, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let host = &self.host;
        let Some(frame) = host.lock(number) else {
            return;
        };
        host.change(number, Now::Moving);
        self.sweep_host(host.at(number), host.page, |zap| {
            self.unmap(zap, dice, gather);
        });
        self.check_gone(number, frame);
        self.check_dirty(number, self.open.get() == 0);
        host.settle(number);
        let is_zero = host.pages.borrow()[number].words.is_empty();
        let away = if is_zero || !host.is_simulated(frame) {
            host.pages.borrow_mut()[number].words.clear();
            Some(Now::Empty)
        } else {
            self.machine.take_page().map(|to| {
                host.copy(frame, to);
                Now::Away(to)
            })
        };
        let new = away.unwrap_or(Now::Here {
            frame,
            writable: true,
        });
        host.change(number, new);
        host.unlock(number);
        if away.is_some() {
            host.give(frame);
        }
    }

    /// A zap is over that took a page away: no entry leads there.
    fn check_gone(&self, number: usize, frame: Pa) {
        let at = self.host.at(number);
        for &(slot, _) in self.slots.borrow().iter() {
            let va = at
                .wrapping_sub(slot.host)
                .wrapping_add(slot.guest.start().get());
            let behind = slot.guest.contains(Ipa::new(va));
            self.machine
                .check(!behind || self.mapper.lookup(va) != Some(frame), || {
                    format!("{va:#x} leads to {frame}, which was taken away")
                });
        }
    }

    /// No CPU reaches a page any more: if it was written, a leaf has said so.
    fn check_dirty(&self, number: usize, all_seen: bool) {
        let page = &mut self.host.pages.borrow_mut()[number];
        if all_seen && page.written && !page.reported {
            self.machine.report(
                Rule::FlagLost,
                format!("page {number} of the host was written, and no leaf has said so"),
            );
        }
        (page.written, page.reported) = (false, false);
        page.past.clear();
    }

    /// A page becomes read-only, as one that is shared with others, and after a while is copied to be written again.
    fn share<'g>(&'g self, number: usize, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let host = &self.host;
        let Some(frame) = host.lock(number) else {
            return;
        };
        let here = |frame, writable| Now::Here { frame, writable };
        host.change(number, here(frame, false));
        self.sweep_host(host.at(number), host.page, |zap| {
            self.protect(zap, gather);
        });
        host.settle(number);
        self.cpu().spend(dice.time() * 8);
        let copy = host
            .is_simulated(frame)
            .then(|| self.machine.take_page())
            .flatten();
        if let Some(copy) = copy {
            host.copy(frame, copy);
        }
        host.change(number, here(copy.unwrap_or(frame), true));
        if copy.is_some() {
            // Faults of others may put the copy in the place of the page, or not.
            self.sweep_host(host.at(number), host.page, |zap| {
                self.cpu().spend(dice.time() * dice.below(8));
                self.unmap(zap, dice, gather);
            });
        }
        host.settle(number);
        host.unlock(number);
        if copy.is_some() {
            host.give(frame);
        }
    }

    /// The host finds a block for the second part of its memory, moves it, or puts it together.
    fn change_block<'g>(&'g self, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let host = &self.host;
        if host.busy.get() || !(SMALL..PAGES).all(|page| host.is_steady(page)) {
            return;
        }
        host.busy.set(true);
        let in_place = |base: Pa| {
            let pages = host.pages.borrow();
            (SMALL..PAGES).all(|number| {
                let frame = Pa::new(base.get() + host.inside(number - SMALL));
                let writable = true;
                pages[number].now == (Now::Here { frame, writable })
            })
        };
        match host.second.get() {
            Block::Parts(base) if host.lost.borrow().is_empty() && in_place(base) => {
                host.second.set(Block::Whole(base));
            }
            Block::Whole(base) if dice.once_in(2) => host.second.set(Block::Parts(base)),
            old => {
                if let Some(base) = host.take_block() {
                    self.move_to(base, old, dice, gather);
                }
            }
        }
        host.busy.set(false);
    }

    fn move_to<'g>(&'g self, base: Pa, old: Block, dice: &Dice, gather: &mut Edits<'g, 'a, 'm, F>) {
        let host = &self.host;
        let (first, size) = (host.block, host.block);
        // All its pages go at once, or are protected, copied, and replaced.
        let at_once = dice.once_in(2);
        let before: Vec<_> = (SMALL..PAGES)
            .map(|number| host.pages.borrow()[number].now)
            .collect();
        let here = |number: usize, writable| Now::Here {
            frame: Pa::new(base.get() + host.inside(number - SMALL)),
            writable,
        };
        for (number, &now) in (SMALL..PAGES).zip(&before) {
            let next = match now {
                Now::Here { frame, .. } if !at_once => Now::Here {
                    frame,
                    writable: false,
                },
                _ => Now::Moving,
            };
            host.change(number, next);
        }
        if let Block::Whole(base) = old {
            host.second.set(Block::Parts(base));
        }
        if at_once {
            self.sweep_host(first, size, |zap| self.unmap(zap, dice, gather));
        } else {
            self.sweep_host(first, size, |zap| self.protect(zap, gather));
        }
        (SMALL..PAGES).for_each(|number| host.settle(number));
        for (number, &now) in (SMALL..PAGES).zip(&before) {
            let Now::Here { frame: to, .. } = here(number, true) else {
                continue;
            };
            if let Now::Here { frame, .. } | Now::Away(frame) = now {
                host.copy(frame, to);
                if !host.is_simulated(frame) || !host.is_simulated(to) {
                    host.pages.borrow_mut()[number].words.clear();
                }
            }
            if host.is_simulated(to) {
                self.machine.write_page(to);
            }
        }
        host.second.set(Block::Whole(base));
        (SMALL..PAGES).for_each(|number| host.change(number, here(number, true)));
        if !at_once {
            self.sweep_host(first, size, |zap| {
                self.cpu().spend(dice.time() * dice.below(8));
                self.unmap(zap, dice, gather);
            });
        }
        (SMALL..PAGES).for_each(|number| host.settle(number));
        // What was there goes.
        for now in before {
            match now {
                Now::Here { frame, .. } | Now::Away(frame)
                    if host.is_simulated(frame) && !host.is_part(frame, old) =>
                {
                    self.machine.give_page(frame);
                }
                _ => {}
            }
        }
        if let Block::Whole(base) | Block::Parts(base) = old {
            host.give_block(base);
        }
    }

    /// Which pages are used?
    fn age(&self, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        let slot = self.known(dice.below(SLOTS.into()) as u16);
        if let Some(slot) = slot {
            let aged = gather.age(slot.guest, |_| ());
            self.machine.check(aged.is_ok(), || format!("{aged:?}"));
            self.put_off(gather);
        }
    }

    /// A leaf is taken apart unasked; perhaps one that was not used for a while.
    fn split(&self, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        let (mut at, _) = self.spot(dice);
        let block = self.host.block;
        if let (true, Some(slot)) = (dice.once_in(2), self.known(0)) {
            at = slot.guest.start().get() + block;
        }
        let level = Level::new(dice.below(2) as u8);
        gather.top_up(1);
        if dice.once_in(2) {
            let aged = gather.age(span(at & !(block - 1), block), |_| ());
            self.machine.check(aged.is_ok(), || format!("{aged:?}"));
        }
        let _split = gather.split(Ipa::new(at), level);
        // Others may be split with it, before it is forgotten.
        self.cpu().spend(dice.time() * dice.below(8));
        self.put_off(gather);
    }

    /// A block, in the place of a table, before a fault.
    fn recover(&self, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        let (mut at, _) = self.spot(dice);
        if let (true, Some(slot)) = (dice.once_in(2), self.known(0)) {
            at = slot.guest.start().get() + self.host.block;
        }
        let Ok(request) = self.guest.request(&Fault::new(Ipa::new(at), Access::Read)) else {
            return;
        };
        let Some(page) = self.host.look_up(request.host(), Access::Read) else {
            return;
        };
        if dice.once_in(2) {
            self.cpu().spend(dice.time());
        }
        self.open.update(|open| open + 1);
        let _recovered = gather.collapse(&request, &page);
        // Others edit the block before the table is forgotten.
        self.cpu().spend(dice.time() * dice.below(8));
        self.keep(gather.issue().complete());
    }

    // ---- What the guest does ----

    /// An address that the guest uses, and the page of the host behind it if it is one of those that move.
    fn spot(&self, dice: &Dice) -> (u64, Option<usize>) {
        let id = dice.pick(&[0, 0, 0, 0, 1, 1, 2, 3]);
        let known = self.known(id).filter(|_| !dice.once_in(8));
        let slot = known.unwrap_or_else(|| self.slot(id, dice));
        let (page, block) = (self.host.page, self.host.block);
        let inside = match id {
            0 => self.host.at(dice.below(PAGES as u64) as usize),
            1 => dice.below(6) * page,
            2 => dice.below(2) * block + dice.pick(&[0, 1, 5]) * page,
            _ => dice.below(2) * block + dice.below(3) * page,
        };
        let at = slot.guest.start().get() + inside;
        (at, self.host.page_at(slot.host + inside))
    }

    /// Whether slot 1 may show the page of code at an address, now or after a change.
    fn may_be_code(&self, at: u64) -> bool {
        let number = (at & ((1 << 33) - 1)) / self.host.page;
        BEHIND.iter().any(|first| first + number == CODE as u64)
    }

    fn step(&self, cpu: Cpu<'_>, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) {
        let (at, page) = self.spot(dice);
        let va = at + 8 * cpu.id() as u64;
        let request = dice.pick(&[Request::read(va), Request::write(va), Request::execute(va)]);
        // What it fetches it must not have written. Behind slot 1 there may be other pages when the access is made.
        let steady = at >> 33 < Self::place(1, 0) >> 33;
        let (fetches, writes) = match page {
            Some(CODE) => (steady, false),
            Some(_) => (false, steady || !self.may_be_code(at)),
            None => (false, true),
        };
        let deed = match dice.below(8) {
            0..=2 => Deed::Read,
            3..=5 if writes => Deed::Write(dice.below(1 << 60) + 1),
            _ => match request.want {
                Want::Execute if !fetches => Deed::Touch(Request::read(va)),
                Want::Write if !writes => Deed::Touch(Request::read(va)),
                _ => Deed::Touch(request),
            },
        };
        self.access(va, &deed, dice, gather);
    }

    /// One access, until it succeeds or the guest is told that there is nothing. Whether it has succeeded.
    fn access(&self, va: u64, deed: &Deed, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) -> bool {
        let machine = self.machine;
        for _ in 0..1000 {
            self.cpu().order();
            let before = self.seen(va);
            let (result, want) = match *deed {
                Deed::Read => (machine.read(va).map(Some), Want::Read),
                Deed::Write(value) => (machine.write(va, value).map(|()| None), Want::Write),
                Deed::Touch(request) => (machine.access(request).map(Some), request.want),
            };
            let fault = match result {
                Ok(got) => {
                    self.judge(va, want, deed, got, &before);
                    return true;
                }
                Err(fault) => fault,
            };
            self.cpu().spend(machine.costs().exception);
            machine.dsb_stores();
            match self.serve(va, want, fault, dice, gather) {
                Served::Again => {}
                Served::Later if self.calm.get() => {}
                // Out of memory, perhaps.
                Served::Later if dice.once_in(8) => return false,
                Served::Later => self.cpu().spend(Time::ns(500)),
                Served::Declined => {
                    let after = self.seen(va);
                    let should = before.version == after.version
                        && before.slots.iter().any(|&(slot, phase)| {
                            phase == Phase::Steady && slot.perms.contains(perm(want))
                        });
                    machine.check(!should, || {
                        format!("{want:?} of {va:#x} is declined, and there is a slot")
                    });
                    return false;
                }
            }
        }
        machine.report(
            Rule::NoProgress,
            format!("an access to {va:#x} faults for ever"),
        );
        false
    }

    /// What is known about an address at this moment.
    fn seen(&self, va: u64) -> Seen {
        let at = Ipa::new(va);
        let slots = self.slots.borrow();
        let slots: Vec<_> = slots
            .iter()
            .filter(|(slot, _)| slot.guest.contains(at))
            .copied()
            .collect();
        let backed = slots
            .iter()
            .map(|(slot, _)| slot.host + (va - slot.guest.start().get()))
            .collect::<Vec<_>>();
        let version = self.version.get();
        let pages = self.host.pages.borrow();
        let mut frames = Vec::new();
        let mut versions = 0;
        let mut behind = Vec::new();
        for at in backed {
            if at >= FIXED {
                let page = (FAR + (at - FIXED)) & !(self.host.page - 1);
                frames.push((Pa::new(page), true));
            } else if let Some(number) = self.host.page_at(at & !(self.host.page - 1)) {
                let it = &pages[number];
                versions += u64::from(it.version);
                frames.extend(&it.before);
                if let Now::Here { frame, writable } = it.now {
                    frames.push((frame, writable));
                }
                behind.push(number);
            }
        }
        let log = slots
            .iter()
            .find(|(slot, phase)| slot.log.is_on() && *phase == Phase::Steady)
            .map(|(slot, _)| (slot.id, self.logs.borrow()[usize::from(slot.id)].round))
            .filter(|&(id, _)| self.logs.borrow()[usize::from(id)].steady);
        Seen {
            version,
            slots,
            frames,
            versions,
            pages: behind,
            log,
        }
    }

    /// An access has succeeded.
    fn judge(&self, va: u64, want: Want, deed: &Deed, got: Option<u64>, before: &Seen) {
        let machine = self.machine;
        let after = self.seen(va);
        let same = before.version == after.version && before.pages == after.pages;
        let steady = same && before.versions == after.versions;
        let mut pages = self.host.pages.borrow_mut();
        // One slot, so that there is no doubt which page it is.
        let sure = same && after.slots.len() == 1;
        // Where a copy takes the place of a page, another address may still lead to the page.
        let one = |seen: &Seen| seen.frames.len() == 1;
        let simulated = |seen: &Seen| {
            seen.frames
                .iter()
                .all(|&(frame, _)| self.host.is_simulated(frame))
        };
        let mine = (va % self.host.page / 8) as usize;
        if want == Want::Write && sure {
            after
                .pages
                .iter()
                .for_each(|&page| pages[page].written = true);
        }
        if let Deed::Write(value) = *deed {
            let known = sure && simulated(before) && simulated(&after);
            for (number, page) in pages.iter_mut().enumerate() {
                if !sure || after.pages.contains(&number) {
                    page.words.insert(mine, known.then_some(value));
                }
            }
        }
        if want == Want::Write
            && before.log == after.log
            && let Some((id, _)) = after.log
            && before.version == after.version
        {
            let page = va & !(self.host.page - 1);
            self.logs.borrow_mut()[usize::from(id)].written.insert(page);
        }
        if !steady {
            return;
        }
        machine.check(
            after
                .slots
                .iter()
                .any(|(slot, _)| slot.perms.contains(perm(want))),
            || format!("{want:?} of {va:#x} succeeds, and no slot allows it"),
        );
        machine.check(
            want != Want::Write || after.frames.iter().any(|&(_, writable)| writable),
            || format!("a write to {va:#x} succeeds, and its page is shared"),
        );
        match (deed, got) {
            (Deed::Touch(_), Some(pa)) => {
                let is = |&(frame, _): &(Pa, bool)| frame.get() == pa & !(self.host.page - 1);
                machine.check(after.frames.iter().any(is), || {
                    format!(
                        "{va:#x} leads to {pa:#x}, which does not back it: {:x?}",
                        after.frames
                    )
                });
            }
            (Deed::Read, Some(value))
                if sure && one(before) && one(&after) && simulated(&after) =>
            {
                for &number in &after.pages {
                    let written = pages[number].words.get(&mine).copied().unwrap_or(Some(0));
                    machine.check(written.is_none_or(|written| written == value), || {
                        format!("{va:#x} holds {value:#x} where {written:x?} was written")
                    });
                }
            }
            _ => {}
        }
    }

    /// The handler of a fault.
    fn serve(
        &self,
        va: u64,
        want: Want,
        trap: Trap,
        dice: &Dice,
        gather: &mut Edits<'_, 'a, 'm, F>,
    ) -> Served {
        let Some(fault) = classify(va, want, trap, dice) else {
            return Served::Again;
        };
        if fault.cause == Cause::AccessFlag {
            let _touched = self.guest.set_accessed(&fault);
            return Served::Again;
        }
        let served = self.serve_with(&fault, dice, gather);
        self.put_off(gather);
        served
    }

    fn serve_with(&self, fault: &Fault, dice: &Dice, gather: &mut Edits<'_, 'a, 'm, F>) -> Served {
        for _ in 0..3 {
            let request = match self.guest.request(fault) {
                Ok(request) => request,
                Err(Declined::Busy) => return Served::Later,
                Err(_) => return Served::Declined,
            };
            if dice.once_in(2) {
                if dice.once_in(4) {
                    self.cpu().spend(dice.time());
                }
                let walk = request.slot().log.is_on().then(|| self.mapper.enter());
                let reopened = self.guest.reopen(&request);
                if reopened == Ok(true) && request.is_logged_write() {
                    self.mark(&request.slot(), fault);
                }
                drop(walk);
                match reopened {
                    Ok(true) => return Served::Again,
                    Ok(false) | Err(Refused::Retry) => {}
                    Err(Refused::Busy(_)) => return Served::Later,
                    Err(other) => self.machine.report(Rule::Program, other.to_string()),
                }
            }
            if dice.below(4) > 0 && !gather.top_up(request.tables()) {
                return Served::Later;
            }
            let Some(page) = self.host.look_up(request.host(), fault.access) else {
                return Served::Later;
            };
            if dice.once_in(4) {
                self.cpu().spend(dice.time());
            }
            for _ in 0..3 {
                // What is mapped is marked before a zap can go on.
                let walk = request.slot().log.is_on().then(|| self.mapper.enter());
                let mapped = gather.map(&request, &page);
                if mapped.is_ok() && request.is_logged_write() {
                    self.mark(&request.slot(), fault);
                }
                drop(walk);
                match mapped {
                    Ok(Mapped::Replaced(old)) => {
                        self.host.report(&old);
                        return Served::Again;
                    }
                    Ok(_) => return Served::Again,
                    Err(Refused::Busy(_)) => return Served::Later,
                    Err(Refused::Retry | Refused::Denied) => break,
                    Err(Refused::NeedsTables(count)) => {
                        if !gather.top_up(count) {
                            return Served::Later;
                        }
                    }
                    Err(other) => {
                        self.machine.report(Rule::Program, other.to_string());
                        return Served::Later;
                    }
                }
            }
        }
        Served::Later
    }

    /// The handler of a fault marks the page in the log.
    fn mark(&self, slot: &Slot, fault: &Fault) {
        let marked = fault.at.get() & !(self.host.page - 1);
        let log = &mut self.logs.borrow_mut()[usize::from(slot.id)];
        log.marks.insert(marked);
    }

    // ---- The end ----

    /// Every page of every slot is there, and holds what it should.
    fn check_all(&self, dice: &Dice) {
        for id in 0..SLOTS {
            if self.known(id).is_none() {
                self.insert(id, dice);
            }
        }
        let mut gather = self.guest.gather();
        self.mapper.load();
        for id in 0..SLOTS {
            let Some(slot) = self.known(id) else {
                self.machine
                    .report(Rule::Program, format!("slot {id} is lost"));
                continue;
            };
            let (page, block) = (self.host.page, self.host.block);
            let spots: Vec<u64> = match id {
                0 => (0..PAGES).map(|number| self.host.at(number)).collect(),
                1 => (0..6).map(|number| number * page).collect(),
                _ => vec![0, page, block, block + 5 * page],
            };
            for inside in spots {
                let va = slot.guest.start().get() + inside + 8 * self.cpu().id() as u64;
                let mut good = self.access(va, &Deed::Read, dice, &mut gather);
                if slot.perms.contains(Perms::WRITE)
                    && self.host.page_at(slot.host + inside) != Some(CODE)
                {
                    good &= self.access(va, &Deed::Write(1), dice, &mut gather);
                    good &= self.access(va, &Deed::Read, dice, &mut gather);
                }
                self.machine.check(good, || format!("{va:#x} is lost"));
            }
            if slot.log.is_on() {
                self.collect(slot, dice, &mut gather);
            }
        }
    }

    /// Everything goes: no table, no page is left.
    fn tear_down(self) {
        let dice = Dice::new(1, 1);
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
            self.settle_some();
        }
        for number in 0..PAGES {
            self.check_dirty(number, true);
        }
        let Self {
            machine,
            mapper,
            guest,
            host,
            ..
        } = self;
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

/// What is known about an address at a moment.
struct Seen {
    version: u32,
    slots: Vec<(Slot, Phase)>,
    /// Where it may lead, and whether it may be written there.
    frames: Vec<(Pa, bool)>,
    /// Changes of the pages behind it so far.
    versions: u64,
    pages: Vec<usize>,
    /// Writes to it are logged: the slot, and how often its log was read.
    log: Option<(u16, u32)>,
}

/// What came of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Served {
    /// The guest goes on.
    Again,
    /// The same, after a while.
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

/// What the machine says, as the engine takes it. The level is told, or not.
pub fn classify(va: u64, want: Want, trap: Trap, dice: &Dice) -> Option<Fault> {
    let (at, want, cause, depth) = match trap {
        Trap::Translation { depth } => (va, want, Cause::Translation, depth),
        Trap::AccessFlag { depth } => (va, want, Cause::AccessFlag, depth),
        Trap::Permission { depth } => (va, want, Cause::Permission, depth),
        Trap::Address => return None,
        Trap::Second {
            ipa,
            want,
            cause,
            depth,
            ..
        } => {
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
