//! The operations of guests, and of hosts that have pages for them.
//!
//! A host looks a page up after the fault, and takes it back in the order that a zap prescribes:
//! its own look-up gives the new answer, the zap goes to its end and is complete, and then the page
//! is used for something else.

// Every kind of value is forgotten and dropped, with a destructor or without.
#![allow(clippy::forget_non_drop)]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use tablewright::dirty::{Bitmap, Marker, Ring, RingEntry};
use tablewright::guest::{
    Access, Backing, Fault, Gather, Guest, Harvest, Log, Pass, Request, Slot, SlotError, Zap,
};
use tablewright::shared::{Mapped, Refused, SharedSpace};
use tablewright::{EditError, Format, Ipa, Memory, Pa, Perms, Platform, Span};
use tablewright_machine::Time;

use super::operations::Kind;
use super::world::{Asked, FAR, Guests, SPACES, SideMemory, WORDS, World, guarded, take_any};
use crate::Bug;
use crate::dice::Dice;
use crate::platform::Faulty;

type Tables<'m, F> = SharedSpace<F, Faulty<'m>>;

/// From here on the host's own numbers are of memory that never moves.
const FIXED: u64 = 1 << 60;

/// A page that the host has, and the guest's addresses that it was looked up for.
struct Page {
    frame: Pa,
    first: u64,
    last: u64,
}

/// A guest and its host.
pub struct Vm<'m, F: Format<Input = Ipa>> {
    guest: Guest<'m, F, Faulty<'m>>,
    number: u64,
    /// The number of changes of its slots, or of what a host has found for them, that have begun.
    begun: Cell<u64>,
    /// The last of them that is made.
    made: Cell<u64>,
    /// By the number of the host.
    pages: RefCell<HashMap<u64, Page>>,
    /// Of all slots.
    bitmap: Bitmap<'m>,
}

struct Gathering<'m, F: Format<Input = Ipa>> {
    slot: usize,
    batch: u64,
    gather: Gather<'m, 'm, F, Faulty<'m>>,
}

struct Zapping<'m, F: Format<Input = Ipa>> {
    slot: usize,
    zap: Zap<'m, 'm, F, Faulty<'m>>,
    /// Pages that are free when it is over.
    pages: Vec<Pa>,
    under: Under,
}

/// In which gathers the passes of a zap are that are not complete.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Under {
    /// All are complete.
    None,
    /// That of this number.
    One(u64),
    /// In several: which part is complete with which is not known.
    Several,
}

/// A CPU's part of guests.
pub struct Local<'m, F: Format<Input = Ipa>> {
    gathers: RefCell<Vec<Gathering<'m, F>>>,
    zaps: RefCell<Vec<Zapping<'m, F>>>,
}

impl<F: Format<Input = Ipa>> Default for Local<'_, F> {
    fn default() -> Self {
        Self { gathers: RefCell::default(), zaps: RefCell::default() }
    }
}

