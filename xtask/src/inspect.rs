//! Holds `tablewright inspect` against QEMU: the page tables of guests of three architectures,
//! stopped in the middle of their work, are read by the gdb stub, from a core and from an image.
//! All that they map has to be what QEMU's monitor says.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::Value;
use tablewright_machine::splitmix::below;

use crate::child::ends_with_us;
use crate::debian::Release;
use crate::example::Kernel;
use crate::qemu::CPU_MAX;
use crate::tools::{self, QEMU, QEMU_RISCV, QEMU_X86};
use crate::{About as _, Arch, Error, LIMIT, Result, fetch, initramfs, name_of, say};

#[derive(Args)]
pub struct InspectArgs {
    /// How many addresses QEMU is asked about, of each guest
    #[arg(long, value_name = "N", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    addresses: u32,
}

/// A guest, and where its memory begins.
struct Guest {
    name: &'static str,
    qemu: &'static str,
    words: Vec<String>,
    base: u64,
    bytes: u64,
    /// Words that it says when its tables are worth a look, and how long it works on.
    until: &'static str,
    then: Duration,
    /// QEMU lists all leaves.
    has_list: bool,
    /// The tree that a Linux names in VMCOREINFO.
    of_kernel: Option<&'static str>,
}

fn guests() -> Result<[Guest; 3]> {
    tools::qemu_arm64()?;
    tools::qemu_x86()?;
    let words = |words: &[&str], files: &[(&str, PathBuf)]| {
        let mut all: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        for (option, file) in files {
            all.extend([(*option).to_owned(), file.display().to_string()]);
        }
        all
    };
    let initrd = |arch: Arch| -> Result<PathBuf> {
        let file = tools::scratch()?.join(format!("initrd-watched-{}", name_of(&arch)));
        initramfs::of_one(&file, &fetch::watched_guest(arch)?)?;
        Ok(file)
    };
    let then = Duration::from_secs(2);
    Ok([
        Guest {
            name: "arm64",
            qemu: QEMU,
            words: words(
                &["-M", "virt", "-cpu", CPU_MAX, "-m", "512", "-append", "quiet rounds=1000000"],
                &[
                    ("-kernel", fetch::kernel_arm64(Release::Bookworm)?),
                    ("-initrd", initrd(Arch::Arm64)?),
                ],
            ),
            base: 0x4000_0000,
            bytes: 512 << 20,
            until: "watched: ",
            then,
            has_list: false,
            of_kernel: Some("TTBR1"),
        },
        Guest {
            name: "x86-64",
            qemu: QEMU_X86,
            words: words(
                &[
                    "-M",
                    "q35",
                    "-cpu",
                    "max",
                    "-m",
                    "512",
                    "-append",
                    "console=ttyS0 quiet rounds=1000000",
                ],
                &[("-kernel", fetch::guest_x86(None)?.0), ("-initrd", initrd(Arch::X86_64)?)],
            ),
            base: 0,
            bytes: 512 << 20,
            until: "watched: ",
            then,
            has_list: true,
            of_kernel: Some("CR3"),
        },
        Guest {
            name: "riscv64",
            qemu: QEMU_RISCV,
            words: words(&["-M", "virt", "-m", "256"], &[("-kernel", Kernel::Riscv64.build()?)]),
            base: 0x8000_0000,
            bytes: 256 << 20,
            until: "example: heap",
            then: Duration::ZERO,
            has_list: false,
            of_kernel: None,
        },
    ])
}

/// How often is looked what a guest has said: one works for a tenth of a second.
const LOOK: Duration = Duration::from_millis(2);

/// A machine that runs, and its monitor.
struct Machine {
    qemu: Child,
    monitor: UnixStream,
    files: PathBuf,
}

