//! A guest's tables that a device goes by, too: through a system MMU (SMMUv3), beside a processor
//! that has them loaded.
//!
//! It runs at EL2 with its MMU off, so that an address is what it is. The guest is two instructions
//! at EL1, with its MMU off as well: a load, or a store, and a call back. The device reads and
//! writes a word of memory. Both do so through the same tables, which the engine edits; and each
//! edit has both forget, before a frame is anything else's. What is left out, to show that it is
//! missed, is a word in memory that the emulator's command line sets ([`PLANT`]).
#![no_std]
#![no_main]

mod device;
#[path = "../payload/mod.rs"]
mod payload;
mod smmu;

use core::arch::{asm, global_asm};
use core::cell::Cell;
use core::fmt::Write as _;
use core::ops::ControlFlow;
use core::ptr::{self, NonNull};

use tablewright::arch::arm64::{Cpu, Ids, load_vttbr_el2, ttbr, vtcr_el2};
use tablewright::format::Stage2;
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, Entry, Invalidation, Ipa, Level, Mapping, Pa,
    Platform, Span,
};

use device::Device;
use payload::{Frames, Outcome, console, program};
use smmu::{Fault, Smmu};

type Format = Stage2<12, 40>;
type Space<'m> = AddressSpace<Format, &'m Machine>;

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;
/// A word that says what is left out: 1 is the device's invalidations, 2 the processor's.
const PLANT: usize = 0x47ff_f000;
/// The guest.
const VMID: u16 = 5;
/// Frames for tables.
const TABLES: usize = 16;
/// Memory behind the image, for pages.
const MEMORY: u64 = 0x4400_0000;

/// The guest's memory, below 256 MiB, which is as far as the device reaches.
const CODE: u64 = 0x10_0000;
const FROM: u64 = 0x20_0000;
const TO: u64 = 0x20_1000;
const WIDE: u64 = 0x40_0000;

global_asm!(
    payload::start!("adrp x0, vectors", "add x0, x0, :lo12:vectors", "msr vbar_el2, x0", "isb"),
    // Only the guest has exceptions to take.
    ".balign 2048",
    "vectors:",
    ".rept 8",
    "b unexpected",
    ".balign 128",
    ".endr",
    "b came_back",
    ".balign 128",
    ".rept 7",
    "b unexpected",
    ".balign 128",
    ".endr",
    // Enters the guest: where, and its first two registers.
    "enter:",
    "stp x29, x30, [sp, #-96]!",
    "stp x19, x20, [sp, #16]; stp x21, x22, [sp, #32]; stp x23, x24, [sp, #48]",
    "stp x25, x26, [sp, #64]; stp x27, x28, [sp, #80]",
    "msr elr_el2, x0",
    "mov x3, #0x3c5", // EL1 with its own stack pointer, everything masked
    "msr spsr_el2, x3",
    "mov x0, x1",
    "mov x1, x2",
    "isb",
    "eret",
    // Its second register, and why it came back.
    "came_back:",
    "mov x0, x1",
    "mrs x1, esr_el2",
    "ldp x19, x20, [sp, #16]; ldp x21, x22, [sp, #32]; ldp x23, x24, [sp, #48]",
    "ldp x25, x26, [sp, #64]; ldp x27, x28, [sp, #80]",
    "ldp x29, x30, [sp], #96",
    "ret",
    // The guest.
    ".global guest",
    ".balign 16",
    "guest:",
    "ldr x1, [x0]",
    "hvc #0",
    "str x1, [x0]",
    "hvc #0",
);

#[repr(C)]
struct CameBack {
    value: u64,
    esr: u64,
}

unsafe extern "C" {
    safe fn enter(at: u64, address: u64, value: u64) -> CameBack;
    static guest: [u32; 4];
}

/// How an access of the guest's ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Done(u64),
    /// Nothing is mapped.
    Translation,
    /// It may not.
    Permission,
    Other(u64),
}

/// An access of the guest's: a load, or a store of this value.
fn access(address: u64, value: Option<u64>) -> Access {
    let entry = CODE + if value.is_some() { 8 } else { 0 };
    let CameBack { value, esr } = enter(entry, address, value.unwrap_or(0));
    match (esr >> 26, esr & 0x3c) {
        (0x16, _) => Access::Done(value),
        (0x24, 0x04) => Access::Translation,
        (0x24, 0x0c) => Access::Permission,
        _ => Access::Other(esr),
    }
}

