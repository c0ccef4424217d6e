//! Replace: a page is in another frame from now on.
//!
//! What copy on write ends with, and what moves memory. The new frame is in the entry before the
//! old one is given out, and the old one is given out when it is forgotten. Where the architecture
//! demands a break between them, it is made here, and this is the one edit of a page that waits:
//! the page is to be used at once.

use super::map::Template;
use super::mapping::check_memory;
use crate::addr::{Level, Pa};
use crate::bbm::Transition;
use crate::edit::EditError;
use crate::edit::Gather;
use crate::flush::{Held, Leaf};
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::table::Table;

impl<F: Format, P: Platform + Clone> Gather<'_, F, P> {
    /// Maps the page at `page`, which is mapped, to `frame` instead. What was there comes out
    /// sealed, until every processor has forgotten it.
    ///
    /// A block or a run that it is part of is split first. On arm64 the page is briefly not mapped,
    /// if the space is live.
    ///
    /// # Errors
    /// As [`map`](Gather::map), and [`NotMapped`](EditError::NotMapped);
    /// [`NeedsBreak`](EditError::NeedsBreak), and [`OutOfTables`](EditError::OutOfTables) where
    /// something has to be split. Nothing has changed then.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Change, Pa, Span, Va, format::X86_64};
    /// # use tablewright_hosted::Hosted;
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// # space.map(Span::new(Va::new(0x7000), 0x1000)?, Pa::new(0x2000), Attrs::USER_RODATA)?;
    /// # space.make_live();
    /// // A write to a page that is shared: it has been copied to frame 0x9000.
    /// let mut gather = space.gather();
    /// let shared = gather.replace(Va::new(0x7000), Pa::new(0x9000), Attrs::USER_DATA)?;
    /// let completed = gather.issue().complete();
    /// let shared = completed.release(shared).expect("of this gather");
    /// assert_eq!(shared.frame(), Pa::new(0x2000)); // has one user less
    /// assert_eq!(space.query(Va::new(0x7123)).unwrap().frame(), Pa::new(0x9000));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn replace(
        &mut self,
        page: F::Input,
        frame: Pa,
        template: impl Template<F>,
    ) -> Result<Held<Leaf<F>>, EditError<F::Input>> {
        let slice = self.space.check_page(page)?;
        check_memory::<F>(frame, 1 << F::PAGE_SHIFT)?;
        let attrs = template.mapping().attrs();
        let new = F::with_address(template.page()?, frame);
        self.space.check_global(attrs.global)?;
        let conditions = self.space.conditions();
        let no_break = F::RULE.breaks && conditions.live && !conditions.may_break;
        let serial = self.serial();
        let denied = self.space.denied(slice.first);
        // Twice, if there is something to split.
        let (at, entry) = loop {
            let at = self.space.locate(slice.first);
            let entry = at.map_or(0, |at| {
                // SAFETY: a walk has come to it.
                unsafe { Table::open(&self.space.platform, at.frame, Level::PAGE) }.load(at.index)
            });
            let is_leaf = match at {
                Some(_) => F::kind(entry, Level::PAGE) == Kind::Leaf,
                None => self.space.leaf_above(slice.first).is_some(),
            };
            if !is_leaf {
                return Err(EditError::NotMapped(page));
            }
            if denied.intersects(attrs.perms) {
                return Err(EditError::Denied(page));
            }
            match at {
                Some(at) if entry & F::CONTIGUOUS == 0 => break (at, entry),
                // What it is to be split for will need a break.
                _ if no_break => return Err(EditError::NeedsBreak(page)),
                _ => self.cleave(slice)?,
            }
        };
        let space = &mut *self.space;
        // SAFETY: a walk has come to it.
        let table = unsafe { Table::open(&space.platform, at.frame, Level::PAGE) };
        let how = match conditions.live {
            true => conditions.replacement::<F>(entry, new),
            false => Transition::Store,
        };
        let breaks = F::RULE.breaks && how == Transition::Break;
        if breaks && !conditions.may_break {
            return Err(EditError::NeedsBreak(page));
        }
        if conditions.live {
            space.debt.begin_change();
        }
        space.debt.add_globals(attrs.global);
        let now = if breaks { 0 } else { new };
        let old = if conditions.is_contended::<F>(entry, Level::PAGE) {
            table.exchange(at.index, now)
        } else {
            table.store(at.index, now);
            entry
        };
        drop(table);
        if how == Transition::Store {
            space.debt.stored();
        } else {
            self.left.ranges.add_page(slice, Level::PAGE);
        }
        if breaks {
            self.complete_pending();
            let space = &mut *self.space;
            // SAFETY: as above.
            let table = unsafe { Table::open(&space.platform, at.frame, Level::PAGE) };
            table.store(at.index, new);
            space.debt.stored();
        }
        let leaf = Leaf::new(slice.first, old, Level::PAGE, denied);
        Ok(Held::new(leaf, serial))
    }
}
