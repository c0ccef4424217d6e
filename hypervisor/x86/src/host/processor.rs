//! The processors: their stacks, their own interrupt controllers, how the others are started, and
//! what a fault of the host's own comes to.
//!
//! A stack says by its place which processor runs on it. Interrupts are on only in a guest and
//! while a processor sleeps; the handler acknowledges them and does nothing else, because what has
//! to be done is looked for after each.

use core::arch::{asm, global_asm, naked_asm};
use core::cell::UnsafeCell;
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering};

use x86_64::VirtAddr;
use x86_64::instructions::port::Port;
use x86_64::registers::control::{Cr2, Efer, EferFlags};
use x86_64::registers::model_specific::Msr;
use x86_64::structures::idt::InterruptDescriptorTable;

/// The most processors that there can be.
pub const MOST: usize = tablewright_hypervisor_common::host::PROCESSORS;

const STACK: usize = 1 << 16;

#[repr(C, align(65536))]
struct Stacks(UnsafeCell<[[u8; STACK]; MOST]>);

// SAFETY: each processor has its own.
unsafe impl Sync for Stacks {}

static STACKS: Stacks = Stacks(UnsafeCell::new([[0; STACK]; MOST]));

struct Vectors(UnsafeCell<InterruptDescriptorTable>);

// SAFETY: it is written once, before there are others.
unsafe impl Sync for Vectors {}

static VECTORS: Vectors = Vectors(UnsafeCell::new(InterruptDescriptorTable::new()));

/// The number of this processor.
#[inline(always)]
pub fn number() -> usize {
    let at: usize;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rsp", out(reg) at, options(nomem, nostack, preserves_flags)) };
    (at - &raw const STACKS as usize) / STACK
}

/// Goes on with a function, on the stack of this processor.
///
/// # Safety
/// 1. No other processor has this number, and it is below [`MOST`].
pub unsafe fn run_on_stack(number: usize, run: extern "C" fn(u64) -> !, argument: u64) -> ! {
    let end = &raw const STACKS as usize + (number + 1) * STACK;
    // SAFETY: its own stack (1.), which nothing is on that is still needed.
    unsafe {
        asm!(
            "mov rsp, {end}",
            "xor ebp, ebp",
            "call {run}",
            "ud2",
            end = in(reg) end,
            run = in(reg) run,
            in("rdi") argument,
            options(noreturn),
        )
    }
}

// ---- The interrupt controller, by its memory (APM vol. 2 16.3) ----

const CONTROLLER: usize = 0xfee0_0000;
const ID: usize = 0x20;
const SPURIOUS: usize = 0xf0;
const COMMAND: usize = 0x300;
const COMMAND_TO: usize = 0x310;
const TIMER: usize = 0x320;
const TIMER_FROM: usize = 0x380;
const TIMER_NOW: usize = 0x390;
const TIMER_DIVIDE: usize = 0x3e0;

/// Vectors.
const KICK: u32 = 0xf0;
const TICK: u32 = 0xf1;
const NOTHING: u32 = 0xff;

fn controller(register: usize) -> *mut u32 {
    ptr::with_exposed_provenance_mut(CONTROLLER + register)
}

fn write_controller(register: usize, value: u32) {
    // SAFETY: a register of this processor's controller.
    unsafe { controller(register).write_volatile(value) }
}

fn read_controller(register: usize) -> u32 {
    // SAFETY: a register of this processor's controller.
    unsafe { controller(register).read_volatile() }
}

fn send(to: usize, command: u32) {
    // What was stored before is visible: the write of a register is behind it (7.4.2).
    write_controller(COMMAND_TO, (to as u32) << 24);
    write_controller(COMMAND, command);
    while read_controller(COMMAND) & 1 << 12 != 0 {
        core::hint::spin_loop();
    }
}

/// Has a processor leave its guest, or wake.
pub fn kick(to: usize) {
    send(to, KICK | 1 << 14);
}

/// Has the timer interrupt this processor, in so many of its ticks; 0 is never.
pub fn set_timer(ticks: u32) {
    write_controller(TIMER_FROM, ticks);
}

