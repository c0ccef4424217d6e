//! Instructions and registers of x86-64 that a watcher has to know (SDM volume 2): what changes the
//! tables that are in use, what invalidates, and what goes back to user mode.

use tablewright_walker::Regime;

use crate::invalidation::{Invalidation, Span};

/// An instruction that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// MOV to a control register: its number, and that of the register that holds the value.
    Control {
        /// 0, 3 or 4.
        number: u8,
        /// 0 to 15: RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
        from: u8,
    },
    /// INVLPG.
    Invlpg(Address),
    /// INVPCID: the register of its type, and the address of its descriptor.
    Invpcid {
        /// The register of the type.
        kind: u8,
        /// The address of 16 bytes: a PCID, and a linear address.
        descriptor: Address,
    },
    /// IRETQ, to whatever mode the frame on the stack says.
    Iret,
    /// SYSRET.
    Sysret,
}

/// An address in memory, of which the parts are known when it is executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Address {
    /// A register.
    pub base: Option<u8>,
    /// A register, and the power of two by which it is multiplied.
    pub index: Option<(u8, u8)>,
    /// A constant. Of one that is relative to RIP: from the first byte of the instruction.
    pub displacement: i64,
    /// It is relative to the address of the instruction.
    pub is_relative: bool,
    /// FS or GS, whose base is added: 4 or 5.
    pub segment: Option<u8>,
}

/// Finds out what an instruction is; `None`: none that matters.
pub fn decode(bytes: &[u8]) -> Option<Instruction> {
    let (mut rest, mut rex, mut is_66, mut segment) = (bytes, 0, false, None);
    // Legacy prefixes, then REX (SDM vol. 2A 2.1.1, 2.2.1).
    let opcode = loop {
        let (&byte, behind) = rest.split_first()?;
        match byte {
            0x66 => is_66 = true,
            0x64 | 0x65 => segment = Some(byte & 7),
            0x26 | 0x2e | 0x36 | 0x3e | 0x67 | 0xf0 | 0xf2 | 0xf3 => {}
            0x40..=0x4f => {
                rex = byte;
                rest = behind;
                continue;
            }
            _ => break byte,
        }
        // A REX that is not the last prefix has no effect.
        rex = 0;
        rest = behind;
    };
    let wide = |bit: u8, number: u8| number | (rex >> bit & 1) << 3;
    match (opcode, rest.get(1).copied()) {
        (0xcf, _) if rex & 8 != 0 => Some(Instruction::Iret),
        (0x0f, Some(0x07)) => Some(Instruction::Sysret),
        (0x0f, Some(0x22)) => {
            let modrm = *rest.get(2)?;
            let number = wide(2, modrm >> 3 & 7);
            let from = wide(0, modrm & 7);
            matches!(number, 0 | 3 | 4).then_some(Instruction::Control { number, from })
        }
        (0x0f, Some(0x01)) => {
            let modrm = *rest.get(2)?;
            if modrm >> 6 == 3 || modrm >> 3 & 7 != 7 {
                return None;
            }
            Some(Instruction::Invlpg(address(bytes, rest.get(2..)?, rex, segment)?))
        }
        (0x0f, Some(0x38)) if is_66 && rest.get(2) == Some(&0x82) => {
            let kind = wide(2, rest.get(3)? >> 3 & 7);
            let descriptor = address(bytes, rest.get(3..)?, rex, segment)?;
            Some(Instruction::Invpcid { kind, descriptor })
        }
        _ => None,
    }
}

/// The address that ModRM, SIB and a displacement name (SDM vol. 2A 2.1.5). They end the
/// instruction.
fn address(all: &[u8], modrm: &[u8], rex: u8, segment: Option<u8>) -> Option<Address> {
    let wide = |bit: u8, number: u8| number | (rex >> bit & 1) << 3;
    let (mode, rm) = (modrm.first()? >> 6, modrm.first()? & 7);
    let mut at = Address { segment, ..Address::default() };
    let mut rest = modrm.get(1..)?;
    let mut is_absolute = false;
    if rm == 4 {
        let (&sib, behind) = rest.split_first()?;
        rest = behind;
        let index = wide(1, sib >> 3 & 7);
        at.index = (index != 4).then_some((index, sib >> 6));
        is_absolute = sib & 7 == 5 && mode == 0;
        at.base = (!is_absolute).then_some(wide(0, sib & 7));
    } else if rm == 5 && mode == 0 {
        at.is_relative = true;
    } else {
        at.base = Some(wide(0, rm));
    }
    at.displacement = match (mode, at.is_relative || is_absolute) {
        (1, _) => i64::from(*rest.first()? as i8),
        (2, _) | (0, true) => i64::from(i32::from_le_bytes(rest.get(..4)?.try_into().ok()?)),
        _ => 0,
    };
    if at.is_relative {
        at.displacement += all.len() as i64;
    }
    Some(at)
}

impl Address {
    /// The address, with the values of registers: 0 to 15, and 16 and 17 for the bases of FS and
    /// GS.
    pub fn linear(&self, pc: u64, mut register: impl FnMut(u8) -> u64) -> u64 {
        let mut address = if self.is_relative { pc } else { 0 };
        address = address.wrapping_add_signed(self.displacement);
        if let Some(base) = self.base {
            address = address.wrapping_add(register(base));
        }
        if let Some((index, scale)) = self.index {
            address = address.wrapping_add(register(index) << scale);
        }
        match self.segment {
            Some(segment) => address.wrapping_add(register(12 + segment)),
            None => address,
        }
    }
}

/// The registers of x86-64 that say where tables are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// IA32_EFER.
    pub efer: u64,
}

/// The translations that go with a write to a control register (SDM vol. 3A 5.10.4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushes {
    /// None.
    Nothing,
    /// Those of the PCID that are not global.
    Own,
    /// All.
    All,
}