impl Machine {
    /// Starts it, and stops it in the middle of its work.
    fn start(guest: &Guest) -> Result<Self> {
        let files = tools::scratch()?.join(format!("inspected-{}", std::process::id()));
        std::fs::create_dir_all(&files).about(files.display())?;
        let socket = |name: &str| format!("unix:{},server=on,wait=off", files.join(name).display());
        let console = files.join("console");
        let mut command = Command::new(guest.qemu);
        command.args(&guest.words).args(["-smp", "2", "-nodefaults", "-display", "none"]);
        command.args(["-serial", &format!("file:{}", console.display())]);
        command.args(["-gdb", &socket("gdb"), "-monitor", &socket("monitor")]);
        ends_with_us(&mut command);
        let mut qemu = command.stdin(Stdio::null()).spawn().about(guest.qemu)?;
        let mut machine = Self { monitor: Self::connect(&mut qemu, &files)?, qemu, files };
        machine.answer()?;
        let started = Instant::now();
        while !String::from_utf8_lossy(&std::fs::read(&console).unwrap_or_default())
            .contains(guest.until)
        {
            let has_ended = machine.qemu.try_wait().about(guest.qemu)?.is_some();
            if has_ended || started.elapsed() > 2 * LIMIT {
                let why = format!("{}: the guest never said {:?}", guest.name, guest.until);
                return Err(Error::Failed(why));
            }
            thread::sleep(LOOK);
        }
        thread::sleep(guest.then);
        machine.ask("stop")?;
        // A processor that is in its firmware translates nothing: it goes on until it is back.
        while machine.ask(&format!("gva2gpa {NOWHERE:#x}"))?.starts_with("gpa") {
            if started.elapsed() > 2 * LIMIT {
                return Err(Error::Failed(format!("{}: it translates nothing", guest.name)));
            }
            machine.ask("cont")?;
            thread::sleep(LOOK);
            machine.ask("stop")?;
        }
        Ok(machine)
    }

    /// Waits for the monitor.
    fn connect(qemu: &mut Child, files: &Path) -> Result<UnixStream> {
        loop {
            if let Ok(monitor) = UnixStream::connect(files.join("monitor")) {
                return Ok(monitor);
            }
            if qemu.try_wait().about("QEMU")?.is_some() {
                return Err(Error::Failed("QEMU has ended before it had a monitor".into()));
            }
            thread::sleep(LOOK);
        }
    }

    /// Sends a command to the monitor, and returns the answer.
    fn ask(&mut self, command: &str) -> Result<String> {
        writeln!(self.monitor, "{command}").about("QEMU's monitor")?;
        let answer = self.answer()?;
        // The first line is what was typed.
        Ok(answer.split_once('\n').map_or(String::new(), |(_, rest)| rest.replace('\r', "")))
    }

    /// All until it waits for a command.
    fn answer(&mut self) -> Result<String> {
        let mut answer = Vec::new();
        let mut some = [0; 4096];
        while !answer.ends_with(b"(qemu) ") {
            match self.monitor.read(&mut some).about("QEMU's monitor")? {
                0 => return Err(Error::Failed("QEMU has ended".into())),
                bytes => answer.extend(&some[..bytes]),
            }
        }
        answer.truncate(answer.len() - b"(qemu) ".len());
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        let _ = std::fs::remove_dir_all(&self.files);
    }
}

/// An address that no tables translate: it is not canonical.
const NOWHERE: u64 = 1 << 62;

/// Returns what `tablewright inspect` says, in JSON.
fn inspect(tool: &Path, words: &[String]) -> Result<Value> {
    let mut command = Command::new(tool);
    let said = tools::output(command.arg("inspect").args(words).arg("--json"))?;
    serde_json::from_str(&said).map_err(|error| Error::Failed(format!("inspect: {error}")))
}

fn texts<'v>(of: &'v Value, key: &str) -> &'v str {
    of[key].as_str().unwrap_or_default()
}

