//! Features: what the identification registers offer is executed, and must not be undefined.

use core::arch::asm;
use core::sync::atomic::Ordering;

use crate::head::{Report, attempt, check};
use crate::pages::{FRAMES, frame};

/// An identification register.
macro_rules! id {
    ($crm:literal, $op2:literal) => {{
        let value: u64;
        // SAFETY: reads a register that says what the processor is.
        unsafe {
            asm!(concat!("mrs {}, s3_0_c0_c", $crm, "_", $op2), out(reg) value,
                options(nomem, nostack))
        };
        value
    }};
}

/// Features, each with its name, where the register says that it is there (CRm, op2, first bit,
/// version), and instructions that try it, for which x0 is an address of 64 bytes.
macro_rules! features {
    ($(
        $name:literal $crm:literal $op2:literal $first:literal $least:literal: $($text:literal),*;
    )*) => {
        &[$((
            $name,
            (|| id!($crm, $op2) >> $first & 0xf) as fn() -> u64,
            $least,
            (|at| {
                // SAFETY: what is tried changes registers that are named, and those of vectors,
                // that no other uses, and the memory at the address.
                unsafe {
                    asm!(
                        $($text),*, inout("x0") at => _, out("x1") _, out("x2") _, out("x3") _,
                            out("x8") _,
                        options(nostack)
                    )
                }
            }) as fn(u64),
        )),*]
    };
}

