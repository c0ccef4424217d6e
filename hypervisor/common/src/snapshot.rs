//! What a guest writes is logged, and copied while it runs, by a processor that is not the guest's.
//!
//! # A live snapshot
//!
//! 1. A log starts: nothing can be written that is not marked first.
//! 2. All memory is copied; then, in rounds, what was written meanwhile. Each round takes the
//!    marks, protects those pages, waits until every processor has forgotten that they could be
//!    written, and copies. The guest runs all the time.
//! 3. The guest stops ([`Gate`]). What was written since the last round is copied.
//! 4. **Every page is compared** with the one that the guest has.
//! 5. As a second proof the guest goes on *on the copy*: its frames are put behind its pages, and
//!    those it had until now are poisoned. Its processors hold what they held when it stopped.
//!
//! # When it begins
//!
//! When the guest's load is at work, which only the guest knows: it rings a bell, by a register of
//! the hypervisor's. It reads there whether the copy is through, and goes on as long as it is not.
//! A guest that knows nothing of it is copied after a time.
//!
//! # How a guest is stopped
//!
//! The [`Gate`] is closed. Where an interrupt brings a processor back from its guest, each comes to
//! the gate and waits there. On arm64 no interrupt reaches a virtual CPU but its own. So its memory
//! is taken away: all of it is write-protected in one pass over the root, and each virtual CPU
//! comes by itself, with its next access, and waits at the gate. One that waits for an interrupt
//! writes nothing, and when it wakes its next instruction is such an access.
//!
//! There the guest's time does not pass either: each processor's virtual counter is set back by as
//! much as the guest stood still, before its next instruction. To compare 1 GiB takes an emulator
//! half a minute, which a guest's watchdog would take for a fault.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use spin::mutex::{SpinMutex, SpinMutexGuard};
use tablewright::dirty::{Bitmap, Marker, Ring, RingEntry};
use tablewright::guest::{Access, Fault, Harvest, Log as SlotLog, Pass, Slot};
use tablewright::shared::SharedPlatform as _;
use tablewright::{Change, Format as _, Ipa, Pa, Span};

use crate::memory::{Memory, poison, reclaim, take_away};
use crate::pieces::{MOST, Pieces};
use crate::{Event, Gather, Guest, Host, PROCESSORS, relax};

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
    /// A bitmap; all tables are write-protected in one step.
    All,
    /// A bitmap, into which is taken what hardware has marked in the leaves.
    Hardware,
}

impl Kind {
    /// The kind of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "bitmap" => Some(Self::Bitmap),
            "ring" => Some(Self::Ring),
            "all" => Some(Self::All),
            "hardware" => Some(Self::Hardware),
            _ => None,
        }
    }
}

static RUNG: AtomicBool = AtomicBool::new(false);

/// The guest rings the bell.
pub fn ring() {
    RUNG.store(true, Ordering::Release);
}

/// What the guest reads at the bell: whether it was copied, and runs on the copy.
pub fn is_over<H: Host>() -> bool {
    H::counted(Event::Resumed) != 0
}

/// When a copy begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// When the guest rings the bell.
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

/// Where every virtual CPU passes with each fault, or each time it is entered, and waits while it
/// is closed.
#[derive(Debug)]
pub struct Gate {
    closed: AtomicBool,
    inside: [AtomicBool; PROCESSORS],
}

impl Gate {
    /// An open one.
    #[expect(clippy::new_without_default, reason = "it is a constant")]
    pub const fn new() -> Self {
        Self {
            closed: AtomicBool::new(false),
            inside: [const { AtomicBool::new(false) }; PROCESSORS],
        }
    }

