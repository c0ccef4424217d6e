//! The crate aarch64-paging: ranges of a mapping that is not active, so that it does no TLB
//! maintenance on any host.

use aarch64_paging::Mapping;
use aarch64_paging::descriptor::{El1Attributes, PhysicalAddress, UpdatableDescriptor};
use aarch64_paging::paging::{Constraints, El1And0, MemoryRegion, VaRange};

use super::super::aarch64_paging::{Identity, PAGE};
use super::calls::{Calls, MOST, answer, physical};
use super::subject::{Operation, Subject};
use crate::arena::Arena;

/// A mapping of aarch64-paging.
#[derive(Default)]
pub struct Aarch64Paging(Option<Mapping<Identity, El1And0>>);

impl Subject for Aarch64Paging {
    fn begin(&mut self, arena: Arena) -> Result<(), String> {
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
            let range = MemoryRegion::new(start as usize, (start + calls.bytes()) as usize);
            match operation {
                Operation::Map => mapping.map_range(
                    &range,
                    PhysicalAddress(physical(start) as usize),
                    PAGE,
                    Constraints::NO_BLOCK_MAPPINGS | Constraints::NO_CONTIGUOUS_HINT,
                ),
                Operation::Protect => mapping.modify_range(&range, &read_only),
                // The faster of its two ways. Of a whole table it would detach the table and look
                // at none of its pages.
                Operation::Unmap if calls.pages < MOST => mapping.map_range(
                    &range,
                    PhysicalAddress(0),
                    El1Attributes::empty(),
                    Constraints::empty(),
                ),
                Operation::Unmap => mapping.modify_range(&range, &clear),
                Operation::Query => mapping.walk_range(&range, &mut |_, entry, level| {
                    if level == 3 && entry.is_valid() {
                        let writable = !entry.flags().contains(El1Attributes::READ_ONLY);
                        sum = sum.wrapping_add(answer(entry.output_address().0 as u64, writable));
                    }
                    Ok(())
                }),
                Operation::Fault | Operation::Exchange => return Err("has none".to_owned()),
            }
            .map_err(|error| error.to_string())?;
        }
        Ok(sum)
    }

    fn root(&self) -> Option<u64> {
        Some(self.0.as_ref()?.root_address().0 as u64)
    }

    fn finish(&mut self) {
        self.0 = None;
    }
}
