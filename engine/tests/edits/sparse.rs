//! Sparse trees: a few leaves at the ends of tables and of lines of entries, and holes between
//! them.
//!
//! A walk passes holes by, by lines. Each edit is made here over ranges of the whole space, whose
//! tables have next to nothing in them, so that an entry that a walk passes by without need, or an
//! address that is wrong behind holes, is a leaf that an edit has not come to, or that it says is
//! elsewhere. A plain model says what is there; the separate walker judges.

use std::cell::RefCell;
use std::ops::ControlFlow;

use crate::common::{
    Decoded, Dice, Mapped, Model, Stretches, assert_same, is_el2, is_guest, judge, used,
};
use tablewright::{
    Address, AddressSpace, Attrs, Caps, Change, EditError, Half, Leaf, Level, Liveness, Mapping,
    Pa, Progress, Span,
};
use tablewright_hosted::Hosted;
use tablewright_walker::Regime;

fn kind_of_memory<F: Decoded>() -> Attrs {
    match is_el2::<F>() {
        true => Attrs::KERNEL_DATA,
        false if is_guest::<F>() => Attrs::GUEST_MEMORY,
        false => Attrs::USER_DATA,
    }
}

/// An entry at an end of a table or of a line, or next to one.
fn edge(dice: &Dice, entries: usize) -> usize {
    let last = entries - 1;
    let near = [0, 1, 2, 6, 7, 8, 9, 15, 16][dice.roll(9) as usize].min(last);
    match dice.roll(3) {
        0 => last - near,
        1 => entries / 2 - 1 + near % 3,
        _ => near,
    }
    .min(last)
}

/// An address that the entries at such places translate, at each level.
fn somewhere<F: Decoded>(dice: &Dice, half: Half) -> u64 {
    let mut at = 0;
    for height in 0..F::LEVELS {
        let level = Level::new(height);
        // Few places above, so that tables have several leaves.
        let index = match dice.roll(3) {
            0 if level != Level::PAGE => 0,
            _ => edge(dice, F::entries(level)),
        };
        at |= (index as u64) << F::shift(level);
    }
    let signed = F::SIGNED && !F::HALVES && at >> (F::INPUT_BITS - 1) != 0;
    if signed || F::HALVES && half == Half::Upper {
        at |= !0 << (F::INPUT_BITS - 1) << u32::from(!signed);
    }
    at
}

fn mapped<F: Decoded>(leaf: &Leaf<F>) -> (u64, Mapped) {
    let (size, pa, attrs) = (leaf.size(), leaf.frame().get(), leaf.attrs());
    (leaf.input().bits(), Mapped { size, pa, attrs })
}

struct World<'h, F: Decoded> {
    platform: &'h Hosted,
    space: AddressSpace<F, &'h Hosted>,
    half: Half,
    model: Model,
    dice: Dice,
}

impl<'h, F: Decoded> World<'h, F> {
    fn somewhere(&self) -> u64 {
        somewhere::<F>(&self.dice, self.half)
    }

    /// A range that begins and ends at such places, in one half.
    fn range(&self) -> Span<F::Input> {
        loop {
            let (one, other) = (self.somewhere(), self.somewhere());
            let page = (1 << F::PAGE_SHIFT) - 1;
            let (first, last) = (one.min(other), one.max(other) | page);
            if (first ^ last) >> 63 == 0 {
                return Span::inclusive(F::Input::from_bits(first), F::Input::from_bits(last))
                    .unwrap();
            }
        }
    }

    /// Returns the part of the model in a range.
    fn expected(&self, span: Span<F::Input>) -> Stretches {
        let (first, last) = (span.start().bits(), span.last().bits());
        let inside = |&&(at, it): &&(u64, Mapped)| at <= last && first <= at + (it.size - 1);
        let mut all = Stretches::default();
        for &(at, it) in self.model.stretches().0.iter().filter(inside) {
            let (from, to) = (at.max(first), (at + (it.size - 1)).min(last));
            let (pa, attrs) = (it.pa + (from - at), it.attrs);
            let size = to - from + 1;
            all.add(from, Mapped { size, pa, attrs });
        }
        all
    }

