//! Logging what a guest writes: see [`dirty`](crate::dirty) for the order in which it has to be
//! done.

use core::ops::Range;

use crate::addr::{Ipa, Level, Span};
use crate::dirty::{Bitmap, Marker, ModificationLog, marked};
use crate::edit::Change;
use crate::edit::EditError;
use crate::format::{Attrs, Format, Perms};
use crate::shared::{Protected, Refused, Relaxed, SharedPlatform, Unprotectable};

use super::slots::Packed;
use super::{Access, Backing, CLAIM, Gather, Guest, HOST_WRITES, Log, Request, Slot, SlotError};

bitflags::bitflags! {
    /// Options of a harvest.
    ///
    /// ```
    /// use tablewright::guest::Harvest;
    /// assert_eq!(Harvest::default(), Harvest::empty()); // pages are protected again
    /// assert!(Harvest::from_bits(1 << 7).is_none());
    /// ```
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Harvest: u32 {
        /// The pages stay writable: all memory is protected in one step after this, before anything
        /// is copied.
        const KEEP = 1 << 0;
    }
}

impl<'s, F: Format<Input = Ipa>, P: SharedPlatform + Clone> Guest<'s, F, P> {
    /// Marks the page of `slot` at `at` as written: after it was made writable, and before the
    /// virtual CPU goes on; or after the host has written it.
    pub fn mark(&self, marker: &Marker<'_>, slot: &Slot, at: Ipa) {
        let _walk = self.space.platform().enter();
        let distance = at.get().wrapping_sub(slot.guest.start().get());
        marker.mark(distance >> F::PAGE_SHIFT);
    }

    /// Gives back what the log, or the protection of a table, has taken from the page of a request,
    /// without asking the host for it: what was mapped there is still the page, or it would have
    /// been zapped. No lock is taken, and nothing is allocated. Whether that was all; if not, the
    /// page has to be looked up and mapped. A page that is written is to be marked afterwards as
    /// after a map.
    ///
    /// A large leaf of a slot that is logged is not made writable: only one page of it would be
    /// marked.
    ///
    /// # Errors
    /// [`Refused::Busy`], [`Refused::Retry`].
    pub fn reopen(&self, request: &Request) -> Result<bool, Refused<Ipa>> {
        let writes = request.access == Access::Write;
        let _walk = self.space.platform().enter();
        if !self.slots.is_current(request.version) {
            return Err(Refused::Retry);
        }
        let at = Ipa::new(request.at);
        // SAFETY: a walk is entered (1.).
        unsafe { self.space.open_walking(at, writes)? };
        let logged = request.slot.log().is_on();
        let given = match writes {
            true => Perms::ANY_WRITE,
            false => Perms::empty(),
        };
        let is_right = |attrs: &Attrs, level| {
            let host = attrs.software & HOST_WRITES != 0 && (level == Level::PAGE || !logged);
            // Neither the log nor a write-protected table takes reading away: what is parked, the
            // host has parked.
            let parked = attrs.perms.is_empty();
            !parked && (host || !writes) && (attrs.perms | given).contains(request.access.perms())
        };
        // SAFETY: a walk is entered (1.).
        let reopened = unsafe { self.space.relax_if(at, given, writes, is_right) };
        match reopened {
            Ok(relaxed) => Ok(relaxed != Relaxed::Absent),
            Err(Refused::Denied) => Ok(false),
            Err(refused) => Err(refused),
        }
    }

