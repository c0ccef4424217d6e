//! Kicks: no vCPU is in the guest with an old translation when the wait is over.

use std::cell::Cell;

use tablewright::format::Ept;
use tablewright::{
    AddressSpace, Attrs, Barrier, Change, Half, Invalidation, Ipa, Pa, Platform, Span, What,
};
use tablewright_machine::{Architecture, Machine, Mapper, Memory, Request, Setup, Time};

const PAGE: u64 = 0x5000;

/// A guest with one page, on a machine where vCPUs are kicked.
fn machine(cpus: usize, seed: u64) -> Machine {
    let architecture = Architecture {
        guest: None,
        hardware_access: false,
        hardware_dirty: false,
        ..Architecture::ept()
    };
    let mut setup = Setup::new(architecture, Memory::new(8, 12, 1 << 30));
    setup.scheduler.cpus = cpus;
    setup.scheduler.perturbation.seed = seed;
    setup.costs.interrupt = Time::us(2);
    setup.costs.exit = Time::ns(500);
    setup.costs.access = Time::ns(20);
    setup.costs.walk = Time::ns(5);
    setup.kicks = true;
    Machine::new(setup)
}

fn map(mapper: Mapper<'_>) -> AddressSpace<Ept<4>, Mapper<'_>> {
    let mut space = AddressSpace::new(mapper).unwrap();
    mapper.attach(space.root(), Half::Lower, 0);
    let page = Span::new(Ipa::new(PAGE), 0x1000).unwrap();
    space.map(page, Pa::new(0x7000), Attrs::GUEST_MEMORY).unwrap();
    space.make_live();
    space
}

/// Write-protects the page and has every vCPU forget that it could be written, or not.
fn protect(space: &mut AddressSpace<Ept<4>, Mapper<'_>>, tell: bool) {
    let page = Span::new(Ipa::new(PAGE), 0x1000).unwrap();
    let mut gather = space.gather();
    gather.protect(page, Change::new().write_protect()).unwrap();
    if tell {
        gather.finish(|_| ());
    } else {
        std::mem::forget(gather);
    }
}

#[test]
fn after_a_kick_no_vcpu_writes() {
    for seed in 0..50 {
        let machine = machine(4, seed);
        let mut space = map(machine.new_space());
        let mapper = *space.platform();
        let space = Cell::new(Some(&mut space));
        let over = Cell::new(false);
        machine
            .run(|cpu| {
                if cpu.id() == 3 {
                    cpu.spend(Time::us(5));
                    protect(space.take().unwrap(), true);
                    cpu.order();
                    over.set(true);
                    return;
                }
                mapper.load();
                let mut out = 0;
                for _ in 0..1000 {
                    cpu.order();
                    let late = over.get();
                    let wrote = machine.guest_access(Request::write(PAGE)).is_ok();
                    assert!(!(late && wrote), "seed {seed}");
                    out += usize::from(!wrote);
                    // One of them stays outside for long.
                    if cpu.id() == 1 && out == 0 {
                        machine.leave_guest();
                        cpu.spend(Time::us(1));
                    }
                }
                assert!(out > 0, "seed {seed}");
                machine.leave_guest();
            })
            .unwrap();
        assert_eq!(machine.finish(), [], "seed {seed}");
        let counts = machine.counts();
        assert!(counts.kicks <= 3 && counts.flushes >= 2, "{counts:?}");
    }
}

/// Interrupts go out one after the other; a vCPU that computes is woken by its own; one that is
/// outside gets none, and is not waited for.
#[test]
fn it_takes_an_interrupt_for_each_that_is_inside() {
    for inside in 0..=5 {
        let machine = machine(7, 0);
        let space = map(machine.new_space());
        let mapper = *space.platform();
        let (took, over) = (Cell::new(Time::ZERO), Cell::new(false));
        machine
            .run(|cpu| {
                if cpu.id() == 6 {
                    cpu.spend(Time::us(3));
                    let begin = cpu.now();
                    mapper.barrier(Barrier::Publish);
                    mapper.invalidate(&Invalidation {
                        root: space.root(),
                        id: 0,
                        global: false,
                        what: What::Everything,
                    });
                    mapper.barrier(Barrier::Complete);
                    took.set(cpu.now().saturating_sub(begin));
                    cpu.order();
                    over.set(true);
                    for other in 0..6 {
                        cpu.wake(other, cpu.now());
                    }
                    return;
                }
                mapper.load();
                machine.enter_guest();
                if cpu.id() >= inside {
                    machine.leave_guest();
                    cpu.wait_until(Time::ms(1)); // stopped
                    machine.enter_guest();
                } else {
                    while !over.get() {
                        machine.guest_computes();
                    }
                }
                machine.leave_guest();
            })
            .unwrap();
        let counts = machine.counts();
        assert_eq!((counts.kicks, counts.flushes), (inside as u64, 6));
        let least = Time::us(2) * inside as u64;
        assert!(
            took.get() >= least && took.get() <= least + Time::us(1),
            "{inside}: {}",
            took.get()
        );
    }
}

/// Without the invalidation the guest goes on writing, and the machine says that something was
/// never invalidated.
#[test]
fn a_vcpu_that_is_not_told_writes_on() {
    let machine = machine(2, 0);
    let mut space = map(machine.new_space());
    let mapper = *space.platform();
    let space = Cell::new(Some(&mut space));
    let written = Cell::new(0);
    machine
        .run(|cpu| {
            if cpu.id() == 1 {
                cpu.spend(Time::us(1));
                if let Some(space) = space.take() {
                    protect(space, false);
                }
                return;
            }
            mapper.load();
            while cpu.now() < Time::us(10) {
                let wrote = machine.guest_access(Request::write(PAGE)).is_ok();
                written.set(written.get() + usize::from(wrote && cpu.now() > Time::us(2)));
            }
        })
        .unwrap();
    assert!(written.get() > 0);
    assert!(!machine.finish().is_empty());
}
