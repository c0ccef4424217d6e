//! A guest that writes its memory at a rate: what `cargo xtask migrate` has QEMU migrate.
//!
//! It begins by PVH, writes a word to each page, says so at port 0xe9, and goes on at ring 3, in
//! large pages of its own, so that a host with software paging follows it without emulation. There
//! it writes one page after the other of its set, over and over, each when its time has come by the
//! time-stamp counter: what it is kept from it makes up for. Four words at [`PARAMETERS`] say where
//! its memory begins, how many pages it has, how many of them are the set, and how many ticks lie
//! between two writes.

#![no_std]
#![no_main]

use core::arch::global_asm;
use core::panic::PanicInfo;

/// Physical address of the parameters, which the loader puts there.
pub const PARAMETERS: usize = 0x1f_0000;

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    loop {}
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
    mov eax, 0x20                   // CR4.PAE
    mov cr4, eax
    mov eax, offset root
    mov cr3, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x100                   // EFER.LME
    wrmsr
    mov eax, 0x80010001             // CR0.PG, WP, PE
    mov cr0, eax
    lgdt [segments_pointer]
    .byte 0xea                      // jmp 8:long_start
    .long long_start
    .word 8
    .code64
    long_start:
    xor eax, eax
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov rsp, offset stack
    mov rbx, {parameters}
    mov rsi, [rbx]
    mov rcx, [rbx + 8]
1:  mov [rsi], rsi
    add rsi, 4096
    dec rcx
    jnz 1b
    mov al, 'R'
    out 0xe9, al
    push 0x1b
    push offset stack
    push 2
    push 0x13
    push offset user
    iretq
    user:
    mov r9, [rbx + 16]
    mov r10, [rbx + 24]
    rdtsc
    shl rdx, 32
    lea r11, [rax + rdx]
2:  mov rsi, [rbx]
    mov rcx, r9
3:  inc qword ptr [rsi]
    add rsi, 4096
    add r11, r10
4:  pause
    rdtsc
    shl rdx, 32
    or rax, rdx
    cmp rax, r11
    jb 4b
    dec rcx
    jnz 3b
    jmp 2b
    .balign 8
    segments: .quad 0, 0x00af9a000000ffff, 0x00affa000000ffff, 0x00cff2000000ffff
    segments_pointer: .word 31
    .long segments
    .skip 256
    .balign 16
    stack:
    // Four GiB in leaves of 2 MiB, for the user too.
    .balign 4096
    root: .quad high + 7
    .fill 511, 8, 0
    high: .quad leaves + 7, leaves + 0x1007, leaves + 0x2007, leaves + 0x3007
    .fill 508, 8, 0
    leaves:
    .set page, 0x87
    .rept 2048
    .quad page
    .set page, page + 0x200000
    .endr
    .popsection
    "#,
    parameters = const PARAMETERS,
);
