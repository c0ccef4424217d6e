//! Translations that invalidations of x86 leave behind, global ones, and tables with several
//! places: by hand, step by step.
//!
//! The descriptors are written here, so that no encoder has a part in it.

use std::cell::RefCell;
use std::rc::Rc;

use tablewright::{Half, Hooks, Level, Pa, Platform};
use tablewright_machine::{
    Architecture, Fault, Globals, Granule, Machine, Mapper, Memory, Regime, Rule, Setup, Time, Tlbi,
};

const PRESENT: u64 = 0x63;
const GLOBAL: u64 = 1 << 8;
const LARGE: u64 = 1 << 7;
const PAGE: u64 = 1 << 12;
const BLOCK: u64 = 1 << 21;

fn machine(cpus: usize) -> Machine {
    let mut setup = Setup::new(Architecture::x86_64(4), Memory::new(64, 12, 1 << 30));
    setup.scheduler.cpus = cpus;
    Machine::new(setup)
}

/// The machine's eyes on accesses to entries.
fn hooks<'h>(mapper: &'h Mapper<'_>) -> impl Hooks + 'h {
    mapper.hooks().unwrap()
}

/// A table, all zero.
fn table(mapper: &Mapper<'_>, height: u8) -> Pa {
    let level = Level::new(height);
    let frame = mapper.alloc_table(level).unwrap();
    // SAFETY: the entries of a frame without another owner.
    unsafe { hooks(mapper).fill(mapper.table(frame, level), 512, 0, 0) };
    frame
}

/// Writes an entry of a table, the first being number 0.
fn put(mapper: &Mapper<'_>, table: Pa, index: usize, bits: u64) {
    // SAFETY: an entry of the table.
    unsafe {
        let entry = mapper.table(table, Level::PAGE).add(index);
        hooks(mapper).exchange(entry, bits);
    }
}

/// A root, and the two tables below it: `[root, of 512 GiB, of 1 GiB]`.
fn space<'m>(machine: &'m Machine, id: u16) -> (Mapper<'m>, [Pa; 3]) {
    let mapper = machine.new_space();
    let tables = [3, 2, 1].map(|height| table(&mapper, height));
    put(&mapper, tables[0], 0, tables[1].get() | PRESENT);
    put(&mapper, tables[1], 0, tables[2].get() | PRESENT);
    mapper.attach(tables[0], Half::Lower, id);
    (mapper, tables)
}

fn local(tlbi: Tlbi) -> Tlbi {
    Tlbi { broadcast: false, ..tlbi }
}

/// Which pages of a block are found where nothing is any more, when these were and a broadcast has
/// gone out.
fn left(pages: &[u64], whole_table: bool, tlbi: Tlbi) -> (Vec<u64>, Vec<Rule>) {
    let machine = machine(1);
    let (mapper, [_, _, directory]) = space(&machine, 1);
    let below = table(&mapper, 0);
    let at = |page: u64| (1 << 40) + page * PAGE;
    for &page in pages {
        put(&mapper, below, page as usize, at(page) | PRESENT);
    }
    put(&mapper, directory, 0, below.get() | PRESENT);
    let found = RefCell::new(Vec::new());
    machine
        .run(|_| {
            mapper.load();
            for &page in pages {
                machine.read(page * PAGE).unwrap();
            }
            if whole_table {
                put(&mapper, directory, 0, 0);
            } else {
                (pages.iter()).for_each(|&page| put(&mapper, below, page as usize, 0));
            }
            machine.tlbi(tlbi);
            mapper.claim_as((0, BLOCK - 1), &tlbi);
            machine.dsb();
            let is_left = |page: &&u64| machine.read(**page * PAGE).is_ok();
            found.borrow_mut().extend(pages.iter().filter(is_left));
        })
        .unwrap();
    let rules = machine.finish().into_iter().map(|it| it.rule).collect();
    (found.take(), rules)
}

/// APM volume 3, INVLPGB: each address takes the one leaf around it.
#[test]
fn a_stride_passes_over_the_pages_between() {
    let strided =
        Tlbi { id: Some(1), range: Some((0, 2 * BLOCK - 1)), stride: Some(21), ..Tlbi::ALL };
    let every = Tlbi { stride: None, ..strided };
    assert_eq!(left(&[0], false, strided), (vec![], vec![]));
    assert_eq!(left(&[0, 1, 7], false, every), (vec![], vec![]));
    let (found, rules) = left(&[0, 1, 7], false, strided);
    assert_eq!(found, [1, 7]);
    assert_eq!(rules[0], Rule::Invalidation);
    // A table that went with its pages: they are all owed.
    assert_eq!(left(&[0, 3], true, every), (vec![], vec![]));
    assert_eq!(left(&[3], true, strided).1[0], Rule::Invalidation);
    // One that was empty is forgotten with any address below it.
    assert_eq!(left(&[], true, strided), (vec![], vec![]));
}

