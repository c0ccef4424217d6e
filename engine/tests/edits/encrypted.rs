//! Memory that is encrypted, or shared with a host: the bit that says so, in leaves and tables.

use std::ops::ControlFlow;

use tablewright::format::{Arm64, MAIR, PAT, X86_64, encrypted, shared};
use tablewright::{
    AddressSpace, Attrs, Change, EditError, Format, KernelHalf, Level, Mapping, Pa, Span, Va,
};
use tablewright_hosted::Hosted;

type Sev = X86_64<4, PAT, { encrypted(51) }>;
type Tdx = X86_64<4, PAT, { shared(47) }>;
type Realm = Arm64<12, 48, false, MAIR, { shared(47) }>;
type WideRealm = Arm64<12, 52, true, MAIR, { shared(51) }>;

fn span(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

/// Every entry of every table that is not zero, by level.
fn entries<F: Format<Input = Va>>(platform: &Hosted, root: Pa) -> Vec<(Level, u64)> {
    let mut all = Vec::new();
    let mut below = vec![(root, F::root_level())];
    while let Some((table, level)) = below.pop() {
        for entry in (0..F::entries(level)).filter_map(|index| platform.read(table, index)) {
            if entry == 0 {
                continue;
            }
            all.push((level, entry));
            if let (Some(lower), Some(table)) = (level.down(), F::table_below(entry, level)) {
                below.push((table, lower));
            }
        }
    }
    all
}

fn each_leaf_and_table_has_it<F: Format<Input = Va>>(in_tables: bool, mark: u64) {
    let platform = Hosted::new(64, 12);
    let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
    let secret = Attrs { native: mark, ..Attrs::USER_DATA };
    space.map(span(0, 4 << 20), Pa::new(0x20_0000), secret).unwrap();
    space.map(span(1 << 30, 0x5000), Pa::new(0x9000), Attrs::USER_DATA).unwrap();
    space.make_live();

    // A part is given to the other side: a block is split, and the rest keeps the bit.
    let part = span(0x10_0000, 0x20_0000);
    let counts = platform.counts();
    let mut gather = space.gather();
    gather.protect(part, Change::new().native(0)).unwrap();
    gather.finish(|_| ());
    let told = platform.counts().invalidations - counts.invalidations;
    assert!((1..=2).contains(&told), "{told}");
    for (level, entry) in entries::<F>(&platform, space.root()) {
        if level > Level::PAGE && F::table_below(entry, level).is_some() {
            assert_eq!(entry & mark != 0, in_tables, "{entry:#x}");
        }
    }
    let mut bytes = [0, 0];
    space.walk_all(|leaf| {
        let is_marked = leaf.attrs().native == mark;
        bytes[usize::from(is_marked)] += leaf.size();
        // The frame is that of the memory, without the bit.
        let inside = (0x20_0000..0x60_0000).contains(&leaf.frame().get());
        assert_eq!(inside, leaf.input().get() < 1 << 30, "{leaf:?}");
    });
    assert_eq!(bytes, [0x20_5000, 0x20_0000]);

    // Memory ends below the bit.
    let far = Pa::new(1 << F::OUTPUT_BITS);
    let refused = space.map(span(2 << 30, 0x1000), far, Attrs::USER_DATA);
    assert_eq!(refused, Err(EditError::OutputOutOfRange));

    // Parked and back, moved, unmapped: it stays with its memory.
    let mut gather = space.gather();
    gather.protect(span(0, 0x1000), Change::new().perms(tablewright::Perms::empty())).unwrap();
    gather.protect(span(0, 0x1000), Change::new().perms(Attrs::USER_DATA.perms)).unwrap();
    gather.relocate(span(0, 0x1000), Va::new(3 << 30)).unwrap();
    gather.finish(|_| ());
    let moved = space.query(Va::new(3 << 30)).unwrap();
    assert_eq!((moved.frame(), moved.attrs()), (Pa::new(0x20_0000), secret));
    let mut out = Vec::new();
    let mut gather = space.gather();
    let done = gather.unmap(span(3 << 30, 0x1000), |held| {
        out.push(held);
        ControlFlow::Continue(())
    });
    assert!(done.unwrap().is_done());
    let leaf = gather.flush_with(out.pop().unwrap(), |_| ()).unwrap();
    assert_eq!((leaf.frame(), leaf.attrs().native), (Pa::new(0x20_0000), mark));
}

#[test]
fn sev_has_it_in_tables_and_what_is_encrypted() {
    each_leaf_and_table_has_it::<Sev>(true, Sev::MARK);
}

#[test]
fn tdx_has_it_in_what_is_shared() {
    each_leaf_and_table_has_it::<Tdx>(false, Tdx::MARK);
}

#[test]
fn a_realm_has_it_in_what_is_shared() {
    each_leaf_and_table_has_it::<Realm>(false, Realm::MARK);
    each_leaf_and_table_has_it::<WideRealm>(false, WideRealm::MARK);
    // LPA2: address bit 51 stands in descriptor bit 9.
    assert_eq!((Realm::MARK, WideRealm::MARK), (1 << 47, 1 << 9));
}

/// A change of 2 MiB in pages is one invalidation, and no table.
#[test]
fn a_change_over_pages_is_one_flush() {
    let platform = Hosted::new(16, 12);
    let mut space = AddressSpace::<Sev, _>::new(&platform).unwrap();
    let mapping = Mapping::new(Attrs { native: Sev::MARK, ..Attrs::KERNEL_DATA }).pages_only();
    space.map(span(0, 2 << 20), Pa::new(0), mapping).unwrap();
    space.make_live();
    let counts = platform.counts();
    let mut gather = space.gather();
    gather.protect(span(0, 2 << 20), Change::new().native(0)).unwrap();
    gather.finish(|_| ());
    let now = platform.counts();
    assert_eq!((now.invalidations, now.tables), (counts.invalidations + 1, counts.tables));
    space.walk_all(|leaf| assert_eq!(leaf.attrs().native, 0));
}

#[test]
fn the_kernels_half_has_it_in_its_tables() {
    let platform = Hosted::new(300, 12);
    let space = AddressSpace::<Sev, _>::new(&platform).unwrap();
    let kernel = KernelHalf::new(space).map_err(|(refused, _)| refused).unwrap();
    for index in 256..512 {
        assert_ne!(platform.read(kernel.root(), index).unwrap() & Sev::MARK, 0);
    }
}
