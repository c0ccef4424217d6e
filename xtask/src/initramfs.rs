//! The guest's first file system: a shell with its tools, and a script.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use cpio::newc::{Builder, ModeFileType, trailer};

use crate::{About as _, Result};

/// Makes an archive of a static `busybox`, the program to run first, and others, by their names in
/// `/bin`.
///
/// # Errors
/// A file cannot be read or written.
pub fn make(to: &Path, busybox: &Path, init: &str, others: &[(&str, &Path)]) -> Result<()> {
    let mut entries = vec![
        ("bin".into(), ModeFileType::Directory, Vec::new()),
        ("bin/busybox".into(), ModeFileType::Regular, read(busybox)?),
        ("init".into(), ModeFileType::Regular, init.into()),
    ];
    for (name, file) in others {
        entries.push((format!("bin/{name}"), ModeFileType::Regular, read(file)?));
    }
    archive(to, entries)
}

/// Makes an archive of the program to run first alone.
///
/// # Errors
/// A file cannot be read or written.
pub fn of_one(to: &Path, init: &Path) -> Result<()> {
    archive(to, vec![("init".into(), ModeFileType::Regular, read(init)?)])
}

fn read(file: &Path) -> Result<Vec<u8>> {
    std::fs::read(file).about(file.display())
}

fn archive(to: &Path, entries: Vec<(String, ModeFileType, Vec<u8>)>) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::new(File::create(to)?);
        for (number, (name, kind, data)) in (1..).zip(entries) {
            let entry = Builder::new(&name).ino(number).mode(0o755).set_mode_file_type(kind);
            let mut file = entry.write(&mut out, data.len() as u32);
            file.write_all(&data)?;
            file.finish()?;
        }
        trailer(&mut out)?;
        out.flush()
    };
    write().about(to.display())
}
