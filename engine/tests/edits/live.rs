//! Spaces that walkers use, the one that the code runs on among them: breaks, invalidations and
//! barriers.

use tablewright::Hooks;

use super::*;

/// An edit as data.
#[derive(Clone, Copy, Debug)]
enum Do {
    Unmap,
    Split,
    Protect(Change),
}

#[test]
fn the_own_space_refuses_what_needs_a_break_and_does_the_rest() {
    // The space: a run of blocks from 0, a block at 64 MiB, a run of pages at 128 MiB, a user page
    // at 256 MiB.
    const LONE: u64 = 64 << 20;
    const RUN: u64 = 128 << 20;
    const USER: u64 = 256 << 20;
    const READ: Do = Do::Protect(Change::new().perms(Perms::READ));
    const TYPE: Do = Do::Protect(Change::new().memory(Memory::NonCacheable));
    const SHARE: Do = Do::Protect(Change::new().shareability(Shareability::Outer));
    const SAME: Do = Do::Protect(Change::new().shareability(Shareability::Inner));
    const GLOBAL: Do = Do::Protect(Change::new().global(true));
    const PRIVATE: Do = Do::Protect(Change::new().global(false));
    const NEVER: u8 = 4;
    // The lowest level of break-before-make at which arm64 does it in place, and where it is
    // refused below that.
    let edits = [
        (Do::Unmap, span(LONE, M2), 0, 0),
        (Do::Unmap, span(LONE, K4), 2, LONE),
        (Do::Unmap, span(LONE + M2 - K4, 2 * K4), 2, LONE + M2 - K4),
        (READ, span(LONE, M2), 0, 0),
        (READ, span(LONE, K4), 2, LONE),
        (READ, span(LONE + K4, M2 - K4), 2, LONE + K4),
        (Do::Split, span(LONE, M2), 2, LONE),
        (Do::Split, span(LONE - M2, K4), 0, 0),
        (TYPE, span(LONE, M2), NEVER, LONE),
        (TYPE, span(LONE - M2, 2 * M2), NEVER, LONE),
        (SHARE, span(LONE, M2), NEVER, LONE),
        (SAME, span(LONE, M2), 0, 0),
        (Do::Unmap, span(RUN, 16 * K4), 0, 0),
        (Do::Unmap, span(RUN + K4, K4), 1, RUN),
        (READ, span(RUN + K4, K4), 1, RUN + K4),
        (READ, span(RUN, 16 * K4), 1, RUN),
        (TYPE, span(RUN, 16 * K4), NEVER, RUN),
        (Do::Split, span(RUN, 16 * K4), 1, RUN),
        (Do::Unmap, span(M2, M2), 1, 0),
        (Do::Unmap, span(M2 + K4, K4), 2, 0),
        (READ, span(M2, M2), 1, M2),
        (GLOBAL, span(USER, K4), NEVER, USER),
        (PRIVATE, span(LONE, M2), 0, 0),
    ];
    fn check<F: Judged>(bbm: u8, edits: &[(Do, Span<Va>, u8, u64)]) {
        for &(edit, at, needed, refused_at) in edits {
            // x86 has no shareability, and no rule of this kind.
            if !F::HALVES && matches!((edit, SHARE), (Do::Protect(a), Do::Protect(b)) if a == b) {
                continue;
            }
            let allowed = !F::HALVES || bbm >= needed;
            let platform = Hosted::new(64, 12).with_caps(without_flags(bbm));
            let mut space = Space::<F>::new(&platform).unwrap();
            map(&mut space, span(0, 16 * M2), 0, Attrs::KERNEL_DATA).unwrap();
            let lone = Mapping::new(Attrs::KERNEL_DATA).without_runs();
            map(&mut space, span(LONE, M2), LONE, lone).unwrap();
            map(&mut space, span(RUN, 16 * K4), RUN, Attrs::KERNEL_DATA).unwrap();
            map(&mut space, span(USER, K4), 0, Attrs::USER_DATA).unwrap();
            space.make_own();
            let (before, counts) = (snapshot::<F>(&platform, space.root()), platform.counts());
            let mut gather = space.gather();
            let result = match edit {
                Do::Unmap => {
                    gather.unmap(at, keep_going).map(|progress| assert!(progress.is_done()))
                }
                Do::Split => gather.split(at, Level::PAGE),
                Do::Protect(change) => gather.protect(at, change),
            };
            let what = format!("{}, level {bbm}: {edit:?} {at}", F::NAME);
            if allowed {
                assert_eq!(result, Ok(()), "{what}");
                judge::<F>(&platform, gather.root());
            } else {
                // The address is one of the leaf, or of the run that it is part of.
                let Err(EditError::NeedsBreak(named)) = result else {
                    panic!("{what}: {result:?}");
                };
                assert!(refused_at <= named.get() && named <= at.last(), "{what}: {named}");
                before.assert_untouched(&snapshot::<F>(&platform, gather.root()));
                assert!(gather.is_clean());
                gather.finish(|_| panic!("a refused edit detaches nothing"));
                let now = platform.counts();
                assert_eq!(
                    (now.tables, now.invalidations, now.completions),
                    (counts.tables, counts.invalidations, counts.completions),
                    "{what}"
                );
            }
        }
    }
    for bbm in 0..4 {
        check::<Arm64K4>(bbm, &edits);
        check::<X86>(bbm, &edits);
    }
}

