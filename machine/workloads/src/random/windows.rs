//! The linear map, built through slots or through a coarse map while other CPUs run, and then used
//! and edited.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;

use tablewright::linear::{Coarse, LinearMap, MemoryMap, Slots, Window, Windowed};
use tablewright::{
    AddressSpace, Attrs, Change, EditError, Format, Half, Level, Mapping, Pa, Platform, Span, Va,
};
use tablewright_machine::{Machine, Outcome, Rule, RunError};

use super::oracle::{Oracle, Page};
use super::{Bug, Dice, FRAMES, Kind, MEMORY, announce, destroy, raw};
use crate::platform::{Control, Faulty, Stage};

/// Enough for the walk that makes the coarse map grow, and for the edit of the coarse map inside of
/// it.
const SLOTS: usize = 16;
type Spans = Vec<Span<Pa>>;

/// Draws the memory that there is, and the part of it that must not be mapped.
fn memory_of<F: Format>(dice: &Dice) -> (Spans, Spans) {
    let page = 1u64 << F::PAGE_SHIFT;
    let block = page << F::INDEX_BITS;
    let span = |start, pages: u64| Span::new(Pa::new(start), pages * page).expect("pages");
    let end = MEMORY + FRAMES as u64 * page;
    let blocks = 1 + dice.below(2);
    let ram = vec![
        Span::new(Pa::new(MEMORY), blocks * block).expect("blocks"),
        span(MEMORY + 4 * block, 1 + dice.below(40)),
    ];
    let mut reserved = vec![span(end + (1 + dice.below(20)) * page, 1 + dice.below(5))];
    if blocks > 1 && dice.once_in(2) {
        reserved.push(span(MEMORY + block, 1 + dice.below(33)));
    }
    (ram, reserved)
}

pub fn run<F: Format<Input = Va>>(
    machine: &Machine,
    control: &Control,
    dice: &Dice,
    kind: Kind,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    let (ram, reserved) = memory_of::<F>(dice);
    for span in &reserved {
        machine.forbid(span.start(), span.last());
    }
    let memory = MemoryMap {
        ram: &ram,
        reserved: if control.is(Bug::ReservedMemoryMapped) { &[] } else { &reserved },
        special: &[],
    };

    // The map of the boot: slots, with the page behind them for their table to be there.
    let x86 = kind.is_x86();
    let (boot_half, slots_at) = if x86 {
        (Half::Lower, 1 << 40)
    } else {
        (Half::Upper, u64::MAX << kind.regime().input_bits())
    };
    let platform = Faulty::new(machine, control);
    let boot = loop {
        if let Some(space) = AddressSpace::<F, _>::new_in(platform, boot_half) {
            break space;
        }
    };
    let mut boot = boot.with_id(1);
    let page = 1u64 << F::PAGE_SHIFT;
    let behind = Span::new(Va::new(slots_at + SLOTS as u64 * page), page).expect("a page");
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    while boot.map(behind, Pa::new(1 << 40), mapping).is_err() {}
    boot.make_live();
    platform.mapper.attach(boot.root(), boot_half, 1);
    platform.mapper.load();
    let Some(first) = raw::find::<F>(&platform, boot.root(), slots_at, Level::PAGE) else {
        unreachable!("the page behind the slots is in their table");
    };
    let shown = platform.mapper.slots(slots_at);
    let (at, attrs) = (Va::new(slots_at), Attrs::KERNEL_DATA);
    let of = (boot.root(), 1);
    // SAFETY: the entries are zero, without another user, and stay as long as the machine.
    let slots =
        unsafe { Slots::<F, _, _, SLOTS>::new(&platform, shown, at, first.entry, &attrs, of) };
    let Ok(slots) = slots else {
        unreachable!("every format has kernel data");
    };

    let end = MEMORY + FRAMES as u64 * page;
    // A coarse map has the lower half; kernels have the linear map in the upper.
    let coarse = !x86 && dice.once_in(2);
    let (half, offset) =
        if coarse { (Half::Upper, slots_at + (1 << 41)) } else { (Half::Lower, 0) };
    let program = Program { machine, control, dice, memory, platform: &platform, half, offset };
    let spots: Vec<u64> = ram
        .iter()
        .chain(&reserved)
        .flat_map(|span| [span.start(), span.last(), Pa::new(end), Pa::new(end + 7 * page)])
        .map(|pa| pa.get() & !(page - 1))
        .filter(|pa| !(MEMORY..end).contains(pa))
        .map(|pa| offset + pa)
        .collect();
    let oracle = Oracle::new(machine, spots);
    let outcome = if coarse {
        program.through_coarse::<F, _>(&slots, &oracle, between)
    } else {
        program.build::<F, _>(&slots, &oracle, between)
    }?;
    if !machine.violations().is_empty() {
        return Ok(outcome);
    }
    slots.end_batch();
    // A slot may still be open: the coarse map tells its own frames from those of the slots by
    // where they are, and here, in the memory of the host, they are in one place.
    let all = Span::inclusive(Va::new(slots_at), behind.last()).expect("pages");
    let mut gather = boot.gather();
    let unmapped = gather.unmap(all, |_| ControlFlow::Continue(()));
    machine.check(unmapped.is_ok(), || format!("{unmapped:?}"));
    control.during(Stage::Flushing, || gather.finish(|_| ()));
    destroy(machine, boot, &platform.mapper);
    Ok(outcome)
}

