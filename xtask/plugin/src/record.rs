//! Writes down what a hypervisor does to the tables of its guest, in the order in which it happens:
//! each store to them, each barrier and invalidation, each load of a root. `xtask/src/check.rs`
//! reads it.
//!
//! Of the hypervisor's program each instruction that reads or writes memory calls back when it was
//! executed, and each barrier, invalidation and such before. What a store has stored is read from
//! the guest's memory, which lies in this process: nothing else can have changed it, because one
//! thread executes all processors in turn (`-accel tcg,thread=single`). Operands of instructions
//! are in registers, which this interface does not show; the hypervisor says them in a word of
//! memory first ([`Report`]).
//!
//! A record is 24 bytes: what it is, the processor, two bytes of nothing, an instruction or a
//! number, an address, and a value; the last three little-endian.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_uint, c_void};
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::ptr;

use crate::reports::{REPORTS, Report};
use crate::{
    NO_REGISTERS, Opaque, qemu_plugin_insn_haddr, qemu_plugin_insn_vaddr, qemu_plugin_mem_is_store,
    qemu_plugin_mem_size_shift, qemu_plugin_register_vcpu_insn_exec_cb,
    qemu_plugin_register_vcpu_mem_cb,
};

/// The subject of a record.
#[derive(Clone, Copy)]
enum Kind {
    /// A word of a table was stored to: by which instruction, where, and what is there now.
    Store,
    /// A barrier, an invalidation, and the like is executed. Its operand, and whether it was said.
    Executed,
    /// A page of memory that may be the guest's was read or written.
    Touched,
    /// Something was said.
    Said,
    /// The announcement of a walk was looked at, or made: which, and what is there.
    SlotRead,
    SlotWritten,
    /// When the machine is switched off, what is in a word of a table.
    Left,
}

const PAGE: u64 = 4096;

/// The options of the command line.
#[derive(Default)]
pub struct Options {
    /// The file for records.
    pub file: Option<File>,
    /// The hypervisor's code.
    pub text: Range<u64>,
    /// The address of words on what cannot be seen.
    pub reported: u64,
    /// Announcements of walks.
    pub slots: Range<u64>,
    /// The end of memory, which begins at [`MEMORY`].
    pub end: u64,
}

/// The first address of the machine's memory.
const MEMORY: u64 = 1 << 30;
/// The size of an announcement.
const SLOT: u64 = 128;

/// The number of pages that are compared with the next that is touched.
const NEAR: usize = 4;

/// The use of a frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Nothing: it may be stored to before it is given back, and after.
    None,
    Table,
    /// Anything else.
    Data,
}

struct Recorder {
    options: Options,
    buffer: Vec<u8>,
    /// The address of the machine's memory in this process.
    base: Option<*const u8>,
    /// Frames of tables and others, in a row.
    frames: Range<u64>,
    /// The use of each of them.
    uses: Vec<Use>,
    /// Words that processors have said and not used.
    said: Vec<[Option<u64>; REPORTS]>,
    /// The last pages that were touched since anything else was recorded, and by which processors:
    /// one that is copied, another that is compared, are said once.
    touched: VecDeque<(u32, u64)>,
}

/// There is one thread.
struct Alone(UnsafeCell<Option<Recorder>>);

// SAFETY: QEMU executes all processors on one thread, and installs plugins before it does.
unsafe impl Sync for Alone {}

static RECORDER: Alone = Alone(UnsafeCell::new(None));

fn with<T>(each: impl FnOnce(&mut Recorder) -> T) -> Option<T> {
    // SAFETY: one thread, and no callback calls another.
    unsafe { (*RECORDER.0.get()).as_mut() }.map(each)
}

/// Records from here on.
pub fn start(options: Options) {
    let recorder = Recorder {
        options,
        buffer: Vec::with_capacity(1 << 17),
        base: None,
        frames: 0..0,
        uses: Vec::new(),
        said: Vec::new(),
        touched: VecDeque::new(),
    };
    // SAFETY: as above.
    unsafe { *RECORDER.0.get() = Some(recorder) };
}

