//! From the firmware to Rust, on either hart; the image, the user's programs and the machine.

use core::arch::global_asm;

use fdt::Fdt;
use tablewright::arch::riscv64::Features;
use tablewright::{Pa, Span};

use crate::memory::{KERNEL, PAGE, linear};

unsafe extern "C" {
    safe static text_start: u8;
    safe static user_start: u8;
    safe static user_watch: u8;
    safe static rodata_start: u8;
    safe static data_start: u8;
    safe static image_end: u8;
    safe static hart_start: u8;
}

/// Returns the addresses of the image's code, constants and data, and of its end.
pub fn image() -> [u64; 4] {
    [&raw const text_start, &raw const rodata_start, &raw const data_start, &raw const image_end]
        .map(|at| at as u64)
}

/// The frame of the user's programs, and how far into it is the one that watches.
pub fn programs() -> (Pa, u64) {
    let start = &raw const user_start as u64;
    (Pa::new(start - KERNEL), &raw const user_watch as u64 - start)
}

/// The machine that the firmware describes: memory from the image on, features that all harts have,
/// and the numbers of two harts, this one the first; twice this one, if there is no other.
///
/// # Safety
/// 1. `tree` is what the firmware handed over, and its memory has not been used.
pub unsafe fn machine(tree: u64, hart: u64) -> Option<(Span<Pa>, Features, [u64; 2])> {
    // SAFETY: the firmware's (1.).
    let tree = unsafe { Fdt::from_ptr(linear::<u8>(Pa::new(tree))) }.ok()?;
    let start = &raw const text_start as u64 - KERNEL;
    let region = tree.memory().regions().find_map(|region| {
        let first = region.starting_address.addr() as u64;
        let end = first.checked_add(region.size? as u64)? & !(PAGE - 1);
        (first..end).contains(&start).then_some(end)
    });
    let ram = Span::new(Pa::new(start), region? - start).ok()?;
    let isa = |cpu: fdt::standard_nodes::Cpu<'_, '_>| {
        Features::from_isa(cpu.property("riscv,isa").and_then(|it| it.as_str()).unwrap_or(""))
    };
    let features = tree.cpus().map(isa).reduce(Features::and)?;
    let mut harts = tree.cpus().map(|cpu| cpu.ids().first() as u64);
    let other = harts.find(|other| *other != hart).unwrap_or(hart);
    Some((ram, features, [hart, other]))
}

/// Returns the address at which each hart begins.
///
/// OpenSBI before 1.3 lets a hart go before it has stored where the hart is to begin, which is then
/// where the first one did. With one address for both there is nothing to race for.
pub fn start_address() -> u64 {
    &raw const hart_start as u64 - KERNEL
}

global_asm!(
    r#"
    .pushsection .start, "ax"
    .global hart_start
    hart_start:
    mv s0, a0                       // the hart
    mv s1, a1                       // the firmware's description of the machine
    la sp, first_stack
    la s2, first_main
    // The first that comes is the first.
    la t0, arrived
    li t1, 1
    amoswap.w t1, t1, (t0)
    beqz t1, 1f
    la sp, second_stack
    la s2, second_main
    // Sv39, with the first GiB of memory where it is and at KERNEL, for the time being.
    1: la t0, root
    srli t0, t0, 12
    li t1, 8 << 60
    or t0, t0, t1
    sfence.vma
    csrw satp, t0
    sfence.vma
    li t1, 0xffffffff00000000
    add sp, sp, t1
    add s2, s2, t1
    mv a0, s1
    mv a1, s0
    jr s2
    .popsection

    .pushsection .boot_tables, "aw"
    .balign 4096
    root:
    .fill 2, 8, 0
    .quad 0x80000000 >> 2 | 0xcf
    .fill 507, 8, 0
    .quad 0x80000000 >> 2 | 0xcf
    .fill 1, 8, 0
    arrived:
    .quad 0
    .popsection

    .pushsection .bss.stack, "aw", @nobits
    .balign 16
    .skip 0x8000
    first_stack:
    .skip 0x8000
    second_stack:
    .popsection

    // Two programs of the user. `user_touch` writes a2 to a1 pages from a0 on. `user_watch` reads
    // the word at a0 for ever, and counts at a1.
    .pushsection .user, "ax"
    .global user_watch
    user_touch:
    li t0, 4096
    1: sd a2, 0(a0)
    add a0, a0, t0
    addi a1, a1, -1
    bnez a1, 1b
    ecall
    user_watch:
    ld t0, 0(a0)
    ld t1, 0(a1)
    addi t1, t1, 1
    sd t1, 0(a1)
    j user_watch
    .popsection
    "#
);
