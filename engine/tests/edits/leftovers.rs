//! Edits of one gather that meet what earlier ones have left: empty tables, cached tables, debts.

use super::*;

/// A page comes and goes in the child, which keeps an empty table for it; then a block of the
/// parent is forked over that table.
fn forked<F: Judged>(platform: &Hosted, live: bool) -> [Space<'_, F>; 2] {
    let mut parent = Space::<F>::new(platform).unwrap();
    let mut child = Space::<F>::new(platform).unwrap();
    map(&mut parent, span(M2, M2), M2, Attrs::USER_DATA).unwrap();
    map(&mut child, span(M2, K4), 0x9000, Attrs::USER_DATA).unwrap();
    if live {
        parent.make_live();
        child.make_live();
    }
    unmap(&mut child, span(M2, K4)).unwrap();
    platform.record();
    let (mut gather, mut into) = (parent.gather(), child.gather());
    let protect = Change::new().write_protect();
    gather.fork(span(M2, M2), protect, &mut into, |_| ()).unwrap();
    gather.finish(|_| ());
    into.finish(|_| ());
    [parent, child]
}

#[test]
fn a_fork_of_a_block_over_an_empty_table_loses_no_table() {
    let platform = Hosted::new(64, 12);
    for space in forked::<X86>(&platform, false) {
        assert!(space.destroy(|_| ()).is_ok());
    }
    assert_eq!(platform.counts().tables, 0);
}

#[test]
fn walkers_of_a_child_forget_the_empty_table_before_a_block_takes_its_place() {
    let platform = Hosted::new(64, 12);
    let [_, child] = forked::<Arm64K4>(&platform, true);
    let log = platform.take_log();
    let tables = |told: &&Told| {
        let at_tables = told.everything || told.ranges.iter().any(|it| it.tables);
        told.root == child.root() && told.covers(M2) && at_tables
    };
    assert!(log.iter().any(|told| tables(&told)), "{log:?}");
}

/// With the first leaf that a fork tells of, walkers of the child have forgotten the table.
#[test]
fn a_fork_waits_for_the_empty_table_before_it_stores_a_block() {
    let [of_parent, of_child] = [(); 2].map(|()| Hosted::new(64, 12));
    let mut parent = Space::<Arm64K4>::new(&of_parent).unwrap();
    let mut child = Space::<Arm64K4>::new(&of_child).unwrap();
    map(&mut parent, span(M2, M2), M2, Attrs::USER_DATA).unwrap();
    map(&mut child, span(M2, K4), 0x9000, Attrs::USER_DATA).unwrap();
    child.make_live();
    unmap(&mut child, span(M2, K4)).unwrap();
    let (mut gather, mut into) = (parent.gather(), child.gather());
    let before = of_child.counts().completions;
    let mut completed = Vec::new();
    let told = |_| completed.push(of_child.counts().completions - before);
    gather.fork(span(M2, M2), Change::new(), &mut into, told).unwrap();
    assert_eq!(completed, [1]);
}

/// The child's edits had begun near a table that the fork had cut off.
#[test]
fn what_is_near_in_a_forked_child_is_what_walkers_find() {
    let platform = Hosted::new(64, 12);
    let mut parent = Space::<X86>::new(&platform).unwrap();
    let mut child = Space::<X86>::new(&platform).unwrap();
    let block = Mapping::new(Attrs::USER_DATA);
    map(&mut parent, span(G1, G1), G1, block).unwrap();
    assert_eq!(leaves(&parent).len(), 1, "one leaf of 1 GiB");
    map(&mut child, span(G1, K4), 0x9000, Attrs::USER_DATA).unwrap();
    parent.make_live();
    child.make_live();
    let mut gather = child.gather();
    assert!(gather.unmap_page(Va::new(G1)).unwrap().is_some());
    gather.finish(|_| ());
    let (mut gather, mut into) = (parent.gather(), child.gather());
    let protect = Change::new().write_protect();
    gather.fork(span(G1, G1), protect, &mut into, |_| ()).unwrap();
    gather.finish(|_| ());
    into.finish(|_| ());

    let mut gather = child.gather();
    assert!(gather.unmap_page(Va::new(G1 + 0x5000)).unwrap().is_some());
    gather.finish(|_| ());
    let gone = translate::<X86>(&platform, child.root(), G1 + 0x5000);
    assert!(gone.is_none(), "{gone:?}");
    let mapped = child.map_page(Va::new(G1 + 0x7000), Pa::new(0xa000), Attrs::USER_DATA);
    assert_eq!(mapped, Err(EditError::AlreadyMapped(Va::new(G1 + 0x7000))));
}

