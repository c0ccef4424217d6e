//! Whether an execution has ended as a question asks.

use super::layout::Layout;
use super::program::*;
use crate::hardware::{Cause, Fault};

/// The final value of an instruction, or a word.
#[derive(Clone, Copy)]
pub(super) enum End {
    Nothing,
    Value(u64),
    Fault(Fault),
}

impl Outcome {
    /// Whether it holds, given the result of each instruction and the words in memory.
    pub(super) fn holds(
        &self,
        test: &Test,
        layout: &Layout,
        result: &dyn Fn(usize, usize) -> End,
        word: &dyn Fn(u64) -> u64,
        computed: &dyn Fn(usize, &Value) -> u64,
    ) -> bool {
        let all = |outcome: &Self| outcome.holds(test, layout, result, word, computed);
        let end = |term: &Term| match term {
            Term::Result(thread, at) => result(*thread, *at),
            Term::Memory(location) => End::Value(word(layout.locate(test, location))),
            Term::Computed(thread, value) => End::Value(computed(*thread, value)),
        };
        match self {
            Self::And(a, b) => all(a) && all(b),
            Self::Or(a, b) => all(a) || all(b),
            Self::Not(a) => !all(a),
            Self::Implies(a, b) => !all(a) || all(b),
            Self::Equal(term, value) => {
                matches!(end(term), End::Value(is) if is == layout.evaluate(test, value))
            }
            Self::Completed(term) => !matches!(end(term), End::Fault(_)),
            Self::Flag(flag, term) => {
                matches!(end(term), End::Value(is) if flag.is_in(test, is))
            }
            Self::RunFlag(flag, location) => {
                let run = layout.locate(test, location) & !(RUN * 8 - 1);
                (0..RUN).any(|member| flag.is_in(test, word(run + member * 8)))
            }
            Self::LeadsTo(term, page) => {
                let address = 0x0000_ffff_ffff_f000;
                matches!(end(term), End::Value(is) if is & address == layout.page(*page))
            }
            Self::FaultOf(thread, instructions, kind) => instructions.iter().any(|&at| {
                let one = Self::Fault(Term::Result(*thread, at), *kind, None, None);
                one.holds(test, layout, result, word, computed)
            }),
            Self::Fault(term, kind, at, stage) => {
                let End::Fault(fault) = end(term) else {
                    return false;
                };
                let Some((of, depth)) = FaultKind::of(fault) else {
                    return false;
                };
                let by = match fault {
                    Fault::Second { .. } => Stage::Second,
                    _ => Stage::First,
                };
                stage.is_none_or(|stage| stage == by)
                    && (*kind == FaultKind::Any || *kind == of)
                    && (at.is_none() || *at == depth)
            }
        }
    }
}

impl FaultKind {
    /// The kind of a fault, and the levels below the entry that it is about.
    pub(super) fn of(fault: Fault) -> Option<(Self, Option<u8>)> {
        Some(match fault {
            Fault::Translation { depth } => (Self::Translation, Some(depth)),
            Fault::AccessFlag { depth } => (Self::AccessFlag, Some(depth)),
            Fault::Permission { depth } => (Self::Permission, Some(depth)),
            Fault::Address => (Self::Translation, None),
            // No test has such a log.
            Fault::LogFull => return None,
            Fault::Second { cause, depth, .. } => {
                let of = match cause {
                    Cause::Translation => Self::Translation,
                    Cause::AccessFlag => Self::AccessFlag,
                    Cause::Permission => Self::Permission,
                };
                (of, Some(depth))
            }
        })
    }
}
