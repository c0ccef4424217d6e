//! The engine's platform on the machine: a space, its windows, its locks.

use super::*;

/// A lock in virtual time that orders what its holders store.
///
/// ```
/// # use tablewright_machine::{Architecture, Machine, Memory, Regime, Setup};
/// # let machine = Machine::new(Setup::new(Architecture::x86_64(4), Memory::new(4, 12, 0)));
/// let lock = machine.new_lock();
/// let held = lock.acquire();
/// drop(held);
/// ```
pub struct MachineLock<'m> {
    pub(super) machine: &'m Machine,
    pub(super) lock: Lock,
}

impl MachineLock<'_> {
    /// Takes it, after those that asked before.
    pub fn acquire(&self) -> MachineHeld<'_> {
        MachineHeld { machine: self.machine, _held: self.lock.acquire(self.machine.cpu()) }
    }
}

/// A [`MachineLock`] that is held until this is dropped.
#[must_use = "the lock is released when this is dropped"]
pub struct MachineHeld<'l> {
    machine: &'l Machine,
    _held: Held<'l>,
}

impl Drop for MachineHeld<'_> {
    fn drop(&mut self) {
        let cpu = self.machine.cpu();
        cpu.order();
        self.machine.hardware.hand_over(cpu.id());
    }
}

/// One space on a machine: the engine's [`Platform`]. A handle.
#[derive(Clone, Copy)]
pub struct Mapper<'m> {
    pub(super) machine: &'m Machine,
    pub(super) space: u16,
}

