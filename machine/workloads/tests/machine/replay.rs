//! Small runs, written by hand: each is right, and wrong with one step of it left out, in another
//! place, or for another.

use tablewright_machine::replay::{Finding, Made, Replay};
use tablewright_machine::{Architecture, Granule, Memory, Regime, Rule};

/// The first address of tables: two for the root, one below it, one of pages.
const FIRST: u64 = 0x4800_0000;
const ROOT: u64 = FIRST;
const MIDDLE: u64 = FIRST + 0x2000;
const LAST: u64 = FIRST + 0x3000;
/// The first address of a guest's memory.
const PAGES: u64 = 0x5000_0000;
const VTTBR: u64 = 1 << 48 | ROOT;

const DSB_ISHST: u32 = 0xd503_3a9f;
const DSB_ISH: u32 = 0xd503_3b9f;
const DSB_NSH: u32 = 0xd503_379f;
const IPAS2E1IS: u32 = 0xd50c_8020;
const IPAS2LE1IS: u32 = 0xd50c_80a0;
const IPAS2E1: u32 = 0xd50c_8420;
const RIPAS2E1IS: u32 = 0xd50c_8040;
const VMALLE1IS: u32 = 0xd508_831f;
const VMALLE1: u32 = 0xd508_871f;
const VMALLS12E1IS: u32 = 0xd50c_83df;

const ISB: u32 = 0xd503_3fdf;

/// A root is loaded, and the context synchronised.
fn load(replay: &mut Replay, cpu: usize, vttbr: u64) {
    replay.load_root(cpu, vttbr);
    replay.executed(cpu, ISB, None);
}

fn page(number: u64) -> u64 {
    // Accessed, inner shareable, readable and writable, write-back.
    (PAGES + number * 0x1000) | 1 << 10 | 3 << 8 | 3 << 6 | 0xf << 2 | 3
}

/// Two CPUs with one guest: its first four pages are mapped.
fn guest() -> Replay {
    let granule = Granule::K4;
    let architecture = Architecture {
        guest: Some(Regime::Arm64Stage1 { granule, wide: false }),
        ..Architecture::arm64(Regime::Arm64Stage2 {
            granule,
            input_bits: 40,
            wide: false,
            forced_write_back: false,
        })
    };
    let mut replay = Replay::new(architecture, 2, Memory::new(16, 12, FIRST));
    for frame in [ROOT, ROOT + 0x1000, MIDDLE, LAST] {
        replay.taken(0, frame);
        for word in (frame..frame + 0x1000).step_by(8) {
            replay.store(0, word, 0, Made::Plain);
        }
    }
    replay.executed(0, DSB_ISHST, None);
    for cpu in 0..2 {
        load(&mut replay, cpu, VTTBR);
    }
    replay.store(0, ROOT, MIDDLE | 3, Made::Release);
    replay.store(0, MIDDLE, LAST | 3, Made::Release);
    for number in 0..4 {
        replay.store(0, LAST + number * 8, page(number), Made::Plain);
    }
    replay.executed(0, DSB_ISHST, None);
    assert_eq!(replay.findings(), []);
    replay
}

/// A CPU's step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Store(u64, u64),
    Do(u32, u64),
    Load(usize, u64),
    Look(usize),
    Touch(u64),
    Give(u64),
    Return,
}
use Step::*;

fn run(steps: &[Step]) -> Vec<Finding> {
    let mut replay = guest();
    for &step in steps {
        match step {
            Store(at, value) => replay.store(0, at, value, Made::Plain),
            Do(instruction, operand) => replay.executed(0, instruction, Some(operand)),
            Load(cpu, vttbr) => load(&mut replay, cpu, vttbr),
            Look(of) => replay.looked(0, of, 0),
            Touch(page) => replay.touched(0, page),
            Give(frame) => replay.given(0, frame),
            Return => replay.returned(0),
        }
    }
    replay.findings().to_vec()
}

/// The rule that is broken first.
fn rule(steps: &[Step]) -> Option<Rule> {
    run(steps).first().map(|finding| finding.rule)
}

/// With one step replaced.
fn with(steps: &[Step], from: Step, to: &[Step]) -> Vec<Step> {
    let at = steps.iter().position(|&step| step == from).expect("a step");
    [&steps[..at], to, &steps[at + 1..]].concat()
}

