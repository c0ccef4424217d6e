//! Instructions of arm64 that a watcher has to know (DDI 0487 C5, C6): what changes the tables that
//! are in use, what orders, and what invalidates.

use tablewright_walker::{Granule, Regime};

use crate::invalidation::{Hint, Invalidation, Span, Stages};

/// An instruction that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// A write to one of the registers that decide where tables are.
    Write(Register),
    /// An invalidation. Its operand is known when it is executed.
    Tlbi(Tlbi),
    /// DSB.
    Barrier {
        /// It waits for other processors: its domain is more than the processor's own.
        everywhere: bool,
        /// It waits for loads as well as for stores, and so for invalidations.
        whole: bool,
    },
    /// ISB, or a return from an exception: writes of registers before it are in effect after it.
    Synchronize,
    /// DC ZVA, DC GZVA: zeroes a block of memory.
    Zero,
    /// SETP, the first of the three that set a range.
    Set {
        /// The number of the register that holds the first address.
        address: u8,
        /// That of the register of the number of bytes.
        bytes: u8,
    },
    /// CPYP, the first of the three that copy a range.
    Copy {
        /// The number of the register that holds the first address that is stored to.
        to: u8,
        /// That of the register of the first address that is read.
        from: u8,
        /// That of the register of the number of bytes.
        bytes: u8,
    },
}

/// A register of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// `SCTLR_EL1`
    Sctlr,
    /// `TTBR0_EL1`
    Ttbr0,
    /// `TTBR1_EL1`
    Ttbr1,
    /// `TCR_EL1`
    Tcr,
    /// `MAIR_EL1`
    Mair,
    /// `SCTLR_EL2`
    SctlrEl2,
    /// `HCR_EL2`
    Hcr,
    /// `TTBR0_EL2`
    TtbrEl2,
    /// `TCR_EL2`
    TcrEl2,
    /// `MAIR_EL2`
    MairEl2,
    /// `VTTBR_EL2`
    Vttbr,
    /// `VTCR_EL2`
    Vtcr,
}

/// The fields of a TLBI that say which it is (C5.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tlbi {
    op1: u8,
    crm: u8,
    op2: u8,
}

/// Finds out what an instruction is; `None`: none that matters.
pub fn decode(instruction: u32) -> Option<Instruction> {
    let field = |first: u32, bits: u32| (instruction >> first & ((1 << bits) - 1)) as u8;
    // C6.2, DSB: CRm is the domain and what it is about. One that is about loads alone orders
    // nothing here.
    if instruction & 0xffff_f0ff == 0xd503_309f {
        let (domain, about) = (field(10, 2), field(8, 2));
        let everywhere = domain != 1;
        return (about != 1).then_some(Instruction::Barrier { everywhere, whole: about != 2 });
    }
    // DSB with nXS: whole, of the domain in CRm<3:2>.
    if instruction & 0xffff_f3ff == 0xd503_323f {
        return Some(Instruction::Barrier { everywhere: field(10, 2) != 1, whole: true });
    }
    // ISB; ERET, ERETAA and ERETAB, which are context synchronization events (D1.6.4).
    if instruction & 0xffff_f0ff == 0xd503_30df
        || matches!(instruction, 0xd69f_03e0 | 0xd69f_0bff | 0xd69f_0fff)
    {
        return Some(Instruction::Synchronize);
    }
    // SYS with op0 1 and CRn 8, or 9 for those that do not wait for some devices.
    if instruction & 0xfff8_e000 == 0xd508_8000 {
        let (op1, crm, op2) = (field(16, 3), field(8, 4), field(5, 3));
        return Some(Instruction::Tlbi(Tlbi { op1, crm, op2 }));
    }
    // DC ZVA is SYS #3, c7, c4, #1; DC GZVA has op2 4.
    if matches!(instruction & 0xffff_ffe0, 0xd50b_7420 | 0xd50b_7480) {
        return Some(Instruction::Zero);
    }
    // SETP, SETPN, SETPT, SETPTN, and with tags SETGP: op2 bits 15:14 zero.
    if instruction & 0xfbe0_cc00 == 0x19c0_0400 {
        return Some(Instruction::Set { address: field(0, 5), bytes: field(5, 5) });
    }
    // CPYP and CPYFP, with all their hints in op2.
    if instruction & 0xfbe0_0c00 == 0x1900_0400 {
        let (to, from, bytes) = (field(0, 5), field(16, 5), field(5, 5));
        return Some(Instruction::Copy { to, from, bytes });
    }
    // MSR of a register.
    Some(Instruction::Write(match instruction & 0xffff_ffe0 {
        0xd518_1000 => Register::Sctlr,
        0xd518_2000 => Register::Ttbr0,
        0xd518_2020 => Register::Ttbr1,
        0xd518_2040 => Register::Tcr,
        0xd518_a200 => Register::Mair,
        0xd51c_1000 => Register::SctlrEl2,
        0xd51c_1100 => Register::Hcr,
        0xd51c_2000 => Register::TtbrEl2,
        0xd51c_2040 => Register::TcrEl2,
        0xd51c_2100 => Register::Vttbr,
        0xd51c_2140 => Register::Vtcr,
        0xd51c_a200 => Register::MairEl2,
        _ => return None,
    }))
}

