//! Several guests at once, each with vCPUs of its own: more of them than there are processors, and,
//! if that is asked for, more than there are VMIDs.
//!
//! Each guest sees memory of its own at the same addresses as the others, behind which are other
//! frames; what is not memory is [emulated](devices). First come those that boot the kernel that
//! was loaded, then small ones (`src/bin/small`).
//!
//! | | |
//! |---|---|
//! | [`schedule`] | turns |
//! | [`vcpu`] | what is kept of a vCPU that does not run |
//! | [`gic`] | interrupts |
//! | [`devices`] | what a guest finds where no memory is; its firmware |
//! | [`identifiers`](crate::identifiers) | VMIDs |
//!
//! A guest that is not loaded is edited like any other: a processor that goes from one guest to the
//! next takes frames away from guests in turn, and one that has no guest at all logs what they
//! write.

pub mod devices;
pub mod gic;
pub mod schedule;
pub mod vcpu;

use alloc::vec;
use alloc::vec::Vec;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use arm_sysregs::el0::accessors::{read_cntfrq_el0, read_cntpct_el0};
use spin::once::Once;
use tablewright::{Ipa, Pa, Span};

use crate::counters::Count;
use crate::machine::{Mutex, count};
use crate::report::{Report, report};
use crate::tree::{Reason, Tree};
use crate::vm::PAGE;
use crate::world;
use gic::Distributor;
use vcpu::{State, Vcpu};

/// What is asked for.
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
    /// So long they go on, in seconds.
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

/// One guest, beside its memory.
pub struct One {
    distributor: Distributor,
    line: Mutex<devices::Line>,
    over: AtomicBool,
}

/// All of them.
pub struct Crowd {
    /// Each.
    pub guests: Vec<One>,
    /// Their vCPUs, guest by guest.
    pub vcpus: Vec<Vcpu>,
    /// Where the redistributors are, of the machine and for each guest.
    pub redistributors: u64,
    /// Where the distributor is.
    pub distributor: u64,
    /// So many are not over.
    live: AtomicUsize,
    /// The next of which frames are taken away.
    next: AtomicUsize,
    /// When their time is over.
    end: u64,
}

static CROWD: Once<Crowd> = Once::new();

/// Whether there are several guests.
pub fn are_several() -> bool {
    CROWD.is_completed()
}

/// All of them.
pub fn crowd() -> &'static Crowd {
    match CROWD.get() {
        Some(crowd) => crowd,
        None => panic!("there is one guest"),
    }
}

/// Where the memory of each guest is, in order.
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
    let one = || One {
        distributor: Distributor::new(),
        line: spin::mutex::SpinMutex::new(devices::Line::new()),
        over: AtomicBool::new(false),
    };
    CROWD.call_once(|| Crowd {
        guests: areas.iter().map(|_| one()).collect(),
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

impl Crowd {
    /// The vCPUs of a guest.
    pub fn of(&self, guest: usize) -> &[Vcpu] {
        let each = self.vcpus.len() / self.guests.len();
        &self.vcpus[guest * each..(guest + 1) * each]
    }

    /// Whether a guest has switched itself off.
    pub fn is_over(&self, guest: usize) -> bool {
        self.guests[guest].over.load(Ordering::Relaxed)
    }

    /// Whether the time of all is over.
    pub fn is_late(&self) -> bool {
        read_cntpct_el0().bits() >= self.end
    }

    /// What a processor does between two guests: frames are taken away from one of them.
    pub fn look_after(&self) {
        let vms = &world().vms;
        if self.live.load(Ordering::Relaxed) != 0 {
            let guest = self.next.fetch_add(1, Ordering::Relaxed) % vms.len();
            vms[guest].take_one_away();
        }
    }

    /// A guest switches itself off. With the last the machine is.
    pub fn end(&self, guest: usize) {
        if self.guests[guest].over.swap(true, Ordering::Relaxed) {
            return;
        }
        count(Count::Ended, 1);
        self.of(guest).iter().for_each(gic::nudge);
        if self.live.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.all_over();
        }
    }

    fn all_over(&self) {
        // Of others a vCPU may be about to leave, which has nothing to say.
        while self.vcpus.iter().any(|vcpu| {
            vcpu.state() == State::Running
                && vcpu.home.load(Ordering::Relaxed) != crate::cpu::number()
        }) {
            core::hint::spin_loop();
        }
        self.compare();
        report(Report::End, 1);
        let _ = smccc::psci::system_off::<smccc::Smc>();
    }

    /// Looks whether each frame is behind one page of one guest, and each page is mapped to its
    /// own.
    fn compare(&self) {
        let vms = &world().vms;
        let Some(last) = vms
            .iter()
            .map(|vm| vm.memory.frames().max().unwrap_or(0))
            .max()
        else {
            return;
        };
        let mut seen = vec![0_u64; (last / PAGE / 64 + 1) as usize];
        for vm in vms {
            for (number, frame) in (0..).zip(vm.memory.frames()) {
                let (word, bit) = ((frame / PAGE / 64) as usize, frame / PAGE % 64);
                let is_double = seen[word] >> bit & 1 != 0;
                seen[word] |= 1 << bit;
                let Some(at) = vm.memory.at(number) else {
                    break;
                };
                let mapped = vm.guest.space().query(at);
                let is_other = mapped.is_some_and(|leaf| {
                    let inside = at.get() - leaf.input().get();
                    leaf.frame().get() + inside != frame
                });
                count(Count::Strays, u64::from(is_double || is_other));
                count(Count::Own, 1);
            }
        }
    }
}
