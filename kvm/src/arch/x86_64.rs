//! x86-64: the guest runs at ring 3, where software paging runs it natively too, or at ring 0, as
//! that of Linux's selftests.

use std::arch::global_asm;

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_RUNNABLE, Msrs, kvm_mp_state, kvm_msr_entry, kvm_regs,
    kvm_segment,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use tablewright::Attrs;

use super::{Inner, Place};
use crate::error::Error;
use crate::guest::{INCREMENT, MULTIPLIER};

/// The guest's tables.
pub type Format = tablewright::format::X86_64<4>;

/// Attributes of the guest's code.
pub const CODE: Attrs = Attrs::USER_TEXT;

/// Attributes of its data.
pub fn data() -> Attrs {
    Attrs::USER_DATA
}

// rbx has the address of the block and rsp that of where it leaves. The offsets are those of
// `guest::Block`.
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
    ".globl tablewright_guest_outer",
    ".hidden tablewright_guest_outer",
    "tablewright_guest_outer:",
    // The loop runs in there, and leaves for the host: what is intercepted of it is nothing.
    "vmrun rax",
    "ud2",
    "tablewright_guest_end:",
    ".popsection",
    multiplier = const MULTIPLIER,
    increment = const INCREMENT,
);

/// Bits of a guest's physical address, as far as code at ring 3 can reach them one to one.
pub fn address_bits(kvm: &Kvm) -> u32 {
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).ok();
    let bits = cpuid.and_then(|cpuid| {
        let leaf = cpuid.as_slice().iter().find(|leaf| leaf.function == 0x8000_0008)?;
        Some(leaf.eax & 0xff)
    });
    bits.unwrap_or(36).min(46)
}

/// Whether a guest may run guests of its own, as this file makes them: by AMD's instructions, with
/// nested paging.
pub fn has_nested(kvm: &Kvm) -> bool {
    let Ok(cpuid) = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES) else {
        return false;
    };
    let leaf = |function| {
        let mut leaves = cpuid.as_slice().iter();
        leaves.find(|leaf| leaf.function == function)
    };
    // CPUID Fn8000_0001_ECX[SVM], and Fn8000_000A_EDX[NP]: AMD's manual, volume 2, 15.4 and
    // 15.25.2.
    leaf(0x8000_0001).is_some_and(|leaf| leaf.ecx & 1 << 2 != 0)
        && leaf(0x8000_000a).is_some_and(|leaf| leaf.edx & 1 != 0)
}

/// Fills the control block of a guest of the guest: the loop at ring 3, in tables of two stages,
/// with no intercept but the one that has to be. Places are those of AMD's manual, volume 2,
/// appendix B.
///
/// # Safety
/// 1. The page is mapped, and no one else's.
unsafe fn control(inner: &Inner, root: u64, code: u64, exit: u64) {
    // SAFETY: 1. what is written lies within the page; places are multiples of the sizes.
    let long = |at: usize, value: u64| unsafe { inner.block.byte_add(at).cast().write(value) };
    // SAFETY: the same.
    let short = |at: usize, value: u16| unsafe { inner.block.byte_add(at).cast().write(value) };
    short(0x010, 1); // VMRUN itself
    long(0x058, 1); // its address space
    long(0x090, 1); // nested paging
    long(0x0b0, inner.root);
    // Selector, attributes, limit, base. Ring 3: 64-bit code, and data that may be written.
    for (at, selector, attributes) in
        [(0x400, 0x2b, 0xcf3), (0x410, 0x33, 0xafb), (0x420, 0x2b, 0xcf3), (0x430, 0x2b, 0xcf3)]
    {
        short(at, selector);
        short(at + 2, attributes);
        long(at + 8, 0);
        // SAFETY: the same.
        unsafe { inner.block.byte_add(at + 4).cast().write(u32::MAX) };
    }
    // SAFETY: the same.
    unsafe { inner.block.byte_add(0x4cb).cast().write(3_u8) };
    long(0x4d0, EFER | SVME);
    long(0x548, CR4);
    long(0x550, root);
    long(0x558, CR0);
    long(0x560, 0x400);
    long(0x568, 0xffff_0ff0);
    long(0x570, 2);
    long(0x578, code);
    long(0x5d8, exit);
    // Types of memory as a processor has them after reset.
    long(0x668, 0x0007_0406_0007_0406);
}