fn number(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

/// Picks addresses inside regions, and half of them just outside, where mistakes are likely.
fn addresses(regions: &[Value], count: u32) -> Vec<u64> {
    let stream = Cell::new(1);
    let next = |bound| below(&stream, bound);
    let mut all = Vec::new();
    while all.len() < count as usize && !regions.is_empty() {
        let region = &regions[next(regions.len() as u64) as usize];
        let (Some(first), Some(last)) =
            (number(texts(region, "first")), number(texts(region, "last")))
        else {
            break;
        };
        all.push(match next(4) {
            0 => first.wrapping_sub(1 + next(0x4000)),
            1 => last.wrapping_add(1 + next(0x4000)),
            _ => first + next(last - first + 1),
        });
    }
    all
}

/// Compares one guest in every way: what there is to say of it.
fn compare(tool: &Path, guest: &Guest, count: u32) -> Result<String> {
    // One works for so short a time that it may end before it is stopped.
    let mut machine = Machine::start(guest).or_else(|_| Machine::start(guest))?;
    let file = |name: &str| machine.files.join(name).display().to_string();
    let (stub, core, image) = (format!("gdb:{}", file("gdb")), file("core"), file("image"));
    let wrong = |what: String| Error::Failed(format!("{}: {what}", guest.name));

    for command in [
        format!("dump-guest-memory \"{core}\""),
        format!("pmemsave {:#x} {:#x} \"{image}\"", guest.base, guest.bytes),
    ] {
        let said = machine.ask(&command)?;
        if !said.trim().is_empty() {
            return Err(wrong(format!("{command}: {}", said.trim())));
        }
    }

    // A machine that is stopped stays as it is.
    let by_stub = inspect(tool, &[stub, "--keep-stopped".into()])?;
    let registers = by_stub["parameters"]["registers"].as_object();
    let registers = registers.into_iter().flatten().flat_map(|(name, value)| {
        ["--reg".to_owned(), format!("{name}={}", value.as_str().unwrap_or_default())]
    });
    let registers: Vec<String> = registers.collect();
    let with = |words: &[&str]| -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).chain(registers.iter().cloned()).collect()
    };
    let base = format!("{:#x}", guest.base);
    let from_image = with(&[&image, "--base", &base]);
    for (name, other) in
        [("the core", inspect(tool, &with(&[&core]))?), ("the image", inspect(tool, &from_image)?)]
    {
        if other["rows"] != by_stub["rows"] {
            return Err(wrong(format!("{name} maps other than the gdb stub says")));
        }
    }
    let rows = by_stub["rows"].as_array().cloned().unwrap_or_default();

    // The kernel's own word for where its tables are leads to the same ones.
    if let Some(tree) = guest.of_kernel {
        let upper = |all: &Value| -> Vec<String> {
            let rows = all["rows"].as_array().into_iter().flatten();
            let rows = rows.filter(|row| row["tree"] == tree && texts(row, "first").len() == 18);
            rows.map(|row| format!("{} {}", row["first"], row["physical"])).collect()
        };
        let plain = inspect(tool, &[image.clone(), "--base".into(), base.clone()])?;
        let (told, known) = (upper(&plain), upper(&by_stub));
        let known: BTreeSet<_> = known.iter().collect();
        let missing = told.iter().filter(|region| !known.contains(region)).count();
        if told.is_empty() || missing * 10 > told.len() {
            return Err(wrong(format!(
                "{missing} of {} regions of VMCOREINFO's tables are not those of {tree}",
                told.len()
            )));
        }
    }

    let mut all = addresses(&rows, count);
    all.sort_unstable();
    all.dedup();
    let mut words = from_image;
    words.extend(all.iter().flat_map(|at| ["--walk".to_owned(), format!("{at:#x}")]));
    let walked = inspect(tool, &words)?;
    let walked = walked["rows"].as_array().cloned().unwrap_or_default();
    // QEMU may answer as a load in the mode in which the processor is: one page that is the
    // kernel's alone says whether those are seen, and one that user mode may read as well.
    let mut seen = |is_users: bool| -> Result<bool> {
        let page = rows.iter().find(|row| {
            texts(row, "kernel").starts_with('r') && texts(row, "user").starts_with('r') == is_users
        });
        let page = page.map_or("0x0", |row| texts(row, "first"));
        Ok(machine.ask(&format!("gva2gpa {page}"))?.starts_with("gpa"))
    };
    let (users, kernels) = (seen(true)?, seen(false)?);
    let is_seen = |row: &Value| match texts(row, "user").starts_with('r') {
        true => users,
        false => kernels,
    };
    let mut mapped = 0;
    for at in &all {
        let said = machine.ask(&format!("gva2gpa {at:#x}"))?;
        let theirs = said.trim().strip_prefix("gpa: ").and_then(number);
        let ours = walked.iter().filter(|row| number(texts(row, "address")) == Some(*at));
        let ours = ours.filter(|row| is_seen(row));
        let ours: Vec<_> = ours.filter_map(|row| number(texts(row, "physical"))).collect();
        if ours.as_slice() != theirs.as_slice() {
            return Err(wrong(format!("{at:#x}: QEMU says {said:?}, and inspect {ours:x?}")));
        }
        mapped += u32::from(theirs.is_some());
    }
    let mut text = format!(
        "{}: {} regions, alike by gdb stub, core and image; of {} addresses {mapped} are mapped, \
         each as QEMU says",
        guest.name,
        rows.len(),
        all.len()
    );
    if guest.has_list {
        let leaves = listed(&rows, &machine.ask("info tlb")?).map_err(wrong)?;
        text += &format!("; {leaves} leaves as `info tlb` has them");
    }
    Ok(text)
}

