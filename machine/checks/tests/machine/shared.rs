//! Shared edits on the machine: CPUs fault on one tree while the host takes pages back, protects,
//! splits and collapses.
//!
//! Every page that a guest has is one of the machine's own, so that a translation that outlives it
//! is noticed, and so is a table that is freed while a walk, of hardware or software, may still
//! come to it.

use std::cell::Cell;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::ControlFlow;

use tablewright::format::{Arm64K4, Arm64K16, X86_64};
use tablewright::shared::{Gather, Mapped, NewLeaf, Refused, SharedPlatform, SharedSpace};
use tablewright::{
    AddressSpace, Attrs, Change, Format, Half, Level, Pa, Perms, Platform, Span, Va,
};
use tablewright_machine::splitmix;
use tablewright_machine::{
    Architecture, Fault, Granule, Machine, Mapper, Memory, Ordering, Regime, Request, Setup, Time,
    Want,
};

use tablewright_workloads::random::Later;

const fn arm(granule: Granule) -> Architecture {
    Architecture::arm64(Regime::Arm64Stage1 { granule, wide: false })
}

/// Numbers that look random and are those of a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        splitmix::next(Cell::from_mut(&mut self.0)) % sides
    }
}

/// A guest of two regions: one backed page by page, by pages that the host takes back; one backed
/// by a block.
struct Guest<'m, F: Format<Input = Va>> {
    machine: &'m Machine,
    space: SharedSpace<F, Mapper<'m>>,
    mapper: Mapper<'m>,
    /// The pages that the host has given, by their number in the guest.
    backing: RefCell<HashMap<u64, Pa>>,
    /// Reclaims that are complete, whose tables may still be walked.
    later: Later<F, Mapper<'m>>,
}

/// A CPU's edits.
type Edits<'g, 'm, F> = Gather<'g, F, Mapper<'m>>;

const PAGES: u64 = 24;
/// Memory that is not tracked: a whole block.
const BLOCK: Pa = Pa::new(1 << 41);

impl<'m, F: Format<Input = Va>> Guest<'m, F> {
    const PAGE: u64 = 1 << F::PAGE_SHIFT;

    fn block() -> u64 {
        1 << F::shift(Level::new(1))
    }

    /// Returns the memory behind the guest's address `at`, and how large a leaf may be.
    fn look_up(&self, at: u64, dice: &mut Dice) -> Option<(Pa, Level)> {
        if at >= Self::block() {
            let level = Level::new(dice.roll(2) as u8);
            let inside = at - Self::block();
            let frame = BLOCK.get() + (inside & !((1 << F::shift(level)) - 1));
            return Some((Pa::new(frame), level));
        }
        let number = at / Self::PAGE;
        if let Some(&page) = self.backing.borrow().get(&number) {
            return Some((page, Level::PAGE));
        }
        let page = self.machine.take_page()?;
        // Another CPU may have given one while this one waited.
        let mut backing = self.backing.borrow_mut();
        let given = *backing.entry(number).or_insert(page);
        drop(backing);
        if given != page {
            self.machine.give_page(page);
        }
        Some((given, Level::PAGE))
    }

    /// The fault handler of a virtual CPU.
    fn fault(&self, request: Request, gather: &mut Edits<'_, 'm, F>, dice: &mut Dice) {
        for _ in 0..4 {
            // What is looked up in a walk is not given away before it is over.
            let walk = self.mapper.enter();
            let Some((frame, level)) = self.look_up(request.va, dice) else {
                break;
            };
            let attrs = match request.want {
                Want::Write => Attrs::KERNEL_DATA,
                _ => Attrs::KERNEL_RODATA,
            };
            let leaf = NewLeaf::new(Va::new(request.va), frame, level, attrs).unwrap();
            let mapped = gather.map(&leaf);
            drop(walk);
            match mapped {
                Ok(_) | Err(Refused::Busy(_)) => break,
                Err(Refused::NeedsTables(count)) => {
                    if !gather.top_up(count) {
                        break;
                    }
                }
                Err(Refused::Larger(_)) => {
                    gather.top_up(1);
                    let _split = gather.split(Va::new(request.va), level);
                }
                Err(Refused::Retry | Refused::Denied) => {}
                Err(error) => panic!("{error}"),
            }
        }
        self.later.put_off(gather);
    }

