//! One boot on the software machine: the linear map of a plan, made in one of the published ways or
//! in the engine's.
//!
//! One CPU runs on the tables that it builds, in virtual time. What is there before the clock
//! starts is what a kernel finds: a root with a fixmap in it, loaded. Table memory is part of the
//! RAM that is mapped. All other addresses are forbidden, so that a mapping of them, used or not,
//! breaks a rule of the machine; and a run that breaks any rule has no figures.

use std::cell::RefCell;
use std::ptr::NonNull;

use tablewright::format::{
    Arm64K4, Arm64K4Wide, Arm64K16, Arm64K16Wide, Arm64K64, Arm64K64Wide, X86_64,
};
use tablewright::linear::{MemoryMap, SlotMemory, Window};
use tablewright::{Attrs, Entry, Half, Hooks, Level, Pa, Perms, Platform, Span, Va};
use tablewright_linear::alternatives::{self, HugeSlots};
use tablewright_linear::engine::{self, COARSE_ID};
use tablewright_linear::{Counted, Fixmap, Goal, Technique};
use tablewright_machine::{
    Granule, Machine, MachineSlots, Mapper, Memory, Profile, Regime, Request, Setup, Time,
};

use super::plan::{Contents, NOT_STAGE_1, Plan};
use super::step::{Ran, Step, Way};
use crate::error::Error;
use crate::guest::failed;
use crate::memory::arena;

/// Start of the fixmap's slots, beyond any linear map.
const FIXMAP: u64 = 0xffff_fdff_fe00_0000;
/// How much memory is added after the boot.
const ADDED: u64 = 1 << 30;

/// Boots machines one after the other, and keeps the memory of the last for the next: the host then
/// need not provide it again.
#[derive(Default)]
pub struct Boots {
    memory: Option<Memory>,
}

impl Boots {
    /// Boots a machine of this profile and makes the linear map of the plan, which is of pages
    /// only.
    pub fn run(&mut self, profile: &Profile, step: Step, plan: &Plan) -> Result<Ran, Error> {
        let regime = profile.architecture.regime;
        let (frames, first) = table_memory(plan, regime).map_err(Error::Usage)?;
        let memory = self.provide(frames, regime.page_shift(), first)?;
        let mut setup = Setup::new(profile.architecture.clone(), memory);
        setup.costs = profile.costs.clone();
        let machine = Machine::new(setup);
        let ran = match regime {
            Regime::Arm64Stage1 { granule, wide } => match (granule, wide) {
                (Granule::K4, false) => boot::<Arm64K4>(&machine, step.way, plan),
                (Granule::K4, true) => boot::<Arm64K4Wide>(&machine, step.way, plan),
                (Granule::K16, false) => boot::<Arm64K16>(&machine, step.way, plan),
                (Granule::K16, true) => boot::<Arm64K16Wide>(&machine, step.way, plan),
                (Granule::K64, false) => boot::<Arm64K64>(&machine, step.way, plan),
                (Granule::K64, true) => boot::<Arm64K64Wide>(&machine, step.way, plan),
            },
            Regime::X86_64 { levels: 5 } => boot::<X86_64<5>>(&machine, step.way, plan),
            Regime::X86_64 { .. } => boot::<X86_64<4>>(&machine, step.way, plan),
            Regime::Arm64Stage1Sized { .. }
            | Regime::Arm64El2 { .. }
            | Regime::Arm64Stage2 { .. }
            | Regime::Ept { .. }
            | Regime::Npt { .. }
            | Regime::Riscv { .. } => Err(NOT_STAGE_1.to_owned()),
        };
        self.memory = Some(machine.into_memory());
        ran.map_err(failed(profile, step.name))
    }

    fn provide(&mut self, frames: usize, page_shift: u32, first: u64) -> Result<Memory, Error> {
        let fits = |memory: &Memory| {
            (memory.frames(), memory.page_shift(), memory.first()) == (frames, page_shift, first)
        };
        if let Some(memory) = self.memory.take_if(|memory| fits(memory)) {
            return Ok(memory);
        }
        // The last one goes before the next comes.
        self.memory = None;
        arena::check_available((frames as u64) << page_shift)?;
        Ok(Memory::new(frames, page_shift, first))
    }
}

