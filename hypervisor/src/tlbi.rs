//! What the engine says that a flush takes, executed. The file is part of two programs: the hypervisor, and the kernel that makes
//! its linear map.

use core::arch::asm;

use tablewright::shootdown::arm64::{Instruction, Op};

/// Executes one instruction of a flush.
pub fn execute(instruction: Instruction) {
    macro_rules! tlbi {
        ($tlbi:ident: $($op:ident)*) => {
            match $tlbi.op {
                $(Op::$op => {
                    // Where everything is meant, the register that is named is the zero register (DDI 0487 C5.5).
                    const REGISTER: u8 = match Op::$op {
                        Op::Vmalle1 | Op::Vmalls12e1 => 31,
                        _ => 0,
                    };
                    // SAFETY: forgetting is always allowed.
                    unsafe {
                        asm!(
                            ".inst {}", const Op::$op.word(REGISTER), in("x0") $tlbi.operand,
                            options(nostack, preserves_flags)
                        )
                    }
                })*
            }
        };
    }
    match instruction {
        Instruction::Tlbi(tlbi) => tlbi!(tlbi:
            Vmalle1 Aside1 Vae1 Vale1 Vaae1 Vaale1 Rvae1 Rvale1 Rvaae1 Rvaale1
            Vmalls12e1 Ipas2e1 Ipas2le1 Ripas2e1 Ripas2le1
        ),
        // SAFETY: a barrier. It is a compiler barrier as well: no `nomem`.
        Instruction::Dsb => unsafe { asm!("dsb ish", options(nostack, preserves_flags)) },
    }
}
