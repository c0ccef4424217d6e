//! Steps that may happen next.

use super::super::program::*;
use super::Explorer;
use super::order::{Before, Next, is_barrier, is_derived};
use super::state::*;
use crate::hardware::{Image, Request};

/// Whether flags of accesses before this one are still to be written.
fn has_late(state: &State, thread: usize, at: usize) -> bool {
    state.late.iter().any(|late| late.cpu == thread && late.at < at)
}

impl Explorer<'_> {
    pub(super) fn steps(&self, state: &State) -> Vec<Step> {
        let mut steps = Vec::new();
        for thread in 0..self.test.threads() {
            if self.instructions(state, thread, &mut steps) {
                // The last is one that no other CPU sees.
                return steps.split_off(steps.len() - 1);
            }
        }
        for (cpu, core) in state.cores.iter().enumerate() {
            self.hardware.load_image(cpu, core);
            for at in self.hardware.drainable(cpu) {
                steps.push(Step::Drain(cpu, at));
            }
            for (number, (_, done)) in core.pending().iter().enumerate() {
                if !done {
                    steps.push(Step::Effect(cpu, number));
                }
            }
        }
        for thread in 0..self.test.threads() {
            self.fills(state, thread, &mut steps);
        }
        let is_free =
            |late: &Late| !late.stored || Before::of(self, state, late.cpu, late.at).fenced_drained;
        steps.extend((0..state.late.len()).filter(|&n| is_free(&state.late[n])).map(Step::Flag));
        self.add_late(state, &mut steps);
        steps
    }

    /// Lets walks that may find a flag clear set it later.
    fn add_late(&self, state: &State, steps: &mut Vec<Step>) {
        let is_in = |flag: Flag, word| flag.is_in(self.test, word);
        let clean = |word| self.test.hardware_dirty && !is_in(Flag::Dirty, word);
        let unflagged =
            |&word: &u64| is_in(Flag::Valid, word) && (!is_in(Flag::Accessed, word) || clean(word));
        if self.test.x86 || !self.test.hardware_access || !state.words.iter().any(unflagged) {
            return;
        }
        let translates =
            |way: &Way| !matches!(way, Way::Perform | Way::CommitFault | Way::TakeFault);
        for number in 0..steps.len() {
            if let Step::Do(thread, at, way) = steps[number]
                && translates(&way)
            {
                steps.push(Step::DoLate(thread, at, way));
            }
        }
    }

    /// Whether an atomic access may also write later than it reads: something comes behind it, and
    /// it is not ordered before that by acquiring and releasing.
    fn may_write_later(&self, thread: usize, at: usize) -> bool {
        let code = &self.test.code[thread].code;
        code[at + 1..].iter().any(|i| i.op.place().is_some())
            && code[at].op.acquires_releases() != (true, true)
    }

    pub(super) fn fills(&self, state: &State, cpu: usize, steps: &mut Vec<Step>) {
        // The flags that walks set are seen by every CPU, whatever is remembered.
        let sets_flags = self.hardware.architecture.hardware_access
            && self.test.code.iter().position(|thread| !thread.leaves.0) == Some(cpu);
        let named = self.test.addresses.len();
        for address in 0..named + self.layout.unnamed.len() {
            let Some(va) = self.va(address) else {
                continue;
            };
            let (first, last) = self.around(va);
            let flags = sets_flags && self.has_old(state);
            let alone = self.layout.runs || self.is_unled(address);
            let of_second = alone && self.wants_of_second(state, cpu, first, last);
            if !flags && !of_second && !self.wants(state, cpu, first, last) {
                continue;
            }
            let is_named = address < named;
            let mut fill = |whole: Route| {
                steps.push(Step::Fill(cpu, address, whole));
                if self.layout.runs && is_named {
                    let alone = true;
                    steps.push(Step::Fill(cpu, address, Route { alone, ..whole }));
                }
            };
            self.routes(state, cpu, va, true).into_iter().for_each(&mut fill);
            if self.test.is_nested() && alone && self.is_of_second(address) {
                // Of a run of stage 2 any entry may be read, whichever stage 1 leads to; and what
                // it does not lead to yet.
                let mut alone = Vec::new();
                self.routes_from(&mut alone, &state.cores[cpu], va, true, None);
                let walks = |route: &Route| matches!(route.start, Start::Root | Start::Table(_));
                alone.into_iter().filter(walks).for_each(&mut fill);
            }
        }
    }

    /// Whether stage 2 of a test with two stages translates the address with this number.
    fn is_of_second(&self, address: usize) -> bool {
        let mapped = |map: &Map| map.address == address;
        address >= self.test.addresses.len() || self.test.maps.iter().any(mapped)
    }

    /// Whether stage 2 translates the address with this number, and no stage 1 leads to it at
    /// first.
    fn is_unled(&self, address: usize) -> bool {
        let leads = |(_, value): &(usize, Value)| {
            matches!(value,
            Value::Intermediate { address: to, .. } if *to == address)
        };
        self.test.is_nested() && self.is_of_second(address) && !self.test.stage1.iter().any(leads)
    }

    /// The other addresses of a contiguous run.
    fn beside(&self, va: u64) -> impl Iterator<Item = usize> {
        let (first, last) = self.around(va);
        let all = self.test.addresses.len() + self.layout.unnamed.len();
        (0..all).filter(move |&other| {
            let other = self.va(other);
            other != Some(va) && other.is_some_and(|other| first <= other && other <= last)
        })
    }

    /// The ways that a walk may take, without the root where `root` is false.
    fn routes(&self, state: &State, cpu: usize, va: u64, root: bool) -> Vec<Route> {
        let core = &state.cores[cpu];
        let mut routes = Vec::new();
        if !self.test.is_nested() {
            self.routes_from(&mut routes, core, va, root, None);
            if core.is_switching() {
                routes.push(Start::AsBefore.into());
            }
            return routes;
        }
        for (number, first) in (0..).zip(core.firsts(va)) {
            self.routes_from(&mut routes, core, first.ipa, true, Some(number));
        }
        if self.first_at(va).is_some() {
            routes.push(Start::First.into());
        }
        routes
    }

    /// Finds the ways from an address of the tables of the test.
    fn routes_from(
        &self,
        routes: &mut Vec<Route>,
        core: &Image,
        va: u64,
        root: bool,
        first: Option<u8>,
    ) {
        let alone = false;
        let route = |start| Route { start, first, alone };
        if root {
            routes.push(route(Start::Root));
            if self.test.guest {
                routes.push(route(Start::Second));
                if self.layout.runs {
                    routes.push(route(Start::SecondRun));
                }
            }
        }
        if self.layout.deep {
            let known = core.known(&self.hardware, va);
            routes.extend(known.into_iter().map(|depth| route(Start::Table(depth))));
        }
    }

    /// Returns the address of the guest's stage-1 entry for an address.
    pub(super) fn first_at(&self, va: u64) -> Option<u64> {
        let mapped = |(address, _): &&(usize, Value)| self.test.addresses[*address].va == va;
        let (address, _) = self.test.stage1.iter().find(mapped)?;
        Some(self.layout.locate(self.test, &Location::First(*address)))
    }

    /// The address with this number: of those that the test names, or of those in runs that it does
    /// not.
    pub(super) fn va(&self, address: usize) -> Option<u64> {
        let addresses = &self.test.addresses;
        match address.checked_sub(addresses.len()) {
            None => Some(addresses[address].va),
            Some(unnamed) => self.layout.unnamed.get(unnamed).copied(),
        }
    }

    /// Returns the first and last address that a TLB may hold as one: a page, or a contiguous run.
    fn around(&self, va: u64) -> (u64, u64) {
        if self.layout.runs { (va & !IN_RUN, va | IN_RUN) } else { (va, va) }
    }

    /// Some leaf in the test has a clear access flag.
    pub(super) fn has_old(&self, state: &State) -> bool {
        let is_in = |flag: Flag, word| flag.is_in(self.test, word);
        state.words.iter().any(|&word| is_in(Flag::Valid, word) && !is_in(Flag::Accessed, word))
    }

    /// Finds what is wanted of addresses that stage 2 translates.
    pub(super) fn wants_of_second(&self, state: &State, cpu: usize, first: u64, last: u64) -> bool {
        if !self.test.is_nested() {
            return self.wants(state, cpu, first, last);
        }
        let mut named = self.test.addresses.iter();
        named.any(|address| first <= address.va && address.va <= last)
            && self.wants(state, cpu, 0, u64::MAX)
    }

    /// Whether a CPU may still ask for a translation of one of these addresses.
    pub(super) fn wants(&self, state: &State, cpu: usize, first: u64, last: u64) -> bool {
        let code = &self.test.code[cpu].code;
        code.iter().zip(&state.phases[cpu]).any(|(i, phase)| {
            let open = !matches!(phase, Phase::Done(_) | Phase::Buffered(_));
            open && matches!(i.op.place(), Some(&Place::Virtual(a)) if {
                let va = self.test.addresses[a].va;
                first <= va && va <= last
            })
        })
    }

    /// The steps that the instructions of a thread may take. `true`: the last is to be taken before
    /// all others.
    pub(super) fn instructions(&self, state: &State, thread: usize, steps: &mut Vec<Step>) -> bool {
        let x86 = self.test.x86;
        let code = &self.test.code[thread].code;
        let phases = &state.phases[thread];
        let mut before = Before::default();
        for (at, (instruction, phase)) in code.iter().zip(phases).enumerate() {
            let op = &instruction.op;
            let perform = Step::Do(thread, at, Way::Perform);
            let on_path = self.is_on_path(state, thread, at);
            if on_path == Some(false) {
                continue;
            }
            // Only accesses are executed before the branches in front of them are decided.
            let waiting = *phase == Phase::Idle && on_path.is_some();
            match op {
                Op::Load { .. } | Op::Store { .. } | Op::Atomic { .. } => {
                    match self.access(state, thread, at, &before, steps) {
                        Next::Now => return true,
                        Next::Stop => return false,
                        Next::On => {}
                    }
                }
                Op::Fence(Kind::Stores) if waiting && before.stores_buffered => {
                    steps.push(perform);
                    return true;
                }
                Op::Barrier { kind, .. } if waiting => {
                    let ready = before.system_done
                        && match kind {
                            Kind::All => before.all_done && !has_late(state, thread, at),
                            Kind::Loads => before.loads_done,
                            Kind::Stores => before.stores_buffered && !before.has_late_store,
                        };
                    if ready {
                        steps.push(perform);
                        let core = &state.cores[thread];
                        let idle = core.buffered().next().is_none() && core.pending().is_empty();
                        if idle || *kind == Kind::Loads {
                            return true;
                        }
                    }
                }
                Op::Synchronise | Op::Exception { .. } if waiting && before.is_serial(x86) => {
                    steps.push(perform);
                    // Walks by the root before may come first.
                    if !state.cores[thread].is_switching() {
                        return true;
                    }
                }
                Op::Invalidate { .. } if waiting && before.system_done && before.decided => {
                    steps.push(perform);
                }
                Op::Switch(_) if waiting => {
                    let ready = if x86 {
                        before.all_done
                    } else {
                        before.is_certain() && before.system_done
                    };
                    if ready {
                        steps.push(perform);
                    }
                }
                Op::InvalidateNow(_) if waiting && before.all_done => steps.push(perform),
                Op::Shootdown(_) if waiting && before.is_serial(x86) => steps.push(perform),
                Op::Shootdown(_) => {
                    if let Phase::Shooting(answered) = phase {
                        let others = (0..self.test.threads()).filter(|&cpu| cpu != thread);
                        for cpu in others.filter(|cpu| answered >> cpu & 1 == 0) {
                            if self.may_be_interrupted(state, cpu) {
                                steps.push(Step::Interrupt(thread, at, cpu));
                            }
                        }
                    }
                }
                _ => {}
            }
            before.pass(self, state, thread, at);
        }
        false
    }

    /// The steps that an access may take.
    pub(super) fn access(
        &self,
        state: &State,
        thread: usize,
        at: usize,
        before: &Before,
        steps: &mut Vec<Step>,
    ) -> Next {
        let x86 = self.test.x86;
        let op = &self.test.code[thread].code[at].op;
        let phase = &state.phases[thread][at];
        let step = |way| Step::Do(thread, at, way);
        let address_known = before.address_known(self, state, thread, op);
        let mut place = None;
        match (phase, op.place()) {
            (Phase::Idle, Some(&Place::Virtual(address))) => {
                let published = self.profile != Profile::Ets2 || before.published;
                if before.synchronised && published && address_known {
                    let request = self.request(&self.test.code[thread].code[at], address);
                    self.hardware.load_image(thread, &state.cores[thread]);
                    let held = self.hardware.holds(thread, request);
                    if held || !self.test.is_nested() {
                        steps.push(step(Way::Look));
                    }
                    if held && self.layout.runs {
                        steps.push(step(Way::Run));
                    }
                    let known = self.layout.deep
                        && !state.cores[thread].known(&self.hardware, request.va).is_empty();
                    let routes = self.routes(state, thread, request.va, held || known);
                    steps.extend(routes.into_iter().map(|route| step(Way::Walk(route))));
                    if self.layout.runs && self.test.hardware_dirty && op.writes() {
                        for other in self.beside(request.va) {
                            let Some(va) = self.va(other) else { continue };
                            let routes = self.routes(state, thread, va, true).into_iter();
                            steps.extend(routes.map(|route| step(Way::Through(other, route))));
                        }
                    }
                }
            }
            (Phase::Idle, Some(Place::Physical(location))) if address_known => {
                place = Some(self.layout.locate(self.test, location));
            }
            (Phase::Walking(..), _) => steps.push(step(Way::WalkOn)),
            (Phase::Translated(translated, _), _) => place = Some(translated.pa()),
            (Phase::Faulty(_, certain), _) => {
                if before.all_done {
                    steps.push(step(Way::TakeFault));
                    return Next::Now;
                }
                if !x86 && before.is_certain() && before.system_done {
                    steps.push(step(Way::TakeFault));
                    return Next::Stop;
                }
                if !certain && self.may_be_certain(before) {
                    steps.push(step(Way::CommitFault));
                    return Next::Now;
                }
                return Next::Stop;
            }
            _ => {}
        }
        if let Some(pa) = place
            && self.is_in_order(state, thread, at, before)
            && (!op.writes() || self.is_stored_in_order(state, thread, at, pa))
            && (!x86 || before.all_done)
        {
            let atomic = matches!(op, Op::Atomic { .. }) && !x86;
            if !atomic || before.fenced_drained {
                steps.push(step(Way::Perform));
            }
            let flagged = state.late.iter().any(|late| late.cpu == thread && late.at == at);
            if atomic && (self.may_write_later(thread, at) || !before.fenced_drained || flagged) {
                steps.push(Step::DoLate(thread, at, Way::Perform));
            }
        }
        Next::On
    }

    /// Whether barriers and dependencies let an access be performed.
    pub(super) fn is_in_order(
        &self,
        state: &State,
        thread: usize,
        at: usize,
        before: &Before,
    ) -> bool {
        let op = &self.test.code[thread].code[at].op;
        let certain = !op.writes()
            || (before.is_certain() && !before.stores_barred && self.has_data(state, thread, op));
        certain && self.is_past_barriers(op, before)
    }

    /// Whether barriers for all accesses or for loads, acquire and release let an access be
    /// performed.
    fn is_past_barriers(&self, op: &Op, before: &Before) -> bool {
        let (acquire, release) = op.acquires_releases();
        !before.barred
            && (!acquire || before.releases_drained)
            && (!release || (before.all_done && before.all_drained))
    }

    /// Whether the fault of an access may come before an invalidation that another CPU completes
    /// from here on: barriers and acquires order it as they order an access. Nothing else does: not
    /// a release that it would have been, a branch, what would be stored, or another access of the
    /// same address (the model of Arm: `bob`, `dob`, `TLBI-ob`).
    pub(super) fn may_be_certain(&self, before: &Before) -> bool {
        !before.barred && before.fenced_drained
    }

    pub(super) fn has_data(&self, state: &State, thread: usize, op: &Op) -> bool {
        let known = |value: &Value| self.computed(state, thread, value, false).is_some();
        match op {
            Op::Store { value, data, .. } => {
                known(value) && data.is_none_or(|register| self.is_known(state, thread, register))
            }
            Op::Atomic { change, value, .. } => {
                let expected = match change {
                    Change::CompareSwap(expected) => known(expected),
                    _ => true,
                };
                expected && known(value)
            }
            _ => true,
        }
    }

    /// Before a store is performed, what comes before it at the same place has to be: loads, or
    /// they would read it; stores, or they would overwrite it. An atomic access goes past the
    /// buffer.
    pub(super) fn is_stored_in_order(
        &self,
        state: &State,
        thread: usize,
        at: usize,
        pa: u64,
    ) -> bool {
        let code = &self.test.code[thread].code;
        let atomic = matches!(code[at].op, Op::Atomic { .. });
        let earlier = state.phases[thread][..at].iter().enumerate();
        earlier.filter(|(_, phase)| !matches!(phase, Phase::Done(_))).all(|(i, phase)| {
            let there = self.place_of(thread, i, phase);
            there != Some(pa) || (!atomic && matches!(phase, Phase::Buffered(_)))
        })
    }

    /// Returns the place of an access, if it is known.
    pub(super) fn place_of(&self, thread: usize, at: usize, phase: &Phase) -> Option<u64> {
        match (self.test.code[thread].code[at].op.place()?, phase) {
            (Place::Physical(location), _) => Some(self.layout.locate(self.test, location)),
            (_, Phase::Translated(translated, _) | Phase::Buffered(Some(translated))) => {
                Some(translated.pa())
            }
            (_, Phase::Done(Got::Value(_, source))) => Some(source.pa),
            _ => None,
        }
    }

    /// Whether an instruction is on the way that the thread takes, as far as it is known and
    /// nothing faults; `None`: a branch is not decided.
    pub(super) fn is_on_path(&self, state: &State, thread: usize, at: usize) -> Option<bool> {
        let Some(when) = &self.test.code[thread].code[at].when else {
            return Some(true);
        };
        self.computed(state, thread, when, true).map(|taken| taken != 0)
    }

    /// Whether a register has its value.
    pub(super) fn is_known(&self, state: &State, thread: usize, register: usize) -> bool {
        self.register(state, thread, register).is_some()
    }

    pub(super) fn register(&self, state: &State, thread: usize, register: usize) -> Option<u64> {
        let code = &self.test.code[thread].code;
        let writer = code.iter().position(|i| i.op.register() == Some(register))?;
        match state.phases[thread][writer] {
            Phase::Done(Got::Value(value, _)) => Some(value),
            Phase::Done(_) => Some(0),
            _ => None,
        }
    }

    /// An interrupt is taken between two instructions: all before are done, and nothing after has
    /// been but what can be done again.
    pub(super) fn may_be_interrupted(&self, state: &State, cpu: usize) -> bool {
        let phases = &state.phases[cpu];
        let Some(first) = self.first_open(state, cpu) else {
            return true;
        };
        (first..phases.len()).all(|at| {
            // The interrupt synchronises the context as well.
            let op = &self.test.code[cpu].code[at].op;
            matches!(op, Op::Synchronise | Op::Exception { .. })
                || !self.is_committed(cpu, at, &phases[at])
        })
    }

    pub(super) fn first_open(&self, state: &State, cpu: usize) -> Option<usize> {
        let code = &self.test.code[cpu].code;
        let closed = |phase: &Phase| matches!(phase, Phase::Done(_) | Phase::Buffered(_));
        let open = |(i, phase): (&Instruction, &Phase)| !closed(phase) && !is_derived(&i.op);
        code.iter().zip(&state.phases[cpu]).position(open)
    }

    /// Whether an instruction has done what cannot be taken back.
    pub(super) fn is_committed(&self, thread: usize, at: usize, phase: &Phase) -> bool {
        match phase {
            Phase::Idle | Phase::Walking(..) | Phase::Translated(_, false) => false,
            Phase::Faulty(_, certain) => *certain,
            Phase::Translated(_, true) | Phase::Buffered(_) | Phase::Shooting(_) => true,
            Phase::Done(_) => {
                let op = &self.test.code[thread].code[at].op;
                !matches!(op, Op::Load { .. }) && !is_barrier(op)
            }
        }
    }

    pub(super) fn request(&self, instruction: &Instruction, address: usize) -> Request {
        let va = self.test.addresses[address].va;
        let request = if instruction.op.writes() { Request::write(va) } else { Request::read(va) };
        if instruction.user { request.by_user() } else { request }
    }
}
