//! Bugs, planted one at a time into programs that are right: each is caught, by the right rule,
//! within a number of seeds, and each time that the seed is run again.
//!
//! The list is also the answer to whether a rule can fire at all: each does, and is the first to do
//! so, for some bug.

mod baseline;
mod concurrent;
mod kernel;

use std::collections::BTreeSet;
use std::fmt;

use tablewright_machine::Rule::{self, *};
use tablewright_workloads::random::Bug::{self, *};
use tablewright_workloads::random::{Run, Workload, run_by_hand};
use tablewright_workloads::sequences::Sequence;

use self::Program::*;

/// Programs that use the engine, and those that write tables by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Sequences,
    Windows,
    Identifiers,
    Guests,
    Guest,
    Log,
    Shootdown,
    Identities,
    Baseline,
    Concurrent,
    Kernel,
}

impl Program {
    const ALL: [Self; 11] = [
        Sequences,
        Windows,
        Identifiers,
        Baseline,
        Concurrent,
        Guests,
        Guest,
        Log,
        Shootdown,
        Kernel,
        Identities,
    ];
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// Runs a program, with a bug in it or without.
fn run(program: Program, seed: u64, bug: Option<Bug>) -> Run {
    let workload = match program {
        Windows => Workload::Windows,
        Identifiers => Workload::Identifiers,
        Guests => Workload::Guests,
        Guest => Workload::Guest,
        Log => Workload::Log,
        Shootdown => Workload::Shootdown,
        Identities => Workload::Identities,
        Sequences => return Sequence::new(seed).observe(bug, None),
        Baseline => return run_by_hand::<baseline::Baseline>(3, 1, seed, bug),
        Concurrent => return run_by_hand::<concurrent::Concurrent>(4, 2, seed, bug),
        Kernel => return run_by_hand::<kernel::Kernel>(9, 2, seed, bug),
    };
    tablewright_workloads::random::run(workload, seed, bug, None)
}

/// Seeds that are tried.
const SEEDS: u64 = 20_000;

/// A bug, where it is planted, and the rules that it breaks. More than one where it depends on the
/// seed what is done next with what the bug has left behind.
const PLANTED: &[(Bug, Program, &[Rule])] = &[
    // The platform under the engine.
    (NoBarrier, Sequences, &[LinkedEarly]),
    (NoBarrierBeforeInvalidation, Identities, &[Invalidation]),
    (NoBarrierAfterMap, Identities, &[LinkedEarly]),
    (NoWait, Sequences, &[FreedEarly]),
    (NoWaitInFlush, Identities, &[FreedEarly]),
    (NoInvalidation, Sequences, &[FreedEarly]),
    (OnlyLocal, Sequences, &[FreedEarly, BreakBeforeMake]),
    (HintOfAnotherLevel, Sequences, &[Invalidation, FreedEarly]),
    (HintWhereThereIsNone, Sequences, &[Invalidation, BreakBeforeMake]),
    (TablesForgotten, Sequences, &[Invalidation, FreedEarly]),
    (RangeTooShort, Sequences, &[FreedEarly, BreakBeforeMake]),
    (OnlyFirstPage, Sequences, &[FreedEarly, BreakBeforeMake]),
    (AnotherIdentifier, Sequences, &[Invalidation, FreedEarly]),
    (FlushHoldsOne, Sequences, &[Invalidation, FreedEarly]),
    (SkipsInvalidation, Sequences, &[FreedEarly, BreakBeforeMake]),
    (BreakLevelTooHigh, Sequences, &[BreakBeforeMake]),
    (HardwareAccessUnknown, Sequences, &[FlagLost, BreakBeforeMake]),
    (HardwareDirtyUnknown, Sequences, &[FlagLost]),
    (LinkedByPlainStore, Sequences, &[LinkedEarly]),
    (NotZeroed, Sequences, &[LinkedEarly]),
    (ExchangeInTwoSteps, Sequences, &[FlagLost]),
    (HiddenStore, Sequences, &[StaleUse, FreedEarly, Program]),
    // The program around it.
    (FreedBeforeCompletion, Sequences, &[FreedEarly]),
    (FreedBeforeZap, Sequences, &[FreedEarly]),
    (FreedTwice, Sequences, &[FreedEarly]),
    (FreedWhileMapped, Sequences, &[FreedEarly, Program]),
    (GatherForgotten, Identities, &[FreedEarly, Program]),
    (LastGatherForgotten, Sequences, &[NeverInvalidated]),
    // Windows, and the linear map.
    (NoWaitInBreak, Windows, &[WindowStale, BreakBeforeMake]),
    (NoInvalidationInBreak, Windows, &[WindowStale, BreakBeforeMake]),
    (ReservedMemoryMapped, Windows, &[ForbiddenMemory]),
    (WholeBlocksMapped, Windows, &[ForbiddenMemory]),
    // Identifiers.
    (IdentifierNotInvalidated, Identifiers, &[IdentifierReused]),
    (WrongIdentifierInvalidated, Identifiers, &[FreedEarly]),
    (IdentifiersInvalidatedHere, Identifiers, &[FreedEarly]),
    (SameIdentifierTwice, Identifiers, &[IdentifierReused]),
    (UserPagesGlobal, Identifiers, &[Conflict, Program]),
    (IdentityOfBefore, Identities, &[Invalidation]),
    (LoadedAsBefore, Identities, &[IdentifierReused, Program]),
    (NothingForgottenAtSwitch, Identities, &[IdentifierReused]),
    (AnotherIdentifier, Identities, &[Invalidation]),
    (NoWait, Identities, &[FreedEarly, BreakBeforeMake]),
    // Stage 2, under a guest with a stage 1.
    (CombinedForgotten, Guests, &[Invalidation]),
    (CombinedFirst, Guests, &[Invalidation]),
    (CombinedInOneStep, Guests, &[Invalidation]),
    (CombinedAlone, Guests, &[Invalidation]),
    (BothOnlyLocal, Guests, &[Invalidation]),
    (AnotherIdentifier, Guests, &[Invalidation]),
    (NoInvalidation, Guests, &[FreedEarly, BreakBeforeMake]),
    (NoWait, Guests, &[FreedEarly, BreakBeforeMake]),
    // Faults of published crates, and others that are known.
    (LinkedBeforeZeroed, Baseline, &[LinkedEarly]),
    (NoBarrierBeforeTlbi, Baseline, &[Invalidation]),
    (AllOnlyLocal, Baseline, &[FreedEarly]),
    (TableFreedUnforgotten, Baseline, &[FreedEarly]),
    (TableFreedAfterLeaves, Baseline, &[Invalidation]),
    (ProtectedByStore, Baseline, &[FlagLost]),
    (SplitInOneStore, Baseline, &[BreakBeforeMake]),
    (FlushIsEmpty, Baseline, &[FreedEarly]),
    (TlbiIsLocal, Baseline, &[FreedEarly]),
    (InvalidatedBeforeStore, Baseline, &[FreedEarly]),
    (EmptyByFirstEntry, Baseline, &[NoProgress]),
    (MappedOverTable, Baseline, &[BreakBeforeMake]),
    (FreedTableLinkedAgain, Baseline, &[WalkAstray]),
    (PageWrittenAsBlock, Baseline, &[Reserved]),
    (PartOfRunUnmapped, Baseline, &[BrokenRun]),
    (HalfARun, Baseline, &[BrokenRun]),
    // A kernel's half that all roots share.
    (StrideOverPages, Kernel, &[Invalidation]),
    (FinalOnly, Kernel, &[Invalidation]),
    (GlobalBitMissing, Kernel, &[Invalidation]),
    (GlobalToldToHolders, Kernel, &[Invalidation]),
    (OtherAddressForgotten, Kernel, &[FreedEarly]),
    (OtherRootsForgotten, Kernel, &[Invalidation]),
    // Concurrent edits.
    (NotClaimed, Concurrent, &[BreakBeforeMake, NoProgress, Program]),
    (EntryLeftToOthersEarly, Concurrent, &[BreakBeforeMake]),
    (FrozenByStore, Concurrent, &[FlagLost, FreedEarly]),
    (PageFreedBeforeInvalidation, Concurrent, &[FreedEarly]),
    (TableFreedUnderOthers, Concurrent, &[FreedEarly]),
    (NotCleaned, Concurrent, &[CacheMaintenance]),
    (CodeNotCleaned, Concurrent, &[CacheMaintenance]),
    (CodeNotRefetched, Concurrent, &[CacheMaintenance]),
    // The log of what a guest writes.
    (MarkedBeforeWritable, Log, &[Program]),
    (MarkedAfterwards, Log, &[Program]),
    (RoomAskedAfterwards, Log, &[Program]),
    (DeviceUnmarked, Log, &[Program]),
    (DeviceMarkedBefore, Log, &[Program]),
    (FlagOfLeafIgnored, Log, &[Program]),
    (CopiedBeforeFlush, Log, &[Program]),
    (HarvestedAfterProtection, Log, &[Program]),
    (KeptAndNotProtected, Log, &[Program]),
    (ReleasedBeforeProtection, Log, &[Program]),
    (RingStartsMarked, Log, &[Program]),
    (StartNotZapped, Log, &[Program]),
    (StartNotAwaited, Log, &[Program]),
    (LogThrownAway, Log, &[Program]),
    (StartNotCleaned, Log, &[Program]),
    (CleanedBeforeHarvest, Log, &[Program]),
    (LastHarvestBeforeStop, Log, &[Program]),
    (StoppedInHandler, Log, &[Program]),
];

/// The seed at which a search begins. One bug is found at seed 11131: from 1 on, that takes 20 s.
fn first_tried(bug: Bug, program: Program) -> u64 {
    match (bug, program) {
        (HardwareDirtyUnknown, Sequences) => 11_000,
        _ => 1,
    }
}

/// The first seed that catches the bug, and what it says.
fn first_caught(bug: Bug, program: Program) -> Option<(u64, Run)> {
    (first_tried(bug, program)..=SEEDS)
        .map(|seed| (seed, run(program, seed, Some(bug))))
        .find(|(_, run)| !run.is_good())
}

#[test]
fn each_planted_bug_is_caught_by_the_right_rule() {
    let mut failures = Vec::new();
    let only = std::env::var("PLANTED").ok();
    let is_meant =
        |program: Program| only.as_deref().is_none_or(|only| only == program.to_string());
    for &(bug, program, rules) in PLANTED.iter().filter(|it| is_meant(it.1)) {
        let name = format!("{bug:?} in {program}");
        let Some((seed, caught)) = first_caught(bug, program) else {
            failures.push(format!("{name}: not caught within {SEEDS} seeds"));
            continue;
        };
        let Some(violation) = caught.violations.first() else {
            failures.push(format!("{name}: seed {seed}: {:?}", caught.outcome));
            continue;
        };
        println!("{name}: {} after {seed} seeds", violation.rule);
        if !rules.contains(&violation.rule) {
            failures.push(format!("{name}: another rule: {violation}"));
        }
        if violation.seed != seed || run(program, seed, Some(bug)) != caught {
            failures.push(format!("{name}: seed {seed} is not the same again"));
        }
        let right = run(program, seed, None);
        if !right.is_good() {
            let first = right.violations.first();
            failures.push(format!("{program} without a bug: {first:?}, {:?}", right.outcome));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Which rule comes first depends on the seed where several are broken, so all that a bug may break
/// are looked for.
#[test]
fn each_rule_is_the_first_that_some_bug_breaks() {
    let mut fired = BTreeSet::new();
    for &rule in Rule::ALL {
        if fired.contains(&rule) {
            continue;
        }
        for &(bug, program, rules) in PLANTED {
            if !rules.contains(&rule) {
                continue;
            }
            let found = (first_tried(bug, program)..=SEEDS).any(|seed| {
                let run = run(program, seed, Some(bug));
                run.violations.first().is_some_and(|first| first.rule == rule)
            });
            if found {
                fired.insert(rule);
                break;
            }
        }
    }
    let is_silent = |rule: &&Rule| !fired.contains(rule);
    let silent: Vec<_> = Rule::ALL.iter().filter(is_silent).collect();
    assert!(silent.is_empty(), "no bug breaks {silent:?}");
}

/// A slice: the example `seeds` runs as many as it is told.
#[test]
fn right_programs_break_no_rule_and_do_the_same_each_time() {
    for program in Program::ALL {
        for seed in 1..=75 {
            let first = run(program, seed, None);
            assert!(first.is_good(), "{program}: {first:?}");
            // In another order, and so on memory that has been used for something else.
            if seed % 4 == 0 {
                assert_eq!(run(program, seed, None), first, "{program}, seed {seed}");
            }
        }
    }
}

/// Seeds of right programs that broke a rule once, and what was wrong.
const STORIES: &[(Program, &[u64], &str)] = &[
    (
        Concurrent,
        &[68285, 69551, 82141, 92905],
        "a page that was unmapped while its table went left its flags to the next in its entry",
    ),
    (Guest, &[70752, 86167], "a leaf that was aged without a flush was taken for forgotten"),
    (
        Guest,
        &[46555],
        "a block was put over tables that slept as if walkers had found memory below them",
    ),
    (
        Log,
        &[9652, 29172, 88154],
        "a block was put back in place, and changed before every CPU had forgotten the table",
    ),
];

#[test]
fn seeds_with_a_story_break_no_rule() {
    for &(program, seeds, story) in STORIES {
        for &seed in seeds {
            let run = run(program, seed, None);
            assert!(run.is_good(), "{story}: {program}, seed {seed}: {run:?}");
        }
    }
}

#[test]
fn a_run_does_not_depend_on_the_thread() {
    for program in Program::ALL {
        let here: Vec<Run> = (1..=20).map(|seed| run(program, seed, None)).collect();
        let there = std::thread::spawn(move || {
            let mut runs: Vec<Run> = (1..=20).rev().map(|seed| run(program, seed, None)).collect();
            runs.reverse();
            runs
        });
        let there = there.join().expect("no panic");
        assert!(here == there, "{program}");
    }
}