/// Paging, write protection, and what a processor has set.
const CR0: u64 = 0x8005_0033;
/// Physical-address extension.
const CR4: u64 = 0x20;
/// Long mode with no-execute.
const EFER: u64 = 0xd01;
/// And VMRUN.
const SVME: u64 = 1 << 12;
/// The address for a processor's own state while a guest runs.
const VM_HSAVE_PA: u32 = 0xc001_0117;

/// Prepares a VM that has no vCPUs yet. One as of the selftests has interrupt controllers, which
/// KVM looks at whenever a vCPU leaves: some 200 instructions for each fault.
pub fn prepare(vm: &VmFd, as_selftests: bool) -> Result<(), Error> {
    match as_selftests {
        true => vm.create_irq_chip().map_err(Error::of("KVM_CREATE_IRQCHIP")),
        false => Ok(()),
    }
}

/// Has a vCPU begin at `code`, with these tables and this block, at ring 3 or 0; or in a guest of
/// its own.
pub fn set_up(
    kvm: &Kvm,
    _: &VmFd,
    vcpu: &VcpuFd,
    place: &Place,
    as_selftests: bool,
    inner: Option<&Inner>,
) -> Result<(), Error> {
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::of("KVM_GET_SUPPORTED_CPUID"))?;
    vcpu.set_cpuid2(&cpuid).map_err(Error::of("KVM_SET_CPUID2"))?;
    if as_selftests {
        // With interrupt controllers all but the first would wait to be started.
        let runs = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
        vcpu.set_mp_state(runs).map_err(Error::of("KVM_SET_MP_STATE"))?;
    }
    let mut special = vcpu.get_sregs().map_err(Error::of("KVM_GET_SREGS"))?;
    // VMRUN is ring 0's.
    let ring = if as_selftests || inner.is_some() { 0 } else { 3 };
    let segment = |selector, type_, l| kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: selector | u16::from(ring),
        type_,
        present: 1,
        dpl: ring,
        db: u8::from(l == 0),
        s: 1,
        l,
        g: 1,
        ..kvm_segment::default()
    };
    special.cs = segment(0x30, 0xb, 1);
    let data = segment(0x28, 0x3, 0);
    (special.ds, special.es, special.ss) = (data, data, data);
    (special.fs, special.gs) = (data, data);
    special.cr3 = place.root;
    (special.cr0, special.cr4, special.efer) = (CR0, CR4, EFER);
    let mut registers = kvm_regs {
        rip: place.code,
        rflags: 2,
        rbx: place.block,
        rsp: place.exit,
        ..kvm_regs::default()
    };
    if let Some(inner) = inner {
        // SAFETY: `control`: 1. promised with `inner`.
        unsafe { control(inner, place.root, place.code, place.exit) };
        special.efer |= SVME;
        registers.rax = inner.at;
        registers.rip = place.code + outer();
        let saved =
            kvm_msr_entry { index: VM_HSAVE_PA, data: inner.at + 4096, ..kvm_msr_entry::default() };
        let saved = Msrs::from_entries(&[saved]).map_err(|_| Error::Call {
            call: "KVM_SET_MSRS",
            error: std::io::ErrorKind::InvalidInput.into(),
        })?;
        vcpu.set_sregs(&special).map_err(Error::of("KVM_SET_SREGS"))?;
        let set = vcpu.set_msrs(&saved).map_err(Error::of("KVM_SET_MSRS"))?;
        if set != 1 {
            return Err(Error::Lacks { what: "register of AMD's for guests of guests" });
        }
    } else {
        vcpu.set_sregs(&special).map_err(Error::of("KVM_SET_SREGS"))?;
    }
    vcpu.set_regs(&registers).map_err(Error::of("KVM_SET_REGS"))
}

/// Returns the offset of ring 0's code.
fn outer() -> u64 {
    unsafe extern "C" {
        static tablewright_guest_outer: u8;
    }
    let from = super::code().as_ptr().addr();
    ((&raw const tablewright_guest_outer).addr() - from) as u64
}

/// Ticks of the guest's counter in a second.
pub fn frequency(vcpu: &VcpuFd) -> Result<u64, Error> {
    let khz = vcpu.get_tsc_khz().map_err(Error::of("KVM_GET_TSC_KHZ"))?;
    Ok(u64::from(khz) * 1000)
}
