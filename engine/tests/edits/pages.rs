//! A format of pages alone does what the format does when it is told to map pages alone: the same errors, entries, tables and
//! invalidations, edit by edit.

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
