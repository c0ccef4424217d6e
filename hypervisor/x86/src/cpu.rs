//! The processor: its segments, and an access from which it comes back, whatever happens.
//!
//! An access is made by an instruction in a page of probes, which the user may execute, too; the
//! processor is sent there as what it is to be, by IRET. It comes back by an interrupt, with what
//! was read, or by a page fault, with the error code: either abandons what was going on and returns
//! to the caller that [sent](access) it. In a guest the same instructions run, and come back by an
//! exit ([`svm`](crate::svm)).

use core::arch::{global_asm, naked_asm};
use core::cell::UnsafeCell;
use core::ops::Range;

use tablewright::Pa;
use x86_64::instructions::segmentation::{CS, Segment};
use x86_64::instructions::tables::load_tss;
use x86_64::registers::control::{Cr2, Cr3, Cr3Flags};
use x86_64::structures::gdt::{Descriptor, GlobalDescriptorTable};
use x86_64::structures::idt::InterruptDescriptorTable;
use x86_64::structures::paging::PhysFrame;
use x86_64::structures::tss::TaskStateSegment;
use x86_64::{PhysAddr, PrivilegeLevel, VirtAddr};

use tablewright_hypervisor_common::edits::PAGE;

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// 8 bytes are read.
    Read,
    /// 8 bytes are written.
    Write,
    /// The instructions there are executed.
    Fetch,
}

/// An access, and its privilege.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// By a user, or by the supervisor.
    pub user: bool,
    /// Its kind.
    pub kind: Kind,
}

/// The end of an access that does not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A page fault.
    Page {
        /// The error code.
        code: u64,
        /// The address, in CR2.
        at: u64,
    },
    /// A nested page fault (APM vol. 2 15.25.6).
    Nested {
        /// `EXITINFO1`: the error code, and of which address.
        info: u64,
        /// `EXITINFO2`: the address that the guest takes for physical.
        at: u64,
    },
    /// A guest's exit of another code.
    Other(u64),
}

// Where in the page of probes the instructions are that read, write, and come back.
const READ: u64 = 0;
const WRITE: u64 = 16;
const BACK: u64 = 32;
const BACK_FROM_GUEST: u64 = 48;

global_asm!(
    r#"
    .pushsection .probes, "ax"
    .global probes_start
    probes_start:
    mov rax, [rdi]
    jmp rdx
    .balign 16
    mov [rdi], rsi
    jmp rdx
    .balign 16
    int 0x80
    .balign 16
    vmmcall
    .popsection
    "#
);

unsafe extern "C" {
    safe static probes_start: u8;
}

/// The page of probes.
pub fn probes() -> Range<u64> {
    let start = &raw const probes_start as u64;
    start..start + PAGE
}

/// 8 bytes to be read, written, or executed, of a number that comes back if they are: `mov eax,
/// number; jmp rdx; nop`.
pub const fn token(number: u32) -> u64 {
    0xb8 | (number as u64) << 8 | 0x90_e2ff << 40
}

/// The registers of an access; [`send`] knows where they are.
#[repr(C)]
pub struct Probe {
    /// The address at which the processor begins.
    pub instruction: u64,
    /// The address of the access.
    pub at: u64,
    /// The value that it writes.
    pub value: u64,
    /// The address at which the processor goes on.
    pub back: u64,
}

impl Probe {
    /// An access by the probes that are mapped at `probes`.
    pub fn new(kind: Kind, probes: u64, at: u64, value: u64, in_guest: bool) -> Self {
        Self {
            instruction: match kind {
                Kind::Read => probes + READ,
                Kind::Write => probes + WRITE,
                Kind::Fetch => at,
            },
            at,
            value,
            back: probes + if in_guest { BACK_FROM_GUEST } else { BACK },
        }
    }
}

/// State that the processor knows by address.
struct Static<T>(UnsafeCell<T>);

// SAFETY: there is one processor, which has interrupts off.
unsafe impl<T> Sync for Static<T> {}

static SEGMENTS: Static<GlobalDescriptorTable> =
    Static(UnsafeCell::new(GlobalDescriptorTable::new()));
static TASK: Static<TaskStateSegment> = Static(UnsafeCell::new(TaskStateSegment::new()));
static VECTORS: Static<InterruptDescriptorTable> =
    Static(UnsafeCell::new(InterruptDescriptorTable::new()));
static STACK: Static<[u128; 256]> = Static(UnsafeCell::new([0; 256]));

/// The stack of the caller that waits for an access to come back; 0 if none does.
static WAITING: Static<u64> = Static(UnsafeCell::new(0));

/// Selectors of code and stack, as [`init`] makes them.
const SUPERVISOR: (u64, u64) = (0x08, 0x10);
const USER: (u64, u64) = (0x23, 0x1b);

