//! The control block of a vCPU, and how it is entered (APM vol. 2, chapter 15, appendices B and C).

use core::arch::naked_asm;
use core::mem::offset_of;

/// A segment, as the block has it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Segment {
    /// The selector.
    pub selector: u16,
    /// Type, S, DPL and P, then AVL, L, D and G.
    pub attributes: u16,
    /// The limit, in bytes.
    pub limit: u32,
    /// The base.
    pub base: u64,
}

/// The control block. What is not named stays 0.
#[repr(C, align(4096))]
pub struct Block {
    intercept_registers: [u16; 4],
    /// The exceptions that it leaves at, by their vectors.
    pub intercept_exceptions: u32,
    /// Events at which the guest leaves.
    pub intercept: [u32; 2],
    _0: [u32; 11],
    /// The address of the bitmap of ports.
    pub ports: u64,
    /// The address of the bitmap of model-specific registers.
    pub registers: u64,
    /// The difference that the guest reads in the counter of time.
    pub counter_offset: u64,
    /// The identifier of what is remembered of the guest.
    pub asid: u32,
    /// Translations that are forgotten when the guest is entered.
    pub tlb_control: u32,
    /// The virtual interrupt: TPR, whether there is one, and what it takes.
    pub interrupt: u64,
    /// Bit 0: the guest is in the shadow of an instruction that holds off interrupts.
    pub shadow: u64,
    /// Why it left.
    pub exit_code: u64,
    /// More about it.
    pub exit_info: [u64; 2],
    /// The event that was being delivered when it left.
    pub interrupted: u64,
    /// Bit 0: nested paging.
    pub nested: u64,
    _3: [u64; 2],
    /// The event that is delivered when it is entered.
    pub inject: u64,
    /// The root of the nested tables.
    pub nested_cr3: u64,
    _4: [u64; 105],
    /// ES, CS, SS, DS, FS, GS, GDTR, LDTR, IDTR, TR.
    pub segments: [Segment; 10],
    _5: [u8; 43],
    /// CPL.
    pub privilege: u8,
    _6: u32,
    /// EFER.
    pub efer: u64,
    _7: [u64; 14],
    /// CR4.
    pub cr4: u64,
    /// CR3.
    pub cr3: u64,
    /// CR0.
    pub cr0: u64,
    /// DR7.
    pub dr7: u64,
    /// DR6.
    pub dr6: u64,
    /// RFLAGS.
    pub flags: u64,
    /// RIP.
    pub instruction: u64,
    _8: [u64; 11],
    /// RSP.
    pub stack: u64,
    _9: [u64; 3],
    /// RAX.
    pub rax: u64,
    _10: [u64; 8],
    /// CR2.
    pub cr2: u64,
    _11: [u64; 4],
    /// PAT.
    pub pat: u64,
    _12: [u64; 306],
}

const _: () = assert!(
    offset_of!(Block, ports) == 0x40
        && offset_of!(Block, counter_offset) == 0x50
        && offset_of!(Block, asid) == 0x58
        && offset_of!(Block, interrupt) == 0x60
        && offset_of!(Block, exit_code) == 0x70
        && offset_of!(Block, interrupted) == 0x88
        && offset_of!(Block, nested) == 0x90
        && offset_of!(Block, inject) == 0xa8
        && offset_of!(Block, nested_cr3) == 0xb0
        && offset_of!(Block, segments) == 0x400
        && offset_of!(Block, privilege) == 0x4cb
        && offset_of!(Block, efer) == 0x4d0
        && offset_of!(Block, cr4) == 0x548
        && offset_of!(Block, instruction) == 0x578
        && offset_of!(Block, stack) == 0x5d8
        && offset_of!(Block, rax) == 0x5f8
        && offset_of!(Block, cr2) == 0x640
        && offset_of!(Block, pat) == 0x668
        && size_of::<Block>() == 4096
);

/// Places in [`Block::segments`].
pub mod segment {
    /// CS.
    pub const CODE: usize = 1;
    /// The global table.
    pub const GLOBALS: usize = 6;
    /// The local table.
    pub const LOCALS: usize = 7;
    /// The table of interrupts.
    pub const INTERRUPTS: usize = 8;
    /// TR.
    pub const TASK: usize = 9;
}

/// Intercepts of the first word (appendix B): interrupts, NMI, SMI, INIT; the window for
/// interrupts; CPUID, INVD, HLT, INVLPGA; ports, registers, shutdown.
pub const INTERCEPT_FIRST: u32 =
    0b1111 | 1 << 18 | 1 << 22 | 1 << 24 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 31;
