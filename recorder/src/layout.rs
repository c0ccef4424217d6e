//! Page numbers for the parts of an address space that a program uses.
//!
//! An address space has holes, and mappings of terabytes of which nothing is ever touched. So
//! numbers are handed out in blocks, when a page in them is first seen: a block is what a mapping
//! has of an aligned 2 MiB (of pages of 4 KiB). Once handed out, a number stays, and no page ever
//! gets a second one.

use std::collections::BTreeMap;

use crate::recording::{Run, join};

/// Pages of a block.
const BLOCK: u64 = 512;

/// Part of the address space that is mapped as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its pages, by address over page size.
    pub run: Run,
    /// Writes stay in this address space.
    pub private: bool,
    /// Reads are allowed now.
    pub readable: bool,
    /// Writes are allowed now.
    pub writable: bool,
    /// It holds code.
    pub executable: bool,
    /// The kernel's name for it.
    pub name: String,
}

/// The mapping of a page. Mappings ascend and do not overlap.
pub fn mapping_of(map: &[Mapping], page: u64) -> Option<&Mapping> {
    let after = map.partition_point(|mapping| mapping.run.first <= page);
    let mapping = map.get(after.checked_sub(1)?)?;
    (page < mapping.run.end()).then_some(mapping)
}

/// The numbers that were handed out.
#[derive(Debug, Default)]
pub struct Layout {
    /// From the first page of a part to how many pages it has, and to the number of the first.
    parts: BTreeMap<u64, (u64, u64)>,
    next: u64,
}

impl Layout {
    /// Hands out numbers for all pages of `runs`, which ascend, and for the rest of their blocks.
    /// `new` is told of the parts that got them.
    pub fn cover(&mut self, runs: &[Run], map: &[Mapping], mut new: impl FnMut(Run, &str)) {
        // Neighbours that come into use together are one part.
        let mut waiting: Option<(Run, &str)> = None;
        for run in runs {
            let mut page = run.first;
            while page < run.end() {
                if let Some((first, (pages, _))) = self.part_of(page) {
                    page = first + pages;
                    continue;
                }
                let part = self.block_around(page, map);
                let name = mapping_of(map, page).map_or("", |mapping| &mapping.name);
                page = part.end();
                self.parts.insert(part.first, (part.pages, self.next));
                self.next += part.pages;
                waiting = match waiting {
                    Some((before, its)) if before.end() == part.first && its == name => {
                        // In the map too, or it would grow with the size of the program.
                        self.parts.remove(&part.first);
                        if let Some((pages, _)) = self.parts.get_mut(&before.first) {
                            *pages += part.pages;
                        }
                        let pages = before.pages + part.pages;
                        Some((Run { pages, ..before }, its))
                    }
                    other => {
                        if let Some((part, name)) = other {
                            new(part, name);
                        }
                        Some((part, name))
                    }
                };
            }
        }
        if let Some((part, name)) = waiting {
            new(part, name);
        }
    }

    /// The numbers of pages that are covered, as runs.
    pub fn numbers(&self, runs: &[Run]) -> Vec<Run> {
        let mut numbers = Vec::with_capacity(runs.len());
        for run in runs {
            let mut page = run.first;
            while let Some((first, (pages, number))) = self.part_of(page) {
                let end = run.end().min(first + pages);
                if end <= page {
                    break;
                }
                numbers.push(Run { first: number + (page - first), pages: end - page });
                page = end;
            }
        }
        join(&mut numbers);
        numbers
    }

    /// Returns the part of a block, around a page without a number, that the page's mapping has, up
    /// to what has numbers already. A page that was unmapped since it was seen is alone.
    fn block_around(&self, page: u64, map: &[Mapping]) -> Run {
        let whole = mapping_of(map, page).map_or(Run { first: page, pages: 1 }, |m| m.run);
        let block = page & !(BLOCK - 1);
        let before = self.parts.range(..page).next_back();
        let after = self.parts.range(page..).next();
        let first =
            block.max(whole.first).max(before.map_or(0, |(&first, &(pages, _))| first + pages));
        let end = (block + BLOCK).min(whole.end()).min(after.map_or(u64::MAX, |(&first, _)| first));
        Run { first, pages: end - first }
    }

