//! The part of `tablewright watch` that QEMU loads: it sees what the processors execute, and tells
//! a [`Watcher`].
//!
//! When a block of code is translated, each instruction in it is looked at. Those that matter call
//! back when they are executed, and every instruction when it stores. What was found is written to
//! the file of the argument `out`, a line of JSON each, as soon as it is found; the last line says
//! what was seen.
//!
//! Machines of arm64, x86-64 and RISC-V are watched.
//!
//! The interface is QEMU's, in version 7 of it: QEMU 11.1. The few functions that are used are
//! declared here.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::json;
use tablewright_watch::arm64::{self, Instruction};
use tablewright_watch::{At, Control, Memory as _, Watcher, riscv64, x86_64};

/// An instruction, or a block of them, while it is translated; a register; where an access goes.
#[repr(C)]
struct Opaque([u8; 0]);

/// GLib's arrays.
#[repr(C)]
struct Array {
    data: *mut u8,
    length: c_uint,
}

/// `qemu_plugin_reg_descriptor`
#[repr(C)]
struct Descriptor {
    handle: *mut Opaque,
    name: *const c_char,
    feature: *const c_char,
    is_read_only: bool,
}

/// `qemu_plugin_mem_value`
#[repr(C)]
struct Value {
    kind: c_int,
    /// The lower half, and the upper one of 16 bytes.
    data: [u64; 2],
}

/// `QEMU_PLUGIN_MEM_VALUE_U64`
const WORD: c_int = 3;
/// `QEMU_PLUGIN_CB_NO_REGS`, `QEMU_PLUGIN_CB_R_REGS`: what a callback looks at.
const NO_REGISTERS: c_int = 0;
const REGISTERS: c_int = 1;
/// `QEMU_PLUGIN_MEM_W`
const STORES: c_int = 2;

type Callback = extern "C" fn(cpu: c_uint, data: *mut c_void);
type Accessed = extern "C" fn(cpu: c_uint, info: u32, address: u64, data: *mut c_void);

