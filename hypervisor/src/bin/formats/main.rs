//! Every arm64 format of the engine against the processor: it is asked (`AT`) about addresses of
//! small tables, and agrees with the engine's `query` and with the judge ([`tablewright_walker`]),
//! or not.
//!
//! The tables have pages with every attribute that the format can hold, blocks of each size,
//! contiguous runs, and holes at each level. Their registers are set up by [`tablewright::arch`].
//! An answer is an output address with its memory type and shareability, or a fault with its stage,
//! kind and level; and of pages in memory, whether they are executed from.
//!
//! So that agreement says something, bits of descriptors are flipped behind the engine's back, one
//! at a time, in tables of each format: the answers have to change.
#![no_std]
#![no_main]

mod ask;
#[path = "../payload/mod.rs"]
mod payload;

use core::arch::global_asm;
use core::cell::Cell;
use core::fmt::{self, Write as _};
use core::ptr::{self, NonNull};

use tablewright::arch::arm64::{Ids, Translation};
use tablewright::format::{Arm64, Arm64El2, FORCED_WRITE_BACK, Stage2};
use tablewright::{
    Address, AddressSpace, Attrs, Barrier, Caps, EditError, Entry, Half, Invalidation, Level,
    Mapping, Memory, Pa, Perms, Platform, Shareability, Span,
};
use tablewright_walker::{self as walker, DirtyState, Granule, Regime};

use ask::{ACCESS_FLAG, Access, Answer, BREAK, Cpu, PERMISSION, Setting, TRANSLATION};
use payload::{Outcome, console, program};

/// Memory behind the image: a page of breaks, of the largest granule, and frames for tables.
const CODE: u64 = 0x4400_0000;
const TABLES: u64 = 0x4402_0000;
const END: u64 = 0x6000_0000;
/// The memory that EL2 has mapped to itself: from its start on, a block of the largest granule.
const IMAGE: u64 = 0x4000_0000;
const IMAGE_SIZE: u64 = 512 << 20;

global_asm!(payload::start!());

/// Frames one after the other, anew for each format. They hold what they held.
struct Machine {
    next: Cell<u64>,
    caps: Caps,
}

// SAFETY: a frame is handed out once while it is used, and aligned, the root's to all of them; the
// pointers are good because the MMU is off; nothing walks the tables while they are edited; a
// reference is the same platform.
unsafe impl Platform for Machine {
    payload::tables!(take);

    unsafe fn free_table(&self, _: Pa, _: Level) {}

    fn barrier(&self, _: Barrier) {}