    /// The host takes a page back.
    fn reclaim(&self, number: u64, gather: &mut Edits<'_, 'm, F>) {
        let Some(page) = self.backing.borrow_mut().remove(&number) else {
            return;
        };
        let span = Span::new(Va::new(number * Self::PAGE), Self::PAGE).unwrap();
        for pass in 0..2 {
            let taken = gather.unmap(span, |_| ControlFlow::Continue(())).unwrap();
            assert!(taken.progress.is_done());
            self.later.push(gather.issue().complete());
            if pass == 0 {
                // Faults that looked the page up before it was taken come to their end.
                let period = self.mapper.grace_period();
                while !self.mapper.is_over(period) {
                    self.machine.cpu().spend(Time::ns(100));
                }
            }
        }
        self.machine.give_page(page);
    }

    fn host(&self, dice: &mut Dice, gather: &mut Edits<'_, 'm, F>) {
        match dice.roll(4) {
            0 => self.reclaim(dice.roll(PAGES), gather),
            1 => {
                let change = Change::new().perms(Perms::READ);
                let all = Span::new(Va::new(0), 2 * Self::block()).unwrap();
                gather.protect(all, change).unwrap();
            }
            2 => {
                gather.top_up(1);
                let at = Va::new(Self::block());
                let _split = gather.split(at, Level::PAGE);
            }
            _ => {
                let block = Va::new(Self::block());
                let leaf = NewLeaf::new(block, BLOCK, Level::new(1), Attrs::KERNEL_DATA).unwrap();
                if gather.top_up(2) {
                    let _mapped: Result<Mapped<F>, _> = gather.map(&leaf);
                }
            }
        }
        self.later.put_off(gather);
    }
}

