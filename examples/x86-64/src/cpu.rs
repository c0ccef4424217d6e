//! A processor, but for its page tables: segments, traps, the interrupt controller, a user, the
//! serial line.

use core::arch::{global_asm, naked_asm};
use core::fmt::{self, Write as _};
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicU64, Ordering, fence};

use spin::once::Once;
use tablewright::Pa;
use x86_64::instructions::segmentation::{CS, Segment as _};
use x86_64::instructions::{hlt, port::Port, tables::load_tss};
use x86_64::structures::gdt::{Descriptor, GlobalDescriptorTable, SegmentSelector};
use x86_64::structures::idt::InterruptDescriptorTable;
use x86_64::structures::tss::TaskStateSegment;
use x86_64::{PrivilegeLevel, VirtAddr};

use crate::boot;
use crate::memory::{CPUS, linear};

/// The registers of a processor's interrupt controller.
pub const CONTROLLER: u64 = 0xfee0_0000;

/// Vectors: the page fault, what the user calls, and what another processor sends.
pub const PAGE_FAULT: u64 = 14;
pub const CALL: u64 = 0x80;
pub const SHOOTDOWN: u64 = 0xf0;

/// Registers that `trap_entry` has saved, and above them those of the processor.
#[repr(C)]
pub struct Frame {
    registers: [u64; 15],
    pub vector: u64,
    pub error: u64,
    pub at: u64,
    segment: u64,
}

impl Frame {
    pub fn is_user(&self) -> bool {
        self.segment & 3 == 3
    }
}

unsafe extern "C" {
    safe static trap_6: u8;
    safe static trap_13: u8;
    safe static trap_14: u8;
    safe static trap_128: u8;
    safe static trap_240: u8;
}

global_asm!(
    r#"
    .macro trap vector
    .global trap_\vector
    trap_\vector:
    push \vector
    jmp trap_entry
    .endm
    .macro trap_plain vector
    .global trap_\vector
    trap_\vector:
    push 0
    push \vector
    jmp trap_entry
    .endm
    trap 14
    trap 13
    trap_plain 6
    trap_plain 128
    trap_plain 240
    trap_entry:
    push rax; push rcx; push rdx; push rbx; push rbp; push rsi; push rdi; push r8
    push r9; push r10; push r11; push r12; push r13; push r14; push r15
    mov rdi, rsp
    cld
    call trapped
    pop r15; pop r14; pop r13; pop r12; pop r11; pop r10; pop r9
    pop r8; pop rdi; pop rsi; pop rbp; pop rbx; pop rdx; pop rcx; pop rax
    add rsp, 16
    iretq
    "#
);

static IDT: Once<InterruptDescriptorTable> = Once::new();
static TSS: [Once<TaskStateSegment>; CPUS] = [const { Once::new() }; CPUS];
static GDT: [Once<GlobalDescriptorTable>; CPUS] = [const { Once::new() }; CPUS];
/// The stack of a trap from the user, and the place where the kernel left its own.
static TRAP_STACK: [[AtomicU64; 2048]; CPUS] =
    [const { [const { AtomicU64::new(0) }; 2048] }; CPUS];
static LEFT: [AtomicU64; CPUS] = [const { AtomicU64::new(0) }; CPUS];

/// Segments, traps, and the interrupt controller of this processor.
pub fn set_up(cpu: usize) {
    let tss = TSS[cpu].call_once(|| {
        let mut tss = TaskStateSegment::new();
        tss.privilege_stack_table[0] = VirtAddr::from_ptr(TRAP_STACK[cpu].as_ptr_range().end);
        tss
    });
    let gdt = GDT[cpu].call_once(|| {
        let mut gdt = GlobalDescriptorTable::new();
        gdt.append(Descriptor::kernel_code_segment()); // 0x8
        gdt.append(Descriptor::user_data_segment()); // 0x13
        gdt.append(Descriptor::user_code_segment()); // 0x1b
        gdt.append(Descriptor::tss_segment(tss)); // 0x20
        gdt
    });
    let idt = IDT.call_once(|| {
        let mut idt = InterruptDescriptorTable::new();
        let at = |stub: *const u8| VirtAddr::from_ptr(stub);
        // SAFETY: each stub saves what the function behind it changes, and takes the error code off
        // where there is one.
        unsafe {
            idt.invalid_opcode.set_handler_addr(at(&raw const trap_6));
            idt.general_protection_fault.set_handler_addr(at(&raw const trap_13));
            idt.page_fault.set_handler_addr(at(&raw const trap_14));
            idt[CALL as u8]
                .set_handler_addr(at(&raw const trap_128))
                .set_privilege_level(PrivilegeLevel::Ring3);
            idt[SHOOTDOWN as u8].set_handler_addr(at(&raw const trap_240));
        }
        idt
    });
    gdt.load();
    idt.load();
    // SAFETY: the first descriptor is of code, as the one before, and the fourth of a TSS that no
    // processor has loaded.
    unsafe {
        CS::set_reg(SegmentSelector(0x8));
        load_tss(SegmentSelector(0x20));
    }
    // The firmware's interrupts have no handler here: all of both 8259 are masked.
    for port in [0x21, 0xa1] {
        // SAFETY: the registers of the masks.
        unsafe { Port::new(port).write(0xffu8) };
    }
    write_controller(0xf0, 0x1ff); // enabled (SDM vol. 3A 12.9)
}