    fn invalidate(&self, _: &Invalidation<'_>) {}

    fn caps(&self) -> Caps {
        self.caps
    }
}

impl Machine {
    /// Frames of the largest size, whatever the format's are.
    fn take(&self, count: u64) -> Option<Pa> {
        let size = count << 16;
        let first = self.next.get().next_multiple_of(size);
        self.next.set(first + size);
        (first + size <= END).then_some(Pa::new(first))
    }
}

/// A descriptor in memory.
fn descriptor(table: u64, index: usize) -> *mut u64 {
    ptr::with_exposed_provenance_mut::<u64>(table as usize).wrapping_add(index)
}

/// A subject of questions: where, of what size, and whether memory is there to execute from.
#[derive(Clone, Copy)]
struct Item {
    at: u64,
    size: u64,
    code: bool,
}

/// The most of them.
const ITEMS: usize = 64;
/// The most that is asked of one address.
const QUESTIONS: usize = 6;

/// Questions about one format, and their results.
#[derive(Default)]
struct Tally {
    answers: u32,
    found: u32,
    flips: u32,
}

/// Why a format is not right, or was not asked about.
enum End {
    /// The processor lacks something.
    Refused(&'static str),
    /// The tables cannot be made.
    Edit(&'static str),
    /// The processor says something else than the engine or the judge.
    Differs(Differs),
    /// This bit of the descriptor of an address was flipped, and the answers were the same.
    Unnoticed(u64, u32),
}

struct Differs {
    at: u64,
    access: Access,
    user: bool,
    processor: Answer,
    /// A hole, if nothing.
    engine: Option<Answer>,
    judge: Answer,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(why) | Self::Edit(why) => f.write_str(why),
            Self::Differs(it) => {
                let user = if it.user { " of the user" } else { "" };
                write!(
                    f,
                    "{:?}{user} at {:#x}: the processor says {:x?}, the engine {:x?}, the judge \
                     {:x?}",
                    it.access, it.at, it.processor, it.engine, it.judge
                )
            }
            Self::Unnoticed(at, bit) => {
                write!(
                    f,
                    "bit {bit} of the descriptor for {at:#x} is flipped, and no answer is another"
                )
            }
        }
    }
}

/// Attributes that leaves may have. What a format cannot hold is left out.
fn attrs() -> impl Iterator<Item = Attrs> {
    let guest = |perms: Perms| Attrs::GUEST_MEMORY.with_perms(perms);
    let (read, write) = (Perms::READ.and_user(), Perms::READ.union(Perms::WRITE).and_user());
    let bases = [
        Attrs::KERNEL_DATA,
        Attrs::KERNEL_RODATA,
        Attrs::KERNEL_TEXT,
        Attrs::KERNEL_DEVICE,
        Attrs::USER_DATA,
        Attrs::USER_RODATA,
        Attrs::USER_TEXT,
        Attrs::GUEST_MEMORY,
        Attrs::GUEST_DEVICE,
        guest(read),
        guest(Perms::WRITE.and_user()),
        guest(write),
        guest(Perms::READ.union(Perms::EXEC).and_user()),
        // Of one exception level alone.
        guest(read.union(Perms::EXEC)),
        guest(read.union(Perms::USER_EXEC)),
        guest(write.union(Perms::USER_EXEC)),
    ];
    // Of stage 1, and of stage 2.
    let others = [Attrs::KERNEL_DATA, Attrs::GUEST_MEMORY].map(|plain| {
        let mut all = [plain; 9];
        all[0].perms = Perms::empty();
        all[1].memory = Memory::NonCacheable;
        all[2].memory = Memory::WriteThrough;
        all[3].memory = Memory::DeviceStrict;
        all[4].accessed = false;
        all[5].dirty = false;
        all[6].shareability = Shareability::Outer;
        all[7].shareability = Shareability::Non;
        (all[8].global, all[8].software) = (false, 5);
        all
    });
    let others = others.into_iter().flatten();
    bases.into_iter().chain(others)
}

/// A space with something of everything in it, and what was put there.
struct Laid<'m, F: Translation> {
    space: AddressSpace<F, &'m Machine>,
    half: Half,
    items: [Item; ITEMS],
    count: usize,
    /// The most bits of an output address.
    bits: u32,
    /// Stage 2 tells the exception levels apart that may execute.
    splits: bool,
}

impl<'m, F: Translation> Laid<'m, F> {
    const PAGE: u64 = 1 << F::PAGE_SHIFT;

    fn new(machine: &'m Machine, half: Half, ids: &Ids) -> Result<Self, End> {
        let space = AddressSpace::new_in(machine, half).ok_or(End::Edit("no memory for a root"))?;
        let none = Item { at: 0, size: 0, code: false };
        Ok(Self {
            space,
            half,
            items: [none; ITEMS],
            count: 0,
            bits: ids.physical_bits().min(F::OUTPUT_BITS),
            splits: ids.has_split_execution(),
        })
    }

    /// An address of this half, the topmost bit of which is set or, counted from above, clear.
    fn address(&self, offset: u64) -> u64 {
        let at = 1 << (F::INPUT_BITS - 1) | offset;
        match self.half {
            Half::Lower => at,
            Half::Upper => at | u64::MAX << F::INPUT_BITS,
        }
    }

