//! The first program of a Linux that is watched: processes with threads that map memory, protect
//! it, move it, give it back, fork, and map files, all beside each other. Each looks whether it
//! finds what it wrote.
//!
//! The kernel's command line says how much by `rounds=N`, which it hands on in the environment;
//! with `symbols=NAME,NAME` the addresses of functions of the kernel's are said first.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

const PAGE: usize = 4096;
/// The number of words that did not read as they were written.
static WRONG: AtomicU64 = AtomicU64::new(0);

/// Memory that was mapped, and is unmapped at the end.
struct Mapped {
    at: *mut u8,
    pages: usize,
}

impl Mapped {
    fn new(pages: usize, flags: i32, file: Option<&File>) -> Option<Self> {
        let descriptor = file.map_or(-1, |file| file.as_raw_fd());
        let flags = flags | if file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: memory of its own, wherever the kernel finds room.
        let at =
            unsafe { libc::mmap(ptr::null_mut(), pages * PAGE, protection, flags, descriptor, 0) };
        (at != libc::MAP_FAILED).then_some(Self { at: at.cast(), pages })
    }

    /// Writes a number to each page.
    fn write(&self, number: u64) {
        for page in 0..self.pages {
            // SAFETY: within the memory, which may be written.
            unsafe { self.at.add(page * PAGE).cast::<u64>().write_volatile(number + page as u64) };
        }
    }

    /// Looks whether each page holds what was written.
    fn check(&self, number: u64) {
        for page in 0..self.pages {
            // SAFETY: within the memory, which may be read.
            let found = unsafe { self.at.add(page * PAGE).cast::<u64>().read_volatile() };
            WRONG.fetch_add(u64::from(found != number + page as u64), Ordering::Relaxed);
        }
    }

    fn protect(&self, protection: i32) {
        // SAFETY: memory of its own.
        unsafe { libc::mprotect(self.at.cast(), self.pages * PAGE, protection) };
    }

    fn advise(&self, advice: i32) {
        // SAFETY: memory of its own.
        unsafe { libc::madvise(self.at.cast(), self.pages * PAGE, advice) };
    }

