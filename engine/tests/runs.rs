//! Unmapped memory is visited as runs, and not page by page.

use std::ops::ControlFlow;

use tablewright::dirty::marked;
use tablewright::flush::Held;
use tablewright::format::{Arm64K4, X86_64};
use tablewright::{AddressSpace, Attrs, Format, Mapping, Pa, Span, Va};
use tablewright_hosted::Hosted;

const PAGE: u64 = 4096;

fn span(first: u64, pages: u64) -> Span<Va> {
    Span::new(Va::new(first), pages * PAGE).unwrap()
}

fn memory(first: u64, pages: u64) -> Span<Pa> {
    Span::new(Pa::new(first), pages * PAGE).unwrap()
}

/// A live space with these pages: where, how many, of which memory.
fn live<'h, F: Format<Input = Va>>(
    platform: &'h Hosted,
    pieces: &[(u64, u64, u64)],
    mapping: Mapping,
) -> AddressSpace<F, &'h Hosted> {
    let mut space = AddressSpace::<F, _>::new(platform).unwrap();
    for &(at, pages, frame) in pieces {
        space.map(span(at, pages), Pa::new(frame), mapping).unwrap();
    }
    space.make_live();
    space
}

/// Unmaps, and gives all memory of it, in runs.
fn unmap<F: Format<Input = Va>>(
    space: &mut AddressSpace<F, &Hosted>,
    span: Span<Va>,
) -> Vec<Span<Pa>> {
    let mut held: Vec<Held<Span<Pa>>> = Vec::new();
    let mut gather = space.gather();
    let unmapped = gather.unmap(span, |leaf| {
        let rest = match held.last_mut() {
            Some(last) => last.join(leaf.memory()).err(),
            None => Some(leaf.memory()),
        };
        held.extend(rest);
        ControlFlow::Continue(())
    });
    assert!(unmapped.unwrap().is_done());
    let completed = gather.issue().complete();
    let release = |memory| completed.release(memory).expect("of this flush");
    let mut runs: Vec<Span<Pa>> = held.into_iter().map(release).collect();
    completed.finish(|leaf| match runs.last_mut() {
        Some(last) if last.join(leaf.memory()).is_some() => {
            *last = last.join(leaf.memory()).expect("as before");
        }
        _ => runs.push(leaf.memory()),
    });
    runs
}

fn runs<F: Format<Input = Va>>() {
    for mapping in [Mapping::new(Attrs::USER_DATA), Mapping::new(Attrs::USER_DATA).pages_only()] {
        let platform = Hosted::new(64, 12);
        // Two that follow each other, one that does not, one before the first.
        let pieces = [
            (0x4000, 3, 0x8000_0000),
            (0x7000, 16, 0x8000_3000),
            (0x1_7000, 1, 0x9000_0000),
            (0x1_8000, 2, 0x7fff_e000),
        ];
        let mut space = live::<F>(&platform, &pieces, mapping);
        let expected = [memory(0x8000_0000, 19), memory(0x9000_0000, 1), memory(0x7fff_e000, 2)];
        // The table stays.
        space.map(span(0x10_0000, 1), Pa::new(0), mapping).unwrap();
        assert_eq!(unmap(&mut space, span(0x4000, 22)), expected);
        // What is left goes with its table.
        assert_eq!(unmap(&mut space, span(0, 512)), [memory(0, 1)]);
        // Tables in the midst: what is reclaimed comes behind what was held.
        space.map(span(0x1000, 1536), Pa::new(0x1000), mapping).unwrap();
        let mut all = unmap(&mut space, span(0x1000, 1536));
        all.sort_by_key(|run| run.start());
        let joined = all.into_iter().reduce(|one, next| one.join(next).expect("no gap"));
        assert_eq!(joined, Some(memory(0x1000, 1536)));
    }
}

#[test]
fn memory_that_is_consecutive_comes_out_as_one() {
    runs::<Arm64K4>();
    runs::<X86_64<4>>();
}

#[test]
fn memory_of_another_flush_is_not_joined() {
    let platform = Hosted::new(64, 12);
    let pages = Mapping::new(Attrs::USER_DATA).pages_only();
    let mut space = live::<X86_64<4>>(&platform, &[(0x4000, 3, 0x8000_0000)], pages);
    let mut held = Vec::new();
    let mut gather = space.gather();
    for number in 0..2 {
        let unmapped = gather.unmap(span(0x4000 + number * PAGE, 1), |leaf| {
            held.push(leaf.memory());
            ControlFlow::Continue(())
        });
        assert!(unmapped.unwrap().is_done());
        if number == 0 {
            // The first is forgotten, the second is not yet.
            gather.flush(|_| ());
        }
    }
    let second = held.pop().unwrap();
    let mut first = held.pop().unwrap();
    let second = first.join(second).expect_err("it is of another flush");
    let completed = gather.issue().complete();
    assert!(completed.release(first).is_err());
    assert_eq!(completed.release(second).unwrap(), memory(0x8000_1000, 1));
    completed.finish(|_| ());
}

#[test]
fn spans_end_where_addresses_do() {
    let page = |at| Span::new(Va::new(at), PAGE).unwrap();
    let top = page(PAGE.wrapping_neg());
    // What is behind the last address is not the first.
    assert_eq!(top.join(page(0)), None);
}

#[test]
fn marks_of_a_word_are_ranges() {
    for bits in [0, 1, u64::MAX, 1 << 63, 0x8000_0000_0000_0001, 0x00ff_0f00_0000_0006] {
        let pages: Vec<u64> = marked(64, bits).flatten().collect();
        let expected: Vec<u64> =
            (0..64).filter(|at| bits >> at & 1 != 0).map(|at| 64 + at).collect();
        assert_eq!(pages, expected);
    }
}
