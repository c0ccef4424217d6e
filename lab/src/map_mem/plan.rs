//! From a memory map to what the linear map shall hold: which ranges, with which permissions, in
//! how many tables.

use serde::Serialize;

use super::iomem::{Extent, MemoryMap};
use crate::format::{Format, tables_at};
use crate::output::report;
use crate::size::human;

/// A linear map is of the kernel's own space.
pub const NOT_STAGE_1: &str =
    "a linear map is of the first stage, and this machine has tables of the second";

/// Contents of a range of RAM, which decide how it may be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contents {
    /// Plain RAM: read and write, never executed.
    Data,
    /// The kernel's text: read and executed, never written.
    Text,
    /// The kernel's constants: read only.
    Rodata,
}

/// Whole pages of RAM with the same permissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first byte, physical.
    pub start: u64,
    /// The first byte after.
    pub end: u64,
    pub contents: Contents,
}

impl Span {
    /// How long it is.
    pub const fn bytes(self) -> u64 {
        self.end - self.start
    }
}

/// Which leaves may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// The largest that fit, with the contiguous hint where the format has one.
    Largest,
    /// Pages only and no hint, so that the permissions of every page can be changed alone:
    /// `rodata=full`.
    Pages,
}

/// A linear map to be built: physical address `p` at virtual address `format.linear_base() + p`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The shape of the tables.
    pub format: Format,
    /// Which leaves.
    pub leaves: Leaves,
    /// Spans by address; neighbours differ in permissions or are apart.
    pub spans: Vec<Span>,
    /// Bytes of RAM left out because they do not fill a page.
    pub trimmed: u64,
}

/// Why there is no linear map of that memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// An address that entries cannot name.
    #[error("RAM {ram} reaches beyond {end:#x}, where this linear map ends")]
    Beyond {
        /// The offending RAM.
        ram: Extent,
        /// The end of what can be mapped.
        end: u64,
    },
    /// Nothing is left.
    #[error("no RAM fills a whole page of {0} bytes")]
    NoWholePage(u64),
}

impl Plan {
    /// Plans the linear map of all RAM in `map`.
    pub fn new(map: &MemoryMap, format: Format, leaves: Leaves) -> Result<Self, PlanError> {
        let page = format.page_bytes();
        let mut ram: Vec<(u64, u64)> = Vec::new();
        let mut trimmed = 0;
        for &extent in &map.ram {
            let end = format.physical_end();
            if extent.last >= end {
                return Err(PlanError::Beyond { ram: extent, end });
            }
            let bytes = extent.last - extent.start + 1;
            let start = extent.start.next_multiple_of(page);
            let end = (extent.last + 1) / page * page;
            if start >= end {
                trimmed += bytes;
                continue;
            }
            trimmed += bytes - (end - start);
            match ram.last_mut() {
                // Memory plugged in piece by piece is one range to the page table.
                Some(previous) if previous.1 == start => previous.1 = end,
                _ => ram.push((start, end)),
            }
        }
        if ram.is_empty() {
            return Err(PlanError::NoWholePage(page));
        }

        // A page with any text must be executable; a page is read-only only if all of it is.
        let text: Vec<(u64, u64)> = map
            .text
            .iter()
            .map(|text| (text.start / page * page, (text.last + 1).next_multiple_of(page)))
            .collect();
        let rodata: Vec<(u64, u64)> = map
            .rodata
            .iter()
            .map(|rodata| (rodata.start.next_multiple_of(page), (rodata.last + 1) / page * page))
            .filter(|(start, end)| start < end)
            .collect();
        let spans = ram.into_iter().flat_map(|range| cut(range, &text, &rodata)).collect();
        Ok(Self { format, leaves, spans, trimmed })
    }

    /// Bytes of RAM to be mapped.
    pub fn bytes(&self) -> u64 {
        self.spans.iter().map(|span| span.bytes()).sum()
    }

    /// The memory in words, and `parts` of it that are not nothing.
    pub fn head(&self, source: &str, parts: &[(u64, &str)]) -> String {
        let ranges = report::counted(self.spans.len() as u64, "range", "ranges");
        let mut text = format!("{} of RAM in {ranges} ({source})\n", human(self.bytes()));
        let trimmed = [(self.trimmed, "more left out: it fills no page")];
        for (bytes, what) in parts.iter().chain(&trimmed).filter(|(bytes, _)| *bytes > 0) {
            text += &format!("  {} {what}\n", human(*bytes));
        }
        text
    }

    /// A number of tables that is enough, and exact if all leaves are pages.
    pub fn tables_bound(&self) -> u64 {
        let ranges: Vec<_> = self.spans.iter().map(|span| (span.start, span.end)).collect();
        (0..self.format.levels())
            .map(|level| {
                let touched = tables_at(self.format, level, &ranges);
                if self.leaves == Leaves::Largest && self.format.has_leaf(level + 1) {
                    // Such a table is needed only where a span begins or ends within what it
                    // covers.
                    touched.min(2 * ranges.len() as u64)
                } else {
                    touched
                }
            })
            .sum()
    }
}

