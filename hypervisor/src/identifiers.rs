//! VMIDs of several guests: few, given again and again by the engine's [`Identifiers`], and how a
//! guest is flushed that is not loaded.
//!
//! # Which guest has which
//!
//! Each guest has an [`Identity`]. A processor asks for the guest's identifier each time it loads
//! it, and is told to forget everything first where a new generation has begun. A guest that comes
//! back has the identifier that it had, or, if that is another's by now, a new one: nothing of it
//! is found under that.
//!
//! # A flush of a guest that is not loaded
//!
//! A TLBI of stage 2 goes by the VMID in `VTTBR_EL2`, so that is what has to be there: the
//! identifier of the guest that is flushed. Its root must not be. A walk that the processor makes
//! ahead of anything would fill the TLB under an identifier that may be another guest's by now, or
//! will be: the engine has told the processor to load something else, and no processor is told to
//! forget what that walk finds. So the identifier is loaded with a root that is **empty**. Nothing
//! is found in it, and what is not found is not remembered (DDI 0487 D8.16, R_XCLRD). It is that
//! same root under 0, which no guest has, that a processor has while it goes from one guest to the
//! next, and while it has none.
//!
//! The identifier was read after the change was published. If the guest has got another meanwhile,
//! a processor that has loaded it under that walks what is there now; and if another guest has got
//! this one, it forgets more than it has to.

use core::arch::asm;
use core::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use arm_sysregs::el2::accessors::{read_vttbr_el2, write_vttbr_el2};
use arm_sysregs::el2::registers::VttbrEl2;
use spin::once::Once;
use tablewright::arch::arm64::{Cpu, Ids, load_vttbr_el2, ttbr};
use tablewright::shootdown::{Allocator, Holder, Identifiers, Identity};
use tablewright::{Format as _, Invalidation, Pa, Platform};

use crate::count::{Mutex, count, raise};
use crate::counters::Count;
use crate::cpu;
use crate::plant::{Plant, is_planted};
use crate::stage2::{PAGE, Stage2, VMID};

/// The most guests.
pub const GUESTS: usize = 24;

/// `VTCR_EL2.VS` is clear.
pub const BITS: u32 = 8;

/// Tables that a root is made of.
const TABLES: usize = {
    let levels = Stage2::LEVELS as u32 * Stage2::INDEX_BITS + Stage2::PAGE_SHIFT;
    1 << Stage2::INPUT_BITS.saturating_sub(levels)
};

static IDENTITIES: [Identity; GUESTS] = [const { Identity::new() }; GUESTS];
/// The root of each guest; 0 if there is none.
static ROOTS: [AtomicU64; GUESTS] = [const { AtomicU64::new(0) }; GUESTS];
/// The identifier that each guest was loaded under last: for a planted bug.
static LAST: [AtomicU16; GUESTS] = [const { AtomicU16::new(0) }; GUESTS];

struct Vmids {
    identifiers: Identifiers<'static>,
    allocator: Mutex<Allocator<'static>>,
    /// The root in which nothing is.
    empty: Pa,
    cpu: Cpu,
}

static VMIDS: Once<Vmids> = Once::new();

/// Gives several guests identifiers of `bits` bits, on so many processors.
///
/// # Errors
/// There are too few, or there is no memory.
pub fn set_up(platform: &impl Platform, bits: u32, cpus: usize) -> Result<(), &'static str> {
    static WORDS: Mutex<Option<[u64; Allocator::words(BITS)]>> =
        spin::mutex::SpinMutex::new(Some([0; Allocator::words(BITS)]));
    let words = WORDS.lock().take().ok_or("identifiers are set up twice")?;
    let words = alloc::boxed::Box::leak(alloc::boxed::Box::new(words));
    if !(1..=BITS).contains(&bits) {
        return Err("VMIDs have 1 to 8 bits");
    }
    let allocator = Allocator::new(bits, words).ok_or("no memory for identifiers")?;
    let holders: alloc::vec::Vec<Holder> = (0..cpus).map(|_| Holder::new()).collect();
    let holders = alloc::vec::Vec::leak(holders);
    let identifiers =
        Identifiers::new(&allocator, holders).ok_or("too few VMIDs for the processors")?;
    let empty = platform
        .alloc_root(Stage2::root_level(), TABLES)
        .ok_or("no memory for a root that is empty")?;
    for table in 0..TABLES as u64 {
        // SAFETY: frames that were just taken, mapped one to one.
        unsafe {
            core::ptr::with_exposed_provenance_mut::<u64>((empty.get() + table * PAGE) as usize)
                .write_bytes(0, (PAGE / 8) as usize);
        }
    }
    // Walkers see that nothing is there.
    platform.barrier(tablewright::Barrier::Publish);
    VMIDS.call_once(|| Vmids {
        identifiers,
        allocator: spin::mutex::SpinMutex::new(allocator),
        empty,
        cpu: Cpu::of::<Stage2>(&Ids::read()),
    });
    Ok(())
}

