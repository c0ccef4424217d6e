//! A PCI device that copies memory by itself: QEMU's `edu` (docs/specs/edu.rst of QEMU), at
//! [`SLOT`] of the first bus.

use core::ptr;

/// The address of the devices' configuration, without `highmem`.
const CONFIGURATION: u64 = 0x3f00_0000;
/// The address for registers of devices.
const REGISTERS: u64 = 0x1000_0000;
/// The place of the device.
pub const SLOT: u32 = 2;
/// By what the SMMU knows it: bus, device and function.
pub const STREAM: u32 = SLOT << 3;

/// Vendor and device.
const IS: u32 = 0x11e8_1234;
/// Its own memory, of a page.
const BUFFER: u64 = 0x4_0000;

/// The device.
pub struct Device(());

fn configuration(offset: u64) -> *mut u32 {
    let device = CONFIGURATION + (u64::from(SLOT) << 15);
    ptr::with_exposed_provenance_mut((device + offset) as usize)
}

fn register(offset: u64) -> *mut u64 {
    ptr::with_exposed_provenance_mut((REGISTERS + offset) as usize)
}

impl Device {
    /// Finds it, gives its registers a place, and lets it reach memory.
    ///
    /// # Safety
    /// 1. The MMU is off, on the machine that this is for; nothing else uses the device.
    pub unsafe fn find() -> Option<Self> {
        // SAFETY: configuration of the device (1.).
        unsafe {
            if configuration(0).read_volatile() != IS {
                return None;
            }
            configuration(0x10).write_volatile(REGISTERS as u32);
            // Command: memory, master of the bus.
            configuration(4).write_volatile(2 | 4);
        }
        Some(Self(()))
    }

    fn copy(&self, from: u64, to: u64, command: u64) {
        // SAFETY: registers of the device, which `find` has given their place: source, destination,
        // count, command.
        unsafe {
            register(0x80).write_volatile(from);
            register(0x88).write_volatile(to);
            register(0x90).write_volatile(8);
            register(0x98).write_volatile(1 | command);
            while register(0x98).read_volatile() & 1 != 0 {
                core::hint::spin_loop();
            }
        }
    }

    /// Has it read a word of memory. What it could not read it leaves as it was.
    pub fn read(&self, at: u64) {
        self.copy(at, BUFFER, 0);
    }

    /// Has it write the word that it has read last.
    pub fn write(&self, at: u64) {
        self.copy(BUFFER, at, 2);
    }
}
