//! The states of a space that CPUs may see while another CPU edits it.
//!
//! The editor announces each change before it begins and when it is complete, in state that is
//! ordered by virtual time. An access that begins and ends between two announcements has one right
//! outcome; one that an announcement falls into, or that begins while a change is under way, may
//! see the old or the new.
//!
//! It also knows which pages were accessed and written: the leaf that comes out in the end has to
//! say so.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use tablewright::{Attrs, Change, Pa, Perms};
use tablewright_machine::{Cpu, Fault, Machine, Request, Rule, Want};

use super::Dice;

/// A flag of a leaf, where software manages it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    Clear,
    Set,
    /// The engine was free to set it.
    Either,
}

/// How a page is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    pub pa: u64,
    pub attrs: Attrs,
    accessed: Flag,
    dirty: Flag,
}

impl Page {
    pub fn new(pa: u64, attrs: Attrs) -> Self {
        let flag = |set| if set { Flag::Set } else { Flag::Clear };
        Self { pa, attrs, accessed: flag(attrs.accessed), dirty: flag(attrs.dirty) }
    }

    /// After a change of its attributes.
    pub fn changed(self, change: &Change) -> Self {
        let new = Self::new(self.pa, change.apply(self.attrs));
        let (accessed, dirty) = sets(change);
        Self {
            accessed: if accessed.is_some() { new.accessed } else { self.accessed },
            dirty: if dirty.is_some() { new.dirty } else { self.dirty },
            ..new
        }
    }

    /// After it may have been one with others.
    pub fn merged(self) -> Self {
        let either = |flag| {
            if flag == Flag::Clear { Flag::Either } else { flag }
        };
        Self { accessed: either(self.accessed), dirty: either(self.dirty), ..self }
    }

    fn allows(&self, request: Request) -> bool {
        let right = match (request.want, request.user) {
            (Want::Read, false) => Perms::READ,
            (Want::Write, false) => Perms::WRITE,
            (Want::Execute, false) => Perms::EXEC,
            (Want::Read, true) => Perms::USER_READ,
            (Want::Write, true) => Perms::USER_WRITE,
            (Want::Execute, true) => Perms::USER_EXEC,
        };
        self.attrs.perms.contains(right)
    }
}

/// Returns the values that a change gives the accessed and the dirty flag, if it says.
pub fn sets(change: &Change) -> (Option<bool>, Option<bool>) {
    let with = |flag| Attrs { accessed: flag, dirty: flag, ..Attrs::KERNEL_DATA };
    let (clear, set) = (change.apply(with(false)), change.apply(with(true)));
    (
        (clear.accessed == set.accessed).then_some(set.accessed),
        (clear.dirty == set.dirty).then_some(set.dirty),
    )
}

/// An announced state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Steady(Option<Page>),
    Changing(Option<Page>, Option<Page>),
}

impl State {
    fn pages(self) -> impl Iterator<Item = Page> {
        let (Self::Steady(one) | Self::Changing(one, _)) = self;
        let (Self::Steady(other) | Self::Changing(_, other)) = self;
        [one, other].into_iter().flatten()
    }

    /// The engine may set flags in all pages of what it takes apart or puts together.
    pub fn merged(self) -> Self {
        let merged = |page: Option<Page>| page.map(Page::merged);
        match self {
            Self::Steady(page) => Self::Steady(merged(page)),
            Self::Changing(old, new) => Self::Changing(merged(old), merged(new)),
        }
    }
}

/// An address that CPUs try.
pub struct Spot {
    pub va: u64,
    state: Cell<State>,
    /// Announcements so far.
    version: Cell<u32>,
    accessed: Cell<bool>,
    written: Cell<bool>,
    /// The change that is under way clears these flags.
    clears: Cell<(bool, bool)>,
}

impl Spot {
    fn announce(&self, state: State) {
        self.version.update(|version| version + 1);
        self.state.set(state);
    }

