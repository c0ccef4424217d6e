//! Flushes of what processors remember of vCPUs, by the engine's [shootdown](tablewright::shootdown).
//!
//! A vCPU is a space of the engine's, and its identifier (ASID) that of the space. A processor has the space loaded while it is in
//! the guest, and at no other time. So a flush of a vCPU's translations is a flush of that space: the processor that is in the
//! guest is told, and waited for; any other looks at the space's generation when it enters the vCPU next, and forgets. A vCPU
//! that waits in a queue costs a flush nothing.
//!
//! # Several at once
//! What is flushed of one vCPU is often flushed of others. All processors that run one of them are interrupted first, so that they
//! leave their guests at the same time; then each vCPU is flushed by itself. One that has left keeps its space loaded, and
//! receives, until no flush [holds](Vcpu::held) it: it is told what to forget without another interrupt.
//!
//! | a processor that flushes | a processor that was interrupted |
//! |---|---|
//! | holds the vCPUs | leaves its guest |
//! | interrupts those that run them | as long as the vCPU is held: receives |
//! | flushes each: a message, and its answer | then unloads the space |
//! | lets the vCPUs go | |
//!
//! A processor that was interrupted needs no second interrupt for a message, whatever it does meanwhile: the vCPUs were held
//! before it was interrupted. If it takes the interrupt as it leaves its guest, it sees that, and waits; if the interrupt comes
//! later, the next guest that it enters is left at once.
//!
//! Two that flush at once do not wait for each other in a circle: each receives wherever it waits.

use core::sync::atomic::{Ordering, fence};

use tablewright::shootdown::{Actions, Allocator, Cpus, Forget, Here, Message, Messenger};
use tablewright::{Invalidation, Pa, What};

use crate::counters::Count;
use crate::machine::{PAGE, count};
use crate::vcpu::Vcpu;
use crate::{Plant, Processor, World, processor};

/// A root for a space that has no tables of the engine's: those are the guest's own.
pub const NO_ROOT: Pa = Pa::new(0);

/// More pages than these are forgotten with all the rest.
const PAGES: u64 = 64;

/// What this processor does for flushes.
pub struct Doing<'w> {
    world: &'w World,
    me: &'w Processor,
    /// Whether it is about to enter a guest, and makes up for what it has missed.
    entering: bool,
    /// Processors that were interrupted already, and receive.
    kicked: Cpus,
}

impl<'w> Doing<'w> {
    /// When it is told to forget.
    pub fn told(world: &'w World, me: &'w Processor) -> Self {
        Self {
            world,
            me,
            entering: false,
            kicked: Cpus::EMPTY,
        }
    }

    /// When it enters a guest.
    pub fn entering(world: &'w World, me: &'w Processor) -> Self {
        Self {
            entering: true,
            ..Self::told(world, me)
        }
    }
}

// SAFETY: what stands under an identifier is forgotten before the next guest is entered, which alone would use it (1.); a processor
// that is told leaves its guest, and receives before it enters again (2.); the allocator is behind a lock (3.).
unsafe impl Actions for Doing<'_> {
    fn forget(&self, what: Forget) {
        if self.entering {
            count(Count::Entered, 1);
        }
        match what {
            Forget::Everything | Forget::All => self.me.stale.add(None),
            Forget::Space(id) => self.me.stale.add(Some(id)),
            Forget::Range { id, range, .. } => {
                let pages = (range.last - range.first) / PAGE + 1;
                if pages > PAGES {
                    return self.me.stale.add(Some(id));
                }
                for at in (0..pages).map(|page| range.first + page * PAGE) {
                    // SAFETY: what is forgotten is found again (APM vol. 3, INVLPGA).
                    unsafe {
                        core::arch::asm!(
                            "invlpga",
                            in("rax") at,
                            in("ecx") u32::from(id),
                            options(nostack, preserves_flags),
                        );
                    }
                }
            }
        }
    }

    fn interrupt(&self, cpus: &Cpus) {
        for cpu in cpus.iter().filter(|&cpu| !self.kicked.contains(cpu)) {
            count(Count::Told, 1);
            processor::kick(cpu);
        }
    }

    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>)) {
        with(&mut self.world.allocator.lock());
    }
}

/// A planted bug: processors that are in the guest are not told, though it is said that they were.
struct Silence;

impl Messenger for Silence {
    fn tell(&self, _: &Message<'_>, cpus: &mut Cpus) {
        cpus.clear();
    }
}

/// Has every processor forget what it remembers of these vCPUs. `own` is the one that this processor has loaded, if any. Returns
/// how many they were.
pub fn flush<'v>(
    world: &World,
    vcpus: impl Iterator<Item = &'v Vcpu> + Clone,
    own: Option<&Vcpu>,
    what: What<'_>,
) -> u64 {
    let number = processor::number();
    let (Some(here), Some(me)) = (world.shootdown.on(number), world.processors.get(number)) else {
        return 0;
    };
    let is_own = |vcpu: &Vcpu| own.is_some_and(|own| own.number == vcpu.number);
    let silence: &[&dyn Messenger] = match world.options.plant {
        Some(Plant::OnEntry) => &[&Silence],
        _ => &[],
    };
    let mut doing = Doing::told(world, me);
    let others = vcpus.clone().filter(|vcpu| !is_own(vcpu));
    if silence.is_empty() {
        for vcpu in others.clone() {
            vcpu.held.fetch_add(1, Ordering::Relaxed);
        }
        // A processor that is not seen in a guest, and enters it, is told when it is flushed.
        fence(Ordering::SeqCst);
        for vcpu in others.clone() {
            let home = world.processors.get(vcpu.home);
            if home.is_some_and(|home| home.runs(vcpu)) && doing.kicked.insert(vcpu.home) {
                count(Count::Told, 1);
                processor::kick(vcpu.home);
            }
        }
    }
    let mut named = 0;
    for vcpu in vcpus {
        named += 1;
        count(Count::Here, u64::from(is_own(vcpu)));
        let flush = Invalidation {
            root: vcpu.space.root(),
            id: 0,
            global: false,
            what,
        };
        here.flush(&vcpu.space, &flush, silence, &doing);
    }
    if silence.is_empty() {
        for vcpu in others {
            vcpu.held.fetch_sub(1, Ordering::Release);
        }
    }
    named
}

/// Has every processor forget what was made of the nested tables.
pub fn nested(world: &World) {
    flush(world, world.vcpus.iter(), None, What::Everything);
}

/// Does what others ask of this processor, which has left the guest of this vCPU and still has its space loaded.
pub fn receive(here: Here<'_, '_>, vcpu: &Vcpu, doing: &Doing<'_>) {
    loop {
        here.receive(doing);
        if vcpu.held.load(Ordering::Acquire) == 0 {
            return;
        }
        core::hint::spin_loop();
    }
}
