//! Gathers that are dropped, or forgotten, and are not complete.

use super::*;

/// A taken and dropped entry stayed frozen, and an exclusive edit resumed it for something that it
/// had suspended itself.
#[test]
fn what_is_frozen_is_not_resumed() {
    for forgotten in [false, true] {
        let platform = platform(tablewright_hosted::CAPS);
        let space = mapped::<S2>(&platform, 1, BLOCK, pages());
        let mut gather = space.gather();
        unmap(&mut gather, ipa(3 * PAGE, PAGE));
        let taken = gather.unmap(ipa(5 * PAGE, PAGE), |_| ControlFlow::Break(()));
        assert!(taken.unwrap().progress.is_done());
        abandon(gather, forgotten);
        let mut space = space.into_exclusive();
        // What was left is forgotten by now.
        assert!(platform.take_log().iter().any(|told| told.covers(3 * PAGE)));
        // Another edit breaks all of the range.
        let mut gather = space.gather();
        let change = Change::new().memory(Memory::NonCacheable);
        gather.protect(ipa(0, BLOCK), change).unwrap();
        for page in 0..512 {
            let leaf = gather.query(Ipa::new(page * PAGE));
            let expected = (page != 3 && page != 5).then_some(RAM.get() + page * PAGE);
            assert_eq!(leaf.map(|leaf| leaf.frame().get()), expected);
        }
    }
}

/// A taken entry, and a map that failed: the frozen entry was taken for a table, and freed.
#[test]
fn what_is_frozen_is_not_freed() {
    for forgotten in [false, true] {
        let platform = platform(tablewright_hosted::CAPS);
        let space = mapped::<S2>(&platform, 1, 2 * BLOCK, pages());
        let mut gather = space.gather();
        unmap(&mut gather, ipa(BLOCK, BLOCK)); // a table, frozen one level up
        abandon(gather, forgotten);
        let mut space = space.into_exclusive();
        let over = space.map(ipa(0, 2 * BLOCK), RAM, pages());
        assert_eq!(over, Err(EditError::AlreadyMapped(Ipa::new(0))));
        space.map(ipa(BLOCK, BLOCK), RAM, blocks()).unwrap();
        assert_eq!(space.query(Ipa::new(BLOCK)).unwrap().frame(), RAM);
        // A table that was forgotten leaks, and nothing is freed twice.
        // SAFETY: no processor walks the tables (1.).
        unsafe { space.make_dead() };
        assert!(space.destroy(|_| ()).is_ok());
        let left = (platform.tables(), platform.bad_frees());
        assert_eq!(left, (u64::from(forgotten), 0));
    }
}

/// An entry that was taken on x86 and dropped was never invalidated, and the next unmap believed
/// that it was.
#[test]
fn what_was_taken_and_dropped_is_forgotten() {
    let platform = platform(tablewright_hosted::CAPS);
    for forgotten in [false, true] {
        let space = mapped::<Npt<4>>(&platform, 1, PAGE, pages());
        let mut gather = space.gather();
        unmap(&mut gather, ipa(0, PAGE));
        abandon(gather, forgotten);
        let mut gather = space.gather();
        unmap(&mut gather, ipa(0, PAGE));
        // Until it is forgotten, no edit relies on it.
        assert_eq!(gather.is_clean(), !forgotten);
        assert!(gather.finish(|_| ()).is_ok());
        let events = platform.take_events();
        let is_told = |event: &Event| matches!(event, Event::Invalidate(told) if told.covers(0));
        assert!(events.iter().any(is_told) && events.contains(&Event::Complete));
    }
}

/// A frozen entry whose gather was abandoned: no edit counted for it, and an unmap that passed it
/// over did not have it forgotten.
#[test]
fn what_an_unmap_passes_over_is_forgotten() {
    let platform = platform(tablewright_hosted::CAPS);
    let space = mapped::<S2>(&platform, 1, PAGE, pages());
    let mut gather = space.gather();
    unmap(&mut gather, ipa(0, PAGE));
    forget(gather);
    assert_eq!(platform.take_log(), []);
    let mut gather = space.gather();
    unmap(&mut gather, ipa(0, PAGE));
    assert!(gather.finish(|_| ()).is_ok());
    assert!(platform.take_log().iter().any(|told| told.covers(0)));
}

/// A start waited for what an unmap had left in the root, and a write for what was left beside it:
/// for ever where the gather was forgotten.
#[test]
fn a_start_does_not_wait_for_what_was_taken() {
    let platform = platform(BY_FAULTS);
    let space = mapped::<S2>(&platform, 1, 2 * BLOCK, pages());
    let mut gather = space.gather();
    // In the table of the second block, and in the root.
    unmap(&mut gather, ipa(BLOCK, PAGE));
    assert!(gather.top_up(4));
    let far = NewLeaf::new(Ipa::new(1 << 30), RAM, Level::PAGE, Attrs::GUEST_MEMORY).unwrap();
    assert_eq!(gather.map(&far), Ok(Mapped::Installed));
    unmap(&mut gather, ipa(1 << 30, 1 << 30));
    forget(gather);
    let mut start = space.protect_all().unwrap();
    let is_over = (0..100).any(|_| start.step());
    assert!(is_over);
    drop(start);
    // The next page is protected and may be written again; what was taken stays claimed.
    assert_eq!(space.open(Ipa::new(BLOCK + PAGE), true), Ok(()));
    let leaf = space.query(Ipa::new(BLOCK + PAGE)).unwrap();
    assert!(!leaf.attrs().perms.contains(Perms::WRITE));
    let mut gather = space.gather();
    assert!(gather.top_up(4));
    for at in [BLOCK, 1 << 30] {
        let page = NewLeaf::new(Ipa::new(at), RAM, Level::PAGE, Attrs::GUEST_MEMORY).unwrap();
        assert_eq!(gather.map(&page), Err(Refused::Busy(Ipa::new(at))));
    }
}

