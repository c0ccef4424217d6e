//! The answers of CPUID (SDM vol. 2A, CPUID; APM vol. 3, appendix E).

use crate::addr::Level;
use crate::platform::Caps;

/// Features of translation, of CPUID.
///
/// ```
/// use tablewright::arch::x86_64::Features;
/// let gigabytes = Features { gigabyte_pages: true, ..Features::LEAST };
/// assert_eq!(gigabytes.and(Features::LEAST), Features::LEAST);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Significant bits of a physical address.
    pub physical_bits: u8,
    /// Pages of 1 GiB.
    pub gigabyte_pages: bool,
    /// Five levels of tables (`CR4.LA57`).
    pub five_levels: bool,
    /// Identifiers of spaces (`CR4.PCIDE`).
    pub pcid: bool,
    /// INVPCID.
    pub invpcid: bool,
    /// Global translations (`CR4.PGE`).
    pub global: bool,
    /// Pages that are not executed (`EFER.NXE`).
    pub no_execute: bool,
    /// The supervisor does not execute pages of the user (`CR4.SMEP`).
    pub smep: bool,
    /// INVLPGB and TLBSYNC, with so many addresses at most *besides the first*.
    pub invlpgb: Option<u16>,
}

impl Features {
    /// Features of every processor that runs in 64-bit mode.
    pub const LEAST: Self = Self {
        physical_bits: 36,
        gigabyte_pages: false,
        five_levels: false,
        pcid: false,
        invpcid: false,
        global: true,
        no_execute: false,
        smep: false,
        invlpgb: None,
    };

    /// Reads the leaves of CPUID: EAX, EBX, ECX and EDX of a leaf and a sub-leaf.
    ///
    /// ```
    /// use tablewright::arch::x86_64::Features;
    /// let features = Features::from_cpuid(|leaf, _| match leaf {
    ///     0x8000_0000 => [0x8000_0008, 0, 0, 0],
    ///     0x8000_0001 => [0, 0, 0, 1 << 26],
    ///     0x8000_0008 => [0x3028, 0, 0, 0],
    ///     _ => [0; 4],
    /// });
    /// assert!(features.gigabyte_pages && features.physical_bits == 40);
    /// ```
    pub fn from_cpuid(mut cpuid: impl FnMut(u32, u32) -> [u32; 4]) -> Self {
        // The highest leaves that there are; what is said beyond is of another leaf.
        let [most, ..] = cpuid(0, 0);
        let [most_extended, ..] = cpuid(0x8000_0000, 0);
        let mut leaf = |number: u32| {
            let most = if number >> 31 == 0 { most } else { most_extended };
            if number <= most { cpuid(number, 0) } else { [0; 4] }
        };
        let has = |register: u32, bit: u32| register >> bit & 1 != 0;
        let [_, _, ecx_1, edx_1] = leaf(1);
        let [_, ebx_7, ecx_7, _] = leaf(7);
        let [_, _, _, edx_extended] = leaf(0x8000_0001);
        let [eax_sizes, ebx_sizes, _, edx_sizes] = leaf(0x8000_0008);
        Self {
            physical_bits: match eax_sizes & 0xff {
                0 => Self::LEAST.physical_bits,
                bits => bits.min(52) as u8,
            },
            gigabyte_pages: has(edx_extended, 26),
            five_levels: has(ecx_7, 16),
            pcid: has(ecx_1, 17),
            invpcid: has(ebx_7, 10),
            global: has(edx_1, 13),
            no_execute: has(edx_extended, 20),
            smep: has(ebx_7, 7),
            invlpgb: has(ebx_sizes, 3).then_some((edx_sizes & 0xffff) as u16),
        }
    }

    /// The features that both processors have.
    pub const fn and(self, other: Self) -> Self {
        let physical_bits = if self.physical_bits < other.physical_bits {
            self.physical_bits
        } else {
            other.physical_bits
        };
        Self {
            physical_bits,
            gigabyte_pages: self.gigabyte_pages && other.gigabyte_pages,
            five_levels: self.five_levels && other.five_levels,
            pcid: self.pcid && other.pcid,
            invpcid: self.invpcid && other.invpcid,
            global: self.global && other.global,
            no_execute: self.no_execute && other.no_execute,
            smep: self.smep && other.smep,
            invlpgb: match (self.invlpgb, other.invlpgb) {
                (Some(a), Some(b)) => Some(if a < b { a } else { b }),
                _ => None,
            },
        }
    }

    /// Returns the capabilities that the engine has to know.
    ///
    /// *Everything instead of pages*: from 34 pages on, which is where Linux was measured to be
    /// better off on x86 (`tlb_single_page_flush_ceiling`, in its documentation of the TLB).
    pub const fn caps(self) -> Caps {
        Caps {
            largest_leaf: Level::new(if self.gigabyte_pages { 2 } else { 1 }),
            hardware_access: true,
            hardware_dirty: true,
            invalidate_all_above: 33,
            ..Caps::CONSERVATIVE
        }
    }
}

/// Features of EPT, of `IA32_VMX_EPT_VPID_CAP` (MSR 48CH; SDM vol. 3D, appendix A.10).
///
/// ```
/// use tablewright::arch::x86_64::EptFeatures;
/// let features = EptFeatures(1 << 6 | 1 << 16 | 1 << 21);
/// assert!(features.has_levels(4) && !features.has_levels(5) && features.has_flags());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EptFeatures(pub u64);

impl EptFeatures {
    const fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 != 0
    }

    /// Tables of 4 or 5 levels.
    pub const fn has_levels(self, levels: u8) -> bool {
        match levels {
            4 => self.has(6),
            5 => self.has(7),
            _ => false,
        }
    }

    /// Accessed and dirty flags, which hardware sets if the [EPTP](super::eptp) says so.
    pub const fn has_flags(self) -> bool {
        self.has(21)
    }

    /// Returns the capabilities that the engine has to know.
    pub const fn caps(self) -> Caps {
        Caps {
            largest_leaf: Level::new(match (self.has(16), self.has(17)) {
                (_, true) => 2,
                (true, false) => 1,
                (false, false) => 0,
            }),
            hardware_access: self.has_flags(),
            hardware_dirty: self.has_flags(),
            ..Caps::CONSERVATIVE
        }
    }
}
