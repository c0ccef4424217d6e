//! Broadcast instructions, decoded from their operands: this puts the engine's encodings to the
//! machine's TLBs, and shares no code with them.

use tablewright::shootdown::{amd, arm64};

use crate::tlb::{Globals, Tlbi};

impl Tlbi {
    /// Decodes INVLPGB (APM vol. 3): RAX has the address and what it is valid for, ECX the count
    /// and the stride, EDX the ASID and the PCID.
    ///
    /// ```
    /// use tablewright::shootdown::amd::Invlpgb;
    /// use tablewright_machine::{Globals, Tlbi};
    /// // Two pages from 0x7000 on, under PCID 5.
    /// let tlbi = Tlbi::of_invlpgb(Invlpgb { rax: 0x7003, ecx: 1, edx: 5 << 16 });
    /// assert_eq!((tlbi.id, tlbi.range), (Some(5), Some((0x7000, 0x8fff))));
    /// assert!(tlbi.globals == Globals::Spared && tlbi.broadcast);
    /// ```
    pub fn of_invlpgb(operands: amd::Invlpgb) -> Self {
        let amd::Invlpgb { rax, ecx, edx } = operands;
        let large = ecx >> 31 != 0;
        let stride = if large { 21 } else { 12 };
        let first = rax & !0xfff;
        let last = first + ((u64::from(ecx & 0xffff) + 1) << stride) - 1;
        Self {
            id: (rax & 2 != 0).then_some((edx >> 16) as u16),
            range: (rax & 1 != 0).then_some((first, last)),
            stride: large.then_some(stride),
            leaves_only: rax & 16 != 0,
            globals: if rax & 8 != 0 { Globals::Included } else { Globals::Spared },
            ..Self::ALL
        }
    }

    /// Decodes a TLBI of stage 1 that is broadcast, with pages of so many bytes, as a power of two;
    /// `wide` where addresses are of 52 bits (DDI 0487 C5.5).
    ///
    /// ```
    /// use tablewright::shootdown::arm64::{Op, Tlbi};
    /// let page = Tlbi { op: Op::Vale1, operand: 7 << 48 | 3 << 44 | 0x1000 >> 12 };
    /// let tlbi = tablewright_machine::Tlbi::of_instruction(page, 12, false);
    /// assert_eq!((tlbi.id, tlbi.range, tlbi.depth), (Some(7), Some((0x1000, 0x1fff)), Some(0)));
    /// assert!(tlbi.leaves_only && tlbi.broadcast);
    /// ```
    pub fn of_instruction(instruction: arm64::Tlbi, page_shift: u32, wide: bool) -> Self {
        use arm64::Op;
        let arm64::Tlbi { op, operand } = instruction;
        let bits = |low: u32, count: u32| operand >> low & ((1 << count) - 1);
        let all = matches!(op, Op::Vaae1 | Op::Vaale1 | Op::Rvaae1 | Op::Rvaale1);
        let id = (!all).then_some((operand >> 48) as u16);
        let (range, ttl) = match op {
            Op::Vmalle1 => return Self::ALL,
            Op::Aside1 => return Self { id, ..Self::ALL },
            Op::Vae1 | Op::Vale1 | Op::Vaae1 | Op::Vaale1 => {
                // The leaf around an address, if its level is told.
                let (first, ttl) = (bits(0, 44) << 12, bits(44, 2));
                let below = if ttl == 0 { 0 } else { 3 - ttl as u32 };
                let size = 1 << (page_shift + below * (page_shift - 3));
                ((first, first + (size - 1)), ttl)
            }
            _ => {
                let base = if wide { 16 } else { page_shift };
                let pages = (bits(39, 5) + 1) << (5 * bits(44, 2) + 1);
                let first = bits(0, 37) << base;
                ((first, first + ((pages << page_shift) - 1)), bits(37, 2))
            }
        };
        Self {
            id,
            range: Some(range),
            depth: (ttl != 0).then(|| 3 - ttl as u8),
            leaves_only: matches!(op, Op::Vale1 | Op::Rvale1 | Op::Vaale1 | Op::Rvaale1),
            ..Self::ALL
        }
    }
}
