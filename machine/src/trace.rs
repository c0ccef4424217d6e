//! The trace: every step of a run, one line each, in a format that other checkers can read.
//!
//! # The format
//!
//! UTF-8 text. The first line is `tablewright-trace 1`. Lines that start with `#` are remarks.
//! Every other line is one step, in the order in which it took effect:
//!
//! ```text
//! TIME CPU KIND KEY=VALUE ... @FILE:LINE
//! ```
//!
//! `TIME` is virtual time in picoseconds, `CPU` a number from 0; `KIND` and its keys are those
//! below; numbers are in hexadecimal with `0x` except levels, which count from the pages up (0 for
//! pages). The place in the source, `@FILE:LINE`, is that of the operation's caller, where it is
//! known.
//!
//! | kind | keys | |
//! |---|---|---|
//! | `load` | `pa`, `value` | software reads an entry |
//! | `store`, `release`, `exchange` | `pa`, `value`, `before` | a store; `before` was seen |
//! | `visible` | `pa`, `value` | a store leaves the buffer of the CPU, and all see it |
//! | `walk` | `va`, `pa`, `value` | the CPU's table walker reads a descriptor, asked or not (1.) |
//! | `publish` | | stores before it are visible to walkers (arm64: DSB) |
//! | `synchronise` | | context synchronisation (arm64: ISB) |
//! | `root` | `pa`, `id`, `half` | the CPU loads a root, under an identifier (2.) |
//! | `invalidate` | `id`, `first`, `last`, `level`, `leaves`, `broadcast` | one is issued (3.) |
//! | `complete` | | invalidations issued before it by this CPU are complete |
//! | `access` | `va`, `for`, `pa` or `fault` | an access by a program |
//! | `take`, `give` | `pa` | a frame is allocated, freed |
//! | `clean`, `refetch` | `pa` | a page is cleaned to the PoC; the instruction cache forgets it |
//! | `violation` | `rule` | a rule is broken; the rest of the line says how |
//!
//! 1. Of stage 2, `va` is the address that the guest takes for physical; of the guest's tables, its
//!    virtual one.
//! 2. `half` is `lower`, `upper` or `both`; `pa` and `id` are `*` if it has none any more. With
//!    `stage=1`, the guest on the CPU loads a root of its own tables.
//! 3. `*` stands for any. There is `stride`, if only addresses so far apart are named; `global`, 0
//!    or 1, if global translations stay or go whatever `id` says; `tables=*` if all that is
//!    remembered of tables goes. Where guests have a stage 1, there are `stage`, 2 for what was
//!    found of stage 2 alone, 1 for what stage 1 had a part in, and `asid`.
//!
//! 1. Of stage 2, `va` is the address that the guest takes for physical; of the guest's tables, its
//!    virtual one.
//! 2. `half` is `lower`, `upper` or `both`; `pa` and `id` are `*` if it has none any more. With
//!    `stage=1`, the guest on the CPU loads a root of its own tables.
//! 3. `*` stands for any. There is `stride`, if only addresses so far apart are named; `global`, 0
//!    or 1, if global translations stay or go whatever `id` says; `tables=*` if all that is
//!    remembered of tables goes. Where guests have a stage 1, there are `stage`, 2 for what was
//!    found of stage 2 alone, 1 for what stage 1 had a part in, and `asid`.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::Location;

use crate::rules::Rule;
use crate::time::Time;
use crate::tlb::{Globals, Stages, Tlbi};

