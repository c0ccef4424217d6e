//! Nothing is lost where hardware writes accessed and dirty bits: edits raced by a table walker
//! that writes.
//!
//! [`Machine`] is a platform whose table walker acts between any two accesses of the engine. It
//! walks from the root, or from a table that it remembers until the invalidation which covers it is
//! complete, and does to the descriptors what the manuals say. What it did is kept as the truth
//! about each page: the leaf that comes out in the end has to say so.
//!
//! On the way the machine notices three faults that need no luck to matter: a table that is freed
//! while the walker remembers it; on arm64, an entry that changes without the break that the level
//! of FEAT_BBM demands, or is made before the break is complete; in a space that must not be
//! broken, a break.

use crate::common;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;
use std::ptr::NonNull;

use common::{Judged, words};
use tablewright::format::{Arm64K4, Arm64K16, X86_64};
use tablewright::{
    AddressSpace, Attrs, Barrier, Caps, Change, EditError, Entry, Gather, Hooks, Invalidation,
    Kind, Leaf, Level, Liveness, Mapping, Memory, Pa, Perms, Platform, Progress, Span, TableLink,
    Va, What,
};
use tablewright_hosted::Hosted;
use tablewright_walker as walker;

// What the hardware does. arm64: DDI 0487 D8.5.1 to D8.5.5. x86-64: SDM vol. 3A 5.8.
const ARM_AF: u64 = 1 << 10;
const ARM_READ_ONLY: u64 = 1 << 7; // AP[2]
const ARM_DBM: u64 = 1 << 51;
const ARM_CONTIGUOUS: u64 = 1 << 52;
const X86_WRITE: u64 = 1 << 1;
const X86_A: u64 = 1 << 5;
const X86_D: u64 = 1 << 6;
const X86_PS: u64 = 1 << 7;

/// The meaning of a descriptor to the walker: for the two kinds of format of this test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Invalid,
    Table(u64),
    Leaf(u64),
}

fn see<F: Judged>(descriptor: u64, height: u32) -> Seen {
    let page = !((1u64 << F::PAGE_SHIFT) - 1);
    if descriptor & 1 == 0 {
        return Seen::Invalid;
    }
    if F::HALVES {
        // D8.3.1: bits 1:0 = 11 is a table above the last level and a page at it; 01 is a block.
        let address = descriptor & 0x0000_ffff_ffff_f000 & page;
        match (descriptor & 2 != 0, height) {
            (true, 1..) => Seen::Table(address),
            (false, 0) => Seen::Invalid,
            _ => Seen::Leaf(address),
        }
    } else {
        // SDM 5.5.4: PS above the last level; bit 12 of a larger page is PAT.
        let address = descriptor & 0x000f_ffff_ffff_f000;
        match (descriptor & X86_PS != 0, height) {
            (false, 1..) => Seen::Table(address),
            (true, 1..) => Seen::Leaf(address & !0x1fff),
            _ => Seen::Leaf(address),
        }
    }
}

/// A table that the walker remembers the way to.
#[derive(Clone, Copy, Debug)]
struct Remembered {
    height: u32,
    first: u64,
    /// The invalidation that covers it is issued and not complete.
    leaving: bool,
}

/// An entry as it was when it was broken, until the invalidation that covers it is complete.
#[derive(Clone, Copy, Debug)]
struct Broken {
    descriptor: u64,
    leaving: bool,
}

#[derive(Default)]
struct Walker {
    root: Option<Pa>,
    remembered: HashMap<u64, Remembered>,
    /// Tables that the walker has seen: their height and first address.
    places: HashMap<u64, (u32, u64)>,
    allocated: HashSet<u64>,
    /// Pages that were accessed, pages that were written, as far as it was not reported.
    accessed: BTreeSet<u64>,
    written: BTreeSet<u64>,
    broken: HashMap<(u64, u32), Broken>,
}

struct Machine<F: Judged> {
    memory: Hosted,
    dice: common::Dice,
    walker: RefCell<Walker>,
    /// Frames by the address of their first entry.
    opened: RefCell<HashMap<usize, u64>>,
    /// The walker acts in one of so many accesses; 0 for never.
    pace: Cell<u64>,
    /// Its write to a member of a run may go to any member (D8.7.1.1 R_JQQTC).
    anywhere_in_a_run: bool,
    /// No valid entry may become invalid.
    unbroken: Cell<bool>,
    /// The addresses that programs use: from 0.
    extent: u64,
    format: std::marker::PhantomData<F>,
}

