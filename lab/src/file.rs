//! Files: read up to a limit, and replaced as a whole.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::size::human;

/// Little that this program reads is larger, and `/dev/zero` is never read to its end.
const LIMIT: u64 = 16 << 20;

/// The bytes of a file that should be a `kind`.
pub fn read(path: &Path, kind: &'static str) -> Result<Vec<u8>, Error> {
    read_up_to(path, LIMIT, kind)
}

/// Opens a file that can be mapped. To open a pipe would wait for its other end.
pub fn open_regular(path: &Path) -> io::Result<File> {
    match fs::metadata(path)? {
        it if it.is_file() => File::open(path),
        it if it.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        _ => Err(io::Error::other("not a regular file")),
    }
}

/// The first bytes of a file, at most so many.
pub fn start_of(path: &Path, bytes: u64) -> Result<Vec<u8>, Error> {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(bytes).read_to_end(&mut start));
    read.map_err(|error| Error::Read { path: path.to_owned(), error })?;
    Ok(start)
}

/// Reads a file of a kind that may be up to `limit` bytes long.
pub fn read_up_to(path: &Path, limit: u64, kind: &'static str) -> Result<Vec<u8>, Error> {
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| Error::Read { path: path.to_owned(), error })?;
    if bytes.len() as u64 > limit {
        let problem = format!("larger than {}, which no {kind} is", human(limit));
        return Err(Error::input(path.display(), problem));
    }
    Ok(bytes)
}

/// Bytes that most results fit into: a disk without these is full.
const ROOM: usize = 64 << 10;

/// A file for a result: known to be writable before the work starts, and untouched until the result
/// is complete.
pub struct Target {
    /// The option that asked for it.
    option: &'static str,
    path: PathBuf,
    /// The file's neighbour, which takes its place once it is written.
    draft: PathBuf,
    /// Its directory is made with it.
    is_made_with_directory: bool,
}

impl Target {
    /// Checks that there will be no trouble later. `option` asked for the file.
    pub fn new(option: &'static str, path: &Path) -> Result<Self, Error> {
        let named = |error| Error::Output { option, path: path.to_owned(), error };
        let target = Self::beside(option, path).map_err(named)?;
        target.try_in(directory_of(&target.path)).map_err(named)?;
        Ok(target)
    }

    /// The picture of `--plot`, if one is asked for.
    pub fn of_plot(path: Option<&Path>) -> Result<Option<Self>, Error> {
        path.map(|path| Self::new("--plot", path)).transpose()
    }

    /// The page of that name in the directory of `--report`, which is made if there is none, with
    /// the page and not before.
    pub fn report(directory: &Path, name: &str) -> Result<Self, Error> {
        let named = |error| Error::Output { option: "--report", path: directory.to_owned(), error };
        let nearest = directory.ancestors().find(|it| it.exists());
        match nearest {
            Some(found) if found == directory && found.is_dir() => {
                Self::new("--report", &directory.join(name))
            }
            Some(found) if found == directory => {
                Err(named(io::Error::from_raw_os_error(libc::EEXIST)))
            }
            // Of a relative name nothing is left in the end: that is here.
            found => {
                let mut target = Self::beside("--report", &directory.join(name)).map_err(named)?;
                target.is_made_with_directory = true;
                target.try_in(found.unwrap_or(Path::new("."))).map_err(named)?;
                Ok(target)
            }
        }
    }

    /// That a file can be made there, and has room. Nothing stays behind if the program is stopped
    /// meanwhile, where files need no name.
    fn try_in(&self, directory: &Path) -> io::Result<()> {
        match nameless(directory) {
            Some(file) => file?.write_all(&[0; ROOM]),
            None => {
                let name = self.draft.file_name().unwrap_or_default();
                let path = directory.join(name);
                let written = File::create_new(&path)?.write_all(&[0; ROOM]);
                fs::remove_file(&path).and(written)
            }
        }
    }

    fn beside(option: &'static str, path: &Path) -> io::Result<Self> {
        // What a link names is replaced, not the link.
        let path = match fs::canonicalize(path) {
            Ok(path) if path.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            // A device or a pipe would be replaced by a file.
            Ok(path) if !path.is_file() => return Err(io::Error::other("not a regular file")),
            Ok(path) => {
                fs::OpenOptions::new().write(true).open(&path)?;
                path
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(error),
        };
        let Some(name) = path.file_name() else {
            return Err(io::Error::other("not the name of a file"));
        };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}", std::process::id()));
        let draft = path.with_file_name(hidden);
        Ok(Self { option, path, draft, is_made_with_directory: false })
    }

