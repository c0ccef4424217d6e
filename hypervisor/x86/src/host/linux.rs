//! How a Linux is started: by its 64-bit boot protocol (Documentation/x86/boot.rst). The kernel was
//! put where it wants to be, with its header before it; what is left is to tell it of its memory,
//! of the first file system and of the tables.

use tablewright::hyperv::PAGE_WORDS;

use tablewright_hypervisor_common::host::Reason;

use crate::acpi;
use crate::context::{Context, EFER_SVME, State};
use crate::machine::PAGE;
use crate::ports::RESET;
use crate::vmcb::{Segment, segment};
use crate::world::Vm;

/// The address of the kernel: where it would move to otherwise.
pub const KERNEL: u64 = 16 << 20;

// What is in the guest's memory below 640 KiB.
const SEGMENTS: u64 = 0x500;
const PARAMETERS: u64 = 0x7000;
const TABLES: u64 = 0x9000;
const COMMAND_LINE: u64 = 0x2_0000;
const LOW_END: u64 = 0x9_fc00;
/// The address at which a processor begins after a reset. A kernel on reduced hardware without EFI
/// jumps there, in real mode, to reset the machine.
const RESET_VECTOR: u64 = 0xf_fff0;
const RESET_CODE: [u8; 9] = {
    let [low, high] = RESET.to_le_bytes();
    // mov dx, RESET; mov al, 1; out dx, al; 1: hlt; jmp 1b.
    [0xba, low, high, 0xb0, 1, 0xee, 0xf4, 0xeb, 0xfd]
};

// The header, and the parameters, which hold a copy of it.
const HEADER: u64 = 0x1f1;
const HEADER_END: u64 = 0x280;
const SETUP_SECTORS: usize = 0x1f1;
const MAGIC: usize = 0x202;
const VERSION: usize = 0x206;
const LOADER: usize = 0x210;
const START: usize = 0x214;
const INITRD: usize = 0x218;
const INITRD_SIZE: usize = 0x21c;
const LINE: usize = 0x228;
const LINE_MOST: usize = 0x238;
const FEATURES: usize = 0x236;
const ROOT_POINTER: usize = 0x70;
const MAP_ENTRIES: usize = 0x1e8;
const MAP: usize = 0x2d0;
/// The 64-bit entry is so far from the start.
const ENTRY: u64 = 0x200;

/// The files.
pub struct Files<'a> {
    /// The address of the first file system in the guest's memory, and its size; it may have none.
    pub initrd: (u64, u64),
    /// The kernel's command line.
    pub line: &'a str,
}

/// Sets up the guest's memory and its first vCPU. `sectors` is how long the header before the
/// kernel is.
///
/// # Errors
/// What is wrong with the kernel.
pub fn load(
    vm: &Vm,
    first: &mut Context,
    cpus: u32,
    files: &Files<'_>,
    sectors: u64,
) -> Result<(), Reason> {
    const TOO_SMALL: Reason = "the guest's memory is too small";
    let mut page = [0; PAGE_WORDS];
    let header = KERNEL.checked_sub((sectors + 1) * 512).ok_or(TOO_SMALL)?;
    let read = vm.read(header, &mut page).ok_or(TOO_SMALL)?;
    read.map_err(|_| TOO_SMALL)?;
    let mut parameters = [0u8; PAGE as usize];
    for (place, word) in parameters.chunks_exact_mut(8).zip(page) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    let number = |at: usize, size: usize| {
        parameters[at..at + size]
            .iter()
            .rev()
            .fold(0u64, |number, byte| number << 8 | u64::from(*byte))
    };
    if &parameters[MAGIC..MAGIC + 4] != b"HdrS" || number(SETUP_SECTORS, 1) != sectors {
        return Err("there is no kernel (bzImage) where one should be");
    }
    if number(VERSION, 2) < 0x20e || number(FEATURES, 2) & 1 == 0 {
        return Err("the kernel is too old, or not one of 64 bits");
    }
    if files.line.len() as u64 > number(LINE_MOST, 4) {
        return Err("the command line is too long");
    }
    parameters[..HEADER as usize].fill(0);
    parameters[HEADER_END as usize..].fill(0);

    let map = [(0, LOW_END, 1u32), (acpi::START, acpi::END, 3), (acpi::END, vm.memory.size(), 1)];
    let root = acpi::write(vm, cpus).ok_or(TOO_SMALL)?;
    let (initrd, initrd_size) = files.initrd;
    let mut set = |at: usize, bytes: &[u8]| parameters[at..at + bytes.len()].copy_from_slice(bytes);
    set(LOADER, &[0xff]);
    set(START, &(KERNEL as u32).to_le_bytes());
    set(INITRD, &(initrd as u32).to_le_bytes());
    set(INITRD_SIZE, &(initrd_size as u32).to_le_bytes());
    set(LINE, &(COMMAND_LINE as u32).to_le_bytes());
    set(ROOT_POINTER, &root.to_le_bytes());
    set(MAP_ENTRIES, &[map.len() as u8]);
    for (index, (start, end, kind)) in map.into_iter().enumerate() {
        let at = MAP + 20 * index;
        set(at, &start.to_le_bytes());
        set(at + 8, &(end - start).to_le_bytes());
        set(at + 16, &kind.to_le_bytes());
    }
    let write = |at: u64, bytes: &[u8]| vm.write(at, bytes).ok_or(TOO_SMALL);
    write(RESET_VECTOR, &RESET_CODE)?;
    write(PARAMETERS, &parameters)?;
    write(COMMAND_LINE, files.line.as_bytes())?;
    write(COMMAND_LINE + files.line.len() as u64, &[0])?;

    // The first 4 GiB one to one, in pages of 2 MiB.
    let entry = |at: u64, value: u64| write(at, &value.to_le_bytes());
    entry(TABLES, (TABLES + PAGE) | 3)?;
    for gigabyte in 0..4 {
        let table = TABLES + (2 + gigabyte) * PAGE;
        entry(TABLES + PAGE + 8 * gigabyte, table | 3)?;
        for index in 0..512 {
            entry(table + 8 * index, (gigabyte << 30 | index << 21) | 0x83)?;
        }
    }
    let segments = [0, 0, 0x00af_9a00_0000_ffff_u64, 0x00cf_9200_0000_ffff];
    for (index, descriptor) in (0..).zip(segments) {
        entry(SEGMENTS + 8 * index, descriptor)?;
    }
    enter(first);
    Ok(())
}

/// The state in which the kernel is entered.
fn enter(first: &mut Context) {
    const PROTECTED_AND_PAGING: u64 = 1 << 31 | 1 << 5 | 1 << 4 | 1;
    const PAE: u64 = 1 << 5;
    const LONG: u64 = 1 << 8 | 1 << 10;
    let block = &mut *first.block;
    let flat = |selector, attributes| Segment { selector, attributes, limit: u32::MAX, base: 0 };
    for place in 0..6 {
        block.segments[place] = flat(0x18, 0xc93);
    }
    block.segments[segment::CODE] = flat(0x10, 0xa9b);
    block.segments[segment::GLOBALS] = Segment { limit: 31, base: SEGMENTS, ..Segment::default() };
    block.cr0 = PROTECTED_AND_PAGING;
    block.cr3 = TABLES;
    block.cr4 = PAE;
    block.efer = EFER_SVME | LONG;
    block.instruction = KERNEL + ENTRY;
    first.registers.rsi = PARAMETERS;
    first.state = State::Runnable;
}
