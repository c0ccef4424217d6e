//! Contents of the ID registers (DDI 0487 D24.2).

use crate::platform::Caps;

/// The ID registers that say what translation can do.
///
/// A system may have processors that differ: [`and`](Ids::and) is what all of them have.
///
/// ```
/// use tablewright::arch::arm64::Ids;
/// // 48 bits of physical addresses, 16 of ASIDs, no 16 KiB granule; hardware sets both flags;
/// // FEAT_TTCNP.
/// let big = Ids { isar0: 2 << 56, mmfr0: 0x0000_0025, mmfr1: 0x2, mmfr2: 0x1 };
/// let little = Ids { isar0: 0, mmfr0: 0x0000_0022, mmfr1: 0x1, mmfr2: 0x1 };
/// let both = big.and(little);
/// assert_eq!((both.physical_bits(), both.asid_bits()), (40, 16));
/// assert!(both.has_access_flag() && both.has_common());
/// assert!(!both.has_dirty_state() && !both.has_ranges());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ids {
    /// `ID_AA64ISAR0_EL1`.
    pub isar0: u64,
    /// `ID_AA64MMFR0_EL1`.
    pub mmfr0: u64,
    /// `ID_AA64MMFR1_EL1`.
    pub mmfr1: u64,
    /// `ID_AA64MMFR2_EL1`.
    pub mmfr2: u64,
}

// ID_AA64ISAR0_EL1.
const TLB: u32 = 56;
// ID_AA64MMFR0_EL1.
const PA_RANGE: u32 = 0;
const ASID_BITS: u32 = 4;
const TGRAN16: u32 = 20;
const TGRAN64: u32 = 24;
const TGRAN4: u32 = 28;
const TGRAN16_2: u32 = 32;
const TGRAN64_2: u32 = 36;
const TGRAN4_2: u32 = 40;
// ID_AA64MMFR1_EL1.
const HAFDBS: u32 = 0;
const VMID_BITS: u32 = 4;
const VH: u32 = 8;
const XNX: u32 = 28;
// ID_AA64MMFR2_EL1.
const CNP: u32 = 0;
const VA_RANGE: u32 = 16;
const FWB: u32 = 40;
const BBM: u32 = 52;

const fn field(register: u64, low: u32) -> u64 {
    register >> low & 0xf
}

/// Of two registers whose fields are the greater the more there is, the lesser of each of the
/// fields that are listed.
const fn least(a: u64, b: u64, fields: &[u32]) -> u64 {
    let (mut result, mut at) = (0, 0);
    while at < fields.len() {
        let (a, b) = (field(a, fields[at]), field(b, fields[at]));
        result |= (if a < b { a } else { b }) << fields[at];
        at += 1;
    }
    result
}

impl Ids {
    /// The features that both processors have, field by field. Fields that nothing here asks for
    /// are zero.
    pub const fn and(self, other: Self) -> Self {
        let mut mmfr0 = least(self.mmfr0, other.mmfr0, &[PA_RANGE, ASID_BITS]);
        let mut shift = 12;
        while shift <= 16 {
            let (low, low_2) = granule_fields(shift);
            let (a, b) = (self.stage1(shift), other.stage1(shift));
            mmfr0 |= said(if a < b { a } else { b }, shift) << low;
            let (a, b) = (self.stage2(shift), other.stage2(shift));
            // 1 to 3, where 0 says that it is as in stage 1.
            mmfr0 |= (if a < b { a } else { b } as u64 + 1) << low_2;
            shift += 2;
        }
        Self {
            isar0: least(self.isar0, other.isar0, &[TLB]),
            mmfr0,
            mmfr1: least(self.mmfr1, other.mmfr1, &[HAFDBS, VMID_BITS, VH, XNX]),
            mmfr2: least(self.mmfr2, other.mmfr2, &[CNP, VA_RANGE, FWB, BBM]),
        }
    }