/// How many frames there are for tables, and where: at the end of the last RAM that has room for
/// them.
fn table_memory(plan: &Plan, regime: Regime) -> Result<(usize, u64), String> {
    let shift = regime.page_shift();
    // What is added later takes as many tables as it has blocks, and one or two above them; the
    // coarse map has one for each block of table memory that it does not map as a whole, and the
    // fixmap one at each level.
    let per_table = 1 << (shift - 3);
    let later = (ADDED >> shift).div_ceil(per_table) + 2;
    let frames = plan.tables_bound() + later + plan.tables_bound() / per_table + 32;
    let bytes = frames << shift;
    let mut spans = plan.spans.iter().rev();
    let place = spans.find(|span| span.contents == Contents::Data && span.bytes() >= bytes);
    let place = place.ok_or_else(|| {
        format!("no range of RAM has room for all tables: {} are needed", crate::size::human(bytes))
    })?;
    let frames = usize::try_from(frames).map_err(|error| error.to_string())?;
    Ok((frames, place.end - bytes))
}

/// The plan in the engine's words.
struct Map {
    ram: Vec<Span<Pa>>,
    special: Vec<(Span<Pa>, Attrs)>,
}

impl Map {
    fn of(plan: &Plan) -> Result<Self, String> {
        let mut map = Self { ram: Vec::with_capacity(plan.spans.len()), special: Vec::new() };
        for span in &plan.spans {
            let memory = span_of(span.start, span.bytes())?;
            map.ram.push(memory);
            match span.contents {
                Contents::Data => {}
                Contents::Text => map.special.push((memory, Attrs::KERNEL_TEXT)),
                Contents::Rodata => map.special.push((memory, Attrs::KERNEL_RODATA)),
            }
        }
        Ok(map)
    }

    fn memory(&self) -> MemoryMap<'_> {
        MemoryMap { ram: &self.ram, reserved: &[], special: &self.special }
    }
}

fn span_of(start: u64, bytes: u64) -> Result<Span<Pa>, String> {
    Span::new(Pa::new(start), bytes).map_err(|error| format!("{start:#x}: {error}"))
}

/// Makes the map in one run of the machine, and looks at it afterwards.
fn boot<F: tablewright::Format<Input = Va>>(
    machine: &Machine,
    way: Way,
    plan: &Plan,
) -> Result<Ran, String> {
    let outcome = RefCell::new(Err("the machine did not run".to_owned()));
    machine
        .run(|_| {
            let ran = Kernel::<F>::start(machine, plan).and_then(|kernel| {
                let ran = kernel.make(way, plan)?;
                kernel.check(way, plan, ran.entries)?;
                Ok(ran)
            });
            // Also what a failed run has broken.
            let ran = match machine.finish().first() {
                Some(violation) => Err(violation.to_string()),
                None => ran,
            };
            *outcome.borrow_mut() = ran;
        })
        .map_err(|error| error.to_string())?;
    outcome.into_inner()
}

/// A kernel that boots: its own space, and the fixmap in it.
struct Kernel<'m, F> {
    machine: &'m Machine,
    mapper: Mapper<'m>,
    root: Pa,
    /// The entries of the fixmap's slots, and of the blocks behind the fixmap.
    slots: NonNull<Entry>,
    blocks: NonNull<Entry>,
    format: std::marker::PhantomData<F>,
}

/// The linear map itself, once it is there, as a window: nothing has to be moved.
struct Finished<'m> {
    map: MachineSlots<'m>,
    page_shift: u32,
}

// SAFETY: each frame is at its own place in the linear map, which stays, and the machine checks
// each use (1.).
unsafe impl Window for Finished<'_> {
    unsafe fn open(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        self.map.pointer((frame.get() >> self.page_shift) as usize, frame)
    }

    fn close(&self, _: Pa, _: NonNull<Entry>) {}
}

