//! Unasked acts of the hardware.

use crate::memory::State;

use super::{CpuState, Early, Fault, Hardware, Look, Request, Translated, Want};

impl Hardware {
    /// Something that the hardware is free to do at any time happens, if the dice say so: a walk of
    /// some CPU for an address close to what is being edited, all of it or a part, an eviction, a
    /// store that leaves its buffer, a translation ahead of time.
    #[inline(always)]
    pub(crate) fn disturb(&self, cpu: usize, near: Option<u64>) {
        if self.dice.is_on() {
            self.disturb_slowly(cpu, near);
        }
    }

    #[inline(never)]
    pub(super) fn disturb_slowly(&self, cpu: usize, near: Option<u64>) {
        if !self.dice.once_in(3) {
            return;
        }
        let other = self.dice.below(self.cores.len() as u64) as usize;
        let core = &self.cores[other];
        if core.state.get() == CpuState::Stopped {
            return;
        }
        let near = near.and_then(|pa| {
            let frame = self.memory.frame_at(pa)?;
            let meta = self.memory.meta(frame);
            (meta.state.get() == State::Live).then(|| {
                let bits = self.shift(meta.depth.get());
                let page = 1u64 << self.memory.page_shift();
                let inside = self.dice.below(1 << bits) & !(page - 1);
                self.any_place(frame, pa).wrapping_add(inside)
            })
        });
        if let Some(va) = near {
            self.dice.note(va);
        }
        let Some(va) = near.or_else(|| self.dice.recall()) else {
            return;
        };
        if self.is_nested() {
            self.disturb_guest(cpu, other, va);
            return;
        }
        let request = Request { va, want: Want::Read, user: self.dice.once_in(2) };
        match self.dice.below(8) {
            0..=2 if core.before.get().is_some() && self.dice.once_in(2) => {
                let mut look = self.look_before(other, request);
                while let Some(Look::Walking(walking)) = look {
                    look = Some(self.step(other, walking));
                }
            }
            0..=2 => {
                let _ = self.walk_at_once(other, request);
            }
            3 | 4 => {
                // One that was left half-way goes on, or a new one is.
                let mut walking = match core.speculative.take() {
                    Some(walking) => Look::Walking(walking),
                    None => self.look(other, request),
                };
                for _ in 0..=self.dice.below(3) {
                    if let Look::Walking(next) = walking {
                        walking = self.step(other, next);
                    }
                }
                if let Look::Walking(walking) = walking {
                    core.speculative.set(Some(walking));
                }
            }
            5 => {
                core.tlb.evict(self.dice.below(1 << 16) as usize);
                core.cache.evict(self.dice.below(1 << 16) as usize);
            }
            6 => {
                // Also of a CPU that does nothing any more.
                let of = if self.dice.once_in(2) { cpu } else { other };
                self.drain_any(of);
            }
            _ => self.translate_early(other, request),
        }
    }

    /// Returns an address that an entry translates, in one of the places that its table has.
    fn any_place(&self, frame: usize, pa: u64) -> u64 {
        let mut places = Vec::new();
        self.each_place(frame, pa, |_, first| places.push(first));
        match places.len() {
            0 | 1 => self.place(frame, pa),
            many => places[self.dice.below(many as u64) as usize],
        }
    }

    /// An address to come back to.
    pub(crate) fn note(&self, va: u64) {
        self.dice.note(va);
        if self.is_nested() {
            self.guests.note(va);
        }
    }

    /// One of the stores that may leave the buffer of a CPU does.
    pub(super) fn drain_any(&self, cpu: usize) {
        let drainable = self.drainable(cpu);
        if !drainable.is_empty() {
            let at = self.dice.below(drainable.len() as u64) as usize;
            self.drain_one(cpu, drainable[at]);
        }
    }

    /// A translation is made before its access, which may come later or never.
    pub(crate) fn translate_early(&self, cpu: usize, request: Request) {
        let result = match self.walk_at_once(cpu, request) {
            Some(result) => result,
            None => return,
        };
        let mut early = self.cores[cpu].early.borrow_mut();
        if early.len() < 8 {
            early.push(Early { request, result });
        }
    }

    /// A whole walk in one step. `None` if no root is loaded.
    pub(crate) fn walk_at_once(
        &self,
        cpu: usize,
        request: Request,
    ) -> Option<Result<Translated, Fault>> {
        let root = self.cores[cpu].roots[self.half(request.va)].get()?;
        let mut look = match self.cores[cpu].tlb.find(cpu, request.va, root.id, &self.invalidations)
        {
            Some(entry) => self.use_entry(cpu, request, entry),
            None => self.start(cpu, request, root),
        };
        loop {
            match look {
                Look::Found(translated) => return Some(Ok(translated)),
                Look::Fault(fault) => return Some(Err(fault)),
                Look::Walking(walking) => look = self.step(cpu, walking),
            }
        }
    }
}