    /// Puts the result there, all of it or nothing.
    pub fn fill(self, contents: &(impl AsRef<[u8]> + ?Sized)) -> Result<(), Error> {
        let written = |mut file: File| -> io::Result<File> {
            file.write_all(contents.as_ref())?;
            file.sync_all()?;
            Ok(file)
        };
        let directory = directory_of(&self.path);
        let fill = || -> io::Result<()> {
            if self.is_made_with_directory {
                fs::create_dir_all(directory)?;
            }
            match nameless(directory) {
                Some(file) => {
                    let file = written(file?)?;
                    match give_name(&file, &self.path) {
                        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                            take_place(&file, &self.draft, &self.path)
                        }
                        named => named,
                    }
                }
                None => {
                    drop(written(File::create_new(&self.draft)?)?);
                    fs::rename(&self.draft, &self.path)
                }
            }
        };
        fill().map_err(|error| {
            // The first error is the one to tell.
            let _ = fs::remove_file(&self.draft);
            Error::Output { option: self.option, path: self.path.clone(), error }
        })
    }
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Directory in which Linux names open files.
#[cfg(target_os = "linux")]
const DESCRIPTORS: &str = "/proc/self/fd";

/// A file without a name in a directory: nothing is left of it whenever the program ends. None
/// where file systems have no such.
#[cfg(target_os = "linux")]
fn nameless(directory: &Path) -> Option<io::Result<File>> {
    use std::os::unix::fs::OpenOptionsExt as _;
    if !Path::new(DESCRIPTORS).exists() {
        return None;
    }
    let mut options = File::options();
    let file = options.write(true).custom_flags(libc::O_TMPFILE).open(directory);
    match &file {
        // The last is of kernels that do not know of it.
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EOPNOTSUPP | libc::EINVAL | libc::EISDIR)
            ) =>
        {
            None
        }
        _ => Some(file),
    }
}

/// Names as the kernel has them.
#[cfg(target_os = "linux")]
fn named(path: &Path) -> io::Result<std::ffi::CString> {
    use std::os::unix::ffi::OsStrExt as _;
    Ok(std::ffi::CString::new(path.as_os_str().as_bytes())?)
}

/// The name of an open file.
#[cfg(target_os = "linux")]
fn descriptor(file: &File) -> io::Result<std::ffi::CString> {
    use std::os::fd::AsRawFd as _;
    named(Path::new(&format!("{DESCRIPTORS}/{}", file.as_raw_fd())))
}

/// The call itself: zero, or less and the reason in `errno`.
#[cfg(target_os = "linux")]
fn link(descriptor: &std::ffi::CStr, path: &std::ffi::CStr) -> libc::c_int {
    let (here, follow) = (libc::AT_FDCWD, libc::AT_SYMLINK_FOLLOW);
    // SAFETY: `linkat`: both names end with a zero.
    unsafe { libc::linkat(here, descriptor.as_ptr(), here, path.as_ptr(), follow) }
}

