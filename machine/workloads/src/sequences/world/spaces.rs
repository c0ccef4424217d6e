//! Spaces come, are shared, become those of guests, and go.

use super::*;
use crate::sequences::model::Map;

impl<'m, F: Format, G: Guests<'m, F>> World<'m, F, G> {
    pub fn create(&self, cpu: usize, dice: &Dice) {
        let empty = |slot: &&Slot<'m, F, G>| matches!(*slot.place.borrow(), Place::Empty);
        let Some(slot) = self.slots.iter().find(empty) else {
            return;
        };
        let plat = Faulty { linked: !dice.once_in(4), ..Faulty::new(self.machine, self.control) };
        *slot.place.borrow_mut() = Place::Taken;
        let space = match slot.half {
            Half::Lower if dice.once_in(2) => AddressSpace::<F, _>::new(plat),
            half => AddressSpace::new_in(plat, half),
        };
        let Some(space) = space else {
            *slot.place.borrow_mut() = Place::Empty;
            return;
        };
        // No two spaces have had the same.
        let space = space.with_id(self.number() as u16);
        slot.plat.set(Some(plat));
        slot.model.borrow_mut().clear();
        slot.silent.set(false);
        *slot.place.borrow_mut() = Place::Exclusive(self.exclusive(cpu, space));
        if dice.below(4) > 0 {
            let index = self.slots.iter().position(|it| std::ptr::eq(it, slot));
            self.make_live(cpu, index.unwrap_or_default(), dice);
        }
    }

    pub(super) fn exclusive(
        &self,
        home: usize,
        space: AddressSpace<F, Faulty<'m>>,
    ) -> Exclusive<'m, F> {
        Exclusive {
            space: Box::into_raw(Box::new(space)),
            gather: None,
            home,
            touched: false,
            murky: false,
        }
    }

    pub fn make_live(&self, cpu: usize, index: usize, dice: &Dice) {
        self.with_exclusive_at(cpu, index, |slot, exclusive| {
            let space = exclusive.space();
            let id = space.id();
            match dice.once_in(6) {
                true => space.make_own(),
                false => space.make_live(),
            }
            let ignored = dice.once_in(4);
            if ignored {
                // SAFETY: it is put back at once.
                let owned = unsafe { std::ptr::read(exclusive.space) }.with_id(id.wrapping_add(1));
                self.check(owned.id() == id, || "a live space has changed its identity".into());
                // SAFETY: what was read is written back.
                unsafe { std::ptr::write(exclusive.space, owned) };
            }
            self.attach(slot, exclusive.look().root(), id);
        });
        self.load_at(cpu, index);
    }

    pub(super) fn attach(&self, slot: &Slot<'m, F, G>, root: Pa, id: u16) {
        if let (Some(plat), false) = (slot.plat.get(), slot.attached.get()) {
            plat.mapper.attach(root, slot.half, id);
            slot.attached.set(true);
        }
    }

    /// The CPU loads a space, if it can be loaded.
    pub fn load_at(&self, cpu: usize, index: usize) {
        let slot = &self.slots[index];
        if let (Some(plat), true) = (slot.plat.get(), slot.attached.get()) {
            plat.mapper.load();
            self.locals[cpu].loaded.set(Some(index));
        }
    }

    /// One of the spaces that this CPU edits.
    pub fn with_exclusive(
        &self,
        cpu: usize,
        dice: &Dice,
        what: impl FnOnce(&Slot<'m, F, G>, &mut Exclusive<'m, F>),
    ) {
        let start = dice.index(SPACES);
        let mine = |index: &usize| {
            let place = self.slots[*index].place.borrow();
            matches!(&*place, Place::Exclusive(it) if it.home == cpu)
        };
        let index = (0..SPACES).map(|n| (start + n) % SPACES).find(mine);
        if let Some(index) = index {
            self.with_exclusive_at(cpu, index, what);
        }
    }

    pub(super) fn with_exclusive_at(
        &self,
        cpu: usize,
        index: usize,
        what: impl FnOnce(&Slot<'m, F, G>, &mut Exclusive<'m, F>),
    ) {
        let slot = &self.slots[index];
        let place = slot.place.replace(Place::Taken);
        let exclusive = match place {
            Place::Exclusive(exclusive) if exclusive.home == cpu => exclusive,
            other => {
                slot.place.replace(other);
                return;
            }
        };
        slot.version.update(|version| version + 1);
        slot.steady.set(false);
        let cell = RefCell::new(Some(exclusive));
        let edit = || match cell.borrow_mut().as_mut() {
            Some(exclusive) => what(slot, exclusive),
            None => unreachable!("it is put back below"),
        };
        guarded(edit, |unwound| {
            let Some(mut exclusive) = cell.take() else {
                return;
            };
            if unwound {
                // A gather that was being used has ended on the way. Whether there was one that has
                // paid what others have left is not known.
                exclusive.gather = None;
                self.look_anew(slot, &exclusive);
            }
            self.put_back(slot, exclusive);
        });
    }

    fn put_back(&self, slot: &Slot<'m, F, G>, exclusive: Exclusive<'m, F>) {
        let steady = exclusive.gather.is_none()
            && !exclusive.touched
            && !exclusive.murky
            && exclusive.look().liveness() != Liveness::Dead;
        if let (true, Some(plat)) = (steady, slot.plat.get()) {
            let look = plat.mapper.look();
            plat.mapper.rely((0, u64::MAX), look);
        }
        if steady && self.machine.architecture().is_x86() {
            // Stores wait in the CPU's buffer.
            self.hand_over();
        }
        slot.place.replace(Place::Exclusive(exclusive));
        slot.version.update(|version| version + 1);
        slot.steady.set(steady);
    }

    /// Two of the spaces that this CPU edits.
    pub fn with_two(
        &self,
        cpu: usize,
        dice: &Dice,
        what: impl FnOnce(
            (&Slot<'m, F, G>, &mut Exclusive<'m, F>),
            (&Slot<'m, F, G>, &mut Exclusive<'m, F>),
        ),
    ) {
        let first = dice.index(SPACES);
        let second = (first + 1 + dice.index(SPACES - 1)) % SPACES;
        self.with_exclusive_at(cpu, first, |one, mine| {
            self.with_exclusive_at(cpu, second, |other, its| what((one, mine), (other, its)));
        });
    }

    /// One of the spaces that are shared, with its place.
    pub fn with_shared(&self, dice: &Dice, what: impl FnOnce(usize, &'m Tables<'m, F>)) {
        let start = dice.index(SPACES);
        let found = (0..SPACES).map(|n| (start + n) % SPACES).find_map(|index| {
            let tables = self.tables_at(index)?;
            Some((index, tables))
        });
        let Some((index, tables)) = found else { return };
        self.slots[index].users.update(|users| users + 1);
        what(index, tables);
        self.slots[index].users.update(|users| users - 1);
    }

    pub fn tables_at(&self, index: usize) -> Option<&'m Tables<'m, F>> {
        match *self.slots[index].place.borrow() {
            // SAFETY: it lives until nothing borrows it, which is counted.
            Place::Shared(tables) => Some(unsafe { &*tables }),
            // SAFETY: as before.
            Place::Guest(guest) => Some(unsafe { &*guest }.space()),
            _ => None,
        }
    }

    pub fn guest_at(&self, index: usize) -> Option<&'m G> {
        match *self.slots[index].place.borrow() {
            // SAFETY: it lives until nothing borrows it, which is counted.
            Place::Guest(guest) => Some(unsafe { &*guest }),
            _ => None,
        }
    }

    /// A place with something of a kind in it, or any.
    pub fn place(&self, dice: &Dice, is: impl Fn(&Place<'m, F, G>) -> bool) -> usize {
        let start = dice.index(SPACES);
        let mut places = (0..SPACES).map(|n| (start + n) % SPACES);
        let found = places.find(|&index| is(&self.slots[index].place.borrow()));
        found.unwrap_or(start)
    }

    pub fn share(&self, cpu: usize, dice: &Dice) {
        let index =
            self.place(dice, |place| matches!(place, Place::Exclusive(it) if it.is_of(cpu)));
        let slot = &self.slots[index];
        let place = slot.place.replace(Place::Taken);
        let exclusive = match place {
            Place::Exclusive(exclusive) if exclusive.home == cpu => exclusive,
            other => {
                slot.place.replace(other);
                return;
            }
        };
        slot.version.update(|version| version + 1);
        slot.steady.set(false);
        let (root, id) = (exclusive.look().root(), exclusive.look().id());
        let own = exclusive.look().liveness() == Liveness::Own;
        let (touched, murky) = (exclusive.touched, exclusive.murky);
        match SharedSpace::new(exclusive.into_inner()) {
            Ok(shared) => {
                self.check(!own, || "a space was shared that is the code's own".into());
                self.attach(slot, root, id);
                let shared = Box::into_raw(Box::new(shared));
                slot.place.replace(Place::Shared(shared));
                self.load_at(cpu, index);
            }
            Err(space) => {
                let may_deny = self.denying && F::TABLES_RESTRICT;
                self.check(own || may_deny, || "a space was not shared".into());
                let mut exclusive = self.exclusive(cpu, space);
                exclusive.touched = touched;
                exclusive.murky = murky;
                slot.place.replace(Place::Exclusive(exclusive));
            }
        }
    }

    pub fn unshare(&self, cpu: usize, index: usize) {
        let slot = &self.slots[index];
        let shared = match *slot.place.borrow() {
            Place::Shared(shared) if slot.users.get() == 0 => shared,
            _ => return,
        };
        slot.place.replace(Place::Taken);
        // SAFETY: it came out of a box, and nothing borrows it.
        let space = unsafe { Box::from_raw(shared) }.into_exclusive();
        let exclusive = self.exclusive(cpu, space);
        self.look_anew(slot, &exclusive);
        slot.place.replace(Place::Exclusive(exclusive));
    }

    /// The model is made of what the engine says.
    pub fn look_anew(&self, slot: &Slot<'m, F, G>, exclusive: &Exclusive<'m, F>) {
        let mut model = Map::default();
        exclusive.look().walk_all(|leaf| {
            let first = leaf.input().bits();
            let perms = leaf.attrs().perms;
            model.insert(first, first + (leaf.size() - 1), leaf.frame().get(), perms);
        });
        slot.model.replace(model);
    }

    pub fn make_guest(&self, index: usize) {
        let slot = &self.slots[index];
        let shared = match *slot.place.borrow() {
            Place::Shared(shared) if slot.users.get() == 0 => shared,
            _ => return,
        };
        // SAFETY: it came out of a box, and nothing borrows it.
        let made = G::make(self, *unsafe { Box::from_raw(shared) });
        slot.place.replace(match made {
            Ok(guest) => {
                slot.silent.set(true);
                Place::Guest(Box::into_raw(Box::new(guest)))
            }
            Err(space) => Place::Shared(Box::into_raw(Box::new(space))),
        });
    }

    pub fn unguest(&self, index: usize) {
        let slot = &self.slots[index];
        let guest = match *slot.place.borrow() {
            Place::Guest(guest) if slot.users.get() == 0 => guest,
            _ => return,
        };
        // SAFETY: it came out of a box, and nothing borrows it.
        let space = unsafe { Box::from_raw(guest) }.into_space();
        slot.place.replace(Place::Shared(Box::into_raw(Box::new(space))));
    }

    /// A live space refuses; one that no CPU uses is taken down.
    pub fn destroy(&self, cpu: usize, index: usize, way: Way) {
        let slot = &self.slots[index];
        let place = slot.place.replace(Place::Taken);
        let mut exclusive = match place {
            Place::Exclusive(exclusive) if exclusive.home == cpu => exclusive,
            other => {
                slot.place.replace(other);
                return;
            }
        };
        let dead = exclusive.look().liveness() == Liveness::Dead;
        if way.refuses && !dead {
            let (touched, murky) = (exclusive.touched, exclusive.murky);
            match exclusive.into_inner().destroy(|_| ()) {
                Ok(()) => self.fail("a live space was destroyed"),
                Err(space) => {
                    exclusive = self.exclusive(cpu, space);
                    exclusive.touched = touched;
                    exclusive.murky = murky;
                    slot.place.replace(Place::Exclusive(exclusive));
                }
            }
            return;
        }
        self.complete(cpu, slot, &mut exclusive);
        self.compare(slot, &exclusive);
        slot.version.update(|version| version + 1);
        slot.steady.set(false);
        let mut space = exclusive.into_inner();
        if let (Some(plat), true) = (slot.plat.get(), slot.attached.replace(false)) {
            plat.mapper.detach();
            for local in &self.locals {
                if local.loaded.get() == Some(index) {
                    local.loaded.set(None);
                }
            }
            if !way.retires {
                self.machine.dsb_stores();
                self.machine.tlbi(Tlbi::ALL);
                self.machine.dsb();
            }
        }
        if way.retires {
            // SAFETY: no processor has the root loaded (1.), and the platform invalidates what it
            // is given (2.).
            unsafe { space.retire() };
        }
        // SAFETY: no processor has the root loaded, and everything is forgotten.
        unsafe { space.make_dead() };
        let batch = u64::from(slot.silent.get());
        let destroyed = match way.in_place {
            // SAFETY: it is dropped, and not used before (1.).
            true => unsafe { space.tear_down(|leaf| self.out(batch, &leaf)) },
            false => space.destroy(|leaf| self.out(batch, &leaf)).is_ok(),
        };
        self.check(destroyed, || "a dead space was not destroyed".into());
        slot.plat.set(None);
        slot.place.replace(Place::Empty);
    }
}
