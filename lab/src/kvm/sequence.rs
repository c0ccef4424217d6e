//! Phases of a guest, once: each with its times, its stalls, and KVM's counts.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use tablewright_kvm::clock::{Took, pace, settle};
use tablewright_kvm::guest::Orders;
use tablewright_kvm::host::{Abilities, abilities, open};
use tablewright_kvm::{
    Backing, Bitmap, Counts, Done, Emptied, Error as KvmError, Protect, Setup, Vm,
};

use crate::error::Error;
use crate::guest::input::{PAGE, Source};
use crate::kvm::Asked;
use crate::kvm::summary::Phase;
use crate::output::report;
use crate::stats::Samples;

/// A call of some microseconds that changes nothing is made so often in a row, and so many rows.
const IN_A_ROW: u32 = 64;
const ROWS_OF_CALLS: u32 = 32;

/// Returns the host's name for a backing.
fn backing(asked: &Asked) -> Result<Backing, Error> {
    Ok(match (asked.backing.name, asked.backing.source) {
        (_, Source::Anonymous) => Backing::Anonymous,
        (_, Source::Thp) => Backing::Thp,
        ("shmem", _) => Backing::Shmem,
        (name, Source::Fixed { shift }) => {
            Backing::Hugetlb { shift, shared: name.starts_with("shared") }
        }
    })
}

const DEVICE: &str = "/dev/kvm";

/// Returns KVM's abilities here.
pub fn able() -> Result<Abilities, Error> {
    open(Path::new(DEVICE)).map(|kvm| abilities(&kvm)).map_err(refused)
}

/// Another command line, another user or another computer would help; or the figures are not to be
/// believed.
fn refused(error: KvmError) -> Error {
    match error.is_refusal() {
        true => Error::Usage(error.to_string()),
        false => Error::Failed(error.to_string()),
    }
}

fn setup(asked: &Asked) -> Result<Setup, Error> {
    let backing = backing(asked)?;
    if let Some(first) = asked.first
        && !first.is_multiple_of(backing.page().max(PAGE))
    {
        return Err(Error::Usage(format!(
            "-p {first:#x}: not a multiple of a page of {}",
            asked.backing.name
        )));
    }
    // As far up as the mode goes, if KVM goes as far.
    let first = match (asked.first, asked.bits) {
        (None, Some(bits)) => {
            let page = backing.page().max(2 << 20);
            Some((1_u64 << bits).saturating_sub(asked.bytes) & !(page - 1))
        }
        (first, _) => first,
    };
    let setup = Setup {
        device: PathBuf::from(DEVICE),
        vcpus: asked.vcpus,
        backing: (backing, asked.backing.name),
        bytes: asked.bytes,
        first,
        slots: asked.slots,
        protect: match (asked.options.ring, asked.manual, asked.options.all_set) {
            (Some(_), ..) | (_, false, _) => Protect::Auto,
            (None, true, false) => Protect::Manual,
            (None, true, true) => Protect::ManualAllSet,
        },
        ring: asked.options.ring,
        as_selftests: asked.options.as_selftests,
        nested: asked.options.nested,
        cpus: asked.options.cpus.clone(),
    };
    setup.check(&able()?).map_err(refused)?;
    divisible(asked, backing)?;
    Ok(setup)
}

/// That all have as much.
fn divisible(asked: &Asked, backing: Backing) -> Result<(), Error> {
    let usage = |text: String| Err(Error::Usage(text));
    let each = asked.bytes / u64::from(asked.slots.max(1));
    if !asked.bytes.is_multiple_of(u64::from(asked.slots))
        || !each.is_multiple_of(backing.page().max(64 * PAGE))
    {
        if asked.slots == 1 {
            return usage(format!(
                "-b: the memory has to be whole pages of {}, and a multiple of 256 KiB",
                asked.backing.name
            ));
        }
        return usage(format!(
            "-x {}: each slot has to be whole pages of {}, and a multiple of 256 KiB",
            asked.slots, asked.backing.name
        ));
    }
    if !asked.bytes.is_multiple_of(u64::from(asked.vcpus) * PAGE) {
        return usage(format!("-v {}: the memory cannot be divided so", asked.vcpus));
    }
    if !asked.options.cpus.is_empty() && asked.options.cpus.len() < asked.vcpus as usize {
        return usage(format!(
            "-c: {} for {}",
            report::counted(asked.options.cpus.len() as u64, "CPU", "CPUs"),
            report::counted(asked.vcpus.into(), "vCPU", "vCPUs")
        ));
    }
    Ok(())
}

