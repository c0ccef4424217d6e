//! The judge: a page-table walker and descriptor decoder written from the architecture manuals
//! alone.
//!
//! Code that builds page tables cannot be its own witness: a shift that is wrong in the encoder is
//! wrong in the decoder beside it, and the two agree. This crate does what the memory management
//! unit does. It reads 8-byte descriptors out of memory, follows them by the rules of the manual,
//! and says what they mean or why they mean nothing. It shares no code with any builder of tables,
//! depends on nothing, allocates nothing and has no `unsafe`.
//!
//! # What it decodes
//!
//! | [`Regime`] | first table (level: entries) | leaf sizes |
//! |---|---|---|
//! | arm64, 4 KiB, 48 bits | 0: 512 | 4 KiB, 2 MiB, 1 GiB |
//! | arm64, 4 KiB, 52 bits (LPA2) | -1: 16 | 4 KiB, 2 MiB, 1 GiB, 512 GiB |
//! | arm64, 16 KiB, 48 bits | 0: 2 | 16 KiB, 32 MiB |
//! | arm64, 16 KiB, 52 bits (LPA2) | 0: 32 | 16 KiB, 32 MiB, 64 GiB |
//! | arm64, 64 KiB, 48 bits | 1: 64 | 64 KiB, 512 MiB |
//! | arm64, 64 KiB, 52 bits (LVA, LPA) | 1: 1024 | 64 KiB, 512 MiB, 4 TiB |
//! | arm64 and EL2, 4 KiB, 25 to 30, 39, 48, 52 bits | 2, 1, 0, -1: up to 512 | as above |
//! | arm64 and EL2, 16 KiB, 25, 36, 47, 52 bits | 3, 2, 1, 0: up to 2048 | as above |
//! | arm64 and EL2, 64 KiB, 25 to 29, 42, 52 bits | 3, 2, 1: up to 8192 | as above |
//! | x86-64, 4 levels | 4: 512 | 4 KiB, 2 MiB, 1 GiB |
//! | x86-64, 5 levels | 5: 512 | 4 KiB, 2 MiB, 1 GiB |
//! | arm64 stage 2, 4 KiB, 32 to 34, 43, 52 bits | 2, 1, 0: up to 8192 | as stage 1 |
//! | arm64 stage 2, 16 KiB, 32 to 40, 51, 52 bits | 2, 1, 0: up to 32768 | as stage 1 |
//! | arm64 stage 2, 64 KiB, 32 to 46, 52 bits | 2, 1: up to 131072 | as stage 1 |
//! | EPT, 4 or 5 levels | 4 or 5: 512 | 4 KiB, 2 MiB, 1 GiB |
//! | nested paging, 4 or 5 levels | 4 or 5: 512 | 4 KiB, 2 MiB, 1 GiB |
//! | RISC-V Sv39, Sv48, Sv57 | 2, 3, 4: 512 | 4 KiB to 1 GiB, 512 GiB, 256 TiB |
//! | RISC-V Sv39x4, Sv48x4, Sv57x4 | 2, 3, 4: 2048 | the same |
//!
//! # What it reports
//!
//! * [`translate`] follows one virtual address, as an access does.
//! * [`leaves`] visits every leaf of one half of the address space in address order, and checks on
//!   the way that every run of contiguous entries keeps the promise which the hint makes to the
//!   TLB.
//! * [`tables`] visits every table reachable from a root, for counting them and for finding one
//!   reachable twice.
//! * [`Walk`] is a walk that stops in front of every descriptor, [`decode`] the meaning of one
//!   descriptor by itself, [`with_access_flag`] and [`with_dirty`] what a processor writes back:
//!   the parts of which a model of a memory management unit is made.
//!
//! A [`Leaf`] carries the final permissions, that is, with the restrictions of all tables on the
//! way applied. A descriptor that the architecture reserves is a [`Fault::Reserved`], even where
//! processors ignore the bit today: a bit which must be zero and is not is a mistake of the code
//! that wrote it.
//!
//! Which bit means what, and where the manuals say so, stands at the head of the decoders,
//! `arm64.rs`, `stage2.rs`, `x86_64.rs`, `ept.rs`, `npt.rs` and `riscv.rs`. "DDI 0487" is the Arm
//! Architecture Reference Manual for A-profile (section numbers of issue K), "SDM" the Intel 64 and
//! IA-32 Architectures Software Developer's Manual (numbers since December 2023, when paging became
//! chapter 5 of volume 3A), "APM" the AMD64 Architecture Programmer's Manual.
//!
//! # The machine that is assumed
//!
//! Controls outside the tables stand as follows; a caller that models them otherwise starts from
//! [`Leaf::raw`].
//!
//! * arm64: no tagged addresses (TBI), no PAN, no WXN, hierarchical permissions on (HPD clear),
//!   hardware management of the access flag and dirty state off (how to have it on:
//!   [`with_dirty`]), no permission indirection or overlays (PIE, POE).
//! * x86-64: CR0.WP, EFER.NXE, CR4.PGE set; SMEP, SMAP, protection keys, LAM, CET off; MAXPHYADDR
//!   is 52, the architecture's limit, so that no bit of an address field is reserved.
//! * arm64 stage 2: FEAT_XNX, no FEAT_MTE_PERM, no Realm; otherwise as stage 1.
//! * EPT: execute-only memory is supported, guest-paging verification and sub-page permissions are
//!   off.
//! * Nested paging: as x86-64, no guest-mode execute trap.
//! * RISC-V: Svnapot and Svpbmt, `sstatus.SUM` set and `MXR` clear, no shadow stacks (Zicfiss).
//!
//! # Example
//!
//! One 2 MiB block of a 4 KiB-granule table, read out of an array that stands for physical memory:
//!
//! ```
//! use tablewright_walker::{Granule, Regime, translate};
//!
//! let regime = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
//! // Level 0 at 0x1000, level 1 at 0x2000, level 2 at 0x3000.
//! let mut memory = |table: u64, index: usize| match (table, index) {
//!     (0x1000, 0) => 0x2003,
//!     (0x2000, 0) => 0x3003,
//!     (0x3000, 1) => 0x0060_0000_8000_0701, // UXN, PXN, AF, inner shareable, AttrIndx 0, block
//!     _ => 0,
//! };
//! let leaf = translate(regime, 0x1000, 0x20_1234, &mut memory)?;
//! assert_eq!((leaf.va, leaf.pa, leaf.size), (0x20_0000, 0x8000_0000, 2 << 20));
//! assert_eq!(leaf.physical(0x20_1234), 0x8000_1234);
//! assert!(leaf.access.privileged.write && !leaf.access.user.read);
//! # Ok::<(), tablewright_walker::Fault>(())
//! ```

