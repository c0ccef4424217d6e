//! The program `tablewright`: experiments with page tables on this computer.
//!
//! Each sub-command is a module with its arguments and a `run`; what they share is beside them.

mod arena;
mod bare;
mod cli;
mod compare;
mod dirty_log;
mod doctor;
mod error;
mod file;
mod first;
mod fit;
mod format;
mod harness;
mod host;
mod iomem;
mod judge;
mod kvm;
mod litmus;
mod machine;
mod map_mem;
mod migrate;
mod needs;
mod page;
mod page_table_test;
mod plan;
mod platform;
mod plot;
mod progress;
mod published;
mod random;
mod record;
mod report;
mod reproduce;
mod size;
mod stats;
mod tlb_flush;
mod write_protect;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run(std::env::args_os()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::complain("error", &error);
            error.exit_code()
        }
    }
}