struct Program<'a, 'm> {
    machine: &'m Machine,
    control: &'m Control,
    dice: &'a Dice,
    memory: MemoryMap<'a>,
    platform: &'a Faulty<'m>,
    /// The half of the linear map.
    half: Half,
    offset: u64,
}

impl<'m> Program<'_, 'm> {
    /// Builds through a coarse map, which has the other half for a while.
    fn through_coarse<F: Format<Input = Va>, W: Window>(
        &self,
        slots: &W,
        oracle: &Oracle<'m>,
        between: impl FnOnce(u64),
    ) -> Result<Outcome, RunError> {
        let platform = Faulty::new(self.machine, self.control);
        let identity = platform.mapper.identity();
        let mut memory = self.memory;
        if self.control.is(Bug::WholeBlocksMapped) {
            memory.reserved = &[];
        }
        let coarse = loop {
            let data = Attrs::KERNEL_DATA;
            // SAFETY: slots show any frame (1.), and the root is loaded as it is attached below
            // (2.).
            let coarse =
                unsafe { Coarse::<F, _, _, _>::new(&platform, identity, slots, memory, data, 2) };
            if let Some(coarse) = coarse {
                break coarse;
            }
        };
        platform.mapper.attach(coarse.root(), Half::Lower, 2);
        platform.mapper.load();
        let result = self.build_with::<F, _>(&coarse, oracle, between, |_| platform.mapper.load());
        if result.is_err() || !self.machine.violations().is_empty() {
            return result;
        }
        coarse.end_batch();
        platform.mapper.detach();
        // SAFETY: slots show any frame (1.).
        let reach = unsafe { Windowed::new(self.platform, slots) };
        // SAFETY: no processor has the root loaded; the frames are those of the machine.
        self.control.during(Stage::Flushing, || unsafe { coarse.finish(reach) });
        result
    }

    fn build<F: Format<Input = Va>, W: Window>(
        &self,
        window: &W,
        oracle: &Oracle<'m>,
        between: impl FnOnce(u64),
    ) -> Result<Outcome, RunError> {
        self.build_with::<F, W>(window, oracle, between, |_| ())
    }

    /// Builds the map on one CPU and has the others use it.
    fn build_with<F: Format<Input = Va>, W: Window>(
        &self,
        window: &W,
        oracle: &Oracle<'m>,
        between: impl FnOnce(u64),
        load: impl Fn(usize),
    ) -> Result<Outcome, RunError> {
        let Self { machine, control, dice, platform: boot, .. } = *self;
        let own = Faulty::new(machine, control);
        // SAFETY: slots and coarse maps show any frame (1.).
        let windowed = unsafe { Windowed::new(&own, window) };
        let mut mapping = Mapping::new(Attrs::KERNEL_DATA);
        if dice.once_in(2) {
            mapping = mapping.pages_only();
        }
        let linear = LinearMap::new(Va::new(self.offset), mapping);
        let built = RefCell::new(None);
        let (ready, done) = (Cell::new(false), Cell::new(false));
        let seed = dice.below(1 << 48);
        let edits = dice.below(6);
        let outcome = machine.run(|cpu| {
            boot.mapper.load();
            load(cpu.id());
            if cpu.id() > 0 {
                let dice = Dice::of(seed, cpu.id() as u64);
                let mut rest = 60;
                while !done.get() && rest > 0 {
                    cpu.spend(dice.time());
                    cpu.order();
                    if ready.get() {
                        own.mapper.load();
                        oracle.try_one(cpu, &dice);
                        rest -= 1;
                    }
                }
                return;
            }
            let mut space = None;
            // Frames are refused, so that it may take a while.
            for _ in 0..200 {
                let root = match space.take() {
                    Some(space) => Some(space),
                    None => AddressSpace::<F, _>::new_in(windowed, self.half),
                };
                let Some(mut root) = root.map(|root| root.with_id(3)) else {
                    continue;
                };
                let made = linear.build(&mut root, &self.memory);
                space = Some(root);
                if made.is_ok() {
                    break;
                }
            }
            let Some(mut space) = space else {
                done.set(true);
                return;
            };
            window.end_batch();
            own.mapper.attach(space.root(), self.half, 3);
            space.make_live();
            self.announce::<F, _>(oracle, &space);
            ready.set(true);
            for _ in 0..edits {
                cpu.spend(dice.time());
                self.protect(oracle, &mut space);
            }
            window.end_batch();
            done.set(true);
            *built.borrow_mut() = Some(space);
        })?;
        between(machine.digest());
        let (Some(space), true) = (built.into_inner(), machine.violations().is_empty()) else {
            return Ok(outcome);
        };
        machine.calm();
        own.mapper.detach();
        machine.dsb_stores();
        machine.tlbi(tablewright_machine::Tlbi::ALL);
        machine.dsb();
        let mut space = space;
        // SAFETY: no processor has the root loaded, and everything is forgotten.
        unsafe { space.make_dead() };
        let destroyed = space.destroy(|_| ()).is_ok();
        machine.check(destroyed, || "a dead space is not".to_owned());
        window.end_batch();
        Ok(outcome)
    }

    /// Every spot is where the memory map says it is.
    fn announce<F: Format<Input = Va>, P: Platform + Clone>(
        &self,
        oracle: &Oracle<'m>,
        space: &AddressSpace<F, P>,
    ) {
        announce(self.machine);
        for spot in &oracle.spots {
            let at = Pa::new(spot.va - self.offset);
            let inside = |spans: &[Span<Pa>]| spans.iter().any(|span| span.contains(at));
            let mapped = inside(self.memory.ram) && !inside(self.memory.reserved);
            if space.query(Va::new(spot.va)).is_some() != mapped {
                let what = format!("{at} is mapped or not, against the memory map");
                self.machine.report(Rule::Program, what);
            }
            if mapped {
                spot.begin(Some(Page::new(at.get(), Attrs::KERNEL_DATA)));
                spot.end();
            }
        }
    }

    /// Memory becomes read-only, or writable again.
    fn protect<F: Format<Input = Va>, P: Platform + Clone>(
        &self,
        oracle: &Oracle<'m>,
        space: &mut AddressSpace<F, P>,
    ) {
        let page = 1u64 << F::PAGE_SHIFT;
        let spot = &oracle.spots[self.dice.below(oracle.spots.len() as u64) as usize];
        let span = Span::new(Va::new(spot.va), page).expect("a page");
        let change = if self.dice.once_in(2) {
            Change::new().write_protect()
        } else {
            Change::new().perms(Attrs::KERNEL_DATA.perms)
        };
        // The rest of the block may be broken.
        let before: Vec<_> = oracle
            .spots
            .iter()
            .map(|other| {
                let page = other.page().map(Page::merged);
                let new =
                    if other.va == spot.va { page.map(|page| page.changed(&change)) } else { page };
                (other, other.begin(new).merged())
            })
            .collect();
        let mut gather = space.gather();
        let done = gather.protect(span, change);
        self.control.during(Stage::Flushing, || gather.finish(|_| ()));
        if let Err(error) = done
            && error != EditError::OutOfTables
        {
            self.machine.report(Rule::Program, format!("refused: {error}"));
        }
        for (other, before) in before {
            if done.is_ok() && other.va == spot.va {
                other.end();
            } else {
                other.restore(before);
            }
        }
    }
}