impl<'m> Mapper<'m> {
    /// The machine.
    pub fn machine(&self) -> &'m Machine {
        self.machine
    }

    /// The tables under `root` are those of this space, and its identifier (ASID, PCID) is `id`. On
    /// x86 the half does not matter.
    pub fn attach(&self, root: Pa, half: tablewright::Half, id: u16) {
        let cpu = self.machine.cpu();
        cpu.order();
        let upper = half == tablewright::Half::Upper;
        self.machine.hardware.attach(cpu.id(), self.space, root.get(), upper, id);
    }

    /// No CPU uses the space any more. What they remember of it stays until it is invalidated.
    pub fn detach(&self) {
        let cpu = self.machine.cpu();
        cpu.order();
        self.machine.hardware.detach(cpu.id(), self.space);
    }

    /// Tracks a space whose program knows which CPUs have it loaded, and under which identifier,
    /// which is said by [`load_as`](Mapper::load_as). A CPU that has loaded another and has
    /// [left](Mapper::leave) it need not be told what has changed: it forgets that before it loads
    /// the space again, or breaks a rule when it uses it.
    pub fn track(&self, root: Pa, half: tablewright::Half) {
        self.machine.hardware.track(self.space);
        self.attach(root, half, 0);
    }

    /// The running CPU loads the root of a space that is tracked, under this identifier.
    pub fn load_as(&self, id: u16) {
        let cpu = self.machine.cpu();
        cpu.order();
        self.machine.hardware.load_tracked(cpu.id(), self.space, id);
    }

    /// The running CPU, which has loaded another root or none, has left the space.
    pub fn leave(&self) {
        let cpu = self.machine.cpu();
        cpu.order();
        self.machine.hardware.leave(cpu.id(), self.space);
    }

    /// The running CPU loads the root.
    pub fn load(&self) {
        let cpu = self.machine.cpu();
        cpu.order();
        self.machine.hardware.load_root(cpu.id(), self.space);
    }

    /// A range of an invalidation as the hardware is told; without one, all of the space. With
    /// guests that have a stage 1 it may be the first of two steps: see [`then`](Mapper::then).
    ///
    /// What is global is forgotten if the invalidation means it. On arm64 an address takes it in
    /// any case.
    pub fn tlbi_of(&self, what: &Invalidation<'_>, range: Option<&Stale>) -> Tlbi {
        let architecture = self.machine.architecture();
        let by_leaf = !architecture.breaks();
        let spares = architecture.family().address_spares_tables;
        let range = range.filter(|range| !(spares && range.tables));
        let nested = self.machine.hardware.is_nested();
        let globals = match (by_leaf, what.global) {
            (false, _) => Globals::ByAddress,
            (true, true) => Globals::Included,
            (true, false) => Globals::Spared,
        };
        match range {
            // INVEPT, an ASID in TLB_CONTROL; TLBI VMALLS12E1IS.
            _ if nested && (by_leaf || range.is_none()) => Tlbi { id: Some(what.id), ..Tlbi::ALL },
            // VMALLE1IS, or INVPCID type 2 on every CPU.
            None if what.global => Tlbi::ALL,
            // ASIDE1IS, or INVPCID type 1, or INVLPGB with the PCID alone.
            None => Tlbi { id: Some(what.id), globals, ..Tlbi::ALL },
            Some(&Stale { first, last, level, tables }) => Tlbi {
                // INVLPGB with its bit 3 and without a PCID: what is cached of tables that lead to
                // what is global goes too.
                id: (!by_leaf || !what.global).then_some(what.id),
                range: Some((first, last)),
                // The embedder of x86 that takes all that is said at its word: INVLPGB, an address
                // for each leaf.
                stride: level.filter(|_| by_leaf).map(|level| self.leaf_bits(level)),
                depth: level.filter(|_| !by_leaf).map(Level::height),
                leaves_only: !tables,
                all_tables: false,
                globals,
                broadcast: true,
                // TLBI IPAS2E1IS.
                stages: if nested { Stages::Second } else { Stages::Both },
                asid: None,
            },
        }
    }

    /// A leaf of a level is of so many bytes, as a power of two.
    fn leaf_bits(&self, level: Level) -> u8 {
        let page = self.machine.memory().page_shift();
        (page + (page - 3) * u32::from(level.height())) as u8
    }

    /// All that the hardware is told for an invalidation, one for each range; one for all where it
    /// knows no ranges.
    pub fn tlbis<'w>(&self, what: &Invalidation<'w>) -> impl Iterator<Item = Tlbi> + use<'w, 'm> {
        let (mapper, what) = (*self, *what);
        let ranges = match what.what {
            What::Everything => &[],
            What::Ranges(ranges) => ranges,
        };
        let first = mapper.tlbi_of(&what, ranges.first());
        let others = ranges.iter().skip(1).filter(move |_| first.range.is_some());
        std::iter::once(first).chain(others.map(move |range| mapper.tlbi_of(&what, Some(range))))
    }

    /// Returns the invalidation that has to follow those of stage 2 alone, of which this is one,
    /// when they are complete: TLBI VMALLE1IS, for what was combined with the guest's stage 1.
    pub fn then(&self, first: &Tlbi) -> Option<Tlbi> {
        (first.stages == Stages::Second).then_some(Tlbi {
            id: first.id,
            stages: Stages::First,
            broadcast: first.broadcast,
            ..Tlbi::default()
        })
    }

    /// The running CPU says that what it has issued does what an invalidation asks for, once it is
    /// complete. What that is not true of is reported at the completion.
    /// [`invalidate`](Platform::invalidate) does it.
    pub fn claim(&self, what: &Invalidation<'_>) {
        match what.what {
            What::Everything => self.claim_as((0, u64::MAX), &self.tlbi_of(what, None)),
            What::Ranges(ranges) => {
                for range in ranges {
                    let tlbi = self.tlbi_of(what, Some(range));
                    self.claim_as((range.first, range.last), &tlbi);
                }
            }
        }
    }

    /// The running CPU says that all that use the space have forgotten what an invalidation asks
    /// for, each by whatever it was told and has waited for. What that is not true of is reported.
    /// It takes no time.
    pub fn claim_complete(&self, what: &Invalidation<'_>) {
        let cpu = self.machine.cpu();
        cpu.order();
        self.claim(what);
        self.machine.hardware.complete(cpu.id());
    }

    /// Claims the invalidation of a range, which `tlbi` would be the one instruction for, if it is
    /// broadcast; it may as well be made by each CPU for itself, or in parts.
    pub fn claim_as(&self, range: (u64, u64), tlbi: &Tlbi) {
        let cpu = self.machine.cpu().id();
        self.machine.hardware.claim(cpu, self.space, range, tlbi);
    }

    /// The running CPU is about to look at the space: see [`rely`](Mapper::rely).
    pub fn look(&self) -> u64 {
        self.machine.cpu().order();
        self.machine.hardware.look_at()
    }

    /// The running CPU relies on whatever was changed in a range, and visible, before a
    /// [look](Mapper::look): no CPU remembers what was there. What is not true of that is reported,
    /// whichever CPU has changed it and has yet to have it forgotten.
    pub fn rely(&self, range: (u64, u64), look: u64) {
        self.rely_on(range, look, false);
    }

    /// Relies on the invalidation of what the running CPU has changed itself.
    pub fn rely_on_own(&self, range: (u64, u64), look: u64) {
        self.rely_on(range, look, true);
    }

    fn rely_on(&self, range: (u64, u64), look: u64, own: bool) {
        let cpu = self.machine.cpu();
        cpu.order();
        let hardware = &self.machine.hardware;
        hardware.rely(cpu.id(), self.space, range, look, own);
    }

    /// Returns a window's slots of one page each from `first` on, which this space translates.
    pub fn slots(&self, first: u64) -> MachineSlots<'m> {
        MachineSlots { machine: self.machine, first }
    }

    /// Returns the frames that a [coarse map](tablewright::linear::Coarse) which this space holds
    /// shows: at their own addresses.
    pub fn identity(&self) -> MachineIdentity<'m> {
        MachineIdentity { machine: self.machine }
    }

    /// The physical address that memory says an address has now, whatever CPUs remember.
    pub fn lookup(&self, va: u64) -> Option<Pa> {
        let leaf = self.machine.hardware.leaf_at(self.space, va)?;
        Some(Pa::new(leaf.physical(va)))
    }
}

