//! The system calls of recording for which no library has a wrapper: userfaultfd, the scan of a
//! page map, ptrace.
//!
//! Numbers and layouts are those of the kernel's interface, which never change. They stand here
//! because C headers that are a little old do not have them.

use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Instant;

use libc::{c_int, c_long, c_uint, c_ulong, pid_t};

/// For userfaultfd: faults of user mode only, which needs no rights. With asynchronous write
/// protection no thread handles faults, and writes by the kernel are seen all the same.
const UFFD_USER_MODE_ONLY: c_int = 1;
/// Flags for userfaultfd, called by ourselves and in a process that is watched.
pub const UFFD_FLAGS: c_int = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;

const UFFDIO_API: c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: c_ulong = 0xc020_aa00;
const UFFD_API: u64 = 0xaa;
const FEATURE_WP: u64 = 1 << 0;
const FEATURE_WP_SHARED: u64 = 1 << 12;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const REGISTER_WP: u64 = 1 << 1;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

const PAGEMAP_SCAN: c_ulong = 0xc060_6610;

/// A mapping that is write-protected without a handler.
pub const WATCHED: u64 = 1 << 0;
/// Written since it was protected.
pub const WRITTEN: u64 = 1 << 1;
/// Of a file, and not a private copy.
pub const OF_FILE: u64 = 1 << 2;
/// In memory.
pub const PRESENT: u64 = 1 << 3;
/// In swap space.
pub const SWAPPED: u64 = 1 << 4;

/// Which pages a scan finds, and what it does to them.
#[derive(Clone, Copy)]
pub struct Filter {
    /// Categories whose meaning is turned round.
    pub inverted: u64,
    /// A page must have all of these.
    pub all: u64,
    /// And one of these, if there are any.
    pub any: u64,
    /// Which are told.
    pub told: u64,
    /// Protect what is found, in the same step.
    pub protect: bool,
}

/// Pages that a scan found.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Found {
    /// Address of the first byte.
    pub start: u64,
    /// And behind the last.
    pub end: u64,
    /// Those of the asked-for categories that they have.
    pub categories: u64,
}

#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Tells `visit` of the pages between two addresses that pass the filter, in order.
pub fn scan(
    pagemap: &File,
    start: u64,
    end: u64,
    filter: Filter,
    mut visit: impl FnMut(Found),
) -> io::Result<()> {
    const PROTECT_MATCHING: u64 = 1;
    let mut found = [Found::default(); 1024];
    let mut at = start;
    while at < end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            flags: if filter.protect { PROTECT_MATCHING } else { 0 },
            start: at,
            end,
            walk_end: 0,
            vec: found.as_mut_ptr().expose_provenance() as u64,
            vec_len: found.len() as u64,
            max_pages: 0,
            category_inverted: filter.inverted,
            category_mask: filter.all,
            category_anyof_mask: filter.any,
            return_mask: filter.told,
        };
        // SAFETY: the argument has the layout and size that this request wants, and names an array
        // of that length, which outlives the call. An older kernel refuses the request and touches
        // nothing.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as _, &mut argument) };
        match usize::try_from(count) {
            Ok(count) => found[..count.min(found.len())].iter().copied().for_each(&mut visit),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => continue,
                error => return Err(error),
            },
        }
        if argument.walk_end <= at {
            return Err(io::Error::other("a scan that goes nowhere"));
        }
        at = argument.walk_end;
    }
    Ok(())
}

/// A userfaultfd.
pub struct Userfault(OwnedFd);

impl Userfault {
    /// One for this process.
    pub fn own() -> io::Result<Self> {
        // SAFETY: takes flags and no pointers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, UFFD_FLAGS) };
        Self::ready(own(fd)?)
    }

    /// One that was opened, by whichever process: it protects that one's memory. Asks for
    /// asynchronous protection.
    pub fn ready(fd: OwnedFd) -> io::Result<Self> {
        let mut api = Api {
            api: UFFD_API,
            features: FEATURE_WP | FEATURE_WP_SHARED | FEATURE_WP_UNPOPULATED | FEATURE_WP_ASYNC,
            ioctls: 0,
        };
        // SAFETY: the argument has the layout that this request wants.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API as _, &mut api) }.into())?;
        Ok(Self(fd))
    }

    /// From now on pages of these addresses can be protected. Until they are, all count as written.
    pub fn register(&self, start: u64, len: u64) -> io::Result<()> {
        let mut register = Register { start, len, mode: REGISTER_WP, ioctls: 0 };
        // SAFETY: the argument has the layout that this request wants. Protection is asynchronous,
        // so no access of the watched process ever waits for us.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_REGISTER as _, &mut register) };
        check(done.into()).map(drop)
    }
}

