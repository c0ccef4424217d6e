//! The machine by itself: the engine on it, and what its rules say of programs that break them.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::rc::Rc;

use tablewright::format::{
    Arm64K4, Arm64K4Wide, Arm64K16, Arm64K16Wide, Arm64K64, Arm64K64Wide, X86_64,
};
use tablewright::{AddressSpace, Attrs, Change, Format, Half, Level, Mapping, Pa, Perms, Span, Va};
use tablewright_machine::{
    Architecture, Fault, Granule, Machine, Memory, Regime, Request, Rule, Setup, Time,
};

const fn arm(granule: Granule, wide: bool) -> Architecture {
    Architecture::arm64(Regime::Arm64Stage1 { granule, wide })
}

fn setup(architecture: Architecture, seed: u64, cpus: usize) -> Setup {
    let memory = Memory::new(256, architecture.regime.page_shift(), 1 << 30);
    let mut setup = Setup::new(architecture, memory);
    setup.scheduler.cpus = cpus;
    setup.scheduler.perturbation.seed = seed;
    setup
}

fn span(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

/// Maps, protects, splits and unmaps, and looks through the eyes of a CPU after each.
fn a_life<F: Format<Input = Va>>(architecture: Architecture, seed: u64) {
    let machine = Machine::new(setup(architecture, seed, 3));
    live::<F>(&machine, seed);
}

fn live<F: Format<Input = Va>>(machine: &Machine, seed: u64) {
    let mapper = machine.new_space();
    let mut space = AddressSpace::<F, _>::new(mapper).unwrap();
    mapper.attach(space.root(), Half::Lower, 0);
    space.make_live();
    mapper.load();

    let page = 1 << F::PAGE_SHIFT;
    let block = page << F::INDEX_BITS;
    let mut gather = space.gather();
    let large = span(0, 2 * block);
    gather.map(large, Pa::new(1 << 40), Attrs::KERNEL_DATA).unwrap();
    let pages = span(1 << 36, 16 * page);
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    gather.map(pages, Pa::new(1 << 41), mapping).unwrap();
    gather.finish(|_| ());
    assert_eq!(machine.touch(Request::write(block + 8)), Ok((1 << 40) + block + 8));
    assert_eq!(machine.touch(Request::write((1 << 36) + 8)), Ok((1 << 41) + 8));

    let mut gather = space.gather();
    let change = Change::new().perms(Perms::READ);
    gather.protect(span(1 << 36, 2 * page), change).unwrap();
    gather.split(span(0, block), Level::PAGE).unwrap();
    gather.finish(|_| ());
    let stored = machine.touch(Request::write((1 << 36) + 8));
    assert!(matches!(stored, Err(Fault::Permission { .. })), "{stored:?}");
    assert_eq!(machine.touch(Request::write(page + 8)), Ok((1 << 40) + page + 8));

    let mut gather = space.gather();
    let unmapped = gather.unmap(large, |_| ControlFlow::Continue(())).unwrap();
    assert!(unmapped.is_done());
    gather.finish(|_| ());
    let loaded = machine.touch(Request::read(8));
    assert!(matches!(loaded, Err(Fault::Translation { .. })), "{loaded:?}");
    assert_eq!(machine.finish(), [], "seed {seed}");
}

#[test]
fn the_engine_lives_on_the_machine_without_breaking_a_rule() {
    for seed in 0..100 {
        a_life::<Arm64K4>(arm(Granule::K4, false), seed);
        a_life::<Arm64K4Wide>(arm(Granule::K4, true), seed);
        a_life::<Arm64K16>(arm(Granule::K16, false), seed);
        a_life::<Arm64K16Wide>(arm(Granule::K16, true), seed);
        a_life::<Arm64K64>(arm(Granule::K64, false), seed);
        a_life::<Arm64K64Wide>(arm(Granule::K64, true), seed);
        a_life::<X86_64<4>>(Architecture::x86_64(4), seed);
        a_life::<X86_64<5>>(Architecture::x86_64(5), seed);
    }
}

fn traced(seed: u64) -> Vec<String> {
    let machine = Machine::new(setup(arm(Granule::K4, false), seed, 3));
    let lines = Rc::new(RefCell::new(Vec::new()));
    let sink = Rc::clone(&lines);
    machine.trace(Box::new(move |line| sink.borrow_mut().push(line.to_owned())));
    live::<Arm64K4>(&machine, seed);
    lines.take()
}

/// A trace has what another checker needs: each line has the form that the format says, times of
/// one CPU do not go back, and what was written is what is read next.
#[test]
fn a_trace_can_be_read_by_others() {
    let lines = traced(7);
    assert_eq!(lines[0], "tablewright-trace 1");
    let mut kinds = BTreeSet::new();
    let mut memory = HashMap::new();
    let mut before = 0;
    for line in &lines[1..] {
        let mut words = line.split(' ');
        let mut word = || words.next().unwrap_or_else(|| panic!("{line}: a word is missing"));
        let time: u64 = word().parse().unwrap();
        let _cpu: usize = word().parse().unwrap();
        let kind = word().to_owned();
        assert!(time >= before, "{line}: before {before}");
        before = time;
        let keys: HashMap<_, _> = words.filter_map(|word| word.split_once('=')).collect();
        let number = |key: &str| u64::from_str_radix(&keys[key][2..], 16).unwrap();
        match kind.as_str() {
            "load" => {
                let expected = memory.get(&number("pa")).copied();
                assert!(expected.is_none_or(|value| value == number("value")), "{line}");
            }
            "store" | "release" | "exchange" => {
                memory.insert(number("pa"), number("value"));
            }
            _ => {}
        }
        kinds.insert(kind);
    }
    for kind in [
        "load",
        "store",
        "visible",
        "walk",
        "publish",
        "synchronise",
        "root",
        "invalidate",
        "complete",
        "access",
        "take",
    ] {
        assert!(kinds.contains(kind), "no {kind} in {kinds:?}");
    }
}

#[test]
fn a_seed_is_one_run_and_another_seed_another() {
    // Not by assert_eq, which would print two books.
    assert!(traced(11) == traced(11));
    assert!(traced(11) != traced(12));
}

/// A page that was cleaned just before is cheaper to clean again, until as much as a cache holds
/// has been cleaned since.
#[test]
fn a_page_that_was_just_cleaned_is_cheaper_to_clean_again() {
    let regime = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
    let mut setup = Setup::new(Architecture::arm64(regime), Memory::new(4, 12, 1 << 30));
    setup.costs.clean = Time::ns(500);
    setup.costs.clean_again = Time::ns(300);
    let machine = Machine::new(setup);
    let page = |number: u64| Pa::new(number << 12);
    let outcome = machine
        .run(|cpu| {
            for (number, ns) in [(7, 500), (7, 300), (8, 500), (7, 300)] {
                let before = cpu.now();
                machine.clean(page(number));
                assert_eq!(cpu.now().saturating_sub(before), Time::ns(ns), "{number}");
            }
            (100..100 + 4096).for_each(|number| machine.clean(page(number)));
            let before = cpu.now();
            machine.clean(page(7));
            assert_eq!(cpu.now().saturating_sub(before), Time::ns(500));
        })
        .unwrap();
    assert_eq!(outcome.end, Time::ns(3 * 500 + 2 * 300 + 4096 * 500));
}

/// Memory that the machine does not have holds nothing, but has to be cleaned all the same.
#[test]
fn what_a_cache_holds_of_memory_elsewhere_is_seen() {
    let regime = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
    for cleaned in [false, true] {
        let setup = Setup::new(Architecture::arm64(regime), Memory::new(16, 12, 1 << 30));
        let machine = Machine::new(setup);
        let mapper = machine.new_space();
        let mut space = AddressSpace::<Arm64K4, _>::new(mapper).unwrap();
        mapper.attach(space.root(), Half::Lower, 1);
        let there = Pa::new(1 << 40);
        let attrs = Attrs::KERNEL_DATA.with_memory(tablewright::Memory::NonCacheable);
        let span = Span::new(Va::new(0x1000), 0x1000).unwrap();
        space.map(span, there, attrs).unwrap();
        space.make_live();
        machine.write_page(there);
        machine
            .run(|_| {
                mapper.load();
                if cleaned {
                    machine.clean(there);
                }
                machine.touch(Request::read(0x1008)).unwrap();
            })
            .unwrap();
        let broken: Vec<_> = machine.finish().into_iter().map(|it| it.rule).collect();
        let expected: &[Rule] = if cleaned { &[] } else { &[Rule::CacheMaintenance] };
        assert_eq!(broken, expected);
    }
}