// ---- The interrupt controller, by its memory (SDM vol. 3A 12.4.1) ----

fn read_controller(register: u64) -> u32 {
    // SAFETY: a register of this processor's, which the kernel's half maps as a device.
    unsafe { linear::<u32>(Pa::new(CONTROLLER + register)).read_volatile() }
}

fn write_controller(register: u64, value: u32) {
    // SAFETY: the same.
    unsafe { linear::<u32>(Pa::new(CONTROLLER + register)).write_volatile(value) }
}

/// The number of this processor.
pub fn number() -> usize {
    (read_controller(0x20) >> 24) as usize
}

/// Ends an interrupt.
pub fn end_of_interrupt() {
    write_controller(0xb0, 0);
}

fn command(to: usize, what: u32) {
    write_controller(0x310, (to as u32) << 24);
    write_controller(0x300, what);
    while read_controller(0x300) & 1 << 12 != 0 {}
}

/// Interrupts another processor. What was stored before is there when it answers.
pub fn interrupt(to: usize) {
    fence(Ordering::SeqCst);
    command(to, 0x4000 | SHOOTDOWN as u32);
}

/// Starts the second processor (SDM vol. 3A 10.4.4).
pub fn start(to: usize) {
    boot::place_second(Pa::new(0x8000));
    command(to, 0x4500); // INIT
    command(to, 0x4608); // start at page 8
}

// ---- To a user, and back ----

/// Runs the user from `at` on, with `first` in RDI and `second` in RSI, until [`leave_user`], whose
/// result it returns.
pub fn run_user(at: u64, first: u64, second: u64) -> u64 {
    // SAFETY: the user has no access to what the kernel has mapped for itself, and comes back by a
    // trap.
    unsafe { enter(first, second, at, LEFT[number()].as_ptr()) }
}

/// Abandons the trap from the user that is handled, and has [`run_user`] return.
///
/// # Safety
/// 1. It is called in a trap from the user, and nothing that the trap has made is dropped, or has
///    to be.
pub unsafe fn leave_user(result: u64) -> ! {
    // SAFETY: where `enter` has left its stack (1.).
    unsafe { leave(result, LEFT[number()].load(Ordering::Relaxed)) }
}

#[unsafe(naked)]
unsafe extern "C" fn enter(first: u64, second: u64, at: u64, left: *mut u64) -> u64 {
    naked_asm!(
        "push rbx; push rbp; push r12; push r13; push r14; push r15",
        "mov [rcx], rsp",
        "push 0x13; push 0; push 0x202; push 0x1b; push rdx", // SS, RSP, RFLAGS with IF, CS, RIP
        "iretq",
    )
}

#[unsafe(naked)]
unsafe extern "C" fn leave(result: u64, left: u64) -> ! {
    naked_asm!(
        "mov rax, rdi",
        "mov rsp, rsi",
        "pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx",
        "ret",
    )
}

// ---- The serial line ----

/// The serial line.
struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // SAFETY: the register of the serial line, which QEMU's never has full.
        text.bytes().for_each(|byte| unsafe { Port::new(0x3f8).write(byte) });
        Ok(())
    }
}

/// Says what was seen.
pub fn say(what: fmt::Arguments<'_>) {
    let _ = writeln!(Console, "example: {what}");
}

/// Says how it ended, and ends the machine.
pub fn end(how: fmt::Arguments<'_>) -> ! {
    say(how);
    // SAFETY: the port of the device that ends QEMU, or of no device.
    unsafe { Port::new(0xf4).write(0u32) };
    loop {
        hlt();
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    end(format_args!("WRONG: {info}"))
}
