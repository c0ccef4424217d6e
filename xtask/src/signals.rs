//! A boot whose user ends it, or that is killed: what was counted is shown, and no emulator stays
//! behind. And one with an initial file system of its own. Each is this program once more, with its
//! output in pipes, as another program would use it.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::child::ends_with_us;
use crate::fetch::Files;
use crate::tools::QEMU;
use crate::{About as _, Error, LIMIT, Result};

/// The name of the test.
pub const NAME: &str = "signals";

/// This program, booting a guest with these arguments.
fn boot(more: &[&str]) -> Result<Child> {
    let program = std::env::current_exe().about("this program")?;
    let mut command = Command::new(program);
    command.args(["boot", "--memory", "192M"]).args(more);
    ends_with_us(&mut command);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .about("this program")
}

/// Waits for a line that says what was counted so far, which comes where no terminal is.
fn wait_for_sign(child: &mut Child) -> Result<()> {
    let Some(pipe) = child.stderr.take() else {
        return Err(Error::Failed("its messages cannot be read".into()));
    };
    let lines = BufReader::new(pipe).lines();
    let mut lines = lines.map_while(std::result::Result::ok);
    match lines.any(|line| line.contains(" faults of the guest")) {
        true => {
            // What is said later has a reader, too.
            std::thread::spawn(move || lines.for_each(drop));
            Ok(())
        }
        false => Err(Error::Failed("nothing was said while it ran".into())),
    }
}

/// The process that is an emulator, and this one's child.
#[cfg(target_os = "linux")]
fn emulator_of(parent: u32) -> Option<u32> {
    let processes = std::fs::read_dir("/proc").ok()?;
    let numbers = processes.filter_map(|it| it.ok()?.file_name().to_str()?.parse::<u32>().ok());
    numbers.into_iter().find(|number| is_emulator_of(*number, |of| of == parent))
}

/// Whether a process is an emulator that has not ended, and its parent is such.
#[cfg(target_os = "linux")]
fn is_emulator_of(process: u32, is: impl Fn(u32) -> bool) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{process}/stat")) else {
        return false;
    };
    // proc_pid_stat(5): number, name in parentheses of at most 15 characters, state, parent.
    let Some((name, rest)) = stat.split_once('(').and_then(|(_, it)| it.rsplit_once(')')) else {
        return false;
    };
    let mut fields = rest.split_ascii_whitespace();
    let (state, parent) = (fields.next(), fields.next().and_then(|it| it.parse().ok()));
    QEMU.starts_with(name) && state != Some("Z") && parent.is_some_and(is)
}

/// Sends a signal to it, and waits for its end. Returns what it has said.
fn end(mut child: Child, signal: i32) -> Result<(ExitStatus, String)> {
    // SAFETY: a system call; the process is a child that was not waited for.
    if unsafe { libc::kill(child.id() as libc::pid_t, signal) } != 0 {
        return Err(Error::Failed("it was not there to be ended".into()));
    }
    let mut said = String::new();
    if let Some(mut output) = child.stdout.take() {
        output.read_to_string(&mut said).about("its output")?;
    }
    Ok((child.wait().about("this program")?, said))
}

/// Ends boots in each way.
///
/// # Errors
/// What was not as it should be.
pub fn run(files: &Files) -> Result<()> {
    let wrong = |what: String| Err(Error::Failed(what));
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let mut child = boot(&["--rounds", "1000"])?;
        wait_for_sign(&mut child)?;
        let (status, said) = end(child, signal)?;
        if status.code() != Some(130) || !said.contains("the hypervisor counted") {
            return wrong(format!("signal {signal}: {status}; it said: {said}"));
        }
    }
    #[cfg(target_os = "linux")]
    {
        let mut child = boot(&["--rounds", "1000"])?;
        wait_for_sign(&mut child)?;
        let Some(emulator) = emulator_of(child.id()) else {
            return wrong("no emulator was seen".into());
        };
        end(child, libc::SIGKILL)?;
        let started = Instant::now();
        while is_emulator_of(emulator, |_| true) {
            if started.elapsed() > LIMIT {
                return wrong(format!("its emulator, {emulator}, goes on without it"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let initrd = files.initrd.to_string_lossy();
    let child = boot(&["--initrd", &initrd])?;
    let output = child.wait_with_output().about("this program")?;
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() || !said.contains("guest: 2 CPUs") {
        return wrong(format!("--initrd: {}; it said: {said}", output.status));
    }
    Ok(())
}
