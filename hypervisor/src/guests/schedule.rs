//! Turns: each vCPU of each guest runs on whichever processor is free, for a time, one after the
//! other.
//!
//! A vCPU is on one processor at a time, because it is claimed. While one is changed for another,
//! and while there is none, the processor has [no guest](crate::identifiers::park): registers of
//! one guest and tables of another are never in force together.
//!
//! What a processor has remembered of a guest's stage 1 is the guest's to forget, vCPU by vCPU. One
//! that comes to a processor where another of its guest was before finds what that one has
//! remembered, and one that has gone elsewhere may have left something behind. So its invalidations
//! are for all processors (`HCR_EL2.FB`), and everything of the guest's stage 1 is forgotten where
//! its vCPUs change.

use core::arch::{asm, naked_asm};
use core::sync::atomic::{AtomicUsize, Ordering, fence};

use arm_sysregs::el0::accessors::{read_cntfrq_el0, read_cntvct_el0};
use arm_sysregs::el2::accessors::{write_elr_el2, write_spsr_el2};
use arm_sysregs::el2::registers::{ElrEl2, SpsrEl2};
use tablewright::arch::arm64::{Domain, execute};
use tablewright::shootdown::arm64::Instruction;

use super::crowd::{Crowd, crowd};
use super::vcpu::{NOWHERE, State, Vcpu};
use super::{gic, life};
use crate::count::count;
use crate::counters::Count;
use crate::machine::COMBINED;
use crate::trapped::Trapped;
use crate::world::become_guest;
use crate::{cpu, identifiers};

/// The vCPU that each processor runs; [`NOWHERE`] for none.
static CURRENT: [AtomicUsize; cpu::MOST] = [const { AtomicUsize::new(NOWHERE) }; cpu::MOST];

/// The vCPU that was on a processor last.
static BEFORE: [AtomicUsize; cpu::MOST] = [const { AtomicUsize::new(NOWHERE) }; cpu::MOST];

/// The number of the vCPU that has its turn next.
static TURN: AtomicUsize = AtomicUsize::new(0);

/// Turns in a second.
const TURNS: u64 = 500;

/// The vCPU that this processor runs.
pub fn current() -> Option<&'static Vcpu> {
    let number = CURRENT[cpu::number()].load(Ordering::Relaxed);
    crowd().vcpus.get(number)
}

/// The next wish of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// To go on.
    On,
    /// Others first.
    Yield,
    /// An interrupt.
    Wait,
    /// Nothing any more.
    Off,
}

/// Claims the next.
fn next(crowd: &Crowd) -> Option<usize> {
    let now = read_cntvct_el0().bits();
    let first = TURN.load(Ordering::Relaxed);
    let count = crowd.vcpus.len();
    for number in (first..first + count).map(|number| number % count) {
        let vcpu = &crowd.vcpus[number];
        let from = match vcpu.state() {
            State::Ready => State::Ready,
            State::Waiting if gic::is_wanted(vcpu, now) => State::Waiting,
            _ => continue,
        };
        if vcpu.claim(from, State::Running) {
            TURN.store((number + 1) % count, Ordering::Relaxed);
            return Some(number);
        }
    }
    None
}

/// Waits for one that can run, and loads it.
fn load(crowd: &'static Crowd) -> &'static Vcpu {
    let here = cpu::number();
    let number = loop {
        life::look_after(crowd);
        if let Some(number) = next(crowd) {
            if !crowd.is_over(crowd.vcpus[number].guest) {
                break number;
            }
            crowd.vcpus[number].set(State::Off);
            continue;
        }
        gic::no_timer();
        gic::set_slice(slice());
        // SAFETY: waits; an interrupt that is masked ends it, too.
        unsafe { asm!("wfi", options(nostack, preserves_flags)) };
        gic::take(crowd);
    };
    let vcpu = &crowd.vcpus[number];
    CURRENT[here].store(number, Ordering::Relaxed);
    vcpu.home.store(here, Ordering::Relaxed);
    // What is pending is looked at after this.
    fence(Ordering::SeqCst);
    count(Count::Turns, 1);
    become_guest(vcpu.guest);
    // SAFETY: it was claimed (1.).
    let context = unsafe { vcpu.context() };
    context.load(vcpu.number as u64);
    identifiers::enter(vcpu.guest);
    let before = BEFORE[here].swap(number, Ordering::Relaxed);
    if before != number {
        // What stage 1 of another vCPU has left.
        execute(Instruction::Tlbi(COMBINED), Domain::Local);
        execute(Instruction::Dsb, Domain::Local);
        // SAFETY: what was fetched ahead is fetched again.
        unsafe { asm!("isb", options(nostack, preserves_flags)) };
    }
    gic::set_slice(slice());
    vcpu
}

fn slice() -> u64 {
    read_cntfrq_el0().bits() / TURNS
}

/// Decides whether the vCPU of this processor goes on, or another.
pub fn go_on(trapped: &mut Trapped<'_>, then: Then) {
    let crowd = crowd();
    let Some(vcpu) = current() else { return };
    let over = crowd.is_over(vcpu.guest);
    if then == Then::On && !over {
        return gic::give(crowd, vcpu);
    }
    // What is pending by now is no reason to wait.
    identifiers::park();
    // SAFETY: this processor has claimed it (1.).
    let context = unsafe { vcpu.context() };
    context.take(trapped);
    context.store();
    vcpu.due.store(context.due(), Ordering::Relaxed);
    vcpu.home.store(NOWHERE, Ordering::Relaxed);
    CURRENT[cpu::number()].store(NOWHERE, Ordering::Relaxed);
    vcpu.set(match then {
        _ if over => State::Off,
        Then::Wait => State::Waiting,
        Then::Off => State::Off,
        Then::On | Then::Yield => State::Ready,
    });
    let vcpu = load(crowd);
    // SAFETY: it is this processor's now (1.).
    unsafe { vcpu.context() }.put(trapped);
    gic::give(crowd, vcpu);
}

/// Runs vCPUs on this processor from here on.
pub fn run() -> ! {
    let crowd = crowd();
    gic::set_up_here(crowd);
    let vcpu = load(crowd);
    gic::give(crowd, vcpu);
    // SAFETY: it is this processor's (1.).
    let context = unsafe { vcpu.context() };
    // SAFETY: the registers are the guest's, which stage 2 keeps where it belongs.
    unsafe {
        write_elr_el2(ElrEl2::from_bits_retain(context.elr));
        write_spsr_el2(SpsrEl2::from_bits_retain(context.spsr));
        resume(&context.registers)
    }
}

/// # Safety
/// 1. ELR_EL2 and SPSR_EL2 are those of the guest, and everything that confines it is set up.
#[unsafe(naked)]
unsafe extern "C" fn resume(registers: &[u64; 31]) -> ! {
    naked_asm!(
        ".irp n, 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30",
        "ldr x\\n, [x0, #8 * \\n]",
        ".endr",
        "ldr x0, [x0]",
        "eret",
        "dsb nsh", // nothing is executed beyond it, not even ahead
        "isb",
    )
}
