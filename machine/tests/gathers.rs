//! Edits of one gather in any order, on a machine whose other CPU uses the addresses meanwhile: no
//! rule of the architecture is broken, at each level of break-before-make.

use std::cell::{Cell, RefCell};

use tablewright::arch::riscv64::guest_fault;
use tablewright::format::{Arm64K4, Stage2K4, Sv39, Sv39x4};
use tablewright::guest::{
    Access, Backing, Cause, Fault, Gather as GuestGather, Guest, Log, Slot, SlotCell,
};
use tablewright::shared::SharedSpace;
use tablewright::{
    AddressSpace, Attrs, Change, Format, Gather, Half, Ipa, Level, Mapping, Memory as Mem, Pa,
    Span, Va,
};
use tablewright_machine::{
    Architecture, Granule, Machine, Mapper, Memory, Regime, Request, Setup, Time,
};

const MIB2: u64 = 2 << 20;

fn arm(bbm: u8) -> Architecture {
    let regime = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
    Architecture { bbm, ..Architecture::arm64(regime) }
}

fn va(first: u64, size: u64) -> Span<Va> {
    Span::new(Va::new(first), size).unwrap()
}

type G<'s, 'm, F> = Gather<'s, F, Mapper<'m>>;

/// Runs `edit` in one gather on CPU 0, while CPU 1 uses the addresses. Returns what the machine
/// reports.
fn run<F: Format<Input = Va>>(
    architecture: Architecture,
    mapping: Mapping,
    uses: &[u64],
    edit: impl Fn(&mut G<'_, '_, F>, &Machine),
) -> Vec<String> {
    run_on::<F>(architecture, mapping, uses, |space, machine| {
        let mut gather = space.gather();
        edit(&mut gather, machine);
        gather.finish(|_| ());
    })
}

