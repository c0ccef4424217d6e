//! Features of the guest's processors, as it is told.
//!
//! A feature may need more of a hypervisor than to let it through: a bit that enables it, registers
//! that are the guest's, tags that move with a page. So reads of the identification registers come
//! here (HCR_EL2.TID3), and are answered with those fields alone that
//! [`confine`](crate::cpu::confine) enables or that need nothing. All others read as zero, those
//! that are not known yet too: the architecture has "not implemented" there (DDI 0487 D24.1.3).

use core::arch::asm;

use arm_sysregs::el2::accessors::read_hcrx_el2;
use arm_sysregs::el2::registers::HcrxEl2;

use crate::count::count;
use crate::counters::Count;
use crate::cpu;

/// One register: of op0 3, op1 0, CRn 0.
struct Register {
    crm: u8,
    op2: u8,
    /// Its value on this processor.
    read: fn() -> u64,
    /// The bits that are passed on, without those of `most`.
    kept: u64,
    /// Fields that are passed on up to a version: where they begin, and which. 15 is no version.
    most: &'static [(u32, u64)],
}

/// The fields, of 4 bits each, that begin at these bits.
const fn fields(first: &[u32]) -> u64 {
    let (mut mask, mut index) = (0, 0);
    while index < first.len() {
        mask |= 0xf << first[index];
        index += 1;
    }
    mask
}

macro_rules! registers {
    ($($crm:literal, $op2:literal: $kept:expr, $most:expr;)*) => {
        const REGISTERS: &[Register] = &[$(Register {
            crm: $crm,
            op2: $op2,
            read: || {
                let value: u64;
                // SAFETY: reads a register that says what the processor is.
                unsafe {
                    asm!(
                        concat!("mrs {}, s3_0_c0_c", $crm, "_", $op2),
                        out(reg) value,
                        options(nomem, nostack, preserves_flags)
                    );
                }
                value
            },
            kept: $kept,
            most: $most,
        }),*];
    };
}

const ALL: u64 = !0;

registers! {
    // ID_PFR0: without AMU and RAS. ID_PFR1: without Virtualization. ID_DFR0: without what traces.
    1, 0: ALL & !fields(&[20, 28]), &[];
    1, 1: ALL & !fields(&[12, 24]), &[];
    1, 2: ALL & !fields(&[12, 16, 28]), &[];
    // ID_MMFR0 to ID_MMFR3, ID_ISAR0 to ID_ISAR5, ID_MMFR4, ID_ISAR6, MVFR0 to MVFR2, ID_PFR2,
    // ID_MMFR5: AArch32 at EL0.
    1, 4: ALL, &[];
    1, 5: ALL, &[];
    1, 6: ALL, &[];
    1, 7: ALL, &[];
    2, 0: ALL, &[];
    2, 1: ALL, &[];
    2, 2: ALL, &[];
    2, 3: ALL, &[];
    2, 4: ALL, &[];
    2, 5: ALL, &[];
    2, 6: ALL, &[];
    2, 7: ALL, &[];
    3, 0: ALL, &[];
    3, 1: ALL, &[];
    3, 2: ALL, &[];
    3, 4: ALL, &[];
    3, 6: ALL, &[];
    // ID_AA64PFR0: EL0, FP, AdvSIMD, GIC, SVE, DIT, CSV3. EL1 is AArch64 (HCR_EL2.RW); RAS without
    // ERXPFG registers (HCR_EL2.FIEN), CSV2 without SCXTNUM registers (HCR_EL2.EnSCXT).
    4, 0: fields(&[0, 16, 20, 24, 32, 48, 60]), &[(4, 1), (28, 1), (56, 1)];
    // ID_AA64PFR1: BT, SSBS; MTE without tags in memory (HCR_EL2.ATA), SME up to the second
    // (SMCR_EL2.EZT0).
    4, 1: fields(&[0, 4]), &[(8, 1), (24, 2), (32, 1)];
    // ID_AA64ZFR0 and ID_AA64SMFR0: vectors are the guest's.
    4, 4: ALL, &[];
    4, 5: ALL, &[];
    // ID_AA64DFR0: BRPs, WRPs, CTX_CMPs, DoubleLock; DebugVer and PMUVer as far as 8.8. No tracing,
    // no profiling.
    5, 0: fields(&[12, 20, 28, 36]), &[(0, 10), (8, 8)];
    // ID_AA64ISAR0: all but TME.
    6, 0: ALL & !fields(&[0, 24]), &[];
    // ID_AA64ISAR1: all but LS64 (HCRX_EL2.EnALS).
    6, 1: ALL & !fields(&[60]), &[];
    // ID_AA64ISAR2: WFxT, RPRES, GPA3, APA3, BC, PAC_frac, CLRBHB, PRFMSLC, RPRFM, CSSC, LUT; MOPS
    // where it is enabled.
    6, 2: fields(&[0, 4, 8, 12, 16, 20, 24, 28, 40, 48, 52, 56]), &[];
    // ID_AA64ISAR3: FAMINMAX.
    6, 3: fields(&[4]), &[];
    // ID_AA64MMFR0: ASIDBits, BigEnd, SNSMem, BigEndEL0, the granules of stage 1, ExS. As much
    // memory as stage 2 translates; ECV without an offset of the physical counter.
    7, 0: fields(&[4, 8, 12, 16, 20, 24, 28, 44]), &[(0, cpu::GUEST_SIZE), (60, 1)];
    // ID_AA64MMFR1: HPDS, LO, PAN, SpecSEI, ETS, AFP, nTLBPA, TIDCP1, CMOW, ECBHB; HAFDBS without
    // HAFT and HDBSS.
    7, 1: fields(&[12, 16, 20, 24, 36, 44, 48, 52, 56, 60]), &[(0, 2)];
    // ID_AA64MMFR2: CnP, UAO, LSM, IESB, VARange, CCIDX, ST, AT, IDS, TTL, BBM, E0PD.
    7, 2: fields(&[0, 4, 8, 12, 16, 20, 28, 32, 36, 48, 52, 60]), &[];
}

/// Returns the value that the guest reads in the identification register of this CRm, which is 1 to
/// 7, and op2; or that several guests read.
pub fn read(crm: u8, op2: u8, is_several: bool) -> u64 {
    count(Count::Identified, 1);
    // Of several guests the registers of SVE and SME are not stored and loaded.
    if is_several && matches!((crm, op2), (4, 4 | 5)) {
        return 0;
    }
    let register = REGISTERS.iter().find(|register| (register.crm, register.op2) == (crm, op2));
    // One of which nothing is kept.
    let Some(register) = register else { return 0 };
    let is = (register.read)();
    let kept = register.most.iter().fold(is & register.kept, |all, &(first, most)| {
        let version = is >> first & 0xf;
        all | if version == 0xf { 0 } else { version.min(most) } << first
    });
    match (crm, op2) {
        (6, 2) if !has_memory_copies() => kept & !fields(&[16]),
        // SVE; SME; performance monitors.
        (4, 0) if is_several => kept & !fields(&[32]),
        (4, 1) if is_several => kept & !fields(&[24]),
        (5, 0) if is_several => kept & !fields(&[8]),
        _ => kept,
    }
}

/// Whether the guest's memory copy instructions are enabled.
fn has_memory_copies() -> bool {
    cpu::has_hcrx() && read_hcrx_el2().contains(HcrxEl2::MSCEN)
}