#![no_std]
#![forbid(unsafe_code)]

/// Evaluates `$body` with `$format` bound to the format of `$regime`; it is compiled for each.
macro_rules! with_format {
    ($regime:expr, $format:ident => $body:expr) => {
        match $regime {
            $crate::Regime::Arm64Stage1 { granule, wide } => {
                let $format = $crate::arm64::Stage1::new(granule, wide);
                $body
            }
            $crate::Regime::Arm64Stage1Sized { granule, input_bits, wide } => {
                let $format = $crate::arm64::Stage1::sized(granule, input_bits, wide, false);
                $body
            }
            $crate::Regime::Arm64El2 { granule, input_bits, wide } => {
                let $format = $crate::arm64::Stage1::sized(granule, input_bits, wide, true);
                $body
            }
            $crate::Regime::X86_64 { levels } => {
                let $format = $crate::x86_64::Paging::new(levels);
                $body
            }
            $crate::Regime::Arm64Stage2 { granule, input_bits, wide, forced_write_back } => {
                let $format =
                    $crate::stage2::Stage2::new(granule, input_bits, wide, forced_write_back);
                $body
            }
            $crate::Regime::Ept { levels, mode_based } => {
                let $format = $crate::ept::Ept::new(levels, mode_based);
                $body
            }
            $crate::Regime::Npt { levels } => {
                let $format = $crate::npt::Nested::new(levels);
                $body
            }
            $crate::Regime::Riscv { levels, guest } => {
                let $format = $crate::riscv::Sv::new(levels, guest);
                $body
            }
        }
    };
}

mod arm64;
mod ept;
mod leaf;
mod npt;
mod regime;
mod riscv;
mod stage2;
mod step;
mod walk;
mod x86_64;

