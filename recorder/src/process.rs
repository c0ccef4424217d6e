//! A process that is recorded, as `/proc` shows it.
//!
//! The files are opened once. They belong to an address space, not to a number: when the process
//! ends, or becomes another program, its old map is empty from then on, whatever has its number
//! next.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::RawFd;
use std::process::Child;

use libc::pid_t;
use procfs::ProcError;

use crate::layout::Mapping;
use crate::recording::Run;
use crate::sys::{Pidfd, page_size};

/// A process and its address space.
pub struct Process {
    pid: pid_t,
    pidfd: Pidfd,
    files: procfs::process::Process,
    maps: File,
    /// One word for each page, and where scans are asked for.
    pub pagemap: File,
    /// Its memory, by address.
    pub memory: File,
    page: u64,
}

/// Why a process cannot be recorded.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// No process has this number.
    #[error("there is no such process")]
    None,
    /// The number of a thread.
    #[error("this is a thread, not a process")]
    Thread,
    /// It ends, or has no memory of its own.
    #[error("it has no memory: it has ended, or is part of the kernel")]
    NoMemory,
    /// Another user's.
    #[error(
        "not permitted: recording a process takes the right to trace it, as its user or as root"
    )]
    NotPermitted,
    /// A debugger has it.
    #[error("process {0} traces it")]
    Traced(i32),
    /// Its system calls have other numbers.
    #[error("it is a 32-bit program")]
    Bits,
    /// Would wait for itself.
    #[error("this is the recorder")]
    Recorder,
    /// Something else.
    #[error("{0}")]
    Other(String),
}

impl From<ProcError> for ProcessError {
    fn from(error: ProcError) -> Self {
        match error {
            ProcError::PermissionDenied(_) => Self::NotPermitted,
            ProcError::NotFound(_) => Self::None,
            ProcError::Io(error, _) => error.into(),
            other => Self::Other(other.to_string()),
        }
    }
}

impl From<io::Error> for ProcessError {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ESRCH | libc::ENOENT) => Self::None,
            Some(libc::EPERM | libc::EACCES) => Self::NotPermitted,
            _ => Self::Other(error.to_string()),
        }
    }
}

impl Process {
    /// That of a command which was just started: it takes a while until it has its memory.
    ///
    /// # Errors
    /// As [`open`](Process::open); it may have ended.
    pub fn of_command(command: &mut Child) -> Result<Self, ProcessError> {
        loop {
            match Self::open(command.id().cast_signed()) {
                Err(ProcessError::NoMemory | ProcessError::None) => match command.try_wait() {
                    Ok(None) => std::thread::yield_now(),
                    _ => return Err(ProcessError::NoMemory),
                },
                result => return result,
            }
        }
    }

    /// The process that has this number now, if it can be recorded.
    pub fn open(pid: pid_t) -> Result<Self, ProcessError> {
        let pidfd = Pidfd::open(pid).map_err(|error| match error.raw_os_error() {
            // An older kernel says EINVAL, a newer one ENOENT.
            Some(libc::EINVAL | libc::ENOENT) if pid > 0 => ProcessError::Thread,
            _ => error.into(),
        })?;
        if pid == std::process::id().cast_signed() {
            return Err(ProcessError::Recorder);
        }
        let files = procfs::process::Process::new(pid)?;
        let status = files.status()?;
        if status.tracerpid != 0 {
            return Err(ProcessError::Traced(status.tracerpid));
        }
        let page = page_size();
        let mut maps = files.open_relative("maps")?;
        if read_map(&mut maps, page)?.is_empty() {
            return Err(ProcessError::NoMemory);
        }
        let process = Self {
            pid,
            pidfd,
            maps,
            pagemap: files.open_relative("pagemap")?,
            memory: File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?,
            files,
            page,
        };
        // Magic number, then one byte for the class.
        let mut head = [0; 5];
        let exe = process.files.open_relative("exe")?;
        std::os::unix::fs::FileExt::read_exact_at(&exe, &mut head, 0)?;
        if head != *b"\x7fELF\x02" && cfg!(target_pointer_width = "64") {
            return Err(ProcessError::Bits);
        }
        Ok(process)
    }

    /// Its number.
    pub fn pid(&self) -> pid_t {
        self.pid
    }

    /// Its files in `/proc`.
    pub fn files(&self) -> &procfs::process::Process {
        &self.files
    }

    /// A copy of one of its open files.
    pub fn file(&self, fd: RawFd) -> io::Result<std::os::fd::OwnedFd> {
        self.pidfd.file(fd)
    }

    /// Whether it has ended, waiting for that for so many milliseconds at most. A signal ends the
    /// wait.
    pub fn ended(&self, milliseconds: i32) -> bool {
        self.pidfd.ended(milliseconds)
    }

    /// Returns the present mappings, by address; nothing if the address space is gone.
    pub fn map(&mut self) -> Result<Vec<Mapping>, ProcessError> {
        read_map(&mut self.maps, self.page)
    }

    /// Whether it still has the address space that it was opened with.
    pub fn is_same(&mut self) -> bool {
        let read = self.maps.rewind().and_then(|()| self.maps.read(&mut [0]));
        read.is_ok_and(|bytes| bytes > 0)
    }

    /// Addresses of its code, the kernel's page for system calls first.
    pub fn code(&mut self) -> Result<Vec<(u64, u64)>, ProcessError> {
        let mut code = self.map()?;
        code.retain(|mapping| mapping.executable);
        code.sort_by_key(|mapping| mapping.name != "[vdso]");
        let address = |page| page * self.page;
        Ok(code
            .into_iter()
            .map(|mapping| (address(mapping.run.first), address(mapping.run.end())))
            .collect())
    }

