//! Spaces that are invalidated by identity: which identifier an invalidation names, what a
//! processor is told to load, and that a space without global translations has no more forgotten
//! than its own.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::ptr::NonNull;

use proptest::prelude::*;
use tablewright::arch::{arm64, x86_64};
use tablewright::format::{Arm64K4, X86_64};
use tablewright::shared::{CacheMaintenance, GracePeriod, NewLeaf, SharedPlatform, SharedSpace};
use tablewright::shootdown::arm64::{Instruction, Op};
use tablewright::shootdown::{Allocator, Holder, Identifiers, Identity};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, Entry, Format, Half, Invalidation, Level, Liveness,
    Pa, Platform, Span, TableLink, Va,
};
use tablewright_hosted::{Event, Hosted, Threads, Told};

const PAGE: u64 = 4096;

/// The identifiers of two processors, 1 to 7, two of which may be reserved for each.
struct Ids<'m> {
    identifiers: Identifiers<'m>,
    allocator: RefCell<Allocator<'m>>,
    flushes: Cell<u32>,
}

impl<'m> Ids<'m> {
    fn new(holders: &'m mut [Holder], memory: &'m mut [u64]) -> Self {
        let allocator = Allocator::new(3, memory).unwrap();
        Self {
            identifiers: Identifiers::new(&allocator, holders).unwrap(),
            allocator: RefCell::new(allocator),
            flushes: Cell::new(0),
        }
    }

    fn switch(&self, cpu: usize, to: &Identity) -> Option<(Pa, u16)> {
        // SAFETY: one thread plays all CPUs, which have no TLBs (1. to 4.).
        unsafe {
            self.identifiers.switch(
                cpu,
                to,
                |with| with(&mut self.allocator.borrow_mut()),
                || self.flushes.set(self.flushes.get() + 1),
            )
        }
    }
}

/// The platform of one space. Something may happen while stores are published, on another
/// processor.
#[derive(Clone, Copy)]
struct Tables<'k, P> {
    inner: P,
    identity: &'k Identity,
    at_publish: &'k dyn Fn(),
}

impl<'k, P> Tables<'k, P> {
    fn new(inner: P, identity: &'k Identity) -> Self {
        Self { inner, identity, at_publish: &|| () }
    }
}

// SAFETY: passed on; each space has an identity of its own, or is not walked (9.).
unsafe impl<P: Platform> Platform for Tables<'_, P> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.inner.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.inner.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.inner.table(frame, level) }
    }
    fn barrier(&self, barrier: Barrier) {
        self.inner.barrier(barrier);
        if barrier == Barrier::Publish {
            (self.at_publish)();
        }
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.inner.invalidate(what);
    }
    fn caps(&self) -> Caps {
        self.inner.caps()
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.inner.link_of(frame)
    }
    fn identity_of(&self, _: Pa) -> Option<&Identity> {
        Some(self.identity)
    }
}

// SAFETY: passed on.
unsafe impl<P: SharedPlatform> SharedPlatform for Tables<'_, P> {
    type Walk<'a>
        = P::Walk<'a>
    where
        Self: 'a;

    fn enter(&self) -> Self::Walk<'_> {
        self.inner.enter()
    }
    fn grace_period(&self) -> GracePeriod {
        self.inner.grace_period()
    }
    fn is_over(&self, period: GracePeriod) -> bool {
        self.inner.is_over(period)
    }
    fn maintenance(&self) -> CacheMaintenance {
        self.inner.maintenance()
    }
    fn invalidate_here(&self, what: &Invalidation<'_>) {
        self.inner.invalidate(what);
    }
}

fn span(first: u64, pages: u64) -> Span<Va> {
    Span::new(Va::new(first), pages * PAGE).unwrap()
}

const HEAP: u64 = 0x40_0000;

