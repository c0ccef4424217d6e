//! Live migrations of QEMU's on this computer's KVM, beside what `tablewright migrate` predicts.
//!
//! A guest of this project (`examples/x86-64/src/bin/writer.rs`) writes its memory at a rate. One
//! QEMU sends it to another. A relay between them limits the bytes of each second, or QEMU does by
//! `max-bandwidth`, which does not hold for the last round. Each migration is predicted before it
//! is made. Needs `/dev/kvm` on x86-64; nothing of the host is changed.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};

use crate::child::ends_with_us;
use crate::fetch;
use crate::tools::{self, QEMU_X86};
use crate::{About as _, Error, Result, say};

#[derive(Args)]
pub struct MigrateArgs {
    /// Twenty migrations instead of four (some minutes)
    #[arg(long)]
    all: bool,
    /// The migrations as JSON, a line each
    #[arg(long)]
    json: bool,
}

/// Physical address of the writer's parameters.
const PARAMETERS: u64 = 0x1f_0000;
/// First address of its memory.
const BEGIN: u64 = 16 << 20;
/// All of that memory, in MiB.
const MEMORY: u64 = 256;
/// Most that a migration may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// Bytes that the relay passes on at a time.
const PIECE: usize = 16 << 10;
/// A relay that had nothing to pass on, or was kept from its CPU, makes up for at most so much.
const CREDIT: Duration = Duration::from_millis(20);
/// Bytes in a second that the socket between two QEMUs carries where nothing limits it. Assumed.
const SOCKET: u64 = 1 << 30;

/// A migration.
#[derive(Clone, Copy)]
struct Case {
    /// Pages that the guest writes in a second.
    rate: u64,
    /// Memory that they lie in, in MiB.
    set: u64,
    /// MiB in a second.
    bandwidth: u64,
    /// Milliseconds.
    downtime: u64,
    /// The relay limits; QEMU's `max-bandwidth` otherwise.
    relayed: bool,
}

const fn case(rate: u64, set: u64, bandwidth: u64, downtime: u64, relayed: bool) -> Case {
    Case { rate, set, bandwidth, downtime, relayed }
}

/// The first four are made by default.
const CASES: [Case; 20] = [
    case(4_000, 64, 64, 300, true),
    case(8_000, 32, 64, 100, true),
    case(2_000, 128, 32, 300, true),
    case(8_000, 64, 64, 300, false),
    case(1_000, 128, 64, 100, true),
    case(4_000, 64, 64, 100, true),
    case(10_000, 64, 64, 300, true),
    case(12_000, 64, 64, 300, true),
    case(14_000, 128, 64, 300, true),
    case(4_000, 128, 32, 300, true),
    case(6_000, 32, 32, 300, true),
    case(1_000, 16, 32, 100, true),
    case(8_000, 128, 128, 300, true),
    case(16_000, 64, 128, 300, true),
    case(24_000, 64, 128, 100, true),
    case(20_000, 128, 128, 300, true),
    case(4_000, 64, 128, 50, true),
    case(4_000, 64, 64, 300, false),
    case(2_000, 128, 32, 300, false),
    case(16_000, 64, 128, 300, false),
];

/// Figures of one.
#[derive(Clone, Copy)]
struct Figures {
    total_ms: f64,
    downtime_ms: f64,
    rounds: f64,
}

impl Figures {
    /// Of what the lab's program and QEMU call so.
    fn of(report: &Value, total: &str, downtime: &str, rounds: &str) -> Option<Self> {
        Some(Self {
            total_ms: report[total].as_f64()?,
            downtime_ms: report[downtime].as_f64()?,
            rounds: report["ram"][rounds].as_f64()?,
        })
    }
}

impl Case {
    fn name(&self) -> String {
        format!(
            "{} pages/s of {} MiB, {} MiB/s by {}, {} ms",
            self.rate,
            self.set,
            self.bandwidth,
            if self.relayed { "the link" } else { "max-bandwidth" },
            self.downtime
        )
    }

