//! Memory for tables: one mapping of the host, from which frames are taken one by one and given
//! back.
//!
//! Whatever is measured takes its tables from here, so that all are measured over the same bytes.
//! The "physical" address of a table is its address in this process: every format has room for it,
//! and no subject pays for a translation that others do not have. Free frames wait in a chain
//! beside the tables, not in them, so that taking and giving back touches no table.

use std::hint::black_box;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use clap::ValueEnum;
use serde::Serialize;

use crate::error::Error;
use crate::output::progress::Progress;
use crate::size::human;

/// How the host's memory behind the tables is prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Touched before and backed by huge pages, as a kernel's own memory is
    Warm,
    /// Mapped anew each round in small pages, so that the first touch faults
    Cold,
}

/// The alignment of a huge page of the host, and of every arena.
const HUGE: usize = 2 << 20;

/// The end of the chain of free frames.
const END: u32 = u32::MAX;
/// The link of a frame that is held.
const HELD: u32 = u32::MAX - 1;

/// A handle to an arena. It can be copied freely because an arena lasts as long as the program.
#[derive(Clone, Copy)]
pub struct Arena(&'static Inner);

/// The counters are atomic so that handles may be stored anywhere; they are loaded and stored,
/// never exchanged, because only the thread that made the arena may take and give back.
struct Inner {
    base: usize,
    frame_shift: u32,
    frames: u32,
    memory: Memory,
    owner: usize,
    /// Frames from here on were not handed out in this round.
    fresh: AtomicU32,
    /// The first free frame before `fresh`.
    free: AtomicU32,
    links: Box<[AtomicU32]>,
    held: AtomicU32,
    taken: AtomicU32,
    misused: AtomicBool,
}

impl Arena {
    /// Reserves room for `frames` tables of `1 << frame_shift` bytes.
    pub fn new(frames: u64, frame_shift: u32, memory: Memory) -> Result<Self, Error> {
        let bytes = frames.saturating_mul(1 << frame_shift);
        let side = frames.saturating_mul(4);
        check_available(bytes.saturating_add(side))?;
        if frames >= u64::from(HELD) {
            return Err(too_much(bytes, available_memory()));
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX - HUGE);
        let arena = Self(Box::leak(Box::new(Inner {
            base: reserve(bytes).map_err(Error::Map)?,
            frame_shift,
            frames: frames as u32,
            memory,
            owner: this_thread(),
            fresh: AtomicU32::new(0),
            free: AtomicU32::new(END),
            links: (0..frames).map(|_| AtomicU32::new(END)).collect(),
            held: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            misused: AtomicBool::new(false),
        })));
        arena.map_anew()?;
        if memory == Memory::Warm {
            arena.touch();
        }
        Ok(arena)
    }

    /// Forgets all frames and starts again from the first; cold memory is mapped anew.
    ///
    /// # Safety
    ///
    /// 1. No frame taken before is in use.
    pub unsafe fn start_round(self) -> Result<(), Error> {
        let inner = self.0;
        assert_eq!(inner.owner, this_thread(), "an arena belongs to one thread");
        for link in &inner.links[..inner.fresh.load(Relaxed) as usize] {
            link.store(END, Relaxed);
        }
        inner.fresh.store(0, Relaxed);
        inner.free.store(END, Relaxed);
        inner.held.store(0, Relaxed);
        inner.taken.store(0, Relaxed);
        inner.misused.store(false, Relaxed);
        match inner.memory {
            Memory::Warm => Ok(()),
            Memory::Cold => self.map_anew(),
        }
    }

    /// Takes a frame, with whatever bytes the last holder left. `None` if there are no more.
    ///
    /// Its provenance is exposed, so that it can be found again by its address.
    #[inline]
    pub fn take(self) -> Option<NonNull<u8>> {
        let inner = self.0;
        if inner.owner != this_thread() {
            return None;
        }
        let head = inner.free.load(Relaxed);
        let index = if head == END {
            let fresh = inner.fresh.load(Relaxed);
            if fresh == inner.frames {
                return None;
            }
            inner.fresh.store(fresh + 1, Relaxed);
            fresh
        } else {
            inner.free.store(inner.links[head as usize].load(Relaxed), Relaxed);
            head
        };
        inner.links[index as usize].store(HELD, Relaxed);
        inner.held.store(inner.held.load(Relaxed) + 1, Relaxed);
        inner.taken.store(inner.taken.load(Relaxed).wrapping_add(1), Relaxed);
        NonNull::new(ptr::with_exposed_provenance_mut(
            inner.base + ((index as usize) << inner.frame_shift),
        ))
    }

    /// Takes a frame and zeroes it.
    ///
    /// Piece by piece: for a whole table `memset` may choose string instructions, which on some
    /// processors leave the lines outside the first cache, and filling the table next would pay for
    /// that.
    #[inline]
    pub fn take_zeroed(self) -> Option<NonNull<u8>> {
        const PIECE: usize = 512;
        let frame = self.take()?;
        for offset in (0..1 << self.0.frame_shift).step_by(PIECE) {
            // SAFETY: `take` gave us this frame alone, of `1 << frame_shift` mapped bytes, a
            // multiple of a piece.
            unsafe { black_box(frame.add(offset)).write_bytes(0, PIECE) };
        }
        Some(frame)
    }

    /// Gives a frame back. Giving back what is not held is remembered and reported by
    /// [`Arena::misused`].
    #[inline]
    pub fn give_back(self, address: usize) {
        let inner = self.0;
        match self.number(address) {
            Some(index)
                if inner.links[index].load(Relaxed) == HELD && inner.owner == this_thread() =>
            {
                inner.links[index].store(inner.free.load(Relaxed), Relaxed);
                inner.free.store(index as u32, Relaxed);
                inner.held.store(inner.held.load(Relaxed) - 1, Relaxed);
            }
            _ => inner.misused.store(true, Relaxed),
        }
    }

    /// How many frames are held now.
    pub fn held(self) -> u64 {
        u64::from(self.0.held.load(Relaxed))
    }

    /// How many frames were taken since the round started, given back or not.
    pub fn taken(self) -> u64 {
        u64::from(self.0.taken.load(Relaxed))
    }

    /// Whether a frame was given back that was not held.
    pub fn misused(self) -> bool {
        self.0.misused.load(Relaxed)
    }

    /// Reads one entry of the table at `address`; `None` if no table is there.
    ///
    /// No subject keeps a reference into a table beyond the call that made it, so between calls
    /// this reads alone.
    pub fn entry(self, address: u64, index: u64) -> Option<u64> {
        let address = usize::try_from(address).ok()?;
        // A root may lie in several frames beside each other.
        let frame = self.number(address)? + (index >> (self.0.frame_shift - 3)) as usize;
        if self.0.links.get(frame)?.load(Relaxed) != HELD {
            return None;
        }
        let entry = ptr::with_exposed_provenance::<AtomicU64>(address + (index as usize) * 8);
        // SAFETY: the frame with this entry is one of ours and mapped, so this is an aligned word
        // of ours.
        Some(unsafe { &*entry }.load(Relaxed))
    }

    /// The entries of a table.
    ///
    /// # Safety
    ///
    /// 1. `frame` was taken from this arena and not given back.
    /// 2. There is no mutable reference into it while the slice is in use.
    #[inline]
    pub unsafe fn entries(self, frame: NonNull<u8>) -> &'static [AtomicU64] {
        // SAFETY: by 1 the frame is mapped, aligned and of this size, as long as the program runs
        // or until cold memory is mapped anew in the same place; by 2 the atomics alias nothing
        // mutable.
        unsafe { std::slice::from_raw_parts(frame.cast().as_ptr(), 1 << (self.0.frame_shift - 3)) }
    }

    /// Bytes of the arena that the host backs with huge pages, if it tells.
    pub fn huge_bytes(self) -> Option<u64> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let mut ours = false;
        let mut sum = None;
        for line in smaps.lines() {
            if let Some((start, end)) = line
                .split_once(' ')
                .and_then(|(range, _)| range.split_once('-'))
                .and_then(|(start, end)| {
                    Some((
                        usize::from_str_radix(start, 16).ok()?,
                        usize::from_str_radix(end, 16).ok()?,
                    ))
                })
            {
                ours = start < self.0.base + self.bytes() && self.0.base < end;
            } else if let Some(rest) = line.strip_prefix("AnonHugePages:")
                && ours
            {
                let kib: u64 = rest.trim().trim_end_matches(" kB").parse().ok()?;
                sum = Some(sum.unwrap_or(0) + kib * 1024);
            }
        }
        sum
    }

    /// How many frames there are room for.
    pub fn frames(self) -> usize {
        self.0.frames as usize
    }

    /// How large the arena is.
    pub fn bytes(self) -> usize {
        (self.0.frames as usize) << self.0.frame_shift
    }

    /// Which frame of the arena is at `address`, counted from the first; `None` if none is.
    #[inline]
    pub fn number(self, address: usize) -> Option<usize> {
        let offset = address.wrapping_sub(self.0.base);
        let index = offset >> self.0.frame_shift;
        (offset & ((1 << self.0.frame_shift) - 1) == 0 && index < self.0.frames as usize)
            .then_some(index)
    }

    /// Maps fresh zero pages over the arena.
    fn map_anew(self) -> Result<(), Error> {
        let bytes = self.bytes().next_multiple_of(HUGE);
        let advice = match self.0.memory {
            Memory::Warm => libc::MADV_HUGEPAGE,
            Memory::Cold => libc::MADV_NOHUGEPAGE,
        };
        // SAFETY: `reserve` reserved these bytes for this arena alone; when they were mapped
        // before, the caller of `start_round` promised that they are not in use. The advice changes
        // no contents, and a host without huge pages may refuse it.
        unsafe {
            let at = ptr::with_exposed_provenance_mut(self.0.base);
            let mapped = libc::mmap(
                at,
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            );
            if mapped == libc::MAP_FAILED {
                return Err(Error::Map(io::Error::last_os_error()));
            }
            libc::madvise(at, bytes, advice);
        }
        Ok(())
    }

    /// Writes to every page of the host, so that none faults later.
    fn touch(self) {
        let base: *mut u8 = ptr::with_exposed_provenance_mut(self.0.base);
        const STEP: usize = 64 << 20;
        let mut progress = Progress::new((self.bytes() / STEP) as u64);
        for offset in (0..self.bytes()).step_by(4096) {
            if offset % STEP == 0 {
                progress.step("preparing memory");
            }
            // SAFETY: the byte is within the arena, which is mapped; no frame is taken yet.
            unsafe { base.add(offset).write_volatile(0) };
        }
    }
}

