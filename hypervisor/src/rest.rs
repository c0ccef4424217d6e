//! Sleep for the processor that is not the guest's, so that an emulator has the time for the guest.
//!
//! The interrupt controller is the guest's, but for what each processor has of its own: in its
//! redistributor this one has the interrupt of its timer (`CNTHP`) enabled. It is never taken,
//! because it is masked here, and wakes a processor all the same (DDI 0487 D1.7.2). Until the guest
//! has enabled the distributor nothing comes, and one that would sleep spins.

use core::arch::asm;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};

/// The interrupt of the timer (QEMU's `virt` machine).
const TIMER: u32 = 26;
/// A redistributor: control registers, and those of its own interrupts (IHI 0069 12.10).
const HALF: u64 = 64 << 10;
const WAKER: u64 = 0x14;
const GROUP: u64 = HALF + 0x80;
const ENABLE: u64 = HALF + 0x100;
/// GICD_CTLR.EnableGrp1.
const ENABLED: u32 = 1 << 1;

/// The distributor; 0 if nothing wakes this processor.
static DISTRIBUTOR: AtomicU64 = AtomicU64::new(0);

fn register(at: u64) -> *mut u32 {
    ptr::with_exposed_provenance_mut(at as usize)
}

/// Has the timer of this processor wake it, and nothing else: of those that there are, this is the
/// only one that [rests](rest).
///
/// # Safety
/// 1. They are the distributor of the machine and the redistributor of this processor, mapped one
///    to one; the processor has no other use for interrupts, and masks them.
pub unsafe fn set_up(distributor: u64, redistributor: u64) {
    // SAFETY: registers of this processor's own (1.).
    unsafe {
        // No ProcessorSleep, until ChildrenAsleep is gone.
        let waker = register(redistributor + WAKER);
        waker.write_volatile(waker.read_volatile() & !2);
        while waker.read_volatile() & 4 != 0 {
            core::hint::spin_loop();
        }
        let group = register(redistributor + GROUP);
        group.write_volatile(group.read_volatile() | 1 << TIMER);
        register(redistributor + ENABLE).write_volatile(1 << TIMER);
        asm!(
            "msr s3_0_c12_c12_5, {interface}", // ICC_SRE_EL1
            "isb",
            "msr s3_0_c4_c6_0, {all}", // ICC_PMR_EL1
            "msr s3_0_c12_c12_7, {one}", // ICC_IGRPEN1_EL1
            "isb",
            interface = in(reg) 7u64,
            all = in(reg) 0xffu64,
            one = in(reg) 1u64,
            options(nostack, preserves_flags)
        );
    }
    DISTRIBUTOR.store(distributor, Ordering::Relaxed);
}

/// Sleeps for so many ticks, or less. Whether it did.
pub fn rest(ticks: u64) -> bool {
    let distributor = DISTRIBUTOR.load(Ordering::Relaxed);
    // SAFETY: a register of the distributor, which `set_up` was told of.
    if distributor == 0 || unsafe { register(distributor).read_volatile() } & ENABLED == 0 {
        return false;
    }
    // SAFETY: a timer that has no other user. It is a level: if it is high already, the processor
    // does not sleep.
    unsafe {
        asm!(
            "msr cnthp_tval_el2, {ticks}",
            "msr cnthp_ctl_el2, {one}",
            "isb",
            "wfi",
            "msr cnthp_ctl_el2, xzr",
            "isb",
            ticks = in(reg) ticks.min(i32::MAX as u64),
            one = in(reg) 1u64,
            options(nostack, preserves_flags)
        );
    }
    true
}