impl<'m, F: Format<Input = Ipa>> Guests<'m, F> for Vm<'m, F> {
    type Local = Local<'m, F>;

    fn make(world: &World<'m, F, Self>, space: Tables<'m, F>) -> Result<Self, Tables<'m, F>> {
        let memory = Box::into_raw(Box::<SideMemory>::default());
        world.memory.borrow_mut().push(memory);
        // SAFETY: the world frees it when there are no guests any more.
        let SideMemory { cells, words } = unsafe { &mut *memory };
        let Ok(bitmap) = Bitmap::new(words, 64 * WORDS as u64) else {
            unreachable!("a bit for each page")
        };
        Ok(Self {
            guest: Guest::new(space, cells),
            number: world.number(),
            begun: Cell::new(0),
            made: Cell::new(0),
            pages: RefCell::default(),
            bitmap,
        })
    }

    fn space(&self) -> &Tables<'m, F> {
        self.guest.space()
    }

    fn into_space(self) -> Tables<'m, F> {
        self.guest.into_space()
    }

    fn operate(world: &World<'m, F, Self>, cpu: usize, kind: Kind, dice: &Dice) {
        let host = Host { world, cpu, dice };
        match kind {
            Kind::Insert => host.insert(),
            Kind::Replace => host.replace(false),
            Kind::Remove => host.replace(true),
            Kind::SlotAt => host.slot_at(),
            Kind::Request => host.request(),
            Kind::Fault => host.fault(),
            Kind::MapRequest => host.map_request(),
            Kind::Reopen => host.reopen(),
            Kind::Mark => host.mark(),
            Kind::Harvest => host.harvest(),
            Kind::GuestProtect => host.protect(),
            Kind::SplitRange => host.with_gather(|_, _, it| {
                if let Ok(span) = world.span(world.slots[it.slot].base, dice) {
                    it.gather.top_up(dice.below(6) as u8);
                    let _refused = it.gather.split_range(span);
                }
            }),
            Kind::CollapseGuest => host.collapse(),
            Kind::Zap => host.zap(),
            Kind::TakeBack => host.take_back(),
            Kind::ZapStep => host.zap_step(),
            _ => {}
        }
    }

    fn lose(world: &World<'m, F, Self>, cpu: usize, dice: &Dice, forget: bool) -> bool {
        let local = &world.local(cpu).guest;
        let slot = if dice.once_in(2) {
            let taken = take_any(dice, &local.gathers);
            taken.map(|it| {
                world.leaked.set(true);
                match forget {
                    true => std::mem::forget(it.gather),
                    false => {
                        drop(it.gather);
                        world.reclaimed(cpu, it.batch);
                    }
                }
                it.slot
            })
        } else {
            // Its pages are not free before the end.
            take_any(dice, &local.zaps).map(|it| {
                match forget {
                    true => std::mem::forget(it.zap),
                    false => drop(it.zap),
                }
                it.slot
            })
        };
        if let Some(slot) = slot {
            world.slots[slot].users.update(|users| users - 1);
        }
        slot.is_some()
    }

    fn retire(world: &World<'m, F, Self>, cpu: usize) {
        let local = &world.local(cpu).guest;
        let zaps = std::mem::take(&mut *local.zaps.borrow_mut());
        for it in zaps {
            world.slots[it.slot].users.update(|users| users - 1);
        }
        let gathers = std::mem::take(&mut *local.gathers.borrow_mut());
        for mut it in gathers {
            let deferred = it.gather.issue().complete();
            world.reclaimed(cpu, it.batch);
            world.release_all(cpu, it.batch, |held| deferred.release(held));
            world.local(cpu).deferred.borrow_mut().push((it.batch, deferred));
            drop(it.gather);
            world.slots[it.slot].users.update(|users| users - 1);
        }
    }

    fn forget(local: &Self::Local) {
        std::mem::forget(local.gathers.take());
        std::mem::forget(local.zaps.take());
    }
}

/// One operation of a guest's host.
struct Host<'a, 'm, F: Format<Input = Ipa>> {
    world: &'a World<'m, F, Vm<'m, F>>,
    cpu: usize,
    dice: &'a Dice,
}

