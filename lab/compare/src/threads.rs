//! Two threads that map into one tree at the same time, beside two threads that fill an array each.
//!
//! No other crate can do the first: they take the tree by exclusive reference.

use std::cell::Cell;
use std::hint;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use tablewright::format::X86_64;
use tablewright::shared::{Epochs, GracePeriod, SharedPlatform, SharedSpace, WalkSlot, Walking};
use tablewright::{
    AddressSpace, Attrs, Entry, Invalidation, Level, Mapping, Pa, Platform, Span, Va,
};

use super::subject::{OURS, Operation, Work};
use crate::arena::Arena;
use crate::error::Error;
use crate::progress::Progress;
use crate::stats::Samples;

/// Nanoseconds for each entry of a thread, [`PAIRS`] samples each round: of the arrays, and of the
/// tree.
#[derive(Default)]
pub struct Figures {
    pub arrays: Samples,
    pub tree: Samples,
}

/// How often both are measured in a round. Once takes half a millisecond for 16 GiB, less than an
/// interruption does, and two threads are interrupted twice as often as one.
pub const PAIRS: u32 = 5;

/// Where the range lies.
const FIRST: u64 = 1 << 39;
const FRAMES: u64 = 4 << 30;

std::thread_local! {
    /// Which of the two a thread is.
    static THREAD: Cell<usize> = const { Cell::new(0) };
}

static SLOTS: [WalkSlot; 2] = [const { WalkSlot::new() }; 2];

/// The frames of an arena, half of them for each thread: the next one of an array, as for all
/// others here.
struct Halves {
    arena: Arena,
    taken: [Taken; 2],
    given_back: AtomicU64,
    epochs: Epochs<'static>,
}

/// Which frame a thread takes next, and the first that is not its own. On cache lines of its own.
#[repr(align(128))]
struct Taken {
    next: AtomicU64,
    end: u64,
}

impl Halves {
    /// # Safety
    /// 1. No frame of the arena is in use.
    unsafe fn new(arena: Arena) -> Result<Self, String> {
        // SAFETY: no frame is in use (1.).
        unsafe { arena.start_round() }.map_err(|error| error.to_string())?;
        let take = || arena.take().map(|frame| frame.addr().get() as u64);
        let first = take().ok_or("out of tables")?;
        let mut next = first;
        while let Some(frame) = take() {
            next += Work::PAGE;
            if frame != next {
                return Err("the frames are not beside each other".to_owned());
            }
        }
        let middle = first + (arena.frames() as u64 / 2) * Work::PAGE;
        let end = first + arena.frames() as u64 * Work::PAGE;
        let taken = |next, end| Taken {
            next: AtomicU64::new(next),
            end,
        };
        Ok(Self {
            arena,
            taken: [taken(first, middle), taken(middle, end)],
            given_back: AtomicU64::new(0),
            epochs: Epochs::new(&SLOTS),
        })
    }

    /// How many frames are held.
    fn held(&self) -> u64 {
        let frames = self.arena.frames() as u64;
        let left = |half: &Taken| (half.end - half.next.load(Ordering::Relaxed)) / Work::PAGE;
        frames - self.taken.iter().map(left).sum::<u64>() - self.given_back.load(Ordering::Relaxed)
    }

    /// Starts again with the first frames.
    fn start_round(&mut self) {
        for (number, half) in self.taken.iter_mut().enumerate() {
            let size = match number {
                0 => self.arena.frames() / 2,
                _ => self.arena.frames().div_ceil(2),
            };
            *half.next.get_mut() = half.end - size as u64 * Work::PAGE;
        }
        *self.given_back.get_mut() = 0;
    }
}

// SAFETY: each frame is handed out once in a round, and belongs to the arena (1.), where it is as
// long as the program runs, at the address that is its number (2.). There are no links (3.). No
// processor walks (4. to 6.). A reference is the platform (7.).
unsafe impl Platform for Halves {
    #[inline(always)]
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        let half = &self.taken[THREAD.get()];
        // Only this thread takes from this half.
        let frame = half.next.load(Ordering::Relaxed);
        if frame == half.end {
            return None;
        }
        half.next.store(frame + Work::PAGE, Ordering::Relaxed);
        Some(Pa::new(frame))
    }
    unsafe fn free_table(&self, _: Pa, _: Level) {
        self.given_back.fetch_add(1, Ordering::Relaxed);
    }
    #[inline(always)]
    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        let table: *mut Entry = ptr::with_exposed_provenance_mut(frame.get() as usize);
        // SAFETY: a frame of the arena, which is not at address 0.
        unsafe { NonNull::new_unchecked(table) }
    }
    #[inline(always)]
    fn barrier(&self, _: tablewright::Barrier) {}
    #[inline(always)]
    fn invalidate(&self, _: &Invalidation<'_>) {}
}

// SAFETY: the epochs keep both promises; each thread has a slot.
unsafe impl SharedPlatform for Halves {
    type Walk<'a> = Option<Walking<'a>>;

    #[inline(always)]
    fn enter(&self) -> Option<Walking<'_>> {
        // SAFETY: of the two threads that run at a time each has its number (1.), and no interrupts
        // (2.); a walk ends in the edit that starts it (3.), and the slots are these epochs' alone
        // (4.).
        unsafe { self.epochs.enter(THREAD.get()) }
    }
    fn grace_period(&self) -> GracePeriod {
        self.epochs.advance()
    }
    fn is_over(&self, period: GracePeriod) -> bool {
        self.epochs.is_over(period)
    }
}