const CR4_PCIDE: u64 = 1 << 17;

impl Control {
    /// Returns the root, how it is read, and its identifier. `None`: there is no translation of
    /// 64-bit mode.
    pub fn root(&self) -> Option<(u64, Regime, u16)> {
        let is_on = self.cr0 >> 31 & 1 != 0 && self.efer >> 10 & 1 != 0;
        let levels = if self.cr4 >> 12 & 1 != 0 { 5 } else { 4 };
        let root = self.cr3 & 0x000f_ffff_ffff_f000;
        let asid = self.pcid().unwrap_or(0);
        is_on.then_some((root, Regime::X86_64 { levels }, asid))
    }

    /// The identifier of address spaces, if there are any.
    pub(crate) fn pcid(&self) -> Option<u16> {
        (self.cr4 & CR4_PCIDE != 0).then_some((self.cr3 & 0xfff) as u16)
    }

    /// Returns what a write to a control register flushes, by what it was before.
    pub fn flushes(&self, before: &Self, number: u8) -> Flushes {
        /// PGE, PAE, PSE, PCIDE, LA57, SMEP.
        const OF_CR4: u64 = 1 << 7 | 1 << 5 | 1 << 4 | CR4_PCIDE | 1 << 12 | 1 << 20;
        match number {
            3 if self.cr4 & CR4_PCIDE != 0 && self.cr3 >> 63 != 0 => Flushes::Nothing,
            3 => Flushes::Own,
            4 if (self.cr4 ^ before.cr4) & OF_CR4 != 0 => Flushes::All,
            0 if (self.cr0 ^ before.cr0) >> 31 & 1 != 0 => Flushes::All,
            _ => Flushes::Nothing,
        }
    }

    /// Returns what INVLPG of an address invalidates.
    pub fn invlpg(&self, address: u64) -> Invalidation {
        let first = address & !0xfff;
        Invalidation {
            asid: self.pcid(),
            span: Some(Span { first, last: first | 0xfff }),
            every_table: true,
            ..Invalidation::LOCAL
        }
    }

    /// Returns what INVPCID of a type, with a descriptor, invalidates (SDM vol. 2A, INVPCID).
    pub fn invpcid(&self, kind: u64, [pcid, address]: [u64; 2]) -> Invalidation {
        let one = Self { cr3: pcid & 0xfff, cr4: self.cr4 | CR4_PCIDE, ..*self };
        let by_address = one.invlpg(address);
        let all = Invalidation { span: None, every_table: false, ..by_address };
        match kind {
            0 => Invalidation { globals: false, ..by_address },
            1 => Invalidation { globals: false, ..all },
            2 => Invalidation { asid: None, ..all },
            _ => Invalidation { asid: None, globals: false, ..all },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Address, Instruction, decode};

    /// Encodings as an assembler gives them.
    #[test]
    fn instructions_are_what_the_manual_says() {
        let base = |base| Address { base: Some(base), ..Address::default() };
        for (bytes, is) in [
            // mov %rdi, %cr3; mov %r12, %cr4; mov %rax, %cr0; mov %rax, %cr2
            (&[0x0f, 0x22, 0xdf][..], Some(Instruction::Control { number: 3, from: 7 })),
            (&[0x41, 0x0f, 0x22, 0xe4], Some(Instruction::Control { number: 4, from: 12 })),
            (&[0x0f, 0x22, 0xc0], Some(Instruction::Control { number: 0, from: 0 })),
            (&[0x0f, 0x22, 0xd0], None),
            // invlpg (%rdi); invlpg (%r8); invlpg 0x10(%rsp)
            (&[0x0f, 0x01, 0x3f], Some(Instruction::Invlpg(base(7)))),
            (&[0x41, 0x0f, 0x01, 0x38], Some(Instruction::Invlpg(base(8)))),
            (
                &[0x0f, 0x01, 0x7c, 0x24, 0x10],
                Some(Instruction::Invlpg(Address { displacement: 16, ..base(4) })),
            ),
            // swapgs; rdtscp; lgdt (%rax)
            (&[0x0f, 0x01, 0xf8], None),
            (&[0x0f, 0x01, 0xf9], None),
            (&[0x0f, 0x01, 0x10], None),
            // invpcid (%rsp), %rax
            (
                &[0x66, 0x0f, 0x38, 0x82, 0x04, 0x24],
                Some(Instruction::Invpcid { kind: 0, descriptor: base(4) }),
            ),
            // iretq; iretl; sysretq
            (&[0x48, 0xcf], Some(Instruction::Iret)),
            (&[0xcf], None),
            (&[0x48, 0x0f, 0x07], Some(Instruction::Sysret)),
            (&[], None),
            (&[0x0f], None),
            (&[0x0f, 0x01, 0x7c], None),
        ] {
            assert_eq!(decode(bytes), is, "{bytes:x?}");
        }
    }

    #[test]
    fn addresses_are_added_up() {
        // invlpg %gs:-8(%rbx,%rcx,4); invlpg 0x100(%rip)
        let Some(Instruction::Invlpg(address)) = decode(&[0x65, 0x0f, 0x01, 0x7c, 0x8b, 0xf8])
        else {
            panic!("an INVLPG");
        };
        let register = |number: u8| u64::from(number) << 20;
        assert_eq!(address.linear(0, register), (3 << 20) + (1 << 22) + (17 << 20) - 8);
        let Some(Instruction::Invlpg(address)) =
            decode(&[0x0f, 0x01, 0x3d, 0x00, 0x01, 0x00, 0x00])
        else {
            panic!("an INVLPG");
        };
        assert_eq!(address.linear(0x1000, register), 0x1107);
    }
}