pub use leaf::{
    Access, Denied, Descriptor, DirtyState, Fault, Leaf, Malformed, Permissions, Table,
};
pub use regime::{Granule, Half, Regime};
pub use step::{Walk, decode, with_access_flag, with_dirty};

use core::ops::ControlFlow;

/// Physical memory, as the walker sees it.
///
/// Implemented for every closure `FnMut(u64, usize) -> u64`.
pub trait ReadTable {
    /// The 8-byte descriptor number `index` of the table at physical address `table`, in the byte
    /// order of the processor.
    fn read(&mut self, table: u64, index: usize) -> u64;
}

impl<F: FnMut(u64, usize) -> u64> ReadTable for F {
    #[inline(always)]
    fn read(&mut self, table: u64, index: usize) -> u64 {
        self(table, index)
    }
}

/// Translates `va` through the tables under `root`, the physical address of the first table.
///
/// On arm64 `va` may lie in either half: `root` is taken for the root of its half, TTBR0 or TTBR1.
/// Runs of contiguous entries are not checked, because an access reads one entry of them;
/// [`leaves`] checks them. A clear access flag is no fault here: it is reported in
/// [`Leaf::accessed`].
///
/// # Errors
///
/// [`Fault::NonCanonical`], [`Fault::NotMapped`] or [`Fault::Reserved`].
///
/// # Panics
///
/// When there is no such regime: a number of levels, or an input size that is none.
pub fn translate(
    regime: Regime,
    root: u64,
    va: u64,
    read: &mut impl ReadTable,
) -> Result<Leaf, Fault> {
    with_format!(regime, format => walk::translate(format, root, va, read))
}

/// Visits every leaf under `root` that translates an address of `half`, in address order.
///
/// `root` is the physical address of the first table: on arm64 the root of that half; on x86-64 the
/// root of both halves, of which `half` selects the lower or upper 256 entries; in stage 2 and at
/// EL2 all is the lower half. The visit ends early, with `Ok`, when `visit` breaks. The run of
/// contiguous entries around a leaf is checked entry by entry, so that up to the whole run but its
/// last entry may have been visited when the fault is found.
///
/// ```
/// use core::ops::ControlFlow;
/// use tablewright_walker::{Half, Regime, leaves};
///
/// // A PML4 whose last entry points to a page-directory-pointer table with one 1 GiB page at its
/// // end.
/// let mut memory = |table: u64, index: usize| match (table, index) {
///     (0x1000, 511) => 0x2003,
///     (0x2000, 511) => 0x4000_0083,
///     _ => 0,
/// };
/// let mut mapped = 0;
/// leaves(Regime::X86_64 { levels: 4 }, 0x1000, Half::Upper, &mut memory, |leaf| {
///     assert_eq!(leaf.va, 0xffff_ffff_c000_0000);
///     mapped += leaf.size;
///     ControlFlow::Continue(())
/// })?;
/// assert_eq!(mapped, 1 << 30);
/// # Ok::<(), tablewright_walker::Fault>(())
/// ```
///
/// # Errors
///
/// [`Fault::Reserved`] or [`Fault::BrokenRun`], the first in address order. An entry that maps
/// nothing is no fault.
///
/// # Panics
///
/// When there is no such regime: a number of levels, or an input size that is none.
pub fn leaves(
    regime: Regime,
    root: u64,
    half: Half,
    read: &mut impl ReadTable,
    mut visit: impl FnMut(&Leaf) -> ControlFlow<()>,
) -> Result<(), Fault> {
    with_format!(regime, format => walk::leaves(format, root, half, read, &mut visit))
}

/// Visits every table reachable from `root`, the root first and each table before those under it.
///
/// A table reachable along two paths is visited twice. Tables of the last level hold no pointers
/// and are not read. The visit ends early, with `Ok`, when `visit` breaks; a visitor that looks for
/// cycles needs this, because a table that points to itself is followed down to the last level
/// along every path.
///
/// # Errors
///
/// [`Fault::Reserved`], in a table above the last level.
///
/// # Panics
///
/// When there is no such regime: a number of levels, or an input size that is none.
pub fn tables(
    regime: Regime,
    root: u64,
    read: &mut impl ReadTable,
    mut visit: impl FnMut(Table) -> ControlFlow<()>,
) -> Result<(), Fault> {
    with_format!(regime, format => walk::tables(format, root, read, &mut visit))
}
