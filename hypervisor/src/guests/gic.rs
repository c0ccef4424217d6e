//! Interrupts of several guests (GICv3 and its virtual interface, IHI 0069).
//!
//! All interrupts of the machine come to EL2 (`HCR_EL2.IMO`). The CPU interface that a guest uses
//! is the virtual one: what is in the list registers is pending for it, and it acknowledges and
//! ends it there without the hypervisor. Distributor and redistributors are emulated, as far as
//! interrupts between CPUs and the virtual timer need them; a guest has no others.
//!
//! *The timer* is a level. While it is high, the machine's interrupt is off, and the guest has one
//! in a list register that asks for maintenance when the guest has ended it; then it is looked at
//! again. A timer of a vCPU that does not run has its time, which is compared when vCPUs have their
//! turns.

use core::arch::asm;
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering, fence};

use super::crowd::{Crowd, crowd};
use super::vcpu::{NOWHERE, State, Vcpu};
use crate::count::count;
use crate::counters::Count;
use crate::cpu;

/// Interrupts of the machine's: from another processor, maintenance, the hypervisor's timer, the
/// guest's virtual timer (QEMU's `virt` machine).
const KICK: u32 = 0;
const MAINTENANCE: u32 = 25;
const SLICE: u32 = 26;
const TIMER: u32 = 27;

/// Fields of a list register (12.4.6): pending, group 1, a priority, and maintenance when it is
/// ended.
const PENDING: u64 = 1 << 62;
const GROUP: u64 = 1 << 60;
const PRIORITY: u64 = 0xa0 << 48;
const AT_END: u64 = 1 << 41;

/// The number of list registers in use: as many as every processor has.
const LISTS: usize = 4;

/// Whether the interrupt of the virtual timer is off on this processor.
static IS_OFF: [AtomicBool; cpu::MOST] = [const { AtomicBool::new(false) }; cpu::MOST];

/// A register of the machine's, in memory.
fn register(at: u64) -> *mut u32 {
    ptr::with_exposed_provenance_mut(at as usize)
}

fn write(at: u64, value: u32) {
    // SAFETY: a register of the interrupt controller, which the hypervisor's map has.
    unsafe { register(at).write_volatile(value) };
}

fn read(at: u64) -> u32 {
    // SAFETY: as above.
    unsafe { register(at).read_volatile() }
}

/// The registers of a redistributor's own interrupts.
fn own(crowd: &Crowd, number: usize) -> u64 {
    crowd.redistributors + number as u64 * FRAME + HALF
}

const HALF: u64 = 64 << 10;
const FRAME: u64 = 2 * HALF;

/// Sets up the distributor, which all processors share.
pub fn set_up(distributor: u64) {
    // GICD_CTLR: affinity routing, group 1.
    write(distributor, 1 << 4 | 1 << 1);
}

macro_rules! system {
    (read $name:literal) => {{
        let value: u64;
        // SAFETY: a register of the interrupt controller; one that is read to acknowledge is meant
        // to.
        unsafe { asm!(concat!("mrs {}, ", $name), out(reg) value,
            options(nostack, preserves_flags)) };
        value
    }};
    (write $name:literal, $value:expr) => {{
        let value: u64 = $value;
        // SAFETY: a register of the interrupt controller or of the hypervisor's timer.
        unsafe { asm!(concat!("msr ", $name, ", {}"), in(reg) value,
            options(nostack, preserves_flags)) };
    }};
}

/// Sets up this processor.
pub fn set_up_here(crowd: &Crowd) {
    let number = cpu::number();
    let waker = crowd.redistributors + number as u64 * FRAME + 0x14;
    // GICR_WAKER: no ProcessorSleep; until ChildrenAsleep is gone.
    write(waker, read(waker) & !2);
    while read(waker) & 4 != 0 {
        core::hint::spin_loop();
    }
    let own = own(crowd, number);
    write(own + 0x80, !0); // group 1
    write(own + 0x180, !0);
    for word in 0..8 {
        write(own + 0x400 + 4 * word, 0x8080_8080);
    }
    write(own + 0x100, 1 << KICK | 1 << MAINTENANCE | 1 << SLICE | 1 << TIMER);
    system!(write "s3_0_c12_c12_5", 7); // ICC_SRE_EL1
    system!(write "s3_0_c4_c6_0", 0xff); // ICC_PMR_EL1
    system!(write "s3_0_c12_c12_7", 1); // ICC_IGRPEN1_EL1
    system!(write "s3_4_c12_c11_0", 1); // ICH_HCR_EL2.En
    // SAFETY: what was written is in force.
    unsafe { asm!("isb", options(nostack, preserves_flags)) };
}