/// Gives it one that there is not yet.
#[cfg(target_os = "linux")]
fn give_name(file: &File, path: &Path) -> io::Result<()> {
    match link(&descriptor(file)?, &named(path)?) {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives it the name of another file, whose place it takes. The kernel wants two calls for that,
/// and between them the file has a name that may not stay: they are made by a process that does not
/// end with this one, whatever ends this.
#[cfg(target_os = "linux")]
fn take_place(file: &File, draft: &Path, path: &Path) -> io::Result<()> {
    let (file, draft, path) = (descriptor(file)?, named(draft)?, named(path)?);
    let both = || -> libc::c_int {
        // SAFETY: `rename`: both names end with a zero. `__errno_location`: of this thread.
        unsafe {
            if link(&file, &draft) == 0 && libc::rename(draft.as_ptr(), path.as_ptr()) == 0 {
                return 0;
            }
            *libc::__errno_location()
        }
    };
    let failed = |errno| match errno {
        0 => Ok(()),
        _ => Err(io::Error::from_raw_os_error(errno)),
    };
    // SAFETY: `fork`: the child, of which there is one thread, only makes calls of the kernel: it
    // takes no lock that another thread held, allocates nothing, and ends without what a program
    // does at its end.
    let child = unsafe { libc::fork() };
    match child {
        // As many processes as there may be.
        -1 => failed(both()),
        0 => {
            // SAFETY: `setsid`, `_exit`: plain calls. What a terminal sends to the program is not
            // for a session of its own.
            unsafe {
                libc::setsid();
                libc::_exit(both())
            }
        }
        _ => {
            let mut status = 0;
            // SAFETY: `waitpid`: of the child above, with a place for its status.
            while unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            match libc::WIFEXITED(status) {
                true => failed(libc::WEXITSTATUS(status)),
                false => Err(io::ErrorKind::Interrupted.into()),
            }
        }
    }
}

/// Elsewhere a file has a name from the beginning.
#[cfg(not(target_os = "linux"))]
fn nameless(_: &Path) -> Option<io::Result<File>> {
    None
}

/// None needs one.
#[cfg(not(target_os = "linux"))]
fn give_name(_: &File, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Nor takes another's.
#[cfg(not(target_os = "linux"))]
fn take_place(_: &File, _: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_untouched_until_it_is_filled_and_leaves_nothing_beside_it() {
        let directory =
            std::env::temp_dir().join(format!("tablewright-file-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let names = || -> Vec<_> {
            fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect()
        };
        let path = directory.join("a.svg");
        let target = Target::new("--plot", &path).unwrap();
        assert!(names().is_empty());
        target.fill("one").unwrap();
        assert_eq!(names(), ["a.svg"]);

        let target = Target::new("--plot", &path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        target.fill("two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(names(), ["a.svg"]);

        // A directory of a report is there when its page is.
        let target = Target::report(&directory.join("b/c"), "d.html").unwrap();
        assert_eq!(names(), ["a.svg"]);
        target.fill("page").unwrap();
        assert_eq!(fs::read(directory.join("b/c/d.html")).unwrap(), b"page");
        for wrong in ["a.svg", "a.svg/b"] {
            assert!(Target::report(&directory.join(wrong), "d.html").is_err());
        }
        fs::remove_dir_all(directory.join("b")).unwrap();

        // The directory disappears while the program measures.
        let target = Target::new("--plot", &path).unwrap();
        fs::remove_dir_all(&directory).unwrap();
        let failed = target.fill("three").unwrap_err();
        assert!(failed.to_string().contains(&path.display().to_string()), "{failed}");
    }

    /// Replaces a file until the next test kills it.
    #[cfg(target_os = "linux")]
    #[test]
    #[ignore = "has no end: `a_file_that_replaces_another_leaves_no_draft_when_it_is_killed` runs \
             it"]
    fn replaces_a_file_for_ever() {
        let path = std::env::var("TABLEWRIGHT_REPLACED").unwrap();
        for number in 0_u64.. {
            let contents = format!("{number:0>8192}");
            let target = Target::new("--report", Path::new(&path)).unwrap();
            target.fill(&contents).unwrap();
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_that_replaces_another_leaves_no_draft_when_it_is_killed() {
        use std::process::{Command, Stdio};
        use std::time::{Duration, Instant};
        let directory =
            std::env::temp_dir().join(format!("tablewright-replaced-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let path = directory.join("page");
        fs::write(&path, "0".repeat(8192)).unwrap();
        let names = || fs::read_dir(&directory).unwrap().count();
        for kill in 0..20 {
            let before = fs::read(&path).unwrap();
            let mut program = Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "file::tests::replaces_a_file_for_ever"])
                .env("TABLEWRIGHT_REPLACED", &path)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let begin = Instant::now();
            while fs::read(&path).unwrap() == before && begin.elapsed() < Duration::from_secs(20) {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_micros(137 * kill));
            program.kill().unwrap();
            program.wait().unwrap();
            // The process that has the two calls to make may be at it still, and holds the pipe
            // until it is through.
            let mut said = String::new();
            program.stdout.take().unwrap().read_to_string(&mut said).unwrap();
            assert_eq!(names(), 1, "kill {kill}");
            assert_eq!(fs::metadata(&path).unwrap().len(), 8192, "kill {kill}");
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}
