//! Values of the translation registers for a format.

use core::fmt;

use super::Ids;
use crate::addr::Pa;
use crate::format::{Arm64, Arm64El2, Format, Stage2};
use crate::platform::Caps;
use crate::shootdown::arm64::Regime;

/// A format of arm64, and what it translates for.
///
/// Sealed: the formats are those of [`format`](mod@crate::format).
pub trait Translation: Format + sealed::Sealed {
    /// Which instructions invalidate it.
    const REGIME: Regime;
    /// `HCR_EL2.FWB` is set.
    const FORCED: bool = false;
    /// The value of `MAIR_EL1`, or `MAIR_EL2`; nothing where memory types stand in the descriptor.
    ///
    /// ```
    /// use tablewright::arch::arm64::Translation;
    /// use tablewright::format::{Arm64, Arm64K4, MAIR};
    /// assert_eq!(Arm64K4::MAIR, MAIR);
    /// assert_eq!(<Arm64<12, 48, false, 0x44ff>>::MAIR, 0x44ff);
    /// ```
    const MAIR: u64 = 0;
}

mod sealed {
    pub trait Sealed {}
}

impl<
    const PAGE_SHIFT: u32,
    const INPUT_BITS: u32,
    const WIDE: bool,
    const TYPES: u64,
    const MARKED: u64,
> sealed::Sealed for Arm64<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES, MARKED>
{
}
impl<
    const PAGE_SHIFT: u32,
    const INPUT_BITS: u32,
    const WIDE: bool,
    const TYPES: u64,
    const MARKED: u64,
> Translation for Arm64<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES, MARKED>
{
    const REGIME: Regime = Regime::El1;
    const MAIR: u64 = TYPES;
}

impl<const PAGE_SHIFT: u32, const INPUT_BITS: u32, const WIDE: bool, const TYPES: u64>
    sealed::Sealed for Arm64El2<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>
{
}
impl<const PAGE_SHIFT: u32, const INPUT_BITS: u32, const WIDE: bool, const TYPES: u64> Translation
    for Arm64El2<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>
{
    const REGIME: Regime = Regime::El2;
    const MAIR: u64 = TYPES;
}

impl<const PAGE_SHIFT: u32, const INPUT_BITS: u32, const WIDE: bool, const FORCED: bool>
    sealed::Sealed for Stage2<PAGE_SHIFT, INPUT_BITS, WIDE, FORCED>
{
}
impl<const PAGE_SHIFT: u32, const INPUT_BITS: u32, const WIDE: bool, const FORCED: bool> Translation
    for Stage2<PAGE_SHIFT, INPUT_BITS, WIDE, FORCED>
{
    const REGIME: Regime = Regime::Stage2;
    const FORCED: bool = FORCED;
}

/// The name of what a processor lacks of a format.
///
/// ```
/// use tablewright::arch::arm64::{Ids, tcr_el1};
/// use tablewright::{Caps, format::Arm64K16};
/// let ids = Ids { isar0: 0, mmfr0: 0x25, mmfr1: 0, mmfr2: 0 }; // TGran16 is 0
/// assert!(tcr_el1::<Arm64K16, Arm64K16>(&ids, &Caps::CONSERVATIVE).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsupported(pub &'static str);

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl core::error::Error for Unsupported {}

/// Whether descriptors are those of FEAT_LPA2, which `DS` switches on.
const fn is_lpa2<F: Translation>() -> bool {
    F::OUTPUT_BITS > 48 && F::PAGE_SHIFT < 16
}

impl Ids {
    /// Whether processors have what a format needs.
    ///
    /// # Errors
    /// [`Unsupported`] says what they lack.
    pub fn check<F: Translation>(self) -> Result<(), Unsupported> {
        let stage2 = matches!(F::REGIME, Regime::Stage2);
        let has = if stage2 { self.stage2(F::PAGE_SHIFT) } else { self.stage1(F::PAGE_SHIFT) };
        if has == 0 {
            return Err(Unsupported("the processor does not have this granule"));
        }
        if has < 2 && (is_lpa2::<F>() || F::INPUT_BITS > 48) {
            return Err(Unsupported("the processor does not have 52 bits with this granule"));
        }
        // D8.2.2: stage 2 translates no more than there are physical addresses.
        if stage2 && F::INPUT_BITS > self.physical_bits() {
            return Err(Unsupported("a guest has no more bits of addresses than the processor"));
        }
        if F::FORCED && !self.has_forced_write_back() {
            return Err(Unsupported("the processor does not force write-back"));
        }
        Ok(())
    }
}

