//! x86-64: the entries of long-mode paging, with 4 or 5 levels.
//!
//! # Which kind of entry (SDM vol. 3A 5.5.4; APM vol. 2 5.3)
//!
//! Bit 0 (P) clear: not present, the other bits belong to software. At level 1 bit 7 is PAT and
//! every present entry maps 4 KiB. At levels 2 and 3 bit 7 is PS: set, the entry maps 2 MiB or 1
//! GiB; clear, it points to a table. At levels 4 and 5 bit 7 is reserved and must be clear.
//!
//! # The fields (SDM vol. 3A 5.5.4)
//!
//! | bits | field | section |
//! |---|---|---|
//! | 1 | R/W | 5.6.1 |
//! | 2 | U/S | 5.6.1 |
//! | 3, 4 | PWT, PCD: bits 0, 1 of the PAT index; of a table, the type of accesses to it | 5.9.2 |
//! | 5 | A | 5.8 |
//! | 6 | D in a leaf, ignored in a table entry | 5.8 |
//! | 7 or 12 | PAT, bit 2 of the PAT index: bit 7 at level 1, bit 12 in a larger page | 5.9.2 |
//! | 8 | G in a leaf, ignored in a table entry | 5.10.2.4 |
//! | 11:9 | software | |
//! | 20:13, 29:13 | reserved in a 2 MiB, 1 GiB page | |
//! | 51:12 | the address, from the lowest bit that the entry resolves | |
//! | 58:52 | software | |
//! | 62:59 | protection key of a leaf, with CR4.PKE or CR4.PKS; else ignored | 5.6.2 |
//! | 63 | XD (AMD: NX) | 5.6.1 |
//!
//! # Permissions (SDM vol. 3A 5.6.1; APM vol. 2 5.6)
//!
//! A page may be written when R/W is set at every level, is open to user mode when U/S is set at
//! every level, and may be executed when XD is clear at every level. Supervisor mode reads every
//! page and, with CR0.WP set, is bound by R/W.
//!
//! # Addresses (SDM vol. 1 3.3.7.1)
//!
//! An address is canonical when the bits above the input address all equal its highest bit.

use crate::regime::Shape;
use crate::walk::Format;
use crate::{Access, Denied, Descriptor, DirtyState, Leaf, Permissions};

const P: u64 = 1 << 0;
const RW: u64 = 1 << 1;
const US: u64 = 1 << 2;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const G: u64 = 1 << 8;
const XD: u64 = 1 << 63;

/// The end of the address field: MAXPHYADDR is at most 52.
const ADDRESS_END: u32 = 52;

/// The format with 4 or 5 levels.
#[derive(Clone, Copy)]
pub(crate) struct Paging {
    shape: Shape,
}

impl Paging {
    pub(crate) const fn new(levels: u8) -> Self {
        Self { shape: Shape::x86_64(levels) }
    }

    pub(crate) const fn nested(levels: u8) -> Self {
        Self { shape: Shape::nested(levels) }
    }

    #[inline(always)]
    fn leaf(&self, depth: u32, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
        let shift = self.shape.shift(depth);
        // Bit 12 of a larger page is PAT; from there to the address nothing may be set.
        if depth > 0 && descriptor & ((1 << shift) - (1 << 13)) != 0 {
            return Descriptor::Reserved("a reserved bit below the address of a large page is set");
        }
        let pat = descriptor >> if depth > 0 { 12 } else { 7 } & 1;
        let Denied(denied) = denied.union(denials(descriptor));
        let write = denied & RW == 0;
        let user = denied & US == 0;
        let execute = denied & XD == 0;
        Descriptor::Leaf(Leaf {
            va,
            pa: address(descriptor, shift),
            size: 1 << shift,
            level: self.shape.level(depth),
            contiguous: false,
            run_size: 1 << shift,
            access: Access {
                privileged: Permissions { read: true, write, execute },
                user: Permissions { read: user, write: user && write, execute: user && execute },
            },
            global: descriptor & G != 0,
            memory: (pat << 2 | descriptor >> 3 & 0b11) as u8,
            shareability: None,
            accessed: descriptor & A != 0,
            dirty: DirtyState::Bit { dirty: descriptor & D != 0 },
            software: (descriptor >> 9 & 0x7 | (descriptor >> 52 & 0x7f) << 3) as u16,
            key: (descriptor >> 59 & 0xf) as u8,
            raw: descriptor,
        })
    }
}

/// The address field, of which bit `low` is the lowest.
#[inline(always)]
const fn address(descriptor: u64, low: u32) -> u64 {
    descriptor & ((1 << ADDRESS_END) - (1 << low))
}

/// The rights that an entry withholds: R/W or U/S that it lacks, XD that it has.
#[inline(always)]
const fn denials(descriptor: u64) -> Denied {
    Denied((descriptor ^ (RW | US)) & (RW | US | XD))
}

impl Format for Paging {
    #[inline(always)]
    fn shape(&self) -> Shape {
        self.shape
    }

    #[inline(always)]
    fn decode(&self, depth: u32, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
        if descriptor & P == 0 {
            return Descriptor::Invalid;
        }
        match (depth, descriptor & PS != 0) {
            (0, _) | (1 | 2, true) => self.leaf(depth, va, denied, descriptor),
            (3.., true) => Descriptor::Reserved("PS is reserved at levels 4 and 5"),
            (_, false) => Descriptor::Table {
                pa: address(descriptor, self.shape.page_shift),
                denied: denials(descriptor),
            },
        }
    }

    #[inline(always)]
    fn used(&self, leaf: u64) -> u64 {
        leaf | A
    }

    #[inline(always)]
    fn table_used(&self, table: u64) -> u64 {
        table | A
    }

    #[inline(always)]
    fn written(&self, leaf: u64) -> u64 {
        if leaf & RW == 0 { leaf } else { leaf | D }
    }
}
