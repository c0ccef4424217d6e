//! The published measurement, of the program `pthread_mmap`: each thread maps a part of a file,
//! touches each of its pages and unmaps it, over and over. What is timed is the unmapping, which is
//! over when the other processors have forgotten.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::map::{Map, PAGE, file};
use crate::port;

/// How much is done.
pub struct Options {
    threads: usize,
    rounds: usize,
    parts: usize,
    pages: usize,
}

impl Options {
    /// Reads `-t`, `-r`, `-c` and `-p`, with a number each.
    pub fn parse(words: &[&str]) -> Result<Self, Error> {
        let mut options = Self {
            threads: thread::available_parallelism()?.get(),
            rounds: 20,
            parts: 10,
            pages: 16,
        };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let place = match *word {
                "-t" => &mut options.threads,
                "-r" => &mut options.rounds,
                "-c" => &mut options.parts,
                "-p" => &mut options.pages,
                _ => return Err(format!("there is no option {word}").into()),
            };
            *place = words.next().ok_or("a number is missing")?.parse()?;
            if *place == 0 || *place > 1 << 24 {
                return Err("a number is too small or too large".into());
            }
        }
        Ok(options)
    }
}

/// The time that one thread has waited.
#[derive(Default)]
struct Waited {
    total: Duration,
    longest: Duration,
}

const BEGIN: u8 = 1;
const END: u8 = 2;

/// Runs it, and says how long it took.
pub fn run(options: &Options) -> Result<(), Error> {
    let size = options.pages * PAGE;
    let data = file(c"measure", size * options.parts)?;
    let start = Barrier::new(options.threads + 1);
    let work = || -> std::io::Result<Waited> {
        let mut waited = Waited::default();
        start.wait();
        for _ in 0..options.rounds {
            for part in 0..options.parts {
                let map = Map::new(&data, part * size, size)?;
                map.touch();
                let from = Instant::now();
                drop(map);
                let took = from.elapsed();
                waited.total += took;
                waited.longest = waited.longest.max(took);
            }
        }
        Ok(waited)
    };
    let (all, took) = thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads).map(|_| scope.spawn(work)).collect();
        port::write(port::MARK, BEGIN);
        start.wait();
        let from = Instant::now();
        let all: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        let took = from.elapsed();
        port::write(port::MARK, END);
        (all, took)
    });
    let mut waited = Waited::default();
    for one in all {
        let one = one.map_err(|_| "a thread has failed")??;
        waited.total += one.total;
        waited.longest = waited.longest.max(one.longest);
    }
    println!(
        "measure: threads={} cycles={} pages={} time_us={} unmap_us={} longest_us={}",
        options.threads,
        options.threads * options.rounds * options.parts,
        options.pages,
        took.as_micros(),
        waited.total.as_micros(),
        waited.longest.as_micros(),
    );
    Ok(())
}
