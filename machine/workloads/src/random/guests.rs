//! A guest with tables of its own, on all CPUs, while its host moves its memory, protects, splits
//! and collapses.
//!
//! Everything that the guest accesses goes through both stages, its tables too. Each of its pages
//! has an address that the guest takes for physical, two virtual ones, and a word for each CPU, in
//! which the CPU finds what it wrote last, wherever the host has moved the page meanwhile.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::ControlFlow;

use tablewright::format::{Ept, FORCED_WRITE_BACK, Npt, Stage2K4, Stage2K16};
use tablewright::shared::{Gather, Mapped, NewLeaf, Refused, SharedPlatform, SharedSpace};
use tablewright::{AddressSpace, Attrs, Change, Format, Half, Ipa, Level, Pa, Perms, Span};
use tablewright_machine::{
    Architecture, Cause, Cpu, Fault as Trap, Granule, Machine, Ordering, Outcome, Regime, Request,
    Rule, RunError, Stages, Time, Tlbi, Want,
};

use super::later::Later;
use super::{Dice, small};
use crate::platform::{Control, Faulty};

/// The machines of hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    K4,
    /// Stage 2 forces write-back.
    K4Forced,
    /// Larger pages than the guest has.
    K16,
    Ept,
    Npt,
}

impl Host {
    pub fn of(dice: &Dice) -> Self {
        dice.pick(&[Self::K4, Self::K4Forced, Self::K16, Self::Ept, Self::Npt])
    }

    pub fn architecture(self, dice: &Dice) -> Architecture {
        let arm = |granule, forced| {
            let hardware_access = dice.once_in(2);
            Architecture {
                guest: Some(Regime::Arm64Stage1 { granule: Granule::K4, wide: false }),
                ordering: dice.pick(&[Ordering::Base, Ordering::Ets2]),
                bbm: dice.below(3) as u8,
                hardware_access,
                hardware_dirty: hardware_access && dice.once_in(2),
                permission_fault_drops_entry: dice.once_in(2),
                forced_write_back: forced,
                ..Architecture::arm64(Regime::Arm64Stage2 {
                    granule,
                    input_bits: INPUT as u8,
                    wide: false,
                    forced_write_back: forced,
                })
            }
        };
        let base = match self {
            Self::K4 => arm(Granule::K4, false),
            Self::K4Forced => arm(Granule::K4, true),
            Self::K16 => arm(Granule::K16, false),
            Self::Ept => {
                let flags = dice.once_in(2);
                Architecture {
                    hardware_access: flags,
                    hardware_dirty: flags,
                    ..Architecture::ept()
                }
            }
            Self::Npt => Architecture::npt(),
        };
        small(base, dice)
    }

    pub fn run(
        self,
        machine: &Machine,
        control: &Control,
        dice: &Dice,
        between: impl FnOnce(u64),
    ) -> Result<Outcome, RunError> {
        match self {
            Self::K4 => run::<Stage2K4<INPUT>>(machine, control, dice, between),
            Self::K4Forced => {
                run::<Stage2K4<INPUT, FORCED_WRITE_BACK>>(machine, control, dice, between)
            }
            Self::K16 => run::<Stage2K16<INPUT>>(machine, control, dice, between),
            Self::Ept => run::<Ept<4>>(machine, control, dice, between),
            Self::Npt => run::<Npt<4>>(machine, control, dice, between),
        }
    }
}

/// Bits of what a guest on arm64 takes for a physical address: one first table, of 4 KiB and of 16
/// KiB.
const INPUT: u32 = 36;
/// The pages of the guest: of 4 KiB, whatever those of the host.
const PAGE: u64 = 1 << 12;
/// Its tables, of four levels, in its first pages.
const TABLES: u64 = 4;
/// Pages of the host that hold data.
const DATA: u64 = 4;
/// The first of its virtual addresses: entry 1 of the first two tables.
const VIRTUAL: u64 = 1 << 39 | 1 << 30;
/// The second name of each page of data, in entries, and those of the block.
const ALIAS: u64 = 256;
const LARGE: u64 = 128;
/// Memory that is not tracked: a whole block of the host.
const BLOCK: Pa = Pa::new(1 << 41);
const VMID: u16 = 6;

/// A CPU's edits.
type Edits<'g, 'm, F> = Gather<'g, F, Faulty<'m>>;

