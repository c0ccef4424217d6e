//! Exits of a vCPU. Nothing that a guest does stops the hypervisor; what it may not do ends with a
//! fault of its own.

use core::fmt::Write as _;

use tablewright::guest::Fault;
use tablewright_hypervisor_common::log;
use tablewright_hypervisor_common::vm::Next;

use crate::context::{Context, State};
use crate::count::{self, count};
use crate::counters::Count;
use crate::machine::Machine;
use crate::ports::{
    BELL, End, MARK, RESET, RESET_CONTROL, SERIAL, SLEEP, SLEEP_STATUS, Serial, end,
};
use crate::vmcb::exit;
use crate::world::World;
use crate::{cpuid, processor, registers};

/// The frames that are taken away at an interrupt of the host's, if any are.
const EVICTED: usize = 8;

/// Handles an exit, a hypercall excepted.
pub fn handle(world: &'static World, context: &mut Context) {
    let [info, more] = context.block.exit_info;
    count(Count::Exits, 1);
    match context.block.exit_code {
        exit::INTERRUPT => {
            count(Count::Interrupts, 1);
            // It has left anyway.
            for _ in 0..EVICTED {
                world.vm.evict(processor::number());
            }
        }
        exit::NMI..=exit::INIT => count(Count::Others, 1),
        exit::WINDOW => count(Count::Windows, 1),
        exit::CPUID => {
            count(Count::Cpuids, 1);
            let (leaf, subleaf) = (context.block.rax as u32, context.registers.rcx as u32);
            let said = cpuid::answer(world, context.vcpu.number, leaf, subleaf);
            context.block.rax = said.eax.into();
            context.registers.rbx = said.ebx.into();
            context.registers.rcx = said.ecx.into();
            context.registers.rdx = said.edx.into();
            context.skip(2);
        }
        exit::HALT => {
            count(Count::Halts, 1);
            context.skip(1);
            context.state = State::Halted;
        }
        exit::INVD => {
            count(Count::Others, 1);
            context.skip(2);
        }
        exit::PORT => {
            count(Count::Ports, 1);
            port(context, info, more);
        }
        exit::REGISTER => register(world, context, info & 1 != 0),
        // Counted where it is handled.
        exit::CALL => {}
        exit::NESTED => {
            // What the exit says of the fault (APM vol. 2 15.25.6).
            let fault = Fault::nested(info, more);
            let next = fault.map(|fault| world.vm.fault(&fault, processor::number()));
            if next != Some(Next::Resume) {
                context.protection();
            }
        }
        exit::SHUTDOWN => {
            // The guest cannot say it any more.
            let (number, block) = (context.vcpu.number, &*context.block);
            let _ = write!(
                Serial,
                "vCPU {number} met a triple fault at {:#x}: stack {:#x}, CR0 {:#x}, CR2 {:#x}, CR3 \
                 {:#x}, CR4 {:#x}, EFER {:#x}, delivering {:#x}; it left last:\r\n{}",
                block.instruction,
                block.stack,
                block.cr0,
                block.cr2,
                block.cr3,
                block.cr4,
                block.efer,
                block.interrupted,
                context.trail
            );
            end(End::Reset)
        }
        exit::INVALID => panic!(
            "vCPU {} cannot be entered, at {:#x}",
            context.vcpu.number, context.block.instruction
        ),
        _ => {
            count(Count::Others, 1);
            context.undefined();
        }
    }
}

// ---- Registers ----

fn register(world: &World, context: &mut Context, is_write: bool) {
    let number = context.registers.rcx as u32;
    let done = if is_write {
        let value = context.registers.rdx << 32 | context.block.rax & 0xffff_ffff;
        registers::write(world, context, number, value)
    } else {
        registers::read(world, context, number).map(|value| {
            context.block.rax = value & 0xffff_ffff;
            context.registers.rdx = value >> 32;
        })
    };
    match done {
        Ok(()) => context.skip(2),
        Err(_) => context.protection(),
    }
}

// ---- Ports ----

const OFF: u32 = 5 << 2 | 1 << 5;
const KEYBOARD: u16 = 0x64;
const CLOCK: u16 = 0x71;

/// Fills the map of the ports that the guest leaves at: a bit for each (APM vol. 2 15.10).
pub fn bitmap(bytes: &mut [u8]) {
    bytes.fill(0xff);
    if let Some(byte) = bytes.get_mut(usize::from(SERIAL / 8)) {
        *byte = 0;
    }
}

/// An access to a port: as it is where there is no device, a few excepted.
fn port(context: &mut Context, info: u64, next: u64) {
    const IN: u64 = 1;
    const STRING: u64 = 1 << 2;
    if info & STRING != 0 {
        // There is nothing that would want it.
        return context.protection();
    }
    let bits = (info >> 4 & 7) * 8;
    let all = u64::MAX >> (64 - bits.clamp(8, 32));
    let (number, value) = ((info >> 16) as u16, (context.block.rax & all) as u32);
    if info & IN != 0 {
        let value = match number {
            // A clock that says nothing of use, and is not just being set: kernels wait for that.
            SLEEP_STATUS | CLOCK => 0,
            BELL => u64::from(b'0') + u64::from(log::is_over::<Machine>()),
            _ => all,
        };
        // A result of 32 bits clears the rest.
        let kept = if bits == 32 { 0 } else { context.block.rax & !all };
        context.block.rax = kept | value;
    } else {
        match (number, value) {
            (SLEEP, OFF) => end(End::Off),
            (BELL, _) => log::ring(),
            (MARK, 1) => count::begin(),
            (MARK, 2) => count::end(),
            (RESET, 1) | (KEYBOARD, 0xfe) => reset(context, number),
            (RESET_CONTROL, value) if value & 0b110 == 0b110 => reset(context, number),
            _ => {}
        }
    }
    context.block.instruction = next;
    context.block.shadow = 0;
}

/// The guest resets the machine, as kernels do when they cannot go on. What they have said of it
/// may never have come out.
fn reset(context: &Context, number: u16) -> ! {
    let _ = write!(
        Serial,
        "vCPU {} has reset the machine, by port {number:#x}, at {:#x}; it left last:\r\n{}",
        context.vcpu.number, context.block.instruction, context.trail
    );
    end(End::Reset)
}