/// A guest, and what its log has to have.
pub struct Run<'a> {
    asked: &'a Asked,
    vm: Vm,
    phases: Vec<Phase>,
    /// Pages that have to be in the log, and that may be.
    sure: Bitmap,
    maybe: Bitmap,
    got: Bitmap,
    /// Full rings emptied since the log was taken.
    emptied: Emptied,
}

impl<'a> Run<'a> {
    /// Makes the guest.
    pub fn new(asked: &'a Asked) -> Result<Self, Error> {
        let vm = Vm::new(&setup(asked)?).map_err(refused)?;
        vm.seed(asked.seed);
        Ok(Self {
            asked,
            phases: Vec::new(),
            sure: vm.bitmap(),
            maybe: vm.bitmap(),
            got: vm.bitmap(),
            emptied: Emptied::default(),
            vm,
        })
    }

    pub fn phases(self) -> Vec<Phase> {
        self.phases
    }

    /// The accesses of a pass, as asked for.
    fn pass_orders(&self) -> impl Fn(usize) -> Orders + use<> {
        let vcpus = self.asked.vcpus as usize;
        let overlap = self.asked.options.overlap;
        let shares: Vec<Orders> = (0..vcpus)
            .map(|id| Orders {
                write_percent: self.asked.write_percent,
                random: self.asked.random,
                ..self.vm.share(id, overlap)
            })
            .collect();
        move |id| shares[id]
    }

    /// Each vCPU's own part, written in order.
    fn own_orders(&self) -> impl Fn(usize) -> Orders + use<> {
        let shares: Vec<Orders> = (0..self.asked.vcpus as usize)
            .map(|id| self.vm.share(id, self.asked.options.overlap))
            .collect();
        move |id| shares[id]
    }

    /// Whether leaves may be split: what was not there is then mapped for a write as well, and
    /// logged, if it is read.
    fn splits(&self) -> bool {
        self.asked.options.nested || self.asked.backing.source.bytes() > PAGE
    }

    /// All vCPUs do something, and are waited for.
    fn vcpus(&mut self, name: &str, orders: impl Fn(usize) -> Orders) -> Result<(), Error> {
        let before = self.vm.counts();
        self.vm.begin(&orders);
        let done = self.vm.finish().map_err(refused)?;
        let counts = self.vm.counts().since(&before);
        self.vm.mark_written(&orders, &done, &mut self.sure);
        if self.splits() {
            self.vm.mark_accessed(&orders, &done, &mut self.maybe);
        }
        let emptied = done.iter().map(|done| done.emptied);
        let emptied = emptied.fold(Emptied::default(), Emptied::beside);
        let from = done.iter().map(|done| done.from).min();
        let to = done.iter().map(|done| done.to).max();
        let wall = to.zip(from).map_or(Duration::ZERO, |(to, from)| to - from);
        let took = Took {
            wall: wall.saturating_sub(emptied.taking.wall + emptied.resetting.wall),
            cpu: done.iter().map(|done| done.took.cpu).sum(),
        };
        self.emptied.taking = self.emptied.taking.then(emptied.taking);
        self.emptied.resetting = self.emptied.resetting.then(emptied.resetting);
        let pages = done.iter().map(|done| done.made).sum();
        self.phase(name, pages, took, self.asked.vcpus, &done, counts, None);
        let away = done.iter().map(|done| done.took.away()).sum::<Duration>();
        let slowest = done.iter().map(|done| done.pace).max().unwrap_or_default();
        if let Some(phase) = self.phases.last_mut() {
            phase.away = away.as_nanos() as f64;
            phase.pace = slowest.as_nanos() as f64;
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "they are the fields of a phase")]
    fn phase(
        &mut self,
        name: &str,
        pages: u64,
        took: Took,
        threads: u32,
        done: &[Done],
        counts: Counts,
        harvested: Option<u64>,
    ) {
        let ns = |time: Duration| time.as_nanos() as f64;
        let stalls = done.iter().map(|done| done.stalls.clone()).reduce(|mut all, more| {
            all.add(&more);
            all
        });
        self.phases.push(Phase {
            name: name.to_owned(),
            pages,
            wall: ns(took.wall),
            cpu: ns(took.cpu),
            threads,
            longest: stalls.as_ref().map(|stalls| ns(stalls.longest())),
            p999: stalls.as_ref().map(|stalls| ns(stalls.quantile(0.999))),
            total: stalls.as_ref().map(|stalls| ns(stalls.total())),
            away: ns(took.away()),
            pace: 0.0,
            first: None,
            counts: counts.0,
            harvested,
            written: None,
        });
    }

