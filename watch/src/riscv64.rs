//! Instructions and registers of RISC-V that a watcher has to know: what loads a root, what
//! invalidates, and what goes back to user mode.
//!
//! Source: The RISC-V Instruction Set Manual, volume II, Privileged Architecture, version 20240411
//! (PRIV). Guests are not watched: `vsatp`, `hgatp` and their fences are left alone.

use tablewright_walker::Regime;

use crate::invalidation::{Invalidation, Span};

/// An instruction that matters. Registers are known by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// CSRRW, CSRRS or CSRRC of `satp`.
    Satp {
        /// Replaces the value, or sets or clears bits of it.
        how: Write,
        /// The register of the operand, or the operand.
        from: Operand,
    },
    /// SFENCE.VMA, and SINVAL.VMA, which is taken for complete (PRIV 10.2.1, 13).
    Fence {
        /// The register of an address; 0: all.
        address: u8,
        /// The register of an ASID; 0: all.
        asid: u8,
    },
    /// SRET.
    Sret,
    /// MRET.
    Mret,
}

/// The effect on a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// It gets this value.
    All,
    /// These bits are set.
    Set,
    /// These bits are cleared.
    Clear,
}

/// The operand of a write to a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// In this register.
    Register(u8),
    /// This value.
    Value(u8),
}

const SATP: u32 = 0x180;

/// Finds out what an instruction is; `None`: none that matters.
pub fn decode(word: u32) -> Option<Instruction> {
    let register = |at: u32| (word >> at & 31) as u8;
    let (rd, function, rs1, rs2) = (register(7), word >> 12 & 7, register(15), register(20));
    if word & 0x7f != 0x73 {
        return None;
    }
    match (function, word >> 25) {
        (0, 0x09 | 0x0b) if rd == 0 => Some(Instruction::Fence { address: rs1, asid: rs2 }),
        (0, _) => match word {
            0x1020_0073 => Some(Instruction::Sret),
            0x3020_0073 => Some(Instruction::Mret),
            _ => None,
        },
        // Of zero, nothing is set or cleared, and nothing is written.
        (function, _) if word >> 20 == SATP && (function & 3 == 1 || rs1 != 0) => {
            let how = match function & 3 {
                1 => Write::All,
                2 => Write::Set,
                3 => Write::Clear,
                _ => return None,
            };
            let from = match function & 4 {
                0 => Operand::Register(rs1),
                _ => Operand::Value(rs1),
            };
            Some(Instruction::Satp { how, from })
        }
        _ => None,
    }
}

impl Write {
    /// The value after a write.
    pub fn apply(self, before: u64, operand: u64) -> u64 {
        match self {
            Self::All => operand,
            Self::Set => before | operand,
            Self::Clear => before & !operand,
        }
    }
}

/// Returns the root that `satp` or `vsatp` loads, or, of a `guest`, `hgatp`; how it is read, and
/// its identifier (PRIV 10.1.11, 18.2.10). `None`: there is no translation.
pub fn root(register: u64, guest: bool) -> Option<(u64, Regime, u16)> {
    let levels = match register >> 60 {
        mode @ 8..=10 => mode as u8 - 5,
        _ => return None,
    };
    let root = (register & ((1 << 44) - 1)) << 12;
    Some((root, Regime::Riscv { levels, guest }, (register >> 44) as u16))
}

/// Returns what a fence invalidates, with the values of its registers that are named (PRIV
/// 10.2.1): one of an address leaves of all levels, one of an ASID what is not global.
pub fn fence(address: Option<u64>, asid: Option<u64>) -> Invalidation {
    Invalidation {
        asid: asid.map(|asid| asid as u16),
        span: address.map(|at| Span { first: at & !0xfff, last: at | 0xfff }),
        leaves_only: address.is_some(),
        globals: asid.is_none(),
        ..Invalidation::LOCAL
    }
}

/// Whether SRET goes to user mode, by `sstatus` (SPP).
pub fn sret_to_user(sstatus: u64) -> bool {
    sstatus >> 8 & 1 == 0
}

/// Whether MRET goes to user mode, by `mstatus` (MPP).
pub fn mret_to_user(mstatus: u64) -> bool {
    mstatus >> 11 & 3 == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodings as an assembler gives them.
    #[test]
    fn instructions_are_what_the_manual_says() {
        let satp = |how, from| Some(Instruction::Satp { how, from });
        let fence = |address, asid| Some(Instruction::Fence { address, asid });
        for (word, is) in [
            // csrw satp, a0; csrrw t0, satp, t1; csrs satp, a1; csrrc t0, satp, a2
            (0x1805_1073, satp(Write::All, Operand::Register(10))),
            (0x1803_12f3, satp(Write::All, Operand::Register(6))),
            (0x1805_a073, satp(Write::Set, Operand::Register(11))),
            (0x1806_32f3, satp(Write::Clear, Operand::Register(12))),
            // csrwi satp, 0; csrr a0, satp; csrw sscratch, a0; csrw stvec, a0
            (0x1800_5073, satp(Write::All, Operand::Value(0))),
            (0x1800_2573, None),
            (0x1405_1073, None),
            (0x1055_1073, None),
            // sfence.vma; sfence.vma a0; sfence.vma zero, a1; sfence.vma a0, a1; sinval.vma a0, a1
            (0x1200_0073, fence(0, 0)),
            (0x1205_0073, fence(10, 0)),
            (0x12b0_0073, fence(0, 11)),
            (0x12b5_0073, fence(10, 11)),
            (0x16b5_0073, fence(10, 11)),
            // A fence has no destination.
            (0x1200_00f3, None),
            // sret; mret; wfi; ecall; sfence.w.inval; hfence.gvma; nop
            (0x1020_0073, Some(Instruction::Sret)),
            (0x3020_0073, Some(Instruction::Mret)),
            (0x1050_0073, None),
            (0x0000_0073, None),
            (0x1800_0073, None),
            (0x6200_0073, None),
            (0x0000_0013, None),
        ] {
            assert_eq!(decode(word), is, "{word:#x}");
        }
    }

    #[test]
    fn a_root_is_what_satp_says() {
        let sv39 = Regime::Riscv { levels: 3, guest: false };
        assert_eq!(root(8 << 60 | 7 << 44 | 0x8_0200, false), Some((0x8020_0000, sv39, 7)));
        assert_eq!(root(10 << 60, true).map(|(_, regime, _)| regime.input_bits()), Some(59));
        assert_eq!((root(0, false), root(11 << 60, true)), (None, None));
        assert_eq!(Write::Set.apply(8 << 60, 5), 8 << 60 | 5);
        assert_eq!(Write::Clear.apply(8 << 60 | 5, 8 << 60), 5);
        let span = fence(Some(0x1234), None).span;
        assert_eq!(span, Some(Span { first: 0x1000, last: 0x1fff }));
        assert!(sret_to_user(1 << 11) && !sret_to_user(1 << 8));
        assert!(mret_to_user(1 << 8) && !mret_to_user(1 << 11));
    }
}