/// Hardware that sets flags is no reason to refuse what is done with an exchange.
#[test]
fn the_own_space_changes_what_walkers_write_to() {
    let caps = Caps { hardware_access: true, hardware_dirty: true, ..without_flags(0) };
    let platform = Hosted::new(16, 12).with_caps(caps);
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    let clean = Attrs { dirty: false, accessed: false, ..Attrs::KERNEL_DATA };
    map(&mut space, span(0, 4 * K4), 0, clean).unwrap();
    space.make_own();
    let change = Change::new().perms(Perms::READ);
    assert_eq!(protect(&mut space, span(0, 4 * K4), change), Ok(()));
    let device = Change::new().memory(Memory::Device);
    let refused = protect(&mut space, span(K4, K4), device);
    assert_eq!(refused, Err(EditError::NeedsBreak(Va::new(K4))));
}

#[test]
fn a_collapse_of_the_own_space_leaves_what_would_need_a_break() {
    for (bbm, expected) in [(0, 0), (1, 32), (2, 1), (3, 1)] {
        let platform = Hosted::new(64, 12).with_caps(without_flags(bbm));
        let mut space = pages_of_a_block::<Arm64K4>(&platform, 0, Attrs::KERNEL_DATA);
        space.make_own();
        let before = judge::<Arm64K4>(&platform, space.root());
        // At level 1 runs can be folded in place, 32 of them; from level 2 on the table can be
        // replaced.
        assert_eq!(collapse(&mut space, span(0, M2), BLOCK, true), expected, "level {bbm}");
        assert_eq!(before, judge::<Arm64K4>(&platform, space.root()));
    }
}

/// Pages that are in no run are as small as they are asked to be.
#[test]
fn pages_of_the_own_space_are_split_already() {
    let platform = Hosted::new(64, 12).with_caps(without_flags(0));
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    map(&mut space, span(0, 20 * K4), 0, Attrs::KERNEL_DATA).unwrap();
    space.make_own();
    let mut gather = space.gather();
    assert_eq!(gather.split(span(16 * K4, 4 * K4), Level::PAGE), Ok(()));
    let refused = gather.split(span(0, 20 * K4), Level::PAGE);
    assert_eq!(refused, Err(EditError::NeedsBreak(Va::new(0))));
}

/// A run that a collapse has made is broken as a run.
#[test]
fn a_run_that_was_folded_is_not_changed_in_part_in_the_own_space() {
    for (bbm, expected) in [(0, Err(EditError::NeedsBreak(Va::new(0)))), (1, Ok(()))] {
        let platform = Hosted::new(64, 12).with_caps(without_flags(bbm));
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        let mapping = Mapping::new(Attrs::KERNEL_DATA).without_runs();
        map(&mut space, span(0, 16 * K4), 0, mapping).unwrap();
        assert_eq!(collapse(&mut space, span(0, 16 * K4), Level::PAGE, true), 1);
        space.make_own();
        let read = Change::new().perms(Perms::READ);
        assert_eq!(protect(&mut space, span(0, 16 * K4), read), expected, "level {bbm}");
    }
}

/// A platform that looks at an address whenever an invalidation is waited for.
struct Watch {
    memory: Hosted,
    root: RefCell<Option<Pa>>,
    addresses: Vec<u64>,
    /// For each completion: at which of the addresses a walker finds something, and the frame.
    seen: RefCell<Vec<Vec<Option<u64>>>>,
    /// The entries whenever an invalidation is issued.
    issued: RefCell<Vec<Vec<Option<u64>>>>,
    last: Cell<Option<Barrier>>,
    regime: walker::Regime,
}

impl Watch {
    fn new<F: Judged>(caps: Caps, addresses: &[u64]) -> Self {
        let memory = Hosted::new(700, F::PAGE_SHIFT).with_caps(caps);
        memory.record();
        Self {
            memory,
            root: RefCell::default(),
            addresses: addresses.to_vec(),
            seen: RefCell::default(),
            issued: RefCell::default(),
            last: Cell::default(),
            regime: F::REGIME,
        }
    }

    fn look(&self) -> Option<Vec<Option<u64>>> {
        let root = (*self.root.borrow())?.get();
        let look = |va: u64| {
            let mut read = |table, index| self.memory.read(Pa::new(table), index).unwrap();
            match walker::translate(self.regime, root, va, &mut read) {
                Ok(leaf) => Some(leaf.physical(va)),
                Err(walker::Fault::NotMapped { .. }) => None,
                Err(fault) => panic!("{fault:?}"),
            }
        };
        Some(self.addresses.iter().map(|&va| look(va)).collect())
    }

    fn watch(&self, root: Pa) {
        *self.root.borrow_mut() = Some(root);
    }
}