impl<F: Judged> Machine<F> {
    fn new(seed: u64, caps: Caps, extent: u64) -> Self {
        Self {
            memory: Hosted::new(96, F::PAGE_SHIFT).with_caps(caps),
            dice: common::Dice::new(seed),
            walker: RefCell::default(),
            opened: RefCell::default(),
            pace: Cell::new(0),
            anywhere_in_a_run: false,
            unbroken: Cell::new(false),
            extent,
            format: std::marker::PhantomData,
        }
    }

    const PAGE: u64 = 1 << F::PAGE_SHIFT;

    fn shift(height: u32) -> u32 {
        F::PAGE_SHIFT + (F::PAGE_SHIFT - 3) * height
    }

    fn entry(&self, frame: u64, index: usize) -> NonNull<Entry> {
        // SAFETY: the walker follows descriptors to frames that are allocated, which it checks; an
        // index of a walk lies inside a table.
        unsafe { self.memory.table(Pa::new(frame), Level::PAGE).add(index) }
    }

    /// Something may happen before the engine gets at `entry`.
    fn tick(&self, entry: NonNull<Entry>, writes: bool) {
        let pace = self.pace.get();
        if pace == 0 {
            return;
        }
        // More often where the engine is about to write.
        let chance = if writes { pace.div_ceil(4) } else { pace };
        if self.dice.roll(chance) != 0 {
            return;
        }
        let page = match self.place(entry) {
            // Nearly always at the very entry.
            Some((height, first)) if self.dice.roll(4) != 0 => {
                first + (self.dice.roll(1 << Self::shift(height)) & !(Self::PAGE - 1))
            }
            _ => self.dice.roll(self.extent / Self::PAGE) * Self::PAGE,
        };
        if page < self.extent {
            self.access(page, self.dice.roll(2) == 0);
        }
    }

    /// The height of an entry and the first address that it translates, if the walker has seen its
    /// table.
    fn place(&self, entry: NonNull<Entry>) -> Option<(u32, u64)> {
        let at = entry.as_ptr().addr();
        let base = at & !(Self::PAGE as usize - 1);
        let frame = *self.opened.borrow().get(&base)?;
        let (height, first) = *self.walker.borrow().places.get(&frame)?;
        let index = ((at - base) / size_of::<Entry>()) as u64;
        Some((height, first + (index << Self::shift(height))))
    }

    /// A program accesses `page`, or the processor does so speculatively.
    fn access(&self, page: u64, write: bool) {
        let walker = &mut *self.walker.borrow_mut();
        let Some(root) = walker.root else { return };
        // The walk starts at the root or at a table that it remembers the way to.
        let top = u32::from(F::LEVELS) - 1;
        let covers = |table: &Remembered| {
            page >= table.first && page - table.first < 1 << Self::shift(table.height + 1)
        };
        let known: BTreeMap<_, _> =
            walker.remembered.iter().filter(|(_, table)| covers(table)).collect();
        let start = self.dice.roll(known.len() as u64 + 1) as usize;
        let (mut frame, mut height, leaving) = match known.iter().nth(start) {
            Some((frame, table)) => (**frame, table.height, table.leaving),
            None => (root.get(), top, false),
        };
        loop {
            assert!(walker.allocated.contains(&frame), "the walker reads a table that was freed");
            let shift = Self::shift(height);
            let index = (page >> shift) as usize & (F::entries(Level::new(height as u8)) - 1);
            let first = page >> (shift + F::PAGE_SHIFT - 3) << (shift + F::PAGE_SHIFT - 3);
            walker.places.insert(frame, (height, if height == top { 0 } else { first }));
            let entry = self.entry(frame, index);
            // SAFETY: `entry` is valid.
            let descriptor = unsafe { entry.as_ref() }.load();
            match see::<F>(descriptor, height) {
                Seen::Invalid => return,
                Seen::Table(child) => {
                    if !F::HALVES {
                        // SAFETY: `entry` is valid.
                        unsafe { entry.as_ref() }.store(descriptor | X86_A);
                    }
                    frame = child;
                    height -= 1;
                    let table = Remembered { height, first: page >> shift << shift, leaving };
                    let known = walker.remembered.entry(frame).or_insert(table);
                    // Found again on a way that was not invalidated.
                    known.leaving &= leaving;
                }
                Seen::Leaf(_) => {
                    self.update(walker, entry, index, height, page, write);
                    return;
                }
            }
        }
    }

