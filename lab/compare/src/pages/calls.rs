//! Which pages the calls are about: ranges of as many pages, scattered over 1 GiB of tables that
//! exist.

use super::super::subject::Work;
use crate::judge::Expected;
use crate::random::Random;

/// Tables of pages: of 1 GiB, or of 32 MiB where there are assertions, whose figures say nothing.
pub const TABLES: u64 = if cfg!(debug_assertions) { 16 } else { 512 };
/// Pages that one table maps: the most that a call can be about.
pub const MOST: u64 = 512;

/// Into how many parts the calls of a round are divided.
const PARTS: usize = 16;

/// Calls of one kind.
pub struct Calls {
    /// Pages in each call.
    pub pages: u64,
    /// The first virtual address of each, in the order of the calls.
    pub starts: Vec<u64>,
}

impl Calls {
    /// As many ranges as each table has room for, from its start on, in an order that no prefetcher
    /// foresees. Below a whole table its last page is left out.
    pub fn scattered(pages: u64) -> Self {
        let in_table = if pages == MOST { 1 } else { (MOST - 1) / pages };
        let mut starts: Vec<u64> = (0..TABLES)
            .flat_map(|table| {
                (0..in_table)
                    .map(move |range| Work::VIRTUAL + (table * MOST + range * pages) * Work::PAGE)
            })
            .collect();
        let mut random = Random(pages);
        for last in (1..starts.len()).rev() {
            let other = random.below(last as u64 + 1) as usize;
            starts.swap(last, other);
        }
        Self { pages, starts }
    }

    /// The last page of every table, which stays mapped for as long as calls are about less than a
    /// table, so that no table is ever empty. None where they are about whole tables.
    pub fn kept(pages: u64) -> Option<Self> {
        (pages < MOST).then(|| Self {
            pages: 1,
            starts: (1..=TABLES)
                .map(|table| Work::VIRTUAL + (table * MOST - 1) * Work::PAGE)
                .collect(),
        })
    }

    /// The same calls in parts of as many each, but for the last. An interruption lengthens one
    /// part, and not all.
    pub fn parts(&self) -> Vec<Self> {
        let each = self.count().div_ceil(PARTS).max(1);
        let part = |starts: &[u64]| Self {
            pages: self.pages,
            starts: starts.to_vec(),
        };
        self.starts.chunks(each).map(part).collect()
    }

    /// How many calls there are.
    pub fn count(&self) -> usize {
        self.starts.len()
    }

    /// What each call is about.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.pages * Work::PAGE
    }

    /// What all queries together should find: the sum of all physical addresses, and one more for
    /// each page that can be written.
    pub fn sum(&self, writable: bool) -> u64 {
        self.starts
            .iter()
            .flat_map(|start| (0..self.pages).map(move |page| start + page * Work::PAGE))
            .fold(0, |sum, at| {
                sum.wrapping_add(answer(physical(at), writable))
            })
    }

    /// What should be mapped, upwards: these ranges, if they are mapped and in this way, and what
    /// is kept.
    pub fn expected(&self, kept: Option<&Self>, mapped: Option<bool>) -> Vec<Expected> {
        let ranges = |calls: &Self, writable: bool| -> Vec<Expected> {
            let bytes = calls.bytes();
            let expected = |&start: &u64| Expected {
                start,
                frame: physical(start),
                bytes,
                writable,
                executable: false,
                memory: None,
            };
            calls.starts.iter().map(expected).collect()
        };
        let mut all = mapped.map_or_else(Vec::new, |writable| ranges(self, writable));
        all.extend(kept.into_iter().flat_map(|kept| ranges(kept, true)));
        all.sort_unstable_by_key(|range| range.start);
        all
    }
}

/// Where an address is mapped to.
#[inline(always)]
pub const fn physical(virtual_address: u64) -> u64 {
    virtual_address - Work::VIRTUAL + Work::PHYSICAL
}

/// What a query adds to the sum that all queries make.
#[inline(always)]
pub fn answer(physical: u64, writable: bool) -> u64 {
    physical.wrapping_add(u64::from(writable))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_apart_and_each_lies_in_one_table() {
        for pages in [1, 3, 4, 16, 64, 300, 511, 512] {
            let calls = Calls::scattered(pages);
            let kept = Calls::kept(pages);
            let expected = calls.expected(kept.as_ref(), Some(false));
            assert!(
                expected
                    .windows(2)
                    .all(|pair| pair[0].start + pair[0].bytes <= pair[1].start)
            );
            let table = MOST * Work::PAGE;
            assert!(
                expected.iter().all(|range| {
                    range.start / table == (range.start + range.bytes - 1) / table
                })
            );
            let last = expected.last().unwrap();
            assert_eq!(last.start + last.bytes, Work::VIRTUAL + TABLES * table);
            assert_eq!(kept.is_none(), pages == 512);
        }
        assert_eq!(Calls::scattered(1).count(), TABLES as usize * 511);
        for pages in [1, 64, 512] {
            let calls = Calls::scattered(pages);
            let parts = calls.parts();
            assert_eq!(parts.len(), PARTS);
            let all: Vec<u64> = parts.into_iter().flat_map(|part| part.starts).collect();
            assert_eq!(all, calls.starts);
        }
        assert_eq!(Calls::scattered(512).count(), TABLES as usize);
    }
}