/// Holds regions against QEMU's list of leaves: how many there are.
///
/// `ff2ef91800000000: 0000000000000000 XG-DA---W`
fn listed(rows: &[Value], list: &str) -> std::result::Result<u64, String> {
    let mut count = 0;
    for line in list.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(va), Some(pa), Some(flags)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let hex = |text: &str| u64::from_str_radix(text.trim_end_matches(':'), 16).ok();
        let (Some(va), Some(pa)) = (hex(va), hex(pa)) else { continue };
        let of = |row: &Value, key| number(texts(row, key)).unwrap_or_default();
        let row = rows.iter().find(|row| (of(row, "first")..=of(row, "last")).contains(&va));
        let is_alike = row.is_some_and(|row| {
            let physical = number(texts(row, "physical"));
            physical.is_none_or(|physical| physical + (va - of(row, "first")) == pa)
                && texts(row, "kernel").contains('w') == flags.contains('W')
                && texts(row, "user").contains('r') == flags.contains('U')
                && (row["global"] == true) == flags.contains('G')
        });
        if !is_alike {
            return Err(format!("`info tlb` says {line}, and inspect {row:?}"));
        }
        count += 1;
    }
    let leaves = rows.iter().filter_map(|row| row["leaves"].as_array()).flatten();
    let leaves: u64 = leaves.filter_map(|leaves| leaves["count"].as_u64()).sum();
    match count == leaves && count > 0 {
        true => Ok(count),
        false => Err(format!("inspect finds {leaves} leaves, and `info tlb` {count}")),
    }
}

/// Compares all guests.
///
/// # Errors
/// A file or an emulator cannot be had; or inspect and QEMU differ, and where they do first.
pub fn run(args: &InspectArgs) -> Result<()> {
    let guests = guests()?;
    let mut cargo = tools::cargo();
    cargo.args(["build", "--quiet", "--package", "tablewright-lab", "--bin", "tablewright"]);
    if !cargo.status().about("cargo")?.success() {
        return Err(Error::Failed("tablewright cannot be built".into()));
    }
    let tool = tools::target().join("debug").join("tablewright");
    for guest in &guests {
        say!("{}", compare(&tool, guest, args.addresses)?);
    }
    Ok(())
}
