//! x86-64: TLB invalidations, the values of CR3, EPTP and nCR3, and what CPUID says.
//!
//! Sources: Intel 64 and IA-32 Architectures Software Developer's Manual (SDM); AMD64 Architecture
//! Programmer's Manual (APM).
//!
//! A processor forgets for itself, unless it has INVLPGB. Where there are several without it, the
//! others are told as [`shootdown`](crate::shootdown) says, and each does what it is told by
//! [`Cpu::forget`].

#[cfg(target_arch = "x86_64")]
mod execute;
mod features;
mod registers;

#[cfg(target_arch = "x86_64")]
pub use execute::{execute, invept, load_cr3, set_up, set_up_with, tlbsync};
pub use features::{EptFeatures, Features};
pub use registers::{Extended, cr3, eptp, ncr3};

use crate::addr::{Level, Pa};
use crate::invalidation::{Invalidation, Stale, What};
use crate::shootdown::LocalFlush;
use crate::shootdown::amd::{self, Invlpgb};
#[cfg(target_arch = "x86_64")]
use crate::{platform::Barrier, shootdown::amd::Amd};

/// What one INVPCID invalidates (SDM vol. 2A, INVPCID). It has what is cached of tables go, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invpcid {
    /// Type 0: one address under one identifier. Global translations stay.
    Address {
        /// The identifier.
        pcid: u16,
        /// The address.
        at: u64,
    },
    /// Type 1: all under one identifier. Global translations stay.
    Space(u16),
    /// Type 2: everything.
    Everything,
    /// Type 3: all under all identifiers. Global translations stay.
    All,
}

/// What one INVEPT invalidates (SDM vol. 3C 31.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invept {
    /// Type 1: what was made of the tables that this [EPTP](eptp) points to.
    Tables(u64),
    /// Type 2: everything.
    Everything,
}

/// What a flush executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// INVLPG: an address under the identifier that is loaded, global or not, and all that is
    /// cached of tables under that identifier (SDM vol. 3A 5.10.4.1).
    Invlpg(u64),
    /// INVPCID.
    Invpcid(Invpcid),
    /// INVLPGB.
    Invlpgb(Invlpgb),
    /// CR3 is loaded with what it holds, bit 63 clear: all under the identifier that is loaded.
    /// Global translations stay.
    LoadCr3,
    /// `CR4.PGE` is changed and changed back: everything.
    ToggleCr4,
}

/// The control registers that decide by which instructions a processor forgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
}

impl Loaded {
    /// The identifier that is loaded; `None` if there are none (`CR4.PCIDE`, bit 17).
    const fn pcid(self) -> Option<u16> {
        if self.cr4 >> 17 & 1 != 0 { Some((self.cr3 & 0xfff) as u16) } else { None }
    }
}

/// The `barrier` and the `invalidate` of a [`Platform`](crate::Platform) with tables of
/// [`X86_64`](crate::format::X86_64): on a machine with one processor, or with INVLPGB.
///
/// The program stays on its processor, and loads no other space, from the start of an `invalidate`
/// to its end.
///
/// Where global translations are meant, and no tables were detached, INVLPG is relied on. Some
/// Intel processors of 2021 and later, without a fix of their microcode, keep them if `CR4.PCIDE`
/// is set; leave it clear there.
///
/// ```
/// use tablewright::arch::x86_64::{Cpu, Features, Instruction, Loaded};
/// use tablewright::{Invalidation, Pa, Stale, What};
///
/// // On the processor itself: `Features::read()`.
/// let cpu = Cpu::alone(Features::LEAST);
/// let pages = Stale { first: 0x7000, last: 0x8fff, level: None, tables: false };
/// let flush = Invalidation { root: Pa::new(0x1000), id: 0, global: false, what: What::Ranges(&[pages]) };
/// let mut all = Vec::new();
/// let loaded = Loaded { cr3: 0x1000, cr4: 1 << 7 | 1 << 5 }; // PGE and PAE
/// cpu.instructions(&flush, loaded, |one| all.push(one)); // what `cpu.invalidate(&flush)` executes
/// assert_eq!(all, [Instruction::Invlpg(0x7000), Instruction::Invlpg(0x8000)]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    features: Features,
    broadcast: bool,
}

