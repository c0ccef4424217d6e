//! arm64 stage 1: the VMSAv8-64 descriptors of the EL1&0 regime and of EL2; and what stage 2 has in
//! common with them, the [`Layout`].
//!
//! # Which kind of descriptor (DDI 0487 D8.3.1)
//!
//! Bit 0 clear: invalid, the other bits belong to software. Bits 1:0 = 11: a table descriptor above
//! level 3, a page descriptor at level 3. Bits 1:0 = 01: a block descriptor where blocks exist,
//! reserved elsewhere. Blocks exist at level 2; at level 1 with 4 KiB, and with 16 KiB or 64 KiB
//! when addresses are wide; at level 0 with 4 KiB when addresses are wide.
//!
//! # The address (D8.3.1)
//!
//! The field starts at the bit that the entry resolves last and ends
//!
//! * at bit 47, for 48-bit addresses;
//! * at bit 49 with LPA2, and bits 51:50 of the address stand in bits 9:8;
//! * at bit 47 with LPA (64 KiB), and bits 51:48 of the address stand in bits 15:12.
//!
//! Whatever lies in bits 49:12 and is no address is RES0, save nT, bit 16 of a block. So is bit 50
//! of a table descriptor; in a leaf it is GP.
//!
//! # The rest of a leaf (D8.3.1, D8.6, D8.7)
//!
//! | bits | field | section |
//! |---|---|---|
//! | 4:2 | AttrIndx | D8.6 |
//! | 5 | NS, Secure state alone | |
//! | 7:6 | AP\[2:1\]: read-only, open to EL0 | D8.4.1 |
//! | 9:8 | SH, where it is no address; 01 is reserved | D8.6 |
//! | 10 | AF | D8.5.1 |
//! | 11 | nG | D8.16.3 |
//! | 16 | nT, in a block | D8.7 |
//! | 50 | GP | D8.4 |
//! | 51 | DBM | D8.5.2 |
//! | 52 | Contiguous | D8.7.1 |
//! | 53, 54 | PXN, UXN | D8.4.1 |
//! | 58:55 | software | D8.3.1 |
//! | 62:59 | PBHA, or ignored | D8.7 |
//! | 63 | ignored | D8.3.1 |
//!
//! # Permissions (D8.4.1)
//!
//! AP\[2\] takes writing away from both exception levels, AP\[1\] gives EL0 what EL1 has. Execution
//! is a right of its own: UXN clear lets EL0 execute a page that it cannot read. One rule crosses
//! the two: **a page that EL0 can write is never executable at EL1**, PXN or not.
//!
//! A table descriptor restricts all under it: PXNTable (59), UXNTable (60), APTable\[0\] (61: EL0
//! neither reads nor writes), APTable\[1\] (62: no EL writes). Restrictions unite on the way down,
//! and the rule about pages that EL0 can write looks at the outcome. Bits 58:51 and 11:2 of a table
//! descriptor are ignored (9:8 are address with LPA2), bit 63 is NSTable.
//!
//! # EL2 with `HCR_EL2.E2H` clear (D8.4.1, D8.3.1)
//!
//! One exception level and one range of addresses, whose translations belong to no ASID. AP\[2\]
//! takes writing away, XN (54) execution. AP\[1\] is RES1; nG (11) and bit 53 are RES0, and in
//! tables PXNTable (59) and APTable\[0\] (61). XNTable (60) and APTable\[1\] (62) restrict as
//! above.
//!
//! # Contiguous runs (D8.7.1)
//!
//! The Contiguous bit says that an aligned run of entries maps one aligned piece of memory with
//! equal attributes, so that one TLB entry may stand for all. A run is
//!
//! | granule | level 1 | level 2 | level 3 |
//! |---|---|---|---|
//! | 4 KiB | 16 × 1 GiB | 16 × 2 MiB | 16 × 4 KiB |
//! | 16 KiB | - | 32 × 32 MiB | 128 × 16 KiB |
//! | 64 KiB | - | 32 × 512 MiB | 32 × 64 KiB |
//!
//! and the bit is RES0 in the larger blocks that wide addresses add, and where the run were larger
//! than the input space. The members may differ in AF, in AP\[2\] while DBM is set (hardware
//! records accesses and writes one entry at a time), and in the bits that hardware ignores.

use crate::regime::Shape;
use crate::walk::Format;
use crate::{Access, Denied, Descriptor, DirtyState, Granule, Leaf, Permissions};