/// A process, whatever else may get its number when it is gone.
pub struct Pidfd(OwnedFd);

impl Pidfd {
    /// The process that has this number now.
    pub fn open(pid: pid_t) -> io::Result<Self> {
        // SAFETY: takes a number and flags, and no pointers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        own(fd).map(Self)
    }

    /// A copy of one of its open files.
    pub fn file(&self, fd: RawFd) -> io::Result<OwnedFd> {
        // SAFETY: takes numbers and no pointers.
        own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.0.as_raw_fd(), fd, 0) })
    }

    /// Whether it has ended. Waits for that for so many milliseconds; a signal ends the wait.
    pub fn ended(&self, milliseconds: c_int) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which is there.
        unsafe { libc::poll(&mut poll, 1, milliseconds) == 1 }
    }
}

/// Why a thread reports to its tracer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It was asked to, or its process is stopped.
    Asked,
    /// A system call begins or ends.
    SystemCall,
    /// A signal is about to be delivered.
    Signal(c_int),
    /// Something else that only tracers see.
    Other,
    /// It is gone.
    Ended,
}

/// The registers of a thread.
pub use libc::user_regs_struct as Registers;

const PTRACE_EVENT_STOP: c_int = 128;
const PTRACE_GETSIGMASK: c_uint = 0x420a;
const PTRACE_SETSIGMASK: c_uint = 0x420b;
const PTRACE_GET_RSEQ_CONFIGURATION: c_uint = 0x420f;
const NT_PRSTATUS: usize = 1;

/// How a stopped thread goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Go {
    /// Until something happens.
    On,
    /// Until a system call begins or ends.
    ToSystemCall,
    /// Runs on, as if it had never been traced.
    Free,
}

/// Begins to trace a thread, which goes on. `past_seccomp`: its filter of system calls does not
/// apply while it is traced.
pub fn seize(tid: pid_t, past_seccomp: bool) -> io::Result<()> {
    let mut options = libc::PTRACE_O_TRACESYSGOOD;
    if past_seccomp {
        options |= libc::PTRACE_O_SUSPEND_SECCOMP;
    }
    ptrace(libc::PTRACE_SEIZE as _, tid, 0, options as usize)
}

/// Asks a traced thread to stop.
pub fn interrupt(tid: pid_t) -> io::Result<()> {
    ptrace(libc::PTRACE_INTERRUPT as _, tid, 0, 0)
}

/// Lets a stopped thread go, and gives it a signal unless that is 0.
pub fn go(tid: pid_t, how: Go, signal: c_int) -> io::Result<()> {
    let request = match how {
        Go::On => libc::PTRACE_CONT,
        Go::ToSystemCall => libc::PTRACE_SYSCALL,
        Go::Free => libc::PTRACE_DETACH,
    };
    ptrace(request as _, tid, 0, signal as usize)
}

/// Whether a traced thread has anything to report, and what.
pub fn reported(tid: pid_t) -> io::Result<Option<Stop>> {
    let mut status = 0;
    // SAFETY: the status is there to be written.
    let waited = unsafe { libc::waitpid(tid, &mut status, libc::__WALL | libc::WNOHANG) };
    if check(waited.into())? == 0 {
        return Ok(None);
    }
    Ok(Some(if !libc::WIFSTOPPED(status) {
        Stop::Ended
    } else if status >> 16 == PTRACE_EVENT_STOP {
        Stop::Asked
    } else if status >> 16 != 0 {
        Stop::Other
    } else {
        match libc::WSTOPSIG(status) {
            signal if signal == libc::SIGTRAP | 0x80 => Stop::SystemCall,
            signal => Stop::Signal(signal),
        }
    }))
}

/// The registers of a stopped thread.
pub fn registers(tid: pid_t) -> io::Result<Registers> {
    // SAFETY: registers are numbers, and zero is one.
    let mut registers: Registers = unsafe { mem::zeroed() };
    let mut buffer = libc::iovec {
        iov_base: ptr::from_mut(&mut registers).cast(),
        iov_len: size_of::<Registers>(),
    };
    let buffer = ptr::from_mut(&mut buffer).expose_provenance();
    // The buffer tells its own length, and outlives the call.
    ptrace(libc::PTRACE_GETREGSET as _, tid, NT_PRSTATUS, buffer)?;
    Ok(registers)
}

