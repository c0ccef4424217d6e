//! From the loader to Rust, on either processor; the image, the user's programs and the memory.
//!
//! The loader follows PVH, the boot protocol of Xen's that QEMU speaks: it finds the entry point in
//! a note of the image, enters it in 32-bit mode, and hands over where the memory is.

use core::arch::global_asm;

use arrayvec::ArrayVec;
use tablewright::{Pa, Span};

use crate::memory::{KERNEL, PAGE, linear};

/// The loader's information (`struct hvm_start_info`), and a part of its memory map.
#[repr(C)]
struct StartInfo {
    unused: [u64; 5],
    map: u64,
    entries: u32,
}

#[repr(C)]
struct Part {
    start: u64,
    size: u64,
    kind: u64,
}

unsafe extern "C" {
    safe static text_start: u8;
    safe static user_start: u8;
    safe static user_watch: u8;
    safe static rodata_start: u8;
    safe static data_start: u8;
    safe static image_end: u8;
    safe static second_start: u8;
    safe static second_end: u8;
}

/// Returns the addresses of the image's code, constants and data, and of its end.
pub fn image() -> [u64; 4] {
    [&raw const text_start, &raw const rodata_start, &raw const data_start, &raw const image_end]
        .map(|at| at as u64)
}

/// The frame of the user's programs, and how far into it is the one that watches.
pub fn programs() -> (Pa, u64) {
    let start = &raw const user_start as u64;
    (Pa::new(start - KERNEL), &raw const user_watch as u64 - start)
}

/// The memory of the machine, in whole pages: its first eight parts.
///
/// # Safety
/// 1. `info` is what the loader handed over, and its memory has not been used.
pub unsafe fn memory(info: u64) -> ArrayVec<Span<Pa>, 8> {
    // SAFETY: the loader's (1.).
    let parts = unsafe {
        let info = &*linear::<StartInfo>(Pa::new(info));
        core::slice::from_raw_parts(linear::<Part>(Pa::new(info.map)), info.entries as usize)
    };
    let ours = parts.iter().filter(|part| part.kind as u32 == 1).filter_map(|part| {
        let start = part.start.next_multiple_of(PAGE);
        let end = part.start.checked_add(part.size)? & !(PAGE - 1);
        Span::new(Pa::new(start), end.checked_sub(start)?).ok()
    });
    ours.take(8).collect()
}

/// Puts what the second processor begins with, in 16-bit mode, where it begins.
pub fn place_second(at: Pa) {
    let (from, end) = (&raw const second_start, &raw const second_end);
    // SAFETY: linked where it was loaded; and memory that nothing else uses.
    unsafe {
        linear::<u8>(at).copy_from(linear(Pa::new(from.addr() as u64)), end.addr() - from.addr())
    };
}

global_asm!(
    r#"
    .pushsection .note.Xen, "a", @note
    .long 4, 8, 18                  // XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .quad pvh_start
    .popsection

    .pushsection .boot, "awx"
    .code32
    .global pvh_start
    pvh_start:
    mov ebp, ebx                    // the loader's information
    mov eax, 0xa0                   // CR4.PAE, PGE
    mov cr4, eax
    mov eax, offset root
    mov cr3, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x900                   // EFER.LME, NXE
    wrmsr
    mov eax, 0x80010001             // CR0.PG, WP, PE
    mov cr0, eax
    lgdt [segments_pointer]
    .byte 0xea                      // jmp 8:long_start
    .long long_start
    .word 8
    // The second processor, which begins at 0x8000 in 16-bit mode, does the same.
    .code16
    .balign 16
    .global second_start, second_end
    second_start:
    jmp 1f
    .balign 8
    .word 15                        // at 0x8008
    .long segments
1:  cli
    xor ax, ax
    mov ds, ax
    lgdt [0x8008]
    mov eax, 0xa0
    mov cr4, eax
    mov eax, offset root
    mov cr3, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x900
    wrmsr
    mov eax, 0x80010001
    mov cr0, eax
    xor ebp, ebp
    .byte 0x66, 0xea                // jmp 8:long_start
    .long long_start
    .word 8
    second_end:
    .code64
    long_start:
    xor eax, eax
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov rsp, offset first_stack
    mov rdi, rbp
    mov rax, offset first_main
    test rbp, rbp
    jnz 1f
    mov rsp, offset second_stack
    mov rax, offset second_main
1:  call rax
    .balign 8
    segments: .quad 0, 0x00af9a000000ffff
    segments_pointer: .word 15
    .long segments
    // The first GiB in leaves of 2 MiB, where it is and at KERNEL, for the time being.
    .balign 4096
    root: .quad low + 3
    .fill 510, 8, 0
    .quad high + 3
    low: .quad leaves + 3
    .fill 511, 8, 0
    high: .fill 510, 8, 0
    .quad leaves + 3, 0
    leaves:
    .set page, 0x83
    .rept 512
    .quad page
    .set page, page + 0x200000
    .endr
    .popsection

    .pushsection .bss.stack, "aw", @nobits
    .balign 16
    .skip 0x4000
    first_stack:
    .skip 0x4000
    second_stack:
    .popsection

    // Programs of the user. Writes to so many (rsi) pages from rdi on; reads the word at rdi for
    // ever, and counts at rsi.
    .pushsection .user, "ax"
    .global user_watch
    user_touch:
    mov [rdi], rdi
    add rdi, 4096
    dec rsi
    jnz user_touch
    int 0x80
    user_watch:
    mov rax, [rdi]
    inc qword ptr [rsi]
    jmp user_watch
    .popsection
    "#
);
