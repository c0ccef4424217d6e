//! Instructions: what each messenger of hardware executes for a flush.

use super::*;

/// With `x0`, or none.
#[test]
fn instructions_are_those_of_an_assembler() {
    let words = [
        (Op::Vmalle1, 31, 0xd508_831f),
        (Op::Vae1, 0, 0xd508_8320),
        (Op::Aside1, 0, 0xd508_8340),
        (Op::Vaae1, 0, 0xd508_8360),
        (Op::Vale1, 0, 0xd508_83a0),
        (Op::Vaale1, 0, 0xd508_83e0),
        (Op::Rvae1, 0, 0xd508_8220),
        (Op::Rvaae1, 0, 0xd508_8260),
        (Op::Rvale1, 0, 0xd508_82a0),
        (Op::Rvaale1, 0, 0xd508_82e0),
        (Op::Vmalls12e1, 31, 0xd50c_83df),
        (Op::Ipas2e1, 0, 0xd50c_8020),
        (Op::Ipas2le1, 0, 0xd50c_80a0),
        (Op::Ripas2e1, 0, 0xd50c_8040),
        (Op::Ripas2le1, 0, 0xd50c_80c0),
        (Op::Alle1, 31, 0xd50c_839f),
        (Op::Alle2, 31, 0xd50c_831f),
        (Op::Vae2, 0, 0xd50c_8320),
        (Op::Vale2, 0, 0xd50c_83a0),
        (Op::Rvae2, 0, 0xd50c_8220),
        (Op::Rvale2, 0, 0xd50c_82a0),
    ];
    for (op, register, word) in words {
        assert_eq!(op.word(register), word, "{op:?}");
        assert_eq!(op.is_everything(), register == 31, "{op:?}");
    }
    // The same of this processor alone.
    let words = [
        (Op::Vmalle1, 31, 0xd508_871f),
        (Op::Vae1, 0, 0xd508_8720),
        (Op::Aside1, 0, 0xd508_8740),
        (Op::Vale1, 0, 0xd508_87a0),
        (Op::Rvae1, 0, 0xd508_8620),
        (Op::Vmalls12e1, 31, 0xd50c_87df),
        (Op::Ipas2e1, 0, 0xd50c_8420),
        (Op::Ripas2e1, 0, 0xd50c_8440),
        (Op::Alle2, 31, 0xd50c_871f),
        (Op::Vae2, 0, 0xd50c_8720),
        (Op::Rvae2, 0, 0xd50c_8620),
    ];
    for (op, register, word) in words {
        assert_eq!(op.local_word(register), word, "{op:?}");
    }
}

const ARM: arm64::Encoder =
    arm64::Encoder { regime: Regime::El1, page_shift: 12, ranges: true, wide: false };

fn instructions(encoder: arm64::Encoder, flush: &Invalidation<'_>) -> Vec<Instruction> {
    let mut all = Vec::new();
    encoder.encode(flush, |one| all.push(one));
    all
}

#[test]
fn a_flush_of_stage_2_waits_once_and_forgets_once_what_was_combined() {
    let stage2 = arm64::Encoder { regime: Regime::Stage2, ..ARM };
    let combined = Instruction::Tlbi(Tlbi { op: Op::Vmalle1, operand: 0 });
    for count in [1, 16] {
        let ranges: Vec<_> = (0..count).map(|page| range(3 * page, 1, true)).collect();
        let all = instructions(stage2, &of(What::Ranges(&ranges), false));
        let (first, last) = all.split_at(count as usize);
        let by_address =
            |one: &Instruction| matches!(one, Instruction::Tlbi(one) if one.op == Op::Ipas2e1);
        assert!(first.iter().all(by_address), "{first:?}");
        assert_eq!(last, [Instruction::Dsb, combined]);
    }
    for global in [false, true] {
        let all = instructions(stage2, &of(What::Everything, global));
        let both = Tlbi { op: Op::Vmalls12e1, operand: 0 };
        assert_eq!(all, [Instruction::Tlbi(both)]);
        assert_eq!(instructions(stage2, &of(What::Ranges(&[]), global)), []);
    }
}

/// A leaf of any size takes one instruction of an address; more take one of a range.
#[test]
fn a_block_is_an_address_and_two_are_a_range() {
    for (blocks, op) in [(1, Op::Vale1), (2, Op::Rvale1)] {
        let last = blocks * (2 << 20) - 1;
        let stale = Stale { first: 0, last, level: Some(Level::new(1)), tables: false };
        let all = instructions(ARM, &of(What::Ranges(&[stale]), false));
        let ops: Vec<_> = all
            .iter()
            .filter_map(|one| match one {
                Instruction::Tlbi(tlbi) => Some(tlbi.op),
                Instruction::Dsb => None,
            })
            .collect();
        assert_eq!(ops, [op]);
    }
}