    /// The size of a leaf at a level, and of a run of them.
    fn size(level: Level) -> u64 {
        1 << F::shift(level)
    }

    fn run(level: Level) -> u64 {
        Self::size(level) << F::contiguous(level)
    }

    /// Memory for an offset, as far up as there may be any, and aligned as that.
    fn memory(&self, offset: u64) -> Pa {
        let top = 1u64 << (self.bits - 1);
        Pa::new(top | offset & (top - 1) ^ top >> 2)
    }

    fn map(
        &mut self,
        offset: u64,
        size: u64,
        frame: Option<Pa>,
        mapping: Mapping,
    ) -> Result<(), End> {
        let at = self.address(offset);
        let memory = frame.unwrap_or_else(|| self.memory(offset));
        let span =
            Span::new(F::Input::from_bits(at), size).map_err(|_| End::Edit("no such addresses"))?;
        match self.space.map(span, memory, mapping) {
            Ok(()) => {}
            Err(EditError::Inexpressible(_)) => return Ok(()),
            Err(EditError::OutOfTables) => return Err(End::Edit("no memory for tables")),
            Err(_) => return Err(End::Edit("what the format has cannot be mapped")),
        }
        let code = frame.is_some();
        let room = self.items.get_mut(self.count).ok_or(End::Edit("too much is mapped"))?;
        *room = Item { at, size, code };
        self.count += 1;
        Ok(())
    }

    /// Puts something of everything there.
    fn fill(&mut self) -> Result<(), End> {
        let (page, up) = (Self::PAGE, Level::PAGE.up());
        let plain = match F::Input::SIGNED {
            true => Attrs::KERNEL_DATA,
            false => Attrs::GUEST_MEMORY,
        };
        // Single pages, with a hole between any two.
        for (number, attrs) in (0..).zip(attrs()) {
            let executes = [Perms::EXEC, Perms::USER_EXEC].map(|perms| attrs.perms.contains(perms));
            if !F::Input::SIGNED && !self.splits && executes[0] != executes[1] {
                continue;
            }
            let code = (attrs.memory == Memory::Normal).then_some(Pa::new(CODE));
            self.map(2 * number * page, page, code, attrs.into())?;
        }
        // Another table: a run of pages, and the last page of the table.
        let (block, run) = (Self::size(up), Self::run(Level::PAGE));
        self.map(block + run, run, None, Mapping::new(plain).pages_only())?;
        self.map(2 * block - page, page, None, plain.into())?;
        // Blocks of each size, where the window is large enough, and runs of them.
        let mut level = Some(up);
        while let Some(at) = level.filter(|&at| at <= F::root_level()) {
            let (size, run) = (Self::size(at), Self::run(at));
            let window = 1u64 << (F::INPUT_BITS - 1);
            if F::is_leaf_level(at) && 4 * size <= window {
                self.map(3 * size, size, None, Mapping::new(plain).without_runs())?;
            }
            if F::is_leaf_level(at) && run > size && 2 * run <= window {
                self.map(run, run, None, plain.into())?;
            }
            level = Some(at.up());
        }
        Ok(())
    }

    const STAGE: u8 = if F::Input::SIGNED { 1 } else { 2 };

