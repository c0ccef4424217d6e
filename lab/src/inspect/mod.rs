//! `inspect`: page tables at rest, of a core, an image of memory, or a running QEMU.
//!
//! Entries are decoded by the judge (`tablewright_walker`), which shares nothing with the engine.

mod audit;
mod diff;
mod gdb;
mod memory;
mod registers;
mod tree;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use tablewright_walker::{Access, Fault, Leaf, Walk};
use tablewright_watch::{Memory as _, describe, memory_type};

use crate::error::Error;
use crate::output::report::{self, Report, count, counted};
use crate::size::human;
use audit::Remark;
use diff::Difference;
use memory::Source;
use registers::{Registers, Tree, shape};
use tree::{Found, Kind, Run, Through};

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright inspect vmcore                      the map of the kernel that wrote it
  tablewright inspect gdb:1234 --audit            of a QEMU that was started with -s
  tablewright inspect gdb:/run/qemu.gdb --walk 0xffff800080010000
  tablewright inspect ram.bin --base 0x40000000 --reg ttbr1=0x41f3a000 --reg tcr=0x2b5593519
  tablewright inspect before.elf --diff after.elf

A core is of QEMU's dump-guest-memory, or a vmcore of kdump (not compressed). Roots are those of \
the registers that are given; else of those in a core of x86-64, or that the gdb stub has; else of \
what a Linux says of itself (VMCOREINFO). QEMU is stopped while its memory is read, and then goes \
on. With two stages a guest's tables are read through the second. The exit status is 1 if an audit \
finds something wrong.")]
pub struct Arguments {
    /// An ELF core, an image of memory, or gdb:PORT, gdb:HOST:PORT or gdb:SOCKET of a running QEMU
    source: String,
    /// The physical address of the first byte of an image [default: 0]
    #[arg(long, value_name = "ADDRESS", value_parser = number)]
    base: Option<u64>,
    /// A register of the processor, such as ttbr1, cr3, satp, vttbr, eptp or hgatp; may be given
    /// several times
    #[arg(long = "reg", value_name = "NAME=VALUE", value_parser = register)]
    registers: Vec<(String, u64)>,
    /// The processor whose registers are read
    #[arg(long, default_value_t = 0)]
    cpu: u32,
    /// Leave QEMU stopped
    #[arg(long)]
    keep_stopped: bool,
    /// Say how this address is translated, entry by entry; may be given several times
    #[arg(long, value_name = "ADDRESS", value_parser = number,
          conflicts_with_all = ["audit", "diff"])]
    walk: Vec<u64>,
    /// Say what is unusual, and what is wrong
    #[arg(long, conflicts_with = "diff")]
    audit: bool,
    /// Say what another core or image, with the same registers, maps otherwise
    #[arg(long, value_name = "SOURCE")]
    diff: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// An address or a value.
fn number(text: &str) -> Result<u64, String> {
    let digits = text.replace('_', "");
    let parsed = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => digits.parse(),
    };
    parsed.map_err(|_| "give a number of at most 64 bits, 0x in front of hexadecimal digits".into())
}

fn register(text: &str) -> Result<(String, u64), String> {
    let (name, value) = text.split_once('=').ok_or("give NAME=VALUE, such as cr3=0x1000")?;
    Ok((name.into(), number(value)?))
}

/// The question, in JSON.
#[derive(Serialize)]
struct Parameters {
    source: String,
    /// All that are known, to be given to `--reg`.
    registers: BTreeMap<&'static str, String>,
    trees: Vec<Root>,
    seconds: f64,
}

/// A tree, in JSON.
#[derive(Serialize)]
struct Root {
    tree: &'static str,
    root: String,
    shape: String,
    stage2: Option<String>,
    tables: usize,
}

/// Addresses beside each other that are mapped alike.
#[derive(Serialize)]
struct Region {
    tree: &'static str,
    first: String,
    last: String,
    bytes: u64,
    /// The first physical address, if all are beside each other too.
    physical: Option<String>,
    kernel: String,
    user: String,
    global: bool,
    memory: String,
    /// How many leaves there are of each size, the smallest first.
    leaves: Vec<Leaves>,
}

