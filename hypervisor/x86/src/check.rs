//! The processor is asked what random tables mean, address by address, and has to say what the
//! judge says.
//!
//! The engine edits the tables at random while the processor uses them: those that this program
//! itself runs on, then those of a guest and the nested ones below. Now and then, tables take
//! permissions away from all below them, or give them back. x86 has no instruction that translates,
//! so the processor is asked by accesses: it reads, writes or executes what is at an address, as
//! the supervisor or as a user. The judge ([`tablewright_walker`]) walks the same tables by what
//! the manuals say.
//!
//! They agree if
//!
//! * the access reaches the address that the judge has found: what is read was put there before,
//!   and is nowhere else, what is written is found there afterwards, and what is executed is what
//!   was put there; and each descriptor on the way is what it was, with the accessed and dirty
//!   flags that the access sets, and no others; or
//! * there is the same fault: of the guest's tables or of the nested ones, at the same address,
//!   with the same error code.
//!
//! Half of the addresses are some that were asked for lately, so that the processor remembers them.

use core::fmt::{self, Write as _};
use core::ops::{ControlFlow, Range};
use core::ptr;

use tablewright::format::{Npt, X86_64};
use tablewright::{
    Address, AddressSpace, Attrs, Format, Half, Ipa, Level, Liveness, Mapping, Memory, Pa, Perms,
    Span,
};
use tablewright_walker::{Regime, Walk};

use crate::boot;
use crate::console::Console;
use crate::cpu::{self, Access, Fault, Kind, Probe};
use crate::judge::{Judge, Tree, peek};
use crate::memory::{Omit, Tables, Walker};
use crate::svm::Guest;
use tablewright_hypervisor_common::edits::{PAGE, Random, WINDOW, Window};

/// The addresses that are edited and asked for.
const VIRTUAL: u64 = 0xffff_d2c5_4000_0000;
/// Their address in the guest, to the guest.
const INTERMEDIATE: u64 = 0xb5_4000_0000;
/// The memory that they lead to.
const PHYSICAL: u64 = 1 << 30;
/// The page of probes, to the guest as well.
const PROBES: u64 = 0x2_0000_0000;
/// The distance from the memory of this program to the guest's addresses of it.
const DISTANCE: u64 = 0x25_0000_0000;

/// The memory for tables: of this program, of the guest, nested.
const HOST: u64 = 16 << 20;
const GUEST: u64 = 24 << 20;
const NESTED: u64 = 32 << 20;
const POOL: u64 = 8 << 20;
/// The guest's control block, and the processor's state.
const BLOCK: u64 = 40 << 20;

/// Questions between two edits, and edits after which tables take away other permissions.
const QUESTIONS: u32 = 25;
const RESTRICT: u32 = 32;

const WRITABLE: Perms = Perms::READ.union(Perms::WRITE);
const READ_ONLY: Attrs = Attrs::GUEST_MEMORY.with_perms(Perms::READ.and_user());
const READ_AND_EXECUTE: Attrs =
    Attrs::GUEST_MEMORY.with_perms(Perms::READ.union(Perms::EXEC).and_user());

/// How the window is mapped. Bit 2 of the index of a memory type stands elsewhere in a large leaf.
const OF_VIRTUAL: &[Attrs] = &[
    Attrs::KERNEL_DATA,
    Attrs::KERNEL_RODATA,
    Attrs::KERNEL_TEXT,
    Attrs::KERNEL_TEXT.with_perms(WRITABLE.union(Perms::EXEC)),
    Attrs::USER_DATA,
    Attrs::USER_DATA.with_memory(Memory::WriteThrough),
    Attrs::USER_RODATA,
    Attrs::USER_TEXT,
];
const OF_INTERMEDIATE: &[Attrs] = &[
    Attrs::GUEST_MEMORY,
    Attrs::GUEST_MEMORY.with_memory(Memory::WriteThrough),
    Attrs::GUEST_DEVICE,
    READ_ONLY,
    READ_AND_EXECUTE,
];

// SDM vol. 3A 5.5.4.
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const NO_EXECUTE: u64 = 1 << 63;

/// Why there is no result.
pub enum Failed {
    /// The processor and the judge disagree; what is to be said has been said.
    Disagreed,
    /// Something else.
    Other(&'static str),
}

impl From<&'static str> for Failed {
    fn from(why: &'static str) -> Self {
        Self::Other(why)
    }
}

