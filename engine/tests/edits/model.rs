//! Random edits on every shape of tree against a plain model, judged by the separate walker.
//!
//! After each edit, what the walker finds in the tables is what the model says. Before an edit goes
//! through, it is tried with too few table frames, at every possible point of failure, and must
//! leave every bit of every table as it was. At the end every table frame is back, and none came
//! back twice.

use std::cell::RefCell;
use std::ops::ControlFlow;

use crate::common::{
    Decoded, Mapped, Model, Stretches, assert_same, is_el2, is_guest, judge_with_parked, snapshot,
};
use proptest::prelude::*;
use tablewright::{
    Address, AddressSpace, Attrs, Caps, Change, EditError, Format, Gather, Leaf, Level, Liveness,
    Mapping, Memory, Pa, Perms, Platform, Progress, Span,
};
use tablewright_hosted::Hosted;
use tablewright_walker::Regime;

/// An edit in terms that every format can make sense of.
#[derive(Clone, Debug)]
enum Op {
    Map { place: Place, memory: u8, attrs: u8, leaves: u8 },
    Unmap { place: Place, stop_after: u8, several: bool },
    Protect { place: Place, change: u8 },
    Split { place: Place, level: u8 },
    Collapse { place: Place, level: u8, runs: bool },
    Live(u8),
}

/// A range near the boundaries that matter: of an entry at some level, of a run, of the whole
/// space.
#[derive(Clone, Debug)]
struct Place {
    /// The level whose entry boundary the range is near.
    level: u8,
    /// Which boundary: from the start, the end or the middle of the space.
    number: u8,
    /// Pages before or after the boundary.
    offset: i8,
    /// How the length is measured, and how much of it.
    unit: u8,
    length: u8,
}

fn place() -> impl Strategy<Value = Place> {
    (0..5u8, 0..9u8, -3..4i8, 0..5u8, 1..9u8).prop_map(|(level, number, offset, unit, length)| {
        Place { level, number, offset, unit, length }
    })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (place(), any::<u8>(), any::<u8>(), any::<u8>())
            .prop_map(|(place, memory, attrs, leaves)| Op::Map { place, memory, attrs, leaves }),
        4 => (place(), any::<u8>(), any::<bool>())
            .prop_map(|(place, stop_after, several)| Op::Unmap { place, stop_after, several }),
        4 => (place(), any::<u8>()).prop_map(|(place, change)| Op::Protect { place, change }),
        2 => (place(), 0..4u8).prop_map(|(place, level)| Op::Split { place, level }),
        3 => (place(), 0..4u8, any::<bool>())
            .prop_map(|(place, level, runs)| Op::Collapse { place, level, runs }),
        1 => (0..3u8).prop_map(Op::Live),
    ]
}

impl Place {
    /// The range in a format; `None` if it would leave the space.
    fn span<F: Decoded>(&self) -> Option<Span<F::Input>> {
        let page = 1i128 << F::PAGE_SHIFT;
        let level = Level::new(self.level.min(F::LEVELS - 1));
        let size = 1i128 << F::shift(level);
        // Formats with one root for both halves also get the upper half, up to the last address.
        let signed = F::SIGNED && !F::HALVES;
        let top = 1i128 << (F::INPUT_BITS - u32::from(signed));
        let boundary = match self.number {
            number @ 0..=4 => i128::from(number) * size,
            number @ 5..=6 => top - i128::from(number - 5) * size,
            7 => top / 2,
            _ => -size,
        };
        let first = boundary + i128::from(self.offset) * page;
        let run = page << F::contiguous(Level::PAGE);
        let unit = match self.unit {
            0 => page,
            1 => run,
            2 => 1 << F::shift(Level::new(1)),
            3 => run / 2 + page,
            // Up to the next boundary, and a little further.
            _ => size.min(1 << F::shift(Level::new(2.min(F::LEVELS.saturating_sub(2))))),
        };
        let length = if self.unit == 4 {
            unit + i128::from(self.length % 3) * page
        } else {
            i128::from(self.length) * unit
        };
        // A negative address is one of the upper half.
        if first < 0 && (!signed || first + length > 0) {
            return None;
        }
        if first >= 0 && first + length > top {
            return None;
        }
        Span::new(F::Input::from_bits(first as u64), length as u64).ok()
    }
}