    /// Significant bits of a physical address: PARange.
    pub const fn physical_bits(self) -> u32 {
        match field(self.mmfr0, PA_RANGE) {
            0 => 32,
            1 => 36,
            2 => 40,
            3 => 42,
            4 => 44,
            5 => 48,
            6 => 52,
            _ => 56,
        }
    }

    /// PARange as it stands, which is what `TCR_EL1.IPS` and `VTCR_EL2.PS` hold; no more than
    /// `most`.
    pub(super) const fn output_size(self, most: u64) -> u64 {
        let range = field(self.mmfr0, PA_RANGE);
        if range < most { range } else { most }
    }

    /// Bits of an ASID: 8 or 16.
    pub const fn asid_bits(self) -> u32 {
        if field(self.mmfr0, ASID_BITS) >= 2 { 16 } else { 8 }
    }

    /// Bits of a VMID: 8 or 16.
    pub const fn vmid_bits(self) -> u32 {
        if field(self.mmfr1, VMID_BITS) >= 2 { 16 } else { 8 }
    }

    /// How much of a granule there is in stage 1: nothing, 48 bits, 52 bits (FEAT_LPA2; of 64 KiB:
    /// FEAT_LVA).
    pub(super) const fn stage1(self, page_shift: u32) -> u8 {
        let (low, _) = granule_fields(page_shift);
        match (page_shift, field(self.mmfr0, low)) {
            (12, 0) | (14, 1) => 1,
            (12, 1..=7) | (14, 2..) => 2,
            (16, 0..=7) if field(self.mmfr2, VA_RANGE) == 0 => 1,
            (16, 0..=7) => 2,
            _ => 0,
        }
    }

    /// Returns the size of an output address of stage 2, where 64 KiB has 52 bits if physical
    /// addresses have.
    pub(super) const fn stage2(self, page_shift: u32) -> u8 {
        let (_, low) = granule_fields(page_shift);
        match (page_shift, field(self.mmfr0, low)) {
            (_, 1) => 0,
            (16, 0) if self.stage1(16) == 0 => 0,
            (16, _) if self.physical_bits() >= 52 => 2,
            (16, _) => 1,
            (_, 0) => self.stage1(page_shift),
            (_, 2) => 1,
            _ => 2,
        }
    }

    /// FEAT_TLBIRANGE: one TLBI invalidates a range.
    pub const fn has_ranges(self) -> bool {
        field(self.isar0, TLB) >= 2
    }

    /// FEAT_HAFDBS: hardware sets the access flag.
    pub const fn has_access_flag(self) -> bool {
        field(self.mmfr1, HAFDBS) >= 1
    }

    /// FEAT_HAFDBS: hardware sets dirty state, too.
    pub const fn has_dirty_state(self) -> bool {
        field(self.mmfr1, HAFDBS) >= 2
    }

    /// FEAT_VHE: a kernel may run at EL2 as it does at EL1.
    pub const fn has_host_extensions(self) -> bool {
        field(self.mmfr1, VH) >= 1
    }

    /// FEAT_XNX: stage 2 tells execution by the guest's kernel and by its user apart.
    pub const fn has_split_execution(self) -> bool {
        field(self.mmfr1, XNX) >= 1
    }

    /// FEAT_TTCNP: processors may share what they remember of tables that all have loaded.
    pub const fn has_common(self) -> bool {
        field(self.mmfr2, CNP) >= 1
    }

    /// FEAT_S2FWB: stage 2 forces memory to be write-back.
    pub const fn has_forced_write_back(self) -> bool {
        field(self.mmfr2, FWB) >= 1
    }

    /// The level of FEAT_BBM, 0 to 3.
    pub const fn bbm(self) -> u8 {
        let level = field(self.mmfr2, BBM);
        if level < 3 { level as u8 } else { 3 }
    }