/// Reserves addresses, aligned to a huge page, without memory behind them.
fn reserve(bytes: usize) -> io::Result<usize> {
    let length = bytes
        .checked_next_multiple_of(HUGE)
        .and_then(|length| length.checked_add(HUGE))
        .ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: a new mapping at an address of the host's choice disturbs nothing.
    let mapped = unsafe {
        libc::mmap(
            ptr::null_mut(),
            length,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(mapped.expose_provenance().next_multiple_of(HUGE))
}

/// Whether this computer could give so much memory for tables.
pub fn check_available(bytes: u64) -> Result<(), Error> {
    let available = available_memory();
    if bytes > available {
        return Err(too_much(bytes, available));
    }
    Ok(())
}

fn too_much(bytes: u64, available: u64) -> Error {
    Error::Memory { needed: human(bytes), available: human(available) }
}

/// Memory that a program could use without others being swapped out; all there is if the host does
/// not tell.
fn available_memory() -> u64 {
    std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|meminfo| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
            let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
            Some(kib * 1024)
        })
        .unwrap_or(u64::MAX)
}

/// A number that differs between running threads and costs nothing to get.
#[inline]
fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| ptr::from_ref(place).addr())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(frames: u64, memory: Memory) -> Arena {
        Arena::new(frames, 12, memory).unwrap()
    }

    fn address(frame: Option<NonNull<u8>>) -> usize {
        frame.unwrap().addr().get()
    }

    #[test]
    fn frames_are_apart_and_run_out() {
        let arena = arena(3, Memory::Warm);
        let first = address(arena.take());
        assert_eq!(first % HUGE, 0);
        assert_eq!(address(arena.take()), first + 4096);
        assert_eq!(address(arena.take()), first + 8192);
        assert!(arena.take().is_none());
        assert_eq!((arena.held(), arena.taken()), (3, 3));
    }

    #[test]
    fn a_frame_given_back_is_handed_out_again() {
        let arena = arena(2, Memory::Warm);
        let (first, second) = (address(arena.take()), address(arena.take()));
        arena.give_back(first);
        assert_eq!(arena.held(), 1);
        assert_eq!(address(arena.take()), first);
        arena.give_back(second);
        arena.give_back(first);
        assert_eq!((arena.held(), arena.taken()), (0, 3));
        assert!(!arena.misused());
    }

    #[test]
    fn giving_back_what_is_not_held_is_noticed() {
        let misuse = |give: fn(usize) -> usize| {
            let arena = arena(2, Memory::Warm);
            let frame = address(arena.take());
            arena.give_back(give(frame));
            arena.misused()
        };
        assert!(!misuse(|frame| frame));
        assert!(misuse(|frame| frame + 4096));
        assert!(misuse(|frame| frame + 8));
        assert!(misuse(|frame| frame - 4096));
        assert!(misuse(|_| 0));
    }

    #[test]
    fn cold_memory_is_zero_each_round() {
        let arena = arena(1, Memory::Cold);
        for _ in 0..2 {
            let frame = arena.take().unwrap();
            // SAFETY: the frame was just taken, and has no other user.
            let entries = unsafe { arena.entries(frame) };
            assert_eq!(entries[511].load(Relaxed), 0);
            entries[511].store(7, Relaxed);
            assert_eq!(arena.entry(frame.addr().get() as u64, 511), Some(7));
            // SAFETY: `entries` is not used below.
            unsafe { arena.start_round() }.unwrap();
        }
    }

    #[test]
    fn only_entries_of_held_tables_can_be_read() {
        let arena = arena(1, Memory::Warm);
        let frame = address(arena.take_zeroed()) as u64;
        assert_eq!(arena.entry(frame, 0), Some(0));
        assert_eq!(arena.entry(frame, 512), None);
        assert_eq!(arena.entry(frame + 8, 0), None);
        assert_eq!(arena.entry(0, 0), None);
        arena.give_back(frame as usize);
        assert_eq!(arena.entry(frame, 0), None);
    }

    #[test]
    fn another_thread_gets_nothing() {
        let arena = arena(1, Memory::Warm);
        assert!(std::thread::spawn(move || arena.take().is_none()).join().unwrap());
    }

    #[test]
    fn more_than_there_is_is_refused() {
        assert!(matches!(Arena::new(1 << 50, 12, Memory::Warm), Err(Error::Memory { .. })));
        assert!(matches!(Arena::new(u64::MAX, 16, Memory::Cold), Err(Error::Memory { .. })));
    }
}
