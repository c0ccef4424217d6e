//! Bitmaps and rings of pages that were written, flushes that wait for a processor, and the
//! counting of software walks, by themselves: compared with sets.

use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::panic::resume_unwind;
use std::sync::atomic::AtomicU64;

use tablewright::Format;
use tablewright::dirty::{Bitmap, Flip, Ring, RingEntry};
use tablewright::hyperv::{FlushQueue, Pages};
use tablewright::shared::{Epochs, GracePeriod, WalkSlot};
use tablewright::shootdown::PreemptedFlag;

use super::world::{Guests, Planned, World, unwinds};
use crate::dice::Dice;

const WORDS: usize = 12;

pub fn bitmaps<'m, F: Format, G: Guests<'m, F>>(world: &World<'m, F, G>, dice: &Dice) {
    let mut words = [const { AtomicU64::new(0) }; 2 * WORDS];
    let pages = dice.below(64 * WORDS as u64 + 2);
    let (first, second) = words.split_at_mut(WORDS);
    let Ok(bitmap) = Bitmap::new(first, pages) else {
        return world
            .check(pages > 64 * WORDS as u64, || format!("a bitmap of {pages} pages is refused"));
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
                let visits = Visits::new(dice);
                let (mut found, mut again) = (BTreeSet::new(), BTreeSet::new());
                let unwound = unwinds(|| {
                    bitmap.harvest(at..to, |first, bits| {
                        if visits.comes_back() {
                            bitmap.mark(first);
                            again.insert(first);
                        }
                        found.extend(pages_of(first, bits));
                    });
                });
                let inside = |&page: &u64| (at..to).contains(&page);
                let known: BTreeSet<u64> = model.iter().copied().filter(inside).collect();
                model.retain(|page| !found.contains(page));
                model.append(&mut again);
                world.check(found == known || unwound && found.is_subset(&known), || {
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
    let Some(plat) = world.any_platform() else {
        return;
    };
    flip.current().mark(0);
    model.extend((pages > 0).then_some(0));
    let mut found = BTreeSet::new();
    let mut later = BTreeSet::new();
    for round in 0..4 {
        let visits = Visits::new(dice);
        let mut done = false;
        let unwound = unwinds(|| {
            done = flip.drain(&plat, |first, bits| {
                if visits.comes_back() {
                    let nested = flip.drain(&plat, |_, _| ());
                    world.check(!nested, || "a drain in a drain takes marks".into());
                    flip.current().mark(first);
                    later.extend((first < pages).then_some(first));
                }
                found.extend(pages_of(first, bits));
            });
        });
        world.check(!done || found == model, || {
            format!("{found:?} is drained in round {round}, not {model:?}")
        });
        if done {
            break;
        }
        world.check(!unwound || found.is_subset(&model), || {
            format!("{found:?} is drained of {model:?}")
        });
    }
    let marked = flip.current().count();
    world.check(marked == later.len() as u64, || {
        format!("{marked} pages are marked after a drain, not {later:?}")
    });
}

pub fn rings<'m, F: Format, G: Guests<'m, F>>(world: &World<'m, F, G>, dice: &Dice) {
    let mut entries = [const { RingEntry::new() }; 8];
    let size = dice.index(9);
    let ring = match Ring::new(&mut entries[..size]) {
        Ok(ring) => ring,
        Err(_) => {
            return world
                .check(!size.is_power_of_two(), || format!("a ring of {size} entries is refused"));
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
                let visits = Visits::new(dice);
                let mut seen = VecDeque::new();
                let mut count = 0;
                let unwound = unwinds(|| {
                    count = ring.harvest(|slot, page| {
                        if visits.comes_back() {
                            comes_back(world, &ring);
                        }
                        seen.push_back((slot, page));
                    });
                });
                let taken = written.iter().take(seen.len());
                let right = seen.iter().eq(taken)
                    && (unwound || seen.len() == written.len() && count == seen.len() as u64);
                world.check(right, || format!("{seen:?} is harvested, not {written:?}"));
                harvested.extend(written.drain(..seen.len()));
            }
            _ => {
                let visits = Visits::new(dice);
                let mut seen = VecDeque::new();
                let mut entries = None;
                let unwound = unwinds(|| {
                    entries = Some(ring.collect(|slot, page| {
                        if visits.comes_back() {
                            comes_back(world, &ring);
                        }
                        seen.push_back((slot, page));
                    }));
                });
                let Some(entries) = entries else {
                    world.check(unwound, || "nothing is collected".into());
                    continue;
                };
                world.check(seen == harvested, || {
                    format!("{seen:?} is collected, not {harvested:?}")
                });
                let right =
                    entries.len() == seen.len() as u64 && entries.is_empty() == seen.is_empty();
                world.check(right, || "entries are miscounted".into());
                // Another may have collected them too, and releases them after they were filled
                // again.
                let also = dice.once_in(4).then(|| ring.collect(|_, _| ()));
                if dice.once_in(8) {
                    // They are collected again.
                    drop(entries);
                } else {
                    entries.release();
                    harvested.clear();
                }
                let Some(also) = also else { continue };
                for _ in 0..dice.below(3) {
                    if ring.has_room() {
                        let entry = (dice.below(4) as u16, dice.below(1 << 40));
                        ring.push(entry.0, entry.1);
                        written.push_back(entry);
                    }
                }
                also.release();
                harvested.clear();
            }
        }
    }
}

/// A visitor that harvests and collects takes nothing, and leaves the turn of its taker alone.
fn comes_back<'m, F: Format, G: Guests<'m, F>>(world: &World<'m, F, G>, ring: &Ring<'_>) {
    for _ in 0..2 {
        let count = ring.harvest(|_, _| world.fail("a harvest in a visitor takes an entry"));
        let entries = ring.collect(|_, _| world.fail("a collection in a visitor takes an entry"));
        world.check(count == 0 && entries.is_empty(), || {
            format!("{count} and {} entries are taken in a visitor", entries.len())
        });
        entries.release();
    }
}

/// The pages that a word of marks names.
fn pages_of(first: u64, bits: u64) -> impl Iterator<Item = u64> {
    (0..64).filter(move |bit| bits >> bit & 1 != 0).map(move |bit| first + bit)
}

/// The visits of a taker until one unwinds, or calls the log that it visits.
struct Visits {
    left: Cell<Option<u64>>,
    unwinds: bool,
}

impl Visits {
    fn new(dice: &Dice) -> Self {
        Self { left: Cell::new(dice.once_in(2).then(|| dice.below(4))), unwinds: dice.once_in(2) }
    }

    /// Counts a visit. Returns whether it calls the log.
    fn comes_back(&self) -> bool {
        let left = self.left.get();
        self.left.set(left.and_then(|left| left.checked_sub(1)));
        if left == Some(0) && self.unwinds {
            resume_unwind(Box::new(Planned));
        }
        left == Some(0)
    }
}

/// Flushes that wait until a processor runs again: of pages in a queue, of everything by a flag.
pub fn queues<'m, F: Format, G: Guests<'m, F>>(world: &World<'m, F, G>, dice: &Dice) {
    let queue = FlushQueue::<3>::new();
    let (mut waiting, mut all) = (BTreeSet::new(), false);
    for _ in 0..16 {
        match dice.below(4) {
            0..=1 => {
                let (first, count) = (dice.below(1 << 20) << 12, 1 + dice.below(16));
                // What finds no room becomes a flush of everything.
                match waiting.len() < 3 {
                    true => _ = waiting.insert((first, count)),
                    false => all = true,
                }
                queue.push(Pages::small(first, count));
            }
            2 if dice.once_in(4) => {
                queue.push_all();
                all = true;
            }
            _ => {
                let visits = Visits::new(dice);
                let (mut found, mut pushed) = (BTreeSet::new(), false);
                let mut everything = false;
                let unwound = unwinds(|| {
                    everything = queue.take(|pages| {
                        if visits.comes_back() {
                            queue.push_all();
                            pushed = true;
                        }
                        found.insert((pages.first, pages.count));
                    });
                });
                let right = found.is_subset(&waiting)
                    && (unwound || found == waiting && everything == (all || pushed));
                world.check(right, || format!("{found:x?} is taken, not {waiting:x?}"));
                waiting.retain(|pages| !found.contains(pages));
                // A range that two have named is one range.
                all = unwound && (all || pushed);
            }
        }
    }
    let flag = PreemptedFlag::default();
    let (mut off, mut owed) = (false, false);
    for _ in 0..8 {
        match dice.below(3) {
            0 => {
                flag.preempt();
                off = true;
            }
            1 => {
                let deferred = flag.defer();
                world.check(deferred == off, || "a flush waits for a CPU that runs".into());
                owed |= deferred;
            }
            _ => {
                let flushes = flag.enter();
                world.check(flushes == owed, || {
                    format!("a CPU runs: a flush is owed: {owed}, and made: {flushes}")
                });
                (off, owed) = (false, false);
            }
        }
    }
}

/// Processors that walk.
const WALKERS: usize = 3;

/// Walks that begin and end in any order: no grace period is over while one is under way that began
/// before it.
pub fn walks<'m, F: Format, G: Guests<'m, F>>(world: &World<'m, F, G>, dice: &Dice) {
    let slots = [const { WalkSlot::new() }; WALKERS];
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
