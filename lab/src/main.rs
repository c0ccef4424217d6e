//! The program `tablewright`: experiments with page tables on this computer.
//!
//! Each sub-command is a module with its arguments and a `run`; what they share is beside them.

mod cli;
mod dirty_log;
mod doctor;
#[cfg(test)]
mod fakes;
mod first;
mod fit;
mod guest;
mod kvm;
mod litmus;
mod machine;
mod map_mem;
mod migrate;
mod page;
mod page_table_test;
mod profile;
mod published;
mod record;
mod reproduce;
mod tlb_flush;
mod write_protect;

use std::process::ExitCode;

use tablewright_compare as compare;
use tablewright_harness::{
    arena, bare, columns, error, file, format, judge, platform, plot, progress, random, report,
    runs, size, stats,
};

fn main() -> ExitCode {
    match cli::run(std::env::args_os()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::complain("error", &error);
            error.exit_code()
        }
    }
}