/// Cuts a range of RAM where the permissions change.
fn cut(ram: (u64, u64), text: &[(u64, u64)], rodata: &[(u64, u64)]) -> Vec<Span> {
    let mut edges: Vec<u64> = text
        .iter()
        .chain(rodata)
        .flat_map(|&(start, end)| [start, end])
        .filter(|&edge| ram.0 < edge && edge < ram.1)
        .chain([ram.0, ram.1])
        .collect();
    edges.sort_unstable();
    edges.dedup();

    let mut spans: Vec<Span> = Vec::new();
    for pair in edges.windows(2) {
        let (start, end) = (pair[0], pair[1]);
        let within =
            |list: &[(u64, u64)]| list.iter().any(|range| range.0 <= start && end <= range.1);
        let contents = if within(text) {
            Contents::Text
        } else if within(rodata) {
            Contents::Rodata
        } else {
            Contents::Data
        };
        match spans.last_mut() {
            Some(previous) if previous.contents == contents => previous.end = end,
            _ => spans.push(Span { start, end, contents }),
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Architecture, Granule, tables_of_pages};
    use proptest::prelude::*;

    fn map(ram: &[(u64, u64)], text: &[(u64, u64)], rodata: &[(u64, u64)]) -> MemoryMap {
        let extents = |list: &[(u64, u64)]| {
            list.iter().map(|&(start, end)| Extent { start, last: end - 1 }).collect()
        };
        MemoryMap { ram: extents(ram), text: extents(text), rodata: extents(rodata) }
    }

    fn pages(map: &MemoryMap) -> Plan {
        Plan::new(map, Format::COMMON, Leaves::Pages).unwrap()
    }

    #[test]
    fn ram_is_trimmed_inwards_and_the_rest_is_reported() {
        let plan = pages(&map(&[(0x1000, 0x9fc00), (0x10_0800, 0x10_0900)], &[], &[]));
        assert_eq!(plan.spans, [Span { start: 0x1000, end: 0x9f000, contents: Contents::Data }]);
        assert_eq!(plan.trimmed, 0xc00 + 0x100);
    }

    #[test]
    fn the_kernel_image_has_its_own_permissions() {
        let plan = pages(&map(&[(0, 0x10_0000)], &[(0x1000, 0x3988)], &[(0x5800, 0x8000)]));
        let list: Vec<_> =
            plan.spans.iter().map(|span| (span.start, span.end, span.contents)).collect();
        assert_eq!(
            list,
            [
                (0, 0x1000, Contents::Data),
                (0x1000, 0x4000, Contents::Text),
                (0x4000, 0x6000, Contents::Data),
                (0x6000, 0x8000, Contents::Rodata),
                (0x8000, 0x10_0000, Contents::Data),
            ]
        );
    }

    #[test]
    fn memory_plugged_in_pieces_is_one_range() {
        let plan = pages(&map(&[(0, 0x1000), (0x1000, 0x2000)], &[], &[]));
        assert_eq!(plan.spans.len(), 1);
    }

    #[test]
    fn ram_beyond_what_an_entry_can_name() {
        let too_far = map(&[(1 << 47, (1 << 47) + 0x1000)], &[], &[]);
        assert!(matches!(
            Plan::new(&too_far, Format::COMMON, Leaves::Pages),
            Err(PlanError::Beyond { .. })
        ));
        let five = Format::new(Architecture::X86_64, Granule::K4, 57).unwrap();
        assert!(Plan::new(&too_far, five, Leaves::Pages).is_ok());
        let last =
            MemoryMap { ram: vec![Extent { start: 0, last: u64::MAX }], ..MemoryMap::default() };
        assert!(Plan::new(&last, five, Leaves::Pages).is_err());
    }

    #[test]
    fn tables_of_sixteen_gigabytes() {
        let range = (1 << 39, (1 << 39) + (16 << 30));
        assert_eq!(tables_of_pages(Format::COMMON, &[range]), 8192 + 18);
        assert_eq!(tables_of_pages(Format::COMMON, &[(0, 4096)]), 4);
    }

    #[test]
    fn large_leaves_need_few_tables() {
        let mut plan = pages(&map(&[(0, 512 << 30)], &[], &[]));
        assert_eq!(plan.tables_bound(), 512 * 512 + 512 + 1 + 1);
        plan.leaves = Leaves::Largest;
        // The root, the table of 1 GiB leaves, and room for one split at each end.
        assert_eq!(plan.tables_bound(), 1 + 1 + 2 + 2);
    }

    proptest! {
        #[test]
        fn every_byte_of_ram_is_planned_once_or_trimmed(
            ram in prop::collection::btree_set(0u64..1 << 30, 2..10),
            text in prop::collection::btree_set(0u64..1 << 30, 2..5),
            rodata in prop::collection::btree_set(0u64..1 << 30, 2..5),
        ) {
            let pairs = |set: &std::collections::BTreeSet<u64>| -> Vec<(u64, u64)> {
                let list: Vec<u64> = set.iter().copied().collect();
                list.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
            };
            let map = map(&pairs(&ram), &pairs(&text), &pairs(&rodata));
            if let Ok(plan) = Plan::new(&map, Format::COMMON, Leaves::Largest) {
                let ram: u64 = map.ram.iter().map(|extent| extent.last - extent.start + 1).sum();
                prop_assert_eq!(plan.bytes() + plan.trimmed, ram);
                prop_assert!(plan.spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
                prop_assert!(plan.spans.iter().all(|span| span.start < span.end));
                prop_assert!(plan.spans.iter().all(|span| (span.start | span.end) % 4096 == 0));
            }
        }
    }
}