/// A word of memory, where it really is.
fn word(frame: Pa) -> *mut u64 {
    ptr::with_exposed_provenance_mut(frame.get() as usize)
}

fn set(frame: Pa, value: u64) {
    // SAFETY: memory behind the image, which only the guest and the device have besides.
    unsafe { word(frame).write_volatile(value) };
}

fn get(frame: Pa) -> u64 {
    // SAFETY: as for `set`.
    unsafe { word(frame).read_volatile() }
}

static FRAMES: Frames<TABLES> = Frames::new();

/// The processor and the SMMU, with frames for tables that are not given out twice.
struct Machine {
    cpu: Cpu,
    smmu: Cell<Option<&'static Smmu>>,
    /// The number of tables that came back. Each is cleared: a walk through one finds nothing.
    given_back: Cell<usize>,
    omits_device: bool,
    omits_cpu: bool,
}

impl Machine {
    fn take(&self, count: u64) -> Option<Pa> {
        FRAMES.take(count)
    }
}

// SAFETY: frames are given out once and aligned, the root's first; the pointers are good because
// the MMU is off; barriers and invalidations are those of the processor and of the SMMU, all of
// them, if none is left out on purpose.
unsafe impl Platform for Machine {
    payload::tables!(take);

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        self.given_back.set(self.given_back.get() + 1);
        for index in 0..PAGE / 8 {
            set(Pa::new(frame.get() + 8 * index), 0);
        }
    }

    fn barrier(&self, barrier: Barrier) {
        self.cpu.barrier(barrier);
        // What was issued to the SMMU is complete when it says so; the processor's own when its
        // barrier is over.
        if let (Barrier::Complete, Some(smmu)) = (barrier, self.smmu.get()) {
            smmu.sync();
        }
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        if !self.omits_cpu {
            self.cpu.invalidate(what);
        }
        match self.smmu.get() {
            Some(smmu) if !self.omits_device => smmu.invalidate(what),
            _ => {}
        }
    }

    fn caps(&self) -> Caps {
        // Neither VTCR_EL2 nor the entry of the stream says that hardware sets flags.
        payload::CAPS
    }
}

type Done = Result<(), &'static str>;

/// The parts of a check.
struct Bench<'m> {
    machine: &'m Machine,
    space: Space<'m>,
    smmu: &'static Smmu,
    device: Device,
    wrong: u32,
}

fn page(at: u64) -> Result<Span<Ipa>, &'static str> {
    Span::new(Ipa::new(at), PAGE).map_err(|_| "no such page")
}

/// Fails with a reason unless something holds.
macro_rules! expect {
    ($is_right:expr => $why:literal) => {
        if !$is_right {
            return Err($why);
        }
    };
}

