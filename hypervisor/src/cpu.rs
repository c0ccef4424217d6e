//! A processor: which one this is, the registers of EL2, and the way into the guest.
//!
//! Each virtual CPU is a processor. Interrupt controller, timers and UART are the guest's own, so
//! interrupts go to it directly and the hypervisor has none: it is entered by a fault or a firmware
//! call, and leaves again.

use core::arch::{asm, naked_asm};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU64, Ordering};

use aarch64_rt::Stack;
use arm_sysregs::el1::accessors::{
    read_id_aa64dfr0_el1, read_id_aa64isar2_el1, read_id_aa64mmfr0_el1, read_id_aa64mmfr1_el1,
    read_id_aa64pfr0_el1, read_id_aa64pfr1_el1, read_midr_el1, read_mpidr_el1, write_sctlr_el1,
};
use arm_sysregs::el1::registers::SctlrEl1;
use arm_sysregs::el2::accessors::{
    read_cntvoff_el2, read_tpidr_el2, read_vttbr_el2, write_cnthctl_el2, write_cntvoff_el2,
    write_cptr_el2, write_elr_el2, write_hafgrtr_el2, write_hcr_el2, write_hcrx_el2,
    write_hdfgrtr_el2, write_hdfgrtr2_el2, write_hdfgwtr_el2, write_hdfgwtr2_el2, write_hfgitr_el2,
    write_hfgitr2_el2, write_hfgrtr_el2, write_hfgrtr2_el2, write_hfgwtr_el2, write_hfgwtr2_el2,
    write_icc_sre_el2, write_mdcr_el2, write_spsr_el2, write_tpidr_el2, write_vmpidr_el2,
    write_vpidr_el2, write_vtcr_el2, write_vttbr_el2,
};
use arm_sysregs::el2::registers::{
    CnthctlEl2, CntvoffEl2, CptrEl2, ElrEl2, HafgrtrEl2, HcrEl2, HcrxEl2, Hdfgrtr2El2, HdfgrtrEl2,
    Hdfgwtr2El2, HdfgwtrEl2, Hfgitr2El2, HfgitrEl2, Hfgrtr2El2, HfgrtrEl2, Hfgwtr2El2, HfgwtrEl2,
    IccSreEl2, MdcrEl2, SpsrEl2, TpidrEl2, VmpidrEl2, VpidrEl2, VtcrEl2, VttbrEl2,
};
use tablewright::arch::arm64::{Ids, tcr_el2, ttbr, vtcr_el2};
use tablewright::{Format, Pa};

use crate::plant::{Plant, is_planted};
use crate::stage2::{CAPS, FORCED, OWN, Own, Stage2, VMID};

/// The most processors: eight for a guest, and one beside it.
pub const MOST: usize = tablewright_hypervisor_common::host::PROCESSORS;

/// The bits of SCTLR_EL1 that are one where features are missing; MMU and caches off.
pub const SCTLR_EL1: u64 = 0x30d0_0800;

/// The stack of a processor that is started by a firmware call; it has 64 KiB.
pub type CpuStack = Stack<16>;

#[repr(transparent)]
struct Stacks(UnsafeCell<[CpuStack; MOST]>);

// SAFETY: reached by pointers only, by one processor each.
unsafe impl Sync for Stacks {}

static STACKS: Stacks = Stacks(UnsafeCell::new([const { Stack::new() }; MOST]));

/// The stack of processor number `cpu`, which is below [`MOST`].
pub fn stack(cpu: usize) -> *mut CpuStack {
    STACKS.0.get().cast::<CpuStack>().wrapping_add(cpu)
}

/// How far the guest's virtual counter is behind the machine's: the ticks that it stood still.
static STOOD: AtomicU64 = AtomicU64::new(0);

/// The guest stood still for `ticks`. Each of its processors [sets its counter](keep_time) before
/// it goes on.
pub fn stood(ticks: u64) {
    STOOD.fetch_add(ticks, Ordering::Release);
}

/// Takes the ticks that the guest [stood](stood) still off this processor's virtual counter.
pub fn keep_time() {
    let behind = STOOD.load(Ordering::Acquire);
    if read_cntvoff_el2().bits() != behind {
        write_cntvoff_el2(CntvoffEl2::from_bits_retain(behind));
    }
}

