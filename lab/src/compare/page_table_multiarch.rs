//! The crate page_table_multiarch: one cursor for all calls, whose drop would flush; for one page
//! its calls for one page. Its x86 tables come back only when the whole table is dropped.

use std::fmt;

use memory_addr::{PhysAddr, VirtAddr};
use page_table_multiarch::x86_64::X64PageTable;
use page_table_multiarch::{
    GenericPTE, MappingFlags, PageSize, PageTable64, PagingHandler, PagingMetaData,
};

use crate::compare::calls::{Calls, PAGE, answer, physical};
use crate::compare::current;
use crate::compare::subject::{Operation, Subject, Users, none};
use crate::memory::arena::Arena;

/// Frames from the current arena. The crate zeroes what it takes.
pub struct Frames;

impl PagingHandler for Frames {
    #[inline]
    fn alloc_frames(count: usize, _align: usize) -> Option<PhysAddr> {
        if count == 1 { current::take().map(PhysAddr::from_usize) } else { None }
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

/// Names the parts of a table of the crate.
pub trait Parts {
    /// Levels, sizes of addresses, and how to flush.
    type Meta;
    /// An entry.
    type Entry;
}

impl<M, E> Parts for PageTable64<M, E, Frames>
where
    M: PagingMetaData<VirtAddr = VirtAddr>,
    E: GenericPTE,
{
    type Meta = M;
    type Entry = E;
}

/// x86, as the crate has it.
pub type X64 =
    Multiarch<<X64PageTable<Frames> as Parts>::Meta, <X64PageTable<Frames> as Parts>::Entry>;

/// Arm, stage 1. The crate leaves out its own Arm entries on other hosts; these do as they do.
pub type Arm64 = Multiarch<Arm64Meta, Arm64Entry>;

/// Four levels, and nothing to flush.
pub struct Arm64Meta;

impl PagingMetaData for Arm64Meta {
    const LEVELS: usize = 4;
    const PA_MAX_BITS: usize = 48;
    const VA_MAX_BITS: usize = 48;

    type VirtAddr = VirtAddr;

    #[inline]
    fn flush_tlb(_: Option<VirtAddr>) {}
}

const VALID: u64 = 1 << 0;
const NON_BLOCK: u64 = 1 << 1;
const NORMAL: u64 = 1 << 2;
const USER: u64 = 1 << 6;
const READ_ONLY: u64 = 1 << 7;
const SHAREABLE: u64 = 0b11 << 8;
const ACCESSED: u64 = 1 << 10;
const PXN: u64 = 1 << 53;
const UXN: u64 = 1 << 54;
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

/// An entry of Arm, for normal memory of the kernel. Other flags are ignored.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Arm64Entry(u64);

impl Arm64Entry {
    #[inline]
    fn attributes(flags: MappingFlags, is_huge: bool) -> u64 {
        if flags.is_empty() {
            return ACCESSED | if is_huge { 0 } else { NON_BLOCK };
        }
        let mut bits = NORMAL | SHAREABLE | ACCESSED | UXN;
        if flags.contains(MappingFlags::READ) {
            bits |= VALID;
        }
        if !flags.contains(MappingFlags::WRITE) {
            bits |= READ_ONLY;
        }
        if !flags.contains(MappingFlags::EXECUTE) {
            bits |= PXN;
        }
        bits | if is_huge { 0 } else { NON_BLOCK }
    }
}

impl GenericPTE for Arm64Entry {
    #[inline]
    fn new_page(paddr: PhysAddr, flags: MappingFlags, is_huge: bool) -> Self {
        Self(Self::attributes(flags, is_huge) | paddr.as_usize() as u64 & ADDRESS)
    }

    #[inline]
    fn new_table(paddr: PhysAddr) -> Self {
        Self(NON_BLOCK | VALID | paddr.as_usize() as u64 & ADDRESS)
    }

    #[inline]
    fn paddr(&self) -> PhysAddr {
        PhysAddr::from_usize((self.0 & ADDRESS) as usize)
    }

    #[inline]
    fn flags(&self) -> MappingFlags {
        if self.0 & VALID == 0 {
            return MappingFlags::empty();
        }
        let mut flags = MappingFlags::READ;
        flags.set(MappingFlags::WRITE, self.0 & READ_ONLY == 0);
        flags.set(MappingFlags::USER, self.0 & USER != 0);
        flags.set(MappingFlags::EXECUTE, self.0 & PXN == 0);
        flags
    }

    #[inline]
    fn set_paddr(&mut self, paddr: PhysAddr) {
        self.0 = self.0 & !ADDRESS | paddr.as_usize() as u64 & ADDRESS;
    }

    #[inline]
    fn set_flags(&mut self, flags: MappingFlags, is_huge: bool) {
        self.0 = self.0 & ADDRESS | Self::attributes(flags, is_huge);
    }

    #[inline]
    fn bits(self) -> usize {
        self.0 as usize
    }

    #[inline]
    fn is_unused(&self) -> bool {
        self.0 == 0
    }

    #[inline]
    fn is_present(&self) -> bool {
        self.0 & VALID != 0
    }

    #[inline]
    fn is_huge(&self) -> bool {
        self.0 & NON_BLOCK == 0
    }

    #[inline]
    fn clear(&mut self) {
        self.0 = 0;
    }
}

impl fmt::Debug for Arm64Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A table of page_table_multiarch, and the arena of its tables.
pub struct Multiarch<M, E>
where
    M: PagingMetaData<VirtAddr = VirtAddr>,
    E: GenericPTE,
{
    table: Option<(PageTable64<M, E, Frames>, Arena)>,
}

impl<M, E> Default for Multiarch<M, E>
where
    M: PagingMetaData<VirtAddr = VirtAddr>,
    E: GenericPTE,
{
    fn default() -> Self {
        Self { table: None }
    }
}

fn at(address: u64) -> VirtAddr {
    VirtAddr::from_usize(address as usize)
}

fn memory(address: VirtAddr) -> PhysAddr {
    PhysAddr::from_usize(physical(address.as_usize() as u64) as usize)
}

const READ_WRITE: MappingFlags = MappingFlags::READ.union(MappingFlags::WRITE);

impl<M, E> Subject for Multiarch<M, E>
where
    M: PagingMetaData<VirtAddr = VirtAddr>,
    E: GenericPTE,
{
    fn begin(&mut self, arena: Arena, _: Users, _: &Calls) -> Result<(), String> {
        current::set(arena);
        let table = PageTable64::try_new().map_err(|error| format!("{error:?}"))?;
        self.table = Some((table, arena));
        Ok(())
    }

    fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String> {
        let (table, arena) = self.table.as_mut().ok_or("not begun")?;
        current::set(*arena);
        let one = calls.pages == 1;
        let bytes = calls.bytes() as usize;
        let mut sum = 0_u64;
        if operation == Operation::Query {
            for &start in &calls.starts {
                for page in 0..calls.pages {
                    let found = table.query(at(start + page * PAGE));
                    let (frame, flags, _) = found.map_err(|error| format!("{error:?}"))?;
                    let writable = flags.contains(MappingFlags::WRITE);
                    sum = sum.wrapping_add(answer(frame.as_usize() as u64, writable));
                }
            }
            return Ok(sum);
        }
        let mut cursor = table.cursor();
        for start in calls.starts.iter().copied().map(at) {
            match operation {
                Operation::Map if one => {
                    cursor.map(start, memory(start), PageSize::Size4K, READ_WRITE)
                }
                Operation::Map => cursor.map_region(start, memory, bytes, READ_WRITE, false),
                Operation::Protect if one => cursor.protect(start, MappingFlags::READ).map(drop),
                Operation::Protect => cursor.protect_region(start, bytes, MappingFlags::READ),
                Operation::Unmap if one => cursor.unmap(start).map(drop),
                Operation::Unmap => cursor.unmap_region(start, bytes),
                _ => return Err(none()),
            }
            .map_err(|error| format!("{error:?}"))?;
        }
        Ok(sum)
    }

    fn reclaim(&mut self, _: &'static str, _: &Calls) -> Result<(), String> {
        self.finish();
        Ok(())
    }

    fn root(&self) -> Option<u64> {
        Some(self.table.as_ref()?.0.root_paddr().as_usize() as u64)
    }

    fn finish(&mut self) {
        if let Some((_, arena)) = &self.table {
            current::set(*arena);
        }
        self.table = None;
    }
}
