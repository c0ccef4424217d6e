//! The edits against a walker on another processor, over all interleavings.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p tablewright --test loom`. The tables are those of a format
//! made for this: two levels of four entries, descriptors like those of x86 with a flag for accessed and one for dirty.
//! The walker does what hardware does: it reads an entry, and sets a flag by an atomic update that checks the entry.
#![cfg(loom)]

use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use loom::sync::Arc;
use loom::thread;
use tablewright::bbm::Rule;
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, Entry, Format, Inexpressible, Invalidation, Kind,
    Level, Mapping, Pa, Perms, Platform, Span, Va,
};

const PRESENT: u64 = 1;
const WRITE: u64 = 2;
const ACCESSED: u64 = 4;
const DIRTY: u64 = 8;
const BLOCK: u64 = 16;
const ADDRESS: u64 = 0x00ff_ffff_ffff_f000;
const SUSPENDED: u64 = 1 << 63;

/// Two levels of four entries.
#[derive(Clone, Copy, Debug)]
struct Tiny;

impl Format for Tiny {
    type Input = Va;
    const NAME: &'static str = "tiny";
    const PAGE_SHIFT: u32 = 12;
    const LEVELS: u8 = 2;
    const INPUT_BITS: u32 = 16;
    const OUTPUT_BITS: u32 = 48;
    const HALVES: bool = true;
    const RULE: Rule = Rule::X86;
    const NATIVE: u64 = 0;
    const LINEAR_BITS: u32 = 64;
    const CONTIGUOUS: u64 = 0;
    const TABLES_RESTRICT: bool = false;
    const SUSPENDED: u64 = SUSPENDED;
    const ASLEEP: u64 = 1 << 62;
    const FROZEN: u64 = 1 << 61;
    const INDEX_BITS: u32 = 2;

    fn is_leaf_level(level: Level) -> bool {
        level.height() <= 1
    }
    fn contiguous(_: Level) -> u32 {
        0
    }
    fn kind(entry: u64, level: Level) -> Kind {
        match (
            entry & PRESENT != 0,
            level == Level::PAGE || entry & BLOCK != 0,
        ) {
            (false, _) => Kind::Invalid,
            (true, true) => Kind::Leaf,
            (true, false) => Kind::Table,
        }
    }
    fn address_mask(level: Level) -> u64 {
        ADDRESS & (u64::MAX << Self::shift(level))
    }
    fn put_address(frame: Pa) -> u64 {
        frame.get()
    }
    fn address(entry: u64, _: Level) -> Pa {
        Pa::new(entry & ADDRESS)
    }
    fn encode(attrs: &Attrs, level: Level) -> Result<u64, Inexpressible> {
        let when = |condition: bool, bit: u64| if condition { bit } else { 0 };
        Ok(PRESENT
            | when(attrs.perms.contains(Perms::WRITE), WRITE)
            | when(attrs.accessed, ACCESSED)
            | when(attrs.dirty, DIRTY)
            | when(level != Level::PAGE, BLOCK))
    }
    fn decode(entry: u64, _: Level) -> Attrs {
        let mut perms = Perms::READ;
        perms.set(Perms::WRITE, entry & WRITE != 0);
        Attrs {
            perms,
            accessed: entry & ACCESSED != 0,
            dirty: entry & DIRTY != 0,
            ..Attrs::KERNEL_RODATA
        }
    }
    fn table(frame: Pa, _: Perms) -> u64 {
        frame.get() | PRESENT
    }
    fn denied(_: u64) -> Perms {
        Perms::empty()
    }
    fn hardware_writes(leaf: u64, _: Level, _: &Caps) -> bool {
        leaf & ACCESSED == 0 || leaf & (WRITE | DIRTY) == WRITE
    }
    fn suspend(entry: u64) -> u64 {
        entry & !PRESENT | SUSPENDED
    }
    fn resume(suspended: u64) -> u64 {
        suspended & !SUSPENDED | PRESENT
    }
}

const FRAMES: usize = 4;

/// A few tables that processors share.
#[derive(Clone)]
struct Memory(Arc<Tables>);

struct Tables {
    entries: Vec<Entry>,
    used: AtomicUsize,
}

impl Memory {
    fn new() -> Self {
        Self(Arc::new(Tables {
            entries: (0..FRAMES * 4).map(|_| Entry::new(0)).collect(),
            used: AtomicUsize::new(0),
        }))
    }

    fn entry(&self, frame: Pa, index: usize) -> &Entry {
        &self.0.entries[((frame.get() >> 12) as usize - 1) * 4 + index]
    }

    /// What a walker does for an access to `va`: it follows the tables and sets the flags. Returns the leaf that it used,
    /// or `None` if there is none, or the leaf changed under its hands (hardware would walk again).
    fn walk(&self, root: Pa, va: u64, write: bool) -> Option<u64> {
        let (mut table, mut level) = (root, Level::new(1));
        loop {
            let entry = self.entry(table, Tiny::index(va, level));
            let bits = entry.follow();
            match Tiny::kind(bits, level) {
                Kind::Invalid => return None,
                Kind::Table => {
                    table = Tiny::address(bits, level);
                    level = level.down()?;
                }
                Kind::Leaf => {
                    if write && bits & WRITE == 0 {
                        return None;
                    }
                    let set = bits | ACCESSED | if write { DIRTY } else { 0 };
                    return entry.compare_exchange(bits, set).ok().map(|()| set);
                }
            }
        }
    }
}

