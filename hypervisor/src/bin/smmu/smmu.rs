//! A system MMU, SMMUv3, whose one stream is translated by the tables of a guest. Sections are
//! those of its architecture, Arm IHI 0070.
//!
//! What it remembers is forgotten by commands in a queue: the same ranges as a processor's, by the
//! same VMID. A processor's `TLBI` does not reach it here: `SMMU_CR2.PTM` is set. That all are
//! carried out is known when `CMD_SYNC` is consumed (4.7.3).

use core::arch::asm;
use core::cell::{Cell, UnsafeCell};
use core::ptr;

use tablewright::{Invalidation, What};

/// Its address in the machine.
const BASE: u64 = 0x905_0000;

// Registers (6.3).
const IDR0: u64 = 0x0;
const CR0: u64 = 0x20;
const CR0_ACK: u64 = 0x24;
const CR2: u64 = 0x2c;
const STREAMS: u64 = 0x80;
const STREAMS_CONFIGURATION: u64 = 0x88;
const COMMANDS: u64 = 0x90;
const COMMANDS_PRODUCED: u64 = 0x98;
const COMMANDS_CONSUMED: u64 = 0x9c;
const EVENTS: u64 = 0xa0;
const EVENTS_PRODUCED: u64 = 0x1_00a8;
const EVENTS_CONSUMED: u64 = 0x1_00ac;

/// Streams of the table, commands and events in the queues: powers of two.
const ALL_STREAMS: usize = 256;
const ALL_COMMANDS: usize = 256;
const ALL_EVENTS: usize = 128;

/// In a base: the SMMU may allocate what it reads there.
const ALLOCATE: u64 = 1 << 62;

// Commands (4.1.2).
const CONFIGURATION_OF_ALL: u64 = 0x04;
const FORGET_GUEST: u64 = 0x28; // CMD_TLBI_S12_VMALL
const FORGET_PAGE: u64 = 0x2a; // CMD_TLBI_S2_IPA
const FORGET_ALL: u64 = 0x30; // CMD_TLBI_NSNH_ALL
const SYNC: u64 = 0x46;

/// More of one range than this are forgotten with all of the guest.
const MOST: u64 = 64;

#[repr(C, align(16384))]
struct Memory {
    streams: UnsafeCell<[[u64; 8]; ALL_STREAMS]>,
    commands: UnsafeCell<[[u64; 2]; ALL_COMMANDS]>,
    events: UnsafeCell<[[u64; 4]; ALL_EVENTS]>,
}

// SAFETY: there is one processor, and one `Smmu`.
unsafe impl Sync for Memory {}

static MEMORY: Memory = Memory {
    streams: UnsafeCell::new([[0; 8]; ALL_STREAMS]),
    commands: UnsafeCell::new([[0; 2]; ALL_COMMANDS]),
    events: UnsafeCell::new([[0; 4]; ALL_EVENTS]),
};

fn at<T>(what: &UnsafeCell<T>) -> u64 {
    what.get().expose_provenance() as u64
}

fn barrier() {
    // SAFETY: waits until what was stored is where the SMMU reads it.
    unsafe { asm!("dsb sy", options(nostack, preserves_flags)) };
}

fn write(register: u64, value: u32) {
    // SAFETY: a register of the SMMU.
    unsafe {
        ptr::with_exposed_provenance_mut::<u32>((BASE + register) as usize).write_volatile(value)
    };
}

fn write_long(register: u64, value: u64) {
    // SAFETY: a register of the SMMU.
    unsafe {
        ptr::with_exposed_provenance_mut::<u64>((BASE + register) as usize).write_volatile(value)
    };
}

fn read(register: u64) -> u32 {
    // SAFETY: a register of the SMMU.
    unsafe { ptr::with_exposed_provenance::<u32>((BASE + register) as usize).read_volatile() }
}

/// An access that a device could not make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is mapped there.
    Translation(u64),
    /// It may not.
    Permission(u64),
    /// Another event, by its number.
    Other(u64),
}

/// The SMMU.
pub struct Smmu {
    produced: Cell<u32>,
    seen: Cell<u32>,
}