const ATTRS: [Attrs; 8] = [
    Attrs::KERNEL_DATA,
    Attrs::KERNEL_TEXT,
    Attrs::USER_DATA,
    Attrs::USER_TEXT,
    Attrs::KERNEL_DEVICE,
    Attrs { accessed: false, dirty: false, software: 1, ..Attrs::USER_DATA },
    Attrs { memory: Memory::WriteThrough, software: 2, ..Attrs::KERNEL_RODATA },
    Attrs { software: 3, ..Attrs::USER_DATA.with_perms(Perms::empty()) },
];

/// Attributes for formats of stage 2, where the guest is one.
const GUEST_ATTRS: [Attrs; 8] = [
    Attrs::GUEST_MEMORY,
    Attrs::USER_DATA,
    Attrs::USER_RODATA,
    Attrs::GUEST_MEMORY.with_perms(Perms::READ.union(Perms::EXEC).and_user()),
    Attrs::GUEST_DEVICE,
    Attrs { accessed: false, dirty: false, software: 1, ..Attrs::GUEST_MEMORY },
    Attrs { memory: Memory::NonCacheable, software: 2, ..Attrs::USER_RODATA },
    Attrs::GUEST_MEMORY.with_perms(Perms::empty()),
];

/// Attributes for EL2 alone, where there is no user.
const EL2_ATTRS: [Attrs; 8] = [
    Attrs::KERNEL_DATA,
    Attrs::KERNEL_TEXT,
    Attrs::KERNEL_RODATA,
    Attrs::KERNEL_DEVICE,
    Attrs::KERNEL_DATA.with_perms(Perms::READ.union(Perms::WRITE).union(Perms::EXEC)),
    Attrs { accessed: false, dirty: false, software: 1, ..Attrs::KERNEL_DATA },
    Attrs { memory: Memory::WriteThrough, software: 2, ..Attrs::KERNEL_RODATA },
    Attrs::KERNEL_DATA.with_perms(Perms::empty()),
];

const CHANGES: [Change; 10] = [
    Change::new().perms(Perms::READ),
    Change::new().write_protect(),
    Change::new().perms(Perms::READ.union(Perms::WRITE)),
    Change::new().memory(Memory::NonCacheable),
    Change::new().dirty(false).accessed(false),
    Change::new().dirty(true),
    Change::new().software(3).global(true),
    Change::new().perms(Perms::READ.union(Perms::USER_READ).union(Perms::USER_EXEC)).global(false),
    Change::new().perms(Perms::empty()),
    Change::new().perms(Attrs::USER_DATA.perms).dirty(false),
];

const GUEST_CHANGES: [Change; 10] = [
    Change::new().perms(Perms::READ.and_user()),
    Change::new().write_protect(),
    Change::new().perms(Perms::READ.union(Perms::WRITE).and_user()),
    Change::new().memory(Memory::NonCacheable),
    Change::new().dirty(false).accessed(false),
    Change::new().dirty(true),
    Change::new().software(3),
    Change::new().perms(Perms::READ.union(Perms::EXEC).and_user()),
    Change::new().perms(Perms::empty()),
    Change::new().perms(Attrs::GUEST_MEMORY.perms).dirty(false),
];

const EL2_CHANGES: [Change; 10] = [
    Change::new().perms(Perms::READ),
    Change::new().write_protect(),
    Change::new().perms(Perms::READ.union(Perms::WRITE)),
    Change::new().memory(Memory::NonCacheable),
    Change::new().dirty(false).accessed(false),
    Change::new().dirty(true),
    Change::new().software(3),
    Change::new().perms(Perms::READ.union(Perms::EXEC)),
    Change::new().perms(Perms::empty()),
    Change::new().perms(Attrs::KERNEL_DATA.perms).dirty(false),
];

