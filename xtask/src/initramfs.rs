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
    let shell = std::fs::read(busybox).about(busybox.display())?;
    let mut programs = Vec::new();
    for (name, file) in others {
        programs.push((format!("bin/{name}"), std::fs::read(file).about(file.display())?));
    }
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::new(File::create(to)?);
        let entries: [(&str, u32, ModeFileType, &[u8]); 3] = [
            ("bin", 0o755, ModeFileType::Directory, &[]),
            ("bin/busybox", 0o755, ModeFileType::Regular, &shell),
            ("init", 0o755, ModeFileType::Regular, init.as_bytes()),
        ];
        let programs = programs
            .iter()
            .map(|(name, data)| (name.as_str(), 0o755, ModeFileType::Regular, data.as_slice()));
        for (number, (name, mode, kind, data)) in (1..).zip(entries.into_iter().chain(programs)) {
            let entry = Builder::new(name).ino(number).mode(mode).set_mode_file_type(kind);
            let mut file = entry.write(&mut out, data.len() as u32);
            file.write_all(data)?;
            file.finish()?;
        }
        trailer(&mut out)?;
        out.flush()
    };
    write().about(to.display())
}