/// Gives a guest its root, which is made live next.
pub fn give(guest: usize, root: Pa) {
    ROOTS[guest].store(root.get(), Ordering::Release);
}

/// The identity of the guest with this root, if it is one of several.
pub fn of(root: Pa) -> Option<&'static Identity> {
    let mut all = ROOTS.iter().zip(&IDENTITIES);
    let found = all.find(|(of, _)| of.load(Ordering::Relaxed) == root.get());
    found.map(|(_, identity)| identity)
}

/// # Safety
/// 1. As for [`load_vttbr_el2`].
unsafe fn load(vttbr: u64) {
    if is_planted(Plant::NoIsb) {
        // SAFETY: passed on (1.).
        return unsafe { write_vttbr_el2(VttbrEl2::from_bits_retain(vttbr)) };
    }
    // SAFETY: passed on (1.).
    unsafe { load_vttbr_el2(vttbr) };
}

/// This processor has no guest from here on: nothing is found, and nothing remembered.
pub fn park() {
    if let Some(vmids) = VMIDS.get() {
        // SAFETY: a root in which nothing is translates nothing; and identifier 0 is no guest's.
        unsafe { load(vmids.empty.get()) };
    }
}

/// Loads a guest: its root, under its identifier. The processor is [parked](park).
pub fn enter(guest: usize) {
    let (Some(vmids), Some(identity)) = (VMIDS.get(), IDENTITIES.get(guest)) else {
        return;
    };
    let forget = || {
        count(Count::Forgotten, 1);
        if !is_planted(Plant::NotForgotten) {
            vmids.cpu.forget_all();
        }
    };
    // SAFETY: this processor, at EL2 without interrupts (1.), and the one allocator, behind its
    // lock (2.); `forget_all` waits (3.). The guest is loaded below, and without one the processor
    // is parked on a root in which nothing is (4.).
    let switch = unsafe {
        vmids.identifiers.switch(
            cpu::number(),
            identity,
            |with| {
                with(&mut vmids.allocator.lock());
            },
            forget,
        )
    };
    let Some((root, mut id)) = switch else {
        panic!("a guest has no identity");
    };
    raise(Count::RollOvers, vmids.identifiers.generation() - 1);
    let last = LAST[guest].swap(id, Ordering::Relaxed);
    if is_planted(Plant::OldIdentifier) && last != 0 {
        id = last;
    }
    // SAFETY: the guest's tables map what is the guest's (1.), and it is what this processor was
    // told to load (2.).
    unsafe { load(ttbr::<Stage2>(root, id, false)) };
}

/// Executes the instructions of a flush with the identifier loaded that they are about.
pub fn under(flush: &Invalidation<'_>, instructions: impl FnOnce()) {
    let (Some(vmids), Some(_)) = (VMIDS.get(), of(flush.root)) else {
        return instructions();
    };
    let loaded = read_vttbr_el2().bits();
    let wanted = ttbr::<Stage2>(flush.root, flush.id, false);
    if loaded == wanted || is_planted(Plant::WrongVmid) {
        return instructions();
    }
    count(Count::Lent, 1);
    let root = match is_planted(Plant::RootOfFlush) {
        true => flush.root,
        false => vmids.empty,
    };
    // SAFETY: a root in which nothing is translates nothing, under whatever identifier.
    unsafe { load(ttbr::<Stage2>(root, flush.id, false)) };
    instructions();
    // SAFETY: what this processor has been told to load last. An invalidation takes its VMID when
    // it is executed.
    unsafe {
        asm!("isb", options(nostack, preserves_flags));
        load(loaded);
    }
}

/// Whether this processor's TLB entries of the guest with this root are under the guest's VMID, by
/// which they are invalidated.
pub fn has_vmid(root: Pa) -> bool {
    let loaded = read_vttbr_el2().bits();
    match of(root) {
        Some(identity) => loaded == ttbr::<Stage2>(root, identity.id(), false),
        None => loaded >> 48 == u64::from(VMID),
    }
}
