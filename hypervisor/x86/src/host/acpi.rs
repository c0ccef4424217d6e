//! The tables that tell the guest of its processors, its serial port and how to turn it off (ACPI
//! 6.5, chapter 5). The hardware is the reduced one: there is no timer, no interrupt controller and
//! no embedded controller of the PC's.

use arrayvec::ArrayVec;

use crate::ports::{RESET, SLEEP, SLEEP_STATUS};
use crate::world::Vm;

/// Their address, in a hole of the guest's memory map.
pub const START: u64 = 0xe_0000;
/// The end of the hole.
pub const END: u64 = 0x10_0000;

/// `\_S5`, and the serial port with neither interrupt nor driver: `Scope (\_SB) { Device (COM1) {
/// ... } }`.
#[rustfmt::skip]
const SCRIPT: [u8; 62] = [
    0x08, b'_', b'S', b'5', b'_', 0x12, 0x07, 0x04, 0x0a, 0x05, 0x00, 0x00, 0x00,
    0x10, 0x30, b'\\', b'_', b'S', b'B', b'_',
    0x5b, 0x82, 0x28, b'C', b'O', b'M', b'1',
    // _HID: EISAID ("PNP0501").
    0x08, b'_', b'H', b'I', b'D', 0x0c, 0x41, 0xd0, 0x05, 0x01,
    0x08, b'_', b'U', b'I', b'D', 0x00,
    // _CRS: IO (Decode16, 0x3f8, 0x3f8, 1, 8).
    0x08, b'_', b'C', b'R', b'S', 0x11, 0x0d, 0x0a, 0x0a,
    0x47, 0x01, 0xf8, 0x03, 0xf8, 0x03, 0x01, 0x08, 0x79, 0x00,
];

const MOST: usize = 512;
type Bytes = ArrayVec<u8, MOST>;

/// Adds bytes. What does not fit is a table that is too long, which the checks of the caller see.
fn add(bytes: &mut Bytes, more: &[u8]) {
    let _ = bytes.try_extend_from_slice(more);
}

/// A table with its header.
fn table(signature: &[u8; 4], revision: u8, body: &[u8]) -> Bytes {
    let mut bytes = Bytes::new();
    add(&mut bytes, signature);
    add(&mut bytes, &(36 + body.len() as u32).to_le_bytes());
    add(&mut bytes, &[revision, 0]);
    add(&mut bytes, b"TABLEWTABLEWRT\x01\0\0\0TABL\x01\0\0\0");
    add(&mut bytes, body);
    let sum = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    if let Some(place) = bytes.get_mut(9) {
        *place = sum.wrapping_neg();
    }
    bytes
}

/// A register that is a port of 8 bits.
fn port(number: u16) -> [u8; 12] {
    let mut address = [0; 12];
    address[..4].copy_from_slice(&[1, 8, 0, 1]);
    address[4..6].copy_from_slice(&number.to_le_bytes());
    address
}

/// Writes the tables for so many vCPUs into the guest's memory. Returns where they begin; `None` if
/// there is no room.
pub fn write(vm: &Vm, cpus: u32) -> Option<u64> {
    let mut next = START + 64;
    let mut put = |bytes: &[u8]| {
        let at = next;
        next = (at + bytes.len() as u64).next_multiple_of(16);
        if next > END {
            return None;
        }
        vm.write(at, bytes).map(|()| at)
    };

    let script = put(&table(b"DSDT", 2, &SCRIPT))?;

    // FADT: by their offsets in the table.
    let mut body = [0; 276 - 36];
    let mut set = |offset: usize, bytes: &[u8]| {
        body[offset - 36..][..bytes.len()].copy_from_slice(bytes);
    };
    set(40, &(script as u32).to_le_bytes());
    // No VGA, no MSI, no CMOS clock.
    set(109, &0b10_1100u16.to_le_bytes());
    // WBINVD; a register for resets; reduced hardware.
    set(112, &(1u32 | 1 << 10 | 1 << 20).to_le_bytes());
    set(116, &port(RESET));
    set(128, &[1]);
    set(131, &[5]);
    set(140, &script.to_le_bytes());
    set(244, &port(SLEEP));
    set(256, &port(SLEEP_STATUS));
    let fixed = put(&table(b"FACP", 6, &body))?;

    let mut body = ArrayVec::<u8, 256>::new();
    body.try_extend_from_slice(&0xfee0_0000u32.to_le_bytes()).ok()?;
    body.try_extend_from_slice(&[0; 4]).ok()?;
    for cpu in 0..cpus as u8 {
        // A local APIC that is enabled.
        body.try_extend_from_slice(&[0, 8, cpu, cpu, 1, 0, 0, 0]).ok()?;
    }
    let controllers = put(&table(b"APIC", 5, &body))?;

    let mut body = [0; 16];
    body[..8].copy_from_slice(&fixed.to_le_bytes());
    body[8..].copy_from_slice(&controllers.to_le_bytes());
    let list = put(&table(b"XSDT", 1, &body))?;

    let mut pointer = [0u8; 36];
    pointer[..8].copy_from_slice(b"RSD PTR ");
    pointer[9..15].copy_from_slice(b"TABLEW");
    pointer[15] = 2;
    pointer[20] = 36;
    pointer[24..32].copy_from_slice(&list.to_le_bytes());
    for (place, size) in [(8, 20), (32, 36)] {
        let sum = pointer[..size].iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        pointer[place] = sum.wrapping_neg();
    }
    vm.write(START, &pointer).map(|()| START)
}
