//! Processes with known patterns of writes, in lock step with the recorder.
//!
//! The process is this test program again, running one test that does as it is told: a line on its
//! input is an order, a line on its output says that it is done.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::harvest::WatchError;
use crate::layout::mapping_of;
use crate::method::{Method, Watcher};
use crate::process::{Process, ProcessError};
use crate::recording::{Recording, Run};
use crate::session::Options;
use crate::session::Session;
use crate::sys::page_size;

/// Marks the lines that are answers: the test harness prints there too.
const MARK: &str = "=> ";

/// The memory of a process under test.
struct Memory {
    start: *mut u8,
    pages: usize,
}

impl Memory {
    fn map(at: *mut u8, pages: usize, flags: i32, fd: i32) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let bytes = pages * page_size() as usize;
        // SAFETY: a new mapping, or one in the place of an old one to which there are no
        // references.
        let start = unsafe { libc::mmap(at.cast(), bytes, protection, flags, fd, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        let map = Self { start: start.cast(), pages };
        map.advise(libc::MADV_NOHUGEPAGE);
        map
    }

    /// Of huge pages a write makes all small pages new.
    fn advise(&self, advice: i32) {
        // SAFETY: our own mapping, in which nothing is kept.
        unsafe { libc::madvise(self.start.cast(), self.bytes(), advice) };
    }

    fn bytes(&self) -> usize {
        self.pages * page_size() as usize
    }

    fn page(&self, number: usize) -> *mut u8 {
        assert!(number < self.pages);
        // SAFETY: inside the mapping.
        unsafe { self.start.add(number * page_size() as usize) }
    }

    fn write(&self, first: usize, step: usize) {
        for number in (first..self.pages).step_by(step) {
            // SAFETY: inside the mapping.
            unsafe { self.page(number).write_volatile(number as u8 | 1) };
        }
    }

    fn read(&self) {
        for number in 0..self.pages {
            // SAFETY: inside the mapping.
            unsafe { self.page(number).read_volatile() };
        }
    }
}

// SAFETY: the threads that share it only do volatile accesses, and the test does not look at the
// values.
unsafe impl Sync for Memory {}

static ALARMS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_alarm(_: i32) {
    ALARMS.fetch_add(1, Ordering::Relaxed);
}

/// The process: not a test.
#[test]
#[ignore = "is what the other tests record"]
fn subject() {
    // The harness has threads. A child has this one alone, which is the one that is made to do
    // system calls. SAFETY: no other thread of ours holds a lock: the harness waits for this test.
    match unsafe { libc::fork() } {
        0 => {
            obey();
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) }
        }
        // SAFETY: our own child, whose state is not wanted.
        child => unsafe {
            libc::waitpid(child, ptr::null_mut(), 0);
        },
    }
}