/// A flush that was issued and dropped is complete; the next gather relies on it.
#[test]
fn what_was_issued_and_dropped_is_complete() {
    let platform = Hosted::new(64, 12);
    let mut space = two_tables(&platform);
    let protect = Change::new().write_protect();
    let mut gather = space.gather();
    gather.protect(span(0, K4), protect).unwrap();
    drop(gather.issue());
    assert_eq!(platform.counts().completions, 1);
    let mut gather = space.gather();
    gather.protect(span(0, K4), protect).unwrap();
    drop(gather);
    assert_eq!(platform.counts().completions, 1);
}

/// A processor that did not issue cannot wait for what was forgotten: all of it is issued anew.
#[test]
fn what_was_issued_and_forgotten_is_issued_again() {
    let platform = Hosted::new(64, 12);
    let mut space = two_tables(&platform);
    let mut gather = space.gather();
    gather.protect(span(0, K4), Change::new().write_protect()).unwrap();
    std::mem::forget(gather.issue());
    platform.record();
    drop(space.gather());
    let log = platform.take_log();
    assert!(log.len() == 1 && log[0].everything, "{log:?}");
    assert_eq!(platform.counts().completions, 1);
    drop(space.gather());
    assert_eq!(platform.counts().completions, 1);
}

/// A walker sets the dirty flag of a block while the table for it is being made.
struct Dirtying<'h>(&'h Hosted, Cell<Option<(Pa, usize)>>);

// SAFETY: passed on; what is written is what a walker writes.
unsafe impl Platform for Dirtying<'_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        if let Some((table, index)) = self.1.take() {
            // SAFETY: a table of the test's space, and an index inside it.
            let entry = unsafe { self.0.table(table, BLOCK).add(index).as_ref() };
            entry.store(entry.load() | 1 << 6 | 1 << 5);
        }
        self.0.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.0.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.0.table(frame, level) }
    }
    fn barrier(&self, barrier: Barrier) {
        self.0.barrier(barrier)
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.0.invalidate(what)
    }
    fn caps(&self) -> Caps {
        self.0.caps()
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.0.link_of(frame)
    }
}

#[test]
fn a_flag_that_a_walker_sets_in_a_block_while_it_is_split_goes_into_each_part() {
    let hosted = Hosted::new(64, 12);
    let platform = Dirtying(&hosted, Cell::new(None));
    let mut space = AddressSpace::<X86, _>::new(&platform).unwrap();
    let clean = Attrs { dirty: false, ..Attrs::USER_DATA };
    map(&mut space, span(0, M2), 0, clean).unwrap();
    space.make_live();
    let down = |table: Pa| Pa::new(hosted.read(table, 0).unwrap() & 0x000f_ffff_ffff_f000);
    platform.1.set(Some((down(down(space.root())), 0)));
    let mut gather = space.gather();
    let mut held = Vec::new();
    let progress = gather.unmap(span(0x3000, K4), |leaf| {
        held.push(leaf);
        ControlFlow::Continue(())
    });
    assert!(progress.unwrap().is_done());
    let flushed = gather.flush(|_| ());
    let gone = flushed.release(held.remove(0)).unwrap();
    drop(gather);
    assert!(gone.attrs().dirty && space.query(Va::new(0x9000)).unwrap().attrs().dirty);
}