struct Guest<'m, F: Format<Input = Ipa>> {
    machine: &'m Machine,
    space: SharedSpace<F, Faulty<'m>>,
    platform: Faulty<'m>,
    /// The memory that the host has given, by the number of the page. `None` while it moves.
    backing: RefCell<HashMap<u64, Option<Pa>>>,
    /// Reclaims that are complete, whose tables may still be walked.
    later: Later<F, Faulty<'m>>,
    /// Its tables are written.
    booted: Cell<bool>,
}

fn run<F: Format<Input = Ipa>>(
    machine: &Machine,
    control: &Control,
    dice: &Dice,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    let platform = Faulty::new(machine, control);
    let space = loop {
        if let Some(space) = AddressSpace::<F, _>::new(platform) {
            break space.with_id(VMID);
        }
    };
    platform.mapper.attach(space.root(), Half::Lower, VMID);
    let guest = Guest {
        machine,
        space: SharedSpace::new(space).expect("no code runs on it"),
        platform,
        backing: RefCell::default(),
        later: Later::new(),
        booted: Cell::new(false),
    };
    let seed = dice.below(1 << 48);
    let steps = 15 + dice.below(25);
    let outcome = machine.run(|cpu| {
        let dice = Dice::of(seed, cpu.id() as u64);
        let mut gather = guest.space.gather();
        platform.mapper.load();
        if cpu.id() == 0 {
            guest.boot(&mut gather, &dice);
        }
        while !guest.booted.get() {
            cpu.spend(Time::us(1));
            cpu.order();
        }
        machine.load_guest(Some((0, 1 + dice.below(2) as u16)));
        let mut written = HashMap::new();
        for _ in 0..steps {
            cpu.spend(dice.time());
            if cpu.id() == 0 && dice.below(3) > 0 {
                guest.manage(&dice, &mut gather);
            } else {
                guest.step(cpu, &dice, &mut gather, &mut written);
            }
        }
    })?;
    between(machine.digest());
    if machine.violations().is_empty() {
        machine.calm();
        guest.tear_down();
    }
    Ok(outcome)
}

impl<'m, F: Format<Input = Ipa>> Guest<'m, F> {
    const HOST_PAGE: u64 = 1 << F::PAGE_SHIFT;

    fn block() -> u64 {
        1 << F::shift(Level::new(1))
    }

    /// The first address of data, in the guest.
    fn data() -> u64 {
        (TABLES * PAGE).next_multiple_of(Self::HOST_PAGE)
    }

    fn data_pages() -> u64 {
        DATA * Self::HOST_PAGE / PAGE
    }

    /// The guest writes its tables, with its stage 1 off.
    fn boot(&self, gather: &mut Edits<'_, 'm, F>, dice: &Dice) {
        let machine = self.machine;
        let architecture = machine.architecture();
        let x86 = architecture.is_x86();
        let table = |at: u64| at | if x86 { 0x27 } else { 0x3 };
        let leaf = |at: u64, large: bool| {
            let flags = if x86 {
                // Accessed and dirty, or not yet.
                dice.pick(&[0x3, 0x23, 0x63]) | u64::from(large) << 7
            } else {
                // Inner shareable, not global; AF, DBM and AP[2] as hardware may set them.
                let accessed = !architecture.hardware_access || dice.once_in(2);
                let clean = architecture.hardware_dirty && dice.once_in(2);
                3 << 8
                    | 1 << 11
                    | u64::from(accessed) << 10
                    | if clean { 1 << 51 | 1 << 7 } else { 0 }
                    | if large { 1 } else { 3 }
            };
            at | flags
        };
        let (root, upper, middle, last) = (0, PAGE, 2 * PAGE, 3 * PAGE);
        let mut entries = vec![
            (root + 8, table(upper)),
            (upper + 8, table(middle)),
            (middle, table(last)),
            (middle + 8, leaf(Self::block(), true)),
        ];
        for number in 0..Self::data_pages() {
            let at = Self::data() + number * PAGE;
            entries.push((last + number * 8, leaf(at, false)));
            entries.push((last + (ALIAS + number) * 8, leaf(at, false)));
        }
        for number in 0..4 {
            let at = Self::block() + number * 5 * PAGE;
            entries.push((last + (LARGE + number) * 8, leaf(at, false)));
        }
        for (at, value) in entries {
            self.until(gather, dice, || machine.write(at, value));
        }
        machine.dsb();
        machine.cpu().order();
        self.booted.set(true);
    }

