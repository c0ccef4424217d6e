//! Mappings of a space that one CPU edits: segments of addresses.

use std::collections::BTreeMap;

use tablewright::Perms;

/// Addresses that translate to adjoining memory in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub last: u64,
    pub pa: u64,
    pub perms: Perms,
}

/// By first address; they do not overlap.
#[derive(Clone, Debug, Default)]
pub struct Map(BTreeMap<u64, Segment>);

impl Map {
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// How many bytes are mapped.
    pub fn size(&self) -> u64 {
        let size = |(first, segment): (&u64, &Segment)| segment.last - first + 1;
        self.0.iter().map(size).sum()
    }

    /// The segment that holds an address, and its first.
    pub fn segment(&self, at: u64) -> Option<(u64, Segment)> {
        let (&first, &segment) = self.0.range(..=at).next_back()?;
        (at <= segment.last).then_some((first, segment))
    }

    /// Returns the frame of an address, and its permissions.
    pub fn at(&self, at: u64) -> Option<(u64, Perms)> {
        let (first, segment) = self.segment(at)?;
        Some((segment.pa + (at - first), segment.perms))
    }

    /// Whether any of these addresses is mapped.
    pub fn overlaps(&self, first: u64, last: u64) -> bool {
        let (before, inside) = (self.segment(first), self.0.range(first..=last).next());
        before.is_some() || inside.is_some()
    }

    fn cut_at(&mut self, at: u64) {
        if let Some((first, segment)) = self.segment(at)
            && first < at
        {
            let (pa, perms) = (segment.pa, segment.perms);
            let low = Segment { last: at - 1, ..segment };
            let high = Segment { last: segment.last, pa: pa + (at - first), perms };
            self.0.insert(first, low);
            self.0.insert(at, high);
        }
    }

    fn cut_out(&mut self, first: u64, last: u64) {
        self.cut_at(first);
        if let Some(behind) = last.checked_add(1) {
            self.cut_at(behind);
        }
    }

    /// The segments from `first` to `last`, at which they are cut.
    pub fn inside(&self, first: u64, last: u64) -> impl Iterator<Item = (u64, Segment)> {
        self.0.range(first..=last).map(|(&at, &segment)| (at, segment))
    }

    pub fn insert(&mut self, first: u64, last: u64, pa: u64, perms: Perms) {
        self.0.insert(first, Segment { last, pa, perms });
    }

    pub fn remove(&mut self, first: u64, last: u64) {
        self.cut_out(first, last);
        let inside: Vec<_> = self.0.range(first..=last).map(|(&at, _)| at).collect();
        for at in inside {
            self.0.remove(&at);
        }
    }

    /// Changes what is allowed.
    pub fn protect(&mut self, first: u64, last: u64, perms: impl Fn(Perms) -> Perms) {
        self.cut_out(first, last);
        for (_, segment) in self.0.range_mut(first..=last) {
            segment.perms = perms(segment.perms);
        }
    }
}
