//! The audit of tables: the unusual, and the wrong.

use serde::Serialize;
use tablewright_walker::{Access, Regime};
use tablewright_watch::memory_type;

use super::registers::Tree;
use super::tree::{Found, Problem, Run};
use crate::size::human;

/// Something that was found, with the first place where it is so.
#[derive(Serialize)]
pub struct Remark {
    /// The register of the tree.
    pub tree: &'static str,
    /// A kernel that is in order has none. Otherwise it is to be known.
    pub is_wrong: bool,
    pub what: &'static str,
    /// How often.
    pub count: u64,
    pub bytes: u64,
    pub first: String,
}

/// Remarks about one tree.
struct Remarks {
    tree: &'static str,
    out: Vec<Remark>,
}

impl Remarks {
    fn add(
        &mut self,
        what: &'static str,
        is_wrong: bool,
        all: impl Iterator<Item = (u64, String)>,
    ) {
        let mut all = all.peekable();
        let Some((_, first)) = all.peek() else { return };
        let first = first.clone();
        let (count, bytes) = all.fold((0, 0), |(count, sum), (bytes, _)| (count + 1, sum + bytes));
        self.out.push(Remark { tree: self.tree, is_wrong, what, count, bytes, first });
    }
}

fn place(run: &Run) -> (u64, String) {
    (run.bytes, format!("{:#x}..={:#x}", run.va, run.last()))
}

/// Looks through what trees map.
pub fn audit(all: &[(Tree, Found)]) -> Vec<Remark> {
    let mut tables: Vec<(u64, u64)> =
        all.iter().flat_map(|(_, found)| found.tables.clone()).collect();
    tables.sort_unstable();
    tables.dedup();
    let mut out: Vec<Remark> =
        all.iter().flat_map(|(tree, found)| of_tree(tree, found, &tables)).collect();
    let mut remarks = Remarks { tree: "all", out: Vec::new() };
    remarks.add("memory that is mapped with two types", false, two_types(all));
    out.extend(remarks.out);
    out
}

fn of_tree(tree: &Tree, found: &Found, tables: &[(u64, u64)]) -> Vec<Remark> {
    let some = |is: &dyn Fn(&Run) -> bool| -> Vec<Run> {
        found.runs.iter().filter(|run| is(run)).copied().collect()
    };
    let mut remarks = Remarks { tree: tree.name, out: Vec::new() };
    let problem = |problem: &Problem| (0, format!("{:#x}: {}", problem.va, problem.what));
    let what = "an entry has no meaning, or its table is not there";
    remarks.add(what, true, found.problems.iter().map(problem));
    let broken = some(&|run| {
        let ends = run.va | run.va.wrapping_add(run.bytes) | run.pa;
        run.contiguous > run.leaf && ends % run.contiguous != 0
    });
    remarks.add("a run of contiguous entries that is not whole", true, broken.iter().map(place));
    // Of a guest, all memory may be anything.
    if !tree.is_stage2() {
        let both = some(&|run| {
            let Access { privileged, user } = run.kind.access;
            [privileged, user].iter().any(|one| one.write && one.execute)
        });
        remarks.add("writable and executable", true, both.iter().map(place));
        let open = some(&|run| {
            let user = run.kind.access.user;
            run.va >> 63 != 0 && (user.read || user.write || user.execute)
        });
        let what = "in the kernel's half, and user mode may use it";
        remarks.add(what, true, open.iter().map(place));
        let writable = some(&|run| run.kind.access.user.write);
        remarks.add("a table that user mode may write", true, mapped(&writable, tables));
    }
    let what = "small leaves that could be large ones";
    remarks.add(what, false, could_be_large(tree.regime, &found.runs));
    // A break takes away what it maps, and with it the way to the entry that is to come.
    let large = some(&|run| run.va >> 63 != 0 && run.contiguous > 1 << tree.regime.page_shift());
    let what = "a table that is mapped by a block, which no break can split";
    remarks.add(what, false, mapped(&large, tables));
    remarks.out
}

/// Tables that lie in what is mapped, each once.
fn mapped(runs: &[Run], tables: &[(u64, u64)]) -> impl Iterator<Item = (u64, String)> {
    let mut out = Vec::new();
    for run in runs {
        let from = tables.partition_point(|(pa, bytes)| pa + bytes <= run.pa);
        let inside = tables[from..].iter().take_while(|(pa, _)| *pa < run.pa + run.bytes);
        out.extend(inside.map(|(pa, bytes)| (*pa, *bytes, run.va + pa.saturating_sub(run.pa))));
    }
    out.sort_unstable();
    out.dedup_by_key(|(pa, ..)| *pa);
    out.into_iter().map(|(pa, bytes, va)| (bytes, format!("{va:#x}: the table at {pa:#x}")))
}

/// Memory that two leaves map with different types, one place for each pair that overlaps.
fn two_types(all: &[(Tree, Found)]) -> impl Iterator<Item = (u64, String)> {
    let of_one = |(tree, found): &(Tree, Found)| -> Vec<(Run, String)> {
        let runs = found.runs.iter().filter(|_| !tree.is_stage2());
        runs.map(|run| (*run, memory_type(tree.regime, tree.types, run.kind.memory))).collect()
    };
    let mut sorted: Vec<(Run, String)> = all.iter().flat_map(of_one).collect();
    sorted.sort_unstable_by_key(|(run, _)| run.pa);
    let mut out = Vec::new();
    // Of each type the run that reaches furthest so far.
    let mut furthest: Vec<&(Run, String)> = Vec::new();
    for entry in &sorted {
        let (run, name) = entry;
        let end = |run: &Run| run.pa + run.bytes;
        for (other, others) in furthest.iter().filter(|(_, others)| others != name) {
            if let Some(bytes) = end(other).min(end(run)).checked_sub(run.pa).filter(|it| *it > 0) {
                let at = other.va + (run.pa - other.pa);
                out.push((
                    bytes,
                    format!("{:#x}: {others} at {at:#x}, {name} at {:#x}", run.pa, run.va),
                ));
            }
        }
        match furthest.iter_mut().find(|(_, others)| others == name) {
            Some((other, _)) if end(other) >= end(run) => {}
            Some(other) => *other = entry,
            None => furthest.push(entry),
        }
    }
    out.into_iter()
}

/// Whole blocks of the next size that are mapped by small leaves.
fn could_be_large(regime: Regime, runs: &[Run]) -> impl Iterator<Item = (u64, String)> {
    let step = if regime.last_level() < regime.start_level() { 1 } else { -1 };
    let block = regime.entry_size(regime.last_level() + step);
    let page = 1 << regime.page_shift();
    runs.iter().filter(move |run| run.leaf == page).filter_map(move |run| {
        // In both, or in none of them.
        if run.va % block != run.pa % block {
            return None;
        }
        let first = run.va.checked_next_multiple_of(block)?;
        let blocks = run.last().checked_sub(first)?.wrapping_add(1) / block;
        (blocks > 0).then(|| (blocks * block, format!("{first:#x}: {}", human(blocks * block))))
    })
}