/// One step. See the [format](crate::trace).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are the keys of the table above.
pub enum Event {
    /// Software reads an entry.
    Load { pa: u64, value: u64 },
    /// Software writes an entry.
    Store { pa: u64, value: u64, before: u64, how: &'static str },
    /// A store leaves its buffer.
    Visible { pa: u64, value: u64 },
    /// A table walker reads a descriptor.
    Walk { va: u64, pa: u64, value: u64 },
    /// A barrier after stores.
    Publish,
    /// A context synchronisation event.
    Synchronise,
    /// A root is loaded, or none.
    Root { root: Option<(u64, u16)>, half: &'static str, guest: bool },
    /// An invalidation is issued.
    Invalidate { tlbi: Tlbi },
    /// Invalidations are complete.
    Complete,
    /// An access by a program.
    Access { va: u64, want: &'static str, result: Result<u64, String> },
    /// A frame is allocated.
    Take { pa: u64 },
    /// A frame is freed.
    Give { pa: u64 },
    /// A page is cleaned to the point of coherency.
    Clean { pa: u64 },
    /// The instruction cache forgets a page.
    Refetch { pa: u64 },
    /// A rule is broken.
    Violation { rule: Rule, what: String },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load { pa, value } => write!(f, "load pa={pa:#x} value={value:#x}"),
            Self::Store { pa, value, before, how } => {
                write!(f, "{how} pa={pa:#x} value={value:#x} before={before:#x}")
            }
            Self::Visible { pa, value } => write!(f, "visible pa={pa:#x} value={value:#x}"),
            Self::Walk { va, pa, value } => {
                write!(f, "walk va={va:#x} pa={pa:#x} value={value:#x}")
            }
            Self::Publish => f.write_str("publish"),
            Self::Synchronise => f.write_str("synchronise"),
            Self::Root { root, half, guest } => {
                match root {
                    Some((pa, id)) => write!(f, "root pa={pa:#x} id={id:#x} half={half}")?,
                    None => write!(f, "root pa=* id=* half={half}")?,
                }
                f.write_str(if *guest { " stage=1" } else { "" })
            }
            Self::Invalidate { tlbi } => {
                f.write_str("invalidate")?;
                match tlbi.id {
                    Some(id) => write!(f, " id={id:#x}")?,
                    None => f.write_str(" id=*")?,
                }
                if tlbi.stages != Stages::Both {
                    write!(f, " stage={}", 1 + u8::from(tlbi.stages == Stages::Second))?;
                }
                if let Some(asid) = tlbi.asid {
                    write!(f, " asid={asid:#x}")?;
                }
                match tlbi.range {
                    Some((first, last)) => write!(f, " first={first:#x} last={last:#x}")?,
                    None => f.write_str(" first=* last=*")?,
                }
                if let Some(stride) = tlbi.stride {
                    write!(f, " stride={:#x}", 1u64 << stride)?;
                }
                match tlbi.globals {
                    Globals::ByAddress => {}
                    Globals::Spared => f.write_str(" global=0")?,
                    Globals::Included => f.write_str(" global=1")?,
                }
                if tlbi.all_tables {
                    f.write_str(" tables=*")?;
                }
                match tlbi.depth {
                    Some(depth) => write!(f, " level={depth}")?,
                    None => f.write_str(" level=*")?,
                }
                write!(
                    f,
                    " leaves={} broadcast={}",
                    u8::from(tlbi.leaves_only),
                    u8::from(tlbi.broadcast)
                )
            }
            Self::Complete => f.write_str("complete"),
            Self::Access { va, want, result } => match result {
                Ok(pa) => write!(f, "access va={va:#x} for={want} pa={pa:#x}"),
                Err(fault) => write!(f, "access va={va:#x} for={want} fault={fault}"),
            },
            Self::Take { pa } => write!(f, "take pa={pa:#x}"),
            Self::Give { pa } => write!(f, "give pa={pa:#x}"),
            Self::Clean { pa } => write!(f, "clean pa={pa:#x}"),
            Self::Refetch { pa } => write!(f, "refetch pa={pa:#x}"),
            Self::Violation { rule, what } => {
                write!(f, "violation rule={} {what}", rule.to_string().replace(' ', "-"))
            }
        }
    }
}

/// The receiver of a trace: called with each line, without its end.
pub type Sink = Box<dyn FnMut(&str)>;

/// Writes the trace, if one is wanted.
#[derive(Default)]
pub(crate) struct Tracer {
    on: Cell<bool>,
    sink: RefCell<Option<Sink>>,
    /// The caller of the operation that is under way.
    place: Cell<Option<&'static Location<'static>>>,
}

impl Tracer {
    #[inline(always)]
    pub fn is_on(&self) -> bool {
        self.on.get()
    }

    pub fn start(&self, mut sink: Sink) {
        sink("tablewright-trace 1");
        *self.sink.borrow_mut() = Some(sink);
        self.on.set(true);
    }

    /// The operation that follows was called from here.
    #[inline(always)]
    pub fn set_place(&self, place: &'static Location<'static>) {
        if self.on.get() {
            self.place.set(Some(place));
        }
    }

    pub fn emit(&self, cpu: usize, time: Time, event: impl FnOnce() -> Event) {
        if !self.on.get() {
            return;
        }
        let mut line = format!("{} {cpu} {}", time.as_ps(), event());
        if let Some(place) = self.place.get() {
            line += &format!(" @{}:{}", place.file(), place.line());
        }
        if let Some(sink) = self.sink.borrow_mut().as_mut() {
            sink(&line);
        }
    }
}
