//! How fast the machine is with all its rules on: one-page mappings a second of the host, each made
//! by the engine under one lock that many CPUs queue for, every access to a table ordered.
//!
//! ```text
//! cargo run --release -p tablewright-machine --example mappings [CPUS] [MAPPINGS] [map|access]
//! ```
//!
//! `map` maps; `access` also has the CPU load from each page that it has mapped. Published
//! machines: 416 CPUs, 109 million pages.

use std::cell::RefCell;
use std::time::Instant;

use tablewright::format::X86_64;
use tablewright::{AddressSpace, Attrs, Half, Level, Mapping, Pa, Span, Va};
use tablewright_machine::{Architecture, Costs, MAX_CPUS, Machine, Memory, Request, Setup, Time};

fn usage(what: &str) -> ! {
    eprintln!("error: `{what}`: usage: mappings [CPUS (1 to {MAX_CPUS})] [MAPPINGS] [map|access]");
    std::process::exit(2);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: u64| match arguments.get(index) {
        None => default,
        Some(text) => text.parse().unwrap_or_else(|_| usage(text)),
    };
    let cpus = number(0, 416);
    let mappings = number(1, 5_000_000);
    let only = arguments.get(2);
    if !(1..=MAX_CPUS as u64).contains(&cpus) || mappings > 1 << 33 || arguments.len() > 3 {
        usage(&arguments.join(" "));
    }
    if let Some(only) = only
        && !["map", "access"].contains(&only.as_str())
    {
        usage(only);
    }
    for access in [false, true] {
        let name = if access { "access" } else { "map" };
        if only.is_none_or(|only| only == name) {
            run(name, cpus, mappings.div_ceil(cpus), access);
        }
    }
}

fn run(name: &str, cpus: u64, each: u64, access: bool) {
    // Regions of whole tables, one for each CPU.
    let stride = each.next_multiple_of(512);
    let tables = cpus * stride / 512;
    let frames = tables + tables.div_ceil(512) + 64;
    let memory = Memory::new(frames as usize, 12, 1 << 40);
    let mut setup = Setup::new(Architecture::x86_64(4), memory);
    setup.scheduler.cpus = cpus as usize;
    setup.costs = Costs {
        entry: Time::ps(1_300),
        load: Time::ps(1_300),
        table: Time::ns(200),
        walk: Time::ns(10),
        access: Time::ns(1),
        exception: Time::ns(300),
        transfer: Time::ns(60),
        lock_take: Time::ns(20),
        lock_hand_over: Time::ns(120),
        ..Costs::default()
    };
    let machine = Machine::new(setup);
    let mapper = machine.new_space();
    let mut space = AddressSpace::<X86_64<4>, _>::new(mapper).expect("memory for a root");
    mapper.attach(space.root(), Half::Lower, 0);
    space.make_live();
    let space = RefCell::new(space);
    let lock = machine.new_lock();
    let mapping = Mapping::new(Attrs::USER_DATA).largest(Level::PAGE);

    let start = Instant::now();
    let outcome = machine
        .run(|cpu| {
            mapper.load();
            let first = cpu.id() as u64 * stride;
            for page in first..first + each {
                // Not the same for all, so that the CPUs do not march in step.
                cpu.spend(machine.costs().exception + Time::ps(977) * ((page * 31) % 64));
                let held = lock.acquire();
                let span = Span::new(Va::new(page << 12), 4096).expect("a page");
                let mapped = space.borrow_mut().map(span, Pa::new(page << 12), mapping);
                mapped.expect("memory for tables");
                drop(held);
                if access {
                    let reached = machine.touch(Request::read(page << 12).by_user());
                    assert_eq!(reached, Ok(page << 12));
                }
            }
        })
        .expect("runs to its end");
    let took = start.elapsed().as_secs_f64();
    assert_eq!(machine.finish(), []);
    let mappings = (cpus * each) as f64;
    let counts = machine.counts();
    println!(
        "{name}: {mappings:.0} mappings on {cpus} CPUs in {took:.2} s: {:.0} ns each; {:.1} \
         accesses and {:.1} switches each; {} tables; {:.3} s of virtual time",
        took / mappings * 1e9,
        outcome.accesses as f64 / mappings,
        outcome.switches as f64 / mappings,
        counts.tables,
        outcome.end.as_secs_f64(),
    );
}
