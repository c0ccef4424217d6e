//! From the first instruction to a kernel on a map of its own, on both processors.
//!
//! The early map is two blocks, in both halves. The kernel's own is made with the engine: code that
//! cannot be written, constants, and all memory at `OFFSET`, through which frames and tables are
//! reached. It translates the same addresses by entries of other sizes, so that no processor may
//! remember both: it is loaded from the lower half, with nothing in the upper between.

use core::arch::{global_asm, naked_asm};

use smccc::{Hvc, psci};
use tablewright::arch::arm64::{load_ttbr0_el1, set_up_el1, tcr_el1, ttbr};
use tablewright::format::{Arm64K4, MAIR};
use tablewright::{AddressSpace, Attrs, Entry, Half, Pa, Span, Va};

use crate::console::{OFFSET, RAM, UART, physical};
use crate::frames::{Tables, cpu, ids};

/// TCR_EL1: 48 bits in both halves, walks cacheable and inner shareable, 4 KiB granules (bit 31 for
/// the upper half), 40 bits of output, identifiers of 16 bits.
const TCR: u64 = {
    let half = 16 | 1 << 8 | 1 << 10 | 3 << 12;
    half | half << 16 | 1 << 31 | 2 << 32 | 1 << 36
};
/// SCTLR_EL1: what is one where features are missing, MMU, caches.
const SCTLR: u64 = 0x30d0_0800 | 1 | 1 << 2 | 1 << 12;
/// A block of an early map: accessed, inner shareable.
const BLOCK: u64 = 1 << 10 | 3 << 8 | 1;
/// ... of registers: never executed, Device-nGnRE.
const REGISTERS: u64 = BLOCK | 1 << 54 | 1 << 53 | 1 << 2;

global_asm!(
    ".section .head, \"ax\"",
    ".global head, second",
    "head:",
    "b start",
    ".long 0",
    ".quad 0", // loaded to the first 2 MiB that are free
    ".quad image_size",
    ".quad 0, 0, 0, 0",
    ".ascii \"ARM\\x64\"",
    ".long 0",
    "start:",
    "adrp x1, early",
    "ldr x2, =stack_end",
    "ldr x3, =main",
    "b enable",
    // The second processor, with the root of the kernel's map in x0.
    "second:",
    "mov x1, x0",
    "ldr x2, =second_stack_end",
    "ldr x3, =second_main",
    // On to the function in x3, on the stack in x2, with the upper half by the root in x1.
    "enable:",
    "adrp x0, identity",
    "msr ttbr0_el1, x0",
    "msr ttbr1_el1, x1",
    "ldr x0, ={mair}",
    "msr mair_el1, x0",
    "ldr x0, ={tcr}",
    "msr tcr_el1, x0",
    "isb",
    "tlbi vmalle1",
    "dsb nsh",
    "ldr x0, ={sctlr}",
    "msr sctlr_el1, x0",
    "isb",
    "ldr x0, =upper",
    "br x0",
    "upper:",
    "mov sp, x2",
    "adrp x0, vectors",
    "add x0, x0, :lo12:vectors",
    "msr vbar_el1, x0",
    "isb",
    "blr x3",
    ".ltorg",
    // By physical addresses: two blocks for the image and the devices, at OFFSET and, for the time
    // when the MMU comes on, at 0.
    ".section .tables, \"aw\"",
    ".balign 4096",
    ".global early, identity, empty",
    "identity: .quad blocks - {offset} + 3",
    ".fill 511, 8, 0",
    "early: .fill {image_index}, 8, 0",
    ".quad blocks - {offset} + 3",
    ".fill 511 - {image_index}, 8, 0",
    "blocks: .quad {registers}, 0x40000000 + {block}",
    ".fill 510, 8, 0",
    "empty: .fill 512, 8, 0",
    mair = const MAIR,
    tcr = const TCR,
    sctlr = const SCTLR,
    offset = const OFFSET,
    block = const BLOCK,
    registers = const REGISTERS,
    image_index = const OFFSET >> 39 & 511,
);

unsafe extern "C" {
    // The table above that translates nothing, the entry of the second processor, and where the
    // parts of the image end.
    static empty: [Entry; 512];
    static second: u8;
    static image: u8;
    static text_end: u8;
    static rodata_end: u8;
    static image_end: u8;
}

