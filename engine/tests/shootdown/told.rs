//! Which CPUs are told, what each forgets, and by which messenger; what is global, and CPUs that
//! are offline.

use super::*;

#[test]
fn a_cpu_that_is_told_forgets_what_is_named_and_one_that_comes_back_all() {
    with_world(Some(BITS), |world| {
        (0..3).for_each(|cpu| world.switch(cpu, Some(0)));
        let page = range(3, 1, false);
        world.flush_ranges(0, &[page]);
        let all = |what: LocalFlush| vec![(1, what), (2, what), (0, what)];
        assert_eq!(world.take(), (all(part(1, page)), 1));
        // One is elsewhere for one flush, one is lazy for another.
        world.switch(1, Some(1));
        world.flush_ranges(0, &[page]);
        world.here(2).be_lazy();
        world.switch(1, Some(0));
        let first = vec![(2, part(1, page)), (0, part(1, page)), (1, space(1))];
        assert_eq!(world.take(), (first, 1));
        world.flush_ranges(0, &[page]);
        let second = vec![(1, part(1, page)), (0, part(1, page))];
        assert_eq!(world.take(), (second, 1));
        // Tables have gone: the lazy one is told, and has missed something.
        let tables = range(3, 1, true);
        world.flush_ranges(0, &[tables]);
        let third = vec![(1, part(1, tables)), (2, space(1)), (0, part(1, tables))];
        assert_eq!(world.take(), (third, 1));
        world.here(2).resume(&world.spaces[0], &On(2, world));
        assert_eq!(world.take(), (vec![], 0));
    });
}

/// A space with a word less than there are CPUs: the last of them loaded it, it was idle all the
/// same, and no flush told that CPU.
#[test]
fn a_cpu_that_a_space_has_no_bit_for_does_not_load_it() {
    const MANY: usize = 66;
    let words = |count| -> Vec<_> { (0..count).map(|_| AtomicU64::new(0)).collect() };
    let mut cpus: Vec<_> = (0..MANY).map(|_| CpuCell::new()).collect();
    let mut inboxes = words(inbox_words(MANY));
    let shootdown = Shootdown::new(&mut cpus, &mut inboxes, None, 10).unwrap();
    let mut set = words(Space::words(MANY));
    with_world(None, |world| {
        let load = |space: &Space<'_>, cpu| {
            let mut loaded = false;
            // SAFETY: as in `World::here`.
            let here = unsafe { shootdown.on(cpu) }.unwrap();
            let done = here.switch(None, Some(space), &On(0, world), |_| loaded = true);
            assert_eq!(loaded, done.is_ok());
            assert_eq!(loaded, !space.is_idle());
            done
        };
        let space = Space::new(Pa::new(0x1000), &mut set[..1]);
        assert_eq!(load(&space, 65), Err(SetTooSmall));
        assert_eq!(load(&space, 63), Ok(()));
        let space = Space::new(Pa::new(0x1000), &mut set);
        assert_eq!(load(&space, 65), Ok(()));
    });
}

#[test]
fn what_was_forgotten_of_a_space_is_itself_forgotten() {
    with_world(Some(5), |world| {
        world.switch(0, Some(0));
        world.flush_ranges(0, &[range(3, 1, false)]);
        assert_eq!(world.take().0.len(), 1);
        (1..5).for_each(|other| world.switch(0, Some(other)));
        world.switch(0, Some(0));
        assert_eq!(world.take().0, []);
        // More spaces than a CPU has views.
        (1..8).for_each(|other| world.switch(0, Some(other)));
        world.flush_ranges(0, &[range(3, 1, false)]);
        world.switch(0, Some(0));
        assert_eq!(world.take().0, [(0, space(1))]);
    });
}

#[test]
fn more_ranges_than_a_message_holds_are_the_whole_space() {
    with_world(Some(BITS), |world| {
        (0..2).for_each(|cpu| world.switch(cpu, Some(0)));
        let most: Vec<_> = (0..16).map(|page| range(page, 1, false)).collect();
        world.flush_ranges(0, &most);
        assert_eq!(world.take().0.len(), 32);
        world.flush_ranges(0, &[&most[..], &most[..1]].concat());
        assert_eq!(world.take().0, [(1, space(1)), (0, space(1))]);
        world.flush_ranges(0, &[]);
        assert_eq!(world.take(), (vec![], 0));
    });
}