/// The number of the register that an instruction takes its operand from: 31 is zero.
pub const fn operand(instruction: u32) -> u8 {
    (instruction & 31) as u8
}

impl Tlbi {
    /// Returns what it invalidates on a processor with these registers; `None`: nothing that is
    /// looked at.
    pub fn of(self, operand: u64, registers: &Registers) -> Option<Invalidation> {
        let vmid = Some(registers.vmid());
        // By intermediate physical addresses, which have an order of their own.
        if let (4, 0 | 4) = (self.op1, self.crm) {
            let (is_range, leaves_only, broadcast) = match (self.crm, self.op2) {
                (0, 1) | (4, 0) => (false, false, true),
                (0, 5) | (4, 4) => (false, true, true),
                (0, 2) | (4, 3) => (true, false, true),
                (0, 6) | (4, 7) => (true, true, true),
                (4, 1) => (false, false, false),
                (4, 5) => (false, true, false),
                (4, 2) => (true, false, false),
                (4, 6) => (true, true, false),
                _ => return None,
            };
            let (span, hint) = match is_range {
                true => range(operand, registers.vtcr >> 32 & 1 != 0)?,
                false => page(operand),
            };
            let (span, stages) = (Some(span), Stages::Second);
            let of = Invalidation { stages, vmid, broadcast, ..Invalidation::LOCAL };
            return Some(Invalidation { span, hint, leaves_only, ..of });
        }
        let (is_range, broadcast) = match self.crm {
            1 | 3 => (false, true),
            2 | 5 => (true, true),
            6 => (true, false),
            7 => (false, false),
            _ => return None,
        };
        let all = Invalidation { vmid, broadcast, ..Invalidation::LOCAL };
        let asid = Some((operand >> 48) as u16);
        match (self.op1, self.op2, is_range) {
            (0, 0, false) => Some(all),
            (0, 2, false) => Some(Invalidation { asid, globals: false, ..all }),
            (0, 1 | 3 | 5 | 7, _) => {
                let wide = registers.tcr >> 59 & 1 != 0;
                let (span, hint) = if is_range { range(operand, wide)? } else { page(operand) };
                let asid = if self.op2 & 2 == 0 { asid } else { None };
                let leaves_only = self.op2 & 4 != 0;
                Some(Invalidation { asid, span: Some(span), leaves_only, hint, ..all })
            }
            // VMALLS12E1, ALLE1, ALLE2.
            (4, 6, false) => Some(Invalidation { stages: Stages::Both, ..all }),
            (4, 4, false) => Some(Invalidation { stages: Stages::Both, vmid: None, ..all }),
            (4, 0, false) => Some(Invalidation { stages: Stages::El2, ..all }),
            (4, 1 | 5, _) => {
                let wide = registers.tcr_el2 >> 32 & 1 != 0;
                let (span, hint) = if is_range { range(operand, wide)? } else { page(operand) };
                let leaves_only = self.op2 == 5;
                let stages = Stages::El2;
                Some(Invalidation { stages, span: Some(span), leaves_only, hint, ..all })
            }
            _ => None,
        }
    }
}

