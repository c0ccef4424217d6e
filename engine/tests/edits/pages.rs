//! A format of pages alone does what the format does when it is told to map pages alone: the same
//! errors, entries, tables and invalidations, edit by edit.

use super::*;
use common::Dice;
use tablewright::Format;
use tablewright::format::PagesOnly;

/// What can be seen of a space from outside.
type Seen = (Vec<(u64, u64)>, u64, Vec<Told>);

fn seen<F: Format<Input = Va>>(space: &AddressSpace<F, &Hosted>, platform: &Hosted) -> Seen {
    let mut leaves = Vec::new();
    space.walk_all(|leaf| leaves.push((leaf.input().get(), leaf.descriptor())));
    (leaves, space.count_tables(), platform.take_log())
}

/// An edit of random pages around the ends of tables; the seed says which.
fn edit<F: Format<Input = Va>>(
    space: &mut AddressSpace<F, &Hosted>,
    dice: &Dice,
) -> Result<Option<u64>, EditError<Va>> {
    let page = 1 << F::PAGE_SHIFT;
    let table = page << F::INDEX_BITS;
    let first = dice.roll(3) * table + dice.roll(4) * table / 4;
    let size = match dice.roll(3) {
        0 => page,
        1 => (1 + dice.roll(20)) * page,
        _ => (1 + dice.roll(2)) * table,
    };
    let at = span(first, size);
    let frame = Pa::new(dice.roll(8) * table);
    let mut gather = space.gather();
    let done = match dice.roll(4) {
        0 | 1 => {
            let mapping = Mapping::new(Attrs::USER_DATA).pages_only();
            gather.map(at, frame, mapping).map(|()| None)
        }
        2 => gather.unmap(at, keep_going).map(|progress| match progress {
            Progress::Done => None,
            Progress::Stopped(at) => Some(at.get()),
        }),
        _ => {
            let attrs = [Attrs::USER_DATA, Attrs::USER_RODATA, Attrs::USER_TEXT];
            let perms = match dice.roll(4) {
                0 => Perms::empty(),
                kind => attrs[kind as usize - 1].perms,
            };
            let memory = [Memory::Normal, Memory::NonCacheable][dice.roll(2) as usize];
            let change = Change::new().perms(perms).memory(memory);
            gather.protect(at, change).map(|()| None)
        }
    };
    gather.finish(|_| ());
    done
}

fn a_format_of_pages_alone_edits_as_the_format_that_maps_pages_alone<F: Judged>() {
    for seed in 0..12 {
        let caps = match seed % 3 {
            0 => without_flags(0),
            1 => without_flags(2),
            _ => tablewright::hosted::CAPS,
        };
        let platforms = [0, 1].map(|_| Hosted::new(64, F::PAGE_SHIFT).with_caps(caps));
        let mut format = AddressSpace::<F, _>::new(&platforms[0]).unwrap();
        let mut pages = AddressSpace::<PagesOnly<F>, _>::new(&platforms[1]).unwrap();
        if seed % 4 != 0 {
            format.make_live();
            pages.make_live();
        }
        for platform in &platforms {
            platform.record();
        }
        let dice = [Dice::new(seed), Dice::new(seed)];
        for step in 0..60 {
            let done = edit(&mut format, &dice[0]);
            assert_eq!(edit(&mut pages, &dice[1]), done, "seed {seed}, step {step}");
            let [of_format, of_pages] = [seen(&format, &platforms[0]), seen(&pages, &platforms[1])];
            assert_eq!(of_pages, of_format, "seed {seed}, step {step}");
            let at = Va::new(dice[0].roll(3) << 21);
            let _same = dice[1].roll(3);
            let frames = (
                format.query(at).map(|leaf| (leaf.frame(), leaf.attrs())),
                pages.query(at).map(|leaf| (leaf.frame(), leaf.attrs())),
            );
            assert_eq!(frames.0, frames.1, "seed {seed}, step {step}");
        }
    }
}

#[test]
fn a_format_of_pages_alone_edits_as_x86_64() {
    a_format_of_pages_alone_edits_as_the_format_that_maps_pages_alone::<X86>();
}

#[test]
fn a_format_of_pages_alone_edits_as_arm64() {
    a_format_of_pages_alone_edits_as_the_format_that_maps_pages_alone::<Arm64K4>();
}