    /// Does to a leaf what the access does, and keeps the truth.
    fn update(
        &self,
        walker: &mut Walker,
        entry: NonNull<Entry>,
        index: usize,
        height: u32,
        page: u64,
        write: bool,
    ) {
        let caps = self.memory.caps();
        // SAFETY: `entry` is valid.
        let own = unsafe { entry.as_ref() };
        let mut target = own;
        if F::HALVES && self.anywhere_in_a_run && own.load() & ARM_CONTIGUOUS != 0 {
            let run = 1usize << F::contiguous(Level::new(height as u8));
            let member = index & !(run - 1) | self.dice.roll(run as u64) as usize;
            // SAFETY: the members of a run are in one table.
            let other = unsafe { entry.sub(index).add(member).as_ref() };
            let (a, b) = (own.load(), other.load());
            // Only where the neighbour is one that a look-up may take for this.
            if b & 1 != 0 && (a ^ b) & (ARM_CONTIGUOUS | ARM_DBM | 0x1c) == 0 {
                target = other;
            }
        }
        let was = target.load();
        let mut descriptor = was;
        let (allowed, recorded);
        if F::HALVES {
            if descriptor & ARM_AF == 0 {
                if !caps.hardware_access {
                    return;
                }
                descriptor |= ARM_AF;
            }
            if write
                && descriptor & (ARM_DBM | ARM_READ_ONLY) == ARM_DBM | ARM_READ_ONLY
                && caps.hardware_dirty
            {
                descriptor &= !ARM_READ_ONLY;
            }
            allowed = descriptor & ARM_READ_ONLY == 0;
            recorded = descriptor;
        } else {
            descriptor |= X86_A;
            allowed = descriptor & X86_WRITE != 0;
            if write && allowed {
                descriptor |= X86_D;
            }
            recorded = descriptor;
        }
        target.store(recorded);
        walker.accessed.insert(page);
        if write && allowed {
            walker.written.insert(page);
        }
    }

    /// The engine is about to replace what `entry` says by `new`.
    fn judge_write(&self, entry: NonNull<Entry>, new: u64) {
        if self.pace.get() == 0 {
            return;
        }
        let Some((height, first)) = self.place(entry) else {
            return;
        };
        // SAFETY: `entry` was passed by the engine, which vouches for it.
        let old = unsafe { entry.as_ref() }.load();
        let (was, is) = (see::<F>(old, height), see::<F>(new, height));
        // An empty table may go: nothing is translated through it.
        let breaks = match was {
            Seen::Leaf(_) => is == Seen::Invalid,
            // Nor is anything through one of leaves that are parked, which may become a leaf that
            // is.
            Seen::Table(_) => {
                let parked = F::kind(new, Level::new(height as u8)) == Kind::Leaf;
                is == Seen::Invalid && new != 0 && !parked
            }
            Seen::Invalid => false,
        };
        assert!(
            !(self.unbroken.get() && breaks),
            "a break in a space that must not be broken, at {first:#x}"
        );
        if !F::HALVES {
            return;
        }
        let walker = &mut *self.walker.borrow_mut();
        let held = |descriptor: u64, seen: Seen| match seen {
            Seen::Invalid => false,
            Seen::Table(_) => true,
            Seen::Leaf(_) => descriptor & ARM_AF != 0,
        };
        let bbm = self.memory.caps().bbm;
        let allowed = |old: u64, new: u64| match (see::<F>(old, height), see::<F>(new, height)) {
            (Seen::Table(_), Seen::Leaf(_)) | (Seen::Leaf(_), Seen::Table(_)) => bbm >= 2,
            (Seen::Leaf(from), Seen::Leaf(to)) => {
                // AttrIndx 4:2 and SH 9:8 stay, and so does the address; the contiguous bit needs
                // level 1.
                from == to
                    && (old ^ new) & 0x31c == 0
                    && (bbm >= 1 || (old ^ new) & ARM_CONTIGUOUS == 0)
            }
            _ => true,
        };
        if held(old, was) && held(new, is) {
            assert!(allowed(old, new), "{old:#x} became {new:#x} without a break, at {first:#x}");
        }
        if let Some(broken) = walker.broken.get(&(first, height))
            && held(new, is)
        {
            let before = broken.descriptor;
            assert!(
                allowed(before, new),
                "{before:#x} became {new:#x} before its break was complete, at {first:#x}"
            );
        }
        if held(old, was) && !held(new, is) {
            let broken = Broken { descriptor: old, leaving: false };
            walker.broken.insert((first, height), broken);
        }
    }
}

