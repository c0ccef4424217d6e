//! Values of the translation control registers of arm64, field by field.

use tablewright::arch::arm64::*;
use tablewright::format::*;
use tablewright::{Caps, Pa};

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
    assert_eq!(tcr_el1::<Arm64<12, 48, true>, Arm64K4Wide>(&ALL, &none), Ok(0x0800_0016_b50c_3510));
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