impl Bench<'_> {
    fn map(&mut self, span: Span<Ipa>, frame: Pa, mapping: Mapping) -> Done {
        let mapped = self.space.map(span, frame, mapping);
        mapped.map(|_| ()).map_err(|_| "memory cannot be mapped")
    }

    fn map_page(&mut self, at: u64, frame: Pa) -> Done {
        self.map(page(at)?, frame, Mapping::new(Attrs::GUEST_MEMORY).pages_only())
    }

    fn unmap(&mut self, span: Span<Ipa>) -> Done {
        let mut gather = self.space.gather();
        let unmapped = gather.unmap(span, |_| ControlFlow::Continue(()));
        let progress = unmapped.map_err(|_| "memory cannot be unmapped")?;
        gather.finish(|_| ());
        expect!(progress.is_done() => "memory is unmapped in part");
        Ok(())
    }

    fn protect(&mut self, span: Span<Ipa>) -> Done {
        let mut gather = self.space.gather();
        let protected = gather.protect(span, Change::new().write_protect());
        protected.map_err(|_| "memory cannot be protected")?;
        gather.finish(|_| ());
        Ok(())
    }

    /// The device writes a value to a page of the guest's.
    fn device_writes(&mut self, at: u64, value: u64) -> Option<Fault> {
        // It has the value by reading it.
        set(frame(0), value);
        self.device.read(FROM);
        self.device.write(at);
        // An access that fails may be made again in parts.
        let first = self.smmu.fault();
        while self.smmu.fault().is_some() {}
        first
    }

    /// The page at `to` is on this frame: both write there, and read what the other has written.
    fn is_shared(&mut self, at: u64, on: Pa, value: u64) -> Done {
        let device = self.device_writes(at, value);
        expect!(device.is_none() => "the device is not let");
        expect!(get(on) == value => "the device has written elsewhere");
        expect!(access(at, None) == Access::Done(value) => "the guest reads something else");
        let written = access(at, Some(value + 1));
        expect!(written == Access::Done(value + 1) => "the guest is not let");
        expect!(get(on) == value + 1 => "the guest has written elsewhere");
        // The device reads that, and writes it where the first page is.
        self.device.read(at);
        self.device.write(FROM);
        expect!(get(frame(0)) == value + 1 => "the device has read elsewhere");
        Ok(())
    }

    /// Nothing is at this address any more: neither reaches the frame that was.
    fn is_gone(&mut self, at: u64, was: Pa) -> Done {
        const POISON: u64 = 0xdead_dead_dead_dead;
        set(was, POISON);
        let fault = self.device_writes(at, 7);
        expect!(get(was) == POISON => "the device writes to a frame that was taken away");
        expect!(fault == Some(Fault::Translation(at)) => "the SMMU says no fault");
        let read = access(at, None);
        expect!(read != Access::Done(POISON) => "the guest reads a frame that was taken away");
        expect!(read == Access::Translation => "the guest has no fault");
        Ok(())
    }

    fn check(&mut self, name: &str, check: fn(&mut Self) -> Done) {
        match check(self) {
            Ok(()) => _ = writeln!(console(), "smmu: ok: {name}"),
            Err(why) => {
                self.wrong += 1;
                let _ = writeln!(console(), "smmu: WRONG: {name}: {why}");
            }
        }
        // What is left over is not the next one's.
        while self.smmu.fault().is_some() {}
    }

    fn shared(&mut self) -> Done {
        self.map_page(TO, frame(1))?;
        self.is_shared(TO, frame(1), 0x100)
    }

    fn moved(&mut self) -> Done {
        for turn in 0..8 {
            let (old, new) = (frame(1 + turn % 2), frame(2 - turn % 2));
            self.unmap(page(TO)?)?;
            set(old, 0);
            self.map_page(TO, new)?;
            self.is_shared(TO, new, 0x200 + 16 * turn)?;
            expect!(get(old) == 0 => "the old frame is written");
        }
        Ok(())
    }

    fn protected(&mut self) -> Done {
        self.is_shared(TO, frame(1), 0x300)?;
        self.protect(page(TO)?)?;
        let fault = self.device_writes(TO, 9);
        expect!(get(frame(1)) == 0x301 => "the device writes what it may only read");
        expect!(fault == Some(Fault::Permission(TO)) => "the SMMU says no fault");
        let written = access(TO, Some(11));
        expect!(get(frame(1)) == 0x301 => "the guest writes what it may only read");
        expect!(written == Access::Permission => "the guest has no fault");
        expect!(access(TO, None) == Access::Done(0x301) => "the guest does not read");
        Ok(())
    }

    fn taken_away(&mut self) -> Done {
        self.unmap(page(TO)?)?;
        self.map_page(TO, frame(1))?;
        self.is_shared(TO, frame(1), 0x400)?;
        self.unmap(page(TO)?)?;
        self.is_gone(TO, frame(1))
    }

    fn table_detached(&mut self) -> Done {
        let span = Span::new(Ipa::new(WIDE), BLOCK).map_err(|_| "no such pages")?;
        let at = [0, 17, 511].map(|page| page * PAGE);
        let frame = |at: u64| Pa::new(MEMORY + BLOCK + at);
        self.map(span, frame(0), Mapping::new(Attrs::GUEST_MEMORY).pages_only())?;
        for at in at {
            self.is_shared(WIDE + at, frame(at), 0x500)?;
        }
        let before = self.machine.given_back.get();
        self.unmap(span)?;
        expect!(self.machine.given_back.get() == before + 1 => "no table came back");
        for at in at {
            self.is_gone(WIDE + at, frame(at))?;
        }
        Ok(())
    }

    fn block_split(&mut self) -> Done {
        let span = Span::new(Ipa::new(WIDE), BLOCK).map_err(|_| "no such pages")?;
        let frame = |at: u64| Pa::new(MEMORY + BLOCK + at);
        self.map(span, frame(0), Mapping::new(Attrs::GUEST_MEMORY))?;
        self.is_shared(WIDE, frame(0), 0x600)?;
        self.is_shared(WIDE + PAGE, frame(PAGE), 0x600)?;
        self.protect(page(WIDE + PAGE)?)?;
        self.is_shared(WIDE, frame(0), 0x700)?;
        let fault = self.device_writes(WIDE + PAGE, 13);
        expect!(get(frame(PAGE)) == 0x601 => "the device writes what it may only read");
        expect!(fault == Some(Fault::Permission(WIDE + PAGE)) => "the SMMU says no fault");
        expect!(access(WIDE + PAGE, Some(15)) == Access::Permission => "the guest has no fault");
        self.unmap(span)?;
        self.is_gone(WIDE, frame(0))?;
        self.is_gone(WIDE + PAGE, frame(PAGE))
    }
}