    /// Its threads that can still do something.
    pub fn threads(&self) -> Result<Vec<pid_t>, ProcessError> {
        let mut threads = Vec::new();
        for task in self.files.tasks()?.flatten() {
            if task.stat().is_ok_and(|stat| !matches!(stat.state, 'Z' | 'X')) {
                threads.push(task.tid);
            }
        }
        // The first is the one that the process began with, if that is left.
        threads.sort_by_key(|&tid| (tid != self.pid, tid));
        Ok(threads)
    }

    /// Clears its soft-dirty bits.
    pub fn clear_soft_dirty(&self) -> Result<(), ProcessError> {
        Ok(self.files.clear_refs(procfs::process::ClearRefs::SoftDirty)?)
    }

    /// Bytes of it in huge pages.
    pub fn huge(&self) -> u64 {
        let rollup = self.files.smaps_rollup().ok();
        let maps = rollup.map(|rollup| rollup.memory_map_rollup.0);
        maps.into_iter()
            .flatten()
            .filter_map(|map| map.extension.map.get("AnonHugePages").copied())
            .sum()
    }

    /// Returns the command that it was started with, on one line.
    pub fn command(&self) -> String {
        match self.files.cmdline() {
            Ok(words) if !words.is_empty() => words.join(" "),
            _ => self.files.stat().map(|stat| stat.comm).unwrap_or_default(),
        }
    }

    /// How many processes it started that run now.
    pub fn children(&self) -> usize {
        let Ok(tasks) = self.files.tasks() else {
            return 0;
        };
        tasks.flatten().filter_map(|task| task.children().ok()).map(|children| children.len()).sum()
    }

    /// Returns the ways in which a device may write to its memory without a page fault, in words. A
    /// guest of KVM is not among it: its writes fault in the host.
    pub fn direct_access(&self) -> Vec<&'static str> {
        let mut found = Vec::new();
        if self.files.status().is_ok_and(|status| status.vmpin.is_some_and(|kib| kib > 0)) {
            found.push("pinned memory");
        }
        for fd in self.files.fd().into_iter().flatten().flatten() {
            use procfs::process::FDTarget::{AnonInode, Path};
            let way = match &fd.target {
                AnonInode(kind) if kind.contains("io_uring") => {
                    match self.registered_buffers(fd.fd) {
                        true => "buffers registered with io_uring",
                        false => continue,
                    }
                }
                Path(path) if path.starts_with("/dev/vfio") => "a device assigned to it",
                Path(path) if path.starts_with("/dev/infiniband") => "an RDMA adapter",
                _ => continue,
            };
            if !found.contains(&way) {
                found.push(way);
            }
        }
        found
    }

    /// Whether an io_uring has buffers that it may write to at any time.
    fn registered_buffers(&self, fd: RawFd) -> bool {
        let mut text = String::new();
        let read = self
            .files
            .open_relative(format!("fdinfo/{fd}"))
            .map(|mut file| file.read_to_string(&mut text));
        // What cannot be read may have any.
        if !matches!(read, Ok(Ok(_))) {
            return true;
        }
        text.lines()
            .find_map(|line| line.strip_prefix("UserBufs:"))
            .is_none_or(|count| count.trim() != "0")
    }
}

fn read_map(maps: &mut File, page: u64) -> Result<Vec<Mapping>, ProcessError> {
    let mut text = Vec::new();
    maps.rewind()?;
    match maps.read_to_end(&mut text) {
        // Read after its end.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(Vec::new()),
        result => result?,
    };
    Ok(parse(&text, page))
}

/// Reads the text of `/proc/PID/maps`: `START-END PERMISSIONS OFFSET DEVICE INODE [NAME]`, with
/// names of any bytes but a line break. What is read in pieces may overlap where it changed in
/// between; the later piece is left out.
fn parse(text: &[u8], page: u64) -> Vec<Mapping> {
    let mut map: Vec<Mapping> = Vec::new();
    for line in text.split(|&byte| byte == b'\n') {
        let line = String::from_utf8_lossy(line);
        let fields: Vec<_> = line.splitn(6, ' ').collect();
        let field = |number: usize| fields.get(number).copied().unwrap_or_default();
        let (range, permissions, name) = (field(0), field(1), field(5).trim().to_owned());
        let address = |digits| u64::from_str_radix(digits, 16).ok();
        let ends =
            range.split_once('-').and_then(|(start, end)| Some((address(start)?, address(end)?)));
        let Some((start, end)) = ends else { continue };
        let behind = map.last().map_or(0, |last| last.run.end());
        // Behind the addresses of user mode there is one page, which is the kernel's.
        if start / page < behind || end <= start || end >> 63 != 0 {
            continue;
        }
        let may = |letter| permissions.contains(letter);
        map.push(Mapping {
            run: Run { first: start / page, pages: (end - start) / page },
            private: may('p'),
            readable: may('r'),
            writable: may('w'),
            executable: may('x'),
            name,
        });
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_read_whatever_names_are_in_it() {
        let text = b"\
55d0c5a00000-55d0c5a21000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000004000 r-xp 00001000 fe:00 1234                       /SYSV x\xff y
7f0000002000-7f0000005000 rw-p 00000000 00:00 0
7f0000005000-7f0000006000 rw-s 00000000 00:01 7 /memfd:a (deleted)
nonsense
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";
        let map = parse(text, 4096);
        let names: Vec<_> = map.iter().map(|mapping| mapping.name.as_str()).collect();
        assert_eq!(names, ["[heap]", "/SYSV x\u{fffd} y", "/memfd:a (deleted)"]);
        assert_eq!(map[0].run, Run { first: 0x5_5d0c_5a00, pages: 0x21 });
        assert!(map[0].writable && map[0].private && !map[0].executable);
        assert!(map[1].executable && !map[1].writable);
        assert!(!map[2].private);
    }
}
