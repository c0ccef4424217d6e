//! `inspect`, on memory that is made here.

use serde_json::Value;

use crate::common::{Scratch, assert_refused, json, rows, stderr, stdout, tablewright};

const BASE: u64 = 0x8000_0000;

/// Memory with tables of Sv39 in it: the root in its first page.
struct Image {
    words: Vec<u64>,
}

impl Image {
    /// A gigabyte at 3 GiB, and from 0 on two pages and one behind a hole; the kernel's half has a
    /// page that is open to all.
    fn new() -> Self {
        let mut image = Self { words: vec![0; 8 * 512] };
        for (table, index, entry) in [
            (0, 0, Self::table(1)),
            (0, 3, 0xc000_0000 >> 2 | 0xcf),
            (1, 0, Self::table(2)),
            (2, 0, 0x1000_0000 >> 2 | 0xd7), // user, rw
            (2, 1, 0x1000_1000 >> 2 | 0xd7),
            (2, 3, 0x1000_3000 >> 2 | 0xd3), // user, r
            (0, 511, Self::table(3)),
            (3, 511, Self::table(4)),
            (4, 511, 0x1000_9000 >> 2 | 0xd7),
        ] {
            image.set(table, index, entry);
        }
        image
    }

    fn table(page: u64) -> u64 {
        (BASE + page * 4096) >> 2 | 1
    }

    fn set(&mut self, page: usize, index: usize, entry: u64) {
        self.words[page * 512 + index] = entry;
    }

    fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// An ELF core of it, with a note of one kind.
    fn core(&self, name: &str, note: &[u8]) -> Vec<u8> {
        let padded = |bytes: usize| bytes.next_multiple_of(4);
        let mut notes = Vec::new();
        for word in [name.len() as u32 + 1, note.len() as u32, 0] {
            notes.extend(word.to_le_bytes());
        }
        notes.extend(name.bytes());
        notes.resize(12 + padded(name.len() + 1), 0);
        notes.extend(note);
        notes.resize(padded(notes.len()), 0);
        let memory = self.bytes();
        let mut core = b"\x7fELF\x02\x01\x01".to_vec();
        core.resize(16, 0);
        for half in [4_u16, 243] {
            core.extend(half.to_le_bytes()); // a core, of RISC-V
        }
        core.extend(1_u32.to_le_bytes());
        for word in [0_u64, 64, 0] {
            core.extend(word.to_le_bytes()); // entry, program headers, sections
        }
        core.extend(0_u32.to_le_bytes());
        for half in [64_u16, 56, 2, 0, 0, 0] {
            core.extend(half.to_le_bytes());
        }
        let offset = 64 + 2 * 56;
        let parts = [
            (4_u32, offset, 0, notes.len() as u64),
            (1, offset + notes.len() as u64, BASE, memory.len() as u64),
        ];
        for (kind, offset, address, bytes) in parts {
            core.extend(kind.to_le_bytes());
            core.extend(4_u32.to_le_bytes());
            for word in [offset, 0, address, bytes, bytes, 4] {
                core.extend(word.to_le_bytes());
            }
        }
        core.extend(notes);
        core.extend(memory);
        core
    }
}

const SATP: &str = "satp=0x8000000000080000";

#[test]
fn an_image_a_core_and_what_a_kernel_says_lead_to_the_same_tables() {
    let image = Image::new();
    let raw = Scratch::new("inspect-image-raw", image.bytes());
    let said = "OSRELEASE=6.6\nPAGESIZE=4096\nSYMBOL(swapper_pg_dir)=ffffffff80000000\n\
                NUMBER(VA_BITS)=39\nNUMBER(va_kernel_pa_offset)=0xffffffff00000000\n";
    let core = Scratch::new("inspect-image-core", image.core("VMCOREINFO", said.as_bytes()));
    let mut told = Image::new();
    let mut page = said.as_bytes().to_vec();
    page.resize(4096, 0);
    for (index, bytes) in page.as_chunks().0.iter().enumerate() {
        told.set(6, index, u64::from_le_bytes(*bytes));
    }
    let told = Scratch::new("inspect-image-told", told.bytes());
    let base = ["--base", "0x80000000"];
    let rows_of = |words: &[&str]| rows(&json("inspect", words)).clone();
    let by_register = rows_of(&[raw.path(), base[0], base[1], "--reg", SATP]);
    assert_eq!(rows_of(&[core.path()]), by_register);
    assert_eq!(rows_of(&[told.path(), base[0], base[1]]), by_register);
    let of = |key: &str| -> Vec<String> {
        by_register.iter().map(|row| row[key].as_str().unwrap_or("-").to_owned()).collect()
    };
    assert_eq!(of("first"), ["0x0", "0x3000", "0xc0000000", "0xfffffffffffff000"]);
    assert_eq!(of("last"), ["0x1fff", "0x3fff", "0xffffffff", "0xffffffffffffffff"]);
    assert_eq!(of("physical"), ["0x10000000", "0x10003000", "0xc0000000", "0x10009000"]);
    assert_eq!(of("user"), ["rw-", "r--", "---", "rw-"]);
    assert_eq!(of("kernel"), ["rw-", "r--", "rwx", "rw-"]);
}

