//! The arena in use, for crates whose frame allocator is a type without state, as it is in most
//! kernels.

use std::cell::Cell;

use crate::arena::Arena;

thread_local! {
    static ARENA: Cell<Option<Arena>> = const { Cell::new(None) };
}

/// Makes `arena` the one that [`take`] takes from.
pub fn set(arena: Arena) {
    ARENA.set(Some(arena));
}

/// Takes a frame from the current arena, and tells its address.
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
