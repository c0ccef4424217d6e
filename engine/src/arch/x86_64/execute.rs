//! Instructions, as they are executed. All but CPUID is for the most privileged level; elsewhere it
//! ends in an exception.

use core::arch::asm;

use super::{Features, Instruction, Invept, Invpcid, Loaded};
use crate::format::PAT;
use crate::shootdown::amd::Invlpgb;

/// `CR4.PGE`.
const GLOBALS: u64 = 1 << 7;

macro_rules! control_register {
    ($name:literal, $read:ident, $write:ident) => {
        #[inline]
        fn $read() -> u64 {
            let value: u64;
            // SAFETY: a register is read. Not `nomem`: it stays where it is among the stores to
            // tables.
            unsafe {
                asm!(concat!("mov {}, ", $name), out(reg) value, options(nostack, preserves_flags))
            };
            value
        }

        /// # Safety
        /// 1. The processor goes on with this value: everything that is used is translated as it is
        ///    used.
        #[inline]
        unsafe fn $write(value: u64) {
            // SAFETY: (1.).
            unsafe { asm!(concat!("mov ", $name, ", {}"), in(reg) value,
                options(nostack, preserves_flags)) }
        }
    };
}

control_register!("cr0", read_cr0, write_cr0);
control_register!("cr3", read_cr3, write_cr3);
control_register!("cr4", read_cr4, write_cr4);

impl Loaded {
    /// Reads the control registers of this processor.
    #[inline]
    pub fn read() -> Self {
        Self { cr3: read_cr3(), cr4: read_cr4() }
    }
}

impl Features {
    /// Reads the features of this processor, by CPUID.
    pub fn read() -> Self {
        Self::from_cpuid(|leaf, sub| {
            // SAFETY: every processor of this architecture has CPUID. A function that is safe from
            // some version of the compiler on.
            #[allow(unused_unsafe)]
            let found = unsafe { core::arch::x86_64::__cpuid_count(leaf, sub) };
            [found.eax, found.ebx, found.ecx, found.edx]
        })
    }
}

/// Executes one instruction of a flush, on a processor that has it. What is forgotten is found
/// again in the tables; that is always allowed.
#[inline]
pub fn execute(instruction: Instruction) {
    match instruction {
        Instruction::Invlpg(at) => {
            // SAFETY: forgetting is always allowed. It is a compiler barrier as well: no `nomem`.
            unsafe { asm!("invlpg [{}]", in(reg) at, options(nostack, preserves_flags)) }
        }
        Instruction::Invpcid(what) => invpcid(what),
        Instruction::Invlpgb(operands) => invlpgb(operands),
        Instruction::LoadCr3 => {
            let value = read_cr3();
            // SAFETY: the root is the one that was loaded.
            unsafe { write_cr3(value) }
        }
        Instruction::ToggleCr4 => {
            let value = read_cr4();
            // SAFETY: whether leaves may be global does not change what they translate to, and it
            // is as it was before.
            unsafe {
                write_cr4(value ^ GLOBALS);
                write_cr4(value);
            }
        }
    }
}

#[inline]
fn invpcid(what: Invpcid) {
    let (kind, pcid, at) = match what {
        Invpcid::Address { pcid, at } => (0u64, pcid, at),
        Invpcid::Space(pcid) => (1, pcid, 0),
        Invpcid::Everything => (2, 0, 0),
        Invpcid::All => (3, 0, 0),
    };
    let descriptor = [u64::from(pcid & 0xfff), at];
    // SAFETY: forgetting is always allowed, and the descriptor is read.
    unsafe {
        asm!(
            "invpcid {}, [{}]", in(reg) kind, in(reg) &descriptor,
            options(nostack, preserves_flags)
        )
    }
}

#[inline]
fn invlpgb(operands: Invlpgb) {
    let Invlpgb { rax, ecx, edx } = operands;
    // SAFETY: forgetting is always allowed. By its bytes: not every assembler knows it.
    unsafe {
        asm!(
            ".byte 0x0f, 0x01, 0xfe", in("rax") rax, in("ecx") ecx, in("edx") edx,
            options(nostack, preserves_flags)
        )
    }
}

/// TLBSYNC: waits until every INVLPGB of this processor is complete on all.
#[inline]
pub fn tlbsync() {
    // SAFETY: it waits. By its bytes: not every assembler knows it.
    unsafe { asm!(".byte 0x0f, 0x01, 0xff", options(nostack, preserves_flags)) }
}