/// Runs edits of the space.
fn run_on<F: Format<Input = Va>>(
    architecture: Architecture,
    mapping: Mapping,
    uses: &[u64],
    edit: impl Fn(&mut AddressSpace<F, Mapper<'_>>, &Machine),
) -> Vec<String> {
    let mut all = Vec::new();
    for seed in 0..6 {
        let mut setup = Setup::new(architecture.clone(), Memory::new(2048, 12, 1 << 30));
        setup.scheduler.cpus = 2;
        setup.scheduler.perturbation.seed = seed + 1;
        let machine = Machine::new(setup);
        let mapper = machine.new_space();
        let mut space = AddressSpace::<F, _>::new(mapper).unwrap();
        mapper.attach(space.root(), Half::Lower, 0);
        let block = Pa::new(1 << 41);
        space.map(va(0, MIB2), block, mapping).unwrap();
        space.make_live();
        let space = RefCell::new(space);
        let step = Cell::new(0);
        let outcome = machine.run(|cpu| {
            let wait = |until: u32| {
                while step.get() < until {
                    cpu.spend(Time::ns(10));
                    cpu.order();
                }
            };
            mapper.load();
            if cpu.id() == 0 {
                wait(1);
                edit(&mut space.borrow_mut(), &machine);
                step.set(2);
                return;
            }
            for &at in uses {
                machine.touch(Request::write(at)).unwrap();
            }
            step.set(1);
            while step.get() < 2 {
                cpu.spend(Time::ns(10));
                cpu.order();
                for &at in uses {
                    let _ = machine.touch(Request::write(at));
                }
            }
        });
        if let Err(error) = outcome {
            all.push(format!("{error}"));
        }
        all.extend(machine.violations().iter().map(|it| it.to_string()));
        if !all.is_empty() {
            break;
        }
    }
    all.truncate(3);
    all
}

const DATA: Attrs = Attrs::KERNEL_DATA;
const NC: Change = Change::new().memory(Mem::NonCacheable);

fn none(all: Vec<String>) {
    assert!(all.is_empty(), "{all:#?}");
}

#[test]
fn a_page_of_a_block_that_was_split_is_replaced() {
    none(run::<Arm64K4>(arm(2), Mapping::new(DATA), &[0x3000, 0x5000], |gather, _| {
        gather.split(va(0, MIB2), Level::PAGE).unwrap();
        let _held = gather.replace(Va::new(0x3000), Pa::new(1 << 42), DATA).unwrap();
    }));
}

#[test]
fn a_block_that_was_collapsed_gets_another_type() {
    none(run::<Arm64K4>(
        arm(2),
        Mapping::new(DATA).pages_only(),
        &[0x3000, 0x5000],
        |gather, _| {
            assert_eq!(gather.collapse(va(0, MIB2), Level::new(1), false), Ok(1));
            gather.protect(va(0, MIB2), NC).unwrap();
        },
    ));
}

#[test]
fn a_page_that_was_unmapped_is_mapped_to_other_memory() {
    none(run::<Arm64K4>(
        arm(2),
        Mapping::new(DATA).pages_only(),
        &[0x3000, 0x5000],
        |gather, _| {
            let _held = gather.unmap_page(Va::new(0x3000)).unwrap().unwrap();
            gather.map_page(Va::new(0x3000), Pa::new(1 << 42), DATA).unwrap();
        },
    ));
}

#[test]
fn edits_with_a_flush_between_them() {
    none(run::<Arm64K4>(arm(2), Mapping::new(DATA), &[0x3000, 0x5000], |gather, _| {
        gather.split(va(0, MIB2), Level::PAGE).unwrap();
        gather.flush(|_| ());
        gather.protect(va(0x3000, 0x1000), NC).unwrap();
        let _held = gather.replace(Va::new(0x5000), Pa::new(1 << 42), DATA).unwrap();
    }));
    none(run::<Arm64K4>(
        arm(2),
        Mapping::new(DATA).pages_only(),
        &[0x3000, 0x5000],
        |gather, _| {
            assert_eq!(gather.collapse(va(0, MIB2), Level::new(1), false), Ok(1));
            gather.flush(|_| ());
            gather.protect(va(0, MIB2), NC).unwrap();
        },
    ));
    // Below level 2 the split itself breaks, and is complete.
    none(run::<Arm64K4>(arm(1), Mapping::new(DATA), &[0x3000, 0x5000], |gather, _| {
        gather.split(va(0, MIB2), Level::PAGE).unwrap();
        gather.protect(va(0x3000, 0x1000), NC).unwrap();
        let _held = gather.replace(Va::new(0x5000), Pa::new(1 << 42), DATA).unwrap();
    }));
}

#[test]
fn a_run_that_was_folded_gets_another_type() {
    none(run::<Arm64K4>(
        arm(1),
        Mapping::new(DATA).pages_only(),
        &[0x3000, 0x5000],
        |gather, _| {
            assert!(gather.collapse(va(0, 0x10_0000), Level::PAGE, true).unwrap() > 0);
            gather.protect(va(0, 0x1_0000), NC).unwrap();
        },
    ));
}

#[test]
fn a_member_of_a_run_that_was_unfolded_is_replaced() {
    none(run::<Arm64K4>(
        arm(1),
        Mapping::new(DATA).largest(Level::PAGE),
        &[0x3000, 0x5000],
        |gather, _| {
            gather.split(va(0, 0x10_0000), Level::PAGE).unwrap();
            let _held = gather.replace(Va::new(0x3000), Pa::new(1 << 42), DATA).unwrap();
        },
    ));
}

#[test]
fn a_page_that_was_write_protected_is_replaced() {
    none(run::<Arm64K4>(
        arm(0),
        Mapping::new(DATA).pages_only(),
        &[0x3000, 0x5000],
        |gather, _| {
            gather.protect(va(0x3000, 0x1000), Change::new().write_protect()).unwrap();
            let _held = gather.replace(Va::new(0x3000), Pa::new(1 << 42), DATA).unwrap();
        },
    ));
}

/// A map of a page, without a gather, where one that was forgotten has unmapped.
#[test]
fn a_page_that_a_forgotten_gather_unmapped_is_mapped_to_other_memory() {
    let pages = Mapping::new(DATA).pages_only();
    none(run_on::<Arm64K4>(arm(2), pages, &[0x3000, 0x5000], |space, _| {
        let mut gather = space.gather();
        let _held = gather.unmap_page(Va::new(0x3000)).unwrap().unwrap();
        std::mem::forget(gather);
        space.map_page(Va::new(0x3000), Pa::new(1 << 42), DATA).unwrap();
    }));
}

/// A DSB waits for the TLBIs of its own CPU: what CPU 0 has issued and dropped or forgotten is
/// complete when CPU 2 relies on it.
#[test]
fn what_one_cpu_has_issued_is_complete_before_another_relies_on_it() {
    for forgotten in [false, true] {
        for seed in 0..60 {
            let mut setup = Setup::new(arm(0), Memory::new(2048, 12, 1 << 30));
            setup.scheduler.cpus = 3;
            setup.scheduler.perturbation.seed = seed + 1;
            let machine = Machine::new(setup);
            let mapper = machine.new_space();
            let mut space = AddressSpace::<Arm64K4, _>::new(mapper).unwrap();
            mapper.attach(space.root(), Half::Lower, 0);
            let (at, page) = (Va::new(0x3000), machine.take_page().unwrap());
            space.map_page(at, page, DATA).unwrap();
            space.make_live();
            let (space, step) = (RefCell::new(space), Cell::new(0));
            let outcome = machine.run(|cpu| {
                let wait = |until: u32| {
                    while step.get() < until {
                        cpu.spend(Time::ns(10));
                        cpu.order();
                    }
                };
                mapper.load();
                match cpu.id() {
                    1 => {
                        machine.touch(Request::write(0x3000)).unwrap();
                        step.set(1);
                        while step.get() < 3 {
                            cpu.spend(Time::ns(10));
                            cpu.order();
                            let _ = machine.touch(Request::write(0x3000));
                        }
                    }
                    0 => {
                        wait(1);
                        let mut space = space.borrow_mut();
                        let mut gather = space.gather();
                        let _lost = gather.unmap_page(at).unwrap().unwrap();
                        match (gather.issue(), forgotten) {
                            (issued, true) => std::mem::forget(issued),
                            (issued, false) => drop(issued),
                        }
                        step.set(2);
                    }
                    _ => {
                        wait(2);
                        // Nothing is mapped there any more, as this gather finds.
                        let mut space = space.borrow_mut();
                        let mut gather = space.gather();
                        assert!(gather.unmap_page(at).unwrap().is_none());
                        gather.finish(|_| ());
                        machine.give_page(page);
                        step.set(3);
                    }
                }
            });
            let mut all: Vec<String> = outcome.err().iter().map(ToString::to_string).collect();
            all.extend(machine.violations().iter().map(ToString::to_string));
            assert!(all.is_empty(), "forgotten: {forgotten}, seed {seed}: {all:#?}");
        }
    }
}

/// Pages of another table, moved to where the gather has unmapped: the way through the table that
/// was there is broken before another table is linked.
#[test]
fn a_table_is_made_for_what_is_moved_where_one_was_unmapped() {
    for bbm in [0, 2] {
        none(run::<Arm64K4>(
            arm(bbm),
            Mapping::new(DATA).pages_only(),
            &[0x3000, 0x5000],
            |gather, _| {
                let far = va(64 * MIB2, 0x8000);
                gather.map(far, Pa::new(1 << 42), DATA).unwrap();
                let done = gather.unmap(va(0, MIB2), |_| core::ops::ControlFlow::Continue(()));
                assert!(done.unwrap().is_done());
                gather.relocate(far, Va::new(0)).unwrap();
            },
        ));
    }
}

/// A block, moved to where an empty table stands that walkers hold.
#[test]
fn a_block_is_moved_to_where_an_empty_table_stands() {
    none(run::<Arm64K4>(
        arm(0),
        Mapping::new(DATA).pages_only(),
        &[0x3000, 0x5000],
        |gather, _| {
            let far = va(64 * MIB2, MIB2);
            gather.map(far, Pa::new(1 << 42), DATA).unwrap();
            for page in 0..512 {
                let _held = gather.unmap_page(Va::new(page << 12)).unwrap();
            }
            gather.flush(|_| ());
            gather.relocate(far, Va::new(0)).unwrap();
        },
    ));
}

/// Memory that moves is written by its old addresses until they are invalidated.
#[test]
fn what_is_moved_is_used_by_its_old_addresses_meanwhile() {
    for mapping in [Mapping::new(DATA).pages_only(), Mapping::new(DATA)] {
        for (from, size, to) in [(0, MIB2, 8 * MIB2), (0x2000, 0x4000, 9 * MIB2 + 0x1000)] {
            none(run::<Arm64K4>(arm(0), mapping, &[0x3000, 0x5000], |gather, _| {
                gather.relocate(va(from, size), Va::new(to)).unwrap();
                let there = gather.query(Va::new(to)).unwrap();
                assert_eq!(there.attrs().perms, DATA.perms);
            }));
        }
    }
}

/// A walk that has found nothing may be remembered, without Svvptc: each way to map has it
/// forgotten.
#[test]
fn what_is_mapped_is_not_remembered_to_be_missing() {
    const PAGE: u64 = MIB2;
    type Edit = fn(&mut AddressSpace<Sv39, Mapper<'_>>);
    let ways: [(&str, Edit); 3] = [
        ("map_page", |space| {
            space.map_page(Va::new(PAGE), Pa::new(1 << 41), Attrs::USER_DATA).unwrap();
        }),
        ("map", |space| {
            space.map(va(PAGE, 4096), Pa::new(1 << 41), Attrs::USER_DATA).unwrap();
        }),
        ("gather", |space| {
            let mut gather = space.gather();
            gather.map_page(Va::new(PAGE), Pa::new(1 << 41), Attrs::USER_DATA).unwrap();
            gather.finish(|_| ());
        }),
    ];
    for (name, edit) in ways {
        let mapping = Mapping::new(Attrs::USER_DATA);
        let wrong = run_on::<Sv39>(Architecture::riscv64(3, false), mapping, &[0], |space, it| {
            // Of four looks one at least is remembered, with this CPU's and the other's.
            for _ in 0..4 {
                assert!(it.touch(Request::read(PAGE)).is_err(), "nothing is mapped");
            }
            edit(space);
            for _ in 0..4 {
                it.check(it.touch(Request::read(PAGE)).is_ok(), || format!("{name}: missing"));
            }
        });
        assert_eq!(wrong, [""; 0]);
    }
}

/// RISC-V does not say why a guest faults. Whatever it was, the guest goes on after one fault: its
/// hart remembers that there was nothing, or without Svadu the accessed flag is clear.
#[test]
fn a_guest_whose_fault_has_no_cause_goes_on() {
    let (bytes, again) = (4 * MIB2, Cell::new(0));
    for (seed, size) in (0..8).flat_map(|seed| [(seed, 4096), (seed, MIB2)]) {
        let architecture = Architecture::riscv64(3, true);
        let mut setup = Setup::new(architecture, Memory::new(64, 12, 1 << 30));
        setup.scheduler.perturbation.seed = seed + 1;
        let machine = Machine::new(setup);
        let mapper = machine.new_space();
        let space = AddressSpace::<Sv39x4, _>::new(mapper).unwrap();
        mapper.attach(space.root(), Half::Lower, 0);
        let mut cells = [SlotCell::new()];
        let guest = Guest::new(SharedSpace::new(space).ok().unwrap(), &mut cells);
        let memory = Span::new(Ipa::new(0), bytes).unwrap();
        guest.insert(Slot::memory(memory, 0)).unwrap();
        let outcome = machine.run(|_| {
            mapper.load();
            let mut gather = guest.gather();
            let serve = |gather: &mut GuestGather<'_, '_, Sv39x4, Mapper<'_>>, at: u64| {
                let fault = guest_fault(23, 0, at >> 2, 0).unwrap();
                let request = guest.request(&fault).unwrap();
                gather.top_up(request.tables());
                let page = Backing::new(Pa::new(1 << 41 | at), size);
                gather.map(&request, &page).unwrap();
            };
            for at in (0..bytes).step_by(MIB2 as usize) {
                for _ in 0..4 {
                    assert!(machine.touch(Request::write(at)).is_err(), "nothing is mapped");
                }
                serve(&mut gather, at);
                let before = again.get();
                for _ in 0..8 {
                    if machine.touch(Request::write(at)).is_err() {
                        again.set(again.get() + 1);
                        serve(&mut gather, at);
                    }
                }
                machine.check(again.get() <= before + 1, || format!("{at:#x} faults for ever"));
            }
            gather.age(memory, |_| ()).unwrap();
            gather.finish(|_| ()).ok().unwrap();
            for at in (0..bytes).step_by(MIB2 as usize) {
                assert!(machine.touch(Request::write(at)).is_err(), "it is not accessed");
                serve(&mut gather, at);
                machine
                    .check(machine.touch(Request::write(at)).is_ok(), || format!("aged {at:#x}"));
            }
        });
        outcome.unwrap();
        let wrong: Vec<String> = machine.violations().iter().map(|it| it.to_string()).collect();
        assert_eq!(wrong, [""; 0], "{seed}, {size}");
    }
    assert!(again.get() > 0, "no hole was remembered");
}

/// A write to a page that is not dirty: hardware marks it (Svadu), or it faults (PRIV 10.3.1).
#[test]
fn a_clean_page_of_riscv_is_written_by_those_who_mark_it() {
    for by_hardware in [false, true] {
        let architecture = Architecture {
            hardware_access: by_hardware,
            hardware_dirty: by_hardware,
            ..Architecture::riscv64(3, false)
        };
        let mapping = Mapping::new(Attrs { dirty: false, ..DATA }).pages_only();
        none(run_on::<Sv39>(architecture, mapping, &[], |space, machine| {
            assert!(machine.touch(Request::read(0x3000)).is_ok());
            assert_eq!(machine.touch(Request::write(0x3000)).is_ok(), by_hardware);
            let leaf = space.query(Va::new(0x3000)).unwrap();
            assert_eq!(leaf.attrs().dirty, by_hardware);
        }));
    }
}

/// A page was made writable by the other CPU, and this one remembers it as it was: a permission
/// fault that finds it mapped has it forgotten here.
#[test]
fn a_guest_that_remembers_less_goes_on_after_one_fault() {
    const AT: u64 = 0x3000;
    let regime = Regime::Arm64Stage2 {
        granule: Granule::K4,
        input_bits: 40,
        wide: false,
        forced_write_back: false,
    };
    let late = Cell::new(0);
    for seed in 0..8 {
        let mut setup = Setup::new(Architecture::arm64(regime), Memory::new(64, 12, 1 << 30));
        setup.scheduler.cpus = 2;
        setup.scheduler.perturbation.seed = seed + 1;
        let machine = Machine::new(setup);
        let mapper = machine.new_space();
        let space = AddressSpace::<Stage2K4<40>, _>::new(mapper).unwrap();
        mapper.attach(space.root(), Half::Lower, 0);
        let mut cells = [SlotCell::new()];
        let guest = Guest::new(SharedSpace::new(space).ok().unwrap(), &mut cells);
        let memory = Span::new(Ipa::new(0), MIB2).unwrap();
        guest.insert(Slot::memory(memory, 0).with_log(Log::ByFault)).unwrap();
        let step = Cell::new(0);
        let outcome = machine.run(|cpu| {
            mapper.load();
            let mut gather = guest.gather();
            let mut serve = |access, cause| {
                let fault = Fault { cause, ..Fault::new(Ipa::new(AT), access) };
                let request = guest.request(&fault).unwrap();
                gather.top_up(request.tables());
                gather.map(&request, &Backing::new(Pa::new(1 << 41 | AT), 4096)).unwrap();
            };
            let wait = |until: u32| {
                while step.get() < until {
                    cpu.spend(Time::ns(10));
                    cpu.order();
                }
            };
            if cpu.id() == 0 {
                serve(Access::Read, Cause::Translation);
                step.set(1);
                wait(2);
                serve(Access::Write, Cause::Permission);
                step.set(3);
                return;
            }
            wait(1);
            for _ in 0..4 {
                machine.touch(Request::read(AT)).unwrap();
            }
            step.set(2);
            wait(3);
            let before = late.get();
            for _ in 0..8 {
                if machine.touch(Request::write(AT)).is_err() {
                    late.set(late.get() + 1);
                    machine.check(late.get() == before + 1, || "it faults for ever".to_owned());
                    serve(Access::Write, Cause::Permission);
                }
            }
        });
        outcome.unwrap();
        none(machine.violations().iter().map(|it| it.to_string()).collect());
    }
    assert!(late.get() > 0, "nothing was remembered");
}
