//! The crate page_table_multiarch: its x86 tables come back only when the whole table is dropped.

use memory_addr::{PhysAddr, VirtAddr};
use page_table_multiarch::x86_64::X64PageTable;
use page_table_multiarch::{MappingFlags, PagingHandler};

use super::current;
use super::subject::{Course, Encoding, Leaf, Operation, Subject, Users, Work};
use crate::arena::Arena;

/// A table of page_table_multiarch, and how much it maps.
#[derive(Default)]
pub struct PageTableMultiarch(Option<(X64PageTable<Frames>, usize)>);

/// Frames from the current arena. The crate zeroes what it takes.
pub(super) struct Frames;

impl PagingHandler for Frames {
    #[inline]
    fn alloc_frames(count: usize, _align: usize) -> Option<PhysAddr> {
        if count == 1 {
            current::take().map(PhysAddr::from_usize)
        } else {
            None
        }
    }

    #[inline]
    fn dealloc_frames(paddr: PhysAddr, _count: usize) {
        current::give_back(paddr.as_usize());
    }

    #[inline]
    fn phys_to_virt(paddr: PhysAddr) -> VirtAddr {
        VirtAddr::from_usize(paddr.as_usize())
    }
}

const START: VirtAddr = VirtAddr::from_usize(Work::VIRTUAL as usize);

impl PageTableMultiarch {
    fn table(&mut self) -> Result<&mut (X64PageTable<Frames>, usize), String> {
        self.0.as_mut().ok_or_else(|| "not begun".to_owned())
    }
}

impl Subject for PageTableMultiarch {
    fn encoding(&self) -> Encoding {
        Encoding::X86_64
    }

    fn courses(&self) -> &'static [Course] {
        &[Course {
            users: Users::None,
            operation: Operation::Unmap,
            method: "unmap_region, drop",
        }]
    }

    fn begin(&mut self, arena: Arena, work: Work, _: Users) -> Result<(), String> {
        current::set(arena);
        let table = X64PageTable::try_new().map_err(|error| format!("{error:?}"))?;
        self.0 = Some((table, work.bytes as usize));
        Ok(())
    }

    fn map(&mut self) -> Result<(), String> {
        let (table, bytes) = self.table()?;
        table
            .cursor()
            .map_region(
                START,
                |address| {
                    PhysAddr::from_usize(
                        address.as_usize() - START.as_usize() + Work::PHYSICAL as usize,
                    )
                },
                *bytes,
                MappingFlags::READ | MappingFlags::WRITE,
                false,
            )
            .map_err(|error| format!("{error:?}"))
    }

    fn protect(&mut self) -> Result<(), String> {
        let (table, bytes) = self.table()?;
        table
            .cursor()
            .protect_region(START, *bytes, MappingFlags::READ)
            .map_err(|error| format!("{error:?}"))
    }

    fn end(&mut self, _: Course) -> Result<(), String> {
        let (table, bytes) = self.table()?;
        table
            .cursor()
            .unmap_region(START, *bytes)
            .map_err(|error| format!("{error:?}"))?;
        self.0 = None;
        Ok(())
    }

    fn query(&self, virtual_address: u64) -> Option<Leaf> {
        let (table, _) = self.0.as_ref()?;
        let address = VirtAddr::from_usize(virtual_address as usize);
        let (physical, flags, _) = table.query(address).ok()?;
        Some(Leaf {
            physical: physical.as_usize() as u64,
            writable: flags.contains(MappingFlags::WRITE),
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
