//! What the translation registers hold for a format.

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
    /// What `MAIR_EL1` holds, or `MAIR_EL2`; nothing where memory types stand in the descriptor.
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

impl<const PAGE_SHIFT: u32, const INPUT_BITS: u32, const WIDE: bool, const TYPES: u64>
    sealed::Sealed for Arm64<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>
{
}
impl<const PAGE_SHIFT: u32, const INPUT_BITS: u32, const WIDE: bool, const TYPES: u64> Translation
    for Arm64<PAGE_SHIFT, INPUT_BITS, WIDE, TYPES>
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

/// What a processor lacks of a format.
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

/// What TTBR0, TTBR1, or VTTBR holds (D24.2 TTBR0_EL1): the root, and the ASID or VMID under which
/// it is loaded. That of EL2 alone has none.
///
/// `common` is CnP, for processors [that have it](Ids::has_common): all that set it have loaded the
/// same tables under the same identifiers, and may share what they remember. An identifier must
/// then mean the same on all of them.
///
/// ```
/// use tablewright::arch::arm64::ttbr;
/// use tablewright::{Pa, format::{Arm64K4, Arm64K4Wide}};
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{
        Arm64K4, Arm64K4Va39, Arm64K4Wide, Arm64K16, Arm64K16Va36, Arm64K16Va47, Arm64K16Wide,
        Arm64K64, Arm64K64Va42, Arm64K64Wide, MAIR,
    };

    /// All granules with 52 bits, 52 bits of physical addresses, 16 of identifiers, both flags,
    /// forced write-back.
    const ALL: Ids = Ids { isar0: 0, mmfr0: 0x1020_0026, mmfr1: 0x22, mmfr2: 1 << 40 | 1 << 16 };
    /// 40 bits, identifiers of 8, no flags, no 16 KiB.
    const LITTLE: Ids = Ids { isar0: 0, mmfr0: 2, mmfr1: 0, mmfr2: 0 };

    #[test]
    fn the_control_register_of_el1_has_each_field_where_the_manual_says() {
        // T0SZ 5:0, IRGN0 9:8, ORGN0 11:10, SH0 13:12, TG0 15:14, T1SZ 21:16, IRGN1 25:24, ORGN1
        // 27:26, SH1 29:28, TG1 31:30, IPS 34:32, AS 36, HA 39, HD 40, DS 59.
        let none = Caps { hardware_access: false, hardware_dirty: false, ..Caps::CONSERVATIVE };
        assert_eq!(tcr_el1::<Arm64K4, Arm64K4>(&LITTLE, &LITTLE.caps()), Ok(0x2_b510_3510));
        assert_eq!(tcr_el1::<Arm64K4, Arm64K4>(&ALL, &ALL.caps()), Ok(0x195_b510_3510));
        assert_eq!(tcr_el1::<Arm64K4, Arm64K4>(&ALL, &none), Ok(0x15_b510_3510));
        let access = Caps { hardware_access: true, ..none };
        assert_eq!(tcr_el1::<Arm64K4, Arm64K4>(&ALL, &access), Ok(0x95_b510_3510));
        assert_eq!(tcr_el1::<Arm64K16, Arm64K64>(&ALL, &none), Ok(0x15_f510_b510));
        assert_eq!(tcr_el1::<Arm64K64, Arm64K16>(&ALL, &none), Ok(0x15_7510_7510));
        assert_eq!(tcr_el1::<Arm64K4Wide, Arm64K16Wide>(&ALL, &none), Ok(0x0800_0016_750c_350c));
        assert_eq!(tcr_el1::<Arm64K64Wide, Arm64K64>(&ALL, &none), Ok(0x16_f510_750c));
        assert_eq!(tcr_el1::<Arm64K64, Arm64K4Wide>(&ALL, &none), Ok(0x0800_0016_b50c_7510));
        // T0SZ and T1SZ: 64 less the bits of an input address.
        assert_eq!(tcr_el1::<Arm64K4Va39, Arm64K16Va36>(&ALL, &none), Ok(0x15_751c_3519));
        assert_eq!(tcr_el1::<Arm64K64Va42, Arm64K16Va47>(&ALL, &none), Ok(0x15_7511_7516));
        assert_eq!(tcr_el1::<Arm64<12, 25>, Arm64<12, 36>>(&ALL, &none), Ok(0x15_b51c_3527));
        // 48 bits in and 52 out, as where the other half has 52.
        assert_eq!(
            tcr_el1::<Arm64<12, 48, true>, Arm64K4Wide>(&ALL, &none),
            Ok(0x0800_0016_b50c_3510)
        );
        assert_eq!(tcr_el1::<Arm64<16, 48, true>, Arm64K64>(&ALL, &none), Ok(0x16_f510_7510));
        type Other = Arm64<12, 48, false, 0x44ff>;
        assert!(tcr_el1::<Other, Arm64K4>(&ALL, &none).is_err());
        assert_eq!(tcr_el1::<Other, Other>(&ALL, &none), tcr_el1::<Arm64K4, Arm64K4>(&ALL, &none));
        assert_eq!((Other::MAIR, Arm64K4::MAIR, <Stage2<12, 40>>::MAIR), (0x44ff, MAIR, 0));
        assert!(tcr_el1::<Arm64El2<12, 48>, Arm64K4>(&ALL, &none).is_err());
        assert!(tcr_el1::<Arm64K4, Arm64K4Wide>(&ALL, &none).is_err());
        assert!(tcr_el1::<Arm64K4Wide, Arm64K16>(&ALL, &none).is_err());
        assert!(tcr_el1::<Arm64K4, Stage2<12, 40>>(&ALL, &none).is_err());
    }

    #[test]
    fn the_control_register_of_el2_has_each_field_where_the_manual_says() {
        // T0SZ 5:0, IRGN0 9:8, ORGN0 11:10, SH0 13:12, TG0 15:14, PS 18:16, HA 21, HD 22, 23 one,
        // 31 one, DS 32.
        let all = ALL.caps();
        assert_eq!(tcr_el2::<Arm64El2<12, 48>>(&LITTLE, &LITTLE.caps()), Ok(0x8082_3510));
        assert_eq!(tcr_el2::<Arm64El2<12, 39>>(&ALL, &all), Ok(0x80e5_3519));
        assert_eq!(tcr_el2::<Arm64El2<14, 36>>(&ALL, &all), Ok(0x80e5_b51c));
        assert_eq!(tcr_el2::<Arm64El2<16, 42>>(&ALL, &all), Ok(0x80e5_7516));
        assert_eq!(tcr_el2::<Arm64El2<12, 52, true>>(&ALL, &all), Ok(0x1_80e6_350c));
        assert_eq!(tcr_el2::<Arm64El2<16, 52, true>>(&ALL, &all), Ok(0x80e6_750c));
        assert!(tcr_el2::<Arm64El2<14, 48>>(&LITTLE, &LITTLE.caps()).is_err());
        assert!(tcr_el2::<Arm64K4>(&ALL, &all).is_err());
        assert!(vtcr_el2::<Arm64El2<12, 48>>(&ALL, &all).is_err());
        // No identifier.
        let root = Pa::new(0x4567_8000);
        assert_eq!(ttbr::<Arm64El2<12, 48>>(root, 9, false), 0x4567_8000);
    }

    #[test]
    fn what_the_processor_lacks_is_refused() {
        assert_eq!(LITTLE.check::<Arm64K4>(), Ok(()));
        assert_eq!(LITTLE.check::<Arm64K64>(), Ok(()));
        assert_eq!(LITTLE.check::<Stage2<12, 40>>(), Ok(()));
        assert!(LITTLE.check::<Arm64K16>().is_err());
        assert!(LITTLE.check::<Arm64K4Wide>().is_err());
        assert!(LITTLE.check::<Arm64K64Wide>().is_err());
        assert!(LITTLE.check::<Stage2<12, 42>>().is_err());
        assert!(LITTLE.check::<Stage2<12, 40, false, true>>().is_err());
        assert_eq!(ALL.check::<Arm64K16Wide>(), Ok(()));
        assert_eq!(ALL.check::<Arm64K64Wide>(), Ok(()));
        assert_eq!(ALL.check::<Stage2<12, 52, true, true>>(), Ok(()));
        assert_eq!(ALL.check::<Stage2<16, 52, true>>(), Ok(()));
    }

    #[test]
    fn the_control_register_of_stage_2_has_each_field_where_the_manual_says() {
        // T0SZ 5:0, SL0 7:6, IRGN0 9:8, ORGN0 11:10, SH0 13:12, TG0 15:14, PS 18:16, VS 19, HA 21,
        // HD 22, 31 one, DS 32.
        let all = ALL.caps();
        assert_eq!(vtcr_el2::<Stage2<12, 40>>(&LITTLE, &LITTLE.caps()), Ok(0x8002_3558));
        assert_eq!(vtcr_el2::<Stage2<12, 40>>(&ALL, &all), Ok(0x806d_3558));
        // From level 0; SL0 2.
        assert_eq!(vtcr_el2::<Stage2<12, 48>>(&ALL, &all), Ok(0x806d_3590));
        assert_eq!(vtcr_el2::<Stage2<12, 52, true>>(&ALL, &all), Ok(0x1_806e_358c));
        // From level 2 with 16 tables; SL0 1.
        assert_eq!(vtcr_el2::<Stage2<14, 40>>(&ALL, &all), Ok(0x806d_b558));
        // From level 0; SL0 3.
        assert_eq!(vtcr_el2::<Stage2<14, 52, true>>(&ALL, &all), Ok(0x1_806e_b5cc));
        // From level 2 with 16 entries, and from level 1: SL0 1 and 2.
        assert_eq!(vtcr_el2::<Stage2<16, 33>>(&ALL, &all), Ok(0x806d_755f));
        assert_eq!(vtcr_el2::<Stage2<16, 52, true>>(&ALL, &all), Ok(0x806e_758c));
        assert!(vtcr_el2::<Arm64K4>(&ALL, &all).is_err());
    }
}
