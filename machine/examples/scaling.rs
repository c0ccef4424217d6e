//! How faults scale: many virtual CPUs map pages of their own in one tree, as a share of what one
//! CPU alone does in the same time; and the same under a lock around the tree.
//!
//! ```text
//! cargo run --release -p tablewright-machine --example scaling [PAGES OF EACH CPU]
//! ```
//!
//! It ends with status 1 if 416 CPUs reach less than 0.85 of 416 times one.
//!
//! The machine has EPT, where caches need no maintenance. Its costs are round figures of current
//! servers; a fault costs 300 ns of entering and leaving the guest, a cache line of another CPU 60
//! ns.

use std::cell::RefCell;

use tablewright::format::Ept;
use tablewright::guest::{Access, Backing, Fault, Guest, Slot, SlotCell};
use tablewright::shared::SharedSpace;
use tablewright::{AddressSpace, Attrs, Half, Ipa, Level, Mapping, Pa, Span};
use tablewright_machine::{Architecture, Costs, Machine, Mapper, Memory, Regime, Setup, Time};

const CPUS: [usize; 6] = [1, 4, 16, 64, 208, 416];

/// A machine, and room for so many pages of each CPU, in tables of their own.
fn machine(cpus: usize, each: u64) -> Machine {
    let tables = cpus as u64 * each.div_ceil(512);
    let frames = tables + tables.div_ceil(512) + 8 * cpus as u64 + 64;
    let architecture = Architecture {
        regime: Regime::Ept { levels: 4, mode_based: false },
        ..Architecture::x86_64(4)
    };
    let mut setup = Setup::new(architecture, Memory::new(frames as usize, 12, 1 << 40));
    setup.scheduler.cpus = cpus;
    setup.costs = Costs {
        entry: Time::ps(1_300),
        load: Time::ps(1_300),
        exchange: Time::ns(5),
        table: Time::ns(200),
        walk: Time::ns(10),
        access: Time::ns(1),
        exception: Time::ns(300),
        transfer: Time::ns(60),
        lock_take: Time::ns(20),
        lock_hand_over: Time::ns(120),
        ..Costs::default()
    };
    Machine::new(setup)
}

fn space<'m>(mapper: Mapper<'m>) -> AddressSpace<Ept<4>, Mapper<'m>> {
    let mut space = AddressSpace::new(mapper).expect("memory for a root");
    mapper.attach(space.root(), Half::Lower, 0);
    space.make_live();
    space
}

/// Pages in a second of virtual time.
fn rate(machine: &Machine, pages: u64, run: impl Fn(u64)) -> f64 {
    let outcome = machine
        .run(|cpu| {
            machine.cpu().spend(Time::ps(977) * (cpu.id() as u64 % 64));
            run(cpu.id() as u64);
        })
        .expect("runs to its end");
    assert_eq!(machine.finish(), []);
    pages as f64 / outcome.end.as_secs_f64()
}

/// The engine's own way.
fn shared(cpus: usize, each: u64) -> f64 {
    let machine = machine(cpus, each);
    let mapper = machine.new_space();
    let mut cells = [const { SlotCell::new() }; 1];
    let space = SharedSpace::new(space(mapper)).expect("no code runs on it");
    let guest = Guest::new(space, &mut cells);
    let ram = Span::new(Ipa::new(0), 1 << 44).expect("a range");
    guest.insert(Slot::memory(ram, 0)).expect("a slot");
    let stride = each.next_multiple_of(512);
    rate(&machine, cpus as u64 * each, |cpu| {
        mapper.load();
        let mut gather = guest.gather();
        for page in cpu * stride..cpu * stride + each {
            machine.cpu().spend(machine.costs().exception);
            let fault = Fault::new(Ipa::new(page << 12), Access::Write);
            let request = guest.request(&fault).expect("a slot");
            let backing = Backing::new(Pa::new(page << 12), 4096);
            while gather.map(&request, &backing).is_err() {
                assert!(gather.top_up(3));
            }
        }
        gather.release_tables();
        assert!(gather.finish(|_| ()).is_ok());
    })
}

/// One lock around the tree.
fn locked(cpus: usize, each: u64) -> f64 {
    let machine = machine(cpus, each);
    let mapper = machine.new_space();
    let space = RefCell::new(space(mapper));
    let lock = machine.new_lock();
    let mapping = Mapping::new(Attrs::GUEST_MEMORY).largest(Level::PAGE);
    let stride = each.next_multiple_of(512);
    rate(&machine, cpus as u64 * each, |cpu| {
        mapper.load();
        for page in cpu * stride..cpu * stride + each {
            machine.cpu().spend(machine.costs().exception);
            let span = Span::new(Ipa::new(page << 12), 4096).expect("a page");
            let held = lock.acquire();
            let mapped = space.borrow_mut().map(span, Pa::new(page << 12), mapping);
            mapped.expect("memory for tables");
            drop(held);
        }
    })
}

fn main() {
    let each = match std::env::args().nth(1).map(|text| (text.parse(), text)) {
        None => 2048,
        Some((Ok(each @ 1..=1_000_000), _)) => each,
        Some((_, text)) => {
            eprintln!("error: `{text}`: usage: scaling [PAGES OF EACH CPU (1 to 1000000)]");
            std::process::exit(2);
        }
    };
    println!(
        "{:>5} {:>16} {:>10} {:>16} {:>10}",
        "CPUs", "shared, pages/s", "of linear", "locked, pages/s", "of linear"
    );
    let alone = (shared(1, each), locked(1, each));
    let mut reached = 1.0;
    for cpus in CPUS {
        let (shared, locked) = (shared(cpus, each), locked(cpus, each));
        let linear = |rate: f64, one: f64| rate / (one * cpus as f64);
        reached = linear(shared, alone.0);
        println!(
            "{cpus:>5} {shared:>16.0} {:>10.3} {locked:>16.0} {:>10.3}",
            reached,
            linear(locked, alone.1),
        );
    }
    if reached < 0.85 {
        std::process::exit(1);
    }
}