    /// A change begins. Gives what was announced before.
    pub fn begin(&self, new: Option<Page>) -> State {
        let before = self.state.get();
        self.announce(State::Changing(self.page(), new));
        before
    }

    /// The change that is under way clears flags.
    pub fn clears(&self, accessed: bool, dirty: bool) {
        let before = self.clears.get();
        self.clears.set((before.0 || accessed, before.1 || dirty));
    }

    /// A change, if there is one, is complete.
    pub fn end(&self) {
        if let State::Changing(_, new) = self.state.get() {
            let (accessed, dirty) = self.clears.take();
            if accessed {
                self.accessed.set(false);
            }
            if dirty {
                self.written.set(false);
            }
            self.announce(State::Steady(new));
        }
    }

    /// The change that began did not happen, or it is over and all is as before.
    pub fn restore(&self, before: State) {
        self.announce(before);
    }

    /// How the page is mapped, or will be.
    pub fn page(&self) -> Option<Page> {
        match self.state.get() {
            State::Steady(page) | State::Changing(_, page) => page,
        }
    }
}

/// The outcome of an access.
struct Seen {
    request: Request,
    result: Result<(), Fault>,
    /// The frame that it reached, if that is known.
    reached: Option<u64>,
    /// The value that was loaded, if there was one.
    loaded: Option<u64>,
}

/// All of the spots, and the data in the pages.
pub struct Oracle<'m> {
    machine: &'m Machine,
    pub spots: Vec<Spot>,
    /// The value that each CPU wrote last to its word of each page, if that is known.
    data: RefCell<HashMap<u64, Option<u64>>>,
}

impl<'m> Oracle<'m> {
    pub fn new(machine: &'m Machine, spots: impl IntoIterator<Item = u64>) -> Self {
        let spot = |va| Spot {
            va,
            state: Cell::new(State::Steady(None)),
            version: Cell::new(0),
            accessed: Cell::new(false),
            written: Cell::new(false),
            clears: Cell::new((false, false)),
        };
        Self { machine, spots: spots.into_iter().map(spot).collect(), data: RefCell::default() }
    }

    /// The spots from `first` to `last`.
    pub fn inside(&self, first: u64, last: u64) -> impl Iterator<Item = &Spot> {
        let inside = move |spot: &&Spot| (first..=last).contains(&spot.va);
        self.spots.iter().filter(inside)
    }

    /// A page was taken: it is zero.
    pub fn fresh(&self, page: Pa) {
        let size = 1 << self.machine.memory().page_shift();
        let pages = page.get()..page.get() + size;
        self.data.borrow_mut().retain(|at, _| !pages.contains(at));
    }

    /// One access to one of the spots, of any kind.
    pub fn try_one(&self, cpu: Cpu<'_>, dice: &Dice) {
        let spot = &self.spots[dice.below(self.spots.len() as u64) as usize];
        let want = dice.pick(&[Want::Read, Want::Read, Want::Write, Want::Write, Want::Execute]);
        let user = dice.once_in(3);
        self.try_spot(cpu, spot, want, user, dice.below(1 << 40) + 1);
    }