impl<'m, F: Format<Input = Ipa>> Host<'_, 'm, F> {
    const PAGE: u64 = 1 << F::PAGE_SHIFT;

    fn local(&self) -> &Local<'m, F> {
        &self.world.local(self.cpu).guest
    }

    /// One of the guests, with the number of its place.
    fn with_guest(&self, what: impl FnOnce(usize, &'m Vm<'m, F>)) {
        let start = self.dice.index(SPACES);
        let found = (0..SPACES).map(|n| (start + n) % SPACES).find_map(|index| {
            let guest = self.world.guest_at(index)?;
            Some((index, guest))
        });
        let Some((index, guest)) = found else {
            return;
        };
        let users = &self.world.slots[index].users;
        users.update(|users| users + 1);
        guarded(|| what(index, guest), |_| users.update(|users| users - 1));
    }

    /// A gather of a guest.
    fn with_gather(&self, what: impl FnOnce(&Self, &'m Vm<'m, F>, &mut Gathering<'m, F>)) {
        self.with_guest(|slot, guest| {
            let found = {
                let mut gathers = self.local().gathers.borrow_mut();
                let found = gathers.iter().position(|it| it.slot == slot);
                found.map(|index| gathers.swap_remove(index))
            };
            let users = &self.world.slots[slot].users;
            let mut it = match found {
                Some(it) if self.dice.below(8) > 0 => it,
                other => {
                    self.local().gathers.borrow_mut().extend(other);
                    users.update(|users| users + 1);
                    Gathering {
                        slot,
                        batch: self.world.silent_number(),
                        gather: guest.guest.gather(),
                    }
                }
            };
            let same = std::ptr::eq(it.gather.guest(), &guest.guest);
            self.world.check(same, || "a gather is of another guest".into());
            let edit = || what(self, guest, &mut it);
            if let Err(payload) = catch_unwind(AssertUnwindSafe(edit)) {
                self.local().gathers.borrow_mut().push(it);
                resume_unwind(payload);
            }
            match self.dice.below(6) {
                0..=1 => self.complete(&mut it),
                2 => {
                    let issued = it.gather.issue();
                    let batch = std::mem::replace(&mut it.batch, self.world.silent_number());
                    users.update(|users| users + 1);
                    let local = self.world.local(self.cpu);
                    let mut beside = local.issued_beside.borrow_mut();
                    beside.push((batch, it.slot, issued));
                }
                _ => {}
            }
            self.local().gathers.borrow_mut().push(it);
        });
    }

    /// Forgets what was gathered.
    fn complete(&self, it: &mut Gathering<'m, F>) {
        let local = self.world.local(self.cpu);
        if self.dice.once_in(2) {
            let deferred = it.gather.issue().complete();
            self.world.reclaimed(self.cpu, it.batch);
            self.world.release_all(self.cpu, it.batch, |held| deferred.release(held));
            local.deferred.borrow_mut().push((it.batch, deferred));
        } else {
            let finished = it.gather.finish(|_| ());
            self.world.reclaimed(self.cpu, it.batch);
            let mut deferred = local.deferred.borrow_mut();
            deferred.extend(finished.err().map(|deferred| (it.batch, deferred)));
        }
        it.batch = self.world.silent_number();
    }

    // ---- Slots ----

    fn some_slot(&self, index: usize) -> Option<Slot> {
        let (world, dice) = (self.world, self.dice);
        let base = world.slots[index].base;
        let block = Self::PAGE << F::INDEX_BITS;
        let span = match dice.below(8) {
            0..=2 => Span::new(Ipa::new(base + block), 8 * Self::PAGE),
            3..=4 => Span::new(Ipa::new(base + 4 * block), (1 + dice.below(2)) * block),
            5 => Span::new(Ipa::new(base), 16 * block),
            _ => world.span(base, dice),
        };
        let guest = span.ok()?;
        let host = match dice.once_in(2) {
            true => FIXED.wrapping_add(guest.start().get().wrapping_sub(base)),
            false => world.number() << 44,
        };
        let perms = Perms::READ | Perms::WRITE | Perms::EXEC;
        Some(Slot {
            perms: match dice.below(4) {
                0 => Perms::READ,
                1 => Perms::READ | Perms::WRITE,
                _ => perms,
            },
            memory: match dice.once_in(8) && host >= FIXED {
                true => Memory::Device,
                false => Memory::Normal,
            },
            page: dice.pick(&[0, 1, Self::PAGE, block, 1 << 40]),
            log: dice.pick(&[Log::Off, Log::Off, Log::ByFault, Log::ByHardware]),
            ..Slot::memory(guest, host).with_id(dice.below(6) as u16)
        })
    }

    fn insert(&self) {
        self.with_guest(|index, guest| {
            if let Some(slot) = self.some_slot(index)
                && guest.change(|guest| guest.insert(slot)).is_ok()
            {
                self.may_be_logged(guest, &slot);
                let found = guest.guest.slot(slot.guest.start());
                let right = found.is_err() || found.is_ok_and(|found| found.guest.size() > 0);
                self.world.check(right, || format!("{slot:?} became {found:?}"));
            }
        });
    }

    fn replace(&self, removes: bool) {
        self.with_guest(|index, guest| {
            let changed = match (removes, self.some_slot(index)) {
                (true, _) => guest.change(|guest| guest.remove(self.dice.below(6) as u16)),
                (false, Some(slot)) => {
                    let replaced = guest.change(|guest| guest.replace(slot));
                    if replaced.is_ok() {
                        self.may_be_logged(guest, &slot);
                    }
                    replaced
                }
                _ => return,
            };
            if let Ok(zap) = changed {
                self.keep(index, zap, Vec::new());
            }
        });
    }

    fn keep(&self, slot: usize, zap: Zap<'m, 'm, F, Faulty<'m>>, pages: Vec<Pa>) {
        let _ = zap.span();
        self.world.slots[slot].users.update(|users| users + 1);
        let mut zaps = self.local().zaps.borrow_mut();
        let under = Under::None;
        zaps.push(Zapping { slot, zap, pages, under });
    }

    fn slot_at(&self) {
        self.with_guest(|index, guest| {
            let (at, _) = self.world.addresses(self.world.slots[index].base, self.dice);
            if let Ok(slot) = guest.guest.slot(Ipa::new(at)) {
                let inside = slot.guest.contains(Ipa::new(at));
                self.world.check(inside, || format!("{at:#x} is not in {slot:?}"));
            }
        });
    }

    // ---- Faults ----

    /// Returns the host's backing for a request.
    fn look_up(&self, guest: &Vm<'m, F>, request: &Request) -> Option<Backing> {
        let (world, dice) = (self.world, self.dice);
        let host = request.host();
        let perms = match dice.once_in(6) {
            true => Perms::all() - Perms::ANY_WRITE,
            false => Perms::all(),
        };
        if host >= FIXED {
            let size = dice.pick(&[Self::PAGE, Self::PAGE << F::INDEX_BITS, 1 << 39]);
            let frame = Pa::new(FAR + (host - FIXED));
            return Some(Backing::new(frame, size).with_perms(perms));
        }
        let (key, at) = (host >> F::PAGE_SHIFT, request.at().get() & !(Self::PAGE - 1));
        let known = |pages: &mut HashMap<u64, Page>| {
            pages.get_mut(&key).map(|page| {
                (page.first, page.last) = (page.first.min(at), page.last.max(at));
                page.frame
            })
        };
        let found = known(&mut guest.pages.borrow_mut());
        let frame = match found {
            Some(frame) => frame,
            None => {
                let frame = world.machine.take_page()?;
                world.machine.write_page(frame);
                let mut pages = guest.pages.borrow_mut();
                if let Some(frame_of_other) = known(&mut pages) {
                    drop(pages);
                    world.machine.give_page(frame);
                    frame_of_other
                } else {
                    world.host_frames.borrow_mut().insert(frame.get());
                    let (first, last) = (at, at);
                    pages.insert(key, Page { frame, first, last });
                    frame
                }
            }
        };
        let inside = request.at().get() % Self::PAGE;
        let frame = Pa::new(frame.get() + inside);
        Some(Backing::new(frame, Self::PAGE).with_perms(perms))
    }

    fn some_fault(&self, index: usize) -> Fault {
        let (world, dice) = (self.world, self.dice);
        let base = world.slots[index].base;
        let at = match dice.below(3) {
            0 => world.addresses(base, dice).0,
            _ => world.page(base, dice).start().get() + dice.below(Self::PAGE),
        };
        let access = dice.pick(&[Access::Read, Access::Write, Access::Write, Access::Execute]);
        let fault = match dice.below(6) {
            0 => {
                let class = dice.pick(&[0x20, 0x24, 0x24, 0x25]);
                let status = dice.pick(&[4, 5, 6, 7, 8, 11, 12, 13, 14, 15, 0x2b, 0x21]);
                let esr = class << 26 | status | dice.below(8) << 6;
                Fault::arm64(esr, at >> 12 << 4, at)
            }
            1 => Some(Fault::ept(dice.below(128), at)),
            2 => Fault::nested(dice.below(32), at),
            _ => None,
        };
        fault.unwrap_or(Fault::new(Ipa::new(at), access))
    }

    fn request(&self) {
        self.with_guest(|index, guest| {
            let fault = self.some_fault(index);
            let Ok(request) = guest.guest.request(&fault) else {
                return;
            };
            let begun = guest.begun.get();
            let right = request.at() == fault.at
                && request.access() == fault.access
                && request.slot().guest.contains(fault.at)
                && request.tables() < 5;
            self.world.check(right, || format!("{fault:?} became another request"));
            let page = match self.dice.once_in(8) {
                true => None,
                false => self.look_up(guest, &request),
            };
            let local = self.world.local(self.cpu);
            let mut requests = local.requests.borrow_mut();
            requests.push(Asked { guest: guest.number, begun, request, page });
        });
    }

    /// Judges that a map has done only what it may do.
    fn judge(&self, mapped: &Result<Mapped<F>, Refused<Ipa>>) {
        let right = !matches!(
            mapped,
            Err(Refused::Edit(
                EditError::AlreadyMapped(_)
                    | EditError::NeedsBreak(_)
                    | EditError::Misaligned
                    | EditError::NoSuchLeaf
                    | EditError::ForeignGather
            ))
        );
        self.world.check(right, || format!("a fault comes to {mapped:?}"));
    }

    fn fault(&self) {
        self.with_gather(|host, guest, it| {
            let fault = host.some_fault(it.slot);
            let Ok(request) = guest.guest.request(&fault) else {
                return;
            };
            it.gather.top_up(request.tables());
            let Some(page) = host.look_up(guest, &request) else {
                return;
            };
            let mut mapped = it.gather.map(&request, &page);
            if let Err(Refused::NeedsTables(count)) = mapped
                && it.gather.top_up(count)
            {
                mapped = it.gather.map(&request, &page);
            }
            host.judge(&mapped);
            if mapped.is_ok() && request.is_logged_write() {
                let marker = Marker::Bitmap(&guest.bitmap);
                guest.guest.mark(&marker, &request.slot(), request.at());
            }
        });
    }

    fn map_request(&self) {
        self.with_gather(|host, guest, it| {
            let requests = &host.world.local(host.cpu).requests;
            let Some(asked) = take_any(host.dice, requests) else {
                return;
            };
            let Some(found) = asked.page else { return };
            let (request, outdated) = (asked.request, guest.is_changed_since(&asked));
            let collapses = host.dice.once_in(6);
            let mapped = match collapses {
                true => it.gather.collapse(&request, &found).map(|_| Mapped::Already),
                false => it.gather.map(&request, &found),
            };
            host.judge(&mapped);
            let nothing = collapses && request.slot().log.is_on();
            host.world.check(!outdated || nothing || mapped.is_err(), || {
                format!("{request:?} is out of date, or of another guest, and is mapped")
            });
            if host.dice.once_in(2) {
                requests.borrow_mut().push(asked);
            }
        });
    }

    fn reopen(&self) {
        self.with_guest(|index, guest| {
            if self.dice.once_in(4) {
                let _refused = guest.guest.set_accessed(&self.some_fault(index));
                return;
            }
            let requests = &self.world.local(self.cpu).requests;
            let Some(asked) = take_any(self.dice, requests) else {
                return;
            };
            let outdated = guest.is_changed_since(&asked);
            let reopened = guest.guest.reopen(&asked.request);
            self.world.check(!outdated || reopened.is_err(), || {
                let at = asked.request.at();
                format!("a request for {at} is out of date, or of another guest, and is reopened")
            });
            requests.borrow_mut().push(asked);
        });
    }

    fn collapse(&self) {
        self.with_gather(|host, guest, it| {
            let (at, _) = host.world.addresses(host.world.slots[it.slot].base, host.dice);
            let fault = Fault::new(Ipa::new(at), Access::Read);
            if let Ok(request) = guest.guest.request(&fault)
                && let Some(page) = host.look_up(guest, &request)
            {
                let _refused = it.gather.collapse(&request, &page);
            }
        });
    }

    // ---- Logs ----

    fn mark(&self) {
        self.with_guest(|index, guest| {
            let (at, _) = self.world.addresses(self.world.slots[index].base, self.dice);
            let at = Ipa::new(at);
            let Ok(slot) = guest.guest.slot(at) else {
                return;
            };
            let mut entries = [const { RingEntry::new() }; 2];
            let Ok(ring) = Ring::new(&mut entries) else {
                return;
            };
            let marker = match self.dice.once_in(2) {
                true => Marker::Bitmap(&guest.bitmap),
                false => Marker::Ring(&ring, slot.id),
            };
            for _ in 0..3 {
                if marker.room().is_ok() {
                    guest.guest.mark(&marker, &slot, at);
                }
            }
        });
    }

    fn harvest(&self) {
        self.with_gather(|host, guest, it| {
            let (at, _) = host.world.addresses(host.world.slots[it.slot].base, host.dice);
            let Ok(slot) = guest.guest.slot(Ipa::new(at)) else {
                return;
            };
            if host.dice.once_in(8) {
                return host.harvest_another(guest, it, slot);
            }
            let count = slot.guest.size() >> F::PAGE_SHIFT;
            let first = host.dice.below(count.min(64));
            let end = match host.dice.below(4) {
                0 => count + host.dice.below(2),
                1 => host.dice.below(first + 1),
                _ => count.min(first + 1 + host.dice.below(64)),
            };
            let how = Harvest::from_bits_retain(host.dice.pick(&[0, 0, 1, 2]));
            let harvested = it.gather.harvest(&slot, &guest.bitmap, first..end, how, |page, _| {
                host.world.visited();
                host.world
                    .check(page < count.max(64), || format!("page {page} of {count} was written"));
            });
            let right = harvested.is_ok() || end > count || how.bits() == 2 || !slot.log.is_on();
            host.world.check(right, || format!("{first}..{end} of {slot:?}: {harvested:?}"));
        });
    }

    /// A slot that is not the guest's own is not believed: neither how it is logged, nor how long
    /// it is.
    fn harvest_another(&self, guest: &Vm<'m, F>, it: &mut Gathering<'m, F>, slot: Slot) {
        let log = self.dice.pick(&[Log::Off, Log::ByFault, Log::ByHardware]);
        let size = slot.guest.size() + Self::PAGE;
        let other = match self.dice.below(3) {
            0 => Slot { log, ..slot },
            1 => slot.with_id(slot.id ^ 1),
            _ => match Span::new(slot.guest.start(), size) {
                Ok(guest) => Slot { guest, ..slot },
                Err(_) => return,
            },
        };
        if other == slot {
            return;
        }
        let how = Harvest::from_bits_retain(0);
        let harvested = it.gather.harvest(&other, &guest.bitmap, 0..1, how, |page, _| {
            self.world.fail(format!("page {page} of {other:?} is given out"));
        });
        self.world.check(harvested == Err(SlotError::Unknown), || {
            format!("{other:?} is not the guest's slot: {harvested:?}")
        });
    }

    /// Writes to what is inserted are logged by hardware only where there is hardware that does.
    fn may_be_logged(&self, guest: &Vm<'m, F>, slot: &Slot) {
        let has = guest.guest.space().platform().caps().hardware_dirty;
        self.world.check(has || slot.log != Log::ByHardware, || {
            format!("{slot:?} is logged by hardware that marks nothing")
        });
    }

    fn protect(&self) {
        self.with_gather(|host, guest, it| {
            if host.dice.once_in(4) {
                let _refused = guest.guest.protect_no_more();
                return;
            }
            let (at, _) = host.world.addresses(host.world.slots[it.slot].base, host.dice);
            if let Ok(slot) = guest.guest.slot(Ipa::new(at)) {
                let first = host.dice.below(16);
                let _refused = it.gather.protect(&slot, first..first + host.dice.below(16));
            }
        });
    }

    // ---- What is taken back ----

    fn zap(&self) {
        self.with_guest(|index, guest| {
            let span = self.world.span(self.world.slots[index].base, self.dice);
            let zap = match span {
                Ok(span) if self.dice.below(3) > 0 => guest.zap(|guest| guest.zap(span)),
                _ => guest.zap(|guest| guest.zap_all()),
            };
            self.keep(index, zap, Vec::new());
        });
    }

    fn take_back(&self) {
        self.with_guest(|index, guest| {
            let page = {
                let mut pages = guest.pages.borrow_mut();
                let mut keys: Vec<u64> = pages.keys().copied().collect();
                keys.sort_unstable();
                match keys.is_empty() {
                    true => None,
                    false => pages.remove(&self.dice.pick(&keys)),
                }
            };
            let Some(Page { frame, first, last }) = page else {
                return;
            };
            let span = Span::inclusive(Ipa::new(first), Ipa::new(last + (Self::PAGE - 1)));
            let Ok(span) = span else { unreachable!("pages of a guest") };
            if self.world.control.is(Bug::FreedBeforeZap) {
                self.give(frame);
                self.keep(index, guest.guest.zap(span), Vec::new());
                return;
            }
            let zap = guest.zap(|guest| guest.zap(span));
            self.keep(index, zap, vec![frame]);
        });
    }

    fn give(&self, frame: Pa) {
        self.world.host_frames.borrow_mut().remove(&frame.get());
        self.world.machine.give_page(frame);
    }

    fn zap_step(&self) {
        let Some(mut it) = take_any(self.dice, &self.local().zaps) else {
            return;
        };
        let slot = it.slot;
        for _ in 0..1 + self.dice.below(6) {
            let mut over = false;
            self.with_gather(|host, guest, gathering| {
                let own = gathering.slot == it.slot;
                let batch = gathering.batch;
                let mut room = host.dice.below(12);
                let unmaps = !it.pages.is_empty() || host.dice.below(3) > 0;
                let (span, begun) = (it.zap.span(), host.world.begin(gathering.slot));
                let pass = if unmaps {
                    it.zap.unmap(&mut gathering.gather, |held| {
                        let local = host.world.local(host.cpu);
                        local.held.borrow_mut().push((batch, held));
                        room = room.saturating_sub(1);
                        match room {
                            0 => ControlFlow::Break(()),
                            _ => ControlFlow::Continue(()),
                        }
                    })
                } else {
                    let change = host.world.change(host.dice);
                    it.zap.protect(&mut gathering.gather, change)
                };
                let right = own == !matches!(pass, Err(EditError::ForeignGather));
                let _ = guest;
                host.world.check(right, || format!("with a gather of a guest: {pass:?}"));
                if matches!(pass, Ok(Pass::Went)) {
                    it.under = match it.under {
                        Under::None => Under::One(batch),
                        Under::One(other) if other == batch => it.under,
                        _ => Under::Several,
                    };
                    if it.under != Under::Several {
                        host.world.note(host.cpu, batch, span, begun);
                    }
                }
                match pass {
                    Ok(Pass::Waiting) => host.world.machine.cpu().spend(Time::ns(300)),
                    // What was taken away is forgotten before anything relies on it.
                    Ok(Pass::Went) if !it.pages.is_empty() => {
                        host.complete(gathering);
                        if it.under != Under::Several {
                            it.under = Under::None;
                        }
                    }
                    Ok(Pass::Went) => {}
                    Ok(Pass::Over) => over = true,
                    Err(EditError::ForeignGather) => {}
                    Err(_) => over = true,
                }
            });
            if over {
                for frame in it.pages.drain(..) {
                    self.give(frame);
                }
                drop(it);
                self.world.slots[slot].users.update(|users| users - 1);
                return;
            }
        }
        self.local().zaps.borrow_mut().push(it);
    }
}

impl<'m, F: Format<Input = Ipa>> Vm<'m, F> {
    /// Makes what was looked up before out of date.
    fn zap<'g, T>(&'g self, zap: impl FnOnce(&'g Guest<'m, F, Faulty<'m>>) -> T) -> T {
        let Ok(zapped) = self.change(|guest| Ok::<_, Infallible>(zap(guest)));
        zapped
    }

    /// Changes the slots, if the change is not refused.
    fn change<'g, T, E>(
        &'g self,
        change: impl FnOnce(&'g Guest<'m, F, Faulty<'m>>) -> Result<T, E>,
    ) -> Result<T, E> {
        let number = self.begun.get() + 1;
        self.begun.set(number);
        let changed = change(&self.guest)?;
        self.made.update(|made| made.max(number));
        Ok(changed)
    }

    /// Whether a request was made of another guest, or a change that is made has begun after it.
    /// Others change the slots while a request is made.
    fn is_changed_since(&self, asked: &Asked) -> bool {
        asked.guest != self.number || asked.begun < self.made.get()
    }
}