/// A live space with some pages.
fn live<'k, F: Format<Input = Va>, P: Platform + Copy>(
    tables: Tables<'k, P>,
    attrs: Attrs,
) -> AddressSpace<F, Tables<'k, P>> {
    let mut space = AddressSpace::<F, _>::new(tables).unwrap();
    let mapping = tablewright::Mapping::new(attrs).pages_only();
    space.map(span(HEAP, 1024), Pa::new(0x8000_0000), mapping).unwrap();
    space.make_live();
    space
}

/// Protects so many pages, and says what the platform was told.
fn protect<F: Format<Input = Va>>(
    space: &mut AddressSpace<F, Tables<'_, &Hosted>>,
    pages: u64,
) -> Vec<Told> {
    let hosted = space.platform().inner;
    hosted.record();
    let mut gather = space.gather();
    let change = Change::new().write_protect();
    gather.protect(span(HEAP, pages), change).unwrap();
    gather.finish(|_| ());
    hosted.take_log()
}

fn ids(told: &[Told]) -> Vec<u16> {
    told.iter().map(|told| told.id).collect()
}

#[test]
fn an_invalidation_names_the_identifier_of_its_time() {
    let (mut holders, mut memory) = ([const { Holder::new() }; 2], [0; 1]);
    let kernel = Ids::new(&mut holders, &mut memory);
    let hosted = Hosted::new(64, 12);
    let identities = [const { Identity::new() }; 10];
    let [mut space, _others @ ..] = identities.each_ref().map(|identity| {
        live::<Arm64K4, _>(Tables::new(&hosted, identity), Attrs::USER_DATA).with_id(7)
    });
    let mut page = 0;
    let mut named = |space: &mut AddressSpace<Arm64K4, Tables<'_, &Hosted>>| {
        page += 1;
        ids(&protect(space, page))
    };
    // It was never loaded, so that nothing is remembered. It is issued all the same.
    assert_eq!((named(&mut space), space.id()), (vec![0], 0));
    let load = |cpu, number: usize| kernel.switch(cpu, &identities[number]).unwrap().1;
    assert_eq!((load(0, 0), named(&mut space)), (1, vec![1]));
    // It stays loaded while another processor goes through all identifiers: it keeps its own.
    assert_eq!([1, 2, 3, 4, 5, 6, 7].map(|number| load(1, number)), [2, 3, 4, 5, 6, 7, 2]);
    assert_eq!((named(&mut space), kernel.flushes.get()), (vec![1], 1));
    // It is left, and may be walked until the processor has loaded the next: it keeps its own.
    let others = || (0..30).map(|turn| load(1, 3 + turn % 7));
    load(0, 1);
    assert!(others().all(|id| id != 1));
    assert_eq!(load(1, 0), 1);
    // Then generations begin in which its identifier is another's. What is remembered of it under
    // that one is of no use to a processor before it has forgotten everything.
    load(0, 2);
    let before = kernel.flushes.get();
    assert!(others().any(|id| id == 1));
    let id = load(1, 0);
    assert_eq!(named(&mut space), [id]);
    assert!(id != 1 && kernel.flushes.get() > before);

    // The end of it, which names it too, and is of everything.
    hosted.record();
    // SAFETY: no processor walks these tables.
    unsafe { space.retire() };
    let [told] = &hosted.take_log()[..] else { panic!("one invalidation") };
    assert_eq!((told.id, told.everything, told.global), (id, true, false));
}

/// An identifier that is given between the stores and the look is seen, because the look comes
/// behind the publication.
#[test]
fn the_identifier_is_read_when_the_stores_are_published() {
    let (mut holders, mut memory) = ([const { Holder::new() }; 2], [0; 1]);
    let kernel = Ids::new(&mut holders, &mut memory);
    let (hosted, identity) = (Hosted::new(64, 12), Identity::new());
    let loaded = Cell::new(None);
    let load = || {
        if let Some(switch) = kernel.switch(1, &identity) {
            loaded.set(Some(switch.1));
        }
    };
    let tables = Tables { at_publish: &load, ..Tables::new(&hosted, &identity) };
    let mut space = live::<X86_64<4>, _>(tables, Attrs::USER_DATA);
    // Not by the publication of what was made before it was live.
    assert_eq!(loaded.get(), None);
    assert_eq!((ids(&protect(&mut space, 1)), loaded.get()), (vec![1], Some(1)));
}

