//! Remote flushes against plain models: who is told, what is forgotten, under which identifier, and by which instruction.
//!
//! One thread plays all processors; an interrupt is taken as soon as it is sent. What processors do at once is for loom, and for the
//! machine.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use tablewright::format::X86_64;
use tablewright::hosted::Threads;
use tablewright::hyperv::{self, Encoder, HostCaps, Input, Output, PAGE_WORDS, Status};
use tablewright::shared::{Cut, SharedPlatform};
use tablewright::shootdown::amd::{self, Invlpgb};
use tablewright::shootdown::arm64::{self, Op, Tlbi};
use tablewright::shootdown::*;
use tablewright::{AddressSpace, Attrs, Invalidation, Level, Pa, Span, Va, What};

const CPUS: usize = 5;
const SPACES: usize = 9;
const PAGES: u64 = 6;
const PAGE: u64 = 4096;
/// Eight identifiers for five processors.
const BITS: u32 = 3;

fn range(first: u64, pages: u64, tables: bool) -> Invalidation {
    let what = What::Range {
        first: first * PAGE,
        last: (first + pages) * PAGE - 1,
        level: None,
        tables,
    };
    Invalidation { id: 0, what }
}

// ---- Identifiers ----

proptest! {
    #[test]
    fn no_identifier_is_loaded_over_entries_of_another_space(
        loads in prop::collection::vec((0..CPUS, 0..SPACES), 1..400),
    ) {
        let holders = [const { Holder::new() }; CPUS];
        let mut memory = [0; Allocator::words(BITS)];
        let mut allocator = Allocator::new(BITS, &mut memory).unwrap();
        let identifiers = Identifiers::new(&allocator, &holders).unwrap();
        let spaces = [const { Identity::new() }; SPACES];
        // Of which spaces a processor may remember something under each identifier, and what it has loaded.
        let mut remembered = vec![BTreeMap::<u16, BTreeSet<usize>>::new(); CPUS];
        let mut loaded = [None; CPUS];
        for (cpu, space) in loads {
            let mut forgets = false;
            let id = identifiers.load(cpu, &spaces[space], |with| with(&mut allocator), || forgets = true);
            let id = id.unwrap();
            prop_assert!(0 < id && id < 1 << BITS);
            prop_assert_eq!(spaces[space].id(), id);
            if forgets {
                remembered[cpu].clear();
            }
            remembered[cpu].entry(id).or_default().insert(space);
            prop_assert_eq!(remembered[cpu][&id].len(), 1, "identifier {} on processor {}", id, cpu);
            loaded[cpu] = Some((space, id));
            // Hardware that tells everybody does so by identifier: those that are in use belong to one space each.
            for (space, id) in loaded.iter().flatten() {
                for (other, its) in loaded.iter().flatten() {
                    prop_assert_eq!(space == other, id == its);
                }
            }
        }
    }
}

#[test]
fn identifiers_are_not_too_few() {
    let mut memory = [0; 1];
    let holders = [const { Holder::new() }; 7];
    let allocator = Allocator::new(BITS, &mut memory).unwrap();
    assert!(Identifiers::new(&allocator, &holders[..6]).is_some());
    assert!(Identifiers::new(&allocator, &holders).is_none());
    assert!(Allocator::new(BITS, &mut []).is_none());
    assert!(Allocator::new(0, &mut memory).is_none() && Allocator::new(17, &mut memory).is_none());
}

#[test]
fn a_space_that_is_loaded_everywhere_keeps_its_identifier() {
    let holders = [const { Holder::new() }; 2];
    let mut memory = [0; 1];
    let mut allocator = Allocator::new(2, &mut memory).unwrap();
    let identifiers = Identifiers::new(&allocator, &holders).unwrap();
    let (stays, others) = (Identity::new(), [const { Identity::new() }; 20]);
    let flushes = Cell::new(0);
    let mut load = |cpu, space: &Identity| {
        let forget = || flushes.set(flushes.get() + 1);
        identifiers.load(cpu, space, |with| with(&mut allocator), forget)
    };
    let id = load(0, &stays);
    for space in &others {
        // Generations pass, and processor 0 does not look up.
        assert_ne!(load(1, space), id);
    }
    assert!(flushes.replace(0) > 3);
    assert_eq!(load(0, &stays), id);
    assert_eq!(flushes.get(), 1);
}