#[derive(Serialize)]
struct Leaves {
    bytes: u64,
    count: u64,
    /// They are of runs of contiguous entries.
    contiguous: bool,
}

impl Root {
    fn of(tree: &Tree, found: &Found) -> Self {
        Self {
            tree: tree.name,
            root: hex(tree.root),
            shape: shape(tree.regime),
            stage2: tree.stage2.map(|(_, root)| hex(root)),
            tables: found.tables.len(),
        }
    }
}

/// A source, and what says where tables are.
struct Opened {
    source: Source,
    registers: Registers,
    trees: Vec<Tree>,
}

impl Opened {
    fn open(name: &str, arguments: &Arguments) -> Result<Self, Error> {
        let Arguments { base, cpu, keep_stopped, .. } = *arguments;
        let (source, mut registers) = memory::open(name, base, cpu, keep_stopped)?;
        if !arguments.registers.is_empty() && !name.starts_with("gdb:") {
            registers = Registers::default();
        }
        registers.extend(&arguments.registers).map_err(Error::Usage)?;
        let trees = registers.trees().map_err(Error::Usage)?;
        match trees.is_empty() {
            false => Ok(Self { source, registers, trees }),
            true => Err(Error::input(
                name,
                "no register says where tables are, or translation is off: give --reg cr3=VALUE, \
                 --reg satp=VALUE, or --reg ttbr1=VALUE with --reg tcr=VALUE",
            )),
        }
    }
}

fn read(trees: &[Tree], source: &mut Source) -> Vec<(Tree, Found)> {
    trees.iter().map(|tree| (*tree, tree::read(tree, source))).collect()
}

/// Reads tables, and says what was asked.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let begin = Instant::now();
    let Opened { mut source, registers, trees } = Opened::open(&arguments.source, arguments)?;
    let parameters = |all: &[(Tree, Found)]| Parameters {
        source: arguments.source.clone(),
        registers: registers.iter().map(|(name, value)| (name, hex(value))).collect(),
        trees: all.iter().map(|(tree, found)| Root::of(tree, found)).collect(),
        seconds: begin.elapsed().as_secs_f64(),
    };
    if !arguments.walk.is_empty() {
        let rows = walks(&arguments.walk, &trees, &mut source)?;
        return print(arguments, parameters(&[]), rows, walked);
    }
    let all = read(&trees, &mut source);
    // Resumes QEMU: all has been read.
    drop(source);
    if let Some(name) = &arguments.diff {
        let Opened { mut source, trees, .. } = Opened::open(name, arguments)?;
        let rows = diff::diff(&all, &read(&trees, &mut source));
        return print(arguments, parameters(&all), rows, differences);
    }
    if arguments.audit {
        let rows = audit::audit(&all);
        let wrong = rows.iter().filter(|remark| remark.is_wrong).count() as u64;
        print(arguments, parameters(&all), rows, remarks)?;
        return match wrong {
            0 => Ok(()),
            kinds => Err(Error::Failed(format!(
                "{} found",
                counted(kinds, "kind of wrong entries was", "kinds of wrong entries were")
            ))),
        };
    }
    let rows = all.iter().flat_map(|(tree, found)| regions(tree, &found.runs)).collect();
    print(arguments, parameters(&all), rows, map)
}

fn print<R: Serialize>(
    arguments: &Arguments,
    parameters: Parameters,
    rows: Vec<R>,
    text: fn(&Report<Parameters, R>) -> String,
) -> Result<(), Error> {
    let report = Report { experiment: "inspect", parameters, rows, warnings: Vec::new() };
    report.print(arguments.json, text)
}

fn hex(address: u64) -> String {
    format!("{address:#x}")
}

/// Runs that are alike, whatever the leaves are.
fn regions(tree: &Tree, runs: &[Run]) -> Vec<Region> {
    let alike =
        |one: &Run, next: &Run| one.va.wrapping_add(one.bytes) == next.va && one.kind == next.kind;
    runs.chunk_by(alike).map(|runs| region(tree, runs)).collect()
}