/// Whether something of a program is to be recorded.
pub fn is_on() -> bool {
    with(|_| ()).is_some()
}

/// An instruction of interest by itself: barriers; invalidations; a load of `VTTBR_EL2`; the return
/// to a guest; a call of firmware.
fn is_watched(instruction: u32) -> bool {
    const MSR_VTTBR: u32 = 0xd51c_2100;
    const ERET: u32 = 0xd69f_03e0;
    const SMC: u32 = 0xd400_0003;
    crate::alike(instruction).is_some()
        || instruction & !0x1f == MSR_VTTBR
        || instruction == ERET
        || instruction & 0xffe0_001f == SMC
}

/// Has an instruction call back, if it is the hypervisor's.
///
/// # Safety
/// 1. `at` is an instruction that is being translated, and these are its bits.
pub unsafe fn translated(at: *mut Opaque, instruction: u32) {
    with(|recorder| {
        // SAFETY: by (1.).
        let (address, here) = unsafe { (qemu_plugin_insn_vaddr(at), qemu_plugin_insn_haddr(at)) };
        if !recorder.options.text.contains(&address) || here.is_null() {
            return;
        }
        // The first of them is the hypervisor's, which is there before any guest. A guest's own
        // program may be at its addresses, and is elsewhere in memory.
        let base = here.cast::<u8>().wrapping_sub((address - MEMORY) as usize).cast_const();
        if *recorder.base.get_or_insert(base) != base {
            return;
        }
        let data = ptr::without_provenance_mut(instruction as usize);
        // SAFETY: by (1.); what is passed is a number.
        unsafe {
            if is_watched(instruction) {
                qemu_plugin_register_vcpu_insn_exec_cb(at, executed, NO_REGISTERS, data);
            }
            qemu_plugin_register_vcpu_mem_cb(at, accessed, NO_REGISTERS, READS_AND_WRITES, data);
        }
    });
}

/// `QEMU_PLUGIN_MEM_RW`.
const READS_AND_WRITES: std::ffi::c_int = 3;

extern "C" fn executed(cpu: c_uint, data: *mut c_void) {
    with(|recorder| recorder.executed(cpu, data.addr() as u32));
}

extern "C" fn accessed(cpu: c_uint, info: u32, address: u64, data: *mut c_void) {
    // SAFETY: of an access that has just been made.
    let (is_store, size) =
        unsafe { (qemu_plugin_mem_is_store(info), 1 << qemu_plugin_mem_size_shift(info)) };
    with(|recorder| recorder.accessed(cpu, data.addr() as u32, address, size, is_store));
}