/// The addresses of single leaves, until a range may start: at 64 KiB where it is named in these.
#[test]
fn leaves_go_one_by_one_where_no_range_may_start() {
    let blocks =
        Stale { first: 2 << 20, last: (8 << 20) - 1, level: Some(Level::new(1)), tables: false };
    let [apart, wide] =
        [arm64::Encoder { ranges: false, ..ARM }, arm64::Encoder { wide: true, ..ARM }];
    for (encoder, stale, count) in [(apart, blocks, 3), (wide, range(14, 18, false), 3)] {
        let all = instructions(encoder, &of(What::Ranges(&[stale]), false));
        let page = |one: &Instruction| match one {
            Instruction::Tlbi(one) => named(&encoder, one).0.start << 12,
            Instruction::Dsb => panic!("nothing is waited for"),
        };
        let pages: Vec<_> = all.iter().map(page).collect();
        let stride = if encoder.wide { 1 << 12 } else { 2 << 20 };
        let expected: Vec<_> = (0..count).map(|number| stale.first + number * stride).collect();
        assert_eq!(pages, expected);
    }
}

/// The pages that an instruction names, and its hint, from the manual's fields.
fn named(encoder: &arm64::Encoder, tlbi: &Tlbi) -> (std::ops::Range<u64>, u64) {
    let bits = |low: u32, count: u32| tlbi.operand >> low & ((1 << count) - 1);
    let granule = u64::from((encoder.page_shift - 10) / 2);
    if tlbi.op.is_range() {
        assert_eq!(bits(46, 2), granule);
        let base = if encoder.wide { 16 } else { encoder.page_shift };
        let first = bits(0, 37) << base >> encoder.page_shift;
        let pages = (bits(39, 5) + 1) << (5 * bits(44, 2) + 1);
        (first..first + pages, bits(37, 2))
    } else {
        let first = bits(0, 44) << 12 >> encoder.page_shift;
        let hint = bits(44, 4);
        assert!(hint == 0 || hint >> 2 == granule);
        (first..first + 1, hint & 3)
    }
}

