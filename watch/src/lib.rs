//! A sanitizer for TLB maintenance.
//!
//! A [`Watcher`] is told what the processors of a machine execute: stores, barriers, invalidations,
//! writes to the registers that say where tables are. From these it finds the page tables, follows
//! each change of them, and keeps account of what a TLB or a table walk may still remember. It
//! takes it that everything is remembered that may be, from the moment that it could be until the
//! architecture says that it cannot. So what is found does not depend on what an emulator's TLB
//! happens to hold.
//!
//! It knows nothing of the kernel: neither its symbols nor what it calls a page table.
//!
//! # What it takes for granted
//!
//! * Processors are seen in the order in which they execute, one at a time.
//! * Nothing but processors stores to tables. Flags that hardware sets in entries are not seen, and
//!   make no difference to what is judged.
//!
//! # The parts
//!
//! | file | what it knows |
//! |---|---|
//! | `arm64.rs`, `x86_64.rs`, `riscv64.rs` | which instructions matter |
//! | `entry.rs` | what a change of one entry means |
//! | `tables.rs` | the tables that walks can reach, and what is in them |
//! | `debt.rs` | what was changed and may be remembered |
//! | `processor.rs` | what a processor has loaded and issued |
//! | `space.rs` | who may remember something of a root |
//! | `watcher.rs` | the rules |
//! | `session.rs` | how QEMU is run with the plugin |

#![forbid(unsafe_code)]

pub mod arm64;
mod debt;
mod entry;
mod finding;
mod invalidation;
mod processor;
pub mod riscv64;
pub mod session;
mod space;
mod tables;
mod watcher;
pub mod x86_64;

pub use entry::{describe, memory_type};
pub use finding::{Change, Finding, Findings, Rule};
pub use invalidation::{Hint, Invalidation, Span, Stages};
pub use watcher::{Counts, Watcher};
pub use x86_64::{Control, Flushes};

/// The memory of the machine, as it is now.
pub trait Memory {
    /// Reads words of 8 bytes from a physical address on. `false`: there is no memory, and what
    /// `words` holds means nothing.
    fn read(&mut self, pa: u64, words: &mut [u64]) -> bool;
}

impl<F: FnMut(u64, &mut [u64]) -> bool> Memory for F {
    fn read(&mut self, pa: u64, words: &mut [u64]) -> bool {
        self(pa, words)
    }
}

/// An instruction as it is executed: its processor and its address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct At {
    /// The number of the processor, from 0.
    pub cpu: u8,
    /// The address of the instruction.
    #[serde(with = "hex")]
    pub pc: u64,
}

/// Addresses as they are written: `"0xffff800080000000"`. Numbers of JSON have 53 bits for many who
/// read them.
mod hex {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(crate) fn serialize<S: Serializer>(address: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{address:#x}"))
    }

    pub(crate) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<u64, D::Error> {
        let text = String::deserialize(from)?;
        let hex = text.strip_prefix("0x").and_then(|hex| u64::from_str_radix(hex, 16).ok());
        hex.ok_or_else(|| D::Error::custom(format!("{text} is no address")))
    }
}