fn region(tree: &Tree, runs: &[Run]) -> Region {
    let (first, last) = (runs[0], runs[runs.len() - 1]);
    let Kind { access, memory, global, .. } = first.kind;
    let mut leaves: Vec<Leaves> = Vec::new();
    for run in runs {
        let contiguous = run.contiguous > run.leaf;
        let alike = |it: &&mut Leaves| it.bytes == run.leaf && it.contiguous == contiguous;
        match leaves.iter_mut().find(alike) {
            Some(leaves) => leaves.count += run.bytes / run.leaf,
            None => {
                leaves.push(Leaves { bytes: run.leaf, count: run.bytes / run.leaf, contiguous });
            }
        }
    }
    leaves.sort_by_key(|leaves| (leaves.bytes, leaves.contiguous));
    let together = runs.windows(2).all(|pair| pair[0].goes_on(&pair[1]));
    Region {
        tree: tree.name,
        first: hex(first.va),
        last: hex(last.last()),
        bytes: runs.iter().map(|run| run.bytes).sum(),
        physical: together.then(|| hex(first.pa)),
        kernel: access.privileged.to_string(),
        user: access.user.to_string(),
        global,
        memory: memory_type(tree.regime, tree.types, memory),
        leaves,
    }
}

/// A line for each tree, above what is said of it.
fn head(root: &Root) -> String {
    let Root { tree, root, shape, stage2, tables } = root;
    let through = stage2.as_ref().map_or(String::new(), |root| format!(", through {root}"));
    format!(
        "{tree}: root {root}{through}, {shape}, {}\n",
        counted(*tables as u64, "table", "tables")
    )
}

/// The map for people.
fn map(report: &Report<Parameters, Region>) -> String {
    let mut text = String::new();
    for root in &report.parameters.trees {
        text.push_str(&head(root));
        let rows = report.rows.iter().filter(|region| region.tree == root.tree);
        let rows: Vec<_> = rows
            .map(|region| {
                let leaves = region.leaves.iter().map(|leaves| {
                    let run = if leaves.contiguous { " in runs" } else { "" };
                    format!("{} x {}{run}", count(leaves.count), human(leaves.bytes))
                });
                [
                    region.first.clone(),
                    region.last.clone(),
                    region.kernel.clone(),
                    region.user.clone(),
                    region.memory.clone(),
                    region.physical.clone().unwrap_or_else(|| "scattered".into()),
                    leaves.collect::<Vec<_>>().join(", "),
                    human(region.bytes),
                ]
            })
            .collect();
        let header = ["first", "last", "kernel", "user", "memory", "physical", "leaves", "size"];
        text.push_str(&report::table(header, 7, rows));
        text.push('\n');
    }
    let Parameters { seconds, trees, .. } = &report.parameters;
    let tables = trees.iter().map(|root| root.tables as u64).sum();
    let _ = writeln!(
        text,
        "{} in {}, read in {seconds:.2} s",
        counted(report.rows.len() as u64, "region", "regions"),
        counted(tables, "table", "tables")
    );
    text
}

/// An audit for people.
fn remarks(report: &Report<Parameters, Remark>) -> String {
    let mut text: String = report.parameters.trees.iter().map(head).collect();
    for remark in &report.rows {
        let Remark { tree, is_wrong, what, count: times, bytes, first } = remark;
        let sign = if *is_wrong { "wrong" } else { "note" };
        let bytes = if *bytes == 0 { String::new() } else { format!(", {} in all", human(*bytes)) };
        let _ = writeln!(
            text,
            "{sign}: {tree}: {what}: {}{bytes}; first {first}",
            counted(*times, "time", "times")
        );
    }
    if report.rows.is_empty() {
        text.push_str("nothing was found\n");
    }
    text
}

/// Differences for people.
fn differences(report: &Report<Parameters, Difference>) -> String {
    let rows = report.rows.iter().map(|row| {
        let Difference { tree, first, last, before, after } = row;
        [(*tree).into(), first.clone(), last.clone(), before.clone(), after.clone()]
    });
    match report.rows.is_empty() {
        true => "both map the same\n".into(),
        false => report::table(["tree", "first", "last", "before", "after"], 5, rows.collect()),
    }
}

