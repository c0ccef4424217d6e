//! A recording as asked, from its command or process to its file.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tablewright_recorder::recording::Recording;
use tablewright_recorder::{Method, Options, Outcome, Process, Session};

use super::{Arguments, Choice, show};
use crate::error::Error;
use crate::file::Target;
use crate::output::progress::Progress;

/// Records as asked, writes the file, and says what is in it.
pub fn record(arguments: &Arguments) -> Result<(), Error> {
    let target = Target::new("--output", &arguments.output)?;
    let methods = working(arguments.method)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))
            .map_err(|error| Error::Failed(format!("cannot handle signals: {error}")))?;
    }
    let mut command = match arguments.pid {
        None => Some(start(arguments)?),
        Some(_) => None,
    };
    let result = record_into(arguments, &methods, &stop, command.as_mut(), target);
    match (result, command) {
        (Err(error), Some(mut command)) => {
            // It was started to be recorded.
            let _ = command.kill();
            let _ = command.wait();
            Err(error)
        }
        (Ok(Outcome::Complete), Some(mut command)) => {
            // The recording may be over and the command is not: what started both waits for both.
            while !stop.load(Ordering::Relaxed) && matches!(command.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        }
        (result, _) => result.map(drop),
    }
}

fn record_into(
    arguments: &Arguments,
    methods: &[(Method, u64)],
    stop: &AtomicBool,
    mut command: Option<&mut Child>,
    target: Target,
) -> Result<Outcome, Error> {
    let pid = match (arguments.pid, &command) {
        (Some(pid), _) => pid,
        (None, Some(command)) => command.id().cast_signed(),
        (None, None) => return Ok(Outcome::Complete),
    };
    let name = match arguments.command.first() {
        Some(command) => command.display().to_string(),
        None => format!("process {pid}"),
    };
    let process = match &mut command {
        Some(command) => Process::of_command(command),
        None => Process::open(pid),
    };
    let mut refused = |problem: String| match command.as_mut().map(|command| command.try_wait()) {
        Some(Ok(Some(_))) => {
            Error::input(&name, "it ended before its first interval: there is nothing to record")
        }
        _ => Error::input(&name, problem),
    };
    let process = process.map_err(|error| refused(error.to_string()))?;
    let options = Options {
        interval: Duration::from_millis(arguments.interval),
        duration: arguments.duration,
        intervals: arguments.intervals,
    };
    let mut session = Session::begin(&options, methods, process).map_err(&mut refused)?;
    // A command writes to the same terminal.
    let expected = match options.intervals {
        Some(intervals) => u32::try_from(intervals)
            .ok()
            .and_then(|intervals| options.interval.checked_mul(intervals)),
        None => options.duration,
    };
    let expected = arguments.pid.and(expected);
    let progress = expected.map(|duration| Progress::of_time(duration, "recording"));
    let outcome = session.run(&options, stop, || ());
    drop(progress);
    let recorded = session.finish();
    target.fill(&recorded)?;
    let recording = Recording::parse(recorded)
        .map_err(|error| Error::input(arguments.output.display(), error))?;
    show::print(&arguments.output, &recording, false, arguments.json)?;
    Ok(outcome)
}

/// The methods that may be used and work here, with what a fault costs with each.
fn working(choice: Choice) -> Result<Vec<(Method, u64)>, Error> {
    let wanted = match choice {
        Choice::Auto => &Method::ALL[..],
        Choice::Scan => &[Method::Scan],
        Choice::SoftDirty => &[Method::SoftDirty],
    };
    let mut working = Vec::new();
    let mut reasons = Vec::new();
    for &method in wanted {
        match method.probe() {
            Ok(fault_ns) => working.push((method, fault_ns)),
            Err(reason) => reasons.push(format!("{}: {reason}", method.name())),
        }
    }
    if working.is_empty() {
        return Err(Error::Failed(format!(
            "this computer has no way to record what a process writes: {}",
            reasons.join("; ")
        )));
    }
    Ok(working)
}

fn start(arguments: &Arguments) -> Result<Child, Error> {
    let mut words = arguments.command.iter();
    let program = words.next().cloned().unwrap_or_default();
    let mut command = Command::new(&program);
    command.args(words);
    if arguments.json {
        command.stdout(Stdio::from(std::io::stderr()));
    }
    command
        .spawn()
        .map_err(|error| Error::input(program.display(), format!("cannot be started: {error}")))
}
