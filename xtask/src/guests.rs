//! Several guests in one boot: how many of each kind, and where they are.

use std::path::PathBuf;

use crate::tools::loader;

/// The memory of a small guest, and of the image that all of them are copied from, in MiB.
const SMALL: u64 = 8;
const IMAGE: u64 = 2;

/// Several guests.
#[derive(Clone, Debug)]
pub struct Several {
    /// Those that boot a kernel.
    pub kernels: u8,
    /// The memory of each of these, in MiB.
    pub memory: u64,
    /// Small ones.
    pub small: u8,
    /// The image of those.
    pub image: PathBuf,
    /// Bits of a VMID.
    pub bits: u8,
    /// How long they go on.
    pub seconds: u32,
}

impl Several {
    /// The memory of all, in MiB.
    pub fn all_memory(&self) -> u64 {
        self.of_guests() + IMAGE
    }

    fn of_guests(&self) -> u64 {
        u64::from(self.kernels) * self.memory + u64::from(self.small) * SMALL
    }

    /// The number of all.
    pub fn count(&self) -> u64 {
        u64::from(self.kernels + self.small)
    }

    /// Returns the hypervisor's options.
    pub fn options(&self) -> String {
        let Self { kernels, memory, small, bits, seconds, .. } = self;
        format!(
            " kernels={kernels} memory={memory} small={small} vmid_bits={bits} seconds={seconds}"
        )
    }

    /// Returns QEMU's device that loads the image behind the guests' memory, which is at `first`.
    pub fn loader(&self, first: u64) -> String {
        loader(&self.image, first + (self.of_guests() << 20))
    }
}
