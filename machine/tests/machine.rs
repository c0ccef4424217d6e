//! The machine by itself: the engine on it, and what its rules say of programs that break them.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::rc::Rc;

use tablewright::format::{
    Arm64K4, Arm64K4Wide, Arm64K16, Arm64K16Wide, Arm64K64, Arm64K64Wide, X86_64,
};
use tablewright::{AddressSpace, Attrs, Change, Format, Half, Level, Mapping, Pa, Perms, Span, Va};
use tablewright_machine::{Architecture, Fault, Granule, Machine, Memory, Regime, Request, Setup};

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
    let mut flush = space.flush();
    let large = span(0, 2 * block);
    space
        .map(large, Pa::new(1 << 40), Attrs::KERNEL_DATA, &mut flush)
        .unwrap();
    let pages = span(1 << 36, 16 * page);
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    space
        .map(pages, Pa::new(1 << 41), mapping, &mut flush)
        .unwrap();
    flush.finish(|_| ());
    assert_eq!(
        machine.touch(Request::write(block + 8)),
        Ok((1 << 40) + block + 8)
    );
    assert_eq!(
        machine.touch(Request::write((1 << 36) + 8)),
        Ok((1 << 41) + 8)
    );

    let mut flush = space.flush();
    let change = Change::new().perms(Perms::READ);
    space
        .protect(span(1 << 36, 2 * page), change, &mut flush)
        .unwrap();
    space
        .split(span(0, block), Level::PAGE, &mut flush)
        .unwrap();
    flush.finish(|_| ());
    let stored = machine.touch(Request::write((1 << 36) + 8));
    assert!(
        matches!(stored, Err(Fault::Permission { .. })),
        "{stored:?}"
    );
    assert_eq!(
        machine.touch(Request::write(page + 8)),
        Ok((1 << 40) + page + 8)
    );

    let mut flush = space.flush();
    let unmapped = space
        .unmap(large, &mut flush, |_| ControlFlow::Continue(()))
        .unwrap();
    assert!(unmapped.is_done());
    flush.finish(|_| ());
    let loaded = machine.touch(Request::read(8));
    assert!(
        matches!(loaded, Err(Fault::Translation { .. })),
        "{loaded:?}"
    );
    assert_eq!(machine.settle(), [], "seed {seed}");
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
    machine.trace(Box::new(move |line| {
        sink.borrow_mut().push(line.to_owned())
    }));
    live::<Arm64K4>(&machine, seed);
    lines.take()
}

/// What another checker needs: each line has the form that the format says, times of one CPU do not go back, and what
/// was written is what is read next.
#[test]
fn a_trace_can_be_read_by_others() {
    let lines = traced(7);
    assert_eq!(lines[0], "tablewright-trace 1");
    let mut kinds = BTreeSet::new();
    let mut memory = HashMap::new();
    let mut before = 0;
    for line in &lines[1..] {
        let mut words = line.split(' ');
        let mut word = || {
            words
                .next()
                .unwrap_or_else(|| panic!("{line}: a word is missing"))
        };
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
                assert!(
                    expected.is_none_or(|value| value == number("value")),
                    "{line}"
                );
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
