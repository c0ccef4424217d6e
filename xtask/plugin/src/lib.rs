//! A plugin for QEMU: counts barriers and TLB invalidations of arm64 as the emulator executes them.
//!
//! The program that is watched says where it is by *marks*, `movz xzr, #N`: an instruction that
//! does nothing, and that no compiler writes. With each mark, what was executed since the mark
//! before it is said on QEMU's log (`-d plugin`), in one line: `counted N`, where `N` is the number
//! of the mark *before*, and behind it each kind of instruction and how often.
//!
//! With the argument `order=on` it says one by one, in order, what was executed: `ordered N`, and
//! behind it each instruction.
//!
//! With the argument `instructions=on` it counts as well how many instructions the kernel has
//! executed, at addresses of the upper half but for marks, on the CPU that makes the mark: `counted
//! N, M instructions`, and then the others. From a mark `0x8000` to a mark `0x8001` of the same CPU
//! they are not counted, and nothing is said.
//!
//! With the argument `riscv=on` it counts the fences of RISC-V instead, and a mark is `slti x0, x0,
//! N` (privileged specification, 10.2.1).
//!
//! When a block of code is translated, each instruction in it is decoded by its bits (DDI 0487
//! C4.1), and those of interest call back when they are executed. What is never called back costs
//! nothing.
//!
//! The interface is QEMU's, in version 1 of it; the few functions that are used are declared here.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// An instruction, or a block of them, while it is translated.
#[repr(C)]
struct Opaque([u8; 0]);

type Translated = extern "C" fn(id: u64, block: *mut Opaque);
type Callback = extern "C" fn(cpu: c_uint, data: *mut c_void);

/// `QEMU_PLUGIN_CB_NO_REGS`: a callback that looks at no register.
const NO_REGISTERS: c_int = 0;

// SAFETY: as `qemu-plugin.h` declares them.
unsafe extern "C" {
    fn qemu_plugin_register_vcpu_tb_trans_cb(id: u64, callback: Translated);
    fn qemu_plugin_tb_n_insns(block: *const Opaque) -> usize;
    fn qemu_plugin_tb_get_insn(block: *const Opaque, index: usize) -> *mut Opaque;
    fn qemu_plugin_insn_data(instruction: *const Opaque) -> *const c_void;
    fn qemu_plugin_insn_vaddr(instruction: *const Opaque) -> u64;
    fn qemu_plugin_insn_size(instruction: *const Opaque) -> usize;
    fn qemu_plugin_register_vcpu_insn_exec_cb(
        instruction: *mut Opaque,
        callback: Callback,
        flags: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_outs(text: *const c_char);
}

/// The version of the interface that is used. QEMU looks for it by this name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static qemu_plugin_version: c_int = 1;

/// QEMU calls this when it has loaded the plugin. 0: it may stay; an argument that it does not know
/// makes it go.
///
/// # Safety
/// 1. `arguments` points to `count` pointers to strings that end with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: u64,
    _: *const c_void,
    count: c_int,
    arguments: *const *const c_char,
) -> c_int {
    for index in 0..count.max(0) as usize {
        // SAFETY: by (1.).
        let argument = unsafe { CStr::from_ptr(*arguments.add(index)) };
        match argument.to_bytes() {
            b"instructions=on" => INSTRUCTIONS.store(true, Ordering::Relaxed),
            b"order=on" => ORDER.store(true, Ordering::Relaxed),
            b"riscv=on" => RISCV.store(true, Ordering::Relaxed),
            _ => return 1,
        }
    }
    // SAFETY: the plugin's own number, and a function that lives as long as it does.
    unsafe { qemu_plugin_register_vcpu_tb_trans_cb(id, translated) };
    0
}

/// The most CPUs whose instructions are counted.
const CPUS: usize = 16;
/// A mark that says that instructions are not counted from here on, and that they are again.
const PAUSE: u32 = 0x8000;
const GO_ON: u32 = 0x8001;

/// Instructions are counted, too.
static INSTRUCTIONS: AtomicBool = AtomicBool::new(false);