/// A table that went is remembered after an invalidation of leaves alone, `FINAL_ONLY`.
#[test]
fn what_is_for_leaves_alone_leaves_a_table_that_went() {
    let final_only =
        Tlbi { id: Some(1), range: Some((0, BLOCK - 1)), leaves_only: true, ..Tlbi::ALL };
    assert_eq!(left(&[5], false, final_only), (vec![], vec![]));
    let (found, rules) = left(&[5], true, final_only);
    assert_eq!(found, [5]);
    assert_eq!(rules[0], Rule::Invalidation);
}

/// A hint of a level is for leaves of that level, also where a table goes with them (DDI 0487
/// D8.17, TTL).
#[test]
fn a_hint_of_another_level_leaves_what_is_below_a_table_that_went() {
    let regime = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
    for (depth, rules) in [(0, vec![]), (1, vec![Rule::Invalidation])] {
        let machine =
            Machine::new(Setup::new(Architecture::arm64(regime), Memory::new(64, 12, 1 << 30)));
        let mapper = machine.new_space();
        let tables = [3, 2, 1, 0].map(|height| table(&mapper, height));
        for (above, below) in tables.iter().zip(&tables[1..]) {
            put(&mapper, *above, 0, below.get() | 3);
        }
        // A page of its space, accessed.
        put(&mapper, tables[3], 0, 1 << 40 | 1 << 11 | 1 << 10 | 3);
        mapper.attach(tables[0], Half::Lower, 1);
        machine
            .run(|_| {
                machine.dsb_stores();
                mapper.load();
                machine.read(0).unwrap();
                put(&mapper, tables[2], 0, 0);
                machine.dsb_stores();
                let tlbi = Tlbi {
                    id: Some(1),
                    range: Some((0, BLOCK - 1)),
                    depth: Some(depth),
                    ..Tlbi::ALL
                };
                machine.tlbi(tlbi);
                mapper.claim_as((0, BLOCK - 1), &tlbi);
                machine.dsb();
            })
            .unwrap();
        let broken: Vec<_> = machine.finish().into_iter().map(|it| it.rule).collect();
        assert_eq!(broken, rules);
    }
}

/// SDM volume 3A 5.10.2.4 and 5.10.4.1, instruction by instruction.
#[test]
fn a_global_translation_survives_what_spares_it_and_is_found_under_every_root() {
    let page = Some((0, PAGE - 1));
    let broadcast = Tlbi { id: Some(1), range: page, ..Tlbi::ALL };
    let globals = |globals| Tlbi { globals, ..broadcast };
    let all = [
        (Tlbi::invpcid(Some(1), page), true),
        (Tlbi::invpcid(Some(1), None), true),
        (Tlbi::invpcid(None, None), true),
        (globals(Globals::Spared), true),
        (globals(Globals::Included), false),
        // Under another identifier.
        (Tlbi::invlpg(9, (0, PAGE - 1)), false),
        (local(Tlbi::ALL), false),
    ];
    for (tlbi, survives) in all {
        let machine = machine(1);
        let (first, [_, _, directory]) = space(&machine, 1);
        let (second, _) = space(&machine, 2);
        let pages = table(&first, 0);
        put(&first, pages, 0, 1 << 40 | PRESENT | GLOBAL);
        put(&first, directory, 0, pages.get() | PRESENT);
        machine
            .run(|_| {
                first.load();
                machine.read(0).unwrap();
                put(&first, pages, 0, 0);
                machine.tlbi(tlbi);
                machine.dsb();
                // A load of CR3 that drops the old identifier.
                second.load();
                machine.tlbi(Tlbi::invpcid(Some(1), None));
                machine.dsb();
                assert_eq!(machine.read(0).is_ok(), survives, "{tlbi:?}");
            })
            .unwrap();
        let broken = !machine.finish().is_empty();
        assert_eq!(broken, survives, "{tlbi:?}");
    }
}