/// Slots of a [window](tablewright::linear::Slots) on a machine. Each use goes through the TLB of
/// the running CPU, so that a slot that was moved too early shows what it showed before.
#[derive(Clone, Copy)]
pub struct MachineSlots<'m> {
    machine: &'m Machine,
    first: u64,
}

// SAFETY: the pointer is that of the frame (1.); what the CPU would have reached is checked.
unsafe impl SlotMemory for MachineSlots<'_> {
    #[track_caller]
    #[inline(always)]
    fn pointer(&self, slot: usize, frame: Pa) -> NonNull<Entry> {
        let page = self.machine.hardware.memory.page_shift();
        let va = self.first + ((slot as u64) << page);
        self.machine.show(va, frame)
    }
}

/// Frames through the coarse map of a space: each use goes through the TLB of the running CPU.
#[derive(Clone, Copy)]
pub struct MachineIdentity<'m> {
    machine: &'m Machine,
}

// SAFETY: the pointer is that of the frame (1.); what the CPU would have reached is checked.
unsafe impl OneToOne for MachineIdentity<'_> {
    #[track_caller]
    #[inline(always)]
    fn pointer(&self, frame: Pa) -> NonNull<Entry> {
        self.machine.show(frame.get(), frame)
    }
}

impl Machine {
    /// Reaches a frame through a window that should show it at `va`.
    #[track_caller]
    #[inline(always)]
    fn show(&self, va: u64, frame: Pa) -> NonNull<Entry> {
        self.hardware.tracer.set_place(Location::caller());
        let request = Request::write(va);
        let reached = self.translate(request).or_else(|_| {
            self.hardware.synchronise(self.cpu().id());
            self.translate(request)
        });
        match reached {
            Ok(translated) if translated.pa() == frame.get() => {}
            other => self.shows_another(va, frame, other),
        }
        self.pointer(frame)
    }

    #[cold]
    fn shows_another(&self, va: u64, frame: Pa, reached: Result<Translated, Fault>) {
        match reached {
            Ok(translated) => self.report(
                Rule::WindowStale,
                format!(
                    "the window at {va:#x} was moved to {frame}, and the TLB leads to {:#x}",
                    translated.pa()
                ),
            ),
            Err(fault) => self.report(
                Rule::NoProgress,
                format!("the window at {va:#x} was moved to {frame}, and is not mapped: {fault:?}"),
            ),
        }
    }
}

impl Machine {
    #[inline(always)]
    pub(crate) fn pointer(&self, frame: Pa) -> NonNull<Entry> {
        match self.hardware.memory.at(frame.get()).and_then(NonNull::new) {
            Some(at) => at.cast(),
            None => unreachable!("{frame} is no memory of the machine"),
        }
    }
}

