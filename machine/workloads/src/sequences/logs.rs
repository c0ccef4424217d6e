//! Bitmaps and rings of pages that were written, and the counting of software walks, by themselves:
//! compared with sets.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::AtomicU64;

use tablewright::Format;
use tablewright::dirty::{Bitmap, Flip, Ring, RingEntry};
use tablewright::shared::{Epochs, GracePeriod, Quiescence, WalkSlot};

use super::world::{Guests, World};
use crate::dice::Dice;

const WORDS: usize = 12;

pub fn bitmaps<'m, F: Format, G: Guests<'m, F>>(world: &World<'m, F, G>, dice: &Dice) {
    let mut words = [const { AtomicU64::new(0) }; 2 * WORDS];
    let pages = dice.below(64 * WORDS as u64 + 2);
    let (first, second) = words.split_at_mut(WORDS);
    let Ok(bitmap) = Bitmap::new(first, pages) else {
        return world.check(pages > 64 * WORDS as u64, || {
            format!("a bitmap of {pages} pages is refused")
        });
    };
    world.check(bitmap.pages() == pages, || "a bitmap has lost pages".into());
    let mut model = BTreeSet::new();
    for _ in 0..8 {
        let at = dice.below(pages + 70);
        let to = at.saturating_add(dice.below(200)).saturating_sub(40);
        match dice.below(6) {
            0 => {
                bitmap.mark(at);
                model.extend((at < pages).then_some(at));
            }
            1 => {
                bitmap.mark_range(at..to);
                model.extend(at..to.min(pages).max(at));
                model.retain(|&page| page < pages);
            }
            2 if dice.once_in(4) => {
                bitmap.mark_all();
                model.extend(0..pages);
            }
            3 => {
                let mut found = BTreeSet::new();
                bitmap.harvest(at..to, |first, bits| {
                    let ones = (0..64).filter(|bit| bits >> bit & 1 != 0);
                    found.extend(ones.map(|bit| first + bit));
                });
                let inside = |&page: &u64| (at..to).contains(&page);
                let known: BTreeSet<u64> = model.iter().copied().filter(inside).collect();
                model.retain(|page| !inside(page));
                world.check(found == known, || {
                    format!("a harvest of {at}..{to} gives {found:?}, not {known:?}")
                });
            }
            4 => world.check(bitmap.is_marked(at) == model.contains(&at), || {
                format!("page {at} is marked or is not")
            }),
            _ => world.check(bitmap.count() == model.len() as u64, || {
                format!("{} pages are counted", bitmap.count())
            }),
        }
    }
    let Ok(other) = Bitmap::new(second, pages.saturating_sub(dice.below(2))) else {
        return;
    };
    let Ok(flip) = Flip::new(bitmap, other) else {
        return;
    };
    flip.current().mark(0);
    let found = std::cell::Cell::new(0);
    let plat = world.any_platform();
    if let Some(plat) = plat {
        let each = |_, bits: u64| found.set(found.get() + u64::from(bits.count_ones()));
        if flip.drain(&plat, each) {
            model.extend((pages > 0).then_some(0));
            let known = model.len() as u64;
            world.check(found.get() == known, || {
                format!("{} of {known} pages are drained", found.get())
            });
        }
    }
}