#[test]
fn a_batch_is_all_that_was_added_to_it() {
    let root = Pa::new(0x1000);
    let most: Vec<_> = (0..16).map(|page| range(page, 1, false)).collect();
    let mut batch = Batch::new();
    batch.add(&of(What::Ranges(&[]), true));
    assert!(batch.is_empty() && !batch.flush(root, 7).global);
    batch.add(&of(What::Ranges(&most[..9]), false));
    batch.add(&of(What::Ranges(&most[9..]), false));
    let all = Invalidation { id: 7, ..of(What::Ranges(&most), false) };
    assert_eq!(batch.flush(root, 7), all);
    // One that is global, and one too many.
    batch.add(&of(What::Ranges(&most[..1]), true));
    assert_eq!(batch.take().flush(root, 0), of(What::Everything, true));
    assert!(batch.is_empty());
    batch.add(&of(What::Ranges(&most[..1]), true));
    batch.add(&of(What::Everything, false));
    assert_eq!(batch.take().flush(root, 0), of(What::Everything, true));
    batch.add(&of(What::Everything, false));
    assert_eq!(batch.flush(root, 0), of(What::Everything, false));
    assert!(!batch.is_empty());
    // Global twice is global.
    let mut batch = Batch::new();
    most[..2]
        .iter()
        .for_each(|page| batch.add(&of(What::Ranges(std::slice::from_ref(page)), true)));
    assert!(!batch.is_empty());
    assert_eq!(batch.take().flush(root, 0), of(What::Ranges(&most[..2]), true));
}

#[test]
fn a_messenger_is_used_where_it_costs_less_than_interrupts() {
    with_world(Some(BITS), |world| {
        (0..2).for_each(|cpu| world.switch(cpu, Some(0)));
        let hypercall = Hypercall { encoder: FlushEncoder::default(), cost: 15, calls: world };
        let page = [range(3, 1, false)];
        let flush = || {
            world.flush(0, What::Ranges(&page), false, &[&hypercall]);
            (world.hypercalls.take(), world.take().1)
        };
        assert_eq!(flush(), (0, 1));
        world.switch(2, Some(0));
        assert_eq!(flush(), (1, 0));
        // One that the hypervisor has given no number is interrupted; the hypercall names the
        // others.
        world.switch(3, Some(0));
        assert_eq!(flush(), (1, 1));
        // None has it loaded: none is told.
        (1..4).for_each(|cpu| world.switch(cpu, None));
        assert_eq!(flush(), (0, 0));
    });
}

/// One that costs as much as the interrupts does without them.
#[test]
fn a_messenger_is_used_where_it_costs_as_much_as_interrupts() {
    with_world(Some(BITS), |world| {
        (0..3).for_each(|cpu| world.switch(cpu, Some(0)));
        let hypercall = Hypercall { encoder: FlushEncoder::default(), cost: 20, calls: world };
        world.flush(0, What::Ranges(&[range(3, 1, false)]), false, &[&hypercall]);
        assert_eq!((world.hypercalls.take(), world.take().1), (1, 0));
    });
}

#[test]
fn a_message_names_the_level_of_what_is_forgotten() {
    with_world(Some(BITS), |world| {
        (0..2).for_each(|cpu| world.switch(cpu, Some(0)));
        for level in [Some(Level::PAGE), Some(Level::new(1)), Some(Level::new(2)), None] {
            let stale = Stale { level, ..range(3, 1, false) };
            world.flush_ranges(0, &[stale]);
            assert_eq!(world.take().0, [(1, part(1, stale)), (0, part(1, stale))]);
        }
    });
}

#[test]
fn a_cpu_that_does_not_run_is_flushed_before_it_does() {
    with_world(Some(BITS), |world| {
        (0..3).for_each(|cpu| world.switch(cpu, Some(0)));
        // SAFETY: this test is the host (1.).
        let deferred = unsafe { Deferred::new(|cpu| world.flags.get(cpu)) };
        world.flags[1].preempt();
        let page = range(3, 1, false);
        world.flush(0, What::Ranges(&[page]), false, &[&deferred]);
        assert_eq!(world.take(), (vec![(2, part(1, page)), (0, part(1, page))], 1));
        assert_eq!([1, 2].map(|cpu| world.flags[cpu].enter()), [true, false]);
    });
}

#[test]
fn a_cpu_that_was_lazy_is_told_again() {
    with_world(Some(BITS), |world| {
        (0..2).for_each(|cpu| world.switch(cpu, Some(0)));
        let page = range(3, 1, false);
        let uses_again: [&dyn Fn(); 2] =
            [&|| world.here(1).resume(&world.spaces[0], &On(1, world)), &|| {
                world.switch(1, Some(0))
            }];
        for use_again in uses_again {
            world.here(1).be_lazy();
            world.flush_ranges(0, &[page]);
            assert_eq!(world.take().0, [(0, part(1, page))]);
            use_again();
            assert_eq!(world.take().0, [(1, space(1))]);
            world.flush_ranges(0, &[page]);
            assert_eq!(world.take().0, [(1, part(1, page)), (0, part(1, page))]);
        }
    });
}