/// The number of this processor.
#[inline(always)]
pub fn number() -> usize {
    read_tpidr_el2().bits() as usize
}

/// This processor is number `cpu`.
pub fn become_number(cpu: usize) {
    // SAFETY: a register that only `number` reads.
    unsafe { write_tpidr_el2(TpidrEl2::from_bits_retain(cpu as u64)) };
}

/// Has this processor count the instructions that it executes at EL2, with a counter that is a
/// guest's on others.
///
/// QEMU counts them where their number is its clock: `-icount` with a shift that is fixed.
pub fn count_instructions() {
    // SAFETY: registers of the performance monitors, which have no other user on this processor.
    unsafe {
        asm!(
            "msr pmevtyper0_el0, {event}",
            "msr pmcntenset_el0, {one}",
            "msr pmcr_el0, {one}",
            "isb",
            event = in(reg) 1u64 << 27 | 8, // NSH: at EL2; INST_RETIRED (DDI 0487 D11.11)
            one = in(reg) 1u64, // the first counter; E: all that are enabled count
            options(nostack, preserves_flags)
        );
    }
}

/// Returns the number of instructions that were [counted](count_instructions), modulo 2³².
pub fn instructions() -> u32 {
    let count: u64;
    // SAFETY: reads a register. Not moved: what is between two of them is counted.
    unsafe {
        asm!("isb", "mrs {}, pmevcntr0_el0", out(reg) count, options(nostack, preserves_flags))
    };
    count as u32
}

/// Loads the hypervisor's own map.
///
/// The map that the startup code has made translates as much, and the rest differently; and the two
/// are of different heights, which no one store can change. So the MMU is off between them, and no
/// memory is touched there.
///
/// # Safety
/// 1. `root` is the first table of a map in which everything that the hypervisor uses is where it
///    was.
#[unsafe(naked)]
unsafe extern "C" fn switch_map(root: u64, tcr: u64) {
    naked_asm!(
        "mrs x2, sctlr_el2",
        "bic x3, x2, #1",
        "dsb ish",
        "msr sctlr_el2, x3",
        "isb",
        "msr ttbr0_el2, x0",
        "msr tcr_el2, x1",
        "isb",
        "tlbi alle2",
        "dsb nsh",
        "isb",
        "msr sctlr_el2, x2",
        "isb",
        "ret",
    )
}

/// Runs on the map with this root from now on.
///
/// # Safety
/// As for `switch_map`.
pub unsafe fn load_map(root: Pa) {
    let tcr = tcr_el2::<Own>(&Ids::read(), &CAPS).unwrap_or_else(|why| panic!("{why}"));
    // SAFETY: passed on.
    unsafe { switch_map(ttbr::<Own>(root, OWN, false), tcr) };
}

/// ID_AA64MMFR0_EL1.PARange, as the guest reads it: 40 bits, as much as its stage 2 translates.
pub const GUEST_SIZE: u64 = 2;
const _: () = assert!(Stage2::INPUT_BITS == 40);

/// Whether there is HCRX_EL2.
pub fn has_hcrx() -> bool {
    read_id_aa64mmfr1_el1().bits() >> 40 & 0xf != 0
}

/// Sets up everything that decides what the guest may do, and what comes to EL2. Whatever a
/// register holds after reset is not known, so all of them are written; those of features are
/// written where the processor has the feature.
///
/// # Safety
/// 1. `root` is the first table of the guest's stage 2.
pub unsafe fn confine(root: Pa) {
    let vmid = match is_planted(Plant::Vmids) {
        true => VMID + number() as u16,
        false => VMID,
    };
    // SAFETY: passed on (1.).
    unsafe { confine_by(HCR, root.get() | u64::from(vmid) << 48, Share::Alone) }
}

/// The guests that share the processor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    /// One guest's, with its timers, counters, and all vectors that it has.
    Alone,
    /// Several guests', in turn. They have floating point and the virtual timer, which are stored
    /// and loaded; vectors of other lengths, debugging and performance monitors they have not.
    Several,
}

