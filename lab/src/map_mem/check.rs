//! Whether the linear map is what was planned: every page, and nothing else.

use tablewright_walker::{Granule as WalkerGranule, Half, Regime};

use super::plan::{Contents, Leaves, Plan};
use crate::format::{Architecture, Format, Granule};
use crate::memory::arena::Arena;
use crate::memory::judge::{Expected, Found, Tree};
use crate::output::progress::Progress;

/// How a processor is set up to read tables of this format.
fn regime(format: Format) -> Regime {
    match format.architecture() {
        Architecture::X86_64 => Regime::X86_64 { levels: format.levels() as u8 },
        Architecture::Riscv64 => Regime::Riscv { levels: format.levels() as u8, guest: false },
        Architecture::Arm64 => Regime::Arm64Stage1 {
            granule: match format.granule() {
                Granule::K4 => WalkerGranule::K4,
                Granule::K16 => WalkerGranule::K16,
                Granule::K64 => WalkerGranule::K64,
            },
            wide: format.address_bits() == 52,
        },
    }
}

/// Reads all tables below `root`, and counts what is there.
pub fn every_page(plan: &Plan, root: u64, arena: Arena) -> Result<Found, String> {
    let tree =
        Tree { arena, root, regime: regime(plan.format), half: Half::Upper, hardware_dirty: false };
    let expected = plan.spans.iter().map(|span| Expected {
        start: plan.format.linear_base().wrapping_add(span.start),
        frame: span.start,
        bytes: span.bytes(),
        writable: span.contents == Contents::Data,
        executable: span.contents == Contents::Text,
        // The engine's MAIR and PAT both begin with ordinary write-back memory.
        memory: Some(0),
    });
    const STEPS: u64 = 100;
    let mut progress = Progress::new(STEPS);
    let (part, mut next) = (plan.bytes() / STEPS, 0);
    tree.check(expected, plan.leaves == Leaves::Pages, |bytes| {
        if bytes >= next {
            progress.step("checking every page");
            next += part;
        }
    })
}

#[cfg(test)]
mod tests {
    use std::ptr::{self, NonNull};
    use std::sync::atomic::Ordering::Relaxed;

    use super::super::builder;
    use super::super::iomem::{Extent, MemoryMap};
    use super::*;
    use crate::memory::arena::Memory;

    const M: u64 = 1 << 20;

    /// Every format there is.
    fn formats() -> impl Iterator<Item = Format> {
        use Architecture::{Arm64, Riscv64, X86_64};
        [
            (Riscv64, Granule::K4, 39),
            (Riscv64, Granule::K4, 48),
            (Riscv64, Granule::K4, 57),
            (X86_64, Granule::K4, 48),
            (X86_64, Granule::K4, 57),
            (Arm64, Granule::K4, 48),
            (Arm64, Granule::K4, 52),
            (Arm64, Granule::K16, 48),
            (Arm64, Granule::K16, 52),
            (Arm64, Granule::K64, 48),
            (Arm64, Granule::K64, 52),
        ]
        .into_iter()
        .map(|(architecture, granule, bits)| Format::new(architecture, granule, bits).unwrap())
    }

    /// Three pieces of RAM, one of them with a kernel in it, that begin and end in the middle of
    /// blocks.
    fn plan(format: Format, leaves: Leaves) -> Plan {
        let extent = |start, end| Extent { start, last: end - 1 };
        let map = MemoryMap {
            ram: vec![
                extent(0, 640 << 10),
                extent(M, 1030 * M),
                extent(0x1_0000_0000, 0x1_4008_0000),
            ],
            text: vec![extent(16 * M, 30 * M + 0x1_0000)],
            rodata: vec![extent(30 * M + 0x1_0000, 36 * M)],
        };
        Plan::new(&map, format, leaves).unwrap()
    }

    fn built(plan: &Plan) -> (u64, Arena) {
        let arena =
            Arena::new(plan.tables_bound(), plan.format.page_shift(), Memory::Warm).unwrap();
        let root = builder::native(plan).unwrap().build(arena).unwrap();
        (root, arena)
    }

