//! What a guest writes is logged, and copied while it runs, by a processor that is not the guest's.
//!
//! # A live snapshot
//!
//! 1. A log starts: nothing can be written that is not marked first.
//! 2. All memory is copied; then, in rounds, what was written meanwhile. Each round takes the marks, protects those pages,
//!    waits until every processor has forgotten that they could be written, and copies. The guest runs all the time.
//! 3. The guest stops ([`Gate`]). What was written since the last round is copied.
//! 4. **Every page is compared** with the one that the guest has.
//! 5. As a second proof the guest goes on *on the copy*: its frames are put behind its pages, and those it had until now are
//!    poisoned. Its processors hold what they held when it stopped.
//!
//! # When it begins
//!
//! When the guest's load is at work, which only the guest knows: it writes to the [bell](BELL), a register that is nowhere else. It
//! reads there whether the copy is through, and goes on as long as it is not. A guest that knows nothing of it is copied after a
//! time.
//!
//! # How a guest is stopped
//!
//! No interrupt reaches a virtual CPU but its own. So its memory is taken away: the [`Gate`] is closed, all of the guest's
//! memory is put to sleep in one pass over the root, and each virtual CPU comes by itself, with its next access, and waits
//! at the gate. One that waits for an interrupt writes nothing, and when it wakes its next instruction is such an access.
//! Nor does the guest's time pass: each processor's virtual counter is set back by as much as the guest stood still, before its
//! next instruction. To compare 1 GiB takes an emulator half a minute, which a guest's watchdog would take for a fault.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arm_sysregs::el0::accessors::{read_cntfrq_el0, read_cntpct_el0};
use spin::RelaxStrategy as _;
use tablewright::dirty::{Bitmap, Marker, Ring, RingEntry};
use tablewright::guest::{Access, Fault, Harvest, Log as SlotLog, Pass, Slot};
use tablewright::shared::SharedPlatform as _;
use tablewright::{Change, Ipa, Pa, Span};

use crate::counters::Count;
use crate::cpu;
use crate::machine::{Patience, count, counted};
use crate::memory::{poison, settle, take_away};
use crate::plant::{Plant, is_planted};
use crate::vm::{Gather, Vm};

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;

/// Blocks that come back together when a log ends: tables that are freed together.
const TOGETHER: usize = 64;

/// Entries of the ring of one virtual CPU.
const RING: usize = 1024;

/// Where marks go, and how a log starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A bitmap; each leaf is protected.
    Bitmap,
    /// A ring for each virtual CPU; each leaf is protected.
    Ring,
    /// A bitmap; all tables are put to sleep in one step.
    All,
}

impl Kind {
    /// The kind of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "bitmap" => Some(Self::Bitmap),
            "ring" => Some(Self::Ring),
            "all" => Some(Self::All),
            _ => None,
        }
    }
}

/// Where the guest writes a word when its load is at work, and reads one when it asks whether it was copied; the machine has
/// nothing there.
pub const BELL: u64 = 0xb00_0000;

static RUNG: AtomicBool = AtomicBool::new(false);

/// The guest has written to the [bell](BELL).
pub fn ring() {
    RUNG.store(true, Ordering::Release);
}

/// What the guest reads at the [bell](BELL): whether it was copied, and runs on the copy.
pub fn is_over() -> bool {
    counted(Count::Resumed) != 0
}

/// When a copy begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// When the guest rings the [bell](BELL).
    Bell,
    /// After so many milliseconds.
    After(u64),
}

impl Begin {
    /// `bell`, or a number.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "bell" => Some(Self::Bell),
            number => number.parse().ok().map(Self::After),
        }
    }
}

/// Where every virtual CPU passes with each fault, and waits while it is closed.
pub struct Gate {
    closed: AtomicBool,
    inside: [AtomicBool; cpu::MOST],
}

impl Gate {
    /// An open one.
    pub const fn new() -> Self {
        Self {
            closed: AtomicBool::new(false),
            inside: [const { AtomicBool::new(false) }; cpu::MOST],
        }
    }

