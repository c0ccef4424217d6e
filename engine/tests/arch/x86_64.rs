//! Which instructions an x86-64 processor executes for a flush, against what a TLB then holds.

use tablewright::arch::x86_64::*;
use tablewright::shootdown::LocalFlush;
use tablewright::shootdown::amd::Invlpgb;
use tablewright::{Invalidation, Level, Pa, Stale, What};

const PCIDE: u64 = 1 << 17;

/// A translation that a processor remembers, or, without an address, what it remembers of
/// tables.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Remembered {
    pcid: u16,
    page: Option<u64>,
    global: bool,
}

/// Removes what an instruction invalidates, by the manual (SDM vol. 3A 5.10.4.1).
fn after(memory: &mut Vec<Remembered>, instruction: Instruction, loaded: Loaded) {
    let now = if loaded.cr4 & PCIDE != 0 { loaded.cr3 as u16 & 0xfff } else { 0 };
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
            (What::Ranges(ranges), Some(page)) => {
                (ranges.iter()).any(|range| (range.first >> 12..=range.last >> 12).contains(&page))
            }
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
            for (&id, &now) in pcids.iter().flat_map(|id| pcids.iter().map(move |now| (id, now))) {
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
            assert!((left(LocalFlush::Space(id)).iter()).all(|one| one.global || one.pcid != id));
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
        let flush =
            Invalidation { root: Pa::new(0), id: 0, global: true, what: What::Ranges(&[range]) };
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
