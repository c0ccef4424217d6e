//! Programs at EL0, and the way there and back.
//!
//! A program has no stack, is position-independent, and is told by registers what to do: to write a
//! word in each page of a range, or to read it, from a word on that grows by one with each page. It
//! ends with `SVC`, and says how many pages are left.

use core::arch::{asm, global_asm};
use core::mem::offset_of;

use tablewright::{Pa, Va};
use tablewright_processes::{Fault, PAGE, TEXT, Want};

use crate::frames;

/// The registers of a program.
#[repr(C)]
pub struct Registers {
    x: [u64; 31],
    pc: u64,
    pstate: u64,
}

/// Why a program came back.
#[repr(C)]
struct Trap {
    /// ESR_EL1.
    syndrome: u64,
    /// FAR_EL1.
    at: u64,
}

unsafe extern "C" {
    /// Runs a program until its next exception. Changes no memory but the registers.
    fn run_user(registers: *mut Registers) -> Trap;
    // The programs, one after the other.
    static user_write: u8;
    static user_read: u8;
    static user_end: u8;
}

/// D, A, I and F are masked: there are no interrupts; EL0 in 64 bits.
const PSTATE: u64 = 0xf << 6;

global_asm!(
    ".text",
    ".global run_user",
    "run_user:",
    "sub sp, sp, #112",
    "str x0, [sp]",
    "stp x19, x20, [sp, #16]; stp x21, x22, [sp, #32]; stp x23, x24, [sp, #48]",
    "stp x25, x26, [sp, #64]; stp x27, x28, [sp, #80]; stp x29, x30, [sp, #96]",
    "ldp x1, x2, [x0, #{pc}]",
    "msr elr_el1, x1",
    "msr spsr_el1, x2",
    ".irp n, 2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30",
    "ldr x\\n, [x0, #8 * \\n]",
    ".endr",
    "ldp x0, x1, [x0]",
    "eret",
    // An exception from EL0: the stack is as `run_user` has left it.
    "from_user:",
    "str x0, [sp, #8]",
    "ldr x0, [sp]",
    "str x1, [x0, #8]",
    "ldr x1, [sp, #8]",
    "str x1, [x0]",
    ".irp n, 2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30",
    "str x\\n, [x0, #8 * \\n]",
    ".endr",
    "mrs x1, elr_el1",
    "mrs x2, spsr_el1",
    "stp x1, x2, [x0, #{pc}]",
    "mrs x0, esr_el1",
    "mrs x1, far_el1",
    "ldp x19, x20, [sp, #16]; ldp x21, x22, [sp, #32]; ldp x23, x24, [sp, #48]",
    "ldp x25, x26, [sp, #64]; ldp x27, x28, [sp, #80]; ldp x29, x30, [sp, #96]",
    "add sp, sp, #112",
    "ret",
    // Of the kernel itself there are none, but for mistakes.
    ".macro fatal",
    ".balign 128",
    "mrs x0, esr_el1",
    "mrs x1, far_el1",
    "mrs x2, elr_el1",
    "b exception",
    ".endm",
    ".balign 2048",
    ".global vectors",
    "vectors:",
    ".rept 8",
    "fatal",
    ".endr",
    ".balign 128",
    "b from_user",
    ".rept 7",
    "fatal",
    ".endr",
    // x0: the first address; x1: the pages; x2: the first word.
    ".section .rodata",
    ".global user_write, user_read, user_end",
    ".balign 64",
    "user_write:",
    "1: str x2, [x0]",
    "add x0, x0, #{page}",
    "add x2, x2, #1",
    "subs x1, x1, #1",
    "b.ne 1b",
    "svc #0",
    "user_read:",
    "1: ldr x3, [x0]",
    "cmp x3, x2",
    "b.ne 2f",
    "add x0, x0, #{page}",
    "add x2, x2, #1",
    "subs x1, x1, #1",
    "b.ne 1b",
    "2: svc #0",
    "user_end:",
    ".text",
    pc = const offset_of!(Registers, pc),
    page = const PAGE,
);

/// The deed of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Writes a word in each page.
    Write,
    /// Reads it, and ends where it is another.
    Read,
}

/// Why a program stopped.
pub enum Stop {
    /// It has come to its end, with so many pages left.
    Ended(u64),
    /// It has faulted.
    Fault(Fault),
    /// A syndrome that no program here causes.
    Other(u64),
}

impl Registers {
    /// Those of a program at its start, for so many pages from an address on.
    pub fn new(program: Program, first: u64, pages: u64, word: u64) -> Self {
        let start = match program {
            Program::Write => &raw const user_write,
            Program::Read => &raw const user_read,
        };
        let mut x = [0; 31];
        x[..3].copy_from_slice(&[first, pages, word]);
        Self {
            x,
            pc: TEXT + (start.addr() - (&raw const user_write).addr()) as u64,
            pstate: PSTATE,
        }
    }

    /// Runs it until it stops.
    ///
    /// # Safety
    /// 1. The process that it is of is loaded on this processor.
    pub unsafe fn run(&mut self) -> Stop {
        // SAFETY: it runs at EL0, where it reaches nothing but what the process that is loaded maps
        // for it.
        let trap = unsafe { run_user(self) };
        let Trap { syndrome, at } = trap;
        // DDI 0487 D24.2 ESR_EL1: EC 31:26; of an abort FSC 5:0, whose 5:2 are 1 for a translation
        // and 3 for a permission; of a data abort WnR 6.
        let want = match syndrome >> 26 {
            0x15 => return Stop::Ended(self.x[1]),
            0x20 => Want::Execute,
            0x24 if syndrome & 1 << 6 != 0 => Want::Write,
            0x24 => Want::Read,
            _ => return Stop::Other(syndrome),
        };
        let missing = match syndrome >> 2 & 0xf {
            1 => true,
            3 => false,
            _ => return Stop::Other(syndrome),
        };
        let at = Va::new(at);
        Stop::Fault(Fault { at, want, missing })
    }
}

/// Puts the programs into a frame.
pub fn install(frame: Pa) {
    let (from, to) = (&raw const user_write, frames::pointer::<u8>(frame));
    let size = (&raw const user_end).addr() - from.addr();
    // SAFETY: the programs, and a frame that nothing else uses yet; there is room.
    unsafe { to.copy_from_nonoverlapping(from, size) };
    // What was written is what is fetched (DDI 0487 B2.7.4); no line of a cache is smaller than 16
    // bytes.
    for offset in (0..size).step_by(16) {
        // SAFETY: a line of the programs is written back; the compiler has stored all of it before
        // (no `nomem`).
        unsafe {
            asm!("dc cvau, {}", in(reg) to.wrapping_add(offset), options(nostack, preserves_flags))
        }
    }
    // SAFETY: instructions are fetched anew.
    unsafe { asm!("dsb ish", "ic ialluis", "dsb ish", "isb", options(nostack, preserves_flags)) }
}
