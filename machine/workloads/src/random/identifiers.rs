//! Spaces come and go, and there are fewer identifiers than spaces: when they run out, everything
//! is invalidated once and the identifiers of the dead are used again.
//!
//! All spaces map the same addresses, each to pages of its own, in which its number stands.

use std::cell::{Cell, RefCell};

use tablewright::{AddressSpace, Attrs, Format, Half, Mapping, Pa, Span, Va};
use tablewright_machine::{Cpu, Machine, Outcome, Rule, RunError, Tlbi};

use super::{Bug, Dice, Kind, announce, check_no_frames, until_done};
use crate::platform::{Control, Faulty};

const PAGES: u64 = 2;
const AT: u64 = 1 << 30;
const IDENTIFIERS: u16 = 3;

struct Process<'m, F: Format> {
    space: AddressSpace<F, Faulty<'m>>,
    pages: Vec<Pa>,
}

/// Knowledge of the two spaces in use, of all CPUs.
struct Known<'m> {
    platform: Cell<Option<Faulty<'m>>>,
    number: Cell<u64>,
}

struct Kernel<'a, 'm, F: Format> {
    machine: &'m Machine,
    control: &'m Control,
    dice: &'a Dice,
    known: &'a [Known<'m>; 2],
    processes: [Option<Process<'m, F>>; 2],
    /// Dead, and perhaps remembered.
    dead: Vec<Process<'m, F>>,
    free: Vec<u16>,
    last: u64,
}

pub fn run<F: Format<Input = Va>>(
    machine: &Machine,
    control: &Control,
    dice: &Dice,
    _: Kind,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    let known = [(); 2].map(|()| Known { platform: Cell::new(None), number: Cell::new(0) });
    let kernel = RefCell::new(Kernel::<F> {
        machine,
        control,
        dice,
        known: &known,
        processes: [None, None],
        dead: Vec::new(),
        free: (1..=IDENTIFIERS).collect(),
        last: 0,
    });
    let rounds = 4 + dice.below(10);
    let seed = dice.below(1 << 48);
    let done = Cell::new(false);
    let outcome = machine.run(|cpu| {
        if cpu.id() == 0 {
            let mut kernel = kernel.borrow_mut();
            for _ in 0..rounds {
                kernel.replace(cpu);
            }
            done.set(true);
            return;
        }
        until_done(cpu, &done, seed, |dice| {
            look(machine, cpu, &known[dice.below(2) as usize], dice);
        });
    })?;
    between(machine.digest());
    if !machine.violations().is_empty() {
        return Ok(outcome);
    }
    machine.calm();
    let mut kernel = kernel.into_inner();
    for slot in 0..2 {
        kernel.retire(slot);
    }
    kernel.roll_over();
    check_no_frames(machine);
    Ok(outcome)
}

/// A CPU runs a process for a short time.
fn look(machine: &Machine, cpu: Cpu<'_>, known: &Known<'_>, dice: &Dice) {
    cpu.order();
    let number = known.number.get();
    let Some(platform) = known.platform.get() else {
        return;
    };
    platform.mapper.load();
    for _ in 0..1 + dice.below(3) {
        let va = AT + dice.below(PAGES) * (1 << machine.memory().page_shift());
        let loaded = machine.read(va).or_else(|_| {
            machine.dsb_stores();
            machine.read(va)
        });
        if known.number.get() != number {
            return;
        }
        match loaded {
            Ok(value) => machine
                .check(value == number, || format!("{va:#x} of space {number} reads {value}")),
            Err(control) => machine.report(
                Rule::NoProgress,
                format!("{va:#x} of space {number} takes {control:?} twice"),
            ),
        }
    }
}

impl<F: Format<Input = Va>> Kernel<'_, '_, F> {
    fn replace(&mut self, cpu: Cpu<'_>) {
        let slot = self.dice.below(2) as usize;
        self.retire(slot);
        if self.free.is_empty() {
            self.roll_over();
        }
        self.start(slot);
        cpu.spend(self.dice.time());
        for known in self.known {
            look(self.machine, cpu, known, self.dice);
        }
    }

    fn start(&mut self, slot: usize) {
        let id = match self.free.first() {
            // The one that the other space has.
            Some(_) if self.control.is(Bug::SameIdentifierTwice) => {
                self.processes[1 - slot].as_ref().map_or(1, |other| other.space.id())
            }
            Some(&id) => id,
            None => return,
        };
        let platform = Faulty::new(self.machine, self.control);
        let Some(space) = AddressSpace::<F, _>::new(platform) else {
            return;
        };
        let mut process = Process { space: space.with_id(id), pages: Vec::new() };
        let size = 1u64 << F::PAGE_SHIFT;
        let mut attrs = Attrs::USER_DATA;
        attrs.global = self.control.is(Bug::UserPagesGlobal);
        let mut whole = true;
        for number in 0..PAGES {
            let Some(page) = self.machine.take_page() else {
                whole = false;
                break;
            };
            let at = Span::new(Va::new(AT + number * size), size).expect("a page");
            let mapping = Mapping::new(attrs).pages_only();
            let mapped = process.space.map(at, page, mapping);
            process.pages.push(page);
            whole &= mapped.is_ok();
        }
        if !whole {
            // No memory: it never was.
            let _ = process.space.destroy(|_| ());
            process.pages.into_iter().for_each(|page| self.machine.give_page(page));
            return;
        }
        self.free.retain(|&free| free != id);
        process.space.make_live();
        platform.mapper.attach(process.space.root(), Half::Lower, id);
        platform.mapper.load();
        self.last += 1;
        for number in 0..PAGES {
            let va = AT + number * size;
            let written = self.machine.write(va, self.last).or_else(|_| {
                self.machine.dsb_stores();
                self.machine.write(va, self.last)
            });
            if let Err(control) = written {
                let what = format!("{va:#x} of a new space takes {control:?} twice");
                self.machine.report(Rule::NoProgress, what);
            }
        }
        announce(self.machine);
        self.known[slot].number.set(self.last);
        self.known[slot].platform.set(Some(platform));
        self.processes[slot] = Some(process);
    }

    /// No CPU uses the space any more; what is remembered of it stays.
    fn retire(&mut self, slot: usize) {
        let Some(process) = self.processes[slot].take() else {
            return;
        };
        self.known[slot].platform.set(None);
        self.known[slot].number.set(0);
        process.space.platform().mapper.detach();
        self.dead.push(process);
    }

    /// Identifiers have run out.
    fn roll_over(&mut self) {
        let used = |process: &Option<Process<'_, F>>| process.as_ref().map(|p| p.space.id());
        let in_use: Vec<u16> = self.processes.iter().filter_map(used).collect();
        self.free = (1..=IDENTIFIERS).filter(|id| !in_use.contains(id)).collect();
        if self.control.is(Bug::IdentifierNotInvalidated) {
            return;
        }
        let mut tlbi = Tlbi::ALL;
        if self.control.is(Bug::WrongIdentifierInvalidated) {
            tlbi.id = Some(IDENTIFIERS + 1);
        }
        if self.control.is(Bug::IdentifiersInvalidatedHere) {
            tlbi.broadcast = false;
        }
        self.machine.dsb_stores();
        self.machine.tlbi(tlbi);
        self.machine.dsb();
        for mut process in self.dead.drain(..) {
            // SAFETY: no processor has the root loaded, and everything is forgotten.
            unsafe { process.space.make_dead() };
            let destroyed = process.space.destroy(|_| ());
            self.machine.check(destroyed.is_ok(), || "a dead space is not".to_owned());
            process.pages.into_iter().for_each(|page| self.machine.give_page(page));
        }
    }
}
