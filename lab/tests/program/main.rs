//! The program as a shell sees it, experiment by experiment.
//!
//! One test program, so that tests of all experiments run beside each other.

mod command_line;
mod common;
mod dirty_log;
mod inspect;
mod keys;
mod kvm;
mod litmus;
mod machine;
mod migrate;
mod page_table_test;
mod record;
mod tlb_flush;
mod write_protect;
mod wrong;
