//! Flushes of the hypervisor's own, between marks by which an emulator's plugin (`xtask/plugin`)
//! tells what each executes, and in what order. No guest runs.

use core::arch::asm;

use tablewright::guest::{Access, Fault};
use tablewright::{Ipa, Span};
use tablewright_hypervisor_common::host::Host as _;
use tablewright_hypervisor_common::memory::take_away;

use crate::machine::Machine;
use crate::stage2::PAGE;
use crate::world::{self, Vm};

const BLOCK: u64 = Machine::BLOCK;

/// Marks the instructions since the last mark as those of this one.
fn mark<const NUMBER: u16>() {
    // SAFETY: writes the zero register.
    unsafe { asm!("movz xzr, #{}", const NUMBER, options(nostack, preserves_flags)) }
}

/// Maps the first 4 MiB of a guest with pages, as its faults would, and takes away, each between
/// two marks: a page; three pages in a row; and 2 MiB, with the table in which they are.
pub fn flushes(vm: &'static Vm) -> Result<(), &'static str> {
    let memory = vm.slots[0].ok_or("the guest has no memory")?;
    let first = memory.guest.start().get();
    for page in 0..2 * BLOCK / PAGE {
        world::fault(&Fault::new(Ipa::new(first + page * PAGE), Access::Write));
    }
    let mut gather = vm.guest.gather();
    let mut take = |at: u64, size: u64| {
        let span =
            Span::new(Ipa::new(first + at), size).map_err(|_| "the guest's memory is too small")?;
        take_away(vm.guest.zap(span), &mut gather, |_| ());
        Ok(())
    };
    mark::<1>();
    take(0, PAGE)?;
    mark::<2>();
    take(16 * PAGE, 3 * PAGE)?;
    mark::<3>();
    take(BLOCK, BLOCK)?;
    mark::<4>();
    Ok(())
}