impl<'m, F: tablewright::Format<Input = Va>> Kernel<'m, F> {
    /// Makes a kernel's first tables, of the fixmap alone, and loads their root.
    fn start(machine: &'m Machine, plan: &Plan) -> Result<Self, String> {
        let mut next = 0;
        for span in &plan.spans {
            if span.start > next {
                machine.forbid(Pa::new(next), Pa::new(span.start - 1));
            }
            next = span.end;
        }
        machine.forbid(Pa::new(next), Pa::new(u64::MAX));

        let mapper = machine.new_space();
        // A root for each half, or one for both, which the engine calls the lower one.
        let half = if F::HALVES { Half::Upper } else { Half::Lower };
        let table = |level| -> Result<(Pa, NonNull<Entry>), String> {
            let frame = mapper.alloc_table(level).ok_or("out of tables")?;
            // SAFETY: the frame was just allocated.
            let table = unsafe { mapper.table(frame, level) };
            let entries = F::entries(level);
            // SAFETY: all entries of the table, which has no other user.
            unsafe { mapper.fill(table, entries, 0, 0) };
            Ok((frame, table))
        };
        let mut level = F::root_level();
        let (root, mut entries) = table(level)?;
        let mut above = entries;
        while let Some(below) = level.down() {
            above = entries;
            let (frame, next) = table(below)?;
            // SAFETY: an entry of the table; the one it links is written.
            unsafe {
                let entry = entries.add(F::index(FIXMAP, level));
                mapper.link(entry, F::table(frame, Perms::empty()));
            }
            (level, entries) = (below, next);
        }
        machine.dsb_stores();
        mapper.attach(root, half, 0);
        mapper.load();
        Ok(Self {
            machine,
            mapper,
            root,
            // SAFETY: an entry of the table above the last: the fixmap is not at its end.
            blocks: unsafe { above.add(F::index(FIXMAP, Level::new(1)) + 1) },
            // SAFETY: an entry of the last table.
            slots: unsafe { entries.add(F::index(FIXMAP, level)) },
            format: std::marker::PhantomData,
        })
    }

    /// Makes the linear map, or edits it when it is made.
    fn make(&self, way: Way, plan: &Plan) -> Result<Ran, String> {
        let map = Map::of(plan)?;
        let goal = Goal {
            root: self.root,
            base: Va::new(plan.format.linear_base()),
            memory: map.memory(),
            attrs: Attrs::KERNEL_DATA,
        };
        // SAFETY: there are so many entries of the table, zero, valid as long as the machine; this
        // is the only fixmap.
        let fixmap = unsafe { Fixmap::new(Va::new(FIXMAP), self.slots, self.mapper.slots(FIXMAP)) };
        let counted = Counted::new(self.mapper, &fixmap);
        match way {
            Way::Published(techniques) => self.timed(&counted, || {
                // SAFETY: the root is that of this space; it and all frames of the machine can be
                // shown in the fixmap, and there is no other editor.
                unsafe {
                    tablewright_linear::build::<F, _, _>(techniques, &counted, &fixmap, &goal)
                }
                .map_err(|error| error.to_string())
            }),
            Way::Tablewright if F::HALVES => self.timed(&counted, || {
                let window = self.machine.new_space();
                let switch = |root: Option<Pa>| match root {
                    Some(root) => {
                        window.attach(root, Half::Lower, COARSE_ID);
                        window.load();
                    }
                    None => window.detach(),
                };
                // SAFETY: as above; once detached, no CPU has the root loaded.
                unsafe {
                    engine::coarse::<F, _, _, _>(
                        &counted,
                        &fixmap,
                        &goal,
                        window.identity(),
                        switch,
                    )
                }
                .map_err(|error| error.to_string())
            }),
            Way::OneToOne if F::HALVES => self.timed(&counted, || {
                let window = self.machine.new_space();
                let switch = |root: Option<Pa>| match root {
                    Some(root) => {
                        window.attach(root, Half::Lower, COARSE_ID);
                        window.load();
                    }
                    None => window.detach(),
                };
                let identity = window.identity();
                // SAFETY: as above; all tables are RAM of the plan.
                unsafe {
                    alternatives::one_to_one::<F, _, _, _>(
                        &counted, &fixmap, &goal, identity, switch,
                    )
                }
                .map_err(|error| error.to_string())
            }),
            Way::OneToOne => {
                Err("one root serves both halves, so that it would hide the fixmap".to_owned())
            }
            Way::HugeSlots => self.timed(&counted, || {
                let block = F::shift(Level::new(1));
                let base = (FIXMAP >> block << block) + (1 << block);
                let memory = self.machine.memory();
                let tables = span_of(memory.first(), memory.end() - memory.first())?;
                // SAFETY: these entries of the table are zero, and have no other user.
                let slots =
                    unsafe { HugeSlots::new(Va::new(base), self.blocks, self.mapper.slots(base)) };
                // SAFETY: as above; all tables are of this memory.
                unsafe { alternatives::huge_slots::<F, _, _>(&counted, &slots, &goal, tables) }
                    .map_err(|error| error.to_string())
            }),
            Way::Blocks => self.timed(&counted, || {
                let all = Technique::ALL.into_iter().collect();
                // SAFETY: as above.
                unsafe { alternatives::blocks::<F, _, _>(all, &counted, &fixmap, &goal) }
                    .map_err(|error| error.to_string())
            }),
            Way::BlocksTablewright => self.timed(&counted, || {
                // SAFETY: as above.
                unsafe { engine::largest::<F, _, _>(&counted, &fixmap, &goal) }
                    .map_err(|error| error.to_string())
            }),
            // One root serves both halves, so that a coarse map would hide the fixmap.
            Way::Tablewright => {
                self.timed(&counted, || Self::through_slots(&counted, &fixmap, &goal))
            }
            Way::Late | Way::LateTablewright => self.late(way, &counted, &fixmap, plan, &goal),
        }
    }

