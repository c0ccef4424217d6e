//! A guest's memory: in one piece, or in several with holes between them. Its pages are counted
//! through: the first of a piece follows the last of the one before it.

use tablewright::{Ipa, Span};

/// The most pieces.
pub const MOST: usize = 4;

/// Pieces of memory, in order.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    first: Span<Ipa>,
    more: [Option<Span<Ipa>>; MOST - 1],
}

impl From<Span<Ipa>> for Pieces {
    fn from(first: Span<Ipa>) -> Self {
        Self { first, more: [None; MOST - 1] }
    }
}

impl Pieces {
    /// Divides as much memory as there is in one piece into so many of the same size, of which each
    /// but the first begins so many bytes behind the one before it. `None` if they are no whole
    /// multiples of `unit`, too many, or overlap.
    pub fn divide(all: Span<Ipa>, count: usize, apart: u64, unit: u64) -> Option<Self> {
        let size = all.size() / count as u64;
        let is_whole = size.is_multiple_of(unit) && all.start().get().is_multiple_of(unit);
        let fits = (2..=MOST).contains(&count)
            && size * count as u64 == all.size()
            && apart.is_multiple_of(unit)
            && apart >= size;
        if !is_whole || !fits {
            return None;
        }
        let piece = |index: usize| {
            let start = all.start().get().checked_add(index as u64 * apart)?;
            Span::new(Ipa::new(start), size).ok()
        };
        let mut pieces = Self::from(piece(0)?);
        for index in 1..count {
            pieces.more[index - 1] = Some(piece(index)?);
        }
        Some(pieces)
    }

    /// Each piece, and how many bytes of memory are in front of it.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Span<Ipa>)> + '_ {
        let mut before = 0;
        core::iter::once(self.first).chain(self.more.into_iter().flatten()).map(move |piece| {
            let offset = before;
            before += piece.size();
            (offset, piece)
        })
    }

    /// The first address.
    pub fn start(&self) -> Ipa {
        self.first.start()
    }

    /// Bytes in all pieces.
    pub fn size(&self) -> u64 {
        self.iter().map(|(_, piece)| piece.size()).sum()
    }

    /// How many bytes of memory are in front of an address of it.
    #[inline]
    pub fn offset(&self, at: Ipa) -> Option<u64> {
        if self.first.contains(at) {
            return Some(at.get() - self.first.start().get());
        }
        let (before, piece) = self.iter().find(|(_, piece)| piece.contains(at))?;
        Some(before + (at.get() - piece.start().get()))
    }

    /// The address behind so many bytes of memory.
    pub fn at(&self, offset: u64) -> Option<Ipa> {
        let (before, piece) = self.iter().find(|(before, piece)| offset - before < piece.size())?;
        Some(Ipa::new(piece.start().get() + (offset - before)))
    }
}

#[cfg(test)]
mod tests {
    use super::Pieces;
    use tablewright::{Ipa, Span};

    #[test]
    fn pages_are_counted_through_all_pieces() {
        let all = Span::new(Ipa::new(0x4000_0000), 0x60_0000).unwrap();
        let pieces = Pieces::divide(all, 3, 1 << 34, 0x20_0000).unwrap();
        assert_eq!(pieces.size(), all.size());
        let starts = pieces.iter().map(|(_, piece)| piece.start().get());
        assert!(starts.eq([0x4000_0000, 0x4_4000_0000, 0x8_4000_0000]));
        for offset in (0..all.size()).step_by(0x1000) {
            let at = pieces.at(offset).unwrap();
            assert_eq!(pieces.offset(at), Some(offset));
        }
        assert_eq!(pieces.at(all.size()), None);
        assert_eq!(pieces.offset(Ipa::new(0x4020_0000)), None, "a hole");
        assert_eq!(pieces.offset(Ipa::new(0x3fff_f000)), None);
    }

    #[test]
    fn pieces_that_overlap_or_are_not_whole_are_refused() {
        let all = Span::new(Ipa::new(0x4000_0000), 0x60_0000).unwrap();
        assert!(Pieces::divide(all, 3, 0x10_0000, 0x10_0000).is_none());
        assert!(Pieces::divide(all, 4, 1 << 34, 0x20_0000).is_none());
        assert!(Pieces::divide(all, 5, 1 << 34, 0x1000).is_none());
        assert!(Pieces::divide(all, 1, 1 << 34, 0x1000).is_none());
    }
}