// Fields that the control registers have at the same places for TTBR0, or VTTBR.
/// Walks are cacheable, write-back with allocation: IRGN 9:8 and ORGN 11:10.
const CACHEABLE: u64 = 1 << 8 | 1 << 10;
/// SH, 13:12.
const INNER: u64 = 3 << 12;

/// T0SZ, IRGN0, ORGN0, SH0, TG0: the lower half of `TCR_EL1`, and the start of the others.
const fn lower<F: Translation>() -> u64 {
    let granule = match F::PAGE_SHIFT {
        12 => 0,
        14 => 2,
        _ => 1,
    };
    (64 - F::INPUT_BITS as u64) | CACHEABLE | INNER | granule << 14
}

const fn output_size<F: Translation>(ids: &Ids) -> u64 {
    ids.output_size(if F::OUTPUT_BITS > 48 { 6 } else { 5 })
}

/// `TCR_EL1` where TTBR0 has tables of format `L` and TTBR1 of format `U` (D24.2 TCR_EL1). With
/// `HCR_EL2.E2H` set, `TCR_EL2` has the same fields, and this is its value, too; without, it is
/// [`tcr_el2`].
///
/// Walks are write-back cacheable and inner shareable, the ASID is that in TTBR0, and hardware sets
/// the flags that `caps` names.
///
/// # Errors
/// What the processor lacks; or that one register cannot say two things: with 4 and 16 KiB either
/// both halves are wide or none, which is DS, and both have their memory types from one `MAIR_EL1`.
///
/// ```
/// use tablewright::arch::arm64::{Ids, tcr_el1};
/// use tablewright::{Caps, format::Arm64K4};
/// // 48 bits of physical addresses, 16 bits of ASIDs; hardware sets no flags.
/// let ids = Ids { isar0: 0, mmfr0: 0x25, mmfr1: 0, mmfr2: 0 };
/// assert_eq!(tcr_el1::<Arm64K4, Arm64K4>(&ids, &ids.caps()), Ok(0x15_b510_3510));
/// ```
pub fn tcr_el1<L: Translation, U: Translation>(ids: &Ids, caps: &Caps) -> Result<u64, Unsupported> {
    if !matches!((L::REGIME, U::REGIME), (Regime::El1, Regime::El1)) {
        return Err(Unsupported("TCR_EL1 is of stage 1 of EL1"));
    }
    if L::MAIR != U::MAIR {
        return Err(Unsupported("MAIR_EL1 is one register for both halves"));
    }
    ids.check::<L>()?;
    ids.check::<U>()?;
    let ds = is_lpa2::<L>();
    // With 64 KiB DS does not matter.
    if L::PAGE_SHIFT < 16 && U::PAGE_SHIFT < 16 && ds != is_lpa2::<U>() {
        return Err(Unsupported("TCR_EL1.DS is one bit for both halves"));
    }
    let ds = ds || is_lpa2::<U>();
    let granule = match U::PAGE_SHIFT {
        12 => 2,
        14 => 1,
        _ => 3,
    };
    let upper = (64 - u64::from(U::INPUT_BITS)) | CACHEABLE | INNER | granule << 14;
    let size = output_size::<L>(ids).max(output_size::<U>(ids));
    let flags = flags(ids, caps, 39);
    Ok(lower::<L>()
        | upper << 16
        | size << 32
        | u64::from(ids.asid_bits() == 16) << 36
        | flags
        | u64::from(ds) << 59)
}

/// HA, and above it HD.
fn flags(ids: &Ids, caps: &Caps, low: u32) -> u64 {
    let access = caps.hardware_access && ids.has_access_flag();
    let dirty = access && caps.hardware_dirty && ids.has_dirty_state();
    u64::from(access) << low | u64::from(dirty) << (low + 1)
}

