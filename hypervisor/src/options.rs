//! The command line.

use tablewright_hypervisor_common::host::Reason;
use tablewright_hypervisor_common::memory::Leaves;
use tablewright_hypervisor_common::options::Options as Common;

use crate::guests::start::Several;
use crate::machine::Omit;
use crate::plant;

/// A measurement, instead of a guest that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// The start of a log.
    Start,
    /// Flushes.
    Flush,
}

/// The options.
pub struct Options {
    /// Those that all hypervisors have.
    pub common: Common,
    /// A planted bug.
    pub omit: Option<Omit>,
    /// A measurement, without a guest that runs.
    pub measure: Option<Measure>,
    /// How many addresses of random tables are asked of the processor first.
    pub check: u64,
    /// How many pieces the guest's memory is in.
    pub pieces: usize,
    /// Several guests, if there is one of these.
    pub several: Several,
}

impl Options {
    /// Reads words of the form `NAME=VALUE`.
    ///
    /// # Errors
    /// The first that is not right.
    pub fn read(line: &str) -> Result<Self, Reason> {
        let mut options = Self {
            common: Common::new(Leaves::Pages),
            omit: None,
            measure: None,
            check: 0,
            pieces: 1,
            several: Several::default(),
        };
        for word in line.split_ascii_whitespace() {
            let (name, value) = word.split_once('=').ok_or("an option is NAME=VALUE")?;
            if options.common.read(name, value)? {
                continue;
            }
            let number = || value.parse().map_err(|_| "a number is asked for");
            let several = &mut options.several;
            match name {
                "check" => options.check = number()?,
                "omit" => {
                    let omit = Omit::named(value);
                    options.omit =
                        Some(omit.ok_or("omit is leaves, permissions, tables or everything")?);
                }
                "plant" if plant::plant(value) => {}
                "measure" if value == "start" => options.measure = Some(Measure::Start),
                "measure" if value == "flush" => options.measure = Some(Measure::Flush),
                "pieces" => options.pieces = number()? as usize,
                "kernels" => several.kernels = number()? as usize,
                "small" => several.small = number()? as usize,
                "memory" => several.memory = number()?,
                "vmid_bits" => several.bits = number()? as u32,
                "seconds" => several.seconds = number()?,
                _ => return Err("an option is not known"),
            }
        }
        Ok(options)
    }
}