/// That of the window, which is there when it is waited for.
pub const INTERCEPT_WINDOW: u32 = 1 << 4;
/// Those of the second: VMRUN, VMMCALL, VMLOAD, VMSAVE, STGI, CLGI, SKINIT; MONITOR, MWAIT, MWAIT
/// when armed, XSETBV.
pub const INTERCEPT_SECOND: u32 = 0b111_1111 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 13;

/// [`Block::interrupt`]: interrupts go by the guest's flag to the guest, and by the host's to the
/// host (15.21.1).
pub const MASK_INTERRUPTS: u64 = 1 << 24;
/// [`Block::interrupt`]: one is waiting, of the highest priority.
pub const WINDOW: u64 = 1 << 8 | 0xf << 16 | 1 << 20;

/// [`Block::inject`] and [`Block::interrupted`] (15.20).
pub mod event {
    /// There is one.
    pub const VALID: u64 = 1 << 31;
    /// An interrupt.
    pub const INTERRUPT: u64 = 0 << 8;
    /// NMI.
    pub const NMI: u64 = 2 << 8;
    /// An exception.
    pub const EXCEPTION: u64 = 3 << 8;
    /// INT n.
    pub const SOFTWARE: u64 = 4 << 8;
    /// The kind.
    pub const KIND: u64 = 7 << 8;
    /// With an error code, in the upper half.
    pub const CODE: u64 = 1 << 11;
}

/// Exit codes (appendix C).
pub mod exit {
    /// An interrupt of the host's.
    pub const INTERRUPT: u64 = 0x60;
    /// NMI, SMI and INIT.
    pub const NMI: u64 = 0x61;
    /// See [`NMI`].
    pub const INIT: u64 = 0x63;
    /// The guest takes interrupts.
    pub const WINDOW: u64 = 0x64;
    /// CPUID.
    pub const CPUID: u64 = 0x72;
    /// INVD.
    pub const INVD: u64 = 0x76;
    /// HLT.
    pub const HALT: u64 = 0x78;
    /// IN, OUT.
    pub const PORT: u64 = 0x7b;
    /// RDMSR, WRMSR.
    pub const REGISTER: u64 = 0x7c;
    /// A fault for which there is no handler.
    pub const SHUTDOWN: u64 = 0x7f;
    /// VMMCALL.
    pub const CALL: u64 = 0x81;
    /// A nested page fault.
    pub const NESTED: u64 = 0x400;
    /// The block makes no sense.
    pub const INVALID: u64 = u64::MAX;
}

/// The register, or the value that is written, is not there: the guest gets a fault.
#[derive(Clone, Copy, Debug)]
pub struct NoRegister;

/// The registers of a guest that the block has not. [`enter`] knows where they are.
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(missing_docs, reason = "registers have names")]
pub struct Registers {
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub rbp: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
}

/// Runs the guest of the block at this address until it leaves. Interrupts are held off before and
/// after; one that waits has the guest leave at once.
///
/// # Safety
/// 1. The block is one of a guest that reaches nothing that is the host's, and `EFER.SVME` is set.
#[unsafe(naked)]
pub unsafe extern "C" fn enter(block: u64, registers: &mut Registers) {
    naked_asm!(
        "push rbx; push rbp; push r12; push r13; push r14; push r15; push rsi",
        "mov rax, rdi",
        "mov rbx, [rsi]; mov rcx, [rsi + 8]; mov rdx, [rsi + 16]; mov rdi, [rsi + 32]",
        "mov rbp, [rsi + 40]; mov r8, [rsi + 48]; mov r9, [rsi + 56]; mov r10, [rsi + 64]",
        "mov r11, [rsi + 72]; mov r12, [rsi + 80]; mov r13, [rsi + 88]; mov r14, [rsi + 96]",
        "mov r15, [rsi + 104]; mov rsi, [rsi + 24]",
        "clgi",
        "sti",
        "vmrun rax",
        "cli",
        "push rsi",
        "mov rsi, [rsp + 8]",
        "mov [rsi], rbx; mov [rsi + 8], rcx; mov [rsi + 16], rdx",
        "pop rcx",
        "mov [rsi + 24], rcx; mov [rsi + 32], rdi; mov [rsi + 40], rbp; mov [rsi + 48], r8",
        "mov [rsi + 56], r9; mov [rsi + 64], r10; mov [rsi + 72], r11; mov [rsi + 80], r12",
        "mov [rsi + 88], r13; mov [rsi + 96], r14; mov [rsi + 104], r15",
        "pop rsi; pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx",
        "cld",
        "stgi",
        // An interrupt that waits is taken here, and does no more than to be acknowledged.
        "sti",
        "nop",
        "cli",
        "ret",
    )
}
