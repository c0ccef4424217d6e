//! The arena in use, for crates whose frame allocator is a type without state, as in most kernels.

use std::cell::Cell;

use crate::memory::arena::Arena;

thread_local! {
    static ARENA: Cell<Option<Arena>> = const { Cell::new(None) };
}

/// Sets the arena that [`take`] takes from.
pub fn set(arena: Arena) {
    ARENA.set(Some(arena));
}

/// Takes a frame from the current arena and returns its address.
#[inline]
pub fn take() -> Option<usize> {
    Some(ARENA.get()?.take()?.addr().get())
}

/// Gives a frame back to the current arena.
#[inline]
pub fn give_back(address: usize) {
    if let Some(arena) = ARENA.get() {
        arena.give_back(address);
    }
}
