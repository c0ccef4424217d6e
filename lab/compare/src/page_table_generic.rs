//! The crate page-table-generic, with x86 entries: it asks for the entry format, and has none of
//! its own.

use std::ptr;

use page_table_generic::{
    FrameAllocator, MapConfig, PageTable, PageTableEntry, PhysAddr, TableMeta, UnmapConfig,
    VirtAddr,
};

use super::current;
use super::subject::{Course, Encoding, Leaf, Operation, Subject, Users, Work};
use crate::arena::Arena;

/// A table of page-table-generic, and how much it maps.
#[derive(Default)]
pub struct PageTableGeneric(Option<(PageTable<FourLevels, Frames>, usize)>);

/// Frames from the current arena. The crate zeroes what it takes, and clones this for every table
/// it visits.
#[derive(Clone, Copy)]
pub(super) struct Frames;

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

/// Four levels of 512 entries, nothing to flush.
#[derive(Clone, Copy)]
struct FourLevels;

impl TableMeta for FourLevels {
    type P = Entry;
    const PAGE_SIZE: usize = 4096;
    const LEVEL_BITS: &[usize] = &[9, 9, 9, 9];
    const MAX_BLOCK_LEVEL: usize = 3;

    #[inline]
    fn flush(_: Option<VirtAddr>) {}
}

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const HUGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// An x86 entry.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct Entry(u64);

impl Entry {
    /// The bits of a page that can not be written.
    pub(super) const PAGE: u64 = PRESENT | NO_EXECUTE;
    /// The bit that allows to write.
    pub(super) const WRITABLE: u64 = WRITABLE;
}

impl PageTableEntry for Entry {
    type PteConfig = u64;

    #[inline]
    fn new_page(paddr: PhysAddr, config: u64, is_huge: bool) -> Self {
        Self(paddr.as_usize() as u64 | config | if is_huge { HUGE } else { 0 })
    }

    #[inline]
    fn new_table(paddr: PhysAddr) -> Self {
        Self(paddr.as_usize() as u64 | PRESENT | WRITABLE)
    }

    #[inline]
    fn paddr(&self, _is_dir: bool) -> PhysAddr {
        PhysAddr::from_usize((self.0 & ADDRESS) as usize)
    }

    #[inline]
    fn config(&self, is_dir: bool) -> u64 {
        self.0 & !ADDRESS & if is_dir { !HUGE } else { !0 }
    }

    #[inline]
    fn present(&self) -> bool {
        self.0 & PRESENT != 0
    }

    #[inline]
    fn huge(&self, is_dir: bool) -> bool {
        is_dir && self.0 & HUGE != 0
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

fn start() -> VirtAddr {
    VirtAddr::from_usize(Work::VIRTUAL as usize)
}

impl PageTableGeneric {
    fn table(&mut self) -> Result<&mut (PageTable<FourLevels, Frames>, usize), String> {
        self.0.as_mut().ok_or_else(|| "not begun".to_owned())
    }
}

impl Subject for PageTableGeneric {
    fn encoding(&self) -> Encoding {
        Encoding::X86_64
    }

    fn courses(&self) -> &'static [Course] {
        &[Course {
            users: Users::None,
            operation: Operation::Unmap,
            method: "unmap_with_config",
        }]
    }

    fn begin(&mut self, arena: Arena, work: Work, _: Users) -> Result<(), String> {
        current::set(arena);
        let table = PageTable::new(Frames).map_err(|error| error.to_string())?;
        self.0 = Some((table, work.bytes as usize));
        Ok(())
    }

    fn map(&mut self) -> Result<(), String> {
        let (table, bytes) = self.table()?;
        table
            .map(&MapConfig {
                vaddr: start(),
                paddr: PhysAddr::from_usize(Work::PHYSICAL as usize),
                size: *bytes,
                pte: PRESENT | WRITABLE | NO_EXECUTE,
                allow_huge: false,
                flush: false,
            })
            .map_err(|error| error.to_string())
    }

    fn protect(&mut self) -> Result<(), String> {
        let (table, bytes) = self.table()?;
        table
            .protect_region(start(), *bytes, PRESENT | NO_EXECUTE)
            .map_err(|error| error.to_string())
    }

    fn end(&mut self, _: Course) -> Result<(), String> {
        let (table, bytes) = self.table()?;
        table
            .unmap_with_config(&UnmapConfig {
                start_vaddr: start(),
                size: *bytes,
                flush: false,
            })
            .map_err(|error| error.to_string())
    }

    fn query(&self, virtual_address: u64) -> Option<Leaf> {
        let (table, _) = self.0.as_ref()?;
        let address = VirtAddr::from_usize(virtual_address as usize);
        let (physical, config, _) = table.query(address).ok()?;
        Some(Leaf {
            physical: physical.as_usize() as u64,
            writable: config & WRITABLE != 0,
        })
    }

    fn root(&self) -> Option<u64> {
        let (table, _) = self.0.as_ref()?;
        Some(table.root_paddr().as_usize() as u64)
    }

    fn finish(&mut self) {
        self.0 = None;
    }
}
