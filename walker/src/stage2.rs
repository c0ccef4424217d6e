//! arm64 stage 2: the VMSAv8-64 descriptors that translate what a guest takes for physical.
//!
//! Which kind of descriptor it is, where addresses stand and how long runs are is as in [stage
//! 1](crate::arm64). The rest of a leaf (DDI 0487 D8.3.1):
//!
//! | bits | field | section |
//! |---|---|---|
//! | 5:2 | MemAttr | D8.6.5, D8.6.6 |
//! | 6 | S2AP\[0\]: reading | D8.4.1 |
//! | 7 | S2AP\[1\]: writing | D8.4.1 |
//! | 9:8 | SH, where it is no address; 01 is reserved | D8.6 |
//! | 10 | AF | D8.5.1 |
//! | 11 | FnXS (FEAT_XS) | |
//! | 16 | nT, in a block | D8.7 |
//! | 50 | RES0 | D8.3.1 |
//! | 51 | DBM: a write sets S2AP\[1\] | D8.5.2 |
//! | 52 | Contiguous | D8.7.1 |
//! | 54:53 | XN: 00 both ELs execute, 01 EL0 alone, 10 neither, 11 EL1 alone (FEAT_XNX) | D8.4.3 |
//! | 58:55 | software | D8.3.1 |
//! | 62:59 | PBHA, or ignored | D8.7 |
//! | 63 | ignored | D8.3.1 |
//!
//! Both exception levels read and write alike. Table descriptors restrict nothing: bits 63:59 are
//! RES0.
//!
//! # Memory types (D8.6.5, D8.6.6)
//!
//! Without FEAT_S2FWB, MemAttr\[3:2\] = 00 is a device; otherwise it is the outer, MemAttr\[1:0\]
//! the inner cacheability, for which 00 is reserved. With it, MemAttr\[3\] is RES0; MemAttr\[2\] =
//! 0 is a device; 101 is non-cacheable, 110 write-back, 111 what stage 1 says, 100 reserved.

use crate::arm64::{AF, DBM, Form, Layout, SOFTWARE};
use crate::regime::Shape;
use crate::walk::Format;
use crate::{Access, Denied, Descriptor, DirtyState, Granule, Leaf, Permissions};

const S2AP_READ: u64 = 1 << 6;
const S2AP_WRITE: u64 = 1 << 7;
const LEAF_RES0: u64 = 1 << 50;
const TABLE_RES0: u64 = 1 << 50 | !0 << 59;

/// The format of one granule and one size of input and output.
#[derive(Clone, Copy)]
pub(crate) struct Stage2 {
    layout: Layout,
    shape: Shape,
    forced_write_back: bool,
}

impl Stage2 {
    pub(crate) const fn new(
        granule: Granule,
        input_bits: u8,
        wide: bool,
        forced_write_back: bool,
    ) -> Self {
        Self {
            layout: Layout::new(granule, wide),
            shape: Shape::arm64_stage2(granule, input_bits as u32, wide),
            forced_write_back,
        }
    }

    #[inline(always)]
    const fn run(&self, depth: u32) -> usize {
        self.layout.granule.run(depth, self.shape)
    }

    #[inline(always)]
    fn leaf(&self, depth: u32, va: u64, descriptor: u64) -> Descriptor {
        let memory = descriptor >> 2 & 0xf;
        let known = match (self.forced_write_back, memory) {
            (true, 0b1000.. | 0b0100) | (false, 0b0100 | 0b1000 | 0b1100) => false,
            (true | false, _) => true,
        };
        if !known {
            return Descriptor::Reserved("a reserved memory type");
        }
        let run = self.run(depth);
        let extent = match self.layout.extent(self.shape, depth, run, descriptor, LEAF_RES0) {
            Ok(extent) => extent,
            Err(why) => return Descriptor::Reserved(why),
        };
        let execute_never = descriptor >> 53 & 0b11;
        let both = Permissions {
            read: descriptor & S2AP_READ != 0,
            write: descriptor & S2AP_WRITE != 0,
            execute: execute_never == 0b00,
        };
        Descriptor::Leaf(Leaf {
            va,
            pa: extent.pa,
            size: extent.size,
            level: self.shape.level(depth),
            contiguous: extent.contiguous,
            run_size: extent.run_size,
            access: Access {
                privileged: Permissions { execute: both.execute || execute_never == 0b11, ..both },
                user: Permissions { execute: both.execute || execute_never == 0b01, ..both },
            },
            global: false,
            memory: memory as u8,
            shareability: extent.shareability,
            accessed: descriptor & AF != 0,
            dirty: DirtyState::Arm64 {
                dbm: descriptor & DBM != 0,
                read_only: descriptor & S2AP_WRITE == 0,
            },
            software: ((descriptor & SOFTWARE) >> 55) as u16,
            key: (descriptor >> 59 & 0xf) as u8,
            raw: descriptor,
        })
    }
}

impl Format for Stage2 {
    #[inline(always)]
    fn shape(&self) -> Shape {
        self.shape
    }

    #[inline(always)]
    fn decode(&self, depth: u32, va: u64, _: Denied, descriptor: u64) -> Descriptor {
        match self.layout.form(depth, descriptor) {
            Form::Invalid => Descriptor::Invalid,
            Form::Table => match self.layout.table(descriptor, TABLE_RES0) {
                Ok(pa) => Descriptor::Table { pa, denied: Denied::NONE },
                Err(why) => Descriptor::Reserved(why),
            },
            Form::Leaf => self.leaf(depth, va, descriptor),
            Form::Reserved(why) => Descriptor::Reserved(why),
        }
    }

    #[inline(always)]
    fn used(&self, leaf: u64) -> u64 {
        leaf | AF
    }

    /// No access flag in tables: FEAT_HAFT is off.
    #[inline(always)]
    fn table_used(&self, table: u64) -> u64 {
        table
    }

    #[inline(always)]
    fn written(&self, leaf: u64) -> u64 {
        if leaf & DBM == 0 { leaf } else { leaf | S2AP_WRITE }
    }

    #[inline(always)]
    fn check_run(
        &self,
        depth: u32,
        index: usize,
        previous: u64,
        descriptor: u64,
    ) -> Result<(), &'static str> {
        self.layout.check_run(self.shape, depth, self.run(depth), index, previous, descriptor)
    }
}
