//! Builder of the linear map: the one place that calls the engine.

use tablewright::format::{
    Arm64K4, Arm64K4Wide, Arm64K16, Arm64K16Wide, Arm64K64, Arm64K64Wide, Sv39, Sv48, Sv57, X86_64,
};
use tablewright::linear::{LinearMap, MemoryMap};
use tablewright::{AddressSpace, Attrs, Half, Mapping, Pa, Span, Va};

use super::plan::{Contents, Leaves, Plan};
use crate::format::{Architecture, Granule};
use crate::memory::arena::Arena;
use crate::memory::platform::Lean;

/// The name of the engine that this program belongs to.
pub const OURS: &str = "tablewright";

/// Builds one linear map, as often as it is asked to.
pub trait Builder {
    /// The crate's name.
    fn name(&self) -> &'static str;

    /// Its version.
    fn version(&self) -> &'static str;

    /// Maps every span of the plan in an empty space, with tables from `arena`, and tells the
    /// address of the root table. This is what is timed. The tables are never given back: the arena
    /// starts again. An error is one line.
    fn build(&mut self, arena: Arena) -> Result<u64, String>;
}

/// The builder that writes real tables of the plan's format into memory of the host.
pub fn native(plan: &Plan) -> Result<Box<dyn Builder>, String> {
    let format = plan.format;
    Ok(match (format.architecture(), format.granule(), format.address_bits()) {
        (Architecture::X86_64, _, 57) => Box::new(Native::<X86_64<5>>::new(plan)?),
        (Architecture::X86_64, _, _) => Box::new(Native::<X86_64<4>>::new(plan)?),
        (Architecture::Riscv64, _, 39) => Box::new(Native::<Sv39>::new(plan)?),
        (Architecture::Riscv64, _, 57) => Box::new(Native::<Sv57>::new(plan)?),
        (Architecture::Riscv64, _, _) => Box::new(Native::<Sv48>::new(plan)?),
        (Architecture::Arm64, Granule::K4, 52) => Box::new(Native::<Arm64K4Wide>::new(plan)?),
        (Architecture::Arm64, Granule::K4, _) => Box::new(Native::<Arm64K4>::new(plan)?),
        (Architecture::Arm64, Granule::K16, 52) => Box::new(Native::<Arm64K16Wide>::new(plan)?),
        (Architecture::Arm64, Granule::K16, _) => Box::new(Native::<Arm64K16>::new(plan)?),
        (Architecture::Arm64, Granule::K64, 52) => Box::new(Native::<Arm64K64Wide>::new(plan)?),
        (Architecture::Arm64, Granule::K64, _) => Box::new(Native::<Arm64K64>::new(plan)?),
    })
}

/// The engine with one format, and the plan in the engine's own words.
struct Native<F> {
    half: Half,
    linear: LinearMap<Va>,
    ram: Vec<Span<Pa>>,
    special: Vec<(Span<Pa>, Attrs)>,
    format: std::marker::PhantomData<F>,
}

impl<F> Native<F> {
    fn new(plan: &Plan) -> Result<Self, String> {
        let mut ram = Vec::with_capacity(plan.spans.len());
        let mut special = Vec::new();
        for span in &plan.spans {
            let memory = Span::new(Pa::new(span.start), span.bytes())
                .map_err(|error| format!("{:#x}: {error}", span.start))?;
            ram.push(memory);
            match span.contents {
                Contents::Data => {}
                Contents::Text => special.push((memory, Attrs::KERNEL_TEXT)),
                Contents::Rodata => special.push((memory, Attrs::KERNEL_RODATA)),
            }
        }
        let mapping = Mapping::new(Attrs::KERNEL_DATA);
        let mapping = match plan.leaves {
            Leaves::Largest => mapping,
            Leaves::Pages => mapping.pages_only(),
        };
        Ok(Self {
            // One root serves both halves, and the engine calls that the lower one.
            half: match plan.format.architecture().has_one_root() {
                true => Half::Lower,
                false => Half::Upper,
            },
            linear: LinearMap::new(Va::new(plan.format.linear_base()), mapping),
            ram,
            special,
            format: std::marker::PhantomData,
        })
    }
}

impl<F: tablewright::Format<Input = Va>> Builder for Native<F> {
    fn name(&self) -> &'static str {
        OURS
    }

    fn version(&self) -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    fn build(&mut self, arena: Arena) -> Result<u64, String> {
        let platform = Lean::new(arena, Lean::READING);
        let mut space = AddressSpace::<F, _>::new_in(platform, self.half).ok_or("out of tables")?;
        let memory = MemoryMap { ram: &self.ram, reserved: &[], special: &self.special };
        self.linear.build(&mut space, &memory).map_err(|error| error.to_string())?;
        Ok(space.root().get())
    }
}
