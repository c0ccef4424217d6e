//! The operations on spaces, and on what was gathered.

// Every kind of value is forgotten and dropped, with a destructor or without.
#![allow(clippy::forget_non_drop)]

mod exclusive;
mod meetings;
mod pages;
mod shared;

use std::cell::RefCell;
use std::ops::ControlFlow;

use tablewright::flush::Held;
use tablewright::linear::{LinearMap, MemoryMap};
use tablewright::shared::{Mapped, NewLeaf, Refused, SharedSpace};
use tablewright::{
    Address, Attrs, Change, EditError, Encoded, Format, Gather, Half, Leaf, Level, Liveness,
    Mapping, Pa, Perms, Platform, Progress, Span,
};
use tablewright_machine::{Request as Access, Time, Want};

use super::logs;
use super::operations::Kind;
use super::world::{
    Exclusive, FAR, Gathering, Guests, Place, Planned, SPACES, Slot, Way, World, guarded, take_any,
    unwinds,
};
use crate::Bug;
use crate::dice::Dice;
use crate::platform::Faulty;

/// Why a shared edit was refused, if by itself.
fn refusal<T, A: Copy>(result: &Result<T, Refused<A>>) -> Option<Refused<A>> {
    result.as_ref().err().copied()
}

impl<'m, F: Format, G: Guests<'m, F>> World<'m, F, G> {
    /// A shared edit of an address was refused for where that is, if and only if the root does not
    /// translate it.
    fn judge_address(&self, slot: usize, at: u64, refused: Option<Refused<F::Input>>) {
        let outside = refused == Some(Refused::Edit(EditError::InputOutOfRange));
        let right = outside != self.translates_at(&self.slots[slot], at);
        self.check(right, || format!("a shared edit at {at:#x}: {refused:?}"));
    }

    pub fn operate(&self, cpu: usize, kind: Kind, dice: &Dice) {
        match kind {
            Kind::Create => self.create(cpu, dice),
            Kind::MakeLive => {
                let is_dead =
                    |it: &Exclusive<'m, F>| it.is_of(cpu) && it.look().liveness() == Liveness::Dead;
                let index =
                    self.place(dice, |place| matches!(place, Place::Exclusive(it) if is_dead(it)));
                self.make_live(cpu, index, dice);
            }
            Kind::Describe => self.describe(cpu, dice),
            Kind::Destroy => {
                let way = Way {
                    refuses: dice.below(3) > 0,
                    retires: dice.once_in(2),
                    in_place: dice.once_in(2),
                };
                self.destroy(cpu, dice.index(SPACES), way);
            }
            Kind::Share => self.share(cpu, dice),
            Kind::Unshare => {
                self.unshare(cpu, self.place(dice, |place| matches!(place, Place::Shared(_))));
            }
            Kind::MakeGuest => {
                self.make_guest(self.place(dice, |place| matches!(place, Place::Shared(_))));
            }
            Kind::IntoSpace => self.unguest(dice.index(SPACES)),
            Kind::MapOnce => self.map(cpu, dice, true),
            Kind::Map => self.map(cpu, dice, false),
            Kind::Gather => self.with_exclusive(cpu, dice, |slot, exclusive| {
                if exclusive.gather.is_none() {
                    exclusive.gather = Some((self.number_for(slot), exclusive.space().gather()));
                }
            }),
            Kind::MapFrames => self.map_frames(cpu, dice),
            Kind::Fork => self.fork(cpu, dice),
            Kind::OneGather => self.one_gather(cpu, dice),
            Kind::Relocate => self.relocate(cpu, dice),
            Kind::Prune => self.prune(dice),
            Kind::ForkOver => self.fork_over(cpu, dice),
            Kind::Move => self.move_value(cpu, dice),
            Kind::Visit => self.visit(cpu, dice),
            Kind::PageByPage => self.page_by_page(cpu, dice),
            Kind::Unmap => self.unmap(cpu, dice, false),
            Kind::UnwindUnmap => self.unmap(cpu, dice, true),
            Kind::ReplacePage => self.replace_page(cpu, dice),
            Kind::Protect => self.protect(cpu, dice),
            Kind::Split => self.split(cpu, dice),
            Kind::Collapse => self.collapse(cpu, dice),
            Kind::Query => self.query(cpu, dice),
            Kind::Walk => self.walk(cpu, dice),
            Kind::Linear => self.linear(cpu, dice),
            Kind::Issue => self.issue(cpu, dice),
            Kind::Finish => self.finish(cpu, dice),
            Kind::Complete => self.complete_one(cpu, dice),
            Kind::Release => self.release(cpu, dice),
            Kind::Reclaim => self.reclaim(cpu, dice, false),
            Kind::UnwindReclaim => self.reclaim(cpu, dice, true),
            Kind::FinishCompleted => {
                if let Some((batch, completed)) = take_any(dice, &self.local(cpu).completed) {
                    if dice.below(4) > 0 {
                        self.release_all(cpu, batch, |held| completed.release(held));
                    }
                    completed.finish(|leaf| {
                        self.out(batch, &leaf);
                        self.visited();
                    });
                }
            }
            Kind::TryComplete => self.try_complete(cpu, dice),
            Kind::Drop => self.lose(cpu, dice, false),
            Kind::Forget => self.lose(cpu, dice, true),
            Kind::SharedGather => self.with_gather(cpu, dice, |_, _| ()),
            Kind::Tables => self.with_gather(cpu, dice, |_, it| {
                let tables = it.gather.tables();
                match dice.once_in(4) {
                    true => {
                        it.gather.release_tables();
                        self.check(it.gather.tables() == 0, || "tables were kept".into());
                    }
                    false => {
                        let count = dice.pick(&[1, 2, 4, 8, 255]);
                        let enough = it.gather.top_up(count);
                        let has = it.gather.tables();
                        let right = has >= tables && enough == (has >= usize::from(count).min(8));
                        self.check(right, || format!("{has} tables after a top-up to {count}"));
                    }
                }
            }),
            Kind::SharedMap => self.shared_map(cpu, dice),
            Kind::MapAsBlock => self.map_as_block(cpu, dice),
            Kind::MapRange => self.map_range(dice),
            Kind::SharedUnmap => self.shared_unmap(cpu, dice, false),
            Kind::UnwindShared => self.shared_unmap(cpu, dice, true),
            Kind::SharedProtect => self.with_gather(cpu, dice, |world, it| {
                if let Ok(span) = world.span(world.slots[it.slot].base, dice) {
                    let change = world.change(dice);
                    let _refused = world
                        .watch(cpu, (it.slot, it.batch), span, || it.gather.protect(span, change));
                }
            }),
            Kind::Age => self.with_gather(cpu, dice, |world, it| {
                if let Ok(span) = world.span(world.slots[it.slot].base, dice) {
                    let _refused = world.watch(cpu, (it.slot, it.batch), span, || {
                        it.gather.age(span, |leaf| {
                            world.check(leaf.attrs().accessed, || "an old leaf is young".into());
                            world.visited();
                        })
                    });
                }
            }),
            Kind::ClearDirty => self.with_gather(cpu, dice, |world, it| {
                if let Ok(span) = world.span(world.slots[it.slot].base, dice) {
                    let _refused = world.watch(cpu, (it.slot, it.batch), span, || {
                        it.gather.clear_dirty(span, |leaf| {
                            world.check(leaf.attrs().dirty, || "a clean leaf is dirty".into());
                            world.visited();
                        })
                    });
                }
            }),
            Kind::SharedSplit => self.with_gather(cpu, dice, |world, it| {
                let (at, _) = world.addresses(world.slots[it.slot].base, dice);
                let level = world.level(dice);
                let mut split = it.gather.split(F::Input::from_bits(at), level);
                if let Err(Refused::NeedsTables(count)) = split
                    && it.gather.top_up(count)
                {
                    split = it.gather.split(F::Input::from_bits(at), level);
                }
                world.judge_address(it.slot, at, refusal(&split));
            }),
            Kind::SharedQuery => self.with_shared(dice, |index, space| {
                let (at, _) = self.addresses(self.slots[index].base, dice);
                if let Some(leaf) = space.query(F::Input::from_bits(at)) {
                    let inside = at.wrapping_sub(leaf.input().bits()) < leaf.size()
                        && self.translates_at(&self.slots[index], at);
                    self.check(inside, || format!("{at:#x} is not in {leaf:?}"));
                }
            }),
            Kind::Relax => self.with_shared(dice, |index, space| {
                let (at, _) = self.addresses(self.slots[index].base, dice);
                let perms = match dice.below(8) {
                    0..=2 => Perms::empty(),
                    3..=4 => self.attrs(dice).perms,
                    // Fetches of what was not mapped for that are the embedder's own.
                    _ => self.attrs(dice).perms - Perms::ANY_EXEC,
                };
                let relaxed = space.relax(F::Input::from_bits(at), perms, dice.once_in(2));
                self.judge_address(index, at, refusal(&relaxed));
            }),
            Kind::Open => self.with_shared(dice, |index, space| {
                let (at, _) = self.addresses(self.slots[index].base, dice);
                let generation = space.generation();
                let opened = space.open(F::Input::from_bits(at), dice.once_in(2));
                self.judge_address(index, at, refusal(&opened));
                self.check(space.generation() >= generation, || "a generation is back".into());
            }),
            Kind::SharedIssue => self.shared_issue(cpu, dice),
            Kind::SharedFinish => {
                self.with_gather(cpu, dice, |world, it| world.shared_finish(cpu, it));
            }
            Kind::GracePeriod => self.with_shared(dice, |_, space| {
                let period = space.grace_period();
                let over = space.is_over(period);
                let again = tablewright::shared::GracePeriod::new(period.get());
                // What is over stays so.
                self.check(!over || space.is_over(again), || {
                    "a grace period is not over any more".into()
                });
            }),
            // The machine takes a table of stage 1 that takes permissions away from what is below
            // it for one that was detached.
            Kind::ProtectAndSplit if self.is_arm() && F::Input::SIGNED => {}
            Kind::ProtectAll => self.with_shared(dice, |index, space| {
                if let Ok(start) = space.protect_all() {
                    self.slots[index].users.update(|users| users + 1);
                    self.local(cpu).protecting.borrow_mut().push((index, start));
                }
            }),
            Kind::ProtectStep => self.protect_step(cpu, dice),
            Kind::ProtectAndSplit if self.is_arm() && F::Input::SIGNED => {}
            Kind::ProtectAndSplit => self.write_protect(cpu, dice),
            Kind::Bitmaps => logs::bitmaps(self, dice),
            Kind::Rings => logs::rings(self, dice),
            Kind::Queues => logs::queues(self, dice),
            Kind::Walks => logs::walks(self, dice),
            other => G::operate(self, cpu, other, dice),
        }
    }

    fn describe(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let space = exclusive.look();
            let plat = space.platform();
            let tables = space.count_tables();
            let right = self.machine.memory().used() as u64 >= tables
                && plat.mapper.machine().memory().first() <= space.root().get()
                && (!F::HALVES || (space.half() == Half::Upper) == (slot.base >> 63 != 0));
            self.check(right, || format!("{space:?} with {tables} tables"));
            if let Some((_, gather)) = &exclusive.gather {
                let _ = gather.is_clean();
            }
        });
        self.with_shared(dice, |_, space| {
            let same = std::ptr::eq(space.platform().control, self.control);
            let inside = self.machine.memory().first() <= space.root().get();
            self.check(same && inside, || "a space is not what it was".into());
        });
        let local = self.local(cpu);
        for it in local.gathers.borrow().iter() {
            let _ = (it.gather.space().root(), it.gather.is_clean(), it.gather.tables());
        }
        for (_, deferred) in local.deferred.borrow().iter() {
            let _ = deferred.grace_period();
        }
    }

    // ---- Exclusive edits ----

    fn issue(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |_, exclusive| {
            let Some((batch, gather)) = exclusive.gather.take() else {
                return;
            };
            let issued = gather.issue();
            self.machine.cpu().spend(Time::ns(dice.below(2000)));
            match dice.below(8) {
                0 => {
                    self.leaked.set(true);
                    std::mem::forget(issued);
                    exclusive.murky = true;
                    return;
                }
                1 => {
                    self.leaked.set(true);
                    drop(issued);
                }
                _ => {
                    let completed = issued.complete();
                    self.local(cpu).completed.borrow_mut().push((batch, completed));
                }
            }
            exclusive.touched = false;
            exclusive.murky = false;
        });
    }

    fn finish(&self, cpu: usize, dice: &Dice) {
        self.with_exclusive(cpu, dice, |slot, exclusive| {
            let Some((batch, mut gather)) = exclusive.gather.take() else {
                return;
            };
            if dice.once_in(2) {
                let flushed = gather.flush(|leaf| {
                    self.out(batch, &leaf);
                    self.visited();
                });
                self.release_all(cpu, batch, |held| flushed.release(held));
                self.refuse(cpu, batch, |held| flushed.release(held));
                let clean = gather.is_clean();
                self.check(clean, || "a gather was flushed, and is not clean".into());
                exclusive.gather = Some((self.number_for(slot), gather));
            } else {
                gather.finish(|leaf| {
                    self.out(batch, &leaf);
                    self.visited();
                });
            }
            exclusive.touched = false;
            exclusive.murky = false;
        });
    }

    // ---- What was gathered ----

    fn complete_one(&self, cpu: usize, dice: &Dice) {
        let local = self.local(cpu);
        if let Some((batch, slot, issued)) = take_any(dice, &local.issued_beside) {
            let deferred = issued.complete();
            self.reclaimed(cpu, batch);
            self.slots[slot].users.update(|users| users - 1);
            local.deferred.borrow_mut().push((batch, deferred));
        }
    }

    fn release(&self, cpu: usize, dice: &Dice) {
        let local = self.local(cpu);
        if let Some((batch, completed)) = take_any(dice, &local.completed) {
            self.release_all(cpu, batch, |held| completed.release(held));
            self.refuse(cpu, batch, |held| completed.release(held));
            local.completed.borrow_mut().push((batch, completed));
        }
        if let Some((batch, deferred)) = take_any(dice, &local.deferred) {
            self.release_all(cpu, batch, |held| deferred.release(held));
            self.refuse(cpu, batch, |held| deferred.release(held));
            local.deferred.borrow_mut().push((batch, deferred));
        }
    }

    /// Has a flush refuse what is held of other flushes.
    pub fn refuse(
        &self,
        cpu: usize,
        batch: u64,
        release: impl Fn(Held<Leaf<F>>) -> Result<Leaf<F>, Held<Leaf<F>>>,
    ) {
        let held = &self.local(cpu).held;
        let all = std::mem::take(&mut *held.borrow_mut());
        for (of, leaf) in all {
            match release(leaf) {
                Ok(_) => self.check(of == batch, || "a leaf of another flush is released".into()),
                Err(leaf) => held.borrow_mut().push((of, leaf)),
            }
        }
    }

    fn reclaim(&self, cpu: usize, dice: &Dice, unwind: bool) {
        let local = self.local(cpu);
        let Some((batch, mut completed)) = take_any(dice, &local.completed) else {
            return;
        };
        let mut room = dice.below(8);
        let mut visit = |leaf: Leaf<F>| {
            self.out(batch, &leaf);
            self.visited();
            if room == 0 && unwind {
                std::panic::resume_unwind(Box::new(Planned));
            }
            room -= u64::from(room > 0);
            match room {
                0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        if unwind {
            self.leaked.set(true);
            unwinds(|| {
                let _reclaimed = completed.reclaim(&mut visit);
            });
        } else {
            let _reclaimed = completed.reclaim(visit);
        }
        local.completed.borrow_mut().push((batch, completed));
    }

    fn try_complete(&self, cpu: usize, dice: &Dice) {
        let local = self.local(cpu);
        let Some((batch, deferred)) = take_any(dice, &local.deferred) else {
            return;
        };
        match deferred.try_complete() {
            Ok(completed) => local.completed.borrow_mut().push((batch, completed)),
            Err(deferred) => local.deferred.borrow_mut().push((batch, deferred)),
        }
    }

    /// Drops something, or forgets it.
    fn lose(&self, cpu: usize, dice: &Dice, forget: bool) {
        const KINDS: u64 = 8;
        let first = dice.below(KINDS);
        let mut kinds = (0..KINDS).map(|n| (first + n) % KINDS);
        let _nothing = kinds.any(|kind| self.lose_one(cpu, dice, forget, kind));
    }

    /// Whether there was one of this kind.
    fn lose_one(&self, cpu: usize, dice: &Dice, forget: bool, kind: u64) -> bool {
        let local = self.local(cpu);
        macro_rules! lose {
            ($value:expr) => {
                match forget {
                    true => std::mem::forget($value),
                    false => drop($value),
                }
            };
        }
        let mut lost = true;
        match kind {
            0 => {
                lost = false;
                self.with_exclusive(cpu, dice, |_, exclusive| {
                    let Some((_, gather)) = exclusive.gather.take() else {
                        return;
                    };
                    lost = true;
                    lose!(gather);
                    if forget {
                        self.leaked.set(true);
                        exclusive.murky = true;
                    } else {
                        exclusive.dropped();
                    }
                });
            }
            1 => match take_any(dice, &local.issued_beside) {
                Some((batch, slot, issued)) => {
                    self.leaked.set(true);
                    lose!(issued);
                    if !forget {
                        self.reclaimed(cpu, batch);
                    }
                    self.slots[slot].users.update(|users| users - 1);
                }
                None => lost = false,
            },
            2 => match take_any(dice, &local.completed) {
                Some((_, completed)) => {
                    self.leaked.set(true);
                    lose!(completed);
                }
                None => lost = false,
            },
            3 => match take_any(dice, &local.deferred) {
                Some((_, deferred)) => {
                    self.leaked.set(true);
                    lose!(deferred);
                }
                None => lost = false,
            },
            4 => match take_any(dice, &local.held) {
                Some((_, held)) => lose!(held),
                None => lost = false,
            },
            5 => match take_any(dice, &local.protecting) {
                Some((slot, start)) => {
                    lose!(start);
                    self.slots[slot].users.update(|users| users - 1);
                }
                None => lost = false,
            },
            6 => match take_any(dice, &local.gathers) {
                Some(it) => {
                    // What may still be walked when it is dropped leaks as well.
                    self.leaked.set(true);
                    lose!(it.gather);
                    if !forget {
                        self.reclaimed(cpu, it.batch);
                    }
                    self.slots[it.slot].users.update(|users| users - 1);
                }
                None => lost = false,
            },
            _ => lost = G::lose(self, cpu, dice, forget),
        }
        lost
    }

    // ---- Shared edits ----
}