/// The instructions are those of RISC-V.
static RISCV: AtomicBool = AtomicBool::new(false);

/// The order is said, too.
static ORDER: AtomicBool = AtomicBool::new(false);

/// Those of one CPU since the last mark, and whether they are not counted. Used by that CPU's
/// thread alone.
struct Executed {
    count: AtomicU64,
    paused: AtomicBool,
}

static EXECUTED: [Executed; CPUS] =
    [const { Executed { count: AtomicU64::new(0), paused: AtomicBool::new(false) } }; CPUS];

/// Since the last mark.
static COUNTED: Mutex<Counted> =
    Mutex::new(Counted { mark: 0, counts: BTreeMap::new(), order: Vec::new() });

struct Counted {
    mark: u32,
    /// By [what is alike](alike) of the instruction.
    counts: BTreeMap<u32, u64>,
    /// One after the other, if that is asked for.
    order: Vec<u32>,
}

/// `movz xzr, #N`, or `slti x0, x0, N`.
fn mark(instruction: u32) -> Option<u32> {
    if RISCV.load(Ordering::Relaxed) {
        return (instruction & 0x000f_ffff == 0x2013).then_some(instruction >> 20);
    }
    (instruction & 0xffe0_001f == 0xd280_001f).then_some(instruction >> 5 & 0xffff)
}

/// SFENCE.VMA, with any registers.
const SFENCE: u32 = 0x1200_0073;
const BARRIERS: u32 = 0xd503_3000;
const TLBI: u32 = 0xd508_8000;

/// An instruction that is counted, without what may differ from one to the next: the register of an
/// invalidation.
fn alike(instruction: u32) -> Option<u32> {
    if RISCV.load(Ordering::Relaxed) {
        return (instruction & 0xfe00_7fff == SFENCE).then_some(SFENCE);
    }
    let is_barrier = instruction & 0xffff_f01f == BARRIERS | 0x1f
        && matches!(instruction >> 5 & 7, 0b100..=0b110);
    // SYS with CRn 8, or 9 without waiting for accesses that are under way; any exception level.
    let is_tlbi = instruction & 0xfff8_e000 == TLBI;
    match (is_barrier, is_tlbi) {
        (true, _) => Some(instruction),
        (_, true) => Some(instruction & !0x1f),
        _ => None,
    }
}

/// Its name in assembly.
fn name(alike: u32) -> String {
    if alike == SFENCE {
        return "sfence.vma".into();
    }
    let (op1, crn, crm, op2) = (alike >> 16 & 7, alike >> 12 & 15, alike >> 8 & 15, alike >> 5 & 7);
    if alike & 0xffff_f000 == BARRIERS {
        const SCOPES: [&str; 16] = [
            "#0", "oshld", "oshst", "osh", "#4", "nshld", "nshst", "nsh", "#8", "ishld", "ishst",
            "ish", "#12", "ld", "st", "sy",
        ];
        let scope = SCOPES[crm as usize];
        return match op2 {
            0b100 => format!("dsb {scope}"),
            0b101 => format!("dmb {scope}"),
            _ => "isb".into(),
        };
    }
    // DDI 0487 C5.5. Those of stage 2 by address have an order of their own.
    let stage2 = match (op1, crm, op2) {
        (4, 0, 1) => Some("ipas2e1is"),
        (4, 0, 2) => Some("ripas2e1is"),
        (4, 0, 5) => Some("ipas2le1is"),
        (4, 0, 6) => Some("ripas2le1is"),
        (4, 4, 1) => Some("ipas2e1"),
        (4, 4, 2) => Some("ripas2e1"),
        (4, 4, 5) => Some("ipas2le1"),
        (4, 4, 6) => Some("ripas2le1"),
        _ => None,
    };
    let limit = if crn == 9 { "nxs" } else { "" };
    if let Some(what) = stage2 {
        return format!("tlbi {what}{limit}");
    }
    let what = match (op1, op2) {
        (0, 0) => "vmalle1",
        (0, 1) => "vae1",
        (0, 2) => "aside1",
        (0, 3) => "vaae1",
        (0, 5) => "vale1",
        (0, 7) => "vaale1",
        (4, 0) => "alle2",
        (4, 1) => "vae2",
        (4, 4) => "alle1",
        (4, 5) => "vale2",
        (4, 6) => "vmalls12e1",
        _ => return format!("tlbi #{op1} c{crn} c{crm} #{op2}"),
    };
    // Ranges, and how far it goes.
    let (range, domain) = match crm {
        1 => ("", "os"),
        2 => ("r", "is"),
        3 => ("", "is"),
        5 => ("r", "os"),
        6 => ("r", ""),
        _ => ("", ""),
    };
    format!("tlbi {range}{what}{domain}{limit}")
}