    /// This processor passes, when it is open.
    pub fn enter(&self, cpu: usize) {
        let Some(inside) = self.inside.get(cpu) else {
            return;
        };
        loop {
            // One of the two, this one and the one that closes it, sees what the other has stored.
            inside.store(true, Ordering::SeqCst);
            if !self.closed.load(Ordering::SeqCst) {
                cpu::keep_time();
                return;
            }
            inside.store(false, Ordering::SeqCst);
            while self.closed.load(Ordering::Relaxed) {
                Patience::relax();
            }
        }
    }

    /// This processor goes back to its guest.
    pub fn leave(&self, cpu: usize) {
        if let Some(inside) = self.inside.get(cpu) {
            inside.store(false, Ordering::SeqCst);
        }
    }

    /// Lets no processor in, and waits until none is inside.
    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for inside in &self.inside {
            while inside.load(Ordering::SeqCst) {
                Patience::relax();
            }
        }
    }

    fn open(&self) {
        self.closed.store(false, Ordering::SeqCst);
    }
}

/// The marks of the guest's memory.
pub struct Log {
    kind: Kind,
    bitmap: Bitmap<'static>,
    rings: [Option<Ring<'static>>; cpu::MOST],
    /// What is still to be copied. Only the processor that copies uses it.
    todo: &'static [AtomicU64],
}

impl Log {
    /// A log for so many pages. `words` are two for each 64 pages.
    pub fn new(kind: Kind, pages: u64, words: &'static [AtomicU64]) -> Option<Self> {
        static ENTRIES: [[RingEntry; RING]; cpu::MOST] =
            [const { [const { RingEntry::new() }; RING] }; cpu::MOST];
        let (marks, todo) = words.split_at_checked(pages.div_ceil(64) as usize)?;
        Some(Self {
            kind,
            bitmap: Bitmap::new(marks, pages).ok()?,
            rings: ENTRIES.each_ref().map(|entries| Ring::new(entries).ok()),
            todo,
        })
    }

    /// Where this processor marks what its guest has written.
    pub fn marker(&self, cpu: usize, slot: &Slot) -> Marker<'_> {
        match (self.kind, self.rings.get(cpu)) {
            (Kind::Ring, Some(Some(ring))) => Marker::Ring(ring, slot.id),
            _ => Marker::Bitmap(&self.bitmap),
        }
    }

    /// The page was written by the hypervisor, or moved.
    pub fn mark(&self, page: u64) {
        self.bitmap.mark(page);
    }

    fn to_do(&self, page: u64) {
        if let Some(word) = self.todo.get((page / 64) as usize) {
            word.fetch_or(1 << (page % 64), Ordering::Relaxed);
        }
    }
}

/// Waits so many milliseconds.
fn sleep(milliseconds: u64) {
    let end = read_cntpct_el0().bits() + read_cntfrq_el0().bits() / 1000 * milliseconds;
    while read_cntpct_el0().bits() < end {
        Patience::relax();
    }
}

/// A log of one guest, while it is driven.
struct Driver {
    vm: &'static Vm,
    gather: Gather,
    log: &'static Log,
    /// The slot of memory, without a log.
    plain: Slot,
    pages: u64,
}

impl Driver {
    fn new(vm: &'static Vm, log: &'static Log, plain: Slot) -> Self {
        Self {
            vm,
            gather: vm.guest.gather(),
            log,
            plain,
            pages: plain.guest.size() / PAGE,
        }
    }

    fn logged(&self) -> Slot {
        self.plain.with_log(SlotLog::ByFault)
    }

    /// Starts the log: from here on nothing is written that is not marked.
    fn start(&mut self) {
        let guest = &self.vm.guest;
        let mut zap = retried(|| guest.replace(self.logged()).ok());
        match self.log.kind {
            Kind::All => {
                drop(zap);
                self.protect_all();
            }
            Kind::Bitmap | Kind::Ring => {
                let change = Change::new().write_protect();
                loop {
                    match zap.protect(&mut self.gather, change) {
                        Ok(Pass::Waiting) => Patience::relax(),
                        Ok(Pass::Went) => self.forget(),
                        Ok(Pass::Over) => break,
                        Err(error) => panic!("the guest's memory cannot be protected: {error}"),
                    }
                }
            }
        }
        count(Count::Logs, 1);
    }