/// INVEPT, in VMX operation: what this processor remembers of a guest's memory.
#[inline]
pub fn invept(what: Invept) {
    let (kind, eptp) = match what {
        Invept::Tables(eptp) => (1u64, eptp),
        Invept::Everything => (2, 0),
    };
    let descriptor = [eptp, 0u64];
    // SAFETY: forgetting is always allowed, and the descriptor is read. It says in the flags
    // whether it was done.
    unsafe { asm!("invept {}, [{}]", in(reg) kind, in(reg) &descriptor, options(nostack)) }
}

/// Loads CR3.
///
/// # Safety
/// 1. The value is [`cr3`](super::cr3) of the root of tables that translate everything that this
///    processor uses, as it uses it, and that stay while they are loaded.
/// 2. If what is remembered under the identifier is kept, it was remembered of these tables, and
///    all that was changed in them since has been invalidated here. So it is where INVLPGB tells
///    all processors, or there is one, and root and identifier are what
///    [`Identifiers::switch`](crate::shootdown::Identifiers::switch) has told this processor last;
///    and in [`PerCpu::switch`](crate::shootdown::PerCpu::switch).
#[inline]
pub unsafe fn load_cr3(value: u64) {
    // SAFETY: passed on (1., 2.).
    unsafe { write_cr3(value) }
}

/// Sets this processor up as the format [`X86_64`](crate::format::X86_64) means it, unless it says
/// another PAT ([`set_up_with`]): `IA32_PAT` holds [`PAT`], `CR0.WP`, `EFER.NXE`, and what there is
/// of `CR4.PGE`, `SMEP`, and, if `identifiers` are wanted, `PCIDE`.
///
/// # Safety
/// 1. The tables that are loaded mean the same by the new registers: none names entry 1, 5 or 7 of
///    the PAT, none has its bit 63 set where the processor does not have it, the supervisor writes
///    nothing that is read-only and executes no page of the user.
/// 2. With `identifiers` bits 11:0 of CR3 are zero (SDM vol. 3A 5.10.1).
/// 3. Processors do this before they use what another has mapped by memory types of the entries
///    that change.
pub unsafe fn set_up(features: &Features, identifiers: bool) {
    // SAFETY: passed on (1. to 3.).
    unsafe { set_up_with(features, identifiers, PAT) }
}

/// Sets the processor up like [`set_up`], where `IA32_PAT` holds another value, that of the format:
/// [`X86_64::PAT`](crate::format::X86_64::PAT).
///
/// # Safety
/// As of [`set_up`]; for (1.), tables that are loaded name no entry whose type changes. And no byte
/// of `pat` is a type that there is not, 2, 3, or above 7 (SDM vol. 3A 13.12.2).
pub unsafe fn set_up_with(features: &Features, identifiers: bool, pat: u64) {
    const IA32_PAT: u32 = 0x277;
    const EFER: u32 = 0xc000_0080;
    // CR4: PGE 7, PCIDE 17, SMEP 20. CR0: WP 16. EFER: NXE 11.
    let when = |condition: bool, bit: u32| u64::from(condition) << bit;
    let more =
        when(features.global, 7) | when(features.smep, 20) | when(features.pcid && identifiers, 17);
    // SAFETY: what the tables mean by these registers is what the caller vouches for (1. to 3.).
    unsafe {
        write_msr(IA32_PAT, pat);
        write_msr(EFER, read_msr(EFER) | when(features.no_execute, 11));
        write_cr0(read_cr0() | 1 << 16);
        write_cr4(read_cr4() | more);
    }
    // The PAT has changed under what is remembered.
    execute(Instruction::ToggleCr4);
}

/// # Safety
/// 1. The processor has the register.
unsafe fn read_msr(register: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: (1.).
    unsafe {
        asm!(
            "rdmsr", in("ecx") register, out("eax") low, out("edx") high,
            options(nostack, preserves_flags)
        )
    };
    u64::from(high) << 32 | u64::from(low)
}

/// # Safety
/// 1. The processor has the register, and may go on with the value.
unsafe fn write_msr(register: u32, value: u64) {
    // SAFETY: (1.).
    unsafe {
        asm!(
            "wrmsr", in("ecx") register, in("eax") value as u32, in("edx") (value >> 32) as u32,
            options(nostack, preserves_flags)
        )
    }
}
