//! The command line.

use std::ffi::OsString;

use clap::error::{ContextKind, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::error::Error;
use crate::output::report;
use crate::{
    ask, compare, dirty_log, doctor, first, fit, inspect, litmus, machine, map_mem, migrate,
    page_table_test, record, reproduce, tlb_flush, watch, write_protect,
};

/// Experiments with page tables
#[derive(Parser, Debug)]
#[command(
    name = "tablewright",
    version,
    disable_help_subcommand = true,
    long_about = "Experiments with page tables: what the Tablewright engine, and others, need for \
        the work of kernels and hypervisors, on this computer or on a software machine.",
    after_help = "\
Start with:
  tablewright                         does it work here, is it fast, what is it for: a few seconds
  tablewright compare --size 1G       how fast Tablewright and the published crates map, protect \
  and unmap
  sudo tablewright map-mem            build the linear map of this computer's memory
  tablewright map-mem --ram 64G       or of 64 GiB, which needs no rights
  tablewright ask -v 96 -b 512G       how long a guest of 96 vCPUs and 512 GiB will stall
  tablewright doctor                  the published problems, measured on this computer: a minute
  tablewright reproduce               published figures beside those of the software machine

Figures of this computer are medians of several rounds, and --json and --csv have every sample; \
those of the software machine are in virtual time, and the same on every run. The exit status is 0 \
if all went well, 2 if the command line or a file is wrong, and 1 otherwise."
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

/// One experiment is one variant, and one module.
#[derive(Subcommand, Debug)]
enum Command {
    /// How long will this guest stall: the log of its writes, shootdowns and a migration, on
    /// kernels with each published change and with the engine
    Ask(ask::Arguments),
    /// Build the linear map of a computer's memory, as a kernel does when it boots
    MapMem(map_mem::Arguments),
    /// Fault on one stage-2 table with many vCPUs, on a machine, as published and with the engine
    PageTableTest(page_table_test::Arguments),
    /// Start to log what a guest writes, on a machine: as published and with the engine
    WriteProtect(write_protect::Arguments),
    /// Have other CPUs forget what was unmapped, by each messenger, on a machine or with this
    /// computer's kernel
    TlbFlush(tlb_flush::Arguments),
    /// Log what a guest writes, phase by phase, on a machine, and disable the log as published and
    /// with the engine
    DirtyLog(dirty_log::Arguments),
    /// Measure the published problems on this computer, in a minute
    Doctor(doctor::Arguments),
    /// Find the costs with which a machine takes as long as was published
    Fit(fit::Arguments),
    /// Set every published figure beside what is measured for it
    Reproduce(reproduce::Arguments),
    /// Try litmus tests of translation: all executions, and the verdict of the architecture
    Litmus(litmus::Arguments),
    /// Map, protect and unmap with Tablewright and the published crates, beside what this computer
    /// can do at best
    Compare(compare::Arguments),
    /// Record which pages a program writes, interval by interval
    Record(record::Arguments),
    /// Migrate a running guest over a link, under each kind of dirty logging, on a machine
    Migrate(migrate::Arguments),
    /// Run a kernel in QEMU and find what is wrong with its TLB maintenance
    Watch(watch::Arguments),
    /// Say what the page tables in a core, an image of memory or a running QEMU map
    Inspect(inspect::Arguments),
    /// List the machines that experiments can be run on, check one of your own, or print one to
    /// start from
    Machine(machine::Arguments),
    /// Print a script that completes this program's options in a shell
    Completions {
        /// Which shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
}

/// Parses the arguments, the program's name first, and does what they say.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> Result<(), Error> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let mut parsed = command().try_get_matches_from(&arguments);
    // Rows are those of JSON, written otherwise.
    if parsed.as_ref().is_ok_and(wants_csv) {
        report::write_csv();
        for argument in &mut arguments {
            if argument == "--csv" {
                *argument = "--json".into();
            }
        }
        parsed = command().try_get_matches_from(arguments);
    }
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => return help_or_error(&error),
    };
    let Some(command) = cli.command else {
        return first::run();
    };
    match command {
        Command::Ask(arguments) => ask::run(&arguments),
        Command::MapMem(arguments) => map_mem::run(&arguments),
        Command::PageTableTest(arguments) => page_table_test::run(&arguments),
        Command::WriteProtect(arguments) => write_protect::run(&arguments),
        Command::TlbFlush(arguments) => tlb_flush::run(&arguments),
        Command::DirtyLog(arguments) => dirty_log::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Fit(arguments) => fit::run(&arguments),
        Command::Reproduce(arguments) => reproduce::run(&arguments),
        Command::Litmus(arguments) => litmus::run(&arguments),
        Command::Compare(arguments) => compare::run(&arguments),
        Command::Record(arguments) => record::run(&arguments),
        Command::Migrate(arguments) => migrate::run(&arguments),
        Command::Watch(arguments) => watch::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Machine(arguments) => machine::run(&arguments),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "tablewright", &mut script);
            report::print(&String::from_utf8_lossy(&script))
        }
    }
}

