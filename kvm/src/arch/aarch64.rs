//! arm64: the guest runs at EL1 with its MMU on.

use std::arch::{asm, global_asm};

use kvm_bindings::{
    KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_ARM64_SYSREG, KVM_REG_SIZE_U64, kvm_vcpu_init,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use tablewright::Attrs;
use tablewright::arch::arm64::Translation;

use super::{Inner, Place};
use crate::error::Error;
use crate::guest::{INCREMENT, MULTIPLIER};

/// The guest's tables.
pub type Format = tablewright::format::Arm64K4;

/// Attributes of the guest's code.
pub const CODE: Attrs = Attrs::KERNEL_TEXT;

/// Attributes of its data.
pub fn data() -> Attrs {
    Attrs::KERNEL_DATA
}

// x0 has the address of the block and x1 that of where it leaves. The offsets are those of
// `guest::Block`.
global_asm!(
    ".pushsection .rodata.tablewright_guest, \"a\"",
    ".balign 4",
    ".globl tablewright_guest_begin",
    ".hidden tablewright_guest_begin",
    ".globl tablewright_guest_end",
    ".hidden tablewright_guest_end",
    "tablewright_guest_begin:",
    "10:",                   // Orders are taken.
    "ldp x2, x3, [x0, #32]", // first, pages
    "ldp x4, x5, [x0, #48]", // accesses left, what is random
    "ldp x6, x7, [x0, #64]", // below: a write; random order
    "ldp x8, x9, [x0, #80]", // position, value
    "ldr x17, [x0, #112]",   // half
    "ldr x10, [x0, #96]",    // stride
    "movz x20, #{multiplier0}",
    "movk x20, #{multiplier1}, lsl #16",
    "movk x20, #{multiplier2}, lsl #32",
    "movk x20, #{multiplier3}, lsl #48",
    "movz x21, #{increment0}",
    "movk x21, #{increment1}, lsl #16",
    "movk x21, #{increment2}, lsl #32",
    "movk x21, #{increment3}, lsl #48",
    "add x22, x0, #128", // gaps
    "isb",
    "mrs x11, cntvct_el0", // the counter at the last access
    "20:",                 // An access.
    "madd x5, x5, x20, x21",
    "mov x12, x8",
    "cbz x7, 21f",
    "lsr x12, x5, #32",
    "mul x12, x12, x3",
    "lsr x12, x12, #32",
    "21:", // Of blocks the second half.
    "neg x13, x17",
    "and x13, x13, x12",
    "add x12, x12, x13",
    "add x12, x12, x17",
    "madd x12, x12, x10, x2",
    "ubfx x13, x5, #16, #32",
    "cmp x13, x6",
    "b.hs 22f",
    "str x9, [x12]",
    "b 23f",
    "22:",
    "ldr x13, [x12]",
    "23:", // The gap.
    "isb",
    "mrs x13, cntvct_el0",
    "subs x14, x13, x11",
    "csel x14, x14, xzr, hs", // The counters of two CPUs may be apart.
    "mov x11, x13",
    "ldr x15, [x0, #24]",
    "add x15, x15, x14",
    "str x15, [x0, #24]",
    "ldr x15, [x0, #8]",
    "cmp x14, x15",
    "b.ls 25f",
    "str x14, [x0, #8]",
    "25:",
    "cmp x14, #64",
    "b.lo 26f",
    "clz x15, x14",
    "mov x16, #57",
    "sub x15, x16, x15", // binary logarithm, less 6
    "lsr x14, x14, x15",
    "add x14, x14, x15, lsl #6",
    "26:",
    "ldr x15, [x22, x14, lsl #3]",
    "add x15, x15, #1",
    "str x15, [x22, x14, lsl #3]",
    "ldr x15, [x0, #16]",
    "add x15, x15, #1",
    "str x15, [x0, #16]",
    "add x8, x8, #1",
    "cmp x8, x3",
    "csel x8, x8, xzr, lo",
    "subs x4, x4, #1",
    "b.eq 28f",
    "ldr x15, [x0]",
    "cbz x15, 20b",
    "28:", // It leaves.
    "str x5, [x0, #56]",
    "str x8, [x0, #80]",
    "str x4, [x1]",
    "b 10b",
    "tablewright_guest_end:",
    ".popsection",
    multiplier0 = const MULTIPLIER & 0xffff,
    multiplier1 = const MULTIPLIER >> 16 & 0xffff,
    multiplier2 = const MULTIPLIER >> 32 & 0xffff,
    multiplier3 = const MULTIPLIER >> 48 & 0xffff,
    increment0 = const INCREMENT & 0xffff,
    increment1 = const INCREMENT >> 16 & 0xffff,
    increment2 = const INCREMENT >> 32 & 0xffff,
    increment3 = const INCREMENT >> 48 & 0xffff,
);

/// Bits of a guest's physical address. 40 are what a VM has if nothing else is asked for.
pub fn address_bits(_: &Kvm) -> u32 {
    40
}

/// Prepares a VM that has no vCPUs yet.
pub fn prepare(_: &VmFd, _: bool) -> Result<(), Error> {
    Ok(())
}

/// A register of 64 bits of the core, by its place in `struct kvm_regs`, in bytes.
const fn core(place: u64) -> u64 {
    KVM_REG_ARM64 as u64 | KVM_REG_SIZE_U64 as u64 | KVM_REG_ARM_CORE as u64 | place / 4
}

/// A system register, by the numbers with which it is encoded.
const fn system(op0: u64, op1: u64, crn: u64, crm: u64, op2: u64) -> u64 {
    KVM_REG_ARM64 as u64
        | KVM_REG_SIZE_U64 as u64
        | KVM_REG_ARM64_SYSREG as u64
        | op0 << 14
        | op1 << 11
        | crn << 7
        | crm << 3
        | op2
}

/// Guests of guests are not made here.
pub fn has_nested(_: &Kvm) -> bool {
    false
}

/// Has a vCPU begin at `code`, with these tables and this block, at EL1 in any case.
pub fn set_up(
    _: &Kvm,
    vm: &VmFd,
    vcpu: &VcpuFd,
    place: &Place,
    _: bool,
    _: Option<&Inner>,
) -> Result<(), Error> {
    let &Place { root, code, block, exit } = place;
    let mut kind = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut kind).map_err(Error::of("KVM_ARM_PREFERRED_TARGET"))?;
    vcpu.vcpu_init(&kind).map_err(Error::of("KVM_ARM_VCPU_INIT"))?;
    // 48 bits of input from TTBR0 alone, pages of 4 KiB, cacheable and inner shareable walks, 40
    // bits of output.
    let translation = 16 | 1 << 8 | 1 << 10 | 3 << 12 | 1 << 23 | 2 << 32;
    let registers = [
        (system(3, 0, 10, 2, 0), Format::MAIR),
        (system(3, 0, 2, 0, 2), translation),
        (system(3, 0, 2, 0, 0), root),
        // The MMU and the caches on, and the bits that are ones.
        (system(3, 0, 1, 0, 0), 0x30d0_0800 | 1 | 1 << 2 | 1 << 12),
        (core(0), block),
        (core(8), exit),
        (core(32 * 8), code),
        // EL1 with its own stack pointer, all interrupts masked.
        (core(33 * 8), 0x3c5),
    ];
    for (register, value) in registers {
        vcpu.set_one_reg(register, &value.to_le_bytes()).map_err(Error::of("KVM_SET_ONE_REG"))?;
    }
    Ok(())
}

/// Ticks of the guest's counter in a second.
pub fn frequency(_: &VcpuFd) -> Result<u64, Error> {
    let frequency: u64;
    // SAFETY: reading how fast the counter runs changes nothing, and Linux lets programs do it.
    unsafe { asm!("mrs {}, cntfrq_el0", out(reg) frequency, options(nomem, nostack)) };
    Ok(frequency)
}
