//! A case of the well-known test, and the run that stands for it: with all of its pages, or with a
//! part of them.

use tablewright_machine::Profile;

use super::{How, Job, Options, Scale};
use crate::error::Error;
use crate::input::{Backing, Mode, PAGE, Region, Source};
use crate::report;
use crate::size::human;

/// So many pages are run where nothing is said.
const USUAL_PAGES: u64 = 1 << 18;
/// The tables of more would not fit into many computers.
const MOST_PAGES: u64 = 1 << 22;
/// No memory is larger: the host's lies beside it.
pub const MOST_BYTES: u64 = 1 << 45;
/// A level of tables less.
const LEVEL: u64 = 512;

/// A case, as it is asked for.
#[derive(Clone, Debug)]
pub struct Case {
    /// What backs the memory.
    pub backing: Backing,
    /// How much each vCPU has.
    pub bytes: u64,
    /// How many vCPUs.
    pub vcpus: u16,
    /// The guest's mode.
    pub mode: Mode,
    /// Where the memory is [none: as far up as the mode goes].
    pub offset: Option<u64>,
    /// What one page of a run stands for [none: as few pages are run as is usual].
    pub scale: Option<u64>,
}

impl Case {
    /// The published one.
    pub fn published() -> Option<Self> {
        Some(Self {
            backing: "anonymous_hugetlb_1gb".parse().ok()?,
            bytes: 1 << 30,
            vcpus: 416,
            mode: "PXXV48_4K".parse().ok()?,
            offset: None,
            scale: None,
        })
    }

    /// Whether it is that.
    pub fn is_published(&self) -> bool {
        Self::published().is_some_and(|case| {
            (case.backing, case.bytes, case.vcpus) == (self.backing, self.bytes, self.vcpus)
        })
    }

    /// Its scale, and what backs the memory then.
    fn scaled(&self) -> Result<(Scale, Source), Error> {
        let source = self.backing.source;
        let size = source.bytes();
        let fits = |smaller: u64, fewer: u64| {
            let all = smaller.checked_mul(fewer);
            all.is_some_and(|all| {
                self.bytes.is_multiple_of(all) && (self.bytes / all).is_multiple_of(size / smaller)
            })
        };
        // Two levels of tables below a page of the host are one.
        let deep = source.level().height() == 2;
        let parts = |scale: u64| match deep && scale.is_multiple_of(LEVEL) {
            true => (LEVEL, scale / LEVEL),
            false => (1, scale),
        };
        let (smaller, fewer) = match self.scale {
            Some(scale) => parts(scale),
            None => {
                let smaller = if deep { LEVEL } else { 1 };
                let pages = self.bytes / PAGE * u64::from(self.vcpus) / smaller;
                let mut fewer = 1;
                while pages / fewer > USUAL_PAGES && fits(smaller, fewer * 2) {
                    fewer *= 2;
                }
                (smaller, fewer)
            }
        };
        if !fits(smaller, fewer) {
            return Err(Error::Usage(match self.scale {
                Some(scale) => {
                    let powers = (0..u64::BITS).map(|shift| 1 << shift);
                    let fit = powers.filter(|scale| {
                        let (smaller, fewer) = parts(*scale);
                        fits(smaller, fewer)
                    });
                    let fit: Vec<String> = fit.map(|scale: u64| scale.to_string()).collect();
                    format!(
                        "--scale {scale}: {} of {} cannot be divided so; of the powers of two these fit: {}",
                        human(self.bytes),
                        self.backing.name,
                        fit.join(", ")
                    )
                }
                None => format!(
                    "-b {}: not a multiple of the {} that {} has",
                    human(self.bytes),
                    human(size),
                    self.backing.name
                ),
            }));
        }
        let source = match (source, smaller) {
            (Source::Fixed { shift }, LEVEL) => Source::Fixed { shift: shift - 9 },
            (source, _) => source,
        };
        Ok((Scale { smaller, fewer }, source))
    }

    /// The run of it with what the test does where nothing else is said, and with vCPUs that go on.
    pub fn job(&self, profile: &Profile, how: How) -> Result<Job, Error> {
        // Where it is as it is asked for, whatever part of it is run.
        let all = self.bytes.checked_mul(u64::from(self.vcpus));
        let all = all.filter(|all| *all <= MOST_BYTES).ok_or_else(|| {
            Error::Usage(format!(
                "-b {}: at most {} for all vCPUs",
                human(self.bytes),
                human(MOST_BYTES)
            ))
        })?;
        let region = Region::new(self.mode, self.backing, all, self.offset)?;
        let (scale, source) = self.scaled()?;
        let pages = self.bytes / PAGE * u64::from(self.vcpus) / (scale.smaller * scale.fewer);
        if pages > MOST_PAGES {
            return Err(Error::Usage(format!(
                "-b {}: {} pages are too many to simulate, at most {}: give --scale",
                human(self.bytes),
                report::count(pages),
                report::count(MOST_PAGES)
            )));
        }
        let region = Region {
            bytes: pages * PAGE,
            ..region
        };
        Ok(Job {
            profile: profile.clone(),
            how,
            source,
            region,
            scale,
            vcpus: self.vcpus,
            iterations: 2,
            slots: 1,
            write_percent: 100,
            random: false,
            seed: 1,
            manual: true,
            running: true,
            options: Options::default(),
        })
    }
}
