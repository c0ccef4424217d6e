//! The host's memory behind a guest: what a fault finds there, and what the host does to give it.
//!
//! The published figures depend on it more than on page tables, so it is as the host of the
//! published kernel has it:
//!
//! * Memory of one size, from files or huge pages, is zeroed when it is first used, by the vCPU
//!   that comes first; the others wait for it.
//! * Anonymous memory that is read first is one page of zeros, the same for all addresses, and
//!   read-only. The first write has it replaced: a page is zeroed, whatever a guest's tables say of
//!   the old one is taken back ([`Owner`]), and the guest faults again. Of several writers each
//!   zeroes a page and takes the old one back; the first of them is kept. It tells the owner of the
//!   new page ([`Owner::change`]) under the lock of the host's own table, for which the others
//!   wait.
//! * A huge page of zeros is not replaced whole. The host splits it, and replaces the page that is
//!   written; the rest stays as it is, in small pages (Linux since 5.8). So whether a guest ever
//!   gets huge pages depends on which is first: a read, which needs no memory, or a write, which
//!   zeroes 2 MiB.

use std::cell::{Cell, RefCell};

use tablewright::{Level, Pa};
use tablewright_machine::{Fault, Machine, Time};

use crate::guest::input::{BLOCK, PAGE, Source};

/// Start of the host's memory. The machine's own has the tables.
const PHYSICAL: u64 = 1 << 41;
/// The page of zeros, and the huge one.
const ZERO: u64 = 1 << 42;
const HUGE_ZERO: u64 = (1 << 42) + BLOCK;

/// Owner of the memory that a guest has, which takes it back.
pub trait Owner {
    /// From now until [`give`](Owner::give) nothing of this range, in bytes of the guest's memory,
    /// may be mapped; what is mapped is taken away.
    fn take(&self, first: u64, bytes: u64);
    /// The page of a range that is taken has become this one. An owner may map it at once, so that
    /// its guest reads it without another fault.
    fn change(&self, _first: u64, _frame: Pa) {}
    /// The range has other memory now.
    fn give(&self, first: u64, bytes: u64);
}

/// A hypervisor's side of stage 2. All is done by the running CPU.
pub trait Handler<'m>: Owner {
    /// A vCPU has faulted: does what can be done. The guest makes its access again.
    fn fault(&self, ipa: u64, write: bool, fault: Fault, backing: &Backing<'m>);
    /// From now on the guest's writes are to be seen, page by page.
    fn start_logging(&self);
    /// And not any more.
    fn stop_logging(&self);
    /// Makes leaves as large as the memory is, where faults do not.
    fn grow(&self, backing: &Backing<'m>);
    /// Faults that found nothing to do, or nothing that could be done at that time.
    fn retries(&self) -> u64;
}

/// The host's memory at an address.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// The page.
    pub frame: Pa,
    /// It is part of a page of the host that is as large as a leaf of this level.
    pub level: Level,
    /// The guest may write to it.
    pub writable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Nothing,
    Zeros,
    /// Zeroed for the guest. With huge pages it may have taken until later than now.
    Given(Time),
    /// A huge page that was split.
    Split,
}

/// The memory.
pub struct Backing<'m> {
    machine: &'m Machine,
    source: Source,
    /// One for each page of the size of the source.
    large: RefCell<Vec<State>>,
    /// One for each page, where large ones may be split.
    small: RefCell<Vec<State>>,
    /// CPUs that hold the lock of a table of the host's: one for each 2 MiB.
    locked: RefCell<Vec<bool>>,
    /// Times that huge pages of zeros were split.
    pub splits: Cell<u64>,
}

/// How long a CPU that waits for the lock of a table looks away.
const LOOK_AWAY: Time = Time::ns(100);

impl<'m> Backing<'m> {
    pub fn new(machine: &'m Machine, source: Source, bytes: u64) -> Self {
        let of = |size| vec![State::Nothing; (bytes / size) as usize];
        for page in [ZERO].into_iter().chain((HUGE_ZERO..HUGE_ZERO + BLOCK).step_by(PAGE as usize))
        {
            machine.write_page(Pa::new(page));
        }
        Self {
            machine,
            source,
            large: RefCell::new(of(source.bytes())),
            small: RefCell::new(if source == Source::Thp { of(PAGE) } else { Vec::new() }),
            locked: RefCell::new(vec![false; bytes.div_ceil(BLOCK) as usize]),
            splits: Cell::new(0),
        }
    }

    /// The host's page for `offset` bytes into the guest's memory, for a read or a write.
    pub fn get(&self, offset: u64, write: bool, owner: &impl Owner) -> Page {
        match self.source {
            Source::Anonymous => self.anonymous(&self.large, offset, PAGE, write, owner),
            Source::Thp => self.huge(offset, write, owner),
            Source::Fixed { .. } => self.fixed(offset),
        }
    }

    /// Returns the page there, if the guest has used it, without a change.
    pub fn peek(&self, offset: u64) -> Option<Page> {
        let size = self.source.bytes();
        self.machine.cpu().order();
        match self.large.borrow()[(offset / size) as usize] {
            State::Given(_) => Some(self.given(offset, size)),
            _ => None,
        }
    }

