//! A software machine in virtual time: many simulated CPUs on one thread of the host, the same
//! answer on every run.
//!
//! A program for this machine is ordinary Rust code. It runs on every simulated CPU, each with a
//! stack and a clock of its own, and says what it does to time: [`spend`](Cpu::spend) for what is
//! private to the CPU, [`order`](Cpu::order) before every access to what is shared.
//!
//! ```
//! use std::cell::RefCell;
//! use tablewright_machine::{Config, Scheduler, Time};
//!
//! let log = RefCell::new(Vec::new());
//! let scheduler = Scheduler::new(Config::new(3));
//! let outcome = scheduler.run(|cpu| {
//!     for step in 0..2 {
//!         cpu.spend(Time::ns(10) * (cpu.id() as u64 + 1));
//!         cpu.order();
//!         log.borrow_mut().push((cpu.now(), cpu.id(), step));
//!     }
//! })?;
//!
//! let ns = Time::ns;
//! assert_eq!(
//!     log.into_inner(),
//!     [
//!         (ns(10), 0, 0),
//!         (ns(20), 0, 1),
//!         (ns(20), 1, 0),
//!         (ns(30), 2, 0),
//!         (ns(40), 1, 1),
//!         (ns(60), 2, 1)
//!     ],
//! );
//! assert_eq!(outcome.end, ns(60));
//! # Ok::<(), tablewright_machine::RunError>(())
//! ```
//!
//! # The invariant
//!
//! **Every access to shared state is done in the order of (virtual time, CPU), exactly.** A CPU
//! that is not first waits until it is; then no other can come before it any more, because clocks
//! only go forward.
//!
//! It is tempting to order only where CPUs synchronise, at locks and barriers, and to let each run
//! freely in between. That is deterministic as well, and wrong. Whatever is shared is a queue: a
//! cache line, a bus, a port. A CPU that runs ahead takes its place in the queue at a time that is
//! still in the future of the others; they come later in the host's order but earlier in virtual
//! time, find the queue busy until then, and wait for something that has not happened yet. The
//! error is not small: 4 to 13 times on the loads that this machine is for.
//!
//! What makes the exact order affordable is that it does not ask for a switch at every access. A
//! CPU whose key is below the smallest key of all others may **run on**: each of the others has
//! promised, by that key, to touch nothing shared before. The promise is kept because a waiting CPU
//! does nothing at all, and a parked one is woken only by a CPU that runs, not before its own time.
//! So the test in front of an access is one compare, of the running CPU's key with the first of a
//! [tree](crate#how-it-works).
//!
//! # How it works
//!
//! A simulated CPU is a coroutine with a stack. The keys of those that wait for their turn are in a
//! tournament tree; the loop takes the first out and resumes it. The order has no ties, no hash
//! tables, no addresses and no time of the host in it: a run is a pure function of the program, the
//! [`Config`] and, in that, the seed of its [`Perturbation`].
//!
//! [`Resource`], [`Line`] and [`Lock`] are queues in virtual time: for a bus or a port, for a cache
//! line that CPUs take from each other, for a lock that is handed over.
//!
//! State that CPUs share lives outside of the run and is borrowed by the program, in a
//! [`Cell`](std::cell::Cell) or [`RefCell`](std::cell::RefCell): there is one thread, so nothing
//! has to be `Send`. A borrow of a `RefCell` must end before the next operation on the CPU, which
//! may resume another that borrows it.
//!
//! # Memory management
//!
//! A [`Machine`] puts a memory management unit into each CPU: a store buffer, a table walker that
//! decodes descriptors by itself, a TLB, a walk cache. The engine runs on it unchanged, on a
//! [`Mapper`] for its platform, and programs make accesses through the tables that it builds. With
//! a seed, the hardware does at any time whatever the architecture lets it do: it walks unasked,
//! remembers, forgets, keeps stores back, translates ahead. What a program owes to that is checked
//! always, and a [`Violation`] says which [`Rule`] was broken, where, when, by which CPU, and the
//! seed that does it again. A [trace] has every step.
//!
//! What operations cost ([`Costs`]) and which rules hold ([`Architecture`]) is a [`Profile`]: a
//! file.

mod architecture;
mod coroutine;
mod costs;
mod dice;
mod hardware;
mod instructions;
mod lines;
pub mod litmus;
mod lock;
mod machine;
mod memory;
mod perturb;
mod profile;
mod resource;
mod rules;
mod sched;
pub mod splitmix;
#[cfg(not(miri))]
mod stack;
mod time;
mod tlb;
pub mod trace;
mod tree;

pub use architecture::{Architecture, Granule, Ordering, Regime};
pub use costs::Costs;
pub use hardware::{Cause, CpuState, Fault, Request, Want};
pub use lock::{Held, Lock, LockCosts};
pub use machine::{
    Counts, Machine, MachineHeld, MachineIdentity, MachineLock, MachineSlots, MachineWalk, Mapper,
    Setup,
};
pub use memory::Memory;
pub use perturb::Perturbation;
pub use profile::{
    Cost, Kind, Profile, ProfileError, Provenance, RowSelector, Source, System, Unexplained,
    UnknownCost,
};
pub use resource::{Line, LineCosts, Resource, Usage};
pub use rules::{Rule, Violation};
pub use sched::{Config, Cpu, Outcome, RunError, Scheduler};
pub use time::{MAX_CPUS, Time};
pub use tlb::{Globals, Stages, Tlbi};