    /// How long it takes, and what it asks of the platform.
    fn timed(
        &self,
        counted: &Counted<Mapper<'m>>,
        work: impl FnOnce() -> Result<(), String>,
    ) -> Result<Ran, String> {
        let (before, start) = (counted.counts(), self.machine.cpu().now());
        work()?;
        let (counts, end) = (counted.counts(), self.machine.cpu().now());
        Ok(Ran {
            time: Time::ps(end.as_ps() - start.as_ps()),
            tables: (counts.tables - before.tables) - (counts.freed - before.freed),
            entries: counts.entries - before.entries,
            windows: counts.moves - before.moves,
            invalidations: counts.invalidations - before.invalidations,
            waits: counts.completions - before.completions,
            barriers: counts.barriers - before.barriers,
        })
    }

    /// The engine's way through a window of slots.
    fn through_slots(
        platform: &Counted<Mapper<'m>>,
        fixmap: &Fixmap<MachineSlots<'m>>,
        goal: &Goal<'_>,
    ) -> Result<(), String> {
        // SAFETY: the root is that of this space, which only we edit; it and all frames of the
        // machine can be shown in the fixmap.
        unsafe { engine::through_slots::<F, _, _>(platform, fixmap, goal) }
            .map_err(|error| error.to_string())
    }

    /// Memory is added when the map is there.
    fn late(
        &self,
        way: Way,
        counted: &Counted<Mapper<'m>>,
        fixmap: &Fixmap<MachineSlots<'m>>,
        plan: &Plan,
        goal: &Goal<'_>,
    ) -> Result<Ran, String> {
        Self::through_slots(counted, fixmap, goal)?;

        let added = Self::added(plan)?;
        self.machine.allow(added.start(), added.last());
        let mut ram = goal.memory.ram.to_vec();
        ram.push(added);
        let memory = MemoryMap { ram: &ram, ..goal.memory };
        let window = Finished {
            map: self.mapper.slots(plan.format.linear_base()),
            page_shift: F::PAGE_SHIFT,
        };
        let goal = Goal { memory, ..*goal };
        self.timed(counted, || {
            let all = Technique::ALL.into_iter().collect();
            // SAFETY: the root is that of this space, whose tables are all in the linear map; there
            // is no other editor.
            let mapped = unsafe {
                match way {
                    Way::Late => {
                        tablewright_linear::add::<F, _, _>(all, counted, &window, &goal, added)
                    }
                    _ => engine::add::<F, _>(counted, &window, &goal, added),
                }
            };
            mapped.map_err(|error| error.to_string())
        })
    }

