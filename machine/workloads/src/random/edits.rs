//! One CPU edits a space with the engine; others use it meanwhile.
//!
//! Two regions: single pages of tracked memory, which are taken, mapped, unmapped and given back;
//! and blocks and contiguous runs of memory that holds nothing.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::ptr::NonNull;

use tablewright::flush::Held;
use tablewright::{
    AddressSpace, Attrs, Change, EditError, Format, Gather, Leaf, Level, Liveness, Mapping, Memory,
    Pa, Perms, Platform, Progress, Span, Va,
};
use tablewright_machine::{Cpu, Machine, Outcome, Rule, RunError};

use super::oracle::{Oracle, Page, Spot, State, sets};
use super::{Bug, Dice, Kind, announce, destroy, until_done};
use crate::platform::{Control, Faulty, Stage};

/// Pages of the first region.
const DATA: u64 = 10;
/// Blocks of the second.
const BLOCKS: u64 = 2;
/// The frames of the second region.
const FAR: u64 = 1 << 40;

/// Places of everything.
#[derive(Clone, Copy)]
struct Layout {
    page: u64,
    block: u64,
    /// A contiguous run of pages, or what would be one.
    run: u64,
    data: u64,
    large: u64,
}

impl Layout {
    fn new<F: Format>(base: u64) -> Self {
        let page = 1u64 << F::PAGE_SHIFT;
        let block = page << F::INDEX_BITS;
        Self {
            page,
            block,
            run: page << F::contiguous(Level::PAGE).max(2),
            data: base + 4 * block,
            large: base + 8 * block,
        }
    }

    /// Addresses at which an edit of the second region may begin or end.
    fn cuts(&self) -> [u64; 9] {
        let Self { page, block, run, .. } = *self;
        [0, page, run, 2 * run, block - run, block, block + page, block + run, 2 * block]
    }

    fn spots(&self) -> impl Iterator<Item = u64> {
        let Self { page, block, run, data, large } = *self;
        let inside = [
            0,
            page,
            run - page,
            run,
            2 * run,
            block - run,
            block - page,
            block,
            block + page,
            block + run,
            2 * block - page,
        ];
        let pages = (0..DATA).map(move |number| data + number * page);
        pages.chain(inside.map(|offset| large + offset))
    }
}

pub(crate) struct Editor<'a, 'm, F: Format> {
    machine: &'m Machine,
    control: &'m Control,
    dice: &'a Dice,
    oracle: &'a Oracle<'m>,
    /// It outlives the editor, which reaches it through the gather while there is one.
    space: NonNull<AddressSpace<F, Faulty<'m>>>,
    at: Layout,
    gather: Option<Gather<'a, F, Faulty<'m>>>,
    /// Leaves that the gather holds back.
    held: Vec<Held<Leaf<F>>>,
    /// Spots whose change is complete when the gather is.
    pending: Vec<&'a Spot>,
    /// Ranges of the gather: not to be mapped again, and on arm64 not to be edited, before it is
    /// complete.
    touched: Vec<(u64, u64)>,
}

type Refused = EditError<Va>;

fn span(first: u64, last: u64) -> Span<Va> {
    Span::inclusive(Va::new(first), Va::new(last)).expect("edits begin and end with a page")
}