#[test]
fn what_is_loaded_is_what_is_live() {
    let (mut holders, mut memory) = ([const { Holder::new() }; 2], [0; 1]);
    let kernel = Ids::new(&mut holders, &mut memory);
    let (threads, identity, other) = (Threads::new(64, 12, 1), Identity::new(), Identity::new());
    let tables = Tables::new(&threads, &identity);
    let new = || AddressSpace::<Arm64K4, _>::new(tables).unwrap();
    let root = |cpu| kernel.switch(cpu, &identity).map(|(root, _)| root);

    let mut space = new();
    assert_eq!((root(0), identity.id()), (None, 0));
    space.make_live();
    assert_eq!(root(0), Some(space.root()));
    // There is no such processor.
    assert_eq!(root(2), None);
    // One identity for two: the second is never loaded.
    let mut second = new();
    second.make_own();
    assert_eq!(root(0), Some(space.root()));
    // SAFETY: no processor walks these tables.
    unsafe { second.make_dead() };
    assert_eq!(root(0), Some(space.root()));
    // SAFETY: as above.
    unsafe { space.retire() };
    assert_eq!(root(0), None);
    // The identity may be that of the next.
    second.make_live();
    assert_eq!(root(0), Some(second.root()));
    // SAFETY: as above.
    unsafe { second.make_dead() };
    for space in [space, second] {
        assert!(space.destroy(|_| ()).is_ok());
    }

    // A space that is shared at once is live, and stays so when it is not any more.
    let shared = SharedSpace::new(new()).ok().unwrap();
    assert_eq!(root(0), Some(shared.root()));
    let mut space = shared.into_exclusive();
    assert_eq!((root(0), space.liveness()), (Some(space.root()), Liveness::Live));
    // SAFETY: as above.
    unsafe { space.retire() };
    assert_eq!(root(0), None);
    // Tables that were made elsewhere.
    let tables = Tables::new(&threads, &other);
    // SAFETY: the space is not used any more (1., 2.), and no processor walks its tables (3.).
    let again = unsafe {
        AddressSpace::<Arm64K4, _>::adopt(tables, space.root(), Half::Lower, Liveness::Live)
    }
    .unwrap();
    let switch = kernel.switch(1, &other);
    assert_eq!(switch.map(|(root, _)| root), Some(again.root()));
    assert_eq!(root(0), None);
}

#[test]
fn shared_edits_name_it_too() {
    let (mut holders, mut memory) = ([const { Holder::new() }; 2], [0; 1]);
    let kernel = Ids::new(&mut holders, &mut memory);
    let (threads, identity) = (Threads::new(64, 12, 1).recording(), Identity::new());
    let space =
        SharedSpace::new(live::<Arm64K4, _>(Tables::new(&threads, &identity), Attrs::USER_RODATA));
    let space = space.ok().unwrap();
    threads.record();
    let id = kernel.switch(0, &identity).unwrap().1;
    let mut gather = space.gather();
    let change = Change::new().accessed(false);
    let protected = gather.protect(span(HEAP, 1), change);
    assert!(protected.is_ok());
    // More is allowed: what this processor remembers goes.
    let leaf = NewLeaf::new(Va::new(HEAP), Pa::new(0x8000_0000), Level::PAGE, Attrs::USER_DATA);
    assert!(gather.map(&leaf.unwrap()).is_ok());
    let unmapped = gather.unmap(span(HEAP + PAGE, 1), |_| ControlFlow::Continue(()));
    assert!(unmapped.unwrap().progress.is_done());
    let deferred = gather.issue().complete();
    assert!(deferred.try_complete().is_ok());
    drop(gather);
    let told: Vec<u16> = (threads.take_events().into_iter())
        .filter_map(|event| match event {
            Event::Invalidate(told) => Some(told.id),
            _ => None,
        })
        .collect();
    assert!(told.len() >= 2 && told.iter().all(|&named| named == id), "{told:?}");
}