// ---- Who is told ----

/// What a model of a processor has.
#[derive(Clone, Default)]
struct Core {
    /// The space that is loaded, and its identifier.
    loaded: Option<(usize, u16)>,
    lazy: bool,
    /// It does not run.
    preempted: bool,
    /// Version of each page, by identifier and page, and of tables.
    tlb: BTreeMap<(u16, u64), u32>,
    tables: BTreeMap<u16, u32>,
}

impl Core {
    fn forget(&mut self, what: &Forget) {
        match *what {
            Forget::All => {
                self.tlb.clear();
                self.tables.clear();
            }
            Forget::Space(id) => {
                self.tlb.retain(|&(its, _), _| its != id);
                self.tables.remove(&id);
            }
            Forget::Range(one) => {
                let What::Range {
                    first,
                    last,
                    tables,
                    ..
                } = one.what
                else {
                    panic!("a range");
                };
                let within = |page: u64| first / PAGE <= page && page <= last / PAGE;
                self.tlb
                    .retain(|&(its, page), _| its != one.id || !within(page));
                if tables {
                    self.tables.remove(&one.id);
                }
            }
        }
    }
}

struct World<'m> {
    shootdown: &'m Shootdown<'m>,
    spaces: &'m [Space<'m>],
    allocator: RefCell<Allocator<'m>>,
    cores: RefCell<Vec<Core>>,
    flags: [PreemptedFlag; CPUS],
    /// Version of the pages of each space, and of its tables.
    pages: RefCell<[[u32; PAGES as usize]; SPACES]>,
    tables: Cell<[u32; SPACES]>,
    interrupts: Cell<u64>,
    forgets: RefCell<Vec<(usize, Forget)>>,
    hypercalls: Cell<u64>,
    hypervisor_refuses: Cell<bool>,
}

/// A processor of the world.
struct On<'w, 'm>(usize, &'w World<'m>);

// SAFETY: no memory depends on it.
unsafe impl Actions for On<'_, '_> {
    fn forget(&self, what: Forget) {
        self.1.cores.borrow_mut()[self.0].forget(&what);
        self.1.forgets.borrow_mut().push((self.0, what));
    }

    fn interrupt(&self, cpus: &Cpus) {
        assert!(!cpus.contains(self.0) && !cpus.is_empty());
        self.1.interrupts.set(self.1.interrupts.get() + 1);
        for cpu in cpus.iter() {
            // One that does not run takes it when it does; here it is had to run at once.
            self.1.schedule(cpu);
            self.1.shootdown.on(cpu).unwrap().receive(&On(cpu, self.1));
        }
    }

    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>)) {
        with(&mut self.1.allocator.borrow_mut());
    }

    fn relax(&self) {
        panic!("everybody has answered");
    }
}

/// A number that is not that of the operating system; one processor has none yet.
fn vp_index(cpu: usize) -> Option<u32> {
    (cpu != 3).then_some(70 * (cpu as u32 + 1) % 256)
}

