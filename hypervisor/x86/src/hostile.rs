//! A guest that means no good: it tries what a guest may not do, and says what came of it.
//!
//! It is entered as a Linux is, at 64 bits, with the first 4 GiB mapped one to one. Each attempt
//! has to end with a fault of its own, or an error code; the hypervisor has to be there afterwards.
#![no_std]
#![no_main]

use core::arch::{asm, global_asm};
use core::fmt::{self, Write as _};
use core::panic::PanicInfo;
use core::ptr;

use tablewright::hyperv::{Call, Input, Output, Status, msr};

global_asm!(
    r#"
    .section .head, "awx"
    // The header of a kernel (Documentation/x86/boot.rst): one sector after the first, 64 bits, a
    // line of any length.
    header:
    .org 0x1f1
    .byte 1
    .org 0x202
    .ascii "HdrS"
    .word 0x20f
    .org 0x236
    .word 1
    .long 0x7ff
    // The kernel, and its entry.
    .org 0x600
    .global start
    start:
    lea rsp, [rip + STACK + {stack}]
    call {main}
    1: hlt
    jmp 1b

    // Faults: which it was, and on behind the attempt.
    undefined:
    mov qword ptr [rip + {last}], 6
    jmp 2f
    page:
    mov qword ptr [rip + {last}], 14
    add rsp, 8
    jmp 2f
    protection:
    mov qword ptr [rip + {last}], 13
    add rsp, 8
    2: push rax
    mov rax, [rip + {behind}]
    mov [rsp + 8], rax
    pop rax
    iretq
    .text
    "#,
    main = sym main,
    last = sym LAST,
    behind = sym BEHIND,
    stack = const STACK_SIZE,
);

unsafe extern "C" {
    safe static undefined: u8;
    safe static page: u8;
    safe static protection: u8;
}

const STACK_SIZE: usize = 16 << 10;

#[unsafe(no_mangle)]
static mut STACK: [u128; STACK_SIZE / 16] = [0; STACK_SIZE / 16];
/// The fault of the last attempt.
static mut LAST: u64 = 0;
/// The address at which it goes on behind it.
static mut BEHIND: u64 = 0;
static mut VECTORS: [[u64; 2]; 32] = [[0; 2]; 32];

const UNDEFINED: u64 = 6;
const PROTECTION: u64 = 13;

/// Which fault an attempt ended with: 0 if with none.
macro_rules! attempt {
    ($text:literal $(, $($operand:tt)*)?) => {{
        // SAFETY: one processor; handlers write it, and only while the attempt is made. What it may
        // do to this program is tried on purpose.
        unsafe {
            (&raw mut LAST).write_volatile(0);
            asm!(
                "lea {back}, [rip + 99f]",
                "mov [rip + {behind}], {back}",
                $text,
                "99:",
                back = out(reg) _,
                behind = sym BEHIND
                $(, $($operand)*)?
            );
            (&raw const LAST).read_volatile()
        }
    }};
}

fn read_register(number: u32) -> u64 {
    attempt!("rdmsr", in("ecx") number, out("eax") _, out("edx") _)
}

fn write_register(number: u32, value: u64) -> u64 {
    let (low, high) = (value as u32, (value >> 32) as u32);
    attempt!("wrmsr", in("ecx") number, in("eax") low, in("edx") high)
}

fn read_memory(at: u64) -> u64 {
    attempt!("mov {value}, [{at}]", value = out(reg) _, at = in(reg) at)
}

fn write_memory(at: u64) -> u64 {
    attempt!("mov [{at}], {value}", at = in(reg) at, value = in(reg) 1u64)
}

/// A hypercall: what RAX is.
fn call(input: u64, at: u64) -> Output {
    let result: u64;
    // SAFETY: it may do nothing to this program.
    unsafe { asm!("vmmcall", in("rcx") input, in("rdx") at, in("r8") 0, lateout("rax") result) };
    Output::from_bits(result)
}

struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: the serial port.
            unsafe {
                let mut state = 0u8;
                while state & 1 << 5 == 0 {
                    asm!("in al, dx", in("dx") 0x3fd, out("al") state);
                }
                asm!("out dx, al", in("dx") 0x3f8, in("al") byte);
            }
        }
        Ok(())
    }
}

struct Report {
    wrong: u32,
}

/// Checks the result of an attempt.
macro_rules! expect {
    ($report:ident: $what:expr, $number:expr, $right:expr => $got:expr) => {
        $report.expect($what, $number, $right, $got)
    };
}

impl Report {
    fn expect(&mut self, what: &str, number: u64, right: u64, got: u64) {
        self.wrong += u32::from(got != right);
        let verdict = if got == right { "ok" } else { "WRONG" };
        let _ = write!(Console, "hostile: {verdict}: {what} {number:#x}: {got:#x}\r\n");
    }

    fn registers(&mut self) {
        // None of these is there; one is the host's own.
        for number in [0x3, 0x1234, 0x4000_0fff, 0xc001_0114, 0xc001_0117, u32::MAX] {
            let fault = read_register(number);
            expect!(self: "register read", number.into(), PROTECTION => fault);
            let fault = write_register(number, 0);
            expect!(self: "register written", number.into(), PROTECTION => fault);
        }
        let values = [
            // The controller moved, or off; EFER with what is not there; PAT with a type that is
            // not there.
            (0x1b, 0),
            (0x1b, 0x1_0000_0c00),
            (0xc000_0080, 1 << 12 | 0x500),
            (0xc000_0080, 1 << 63),
            (0x277, 2),
            // An interrupt command to everything that is reserved; a register of the controller
            // that is not there.
            (0x8ff, 1),
        ];
        for (number, value) in values {
            let fault = write_register(number, value);
            expect!(self: "value of register", number.into(), PROTECTION => fault);
        }
    }

    fn ports(&mut self) {
        for port in [0u16, 0x60, 0x80, 0xcf8, 0x604, 0xffff] {
            let (low, fault): (u32, u64);
            {
                let value: u32;
                fault = attempt!("in eax, dx", in("dx") port, out("eax") value);
                low = value;
            }
            expect!(self: "port read", port.into(), 0 => fault);
            expect!(self: "from it", port.into(), u32::MAX.into() => low.into());
            let fault = attempt!("out dx, eax", in("dx") port, in("eax") 0x2000);
            expect!(self: "port written", port.into(), 0 => fault);
        }
        let mut word = 0u32;
        let at = &raw mut word;
        let fault = attempt!("insd", in("dx") 0x80u16, inout("rdi") at => _);
        expect!(self: "string from port", 0x80, PROTECTION => fault);
    }

    fn instructions(&mut self) {
        expect!(self: "vmrun", 0, UNDEFINED => attempt!("vmrun rax", in("rax") 0x1000));
        expect!(self: "vmload", 0, UNDEFINED => attempt!("vmload rax", in("rax") 0x1000));
        expect!(self: "vmsave", 0, UNDEFINED => attempt!("vmsave rax", in("rax") 0x1000));
        expect!(self: "stgi", 0, UNDEFINED => attempt!("stgi"));
        expect!(self: "clgi", 0, UNDEFINED => attempt!("clgi"));
        // Before the page is there.
        expect!(self: "vmmcall", 0, UNDEFINED
            => attempt!("vmmcall", in("rcx") 0, in("rdx") 0, lateout("rax") _));
    }

    fn memory(&mut self) {
        // Behind the guest's memory, where the host's is, or a device of its: not there.
        for at in [0x2000_0000u64, 0x8000_0000, 0xfec0_0000, 0xfee0_0000] {
            expect!(self: "memory read", at, PROTECTION => read_memory(at));
            expect!(self: "memory written", at, PROTECTION => write_memory(at));
        }
    }