    /// Asks the lab's program.
    fn predicted(&self) -> Result<Figures> {
        let mut command = tools::cargo();
        command.args(["run", "--release", "-q", "-p", "tablewright-lab", "--", "migrate"]);
        command.args(["--logging", "all-set", "--vcpus", "1", "--writes", "fixed", "--json"]);
        command.args(["--memory", &format!("{MEMORY}M"), "--set", &format!("{}M", self.set)]);
        command.args(["--rate", &self.rate.to_string(), "--timeout", "120"]);
        command.args(["--downtime-limit", &self.downtime.to_string()]);
        let limit = format!("{}M", self.bandwidth);
        match self.relayed {
            true => command.args(["--bandwidth", &limit]),
            false => {
                let link = SOCKET.to_string();
                command.args(["--max-bandwidth", &limit, "--bandwidth", &link])
            }
        };
        let output = command.stderr(Stdio::inherit()).output().about("tablewright migrate")?;
        let report: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| Error::Failed(format!("tablewright migrate: {error}")))?;
        let row = &report["rows"][0];
        Figures::of(row, "total_time_ms", "downtime_ms", "dirty_sync_count")
            .ok_or_else(|| Error::Failed("tablewright migrate: no figures".into()))
    }

    /// Has QEMU do it.
    fn measured(&self, writer: &Path, ticks: f64, at: &Path) -> Result<Figures> {
        let sockets = |name: &str| at.join(name);
        for name in ["source", "destination", "in", "out", "said"] {
            let _ = fs::remove_file(sockets(name));
        }
        let target = if self.relayed { "out" } else { "in" };
        let mut there = Qemu::start(self, writer, ticks, at, "destination")?;
        let mut here = Qemu::start(self, writer, ticks, at, "source")?;
        let relay = self.relayed.then(|| {
            let (listen, on) = (sockets("out"), sockets("in"));
            let listener = UnixListener::bind(&listen).about("a socket")?;
            let bytes = self.bandwidth << 20;
            Ok::<_, Error>(thread::spawn(move || relay(&listener, &on, bytes)))
        });
        let relay = relay.transpose()?;
        // The guest has written all of its memory.
        let begun = Instant::now();
        while fs::read(sockets("said")).map_or(0, |said| said.len()) == 0 {
            if begun.elapsed() > PATIENCE {
                return Err(Error::Failed("the guest does not say that it is ready".into()));
            }
            thread::sleep(Duration::from_millis(20));
        }
        let limit = if self.relayed { 0 } else { self.bandwidth << 20 };
        here.ask(
            "migrate-set-parameters",
            json!({
                "max-bandwidth": limit,
                "downtime-limit": self.downtime,
            }),
        )?;
        let uri = format!("unix:{}", sockets(target).display());
        here.ask("migrate", json!({ "uri": uri }))?;
        let begun = Instant::now();
        let report = loop {
            let report = here.ask("query-migrate", json!({}))?;
            match report["status"].as_str() {
                Some("completed") => break report,
                Some("failed") => {
                    return Err(Error::Failed(format!("QEMU did not migrate: {report}")));
                }
                _ if begun.elapsed() > PATIENCE => {
                    return Err(Error::Failed(format!("QEMU is still at it: {report}")));
                }
                _ => thread::sleep(Duration::from_millis(20)),
            }
        };
        // The destination starts it once it has read all that was sent.
        while there.ask("query-status", json!({}))?["running"] != true {
            if begun.elapsed() > PATIENCE {
                return Err(Error::Failed("the guest does not run at its destination".into()));
            }
            thread::sleep(Duration::from_millis(20));
        }
        drop((here, there));
        if let Some(relay) = relay {
            // QEMU has ended, and closed both ends: how the relay found that is no result.
            let _ = relay.join().map_err(|_| Error::Failed("the relay panicked".into()))?;
        }
        Figures::of(&report, "total-time", "downtime", "dirty-sync-count")
            .ok_or_else(|| Error::Failed(format!("QEMU says no figures: {report}")))
    }
}

