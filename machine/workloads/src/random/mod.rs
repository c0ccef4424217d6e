//! Random programs for the machine: what the tests of planted bugs and the example `seeds` run.
//!
//! A [`Workload`] and a seed are a program, a machine to run it on and everything that its hardware
//! does unasked. What another CPU may see is checked against what the editing CPU has announced
//! (see `oracle.rs`); the rules of the architecture are checked by the machine itself.
//!
//! The programs are right. A [`Bug`] makes one of them wrong in one place.

#[macro_use]
mod guest;
mod guests;
mod identifiers;
mod identities;
mod later;
mod log;
pub mod oracle;
pub mod raw;
mod shootdown;
mod windows;

use std::cell::Cell;
use std::fmt;

use tablewright::{AddressSpace, Format, Half, Platform, Va};
use tablewright_machine::trace::Sink;
use tablewright_machine::{
    Architecture, Counts, Cpu, Granule, Machine, Mapper, Memory, Outcome, Regime, RunError, Time,
    Tlbi, Violation,
};

use crate::dice::Dice;
use crate::hardware::{MEMORY, architecture, keep, memory, setup, small};
use crate::platform::Control;

pub use crate::Bug;
pub use later::Later;

/// Programs that use the engine. The number of each is the stream of its dice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// The linear map, built through a window, and edited while it is used.
    Windows = 1,
    /// Spaces come and go, and identifiers with them.
    Identifiers = 2,
    /// A guest with tables of its own, while its host edits stage 2.
    Guests = 5,
    /// A guest's memory: slots, faults and what a host does with its pages.
    Guest = 6,
    /// A guest's writes are logged, and copied.
    Log = 7,
    /// Remote flushes, by every messenger.
    Shootdown = 8,
    /// Spaces that are invalidated by identity, with identifiers that roll over.
    Identities = 10,
}

impl Workload {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Windows,
        Self::Identifiers,
        Self::Guests,
        Self::Guest,
        Self::Log,
        Self::Shootdown,
        Self::Identities,
    ];

    /// Returns the name that a command line takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Windows => "windows",
            Self::Identifiers => "identifiers",
            Self::Guests => "guests",
            Self::Guest => "guest",
            Self::Log => "log",
            Self::Shootdown => "shootdown",
            Self::Identities => "identities",
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The result of a run. Two runs of one seed are equal in all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The rules that were broken, in order.
    pub violations: Vec<Violation>,
    /// How the part with faults ended.
    pub outcome: Result<Outcome, RunError>,
    /// Counts of what was done.
    pub counts: Counts,
    /// A digest of all memory when the part with faults was over, and of it when all was done. Of a
    /// sequence none is made: it takes longer than the run.
    pub digests: [u64; 2],
}

impl Run {
    /// Whether there is nothing to complain about.
    pub fn is_good(&self) -> bool {
        self.violations.is_empty() && self.outcome.is_ok()
    }
}

/// The formats that are tried. Without the feature `every-format` those with others of the same
/// kind stand for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    K4,
    #[cfg(feature = "every-format")]
    K4Wide,
    K16,
    #[cfg(feature = "every-format")]
    K64,
    X4,
    #[cfg(feature = "every-format")]
    X5,
}

/// Evaluates `$body` with `$format` bound to the format of `$kind`; it is compiled for each.
macro_rules! with_format {
    ($kind:expr, $format:ident => $body:expr) => {{
        match $kind {
            Kind::K4 => {
                type $format = tablewright::format::Arm64K4;
                $body
            }
            #[cfg(feature = "every-format")]
            Kind::K4Wide => {
                type $format = tablewright::format::Arm64K4Wide;
                $body
            }
            Kind::K16 => {
                type $format = tablewright::format::Arm64K16;
                $body
            }
            #[cfg(feature = "every-format")]
            Kind::K64 => {
                type $format = tablewright::format::Arm64K64;
                $body
            }
            Kind::X4 => {
                type $format = tablewright::format::X86_64<4>;
                $body
            }
            #[cfg(feature = "every-format")]
            Kind::X5 => {
                type $format = tablewright::format::X86_64<5>;
                $body
            }
        }
    }};
}

const FRAMES: usize = 120;
pub const MOST_CPUS: u64 = 4;