// SAFETY: passed on to `Hosted`.
unsafe impl Platform for Watch {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.memory.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.memory.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.memory.table(frame, level) }
    }
    fn barrier(&self, barrier: Barrier) {
        self.memory.barrier(barrier);
        self.last.set(Some(barrier));
        if barrier == Barrier::Complete {
            self.seen.borrow_mut().extend(self.look());
        }
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.memory.invalidate(what);
        self.issued.borrow_mut().extend(self.look());
    }
    fn caps(&self) -> Caps {
        self.memory.caps()
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.memory.link_of(frame)
    }
}

#[test]
fn what_is_broken_is_invalid_until_the_invalidation_is_complete() {
    fn check<F: Judged>(
        prepare: fn(&mut AddressSpace<F, &Watch>),
        edit: fn(&mut Gather<'_, F, &Watch>),
        addresses: &[u64],
        frames: [&[Option<u64>]; 2],
    ) {
        let watch = Watch::new::<F>(without_flags(0), addresses);
        let mut space = AddressSpace::<F, &Watch>::new(&watch).unwrap();
        prepare(&mut space);
        space.make_live();
        watch.watch(space.root());
        assert_eq!(watch.look().unwrap(), frames[0], "before");
        let mut gather = space.gather();
        edit(&mut gather);
        let seen = watch.seen.take();
        // One completion for the whole edit, however much is broken: everything at once is invalid
        // then.
        assert_eq!(seen.len(), 1, "completions");
        assert_eq!(seen[0], vec![None; addresses.len()], "at the completion");
        for issued in watch.issued.take() {
            assert_eq!(issued, vec![None; addresses.len()], "when it was issued");
        }
        assert_eq!(watch.look().unwrap(), frames[1], "after");
        // What was made after the completion is published before the edit returns.
        assert_eq!(watch.last.get(), Some(Barrier::Publish));
        gather.finish(|_| ());
        assert_eq!(watch.memory.counts().bad_frees, 0);
    }
    let both: &[Option<u64>] = &[Some(G1), Some(G1 + M2 - K4)];
    // A block of which a page is protected: all of it goes, and comes back as pages.
    check::<Arm64K4>(
        |space| {
            map(space, span(0, M2), G1, Mapping::new(Attrs::KERNEL_DATA).without_runs()).unwrap()
        },
        |gather| {
            let change = Change::new().perms(Perms::READ);
            gather.protect(span(0, K4), change).unwrap();
        },
        &[0, M2 - K4],
        [both, both],
    );
    // The same with an unmap.
    check::<Arm64K4>(
        |space| {
            map(space, span(0, M2), G1, Mapping::new(Attrs::KERNEL_DATA).without_runs()).unwrap()
        },
        |gather| {
            let progress = gather.unmap(span(0, K4), keep_going).unwrap();
            assert!(progress.is_done());
        },
        &[0, M2 - K4],
        [both, &[None, Some(G1 + M2 - K4)]],
    );
    // Blocks at both ends of a range, many between: one completion.
    check::<Arm64K4>(
        |space| {
            map(space, span(0, 8 * M2), G1, Mapping::new(Attrs::KERNEL_DATA).without_runs())
                .unwrap()
        },
        |gather| {
            let at = span(K4, 8 * M2 - 2 * K4);
            gather.split(at, Level::PAGE).unwrap();
        },
        &[0, 3 * M2, 8 * M2 - K4],
        [&[Some(G1), Some(G1 + 3 * M2), Some(G1 + 8 * M2 - K4)]; 2],
    );
    // The memory type of pages and blocks.
    check::<Arm64K4>(
        |space| map(space, span(0, M2 + 3 * K4), G1, Mapping::new(Attrs::KERNEL_DATA)).unwrap(),
        |gather| {
            let change = Change::new().memory(Memory::NonCacheable);
            gather.protect(span(0, M2 + 3 * K4), change).unwrap();
        },
        &[0, M2, M2 + 2 * K4],
        [&[Some(G1), Some(G1 + M2), Some(G1 + M2 + 2 * K4)]; 2],
    );
    // Pages that become a block, and pages that become a run.
    check::<Arm64K4>(
        |space| {
            let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
            map(space, span(0, 3 * M2), G1, mapping).unwrap();
        },
        |gather| {
            gather.collapse(span(0, 3 * M2), BLOCK, true).unwrap();
        },
        &[0, M2, 3 * M2 - K4],
        [&[Some(G1), Some(G1 + M2), Some(G1 + 3 * M2 - K4)]; 2],
    );
    check::<Arm64K4>(
        |space| {
            let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
            map(space, span(0, 32 * K4), G1, mapping).unwrap();
        },
        |gather| {
            gather.collapse(span(0, 32 * K4), BLOCK, true).unwrap();
        },
        &[0, 15 * K4, 31 * K4],
        [&[Some(G1), Some(G1 + 15 * K4), Some(G1 + 31 * K4)]; 2],
    );
}

/// An invalidation that a platform is asked for by one call: ranges, or `None` for everything.
type Asked = Option<Vec<Stale>>;

/// One call for one range.
fn one(stale: Stale) -> Vec<Asked> {
    vec![Some(vec![stale])]
}

const NOTHING: Vec<Asked> = Vec::new();
const EVERYTHING: [Asked; 1] = [None];

/// Collects the invalidations that edits of a live space make before they return, and those that
/// they leave to the gather.
fn invalidations<F: Judged>(
    caps: Caps,
    prepare: impl FnOnce(&mut Space<'_, F>),
    edit: impl FnOnce(&mut Gather<'_, F, &Hosted>),
) -> (Vec<Asked>, Vec<Asked>) {
    let platform = Hosted::new(700, F::PAGE_SHIFT).with_caps(caps);
    platform.record();
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap().with_id(7);
    prepare(&mut space);
    space.make_live();
    let root = space.root();
    let take = || -> Vec<Asked> {
        let asked = |told: Told| {
            // Everything that these tests map is global.
            assert_eq!((told.root, told.id, told.global), (root, 7, true));
            (!told.everything).then_some(told.ranges)
        };
        platform.take_log().into_iter().map(asked).collect()
    };
    take();
    let mut gather = space.gather();
    edit(&mut gather);
    let at_once = take();
    gather.finish(|_| ());
    (at_once, take())
}

fn no_edit<F: Judged>(_: &mut Space<'_, F>) {}

#[test]
fn a_range_of_pages_takes_one_invalidation_with_its_level() {
    let pages = |space: &mut Space<'_, X86>| {
        let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
        map(space, span(0, M2 / 2), 0, mapping).unwrap();
    };
    let (at_once, later) = invalidations::<X86>(without_flags(0), pages, |gather| {
        let change = Change::new().perms(Perms::READ);
        gather.protect(span(4 * K4, 100 * K4), change).unwrap();
    });
    assert_eq!(at_once, NOTHING);
    assert_eq!(later, one(range(4 * K4, 100 * K4, Some(Level::PAGE), false)));
    let (at_once, later) = invalidations::<X86>(without_flags(0), pages, |gather| {
        let progress = gather.unmap(span(4 * K4, 100 * K4), keep_going);
        assert!(progress.unwrap().is_done());
    });
    assert_eq!(at_once, NOTHING);
    assert_eq!(later, one(range(4 * K4, 100 * K4, Some(Level::PAGE), false)));
    // What is not mapped, and what does not change, is not invalidated.
    let nothing = invalidations::<X86>(without_flags(0), pages, |gather| {
        let progress = gather.unmap(span(4 * M2, 100 * K4), keep_going);
        assert!(progress.unwrap().is_done());
        let change = Change::new().perms(Attrs::KERNEL_DATA.perms);
        gather.protect(span(0, 100 * K4), change).unwrap();
    });
    assert_eq!(nothing, (NOTHING, NOTHING));
}

#[test]
fn a_mapping_takes_no_invalidation_where_holes_are_not_remembered() {
    fn edit(gather: &mut Gather<'_, X86, &Hosted>) {
        gather.map(span(M2 - K4, M2), Pa::new(0), Attrs::KERNEL_DATA).unwrap();
    }
    assert_eq!(invalidations(without_flags(0), no_edit, edit), (NOTHING, NOTHING));
    let remembering = Caps { invalid_entries_cached: true, ..without_flags(0) };
    let (at_once, later) = invalidations(remembering, no_edit, edit);
    assert_eq!(at_once, NOTHING);
    assert_eq!(later, one(range(M2 - K4, M2, None, true)));
}

/// A parked page is mapped again: walkers that remember holes were told nothing.
#[test]
fn what_was_parked_is_forgotten_where_holes_are_remembered() {
    fn park(space: &mut Space<'_, X86>) {
        map(space, span(K4, K4), 0, Attrs::KERNEL_DATA).unwrap();
        let mut gather = space.gather();
        let none = Change::new().perms(Perms::empty());
        gather.protect(span(K4, K4), none).unwrap();
        gather.finish(|_| ());
    }
    let back = Change::new().perms(Attrs::KERNEL_DATA.perms);
    type Edit = fn(&mut Gather<'_, X86, &Hosted>, Change);
    let edits: [Edit; 2] = [
        |gather, back| gather.protect(span(K4, K4), back).unwrap(),
        |gather, back| gather.protect_page(Va::new(K4), back).unwrap(),
    ];
    let told = one(range(K4, K4, Some(Level::PAGE), false));
    for edit in edits {
        for (invalid_entries_cached, expected) in [(false, NOTHING), (true, told.clone())] {
            let caps = Caps { invalid_entries_cached, ..without_flags(0) };
            let said = invalidations(caps, park, |gather| edit(gather, back));
            assert_eq!(said, (NOTHING, expected));
        }
    }
}

#[test]
fn mappings_in_a_live_space_are_published_once_with_the_gather() {
    // Leaves in a table that is there, a table that is new; one call for each, or both in one
    // gather.
    let spans = [span(K4, K4), span(G1, K4)];
    for parts in [&spans[..1], &spans[1..], &spans] {
        let platform = Hosted::new(16, 12).with_caps(without_flags(0));
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        map(&mut space, span(0, K4), 0, Attrs::KERNEL_DATA).unwrap();
        space.make_live();
        let before = platform.counts().publications;
        let published = || platform.counts().publications - before;
        let mut gather = space.gather();
        for at in parts {
            gather.map(*at, Pa::new(0), Attrs::KERNEL_DATA).unwrap();
        }
        assert_eq!(published(), 0);
        assert!(gather.is_clean());
        gather.flush(|_| ());
        assert_eq!(published(), 1);
        gather.finish(|_| ());
        assert_eq!(published(), 1);
        // The space's own map does it before it returns.
        let one = span(2 * G1, K4);
        map(&mut space, one, 0, Attrs::KERNEL_DATA).unwrap();
        assert_eq!(published(), 2);
        let counts = platform.counts();
        assert_eq!((counts.invalidations, counts.completions), (0, 0));
    }
}

#[test]
fn the_level_is_not_told_where_leaves_of_several_levels_or_tables_are_concerned() {
    let mixed = |space: &mut Space<'_, X86>| {
        map(space, span(0, M2 + 4 * K4), 0, Attrs::KERNEL_DATA).unwrap();
        let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
        map(space, span(4 * M2, M2), 0, mapping).unwrap();
    };
    let read = Change::new().perms(Perms::READ);
    let protect = |at: Span<Va>| {
        let (at_once, later) = invalidations::<X86>(without_flags(0), mixed, |gather| {
            gather.protect(at, read).unwrap();
        });
        assert_eq!(at_once, NOTHING);
        later
    };
    assert_eq!(protect(span(0, M2)), one(range(0, M2, Some(BLOCK), false)));
    assert_eq!(protect(span(M2, 4 * K4)), one(range(M2, 4 * K4, Some(Level::PAGE), false)));
    assert_eq!(protect(span(0, M2 + 4 * K4)), one(range(0, M2 + 4 * K4, None, false)));
    // A table that is detached; a table and leaves.
    let unmap = |at: Span<Va>| {
        let (at_once, later) = invalidations::<X86>(without_flags(0), mixed, |gather| {
            let progress = gather.unmap(at, keep_going);
            assert!(progress.unwrap().is_done());
        });
        assert_eq!(at_once, NOTHING);
        later
    };
    assert_eq!(unmap(span(4 * M2, M2)), one(range(4 * M2, M2, None, true)));
    assert_eq!(unmap(span(0, M2)), one(range(0, M2, Some(BLOCK), false)));
    assert_eq!(unmap(span(0, 5 * M2)), one(range(0, 5 * M2, None, true)));
}

#[test]
fn runs_of_two_levels_that_are_unfolded_by_one_edit_are_each_told_right() {
    // A run of pages at one end of the range, a run of blocks at the other, or the other way round;
    // both in place.
    for pages_first in [true, false] {
        let (pages, blocks) = match pages_first {
            true => (16 * M2 - 16 * K4, 16 * M2),
            false => (32 * M2, 16 * M2),
        };
        let prepare = |space: &mut Space<'_, Arm64K4>| {
            map(space, span(pages, 16 * K4), pages, Attrs::KERNEL_DATA).unwrap();
            map(space, span(blocks, 16 * M2), blocks, Attrs::KERNEL_DATA).unwrap();
            assert_eq!(runs_in(space), 2);
        };
        let at = match pages_first {
            true => span(pages + 8 * K4, 8 * K4 + M2),
            false => span(blocks + 15 * M2, M2 + 8 * K4),
        };
        let (mut told, later) = invalidations::<Arm64K4>(without_flags(1), prepare, |gather| {
            gather.split(at, BLOCK).unwrap();
            assert_eq!(runs_in(gather), 0);
        });
        told.extend(later);
        let covered = |from: u64, to: u64, right: Level| {
            let covers = |stale: &Stale| {
                stale.first <= from
                    && to <= stale.last
                    && stale.level.is_none_or(|level| level == right)
            };
            told.iter().any(|asked| match asked {
                None => true,
                Some(ranges) => ranges.iter().any(covers),
            })
        };
        assert!(covered(pages, pages + 16 * K4 - 1, Level::PAGE), "{told:?}");
        assert!(covered(blocks, blocks + 16 * M2 - 1, BLOCK), "{told:?}");
    }
}

#[test]
fn a_broken_block_is_invalidated_at_once_as_the_block_it_was() {
    let block = |space: &mut Space<'_, Arm64K4>| {
        let mapping = Mapping::new(Attrs::KERNEL_DATA).without_runs();
        map(space, span(0, 4 * M2), 0, mapping).unwrap();
    };
    let (at_once, later) = invalidations::<Arm64K4>(without_flags(0), block, |gather| {
        let change = Change::new().perms(Perms::READ);
        gather.protect(span(M2, K4), change).unwrap();
    });
    assert_eq!(at_once, one(range(M2, M2, Some(BLOCK), false)));
    assert_eq!(later, one(range(M2, K4, Some(Level::PAGE), false)));
    // In place, the block has to be forgotten before its parts differ.
    let (at_once, later) = invalidations::<Arm64K4>(without_flags(2), block, |gather| {
        let change = Change::new().perms(Perms::READ);
        gather.protect(span(M2, K4), change).unwrap();
    });
    assert_eq!(at_once, one(range(M2, M2, None, true)));
    assert_eq!(later, one(range(M2, K4, Some(Level::PAGE), false)));
}

#[test]
fn ranges_merge_and_too_many_of_them_are_everything() {
    let pages = |space: &mut Space<'_, X86>| {
        let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
        map(space, span(0, M2), 0, mapping).unwrap();
    };
    let read = Change::new().perms(Perms::READ);
    // Neighbours, in either order, and overlapping.
    let (_, later) = invalidations::<X86>(without_flags(0), pages, |gather| {
        for page in [5, 6, 4, 7] {
            gather.protect(span(page * K4, K4), read).unwrap();
        }
        gather.protect(span(6 * K4, 4 * K4), Change::new().software(1)).unwrap();
    });
    assert_eq!(later, one(range(4 * K4, 4 * K4, Some(Level::PAGE), false)));
    let apart = |count: u64, caps: Caps| {
        let (at_once, later) = invalidations::<X86>(caps, pages, |gather| {
            for page in 0..count {
                gather.protect(span(2 * page * K4, K4), read).unwrap();
            }
        });
        assert_eq!(at_once, NOTHING);
        later
    };
    // All ranges go to the platform at once.
    let each = |count: u64| -> [Asked; 1] {
        let page = |page: u64| range(2 * page * K4, K4, Some(Level::PAGE), false);
        [Some((0..count).map(page).collect())]
    };
    let many = MAX_RANGES as u64;
    assert_eq!(apart(many, without_flags(0)), each(many));
    assert_eq!(apart(many + 1, without_flags(0)), EVERYTHING);
    assert_eq!(apart(3 * many, without_flags(0)), EVERYTHING);
    // Neighbours of different levels stay apart, so that both are told.
    let mixed = |space: &mut Space<'_, X86>| {
        map(space, span(0, M2 + 4 * K4), 0, Attrs::KERNEL_DATA).unwrap();
    };
    for block_first in [true, false] {
        let (_, later) = invalidations::<X86>(without_flags(0), mixed, |gather| {
            let (block, pages) = (span(0, M2), span(M2, 4 * K4));
            let (first, second) = match block_first {
                true => (block, pages),
                false => (pages, block),
            };
            gather.protect(first, read).unwrap();
            gather.protect(second, read).unwrap();
        });
        let [Some(ranges)] = &later[..] else {
            panic!("{later:?}");
        };
        assert_eq!(ranges.len(), 2);
        assert!(ranges.contains(&range(0, M2, Some(BLOCK), false)));
        assert!(ranges.contains(&range(M2, 4 * K4, Some(Level::PAGE), false)));
    }
    // More than the hardware does better one by one: each page counts, wherever it is.
    let few = Caps { invalidate_all_above: 5, ..without_flags(0) };
    assert_eq!(apart(5, few), each(5));
    assert_eq!(apart(6, few), EVERYTHING);
    let one_edit = |pages_changed: u64| {
        let changed = span(0, pages_changed * K4);
        let (_, later) = invalidations::<X86>(few, pages, |gather| {
            gather.protect(changed, read).unwrap();
        });
        later
    };
    assert_eq!(one_edit(5), one(range(0, 5 * K4, Some(Level::PAGE), false)));
    assert_eq!(one_edit(6), EVERYTHING);
    // A block is one operation, as large as it is.
    let block = |space: &mut Space<'_, X86>| {
        map(space, span(0, 5 * M2), 0, Attrs::KERNEL_DATA).unwrap();
    };
    let (_, later) = invalidations::<X86>(few, block, |gather| {
        gather.protect(span(0, 5 * M2), read).unwrap();
    });
    assert_eq!(later, one(range(0, 5 * M2, Some(BLOCK), false)));
}

