//! Attributes in two words, as changes of attributes are made and as they are compared: field by
//! field it takes many times the code.

use super::{Attrs, Memory, Perms, Shareability};

/// [`Attrs`], packed into a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    /// All but the format's own bits; what is in no field is 0.
    pub word: u32,
    pub native: u64,
}

// The fields of the word. Flags and software bits are as far from each other as on x86-64, where
// they move as one.
pub(crate) const PERMS: u32 = 0x3f;
pub(crate) const MEMORY: u32 = 6; // the number of the variant, in 3 bits
pub(crate) const SHAREABILITY: u32 = 9; // the same, in 2 bits
pub(crate) const ACCESSED: u32 = 1 << 17;
pub(crate) const DIRTY: u32 = 1 << 18;
pub(crate) const GLOBAL: u32 = 1 << 20;
pub(crate) const SOFTWARE: u32 = 21; // 8 bits
/// How memory is cached and shared.
pub(crate) const TYPE: u32 = 7 << MEMORY | 3 << SHAREABILITY;

impl Packed {
    /// All fields of the word.
    pub const FIELDS: u32 = PERMS | TYPE | ACCESSED | DIRTY | GLOBAL | 0xff << SOFTWARE;

    #[inline]
    pub const fn of(attrs: &Attrs) -> Self {
        let word = attrs.perms.bits() as u32
            | (attrs.memory as u32) << MEMORY
            | (attrs.shareability as u32) << SHAREABILITY
            | (attrs.accessed as u32 * ACCESSED)
            | (attrs.dirty as u32 * DIRTY)
            | (attrs.global as u32 * GLOBAL)
            | (attrs.software as u32) << SOFTWARE;
        Self { word, native: attrs.native }
    }

    #[inline]
    pub const fn attrs(self) -> Attrs {
        Attrs {
            perms: self.perms(),
            memory: match self.word >> MEMORY & 7 {
                0 => Memory::Normal,
                1 => Memory::WriteThrough,
                2 => Memory::NonCacheable,
                3 => Memory::Device,
                4 => Memory::DeviceStrict,
                _ => Memory::Tagged,
            },
            shareability: match self.word >> SHAREABILITY & 3 {
                0 => Shareability::Non,
                1 => Shareability::Outer,
                _ => Shareability::Inner,
            },
            global: self.word & GLOBAL != 0,
            accessed: self.word & ACCESSED != 0,
            dirty: self.word & DIRTY != 0,
            software: (self.word >> SOFTWARE) as u8,
            native: self.native,
        }
    }

    #[inline]
    pub const fn perms(self) -> Perms {
        Perms::from_bits_truncate((self.word & PERMS) as u8)
    }

    /// In which fields two leaves differ, as far as it matters to a walker: software bits do not.
    /// The format's own bits may mean another physical address space (NS), or a type.
    #[inline]
    pub const fn differences(self, other: Self) -> u32 {
        let fields = (self.word ^ other.word) & !(0xff << SOFTWARE);
        match self.native == other.native {
            true => fields,
            false => fields | TYPE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_unpacked() {
        let types = [
            Memory::Normal,
            Memory::WriteThrough,
            Memory::NonCacheable,
            Memory::Device,
            Memory::DeviceStrict,
            Memory::Tagged,
        ];
        let domains = [Shareability::Non, Shareability::Outer, Shareability::Inner];
        extern crate std;
        let mut seen = std::collections::HashSet::new();
        let step = if cfg!(miri) { 37 } else { 1 };
        for bits in (0..1u32 << 9).step_by(step) {
            for memory in types {
                for shareability in domains {
                    for software in [0, 1, 5, 0x80, 0xff] {
                        let attrs = Attrs {
                            perms: Perms::from_bits_truncate(bits as u8 & 0x3f),
                            memory,
                            shareability,
                            global: bits & 0x40 != 0,
                            accessed: bits & 0x80 != 0,
                            dirty: bits & 0x100 != 0,
                            software,
                            native: u64::from(bits) << 50,
                        };
                        let packed = Packed::of(&attrs);
                        assert_eq!(packed.attrs(), attrs);
                        assert!(seen.insert((packed.word, packed.native)), "{attrs:?}");
                    }
                }
            }
        }
    }
}