/// Does what it is told until its input ends.
fn obey() {
    println!("{MARK}{}", std::process::id());
    const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let mut memory: Option<Memory> = None;
    while let Some(Ok(line)) = std::io::stdin().lines().next() {
        let mut words = line.split(' ');
        let order = words.next().unwrap();
        let numbers: Vec<usize> = words.map(|word| word.parse().unwrap()).collect();
        match order {
            "map" => memory = Some(Memory::map(ptr::null_mut(), numbers[0], ANONYMOUS, -1)),
            "reserve" => {
                memory = Some(Memory::map(
                    ptr::null_mut(),
                    numbers[0],
                    ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                ));
            }
            "huge" => {
                let all = Memory::map(ptr::null_mut(), 2048, ANONYMOUS, -1);
                // SAFETY: the last half of our own mapping; its first 2 MiB boundary is inside.
                let start = unsafe { all.start.add(all.start.align_offset(2 << 20)) };
                let map = Memory { start, pages: 1024 };
                map.advise(libc::MADV_HUGEPAGE);
                memory = Some(map);
            }
            "memfd" => {
                // SAFETY: a name and flags.
                let fd = unsafe { libc::memfd_create(c"subject".as_ptr(), 0) };
                // SAFETY: takes numbers.
                unsafe { libc::ftruncate(fd, (numbers[0] * page_size() as usize) as i64) };
                memory = Some(Memory::map(ptr::null_mut(), numbers[0], libc::MAP_SHARED, fd));
            }
            "file" => {
                use std::os::fd::AsRawFd;
                let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
                memory = Some(Memory::map(
                    ptr::null_mut(),
                    numbers[0],
                    libc::MAP_PRIVATE,
                    file.as_raw_fd(),
                ));
            }
            "constant" => {
                use std::os::fd::AsRawFd;
                let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
                let bytes = numbers[0] * page_size() as usize;
                // SAFETY: a new mapping.
                let start = unsafe {
                    libc::mmap(
                        ptr::null_mut(),
                        bytes,
                        libc::PROT_READ,
                        libc::MAP_SHARED,
                        file.as_raw_fd(),
                        0,
                    )
                };
                memory = Some(Memory { start: start.cast(), pages: numbers[0] });
            }
            "replace" => {
                let old = memory.take().unwrap();
                memory = Some(Memory::map(old.start, old.pages, ANONYMOUS | libc::MAP_FIXED, -1));
            }
            "move" => {
                let old = memory.take().unwrap();
                let new = Memory::map(ptr::null_mut(), old.pages, ANONYMOUS, -1);
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                // SAFETY: two mappings of our own, to which there are no references.
                let moved = unsafe {
                    libc::mremap(old.start.cast(), old.bytes(), old.bytes(), flags, new.start)
                };
                assert_eq!(moved, new.start.cast());
                memory = Some(new);
            }
            "write" => memory.as_ref().unwrap().write(numbers[0], numbers[1]),
            "read" => memory.as_ref().unwrap().read(),
            "discard" => memory.as_ref().unwrap().advise(libc::MADV_DONTNEED),
            "toggle" => {
                let memory = memory.as_ref().unwrap();
                for protection in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
                    // SAFETY: our own mapping.
                    unsafe { libc::mprotect(memory.start.cast(), memory.bytes(), protection) };
                }
            }
            "pipe" => {
                // The kernel writes: one byte to each page.
                let memory = memory.as_ref().unwrap();
                let zero = std::fs::File::open("/dev/zero").unwrap();
                for number in (numbers[0]..memory.pages).step_by(numbers[1]) {
                    use std::os::fd::AsRawFd;
                    // SAFETY: one byte inside the mapping.
                    unsafe { libc::read(zero.as_raw_fd(), memory.page(number).cast(), 1) };
                }
            }
            "threads" => {
                let memory = memory.as_ref().unwrap();
                std::thread::scope(|scope| {
                    let (threads, step) = (numbers[0], numbers[1]);
                    for thread in 0..threads {
                        scope.spawn(move || memory.write(thread, threads * step));
                    }
                });
            }
            "fork" => {
                // SAFETY: the child does nothing but wait and end.
                unsafe {
                    if libc::fork() == 0 {
                        libc::usleep(500_000);
                        libc::_exit(0);
                    }
                }
            }
            "nap" => {
                let nap = libc::timespec { tv_sec: 0, tv_nsec: numbers[0] as i64 * 1_000_000 };
                let clock = Instant::now();
                // SAFETY: a time that is there, and none wanted back.
                let result = unsafe { libc::nanosleep(&nap, ptr::null_mut()) };
                println!("{MARK}{result} {}", clock.elapsed().as_millis());
                continue;
            }
            "busy" => {
                // Works on numbers whose result is known, with a timer that interrupts it.
                // SAFETY: a handler that does one atomic addition, and a timer for it.
                unsafe {
                    libc::signal(libc::SIGALRM, count_alarm as *const () as usize);
                    let every = libc::timeval { tv_sec: 0, tv_usec: 1000 };
                    let timer = libc::itimerval { it_interval: every, it_value: every };
                    libc::setitimer(libc::ITIMER_REAL, &timer, ptr::null_mut());
                }
                let clock = Instant::now();
                let mut rounds = 0u64;
                while clock.elapsed() < Duration::from_millis(numbers[0] as u64) {
                    let sum: u64 = (0..1000u64).map(std::hint::black_box).sum();
                    assert_eq!(sum, 499_500);
                    rounds += 1;
                }
                assert!(rounds > 0);
                // SAFETY: no timer any more.
                unsafe { libc::setitimer(libc::ITIMER_REAL, &std::mem::zeroed(), ptr::null_mut()) };
                println!("{MARK}{}", ALARMS.load(Ordering::Relaxed));
                continue;
            }
            "uring" => {
                if !register_with_io_uring(memory.as_ref().unwrap()) {
                    println!("{MARK}0 0");
                    continue;
                }
            }
            "filter" => filter_userfaultfd(),
            "exit" => break,
            other => panic!("{other}"),
        }
        let (start, pages) = memory.as_ref().map_or((ptr::null_mut(), 0), |m| (m.start, m.pages));
        println!("{MARK}{} {pages}", start.addr() as u64 / page_size());
    }
}

