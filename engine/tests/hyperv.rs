//! Flushes by hypercall: what a guest encodes a host decodes, and what a host is given it does not
//! believe.

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;
use tablewright::hyperv::{
    Call, Decoded, Flags, FlushEncoder, FlushQueue, HostCaps, Input, LIST, LIST_EX, Output,
    PAGE_WORDS, Pages, Status, decode,
};
use tablewright::shootdown::Cpus;
use tablewright::{Invalidation, Pa, Stale, What};

const HOST: HostCaps = HostCaps {
    processors: PROCESSORS as u32,
    xmm_input: true,
    extended_ranges: true,
    guest_physical: true,
};
const PROCESSORS: usize = Cpus::MOST;
const ROOT: u64 = 0x1234_5000;

fn range(first: u64, last: u64) -> Stale {
    Stale { first, last, level: None, tables: false }
}

fn flush(what: What<'_>, global: bool) -> Invalidation<'_> {
    Invalidation { root: Pa::new(ROOT), id: 7, global, what }
}

fn set(processors: impl IntoIterator<Item = usize>) -> Cpus {
    let mut set = Cpus::EMPTY;
    processors.into_iter().for_each(|vp| assert!(set.insert(vp)));
    set
}

/// Encodes a guest's request, and decodes it as a host does, from a page with rubbish behind it.
fn through(
    encoder: FlushEncoder,
    targets: Option<&Cpus>,
    flush: &Invalidation<'_>,
) -> Result<Option<Decoded>, Status> {
    let mut page = [0xaaaa_aaaa_aaaa_aaaa; PAGE_WORDS];
    let input = encoder.encode(&mut page, targets, flush)?;
    Ok(input.map(|input| decode(input, 0x7000, &page, &HOST).expect("a call that makes sense")))
}

fn all_of(decoded: &Decoded) -> Vec<(u64, u64)> {
    let mut pages: Vec<(u64, u64)> = Vec::new();
    for found in decoded.ranges() {
        assert_eq!(found.size, 4096);
        let last = found.first + (found.count * 4096 - 1);
        match pages.last_mut() {
            Some(before) if before.1 + 1 == found.first => before.1 = last,
            _ => pages.push((found.first, last)),
        }
    }
    pages
}

/// How many elements a range takes.
fn elements(first: u64, last: u64) -> u64 {
    ((last - first) / 4096 + 1).div_ceil(4096)
}

fn ranges() -> impl Strategy<Value = Vec<(u64, u64)>> {
    // Apart from each other, so that they come back as they are.
    let range = (1..200_000u64, prop_oneof![4 => 1..40u64, 1 => 4000..20_000u64]);
    prop::collection::vec(range, 1..40).prop_map(|ranges| {
        let mut at = 0;
        let place = |(gap, pages): (u64, u64)| {
            let first = at + gap;
            at = first + pages;
            (first << 12, (at << 12) - 1)
        };
        ranges.into_iter().map(place).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_host_flushes_what_a_guest_asks_for(
        ranges in ranges(),
        processors in prop::collection::btree_set(prop_oneof![0..64usize, 0..PROCESSORS], 0..200),
        everywhere in prop::bool::weighted(0.1),
        everything in prop::bool::weighted(0.1),
        global in prop::bool::weighted(0.2),
        most_ranges in prop_oneof![Just(16usize), 0..600usize],
    ) {
        let set = set(processors.iter().copied());
        let targets = if everywhere { None } else { Some(&set) };
        let list: Vec<_> = ranges.iter().map(|&(first, last)| range(first, last)).collect();
        let what = if everything { What::Everything } else { What::Ranges(&list) };
        let encoder = FlushEncoder { most_ranges, takes_sets: true };
        let decoded = through(encoder, targets, &flush(what, global)).unwrap();
        if !everywhere && processors.is_empty() {
            prop_assert_eq!(decoded, None);
            return Ok(());
        }
        let decoded = decoded.expect("a call");
        let told: Option<BTreeSet<usize>> = decoded.targets.map(|set| set.iter().collect());
        let banks: BTreeSet<_> = told.iter().flatten().map(|vp| vp / 64).collect();
        let banks = banks.len();
        prop_assert_eq!(told, (!everywhere).then_some(processors));
        prop_assert_eq!(decoded.space, (!global).then_some(ROOT));
        let needed: u64 = ranges.iter().map(|&(first, last)| elements(first, last)).sum();
        let large = decoded.targets.is_some_and(|set| set.iter().any(|vp| vp >= 64));
        let room = if large { LIST_EX - banks } else { LIST };
        let listed = !everything && needed <= room.min(most_ranges) as u64;
        prop_assert_eq!(decoded.is_everything(), !listed);
        // With a list, the flag for what is not global is not allowed.
        prop_assert_eq!(decoded.non_global_only, !listed && !global);
        if listed {
            prop_assert_eq!(all_of(&decoded), ranges);
            prop_assert_eq!(decoded.reps() as u64, needed);
        }
    }
}

#[test]
fn a_page_holds_what_it_holds_and_no_more() {
    let encoder = FlushEncoder { most_ranges: usize::MAX, takes_sets: true };
    let ranges = |count| -> Vec<_> {
        (0..count).map(|page| range(page << 13, (page << 13) + 4095)).collect()
    };
    for (processors, room) in [
        (set([63]), LIST as u64),
        (set([64]), LIST_EX as u64 - 1),
        (set((0..64).map(|bank| bank * 64)), LIST_EX as u64 - 64),
    ] {
        let targets = Some(&processors);
        let send = |count| {
            let ranges = ranges(count);
            let decoded = through(encoder, targets, &flush(What::Ranges(&ranges), false));
            decoded.unwrap().unwrap()
        };
        assert_eq!(send(room).ranges().count() as u64, room);
        assert!(!send(room).is_everything() && send(room + 1).is_everything());
    }
    // As many pages as one element holds, and one more.
    for (pages, needed) in [(4096, 1), (4097, 2), (8192, 2), (8193, 3)] {
        let what = [range(0, pages * 4096 - 1)];
        let decoded = through(encoder, None, &flush(What::Ranges(&what), true)).unwrap().unwrap();
        assert_eq!(decoded.reps(), needed);
        assert_eq!(decoded.ranges().map(|range| range.count).sum::<u64>(), pages);
    }
}

#[test]
fn an_empty_set_is_not_all_and_too_many_are_refused() {
    let none = Cpus::EMPTY;
    let ranges = [range(0, 4095)];
    let what = &flush(What::Ranges(&ranges), false);
    let encoder = FlushEncoder::default();
    assert_eq!(through(encoder, Some(&none), what), Ok(None));
    let nothing = flush(What::Ranges(&[]), true);
    assert_eq!(through(encoder, None, &nothing), Ok(None));
    let old = FlushEncoder { takes_sets: false, ..encoder };
    let far = set([64]);
    assert_eq!(through(old, Some(&far), what), Err(Status::CODE));
    let near = set([63]);
    assert!(through(old, Some(&near), what).unwrap().is_some());
    // Banks of an earlier flush are not there any more.
    let mut page = [0; PAGE_WORDS];
    let wide = set([1, 70, 140, 4000]);
    encoder.encode(&mut page, Some(&wide), what).unwrap();
    let input = encoder.encode(&mut page, Some(&far), what).unwrap().unwrap();
    assert_eq!(decode(input, 0, &page, &HOST).unwrap().targets, Some(far));
}

/// A host that does some elements of a list at a time, or has had enough.
struct Slow {
    step: usize,
    fails_at: usize,
    done: std::cell::RefCell<Vec<u64>>,
}

impl Slow {
    fn call(&self, input: Input, page: &[u64; PAGE_WORDS]) -> Output {
        let flush = decode(input, 0, page, &HOST).unwrap();
        let ranges: Vec<_> = flush.ranges().take(self.step).map(|pages| pages.first).collect();
        if input.start() >= self.fails_at {
            return Output::new(Status(11), input.start());
        }
        let done = input.start() + ranges.len();
        self.done.borrow_mut().extend(ranges);
        Output::new(Status::SUCCESS, done)
    }
}

#[test]
fn a_call_goes_on_where_the_host_has_stopped() {
    let ranges: Vec<_> = (0..10u64).map(|page| range(page << 13, (page << 13) + 4095)).collect();
    let what = flush(What::Ranges(&ranges), false);
    let expected: Vec<u64> = (0..10).map(|page| page << 13).collect();
    let mut page = [0; PAGE_WORDS];
    for step in [1, 3, 10] {
        let host = Slow { step, fails_at: usize::MAX, done: Vec::new().into() };
        let call = |input, page: &_| host.call(input, page);
        let sent = FlushEncoder::default().send(&mut page, None, &what, call);
        assert_eq!(sent, Ok(()));
        assert_eq!(*host.done.borrow(), expected);
    }
    let host = |step, fails_at| Slow { step, fails_at, done: Vec::new().into() };
    let mut send = |host: &Slow| {
        let call = |input, page: &_| host.call(input, page);
        FlushEncoder::default().send(&mut page, None, &what, call)
    };
    assert_eq!(send(&host(3, 6)), Err(Status(11)));
    // One that does nothing and says that all is well would be asked for ever.
    assert_eq!(send(&host(0, 99)), Err(Status::INPUT));
}

// ---- What a host does not believe ----

/// A call that makes sense, of each kind, to be broken.
fn sane(call: Call) -> (Input, [u64; PAGE_WORDS]) {
    let mut page = [0; PAGE_WORDS];
    page[0] = ROOT;
    let mut input = Input::new(call);
    match call {
        Call::Space | Call::List => page[2] = 0b1010,
        Call::SpaceEx | Call::ListEx => {
            page[3] = 0b101;
            (page[4], page[5]) = (1, 2);
            input = input.with_banks(2);
        }
        Call::GuestSpace | Call::GuestList => {}
    }
    let first = call.header() + input.banks();
    if call.is_rep() {
        (page[first], page[first + 1]) = (0x5001, 0x9000);
        input = input.with_reps(2);
    }
    (input, page)
}

#[test]
fn every_field_that_is_wrong_gets_its_status() {
    for call in Call::ALL {
        let (input, page) = sane(call);
        let good = decode(input, 0x3000, &page, &HOST).unwrap();
        assert_eq!(good.call, call);
        assert_eq!(good.ranges().count(), input.reps());
        let bits = input.bits();
        let wrong = |bits: u64| decode(Input::from_bits(bits), 0x3000, &page, &HOST);
        let known: Vec<u16> = Call::ALL.map(Call::code).into();
        for code in (0..=u16::MAX).filter(|code| !known.contains(code)) {
            assert_eq!(wrong(bits & !0xffff | u64::from(code)), Err(Status::CODE));
        }
        for bit in (27..31).chain(44..48).chain(60..64) {
            assert_eq!(wrong(bits | 1 << bit), Err(Status::INPUT), "{call:?}: bit {bit}");
        }
        // Bit 31 is for a hypervisor in between.
        assert!(wrong(bits | 1 << 31).is_ok());
        let reps = |count, start| wrong(input.with_reps(count).with_start(start).bits());
        if call.is_rep() {
            assert_eq!(reps(0, 0), Err(Status::INPUT));
            assert_eq!(reps(2, 2), Err(Status::INPUT));
            assert_eq!(reps(2, 4095), Err(Status::INPUT));
            assert_eq!(reps(2, 1).map(|flush| flush.ranges().count()), Ok(1));
        } else {
            assert_eq!(reps(1, 0), Err(Status::INPUT));
            assert_eq!(reps(0, 1), Err(Status::INPUT));
        }
        let banks = |count| wrong(input.with_banks(count).bits());
        let other = if call.has_set() { 3 } else { 1 };
        assert_eq!(banks(other), Err(Status::INPUT), "{call:?}");
        // The place.
        for off in [1, 4, 7] {
            let at = decode(input, 0x3000 + off, &page, &HOST);
            assert_eq!(at, Err(Status::ALIGNMENT));
        }
        let size = call.header() + input.banks() + input.reps();
        let end = 0x4000 - 8 * size as u64;
        assert!(decode(input, end, &page[..size], &HOST).is_ok());
        assert_eq!(decode(input, end + 8, &page, &HOST), Err(Status::ALIGNMENT));
        assert!(decode(input.fast(), 0, &page[..size], &HOST).is_ok());
        assert_eq!(decode(input.fast(), 0, &page[..size - 1], &HOST), Err(Status::INPUT));
        // More than any page has, from an embedder that hands over more than registers reach.
        if call.is_rep() {
            let most = PAGE_WORDS - call.header() - input.banks();
            let long = [0; 2 * PAGE_WORDS];
            let long = decode(input.with_reps(most + 1).fast(), 0, &long, &HOST);
            assert_eq!(long, Err(Status::INPUT));
        }
        let old = HostCaps { xmm_input: false, ..HOST };
        assert_eq!(decode(input.fast(), 0, &page, &old), Err(Status::INPUT));
        // The parameters.
        let with = |at: usize, word: u64| {
            let mut page = page;
            page[at] = word;
            decode(input, 0x3000, &page, &HOST)
        };
        for bit in 4..64 {
            assert_eq!(with(1, 1 << bit), Err(Status::PARAMETER), "{call:?}: flag {bit}");
        }
        let physical = matches!(call, Call::GuestSpace | Call::GuestList);
        for flag in Flags::all().iter() {
            let fits = match flag {
                _ if physical => false,
                Flags::NON_GLOBAL_ONLY => !call.is_rep(),
                Flags::EXTENDED_RANGES => call.is_rep(),
                _ => true,
            };
            assert_eq!(with(1, flag.bits()).is_ok(), fits, "{call:?}: {flag:?}");
        }
        if call.has_set() {
            assert_eq!(with(2, 2), Err(Status::PARAMETER));
            // All processors, and a header that such a set has not.
            assert_eq!(with(2, 1), Err(Status::INPUT));
            assert_eq!(with(3, 0b111), Err(Status::INPUT));
            assert_eq!(with(3, 0b1), Err(Status::INPUT));
        }
        if physical {
            let old = HostCaps { guest_physical: false, ..HOST };
            assert_eq!(decode(input, 0x3000, &page, &old), Err(Status::CODE));
        }
        if call.is_rep() {
            let first = call.header() + input.banks();
            let extended = |word: u64| {
                let mut page = page;
                page[first] = word;
                if !physical {
                    page[1] = Flags::EXTENDED_RANGES.bits();
                }
                decode(input, 0x3000, &page, &HOST)
            };
            let expected = Pages { first: 5 << 30, count: 7, size: 1 << 30 };
            let large = expected.encode().unwrap();
            assert_eq!(extended(large).unwrap().ranges().next(), Some(expected));
            for bit in 13..21 {
                assert_eq!(extended(large | 1 << bit), Err(Status::PARAMETER), "bit {bit}");
            }
            let old = HostCaps { extended_ranges: false, ..HOST };
            let mut page = page;
            page[1] = Flags::EXTENDED_RANGES.bits();
            assert!(decode(input, 0x3000, &page, &old).is_err());
        }
    }
}

#[test]
fn an_empty_mask_means_all_and_none_beyond_the_last_is_told() {
    let (input, mut page) = sane(Call::Space);
    page[2] = 0;
    assert_eq!(decode(input, 0, &page, &HOST).unwrap().targets, None);
    page[2] = u64::MAX;
    let few = HostCaps { processors: 5, ..HOST };
    assert_eq!(decode(input, 0, &page, &few).unwrap().targets, Some(set(0..5)));
}

/// Random and broken input: no panic, nothing read beyond what was given, and nothing decoded that
/// was not there.
fn believe_nothing(rounds: u64) {
    let dice = common::Dice::new(7);
    let mut accepted = 0u64;
    for _ in 0..rounds {
        let call = Call::ALL[dice.roll(6) as usize];
        let (input, mut page) = sane(call);
        let mut bits = match dice.roll(8) {
            0 => dice.next(),
            _ => input.bits(),
        };
        for _ in 0..dice.roll(3) {
            bits ^= 1 << dice.roll(64);
        }
        for _ in 0..dice.roll(4) {
            let at = dice.roll(10) as usize;
            page[at] = match dice.roll(4) {
                0 => dice.next(),
                1 => 1 << dice.roll(64),
                2 => page[at] ^ 1 << dice.roll(64),
                _ => dice.roll(8),
            };
        }
        let words = match dice.roll(3) {
            0 => dice.roll(512) as usize,
            _ => 512,
        };
        let address = match dice.roll(4) {
            0 => dice.next(),
            _ => dice.roll(512) * 8,
        };
        let host = HostCaps {
            processors: 1 + dice.roll(4096) as u32,
            xmm_input: dice.roll(2) == 0,
            extended_ranges: dice.roll(2) == 0,
            guest_physical: dice.roll(2) == 0,
        };
        let input = Input::from_bits(bits);
        let Ok(flush) = decode(input, address, &page[..words], &host) else {
            continue;
        };
        accepted += 1;
        // Never less than was asked for.
        assert_eq!(flush.ranges().count(), input.reps() - input.start());
        let first = flush.call.header() + input.banks() + input.start();
        for (pages, &asked) in flush.ranges().zip(&page[first..]) {
            assert!(
                pages.first <= asked
                    && asked & !0x1f_ffff <= pages.first + (pages.count * pages.size - 1)
            );
        }
        if let Some(set) = flush.targets {
            assert!(set.iter().all(|vp| vp < host.processors as usize));
            if !flush.call.has_set() {
                assert!(
                    (0..host.processors.min(64))
                        .all(|vp| set.contains(vp as usize) == (page[2] >> vp & 1 != 0))
                );
            }
        }
    }
    assert!(accepted > rounds / 10, "{accepted} of {rounds}");
}

#[test]
fn a_host_believes_nothing() {
    believe_nothing(300_000);
}

#[test]
#[ignore = "ten million inputs take a minute: cargo test --release -p tablewright --test hyperv -- \
            --ignored"]
fn a_host_believes_nothing_ten_million_times() {
    believe_nothing(10_000_000);
}

#[test]
fn nothing_that_was_queued_is_lost() {
    const PUSHED: u64 = 40_000;
    let queue = FlushQueue::<16>::new();
    let (stop, everything) = (AtomicBool::new(false), AtomicU64::new(0));
    let seen = std::thread::scope(|scope| {
        let taker = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            loop {
                let last = stop.load(Ordering::Acquire);
                let all = queue.take(|pages| {
                    assert_eq!(pages.count, 1);
                    assert!(seen.insert(pages.first >> 12));
                });
                everything.fetch_add(u64::from(all), Ordering::Relaxed);
                if last {
                    return seen;
                }
            }
        });
        let pushers: Vec<_> = (0..2)
            .map(|half| {
                let queue = &queue;
                scope.spawn(move || {
                    for page in (half..PUSHED).step_by(2) {
                        queue.push(Pages { first: page << 12, count: 1, size: 4096 });
                    }
                })
            })
            .collect();
        pushers.into_iter().for_each(|pusher| pusher.join().unwrap());
        stop.store(true, Ordering::Release);
        taker.join().unwrap()
    });
    // What is not seen was flushed with everything.
    assert!(seen.len() as u64 == PUSHED || everything.load(Ordering::Relaxed) > 0);
    assert!(!queue.take(|_| panic!("something is left")));
}