/// Confines several guests, whose interrupts come to EL2, and of which none is loaded yet.
///
/// # Safety
/// 1. The root that is loaded maps nothing.
pub unsafe fn confine_several() {
    let hcr = HCR
        | HcrEl2::IMO
        | HcrEl2::FMO
        | HcrEl2::TWI // one that waits has others go on
        | HcrEl2::TWE
        // a guest's invalidations are for all processors: its vCPUs go from one to another
        | HcrEl2::FB
        | HcrEl2::from_bits_retain(1 << 10); // BSU: and so are its barriers
    // SAFETY: the root that is loaded maps nothing (1.).
    unsafe { confine_by(hcr, read_vttbr_el2().bits(), Share::Several) }
}

/// The traps of any guest, and its stage 2.
const HCR: HcrEl2 = HcrEl2::VM // stage 2
    .union(HcrEl2::SWIO) // an invalidation by set and way also cleans: it may be another's line
    .union(HcrEl2::PTW) // a walk of stage 1 through a device register faults
    .union(HcrEl2::TSC) // firmware calls come here
    .union(HcrEl2::TID3) // and so do reads of what the processor can do
    .union(HcrEl2::RW) // EL1 is AArch64
    .union(HcrEl2::from_bits_retain((FORCED as u64) << 46)) // FWB
    .union(HcrEl2::API)
    .union(HcrEl2::APK); // pointer authentication is the guest's own

/// # Safety
/// 1. As for [`confine`], of the root in `vttbr`.
unsafe fn confine_by(hcr: HcrEl2, vttbr: u64, share: Share) {
    let vtcr = vtcr_el2::<Stage2>(&Ids::read(), &CAPS).unwrap_or_else(|why| panic!("{why}"));
    // VMIDs have 8 bits.
    let vtcr = VtcrEl2::from_bits_retain(vtcr & !(1 << 19));
    let (features, more) = (read_id_aa64pfr0_el1().bits(), read_id_aa64pfr1_el1().bits());
    let debug = read_id_aa64dfr0_el1().bits();
    // Whether there is something that an identification register tells of in the field at this bit.
    let has = |register: u64, first: u32| register >> first & 0xf != 0;
    // SAFETY: none of these changes how the hypervisor itself runs, and the root is what the caller
    // says (1.).
    unsafe {
        write_vtcr_el2(vtcr);
        write_vttbr_el2(VttbrEl2::from_bits_retain(vttbr));
        write_hcr_el2(hcr);
        // Nothing of floating point, SVE or SME is trapped; trace and activity monitors are, where
        // there are such. One are bits 13, 9 and 7 to 0.
        let trace = if has(debug, 4) { 1 << 20 } else { 0 };
        let activity = if has(features, 44) { 1 << 30 } else { 0 };
        // SVE and SME of several guests are, too: bits 8 and 12.
        let vectors = match share {
            Share::Alone => 0,
            Share::Several => 1 << 8 | 1 << 12,
        };
        write_cptr_el2(CptrEl2::from_bits_retain(0x22ff | trace | activity | vectors));
        asm!("isb", options(nostack, preserves_flags));
        if vectors == 0 && has(features, 32) {
            // ZCR_EL2.LEN: vectors as long as they come.
            asm!("msr s3_4_c1_c2_0, {}", in(reg) 0xfu64, options(nostack, preserves_flags));
        }
        if vectors == 0 && has(more, 24) {
            // SMCR_EL2.LEN, and FA64 where there is such a thing; of the second SME EZT0, the table
            // of look-ups.
            let table = if more >> 24 & 0xf >= 2 { 1 << 30 } else { 0 };
            asm!("msr s3_4_c1_c2_6, {}", in(reg) 0xfu64 | 1 << 31 | table,
                options(nostack, preserves_flags));
        }
        if has_hcrx() {
            // Memory is copied by instructions, where there are such: they need nothing of the
            // hypervisor. Nothing else is allowed or trapped that is not without this register.
            let copies = has(read_id_aa64isar2_el1().bits(), 16);
            write_hcrx_el2(if copies { HcrxEl2::MSCEN } else { HcrxEl2::empty() });
        }
        let fine = read_id_aa64mmfr0_el1().bits() >> 56 & 0xf;
        if fine != 0 {
            // Fine traps are off. Bits whose names begin with n trap when they are zero: of these,
            // SMPRI_EL1 and TPIDR2_EL0 are let through, and the others are of features that the
            // guest does not see.
            write_hfgrtr_el2(HfgrtrEl2::from_bits_retain(3 << 54));
            write_hfgwtr_el2(HfgwtrEl2::from_bits_retain(3 << 54));
            write_hfgitr_el2(HfgitrEl2::empty());
            write_hdfgrtr_el2(HdfgrtrEl2::empty());
            write_hdfgwtr_el2(HdfgwtrEl2::empty());
            if has(features, 44) {
                write_hafgrtr_el2(HafgrtrEl2::empty());
            }
        }
        if fine >= 2 {
            write_hfgrtr2_el2(Hfgrtr2El2::empty());
            write_hfgwtr2_el2(Hfgwtr2El2::empty());
            write_hfgitr2_el2(Hfgitr2El2::empty());
            write_hdfgrtr2_el2(Hdfgrtr2El2::empty());
            write_hdfgwtr2_el2(Hdfgwtr2El2::empty());
        }
        if has(features, 24) {
            // The registers of the interrupt controller are the guest's.
            write_icc_sre_el2(IccSreEl2::SRE | IccSreEl2::DFB | IccSreEl2::DIB | IccSreEl2::ENABLE);
            // ICH_HCR_EL2
            asm!("isb", "msr s3_4_c12_c11_0, xzr", options(nostack, preserves_flags));
        }
        // All counters of events belong to the guest: HPMN is their number.
        let counters: u64;
        asm!("mrs {}, pmcr_el0", out(reg) counters, options(nomem, nostack, preserves_flags));
        let mut debug_traps = MdcrEl2::from_bits_retain(counters >> 11 & 0x1f);
        // No samples, and no filter of traces.
        debug_traps.set(MdcrEl2::TPMS, has(debug, 32));
        debug_traps.set(MdcrEl2::TTRF, has(debug, 40));
        if share == Share::Several {
            // Bits 11 to 9: debugging, with its locks; 6 and 5: performance monitors.
            debug_traps |= MdcrEl2::from_bits_retain(7 << 9 | 3 << 5);
        }
        write_mdcr_el2(debug_traps);
        asm!("msr hstr_el2, xzr", options(nostack, preserves_flags));
    }
    // Timers, physical ones too, are the guest's; of several guests the virtual one. All processors
    // have the same time.
    write_cnthctl_el2(match share {
        Share::Alone => CnthctlEl2::EL0PCTEN | CnthctlEl2::EL1PCEN,
        Share::Several => CnthctlEl2::EL0PCTEN,
    });
    write_cntvoff_el2(CntvoffEl2::from_bits_retain(STOOD.load(Ordering::Acquire)));
    write_vpidr_el2(VpidrEl2::from_bits_retain(read_midr_el1().bits()));
    write_vmpidr_el2(VmpidrEl2::from_bits_retain(read_mpidr_el1().bits()));
}