/// All that a space without global leaves has to forget is its own: one instruction, of its
/// identifier.
#[test]
fn everything_of_a_space_is_one_instruction_of_its_identifier() {
    const PCIDE: u64 = 1 << 17;
    let (mut holders, mut memory) = ([const { Holder::new() }; 2], [0; 1]);
    let kernel = Ids::new(&mut holders, &mut memory);
    let hosted = Hosted::new(64, 12);
    let (identity, of_x86) = (Identity::new(), Identity::new());
    let mut space = live::<Arm64K4, _>(Tables::new(&hosted, &identity), Attrs::USER_DATA);
    let mut x86 = live::<X86_64<4>, _>(Tables::new(&hosted, &of_x86), Attrs::USER_DATA);
    let id = kernel.switch(0, &identity).unwrap().1;
    assert_eq!(kernel.switch(1, &of_x86).unwrap().1, id + 1);
    let pcid = id + 1;
    let features =
        x86_64::Features { pcid: true, invpcid: true, invlpgb: Some(7), ..x86_64::Features::LEAST };
    let arm64_says = |told: &[Told]| {
        let cpu =
            arm64::Cpu::of::<Arm64K4>(&arm64::Ids { isar0: 0, mmfr0: 0x25, mmfr1: 0, mmfr2: 0 });
        let mut all = Vec::new();
        for told in told {
            cpu.instructions(&told.invalidation(), |one| match one {
                Instruction::Tlbi(tlbi) => all.push((tlbi.op, (tlbi.operand >> 48) as u16)),
                Instruction::Dsb => {}
            });
        }
        all
    };
    let x86_says = |cpu: x86_64::Cpu, told: &[Told]| {
        // Another space is loaded.
        let loaded = x86_64::Loaded { cr3: 0x5000, cr4: PCIDE };
        let mut all = Vec::new();
        for told in told {
            cpu.instructions(&told.invalidation(), loaded, |one| all.push(one));
        }
        all
    };
    let (alone, broadcast) =
        (x86_64::Cpu::alone(features), x86_64::Cpu::broadcast(features).unwrap());
    use x86_64::{Instruction as X86, Invpcid};
    for (global, change) in
        [(false, Change::new().write_protect()), (true, Change::new().accessed(false))]
    {
        if global {
            let attrs = Attrs { global: true, ..Attrs::USER_DATA };
            space.map(span(0, 1), Pa::new(0), attrs).unwrap();
            x86.map(span(0, 1), Pa::new(0), attrs).unwrap();
        }
        let mut tell = |pages| {
            hosted.record();
            let mut gather = space.gather();
            gather.protect(span(HEAP, pages), change).unwrap();
            gather.finish(|_| ());
            let arm64 = hosted.take_log();
            let mut gather = x86.gather();
            gather.protect(span(HEAP, pages), change).unwrap();
            gather.finish(|_| ());
            let x86 = hosted.take_log();
            for log in [&arm64, &x86] {
                assert!(log.iter().all(|told| told.global == global));
            }
            (arm64, x86)
        };
        let (of_arm64, of_x86) = tell(1024);
        let everything = arm64_says(&of_arm64);
        let one = x86_says(alone, &of_x86);
        let [X86::Invlpgb(all)] = x86_says(broadcast, &of_x86)[..] else {
            panic!("one instruction")
        };
        match global {
            false => {
                assert_eq!(everything, [(Op::Aside1, id)]);
                assert_eq!(one, [X86::Invpcid(Invpcid::Space(pcid))]);
                // The PCID is valid, and nothing else; no globals.
                assert_eq!((all.rax, all.edx), (2, u32::from(pcid) << 16));
            }
            true => {
                assert_eq!(everything, [(Op::Vmalle1, 0)]);
                assert_eq!(one, [X86::Invpcid(Invpcid::Everything)]);
                assert_eq!((all.rax, all.edx), (8, 0));
            }
        }
    }
}