    /// Takes the permission to write from everything at once.
    fn protect_all(&self) {
        // No other does.
        let all = retried(|| self.vm.guest.space().protect_all().ok());
        let machine = self.vm.machine();
        machine.forget_permissions(|| all.drive(Patience::relax));
    }

    /// Waits until all processors have forgotten that what was protected could be written.
    fn forget(&mut self) {
        let machine = self.vm.machine();
        machine.forget_permissions(|| settle(&mut self.gather));
    }

    /// Takes the marks, and protects what they say again. What was found is to be copied, and may be.
    fn harvest(&mut self) {
        let (logged, log) = (self.logged(), self.log);
        // With rings too: for what the hypervisor has moved.
        let found = self.gather.harvest(
            &logged,
            &log.bitmap,
            0..self.pages,
            Harvest::empty(),
            |first, bits| {
                count(Count::Marks, u64::from(bits.count_ones()));
                log.todo[(first / 64) as usize].fetch_or(bits, Ordering::Relaxed);
            },
        );
        found.unwrap_or_else(|error| panic!("the log cannot be harvested: {error}"));
        let rings = log.rings.each_ref().map(Option::as_ref);
        let collected = rings.map(|ring| {
            ring?.harvest(|_, _| count(Count::Marks, 1));
            Some(ring?.collect(|_, page| {
                log.to_do(page);
                match self.gather.protect(&logged, page..page + 1) {
                    Ok(protected) if !protected.passed_over => {}
                    // It is not protected, and may be written: it is marked until it is.
                    _ => log.bitmap.mark(page),
                }
            }))
        });
        if !is_planted(Plant::CopyFirst) {
            self.forget();
        }
        for (ring, collected) in rings.into_iter().zip(collected) {
            if let (Some(ring), Some(collected)) = (ring, collected) {
                ring.release(collected);
            }
        }
    }

    /// Ends the log, while the guest runs: blocks come back in place.
    fn stop(&mut self) {
        let guest = &self.vm.guest;
        drop(retried(|| guest.replace(self.plain).ok()));
        while guest.protect_no_more().is_err() {
            Patience::relax();
        }
        let blocks = self.plain.guest.size() / BLOCK;
        for first in (0..blocks).step_by(TOGETHER) {
            for block in (first..blocks).take(TOGETHER) {
                let at = Ipa::new(self.plain.guest.start().get() + block * BLOCK);
                // Made up: there was no fault. Where nothing is mapped, nothing comes back.
                if let (Ok(request), Some(page)) = (
                    guest.request(&Fault::new(at, Access::Read)),
                    self.vm.memory.look_up(at),
                ) && self.gather.collapse(&request, &page) == Ok(true)
                {
                    count(Count::Recovered, 1);
                }
            }
            settle(&mut self.gather);
        }
    }
}

/// What others may be in the way of, for a moment.
fn retried<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    loop {
        match attempt() {
            Some(done) => return done,
            None => Patience::relax(),
        }
    }
}

/// Starts a log, harvests it for a while, ends it, and begins again, as long as the guest runs.
pub fn log_for_ever(vm: &'static Vm, log: &'static Log, plain: Slot) -> ! {
    let mut driver = Driver::new(vm, log, plain);
    loop {
        sleep(200);
        driver.start();
        for _ in 0..10 {
            sleep(50);
            driver.harvest();
        }
        driver.stop();
    }
}

/// Maps all memory of a guest that does not run, as its faults would, and starts a log: so much is to be measured.
pub fn start_one(vm: &'static Vm, log: &'static Log, plain: Slot) {
    let mut driver = Driver::new(vm, log, plain);
    for page in 0..driver.pages {
        let at = Ipa::new(plain.guest.start().get() + page * PAGE);
        vm.fault(&Fault::new(at, Access::Write));
    }
    count(Count::Roots, vm.roots());
    cpu::count_instructions();
    let begun = cpu::instructions();
    driver.start();
    let took = cpu::instructions().wrapping_sub(begun);
    count(Count::Starting, u64::from(took));
}

