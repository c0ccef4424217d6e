//! RISC-V: the page-table entries of Sv39, Sv48 and Sv57, and of Sv39x4, Sv48x4 and Sv57x4, which
//! translate what a guest takes for physical (the G-stage of the hypervisor extension).
//!
//! Source: The RISC-V Instruction Set Manual, volume II, Privileged Architecture, version 20240411
//! (PRIV): 10.3 to 10.6 for stage 1, 11 for Svnapot, 12 for Svpbmt, 18.5 for the G-stage.
//!
//! # Which kind of entry (PRIV 10.3.2)
//!
//! Bit 0 (V) clear: invalid, the other bits belong to software. R, W and X clear: it points to a
//! table, and there is none below level 0. Otherwise it is a leaf, at any level, the root's
//! included.
//!
//! # The fields (PRIV 10.3.1, 10.4.1)
//!
//! | bits | field | section |
//! |---|---|---|
//! | 1, 2, 3 | R, W, X; W without R is reserved | 10.3.1 |
//! | 4 | U; reserved in a table; set in every leaf of the G-stage | 10.3.1, 18.5.1 |
//! | 5 | G: of a leaf; of a table, of all leaves below it; clear in the G-stage | 10.3.1, 18.5.1 |
//! | 6, 7 | A, D; reserved in a table | 10.3.1 |
//! | 9:8 | RSW: software | 10.3.1 |
//! | 53:10 | the page number; its low bits are clear in a larger leaf | 10.3.2 |
//! | 60:54 | reserved | 10.4.1 |
//! | 62:61 | PBMT of a leaf: 0 as the memory is, 1 NC, 2 IO; 3 reserved, and any in a table | 12 |
//! | 63 | N, of a leaf at level 0: 16 pages are one; bits 13:10 are 1000 | 11 |
//!
//! # Permissions (PRIV 10.3.1, 10.1.1.2)
//!
//! A table takes nothing away. The supervisor reads and writes pages of the user while
//! `sstatus.SUM` is set, and never executes them; the user has no others. What the G-stage permits
//! it permits to both of the guest.
//!
//! # A run of 16 pages (PRIV 11)
//!
//! Each of the 16 entries has the page number of the run, with its four low bits replaced by 1000;
//! those of the address stand in for them.

use crate::regime::{RISCV_RUN as RUN, Shape};
use crate::walk::Format;
use crate::{Access, Denied, Descriptor, DirtyState, Leaf, Permissions};

const V: u64 = 1 << 0;
const R: u64 = 1 << 1;
const W: u64 = 1 << 2;
const X: u64 = 1 << 3;
const U: u64 = 1 << 4;
const G: u64 = 1 << 5;
const A: u64 = 1 << 6;
const D: u64 = 1 << 7;
const RESERVED: u64 = 0x7f << 54;
const PBMT: u64 = 0b11 << 61;
const N: u64 = 1 << 63;

/// The low bits of the page number of its members.
const OF_RUN: u64 = 0b1000 << 10;
const LOW: u64 = 0b1111 << 10;

/// The format with 3, 4 or 5 levels.
#[derive(Clone, Copy)]
pub(crate) struct Sv {
    shape: Shape,
    guest: bool,
}

impl Sv {
    pub(crate) const fn new(levels: u8, guest: bool) -> Self {
        Self { shape: Shape::riscv(levels, guest), guest }
    }

    #[inline(always)]
    fn leaf(&self, depth: u32, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
        let shift = self.shape.shift(depth);
        let memory = (descriptor & PBMT) >> 61;
        let in_run = descriptor & N != 0;
        let wrong = if in_run && (depth > 0 || descriptor & LOW != OF_RUN) {
            Some("N is set where no run of 16 pages is")
        } else if memory == 3 {
            Some("a reserved memory type")
        } else if address(descriptor) & ((1 << shift) - 1) != 0 {
            Some("a bit of the page number below the address of a large leaf is set")
        } else if self.guest && descriptor & U == 0 {
            Some("a leaf of the G-stage without U")
        } else if self.guest && descriptor & G != 0 {
            Some("G is reserved in the G-stage")
        } else {
            None
        };
        if let Some(why) = wrong {
            return Descriptor::Reserved(why);
        }
        let size = 1 << shift;
        let run_size = if in_run { RUN as u64 * size } else { size };
        let has = |bit: u64| descriptor & bit != 0;
        let (read, write, execute) = (has(R), has(W), has(X));
        let nothing = Permissions { read: false, write: false, execute: false };
        let all = Permissions { read, write, execute };
        Descriptor::Leaf(Leaf {
            va,
            pa: address(descriptor) & !(run_size - 1) | va & (run_size - 1) & !(size - 1),
            size,
            level: self.shape.level(depth),
            contiguous: in_run,
            run_size,
            access: match (self.guest, has(U)) {
                (true, _) => Access { privileged: all, user: all },
                (false, true) => {
                    Access { privileged: Permissions { execute: false, ..all }, user: all }
                }
                (false, false) => Access { privileged: all, user: nothing },
            },
            global: (denied.0 | descriptor) & G != 0,
            memory: memory as u8,
            shareability: None,
            accessed: has(A),
            dirty: DirtyState::Bit { dirty: has(D) },
            software: (descriptor >> 8 & 0b11) as u16,
            key: 0,
            raw: descriptor,
        })
    }
}

/// The physical address of the page that is numbered.
#[inline(always)]
const fn address(descriptor: u64) -> u64 {
    (descriptor >> 10 & ((1 << 44) - 1)) << 12
}

impl Format for Sv {
    #[inline(always)]
    fn shape(&self) -> Shape {
        self.shape
    }

    #[inline(always)]
    fn decode(&self, depth: u32, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
        if descriptor & V == 0 {
            return Descriptor::Invalid;
        }
        if descriptor & RESERVED != 0 {
            return Descriptor::Reserved("one of bits 60:54 is set");
        }
        match descriptor & (R | W | X) {
            0 if depth == 0 => Descriptor::Reserved("a table in a table of pages"),
            0 if descriptor & (D | A | U | PBMT | N) != 0 => {
                Descriptor::Reserved("a reserved bit of a table entry is set")
            }
            0 => Descriptor::Table {
                pa: address(descriptor),
                // No right is taken away, but G holds for what is below.
                denied: Denied(descriptor & G),
            },
            rights if rights & (R | W) == W => {
                Descriptor::Reserved("an entry that can be written and not read")
            }
            _ => self.leaf(depth, va, denied, descriptor),
        }
    }

    #[inline(always)]
    fn used(&self, leaf: u64) -> u64 {
        leaf | A
    }

    #[inline(always)]
    fn table_used(&self, table: u64) -> u64 {
        table
    }

    #[inline(always)]
    fn written(&self, leaf: u64) -> u64 {
        if leaf & W == 0 { leaf } else { leaf | D }
    }

    #[inline(always)]
    fn check_run(
        &self,
        depth: u32,
        index: usize,
        previous: u64,
        descriptor: u64,
    ) -> Result<(), &'static str> {
        let in_run = |descriptor: u64| depth == 0 && descriptor & (V | N) == V | N;
        if index.is_multiple_of(RUN) || !in_run(previous) && !in_run(descriptor) {
            return Ok(());
        }
        // A flag may be set in any of them.
        match (previous ^ descriptor) & !(A | D | 0b11 << 8) {
            0 => Ok(()),
            _ => Err("a member of a run of 16 pages differs from the one before it"),
        }
    }
}