const VALID: u64 = 1 << 0;
/// A table descriptor or, at level 3, a page descriptor; clear in a block descriptor.
const TABLE_OR_PAGE: u64 = 1 << 1;
const AP1_EL0: u64 = 1 << 6;
const AP2_READ_ONLY: u64 = 1 << 7;
pub(crate) const AF: u64 = 1 << 10;
const NG: u64 = 1 << 11;
const NT: u64 = 1 << 16;
pub(crate) const DBM: u64 = 1 << 51;
const CONTIGUOUS: u64 = 1 << 52;
const PXN: u64 = 1 << 53;
const UXN: u64 = 1 << 54;
pub(crate) const SOFTWARE: u64 = bits(55, 59);
const IGNORED: u64 = 1 << 63;

const PXN_TABLE: u64 = 1 << 59;
const UXN_TABLE: u64 = 1 << 60;
const AP_TABLE0_NO_EL0: u64 = 1 << 61;
const AP_TABLE1_READ_ONLY: u64 = 1 << 62;

/// Ones from bit `from` up to, not including, bit `to`.
const fn bits(from: u32, to: u32) -> u64 {
    (1 << to) - (1 << from)
}

/// The place of the address bits above bit 47.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HighAddress {
    /// There are none.
    None,
    /// 49:48 in place, 51:50 in bits 9:8.
    Lpa2,
    /// 51:48 in bits 15:12.
    Lpa,
}

/// The layout of the descriptors of one granule and address size, in both stages.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) granule: Granule,
    wide: bool,
    high: HighAddress,
}

/// A descriptor's form, by its two lowest bits.
pub(crate) enum Form {
    Invalid,
    Table,
    Leaf,
    Reserved(&'static str),
}

/// A leaf's address and shareability.
pub(crate) struct Extent {
    pub(crate) pa: u64,
    pub(crate) size: u64,
    pub(crate) contiguous: bool,
    pub(crate) run_size: u64,
    pub(crate) shareability: Option<u8>,
}

impl Layout {
    pub(crate) const fn new(granule: Granule, wide: bool) -> Self {
        let high = match (granule, wide) {
            (_, false) => HighAddress::None,
            (Granule::K4 | Granule::K16, true) => HighAddress::Lpa2,
            (Granule::K64, true) => HighAddress::Lpa,
        };
        Self { granule, wide, high }
    }

    const fn blocks_at(&self, depth: u32) -> bool {
        match (self.granule, depth) {
            (_, 1) | (Granule::K4, 2) => true,
            (Granule::K16 | Granule::K64, 2) | (Granule::K4, 3) => self.wide,
            _ => false,
        }
    }

    /// The output or next-table address, of which bit `low` is the lowest.
    #[inline(always)]
    const fn address(&self, descriptor: u64, low: u32) -> u64 {
        match self.high {
            HighAddress::None => descriptor & bits(low, 48),
            HighAddress::Lpa2 => (descriptor & bits(low, 50)) | ((descriptor >> 8 & 0b11) << 50),
            HighAddress::Lpa => (descriptor & bits(low, 48)) | ((descriptor >> 12 & 0xf) << 48),
        }
    }

    /// The bits of 49:12 that belong to no address whose lowest bit is `low`.
    #[inline(always)]
    const fn reserved(&self, low: u32) -> u64 {
        match self.high {
            HighAddress::None => bits(12, low) | bits(48, 50),
            HighAddress::Lpa2 => bits(12, low),
            HighAddress::Lpa => bits(16, low) | bits(48, 50),
        }
    }

    #[inline(always)]
    pub(crate) fn form(&self, depth: u32, descriptor: u64) -> Form {
        if descriptor & VALID == 0 {
            return Form::Invalid;
        }
        match (descriptor & TABLE_OR_PAGE != 0, depth) {
            (true, 1..) => Form::Table,
            (true, 0) => Form::Leaf,
            (false, _) if self.blocks_at(depth) => Form::Leaf,
            (false, _) => Form::Reserved("a block descriptor at a level that has no blocks"),
        }
    }

    /// The next table, unless one of the bits that stand for nothing, or of `res0`, is set.
    #[inline(always)]
    pub(crate) fn table(&self, descriptor: u64, res0: u64) -> Result<u64, &'static str> {
        let low = self.granule.page_shift();
        if descriptor & (self.reserved(low) | res0) != 0 {
            return Err("a RES0 bit of a table descriptor is set");
        }
        Ok(self.address(descriptor, low))
    }