/// Sets the registers of a stopped thread.
pub fn set_registers(tid: pid_t, mut registers: Registers) -> io::Result<()> {
    let mut buffer = libc::iovec {
        iov_base: ptr::from_mut(&mut registers).cast(),
        iov_len: size_of::<Registers>(),
    };
    let buffer = ptr::from_mut(&mut buffer).expose_provenance();
    ptrace(libc::PTRACE_SETREGSET as _, tid, NT_PRSTATUS, buffer)
}

/// The signals that a stopped thread blocks.
pub fn signal_mask(tid: pid_t) -> io::Result<u64> {
    let mut mask = 0u64;
    let place = ptr::from_mut(&mut mask).expose_provenance();
    ptrace(PTRACE_GETSIGMASK, tid, size_of::<u64>(), place)?;
    Ok(mask)
}

/// Sets the signals that a stopped thread blocks.
pub fn set_signal_mask(tid: pid_t, mut mask: u64) -> io::Result<()> {
    let place = ptr::from_mut(&mut mask).expose_provenance();
    ptrace(PTRACE_SETSIGMASK, tid, size_of::<u64>(), place)
}

/// Returns the place where a stopped thread keeps the address of the restartable sequence that it
/// may be in.
pub fn restartable_sequence(tid: pid_t) -> Option<u64> {
    #[repr(C)]
    struct Configuration {
        area: u64,
        size: u32,
        signature: u32,
        flags: u32,
        pad: u32,
    }
    // SAFETY: all of these are numbers, and zero is one.
    let mut configuration: Configuration = unsafe { mem::zeroed() };
    let place = ptr::from_mut(&mut configuration).expose_provenance();
    let size = size_of::<Configuration>();
    ptrace(PTRACE_GET_RSEQ_CONFIGURATION, tid, size, place).ok()?;
    // Behind two words of 32 bits.
    (configuration.area != 0).then(|| configuration.area + 8)
}

/// Gives a process a signal.
pub fn send(pid: pid_t, signal: c_int) {
    // SAFETY: takes numbers. There is nothing to do if the process is gone.
    let _ = unsafe { libc::kill(pid, signal) };
}

fn ptrace(request: c_uint, tid: pid_t, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the callers above are all there are: each passes what its request wants, and buffers
    // that outlive the call and are as long as they say. What happens in the traced process is up
    // to those callers.
    let done = unsafe { libc::ptrace(request as _, tid, address, data) };
    check(done).map(drop)
}

/// Pages of this process alone, to try a method on.
pub struct Trial {
    start: ptr::NonNull<u8>,
    page: usize,
    pages: usize,
}

impl Trial {
    /// Maps a number of pages, all of them written once.
    pub fn new(pages: usize, page: usize) -> io::Result<Self> {
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                pages * page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        let start = match ptr::NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => start,
            _ => return Err(io::Error::last_os_error()),
        };
        let trial = Self { start, page, pages };
        // SAFETY: the mapping is ours. With huge pages the costs would be others; where there are
        // none this fails, and that is as good.
        let _ =
            unsafe { libc::madvise(start.as_ptr().cast(), trial.bytes(), libc::MADV_NOHUGEPAGE) };
        for page in 0..pages {
            trial.write(page);
        }
        Ok(trial)
    }

    /// Returns their address.
    pub fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.pages * self.page
    }

    /// How many.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Nanoseconds that a write takes longer when `protect` was called before: the least of several
    /// rounds, because other programs run as well.
    pub fn price<E>(&self, mut protect: impl FnMut() -> Result<(), E>) -> Result<u64, E> {
        let write = || {
            let clock = Instant::now();
            (0..self.pages).for_each(|page| self.write(page));
            clock.elapsed().as_nanos() as u64
        };
        let mut least = u64::MAX;
        for _ in 0..5 {
            protect()?;
            let with = write();
            least = least.min(with.saturating_sub(write()));
        }
        Ok(least / self.pages as u64)
    }

    /// Writes to one of them.
    pub fn write(&self, page: usize) {
        assert!(page < self.pages);
        // SAFETY: inside the mapping, as asserted. Volatile, because it is not read.
        unsafe { self.start.add(page * self.page).write_volatile(1) };
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        // SAFETY: our mapping, to which no reference was ever given out.
        let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes()) };
    }
}

/// Bytes of a page.
pub fn page_size() -> u64 {
    // SAFETY: takes a number.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

fn own(fd: c_long) -> io::Result<OwnedFd> {
    let fd = check(fd)?;
    // SAFETY: the kernel has just opened it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

fn check(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
