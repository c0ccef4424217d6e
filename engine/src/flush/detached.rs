//! Tables that were detached, chained through the side memory of their frames.

use core::mem::MaybeUninit;

use crate::addr::{Level, Pa};
use crate::format::{Format, Perms};
use crate::platform::Platform;
use crate::walk::Slice;

/// How many detached tables a gather holds where the embedder keeps no side memory for tables.
pub const MAX_UNLINKED: usize = 32;

/// The fate of a table that was detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Everything below it was unmapped: the leaves are visited, the tables freed.
    Unmapped,
    /// A leaf has taken its place: the tables are freed, the leaves live on.
    Replaced,
}

/// The root of a sub-tree that was detached.
#[derive(Clone, Copy)]
pub(crate) struct Root {
    pub frame: Pa,
    pub level: Level,
    pub fate: Fate,
    /// Permissions that the tables above it took away.
    pub denied: Perms,
    /// The first input address that it translated.
    pub first: u64,
}

impl Root {
    /// All but the address in one word: what is not the frame in the bits below its alignment, with
    /// a mark that tells the word from the end of the chain.
    fn word(self) -> u64 {
        let level = u64::from(self.level.height());
        let fate = u64::from(self.fate == Fate::Replaced);
        let denied = u64::from(self.denied.bits());
        self.frame.get() | 1 | level << 1 | fate << 4 | denied << 5
    }

    fn from_word(word: u64, first: u64) -> Option<Self> {
        (word & 1 != 0).then_some(Self {
            frame: Pa::new(word & !0xfff),
            level: Level::new((word >> 1 & 7) as u8),
            fate: if word & 1 << 4 == 0 { Fate::Unmapped } else { Fate::Replaced },
            denied: Perms::from_bits_truncate((word >> 5) as u8 & 0x3f),
            first,
        })
    }

    /// All addresses that it translated.
    pub fn slice<F: Format>(self) -> Slice {
        let size = 1u64 << (F::shift(self.level) + F::INDEX_BITS);
        Slice { first: self.first, last: self.first + (size - 1) }
    }
}

/// Tables that were detached: a chain through their side memory, and a few places for those that
/// have none.
// The room is behind the rest, which short instructions reach then.
#[repr(C)]
pub(crate) struct Detached {
    /// The newest root that is chained, as its [word](Root::word) and its first address; its link
    /// holds those of the next.
    head: (u64, u64),
    /// The number of items that are initialised.
    len: usize,
    unlinked: [MaybeUninit<(u64, u64)>; MAX_UNLINKED],
}

impl Detached {
    #[inline]
    pub const fn new() -> Self {
        Self { head: (0, 0), len: 0, unlinked: [const { MaybeUninit::uninit() }; MAX_UNLINKED] }
    }

    /// Whether one more can be carried without side memory.
    #[inline]
    pub fn has_place(&self) -> bool {
        self.len < MAX_UNLINKED
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0 && self.head.0 == 0
    }

    /// Takes all of it. Copies no more than there is.
    #[inline]
    pub fn take(&mut self) -> Self {
        let mut taken = Self::new();
        taken.head = core::mem::take(&mut self.head);
        taken.len = core::mem::take(&mut self.len);
        for (to, from) in taken.unlinked[..taken.len].iter_mut().zip(&self.unlinked) {
            *to = *from;
        }
        taken
    }

    pub(super) fn push<P: Platform>(&mut self, platform: &P, root: Root) -> bool {
        let packed = (root.word(), root.first);
        if let Some(link) = platform.link_of(root.frame) {
            link.set(self.head.0, self.head.1);
            self.head = packed;
            true
        } else if let Some(place) = self.unlinked.get_mut(self.len) {
            place.write(packed);
            self.len += 1;
            true
        } else {
            false
        }
    }

    /// Takes a root out, with nothing of it reclaimed yet.
    pub fn pop<P: Platform>(&mut self, platform: &P) -> Option<(Root, Option<Slice>)> {
        if self.len > 0 {
            self.len -= 1;
            // SAFETY: places below `len` were written by `push`.
            let (word, first) = unsafe { self.unlinked.get(self.len)?.assume_init() };
            return Root::from_word(word, first).map(|root| (root, None));
        }
        let root = Root::from_word(self.head.0, self.head.1)?;
        self.head = platform.link_of(root.frame)?.get();
        Some((root, None))
    }
}