    /// Returns the answer that the engine expects, or `None` of a hole: it does not say at which
    /// level that is.
    fn said(&self, at: u64, access: Access, user: bool) -> Option<Answer> {
        let leaf = self.space.query(F::Input::from_bits(at))?;
        let (attrs, level) = (leaf.attrs(), 3 - leaf.level().height() as i8);
        let needs = match (access, user) {
            (Access::Read, false) => Perms::READ,
            (Access::Write, false) => Perms::WRITE,
            (Access::Fetch, false) => Perms::EXEC,
            (Access::Read, true) => Perms::USER_READ,
            (Access::Write, true) => Perms::USER_WRITE,
            (Access::Fetch, true) => Perms::USER_EXEC,
        };
        let memory = match attrs.memory {
            Memory::Normal | Memory::Tagged => 0xff,
            Memory::WriteThrough => 0xbb,
            Memory::NonCacheable => 0x44,
            Memory::Device => 0x04,
            Memory::DeviceStrict => 0x00,
        };
        let reach = match attrs.shareability {
            Shareability::Non => 0,
            Shareability::Outer => 2,
            Shareability::Inner => 3,
        };
        let kind = match () {
            () if attrs.perms.is_empty() => TRANSLATION,
            () if !attrs.accessed => ACCESS_FLAG,
            // The first write of a clean leaf faults: hardware sets no flags.
            () if !attrs.perms.contains(needs) || access == Access::Write && !attrs.dirty => {
                PERMISSION
            }
            () => {
                let pa = leaf.frame().get() + (at - leaf.input().bits());
                return Some(Answer::reached(access, pa, memory, reach));
            }
        };
        Some(Answer::fault(Self::STAGE, kind, level))
    }

    /// Returns the judge's answer, and the place of the last descriptor that it has read.
    fn judged(&self, regime: Regime, at: u64, access: Access, user: bool) -> (Answer, *mut u64) {
        let mut last = ptr::null_mut();
        let mut read = |table: u64, index: usize| {
            last = descriptor(table, index);
            // SAFETY: a table of the space, whose memory is where its address is.
            unsafe { last.read_volatile() }
        };
        let found = walker::translate(regime, self.space.root().get(), at, &mut read);
        (found.map_or_else(Self::judge_fault, |leaf| Self::judge(&leaf, at, access, user)), last)
    }

    fn judge_fault(fault: walker::Fault) -> Answer {
        match fault {
            walker::Fault::NotMapped { level } => Answer::fault(Self::STAGE, TRANSLATION, level),
            _ => Answer::NONE,
        }
    }

    fn judge(leaf: &walker::Leaf, at: u64, access: Access, user: bool) -> Answer {
        let class = match user {
            true => leaf.access.user,
            false => leaf.access.privileged,
        };
        let DirtyState::Arm64 { read_only, .. } = leaf.dirty else {
            return Answer::NONE;
        };
        let is_allowed = match access {
            Access::Read => class.read,
            Access::Write => class.write && !read_only,
            Access::Fetch => class.execute,
        };
        let memory = match (F::Input::SIGNED, F::FORCED) {
            (true, _) => (F::MAIR >> (8 * leaf.memory)) as u8,
            (false, false) => of_stage_2(leaf.memory),
            (false, true) => of_forced(leaf.memory),
        };
        match (leaf.accessed, is_allowed) {
            (false, _) => Answer::fault(Self::STAGE, ACCESS_FLAG, leaf.level),
            (true, false) => Answer::fault(Self::STAGE, PERMISSION, leaf.level),
            (true, true) => {
                let share = leaf.shareability.unwrap_or(3);
                Answer::reached(access, leaf.physical(at), memory, share)
            }
        }
    }

    /// Asks all about an address.
    fn question(
        &self,
        cpu: &Cpu,
        regime: Regime,
        at: u64,
        code: bool,
        tally: &mut Tally,
    ) -> Result<(), End> {
        for (access, user) in questions(cpu, code) {
            let processor = cpu.ask(at, access, user);
            let engine = self.said(at, access, user);
            let (judge, _) = self.judged(regime, at, access, user);
            let is_hole = || {
                let mut levels = -1..=3;
                levels.any(|level| processor == Answer::fault(Self::STAGE, TRANSLATION, level))
            };
            if processor != judge || !engine.map_or_else(is_hole, |engine| processor == engine) {
                return Err(End::Differs(Differs { at, access, user, processor, engine, judge }));
            }
            tally.answers += 1;
            tally.found += u32::from(!matches!(processor, Answer::Fault { .. }));
        }
        Ok(())
    }

