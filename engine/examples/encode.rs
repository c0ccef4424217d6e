//! How long it takes to write one hypercall that flushes 64 ranges on 128 CPUs: from their numbers
//! to the last word of the input. Fails if that is more than some times what a loop takes that
//! translates the numbers, sets their bits, and writes a word for each range; both in one run,
//! because computers differ, and one from hour to hour.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

use tablewright::hyperv::{FlushEncoder, PAGE_WORDS};
use tablewright::shootdown::Cpus;
use tablewright::{Invalidation, Pa, Stale, What};

const RANGES: u64 = 64;
const CPUS: usize = 128;
const ROUNDS: u32 = 2000;
/// The most times the bare loop; 3.5 to 4 on the computers that it was measured on.
const MOST: f64 = 6.0;
/// Pairs of measurements; figures are medians, since other programs may have the CPU meanwhile.
const PAIRS: usize = 51;

/// Nanoseconds for one.
fn timed(mut work: impl FnMut() -> bool) -> f64 {
    let start = Instant::now();
    let all_right = (0..ROUNDS).all(|_| work());
    black_box(all_right);
    start.elapsed().as_nanos() as f64 / f64::from(ROUNDS)
}

fn main() -> ExitCode {
    let encoder = FlushEncoder { most_ranges: 64, takes_sets: true };
    let range = |number: u64| Stale {
        first: number << 16,
        last: (number << 16) + 0x2fff,
        level: None,
        tables: false,
    };
    let ranges: Vec<_> = (0..RANGES).map(range).collect();
    let flush =
        Invalidation { root: Pa::new(0x1000), id: 1, global: false, what: What::Ranges(&ranges) };
    let vps: Vec<usize> = (0..CPUS).map(|cpu| cpu * 5 % 640).collect();
    let mut cpus = Cpus::EMPTY;
    let all = (0..CPUS).all(|cpu| cpus.insert(cpu));
    let mut page = [0; PAGE_WORDS];
    let mut encode = || {
        let mut set = Cpus::EMPTY;
        let known = black_box(&cpus).iter().all(|cpu| set.insert(vps[cpu]));
        let input = encoder.encode(&mut page, Some(&set), black_box(&flush));
        let reps = input.map(|input| input.map_or(0, |input| input.reps()));
        (known, black_box(reps))
    };
    let right = all && encode() == (true, Ok(RANGES as usize));
    let (mut bits, mut words) = ([0_u64; 10], [0_u64; RANGES as usize]);
    let mut bare = || {
        bits.fill(0);
        for cpu in 0..black_box(CPUS) {
            bits[vps[cpu] / 64] |= 1 << (vps[cpu] % 64);
        }
        for (word, range) in words.iter_mut().zip(black_box(&ranges)) {
            *word = range.first & !0xfff | (range.last - range.first) >> 12;
        }
        black_box((&bits, &words));
        true
    };
    let mut pairs: Vec<(f64, f64)> =
        (0..PAIRS).map(|_| (timed(&mut bare), timed(|| encode().0))).collect();
    pairs.sort_by(|a, b| (a.1 / a.0).total_cmp(&(b.1 / b.0)));
    let (bare, encoded) = pairs[PAIRS / 2];
    let times = encoded / bare;
    println!(
        "{RANGES} ranges for {CPUS} CPUs: {encoded:.0} ns, a bare loop {bare:.0} ns, x {times:.1}"
    );
    if right && times <= MOST {
        ExitCode::SUCCESS
    } else {
        eprintln!("error: more than x {MOST:.1}, or not what was to be written");
        ExitCode::FAILURE
    }
}