/// Makes a copy of the running guest in `area`, compares it, and lets the guest go on on it.
pub fn take(vm: &'static Vm, log: &'static Log, plain: Slot, area: Span<Pa>, begin: Begin) {
    let mut driver = Driver::new(vm, log, plain);
    let copy_of = |page: u64| area.start().get() + page * PAGE;
    let frame_of = |page: u64| {
        let at = Ipa::new(plain.guest.start().get() + page * PAGE);
        retried(|| vm.memory.look_up(at)).frame.get() & !(PAGE - 1)
    };
    let copy = |page: u64| {
        let from = frame_of(page);
        // The guest may have written past the caches.
        vm.machine().clean(Pa::new(from), PAGE);
        // SAFETY: two frames that are mapped one to one. The guest may write the first meanwhile: then the page is marked,
        // and copied again.
        unsafe { copy_page(from, copy_of(page)) };
        count(Count::Copied, 1);
    };
    let copy_to_do = || {
        let mut copied = 0;
        for (first, word) in (0..).step_by(64).zip(log.todo) {
            let mut bits = word.swap(0, Ordering::Relaxed);
            while bits != 0 {
                copy(first + u64::from(bits.trailing_zeros()));
                bits &= bits - 1;
                copied += 1;
            }
        }
        copied
    };

    match begin {
        Begin::After(milliseconds) => sleep(milliseconds),
        Begin::Bell => {
            while !RUNG.load(Ordering::Acquire) {
                Patience::relax();
            }
        }
    }
    driver.start();
    for page in 0..driver.pages {
        copy(page);
        // Rings are short.
        if page % 512 == 511 && log.kind == Kind::Ring {
            driver.harvest();
        }
    }
    for _ in 0..20 {
        driver.harvest();
        count(Count::Rounds, 1);
        let copied = copy_to_do();
        if is_planted(Plant::CopyFirst) {
            driver.forget();
        }
        if copied < 64 {
            break;
        }
    }

    vm.gate.close();
    driver.protect_all();
    // No processor executes anything of the guest from here on.
    let stopped = read_cntpct_el0().bits();
    driver.harvest();
    count(Count::Rounds, 1);
    copy_to_do();
    for page in 0..driver.pages {
        // SAFETY: two frames that are mapped one to one; they are not written now.
        let is_equal = unsafe { is_equal(frame_of(page), copy_of(page)) };
        count(Count::Compared, 1);
        count(Count::Different, u64::from(!is_equal));
    }

    // From here on the guest is the copy.
    let zap = retried(|| vm.guest.replace(plain).ok());
    while vm.guest.protect_no_more().is_err() {
        Patience::relax();
    }
    take_away(zap, &mut driver.gather);
    for page in 0..driver.pages {
        // SAFETY: nothing maps the guest's frames any more.
        unsafe { poison(frame_of(page)) };
    }
    vm.memory.move_to(area);
    count(Count::Resumed, 1);
    cpu::stood(read_cntpct_el0().bits() - stopped);
    vm.gate.open();
}

/// # Safety
/// 1. Both are frames, mapped at their addresses, and different.
unsafe fn copy_page(from: u64, to: u64) {
    let (from, to) = (
        ptr::with_exposed_provenance::<u64>(from as usize),
        ptr::with_exposed_provenance_mut::<u64>(to as usize),
    );
    for word in 0..(PAGE / 8) as usize {
        // SAFETY: inside of the frames (1.). Volatile, because the guest may write the first at the same time.
        unsafe { to.add(word).write_volatile(from.add(word).read_volatile()) };
    }
}

/// # Safety
/// 1. Both are frames, mapped at their addresses, and not written.
unsafe fn is_equal(one: u64, other: u64) -> bool {
    // SAFETY: passed on (1.).
    let [one, other] = [one, other].map(|frame| unsafe {
        &*ptr::with_exposed_provenance::<[u64; (PAGE / 8) as usize]>(frame as usize)
    });
    // By words: the comparison of slices goes by bytes here.
    one.iter()
        .zip(other)
        .fold(0, |all, (one, other)| all | one ^ other)
        == 0
}
