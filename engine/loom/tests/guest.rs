//! The slots of a guest, which faults read while they are changed, and what is mapped of what they
//! said.

use std::ops::ControlFlow;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread::JoinHandle;
use tablewright::guest::{Access, Backing, Fault, Guest, Pass, Slot, SlotCell, SlotError, Zap};
use tablewright::shared::SharedSpace;
use tablewright::{AddressSpace, Ipa, Level, Mapping, Pa};

use crate::shared::{Machine, on};
use crate::tables::{FRESH, PAGE, TARGET, Tiny, span};

type Vm = Guest<'static, Tiny<false, Ipa>, Machine>;

/// Frames behind the first page of the guest, before and after.
const OLD: u64 = TARGET;
const NEW: u64 = 2 * TARGET;

/// Two pages, from the second on.
fn slot() -> Slot {
    Slot::memory(span(PAGE, 2 * PAGE), OLD + PAGE)
}

/// A guest with a slot. There is a table for its pages, and the second is not mapped.
fn guest() -> Arc<Vm> {
    let mut space = AddressSpace::new(Machine::new()).unwrap();
    let neighbour = Mapping::new(FRESH).pages_only();
    space.map(span(0, PAGE), Pa::new(TARGET), neighbour).unwrap();
    space.make_live();
    // What a thread of a model borrows has to live for ever.
    let cells = Vec::leak(vec![SlotCell::new()]);
    let guest = Guest::new(SharedSpace::new(space).ok().unwrap(), cells);
    guest.insert(slot()).unwrap();
    Arc::new(guest)
}

/// A fault on the second page, which is backed by what the host says.
fn fault(guest: &Vm, host: impl FnOnce(u64) -> u64) {
    let fault = Fault { level: Some(Level::PAGE), ..Fault::new(Ipa::new(PAGE), Access::Write) };
    // A processor that is refused goes back to the guest, which will fault again.
    if let Ok(request) = guest.request(&fault) {
        let page = Backing::new(Pa::new(host(request.host())), PAGE);
        let mut gather = guest.gather();
        let _ = gather.map(&request, &page);
        assert!(gather.is_clean());
    }
}

/// Drives a zap to its end. Where it would wait, it waits for the faults.
fn unmap<'g>(
    guest: &'g Vm,
    mut zap: Zap<'g, 'static, Tiny<false, Ipa>, Machine>,
    faults: &mut Vec<JoinHandle<()>>,
) {
    let mut gather = guest.gather();
    loop {
        let unmapped = zap.unmap(&mut gather, |_| ControlFlow::Continue(()));
        match unmapped.unwrap() {
            Pass::Waiting => {
                assert!(!faults.is_empty(), "no walk is under way");
                join(faults);
            }
            Pass::Went => assert!(gather.issue().complete().try_complete().is_ok()),
            Pass::Over => return,
        }
    }
}

fn join<T>(threads: &mut Vec<JoinHandle<T>>) -> Vec<T> {
    let join = |thread: JoinHandle<T>| thread.join().unwrap();
    threads.drain(..).map(join).collect()
}

/// Asserts that the page that was zapped is not there, and will not be.
fn assert_not_old(guest: &Vm) {
    let leaf = guest.space().query(Ipa::new(PAGE));
    assert_ne!(leaf.map(|leaf| leaf.frame()), Some(Pa::new(OLD + PAGE)));
}

#[test]
fn a_slot_is_found_whole() {
    for comes in [true, false] {
        loom::model(move || {
            let guest = guest();
            if comes {
                let _ = guest.remove(0).unwrap();
            }
            let reader = on(1, &guest, |guest| {
                let found = guest.slot(Ipa::new(PAGE));
                let whole = [Ok(slot()), Err(SlotError::Unknown), Err(SlotError::Busy)];
                assert!(whole.contains(&found), "{found:?}");
            });
            if comes {
                guest.insert(slot()).unwrap();
            } else {
                let _ = guest.remove(0).unwrap();
            }
            reader.join().unwrap();
            assert_eq!(guest.slot(Ipa::new(PAGE)).is_ok(), comes);
        });
    }
}

#[test]
fn nothing_is_mapped_of_a_slot_that_was_removed() {
    loom::model(|| {
        let guest = guest();
        let mut faults = vec![on(1, &guest, |guest| fault(guest, |host| host))];
        let zap = guest.remove(0).unwrap();
        unmap(&guest, zap, &mut faults);
        join(&mut faults);
        assert_not_old(&guest);
    });
}

#[test]
fn nothing_is_mapped_of_a_page_that_was_taken_back() {
    loom::model(|| {
        let guest = guest();
        let backing = Arc::new(AtomicU64::new(OLD + PAGE));
        let host = backing.clone();
        let look_up = move |_| host.load(Ordering::Relaxed);
        let mut faults = vec![on(1, &guest, |guest| fault(guest, look_up))];
        backing.store(NEW + PAGE, Ordering::Relaxed);
        let zap = guest.zap(span(PAGE, PAGE));
        unmap(&guest, zap, &mut faults);
        join(&mut faults);
        assert_not_old(&guest);
    });
}
