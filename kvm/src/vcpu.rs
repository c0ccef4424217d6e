//! A vCPU: a thread that enters the guest when it is told to, and says what that took.

use std::hint;
use std::mem;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvm_bindings::KVM_EXIT_DIRTY_RING_FULL;
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};

use crate::clock::{Took, pace, settle, timed};
use crate::error::Error;
use crate::guest::{Block, Orders};
use crate::log::Bitmap;
use crate::memory::{Backing, Memory, warm};
use crate::ring::{Ring, reset_rings};
use crate::stalls::Stalls;

/// That its block has orders.
#[derive(Clone, Debug)]
struct Work {
    /// The seed of its random numbers.
    seed: u64,
    start: Start,
}

/// A line from which vCPUs start together: what two do at once, and how much they are in each
/// other's way, does not depend on when their threads were woken.
#[derive(Clone, Debug)]
pub struct Start {
    missing: Arc<AtomicUsize>,
    is_crowded: bool,
}

/// The time for which the others are waited for.
const LATE: Duration = Duration::from_millis(20);

impl Start {
    /// For so many, on so many CPUs.
    pub fn of(vcpus: usize, cpus: usize) -> Self {
        Self { missing: Arc::new(AtomicUsize::new(vcpus)), is_crowded: vcpus > cpus }
    }

    /// Waits for the others, but not for long. Where each has a CPU, it keeps it: a thread that
    /// lets others run may be away when the last one comes.
    fn wait(&self) {
        self.missing.fetch_sub(1, Ordering::AcqRel);
        let begin = Instant::now();
        while self.missing.load(Ordering::Acquire) > 0 && begin.elapsed() < LATE {
            match self.is_crowded {
                true => thread::yield_now(),
                false => hint::spin_loop(),
            }
        }
    }
}

/// Full rings, emptied.
#[derive(Clone, Copy, Debug, Default)]
pub struct Emptied {
    /// Pages found in them.
    pub pages: u64,
    /// Taking what was in them.
    pub taking: Took,
    /// Giving KVM the entries back.
    pub resetting: Took,
}

impl Emptied {
    /// Adds the time of another's rings, at the same time as this vCPU's.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        Self {
            pages: self.pages + other.pages,
            taking: self.taking.beside(other.taking),
            resetting: self.resetting.beside(other.resetting),
        }
    }
}

/// The work that it did.
#[derive(Clone, Debug)]
pub struct Done {
    /// Without what emptying a full ring took.
    pub took: Took,
    /// Of its CPU, before or after: the slower.
    pub pace: Duration,
    /// When, with that.
    pub from: Instant,
    /// Until when.
    pub to: Instant,
    /// Emptying full rings.
    pub emptied: Emptied,
    /// The seed of its random numbers.
    pub seed: u64,
    /// Accesses made.
    pub made: u64,
    /// How long each took.
    pub stalls: Stalls,
}

/// State that a vCPU's thread and the host share.
struct Shared {
    /// Nanoseconds that it is to be kept out of the guest for, once.
    pause: AtomicU64,
    /// It is being kept out, and no more.
    paused: AtomicBool,
    over: AtomicBool,
    /// Goes after the vCPU, and after what is said of its block.
    _memory: Arc<Memory>,
    block: NonNull<Block>,
    ring: Option<Mutex<(Ring, Bitmap)>>,
    turn: Turn,
}

/// The right to have rings reset. KVM's own lock is one for which a thread spins, in its CPU time,
/// while another has it; here it sleeps, as threads do in programs that empty rings under a lock.
pub type Turn = Arc<Mutex<()>>;

// SAFETY: the block is in the memory, which is held, and all of it is atomics.
unsafe impl Send for Shared {}
// SAFETY: the same.
unsafe impl Sync for Shared {}

/// A thread's name for signals, which some libraries have as a pointer.
#[derive(Clone, Copy)]
struct Thread(libc::pthread_t);

// SAFETY: it is a name, and nothing is read through it.
unsafe impl Send for Thread {}

/// A vCPU as the host has it.
pub struct Vcpu {
    shared: Arc<Shared>,
    tell: Option<Sender<Work>>,
    hear: Receiver<Result<Done, Error>>,
    thread: Option<JoinHandle<()>>,
    native: Thread,
}