    /// Size of a leaf, as far as it is known before the memory is looked up.
    pub fn known_level(&self) -> Level {
        match self.source {
            Source::Fixed { shift } => leaf_of(1 << shift),
            _ => Level::PAGE,
        }
    }

    fn given(&self, offset: u64, size: u64) -> Page {
        let inside = offset & (size - 1) & !(PAGE - 1);
        Page {
            frame: Pa::new(PHYSICAL + (offset & !(size - 1)) + inside),
            level: leaf_of(size),
            writable: true,
        }
    }

    fn zeros(offset: u64, size: u64) -> Page {
        let inside = offset & (size - 1) & !(PAGE - 1);
        Page {
            frame: Pa::new(if size == PAGE { ZERO } else { HUGE_ZERO } + inside),
            level: leaf_of(size),
            writable: false,
        }
    }

    /// The host zeroes memory, through its caches.
    fn zero(&self, offset: u64, size: u64) {
        let first = PHYSICAL + (offset & !(size - 1));
        for page in (first..first + size).step_by(PAGE as usize) {
            self.machine.write_page(Pa::new(page));
        }
    }

    fn price(&self, size: u64) -> Time {
        self.machine.costs().zero * (size / PAGE)
    }

    fn fixed(&self, offset: u64) -> Page {
        let size = self.source.bytes();
        let number = (offset / size) as usize;
        let cpu = self.machine.cpu();
        cpu.order();
        let state = self.large.borrow()[number];
        let until = match state {
            State::Given(until) => until,
            _ => {
                let until = cpu.now() + self.price(size);
                self.large.borrow_mut()[number] = State::Given(until);
                self.zero(offset, size);
                until
            }
        };
        cpu.wait_until(until);
        self.given(offset, size)
    }

    /// Memory that has zeros until it is written, in pages of `size`.
    fn anonymous(
        &self,
        states: &RefCell<Vec<State>>,
        offset: u64,
        size: u64,
        write: bool,
        owner: &impl Owner,
    ) -> Page {
        let number = (offset / size) as usize;
        let cpu = self.machine.cpu();
        let look = || {
            cpu.order();
            states.borrow()[number]
        };
        let first = offset & !(size - 1);
        loop {
            match look() {
                State::Given(_) | State::Split => return self.given(offset, size),
                State::Zeros if !write => return Self::zeros(offset, size),
                State::Nothing if !write => {
                    if look() == State::Nothing {
                        states.borrow_mut()[number] = State::Zeros;
                    }
                }
                before => {
                    cpu.spend(self.price(size));
                    let replaces = before == State::Zeros;
                    if replaces {
                        owner.take(first, size);
                    }
                    if replaces {
                        self.replace(states, number, offset, size, owner);
                        owner.give(first, size);
                    } else if look() == before {
                        states.borrow_mut()[number] = State::Given(Time::ZERO);
                        self.zero(offset, size);
                    }
                }
            }
        }
    }

    /// A page in the place of zeros, unless another was quicker.
    fn replace(
        &self,
        states: &RefCell<Vec<State>>,
        number: usize,
        offset: u64,
        size: u64,
        owner: &impl Owner,
    ) {
        let cpu = self.machine.cpu();
        let table = (offset / BLOCK) as usize;
        cpu.order();
        while self.locked.borrow()[table] {
            cpu.spend(LOOK_AWAY);
            cpu.order();
        }
        if states.borrow()[number] == State::Zeros {
            self.locked.borrow_mut()[table] = true;
            self.zero(offset, size);
            if size == PAGE {
                owner.change(offset & !(size - 1), self.given(offset, size).frame);
                cpu.order();
            }
            states.borrow_mut()[number] = State::Given(Time::ZERO);
            self.locked.borrow_mut()[table] = false;
        }
    }

    fn huge(&self, offset: u64, write: bool, owner: &impl Owner) -> Page {
        let number = (offset / BLOCK) as usize;
        let cpu = self.machine.cpu();
        cpu.order();
        let state = self.large.borrow()[number];
        match state {
            State::Zeros if write => {
                let first = offset & !(BLOCK - 1);
                owner.take(first, BLOCK);
                cpu.order();
                if self.large.borrow()[number] == State::Zeros {
                    self.large.borrow_mut()[number] = State::Split;
                    self.splits.set(self.splits.get() + 1);
                    let pages = (first / PAGE) as usize..((first + BLOCK) / PAGE) as usize;
                    self.small.borrow_mut()[pages].fill(State::Zeros);
                }
                owner.give(first, BLOCK);
                self.huge(offset, write, owner)
            }
            State::Split => self.anonymous(&self.small, offset, PAGE, write, owner),
            State::Nothing if write => {
                // As memory of small pages; but a reader may be quicker, and then it is split.
                cpu.spend(self.price(BLOCK));
                cpu.order();
                if self.large.borrow()[number] == State::Nothing {
                    self.large.borrow_mut()[number] = State::Given(Time::ZERO);
                    self.zero(offset, BLOCK);
                }
                self.huge(offset, write, owner)
            }
            _ => self.anonymous(&self.large, offset, BLOCK, write, owner),
        }
    }
}

/// The largest leaf that fits into a page of the host.
fn leaf_of(size: u64) -> Level {
    Level::new(match size {
        ..BLOCK => 0,
        BLOCK..0x4000_0000 => 1,
        _ => 2,
    })
}
