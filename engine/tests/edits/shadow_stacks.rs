//! Pages of shadow stacks: what takes the permission to write away, or the dirty flag, leaves none.

use tablewright::format::{PAT, SHADOW_STACKS, X86_64};
use tablewright::{AddressSpace, Attrs, Change, Leaf, Pa, Perms, Va};
use tablewright_hosted::Hosted;

use crate::span;

type Cet = X86_64<4, PAT, SHADOW_STACKS>;
type Space<'p> = AddressSpace<Cet, &'p Hosted>;

const STACK: Attrs = Attrs { native: Cet::SHADOW_STACK, ..Attrs::USER_DATA };

/// Whether a leaf is a page of a shadow stack: P and D are set, R/W is clear (SDM 5.6).
fn is_stack(leaf: &Leaf<Cet>) -> bool {
    leaf.descriptor() & 0x43 == 0x41
}

/// The bytes of all leaves that are pages of shadow stacks. No leaf is one that does not say so.
fn stacks(space: &Space<'_>) -> u64 {
    let mut bytes = 0;
    space.walk_all(|leaf| {
        let attrs = leaf.attrs();
        let may_be = attrs.native == Cet::SHADOW_STACK && attrs.perms.contains(Perms::WRITE);
        assert_eq!(is_stack(&leaf), may_be && attrs.dirty, "{leaf:?}");
        bytes += if is_stack(&leaf) { leaf.size() } else { 0 };
    });
    bytes
}

fn edit(space: &mut Space<'_>, first: u64, size: u64, change: Change) {
    let mut gather = space.gather();
    gather.protect(span(first, size), change).unwrap();
    gather.finish(|_| ());
}

#[test]
fn shadow_stacks_are_edited_as_other_pages_are() {
    let platform = Hosted::new(64, 12);
    let mut parent = Space::new(&platform).unwrap();
    let all = span(0, 4 << 20);
    parent.map(span(0, 2 << 20), Pa::new(2 << 20), STACK).unwrap();
    parent.map(span(2 << 20, 2 << 20), Pa::new(8 << 20), Attrs::USER_DATA).unwrap();
    parent.make_live();
    assert_eq!(stacks(&parent), 2 << 20);

    // A page of it, which splits the block; and back.
    edit(&mut parent, 0x5000, 0x1000, Change::new().write_protect());
    assert_eq!(stacks(&parent), (2 << 20) - 0x1000);
    let page = parent.query(Va::new(0x5000)).unwrap().attrs();
    assert!(page.dirty && page.native == Cet::SHADOW_STACK);
    edit(&mut parent, 0x5000, 0x1000, Change::new().perms(Attrs::USER_DATA.perms));
    assert_eq!(stacks(&parent), 2 << 20);

    // Clean, it faults; the handler says that it is written.
    edit(&mut parent, 0, 4 << 20, Change::new().dirty(false));
    assert_eq!(stacks(&parent), 0);
    let page = parent.query(Va::new(0x5000)).unwrap().attrs();
    assert!(!page.dirty && page.perms.contains(Perms::WRITE));
    edit(&mut parent, 0, 0x8000, Change::new().dirty(true));
    assert_eq!(stacks(&parent), 0x8000);

    // Neither process writes what both have.
    let mut child = Space::new(&platform).unwrap();
    let (mut gather, mut into) = (parent.gather(), child.gather());
    gather.fork(all, Change::new().write_protect(), &mut into, |_| ()).unwrap();
    gather.finish(|_| ());
    into.finish(|_| ());
    assert_eq!((stacks(&parent), stacks(&child)), (0, 0));
    edit(&mut child, 0x1000, 0x1000, Change::new().perms(Attrs::USER_DATA.perms));
    assert_eq!((stacks(&parent), stacks(&child)), (0, 0x1000));

    // It moves as it is, and no longer is one when it says so.
    let mut gather = child.gather();
    gather.relocate(span(0, 0x8000), Va::new(1 << 30)).unwrap();
    gather.finish(|_| ());
    assert_eq!(stacks(&child), 0x1000);
    edit(&mut child, (1 << 30) + 0x1000, 0x1000, Change::new().native(0));
    assert_eq!(stacks(&child), 0);
    let page = child.query(Va::new((1 << 30) + 0x1000)).unwrap();
    assert_eq!(page.attrs(), Attrs { native: 0, ..Attrs::USER_DATA });
    assert_eq!(page.descriptor() & 0x42, 0x42);
}
