//! A step is taken.

use super::super::program::*;
use super::Explorer;
use super::order::{Before, is_barrier, is_permission};
use super::state::*;
use crate::hardware::{Hardware, Image, KnownFirst, Look, Request, Translated};
use crate::tlb::{Stages, Tlbi};

impl Explorer<'_> {
    /// The state after a step; `None` if it cannot be taken after all.
    pub(super) fn take(&self, state: &State, step: Step) -> Option<State> {
        let hardware = &self.hardware;
        for (&pa, &word) in self.layout.words.iter().zip(&state.words) {
            hardware.memory.write(pa, word);
        }
        for (cpu, core) in state.cores.iter().enumerate() {
            hardware.load_image(cpu, core);
        }
        if let Some(cpu) = step.walker() {
            hardware.leaves.set(self.test.code[cpu].leaves);
        }
        let mut next = state.clone();
        for phase in next.phases.iter_mut().flatten() {
            if let Phase::Walking(walking, _) = phase {
                *walking = hardware.revive(*walking);
            }
        }
        // What a core looks like from here on, unless the hardware says.
        let mut kept = None;
        match step {
            Step::Drain(cpu, at) => {
                hardware.drain_one(cpu, at);
                let number = next.stores[cpu].remove(at);
                self.drained(&mut next, cpu, number);
            }
            Step::Effect(cpu, number) => {
                hardware.take_effect_of(cpu, number);
                let is_translated =
                    |phase: &Phase| !matches!(phase, Phase::Idle | Phase::Walking(..));
                let bits = |phases: &Vec<Phase>| {
                    let set = |(at, phase)| u32::from(is_translated(phase)) << at;
                    phases.iter().enumerate().map(set).sum()
                };
                let translated = state.phases.iter().map(bits).collect();
                next.early.push(Early { cpu, number, translated });
            }
            Step::Fill(cpu, address, route) => {
                let mut request = Request::read(self.va(address)?);
                // On arm64 it is for the handler as well, and what is remembered is the same.
                request.user = self.test.x86 && self.test.code[cpu].user;
                hardware.remember_alone(route.alone);
                if route.start == Start::First {
                    let entry = self.first_at(request.va)?;
                    let first = hardware.read_first(cpu, request.va, entry).ok()?;
                    hardware.remember_first(cpu, first);
                } else {
                    let first = self.first_of(state, cpu, request, route);
                    let look = self.start(cpu, request, route, first)?;
                    let found = hardware.stride(cpu, look, |at| self.changes(at));
                    // Without what stage 1 says, it is of stage 2 alone.
                    let joined = first.is_some() || !self.test.is_nested();
                    if let (Look::Found(found), true) = (found, joined) {
                        hardware.join(cpu, found, first);
                    }
                }
            }
            Step::Interrupt(thread, at, cpu) => self.interrupt(&mut next, thread, at, cpu),
            Step::Do(thread, at, way) => kept = self.act(state, &mut next, thread, at, way)?,
            Step::DoLate(thread, at, Way::Perform) => self.change_later(&mut next, thread, at)?,
            Step::DoLate(thread, at, way) => {
                kept = self.act(state, &mut next, thread, at, way)?;
                self.postpone(state, &mut next, thread, at)?;
            }
            Step::Flag(number) => {
                let Late { cpu, at, pa, set, clear, stored } = next.late.remove(number);
                hardware.memory.write(pa, (hardware.memory.read(pa) | set) & !clear);
                if stored && let Some(word) = self.word(pa) {
                    next.writers[word] = store_number(cpu, at);
                    next.words[word] = hardware.memory.read(pa);
                }
            }
        }
        self.read_back(state, &mut next, kept);
        // Nobody else writes a word between the read and the write of one who does both.
        next.late.iter().all(|late| !self.is_written(state, &next, late.pa)).then_some(next)
    }

    /// Whether a step has written a word, be it with the value that was there.
    fn is_written(&self, state: &State, next: &State, pa: u64) -> bool {
        let changed = self.word(pa).is_some_and(|word| state.words[word] != next.words[word]);
        let left = |cpu: usize| {
            let gone = state.stores[cpu].iter().filter(move |n| !next.stores[cpu].contains(n));
            gone.map(move |&number| usize::from(number - 1) % PLACES)
        };
        changed
            || (0..state.stores.len()).any(|cpu| {
                left(cpu).any(|at| self.place_of(cpu, at, &state.phases[cpu][at]) == Some(pa))
            })
    }

    /// Takes back the flags that a walk has written, for it to write them later. `None`: there are
    /// none.
    ///
    /// A walk that ends in a fault need not write them at all (DDI 0487 D8.5.1).
    fn postpone(&self, state: &State, next: &mut State, cpu: usize, at: usize) -> Option<()> {
        let mut some = false;
        let faults = matches!(next.phases[cpu][at], Phase::Faulty(..));
        for (&pa, &was) in self.layout.words.iter().zip(&state.words) {
            let is = self.hardware.memory.read(pa);
            if is != was {
                if next.late.iter().any(|late| late.pa == pa) {
                    return None;
                }
                self.hardware.memory.write(pa, was);
                let (set, clear) = (is & !was, was & !is);
                some = true;
                if !faults {
                    next.late.push(Late { cpu, at, pa, set, clear, stored: false });
                }
            }
        }
        next.late.sort_unstable();
        some.then_some(())
    }

    /// Takes the state of the hardware into `next`.
    pub(super) fn read_back(&self, state: &State, next: &mut State, kept: Option<(usize, Image)>) {
        let hardware = &self.hardware;
        for cpu in 0..next.cores.len() {
            next.cores[cpu] = hardware.save(cpu);
            // All that was in the buffer is in memory.
            if next.cores[cpu].buffered().next().is_none() {
                for number in std::mem::take(&mut next.stores[cpu]) {
                    self.drained(next, cpu, number);
                }
            }
            for phase in &mut next.phases[cpu] {
                if let Phase::Walking(walking, first) = phase {
                    let va = first.map_or(walking.va(), |first| first.va);
                    *phase = if hardware.is_lost(cpu, walking, va) {
                        Phase::Idle
                    } else {
                        Phase::Walking(Hardware::normalised(*walking), *first)
                    };
                }
            }
        }
        if let Some((cpu, before)) = kept {
            next.cores[cpu].keep(&before);
            if self.layout.runs {
                next.cores[cpu].hold(&before);
            }
        }
        let words = next.words.iter_mut().zip(&mut next.writers);
        for ((&pa, (word, writer)), &old) in self.layout.words.iter().zip(words).zip(&state.writers)
        {
            let now = hardware.memory.read(pa);
            if now != *word && *writer == old {
                *writer |= BY_WALKER;
            }
            *word = now;
        }
        self.normalise(next);
    }

    /// Leaves out of a state what does not matter any more.
    pub(super) fn normalise(&self, state: &mut State) {
        let State { early, cores, .. } = state;
        early.retain(|early| early.number < cores[early.cpu].pending().len());
        for cpu in 0..state.cores.len() {
            let mut core = std::mem::take(&mut state.cores[cpu]);
            let root = core.root();
            core.forget(
                &self.hardware,
                |first, last| self.wants(state, cpu, first, last),
                |first, last| self.wants_of_second(state, cpu, first, last),
                |known| {
                    self.layout.deep
                        && (self.layout.shared_ids
                            || !self.is_derivable(
                                root,
                                known.first,
                                known.depth,
                                known.table,
                                known.id,
                            ))
                },
            );
            state.cores[cpu] = core;
            self.skip(state, cpu);
            // Which write a load has read matters to accesses before it that are still to be
            // performed.
            for (phase, instruction) in state.phases[cpu].iter_mut().zip(&self.test.code[cpu].code)
            {
                match phase {
                    Phase::Done(Got::Value(_, source)) => *source = Source::default(),
                    Phase::Done(_) | Phase::Buffered(_) => {}
                    _ if instruction.op.place().is_none() => {}
                    _ => break,
                }
            }
        }
    }

    /// Ends instructions that are not on the way that the thread has taken.
    fn skip(&self, state: &mut State, thread: usize) {
        for (at, instruction) in self.test.code[thread].code.iter().enumerate() {
            let Some(when) = &instruction.when else { continue };
            if self.computed(state, thread, when, false) == Some(0) {
                state.phases[thread][at] = Phase::Done(Got::Nothing);
            }
        }
    }

    /// Whether the way to a table is through descriptors that are not written, so that remembering
    /// it adds nothing.
    pub(super) fn is_derivable(
        &self,
        root: Option<(u64, u16)>,
        first: u64,
        depth: u8,
        table: u64,
        id: u16,
    ) -> bool {
        let Some((root, root_id)) = root else {
            return false;
        };
        if root_id != id {
            return false;
        }
        let mut at = root;
        for level in (depth + 1..=3).rev() {
            let entry = at + (first >> (12 + 9 * u32::from(level)) & 0x1ff) * 8;
            let descriptor = self.hardware.memory.read(entry);
            if self.layout.written.binary_search(&entry).is_ok() || descriptor & 1 == 0 {
                return false;
            }
            at = descriptor & 0x0000_ffff_ffff_f000;
        }
        at == table
    }

    /// Whether a walk has to stop before a descriptor, because it matters when it is read.
    pub(super) fn changes(&self, at: u64) -> bool {
        self.layout.deep && self.layout.changing.binary_search(&at).is_ok()
    }

    pub(super) fn word(&self, pa: u64) -> Option<usize> {
        self.layout.words.binary_search(&pa).ok()
    }

    /// A store has come to memory.
    pub(super) fn drained(&self, next: &mut State, cpu: usize, number: u8) {
        let at = usize::from(number - 1) % PLACES;
        if let Some(pa) = self.place_of(cpu, at, &next.phases[cpu][at])
            && let Some(word) = self.word(pa)
        {
            next.writers[word] = number;
        }
        next.phases[cpu][at] = Phase::Done(Got::Nothing);
    }

    /// Restarts the instructions after this one, as if they had not begun.
    pub(super) fn flush(&self, next: &mut State, cpu: usize, from: usize) {
        for phase in &mut next.phases[cpu][from..] {
            *phase = Phase::Idle;
        }
    }

    pub(super) fn interrupt(&self, next: &mut State, thread: usize, at: usize, cpu: usize) {
        if let Some(first) = self.first_open(next, cpu) {
            self.flush(next, cpu, first);
        }
        if let Op::Shootdown(scope) = self.test.code[thread].code[at].op {
            let tlbi = self.layout.tlbi(self.test, scope, false);
            self.hardware.drain(cpu);
            self.hardware.invalidate(cpu, tlbi);
            self.hardware.complete_here(cpu);
            self.hardware.synchronise(cpu);
        }
        let Phase::Shooting(answered) = &mut next.phases[thread][at] else {
            return;
        };
        *answered |= 1 << cpu;
        let all = (1u8 << self.test.threads()) - 1;
        if *answered | 1 << thread == all {
            next.phases[thread][at] = Phase::Done(Got::Nothing);
        }
    }

    /// An instruction goes on. Gives what a TLB held before, if that stays whatever the walk has
    /// found.
    pub(super) fn act(
        &self,
        state: &State,
        next: &mut State,
        thread: usize,
        at: usize,
        way: Way,
    ) -> Option<Option<(usize, Image)>> {
        let hardware = &self.hardware;
        let op = &self.test.code[thread].code[at].op;
        match way {
            Way::Look | Way::Run | Way::Walk(_) | Way::Through(..) | Way::WalkOn => {
                return self.translate(state, next, thread, at, way);
            }
            Way::CommitFault => {
                if let Phase::Faulty(_, certain) = &mut next.phases[thread][at] {
                    *certain = true;
                }
            }
            Way::TakeFault => {
                if let Phase::Faulty(fault, _) = next.phases[thread][at] {
                    // Entry and return are context synchronisation events.
                    hardware.synchronise(thread);
                    self.flush(next, thread, at + 1);
                    next.phases[thread][at] = Phase::Done(Got::Fault(fault));
                }
            }
            Way::Perform => match op {
                Op::Load { .. } => self.read(next, thread, at)?,
                Op::Store { value, .. } => self.write(next, thread, at, value)?,
                Op::Atomic { .. } => self.change(next, thread, at)?,
                _ => {
                    next.phases[thread][at] = Phase::Done(Got::Nothing);
                    self.execute(next, thread, at, op)?;
                }
            },
        }
        Some(None)
    }

    /// An instruction that is not an access.
    pub(super) fn execute(
        &self,
        next: &mut State,
        thread: usize,
        at: usize,
        op: &Op,
    ) -> Option<()> {
        let hardware = &self.hardware;
        match *op {
            Op::Fence(_) => hardware.order_stores(thread),
            Op::Barrier { kind: Kind::Loads, .. } => {}
            Op::Barrier { kind: Kind::Stores, .. } => hardware.publish(thread),
            Op::Barrier { shared, .. } => {
                hardware.publish(thread);
                if shared {
                    self.wait_for_others(next, thread)?;
                    hardware.complete(thread);
                } else {
                    hardware.complete_here(thread);
                }
                next.early.retain(|early| early.cpu != thread);
            }
            Op::Synchronise | Op::Exception { .. } => hardware.synchronise(thread),
            Op::Invalidate { scope, broadcast } => {
                hardware.invalidate(thread, self.layout.tlbi(self.test, scope, broadcast));
            }
            Op::InvalidateNow(scope) => {
                hardware.invalidate(thread, self.layout.tlbi(self.test, scope, false));
                hardware.complete_here(thread);
                hardware.synchronise(thread);
            }
            Op::Switch(space) => {
                if self.test.x86 {
                    let flush = self.layout.tlbi(self.test, Scope::Space(space), false);
                    hardware.load_root(thread, self.layout.spaces[space]);
                    hardware.invalidate(thread, flush);
                    hardware.complete_here(thread);
                } else {
                    hardware.write_root(thread, self.layout.spaces[space]);
                }
            }
            Op::Shootdown(_) if self.test.threads() > 1 => {
                next.phases[thread][at] = Phase::Shooting(0)
            }
            _ => {}
        }
        Some(())
    }

    /// Accesses of others through what was invalidated are done, or are translated anew. `None`:
    /// they have to be done first.
    ///
    /// A load that was performed before an earlier one of the same address has been translated goes
    /// with that one: of one address no CPU reads something new and then something old (the
    /// catalogue's `coRR-pte9`).
    pub(super) fn wait_for_others(&self, next: &mut State, thread: usize) -> Option<()> {
        let all: Vec<Tlbi> = next.cores[thread].pending().iter().map(|&(tlbi, _)| tlbi).collect();
        for cpu in (0..next.cores.len()).filter(|&cpu| cpu != thread) {
            let id = next.cores[cpu].id();
            let code = &self.test.code[cpu].code;
            let committed_from = |phases: &[Phase], from: usize| {
                (from..phases.len()).any(|at| self.is_committed(cpu, at, &phases[at]))
            };
            // Places whose accesses are not translated.
            let mut open = Vec::new();
            for at in 0..code.len() {
                let late = is_late(next, cpu, at);
                let place = code[at].op.place();
                // An access is not waited for if it was translated after the invalidation took
                // effect, or if its entry never changes.
                let is_before = |number: usize| {
                    let early = next.early.iter().find(|e| e.cpu == thread && e.number == number);
                    early.is_none_or(|early| early.translated[cpu] >> at & 1 != 0)
                };
                let pending = all.iter().enumerate().filter(|(number, _)| is_before(*number));
                let mut pending: Vec<&Tlbi> = pending.map(|(_, tlbi)| tlbi).collect();
                if matches!(place, Some(&Place::Virtual(address)) if self.is_constant(address)) {
                    pending.clear();
                }
                let phases = &mut next.phases[cpu];
                let covers = |translated: &Translated| {
                    pending.iter().any(|tlbi| tlbi.broadcast && translated.is_covered(tlbi))
                };
                match &phases[at] {
                    Phase::Buffered(Some(translated)) if covers(translated) => return None,
                    Phase::Translated(translated, _) if covers(translated) => {
                        if committed_from(phases, at) {
                            return None;
                        }
                        phases[at] = Phase::Idle;
                    }
                    Phase::Done(Got::Value(..) | Got::Nothing)
                        if late && pending.iter().any(|tlbi| self.is_about(cpu, at, id, tlbi)) =>
                    {
                        return None;
                    }
                    // It comes after stores that are not visible yet.
                    Phase::Done(Got::Fault(_))
                        if pending.iter().any(|tlbi| self.is_about(cpu, at, id, tlbi)) =>
                    {
                        let before = Before::of(self, next, cpu, at);
                        if !self.may_be_certain(&before) {
                            return None;
                        }
                    }
                    Phase::Faulty(_, false)
                        if pending.iter().any(|tlbi| self.is_about(cpu, at, id, tlbi)) =>
                    {
                        phases[at] = Phase::Idle;
                    }
                    Phase::Done(Got::Value(_, Source { by: Some(translated), .. }))
                        if covers(translated) && open.contains(&place) =>
                    {
                        // What depends on it goes too.
                        if committed_from(phases, at) {
                            return None;
                        }
                        self.flush(next, cpu, at);
                    }
                    _ => {}
                }
                if matches!(next.phases[cpu][at], Phase::Idle | Phase::Walking(..))
                    && place.is_some()
                {
                    open.push(place);
                }
            }
        }
        Some(())
    }

    /// Whether no step changes the way to a page.
    fn is_constant(&self, address: usize) -> bool {
        let is_entry = |map: &&Map| map.address == address;
        !self.layout.deep
            && !self.layout.runs
            && !self.test.guest
            && self.test.maps.iter().filter(is_entry).all(|map| {
                let entry = Location::Entry { space: map.space, address, depth: 0 };
                let entry = self.layout.locate(self.test, &entry);
                self.layout.changing.binary_search(&entry).is_err()
            })
    }

    /// Whether an invalidation names the address of an access.
    pub(super) fn is_about(&self, cpu: usize, at: usize, id: Option<u16>, tlbi: &Tlbi) -> bool {
        let Some(&Place::Virtual(address)) = self.test.code[cpu].code[at].op.place() else {
            return false;
        };
        let va = self.test.addresses[address].va;
        tlbi.broadcast
            && tlbi.stages != Stages::Second
            && tlbi.id.is_none_or(|named| Some(named) == id)
            && tlbi.range.is_none_or(|(first, last)| first <= va && va <= last)
    }

    pub(super) fn translate(
        &self,
        state: &State,
        next: &mut State,
        thread: usize,
        at: usize,
        way: Way,
    ) -> Option<Option<(usize, Image)>> {
        let hardware = &self.hardware;
        let code = &self.test.code[thread].code;
        let op = &code[at].op;
        let Some(&Place::Virtual(address)) = op.place() else {
            return None;
        };
        let request = self.request(&self.test.code[thread].code[at], address);
        let mut first = None;
        let look = match way {
            Way::WalkOn => match next.phases[thread][at] {
                Phase::Walking(walking, known) => {
                    first = known;
                    Look::Walking(walking)
                }
                _ => return None,
            },
            Way::Walk(route) if route.start == Start::First => {
                // What it finds is remembered by a step of its own; what it does not find is a
                // fault.
                let entry = self.first_at(request.va)?;
                Look::Fault(hardware.read_first(thread, request.va, entry).err()?)
            }
            Way::Walk(route) => {
                first = self.first_of(state, thread, request, route);
                self.start(thread, request, route, first)?
            }
            Way::Through(other, route) => {
                let va = self.va(other)?;
                self.start(thread, Request { va, ..request }, route, None)?
            }
            Way::Run => hardware.look_run(thread, request, RUN_BITS)?,
            _ if self.test.is_nested() => hardware.look_combined(thread, request)?,
            _ if self.test.guest => hardware
                .look_combined(thread, request)
                .or_else(|| hardware.look_second(thread, request, None))
                .or_else(|| hardware.start_at(thread, request, None))?,
            _ => hardware.look(thread, request),
        };
        // Of its own walk an access uses one member; what a walk leaves behind is that of a fill.
        let through = matches!(way, Way::Through(..))
            || matches!(look, Look::Walking(on) if first.is_none() && on.va() != request.va);
        hardware.remember_alone(!through);
        let held = hardware.save(thread);
        let before = Before::of(self, state, thread, at);
        for early in &mut next.early {
            early.translated[thread] &= !(1 << at);
        }
        next.phases[thread][at] = match hardware.stride(thread, look, |at| self.changes(at)) {
            Look::Walking(walking) => Phase::Walking(walking, first),
            // It is found by the walk for its own address.
            Look::Fault(_) if through => return None,
            Look::Fault(fault) => {
                let fault = match first {
                    Some(first) => hardware.fault_behind(request, &first, fault),
                    None => fault,
                };
                // What comes after has not begun, or it would be thrown away; barriers that do not
                // wait for this are.
                let has_begun = |after: usize| {
                    state.phases[thread][after] != Phase::Idle
                        && !is_barrier(&code[after].op)
                        && self.is_on_path(state, thread, after) != Some(false)
                };
                if (at + 1..code.len()).any(has_begun) {
                    return None;
                }
                self.flush(next, thread, at + 1);
                let early =
                    hardware.fault_is_early(thread) || !before.all_done || !before.all_drained;
                let stale = is_permission(&fault) && !self.test.x86;
                if self.profile != Profile::Base && early && !stale {
                    return None;
                }
                Phase::Faulty(fault, false)
            }
            Look::Found(translated) => {
                let translated = match through {
                    true => hardware.through_run(translated, request.va)?,
                    false => translated,
                };
                hardware.remember_alone(true);
                let translated = hardware.join(thread, translated, first);
                let dirtied = op.writes() && self.is_dirtied(state);
                let published = self.profile != Profile::Ets2 || before.loads_published;
                if dirtied && !(before.is_certain() && published) {
                    return None;
                }
                Phase::Translated(translated.normalised(), dirtied)
            }
        };
        Some(Some((thread, held)))
    }

    /// Returns the translation of stage 1 for an access, on this way.
    fn first_of(
        &self,
        state: &State,
        cpu: usize,
        request: Request,
        route: Route,
    ) -> Option<KnownFirst> {
        state.cores[cpu].firsts(request.va).nth(route.first?.into()).copied()
    }

    /// Starts a walk at the root or a table that is known; of a guest, also where it is known what
    /// stage 2 says.
    fn start(
        &self,
        cpu: usize,
        request: Request,
        route: Route,
        first: Option<KnownFirst>,
    ) -> Option<Look> {
        let request = match first {
            None => request,
            Some(first) => match self.hardware.second_of(request, &first) {
                Ok(second) => second,
                Err(fault) => return Some(Look::Fault(fault)),
            },
        };
        match route.start {
            Start::Root => self.hardware.start_at(cpu, request, None),
            Start::Table(depth) => self.hardware.start_at(cpu, request, Some(depth)),
            Start::Second => self.hardware.look_second(cpu, request, None),
            Start::SecondRun => self.hardware.look_second(cpu, request, Some(RUN_BITS)),
            Start::First => None,
            Start::AsBefore => self.hardware.look_before(cpu, request),
        }
    }

    /// Whether a walk has set the dirty state of a leaf since `state`.
    pub(super) fn is_dirtied(&self, state: &State) -> bool {
        let dirty = |word| Flag::Dirty.is_in(self.test, word);
        let words = self.layout.words.iter().zip(&state.words);
        words.into_iter().any(|(&pa, &was)| {
            let is = self.hardware.memory.read(pa);
            is != was && dirty(is) && !dirty(was)
        })
    }
}
