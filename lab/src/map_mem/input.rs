//! Where the memory map comes from: a file, a size, or this computer.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::error::Error;
use crate::format::Format;
use crate::iomem::{self, Extent, MemoryMap};
use crate::size::{Size, human};

/// This computer's own memory map.
const OWN: &str = "/proc/iomem";

/// No memory map is larger, and `/dev/zero` is never read to its end.
const LIMIT: u64 = 16 << 20;

/// Reads the memory map, and says in words where it came from.
pub fn read(
    file: Option<&Path>,
    ram: Option<Size>,
    format: Format,
) -> Result<(String, MemoryMap), Error> {
    if let Some(size) = ram {
        return Ok((format!("--ram {size}"), one_range(size, format)?));
    }
    let path = file.unwrap_or(Path::new(OWN));
    let bytes = read_bytes(path)?;
    let map = iomem::parse(&bytes).map_err(|error| Error::Iomem {
        path: path.to_owned(),
        error,
    })?;
    Ok((path.display().to_string(), map))
}

fn one_range(size: Size, format: Format) -> Result<MemoryMap, Error> {
    let page = format.page_bytes();
    if !size.bytes().is_multiple_of(page) {
        return Err(Error::Usage(format!(
            "--ram of {} bytes is not a multiple of the page size, {}",
            size.bytes(),
            human(page)
        )));
    }
    Ok(MemoryMap {
        ram: vec![Extent {
            start: 0,
            last: size.bytes() - 1,
        }],
        ..MemoryMap::default()
    })
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, Error> {
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(path)?.take(LIMIT + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| Error::Read {
        path: path.to_owned(),
        error,
    })?;
    if bytes.len() as u64 > LIMIT {
        return Err(Error::TooLarge {
            path: path.to_owned(),
            limit: human(LIMIT),
        });
    }
    Ok(bytes)
}
