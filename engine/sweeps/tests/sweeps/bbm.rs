//! Break-before-make against a second table, written as data from the words of the manuals, over
//! every pair of states.
//!
//! A row says when the manual asks for something and for what. What a change requires is the
//! strictest row that applies to it. The engine may ask for more only where an [`Excess`] says so
//! and why; less it may ask nowhere, but for the one [`LENIENT`] row. Each row and each excess is
//! shown to decide something, so that none can rot.

use crate::{common, for_each_format};

use common::Judged;
use tablewright::bbm::{Contents, Rule, State, Transition, transition};
use tablewright::{Attrs, Caps, Level, Memory, Pa, Perms, Shareability, format::*};

/// One change of one entry, and what is known about it.
#[derive(Clone, Copy, Debug)]
struct Case {
    old: State,
    new: State,
    level: Level,
    bbm: u8,
    contents: Contents,
}

impl Case {
    fn leaves(&self) -> Option<(Leaf, Leaf)> {
        Some((leaf(&self.old)?, leaf(&self.new)?))
    }

    fn any_leaf(&self, is: impl Fn(Leaf) -> bool) -> bool {
        leaf(&self.old).is_some_and(&is) || leaf(&self.new).is_some_and(&is)
    }

    /// The size of what is cached changes between a block and a table.
    fn size_changes(&self) -> bool {
        leaf(&self.old).is_some() && is_table(&self.new)
            || is_table(&self.old) && leaf(&self.new).is_some()
    }

    fn moves(&self) -> bool {
        self.leaves().is_some_and(|(old, new)| old.frame != new.frame)
    }
}

#[derive(Clone, Copy)]
struct Leaf {
    frame: Pa,
    attrs: Attrs,
    contiguous: bool,
}

fn leaf(state: &State) -> Option<Leaf> {
    match *state {
        State::Leaf { frame, attrs, contiguous } => Some(Leaf { frame, attrs, contiguous }),
        _ => None,
    }
}

fn is_table(state: &State) -> bool {
    matches!(state, State::Table { .. })
}

fn writable(leaf: Leaf) -> bool {
    leaf.attrs.perms.intersects(Perms::ANY_WRITE)
}

/// A leaf of a run whose own access flag is clear.
fn hidden_member(state: &State) -> bool {
    leaf(state).is_some_and(|leaf| leaf.contiguous && !leaf.attrs.accessed)
}

/// Whether a TLB may hold what the entry says. D8.5.1: an entry whose access flag is clear is not
/// held. D8.7.1.1 R_JQQTC: a look-up in a contiguous region may give what any one member says, so
/// that a member is held when another member has the flag, and nothing is known of the others.
fn held(state: &State) -> bool {
    match state {
        State::Absent => false,
        State::Table { .. } => true,
        State::Leaf { attrs, contiguous, .. } => attrs.accessed || *contiguous,
    }
}

fn both_held(case: &Case) -> bool {
    held(&case.old) && held(&case.new)
}

/// The demand of the manual, and its condition.
struct Row {
    verdict: Transition,
    source: &'static str,
    words: &'static str,
    applies: fn(&Case) -> bool,
}

