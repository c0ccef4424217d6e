//! The log of what a guest writes: what can be written is marked, however starts, harvests and
//! faults meet.

use std::sync::Arc;

use loom::sync::atomic::AtomicU64;
use loom::thread::JoinHandle;
use tablewright::dirty::{Bitmap, Marker};
use tablewright::guest::{
    Access, Backing, Cause, Fault, Guest, Harvest, Log, Request, Slot, SlotCell,
};
use tablewright::shared::SharedSpace;
use tablewright::{AddressSpace, Attrs, Caps, Change, Ipa, Level, Mapping, Pa};

use crate::shared::{Machine, on};
use crate::tables::{BLOCK_SIZE, PAGE, TARGET, Tiny, span};

struct Vm {
    guest: Guest<'static, Tiny<false, Ipa>, Machine>,
    bitmap: Bitmap<'static>,
}

/// Memory that software has set the flags of.
const USED: Attrs = Attrs { accessed: true, dirty: true, ..Attrs::KERNEL_DATA };

fn slot() -> Slot {
    Slot::memory(span(0, BLOCK_SIZE), TARGET)
}

/// A guest of four pages, the second of which cannot be written.
fn guest(log: Log) -> Arc<Vm> {
    let caps = Caps { hardware_dirty: false, ..Caps::CONSERVATIVE };
    let mut space = AddressSpace::new(Machine::with_caps(caps)).unwrap();
    let pages = Mapping::new(USED).pages_only();
    let mut gather = space.gather();
    gather.map(span(0, BLOCK_SIZE), Pa::new(TARGET), pages).unwrap();
    let read_only = Change::new().write_protect();
    gather.protect(span(PAGE, PAGE), read_only).unwrap();
    gather.finish(|_| ());
    space.make_live();
    // What a thread of a model borrows has to live for ever.
    let cells = Vec::leak(vec![SlotCell::new()]);
    let words = Vec::leak(vec![AtomicU64::new(0)]);
    let guest = Guest::new(SharedSpace::new(space).ok().unwrap(), cells);
    guest.insert(slot().with_log(log)).unwrap();
    let bitmap = Bitmap::new(words, 4).unwrap();
    Arc::new(Vm { guest, bitmap })
}

impl Vm {
    fn request(&self, page: u64) -> Request {
        let fault = Fault {
            level: Some(Level::PAGE),
            cause: Cause::Permission,
            ..Fault::new(Ipa::new(page * PAGE), Access::Write)
        };
        self.guest.request(&fault).unwrap()
    }

    /// Handles a fault that was looked up. Whether the page was made writable; if not, the guest
    /// will fault again.
    fn write(&self, request: &Request) -> bool {
        let page = Backing::new(Pa::new(request.host()), PAGE);
        let mapped = self.guest.gather().map(request, &page);
        if mapped.is_ok() && request.is_logged_write() {
            let marker = Marker::Bitmap(&self.bitmap);
            self.guest.mark(&marker, &request.slot(), request.at());
        }
        mapped.is_ok()
    }

    /// Protects everything. Where it would wait, it waits for the faults.
    fn protect_all(&self, faults: &mut Vec<JoinHandle<bool>>) {
        let wait = || {
            assert!(!faults.is_empty(), "no walk is under way");
            join(faults);
        };
        let start = self.guest.space().protect_all().unwrap();
        start.drive(wait);
    }

    fn can_write(&self, page: u64) -> bool {
        self.guest.space().platform().can_write(page * PAGE)
    }

    fn assert_marked(&self) {
        for page in 0..4 {
            let marked = self.bitmap.is_marked(page);
            assert!(marked || !self.can_write(page), "page {page} is written unseen");
        }
    }
}

fn join(threads: &mut Vec<JoinHandle<bool>>) {
    for thread in threads.drain(..) {
        let _ = thread.join().unwrap();
    }
}

#[test]
fn what_was_looked_up_before_a_start_is_not_written_unseen() {
    loom::model(|| {
        let vm = guest(Log::Off);
        let request = vm.request(1);
        let mut faults = vec![on(1, &vm, move |vm| vm.write(&request))];
        let _ = vm.guest.replace(slot().with_log(Log::ByFault)).unwrap();
        vm.protect_all(&mut faults);
        join(&mut faults);
        vm.assert_marked();
    });
}

#[test]
fn two_processors_that_open_a_table_do_not_protect_each_others_pages() {
    loom::model(|| {
        let vm = guest(Log::ByFault);
        vm.protect_all(&mut Vec::new());
        let (first, second) = (vm.request(1), vm.request(2));
        let other = on(1, &vm, move |vm| vm.write(&first));
        let written = [vm.write(&second), other.join().unwrap()];
        assert!(written.contains(&true));
        assert_eq!([vm.can_write(2), vm.can_write(1)], written);
        vm.assert_marked();
    });
}

#[test]
fn what_is_written_around_a_second_start_is_marked() {
    loom::model(|| {
        let vm = guest(Log::ByFault);
        vm.protect_all(&mut Vec::new());
        let request = vm.request(1);
        let mut faults = vec![on(1, &vm, move |vm| vm.write(&request))];
        // Harvested, then protected: what is marked after the harvest waits for the next.
        vm.bitmap.harvest(0..4, |_, _| ());
        vm.protect_all(&mut faults);
        join(&mut faults);
        vm.assert_marked();
    });
}

#[test]
fn what_is_written_around_a_harvest_is_marked() {
    loom::model(|| {
        let vm = guest(Log::ByFault);
        vm.protect_all(&mut Vec::new());
        let request = vm.request(1);
        let fault = on(1, &vm, move |vm| vm.write(&request));
        let mut gather = vm.guest.gather();
        let logged = slot().with_log(Log::ByFault);
        gather.harvest(&logged, &vm.bitmap, 0..4, Harvest::empty(), |_, _| ()).unwrap();
        assert!(gather.finish(|_| ()).is_ok());
        let _ = fault.join().unwrap();
        vm.assert_marked();
    });
}