    /// The memory that is added: behind all RAM.
    fn added(plan: &Plan) -> Result<Span<Pa>, String> {
        let end = plan.spans.last().map_or(0, |span| span.end);
        let start = end.next_multiple_of(ADDED);
        if start + ADDED > plan.format.physical_end() {
            return Err("there is no room behind the RAM for memory that is added".to_owned());
        }
        span_of(start, ADDED)
    }

    /// The pages of the map translate as they should, and the CPU may do with each stretch what it
    /// should: all pages of a small map; of a large one the first and the last of each table, and
    /// no fewer entries than pages were written.
    fn check(&self, way: Way, plan: &Plan, entries: u64) -> Result<(), String> {
        const SMALL: u64 = 1 << 18;
        let (page, table) = (1 << F::PAGE_SHIFT, 1 << (F::PAGE_SHIFT + F::INDEX_BITS));
        let pages = plan.bytes() >> F::PAGE_SHIFT;
        let stride = if pages <= SMALL { page } else { table };
        let added = way.is_late().then(|| Self::added(plan)).transpose()?;
        let least = added.map_or(pages, |span| span.size() >> F::PAGE_SHIFT);
        if entries < least && !way.has_blocks() {
            return Err(format!("only {entries} entries were written"));
        }

        let at = |frame: u64| plan.format.linear_base().wrapping_add(frame);
        let mapped = |frame: u64| match self.mapper.lookup(at(frame)) {
            Some(found) if found.get() == frame => Ok(()),
            Some(found) => Err(format!("memory at {frame:#x} is mapped to {found}")),
            None => Err(format!("memory at {frame:#x} is not mapped")),
        };
        let added = added.map(|span| (span.start().get(), span.last().get() + 1, Contents::Data));
        let spans = plan.spans.iter().map(|span| (span.start, span.end, span.contents));
        for (start, end, contents) in spans.chain(added) {
            let mut first = start;
            while first < end {
                let next = (first / stride + 1) * stride;
                mapped(first)?;
                mapped(next.min(end) - page)?;
                first = next;
            }
            let may = |request| self.machine.touch(request).is_ok();
            let rights = (may(Request::write(at(start))), may(Request::execute(at(start))));
            if rights != (contents == Contents::Data, contents == Contents::Text) {
                return Err(format!("memory at {start:#x} is mapped with wrong permissions"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tablewright_machine::{Architecture, Cost, Costs};

    use super::super::iomem::{self, Extent};
    use super::super::job::format_of;
    use super::super::plan::Leaves;
    use super::*;
    use tablewright_linear::Techniques;

    fn profile(regime: Regime) -> Profile {
        let mut profile = Profile::load("neutral").unwrap();
        profile.architecture = match regime {
            Regime::X86_64 { levels } => Architecture::x86_64(levels),
            arm64 => Architecture::arm64(arm64),
        };
        profile
    }

    fn regimes() -> Vec<Regime> {
        let mut all = vec![Regime::X86_64 { levels: 4 }, Regime::X86_64 { levels: 5 }];
        for granule in [Granule::K4, Granule::K16, Granule::K64] {
            for wide in [false, true] {
                all.push(Regime::Arm64Stage1 { granule, wide });
            }
        }
        all
    }

    const M: u64 = 1 << 20;

    fn plan(profile: &Profile, ram: &[(u64, u64)]) -> Plan {
        let extent = |start, end| Extent { start, last: end - 1 };
        let map = iomem::MemoryMap {
            ram: ram.iter().map(|&(start, end)| extent(start, end)).collect(),
            text: vec![extent(16 * M, 30 * M + 0x1_0000)],
            rodata: vec![extent(30 * M + 0x1_0000, 36 * M)],
        };
        Plan::new(&map, format_of(profile).unwrap(), Leaves::Pages).unwrap()
    }

    /// RAM with a kernel in it, and holes that begin and end inside of tables.
    const RAM: [(u64, u64); 3] = [(0, 640 << 10), (M, 70 * M), (96 * M + 0x3_0000, 200 * M)];

    #[test]
    fn every_step_maps_every_page_in_every_format_and_breaks_no_rule() {
        let mut boots = Boots::default();
        for regime in regimes() {
            let profile = profile(regime);
            let plan = plan(&profile, &RAM);
            for step in Step::all() {
                let ran = boots.run(&profile, step, &plan).unwrap();
                if step.way.is_late() {
                    let touched = (ran.windows, ran.invalidations, ran.waits);
                    assert_eq!(touched, (0, 0, 0), "{regime:?} {}", step.name);
                    assert!(ran.entries >= ADDED >> regime.page_shift());
                } else {
                    // The coarse map has entries as well, and the engine links some tables by plain
                    // stores.
                    let more = ran.entries - (plan.bytes() >> regime.page_shift());
                    assert!(if step == Step::TABLEWRIGHT { more > 0 } else { more == 0 });
                    // The root was there, and tables above the last level may be shared with the
                    // fixmap.
                    let most = plan.tables_bound() - 1;
                    let shared = most.checked_sub(ran.tables);
                    assert!(shared.is_some_and(|shared| shared <= 3), "{shared:?}");
                }
            }
        }
    }

    /// Each is checked by the rules of the machine, and page by page; all move next to nothing.
    #[test]
    fn the_alternatives_make_the_same_map() {
        let profile = Profile::load("ampere-altra-vm-64g").unwrap();
        // A kernel in it, and a hole that begins inside of a block.
        let plan = plan(&profile, &[(0, 90 * M + 0x3_0000), (96 * M, 256 * M)]);
        let pages = plan.bytes() >> 12;
        for step in Step::ALTERNATIVES {
            let ran = Boots::default().run(&profile, step, &plan).unwrap();
            assert!(ran.invalidations < 40, "{}: {ran:?}", step.name);
            match step.way.has_blocks() {
                true => assert!(ran.entries < 2000, "{}: {ran:?}", step.name),
                false => assert!(ran.entries >= pages, "{}: {ran:?}", step.name),
            }
        }
        let x86 = self::profile(Regime::X86_64 { levels: 4 });
        let plan = self::plan(&x86, &RAM);
        let one = Boots::default().run(&x86, Step::ALTERNATIVES[0], &plan);
        assert!(one.unwrap_err().to_string().contains("one root serves both halves"));
    }

    /// A set of techniques has one price, and more of them never a higher one.
    #[test]
    fn each_technique_helps_whatever_came_before() {
        let profile = Profile::load("ampere-altra-vm-64g").unwrap();
        let plan = plan(&profile, &[(0, 256 * M)]);
        let mut boots = Boots::default();
        let mut time = |on: Techniques| {
            let step = Step { name: "some", way: Way::Published(on) };
            boots.run(&profile, step, &plan).unwrap().time
        };
        let sets: Vec<Techniques> = (0..16_usize)
            .map(|set| {
                let taken = |technique: &Technique| set >> *technique as usize & 1 != 0;
                Technique::ALL.into_iter().filter(taken).collect()
            })
            .collect();
        let times: Vec<_> = sets.iter().map(|on| time(*on)).collect();
        for (on, slow) in sets.iter().zip(&times) {
            for technique in Technique::ALL {
                let more = sets.iter().position(|other| *other == on.with(technique));
                assert!(times[more.unwrap()] <= *slow, "{:?} {technique:?}", on.names());
            }
        }
        let ours = boots.run(&profile, Step::TABLEWRIGHT, &plan).unwrap();
        assert!(times.iter().all(|theirs| ours.time < *theirs));
        // The slots, and the coarse map when it is done.
        assert_eq!((ours.invalidations, ours.waits), (2, 2));
    }

    fn small(profile: &Profile) -> Plan {
        plan(profile, &[(0, 128 * M)])
    }

    /// Requires linear times, which a fit relies on.
    #[test]
    fn time_is_the_sum_of_what_each_cost_counts() {
        let mut profile = Profile::load("neutral").unwrap();
        let plan = plan(&profile, &[(0, 16 * M)]);
        let mut boots = Boots::default();
        for step in Step::all() {
            // Unless a CPU queues: the bus works while the CPU waits for completion.
            profile.costs.bus = Time::ZERO;
            let all = profile.costs.clone();
            let mut time = |costs: Costs| {
                profile.costs = costs;
                boots.run(&profile, step, &plan).unwrap().time.as_ps()
            };
            let whole = time(all.clone());
            let parts: u64 = Cost::all()
                .map(|cost| {
                    let mut one = Costs::default();
                    cost.set(&mut one, cost.get(&all));
                    time(one)
                })
                .sum();
            assert_eq!(whole, parts, "{}", step.name);
            profile.costs = all;
        }
    }

    #[test]
    fn a_run_is_the_same_again_on_memory_that_was_used() {
        let profile = Profile::load("neutral").unwrap();
        let plan = small(&profile);
        let mut boots = Boots::default();
        for step in Step::all() {
            let first = boots.run(&profile, step, &plan).unwrap();
            assert_eq!(boots.run(&profile, step, &plan).unwrap(), first);
            assert_eq!(Boots::default().run(&profile, step, &plan).unwrap(), first);
        }
    }

    /// A kernel that maps what is not RAM is found out, although it uses it nowhere.
    #[test]
    fn memory_that_must_not_be_mapped_breaks_a_rule() {
        let profile = Profile::load("neutral").unwrap();
        let (less, more) = (plan(&profile, &[(0, 64 * M)]), small(&profile));
        for step in Step::all().into_iter().filter(|step| !step.way.is_late()) {
            let (frames, first) = table_memory(&less, profile.architecture.regime).unwrap();
            let memory = Memory::new(frames * 2, 12, first);
            let machine = Machine::new(Setup::new(profile.architecture.clone(), memory));
            machine
                .run(|_| {
                    let kernel = Kernel::<Arm64K4>::start(&machine, &less).unwrap();
                    let _ = kernel.make(step.way, &more);
                    let broken = machine.finish();
                    let says = broken.first().map(ToString::to_string).unwrap_or_default();
                    assert!(says.contains("forbidden memory"), "{}: {says}", step.name);
                })
                .unwrap();
        }
    }

    #[test]
    fn what_is_not_as_planned_is_found() {
        let profile = Profile::load("neutral").unwrap();
        let plan = small(&profile);
        let check = |change: &dyn Fn(&mut Plan), entries: u64| {
            let mut other = plan.clone();
            change(&mut other);
            let (frames, first) = table_memory(&plan, profile.architecture.regime).unwrap();
            let memory = Memory::new(frames, 12, first);
            let machine = Machine::new(Setup::new(profile.architecture.clone(), memory));
            let verdict = RefCell::new(Ok(()));
            machine
                .run(|_| {
                    let kernel = Kernel::<Arm64K4>::start(&machine, &plan).unwrap();
                    kernel.make(Way::Tablewright, &plan).unwrap();
                    *verdict.borrow_mut() = kernel.check(Way::Tablewright, &other, entries);
                })
                .unwrap();
            verdict.into_inner()
        };
        let pages = plan.bytes() >> 12;
        assert_eq!(check(&|_| (), pages), Ok(()));
        let says = |change: &dyn Fn(&mut Plan), entries, says: &str| {
            let message = check(change, entries).unwrap_err();
            assert!(message.contains(says), "{message}");
        };
        says(&|_| (), pages - 1, "entries were written");
        says(&|plan| plan.spans[1].contents = Contents::Data, pages, "wrong permissions");
        says(&|plan| plan.spans[2].contents = Contents::Text, pages, "wrong permissions");
        let last = plan.spans.len() - 1;
        says(&|plan| plan.spans[last].end += 4096, pages + 1, "is not mapped");
    }

    #[test]
    fn ram_without_room_for_tables_is_refused() {
        let profile = Profile::load("neutral").unwrap();
        let plan = plan(&profile, &[(0, 64 << 10)]);
        let error = Boots::default().run(&profile, Step::base(), &plan).unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with("no range of RAM"), "{message}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn any_memory_map_can_be_booted(
            edges in prop::collection::btree_set(0u64..40_000, 2..10),
            step in 0..8_usize,
        ) {
            let edges: Vec<u64> = edges.iter().map(|page| page << 12).collect();
            let mut ram: Vec<_> = edges.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
            // Room for the tables.
            ram.push((200 * M, 220 * M));
            let profile = Profile::load("neutral").unwrap();
            let plan = plan(&profile, &ram);
            let ran = Boots::default().run(&profile, Step::all()[step], &plan);
            prop_assert!(ran.is_ok(), "{ran:?}");
        }
    }
}
