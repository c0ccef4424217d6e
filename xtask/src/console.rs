//! A machine that ends by itself: what it says on its console until then, for as long as there is
//! patience.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::child::ends_with_us;
use crate::{About as _, Error, Result, out};

/// How often is looked whether it is late.
const LOOK: Duration = Duration::from_millis(200);

/// How long is waited for a machine.
#[derive(Clone, Copy)]
pub enum Patience {
    /// A limit for all, where nothing else is done.
    InAll(Duration),
    /// A limit for each line.
    ForEachLine(Duration),
}

/// The lines of a machine.
pub struct Said {
    /// The lines of its console, without what ends them.
    pub lines: Vec<String>,
    /// The emulator's own messages, if its standard error is piped: no more than a pipe holds.
    pub log: String,
    /// Whether it has ended by itself.
    pub ended: bool,
    /// The emulator's status, if it has one.
    pub status: Option<i32>,
}

/// Starts an emulator whose console is its standard output, and hands on each line until it ends,
/// or is not waited for any more.
///
/// # Errors
/// It cannot be started; or the user ends it.
pub fn listen(qemu: &mut Command, patience: Patience, mut line: impl FnMut(&str)) -> Result<Said> {
    let name = qemu.get_program().to_string_lossy().into_owned();
    ends_with_us(qemu);
    let mut child = qemu.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().about(&name)?;
    let (says, said) = channel();
    if let Some(console) = child.stdout.take() {
        thread::spawn(move || {
            let lines = BufReader::new(console).split(b'\n');
            for bytes in lines.map_while(std::io::Result::ok) {
                let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
                if says.send(text).is_err() {
                    return;
                }
            }
        });
    }
    let mut started = Instant::now();
    let mut before = Duration::ZERO;
    let mut lines = Vec::new();
    let ended = loop {
        let has = had(child.id());
        let since = has.map(|has| has.saturating_sub(before));
        let (Patience::InAll(limit) | Patience::ForEachLine(limit)) = patience;
        if is_late(limit, started.elapsed(), since) || out::is_interrupted() {
            break false;
        }
        match said.recv_timeout(LOOK.min(limit)) {
            Ok(text) => {
                line(&text);
                lines.push(text);
                if let Patience::ForEachLine(_) = patience {
                    started = Instant::now();
                    before = has.unwrap_or_default();
                }
            }
            Err(RecvTimeoutError::Disconnected) => break true,
            Err(RecvTimeoutError::Timeout) => {}
        }
    };
    if !ended {
        // It may be gone already.
        let _ = child.kill();
    }
    let output = child.wait_with_output().about(name)?;
    if out::is_interrupted() {
        return Err(Error::Interrupted);
    }
    Ok(Said {
        lines,
        log: String::from_utf8_lossy(&output.stderr).into_owned(),
        ended,
        status: output.status.code(),
    })
}

/// Returns the time of the host's processors that a process has had, where the host says it: two
/// numbers of 100 in a second (`proc_pid_stat(5)`, `utime` and `stime`).
pub fn had(process: u32) -> Option<Duration> {
    let said = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in front of it may be any.
    let fields = said.rsplit_once(')')?.1.split_ascii_whitespace();
    let ticks = fields.skip(11).take(2).map(str::parse::<u64>);
    let ticks: u64 = ticks.sum::<std::result::Result<_, _>>().ok()?;
    Some(Duration::from_millis(ticks * 10))
}

/// Whether an emulator took too long. Beside a build it gets a part of the processors, so that what
/// counts is what it has had of them: with two, twice the limit. If it waits for ever it is late,
/// too.
pub fn is_late(limit: Duration, elapsed: Duration, had: Option<Duration>) -> bool {
    match had {
        Some(had) => had > 2 * limit || elapsed > 10 * limit,
        None => elapsed > limit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LIMIT;

    fn shell(script: &str, patience: Patience) -> Said {
        let mut machine = Command::new("sh");
        machine.args(["-c", script]).stderr(Stdio::piped());
        listen(&mut machine, patience, |_| ()).unwrap()
    }

    #[test]
    fn lines_messages_and_status_are_those_of_the_machine() {
        let said = shell(
            "echo one; echo two >&2; printf three; exit 3",
            Patience::InAll(Duration::from_secs(60)),
        );
        assert_eq!(said.lines, ["one", "three"]);
        assert_eq!((said.log.as_str(), said.ended), ("two\n", true));
        assert_eq!(said.status, Some(3));
    }

    #[test]
    fn patience_is_for_all_or_for_each_line() {
        let chatty = "while true; do echo on; sleep 0.1; done";
        let said = shell(chatty, Patience::InAll(Duration::from_millis(100)));
        assert!(!said.ended && said.status.is_none() && !said.lines.is_empty());
        let silent = "for i in 1 2 3 4 5; do echo on; sleep 0.2; done; exec sleep 60";
        let said = shell(silent, Patience::ForEachLine(Duration::from_millis(300)));
        assert_eq!((said.lines.len(), said.ended), (5, false));
    }

    #[test]
    fn what_a_process_has_had_is_not_what_has_passed() {
        let mut busy = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let mut idle = Command::new("sleep").arg("60").spawn().unwrap();
        let (started, enough) = (Instant::now(), Duration::from_millis(200));
        while had(busy.id()).is_some_and(|had| had < enough) && started.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(20));
        }
        let (worked, waited) = (had(busy.id()), had(idle.id()));
        for child in [&mut busy, &mut idle] {
            child.kill().and_then(|()| child.wait()).unwrap();
        }
        assert!(worked >= Some(enough), "{worked:?}");
        assert!(waited < Some(enough), "{waited:?}");
        assert_eq!(had(u32::MAX), None);
    }

    #[test]
    fn a_guest_is_late_by_what_it_has_had() {
        let second = Duration::from_secs(1);
        assert!(!is_late(second, 8 * second, Some(second)), "beside a build");
        assert!(is_late(second, 2 * second, Some(3 * second)));
        assert!(is_late(second, 11 * second, Some(Duration::ZERO)), "it waits");
        assert!(is_late(second, 2 * second, None));
    }
}