impl Smmu {
    /// Switches it on, with one stream that goes by tables of stage 2: this root, `VTCR_EL2` and
    /// VMID. Other streams reach nothing.
    ///
    /// # Safety
    /// 1. The MMU is off, on the machine that this is for; nothing else uses the SMMU.
    /// 2. The tables map what the device may reach, and are edited by what has this SMMU
    ///    [forget](Self::invalidate).
    pub unsafe fn new(stream: u32, root: u64, vtcr: u64, vmid: u16) -> Option<Self> {
        // S2P: there is a stage 2.
        if read(IDR0) & 1 == 0 {
            return None;
        }
        let enable = |bits: u32| {
            write(CR0, bits);
            while read(CR0_ACK) != bits {
                core::hint::spin_loop();
            }
        };
        enable(0);
        write(CR2, 1 << 2); // PTM
        // An entry of the table (5.2): valid, stage 2 alone; shareable as it comes; the guest, with
        // what VTCR_EL2 has in its lower bits, AArch64, walks through devices fault, faults are
        // said; the root.
        let entry = [
            1 | 0b110 << 1,
            1 << 44,
            u64::from(vmid) | (vtcr & 0x7_ffff) << 32 | 1 << 51 | 1 << 54 | 1 << 58,
            root,
        ];
        // SAFETY: the entry of the stream, which the SMMU does not read yet.
        unsafe { (&mut *MEMORY.streams.get())[stream as usize][..4].copy_from_slice(&entry) };
        let size = |entries: usize| u64::from(entries.trailing_zeros());
        write_long(STREAMS, at(&MEMORY.streams) | ALLOCATE);
        write(STREAMS_CONFIGURATION, size(ALL_STREAMS) as u32);
        write_long(COMMANDS, at(&MEMORY.commands) | ALLOCATE | size(ALL_COMMANDS));
        write(COMMANDS_PRODUCED, 0);
        write(COMMANDS_CONSUMED, 0);
        write_long(EVENTS, at(&MEMORY.events) | ALLOCATE | size(ALL_EVENTS));
        write(EVENTS_PRODUCED, 0);
        write(EVENTS_CONSUMED, 0);
        barrier();
        let queues = 1 << 3 | 1 << 2;
        enable(queues);
        let smmu = Self { produced: Cell::new(0), seen: Cell::new(0) };
        smmu.command([CONFIGURATION_OF_ALL, 31]);
        smmu.command([FORGET_ALL, 0]);
        smmu.sync();
        enable(queues | 1);
        Some(smmu)
    }

    /// Puts a command into the queue, when there is room.
    fn command(&self, command: [u64; 2]) {
        let produced = self.produced.get();
        let turns = 2 * ALL_COMMANDS as u32;
        // Index and turn (3.5.1): full is when they are a turn apart.
        while (produced ^ read(COMMANDS_CONSUMED)) & (turns - 1) == ALL_COMMANDS as u32 {
            core::hint::spin_loop();
        }
        // SAFETY: a place of the queue that the SMMU has consumed.
        unsafe {
            (&mut *MEMORY.commands.get())[produced as usize % ALL_COMMANDS] = command;
        }
        barrier();
        let next = (produced + 1) & (turns - 1);
        self.produced.set(next);
        write(COMMANDS_PRODUCED, next);
    }

    /// Waits until all commands are carried out, and what they have forgotten is in no access any
    /// more.
    pub fn sync(&self) {
        self.command([SYNC, 0]);
        let turns = 2 * ALL_COMMANDS as u32;
        while read(COMMANDS_CONSUMED) & (turns - 1) != self.produced.get() {
            core::hint::spin_loop();
        }
    }

    /// Has it forget what a flush says: the half of
    /// [`Platform::invalidate`](tablewright::Platform::invalidate) that is the device's.
    /// [`sync`](Self::sync) is its half of the barrier.
    pub fn invalidate(&self, flush: &Invalidation<'_>) {
        let guest = u64::from(flush.id) << 32;
        let What::Ranges(ranges) = flush.what else {
            return self.command([FORGET_GUEST | guest, 0]);
        };
        for range in ranges {
            let shift = 12 + 9 * range.level.map_or(0, |level| u32::from(level.height()));
            let last = (range.last - range.first) >> shift;
            if last >= MOST {
                self.command([FORGET_GUEST | guest, 0]);
                continue;
            }
            // Of leaves alone, where no table was detached.
            let leaf = u64::from(!range.tables);
            for index in 0..=last {
                self.command([FORGET_PAGE | guest, (range.first + (index << shift)) | leaf]);
            }
        }
    }

    /// Returns the end of the device's accesses since it was asked last: one event, or none.
    pub fn fault(&self) -> Option<Fault> {
        let turns = 2 * ALL_EVENTS as u32;
        let seen = self.seen.get();
        if read(EVENTS_PRODUCED) & (turns - 1) == seen {
            return None;
        }
        // SAFETY: a place of the queue that the SMMU has filled.
        let event = unsafe {
            MEMORY.events.get().cast::<[u64; 4]>().add(seen as usize % ALL_EVENTS).read_volatile()
        };
        let next = (seen + 1) & (turns - 1);
        self.seen.set(next);
        write(EVENTS_CONSUMED, next);
        // The number, and the address that the device said (7.3).
        Some(match event[0] & 0xff {
            0x10 => Fault::Translation(event[2]),
            0x13 => Fault::Permission(event[2]),
            other => Fault::Other(other),
        })
    }
}