    #[test]
    fn the_engine_builds_the_plan_in_every_format() {
        for format in formats() {
            for leaves in [Leaves::Largest, Leaves::Pages] {
                let plan = plan(format, leaves);
                let (root, arena) = built(&plan);
                let found = every_page(&plan, root, arena).unwrap();
                assert_eq!(found.tables, arena.taken());
                let pages = plan.bytes() / format.page_bytes();
                match leaves {
                    Leaves::Pages => {
                        assert_eq!(found.entries, pages, "{format:?}");
                        assert_eq!(found.tables, plan.tables_bound(), "{format:?}");
                    }
                    Leaves::Largest => assert!(found.entries < pages, "{format:?}"),
                }
            }
        }
    }

    /// Every bit that means something, flipped in an entry of each table in turn, must be noticed.
    #[test]
    fn no_changed_entry_passes() {
        for format in formats() {
            for leaves in [Leaves::Largest, Leaves::Pages] {
                let plan = plan(format, leaves);
                let (root, arena) = built(&plan);
                let tables = arena.taken();
                // In order from the root, which is the first frame taken.
                for number in (0..tables).step_by(tables.div_ceil(4) as usize) {
                    let address = root + number * format.page_bytes();
                    let table = NonNull::new(ptr::with_exposed_provenance_mut(address as usize));
                    // SAFETY: the arena hands out its frames in order, so this one was taken; the
                    // engine keeps no reference into it.
                    let entries = unsafe { arena.entries(table.unwrap()) };
                    let used = entries.iter().rposition(|entry| entry.load(Relaxed) != 0);
                    let entry = &entries[used.expect("a table that holds something")];
                    let right = entry.load(Relaxed);
                    let write_permission = match format.architecture() {
                        Architecture::X86_64 => 1 << 1,
                        Architecture::Arm64 => 1 << 7,
                        Architecture::Riscv64 => 1 << 2,
                    };
                    let is_leaf = number + 1 == tables;
                    for flip in [1, 1 << 20, if is_leaf { write_permission } else { 1 }] {
                        entry.store(right ^ flip, Relaxed);
                        let verdict = every_page(&plan, root, arena);
                        assert!(
                            verdict.is_err(),
                            "{format:?} {leaves:?}: {right:#x} ^ {flip:#x} in table {number}"
                        );
                    }
                    entry.store(right, Relaxed);
                }
                every_page(&plan, root, arena).unwrap();
            }
        }
    }

    #[test]
    fn a_page_too_many_a_table_too_many_and_a_loop_are_found() {
        let plan = plan(Format::COMMON, Leaves::Pages);
        let (root, arena) = built(&plan);
        let frame = NonNull::new(ptr::with_exposed_provenance_mut(root as usize));
        // SAFETY: the root was taken from this arena, and the engine keeps no reference into it.
        let entries = unsafe { arena.entries(frame.unwrap()) };
        let verdict = || every_page(&plan, root, arena).unwrap_err();

        let first = entries[256].load(Relaxed);
        entries[300].store(first, Relaxed);
        assert!(verdict().contains("is mapped and should not be"), "{}", verdict());
        entries[300].store(0, Relaxed);
        entries[3].store(first, Relaxed);
        assert!(verdict().contains("0x18000000000 is mapped and should not be"), "{}", verdict());
        entries[3].store(0x1000 | 0x63, Relaxed);
        assert!(verdict().contains("a table at 0x1000, which is not one of ours"), "{}", verdict());
        entries[3].store(0, Relaxed);
        every_page(&plan, root, arena).unwrap();

        // One that nothing points to.
        let root_of_pages = Plan { leaves: Leaves::Largest, ..plan.clone() };
        let larger = Arena::new(root_of_pages.tables_bound() + 1, 12, Memory::Warm).unwrap();
        let root = builder::native(&root_of_pages).unwrap().build(larger).unwrap();
        larger.take().unwrap();
        let message = every_page(&root_of_pages, root, larger).unwrap_err();
        assert!(message.starts_with("took ") && message.contains(" and uses "), "{message}");
    }
}