/// Extends the highest bit of an address: in the half of TTBR1 all above it are ones.
const fn extended(address: u64, bits: u32) -> u64 {
    let above = 64 - bits;
    ((address << above) as i64 >> above) as u64
}

/// The operand of a TLBI by address (C5.5, TLBI VAE1): bits 55 to 12 of it, and a hint of granule
/// and level.
fn page(operand: u64) -> (Span, Option<Hint>) {
    let first = extended(operand << 12, 56);
    let hint = operand >> 44 & 0xf;
    // Without a granule there is no hint.
    let granule = match hint >> 2 {
        2 => Granule::K16,
        3 => Granule::K64,
        _ => Granule::K4,
    };
    let level = if hint >> 2 == 0 { None } else { Some((hint & 3) as i8) };
    let level = level.filter(|&level| level != 0 || granule == Granule::K4);
    let hint = level.map(|level| Hint { granule, level: Some(level) });
    (Span { first, last: first | ((1 << granule.page_shift()) - 1) }, hint)
}

/// The operand of a TLBI by range (C5.5, TLBI RVAE1).
fn range(operand: u64, wide: bool) -> Option<(Span, Option<Hint>)> {
    let granule = match operand >> 46 & 3 {
        1 => Granule::K4,
        2 => Granule::K16,
        3 => Granule::K64,
        _ => return None,
    };
    let shift = granule.page_shift();
    let unit = if wide { 16 } else { shift };
    let first = extended((operand & ((1 << 37) - 1)) << unit, 37 + unit);
    let (number, scale) = (operand >> 39 & 0x1f, operand >> 44 & 3);
    let level = (operand >> 37 & 3) as i8;
    let bytes = (number + 1) << (5 * scale + 1) << shift;
    let last = first.saturating_add(bytes - 1);
    let level = (level != 0).then_some(level);
    Some((Span { first, last }, Some(Hint { granule, level })))
}

/// The addresses that a root translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The lower half of EL1&0: of TTBR0.
    Lower,
    /// The upper half: of TTBR1.
    Upper,
    /// All addresses of EL2, without HCR_EL2.E2H.
    El2,
    /// The addresses that a guest takes for physical: stage 2.
    Guest,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Lower, Self::Upper, Self::El2, Self::Guest];
}

/// The registers of a processor that say where its tables are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Registers {
    /// SCTLR.
    pub sctlr: u64,
    /// TTBR0 and TTBR1.
    pub ttbr: [u64; 2],
    /// TCR.
    pub tcr: u64,
    /// HCR_EL2.
    pub hcr: u64,
    /// SCTLR_EL2.
    pub sctlr_el2: u64,
    /// TTBR0_EL2.
    pub ttbr_el2: u64,
    /// TCR_EL2.
    pub tcr_el2: u64,
    /// VTTBR_EL2.
    pub vttbr: u64,
    /// VTCR_EL2.
    pub vtcr: u64,
}