// SAFETY: as `qemu-plugin.h` and GLib declare them.
unsafe extern "C" {
    fn qemu_plugin_register_vcpu_init_cb(id: u64, callback: Callback, data: *mut c_void);
    fn qemu_plugin_register_atexit_cb(
        id: u64,
        callback: extern "C" fn(data: *mut c_void),
        data: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_tb_trans_cb(
        id: u64,
        callback: extern "C" fn(block: *mut Opaque, data: *mut c_void),
        data: *mut c_void,
    );
    fn qemu_plugin_tb_n_insns(block: *const Opaque) -> usize;
    fn qemu_plugin_tb_get_insn(block: *const Opaque, index: usize) -> *mut Opaque;
    fn qemu_plugin_insn_data(instruction: *const Opaque, to: *mut c_void, length: usize) -> usize;
    fn qemu_plugin_insn_vaddr(instruction: *const Opaque) -> u64;
    fn qemu_plugin_register_vcpu_insn_exec_cb(
        instruction: *mut Opaque,
        callback: Callback,
        flags: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_mem_cb(
        instruction: *mut Opaque,
        callback: Accessed,
        flags: c_int,
        which: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_mem_size_shift(info: u32) -> c_uint;
    fn qemu_plugin_mem_get_value(info: u32) -> Value;
    fn qemu_plugin_get_hwaddr(info: u32, address: u64) -> *mut Opaque;
    fn qemu_plugin_hwaddr_is_io(address: *const Opaque) -> bool;
    fn qemu_plugin_hwaddr_phys_addr(address: *const Opaque) -> u64;
    fn qemu_plugin_get_registers() -> *mut Array;
    fn qemu_plugin_read_register(register: *mut Opaque, to: *mut Array) -> bool;
    fn qemu_plugin_read_memory_hwaddr(address: u64, to: *mut Array, length: usize) -> c_int;
    fn qemu_plugin_translate_vaddr(address: u64, to: *mut u64) -> bool;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn g_byte_array_new() -> *mut Array;
    fn g_byte_array_set_size(array: *mut Array, length: c_uint) -> *mut Array;
    fn g_array_free(array: *mut Array, contents: c_int) -> *mut c_char;
}

/// The version of the interface that is used. QEMU looks for it by this name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static qemu_plugin_version: c_int = 7;

/// `qemu_info_t`, as far as it is looked at.
#[repr(C)]
struct Info {
    target: *const c_char,
    versions: [c_int; 2],
    is_system: bool,
    cpus: [c_int; 2],
}

/// All that is known. QEMU runs one processor at a time; the lock is free whenever it is taken.
static STATE: Mutex<Option<State>> = Mutex::new(None);

#[derive(Clone, Copy)]
enum Target {
    Arm64,
    X86,
    Riscv,
}

struct State {
    target: Target,
    watcher: Watcher,
    machine: Machine,
    out: File,
    started: Instant,
    said: usize,
    /// The general registers of each processor.
    registers: Vec<Vec<Register>>,
    /// QEMU's own names of the processors, by number.
    names: Vec<usize>,
    /// The bytes that DC ZVA zeroes.
    block: u64,
}

thread_local! {
    /// QEMU's variable that says which processor this thread runs now.
    static CURRENT: *const usize = {
        // SAFETY: the name ends with a zero; null as a library is every one that is loaded.
        unsafe { dlsym(std::ptr::null_mut(), c"current_cpu".as_ptr()) }.cast()
    };
}

/// QEMU's name of the processor that runs. The number in a callback is no use: where one thread
/// runs all processors it is that of the processor for which the block was translated, and blocks
/// are shared.
fn current() -> usize {
    CURRENT.with(|&current| {
        // SAFETY: a variable of this thread's, which lives as long as the thread.
        if current.is_null() { 0 } else { unsafe { current.read() } }
    })
}

struct Register(*mut Opaque);

// SAFETY: QEMU's handles of registers are of no thread.
unsafe impl Send for Register {}

/// The memory of the machine.
struct Machine {
    /// An array of GLib's that lives as long as the plugin, for what QEMU reads.
    bytes: *mut Array,
}

// SAFETY: used under the lock alone.
unsafe impl Send for Machine {}

impl tablewright_watch::Memory for Machine {
    fn read(&mut self, pa: u64, words: &mut [u64]) -> bool {
        // SAFETY: an array of GLib's that lives as long as the plugin; QEMU has made it as long as
        // what was asked for when it says that it has read that.
        unsafe {
            let bytes = self.bytes;
            if qemu_plugin_read_memory_hwaddr(pa, bytes, words.len() * 8) != 0 {
                return false;
            }
            let data = (*bytes).data.cast::<[u8; 8]>();
            for (index, word) in words.iter_mut().enumerate() {
                *word = u64::from_le_bytes(data.add(index).read_unaligned());
            }
        }
        true
    }
}

impl Machine {
    /// A register of the processor whose callback this is.
    fn register(&mut self, register: &Register) -> u64 {
        // SAFETY: a handle of QEMU's, in a callback that may look at registers; an array of GLib's
        // that lives as long as the plugin.
        unsafe {
            let bytes = self.bytes;
            g_byte_array_set_size(bytes, 0);
            if register.0.is_null() || !qemu_plugin_read_register(register.0, bytes) {
                return 0;
            }
            // Some are shorter than 8 bytes.
            let length = ((*bytes).length as usize).min(8);
            let read = std::slice::from_raw_parts((*bytes).data, length);
            read.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
        }
    }

    /// Two words at an address of the processor whose callback this is; zero, if they cannot be
    /// read.
    fn words(&mut self, address: u64) -> [u64; 2] {
        let (mut pa, mut words) = (0, [0; 2]);
        // SAFETY: in the callback of a processor.
        if unsafe { qemu_plugin_translate_vaddr(address, &raw mut pa) } {
            self.read(pa, &mut words);
        }
        words
    }
}

fn state() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// QEMU calls this when it has loaded the plugin. 0: it may stay; another value makes it go.
///
/// # Safety
/// 1. `arguments` points to `count` pointers to strings that end with a zero.
/// 2. `info` points to QEMU's description of itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: u64,
    info: *const c_void,
    count: c_int,
    arguments: *const *const c_char,
) -> c_int {
    let mut out = None;
    for index in 0..count.max(0) as usize {
        // SAFETY: by (1.).
        let argument = unsafe { CStr::from_ptr(*arguments.add(index)) }.to_string_lossy();
        match argument.split_once('=') {
            Some(("out", file)) => out = File::create(file).ok(),
            _ => return 1,
        }
    }
    let Some(out) = out else { return 1 };
    // SAFETY: by (2.).
    let info = unsafe { &*info.cast::<Info>() };
    let cpus = info.cpus[1].max(1) as usize;
    // SAFETY: by (2.), a string that ends with a zero.
    let target = match unsafe { CStr::from_ptr(info.target) }.to_bytes() {
        b"aarch64" => Target::Arm64,
        b"x86_64" => Target::X86,
        b"riscv64" => Target::Riscv,
        _ => return 1,
    };
    // SAFETY: GLib's function has no obligations.
    let bytes = unsafe { g_byte_array_new() };
    *state() = Some(State {
        target,
        watcher: Watcher::new(cpus),
        machine: Machine { bytes },
        out,
        started: Instant::now(),
        said: 0,
        registers: (0..cpus).map(|_| Vec::new()).collect(),
        names: vec![0; cpus],
        block: 64,
    });
    let none = std::ptr::null_mut();
    // SAFETY: the plugin's own number, and functions that live as long as it does.
    unsafe {
        qemu_plugin_register_vcpu_init_cb(id, began, none);
        qemu_plugin_register_vcpu_tb_trans_cb(id, translated, none);
        qemu_plugin_register_atexit_cb(id, ended, none);
    }
    0
}

/// The registers of x86-64 that are read, the general ones by their numbers.
const X86: [&str; 22] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15", "fs_base", "gs_base", "cr0", "cr3", "cr4", "efer",
];
const RSP: u8 = 4;
const CR0: u8 = 18;

/// Those of RISC-V, the general ones by their numbers.
const RISCV: [&str; 35] = [
    "zero", "ra", "sp", "gp", "tp", "t0", "t1", "t2", "fp", "s1", "a0", "a1", "a2", "a3", "a4",
    "a5", "a6", "a7", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11", "t3", "t4",
    "t5", "t6", "satp", "sstatus", "mstatus",
];
const SATP: u8 = 32;
const SSTATUS: u8 = 33;
const MSTATUS: u8 = 34;

/// A processor is there: which registers it has.
extern "C" fn began(cpu: c_uint, _: *mut c_void) {
    let mut state = state();
    let Some(state) = state.as_mut() else { return };
    let Some(registers) = state.registers.get_mut(cpu as usize) else { return };
    state.names[cpu as usize] = current();
    // SAFETY: an array of descriptors, which the caller frees; their names live longer.
    unsafe {
        let array = qemu_plugin_get_registers();
        let all = (*array).data.cast::<Descriptor>();
        let count = (*array).length as usize;
        let find = |name: &[u8]| {
            let found = (0..count)
                .map(|index| &*all.add(index))
                .find(|register| CStr::from_ptr(register.name).to_bytes() == name);
            Register(found.map_or(std::ptr::null_mut(), |found| found.handle))
        };
        match state.target {
            Target::X86 => registers.extend(X86.map(|name| find(name.as_bytes()))),
            Target::Riscv => registers.extend(RISCV.map(|name| find(name.as_bytes()))),
            Target::Arm64 => {
                registers.extend((0..31).map(|number| find(format!("x{number}").as_bytes())));
                let zero = find(b"DCZID_EL0");
                // BS: the number of words of 4 bytes, as a power of two.
                let size = state.machine.register(&zero) & 15;
                state.block = 4 << size;
            }
        }
        g_array_free(array, 1);
    }
}

extern "C" fn translated(block: *mut Opaque, _: *mut c_void) {
    let Some(target) = state().as_ref().map(|state| state.target) else { return };
    // SAFETY: a block while it is translated, and the instructions in it. What is passed is a
    // number and no pointer, or a pointer to what is never freed.
    unsafe {
        for index in 0..qemu_plugin_tb_n_insns(block) {
            let at = qemu_plugin_tb_get_insn(block, index);
            let pc = qemu_plugin_insn_vaddr(at);
            let data = std::ptr::without_provenance_mut(pc as usize);
            qemu_plugin_register_vcpu_mem_cb(at, stored, NO_REGISTERS, STORES, data);
            let mut bytes = [0; 15];
            let length = qemu_plugin_insn_data(at, bytes.as_mut_ptr().cast(), bytes.len());
            let Some(what) = decode(target, &bytes[..length.min(bytes.len())]) else { continue };
            // One that needs no operand is not worth the registers.
            let flags = match what {
                What::Arm64(Instruction::Barrier { .. }, _) => NO_REGISTERS,
                _ => REGISTERS,
            };
            let found: *mut Found = Box::leak(Box::new(Found { pc, what }));
            qemu_plugin_register_vcpu_insn_exec_cb(at, executed, flags, found.cast());
        }
    }
}

/// An instruction that matters; of arm64 with its word.
enum What {
    Arm64(Instruction, u32),
    X86(x86_64::Instruction),
    Riscv(riscv64::Instruction),
}

fn decode(target: Target, bytes: &[u8]) -> Option<What> {
    let word = || Some(u32::from_le_bytes(bytes.try_into().ok()?));
    match target {
        Target::X86 => x86_64::decode(bytes).map(What::X86),
        // Those of two bytes do not matter.
        Target::Riscv => riscv64::decode(word()?).map(What::Riscv),
        Target::Arm64 => {
            let word = word()?;
            arm64::decode(word).map(|what| What::Arm64(what, word))
        }
    }
}

/// An instruction that matters. Blocks may be executed at any time after they were translated: it
/// is kept for ever.
struct Found {
    pc: u64,
    what: What,
}

extern "C" fn executed(cpu: c_uint, data: *mut c_void) {
    // SAFETY: made by `translated`, and never freed.
    let Found { pc, what } = unsafe { &*data.cast::<Found>() };
    let mut state = state();
    let Some(state) = state.as_mut() else { return };
    let cpu = state.processor(cpu);
    let at = At { cpu: cpu as u8, pc: *pc };
    match *what {
        What::Arm64(what, word) => state.arm64(at, what, word),
        What::X86(what) => state.x86(at, what),
        What::Riscv(what) => state.riscv(at, what),
    }
    state.say();
}

extern "C" fn stored(cpu: c_uint, info: u32, address: u64, data: *mut c_void) {
    let mut state = state();
    let Some(state) = state.as_mut() else { return };
    if data.addr() >> 63 != 0 && state.watcher.is_any_in_user() {
        let cpu = state.processor(cpu);
        state.watcher.in_kernel(cpu as u8);
    }
    // SAFETY: in the callback of this access.
    let (pa, value, bytes) = unsafe {
        let physical = qemu_plugin_get_hwaddr(info, address);
        if physical.is_null() || qemu_plugin_hwaddr_is_io(physical) {
            return;
        }
        let pa = qemu_plugin_hwaddr_phys_addr(physical);
        if !state.watcher.cares(pa) {
            return;
        }
        (pa, qemu_plugin_mem_get_value(info), 1 << qemu_plugin_mem_size_shift(info))
    };
    let at = At { cpu: state.processor(cpu) as u8, pc: data.addr() as u64 };
    match value.kind {
        WORD if pa & 7 == 0 => {
            state.watcher.store_word(at, pa, value.data[0], &mut state.machine);
        }
        kind if kind > WORD && pa & 7 == 0 => {
            for (word, value) in value.data.into_iter().enumerate() {
                state.watcher.store_word(at, pa + word as u64 * 8, value, &mut state.machine);
            }
        }
        _ => state.watcher.store(at, pa, bytes, &mut state.machine),
    }
    state.say();
}

extern "C" fn ended(_: *mut c_void) {
    let mut state = state();
    let Some(state) = state.as_mut() else { return };
    let seconds = state.started.elapsed().as_secs_f64();
    let counts = state.watcher.counts();
    let findings = state.watcher.findings();
    let _ = writeln!(
        state.out,
        "{}",
        json!({"end": {
            "seconds": seconds, "counts": counts, "findings": findings,
        }})
    );
}

impl State {
    /// The number of the processor that runs; the one that the callback was given, if that is not
    /// known.
    fn processor(&self, given: c_uint) -> c_uint {
        let current = current();
        let number = self.names.iter().position(|name| *name == current && current != 0);
        number.map_or(given, |number| number as c_uint)
    }

    /// A register of the processor whose callback this is, by its number; zero is the one that is
    /// none.
    fn register(&mut self, cpu: u8, number: u8) -> u64 {
        let registers = self.registers.get(usize::from(cpu));
        let register = registers.and_then(|all| all.get(usize::from(number)));
        register.map_or(0, |register| self.machine.register(register))
    }

    fn arm64(&mut self, at: At, what: Instruction, word: u32) {
        let mut operand = 0;
        match what {
            Instruction::Zero => {
                let first = self.register(at.cpu, arm64::operand(word));
                self.zero(at, first & !(self.block - 1), self.block);
            }
            // Taken for zero: what fills a table with another byte makes it useless as a table.
            Instruction::Set { address, bytes } => {
                let first = self.register(at.cpu, address);
                let bytes = self.register(at.cpu, bytes);
                self.zero(at, first, bytes);
            }
            Instruction::Copy { to, from, bytes } => {
                let [to, from, bytes] = [to, from, bytes].map(|it| self.register(at.cpu, it));
                self.copy(at, to, from, bytes);
            }
            Instruction::Barrier { .. } | Instruction::Synchronize => {}
            Instruction::Write(_) | Instruction::Tlbi(_) => {
                operand = self.register(at.cpu, arm64::operand(word));
            }
        }
        self.watcher.execute(at, what, operand, &mut self.machine);
    }

    fn x86(&mut self, at: At, what: x86_64::Instruction) {
        use x86_64::Instruction as X86;
        if at.pc >> 63 != 0 {
            self.watcher.in_kernel(at.cpu);
        }
        let [cr0, cr3, cr4, efer] = [0, 1, 2, 3].map(|number| self.register(at.cpu, CR0 + number));
        let before = Control { cr0, cr3, cr4, efer };
        match what {
            X86::Control { number, from } => {
                let value = self.register(at.cpu, from);
                let mut now = before;
                match number {
                    0 => now.cr0 = value,
                    3 => now.cr3 = value,
                    _ => now.cr4 = value,
                }
                let flushes = now.flushes(&before, number);
                self.watcher.control(at, now, flushes, &mut self.machine);
            }
            X86::Invlpg(address) => {
                let address = address.linear(at.pc, |number| self.register(at.cpu, number));
                self.watcher.forgets(at, before.invlpg(address));
            }
            X86::Invpcid { kind, descriptor } => {
                let kind = self.register(at.cpu, kind);
                let address = descriptor.linear(at.pc, |number| self.register(at.cpu, number));
                let descriptor = self.machine.words(address);
                self.watcher.forgets(at, before.invpcid(kind, descriptor));
            }
            X86::Sysret => self.watcher.to_user(at),
            X86::Iret => {
                // RIP, then CS, whose two lowest bits are the mode.
                let frame = self.register(at.cpu, RSP);
                if self.machine.words(frame)[1] & 3 == 3 {
                    self.watcher.to_user(at);
                }
            }
        }
    }

    fn riscv(&mut self, at: At, what: riscv64::Instruction) {
        use riscv64::{Instruction as Riscv, Operand};
        if at.pc >> 63 != 0 {
            self.watcher.in_kernel(at.cpu);
        }
        match what {
            Riscv::Satp { how, from } => {
                let operand = match from {
                    Operand::Register(number) => self.register(at.cpu, number),
                    Operand::Value(value) => value.into(),
                };
                let now = how.apply(self.register(at.cpu, SATP), operand);
                self.watcher.satp(at, now, &mut self.machine);
            }
            Riscv::Fence { address, asid } => {
                let named = [address, asid].map(|it| (it != 0).then(|| self.register(at.cpu, it)));
                self.watcher.forgets(at, riscv64::fence(named[0], named[1]));
            }
            Riscv::Sret if riscv64::sret_to_user(self.register(at.cpu, SSTATUS)) => {
                self.watcher.to_user(at);
            }
            Riscv::Mret if riscv64::mret_to_user(self.register(at.cpu, MSTATUS)) => {
                self.watcher.to_user(at);
            }
            Riscv::Sret | Riscv::Mret => {}
        }
    }

    /// A range of addresses will be stored to at once.
    fn zero(&mut self, at: At, first: u64, bytes: u64) {
        self.each_page(first, bytes, |this, _, pa, length| {
            this.watcher.zeroed(at, pa, length, &mut this.machine);
        });
    }

    /// A range of addresses will be copied at once. Of what is not aligned the whole words count.
    fn copy(&mut self, at: At, to: u64, from: u64, bytes: u64) {
        self.each_page(to, bytes, |this, first, pa, length| {
            for offset in (pa.next_multiple_of(8) - pa..(length + 1).saturating_sub(8)).step_by(8) {
                let [value, _] = this.machine.words((first + offset - to).wrapping_add(from));
                this.watcher.store_word(at, pa + offset, value, &mut this.machine);
            }
        });
    }

    /// The pages of a range that the watcher cares for, or the part of a page: the first address,
    /// the physical one, and how many bytes.
    fn each_page(
        &mut self,
        first: u64,
        bytes: u64,
        mut each: impl FnMut(&mut Self, u64, u64, u64),
    ) {
        let mut next = first;
        let last = first.saturating_add(bytes);
        while next < last {
            let length = (last - next).min(0x1000 - next % 0x1000);
            let mut pa = 0;
            // SAFETY: in the callback of a processor.
            if unsafe { qemu_plugin_translate_vaddr(next, &raw mut pa) } && self.watcher.cares(pa) {
                each(self, next, pa, length);
            }
            next += length;
        }
    }

    /// Writes down what was found since.
    fn say(&mut self) {
        while let Some(finding) = self.watcher.findings().get(self.said) {
            let seconds = self.started.elapsed().as_secs_f64();
            let _ = writeln!(self.out, "{}", json!({"seconds": seconds, "finding": finding}));
            self.said += 1;
        }
    }
}