/// The way of an address through one tree, in JSON.
#[derive(Serialize)]
struct Walked {
    tree: &'static str,
    address: String,
    steps: Vec<Step>,
    /// The physical address, if there is one, and what the kernel and user mode may do there.
    physical: Option<String>,
    kernel: Option<String>,
    user: Option<String>,
    /// Its end, in words.
    end: String,
}

/// One entry on the way.
#[derive(Serialize)]
struct Step {
    level: i8,
    table: String,
    index: usize,
    entry: String,
    meaning: String,
}

/// The ways of addresses, through each tree that may translate them.
fn walks(addresses: &[u64], trees: &[Tree], source: &mut Source) -> Result<Vec<Walked>, Error> {
    let mut rows = Vec::new();
    for &address in addresses {
        let before = rows.len();
        for tree in trees.iter().filter(|tree| tree.has(address)) {
            rows.push(walk(tree, address, source));
        }
        if rows.len() == before {
            let trees: Vec<_> = trees.iter().map(|tree| tree.name).collect();
            return Err(Error::Usage(format!(
                "--walk {address:#x}: no tree is of its half of the addresses; there is {}",
                trees.join(", ")
            )));
        }
    }
    Ok(rows)
}

fn walk(tree: &Tree, address: u64, source: &mut Source) -> Walked {
    let mut steps = Vec::new();
    let mut memory = Through { memory: source, stage2: tree.stage2 };
    let end = way(tree, address, &mut memory, &mut steps);
    let (physical, kernel, user, end) = match end {
        Err(why) => (None, None, None, why),
        Ok((physical, leaf, words)) => {
            let Access { privileged, user } = leaf.access;
            let end = format!(
                "{words}, kernel {privileged}, user {user}, {}",
                memory_type(tree.regime, tree.types, leaf.memory)
            );
            (Some(hex(physical)), Some(privileged.to_string()), Some(user.to_string()), end)
        }
    };
    Walked { tree: tree.name, address: hex(address), steps, physical, kernel, user, end }
}

/// Goes the way of an address to its end, and notes the entries.
fn way(
    tree: &Tree,
    address: u64,
    memory: &mut Through<'_>,
    steps: &mut Vec<Step>,
) -> Result<(u64, Leaf, String), String> {
    let words = |fault: Fault| fault.to_string();
    let mut walk = Walk::new(tree.regime, tree.root, address).map_err(words)?;
    loop {
        let (table, index, level) = (walk.table(), walk.index(), walk.level());
        let mut word = [0];
        if !memory.read(table + 8 * index as u64, &mut word) {
            return Err(format!("the table at {table:#x} is not in this memory"));
        }
        let first = address >> walk.entry_shift() << walk.entry_shift();
        steps.push(Step {
            level,
            table: hex(table),
            index,
            entry: format!("{:#018x}", word[0]),
            meaning: describe(tree.regime, tree.types, level, first, word[0]),
        });
        let Some(leaf) = walk.step(word[0]).map_err(words)? else { continue };
        let at = leaf.physical(address);
        let physical = memory
            .physical(at)
            .ok_or_else(|| format!("{at:#x} for the guest, which stage 2 does not map"))?;
        let guest = tree.stage2.map_or(String::new(), |_| format!("{at:#x} for the guest, "));
        return Ok((physical, leaf, format!("{guest}{physical:#x}")));
    }
}

/// Ways for people.
fn walked(report: &Report<Parameters, Walked>) -> String {
    let mut text = String::new();
    for Walked { tree, address, steps, end, .. } in &report.rows {
        let _ = writeln!(text, "{address} by {tree}: {end}");
        for Step { level, table, index, entry, meaning } in steps {
            let _ = writeln!(
                text,
                "  level {level}: entry {index} of the table at {table} is {entry}: {meaning}"
            );
        }
    }
    text
}