/// Writes a token.
fn poke(at: u64, value: u64) {
    // SAFETY: memory that has no other use, mapped one to one.
    unsafe { ptr::with_exposed_provenance_mut::<u64>(at as usize).write_volatile(value) }
}

/// Questions, one after the other.
struct Questions {
    random: Random,
    recent: [u64; 64],
    asked: u32,
    reached: u32,
}

impl Questions {
    fn new(seed: u64) -> Self {
        Self { random: Random(seed), recent: [VIRTUAL; 64], asked: 0, reached: 0 }
    }

    /// One question. `processor` makes the access, as the user or not.
    fn ask(
        &mut self,
        tables: Tree,
        nested: Option<Tree>,
        processor: impl FnOnce(&Probe, bool) -> Result<u64, Fault>,
    ) -> Result<(), Failed> {
        const KINDS: [Kind; 5] = [Kind::Read, Kind::Read, Kind::Write, Kind::Write, Kind::Fetch];
        let random = &mut self.random;
        let place = random.below(self.recent.len() as u64) as usize;
        if random.below(2) == 0 {
            self.recent[place] = VIRTUAL + (random.below(WINDOW) & !7);
        }
        let at = self.recent[place];
        let access = Access { user: random.below(2) == 0, kind: random.one_of(&KINDS) };
        let fetch = Access { kind: Kind::Fetch, ..access };
        self.asked += 1;
        let token = cpu::token(self.asked);
        let probe = Probe::new(access.kind, PROBES, at, token, nested.is_some());

        // The instruction that makes the access is fetched before it, or the one that goes back
        // after it.
        let mut judge = Judge::new(tables, nested);
        let expected = match access.kind {
            Kind::Fetch => judge.access(at, access).and_then(|place| {
                poke(place, token);
                judge.access(probe.back, fetch).map(|_| place)
            }),
            Kind::Read | Kind::Write => {
                judge.access(probe.instruction, fetch).and_then(|_| judge.access(at, access))
            }
        };
        if let (Ok(place), Kind::Read) = (expected, access.kind) {
            poke(place, token);
        }
        let answer = processor(&probe, access.user);
        let agree = match (expected, answer) {
            (Ok(place), Ok(value)) => {
                self.reached += 1;
                let is_there = match access.kind {
                    Kind::Read => value == token,
                    Kind::Write => peek(place) == token,
                    Kind::Fetch => value == u64::from(self.asked),
                };
                is_there && judge.passed().all(|(entry, after)| peek(entry) == after)
            }
            (Err(expected), Err(answer)) => expected == answer,
            _ => false,
        };
        if agree {
            return Ok(());
        }
        let _ = writeln!(
            Console,
            "question {}, {access:?} of {at:#x}, with {token:#x}: the judge says {expected:x?}, \
             the processor {answer:x?}",
            self.asked
        );
        for (entry, after) in judge.passed() {
            let is = peek(entry);
            let _ = writeln!(
                Console,
                "  the descriptor at {entry:#x} should be {after:#018x}, and is {is:#018x}"
            );
        }
        Err(Failed::Disagreed)
    }

    /// Says what came of it.
    ///
    /// # Errors
    /// Too little was mapped for the answers to mean anything.
    fn end(&self, what: fmt::Arguments<'_>) -> Result<(), Failed> {
        let (asked, reached) = (self.asked, self.reached);
        let _ = writeln!(
            Console,
            "{what}: {asked} addresses asked of the processor, {reached} reached, no difference"
        );
        match reached >= asked / 10 {
            true => Ok(()),
            false => Err("nothing of what the processor was asked is mapped".into()),
        }
    }
}

