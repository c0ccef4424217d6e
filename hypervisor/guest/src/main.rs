//! Programs for a guest, to have its kernel flush the TLBs of other processors, and to see whether
//! they were.
//!
//! | | |
//! |---|---|
//! | `tlb measure -t THREADS -r ROUNDS -c PARTS -p PAGES` | maps and unmaps a file ([`measure`]) |
//! | `tlb hunt SECONDS` | pages are replaced under threads that read them ([`hunt`]) |
//! | `tlb ring` | the hypervisor is told that a load is at work ([`port`]) |
//! | `tlb copied` | the status says whether the guest was copied while it ran |
//!
//! The first two say one line of `NAME=VALUE` words at their end. The status is 0, 1 where
//! something stale was read (or nothing was copied), 2 for wrong arguments.

mod error;
mod hunt;
mod map;
mod measure;
mod port;

use std::process::ExitCode;

use error::Error;

fn run() -> Result<bool, Error> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["measure", options @ ..] => {
            measure::run(&measure::Options::parse(options)?).map(|()| true)
        }
        ["hunt-once", seconds] => hunt::run_once(seconds.parse()?),
        ["hunt", seconds] => hunt::run(seconds.parse()?),
        ["ring"] => {
            port::write(port::BELL, 1);
            Ok(true)
        }
        ["copied"] => Ok(port::read(port::BELL).is_some_and(|digit| digit != b'0')),
        _ => Err("say measure, hunt, ring or copied".into()),
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