/// A page is taken away, copied, and the guest goes on.
const EVICT: [Step; 8] = [
    Store(LAST + 8, 0),
    Do(DSB_ISHST, 0),
    Do(IPAS2LE1IS, 1),
    Do(DSB_ISH, 0),
    Do(VMALLE1IS, 0),
    Do(DSB_ISH, 1), // another than the first
    Touch(PAGES + 0x1000),
    Return,
];

#[test]
fn a_page_is_used_when_it_is_forgotten() {
    assert_eq!(run(&EVICT), []);
    for left_out in [DSB_ISHST, IPAS2LE1IS, VMALLE1IS] {
        let operand = u64::from(left_out == IPAS2LE1IS);
        let steps = with(&EVICT, Do(left_out, operand), &[]);
        assert_eq!(rule(&steps), Some(Rule::Invalidation), "{left_out:#x}");
    }
    for last in 0..2 {
        let steps = with(&EVICT, Do(DSB_ISH, last), &[]);
        assert_eq!(rule(&steps), Some(Rule::Invalidation));
    }
    // Another page; and nothing else relies on it before the guest does.
    let other = with(&EVICT, Do(IPAS2LE1IS, 1), &[Do(IPAS2LE1IS, 2)]);
    assert_eq!(rule(&other), Some(Rule::Invalidation));
    let unused = with(&other, Touch(PAGES + 0x1000), &[]);
    assert_eq!(rule(&unused), Some(Rule::NeverInvalidated));
    // Touched before.
    let [store, rest @ ..] = EVICT;
    let early = [&[store, Touch(PAGES + 0x1000)][..], &rest].concat();
    assert_eq!(rule(&early), Some(Rule::Invalidation));
    assert_eq!(rule(&[&[Touch(PAGES)][..], &EVICT].concat()), None);
}

#[test]
fn what_is_combined_goes_last() {
    let (ipa, combined) = (Do(IPAS2LE1IS, 1), Do(VMALLE1IS, 0));
    let steps = with(&EVICT, ipa, &[combined]);
    let steps = with(&steps, combined, &[Do(0, 7)]);
    let steps = with(&steps, combined, &[ipa]);
    let steps = with(&steps, Do(0, 7), &[combined]);
    assert_eq!(rule(&steps), Some(Rule::Invalidation));
    // All in one, in no order.
    let one = with(&EVICT, ipa, &[Do(VMALLS12E1IS, 0)]);
    assert_eq!(rule(&with(&one, combined, &[])), None);
}

#[test]
fn each_cpu_is_told_by_its_identifier() {
    let local = with(&EVICT, Do(IPAS2LE1IS, 1), &[Do(IPAS2E1, 1)]);
    let local = with(&local, Do(VMALLE1IS, 0), &[Do(VMALLE1, 0)]);
    assert_eq!(rule(&local), Some(Rule::Invalidation));
    let near = with(&EVICT, Do(DSB_ISH, 1), &[Do(DSB_NSH, 0)]);
    assert_eq!(rule(&near), Some(Rule::Invalidation));
    let other = [&[Load(1, VTTBR + (1 << 48))][..], &EVICT].concat();
    assert_eq!(rule(&other), Some(Rule::IdentifierReused));
    assert_eq!(rule(&[&[Load(1, VTTBR)][..], &EVICT].concat()), None);
}