/// Lets a few tables take permissions away, or no more. The space is forgotten and taken over anew:
/// what its tables deny it does not know any more.
fn restrict<'a, F: Format>(
    space: AddressSpace<F, &'a Tables>,
    regime: Regime,
    from: u64,
    random: &mut Random,
) -> AddressSpace<F, &'a Tables> {
    let (tables, root) = (*space.platform(), space.root());
    for _ in 0..4 {
        // The highest of 5 leads to other things as well.
        let level = random.one_of(&[2, 3, 3, 4]);
        let denied = match random.below(16) {
            0 => WRITE,
            1 => USER,
            2 => NO_EXECUTE,
            _ => 0,
        };
        let Ok(mut walk) = Walk::new(regime, root.get(), from + random.below(WINDOW)) else {
            continue;
        };
        loop {
            let at = walk.level();
            let entry = tables.place(walk.table()).wrapping_add(walk.index());
            // SAFETY: an entry of the tree, which only walkers write, too.
            let descriptor = unsafe { entry.read_volatile() };
            if !matches!(walk.step(descriptor), Ok(None)) {
                break;
            }
            if at == level {
                let bits = (descriptor | WRITE | USER) & !NO_EXECUTE ^ denied;
                // SAFETY: as above, and no walk goes on meanwhile.
                unsafe { entry.write_volatile(bits) };
            }
        }
    }
    tables.forget_everything();
    // SAFETY: a tree of this format and of this platform (1.), which the space that is gone edits
    // no more (2.), in use, without an identity (3.).
    unsafe { AddressSpace::adopt(tables, root, Half::Lower, Liveness::Live) }
        .expect("no recursive entry")
}

/// Takes a page of the guest's tables away from the guest, or the right to write it, and gives the
/// last one back.
fn hide<F: Format<Input = Ipa>>(
    space: &mut AddressSpace<F, &Tables>,
    tables: &Tables,
    hidden: &mut u64,
    random: &mut Random,
) -> Result<(), Failed> {
    const FRESH: Attrs = Attrs { accessed: false, dirty: false, ..Attrs::GUEST_MEMORY };
    let pages = (tables.used() - GUEST) / PAGE;
    // Often one of the first, which more addresses need.
    let page = match random.below(4) {
        0 => random.below(pages.min(8)),
        _ => random.below(pages),
    };
    let next = GUEST + page * PAGE;
    let attrs = random.one_of(&[None, Some(READ_ONLY), Some(FRESH), Some(FRESH), Some(FRESH)]);
    for (page, attrs) in [(*hidden, Some(FRESH)), (next, attrs)] {
        let span = Span::new(Ipa::new(page + DISTANCE), PAGE).map_err(|_| "an odd page")?;
        let mut gather = space.gather();
        let progress = gather.unmap(span, |_| ControlFlow::Continue(()));
        gather.finish(|_| ());
        if !progress.is_ok_and(|progress| progress.is_done()) {
            return Err(NO_MEMORY.into());
        }
        if let Some(attrs) = attrs {
            map(space, page + DISTANCE, page..page + PAGE, attrs)?;
        }
    }
    *hidden = next;
    Ok(())
}

const NO_MEMORY: &str = "no memory for the tables that are checked";

/// Maps without further ado.
fn map<F: Format>(
    space: &mut AddressSpace<F, &Tables>,
    from: u64,
    to: Range<u64>,
    mapping: impl Into<Mapping>,
) -> Result<(), Failed> {
    let span =
        Span::new(F::Input::from_bits(from), to.end - to.start).map_err(|_| "an odd range")?;
    space.map(span, Pa::new(to.start), mapping.into()).map_err(|_| NO_MEMORY.into())
}

/// Asks the processor for so many addresses through one tree, and for so many through two.
///
/// # Errors
/// The processor and the judge disagree, or there is no telling.
///
/// # Safety
/// 1. It is called once. The memory from [`HOST`] to the end of [`BLOCK`] is not in use, nor that
///    from [`PHYSICAL`] on.
/// 2. The processor has `LEVELS` levels, nested paging, and leaves up to `largest`.
pub unsafe fn run<const LEVELS: u8>(
    questions: u32,
    largest: Level,
    omit: Option<Omit>,
) -> Result<(), Failed> {
    // SAFETY: it has no other user (1.).
    let tables = unsafe { Tables::new(HOST..HOST + POOL, 0, Walker::Host(omit)) };
    let space = AddressSpace::<X86_64<LEVELS>, _>::new(&tables);
    let mut space = space.ok_or(NO_MEMORY)?;
    let [text, constants, data, end] = boot::image();
    for (memory, attrs) in [
        (text..constants, Attrs::KERNEL_TEXT),
        (constants..data, Attrs::KERNEL_RODATA),
        (data..end, Attrs::KERNEL_DATA),
        (HOST..BLOCK + 2 * PAGE, Attrs::KERNEL_DATA),
        (PHYSICAL..PHYSICAL + WINDOW, Attrs::KERNEL_DATA),
    ] {
        let mapping = Mapping::new(attrs).largest(largest);
        map(&mut space, memory.start, memory, mapping)?;
    }
    map(&mut space, PROBES, cpu::probes(), Attrs::USER_TEXT)?;
    space.make_live();
    // SAFETY: all that this program uses is mapped, one to one.
    unsafe { cpu::load(space.root()) };
    one_stage(space, questions, largest)?;
    // SAFETY: passed on.
    unsafe { two_stages::<LEVELS>(questions, largest) }
}

