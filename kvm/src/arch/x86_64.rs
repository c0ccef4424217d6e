//! x86-64: the guest runs at ring 3, where software paging runs it natively too.

use std::arch::global_asm;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use tablewright::Attrs;

use crate::error::Error;
use crate::guest::{INCREMENT, MULTIPLIER};

/// The guest's tables.
pub type Format = tablewright::format::X86_64<4>;

/// What the guest executes.
pub const CODE: Attrs = Attrs::USER_TEXT;

/// What it reads and writes.
pub fn data() -> Attrs {
    Attrs::USER_DATA
}

// rbx has the address of the block and rsp that of where it leaves. The offsets are those of `guest::Block`.
global_asm!(
    ".pushsection .rodata.tablewright_guest, \"a\"",
    ".globl tablewright_guest_begin",
    ".hidden tablewright_guest_begin",
    ".globl tablewright_guest_end",
    ".hidden tablewright_guest_end",
    "tablewright_guest_begin:",
    "10:",                 // Orders are taken.
    "mov rdi, [rbx + 32]", // first
    "mov rsi, [rbx + 40]", // pages
    "mov r8, [rbx + 48]",  // accesses left
    "mov r9, [rbx + 56]",  // what is random
    "mov r10, [rbx + 64]", // below: a write
    "mov r11, [rbx + 72]", // random order
    "mov r13, [rbx + 80]", // position
    "mov r15, [rbx + 88]", // value
    "mov rbp, [rbx + 96]", // stride
    "rdtsc",
    "shl rdx, 32",
    "or rax, rdx",
    "mov r14, rax", // the counter at the last access
    "20:",          // An access.
    "mov rcx, {multiplier}",
    "imul r9, rcx",
    "mov rcx, {increment}",
    "add r9, rcx",
    "mov r12, r13",
    "test r11, r11",
    "jz 21f",
    "mov r12, r9",
    "shr r12, 32",
    "imul r12, rsi",
    "shr r12, 32",
    "21:", // Of blocks the second half.
    "mov rcx, [rbx + 112]",
    "mov rax, rcx",
    "neg rax",
    "and rax, r12",
    "add r12, rax",
    "add r12, rcx",
    "imul r12, rbp",
    "add r12, rdi",
    "mov rcx, r9",
    "shr rcx, 16",
    "mov ecx, ecx",
    "cmp rcx, r10",
    "jae 22f",
    "mov [r12], r15",
    "jmp 23f",
    "22:",
    "mov rcx, [r12]",
    "23:", // The gap.
    "rdtsc",
    "shl rdx, 32",
    "or rax, rdx",
    "mov rdx, rax",
    "sub rax, r14",
    "jae 24f", // The counters of two CPUs may be apart.
    "xor eax, eax",
    "24:",
    "mov r14, rdx",
    "add [rbx + 24], rax",
    "cmp rax, [rbx + 8]",
    "jbe 25f",
    "mov [rbx + 8], rax",
    "25:",
    "cmp rax, 64",
    "jb 26f",
    "bsr rdx, rax",
    "lea ecx, [rdx - 6]",
    "shr rax, cl",
    "shl ecx, 6",
    "add rax, rcx",
    "26:",
    "inc qword ptr [rbx + rax * 8 + 128]",
    "inc qword ptr [rbx + 16]",
    "inc r13",
    "cmp r13, rsi",
    "jb 27f",
    "xor r13d, r13d",
    "27:",
    "dec r8",
    "jz 28f",
    "cmp qword ptr [rbx], 0",
    "je 20b",
    "28:", // It leaves.
    "mov [rbx + 56], r9",
    "mov [rbx + 80], r13",
    "mov [rsp], r8",
    "jmp 10b",
    "tablewright_guest_end:",
    ".popsection",
    multiplier = const MULTIPLIER,
    increment = const INCREMENT,
);

/// Bits of a guest's physical address, as far as code at ring 3 can reach them one to one.
pub fn address_bits(kvm: &Kvm) -> u32 {
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).ok();
    let bits = cpuid.and_then(|cpuid| {
        let leaf = cpuid
            .as_slice()
            .iter()
            .find(|leaf| leaf.function == 0x8000_0008)?;
        Some(leaf.eax & 0xff)
    });
    bits.unwrap_or(36).min(46)
}

/// What a VM needs before it has vCPUs.
pub fn prepare(_: &VmFd) -> Result<(), Error> {
    Ok(())
}

/// Has a vCPU begin at `code`, with these tables and this block.
pub fn set_up(
    kvm: &Kvm,
    _: &VmFd,
    vcpu: &VcpuFd,
    root: u64,
    code: u64,
    block: u64,
    exit: u64,
) -> Result<(), Error> {
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::of("KVM_GET_SUPPORTED_CPUID"))?;
    vcpu.set_cpuid2(&cpuid)
        .map_err(Error::of("KVM_SET_CPUID2"))?;
    let mut special = vcpu.get_sregs().map_err(Error::of("KVM_GET_SREGS"))?;
    let segment = |selector, type_, l| kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: 3,
        db: u8::from(l == 0),
        s: 1,
        l,
        g: 1,
        ..kvm_segment::default()
    };
    special.cs = segment(0x33, 0xb, 1);
    let data = segment(0x2b, 0x3, 0);
    (special.ds, special.es, special.ss) = (data, data, data);
    (special.fs, special.gs) = (data, data);
    special.cr3 = root;
    // Paging, write protection, and what a processor has set; physical-address extension; long mode with no-execute.
    special.cr0 = 0x8005_0033;
    special.cr4 = 0x20;
    special.efer = 0xd01;
    vcpu.set_sregs(&special)
        .map_err(Error::of("KVM_SET_SREGS"))?;
    let registers = kvm_regs {
        rip: code,
        rflags: 2,
        rbx: block,
        rsp: exit,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&registers).map_err(Error::of("KVM_SET_REGS"))
}

/// Ticks of the guest's counter in a second.
pub fn frequency(vcpu: &VcpuFd) -> Result<u64, Error> {
    let khz = vcpu.get_tsc_khz().map_err(Error::of("KVM_GET_TSC_KHZ"))?;
    Ok(u64::from(khz) * 1000)
}