impl Recorder {
    fn put(&mut self, kind: Kind, cpu: u32, number: u32, address: u64, value: u64) {
        if !matches!(kind, Kind::Touched) {
            self.touched.clear();
        }
        let mut record = [0; 24];
        record[0] = kind as u8;
        record[1] = cpu as u8;
        record[4..8].copy_from_slice(&number.to_le_bytes());
        record[8..16].copy_from_slice(&address.to_le_bytes());
        record[16..24].copy_from_slice(&value.to_le_bytes());
        self.buffer.extend_from_slice(&record);
        if self.buffer.len() > 1 << 16 {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if let Some(file) = &mut self.options.file {
            // What is not there is missed when it is read: the end is.
            let _ = file.write_all(&self.buffer);
        }
        self.buffer.clear();
    }

    /// The word at an address of memory.
    fn word(&self, address: u64) -> u64 {
        match self.base {
            Some(base) if (MEMORY..self.options.end).contains(&address) => {
                let at = base.wrapping_add((address - MEMORY) as usize & !7);
                // SAFETY: inside of the machine's memory, which is in one piece.
                unsafe { at.cast::<u64>().read_volatile() }
            }
            _ => 0,
        }
    }

    fn said(&mut self, cpu: u32) -> &mut [Option<u64>; REPORTS] {
        let cpu = cpu as usize;
        if self.said.len() <= cpu {
            self.said.resize(cpu + 1, [None; REPORTS]);
        }
        &mut self.said[cpu]
    }

    fn executed(&mut self, cpu: u32, instruction: u32) {
        // System instructions with op1, CRn and the rest, and the register: a TLBI, or the load of
        // a root.
        let said = match instruction >> 19 & 0x1fff {
            0b1_1010_1010_0001 => self.said(cpu)[Report::Operand as usize].take(),
            0b1_1010_1010_0011 => self.said(cpu)[Report::Root as usize].take(),
            _ => None,
        };
        self.put(Kind::Executed, cpu, instruction, u64::from(said.is_some()), said.unwrap_or(0));
    }

    fn accessed(&mut self, cpu: u32, instruction: u32, address: u64, size: u64, is_store: bool) {
        let reported = self.options.reported;
        if (reported..reported + 8 * REPORTS as u64).contains(&address) {
            if is_store {
                self.report(cpu, ((address - reported) / 8) as usize, self.word(address));
            }
            return;
        }
        if self.options.slots.contains(&address) {
            let offset = address - self.options.slots.start;
            // The epoch is the first word.
            if offset.is_multiple_of(SLOT) {
                let kind = if is_store { Kind::SlotWritten } else { Kind::SlotRead };
                self.put(kind, cpu, 0, offset / SLOT, self.word(address));
            }
            return;
        }
        if address < self.frames.start || self.frames.is_empty() || address >= self.options.end {
            return;
        }
        let frame = ((address - self.frames.start) / PAGE) as usize;
        // Behind the frames is what may be the guest's.
        if self.uses.get(frame).is_none_or(|used| *used == Use::Data) {
            let page = address & !(PAGE - 1);
            if !self.touched.contains(&(cpu, page)) {
                self.touched.truncate(NEAR - 1);
                self.touched.push_front((cpu, page));
                self.put(Kind::Touched, cpu, 0, page, 0);
            }
        } else if is_store {
            for word in (address & !7..address + size).step_by(8) {
                self.put(Kind::Store, cpu, instruction, word, self.word(word));
            }
        }
    }

    fn report(&mut self, cpu: u32, what: usize, value: u64) {
        let is_operand = what == Report::Operand as usize || what == Report::Root as usize;
        // Nothing else is 0: the words are cleared when the hypervisor starts.
        if value == 0 && !is_operand {
            return;
        }
        self.said(cpu)[what] = Some(value);
        let frame = |frames: &Range<u64>| {
            let offset = value.checked_sub(frames.start)?;
            Some((offset / PAGE) as usize)
        };
        match what {
            _ if what == Report::First as usize => self.frames = value..value,
            _ if what == Report::Last as usize => {
                self.frames.end = value + 1;
                let count = (self.frames.end - self.frames.start) / PAGE;
                self.uses = vec![Use::None; count as usize];
            }
            _ => {
                let used = match what {
                    _ if what == Report::Taken as usize => Some(Use::Table),
                    _ if what == Report::Data as usize => Some(Use::Data),
                    _ if what == Report::Given as usize => Some(Use::None),
                    _ => None,
                };
                let frame = frame(&self.frames).and_then(|frame| self.uses.get_mut(frame));
                if let (Some(used), Some(frame)) = (used, frame) {
                    *frame = used;
                }
            }
        }
        if is_operand {
            return;
        }
        self.put(Kind::Said, cpu, what as u32, 0, value);
        if what == Report::End as usize {
            self.leave();
        }
    }

    /// Leaves the tables as they are in the end, by which it is seen that no store was missed.
    fn leave(&mut self) {
        let uses = std::mem::take(&mut self.uses);
        let tables = (self.frames.clone().step_by(PAGE as usize)).zip(uses);
        for (frame, _) in tables.filter(|(_, used)| *used == Use::Table) {
            for word in (frame..frame + PAGE).step_by(8) {
                let value = self.word(word);
                self.put(Kind::Left, 0, 0, word, value);
            }
        }
        self.put(Kind::Said, 0, Report::End as u32, 0, 0);
        self.flush();
    }
}
