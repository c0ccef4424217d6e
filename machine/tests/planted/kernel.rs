//! A kernel's half that all roots share, edited by hand: global leaves and others, a table that is
//! linked at two addresses, large leaves, and tables that are detached with what is in them. One
//! table with global leaves is below one root alone, as in a half that is filled in when a process
//! first needs it. CPUs go from root to root meanwhile.
//!
//! What has to be forgotten is told by the instructions of the architecture: TLBI, INVLPGB, or
//! interrupts and INVLPG and INVPCID.

use std::cell::{Cell, RefCell};

use tablewright::{Attrs, Barrier, Format, Half, Level, Pa, Perms, Platform, Va};
use tablewright_machine::{Cpu, Globals, Machine, Outcome, RunError, Time, Tlbi};

use tablewright_workloads::dice::Dice;
use tablewright_workloads::platform::{Control, Faulty};
use tablewright_workloads::random::raw::{self, Place};
use tablewright_workloads::random::{Bug, ByHand, Kind as Machinery, announce, check_no_frames};

const ROOTS: usize = 3;
/// Pages of a table that are used.
const PAGES: u64 = 4;
/// Tables of pages: two, one that is linked twice, and one below the first root alone.
const TABLES: usize = 4;
const TWICE: usize = 2;
const OWN: usize = 3;
/// Places of these, and of the large leaf, in blocks from the first address of the half.
const AT: [u64; TABLES] = [0, 1, 4, 0];
const AGAIN: u64 = 9;
const LARGE: u64 = 12;
/// Memory that the machine does not have.
const FAR: u64 = 1 << 44;

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Interrupts,
    Amd,
    Arm64,
}

/// An invalidation of a range.
#[derive(Clone, Copy)]
struct Part {
    first: u64,
    last: u64,
    /// The level of the leaves, if it is one.
    level: Option<Level>,
    tables: bool,
    global: bool,
    /// It is below the first root alone.
    alone: bool,
}

/// A page, and whether its leaf is global.
type Page = (Pa, bool);

struct Program<'a, 'm> {
    machine: &'m Machine,
    control: &'m Control,
    way: Way,
    roots: &'a [Faulty<'m>],
    /// The tables above those of pages: of all roots, and of the first.
    directory: Pa,
    own: Pa,
    tables: [Cell<Option<Pa>>; TABLES],
    /// The pages in them.
    pages: [[Cell<Option<Page>>; PAGES as usize]; TABLES],
    twice: Cell<bool>,
    large: Cell<Option<bool>>,
    /// The root that each CPU has loaded.
    loaded: Vec<Cell<usize>>,
    /// Invalidations sent by interrupt, the number of the message, and the last that each has done.
    message: RefCell<Vec<Part>>,
    number: Cell<u64>,
    done: Vec<Cell<u64>>,
    ended: Cell<bool>,
}

fn id(root: usize) -> u16 {
    root as u16 + 1
}

fn page<F: Format>() -> u64 {
    1 << F::PAGE_SHIFT
}

fn block<F: Format>() -> u64 {
    page::<F>() << F::INDEX_BITS
}

/// The first address below an entry of the root.
fn half<F: Format>(entry: u64) -> u64 {
    entry << (F::PAGE_SHIFT + F::INDEX_BITS * u32::from(F::root_level().height()))
}

/// Entries of the root. Some have two.
const SHARED: u64 = 1;
const ALONE: u64 = 0;

fn make<F: Format>(platform: &Faulty<'_>, level: Level) -> Pa {
    loop {
        if let Some(frame) = platform.alloc_table(level) {
            raw::zero::<F>(platform, frame, level);
            return frame;
        }
    }
}