proptest! {
    #[test]
    fn instructions_name_each_page_once_and_no_other(
        page_shift in prop::sample::select(vec![12u32, 14, 16]),
        (ranges, wide, tables, global) in any::<(bool, bool, bool, bool)>(),
        regime in prop::sample::select(vec![Regime::El1, Regime::El2, Regime::Stage2]),
        height in prop::option::of(0..2u8),
        (first, count) in (0..1u64 << 20, prop_oneof![1..200u64, 1..1u64 << 24]),
        id in any::<u16>(),
    ) {
        let encoder = arm64::Encoder { regime, page_shift, ranges, wide };
        let stage2 = regime == Regime::Stage2;
        let stride = u64::from(page_shift - 3) * u64::from(height.unwrap_or(0));
        let count = if ranges { count } else { count % 2000 + 1 };
        let (first, pages) = (first << stride, (count >> stride).max(1) << stride);
        let range = Stale {
            first: first << page_shift,
            last: ((first + pages) << page_shift) - 1,
            level: height.map(Level::new),
            tables,
        };
        let mut all = instructions(encoder,
            &Invalidation { id, ..of(What::Ranges(&[range]), global) });
        if stage2 {
            all.truncate(all.len() - 2);
        }
        let mut next = first;
        for one in &all {
            let Instruction::Tlbi(tlbi) = one else {
                panic!("a wait in the midst of it");
            };
            let name = format!("{:?}", tlbi.op);
            // Leaves of all ASIDs, of one, or of a guest's physical addresses.
            prop_assert_eq!(name.contains("le"), !tables);
            prop_assert_eq!(name.ends_with('2'), regime == Regime::El2);
            prop_assert_eq!(name.to_lowercase().contains("ipas2"), stage2);
            prop_assert_eq!(name.to_lowercase().contains("vaa"), global && regime == Regime::El1);
            prop_assert_eq!(tlbi.operand >> 48,
                if regime != Regime::El1 || global { 0 } else { u64::from(id) });
            let (named, hint) = named(&encoder, tlbi);
            prop_assert_eq!(hint, height.map_or(0, |height| 3 - u64::from(height)));
            prop_assert_eq!(named.start, next);
            // An instruction for one leaf names all of it.
            next = if tlbi.op.is_range() { named.end } else { next + (1 << stride) };
        }
        prop_assert_eq!(next, first + pages);
        // A range is four digits and an odd page; those that cannot start here, and many times the
        // largest, come on top.
        let more = if wide { 15 } else { 0 };
        let most = if ranges { 5 + pages / (1 << 21) + more } else { pages >> stride };
        prop_assert!(all.len() as u64 <= most, "{} instructions for {} pages", all.len(), pages);
    }

    #[test]
    fn a_broadcast_of_amd_names_each_page_once(
        ranges in prop::collection::vec((0..1u64 << 36, 1..700u64, any::<bool>(), any::<bool>()),
        1..8),
        most in prop_oneof![Just(0u16), 1..600u16],
        id in 0..4096u16,
        global in any::<bool>(),
    ) {
        let what: Vec<Stale> = (ranges.iter())
            .map(|&(first, pages, large, tables)| {
                let shift = if large { 21 } else { 12 };
                Stale {
                    first: first << shift,
                    last: ((first + pages) << shift) - 1,
                    level: large.then(|| Level::new(1)),
                    tables,
                }
            })
            .collect();
        let mut seen = Vec::new();
        for Invlpgb { rax, ecx, edx } in broadcast(most,
            &Invalidation { id, ..of(What::Ranges(&what), global) }) {
            prop_assert_eq!(edx, if global { 0 } else { u32::from(id) << 16 });
            prop_assert_eq!(rax & 0xfff & !16, if global { 9 } else { 3 });
            let (more, large) = (ecx & 0xffff, ecx >> 31 != 0);
            prop_assert!(more <= u32::from(most) && ecx & 0x7fff_0000 == 0);
            let shift = if large { 21 } else { 12 };
            prop_assert_eq!(rax & ((1 << shift) - 1) & !0xfff, 0);
            let first = rax >> shift;
            let one = (first, u64::from(more) + 1, large, rax & 16 == 0);
            match seen.last_mut() {
                Some((its, pages, size, tables))
                    if *its + *pages == first && (*size, *tables) == (large,
                        one.3) && *pages % (u64::from(most) + 1) == 0 =>
                {
                    *pages += one.1;
                }
                _ => seen.push(one),
            }
        }
        let pages = |list: &[(u64, u64, bool, bool)]| -> u64 { list.iter().map(|one| one.1).sum() };
        prop_assert_eq!(pages(&seen), pages(&ranges));
        prop_assert_eq!(seen.len() <= ranges.len(), true);
    }
}

fn broadcast(most: u16, flush: &Invalidation<'_>) -> Vec<Invlpgb> {
    let mut all = Vec::new();
    amd::encode(most, flush, |one| all.push(one));
    all
}

/// Blocks of which nothing is known may be 512 pages each: an address invalidates one leaf.
#[test]
fn addresses_are_2_mib_apart_only_if_the_leaves_are_as_large() {
    let two = Stale { level: None, ..range(512, 1024, true) };
    let strides = |level| -> Vec<(bool, u32)> {
        let range = Stale { level, ..two };
        let all = broadcast(1023, &of(What::Ranges(&[range]), false));
        all.iter().map(|one| (one.ecx >> 31 != 0, one.ecx & 0xffff)).collect()
    };
    assert_eq!(strides(None), [(false, 1023)]);
    assert_eq!(strides(Some(Level::PAGE)), [(false, 1023)]);
    assert_eq!(strides(Some(Level::new(1))), [(true, 1)]);
}

/// i01: no messenger included what is global.
#[test]
fn everything_includes_what_is_global() {
    let flush = Invalidation { id: 5, ..of(What::Everything, true) };
    let global = Invlpgb { rax: 1 << 3, ecx: 0, edx: 0 };
    assert_eq!(broadcast(7, &flush), [global]);
    let mut page = [0; PAGE_WORDS];
    let mut set = Cpus::EMPTY;
    set.insert(1);
    let encoder = FlushEncoder::default();
    encoder.encode(&mut page, Some(&set), &flush).unwrap();
    assert_eq!(Flags::from_bits_truncate(page[1]), Flags::ALL_SPACES);
    let all = Tlbi { op: Op::Vmalle1, operand: 0 };
    assert_eq!(instructions(ARM, &flush), [Instruction::Tlbi(all)]);

    let flush = Invalidation { global: false, ..flush };
    let one_space = Invlpgb { rax: 1 << 1, ecx: 0, edx: 5 << 16 };
    assert_eq!(broadcast(7, &flush), [one_space]);
    encoder.encode(&mut page, Some(&set), &flush).unwrap();
    assert_eq!(Flags::from_bits_truncate(page[1]), Flags::NON_GLOBAL_ONLY);
    let of_space = Instruction::Tlbi(arm64::Encoder::space(5));
    assert_eq!(instructions(ARM, &flush), [of_space]);
}