/// Runs it. `between` is told the digest of memory when the part with faults is over.
pub fn run<F: Format<Input = Va>>(
    machine: &Machine,
    control: &Control,
    dice: &Dice,
    kind: Kind,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    let platform = Faulty::new(machine, control);
    let (half, base) = kind.half(dice);
    let at = Layout::new::<F>(base);
    let oracle = Oracle::new(machine, at.spots());
    let id = 1 + dice.below(255) as u16;
    // Frames are refused.
    let mut space = loop {
        if let Some(space) = AddressSpace::<F, _>::new_in(platform, half) {
            break space.with_id(id);
        }
    };
    let mut editor = Editor {
        machine,
        control,
        dice,
        oracle: &oracle,
        space: NonNull::from(&mut space),
        at,
        gather: None,
        held: Vec::new(),
        pending: Vec::new(),
        touched: Vec::new(),
    };
    // Something that is there from the start.
    for _ in 0..dice.below(4) {
        editor.map_pages();
        editor.map_large();
    }
    editor.complete();
    // SAFETY: the space is alive, and complete.
    let root = unsafe {
        let space = editor.space.as_mut();
        if dice.once_in(5) {
            space.make_own();
        } else {
            space.make_live();
        }
        space.root()
    };
    platform.mapper.attach(root, half, id);

    let edits = 6 + dice.below(18);
    let done = Cell::new(false);
    let editor = RefCell::new(editor);
    let seed = dice.below(1 << 48);
    let outcome = machine.run(|cpu| {
        platform.mapper.load();
        if cpu.id() == 0 {
            let mut editor = editor.borrow_mut();
            for _ in 0..edits {
                editor.edit(cpu);
            }
            if control.is(Bug::LastGatherForgotten) && editor.held.is_empty() {
                std::mem::forget(editor.gather.take());
            }
            editor.complete();
            done.set(true);
            return;
        }
        until_done(cpu, &done, seed, |dice| oracle.try_one(cpu, dice));
    });
    let outcome = match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            // No CPU goes on, so that nothing can be completed.
            std::mem::forget(editor);
            return Err(error);
        }
    };
    between(machine.digest());
    if !machine.violations().is_empty() || control.is(Bug::LastGatherForgotten) {
        return Ok(outcome);
    }
    machine.calm();
    editor.into_inner().tear_down();
    destroy(machine, space, &platform.mapper);
    Ok(outcome)
}

impl<'a, 'm, F: Format<Input = Va>> Editor<'a, 'm, F> {
    fn edit(&mut self, cpu: Cpu<'_>) {
        match self.dice.below(15) {
            0..=2 => self.map_pages(),
            3..=4 => self.unmap_pages(),
            5 => self.protect_pages(),
            6 => self.make_code(),
            7..=8 => self.map_large(),
            9 => self.unmap_large(),
            10..=11 => self.protect_large(),
            12 => self.split(),
            13 => {
                self.collapse();
                if self.dice.once_in(2) {
                    self.split();
                }
            }
            _ => self.look(),
        }
        if self.dice.once_in(4) {
            self.oracle.try_one(cpu, self.dice);
        }
        if self.dice.once_in(2) {
            self.complete();
        }
    }

    fn is(&self, bug: Bug) -> bool {
        self.control.is(bug)
    }

    /// Returns the gather in use, or a new one.
    fn gather(&mut self) -> &mut Gather<'a, F, Faulty<'m>> {
        let mut space = self.space;
        // SAFETY: the space outlives the editor, and there is no other gather.
        let gather = || unsafe { space.as_mut() }.gather();
        self.gather.get_or_insert_with(gather)
    }