#[test]
fn a_break_of_many_pieces_has_one_invalidation_from_the_first_to_the_last_and_makes_each_again() {
    let pieces = MAX_RANGES as u64 + 4;
    let at = span(0, 2 * pieces * M2);
    for largest in [BLOCK, Level::PAGE] {
        let mapping = Mapping::new(Attrs::KERNEL_DATA).without_runs();
        let prepare = |space: &mut Space<'_, Arm64K4>| {
            for piece in 0..pieces {
                let first = 2 * piece * M2;
                map(space, span(first, M2), first, mapping.largest(largest)).unwrap();
            }
        };
        let change = Change::new().memory(Memory::NonCacheable);
        let (at_once, later) = invalidations::<Arm64K4>(without_flags(0), prepare, |gather| {
            let before = leaves(gather).len();
            gather.protect(at, change).unwrap();
            let now = leaves(gather);
            assert_eq!(now.len(), before);
            let changed = |leaf: &Leaf<_>| leaf.attrs().memory == Memory::NonCacheable;
            assert!(now.iter().all(changed));
        });
        let size = (2 * pieces - 1) * M2;
        let broken = one(range(0, size, Some(largest), false));
        assert_eq!((at_once, later), (broken, NOTHING));
    }
}

#[test]
fn an_invalidation_says_whether_global_translations_may_be_meant() {
    fn check<F: Judged>(attrs: Attrs, change: Change, expected: bool) {
        let platform = Hosted::new(16, 12).with_caps(without_flags(0));
        let mut space = Space::<F>::new(&platform).unwrap();
        map(&mut space, span(0, K4), 0, attrs).unwrap();
        space.make_live();
        platform.record();
        for last in [change, Change::new().perms(Perms::READ)] {
            let _ = protect(&mut space, span(0, K4), last);
        }
        let log = platform.take_log();
        assert!(!log.is_empty());
        // Once a leaf was global, the space stays so.
        let last = log.last().unwrap();
        assert_eq!(last.global, expected, "{}: {attrs:?} {change:?}", F::NAME);
    }
    for (attrs, change, expected) in [
        (Attrs::USER_DATA, Change::new().software(1), false),
        (Attrs::USER_DATA, Change::new().global(true), true),
        (Attrs::KERNEL_DATA, Change::new().software(1), true),
        (Attrs::KERNEL_DATA, Change::new().global(false), true),
    ] {
        check::<X86>(attrs, change, expected);
        check::<Arm64K4>(attrs, change, expected);
    }
    // A page that becomes global in a block, which is split for it.
    let platform = Hosted::new(16, 12);
    let mut space = Space::<X86>::new(&platform).unwrap();
    map(&mut space, span(0, M2), 0, Attrs::USER_DATA).unwrap();
    space.make_live();
    let mut gather = space.gather();
    let global = Change::new().global(true);
    gather.protect_page(Va::new(3 * K4), global).unwrap();
    gather.finish(|_| ());
    platform.record();
    unmap(&mut space, span(3 * K4, K4)).unwrap();
    assert!(platform.take_log()[0].global);
    // Of a tree that others have made nothing is known.
    let platform = Hosted::new(16, 12);
    let mut space = adopted::<X86>(&platform, 7, 0x65);
    space.make_live();
    platform.record();
    unmap(&mut space, span(0, K4)).unwrap();
    assert!(platform.take_log()[0].global);
}

