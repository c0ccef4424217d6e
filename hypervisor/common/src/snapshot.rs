//! A guest's writes are logged, and copied while it runs, by a processor that is not the guest's.
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
//!
//! [`Gate`]: crate::log::Gate

use core::ptr;
use core::sync::atomic::Ordering;

use tablewright::guest::{Access, Fault, Harvest, Log as SlotLog, Pass, Slot};
use tablewright::shared::SharedPlatform as _;
use tablewright::{Change, Format as _, Ipa, Pa, Span};

use crate::counters::Event;
use crate::host::{Gather, Host, relax};
use crate::log::{Begin, Kind, Log, has_rung};
use crate::memory::{poison, reclaim, take_away};
use crate::vm::{Slots, Vm};

/// Blocks that come back together when a log ends: tables that are freed together.
const TOGETHER: usize = 64;

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
/// A log of one guest, while it is driven.
struct Driver<H: Host> {
    vm: &'static Vm<H>,
    log: &'static Log,
    gather: Gather<H>,
}

impl<H: Host> Driver<H> {
    fn new(vm: &'static Vm<H>) -> Self {
        let Some(log) = &vm.log else {
            panic!("the guest has no log");
        };
        let gather = vm.guest.gather();
        Self { vm, log, gather }
    }

    fn machine(&self) -> &'static H {
        self.vm.guest.space().platform()
    }

    fn slots(&self) -> Slots {
        self.vm.slots
    }

    fn pages(&self) -> u64 {
        self.vm.memory.pages()
    }

    /// Counts the entries of the root in use.
    fn roots(&self) -> u64 {
        let (space, level) = (self.vm.guest.space(), H::Format::root_level());
        // SAFETY: the root of a space that lives as long as the guest (1.).
        let root = unsafe { self.machine().table(space.root(), level) };
        // SAFETY: an entry of it.
        let is_used = |&index: &usize| unsafe { root.add(index).as_ref().load() != 0 };
        (0..H::Format::entries(level)).filter(is_used).count() as u64
    }

    fn logged(&self, plain: &Slot) -> Slot {
        plain.with_log(match self.log.kind {
            Kind::Hardware => SlotLog::ByHardware,
            _ => SlotLog::ByFault,
        })
    }

    /// Starts the log, harvests it `times`, every `apart` milliseconds, and ends it.
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
        for slot in self.slots().iter().flatten() {
            let mut zap = retried::<H, _>(|| self.vm.guest.replace(self.logged(slot)).ok());
            match self.log.kind {
                // Marks that hardware has made before the start count.
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

    /// Write-protects everything in one step.
    fn protect_all(&self) {
        // No other processor does.
        let all = retried::<H, _>(|| self.vm.guest.space().protect_all().ok());
        let machine = self.machine();
        machine.forget_permissions(|| all.drive(relax::<H>));
    }

    /// Flushes the write permissions that were taken away.
    fn forget(&mut self) {
        let machine = self.machine();
        machine.forget_permissions(|| reclaim(&mut self.gather));
    }

    /// Takes the marks, protects the marked pages again, and has them copied.
    fn harvest(&mut self) {
        let (slots, log) = (self.slots(), self.log);
        for slot in slots.iter().flatten() {
            let marks = log.marks_of(slot);
            // With rings, too: the hypervisor marks what it moves in the bitmap.
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
                let Some(slot) = slots.iter().flatten().find(|slot| slot.id == id) else {
                    return;
                };
                let marks = log.marks_of(slot);
                log.to_do(marks.first + page);
                match self.gather.protect(&self.logged(slot), page..page + 1) {
                    Ok(protected) if !protected.passed_over => {}
                    // Not protected: it stays marked until it is.
                    _ => marks.bitmap.mark(page),
                }
            }))
        });
        self.forget();
        for collected in collected.into_iter().flatten() {
            collected.release();
        }
    }

    /// Ends the log, while the guest runs: blocks come back in place.
    fn stop(&mut self) {
        let (guest, slots) = (&self.vm.guest, self.slots());
        for &slot in slots.iter().flatten() {
            drop(retried::<H, _>(|| guest.replace(slot).ok()));
        }
        while guest.protect_no_more().is_err() {
            relax::<H>();
        }
        for slot in slots.iter().flatten() {
            let blocks = slot.guest.size() / H::BLOCK;
            for first in (0..blocks).step_by(TOGETHER) {
                for block in (first..blocks).take(TOGETHER) {
                    let at = Ipa::new(slot.guest.start().get() + block * H::BLOCK);
                    // Made up: there was no fault. Where nothing is mapped, nothing comes back.
                    if let (Ok(request), Some(page)) =
                        (guest.request(&Fault::new(at, Access::Read)), self.vm.memory.look_up(at))
                        && self.gather.collapse(&request, &page) == Ok(true)
                    {
                        H::count(Event::Collapsed, 1);
                    }
                }
                reclaim(&mut self.gather);
            }
        }
    }
}

