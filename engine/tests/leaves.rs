//! Leaves that the processor has: where it has no large ones, none is made, by whatever edit.

use tablewright::guest::{Access, Backing, Fault, Guest, Slot, SlotCell};
use tablewright::hosted::{self, Hosted, Threads};
use tablewright::shared::{Mapped, NewLeaf, Refused, SharedSpace};
use tablewright::{
    AddressSpace, Attrs, Caps, EditError, Format, Ipa, Level, Mapping, Pa, Span, Va,
    format::{Arm64K4, Ept, Npt, X86_64},
};

const G1: u64 = 1 << 30;

fn caps(largest_leaf: Level) -> Caps {
    Caps {
        largest_leaf,
        ..hosted::CAPS
    }
}

/// The size of a leaf at the lower of the two levels.
fn size<F: Format>(largest: Level, wish: Level) -> u64 {
    1 << F::shift(largest.min(wish))
}

/// Each capability, and the largest leaf that it allows.
fn each(sure: u8) -> [(Level, Level); 4] {
    let sure = Level::new(sure);
    let levels = [Level::PAGE, Level::new(1), Level::new(2), Level::ANY];
    levels.map(|level| (level, level.max(sure).min(Level::new(2))))
}

fn a_space_has_no_larger_leaf<F: Format<Input = Va>>(sure: u8) {
    for (largest_leaf, largest) in each(sure) {
        let platform = Hosted::new(2000, 12).with_caps(caps(largest_leaf));
        let mut space = AddressSpace::<F, _>::new(&platform).unwrap();
        let span = Span::new(Va::new(0), G1).unwrap();
        for wish in [Level::PAGE, Level::new(1), Level::new(2)] {
            let mapping = Mapping::new(Attrs::KERNEL_DATA)
                .largest(wish)
                .without_runs();
            space.map(span, Pa::new(0), mapping).unwrap();
            let found = space.query(Va::new(0x1234)).unwrap();
            assert_eq!(found.size(), size::<F>(largest, wish), "{}", F::NAME);
            // Collapsed as far as it goes, whatever is asked for.
            let mut gather = space.gather();
            gather.collapse(span, Level::new(2), false).unwrap();
            gather.finish(|_| ());
            let found = space.query(Va::new(0x1234)).unwrap();
            assert_eq!(
                found.size(),
                size::<F>(largest, Level::new(2)),
                "{}",
                F::NAME
            );
            let mut gather = space.gather();
            let all = gather.unmap(span, |_| core::ops::ControlFlow::Continue(()));
            assert!(all.unwrap().is_done());
            gather.finish(|_| ());
        }
    }
}

#[test]
fn a_space_of_x86_has_no_leaf_that_the_processor_has_not() {
    a_space_has_no_larger_leaf::<X86_64<4>>(1);
}

#[test]
fn a_space_of_arm64_has_every_leaf_of_its_format() {
    a_space_has_no_larger_leaf::<Arm64K4>(2);
}

fn a_shared_space_has_no_larger_leaf<F: Format<Input = Ipa> + PartialEq>(sure: u8) {
    for (largest_leaf, largest) in each(sure) {
        let platform = Threads::new(2000, 12, 1).with_caps(caps(largest_leaf));
        let space = AddressSpace::<F, _>::new(&platform).unwrap();
        let space = SharedSpace::new(space).unwrap();
        let span = Span::new(Ipa::new(0), G1).unwrap();
        let mapping = Mapping::new(Attrs::GUEST_MEMORY);
        assert_eq!(space.map_range(span, Pa::new(0), mapping), Ok(G1));
        let found = space.query(Ipa::new(0x1234)).unwrap();
        assert_eq!(found.size(), size::<F>(largest, Level::ANY), "{}", F::NAME);
        // One leaf.
        let mut gather = space.gather();
        assert!(gather.top_up(3));
        for height in 0..3 {
            let level = Level::new(height);
            let at = (1 + u64::from(height)) * G1;
            let leaf = NewLeaf::new(Ipa::new(at), Pa::new(at), level, Attrs::GUEST_MEMORY);
            let expected = match level <= largest {
                true => Ok(Mapped::Installed),
                false => Err(Refused::Edit(EditError::NoSuchLeaf)),
            };
            assert_eq!(
                gather.map(&leaf.unwrap()),
                expected,
                "{} {level:?}",
                F::NAME
            );
        }
        assert!(gather.finish(|_| ()).is_ok());
    }
}

#[test]
fn a_shared_space_has_no_leaf_that_the_processor_has_not() {
    a_shared_space_has_no_larger_leaf::<Npt<4>>(1);
    a_shared_space_has_no_larger_leaf::<Ept<4>>(0);
}

fn a_fault_of_a_guest_makes_no_larger_leaf<F: Format<Input = Ipa> + PartialEq>(sure: u8) {
    for (largest_leaf, largest) in each(sure) {
        let platform = Threads::new(64, 12, 1).with_caps(caps(largest_leaf));
        let cells = [const { SlotCell::new() }; 1];
        let space = AddressSpace::<F, _>::new(&platform).unwrap();
        let guest = Guest::new(SharedSpace::new(space).unwrap(), &cells);
        let memory = Span::new(Ipa::new(0), 4 * G1).unwrap();
        guest.insert(Slot::memory(memory, 0)).unwrap();
        let fault = Fault::new(Ipa::new(G1 + 0x1234), Access::Write);
        let request = guest.request(&fault).unwrap();
        let mut gather = guest.gather();
        assert!(gather.top_up(3));
        // The host has the memory in one piece of 1 GiB.
        let page = Backing::new(Pa::new(fault.at.get() + 4 * G1), G1);
        assert_eq!(gather.map(&request, &page), Ok(Mapped::Installed));
        assert!(gather.finish(|_| ()).is_ok());
        let found = guest.space().query(fault.at).unwrap();
        assert_eq!(found.size(), size::<F>(largest, Level::ANY), "{}", F::NAME);
    }
}

#[test]
fn a_fault_of_a_guest_makes_no_leaf_that_the_processor_has_not() {
    a_fault_of_a_guest_makes_no_larger_leaf::<Npt<4>>(1);
    a_fault_of_a_guest_makes_no_larger_leaf::<Ept<4>>(0);
}
