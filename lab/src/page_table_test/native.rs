//! The test on threads of this computer: the engine's edits in real time, with nothing below them.
//!
//! No processor walks these tables, so an access is a walk by software, and a fault is what it does not find. There are no
//! caches to clean, no TLBs to invalidate and no host to give memory: what is measured is the engine, as many threads at a
//! time as there are vCPUs.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use tablewright::format::Stage2K4;
use tablewright::hosted::Threads;
use tablewright::shared::{Gather, NewLeaf, Refused, SharedSpace};
use tablewright::{AddressSpace, Change, Ipa, Level, Pa, Perms, Span};

use super::handler::attrs;
use super::input::{PAGE, Region, Source};

type Format = Stage2K4<48, false>;

/// What a run took.
#[derive(Debug)]
pub struct Took {
    /// Each phase, until the last thread was through.
    pub times: [Duration; 3],
    /// Faults.
    pub faults: u64,
    /// Tables in use at the end.
    pub tables: u64,
}

struct Guest<'p> {
    space: SharedSpace<Format, &'p Threads>,
    platform: &'p Threads,
    region: Region,
    source: Source,
}

/// A thread's own.
struct Vcpu<'g, 'p> {
    gather: Gather<'g, Format, &'p Threads>,
    faults: u64,
}

impl Guest<'_> {
    fn touch(
        &self,
        vcpu: &mut Vcpu<'_, '_>,
        ipa: u64,
        write: bool,
        logging: bool,
    ) -> Result<(), String> {
        let at = Ipa::new(ipa);
        loop {
            let allowed = self.space.query(at).map(|leaf| leaf.attrs().perms);
            let wanted = if write {
                Perms::READ | Perms::WRITE
            } else {
                Perms::READ
            };
            if allowed.is_some_and(|perms| perms.contains(wanted)) {
                return Ok(());
            }
            vcpu.faults += 1;
            let handled = self.fault(vcpu, ipa, write, logging, allowed.is_some());
            // No other has to forget anything, and what was cut off is freed when it is quiet.
            let mut done = vcpu.gather.finish(|_| ());
            while let Err(cut) = done {
                thread::yield_now();
                done = cut.quiet().map(|completed| completed.finish(|_| ()));
            }
            match handled {
                Ok(()) | Err(Refused::Busy(_) | Refused::Retry) => {}
                Err(Refused::NeedsTables(count)) => {
                    if !vcpu.gather.top_up(count) {
                        return Err("out of tables".to_owned());
                    }
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    fn fault(
        &self,
        vcpu: &mut Vcpu<'_, '_>,
        ipa: u64,
        write: bool,
        logging: bool,
        present: bool,
    ) -> Result<(), Refused<Ipa>> {
        let at = Ipa::new(ipa);
        if present {
            if logging {
                while vcpu.gather.split(at, Level::PAGE)? {}
            }
            self.space
                .relax(at, (Perms::READ | Perms::WRITE).and_user(), true)?;
            return Ok(());
        }
        let level = if logging && write {
            Level::PAGE
        } else {
            self.source.level()
        };
        let frame = Pa::new(ipa & !(level_bytes(level) - 1));
        let leaf = NewLeaf::new(at, frame, level, attrs(write || !logging))?;
        vcpu.gather.map(&leaf).map(|_| ())
    }
}

fn level_bytes(level: Level) -> u64 {
    PAGE << (9 * u32::from(level.height()))
}

/// Runs the test.
///
/// # Errors
/// What the engine refused.
pub fn run(source: Source, region: Region, vcpus: u16) -> Result<Took, String> {
    let tables = region.bytes / PAGE / 512 * 2 + 64 + 16 * u64::from(vcpus);
    let platform = Threads::new(tables as usize, 12, usize::from(vcpus) + 1);
    let space = AddressSpace::<Format, _>::new(&platform).ok_or("out of tables")?;
    let guest = Guest {
        space: SharedSpace::new(space).map_err(|_| "the space runs")?,
        platform: &platform,
        region,
        source,
    };
    let gate = Barrier::new(usize::from(vcpus) + 1);
    let mut times = [Duration::ZERO; 3];
    let results: Vec<Result<u64, String>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..vcpus)
            .map(|id| {
                let (guest, gate) = (&guest, &gate);
                scope.spawn(move || {
                    guest.platform.play(id);
                    let mut vcpu = Vcpu {
                        gather: guest.space.gather(),
                        faults: 0,
                    };
                    let mut result = Ok(());
                    for phase in 0..3 {
                        gate.wait();
                        if result.is_ok() {
                            result = guest.phase(&mut vcpu, id, phase);
                        }
                        gate.wait();
                    }
                    result.map(|()| vcpu.faults)
                })
            })
            .collect();
        platform.play(vcpus);
        for (phase, time) in times.iter_mut().enumerate() {
            if phase == 1 {
                guest.protect();
            }
            gate.wait();
            let start = Instant::now();
            gate.wait();
            *time = start.elapsed();
        }
        let gone = |_| Err("a thread panicked".to_owned());
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(gone))
            .collect()
    });
    let faults = results.into_iter().sum::<Result<u64, String>>()?;
    Ok(Took {
        times,
        faults,
        tables: platform.tables(),
    })
}

impl Guest<'_> {
    fn protect(&self) {
        let Region { first, bytes } = self.region;
        if let Ok(all) = Span::new(Ipa::new(first), bytes) {
            let change = Change::new().perms(Perms::READ.and_user());
            // Permissions are such that the format has them.
            let _any = self.space.gather().protect(all, change);
        }
    }

    /// As on the machine.
    fn phase(&self, vcpu: &mut Vcpu<'_, '_>, id: u16, phase: usize) -> Result<(), String> {
        let Region { first, bytes } = self.region;
        let large = self.source.bytes();
        let mut each = |first: u64, bytes: u64, step: u64, write: bool| {
            (first..first + bytes)
                .step_by(step as usize)
                .try_for_each(|at| self.touch(vcpu, at, write, phase == 1))
        };
        match phase {
            0 => each(first, bytes, large, id.is_multiple_of(2)),
            1 if self.source == Source::Anonymous => each(first, bytes, PAGE, true),
            1 => (first..first + bytes)
                .step_by(large as usize)
                .try_for_each(|at| {
                    each(at, 1, PAGE, true)?;
                    if large > PAGE {
                        each(at + large / 2, large / 2, PAGE, false)
                    } else {
                        Ok(())
                    }
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
            let region = Region {
                first: 1 << 30,
                bytes: source.bytes().max(16 << 20),
            };
            let took = run(source, region, 3).unwrap();
            assert!(took.times.iter().all(|time| *time > Duration::ZERO));
            let leaves = region.bytes / source.bytes();
            assert!(took.faults >= leaves, "{took:?}");
            // A root, and one table for each level and gigabyte, and one for each split leaf.
            let most = 3 + region.bytes / (2 << 20) + 2;
            assert!(took.tables >= 3 && took.tables <= most, "{took:?}");
        }
    }
}