impl Registers {
    pub(crate) fn write(&mut self, register: Register, value: u64) {
        match register {
            // A guest's own, whose tables are at addresses of the guest's.
            Register::Sctlr | Register::Ttbr0 | Register::Ttbr1 | Register::Tcr
                if self.has_guest() => {}
            Register::Sctlr => self.sctlr = value,
            Register::Ttbr0 => self.ttbr[0] = value,
            Register::Ttbr1 => self.ttbr[1] = value,
            Register::Tcr => self.tcr = value,
            Register::SctlrEl2 => self.sctlr_el2 = value,
            Register::Hcr => self.hcr = value,
            Register::TtbrEl2 => self.ttbr_el2 = value,
            Register::TcrEl2 => self.tcr_el2 = value,
            Register::Vttbr => self.vttbr = value,
            Register::Vtcr => self.vtcr = value,
            // They do not say where tables are.
            Register::Mair | Register::MairEl2 => {}
        }
    }

    /// A host runs at EL2: HCR_EL2.E2H and TGE. There is no stage 2 then and no VMID, and registers
    /// and invalidations of EL1 are those of EL2&0 (DDI 0487 D1.5.3, D8.17.6).
    fn is_host(&self) -> bool {
        const E2H_TGE: u64 = 1 << 34 | 1 << 27;
        self.hcr & E2H_TGE == E2H_TGE
    }

    /// Stage 2 is in use: HCR_EL2.VM.
    pub(crate) fn has_guest(&self) -> bool {
        self.hcr & 1 != 0 && !self.is_host()
    }

    /// The VMID that is current: as large as VTCR_EL2.VS says.
    pub(crate) fn vmid(&self) -> u16 {
        let vmid = (self.vttbr >> 48) as u16;
        match self.vtcr >> 19 & 1 {
            _ if self.is_host() => 0,
            0 => vmid & 0xff,
            _ => vmid,
        }
    }

    /// Returns the root of a part, how it is read, and the ASID or VMID under which (DDI 0487
    /// D23.2, TCR_EL1, TTBR0_EL1). `None`: there is no translation.
    pub fn root(&self, part: Part) -> Option<(u64, Regime, u16)> {
        let field = |first: u32, bits: u32| self.tcr >> first & ((1 << bits) - 1);
        let (size, disabled, granule) = match part {
            Part::Lower => {
                (field(0, 6), field(7, 1), [Some(0), Some(2), Some(1), None][field(14, 2) as usize])
            }
            Part::Upper => (
                field(16, 6),
                field(23, 1),
                [None, Some(1), Some(0), Some(2)][field(30, 2) as usize],
            ),
            Part::El2 => {
                // With HCR_EL2.E2H, bit 34, EL2 uses the names of EL1's registers.
                let is_on = self.sctlr_el2 & 1 != 0 && self.hcr >> 34 & 1 == 0;
                let (regime, root) = el2(self.tcr_el2, self.ttbr_el2).filter(|_| is_on)?;
                return Some((root, regime, 0));
            }
            Part::Guest => {
                let forced = self.hcr >> 46 & 1 != 0;
                let (regime, root) =
                    stage2(self.vtcr, self.vttbr, forced).filter(|_| self.has_guest())?;
                return Some((root, regime, self.vmid()));
            }
        };
        if self.sctlr & 1 == 0 || disabled != 0 {
            return None;
        }
        let granule = [Granule::K4, Granule::K16, Granule::K64][granule?];
        let bits = 64 - size;
        let wide = field(59, 1) != 0 || bits > 48;
        let input_bits = input_bits(bits, 25, wide)?;
        let regime = Regime::Arm64Stage1Sized { granule, input_bits, wide };
        let root = base(self.ttbr[usize::from(part == Part::Upper)], wide);
        // TCR_EL1.A1 says which register holds the ASID, AS how large it is.
        let asid = (self.ttbr[field(22, 1) as usize] >> 48) as u16;
        let asid = if field(36, 1) != 0 { asid } else { asid & 0xff };
        Some((root, regime, asid))
    }
}

/// The size of an address, if there are such.
fn input_bits(bits: u64, least: u64, wide: bool) -> Option<u8> {
    (least..=if wide { 52 } else { 48 }).contains(&bits).then_some(bits as u8)
}

