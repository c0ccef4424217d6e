//! Walks inside of walks, on one processor: in interrupts, and in any order.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use tablewright::shared::{Epochs, WalkSlot};

use crate::tables::POISON;

/// A descriptor, and what the table says that it points to.
struct Tree {
    epochs: Epochs<'static>,
    descriptor: AtomicU64,
    table: AtomicU64,
}

impl Tree {
    fn new() -> Arc<Self> {
        // What a thread of a model borrows has to live for ever.
        let slots: &'static [WalkSlot] = Vec::leak(vec![WalkSlot::new()]);
        Arc::new(Self {
            epochs: Epochs::new(slots),
            descriptor: AtomicU64::new(1),
            table: AtomicU64::new(5),
        })
    }

    /// Goes to the table, if it is there.
    fn read(&self) {
        if self.descriptor.load(Ordering::Acquire) != 0 {
            let read = self.table.load(Ordering::Relaxed);
            assert_eq!(read, 5, "freed under a walk");
        }
    }

    /// Cuts the table off, and frees it if no walk holds it. Whether it has.
    fn cut(&self) -> bool {
        self.descriptor.swap(0, Ordering::AcqRel);
        let period = self.epochs.advance();
        let past = self.epochs.is_over(period);
        if past {
            self.table.store(POISON, Ordering::Relaxed);
        }
        past
    }
}

/// A processor walks, and is interrupted by a walk at each point of its start and its end. Another
/// detaches the table.
#[test]
fn an_interrupt_may_come_at_any_point_of_a_walk() {
    for at in 1.. {
        let reached = Arc::new(AtomicBool::new(false));
        let is_reached = reached.clone();
        loom::model(move || {
            let tree = Tree::new();
            let cutter = thread::spawn({
                let tree = tree.clone();
                move || tree.cut()
            });
            let points = Cell::new(0);
            let interrupt = || {
                points.set(points.get() + 1);
                if points.get() == at {
                    reached.store(true, Relaxed);
                    // SAFETY: the other thread cuts, and does not enter (1., 3.); the interrupt
                    // ends what it starts (2.); the slot is of these epochs (4.).
                    let _walk = unsafe { tree.epochs.enter(0) };
                    tree.read();
                }
            };
            // SAFETY: as in the interrupt.
            let walk = unsafe { tree.epochs.enter_interrupted(0, interrupt) }.unwrap();
            tree.read();
            walk.leave_interrupted(interrupt);
            cutter.join().unwrap();
            let later = tree.epochs.advance();
            assert!(tree.epochs.is_over(later), "no walk is under way");
        });
        if !is_reached.load(Relaxed) {
            assert!(at > 10, "a start has six points and an end four");
            break;
        }
    }
}

/// Two walks of one processor, the first of which ends first, and a third in the midst of the
/// second.
#[test]
fn walks_of_one_processor_may_end_in_any_order() {
    loom::model(|| {
        let tree = Tree::new();
        let cutter = thread::spawn({
            let tree = tree.clone();
            move || tree.cut()
        });
        // SAFETY: the other thread does not enter (1., 3.); no interrupts (2.); the slot is of
        // these epochs (4.).
        let enter = || unsafe { tree.epochs.enter(0) }.unwrap();
        let (one, two) = (enter(), enter());
        drop(one);
        tree.read();
        drop(enter());
        tree.read();
        drop(two);
        cutter.join().unwrap();
        let later = tree.epochs.advance();
        assert!(tree.epochs.is_over(later), "no walk is under way");
    });
}

/// A cut that finds the announcement of a later walk comes after what the earlier one wrote.
#[test]
fn a_walk_whose_successor_is_announced_is_over() {
    loom::model(|| {
        let tree = Tree::new();
        let cutter = thread::spawn({
            let tree = tree.clone();
            move || tree.cut()
        });
        for _ in 0..2 {
            // SAFETY: the other thread does not enter (1., 3.); no interrupts (2.); the slot is of
            // these epochs (4.).
            let _walk = unsafe { tree.epochs.enter(0) }.unwrap();
            if tree.descriptor.load(Ordering::Acquire) != 0 {
                tree.table.store(5, Ordering::Relaxed);
            }
        }
        let freed = cutter.join().unwrap();
        let table = tree.table.load(Ordering::Relaxed);
        assert!(!freed || table == POISON, "written when it was free");
    });
}
