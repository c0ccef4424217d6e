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
use crate::flush::{Held, Leaf, Ranges};
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::walk::descend;

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
    /// # use tablewright::{AddressSpace, Attrs, Change, Pa, Span, Va, format::X86_64, hosted::Hosted};
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
        let serial = self.serial();
        // Once, unless there is something to split.
        let (old, denied) = loop {
            let space = &mut *self.space;
            // SAFETY: the root of the space.
            match unsafe { descend::<F, P, false, false>(&space.platform, space.root, slice) } {
                Some(place) => {
                    let index = place.range.start;
                    let entry = place.table.load(index);
                    if F::kind(entry, Level::PAGE) != Kind::Leaf {
                        return Err(EditError::NotMapped(page));
                    }
                    let denied = space.denied(slice.first);
                    if denied.intersects(attrs.perms) {
                        return Err(EditError::Denied(page));
                    }
                    let how = match conditions.live {
                        true => conditions.replacement::<F>(entry, new),
                        false => Transition::Store,
                    };
                    let breaks = F::RULE.breaks() && how == Transition::Break;
                    if breaks && !conditions.may_break {
                        return Err(EditError::NeedsBreak(page));
                    }
                    if entry & F::CONTIGUOUS == 0 {
                        space.owed |= conditions.live;
                        space.globals |= attrs.global;
                        let now = if breaks { 0 } else { new };
                        let old = if conditions.is_contended::<F>(entry, Level::PAGE) {
                            place.table.exchange(index, now)
                        } else {
                            place.table.store(index, now);
                            entry
                        };
                        if breaks {
                            Ranges::run_one(&space.platform, space.target(), slice, Level::PAGE);
                            place.table.store(index, new);
                        }
                        if how == Transition::Invalidate {
                            self.left.ranges.add_page(slice, Level::PAGE);
                        } else {
                            self.left.news |= conditions.live;
                        }
                        break (old, denied);
                    }
                }
                None if space.leaf_above(slice.first).is_none() => {
                    return Err(EditError::NotMapped(page));
                }
                None if space.denies(slice.first, attrs.perms) => {
                    return Err(EditError::Denied(page));
                }
                None => {}
            }
            // What it is to be split for will need a break.
            if F::RULE.breaks() && conditions.live && !conditions.may_break {
                return Err(EditError::NeedsBreak(page));
            }
            self.space.cleave(slice)?;
        };
        let leaf = Leaf::new(slice.first, old, Level::PAGE, denied);
        Ok(Held::new(leaf, serial))
    }
}