/// An emulator that is spoken to.
struct Qemu {
    child: Child,
    to: UnixStream,
    from: BufReader<UnixStream>,
}

impl Qemu {
    fn start(case: &Case, writer: &Path, ticks: f64, at: &Path, name: &str) -> Result<Self> {
        let path = |name: &str| at.join(name).display().to_string();
        let pages = |mib: u64| mib << 8;
        let each = (ticks / case.rate as f64) as u64;
        let parameters = [BEGIN, pages(MEMORY), pages(case.set), each];
        let mut command = Command::new(QEMU_X86);
        command.args(["-accel", "kvm", "-cpu", "host", "-smp", "1", "-nodefaults"]);
        command.args(["-display", "none", "-m", &format!("{}M", MEMORY + (BEGIN >> 20))]);
        command.arg("-kernel").arg(writer);
        for (number, data) in parameters.iter().enumerate() {
            let addr = PARAMETERS + 8 * number as u64;
            let loader = format!("loader,addr={addr:#x},data={data},data-len=8");
            command.args(["-device", &loader]);
        }
        let said = match name {
            "source" => format!("file,id=said,path={}", path("said")),
            _ => "null,id=said".to_owned(),
        };
        command.args(["-chardev", &said, "-device", "isa-debugcon,iobase=0xe9,chardev=said"]);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", path(name))]);
        if name == "destination" {
            command.args(["-incoming", &format!("unix:{}", path("in"))]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null());
        ends_with_us(&mut command);
        let mut child = command.spawn().about(QEMU_X86)?;
        let begun = Instant::now();
        let to = loop {
            match UnixStream::connect(at.join(name)) {
                Ok(stream) => break stream,
                Err(_) if child.try_wait().about(QEMU_X86)?.is_some() => {
                    return Err(Error::Failed(format!("{QEMU_X86} has ended, see above")));
                }
                Err(error) if begun.elapsed() > Duration::from_secs(10) => {
                    let _ = child.kill();
                    return Err(Error::Io("QEMU's socket".into(), error));
                }
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        };
        let from = BufReader::new(to.try_clone().about("a socket")?);
        let mut qemu = Self { child, to, from };
        qemu.ask("qmp_capabilities", json!({}))?;
        Ok(qemu)
    }

    /// Says a command, and returns the answer; what else QEMU says meanwhile is passed over.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments }).to_string() + "\n";
        self.to.write_all(line.as_bytes()).about("QEMU's socket")?;
        loop {
            let mut line = String::new();
            if self.from.read_line(&mut line).about("QEMU's socket")? == 0 {
                return Err(Error::Failed(format!("{command}: QEMU has ended")));
            }
            let said: Value = serde_json::from_str(&line).unwrap_or_default();
            if let Some(answer) = said.get("return") {
                return Ok(answer.clone());
            }
            if let Some(error) = said.get("error") {
                return Err(Error::Failed(format!("{command}: {error}")));
            }
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Passes on what comes, so many bytes a second.
fn relay(listener: &UnixListener, on: &Path, bytes: u64) -> io::Result<()> {
    let (mut from, _) = listener.accept()?;
    let mut to = UnixStream::connect(on)?;
    let mut piece = [0; PIECE];
    let mut due = Instant::now();
    loop {
        let count = from.read(&mut piece)?;
        if count == 0 {
            return Ok(());
        }
        let now = Instant::now();
        due = due.max(now.checked_sub(CREDIT).unwrap_or(now));
        due += Duration::from_secs_f64(count as f64 / bytes as f64);
        thread::sleep(due.saturating_duration_since(now));
        to.write_all(&piece[..count])?;
    }
}

/// Ticks of the time-stamp counter in a second.
#[cfg(target_arch = "x86_64")]
fn ticks() -> Result<f64> {
    // SAFETY: `_rdtsc` reads a counter that each processor of this architecture has.
    let now = || unsafe { core::arch::x86_64::_rdtsc() };
    let (begin, first) = (Instant::now(), now());
    thread::sleep(Duration::from_millis(200));
    let last = now();
    Ok(last.wrapping_sub(first) as f64 / begin.elapsed().as_secs_f64())
}

/// The guest is of x86-64.
#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> Result<f64> {
    Err(Error::Missing("migrate: the guest that writes is of x86-64, and runs there".into()))
}

/// A directory of its own, which is gone in the end.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Predicts, migrates, and says how far they are apart.
///
/// # Errors
/// There is no KVM, or a migration does not come to its end.
pub fn run(args: &MigrateArgs) -> Result<()> {
    if fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return Err(Error::Missing("migrate: needs /dev/kvm, and the right to use it".into()));
    }
    let ticks = ticks()?;
    tools::qemu_x86()?;
    let writer = fetch::example(fetch::TARGET_X86, "writer-x86-64")?;
    let scratch = Scratch(std::env::temp_dir().join(format!("migrate-{}", std::process::id())));
    fs::create_dir_all(&scratch.0).about("a directory")?;
    if !args.json {
        say!("a guest of {MEMORY} MiB, predicted -> measured\n");
    }
    let cases = if args.all { &CASES[..] } else { &CASES[..4] };
    for case in cases {
        let predicted = case.predicted()?;
        let measured = case.measured(&writer, ticks, &scratch.0)?;
        if args.json {
            let of = |it: Figures| {
                json!({
                    "total_ms": it.total_ms,
                    "downtime_ms": it.downtime_ms,
                    "dirty_sync_count": it.rounds,
                })
            };
            let line = json!({
                "case": case.name(),
                "predicted": of(predicted),
                "measured": of(measured),
            });
            say!("{line}");
            continue;
        }
        let off = |to: f64, from: f64| format!("{:+.0} %", (to / from - 1.0) * 100.0);
        say!(
            "{}: total {:.2} -> {:.2} s ({}), downtime {:.0} -> {:.0} ms ({}), rounds {} -> {}",
            case.name(),
            predicted.total_ms / 1e3,
            measured.total_ms / 1e3,
            off(predicted.total_ms, measured.total_ms),
            predicted.downtime_ms,
            measured.downtime_ms,
            off(predicted.downtime_ms, measured.downtime_ms),
            predicted.rounds,
            measured.rounds,
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of it arrives, and no sooner than the link carries it.
    #[test]
    fn a_relay_carries_so_many_bytes_a_second() {
        let at = Scratch(std::env::temp_dir().join(format!("relay-{}", std::process::id())));
        fs::create_dir_all(&at.0).unwrap();
        let [enter, leave] = ["enter", "leave"].map(|name| at.0.join(name));
        let listener = UnixListener::bind(&enter).unwrap();
        let end = UnixListener::bind(&leave).unwrap();
        let relay = thread::spawn(move || relay(&listener, &leave, 4 << 20));
        let mut from = UnixStream::connect(&enter).unwrap();
        let begin = Instant::now();
        let sent: Vec<u8> = (0..1_u32 << 19).map(|it| it.to_le_bytes()[1]).collect();
        let sending = sent.clone();
        let sender = thread::spawn(move || from.write_all(&sending));
        let (mut to, _) = end.accept().unwrap();
        let mut came = Vec::new();
        to.read_to_end(&mut came).unwrap();
        sender.join().unwrap().unwrap();
        relay.join().unwrap().unwrap();
        assert!(came == sent);
        // 512 KiB at 4 MiB/s, but for the credit.
        assert!(begin.elapsed() >= Duration::from_millis(125) - CREDIT, "{:?}", begin.elapsed());
    }

    #[test]
    fn no_case_is_made_twice() {
        let mut names: Vec<String> = CASES.iter().map(Case::name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CASES.len());
    }
}