pub fn rings<'m, F: Format, G: Guests<'m, F>>(world: &World<'m, F, G>, dice: &Dice) {
    let mut entries = [const { RingEntry::new() }; 8];
    let size = dice.index(9);
    let ring = match Ring::new(&mut entries[..size]) {
        Ok(ring) => ring,
        Err(_) => {
            return world.check(!size.is_power_of_two(), || {
                format!("a ring of {size} entries is refused")
            });
        }
    };
    let (mut written, mut harvested) = (VecDeque::new(), VecDeque::new());
    for _ in 0..24 {
        match dice.below(4) {
            0..=1 => {
                let entry = (dice.below(4) as u16, dice.below(1 << 40));
                let room = ring.has_room();
                let used = written.len() + harvested.len();
                world.check(room == (used < size), || {
                    format!("{used} of {size} entries are used, and there is room: {room}")
                });
                if room {
                    ring.push(entry.0, entry.1);
                    written.push_back(entry);
                }
            }
            2 => {
                let mut seen = VecDeque::new();
                let count = ring.harvest(|slot, page| seen.push_back((slot, page)));
                world.check(seen == written && count == seen.len() as u64, || {
                    format!("{seen:?} is harvested, not {written:?}")
                });
                harvested.append(&mut written);
            }
            _ => {
                let mut seen = VecDeque::new();
                let entries = ring.collect(|slot, page| seen.push_back((slot, page)));
                world.check(seen == harvested, || {
                    format!("{seen:?} is collected, not {harvested:?}")
                });
                let right =
                    entries.len() == seen.len() as u64 && entries.is_empty() == seen.is_empty();
                world.check(right, || "entries are miscounted".into());
                if dice.once_in(8) {
                    // They are collected again.
                    drop(entries);
                } else {
                    entries.release();
                    harvested.clear();
                }
            }
        }
    }
}

/// So many processors walk.
const WALKERS: usize = 3;

/// Walks that begin and end in any order: no grace period is over while one is under way that began
/// before it.
pub fn walks<'m, F: Format, G: Guests<'m, F>>(world: &World<'m, F, G>, dice: &Dice) {
    let slots = [const { WalkSlot::new() }; WALKERS];
    if dice.once_in(3) {
        return states(world, dice, &slots);
    }
    let epochs = Epochs::new(&slots);
    let mut walks = Vec::new();
    // Grace periods, and the numbers of the walks that were under way.
    let mut cuts: Vec<(GracePeriod, Vec<u32>)> = Vec::new();
    for number in 0..24 {
        match dice.below(5) {
            0..=1 => {
                let cpu = dice.index(WALKERS + 1);
                // SAFETY: one thread plays all processors (1.), in no interrupt (2.), to the end of
                // this function (3.); nothing else is made of the slots (4.).
                let walk = unsafe { epochs.enter(cpu) };
                world.check(walk.is_some() == (cpu < WALKERS), || {
                    format!("processor {cpu} walks: {walk:?}")
                });
                walks.extend(walk.map(|walk| (number, walk)));
            }
            2..=3 if !walks.is_empty() => drop(walks.swap_remove(dice.index(walks.len()))),
            _ => {
                let alive = walks.iter().map(|&(number, _)| number).collect();
                cuts.push((epochs.advance(), alive));
            }
        }
        for (cut, alive) in &cuts {
            let past = epochs.is_over(GracePeriod::new(cut.get()));
            let held = walks.iter().any(|(number, _)| alive.contains(number));
            let right = if past { !held } else { !walks.is_empty() };
            world.check(right, || {
                format!("{cut:?} with the walks {alive:?} of {walks:?}: past is {past}")
            });
        }
    }
}

/// States instead of walks: a grace period is over when every processor has passed one since, or
/// rests.
fn states<'m, F: Format, G: Guests<'m, F>>(
    world: &World<'m, F, G>,
    dice: &Dice,
    slots: &[WalkSlot; WALKERS],
) {
    let states = Quiescence::new(slots);
    let mut cuts: Vec<(GracePeriod, [bool; WALKERS])> = Vec::new();
    let mut rests = [true; WALKERS];
    for _ in 0..24 {
        let cpu = dice.index(WALKERS);
        match dice.below(4) {
            0 => {
                // SAFETY: one thread plays all processors, in no interrupt (1.), and there are no
                // walks (2., 4.); nothing else is made of the slots (3.).
                unsafe { states.rest(cpu) };
                rests[cpu] = true;
                cuts.iter_mut().for_each(|(_, passed)| passed[cpu] = true);
            }
            1..=2 => {
                // SAFETY: as above.
                unsafe { states.pass(cpu) };
                rests[cpu] = false;
                cuts.iter_mut().for_each(|(_, passed)| passed[cpu] = true);
            }
            _ => cuts.push((states.advance(), rests)),
        }
        for (cut, passed) in &cuts {
            let right = states.is_over(*cut) == passed.iter().all(|&it| it);
            world.check(right, || format!("{cut:?} was passed by {passed:?}"));
        }
    }
}