    /// The extent of a leaf, unless one of the bits that stand for nothing, or of `res0`, is set.
    /// `run` is the length of a contiguous run.
    #[inline(always)]
    pub(crate) fn extent(
        &self,
        shape: Shape,
        depth: u32,
        run: usize,
        descriptor: u64,
        res0: u64,
    ) -> Result<Extent, &'static str> {
        let shift = shape.shift(depth);
        let mut reserved = self.reserved(shift);
        if depth > 0 {
            reserved &= !NT;
        }
        if descriptor & (reserved | res0) != 0 {
            return Err("a RES0 bit below or above the address of a leaf is set");
        }
        let contiguous = descriptor & CONTIGUOUS != 0;
        if contiguous && run == 1 {
            return Err("the Contiguous bit is RES0 at this level");
        }
        let shareability = match self.high {
            HighAddress::Lpa2 => None,
            HighAddress::None | HighAddress::Lpa => Some((descriptor >> 8 & 0b11) as u8),
        };
        if shareability == Some(0b01) {
            return Err("SH is 01");
        }
        let size = 1 << shift;
        Ok(Extent {
            pa: self.address(descriptor, shift),
            size,
            contiguous,
            run_size: if contiguous { run as u64 * size } else { size },
            shareability,
        })
    }
}

/// The stage 1 format of one granule, input size and output size, for EL1&0 or for EL2 alone.
#[derive(Clone, Copy)]
pub(crate) struct Stage1 {
    layout: Layout,
    shape: Shape,
    el2: bool,
}

impl Stage1 {
    pub(crate) const fn new(granule: Granule, wide: bool) -> Self {
        Self { layout: Layout::new(granule, wide), shape: Shape::arm64(granule, wide), el2: false }
    }

    pub(crate) const fn sized(granule: Granule, input_bits: u8, wide: bool, el2: bool) -> Self {
        Self {
            layout: Layout::new(granule, wide),
            shape: Shape::arm64_sized(granule, input_bits as u32, wide, el2),
            el2,
        }
    }

    #[inline(always)]
    fn table(&self, descriptor: u64) -> Descriptor {
        let (denied, res0) = match self.el2 {
            false => (PXN_TABLE | UXN_TABLE | AP_TABLE0_NO_EL0 | AP_TABLE1_READ_ONLY, 1 << 50),
            true => (UXN_TABLE | AP_TABLE1_READ_ONLY, 1 << 50 | PXN_TABLE | AP_TABLE0_NO_EL0),
        };
        match self.layout.table(descriptor, res0) {
            Ok(pa) => Descriptor::Table { pa, denied: Denied(descriptor & denied) },
            Err(why) => Descriptor::Reserved(why),
        }
    }

    #[inline(always)]
    fn leaf(&self, depth: u32, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
        let shape = self.shape;
        if self.el2 && descriptor & AP1_EL0 == 0 {
            return Descriptor::Reserved("AP[1] is RES1 where there is one exception level");
        }
        if self.el2 && descriptor & (NG | PXN) != 0 {
            return Descriptor::Reserved("nG or PXN is set where there is one exception level");
        }
        let run = self.layout.granule.run(depth, shape);
        let extent = match self.layout.extent(shape, depth, run, descriptor, 0) {
            Ok(extent) => extent,
            Err(why) => return Descriptor::Reserved(why),
        };
        Descriptor::Leaf(Leaf {
            va,
            pa: extent.pa,
            size: extent.size,
            level: shape.level(depth),
            contiguous: extent.contiguous,
            run_size: extent.run_size,
            access: match self.el2 {
                false => access(denied, descriptor),
                true => access_of_el2(denied, descriptor),
            },
            // There are no ASIDs at EL2.
            global: descriptor & NG == 0,
            memory: (descriptor >> 2 & 0b111) as u8,
            shareability: extent.shareability,
            accessed: descriptor & AF != 0,
            dirty: DirtyState::Arm64 {
                dbm: descriptor & DBM != 0,
                read_only: descriptor & AP2_READ_ONLY != 0,
            },
            software: ((descriptor & SOFTWARE) >> 55) as u16,
            key: (descriptor >> 59 & 0xf) as u8,
            raw: descriptor,
        })
    }
}