const ARM: &[Row] = &[
    Row {
        verdict: Transition::Break,
        source: "D8.17 R_WHZWS",
        words: "the memory type changes",
        applies: |case| {
            both_held(case)
                && case.leaves().is_some_and(|(old, new)| old.attrs.memory != new.attrs.memory)
        },
    },
    Row {
        verdict: Transition::Break,
        source: "D8.17 R_WHZWS",
        words: "the shareability changes",
        applies: |case| {
            both_held(case)
                && case
                    .leaves()
                    .is_some_and(|(old, new)| old.attrs.shareability != new.attrs.shareability)
        },
    },
    Row {
        verdict: Transition::Break,
        source: "D8.17 R_WHZWS",
        words: "the output address changes, and the old or the new mapping is writable",
        applies: |case| both_held(case) && case.moves() && case.any_leaf(writable),
    },
    Row {
        verdict: Transition::Break,
        source: "D8.17 R_WHZWS",
        words: "the output address changes, and the contents differ",
        applies: |case| both_held(case) && case.moves() && case.contents == Contents::Different,
    },
    Row {
        verdict: Transition::Break,
        source: "D8.17 R_WHZWS, FEAT_BBM",
        words: "the size of a block changes; level 1 has the nT bit for it, level 2 needs nothing",
        applies: |case| both_held(case) && case.size_changes() && case.bbm < 2,
    },
    Row {
        verdict: Transition::Break,
        source: "D8.17 R_WHZWS",
        words: "a block and the pages below a table translate differently: any of the above may \
                hold",
        applies: |case| {
            both_held(case) && case.size_changes() && case.contents == Contents::Different
        },
    },
    Row {
        verdict: Transition::Break,
        source: "D8.17 R_WHZWS",
        words: "another table, below which addresses translate differently: any of the above may \
                hold",
        applies: |case| other_table(case) && case.contents == Contents::Different,
    },
    Row {
        verdict: Transition::Break,
        source: "D8.17 R_WHZWS, FEAT_BBM",
        words: "another table, below which addresses translate alike at sizes that may differ",
        applies: |case| other_table(case) && case.bbm < 2,
    },
    Row {
        verdict: Transition::Break,
        source: "D8.7.1.1 R_NGLXZ, FEAT_BBM",
        words: "the contiguous bit changes: without levels 1 and 2 a look-up may give what no \
                entry says",
        applies: |case| {
            both_held(case)
                && case.bbm < 1
                && case.leaves().is_some_and(|(old, new)| old.contiguous != new.contiguous)
        },
    },
    Row {
        verdict: Transition::Break,
        source: "D8.17 R_WHZWS",
        words: "a global entry is created where non-global ones may be held that overlap it",
        applies: |case| {
            both_held(case)
                && case.leaves().is_some_and(|(old, new)| new.attrs.global && !old.attrs.global)
        },
    },
    Row {
        verdict: Transition::Invalidate,
        source: "D8.17",
        words: "what may be held goes away: this is the break",
        applies: |case| held(&case.old) && !held(&case.new) && case.old != case.new,
    },
    Row {
        verdict: Transition::Invalidate,
        source: "D8.17",
        words: "what may be held changes where no break is needed: until it is invalidated, either \
                holds",
        applies: |case| held(&case.old) && seen_by_a_walker(case),
    },
];

fn other_table(case: &Case) -> bool {
    match (case.old, case.new) {
        (State::Table { frame: old, .. }, State::Table { frame: new, .. }) => old != new,
        _ => false,
    }
}

/// Whether the change is one of bits that the hardware looks at. Of a page that is not writable it
/// knows no dirty state: the format keeps it in a bit that is left to software (D8.3.1, bits
/// 58:55).
fn seen_by_a_walker(case: &Case) -> bool {
    let plain = |state: State| match state {
        State::Leaf { frame, mut attrs, contiguous } => {
            if !attrs.perms.intersects(Perms::ANY_WRITE) {
                attrs.dirty = false;
            }
            State::Leaf { frame, attrs, contiguous }
        }
        other => other,
    };
    plain(case.old) != plain(case.new)
}

const X86: &[Row] = &[
    Row {
        verdict: Transition::Break,
        source: "SDM vol. 3A 5.10.2.4",
        words: "for some linear address both the page size changes and the frame or an attribute",
        applies: |case| case.size_changes() && case.contents == Contents::Different,
    },
    Row {
        verdict: Transition::Invalidate,
        source: "SDM vol. 3A 5.10.4.2",
        words: "a paging-structure entry changes that a processor may have cached: present, and \
                accessed (5.10.2.3)",
        applies: |case| {
            let cached = match case.old {
                State::Absent => false,
                State::Table { .. } => true,
                State::Leaf { attrs, .. } => attrs.accessed,
            };
            cached && case.old != case.new && !sets_bits_only(case)
        },
    },
];

