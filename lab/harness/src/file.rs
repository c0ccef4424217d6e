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

/// The same, of a kind that may be up to `limit` bytes long.
pub fn read_up_to(path: &Path, limit: u64, kind: &'static str) -> Result<Vec<u8>, Error> {
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| Error::Read {
        path: path.to_owned(),
        error,
    })?;
    if bytes.len() as u64 > limit {
        let problem = format!("larger than {}, which no {kind} is", human(limit));
        return Err(Error::input(path.display(), problem));
    }
    Ok(bytes)
}

/// Where a result goes: known to be writable before the work starts, and untouched until the result is complete.
pub struct Target {
    path: PathBuf,
    /// The file's neighbour, which takes its place once it is written.
    draft: PathBuf,
    /// Its directory is made with it.
    is_made_with_directory: bool,
}

impl Target {
    /// Checks that there will be no trouble later. `option` asked for the file.
    pub fn new(option: &'static str, path: &Path) -> Result<Self, Error> {
        let named = |error| Error::Output {
            option,
            path: path.to_owned(),
            error,
        };
        let target = Self::beside(path).map_err(named)?;
        target.try_in(directory_of(&target.path)).map_err(named)?;
        Ok(target)
    }

    /// The page of that name in the directory of `--report`, which is made if there is none, with the page and not before.
    pub fn report(directory: &Path, name: &str) -> Result<Self, Error> {
        let named = |error| Error::Output {
            option: "--report",
            path: directory.to_owned(),
            error,
        };
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
                let mut target = Self::beside(&directory.join(name)).map_err(named)?;
                target.is_made_with_directory = true;
                target
                    .try_in(found.unwrap_or(Path::new(".")))
                    .map_err(named)?;
                Ok(target)
            }
        }
    }

    /// That a file can be made there. Nothing stays behind if the program is stopped meanwhile, where files need no name.
    fn try_in(&self, directory: &Path) -> io::Result<()> {
        match nameless(directory) {
            Some(file) => file.map(|_| ()),
            None => {
                let name = self.draft.file_name().unwrap_or_default();
                let file = directory.join(name);
                File::create_new(&file).and_then(|_| fs::remove_file(&file))
            }
        }
    }

    fn beside(path: &Path) -> io::Result<Self> {
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
        Ok(Self {
            path,
            draft,
            is_made_with_directory: false,
        })
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
                            give_name(&file, &self.draft)?;
                        }
                        named => return named,
                    }
                }
                None => drop(written(File::create_new(&self.draft)?)?),
            }
            fs::rename(&self.draft, &self.path)
        };
        fill().map_err(|error| {
            // The first error is the one to tell.
            let _ = fs::remove_file(&self.draft);
            Error::Write(error)
        })
    }
}

/// Where a file is.
fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Where open files have names.
#[cfg(target_os = "linux")]
const DESCRIPTORS: &str = "/proc/self/fd";

/// A file without a name in a directory: nothing is left of it whenever the program ends. None where file systems have no such.
#[cfg(target_os = "linux")]
fn nameless(directory: &Path) -> Option<io::Result<File>> {
    use std::os::unix::fs::OpenOptionsExt as _;
    if !Path::new(DESCRIPTORS).exists() {
        return None;
    }
    let mut options = File::options();
    let file = options
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .open(directory);
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

/// Gives it one that there is not yet.
#[cfg(target_os = "linux")]
fn give_name(file: &File, path: &Path) -> io::Result<()> {
    use std::ffi::CString;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::ffi::OsStrExt as _;
    let descriptor = CString::new(format!("{DESCRIPTORS}/{}", file.as_raw_fd()))?;
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `linkat`: both names end with a zero.
    let linked = unsafe {
        libc::linkat(
            libc::AT_FDCWD,
            descriptor.as_ptr(),
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_SYMLINK_FOLLOW,
        )
    };
    match linked {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_untouched_until_it_is_filled_and_leaves_nothing_beside_it() {
        let directory =
            std::env::temp_dir().join(format!("tablewright-file-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let names = || -> Vec<_> {
            fs::read_dir(&directory)
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect()
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
        assert!(matches!(target.fill("three"), Err(Error::Write(_))));
    }
}