    /// Marks what the modification log of this virtual CPU has, which has left its guest; `index`
    /// is the register's, which is [set](ModificationLog::FIRST) anew afterwards. `bitmap` gives
    /// that of a slot. Addresses outside of slots, and of slots that are not [logged
    /// so](Log::ByModification), are left out. Returns how many pages were marked.
    ///
    /// A virtual CPU does it each time that it leaves the guest, and whenever the host is about to
    /// harvest it is made to leave; what is not drained yet is found by a later harvest.
    ///
    /// # Errors
    /// [`SlotError::Busy`]: the slots are being changed. The log stands as it is, to be drained
    /// again; nothing is marked that was not written.
    pub fn drain<'b>(
        &self,
        log: &ModificationLog<'_>,
        index: u16,
        mut bitmap: impl FnMut(&Slot) -> Option<&'b Bitmap<'b>>,
    ) -> Result<u64, SlotError> {
        let mut marked = 0;
        for at in log.written(index) {
            let (slot, _) = self.slots.find(at.get())?;
            let Some(slot) = slot.map(|slot| slot.slot()) else {
                continue;
            };
            if slot.log == Log::ByModification
                && let Some(bitmap) = bitmap(&slot)
            {
                self.mark(&Marker::Bitmap(bitmap), &slot, at);
                marked += 1;
            }
        }
        Ok(marked)
    }

    /// The addresses of some pages of a slot that is logged, and is the guest's own: an older copy
    /// may say otherwise how its pages are closed.
    fn pages(&self, slot: &Slot, pages: &Range<u64>) -> Result<Option<Span<Ipa>>, SlotError> {
        let (own, _) = self.slots.find(slot.guest.start().get())?;
        if own != Some(Packed::new(*slot)) {
            return Err(SlotError::Unknown);
        }
        if !slot.log.is_on() {
            return Err(SlotError::NotLogged(slot.id));
        }
        let count = slot.guest.size() >> F::PAGE_SHIFT;
        match pages.end <= count {
            true => Ok(Self::span_of(slot, pages)),
            false => Err(SlotError::Pages(count)),
        }
    }

    /// The addresses of pages that a slot has; `None` for no pages.
    fn span_of(slot: &Slot, pages: &Range<u64>) -> Option<Span<Ipa>> {
        // The range may be empty and start at any number, which overflows below.
        let count = pages.end.checked_sub(pages.start)?;
        let first = slot.guest.start().get() + (pages.start << F::PAGE_SHIFT);
        Span::new(Ipa::new(first), count << F::PAGE_SHIFT).ok()
    }

    /// Nothing is logged any more: what is
    /// [write-protected](crate::shared::SharedSpace::protect_all) need not be protected when it is
    /// opened.
    ///
    /// # Errors
    /// [`Unprotectable::Logged`], [`Unprotectable::Busy`].
    pub fn protect_no_more(&self) -> Result<(), Unprotectable> {
        match self.slots.any(|slot| slot.log == Log::ByFault) {
            Ok(false) => self.space.protect_no_more(),
            Ok(true) => Err(Unprotectable::Logged),
            Err(_) => Err(Unprotectable::Busy),
        }
    }
}

impl<F: Format<Input = Ipa>, P: SharedPlatform + Clone> Gather<'_, '_, F, P> {
    /// Takes the permission to write from pages of a slot that is logged, for the log: the first
    /// write faults, and is given back by [`reopen`](Guest::reopen). They may be copied when the
    /// gather is finished.
    ///
    /// What was [passed over](Protected::passed_over) is not protected.
    ///
    /// # Errors
    /// [`SlotError::Unknown`] and [`SlotError::Busy`] unless `slot` is the guest's,
    /// [`SlotError::NotLogged`], [`SlotError::Pages`].
    pub fn protect(&mut self, slot: &Slot, pages: Range<u64>) -> Result<Protected, SlotError> {
        let span = self.guest.pages(slot, &pages)?;
        Ok(span.map_or_else(Protected::default, |span| self.write_protect(span)))
    }

    fn write_protect(&mut self, span: Span<Ipa>) -> Protected {
        let change = Change::new().write_protect();
        // Pages of a slot lie where the format translates, and what is mapped can lose this.
        self.gather.protect(span, change).unwrap_or_default()
    }

    /// Begins a log [by modification](Log::ByModification) of a slot that is logged so already, and
    /// in whose look-ups from before no walk is left: all that hardware would not log is closed.
    /// Pages are made clean, so that the first write to each is logged; large leaves, of which
    /// hardware would log one page, lose the permission to write, and are taken apart by the first
    /// write. **The first copy is made when the gather is finished.**
    ///
    /// What was [passed over](Protected::passed_over) was being changed by another edit: begin
    /// again.
    ///
    /// # Errors
    /// [`SlotError::Unknown`] and [`SlotError::Busy`] unless `slot` is the guest's;
    /// [`SlotError::NotLogged`], also of a slot that is logged in another way.
    pub fn begin_modification_log(&mut self, slot: &Slot) -> Result<Protected, SlotError> {
        if slot.log != Log::ByModification {
            return Err(SlotError::NotLogged(slot.id));
        }
        let space = self.guest.space();
        self.guest.pages(slot, &(0..0))?;
        let mut sum = Protected::default();
        let mut add = |done: Protected| {
            sum.changed |= done.changed;
            sum.passed_over |= done.passed_over;
        };
        // Large leaves first. None is put into a slot that is logged, so what is split out of one
        // from here on is closed with it, or is made clean below.
        let (start, last) = (slot.guest.start(), slot.guest.last());
        let mut from = Some(start);
        while let Some(at) = from
            && let Ok(rest) = Span::inclusive(at, last)
            && let Ok(Some(large)) = space.first_large(rest)
        {
            let end = space
                .query(large)
                .map_or(large.get(), |leaf| leaf.input().get() + (leaf.size() - 1));
            let page = |at: u64| (at - start.get()) >> F::PAGE_SHIFT;
            let end = end.clamp(large.get(), last.get());
            add(self.protect(slot, page(large.get())..page(end) + 1)?);
            from = (end < last.get())
                .then(|| Ipa::new(start.get() + ((page(end) + 1) << F::PAGE_SHIFT)));
        }
        add(self.clean(slot.guest));
        Ok(sum)
    }