/// Only the accessed or the dirty flag is set: a cached translation without it has the processor
/// look again (SDM vol. 3A 5.8), and then it finds the flag.
fn sets_bits_only(case: &Case) -> bool {
    case.leaves().is_some_and(|(old, new)| {
        let raised = Attrs {
            accessed: old.attrs.accessed || new.attrs.accessed,
            dirty: old.attrs.dirty || new.attrs.dirty,
            ..old.attrs
        };
        (old.frame, old.contiguous, raised) == (new.frame, new.contiguous, new.attrs)
    })
}

/// Nothing changes but the accessed and the dirty flag.
fn flags_only(old: Attrs, new: Attrs) -> bool {
    let (accessed, dirty) = (new.accessed, new.dirty);
    let flagged = Attrs { accessed, dirty, ..old };
    flagged == new
}

/// A place where the engine asks for more than the manual, and why that is right for it.
struct Excess {
    verdict: Transition,
    reason: &'static str,
    applies: fn(&Case) -> bool,
}

/// A leaf, and its access flag is clear.
fn looks_unused(state: &State) -> bool {
    leaf(state).is_some_and(|leaf| !leaf.attrs.accessed)
}

const UNUSED: &str = "an entry whose access flag is clear is not held, but it may have been set \
                      until just before, and what was made of it then is held still; or it may be \
                      set before the invalidation is complete";

const ARM_EXCESS: &[Excess] = &[
    Excess {
        verdict: Transition::Break,
        reason: UNUSED,
        applies: |case| looks_unused(&case.old) || looks_unused(&case.new),
    },
    Excess {
        verdict: Transition::Invalidate,
        reason: UNUSED,
        applies: |case| looks_unused(&case.old),
    },
    Excess {
        verdict: Transition::Break,
        reason: "a member of a run changes in place below level 1. R_JQQTC allows it for \
                 permissions and flags, as long as the contiguous bit stays consistent; the engine \
                 makes use of it for flags, in which members differ by themselves",
        applies: |case| {
            case.bbm < 1
                && case.leaves().is_some_and(|(old, new)| {
                    old.contiguous && new.contiguous && !flags_only(old.attrs, new.attrs)
                })
        },
    },
    Excess {
        verdict: Transition::Break,
        reason: "another table that translates alike: the function does not see what is below it",
        applies: other_table,
    },
    Excess {
        verdict: Transition::Break,
        reason: "at the level of pages no table stands, whatever the hardware can do",
        applies: |case| case.size_changes() && case.level == Level::PAGE,
    },
    Excess {
        verdict: Transition::Invalidate,
        reason: "the dirty state of a page that is not writable is a software bit, which the \
                 function does not know",
        applies: |case| {
            case.leaves()
                .is_some_and(|(old, new)| old.attrs.dirty != new.attrs.dirty && !writable(old))
        },
    },
];

const X86_EXCESS: &[Excess] = &[
    Excess {
        verdict: Transition::Invalidate,
        reason: "a leaf that was not accessed is not cached, but the processor may set the flag at \
                 any time",
        applies: |case| leaf(&case.old).is_some_and(|old| !old.attrs.accessed),
    },
    Excess {
        verdict: Transition::Invalidate,
        reason: "setting a flag needs no invalidation, but the function does not tell it from \
                 clearing one",
        applies: sets_bits_only,
    },
];

/// SDM vol. 3A 13.12.4 (Programming the PAT) removes a cacheable mapping, flushes the TLBs, and
/// only then makes one of another type, so that no processor ever has both. The engine changes it
/// in place and invalidates: kernels do, and the caches have to be flushed by the caller in either
/// order. The function answers as it does knowingly; a caller that wants the sequence of the manual
/// unmaps first.
const LENIENT: &str = "x86: the memory type of a mapped page changes in place";

