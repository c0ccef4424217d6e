//! A walk in steps comes to what a walk in one go comes to, from the root as from any table on the
//! way.

mod table;

use table::{A4, E4, N5, REGIMES, S4, X4};
use tablewright_walker::{Denied, Descriptor, Fault, Leaf, Regime, Walk, decode, translate};

/// A well-known generator (SplitMix64), so that memory can be a function.
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Memory in which every frame is a table, full of random descriptors: mostly well-formed pointers
/// and leaves, some holes, some nonsense. Where an address leads is a random tree, of which each
/// walk sees one branch.
fn memory(regime: Regime, seed: u64) -> impl Fn(u64, usize) -> u64 {
    move |table, index| {
        let random = mix(mix(seed ^ table) ^ index as u64);
        let pa = random & 0x0000_ffff_c000_0000;
        match (random % 16, regime) {
            (0, _) => random & !1,
            (1, _) => random | 1,
            // Pointers, and pages where they stand at the last level.
            (2..=12, Regime::Arm64Stage1 { .. } | Regime::Arm64Stage1Sized { .. }) => {
                random & 0xffe8_0000_0000_0cfc | pa | 0x3
            }
            (2..=12, Regime::Arm64El2 { .. }) => random & 0xd7c8_0000_0000_04fc | pa | 0x43,
            (2..=12, Regime::X86_64 { .. } | Regime::Npt { .. }) => {
                random & 0xfff0_0000_0000_0f7e | pa | 0x1
            }
            (2..=12, Regime::Riscv { .. }) => random & 0x320 | pa >> 2 | 0x1,
            // In stage 2 what a table descriptor must not have is a memory type of a leaf, so that
            // some are nonsense.
            (2..=12, Regime::Arm64Stage2 { .. }) => random & 0x07e8_0000_0000_0cd4 | pa | 0x3,
            (2..=12, Regime::Ept { .. }) => random & 0xfff0_0000_0000_0f06 | pa | 0x1,
            // Blocks, save at the last level.
            (_, Regime::Arm64Stage1 { .. } | Regime::Arm64Stage1Sized { .. }) => {
                random & 0xffe8_0000_0000_0cfc & !(1 << 52) | pa | 1
            }
            (_, Regime::Arm64El2 { .. }) => random & 0xd7c8_0000_0000_04fc | pa | 0x41,
            (_, Regime::X86_64 { .. } | Regime::Npt { .. }) => {
                random & 0xfff0_0000_0000_1f7e | pa | 0x81
            }
            (_, Regime::Arm64Stage2 { .. }) => random & 0xffe8_0000_0000_0cdc & !(1 << 52) | pa | 1,
            (_, Regime::Ept { .. }) => random & 0xfff0_0000_0000_0f7e | pa | 0x81,
            (_, Regime::Riscv { guest, .. }) => {
                random & 0x6000_0000_0000_03ce | pa >> 2 | 0x3 | u64::from(guest) << 4
            }
        }
    }
}

/// Addresses of both halves, or of the only one.
fn address(regime: Regime, random: u64) -> u64 {
    match regime {
        Regime::Arm64Stage1 { .. } | Regime::Arm64Stage1Sized { .. } => {
            (random as i64 >> (64 - regime.input_bits() - 1)) as u64
        }
        Regime::X86_64 { .. } | Regime::Riscv { guest: false, .. } => {
            (random as i64 >> (64 - regime.input_bits())) as u64
        }
        _ => random >> (64 - regime.input_bits()),
    }
}

type Outcome = Result<Leaf, Fault>;

/// Steps to the end, and returns where the walk stood each time.
fn walk(mut walk: Walk, read: &impl Fn(u64, usize) -> u64) -> (Outcome, Vec<Walk>) {
    let mut places = Vec::new();
    loop {
        places.push(walk);
        let outcome = walk.step(read(walk.table(), walk.index()));
        if let Some(outcome) = outcome.transpose() {
            assert_eq!(&walk, places.last().unwrap(), "it stays where it ended");
            return (outcome, places);
        }
    }
}