#[test]
fn what_no_tlb_holds_is_published_with_the_gather() {
    let old = Attrs { accessed: false, ..Attrs::USER_DATA };
    let accessed = Change::new().accessed(true);
    // Publications with the edits, and with the gather; nothing is invalidated.
    let publications = |caps: Caps, changes: &[Change]| {
        let platform = Hosted::new(16, 12).with_caps(caps);
        let mut space = Space::<Arm64K4>::new(&platform).unwrap();
        map(&mut space, span(0, M2), 0, Mapping::new(old).pages_only()).unwrap();
        space.make_live();
        let before = platform.counts();
        let mut gather = space.gather();
        for (page, change) in (0..).zip(changes) {
            gather.protect(span(page * K4, K4), *change).unwrap();
        }
        assert!(gather.is_clean());
        let edited = platform.counts();
        gather.finish(|_| ());
        let counts = platform.counts();
        assert_eq!(counts.invalidations, before.invalidations);
        assert_eq!(counts.completions, before.completions);
        (edited.publications - before.publications, counts.publications - edited.publications)
    };
    assert_eq!(publications(without_flags(0), &[accessed]), (0, 1));
    assert_eq!(publications(without_flags(0), &[accessed, accessed]), (0, 1));
    // To walkers the software bits mean nothing.
    let software = Change::new().software(1);
    assert_eq!(publications(without_flags(0), &[software]), (0, 0));
    assert_eq!(publications(without_flags(0), &[]), (0, 0));
}