fn states(memory: &[Memory], perms: &[Perms], flags: &[bool]) -> Vec<State> {
    let mut states = vec![State::Absent];
    for frame in [Pa::new(0x4000_0000), Pa::new(0x8000_0000)] {
        for denied in [Perms::empty(), Perms::ANY_EXEC] {
            states.push(State::Table { frame, denied });
        }
        for &memory in memory {
            for shareability in [Shareability::Non, Shareability::Outer, Shareability::Inner] {
                for &perms in perms {
                    for &global in flags {
                        for (accessed, dirty) in all2() {
                            for contiguous in [false, true] {
                                let attrs = Attrs {
                                    perms,
                                    memory,
                                    shareability,
                                    global,
                                    accessed,
                                    dirty,
                                    software: 0,
                                    native: 0,
                                };
                                states.push(State::Leaf { frame, attrs, contiguous });
                            }
                        }
                    }
                }
            }
        }
    }
    states
}

fn all2() -> impl Iterator<Item = (bool, bool)> {
    [(false, false), (false, true), (true, false), (true, true)].into_iter()
}

const READ: Perms = Perms::READ;
const USER: Perms = Perms::READ.union(Perms::USER_READ);
const ALL_PERMS: [Perms; 5] = [
    READ,
    READ.union(Perms::WRITE),
    READ.union(Perms::EXEC),
    USER.union(Perms::USER_EXEC),
    USER.union(Perms::ANY_WRITE),
];
const ALL_MEMORY: [Memory; 6] = [
    Memory::Normal,
    Memory::WriteThrough,
    Memory::NonCacheable,
    Memory::Device,
    Memory::DeviceStrict,
    Memory::Tagged,
];

/// Every case: all permissions and flags with three memory types, all memory types with fewer of
/// the rest.
fn each_case(mut visit: impl FnMut(&Case)) {
    let deep =
        states(&[Memory::Normal, Memory::NonCacheable, Memory::Device], &ALL_PERMS, &[false, true]);
    let broad = states(&ALL_MEMORY, &ALL_PERMS[..2], &[false]);
    for states in [deep, broad] {
        for &old in &states {
            for &new in &states {
                for level in [Level::PAGE, Level::new(1)] {
                    for bbm in 0..4 {
                        for contents in [Contents::Same, Contents::Different] {
                            visit(&Case { old, new, level, bbm, contents });
                        }
                    }
                }
            }
        }
    }
}

fn required(rows: &[Row], case: &Case, used: &mut [u64]) -> Transition {
    let mut strictest = Transition::Store;
    for row in rows {
        if row.verdict > strictest && (row.applies)(case) {
            strictest = row.verdict;
        }
    }
    for (row, used) in rows.iter().zip(used) {
        // Counts where it decides alone among the rows of its kind: those are enough to see it
        // matter.
        *used += u64::from(*used == 0 && row.verdict == strictest && (row.applies)(case));
    }
    strictest
}

fn answer(rule: Rule, case: &Case) -> Transition {
    let caps = Caps { bbm: case.bbm, ..Caps::CONSERVATIVE };
    transition(rule, &case.old, &case.new, case.level, &caps, case.contents)
}

/// Compares the engine with the rows over all cases that `concerns` accepts.
fn compare(
    rule: Rule,
    rows: &[Row],
    excesses: &[Excess],
    concerns: impl Fn(&Case) -> bool,
    complete: bool,
) {
    let mut used = vec![0; rows.len()];
    let mut exceeded = vec![0; excesses.len()];
    let (mut wrong, mut total) = (Vec::new(), 0u64);
    each_case(|case| {
        if !concerns(case) {
            return;
        }
        total += 1;
        let (required, answer) = (required(rows, case, &mut used), answer(rule, case));
        let excused = answer > required
            && excesses.iter().zip(&mut exceeded).any(|(excess, count)| {
                let applies = excess.verdict == answer && (excess.applies)(case);
                *count += u64::from(applies);
                applies
            });
        if answer != required && !excused && wrong.len() < 5 {
            wrong.push(format!("{case:?}: required {required:?}, answered {answer:?}"));
        }
    });
    assert!(total > 0);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    if complete {
        for (row, used) in rows.iter().zip(used) {
            assert!(used > 0, "no case for: {} ({})", row.words, row.source);
        }
        for (excess, count) in excesses.iter().zip(exceeded) {
            assert!(count > 0, "not exceeded any more: {}", excess.reason);
        }
    }
}

