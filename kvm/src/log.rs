//! Which pages were written: a bit for each, slot by slot, as KVM has it.

/// The effect of reading a log on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protect {
    /// It is cleared, and its pages are protected again.
    Auto,
    /// Nothing: another call does.
    Manual,
    /// Manual, and all pages are in it from the start.
    ManualAllSet,
}

/// Bits of all slots. Each slot has as many pages, a multiple of 64.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bitmap {
    words: Vec<u64>,
    pages_per_slot: u64,
}

impl Bitmap {
    /// No page of so many slots with so many pages each. The first is slot 1: slot 0 is the guest's
    /// own.
    pub fn new(slots: u64, pages_per_slot: u64) -> Self {
        Self { words: vec![0; (slots * pages_per_slot / 64) as usize], pages_per_slot }
    }

    /// The words of each slot, in their order.
    pub(crate) fn slots(&mut self) -> impl Iterator<Item = &mut [u64]> {
        self.words.chunks_exact_mut((self.pages_per_slot / 64).max(1) as usize)
    }

    /// Marks a page of a slot. Of another slot than those that are logged, nothing.
    pub(crate) fn mark(&mut self, slot: u32, page: u64) {
        if let Some(slot) = slot.checked_sub(1)
            && page < self.pages_per_slot
        {
            self.insert(u64::from(slot) * self.pages_per_slot + page);
        }
    }

    /// Marks a page of the whole memory.
    pub fn insert(&mut self, page: u64) {
        if let Some(word) = self.words.get_mut((page / 64) as usize) {
            *word |= 1 << (page % 64);
        }
    }

    /// Takes all marks away.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Takes the marks of another in.
    pub fn add(&mut self, other: &Self) {
        for (word, more) in self.words.iter_mut().zip(&other.words) {
            *word |= more;
        }
    }

    /// Takes away the marks that another has.
    pub fn remove(&mut self, other: &Self) {
        for (word, less) in self.words.iter_mut().zip(&other.words) {
            *word &= !less;
        }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// The first page that is marked.
    pub fn first(&self) -> Option<u64> {
        let place = self.words.iter().position(|word| *word != 0)?;
        let bit = self.words.get(place)?.trailing_zeros();
        Some(place as u64 * 64 + u64::from(bit))
    }

    /// The first page that only one of the two has.
    pub fn difference(&self, other: &Self) -> Option<u64> {
        let mut words = self.words.iter().zip(&other.words).enumerate();
        words.find_map(|(number, (this, other))| {
            let different = this ^ other;
            (different != 0).then(|| number as u64 * 64 + u64::from(different.trailing_zeros()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_a_slot_is_one_of_the_memory() {
        let mut found = Bitmap::new(2, 128);
        found.mark(2, 3);
        found.mark(0, 5);
        found.mark(1, 128);
        assert_eq!(found.count(), 1);
        let mut expected = Bitmap::new(2, 128);
        assert_eq!(found.difference(&expected), Some(131));
        assert_eq!((found.first(), expected.first()), (Some(131), None));
        expected.insert(131);
        assert_eq!(found.difference(&expected), None);
    }
}