/// One run; what it comes to, so that it can be done twice.
fn live<F: Format<Input = Va>>(architecture: &Architecture, seed: u64, cpus: usize) -> u64 {
    let page_shift = architecture.regime.page_shift();
    let memory = Memory::new(160, page_shift, 1 << 30);
    let mut setup = Setup::new(architecture.clone(), memory);
    setup.scheduler.cpus = cpus;
    setup.scheduler.perturbation.seed = seed;
    setup.refuse_once_in = 20;
    setup.costs.access = Time::ns(2);
    setup.costs.walk = Time::ns(5);
    setup.costs.complete = Time::ns(300);
    setup.costs.exchange = Time::ns(5);
    setup.costs.clean = Time::ns(500);
    let machine = Machine::new(setup);
    let mapper = machine.new_space();
    let Some(space) = AddressSpace::<F, _>::new(mapper) else {
        return 0;
    };
    mapper.attach(space.root(), Half::Lower, 0);
    let guest = Guest {
        machine: &machine,
        space: SharedSpace::new(space).expect("no code runs on it"),
        mapper,
        backing: RefCell::default(),
        later: Later::new(),
    };
    let outcome = machine.run(|cpu| {
        let mut dice = Dice(seed * 1024 + cpu.id() as u64);
        let mut gather = guest.space.gather();
        mapper.load();
        for _ in 0..30 {
            cpu.spend(Time::ns(50));
            if cpu.id() == 0 {
                guest.host(&mut dice, &mut gather);
                continue;
            }
            let at = if dice.roll(3) == 0 {
                Guest::<F>::block() + dice.roll(4) * 5 * Guest::<F>::PAGE
            } else {
                dice.roll(PAGES) * Guest::<F>::PAGE
            };
            let request = match dice.roll(2) {
                0 => Request::read(at),
                _ => Request::write(at),
            };
            // Until it goes on: the guest makes the access again and again.
            for _ in 0..50 {
                match machine.touch(request) {
                    Ok(_) => break,
                    Err(Fault::AccessFlag { .. }) => {
                        let _relaxed = guest.space.relax(Va::new(at), Perms::empty(), false);
                    }
                    Err(_) => guest.fault(request, &mut gather, &mut dice),
                }
            }
        }
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("seed {seed}: {error}"));

    machine.calm();
    while !guest.later.is_empty() {
        guest.later.reclaim_one(|_| ());
    }
    // Everything goes: no page, no table is lost.
    let all = Span::new(Va::new(0), 2 * Guest::<F>::block()).unwrap();
    let mut gather = guest.space.gather();
    let taken = gather.unmap(all, |_| ControlFlow::Continue(())).unwrap();
    assert!(taken.progress.is_done());
    assert!(gather.finish(|_| ()).is_ok(), "no CPU walks");
    for &page in guest.backing.borrow().values() {
        machine.give_page(page);
    }
    let violations = machine.finish();
    assert_eq!(violations, [], "{}: seed {seed}", F::NAME);
    // The root is left, and the tables above the two regions.
    let left = machine.memory().used();
    assert!(left <= F::LEVELS.into(), "{}: seed {seed}: {left} frames are left", F::NAME);
    let _ = mapper.caps();
    outcome.end.as_ps() ^ machine.digest()
}

#[test]
fn guests_fault_and_the_host_takes_back_without_breaking_a_rule() {
    let base = arm(Granule::K4);
    let flags = Architecture { hardware_access: true, hardware_dirty: true, ..arm(Granule::K4) };
    let gentle = Architecture {
        bbm: 2,
        ordering: Ordering::Ets2,
        forced_write_back: true,
        dic: true,
        ..flags.clone()
    };
    for seed in 1..150 {
        let cpus = 2 + seed as usize % 5;
        live::<Arm64K4>(&base, seed, cpus);
        live::<Arm64K4>(&flags, seed, cpus);
        live::<Arm64K4>(&gentle, seed, cpus);
        live::<Arm64K16>(&arm(Granule::K16), seed, cpus);
        live::<X86_64<4>>(&Architecture::x86_64(4), seed, cpus);
    }
}

#[test]
fn a_seed_is_one_run() {
    let once = live::<Arm64K4>(&arm(Granule::K4), 5, 6);
    assert_eq!(once, live::<Arm64K4>(&arm(Granule::K4), 5, 6));
}

/// One CPU puts other memory in the place of a page, parked, and another gives it its permissions
/// as soon as it is there. The sequences found (seed 4249690) that it did not wait until what was
/// there before was forgotten.
fn park_in_place<F: Format<Input = Va>>(architecture: &Architecture, seed: u64) {
    let page_shift = architecture.regime.page_shift();
    let mut setup = Setup::new(architecture.clone(), Memory::new(16, page_shift, 1 << 30));
    setup.scheduler.cpus = 2;
    setup.scheduler.perturbation.seed = seed;
    setup.costs.access = Time::ns(2);
    setup.costs.exchange = Time::ns(5);
    setup.costs.complete = Time::ns(500);
    let machine = Machine::new(setup);
    let mapper = machine.new_space();
    let mut space = AddressSpace::<F, _>::new(mapper).expect("a frame for the root");
    mapper.attach(space.root(), Half::Lower, 0);
    let page = Span::new(Va::new(0), 1 << F::PAGE_SHIFT).unwrap();
    let first = machine.take_page().expect("a page");
    space.map(page, first, Attrs::KERNEL_DATA).unwrap();
    let space = SharedSpace::new(space).expect("no code runs on it");
    let outcome = machine.run(|cpu| {
        mapper.load();
        let mut gather = space.gather();
        if cpu.id() == 0 {
            let parked = Attrs::KERNEL_DATA.with_perms(Perms::empty());
            let frame = machine.take_page().expect("a page");
            let leaf = NewLeaf::new(page.start(), frame, Level::PAGE, parked).unwrap();
            // What hardware sets meanwhile is a reason to try again.
            while gather.map(&leaf).is_err() {
                cpu.spend(Time::ns(10));
            }
        } else {
            let given = Change::new().perms(Perms::READ.union(Perms::WRITE));
            for _ in 0..40 {
                let _ = machine.touch(Request::write(0));
                let _ = gather.protect(page, given);
                cpu.spend(Time::ns(20));
            }
        }
        assert!(gather.finish(|_| ()).is_ok(), "no CPU walks for long");
    });
    outcome.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    assert_eq!(machine.finish(), [], "{}: seed {seed}", F::NAME);
}

#[test]
fn what_is_parked_in_place_is_not_given_before_its_predecessor_is_forgotten() {
    // Without cache maintenance, for which the entry is frozen anyway.
    let coherent = Architecture { forced_write_back: true, dic: true, ..arm(Granule::K4) };
    for seed in 1..60 {
        park_in_place::<Arm64K4>(&coherent, seed);
        park_in_place::<X86_64<4>>(&Architecture::x86_64(4), seed);
    }
}