#[test]
fn arm_asks_for_what_the_manual_asks_for() {
    let plain = |case: &Case| !hidden_member(&case.old) && !hidden_member(&case.new);
    compare(Rule::ARM, ARM, ARM_EXCESS, plain, true);
}

/// R_JQQTC: a look-up in a run may give what any member says. The access flag of one member does
/// not keep the TLB from holding a translation of its address that was made from another member.
#[test]
fn arm_takes_a_member_of_a_run_for_held_though_its_own_access_flag_is_clear() {
    let hidden = |case: &Case| hidden_member(&case.old) || hidden_member(&case.new);
    compare(Rule::ARM, ARM, ARM_EXCESS, hidden, false);
}

#[test]
fn x86_asks_for_what_the_manual_asks_for() {
    compare(Rule::X86, X86, X86_EXCESS, |_| true, true);
}

#[test]
fn x86_changes_memory_types_in_place_knowingly() {
    let mut seen = 0;
    each_case(|case| {
        let changes = case.leaves().is_some_and(|(old, new)| {
            old.frame == new.frame && old.attrs.memory != new.attrs.memory
        });
        if changes {
            seen += 1;
            assert_eq!(answer(Rule::X86, case), Transition::Invalidate, "{LENIENT}");
        }
    });
    assert!(seen > 0);
}

/// Nothing but the level of FEAT_BBM.
#[test]
fn nothing_else_of_the_hardware_has_a_say() {
    let sample = states(&ALL_MEMORY[..2], &ALL_PERMS[..2], &[true]);
    let bare = Caps {
        hardware_access: false,
        hardware_dirty: false,
        invalid_entries_cached: true,
        invalidate_all_above: 0,
        ..Caps::CONSERVATIVE
    };
    for old in &sample {
        for new in &sample {
            for rule in [Rule::ARM, Rule::X86] {
                let ask =
                    |caps: Caps| transition(rule, old, new, Level::new(1), &caps, Contents::Same);
                assert_eq!(ask(Caps::CONSERVATIVE), ask(bare), "{old:?} {new:?}");
            }
        }
    }
}

#[test]
fn more_capable_hardware_never_asks_for_more() {
    each_case(|case| {
        if case.bbm > 0 {
            let weaker = Case { bbm: case.bbm - 1, ..*case };
            assert!(answer(Rule::ARM, case) <= answer(Rule::ARM, &weaker), "{case:?}");
            assert_eq!(answer(Rule::X86, case), answer(Rule::X86, &weaker), "{case:?}");
        }
    });
}

/// All attributes that some format can hold, with software bits.
fn some_attrs() -> Vec<Attrs> {
    let mut all = Vec::new();
    for memory in ALL_MEMORY {
        for shareability in [Shareability::Non, Shareability::Outer, Shareability::Inner] {
            for perms in ALL_PERMS {
                for (accessed, dirty) in all2() {
                    for global in [false, true] {
                        for software in [0, 5] {
                            all.push(Attrs {
                                perms,
                                memory,
                                shareability,
                                global,
                                accessed,
                                dirty,
                                software,
                                native: 0,
                            });
                        }
                    }
                }
            }
        }
    }
    all
}