/// Name, version on this processor, the least one, what is tried.
type Feature = (&'static str, fn() -> u64, u64, fn(u64));

const FEATURES: &[Feature] = features! {
    "SVE" 4 0 32 1: ".arch_extension sve", "msr s3_0_c1_c2_0, xzr", "rdvl x1, #1", "ptrue p0.b";
    "SME" 4 1 24 1: ".arch_extension sme", "msr s3_0_c1_c2_6, xzr", "smstart", "rdsvl x1, #1",
    "zero {{za}}", "smstop",
        "mrs x1, s3_0_c1_c2_4", "mrs x1, s3_3_c13_c0_5", "msr s3_3_c13_c0_5, x1",
        "mrs x1, s3_1_c0_c0_6";
    "SME2" 4 1 24 2: ".arch_extension sme2", "mov x1, #0x40000000", "msr s3_0_c1_c2_6, x1", "isb",
    "smstart",
        "zero {{zt0}}", "smstop";
    "BTI" 4 1 0 1: "bti c";
    "SSBS" 4 1 4 2: "mrs x1, s3_3_c4_c2_6", "msr s3_3_c4_c2_6, x1";
    "MTE" 4 1 8 1: ".arch_extension memtag", "irg x1, x0", "addg x1, x0, #0, #1",
    "mrs x2, s3_3_c4_c2_7";
    "MTE2" 4 1 8 2: ".arch_extension memtag", "mrs x1, s3_0_c1_c0_6", "mrs x1, s3_0_c1_c0_5",
    "mrs x1, s3_0_c5_c6_0",
        "stg x0, [x0]", "ldg x1, [x0]";
    "NMI" 4 1 36 1: "mrs x1, s3_0_c4_c3_0";
    "GCS" 4 1 44 1: "mrs x1, s3_0_c2_c5_0";
    "THE" 4 1 48 1: "mrs x1, s3_0_c13_c0_6";
    "RAS" 4 0 28 1: "mrs x1, s3_0_c5_c3_0", "mrs x1, s3_0_c12_c1_1", "hint #16";
    "MPAM" 4 0 40 1: "mrs x1, s3_0_c10_c5_0";
    "AMU" 4 0 44 1: "mrs x1, s3_3_c13_c2_1";
    "DIT" 4 0 48 1: "mrs x1, s3_3_c4_c2_5", "msr s3_3_c4_c2_5, x1";
    "CSV2_2" 4 0 56 2: "mrs x1, s3_0_c13_c0_7", "mrs x1, s3_3_c13_c0_7";
    "FPMR" 4 2 32 1: "mrs x1, s3_3_c4_c4_2";
    "PMU" 5 0 8 1: "mrs x1, pmcr_el0", "mrs x1, pmccntr_el0", "mrs x1, pmceid0_el0";
    "PMUv3p4" 5 0 8 5: "mrs x1, s3_0_c9_c14_6";
    "PMUv3p9" 5 0 8 9: "mrs x1, s3_0_c9_c14_4";
    "SPE" 5 0 32 1: "mrs x1, s3_0_c9_c9_7", "mrs x1, s3_0_c9_c10_7";
    "TRF" 5 0 40 1: "mrs x1, s3_0_c1_c2_1";
    "TRBE" 5 0 44 1: "mrs x1, s3_0_c9_c11_7";
    "BRBE" 5 0 52 1: "mrs x1, s2_1_c9_c2_0";
    "debug" 5 0 0 6: "mrs x1, mdscr_el1", "mrs x1, dbgbvr0_el1", "mrs x1, dbgwcr0_el1";
    "RNG" 6 0 60 1: "mrs x1, s3_3_c2_c4_0", "mrs x1, s3_3_c2_c4_1";
    "TLBIOS" 6 0 56 1: "sys #0, c8, c1, #0";
    "TLBIRANGE" 6 0 56 2: "sys #0, c8, c6, #1, xzr", "sys #0, c8, c2, #1, xzr";
    "FlagM" 6 0 52 1: ".arch_extension flagm", "cfinv", "cfinv";
    "TME" 6 0 24 1: ".inst 0xd5233061", ".inst 0xd503307f"; // TSTART x1, TCOMMIT
    "atomics" 6 0 20 2: ".arch_extension lse", "ldadd xzr, x1, [x0]";
    "CRC32" 6 0 16 1: ".arch_extension crc", "crc32b w1, w1, w1";
    // LD64B x8, [x0]: changes x8 to x15, and is not offered by any model of QEMU
    "LS64" 6 1 60 1: ".inst 0xf83fd008";
    "XS" 6 1 56 1: "sys #0, c9, c7, #0";
    "SPECRES" 6 1 40 1: "sys #3, c7, c3, #4, xzr", "sys #3, c7, c3, #5, xzr",
    "sys #3, c7, c3, #7, xzr";
    "SB" 6 1 36 1: ".inst 0xd50330ff";
    "PAuth APA" 6 1 4 1: "msr s3_0_c2_c1_0, xzr", ".inst 0xdac123e1"; // PACIZA x1
    "PAuth API" 6 1 8 1: "msr s3_0_c2_c1_0, xzr", ".inst 0xdac123e1";
    "DPB" 6 1 0 1: "sys #3, c7, c12, #1, x0";
    "DPB2" 6 1 0 2: "sys #3, c7, c13, #1, x0";
    "WFxT" 6 2 0 2: "mov x1, #0", ".inst 0xd5031021"; // WFIT x1
    "PAuth APA3" 6 2 12 1: "msr s3_0_c2_c1_0, xzr", ".inst 0xdac123e1";
    "MOPS" 6 2 16 1: ".arch_extension mops", "add x1, x0, #32", "mov x2, #32",
    "cpyfp [x0]!, [x1]!, x2!",
        "cpyfm [x0]!, [x1]!, x2!", "cpyfe [x0]!, [x1]!, x2!", "mov x2, #16", "setp [x0]!, x2!, xzr",
        "setm [x0]!, x2!, xzr", "sete [x0]!, x2!, xzr";
    "CSSC" 6 2 52 1: ".arch_extension cssc", "abs x1, x1";
    "ATS1A" 6 2 60 1: "sys #0, c7, c9, #2, x0";
    "ECV" 7 0 60 1: "mrs x1, s3_3_c14_c0_5", "mrs x1, s3_3_c14_c0_6";
    "LOR" 7 1 16 1: "mrs x1, s3_0_c10_c4_7", "mrs x1, s3_0_c10_c4_3";
    "PAN" 7 1 20 1: "mrs x1, s3_0_c4_c2_3", "msr s3_0_c4_c2_3, xzr";
    "PAN2" 7 1 20 2: "sys #0, c7, c9, #0, x0";
    "UAO" 7 2 4 1: "mrs x1, s3_0_c4_c2_4", "msr s3_0_c4_c2_4, xzr";
    "CCIDX" 7 2 20 1: "mrs x1, ccsidr_el1";
    "TCR2" 7 3 0 1: "mrs x1, s3_0_c2_c0_3";
    "SCTLR2" 7 3 4 1: "mrs x1, s3_0_c1_c0_3";
    "S1PIE" 7 3 8 1: "mrs x1, s3_0_c10_c2_3", "mrs x1, s3_0_c10_c2_2";
    "S1POE" 7 3 16 1: "mrs x1, s3_0_c10_c2_4", "mrs x1, s3_3_c10_c2_4";
};

/// The checks.
pub fn run() -> u32 {
    let mut report = Report::new("features");
    // Floating point, SVE and SME are used.
    let vectors = if id!(4, 0) >> 32 & 0xf != 0 { 3u64 << 16 } else { 0 };
    let matrices = if id!(4, 1) >> 24 & 0xf != 0 { 3u64 << 24 } else { 0 };
    let allowed = 3 << 20 | vectors | matrices;
    // SAFETY: allows what this program does not use otherwise.
    unsafe { asm!("msr cpacr_el1, {}", "isb", in(reg) allowed, options(nostack)) };
    let (mut offered, mut hidden) = (0, 0);
    for &(name, version, least, works) in FEATURES {
        let version = version();
        if version < least || version == 0xf {
            hidden += 1;
            continue;
        }
        offered += 1;
        let trap = attempt(|| works(frame(0)));
        match trap {
            None => check!(report: true => "{name}, version {version}"),
            Some(trap) => check!(report: false => "{name}, version {version}: {trap:x?}"),
        }
    }
    check!(report: offered >= 3 => "{offered} offered, {hidden} not");
    // All of the space is read, without an exception.
    let mut read = 0;
    let trap = attempt(|| {
        read = [
            id!(1, 3),
            id!(2, 0),
            id!(3, 3),
            id!(3, 7),
            id!(4, 3),
            id!(4, 7),
            id!(5, 1),
            id!(5, 4),
            id!(5, 5),
            id!(6, 4),
            id!(6, 7),
            id!(7, 4),
            id!(7, 7),
        ]
        .iter()
        .fold(0, |all, value| all | value);
    });
    check!(report: trap.is_none() => "registers that may be reserved are read: {read:#x}");
    copies(&mut report);
    report.end()
}

/// Memory is copied by instructions, across a page, where there are such.
fn copies(report: &mut Report) {
    if id!(6, 2) >> 16 & 0xf == 0 {
        return;
    }
    let words = FRAMES.0.as_flattened();
    for (index, word) in words[..1024].iter().enumerate() {
        word.store(index as u64 * 3, Ordering::Relaxed);
    }
    let (from, to, size) = (frame(0) + 8, frame(2) + 2048, 6000u64);
    let trap = attempt(|| {
        // SAFETY: from two frames to two others.
        unsafe {
            asm!(
                ".arch_extension mops",
                "cpyfp [{to}]!, [{from}]!, {size}!",
                "cpyfm [{to}]!, [{from}]!, {size}!",
                "cpyfe [{to}]!, [{from}]!, {size}!",
                to = inout(reg) to => _, from = inout(reg) from => _, size = inout(reg) size => _,
                options(nostack)
            );
        }
    });
    let right = (0..750).filter(|&index| {
        words[1024 + 256 + index].load(Ordering::Relaxed)
            == words[1 + index].load(Ordering::Relaxed)
    });
    let right = right.count();
    check!(report: trap.is_none() && right == 750
        => "a copy of 750 words by instructions: {right} are right");
}
