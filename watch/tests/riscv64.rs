//! All that a kernel of RISC-V may leave out, and the kernel that leaves out nothing.

mod common;

use common::{Machine as Kernel, reader};
use tablewright_watch::{At, Rule, riscv64};

const ROOT: u64 = 0x10_0000;
const OTHER: u64 = 0x10_8000;
/// Of one page at 0.
const TABLES: [u64; 2] = [0x10_1000, 0x10_2000];
/// Of one page of the kernel's, in tables that both roots have.
const UPPER: [u64; 2] = [0x11_1000, 0x11_2000];
const PAGE: u64 = 0x4000_0000;
const PC: u64 = 0xffff_ffff_8000_0000;
const ASID: u16 = 5;

fn table(pa: u64) -> u64 {
    pa >> 2 | 1
}

/// V, R, W, A and D of a page; the user's, or global.
fn user(pa: u64) -> u64 {
    pa >> 2 | 0xd7
}

fn global(pa: u64) -> u64 {
    pa >> 2 | 0xe7
}

impl Kernel {
    /// Two harts in user mode with a root that maps one page at 0, and one of the kernel's.
    fn new() -> Self {
        let memory = [
            (ROOT, table(TABLES[0])),
            (TABLES[0], table(TABLES[1])),
            (TABLES[1], user(PAGE)),
            (ROOT + 0xff8, table(UPPER[0])),
            (OTHER + 0xff8, table(UPPER[0])),
            (UPPER[0], table(UPPER[1])),
            (UPPER[1], global(PAGE)),
        ];
        let mut kernel = Self::with(PC, memory);
        for cpu in [1, 0] {
            kernel.cpu = cpu;
            kernel.load(ROOT, ASID);
            kernel.returns();
        }
        kernel.watcher.in_kernel(0);
        kernel
    }

    fn load(&mut self, root: u64, asid: u16) {
        let at = self.at();
        let satp = 8 << 60 | u64::from(asid) << 44 | root >> 12;
        self.watcher.satp(at, satp, &mut reader(&self.memory));
    }

    fn fence(&mut self, address: Option<u64>, asid: Option<u16>) {
        let at = self.at();
        self.watcher.forgets(at, riscv64::fence(address, asid.map(u64::from)));
    }

    /// Both harts execute it.
    fn fences(&mut self, address: Option<u64>, asid: Option<u16>) {
        for cpu in [1, 0] {
            self.cpu = cpu;
            self.fence(address, asid);
        }
    }

    fn returns(&mut self) {
        let at = self.at();
        self.watcher.to_user(at);
    }

    /// A page or a table has another use, and the hart goes back to the user.
    fn reuse(&mut self, page: u64) -> Vec<Rule> {
        self.clear(page);
        self.returns();
        self.found()
    }
}

/// The one finding of a kernel that is not right.
fn unless(is_right: bool, rule: Rule) -> Vec<Rule> {
    if is_right { Vec::new() } else { vec![rule] }
}

#[test]
fn a_page_is_used_anew_when_each_hart_has_forgotten_it() {
    type Names = (Option<u64>, Option<u16>);
    for (names, is_right) in [
        ((None, None), true),
        ((Some(0x123), None), true),
        ((None, Some(ASID)), true),
        ((Some(0), Some(ASID)), true),
        ((Some(0x1000), None), false),
        ((None, Some(ASID + 1)), false),
    ] as [(Names, bool); 6]
    {
        let mut kernel = Kernel::new();
        kernel.store(TABLES[1], 0);
        kernel.fences(names.0, names.1);
        assert_eq!(kernel.reuse(PAGE), unless(is_right, Rule::PageReused), "{names:?}");
        // By one of them alone.
        for alone in [0, 1] {
            let mut kernel = Kernel::new();
            kernel.store(TABLES[1], 0);
            kernel.cpu = alone;
            kernel.fence(names.0, names.1);
            kernel.cpu = 0;
            assert_eq!(kernel.reuse(PAGE), [Rule::PageReused], "{names:?} on {alone}");
        }
    }
}

