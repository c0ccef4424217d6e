//! Model-specific registers of the guest. Those that each vCPU has, and the processor keeps, it
//! reads and writes itself; the others are here. What is not here is not there, and ends in a fault
//! of the guest's.

use tablewright::hyperv::msr;

use crate::clock::Clock;
use crate::context::{Context, EFER_SVME};
use crate::count::count;
use crate::counters::Count;
use crate::vmcb::{Block, NoRegister};
use crate::world::World;

const COUNTER: u32 = 0x10;
const APIC_BASE: u32 = 0x1b;
const MICROCODE: u32 = 0x8b;
const UPDATE: u32 = 0x79;
const PAT: u32 = 0x277;
const DEADLINE: u32 = 0x6e0;
const X2APIC: u32 = 0x800;
const X2APIC_TASK: u32 = 0x808;
const X2APIC_LAST: u32 = 0x83f;
const EFER: u32 = 0xc000_0080;
const TSC_AUX: u32 = 0xc000_0103;
// What an AMD processor has, and kernels look at: it reads as said, and writes do nothing.
const SYSCFG: u32 = 0xc001_0010;
const HWCR: u32 = 0xc001_0015;
const PENDING: u32 = 0xc001_0055;
const DECODE: u32 = 0xc001_1029;

// TLFS, "Partition Reference Time", "Partition Privileges".
const REFERENCE_COUNTER: u32 = 0x4000_0020;
const REFERENCE_PAGE: u32 = 0x4000_0021;
const COUNTER_HZ: u32 = 0x4000_0022;
const TIMER_HZ: u32 = 0x4000_0023;
const ASSIST_PAGE: u32 = 0x4000_0073;
const EVEN_COUNTER: u32 = 0x4000_0118;

/// The guest counts the ticks of its timer in nanoseconds.
const TIMER_RATE: u64 = 1_000_000_000;

/// Those that the guest has for itself: SYSENTER's and SYSCALL's, the bases of FS and GS; and the
/// counter of time for reading.
const FREE: [u32; 11] = [
    0x174,
    0x175,
    0x176,
    0xc000_0081,
    0xc000_0082,
    0xc000_0083,
    0xc000_0084,
    0xc000_0100,
    0xc000_0101,
    0xc000_0102,
    COUNTER,
];

/// Fills the map of the guest's exits: a bitmap of two bits for each, of three ranges of 8192 (APM
/// vol. 2 15.11).
pub fn bitmap(bytes: &mut [u8]) {
    bytes.fill(0xff);
    for register in FREE {
        let range = match register >> 16 {
            0 => 0,
            0xc000 => 0x800,
            _ => 0x1000,
        };
        let bit = (register & 0x1fff) * 2;
        let both = if register == COUNTER { 0b01 } else { 0b11 };
        if let Some(byte) = bytes.get_mut(range + (bit / 8) as usize) {
            *byte &= !(both << (bit % 8));
        }
    }
}

/// Reads one.
///
/// # Errors
/// It is not there.
pub fn read(world: &World, context: &Context, register: u32) -> Result<u64, NoRegister> {
    let vcpu = context.vcpu;
    let hyperv = &world.partition;
    count(Count::Registers, 1);
    Ok(match register {
        // Enabled, in x2APIC mode; of the first vCPU.
        APIC_BASE => 0xfee0_0c00 | if vcpu.number == 0 { 1 << 8 } else { 0 },
        MICROCODE | SYSCFG | PENDING => 0,
        // The counter of time runs at the rate of the first state.
        HWCR => 1 << 24,
        // LFENCE waits for loads.
        DECODE => 1 << 1,
        PAT => context.block.pat,
        DEADLINE => context.apic.deadline(),
        X2APIC..=X2APIC_LAST => context.apic.read(vcpu, register - X2APIC, context.task())?,
        EFER => context.block.efer & !EFER_SVME,
        TSC_AUX => context.aux,
        msr::GUEST_OS_ID => hyperv.guest(),
        msr::HYPERCALL => hyperv.page(),
        msr::VP_INDEX => vcpu.index.into(),
        REFERENCE_COUNTER => Clock::get().reference(),
        REFERENCE_PAGE => hyperv.reference(),
        COUNTER_HZ => Clock::get().counter_hz,
        TIMER_HZ => TIMER_RATE,
        ASSIST_PAGE | EVEN_COUNTER => 0,
        _ => return Err(NoRegister),
    })
}

/// Writes one.
///
/// # Errors
/// It is not there, or cannot have this value.
pub fn write(
    world: &World,
    context: &mut Context,
    register: u32,
    value: u64,
) -> Result<(), NoRegister> {
    let hyperv = &world.partition;
    match register {
        DEADLINE => count(Count::Timers, 1),
        // They are counted by kind.
        X2APIC..=X2APIC_LAST => {}
        _ => count(Count::Registers, 1),
    }
    match register {
        COUNTER | UPDATE | SYSCFG | HWCR | PENDING | DECODE | MICROCODE => {}
        // It cannot be turned off, moved, or put into another mode.
        APIC_BASE if value == read(world, context, APIC_BASE)? => {}
        PAT if is_pat(value) => context.block.pat = value,
        DEADLINE => context.apic.set_deadline(value),
        X2APIC_TASK if value >> 8 == 0 => context.set_task(value),
        X2APIC..=X2APIC_LAST => {
            let vcpu = context.vcpu;
            context.apic.write(world, vcpu, register - X2APIC, value)?;
        }
        EFER => efer(context.block, value)?,
        TSC_AUX if value >> 32 == 0 => {
            context.aux = value;
            context.load_aux();
        }
        msr::GUEST_OS_ID => hyperv.set_guest(value),
        msr::HYPERCALL => hyperv.set_page(&world.vm, value)?,
        REFERENCE_PAGE => hyperv.set_reference(&world.vm, value)?,
        // There is nothing on it that a host must do.
        ASSIST_PAGE | EVEN_COUNTER => {}
        _ => return Err(NoRegister),
    }
    Ok(())
}

/// Each byte is a type of memory (APM vol. 2 7.8.1).
fn is_pat(value: u64) -> bool {
    value.to_le_bytes().iter().all(|kind| matches!(kind, 0 | 1 | 4..=7))
}

/// SCE, LME, NXE, FFXSR; LMA is the processor's.
fn efer(block: &mut Block, value: u64) -> Result<(), NoRegister> {
    const LME: u64 = 1 << 8;
    const LMA: u64 = 1 << 10;
    const OTHERS: u64 = 1 | 1 << 11 | 1 << 14;
    const PAGING: u64 = 1 << 31;
    let changes = value ^ block.efer;
    if value & !(LME | LMA | OTHERS) != 0 || block.cr0 & PAGING != 0 && changes & LME != 0 {
        return Err(NoRegister);
    }
    block.efer = value & (LME | OTHERS) | block.efer & LMA | EFER_SVME;
    Ok(())
}