/// TLBI ASIDE1 spares what is global, and VAE1 of any identifier does not (DDI 0487 C5.5, D8.17).
#[test]
fn a_global_translation_of_arm64_goes_with_its_address() {
    let page = Some((0, PAGE - 1));
    let of = |range| Tlbi { id: Some(9), range, ..Tlbi::ALL };
    assert!(of(page).covers(1, true, (0, PAGE - 1), 0, false));
    assert!(!of(None).covers(9, true, (0, PAGE - 1), 0, false));
    assert!(!of(page).covers(1, false, (0, PAGE - 1), 0, false));
}

/// A CPU that has another root loaded uses a global leaf, too.
#[test]
fn a_global_leaf_is_owed_by_cpus_that_have_another_root() {
    for told in [false, true] {
        let machine = machine(2);
        let spaces = [1, 2].map(|id| {
            let mapper = machine.new_space();
            let tables = [3, 2, 1].map(|height| table(&mapper, height));
            put(&mapper, tables[0], 0, tables[1].get() | PRESENT);
            put(&mapper, tables[1], 0, tables[2].get() | PRESENT);
            mapper.track(tables[0], Half::Lower);
            (mapper, tables[2], id)
        });
        let (first, directory, _) = spaces[0];
        let pages = table(&first, 0);
        let page = machine.take_page().unwrap();
        put(&first, pages, 0, page.get() | PRESENT | GLOBAL);
        put(&first, directory, 0, pages.get() | PRESENT);
        machine
            .run(|cpu| {
                let flush = Tlbi::invlpg(1, (0, PAGE - 1));
                if cpu.id() == 1 {
                    first.load_as(1);
                    machine.read(0).unwrap();
                    spaces[1].0.load_as(2);
                    first.leave();
                    cpu.spend(Time::us(10));
                    cpu.order();
                    if told {
                        machine.tlbi(Tlbi::invlpg(2, (0, PAGE - 1)));
                        machine.dsb();
                    }
                    return;
                }
                first.load_as(1);
                cpu.spend(Time::us(5));
                cpu.order();
                put(&first, pages, 0, 0);
                cpu.spend(Time::us(10));
                cpu.order();
                machine.tlbi(flush);
                let by_all = Tlbi { broadcast: true, ..flush };
                first.claim_as((0, PAGE - 1), &by_all);
                machine.dsb();
                machine.give_page(page);
            })
            .unwrap();
        let broken: Vec<_> = machine.finish().into_iter().map(|it| it.rule).collect();
        assert_eq!(broken.is_empty(), told, "{broken:?}");
    }
}

/// A table of pages is linked at two addresses, and at one of them in a second root. A page goes,
/// and is forgotten in some of these places.
#[test]
fn a_page_is_owed_at_every_place_of_its_table() {
    let tlbi =
        |id, first: u64| Tlbi { id: Some(id), range: Some((first, first + PAGE - 1)), ..Tlbi::ALL };
    let places = [tlbi(1, 0), tlbi(1, 4 * BLOCK), tlbi(2, 0)];
    for left_out in 0..=places.len() {
        let machine = machine(1);
        let (first, [_, _, directory]) = space(&machine, 1);
        let (second, [_, other, _]) = space(&machine, 2);
        let pages = table(&first, 0);
        let page = machine.take_page().unwrap();
        put(&first, pages, 0, page.get() | PRESENT);
        put(&first, directory, 0, pages.get() | PRESENT);
        put(&first, directory, 4, pages.get() | PRESENT);
        // A directory with only the first address, in the second root.
        let alone = table(&second, 1);
        put(&second, alone, 0, pages.get() | PRESENT);
        put(&second, other, 0, alone.get() | PRESENT);
        put(&first, pages, 0, 0);
        for (number, &tlbi) in places.iter().enumerate() {
            if number != left_out {
                machine.tlbi(tlbi);
            }
        }
        // What became of the second root's first directory.
        machine.tlbi(Tlbi {
            id: Some(2),
            range: Some((BLOCK, (1 << 30) - 1)),
            all_tables: true,
            ..Tlbi::ALL
        });
        machine.dsb();
        machine.give_page(page);
        let broken: Vec<_> = machine.finish().into_iter().map(|it| it.rule).collect();
        if left_out == places.len() {
            assert_eq!(broken, []);
        } else {
            assert_eq!(broken[0], Rule::FreedEarly, "{left_out}");
        }
    }
}

