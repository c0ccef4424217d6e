//! An access that is translated is performed.

use super::super::program::*;
use super::Explorer;
use super::order::Before;
use super::state::*;

impl Explorer<'_> {
    /// A load reads: what the thread has stored there and no other sees yet, or what is in memory.
    pub(super) fn read(&self, next: &mut State, thread: usize, at: usize) -> Option<()> {
        let pa = self.place_of(thread, at, &next.phases[thread][at])?;
        let code = &self.test.code[thread].code;
        // The last store before it that goes there and is not performed.
        let mut forwarded = None;
        for i in (0..at).rev().filter(|&i| code[i].op.writes()) {
            let phase = &next.phases[thread][i];
            if self.place_of(thread, i, phase) != Some(pa) {
                continue;
            }
            let late =
                next.late.iter().find(|late| late.stored && late.cpu == thread && late.at == i);
            if let Some(late) = late {
                let value = (self.hardware.memory.read(pa) | late.set) & !late.clear;
                forwarded = Some((value, store_number(thread, i)));
                break;
            }
            match phase {
                // In memory, or in the buffer, where the hardware finds it.
                Phase::Done(_) | Phase::Buffered(_) => break,
                _ => {
                    let before = Before::default();
                    let known = self.has_data(next, thread, &code[i].op)
                        && before.address_known(self, next, thread, &code[i].op);
                    let (Op::Store { value, .. }, true) = (&code[i].op, known) else {
                        return None;
                    };
                    forwarded = Some((self.evaluate(next, thread, value), store_number(thread, i)));
                    break;
                }
            }
        }
        let (value, writer) = forwarded.unwrap_or_else(|| self.current(next, thread, pa));
        self.check_loads(next, thread, at, pa, value, writer)?;
        let by = match next.phases[thread][at] {
            Phase::Translated(translated, _) => Some(translated),
            _ => None,
        };
        next.phases[thread][at] = Phase::Done(Got::Value(value, Source { pa, writer, by }));
        Some(())
    }

    /// Returns the value that a load of this thread finds, and the store that wrote it.
    pub(super) fn current(&self, next: &State, thread: usize, pa: u64) -> (u64, u8) {
        let value = self.hardware.visible_to(thread, pa);
        let mine = next.cores[thread].buffered().zip(&next.stores[thread]);
        let newest = mine.filter(|(to, _)| *to == pa).map(|(_, &number)| number).last();
        let writer = self.word(pa).map_or(0, |word| next.writers[word]);
        (value, newest.unwrap_or(writer))
    }

    /// Loads after this access that were performed before it have read nothing older than it does,
    /// or writes.
    pub(super) fn check_loads(
        &self,
        next: &State,
        thread: usize,
        at: usize,
        pa: u64,
        value: u64,
        writer: u8,
    ) -> Option<()> {
        let later = next.phases[thread].iter().enumerate().skip(at + 1);
        for (_, phase) in later {
            if let Phase::Done(Got::Value(read, source)) = phase
                && source.pa == pa
            {
                let own = source.writer & !BY_WALKER;
                let newer = own != 0
                    && usize::from(own - 1) / PLACES == thread
                    && usize::from(own - 1) % PLACES > at;
                if !newer && (*read, source.writer) != (value, writer) {
                    return None;
                }
            }
        }
        Some(())
    }

    pub(super) fn write(
        &self,
        next: &mut State,
        thread: usize,
        at: usize,
        value: &Value,
    ) -> Option<()> {
        let phase = next.phases[thread][at].clone();
        let pa = self.place_of(thread, at, &phase)?;
        let value = self.evaluate(next, thread, value);
        let number = store_number(thread, at);
        self.check_loads(next, thread, at, pa, value, number)?;
        self.hardware.buffer_store(thread, pa, value);
        next.stores[thread].push(number);
        next.phases[thread][at] = match phase {
            Phase::Translated(translated, _) => Phase::Buffered(Some(translated)),
            _ => Phase::Buffered(None),
        };
        Some(())
    }

    /// An atomic access reads and writes, past the buffer.
    pub(super) fn change(&self, next: &mut State, thread: usize, at: usize) -> Option<()> {
        let (pa, old, new) = self.exchange(next, thread, at)?;
        self.hardware.memory.write(pa, new);
        if let Some(word) = self.word(pa)
            && new != old
        {
            next.writers[word] = store_number(thread, at);
            next.words[word] = new;
        }
        Some(())
    }

    /// An atomic access reads now, and its store becomes visible later. No other CPU writes the
    /// word in between. Later loads of this CPU may read what is stored.
    pub(super) fn change_later(&self, next: &mut State, thread: usize, at: usize) -> Option<()> {
        let (pa, old, new) = self.exchange(next, thread, at)?;
        // A comparison that fails stores nothing, and need not make the page dirty.
        let compares = matches!(
            self.test.code[thread].code[at].op,
            Op::Atomic { change: Change::CompareSwap(_), .. }
        );
        if compares && new == old {
            let late = next.late.iter().position(|late| late.cpu == thread && late.at == at)?;
            next.late.remove(late);
            return Some(());
        }
        let late = Late { cpu: thread, at, pa, set: new & !old, clear: old & !new, stored: true };
        next.late.push(late);
        next.late.sort_unstable();
        Some(())
    }

    /// Does an atomic access but for its write; gives the place, and what was and is to be there.
    fn exchange(&self, next: &mut State, thread: usize, at: usize) -> Option<(u64, u64, u64)> {
        let Op::Atomic { change, register, value, .. } = &self.test.code[thread].code[at].op else {
            return None;
        };
        let pa = self.place_of(thread, at, &next.phases[thread][at])?;
        if next.late.iter().any(|late| late.pa == pa) {
            return None;
        }
        let hardware = &self.hardware;
        if self.test.x86 {
            hardware.drain(thread);
        }
        let old = hardware.memory.read(pa);
        let operand = self.evaluate(next, thread, value);
        let new = match change {
            Change::Swap => operand,
            Change::CompareSwap(expected) if self.evaluate(next, thread, expected) != old => old,
            Change::CompareSwap(_) => operand,
            Change::Set => old | operand,
            Change::Clear => old & !operand,
            Change::Add => old.wrapping_add(operand),
        };
        let (read, writer) = self.current(next, thread, pa);
        let number = store_number(thread, at);
        self.check_loads(next, thread, at, pa, read, number)?;
        next.phases[thread][at] = Phase::Done(match register {
            Some(_) => Got::Value(old, Source { pa, writer, by: None }),
            None => Got::Nothing,
        });
        Some((pa, old, new))
    }

    pub(super) fn evaluate(&self, state: &State, thread: usize, value: &Value) -> u64 {
        self.computed(state, thread, value, false).unwrap_or(0)
    }

    /// Computes a value; `None` as long as it is not known. With `expected`, instructions that may
    /// still fault will not.
    pub(super) fn computed(
        &self,
        state: &State,
        thread: usize,
        value: &Value,
        expected: bool,
    ) -> Option<u64> {
        value.compute(&|part| match part {
            Value::Register(register) => self.register(state, thread, *register),
            Value::Faulted(at) => match &state.phases[thread][*at] {
                Phase::Done(Got::Fault(_)) => Some(1),
                Phase::Done(_) | Phase::Buffered(_) => Some(0),
                _ => expected.then_some(0),
            },
            part => Some(self.layout.evaluate(self.test, part)),
        })
    }
}
