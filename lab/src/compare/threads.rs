//! Two threads that map into one tree at a time, beside two threads that fill an array each.
//!
//! No other crate can do the first: they take the tree by exclusive reference.

use std::hint;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use tablewright::format::X86_64;
use tablewright::shared::{Epochs, SharedSpace, WalkSlot};
use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va};

use crate::compare::calls::{PHYSICAL, VIRTUAL};
use crate::compare::shared::{Shared, THREAD};
use crate::compare::subject::{OURS, Operation};
use crate::error::Error;
use crate::memory::arena::Arena;
use crate::output::progress::Progress;
use crate::stats::Samples;

/// Nanoseconds for each entry of a thread, [`PAIRS`] samples each round: of the arrays, and of the
/// tree.
#[derive(Default)]
pub struct Figures {
    pub arrays: Samples,
    pub tree: Samples,
}

/// Measurements of both in a round. Each takes half a millisecond for 16 GiB, less than an
/// interruption does, and two threads are interrupted twice as often as one.
pub const PAIRS: u32 = 5;

/// Frames for two threads.
type Halves<'a> = Shared<Epochs<'a>, 2>;

/// Runs `rounds` rounds after one that does not count, on an arena of touched memory whose frames
/// are free.
pub fn run(
    entries: u64,
    rounds: u32,
    arena: Arena,
    progress: &mut Progress,
) -> Result<Figures, Error> {
    let named = |problem: String| Error::Subject {
        subject: OURS,
        operation: Operation::MapTogether.name(),
        problem,
    };
    // Each thread has whole tables; the second one more if their number is odd.
    let half = entries / 1024 * 512;
    let parts = [0..half, half..entries];
    let slots = [const { WalkSlot::new() }; 2];
    // SAFETY: every subject has given all of its frames back (1.); `map` numbers its threads (2.);
    // the slots are local (3.).
    let mut platform = unsafe { Halves::new(arena, Epochs::new(&slots)) }.map_err(named)?;
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

/// Runs `work` on two threads that start at once. Returns the time of the slower for each entry of
/// its part.
///
/// They spin until both are ready. A thread that sleeps starts when it is woken, too late for this
/// measurement, and perhaps on the processor of the thread that woke it.
fn together<T: Send>(
    parts: &[Range<u64>; 2],
    work: impl Fn(usize, &Range<u64>) -> T + Sync,
) -> (f64, [T; 2]) {
    let ready = AtomicU32::new(0);
    let timed = |number: usize| {
        ready.fetch_add(1, Relaxed);
        while ready.load(Relaxed) < 2 {
            hint::spin_loop();
        }
        let started = Instant::now();
        let result = work(number, &parts[number]);
        let count = (parts[number].end - parts[number].start).max(1);
        (started.elapsed().as_nanos() as f64 / count as f64, result)
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| timed(1));
        let (one, first) = timed(0);
        let (two, second) = match other.join() {
            Ok(other) => other,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        (one.max(two), [first, second])
    })
}

/// Fills as many frames on each thread as it maps pages, one after the other.
fn fill(platform: &Halves<'_>, parts: &[Range<u64>; 2]) -> f64 {
    let (took, _) = together(parts, |number, part| {
        let array: *const AtomicU64 = ptr::with_exposed_provenance(platform.next(number) as usize);
        for page in part.clone() {
            let index = (page - part.start) as usize;
            // SAFETY: the frames of this thread are one after the other, and hold more entries than
            // it has pages. They are only ever reached as atomics.
            let entry = unsafe { &*array.add(index) };
            entry.store(page << 12 | 0x63, Relaxed);
        }
    });
    took
}

fn map(platform: &Halves<'_>, entries: u64, parts: &[Range<u64>; 2]) -> Result<f64, String> {
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
        let first = Va::new(VIRTUAL + (part.start << 12));
        let span = Span::new(first, (part.end - part.start) << 12);
        let frame = Pa::new(PHYSICAL + (part.start << 12));
        let mapped = space.map_range(span.map_err(|error| error.to_string())?, frame, mapping);
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
        if leaf.frame().get().wrapping_sub(PHYSICAL) != leaf.input().get().wrapping_sub(VIRTUAL) {
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
