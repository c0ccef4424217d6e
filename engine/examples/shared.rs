//! How long a shared fault takes: one page mapped in a table that exists, and two threads in one
//! tree beside two threads that fill two arrays.
//!
//! ```text
//! cargo run --release -p tablewright --example shared
//! ```

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use tablewright::format::X86_64;
use tablewright::hosted::Threads;
use tablewright::shared::{NewLeaf, SharedSpace};
use tablewright::{AddressSpace, Attrs, Level, Mapping, Pa, Span, Va};

const PAGES: u64 = 64 * 512;
const ROUNDS: usize = 15;

fn leaf(page: u64) -> NewLeaf<X86_64<4>> {
    let at = page << 12;
    NewLeaf::new(Va::new(at), Pa::new(at), Level::PAGE, Attrs::USER_DATA).expect("a page")
}

/// Maps `pages` by one processor: nanoseconds for each.
fn map(
    space: &SharedSpace<X86_64<4>, &Threads>,
    platform: &Threads,
    pages: std::ops::Range<u64>,
) -> f64 {
    let mut gather = space.gather();
    let count = pages.end - pages.start;
    let start = Instant::now();
    for page in pages {
        // Between two faults a processor holds no table.
        platform.pass();
        while gather.map(&leaf(page)).is_err() {
            assert!(gather.top_up(3));
        }
    }
    start.elapsed().as_secs_f64() * 1e9 / count as f64
}

/// An empty space.
fn empty(platform: &Threads) -> SharedSpace<X86_64<4>, &Threads> {
    let space = AddressSpace::new(platform).expect("a root");
    SharedSpace::new(space).expect("it is dead")
}

/// Maps page after page in tables that exist.
fn one_processor(platform: &Threads) -> f64 {
    platform.play(0);
    platform.pass();
    let space = empty(platform);
    for table in 0..64 {
        map(&space, platform, table * 512..table * 512 + 1);
    }
    let took = map(&space, platform, 1..PAGES);
    platform.rest();
    took
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn main() {
    let (mut warm, mut quiescent, mut shared, mut bulk, mut arrays) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        warm.push(one_processor(&Threads::new(600, 12, 2)));
        quiescent.push(one_processor(
            &Threads::new(600, 12, 2).with_quiescent_states(),
        ));

        let platform = Threads::new(600, 12, 2);
        let space = empty(&platform);
        let barrier = Barrier::new(2);
        let times: Vec<f64> = thread::scope(|scope| {
            let run = |cpu: u16| {
                let (space, platform, barrier) = (&space, &platform, &barrier);
                scope.spawn(move || {
                    platform.play(cpu);
                    barrier.wait();
                    let first = u64::from(cpu) * PAGES;
                    map(space, platform, first..first + PAGES)
                })
            };
            let (a, b) = (run(0), run(1));
            vec![a.join().expect("runs"), b.join().expect("runs")]
        });
        shared.push(times.iter().copied().fold(0.0, f64::max));
        let platform = Threads::new(1200, 12, 2);
        let space = empty(&platform);
        // What a kernel's allocator hands out has been touched before.
        let memory = Span::new(Va::new(1 << 40), PAGES << 13).expect("pages");
        let mapping = Mapping::new(Attrs::USER_DATA).pages_only();
        assert!(space.map_range(memory, Pa::new(0), mapping).is_ok());
        let mut gather = space.gather();
        let taken = gather.unmap(memory, |_| std::ops::ControlFlow::Continue(()));
        assert!(taken.expect("is mapped").progress.is_done());
        assert!(gather.finish(|_| ()).is_ok(), "nothing walks");
        let times: Vec<f64> = thread::scope(|scope| {
            let run = |cpu: u16| {
                let (space, platform, barrier) = (&space, &platform, &barrier);
                scope.spawn(move || {
                    platform.play(cpu);
                    let first = (u64::from(cpu) * PAGES) << 12;
                    let span = Span::new(Va::new(first), PAGES << 12).expect("pages");
                    barrier.wait();
                    let start = Instant::now();
                    let mapped = space.map_range(span, Pa::new(first), mapping);
                    let took = start.elapsed().as_secs_f64() * 1e9 / PAGES as f64;
                    assert_eq!(mapped, Ok(PAGES << 12));
                    took
                })
            };
            let (a, b) = (run(0), run(1));
            vec![a.join().expect("runs"), b.join().expect("runs")]
        });
        bulk.push(times.iter().copied().fold(0.0, f64::max));
        let times: Vec<f64> = thread::scope(|scope| {
            let run = |_: u16| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let mut array = vec![1u64; PAGES as usize];
                    barrier.wait();
                    let start = Instant::now();
                    for (page, entry) in array.iter_mut().enumerate() {
                        *entry = black_box(page as u64) << 12 | 0x67;
                    }
                    black_box(&array);
                    start.elapsed().as_secs_f64() * 1e9 / PAGES as f64
                })
            };
            let (a, b) = (run(0), run(1));
            vec![a.join().expect("runs"), b.join().expect("runs")]
        });
        arrays.push(times.iter().copied().fold(0.0, f64::max));
    }
    println!(
        "one processor, warm tables: {:.1} ns a page with epochs, {:.1} ns with quiescent states",
        median(warm),
        median(quiescent)
    );
    println!(
        "two processors, tables made on the way: {:.1} ns a page each",
        median(shared)
    );
    println!(
        "two processors, in bulk: {:.2} ns a page each",
        median(bulk)
    );
    println!("two arrays: {:.2} ns an entry each", median(arrays));
}
