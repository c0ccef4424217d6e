//! One boot in QEMU: its arguments, its console, and a look at the hypervisor's counters while it
//! runs.
//!
//! The counters lie in the hypervisor's memory, under a symbol of its image; QEMU reads them by its
//! machine protocol. When the guest powers off the machine stands still with its memory, is read
//! once more, and is gone.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, SectionKind};
use serde_json::{Value, json};
use tablewright_hypervisor_common::counters::Event;

use crate::child::ends_with_us;
use crate::console::{had, is_late};
use crate::counters::{Count, NAMES};
use crate::fetch::Files;
use crate::guests::Several;
use crate::tools::file;
use crate::{About as _, Error, LIMIT, Leaves, Log, Result, name_of, out};

/// The processor with everything that QEMU has; pointer authentication with the algorithm that is
/// quick to emulate.
pub const CPU_MAX: &str = "max,pauth-impdef=on";

/// Memory begins here; the hypervisor's share of it comes first.
const MEMORY: u64 = 0x4000_0000;

/// When a copy begins, in milliseconds after the start, of a guest that does not say when.
pub const SNAPSHOT_AFTER: u64 = 5000;

/// When a copy begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// When the guest's load says that it is at work. It goes on until the copy is through.
    Bell,
    /// After so many milliseconds.
    After(u64),
}

/// A boot.
pub struct Boot<'a> {
    /// The files.
    pub files: &'a Files,
    /// The processor to emulate.
    pub cpu: &'a str,
    /// How many.
    pub cpus: u8,
    /// The guest's memory, in MiB.
    pub memory: u64,
    /// In how many pieces it is.
    pub pieces: u8,
    /// How it is mapped.
    pub leaves: Leaves,
    /// How many frames are taken away.
    pub evict: u64,
    /// None before so many faults.
    pub evict_after: u64,
    /// How many in a second, at most; any number if it is zero.
    pub evict_rate: u64,
    /// Whether all that is mapped around such a frame is unmapped with it, its table included.
    pub tables: bool,
    /// How many addresses of random tables are asked of the processor before the guest runs.
    pub check: u64,
    /// How writes are logged.
    pub log: Option<Log>,
    /// The measurement that is made instead of running a guest: `start`, that of the log, or
    /// `flush`.
    pub measure: Option<&'static str>,
    /// When the guest is copied, and goes on on the copy; `None` if it is not.
    pub snapshot: Option<Begin>,
    /// Which invalidations are left out, and what is counted when they are missed. Then it is over.
    pub omit: Option<(&'static str, Count)>,
    /// A bug of the hypervisor's that is made on purpose.
    pub plant: Option<&'static str>,
    /// Several guests instead of one, each with its memory; `memory` is that of all.
    pub several: Option<&'a Several>,
    /// The command line of the guest's first program.
    pub guest: String,
    /// How long it may take where nothing else is done.
    pub limit: Option<Duration>,
    /// Further arguments for QEMU.
    pub more: &'a [String],
}

impl<'a> Boot<'a> {
    /// One CPU, 256 MiB in pages, and nothing that happens to them; no longer than the
    /// [limit](LIMIT) of tests.
    pub fn of(files: &'a Files) -> Self {
        Self {
            files,
            cpu: CPU_MAX,
            cpus: 1,
            memory: 256,
            pieces: 1,
            leaves: Leaves::Pages,
            evict: 0,
            evict_after: 0,
            evict_rate: 0,
            tables: false,
            check: 0,
            log: None,
            measure: None,
            snapshot: None,
            omit: None,
            plant: None,
            several: None,
            guest: String::new(),
            limit: Some(LIMIT),
            more: &[],
        }
    }

    /// The hypervisor's memory, in MiB: its tables take a 512th of the guest's memory; a copy of
    /// the guest as much as the guest.
    fn own_memory(&self) -> u64 {
        // The guest begins with a leaf, and so does its copy.
        let leaf = match self.leaves {
            Leaves::Pages => 2,
            Leaves::Huge => 1024,
            Leaves::Blocks | Leaves::Mixed => self.files.variant.block(),
        };
        let copy = match self.snapshot {
            Some(_) => self.memory.next_multiple_of(leaf),
            None => 0,
        };
        (self.memory / 128).max(64).next_multiple_of(leaf) + copy
    }

