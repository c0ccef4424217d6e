//! `watch`: a kernel in QEMU, and what is wrong with its TLB maintenance.
//!
//! QEMU loads the plugin, which is told by the kernel's own instructions where its tables are, and
//! says what it finds (`tablewright_watch::session`).

use std::ffi::OsString;
use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use object::{Object as _, ObjectSymbol as _};
use serde::Serialize;
use tablewright_watch::session::{self, PLUGIN};
use tablewright_watch::{At, Counts, Finding, Rule};

use crate::error::Error;
use crate::output::report::Report;

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  tablewright watch -- qemu-system-aarch64 -M virt -cpu max -smp 4 -m 1G -nographic -kernel Image
  tablewright watch --symbols System.map --ignore map_kernel -- qemu-system-aarch64 ...
  tablewright watch --only page-reused --json -- qemu-system-aarch64 ... > found.json

The kernel runs unmodified, and needs no symbols; with them, boot it with nokaslr. What is found \
is said on standard error as it is found, each kind once, and at the end with its count. QEMU has \
to be 11.1 or later (Debian 13 has it in trixie-backports), and runs all processors in one thread. \
The exit status is 1 if anything was found.")]
pub struct Arguments {
    /// QEMU's command line, for a machine of arm64, x86-64 or RISC-V
    #[arg(
        value_name = "QEMU",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true
    )]
    command: Vec<OsString>,
    /// The plugin [default: beside this program]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// The kernel's symbols: vmlinux, or a System.map
    #[arg(long, value_name = "FILE")]
    symbols: Option<PathBuf>,
    /// Say only what breaks this rule; may be given several times
    #[arg(long, value_name = "RULE", value_parser = rule)]
    only: Vec<Rule>,
    /// Say nothing of what this address or function does; may be given several times
    #[arg(long, value_name = "PC|SYMBOL")]
    ignore: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn rule(text: &str) -> Result<Rule, String> {
    Rule::ALL
        .into_iter()
        .find(|rule| rule.name() == text)
        .ok_or_else(|| format!("the rules are {}", Rule::ALL.map(Rule::name).join(", ")))
}

/// The run, in JSON.
#[derive(Serialize)]
struct Parameters {
    command: Vec<String>,
    seconds: f64,
    counts: Counts,
}

/// Runs QEMU, and says what was found.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let plugin = plugin(arguments.plugin.as_deref())?;
    let symbols = match &arguments.symbols {
        Some(file) => Symbols::read(file)?,
        None => Symbols::default(),
    };
    let needs_accelerator = needs_accelerator(&arguments.command)?;
    can_be_watched(&arguments.command)?;
    let (program, words) = arguments.command.split_first().unwrap_or((&arguments.command[0], &[]));
    let mut command = Command::new(program);
    command.args(words);
    if needs_accelerator {
        command.args(["-accel", "tcg,thread=single"]);
    }
    let name = Path::new(program).display().to_string();
    let end = session::run(&mut command, &plugin, None, |seconds, finding| {
        if is_wanted(arguments, &symbols, &finding) {
            eprint!("{}", said(&finding, Some(seconds), &symbols));
        }
        ControlFlow::Continue(())
    });
    let end = end.map_err(|error| Error::input(&name, error))?.ok_or_else(|| {
        Error::Failed(format!("{name}: QEMU ended before the plugin could say what it has found"))
    })?;
    let all = end.findings.iter().filter(|finding| is_wanted(arguments, &symbols, finding));
    let rows: Vec<Finding> = all.cloned().collect();
    let found = rows.len();
    let parameters = Parameters {
        command: arguments.command.iter().map(|word| word.to_string_lossy().into()).collect(),
        seconds: end.seconds,
        counts: end.counts,
    };
    let report = Report { experiment: "watch", parameters, rows, warnings: Vec::new() };
    report.print(arguments.json, |report| summary(report, &symbols))?;
    match found {
        0 => Ok(()),
        1 => Err(Error::Failed("one kind of wrong maintenance was found".into())),
        kinds => Err(Error::Failed(format!("{kinds} kinds of wrong maintenance were found"))),
    }
}