// SAFETY: there are no hypercalls here.
unsafe impl hyperv::Messenger for &World<'_> {
    fn call(&self, input: Input, page: &[u64; PAGE_WORDS]) -> Output {
        self.hypercalls.set(self.hypercalls.get() + 1);
        if self.hypervisor_refuses.get() {
            return Output::new(Status::PARAMETER, 0);
        }
        let host = HostCaps {
            processors: 512,
            xmm_input: false,
            extended_ranges: false,
            guest_physical: false,
        };
        let flush = hyperv::decode(input, 0, page, &host).unwrap();
        let vps = flush.targets.expect("some processors");
        let mut named = 0;
        for cpu in 0..CPUS {
            if !vp_index(cpu).is_some_and(|vp| vps.contains(vp)) {
                continue;
            }
            named += 1;
            // By the root of the tables, whatever the identifier.
            let root = flush.space.unwrap();
            let ids: Vec<u16> = self
                .spaces
                .iter()
                .filter(|space| space.root().get() == root)
                .map(|space| space.identity().id())
                .collect();
            assert_eq!(ids.len(), 1, "{root:#x} is no space");
            let core = &mut self.cores.borrow_mut()[cpu];
            if flush.is_everything() {
                core.forget(&Forget::Space(ids[0]));
            }
            for pages in flush.ranges() {
                let one = range(pages.first / PAGE, pages.count, true);
                core.forget(&Forget::Range(Invalidation { id: ids[0], ..one }));
            }
        }
        assert_eq!(named, vps.len(), "there is no such processor");
        Output::new(Status::SUCCESS, input.reps())
    }
}

impl Hypercalls for &World<'_> {
    fn vp_index(&self, cpu: usize) -> Option<u32> {
        vp_index(cpu)
    }

    fn with_page(&self, with: &mut dyn FnMut(&mut [u64; PAGE_WORDS])) {
        with(&mut [0x5555_5555_5555_5555; PAGE_WORDS]);
    }
}

impl amd::Amd for &World<'_> {
    fn invlpgb(&self, operands: Invlpgb) {
        let Invlpgb { rax, ecx, edx } = operands;
        let id = (edx >> 16) as u16;
        let forget = if rax & 1 == 0 {
            Forget::Space(id)
        } else {
            assert_eq!(ecx >> 31, 0);
            let one = range(rax >> 12, u64::from(ecx) + 1, rax & 16 == 0);
            Forget::Range(Invalidation { id, ..one })
        };
        let mut cores = self.cores.borrow_mut();
        cores.iter_mut().for_each(|core| core.forget(&forget));
    }

    fn tlbsync(&self) {}
}