/// i02: a page that is global (as `Attrs::KERNEL_DATA` is) was spared by an INVLPGB with a PCID and
/// without bit 3.
#[test]
fn a_global_page_is_forgotten() {
    let page = [Stale { level: Some(Level::PAGE), ..range(5, 1, false) }];
    let flush = Invalidation { id: 5, ..of(What::Ranges(&page), true) };
    let told = Invlpgb { rax: 0x5000 | 1 << 4 | 1 << 3 | 1, ecx: 0, edx: 0 };
    assert_eq!(broadcast(7, &flush), [told]);
    let mut input = [0; PAGE_WORDS];
    let mut set = Cpus::EMPTY;
    set.insert(1);
    FlushEncoder::default().encode(&mut input, Some(&set), &flush).unwrap();
    assert_eq!(Flags::from_bits_truncate(input[1]), Flags::ALL_SPACES);
    let all_asids = Tlbi { op: Op::Vaale1, operand: 1 << 46 | 3 << 44 | 5 };
    assert_eq!(instructions(ARM, &flush), [Instruction::Tlbi(all_asids)]);
}

/// Hardware that remembers what it was told to do: `None` is the wait.
struct Heard<T>(RefCell<Vec<Option<T>>>);

// SAFETY: there are no TLBs.
unsafe impl amd::Amd for &Heard<Invlpgb> {
    fn invlpgb(&self, operands: Invlpgb) {
        self.0.borrow_mut().push(Some(operands));
    }

    fn tlbsync(&self) {
        self.0.borrow_mut().push(None);
    }
}

// SAFETY: there are no TLBs.
unsafe impl arm64::Arm64 for &Heard<Tlbi> {
    fn tlbi(&self, tlbi: Tlbi) {
        self.0.borrow_mut().push(Some(tlbi));
    }

    fn dsb(&self) {
        self.0.borrow_mut().push(None);
    }
}

/// Each instruction, the wait behind the last, and nobody left.
fn is_told<T: PartialEq + std::fmt::Debug>(
    messenger: &dyn Messenger,
    flush: &Invalidation<'_>,
    heard: &Heard<T>,
    instructions: Vec<T>,
) {
    let mut cpus = Cpus::EMPTY;
    cpus.insert(1);
    assert!(messenger.reaches_all());
    assert_eq!(messenger.cost(flush, 7), 5 * instructions.len() as u64);
    assert!(heard.0.borrow().is_empty());
    messenger.tell(flush, &mut cpus);
    assert!(cpus.is_empty());
    let all = instructions.into_iter().map(Some).chain([None]);
    assert_eq!(heard.0.take(), all.collect::<Vec<_>>());
}

#[test]
fn hardware_is_told_and_waited_for() {
    let pages = [range(5, 2, false), range(9, 1, true)];
    let flush = Invalidation { id: 5, ..of(What::Ranges(&pages), false) };
    let heard = Heard(RefCell::default());
    let messenger = amd::InvlpgbMessenger { most: 7, cost: 5, hardware: &heard };
    is_told(&messenger, &flush, &heard, broadcast(7, &flush));
    let heard = Heard(RefCell::default());
    // SAFETY: there is no hardware (1.).
    let messenger = unsafe { arm64::TlbiMessenger::new(ARM, 5, &heard) };
    let all = instructions(ARM, &flush).into_iter().map(|one| match one {
        Instruction::Tlbi(tlbi) => tlbi,
        Instruction::Dsb => panic!("stage 1 has one wait"),
    });
    is_told(&messenger, &flush, &heard, all.collect());
}

#[test]
fn a_messenger_says_nothing_of_itself() {
    struct Silent;
    // SAFETY: it takes nobody out of the set (1.), and reaches nobody (2.).
    unsafe impl Messenger for Silent {
        fn tell(&self, _: &Invalidation<'_>, _: &mut Cpus) {}
    }
    assert!(!Silent.reaches_all());
    assert_eq!(Silent.cost(&of(What::Everything, true), 7), 0);
}
