//! KVM's counts of a VM and of its vCPUs, by the names that it gives.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

use crate::error::Error;

/// `_IO(KVMIO, 0xce)`.
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;
/// Bits of a statistic's flags: what kind it is, and that it is a plain counter.
const KIND: u32 = 0xf;
const CUMULATIVE: u32 = 0;
const INSTANT: u32 = 1;
/// No kernel has more, and a length that is no length is never allocated.
const MOST: u32 = 4096;

/// Counts by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts(pub BTreeMap<String, i64>);

impl Counts {
    /// Returns the difference since `before`, without counts that stayed as they are.
    pub fn since(&self, before: &Self) -> Self {
        let difference = |(name, now): (&String, &i64)| {
            let difference = now - before.0.get(name).unwrap_or(&0);
            (difference != 0).then(|| (name.clone(), difference))
        };
        Self(self.0.iter().filter_map(difference).collect())
    }

    /// One of them; zero if it is not there.
    pub fn of(&self, name: &str) -> i64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    fn add(&mut self, name: &str, count: i64) {
        match self.0.get_mut(name) {
            Some(sum) => *sum += count,
            None => {
                self.0.insert(name.to_owned(), count);
            }
        }
    }
}

/// The statistics of one descriptor, a VM's or a vCPU's.
#[derive(Debug)]
pub struct Stats {
    file: File,
    /// Name, and where the value is.
    known: Vec<(String, u64)>,
}

impl Stats {
    /// Those of a VM or a vCPU.
    ///
    /// # Errors
    /// The kernel has no such statistics (they came with Linux 5.14).
    pub fn of(descriptor: &impl AsRawFd) -> Result<Self, Error> {
        // SAFETY: `ioctl`: without an argument; the descriptor is open.
        let stats = unsafe { libc::ioctl(descriptor.as_raw_fd(), KVM_GET_STATS_FD as _) };
        if stats < 0 {
            return Err(Error::last("KVM_GET_STATS_FD"));
        }
        // SAFETY: the descriptor is new, and no one else's.
        let file = unsafe { File::from_raw_fd(stats) };
        let read = |error| Error::Call { call: "KVM statistics", error };
        // struct kvm_stats_header: flags, name_size, num_desc, id_offset, desc_offset, data_offset.
        let mut header = [0; 24];
        file.read_exact_at(&mut header, 0).map_err(read)?;
        let word = |bytes: &[u8], at: usize| {
            let word = bytes.get(at..at + 4).and_then(|it| it.try_into().ok());
            u32::from_le_bytes(word.unwrap_or_default())
        };
        let name_size = word(&header, 4).min(MOST) as usize;
        let (count, first, data) =
            (word(&header, 8).min(MOST), word(&header, 16), word(&header, 20));
        // struct kvm_stats_desc: flags, exponent and size, offset, bucket_size, name.
        let size = 16 + name_size;
        let mut bytes = vec![0; size * count as usize];
        file.read_exact_at(&mut bytes, first.into()).map_err(read)?;
        let mut known = Vec::new();
        for descriptor in bytes.chunks_exact(size) {
            let kind = word(descriptor, 0) & KIND;
            let items = word(descriptor, 4) >> 16;
            if items != 1 || (kind != CUMULATIVE && kind != INSTANT) {
                continue;
            }
            let name = descriptor.get(16..).unwrap_or_default();
            let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
            let name = String::from_utf8_lossy(&name[..end]).into_owned();
            known.push((name, u64::from(data) + u64::from(word(descriptor, 8))));
        }
        Ok(Self { file, known })
    }

    /// Adds what is counted now.
    pub fn add_to(&self, counts: &mut Counts) {
        for (name, at) in &self.known {
            let mut value = [0; 8];
            if self.file.read_exact_at(&mut value, *at).is_ok() {
                counts.add(name, i64::from_le_bytes(value));
            }
        }
    }
}