/// Ticks of the timer while `wait` waits.
pub fn timed(wait: impl FnOnce()) -> u32 {
    write_controller(TIMER, TICK | 1 << 16);
    write_controller(TIMER_FROM, u32::MAX);
    wait();
    let ticks = u32::MAX - read_controller(TIMER_NOW);
    write_controller(TIMER_FROM, 0);
    write_controller(TIMER, TICK);
    ticks
}

/// Waits for an interrupt. What it would miss has to be looked for before, with interrupts held
/// off.
pub fn sleep() {
    // SAFETY: interrupts are acknowledged and do nothing else.
    unsafe { asm!("sti", "hlt", "cli", options(nostack)) };
}

// ---- Setting up ----

/// The address for a processor's own state while a guest runs.
const VM_HSAVE_PA: u32 = 0xc001_0117;

/// Sets the first processor up as far as all share it.
///
/// # Safety
/// 1. There is no other processor yet.
pub unsafe fn set_up_vectors() {
    let handler = |function: unsafe extern "C" fn()| VirtAddr::new(function as usize as u64);
    // SAFETY: there is no other user yet (1.), and the handlers are those below.
    unsafe {
        let vectors = &mut *VECTORS.0.get();
        // Each fault says where it was; without a handler the machine would be reset, and nothing
        // said.
        macro_rules! all {
            ($handler:ident: $($vector:ident),*) => {
                $(vectors.$vector.set_handler_addr(handler($handler));)*
            };
        }
        all!(faulted_plainly: divide_error, debug, non_maskable_interrupt, breakpoint, overflow);
        all!(faulted_plainly: bound_range_exceeded, invalid_opcode, device_not_available);
        all!(faulted_plainly: x87_floating_point, machine_check, simd_floating_point);
        // Those that push an error code.
        all!(faulted: double_fault, invalid_tss, segment_not_present, stack_segment_fault);
        all!(faulted: general_protection_fault, page_fault, alignment_check);
        for vector in [KICK, TICK] {
            vectors[vector as u8].set_handler_addr(handler(acknowledge));
        }
        vectors[NOTHING as u8].set_handler_addr(handler(ignore));
        // The PC's own interrupt controllers: firmware has left the timer's on.
        Port::<u8>::new(0x21).write(0xff);
        Port::<u8>::new(0xa1).write(0xff);
    }
}

/// Sets this processor up. `state` is a frame for what it keeps while a guest runs.
///
/// # Safety
/// 1. The frame has no other user, and the processor has SVM.
/// 2. The vectors have been set up.
pub unsafe fn set_up(state: u64) {
    // SAFETY: they are written no more (2.); what is enabled is there (1.).
    unsafe {
        let vectors: &'static InterruptDescriptorTable = &*VECTORS.0.get();
        vectors.load();
        Efer::update(|efer| efer.insert(EferFlags::SECURE_VIRTUAL_MACHINE_ENABLE));
        Msr::new(VM_HSAVE_PA).write(state);
        // OSFXSR, OSXMMEXCPT: the registers of floating point are exchanged when vCPUs are.
        asm!("mov rax, cr4", "or rax, 0x600", "mov cr4, rax", out("rax") _, options(nostack));
    }
    write_controller(SPURIOUS, NOTHING | 1 << 8);
    write_controller(TIMER_DIVIDE, 0b1011);
    write_controller(TIMER, TICK);
}

/// # Safety
/// 1. The processor comes here by itself.
#[unsafe(naked)]
unsafe extern "C" fn acknowledge() {
    naked_asm!("push rax", "mov eax, 0xfee000b0", "mov dword ptr [rax], 0", "pop rax", "iretq")
}

/// # Safety
/// 1. The processor comes here by itself.
#[unsafe(naked)]
unsafe extern "C" fn ignore() {
    naked_asm!("iretq")
}

/// # Safety
/// 1. The processor comes here by itself, with an error code.
#[unsafe(naked)]
unsafe extern "C" fn faulted() {
    naked_asm!(
        "pop rdi",
        "mov rsi, [rsp]",
        "and rsp, -16",
        "call {}",
        sym unexpected,
    )
}