// SAFETY: passed on to `Hosted`. What the walker does between two accesses a walker may do.
unsafe impl<F: Judged> Platform for Machine<F> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        let frame = self.memory.alloc_table(level)?;
        let walker = &mut *self.walker.borrow_mut();
        walker.allocated.insert(frame.get());
        walker.places.remove(&frame.get());
        Some(frame)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        let walker = &mut *self.walker.borrow_mut();
        if self.pace.get() != 0 {
            let known = walker.remembered.get(&frame.get());
            assert!(known.is_none(), "freed while a walker may use it: {frame} {known:?}");
        }
        assert!(walker.allocated.remove(&frame.get()), "{frame} was freed twice");
        walker.places.remove(&frame.get());
        // SAFETY: passed on.
        unsafe { self.memory.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        let base = unsafe { self.memory.table(frame, level) };
        self.opened.borrow_mut().insert(base.as_ptr().addr(), frame.get());
        base
    }
    fn barrier(&self, barrier: Barrier) {
        self.memory.barrier(barrier);
        if barrier == Barrier::Complete {
            let walker = &mut *self.walker.borrow_mut();
            walker.remembered.retain(|_, table| !table.leaving);
            walker.broken.retain(|_, broken| !broken.leaving);
        }
    }
    fn invalidate(&self, what: &Invalidation<'_>) {
        self.memory.invalidate(what);
        let walker = &mut *self.walker.borrow_mut();
        // Whether leaves from `from` to `to` are covered, and whether tables are as well.
        let covers = |from: u64, to: u64, height: Option<u32>| match what.what {
            What::Everything => true,
            What::Ranges(ranges) => ranges.iter().any(|stale| {
                let meets = from <= stale.last && stale.first <= to;
                meets
                    && match height {
                        None => stale.tables,
                        // A level that is told wrong invalidates nothing.
                        Some(height) => {
                            stale.level.is_none_or(|level| u32::from(level.height()) == height)
                        }
                    }
            }),
        };
        for table in walker.remembered.values_mut() {
            let last = table.first + ((1 << Self::shift(table.height + 1)) - 1);
            table.leaving |= covers(table.first, last, None);
        }
        for ((first, height), broken) in &mut walker.broken {
            let last = first + ((1 << Self::shift(*height)) - 1);
            let leaf = matches!(see::<F>(broken.descriptor, *height), Seen::Leaf(_));
            broken.leaving |= covers(*first, last, leaf.then_some(*height));
        }
    }
    fn caps(&self) -> Caps {
        self.memory.caps()
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.memory.link_of(frame)
    }
    fn hooks(&self) -> Option<impl Hooks + '_> {
        Some(self)
    }
}