#[test]
fn an_identifier_is_given_again_when_it_is_forgotten() {
    let two = || {
        let mut replay = guest();
        for frame in [OTHER, OTHER + 0x1000] {
            replay.taken(0, frame);
            (frame..frame + 0x1000)
                .step_by(8)
                .for_each(|word| replay.store(0, word, 0, Made::Plain));
        }
        replay.executed(0, DSB_ISHST, None);
        replay
    };
    // Another has it loaded; and it is not, but was.
    let mut replay = two();
    load(&mut replay, 0, under(1, OTHER));
    assert_eq!(first(&replay), Some(Rule::IdentifierReused));
    let mut replay = two();
    for cpu in 0..2 {
        load(&mut replay, cpu, under(2, OTHER));
    }
    assert_eq!(first(&replay), None);
    load(&mut replay, 0, under(1, OTHER + 0x1000));
    assert_eq!(first(&replay), Some(Rule::IdentifierReused));
    // It has forgotten all, and the other CPU not yet.
    let mut replay = two();
    for cpu in 0..2 {
        load(&mut replay, cpu, under(2, OTHER));
    }
    replay.executed(0, ALLE1, None);
    replay.executed(0, DSB_NSH, None);
    load(&mut replay, 0, under(1, OTHER));
    assert_eq!(first(&replay), Some(Rule::IdentifierReused), "CPU 1 has it as 2");
    let mut replay = two();
    for cpu in 0..2 {
        load(&mut replay, cpu, under(2, OTHER));
        replay.executed(cpu, ALLE1, None);
        replay.executed(cpu, DSB_NSH, None);
    }
    // Of the first guest no CPU remembers anything: what is taken away need not be forgotten.
    replay.store(0, LAST, 0, Made::Plain);
    replay.touched(0, PAGES);
    replay.returned(0);
    load(&mut replay, 0, under(1, ROOT));
    assert_eq!(replay.findings(), []);
    // Without a barrier nothing is forgotten.
    let mut replay = two();
    for cpu in 0..2 {
        load(&mut replay, cpu, under(2, OTHER));
        replay.executed(cpu, ALLE1, None);
    }
    replay.store(0, LAST, 0, Made::Plain);
    replay.returned(0);
    assert_eq!(first(&replay), Some(Rule::NeverInvalidated));
}

/// Two guests, and a root in which nothing is. The first has identifier 1 on both CPUs, the second
/// 2 on the first.
fn two_guests() -> Replay {
    let mut replay = guest();
    for frame in [OTHER, OTHER + 0x1000, EMPTY, EMPTY + 0x1000] {
        replay.taken(0, frame);
        (frame..frame + 0x1000).step_by(8).for_each(|word| replay.store(0, word, 0, Made::Plain));
    }
    replay.executed(0, DSB_ISHST, None);
    replay.empty(0, EMPTY);
    load(&mut replay, 0, EMPTY);
    load(&mut replay, 0, under(2, OTHER));
    assert_eq!(replay.findings(), []);
    replay
}

const OTHER: u64 = FIRST + 0x4000;
const EMPTY: u64 = FIRST + 0x6000;
const ALLE1: u32 = 0xd50c_879f;

const fn under(id: u64, root: u64) -> u64 {
    id << 48 | root
}

fn first(replay: &Replay) -> Option<Rule> {
    replay.findings().first().map(|finding| finding.rule)
}

/// The first guest, which is not loaded here, has a page taken away, with this in VTTBR_EL2.
fn evict_under(replay: &mut Replay, vttbr: u64) {
    replay.store(0, LAST + 8, 0, Made::Plain);
    replay.executed(0, DSB_ISHST, None);
    load(replay, 0, vttbr);
    replay.executed(0, IPAS2LE1IS, Some(1));
    replay.executed(0, DSB_ISH, None);
    replay.executed(0, VMALLE1IS, None);
    load(replay, 0, under(2, OTHER));
    replay.executed(0, DSB_ISH, None);
    replay.touched(0, PAGES + 0x1000);
    replay.returned(0);
}

#[test]
fn a_guest_that_is_not_loaded_is_flushed_under_its_identifier() {
    let mut replay = two_guests();
    evict_under(&mut replay, under(1, EMPTY));
    assert_eq!(replay.findings(), []);
    // Under that of the guest that is loaded, or none.
    for id in [0, 2] {
        let mut replay = two_guests();
        evict_under(&mut replay, under(id, EMPTY));
        assert_eq!(first(&replay), Some(Rule::Invalidation), "{id}");
    }
    // With its own root, while the identifier is still its own; and when it is another's.
    let mut replay = two_guests();
    evict_under(&mut replay, under(1, ROOT));
    assert_eq!(replay.findings(), []);
    let mut replay = two_guests();
    evict_under(&mut replay, under(2, ROOT));
    assert_eq!(first(&replay), Some(Rule::IdentifierReused));
}

