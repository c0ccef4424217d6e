//! The crate page_table_multiarch: one cursor for all calls, whose drop would flush; for one page
//! its calls for one page. Its x86 tables come back only when the whole table is dropped.

use std::fmt;
use std::marker::PhantomData;

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

/// Arm, stage 1. The crate leaves out the entries of other hosts; these do as its own do.
pub type Arm64 = Multiarch<FourLevels, Entry<OfArm64>>;

/// RISC-V, Sv48.
pub type Riscv64 = Multiarch<FourLevels, Entry<OfRiscv64>>;

/// Four levels, and nothing to flush.
pub struct FourLevels;

impl PagingMetaData for FourLevels {
    const LEVELS: usize = 4;
    const PA_MAX_BITS: usize = 48;
    const VA_MAX_BITS: usize = 48;

    type VirtAddr = VirtAddr;

    #[inline]
    fn flush_tlb(_: Option<VirtAddr>) {}
}

/// The bits of entries of another host, for normal memory of the kernel. Other flags are ignored.
pub trait Bits: Copy + Send + Sync + 'static {
    /// The bits of the address, and how far below their place in an address they stand.
    const ADDRESS: (u64, u32);
    /// Set in every entry that is used.
    const VALID: u64;
    /// Set in an entry that points to a table.
    const TABLE: u64;

    fn attributes(flags: MappingFlags, is_huge: bool) -> u64;

    /// The flags of an entry that is valid.
    fn flags(entry: u64) -> MappingFlags;

    fn is_huge(entry: u64) -> bool;
}

/// Arm.
#[derive(Clone, Copy)]
pub struct OfArm64;

impl OfArm64 {
    const NON_BLOCK: u64 = 1 << 1;
    const NORMAL: u64 = 1 << 2;
    const USER: u64 = 1 << 6;
    const READ_ONLY: u64 = 1 << 7;
    const SHAREABLE: u64 = 0b11 << 8;
    const ACCESSED: u64 = 1 << 10;
    const PXN: u64 = 1 << 53;
    const UXN: u64 = 1 << 54;
}

impl Bits for OfArm64 {
    const ADDRESS: (u64, u32) = (0x0000_ffff_ffff_f000, 0);
    const VALID: u64 = 1 << 0;
    const TABLE: u64 = Self::VALID | Self::NON_BLOCK;

    #[inline]
    fn attributes(flags: MappingFlags, is_huge: bool) -> u64 {
        let size = if is_huge { 0 } else { Self::NON_BLOCK };
        if flags.is_empty() {
            return Self::ACCESSED | size;
        }
        let mut bits = Self::NORMAL | Self::SHAREABLE | Self::ACCESSED | Self::UXN;
        if flags.contains(MappingFlags::READ) {
            bits |= Self::VALID;
        }
        if !flags.contains(MappingFlags::WRITE) {
            bits |= Self::READ_ONLY;
        }
        if !flags.contains(MappingFlags::EXECUTE) {
            bits |= Self::PXN;
        }
        bits | size
    }

    #[inline]
    fn flags(entry: u64) -> MappingFlags {
        let mut flags = MappingFlags::READ;
        flags.set(MappingFlags::WRITE, entry & Self::READ_ONLY == 0);
        flags.set(MappingFlags::USER, entry & Self::USER != 0);
        flags.set(MappingFlags::EXECUTE, entry & Self::PXN == 0);
        flags
    }

    #[inline]
    fn is_huge(entry: u64) -> bool {
        entry & Self::NON_BLOCK == 0
    }
}

/// RISC-V.
#[derive(Clone, Copy)]
pub struct OfRiscv64;

impl OfRiscv64 {
    const READ: u64 = 1 << 1;
    const WRITE: u64 = 1 << 2;
    const EXECUTE: u64 = 1 << 3;
    const USER: u64 = 1 << 4;
    const ACCESSED_DIRTY: u64 = 0b11 << 6;
}

impl Bits for OfRiscv64 {
    const ADDRESS: (u64, u32) = (0x003f_ffff_ffff_fc00, 2);
    const VALID: u64 = 1 << 0;
    const TABLE: u64 = Self::VALID;

    #[inline]
    fn attributes(flags: MappingFlags, _: bool) -> u64 {
        if flags.is_empty() {
            return 0;
        }
        let mut bits = Self::VALID | Self::ACCESSED_DIRTY;
        if flags.contains(MappingFlags::READ) {
            bits |= Self::READ;
        }
        if flags.contains(MappingFlags::WRITE) {
            bits |= Self::WRITE;
        }
        if flags.contains(MappingFlags::EXECUTE) {
            bits |= Self::EXECUTE;
        }
        if flags.contains(MappingFlags::USER) {
            bits |= Self::USER;
        }
        bits
    }

    #[inline]
    fn flags(entry: u64) -> MappingFlags {
        let mut flags = MappingFlags::empty();
        flags.set(MappingFlags::READ, entry & Self::READ != 0);
        flags.set(MappingFlags::WRITE, entry & Self::WRITE != 0);
        flags.set(MappingFlags::EXECUTE, entry & Self::EXECUTE != 0);
        flags.set(MappingFlags::USER, entry & Self::USER != 0);
        flags
    }

    #[inline]
    fn is_huge(entry: u64) -> bool {
        entry & (Self::READ | Self::EXECUTE) != 0
    }
}

/// An entry of another host.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Entry<B>(u64, PhantomData<B>);

impl<B: Bits> Entry<B> {
    #[inline]
    fn of(paddr: PhysAddr, bits: u64) -> Self {
        let (address, down) = B::ADDRESS;
        Self(paddr.as_usize() as u64 >> down & address | bits, PhantomData)
    }
}

impl<B: Bits> GenericPTE for Entry<B> {
    #[inline]
    fn new_page(paddr: PhysAddr, flags: MappingFlags, is_huge: bool) -> Self {
        Self::of(paddr, B::attributes(flags, is_huge))
    }

    #[inline]
    fn new_table(paddr: PhysAddr) -> Self {
        Self::of(paddr, B::TABLE)
    }

    #[inline]
    fn paddr(&self) -> PhysAddr {
        let (address, down) = B::ADDRESS;
        PhysAddr::from_usize(((self.0 & address) << down) as usize)
    }

    #[inline]
    fn flags(&self) -> MappingFlags {
        match self.is_present() {
            true => B::flags(self.0),
            false => MappingFlags::empty(),
        }
    }

    #[inline]
    fn set_paddr(&mut self, paddr: PhysAddr) {
        *self = Self::of(paddr, self.0 & !B::ADDRESS.0);
    }

    #[inline]
    fn set_flags(&mut self, flags: MappingFlags, is_huge: bool) {
        self.0 = self.0 & B::ADDRESS.0 | B::attributes(flags, is_huge);
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
        self.0 & B::VALID != 0
    }

    #[inline]
    fn is_huge(&self) -> bool {
        B::is_huge(self.0)
    }

    #[inline]
    fn clear(&mut self) {
        self.0 = 0;
    }
}

impl<B> fmt::Debug for Entry<B> {
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