/// The hypervisor's timer, in so many ticks.
pub fn set_slice(ticks: u64) {
    system!(write "cnthp_tval_el2", ticks);
    system!(write "cnthp_ctl_el2", 1);
}

/// The virtual timer of no guest.
pub fn no_timer() {
    system!(write "cntv_ctl_el0", 0);
}

fn timer_is_on(crowd: &Crowd, is_on: bool) {
    let number = cpu::number();
    if IS_OFF[number].swap(!is_on, Ordering::Relaxed) == is_on {
        let offset = if is_on { 0x100 } else { 0x180 };
        write(own(crowd, number) + offset, 1 << TIMER);
    }
}

/// Whether this processor's virtual timer is due, and not masked.
fn level() -> bool {
    system!(read "cntv_ctl_el0") & 7 == 5
}

fn list(number: usize) -> u64 {
    match number {
        0 => system!(read "s3_4_c12_c12_0"),
        1 => system!(read "s3_4_c12_c12_1"),
        2 => system!(read "s3_4_c12_c12_2"),
        _ => system!(read "s3_4_c12_c12_3"),
    }
}

fn set_list(number: usize, value: u64) {
    match number {
        0 => system!(write "s3_4_c12_c12_0", value),
        1 => system!(write "s3_4_c12_c12_1", value),
        2 => system!(write "s3_4_c12_c12_2", value),
        _ => system!(write "s3_4_c12_c12_3", value),
    }
}

/// Empties the list registers of what the guest has ended, and of a timer that is not due any more.
/// Whether there is a timer left.
fn tidy(level: bool) -> bool {
    let mut has_timer = false;
    for number in 0..LISTS {
        let value = list(number);
        let is_timer = value as u32 == TIMER;
        match value >> 62 {
            0 if value != 0 => set_list(number, 0),
            1 if is_timer && !level => set_list(number, 0),
            1.. => has_timer |= is_timer,
            _ => {}
        }
    }
    has_timer
}

/// Takes the interrupts that have come to this processor. Whether the time of its vCPU is over.
pub fn take(crowd: &Crowd) -> bool {
    let mut is_over = false;
    loop {
        let id = system!(read "s3_0_c12_c12_0") as u32; // ICC_IAR1_EL1
        if id >= 1020 {
            return is_over;
        }
        match id {
            SLICE => {
                system!(write "cnthp_ctl_el2", 0);
                is_over = true;
            }
            TIMER => timer_is_on(crowd, false),
            MAINTENANCE => _ = tidy(level()),
            _ => {}
        }
        system!(write "s3_0_c12_c12_1", id.into()); // ICC_EOIR1_EL1
        // SAFETY: the interrupt is not pending any more when the next is asked for.
        unsafe { asm!("dsb sy", "isb", options(nostack, preserves_flags)) };
    }
}

/// Gives a vCPU that is about to run its pending interrupts.
pub fn give(crowd: &Crowd, vcpu: &Vcpu) {
    let level = level();
    let has_timer = tidy(level);
    let enabled = vcpu.enabled.load(Ordering::Relaxed);
    let mut free = (0..LISTS).filter(|&number| list(number) == 0);
    let is_due = level && !has_timer && enabled & 1 << TIMER != 0;
    if is_due && let Some(number) = free.next() {
        set_list(number, PENDING | GROUP | PRIORITY | AT_END | u64::from(TIMER));
        count(Count::Interrupts, 1);
    }
    timer_is_on(crowd, !level);
    let mut wanted = vcpu.pending.load(Ordering::Acquire) & enabled;
    // One of a number at a time.
    for number in 0..LISTS {
        let value = list(number);
        if value >> 62 != 0 && (value as u32) < 16 {
            wanted &= !(1 << value as u32);
        }
    }
    while wanted != 0 {
        let Some(number) = free.next() else { break };
        let id = wanted.trailing_zeros();
        wanted &= wanted - 1;
        vcpu.pending.fetch_and(!(1 << id), Ordering::AcqRel);
        set_list(number, PENDING | GROUP | PRIORITY | u64::from(id));
        count(Count::Interrupts, 1);
    }
}

