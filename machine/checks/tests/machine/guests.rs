//! Guests with a stage 1 of their own, step by step: what is translated, what is remembered, what
//! an invalidation is about.
//!
//! What a host may rely on is tried by the workload `guests`, over seeds, with bugs planted into it
//! and without.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;

use tablewright::format::{Ept, Npt, Stage2K4};
use tablewright::{AddressSpace, Attrs, Format, Half, Ipa, Pa, Perms, Span};
use tablewright_machine::{
    Architecture, Cause, Cpu, Fault, Granule, Machine, Mapper, Memory, Regime, Request, Rule,
    Setup, Stages, Time, Tlbi, Want,
};

type Arm = Stage2K4<36>;

const VMID: u16 = 3;
const ASID: u16 = 9;
const PAGE: u64 = 0x1000;
/// The guest's memory, by addresses that it takes for physical: its tables, and its data.
const ROOT: u64 = 0;
const LAST: u64 = 3 * PAGE;
const DATA: u64 = 4 * PAGE;
/// The guest's addresses: entry 1 of the first two tables, then of pages, and a block of 2 MiB.
const VA: u64 = 1 << 39 | 1 << 30;
const LARGE: u64 = VA + (1 << 21);

fn arm() -> Architecture {
    let granule = Granule::K4;
    Architecture {
        guest: Some(Regime::Arm64Stage1 { granule, wide: false }),
        ..Architecture::arm64(Regime::Arm64Stage2 {
            granule,
            input_bits: 36,
            wide: false,
            forced_write_back: false,
        })
    }
}

/// A guest, its tables written, and a page of data.
struct Guest<'m, F: Format<Input = Ipa>> {
    machine: &'m Machine,
    mapper: Mapper<'m>,
    space: RefCell<AddressSpace<F, Mapper<'m>>>,
    data: Cell<Pa>,
}

impl<F: Format<Input = Ipa>> Guest<'_, F> {
    fn map(&self, at: u64, size: u64, to: Pa, perms: Perms) {
        let attrs = Attrs { perms, ..Attrs::GUEST_MEMORY };
        let span = Span::new(Ipa::new(at), size).unwrap();
        self.space.borrow_mut().map(span, to, attrs).unwrap();
    }

    /// Takes what is mapped away, and leaves what is remembered of it.
    fn unmap(&self, at: u64, size: u64, forget: impl FnOnce()) {
        let mut space = self.space.borrow_mut();
        let mut gather = space.gather();
        let span = Span::new(Ipa::new(at), size).unwrap();
        let progress = gather.unmap(span, |_| ControlFlow::Continue(())).unwrap();
        assert!(progress.is_done());
        self.machine.dsb_stores();
        forget();
        gather.finish(|_| ());
    }

    fn write(&self, at: u64, value: u64) {
        self.machine.write(at, value).unwrap();
    }

    /// The descriptor of a page or block of the guest, accessed and dirty if it is not `fresh`.
    fn leaf(&self, at: u64, large: bool, fresh: bool) -> u64 {
        if self.machine.architecture().is_x86() {
            at | if fresh { 0x03 } else { 0x63 } | u64::from(large) << 7
        } else {
            at | 3 << 8 | 1 << 11 | u64::from(!fresh) << 10 | if large { 1 } else { 3 }
        }
    }

    fn boot(&self, table_perms: Perms) {
        let all = Perms::READ | Perms::WRITE | Perms::USER_READ | Perms::USER_WRITE;
        for number in 0..5 {
            let page = self.machine.take_page().unwrap();
            self.map(number * PAGE, PAGE, page, all);
            self.data.set(page);
        }
        self.mapper.load();
        let table = |at: u64| at | if self.machine.architecture().is_x86() { 0x27 } else { 3 };
        self.write(ROOT + 8, table(PAGE));
        self.write(PAGE + 8, table(2 * PAGE));
        self.write(2 * PAGE, table(LAST));
        self.write(2 * PAGE + 8, self.leaf(1 << 21, true, false));
        self.write(LAST, self.leaf(DATA, false, false));
        self.write(LAST + 8, self.leaf(DATA, false, true));
        self.write(DATA, 42);
        if table_perms != all {
            let change = tablewright::Change::new().perms(table_perms);
            let span = Span::new(Ipa::new(0), 4 * PAGE).unwrap();
            let mut space = self.space.borrow_mut();
            let mut gather = space.gather();
            gather.protect(span, change).unwrap();
            gather.finish(|_| ());
        }
        self.machine.load_guest(Some((ROOT, ASID)));
    }

    fn read(&self, va: u64) -> Result<u64, Fault> {
        self.machine.read(va)
    }

    fn tlbi(&self, tlbi: Tlbi) {
        self.machine.tlbi(Tlbi { id: Some(VMID), ..tlbi });
        self.machine.dsb();
    }
}