impl Cpu {
    /// One processor, which forgets for itself.
    pub const fn alone(features: Features) -> Self {
        Self { features, broadcast: false }
    }

    /// Processors that hear INVLPGB. The identifier of a space is the same on all of them. `None`
    /// if they do not have it.
    pub const fn broadcast(features: Features) -> Option<Self> {
        match features.invlpgb {
            Some(_) => Some(Self { features, broadcast: true }),
            None => None,
        }
    }

    /// What the processors can do.
    pub const fn features(&self) -> Features {
        self.features
    }

    /// The instructions of a flush, in order, on a processor with these registers.
    pub fn instructions(
        &self,
        flush: &Invalidation<'_>,
        loaded: Loaded,
        mut each: impl FnMut(Instruction),
    ) {
        if let (true, Some(most)) = (self.broadcast, self.features.invlpgb) {
            // Without identifiers all spaces have the one that is loaded, 0.
            let id = loaded.pcid().map_or(0, |_| flush.id);
            let flush = Invalidation { id, ..*flush };
            return amd::encode(most, &flush, |one| each(Instruction::Invlpgb(one)));
        }
        let &Invalidation { id, global, .. } = flush;
        match flush.what {
            // What is cached of tables that global translations were found in is kept under any
            // identifier.
            What::Ranges(ranges) if !ranges.iter().any(|range| range.tables) => {
                for range in ranges {
                    self.range(id, range, global, loaded, &mut each);
                }
            }
            _ if global => each(self.everything()),
            _ => each(self.space(id, loaded)),
        }
    }

    /// The instructions that do what a processor is [told](LocalFlush) by another.
    pub fn forgetting(&self, what: &LocalFlush, loaded: Loaded, mut each: impl FnMut(Instruction)) {
        match *what {
            LocalFlush::Everything => each(self.everything()),
            LocalFlush::All if self.features.invpcid => each(Instruction::Invpcid(Invpcid::All)),
            LocalFlush::All if loaded.pcid().is_none() => each(Instruction::LoadCr3),
            LocalFlush::All => each(Instruction::ToggleCr4),
            LocalFlush::Space(id) => each(self.space(id, loaded)),
            LocalFlush::Range { id, range, global } => {
                let ranges = [range];
                let flush =
                    Invalidation { root: Pa::new(0), id, global, what: What::Ranges(&ranges) };
                Self::alone(self.features).instructions(&flush, loaded, each);
            }
        }
    }

    const fn everything(&self) -> Instruction {
        match self.features.invpcid {
            true => Instruction::Invpcid(Invpcid::Everything),
            false => Instruction::ToggleCr4,
        }
    }

    /// All under one identifier.
    fn space(&self, id: u16, loaded: Loaded) -> Instruction {
        match loaded.pcid() {
            None => Instruction::LoadCr3,
            Some(pcid) if pcid == id => Instruction::LoadCr3,
            Some(_) if self.features.invpcid => Instruction::Invpcid(Invpcid::Space(id)),
            Some(_) => Instruction::ToggleCr4,
        }
    }