impl Kind {
    fn of(dice: &Dice) -> Self {
        // Tables of 64 KiB take the host ten times as long.
        match dice.below(16) {
            #[cfg(feature = "every-format")]
            5..=6 => Self::K4Wide,
            #[cfg(feature = "every-format")]
            10 => Self::K64,
            #[cfg(feature = "every-format")]
            15.. => Self::X5,
            0..=6 => Self::K4,
            7..=10 => Self::K16,
            _ => Self::X4,
        }
    }

    fn regime(self) -> Regime {
        let arm = |granule, wide| Regime::Arm64Stage1 { granule, wide };
        match self {
            Self::K4 => arm(Granule::K4, false),
            #[cfg(feature = "every-format")]
            Self::K4Wide => arm(Granule::K4, true),
            Self::K16 => arm(Granule::K16, false),
            #[cfg(feature = "every-format")]
            Self::K64 => arm(Granule::K64, false),
            Self::X4 => Regime::X86_64 { levels: 4 },
            #[cfg(feature = "every-format")]
            Self::X5 => Regime::X86_64 { levels: 5 },
        }
    }

    pub fn is_x86(self) -> bool {
        matches!(self.regime(), Regime::X86_64 { .. })
    }

    /// Its hardware. No tables of these are EPT.
    fn architecture(self, dice: &Dice) -> Architecture {
        small(architecture(self.regime(), dice, |_| true), dice)
    }

    /// The half to use, and the first address of it.
    pub fn half(self, dice: &Dice) -> (Half, u64) {
        let bits = self.regime().input_bits();
        match (self.is_x86(), dice.once_in(3)) {
            (_, false) => (Half::Lower, 0),
            (false, true) => (Half::Upper, u64::MAX << bits),
            (true, true) => (Half::Lower, u64::MAX << (bits - 1)),
        }
    }
}

/// A machine with these rules.
fn machine(
    architecture: Architecture,
    memory: Memory,
    dice: &Dice,
    seed: u64,
    cpus: usize,
) -> Machine {
    let mut setup = setup(architecture, memory, seed, cpus);
    setup.costs.bus = Time::ns(5);
    setup.costs.transfer = Time::ns(60);
    setup.costs.interrupt = Time::ns(500);
    setup.costs.exit = Time::ns(300);
    setup.scheduler.max_accesses = 8_000_000;
    setup.scheduler.stack_size = 128 << 10;
    setup.refuse_once_in = dice.pick(&[0, 4, 16]);
    Machine::new(setup)
}

/// Runs a workload, with a bug in it or without, and with every step written to `trace` if there is
/// one.
pub fn run(workload: Workload, seed: u64, bug: Option<Bug>, trace: Option<Sink>) -> Run {
    let dice = Dice::of(seed, workload as u64);
    if matches!(workload, Workload::Guest | Workload::Log) {
        let (kind, architecture, memory, mut cpus) = guest::setup(&dice);
        if workload == Workload::Log {
            cpus = cpus.min(log::MOST_CPUS);
        }
        let machine = machine(architecture, memory, &dice, seed, cpus);
        return finish(machine, trace, |machine, between| match workload {
            Workload::Log => log::run(machine, bug, &dice, kind, cpus, between),
            _ => guest::run(machine, &dice, kind, between),
        });
    }
    let kind = Kind::of(&dice);
    let cpus = match workload {
        Workload::Guests => 2 + dice.below(MOST_CPUS - 1),
        Workload::Shootdown if dice.once_in(16) => 2 + dice.below(shootdown::MOST_CPUS - 1),
        // Eight identifiers are enough, and soon given out.
        Workload::Identities => 2 + dice.below(2),
        Workload::Shootdown => 2 + dice.below(MOST_CPUS - 1),
        _ => 1 + dice.below(MOST_CPUS),
    };
    let host = (workload == Workload::Guests).then(|| guests::Host::of(&dice));
    let architecture = match host {
        Some(host) => host.architecture(&dice),
        None => kind.architecture(&dice),
    };
    let memory = memory(FRAMES, architecture.regime.page_shift());
    let machine = machine(architecture, memory, &dice, seed, cpus as usize);
    let control = Control::new(bug);
    finish(machine, trace, |machine, between| {
        if let Some(host) = host {
            return host.run(machine, &control, &dice, between);
        }
        with_format!(kind, F => match workload {
            Workload::Windows => windows::run::<F>(machine, &control, &dice, kind, between),
            Workload::Identifiers => identifiers::run::<F>(machine, &control, &dice, kind, between),
            Workload::Shootdown => shootdown::run::<F>(machine, &dice, cpus as usize, between),
            Workload::Identities => {
                identities::run::<F>(machine, &control, &dice, cpus as usize, between)
            }
            Workload::Guests | Workload::Guest | Workload::Log => {
                unreachable!("a guest has a host")
            }
        })
    })
}

