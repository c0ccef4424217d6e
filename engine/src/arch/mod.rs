//! The processor's side, ready to use: what every kernel and hypervisor would write in `asm!`.
//!
//! You need this unless your kernel has such functions already: the two functions of a
//! [`Platform`](crate::Platform) that talk to the processor are one line each with it.
//!
//! | | arm64 | x86-64 |
//! |---|---|---|
//! | what the processor can do | [`arm64::Ids`], from ID registers | [`x86_64::Features`], from CPUID |
//! | what the engine is told of it | [`Ids::caps`](arm64::Ids::caps) | [`Features::caps`](x86_64::Features::caps) |
//! | what registers hold | [`arm64::tcr_el1`], [`arm64::ttbr`], [`arm64::vtcr_el2`], … | [`x86_64::cr3`], [`x86_64::eptp`] |
//! | barriers and invalidations of a [`Platform`](crate::Platform) | [`arm64::Cpu`] | [`x86_64::Cpu`] |
//!
//! What is arithmetic is there on every target, so that it can be tested on any computer. What
//! executes instructions is there on its own architecture alone; it is for a privileged program,
//! and elsewhere ends in an exception.
//!
//! Nothing here is used by the rest of the engine, which knows the processor as a
//! [`Platform`](crate::Platform).

pub mod arm64;
pub mod x86_64;