extern "C" fn translated(_: u64, block: *mut Opaque) {
    // SAFETY: a block while it is translated, and the instructions in it; an instruction's bytes
    // are as many as it says. What is passed is a number and no pointer.
    unsafe {
        let counts = INSTRUCTIONS.load(Ordering::Relaxed);
        for index in 0..qemu_plugin_tb_n_insns(block) {
            let at = qemu_plugin_tb_get_insn(block, index);
            if qemu_plugin_insn_size(at) != 4 {
                continue;
            }
            let bytes: [u8; 4] = qemu_plugin_insn_data(at).cast::<[u8; 4]>().read_unaligned();
            let instruction = u32::from_le_bytes(bytes);
            if counts && mark(instruction).is_none() && qemu_plugin_insn_vaddr(at) >> 63 != 0 {
                let none = std::ptr::null_mut();
                qemu_plugin_register_vcpu_insn_exec_cb(at, stepped, NO_REGISTERS, none);
            }
            if mark(instruction).is_some() || alike(instruction).is_some() {
                let data = std::ptr::without_provenance_mut(instruction as usize);
                qemu_plugin_register_vcpu_insn_exec_cb(at, executed, NO_REGISTERS, data);
            }
        }
    }
}

/// An instruction of the kernel.
extern "C" fn stepped(cpu: c_uint, _: *mut c_void) {
    if let Some(executed) = EXECUTED.get(cpu as usize)
        && !executed.paused.load(Ordering::Relaxed)
    {
        let count = executed.count.load(Ordering::Relaxed);
        executed.count.store(count + 1, Ordering::Relaxed);
    }
}

extern "C" fn executed(cpu: c_uint, data: *mut c_void) {
    let instruction = data.addr() as u32;
    let of_cpu = EXECUTED.get(cpu as usize);
    if let (Some(number @ (PAUSE | GO_ON)), Some(executed)) = (mark(instruction), of_cpu) {
        return executed.paused.store(number == PAUSE, Ordering::Relaxed);
    }
    let Ok(mut counted) = COUNTED.lock() else {
        return;
    };
    if let Some(alike) = alike(instruction) {
        *counted.counts.entry(alike).or_default() += 1;
        if ORDER.load(Ordering::Relaxed) {
            counted.order.push(alike);
        }
    } else if let Some(mark) = mark(instruction) {
        let mut line = format!("counted {}", counted.mark);
        if INSTRUCTIONS.load(Ordering::Relaxed)
            && let Some(executed) = of_cpu
        {
            let count = executed.count.swap(0, Ordering::Relaxed);
            let _ = write!(line, ", {count} instructions");
        }
        for (alike, count) in std::mem::take(&mut counted.counts) {
            let _ = write!(line, ", {count} {}", name(alike));
        }
        line.push('\n');
        if ORDER.load(Ordering::Relaxed) {
            let _ = write!(line, "ordered {}", counted.mark);
            for alike in std::mem::take(&mut counted.order) {
                let _ = write!(line, ", {}", name(alike));
            }
            line.push('\n');
        }
        counted.mark = mark;
        if let Ok(line) = CString::new(line) {
            // SAFETY: a string that ends with a zero, copied before this returns.
            unsafe { qemu_plugin_outs(line.as_ptr()) };
        }
    }
}
