//! Live copies of guests by their sizes: short and long loads of 256 MiB, 1 and 2 GiB, on both
//! architectures.

use std::time::Duration;

use tablewright_hypervisor_common::counters::Event;

use crate::boot::Program;
use crate::counters::{Count, NAMES};
use crate::fetch::Files;
use crate::guest_case::{Case, Context, outcome};
use crate::hyperv;
use crate::qemu::{self, Begin, End, Ran};
use crate::{Arch, Log, Result, load, name_of, x86_counters};

/// In MiB.
const MEMORY: [u64; 3] = [256, 1024, 2048];
/// Of the load. It goes on until the copy is through, if that takes longer.
const ROUNDS: [u32; 2] = [1, 50];
const CPUS: u8 = 2;
const PAGE: u64 = 4096;

/// Returns the limit of one: a large guest is compared for a minute or more, and each round of the
/// load takes two seconds.
fn limit(memory: u64, rounds: u32) -> Duration {
    Duration::from_secs(60 + memory / 4 + 4 * u64::from(rounds))
}

/// All of them.
pub fn cases() -> impl Iterator<Item = Case> {
    let archs = [Arch::Arm64, Arch::X86_64].into_iter();
    let sized = archs.flat_map(|arch| MEMORY.map(|memory| (arch, memory)));
    let all = sized.flat_map(|(arch, memory)| ROUNDS.map(|rounds| (arch, memory, rounds)));
    all.map(|(arch, memory, rounds)| Case {
        name: format!("sizes-{}-{memory}m-{rounds}", name_of(&arch)),
        short: false,
        arch,
        run: Box::new(move |context: &Context| match arch {
            Arch::Arm64 => arm64(context.arm64()?, memory, rounds),
            Arch::X86_64 => x86(context.x86()?, memory, rounds),
        }),
    })
}

/// Whether all of the copy was compared, and equal.
fn is_whole(ran: &Ran, memory: u64) -> std::result::Result<(), String> {
    ran.check_snapshot()?;
    let (compared, all) = (ran.event(Event::Compared), (memory << 20) / PAGE);
    match compared == all {
        true => Ok(()),
        false => Err(format!("{compared} pages were compared, of {all}")),
    }
}

fn arm64(files: &Files, memory: u64, rounds: u32) -> Result<crate::cases::Outcome> {
    let boot = qemu::Boot {
        cpus: CPUS,
        memory,
        log: Some(Log::All),
        snapshot: Some(Begin::Bell),
        guest: format!("copy load={rounds}"),
        limit: Some(limit(memory, rounds)),
        ..qemu::Boot::of(files)
    };
    let ran = qemu::run(&boot, |_| (), |_| ())?;
    let judge = || {
        is_whole(&ran, memory)?;
        if ran.end != End::PoweredOff {
            return Err(format!("it ended so: {:?}", ran.end));
        }
        if !ran.is_intact {
            return Err("the hypervisor's code or constants have changed".into());
        }
        load::check(&ran.console, CPUS, rounds, true)
    };
    let verdict = judge().map(|()| None);
    Ok(outcome(&ran, verdict, &NAMES, Count::Copied as usize))
}

fn x86(files: &Files, memory: u64, rounds: u32) -> Result<crate::cases::Outcome> {
    let boot = hyperv::Boot {
        cpus: CPUS,
        processors: CPUS,
        memory,
        log: Some(Log::All),
        snapshot: true,
        guest: format!("copy load={rounds}"),
        limit: Some(limit(memory, rounds)),
        ..hyperv::Boot::of(files)
    };
    let ran = hyperv::run(&boot, |_| (), |_| ())?;
    let whole = is_whole(&ran, memory);
    let right = hyperv::judge(&boot, Program::Load, rounds, &ran);
    let verdict = right.and(whole).map(|()| None);
    let counted = x86_counters::Count::Copied as usize;
    Ok(outcome(&ran, verdict, &x86_counters::NAMES, counted))
}