    /// Asks about everything, and what is beside it.
    fn questions(&self, cpu: &Cpu, regime: Regime, tally: &mut Tally) -> Result<(), End> {
        for &Item { at, size, code } in self.items.iter().take(self.count) {
            let last = (at + (size - 1)) & !0xfff;
            for inside in [at, (at + size / 2) & !0xfff, last] {
                self.question(cpu, regime, inside, code, tally)?;
            }
            // Below the last page there is something, and above it the half may end.
            let above = (at + (size - 1)).wrapping_add(1);
            let is_below_end = above & ((1 << F::INPUT_BITS) - 1) != 0;
            let beside = [Some(at - Self::PAGE), is_below_end.then_some(above)];
            for beside in beside.into_iter().flatten() {
                self.question(cpu, regime, beside, false, tally)?;
            }
        }
        Ok(())
    }

    /// Flips bits of descriptors, one at a time: the answers have to change.
    fn flip(&self, cpu: &Cpu, regime: Regime, tally: &mut Tally) -> Result<(), End> {
        let top = F::put_address(Pa::new(1 << (self.bits - 1))).trailing_zeros();
        // Valid, AF, the write permission, a bit of the address and its topmost; then what is not
        // where in each.
        let common = [0, 10, 7, 20, top];
        let more: &[u32] = match (F::Input::SIGNED, cpu.has_user()) {
            (true, true) => &[2, 6],
            (true, false) => &[2],
            (false, _) => &[4, 6],
        };
        // What is never executed.
        let never: &[u32] = match (F::Input::SIGNED, cpu.has_user()) {
            (true, true) => &[53, 54],
            _ => &[54],
        };
        let is_like = |item: &&Item, perms: Perms, code: bool| {
            let leaf = self.space.query(F::Input::from_bits(item.at));
            leaf.is_some_and(|leaf| leaf.attrs().perms == perms) && item.code == code
        };
        let find = |perms, code| {
            let items = self.items.iter().take(self.count);
            items.filter(|item| item.size == Self::PAGE).find(|item| is_like(item, perms, code))
        };
        let (plain, text) = match F::Input::SIGNED {
            true => (Attrs::KERNEL_DATA, Attrs::KERNEL_TEXT),
            false => (Attrs::GUEST_MEMORY, Attrs::GUEST_MEMORY),
        };
        let plain = find(plain.perms, false).ok_or(End::Edit("no page to change"))?;
        let text = find(text.perms, true).ok_or(End::Edit("no page of code to change"))?;
        for &bit in common.iter().chain(more) {
            self.flip_one(cpu, regime, plain, bit)?;
            tally.flips += 1;
        }
        if cpu.can(Access::Fetch, false) {
            for &bit in never {
                self.flip_one(cpu, regime, text, bit)?;
                tally.flips += 1;
            }
        }
        Ok(())
    }

    fn flip_one(&self, cpu: &Cpu, regime: Regime, item: &Item, bit: u32) -> Result<(), End> {
        let (_, place) = self.judged(regime, item.at, Access::Read, false);
        let mut expected = [None; QUESTIONS];
        for ((access, user), answer) in questions(cpu, item.code).zip(&mut expected) {
            *answer = self.said(item.at, access, user);
        }
        // SAFETY: a descriptor of the space, which nothing else uses; it is put back below.
        let before = unsafe { place.read_volatile() };
        // SAFETY: as above.
        unsafe { place.write_volatile(before ^ 1 << bit) };
        cpu.forget();
        let is_noticed = questions(cpu, item.code)
            .zip(expected)
            .any(|((access, user), answer)| Some(cpu.ask(item.at, access, user)) != answer);
        // SAFETY: as above.
        unsafe { place.write_volatile(before) };
        cpu.forget();
        match is_noticed {
            true => Ok(()),
            false => Err(End::Unnoticed(item.at, bit)),
        }
    }
}

