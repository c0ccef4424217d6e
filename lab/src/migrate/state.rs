//! A migration under way.

use std::cell::{Cell, RefCell};

use tablewright::dirty::{Bitmap, Ring};
use tablewright::guest::{Gather, Guest, Slot};
use tablewright::shared::DeferredReclaim;
use tablewright::{Format, Ipa};
use tablewright_machine::{Machine, MachineLock, Mapper, Time};

use super::image::Image;
use super::job::{Job, Ran};

/// The host's counts for a vCPU.
#[derive(Default)]
pub struct Vcpu {
    /// Cost of interrupts that it has not yet paid.
    pub owed: Cell<Time>,
    /// How long it was kept from what it wanted to do.
    pub lost: Cell<Time>,
    pub longest: Cell<Time>,
    pub total: Cell<Time>,
    pub faults: Cell<u64>,
}

pub struct Migration<'t, 'm, F: Format<Input = Ipa>> {
    pub job: &'t Job,
    pub machine: &'m Machine,
    pub mapper: Mapper<'m>,
    pub guest: &'t Guest<'t, F, Mapper<'m>>,
    /// The slot without a log.
    pub slot: Slot,
    pub bitmap: Bitmap<'t>,
    pub rings: Vec<Ring<'t>>,
    /// Rings are harvested by one at a time.
    pub reaping: MachineLock<'m>,
    /// The one of [`Job::one_lock`].
    pub lock: MachineLock<'m>,
    /// Pages that were found in rings, and are protected.
    pub reaped: RefCell<Vec<u64>>,
    pub image: Image,
    pub vcpus: Box<[Vcpu]>,
    /// Of each vCPU, and of the host.
    pub gathers: Box<[RefCell<Gather<'t, 't, F, Mapper<'m>>>]>,
    /// Detached tables that may still be walked.
    pub later: RefCell<Vec<DeferredReclaim<F, Mapper<'m>>>>,
    pub started: Cell<Option<Time>>,
    pub stop: Cell<bool>,
    pub stopped: Cell<usize>,
    /// Percent.
    pub throttle: Cell<u64>,
    pub full: Cell<u64>,
    pub kicks: Cell<u64>,
    pub ran: RefCell<Ran>,
    pub problem: RefCell<Option<String>>,
}