    fn part_of(&self, page: u64) -> Option<(u64, (u64, u64))> {
        let (&first, &part) = self.parts.range(..=page).next_back()?;
        (page < first + part.0).then_some((first, part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn run(first: u64, pages: u64) -> Run {
        Run { first, pages }
    }

    fn mapping(first: u64, pages: u64, name: &str) -> Mapping {
        Mapping {
            run: run(first, pages),
            private: true,
            readable: true,
            writable: true,
            executable: false,
            name: name.into(),
        }
    }

    #[test]
    fn numbers_come_by_the_block_and_stay() {
        let map = [mapping(100, 20, "a"), mapping(0x10000, 1 << 30, "b")];
        let mut layout = Layout::default();
        let mut parts = Vec::new();
        layout.cover(&[run(110, 1), run(0x10300, 1)], &map, |part, name| {
            parts.push((part, name.to_owned()));
        });
        assert_eq!(parts, [(run(100, 20), "a".into()), (run(0x10200, 512), "b".into())]);
        assert_eq!(
            layout.numbers(&[run(105, 2), run(0x103fe, 2)]),
            [run(5, 2), run(20 + 0x1fe, 2)]
        );

        // The mapping grows down and up; its old pages keep their numbers.
        parts.clear();
        layout.cover(&[run(98, 24)], &[mapping(90, 40, "a")], |part, name| {
            parts.push((part, name.to_owned()));
        });
        assert_eq!(parts, [(run(90, 10), "a".into()), (run(120, 10), "a".into())]);
        assert_eq!(layout.numbers(&[run(98, 24)]), [run(0, 20), run(540, 4)]);
    }

    #[test]
    fn blocks_that_come_together_are_one_part() {
        let mut layout = Layout::default();
        let mut parts = Vec::new();
        layout.cover(&[run(1000, 4000)], &[mapping(1000, 4000, "")], |part, _| parts.push(part));
        assert_eq!(parts, [run(1000, 4000)]);
        assert_eq!(layout.parts.len(), 1);
    }

    proptest! {
        #[test]
        fn no_page_has_two_numbers_and_no_number_two_pages(
            steps in prop::collection::vec(
                (prop::collection::vec((0u64..5000, 1u64..900), 1..6),
                    prop::collection::vec((0u64..5000, 1u64..200), 1..6)),
                1..8,
            )
        ) {
            let mut layout = Layout::default();
            let mut known: HashMap<u64, u64> = HashMap::new();
            let mut next = 0;
            for (mappings, seen) in steps {
                let mut map: Vec<Mapping> = Vec::new();
                let named = |(f, n)| mapping(f, n, if n % 2 == 0 { "x" } else { "y" });
                let mut mappings: Vec<_> = mappings.into_iter().map(named).collect();
                mappings.sort_by_key(|m| m.run.first);
                for mapping in mappings {
                    if map.last().is_none_or(|last| last.run.end() <= mapping.run.first) {
                        map.push(mapping);
                    }
                }
                let mut seen: Vec<_> = seen.into_iter().map(|(f, n)| run(f, n)).collect();
                join(&mut seen);
                let mut fresh = Vec::new();
                layout.cover(&seen, &map, |part, _| fresh.push(part));
                for part in fresh {
                    for page in part.first..part.end() {
                        prop_assert_eq!(known.insert(page, next), None);
                        next += 1;
                    }
                }
                let pages = seen.iter().flat_map(|r| r.first..r.end());
                let mut expected: Vec<u64> = pages.map(|page| known[&page]).collect();
                expected.sort_unstable();
                let numbers = layout.numbers(&seen);
                let found: Vec<u64> = numbers.iter().flat_map(|r| r.first..r.end()).collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
