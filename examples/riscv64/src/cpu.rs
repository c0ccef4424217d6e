//! A hart, but for its page tables: traps, and a user.

use core::arch::{asm, global_asm, naked_asm};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::memory::CPUS;

/// Causes of traps: what the user calls, page faults of a fetch, a load and a store, and what
/// another hart sends.
pub const CALL: u64 = 8;
pub const PAGE_FAULTS: [u64; 3] = [12, 13, STORE_FAULT];
pub const STORE_FAULT: u64 = 15;
pub const SHOOTDOWN: u64 = 1 << 63 | 1;

/// The registers at a trap.
#[repr(C)]
pub struct Frame {
    registers: [u64; 32],
    pub at: u64,
    status: u64,
    pub cause: u64,
    /// The address of a page fault.
    pub value: u64,
}

impl Frame {
    pub fn is_user(&self) -> bool {
        self.status & 1 << 8 == 0 // SPP
    }
}

global_asm!(
    r#"
    // `sscratch` is zero in the kernel. In the user it is the top of this hart's stack of traps, at
    // which its number stands.
    .global trap_entry
    .balign 4
    trap_entry:
    csrrw sp, sscratch, sp
    bnez sp, 1f
    csrr sp, sscratch
    addi sp, sp, -288
    sd tp, 32(sp)
    j 2f
    1: addi sp, sp, -288
    sd tp, 32(sp)
    ld tp, 288(sp)
    2: sd x1, 8(sp)
    sd x3, 24(sp)
    .irp n, 5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
    sd x\n, 8*\n(sp)
    .endr
    csrr t0, sscratch
    sd t0, 16(sp)
    csrw sscratch, zero
    csrr t0, sepc
    sd t0, 256(sp)
    csrr t0, sstatus
    sd t0, 264(sp)
    csrr t0, scause
    sd t0, 272(sp)
    csrr t0, stval
    sd t0, 280(sp)
    mv a0, sp
    call trapped
    ld t0, 256(sp)
    csrw sepc, t0
    ld t0, 264(sp)
    csrw sstatus, t0
    andi t0, t0, 0x100
    bnez t0, 3f
    addi t0, sp, 288
    csrw sscratch, t0
    3: ld x1, 8(sp)
    ld x3, 24(sp)
    ld tp, 32(sp)
    .irp n, 5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
    ld x\n, 8*\n(sp)
    .endr
    ld sp, 16(sp)
    sret
    "#
);

unsafe extern "C" {
    safe static trap_entry: u8;
}

#[repr(align(16))]
struct Stack([AtomicU64; 2048]);

/// The stack of a trap from the user, at the end of it the hart's number, and the place where the
/// kernel left its own.
static TRAP_STACK: [Stack; CPUS] = [const { Stack([const { AtomicU64::new(0) }; 2048]) }; CPUS];
static LEFT: [AtomicU64; CPUS] = [const { AtomicU64::new(0) }; CPUS];

/// Sets this hart's traps up, and its number.
pub fn set_up(number: usize) {
    TRAP_STACK[number].0[2046].store(number as u64, Ordering::Relaxed);
    // SAFETY: the entry saves what the function behind it changes; nothing else uses `tp`. A
    // message of another hart interrupts the user: SSIE.
    unsafe {
        asm!(
            "mv tp, {number}", "csrw sscratch, zero", "csrw stvec, {entry}", "csrw sie, {ssie}",
            number = in(reg) number, entry = in(reg) &raw const trap_entry, ssie = in(reg) 2
        )
    };
}

/// The number of this hart, among those that run.
pub fn number() -> usize {
    let number;
    // SAFETY: a register that `set_up` and a trap have set.
    unsafe { asm!("mv {}, tp", out(reg) number, options(nomem, nostack, preserves_flags)) };
    number
}

/// Does nothing: a place that `xtask/plugin` knows.
pub fn mark<const NUMBER: u32>() {
    // SAFETY: nothing is written.
    unsafe { asm!("slti x0, x0, {}", const NUMBER) };
}

/// Ends an interrupt.
pub fn end_of_interrupt() {
    // SAFETY: the bit of the message that is being answered.
    unsafe { asm!("csrci sip, 2") };
}

/// Runs the user from `at` on, with three arguments, until [`leave_user`], whose result it returns.
pub fn run_user(at: u64, arguments: [u64; 3]) -> u64 {
    let cpu = number();
    let top = &raw const TRAP_STACK[cpu].0[2046] as u64;
    // SAFETY: the user has no access to what the kernel has mapped for itself, and comes back by a
    // trap.
    unsafe { enter(arguments[0], arguments[1], arguments[2], at, LEFT[cpu].as_ptr(), top) }
}

/// Abandons the trap from the user that is handled, and has [`run_user`] return.
///
/// # Safety
/// 1. It is called in a trap from the user, and nothing that the trap has made is dropped, or has
///    to be.
pub unsafe fn leave_user(result: u64) -> ! {
    // SAFETY: where `enter` has left its stack (1.).
    unsafe { leave(result, LEFT[number()].load(Ordering::Relaxed)) }
}

#[unsafe(naked)]
unsafe extern "C" fn enter(a: u64, b: u64, c: u64, at: u64, left: *mut u64, top: u64) -> u64 {
    naked_asm!(
        "addi sp, sp, -112",
        "sd ra, 0(sp); sd s0, 8(sp); sd s1, 16(sp); sd s2, 24(sp); sd s3, 32(sp); sd s4, 40(sp)",
        "sd s5, 48(sp); sd s6, 56(sp); sd s7, 64(sp); sd s8, 72(sp); sd s9, 80(sp)",
        "sd s10, 88(sp); sd s11, 96(sp)",
        "sd sp, 0(a4)",
        "csrw sscratch, a5",
        "csrw sepc, a3",
        "li t0, 0x100", // SPP: to the user
        "csrc sstatus, t0",
        "sret",
    )
}

#[unsafe(naked)]
unsafe extern "C" fn leave(result: u64, left: u64) -> ! {
    naked_asm!(
        "mv sp, a1",
        "ld ra, 0(sp); ld s0, 8(sp); ld s1, 16(sp); ld s2, 24(sp); ld s3, 32(sp); ld s4, 40(sp)",
        "ld s5, 48(sp); ld s6, 56(sp); ld s7, 64(sp); ld s8, 72(sp); ld s9, 80(sp)",
        "ld s10, 88(sp); ld s11, 96(sp)",
        "addi sp, sp, 112",
        "ret",
    )
}
