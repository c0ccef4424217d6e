//! Entries, and the announcements of walks, keep what they promise to processors that share them.

use std::sync::Arc;

use loom::thread;
use tablewright::Pa;
use tablewright::shared::{Epochs, WalkSlot};

use crate::tables::{ADDRESS, PRESENT, ROOT, Tables, frame};

#[test]
fn one_of_several_claims_an_entry_and_the_others_see_its_table() {
    for others in 1..=2 {
        loom::model(move || {
            let tables = Tables::new();
            tables.entry(ROOT, 0).store(0);
            // Each has a table of its own, with the number of its frame in one entry, and claims
            // the entry of the root.
            let claim = |tables: &Tables, mine: Pa| {
                tables.entry(mine, 1).store(mine.get());
                let winner = match tables.entry(ROOT, 0).compare_exchange(0, mine.get() | PRESENT) {
                    Ok(()) => mine,
                    Err(now) => Pa::new(now & ADDRESS),
                };
                assert_eq!(tables.entry(winner, 1).load(), winner.get());
                (winner, winner == mine)
            };
            let others: Vec<_> = (0..others)
                .map(|number| {
                    let tables = tables.clone();
                    thread::spawn(move || claim(&tables, frame(2 + number)))
                })
                .collect();
            let mut results = vec![claim(&tables, frame(1))];
            results.extend(others.into_iter().map(|other| other.join().unwrap()));
            assert!(results.iter().all(|(winner, _)| *winner == results[0].0));
            assert_eq!(results.iter().filter(|(_, won)| *won).count(), 1);
        });
    }
}

#[test]
fn a_reader_that_follows_a_link_sees_the_table_behind_it() {
    for readers in 1..=2 {
        loom::model(move || {
            let tables = Tables::new();
            let child = frame(1);
            tables.entry(ROOT, 0).store(0);
            let readers: Vec<_> = (0..readers)
                .map(|_| {
                    let tables = tables.clone();
                    thread::spawn(move || {
                        if tables.entry(ROOT, 0).follow() != 0 {
                            let entries = [0, 3].map(|index| tables.entry(child, index).load());
                            assert_eq!(entries, [5, 6]);
                        }
                    })
                })
                .collect();
            tables.entry(child, 0).store(5);
            tables.entry(child, 3).store(6);
            tables.entry(ROOT, 0).link(child.get() | PRESENT);
            for reader in readers {
                reader.join().unwrap();
            }
        });
    }
}

#[test]
fn a_table_that_a_walk_may_hold_is_not_past() {
    for walks in 1..=2 {
        loom::model(move || {
            let tables = Tables::new();
            let child = frame(1);
            tables.entry(child, 0).store(5);
            tables.entry(ROOT, 0).store(child.get() | PRESENT);
            // What a thread of a model borrows has to live for ever.
            let slots: &'static [WalkSlot] =
                Vec::leak((0..walks).map(|_| WalkSlot::new()).collect());
            let epochs = Arc::new(Epochs::new(slots));
            let walks: Vec<_> = (0..walks)
                .map(|cpu| {
                    let (tables, epochs) = (tables.clone(), epochs.clone());
                    thread::spawn(move || {
                        // SAFETY: this thread alone has the number (1., 3.), without interrupts
                        // (2.), and nothing else is made of the slots (4.).
                        let _walk = unsafe { epochs.enter(cpu) }.unwrap();
                        if tables.entry(ROOT, 0).follow() != 0 {
                            assert_eq!(tables.entry(child, 0).load(), 5);
                        }
                    })
                })
                .collect();
            tables.entry(ROOT, 0).store(0);
            let period = epochs.advance();
            if epochs.is_over(period) {
                tables.poison(child);
            }
            for walk in walks {
                walk.join().unwrap();
            }
        });
    }
}