#[test]
fn a_root_is_in_use_until_the_context_is_synchronised() {
    // The first guest is not loaded here, and flushed under its identifier.
    let flush = |synchronised: bool| {
        let mut replay = two_guests();
        replay.store(0, LAST + 8, 0, Made::Plain);
        replay.executed(0, DSB_ISHST, None);
        replay.load_root(0, under(1, EMPTY));
        if synchronised {
            replay.executed(0, ISB, None);
        }
        replay.executed(0, VMALLS12E1IS, None);
        replay.executed(0, DSB_ISH, None);
        first(&replay)
    };
    assert_eq!(flush(true), None);
    assert_eq!(flush(false), Some(Rule::Invalidation));
    // Another CPU has left the first guest, all forget it, its identifier is given again. Without
    // an ISB it may still be in use there. The return to a guest is as good.
    let give = |after: fn(&mut Replay)| {
        let mut replay = two_guests();
        replay.load_root(1, EMPTY);
        after(&mut replay);
        for cpu in 0..2 {
            replay.executed(cpu, ALLE1, None);
            replay.executed(cpu, DSB_NSH, None);
        }
        load(&mut replay, 0, EMPTY);
        load(&mut replay, 0, under(1, OTHER));
        first(&replay)
    };
    assert_eq!(give(|replay| replay.executed(1, ISB, None)), None);
    assert_eq!(give(|replay| replay.returned(1)), None);
    assert_eq!(give(|_| ()), Some(Rule::IdentifierReused));
    // The root that was loaded before under the same identifier is no matter.
    let mut replay = guest();
    replay.load_root(0, VTTBR);
    replay.executed(0, VMALLS12E1IS, None);
    assert_eq!(replay.findings(), []);
}

#[test]
fn a_root_that_is_empty_stays_so() {
    let mut replay = two_guests();
    load(&mut replay, 0, under(1, EMPTY));
    load(&mut replay, 0, under(2, EMPTY));
    load(&mut replay, 0, under(2, OTHER));
    assert_eq!(replay.findings(), []);
    replay.store(0, EMPTY + 0x1008, MIDDLE | 3, Made::Release);
    assert_eq!(first(&replay), Some(Rule::IdentifierReused));
    let mut replay = two_guests();
    replay.empty(0, ROOT);
    assert_eq!(first(&replay), Some(Rule::IdentifierReused), "it is a guest's");
    // What is not known to be empty is a guest's root like any other.
    let mut replay = guest();
    load(&mut replay, 0, under(1, EMPTY));
    assert_eq!(first(&replay), Some(Rule::IdentifierReused));
}

#[test]
fn an_identifier_of_before_is_behind_a_flush() {
    // CPU 0 has forgotten, and gives the identifier of the first guest, which no CPU has loaded, to
    // the second.
    let rolled_over = || {
        let mut replay = two_guests();
        load(&mut replay, 0, EMPTY);
        load(&mut replay, 1, EMPTY);
        replay.executed(0, ALLE1, None);
        replay.executed(0, DSB_NSH, None);
        load(&mut replay, 0, under(1, OTHER));
        // The first guest is changed. CPU 1 may remember it under 1 still, and does not use that:
        // nothing has to be told.
        replay.store(0, LAST, 0, Made::Plain);
        replay.executed(0, DSB_ISHST, None);
        replay.touched(0, PAGES);
        replay.returned(0);
        assert_eq!(replay.findings(), []);
        replay
    };
    // It gets another identifier, and has the first again behind another flush.
    let mut replay = rolled_over();
    load(&mut replay, 1, under(3, ROOT));
    load(&mut replay, 1, EMPTY);
    load(&mut replay, 0, EMPTY);
    replay.executed(1, ALLE1, None);
    replay.executed(1, DSB_NSH, None);
    load(&mut replay, 1, under(1, ROOT));
    assert_eq!(replay.findings(), []);
    // Without it CPU 1 finds what was changed since.
    let mut replay = rolled_over();
    load(&mut replay, 0, EMPTY);
    load(&mut replay, 1, under(1, ROOT));
    assert_eq!(first(&replay), Some(Rule::IdentifierReused));
    // Neither does it have to be another's meanwhile.
    let mut replay = two_guests();
    load(&mut replay, 1, under(3, ROOT));
    load(&mut replay, 1, under(1, ROOT));
    assert_eq!(first(&replay), Some(Rule::IdentifierReused));
    // What is not published is owed, whatever it is called.
    let mut replay = rolled_over();
    replay.store(0, LAST + 8, 0, Made::Plain);
    replay.returned(0);
    assert_eq!(first(&replay), Some(Rule::NeverInvalidated));
}

