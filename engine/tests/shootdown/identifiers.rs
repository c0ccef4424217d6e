//! Identifiers: none is loaded over entries of another space, and none is given up without need.

use super::*;

proptest! {
    #[test]
    fn no_identifier_is_loaded_over_entries_of_another_space(
        loads in prop::collection::vec((0..CPUS, 0..SPACES), 1..400),
    ) {
        let mut holders = [const { Holder::new() }; CPUS];
        let mut memory = [0; Allocator::words(BITS)];
        let mut allocator = Allocator::new(BITS, &mut memory).unwrap();
        let identifiers = Identifiers::new(&allocator, &mut holders).unwrap();
        let spaces = [const { Identity::new() }; SPACES];
        // Of which spaces a CPU may remember something under each identifier, and what it has
        // loaded: what it was told before, until it has loaded what it was told last.
        let mut remembered = vec![BTreeMap::<u16, BTreeSet<usize>>::new(); CPUS];
        let mut loaded = [[None; 2]; CPUS];
        for (cpu, space) in loads {
            let mut forgets = false;
            // SAFETY: one thread plays all CPUs, which have no TLBs but the model's (1. to 4.).
            let id = unsafe {
                let forget = || forgets = true;
                identifiers.load(cpu, &spaces[space], |with| with(&mut allocator), forget)
            };
            let id = id.unwrap();
            prop_assert!(0 < id && id < 1 << BITS);
            prop_assert_eq!(spaces[space].id(), id);
            if forgets {
                remembered[cpu].clear();
            }
            remembered[cpu].entry(id).or_default().insert(space);
            prop_assert_eq!(remembered[cpu][&id].len(), 1, "identifier {} on CPU {}", id, cpu);
            loaded[cpu] = [loaded[cpu][1], Some((space, id))];
            // Hardware that tells all CPUs does so by identifier: those that are in use belong to
            // one space each.
            let in_use = || loaded.iter().flatten().flatten();
            for (space, id) in in_use() {
                for (other, its) in in_use() {
                    prop_assert_eq!(space == other, id == its);
                }
            }
        }
    }
}

#[test]
fn identifiers_are_not_too_few() {
    let mut memory = [0; 1];
    let mut holders = [const { Holder::new() }; 8];
    let allocator = Allocator::new(BITS, &mut memory).unwrap();
    assert!(Identifiers::new(&allocator, &mut holders[..7]).is_some());
    assert!(Identifiers::new(&allocator, &mut holders).is_none());
    assert!(Allocator::new(BITS, &mut []).is_none());
    assert!(Allocator::new(0, &mut memory).is_none() && Allocator::new(17, &mut memory).is_none());
}

#[test]
fn a_space_that_is_loaded_everywhere_keeps_its_identifier() {
    let mut holders = [const { Holder::new() }; 2];
    let mut memory = [0; 1];
    let mut allocator = Allocator::new(3, &mut memory).unwrap();
    let identifiers = Identifiers::new(&allocator, &mut holders).unwrap();
    assert_eq!(identifiers.generation(), 1);
    let (stays, others) = (Identity::new(), [const { Identity::new() }; 40]);
    let flushes = Cell::new(0_u64);
    let mut load = |cpu, space: &Identity| {
        let forget = || flushes.set(flushes.get() + 1);
        // SAFETY: as above (1. to 4.).
        unsafe { identifiers.load(cpu, space, |with| with(&mut allocator), forget) }
    };
    let id = load(0, &stays);
    for space in &others {
        // Generations pass, and CPU 0 does not look up.
        assert_ne!(load(1, space), id);
    }
    // Once in each generation but the first.
    assert_eq!(flushes.get(), identifiers.generation() - 1);
    assert!(flushes.replace(0) > 3);
    assert_eq!(load(0, &stays), id);
    assert_eq!(flushes.get(), 1);
}