    /// Returns the capabilities that the engine has to know.
    ///
    /// *Flags that hardware sets* are on where it can; what the registers say follows
    /// ([`tcr_el1`](super::tcr_el1)), so that an embedder that wants them off says so here: `Caps {
    /// hardware_access: false, hardware_dirty: false, ..ids.caps() }`.
    ///
    /// *Break-before-make* is level 3 or 0. Levels 1 and 2 allow more, and then an access while it
    /// goes on may end in a TLB conflict abort (D8.17.2), for which the embedder needs a handler
    /// that invalidates and returns. With one, say `Caps { bbm: ids.bbm(), ..ids.caps() }`.
    ///
    /// *Everything instead of pages*: from 65 pages on ([why](Caps::WITHOUT_RANGES)); with range
    /// instructions, from more pages on than one names.
    ///
    /// ```
    /// use tablewright::arch::arm64::Ids;
    /// let ids = Ids { isar0: 2 << 56, mmfr0: 0x25, mmfr1: 2, mmfr2: 2 << 52 };
    /// let caps = ids.caps();
    /// assert!(
    ///     caps.hardware_access && caps.hardware_dirty && caps.invalidate_all_above == 1 << 21
    /// );
    /// assert_eq!((caps.bbm, ids.bbm()), (0, 2));
    /// ```
    pub const fn caps(self) -> Caps {
        Caps {
            bbm: if self.bbm() == 3 { 3 } else { 0 },
            hardware_access: self.has_access_flag(),
            hardware_dirty: self.has_dirty_state(),
            invalidate_all_above: if self.has_ranges() {
                // (NUM + 1) << (5 * SCALE + 1) with both at their greatest (C5.5, TLBI RVAE1IS).
                32 << 16
            } else {
                Caps::WITHOUT_RANGES
            },
            ..Caps::CONSERVATIVE
        }
    }
}

/// Returns the place of a granule's support: in stage 1, and in stage 2.
const fn granule_fields(page_shift: u32) -> (u32, u32) {
    match page_shift {
        12 => (TGRAN4, TGRAN4_2),
        14 => (TGRAN16, TGRAN16_2),
        _ => (TGRAN64, TGRAN64_2),
    }
}

