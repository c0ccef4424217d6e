//! Guests on the KVM of this computer: vCPUs in threads that access memory page by page, count how
//! long each access takes, and are logged while they do.
//!
//! The guest is a loop of thirty instructions ([`guest`]). On x86-64 it runs at ring 3, where every
//! kind of KVM runs it natively, also one without hardware virtualisation; on arm64 at EL1. Its
//! tables are built by the engine. What it writes is known beforehand, so that a log can be checked
//! page by page.
#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

mod arch;
pub mod clock;
mod error;
pub mod guest;
pub mod host;
mod log;
mod memory;
mod ring;
pub mod stalls;
mod stats;
mod tables;
mod vcpu;
mod vm;

pub use error::Error;
pub use log::{Bitmap, Protect};
pub use memory::{Backing, available};
pub use stats::Counts;
pub use vcpu::{Done, Emptied, Vcpu};
pub use vm::{Setup, Vm};