/// The address in a TTBR: with wide descriptors its highest bits are in bits 5:2.
fn base(ttbr: u64, wide: bool) -> u64 {
    match wide {
        false => ttbr & 0xffff_ffff_fffe,
        true => ttbr & 0xffff_ffff_ffc0 | (ttbr >> 2 & 0xf) << 48,
    }
}

/// TG0.
fn granule(tcr: u64) -> Option<Granule> {
    [Some(Granule::K4), Some(Granule::K64), Some(Granule::K16), None][(tcr >> 14 & 3) as usize]
}

/// Returns the root of EL2's own translation, where it has one range of addresses, and how it is
/// read (DDI 0487 D23.2, TCR_EL2). `None`: there is no such translation.
pub fn el2(tcr: u64, ttbr: u64) -> Option<(Regime, u64)> {
    let (bits, granule) = (64 - (tcr & 0x3f), granule(tcr)?);
    let wide = tcr >> 32 & 1 != 0 || bits > 48;
    let input_bits = input_bits(bits, 25, wide)?;
    Some((Regime::Arm64El2 { granule, input_bits, wide }, base(ttbr, wide)))
}

/// Returns the root of a stage 2, and how it is read, with HCR_EL2.FWB or without (DDI 0487 D23.2,
/// VTCR_EL2). `None`: there is no such translation, or it starts at another level than the lowest
/// at which it can.
pub fn stage2(vtcr: u64, vttbr: u64, forced_write_back: bool) -> Option<(Regime, u64)> {
    let (bits, granule) = (64 - (vtcr & 0x3f), granule(vtcr)?);
    let wide = vtcr >> 32 & 1 != 0 || bits > 48;
    let input_bits = input_bits(bits, 32, wide)?;
    let regime = Regime::Arm64Stage2 { granule, input_bits, wide, forced_write_back };
    // SL2 and SL0.
    let start = match (granule, vtcr >> 33 & 1, vtcr >> 6 & 3) {
        (Granule::K4, 1, 0) => -1,
        (Granule::K4, 0, start @ 0..=2) => 2 - start as i8,
        (Granule::K16 | Granule::K64, _, start) => 3 - start as i8,
        _ => return None,
    };
    (start == regime.start_level()).then(|| (regime, base(vttbr, wide)))
}

#[cfg(test)]
mod tests {
    use super::{Granule, Instruction, Part, Regime, Register, Registers, decode, el2, stage2};
    use crate::invalidation::{Hint, Invalidation, Span, Stages};

    /// Registers with VMID 3.
    fn guest() -> Registers {
        Registers { vttbr: 0xff03 << 48, ..Registers::default() }
    }

    fn tlbi(instruction: u32, operand: u64) -> Option<Invalidation> {
        match decode(instruction)? {
            Instruction::Tlbi(tlbi) => tlbi.of(operand, &guest()),
            _ => None,
        }
    }

