//! Ranges that follow each other, as one: what an allocator or a log keeps instead of a value for
//! each page.
//!
//! An edit and a walk come by leaves in the order of their addresses. Where the memory below them
//! is in order as well, what they have found of many pages fits into a few words; so the visitor
//! joins, and the edit knows nothing of it.

use core::ops::Range;

use crate::addr::{Address, Pa, Span};
use crate::format::Attrs;

/// What can go on with another of its kind.
pub trait Append: Sized {
    /// Adds what follows.
    ///
    /// # Errors
    /// Gives it back if it does not follow. Nothing has changed then.
    fn append(&mut self, next: Self) -> Result<(), Self>;
}

impl<A: Address> Append for Span<A> {
    #[inline]
    fn append(&mut self, next: Self) -> Result<(), Self> {
        *self = self.join(next).ok_or(next)?;
        Ok(())
    }
}

/// Pages of a log by their numbers.
impl Append for Range<u64> {
    #[inline]
    fn append(&mut self, next: Self) -> Result<(), Self> {
        if self.end != next.start {
            return Err(next);
        }
        self.end = next.end;
        Ok(())
    }
}

/// Leaves that follow each other, in addresses and in memory, with the same attributes: as one.
///
/// ```
/// use core::ops::ControlFlow;
/// use tablewright::flush::{Joined, Stretch};
/// use tablewright::{AddressSpace, Attrs, Change, Mapping, Pa, Span, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let span = |first: u64, pages: u64| Span::new(Va::new(first), pages * 0x1000);
/// space.map(span(0x4000, 9)?, Pa::new(0x10_0000), Mapping::new(Attrs::USER_DATA).pages_only())?;
/// let mut gather = space.gather();
/// gather.protect(span(0x6000, 3)?, Change::new().write_protect())?;
/// gather.finish(|_| ());
///
/// let mut found: Vec<Stretch<Va>> = Vec::new();
/// let mut joined = Joined::new(|stretch| found.push(stretch));
/// space.walk(span(0x4000, 9)?, |leaf| {
///     joined.add(leaf.stretch());
///     ControlFlow::Continue(())
/// })?;
/// drop(joined);
/// // Before, between and behind: nine leaves.
/// assert_eq!(found.iter().map(|it| it.input).collect::<Vec<_>>(), [span(0x4000, 2)?, span(0x6000, 3)?, span(0x9000, 4)?]);
/// assert_eq!(found[1].memory(), Span::new(Pa::new(0x10_2000), 0x3000)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch<A: Address> {
    /// The addresses.
    pub input: Span<A>,
    /// Where their memory begins.
    pub frame: Pa,
    /// What all of it may be used for.
    pub attrs: Attrs,
}

impl<A: Address> Stretch<A> {
    /// The memory.
    #[inline]
    pub fn memory(&self) -> Span<Pa> {
        Span::of_leaf(self.frame, self.input.size())
    }
}

impl<A: Address> Append for Stretch<A> {
    #[inline]
    fn append(&mut self, next: Self) -> Result<(), Self> {
        let goes_on = self.memory().join(next.memory()).is_some() && self.attrs == next.attrs;
        self.input = goes_on
            .then(|| self.input.join(next.input))
            .flatten()
            .ok_or(next)?;
        Ok(())
    }
}

/// Joins what it is given as long as that goes on, and hands on what does not any more; the last
/// when it is dropped.
///
/// It takes what visitors get: [`Stretch`]es and [memory](super::Leaf::memory) of leaves, also
/// while they are [held](super::Held), or [ranges](crate::dirty::marked) of the pages of a log.
///
/// ```
/// use core::ops::ControlFlow;
/// use tablewright::flush::Joined;
/// use tablewright::{AddressSpace, Attrs, Mapping, Pa, Span, Va, format::Arm64K4, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<Arm64K4, _>::new(&platform).unwrap();
/// # space.map(Span::new(Va::new(0x20_0000), 0x1000)?, Pa::new(0), Attrs::USER_DATA)?;
/// let span = Span::new(Va::new(0x4000), 300 * 0x1000)?;
/// space.map(span, Pa::new(0x8000_0000), Mapping::new(Attrs::USER_DATA).pages_only().without_runs())?;
/// space.make_live();
///
/// // 300 leaves, and a value for all of them.
/// let mut held = Vec::new();
/// let mut joined = Joined::new(|memory| held.push(memory));
/// let mut gather = space.gather();
/// let progress = gather.unmap(span, |leaf| {
///     joined.add(leaf.memory());
///     ControlFlow::Continue(())
/// })?;
/// # assert!(progress.is_done());
/// drop(joined);
/// let completed = gather.issue().complete();
/// let free: Vec<_> = held.into_iter().filter_map(|it| completed.release(it).ok()).collect();
/// assert_eq!(free, [Span::new(Pa::new(0x8000_0000), span.size())?]);
/// # completed.finish(|_| ());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Joined<T: Append, V: FnMut(T)> {
    last: Option<T>,
    each: V,
}

impl<T: Append, V: FnMut(T)> Joined<T, V> {
    /// Hands on to `each`.
    pub const fn new(each: V) -> Self {
        Self { last: None, each }
    }

    /// Takes the next.
    #[inline]
    pub fn add(&mut self, next: T) {
        let rest = match &mut self.last {
            Some(last) => last.append(next).err(),
            None => Some(next),
        };
        if let Some(rest) = rest
            && let Some(whole) = self.last.replace(rest)
        {
            (self.each)(whole);
        }
    }
}

impl<T: Append, V: FnMut(T)> Drop for Joined<T, V> {
    fn drop(&mut self) {
        if let Some(last) = self.last.take() {
            (self.each)(last);
        }
    }
}