type Outcome<F, T> = Result<T, EditError<<F as Format>::Input>>;

struct World<'h, F: Decoded> {
    platform: &'h Hosted,
    space: AddressSpace<F, &'h Hosted>,
    model: Model,
}

impl<'h, F: Decoded> World<'h, F> {
    fn frame(&self, span: Span<F::Input>, memory: u8) -> Pa {
        let first = span.start().bits();
        let page = 1u64 << F::PAGE_SHIFT;
        let limit = 1u64 << F::OUTPUT_BITS;
        let low = first & (limit / 4 - 1);
        let place = match memory % 8 {
            // As aligned as the address.
            0..=3 => low,
            // As aligned as a run, as a page.
            4 => low.wrapping_add(page << F::contiguous(Level::PAGE)),
            5 => low.wrapping_add(page),
            // Over the point where the address continues in other bits of the descriptor.
            6 if F::LINEAR_BITS < 64 => (1 << F::LINEAR_BITS) - 2 * page,
            // Up to the end of memory, and over it.
            6 => limit.wrapping_sub(span.size()),
            _ => limit.wrapping_sub(span.size()).wrapping_add(page),
        };
        Pa::new(place)
    }

    /// Runs an edit with 0, 1, 2, ... allocations allowed until it does not run out of them; each
    /// time that it does, nothing has changed. Then completes it by `complete`.
    fn exhaust<T>(
        &mut self,
        mut edit: impl FnMut(&mut Gather<'_, F, &'h Hosted>) -> Outcome<F, T>,
        complete: impl FnOnce(Gather<'_, F, &'h Hosted>, &Outcome<F, T>),
    ) -> Outcome<F, T> {
        let before = snapshot::<F>(self.platform, self.space.root());
        let tables = self.platform.counts().tables;
        let mut gather = self.space.gather();
        let mut allowed = 0;
        loop {
            // Beyond the first twenty points, some; and at last, all that there are.
            self.platform.limit_allocations((allowed < 700).then_some(allowed));
            let result = edit(&mut gather);
            self.platform.limit_allocations(None);
            if result.is_err() {
                assert_eq!(self.platform.counts().tables, tables, "a failed edit leaked tables");
                before.assert_untouched(&snapshot::<F>(self.platform, gather.root()));
                assert!(gather.is_clean(), "a failed edit left something to invalidate");
            }
            if !matches!(result, Err(EditError::OutOfTables)) || allowed >= 700 {
                complete(gather, &result);
                return result;
            }
            allowed += if allowed < 20 { 1 } else { 85 };
        }
    }

    /// Repeats an edit that detaches no leaf until it is done, and finishes its gather.
    fn exhaust_and_finish<T>(
        &mut self,
        edit: impl FnMut(&mut Gather<'_, F, &'h Hosted>) -> Outcome<F, T>,
    ) -> Outcome<F, T> {
        self.exhaust(edit, |gather, _| {
            gather.finish(|_| panic!("a leaf was detached"));
        })
    }

    fn check(&mut self) {
        let found = judge_with_parked(self.platform, &self.space);
        self.compare(&found, &self.model.stretches().sorted(), "the walker");
        // What was said too much is true from now on.
        for (first, mapped) in found.0 {
            let last = first + (mapped.size - 1);
            self.model.change(first, last, |attrs| Attrs {
                accessed: mapped.attrs.accessed,
                dirty: mapped.attrs.dirty,
                ..attrs
            });
        }
    }