/// The first frame that is not of the image.
pub fn free() -> Pa {
    physical(&raw const image_end)
}

/// Maps what the kernel uses in the upper half, and returns the root.
pub fn map(tables: Tables) -> Result<Pa, &'static str> {
    let mut space = AddressSpace::<Arm64K4, _>::new_in(tables, Half::Upper).ok_or("no memory")?;
    let (start, text) = (physical(&raw const image), physical(&raw const text_end));
    let constants = physical(&raw const rodata_end);
    let mut map = |first: u64, end: u64, attrs: Attrs| {
        let span =
            Span::new(Va::new(OFFSET + first), end - first).map_err(|_| "not whole pages")?;
        let mapped = space.map(span, Pa::new(first), attrs);
        mapped.map_err(|_| "the kernel cannot be mapped")
    };
    map(RAM.start, start.get(), Attrs::KERNEL_DATA)?;
    map(start.get(), text.get(), Attrs::KERNEL_TEXT)?;
    map(text.get(), constants.get(), Attrs::KERNEL_RODATA)?;
    map(constants.get(), RAM.end, Attrs::KERNEL_DATA)?;
    map(UART, UART + 4096, Attrs::KERNEL_DEVICE)?;
    space.make_own();
    Ok(space.root())
}

/// Loads another root for the upper half, from the lower half, where the early map still has the
/// image.
///
/// # Safety
/// 1. Everything that the kernel uses is where it was, in the tables under `root`, and stays.
/// 2. The lower half is translated by the early map, and `nothing` is the root of no translation.
#[unsafe(naked)]
unsafe extern "C" fn load_upper(root: u64, nothing: u64) {
    naked_asm!(
        "adr x2, 1f",
        "ldr x3, ={offset}",
        "sub x2, x2, x3",
        "br x2",
        "1:",
        "msr ttbr1_el1, x1",
        "isb",
        "tlbi vmalle1",
        "dsb nsh",
        "isb",
        "msr ttbr1_el1, x0",
        "isb",
        "ret",
        ".ltorg",
        offset = const OFFSET,
    )
}

/// The first processor goes over to the kernel's own map.
///
/// # Safety
/// 1. `root` is that of [`map`].
pub unsafe fn switch(root: Pa) {
    // SAFETY: the image and all memory are mapped as the early map has them (1.), which the lower
    // half still is (2.).
    unsafe { load_upper(root.get(), physical(&raw const empty).get()) };
}

/// This processor reads tables as the engine was told, and has no process loaded, nor anything else
/// in the lower half.
pub fn configure() -> Result<(), &'static str> {
    let ids = ids();
    let tcr = tcr_el1::<Arm64K4, Arm64K4>(&ids, &ids.caps()).map_err(|lacks| lacks.0)?;
    leave();
    // SAFETY: both halves are read as before, but for flags that hardware may set from now on (1.);
    // what was remembered is forgotten below, before there is a process (2.).
    unsafe { set_up_el1(MAIR, tcr) };
    cpu().forget_all();
    Ok(())
}

/// Loads a process on this processor.
///
/// # Safety
/// 1. The space stays live until this processor has [left](leave) it.
/// 2. It is what this processor was told last.
pub unsafe fn load(root: Pa, id: u16) {
    // SAFETY: the lower half is the process's alone, and the caller vouches for it (1., 2.).
    unsafe { load_ttbr0_el1(ttbr::<Arm64K4>(root, id, false)) };
}

/// No process is loaded on this processor.
pub fn leave() {
    // SAFETY: nothing of the kernel's is in the lower half, and the table, which stays, translates
    // nothing (1.): under identifier 0, which no process has, nothing is remembered of another
    // (2.), but for the early map, until `configure`.
    unsafe { load_ttbr0_el1(ttbr::<Arm64K4>(physical(&raw const empty), 0, false)) };
}

/// Starts the second processor, on the kernel's map.
pub fn start_second(root: Pa) -> Result<(), &'static str> {
    let entry = physical(&raw const second);
    psci::cpu_on::<Hvc>(1, entry.get(), root.get()).map_err(|_| "the second processor stays off")
}
