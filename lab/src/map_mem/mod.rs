//! `map-mem`: builds the linear map of a memory map, as a kernel does when it boots: on this
//! computer, or step by step on the software machine.

mod boot;
mod builder;
mod check;
mod firmware;
pub mod input;
pub mod iomem;
pub mod job;
mod measure;
pub mod native;
pub mod plan;
pub mod published;
pub mod simulate;
pub mod step;

use std::path::PathBuf;

use clap::builder::ArgPredicate;
use clap::{Args, ValueEnum};
use serde_json::json;
use tablewright_machine::Profile;

use crate::error::Error;
use crate::format::{Architecture, Format, Granule};
use crate::output::report::{self, Report};
use crate::profile::{Experiment, Named};
use crate::runs::{self, Threads};
use crate::size::Size;
use job::Job;
use plan::{Leaves, Plan};
use step::{Choice, Order};

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  sudo tablewright map-mem                     this computer's own memory map
  tablewright map-mem --ram 512G --pages-only  as a kernel with rodata=full maps 512 GiB
  tablewright map-mem --iomem server.txt --format arm64 --granule 64K --json
  tablewright map-mem --machine ampere-altra-vm-64g
  tablewright map-mem --machine mine.toml --steps lazy-unmap,no-cont-remap")]
pub struct Arguments {
    /// A memory map in the format of /proc/iomem, or a kernel's log with that of its firmware
    /// (BIOS-e820 or efi=debug), or the source of a device tree; if neither this nor --ram is
    /// given, this computer's own, or as much RAM as the machine has
    #[arg(long, value_name = "FILE", conflicts_with = "ram")]
    iomem: Option<PathBuf>,
    /// One range of RAM of this size, from address 0
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    ram: Option<Size>,
    /// The architecture whose page tables are built [default: this computer's]
    #[arg(long, value_enum)]
    format: Option<Architecture>,
    /// The smallest page; x86-64 and riscv64 have 4K only [default: 4K]
    #[arg(long, value_enum)]
    granule: Option<Granule>,
    /// Bits in a virtual address: 48; or 52 on arm64, 57 on x86-64, 39 or 57 on riscv64
    /// [default: 48]
    #[arg(long, value_name = "BITS")]
    address_bits: Option<u32>,
    /// Map with pages only, without huge leaves and contiguous hints, as a kernel with rodata=full
    /// does; the machine always does
    #[arg(long)]
    pages_only: bool,
    /// This computer, or the machine, also if --machine says which
    #[arg(
        long,
        value_enum,
        default_value = "native",
        default_value_if("machine", ArgPredicate::IsPresent, "machine")
    )]
    on: On,
    /// How often to measure; figures are medians [default: 11]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: Option<u32>,
    /// The profile of a machine, by name or as a file; with --on machine
    #[arg(long, value_name = "PROFILE", value_parser = Named, hide_possible_values = true)]
    machine: Option<String>,
    /// With --on machine: one step of those published, with all before it, or another way [default:
    /// all]
    #[arg(long, value_enum, conflicts_with = "steps")]
    step: Option<Choice>,
    /// With --on machine: steps in an order of your own, separated by commas, each with those
    /// before it
    #[arg(long, value_name = "STEPS")]
    steps: Option<Order>,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON, with every sample
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum On {
    /// The memory and the processor of this computer
    Native,
    /// The software machine, in virtual time
    Machine,
}

pub fn run(arguments: &Arguments) -> Result<(), Error> {
    match arguments.on {
        On::Native => arguments.run_native(),
        On::Machine => arguments.run_machine(),
    }
}

impl Arguments {
    fn run_native(&self) -> Result<(), Error> {
        Error::refuse(
            &[
                (self.machine.is_some(), "--machine"),
                (self.step.is_some(), "--step"),
                (self.steps.is_some(), "--steps"),
                (self.threads.threads.is_some(), "--threads"),
            ],
            " goes with --on machine",
        )?;
        let format = Format::new(
            self.format.unwrap_or(Architecture::HOST),
            self.granule.unwrap_or(Granule::K4),
            self.address_bits.unwrap_or(48),
        )?;
        let read = input::read(self.iomem.as_deref(), self.ram, format)?;
        let leaves = if self.pages_only { Leaves::Pages } else { Leaves::Largest };
        native::run(read, format, leaves, self.rounds.unwrap_or(11), self.json)
    }

    fn run_machine(&self) -> Result<(), Error> {
        Error::refuse(
            &[
                (self.format.is_some(), "--format"),
                (self.granule.is_some(), "--granule"),
                (self.address_bits.is_some(), "--address-bits"),
                (self.rounds.is_some(), "--rounds"),
            ],
            " goes with --on native: a profile says what its machine has, and its time does not \
             vary",
        )?;
        let Some(name) = &self.machine else {
            let names: Vec<_> = Profile::built_in().collect();
            return Err(Error::Usage(format!(
                "--on machine needs --machine with the path of a profile, or one of {}",
                names.join(", ")
            )));
        };
        let (profile, left_out) = Experiment::MapMem.load(name)?;
        let format = job::format_of(&profile)?;
        let own = profile.system.ram_bytes();
        let (source, plan) = match self.iomem.is_none() && self.ram.is_none() {
            true => (format!("the RAM of {}", profile.name), job::plan_of(&profile, own)?),
            false => {
                let (source, map) = input::read(self.iomem.as_deref(), self.ram, format)?;
                let plan = Plan::new(&map, format, Leaves::Pages);
                let plan = plan.map_err(|error| Error::input(&source, error))?;
                (source, plan)
            }
        };
        let steps = match &self.steps {
            Some(order) => order.steps(),
            None => self.step.unwrap_or(Choice::All).steps(),
        };
        // A figure of other memory is none of this.
        let is_own = self.iomem.is_none() && plan.bytes() == own;
        let software = runs::software::<Job>(self.threads);
        let rows = simulate::rows(&profile, &steps, &plan, is_own, &software)?;
        let entries = plan.bytes() / format.page_bytes();
        let report = Report {
            experiment: "map-mem",
            parameters: json!({
                "source": source,
                "on": "machine",
                "machine": profile.name,
                "core": profile.system.core,
                "format": format.architecture(),
                "granule": format.granule(),
                "address_bits": format.address_bits(),
                "virtual_base": format!("{:#x}", format.linear_base()),
                "pages_only": true,
                "ram_bytes": plan.bytes(),
                "trimmed_bytes": plan.trimmed,
                "ranges": plan.spans.len(),
                "entries": entries,
                "step": self.step,
                "steps": self.steps.as_ref().map(Order::to_string),
            }),
            rows,
            warnings: left_out.into_iter().collect(),
        };
        report.print(self.json, |report| {
            let head = format!(
                "{}mapped at {:#x} on {} ({}):\n{}, {} pages only\n{}\n\n",
                plan.head(&source, &[]),
                format.linear_base(),
                profile.name,
                profile.system.core,
                format.architecture().name(),
                format.granule().name(),
                report::counted(entries, "entry", "entries"),
            );
            report::title(&head) + &simulate::text(&report.rows)
        })
    }
}
