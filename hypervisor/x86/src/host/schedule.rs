//! Each processor has vCPUs of its own, and runs them in turn: one after the other as long as they
//! have something to do, a time slice each. An interrupt that comes for one that does not run waits
//! for its turn, as on a host that is over-committed.
//!
//! # No event is missed
//! Another processor posts an event, then looks at what this one is doing; this one says that it is
//! about to enter a guest, or to sleep, then looks for events. With a full fence between, one of
//! them at least sees the other. If it is the other, this processor is interrupted; and an
//! interrupt that comes too early has the guest leave, or the sleep end, at once.

use core::sync::atomic::{Ordering, fence};

use tablewright::shootdown::PerCpu;

use crate::clock::{self, Clock};
use crate::context::{Context, State};
use crate::count::count;
use crate::counters::Count;
use crate::flush::Doing;
use crate::machine::Machine;
use crate::vmcb::{self, exit};
use crate::world::{Mode, Processor, World};
use crate::{exits, hyperv, processor};

/// The timer of this processor, and when it was set to.
struct Timer(Option<u64>);

impl Timer {
    fn set(&mut self, due: Option<u64>) {
        // One that was set may have run down, a little early, and its interrupt been taken as a
        // guest was left: it is set anew.
        if due.is_none() && self.0.is_none() {
            return;
        }
        self.0 = due;
        let cycles = due.map(|due| due.saturating_sub(processor::now()));
        processor::set_timer(cycles.map_or(0, |cycles| Clock::get().ticks(cycles)));
    }
}

/// Looks for events: timers that are due, orders, interrupts for those that wait for
/// one.
fn look(contexts: &mut [Context]) {
    let now = clock::guest_now();
    for context in contexts {
        context.obey();
        context.apic.tick(context.vcpu, now);
        if context.state == State::Halted && context.is_wanted() {
            context.state = State::Runnable;
        }
    }
}

/// Returns when there is something to do again, by this processor's counter.
fn earliest(contexts: &[Context], slice: Option<u64>) -> Option<u64> {
    let timers = contexts.iter().filter_map(|context| context.apic.due());
    let behind = clock::behind();
    let timers = timers.map(|due| due.saturating_add(behind));
    timers.chain(slice).min()
}

/// Runs the vCPUs of this processor for ever.
pub fn run(world: &'static World, contexts: &mut [Context]) -> ! {
    let number = processor::number();
    // SAFETY: as in `flush` (1. to 4.).
    let here = unsafe { world.shootdown.on(number) };
    let (Some(me), Some(here)) = (world.processors.get(number), here) else {
        panic!("processor {number} is not known");
    };
    let mut timer = Timer(None);
    let (mut turn, mut slice, mut loaded) = (0, 0, None);
    let runs = |context: &Context| context.state == State::Runnable;
    loop {
        look(contexts);
        let count_of = contexts.len();
        // The one whose turn it is, if its slice is not over; then the others, in order; then
        // itself.
        let is_over = processor::now() >= slice;
        let mut order = (0..=count_of).map(|step| (turn + step) % count_of.max(1));
        let next = order
            .find(|&index| (index != turn || !is_over) && contexts.get(index).is_some_and(runs));
        let next = next.or_else(|| Some(turn).filter(|&turn| contexts.get(turn).is_some_and(runs)));
        let Some(next) = next else {
            me.set(Mode::Sleeping);
            fence(Ordering::SeqCst);
            look(contexts);
            if !contexts.iter().any(runs) {
                timer.set(earliest(contexts, None));
                processor::sleep();
                timer.0 = None;
            }
            me.set(Mode::Host);
            continue;
        };
        if next != turn || is_over {
            count(Count::Slices, u64::from(next != turn && is_over));
            (turn, slice) = (next, processor::now() + world.slice);
        }
        if loaded != Some(turn) {
            if let Some(before) = loaded {
                contexts[before].store();
            }
            contexts[turn].load();
            loaded = Some(turn);
        }
        // What has happened while it waited there is looked for below.
        world.vm.gate.enter::<Machine>(number);
        me.run(contexts[turn].vcpu);
        fence(Ordering::SeqCst);
        look(contexts);
        let others = contexts.iter().filter(|context| runs(context)).count() > 1;
        if runs(&contexts[turn]) {
            let due = earliest(contexts, others.then_some(slice));
            timer.set(due);
            if enter(world, me, here, &mut contexts[turn]) {
                timer.0 = None;
            }
            me.set(Mode::Host);
            exits::handle(world, &mut contexts[turn]);
        } else {
            me.set(Mode::Host);
        }
        world.vm.gate.leave(number);
    }
}

/// Enters a guest, until it leaves. Whether that was for an interrupt of the host's.
fn enter(world: &World, me: &Processor, here: PerCpu<'_, '_>, context: &mut Context) -> bool {
    context.prepare();
    context.block.counter_offset = clock::behind().wrapping_neg();
    let space = &context.vcpu.space;
    me.passages.fetch_add(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    let loaded = here.switch(None, Some(space), &Doing::entering(world, me), |id| {
        context.block.asid = id.into();
        context.block.tlb_control = me.stale.take(id, world.by_identifier);
    });
    loaded.expect("a word for each processor");
    context.trail.enter(context.block);
    // SAFETY: the nested tables map what is the guest's.
    unsafe { vmcb::enter(context.block_at(), &mut context.registers) };
    // Release: what it has done in the guest. From here on it uses nothing that it remembers before
    // it loads the space again.
    me.passages.fetch_add(1, Ordering::Release);
    let doing = Doing::told(world, me);
    here.receive(&doing);
    context.trail.leave(context.block);
    context.left();
    let code = context.block.exit_code;
    if code == exit::CALL {
        // With its space loaded: what it asks for itself is done here and now.
        hyperv::call(world, context);
    }
    let left = here.switch(Some(&context.vcpu.space), None, &doing, |_| ());
    left.expect("no space");
    code == exit::INTERRUPT
}