    fn map_some(&mut self) {
        for _ in 0..self.dice.roll(24) {
            let at = self.somewhere();
            let level = Level::new(self.dice.roll(2) as u8);
            let level = match F::is_leaf_level(level) && F::LEVELS > 1 {
                true => level,
                false => Level::PAGE,
            };
            let size = 1u64 << F::shift(level);
            let at = at & !(size - 1);
            let frame = self.dice.roll(1 << (F::OUTPUT_BITS - F::shift(level)).min(20)) * size;
            let span = Span::new(F::Input::from_bits(at), size).unwrap();
            let mapping = Mapping::new(kind_of_memory::<F>());
            match self.space.map(span, Pa::new(frame), mapping) {
                Ok(()) => self.model.map(at, size, frame, kind_of_memory::<F>()),
                Err(EditError::AlreadyMapped(_)) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    fn check(&self, what: &str) {
        let expected = self.model.stretches().sorted();
        let mut seen = Stretches::default();
        self.space.walk_all(|leaf| {
            let (at, it) = mapped(&leaf);
            seen.add(at, it);
        });
        assert_same(&seen.0, &expected.0, format!("{}: {what}", F::NAME));
        // The walker is asked for the lower half of what has two roots.
        if self.half == Half::Lower {
            let found = judge::<F>(self.platform, self.space.root()).sorted();
            assert_same(&found.0, &expected.0, format!("{}: {what}, judged", F::NAME));
        }
        assert_eq!(
            self.space.count_tables() - 1 + F::root_tables() as u64,
            self.platform.counts().tables,
            "{}: {what}",
            F::NAME
        );
    }

    fn walk(&self) {
        let span = self.range();
        let mut seen = Stretches::default();
        self.space
            .walk(span, |leaf| {
                let (at, it) = mapped(&leaf);
                // A block is named whole.
                let from = at.max(span.start().bits());
                let to = (at + (it.size - 1)).min(span.last().bits());
                let (pa, size) = (it.pa + (from - at), to - from + 1);
                seen.add(from, Mapped { size, pa, ..it });
                ControlFlow::Continue(())
            })
            .unwrap();
        let expected = self.expected(span);
        assert_same(&seen.0, &expected.0, format!("{}: a walk", F::NAME));
    }

    fn protect(&mut self) {
        let span = self.range();
        let (first, last) = (span.start().bits(), span.last().bits());
        let change = Change::new().write_protect();
        let caps = tablewright::Platform::caps(self.platform);
        match self.space.gather().protect(span, change) {
            Ok(()) => {
                self.model.change(first, last, |attrs| change.apply_on(attrs, F::RULE, &caps))
            }
            Err(EditError::NeedsBreak(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
        self.check("protected");
    }

    fn split(&mut self) {
        let span = self.range();
        let result = self.space.gather().split(span, Level::PAGE);
        match result {
            Ok(()) => self
                .space
                .walk(span, |leaf| {
                    assert_eq!(leaf.level(), Level::PAGE, "{}: {leaf:?}", F::NAME);
                    ControlFlow::Continue(())
                })
                .unwrap(),
            Err(EditError::NeedsBreak(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
        self.check("split");
    }

    fn collapse(&mut self) {
        let span = self.range();
        let largest = Level::new(1);
        if !F::is_leaf_level(largest) || F::LEVELS == 1 {
            return;
        }
        let mut gather = self.space.gather();
        let tables = self.platform.counts().tables;
        let done = gather.collapse(span, largest, self.dice.roll(2) == 0).unwrap();
        gather.finish(|_| panic!("a leaf was detached"));
        assert!(done > 0 || self.platform.counts().tables == tables);
        self.check("collapsed");
    }

    fn fork(&mut self) {
        let span = self.range();
        let (first, last) = (span.start().bits(), span.last().bits());
        let change = Change::new().write_protect();
        let caps = tablewright::Platform::caps(self.platform);
        let tables = self.platform.counts().tables;
        let mut child = AddressSpace::new_in(self.platform, self.half).unwrap();
        let mut told = Stretches::default();
        let (mut gather, mut into) = (self.space.gather(), child.gather());
        let done = gather.fork(span, change, &mut into, |leaf| {
            let (at, it) = mapped(&leaf);
            told.add(at, it);
        });
        gather.finish(|_| ());
        into.finish(|_| ());
        match done {
            Ok(()) => {
                self.model.change(first, last, |attrs| change.apply_on(attrs, F::RULE, &caps));
                let expected = self.expected(span);
                assert_same(&told.0, &expected.0, format!("{}: told", F::NAME));
                let mut seen = Stretches::default();
                child.walk_all(|leaf| {
                    let (at, it) = mapped(&leaf);
                    seen.add(at, it);
                });
                assert_same(&seen.0, &expected.0, format!("{}: the child", F::NAME));
                // What is mapped in the child already is found, wherever it is.
                if let Some(&(at, _)) = expected.0.first() {
                    let (mut gather, mut into) = (self.space.gather(), child.gather());
                    assert_eq!(
                        gather.fork(span, change, &mut into, |_| panic!("copied")),
                        Err(EditError::AlreadyMapped(F::Input::from_bits(at)))
                    );
                }
                // SAFETY: no processor walks tables on the hosted platform.
                unsafe { child.make_dead() };
                let mut gone = Stretches::default();
                let destroyed = child.destroy(|leaf| {
                    let (at, it) = mapped(&leaf);
                    gone.add(at, it);
                });
                assert!(destroyed.is_ok());
                assert_same(&gone.0, &expected.0, format!("{}: of the child", F::NAME));
            }
            Err(EditError::NeedsBreak(_)) => assert!(child.destroy(|_| panic!("copied")).is_ok()),
            Err(error) => panic!("{error:?}"),
        }
        // Splits may have made some.
        assert!(self.platform.counts().tables >= tables);
        self.check("forked");
    }

    fn unmap(&mut self) {
        let span = self.range();
        let (mut first, last) = (span.start().bits(), span.last().bits());
        let (stop_after, pause) = (self.dice.roll(9) as usize, self.dice.roll(5));
        let mut gone = Stretches::default();
        loop {
            let at = F::Input::from_bits;
            let part = Span::inclusive(at(first), at(last)).unwrap();
            let held = RefCell::new(Vec::new());
            let mut gather = self.space.gather();
            let result = gather.unmap(part, |leaf| {
                held.borrow_mut().push(leaf);
                match stop_after != 0 && held.borrow().len() >= stop_after {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            });
            let progress = match result {
                Ok(progress) => progress,
                Err(EditError::NeedsBreak(_)) => return gather.finish(|_| panic!("detached")),
                Err(error) => panic!("{error:?}"),
            };
            let mut completed = gather.issue().complete();
            for leaf in held.take() {
                gone.0.push(mapped(&completed.release(leaf).unwrap()));
            }
            // With a pause after every few leaves, each where the next one is.
            let mut count = 0;
            while !completed.reclaim(|leaf| {
                gone.0.push(mapped(&leaf));
                count += 1;
                match pause != 0 && count % pause == 0 {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            }) {}
            match progress {
                Progress::Done => break,
                Progress::Stopped(at) => first = at.bits(),
            }
        }
        let expected = self.model.unmap(span.start().bits(), last).sorted();
        assert_same(&gone.sorted().0, &expected.0, format!("{}: came out", F::NAME));
        self.check("unmapped");
    }
}

fn run<F: Decoded>(seed: u64, half: Half) {
    let dice = Dice::new(seed);
    let caps = Caps {
        bbm: dice.roll(3) as u8,
        hardware_access: false,
        hardware_dirty: false,
        ..tablewright_hosted::CAPS
    };
    let platform = Hosted::new(900, F::PAGE_SHIFT).with_caps(caps);
    let mut space = AddressSpace::<F, _>::new_in(&platform, half).unwrap();
    used(&mut space, [Liveness::Dead, Liveness::Live, Liveness::Own][dice.roll(3) as usize]);
    let model = Model::default();
    let mut world = World { platform: &platform, space, half, model, dice };
    for _ in 0..12 {
        world.map_some();
        world.check("mapped");
        world.walk();
        match world.dice.roll(6) {
            0 => world.protect(),
            1 => world.split(),
            2 => world.collapse(),
            3 => world.fork(),
            _ => world.unmap(),
        }
    }
    let World { mut space, model, .. } = world;
    // SAFETY: no processor walks tables on the hosted platform.
    unsafe { space.make_dead() };
    let mut gone = Stretches::default();
    assert!(
        space
            .destroy(|leaf| {
                let (at, it) = mapped(&leaf);
                gone.add(at, it);
            })
            .is_ok()
    );
    let expected = model.stretches().sorted();
    assert_same(&gone.sorted().0, &expected.0, format!("{}: destroyed", F::NAME));
    let counts = platform.counts();
    assert_eq!((counts.tables, counts.bad_frees), (0, 0));
}

fn sparse_trees_agree_with_the_model<F: Decoded>() {
    let seeds = match F::PAGE_SHIFT {
        _ if cfg!(miri) => 1,
        12 if matches!(F::REGIME, Regime::Arm64Stage1 { .. } | Regime::X86_64 { .. }) => 20,
        // These differ in where bits are, and not in how trees are edited.
        12 => 8,
        14 => 4,
        // Tables that are sixteen times as large.
        _ => 2,
    };
    for seed in 0..seeds {
        run::<F>(seed, Half::Lower);
        if F::HALVES {
            run::<F>(seed, Half::Upper);
        }
    }
}

for_each_format!(sparse_trees_agree_with_the_model);
for_each_guest_format!(sparse_trees_agree_with_the_model);
for_each_other_shape!(sparse_trees_agree_with_the_model);