/// Lets options take negative numbers as values, so that what refuses them names the option.
fn command() -> clap::Command {
    let takes = |argument: clap::Arg| {
        let is_option = argument.get_long().is_some() && argument.get_action().takes_values();
        match is_option {
            true => argument.allow_negative_numbers(true),
            false => argument,
        }
    };
    let names: Vec<String> =
        Cli::command().get_subcommands().map(|command| command.get_name().to_owned()).collect();
    names.iter().fold(Cli::command(), |cli, name| {
        cli.mut_subcommand(name, |command| with_csv(command.mut_args(takes)))
    })
}

/// Gives a command that prints JSON, and those below it, the option to print CSV.
fn with_csv(mut command: clap::Command) -> clap::Command {
    let below: Vec<String> =
        command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    for name in below {
        command = command.mut_subcommand(name, with_csv);
    }
    let prints_json = command.get_arguments().any(|argument| argument.get_id() == "json");
    if !prints_json {
        return command;
    }
    let csv = clap::Arg::new("csv").long("csv").conflicts_with("json");
    let help = "Print the rows of that as CSV";
    command.arg(csv.action(clap::ArgAction::SetTrue).help(help))
}

fn wants_csv(matches: &clap::ArgMatches) -> bool {
    let here = matches.try_get_one::<bool>("csv").ok().flatten();
    here == Some(&true) || matches.subcommand().is_some_and(|(_, below)| wants_csv(below))
}

/// Help and version are answers; the rest is an error, which must fit on one line.
fn help_or_error(error: &clap::Error) -> Result<(), Error> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            report::print(&error.render().to_string())
        }
        kind => {
            let mut line = one_line(&error.render().to_string());
            if kind == ErrorKind::InvalidSubcommand {
                line = format!("{line}; there are {}", subcommands_beside(error));
            }
            Err(Error::Usage(line))
        }
    }
}

/// The names that may stand where an unknown one does.
fn subcommands_beside(error: &clap::Error) -> String {
    let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
    let cli = Cli::command();
    // The usage names the command that the unknown one is of.
    let of =
        cli.get_subcommands().find(|it| usage.contains(&format!("tablewright {}", it.get_name())));
    let names = of.unwrap_or(&cli).get_subcommands().map(clap::Command::get_name);
    names.collect::<Vec<_>>().join(", ")
}

/// The parser's message is a paragraph, perhaps a tip, then usage and where to read more: keeps the
/// first two, on one line. What the user typed may be in it, blank lines and all.
fn one_line(message: &str) -> String {
    let message = message.strip_prefix("error: ").unwrap_or(message);
    let end = ["\n\nUsage: ", "\n\nFor more information"]
        .into_iter()
        .filter_map(|footer| message.find(footer))
        .min()
        .unwrap_or(message.len());
    let words: Vec<&str> = message[..end].split_whitespace().collect();
    plain(&words.join(" "))
}

/// Numbers are refused in the words of the language that the program is written in.
const WORDS: [(&str, &str); 4] = [
    (": invalid digit found in string", ": not a whole number, zero or more"),
    (": number too large to fit in target type", ": too large"),
    (": cannot parse integer from empty string", ": a whole number is needed"),
    ("..18446744073709551615", " or more"),
];

/// Exchanges the parser's words at the end of a message for plain ones.
fn plain(message: &str) -> String {
    let message = WORDS
        .iter()
        .find_map(|(theirs, ours)| Some(format!("{}{ours}", message.strip_suffix(theirs)?)))
        .unwrap_or_else(|| message.to_owned());
    // A range: "0 is not in 1..=64".
    match message.rsplit_once(" is not in ") {
        Some((before, range)) => match range.split_once("..=") {
            Some((least, most)) => format!("{before} is not from {least} to {most}"),
            None => format!("{before} is not {range}"),
        },
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn messages_are_one_line() {
        assert_eq!(
            one_line("error: bad\n  [possible values: a, b]\n\n  tip: use a\n\nUsage: x\n"),
            "bad [possible values: a, b] tip: use a"
        );
        assert_eq!(one_line("error: bad 'a\n\nb': no\n\nFor more information"), "bad 'a b': no");
        assert_eq!(one_line(""), "");
    }

    #[test]
    fn whoever_prints_json_prints_csv() {
        fn check(command: &clap::Command) -> usize {
            let has = |name: &str| command.get_arguments().any(|it| it.get_id() == name);
            assert_eq!(has("json"), has("csv"), "{}", command.get_name());
            usize::from(has("csv")) + command.get_subcommands().map(check).sum::<usize>()
        }
        let command = command();
        command.clone().debug_assert();
        assert!(check(&command) > 12);
        let of = |line: &str| command.clone().try_get_matches_from(line.split(' '));
        assert!(wants_csv(&of("tablewright ask --csv").unwrap()));
        assert!(!wants_csv(&of("tablewright ask --json").unwrap()));
        assert!(of("tablewright ask --csv --json").is_err());
    }

    proptest! {
        #[test]
        fn no_arguments_panic(arguments in prop::collection::vec(
            prop_oneof!["map-mem|compare|fit|record|reproduce|completions|--[a-z-]{1,8}",
            "--(ram|size|rounds|only|format|step|steps|free|rows|machine)=.{0,8}", ".*"],
            0..4,
        )) {
            let line = std::iter::once("tablewright".to_owned()).chain(arguments);
            // Parse only: what parses may be an experiment that takes a while.
            if let Err(error) = command().try_get_matches_from(line) {
                let message = one_line(&error.render().to_string());
                prop_assert!(!message.contains('\n'));
            }
        }
    }
}