/// Repeats an attempt that another processor may be in the way of, for a short time.
fn retried<H: Host, T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    loop {
        match attempt() {
            Some(done) => return done,
            None => relax::<H>(),
        }
    }
}

/// Copies the guest once, if there is a time for it and an area; else logs its writes for ever.
pub fn watch<H: Host>(vm: &'static Vm<H>, begin: Option<Begin>, area: Option<Span<Pa>>) {
    if let (Some(begin), Some(area)) = (begin, area) {
        return take(vm, area, begin);
    }
    let mut driver = Driver::new(vm);
    loop {
        sleep::<H>(200);
        driver.log(10, 50);
    }
}

/// Logs a guest's writes once, harvested five times in a tenth of a second.
pub fn log_for_a_while<H: Host>(vm: &'static Vm<H>) {
    Driver::new(vm).log(5, 20);
}

/// Measures the start of a log. Maps all memory of a guest that does not run, as its faults would.
pub fn start_one<H: Host>(vm: &'static Vm<H>, fault: impl Fn(&Fault), instructions: fn() -> u32) {
    let mut driver = Driver::new(vm);
    for page in 0..driver.pages() {
        if let Some(at) = vm.memory.at(page) {
            fault(&Fault::new(at, Access::Write));
        }
    }
    H::count(Event::Roots, driver.roots());
    let begun = instructions();
    driver.start();
    let took = instructions().wrapping_sub(begun);
    H::count(Event::Starting, took.into());
}

/// Copies the running guest to `area`, compares, and lets the guest go on on the copy.
fn take<H: Host>(vm: &'static Vm<H>, area: Span<Pa>, begin: Begin) {
    let mut driver = Driver::new(vm);
    let (guest, memory, log, slots) = (&vm.guest, &vm.memory, driver.log, vm.slots);
    let copy_of = |page: u64| area.start().get() + page * H::PAGE;
    let frame_of = |page: u64| {
        let page = retried::<H, _>(|| memory.look_up(memory.at(page)?));
        page.frame.get() & !(H::PAGE - 1)
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
            while !has_rung() {
                H::rest(H::ticks_per_ms());
            }
        }
    }
    driver.start();
    for page in 0..driver.pages() {
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
        if copied < 64 {
            break;
        }
    }

    vm.gate.close::<H>();
    match log.kind {
        // Hardware would make write-protected leaves writable. It has marked the leaves that are
        // taken away.
        Kind::Hardware => {
            for slot in slots.iter().flatten() {
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
    for page in 0..driver.pages() {
        // SAFETY: two frames that are mapped one to one; they are not written now.
        let is_equal = unsafe { is_equal::<H>(frame_of(page), copy_of(page)) };
        H::count(Event::Compared, 1);
        H::count(Event::Different, u64::from(!is_equal));
    }

    // From here on the guest is the copy.
    let zaps = slots.map(|slot| {
        let slot = slot?;
        Some(retried::<H, _>(|| guest.replace(slot).ok()))
    });
    while guest.protect_no_more().is_err() {
        relax::<H>();
    }
    for zap in zaps.into_iter().flatten() {
        take_away(zap, &mut driver.gather, |_| ());
    }
    for page in 0..driver.pages() {
        // SAFETY: nothing maps the guest's frames any more.
        unsafe { poison::<H>(frame_of(page)) };
    }
    memory.move_to(area);
    H::count(Event::Resumed, 1);
    H::stood(H::now() - stopped);
    vm.gate.open();
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
    one.iter().zip(other).fold(0, |all, (one, other)| all | one ^ other) == 0
}
