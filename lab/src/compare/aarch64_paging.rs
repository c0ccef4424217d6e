//! The crate aarch64-paging: Arm tables of a mapping that is not active, so that it does no TLB
//! maintenance on any host.

use std::ptr::{self, NonNull};

use aarch64_paging::descriptor::{El1Attributes, PhysicalAddress, UpdatableDescriptor};
use aarch64_paging::paging::{Constraints, El1And0, MemoryRegion, PageTable, Translation, VaRange};
use aarch64_paging::{MapError, Mapping};

use crate::compare::calls::{Calls, MOST, answer, physical};
use crate::compare::subject::{Operation, Subject, Users, none};
use crate::memory::arena::Arena;

/// A page that can be written.
const PAGE: El1Attributes = El1Attributes::VALID
    .union(El1Attributes::ATTRIBUTE_INDEX_1)
    .union(El1Attributes::INNER_SHAREABLE)
    .union(El1Attributes::ACCESSED)
    .union(El1Attributes::NON_GLOBAL)
    .union(El1Attributes::PXN)
    .union(El1Attributes::UXN);

/// A mapping of aarch64-paging.
#[derive(Default)]
pub struct Aarch64Paging(Option<Mapping<Identity, El1And0>>);

/// Tables from the arena, at their physical addresses.
struct Identity(Arena);

impl Translation<El1Attributes> for Identity {
    fn allocate_table(&mut self) -> (NonNull<PageTable<El1Attributes>>, PhysicalAddress) {
        // The trait has no way to fail. The runner sizes the arena so that this does not happen.
        let table = self.0.take_zeroed().expect("the arena holds all tables");
        (table.cast(), PhysicalAddress(table.addr().get()))
    }

    unsafe fn deallocate_table(&mut self, page_table: NonNull<PageTable<El1Attributes>>) {
        self.0.give_back(page_table.addr().get());
    }

    fn physical_to_virtual(&self, pa: PhysicalAddress) -> NonNull<PageTable<El1Attributes>> {
        NonNull::new(ptr::with_exposed_provenance_mut(pa.0)).expect("no table at address 0")
    }
}

fn region(start: u64, calls: &Calls) -> MemoryRegion {
    MemoryRegion::new(start as usize, (start + calls.bytes()) as usize)
}

/// Maps a range with an invalid entry, which frees tables that lie within it.
fn detach(mapping: &mut Mapping<Identity, El1And0>, range: &MemoryRegion) -> Result<(), MapError> {
    let nothing = El1Attributes::empty();
    mapping.map_range(range, PhysicalAddress(0), nothing, Constraints::empty())
}

impl Subject for Aarch64Paging {
    fn begin(&mut self, arena: Arena, _: Users, _: &Calls) -> Result<(), String> {
        let mapping =
            Mapping::with_asid_and_va_range(Identity(arena), 1, 0, El1And0, VaRange::Lower);
        self.0 = Some(mapping);
        Ok(())
    }

    fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String> {
        let mapping = self.0.as_mut().ok_or("not begun")?;
        let read_only = |_: &MemoryRegion, entry: &mut UpdatableDescriptor<El1Attributes>| {
            entry.modify_flags(El1Attributes::READ_ONLY, El1Attributes::empty())
        };
        let clear = |_: &MemoryRegion, entry: &mut UpdatableDescriptor<El1Attributes>| {
            entry.set(PhysicalAddress(0), El1Attributes::empty())
        };
        let mut sum = 0_u64;
        for &start in &calls.starts {
            let range = region(start, calls);
            match operation {
                Operation::Map => mapping.map_range(
                    &range,
                    PhysicalAddress(physical(start) as usize),
                    PAGE,
                    Constraints::NO_BLOCK_MAPPINGS | Constraints::NO_CONTIGUOUS_HINT,
                ),
                Operation::Protect => mapping.modify_range(&range, &read_only),
                Operation::Detach => detach(mapping, &range),
                // The faster of its two ways. Of a whole table it would detach the table and look
                // at none of its pages.
                Operation::Unmap if calls.pages < MOST => detach(mapping, &range),
                Operation::Unmap => mapping.modify_range(&range, &clear),
                Operation::Query => mapping.walk_range(&range, &mut |_, entry, level| {
                    if level == 3 && entry.is_valid() {
                        let writable = !entry.flags().contains(El1Attributes::READ_ONLY);
                        sum = sum.wrapping_add(answer(entry.output_address().0 as u64, writable));
                    }
                    Ok(())
                }),
                _ => return Err(none()),
            }
            .map_err(|error| error.to_string())?;
        }
        Ok(sum)
    }

    fn reclaim(&mut self, method: &'static str, calls: &Calls) -> Result<(), String> {
        let mapping = self.0.as_mut().ok_or("not begun")?;
        if method.ends_with("compact_subtables") {
            mapping.compact_subtables();
            return Ok(());
        }
        for &start in &calls.starts {
            detach(mapping, &region(start, calls)).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn root(&self) -> Option<u64> {
        Some(self.0.as_ref()?.root_address().0 as u64)
    }

    fn finish(&mut self) {
        self.0 = None;
    }
}