/// A leaf was read-only already, by an edit whose invalidation was not complete; the second had
/// nothing to invalidate.
#[test]
fn what_is_protected_already_is_not_complete() {
    let platform = platform(tablewright_hosted::CAPS);
    let space = mapped::<Npt<4>>(&platform, 1, PAGE, pages());
    let page = ipa(0, PAGE);
    type Edit = fn(&mut shared::Gather<'_, Npt<4>, &Threads>, Span<Ipa>) -> Protected;
    let edits: [Edit; 3] = [
        |gather, page| gather.protect(page, read_only()).unwrap(),
        |gather, page| gather.age(page, |_| ()).unwrap(),
        |gather, page| gather.clear_dirty(page, |_| ()).unwrap(),
    ];
    for edit in edits {
        let (mut first, mut second) = (space.gather(), space.gather());
        assert!(edit(&mut first, page).changed && !first.is_clean());
        assert!(!edit(&mut second, page).changed && !second.is_clean());
        // Issued is not complete.
        let issued = first.issue();
        assert!(!edit(&mut first, page).changed && !first.is_clean());
        let _complete = issued.complete();
        assert!(first.finish(|_| ()).is_ok() && second.finish(|_| ()).is_ok());
        // Complete is complete.
        assert!(!edit(&mut first, page).changed && first.is_clean());
    }
}

/// A harvest was under way when the host took writing away for good: the zap found the page
/// read-only, and no processor was told.
#[test]
fn a_zap_knows_of_a_harvest_under_way() {
    let platform = platform(BY_FAULTS);
    let mut cells = [const { SlotCell::new() }; 1];
    let guest = Guest::new(share::<Ept<4>>(&platform, 1), &mut cells);
    let ram = Slot::memory(ipa(0, BLOCK), 0).with_log(Log::ByFault);
    guest.insert(ram).unwrap();
    let mut words = [const { AtomicU64::new(0) }; 8];
    let bitmap = Bitmap::new(&mut words, 512).unwrap();
    let mut gather = guest.gather();
    write_page_5(&mut gather, &ram, &bitmap);
    // Thread 1 harvests, and has not finished: the virtual CPU still writes through its TLB.
    let mut harvest = guest.gather();
    harvest.harvest(&ram, &bitmap, 0..512, Harvest::empty(), |_, _| ()).unwrap();
    platform.take_events();
    // Thread 2 protects the page for good, drives the zap to its end, and relies on it.
    let mut zap = guest.zap(ipa(5 * PAGE, PAGE));
    while zap.protect(&mut gather, read_only()).unwrap() != Pass::Over {
        assert!(gather.finish(|_| ()).is_ok());
    }
    let events = platform.take_events();
    let is_told = |event: &Event| matches!(event, Event::Invalidate(told) if told.covers(5 * PAGE));
    let told = events.iter().position(is_told);
    let complete = events.iter().position(|event| *event == Event::Complete);
    assert!(told.is_some() && told < complete, "{events:x?}");
    drop(harvest);
}

/// On x86 a shared collapse in place was not counted, and an unmap by another processor named the
/// level of the block: INVLPGB strides by it, and spares what is cached of tables.
#[test]
fn an_unmap_behind_a_coalesce_on_x86_names_no_level() {
    // As many as a table has pages: the range is named.
    let platform = platform(Caps { invalidate_all_above: 512, ..tablewright_hosted::CAPS });
    let space = share::<X86_64<4>>(&platform, 1);
    let mapping = Mapping::new(Attrs::USER_DATA).pages_only();
    assert_eq!(space.map_range(va(0, BLOCK), RAM, mapping), Ok(BLOCK));
    // Processor 1 faults on the last page, finds that a block would do, and has not flushed yet.
    let block = NewLeaf::new(Va::new(0), RAM, Level::new(1), Attrs::USER_DATA).unwrap();
    let mut one = space.gather();
    assert_eq!(one.map(&block), Ok(Mapped::Collapsed));
    platform.take_events();
    // Processor 2 takes the block back, twice, as docs/GUESTS.md says.
    let mut two = space.gather();
    for _ in 0..2 {
        unmap(&mut two, va(0, BLOCK));
        assert!(two.finish(|_| ()).is_ok());
        let log = platform.take_log();
        assert_eq!((log.len(), log[0].spans()), (1, vec![(0, BLOCK - 1)]));
        let mut told = Vec::new();
        amd::encode(511, &log[0].invalidation(), |one| told.push(one));
        // 512 pages, and not only what is final.
        assert_eq!(told.len(), 1);
        assert_eq!((told[0].ecx, told[0].rax & 1 << 4), (511, 0));
    }
    assert!(one.finish(|_| ()).is_ok());
}
