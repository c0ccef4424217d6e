//! Instructions, as they are executed. All are for supervisor mode; elsewhere they end in an
//! exception.

use core::arch::asm;

use super::{Fence, Fences, Instruction};

/// Executes one instruction of a flush, on a hart that has it. What is forgotten is found again in
/// the tables; that is always allowed.
///
/// A register that holds zero is not x0, so that address and identifier 0 are themselves. By their
/// fields: not every assembler knows Svinval and HFENCE.
#[inline]
pub fn execute(instruction: Instruction) {
    // SAFETY: forgetting is always allowed. Each is a compiler barrier as well: no `nomem`.
    unsafe {
        match instruction {
            Instruction::Sfence { at: None, asid: None } => asm!("sfence.vma", options(nostack)),
            Instruction::Sfence { at: Some(at), asid: None } => {
                asm!("sfence.vma {}, x0", in(reg) at, options(nostack))
            }
            Instruction::Sfence { at: None, asid: Some(asid) } => {
                asm!("sfence.vma x0, {}", in(reg) u64::from(asid), options(nostack))
            }
            Instruction::Sfence { at: Some(at), asid: Some(asid) } => {
                asm!("sfence.vma {}, {}", in(reg) at, in(reg) u64::from(asid), options(nostack))
            }
            // PRIV 18.3.2: the address is shifted by two.
            Instruction::Hfence { at: None, vmid: None } => {
                asm!(".insn r 0x73, 0, 0x31, x0, x0, x0", options(nostack))
            }
            Instruction::Hfence { at: Some(at), vmid: None } => {
                asm!(".insn r 0x73, 0, 0x31, x0, {}, x0", in(reg) at >> 2, options(nostack))
            }
            Instruction::Hfence { at: None, vmid: Some(vmid) } => {
                asm!(
                    ".insn r 0x73, 0, 0x31, x0, x0, {}", in(reg) u64::from(vmid),
                    options(nostack)
                )
            }
            Instruction::Hfence { at: Some(at), vmid: Some(vmid) } => {
                asm!(
                    ".insn r 0x73, 0, 0x31, x0, {}, {}", in(reg) at >> 2,
                    in(reg) u64::from(vmid), options(nostack)
                )
            }
            Instruction::Begin => asm!(".insn r 0x73, 0, 0xc, x0, x0, x0", options(nostack)),
            Instruction::Sinval { at, asid: None } => {
                asm!(".insn r 0x73, 0, 0xb, x0, {}, x0", in(reg) at, options(nostack))
            }
            Instruction::Sinval { at, asid: Some(asid) } => {
                asm!(
                    ".insn r 0x73, 0, 0xb, x0, {}, {}", in(reg) at, in(reg) u64::from(asid),
                    options(nostack)
                )
            }
            Instruction::End => asm!(".insn r 0x73, 0, 0xc, x0, x0, x1", options(nostack)),
        }
    }
}

/// Loads `satp`. Unless `keep`, fences stand before and behind it: walks find what was stored to
/// the tables before, and this hart has forgotten all that it held under the identifier.
///
/// # Safety
/// 1. The value is [`satp`](super::satp) of the root of tables that translate everything that this
///    hart uses, as it uses it, and that stay while they are loaded.
/// 2. If what is remembered under the identifier is kept, it was remembered of these tables, and
///    all that was changed in them since has been forgotten here.
#[inline]
pub unsafe fn load_satp(value: u64, keep: bool) {
    let asid = (value >> 44) as u16;
    if !keep {
        // A fence of one identifier orders no stores to global leaves (PRIV 10.2.1).
        execute(Instruction::Sfence { at: None, asid: None });
    }
    // SAFETY: (1., 2.).
    unsafe { asm!("csrw satp, {}", in(reg) value, options(nostack)) };
    if !keep {
        // Walks of the tables before may have been under way (PRIV 10.1.11).
        execute(Instruction::Sfence { at: None, asid: Some(asid) });
    }
}

/// How many bits of an identifier this hart has: those that stay when all of them are written to
/// the field of `satp` (PRIV 10.1.11). With translation on; nothing is remembered under what is
/// tried.
pub fn asid_bits() -> u32 {
    let found: u64;
    // SAFETY: the root and the mode stay, and the identifier is as before when it returns; what was
    // found under the other in between is forgotten.
    unsafe {
        asm!(
            "csrr {value}, satp",
            "or {all}, {all}, {value}",
            "csrw satp, {all}",
            "csrr {all}, satp",
            "csrw satp, {value}",
            "sfence.vma",
            value = out(reg) _, all = inout(reg) 0xffffu64 << 44 => found,
            options(nostack)
        )
    };
    (found >> 44 & 0xffff).count_ones()
}

/// The firmware's fences, by an ECALL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sbi;

// SAFETY: the firmware has had the harts execute the fence when it returns (1.).
unsafe impl Fences for Sbi {
    fn fence(&self, mask: u64, base: u64, what: &Fence) -> bool {
        let error: i64;
        let (function, [start, size, id]) = what.call();
        // SAFETY: forgetting is always allowed. The firmware keeps all registers but a0 and a1 (SBI
        // 3).
        unsafe {
            asm!(
                "ecall", in("a7") Fence::EXTENSION, in("a6") function,
                inlateout("a0") mask => error, inlateout("a1") base => _,
                in("a2") start, in("a3") size, in("a4") id, options(nostack)
            )
        };
        error == 0
    }
}
