//! Memory types, by the registers that say what an index means.

use super::*;

#[test]
fn memory_types_are_those_of_the_registers() {
    // DDI 0487 D24.2 MAIR_EL1 and SDM vol. 3A 13.12.2: the byte of each type, by its index in a
    // descriptor.
    let mair = tablewright::format::MAIR.to_le_bytes();
    let pat = tablewright::format::PAT.to_le_bytes();
    for (memory, attribute, kind) in [
        (Memory::Normal, 0xff, Some(6)),
        (Memory::WriteThrough, 0xbb, Some(4)),
        (Memory::NonCacheable, 0x44, Some(1)),
        (Memory::Device, 0x04, Some(0)),
        (Memory::DeviceStrict, 0x00, None),
        (Memory::Tagged, 0xf0, None),
    ] {
        let attrs = Attrs::KERNEL_DATA.with_memory(memory);
        let bits = Arm64K4::encode(&attrs, Level::PAGE).unwrap();
        assert_eq!(mair[(bits >> 2 & 7) as usize], attribute, "{memory:?}");
        let bits = X86_64::<4>::encode(&attrs, Level::PAGE).ok();
        let index = bits.map(|bits| (bits >> 3 & 3 | bits >> 5 & 4) as usize);
        assert_eq!(index.map(|index| pat[index]), kind, "{memory:?}");
    }
}

#[test]
fn memory_types_are_those_of_another_register() {
    let of_arm = |encode: fn(&Attrs, Level) -> Result<u64, tablewright::Inexpressible>| {
        MEMORY.map(|memory| {
            let bits = encode(&Attrs::KERNEL_RODATA.with_memory(memory), Level::PAGE);
            bits.ok().map(|bits| bits >> 2 & 7)
        })
    };
    // In the order of `MEMORY`: normal, write-through, non-cacheable, device, strict device,
    // tagged.
    let expected = [Some(3), None, Some(2), Some(1), Some(0), None];
    type Other = Arm64<12, 48, false, OTHER_MAIR>;
    assert_eq!(of_arm(Other::encode), expected);
    assert_eq!(of_arm(Arm64El2::<14, 47, false, OTHER_MAIR>::encode), expected);
    // Linux: two indices of normal memory, the second of which is that of tags where there are
    // tags.
    type Linux = Arm64<12, 48, false, 0x0004_0044_ffff>;
    let expected = [Some(0), None, Some(2), Some(4), Some(3), None];
    assert_eq!(of_arm(Linux::encode), expected);
    type Tagged = Arm64<12, 48, false, 0x0004_0044_f0ff>;
    let expected = [Some(0), None, Some(2), Some(4), Some(3), Some(1)];
    assert_eq!(of_arm(Tagged::encode), expected);
    // Hints to allocate do not make another type, and the type that allocates is better: write-back
    // 1110, 1111.
    type Hints = Arm64<12, 48, false, 0xaa_ffee>;
    let expected = [Some(1), Some(2), None, None, Some(3), None];
    assert_eq!(of_arm(Hints::encode), expected);

    // What only others write is decoded as well, D24.2 MAIR_EL1: nGRE, GRE; transient write-back
    // and write-through; write-back outside and non-cacheable inside; the types without XS.
    fn decoded<const MAIR: u64>(first: u64) -> [Memory; 2] {
        [first, first + 1].map(|index| {
            let page = Arm64::<12, 48, false, MAIR>::decode(0x703 | index << 2, Level::PAGE);
            let again = Arm64::<12, 48, false, MAIR>::encode(&page, Level::PAGE);
            assert!(again.is_ok(), "what was decoded can be encoded");
            page.memory
        })
    }
    use Memory::{Device, DeviceStrict, NonCacheable, Normal, WriteThrough};
    const ALL: u64 = 0x0000_bbf0_0044_04ff;
    assert_eq!(decoded::<{ ALL | 0x0c08 << 48 }>(6), [Device, Device]);
    assert_eq!(decoded::<{ ALL | 0x3377 << 48 }>(6), [Normal, WriteThrough]);
    assert_eq!(decoded::<{ ALL | 0x40f4 << 48 }>(6), [NonCacheable, NonCacheable]);
    assert_eq!(decoded::<{ ALL | 0x01a0 << 48 }>(6), [WriteThrough, DeviceStrict]);
    // Where there is no such type, as one that is stricter.
    assert_eq!(decoded::<0x0440_3308>(0), [Device, Device]);
    assert_eq!(decoded::<0x0044_3308>(0), [DeviceStrict, NonCacheable]);

    let of_x86 = |encode: fn(&Attrs, Level) -> Result<u64, tablewright::Inexpressible>,
                  attrs: Attrs| {
        [Memory::Normal, Memory::WriteThrough, Memory::NonCacheable, Memory::Device].map(|memory| {
            let bits = encode(&attrs.with_memory(memory), Level::new(1));
            bits.ok().map(|bits| bits >> 3 & 3 | bits >> 10 & 4)
        })
    };
    let expected = [Some(0), Some(1), None, Some(3)];
    assert_eq!(of_x86(X86_64::<4, RESET_PAT>::encode, Attrs::KERNEL_RODATA), expected);
    assert_eq!(of_x86(Npt::<4, RESET_PAT>::encode, Attrs::USER_RODATA), expected);
    // UC- where there is no UC.
    let expected = [Some(0), None, None, Some(1)];
    assert_eq!(of_x86(X86_64::<4, 0x0606_0606_0606_0706>::encode, Attrs::KERNEL_RODATA), expected);
    // Types with the highest bit of the index.
    type High = X86_64<5, 0x0001_0406_0505_0505>;
    let expected = [Some(4), Some(5), Some(6), Some(7)];
    assert_eq!(of_x86(High::encode, Attrs::KERNEL_RODATA), expected);
    for (index, memory) in [
        (0, Memory::Normal),
        (4, Memory::Normal),
        (5, Memory::WriteThrough),
        (6, Memory::NonCacheable),
        (7, Memory::Device),
    ] {
        let large = (index & 3) << 3 | (index & 4) << 10 | 0x81;
        assert_eq!(High::decode(large, Level::new(1)).memory, memory, "{index}");
        let small = (index & 3) << 3 | (index & 4) << 5 | 1;
        assert_eq!(High::decode(small, Level::PAGE).memory, memory, "{index}");
    }
}