    /// Makes it larger or smaller, which may move it to another address.
    fn resize(&mut self, pages: usize) {
        let (old, new) = (self.pages * PAGE, pages * PAGE);
        // SAFETY: memory of its own; no reference to it exists.
        let at = unsafe { libc::mremap(self.at.cast(), old, new, libc::MREMAP_MAYMOVE) };
        if at != libc::MAP_FAILED {
            (self.at, self.pages) = (at.cast(), pages);
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: memory of its own; no reference to it exists.
        unsafe { libc::munmap(self.at.cast(), self.pages * PAGE) };
    }
}

/// Changes memory in random ways: the work of one thread.
fn work(mut seed: u64, rounds: u64) {
    let name = format!("/file-{seed}");
    let mut draw = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    for round in 0..rounds {
        let number = round << 32 | draw(1 << 20) as u64;
        match draw(8) {
            0 => {
                let Some(memory) = Mapped::new(1 + draw(64), libc::MAP_PRIVATE, None) else {
                    continue;
                };
                memory.write(number);
                memory.check(number);
            }
            1 => {
                let Some(memory) = Mapped::new(1 + draw(32), libc::MAP_PRIVATE, None) else {
                    continue;
                };
                memory.write(number);
                memory.protect(libc::PROT_READ);
                memory.check(number);
                memory.protect(libc::PROT_NONE);
                memory.protect(libc::PROT_READ | libc::PROT_WRITE);
                memory.write(number + 1);
                memory.check(number + 1);
            }
            2 => {
                let Some(mut memory) = Mapped::new(1 + draw(16), libc::MAP_PRIVATE, None) else {
                    continue;
                };
                memory.write(number);
                let before = memory.pages;
                memory.resize(before * 2 + draw(700));
                let grown = std::mem::replace(&mut memory.pages, before);
                memory.check(number);
                memory.pages = grown;
                memory.resize(before);
                memory.check(number);
            }
            3 => {
                // A hole splits a transparent huge page.
                let Some(memory) = Mapped::new(1024, libc::MAP_PRIVATE, None) else { continue };
                memory.advise(libc::MADV_HUGEPAGE);
                memory.write(number);
                // Another thread may map its memory into the hole, so the hole is not unmapped
                // again.
                let hole = Mapped { at: memory.at.wrapping_add(700 * PAGE), pages: 3 };
                let behind = Mapped { at: memory.at.wrapping_add(703 * PAGE), pages: 321 };
                let before = Mapped { at: memory.at, pages: 700 };
                std::mem::forget(memory);
                drop(hole);
                before.check(number);
                behind.check(number + 703);
            }
            4 => {
                let Some(memory) = Mapped::new(1 + draw(64), libc::MAP_PRIVATE, None) else {
                    continue;
                };
                memory.write(number);
                memory.advise(libc::MADV_DONTNEED);
                memory.write(number + 1);
                memory.check(number + 1);
            }
            5 | 6 => {
                let file = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .open(&name);
                let Ok(mut file) = file else { continue };
                let pages = 1 + draw(16);
                let _ = file.set_len((pages * PAGE) as u64);
                let kind = if draw(2) == 0 { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
                let Some(memory) = Mapped::new(pages, kind, Some(&file)) else { continue };
                memory.write(number);
                memory.check(number);
                drop(memory);
                let _ = file.write_all(&[1; PAGE]);
                let _ = file.set_len(0);
            }
            _ => {
                let Some(memory) = Mapped::new(8 + draw(32), libc::MAP_PRIVATE, None) else {
                    continue;
                };
                memory.write(number);
                // SAFETY: the child calls nothing but what may be called after a fork of a process
                // with threads: it writes memory and ends.
                unsafe {
                    let child = libc::fork();
                    if child == 0 {
                        memory.check(number);
                        memory.write(number + 7);
                        memory.check(number + 7);
                        libc::_exit(i32::from(WRONG.load(Ordering::Relaxed) != 0));
                    }
                    memory.write(number + 9);
                    let mut status = 0;
                    if child > 0 {
                        libc::waitpid(child, &raw mut status, 0);
                    }
                    WRONG.fetch_add(u64::from(status != 0), Ordering::Relaxed);
                }
                memory.check(number + 9);
            }
        }
    }
}

/// Says where these functions of the kernel's are.
fn say_symbols(names: &str) {
    let _ = std::fs::create_dir("/proc");
    // SAFETY: strings that end with a zero.
    unsafe {
        let (none, kind) = (ptr::null(), c"proc".as_ptr());
        libc::mount(kind, c"/proc".as_ptr(), kind, 0, none);
    }
    let all = std::fs::read_to_string("/proc/kallsyms").unwrap_or_default();
    for line in all.lines() {
        let mut words = line.split(' ');
        if let (Some(address), Some(name)) = (words.next(), words.nth(1))
            && names.split(',').any(|named| named == name)
        {
            println!("symbol {name} {address}");
        }
    }
}

fn main() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let rounds = number("rounds").unwrap_or(200);
    let cpus = thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64);
    println!("watched: {cpus} CPUs");
    if let Ok(names) = std::env::var("symbols") {
        say_symbols(&names);
    }
    let mut children = Vec::new();
    for process in 0..2 {
        // SAFETY: there is one thread yet.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let threads: Vec<_> = (0..=cpus)
                .map(|thread| std::thread::spawn(move || work(1 + process * 1000 + thread, rounds)))
                .collect();
            let failed = threads.into_iter().filter_map(|thread| thread.join().err()).count();
            let wrong = WRONG.load(Ordering::Relaxed) + failed as u64;
            if wrong != 0 {
                println!("watched: {wrong} of process {process} are wrong");
            }
            std::process::exit(i32::from(wrong != 0));
        }
        children.push(child);
    }
    let mut wrong = 0;
    for child in children {
        let mut status = 0;
        // SAFETY: a child of this process.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        if status != 0 {
            println!("watched: a process ended with status {status:#x}");
        }
        wrong += u32::from(status != 0);
    }
    println!("{}", if wrong == 0 { "watched: done" } else { "watched: wrong" });
    // A kernel with a bug may not find the way to switch itself off.
    // SAFETY: the system is to end here.
    unsafe {
        libc::sync();
        libc::reboot(libc::LINUX_REBOOT_CMD_RESTART);
    }
}
