//! The part of the engine that a kernel links: calls of one page, on a platform whose tables are in
//! a direct map.
#![no_std]

#[cfg(feature = "all")]
use core::ops::ControlFlow;
use core::panic::PanicInfo;
use core::ptr::NonNull;

use tablewright::{
    AddressSpace, Barrier, Caps, Encoded, Entry, Invalidation, Level, Pa, Platform, TableLink, Va,
};
#[cfg(feature = "all")]
use tablewright::{Attrs, Change, Gather, Mapping, Perms, Span};

#[cfg(feature = "arm64")]
type Format = tablewright::format::Arm64K4;
#[cfg(feature = "riscv64")]
type Format = tablewright::format::Sv48;
#[cfg(not(any(feature = "arm64", feature = "riscv64")))]
type Format = tablewright::format::X86_64<4>;

/// The address at which physical memory is mapped.
const DIRECT: u64 = 0xffff_8000_0000_0000;

unsafe extern "C" {
    fn frame_alloc() -> u64;
    fn frame_free(frame: u64);
    fn publish(complete: bool);
    fn forget(what: *const u8);
}

#[derive(Clone, Copy)]
pub struct Direct;

// SAFETY: for counting instructions only: nothing is run.
unsafe impl Platform for Direct {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        // SAFETY: as above.
        match unsafe { frame_alloc() } {
            0 => None,
            frame => Some(Pa::new(frame)),
        }
    }

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        // SAFETY: as above.
        unsafe { frame_free(frame.get()) }
    }

    #[inline(always)]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        // SAFETY: as above.
        unsafe { NonNull::new_unchecked((frame.get() | DIRECT) as *mut Entry) }
    }

    #[inline(always)]
    fn barrier(&self, barrier: Barrier) {
        // SAFETY: as above.
        unsafe { publish(barrier == Barrier::Complete) }
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        // SAFETY: as above.
        unsafe { forget(core::ptr::from_ref(what).cast()) }
    }

    fn link_of(&self, _: Pa) -> Option<&TableLink> {
        None
    }

    #[inline(always)]
    fn caps(&self) -> Caps {
        Caps::CONSERVATIVE
    }
}

type Space = AddressSpace<Format, Direct>;

/// A demand fault: a page, by a template that the kernel keeps. 0 if it was done.
#[unsafe(no_mangle)]
pub extern "C" fn fault(
    space: &mut Space,
    page: u64,
    frame: u64,
    template: &Encoded<Format>,
) -> u32 {
    u32::from(space.map_page(Va::new(page), Pa::new(frame), *template).is_err())
}

#[cfg(feature = "all")]
#[unsafe(no_mangle)]
pub extern "C" fn map(space: &mut Space, at: u64, size: u64, frame: u64) -> u32 {
    let Ok(span) = Span::new(Va::new(at), size) else {
        return 1;
    };
    let mapping = Mapping::new(Attrs::USER_DATA);
    u32::from(space.map(span, Pa::new(frame), mapping).is_err())
}

/// How this kernel ends its edits.
#[cfg(feature = "all")]
fn finish(gather: &mut Gather<'_, Format, Direct>) {
    gather.flush(|leaf| {
        // SAFETY: as above.
        unsafe { frame_free(leaf.frame().get()) }
    });
}

#[cfg(feature = "all")]
#[unsafe(no_mangle)]
pub extern "C" fn unmap(space: &mut Space, at: u64, size: u64) -> u32 {
    let Ok(span) = Span::new(Va::new(at), size) else {
        return 1;
    };
    let mut gather = space.gather();
    let unmapped = gather.unmap(span, |_| ControlFlow::Continue(()));
    finish(&mut gather);
    u32::from(unmapped.is_err())
}

#[cfg(feature = "all")]
#[unsafe(no_mangle)]
pub extern "C" fn protect(space: &mut Space, at: u64, size: u64) -> u32 {
    let Ok(span) = Span::new(Va::new(at), size) else {
        return 1;
    };
    let mut gather = space.gather();
    let change = Change::new().perms(Perms::READ | Perms::USER_READ);
    let protected = gather.protect(span, change);
    finish(&mut gather);
    u32::from(protected.is_err())
}

#[cfg(feature = "all")]
#[unsafe(no_mangle)]
pub extern "C" fn query(space: &Space, at: u64) -> u64 {
    space.query(Va::new(at)).map_or(0, |leaf| leaf.frame().get())
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    loop {}
}