    /// KVM is asked for something, while the vCPUs go on if they are to. What they wrote meanwhile
    /// may be in the log.
    fn call<T>(
        &mut self,
        name: &str,
        running: bool,
        call: impl FnOnce(&mut Self) -> Result<(T, Took), KvmError>,
    ) -> Result<T, Error> {
        let orders = self.pass_orders();
        let before = self.vm.counts();
        let mut done = Vec::new();
        if running {
            self.vm.begin(|id| orders(id).endless());
            // None may be kept from a CPU for long before it is at work.
            let begin = Instant::now();
            while self.vm.vcpus().iter().any(|vcpu| vcpu.made() == 0)
                && begin.elapsed() < Duration::from_millis(100)
            {
                thread::yield_now();
            }
        }
        settle();
        let slower = pace();
        let result = call(self);
        let slower = slower.max(pace());
        if running {
            done = self.vm.stop().map_err(refused)?;
            let mut wrote = self.vm.bitmap();
            self.vm.mark_written(|id| orders(id).endless(), &done, &mut wrote);
            self.maybe.add(&wrote);
            if self.splits() {
                self.vm.mark_accessed(|id| orders(id).endless(), &done, &mut self.maybe);
            }
        }
        let (result, took) = result.map_err(refused)?;
        let counts = self.vm.counts().since(&before);
        let pages = self.vm.pages();
        self.phase(name, pages, took, 1, &done, counts, None);
        if let Some(phase) = self.phases.last_mut() {
            phase.pace = slower.as_nanos() as f64;
        }
        Ok(result)
    }

    /// Each vCPU writes its part.
    pub fn populate(&mut self) -> Result<(), Error> {
        let orders = self.own_orders();
        self.vcpus("populate", orders)?;
        self.sure.clear();
        self.maybe.clear();
        Ok(())
    }

    /// Logging begins.
    pub fn enable(&mut self) -> Result<(), Error> {
        self.sure.clear();
        self.maybe.clear();
        if self.vm.is_manual() && self.asked.options.all_set {
            (0..self.vm.pages()).for_each(|page| self.sure.insert(page));
        }
        let running = self.asked.options.stalls;
        self.call("enable", running, |run| Ok(((), run.vm.log(true)?)))
    }

    /// A pass as asked for.
    pub fn dirty(&mut self, name: &str) -> Result<(), Error> {
        let orders = self.pass_orders();
        self.vcpus(name, orders)
    }

    /// A pass with other accesses.
    pub fn access(&mut self, name: &str, orders: impl Fn(usize) -> Orders) -> Result<(), Error> {
        self.vcpus(name, orders)
    }

    /// Takes the log, and has its pages protected again. An error if it is not what was written.
    pub fn harvest(&mut self, number: u32) -> Result<(), Error> {
        let running = self.asked.options.stalls;
        let mut got = std::mem::take(&mut self.got);
        got.clear();
        let get = format!("get {number}");
        // What was emptied while the guest ran is part of it.
        let emptied = std::mem::take(&mut self.emptied);
        if self.vm.has_rings() {
            self.call(&get, running, |run| {
                let took = run.vm.collect(&mut got);
                Ok(((), took.then(emptied.taking)))
            })?;
            self.call(&format!("reset {number}"), running, |run| {
                let took = run.vm.reset()?;
                Ok(((), took.then(emptied.resetting)))
            })?;
        } else {
            self.call(&get, running, |run| Ok(((), run.vm.get(&mut got)?)))?;
            if self.vm.is_manual() && !running {
                self.again(&got)?;
            }
        }
        self.compare(&get, &got)?;
        if !self.vm.has_rings() && self.vm.is_manual() {
            self.call(&format!("clear {number}"), running, |run| {
                Ok(((), run.vm.clear(&mut got)?))
            })?;
        }
        // What was written while the log was taken is in this one, or in the next: there surely, if
        // it is not in this. A page that was only read is in neither for sure.
        match self.splits() && self.asked.write_percent < 100 {
            true => self.sure.clear(),
            false => {
                self.sure = self.maybe.clone();
                self.sure.remove(&got);
            }
        }
        self.got = got;
        Ok(())
    }