fn one_stage<const LEVELS: u8>(
    mut space: AddressSpace<X86_64<LEVELS>, &Tables>,
    questions: u32,
    largest: Level,
) -> Result<(), Failed> {
    let regime = Regime::X86_64 { levels: LEVELS };
    let window = Window { from: VIRTUAL, to: PHYSICAL, attrs: OF_VIRTUAL, largest };
    let mut ask = Questions::new(0x7ab1_e3f1_9e0d_5eed);
    for round in 0.. {
        if round % RESTRICT == 0 {
            space = restrict(space, regime, VIRTUAL, &mut ask.random);
        }
        window.edit(&mut space, &mut ask.random);
        for _ in 0..QUESTIONS {
            // SAFETY: the window leads to memory that is not in use, and what is executed there is
            // the token.
            let processor = |probe: &_, user| unsafe { cpu::access(probe, user) };
            ask.ask((regime, space.root()), None, processor)?;
        }
        if ask.asked >= questions {
            break;
        }
    }
    ask.end(format_args!("{LEVELS} levels"))
}

/// # Safety
/// As for [`run`], whose map is loaded.
unsafe fn two_stages<const LEVELS: u8>(questions: u32, largest: Level) -> Result<(), Failed> {
    // SAFETY: it has no other user (1.), and it is mapped so far away below (2.).
    let guest_tables = unsafe { Tables::new(GUEST..GUEST + POOL, DISTANCE, Walker::Guest) };
    // SAFETY: it has no other user (1.).
    let nested_tables = unsafe { Tables::new(NESTED..NESTED + POOL, 0, Walker::Guest) };
    let guest = AddressSpace::<X86_64<LEVELS>, _>::new(&guest_tables);
    let nested = AddressSpace::<Npt<LEVELS>, _>::new(&nested_tables);
    let (mut guest, mut nested) = guest.zip(nested).ok_or(NO_MEMORY)?;
    let probes = cpu::probes();
    let seen = probes.start + DISTANCE..probes.end + DISTANCE;
    map(&mut nested, seen.start, probes, READ_AND_EXECUTE)?;
    map(&mut guest, PROBES, seen, Attrs::USER_TEXT)?;
    let tables = GUEST..GUEST + POOL;
    map(&mut nested, GUEST + DISTANCE, tables, Attrs::GUEST_MEMORY)?;
    guest.make_live();
    nested.make_live();
    // SAFETY: the frames have no other user (1.), and the tables map what is for the guest (2.).
    let mut machine = unsafe { Guest::new(BLOCK, guest.root(), nested.root()) };

    let of_guest = Regime::X86_64 { levels: LEVELS };
    let of_nested = Regime::Npt { levels: LEVELS };
    let first = Window { from: VIRTUAL, to: INTERMEDIATE, attrs: OF_VIRTUAL, largest };
    let second = Window { from: INTERMEDIATE, to: PHYSICAL, attrs: OF_INTERMEDIATE, largest };
    let mut ask = Questions::new(0x5eed_7ab1_e3f1_9e0d);
    let mut hidden = GUEST;
    for round in 0.. {
        if round % RESTRICT == 0 {
            guest = restrict(guest, of_guest, VIRTUAL, &mut ask.random);
            nested = restrict(nested, of_nested, INTERMEDIATE, &mut ask.random);
        }
        hide(&mut nested, &guest_tables, &mut hidden, &mut ask.random)?;
        first.edit(&mut guest, &mut ask.random);
        second.edit(&mut nested, &mut ask.random);
        for _ in 0..QUESTIONS {
            let nested = Some((of_nested, nested.root()));
            let processor = |probe: &_, user| machine.access(probe, user);
            ask.ask((of_guest, guest.root()), nested, processor)?;
        }
        if ask.asked >= questions {
            break;
        }
    }
    ask.end(format_args!("{LEVELS} levels, nested"))
}
