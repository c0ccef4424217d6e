//! EPT: the extended page tables of Intel's VMX, with 4 or 5 levels.
//!
//! # Which kind of entry (SDM vol. 3C 29.3.2)
//!
//! Bits 2:0 clear, and with mode-based execute control bit 10 too: not present. At level 1 every
//! present entry maps 4 KiB, and bit 7 is ignored. At levels 2 and 3 bit 7 set maps 2 MiB or 1 GiB,
//! clear points to a table. At levels 4 and 5 bit 7 is reserved.
//!
//! # The fields (SDM vol. 3C 29.3.2)
//!
//! | bits | field | section |
//! |---|---|---|
//! | 0, 1 | reading, writing | 29.3.2 |
//! | 2 | executing; with mode-based control, from supervisor-mode addresses | 29.3.2 |
//! | 5:3 | memory type of a leaf: 0 UC, 1 WC, 4 WT, 5 WP, 6 WB; reserved in a table | 29.3.7 |
//! | 6 | ignore PAT, in a leaf; reserved in a table entry | 29.3.7 |
//! | 8 | A | 29.3.5 |
//! | 9 | D in a leaf, ignored in a table entry | 29.3.5 |
//! | 10 | executing from user-mode addresses, with mode-based control; else ignored | 29.3.2 |
//! | 20:12, 29:12 | reserved in a 2 MiB, 1 GiB page | |
//! | 51:12 | the address, from the lowest bit that the entry resolves | |
//! | 57, 58, 60, 61 | leaf: verify guest paging, paging-write, shadow stack, sub-page write | |
//! | 63 | suppress #VE | 25.5.7 |
//! | 11, 56:52, 59, 62 | ignored | |
//!
//! # Permissions and misconfigurations
//!
//! What a page permits is what every level grants (29.3.2). A present entry is misconfigured, and
//! ends the walk whatever the access (29.3.3.1), when it can be written and not read, when a
//! reserved bit is set, and when a leaf's memory type is 2, 3 or 7.

use crate::regime::Shape;
use crate::walk::Format;
use crate::{Access, Denied, Descriptor, DirtyState, Leaf, Permissions};

const R: u64 = 1 << 0;
const W: u64 = 1 << 1;
const X: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const A: u64 = 1 << 8;
const D: u64 = 1 << 9;
const XU: u64 = 1 << 10;

/// The format with 4 or 5 levels.
#[derive(Clone, Copy)]
pub(crate) struct Ept {
    shape: Shape,
    /// The bits that grant a right.
    rights: u64,
}

impl Ept {
    pub(crate) const fn new(levels: u8, mode_based: bool) -> Self {
        Self { shape: Shape::nested(levels), rights: R | W | X | if mode_based { XU } else { 0 } }
    }

    /// The rights that an entry lacks.
    #[inline(always)]
    const fn denials(&self, descriptor: u64) -> Denied {
        Denied(!descriptor & self.rights)
    }

    #[inline(always)]
    fn leaf(&self, depth: u32, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
        let shift = self.shape.shift(depth);
        if descriptor & ((1 << shift) - (1 << 12)) != 0 {
            return Descriptor::Reserved("a reserved bit below the address of a large page is set");
        }
        let memory = descriptor >> 3 & 0b111;
        if matches!(memory, 2 | 3 | 7) {
            return Descriptor::Reserved("a reserved memory type");
        }
        let Denied(denied) = denied.union(self.denials(descriptor));
        let may = |right: u64| denied & right == 0;
        let class =
            |execute: u64| Permissions { read: may(R), write: may(W), execute: may(execute) };
        Descriptor::Leaf(Leaf {
            va,
            pa: address(descriptor, shift),
            size: 1 << shift,
            level: self.shape.level(depth),
            contiguous: false,
            run_size: 1 << shift,
            access: Access {
                privileged: class(X),
                user: class(if self.rights & XU == 0 { X } else { XU }),
            },
            global: false,
            memory: memory as u8,
            shareability: None,
            accessed: descriptor & A != 0,
            dirty: DirtyState::Bit { dirty: descriptor & D != 0 },
            software: (descriptor >> 11 & 1 | (descriptor >> 52 & 0x1f) << 1) as u16,
            key: (descriptor >> 59 & 0xf) as u8,
            raw: descriptor,
        })
    }
}

/// The address field, of which bit `low` is the lowest.
#[inline(always)]
const fn address(descriptor: u64, low: u32) -> u64 {
    descriptor & ((1 << 52) - (1 << low))
}

impl Format for Ept {
    #[inline(always)]
    fn shape(&self) -> Shape {
        self.shape
    }

    #[inline(always)]
    fn decode(&self, depth: u32, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
        if descriptor & self.rights == 0 {
            return Descriptor::Invalid;
        }
        if descriptor & (R | W) == W {
            return Descriptor::Reserved("an entry that can be written and not read");
        }
        match (depth, descriptor & LARGE != 0) {
            (0, _) | (1 | 2, true) => self.leaf(depth, va, denied, descriptor),
            _ if descriptor & (LARGE | 0x78) != 0 => {
                Descriptor::Reserved("a reserved bit of a table entry is set")
            }
            _ => Descriptor::Table {
                pa: address(descriptor, self.shape.page_shift),
                denied: self.denials(descriptor),
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
        if leaf & W == 0 { leaf } else { leaf | D }
    }
}