    fn calls(&mut self) {
        /// Free, in the guest's memory.
        const PAGE: u64 = 32 << 20;
        let set = |words: [u64; 5]| {
            let words_at = ptr::with_exposed_provenance_mut::<u64>(PAGE as usize);
            // SAFETY: memory that nothing else uses.
            unsafe { words_at.cast::<[u64; 5]>().write_volatile(words) };
        };
        let fault = write_register(msr::GUEST_OS_ID, 1);
        expect!(self: "identity", 0, 0 => fault);
        let nowhere = 1 << 40 | 1;
        let fault = write_register(msr::HYPERCALL, nowhere);
        expect!(self: "page of calls", nowhere, PROTECTION => fault);
        let fault = write_register(msr::HYPERCALL, (PAGE + 0x1000) | 1);
        expect!(self: "page of calls", PAGE + 0x1000, 0 => fault);
        let space = Input::new(Call::Space).bits();
        let list = Input::new(Call::List).with_reps(1);
        let by_set = Input::new(Call::SpaceEx).bits();
        let all = [0, 0b11, 0, 0, 0];
        // The words of the page, RCX, RDX.
        let attempts = [
            ("good", all, space, PAGE, Status::SUCCESS),
            ("no call", all, 0x1234, PAGE, Status::CODE),
            ("all bits", all, u64::MAX, PAGE, Status::CODE),
            ("first of none", all, list.with_start(1).bits(), PAGE, Status::INPUT),
            ("no element", all, Input::new(Call::List).bits(), PAGE, Status::INPUT),
            ("reserved bit of", all, space | 1 << 27, PAGE, Status::INPUT),
            ("page askew", all, space, PAGE + 4, Status::ALIGNMENT),
            ("page nowhere", all, space, 0x8000_0000, Status::PARAMETER),
            ("page far off", all, space, !0xfff, Status::PARAMETER),
            ("flags", [0, 1 << 40, 0, 0, 0], space, PAGE, Status::PARAMETER),
            ("kind of set", [0, 0b10, 2, 0, 0], by_set, PAGE, Status::PARAMETER),
            ("banks", [0, 0b10, 0, u64::MAX, 0], by_set, PAGE, Status::INPUT),
            // Addresses that wrap name what is behind the last.
            ("last pages", [0, 0b11, 0, !0, 0], list.bits(), PAGE, Status::SUCCESS),
        ];
        for (what, words, input, at, status) in attempts {
            set(words);
            let got = call(input, at).status();
            expect!(self: what, input, code(status) => code(got));
        }
    }
}

/// The number of a status.
fn code(status: Status) -> u64 {
    Output::new(status, 0).bits() & 0xffff
}

/// Has faults come to the handlers.
fn set_vectors() {
    let handlers = [(6, &raw const undefined), (13, &raw const protection), (14, &raw const page)];
    #[repr(C, packed)]
    struct Place(u16, u64);
    let place = Place(size_of::<[[u64; 2]; 32]>() as u16 - 1, &raw const VECTORS as u64);
    // SAFETY: one processor, before any fault; the code segment is the one that this runs in.
    unsafe {
        let code: u64;
        asm!("mov {:r}, cs", out(reg) code);
        for (vector, handler) in handlers {
            let at = handler as u64;
            let gate = at & 0xffff | code << 16 | 0x8e << 40 | (at >> 16 & 0xffff) << 48;
            (&raw mut VECTORS).cast::<[u64; 2]>().add(vector).write([gate, at >> 32]);
        }
        asm!("lidt [{}]", in(reg) &raw const place);
    }
}

extern "C" fn main() -> ! {
    set_vectors();
    let mut report = Report { wrong: 0 };
    report.registers();
    report.ports();
    report.instructions();
    report.memory();
    report.calls();
    let _ = write!(Console, "hostile: done, {} wrong\r\n", report.wrong);
    off()
}

/// The machine is turned off, as its tables say.
fn off() -> ! {
    loop {
        // SAFETY: a port of the hypervisor's.
        unsafe { asm!("out dx, al", in("dx") 0x600, in("al") 5u8 << 2 | 1 << 5) };
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = write!(Console, "hostile: PANIC: {info}\r\n");
    off()
}
