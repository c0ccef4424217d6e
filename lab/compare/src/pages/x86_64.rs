//! The crate x86_64: one call for each page, with a flush token that is let go.

use x86_64::structures::paging::mapper::TranslateResult;
use x86_64::structures::paging::page::PageRange;
use x86_64::structures::paging::{Mapper, Page, PageTableFlags, PhysFrame, Size4KiB, Translate};
use x86_64::{PhysAddr, VirtAddr};

use super::super::subject::Work;
use super::super::x86_64::{Frames, READ_ONLY, READ_WRITE, Root};
use super::calls::{Calls, answer, physical};
use super::subject::{Operation, Subject};
use crate::arena::Arena;

/// A root table, and where tables come from.
#[derive(Default)]
pub struct X8664(Option<(Root, Frames)>);

/// The pages of the call that starts at an address.
#[inline(always)]
fn pages(start: u64, calls: &Calls) -> PageRange<Size4KiB> {
    let page = |address| Page::containing_address(VirtAddr::new(address));
    Page::range(page(start), page(start + calls.bytes()))
}

impl Subject for X8664 {
    fn begin(&mut self, arena: Arena) -> Result<(), String> {
        let root = arena.take_zeroed().ok_or("out of tables")?;
        self.0 = Some((Root(root.cast()), Frames(arena)));
        Ok(())
    }

    fn run(&mut self, operation: Operation, calls: &Calls) -> Result<u64, String> {
        let (root, frames) = self.0.as_mut().ok_or("not begun")?;
        let mut mapper = root.mapper();
        let mut sum = 0_u64;
        match operation {
            Operation::Map => {
                for &start in &calls.starts {
                    let mut memory = PhysAddr::new(physical(start));
                    for page in pages(start, calls) {
                        let frame = PhysFrame::<Size4KiB>::containing_address(memory);
                        // SAFETY: the tables are never used by a processor, so no mapping can be
                        // unsafe.
                        unsafe { mapper.map_to(page, frame, READ_WRITE, frames) }
                            .map_err(|error| format!("{error:?}"))?
                            .ignore();
                        memory += Work::PAGE;
                    }
                }
            }
            Operation::Protect => {
                for &start in &calls.starts {
                    for page in pages(start, calls) {
                        // SAFETY: as in map.
                        unsafe { mapper.update_flags(page, READ_ONLY) }
                            .map_err(|error| format!("{error:?}"))?
                            .ignore();
                    }
                }
            }
            Operation::Unmap => {
                for &start in &calls.starts {
                    for page in pages(start, calls) {
                        let (_, flush) =
                            mapper.unmap(page).map_err(|error| format!("{error:?}"))?;
                        flush.ignore();
                    }
                }
            }
            Operation::Query => {
                for &start in &calls.starts {
                    for page in pages(start, calls) {
                        if let TranslateResult::Mapped { frame, flags, .. } =
                            mapper.translate(page.start_address())
                        {
                            sum = sum.wrapping_add(answer(
                                frame.start_address().as_u64(),
                                flags.contains(PageTableFlags::WRITABLE),
                            ));
                        }
                    }
                }
            }
            Operation::Fault | Operation::Exchange => return Err("has none".to_owned()),
        }
        Ok(sum)
    }

    fn root(&self) -> Option<u64> {
        Some(self.0.as_ref()?.0.0.addr().get() as u64)
    }

    fn finish(&mut self) {
        use x86_64::structures::paging::mapper::CleanUp;
        if let Some((root, mut frames)) = self.0.take() {
            // SAFETY: no processor uses the tables, and every one was taken from this arena.
            unsafe { root.mapper().clean_up(&mut frames) };
            frames.0.give_back(root.0.addr().get());
        }
    }
}
