//! The guests, and what each has beside its memory.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use arm_sysregs::el0::accessors::read_cntpct_el0;
use spin::once::Once;

use super::vcpu::Vcpu;
use crate::console;
use crate::count::Mutex;

/// An address at which a guest writes a word when its load is at work, and reads one that says
/// whether it was copied, or, of several guests, whether its time is over. The machine has nothing
/// there.
pub const BELL: u64 = 0xb00_0000;

/// One guest, beside its memory.
pub struct One {
    /// `GICD_CTLR`.
    pub distributor: AtomicU32,
    /// Its console.
    pub line: Mutex<Line>,
    /// Whether it has switched itself off.
    pub over: AtomicBool,
}

/// All guests.
pub struct Crowd {
    /// Each.
    pub guests: Vec<One>,
    /// Their vCPUs, guest by guest.
    pub vcpus: Vec<Vcpu>,
    /// The address of the redistributors, of the machine and for each guest.
    pub redistributors: u64,
    /// The address of the distributor.
    pub distributor: u64,
    /// How many are not over.
    pub live: AtomicUsize,
    /// The next of which frames are taken away.
    pub next: AtomicUsize,
    /// When their time is over.
    pub end: u64,
}

static CROWD: Once<Crowd> = Once::new();

/// Begins with several guests.
pub fn begin(crowd: Crowd) {
    CROWD.call_once(|| crowd);
}

/// Whether there are several guests.
pub fn are_several() -> bool {
    CROWD.is_completed()
}

/// All guests.
pub fn crowd() -> &'static Crowd {
    match CROWD.get() {
        Some(crowd) => crowd,
        None => panic!("there is one guest"),
    }
}

impl One {
    /// A guest that has said nothing yet.
    pub const fn new() -> Self {
        Self {
            distributor: AtomicU32::new(0),
            line: spin::mutex::SpinMutex::new(Line { bytes: [0; Line::MOST], len: 0 }),
            over: AtomicBool::new(false),
        }
    }
}

impl Crowd {
    /// The vCPUs of a guest.
    pub fn of(&self, guest: usize) -> &[Vcpu] {
        let each = self.vcpus.len() / self.guests.len();
        &self.vcpus[guest * each..(guest + 1) * each]
    }

    /// Whether a guest has switched itself off.
    pub fn is_over(&self, guest: usize) -> bool {
        self.guests[guest].over.load(Ordering::Relaxed)
    }

    /// Whether the time of all is over.
    pub fn is_late(&self) -> bool {
        read_cntpct_el0().bits() >= self.end
    }
}

/// A line of a guest's console, until it is full.
pub struct Line {
    bytes: [u8; Self::MOST],
    len: usize,
}

impl Line {
    const MOST: usize = 240;

    /// Adds a byte, and says the line that it ends.
    pub fn push(&mut self, guest: usize, byte: u8) {
        if byte == b'\n' || self.len == Self::MOST {
            let text = core::str::from_utf8(&self.bytes[..self.len]);
            let text = text.unwrap_or("(what it says is no text)").trim_end();
            static ONE_AT_A_TIME: Mutex<()> = spin::mutex::SpinMutex::new(());
            let _one = ONE_AT_A_TIME.lock();
            console::say(format_args!("[g{guest}] {text}"));
            self.len = 0;
        }
        if byte != b'\n' {
            self.bytes[self.len] = byte;
            self.len += 1;
        }
    }
}