// SAFETY: each frame is handed out once (1.); its four entries lie in the vector (2.); there are no links (3.) and no
// overridden accessors (4.); the walkers of these tests hold nothing
// between accesses (5.); a clone shares the tables (6.).
unsafe impl Platform for Memory {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let number = self.0.used.fetch_add(1, Ordering::Relaxed);
        (number < FRAMES).then(|| Pa::new((number as u64 + 1) << 12))
    }
    unsafe fn free_table(&self, _: Pa, _: Level) {}
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        NonNull::from(self.entry(frame, 0))
    }
    fn barrier(&self, _: Barrier) {}
    fn invalidate(&self, _: &Invalidation) {}
}

fn span(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

const PAGE: u64 = 0x1000;
const BLOCK_SIZE: u64 = 4 * PAGE;

/// Memory whose flags a walker sets.
const FRESH: Attrs = Attrs {
    accessed: false,
    dirty: false,
    ..Attrs::KERNEL_DATA
};

fn with_space(attrs: Attrs, pages: bool) -> (Memory, AddressSpace<Tiny, Memory>) {
    let memory = Memory::new();
    let mut space = AddressSpace::<Tiny, _>::new(memory.clone()).unwrap();
    let mut mapping = Mapping::new(attrs);
    if pages {
        mapping = mapping.pages_only();
    }
    let mut flush = space.flush();
    space
        .map(span(0, BLOCK_SIZE), Pa::new(0x10_0000), mapping, &mut flush)
        .unwrap();
    flush.finish(|_| ());
    space.make_live();
    (memory, space)
}

#[test]
fn a_walker_never_sees_a_table_before_its_entries() {
    loom::model(|| {
        let memory = Memory::new();
        let mut space = AddressSpace::<Tiny, _>::new(memory.clone()).unwrap();
        space.make_live();
        let root = space.root();
        let walker = thread::spawn(move || {
            let linked = memory.entry(root, 0).follow();
            if Tiny::kind(linked, Level::new(1)) == Kind::Table {
                let table = Tiny::address(linked, Level::new(1));
                for index in 0..4 {
                    let entry = memory.entry(table, index).load();
                    assert_eq!(entry & ADDRESS, 0x10_0000 + index as u64 * PAGE);
                }
            }
        });
        let mut flush = space.flush();
        let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
        space
            .map(span(0, BLOCK_SIZE), Pa::new(0x10_0000), mapping, &mut flush)
            .unwrap();
        flush.finish(|_| ());
        walker.join().unwrap();
    });
}

#[test]
fn an_unmap_takes_the_last_word_of_the_walker_with_it() {
    loom::model(|| {
        let (memory, mut space) = with_space(FRESH, true);
        let root = space.root();
        let walkers: Vec<_> = [true, false]
            .map(|write| {
                let memory = memory.clone();
                thread::spawn(move || memory.walk(root, PAGE, write))
            })
            .into();
        let mut flush = space.flush();
        let mut cut = Vec::new();
        let progress = space
            .unmap(span(PAGE, PAGE), &mut flush, |leaf| {
                cut.push(leaf);
                ControlFlow::Continue(())
            })
            .unwrap();
        assert!(progress.is_done());
        let set: u64 = walkers
            .into_iter()
            .filter_map(|walker| walker.join().unwrap())
            .fold(0, |all, bits| all | bits);
        let completed = flush.issue().complete();
        let attrs = completed.release(cut.pop().unwrap()).unwrap().attrs();
        assert_eq!(attrs.accessed, set & ACCESSED != 0);
        assert_eq!(attrs.dirty, set & DIRTY != 0);
        completed.finish(|_| ());
    });
}

#[test]
fn a_change_of_permissions_loses_no_flag() {
    loom::model(|| {
        let (memory, mut space) = with_space(FRESH, true);
        let root = space.root();
        let walker = thread::spawn(move || memory.walk(root, PAGE, true));
        let mut flush = space.flush();
        space
            .protect(
                span(0, BLOCK_SIZE),
                Change::new().write_protect(),
                &mut flush,
            )
            .unwrap();
        flush.finish(|_| ());
        let set = walker.join().unwrap();
        let attrs = space.query(Va::new(PAGE)).unwrap().attrs();
        assert_eq!(
            (attrs.dirty, attrs.accessed),
            (set.is_some(), set.is_some())
        );
        assert!(!attrs.perms.contains(Perms::WRITE));
    });
}

#[test]
fn a_split_in_place_loses_no_flag() {
    loom::model(|| {
        let (memory, mut space) = with_space(FRESH, false);
        let root = space.root();
        let walker = thread::spawn(move || memory.walk(root, PAGE, true));
        let mut flush = space.flush();
        space
            .split(span(0, BLOCK_SIZE), Level::PAGE, &mut flush)
            .unwrap();
        flush.finish(|_| ());
        let set = walker.join().unwrap();
        // The walker marked the block, which stands for all of it, or the page.
        let attrs = space.query(Va::new(PAGE)).unwrap().attrs();
        assert_eq!(
            (attrs.dirty, attrs.accessed),
            (set.is_some(), set.is_some())
        );
    });
}

#[test]
fn a_collapse_in_place_loses_no_flag() {
    loom::model(|| {
        let (memory, mut space) = with_space(FRESH, true);
        let root = space.root();
        let walker = thread::spawn(move || memory.walk(root, PAGE, true));
        let mut flush = space.flush();
        let collapsed = space
            .collapse(span(0, BLOCK_SIZE), Level::new(1), false, &mut flush)
            .unwrap();
        flush.finish(|_| ());
        let set = walker.join().unwrap();
        assert_eq!(collapsed, 1);
        let leaf = space.query(Va::new(PAGE)).unwrap();
        assert_eq!(leaf.size(), BLOCK_SIZE);
        assert!(leaf.attrs().dirty >= set.is_some());
    });
}
