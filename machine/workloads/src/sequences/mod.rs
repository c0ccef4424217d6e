//! Random sequences of calls of the engine's safe functions, on the machine: run, judged, and made
//! short.
//!
//! A sequence is a list of operations, each on one of two CPUs, with a number that its arguments
//! come from. What may be wrong with them is part of it: values are kept and used late, dropped and
//! forgotten, addresses are of any kind, tables run out, visitors unwind, and interrupts do
//! something else in the midst of it. What must hold all the same is what the engine promises of
//! its safe functions: no rule of the machine is broken, no page comes out twice or early, no table
//! is lost but by what was forgotten, and a space says what was made of it.

mod edits;
mod guest;
mod kernel;
mod logs;
mod model;
pub mod operations;
mod world;

use std::cell::RefCell;
use std::panic::PanicHookInfo;

use tablewright::Format;
use tablewright::format::{FORCED_WRITE_BACK, PAT, SHADOW_STACKS};
use tablewright_machine::trace::Sink;
use tablewright_machine::{Architecture, Granule, Machine, Outcome, Regime, RunError};

use guest::Vm;
use kernel::Halves;
use operations::{Kind, OPERATIONS, Operation};
use world::{Guests, NoGuests, World};

use crate::dice::Dice;
use crate::hardware::{architecture, keep, memory, perhaps_nested, setup, small, stage1, stage2};
use crate::platform::Control;
use crate::random::Run;

pub use crate::Bug;

/// The formats, and the machine that has the tables of each. Without the feature `every-format`
/// another stands for one that has one.
macro_rules! formats {
    ($($name:ident $weight:literal $input:ident $format:ty = $regime:expr $(,
        or $other:ident)?;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Tables {
            $($name,)*
        }

        impl Tables {
            const ALL: &'static [(Self, u64)] = &[$((formats!(@drawn $name $($other)?),
                $weight),)*];

            fn regime(self) -> Regime {
                match self {
                    $(Self::$name => $regime,)*
                }
            }

            /// It translates virtual addresses, and not those of guests.
            fn is_of_programs(self) -> bool {
                match self {
                    $(Self::$name => formats!(@is $input),)*
                }
            }

            fn run(self, machine: &Machine, control: &Control,
                sequence: &Sequence) -> Result<Outcome, RunError> {
                match self {
                    $(Self::$name => formats!(@built [$($other)?] $input $format, machine, control,
                        sequence),)*
                }
            }
        }
    };
    (@drawn $name:ident) => { Self::$name };
    (@drawn $name:ident $other:ident) => {
        if cfg!(feature = "every-format") { Self::$name } else { Self::$other }
    };
    (@built [] $input:ident $format:ty, $machine:ident, $control:ident, $sequence:ident) => {
        formats!(@run $input $format, $machine, $control, $sequence)
    };
    (@built [$other:ident] $input:ident $format:ty, $machine:ident, $control:ident,
        $sequence:ident) => {{
        #[cfg(feature = "every-format")]
        let ran = formats!(@run $input $format, $machine, $control, $sequence);
        #[cfg(not(feature = "every-format"))]
        let ran = Self::$other.run($machine, $control, $sequence);
        ran
    }};
    (@is Va) => { true };
    (@is Both) => { true };
    (@is Ipa) => { false };
    (@run Va $format:ty, $machine:ident, $control:ident, $sequence:ident) => {
        run_with::<$format, NoGuests>($machine, $control, $sequence)
    };
    (@run Both $format:ty, $machine:ident, $control:ident, $sequence:ident) => {
        run_with::<$format, Halves>($machine, $control, $sequence)
    };
    (@run Ipa $format:ty, $machine:ident, $control:ident, $sequence:ident) => {
        run_with::<$format, Vm<'_, $format>>($machine, $control, $sequence)
    };
}

