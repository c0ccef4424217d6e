//! The test on threads of this computer: the engine's edits in real time, with nothing below them.
//!
//! No processor walks these tables, so an access is a walk by software, and a fault is what it does
//! not find. There are no caches to clean, no TLBs to invalidate and no host to give memory: what
//! is measured is the engine, as many threads at a time as there are vCPUs.

use std::cell::RefCell;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use tablewright::format::Stage2K4;
use tablewright::guest::{Backing, Cause, Fault, Gather, Guest, Log, Slot, SlotCell};
use tablewright::shared::SharedSpace;
use tablewright::{AddressSpace, Ipa, Level, Pa};
use tablewright_hosted::Threads;

use super::engine::slot;
use crate::guest::host::{Served, access, grow, protect, serve, set_log};
use crate::guest::input::{PAGE, Region, Source};

type Format = Stage2K4<48>;

/// Times of a run.
#[derive(Debug)]
pub struct Took {
    /// Each phase, until the last thread was through.
    pub times: [Duration; 3],
    /// Faults.
    pub faults: u64,
    /// Tables in use at the end.
    pub tables: u64,
}

type Vm<'s, 'p> = Guest<'s, Format, &'p Threads>;
type Edits<'g, 's, 'p> = Gather<'g, 's, Format, &'p Threads>;

struct Test {
    region: Region,
    source: Source,
}

/// A thread's own.
struct Vcpu<'g, 's, 'p> {
    guest: &'g Vm<'s, 'p>,
    gather: RefCell<Edits<'g, 's, 'p>>,
    faults: u64,
}

/// Completes what was gathered: no other has to forget anything, and what was detached is freed
/// when no walk holds it.
fn finish(gather: &mut Edits<'_, '_, '_>) {
    let mut done = gather.finish(|_| ());
    while let Err(deferred) = done {
        thread::yield_now();
        done = deferred.try_complete().map(|completed| completed.finish(|_| ()));
    }
}

impl Vcpu<'_, '_, '_> {
    fn touch(
        &mut self,
        ipa: u64,
        write: bool,
        page: impl Fn(u64) -> Backing,
    ) -> Result<(), String> {
        let at = Ipa::new(ipa);
        let mut fault = Fault::new(at, access(write));
        loop {
            let allowed = self.guest.space().query(at).map(|leaf| leaf.attrs().perms);
            match allowed {
                Some(perms) if perms.contains(fault.access.perms()) => return Ok(()),
                Some(_) => fault.cause = Cause::Permission,
                None => fault.cause = Cause::Translation,
            }
            self.faults += 1;
            let served =
                serve(self.guest, &self.gather, &fault, |request| Some(page(request.host())));
            finish(self.gather.get_mut());
            if let Served::OutOfTables = served {
                return Err("out of tables".to_owned());
            }
        }
    }
}

/// Runs the test.
///
/// # Errors
/// What the engine refused.
pub fn run(source: Source, region: Region, vcpus: u16) -> Result<Took, String> {
    let tables = region.bytes / PAGE / 512 * 2 + 64 + 16 * u64::from(vcpus);
    let platform = Threads::new(tables as usize, 12, usize::from(vcpus) + 1);
    let space = AddressSpace::<Format, _>::new(&platform).ok_or("out of tables")?;
    let space = SharedSpace::new(space).map_err(|_| "the space runs")?;
    let mut cells = [SlotCell::new()];
    let guest = Guest::new(space, &mut cells);
    let slot = slot(region, source.bytes()).ok_or("no slot")?;
    guest.insert(slot).map_err(|it| it.to_string())?;
    let test = Test { region, source };
    let gate = Barrier::new(usize::from(vcpus) + 1);
    let mut times = [Duration::ZERO; 3];
    let mut problem = None;
    let results: Vec<Result<u64, String>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..vcpus)
            .map(|id| {
                let (test, guest, gate) = (&test, &guest, &gate);
                scope.spawn(move || {
                    let mut vcpu = Vcpu { guest, gather: guest.gather().into(), faults: 0 };
                    let mut result = Ok(());
                    for phase in 0..3 {
                        gate.wait();
                        if result.is_ok() {
                            result = test.phase(&mut vcpu, id, phase);
                        }
                        gate.wait();
                    }
                    result.map(|()| vcpu.faults)
                })
            })
            .collect();
        for (phase, time) in times.iter_mut().enumerate() {
            let started = test.start(&guest, slot, phase);
            gate.wait();
            let start = Instant::now();
            gate.wait();
            let grown = test.end(&guest, slot, phase);
            *time = start.elapsed();
            if let Err(why) = started.and(grown) {
                problem.get_or_insert(why);
            }
        }
        let gone = |_| Err("a thread panicked".to_owned());
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(gone)).collect()
    });
    problem.map_or(Ok(()), Err)?;
    let faults = results.into_iter().sum::<Result<u64, String>>()?;
    Ok(Took { times, faults, tables: platform.tables() })
}

