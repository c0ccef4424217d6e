//! A cursor does to a page what the calls for one page do, wherever it was before: two spaces, one
//! edited by each, are bit for bit alike after any number of edits, as are what they give out and
//! leave to invalidate.

use crate::common::{Decoded, snapshot};
use tablewright::hosted::Hosted;
use tablewright::{
    Address, AddressSpace, Attrs, Caps, Change, EditError, Format, Gather, Leaf, Level, Mapping,
    Pa, Perms, Span, Va,
};

/// A number of the sequence that decides everything.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state >> 11
}

/// All that a leaf says.
fn said<F: Format>(leaf: Option<Leaf<F>>) -> Option<(F::Input, Pa, u64, Attrs, u64)> {
    let leaf = leaf?;
    let (input, frame, size) = (leaf.input(), leaf.frame(), leaf.size());
    Some((input, frame, size, leaf.attrs(), leaf.descriptor()))
}

fn attrs<F: Format>(number: u64) -> Attrs {
    let attrs = match F::GLOBALS {
        true => Attrs::KERNEL_DATA,
        false => Attrs::GUEST_MEMORY,
    };
    // With no permissions it is parked.
    let perms = match number % 5 {
        0 => Perms::empty(),
        1 => attrs.perms - Perms::ANY_WRITE,
        _ => attrs.perms,
    };
    Attrs {
        perms,
        accessed: !number.is_multiple_of(3),
        dirty: !number.is_multiple_of(7),
        ..attrs
    }
}

/// Blocks, runs and pages in three tables, of which the last has not been made.
fn space<F: Decoded>(platform: &Hosted, flags: bool) -> AddressSpace<F, &Hosted> {
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(Level::new(1)));
    let mut space = AddressSpace::<F, _>::new(platform).unwrap();
    let mut map = |first: u64, pages: u64, mapping: Mapping| {
        let span = Span::new(F::Input::from_bits(first), pages * page).unwrap();
        space.map(span, Pa::new(first), mapping).unwrap();
    };
    let data = Mapping::new(attrs::<F>(2));
    map(0, 160, data.largest(Level::PAGE));
    map(block, block / page, data.largest(Level::new(1)));
    map(3 * block, 8, data.pages_only().tables_deny_execution());
    // Where hardware sets flags, what has none is exchanged.
    if flags {
        space.make_live();
    }
    space
}

fn a_cursor_does_what_the_calls_do<F: Decoded>() {
    let (page, block) = (1u64 << F::PAGE_SHIFT, 1u64 << F::shift(Level::new(1)));
    if F::INPUT_BITS < F::shift(Level::new(1)) + 3 {
        return;
    }
    for flags in [false, true] {
        let caps = Caps {
            bbm: 2,
            hardware_access: flags,
            hardware_dirty: flags,
            ..tablewright::hosted::CAPS
        };
        let [one, other] = [0, 1].map(|_| Hosted::new(64, F::PAGE_SHIFT).with_caps(caps));
        let (mut by_calls, mut by_cursor) = (space::<F>(&one, flags), space::<F>(&other, flags));
        let mut state = 0x9e37_79b9_7f4a_7c15;
        let mut changed = 0;
        for _round in 0..24 {
            let (mut calls, mut gather) = (by_calls.gather(), by_cursor.gather());
            let mut cursor = gather.cursor();
            for _ in 0..24 {
                let number = next(&mut state);
                // Near the ends of tables, and now and then no page at all.
                let table = number % 4 * block;
                let near = [0, 1, 2, 17, 40, 150, block / page - 1][number as usize / 8 % 7];
                let odd = u64::from(number.is_multiple_of(61));
                let at = F::Input::from_bits(table + near * page + odd);
                let frame = Pa::new((1 << 30) + (number >> 3 & 0xff) * page);
                let mapping = Mapping::new(attrs::<F>(number >> 5)).pages_only();
                let change = match number >> 4 & 3 {
                    0 => Change::new().write_protect(),
                    1 => Change::new().accessed(false),
                    _ => Change::new().perms(attrs::<F>(number >> 9).perms),
                };
                let known = said(calls.query(at));
                assert_eq!(said(cursor.query(at)), known, "{}: {at}", F::NAME);
                match number >> 7 & 3 {
                    0 => {
                        let mapped = calls.map_page(at, frame, mapping);
                        assert_eq!(cursor.map_page(at, frame, mapping), mapped, "{at}");
                        changed += u64::from(mapped.is_ok());
                    }
                    1 => {
                        let protected = calls.protect_page(at, change);
                        assert_eq!(cursor.protect_page(at, change), protected, "{at}");
                        changed += u64::from(protected.is_ok());
                    }
                    2 => {
                        let [taken, also] = [calls.unmap_page(at), cursor.unmap_page(at)]
                            // SAFETY: it is looked at, and nothing is freed.
                            .map(|it| it.map(|held| held.map(|it| unsafe { it.assume_complete() })))
                            .map(|it| it.map(said));
                        assert_eq!(also, taken, "{at}");
                        changed += u64::from(matches!(taken, Ok(Some(_))));
                    }
                    _ => {}
                }
                let known = said(calls.query(at));
                assert_eq!(said(cursor.space().query(at)), known, "{at}");
            }
            let finish = |gather: Gather<'_, F, &Hosted>| gather.finish(|_| ());
            finish(calls);
            finish(gather);
            let roots = (by_calls.root(), by_cursor.root());
            let found = snapshot::<F>(&other, roots.1);
            assert!(found == snapshot::<F>(&one, roots.0), "{}", F::NAME);
            assert_eq!(one.counts(), other.counts(), "{}", F::NAME);
        }
        assert!(changed > 150, "{}: {changed}", F::NAME);
    }
}

/// Beyond the addresses, forgotten half-way, and in the half that is not the space's.
#[test]
fn a_cursor_that_is_misused_changes_nothing_and_loses_nothing() {
    type F = tablewright::format::Arm64K4;
    let platform = Hosted::new(64, 12);
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
    let here = Va::new(0x40_0000);
    space.make_live();
    let mut gather = space.gather();
    let mut cursor = gather.cursor();
    cursor
        .map_page(here, Pa::new(0x8000), Attrs::USER_DATA)
        .unwrap();
    for far in [1 << F::INPUT_BITS, u64::MAX << F::INPUT_BITS, !0xfff] {
        let far = Va::new(far);
        let beyond = Err(EditError::InputOutOfRange);
        assert_eq!(cursor.query(far).map(|leaf| leaf.frame()), None);
        assert_eq!(
            cursor.map_page(far, Pa::new(0x9000), Attrs::USER_DATA),
            beyond
        );
        assert_eq!(
            cursor.protect_page(far, Change::new().write_protect()),
            beyond
        );
        assert_eq!(cursor.unmap_page(far).err(), beyond.err());
    }
    // Memory beyond the output addresses, and a page that is there already.
    let high = Pa::new(1 << F::OUTPUT_BITS);
    assert!(cursor.map_page(here, high, Attrs::USER_DATA).is_err());
    let again = cursor.map_page(here, Pa::new(0x9000), Attrs::USER_DATA);
    assert_eq!(again, Err(EditError::AlreadyMapped(here)));
    assert_eq!(cursor.query(here).unwrap().frame(), Pa::new(0x8000));
    assert!(cursor.unmap_page(here).is_ok_and(|held| held.is_some()));
    gather.finish(|_| ());
    assert_eq!(platform.counts().invalidations, 1);
    assert!(space.query(here).is_none());
}

for_each_format!(a_cursor_does_what_the_calls_do);
for_each_guest_format!(a_cursor_does_what_the_calls_do);
