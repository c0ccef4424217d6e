//! The shape of a page table: how many levels, how many entries in a table, which leaves there are.
//!
//! Only the arithmetic that sizes an experiment. What the bits of an entry mean is the engine's
//! business.

use clap::ValueEnum;
use serde::Serialize;

/// The architecture that the page tables are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
pub enum Architecture {
    /// 64-bit Arm, stage 1
    #[value(name = "arm64")]
    #[serde(rename = "arm64")]
    Arm64,
    /// 64-bit x86
    #[value(name = "x86-64")]
    #[serde(rename = "x86-64")]
    X86_64,
    /// 64-bit RISC-V, Sv48 unless --address-bits says otherwise
    #[value(name = "riscv64")]
    #[serde(rename = "riscv64")]
    Riscv64,
}

impl Architecture {
    /// Its name, as on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Arm64 => "arm64",
            Self::X86_64 => "x86-64",
            Self::Riscv64 => "riscv64",
        }
    }

    /// Whether both halves of the addresses hang on one root.
    pub const fn has_one_root(self) -> bool {
        matches!(self, Self::X86_64 | Self::Riscv64)
    }

    /// The sizes of an address, and their names.
    const fn address_bits(self) -> (&'static [u32], &'static str) {
        match self {
            Self::Arm64 => (&[48, 52], "48 or 52"),
            Self::X86_64 => (&[48, 57], "48 (four levels) or 57 (five levels)"),
            Self::Riscv64 => (&[39, 48, 57], "39, 48 or 57 (Sv39, Sv48, Sv57)"),
        }
    }

    /// The architecture this program runs on.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") {
        Self::Arm64
    } else if cfg!(target_arch = "riscv64") {
        Self::Riscv64
    } else {
        Self::X86_64
    };
}

/// The smallest page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
pub enum Granule {
    /// 4 KiB
    #[value(name = "4K", alias = "4k")]
    #[serde(rename = "4K")]
    K4,
    /// 16 KiB (arm64)
    #[value(name = "16K", alias = "16k")]
    #[serde(rename = "16K")]
    K16,
    /// 64 KiB (arm64)
    #[value(name = "64K", alias = "64k")]
    #[serde(rename = "64K")]
    K64,
}

impl Granule {
    /// The size of a page, for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::K4 => "4 KiB",
            Self::K16 => "16 KiB",
            Self::K64 => "64 KiB",
        }
    }
}

/// A combination that no processor has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Only Arm has other granules.
    #[error("{0} has pages of 4K only: leave out --granule, or use --format arm64")]
    Granule(&'static str),
    /// The width of addresses differs by architecture.
    #[error("{0} has no addresses of {1} bits: --address-bits is {2}")]
    AddressBits(&'static str, u32, &'static str),
}

/// The shape of a page table. Levels are counted from the leaves: level 0 is the table of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    architecture: Architecture,
    granule: Granule,
    address_bits: u32,
}

impl Format {
    /// 4 KiB pages, four levels of 512 entries: the one shape that all published crates share.
    pub const COMMON: Self =
        Self { architecture: Architecture::X86_64, granule: Granule::K4, address_bits: 48 };

    /// The format with that many bits in a virtual address, if there is one.
    pub fn new(
        architecture: Architecture,
        granule: Granule,
        address_bits: u32,
    ) -> Result<Self, FormatError> {
        let (name, (sizes, words)) = (architecture.name(), architecture.address_bits());
        if architecture != Architecture::Arm64 && granule != Granule::K4 {
            return Err(FormatError::Granule(name));
        }
        if !sizes.contains(&address_bits) {
            return Err(FormatError::AddressBits(name, address_bits, words));
        }
        Ok(Self { architecture, granule, address_bits })
    }

    /// The architecture of the format.
    pub const fn architecture(self) -> Architecture {
        self.architecture
    }

    /// The smallest page, by name.
    pub const fn granule(self) -> Granule {
        self.granule
    }

    /// Bits in a virtual address.
    pub const fn address_bits(self) -> u32 {
        self.address_bits
    }

    /// The logarithm of the page size, which is also the size of a table.
    pub const fn page_shift(self) -> u32 {
        match self.granule {
            Granule::K4 => 12,
            Granule::K16 => 14,
            Granule::K64 => 16,
        }
    }

    /// Bytes in a page, and in a table.
    pub const fn page_bytes(self) -> u64 {
        1 << self.page_shift()
    }