/// Whether an interrupt is pending for a vCPU that waits.
pub fn is_wanted(vcpu: &Vcpu, now: u64) -> bool {
    let timer = vcpu.enabled.load(Ordering::Relaxed) & 1 << TIMER != 0
        && vcpu.due.load(Ordering::Relaxed) <= now;
    timer || vcpu.pending.load(Ordering::Acquire) & vcpu.enabled.load(Ordering::Relaxed) != 0
}

/// Sends an interrupt of a vCPU to others of its guest, by the value that it has written to
/// ICC_SGI1R_EL1 (12.11.16).
pub fn send(from: &Vcpu, value: u64) {
    let id = value >> 24 & 0xf;
    for vcpu in crowd().of(from.guest) {
        let is_meant = match value >> 40 & 1 {
            // All but itself.
            1 => vcpu.number != from.number,
            // By a list, of those whose other affinities are 0.
            _ => value & 0x00ff_00ff_00ff_0000 & !(0xf << 24) == 0 && value >> vcpu.number & 1 != 0,
        };
        if is_meant {
            vcpu.pending.fetch_or(1 << id, Ordering::AcqRel);
            nudge(vcpu);
        }
    }
}

/// Has a vCPU that runs on another processor look at what is pending.
pub fn nudge(vcpu: &Vcpu) {
    fence(Ordering::SeqCst);
    let home = vcpu.home.load(Ordering::Relaxed);
    if vcpu.state() == State::Running && home != NOWHERE && home != cpu::number() {
        // By its place in a list of 16: affinity 0 is the processor's number.
        system!(write "s3_0_c12_c11_5", u64::from(KICK) << 24 | 1 << home);
    }
}

/// Carries out a guest's access to the distributor. `None` if there is nothing.
pub fn distributor(guest: usize, offset: u64, write: Option<u64>) -> Option<u64> {
    let control = &crowd().guests[guest].distributor;
    match (offset, write) {
        (0, Some(value)) => control.store(value as u32, Ordering::Relaxed),
        // One security state, affinity routing.
        (0, None) => {
            return Some(u64::from(control.load(Ordering::Relaxed)) | 1 << 6 | 1 << 4);
        }
        // 64 interrupts, numbers of 10 bits.
        (4, None) => return Some(1 | 9 << 19),
        (8, None) => return Some(0x43b),
        (0xffe8, None) => return Some(0x30),
        _ => {}
    }
    Some(0)
}

/// Carries out a guest's access to a redistributor, at this offset of all of them.
pub fn redistributor(guest: usize, offset: u64, write: Option<u64>) -> Option<u64> {
    let vcpus = crowd().of(guest);
    let vcpu = vcpus.get((offset / FRAME) as usize)?;
    let number = vcpu.number as u64;
    let is_last = vcpu.number + 1 == vcpus.len();
    let of_type = number << 32 | number << 8 | u64::from(is_last) << 4;
    let enabled = &vcpu.enabled;
    match (offset % FRAME, write) {
        (0x4, None) => Some(0x43b),
        (0x8, None) => Some(of_type),
        (0xc, None) => Some(of_type >> 32),
        (0xffe8, None) => Some(0x30),
        (0x1_0080, None) => Some(0xffff_ffff),
        (0x1_0100, Some(bits)) => {
            enabled.fetch_or(bits as u32, Ordering::Relaxed);
            Some(0)
        }
        (0x1_0180, Some(bits)) => {
            enabled.fetch_and(!(bits as u32), Ordering::Relaxed);
            Some(0)
        }
        (0x1_0100 | 0x1_0180, None) => Some(enabled.load(Ordering::Relaxed).into()),
        _ => Some(0),
    }
}