// SAFETY:
// 1. A frame is handed out once until it is given back, and is aligned as the memory is.
// 2. The pointer is into memory that lives as long as the machine, which the handle borrows.
// 3. A link for each frame.
// 4. to 6. The rules of the machine are those of the hardware: `publish`, `issue` and `complete` do
//    what they say.
// 7. A copy is the same machine and space.
unsafe impl Platform for Mapper<'_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        let machine = self.machine;
        let cpu = machine.cpu();
        cpu.spend(machine.costs.table);
        cpu.order();
        if machine.refuses() {
            return None;
        }
        let frame = machine.hardware.take_frame(cpu.id(), level.height())?;
        machine.tables.update(|n| n + 1);
        Some(Pa::new(frame))
    }

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        let cpu = self.machine.cpu();
        cpu.order();
        self.machine.hardware.give_frame(cpu.id(), frame.get());
    }

    fn alloc_root(&self, level: Level, tables: usize) -> Option<Pa> {
        if tables == 1 {
            return self.alloc_table(level);
        }
        let machine = self.machine;
        let cpu = machine.cpu();
        cpu.spend(machine.costs.table * tables as u64);
        cpu.order();
        if machine.refuses() {
            return None;
        }
        let (state, depth) = (State::Private, level.height());
        let first = machine.hardware.take_run(cpu.id(), tables, state, depth)?;
        machine.tables.update(|n| n + tables as u64);
        Some(Pa::new(first))
    }

    unsafe fn free_root(&self, root: Pa, level: Level, tables: usize) {
        let page = 1 << self.machine.memory().page_shift();
        for table in 0..tables as u64 {
            // SAFETY: passed on.
            unsafe { self.free_table(Pa::new(root.get() + table * page), level) };
        }
    }

    #[inline(always)]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        self.machine.pointer(frame)
    }

    #[inline(always)]
    fn barrier(&self, barrier: Barrier) {
        match barrier {
            Barrier::Publish => self.machine.publish(),
            Barrier::Complete => {
                self.machine.kick_if_noted();
                self.machine.complete();
            }
        }
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        let machine = self.machine;
        if machine.kicks.on {
            machine.kicks.note(machine.cpu().id());
            return;
        }
        let mut combined = None;
        for tlbi in self.tlbis(what) {
            machine.issue(tlbi, machine.operations(&tlbi));
            combined = self.then(&tlbi);
        }
        if let Some(combined) = combined {
            machine.complete();
            machine.issue(combined, machine.operations(&combined));
        }
        self.claim(what);
    }

    #[inline(always)]
    fn caps(&self) -> Caps {
        self.machine.architecture().caps()
    }

    #[inline(always)]
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        let frame = self.machine.hardware.memory.frame_at(frame.get())?;
        self.machine.links.get(frame)
    }

    #[inline(always)]
    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(self)
    }
}

// SAFETY: on one thread of the host each does what the default does; with buffered stores, what
// this CPU would load (1.).
unsafe impl Hooks for Mapper<'_> {
    #[inline(always)]
    unsafe fn read(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { Hooks::load(self, entry) }
    }

    #[inline(always)]
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { self.machine.load(entry.as_ptr().cast()) }
    }

    #[inline(always)]
    unsafe fn follow(&self, entry: NonNull<Entry>) -> u64 {
        // SAFETY: passed on.
        unsafe { Hooks::load(self, entry) }
    }

    #[inline(always)]
    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: passed on.
        unsafe { self.machine.store(entry.as_ptr().cast(), bits, How::Plain) };
    }

    #[inline(always)]
    unsafe fn link(&self, entry: NonNull<Entry>, bits: u64) {
        // SAFETY: passed on.
        unsafe { self.machine.store(entry.as_ptr().cast(), bits, How::Release) };
    }

    #[inline(always)]
    unsafe fn exchange(&self, entry: NonNull<Entry>, bits: u64) -> u64 {
        // SAFETY: passed on.
        unsafe { self.machine.exchange(entry.as_ptr().cast(), bits) }
    }

    #[inline(always)]
    unsafe fn compare_exchange(
        &self,
        entry: NonNull<Entry>,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        // SAFETY: passed on.
        unsafe { self.machine.compare_exchange(entry.as_ptr().cast(), current, new) }
    }

    #[inline(always)]
    unsafe fn fill(&self, first: NonNull<Entry>, count: usize, value: u64, step: u64) {
        // SAFETY: passed on.
        unsafe { self.machine.fill(first.as_ptr().cast(), count, value, step) }
    }
}