/// Tables from an entry of the root down to the one above those of pages: the first, and the last.
fn chain<F: Format<Input = Va>>(platform: &Faulty<'_>, va: u64) -> (Pa, Pa) {
    let mut level = F::root_level().down().expect("a root has tables below it");
    let first = make::<F>(platform, level);
    let mut last = first;
    while level > Level::PAGE.up() {
        let below = level.down().expect("pages are below");
        let frame = make::<F>(platform, below);
        let bits = F::table(frame, Perms::empty());
        raw::entry::<F>(platform, last, level, va).link(platform, bits);
        (last, level) = (frame, below);
    }
    (first, last)
}

/// A kernel's half that all roots share.
pub struct Kernel;

impl ByHand for Kernel {
    fn run<F: Format<Input = Va>>(
        machine: &Machine,
        control: &Control,
        dice: &Dice,
        _: Machinery,
        cpus: usize,
        between: &mut dyn FnMut(u64),
    ) -> Result<Outcome, RunError> {
        let roots: Vec<_> = (0..ROOTS).map(|_| Faulty::new(machine, control)).collect();
        let platform = &roots[0];
        let (top, directory) = chain::<F>(platform, half::<F>(SHARED));
        let (own_top, own) = chain::<F>(platform, half::<F>(ALONE));
        let frames: Vec<Pa> = (roots.iter()).map(|of| make::<F>(of, F::root_level())).collect();
        for (number, (of, &root)) in roots.iter().zip(&frames).enumerate() {
            let entry = |va| raw::entry::<F>(of, root, F::root_level(), va);
            entry(half::<F>(SHARED)).link(of, F::table(top, Perms::empty()));
            if number == 0 {
                entry(half::<F>(ALONE)).link(of, F::table(own_top, Perms::empty()));
            }
        }
        platform.barrier(Barrier::Publish);
        for (of, &root) in roots.iter().zip(&frames) {
            of.mapper.track(root, Half::Lower);
        }
        let kernel = Program {
            machine,
            control,
            way: match machine.architecture().is_x86() {
                true => dice.pick(&[Way::Interrupts, Way::Amd]),
                false => Way::Arm64,
            },
            roots: &roots,
            directory,
            own,
            tables: Default::default(),
            pages: Default::default(),
            twice: Cell::new(false),
            large: Cell::new(None),
            loaded: (0..cpus).map(|_| Cell::new(0)).collect(),
            message: RefCell::default(),
            number: Cell::new(0),
            done: (0..cpus).map(|_| Cell::new(0)).collect(),
            ended: Cell::new(false),
        };
        let (edits, seed) = (8 + dice.below(16), dice.below(1 << 48));
        let outcome = machine.run(|cpu| {
            let dice = Dice::of(seed, cpu.id() as u64);
            for root in (0..ROOTS).rev() {
                kernel.load(cpu.id(), root);
            }
            if cpu.id() == 0 {
                for _ in 0..edits {
                    kernel.edit::<F>(cpu, &dice);
                    cpu.spend(dice.time());
                    kernel.look::<F>(cpu, &dice);
                }
                kernel.ended.set(true);
            }
            while !kernel.ended.get() {
                cpu.spend(dice.time());
                kernel.look::<F>(cpu, &dice);
            }
            machine.unload();
            roots[kernel.loaded[cpu.id()].get()].mapper.leave();
        })?;
        between(machine.digest());
        if machine.violations().is_empty() {
            machine.calm();
            kernel.tear_down::<F>(&frames, [top, own_top]);
        }
        Ok(outcome)
    }
}

impl Program<'_, '_> {
    fn is(&self, bug: Bug) -> bool {
        self.control.is(bug)
    }

