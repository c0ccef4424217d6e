//! The crate aarch64-paging: Arm tables, not live, so that it does no TLB maintenance on any host.

use std::ptr::{self, NonNull};

use aarch64_paging::Mapping;
use aarch64_paging::descriptor::{El1Attributes, PhysicalAddress, UpdatableDescriptor};
use aarch64_paging::paging::{Constraints, El1And0, MemoryRegion, PageTable, Translation, VaRange};

use super::subject::{Course, Encoding, Leaf, Operation, Subject, Users, Work};
use crate::arena::Arena;

/// A page that can be written.
pub(super) const PAGE: El1Attributes = El1Attributes::VALID
    .union(El1Attributes::ATTRIBUTE_INDEX_1)
    .union(El1Attributes::INNER_SHAREABLE)
    .union(El1Attributes::ACCESSED)
    .union(El1Attributes::NON_GLOBAL)
    .union(El1Attributes::PXN)
    .union(El1Attributes::UXN);

/// A mapping of aarch64-paging, and what it maps.
#[derive(Default)]
pub struct Aarch64Paging(Option<(Mapping<Identity, El1And0>, MemoryRegion)>);

/// Tables from the arena, at the address at which they are.
pub(super) struct Identity(pub(super) Arena);

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

impl Aarch64Paging {
    fn mapping(&mut self) -> Result<&mut (Mapping<Identity, El1And0>, MemoryRegion), String> {
        self.0.as_mut().ok_or_else(|| "not begun".to_owned())
    }
}

impl Subject for Aarch64Paging {
    fn encoding(&self) -> Encoding {
        Encoding::Arm64
    }

    fn courses(&self) -> &'static [Course] {
        &[
            Course {
                users: Users::None,
                operation: Operation::Unmap,
                method: "modify_range, compact_subtables",
            },
            Course {
                users: Users::None,
                operation: Operation::Unmap,
                method: "modify_range, map_range",
            },
            Course {
                users: Users::None,
                operation: Operation::Detach,
                method: "map_range",
            },
        ]
    }

    fn begin(&mut self, arena: Arena, work: Work, _: Users) -> Result<(), String> {
        let mapping =
            Mapping::with_asid_and_va_range(Identity(arena), 1, 0, El1And0, VaRange::Lower);
        let range = MemoryRegion::new(
            Work::VIRTUAL as usize,
            (Work::VIRTUAL + work.bytes) as usize,
        );
        self.0 = Some((mapping, range));
        Ok(())
    }

    fn map(&mut self) -> Result<(), String> {
        let (mapping, range) = self.mapping()?;
        mapping
            .map_range(
                range,
                PhysicalAddress(Work::PHYSICAL as usize),
                PAGE,
                Constraints::NO_BLOCK_MAPPINGS | Constraints::NO_CONTIGUOUS_HINT,
            )
            .map_err(|error| error.to_string())
    }

    fn protect(&mut self) -> Result<(), String> {
        let (mapping, range) = self.mapping()?;
        let read_only = |_: &MemoryRegion, entry: &mut UpdatableDescriptor<El1Attributes>| {
            entry.modify_flags(El1Attributes::READ_ONLY, El1Attributes::empty())
        };
        mapping
            .modify_range(range, &read_only)
            .map_err(|error| error.to_string())
    }

    fn end(&mut self, course: Course) -> Result<(), String> {
        let (mapping, range) = self.mapping()?;
        if course.operation == Operation::Unmap {
            let clear = |_: &MemoryRegion, entry: &mut UpdatableDescriptor<El1Attributes>| {
                entry.set(PhysicalAddress(0), El1Attributes::empty())
            };
            mapping
                .modify_range(range, &clear)
                .map_err(|error| error.to_string())?;
        }
        if course.method.ends_with("compact_subtables") {
            mapping.compact_subtables();
            return Ok(());
        }
        mapping
            .map_range(
                range,
                PhysicalAddress(0),
                El1Attributes::empty(),
                Constraints::empty(),
            )
            .map_err(|error| error.to_string())
    }

    fn query(&self, virtual_address: u64) -> Option<Leaf> {
        let (mapping, _) = self.0.as_ref()?;
        let start = virtual_address as usize;
        let page = MemoryRegion::new(start, start + Work::PAGE as usize);
        let mut found = None;
        mapping
            .walk_range(&page, &mut |_, entry, level| {
                if entry.is_valid() && level == 3 {
                    found = Some(Leaf {
                        physical: entry.output_address().0 as u64,
                        writable: !entry.flags().contains(El1Attributes::READ_ONLY),
                    });
                }
                Ok(())
            })
            .ok()?;
        found
    }

    fn root(&self) -> Option<u64> {
        let (mapping, _) = self.0.as_ref()?;
        Some(mapping.root_address().0 as u64)
    }

    fn finish(&mut self) {
        self.0 = None;
    }
}