/// Memory types of stage 2, which stage 1 leaves as they are (D8.6.5): MemAttr.
fn of_stage_2(memory: u8) -> u8 {
    let cacheable = |bits: u8| match bits {
        1 => 0x4,
        2 => 0xb,
        _ => 0xf,
    };
    match memory >> 2 {
        0 => memory << 2,
        outer => cacheable(outer) << 4 | cacheable(memory & 3),
    }
}

/// Returns the type with forced write-back (D8.6.6).
fn of_forced(memory: u8) -> u8 {
    match memory {
        0..=3 => memory << 2,
        5 => 0x44,
        _ => 0xff,
    }
}

/// All that can be asked of an address; a fetch only from memory.
fn questions(cpu: &Cpu, code: bool) -> impl Iterator<Item = (Access, bool)> + use<> {
    let cpu = *cpu;
    [Access::Read, Access::Write, Access::Fetch]
        .into_iter()
        .flat_map(|access| [(access, false), (access, true)])
        .filter(move |&(access, user)| cpu.can(access, user) && (code || access != Access::Fetch))
}

/// One format in one regime.
fn check<F: Translation>(
    machine: &Machine,
    ids: &Ids,
    setting: Setting,
    regime: Regime,
) -> Result<Tally, End> {
    machine.next.set(TABLES);
    if setting == Setting::Host && !ids.has_host_extensions() {
        return Err(End::Refused("the processor does not have VHE"));
    }
    ids.check::<F>().map_err(|why| End::Refused(why.0))?;
    let mut lower = Laid::<F>::new(machine, Half::Lower, ids)?;
    lower.fill()?;
    let above = match setting {
        Setting::El1 => Half::Upper,
        _ => Half::Lower,
    };
    let mut upper = Laid::<F>::new(machine, above, ids)?;
    if setting == Setting::El1 {
        upper.fill()?;
    }
    if matches!(setting, Setting::Host | Setting::El2) {
        let image = Span::new(F::Input::from_bits(IMAGE), IMAGE_SIZE)
            .map_err(|_| End::Edit("no such addresses"))?;
        let mapped = lower.space.map(image, Pa::new(IMAGE), Attrs::KERNEL_TEXT);
        mapped.map_err(|_| End::Edit("the image cannot be mapped"))?;
    }
    let roots = (lower.space.root(), upper.space.root());
    let cpu = Cpu::set_up::<F>(setting, ids, &machine.caps, roots.0, roots.1)
        .map_err(|why| End::Refused(why.0))?;
    let mut tally = Tally::default();
    for laid in [&lower, &upper] {
        laid.questions(&cpu, regime, &mut tally)?;
    }
    lower.flip(&cpu, regime, &mut tally)?;
    Ok(tally)
}

/// A format, and how it is checked.
struct Row {
    page_shift: u32,
    input_bits: u32,
    more: &'static str,
    check: fn(&Machine, &Ids, Setting) -> Result<Tally, End>,
}

const fn granule(page_shift: u32) -> Granule {
    match page_shift {
        12 => Granule::K4,
        14 => Granule::K16,
        _ => Granule::K64,
    }
}

macro_rules! rows {
    ($format:ident, $regime:expr => $(($shift:literal, $bits:literal, $wide:literal)),*) => {
        &[$(Row {
            page_shift: $shift,
            input_bits: $bits,
            more: if $wide { ", wide" } else { "" },
            check: |machine, ids, setting| {
                let regime = ($regime)(granule($shift), $bits, $wide);
                check::<$format<$shift, $bits, $wide>>(machine, ids, setting, regime)
            },
        }),*]
    };
}

const fn stage_2(granule: Granule, input_bits: u8, wide: bool, forced: bool) -> Regime {
    Regime::Arm64Stage2 { granule, input_bits, wide, forced_write_back: forced }
}