    /// This processor passes, when it is open.
    pub fn enter<H: Host>(&self, cpu: usize) {
        let Some(inside) = self.inside.get(cpu) else {
            return;
        };
        loop {
            // One of the two, this one and the one that closes it, sees what the other has stored.
            inside.store(true, Ordering::SeqCst);
            if !self.closed.load(Ordering::SeqCst) {
                H::passed();
                return;
            }
            inside.store(false, Ordering::SeqCst);
            while self.closed.load(Ordering::Relaxed) {
                relax::<H>();
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
    fn close<H: Host>(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for (cpu, inside) in self.inside.iter().enumerate() {
            if inside.load(Ordering::SeqCst) {
                H::summon(cpu);
            }
            while inside.load(Ordering::SeqCst) {
                relax::<H>();
            }
        }
    }

    fn open(&self) {
        self.closed.store(false, Ordering::SeqCst);
    }
}

/// The marks of one slot.
struct Marks {
    /// Its first page, of all pages of the guest's memory.
    first: u64,
    pages: u64,
    start: Ipa,
    bitmap: Bitmap<'static>,
}

/// The marks of the guest's memory.
pub struct Log {
    kind: Kind,
    /// One for each slot of memory.
    marks: [Option<Marks>; MOST],
    rings: [Option<Ring<'static>>; PROCESSORS],
    /// What is still to be copied. Only the processor that copies uses it.
    todo: &'static [AtomicU64],
}

impl Log {
    /// A log of this memory, each piece of which is a slot, and of which all but the last have a
    /// multiple of 64 pages. `words` are two for each 64 pages.
    pub fn new<H: Host>(
        kind: Kind,
        guest: &Pieces,
        words: &'static mut [AtomicU64],
    ) -> Option<Self> {
        static ENTRIES: SpinMutex<[[RingEntry; RING]; PROCESSORS]> =
            SpinMutex::new([const { [const { RingEntry::new() }; RING] }; PROCESSORS]);
        // There is one log: of several guests, the first has rings.
        let entries = ENTRIES.try_lock().map(SpinMutexGuard::leak);
        let pages = guest.size() / H::PAGE;
        let (mut rest, todo) = words.split_at_mut_checked(pages.div_ceil(64) as usize)?;
        let mut marks = [const { None }; MOST];
        for (place, (before, piece)) in marks.iter_mut().zip(guest.iter()) {
            let pages = piece.size() / H::PAGE;
            let own;
            (own, rest) = rest.split_at_mut_checked(pages.div_ceil(64) as usize)?;
            *place = Some(Marks {
                first: before / H::PAGE,
                pages,
                start: piece.start(),
                bitmap: Bitmap::new(own, pages).ok()?,
            });
        }
        Some(Self {
            kind,
            marks,
            rings: match entries {
                Some(entries) => entries.each_mut().map(|entries| Ring::new(entries).ok()),
                None => [const { None }; PROCESSORS],
            },
            todo,
        })
    }

    /// Where this processor marks what its guest has written.
    pub fn marker(&self, cpu: usize, slot: &Slot) -> Marker<'_> {
        match (self.kind, self.rings.get(cpu)) {
            (Kind::Ring, Some(Some(ring))) => Marker::Ring(ring, slot.id),
            _ => Marker::Bitmap(&self.marks_of(slot).bitmap),
        }
    }

    /// Marks of the pages of a slot of memory.
    fn marks_of(&self, slot: &Slot) -> &Marks {
        let mut all = self.marks.iter().flatten();
        let found = all.find(|marks| marks.start == slot.guest.start());
        found.unwrap_or_else(|| panic!("a slot is logged that is no memory"))
    }

    /// The page was written by the hypervisor, or moved.
    pub fn mark(&self, page: u64) {
        let mut all = self.marks.iter().flatten();
        if let Some(marks) = all.find(|marks| page.wrapping_sub(marks.first) < marks.pages) {
            marks.bitmap.mark(page - marks.first);
        }
    }

    fn to_do(&self, page: u64) {
        if let Some(word) = self.todo.get((page / 64) as usize) {
            word.fetch_or(1 << (page % 64), Ordering::Relaxed);
        }
    }
}

/// Waits so many milliseconds.
fn sleep<H: Host>(milliseconds: u64) {
    let end = H::now() + H::ticks_per_ms() * milliseconds;
    loop {
        match end.checked_sub(H::now()) {
            Some(left) if left != 0 => H::rest(left),
            _ => return,
        }
    }
}

/// A guest whose writes are logged.
pub struct Watched<H: Host> {
    /// The guest.
    pub guest: &'static Guest<H>,
    /// Its memory.
    pub memory: &'static Memory<H>,
    /// Where marks go.
    pub log: &'static Log,
    /// The slots of memory, without a log.
    pub plain: Slots,
}

/// The slots of a guest's memory, in order.
pub type Slots = [Option<Slot>; MOST];

/// A log of one guest, while it is driven.
struct Driver<H: Host> {
    guest: &'static Guest<H>,
    memory: &'static Memory<H>,
    gather: Gather<H>,
    log: &'static Log,
    plain: Slots,
    pages: u64,
}

impl<H: Host> Driver<H> {
    fn new(watched: Watched<H>) -> Self {
        let Watched {
            guest,
            memory,
            log,
            plain,
        } = watched;
        Self {
            guest,
            memory,
            gather: guest.gather(),
            log,
            plain,
            pages: plain
                .iter()
                .flatten()
                .map(|slot| slot.guest.size() / H::PAGE)
                .sum(),
        }
    }

    fn machine(&self) -> &'static H {
        self.guest.space().platform()
    }

    /// How many entries of the root say something.
    fn roots(&self) -> u64 {
        let (space, level) = (self.guest.space(), H::Format::root_level());
        // SAFETY: the root of a space that lives as long as the guest (1.).
        let root = unsafe { self.machine().table(space.root(), level) };
        // SAFETY: an entry of it.
        let is_used = |index| unsafe { root.add(index).as_ref().load() != 0 };
        (0..H::Format::entries(level))
            .filter(|&index| is_used(index))
            .count() as u64
    }

    fn logged(&self, plain: &Slot) -> Slot {
        plain.with_log(match self.log.kind {
            Kind::Hardware => SlotLog::ByHardware,
            _ => SlotLog::ByFault,
        })
    }

    /// Starts the log, harvests it so often, after so many milliseconds each time, and ends it.
    fn log(&mut self, times: u32, apart: u64) {
        self.start();
        for _ in 0..times {
            sleep::<H>(apart);
            self.harvest();
        }
        self.stop();
    }

    /// Starts the log: from here on nothing is written that is not marked.
    fn start(&mut self) {
        let guest = self.guest;
        let plain = self.plain;
        for slot in plain.iter().flatten() {
            let mut zap = retried::<H, _>(|| guest.replace(self.logged(slot)).ok());
            match self.log.kind {
                // What was written before counts as written since, where hardware marks it.
                Kind::All | Kind::Hardware => drop(zap),
                Kind::Bitmap | Kind::Ring => {
                    let change = Change::new().write_protect();
                    loop {
                        match zap.protect(&mut self.gather, change) {
                            Ok(Pass::Waiting) => relax::<H>(),
                            Ok(Pass::Went) => self.forget(),
                            Ok(Pass::Over) => break,
                            Err(error) => panic!("the guest's memory cannot be protected: {error}"),
                        }
                    }
                }
            }
        }
        if self.log.kind == Kind::All {
            self.protect_all();
        }
        H::count(Event::Logs, 1);
    }

    /// Takes the permission to write from everything at once.
    fn protect_all(&self) {
        // No other does.
        let all = retried::<H, _>(|| self.guest.space().protect_all().ok());
        let machine = self.machine();
        machine.forget_permissions(|| all.drive(relax::<H>));
    }

    /// Waits until all processors have forgotten that what was protected could be written.
    fn forget(&mut self) {
        let machine = self.machine();
        machine.forget_permissions(|| reclaim(&mut self.gather));
    }

    /// Takes the marks, and protects what they say again. What was found is to be copied, and may
    /// be.
    fn harvest(&mut self) {
        let (plain, log) = (self.plain, self.log);
        for slot in plain.iter().flatten() {
            let marks = log.marks_of(slot);
            // With rings too: for what the hypervisor has moved.
            let found = self.gather.harvest(
                &self.logged(slot),
                &marks.bitmap,
                0..marks.pages,
                Harvest::empty(),
                |first, bits| {
                    H::count(Event::Marks, u64::from(bits.count_ones()));
                    log.todo[((marks.first + first) / 64) as usize]
                        .fetch_or(bits, Ordering::Relaxed);
                },
            );
            found.unwrap_or_else(|error| panic!("the log cannot be harvested: {error}"));
        }
        let rings = log.rings.each_ref().map(Option::as_ref);
        let collected = rings.map(|ring| {
            ring?.harvest(|_, _| H::count(Event::Marks, 1));
            Some(ring?.collect(|id, page| {
                let Some(slot) = plain.iter().flatten().find(|slot| slot.id == id) else {
                    return;
                };
                let marks = log.marks_of(slot);
                log.to_do(marks.first + page);
                match self.gather.protect(&self.logged(slot), page..page + 1) {
                    Ok(protected) if !protected.passed_over => {}
                    // It is not protected, and may be written: it is marked until it is.
                    _ => marks.bitmap.mark(page),
                }
            }))
        });
        if !H::copies_first() {
            self.forget();
        }
        for collected in collected.into_iter().flatten() {
            collected.release();
        }
    }

    /// Ends the log, while the guest runs: blocks come back in place.
    fn stop(&mut self) {
        let guest = self.guest;
        let plain = self.plain;
        for &slot in plain.iter().flatten() {
            drop(retried::<H, _>(|| guest.replace(slot).ok()));
        }
        while guest.protect_no_more().is_err() {
            relax::<H>();
        }
        for slot in plain.iter().flatten() {
            let blocks = slot.guest.size() / H::BLOCK;
            for first in (0..blocks).step_by(TOGETHER) {
                for block in (first..blocks).take(TOGETHER) {
                    let at = Ipa::new(slot.guest.start().get() + block * H::BLOCK);
                    // Made up: there was no fault. Where nothing is mapped, nothing comes back.
                    if let (Ok(request), Some(page)) = (
                        guest.request(&Fault::new(at, Access::Read)),
                        self.memory.look_up(at),
                    ) && self.gather.collapse(&request, &page) == Ok(true)
                    {
                        H::count(Event::Collapsed, 1);
                    }
                }
                reclaim(&mut self.gather);
            }
        }
    }
}

/// What others may be in the way of, for a short time.
fn retried<H: Host, T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    loop {
        match attempt() {
            Some(done) => return done,
            None => relax::<H>(),
        }
    }
}

/// Starts a log, harvests it for a while, ends it, and begins again, as long as the guest runs.
pub fn log_for_ever<H: Host>(watched: Watched<H>) -> ! {
    let mut driver = Driver::new(watched);
    loop {
        sleep::<H>(200);
        driver.log(10, 50);
    }
}

/// The same once: it is harvested five times in a tenth of a second.
pub fn log_for_a_while<H: Host>(watched: Watched<H>) {
    Driver::new(watched).log(5, 20);
}

/// Maps all memory of a guest that does not run, as its faults would, and starts a log: so much is
/// to be measured.
pub fn start_one<H: Host>(
    watched: Watched<H>,
    fault: impl Fn(&Fault),
    instructions: impl Fn() -> u32,
) {
    let mut driver = Driver::new(watched);
    for page in 0..driver.pages {
        if let Some(at) = driver.memory.at(page) {
            fault(&Fault::new(at, Access::Write));
        }
    }
    H::count(Event::Roots, driver.roots());
    let begun = instructions();
    driver.start();
    let took = instructions().wrapping_sub(begun);
    H::count(Event::Starting, took.into());
}

/// Makes a copy of the running guest in `area`, compares it, and lets the guest go on on it.
pub fn take<H: Host>(watched: Watched<H>, gate: &Gate, area: Span<Pa>, begin: Begin) {
    let Watched {
        guest,
        memory,
        log,
        plain,
    } = watched;
    let mut driver = Driver::new(watched);
    let copy_of = |page: u64| area.start().get() + page * H::PAGE;
    let frame_of = |page: u64| {
        retried::<H, _>(|| memory.look_up(memory.at(page)?))
            .frame
            .get()
            & !(H::PAGE - 1)
    };
    let copy = |page: u64| {
        let from = frame_of(page);
        // The guest may have written past the caches.
        guest.space().platform().clean(Pa::new(from), H::PAGE);
        // SAFETY: two frames that are mapped one to one. The guest may write the first meanwhile:
        // then the page is marked, and copied again.
        unsafe { copy_page::<H>(from, copy_of(page)) };
        H::count(Event::Copied, 1);
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
        Begin::After(milliseconds) => sleep::<H>(milliseconds),
        Begin::Bell => {
            while !RUNG.load(Ordering::Acquire) {
                H::rest(H::ticks_per_ms());
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
        H::count(Event::Rounds, 1);
        let copied = copy_to_do();
        if H::copies_first() {
            driver.forget();
        }
        if copied < 64 {
            break;
        }
    }

    gate.close::<H>();
    match log.kind {
        // Hardware would take what is write-protected for writable. It has marked the leaves that
        // are taken away.
        Kind::Hardware => {
            for slot in plain.iter().flatten() {
                take_away(guest.zap(slot.guest), &mut driver.gather, |leaf| {
                    memory.written(leaf, |page| log.mark(page));
                });
            }
        }
        _ => driver.protect_all(),
    }
    // No processor writes anything of the guest from here on.
    let stopped = H::now();
    driver.harvest();
    H::count(Event::Rounds, 1);
    copy_to_do();
    for page in 0..driver.pages {
        // SAFETY: two frames that are mapped one to one; they are not written now.
        let is_equal = unsafe { is_equal::<H>(frame_of(page), copy_of(page)) };
        H::count(Event::Compared, 1);
        H::count(Event::Different, u64::from(!is_equal));
    }

    // From here on the guest is the copy.
    let zaps = plain.map(|slot| {
        let slot = slot?;
        Some(retried::<H, _>(|| guest.replace(slot).ok()))
    });
    while guest.protect_no_more().is_err() {
        relax::<H>();
    }
    for zap in zaps.into_iter().flatten() {
        take_away(zap, &mut driver.gather, |_| ());
    }
    for page in 0..driver.pages {
        // SAFETY: nothing maps the guest's frames any more.
        unsafe { poison::<H>(frame_of(page)) };
    }
    memory.move_to(area);
    H::count(Event::Resumed, 1);
    H::stood(H::now() - stopped);
    gate.open();
}

/// # Safety
/// 1. Both are frames, mapped at their addresses, and different.
unsafe fn copy_page<H: Host>(from: u64, to: u64) {
    let (from, to) = (
        ptr::with_exposed_provenance::<u64>(from as usize),
        ptr::with_exposed_provenance_mut::<u64>(to as usize),
    );
    for word in 0..(H::PAGE / 8) as usize {
        // SAFETY: inside of the frames (1.). Volatile, because the guest may write the first at the
        // same time.
        unsafe { to.add(word).write_volatile(from.add(word).read_volatile()) };
    }
}

/// # Safety
/// 1. Both are frames, mapped at their addresses, and not written.
unsafe fn is_equal<H: Host>(one: u64, other: u64) -> bool {
    let words = (H::PAGE / 8) as usize;
    // SAFETY: passed on (1.).
    let [one, other] = [one, other].map(|frame| unsafe {
        core::slice::from_raw_parts(ptr::with_exposed_provenance::<u64>(frame as usize), words)
    });
    // By words: the comparison of slices goes by bytes here.
    one.iter()
        .zip(other)
        .fold(0, |all, (one, other)| all | one ^ other)
        == 0
}
