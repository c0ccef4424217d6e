//! The linear map of a kernel that boots, on the software machine: in the published ways, and by
//! the engine.

use tablewright_machine::{Granule as MachineGranule, Profile, Regime};

use super::boot::Boots;
use super::iomem::{Extent, MemoryMap};
use super::plan::{Leaves, NOT_STAGE_1, Plan};
use super::step::{Ran, Step};
use crate::error::Error;
use crate::format::{Architecture, Format, Granule};
use crate::runs::{self, Simulated};

/// One run to be made.
#[derive(Clone)]
pub struct Job {
    /// On which machine.
    pub profile: Profile,
    pub step: Step,
    /// The linear map to make.
    pub plan: Plan,
}

/// Makes runs, and gives what each showed, in their order.
pub type Run<'r> = runs::Run<'r, Job>;

impl Simulated for Job {
    type Ran = Ran;
    type Kept = Boots;

    fn run(&self, boots: &mut Boots) -> Result<Ran, Error> {
        boots.run(&self.profile, self.step, &self.plan)
    }

    fn name(&self) -> String {
        format!("{}: {}", self.profile.name, self.step.name)
    }
}

/// The format of a profile's tables.
pub fn format_of(profile: &Profile) -> Result<Format, Error> {
    let (architecture, granule, bits) = match profile.architecture.regime {
        Regime::Arm64Stage1 { granule, wide } => (
            Architecture::Arm64,
            match granule {
                MachineGranule::K4 => Granule::K4,
                MachineGranule::K16 => Granule::K16,
                MachineGranule::K64 => Granule::K64,
            },
            if wide { 52 } else { 48 },
        ),
        Regime::X86_64 { levels } => {
            (Architecture::X86_64, Granule::K4, if levels == 5 { 57 } else { 48 })
        }
        // No profile has another size of input, or EL2.
        Regime::Arm64Stage1Sized { .. }
        | Regime::Arm64El2 { .. }
        | Regime::Arm64Stage2 { .. }
        | Regime::Ept { .. }
        | Regime::Npt { .. }
        | Regime::Riscv { .. } => {
            return Err(Error::Usage(NOT_STAGE_1.to_owned()));
        }
    };
    Ok(Format::new(architecture, granule, bits)?)
}

/// The linear map of so much RAM, from address 0, in pages: what the published figures are of.
pub fn plan_of(profile: &Profile, bytes: u64) -> Result<Plan, Error> {
    let map = MemoryMap { ram: vec![Extent { start: 0, last: bytes - 1 }], ..MemoryMap::default() };
    Plan::new(&map, format_of(profile)?, Leaves::Pages)
        .map_err(|error| Error::input(&profile.name, error))
}