// Large tables take the host of the simulation many times as long.
formats! {
    K4 40 Va tablewright::format::Arm64K4 = stage1(Granule::K4, false);
    K4Wide 12 Va tablewright::format::Arm64<12, 52, true, { tablewright::format::MAIR },
        { tablewright::format::shared(51) }> = stage1(Granule::K4, true), or K4;
    K16 8 Va tablewright::format::Arm64K16 = stage1(Granule::K16, false);
    K16Wide 3 Va tablewright::format::Arm64K16Wide = stage1(Granule::K16, true), or K16;
    K64 1 Va tablewright::format::Arm64K64 = stage1(Granule::K64, false), or K16;
    K64Wide 1 Va tablewright::format::Arm64K64Wide = stage1(Granule::K64, true), or K16;
    X4 32 Both tablewright::format::X86_64<4, PAT, SHADOW_STACKS> = Regime::X86_64 { levels: 4 };
    X5 12 Both tablewright::format::X86_64<5, PAT,
        { tablewright::format::shared(51) }> = Regime::X86_64 { levels: 5 }, or X4;
    G4 32 Ipa tablewright::format::Stage2K4<40> = stage2(Granule::K4, 40, false, false);
    G4Forced 14 Ipa tablewright::format::Stage2K4<43,
        FORCED_WRITE_BACK> = stage2(Granule::K4, 43, false, true), or G4;
    G4Wide 8 Ipa tablewright::format::Stage2K4Wide<52> = stage2(Granule::K4, 52, true, false),
        or G4;
    G16 6 Ipa tablewright::format::Stage2K16<40,
        FORCED_WRITE_BACK> = stage2(Granule::K16, 40, false, true);
    G64 1 Ipa tablewright::format::Stage2K64<44> = stage2(Granule::K64, 44, false, false), or G16;
    Ept4 24 Ipa tablewright::format::Ept<4> = Regime::Ept { levels: 4, mode_based: false };
    Ept5 8 Ipa tablewright::format::Ept<5, true> = Regime::Ept { levels: 5, mode_based: true },
        or Ept4;
    Npt4 16 Ipa tablewright::format::Npt<4> = Regime::Npt { levels: 4 };
    Npt5 8 Ipa tablewright::format::Npt<5> = Regime::Npt { levels: 5 }, or Npt4;
    Sv39 24 Both tablewright::format::Sv39 = Regime::Riscv { levels: 3, guest: false };
    Sv48 6 Both tablewright::format::Sv48 = Regime::Riscv { levels: 4, guest: false }, or Sv39;
    Sv57 6 Both tablewright::format::Sv57 = Regime::Riscv { levels: 5, guest: false }, or Sv39;
    Sv39x4 16 Ipa tablewright::format::Sv39x4 = Regime::Riscv { levels: 3, guest: true };
    Sv48x4 4 Ipa tablewright::format::Sv48x4 = Regime::Riscv { levels: 4, guest: true },
        or Sv39x4;
    Sv57x4 4 Ipa tablewright::format::Sv57x4 = Regime::Riscv { levels: 5, guest: true },
        or Sv39x4;
}

/// Some kind of operation.
fn draw(dice: &Dice) -> Kind {
    dice.weighted(OPERATIONS.iter().map(|&(kind, weight, _)| (kind, weight)))
}

/// A sequence that is run.
#[derive(Clone, Debug)]
pub struct Sequence {
    seed: u64,
    tables: Tables,
    architecture: Architecture,
    /// In the order in which each CPU does its own.
    pub operations: Vec<Operation>,
}