/// A program that writes tables by hand.
pub trait ByHand {
    /// Runs it. `between` is told the digest of memory when the part with faults is over.
    ///
    /// # Errors
    /// Whatever ends the part with faults early.
    fn run<F: Format<Input = Va>>(
        machine: &Machine,
        control: &Control,
        dice: &Dice,
        kind: Kind,
        cpus: usize,
        between: &mut dyn FnMut(u64),
    ) -> Result<Outcome, RunError>;
}

/// Runs a program by hand, with a bug in it or without, on so many CPUs or more. `stream` is that
/// of its dice.
pub fn run_by_hand<P: ByHand>(stream: u64, least_cpus: u64, seed: u64, bug: Option<Bug>) -> Run {
    let dice = Dice::of(seed, stream);
    let kind = Kind::of(&dice);
    let cpus = (least_cpus + dice.below(MOST_CPUS + 1 - least_cpus)) as usize;
    let architecture = kind.architecture(&dice);
    let memory = memory(FRAMES, architecture.regime.page_shift());
    let machine = machine(architecture, memory, &dice, seed, cpus);
    let control = Control::new(bug);
    finish(machine, None, |machine, between| {
        with_format!(kind,
            F => P::run::<F>(machine, &control, &dice, kind, cpus, between))
    })
}

/// Runs a program on a machine, which is taken apart.
fn finish(
    machine: Machine,
    trace: Option<Sink>,
    program: impl FnOnce(&Machine, &mut dyn FnMut(u64)) -> Result<Outcome, RunError>,
) -> Run {
    if let Some(sink) = trace {
        machine.trace(sink);
    }
    let mut digests = [0; 2];
    let outcome = program(&machine, &mut |digest| digests[0] = digest);
    let violations = machine.finish();
    digests[1] = machine.digest();
    let counts = machine.counts();
    keep(machine.into_memory());
    Run { violations, outcome, counts, digests }
}

// ---- What programs have in common ----

/// Acts as the other CPUs while one edits: a step, again and again, until it is done or they have
/// done enough.
pub fn until_done(cpu: Cpu<'_>, done: &Cell<bool>, seed: u64, step: impl Fn(&Dice)) {
    let dice = Dice::of(seed, cpu.id() as u64);
    for _ in 0..60 {
        if done.get() {
            return;
        }
        cpu.spend(dice.time());
        step(&dice);
    }
}

/// Orders announcements from now on after the stores before them. On x86 an edit of what was not
/// mapped leaves them in the store buffer, and a program that tells others of it orders them: here,
/// by a lock.
pub fn announce(machine: &Machine) {
    if machine.architecture().is_x86() {
        drop(machine.new_lock().acquire());
    }
}

/// Takes a space out of use that maps nothing any more, and gives its tables back.
pub fn destroy<F: Format, P: Platform + Clone>(
    machine: &Machine,
    mut space: AddressSpace<F, P>,
    mapper: &Mapper<'_>,
) {
    mapper.detach();
    machine.dsb_stores();
    machine.tlbi(Tlbi::ALL);
    machine.dsb();
    // SAFETY: no processor has the root loaded, and everything is forgotten.
    unsafe { space.make_dead() };
    let mut left = 0;
    let destroyed = space.destroy(|_| left += 1);
    machine.check(destroyed.is_ok() && left == 0, || format!("{left} leaves are left"));
    check_no_frames(machine);
}

/// In the end every frame that was taken has been given back.
pub fn check_no_frames(machine: &Machine) {
    let used = machine.memory().used();
    machine.check(used == 0, || format!("{used} frames are left"));
}
