//! The words that a small guest writes, and those that it hashes. The file is part of two programs:
//! the guest, and `xtask`, which knows the right hash of each.

/// Words that are written, one in each page.
pub const WORDS: u64 = 1280;

/// The word of this number in this round: another for each guest.
pub const fn word(guest: u64, number: u64, round: u64) -> u64 {
    // SplitMix64: all bits of all three count.
    let mut mixed = (guest << 48 ^ number << 24 ^ round).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// The round whose words are hashed.
pub const LAST: u64 = 0xffff;

/// FNV-1a, by words.
pub const fn hash(before: u64, word: u64) -> u64 {
    (before ^ word).wrapping_mul(0x100_0000_01b3)
}

/// Of nothing.
pub const NOTHING: u64 = 0xcbf2_9ce4_8422_2325;
