//! What runs in a guest, to have its kernel flush the TLBs of other processors, and to see whether they were.
//!
//! | | |
//! |---|---|
//! | `tlb measure -t THREADS -r ROUNDS -c PARTS -p PAGES` | threads map a part of a file, touch and unmap it ([`measure`]) |
//! | `tlb hunt SECONDS` | pages are replaced under threads that read them ([`hunt`]) |
//!
//! Each says one line of `NAME=VALUE` words at its end. The status is 0, 1 where something stale was read, 2 for wrong arguments.

mod hunt;
mod map;
mod measure;

use std::process::ExitCode;

/// Why it came to no end.
type Error = Box<dyn std::error::Error>;

fn run() -> Result<bool, Error> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["measure", options @ ..] => {
            measure::run(&measure::Options::parse(options)?).map(|()| true)
        }
        ["hunt-once", seconds] => hunt::run_once(seconds.parse()?),
        ["hunt", seconds] => hunt::run(seconds.parse()?),
        _ => Err("say measure or hunt".into()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(why) => {
            eprintln!("tlb: {why}");
            ExitCode::from(2)
        }
    }
}
