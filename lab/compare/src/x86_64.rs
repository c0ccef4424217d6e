//! The crate x86_64: one call for each page, with a flush token that is let go, since nothing is
//! live.

use std::ptr::NonNull;

use x86_64::structures::paging::mapper::{CleanUp, TranslateResult};
use x86_64::structures::paging::page::PageRange;
use x86_64::structures::paging::{
    FrameAllocator, FrameDeallocator, Mapper, OffsetPageTable, Page, PageTable, PageTableFlags,
    PhysFrame, Size4KiB, Translate,
};
use x86_64::{PhysAddr, VirtAddr};

use super::subject::{Course, Encoding, Leaf, Operation, Subject, Users, Work};
use crate::arena::Arena;

/// A page that can not be written.
pub(super) const READ_ONLY: PageTableFlags =
    PageTableFlags::PRESENT.union(PageTableFlags::NO_EXECUTE);
/// A page that can be written.
pub(super) const READ_WRITE: PageTableFlags = READ_ONLY.union(PageTableFlags::WRITABLE);

/// A root table, and what is mapped below it.
#[derive(Default)]
pub struct X8664(Option<Space>);

struct Space {
    root: Root,
    frames: Frames,
    pages: PageRange<Size4KiB>,
}

/// Frames from the arena. The crate zeroes them itself.
pub(super) struct Frames(pub(super) Arena);

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
pub(super) struct Root(pub(super) NonNull<PageTable>);

impl Root {
    /// The crate's mapper, made for one call: it holds a reference to the root, which must not
    /// outlive the call.
    pub(super) fn mapper(&self) -> OffsetPageTable<'_> {
        let mut root = self.0;
        // SAFETY: the root was taken from the arena and zeroed, is held by this space alone, and
        // the calls of a subject do not overlap. Tables are at the address that entries name, so
        // the offset is zero.
        unsafe { OffsetPageTable::new(root.as_mut(), VirtAddr::zero()) }
    }
}

impl X8664 {
    fn space(&mut self) -> Result<&mut Space, String> {
        self.0.as_mut().ok_or_else(|| "not begun".to_owned())
    }
}

impl Subject for X8664 {
    fn encoding(&self) -> Encoding {
        Encoding::X86_64
    }

    fn courses(&self) -> &'static [Course] {
        &[Course {
            users: Users::None,
            operation: Operation::Unmap,
            method: "unmap, clean_up",
        }]
    }

    fn begin(&mut self, arena: Arena, work: Work, _: Users) -> Result<(), String> {
        let root = arena.take_zeroed().ok_or("out of tables")?;
        let page = |address| Page::containing_address(VirtAddr::new(address));
        let pages = Page::range(page(Work::VIRTUAL), page(Work::VIRTUAL + work.bytes));
        self.0 = Some(Space {
            root: Root(root.cast()),
            frames: Frames(arena),
            pages,
        });
        Ok(())
    }

    fn map(&mut self) -> Result<(), String> {
        let space = self.space()?;
        let mut mapper = space.root.mapper();
        let mut physical = PhysAddr::new(Work::PHYSICAL);
        for page in space.pages {
            let frame = PhysFrame::<Size4KiB>::containing_address(physical);
            // SAFETY: the tables are never used by a processor, so no mapping can be unsafe.
            unsafe { mapper.map_to(page, frame, READ_WRITE, &mut space.frames) }
                .map_err(|error| format!("{error:?}"))?
                .ignore();
            physical += Work::PAGE;
        }
        Ok(())
    }

    fn protect(&mut self) -> Result<(), String> {
        let space = self.space()?;
        let mut mapper = space.root.mapper();
        for page in space.pages {
            // SAFETY: as in `map`.
            unsafe { mapper.update_flags(page, READ_ONLY) }
                .map_err(|error| format!("{error:?}"))?
                .ignore();
        }
        Ok(())
    }

    fn end(&mut self, _: Course) -> Result<(), String> {
        let space = self.space()?;
        let mut mapper = space.root.mapper();
        for page in space.pages {
            let (_, flush) = mapper.unmap(page).map_err(|error| format!("{error:?}"))?;
            flush.ignore();
        }
        // SAFETY: every table was taken from this arena, and no processor uses them.
        unsafe { mapper.clean_up(&mut space.frames) };
        Ok(())
    }

    fn query(&self, virtual_address: u64) -> Option<Leaf> {
        let space = self.0.as_ref()?;
        match space
            .root
            .mapper()
            .translate(VirtAddr::new(virtual_address))
        {
            TranslateResult::Mapped {
                frame,
                offset,
                flags,
            } => Some(Leaf {
                physical: frame.start_address().as_u64() + offset,
                writable: flags.contains(PageTableFlags::WRITABLE),
            }),
            _ => None,
        }
    }

    fn root(&self) -> Option<u64> {
        Some(self.0.as_ref()?.root.0.addr().get() as u64)
    }

    fn finish(&mut self) {
        if let Some(space) = self.0.take() {
            space.frames.0.give_back(space.root.0.addr().get());
        }
    }
}
