//! Random edits of a tree that a processor uses, for checks.

use core::ops::ControlFlow;

use tablewright::{
    Address, AddressSpace, Attrs, Change, Format, Level, Mapping, Pa, Platform, Span,
};

/// The size of the addresses that are edited.
pub const WINDOW: u64 = 1 << 30;

/// The size of a page.
pub const PAGE: u64 = 4096;

/// Numbers without a pattern, the same each time (xorshift).
pub struct Random(pub u64);

impl Random {
    /// Returns a number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    /// One of several.
    pub fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// The memory that is edited: [`WINDOW`] bytes of addresses, to be mapped to as many.
pub struct Window<'a> {
    /// The first address.
    pub from: u64,
    /// The first address of what it is mapped to.
    pub to: u64,
    /// How it may be mapped.
    pub attrs: &'a [Attrs],
    /// The largest leaf.
    pub largest: Level,
}

impl Window<'_> {
    /// One edit of a tree that is in use. What the engine refuses has changed nothing, and is as
    /// good as another.
    pub fn edit<F: Format, P: Platform + Clone>(
        &self,
        space: &mut AddressSpace<F, P>,
        random: &mut Random,
    ) {
        // Blocks and gigabytes come of themselves where the low bits agree.
        let size = match random.below(32) {
            0 => WINDOW,
            1..12 => 2 << 20 << random.below(8),
            _ => PAGE << random.below(12),
        };
        let start = random.below(WINDOW / size) * size;
        let target = match random.below(3) {
            0 => random.below(WINDOW / PAGE - size / PAGE + 1) * PAGE,
            _ => random.below(WINDOW / size) * size,
        };
        let Ok(span) = Span::new(F::Input::from_bits(self.from + start), size) else {
            return;
        };
        let attrs = random.one_of(self.attrs);
        let attrs = Attrs {
            accessed: random.below(8) != 0,
            dirty: attrs.dirty && random.below(4) != 0,
            ..attrs
        };
        let kind = random.below(8);
        let mut gather = space.gather();
        let _ = match kind {
            0 => gather.protect(span, Change::new().perms(attrs.perms)),
            1 => gather.protect(span, Change::new().write_protect()),
            _ => gather.unmap(span, |_| ControlFlow::Continue(())).map(|_| ()),
        };
        gather.finish(|_| ());
        if kind > 2 {
            let mapping = match kind {
                3 => Mapping::new(attrs).pages_only(),
                _ => Mapping::new(attrs).largest(self.largest),
            };
            let _ = space.map(span, Pa::new(self.to + target), mapping);
        }
    }
}