/// A table of pages is detached, and given back.
const CUT: [Step; 9] = [
    Store(MIDDLE, 0),
    Do(DSB_ISHST, 0),
    Do(RIPAS2E1IS, 1 << 46 | 1 << 44 | 7 << 39),
    Do(DSB_ISH, 0),
    Do(VMALLE1IS, 0),
    Do(DSB_ISH, 1),
    Look(0),
    Look(1),
    Give(LAST),
];

#[test]
fn a_table_is_given_back_when_it_is_out_of_reach() {
    assert_eq!(run(&CUT), []);
    let [.., give] = CUT;
    let range = CUT[2];
    for wrong in [
        with(&CUT, range, &[Do(IPAS2LE1IS, 0)]),
        // One page of 512, and half of them.
        with(&CUT, range, &[Do(IPAS2E1IS, 0)]),
        with(&CUT, range, &[Do(RIPAS2E1IS, 1 << 46 | 1 << 44 | 3 << 39)]),
        with(&CUT, Look(1), &[]),
        with(&CUT, Do(DSB_ISH, 1), &[]),
        [&[CUT[0], give][..], &CUT[1..]].concat(),
        vec![give],
    ] {
        assert_eq!(rule(&wrong), Some(Rule::FreedEarly), "{wrong:?}");
    }
    // Looked at before it was detached.
    let early = with(&CUT, Look(1), &[]);
    let early = [&[Look(1)][..], &early].concat();
    assert_eq!(rule(&early), Some(Rule::FreedEarly));
    // The same in two, which adjoin; and what a page of it led to is used too early.
    let half = 1 << 46 | 1 << 44 | 3 << 39;
    let halves = [Do(RIPAS2E1IS, half), Do(RIPAS2E1IS, half | 256)];
    assert_eq!(rule(&with(&CUT, range, &halves)), None);
    let used = [&[CUT[0], Touch(PAGES)][..], &CUT[1..]].concat();
    assert_eq!(rule(&used), Some(Rule::Invalidation));
}

#[test]
fn a_walk_that_began_after_the_cut_is_not_waited_for() {
    let mut replay = guest();
    replay.announced(1, 7);
    for step in &CUT[..6] {
        match *step {
            Store(at, value) => replay.store(0, at, value, Made::Plain),
            Do(instruction, operand) => replay.executed(0, instruction, Some(operand)),
            _ => {}
        }
    }
    replay.looked(0, 0, 0);
    let late = |replay: &mut Replay| {
        replay.looked(0, 1, 7);
        replay.passed(0, 1)
    };
    let before = late(&mut replay);
    replay.announced(1, 0);
    replay.announced(1, 8);
    assert!(late(&mut replay) > before);
    replay.given(0, LAST);
    assert_eq!(replay.findings(), []);
}

#[test]
fn breaks_and_links_are_judged_as_on_the_machine() {
    // Another page in the place of one, at once.
    let other = [Store(LAST, page(9))];
    assert_eq!(rule(&other), Some(Rule::BreakBeforeMake));
    // A table whose entries were not written.
    let mut replay = guest();
    replay.taken(0, LAST + 0x1000);
    replay.store(0, MIDDLE + 8, (LAST + 0x1000) | 3, Made::Release);
    assert_eq!(replay.findings()[0].rule, Rule::LinkedEarly);
    // What is in the end.
    let mut replay = guest();
    replay.left(LAST, page(0));
    assert_eq!(replay.findings(), []);
    replay.left(LAST, page(1));
    assert_eq!(replay.findings()[0].rule, Rule::Program);
}

#[test]
fn an_operand_has_to_be_known() {
    let mut replay = guest();
    replay.executed(0, IPAS2LE1IS, None);
    assert_eq!(replay.findings()[0].rule, Rule::Program);
    assert_eq!(run(&[Do(VMALLE1IS, 0), Do(0xd503_201f, 0)]), []);
}
