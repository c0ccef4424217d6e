//! Running out of table frames in the middle of an edit: each edit that takes several tables, with
//! one too few.

mod common;

use std::ops::ControlFlow;

use common::{judge, snapshot};
use tablewright::format::X86_64;
use tablewright::{AddressSpace, Attrs, Change, EditError, Gather, Level, Pa, Perms, Span, Va};
use tablewright_hosted::Hosted;

type Space<'h> = AddressSpace<X86_64<4>, &'h Hosted>;
type Edits<'s, 'h> = Gather<'s, X86_64<4>, &'h Hosted>;

const GIB: u64 = 1 << 30;

fn span(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

/// Tries `edit` on two blocks of 1 GiB with 0 to `needed - 1` frames, and then with as many as it
/// needs.
fn exhaust(needed: u64, mut edit: impl FnMut(&mut Edits) -> Result<(), EditError<Va>>) {
    let platform = Hosted::new(600, 12);
    let mut space = Space::new(&platform).unwrap();
    space.map(span(0, 2 * GIB), Pa::new(0), Attrs::KERNEL_DATA).unwrap();
    let before = snapshot::<X86_64<4>>(&platform, space.root());
    let tables = platform.counts().tables;
    let mut gather = space.gather();
    for frames in 0..needed {
        platform.limit_allocations(Some(frames));
        assert_eq!(edit(&mut gather), Err(EditError::OutOfTables), "with {frames} frames");
        assert_eq!(platform.counts().tables, tables, "frames kept after {frames}");
        before.assert_untouched(&snapshot::<X86_64<4>>(&platform, gather.root()));
    }
    platform.limit_allocations(Some(needed));
    assert_eq!(edit(&mut gather), Ok(()));
    assert_eq!(platform.counts().tables, tables + needed);
    gather.finish(|_| ());
    judge::<X86_64<4>>(&platform, space.root());
}

#[test]
fn a_page_taken_out_of_a_gigabyte_takes_two_tables() {
    exhaust(2, |gather| {
        gather
            .unmap(span(0x12_3000, 4096), |_| ControlFlow::Continue(()))
            .map(|progress| assert!(progress.is_done()))
    });
}

#[test]
fn a_change_from_one_gigabyte_into_the_next_takes_four_tables() {
    exhaust(4, |gather| gather.protect(span(GIB - 4096, 8192), Change::new().perms(Perms::READ)));
}

#[test]
fn a_gigabyte_split_into_pages_takes_a_table_for_each_two_megabytes() {
    let platform = Hosted::new(600, 12);
    let mut space = Space::new(&platform).unwrap();
    space.map(span(0, GIB), Pa::new(0), Attrs::KERNEL_DATA).unwrap();
    let before = snapshot::<X86_64<4>>(&platform, space.root());
    let tables = platform.counts().tables;
    let mut gather = space.gather();
    for frames in [0, 1, 2, 300, 512] {
        platform.limit_allocations(Some(frames));
        assert_eq!(gather.split(span(0, GIB), Level::PAGE), Err(EditError::OutOfTables));
        assert_eq!(platform.counts().tables, tables, "after {frames}");
        before.assert_untouched(&snapshot::<X86_64<4>>(&platform, gather.root()));
    }
    platform.limit_allocations(Some(513));
    assert_eq!(gather.split(span(0, GIB), Level::PAGE), Ok(()));
    gather.finish(|_| ());
}