    /// All memory of the machine, in MiB.
    pub fn all_memory(&self) -> u64 {
        self.own_memory() + self.memory
    }
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest powered the machine off.
    PoweredOff,
    /// The guest reset the machine.
    Reset,
    /// QEMU ended by itself.
    Gone,
    /// It took too long.
    Late,
    /// The line that it was run for was seen.
    Seen,
    /// Ctrl-C was pressed.
    Interrupted,
    /// The output has no reader any more.
    Unread,
}

/// The outcome of a boot.
pub struct Ran {
    /// How it ended.
    pub end: End,
    /// The lines of the console.
    pub console: Vec<String>,
    /// The hypervisor's last counts.
    pub counters: Vec<u64>,
    /// Whether the hypervisor's code and constants are still what they were.
    pub is_intact: bool,
    /// How long it took.
    pub took: Duration,
    /// The processors' time that the emulator had, where that is known.
    pub had: Duration,
}

impl Ran {
    /// One of the numbers.
    pub fn count(&self, what: Count) -> u64 {
        self.counters.get(what as usize).copied().unwrap_or(0)
    }
}

impl Ran {
    /// How much was counted of what every hypervisor counts.
    pub fn event(&self, what: Event) -> u64 {
        self.counters.get(what as usize).copied().unwrap_or(0)
    }

    /// Whether the copy of the guest was made, and was right.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check_snapshot(&self) -> std::result::Result<(), String> {
        if self.event(Event::Resumed) == 0 {
            return Err("the guest was not copied to the end".into());
        }
        if self.event(Event::Copied) <= self.event(Event::Compared) {
            return Err("the guest wrote nothing while it was copied".into());
        }
        match self.event(Event::Different) {
            0 => Ok(()),
            different => Err(format!("{different} pages differ from the copy")),
        }
    }
}

/// The program itself, that ends with us.
pub struct Qemu {
    child: Child,
    monitor: Monitor,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lost(error: std::io::Error) -> Error {
    Error::Failed(format!("QEMU does not answer: {error}"))
}

/// QEMU's machine protocol.
struct Monitor {
    stream: BufReader<UnixStream>,
    /// How the guest has ended, once it has.
    end: Option<End>,
    /// The address of the counters, and how many there are.
    counters: (u64, usize),
}

impl Monitor {
    fn new(socket: &Path, counters: (u64, usize), child: &mut Child) -> Result<Self> {
        let started = Instant::now();
        // It has said why.
        let ended = || Error::Other("QEMU ended before it began".into());
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if started.elapsed() > Duration::from_secs(10) => {
                    return Err(lost(error));
                }
                Err(_) if child.try_wait().is_ok_and(|status| status.is_some()) => {
                    return Err(ended());
                }
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        };
        stream.set_read_timeout(Some(Duration::from_secs(5))).map_err(lost)?;
        let mut monitor = Self { stream: BufReader::new(stream), end: None, counters };
        // The greeting.
        let ready =
            monitor.read().and_then(|_| monitor.ask(json!({"execute": "qmp_capabilities"})));
        ready.map(|_| monitor).map_err(|_| ended())
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.stream.read_line(&mut line).map_err(lost)?;
        let value: Value = serde_json::from_str(&line)
            .map_err(|error| Error::Failed(format!("QEMU says: {error}")))?;
        if value["event"] == "SHUTDOWN" {
            let reset = value["data"]["reason"] == "guest-reset";
            self.end.get_or_insert(if reset { End::Reset } else { End::PoweredOff });
        }
        Ok(value)
    }

    /// Asks, and waits for the answer.
    fn ask(&mut self, question: Value) -> Result<Value> {
        writeln!(self.stream.get_ref(), "{question}").map_err(lost)?;
        loop {
            let mut value = self.read()?;
            if value.get("return").is_some() || value.get("error").is_some() {
                return Ok(value["return"].take());
            }
        }
    }

    /// Reads memory.
    fn memory(&mut self, at: u64, size: usize) -> Result<Vec<u8>> {
        let file = temporary("memory");
        let arguments = json!({"val": at, "size": size, "filename": file.0});
        self.ask(json!({"execute": "pmemsave", "arguments": arguments}))?;
        std::fs::read(&file.0).about(file.0.display())
    }

