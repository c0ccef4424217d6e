//! A process as a small kernel keeps it: an address space, the areas that were asked for, and one
//! count for each frame.
//!
//! A [`Process`] is what stands between system calls and faults on one side and the engine on the
//! other. It holds no lock and knows no processor: a kernel has each process behind a lock, and
//! says where frames come from ([`Memory`]).
//!
//! The same code runs on a processor, in `examples/arm64`, and on the software machine, in
//! `machine/checks/tests/machine/processes.rs`. Both go through the same [steps](Step), and
//! count what each asks of the processor.
#![no_std]

extern crate alloc;

mod area;
mod process;
mod step;

pub use process::{Fault, Handled, Memory, Process, ProcessError, Want};
pub use step::{COPIES, Counts, HEAP, PAGE, PAGES, Step, TEXT};