    /// One access to one spot. What is written is `value`, by the kernel.
    pub fn try_spot(&self, cpu: Cpu<'_>, spot: &Spot, want: Want, user: bool, value: u64) {
        cpu.order();
        let (before, version) = (spot.state.get(), spot.version.get());
        // A word for each CPU: no other CPU writes it.
        let va = spot.va + 8 * cpu.id() as u64;
        let request = Request { va, want, user };
        let (mut reached, mut loaded) = (None, None);
        let result = match (want, user) {
            (Want::Read, false) => {
                self.again(|| self.machine.read(va)).map(|value| loaded = Some(value))
            }
            (Want::Write, false) => self.again(|| self.machine.write(va, value)),
            _ => self.machine.touch(request).map(|pa| reached = Some(pa)),
        };
        let steady = match before {
            State::Steady(page) if spot.version.get() == version => Some(page),
            _ => None,
        };
        if result.is_ok() {
            if want == Want::Write {
                spot.written.set(true);
            }
            if steady.is_some() {
                spot.accessed.set(true);
            }
        }
        if want == Want::Write && !user && result.is_ok() {
            let mut data = self.data.borrow_mut();
            let at = |page: Page| page.pa + va - spot.va;
            match steady.flatten() {
                Some(page) => {
                    data.insert(at(page), Some(value));
                }
                // To what was mapped, or to what is now.
                None => {
                    for page in before.pages().chain(spot.state.get().pages()) {
                        data.insert(at(page), None);
                    }
                }
            }
        }
        let seen = Seen { request, result, reached, loaded };
        match steady {
            Some(Some(page)) => self.judge(spot, &page, &seen),
            Some(None) => self.machine.check(seen.result.is_err(), || {
                format!("an access to {va:#x} succeeds, and it is not mapped")
            }),
            None => {}
        }
    }

    /// Repeats an access, as a program whose fault handler returns.
    fn again<T>(&self, access: impl Fn() -> Result<T, Fault>) -> Result<T, Fault> {
        access().or_else(|_| {
            self.machine.cpu().spend(self.machine.costs().exception);
            self.machine.dsb_stores();
            access()
        })
    }

    /// An access to a page that is mapped, and was not changed meanwhile.
    fn judge(&self, spot: &Spot, page: &Page, seen: &Seen) {
        let machine = self.machine;
        let architecture = machine.architecture();
        let request = seen.request;
        let write = request.want == Want::Write;
        // Supervisor-mode execution prevention is off in the walker.
        let user_code = architecture.is_x86()
            && request.want == Want::Execute
            && !request.user
            && page.attrs.perms.intersects(Perms::ANY_USER);
        // What it comes to: a flag that hardware does not set is as it stands.
        let accessed = if architecture.hardware_access { Flag::Set } else { page.accessed };
        let dirty = if write && !architecture.hardware_dirty { page.dirty } else { Flag::Set };
        let flags = [accessed, dirty];
        let must = page.allows(request) && flags == [Flag::Set; 2];
        let may = page.allows(request) && !flags.contains(&Flag::Clear);
        let what = || format!("{:?} of {:#x}, mapped with {page:?}", request.want, request.va);
        match seen.result {
            Err(fault) if must && !user_code => {
                machine.report(Rule::NoProgress, format!("{}, takes {fault:?} twice", what()));
            }
            Ok(()) if !may && !user_code => {
                machine.report(Rule::Program, format!("{}, succeeds", what()));
            }
            _ => {}
        }
        let at = page.pa + request.va - spot.va;
        if let Some(pa) = seen.reached {
            machine.check(pa == at, || format!("{}, reaches {pa:#x}", what()));
        }
        let memory = machine.memory().first()..machine.memory().end();
        if let Some(value) = seen.loaded
            && memory.contains(&at)
        {
            let written = self.data.borrow().get(&at).copied().unwrap_or(Some(0));
            machine.check(written.is_none_or(|written| value == written), || {
                format!("{}, gives {value:#x} where {written:x?} was written", what())
            });
        }
    }

    /// Leaves of these addresses were unmapped, and are not used any more: they have to say what
    /// was done to their pages.
    pub fn account_for(&self, first: u64, last: u64, attrs: Attrs) {
        for spot in self.inside(first, last) {
            // What a change has cleared that is not complete by itself is not asked for.
            let (cleared, cleaned) = spot.clears.get();
            let written = spot.written.take() && !cleaned;
            let accessed = spot.accessed.take() && !cleared;
            let lost = match (written && !attrs.dirty, accessed && !attrs.accessed) {
                (true, _) => "written",
                (_, true) => "accessed",
                _ => continue,
            };
            self.machine.report(
                Rule::FlagLost,
                format!("{:#x} was {lost}, and its leaf does not say so", spot.va),
            );
        }
    }
}
