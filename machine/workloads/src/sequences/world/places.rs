//! Places of spaces, and the values that are kept of the edits of each.

use std::cell::{Cell, RefCell};

use tablewright::guest::{Backing, Request};
use tablewright::shared::{self, SharedSpace};
use tablewright::{AddressSpace, Format, Gather, Half, Liveness};

use super::super::model::Map;
use crate::platform::Faulty;

type SharedGather<'m, F> = shared::Gather<'m, F, Faulty<'m>>;
pub type Tables<'m, F> = SharedSpace<F, Faulty<'m>>;

/// A space that one CPU edits.
pub struct Exclusive<'m, F: Format> {
    pub(super) space: *mut AddressSpace<F, Faulty<'m>>,
    /// The gather that borrows it, and the number of what it has gathered.
    pub gather: Option<(u64, Gather<'m, F, Faulty<'m>>)>,
    /// The CPU.
    pub(super) home: usize,
    /// Something was changed, and is perhaps not forgotten.
    pub touched: bool,
    /// A gather was forgotten, and none was complete since.
    pub murky: bool,
}

impl<'m, F: Format> Exclusive<'m, F> {
    /// The space, which nothing borrows: a gather is finished first.
    pub fn space(&mut self) -> &'m mut AddressSpace<F, Faulty<'m>> {
        self.gather = None;
        // SAFETY: the pointer is to a space that lives until `into_inner`. The gather that borrowed
        // it is gone, or was forgotten; no other reference outlives the operation.
        unsafe { &mut *self.space }
    }

    /// The space, to be looked at.
    pub fn look(&self) -> &AddressSpace<F, Faulty<'m>> {
        match &self.gather {
            Some((_, gather)) => gather,
            // SAFETY: as in `space`; nothing borrows it.
            None => unsafe { &*self.space },
        }
    }

    /// An edit is about to be made.
    pub fn touch(&mut self) {
        self.touched |= self.look().liveness() != Liveness::Dead;
    }

    /// A gather was dropped.
    pub fn dropped(&mut self) {
        self.touched = false;
        self.murky = false;
    }

    /// Another CPU edits it from now on.
    pub fn moves_to(&mut self, cpu: usize) {
        self.home = cpu;
    }

    /// Whether this CPU edits it.
    pub fn is_of(&self, cpu: usize) -> bool {
        self.home == cpu
    }

    pub(super) fn into_inner(mut self) -> AddressSpace<F, Faulty<'m>> {
        self.gather = None;
        // SAFETY: it came out of a box, and nothing borrows it.
        *unsafe { Box::from_raw(self.space) }
    }
}

/// The contents of a place for a space.
pub enum Place<'m, F: Format, G> {
    Empty,
    /// An operation has it.
    Taken,
    Exclusive(Exclusive<'m, F>),
    Shared(*mut Tables<'m, F>),
    Guest(*mut G),
}

/// A place for a space, with the addresses that it is used for.
pub struct Slot<'m, F: Format, G> {
    pub base: u64,
    pub(super) half: Half,
    /// Addresses that were used last, and their size.
    pub recent: Cell<(u64, u64)>,
    pub place: RefCell<Place<'m, F, G>>,
    pub(super) plat: Cell<Option<Faulty<'m>>>,
    /// CPUs may load it.
    pub attached: Cell<bool>,
    /// Values and operations that borrow it.
    pub users: Cell<u32>,
    /// Edits that began, and that ended.
    pub(super) version: Cell<u32>,
    /// Every CPU finds what the model says.
    pub(super) steady: Cell<bool>,
    pub model: RefCell<Map>,
    /// Its pages are those of a host.
    pub silent: Cell<bool>,
    /// A CPU is mapping. What is where is for one host to say: no other memory comes to be in a
    /// table while a leaf takes its place.
    pub mapping: Cell<bool>,
    /// It has had something mapped outside of its window. What is global of that is remembered
    /// under other roots as well.
    pub wide: Cell<bool>,
    /// All of it was protected, and nothing lets a guest write since.
    pub protected: Cell<bool>,
}

/// A gather of a shared space.
pub struct Gathering<'m, F: Format> {
    pub slot: usize,
    pub batch: u64,
    pub gather: SharedGather<'m, F>,
}

/// A request that is kept.
pub struct Asked {
    /// The number of the guest that it was made of.
    pub guest: u64,
    /// The number of changes of the guest that had begun.
    pub begun: u64,
    pub request: Request,
    /// The backing that the host has found for it.
    pub page: Option<Backing>,
}