    fn space(&self) -> &AddressSpace<F, Faulty<'m>> {
        match &self.gather {
            Some(gather) => gather,
            // SAFETY: the space outlives the editor, and there is no gather.
            None => unsafe { self.space.as_ref() },
        }
    }

    /// Announces what the addresses will be, does it, and takes the announcement back if it is
    /// refused.
    ///
    /// In the second region, all of a block or run may be broken for a part of it.
    fn change(
        &mut self,
        (first, last): (u64, u64),
        becomes: impl Fn(Page) -> Option<Page>,
        change: &Change,
        edit: impl FnOnce(&mut Self) -> Result<(), Refused>,
    ) {
        self.forget_before(first, last, false);
        let oracle = self.oracle;
        let (low, high) = self.extent(first, last);
        let inside = |spot: &Spot| (first..=last).contains(&spot.va);
        let merges = first >= self.at.large;
        let before: Vec<(&'a Spot, State)> = oracle
            .inside(low, high)
            .map(|spot| {
                let page = spot.page();
                let new = if inside(spot) { page.and_then(&becomes) } else { page };
                let before = spot.begin(if merges { new.map(Page::merged) } else { new });
                (spot, if merges { before.merged() } else { before })
            })
            .collect();
        let done = edit(self);
        self.may_be_refused(done);
        for (spot, before) in before {
            if done.is_ok() && inside(spot) {
                let (accessed, dirty) = sets(change);
                spot.clears(accessed == Some(false), dirty == Some(false));
                self.pending.push(spot);
            } else {
                spot.restore(before);
            }
        }
    }

    /// Frames run out, and a space in use must not be broken. Nothing else is a reason to refuse.
    fn may_be_refused(&self, done: Result<(), Refused>) {
        let own = self.space().liveness() == Liveness::Own;
        match done {
            Ok(()) | Err(EditError::OutOfTables | EditError::AlreadyMapped(_)) => {}
            Err(EditError::NeedsBreak(_)) if own => {}
            Err(error) => self.machine.report(Rule::Program, format!("refused: {error}")),
        }
    }

    /// Completes what was done to these addresses, where the oracle has to know when the next
    /// change begins. The engine needs none of it: sequences edit without.
    fn forget_before(&mut self, first: u64, last: u64, maps: bool) {
        let (first, last) = self.extent(first, last);
        let touched = self.touched.iter().any(|&(from, to)| from <= last && first <= to);
        let spared = !maps && self.machine.architecture().is_x86();
        if touched && !spared {
            self.complete();
        }
        self.touched.push((first, last));
    }

    /// Returns the range that an edit of these addresses may touch: in the second region the rest
    /// of a block, too.
    fn extent(&self, first: u64, last: u64) -> (u64, u64) {
        if first >= self.at.large {
            (self.at.large, self.at.large + (BLOCKS * self.at.block - 1))
        } else {
            (first, last)
        }
    }

    fn attrs(&self, of: &[Attrs]) -> Attrs {
        Attrs {
            dirty: self.dice.once_in(2),
            accessed: !self.dice.once_in(4),
            software: self.dice.below(8) as u8,
            memory: self.dice.pick(&[Memory::Normal, Memory::Normal, Memory::WriteThrough]),
            ..self.dice.pick(of)
        }
    }

    // ---- Pages of memory ----

    fn map_pages(&mut self) {
        let dice = self.dice;
        let first = dice.below(DATA);
        for number in first..DATA.min(first + 1 + dice.below(4)) {
            self.map_page(number);
        }
    }

    fn map_page(&mut self, number: u64) {
        let va = self.at.data + number * self.at.page;
        let last = va + (self.at.page - 1);
        self.forget_before(va, last, true);
        let Some(spot) = self.oracle.inside(va, last).next() else {
            return;
        };
        if spot.page().is_some() {
            return;
        }
        let Some(page) = self.machine.take_page() else {
            return;
        };
        self.oracle.fresh(page);
        let mut attrs = match self.dice.below(8) {
            0 => self.attrs(&[Attrs::KERNEL_TEXT, Attrs::USER_TEXT]),
            1 => Attrs {
                memory: Memory::NonCacheable,
                ..self.attrs(&[Attrs::KERNEL_DATA, Attrs::USER_DATA])
            },
            _ => self.attrs(&[
                Attrs::KERNEL_DATA,
                Attrs::USER_DATA,
                Attrs::USER_DATA,
                Attrs::KERNEL_RODATA,
                Attrs::USER_RODATA,
            ]),
        };
        // The kernel has filled it through its own mapping.
        self.machine.write_page(page);
        if attrs.memory == Memory::NonCacheable {
            if !self.is(Bug::NotCleaned) {
                self.machine.clean(page);
            }
        } else if attrs.perms.intersects(Perms::ANY_EXEC) {
            attrs.memory = Memory::Normal;
            self.synchronise_code(page);
        }
        let before = spot.begin(Some(Page::new(page.get(), attrs)));
        let mapping = Mapping::new(attrs).pages_only();
        let mapped = self.gather().map(span(va, last), page, mapping);
        self.may_be_refused(mapped);
        if mapped.is_ok() {
            self.pending.push(spot);
        } else {
            spot.restore(before);
            self.machine.give_page(page);
        }
    }

    /// New code: from where data is to where code is fetched.
    fn synchronise_code(&self, page: Pa) {
        if !self.is(Bug::CodeNotCleaned) {
            self.machine.clean(page);
        }
        if !self.is(Bug::CodeNotRefetched) {
            let all = self.machine.architecture().icache_aliasing;
            self.machine.invalidate_instructions((!all).then_some(page));
        }
    }

    /// Some of the pages, first and last address.
    fn some_pages(&self) -> (u64, u64) {
        let first = self.dice.below(DATA);
        let count = 1 + self.dice.below(4).min(DATA - 1 - first);
        let va = self.at.data + first * self.at.page;
        (va, va + (count * self.at.page - 1))
    }

    fn unmap_pages(&mut self) {
        let (first, last) = self.some_pages();
        if self.is(Bug::FreedWhileMapped) {
            let mapped = self.oracle.inside(first, last).find_map(Spot::page);
            if let Some(page) = mapped {
                self.machine.give_page(Pa::new(page.pa));
                return;
            }
        }
        let control = self.control;
        control.during(Stage::Unmapping, || self.unmap(first, last));
    }

    fn protect_pages(&mut self) {
        let (first, last) = self.some_pages();
        // What is code is taken away from CPUs that execute it before it may be written.
        let executable = self
            .oracle
            .inside(first, last)
            .filter_map(Spot::page)
            .any(|page| page.attrs.perms.intersects(Perms::ANY_EXEC));
        if executable {
            self.protect(first, last, Change::new().perms(Perms::READ));
            self.complete();
            return;
        }
        for _ in 0..1 + self.dice.below(3) {
            let change = self.some_change();
            self.protect(first, last, change);
        }
    }

    /// A page that others may have written becomes code.
    fn make_code(&mut self) {
        let number = self.dice.below(DATA);
        let va = self.at.data + number * self.at.page;
        let last = va + (self.at.page - 1);
        let Some(page) = self.oracle.inside(va, last).next().and_then(Spot::page) else {
            return;
        };
        if page.attrs.memory == Memory::NonCacheable {
            return;
        }
        self.protect(va, last, Change::new().perms(Perms::READ | Perms::USER_READ));
        self.complete();
        let spot = self.oracle.inside(va, last).next();
        let writable = spot
            .and_then(Spot::page)
            .is_none_or(|page| page.attrs.perms.intersects(Perms::ANY_WRITE));
        if writable {
            return;
        }
        self.synchronise_code(Pa::new(page.pa));
        let code = Perms::READ | Perms::USER_READ | Perms::USER_EXEC;
        self.protect(va, last, Change::new().perms(code));
    }

    // ---- Blocks and runs ----

    fn some_large(&self) -> (u64, u64) {
        let cuts = self.at.cuts();
        let first = self.dice.below(cuts.len() as u64 - 1) as usize;
        let end = first + 1 + self.dice.below((cuts.len() - 1 - first) as u64) as usize;
        (self.at.large + cuts[first], self.at.large + (cuts[end] - 1))
    }

    fn map_large(&mut self) {
        let (first, last) = self.some_large();
        self.forget_before(first, last, true);
        let attrs = self.attrs(&[
            Attrs::KERNEL_DATA,
            Attrs::USER_DATA,
            Attrs::USER_DATA,
            Attrs::USER_RODATA,
        ]);
        let frame = FAR + (first - self.at.large);
        let mut mapping = Mapping::new(attrs).largest(Level::new(1));
        if self.dice.once_in(3) {
            mapping = mapping.largest(Level::PAGE);
        }
        if self.dice.once_in(3) {
            mapping = mapping.without_runs();
        }
        let oracle = self.oracle;
        let large = self.at.large;
        let free = |spot: &&Spot| spot.page().is_none();
        let before: Vec<_> = oracle
            .inside(first, last)
            .filter(free)
            .map(|spot| {
                let page = Page::new(FAR + (spot.va - large), attrs);
                (spot, spot.begin(Some(page)))
            })
            .collect();
        let range = span(first, last);
        let mapped = self.gather().map(range, Pa::new(frame), mapping);
        self.may_be_refused(mapped);
        for (spot, before) in before {
            if mapped.is_ok() {
                self.pending.push(spot);
            } else {
                spot.restore(before);
            }
        }
    }

    fn unmap_large(&mut self) {
        let (first, last) = self.some_large();
        self.unmap(first, last);
    }

    fn protect_large(&mut self) {
        let (first, last) = self.some_large();
        let change = self.some_change();
        self.protect(first, last, change);
    }

    fn split(&mut self) {
        let (first, last) = self.some_large();
        self.change((first, last), Some, &Change::new(), |this| {
            this.gather().split(span(first, last), Level::PAGE)
        });
    }

    fn collapse(&mut self) {
        let (first, last) = (self.at.large, self.at.large + (BLOCKS * self.at.block - 1));
        let runs = self.dice.once_in(2);
        self.change((first, last), Some, &Change::new(), |this| {
            let range = span(first, last);
            let collapsed = this.gather().collapse(range, Level::new(1), runs);
            collapsed.map(|_| ())
        });
    }

    // ---- Both ----

    fn some_change(&self) -> Change {
        let change = Change::new();
        let data = Perms::READ | Perms::WRITE;
        let user = data | Perms::USER_READ | Perms::USER_WRITE;
        match self.dice.below(13) {
            0..=1 => change.write_protect(),
            2..=3 => change.perms(user),
            4 => change.perms(data),
            5 => change.perms(user - Perms::ANY_WRITE),
            6 => change.accessed(self.dice.once_in(2)),
            7 => change.dirty(self.dice.once_in(2)),
            8 => change.accessed(false).dirty(false),
            9 => change.memory(self.dice.pick(&[Memory::Normal, Memory::WriteThrough])),
            10 => change.global(self.dice.once_in(2)),
            11 => change
                .memory(self.dice.pick(&[Memory::Normal, Memory::WriteThrough]))
                .accessed(true),
            _ => change.software(self.dice.below(8) as u8),
        }
    }

    fn protect(&mut self, first: u64, last: u64, change: Change) {
        // What is made writable is made dirty where no hardware marks it.
        let clean = Attrs::KERNEL_RODATA;
        let caps = self.gather().platform().caps();
        let marks = change.apply_on(clean, F::RULE, &caps).dirty && !change.apply(clean).dirty;
        let said = if marks { change.dirty(true) } else { change };
        let becomes = |page: Page| Some(page.changed(&said));
        self.change((first, last), becomes, &said, |this| {
            this.gather().protect(span(first, last), change)
        });
    }

    /// Unmaps, in pieces if there is more than fits. Pages of memory go back.
    fn unmap(&mut self, first: u64, last: u64) {
        let mut rest = Some(first);
        while let Some(first) = rest {
            let room = 1 + self.dice.below(24) as usize;
            let mut stopped = None;
            let early = self.is(Bug::FreedBeforeCompletion);
            self.change(
                (first, last),
                |_| None,
                &Change::new(),
                |this| {
                    let mut held = std::mem::take(&mut this.held);
                    let (machine, oracle) = (this.machine, this.oracle);
                    let progress = this.gather().unmap(span(first, last), |leaf| {
                        if early {
                            // SAFETY: what it names is reused too early, which is the bug.
                            give_back(machine, oracle, &unsafe { leaf.assume_complete() });
                        } else {
                            held.push(leaf);
                        }
                        if held.len() >= room {
                            ControlFlow::Break(())
                        } else {
                            ControlFlow::Continue(())
                        }
                    });
                    this.held = held;
                    if let Progress::Stopped(at) = progress? {
                        stopped = Some(at.get());
                    }
                    Ok(())
                },
            );
            if let Some(at) = stopped {
                // Complete is what lies below.
                self.pending.retain(|spot| !(at..=last).contains(&spot.va));
                self.complete();
            }
            rest = stopped;
        }
    }

    /// Looks whether the engine says of a page what it has been told.
    fn look(&self) {
        let spots = &self.oracle.spots;
        let spot = &spots[self.dice.below(spots.len() as u64) as usize];
        // A run is read member by member, and others write to it meanwhile.
        let written = spot.is_steady() && spot.is_written();
        let leaf = self.space().query(Va::new(spot.va));
        let found = leaf.as_ref().map(|leaf| {
            let frame = leaf.frame().get() + (spot.va - leaf.input().get());
            (frame, leaf.attrs().perms)
        });
        let known = spot.page().map(|page| (page.pa, page.attrs.perms));
        self.machine.check(found == known, || {
            format!("{:#x} is {known:x?}, and the engine says {found:x?}", spot.va)
        });
        let said = leaf.is_some_and(|leaf| leaf.attrs().dirty);
        if written && !said {
            self.machine.report(
                Rule::FlagLost,
                format!("{:#x} was written, and its leaf does not say so", spot.va),
            );
        }
    }

    /// Has everything forgotten that was changed, and gives back what was detached.
    fn complete(&mut self) {
        let control = self.control;
        let Some(gather) = self.gather.take() else {
            return;
        };
        let held = std::mem::take(&mut self.held);
        if self.is(Bug::GatherForgotten) && held.is_empty() {
            std::mem::forget(gather);
        } else {
            // All that is left is to be seen, or there is something to be forgotten.
            let stage = match gather.is_clean() {
                true => Stage::Mapping,
                false => Stage::Flushing,
            };
            control.during(stage, || self.finish(gather, held));
            announce(self.machine);
        }
        self.pending.drain(..).for_each(Spot::end);
        self.touched.clear();
    }

    fn finish(&self, gather: Gather<'a, F, Faulty<'m>>, held: Vec<Held<Leaf<F>>>) {
        let issued = gather.issue();
        let cpu = self.machine.cpu();
        if self.space().liveness() != Liveness::Dead && self.dice.once_in(2) {
            cpu.spend(self.dice.time());
            self.oracle.try_one(cpu, self.dice);
        }
        let mut completed = issued.complete();
        for leaf in held {
            match completed.release(leaf) {
                Ok(leaf) => give_back(self.machine, self.oracle, &leaf),
                Err(_) => self.machine.report(Rule::Program, "a leaf of another gather".to_owned()),
            }
        }
        let mut reclaim = || {
            completed.reclaim(|leaf| {
                give_back(self.machine, self.oracle, &leaf);
                if self.dice.once_in(8) {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            })
        };
        while !reclaim() {}
    }

    /// Unmaps everything: now nothing may fail, and nothing may be left.
    fn tear_down(&mut self) {
        self.complete();
        let Layout { page, block, .. } = self.at;
        for (first, size) in [(self.at.data, DATA * page), (self.at.large, BLOCKS * block)] {
            let last = first + (size - 1);
            self.unmap(first, last);
            self.complete();
            let left = self.oracle.inside(first, last).find(|spot| spot.page().is_some());
            if let Some(spot) = left {
                let what = format!("{:#x} cannot be unmapped", spot.va);
                self.machine.report(Rule::NoProgress, what);
            }
        }
    }
}

/// A leaf that is not used any more.
fn give_back<F: Format<Input = Va>>(machine: &Machine, oracle: &Oracle<'_>, leaf: &Leaf<F>) {
    oracle.account(leaf);
    if (machine.memory().first()..machine.memory().end()).contains(&leaf.frame().get()) {
        machine.give_page(leaf.frame());
    }
}