fn says_what_a_descriptor_says<F: Judged>() {
    let page = 1u64 << F::PAGE_SHIFT;
    for height in 0..F::LEVELS {
        let level = Level::new(height);
        let frame = Pa::new(1 << F::shift(level));
        assert_eq!(State::of::<F>(0, level), State::Absent);
        if level != Level::PAGE {
            for deny in [Perms::empty(), Perms::EXEC, Perms::USER_EXEC, Perms::ANY_EXEC] {
                let table = F::table(Pa::new(5 * page), deny);
                let denied = F::denied(table);
                assert!((denied - deny).is_empty(), "more is denied than was asked for");
                let frame = Pa::new(5 * page);
                assert_eq!(State::of::<F>(table, level), State::Table { frame, denied });
                assert_eq!(State::of::<F>(F::suspend(table), level), State::Absent);
            }
        }
        if !F::is_leaf_level(level) {
            continue;
        }
        let mut marks = vec![0];
        if F::contiguous(level) > 0 {
            marks.push(F::CONTIGUOUS);
        }
        let mut held = 0;
        for attrs in some_attrs() {
            let Ok(bits) = F::encode(&attrs, level) else {
                continue;
            };
            held += 1;
            for &mark in &marks {
                let descriptor = bits | F::put_address(frame) | mark;
                let expected = State::Leaf {
                    frame,
                    attrs: Attrs { software: 0, ..attrs },
                    contiguous: mark != 0,
                };
                assert_eq!(State::of::<F>(descriptor, level), expected);
                assert_eq!(State::of::<F>(F::suspend(descriptor), level), State::Absent);
            }
        }
        assert!(held > 100, "{}: only {held} combinations", F::NAME);
    }
}

/// Bits that are left to software stand elsewhere in each format; here from the manuals: arm64
/// 58:56 (D8.3.1; bit 55 is the format's own), x86-64 11:9 (SDM vol. 3A 5.5.4), RISC-V 9:8 (PRIV
/// 10.3.1).
fn ignores_what_is_left_to_software<F: Judged>() {
    let bits = match F::RULE {
        Rule::ARM => 56..59,
        Rule::X86 => 9..12,
        _ => 8..10,
    };
    let level = Level::PAGE;
    // Clean, because the hardware ignores DBM (bit 51) where AP[2] allows the write already; for
    // the kernel, because it ignores PXN (bit 53) where the user can write.
    let attrs = Attrs { dirty: false, ..Attrs::KERNEL_DATA };
    let leaf = F::encode(&attrs, level).unwrap() | F::put_address(Pa::new(1 << 20));
    let old = State::of::<F>(leaf, level);
    let ask = |new: u64| {
        let new = State::of::<F>(new, level);
        transition(F::RULE, &old, &new, level, &Caps::CONSERVATIVE, Contents::Same)
    };
    for bit in bits {
        assert_eq!(ask(leaf ^ 1 << bit), Transition::Store, "bit {bit}");
    }
    // And no other bit of a leaf can change unnoticed: every one that is not reserved or ignored.
    let seen: Vec<u32> = match F::RULE {
        // Valid, AttrIndx, AP, AF, nG, an address bit, GP, DBM, Contiguous, PXN, UXN.
        Rule::ARM => vec![0, 3, 4, 6, 7, 10, 11, 20, 50, 51, 52, 53, 54],
        // P, R/W, U/S, PWT with PCD set below, A, D, PAT, G, an address bit, a key bit, XD.
        Rule::X86 => vec![0, 1, 2, 5, 6, 8, 20, 59, 62, 63],
        // V, R, W, X, U, G, A, D, a bit of the number, PBMT, N.
        _ => vec![0, 1, 2, 3, 4, 5, 6, 7, 20, 61, 62, 63],
    };
    for bit in seen {
        assert!(ask(leaf ^ 1 << bit) > Transition::Store, "{}: bit {bit}", F::NAME);
    }
}

for_each_format!(says_what_a_descriptor_says, ignores_what_is_left_to_software);

#[test]
fn each_format_names_the_rule_of_its_architecture() {
    assert_eq!(<Arm64K4 as tablewright::Format>::RULE, Rule::ARM);
    assert_eq!(<Arm64K64Wide as tablewright::Format>::RULE, Rule::ARM);
    assert_eq!(<X86_64<4> as tablewright::Format>::RULE, Rule::X86);
    assert_eq!(<X86_64<5> as tablewright::Format>::RULE, Rule::X86);
    let riscv = <tablewright::format::Sv39 as tablewright::Format>::RULE;
    assert!(!riscv.breaks && riscv.tags_invalid_entries && riscv.writes_when_dirty);
}