/// Lets an io_uring write to the memory at any time. Not every user may.
fn register_with_io_uring(memory: &Memory) -> bool {
    const REGISTER_BUFFERS: u32 = 0;
    let mut parameters = [0u8; 120];
    let buffer = libc::iovec { iov_base: memory.start.cast(), iov_len: memory.bytes() };
    // SAFETY: parameters of the size that the kernel wants, one buffer of our own. The ring is
    // never closed.
    unsafe {
        let ring = libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr());
        ring >= 0
            && libc::syscall(libc::SYS_io_uring_register, ring, REGISTER_BUFFERS, &buffer, 1) == 0
    }
}

/// From now on a process that calls userfaultfd is killed.
fn filter_userfaultfd() {
    let load = libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 };
    let compare = libc::sock_filter { code: 0x15, jt: 0, jf: 1, k: libc::SYS_userfaultfd as u32 };
    let kill = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_KILL_PROCESS };
    let allow = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW };
    let mut filter = [load, compare, kill, allow];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: a filter of four instructions, which is there; for all threads.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &program,
        )
    };
    assert_eq!(set, 0);
}

/// A process under test.
struct Subject {
    harness: Child,
    pid: i32,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    map: Run,
}

impl Subject {
    fn start() -> Self {
        let mut harness = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::subject", "--ignored", "--nocapture", "--test-threads=1"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = harness.stdin.take().unwrap();
        let answers = BufReader::new(harness.stdout.take().unwrap());
        let map = Run { first: 0, pages: 0 };
        let mut subject = Self { harness, pid: 0, orders, answers, map };
        subject.pid = subject.answer()[0] as i32;
        subject
    }

    fn pid(&self) -> i32 {
        self.pid
    }

    fn ask(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    fn answer(&mut self) -> Vec<u64> {
        loop {
            let mut line = String::new();
            assert_ne!(self.answers.read_line(&mut line).unwrap(), 0, "the subject is gone");
            // The harness leaves its line open.
            if let Some((_, answer)) = line.split_once(MARK) {
                return answer.split_whitespace().map(|word| word.parse().unwrap()).collect();
            }
        }
    }

    fn tell(&mut self, order: &str) {
        self.ask(order);
        let answer = self.answer();
        self.map = Run { first: answer[0], pages: answer[1] };
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        // 0 would be all of this group.
        if self.pid > 0 {
            crate::sys::send(self.pid, libc::SIGKILL);
        }
        let _ = self.harness.wait();
    }
}

/// A process that is watched by one method.
struct Watched {
    subject: Subject,
    process: Process,
    watcher: Watcher,
}

impl Watched {
    fn new(method: Method, orders: &[&str]) -> Self {
        let mut subject = Subject::start();
        orders.iter().for_each(|order| subject.tell(order));
        let mut process = Process::open(subject.pid()).unwrap();
        let (mut watcher, stopped_ns) = Watcher::attach(method, &mut process).unwrap();
        assert!(stopped_ns < 5_000_000_000);
        watcher.harvest(&mut process).unwrap();
        Self { subject, process, watcher }
    }

