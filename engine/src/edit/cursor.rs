//! A cursor: the table that an edit of a page came to is kept for the next.
//!
//! Fault-around, copying and harvesting go through a range page by page, and look at each before
//! they know what to do with it. The pages of one table follow each other, so that there is one
//! walk for all of them.
//!
//! A table of pages stays where it is until an edit detaches it. Between two calls of a cursor
//! there is no edit but its own, because it borrows the gather; and these are of a page each, which
//! is less than any table holds: they make tables, and detach none.

use crate::addr::{Address, Level, Pa};
use crate::edit::space::{AddressSpace, EditError, Located};
use crate::edit::{Change, Gather, Template};
use crate::flush::{Held, Leaf};
use crate::format::Format;
use crate::platform::Platform;
use crate::walk::Slice;

/// Edits of pages, one at a time and mostly upwards, with one walk for those of one table.
///
/// Made by [`Gather::cursor`]. What it changes is left to the gather.
///
/// ```
/// use tablewright::{AddressSpace, Attrs, EditError, Encoded, Mapping, Pa, Va, format::X86_64, hosted::Hosted};
/// # let platform = Hosted::new(64, 12);
/// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
/// let anonymous = Encoded::new(Mapping::new(Attrs::USER_DATA).pages_only())?;
/// space.map_page(Va::new(0x40_3000), Pa::new(0x9000), anonymous)?;
/// space.make_live();
///
/// // A fault at 0x40_5000: with the page, what is missing of the 16 around it.
/// let mut gather = space.gather();
/// let mut cursor = gather.cursor();
/// let mut mapped = 0;
/// for number in 0..16 {
///     let page = Va::new(0x40_0000 + number * 4096);
///     if cursor.query(page).is_none() {
///         cursor.map_page(page, Pa::new(0x80_0000 + number * 4096), anonymous)?;
///         mapped += 1;
///     }
/// }
/// gather.finish(|_| ()); // published once
/// assert_eq!((mapped, platform.counts().publications), (15, 2)); // the other when it became live
/// # Ok::<(), EditError<Va>>(())
/// ```
pub struct Cursor<'g, 's, F: Format, P: Platform + Clone> {
    gather: &'g mut Gather<'s, F, P>,
    /// Which of the tables of pages it is in, counted from address 0; [`NOWHERE`] if in none.
    number: u64,
    frame: Pa,
}

/// More than there are tables of pages of any size.
const NOWHERE: u64 = u64::MAX;

impl<'s, F: Format, P: Platform + Clone> Gather<'s, F, P> {
    /// A cursor, for pages that are edited one by one.
    #[inline]
    pub fn cursor(&mut self) -> Cursor<'_, 's, F, P> {
        Cursor {
            gather: self,
            number: NOWHERE,
            frame: Pa::new(0),
        }
    }
}

impl<F: Format, P: Platform + Clone> Cursor<'_, '_, F, P> {
    /// The space that it is in.
    #[inline]
    pub fn space(&self) -> &AddressSpace<F, P> {
        self.gather
    }

    /// As [`AddressSpace::query`].
    #[inline]
    pub fn query(&mut self, input: F::Input) -> Option<Leaf<F>> {
        let input = input.bits();
        if !self.gather.translates(input) {
            return None;
        }
        let at = self.locate(input);
        let open = !self.gather.may_deny();
        self.gather.leaf_at(input, at, open)
    }

    /// As [`Gather::map_page`].
    ///
    /// # Errors
    /// As there; nothing has changed then.
    #[inline]
    pub fn map_page(
        &mut self,
        page: F::Input,
        frame: Pa,
        mapping: impl Template<F>,
    ) -> Result<(), EditError<F::Input>> {
        let at = self.locate_open(page)?;
        self.gather.map_at(page, at, frame, &mapping)
    }

    /// As [`Gather::protect_page`].
    ///
    /// # Errors
    /// As there; nothing has changed then.
    #[inline]
    pub fn protect_page(
        &mut self,
        page: F::Input,
        change: Change,
    ) -> Result<(), EditError<F::Input>> {
        let at = self.locate_open(page)?;
        self.gather.change_at(page.bits(), change, at)
    }

    /// As [`Gather::unmap_page`].
    ///
    /// # Errors
    /// As there; nothing has changed then.
    #[inline]
    pub fn unmap_page(
        &mut self,
        page: F::Input,
    ) -> Result<Option<Held<Leaf<F>>>, EditError<F::Input>> {
        let at = self.locate_open(page)?;
        self.gather.unmap_at(page.bits(), at)
    }

    /// The entry of a page, by the table that is kept if it is in that one.
    #[inline(always)]
    fn locate(&mut self, input: u64) -> Option<Located> {
        let number = input >> (F::PAGE_SHIFT + F::INDEX_BITS);
        if number != self.number {
            self.go(input, number)?;
        }
        Some(Located {
            frame: self.frame,
            index: F::index(input, Level::PAGE),
        })
    }

    /// The same of a page that has to be checked first, where the space is open.
    #[inline(always)]
    fn locate_open(&mut self, page: F::Input) -> Result<Option<Located>, EditError<F::Input>> {
        let page = self.gather.check_page(page)?.first;
        Ok(match self.gather.may_deny() {
            true => None,
            false => self.locate(page),
        })
    }

    /// Walks to another table, if there is one.
    #[inline(never)]
    fn go(&mut self, input: u64, number: u64) -> Option<()> {
        self.number = NOWHERE;
        let slice = Slice::around::<F>(input, Level::PAGE);
        let at = self.gather.locate(slice)?;
        (self.number, self.frame) = (number, at.frame);
        Some(())
    }
}
