//! The crate page-table-generic, with entries of its user's own, as it asks for them.

use page_table_generic::{
    MapConfig, PageTable, PageTableEntry, PhysAddr, TableMeta, UnmapConfig, VirtAddr,
};

use super::super::current;
use super::super::page_table_generic::{Entry, Frames};
use super::calls::{Calls, answer, physical};
use super::subject::{Operation, Subject};
use crate::arena::Arena;

/// An entry whose configuration is its bits.
pub trait Bits: PageTableEntry<PteConfig = u64> {
    /// Of a page that can be written.
    const READ_WRITE: u64;
    /// Of one that can not.
    const READ_ONLY: u64;
    /// Whether these bits allow to write.
    fn is_writable(config: u64) -> bool;
}

impl Bits for Entry {
    const READ_WRITE: u64 = Self::PAGE | Self::WRITABLE;
    const READ_ONLY: u64 = Self::PAGE;

    #[inline]
    fn is_writable(config: u64) -> bool {
        config & Self::WRITABLE != 0
    }
}

const VALID: u64 = 1 << 0;
const TABLE: u64 = 1 << 1;
const READ_ONLY: u64 = 1 << 7;
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;
/// Memory of the second type, inner shareable, accessed, not executable.
const NORMAL: u64 = VALID | 1 << 2 | 0b11 << 8 | 1 << 10 | 0b11 << 53;

/// An entry of Arm, stage 1.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Arm64Entry(u64);

impl PageTableEntry for Arm64Entry {
    type PteConfig = u64;

    #[inline]
    fn new_page(paddr: PhysAddr, config: u64, is_huge: bool) -> Self {
        Self(paddr.as_usize() as u64 | config | if is_huge { 0 } else { TABLE })
    }

    #[inline]
    fn new_table(paddr: PhysAddr) -> Self {
        Self(paddr.as_usize() as u64 | VALID | TABLE)
    }

    #[inline]
    fn paddr(&self, _is_dir: bool) -> PhysAddr {
        PhysAddr::from_usize((self.0 & ADDRESS) as usize)
    }

    #[inline]
    fn config(&self, _is_dir: bool) -> u64 {
        self.0 & !ADDRESS & !TABLE
    }

    #[inline]
    fn present(&self) -> bool {
        self.0 & VALID != 0
    }

    #[inline]
    fn huge(&self, is_dir: bool) -> bool {
        is_dir && self.0 & (VALID | TABLE) == VALID
    }

    #[inline]
    fn unused(&self) -> bool {
        self.0 == 0
    }

    #[inline]
    fn clear(&mut self) {
        self.0 = 0;
    }
}

impl Bits for Arm64Entry {
    const READ_WRITE: u64 = NORMAL;
    const READ_ONLY: u64 = NORMAL | READ_ONLY;

    #[inline]
    fn is_writable(config: u64) -> bool {
        config & READ_ONLY == 0
    }
}

/// Four levels of 512 entries, nothing to flush.
#[derive(Clone, Copy)]
struct FourLevels<E>(E);

impl<E: PageTableEntry> TableMeta for FourLevels<E> {
    type P = E;
    const PAGE_SIZE: usize = 4096;
    const LEVEL_BITS: &[usize] = &[9, 9, 9, 9];
    const MAX_BLOCK_LEVEL: usize = 3;

    #[inline]
    fn flush(_: Option<VirtAddr>) {}
}

/// A table of page-table-generic, and where its tables come from.
pub struct Generic<E: Bits>(Option<(PageTable<FourLevels<E>, Frames>, Arena)>);

impl<E: Bits> Default for Generic<E> {
    fn default() -> Self {
        Self(None)
    }
}

impl<E: Bits> Subject for Generic<E> {
    fn begin(&mut self, arena: Arena) -> Result<(), String> {
        current::set(arena);
        let table = PageTable::new(Frames).map_err(|error| error.to_string())?;
        self.0 = Some((table, arena));
        Ok(())
    }

    fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String> {
        let (table, arena) = self.0.as_mut().ok_or("not begun")?;
        current::set(*arena);
        let one = calls.pages == 1;
        let size = calls.bytes() as usize;
        let mut sum = 0_u64;
        for &start in &calls.starts {
            let vaddr = VirtAddr::from_usize(start as usize);
            match operation {
                Operation::Map => table.map(&MapConfig {
                    vaddr,
                    paddr: PhysAddr::from_usize(physical(start) as usize),
                    size,
                    pte: E::READ_WRITE,
                    allow_huge: false,
                    flush: false,
                }),
                Operation::Protect if one => table.protect_page(vaddr, E::READ_ONLY).map(drop),
                Operation::Protect => table.protect_region(vaddr, size, E::READ_ONLY),
                Operation::Unmap => table.unmap_with_config(&UnmapConfig {
                    start_vaddr: vaddr,
                    size,
                    flush: false,
                }),
                Operation::Query if one => table.query(vaddr).map(|(frame, config, _)| {
                    let frame = frame.as_usize() as u64;
                    sum = sum.wrapping_add(answer(frame, E::is_writable(config)));
                }),
                Operation::Query => {
                    for found in table.walk(vaddr, vaddr + size) {
                        if found.is_final_mapping {
                            let frame = found.pte.paddr(false).as_usize() as u64;
                            let writable = E::is_writable(found.pte.config(false));
                            sum = sum.wrapping_add(answer(frame, writable));
                        }
                    }
                    Ok(())
                }
                Operation::Fault | Operation::Exchange => return Err("has none".to_owned()),
            }
            .map_err(|error| error.to_string())?;
        }
        Ok(sum)
    }

    fn root(&self) -> Option<u64> {
        Some(self.0.as_ref()?.0.root_paddr().as_usize() as u64)
    }

    fn finish(&mut self) {
        if let Some((_, arena)) = &self.0 {
            current::set(*arena);
        }
        self.0 = None;
    }
}
