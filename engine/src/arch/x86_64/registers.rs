//! Values of the registers that point to tables.

use crate::addr::Pa;
use crate::format::{Ept, Format, Npt};
use crate::platform::Caps;

/// Returns a value for CR3 (SDM vol. 3A 5.5.2 and 5.10.4.1): the root, the identifier under which
/// it is loaded, of which there are 12 bits (0 with `CR4.PCIDE` clear), and whether what is
/// remembered under it is kept: bit 63, which is not a bit of the register.
///
/// ```
/// use tablewright::{Pa, arch::x86_64::cr3};
/// assert_eq!(cr3(Pa::new(0x1234_5000), 7, false), 0x1234_5007);
/// assert_eq!(cr3(Pa::new(0x1234_5000), 7, true), 0x8000_0000_1234_5007);
/// ```
pub const fn cr3(root: Pa, pcid: u16, keep: bool) -> u64 {
    root.get() & 0x000f_ffff_ffff_f000 | (pcid & 0xfff) as u64 | (keep as u64) << 63
}

/// The formats that an EPTP points to.
pub trait Extended: Format {}
impl<const LEVELS: u8, const MODE_BASED: bool> Extended for Ept<LEVELS, MODE_BASED> {}

/// The EPTP of a tree (SDM vol. 3C 25.6.11): tables are read write-back, bits 2:0; one less than
/// the levels, bits 5:3; the flags that hardware sets, bit 6, if `caps` says that it does; and the
/// root. Sub-page permissions and shadow stacks are off.
///
/// ```
/// use tablewright::{
///     Caps, Pa,
///     arch::x86_64::{EptFeatures, eptp},
///     format::Ept,
/// };
/// let flags = EptFeatures(1 << 21).caps();
/// assert_eq!(eptp::<Ept<4>>(Pa::new(0x1234_5000), &flags), 0x1234_505e);
/// assert_eq!(eptp::<Ept<5>>(Pa::new(0x1234_5000), &EptFeatures(0).caps()), 0x1234_5026);
/// ```
pub fn eptp<F: Extended>(root: Pa, caps: &Caps) -> u64 {
    let flags = caps.hardware_access || caps.hardware_dirty;
    root.get() & 0x000f_ffff_ffff_f000 | 6 | (u64::from(F::LEVELS) - 1) << 3 | u64::from(flags) << 6
}

/// The `nCR3` field of a VMCB (APM vol. 2 15.25.3): the root. How many levels the tables have is
/// how many the host has.
///
/// ```
/// use tablewright::{Pa, arch::x86_64::ncr3, format::Npt};
/// assert_eq!(ncr3::<4>(Pa::new(0x1234_5000)), 0x1234_5000);
/// ```
pub const fn ncr3<const LEVELS: u8>(root: Pa) -> u64 {
    const { assert!(<Npt<LEVELS> as Format>::LEVELS == LEVELS) };
    root.get() & 0x000f_ffff_ffff_f000
}