/// The plugin: the one that is named, or the one beside this program.
fn plugin(named: Option<&Path>) -> Result<PathBuf, Error> {
    let beside = std::env::current_exe().unwrap_or_default().with_file_name(PLUGIN);
    let plugin = named.map_or(beside, Path::to_path_buf);
    match plugin.exists() {
        true => Ok(plugin),
        false => Err(Error::input(
            plugin.display(),
            "there is no plugin for QEMU: build it with `cargo build --release -p \
             tablewright-watch-plugin`, or name it with --plugin",
        )),
    }
}

/// Whether QEMU has to be told to emulate all processors in one thread; refused is what cannot be
/// watched.
fn needs_accelerator(command: &[OsString]) -> Result<bool, Error> {
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    let values = |options: &[&str]| {
        let pairs = words.windows(2).filter(|pair| options.contains(&&*pair[0]));
        pairs.map(|pair| pair[1].clone()).collect::<Vec<_>>()
    };
    let chosen = values(&["-accel"]);
    let is_single = |value: &str| {
        let mut parts = value.split(',');
        parts.next() == Some("tcg") && parts.any(|part| part == "thread=single")
    };
    let other = words.iter().find(|word| matches!(&***word, "-enable-kvm" | "--enable-kvm"));
    let machine = values(&["-M", "-machine", "--machine"]);
    let machine = machine.iter().find(|value| value.contains("accel="));
    let wrong = chosen.iter().find(|value| !is_single(value)).or(machine).or(other);
    match wrong {
        Some(wrong) => Err(Error::Usage(format!(
            "{wrong}: only what QEMU emulates in one thread can be watched: leave the accelerator \
             out, or give -accel tcg,thread=single"
        ))),
        None => Ok(chosen.is_empty()),
    }
}

/// Whether a command is a QEMU that can be watched.
fn can_be_watched(command: &[OsString]) -> Result<(), Error> {
    let name = Path::new(&command[0]).display().to_string();
    // With all its words: they may be those of a loader that runs QEMU.
    let said = Command::new(&command[0]).args(&command[1..]).arg("--version").output();
    let said = said.map_err(|error| Error::input(&name, error))?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    match session::version(&said) {
        Some(version) if session::is_new_enough(version) => Ok(()),
        Some(version) => Err(Error::input(
            &name,
            format!(
                "this is QEMU {version}, and watching needs {}.{}, whose plugins can read \
                 registers and memory: Debian 13 has it in trixie-backports",
                session::QEMU.0,
                session::QEMU.1
            ),
        )),
        None => Err(Error::input(&name, "this is no QEMU, or it does not take these options")),
    }
}

/// Whether a finding is to be said.
fn is_wanted(arguments: &Arguments, symbols: &Symbols, finding: &Finding) -> bool {
    let is_ignored = |at: At| {
        let function = symbols.function(at.pc).map(|(name, _)| name);
        arguments.ignore.iter().any(|ignored| {
            let hex = ignored.strip_prefix("0x").and_then(|hex| u64::from_str_radix(hex, 16).ok());
            hex == Some(at.pc) || function == Some(ignored)
        })
    };
    let change = finding.change.as_ref().map(|change| change.at);
    (arguments.only.is_empty() || arguments.only.contains(&finding.rule))
        && !is_ignored(finding.at)
        && !change.is_some_and(is_ignored)
}

/// A finding in three lines, or two of what is about no entry.
fn said(finding: &Finding, seconds: Option<f64>, symbols: &Symbols) -> String {
    let Finding { rule, change, missing, then, at, count } = finding;
    let mut text = format!("{rule}");
    let _ = match change {
        Some(change) => writeln!(
            text,
            ": {:#x}..={:#x}, level {}, was {}, and became {}: {}",
            change.span.first,
            change.span.last,
            change.level,
            change.old,
            change.new,
            symbols.place(change.at)
        ),
        None => writeln!(text, ":"),
    };
    let _ = writeln!(text, "  missing: {missing}");
    let when = match seconds {
        Some(seconds) => format!(", after {seconds:.1} s"),
        None if *count == 1 => ", once".into(),
        None => format!(", {count} times"),
    };
    let _ = writeln!(text, "  then: {then}: {}{when}", symbols.place(*at));
    text
}