const BY_IPA: Tlbi =
    Tlbi { range: Some((DATA, DATA + 0xfff)), stages: Stages::Second, ..Tlbi::ALL };
const COMBINED: Tlbi = Tlbi { stages: Stages::First, ..Tlbi::ALL };
const BOTH: Tlbi = Tlbi::ALL;
const ALL: Perms = Perms::READ.union(Perms::WRITE).union(Perms::USER_READ).union(Perms::USER_WRITE);
const READ_ONLY: Perms = Perms::READ.union(Perms::USER_READ);

/// Runs a program on so many CPUs, the first of which has booted the guest.
fn run<F: Format<Input = Ipa>>(
    architecture: Architecture,
    cpus: usize,
    table_perms: Perms,
    program: impl Fn(Cpu<'_>, &Guest<'_, F>),
) -> Vec<Rule> {
    let mut setup = Setup::new(architecture, Memory::new(64, 12, 1 << 30));
    setup.scheduler.cpus = cpus;
    let machine = Machine::new(setup);
    let mapper = machine.new_space();
    let mut space = AddressSpace::<F, _>::new(mapper).unwrap().with_id(VMID);
    space.make_live();
    mapper.attach(space.root(), Half::Lower, VMID);
    let guest = Guest {
        machine: &machine,
        mapper,
        space: RefCell::new(space),
        data: Cell::new(Pa::new(0)),
    };
    machine
        .run(|cpu| {
            if cpu.id() == 0 {
                guest.boot(table_perms);
            } else {
                cpu.spend(Time::us(1));
                cpu.order();
                mapper.load();
                machine.load_guest(Some((ROOT, ASID)));
            }
            program(cpu, &guest);
        })
        .unwrap();
    machine.finish().iter().map(|violation| violation.rule).collect()
}

fn second(ipa: u64, want: Want, on_walk: bool, cause: Cause) -> Result<u64, Fault> {
    Err(Fault::Second { ipa, want, on_walk, cause, depth: 0 })
}

#[test]
fn an_access_goes_through_both_stages() {
    fn check<F: Format<Input = Ipa>>(architecture: Architecture) {
        let tables = match architecture.regime {
            Regime::Arm64Stage2 { .. } => Want::Read,
            _ => Want::Write,
        };
        let broken = run::<F>(architecture, 1, ALL, |_, guest| {
            assert_eq!(guest.read(VA), Ok(42));
            // Not mapped by the guest: its own affair.
            assert_eq!(guest.read(VA + 2 * PAGE), Err(Fault::Translation { depth: 0 }));
            guest.unmap(DATA, PAGE, || ());
            let gone = second(DATA, Want::Read, false, Cause::Translation);
            assert_eq!(guest.read(VA), gone);
            guest.unmap(LAST, PAGE, || ());
            let table = second(LAST, tables, true, Cause::Translation);
            assert_eq!(guest.read(VA), table);
            assert_eq!(guest.read(VA + PAGE), second(LAST + 8, tables, true, Cause::Translation));
        });
        assert_eq!(broken, []);
    }
    check::<Arm>(arm());
    check::<Ept<4>>(Architecture::ept());
    check::<Npt<4>>(Architecture::npt());
}

#[test]
fn what_is_combined_outlives_an_invalidation_by_address() {
    let broken = run::<Arm>(arm(), 1, ALL, |_, guest| {
        assert_eq!(guest.read(VA), Ok(42));
        guest.unmap(DATA, PAGE, || {
            assert_eq!(guest.read(VA), Ok(42));
            guest.tlbi(BY_IPA);
            assert_eq!(guest.read(VA), Ok(42), "TLBI IPAS2E1 is not about it");
            guest.tlbi(COMBINED);
            let gone = second(DATA, Want::Read, false, Cause::Translation);
            assert_eq!(guest.read(VA), gone);
        });
    });
    assert_eq!(broken, []);
}

#[test]
fn what_is_combined_comes_back_from_what_stage_2_alone_has_left() {
    let broken = run::<Arm>(arm(), 1, ALL, |_, guest| {
        assert_eq!(guest.read(VA), Ok(42));
        guest.unmap(DATA, PAGE, || {
            guest.tlbi(COMBINED);
            assert_eq!(guest.read(VA), Ok(42), "combined anew");
            guest.tlbi(BY_IPA);
            assert_eq!(guest.read(VA), Ok(42), "the wrong order");
            guest.tlbi(BOTH);
            assert!(guest.read(VA).is_err());
        });
    });
    assert_eq!(broken, []);
}