/// Runs the guest on this processor: from `entry` on, with its MMU off, interrupts masked, and
/// `argument` in its first register.
///
/// # Safety
/// 1. `root` is the first table of the guest's stage 2, which maps nothing but what is the guest's.
pub unsafe fn enter(root: Pa, entry: u64, argument: u64) -> ! {
    // SAFETY: the registers are those of the guest, which is kept where it belongs by stage 2 (1.).
    unsafe {
        confine(root);
        write_sctlr_el1(SctlrEl1::from_bits_retain(SCTLR_EL1));
        write_elr_el2(ElrEl2::from_bits_retain(entry));
        // EL1 with its own stack pointer, everything masked.
        write_spsr_el2(
            SpsrEl2::D | SpsrEl2::A | SpsrEl2::I | SpsrEl2::F | SpsrEl2::from_bits_retain(0b0101),
        );
        // What an earlier guest, or the reset, has left.
        asm!("tlbi vmalls12e1", "dsb nsh", "isb", options(nostack));
        leave(argument)
    }
}

/// # Safety
/// 1. ELR_EL2 and SPSR_EL2 are those of the guest, and everything that confines it is set up.
#[unsafe(naked)]
unsafe extern "C" fn leave(argument: u64) -> ! {
    naked_asm!(
        // Nothing of the hypervisor's is left in a register.
        ".irp register, \
         1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30",
        "mov x\\register, xzr",
        ".endr",
        "eret",
        "dsb nsh", // nothing is executed beyond it, not even ahead
        "isb",
    )
}
