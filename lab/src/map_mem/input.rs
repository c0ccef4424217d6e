//! Source of the memory map: a file, a size, or this computer.

use std::path::Path;

use super::firmware;
use super::iomem::{self, Extent, IomemError, MemoryMap};
use crate::error::Error;
use crate::file;
use crate::format::Format;
use crate::size::{Size, human};

/// This computer's own memory map.
const OWN: &str = "/proc/iomem";

/// Reads the memory map, and says in words where it came from.
pub fn read(
    file: Option<&Path>,
    ram: Option<Size>,
    format: Format,
) -> Result<(String, MemoryMap), Error> {
    if let Some(size) = ram {
        return Ok((format!("--ram {size}"), one_range(size, format)?));
    }
    let map = match file {
        Some(path) => read_map(path)?,
        None => own(Path::new(OWN))?,
    };
    let path = file.unwrap_or(Path::new(OWN));
    Ok((path.display().to_string(), map))
}

/// This computer's memory map, from `path`. It was not asked for by name, so if it cannot be read,
/// the error says what to ask for instead.
fn own(path: &Path) -> Result<MemoryMap, Error> {
    let hinted = |error: Error| {
        let hint = "use --ram SIZE, or --iomem FILE with the memory map of another computer";
        Error::Usage(format!("{error}; {hint}"))
    };
    let bytes = file::read(path, "memory map").map_err(hinted)?;
    iomem::parse(&bytes).map_err(|error| match error {
        // That one says it already.
        IomemError::Hidden => Error::input(path.display(), error),
        _ => hinted(Error::input(path.display(), error)),
    })
}

fn read_map(path: &Path) -> Result<MemoryMap, Error> {
    let bytes = file::read(path, "memory map")?;
    if let Some(map) = firmware::parse(&bytes) {
        return map.map_err(|why| Error::input(path.display(), why));
    }
    iomem::parse(&bytes).map_err(|error| Error::input(path.display(), error))
}

fn one_range(size: Size, format: Format) -> Result<MemoryMap, Error> {
    let page = format.page_bytes();
    if !size.bytes().is_multiple_of(page) {
        return Err(Error::Usage(format!(
            "--ram {}: not a multiple of the page size, {}",
            size.bytes(),
            human(page)
        )));
    }
    Ok(MemoryMap { ram: vec![Extent { start: 0, last: size.bytes() - 1 }], ..MemoryMap::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_computer_that_does_not_tell_its_memory_map_is_no_dead_end() {
        for path in ["/no/such/iomem", "/dev/null"] {
            let message = own(Path::new(path)).unwrap_err().to_string();
            assert!(message.starts_with(path), "{message}");
            assert!(
                message.ends_with(
                    "use --ram SIZE, or --iomem FILE with the memory map of another computer"
                ),
                "{message}"
            );
        }
    }
}
