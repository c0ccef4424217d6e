//! The crate page-table-generic: it asks its user for the entries, and has none of its own.

use std::fmt;
use std::marker::PhantomData;
use std::ptr;

use page_table_generic::{
    FrameAllocator, MapConfig, PageTable, PageTableEntry, PhysAddr, TableMeta, UnmapConfig,
    VirtAddr,
};

use crate::compare::calls::{Calls, answer, physical};
use crate::compare::current;
use crate::compare::subject::{Operation, Subject, Users, none};
use crate::memory::arena::Arena;

/// Frames from the current arena. The crate zeroes what it takes, and clones this for every table
/// it visits.
#[derive(Clone, Copy)]
struct Frames;

impl FrameAllocator for Frames {
    #[inline]
    fn alloc_frame(&self) -> Option<PhysAddr> {
        current::take().map(PhysAddr::from_usize)
    }

    #[inline]
    fn dealloc_frame(&self, frame: PhysAddr) {
        current::give_back(frame.as_usize());
    }

    #[inline]
    fn phys_to_virt(&self, paddr: PhysAddr) -> *mut u8 {
        ptr::with_exposed_provenance_mut(paddr.as_usize())
    }
}

/// The bits of entries of a format, which are also their configuration.
pub trait Bits: Copy + fmt::Debug + Send + Sync + 'static {
    /// The bits of the address, and how far below their place in an address they stand.
    const ADDRESS: (u64, u32);
    /// Set in every entry that is used.
    const VALID: u64;
    /// Set in an entry that points to a table.
    const TABLE: u64;
    /// Set in a page, but not in a block.
    const PAGE: u64;
    /// Set in a block, but not in a page.
    const BLOCK: u64;
    /// The value of a block under a mask.
    const IS_BLOCK: (u64, u64);
    /// The configuration of a page that can be written.
    const READ_WRITE: u64;
    /// The configuration of a page that can not be written.
    const READ_ONLY: u64;

    /// Whether a configuration allows writes.
    #[inline]
    fn is_writable(config: u64) -> bool {
        let bit = Self::READ_WRITE ^ Self::READ_ONLY;
        config & bit == Self::READ_WRITE & bit
    }
}

/// x86.
#[derive(Clone, Copy, Debug)]
pub struct X86;

impl Bits for X86 {
    const ADDRESS: (u64, u32) = (0x000f_ffff_ffff_f000, 0);
    const VALID: u64 = 1 << 0;
    const TABLE: u64 = Self::VALID | 1 << 1;
    const PAGE: u64 = 0;
    const BLOCK: u64 = 1 << 7;
    const IS_BLOCK: (u64, u64) = (Self::BLOCK, Self::BLOCK);
    const READ_WRITE: u64 = Self::READ_ONLY | 1 << 1;
    const READ_ONLY: u64 = Self::VALID | 1 << 63;
}

/// Arm, stage 1.
#[derive(Clone, Copy, Debug)]
pub struct Arm64;

impl Bits for Arm64 {
    const ADDRESS: (u64, u32) = (0x0000_ffff_ffff_f000, 0);
    const VALID: u64 = 1 << 0;
    const TABLE: u64 = Self::VALID | Self::PAGE;
    const PAGE: u64 = 1 << 1;
    const BLOCK: u64 = 0;
    const IS_BLOCK: (u64, u64) = (Self::TABLE, Self::VALID);
    /// Memory of the second type, inner shareable, accessed, not executable.
    const READ_WRITE: u64 = Self::VALID | 1 << 2 | 0b11 << 8 | 1 << 10 | 0b11 << 53;
    const READ_ONLY: u64 = Self::READ_WRITE | 1 << 7;
}

/// RISC-V. An entry that may be read, written or executed is a page, at any level.
#[derive(Clone, Copy, Debug)]
pub struct Riscv64;