    /// Compares what was found with what is expected. On a live space whose walkers set flags, an
    /// edit that changes a run or a block in place may say accessed or dirty of more than it knows,
    /// and never of less.
    fn compare(&self, found: &Stretches, expected: &Stretches, what: &str) {
        if self.space.liveness() == Liveness::Dead || !self.platform.caps().hardware_access {
            assert_same(&found.0, &expected.0, format!("{}: {what}", F::NAME));
            return;
        }
        let plain = |stretches: &Stretches| {
            let mut plain = Stretches::default();
            for &(first, mapped) in &stretches.0 {
                let attrs = Attrs { accessed: false, dirty: false, ..mapped.attrs };
                plain.add(first, Mapped { attrs, ..mapped });
            }
            plain
        };
        assert_same(&plain(found).0, &plain(expected).0, format!("{}: {what}", F::NAME));
        let mut rest = expected.0.iter().peekable();
        for &(first, mapped) in &found.0 {
            let last = first + (mapped.size - 1);
            while let Some(&&(start, was)) = rest.peek() {
                let end = start + (was.size - 1);
                if start <= last && first <= end {
                    let (is, was) = (mapped.attrs, was.attrs);
                    assert!(
                        is.accessed >= was.accessed && is.dirty >= was.dirty,
                        "{}: {what} has lost a flag at {start:#x}",
                        F::NAME
                    );
                }
                if end > last {
                    break;
                }
                rest.next();
            }
        }
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Live(how) => {
                match how {
                    // SAFETY: no processor walks tables on the hosted platform.
                    0 => unsafe { self.space.make_dead() },
                    1 => self.space.make_live(),
                    _ => self.space.make_own(),
                }
            }
            Op::Map { place, memory, attrs, leaves } => {
                let Some(span) = place.span::<F>() else {
                    return;
                };
                let frame = self.frame(span, *memory);
                let choices = match is_el2::<F>() {
                    true => EL2_ATTRS,
                    false if is_guest::<F>() => GUEST_ATTRS,
                    false => ATTRS,
                };
                let mut attrs = choices[usize::from(*attrs) % choices.len()];
                if F::encode(&attrs, Level::PAGE).is_err() {
                    attrs.memory = Memory::NonCacheable;
                }
                let mut mapping = Mapping::new(attrs);
                // Pages alone only where they are not too many for a test.
                if leaves & 1 != 0 && span.size() >> F::PAGE_SHIFT <= 3000 {
                    mapping = mapping.pages_only();
                }
                if leaves & 2 != 0 {
                    mapping = mapping.without_runs();
                }
                if leaves & 12 == 12 {
                    mapping = mapping.without_allocation();
                }
                let result = self.exhaust_and_finish(|gather| gather.map(span, frame, mapping));
                let (first, last) = (span.start().bits(), span.last().bits());
                match result {
                    Ok(()) => self.model.map(first, span.size(), frame.get(), attrs),
                    Err(EditError::AlreadyMapped(at)) => {
                        let at = at.bits().max(first);
                        assert!(at <= last && self.model.first_mapped(first, last).is_some());
                        assert!(
                            self.model.first_mapped(first, last) >= Some(at),
                            "the first mapped address is named"
                        );
                    }
                    Err(EditError::OutputOutOfRange) => {
                        let end = u128::from(frame.get()) + u128::from(span.size());
                        assert!(end > 1 << F::OUTPUT_BITS);
                    }
                    Err(EditError::NeedsTable(_)) => assert!(leaves & 12 == 12),
                    // More tables than the platform has.
                    Err(EditError::OutOfTables) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
            Op::Unmap { place, stop_after, several } => {
                let Some(span) = place.span::<F>() else {
                    return;
                };
                let (mut first, last) = (span.start().bits(), span.last().bits());
                let mut gone = Stretches::default();
                loop {
                    let part =
                        Span::inclusive(F::Input::from_bits(first), F::Input::from_bits(last))
                            .unwrap();
                    let held = RefCell::new(Vec::new());
                    let edit = |gather: &mut Gather<'_, F, &'h Hosted>| {
                        let mut held = held.borrow_mut();
                        held.clear();
                        gather.unmap(part, |leaf| {
                            held.push(leaf);
                            if held.len() > usize::from(*stop_after) {
                                ControlFlow::Break(())
                            } else {
                                ControlFlow::Continue(())
                            }
                        })
                    };
                    let result = self.exhaust(edit, |gather, result| {
                        let mut completed = gather.issue().complete();
                        let mut add = |leaf: Leaf<F>| {
                            assert!(result.is_ok(), "a refused edit detaches nothing");
                            let mapped = Mapped {
                                size: leaf.size(),
                                pa: leaf.frame().get(),
                                attrs: leaf.attrs(),
                            };
                            gone.0.push((leaf.input().bits(), mapped));
                        };
                        for leaf in held.take() {
                            add(completed.release(leaf).expect("a leaf of this gather"));
                        }
                        if *several {
                            // Reclaiming stops after every few leaves and goes on.
                            let mut count = 0u32;
                            while !completed.reclaim(|leaf| {
                                add(leaf);
                                count += 1;
                                if count.is_multiple_of(7) {
                                    ControlFlow::Break(())
                                } else {
                                    ControlFlow::Continue(())
                                }
                            }) {}
                        } else {
                            completed.finish(add);
                        }
                    });
                    let progress = match result {
                        Ok(progress) => progress,
                        Err(EditError::NeedsBreak(_) | EditError::OutOfTables) => break,
                        Err(error) => panic!("{error:?}"),
                    };
                    match progress {
                        Progress::Done => {
                            let expected = self.model.unmap(span.start().bits(), last);
                            self.compare(&gone.sorted(), &expected.sorted(), "what came out");
                            break;
                        }
                        Progress::Stopped(at) => {
                            assert!(
                                at.bits() > first || !self.platform_links(),
                                "no progress at {at}"
                            );
                            first = at.bits();
                        }
                    }
                }
            }
            Op::Protect { place, change } => {
                let Some(span) = place.span::<F>() else {
                    return;
                };
                let choices = match is_el2::<F>() {
                    true => EL2_CHANGES,
                    false if is_guest::<F>() => GUEST_CHANGES,
                    false => CHANGES,
                };
                let change = choices[usize::from(*change) % choices.len()];
                let caps = self.platform.caps();
                let result = self.exhaust_and_finish(|gather| gather.protect(span, change));
                match result {
                    Ok(()) => self.model.change(span.start().bits(), span.last().bits(), |attrs| {
                        change.apply_on(attrs, F::RULE, &caps)
                    }),
                    Err(EditError::NeedsBreak(_) | EditError::OutOfTables) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
            Op::Split { place, level } => {
                let Some(span) = place.span::<F>() else {
                    return;
                };
                // Not everything down to pages: the test would take hours.
                let level = Level::new(if span.size() >> F::PAGE_SHIFT <= 3000 {
                    *level
                } else {
                    1.max(*level)
                });
                let result = self.exhaust_and_finish(|gather| gather.split(span, level));
                match result {
                    Ok(()) => {
                        self.space
                            .walk(span, |leaf| {
                                assert!(leaf.level() <= level && !leaf.is_contiguous());
                                ControlFlow::Continue(())
                            })
                            .unwrap();
                    }
                    Err(EditError::NoSuchLeaf) => assert!(!F::is_leaf_level(level)),
                    Err(EditError::NeedsBreak(_) | EditError::OutOfTables) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
            Op::Collapse { place, level, runs } => {
                let Some(span) = place.span::<F>() else {
                    return;
                };
                let level = Level::new(*level);
                // What is merged has the bits of all: the model does the same, over what was
                // merged.
                let before = judge_with_parked(self.platform, &self.space);
                let result = self.exhaust_and_finish(|gather| gather.collapse(span, level, *runs));
                match result {
                    Ok(_) => self.follow_collapse(&before),
                    Err(EditError::NoSuchLeaf) => assert!(!F::is_leaf_level(level)),
                    Err(error) => panic!("{error:?}"),
                }
            }
        }
        self.check();
    }

    fn platform_links(&self) -> bool {
        self.platform.link_of(self.space.root()).is_some()
    }

    /// After a collapse, a leaf is accessed and dirty if any page of it was, and nothing else
    /// differs.
    fn follow_collapse(&mut self, before: &Stretches) {
        let mut leaves = Vec::new();
        self.space.walk_all(|leaf| leaves.push(leaf));
        let mut index = 0;
        for leaf in leaves {
            let (first, size) = (leaf.input().bits(), leaf.size());
            let last = first + (size - 1);
            while before.0[index].0 + (before.0[index].1.size - 1) < first {
                index += 1;
            }
            let mut parts = before.0[index..]
                .iter()
                .take_while(|(start, _)| *start <= last)
                .map(|(_, mapped)| mapped.attrs);
            let one = parts.next().expect("what is mapped was mapped");
            let merged = parts.fold(one, |sum, attrs| Attrs {
                accessed: sum.accessed || attrs.accessed,
                dirty: sum.dirty || attrs.dirty,
                ..sum
            });
            let attrs = leaf.attrs();
            if self.space.liveness() != Liveness::Dead {
                // In place on a live space, both may be set beforehand.
                assert!(attrs.accessed >= merged.accessed && attrs.dirty >= merged.dirty);
                let merged = Attrs { accessed: attrs.accessed, dirty: attrs.dirty, ..merged };
                assert_eq!(attrs, merged);
            } else {
                assert_eq!(attrs, merged);
            }
            self.model.change(first, last, |_| attrs);
        }
    }
}

fn run<F: Decoded>(ops: &[Op], caps: Caps, links: bool) {
    let mut platform = Hosted::new(1400, F::PAGE_SHIFT).with_caps(caps);
    if !links {
        platform = platform.without_links();
    }
    let space = AddressSpace::<F, _>::new(&platform).unwrap();
    let mut world = World { platform: &platform, space, model: Model::default() };
    for op in ops {
        world.run(op);
    }
    let World { mut space, model, .. } = world;
    // SAFETY: no processor walks tables on the hosted platform.
    unsafe { space.make_dead() };
    let mut gone = Stretches::default();
    assert!(
        space
            .destroy(|leaf| {
                let mapped =
                    Mapped { size: leaf.size(), pa: leaf.frame().get(), attrs: leaf.attrs() };
                gone.add(leaf.input().bits(), mapped);
            })
            .is_ok()
    );
    assert_same(
        &gone.sorted().0,
        &model.stretches().sorted().0,
        format!("{}: what was given back", F::NAME),
    );
    let counts = platform.counts();
    assert_eq!((counts.tables, counts.bad_frees), (0, 0));
}

fn caps() -> impl Strategy<Value = Caps> {
    (0..4u8, any::<bool>()).prop_map(|(bbm, hardware)| Caps {
        bbm,
        hardware_access: hardware,
        hardware_dirty: hardware,
        ..tablewright_hosted::CAPS
    })
}

fn agrees_with_the_model<F: Decoded>() {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(match is_guest::<F>() {
            _ if cfg!(miri) => 2,
            // The same algorithms over other bits, or over tables that are sixteen times as large.
            _ if F::PAGE_SHIFT == 16 => 12,
            true => 15,
            false if matches!(F::REGIME, Regime::Arm64Stage1 { .. } | Regime::X86_64 { .. }) => 25,
            false => 15,
        });
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    };
    let strategy = (proptest::collection::vec(op(), 1..14), caps(), any::<bool>());
    proptest!(config, |((ops, caps, links) in strategy)| {
        run::<F>(&ops, caps, links);
    });
}

for_each_format!(agrees_with_the_model);
for_each_guest_format!(agrees_with_the_model);
for_each_other_shape!(agrees_with_the_model);