#[test]
fn what_a_child_has_of_global_leaves_is_invalidated_as_global() {
    let platform = Hosted::new(64, 12);
    let mut parent = Space::<X86>::new(&platform).unwrap();
    let global = Attrs { global: true, ..Attrs::USER_DATA };
    map(&mut parent, span(0x3000, K4), 0, global).unwrap();
    let mut child = Space::<X86>::new(&platform).unwrap();
    let (mut gather, mut into) = (parent.gather(), child.gather());
    gather.fork(span(0x3000, K4), Change::new(), &mut into, |_| ()).unwrap();
    drop((gather, into));
    child.make_live();
    platform.record();
    let mut gather = child.gather();
    let gone = gather.unmap_page(Va::new(0x3000)).unwrap().unwrap();
    assert!(gather.flush_with(gone, |_| ()).is_ok());
    assert!(platform.take_log()[0].global);
}

#[test]
fn what_is_replaced_by_a_global_page_is_invalidated_as_global() {
    let platform = Hosted::new(64, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    space.map_page(Va::new(0x3000), Pa::new(0), Attrs::USER_DATA).unwrap();
    space.make_live();
    let global = Attrs { global: true, ..Attrs::USER_DATA };
    let mut gather = space.gather();
    let held = gather.replace(Va::new(0x3000), Pa::new(0x5000), global).unwrap();
    assert!(gather.flush_with(held, |_| ()).is_ok());
    platform.record();
    let gone = gather.unmap_page(Va::new(0x3000)).unwrap().unwrap();
    assert!(gather.flush_with(gone, |_| ()).is_ok());
    assert!(platform.take_log()[0].global);
}

/// Pages that are like the one before take a shorter way, which owes a flush as well.
#[test]
fn pages_like_the_one_before_are_forgotten_when_their_gather_is_dropped() {
    // A walker may still set flags: these are exchanged.
    let clean = Attrs { accessed: false, dirty: false, ..Attrs::USER_DATA };
    type Edit = fn(&mut Gather<'_, X86, &Hosted>, Va);
    let protect: Edit = |gather, page| {
        let change = Change::new().write_protect();
        gather.protect_page(page, change).unwrap();
    };
    let unmap: Edit = |gather, page| assert!(gather.unmap_page(page).unwrap().is_some());
    for (attrs, edit) in [(clean, protect), (Attrs::USER_DATA, protect), (Attrs::USER_DATA, unmap)]
    {
        let platform = Hosted::new(64, 12);
        let mut space = Space::<X86>::new(&platform).unwrap();
        let mapping = Mapping::new(attrs).pages_only();
        map(&mut space, span(0x3000, 0x4000), 0, mapping).unwrap();
        space.make_live();
        for page in 3..7u64 {
            platform.record();
            let mut gather = space.gather();
            edit(&mut gather, Va::new(page << 12));
            drop(gather);
            let log = platform.take_log();
            assert!(log.iter().any(|told| told.covers(page << 12)), "{page}");
        }
    }
}

#[test]
fn a_page_of_a_run_that_was_forked_goes_alone() {
    let platform = Hosted::new(64, 12);
    let mut parent = Space::<Arm64K4>::new(&platform).unwrap();
    let run = span(0, 0x1_0000);
    map(&mut parent, run, 0, Attrs::USER_DATA).unwrap();
    let mut child = Space::<Arm64K4>::new(&platform).unwrap();
    let (mut gather, mut into) = (parent.gather(), child.gather());
    gather.fork(run, Change::new(), &mut into, |_| ()).unwrap();
    drop((gather, into));
    unmap(&mut child, span(0x3000, 0x2000)).unwrap();
    let left = child.query(Va::new(0x9000));
    assert!(left.is_some_and(|leaf| !leaf.is_contiguous()));
}
