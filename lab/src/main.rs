//! The program `tablewright`: experiments with page tables on this computer.
//!
//! Each sub-command is a module with its arguments and a `run`; what they share is beside them.

mod ask;
mod cli;
mod compare;
mod dirty_log;
mod doctor;
mod error;
#[cfg(test)]
mod fakes;
mod file;
mod first;
mod fit;
mod format;
mod guest;
mod inspect;
mod kvm;
mod litmus;
mod machine;
mod map_mem;
mod memory;
mod migrate;
mod output;
mod page_table_test;
mod profile;
mod published;
mod random;
mod record;
mod reproduce;
mod runs;
mod size;
mod stats;
mod tlb_flush;
mod watch;
mod write_protect;

use std::process::ExitCode;

use output::report;

fn main() -> ExitCode {
    let done = report::check_stdout().and_then(|()| cli::run(std::env::args_os()));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::complain("error", &error);
            error.exit_code()
        }
    }
}