/// A translation that a processor remembers: under which identifier, of which space, which page of
/// it in which state.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Remembered {
    id: u16,
    space: usize,
    page: u64,
    state: u64,
}

#[derive(Clone, Debug)]
enum Step {
    /// A processor loads a space, and uses a page of it.
    Switch { cpu: usize, space: usize, page: u64 },
    /// A page changes, and with it so many others.
    Edit { space: usize, page: u64, pages: u64 },
    /// A space that no processor has loaded ends, and another comes.
    Replace { space: usize },
}

const CPUS: usize = 3;
const SPACES: usize = 9;
const PAGES: u64 = 4;

fn step() -> impl Strategy<Value = Step> {
    let switch = (0..CPUS, 0..SPACES, 0..PAGES);
    prop_oneof![
        4 => switch.prop_map(|(cpu, space, page)| Step::Switch { cpu, space, page }),
        2 => (0..SPACES, 0..PAGES, 1..=PAGES)
            .prop_map(|(space, page, pages)| Step::Edit { space, page, pages }),
        1 => (0..SPACES).prop_map(|space| Step::Replace { space }),
    ]
}

proptest! {
    /// Hardware that tells every processor, with seven identifiers for three processors and nine
    /// spaces, of which as many are invalidated as are edited: what a processor uses is what the
    /// tables say.
    #[test]
    fn what_is_used_is_what_the_tables_say(steps in prop::collection::vec(step(), 1..300)) {
        let (mut holders, mut memory) = ([const { Holder::new() }; CPUS], [0; 1]);
        let mut allocator = Allocator::new(3, &mut memory).unwrap();
        let identifiers = Identifiers::new(&allocator, &mut holders).unwrap();
        let hosted = Hosted::new(256, 12);
        hosted.record();
        let identities = [const { Identity::new() }; SPACES];
        let new = |number: usize| {
            live::<Arm64K4, _>(Tables::new(&hosted, &identities[number]), Attrs::USER_DATA)
        };
        let mut spaces: Vec<_> = (0..SPACES).map(new).collect();
        let mut states = [[0u64; PAGES as usize]; SPACES];
        let mut tlbs = [const { Vec::<Remembered>::new() }; CPUS];
        let mut loaded = [None; CPUS];
        for step in steps {
            match step {
                Step::Switch { cpu, space, page } => {
                    let tlb = RefCell::new(&mut tlbs[cpu]);
                    // SAFETY: as in `Ids::switch` (1. to 4.).
                    let switch = unsafe {
                        identifiers.switch(
                            cpu,
                            &identities[space],
                            |with| with(&mut allocator),
                            || tlb.borrow_mut().clear(),
                        )
                    };
                    let (root, id) = switch.unwrap();
                    prop_assert_eq!(root, spaces[space].root());
                    loaded[cpu] = Some(space);
                    let state = states[space][page as usize];
                    let new = Remembered { id, space, page, state };
                    let tlb = tlb.into_inner();
                    for one in tlb.iter().filter(|one| one.id == new.id) {
                        let now = states[one.space][one.page as usize];
                        prop_assert!(one.space == space && one.state == now, "{:?} as {:?}", one,
                            new);
                    }
                    if !tlb.contains(&new) {
                        tlb.push(new);
                    }
                }
                Step::Edit { space, page, pages } => {
                    let last = (page + pages).min(PAGES);
                    let mut gather = spaces[space].gather();
                    for at in page..last {
                        let state = &mut states[space][at as usize];
                        *state += 1;
                        // Another page: what was there has to be forgotten.
                        let frame = Pa::new(0x9000_0000 + *state * PAGE);
                        let at = Va::new(HEAP + at * PAGE);
                        let old = gather.replace(at, frame, Attrs::USER_DATA);
                        prop_assert!(gather.flush_with(old.unwrap(), |_| ()).is_ok());
                    }
                    drop(gather);
                    for told in hosted.take_log() {
                        for tlb in &mut tlbs {
                            let is_told = |one: &Remembered| {
                                one.id == told.id && told.covers(HEAP + one.page * PAGE)
                            };
                            tlb.retain(|one| !is_told(one));
                        }
                    }
                }
                Step::Replace { space } if loaded.contains(&Some(space)) => {}
                Step::Replace { space } => {
                    let mut old = spaces.swap_remove(space);
                    // SAFETY: no processor has it loaded.
                    unsafe { old.retire() };
                    prop_assert!(old.destroy(|_| ()).is_ok());
                    for told in hosted.take_log() {
                        tlbs.iter_mut().for_each(|tlb| tlb.retain(|one| one.id != told.id));
                    }
                    spaces.push(new(space));
                    let last = spaces.len() - 1;
                    spaces.swap(space, last);
                    // What is still remembered of the old one is not what the new one says.
                    states[space] = states[space].map(|state| state + 2);
                }
            }
        }
    }
}