// SAFETY: each access is made as the default makes it (1.), after what the walker does before it.
unsafe impl<F: Judged> Hooks for Machine<F> {
    unsafe fn load(&self, entry: NonNull<Entry>) -> u64 {
        self.tick(entry, false);
        // SAFETY: passed on.
        unsafe { entry.as_ref() }.load()
    }
    unsafe fn store(&self, entry: NonNull<Entry>, bits: u64) {
        self.tick(entry, true);
        self.judge_write(entry, bits);
        // SAFETY: passed on.
        unsafe { entry.as_ref() }.store(bits);
    }
    unsafe fn link(&self, entry: NonNull<Entry>, bits: u64) {
        self.tick(entry, true);
        self.judge_write(entry, bits);
        // SAFETY: passed on.
        unsafe { entry.as_ref() }.link(bits);
    }
    unsafe fn exchange(&self, entry: NonNull<Entry>, bits: u64) -> u64 {
        self.tick(entry, true);
        self.judge_write(entry, bits);
        // SAFETY: passed on.
        unsafe { entry.as_ref() }.exchange(bits)
    }
    unsafe fn compare_exchange(
        &self,
        entry: NonNull<Entry>,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        self.tick(entry, true);
        // SAFETY: passed on.
        let entry_now = unsafe { entry.as_ref() };
        if entry_now.load() == current {
            self.judge_write(entry, new);
        }
        entry_now.compare_exchange(current, new)
    }
    unsafe fn fill(&self, first: NonNull<Entry>, count: usize, value: u64, step: u64) {
        for index in 0..count {
            // SAFETY: passed on; the entry is one of the `count`.
            unsafe {
                let bits = value.wrapping_add(step.wrapping_mul(index as u64));
                self.store(first.add(index), bits);
            }
        }
    }
}

/// A leaf as it was reported.
#[derive(Clone, Copy, Debug)]
struct Told {
    first: u64,
    size: u64,
    run: Option<u64>,
    accessed: bool,
    dirty: bool,
}

struct World<'s, 'm, F: Judged> {
    machine: &'m Machine<F>,
    gather: Gather<'s, F, &'m Machine<F>>,
}

impl<F: Judged> World<'_, '_, F> {
    /// Compares what was reported about pages with the truth, which then is known.
    fn compare(&self, told: &[Told]) {
        let walker = &mut *self.machine.walker.borrow_mut();
        for leaf in told {
            let (mut accessed, mut dirty) = (leaf.accessed, leaf.dirty);
            if let Some(run) = leaf.run {
                // The members of a run speak for each other.
                let same = told.iter().filter(|other| other.run == Some(run));
                for other in same {
                    accessed |= other.accessed;
                    dirty |= other.dirty;
                }
            }
            let last = leaf.first + (leaf.size - 1);
            let lost = |set: &BTreeSet<u64>| set.range(leaf.first..=last).next().copied();
            if let (false, Some(page)) = (dirty, lost(&walker.written)) {
                panic!("{}: {page:#x} was written, told {leaf:?}", F::NAME);
            }
            if let (false, Some(page)) = (accessed, lost(&walker.accessed)) {
                panic!("{}: {page:#x} was accessed, told {leaf:?}", F::NAME);
            }
            walker.written.retain(|page| !(leaf.first..=last).contains(page));
            walker.accessed.retain(|page| !(leaf.first..=last).contains(page));
        }
    }

    fn told(leaf: &Leaf<F>) -> Told {
        let attrs = leaf.attrs();
        Told {
            first: leaf.input().get(),
            size: leaf.size(),
            // The engine sees a run as one leaf.
            run: None,
            accessed: attrs.accessed,
            dirty: attrs.dirty,
        }
    }

    /// Compares the tables in the end, by the separate walker.
    fn compare_tables(&self) {
        self.machine.pace.set(0);
        let memory = &self.machine.memory;
        let mut told = Vec::new();
        let mut read = |table: u64, index: usize| memory.read(Pa::new(table), index).unwrap();
        let root = self.gather.root().get();
        walker::leaves(F::REGIME, root, walker::Half::Lower, &mut read, |leaf| {
            let attrs = words::<F>(leaf);
            told.push(Told {
                first: leaf.va,
                size: leaf.size,
                run: leaf.contiguous.then_some(leaf.va & !(leaf.run_size - 1)),
                accessed: attrs.accessed,
                dirty: attrs.dirty,
            });
            ControlFlow::Continue(())
        })
        .unwrap();
        // The walker does not see what is parked.
        self.gather.walk_all(|leaf| {
            if leaf.attrs().perms.is_empty() {
                told.push(Self::told(&leaf));
            }
        });
        self.compare(&told);
        let walker = self.machine.walker.borrow();
        let forgotten = walker.written.iter().chain(&walker.accessed).next();
        assert_eq!(forgotten, None, "a page whose flags were never reported");
    }

    fn complete(&mut self) {
        self.gather.flush(|_| panic!("no leaf was detached"));
    }