    /// An access of the guest, again and again until it goes on. The host serves what stage 2
    /// faults on; the guest returns from faults of its own, which can only be early ones.
    fn until<T>(
        &self,
        gather: &mut Edits<'_, 'm, F>,
        dice: &Dice,
        access: impl Fn() -> Result<T, Trap>,
    ) -> Option<T> {
        let cpu = self.machine.cpu();
        let mut last = Trap::Address;
        for tries in 1..=300 {
            match access() {
                Ok(value) => return Some(value),
                Err(fault) => {
                    last = fault;
                    // A CPU that has claimed an entry may have a whole block to clean first.
                    cpu.spend(Time::ns(400) * tries);
                    self.serve(fault, gather, dice);
                    // The return.
                    self.machine.dsb();
                }
            }
        }
        self.machine
            .report(Rule::NoProgress, format!("an access of the guest faults for ever: {last:?}"));
        None
    }

    /// Returns the memory behind the guest's address `at`, and how large a leaf may be.
    fn look_up(&self, at: u64, dice: &Dice) -> Option<(Pa, Level)> {
        if at >= Self::block() {
            let level = Level::new(dice.below(2) as u8);
            let inside = at - Self::block();
            let frame = BLOCK.get() + (inside & !((1 << F::shift(level)) - 1));
            return Some((Pa::new(frame), level));
        }
        let number = at / Self::HOST_PAGE;
        if let Some(&page) = self.backing.borrow().get(&number) {
            return Some((page?, Level::PAGE));
        }
        let page = self.machine.take_page()?;
        self.machine.write_page(page);
        // Another CPU may have given one while this one waited.
        let given = *self.backing.borrow_mut().entry(number).or_insert(Some(page));
        if given != Some(page) {
            self.machine.give_page(page);
        }
        Some((given?, Level::PAGE))
    }

    /// The fault handler of the host.
    fn serve(&self, fault: Trap, gather: &mut Edits<'_, 'm, F>, dice: &Dice) {
        let Trap::Second { ipa, want, cause, .. } = fault else {
            return;
        };
        if cause == Cause::AccessFlag {
            let _relaxed = self.space.relax(Ipa::new(ipa), Perms::empty(), false);
            return;
        }
        for _ in 0..4 {
            // What is looked up in a walk is not given away before it is over.
            let walk = self.platform.enter();
            let Some((frame, level)) = self.look_up(ipa, dice) else {
                break;
            };
            let attrs = match want {
                Want::Write => Attrs::GUEST_MEMORY,
                _ => Attrs {
                    perms: Attrs::GUEST_MEMORY.perms.difference(Perms::ANY_WRITE),
                    dirty: false,
                    ..Attrs::GUEST_MEMORY
                },
            };
            let Ok(leaf) = NewLeaf::new(Ipa::new(ipa), frame, level, attrs) else {
                break;
            };
            let mapped = gather.map(&leaf);
            drop(walk);
            match mapped {
                Ok(Mapped::Already) if cause == Cause::Permission => {
                    // Another CPU was first, and this one does not know.
                    let _relaxed = self.space.relax(Ipa::new(ipa), Perms::empty(), false);
                    break;
                }
                Ok(_) | Err(Refused::Busy(_) | Refused::Denied) => break,
                Err(Refused::NeedsTables(count)) => {
                    if !gather.top_up(count) {
                        break;
                    }
                }
                Err(Refused::Larger(_)) => {
                    gather.top_up(1);
                    let _split = gather.split(Ipa::new(ipa), level);
                }
                Err(Refused::Retry) => {}
                Err(error) => {
                    self.machine.report(Rule::Program, format!("{error}"));
                    break;
                }
            }
        }
        self.later.put_off(gather);
    }

    /// The host takes a page out of the guest's sight. False if it moves already, or there is none.
    fn hide(&self, number: u64, gather: &mut Edits<'_, 'm, F>) -> Option<Pa> {
        let page = (*self.backing.borrow().get(&number)?)?;
        self.backing.borrow_mut().insert(number, None);
        let first = Ipa::new(number * Self::HOST_PAGE);
        let span = Span::new(first, Self::HOST_PAGE).ok()?;
        for pass in 0..2 {
            let _taken = gather.unmap(span, |_| ControlFlow::Continue(())).ok()?;
            self.later.push(gather.issue().complete());
            if pass == 0 {
                // Faults that looked the page up before it was taken come to their end.
                let period = self.platform.grace_period();
                while !self.platform.is_over(period) {
                    self.machine.cpu().spend(Time::ns(100));
                }
            }
        }
        Some(page)
    }

