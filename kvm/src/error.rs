//! Errors, in one line each.

use std::io;

/// Why there is no guest, or no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such device.
    #[error("{path}: there is no KVM on this computer (no processor support, or no kernel module)")]
    NoDevice {
        /// Which.
        path: String,
    },
    /// The device is there, and not for this user.
    #[error("{path}: no permission: join the group that owns it, or run as root")]
    Permission {
        /// Which.
        path: String,
    },
    /// The device is another.
    #[error("{path}: not KVM: {why}")]
    NotKvm {
        /// Which.
        path: String,
        /// The error of it.
        why: io::Error,
    },
    /// The kernel lacks something.
    #[error("this kernel's KVM has no {what}")]
    Lacks {
        /// The subject, in the user's words.
        what: &'static str,
    },
    /// More vCPUs than a VM may have.
    #[error("-v {asked}: this KVM has at most {most} vCPUs in a VM")]
    TooManyVcpus {
        /// How many were asked for.
        asked: u32,
        /// How many there can be.
        most: u32,
    },
    /// The memory does not fit into this computer.
    #[error("the guest needs {needed} and this computer has {available} to spare: give less")]
    NotEnough {
        /// The need, with its unit.
        needed: String,
        /// The part of it that there is.
        available: String,
    },
    /// The host has no memory of that kind.
    #[error("-s {backing}: {why}")]
    Backing {
        /// Its name.
        backing: &'static str,
        /// Why there is none.
        why: String,
    },
    /// A request of the ring that KVM refuses.
    #[error("--ring {entries}: a power of two from {least} to {most}")]
    Ring {
        /// How many entries were asked for.
        entries: u32,
        /// The fewest.
        least: u32,
        /// The most.
        most: u32,
    },
    /// The memory's place has no addresses.
    #[error("the guest's memory ends at {end:#x}, and this KVM has {bits} bits of address")]
    Address {
        /// Its end.
        end: u64,
        /// Bits of a guest's physical address.
        bits: u32,
    },
    /// The memory's place has things of the guest's own.
    #[error("the guest's memory begins at {first:#x}, and its code and tables end at {least:#x}")]
    Low {
        /// Its beginning.
        first: u64,
        /// The first address that is free.
        least: u64,
    },
    /// A CPU that a thread cannot be bound to.
    #[error("-c {cpu}: this process may not run on that CPU")]
    Cpu {
        /// Which.
        cpu: usize,
    },
    /// A call that should have gone through did not.
    #[error("{call}: {error}")]
    Call {
        /// Which.
        call: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
    /// The guest left for another reason than its end.
    #[error("vCPU {vcpu} stopped: {why}")]
    Guest {
        /// Which.
        vcpu: u32,
        /// KVM's reason.
        why: String,
    },
    /// The log does not say what the guest wrote.
    #[error(
        "{phase}: the log has {got} pages where the guest wrote {wrote}: it lacks {lacks} and has \
         {more} more; the first that differs is page {first} of the memory"
    )]
    Log {
        /// When.
        phase: String,
        /// Pages in the log.
        got: u64,
        /// Pages written.
        wrote: u64,
        /// Of those, pages that are not in the log.
        lacks: u64,
        /// Pages in the log that cannot have been written.
        more: u64,
        /// The number of the first page of which they differ.
        first: u64,
    },
}

impl Error {
    /// Another command line, another user or another computer would help.
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::Call { .. } | Self::Guest { .. } | Self::Log { .. })
    }

    /// Returns the kernel's error for the last call.
    pub(crate) fn last(call: &'static str) -> Self {
        Self::Call { call, error: io::Error::last_os_error() }
    }

    /// Converts an error of the KVM crate.
    pub(crate) fn of(call: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::Call { call, error: io::Error::from_raw_os_error(error.errno()) }
    }
}
