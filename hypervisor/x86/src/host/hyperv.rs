//! The guest's hypercalls: the engine decodes them, and they are carried out here.

use tablewright::hyperv::{
    Call, Decoded, HostCaps, Input, Output, PAGE_WORDS, Pages, Status, decode,
};
use tablewright::{Level, Stale, What};

use tablewright_hypervisor_common::vm::Moving;

use crate::clock::Clock;
use crate::context::Context;
use crate::count::{count, count_most};
use crate::counters::Count;
use crate::machine::PAGE;
use crate::options::Plant;
use crate::world::World;
use crate::{flush, processor};

/// The number of ranges that are done in one exit; a longer list goes on in the next.
const RANGES: usize = tablewright::flush::MAX_RANGES;

/// Handles a hypercall. The processor has the vCPU's space loaded.
pub fn call(world: &World, context: &mut Context) {
    count(Count::Calls, 1);
    let block = &context.block;
    // In protected mode, by the kernel (TLFS, "Legal Hypercall Environments").
    if !world.partition.is_enabled() || block.privilege != 0 || block.cr0 & 1 == 0 {
        return context.undefined();
    }
    let input = Input::from_bits(context.registers.rcx);
    match answer(world, context, input) {
        Ok(None) => {
            context.block.rax = Output::new(Status::SUCCESS, input.reps()).bits();
            context.skip(3);
        }
        // The instruction is executed again, with another element to begin with.
        Ok(Some(next)) => {
            count(Count::Continued, 1);
            context.registers.rcx = input.with_start(next).bits();
        }
        Err(status) => {
            count(Count::Refused, 1);
            context.block.rax = Output::new(status, input.start()).bits();
            context.skip(3);
        }
    }
}

/// A flush. Returns where the list goes on, if it was too long.
fn answer(world: &World, context: &mut Context, input: Input) -> Result<Option<usize>, Status> {
    let host = HostCaps {
        processors: world.vcpus.last().map_or(0, |last| last.index + 1),
        xmm_input: true,
        extended_ranges: true,
        guest_physical: false,
    };
    let at = context.registers.rdx;
    let mut words = [0; PAGE_WORDS];
    let count_of = if input.is_fast() {
        // RDX, R8, then XMM0 to XMM5.
        (words[0], words[1]) = (at, context.registers.r8);
        words[2..14].copy_from_slice(&context.wide());
        14
    } else {
        let count_of = (PAGE - at % PAGE) as usize / 8;
        match world.vm.read(at & !7, &mut words[..count_of]) {
            Some(Ok(())) => {}
            // Where the page goes, this vCPU's processor has to forget it: the call is made again.
            Some(Err(Moving)) => return Ok(Some(input.start())),
            // A wrong code or place is said first.
            None => {
                decode(input, at, &words[..count_of], &host)?;
                return Err(Status::PARAMETER);
            }
        }
        count_of
    };
    let decoded = decode(input, at, &words[..count_of], &host)?;
    if input.start() == 0 {
        let kind = match decoded.call {
            Call::Space => Count::Space,
            Call::List => Count::List,
            Call::SpaceEx => Count::SpaceEx,
            _ => Count::ListEx,
        };
        count(kind, 1);
    }
    let from = processor::now();
    let next = carry_out(world, context, input, &decoded);
    let waited = Clock::get().ns(processor::now().wrapping_sub(from));
    count(Count::WaitTotal, waited);
    count_most(Count::WaitLongest, waited);
    Ok(next)
}

fn carry_out(world: &World, context: &Context, input: Input, decoded: &Decoded) -> Option<usize> {
    let mut ranges = [NOWHERE; RANGES];
    let mut used = 0;
    let mut dropped = 0;
    for (place, pages) in ranges.iter_mut().zip(decoded.ranges()) {
        count(Count::Ranges, 1);
        count(Count::Pages, pages.count);
        used += 1;
        let mut pages = pages;
        if world.options.plant == Some(Plant::Half) {
            dropped += pages.count / 2;
            pages.count -= pages.count / 2;
        }
        *place = stale(&pages);
    }
    count(Count::Missed, dropped);
    let what = match decoded.is_everything() {
        true => What::Everything,
        false => What::Ranges(&ranges[..used]),
    };
    if world.options.plant != Some(Plant::Ignore) {
        let is_target = |index: u32| decoded.targets.is_none_or(|set| set.contains(index as usize));
        let targets = world.vcpus.iter().filter(|vcpu| is_target(vcpu.index));
        let named = flush::flush(world, targets, Some(context.vcpu), what);
        // A list that goes on names the same.
        if input.start() == 0 {
            count(Count::Named, named);
        }
    }
    let done = input.start() + used;
    (!decoded.is_everything() && done < decoded.reps()).then_some(done)
}

const NOWHERE: Stale = Stale { first: 0, last: 0, level: None, tables: false };

/// Addresses that wrap name what is behind the last one; those that no processor could use have
/// nothing to be forgotten.
fn stale(pages: &Pages) -> Stale {
    let size = pages.count.saturating_mul(pages.size);
    let level = match pages.size {
        PAGE => Level::PAGE,
        0x20_0000 => Level::new(1),
        _ => Level::new(2),
    };
    Stale {
        first: pages.first,
        last: pages.first.saturating_add(size - 1),
        level: Some(level),
        tables: false,
    }
}