/// Sets the processor up.
///
/// # Safety
/// 1. It is called once, before anything else of this file.
pub unsafe fn init() {
    // SAFETY: they have no other user (1.), and they stay where they are.
    unsafe {
        let task = &mut *TASK.0.get();
        task.interrupt_stack_table[0] = VirtAddr::from_ptr(STACK.0.get().add(1));
        let segments = &mut *SEGMENTS.0.get();
        let code = segments.append(Descriptor::kernel_code_segment());
        segments.append(Descriptor::kernel_data_segment());
        segments.append(Descriptor::user_data_segment());
        segments.append(Descriptor::user_code_segment());
        let task = segments.append(Descriptor::tss_segment_unchecked(task));
        segments.load_unsafe();
        CS::set_reg(code);
        load_tss(task);
        let vectors = &mut *VECTORS.0.get();
        let handler = |function: unsafe extern "C" fn()| VirtAddr::new(function as usize as u64);
        vectors.page_fault.set_handler_addr(handler(page_fault)).set_stack_index(0);
        vectors[0x80]
            .set_handler_addr(handler(back))
            .set_stack_index(0)
            .set_privilege_level(PrivilegeLevel::Ring3);
        vectors.load_unsafe();
    }
}

/// Loads a tree.
///
/// # Safety
/// 1. It maps everything that this program uses, as it uses it.
pub unsafe fn load(root: Pa) {
    let root = PhysFrame::containing_address(PhysAddr::new(root.get()));
    // SAFETY: passed on.
    unsafe { Cr3::write(root, Cr3Flags::empty()) };
}

/// Makes an access, and returns what it read or executed.
///
/// # Errors
/// The page fault that it ended in.
///
/// # Safety
/// 1. What is mapped at the address, if anything, is not in use, and a [token] if it is executed.
pub unsafe fn access(probe: &Probe, is_user: bool) -> Result<u64, Fault> {
    let (code, stack) = if is_user { USER } else { SUPERVISOR };
    // SAFETY: the instructions make the access, which is allowed (1.), and come back.
    let came = unsafe { send(probe, code, stack) };
    match came.code {
        NO_FAULT => Ok(came.value),
        code => Err(Fault::Page { code, at: Cr2::read_raw() }),
    }
}

/// The state with which the processor comes back.
#[repr(C)]
struct Came {
    value: u64,
    code: u64,
}

/// No error code.
const NO_FAULT: u64 = 1 << 32;

/// # Safety
/// 1. The instructions that the probe begins with come back, by the interrupt or by a page fault,
///    and leave all registers but RAX alone.
#[unsafe(naked)]
unsafe extern "C" fn send(probe: &Probe, code: u64, stack: u64) -> Came {
    naked_asm!(
        "push rbx; push rbp; push r12; push r13; push r14; push r15",
        "mov [rip + {waiting}], rsp",
        "push rdx", // SS
        "push 0",   // RSP: the probes have no stack
        "push 2",   // RFLAGS: interrupts off
        "push rsi", // CS
        "push [rdi]",
        "mov rdx, [rdi + 24]",
        "mov rsi, [rdi + 16]",
        "mov rdi, [rdi + 8]",
        "xor eax, eax",
        "iretq",
        waiting = sym WAITING,
    )
}

/// # Safety
/// 1. The processor comes here by itself.
#[unsafe(naked)]
unsafe extern "C" fn page_fault() {
    naked_asm!(
        "pop rdx",
        "cmp qword ptr [rip + {waiting}], 0",
        "jne {leave}",
        "mov rdi, rdx",
        "mov rsi, [rsp]",
        "call {unexpected}",
        waiting = sym WAITING,
        leave = sym leave,
        unexpected = sym unexpected,
    )
}

/// # Safety
/// 1. The processor comes here by itself, from an access.
#[unsafe(naked)]
unsafe extern "C" fn back() {
    naked_asm!(
        "mov rdx, {no_fault}",
        "jmp {leave}",
        no_fault = const NO_FAULT,
        leave = sym leave,
    )
}

/// Returns from [`send`], with RAX and RDX.
///
/// # Safety
/// 1. A caller waits.
#[unsafe(naked)]
unsafe extern "C" fn leave() {
    naked_asm!(
        "mov rsp, [rip + {waiting}]",
        "mov qword ptr [rip + {waiting}], 0",
        "pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx",
        "ret",
        waiting = sym WAITING,
    )
}

/// A page fault of this program's own.
extern "C" fn unexpected(code: u64, instruction: u64) -> ! {
    let at = Cr2::read_raw();
    panic!("page fault {code:#x} at {at:#x} by the instruction at {instruction:#x}")
}