#[test]
fn a_dead_space_takes_no_barrier_and_no_invalidation() {
    let platform = Hosted::new(700, 12).with_caps(tablewright_hosted::CAPS);
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    map(&mut space, span(0, 64 * M2), 0, Attrs::USER_DATA).unwrap();
    protect(&mut space, span(K4, K4), Change::new().memory(Memory::NonCacheable)).unwrap();
    protect(&mut space, span(K4, K4), Change::new().memory(Memory::Normal)).unwrap();
    collapse(&mut space, span(0, 64 * M2), BLOCK, true);
    unmap(&mut space, span(0, 32 * M2 + K4)).unwrap();
    let counts = platform.counts();
    assert_eq!((counts.publications, counts.invalidations, counts.completions), (0, 0, 0));
    // What was written is published once, when it becomes live.
    space.make_live();
    assert_eq!(platform.counts().publications, 1);

    // Page by page, like one that was taken out of it while it was live.
    let pages = Mapping::new(Attrs::USER_DATA).pages_only();
    map(&mut space, span(0, 4 * K4), 0, pages).unwrap();
    let mut gather = space.gather();
    assert!(gather.unmap_page(Va::new(0)).unwrap().is_some());
    gather.finish(|_| ());
    let counts = platform.counts();
    // SAFETY: no processor walks the tables.
    unsafe { space.make_dead() };
    let mut gather = space.gather();
    assert!(gather.unmap_page(Va::new(K4)).unwrap().is_some());
    gather.finish(|_| ());
    let now = platform.counts();
    assert_eq!((now.invalidations, now.completions), (counts.invalidations, counts.completions));
}

