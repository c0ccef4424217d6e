//! Flushes of the TLB entries of vCPUs, by the engine's
//! [shootdown](tablewright::shootdown).
//!
//! A vCPU is a space of the engine's, and its identifier (ASID) that of the space. A processor has
//! the space loaded while it is in the guest, and at no other time. So a flush of a vCPU's
//! translations is a flush of that space: the processor that is in the guest is told, and waited
//! for; any other looks at the space's generation when it enters the vCPU next, and forgets. A vCPU
//! that waits in a queue costs a flush nothing.
//!
//! # Several at once
//! What is flushed of one vCPU is often flushed of others. If one of them runs, its processor is
//! sent a message, and forgets what the message names. If several run, they are not waited for one
//! after the other: the generation of each is moved on, then all their processors are interrupted,
//! then it is waited until each has left its guest. A processor that enters the vCPU again sees the
//! generation, and forgets all of it.
//!
//! | a processor that flushes | a processor in a guest |
//! |---|---|
//! | moves generations on | counts its [passage](crate::world::Processor::passages): odd |
//! | full fence | full fence |
//! | reads which processors have the spaces loaded | enters the set; reads the generation; enters |
//! | reads the passage of each; interrupts it if odd, and waits | leaves; its passage is even |
//!
//! A processor that is not in the set reads the new generation when it comes there. One that is,
//! and whose passage is even, is out of the guest, and loads the space anew before it enters again.
//! So two that flush at once do not wait for each other: both have left.

use core::cell::RefCell;
use core::sync::atomic::Ordering;

use tablewright::shootdown::{Actions, Allocator, Cpus, LocalFlush, Messenger, PerCpu};
use tablewright::{Invalidation, Pa, What};

use crate::count::count;
use crate::counters::Count;
use crate::machine::PAGE;
use crate::options::Plant;
use crate::processor;
use crate::vcpu::Vcpu;
use crate::world::{Processor, World, world};

/// A root for a space that has no tables of the engine's: those are the guest's own.
pub const NO_ROOT: Pa = Pa::new(0);

/// More pages than these are forgotten with all the rest.
const PAGES: u64 = 64;

/// The actions of this processor for flushes.
pub struct Doing<'w> {
    world: &'w World,
    me: &'w Processor,
    /// Whether it is about to enter a guest, and makes up for what it has missed.
    entering: bool,
}

impl<'w> Doing<'w> {
    /// When it is told to forget.
    pub fn told(world: &'w World, me: &'w Processor) -> Self {
        Self { world, me, entering: false }
    }

    /// When it enters a guest.
    pub fn entering(world: &'w World, me: &'w Processor) -> Self {
        Self { entering: true, ..Self::told(world, me) }
    }
}

// SAFETY: what stands under an identifier is forgotten before the next guest is entered, which
// alone would use it (1.); a processor that is told leaves its guest, and receives before it enters
// again (2.); the allocator is behind a lock (3.).
unsafe impl Actions for Doing<'_> {
    fn flush_local(&self, what: LocalFlush) {
        if self.entering {
            count(Count::Entered, 1);
        }
        match what {
            LocalFlush::Everything | LocalFlush::All => self.me.stale.add(None),
            LocalFlush::Space(id) => self.me.stale.add(Some(id)),
            LocalFlush::Range { id, range, .. } => {
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
        count(Count::Told, cpus.len().into());
        cpus.iter().for_each(processor::kick);
    }

    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>)) {
        with(&mut self.world.allocator.lock());
    }
}

/// A planted bug: processors that are in the guest are not told, though it is said that they were.
struct Silence;

// SAFETY: none: that is planted.
unsafe impl Messenger for Silence {
    fn tell(&self, _: &Invalidation<'_>, cpus: &mut Cpus) {
        cpus.clear();
    }
}

/// Keeps which processors are to be told. That is done, and waited for, when all spaces have been
/// flushed, before the flush of the guest is over.
struct Together(RefCell<Cpus>);

// SAFETY: `flush` does not return before these have left their guests, and each flushes before it
// enters one again (1., 2.).
unsafe impl Messenger for Together {
    fn tell(&self, _: &Invalidation<'_>, cpus: &mut Cpus) {
        let mut all = self.0.borrow_mut();
        for cpu in cpus.iter() {
            all.insert(cpu);
        }
        cpus.clear();
    }
}

/// Flushes the TLB entries of these vCPUs. `own` is the one that this processor has loaded, if any.
/// Returns how many vCPUs they were.
pub fn flush<'v>(
    world: &World,
    vcpus: impl Iterator<Item = &'v Vcpu> + Clone,
    own: Option<&Vcpu>,
    what: What<'_>,
) -> u64 {
    let number = processor::number();
    // SAFETY: this processor (1.), which takes interrupts in its guest alone (2.), and loads what
    // `schedule::enter` says (3.); there are no others (4.).
    let here = unsafe { world.shootdown.on(number) };
    let (Some(here), Some(me)) = (here, world.processors.get(number)) else {
        return 0;
    };
    let is_own = |vcpu: &&Vcpu| own.is_some_and(|own| own.number == vcpu.number);
    let runs = |vcpu: &&Vcpu| {
        let home = world.processors.get(vcpu.home);
        home.is_some_and(|home| home.runs(vcpu))
    };
    let others = vcpus.clone().filter(|vcpu| !is_own(vcpu));
    let together = Together(RefCell::new(Cpus::EMPTY));
    let messengers: &[&dyn Messenger] = match world.options.plant {
        Some(Plant::OnEntry) => &[&Silence],
        _ if others.filter(runs).nth(1).is_some() => &[&together],
        _ => &[],
    };
    let doing = Doing::told(world, me);
    let mut named = 0;
    for vcpu in vcpus {
        named += 1;
        count(Count::Here, u64::from(is_own(&vcpu)));
        let flush = Invalidation { root: vcpu.space.root(), id: 0, global: false, what };
        here.flush(&vcpu.space, &flush, messengers, &doing);
    }
    wait(world, here, &together.0.into_inner(), &doing);
    named
}

/// Has these processors leave their guests, and waits until they have.
fn wait(world: &World, here: PerCpu<'_, '_>, cpus: &Cpus, doing: &Doing<'_>) {
    let mut passages = [0; processor::MOST];
    let all = || world.processors.iter().enumerate();
    for (number, cpu) in all().filter(|(number, _)| cpus.contains(*number)) {
        // Acquire: what it has done in the guest.
        passages[number] = cpu.passages.load(Ordering::Acquire);
        if passages[number] % 2 != 0 {
            count(Count::Told, 1);
            processor::kick(number);
        }
    }
    for (number, cpu) in all().filter(|(number, _)| passages[*number] % 2 != 0) {
        while cpu.passages.load(Ordering::Acquire) == passages[number] {
            // Others may wait for us meanwhile.
            here.receive(doing);
            core::hint::spin_loop();
        }
    }
}

/// Flushes the nested translations of every vCPU.
pub fn nested() {
    let Some(world) = world() else { return };
    if world.options.plant == Some(Plant::Nested) {
        return;
    }
    flush(world, world.vcpus.iter(), None, What::Everything);
}
