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
        return Err(Error::TooLarge {
            path: path.to_owned(),
            limit: human(limit),
            kind,
        });
    }
    Ok(bytes)
}

/// Where a result goes: known to be writable before the work starts, and untouched until the result is complete.
pub struct Target {
    path: PathBuf,
    /// The file's neighbour, which takes its place once it is written.
    draft: PathBuf,
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
        // Nothing stays behind if the program is stopped while it measures.
        fs::File::create_new(&target.draft)
            .and_then(|_| fs::remove_file(&target.draft))
            .map_err(named)?;
        Ok(target)
    }

    /// The page of that name in the directory of `--report`, which is made if there is none.
    pub fn report(directory: &Path, name: &str) -> Result<Self, Error> {
        fs::create_dir_all(directory).map_err(|error| Error::Output {
            option: "--report",
            path: directory.to_owned(),
            error,
        })?;
        Self::new("--report", &directory.join(name))
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
        Ok(Self { path, draft })
    }

    /// Puts the result there, all of it or nothing.
    pub fn fill(self, contents: &(impl AsRef<[u8]> + ?Sized)) -> Result<(), Error> {
        fs::File::create_new(&self.draft)
            .and_then(|mut file| {
                file.write_all(contents.as_ref())?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&self.draft, &self.path))
            .map_err(|error| {
                // The first error is the one to tell.
                let _ = fs::remove_file(&self.draft);
                Error::Write(error)
            })
    }
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

        // The directory disappears while the program measures.
        let target = Target::new("--plot", &path).unwrap();
        fs::remove_dir_all(&directory).unwrap();
        assert!(matches!(target.fill("three"), Err(Error::Write(_))));
    }
}