#[test]
fn an_address_is_followed_entry_by_entry() {
    let raw = Scratch::new("inspect-address-raw", Image::new().bytes());
    let words = ["inspect", raw.path(), "--base", "0x80000000", "--reg", SATP];
    let walk = |address: &str| {
        let output = tablewright(&[&words[..], &["--walk", address]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stdout(&output).to_owned()
    };
    let text = walk("0x1234");
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.starts_with("0x1234 by satp: 0x10001234, kernel rw-, user rw-, "), "{text}");
    assert!(text.contains("level 2: entry 0 of the table at 0x80000000 is "), "{text}");
    assert!(walk("0x2000").starts_with("0x2000 by satp: not mapped at level 0\n"));
    assert!(walk("0x4000000000").starts_with("0x4000000000 by satp: address outside the space\n"));
}

#[test]
fn an_audit_finds_what_is_wrong_and_a_sound_map_is_clean() {
    let mut image = Image::new();
    let raw = Scratch::new("inspect-audit-raw", image.bytes());
    let base = ["--base", "0x80000000", "--reg", SATP, "--audit"];
    let output = tablewright(&[&["inspect", raw.path()], &base[..]].concat());
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    for part in [
        "wrong: satp: writable and executable: 1 time, 1 GiB in all; first 0xc0000000..=0xffffffff",
        "wrong: satp: in the kernel's half, and user mode may use it: 1 time, 4 KiB in all; first \
         0xfffffffffffff000..=0xffffffffffffffff",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    for (table, index, entry) in [
        (2, 4, 0x1000_3000 >> 2 | 0xd3 | 1 << 61), // mapped before, with another type
        (2, 5, (BASE + 0x2000) >> 2 | 0xd7),       // a table, writable for the user
        (2, 16, 0x1001_8000 >> 2 | 0xd3 | 1 << 63), // one page of a run
        (2, 6, 0x1000_4000 >> 2 | 0xc5),           // reserved: writable, not readable
        (0, 5, 0x9000_0000 >> 2 | 1),              // a table outside of memory
    ] {
        image.set(table, index, entry);
    }
    let raw = Scratch::new("inspect-audit-wrong", image.bytes());
    let output = tablewright(&[&["inspect", raw.path()], &base[..]].concat());
    let text = stdout(&output);
    for part in [
        "note: all: memory that is mapped with two types: 1 time, 4 KiB in all; first 0x10003000",
        "wrong: satp: a table that user mode may write: 1 time, 4 KiB in all; first 0x5000: the \
         table at 0x80002000",
        "wrong: satp: a run of contiguous entries that is not whole: 1 time",
        "wrong: satp: an entry has no meaning, or its table is not there: 2 times",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    // One that is as it should be.
    let mut image = Image::new();
    image.set(0, 3, 0);
    image.set(0, 511, 0);
    let raw = Scratch::new("inspect-audit-right", image.bytes());
    let output = tablewright(&[&["inspect", raw.path()], &base[..]].concat());
    assert_eq!(
        (output.status.code(), stdout(&output).contains("nothing was found")),
        (Some(0), true)
    );
}

#[test]
fn a_difference_is_what_is_mapped_otherwise() {
    let mut image = Image::new();
    let before = Scratch::new("inspect-difference-before", image.bytes());
    image.set(2, 1, 0x1000_7000 >> 2 | 0xd7);
    image.set(2, 3, 0);
    let after = Scratch::new("inspect-difference-after", image.bytes());
    let of = |other: &Scratch| {
        let words = [before.path(), "--base", "0x80000000", "--reg", SATP, "--diff", other.path()];
        rows(&json("inspect", &words)).clone()
    };
    assert_eq!(of(&before), [] as [Value; 0]);
    let found = of(&after);
    let row = |number: usize, key: &str| found[number][key].as_str().unwrap_or("-").to_owned();
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!((row(0, "first"), row(0, "last")), ("0x1000".into(), "0x1fff".into()));
    assert!(
        row(0, "before").starts_with("0x10001000, ") && row(0, "after").starts_with("0x10007000, ")
    );
    assert_eq!((row(1, "first"), row(1, "after")), ("0x3000".into(), "nothing".into()));
}

#[test]
fn what_cannot_be_read_is_said_in_one_line() {
    let raw = Scratch::new("inspect-what-raw", Image::new().bytes());
    let dump = Scratch::new("inspect-what-kdump", b"KDUMP   \x06\0\0\0");
    let elf = Scratch::new(
        "inspect-what-elf",
        std::fs::read(env!("CARGO_BIN_EXE_tablewright")).expect("it"),
    );
    for (words, wrong) in [
        (vec!["/nowhere/core"], "/nowhere/core: No such file"),
        (vec![raw.path()], "no register says where tables are"),
        (vec![dump.path()], "memory is compressed in it"),
        (vec![elf.path()], "this ELF file is no core"),
        (vec![raw.path(), "--reg", "cr9=1"], "--reg cr9: the registers are ttbr0, "),
        (vec![raw.path(), "--reg", "cr3"], "give NAME=VALUE"),
        (vec![raw.path(), "--reg", "ttbr1=0x1000"], "ttbr1 needs --reg tcr=VALUE"),
        (vec!["gdb:/nowhere/gdb"], "gdb:/nowhere/gdb: No such file"),
    ] {
        assert_refused(&[&["inspect"], &words[..]].concat(), wrong);
    }
}