/// Frames of each machine.
const FRAMES: usize = 320;
impl Sequence {
    /// That of a seed. What its upper bits change is only what hardware does unasked.
    pub fn new(seed: u64) -> Self {
        let program = seed & ((1 << 48) - 1);
        let dice = Dice::new(program.wrapping_mul(0xd134_2543_de82_ef95));
        // Every eighth is of RISC-V, so that the others are those that they were without it.
        let is_riscv = program.is_multiple_of(8);
        let of = |tables: Tables| matches!(tables.regime(), Regime::Riscv { .. });
        let all = Tables::ALL.iter().copied();
        let tables = dice.weighted(all.filter(|(tables, _)| of(*tables) == is_riscv));
        let architecture = architecture(tables.regime(), &dice, |dice| dice.once_in(2));
        let architecture = small(perhaps_nested(architecture, &dice), &dice);
        let count = 5 + dice.below(36);
        let translates_guests = !tables.is_of_programs();
        // What most of it is about: exclusive edits, shared ones, guests; or anything.
        let focus = dice.below(if translates_guests { 5 } else { 3 });
        let wanted = |kind: Kind| match focus {
            0 => !kind.is_shared() && !kind.is_of_guest(),
            1 => !kind.is_exclusive() && !kind.is_of_guest(),
            2 => translates_guests || !kind.is_of_guest(),
            _ => !kind.is_exclusive(),
        };
        // Two guests, to take one for the other.
        let two = focus > 2 && dice.once_in(3);
        let operation = |number: u64| {
            let drawn = || {
                let kinds = (0..4).map(|_| draw(&dice));
                kinds.reduce(|kind, other| if wanted(kind) { kind } else { other })
            };
            // Something has to be there before the rest makes sense.
            let kind = match (number, focus) {
                (0, _) => Kind::Create,
                (1, 0 | 1) => Kind::Create,
                (2, 1) | (1, 3..) => Kind::Share,
                (2, 3..) => Kind::MakeGuest,
                (3, 3..) if two => Kind::Create,
                (4, 3..) if two => Kind::Share,
                (5, 3..) if two => Kind::MakeGuest,
                (6..=7, 3..) if two => Kind::Insert,
                (3..=4, 3..) => Kind::Insert,
                _ => drawn().unwrap_or(Kind::Pause),
            };
            let cpu = match kind {
                _ if number < 8 && two => 0,
                _ if number < 5 && focus > 0 => 0,
                // Most spaces that one CPU edits are of CPU 0, and the other uses them.
                Kind::Create => usize::from(dice.once_in(4)),
                Kind::Access => usize::from(dice.below(4) > 0),
                kind if kind.is_exclusive() => usize::from(dice.once_in(5)),
                _ => dice.index(2),
            };
            let seed = dice.next();
            let kind = match kind {
                Kind::Map | Kind::Unmap | Kind::Protect if focus == 0 && seed.is_multiple_of(4) => {
                    Kind::PageByPage
                }
                kind => kind,
            };
            Operation { number: number as usize, cpu, kind, seed }
        };
        let mut operations: Vec<_> = (0..count).map(operation).collect();
        // Half of them have what the others seldom come to: see `edits::meetings`.
        if program.is_multiple_of(2) {
            let kinds: &[Kind] = match focus {
                0 | 2 => {
                    &[Kind::OneGather, Kind::OneGather, Kind::ForkOver, Kind::Move, Kind::Visit]
                }
                _ => &[Kind::Move, Kind::Visit],
            };
            operations.iter_mut().skip(2).for_each(|operation| Self::meet(operation, kinds));
        }
        // And a few of the others have what is moved.
        if program % 16 == 5 && matches!(focus, 0 | 2) {
            let kinds = &[Kind::Relocate, Kind::Relocate, Kind::OneGather];
            operations.iter_mut().skip(2).for_each(|operation| Self::meet(operation, kinds));
        }
        // A few others prune.
        if program % 16 == 11 && matches!(focus, 1..) {
            let kinds = &[Kind::Prune, Kind::Prune, Kind::SharedUnmap];
            operations.iter_mut().skip(5).for_each(|operation| Self::meet(operation, kinds));
        }
        Self { seed, tables, architecture, operations }
    }

    /// Some of the operations become others.
    fn meet(operation: &mut Operation, kinds: &[Kind]) {
        let dice = Dice::new(operation.seed ^ 0x5eed);
        if dice.once_in(3) {
            operation.kind = dice.pick(kinds);
            if operation.kind.is_exclusive() {
                operation.cpu = usize::from(dice.once_in(5));
            }
        }
    }

    /// Those of its operations that have one of these numbers.
    pub fn only(&mut self, numbers: &[usize]) {
        self.operations.retain(|it| numbers.contains(&it.number));
    }

    /// How it is run again.
    pub fn command(&self) -> String {
        let numbers = self.operations.iter().map(|it| it.number.to_string());
        let numbers: Vec<_> = numbers.collect();
        format!("--seed {} --only {}", self.seed, numbers.join(","))
    }

    /// Describes it, in a line.
    pub fn describe(&self) -> String {
        let Architecture { bbm, hardware_access, hardware_dirty, .. } = self.architecture;
        format!(
            "{:?}, break-before-make level {bbm}, hardware sets accessed: {hardware_access}, \
             dirty: {hardware_dirty}",
            self.tables
        )
    }

    /// The shortest part of it that still goes wrong in the same way, by taking operations out as
    /// long as it does.
    pub fn shorten(mut self, bug: Option<Bug>) -> (Self, Failure) {
        let mut failure = self.run(bug).expect_err("it goes wrong");
        // With other doings of the hardware, too, if these hide it.
        let attempt = |operations: Vec<Operation>, failure: &Failure| {
            (0..6u64).find_map(|turn| {
                let shorter = Self {
                    operations: operations.clone(),
                    seed: self.seed & ((1 << 48) - 1) | turn << 48,
                    ..self.clone()
                };
                let other = shorter.run(bug).err()?;
                (other.rule == failure.rule).then_some((shorter.seed, other))
            })
        };
        let mut operations = self.operations.clone();
        let mut seed = self.seed;
        let mut step = operations.len().div_ceil(2);
        loop {
            let (mut at, mut found) = (0, false);
            while at < operations.len() {
                let mut fewer = operations.clone();
                fewer.drain(at..operations.len().min(at + step));
                match attempt(fewer.clone(), &failure) {
                    Some((with, other)) => {
                        (operations, seed, failure, found) = (fewer, with, other, true);
                    }
                    None => at += step,
                }
            }
            if step == 1 && !found {
                break;
            }
            step = (step / 2).max(1);
        }
        self.operations = operations;
        self.seed = seed;
        (self, failure)
    }

