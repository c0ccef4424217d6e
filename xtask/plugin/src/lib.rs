//! A plugin for QEMU: counts barriers and TLB invalidations of arm64 as the emulator executes them.
//!
//! The program that is watched says where it is by *marks*, `movz xzr, #N`: an instruction that does nothing, and that no
//! compiler writes. With each mark, what was executed since the mark before it is said on QEMU's log (`-d plugin`), in one
//! line: `counted N`, where `N` is the number of the mark *before*, and behind it each kind of instruction and how often.
//!
//! When a block of code is translated, each instruction in it is decoded by its bits (DDI 0487 C4.1), and those of interest
//! call back when they are executed. What is never called back costs nothing.
//!
//! The interface is QEMU's, in version 1 of it; the few functions that are used are declared here.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::sync::Mutex;

/// An instruction, or a block of them, while it is translated.
#[repr(C)]
struct Opaque([u8; 0]);

type Translated = extern "C" fn(id: u64, block: *mut Opaque);
type Executed = extern "C" fn(cpu: c_uint, data: *mut c_void);

/// `QEMU_PLUGIN_CB_NO_REGS`: a callback that looks at no register.
const NO_REGISTERS: c_int = 0;

// SAFETY: as `qemu-plugin.h` declares them.
unsafe extern "C" {
    fn qemu_plugin_register_vcpu_tb_trans_cb(id: u64, callback: Translated);
    fn qemu_plugin_tb_n_insns(block: *const Opaque) -> usize;
    fn qemu_plugin_tb_get_insn(block: *const Opaque, index: usize) -> *mut Opaque;
    fn qemu_plugin_insn_data(instruction: *const Opaque) -> *const c_void;
    fn qemu_plugin_insn_size(instruction: *const Opaque) -> usize;
    fn qemu_plugin_register_vcpu_insn_exec_cb(
        instruction: *mut Opaque,
        callback: Executed,
        flags: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_outs(text: *const c_char);
}

/// The version of the interface that is used. QEMU looks for it by this name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static qemu_plugin_version: c_int = 1;

/// QEMU calls this when it has loaded the plugin. 0: it may stay.
#[unsafe(no_mangle)]
pub extern "C" fn qemu_plugin_install(
    id: u64,
    _: *const c_void,
    _: c_int,
    _: *const *const c_char,
) -> c_int {
    // SAFETY: the plugin's own number, and a function that lives as long as it does.
    unsafe { qemu_plugin_register_vcpu_tb_trans_cb(id, translated) };
    0
}

/// Since the last mark.
static COUNTED: Mutex<Counted> = Mutex::new(Counted {
    mark: 0,
    counts: BTreeMap::new(),
});

struct Counted {
    mark: u32,
    /// By [what is alike](alike) of the instruction.
    counts: BTreeMap<u32, u64>,
}

/// `movz xzr, #N`.
fn mark(instruction: u32) -> Option<u32> {
    (instruction & 0xffe0_001f == 0xd280_001f).then_some(instruction >> 5 & 0xffff)
}

const BARRIERS: u32 = 0xd503_3000;
const TLBI: u32 = 0xd508_8000;

/// An instruction that is counted, without what may differ from one to the next: the register of an invalidation.
fn alike(instruction: u32) -> Option<u32> {
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
    let (op1, crn, crm, op2) = (
        alike >> 16 & 7,
        alike >> 12 & 15,
        alike >> 8 & 15,
        alike >> 5 & 7,
    );
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
    // SAFETY: a block while it is translated, and the instructions in it; an instruction's bytes are as many as it says.
    // What is passed is a number and no pointer.
    unsafe {
        for index in 0..qemu_plugin_tb_n_insns(block) {
            let at = qemu_plugin_tb_get_insn(block, index);
            if qemu_plugin_insn_size(at) != 4 {
                continue;
            }
            let bytes: [u8; 4] = qemu_plugin_insn_data(at).cast::<[u8; 4]>().read_unaligned();
            let instruction = u32::from_le_bytes(bytes);
            if mark(instruction).is_some() || alike(instruction).is_some() {
                let data = std::ptr::without_provenance_mut(instruction as usize);
                qemu_plugin_register_vcpu_insn_exec_cb(at, executed, NO_REGISTERS, data);
            }
        }
    }
}

extern "C" fn executed(_: c_uint, data: *mut c_void) {
    let instruction = data.addr() as u32;
    let Ok(mut counted) = COUNTED.lock() else {
        return;
    };
    if let Some(alike) = alike(instruction) {
        *counted.counts.entry(alike).or_default() += 1;
    } else if let Some(mark) = mark(instruction) {
        let mut line = format!("counted {}", counted.mark);
        for (alike, count) in std::mem::take(&mut counted.counts) {
            let _ = write!(line, ", {count} {}", name(alike));
        }
        line.push('\n');
        counted.mark = mark;
        if let Ok(line) = CString::new(line) {
            // SAFETY: a string that ends with a zero, copied before this returns.
            unsafe { qemu_plugin_outs(line.as_ptr()) };
        }
    }
}
