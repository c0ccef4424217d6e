//! The processor's side, ready to use: what every kernel and hypervisor would write in `asm!`.
//!
//! You need this unless your kernel has such functions already: the two functions of a
//! [`Platform`](crate::Platform) that talk to the processor are one line each with it.
//!
//! | | arm64 | x86-64 |
//! |---|---|---|
//! | the processor's features | [`arm64::Ids`], of ID registers | [`x86_64::Features`], of CPUID |
//! | the engine's part of them | [`caps`](arm64::Ids::caps) | [`caps`](x86_64::Features::caps) |
//! | registers | [`arm64::tcr_el1`], [`arm64::ttbr`], … | [`x86_64::cr3`], [`x86_64::eptp`] |
//! | barriers and invalidations | [`arm64::Cpu`] | [`x86_64::Cpu`] |
//!
//! What is arithmetic is there on every target, so that it can be tested on any computer. What
//! executes instructions is there on its own architecture alone; it is for a privileged program,
//! and elsewhere ends in an exception.
//!
//! Nothing here is used by the rest of the engine, which knows the processor as a
//! [`Platform`](crate::Platform).

pub mod arm64;
pub mod x86_64;