/// `TCR_EL2` with `HCR_EL2.E2H` clear, for tables of format `F` (D24.2 TCR_EL2); with it set, it is
/// [`tcr_el1`].
///
/// # Errors
/// What the processor lacks.
///
/// ```
/// use tablewright::arch::arm64::{Ids, tcr_el2};
/// use tablewright::{Caps, format::Arm64El2};
/// let ids = Ids { isar0: 0, mmfr0: 0x25, mmfr1: 0, mmfr2: 0 };
/// // T0SZ 25; 4 KiB; 48 bits out; bits 31 and 23 are one.
/// assert_eq!(tcr_el2::<Arm64El2<12, 39>>(&ids, &ids.caps()), Ok(0x8085_3519));
/// ```
pub fn tcr_el2<F: Translation>(ids: &Ids, caps: &Caps) -> Result<u64, Unsupported> {
    if !matches!(F::REGIME, Regime::El2) {
        return Err(Unsupported("TCR_EL2 without VHE is of stage 1 of EL2"));
    }
    ids.check::<F>()?;
    Ok(lower::<F>()
        | output_size::<F>(ids) << 16
        | flags(ids, caps, 21)
        | 1 << 23 // RES1
        | 1 << 31 // RES1
        | u64::from(is_lpa2::<F>()) << 32)
}

/// `VTCR_EL2` for a guest whose tables are of format `F` (D24.2 VTCR_EL2).
///
/// # Errors
/// What the processor lacks.
///
/// ```
/// use tablewright::arch::arm64::{Ids, vtcr_el2};
/// use tablewright::{Caps, format::Stage2};
/// let ids = Ids { isar0: 0, mmfr0: 0x25, mmfr1: 0, mmfr2: 0 };
/// // T0SZ 24; SL0 1: from level 1; 4 KiB; 48 bits out; bit 31 is one.
/// assert_eq!(vtcr_el2::<Stage2<12, 40>>(&ids, &ids.caps()), Ok(0x8005_3558));
/// ```
pub fn vtcr_el2<F: Translation>(ids: &Ids, caps: &Caps) -> Result<u64, Unsupported> {
    if !matches!(F::REGIME, Regime::Stage2) {
        return Err(Unsupported("VTCR_EL2 is of stage 2"));
    }
    ids.check::<F>()?;
    // The first table is at the architecture's level 3 less its height. SL0 counts from level 2
    // with 4 KiB, and from level 3 with the others.
    let height = u64::from(F::root_level().height());
    let start = if F::PAGE_SHIFT == 12 { height - 1 } else { height };
    Ok(lower::<F>()
        | start << 6
        | output_size::<F>(ids) << 16
        | u64::from(ids.vmid_bits() == 16) << 19
        | flags(ids, caps, 21)
        | 1 << 31 // RES1
        | u64::from(is_lpa2::<F>()) << 32)
}

/// Returns TTBR0, TTBR1, or VTTBR (D24.2 TTBR0_EL1): the root, and the ASID or VMID under which it
/// is loaded. That of EL2 alone has none.
///
/// `common` is CnP, for processors [that have it](Ids::has_common): all that set it have loaded the
/// same tables under the same identifiers, and may share what they remember. An identifier must
/// then mean the same on all of them.
///
/// ```
/// use tablewright::arch::arm64::ttbr;
/// use tablewright::{
///     Pa,
///     format::{Arm64K4, Arm64K4Wide},
/// };
/// assert_eq!(ttbr::<Arm64K4>(Pa::new(0x4567_8000), 0x12, true), 0x0012_0000_4567_8001);
/// // Of 52 bits, 51:48 stand in 5:2.
/// assert_eq!(ttbr::<Arm64K4Wide>(Pa::new(0xa_0000_4567_8000), 0, false), 0x4567_8028);
/// ```
pub fn ttbr<F: Translation>(root: Pa, id: u16, common: bool) -> u64 {
    let root = root.get();
    let low = root & 0x0000_ffff_ffff_f000;
    let high = if F::OUTPUT_BITS > 48 { (root >> 48 & 0xf) << 2 } else { 0 };
    let id = match F::REGIME {
        Regime::El2 => 0,
        Regime::El1 | Regime::Stage2 => u64::from(id) << 48,
    };
    id | low | high | u64::from(common)
}