impl Test {
    /// A page of the host.
    fn page(&self, distance: u64) -> Backing {
        Backing::new(Pa::new(self.region.first + distance), self.source.bytes())
    }

    /// Prepares a phase, on the host's thread.
    fn start(&self, guest: &Vm<'_, '_>, slot: Slot, phase: usize) -> Result<(), String> {
        let log = match phase {
            0 => return Ok(()),
            1 => Log::ByFault,
            _ => Log::Off,
        };
        let slot = set_log(guest, slot, log, thread::yield_now).map_err(|it| it.to_string())?;
        if log == Log::ByFault {
            let mut gather = guest.gather();
            protect(&mut gather, &slot, thread::yield_now).map_err(|it| it.to_string())?;
            finish(&mut gather);
        }
        Ok(())
    }

    /// And at its end.
    fn end(&self, guest: &Vm<'_, '_>, slot: Slot, phase: usize) -> Result<(), String> {
        let large = phase == 2 && self.source.level() > Level::PAGE;
        let page = |distance| large.then(|| self.page(distance));
        let mut gather = guest.gather();
        grow(&mut gather, &slot, page, |gather, _| finish(gather)).map_err(|it| it.to_string())
    }

    /// Runs a vCPU's part of a phase, as on the machine.
    fn phase(&self, vcpu: &mut Vcpu<'_, '_, '_>, id: u16, phase: usize) -> Result<(), String> {
        let Region { first, bytes } = self.region;
        let large = self.source.bytes();
        let mut each = |first: u64, bytes: u64, step: u64, write: bool| {
            (first..first + bytes)
                .step_by(step as usize)
                .try_for_each(|at| vcpu.touch(at, write, |distance| self.page(distance)))
        };
        match phase {
            0 => each(first, bytes, large, id.is_multiple_of(2)),
            1 if self.source == Source::Anonymous => each(first, bytes, PAGE, true),
            1 => (first..first + bytes).step_by(large as usize).try_for_each(|at| {
                each(at, 1, PAGE, true)?;
                if large > PAGE { each(at + large / 2, large / 2, PAGE, false) } else { Ok(()) }
            }),
            _ => each(first, bytes, PAGE, false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_go_through_all_phases_and_lose_no_table() {
        for source in [Source::Anonymous, Source::Thp, Source::Fixed { shift: 30 }] {
            let region = Region { first: 1 << 30, bytes: source.bytes().max(16 << 20) };
            let took = run(source, region, 3).unwrap();
            assert!(took.times.iter().all(|time| *time > Duration::ZERO));
            let leaves = region.bytes / source.bytes();
            assert!(took.faults >= leaves, "{took:?}");
            // From the root to where the leaves are, which have grown again.
            let expected = match source.level() {
                Level::PAGE => 3 + region.bytes / (2 << 20),
                level => 4 - u64::from(level.height()),
            };
            assert_eq!(took.tables, expected, "{took:?}");
        }
    }
}
