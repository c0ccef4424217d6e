//! The memory and the vCPUs that each of several guests begins with.

use alloc::vec::Vec;
use core::ptr;
use core::sync::atomic::AtomicUsize;

use arm_sysregs::el0::accessors::{read_cntfrq_el0, read_cntpct_el0};
use tablewright::{Ipa, Pa, Span};
use tablewright_hypervisor_common::host::Reason;

use super::crowd::{self, Crowd, One};
use super::gic;
use super::vcpu::{State, Vcpu};
use crate::tree::Tree;

/// The guests that are asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Several {
    /// Guests that boot the kernel that was loaded.
    pub kernels: usize,
    /// Small ones.
    pub small: usize,
    /// MiB of each of the first.
    pub memory: u64,
    /// Bits of a VMID.
    pub bits: u32,
    /// The time that they go on, in seconds.
    pub seconds: u64,
}

impl Several {
    /// How many guests there are.
    pub fn count(&self) -> usize {
        self.kernels + self.small
    }

    fn size(&self, guest: usize) -> u64 {
        match guest < self.kernels {
            true => self.memory << 20,
            false => SMALL,
        }
    }
}

/// The memory of a small guest.
pub const SMALL: u64 = 8 << 20;
/// The most of its image.
const IMAGE: u64 = 2 << 20;
/// vCPUs of each guest.
const VCPUS: usize = 2;

/// Returns the memory of each guest, in order.
///
/// # Errors
/// It is too small.
pub fn areas(asked: &Several, all: Span<Ipa>) -> Result<Vec<Span<Pa>>, Reason> {
    let mut next = all.start().get();
    let mut areas = Vec::new();
    for guest in 0..asked.count() {
        let size = asked.size(guest);
        areas.push(Span::new(Pa::new(next), size).map_err(|_| "a guest has no memory")?);
        next += size;
    }
    match next + IMAGE - 1 > all.last().get() {
        true => Err("there is too little memory for all guests"),
        false => Ok(areas),
    }
}

/// Puts into the memory of each guest what it starts with, and makes their vCPUs: the first of each
/// waits for its turn.
///
/// # Errors
/// What is missing.
pub fn prepare(asked: &Several, tree: &Tree, areas: &[Span<Pa>]) -> Result<(), Reason> {
    let first = tree.kernel.start;
    let image = areas.last().ok_or("there are no guests")?.last().get() + 1;
    let vcpus = VCPUS.min(tree.cpus.len());
    let mut all = Vec::new();
    // What is copied from the first guest: all that was loaded into it. It is written last, so that
    // no other has its device tree.
    let loaded = match &tree.initrd {
        Some(initrd) => tree.kernel.end.max(initrd.end),
        None => tree.kernel.end,
    };
    for (guest, area) in areas.iter().enumerate() {
        let at = area.start().get();
        let arguments = if guest < asked.kernels {
            if guest != 0 {
                copy(first, at, loaded - first);
            }
            let memory = Span::new(Ipa::new(first), area.size()).map_err(|_| "no memory")?;
            let (blob, tree) = tree.for_one_of(memory, vcpus, guest)?;
            // SAFETY: memory of this guest's, behind everything that was loaded; mapped one to one.
            unsafe {
                let to = at + (tree.get() - first);
                ptr::copy_nonoverlapping(
                    blob.as_ptr(),
                    ptr::with_exposed_provenance_mut(to as usize),
                    blob.len(),
                );
            }
            [tree.get(), 0]
        } else {
            copy(image, at, IMAGE);
            [0, guest as u64]
        };
        for number in 0..vcpus {
            let vcpu = Vcpu::new(guest, number);
            if number == 0 {
                // SAFETY: there is no other reference yet (1.).
                unsafe { vcpu.context() }.start(first, arguments);
                vcpu.set(State::Ready);
            }
            all.push(vcpu);
        }
    }
    crowd::begin(Crowd {
        guests: areas.iter().map(|_| One::new()).collect(),
        vcpus: all,
        redistributors: tree.redistributors.start,
        distributor: tree.distributor,
        live: AtomicUsize::new(areas.len()),
        next: AtomicUsize::new(0),
        end: read_cntpct_el0().bits() + asked.seconds * read_cntfrq_el0().bits(),
    });
    gic::set_up(tree.distributor);
    Ok(())
}

/// Copies memory that no guest uses yet.
fn copy(from: u64, to: u64, size: u64) {
    // SAFETY: both are memory of guests that do not run, mapped one to one, and apart.
    unsafe {
        ptr::copy_nonoverlapping(
            ptr::with_exposed_provenance::<u64>(from as usize),
            ptr::with_exposed_provenance_mut(to as usize),
            (size / 8) as usize,
        );
    }
}