    /// Reads the log again and again, which leaves it as it is, and puts what a call takes then in
    /// the place of the first one, which is kept beside it.
    fn again(&mut self, got: &Bitmap) -> Result<(), Error> {
        let mut same = self.vm.bitmap();
        let mut all = Vec::new();
        for _ in 0..ROWS_OF_CALLS {
            all.push(self.vm.get_often(&mut same, IN_A_ROW).map_err(refused)?);
        }
        if let Some(page) = got.difference(&same) {
            return Err(Error::Failed(format!(
                "page {page}: the log has changed while the guest stood still"
            )));
        }
        if let Some(phase) = self.phases.last_mut() {
            let median = |of: fn(&Took) -> Duration| {
                let times = all.iter().map(|took| of(took).as_nanos() as f64);
                times.collect::<Samples>().median()
            };
            phase.first = Some(phase.cpu);
            phase.wall = median(|took| took.wall);
            phase.cpu = median(|took| took.cpu);
            phase.away = median(|took| took.away());
            phase.pace = phase.pace.max(pace().as_nanos() as f64);
        }
        Ok(())
    }

    fn compare(&mut self, phase: &str, got: &Bitmap) -> Result<(), Error> {
        let mut lacks = self.sure.clone();
        lacks.remove(got);
        let mut more = got.clone();
        more.remove(&self.sure);
        more.remove(&self.maybe);
        if let Some(first) = lacks.first().or_else(|| more.first()) {
            return Err(refused(KvmError::Log {
                phase: phase.to_owned(),
                got: got.count(),
                wrote: self.sure.count(),
                lacks: lacks.count(),
                more: more.count(),
                first,
            }));
        }
        if let Some(phase) = self.phases.iter_mut().rev().find(|it| it.name == phase) {
            phase.harvested = Some(got.count());
            phase.written = Some(self.sure.count());
        }
        Ok(())
    }

    /// Logging ends.
    pub fn disable(&mut self) -> Result<(), Error> {
        let running = self.asked.options.stalls || self.asked.running;
        self.call("disable", running, |run| Ok(((), run.vm.log(false)?)))
    }

    /// Returns the address of the memory, and its pages.
    pub fn memory(&self) -> (u64, u64) {
        (self.vm.first(), self.vm.pages())
    }
}

/// The phases of the well-known test, and one more pass at the end.
pub fn dirty_log(asked: &Asked) -> Result<Vec<Phase>, Error> {
    let mut run = Run::new(asked)?;
    run.populate()?;
    run.enable()?;
    for number in 1..=asked.iterations {
        run.dirty(&format!("dirty {number}"))?;
        run.harvest(number)?;
    }
    run.disable()?;
    run.dirty("pass after")?;
    Ok(run.phases())
}

/// The start of a log, and the pass after it. `then` says whether the guest writes in it or reads;
/// the start alone without.
pub fn start(asked: &Asked, then: Option<bool>) -> Result<Vec<Phase>, Error> {
    let mut run = Run::new(asked)?;
    run.populate()?;
    run.enable()?;
    match then {
        Some(true) => {
            run.dirty("write")?;
            run.harvest(1)?;
        }
        Some(false) => {
            let orders = run.own_orders();
            run.access("read", |id| Orders { write_percent: 0, ..orders(id) })?;
            run.harvest(1)?;
        }
        None => {}
    }
    Ok(run.phases())
}

/// The three phases of the well-known test of faults on one table: every vCPU touches all of the
/// memory.
pub fn faults(asked: &Asked) -> Result<Vec<Phase>, Error> {
    let mut run = Run::new(asked)?;
    let (first, pages) = run.memory();
    let large = asked.backing.source.bytes();
    let per = large / PAGE;
    let each = |write: bool| Orders {
        stride: large,
        count: pages / per,
        write_percent: if write { 100 } else { 0 },
        ..Orders::write(first, pages / per)
    };
    run.access("create", |id| each(id % 2 == 0))?;
    run.enable()?;
    let all = Orders::write(first, pages);
    run.access("update", |_| if per > 1 { each(true) } else { all })?;
    if per > 1 {
        run.access("update, read", |_| Orders {
            pages: pages / 2,
            count: pages / 2,
            half: per / 2,
            write_percent: 0,
            ..all
        })?;
    }
    run.harvest(1)?;
    run.disable()?;
    run.access("rebuild", |_| Orders { write_percent: 0, ..all })?;
    Ok(run.phases())
}
