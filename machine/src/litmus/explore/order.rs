//! Order by barriers, dependencies and context synchronisation.

use super::super::program::*;
use super::Explorer;
use super::state::{Phase, State, is_late};
use crate::hardware::{Cause, Fault};

/// Whether the other instructions of a thread may go on.
pub(super) enum Next {
    On,
    /// Not those after this one.
    Stop,
    /// The one that was found is done first.
    Now,
}

/// A stage does not give the right.
pub(super) fn is_permission(fault: &Fault) -> bool {
    let cause = Cause::Permission;
    matches!(fault, Fault::Permission { .. })
        || matches!(fault, Fault::Second { cause: of, .. } if *of == cause)
}

/// Instructions that are done as soon as what they wait for is.
pub(super) fn is_derived(op: &Op) -> bool {
    matches!(op, Op::Fence(Kind::All | Kind::Loads) | Op::Branch(_))
}

/// Barriers. They do nothing that cannot be done again, so that what comes before one may still
/// fault, where it does not wait for that.
pub(super) fn is_barrier(op: &Op) -> bool {
    matches!(op, Op::Fence(_) | Op::Barrier { .. })
}

/// Facts about all instructions before one.
pub(super) struct Before {
    /// They are done, stores at least in the buffer.
    pub all_done: bool,
    /// Stores have left it.
    pub all_drained: bool,
    pub loads_done: bool,
    pub stores_buffered: bool,
    pub stores_drained: bool,
    /// Stores before a DMB for stores have left the buffer.
    pub fenced_drained: bool,
    pub releases_drained: bool,
    /// Accesses are translated, and none of them faults.
    pub translated: bool,
    pub decided: bool,
    /// Context synchronisation events.
    pub synchronised: bool,
    /// DSBs.
    pub published: bool,
    /// Loads before DSBs that are about loads.
    pub loads_published: bool,
    /// An atomic access has read, and its store is not visible.
    pub has_late_store: bool,
    /// Barriers, invalidations, and writes to registers of the system.
    pub system_done: bool,
    /// A barrier holds accesses back.
    pub barred: bool,
    pub stores_barred: bool,
}

impl Default for Before {
    fn default() -> Self {
        Self {
            all_done: true,
            all_drained: true,
            loads_done: true,
            stores_buffered: true,
            stores_drained: true,
            fenced_drained: true,
            releases_drained: true,
            translated: true,
            decided: true,
            synchronised: true,
            published: true,
            loads_published: true,
            has_late_store: false,
            system_done: true,
            barred: false,
            stores_barred: false,
        }
    }
}

impl Before {
    pub fn of(explorer: &Explorer<'_>, state: &State, thread: usize, at: usize) -> Self {
        let mut before = Self::default();
        for i in 0..at {
            before.pass(explorer, state, thread, i);
        }
        before
    }

    /// It will be executed whatever comes.
    pub fn is_certain(&self) -> bool {
        self.translated && self.decided
    }

    /// Returns whether an instruction that serialises, or interrupts others, may be done: on x86
    /// when stores have left the buffer (IRET and CPUID: SDM vol. 3A, 9.3).
    pub fn is_serial(&self, x86: bool) -> bool {
        match x86 {
            true => self.all_done && self.all_drained,
            false => self.is_certain() && self.system_done,
        }
    }

    pub fn address_known(
        &self,
        explorer: &Explorer<'_>,
        state: &State,
        thread: usize,
        op: &Op,
    ) -> bool {
        let known = |register: usize| explorer.is_known(state, thread, register);
        op.address().iter().all(|value| value.is_available(&known))
    }

    /// One more instruction comes before.
    pub fn pass(&mut self, explorer: &Explorer<'_>, state: &State, thread: usize, at: usize) {
        if explorer.is_on_path(state, thread, at) == Some(false) {
            return;
        }
        let op = &explorer.test.code[thread].code[at].op;
        let phase = &state.phases[thread][at];
        let done = matches!(phase, Phase::Done(_));
        let x86 = explorer.test.x86;
        match op {
            Op::Load { .. } | Op::Store { .. } | Op::Atomic { .. } => {
                let buffered = done || matches!(phase, Phase::Buffered(_));
                let read = done;
                let late = is_late(state, thread, at);
                self.has_late_store |= late;
                let done = done && !late;
                let physical = matches!(op.place(), Some(Place::Physical(_)));
                self.translated &= buffered
                    || matches!(phase, Phase::Translated(..))
                    || (physical && self.address_known(explorer, state, thread, op));
                self.all_done &= buffered;
                self.all_drained &= done;
                // An atomic access that returns nothing is no load to barriers for loads (DDI 0487
                // B2.3.7).
                if op.register().is_some() {
                    self.loads_done &= read;
                }
                if op.writes() {
                    self.stores_buffered &= buffered;
                    self.stores_drained &= done;
                }
                match op {
                    Op::Load { acquire: true, .. } | Op::Atomic { acquire: true, .. } => {
                        self.barred |= !read
                    }
                    _ => {}
                }
                match op {
                    Op::Store { release: true, .. } | Op::Atomic { release: true, .. } => {
                        self.releases_drained &= done;
                    }
                    _ => {}
                }
            }
            Op::Fence(Kind::All) => self.barred |= !(self.all_done && self.all_drained),
            Op::Fence(Kind::Loads) => self.barred |= !self.loads_done,
            Op::Fence(Kind::Stores) => {
                self.stores_barred |= !done || self.has_late_store;
                self.fenced_drained &= self.stores_drained;
                self.all_done &= done;
            }
            Op::Branch(register) => {
                self.decided &= explorer.is_known(state, thread, *register);
            }
            Op::Barrier { kind, .. } => {
                self.published &= done;
                self.loads_published &= self.loads_done || *kind == Kind::Stores;
                self.barred |= !done;
                self.system_done &= done;
                self.all_done &= done;
            }
            // Entry and return are context synchronisation events (DDI 0487 D1.3, without
            // FEAT_ExS).
            Op::Synchronise | Op::Exception { .. } | Op::InvalidateNow(_) => {
                self.synchronised &= done;
                self.barred |= !done;
                self.system_done &= done;
                self.all_done &= done;
            }
            Op::Invalidate { .. } | Op::Shootdown(_) => {
                self.system_done &= done;
                self.all_done &= done;
                self.barred |= x86 && !done;
            }
            Op::Switch(_) => {
                self.system_done &= done;
                self.all_done &= done;
                if x86 {
                    self.synchronised &= done;
                    self.barred |= !done;
                }
            }
        }
    }
}
