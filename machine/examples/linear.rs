//! How fast the machine is on one CPU: a linear map of pages as a kernel makes it when it boots,
//! entry by entry in tables that walkers can reach, through a window of one page.
//!
//! ```text
//! cargo run --release -p tablewright-machine --example linear [GIB] [RUNS]
//! ```
//!
//! `run by run` shows each table anew for every 16 entries, `table by table` once, and the last
//! publishes its entries together. The time of the host is the least of the runs; virtual time is
//! there to see that it stays the same.

use std::time::Instant;

use tablewright::format::Arm64K4;
use tablewright::linear::SlotMemory;
use tablewright::{
    Attrs, Barrier, Entry, Format, Half, Hooks, Invalidation, Level, Pa, Perms, Platform, Stale,
    What,
};
use tablewright_machine::{
    Architecture, Costs, Granule, Machine, Mapper, Memory, Regime, Setup, Time,
};

type F = Arm64K4;

const ENTRIES: u64 = 512;
const TABLE_SIZE: u64 = ENTRIES << F::PAGE_SHIFT;
/// The window's address: in the last part of the lower half, which 512 GiB of RAM do not reach.
const WINDOW: u64 = 0xff << 39;

fn usage(what: &str) -> ! {
    eprintln!("error: `{what}`: usage: linear [GIB (1 to 512)] [RUNS (1 or more)]");
    std::process::exit(2);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: u64| match arguments.get(index) {
        None => default,
        Some(text) => text.parse().unwrap_or_else(|_| usage(text)),
    };
    let (gib, runs) = (number(0, 512), number(1, 3));
    if !(1..=512).contains(&gib) || runs == 0 || arguments.len() > 2 {
        usage(&arguments.join(" "));
    }
    let tables = (gib << 30) / TABLE_SIZE;
    let mut memory = Memory::new((tables + gib) as usize + 16, F::PAGE_SHIFT, 1 << 41);
    memory.touch();
    for (name, piece, batched) in [
        ("run by run", 16, false),
        ("table by table", ENTRIES, false),
        ("one barrier a table", ENTRIES, true),
    ] {
        let mut least = f64::INFINITY;
        let mut time = Time::ZERO;
        for _ in 0..runs {
            let machine = boot(memory);
            let start = Instant::now();
            let outcome =
                machine.run(|_| map(&machine, tables, piece, batched)).expect("runs to its end");
            least = least.min(start.elapsed().as_secs_f64());
            time = outcome.end;
            assert_eq!(machine.finish(), []);
            memory = machine.into_memory();
        }
        println!(
            "{name}: {gib} GiB in {least:.3} s: {:.2} ns a page; {:.3} s of virtual time",
            least * 1e9 / (tables * ENTRIES) as f64,
            time.as_secs_f64(),
        );
    }
}

fn boot(memory: Memory) -> Machine {
    let architecture = Architecture {
        hardware_access: true,
        hardware_dirty: true,
        ..Architecture::arm64(Regime::Arm64Stage1 { granule: Granule::K4, wide: false })
    };
    let mut setup = Setup::new(architecture, memory);
    // Those of a published machine.
    setup.costs = Costs {
        entry: Time::ps(2_778),
        publish: Time::ps(16_065),
        issue: Time::ps(273_471),
        complete: Time::ps(1_417_748),
        ..Costs::default()
    };
    Machine::new(setup)
}

/// An empty table.
fn table(mapper: &Mapper<'_>, level: Level) -> Pa {
    let frame = mapper.alloc_table(level).expect("memory for tables");
    // SAFETY: all entries of a table that was just allocated.
    unsafe { mapper.fill(mapper.table(frame, level), ENTRIES as usize, 0, 0) };
    frame
}

/// The tables for an address down to `last`, made where they are missing. Gives the last.
fn tables(mapper: &Mapper<'_>, root: Pa, va: u64, last: Level) -> Pa {
    let (mut frame, mut level) = (root, F::root_level());
    while level > last {
        let below = level.down().expect("a level above the last");
        // SAFETY: an entry of a table of the machine.
        frame = unsafe {
            let entry = mapper.table(frame, level).add(F::index(va, level));
            let mut bits = Hooks::load(mapper, entry);
            if bits == 0 {
                bits = F::table(table(mapper, below), Perms::empty());
                mapper.barrier(Barrier::Publish);
                mapper.link(entry, bits);
                mapper.barrier(Barrier::Publish);
            }
            F::address(bits, level)
        };
        level = below;
    }
    frame
}

fn map(machine: &Machine, count: u64, piece: u64, batched: bool) {
    let mapper = machine.new_space();
    let root = table(&mapper, F::root_level());
    mapper.attach(root, Half::Lower, 1);
    // The root is zeroed before a walker reads it.
    mapper.barrier(Barrier::Publish);
    mapper.load();
    let page = F::encode(&Attrs::KERNEL_DATA, Level::PAGE).expect("attributes of a page");
    let slot = {
        let frame = tables(&mapper, root, WINDOW, Level::PAGE);
        // SAFETY: the first entry of the window's table.
        unsafe { mapper.table(frame, Level::PAGE) }
    };
    let window = mapper.slots(WINDOW);
    let show = |frame: Pa| {
        // SAFETY: the entry is that of the window.
        unsafe { mapper.store(slot, page | F::put_address(frame)) };
        mapper.barrier(Barrier::Publish);
        window.pointer(0, frame)
    };
    let hide = || {
        // SAFETY: as above.
        unsafe { mapper.store(slot, 0) };
        mapper.barrier(Barrier::Publish);
        let shown =
            Stale { first: WINDOW, last: WINDOW + 0xfff, level: Some(Level::PAGE), tables: false };
        mapper.invalidate(&Invalidation {
            root,
            id: 1,
            global: true,
            what: What::Ranges(&[shown]),
        });
        mapper.barrier(Barrier::Complete);
    };
    let store = |entry: std::ptr::NonNull<Entry>, frame: u64| {
        // SAFETY: an entry of a table of the machine.
        unsafe {
            assert_eq!(Hooks::load(&mapper, entry), 0, "nothing is mapped yet");
            mapper.store(entry, page | F::put_address(Pa::new(frame)));
        }
        if !batched {
            mapper.barrier(Barrier::Publish);
        }
    };
    for number in 0..count {
        let first = number * TABLE_SIZE;
        let frame = tables(&mapper, root, first, Level::PAGE);
        for start in (0..ENTRIES).step_by(piece as usize) {
            let shown = show(frame);
            for index in start..start + piece {
                // SAFETY: an entry of the table that is shown.
                let entry = unsafe { shown.add(index as usize) };
                store(entry, first + (index << F::PAGE_SHIFT));
            }
            if batched {
                mapper.barrier(Barrier::Publish);
            }
            hide();
        }
    }
}