    /// Has hardware log the next write to each page.
    fn clean(&mut self, span: Span<Ipa>) -> Protected {
        // Pages of a slot lie where the format translates, and what is dirty can be clean.
        self.gather.clear_dirty(span, |_| ()).unwrap_or_default()
    }

    /// Takes the marks of pages away, gives them out as [`Bitmap::harvest`] does, and protects the
    /// pages again. **They may be copied when the gather is finished**, not before.
    ///
    /// Where hardware marks what was written, its marks are collected first.
    ///
    /// # Errors
    /// As for [`protect`](Gather::protect), and [`SlotError::Flags`]; nothing has changed.
    pub fn harvest(
        &mut self,
        slot: &Slot,
        bitmap: &Bitmap<'_>,
        pages: Range<u64>,
        how: Harvest,
        mut each: impl FnMut(u64, u64),
    ) -> Result<(), SlotError> {
        if !Harvest::all().contains(how) {
            return Err(SlotError::Flags(how.bits()));
        }
        let span = self.guest.pages(slot, &pages)?;
        if slot.log == Log::ByHardware
            && let Some(span) = span
        {
            self.collect(slot, bitmap, span);
        }
        let protects = slot.log == Log::ByFault && !how.contains(Harvest::KEEP);
        let cleans = slot.log == Log::ByModification;
        bitmap.harvest(pages, |first, bits| {
            each(first, bits);
            for run in marked(first, bits).filter(|_| protects || cleans) {
                let span = Guest::<F, P>::span_of(slot, &run);
                let closed = match span {
                    // A flag that is set until it is cleared is of a write before the copy.
                    Some(span) if cleans => self.clean(span),
                    Some(span) => self.write_protect(span),
                    None => Protected::default(),
                };
                match closed.passed_over {
                    false => {}
                    // It is not closed, and may be written: it is marked until it is.
                    _ => bitmap.mark_range(run),
                }
            }
        });
        Ok(())
    }

    /// Marks what hardware has found to be written, and has it begin anew.
    fn collect(&mut self, slot: &Slot, bitmap: &Bitmap<'_>, span: Span<Ipa>) {
        let start = slot.guest.start().get();
        let written = |first: u64, size: u64| {
            // A leaf may reach over the ends of the slot.
            let from = first.saturating_sub(start) >> F::PAGE_SHIFT;
            let to = (first + size).saturating_sub(start) >> F::PAGE_SHIFT;
            bitmap.mark_range(from..to);
        };
        // Pages of a slot lie where the format translates, and what is dirty can be clean.
        let _ = self.gather.clear_dirty(span, |leaf| written(leaf.input().get(), leaf.size()));
    }

    /// Splits large leaves into pages before they are written, in a range of a slot, with the
    /// tables that are there. Faults need not do it then. Returns how far it has come: all of the
    /// range, or up to where tables ran out, or a leaf was being changed. On x86 what was split is
    /// forgotten when the gather is finished.
    ///
    /// # Errors
    /// [`EditError::Misaligned`], [`EditError::InputOutOfRange`].
    pub fn split_range(&mut self, span: Span<Ipa>) -> Result<Option<Ipa>, EditError<Ipa>> {
        let mut rest = span;
        while let Some(large) = self.guest.space.first_large(rest)? {
            if self.gather.split(large, Level::PAGE).is_err() {
                return Ok(Some(large));
            }
            // It lies in the range.
            rest = Span::inclusive(large, span.last()).unwrap_or(rest);
        }
        Ok(None)
    }

    /// Puts the largest leaf back that the page and the slot allow, in the place of the table that
    /// is there, after a log has ended; the request is one to read that was made up, and its page
    /// was looked up after it. In place where the architecture allows it, and then forgotten with
    /// all that the gather has; until it is finished every other edit of the guest invalidates more
    /// than it has to. Where a break is needed, the entry is invalid for one exchange, one
    /// invalidation and one store. What was below is reclaimed with the gather.
    ///
    /// Whether a leaf was put there. Not if writes are logged, or pages are all that fits, or
    /// something else than a table is there.
    ///
    /// # Errors
    /// [`Refused`]; [`Refused::Retry`] also if no more can be carried: finish the gather, and go
    /// on.
    pub fn collapse(&mut self, request: &Request, page: &Backing) -> Result<bool, Refused<Ipa>> {
        let guest = self.guest;
        if request.slot.log().is_on() {
            return Ok(false);
        }
        let frame = page.frame.get();
        let top = guest.fitting(request.at, frame, &request.slot, page.size);
        let leaf_at = |level| guest.leaf(request, page, level);
        let leaf = leaf_at(top)?;
        let _walk = guest.space.platform().enter();
        if !guest.slots.is_current(request.version) {
            return Err(Refused::Retry);
        }
        let leaf = guest.space.affordable(request.at, leaf, CLAIM, leaf_at)?;
        // SAFETY: a walk is entered (1.).
        unsafe { self.gather.collapse_walking(&leaf) }
    }
}