    /// Runs it.
    ///
    /// # Errors
    /// What went wrong first.
    pub fn run(&self, bug: Option<Bug>) -> Result<(), Failure> {
        self.run_traced(bug, None)
    }

    /// Runs it, with every step written to `trace` if there is one.
    ///
    /// # Errors
    /// What went wrong first.
    pub fn run_traced(&self, bug: Option<Bug>, trace: Option<Sink>) -> Result<(), Failure> {
        let ran = self.observe(bug, trace);
        match (ran.violations.first(), ran.outcome) {
            (Some(violation), _) => {
                Err(Failure { rule: violation.rule.to_string(), what: violation.to_string() })
            }
            (None, Err(error)) => {
                let rule = match error {
                    RunError::Panic { .. } => "panic",
                    _ => "no end",
                };
                Err(Failure {
                    rule: rule.to_owned(),
                    what: format!("{rule}: {error}{}", last_panic()),
                })
            }
            (None, Ok(_)) => Ok(()),
        }
    }

    /// Runs it, and returns all that is known of the run.
    pub fn observe(&self, bug: Option<Bug>, trace: Option<Sink>) -> Run {
        let memory = memory(FRAMES, self.architecture.regime.page_shift());
        let mut setup = setup(self.architecture.clone(), memory, self.seed.max(1), 2);
        setup.scheduler.max_accesses = 20_000_000;
        setup.scheduler.stack_size = 96 << 10;
        let machine = Machine::new(setup);
        if let Some(sink) = trace {
            machine.trace(sink);
        }
        let control = Control::interrupted(bug);
        let outcome = self.tables.run(&machine, &control, self);
        let (violations, counts) = (machine.violations(), machine.counts());
        keep(machine.into_memory());
        Run { violations, outcome, counts, digests: [0; 2] }
    }
}

/// Why a sequence is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which rule was broken first, or what else it was.
    pub rule: String,
    /// In a line, which begins with that.
    pub what: String,
}

fn run_with<'m, F: Format, G: Guests<'m, F>>(
    machine: &Machine,
    control: &Control,
    sequence: &Sequence,
) -> Result<Outcome, RunError> {
    // SAFETY: both outlive what is made of them here: the world is dropped at the end of this
    // function, with all that borrows them, and nothing else gets hold of it.
    let (machine, control) = unsafe {
        let machine: &'m Machine = &*std::ptr::from_ref(machine);
        let control: &'m Control = &*std::ptr::from_ref(control);
        (machine, control)
    };
    let world = World::<'m, F, G>::new(machine, control, sequence.seed);
    /// # Safety
    /// 1. The pointer is to a world of these types.
    unsafe fn interrupt<'m, F: Format, G: Guests<'m, F>>(world: *const ()) {
        // SAFETY: by (1.).
        let world = unsafe { &*world.cast::<World<'m, F, G>>() };
        world.machine.handle(|| world.interrupt());
    }
    // SAFETY: the world lives until the handler is taken away below.
    unsafe {
        let world = std::ptr::from_ref(&world).cast();
        control.handle_by(Some((interrupt::<F, G>, world)));
    }
    let outcome = machine.run(|cpu| world.live(cpu, &sequence.operations));
    // SAFETY: there is none any more.
    unsafe { control.handle_by(None) };
    if outcome.is_ok() && machine.violations().is_empty() {
        machine.calm();
        if !control.is(Bug::LastGatherForgotten) {
            world.end();
        }
        machine.finish();
    }
    outcome
}

// ---- Panics ----

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Returns the place of this thread's last panic.
fn last_panic() -> String {
    let place = PANIC.with_borrow_mut(Option::take);
    place.map_or_else(String::new, |place| format!(" at {place}"))
}

/// Panics are said of sequences, and not as they come.
pub fn silence() {
    std::panic::set_hook(Box::new(|info: &PanicHookInfo<'_>| {
        let place = info.location().map(ToString::to_string);
        PANIC.with_borrow_mut(|panic| *panic = place);
    }));
}
