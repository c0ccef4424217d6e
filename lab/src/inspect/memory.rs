//! The sources of physical memory: a core, a raw image, or a running QEMU.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{LittleEndian, ReadCache};
use tablewright_watch::Memory;

use super::gdb;
use super::registers::{Registers, of_vmcoreinfo};
use crate::error::Error;
use crate::file::open_regular;

/// The words of a page of 4 KiB.
type Page = [u64; 512];

/// Physical memory. Pages are cached: each is read from its source once.
pub struct Source {
    from: From,
    pages: HashMap<u64, Option<Box<Page>>>,
}

enum From {
    File { file: File, parts: Vec<Part> },
    Gdb(gdb::Stub),
}

/// Physical memory that is in a file one byte behind the other.
struct Part {
    pa: u64,
    bytes: u64,
    offset: u64,
}

/// Opens what a user names, and finds the registers of processor `cpu` that are in it. A raw image
/// begins at `base`. A QEMU is stopped, and goes on afterwards unless it is to be kept as it is.
pub fn open(
    name: &str,
    base: Option<u64>,
    cpu: u32,
    keep_stopped: bool,
) -> Result<(Source, Registers), Error> {
    let wrong = |problem: io::Error| Error::input(name, problem);
    if let Some(address) = name.strip_prefix("gdb:") {
        let mut stub = gdb::Stub::connect(address, cpu, keep_stopped).map_err(wrong)?;
        let registers = stub.registers().map_err(wrong)?;
        return Ok((Source::new(From::Gdb(stub)), registers));
    }
    let path = Path::new(name);
    let read = |error| Error::Read { path: path.into(), error };
    let mut file = open_regular(path).map_err(read)?;
    let mut magic = [0; 16];
    let known = file.read(&mut magic).map_err(read)?;
    let (parts, registers) = match (&magic[..known.min(8)], base) {
        ([0x7f, b'E', b'L', b'F', ..], None) => core(&file, cpu).map_err(wrong)?,
        (b"KDUMP   ", _) => {
            return Err(Error::input(
                name,
                "memory is compressed in it: dump it without -z, -l or -s, as ELF",
            ));
        }
        _ => {
            let bytes = file.metadata().map_err(read)?.len();
            let part = Part { pa: base.unwrap_or(0), bytes, offset: 0 };
            (vec![part], Registers::default())
        }
    };
    let mut source = Source::new(From::File { file, parts });
    let registers = match registers.is_empty() {
        true => source.vmcoreinfo().map_err(read)?,
        false => registers,
    };
    Ok((source, registers))
}

/// The memory and the registers of an ELF core.
fn core(file: &File, cpu: u32) -> io::Result<(Vec<Part>, Registers)> {
    let invalid = |error: object::Error| io::Error::new(io::ErrorKind::InvalidData, error);
    let data = ReadCache::new(file);
    let header = FileHeader64::<LittleEndian>::parse(&data).map_err(invalid)?;
    if header.e_type(LittleEndian) != elf::ET_CORE {
        return Err(io::Error::other("this ELF file is no core: it has no memory of a machine"));
    }
    let mut parts = Vec::new();
    let mut registers = Registers::default();
    let mut number = 0;
    for part in header.program_headers(LittleEndian, &data).map_err(invalid)? {
        if part.p_type(LittleEndian) == elf::PT_LOAD {
            parts.push(Part {
                pa: part.p_paddr(LittleEndian),
                bytes: part.p_filesz(LittleEndian),
                offset: part.p_offset(LittleEndian),
            });
        }
        let notes = part.notes(LittleEndian, &data).map_err(invalid)?;
        let Some(mut notes) = notes else { continue };
        while let Some(note) = notes.next().map_err(invalid)? {
            match note.name() {
                // Those of the processor say more than those of the kernel.
                b"QEMU" => {
                    if number == cpu {
                        registers = Registers::of_qemu_note(note.desc()).unwrap_or(registers);
                    }
                    number += 1;
                }
                b"VMCOREINFO" if registers.is_empty() => {
                    registers = of_vmcoreinfo(&String::from_utf8_lossy(note.desc()));
                }
                _ => {}
            }
        }
    }
    if number != 0 && cpu >= number {
        return Err(io::Error::other(format!("there is no CPU {cpu} in it, but {number} CPUs")));
    }
    Ok((parts, registers))
}

impl Source {
    fn new(from: From) -> Self {
        Self { from, pages: HashMap::new() }
    }

    /// Finds what a Linux says of itself: a page that begins with its release.
    fn vmcoreinfo(&mut self) -> io::Result<Registers> {
        const START: &[u8] = b"OSRELEASE=";
        let From::File { file, parts } = &mut self.from else { return Ok(Registers::default()) };
        let mut chunk = vec![0; 1 << 20];
        for part in parts {
            for from in (0..part.bytes).step_by(chunk.len()) {
                let bytes = chunk.len().min((part.bytes - from) as usize);
                file.seek(SeekFrom::Start(part.offset.saturating_add(from)))?;
                file.read_exact(&mut chunk[..bytes])?;
                for page in chunk[..bytes].chunks(4096).filter(|page| page.starts_with(START)) {
                    let found = of_vmcoreinfo(&String::from_utf8_lossy(page));
                    if !found.is_empty() {
                        return Ok(found);
                    }
                }
            }
        }
        Ok(Registers::default())
    }

    fn page(&mut self, pa: u64) -> Option<&Page> {
        let Self { from, pages } = self;
        let page = pages.entry(pa).or_insert_with(|| {
            let mut bytes = [0; 4096];
            let is_there = match from {
                From::Gdb(stub) => stub.read(pa, &mut bytes).is_ok(),
                From::File { file, parts } => {
                    let part = parts.iter().find_map(|part| {
                        let into = pa.checked_sub(part.pa)?;
                        part.offset
                            .checked_add(into)
                            .filter(|_| into.saturating_add(4096) <= part.bytes)
                    })?;
                    file.seek(SeekFrom::Start(part))
                        .and_then(|_| file.read_exact(&mut bytes))
                        .is_ok()
                }
            };
            let mut words = Box::new([0; 512]);
            for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            is_there.then_some(words)
        });
        page.as_deref()
    }
}

impl Memory for Source {
    fn read(&mut self, pa: u64, words: &mut [u64]) -> bool {
        let (mut at, mut rest) = (pa, words);
        while !rest.is_empty() {
            let Some(page) = self.page(at & !0xfff) else { return false };
            let from = &page[(at & 0xfff) as usize / 8..];
            let (now, later) = rest.split_at_mut(rest.len().min(from.len()));
            now.copy_from_slice(&from[..now.len()]);
            at += 8 * now.len() as u64;
            rest = later;
        }
        true
    }
}