#[test]
fn in_steps_it_comes_to_what_it_comes_to_in_one_go() {
    for regime in REGIMES {
        let (mut leaves, mut holes, mut reserved, mut deepest) = (0, 0, 0, 0);
        for case in 0..20_000 {
            let (root, va) = (mix(case) & 0xffff_f000_0000, address(regime, mix(!case)));
            let read = memory(regime, case >> 4);
            let (outcome, places) = walk(Walk::new(regime, root, va).unwrap(), &read);

            let mut reads = Vec::new();
            let whole = translate(regime, root, va, &mut |table: u64, index: usize| {
                reads.push((table, index));
                read(table, index)
            });
            assert_eq!(outcome, whole, "{regime:?} {va:#x}");
            let stood: Vec<_> = places.iter().map(|at| (at.table(), at.index())).collect();
            assert_eq!(stood, reads, "{regime:?} {va:#x}");

            // Each step by itself: the level, the bits of the address, what was denied so far, the
            // meaning.
            let mut denied = Denied::NONE;
            let mut level = regime.start_level();
            for at in &places {
                assert_eq!((at.va(), at.level(), at.denied()), (va, level, denied));
                assert_eq!(1 << at.entry_shift(), regime.entry_size(level));
                let entries = regime.table_entries(level);
                assert_eq!(1 << at.table_shift(), regime.entry_size(level) * entries as u64);
                let among = (va >> at.entry_shift()) % entries as u64;
                assert_eq!(at.index() as u64, among, "{regime:?} {va:#x}");
                match decode(regime, level, va, denied, read(at.table(), at.index())) {
                    Descriptor::Table { denied: more, .. } => denied = denied.union(more),
                    Descriptor::Leaf(leaf) => assert_eq!(outcome, Ok(leaf)),
                    Descriptor::Invalid => assert_eq!(outcome, Err(Fault::NotMapped { level })),
                    Descriptor::Reserved(_) => {
                        assert!(matches!(outcome, Err(Fault::Reserved(_))))
                    }
                }
                level += (regime.last_level() - regime.start_level()).signum();
            }
            match outcome {
                Ok(_) => leaves += 1,
                Err(Fault::NotMapped { .. }) => holes += 1,
                Err(_) => reserved += 1,
            }
            deepest = deepest.max(places.len());
        }
        let levels = 1 + (regime.last_level() - regime.start_level()).unsigned_abs();
        assert_eq!(deepest, usize::from(levels), "{regime:?}");
        assert!(
            leaves > 2000 && holes > 1000 && reserved > 1000,
            "{regime:?}: {leaves} {holes} {reserved}"
        );
    }
}

#[test]
fn from_a_table_that_was_remembered_it_goes_on_as_from_the_root() {
    for regime in REGIMES {
        let mut other = 0;
        for case in 0..5_000 {
            let (root, va) = (mix(case) & 0xffff_f000_0000, address(regime, mix(!case)));
            let read = memory(regime, case >> 4);
            let (outcome, places) = walk(Walk::new(regime, root, va).unwrap(), &read);
            for at in &places[1..] {
                let resume = |va| Walk::resume(regime, at.table(), at.level(), at.denied(), va);
                assert_eq!(resume(va), *at);
                assert_eq!(walk(resume(va), &read).0, outcome);
                // Whatever shares the bits above the table shares the table.
                let near = va ^ mix(va) >> (64 - at.table_shift());
                let (from_root, through) = walk(Walk::new(regime, root, near).unwrap(), &read);
                assert_eq!(walk(resume(near), &read).0, from_root, "{regime:?} {near:#x}");
                assert!(through.contains(&resume(near)));
                other += usize::from(from_root != outcome);
            }
        }
        // A tree of one level has no table but the root.
        let one = regime.start_level() == regime.last_level();
        assert!(one || other > 2000, "{regime:?}: {other}");
    }
}

#[test]
fn a_walk_that_ended_takes_another_value() {
    let mut walk = Walk::resume(A4, 0x5000, 3, Denied::NONE, 0x20_1234);
    assert_eq!(walk.index(), 1);
    let Ok(Some(leaf)) = walk.step(0x0060_0000_4000_0303) else {
        panic!("a page");
    };
    assert!(!leaf.accessed);
    assert_eq!(walk.step(0), Err(Fault::NotMapped { level: 3 }));
    let Err(Fault::Reserved(malformed)) = walk.step(0x0060_0000_4000_0701) else {
        panic!("reserved");
    };
    assert_eq!((malformed.table, malformed.index, malformed.level), (0x5000, 1, 3));
    assert_eq!(
        walk.step(0x0060_0000_4000_0703),
        Ok(Some(Leaf { accessed: true, raw: 0x0060_0000_4000_0703, ..leaf }))
    );
}

#[test]
fn no_walk_starts_between_the_halves() {
    assert_eq!(Walk::new(A4, 0x1000, 1 << 48), Err(Fault::NonCanonical));
    assert_eq!(Walk::new(X4, 0x1000, 1 << 47), Err(Fault::NonCanonical));
    assert!(Walk::new(A4, 0x1000, 1 << 47).is_ok());
    // Stage 2 has one, which ends with the size of an address.
    for (regime, bits) in [(S4, 40), (E4, 48), (N5, 57)] {
        assert!(Walk::new(regime, 0x1000, (1 << bits) - 1).is_ok());
        for outside in [1 << bits, u64::MAX, 1 << 63] {
            let walk = Walk::new(regime, 0x1000, outside);
            assert_eq!(walk, Err(Fault::NonCanonical), "{regime:?} {outside:#x}");
        }
    }
}

#[test]
#[should_panic = "no such level"]
fn no_walk_goes_on_at_a_level_that_does_not_exist() {
    Walk::resume(X4, 0x1000, 5, Denied::NONE, 0);
}