impl World<'_> {
    fn here(&self, cpu: usize) -> Here<'_, '_> {
        self.shootdown.on(cpu).unwrap()
    }

    /// The host has it run.
    fn schedule(&self, cpu: usize) {
        if self.flags[cpu].enter() {
            self.cores.borrow_mut()[cpu].forget(&Forget::All);
        }
        self.cores.borrow_mut()[cpu].preempted = false;
    }

    fn switch(&self, cpu: usize, to: Option<usize>) {
        let from = self.cores.borrow()[cpu].loaded.map(|(space, _)| space);
        let space = |number: usize| &self.spaces[number];
        self.here(cpu)
            .switch(from.map(space), to.map(space), &On(cpu, self), |id| {
                let core = &mut self.cores.borrow_mut()[cpu];
                core.loaded = to.map(|space| (space, id));
                core.lazy = false;
            });
    }

    /// Uses a page: what is remembered has to be what memory says.
    fn touch(&self, cpu: usize, page: u64) -> Result<(), TestCaseError> {
        let mut cores = self.cores.borrow_mut();
        let core = &mut cores[cpu];
        if let Some((space, id)) = core.loaded {
            let now = self.pages.borrow()[space][page as usize];
            let seen = *core.tlb.entry((id, page)).or_insert(now);
            prop_assert_eq!(seen, now, "page {} of {} on {}", page, space, cpu);
            self.walk(core)?;
        }
        Ok(())
    }

    /// The walker goes through the tables of what is loaded, used or not.
    fn walk(&self, core: &mut Core) -> Result<(), TestCaseError> {
        if let Some((space, id)) = core.loaded {
            let now = self.tables.get()[space];
            let seen = *core.tables.entry(id).or_insert(now);
            prop_assert_eq!(seen, now, "tables of {}", space);
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Switch(usize, Option<usize>),
    Touch(usize, u64),
    Lazy(usize),
    Resume(usize),
    Preempt(usize),
    Flush {
        cpu: usize,
        space: usize,
        ranges: Vec<(u64, u64)>,
        tables: bool,
        way: u8,
        refuses: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let cpu = || 0..CPUS;
    let ranges = prop::collection::vec((0..PAGES, 1..3u64), 1..4);
    prop_oneof![
        3 => (cpu(), prop::option::weighted(0.9, 0..SPACES)).prop_map(|(cpu, to)| Step::Switch(cpu, to)),
        6 => (cpu(), 0..PAGES).prop_map(|(cpu, page)| Step::Touch(cpu, page)),
        1 => cpu().prop_map(Step::Lazy),
        1 => cpu().prop_map(Step::Resume),
        1 => cpu().prop_map(Step::Preempt),
        4 => (cpu(), 0..SPACES, ranges, any::<bool>(), 0..6u8, prop::bool::weighted(0.3)).prop_map(
            |(cpu, space, ranges, tables, way, refuses)| Step::Flush { cpu, space, ranges, tables, way, refuses }
        ),
    ]
}

/// Runs a program on a world at rest: with identifiers of so many bits, if any, and a space that is as expensive as so many pages.
fn with_world<T>(bits: Option<u32>, space: u64, program: impl FnOnce(&World<'_>) -> T) -> T {
    let cpus = [const { Cpu::new() }; CPUS];
    let inboxes = [const { AtomicU64::new(0) }; inbox_words(CPUS)];
    let holders = [const { Holder::new() }; CPUS];
    let mut memory = [0; Allocator::words(5)];
    let allocator = Allocator::new(bits.unwrap_or(BITS), &mut memory).unwrap();
    let identifiers = Identifiers::new(&allocator, &holders).filter(|_| bits.is_some());
    let costs = Costs {
        page: 1,
        space,
        interrupt: 10,
    };
    let shootdown = Shootdown::new(&cpus, &inboxes, identifiers, costs).unwrap();
    let masks = [const { [const { AtomicU64::new(0) }; Space::words(CPUS)] }; SPACES];
    let spaces: Vec<Space<'_>> = (masks.iter().zip(1..))
        .map(|(mask, number)| Space::new(number, Pa::new(number << 12), mask))
        .collect();
    program(&World {
        shootdown: &shootdown,
        spaces: &spaces,
        allocator: RefCell::new(allocator),
        cores: RefCell::new(vec![Core::default(); CPUS]),
        flags: Default::default(),
        pages: RefCell::default(),
        tables: Cell::default(),
        interrupts: Cell::default(),
        forgets: RefCell::default(),
        hypercalls: Cell::default(),
        hypervisor_refuses: Cell::default(),
    })
}

fn play(world: &World<'_>, steps: &[Step], identified: bool) -> Result<(), TestCaseError> {
    let spaces = world.spaces;
    let hypercall = Hypercall {
        encoder: Encoder::default(),
        cost: 15,
        calls: world,
    };
    let deferred = Deferred::new(|cpu| world.flags.get(cpu));
    let broadcast = amd::Broadcast {
        most: 1,
        cost: 2,
        hardware: world,
    };
    let ways: [&[&dyn Messenger]; 6] = [
        &[],
        &[&hypercall],
        &[&deferred],
        &[&deferred, &hypercall],
        &[&broadcast],
        &[&broadcast, &hypercall, &deferred],
    ];
    for one in steps {
        let core = |cpu: usize| world.cores.borrow()[cpu].clone();
        match *one {
            Step::Switch(cpu, to) => {
                world.schedule(cpu);
                world.switch(cpu, to);
                if !identified {
                    // As a load of CR3 does.
                    world.cores.borrow_mut()[cpu].forget(&Forget::All);
                }
            }
            Step::Touch(cpu, page) => {
                world.schedule(cpu);
                let core = core(cpu);
                if let Some((space, _)) = core.loaded.filter(|_| core.lazy) {
                    world.here(cpu).resume(&spaces[space], &On(cpu, world));
                    world.cores.borrow_mut()[cpu].lazy = false;
                }
                world.touch(cpu, page)?;
            }
            Step::Lazy(cpu) => {
                world.schedule(cpu);
                if core(cpu).loaded.is_some() {
                    world.here(cpu).be_lazy();
                    world.cores.borrow_mut()[cpu].lazy = true;
                }
            }
            Step::Resume(cpu) => {
                world.schedule(cpu);
                if let Some((space, _)) = core(cpu).loaded {
                    world.here(cpu).resume(&spaces[space], &On(cpu, world));
                    world.cores.borrow_mut()[cpu].lazy = false;
                }
            }
            Step::Preempt(cpu) => {
                world.flags[cpu].preempt();
                world.cores.borrow_mut()[cpu].preempted = true;
            }
            Step::Flush {
                cpu,
                space,
                ref ranges,
                tables,
                way,
                refuses,
            } => {
                world.schedule(cpu);
                let mut batch = Batch::new();
                for &(first, pages) in ranges {
                    let pages = pages.min(PAGES - first);
                    batch.add(&range(first, pages, tables));
                    for page in first..first + pages {
                        world.pages.borrow_mut()[space][page as usize] += 1;
                    }
                }
                if tables {
                    let mut versions = world.tables.get();
                    versions[space] += 1;
                    world.tables.set(versions);
                }
                world.hypervisor_refuses.set(refuses);
                let what = batch.take();
                world.here(cpu).flush(
                    &spaces[space],
                    what.as_slice(),
                    ways[usize::from(way)],
                    &On(cpu, world),
                );
                // Who has it loaded has forgotten, or does not use it.
                for core in world.cores.borrow_mut().iter_mut() {
                    if core.preempted {
                        continue;
                    }
                    world.walk(core)?;
                    let Some((loaded, id)) = core.loaded.filter(|_| !core.lazy) else {
                        continue;
                    };
                    for page in 0..PAGES {
                        let now = world.pages.borrow()[loaded][page as usize];
                        let seen = core.tlb.get(&(id, page)).copied().unwrap_or(now);
                        prop_assert_eq!(
                            seen,
                            now,
                            "page {} of space {} after a flush",
                            page,
                            loaded
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]
    #[test]
    fn whatever_has_changed_is_forgotten_before_it_is_used(
        steps in prop::collection::vec(step(), 1..120),
        // None; fewer than there are spaces; more than a processor knows.
        bits in prop::sample::select(vec![None, Some(BITS), Some(BITS), Some(5)]),
    ) {
        with_world(bits, 4, |world| play(world, &steps, bits.is_some()))?;
    }
}

impl World<'_> {
    fn flush(&self, cpu: usize, what: &[Invalidation], messengers: &[&dyn Messenger]) {
        self.here(cpu)
            .flush(&self.spaces[0], what, messengers, &On(cpu, self));
    }

    /// What was forgotten since, by whom, and how often somebody was interrupted.
    fn take(&self) -> (Vec<(usize, Forget)>, u64) {
        (self.forgets.take(), self.interrupts.take())
    }
}

fn space(id: u16) -> Forget {
    Forget::Space(id)
}

fn part(id: u16, one: Invalidation) -> Forget {
    Forget::Range(Invalidation { id, ..one })
}

#[test]
fn who_is_told_forgets_what_is_named_and_who_comes_back_all() {
    with_world(Some(BITS), 4, |world| {
        (0..3).for_each(|cpu| world.switch(cpu, Some(0)));
        let page = range(3, 1, false);
        world.flush(0, &[page], &[]);
        let all = |what: Forget| vec![(1, what), (2, what), (0, what)];
        assert_eq!(world.take(), (all(part(1, page)), 1));
        // One is elsewhere for one flush, one is lazy for another.
        world.switch(1, Some(1));
        world.flush(0, &[page], &[]);
        world.here(2).be_lazy();
        world.switch(1, Some(0));
        let first = vec![(2, part(1, page)), (0, part(1, page)), (1, space(1))];
        assert_eq!(world.take(), (first, 1));
        world.flush(0, &[page], &[]);
        let second = vec![(1, part(1, page)), (0, part(1, page))];
        assert_eq!(world.take(), (second, 1));
        // Tables have gone: he is told, and has missed something.
        let tables = range(3, 1, true);
        world.flush(0, &[tables], &[]);
        let third = vec![(1, part(1, tables)), (2, space(1)), (0, part(1, tables))];
        assert_eq!(world.take(), (third, 1));
        world.here(2).resume(&world.spaces[0], &On(2, world));
        assert_eq!(world.take(), (vec![], 0));
    });
}

#[test]
fn what_was_forgotten_of_a_space_is_itself_forgotten() {
    with_world(Some(5), 4, |world| {
        world.switch(0, Some(0));
        world.flush(0, &[range(3, 1, false)], &[]);
        assert_eq!(world.take().0.len(), 1);
        (1..5).for_each(|other| world.switch(0, Some(other)));
        world.switch(0, Some(0));
        assert_eq!(world.take().0, []);
        // More spaces than a processor has views.
        (1..8).for_each(|other| world.switch(0, Some(other)));
        world.flush(0, &[range(3, 1, false)], &[]);
        world.switch(0, Some(0));
        assert_eq!(world.take().0, [(0, space(1))]);
    });
}

#[test]
fn a_threshold_is_a_cost_of_the_machine() {
    with_world(Some(BITS), 4, |world| {
        (0..2).for_each(|cpu| world.switch(cpu, Some(0)));
        let (four, five) = (range(0, 4, false), range(0, 5, false));
        world.flush(0, &[four], &[]);
        world.flush(0, &[five], &[]);
        let (part, whole) = (part(1, four), space(1));
        let both = vec![(1, part), (0, part), (1, whole), (0, whole)];
        assert_eq!(world.take(), (both, 2));
        // Large leaves are fewer.
        let what = |level| What::Range {
            first: 0,
            last: (4 << 21) - 1,
            level,
            tables: false,
        };
        let large = Invalidation {
            id: 0,
            what: what(Some(Level::new(1))),
        };
        let small = Invalidation {
            id: 0,
            what: what(None),
        };
        world.flush(0, &[large], &[]);
        world.flush(0, &[small], &[]);
        let part = Forget::Range(Invalidation { id: 1, ..large });
        let both = vec![(1, part), (0, part), (1, whole), (0, whole)];
        assert_eq!(world.take(), (both, 2));
    });
}

#[test]
fn more_ranges_than_a_message_holds_are_the_whole_space() {
    with_world(Some(BITS), 1000, |world| {
        (0..2).for_each(|cpu| world.switch(cpu, Some(0)));
        let most: Vec<_> = (0..16).map(|page| range(page, 1, false)).collect();
        world.flush(0, &most, &[]);
        assert_eq!(world.take().0.len(), 32);
        world.flush(0, &[&most[..], &most[..1]].concat(), &[]);
        assert_eq!(world.take().0, [(1, space(1)), (0, space(1))]);
        let mut batch = Batch::new();
        most.iter().for_each(|one| batch.add(one));
        assert_eq!(batch.as_slice(), most);
        batch.add(&most[0]);
        world.flush(0, batch.take().as_slice(), &[]);
        assert_eq!(world.take().0, [(1, space(1)), (0, space(1))]);
        world.flush(0, batch.take().as_slice(), &[]);
        assert_eq!(world.take(), (vec![], 0));
    });
}

#[test]
fn a_messenger_is_used_where_it_costs_less_than_interrupts() {
    with_world(Some(BITS), 4, |world| {
        (0..2).for_each(|cpu| world.switch(cpu, Some(0)));
        let hypercall = Hypercall {
            encoder: Encoder::default(),
            cost: 15,
            calls: world,
        };
        let page = range(3, 1, false);
        world.flush(0, &[page], &[&hypercall]);
        assert_eq!((world.hypercalls.take(), world.take().1), (0, 1));
        world.switch(2, Some(0));
        world.flush(0, &[page], &[&hypercall]);
        assert_eq!((world.hypercalls.take(), world.take().1), (1, 0));
        // One that the hypervisor has given no number is interrupted; the hypercall names the others.
        world.switch(3, Some(0));
        world.flush(0, &[page], &[&hypercall]);
        assert_eq!((world.hypercalls.take(), world.take().1), (1, 1));
        // Nobody else: nobody is told.
        (1..4).for_each(|cpu| world.switch(cpu, None));
        world.flush(0, &[page], &[&hypercall]);
        assert_eq!((world.hypercalls.take(), world.take().1), (0, 0));
    });
}

#[test]
fn tables_that_were_cut_off_wait_for_software_that_walks_them() {
    let platform = Threads::new(16, 12, 1);
    let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    let (page, table) = (Span::new(Va::new(0), PAGE), Span::new(Va::new(0), 1 << 21));
    let mut flush = space.flush();
    space
        .map(page.unwrap(), Pa::new(0), Attrs::USER_DATA, &mut flush)
        .unwrap();
    flush.finish(|_| ());
    let walk = SharedPlatform::enter(&platform);
    let tables = platform.tables();
    let mut flush = space.flush();
    let unmapped = space.unmap(table.unwrap(), &mut flush, |_| ControlFlow::Continue(()));
    assert!(unmapped.unwrap().is_done());
    let cut = Cut::from(flush.issue().complete()).quiet().err().unwrap();
    assert_eq!(platform.tables(), tables);
    drop(walk);
    cut.quiet().ok().unwrap().finish(|_| ());
    assert!(platform.tables() < tables);
}

// ---- Instructions ----

/// With `x0`, or none.
#[test]
fn instructions_are_those_of_an_assembler() {
    let words = [
        (Op::Vmalle1, 31, 0xd508_831f),
        (Op::Vae1, 0, 0xd508_8320),
        (Op::Aside1, 0, 0xd508_8340),
        (Op::Vale1, 0, 0xd508_83a0),
        (Op::Rvae1, 0, 0xd508_8220),
        (Op::Rvale1, 0, 0xd508_82a0),
        (Op::Vmalls12e1, 31, 0xd50c_83df),
        (Op::Ipas2e1, 0, 0xd50c_8020),
        (Op::Ipas2le1, 0, 0xd50c_80a0),
        (Op::Ripas2e1, 0, 0xd50c_8040),
        (Op::Ripas2le1, 0, 0xd50c_80c0),
    ];
    for (op, register, word) in words {
        assert_eq!(op.word(register), word, "{op:?}");
    }
}

/// The pages that an instruction names, and its hint, from the manual's fields.
fn named(encoder: &arm64::Encoder, tlbi: &Tlbi) -> (std::ops::Range<u64>, u64) {
    let bits = |low: u32, count: u32| tlbi.operand >> low & ((1 << count) - 1);
    let granule = u64::from((encoder.page_shift - 10) / 2);
    if tlbi.op.is_range() {
        assert_eq!(bits(46, 2), granule);
        let base = if encoder.wide { 16 } else { encoder.page_shift };
        let first = bits(0, 37) << base >> encoder.page_shift;
        let pages = (bits(39, 5) + 1) << (5 * bits(44, 2) + 1);
        (first..first + pages, bits(37, 2))
    } else {
        let first = bits(0, 44) << 12 >> encoder.page_shift;
        let hint = bits(44, 4);
        assert!(hint == 0 || hint >> 2 == granule);
        (first..first + 1, hint & 3)
    }
}

proptest! {
    #[test]
    fn instructions_name_each_page_once_and_no_other(
        page_shift in prop::sample::select(vec![12u32, 14, 16]),
        (ranges, wide, stage2, tables) in any::<(bool, bool, bool, bool)>(),
        height in prop::option::of(0..2u8),
        (first, count) in (0..1u64 << 20, prop_oneof![1..200u64, 1..1u64 << 24]),
        id in any::<u16>(),
    ) {
        let encoder = arm64::Encoder { page_shift, ranges, wide, stage2 };
        let stride = u64::from(page_shift - 3) * u64::from(height.unwrap_or(0));
        let count = if ranges { count } else { count % 2000 + 1 };
        let (first, pages) = (first << stride, (count >> stride).max(1) << stride);
        let what = What::Range {
            first: first << page_shift,
            last: ((first + pages) << page_shift) - 1,
            level: height.map(Level::new),
            tables,
        };
        let (mut next, mut instructions) = (first, 0);
        encoder.encode(&Invalidation { id, what }, |tlbi| {
            instructions += 1;
            let leaves = matches!(tlbi.op, Op::Vale1 | Op::Rvale1 | Op::Ipas2le1 | Op::Ripas2le1);
            let second = matches!(tlbi.op, Op::Ipas2e1 | Op::Ipas2le1 | Op::Ripas2e1 | Op::Ripas2le1);
            assert_eq!((leaves, second), (!tables, stage2));
            assert_eq!(tlbi.operand >> 48, if stage2 { 0 } else { u64::from(id) });
            let (named, hint) = named(&encoder, &tlbi);
            assert_eq!(hint, height.map_or(0, |height| 3 - u64::from(height)));
            assert_eq!(named.start, next);
            // An instruction for one leaf names all of it.
            next = if tlbi.op.is_range() { named.end } else { next + (1 << stride) };
        });
        prop_assert_eq!(next, first + pages);
        // A range is four digits and an odd page; those that cannot start here, and many times the largest, come on top.
        let most = if ranges { 5 + pages / (1 << 21) + if wide { 15 } else { 0 } } else { pages >> stride };
        prop_assert!(instructions <= most, "{} instructions for {} pages", instructions, pages);
    }

    #[test]
    fn a_broadcast_of_amd_names_each_page_once(
        ranges in prop::collection::vec((0..1u64 << 36, 1..700u64, any::<bool>(), any::<bool>()), 1..8),
        most in prop_oneof![Just(0u16), 1..600u16],
        id in 0..4096u16,
    ) {
        let what: Vec<Invalidation> = (ranges.iter())
            .map(|&(first, pages, large, tables)| {
                let shift = if large { 21 } else { 12 };
                let what = What::Range {
                    first: first << shift,
                    last: ((first + pages) << shift) - 1,
                    level: large.then(|| Level::new(1)),
                    tables,
                };
                Invalidation { id: 0, what }
            })
            .collect();
        let message = Message { from: 0, id, root: Pa::new(0), what: &what };
        let mut seen = Vec::new();
        amd::Broadcast { most, cost: 0, hardware: () }.encode(&message, |Invlpgb { rax, ecx, edx }| {
            assert_eq!(edx, u32::from(id) << 16);
            assert_eq!(rax & 0xfff & !16, 3);
            let (more, large) = (ecx & 0xffff, ecx >> 31 != 0);
            assert!(more <= u32::from(most) && ecx & 0x7fff_0000 == 0);
            let shift = if large { 21 } else { 12 };
            assert_eq!(rax & ((1 << shift) - 1) & !0xfff, 0);
            let first = rax >> shift;
            let one = (first, u64::from(more) + 1, large, rax & 16 == 0);
            match seen.last_mut() {
                Some((its, pages, size, tables))
                    if *its + *pages == first && (*size, *tables) == (large, one.3) && *pages % (u64::from(most) + 1) == 0 =>
                {
                    *pages += one.1;
                }
                _ => seen.push(one),
            }
        });
        let pages = |list: &[(u64, u64, bool, bool)]| -> u64 { list.iter().map(|one| one.1).sum() };
        prop_assert_eq!(pages(&seen), pages(&ranges));
        prop_assert_eq!(seen.len() <= ranges.len(), true);
    }
}
