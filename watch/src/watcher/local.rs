//! Processors that forget by themselves: x86-64 and RISC-V.
//!
//! There are no breaks, a store is seen at once, and a fence of one processor says nothing of
//! another. A page that has a new use is reached wrongly when user code can use the old
//! translation.

use tablewright_walker::Regime;

use super::Watcher;
use crate::arm64::Part;
use crate::debt::Tag;
use crate::finding::Rule;
use crate::invalidation::{Cpus, Invalidation};
use crate::processor::Cpu;
use crate::space::Space;
use crate::x86_64::{Control, Flushes};
use crate::{At, Memory, riscv64};

impl Watcher {
    /// A processor of x86-64 writes to a control register: so they are now. What it held, of
    /// `flushes`, is gone.
    pub fn control(&mut self, at: At, now: Control, flushes: Flushes, memory: &mut dyn Memory) {
        if !self.knows(at.cpu) {
            return;
        }
        self.load_both(at, now.root(), flushes == Flushes::Nothing, memory);
        let by = match flushes {
            Flushes::Nothing => return,
            Flushes::All => Invalidation::LOCAL,
            Flushes::Own => {
                Invalidation { asid: now.pcid(), globals: false, ..Invalidation::LOCAL }
            }
        };
        self.forgets(at, by);
    }

    /// A processor of RISC-V writes to `satp`: so it is now. Nothing that it holds goes with that.
    /// The fence of an identifier that had another root may come before or after (PRIV 10.1.11),
    /// and has come when user code can use it.
    pub fn satp(&mut self, at: At, satp: u64, memory: &mut dyn Memory) {
        if !self.knows(at.cpu) {
            return;
        }
        self.load_both(at, riscv64::root(satp, false), false, memory);
        self.cpus[usize::from(at.cpu)].is_unchecked = true;
    }

    /// A processor has another root loaded, of both halves of the addresses.
    fn load_both(
        &mut self,
        at: At,
        root: Option<(u64, Regime, u16)>,
        check: bool,
        memory: &mut dyn Memory,
    ) {
        self.is_local = true;
        let kernel = root.map(|(_, regime, _)| {
            *self.tables.upper.get_or_insert_with(|| {
                self.spaces.push(Some(Space::of_upper_half(regime)));
                self.spaces.len() - 1
            })
        });
        let root = root.and_then(|(root, regime, asid)| {
            Some((self.space_of(root, Part::Lower, regime, memory)?, Tag::Asid(asid)))
        });
        self.switch(at, Part::Upper, kernel.map(|kernel| (kernel, Tag::Any)), false);
        self.switch(at, Part::Lower, root, check);
    }

    /// A processor of x86-64 or RISC-V forgets something at once.
    pub fn forgets(&mut self, at: At, by: Invalidation) {
        self.counts.invalidations += 1;
        if self.knows(at.cpu) {
            self.invalidate(at, by);
            self.complete(at, true);
        }
    }

    /// A processor of x86-64 or RISC-V goes to user mode.
    pub fn to_user(&mut self, at: At) {
        if !self.knows(at.cpu) {
            return;
        }
        let cpu = &mut self.cpus[usize::from(at.cpu)];
        if std::mem::take(&mut cpu.is_unchecked)
            && let Some((space, tag)) = cpu.loaded[Part::Lower as usize]
        {
            self.check_identifier(at, space, tag);
        }
        self.in_user |= 1 << at.cpu;
        for debt in std::mem::take(&mut self.reused) {
            if !self.debts.contains_key(&debt) {
                continue;
            }
            match self.is_usable(debt, 1 << at.cpu) {
                true => self.say_reused(debt),
                false => self.reused.push(debt),
            }
        }
    }

    /// A processor executes code of the upper half: it is not in user mode.
    #[inline]
    pub fn in_kernel(&mut self, cpu: u8) {
        self.in_user &= !(1_u64.checked_shl(cpu.into()).unwrap_or(0));
    }

    /// Whether any processor may be in user mode.
    #[inline]
    pub fn is_any_in_user(&self) -> bool {
        self.in_user != 0
    }

    /// A page that a debt leads to was used anew. That is wrong when user code can use the old
    /// translation: in a processor that is in user mode, or when it goes back to it. One that runs
    /// a thread of the kernel with the old root need not forget before that.
    pub(super) fn reuse(&mut self, debt: u64, at: At, page: u64) {
        if let Some(owed) = self.debts.get_mut(&debt)
            && owed.reused.is_none()
        {
            let then = format!("the page at {page:#x}, which it led to, was written anew");
            owed.reused = Some((at, then));
            match self.is_usable(debt, self.in_user) {
                true => self.say_reused(debt),
                false => self.reused.push(debt),
            }
        }
    }

    /// Whether one of these processors may use what a debt is about.
    fn is_usable(&self, debt: u64, cpus: Cpus) -> bool {
        let Some(owed) = self.debts.get(&debt) else { return false };
        let has = |cpu: &Cpu| {
            cpu.loaded[Part::Lower as usize].is_some_and(|(space, _)| space == owed.space)
        };
        let all = (0..).zip(&self.cpus);
        all.filter(|(number, _)| owed.cpus() & cpus & (1 << number) != 0).any(|(_, cpu)| has(cpu))
    }

    fn say_reused(&mut self, debt: u64) {
        if let Some((at, then)) = self.debts.get(&debt).and_then(|owed| owed.reused.clone()) {
            self.say(Rule::PageReused, debt, at, then);
        }
        self.settle(debt);
    }
}