/// The parts of one.
pub struct Parts {
    pub id: u32,
    pub fd: VcpuFd,
    pub vm: Arc<VmFd>,
    pub memory: Arc<Memory>,
    /// Its block, in that memory.
    pub block: NonNull<Block>,
    pub ring: Option<(Ring, Bitmap)>,
    pub turn: Turn,
    pub frequency: u64,
    /// The CPU that it is to run on.
    pub cpu: Option<usize>,
    /// The backing of the memory that it is to be the first to touch, and how much that is.
    pub touches: (Backing, &'static str, u64),
}

impl Vcpu {
    /// Starts its thread, which waits for work. With it, memory to be let go when there is some.
    ///
    /// # Errors
    /// There is no thread, or it may not run on that CPU.
    pub fn start(parts: Parts) -> Result<(Self, Option<Memory>), Error> {
        let Parts {
            id,
            fd,
            vm,
            memory,
            block,
            ring,
            turn,
            frequency,
            cpu,
            touches: (backing, name, bytes),
        } = parts;
        let shared = Arc::new(Shared {
            pause: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            over: AtomicBool::new(false),
            _memory: memory,
            block,
            ring: ring.map(Mutex::new),
            turn,
        });
        let (tell, orders) = channel();
        let (say, hear) = channel();
        let (introduce, known) = channel();
        let runner = Runner { id, fd, vm, frequency, shared: Arc::clone(&shared) };
        let thread = thread::Builder::new()
            .name(format!("vcpu-{id}"))
            .spawn(move || {
                let bound = cpu.map_or(Ok(()), bind);
                let bound = bound.and_then(|()| warm((backing, name), bytes));
                let failed = bound.is_err();
                // SAFETY: `pthread_self` only says which thread this is.
                let this = unsafe { libc::pthread_self() };
                // The host waits for it, and for nothing else.
                let _told = introduce.send(bound.map(|warm| (Thread(this), warm)));
                if !failed {
                    runner.serve(&orders, &say);
                }
            })
            .map_err(|error| Error::Call { call: "a thread for a vCPU", error })?;
        let gone = |_| Error::Guest { vcpu: id, why: "its thread is gone".to_owned() };
        let (native, warm) = known.recv().map_err(gone)??;
        let vcpu = Self { shared, tell: Some(tell), hear, thread: Some(thread), native };
        Ok((vcpu, warm))
    }

    /// Returns the block that it and the host know.
    pub fn block(&self) -> &Block {
        // SAFETY: the block is in memory that is held, and all of it is atomics.
        unsafe { self.shared.block.as_ref() }
    }

    /// Has it begin. It must not be at work. It can be stopped from now on.
    pub(crate) fn begin(&mut self, orders: &Orders, start: &Start) {
        let seed = self.block().seed.load(Ordering::Relaxed);
        self.block().order(orders);
        if let Some(tell) = &self.tell {
            // Its thread lives as long as this; if it is gone, waiting for it says so.
            let _sent = tell.send(Work { seed, start: start.clone() });
        }
    }

    /// Waits until it is through.
    ///
    /// # Errors
    /// The guest left for another reason.
    pub fn finish(&mut self) -> Result<Done, Error> {
        let gone = |_| Error::Guest { vcpu: 0, why: "its thread is gone".to_owned() };
        self.hear.recv().map_err(gone)?
    }

    /// Has it leave before its next access.
    pub fn stop(&self) {
        self.block().stop.store(1, Ordering::Relaxed);
    }

    /// Accesses made so far, while it goes on.
    pub fn made(&self) -> u64 {
        self.block().made.load(Ordering::Relaxed)
    }

    /// Keeps it out of the guest for so long, and comes back when that is over. It has to be at
    /// work.
    pub fn pause(&self, time: Duration) {
        handle_signal();
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.shared.paused.store(false, Ordering::SeqCst);
        self.shared.over.store(false, Ordering::SeqCst);
        self.shared.pause.store(nanoseconds, Ordering::SeqCst);
        while !self.shared.paused.load(Ordering::SeqCst) {
            // SAFETY: `pthread_kill`: the thread is joined only when this is dropped.
            unsafe { libc::pthread_kill(self.native.0, signal()) };
            thread::sleep(Duration::from_micros(500));
        }
        while !self.shared.over.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_micros(500));
        }
    }

    /// Takes what is in its ring, and what was in it when it was full; clears the latter. How many
    /// pages the ring had.
    pub fn collect(&self, into: &mut Bitmap) -> u64 {
        let Some(ring) = &self.shared.ring else {
            return 0;
        };
        let mut ring = ring.lock().unwrap_or_else(PoisonError::into_inner);
        let (ring, found) = &mut *ring;
        let count = ring.collect(found);
        into.add(found);
        found.clear();
        count
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.tell = None;
        if let Some(thread) = self.thread.take() {
            // Orders clear the flag: it is set until the thread has seen it.
            while !thread.is_finished() {
                self.stop();
                thread::sleep(Duration::from_micros(100));
            }
            let _gone = thread.join();
        }
    }
}