    /// The host moves a page, of data or of the guest's tables, or lets the guest fault on it once
    /// more.
    fn migrate(&self, number: u64, dice: &Dice, gather: &mut Edits<'_, 'm, F>) {
        let Some(old) = self.hide(number, gather) else {
            return;
        };
        let new = if dice.below(4) > 0 { self.machine.take_page() } else { None };
        if let Some(new) = new {
            self.machine.copy_page(old, new);
        }
        self.backing.borrow_mut().insert(number, Some(new.unwrap_or(old)));
        if new.is_some() {
            self.machine.give_page(old);
        }
    }

    /// Acts as the host.
    fn manage(&self, dice: &Dice, gather: &mut Edits<'_, 'm, F>) {
        let pages = Self::data() / Self::HOST_PAGE + DATA;
        match dice.below(6) {
            0..=2 => self.migrate(dice.below(pages), dice, gather),
            3 => {
                let change = Change::new().perms(Perms::READ.and_user());
                let Ok(all) = Span::new(Ipa::new(0), 2 * Self::block()) else {
                    return;
                };
                let _protected = gather.protect(all, change);
            }
            4 => {
                gather.top_up(1);
                let at = Ipa::new(Self::block());
                let _split = gather.split(at, Level::PAGE);
            }
            _ => {
                let at = Ipa::new(Self::block());
                let attrs = Attrs::GUEST_MEMORY;
                if let Ok(leaf) = NewLeaf::new(at, BLOCK, Level::new(1), attrs)
                    && gather.top_up(2)
                {
                    let _mapped = gather.map(&leaf);
                }
            }
        }
        self.later.put_off(gather);
        // What was stored becomes visible in finite time, also when this CPU does nothing any more.
        self.machine.dsb_stores();
    }

    /// Acts as the guest.
    fn step(
        &self,
        cpu: Cpu<'_>,
        dice: &Dice,
        gather: &mut Edits<'_, 'm, F>,
        written: &mut HashMap<u64, u64>,
    ) {
        let machine = self.machine;
        let name = |entry: u64| VIRTUAL + entry * PAGE;
        match dice.below(16) {
            // Its own invalidation, which the host must not rely on.
            0 => {
                machine.tlbi(Tlbi {
                    id: Some(VMID),
                    asid: dice.once_in(2).then_some(1),
                    stages: Stages::First,
                    broadcast: dice.once_in(2),
                    ..Tlbi::default()
                });
                machine.dsb();
            }
            1..=3 => {
                let small = name(LARGE + dice.below(4));
                let large = VIRTUAL + (1 << 21) + dice.below(100) * 5 * PAGE;
                let va = dice.pick(&[small, large]);
                let request = dice.pick(&[Request::read(va), Request::write(va)]);
                self.until(gather, dice, || machine.access(request));
            }
            choice => {
                let number = dice.below(Self::data_pages());
                let alias = dice.pick(&[0, ALIAS]);
                let va = name(number + alias) + 8 * cpu.id() as u64;
                if choice < 10 {
                    let value = dice.below(1 << 60);
                    if self.until(gather, dice, || machine.write(va, value)).is_some() {
                        written.insert(number, value);
                    }
                } else if let Some(value) = self.until(gather, dice, || machine.read(va)) {
                    let last = written.get(&number).copied().unwrap_or_default();
                    machine.check(value == last, || {
                        format!("the guest wrote {last:#x} to {va:#x}, and finds {value:#x}")
                    });
                }
            }
        }
    }

    /// Everything goes: no page, no table is lost.
    fn tear_down(self) {
        while !self.later.is_empty() {
            self.later.reclaim_one(|_| ());
        }
        let mut gather = self.space.gather();
        if let Ok(all) = Span::new(Ipa::new(0), 2 * Self::block()) {
            let _taken = gather.unmap(all, |_| ControlFlow::Continue(()));
        }
        let _deferred = gather.finish(|_| ());
        for page in self.backing.borrow().values().copied().flatten() {
            self.machine.give_page(page);
        }
        // The root is left, and the tables above the two regions.
        let left = self.machine.memory().used();
        self.machine.check(left <= usize::from(F::LEVELS), || format!("{left} frames are left"));
    }
}
