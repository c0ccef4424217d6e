//! Guests on the software machine: what their experiments share.

pub mod host;
pub mod input;

use clap::ValueEnum;
use tablewright::format::Rule;
use tablewright::shared::{SharedPlatform, SharedSpace};
use tablewright::{AddressSpace, Format, Half, Level};
use tablewright_machine::{Architecture, Granule, Mapper, Profile, Regime, Time};

use crate::error::Error;

/// All formats have pages of 4 KiB.
pub const PAGE_SHIFT: u32 = 12;
/// More leaves than this are replaced by fewer and larger ones: the machine has a table for
/// every 512.
pub const MOST_LEAVES: u64 = 1 << 22;

/// The smallest leaves of which there are not too many.
pub fn leaf_for(bytes: u64) -> Option<Level> {
    (0..3).map(Level::new).find(|&leaf| {
        bytes / leaf_bytes(leaf) <= MOST_LEAVES && bytes.is_multiple_of(leaf_bytes(leaf))
    })
}

/// The memory that a leaf translates.
pub fn leaf_bytes(leaf: Level) -> u64 {
    4096 << (9 * u32::from(leaf.height()))
}

/// Whether a format is arm64's, whose rules ask for break-before-make.
pub const fn is_arm64<F: Format>() -> bool {
    matches!(F::RULE, Rule::ARM)
}

/// The format of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Stage2 {
    /// EPT, 4 levels
    Ept,
    /// Nested paging, 4 levels
    Npt,
    /// Arm64 stage 2, 4 levels
    Arm64,
}

impl Stage2 {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ept => "ept",
            Self::Npt => "npt",
            Self::Arm64 => "arm64",
        }
    }

    /// Whether they are of x86.
    pub const fn is_x86(self) -> bool {
        !matches!(self, Self::Arm64)
    }
}

/// Outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// The access goes through.
    Done,
    /// The guest faults again.
    Again,
    /// Nothing is known of the page, and all of them were mapped.
    Lost,
}

/// Returns the architecture of a profile, with such tables.
pub fn architecture(profile: &Profile, format: Stage2) -> Architecture {
    let from = profile.architecture.clone();
    Architecture {
        regime: match format {
            Stage2::Ept => Regime::Ept { levels: 4, mode_based: false },
            Stage2::Npt => Regime::Npt { levels: 4 },
            Stage2::Arm64 => Regime::Arm64Stage2 {
                granule: Granule::K4,
                input_bits: 48,
                wide: false,
                forced_write_back: true,
            },
        },
        // All memory was given to the guest before, and cleaned; and nothing is executed.
        forced_write_back: true,
        idc: true,
        dic: true,
        ..from
    }
}

/// That no rule was broken in a step of an experiment.
pub fn no_violation(
    profile: &Profile,
    step: &'static str,
    violation: Option<&str>,
) -> Result<(), Error> {
    match violation {
        None => Ok(()),
        Some(problem) => Err(failed(profile, step)(problem.to_owned())),
    }
}

/// The error of a step that has come to nothing.
pub fn failed(profile: &Profile, step: &'static str) -> impl Fn(String) -> Error {
    move |problem| Error::Machine { machine: profile.name.clone(), step, problem }
}

/// An empty space that CPUs of the machine walk, and edit together.
pub fn shared_space<F: Format, P: SharedPlatform + Clone>(
    platform: P,
    mapper: Mapper<'_>,
) -> Result<SharedSpace<F, P>, String> {
    let space = AddressSpace::<F, _>::new(platform).ok_or("no memory for a root")?;
    mapper.attach(space.root(), Half::Lower, 0);
    SharedSpace::new(space).map_err(|_| "the space runs".to_owned())
}

/// A time as the published table has it.
pub fn nanoseconds(time: Time) -> f64 {
    time.as_ps() as f64 / 1e3
}
