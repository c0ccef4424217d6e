//! Flushes in handlers of interrupts, and what waits for walks by software.

use super::*;

/// k01: the handler's message was written over that of the flush that it had interrupted, and a CPU
/// kept the page.
#[test]
fn a_flush_in_a_handler_leaves_the_one_that_it_interrupts_alone() {
    with_world(None, |world| {
        world.switch(1, Some(0));
        world.switch(2, Some(1));
        world.take();
        let page =
            |space, page| Asked { space, ranges: vec![(page, 1)], tables: false, global: false };
        world.handlers.borrow_mut().push((0, page(1, 4)));
        world.edit(0, &page(0, 3), &[]);
        let told = vec![(2, LocalFlush::Everything), (1, part(0, range(3, 1, false)))];
        assert_eq!(world.take(), (told, 2));
        // Nothing is under way any more.
        world.edit(0, &page(1, 4), &[]);
        assert_eq!(world.take().0.len(), 1);
    });
}

#[test]
fn handlers_may_flush_in_handlers() {
    with_world(Some(BITS), |world| {
        (0..3).for_each(|cpu| world.switch(cpu, Some(0)));
        let page = |page| Asked { space: 0, ranges: vec![(page, 1)], tables: false, global: false };
        // The last is made first.
        let handlers = [(1, page(5)), (0, page(4)), (2, page(3))];
        world.handlers.borrow_mut().extend(handlers);
        world.edit(0, &page(2), &[]);
        let (told, interrupts) = world.take();
        assert_eq!(interrupts, 4);
        let doorbells = told.iter().filter(|(_, what)| *what == LocalFlush::Everything);
        assert!(doorbells.count() >= 2);
        // The innermost makes up for those around it.
        let here: Vec<_> = told.iter().filter(|(cpu, _)| *cpu == 0).collect();
        assert_eq!(here, [&(0, space(1))]);
        // What it has missed for the doorbell's sake a CPU makes up for with the next flush, and no
        // more after that.
        world.edit(0, &page(1), &[]);
        world.take();
        world.edit(0, &page(1), &[]);
        let one = part(1, range(1, 1, false));
        assert_eq!(world.take().0, [(1, one), (2, one), (0, one)]);
    });
}

#[test]
fn tables_that_were_cut_off_wait_for_software_that_walks_them() {
    let platform = Threads::new(16, 12, 1);
    let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    let (page, table) = (Span::new(Va::new(0), PAGE), Span::new(Va::new(0), 1 << 21));
    let attrs = Attrs::USER_DATA;
    space.map(page.unwrap(), Pa::new(0), attrs).unwrap();
    let walk = SharedPlatform::enter(&platform);
    let tables = platform.tables();
    let mut gather = space.gather();
    let unmapped = gather.unmap(table.unwrap(), |_| ControlFlow::Continue(()));
    assert!(unmapped.unwrap().is_done());
    let deferred = DeferredReclaim::from(gather.issue().complete()).try_complete().err().unwrap();
    assert_eq!(platform.tables(), tables);
    drop(walk);
    deferred.try_complete().ok().unwrap().finish(|_| ());
    assert!(platform.tables() < tables);
}
