//! The pages that a call covers: one range for all of them, or ranges scattered over tables that
//! exist.

use crate::format::{Format, tables_of_pages};
use crate::memory::judge::Expected;
use crate::random::Random;

/// The first virtual address: not zero, so that no address is right by accident, and the start of
/// a table of every level, so that no table is shared with other addresses.
pub const VIRTUAL: u64 = 1 << 39;
/// The physical address that [`VIRTUAL`] is mapped to.
pub const PHYSICAL: u64 = 1 << 32;
/// Bytes of a page.
pub const PAGE: u64 = Format::COMMON.page_bytes();
/// Bytes that one range can have: up to the end of the lower half of the address space.
pub const MOST_BYTES: u64 = (1 << 47) - VIRTUAL;

/// Tables below scattered calls: of 1 GiB, or of 32 MiB with assertions, whose figures say nothing.
pub const TABLES: u64 = if cfg!(debug_assertions) { 16 } else { 512 };
/// Pages that one table maps: the most of a scattered call.
pub const MOST: u64 = 512;

/// Parts that the scattered calls of a round are timed in.
const PARTS: usize = 16;

/// Calls with the same number of pages.
#[derive(Clone)]
pub struct Calls {
    /// Pages in each call.
    pub pages: u64,
    /// The first virtual address of each, in the order of the calls.
    pub starts: Vec<u64>,
}

impl Calls {
    /// One call for all bytes.
    pub fn range(bytes: u64) -> Self {
        Self { pages: bytes / PAGE, starts: vec![VIRTUAL] }
    }

    /// One call for one page.
    pub fn page(at: u64) -> Self {
        Self { pages: 1, starts: vec![at] }
    }

    /// All ranges that each table has room for, in an order that no prefetcher foresees. The last
    /// page of a table is left out, unless a range covers the table.
    pub fn scattered(pages: u64) -> Self {
        let in_table = if pages == MOST { 1 } else { (MOST - 1) / pages };
        let start = |table, range| VIRTUAL + (table * MOST + range * pages) * PAGE;
        let mut starts: Vec<u64> = (0..TABLES)
            .flat_map(|table| (0..in_table).map(move |range| start(table, range)))
            .collect();
        let mut random = Random(pages);
        for last in (1..starts.len()).rev() {
            starts.swap(last, random.below(last as u64 + 1) as usize);
        }
        Self { pages, starts }
    }

    /// The last page of every table. It stays mapped, so that no table is ever empty. `None` if
    /// calls cover whole tables.
    pub fn kept(pages: u64) -> Option<Self> {
        let last = |table| VIRTUAL + (table * MOST - 1) * PAGE;
        (pages < MOST).then(|| Self { pages: 1, starts: (1..=TABLES).map(last).collect() })
    }

    /// These calls in equal parts, the last one shorter. An interruption lengthens one part alone.
    pub fn parts(&self) -> Vec<Self> {
        let each = self.count().div_ceil(PARTS).max(1);
        let part = |starts: &[u64]| Self { pages: self.pages, starts: starts.to_vec() };
        self.starts.chunks(each).map(part).collect()
    }

    /// The number of calls.
    pub fn count(&self) -> usize {
        self.starts.len()
    }

    /// Pages in all calls.
    pub fn entries(&self) -> u64 {
        self.count() as u64 * self.pages
    }

    /// Bytes of each call.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE
    }

    /// The sum of all [answers](answer) to queries.
    pub fn sum(&self, writable: bool) -> u64 {
        let pages = |start: &u64| {
            let start = *start;
            (0..self.pages).map(move |page| start + page * PAGE)
        };
        self.starts
            .iter()
            .flat_map(pages)
            .fold(0, |sum, at| sum.wrapping_add(answer(physical(at), writable)))
    }

    /// The mapped ranges in ascending order: these calls, if `mapped` says how, and `kept`.
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

/// Tables that map so many bytes from [`VIRTUAL`] on, with the root.
pub fn tables(bytes: u64) -> u64 {
    tables_of_pages(Format::COMMON, &[(VIRTUAL, VIRTUAL + bytes)])
}

/// The physical address that a virtual one is mapped to.
#[inline(always)]
pub const fn physical(virtual_address: u64) -> u64 {
    virtual_address - VIRTUAL + PHYSICAL
}

/// One query's part of the sum of all answers; never zero.
#[inline(always)]
pub fn answer(physical: u64, writable: bool) -> u64 {
    physical.wrapping_add(u64::from(writable))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_gigabytes_take_8210_tables() {
        let calls = Calls::range(16 << 30);
        assert_eq!(calls.entries(), 4_194_304);
        assert_eq!(tables(calls.bytes()), 8210);
        assert_eq!(calls.parts().len(), 1);
        assert_eq!(tables(TABLES * MOST * PAGE), TABLES + 3);
    }

    #[test]
    fn ranges_are_apart_and_each_lies_in_one_table() {
        for pages in [1, 3, 4, 16, 64, 300, 511, 512] {
            let calls = Calls::scattered(pages);
            let kept = Calls::kept(pages);
            let expected = calls.expected(kept.as_ref(), Some(false));
            let apart = |pair: &[Expected]| pair[0].start + pair[0].bytes <= pair[1].start;
            assert!(expected.windows(2).all(apart));
            let table = MOST * PAGE;
            let within =
                |range: &Expected| range.start / table == (range.start + range.bytes - 1) / table;
            assert!(expected.iter().all(within));
            let last = expected.last().unwrap();
            assert_eq!(last.start + last.bytes, VIRTUAL + TABLES * table);
            assert_eq!(kept.is_none(), pages == 512);
        }
        assert_eq!(Calls::scattered(1).count(), TABLES as usize * 511);
        assert_eq!(Calls::scattered(512).count(), TABLES as usize);
        for pages in [1, 64, 512] {
            let calls = Calls::scattered(pages);
            let parts = calls.parts();
            assert_eq!(parts.len(), PARTS);
            let all: Vec<u64> = parts.into_iter().flat_map(|part| part.starts).collect();
            assert_eq!(all, calls.starts);
        }
    }
}
