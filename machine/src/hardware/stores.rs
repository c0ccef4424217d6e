//! Software's stores to entries, and when they become visible.

use crate::architecture::{Bits, Ordering};
use crate::memory::State;
use crate::rules::Rule;
use crate::sched::cold;
use crate::trace::Event;
use tablewright_walker::{Denied, Descriptor};

use super::{ACCESSED, Buffered, Core, DIRTY, Hardware, How, MOST_BUFFERED, Spot};

impl Hardware {
    /// Returns the place of an entry in memory. `None`: not in this memory, but the program's own.
    #[inline(always)]
    pub(crate) fn spot(&self, entry: *const u64) -> Option<Spot<'_>> {
        let (pa, meta) = self.memory.find(entry)?;
        Some(Spot { pa, meta, state: meta.state.get() })
    }

    /// A store by software to an entry of a private table.
    ///
    /// # Safety
    /// 1. `entry` is valid for writes, and lies at `spot`.
    #[inline(always)]
    pub(crate) unsafe fn store_private(
        &self,
        cpu: usize,
        spot: &Spot<'_>,
        entry: *mut u64,
        value: u64,
    ) {
        spot.meta.writer.set(cpu as u16);
        spot.meta.epoch.set(self.epochs[cpu].get());
        // SAFETY: valid by (1.).
        unsafe { entry.write(value) };
    }

    /// A store by software to an entry of a table that is not private.
    ///
    /// # Safety
    /// 1. `entry` is valid for writes, and lies at `spot`.
    #[inline(always)]
    pub(crate) unsafe fn store(
        &self,
        cpu: usize,
        spot: &Spot<'_>,
        entry: *mut u64,
        value: u64,
        how: How,
    ) {
        if spot.meta.state.get() == State::Live
            && !self.wary.get()
            && spot.meta.depth.get() == 0
            && let Some(mask) = self.address_mask
        {
            // SAFETY: valid by (1.).
            let old = unsafe { entry.read() };
            if old & 1 == 0 {
                if value & 1 != 0 {
                    let pa = value & mask;
                    self.check_allowed(cpu, pa, pa + self.last_byte);
                }
                // SAFETY: valid by (1.).
                unsafe { entry.write(value) };
                return;
            }
        }
        cold();
        self.store_slowly(cpu, spot.pa, value, how);
    }

    /// A store by software to a word of memory, with all that may come of it.
    #[inline(never)]
    pub(crate) fn store_slowly(&self, cpu: usize, pa: u64, value: u64, how: How) {
        let Some(frame) = self.memory.frame_at(pa) else {
            return; // What is no memory keeps nothing.
        };
        // Nothing comes between the two halves of an atomic access.
        if how != How::Atomic {
            self.disturb(cpu, Some(pa));
        }
        let meta = self.memory.meta(frame);
        if meta.state.get() == State::Private {
            // Another CPU's step has freed and taken it again: only a program that is wrong gets
            // here.
            self.memory.write(pa, value);
            return;
        }
        let before = self.visible_to(cpu, pa);
        self.trace(cpu, || Event::Store {
            pa,
            value,
            before,
            how: match how {
                How::Plain => "store",
                How::Release => "release",
                How::Atomic => "exchange",
            },
        });
        if how != How::Atomic {
            self.check_flags(cpu, pa, value);
        }
        match meta.state.get() {
            State::Live => {
                self.check_absent(cpu, pa, value);
                self.changed(cpu, pa, frame, before, value, how);
            }
            State::Free => self.violate(
                Rule::FreedEarly,
                cpu,
                format!("a store to {pa:#x}, in a frame that was given back"),
            ),
            State::Detached => {
                self.changed_below_a_cut(cpu, pa, frame, before, value);
                self.linked(cpu, pa, frame, value);
            }
            _ => {}
        }
        let core = &self.cores[cpu];
        match how {
            How::Atomic => {
                self.drain(cpu);
                self.memory.write(pa, value);
                if self.architecture.ordering == Ordering::X86 {
                    self.obligations.borrow_mut().publish(cpu);
                }
            }
            _ if !self.buffering.get() => self.memory.write(pa, value),
            _ => {
                if how == How::Release {
                    core.group.update(|group| group + 1);
                }
                core.buffer.borrow_mut().push(Buffered {
                    pa,
                    value,
                    before: if self.judging.get() { before } else { 0 },
                    group: core.group.get(),
                });
                if core.buffer.borrow().len() > MOST_BUFFERED {
                    self.drain_one(cpu, 0);
                }
            }
        }
        self.look_around();
    }

    /// An entry that is not present may have to name no memory.
    fn check_absent(&self, cpu: usize, pa: u64, value: u64) {
        const ADDRESS: u64 = (1 << 52) - (1 << 12);
        if !self.architecture.family().absent_is_blank || value == 0 || self.is_valid(value) {
            return;
        }
        if self.memory.frame_at(value & ADDRESS).is_some() {
            self.violate(
                Rule::ForbiddenMemory,
                cpu,
                format!("the entry at {pa:#x}, {value:#x}, is not present, and names memory"),
            );
        }
    }

    /// Records the link of an entry for the walkers that reach its table: for all, or, if that was
    /// detached, for those that still know the way.
    fn linked(&self, cpu: usize, pa: u64, frame: usize, value: u64) {
        let meta = self.memory.meta(frame);
        let (depth, state) = (meta.depth.get(), meta.state.get());
        let known = matches!(state, State::Live | State::Detached);
        if depth == 0 || !known || !self.is_valid(value) {
            return;
        }
        let first = self.place(frame, pa);
        let decoded = self.decode(depth, first, Denied::default(), value);
        let Descriptor::Table { pa: table, .. } = decoded else {
            return;
        };
        match state {
            State::Detached => self.make_known(table, pa, first, depth - 1, meta),
            // It was linked and detached again before either was visible.
            _ if self.visible_to(cpu, pa) != value => {}
            // Nothing happens if it is known.
            _ => {
                let place = (meta.space.get(), first);
                self.make_live(cpu, table, pa, place, depth - 1, How::Release);
            }
        }
    }

    /// Software overwrites an entry: flags that hardware has set there are lost if they were not
    /// seen.
    pub(super) fn check_flags(&self, cpu: usize, pa: u64, value: u64) {
        if self.unseen.borrow().is_empty() {
            return;
        }
        let Some(flags) = self.unseen.borrow_mut().remove(&pa) else {
            return;
        };
        let kept = self.flags(value);
        if flags & !kept != 0 {
            self.violate(
                Rule::FlagLost,
                cpu,
                format!(
                    "the entry at {pa:#x} is overwritten with {value:#x}, and its {} was set since \
                     it was last read",
                    if flags & !kept & DIRTY != 0 { "dirty state" } else { "accessed flag" }
                ),
            );
        }
    }

    /// Accessed and dirty in a leaf, in one form for all formats.
    pub(super) fn flags(&self, entry: u64) -> u64 {
        if !self.is_valid(entry) {
            return 0;
        }
        let Bits { accessed, dirty, clean_if_set, .. } = self.bits;
        let accessed = entry & accessed != 0;
        let dirty = (entry & dirty != 0) != clean_if_set;
        (u64::from(accessed) * ACCESSED) | (u64::from(dirty) * DIRTY)
    }

    /// A load by software.
    ///
    /// # Safety
    /// 1. `entry` is valid for reads, and lies at `spot`.
    #[inline(always)]
    pub(crate) unsafe fn load(&self, cpu: usize, spot: &Spot<'_>, entry: *const u64) -> u64 {
        if self.wary.get() {
            cold();
            return self.load_slowly(cpu, spot.pa);
        }
        // SAFETY: valid by (1.).
        unsafe { entry.read() }
    }

    #[inline(never)]
    pub(super) fn load_slowly(&self, cpu: usize, pa: u64) -> u64 {
        self.disturb(cpu, Some(pa));
        self.check_taken(cpu, pa);
        let value = self.visible_to(cpu, pa);
        self.see(cpu, pa);
        self.trace(cpu, || Event::Load { pa, value });
        value
    }

    /// Software looks into a table: it has to be handed out.
    pub(super) fn check_taken(&self, cpu: usize, pa: u64) {
        let given_back = self
            .memory
            .frame_at(pa)
            .is_some_and(|frame| self.memory.meta(frame).state.get() == State::Free);
        if given_back {
            self.violate(
                Rule::FreedEarly,
                cpu,
                format!("a load from {pa:#x}, in a frame that was given back"),
            );
        }
    }

    /// Software has seen what is at `pa`.
    pub(super) fn see(&self, cpu: usize, pa: u64) {
        if !self.unseen.borrow().is_empty() {
            self.unseen.borrow_mut().remove(&pa);
        }
        if !self.obligations.borrow().is_empty()
            && let Some(frame) = self.memory.frame_at(pa)
        {
            let meta = self.memory.meta(frame);
            // What was changed before the table was detached, too.
            if matches!(meta.state.get(), State::Live | State::Detached) {
                let depth = meta.depth.get();
                let mut obligations = self.obligations.borrow_mut();
                if !obligations.is_news(cpu, depth) {
                    return;
                }
                self.each_place(frame, pa, |space, first| {
                    let span = (first, first + ((1u64 << self.shift(depth)) - 1));
                    obligations.observe(cpu, space, span, depth);
                });
            }
        }
    }

    /// The first address that the entry at `pa` translates.
    pub(super) fn place(&self, frame: usize, pa: u64) -> u64 {
        let meta = self.memory.meta(frame);
        let index = (pa - self.memory.address(frame)) >> 3;
        let first = meta.first.get();
        self.canonical(first.wrapping_add(index << self.shift(meta.depth.get())))
    }

    /// Returns the value of a load by this CPU: its own stores first.
    pub(crate) fn visible_to(&self, cpu: usize, pa: u64) -> u64 {
        if self.buffering.get()
            && let Some(own) = self.cores[cpu].buffer.borrow().iter().rev().find(|b| b.pa == pa)
        {
            return own.value;
        }
        self.memory.read(pa)
    }

    /// Returns the value that a CPU has stored, and others do not see yet.
    pub(super) fn stored(&self, pa: u64) -> Option<u64> {
        let newest = |core: &Core| {
            let buffer = core.buffer.borrow();
            buffer.iter().rev().find(|b| b.pa == pa).map(|b| b.value)
        };
        self.cores.iter().find_map(newest)
    }

    /// An atomic exchange by software: gives what was there.
    pub(crate) fn exchange(&self, cpu: usize, spot: &Spot<'_>, value: u64) -> u64 {
        self.disturb(cpu, Some(spot.pa));
        self.drain(cpu);
        let old = self.memory.read(spot.pa);
        self.see(cpu, spot.pa);
        self.store_slowly(cpu, spot.pa, value, How::Atomic);
        old
    }

    /// A compare-exchange by software.
    pub(crate) fn compare_exchange(
        &self,
        cpu: usize,
        spot: &Spot<'_>,
        current: u64,
        value: u64,
    ) -> Result<(), u64> {
        self.disturb(cpu, Some(spot.pa));
        self.drain(cpu);
        self.see(cpu, spot.pa);
        let old = self.memory.read(spot.pa);
        if old != current {
            self.check_taken(cpu, spot.pa);
            return Err(old);
        }
        self.store_slowly(cpu, spot.pa, value, How::Atomic);
        Ok(())
    }

    /// Stores to `count` entries of a private table from `first` on: `value`, `value + step`, and
    /// so on.
    ///
    /// # Safety
    /// 1. The entries are valid for writes, and the first lies at `spot`.
    #[inline(always)]
    pub(crate) unsafe fn fill_private(
        &self,
        cpu: usize,
        spot: &Spot<'_>,
        first: *mut u64,
        count: usize,
        value: u64,
        step: u64,
    ) {
        spot.meta.writer.set(cpu as u16);
        spot.meta.epoch.set(self.epochs[cpu].get());
        let mut value = value;
        for index in 0..count {
            // SAFETY: valid by (1.).
            unsafe { first.add(index).write(value) };
            value = value.wrapping_add(step);
        }
    }

    /// The stores of a CPU that may leave its buffer next.
    pub(crate) fn drainable(&self, cpu: usize) -> Vec<usize> {
        let buffer = self.cores[cpu].buffer.borrow();
        let in_order = self.architecture.ordering == Ordering::X86;
        (0..buffer.len())
            .filter(|&at| {
                let this = &buffer[at];
                buffer[..at]
                    .iter()
                    .all(|before| !in_order && before.pa != this.pa && before.group == this.group)
            })
            .collect()
    }

    /// One store leaves the buffer.
    pub(crate) fn drain_one(&self, cpu: usize, at: usize) {
        let stored = self.cores[cpu].buffer.borrow_mut().remove(at);
        let Buffered { pa, value, .. } = stored;
        self.trace(cpu, || Event::Visible { pa, value });
        // What hardware has set between the store and now is overwritten.
        self.check_flags(cpu, pa, value);
        self.check_race(cpu, &stored);
        self.memory.write(pa, value);
        // The table may have been out of reach at the time of the store, or within.
        if let Some(frame) = self.memory.frame_at(pa) {
            self.linked(cpu, pa, frame, value);
        }
        if self.architecture.ordering == Ordering::X86 && !self.has_buffered(cpu) {
            self.obligations.borrow_mut().publish(cpu);
        }
    }

    /// Checks that a store of another CPU between this store and now is overwritten with its
    /// consequences: that is the change that walkers see.
    pub(super) fn check_race(&self, cpu: usize, stored: &Buffered) {
        let now = self.memory.read(stored.pa);
        let flags = self.bits.accessed | self.bits.dirty;
        if self.judging.get()
            && (now ^ stored.before) & !flags != 0
            && let Some(frame) = self.memory.frame_at(stored.pa)
            && self.memory.meta(frame).state.get() == State::Live
        {
            self.changed(cpu, stored.pa, frame, now, stored.value, How::Plain);
        }
    }

    /// All of them do.
    pub(crate) fn drain(&self, cpu: usize) {
        while !self.cores[cpu].buffer.borrow().is_empty() {
            self.drain_one(cpu, 0);
        }
    }

    pub(crate) fn has_buffered(&self, cpu: usize) -> bool {
        !self.cores[cpu].buffer.borrow().is_empty()
    }

    /// Whether a fault now would be that of a walk which did not see what this CPU stored before,
    /// where the architecture rules that out.
    pub(crate) fn fault_is_early(&self, cpu: usize) -> bool {
        self.architecture.ordering != Ordering::Base && self.has_buffered(cpu)
    }

    /// Stores before it leave before stores after it.
    pub(crate) fn order_stores(&self, cpu: usize) {
        self.cores[cpu].group.update(|group| group + 1);
    }

    /// DSB: what this CPU stored is visible to all walkers.
    #[inline(always)]
    pub(crate) fn publish(&self, cpu: usize) {
        self.epochs[cpu].update(|epoch| epoch.wrapping_add(1));
        if self.wary.get() {
            cold();
            self.publish_slowly(cpu);
        }
    }

    /// DSB and ISB.
    #[inline(always)]
    pub(crate) fn publish_and_synchronise(&self, cpu: usize) {
        self.epochs[cpu].update(|epoch| epoch.wrapping_add(1));
        if self.wary.get() {
            cold();
            self.publish_slowly(cpu);
            self.synchronise(cpu);
        }
    }

    #[inline(never)]
    pub(super) fn publish_slowly(&self, cpu: usize) {
        self.trace(cpu, || Event::Publish);
        // On x86 nothing is executed: stores leave their buffer in order, when they do.
        if self.architecture.ordering != Ordering::X86 {
            self.drain(cpu);
        }
        self.hold_walks(cpu);
        if !self.has_buffered(cpu) {
            self.obligations.borrow_mut().publish(cpu);
        }
        for (space, run, depth) in self.cores[cpu].runs.take() {
            self.check_run(cpu, space, run, depth);
        }
        self.disturb(cpu, None);
    }

    /// Runs a handler on this CPU: runs that are being changed under it have to be whole at a
    /// barrier after it.
    pub(crate) fn handle<T>(&self, cpu: usize, handler: impl FnOnce() -> T) -> T {
        let runs = &self.cores[cpu].runs;
        let mut begun = runs.take();
        let handled = handler();
        begun.append(&mut runs.take());
        runs.set(begun);
        handled
    }

    /// With FEAT_ETS2 a DSB orders the walks after it (the model of Arm, `DSB-ob`).
    pub(super) fn hold_walks(&self, cpu: usize) {
        if self.architecture.ordering == Ordering::Ets2 {
            self.cores[cpu].early.borrow_mut().clear();
        }
    }

    /// Shows this CPU's stores to the CPU that takes over from it: the release of a lock.
    pub(crate) fn hand_over(&self, cpu: usize) {
        if self.wary.get() {
            self.drain(cpu);
            self.obligations.borrow_mut().publish(cpu);
        }
    }

    /// ISB: nothing translated before is used after.
    #[inline(always)]
    pub(crate) fn synchronise(&self, cpu: usize) {
        if self.wary.get() {
            self.trace(cpu, || Event::Synchronise);
            self.cores[cpu].early.borrow_mut().clear();
            self.cores[cpu].before.set(None);
        }
    }
}