    /// Leaves of a range, one after the other.
    fn range(
        &self,
        id: u16,
        range: &Stale,
        global: bool,
        loaded: Loaded,
        each: &mut impl FnMut(Instruction),
    ) {
        let elsewhere = loaded.pcid().is_some_and(|pcid| pcid != id);
        if elsewhere && !self.features.invpcid {
            // No instruction names another identifier.
            return each(Instruction::ToggleCr4);
        }
        // An address invalidates the one leaf around it (SDM vol. 3A 5.10.4.1).
        let step = 1u64 << (12 + 9 * range.level.map_or(0, Level::height).min(2));
        let mut at = range.first & !(step - 1);
        loop {
            if global || !elsewhere {
                each(Instruction::Invlpg(at));
            }
            if elsewhere {
                each(Instruction::Invpcid(Invpcid::Address { pcid: id, at }));
            }
            if range.last - at < step {
                return;
            }
            at += step;
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Cpu {
    /// What [`Platform::barrier`](crate::Platform::barrier) has to do.
    ///
    /// Walkers see stores in program order (SDM vol. 3A 9.2.2), so that only the compiler has to be
    /// kept from moving them. What this processor has forgotten it has forgotten; TLBSYNC waits for
    /// others.
    #[inline]
    pub fn barrier(&self, barrier: Barrier) {
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst);
        if barrier == Barrier::Complete && self.broadcast {
            tlbsync();
        }
    }

    /// What [`Platform::invalidate`](crate::Platform::invalidate) has to do.
    #[inline]
    pub fn invalidate(&self, flush: &Invalidation<'_>) {
        self.instructions(flush, Loaded::read(), execute);
    }

    /// What [`Actions::flush_local`](crate::shootdown::Actions::flush_local) has to do: this
    /// processor alone forgets.
    #[inline]
    pub fn forget(&self, what: &LocalFlush) {
        self.forgetting(what, Loaded::read(), execute);
    }
}

// SAFETY: the instructions are executed (1., 2.).
#[cfg(target_arch = "x86_64")]
unsafe impl Amd for Cpu {
    #[inline]
    fn invlpgb(&self, operands: Invlpgb) {
        execute(Instruction::Invlpgb(operands));
    }

    #[inline]
    fn tlbsync(&self) {
        tlbsync();
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use super::*;

    const PCIDE: u64 = 1 << 17;

    /// A translation that a processor remembers, or, without an address, what it remembers of
    /// tables.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Remembered {
        pcid: u16,
        page: Option<u64>,
        global: bool,
    }

    /// What a processor remembers after an instruction, from the manual (SDM vol. 3A 5.10.4.1).
    fn after(memory: &mut Vec<Remembered>, instruction: Instruction, loaded: Loaded) {
        let now = loaded.pcid().unwrap_or(0);
        memory.retain(|one| match instruction {
            Instruction::Invlpg(at) => match one.page {
                Some(page) => page != at >> 12 || !one.global && one.pcid != now,
                None => one.pcid != now,
            },
            Instruction::Invpcid(Invpcid::Address { pcid, at }) => {
                one.page != Some(at >> 12) || one.global || one.pcid != pcid
            }
            Instruction::Invpcid(Invpcid::Space(pcid)) => one.global || one.pcid != pcid,
            Instruction::Invpcid(Invpcid::All) => one.global,
            Instruction::LoadCr3 => one.global || one.pcid != now,
            Instruction::Invpcid(Invpcid::Everything) | Instruction::ToggleCr4 => false,
            Instruction::Invlpgb(_) => unreachable!("one processor"),
        });
    }

    /// Pages 0 to 7 and tables, under three identifiers, and global pages.
    fn memory(pcids: &[u16]) -> Vec<Remembered> {
        let pages = || (0..8).map(Some);
        let one = |pcid, page, global| Remembered { pcid, page, global };
        let own = |&pcid: &u16| pages().chain([None]).map(move |page| one(pcid, page, false));
        let global = pages().map(|page| one(pcids[0], page, true));
        pcids.iter().flat_map(own).chain(global).collect()
    }

    /// Whether a processor has to forget it for a flush.
    fn is_named(flush: &Invalidation<'_>, one: &Remembered) -> bool {
        let whose = match one.global {
            true => flush.global,
            // Of tables that global translations were found in, too.
            false => one.pcid == flush.id || flush.global && one.page.is_none(),
        };
        whose
            && match (flush.what, one.page) {
                (What::Everything, _) => true,
                (What::Ranges(ranges), None) => ranges.iter().any(|range| range.tables),
                (What::Ranges(ranges), Some(page)) => (ranges.iter())
                    .any(|range| (range.first >> 12..=range.last >> 12).contains(&page)),
            }
    }

    #[test]
    fn what_a_flush_names_is_forgotten() {
        let range = |first: u64, last: u64, tables| Stale {
            first: first << 12,
            last: (last << 12) | 0xfff,
            level: None,
            tables,
        };
        let some = [range(1, 1, false), range(4, 6, false)];
        let cut = [range(1, 1, false), range(4, 6, true)];
        let mut flushes = 0;
        for invpcid in [false, true] {
            let cpu = Cpu::alone(Features { invpcid, ..Features::LEAST });
            for (cr4, pcids) in [(0, &[0u16][..]), (PCIDE, &[0, 5, 9])] {
                for (&id, &now) in
                    pcids.iter().flat_map(|id| pcids.iter().map(move |now| (id, now)))
                {
                    let loaded = Loaded { cr3: 0x1000 | u64::from(now), cr4 };
                    for what in [What::Everything, What::Ranges(&some), What::Ranges(&cut)] {
                        for global in [false, true] {
                            let flush = Invalidation { root: Pa::new(0x1000), id, global, what };
                            let mut memory = memory(pcids);
                            cpu.instructions(&flush, loaded, |one| {
                                assert!(invpcid || !matches!(one, Instruction::Invpcid(_)));
                                after(&mut memory, one, loaded);
                            });
                            for one in &memory {
                                assert!(!is_named(&flush, one), "{flush:x?} {loaded:x?} {one:?}");
                            }
                            // No more than the space, if nothing global is meant and there are
                            // instructions for it.
                            if !global && (invpcid || id == now) {
                                assert!(memory.iter().any(|one| one.global), "{flush:x?}");
                                let others = memory.iter().filter(|one| one.pcid != id).count();
                                assert!(others >= 9 * (pcids.len() - 1), "{flush:x?}");
                            }
                            flushes += 1;
                        }
                    }
                }
            }
        }
        assert_eq!(flushes, 2 * (1 + 9) * 3 * 2);
    }

    #[test]
    fn what_a_processor_is_told_is_forgotten() {
        let range = Stale { first: 0x3000, last: 0x4fff, level: None, tables: false };
        for invpcid in [false, true] {
            let cpu = Cpu::alone(Features { invpcid, ..Features::LEAST });
            let loaded = Loaded { cr3: 0x1005, cr4: PCIDE };
            let left = |what| {
                let mut memory = memory(&[0, 5, 9]);
                cpu.forgetting(&what, loaded, |one| after(&mut memory, one, loaded));
                memory
            };
            assert_eq!(left(LocalFlush::Everything), []);
            assert!(left(LocalFlush::All).iter().all(|one| one.global));
            for id in [5, 9] {
                assert!(
                    (left(LocalFlush::Space(id)).iter()).all(|one| one.global || one.pcid != id)
                );
            }
            let global = false;
            let told = LocalFlush::Range { id: 5, range, global };
            let left = left(told);
            let page = |page| move |one: &&Remembered| one.pcid == 5 && one.page == Some(page);
            assert!(left.iter().find(page(3)).is_none() && left.iter().find(page(5)).is_some());
        }
    }

    #[test]
    fn large_leaves_take_one_instruction_each() {
        let cpu = Cpu::alone(Features::LEAST);
        let loaded = Loaded { cr3: 0, cr4: 0 };
        for (height, size) in [(0, 4096u64), (1, 2 << 20), (2, 1 << 30)] {
            let first = 0u64.wrapping_sub(4 * size);
            let range = Stale {
                first,
                last: u64::MAX, // the end of the address space is no place to wrap
                level: Some(Level::new(height)),
                tables: false,
            };
            let flush = Invalidation {
                root: Pa::new(0),
                id: 0,
                global: true,
                what: What::Ranges(&[range]),
            };
            let mut all = Vec::new();
            cpu.instructions(&flush, loaded, |one| all.push(one));
            let expected: Vec<_> =
                (0..4).map(|number| Instruction::Invlpg(first + number * size)).collect();
            assert_eq!(all, expected);
        }
    }

    #[test]
    fn a_broadcast_names_the_identifier_where_there_are_any() {
        assert_eq!(Cpu::broadcast(Features::LEAST), None);
        let features = Features { invlpgb: Some(7), ..Features::LEAST };
        let cpu = Cpu::broadcast(features).unwrap();
        let flush =
            Invalidation { root: Pa::new(0x1000), id: 5, global: false, what: What::Everything };
        // APM vol. 3, INVLPGB: RAX bit 1, the PCID is valid; EDX 27:16, the PCID.
        for (cr4, edx) in [(0, 0), (PCIDE, 5 << 16)] {
            let mut all = Vec::new();
            cpu.instructions(&flush, Loaded { cr3: 0, cr4 }, |one| all.push(one));
            let one = Invlpgb { rax: 2, ecx: 0, edx };
            assert_eq!(all, [Instruction::Invlpgb(one)]);
        }
    }
}