    fn platform(&self) -> &Faulty<'_> {
        &self.roots[0]
    }

    fn load(&self, cpu: usize, root: usize) {
        let from = self.loaded[cpu].replace(root);
        self.roots[root].mapper.load_as(id(root));
        if from != root {
            self.roots[from].mapper.leave();
        }
    }

    fn look<F: Format>(&self, cpu: Cpu<'_>, dice: &Dice) {
        self.poll(cpu);
        if dice.once_in(4) {
            self.load(cpu.id(), dice.below(ROOTS as u64) as usize);
        }
        for _ in 0..1 + dice.below(4) {
            self.poll(cpu);
            let start = dice.pick(&[SHARED, SHARED, SHARED, ALONE]);
            let at = dice.pick(&[0, 1, 4, AGAIN, LARGE]) * block::<F>();
            let va = half::<F>(start) + at + dice.below(PAGES) * page::<F>();
            // Whether it leads to what was given back is for the machine to say.
            let _fault = match dice.once_in(2) {
                true => self.machine.write(va, 1).err(),
                false => self.machine.read(va).err(),
            };
        }
    }

    // ---- Edits ----

    fn edit<F: Format<Input = Va>>(&self, cpu: Cpu<'_>, dice: &Dice) {
        let table = dice.below(TABLES as u64) as usize;
        match dice.below(12) {
            0..=4 => (0..1 + dice.below(3)).for_each(|_| self.map::<F>(table, dice)),
            5..=8 => self.unmap::<F>(cpu, table, dice),
            9 if table < TWICE => self.cut_off::<F>(cpu, table),
            10 => self.link_twice::<F>(cpu),
            _ => self.large_leaf::<F>(cpu, dice.once_in(2)),
        }
    }

    /// The entry above the tables of pages, for a number of blocks from the first address.
    fn above<F: Format<Input = Va>>(&self, directory: Pa, at: u64) -> Place {
        let va = at * block::<F>();
        raw::entry::<F>(self.platform(), directory, Level::PAGE.up(), va)
    }

    /// The first addresses that a table of pages translates.
    fn addresses<F: Format>(&self, table: usize) -> Vec<u64> {
        let start = half::<F>(if table == OWN { ALONE } else { SHARED });
        let mut all = vec![start + AT[table] * block::<F>()];
        if table == TWICE && self.twice.get() {
            all.push(start + AGAIN * block::<F>());
        }
        all
    }

    fn map<F: Format<Input = Va>>(&self, table: usize, dice: &Dice) {
        let (index, global) = (dice.below(PAGES), dice.once_in(2));
        let place = &self.pages[table][index as usize];
        if place.get().is_some() {
            return;
        }
        let platform = self.platform();
        let Some(page) = self.machine.take_page() else {
            return;
        };
        let frame = self.tables[table].get().unwrap_or_else(|| {
            let frame = make::<F>(platform, Level::PAGE);
            let directory = if table == OWN { self.own } else { self.directory };
            let bits = F::table(frame, Perms::empty());
            self.above::<F>(directory, AT[table]).link(platform, bits);
            self.tables[table].set(Some(frame));
            frame
        });
        let at = index * (1 << F::PAGE_SHIFT);
        let bits = leaf::<F>(page, global, Level::PAGE);
        raw::entry::<F>(platform, frame, Level::PAGE, at).store(platform, bits);
        platform.barrier(Barrier::Publish);
        announce(self.machine);
        place.set(Some((page, global)));
    }

    /// Takes out some pages beside each other.
    fn unmap<F: Format<Input = Va>>(&self, cpu: Cpu<'_>, table: usize, dice: &Dice) {
        let first = dice.below(PAGES);
        let end = (first + 1 + dice.below(3)).min(PAGES);
        let Some(frame) = self.tables[table].get() else {
            return;
        };
        let gone: Vec<Page> = (first..end)
            .filter_map(|index| {
                let at = index * page::<F>();
                let place = raw::entry::<F>(self.platform(), frame, Level::PAGE, at);
                place.exchange(self.platform(), 0);
                self.pages[table][index as usize].take()
            })
            .collect();
        let mut at = self.addresses::<F>(table);
        if self.is(Bug::OtherAddressForgotten) {
            at.truncate(1);
        }
        let parts = at.into_iter().map(|at| Part {
            first: at + first * page::<F>(),
            last: at + end * page::<F>() - 1,
            level: Some(Level::PAGE),
            tables: false,
            global: gone.iter().any(|&(_, global)| global),
            alone: table == OWN,
        });
        self.flush(cpu, parts.collect());
        gone.into_iter().for_each(|(page, _)| self.machine.give_page(page));
    }

    /// Returns the invalidation for a table of pages that goes.
    fn whole<F: Format>(&self, table: usize, at: u64) -> Part {
        let mut pages = self.pages[table].iter().filter_map(Cell::get);
        Part {
            first: at,
            last: at + (block::<F>() - 1),
            level: None,
            tables: true,
            global: pages.any(|(_, global)| global),
            alone: table == OWN,
        }
    }

    /// A table goes with all its pages.
    fn cut_off<F: Format<Input = Va>>(&self, cpu: Cpu<'_>, table: usize) {
        let Some(frame) = self.tables[table].take() else {
            return;
        };
        let platform = self.platform();
        self.above::<F>(self.directory, AT[table]).exchange(platform, 0);
        for index in 0..PAGES {
            let at = index * page::<F>();
            raw::entry::<F>(platform, frame, Level::PAGE, at).load(platform);
        }
        let part = self.whole::<F>(table, self.addresses::<F>(table)[0]);
        self.flush(cpu, vec![part]);
        for (page, _) in self.pages[table].iter().filter_map(Cell::take) {
            self.machine.give_page(page);
        }
        // SAFETY: no CPU can reach it any more, unless that is the bug.
        unsafe { platform.free_table(frame, Level::PAGE) };
    }

    /// A table is linked at a second address, or no more.
    fn link_twice<F: Format<Input = Va>>(&self, cpu: Cpu<'_>) {
        let Some(frame) = self.tables[TWICE].get() else {
            return;
        };
        let (platform, place) = (self.platform(), self.above::<F>(self.directory, AGAIN));
        if self.twice.replace(!self.twice.get()) {
            place.exchange(platform, 0);
            let at = half::<F>(SHARED) + AGAIN * block::<F>();
            self.flush(cpu, vec![self.whole::<F>(TWICE, at)]);
        } else {
            place.link(platform, F::table(frame, Perms::empty()));
            platform.barrier(Barrier::Publish);
            announce(self.machine);
        }
    }

    /// A large leaf comes, or goes.
    fn large_leaf<F: Format<Input = Va>>(&self, cpu: Cpu<'_>, global: bool) {
        let (platform, place) = (self.platform(), self.above::<F>(self.directory, LARGE));
        let Some(global) = self.large.take() else {
            place.store(platform, leaf::<F>(Pa::new(FAR), global, Level::PAGE.up()));
            platform.barrier(Barrier::Publish);
            announce(self.machine);
            return self.large.set(Some(global));
        };
        place.exchange(platform, 0);
        let first = half::<F>(SHARED) + LARGE * block::<F>();
        let part = Part {
            first,
            last: first + (block::<F>() - 1),
            level: Some(Level::PAGE.up()),
            tables: false,
            global,
            alone: false,
        };
        self.flush(cpu, vec![part]);
    }

    // ---- Flushes ----

    fn flush(&self, cpu: Cpu<'_>, parts: Vec<Part>) {
        self.platform().barrier(Barrier::Publish);
        if self.way == Way::Interrupts {
            self.interrupt(cpu, &parts);
        }
        for part in &parts {
            for (number, root) in self.roots.iter().enumerate() {
                let tlbi = self.broadcast(part, id(number));
                let told = number == 0 || !self.is(Bug::OtherRootsForgotten);
                if told && self.way != Way::Interrupts {
                    self.machine.tlbi(tlbi);
                }
                root.mapper.claim_as((part.first, part.last), &tlbi);
            }
        }
        self.machine.dsb();
    }

    /// TLBI (R)VAE1IS or VALE1IS, or INVLPGB.
    fn broadcast(&self, part: &Part, id: u16) -> Tlbi {
        let range = Tlbi {
            id: Some(id),
            range: Some((part.first, part.last)),
            leaves_only: !part.tables,
            ..Tlbi::ALL
        };
        if self.way == Way::Arm64 {
            let depth = part.level.map(Level::height);
            return Tlbi { depth, ..range };
        }
        let large = part.level.is_some_and(|level| level > Level::PAGE);
        let included = part.global && !self.is(Bug::GlobalBitMissing);
        Tlbi {
            stride: (large || self.is(Bug::StrideOverPages)).then_some(21),
            leaves_only: !part.tables || self.is(Bug::FinalOnly),
            globals: if included { Globals::Included } else { Globals::Spared },
            ..range
        }
    }

    fn interrupt(&self, cpu: Cpu<'_>, parts: &[Part]) {
        *self.message.borrow_mut() = parts.to_vec();
        self.number.set(self.number.get() + 1);
        let holds = |other: usize| self.loaded[other].get() == 0;
        // Other roots have an obligation of their own for what they share.
        let global =
            self.is(Bug::GlobalToldToHolders) && parts.iter().any(|part| part.global && part.alone);
        let told: Vec<usize> = (0..self.done.len())
            .filter(|&other| other != cpu.id() && (!global || holds(other)))
            .collect();
        told.iter().for_each(|&other| self.machine.interrupt(other));
        self.obey(cpu.id());
        let number = self.number.get();
        while told.iter().any(|&other| self.done[other].get() < number) {
            cpu.spend(Time::ns(200));
            cpu.order();
        }
    }

    fn poll(&self, cpu: Cpu<'_>) {
        if self.machine.take_interrupt() {
            self.obey(cpu.id());
            cpu.order();
            self.done[cpu.id()].set(self.number.get());
        }
    }

    /// Forgets what the message says: under every identifier, because each root has it.
    fn obey(&self, cpu: usize) {
        let parts = self.message.borrow().clone();
        for part in parts {
            let range = (part.first, part.last);
            for number in 0..ROOTS {
                self.machine.tlbi(Tlbi::invpcid(Some(id(number)), Some(range)));
            }
            if part.global {
                let loaded = id(self.loaded[cpu].get());
                self.machine.tlbi(Tlbi::invlpg(loaded, range));
            }
        }
        self.machine.dsb();
    }

    // ---- The end ----

    fn tear_down<F: Format>(&self, roots: &[Pa], tops: [Pa; 2]) {
        let (machine, platform) = (self.machine, self.platform());
        self.roots.iter().for_each(|root| root.mapper.detach());
        machine.dsb_stores();
        machine.tlbi(Tlbi::ALL);
        machine.dsb();
        for (page, _) in self.pages.iter().flatten().filter_map(Cell::take) {
            machine.give_page(page);
        }
        let free = |frame: Pa, level: Level| {
            // SAFETY: no root leads to it, and all is forgotten.
            unsafe { platform.free_table(frame, level) };
        };
        (self.tables.iter().filter_map(Cell::take)).for_each(|frame| free(frame, Level::PAGE));
        for (top, last) in tops.into_iter().zip([self.directory, self.own]) {
            let mut level = F::root_level().down().expect("a root has tables below it");
            let mut frame = top;
            while frame != last {
                let start = if top == tops[0] { SHARED } else { ALONE };
                let place = raw::entry::<F>(platform, frame, level, half::<F>(start));
                let below = F::address(place.load(platform), level);
                free(frame, level);
                (frame, level) = (below, level.down().expect("pages are below"));
            }
            free(frame, level);
        }
        roots.iter().for_each(|&root| free(root, F::root_level()));
        check_no_frames(machine);
    }
}

fn leaf<F: Format>(pa: Pa, global: bool, level: Level) -> u64 {
    let attrs = Attrs { global, accessed: true, dirty: true, ..Attrs::KERNEL_DATA };
    F::encode(&attrs, level).expect("attributes of a kernel") | F::put_address(pa)
}