/// A fence of an address is about leaves.
#[test]
fn a_table_is_forgotten_with_all_of_an_identifier() {
    for (address, is_right) in [(Some(0), false), (None, true)] {
        let mut kernel = Kernel::new();
        kernel.store(TABLES[0], 0);
        kernel.fences(address, Some(ASID));
        assert_eq!(kernel.reuse(TABLES[1]), unless(is_right, Rule::TableReused));
    }
}

/// A fence of an identifier spares what is global.
#[test]
fn the_kernels_pages_are_forgotten_without_an_identifier() {
    for (asid, is_right) in [(Some(ASID), false), (None, true)] {
        let mut kernel = Kernel::new();
        kernel.store(UPPER[0], 0);
        kernel.fences(None, asid);
        // The other root has these tables, too.
        kernel.load(OTHER, ASID + 1);
        assert_eq!(kernel.reuse(UPPER[1]), unless(is_right, Rule::TableReused));
    }
}

/// A global page of the user's, which every process has, is spared by an identifier, too.
#[test]
fn a_global_page_of_the_users_is_forgotten_without_an_identifier() {
    for (asid, is_right) in [(Some(ASID), false), (None, true)] {
        let mut kernel = Kernel::new();
        kernel.store(TABLES[1] + 8, user(PAGE + 0x1000) | 1 << 5);
        kernel.store(TABLES[1] + 8, 0);
        kernel.fences(Some(0x1000), asid);
        assert_eq!(kernel.reuse(PAGE + 0x1000), unless(is_right, Rule::PageReused));
    }
}

#[test]
fn nothing_is_broken_before_it_is_made() {
    let mut kernel = Kernel::new();
    kernel.store(TABLES[1], user(PAGE + 0x1000));
    kernel.store(TABLES[0], user(1 << 30));
    assert_eq!(kernel.found(), []);
}

/// The fence may stand before the root is loaded or after it (PRIV 10.1.11), and user code waits
/// for it.
#[test]
fn an_identifier_is_given_to_another_root_with_a_fence() {
    for (before, after) in [(true, false), (false, true), (false, false)] {
        let mut kernel = Kernel::new();
        kernel.memory.insert(OTHER, table(TABLES[0]));
        kernel.load(OTHER, ASID + 1);
        if before {
            kernel.fence(None, Some(ASID));
        }
        kernel.load(OTHER, ASID);
        assert_eq!(kernel.found(), []);
        if after {
            kernel.fence(None, Some(ASID));
        }
        kernel.returns();
        let found = unless(before || after, Rule::IdentifierReused);
        assert_eq!(kernel.found(), found, "{before} {after}");
        kernel.returns();
        assert_eq!(kernel.found(), found, "it is looked at once");
    }
}

/// A root without user mappings is forgotten by a fence, even if it still maps the kernel:
/// its page may be reused.
#[test]
fn a_root_of_a_process_that_has_ended_is_forgotten() {
    let mut kernel = Kernel::new();
    kernel.store(ROOT, 0);
    kernel.fences(None, Some(ASID));
    for cpu in [1, 0] {
        kernel.cpu = cpu;
        kernel.load(OTHER, ASID + 1);
    }
    let known = kernel.watcher.tables().count();
    assert_eq!(known, 3, "the other root, and two tables of the upper half");
    assert_eq!(kernel.reuse(ROOT), []);
}

#[test]
fn without_a_root_nothing_is_followed() {
    let mut kernel = Kernel::new();
    for cpu in [0, 1] {
        kernel.cpu = cpu;
        let at = kernel.at();
        kernel.watcher.satp(at, 0, &mut reader(&kernel.memory));
        kernel.fence(None, None);
    }
    assert_eq!(kernel.watcher.tables().count(), 0);
    let at = At { cpu: 9, pc: PC };
    kernel.watcher.satp(at, 8 << 60 | ROOT >> 12, &mut reader(&kernel.memory));
    assert_eq!(kernel.watcher.tables().count(), 0, "there is no such hart");
}