/// A platform with a walker that writes to a page right after an edit has looked at it, so many
/// looks before it spared.
#[derive(Clone, Copy)]
struct Written<'h>(&'h Hosted, Walker<'h>);

#[derive(Clone, Copy)]
struct Walker<'h>(fn(u64) -> u64, &'h Cell<u32>);

// SAFETY: the entry is read; what a walker does besides is no access of the engine.
unsafe impl Hooks for Walker<'_> {
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: valid, as the caller vouches.
        let entry = unsafe { entry.as_ref() };
        let bits = entry.load();
        let written = (self.0)(bits);
        if written != bits {
            let looks = self.1.get();
            self.1.set(looks.wrapping_sub(1));
            if looks == 0 {
                assert_eq!(entry.compare_exchange(bits, written), Ok(()));
            }
        }
        bits
    }
}

// SAFETY: everything is passed on to the platform inside.
unsafe impl Platform for Written<'_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
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
        self.0.barrier(barrier);
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.0.invalidate(what);
    }
    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(self.1)
    }
}

#[test]
fn a_page_that_is_written_while_it_is_changed_is_dirty() {
    fn check<F: Judged>(walker: fn(u64) -> u64, change: Change) {
        let attrs = Attrs { dirty: false, software: 5, ..Attrs::USER_DATA };
        for spared in 0..4 {
            let (platform, looks) = (Hosted::new(16, 12), Cell::new(u32::MAX));
            let written = Written(&platform, Walker(walker, &looks));
            let mut space = AddressSpace::<F, _>::new(written).unwrap();
            space.make_live();
            map(&mut space, span(K4, K4), K4, attrs).unwrap();
            let mut gather = space.gather();
            looks.set(spared);
            gather.protect(span(K4, K4), change).unwrap();
            let is_written = looks.replace(u32::MAX / 2) > spared;
            gather.finish(|_| ());
            let now = space.query(Va::new(K4)).unwrap().attrs();
            assert_eq!(now.dirty, is_written, "{}, {spared}: {now:?}", F::NAME);
            assert!(is_written || spared != 0);
        }
    }
    // Marked by software bits; present, writable, clean.
    let x86 = |bits| match bits & (7 << 9 | 0x43) {
        0xa03 => bits | 0x40,
        _ => bits,
    };
    let arm = |bits| match bits & (7 << 56 | 1 << 51 | 0x83) {
        0x0508_0000_0000_0083 => bits & !0x80,
        _ => bits,
    };
    check::<X86>(x86, READ_USER);
    check::<Arm64K4>(arm, READ_USER);
    check::<Arm64K4>(arm, Change::new().memory(Memory::NonCacheable));
}

