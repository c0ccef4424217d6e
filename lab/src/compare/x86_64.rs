//! The crate x86_64: one call for each page, with a flush token that is let go.

use std::ptr::NonNull;

use x86_64::structures::paging::mapper::{CleanUp, TranslateResult};
use x86_64::structures::paging::page::PageRange;
use x86_64::structures::paging::{
    FrameAllocator, FrameDeallocator, Mapper, OffsetPageTable, Page, PageTable, PageTableFlags,
    PhysFrame, Size4KiB, Translate,
};
use x86_64::{PhysAddr, VirtAddr};

use crate::compare::calls::{Calls, PAGE, answer, physical};
use crate::compare::subject::{Operation, Subject, Users, none};
use crate::memory::arena::Arena;

/// A page that can not be written.
const READ_ONLY: PageTableFlags = PageTableFlags::PRESENT.union(PageTableFlags::NO_EXECUTE);
/// A page that can be written.
const READ_WRITE: PageTableFlags = READ_ONLY.union(PageTableFlags::WRITABLE);

/// Frames from the arena. The crate zeroes them itself.
struct Frames(Arena);

// SAFETY: the arena hands out each frame once until it is given back.
unsafe impl FrameAllocator<Size4KiB> for Frames {
    #[inline]
    fn allocate_frame(&mut self) -> Option<PhysFrame<Size4KiB>> {
        let frame = self.0.take()?.addr().get();
        Some(PhysFrame::containing_address(PhysAddr::new(frame as u64)))
    }
}

impl FrameDeallocator<Size4KiB> for Frames {
    #[inline]
    unsafe fn deallocate_frame(&mut self, frame: PhysFrame<Size4KiB>) {
        self.0.give_back(frame.start_address().as_u64() as usize);
    }
}

/// The root table of a space.
struct Root(NonNull<PageTable>);

impl Root {
    /// The crate's mapper, made for one call: it holds a reference to the root, which must not
    /// outlive the call.
    fn mapper(&self) -> OffsetPageTable<'_> {
        let mut root = self.0;
        // SAFETY: the root was taken from the arena and zeroed, is held by this space alone, and
        // the calls of a subject do not overlap. Tables are at the address that entries name, so
        // the offset is zero.
        unsafe { OffsetPageTable::new(root.as_mut(), VirtAddr::zero()) }
    }
}

/// A root table, and the frames of the tables below it.
#[derive(Default)]
pub struct X8664(Option<(Root, Frames)>);

/// The pages of the call that starts at an address.
#[inline(always)]
fn pages(start: u64, calls: &Calls) -> PageRange<Size4KiB> {
    let page = |address| Page::containing_address(VirtAddr::new(address));
    Page::range(page(start), page(start + calls.bytes()))
}

impl Subject for X8664 {
    fn begin(&mut self, arena: Arena, _: Users, _: &Calls) -> Result<(), String> {
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
                        memory += PAGE;
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
            _ => return Err(none()),
        }
        Ok(sum)
    }

    fn reclaim(&mut self, _: &'static str, _: &Calls) -> Result<(), String> {
        let (root, frames) = self.0.as_mut().ok_or("not begun")?;
        // SAFETY: every table was taken from this arena, and no processor uses them.
        unsafe { root.mapper().clean_up(frames) };
        Ok(())
    }

    fn root(&self) -> Option<u64> {
        Some(self.0.as_ref()?.0.0.addr().get() as u64)
    }

    fn finish(&mut self) {
        if let Some((root, mut frames)) = self.0.take() {
            // SAFETY: as in `reclaim`.
            unsafe { root.mapper().clean_up(&mut frames) };
            frames.0.give_back(root.0.addr().get());
        }
    }
}
