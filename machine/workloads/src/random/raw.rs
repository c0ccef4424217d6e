//! Tables by hand, for programs that do not use the engine.

use std::ptr::NonNull;

use tablewright::{AddressSpace, Entry, Format, Half, Hooks, Kind, Level, Liveness, Pa, Platform};

use crate::platform::Faulty;

/// An entry, where it is and at which level.
#[derive(Clone, Copy)]
pub struct Place {
    pub entry: NonNull<Entry>,
    pub level: Level,
}

/// The entry of the table in `frame` that translates `va`.
pub fn entry<F: Format>(platform: &Faulty<'_>, frame: Pa, level: Level, va: u64) -> Place {
    // SAFETY: the programs pass frames of tables.
    let table = unsafe { platform.table(frame, level) };
    Place {
        // SAFETY: an index of the table.
        entry: unsafe { table.add(F::index(va, level)) },
        level,
    }
}

impl Place {
    pub fn load(&self, platform: &Faulty<'_>) -> u64 {
        // SAFETY: an entry of a table.
        unsafe { Hooks::load(platform, self.entry) }
    }

    pub fn store(&self, platform: &Faulty<'_>, bits: u64) {
        // SAFETY: an entry of a table.
        unsafe { platform.store(self.entry, bits) }
    }

    pub fn link(&self, platform: &Faulty<'_>, bits: u64) {
        // SAFETY: an entry of a table.
        unsafe { platform.link(self.entry, bits) }
    }

    pub fn exchange(&self, platform: &Faulty<'_>, bits: u64) -> u64 {
        // SAFETY: an entry of a table.
        unsafe { platform.exchange(self.entry, bits) }
    }

    pub fn compare_exchange(&self, platform: &Faulty<'_>, old: u64, new: u64) -> Result<(), u64> {
        // SAFETY: an entry of a table.
        unsafe { platform.compare_exchange(self.entry, old, new) }
    }
}

/// The entry for `va` at `level`, if there are tables down to it.
pub fn find<F: Format>(platform: &Faulty<'_>, root: Pa, va: u64, level: Level) -> Option<Place> {
    let mut place = entry::<F>(platform, root, F::root_level(), va);
    while place.level > level {
        let bits = place.load(platform);
        if F::kind(bits, place.level) != Kind::Table {
            return None;
        }
        let frame = F::address(bits, place.level);
        place = entry::<F>(platform, frame, place.level.down()?, va);
    }
    Some(place)
}

/// Makes a table zero.
pub fn zero<F: Format>(platform: &Faulty<'_>, frame: Pa, level: Level) {
    // SAFETY: a frame that was allocated for a table, all of it.
    unsafe {
        let table = platform.table(frame, level);
        platform.fill(table, F::entries(level), 0, 0);
    }
}

/// Takes tables out of use that map nothing any more, and gives them back.
pub fn destroy<F: Format>(platform: Faulty<'_>, root: Pa, half: Half) {
    // SAFETY: the programs pass the root of tables of this format, which are live, and not edited
    // any more.
    let space = unsafe { AddressSpace::<F, _>::adopt(platform, root, half, Liveness::Live) }
        .expect("no entry that is recursive");
    super::destroy(platform.machine(), space, &platform.mapper);
}
