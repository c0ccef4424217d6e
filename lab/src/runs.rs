//! Runs of the software machine: jobs, made beside each other on threads of this computer.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use clap::Args;

use crate::error::Error;
use crate::output::progress::Progress;

/// One run to be made on the software machine.
pub trait Simulated: Sync {
    type Ran: Send;
    /// State that a thread keeps from one run to the next; `()` for none.
    type Kept: Default;

    /// Makes the run.
    fn run(&self, kept: &mut Self::Kept) -> Result<Self::Ran, Error>;
    /// Words beside the progress bar.
    fn name(&self) -> String;
}

/// Makes runs, and gives what each showed, in their order.
pub type Run<'r, J> = &'r dyn Fn(&[J]) -> Result<Vec<<J as Simulated>::Ran>, Error>;

/// The software machine. Runs share nothing, so that what they show depends neither on the threads
/// nor on their order.
pub fn software<J: Simulated>(threads: Threads) -> impl Fn(&[J]) -> Result<Vec<J::Ran>, Error> {
    move |jobs| threads.each(jobs, |kept, job| job.run(kept), J::name)
}

/// How many threads of this computer make runs.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Threads {
    /// How many runs of the machine to make at a time; the figures do not depend on it [default: as
    /// many as this computer has CPUs, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub threads: Option<u16>,
}

impl Threads {
    fn count(self) -> usize {
        // Each run of a large machine needs memory for its tables.
        let usual = || thread::available_parallelism().map_or(1, |cpus| cpus.get().min(4));
        self.threads.map_or_else(usual, usize::from)
    }

    /// Does each job, on as many threads, with a state of the thread's own, and gives what each
    /// came to, in their order; of several that failed, the first. `name` is shown meanwhile.
    pub fn each<J: Sync, S: Default, T: Send>(
        self,
        jobs: &[J],
        work: impl Fn(&mut S, &J) -> Result<T, Error> + Sync,
        name: impl Fn(&J) -> String + Sync,
    ) -> Result<Vec<T>, Error> {
        let next = AtomicUsize::new(0);
        let progress = Mutex::new(Progress::ticking(jobs.len() as u64));
        let work = || {
            let mut state = S::default();
            let mut done = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(number) else {
                    return done;
                };
                done.push((number, work(&mut state, job)));
                if let Ok(mut progress) = progress.lock() {
                    progress.step(&name(job));
                }
            }
        };
        let mut all: Vec<_> = thread::scope(|scope| {
            let threads = self.count().min(jobs.len());
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let results = workers.into_iter().map(|worker| worker.join());
            results.flat_map(Result::unwrap_or_default).collect()
        });
        all.sort_by_key(|(number, _)| *number);
        all.into_iter().map(|(_, done)| done).collect()
    }
}
