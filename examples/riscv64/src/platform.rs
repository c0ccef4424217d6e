//! The platform that the engine asks for: tables, barriers and invalidations, on two harts.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use spin::mutex::{SpinMutex, SpinMutexGuard};
use spin::once::Once;
use tablewright::arch::riscv64::{Cpu, Features, Rfence, Sbi, execute};
use tablewright::shootdown::{
    Actions, Allocator, Batch, CpuCell, Cpus, LocalFlush, PerCpu, Shootdown, Space, inbox_words,
};
use tablewright::{Barrier, Caps, Entry, Invalidation, Level, Pa, Platform};

use crate::cpu;
use crate::memory::{CPUS, FRAMES, linear};

/// Features of both harts, their numbers, and what is under way between them.
pub static FEATURES: Once<Features> = Once::new();
pub static HARTS: Once<[u64; CPUS]> = Once::new();
static CELLS: SpinMutex<[CpuCell; CPUS]> = SpinMutex::new([const { CpuCell::new() }; CPUS]);
static INBOXES: SpinMutex<[AtomicU64; inbox_words(CPUS)]> =
    SpinMutex::new([const { AtomicU64::new(0) }; inbox_words(CPUS)]);
static SHOOTDOWN: Once<Shootdown<'static>> = Once::new();
/// The kernel's half and the spaces of two processes, as flushes see them, and which harts have
/// them loaded.
pub static SPACES: [Once<Space<'static>>; 3] = [const { Once::new() }; 3];
static LOADED: [SpinMutex<[AtomicU64; Space::words(CPUS)]>; 3] =
    [const { SpinMutex::new([const { AtomicU64::new(0) }; _]) }; 3];
/// Each hart's edits that it has not had forgotten.
static BATCHES: [SpinMutex<(Batch, Pa)>; CPUS] =
    [const { SpinMutex::new((Batch::new(), Pa::new(0))) }; CPUS];
/// How many fences were executed by either hart for itself.
pub static FENCES: AtomicU64 = AtomicU64::new(0);

fn processor() -> Cpu {
    Cpu::new(*FEATURES.get().expect("read first"))
}

#[derive(Clone, Copy)]
pub struct Tables;

// SAFETY: a frame is handed out once (1.) and reached through a map of all memory (2.); there are
// no links (3.); stores are ordered before what tells others (4.). What is to be forgotten is
// gathered, and sent to all that may remember it, which have executed it when a completion returns
// (5., 6.). There is one (7.), which does not unwind (8.), and spaces have no identifiers (9.).
unsafe impl Platform for Tables {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        lock(&FRAMES).take()
    }

    unsafe fn free_table(&self, frame: Pa, _: Level) {
        lock(&FRAMES).put(frame);
    }

    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        // SAFETY: all memory is above zero in the kernel's half.
        unsafe { NonNull::new_unchecked(linear(frame)) }
    }

    fn caps(&self) -> Caps {
        // A fault that finds its page mapped is forgiven (`demand`).
        Caps { invalid_entries_cached: false, ..processor().features().caps() }
    }

    fn invalidate(&self, flush: &Invalidation<'_>) {
        let mut batch = lock(&BATCHES[cpu::number()]);
        batch.0.add(flush);
        batch.1 = flush.root;
    }

    fn barrier(&self, barrier: Barrier) {
        processor().barrier(barrier);
        let (Barrier::Complete, Some(here)) = (barrier, here()) else {
            return;
        };
        let mut batch = lock(&BATCHES[cpu::number()]);
        let (sent, root) = (batch.0.take(), batch.1);
        drop(batch);
        let space = SPACES.iter().filter_map(Once::get).find(|space| space.root() == root);
        if let (Some(space), Some(harts), false) = (space, HARTS.get(), sent.is_empty()) {
            let firmware = Rfence::new(Sbi, harts, false);
            here.flush(space, &sent.flush(root, 0), &[&firmware], &Tables);
        }
    }
}

// SAFETY: the hart forgets before the function returns (1.); the handler of the interrupt calls
// `receive`, and so does a hart that holds interrupts off (2.); there are no identifiers (3.).
unsafe impl Actions for Tables {
    fn flush_local(&self, what: LocalFlush) {
        processor().forgetting(&what, |fence| {
            FENCES.fetch_add(1, Ordering::Relaxed);
            execute(fence);
        });
    }

    fn interrupt(&self, cpus: &Cpus) {
        let hart = |cpu: usize| HARTS.get().map_or(0, |harts| harts[cpu]);
        for cpu in cpus.iter() {
            sbi_rt::send_ipi(sbi_rt::HartMask::from_mask_base(1, hart(cpu) as usize));
        }
    }

    fn allocator(&self, _: &mut dyn FnMut(&mut Allocator<'_>)) {}
}

/// This hart, as flushes see it.
pub fn here() -> Option<PerCpu<'static, 'static>> {
    // SAFETY: this hart (1.), without interrupts in the kernel (2.), which loads what `switch` says
    // (3.); there are no others (4.).
    unsafe { SHOOTDOWN.get()?.on(cpu::number()) }
}

/// Tells flushes of a space.
pub fn add_space(number: usize, root: Pa) {
    let set = || SpinMutexGuard::leak(LOADED[number].lock());
    SPACES[number].call_once(|| Space::new(root, set()));
}

/// Brings both harts together; the other is offline when it returns.
pub fn shootdown() -> Option<&'static Shootdown<'static>> {
    // A message of the firmware costs some 2000 cycles, and an interrupt no less.
    let cells = SpinMutexGuard::leak(CELLS.lock());
    let inboxes = SpinMutexGuard::leak(INBOXES.lock());
    let shootdown = Shootdown::new(cells, inboxes, None, 2000)?;
    // SAFETY: the other has not started yet (1.), and loads nothing (2. to 4.).
    unsafe { shootdown.on(1) }?.go_offline(&Tables);
    Some(SHOOTDOWN.call_once(|| shootdown))
}

/// Takes a lock, and answers meanwhile: the hart that holds it may wait for this one, which holds
/// interrupts off.
pub fn lock<T>(mutex: &SpinMutex<T>) -> SpinMutexGuard<'_, T> {
    loop {
        match (mutex.try_lock(), here()) {
            (Some(guard), _) => return guard,
            (None, Some(here)) => here.receive(&Tables),
            (None, None) => {}
        }
    }
}