    /// Encodings as an assembler gives them.
    #[test]
    fn instructions_are_what_the_manual_says() {
        let barrier = |everywhere, whole| Some(Instruction::Barrier { everywhere, whole });
        for (instruction, is) in [
            (0xd503_3b9f, barrier(true, true)),            // dsb ish
            (0xd503_3a9f, barrier(true, false)),           // dsb ishst
            (0xd503_379f, barrier(false, true)),           // dsb nsh
            (0xd503_369f, barrier(false, false)),          // dsb nshst
            (0xd503_3f9f, barrier(true, true)),            // dsb sy
            (0xd503_399f, None),                           // dsb ishld
            (0xd503_3bbf, None),                           // dmb ish
            (0xd503_3fdf, Some(Instruction::Synchronize)), // isb
            (0xd69f_03e0, Some(Instruction::Synchronize)), // eret
            (0xd65f_03c0, None),                           // ret
            (0xd518_2000, Some(Instruction::Write(Register::Ttbr0))),
            (0xd518_2023, Some(Instruction::Write(Register::Ttbr1))),
            (0xd518_2045, Some(Instruction::Write(Register::Tcr))),
            (0xd518_1000, Some(Instruction::Write(Register::Sctlr))),
            (0xd51c_1100, Some(Instruction::Write(Register::Hcr))),
            (0xd51c_2008, Some(Instruction::Write(Register::TtbrEl2))),
            (0xd51c_2108, Some(Instruction::Write(Register::Vttbr))),
            (0xd51c_2148, Some(Instruction::Write(Register::Vtcr))),
            (0xd50b_7420, Some(Instruction::Zero)), // dc zva, x0
            // setp [x0]!, x1!, x2
            (0x19c2_0420, Some(Instruction::Set { address: 0, bytes: 1 })),
            (0x1dc2_0420, Some(Instruction::Set { address: 0, bytes: 1 })), // setgp
            (0x19c2_4420, None),                                            // setm
            // cpyp [x3]!, [x4]!, x5!, and cpyfprtn
            (0x1d04_04a3, Some(Instruction::Copy { to: 3, from: 4, bytes: 5 })),
            (0x1904_e4a3, Some(Instruction::Copy { to: 3, from: 4, bytes: 5 })),
            (0x1d44_04a3, None), // cpym
            (0x1900_0041, None), // stlurb
        ] {
            assert_eq!(decode(instruction), is, "{instruction:#x}");
        }
    }

    #[test]
    fn invalidations_are_what_the_manual_says() {
        let all = Invalidation { vmid: Some(3), broadcast: true, ..Invalidation::LOCAL };
        // tlbi vmalle1is, vmalle1, aside1is
        assert_eq!(tlbi(0xd508_831f, 0), Some(all));
        assert_eq!(tlbi(0xd508_871f, 0), Some(Invalidation { broadcast: false, ..all }));
        let of_one = Invalidation { asid: Some(7), globals: false, ..all };
        assert_eq!(tlbi(0xd508_8340, 7 << 48), Some(of_one));
        // tlbi vale1is, with a hint of level 3 in 4 KiB granules
        let page = Invalidation {
            asid: Some(7),
            span: Some(Span { first: 0x1000, last: 0x1fff }),
            leaves_only: true,
            hint: Some(Hint { granule: Granule::K4, level: Some(3) }),
            ..all
        };
        assert_eq!(tlbi(0xd508_83a0, 7 << 48 | 7 << 44 | 1), Some(page));
        // tlbi vaale1is, of an address of the upper half
        let first = 0xffff_8000_1234_5000;
        let upper = Invalidation {
            asid: None,
            span: Some(Span { first, last: first + 0xfff }),
            leaves_only: true,
            ..all
        };
        assert_eq!(tlbi(0xd508_83e0, first >> 12 & ((1 << 44) - 1)), Some(upper));
        // tlbi rvae1is: (3 + 1) * 2^(5 * 1 + 1) pages of 4 KiB
        let range = Invalidation {
            asid: Some(1),
            span: Some(Span { first: 0x20_0000, last: 0x20_0000 + 0x10_0000 - 1 }),
            hint: Some(Hint { granule: Granule::K4, level: None }),
            ..all
        };
        let operand = 1 << 48 | 1 << 46 | 1 << 44 | 3 << 39 | 0x200;
        assert_eq!(tlbi(0xd508_8220, operand), Some(range));
        // With wide descriptors the operand counts 64 KiB.
        let Some(Instruction::Tlbi(wide)) = decode(0xd508_8220) else { panic!("a TLBI") };
        let operand = operand & !0xfff | 0x20;
        let registers = Registers { tcr: 1 << 59, ..guest() };
        assert_eq!(wide.of(operand, &registers), Some(range));
    }