/// The thread's side.
struct Runner {
    id: u32,
    fd: VcpuFd,
    vm: Arc<VmFd>,
    frequency: u64,
    shared: Arc<Shared>,
}

impl Runner {
    fn serve(mut self, orders: &Receiver<Work>, say: &Sender<Result<Done, Error>>) {
        while let Ok(work) = orders.recv() {
            let done = self.run(&work);
            if say.send(done).is_err() {
                break;
            }
        }
    }

    fn run(&mut self, work: &Work) -> Result<Done, Error> {
        // SAFETY: the block is in memory that is held, and all of it is atomics.
        let block = unsafe { self.shared.block.as_ref() };
        settle();
        let before = pace();
        work.start.wait();
        let (mut emptying, mut emptied) = (Took::default(), Emptied::default());
        let from = Instant::now();
        let (result, took) = timed(|| self.enter(&mut emptying, &mut emptied));
        let to = Instant::now();
        result?;
        Ok(Done {
            took: took.without(emptying),
            pace: before.max(pace()),
            from,
            to,
            emptied,
            seed: work.seed,
            made: block.made.load(Ordering::Relaxed),
            stalls: Stalls::of(block, self.frequency),
        })
    }

    /// Until the guest leaves by itself.
    fn enter(&mut self, emptying: &mut Took, emptied: &mut Emptied) -> Result<(), Error> {
        loop {
            let left = match self.fd.run() {
                Ok(VcpuExit::MmioWrite(..)) => return Ok(()),
                Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => None,
                Ok(other) => Some(format!("{other:?}")),
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                    self.wait();
                    continue;
                }
                Err(error) => Some(error.to_string()),
            };
            if let Some(why) = left {
                return Err(Error::Guest { vcpu: self.id, why });
            }
            let (done, took) = timed(|| self.empty(emptied));
            done?;
            *emptying = emptying.then(took);
        }
    }

    /// Stays out of the guest if it is asked to.
    fn wait(&self) {
        let begin = Instant::now();
        let time = Duration::from_nanos(self.shared.pause.swap(0, Ordering::SeqCst));
        if !time.is_zero() {
            self.shared.paused.store(true, Ordering::SeqCst);
            // A sleep may take longer than it is asked to: the rest is waited for.
            thread::sleep(time.mul_f64(0.8));
            while begin.elapsed() < time {
                hint::spin_loop();
            }
            self.shared.over.store(true, Ordering::SeqCst);
        }
    }

    /// Makes room in a full ring.
    fn empty(&self, emptied: &mut Emptied) -> Result<(), Error> {
        let Some(ring) = &self.shared.ring else {
            return Ok(());
        };
        let mut ring = ring.lock().unwrap_or_else(PoisonError::into_inner);
        let (ring, found) = &mut *ring;
        let (count, taking) = timed(|| ring.collect(found));
        let turn = &self.shared.turn;
        let _turn = turn.try_lock().unwrap_or_else(|_| {
            let turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            settle();
            turn
        });
        let (done, resetting) = timed(|| reset_rings(&self.vm));
        done?;
        emptied.pages += count;
        emptied.taking = emptied.taking.then(taking);
        emptied.resetting = emptied.resetting.then(resetting);
        Ok(())
    }
}

/// The signal that gets a thread out of the guest.
fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 3
}

/// Has the signal end a call, and nothing else.
fn handle_signal() {
    static ONCE: Once = Once::new();
    extern "C" fn nothing(_: libc::c_int) {}
    ONCE.call_once(|| {
        // SAFETY: `sigaction` is plain numbers, for which zeros are values.
        let mut action: libc::sigaction = unsafe { mem::zeroed() };
        action.sa_sigaction = nothing as *const () as usize;
        // SAFETY: `sigaction`: the handler does nothing, so it may run anywhere.
        unsafe { libc::sigaction(signal(), &raw const action, std::ptr::null_mut()) };
    });
}

/// Has the calling thread run on one CPU alone.
pub fn bind(cpu: usize) -> Result<(), Error> {
    // SAFETY: a set of CPUs is plain numbers, for which zeros are values.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(Error::Cpu { cpu });
    }
    // SAFETY: the number is below the size of a set.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: `sched_setaffinity`: of the calling thread, with a set of the size that is said.
    let bound = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    match bound {
        0 => Ok(()),
        _ => Err(Error::Cpu { cpu }),
    }
}