#[test]
fn on_x86_one_operation_drops_both_and_another_does_not() {
    fn check<F: Format<Input = Ipa>>(architecture: Architecture) {
        let broken = run::<F>(architecture, 1, ALL, |_, guest| {
            assert_eq!(guest.read(VA), Ok(42));
            guest.unmap(DATA, PAGE, || {
                guest.tlbi(COMBINED);
                assert_eq!(guest.read(VA), Ok(42), "INVVPID leaves guest-physical mappings");
                guest.tlbi(BOTH);
                assert!(guest.read(VA).is_err(), "INVEPT leaves nothing");
            });
        });
        assert_eq!(broken, []);
    }
    check::<Ept<4>>(Architecture::ept());
    check::<Npt<4>>(Architecture::npt());
}

#[test]
fn the_walk_of_a_guest_writes_where_the_architecture_says_so() {
    fn check<F: Format<Input = Ipa>>(
        architecture: Architecture,
        va: u64,
        expected: Result<u64, Fault>,
    ) {
        let broken = run::<F>(architecture, 1, READ_ONLY, |_, guest| {
            assert_eq!(guest.read(va), expected);
        });
        assert_eq!(broken, []);
    }
    let write = |ipa| second(ipa, Want::Write, true, Cause::Permission);
    // Tables that stage 2 lets be read only. The first descriptor is that of the root.
    let flags = Architecture::ept();
    check::<Ept<4>>(flags.clone(), VA, write(ROOT + 8));
    let no_flags = Architecture { hardware_access: false, hardware_dirty: false, ..flags };
    check::<Ept<4>>(no_flags.clone(), VA, Ok(42));
    check::<Npt<4>>(Architecture::npt(), VA, write(ROOT + 8));
    check::<Arm>(arm(), VA, Ok(42));
    // A flag that the walker sets is a write everywhere.
    check::<Ept<4>>(no_flags, VA + PAGE, write(LAST + 8));
    let access = Architecture { hardware_access: true, ..arm() };
    check::<Arm>(access, VA + PAGE, write(LAST + 8));
    check::<Arm>(arm(), VA + PAGE, Err(Fault::AccessFlag { depth: 0 }));
}

#[test]
fn flags_of_both_stages_are_set() {
    let architecture = Architecture { hardware_access: true, ..arm() };
    let broken = run::<Arm>(architecture, 1, ALL, |_, guest| {
        assert_eq!(guest.read(VA + PAGE), Ok(42));
        let machine = guest.machine;
        machine.load_guest(None);
        let descriptor = machine.read(LAST + 8).unwrap();
        assert_eq!(descriptor, guest.leaf(DATA, false, false));
    });
    assert_eq!(broken, []);
    let broken = run::<Ept<4>>(Architecture::ept(), 1, ALL, |_, guest| {
        let space = || guest.space.borrow().query(Ipa::new(DATA)).unwrap().attrs();
        guest.unmap(DATA, PAGE, || ());
        let attrs = Attrs { accessed: false, dirty: false, ..Attrs::GUEST_MEMORY };
        let span = Span::new(Ipa::new(DATA), PAGE).unwrap();
        let mapped = guest.space.borrow_mut().map(span, guest.data.get(), attrs);
        assert_eq!(mapped, Ok(()));
        guest.read(VA).unwrap();
        assert_eq!((space().accessed, space().dirty), (true, false));
        guest.write(VA, 43);
        assert_eq!((space().accessed, space().dirty), (true, true));
    });
    assert_eq!(broken, []);
}

#[test]
fn an_entry_is_of_the_smaller_size() {
    let broken = run::<Arm>(arm(), 1, ALL, |_, guest| {
        // A block of the guest over one page of the host.
        guest.map(1 << 21, PAGE, guest.data.get(), ALL);
        assert_eq!(guest.read(LARGE), Ok(42));
        let next = second((1 << 21) + PAGE, Want::Read, false, Cause::Translation);
        assert_eq!(guest.read(LARGE + PAGE), next);
    });
    assert_eq!(broken, []);
}