const READ_USER: Change = Change::new().perms(Perms::READ.union(Perms::USER_READ));

/// Both ends of a range lie in one block, which is broken, and its parts are split for both.
#[test]
fn a_hole_in_a_block_that_is_broken_is_cut_at_both_ends() {
    let platform = Hosted::new(64, 12).with_caps(without_flags(0));
    let mut space = Space::<Arm64K4>::new(&platform).unwrap();
    let mapping = Mapping::new(Attrs::KERNEL_DATA).largest(Level::new(2)).without_runs();
    map(&mut space, span(0, G1), 0, mapping).unwrap();
    space.make_live();
    assert_eq!(space.query(Va::new(0)).unwrap().size(), G1);
    unmap(&mut space, span(5 * K4, G1 - M2)).unwrap();
    let found = judge::<Arm64K4>(&platform, space.root()).0;
    let stretches: Vec<_> = found.iter().map(|(first, of)| (*first, of.pa, of.size)).collect();
    let rest = G1 - M2 + 5 * K4;
    assert_eq!(stretches, [(0, 0, 5 * K4), (rest, rest, M2 - 5 * K4)]);
}

/// In place; the table that the collapse has detached is forgotten before another stands there.
#[test]
fn a_split_waits_for_the_collapse_before_it() {
    let platform = Hosted::new(64, 12).with_caps(without_flags(2));
    let mut space = pages_of_a_block::<Arm64K4>(&platform, 0, Attrs::KERNEL_DATA);
    space.make_live();
    let mut gather = space.gather();
    assert_eq!(gather.collapse(span(0, M2), BLOCK, false), Ok(1));
    assert_eq!(platform.counts().completions, 0);
    gather.split(span(0, M2), Level::PAGE).unwrap();
    assert_eq!(platform.counts().completions, 1);
}