/// All that was found, for people.
fn summary(report: &Report<Parameters, Finding>, symbols: &Symbols) -> String {
    let Parameters { seconds, counts, .. } = &report.parameters;
    let mut text = String::new();
    for finding in &report.rows {
        text.push_str(&said(finding, None, symbols));
    }
    let _ = writeln!(
        text,
        "watched for {seconds:.1} s: {} changes of entries in up to {} tables, {} of them to be \
         forgotten; {} invalidations, {} barriers, {} loads of a root",
        counts.changes,
        counts.tables,
        counts.debts,
        counts.invalidations,
        counts.barriers,
        counts.roots
    );
    if report.rows.is_empty() {
        text.push_str("nothing was found\n");
    }
    text
}

/// Names of functions, by their addresses.
#[derive(Default)]
struct Symbols {
    all: Vec<(u64, String)>,
}

impl Symbols {
    fn read(path: &Path) -> Result<Self, Error> {
        let bytes =
            std::fs::read(path).map_err(|error| Error::Read { path: path.into(), error })?;
        let mut all: Vec<(u64, String)> = match object::File::parse(&*bytes) {
            Ok(file) => file
                .symbols()
                .filter(|symbol| symbol.address() != 0)
                .filter_map(|symbol| Some((symbol.address(), symbol.name().ok()?.to_owned())))
                .collect(),
            // `ffff800080000000 T _text`
            Err(_) => String::from_utf8_lossy(&bytes)
                .lines()
                .filter_map(|line| {
                    let mut words = line.split_ascii_whitespace();
                    let address = u64::from_str_radix(words.next()?, 16).ok()?;
                    Some((address, words.nth(1)?.to_owned()))
                })
                .collect(),
        };
        all.retain(|(_, name)| !name.is_empty() && !name.starts_with('$'));
        all.sort();
        match all.is_empty() {
            true => Err(Error::input(
                path.display(),
                "there are no symbols in it: give a vmlinux or a System.map",
            )),
            false => Ok(Self { all }),
        }
    }

    /// The function that an address is in, and how far.
    fn function(&self, pc: u64) -> Option<(&str, u64)> {
        let next = self.all.partition_point(|(address, _)| *address <= pc);
        let (address, name) = self.all.get(next.checked_sub(1)?)?;
        Some((name, pc - address))
    }

    /// Says where an instruction stands.
    fn place(&self, at: At) -> String {
        match self.function(at.pc) {
            Some((name, into)) => format!("CPU {} in {name}+{into:#x} ({:#x})", at.cpu, at.pc),
            None => format!("CPU {} at {:#x}", at.cpu, at.pc),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Symbols, needs_accelerator};
    use tablewright_watch::At;

    #[test]
    fn all_processors_are_in_one_thread() {
        let needs = |words: &str| {
            let words: Vec<_> = words.split(' ').map(Into::into).collect();
            needs_accelerator(&words).map_err(|error| error.to_string())
        };
        assert_eq!(needs("qemu -M virt -smp 2"), Ok(true));
        assert_eq!(needs("qemu -M virt -accel tcg,thread=single"), Ok(false));
        for (words, wrong) in [
            ("qemu -M virt,accel=tcg", "virt,accel=tcg"),
            ("qemu -M virt -machine accel=kvm", "accel=kvm"),
            ("qemu -accel kvm", "kvm"),
            ("qemu -accel tcg", "tcg"),
            ("qemu -accel tcg,thread=multi", "tcg,thread=multi"),
            ("qemu -enable-kvm", "-enable-kvm"),
        ] {
            let error = needs(words).err().unwrap_or_default();
            assert!(error.starts_with(&format!("{wrong}: ")), "{words}: {error}");
        }
    }

    #[test]
    fn an_instruction_is_in_the_function_before_it() {
        let all = vec![(0x1000, "first".to_owned()), (0x1100, "second".to_owned())];
        let symbols = Symbols { all };
        let place = |pc| symbols.place(At { cpu: 1, pc });
        assert_eq!(place(0x10ff), "CPU 1 in first+0xff (0x10ff)");
        assert_eq!(place(0x1100), "CPU 1 in second+0x0 (0x1100)");
        assert_eq!(place(0xfff), "CPU 1 at 0xfff");
    }
}
