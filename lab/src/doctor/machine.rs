//! Predictions for the published changes and the engine: the software machine, with the costs that
//! were measured here.

use tablewright_machine::{MAX_CPUS, Profile, Time};

use crate::dirty_log::job::{Case, How as Disable, MOST_BYTES};
use crate::dirty_log::run as logs;
use crate::error::Error;
use crate::guest::input::{Backing, Mode};
use crate::guest::{Stage2, leaf_for, nanoseconds};
use crate::map_mem::job as linear;
use crate::map_mem::step::Step;
use crate::runs::{self, Threads};
use crate::size::human;
use crate::tlb_flush::job::{self as flushes, How as Tell};
use crate::tlb_flush::unmap::Unmap;
use crate::write_protect::job::{self as starts, How as Start, Then};

/// The guest that a user has in mind.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub bytes: u64,
    pub vcpus: u16,
}

/// Whether the machine can run a guest of such a size.
///
/// # Errors
/// It cannot.
pub fn fits(bytes: u64) -> Result<(), Error> {
    let usage = |why: String| Err(Error::Usage(format!("--guest {}: {why}", human(bytes))));
    if bytes > MOST_BYTES {
        return usage(format!("at most {}", human(MOST_BYTES)));
    }
    match leaf_for(bytes) {
        Some(_) => Ok(()),
        None if bytes.is_multiple_of(4096) => {
            usage("a guest of so many pages is a multiple of 2 MiB".to_owned())
        }
        None => Err(Error::Usage(format!("--guest {bytes}: not a multiple of 4 KiB"))),
    }
}

const HUGE: u64 = 2 << 20;
/// Most vCPUs that end a log on the machine: the time to simulate their waits grows with their
/// square.
pub const MOST: u16 = 16;

/// Another system's, for what only a kernel can measure: to wait until an invalidation is complete.
pub const KERNELS: &str = "ampere-altra-vm-64g";

/// The linear map at boot in pages, as it was before the published changes and with all of them: a
/// machine on which entries are written and published as fast as here.
pub fn linear(size: Size, entry: f64, published: f64) -> Result<[f64; 2], Error> {
    let mut profile = Profile::load(KERNELS)?;
    profile.costs.entry = Time::ps((entry * 1e3) as u64);
    profile.costs.publish = Time::ps(((published - entry).max(0.0) * 1e3) as u64);
    // Each table is as the one before.
    let some = size.bytes.clamp(64 << 20, 1 << 30).next_multiple_of(2 << 20);
    let plan = linear::plan_of(&profile, some)?;
    let steps = Step::published();
    let ends = [steps.first(), steps.last()].into_iter().flatten();
    let jobs: Vec<_> = ends
        .map(|&step| linear::Job { profile: profile.clone(), step, plan: plan.clone() })
        .collect();
    let ran = runs::software::<linear::Job>(Threads::default())(&jobs)?;
    let mut times = ran.iter().map(|ran| nanoseconds(ran.time) * size.bytes as f64 / some as f64);
    let mut next = || times.next().unwrap_or_default();
    Ok([next(), next()])
}

/// To wait until an invalidation is complete, on that system.
pub fn completion() -> Result<f64, Error> {
    Ok(nanoseconds(Profile::load(KERNELS)?.costs.complete))
}

/// Predicts an unmap of a page: with an interrupt for each vCPU, with one hypercall, by the engine.
pub fn unmap(size: Size, unmap: Unmap) -> Result<Option<[f64; 3]>, Error> {
    let Some(remote) = unmap.remote else {
        return Ok(None);
    };
    let mut profile = Profile::load("hyperv-16-vcpus")?;
    let ps = |nanoseconds: f64| Time::ps((nanoseconds.max(0.0) * 1e3) as u64);
    profile.costs.cycle = ps(unmap.alone);
    profile.costs.interrupt = ps(remote - unmap.alone);
    profile.system.cpus = None;
    let vcpus = size.vcpus.min(MAX_CPUS as u16 / 2);
    // One thread unmaps, and all others of the program run: each is asked in turn, with no more
    // than one at it.
    let job = |how| flushes::Job {
        profile: profile.clone(),
        how,
        threads: vcpus,
        rounds: 1,
        chunks: 2,
        pages: 1,
        vcpus,
        physical: vcpus,
        slice: Time::us(4000),
        work: Time::ZERO,
        spin: Time::ZERO,
        stays: false,
        ranges: 16,
    };
    let jobs = [Tell::Interrupt, Tell::Space, Tell::Tablewright].map(job);
    let cycles = jobs[0].cycles() as f64;
    let ran = runs::software::<flushes::Job>(Threads::default())(&jobs)?;
    let mut times = ran.iter().map(|ran| nanoseconds(ran.time) / cycles);
    let mut next = || times.next().unwrap_or_default();
    Ok(Some([next(), next(), next()]))
}

/// The start of a log, by the engine.
pub fn start(profile: &Profile, size: Size) -> Result<f64, Error> {
    let leaf = leaf_for(size.bytes).unwrap_or(tablewright::Level::new(2));
    let job = starts::Job {
        profile: profile.clone(),
        format: Stage2::Ept,
        how: Start::Tablewright,
        bytes: size.bytes,
        leaf,
        vcpus: size.vcpus,
        then: Then::Nothing,
        before: 0,
    };
    let ran = runs::software::<starts::Job>(Threads::default())(&[job])?;
    Ok(ran.first().map_or(0.0, |ran| nanoseconds(ran.start)))
}

/// The end of a log with huge pages: how long, and the longest stall.
#[derive(Clone, Copy, Debug)]
pub struct Stop {
    pub time: f64,
    pub stall: f64,
    /// All first writes to logged pages of one vCPU, one after the other.
    pub populate: f64,
}

/// Of a guest as large, in the order before the published change, in the published order, and with
/// the engine's.
pub fn stop(profile: &Profile, size: Size) -> Result<[Stop; 3], Error> {
    let backing: Backing = "anonymous_hugetlb_2mb".parse().map_err(Error::Usage)?;
    let mode: Mode = "P48V48_4K".parse().map_err(Error::Usage)?;
    // A block for each vCPU is run; what takes as long as there are blocks is multiplied.
    let vcpus = size.vcpus.min(MOST);
    let each = (size.bytes / u64::from(vcpus)).max(HUGE);
    let each = 1_u64 << each.ilog2();
    let case = Case { backing, bytes: each, vcpus, mode, offset: None, scale: Some(each / HUGE) };
    let rest = size.bytes as f64 / (each as f64 * f64::from(vcpus));
    let mut both = Vec::new();
    for how in [Disable::Before, Disable::After, Disable::Tablewright] {
        let mut job = case.job(profile, how)?;
        job.iterations = 1;
        let ran = logs::run(&job)?;
        let longest = ran.stalls.iter().map(|(time, _)| *time).max();
        both.push(Stop {
            time: nanoseconds(ran.disable) * rest,
            stall: longest.map_or(0.0, nanoseconds),
            populate: nanoseconds(ran.populate) * rest * f64::from(vcpus) / f64::from(size.vcpus),
        });
    }
    let of =
        |at: usize| both.get(at).copied().unwrap_or(Stop { time: 0.0, stall: 0.0, populate: 0.0 });
    Ok([of(0), of(1), of(2)])
}