#[test]
fn a_format_of_pages_alone_maps_no_block_and_no_run() {
    let platform = Hosted::new(64, 12);
    let mut space = AddressSpace::<PagesOnly<Arm64K4>, _>::new(&platform).unwrap();
    space
        .map(span(0, 2 * M2), Pa::new(0), Attrs::USER_DATA)
        .unwrap();
    let mut leaves = 0;
    space.walk_all(|leaf| {
        assert_eq!((leaf.size(), leaf.is_contiguous()), (K4, false));
        leaves += 1;
    });
    assert_eq!(leaves, 1024);
    assert_eq!(
        space.gather().split(span(0, M2), BLOCK),
        Err(EditError::NoSuchLeaf)
    );
}

/// Twenty pages of one table, of which one is another: none, one of other attributes, one that
/// hardware may write, or a parked one. They are unmapped with a visitor that breaks off after
/// every so many, which goes on where it stopped. Each comes out once, as it was, and is
/// invalidated; before, another page has been unmapped that was like most, or none.
fn pages_of_one_table_come_out_wherever_the_visitor_breaks_off<F: Judged>() {
    const PAGES: u64 = 20;
    let others = [
        None,
        Some(Attrs::USER_RODATA),
        Some(Attrs {
            dirty: false,
            accessed: false,
            ..Attrs::USER_DATA
        }),
        Some(Attrs::USER_DATA.with_perms(Perms::empty())),
    ];
    for (other, odd) in others
        .iter()
        .flat_map(|other| [0, 7, 8, 13, 19].map(|odd| (other, odd)))
    {
        for (stop, known) in (1..=PAGES + 1).flat_map(|stop| [(stop, false), (stop, true)]) {
            let platform = Hosted::new(16, F::PAGE_SHIFT);
            let mut space = Space::<F>::new(&platform).unwrap();
            let at = |number: u64| Va::new(number << F::PAGE_SHIFT);
            let mut expected = Vec::new();
            for number in 0..PAGES + 2 {
                let attrs = match number == 1 + odd {
                    true => *other,
                    false => Some(Attrs::USER_DATA),
                };
                let frame = Pa::new((100 + number) << F::PAGE_SHIFT);
                if let Some(attrs) = attrs {
                    space.map_page(at(number), frame, attrs).unwrap();
                    expected.push((at(number), frame, attrs));
                }
            }
            space.make_live();
            if known {
                let _leaks = space.gather().unmap_page(at(PAGES + 1)).unwrap();
            }
            let kept = [expected.pop(), Some(expected.remove(0))];
            platform.record();

            let (mut first, mut seen, mut stops) = (at(1), Vec::new(), 0);
            let last = Va::new(at(PAGES + 1).get() - 1);
            loop {
                let (mut held, mut gather) = (Vec::new(), space.gather());
                let progress = gather
                    .unmap(Span::inclusive(first, last).unwrap(), |leaf| {
                        held.push(leaf);
                        match held.len() as u64 == stop {
                            true => ControlFlow::Break(()),
                            false => ControlFlow::Continue(()),
                        }
                    })
                    .unwrap();
                let completed = gather.issue().complete();
                for leaf in held {
                    let leaf = completed.release(leaf).unwrap();
                    seen.push((leaf.input(), leaf.frame(), leaf.attrs()));
                }
                completed.finish(|_| panic!("no table was detached"));
                match progress {
                    Progress::Done => break,
                    Progress::Stopped(at) => (first, stops) = (at, stops + 1),
                }
            }
            let what = format!(
                "{}: {other:?} at {odd}, stop after {stop}, {known}",
                F::NAME
            );
            assert_eq!(seen, expected, "{what}");
            assert_eq!(stops, (expected.len() as u64 - 1) / stop, "{what}");
            let log = platform.take_log();
            for (page, ..) in expected {
                assert!(log.iter().any(|told| told.covers(page.get())), "{what}");
                assert!(space.query(page).is_none(), "{what}");
            }
            let left: Vec<_> = leaves(&space).iter().map(|leaf| leaf.input()).collect();
            let kept = kept.iter().flatten().map(|(page, ..)| *page).rev();
            let kept: Vec<_> = kept.filter(|page| !known || *page == at(0)).collect();
            assert_eq!(left, kept, "{what}");
        }
    }
}

for_each_format!(pages_of_one_table_come_out_wherever_the_visitor_breaks_off);