/// Runs `rounds` rounds after one that does not count, on an arena whose memory has been touched
/// before and whose frames are free.
pub fn run(
    work: Work,
    rounds: u32,
    arena: Arena,
    progress: &mut Progress,
) -> Result<Figures, Error> {
    let named = |problem: String| Error::Subject {
        subject: OURS,
        operation: Operation::MapTogether.name(),
        problem,
    };
    let entries = work.entries();
    // Each thread has whole tables; the second one more if they are odd.
    let half = entries / 1024 * 512;
    let parts = [0..half, half..entries];
    // SAFETY: every subject has given back all of its frames (1.).
    let mut platform = unsafe { Halves::new(arena) }.map_err(named)?;
    let mut figures = Figures::default();
    for round in 0..=rounds {
        progress.step("two threads");
        let mut sample = |filled: bool| {
            platform.start_round();
            if filled {
                Ok(fill(&platform, &parts))
            } else {
                map(&platform, entries, &parts).map_err(named)
            }
        };
        for pair in 0..PAIRS {
            // Neither always comes after the other.
            let first = (round * PAIRS + pair).is_multiple_of(2);
            let one = sample(first)?;
            let other = sample(!first)?;
            if round > 0 {
                let (array, tree) = if first { (one, other) } else { (other, one) };
                figures.arrays.push(array);
                figures.tree.push(tree);
            }
        }
    }
    Ok(figures)
}

/// Runs `work` on two threads that start at once. The time of the slower for each entry of its
/// part.
///
/// They wait for each other without giving up their processors. One that sleeps starts when it is
/// woken, late for what is measured here, and perhaps on the processor of the one that woke it,
/// after that is done.
fn together<T: Send>(
    parts: &[Range<u64>; 2],
    work: impl Fn(usize, &Range<u64>) -> T + Sync,
) -> (f64, Vec<T>) {
    let ready = AtomicU32::new(0);
    let timed = |number: usize| {
        ready.fetch_add(1, Ordering::Relaxed);
        while ready.load(Ordering::Relaxed) < 2 {
            hint::spin_loop();
        }
        let started = Instant::now();
        let result = work(number, &parts[number]);
        let part = &parts[number];
        let count = (part.end - part.start).max(1);
        (started.elapsed().as_nanos() as f64 / count as f64, result)
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| timed(1));
        let (one, first) = timed(0);
        let (two, second) = match other.join() {
            Ok(other) => other,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        (one.max(two), vec![first, second])
    })
}

/// Each thread fills as many frames as it maps pages, one after the other.
fn fill(platform: &Halves, parts: &[Range<u64>; 2]) -> f64 {
    let (took, _) = together(parts, |number, part| {
        let first = platform.taken[number].next.load(Ordering::Relaxed) as usize;
        let array: *const AtomicU64 = ptr::with_exposed_provenance(first);
        for page in part.clone() {
            let index = (page - part.start) as usize;
            // SAFETY: the frames of this thread are one after the other, and it has more than it
            // has entries for. They are only ever reached as atomics.
            let entry = unsafe { &*array.add(index) };
            entry.store(page << 12 | 0x63, Ordering::Relaxed);
        }
    });
    took
}

fn span(part: &Range<u64>) -> Result<Span<Va>, String> {
    let first = Va::new(FIRST + (part.start << 12));
    Span::new(first, (part.end - part.start) << 12).map_err(|error| error.to_string())
}

fn map(platform: &Halves, entries: u64, parts: &[Range<u64>; 2]) -> Result<f64, String> {
    let space = AddressSpace::<X86_64<4>, _>::new(platform).ok_or("out of tables")?;
    let Ok(space) = SharedSpace::new(space) else {
        return Err("a dead space is not shared".to_owned());
    };
    let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
    let (took, mapped) = together(parts, |number, part| {
        THREAD.set(number);
        if part.is_empty() {
            return Ok(0);
        }
        let frame = Pa::new(FRAMES + (part.start << 12));
        let mapped = space.map_range(span(part)?, frame, mapping);
        mapped.map_err(|refused| refused.to_string())
    });
    let mapped = mapped.into_iter().sum::<Result<u64, String>>()?;
    if mapped != entries << 12 {
        return Err(format!("mapped {mapped} bytes, not {}", entries << 12));
    }
    let mut space = space.into_exclusive();
    // SAFETY: no processor has ever walked these tables, and both threads are done (1.).
    unsafe { space.make_dead() };
    let (mut count, mut wrong) = (0, None);
    let destroyed = space.destroy(|leaf| {
        count += 1;
        if leaf.frame().get().wrapping_sub(FRAMES) != leaf.input().get().wrapping_sub(FIRST) {
            wrong = Some(leaf.input());
        }
    });
    if destroyed.is_err() || platform.held() != 0 {
        return Err(format!("kept {} tables", platform.held()));
    }
    match wrong {
        Some(input) => Err(format!("{input} was mapped to another frame")),
        None if count != entries => Err(format!("{count} pages were mapped, not {entries}")),
        None => Ok(took),
    }
}