    #[test]
    fn invalidations_of_a_hypervisor_are_what_the_manual_says() {
        let of = |stages| Invalidation { stages, vmid: Some(3), ..Invalidation::LOCAL };
        let everywhere = |stages| Invalidation { broadcast: true, ..of(stages) };
        // tlbi vmalls12e1is, alle1is, alle2
        assert_eq!(tlbi(0xd50c_83df, 0), Some(everywhere(Stages::Both)));
        let of_all = Invalidation { vmid: None, ..everywhere(Stages::Both) };
        assert_eq!(tlbi(0xd50c_839f, 0), Some(of_all));
        assert_eq!(tlbi(0xd50c_871f, 0), Some(of(Stages::El2)));
        // tlbi vale2is; tlbi ipas2le1is with a hint of level 3; tlbi ipas2e1. Bits above an address
        // of 52 bits are none of it.
        let page = |by| Invalidation { span: Some(Span { first: 0x1000, last: 0x1fff }), ..by };
        let leaf = |by| Invalidation { leaves_only: true, ..page(by) };
        assert_eq!(tlbi(0xd50c_83a0, 1), Some(leaf(everywhere(Stages::El2))));
        let hint = Some(Hint { granule: Granule::K4, level: Some(3) });
        let hinted = Invalidation { hint, ..leaf(everywhere(Stages::Second)) };
        assert_eq!(tlbi(0xd50c_80a0, 1 << 63 | 7 << 44 | 1), Some(hinted));
        assert_eq!(tlbi(0xd50c_8420, 1), Some(page(of(Stages::Second))));
        // tlbi rvae2is, ripas2e1is, of 64 KiB and on with wide descriptors.
        let registers = Registers { tcr_el2: 1 << 32, vtcr: 1 << 32, ..guest() };
        for instruction in [0xd50c_8220, 0xd50c_8040] {
            let Some(Instruction::Tlbi(tlbi)) = decode(instruction) else { panic!("a TLBI") };
            let span = tlbi.of(1 << 46 | 1, &registers).and_then(|by| by.span);
            assert_eq!(span, Some(Span { first: 0x1_0000, last: 0x1_1fff }));
        }
        // tlbi ripas2le1is: 2 pages.
        let hint = Some(Hint { granule: Granule::K4, level: None });
        let span = Some(Span { first: 0x1000, last: 0x2fff });
        let range = Invalidation { span, hint, ..leaf(everywhere(Stages::Second)) };
        assert_eq!(tlbi(0xd50c_80c0, 1 << 46 | 1), Some(range));
    }

    /// Values as Linux has them with 40 and 48 bits, and this project's hypervisor.
    #[test]
    fn a_hypervisors_registers_name_trees() {
        let of = |input_bits| Regime::Arm64Stage2 {
            granule: Granule::K4,
            input_bits,
            wide: false,
            forced_write_back: false,
        };
        // HCR_EL2.FWB and VM.
        let registers = Registers { hcr: 1 << 46 | 1, vtcr: 0x3558, vttbr: 0x4000_2000, ..guest() };
        let forced = Regime::Arm64Stage2 {
            granule: Granule::K4,
            input_bits: 40,
            wide: false,
            forced_write_back: true,
        };
        assert_eq!(registers.root(Part::Guest), Some((0x4000_2000, forced, 0)));
        // T0SZ 24, SL0 1: two tables at level 1. T0SZ 16, SL0 2: one at level 0.
        assert_eq!(stage2(0x8002_3558, 7 << 48 | 0x4000_2000, false), Some((of(40), 0x4000_2000)));
        assert_eq!(stage2(0x8002_3590, 0x4000_0001, false), Some((of(48), 0x4000_0000)));
        // 40 bits from level 0 on: not the lowest.
        assert_eq!(stage2(0x8002_3598, 0x4000_0000, false), None);
        let regime = Regime::Arm64El2 { granule: Granule::K4, input_bits: 39, wide: false };
        assert_eq!(el2(25, 0x4000_0000), Some((regime, 0x4000_0000)));
        assert_eq!(el2(3 << 14 | 25, 0x4000_0000), None);
    }
}