/// A frame for a page.
fn frame(number: u64) -> Pa {
    Pa::new(MEMORY + number * PAGE)
}

fn run() -> Outcome {
    static SMMU: spin::once::Once<Only> = spin::once::Once::new();
    // SAFETY: a word of memory that nothing else uses.
    let plant = unsafe { ptr::with_exposed_provenance::<u64>(PLANT).read_volatile() };
    let ids = Ids::read();
    let machine = Machine {
        cpu: Cpu::of::<Format>(&ids),
        smmu: Cell::new(None),
        given_back: Cell::new(0),
        omits_device: plant == 1,
        omits_cpu: plant == 2,
    };
    let caps = machine.caps();
    let mut space = Space::new(&machine).ok_or("no root")?.with_id(VMID);
    let vtcr = vtcr_el2::<Format>(&ids, &caps).map_err(|_| "the processor lacks something")?;
    // VMIDs have 8 bits.
    let vtcr = vtcr & !(1 << 19);
    space.make_live();
    let root = space.root();
    // SAFETY: the tables map what is mapped here, all of it memory behind the image (2.), and there
    // is one SMMU (1.).
    let smmu = unsafe { Smmu::new(device::STREAM, root.get(), vtcr, VMID) };
    let smmu = &SMMU.call_once(|| Only(smmu)).0.as_ref().ok_or("the SMMU has no stage 2")?;
    machine.smmu.set(Some(smmu));
    // SAFETY: VM and RW: stage 2, and EL1 is AArch64. The root is of the tables that the guest is
    // to have, under its VMID.
    unsafe {
        asm!(
            "msr vtcr_el2, {vtcr}",
            "msr hcr_el2, {hcr}",
            "msr sctlr_el1, {sctlr}",
            "isb",
            vtcr = in(reg) vtcr,
            hcr = in(reg) 1u64 << 31 | 1,
            sctlr = in(reg) 0x30d0_0800u64,
        );
        load_vttbr_el2(ttbr::<Format>(root, VMID, false));
        asm!("isb", "tlbi vmalls12e1is", "dsb ish", "isb");
    }
    // SAFETY: there is one device (1.).
    let device = unsafe { Device::find() }.ok_or("there is no device")?;
    let mut bench = Bench { machine: &machine, space, smmu, device, wrong: 0 };
    // SAFETY: the guest's four instructions, whose frame is mapped for it.
    for (index, word) in unsafe { guest }.chunks(2).enumerate() {
        let both = u64::from(word[0]) | u64::from(word[1]) << 32;
        set(Pa::new(frame(8).get() + 8 * index as u64), both);
    }
    bench.map_page(CODE, frame(8))?;
    bench.map_page(FROM, frame(0))?;
    bench.check("a page is the same for both", Bench::shared);
    bench.check("a page goes to other frames", Bench::moved);
    bench.check("a page may not be written any more", Bench::protected);
    bench.check("a page is taken away", Bench::taken_away);
    bench.check("a table is detached with its pages", Bench::table_detached);
    bench.check("a block is split, and a page of it protected", Bench::block_split);
    Ok(Some(bench.wrong))
}

/// The SMMU, or none.
struct Only(Option<Smmu>);

// SAFETY: there is one processor.
unsafe impl Sync for Only {}
// SAFETY: there is one processor.
unsafe impl Send for Only {}

program!("smmu", run);

#[unsafe(no_mangle)]
extern "C" fn unexpected() -> ! {
    let (esr, elr, far): (u64, u64, u64);
    // SAFETY: reads registers.
    unsafe {
        asm!("mrs {}, esr_el2", "mrs {}, elr_el2", "mrs {}, far_el2", out(reg) esr, out(reg) elr,
            out(reg) far)
    };
    payload::end("smmu", format_args!("WRONG: all: exception {esr:#x} at {elr:#x}, {far:#x}"))
}
