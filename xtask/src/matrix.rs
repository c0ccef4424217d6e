//! Kernels of two releases of Debian on two versions of QEMU, each with the load, while frames are
//! taken away.

use crate::debian::Release;
use crate::emulator::Emulator;
use crate::fetch::{self, Choice, Files};
use crate::qemu::{self, Boot, CPU_MAX, End, Ran};
use crate::{Error, LIMIT, Leaves, Result, load, name_of, out};
use clap::ValueEnum as _;
use std::path::Path;

/// The name of the test.
pub const NAME: &str = "matrix";

/// The processors that each is booted on.
const MODELS: [&str; 2] = [CPU_MAX, "cortex-a57"];
/// How many.
const CPUS: u8 = 2;
/// Rounds of the load.
const ROUNDS: u32 = 1;
/// Frames that are taken away.
const EVICT: u64 = 2000;

/// Returns what is wrong with a boot.
fn wrong(ran: &Ran) -> std::result::Result<(), String> {
    use crate::counters::Count;
    if ran.end != End::PoweredOff {
        return Err(format!("it ended so: {:?}", ran.end));
    }
    load::check(&ran.console, CPUS, ROUNDS, false)?;
    match ran.is_intact && ran.count(Count::Spoiled) == 0 && ran.count(Count::Evicted) == EVICT {
        true => Ok(()),
        false => {
            Err("a frame that was taken away was used, or code of the hypervisor has changed"
                .into())
        }
    }
}

/// Boots each kernel on each, and hands a line on for each boot.
///
/// # Errors
/// What is missing; or how many went wrong, and the first.
pub fn run(mut line: impl FnMut(&str)) -> Result<()> {
    let mut failed = Vec::new();
    for emulator in [None, Some(Path::new("debian-13"))] {
        let emulator = Emulator::named(emulator)?;
        let version = emulator.version()?;
        for release in Release::value_variants() {
            let files = Files {
                emulator: emulator.clone(),
                ..fetch::everything(Choice { release: *release, ..Choice::default() })?
            };
            for cpu in MODELS {
                let boot = Boot {
                    cpu,
                    cpus: CPUS,
                    leaves: Leaves::Mixed,
                    evict: EVICT,
                    guest: format!("load={ROUNDS}"),
                    limit: Some(LIMIT * 2),
                    ..Boot::of(&files)
                };
                let model = cpu.split(',').next().unwrap_or_default();
                let name = format!("QEMU {version}, {model}, Debian {}", name_of(release));
                let ran = out::clocked(&name, || qemu::run(&boot, |_| (), |_| ()))?;
                let verdict = match wrong(&ran) {
                    Ok(()) => load::kernel(&ran.console).unwrap_or("right").to_string(),
                    Err(why) => {
                        failed.push(format!("{name}: {why}"));
                        format!("FAILED: {why}")
                    }
                };
                line(&format!("{name:40}{verdict} ({:.1} s)", ran.took.as_secs_f64()));
            }
        }
    }
    match failed.first() {
        None => Ok(()),
        Some(first) => {
            Err(Error::Failed(format!("{} boots went wrong; the first: {first}", failed.len())))
        }
    }
}