    /// Eight-byte entries in a table.
    pub const fn entries_per_table(self) -> u64 {
        self.page_bytes() / 8
    }

    /// The logarithm of the bytes that one entry of a table at `level` covers.
    pub const fn entry_shift(self, level: u32) -> u32 {
        self.page_shift() + level * (self.page_shift() - 3)
    }

    /// How many levels of tables there are.
    pub const fn levels(self) -> u32 {
        (self.address_bits - self.page_shift()).div_ceil(self.page_shift() - 3)
    }

    /// Whether an entry at this level may be a leaf on every processor with this format.
    pub const fn has_leaf(self, level: u32) -> bool {
        match self.architecture {
            Architecture::X86_64 => level <= 2,
            Architecture::Riscv64 => level < self.levels(),
            Architecture::Arm64 => match self.granule {
                Granule::K4 => level <= 2,
                Granule::K16 | Granule::K64 => level <= 1,
            },
        }
    }

    /// The first physical address that cannot be mapped: what an entry can name, and what the
    /// kernel's half of the address space can hold beside everything else.
    pub const fn physical_end(self) -> u64 {
        match (self.architecture, self.address_bits) {
            // The kernel's half of the address space is one bit less than the whole.
            (Architecture::X86_64, 57) => 1 << 52,
            (Architecture::X86_64 | Architecture::Riscv64, bits) => 1 << (bits - 1),
            // Arm has one table for each half, and both are of the full width.
            (Architecture::Arm64, bits) => 1 << bits,
        }
    }

    /// Start of the linear map: physical address 0 is mapped there.
    pub const fn linear_base(self) -> u64 {
        !0 << (self.address_bits - self.architecture.has_one_root() as u32)
    }
}

/// How many tables, of all levels, it takes to map `ranges` (sorted, apart) with pages.
pub fn tables_of_pages(format: Format, ranges: &[(u64, u64)]) -> u64 {
    (0..format.levels()).map(|level| tables_at(format, level, ranges)).sum()
}

/// How many tables there are at a level then.
pub fn tables_at(format: Format, level: u32, ranges: &[(u64, u64)]) -> u64 {
    if level + 1 == format.levels() {
        return 1;
    }
    let shift = format.entry_shift(level + 1);
    let mut count = 0;
    let mut next_new = 0;
    for &(start, end) in ranges {
        let first = (start >> shift).max(next_new);
        let after = ((end - 1) >> shift) + 1;
        count += after.saturating_sub(first);
        next_new = after;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_those_of_the_manuals() {
        use Architecture::{Arm64, Riscv64, X86_64};
        use Granule::{K4, K16, K64};
        for (architecture, granule, bits, levels) in [
            (X86_64, K4, 48, 4),
            (X86_64, K4, 57, 5),
            (Arm64, K4, 48, 4),
            (Arm64, K4, 52, 5),
            (Arm64, K16, 48, 4),
            (Arm64, K16, 52, 4),
            (Arm64, K64, 48, 3),
            (Arm64, K64, 52, 3),
            (Riscv64, K4, 39, 3),
            (Riscv64, K4, 48, 4),
            (Riscv64, K4, 57, 5),
        ] {
            let format = Format::new(architecture, granule, bits).unwrap();
            assert_eq!(format.levels(), levels, "{format:?}");
        }
    }

    #[test]
    fn leaves_are_those_of_the_manuals() {
        let k16 = Format::new(Architecture::Arm64, Granule::K16, 48).unwrap();
        assert_eq!(k16.entry_shift(1), 25);
        let k64 = Format::new(Architecture::Arm64, Granule::K64, 48).unwrap();
        assert_eq!(k64.entry_shift(1), 29);
        assert_eq!(Format::COMMON.entry_shift(2), 30);
    }

    #[test]
    fn the_linear_map_starts_where_the_upper_half_does() {
        assert_eq!(Format::COMMON.linear_base(), 0xffff_8000_0000_0000);
        let arm = Format::new(Architecture::Arm64, Granule::K4, 48).unwrap();
        assert_eq!(arm.linear_base(), 0xffff_0000_0000_0000);
        let sv39 = Format::new(Architecture::Riscv64, Granule::K4, 39).unwrap();
        assert_eq!(sv39.linear_base(), 0xffff_ffc0_0000_0000);
        assert_eq!(sv39.physical_end(), 1 << 38);
    }
}