/// # Safety
/// 1. The processor comes here by itself, without an error code.
#[unsafe(naked)]
unsafe extern "C" fn faulted_plainly() {
    naked_asm!(
        "mov rsi, [rsp]",
        "mov rdi, -1",
        "and rsp, -16",
        "call {}",
        sym unexpected,
    )
}

extern "C" fn unexpected(code: u64, instruction: u64) -> ! {
    let at = Cr2::read_raw();
    panic!("fault {code:#x} by the instruction at {instruction:#x}, CR2 {at:#x}")
}

// ---- The other processors ----

/// The address at which they begin: a page below 1 MiB.
const START: u64 = 0x8000;

global_asm!(
    r#"
    .pushsection .rodata.start, "a"
    .global start_begin
    .global start_end
    start_begin:
    .code16
    jmp 1f
    .balign 8
    .quad 0, 0x00af9a000000ffff     // at 8: segments
    .word 15                        // at 24: where they are
    .long 0x8008
    .balign 8
    .quad 0, 0, 0                   // at 32: the root, the stacks, the entry
1:  cli
    xor ax, ax
    mov ds, ax
    lgdt [0x8018]
    mov eax, 0x6a0                  // CR4.PAE, PGE, OSFXSR, OSXMMEXCPT
    mov cr4, eax
    mov eax, dword ptr [0x8020]
    mov cr3, eax
    mov ecx, 0xc0000080
    mov eax, 0x900                  // EFER.LME, NXE
    xor edx, edx
    wrmsr
    mov eax, 0x80010033             // CR0.PG, WP, NE, ET, MP, PE
    mov cr0, eax
    .byte 0x66, 0xea                // jmp 8:start_long
    .long 0x8000 + start_long - start_begin
    .word 8
    .code64
    start_long:
    xor eax, eax
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov eax, 1
    cpuid
    shr ebx, 24
    mov edi, ebx
    mov rsp, [0x8028]
    inc ebx
    shl ebx, 16
    add rsp, rbx
    call qword ptr [0x8030]
    ud2
    start_end:
    .popsection
    "#
);

unsafe extern "C" {
    safe static start_begin: u8;
    safe static start_end: u8;
}

static STARTED: AtomicU32 = AtomicU32::new(1);

/// Says that this processor has started.
pub fn has_started() {
    STARTED.fetch_add(1, Ordering::Release);
}

/// Starts so many processors, the first of which runs already. Each calls `entry`, with its number,
/// on its own stack. False if they do not come.
///
/// # Safety
/// 1. Memory below 1 MiB holds nothing that is still needed, and is mapped one to one, like all
///    that `entry` uses.
pub unsafe fn start_others(count: usize, entry: extern "C" fn(u64) -> !) -> bool {
    let begin = &raw const start_begin;
    let size = &raw const start_end as usize - begin as usize;
    let to = ptr::with_exposed_provenance_mut::<u8>(START as usize);
    let root: u64;
    // SAFETY: the root of the tables in use is below 4 GiB, the page is free (1.), and the three
    // quadwords are those above.
    unsafe {
        asm!("mov {}, cr3", out(reg) root, options(nomem, nostack));
        ptr::copy_nonoverlapping(begin, to, size);
        let values = to.add(32).cast::<u64>();
        values.write_volatile(root);
        values.add(1).write_volatile(&raw const STACKS as u64);
        values.add(2).write_volatile(entry as usize as u64);
    }
    for number in 1..count {
        // INIT, then where to start (16.5).
        send(number, 0x4500);
        spin(1_000_000);
        send(number, 0x4600 | (START >> 12) as u32);
        let mut patience = 2_000;
        while STARTED.load(Ordering::Acquire) as usize != number + 1 {
            patience -= 1;
            if patience == 0 {
                return false;
            }
            spin(1_000_000);
        }
    }
    true
}

/// Waits for so many cycles.
pub fn spin(cycles: u64) {
    let from = now();
    while now().wrapping_sub(from) < cycles {
        core::hint::spin_loop();
    }
}

/// The processors' counter of time, which all have alike.
pub fn now() -> u64 {
    // SAFETY: reads a counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The number that the controller knows this processor by.
pub fn controller_id() -> usize {
    (read_controller(ID) >> 24) as usize
}