/// Stage 1 of EL1&0, and of EL2&0.
const STAGE_1: &[Row] = rows!(Arm64,
    |granule, input_bits, wide| Regime::Arm64Stage1Sized { granule, input_bits, wide } =>
    (12, 36, false), (12, 39, false), (12, 48, false), (12, 48, true), (12, 52, true),
    (14, 36, false), (14, 47, false), (14, 48, false), (14, 52, true),
    (16, 36, false), (16, 42, false), (16, 48, false), (16, 52, true)
);

/// Stage 1 of EL2 alone.
const EL2: &[Row] = rows!(Arm64El2,
    |granule, input_bits, wide| Regime::Arm64El2 { granule, input_bits, wide } =>
    (12, 39, false), (12, 48, false), (12, 52, true),
    (14, 36, false), (14, 47, false), (14, 52, true),
    (16, 42, false), (16, 48, false), (16, 52, true)
);

/// Stage 2, and where it forces write-back. 52 bits of 16 KiB would start at level 0, which the
/// emulator takes for not allowed.
const STAGE_2: &[Row] = rows!(Stage2,
    |granule, input_bits, wide| stage_2(granule, input_bits, wide, false) =>
    (12, 36, false), (12, 40, false), (12, 48, false), (12, 52, true),
    (14, 40, false), (14, 47, false), (14, 51, true),
    (16, 42, false), (16, 48, false), (16, 52, true)
);
const FORCED: &[Row] = rows!(Forced,
    |granule, input_bits, wide| stage_2(granule, input_bits, wide, true) =>
    (12, 40, false), (14, 51, true), (16, 42, false)
);

type Forced<const PAGE_SHIFT: u32, const INPUT_BITS: u32, const WIDE: bool> =
    Stage2<PAGE_SHIFT, INPUT_BITS, WIDE, FORCED_WRITE_BACK>;

/// Checks all formats, and counts those that are wrong.
fn run() -> Outcome {
    let ids = Ids::read();
    let machine = Machine {
        next: Cell::new(TABLES),
        // Hardware sets no flags, so that what it would set is a fault.
        caps: Caps { hardware_access: false, hardware_dirty: false, ..ids.caps() },
    };
    let code = ptr::with_exposed_provenance_mut::<u32>(CODE as usize);
    for word in 0..(1 << 16) / size_of::<u32>() {
        // SAFETY: memory behind the image, which nothing else uses.
        unsafe { code.add(word).write_volatile(BREAK) };
    }
    let all = [
        ("EL1", Setting::El1, STAGE_1),
        ("EL2&0", Setting::Host, STAGE_1),
        ("EL2", Setting::El2, EL2),
        ("stage 2", Setting::Stage2, STAGE_2),
        ("stage 2, forced write-back", Setting::Stage2, FORCED),
    ];
    let mut wrong = 0;
    for (name, setting, rows) in all {
        for row in rows {
            let result = (row.check)(&machine, &ids, setting);
            let (kib, bits, more) = (1 << row.page_shift >> 10, row.input_bits, row.more);
            let mut console = console();
            let _ = write!(console, "formats: ");
            let _ = match &result {
                Ok(_) => write!(console, "ok"),
                Err(End::Refused(_)) => write!(console, "skipped"),
                Err(_) => write!(console, "WRONG"),
            };
            let _ = write!(console, ": {name}, {kib} KiB, {bits} bits{more}: ");
            let _ = match &result {
                Ok(Tally { answers, found, flips }) => writeln!(
                    console,
                    "{answers} answers, {found} of them no fault; {flips} flipped bits are noticed"
                ),
                Err(why) => writeln!(console, "{why}"),
            };
            wrong += u32::from(matches!(result, Err(ref end) if !matches!(end, End::Refused(_))));
        }
    }
    Ok(Some(wrong))
}

program!("formats", run);
