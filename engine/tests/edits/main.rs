//! Edits one by one: what random edits seldom meet, and what an edit says besides what it does.
//!
//! Each test is about one decision of the engine and fails if that decision is made differently.
//! The addresses are chosen for it; the judge is the separate walker wherever the tables themselves
//! are in question. Beside them, because what is generic over formats is built once then, [random
//! edits](model), and leaves [without permissions](parked).

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod collapse;
mod encrypted;
mod frames;
mod gathers;
mod leftovers;
mod live;
mod map;
mod model;
mod near;
mod pages;
mod parked;
mod relocate;
mod shadow_stacks;
mod sharing;
mod sparse;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use common::{Judged, is_arm, judge, snapshot, words};
use tablewright::flush::{Held, MAX_RANGES, MAX_UNLINKED};
use tablewright::format::{Arm64K4, Arm64K4Wide, Arm64K16, Arm64K16Wide, Arm64K64Wide, X86_64};
use tablewright::shared::{self, Refused, SharedSpace};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, EditError, Entry, Gather, Half, Invalidation,
    KernelHalf, Leaf, Level, Liveness, Mapping, Memory, Pa, Perms, Platform, Progress,
    Shareability, Span, Stale, TableLink, Va,
};
use tablewright_hosted::{Event, Hosted, Threads, Told};
use tablewright_walker as walker;

type X86 = X86_64<4>;
type Space<'h, F> = AddressSpace<F, &'h Hosted>;

const K4: u64 = 4 << 10;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;
const BLOCK: Level = Level::new(1);

fn span(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

/// Hardware that writes nothing by itself, so that a test sees what the engine does and no more.
fn without_flags(bbm: u8) -> Caps {
    Caps {
        bbm,
        hardware_access: false,
        hardware_dirty: false,
        // Out of the way, where a test is not about it.
        invalidate_all_above: 1 << 20,
        ..tablewright_hosted::CAPS
    }
}

fn keep_going<T>(_: T) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn map<F: Judged, P: Platform + Clone>(
    space: &mut AddressSpace<F, P>,
    at: Span<Va>,
    frame: u64,
    mapping: impl Into<Mapping>,
) -> Result<(), EditError<Va>> {
    space.map(at, Pa::new(frame), mapping.into())
}

fn protect<F: Judged, P: Platform + Clone>(
    space: &mut AddressSpace<F, P>,
    at: Span<Va>,
    change: Change,
) -> Result<(), EditError<Va>> {
    space.gather().protect(at, change)
}

/// Collapses, and returns how many tables are gone and how many runs there are more, together, as
/// counted from outside.
fn collapse<F: Judged, P: Platform + Clone>(
    space: &mut AddressSpace<F, P>,
    at: Span<Va>,
    largest: Level,
    runs: bool,
) -> u64 {
    let before = (space.count_tables(), runs_in(space));
    space.gather().collapse(at, largest, runs).unwrap();
    before.0 - space.count_tables() + runs_in(space).saturating_sub(before.1)
}

/// A run is one leaf.
fn runs_in<F: Judged, P: Platform + Clone>(space: &AddressSpace<F, P>) -> u64 {
    let all = leaves(space);
    all.iter().filter(|leaf| leaf.is_contiguous()).count() as u64
}

fn unmap<F: Judged, P: Platform + Clone>(
    space: &mut AddressSpace<F, P>,
    at: Span<Va>,
) -> Result<(), EditError<Va>> {
    space.gather().unmap(at, keep_going).map(|progress| assert!(progress.is_done()))
}

fn leaves<F: Judged, P: Platform + Clone>(space: &AddressSpace<F, P>) -> Vec<Leaf<F>> {
    let mut all = Vec::new();
    space.walk_all(|leaf| all.push(leaf));
    all
}

/// Writes a descriptor as other software would.
fn poke(platform: &Hosted, frame: Pa, index: usize, bits: u64) {
    // SAFETY: the tests pass frames that they allocated, and indices inside a table.
    unsafe { platform.table(frame, Level::PAGE).add(index).as_ref().store(bits) }
}

/// Returns what the walker finds for one address, in the words of the engine.
fn translate<F: Judged>(platform: &Hosted, root: Pa, va: u64) -> Option<(u64, Attrs)> {
    let mut read = |table: u64, index: usize| platform.read(Pa::new(table), index).unwrap();
    match walker::translate(F::REGIME, root.get(), va, &mut read) {
        Ok(leaf) => Some((leaf.physical(va), words::<F>(&leaf))),
        Err(walker::Fault::NotMapped { .. }) => None,
        Err(fault) => panic!("{fault:?}"),
    }
}

/// Asserts that an edit is refused and leaves every bit as it was, nothing allocated, nothing to
/// invalidate.
fn refused<'h, F: Judged, T: std::fmt::Debug>(
    space: &mut Space<'h, F>,
    expected: EditError<Va>,
    edit: impl FnOnce(&mut Gather<'_, F, &'h Hosted>) -> Result<T, EditError<Va>>,
) {
    let platform: &'h Hosted = space.platform();
    let (before, counts) = (snapshot::<F>(platform, space.root()), platform.counts());
    let mut gather = space.gather();
    assert_eq!(edit(&mut gather).unwrap_err(), expected);
    assert!(gather.is_clean());
    gather.finish(|_| panic!("a refused edit detaches nothing"));
    before.assert_untouched(&snapshot::<F>(platform, space.root()));
    let now = platform.counts();
    assert_eq!(
        (now.tables, now.invalidations, now.completions),
        (counts.tables, counts.invalidations, counts.completions)
    );
}

/// A table of other software's, without entries.
fn empty_table<F: Judged>(platform: &Hosted, level: Level) -> Pa {
    let frame = platform.alloc_table(level).unwrap();
    (0..1 << F::INDEX_BITS).for_each(|index| poke(platform, frame, index, 0));
    frame
}

/// A tree of one page under a table descriptor of other software.
fn adopted<'h, F: Judged>(platform: &'h Hosted, table: u64, leaf: u64) -> Space<'h, F> {
    let root = empty_table::<F>(platform, F::root_level());
    let mut above = root;
    for height in (0..F::LEVELS - 1).rev() {
        let below = empty_table::<F>(platform, Level::new(height));
        let bits = if height == 0 { table } else { F::table(Pa::new(0), Perms::empty()) };
        poke(platform, above, 0, bits | below.get());
        above = below;
    }
    poke(platform, above, 0, leaf);
    // SAFETY: the tables above are a tree of this format, made on this platform, without another
    // editor.
    unsafe { AddressSpace::adopt(platform, root, Half::Lower, Liveness::Dead) }.unwrap()
}

/// A space with one table of pages, and the number of tables it has.
fn pages_of_a_block<F: Judged>(platform: &Hosted, frame: u64, attrs: Attrs) -> Space<'_, F> {
    let mut space = Space::<F>::new(platform).unwrap();
    let block = 1 << F::shift(BLOCK);
    map(&mut space, span(0, block), frame, Mapping::new(attrs).pages_only()).unwrap();
    space
}

/// All that is mapped there.
fn all() -> Span<Va> {
    span(0, 2 * M2 + K4)
}

fn range(first: u64, size: u64, level: Option<Level>, tables: bool) -> Stale {
    Stale { first, last: first + (size - 1), level, tables }
}

/// Two tables of pages and the first page of a third, live.
fn two_tables<P: Platform + Clone>(platform: P) -> AddressSpace<X86, P> {
    let mut space = AddressSpace::new(platform).unwrap();
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    map(&mut space, all(), 0, mapping).unwrap();
    space.make_live();
    space
}