#[test]
fn an_invalidation_of_the_guest_is_by_its_own_identifier() {
    let broken = run::<Arm>(arm(), 1, ALL, |_, guest| {
        let own = |asid, first| Tlbi {
            asid: Some(asid),
            range: Some((first, first + 0xfff)),
            ..COMBINED
        };
        assert_eq!(guest.read(VA), Ok(42));
        // The guest turns its stage 1 off, unmaps the page, and turns it on again.
        let machine = guest.machine;
        machine.load_guest(None);
        guest.write(LAST, 0);
        machine.load_guest(Some((ROOT, ASID)));
        assert_eq!(guest.read(VA), Ok(42));
        guest.tlbi(own(ASID + 1, VA));
        guest.tlbi(own(ASID, VA + PAGE));
        guest.tlbi(BY_IPA);
        assert_eq!(guest.read(VA), Ok(42));
        guest.tlbi(own(ASID, VA));
        assert_eq!(guest.read(VA), Err(Fault::Translation { depth: 0 }));
    });
    assert_eq!(broken, []);
}

/// Lets the CPUs go on one after the other.
fn turn(cpu: Cpu<'_>, number: u64) {
    cpu.wait_until(Time::us(10 * number));
    cpu.order();
}

#[test]
fn a_local_invalidation_leaves_other_cpus_alone_and_each_may_do_its_own() {
    let here = |tlbi| Tlbi { broadcast: false, ..tlbi };
    let broken = run::<Arm>(arm(), 2, ALL, |cpu, guest| {
        if cpu.id() == 1 {
            turn(cpu, 1);
            assert_eq!(guest.read(VA), Ok(42));
            turn(cpu, 3);
            assert_eq!(guest.read(VA), Ok(42), "told nothing");
            // The kick: it leaves the guest, and forgets before it enters again.
            turn(cpu, 4);
            guest.tlbi(here(BY_IPA));
            guest.tlbi(here(COMBINED));
            assert!(guest.read(VA).is_err());
        } else {
            assert_eq!(guest.read(VA), Ok(42));
            turn(cpu, 2);
            guest.unmap(DATA, PAGE, || {
                guest.tlbi(here(BY_IPA));
                guest.tlbi(here(COMBINED));
                assert!(guest.read(VA).is_err());
                turn(cpu, 5);
                // No CPU remembers it: each has been told, by itself.
                guest.machine.give_page(guest.data.get());
            });
        }
    });
    assert_eq!(broken, []);
}

#[test]
fn a_page_that_a_combined_entry_may_lead_to_is_not_free() {
    for (order, expected) in [
        (&[BY_IPA, COMBINED][..], &[][..]),
        (&[BOTH], &[]),
        (&[BY_IPA], &[Rule::FreedEarly]),
        (&[COMBINED], &[Rule::FreedEarly]),
        (&[COMBINED, BY_IPA], &[Rule::FreedEarly]),
    ] {
        let broken = run::<Arm>(arm(), 1, ALL, |_, guest| {
            guest.unmap(DATA, PAGE, || {
                order.iter().for_each(|&tlbi| guest.tlbi(tlbi));
                guest.machine.give_page(guest.data.get());
            });
        });
        assert_eq!(broken, expected, "{order:?}");
    }
}

#[test]
fn what_is_combined_goes_once_for_all_ranges() {
    fn check<F: Format<Input = Ipa>>(architecture: Architecture, invalidations: u64) {
        let broken = run::<F>(architecture, 1, ALL, |_, guest| {
            assert_eq!(guest.read(VA), Ok(42));
            let before = guest.machine.counts();
            let mut space = guest.space.borrow_mut();
            let mut gather = space.gather();
            for at in [0, 2 * PAGE, DATA] {
                let span = Span::new(Ipa::new(at), PAGE).unwrap();
                let change = tablewright::Change::new().perms(READ_ONLY);
                gather.protect(span, change).unwrap();
            }
            gather.finish(|_| ());
            let after = guest.machine.counts();
            assert_eq!(after.invalidations - before.invalidations, invalidations);
        });
        assert_eq!(broken, []);
    }
    // Three addresses, and what was combined.
    check::<Arm>(arm(), 4);
    // Everything, at once.
    check::<Ept<4>>(Architecture::ept(), 1);
    check::<Npt<4>>(Architecture::npt(), 1);
}

#[test]
fn with_its_stage_1_off_a_guest_uses_what_it_takes_for_physical() {
    let broken = run::<Arm>(arm(), 1, ALL, |_, guest| {
        guest.machine.load_guest(None);
        let found = guest.machine.access(Request::read(DATA));
        assert_eq!(found, Ok(guest.data.get().get()));
        guest.unmap(DATA, PAGE, || {
            guest.tlbi(BY_IPA);
            assert_eq!(guest.read(DATA), Ok(42), "combined with nothing, but combined");
            guest.tlbi(COMBINED);
            assert!(guest.read(DATA).is_err());
        });
    });
    assert_eq!(broken, []);
}