    /// Whether code and constants of this program are in memory as they are in its file.
    fn is_intact(&mut self, data: &[u8]) -> Result<bool> {
        for (at, bytes) in
            constants(data).map_err(|error| Error::Other(format!("the hypervisor: {error}")))?
        {
            if self.memory(at, bytes.len())? != bytes {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn counters(&mut self) -> Result<Vec<u64>> {
        let (at, count) = self.counters;
        let command = format!("xp /{count}gx {at:#x}");
        let answer = self.ask(
            json!({"execute": "human-monitor-command", "arguments": {"command-line": command}}),
        )?;
        let words = answer.as_str().unwrap_or_default().split_ascii_whitespace();
        Ok(words
            .filter_map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok())
            .collect())
    }
}

/// A file that is gone when it is not needed any more.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // It may never have been made.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A file for a short time. The name of a socket is short: it may not fit into a directory of the
/// build's.
fn temporary(what: &str) -> Temporary {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let name = format!("tablewright-{what}-{process}-{number}");
    let file = Temporary(std::env::temp_dir().join(name));
    // Of another program of this number, that did not end by itself.
    let _ = std::fs::remove_file(&file.0);
    file
}

/// The sections of a program that are not written: where they are in memory, and what is in them.
fn constants(data: &[u8]) -> object::Result<Vec<(u64, &[u8])>> {
    let file = object::File::parse(data)?;
    let is_constant = |section: &object::Section<'_, '_>| {
        matches!(section.kind(), SectionKind::Text | SectionKind::ReadOnlyData)
            && section.size() != 0
    };
    file.sections()
        .filter(is_constant)
        .map(|section| Ok((section.address(), section.data()?)))
        .collect()
}

/// Returns the address of a symbol of the hypervisor.
fn symbol(image: &Path, name: &str) -> Result<u64> {
    let data = std::fs::read(image).about(image.display())?;
    let file = object::File::parse(&*data)
        .map_err(|error| Error::Other(format!("{}: {error}", image.display())))?;
    let symbol = file.symbols().find(|symbol| symbol.name() == Ok(name));
    symbol
        .map(|symbol| symbol.address())
        .ok_or_else(|| Error::Other(format!("{} has no {name}", image.display())))
}

/// How much memory a kernel takes: `image_size` of its header.
///
/// # Errors
/// It cannot be read, or is none.
pub fn kernel_size(kernel: &Path) -> Result<u64> {
    let data = std::fs::read(kernel).about(kernel.display())?;
    let is_image = data.get(56..60) == Some(b"ARM\x64");
    let size = data.get(16..24).and_then(|size| size.try_into().ok()).map_or(0, u64::from_le_bytes);
    match is_image && data[8..16] == [0; 8] {
        true => Ok(size.max(data.len() as u64)),
        false => Err(Error::Other(format!(
            "{}: no uncompressed arm64 kernel (Image) that can be loaded to any 2 MiB",
            kernel.display()
        ))),
    }
}

/// The receiver of the guest's console.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Console {
    /// The terminal, Ctrl-C included.
    Terminal,
    /// This program, which only listens.
    Pipe,
}

fn spawn(boot: &Boot<'_>, console: Console) -> Result<Qemu> {
    let Boot { files, .. } = boot;
    let kernel = MEMORY + (boot.own_memory() << 20);
    let initrd = kernel + kernel_size(&files.kernel)?.next_multiple_of(2 << 20);
    let mut options = format!("mapping={} evict={}", name_of(&boot.leaves), boot.evict);
    if let Some(log) = &boot.log {
        options += &format!(" log={}", name_of(log));
    }
    if boot.pieces != 1 {
        options += &format!(" pieces={}", boot.pieces);
    }
    if boot.evict_after != 0 {
        options += &format!(" evict_after={}", boot.evict_after);
    }
    if boot.evict_rate != 0 {
        options += &format!(" evict_rate={}", boot.evict_rate);
    }
    if boot.tables {
        options += " evict_by=table";
    }
    if let Some(what) = boot.measure {
        options += &format!(" measure={what}");
    }
    if boot.check != 0 {
        options += &format!(" check={}", boot.check);
    }
    match boot.snapshot {
        Some(Begin::Bell) => options += " snapshot=bell",
        Some(Begin::After(milliseconds)) => options += &format!(" snapshot={milliseconds}"),
        None => {}
    }
    if let Some((class, _)) = boot.omit {
        options += &format!(" omit={class}");
    }
    if let Some(several) = boot.several {
        options += &several.options();
    }
    if let Some(what) = boot.plant {
        options += &format!(" plant={what}");
    }
    // One processor more, that is not the guest's, does what is done beside the guest.
    let cpus = boot.cpus + u8::from(boot.log.is_some());
    let mut command = files.emulator.command();
    command
        .args([
            "-machine",
            "virt,virtualization=on,gic-version=3",
            "-nodefaults",
            "-display",
            "none",
        ])
        .args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"])
        .args(["-no-reboot", "-no-shutdown"])
        .args([
            "-cpu",
            boot.cpu,
            "-smp",
            &cpus.to_string(),
            "-m",
            &format!("{}M", boot.all_memory()),
        ])
        .arg("-kernel")
        .arg(&files.hypervisor)
        .args(["-append", &options])
        .args([
            "-device",
            &format!(
                "guest-loader,addr={kernel:#x},kernel={},bootargs=console=ttyAMA0 quiet \
                 panic=-1 {}",
                file(&files.kernel),
                boot.guest
            ),
        ])
        .args(["-device", &format!("guest-loader,addr={initrd:#x},initrd={}", file(&files.initrd))])
        .args(boot.more);
    if let Some(several) = boot.several {
        command.args(["-device", &several.loader(kernel)]);
    }
    start(command, console, &files.hypervisor, NAMES.len())
}

/// Starts an emulator whose program counts so many things.
///
/// # Errors
/// It cannot be started, or asked; or the program counts nothing.
pub fn start(command: Command, console: Console, program: &Path, numbers: usize) -> Result<Qemu> {
    launch(command, console, (symbol(program, "COUNTERS")?, numbers))
}

/// Launches it where it is known where the counters are, and how many.
fn launch(mut command: Command, console: Console, counters: (u64, usize)) -> Result<Qemu> {
    let socket = temporary("monitor");
    let name = command.get_program().to_string_lossy().into_owned();
    command.args(["-qmp", &format!("unix:{},server=on,wait=off", file(&socket.0))]);
    if console == Console::Pipe {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        if out::takes_interrupts() {
            // Ctrl-C is for this program alone, which reads the counters once more, and ends QEMU.
            command.process_group(0);
        }
    }
    ends_with_us(&mut command);
    let mut child = command.spawn().about(name)?;
    // Connected, it needs no name.
    match Monitor::new(&socket.0, counters, &mut child) {
        Ok(monitor) => Ok(Qemu { child, monitor }),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

/// Boots, and leaves the terminal to the guest.
///
/// # Errors
/// QEMU cannot be started, or asked.
pub fn converse(boot: &Boot<'_>) -> Result<Ran> {
    wait(spawn(boot, Console::Terminal)?)
}

/// Waits for the end of a guest that has the terminal.
///
/// # Errors
/// QEMU cannot be asked.
pub fn wait(mut qemu: Qemu) -> Result<Ran> {
    let started = Instant::now();
    let mut counters = Vec::new();
    while qemu.monitor.end.is_none() && qemu.child.try_wait().about("QEMU")?.is_none() {
        thread::sleep(Duration::from_millis(200));
        counters = qemu.monitor.counters().unwrap_or(counters);
    }
    let end = qemu.monitor.end.unwrap_or(End::Gone);
    Ok(Ran {
        end,
        console: Vec::new(),
        counters,
        is_intact: true,
        took: started.elapsed(),
        had: Duration::ZERO,
    })
}

/// Boots, and shows a line of counters; above it the console, if that is asked for.
///
/// # Errors
/// QEMU cannot be started, or asked.
pub fn watch(boot: &Boot<'_>, console: bool) -> Result<Ran> {
    let last = match boot.snapshot {
        Some(_) => [Count::Copied, Count::Compared],
        None => [Count::Ranges, Count::Evicted],
    };
    let shown = [Count::Faults, Count::Tables, last[0], last[1]];
    let shown = shown.map(|what| (what as usize, NAMES[what as usize]));
    show(&shown, |line, look| {
        run(
            boot,
            |text| {
                if console {
                    line(text)
                }
            },
            look,
        )
    })
}

/// Runs something with a line of these counters, by their places and names, below what is said on
/// the console.
pub fn show<T>(
    shown: &[(usize, &str)],
    run: impl FnOnce(&mut dyn FnMut(&str), &mut dyn FnMut(&[u64])) -> T,
) -> T {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
        bar.set_style(style);
    }
    bar.tick();
    let mut said = Instant::now();
    let ran = run(&mut |line| bar.suspend(|| crate::say!("{line}")), &mut |counters| {
        let numbers = shown.iter().map(|(place, name)| {
            let number = counters.get(*place).copied().unwrap_or(0);
            format!("{number} {name}")
        });
        let numbers = numbers.collect::<Vec<_>>().join(", ");
        // Where no terminal is, a line now and then.
        if bar.is_hidden() && said.elapsed() > out::SILENCE {
            said = Instant::now();
            eprintln!("{numbers}");
        }
        bar.set_message(numbers);
        bar.tick();
    });
    bar.finish_and_clear();
    ran
}

/// Boots. Each line of the console, and the counters now and then, are handed on.
///
/// # Errors
/// QEMU cannot be started, or asked.
pub fn run(boot: &Boot<'_>, line: impl FnMut(&str), look: impl FnMut(&[u64])) -> Result<Ran> {
    // Where something is left out, a copy that was made without showing it is the end, too.
    let seen = |counters: &[u64]| {
        let is = |what: Count| counters.get(what as usize).is_some_and(|count| *count != 0);
        boot.omit.is_some_and(|(_, what)| is(what) || is(Count::Resumed))
    };
    let qemu = spawn(boot, Console::Pipe)?;
    attend(qemu, &boot.files.hypervisor, boot.limit, seen, line, look)
}

/// Attends a guest to its end, or until something is seen in the counters.
///
/// # Errors
/// QEMU cannot be asked.
pub fn attend(
    mut qemu: Qemu,
    program: &Path,
    limit: Option<Duration>,
    seen: impl Fn(&[u64]) -> bool,
    mut line: impl FnMut(&str),
    mut look: impl FnMut(&[u64]),
) -> Result<Ran> {
    let started = Instant::now();
    // As it is now: it may be built anew meanwhile.
    let image = std::fs::read(program).about(program.display())?;
    let (says, said) = channel();
    if let Some(console) = qemu.child.stdout.take() {
        thread::spawn(move || {
            let mut console = BufReader::new(console);
            let mut bytes = Vec::new();
            while console.read_until(b'\n', &mut bytes).is_ok_and(|count| count != 0) {
                let text = String::from_utf8_lossy(&bytes).trim_end().to_string();
                bytes.clear();
                if says.send(text).is_err() {
                    return;
                }
            }
        });
    }
    let (mut console, mut counters) = (Vec::new(), Vec::new());
    let mut looked = Instant::now();
    let end = loop {
        match said.recv_timeout(Duration::from_millis(100)) {
            Ok(text) => {
                line(&text);
                console.push(text);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break qemu.monitor.end.unwrap_or(End::Gone),
        }
        if looked.elapsed() > Duration::from_millis(200) {
            looked = Instant::now();
            // What it says last is kept if it is gone meanwhile.
            counters = qemu.monitor.counters().unwrap_or(counters);
            look(&counters);
            if let Some(end) = qemu.monitor.end {
                break end;
            }
            if seen(&counters) {
                break End::Seen;
            }
        }
        if limit.is_some_and(|limit| is_late(limit, started.elapsed(), had(qemu.child.id()))) {
            break End::Late;
        }
        if out::is_interrupted() {
            break End::Interrupted;
        }
        if out::is_unread() {
            break End::Unread;
        }
    };
    counters = qemu.monitor.counters().unwrap_or(counters);
    let is_intact = end == End::PoweredOff && qemu.monitor.is_intact(&image)?;
    let took = started.elapsed();
    let had = had(qemu.child.id()).unwrap_or_default();
    // What is still on its way from the console.
    drop(qemu);
    console.extend(said.iter().inspect(|text| line(text)));
    Ok(Ran { end, console, counters, is_intact, took, had })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{Console, launch};

    #[test]
    fn a_start_that_fails_leaves_no_socket() {
        // What is no emulator: it makes the file, says nothing, and ends.
        let script = "file=${1#unix:}; echo > ${file%%,*}; exit 1";
        for console in [Console::Pipe, Console::Terminal] {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            assert!(launch(command, console, (0, 1)).is_err());
            let ours = format!("tablewright-monitor-{}-", std::process::id());
            let files = std::fs::read_dir(std::env::temp_dir()).unwrap();
            let names = files.map(|file| file.unwrap().file_name().into_string());
            assert!(!names.flatten().any(|name| name.starts_with(&ours)));
        }
    }
}