/// The permissions of a leaf under tables that deny `denied`.
#[inline(always)]
fn access(Denied(denied): Denied, leaf: u64) -> Access {
    let write = leaf & AP2_READ_ONLY == 0 && denied & AP_TABLE1_READ_ONLY == 0;
    let el0 = leaf & AP1_EL0 != 0 && denied & AP_TABLE0_NO_EL0 == 0;
    let el0_write = el0 && write;
    Access {
        privileged: Permissions {
            read: true,
            write,
            execute: leaf & PXN == 0 && denied & PXN_TABLE == 0 && !el0_write,
        },
        user: Permissions {
            read: el0,
            write: el0_write,
            execute: leaf & UXN == 0 && denied & UXN_TABLE == 0,
        },
    }
}

/// Returns the access where there is one exception level (D8.4.1).
#[inline(always)]
fn access_of_el2(Denied(denied): Denied, leaf: u64) -> Access {
    Access {
        privileged: Permissions {
            read: true,
            write: leaf & AP2_READ_ONLY == 0 && denied & AP_TABLE1_READ_ONLY == 0,
            execute: leaf & UXN == 0 && denied & UXN_TABLE == 0,
        },
        user: Permissions { read: false, write: false, execute: false },
    }
}

impl Format for Stage1 {
    #[inline(always)]
    fn shape(&self) -> Shape {
        self.shape
    }

    #[inline(always)]
    fn decode(&self, depth: u32, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
        match self.layout.form(depth, descriptor) {
            Form::Invalid => Descriptor::Invalid,
            Form::Table => self.table(descriptor),
            Form::Leaf => self.leaf(depth, va, denied, descriptor),
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
        if leaf & DBM == 0 { leaf } else { leaf & !AP2_READ_ONLY }
    }

    #[inline(always)]
    fn check_run(
        &self,
        depth: u32,
        index: usize,
        previous: u64,
        descriptor: u64,
    ) -> Result<(), &'static str> {
        let run = self.layout.granule.run(depth, self.shape);
        self.layout.check_run(self.shape, depth, run, index, previous, descriptor)
    }
}

impl Layout {
    /// Checks the entry `index` against the one before it, where a contiguous run has `run`
    /// members.
    #[inline(always)]
    pub(crate) fn check_run(
        &self,
        shape: Shape,
        depth: u32,
        run: usize,
        index: usize,
        previous: u64,
        descriptor: u64,
    ) -> Result<(), &'static str> {
        // Bit 52 of a table descriptor is no Contiguous bit.
        let leaf = VALID | if depth == 0 { TABLE_OR_PAGE } else { 0 };
        let hinted = |descriptor: u64| {
            descriptor & (CONTIGUOUS | VALID | TABLE_OR_PAGE) == CONTIGUOUS | leaf
        };
        let first = index.is_multiple_of(run);
        let shift = shape.shift(depth);
        match (hinted(previous) && !first, hinted(descriptor)) {
            (false, false) => Ok(()),
            (true, false) => Err("a member lacks the Contiguous bit that the one before it has"),
            (false, true) if first => self.run_start(shift, run, descriptor),
            (false, true) => Err("a member has the Contiguous bit that the one before it lacks"),
            (true, true) => self.run_goes_on(shift, previous, descriptor),
        }
    }

    fn run_start(&self, shift: u32, run: usize, descriptor: u64) -> Result<(), &'static str> {
        let run_size = (run as u64) << shift;
        if self.address(descriptor, shift).is_multiple_of(run_size) {
            Ok(())
        } else {
            Err("the memory of the run is not aligned to its size")
        }
    }

    fn run_goes_on(&self, shift: u32, previous: u64, member: u64) -> Result<(), &'static str> {
        let expected = self.address(previous, shift) + (1 << shift);
        if self.address(member, shift) != expected {
            return Err("a member does not continue the memory of the one before it");
        }
        // AP[2], in stage 2 S2AP[1].
        let dirty_state = if previous & member & DBM != 0 { AP2_READ_ONLY } else { 0 };
        // The address is right already, so that the bits above bit 47, wherever they stand, are
        // equal.
        let may_differ = bits(shift, 48) | AF | SOFTWARE | IGNORED | dirty_state;
        if (previous ^ member) & !may_differ != 0 {
            return Err("a member differs in its attributes from the one before it");
        }
        Ok(())
    }
}