/// How the field says it: that of 16 KiB counts from 0, the others from 15, which is -1.
const fn said(has: u8, page_shift: u32) -> u64 {
    match (page_shift, has) {
        (14, has) => has as u64,
        (_, 0) => 0xf,
        (12, has) => has as u64 - 1,
        (_, _) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Ids = Ids { isar0: 0, mmfr0: 0, mmfr1: 0, mmfr2: 0 };

    #[test]
    fn address_sizes_are_those_of_the_manual() {
        // D24.2 ID_AA64MMFR0_EL1, PARange.
        let sizes = [32, 36, 40, 42, 44, 48, 52, 56];
        for (range, bits) in sizes.into_iter().enumerate() {
            let ids = Ids { mmfr0: range as u64, ..NONE };
            assert_eq!(ids.physical_bits(), bits);
            assert_eq!(ids.output_size(5), (range as u64).min(5));
        }
    }

    #[test]
    fn granules_are_those_of_the_manual() {
        // TGran4: 0 there, 1 with 52 bits, 15 not. TGran16: 0 not, 1 there, 2 with 52 bits.
        // TGran64: 0 there, 15 not.
        let stage1 = |shift, low: u32, value: u64| {
            let ids = Ids { mmfr0: value << low, ..NONE };
            ids.stage1(shift)
        };
        assert_eq!([0, 1, 15].map(|value| stage1(12, 28, value)), [1, 2, 0]);
        assert_eq!([0, 1, 2].map(|value| stage1(14, 20, value)), [0, 1, 2]);
        assert_eq!([0, 15].map(|value| stage1(16, 24, value)), [1, 0]);
        let large = Ids {
            mmfr2: 1 << 16, // VARange: FEAT_LVA
            ..NONE
        };
        assert_eq!(large.stage1(16), 2);
        // TGran4_2 and TGran16_2: 0 as in stage 1, 1 not, 2 there, 3 with 52 bits. TGran64_2: 0,
        // 1, 2.
        let stage2 = |shift, low: u32, value: u64, more: u64| {
            let ids = Ids { mmfr0: value << low | more, ..NONE };
            ids.stage2(shift)
        };
        for first in [0, 1, 15] {
            let as_in_stage1 = stage1(12, 28, first);
            let all = [0, 1, 2, 3].map(|value| stage2(12, 40, value, first << 28));
            assert_eq!(all, [as_in_stage1, 0, 1, 2]);
        }
        assert_eq!([0, 1, 2, 3].map(|value| stage2(14, 32, value, 0)), [0, 0, 1, 2]);
        assert_eq!([0, 1, 2].map(|value| stage2(16, 36, value, 0xf << 24)), [0, 0, 1]);
        assert_eq!([0, 1, 2].map(|value| stage2(16, 36, value, 6)), [2, 0, 2]);
    }

    #[test]
    fn what_two_have_is_what_each_has() {
        let registers = [
            0u64,
            u64::MAX,
            0x0000_0f0f_1112_2025,
            0x0000_0222_f010_0122,
            0x0210_3010_0200_1116,
            0xf123_1230_1f21_0320,
        ];
        let each = || registers.into_iter().map(|mmfr0| Ids { mmfr0, ..NONE });
        for (a, b) in each().flat_map(|a| each().map(move |b| (a, b))) {
            let (a, b) = (
                Ids { isar0: b.mmfr0, mmfr1: a.mmfr0 >> 3, mmfr2: b.mmfr0 >> 5, ..a },
                Ids { isar0: a.mmfr0, mmfr1: b.mmfr0 >> 7, mmfr2: a.mmfr0 >> 1, ..b },
            );
            let both = a.and(b);
            assert_eq!(both, b.and(a));
            for shift in [12, 14, 16] {
                assert_eq!(both.stage1(shift), a.stage1(shift).min(b.stage1(shift)));
                assert_eq!(both.stage2(shift), a.stage2(shift).min(b.stage2(shift)));
            }
            let least = |of: fn(Ids) -> u32| assert_eq!(of(both), of(a).min(of(b)));
            least(Ids::physical_bits);
            least(Ids::asid_bits);
            least(Ids::vmid_bits);
            least(|ids| ids.bbm().into());
            let all = |of: fn(Ids) -> bool| assert_eq!(of(both), of(a) && of(b));
            all(Ids::has_ranges);
            all(Ids::has_access_flag);
            all(Ids::has_dirty_state);
            all(Ids::has_host_extensions);
            all(Ids::has_split_execution);
            all(Ids::has_common);
            all(Ids::has_forced_write_back);
        }
    }

    #[test]
    fn fields_stand_where_the_manual_says() {
        // D24.2: each feature by the one field that says it is there.
        let isar0 = |low: u32, value: u64| Ids { isar0: value << low, ..NONE };
        let mmfr1 = |low: u32, value: u64| Ids { mmfr1: value << low, ..NONE };
        let mmfr2 = |low: u32, value: u64| Ids { mmfr2: value << low, ..NONE };
        assert!(isar0(56, 2).has_ranges() && !isar0(56, 1).has_ranges());
        assert!(mmfr1(0, 1).has_access_flag() && !mmfr1(0, 1).has_dirty_state());
        assert!(mmfr1(0, 2).has_dirty_state() && mmfr1(0, 4).has_dirty_state());
        assert_eq!((mmfr1(4, 0).vmid_bits(), mmfr1(4, 2).vmid_bits()), (8, 16));
        assert!(mmfr1(8, 1).has_host_extensions() && mmfr1(28, 1).has_split_execution());
        assert!(mmfr2(0, 1).has_common() && mmfr2(40, 1).has_forced_write_back());
        let levels = [0, 1, 2, 3, 4].map(|level| mmfr2(52, level).bbm());
        assert_eq!(levels, [0, 1, 2, 3, 3]);
        let caps = [0, 1, 2, 3].map(|level| mmfr2(52, level).caps().bbm);
        assert_eq!(caps, [0, 0, 0, 3]);
    }
}