/// A change of so many pages beside each other takes as few instructions as each kind of processor
/// allows.
#[test]
fn a_range_of_any_size_takes_few_instructions() {
    fn told<F: Format<Input = Va>>(caps: Caps, pages: u64, unmap: bool) -> Vec<Told> {
        let hosted = Hosted::new(64, 12).with_caps(caps);
        let mut space = AddressSpace::<F, _>::new(&hosted).unwrap().with_id(5);
        let mapping = tablewright::Mapping::new(Attrs::USER_DATA).pages_only();
        let heap = span(HEAP, pages);
        space.map(heap, Pa::new(0x8000_0000), mapping).unwrap();
        space.make_live();
        hosted.record();
        let mut gather = space.gather();
        if unmap {
            let unmapped = gather.unmap(heap, |_| ControlFlow::Continue(()));
            assert!(unmapped.unwrap().is_done());
        } else {
            gather.protect(heap, Change::new().write_protect()).unwrap();
        }
        gather.finish(|_| ());
        hosted.take_log()
    }
    let arm64 = |isar0: u64, pages, unmap| {
        let ids = arm64::Ids { isar0, mmfr0: 0x25, mmfr1: 0, mmfr2: 0 };
        let mut all = 0;
        for told in told::<Arm64K4>(ids.caps(), pages, unmap) {
            let cpu = arm64::Cpu::of::<Arm64K4>(&ids);
            cpu.instructions(&told.invalidation(), |_| all += 1);
        }
        all
    };
    let x86 = |invlpgb, pages, unmap| {
        let features =
            x86_64::Features { pcid: true, invpcid: true, invlpgb, ..x86_64::Features::LEAST };
        let cpu = x86_64::Cpu::broadcast(features).unwrap_or(x86_64::Cpu::alone(features));
        let loaded = x86_64::Loaded { cr3: 5, cr4: 1 << 17 };
        let mut all = 0;
        for told in told::<X86_64<4>>(features.caps(), pages, unmap) {
            cpu.instructions(&told.invalidation(), loaded, |_| all += 1);
        }
        all
    };
    const RANGES: u64 = 2 << 56;
    // A whole table.
    for unmap in [false, true] {
        assert_eq!([arm64(0, 512, unmap), arm64(RANGES, 512, unmap)], [1, 1]);
        assert_eq!([x86(None, 512, unmap), x86(Some(7), 512, unmap)], [1, 1]);
    }
    for pages in [1, 2, 5, 31, 33, 34, 63, 64, 65, 100, 511, 513, 1024, 5000] {
        for unmap in [false, true] {
            let most = |least: u64, other: u64| if pages <= least { pages } else { other };
            assert!(arm64(0, pages, unmap) <= most(64, 1), "{pages}");
            assert!(arm64(RANGES, pages, unmap) <= 5, "{pages}");
            assert!(x86(None, pages, unmap) <= most(33, 1), "{pages}");
            assert!(x86(Some(7), pages, unmap) <= 5, "{pages}");
        }
    }
}