/// A messenger that reaches all CPUs, and remembers the identifier that it was told.
struct Broadcast(Cell<u16>);

// SAFETY: there is no TLB.
unsafe impl Messenger for Broadcast {
    fn tell(&self, flush: &Invalidation<'_>, _: &mut Cpus) {
        self.0.set(flush.id);
    }

    fn reaches_all(&self) -> bool {
        true
    }
}

#[test]
fn a_broadcast_names_the_identifier_of_the_space() {
    with_world(Some(BITS), |world| {
        let broadcast = Broadcast(Cell::new(0));
        for (index, id) in [(0, 1), (1, 2)] {
            world.switch(0, Some(index));
            world.here(0).flush(
                &world.spaces[index],
                &of(What::Everything, false),
                &[&broadcast],
                &On(0, world),
            );
            assert_eq!(broadcast.0.get(), id);
        }
    });
}

/// A load flushes all without identifiers; who was lazy has loaded nothing.
#[test]
fn without_identifiers_a_cpu_that_was_lazy_flushes_what_it_missed() {
    with_world(None, |world| {
        (0..2).for_each(|cpu| world.switch(cpu, Some(0)));
        let page = range(3, 1, false);
        world.here(1).be_lazy();
        world.flush_ranges(0, &[page]);
        world.take();
        world.here(1).resume(&world.spaces[0], &On(1, world));
        assert_eq!(world.take().0, [(1, space(0))]);
        world.switch(1, Some(1));
        world.flush_ranges(0, &[page]);
        world.take();
        world.switch(1, Some(0));
        assert_eq!(world.take().0, []);
    });
}

/// Memory that says that all have a message.
#[test]
fn no_message_is_there_before_the_first() {
    let mut cpus: Vec<_> = (0..2).map(|_| CpuCell::new()).collect();
    let mut inboxes: Vec<_> = (0..inbox_words(2)).map(|_| AtomicU64::new(u64::MAX)).collect();
    let shootdown = Shootdown::new(&mut cpus, &mut inboxes, None, 10).unwrap();
    with_world(None, |world| {
        // SAFETY: as in `World::here`.
        unsafe { shootdown.on(0) }.unwrap().receive(&On(0, world));
        assert_eq!(world.take().0, []);
    });
}

// ---- What is global ----

#[test]
fn what_is_global_is_forgotten_on_every_cpu() {
    with_world(Some(BITS), |world| {
        // One has the space loaded, one another, one is lazy, one has none, and one has missed a
        // flush.
        world.switch(0, Some(0));
        world.switch(1, Some(1));
        world.switch(2, Some(0));
        world.switch(4, Some(0));
        let page = range(3, 1, false);
        world.here(2).be_lazy();
        world.flush_ranges(0, &[page]);
        world.take();
        world.flush(0, What::Ranges(&[page]), true, &[]);
        let here = with_global(1, page);
        let told = vec![(1, here), (2, space(1)), (2, here), (3, here), (4, here), (0, here)];
        assert_eq!(world.take(), (told, 1));
        // What the second has of the space under its identifier goes when it loads it.
        world.switch(1, Some(0));
        world.switch(4, Some(0));
        assert_eq!(world.take().0, [(1, space(1))]);
        world.flush(0, What::Everything, true, &[]);
        let all = [1, 2, 3, 4, 0].map(|cpu| (cpu, LocalFlush::Everything));
        assert_eq!(world.take(), (all.into(), 1));
        // Table descriptors above global leaves are cached under any identifier.
        world.flush(0, What::Ranges(&[range(3, 1, true)]), true, &[]);
        assert_eq!(world.take(), (all.into(), 1));
    });
}

#[test]
fn a_cpu_that_is_offline_is_told_of_nothing_and_forgets_everything_when_it_comes() {
    with_world(Some(BITS), |world| {
        world.switch(0, Some(0));
        (1..4).for_each(|cpu| world.here(cpu).go_offline(&On(cpu, world)));
        world.flush(0, What::Everything, true, &[]);
        let told = vec![(4, LocalFlush::Everything), (0, LocalFlush::Everything)];
        assert_eq!(world.take(), (told, 1));
        world.here(2).go_online(&On(2, world));
        assert_eq!(world.take().0, [(2, LocalFlush::Everything)]);
        world.flush(0, What::Everything, true, &[]);
        assert_eq!(world.take().0.len(), 3);
    });
}
