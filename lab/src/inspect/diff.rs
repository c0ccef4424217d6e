//! The differences between the maps in two memories.

use serde::Serialize;
use tablewright_watch::memory_type;

use super::registers::Tree;
use super::tree::{Found, Run};

/// Addresses that are mapped in one way in one, and in another in the other.
#[derive(Serialize)]
pub struct Difference {
    pub tree: &'static str,
    pub first: String,
    pub last: String,
    pub before: String,
    pub after: String,
}

/// Compares trees of the same name. One that is in one memory alone is compared with nothing.
pub fn diff(before: &[(Tree, Found)], after: &[(Tree, Found)]) -> Vec<Difference> {
    let find = |all: &'_ [(Tree, Found)], name| {
        all.iter()
            .find(|(tree, _)| tree.name == name)
            .map_or(Vec::new(), |(_, found)| found.runs.clone())
    };
    let new = after.iter().filter(|(new, _)| before.iter().all(|(old, _)| old.name != new.name));
    let trees = before.iter().chain(new).map(|(tree, _)| tree);
    trees.flat_map(|tree| of(tree, &find(before, tree.name), &find(after, tree.name))).collect()
}

/// Goes along both, from one border to the next.
fn of(tree: &Tree, before: &[Run], after: &[Run]) -> Vec<Difference> {
    let mut borders: Vec<u64> = [before, after]
        .into_iter()
        .flatten()
        .flat_map(|run| [Some(run.va), run.last().checked_add(1)])
        .flatten()
        .collect();
    borders.sort_unstable();
    borders.dedup();
    let at = |runs: &[Run], va: u64| {
        let run = runs[..runs.partition_point(|run| run.va <= va)].last().copied()?;
        let into = va - run.va;
        let rest = run.bytes.checked_sub(into).filter(|rest| *rest > 0)?;
        Some(Run { va, pa: run.pa + into, bytes: rest, ..run })
    };
    let same = |old: Option<Run>, new: Option<Run>| {
        let of = |run: Option<Run>| run.map(|run| (run.pa, run.kind, run.leaf, run.contiguous));
        of(old) == of(new)
    };
    let mut out: Vec<(u64, u64, Option<Run>, Option<Run>)> = Vec::new();
    for (number, &first) in borders.iter().enumerate() {
        let (old, new) = (at(before, first), at(after, first));
        let last = borders.get(number + 1).map_or(u64::MAX, |next| next - 1);
        if same(old, new) {
            continue;
        }
        // Merge with the difference before if both maps simply continue.
        let on = |was: Option<Run>, is: Option<Run>, from: u64| match (was, is) {
            (None, None) => true,
            (Some(was), Some(is)) => {
                is.pa.wrapping_sub(was.pa) == first - from
                    && (is.kind, is.leaf, is.contiguous) == (was.kind, was.leaf, was.contiguous)
            }
            _ => false,
        };
        match out.last_mut() {
            Some((from, until, was_old, was_new))
                if until.checked_add(1) == Some(first)
                    && on(*was_old, old, *from)
                    && on(*was_new, new, *from) =>
            {
                *until = last;
            }
            _ => out.push((first, last, old, new)),
        }
    }
    let words = |run: Option<Run>| match run {
        None => "nothing".to_owned(),
        Some(run) => format!(
            "{:#x}, kernel {}, user {}, {}, {}{}",
            run.pa,
            run.kind.access.privileged,
            run.kind.access.user,
            memory_type(tree.regime, tree.types, run.kind.memory),
            crate::size::human(run.leaf),
            if run.contiguous > run.leaf { " in runs" } else { "" }
        ),
    };
    let difference = |(first, last, old, new)| Difference {
        tree: tree.name,
        first: format!("{first:#x}"),
        last: format!("{last:#x}"),
        before: words(old),
        after: words(new),
    };
    out.into_iter().map(difference).collect()
}