impl Bits for Riscv64 {
    const ADDRESS: (u64, u32) = (0x003f_ffff_ffff_fc00, 2);
    const VALID: u64 = 1 << 0;
    const TABLE: u64 = Self::VALID;
    const PAGE: u64 = 0;
    const BLOCK: u64 = 0;
    const IS_BLOCK: (u64, u64) = (1 << 1, 1 << 1);
    /// Accessed and written.
    const READ_WRITE: u64 = Self::READ_ONLY | 1 << 2;
    const READ_ONLY: u64 = Self::VALID | 1 << 1 | 1 << 6 | 1 << 7;
}

/// The address where it stands in an entry.
#[inline]
fn put<B: Bits>(paddr: PhysAddr) -> u64 {
    let (_, down) = B::ADDRESS;
    paddr.as_usize() as u64 >> down
}

/// An entry.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
struct Entry<B>(u64, PhantomData<B>);

impl<B: Bits> PageTableEntry for Entry<B> {
    type PteConfig = u64;

    #[inline]
    fn new_page(paddr: PhysAddr, config: u64, is_huge: bool) -> Self {
        let size = if is_huge { B::BLOCK } else { B::PAGE };
        Self(put::<B>(paddr) | config | size, PhantomData)
    }

    #[inline]
    fn new_table(paddr: PhysAddr) -> Self {
        Self(put::<B>(paddr) | B::TABLE, PhantomData)
    }

    #[inline]
    fn paddr(&self, _is_dir: bool) -> PhysAddr {
        let (address, down) = B::ADDRESS;
        PhysAddr::from_usize(((self.0 & address) << down) as usize)
    }

    #[inline]
    fn config(&self, is_dir: bool) -> u64 {
        self.0 & !B::ADDRESS.0 & !B::PAGE & if is_dir { !B::BLOCK } else { !0 }
    }

    #[inline]
    fn present(&self) -> bool {
        self.0 & B::VALID != 0
    }

    #[inline]
    fn huge(&self, is_dir: bool) -> bool {
        let (mask, block) = B::IS_BLOCK;
        is_dir && self.0 & mask == block
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

/// Four levels of 512 entries, nothing to flush.
#[derive(Clone, Copy)]
struct FourLevels<B>(B);

impl<B: Bits> TableMeta for FourLevels<B> {
    type P = Entry<B>;
    const PAGE_SIZE: usize = 4096;
    const LEVEL_BITS: &[usize] = &[9, 9, 9, 9];
    const MAX_BLOCK_LEVEL: usize = 3;

    #[inline]
    fn flush(_: Option<VirtAddr>) {}
}

/// A table of page-table-generic, and the arena of its tables.
pub struct Generic<B: Bits>(Option<(PageTable<FourLevels<B>, Frames>, Arena)>);

impl<B: Bits> Default for Generic<B> {
    fn default() -> Self {
        Self(None)
    }
}

impl<B: Bits> Subject for Generic<B> {
    fn begin(&mut self, arena: Arena, _: Users, _: &Calls) -> Result<(), String> {
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
                    pte: B::READ_WRITE,
                    allow_huge: false,
                    flush: false,
                }),
                Operation::Protect if one => table.protect_page(vaddr, B::READ_ONLY).map(drop),
                Operation::Protect => table.protect_region(vaddr, size, B::READ_ONLY),
                Operation::Unmap => {
                    table.unmap_with_config(&UnmapConfig { start_vaddr: vaddr, size, flush: false })
                }
                Operation::Query if one => table.query(vaddr).map(|(frame, config, _)| {
                    let frame = frame.as_usize() as u64;
                    sum = sum.wrapping_add(answer(frame, B::is_writable(config)));
                }),
                Operation::Query => {
                    for found in table.walk(vaddr, vaddr + size) {
                        if found.is_final_mapping {
                            let frame = found.pte.paddr(false).as_usize() as u64;
                            let writable = B::is_writable(found.pte.config(false));
                            sum = sum.wrapping_add(answer(frame, writable));
                        }
                    }
                    Ok(())
                }
                _ => return Err(none()),
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
