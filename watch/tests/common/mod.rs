//! Memory for a kernel of a few lines.

use std::collections::HashMap;

/// Words by their addresses; all others are zero.
pub fn reader(memory: &HashMap<u64, u64>) -> impl FnMut(u64, &mut [u64]) -> bool {
    |pa, words| {
        for (word, value) in (0..).zip(words) {
            *value = memory.get(&(pa + 8 * word)).copied().unwrap_or(0);
        }
        true
    }
}
