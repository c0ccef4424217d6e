//! Whether the processor and a walker that shares no code with the engine say the same of a
//! process.

use alloc::format;
use core::arch::asm;

use tablewright::Pa;
use tablewright_processes::{HEAP, PAGE, PAGES, TEXT};
use tablewright_walker::{Granule, Regime, translate};

use crate::frames;
use crate::running::{Done, with};

/// Returns the processor's translation of an address of the program's, for a read and for a write.
fn asked(at: u64) -> (Option<u64>, Option<u64>) {
    let (read, write): (u64, u64);
    // SAFETY: asks, and writes a register that has no other user.
    unsafe {
        asm!(
            "at s1e0r, {at}", "isb", "mrs {read}, par_el1",
            "at s1e0w, {at}", "isb", "mrs {write}, par_el1",
            at = in(reg) at, read = out(reg) read, write = out(reg) write, options(nostack)
        );
    }
    let of = |result: u64| (result & 1 == 0).then_some(result & 0xffff_ffff_f000 | at & 0xfff);
    (of(read), of(write))
}

/// Whether the processor, which has the process loaded, and the walker say the same of each page of
/// the heap, of those beside it and of the program; and whether so many pages of the heap may be
/// written.
pub fn check(number: usize, writable: u64) -> Done {
    let root = with(number, |process| process.space().root())?;
    let regime = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
    let mut read = |table: u64, index: usize| {
        // SAFETY: a table of the process, or whatever memory the walker is led to.
        unsafe { frames::pointer::<u64>(Pa::new(table)).add(index).read_volatile() }
    };
    let heap = (0..PAGES).map(|page| HEAP + page * PAGE);
    let others = [TEXT, TEXT + PAGE, HEAP - PAGE, HEAP + PAGES * PAGE, 0];
    let mut found = 0;
    for at in heap.chain(others).map(|page| page + 8) {
        let leaf = translate(regime, root.get(), at, &mut read).ok();
        let where_if = |may: bool| leaf.filter(|_| may).map(|leaf| leaf.physical(at));
        let user = leaf.map(|leaf| leaf.access.user);
        let expected = (
            where_if(user.is_some_and(|user| user.read)),
            where_if(user.is_some_and(|user| user.write)),
        );
        let got = asked(at);
        if got != expected {
            return Err(format!(
                "{at:#x} of process {number}: the processor says {got:x?}, the walker {expected:x?}"
            ));
        }
        found += u64::from(got.1.is_some());
    }
    match found == writable {
        true => Ok(()),
        false => Err(format!("process {number} may write {found} pages, and should {writable}")),
    }
}