    fn map(&mut self, at: Span<Va>, mapping: Mapping) {
        // What was unmapped or replaced here has to be forgotten first.
        self.complete();
        let frame = Pa::new(self.machine.extent + at.start().get());
        match self.gather.map(at, frame, mapping) {
            Ok(()) | Err(EditError::AlreadyMapped(_) | EditError::OutOfTables) => {}
            Err(error) => panic!("{error:?}"),
        }
    }

    fn change(&mut self, at: Span<Va>, change: Change, clears: (bool, bool)) {
        match self.gather.protect(at, change) {
            Ok(()) => {
                // Asked to forget what happened until now.
                let inside = |page: &u64| at.contains(Va::new(*page));
                let walker = &mut *self.machine.walker.borrow_mut();
                if clears.0 {
                    walker.accessed.retain(|page| !inside(page));
                }
                if clears.1 {
                    walker.written.retain(|page| !inside(page));
                }
            }
            Err(EditError::OutOfTables | EditError::NeedsBreak(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
    }

    fn unmap(&mut self, at: Span<Va>) {
        self.complete();
        let (mut first, last) = (at.start(), at.last());
        loop {
            let (mut held, mut told) = (Vec::new(), Vec::new());
            let part = Span::inclusive(first, last).unwrap();
            let unbroken = self.machine.unbroken.replace(false);
            let progress = self.gather.unmap(part, |leaf| {
                held.push(leaf);
                ControlFlow::Continue(())
            });
            self.machine.unbroken.set(unbroken);
            // Time passes between the edit, the issue and the completion.
            for _ in 0..20 {
                let page = self.machine.dice.roll(self.machine.extent) & !(Machine::<F>::PAGE - 1);
                if self.machine.pace.get() != 0 {
                    self.machine.access(page, true);
                }
            }
            self.gather.flush(|leaf| told.push(Self::told(&leaf)));
            for leaf in held {
                // SAFETY: its gather has been flushed (1.).
                told.push(Self::told(&unsafe { leaf.assume_complete() }));
            }
            self.compare(&told);
            match progress {
                Ok(Progress::Done) => return,
                Ok(Progress::Stopped(at)) => first = at,
                Err(EditError::OutOfTables | EditError::NeedsBreak(_)) => return,
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    /// One edit by the dice.
    fn edit(&mut self) {
        let dice = &self.machine.dice;
        let page = Machine::<F>::PAGE;
        let pages = self.machine.extent / page;
        let block = 1u64 << (F::shift(Level::new(1)) - F::PAGE_SHIFT);
        let run = 1u64 << F::contiguous(Level::PAGE);
        // Whole blocks, whole runs, or anything.
        let unit = match dice.roll(3) {
            0 => block,
            1 => run,
            _ => 1,
        };
        let first = dice.roll(pages / unit) * unit;
        let most = (pages - first) / unit;
        let length =
            (1 + dice.roll(most.min(if unit == 1 { 2 * run } else { 3 }))).min(most) * unit;
        let at = Span::new(Va::new(first * page), length * page).unwrap();
        let untouched = Attrs { accessed: dice.roll(2) == 0, dirty: false, ..Attrs::KERNEL_DATA };
        let mut mapping = Mapping::new(untouched).largest(Level::new(1));
        mapping = match dice.roll(3) {
            0 => mapping.pages_only(),
            1 => mapping.without_runs(),
            _ => mapping,
        };
        let change = Change::new();
        let both = Perms::READ | Perms::WRITE;
        match dice.roll(19) {
            16..=17 => {
                // What is parked is meant not to be mapped, and no more of the space.
                let unbroken = self.machine.unbroken.replace(false);
                self.change(at, change.perms(Perms::empty()), (false, false));
                self.machine.unbroken.set(unbroken);
            }
            18 => {
                let parked = change.perms(Perms::empty()).memory(Memory::NonCacheable);
                let unbroken = self.machine.unbroken.replace(false);
                self.change(at, parked, (false, false));
                self.machine.unbroken.set(unbroken);
            }
            0..=3 => self.map(at, mapping),
            4..=5 => self.unmap(at),
            6 => self.change(at, change.perms(Perms::READ), (false, false)),
            7 => self.change(at, change.perms(both), (false, false)),
            8 => self.change(at, change.write_protect(), (false, false)),
            9 => self.change(at, change.accessed(false), (true, false)),
            10 => self.change(at, change.dirty(false), (false, true)),
            11 => {
                let memory = match dice.roll(2) {
                    0 => Memory::Normal,
                    _ => Memory::NonCacheable,
                };
                self.change(at, change.memory(memory).software(3), (false, false));
            }
            12..=13 => match self.gather.split(at, Level::PAGE) {
                Ok(()) | Err(EditError::OutOfTables | EditError::NeedsBreak(_)) => {}
                Err(error) => panic!("{error:?}"),
            },
            _ => {
                let runs = dice.roll(2) == 0;
                self.gather.collapse(at, Level::new(1), runs).unwrap();
            }
        }
        if self.machine.dice.roll(2) == 0 {
            self.complete();
        }
    }
}

fn race<F: Judged>(seed: u64, liveness: Liveness, anywhere_in_a_run: bool) {
    let caps =
        Caps { bbm: if F::HALVES { (seed % 4) as u8 } else { 0 }, ..tablewright_hosted::CAPS };
    // Sometimes enough for a run of blocks and a little more.
    let run = 1u64 << F::contiguous(Level::new(1));
    let blocks = if seed % 5 == 4 && run <= 16 { run + 2 } else { 3 };
    let extent = blocks << F::shift(Level::new(1));
    let mut machine = Machine::<F>::new(seed, caps, extent);
    machine.anywhere_in_a_run = anywhere_in_a_run;
    let mut space = AddressSpace::<F, _>::new(&machine).unwrap();
    common::used(&mut space, liveness);
    machine.walker.borrow_mut().root = Some(space.root());
    let mut world = World { machine: &machine, gather: space.gather() };
    // Something to begin with, so that not every edit meets a hole.
    let untouched = Attrs { accessed: false, dirty: false, ..Attrs::KERNEL_DATA };
    let all = Span::new(Va::new(0), extent).unwrap();
    let mut mapping = Mapping::new(untouched).largest(Level::new((seed / 4 % 2) as u8));
    if seed.is_multiple_of(3) {
        mapping = mapping.without_runs();
    }
    world.map(all, mapping);
    machine.pace.set([2, 8, 64, 512][(seed / 8 % 4) as usize]);
    machine.unbroken.set(liveness == Liveness::Own);
    for _ in 0..10 {
        world.edit();
    }
    world.complete();
    world.compare_tables();
    drop(world);
    common::used(&mut space, Liveness::Dead);
    assert!(space.destroy(|_| ()).is_ok());
    let counts = machine.memory.counts();
    assert_eq!((counts.tables, counts.bad_frees), (0, 0));
}

/// Runs a race for each seed and names those that were lost.
fn races<F: Judged>(seeds: u64, liveness: Liveness, anywhere_in_a_run: bool) {
    let one: Option<u64> = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = if cfg!(miri) { 2 } else { seeds };
    for seed in one.map_or(0..seeds, |seed| seed..seed + 1) {
        let result = std::panic::catch_unwind(|| race::<F>(seed, liveness, anywhere_in_a_run));
        assert!(result.is_ok(), "{}: SEED={seed}", F::NAME);
    }
}

#[test]
fn nothing_that_hardware_records_is_lost_arm64_4k() {
    races::<Arm64K4>(400, Liveness::Live, false);
}

#[test]
fn nothing_that_hardware_records_is_lost_arm64_16k() {
    races::<Arm64K16>(200, Liveness::Live, false);
}

#[test]
fn nothing_that_hardware_records_is_lost_x86_64() {
    races::<X86_64<4>>(400, Liveness::Live, false);
}

#[test]
fn nothing_is_lost_where_a_run_records_for_all_its_members_in_one_arm64_4k() {
    races::<Arm64K4>(400, Liveness::Live, true);
}

#[test]
fn nothing_is_lost_where_a_run_records_for_all_its_members_in_one_arm64_16k() {
    races::<Arm64K16>(200, Liveness::Live, true);
}

#[test]
fn the_own_space_is_never_broken_whatever_hardware_does_meanwhile() {
    races::<Arm64K4>(400, Liveness::Own, false);
}
