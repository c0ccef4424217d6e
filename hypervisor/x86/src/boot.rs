//! From the loader to Rust: 32-bit mode without paging, the long mode, and a map of the first 8 GiB
//! for the time being.
//!
//! The loader follows PVH, the boot protocol of Xen's that QEMU speaks: it finds the entry point in
//! a note of the image, and hands over the address of a [`StartInfo`]. A processor that has 5
//! levels of tables gets them, others 4.

use core::arch::global_asm;
use core::ffi::{CStr, c_char};
use core::ptr;

/// The loader's information (`struct hvm_start_info`).
#[repr(C)]
pub struct StartInfo {
    magic: u32,
    version: u32,
    flags: u32,
    modules: u32,
    module_list: u64,
    command_line: u64,
}

const MAGIC: u32 = 0x336e_c578;

/// The command line that the loader found.
///
/// # Safety
/// 1. `info` is what the loader handed over, and is mapped one to one, like what it points to.
pub unsafe fn command_line(info: u64) -> &'static str {
    // SAFETY: the loader's (1.).
    let info = unsafe { &*ptr::with_exposed_provenance::<StartInfo>(info as usize) };
    if info.magic != MAGIC || info.command_line == 0 {
        return "";
    }
    let text = ptr::with_exposed_provenance::<c_char>(info.command_line as usize);
    // SAFETY: the loader ends it with a zero (1.).
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or_default()
}

unsafe extern "C" {
    safe static text_start: u8;
    safe static constants_start: u8;
    safe static data_start: u8;
    safe static image_end: u8;
}

/// Returns the addresses of the image's code, constants and data, and of its end.
pub fn image() -> [u64; 4] {
    [&raw const text_start, &raw const constants_start, &raw const data_start, &raw const image_end]
        .map(|symbol| symbol as u64)
}

global_asm!(
    r#"
    .pushsection .note.Xen, "a", @note
    .long 4, 8, 18                  // XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .quad pvh_start
    .popsection

    // The first 8 GiB one to one, in leaves of 2 MiB.
    .pushsection .data.tables, "aw"
    .balign 4096
    tables_5: .quad tables_4 + 3
    .fill 511, 8, 0
    tables_4: .quad tables_3 + 3
    .fill 511, 8, 0
    tables_3: .quad tables_2 + 3, tables_2 + 0x1003, tables_2 + 0x2003, tables_2 + 0x3003
    .quad tables_2 + 0x4003, tables_2 + 0x5003, tables_2 + 0x6003, tables_2 + 0x7003
    .fill 504, 8, 0
    tables_2:
    .set page, 0x83
    .rept 4096
    .quad page
    .set page, page + 0x200000
    .endr
    .popsection

    .pushsection .rodata.boot, "a"
    .balign 8
    segments: .quad 0, 0x00af9a000000ffff
    segments_pointer:
    .word 15
    .long segments
    .popsection

    .pushsection .bss.stack, "aw", @nobits
    .balign 16
    .skip 0x10000
    stack_end:
    .popsection

    .pushsection .text.boot, "ax"
    .code32
    .global pvh_start
    pvh_start:
    cli
    cld
    mov ebp, ebx                    // the loader's information, out of the way of CPUID
    mov esp, offset stack_end
    mov esi, offset tables_4
    mov edi, 0xa0                   // CR4.PAE, PGE
    mov eax, 7
    xor ecx, ecx
    cpuid
    bt ecx, 16
    jnc 2f
    mov esi, offset tables_5
    or edi, 0x1000                  // CR4.LA57
2:  mov cr4, edi
    mov cr3, esi
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x900                   // EFER.LME, NXE
    wrmsr
    mov eax, cr0
    or eax, 0x80010001              // CR0.PG, WP, PE
    mov cr0, eax
    lgdt [segments_pointer]
    push 8
    mov eax, offset long_start
    push eax
    retf

    .code64
    long_start:
    xor eax, eax
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov esp, offset stack_end
    mov edi, ebp
    call main
    ud2
    .popsection
    "#
);
