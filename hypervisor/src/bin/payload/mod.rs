//! Parts of programs for the bare machine: the head by which a boot loader knows an image, frames,
//! the UART, and firmware calls.

#![allow(dead_code, unused_imports, unused_macros)] // Each program uses a part.

use core::arch::asm;
use core::cell::UnsafeCell;
use core::fmt::{self, Write as _};
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};

use smccc::{Smc, psci};
use tablewright::{Caps, Pa};

/// The head of an image of Linux (Documentation/arch/arm64/booting.rst), which may be loaded to any
/// 2 MiB. It goes on at `start`.
macro_rules! head {
    () => {
        concat!(
            ".section .head, \"ax\"\n",
            ".global head\n",
            "head:\n",
            "b start\n",
            ".long 0\n",
            ".quad 0\n",
            ".quad image_size\n",
            ".quad 0, 0, 0, 0\n",
            ".ascii \"ARM\\x64\"\n",
            ".long 0\n",
        )
    };
}
pub(crate) use head;

/// The head, and the way to `main` on the stack at the end of the image, with instructions before.
macro_rules! start {
    ($($before:literal),*) => {
        concat!(
            $crate::payload::head!(),
            "start:\n",
            "adrp x0, stack_end\n",
            "add x0, x0, :lo12:stack_end\n",
            "mov sp, x0\n",
            $($before, "\n",)*
            "bl main\n",
            "b .\n",
        )
    };
}
pub(crate) use start;

/// A program of this name, which runs a function and says how it [ended](Outcome).
macro_rules! program {
    ($name:literal, $run:path) => {
        #[unsafe(no_mangle)]
        extern "C" fn main() -> ! {
            let outcome: $crate::payload::Outcome = $run();
            match outcome {
                Ok(None) => $crate::payload::end($name, format_args!("done")),
                Ok(Some(wrong)) => $crate::payload::end($name, format_args!("done, {wrong} wrong")),
                Err(why) => $crate::payload::end($name, format_args!("WRONG: {why}")),
            }
        }

        #[panic_handler]
        fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
            $crate::payload::end($name, format_args!("WRONG: {info}"))
        }
    };
}
pub(crate) use program;

/// The outcome of a program: how many checks were wrong, if it counts them, or why it failed.
pub type Outcome = Result<Option<u32>, &'static str>;

/// The part of a platform that finds tables where they are: the MMU is off. Frames come from
/// `take`.
macro_rules! tables {
    ($take:ident) => {
        fn alloc_table(&self, _: Level) -> Option<Pa> {
            self.$take(1)
        }

        fn alloc_root(&self, _: Level, tables: usize) -> Option<Pa> {
            self.$take(tables as u64)
        }

        unsafe fn free_root(&self, _: Pa, _: Level, _: usize) {}

        unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
            let table = ptr::with_exposed_provenance_mut(frame.get() as usize);
            // SAFETY: memory does not begin at 0.
            unsafe { NonNull::new_unchecked(table) }
        }
    };
}
pub(crate) use tables;

/// The capabilities of a processor whose `VTCR_EL2.HA` and `HD` are clear.
pub const CAPS: Caps = Caps { hardware_access: false, hardware_dirty: false, ..Caps::CONSERVATIVE };

/// Frames of 4 KiB in the image, which are given out once, a root's first.
#[repr(C, align(8192))]
pub struct Frames<const COUNT: usize> {
    frames: UnsafeCell<[[u8; 4096]; COUNT]>,
    used: AtomicU64,
}

// SAFETY: each frame is used by what has taken it.
unsafe impl<const COUNT: usize> Sync for Frames<COUNT> {}

impl<const COUNT: usize> Frames<COUNT> {
    /// Frames that were not used yet.
    pub const fn new() -> Self {
        Self { frames: UnsafeCell::new([[0; 4096]; COUNT]), used: AtomicU64::new(0) }
    }

    /// Takes some, in a row.
    pub fn take(&self, count: u64) -> Option<Pa> {
        let first = self.used.fetch_add(count, Ordering::Relaxed);
        let frames = self.frames.get().expose_provenance() as u64;
        (first + count <= COUNT as u64).then(|| Pa::new(frames + first * 4096))
    }
}

/// The UART of the machine.
pub const UART: u64 = 0x900_0000;

/// A UART, of which the registers are at this address.
pub struct Console(pub u64);

/// The UART of the machine, where it is.
pub fn console() -> Console {
    Console(UART)
}

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let register = ptr::with_exposed_provenance_mut::<u32>(self.0 as usize);
        for byte in text.bytes() {
            // SAFETY: the data register of the UART, which sends what is written.
            unsafe { register.write_volatile(byte.into()) };
        }
        Ok(())
    }
}

/// A firmware call.
pub fn call(function: u64, [first, second, third]: [u64; 3]) -> i64 {
    let result;
    // SAFETY: what firmware does is asked for, or is an error. It changes no more registers than
    // these (DEN0028, 2.6).
    unsafe {
        asm!("smc #0", inout("x0") function => result, inout("x1") first => _,
            inout("x2") second => _, inout("x3") third => _);
    }
    result
}

/// Says how a program ended, and switches the machine off.
pub fn end(program: &str, how: fmt::Arguments<'_>) -> ! {
    let _ = writeln!(console(), "{program}: {how}");
    let _ = psci::system_off::<Smc>();
    loop {
        core::hint::spin_loop();
    }
}
