//! The processor's side, ready to use: what every kernel and hypervisor would write in `asm!`.
//!
//! You need this unless your kernel has such functions already: the two functions of a
//! [`Platform`](crate::Platform) that talk to the processor are one line each with it.
//!
//! | | arm64 | x86-64 | RISC-V |
//! |---|---|---|---|
//! | the processor's features | [`arm64::Ids`] | [`x86_64::Features`] | [`riscv64::Features`] |
//! | registers | [`arm64::tcr_el1`], … | [`x86_64::cr3`], … | [`riscv64::satp`] |
//! | barriers and invalidations | [`arm64::Cpu`] | [`x86_64::Cpu`] | [`riscv64::Cpu`] |
//!
//! Each kind of features has `caps`, which is the engine's part of them.
//!
//! What is arithmetic is there on every target, so that it can be tested on any computer. What
//! executes instructions is there on its own architecture alone; it is for a privileged program,
//! and elsewhere ends in an exception.
//!
//! Nothing here is used by the rest of the engine, which knows the processor as a
//! [`Platform`](crate::Platform).

pub mod arm64;
pub mod riscv64;
pub mod x86_64;
