//! Measures the harvest of a bitmap, beside reading and zeroing its memory.
//!
//! ```text
//! cargo run --release -p tablewright --example harvest [MEGABYTES]
//! ```
//!
//! With 1 % of the words set by `Bitmap::harvest`, which others may mark meanwhile; with all of
//! them by `Flip`, whose idle half gets no marks. The best of several rounds, in turn: what
//! disturbs a round only makes it slower.

use std::hint::black_box;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use tablewright::dirty::{Bitmap, Flip};
use tablewright_hosted::Threads;

const ROUNDS: usize = 15;

fn time(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Reads all words and zeroes them, as fast as the compiler can make it.
fn read_and_zero(words: &mut [u64]) -> u64 {
    let mut all = 0;
    for word in words {
        all |= std::mem::take(word);
    }
    all
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let megabytes: usize = match std::env::args().nth(1) {
        Some(argument) => argument.parse()?,
        None => 64,
    };
    let count = megabytes << 17;
    let pages = count as u64 * 64;
    let platform = &Threads::new(8, 12, 1);
    let mut plain = vec![0u64; count];
    let (mut one, mut first, mut second) = (words(count), words(count), words(count));
    let bitmap = Bitmap::new(&mut one, pages)?;
    let [first, second] = [&mut first, &mut second].map(|words| Bitmap::new(words, pages));
    let flip = Flip::new(first?, second?)?;
    let (mut base, mut few, mut all) = (f64::MAX, f64::MAX, f64::MAX);
    for _ in 0..ROUNDS {
        plain.fill(3);
        base = base.min(time(|| {
            black_box(read_and_zero(black_box(&mut plain)));
        }));

        // The first page of every hundredth word.
        (0..pages).step_by(6400).for_each(|page| bitmap.mark(page));
        let mut found = 0;
        few = few.min(time(|| bitmap.harvest(0..pages, |_, bits| found += bits)));
        assert_eq!(found, pages.div_ceil(6400));

        flip.current().mark_all();
        let (mut found, mut is_drained) = (u64::MAX, false);
        all = all.min(time(|| {
            is_drained = flip.drain(&platform, |_, bits| found &= bits);
        }));
        assert!(is_drained && found == u64::MAX);
    }
    let line = |what: &str, time: f64| {
        let each = time / count as f64 * 1e9;
        println!("{what:<34} {each:>7.3} ns a word  {:>5.2} x", time / base);
    };
    println!("a bitmap of {megabytes} MiB, for {} GiB in pages of 4 KiB", pages >> 18);
    line("read and zeroed", base);
    line("harvested, 1 % of the words set", few);
    line("drained, all of the words set", all);
    Ok(())
}