    /// Which pages of the subject's mapping are reported after it did this.
    fn after(&mut self, order: &str) -> Vec<u64> {
        self.subject.tell(order);
        let harvest = self.watcher.harvest(&mut self.process).unwrap();
        for run in &harvest.written {
            assert!(
                harvest.seen.iter().any(|seen| seen.first <= run.first && run.end() <= seen.end())
            );
        }
        let map = self.subject.map;
        let written = harvest.written.iter().flat_map(|run| run.first..run.end());
        written
            .filter(|page| (map.first..map.end()).contains(page))
            .map(|page| page - map.first)
            .collect()
    }
}

/// Runs a test with each method that works here, and says so where none does.
fn with_each(test: impl Fn(Method)) {
    for method in Method::ALL {
        match method.probe() {
            Ok(_) => test(method),
            Err(reason) => eprintln!("skipped: {}: {reason}", method.name()),
        }
    }
}

fn every(first: u64, pages: u64, step: u64) -> Vec<u64> {
    (first..pages).step_by(step as usize).collect()
}

/// Whether two lists of pages are the same; if not, the first difference is told, and not the
/// lists.
#[track_caller]
fn same(found: Vec<u64>, expected: impl AsRef<[u64]>) {
    let expected = expected.as_ref();
    let equal = found.iter().zip(expected).take_while(|(one, other)| one == other);
    let place = equal.count();
    let (one, other) = (found.get(place), expected.get(place));
    assert!(
        one.is_none() && other.is_none(),
        "{} pages for {}; at place {place}: {one:?} for {other:?}",
        found.len(),
        expected.len()
    );
}

const NOTHING: [u64; 0] = [];

/// 64 MiB of pages of 4 KiB.
const MANY: u64 = 16384;

#[test]
fn a_known_pattern_is_recorded_exactly() {
    with_each(|method| {
        let mut watched = Watched::new(method, &["map 16384", "write 0 1"]);
        same(watched.after("write 0 10"), every(0, MANY, 10));
        same(watched.after("write 7 10"), every(7, MANY, 10));
        same(watched.after("read"), NOTHING);
        same(watched.after("write 0 1"), every(0, MANY, 1));
        same(watched.after("pipe 3 10"), every(3, MANY, 10));
        same(watched.after("threads 4 5"), {
            let mut pages: Vec<u64> = (0..4).flat_map(|first| every(first, MANY, 20)).collect();
            pages.sort_unstable();
            pages
        });
        same(watched.after("toggle"), NOTHING);
        same(watched.after("write 1 1000"), every(1, MANY, 1000));
    });
}

#[test]
fn mappings_that_come_are_followed() {
    with_each(|method| {
        let mut watched = Watched::new(method, &["map 10"]);
        same(watched.after("map 5000"), NOTHING);
        same(watched.after("write 0 10"), every(0, 5000, 10));
        same(watched.after("write 5 10"), every(5, 5000, 10));
        same(watched.after("write 5 20"), every(5, 5000, 20));
        // At the same address.
        same(watched.after("replace"), NOTHING);
        same(watched.after("write 1 7"), every(1, 5000, 7));
        same(watched.after("write 1 14"), every(1, 5000, 14));
        // What moved is new where it is now.
        same(watched.after("move"), every(1, 5000, 7));
        same(watched.after("write 1 14"), every(1, 5000, 14));
    });
}

#[test]
fn mappings_of_terabytes_cost_what_is_touched_of_them() {
    if Method::Scan.probe().is_err() {
        return eprintln!("skipped: no scans of the page map here");
    }
    // 1 TiB.
    let mut watched = Watched::new(Method::Scan, &["reserve 268435456"]);
    let step = (1 << 20) as u64;
    let clock = Instant::now();
    same(watched.after("write 5 1048576"), every(5, 1 << 28, step));
    same(watched.after("write 5 1048576"), every(5, 1 << 28, step));
    assert!(clock.elapsed() < Duration::from_secs(60));
}

#[test]
fn memory_of_files_and_shared_memory() {
    with_each(|method| {
        let mut watched = Watched::new(method, &["memfd 1000", "write 0 1"]);
        same(watched.after("read"), NOTHING);
        same(watched.after("write 2 3"), every(2, 1000, 3));
        // A private page of a file is not written by reading it.
        same(watched.after("file 1000"), NOTHING);
        same(watched.after("read"), NOTHING);
        same(watched.after("write 2 3"), every(2, 1000, 3));
        same(watched.after("write 2 9"), every(2, 1000, 9));
    });
}

#[test]
fn memory_that_cannot_be_written_is_not() {
    if Method::Scan.probe().is_err() {
        return eprintln!("skipped: no scans of the page map here");
    }
    let mut watched = Watched::new(Method::Scan, &["constant 1000", "read"]);
    same(watched.after("read"), NOTHING);
    same(watched.after("constant 500"), NOTHING);
    same(watched.after("read"), NOTHING);
    let harvest = watched.watcher.harvest(&mut watched.process).unwrap();
    for run in &harvest.written {
        let mapping = mapping_of(&harvest.map, run.first);
        assert!(mapping.is_some_and(|mapping| mapping.writable), "{run:?}");
    }
}

#[test]
fn what_was_given_back_is_found_when_it_is_used_again() {
    with_each(|method| {
        let mut watched = Watched::new(method, &["map 1000", "write 0 1"]);
        watched.after("discard");
        let written = watched.after("write 0 10");
        assert!(every(0, 1000, 10).iter().all(|page| written.contains(page)));
        same(watched.after("write 3 10"), every(3, 1000, 10));
    });
}

#[test]
fn a_parent_is_recorded_and_its_children_are_told_of() {
    with_each(|method| {
        let mut watched = Watched::new(method, &["map 1000", "write 0 1"]);
        same(watched.after("fork"), NOTHING);
        assert_eq!(watched.process.children(), 1);
        same(watched.after("write 0 10"), every(0, 1000, 10));
        same(watched.after("write 0 20"), every(0, 1000, 20));
    });
}

#[test]
fn a_write_splits_a_huge_page_and_is_one_page() {
    with_each(|method| {
        let mut watched = Watched::new(method, &["huge", "write 0 1"]);
        if watched.process.huge() == 0 {
            return eprintln!("skipped: no huge pages here");
        }
        same(watched.after("read"), NOTHING);
        let written = watched.after("write 5 512");
        if method == Method::Scan {
            assert_eq!(written, [5, 517]);
            assert!(watched.process.huge() < 4 << 20);
        }
    });
}

#[test]
fn the_process_does_not_notice() {
    with_each(|method| {
        let mut subject = Subject::start();
        subject.tell("map 10");
        let files = |subject: &Subject| {
            std::fs::read_dir(format!("/proc/{}/fd", subject.pid())).unwrap().count()
        };
        let before = files(&subject);

        // A system call that waits goes on waiting, for as long as it should.
        subject.ask("nap 400");
        for _ in 0..20 {
            let mut process = Process::open(subject.pid()).unwrap();
            let (mut watcher, _) = Watcher::attach(method, &mut process).unwrap();
            watcher.harvest(&mut process).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        let answer = subject.answer();
        assert_eq!(answer[0], 0);
        assert!((400..10_000).contains(&answer[1]), "{answer:?}");

        // Neither does one that computes, with signals all the time.
        subject.ask("busy 600");
        for _ in 0..50 {
            let mut process = Process::open(subject.pid()).unwrap();
            let (mut watcher, _) = Watcher::attach(method, &mut process).unwrap();
            watcher.harvest(&mut process).unwrap();
        }
        assert!(subject.answer()[0] > 10);

        let status = procfs::process::Process::new(subject.pid()).unwrap().status().unwrap();
        assert_eq!(status.tracerpid, 0);
        assert!(!status.state.starts_with(['T', 't']), "{}", status.state);
        assert_eq!(status.sigblk & !(1 << 63), 0);
        assert_eq!(files(&subject), before);
        subject.tell("write 0 1");
    });
}

#[test]
fn a_stopped_process_stays_stopped() {
    with_each(|method| {
        let mut subject = Subject::start();
        subject.tell("map 10");
        let state = |subject: &Subject| {
            let process = procfs::process::Process::new(subject.pid()).unwrap();
            process.status().unwrap().state
        };
        let wait_for = |subject: &Subject, letter: char| {
            let clock = Instant::now();
            while !state(subject).starts_with(letter) {
                assert!(clock.elapsed() < Duration::from_secs(5), "{}", state(subject));
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        crate::sys::send(subject.pid(), libc::SIGSTOP);
        wait_for(&subject, 'T');
        let mut process = Process::open(subject.pid()).unwrap();
        let (mut watcher, _) = Watcher::attach(method, &mut process).unwrap();
        watcher.harvest(&mut process).unwrap();
        wait_for(&subject, 'T');
        crate::sys::send(subject.pid(), libc::SIGCONT);
        subject.tell("write 0 1");
    });
}

#[test]
fn a_process_that_filters_its_system_calls_survives() {
    if Method::Scan.probe().is_err() {
        return eprintln!("skipped: no scans of the page map here");
    }
    let mut subject = Subject::start();
    subject.tell("map 10");
    subject.tell("filter");
    let mut process = Process::open(subject.pid()).unwrap();
    if let Err(error) = Watcher::attach(Method::Scan, &mut process) {
        assert!(error.to_string().contains("filters"), "{error}");
    }
    subject.tell("write 0 1");
}

#[test]
fn memory_that_others_may_write_to_is_told_of() {
    let mut subject = Subject::start();
    subject.tell("map 10");
    let process = Process::open(subject.pid()).unwrap();
    assert_eq!(process.direct_access(), [""; 0]);
    subject.tell("uring");
    if subject.map.pages == 0 {
        return eprintln!("skipped: no io_uring here");
    }
    let found = process.direct_access();
    assert!(found.iter().any(|way| way.contains("io_uring")), "{found:?}");
}

#[test]
fn a_recording_has_every_page_of_a_known_pattern() {
    with_each(|method| {
        let mut subject = Subject::start();
        subject.tell("map 16384");
        subject.tell("write 0 2");
        let options =
            Options { interval: Duration::from_millis(20), duration: None, intervals: None };
        let stop = AtomicBool::new(false);
        let mut bytes = Vec::new();
        std::thread::scope(|scope| {
            let process = Process::open(subject.pid()).unwrap();
            let (begun, wait) = std::sync::mpsc::channel();
            let (options, stop) = (&options, &stop);
            let recorder = scope.spawn(move || {
                let mut session = Session::begin(options, &[(method, 0)], process).unwrap();
                begun.send(()).unwrap();
                session.run(options, stop, || ());
                session.finish()
            });
            wait.recv().unwrap();
            for first in [1, 4, 7] {
                subject.tell(&format!("write {first} 10"));
                std::thread::sleep(Duration::from_millis(50));
            }
            stop.store(true, Ordering::Relaxed);
            bytes = recorder.join().unwrap();
        });
        let recording = Recording::parse(bytes).unwrap();
        assert_eq!(recording.summary().ended, "by a signal to the recorder");
        let mut times = vec![0; 16384];
        let mut present = vec![0; 16384];
        let count = |runs: &[Run], counts: &mut Vec<u64>| {
            for region in recording.regions() {
                for number in runs.iter().flat_map(|run| run.first..run.end()) {
                    let inside = number.checked_sub(region.page).filter(|&n| n < region.pages);
                    let page =
                        inside.and_then(|n| (region.first + n).checked_sub(subject.map.first));
                    if let Some(times) = page.and_then(|page| counts.get_mut(page as usize)) {
                        *times += 1;
                    }
                }
            }
        };
        count(recording.present(), &mut present);
        for interval in recording.intervals() {
            count(&interval.runs, &mut times);
        }
        let mut again = 0;
        for page in 0..16384 {
            assert_eq!(present[page], u64::from(page % 2 == 0), "page {page}");
            if [1, 4, 7].contains(&(page % 10)) {
                assert!(times[page] >= 1, "page {page}");
                again += times[page] - 1;
            } else {
                assert_eq!(times[page], 0, "page {page}");
            }
        }
        // A store whose fault is over and that is not done itself, at the time of a harvest, has
        // another fault.
        let harvests = recording.summary().intervals;
        assert!(again <= harvests, "{again} of {harvests}");
    });
}

#[test]
fn a_process_that_is_gone_is_an_error() {
    with_each(|method| {
        let mut watched = Watched::new(method, &["map 10"]);
        watched.subject.ask("exit");
        watched.subject.harness.wait().unwrap();
        let harvest = watched.watcher.harvest(&mut watched.process);
        assert!(matches!(harvest, Err(WatchError::Gone)), "{:?}", harvest.err());
        let again = Process::open(watched.subject.pid());
        assert!(matches!(again, Err(ProcessError::None)));
    });
}

#[test]
fn what_is_no_process_is_refused() {
    let refused = |pid| Process::open(pid).map(drop).unwrap_err();
    // Larger than any number that is given to a process.
    assert!(matches!(refused(i32::MAX), ProcessError::None));
    assert!(matches!(refused(std::process::id().cast_signed()), ProcessError::Recorder));
}
