//! Memory that changes hands: what was written as private memory is cleaned before it is used as
//! shared, and the other way round.

use std::cell::RefCell;
use std::ops::ControlFlow;

use tablewright::format::{PAT, X86_64, shared};
use tablewright::{AddressSpace, Attrs, Change, Half, Level, Mapping, Pa, Span, Va};
use tablewright_machine::{Architecture, Machine, Mapper, Memory, Request, Rule, Setup};
use tablewright_workloads::dice::Dice;

type Tdx = X86_64<4, PAT, { shared(47) }>;
type Space<'m> = AddressSpace<Tdx, Mapper<'m>>;

const PAGES: u64 = 1024;
/// Memory that is not simulated.
const FRAMES: u64 = 1 << 40;

/// The kernel's part of a change, or what it leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Right,
    CleansNothing,
    CleansFirstPageOfEachLeaf,
    CleansAfterwards,
}

fn span(first: u64, pages: u64) -> Span<Va> {
    Span::new(Va::new(first << 12), pages << 12).unwrap()
}

/// Cleans what is mapped in a range.
fn clean(machine: &Machine, space: &Space<'_>, at: Span<Va>, kernel: Kernel) {
    if kernel == Kernel::CleansNothing {
        return;
    }
    let told = space.walk(at, |leaf| {
        let (first, last) = (leaf.input().get(), leaf.input().get() + (leaf.size() - 1));
        let from = first.max(at.start().get());
        let to = last.min(at.last().get());
        let all =
            if kernel == Kernel::CleansFirstPageOfEachLeaf { 1 } else { (to - from + 1) >> 12 };
        for page in 0..all {
            machine.clean(Pa::new(leaf.frame().get() + (from - first) + (page << 12)));
        }
        ControlFlow::Continue(())
    });
    assert!(told.is_ok());
}

/// A program of a seed: blocks and pages that are written, read, moved, and change hands.
fn broken(seed: u64, kernel: Kernel) -> Vec<Rule> {
    let architecture = Architecture { marked: Tdx::MARK, ..Architecture::x86_64(4) };
    let machine = Machine::new(Setup::new(architecture, Memory::new(32, 12, 1 << 30)));
    let mapper = machine.new_space();
    let mut space = Space::new(mapper).unwrap();
    mapper.attach(space.root(), Half::Lower, 0);
    let dice = Dice::new(seed);
    let private = Attrs { global: false, ..Attrs::KERNEL_DATA };
    let top = if dice.once_in(2) { Level::PAGE } else { Level::new(1) };
    space.map(span(0, PAGES), Pa::new(FRAMES), Mapping::new(private).largest(top)).unwrap();
    space.make_live();
    let space = RefCell::new(space);
    let done = machine.run(|_| {
        let mut space = space.borrow_mut();
        mapper.load();
        let mut base = 0;
        for _ in 0..60 {
            let page = dice.below(PAGES);
            let at = (base + page) << 12;
            match dice.below(8) {
                0..=2 => assert!(machine.access(Request::write(at)).is_ok()),
                3..=4 => assert!(machine.access(Request::read(at)).is_ok()),
                5 => {
                    // All of it moves, and keeps what it is.
                    let to = if base == 0 { 1 << 18 } else { 0 };
                    let mut gather = space.gather();
                    gather.relocate(span(base, PAGES), Va::new(to << 12)).unwrap();
                    gather.finish(|_| ());
                    base = to;
                }
                _ => {
                    let count = 1 + dice.below(8.min(PAGES - page));
                    let part = match dice.once_in(3) {
                        true => span(base + (page & !511), 512),
                        false => span(base + page, count),
                    };
                    if kernel != Kernel::CleansAfterwards {
                        clean(&machine, &space, part, kernel);
                    }
                    let change = match dice.once_in(2) {
                        true => Change::new().with_native(Tdx::MARK),
                        false => Change::new().without_native(Tdx::MARK),
                    };
                    let mut gather = space.gather();
                    gather.protect(part, change).unwrap();
                    gather.finish(|_| ());
                    if kernel == Kernel::CleansAfterwards {
                        let _ = machine.access(Request::read(part.start().get()));
                        clean(&machine, &space, part, kernel);
                    }
                }
            }
        }
    });
    assert!(done.is_ok(), "{done:?}");
    machine.violations().iter().map(|violation| violation.rule).collect()
}

#[test]
fn memory_that_changes_hands_is_cleaned_before() {
    for seed in 0..60 {
        assert_eq!(broken(seed, Kernel::Right), [], "seed {seed}");
    }
    for wrong in
        [Kernel::CleansNothing, Kernel::CleansFirstPageOfEachLeaf, Kernel::CleansAfterwards]
    {
        let found = (0..60).find_map(|seed| broken(seed, wrong).first().copied());
        assert_eq!(found, Some(Rule::CacheMaintenance));
    }
}