/// A table that loses one of its links stays reachable by the other, and is not given back before
/// the place that it has lost is forgotten.
#[test]
fn a_table_with_two_links_may_go_when_both_are_forgotten() {
    for (first_forgotten, early) in [(true, false), (false, true)] {
        let machine = machine(1);
        let (mapper, [_, _, directory]) = space(&machine, 1);
        let pages = table(&mapper, 0);
        let below = |block: u64| Tlbi {
            id: Some(1),
            range: Some((block * BLOCK, (block + 1) * BLOCK - 1)),
            ..Tlbi::ALL
        };
        put(&mapper, pages, 0, 1 << 40 | PRESENT);
        put(&mapper, directory, 0, pages.get() | PRESENT);
        put(&mapper, directory, 4, pages.get() | PRESENT);
        mapper.load();
        put(&mapper, directory, 0, 0);
        if first_forgotten {
            machine.tlbi(below(0));
            machine.dsb();
        }
        assert_eq!(machine.read(4 * BLOCK), Ok(0));
        put(&mapper, directory, 4, 0);
        machine.tlbi(below(4));
        machine.dsb();
        // SAFETY: software does not read it as a table any more; whether a walker may is the
        // question.
        unsafe { mapper.free_table(pages, Level::PAGE) };
        let broken = machine.violations();
        assert_eq!(!broken.is_empty(), early, "{broken:?}");
        assert!(broken.iter().all(|it| it.rule == Rule::FreedEarly));
    }
}

/// One of its links goes, and what was below it there is owed leaf by leaf, though it is reachable
/// elsewhere.
#[test]
fn what_is_below_a_table_is_owed_where_it_has_lost_a_link() {
    for (stride, rules) in [(None, vec![]), (Some(21), vec![Rule::Invalidation])] {
        let machine = machine(1);
        let (mapper, [_, _, directory]) = space(&machine, 1);
        let pages = table(&mapper, 0);
        put(&mapper, pages, 7, 1 << 40 | PRESENT);
        put(&mapper, directory, 0, pages.get() | PRESENT);
        put(&mapper, directory, 4, pages.get() | PRESENT);
        put(&mapper, directory, 0, 0);
        let tlbi = Tlbi { id: Some(1), range: Some((0, BLOCK - 1)), stride, ..Tlbi::ALL };
        machine.tlbi(tlbi);
        mapper.claim_as((0, BLOCK - 1), &tlbi);
        machine.dsb();
        let broken: Vec<_> = machine.finish().into_iter().map(|it| it.rule).collect();
        assert_eq!(broken, rules);
    }
}

/// A half that a space shares with another is reachable when the space is gone.
#[test]
fn a_half_that_is_shared_outlives_a_space() {
    let machine = machine(1);
    let (first, [_, middle, directory]) = space(&machine, 1);
    let second = machine.new_space();
    let root = table(&second, 3);
    put(&second, root, 0, middle.get() | PRESENT);
    second.attach(root, Half::Lower, 2);
    first.detach();
    machine.tlbi(Tlbi::ALL);
    machine.dsb();
    second.load();
    put(&second, directory, 1, 1 << 40 | PRESENT | LARGE);
    assert_eq!(machine.read(BLOCK), Ok(0));
    // It is found in the space that is left.
    put(&second, directory, 1, 0);
    let tlbi = |id| Tlbi { id: Some(id), range: Some((BLOCK, 2 * BLOCK - 1)), ..Tlbi::ALL };
    machine.tlbi(tlbi(1));
    machine.dsb();
    assert!(machine.read(BLOCK).is_ok());
    machine.tlbi(tlbi(2));
    machine.dsb();
    assert!(matches!(machine.read(BLOCK), Err(Fault::Translation { .. })));
    assert_eq!(machine.finish(), []);
}

/// A trace says which CPU has loaded which root, and under which identifier.
#[test]
fn a_trace_has_the_roots_that_are_loaded() {
    let machine = machine(1);
    let (mapper, [root, ..]) = space(&machine, 7);
    let lines = Rc::new(RefCell::new(Vec::new()));
    let sink = Rc::clone(&lines);
    machine.trace(Box::new(move |line| sink.borrow_mut().push(line.to_owned())));
    machine
        .run(|_| {
            mapper.load();
            machine.unload();
        })
        .unwrap();
    let lines = lines.take();
    let roots: Vec<_> = lines.iter().filter(|line| line.contains(" root ")).collect();
    assert_eq!(roots.len(), 2, "{lines:?}");
    let loaded = format!("0 root pa={:#x} id=0x7 half=both", root.get());
    assert!(roots[0].contains(&loaded), "{}", roots[0]);
    assert!(roots[1].contains("0 root pa=* id=* half=both"));
}
