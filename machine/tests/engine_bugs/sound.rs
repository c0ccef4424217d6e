//! Ways in which safe code could once harm the engine, planted back: flushes that are lost, taken
//! for those of others, or complete too early; and changes of a space that are never said. Caught
//! by random sequences of the whole safe API.

use super::Bug;

const FORK: &str = "edit/fork.rs";
const RELOCATE: &str = "edit/relocate.rs";
const RING: &str = "dirty/ring.rs";
const FAULT: &str = "shared/fault.rs";
const LEAF: &str = "flush/leaf.rs";
const RANGES: &str = "flush/ranges.rs";
const GATHER: &str = "edit/gather.rs";
const KERNEL_HALF: &str = "kernel_half.rs";
const LOG: &str = "guest/log.rs";
const PLAN: &str = "edit/plan.rs";
const PROTECT: &str = "edit/protect.rs";
const GRACE: &str = "shared/grace.rs";
const RANGE: &str = "shared/range.rs";
const SHARED: &str = "shared/mod.rs";
const SHARED_GATHER: &str = "shared/gather.rs";
const PROTECT_ALL: &str = "shared/protect_all.rs";
const SPACE: &str = "edit/space.rs";
const SPLIT: &str = "edit/split.rs";
const ZAP: &str = "guest/zap.rs";
const UNMAP: &str = "edit/unmap.rs";
const X86: &str = "format/x86_64.rs";

/// Rules that memory breaks which is used again before it is forgotten, and of what is relied on
/// too early.
const FORGOTTEN: &[&str] = &[
    "break-before-make",
    "conflict",
    "freed early",
    "invalidation",
    "never invalidated",
    "program",
    "stale use",
];
/// The sequences say what the engine should have said.
const SAID: &[&str] = &["program"];

pub const BUGS: &[Bug] = &[
    // Leaves.
    Bug {
        name: "a page that cannot be written stays dirty for the hardware",
        file: X86,
        find: "u64::from(attrs.dirty) * «if writes != 0 { DIRTY } else { SAVED_DIRTY }»",
        with: "DIRTY",
        rules: &["reserved descriptor"],
    },
    Bug {
        name: "a shadow stack may not be written",
        file: X86,
        find: "(has(USER), «has(Self::WRITES)», !has(NO_EXECUTE))",
        with: "has(WRITE)",
        rules: SAID,
    },
    Bug {
        name: "pages are broken by their old form, and come back in it",
        file: PROTECT,
        find: "(self.recent.plan.key(), «withheld::<F>(self.recent.plan.result())»)",
        with: "withheld::<F>(self.recent.plan.key())",
        rules: SAID,
    },
    // Moves.
    Bug {
        name: "what was moved is not invalidated where it was",
        file: RELOCATE,
        find: "let changed = moving.changed;\n        «self.note(changed);»",
        with: "",
        rules: &["never invalidated", "stale use", "freed early", "invalidation", "program"],
    },
    // Flushes of one processor.
    Bug {
        name: "what a forgotten gather owes is not paid",
        file: GATHER,
        find: "left.ranges.everything = «self.debt.is_flush_pending()»;",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a gather that is dropped loses what it has gathered",
        file: GATHER,
        find: "if «self.space.debt.is_flush_pending() || !left.detached.is_empty()» {\n            \
               self.flush_rest();",
        with: "{ self.space.debt.complete(); false }",
        rules: FORGOTTEN,
    },
    Bug {
        name: "what was issued and forgotten is complete",
        file: GATHER,
        find: "if «!wait» {\n            space.debt.complete();",
        with: "true",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a gather that is finished does not wait",
        file: GATHER,
        find: "if «self.send()» {",
        with: "{ self.send(); false }",
        rules: FORGOTTEN,
    },
    Bug {
        name: "what was issued is complete at once",
        file: GATHER,
        find: "if «self.wait» {\n            self.space.platform.barrier",
        with: "{ self.space.debt.complete(); false }",
        rules: FORGOTTEN,
    },
    // Levels, and tables.
    Bug {
        name: "the level of one leaf is that of two",
        file: RANGES,
        find: "if item.level != level {\n                    «item.level = None;»",
        with: "",
        rules: FORGOTTEN,
    },
    Bug {
        name: "tables are forgotten in a merge",
        file: RANGES,
        find: "«item.tables |= tables;»",
        with: "",
        rules: FORGOTTEN,
    },
    // Edits that are not complete.
    Bug {
        name: "a collapse in place on x86 does not count any more when it returns",
        file: FAULT,
        find: "«space.platform().barrier(Barrier::Publish);\n        Ok(Mapped::Collapsed)»",
        with: "if !F::RULE.spares_other_levels { self.count.end(); } Ok(Mapped::Collapsed)",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a protect does not count",
        file: RANGE,
        find: "if plan.invalidate {\n                «self.count.begin();»",
        with: "",
        rules: FORGOTTEN,
    },
    Bug {
        name: "an unmap of tables and blocks does not count",
        file: RANGE,
        find: "«self.count.begin();»\n            match (",
        with: "",
        rules: FORGOTTEN,
    },
    Bug {
        name: "an unmap of pages does not count",
        file: RANGE,
        find: "«self.count.begin();»\n                match table",
        with: "",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a shared gather that is dropped counts as complete",
        file: SHARED_GATHER,
        find: "«let _finished = self.finish(|_| ());»",
        with: "self.count.end();",
        rules: FORGOTTEN,
    },
    Bug {
        name: "what was issued and dropped counts as complete",
        file: SHARED_GATHER,
        find: "fn drop(&mut self) {\n        «self.end();»",
        with: "self.count.end();",
        rules: FORGOTTEN,
    },
    // The space that a flush is of.
    Bug {
        name: "an exclusive edit invalidates another identity",
        file: SPACE,
        find: "id: «self.id», global:",
        with: "0",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a shared edit invalidates another identity",
        file: SHARED,
        find: "Target { global, ..«self.space.target()» }",
        with: "{ let mut it = self.space.target(); it.id = 0; it }",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a leaf is released by the flush of others",
        file: "flush/leaf.rs",
        find: "match «held.is_of(self.serial)» {",
        with: "true",
        rules: FORGOTTEN,
    },
    Bug {
        name: "the flushes of each space are numbered from one",
        file: LEAF,
        find: "0 => «BLOCKS.fetch_add(1, Ordering::Relaxed) * BLOCK + 1»,",
        with: "BLOCK + 1",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a live space takes another identity",
        file: SPACE,
        find: "if «self.liveness == Liveness::Dead» {\n            self.id",
        with: "true",
        rules: SAID,
    },
    Bug {
        name: "a zap takes the gather of another guest",
        file: ZAP,
        find: "match «core::ptr::eq(self.guest, gather.guest)» {",
        with: "true",
        rules: SAID,
    },
    // Walks of software.
    Bug {
        name: "a walk that ends ends those around it",
        file: GRACE,
        find: "if «depth == 0» {",
        with: "true",
        rules: SAID,
    },
    // What a space translates.
    Bug {
        name: "a shared edit of a range does not know the half",
        file: SHARED,
        find: "«self.space.check(span)»",
        with: "crate::edit::cache::Reach::of_root::<F>(crate::Half::Lower).check::<F>(span)",
        rules: SAID,
    },
    Bug {
        name: "a shared edit of an address does not know the half",
        file: SHARED,
        find: "«self.space.translates(input.bits())»",
        with: "crate::edit::cache::Reach::of_root::<F>(crate::Half::Lower).holds(input.bits(), \
               input.bits())",
        rules: SAID,
    },
    Bug {
        name: "a range over the hole is translated",
        file: "edit/cache.rs",
        find: "«first <= last && last < self.size»",
        with: "last < self.size",
        rules: &["program", "no end", "crash", "freed early"],
    },
    Bug {
        name: "a split does not look where it is",
        file: RANGE,
        find: "-> Result<bool, Refused<F::Input>> {\n        if «!self.space.translates(input)» {",
        with: "false",
        rules: &["program", "walk astray", "panic"],
    },
    // From one processor to many, and back.
    Bug {
        name: "runs are kept in a space that is shared",
        file: SPLIT,
        find: "if «self.space.debt.has_runs()» {\n            if self",
        with: "false",
        rules: &["broken run", "break-before-make", "invalidation", "conflict"],
    },
    Bug {
        name: "a dead space is shared, and not published",
        file: SPLIT,
        find: "self.left.needs_publish |= «!self.space.is_live()»;",
        with: "false",
        rules: &["linked early", "no progress", "program", "walk astray"],
    },
    Bug {
        name: "what is frozen is taken for suspended",
        file: SHARED,
        find: "unclaim: «self.has_seen_unfinished(0)»,",
        with: "false",
        rules: &[
            "invalidation",
            "program",
            "walk astray",
            "freed early",
            "break-before-make",
            "panic",
            "stale use",
        ],
    },
    // Visitors that unwind.
    Bug {
        name: "an unmap of pages of one table that unwinds is not forgotten",
        file: UNMAP,
        find: "begin_unnamed(«live»)",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "an unmap that unwinds is not forgotten",
        file: UNMAP,
        find: "begin_unnamed(«conditions.live»)",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a shared unmap that unwinds is not forgotten",
        file: RANGE,
        find: "begin_unnamed(«true»);\n        let mut unmap",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a shared change that unwinds is not forgotten",
        file: RANGE,
        find: "begin_unnamed(«true»);\n        let mut protect",
        with: "false",
        rules: FORGOTTEN,
    },
    // Global translations.
    Bug {
        name: "an exclusive edit does not say that it means global translations",
        file: SPACE,
        find: "global: «self.debt.has_globals()» }",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a shared edit does not say that it means global translations",
        file: SHARED,
        find: "            global = self.globals.load(Ordering::Relaxed) != NO_GLOBALS;\n        \
               «}»",
        with: "} if PLANTED { global = false; }",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a shared map does not say that it maps what is global",
        file: FAULT,
        find: "space.map_global(«leaf.attrs.global»);",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a shared change does not say that it makes leaves global",
        file: RANGE,
        find: "space.map_global(«change.turns_global()»);",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a change does not say that it makes leaves global",
        file: PROTECT,
        find: "self.debt.add_globals(«change.turns_global()»);",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a page that is unmapped is not owed",
        file: "edit/unmap.rs",
        find: "«space.debt.begin_change();»\n        table.store(at.index, 0);",
        with: "",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a range of pages that is unmapped is not owed",
        file: UNMAP,
        find: "«self.begin_change();»\n        // If the visitor unwinds",
        with: "",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a page like the last is protected and not owed",
        file: PROTECT,
        find: "«space.debt.begin_change();»\n            table.store(at.index, now);",
        with: "",
        rules: FORGOTTEN,
    },
    Bug {
        name: "pages are near whose tables an unmap has cut off",
        file: UNMAP,
        find: "«table.detach(index, 0, self.cache)»;",
        with: "table.store(index, 0)",
        // An edit writes a leaf where a table was, which is one elsewhere by then.
        rules: &["walk astray", "freed early", "invalidation", "program"],
    },
    Bug {
        name: "pages are near whose tables a collapse has cut off",
        file: "edit/collapse.rs",
        find: "«table.detach(index, new, self.cache)»;",
        with: "table.store(index, new)",
        rules: FORGOTTEN,
    },
    // Edits of one gather that meet what earlier ones have left.
    Bug {
        name: "a map does not wait for what the gather has unmapped",
        file: GATHER,
        find: "if «self.left.ranges.overlap(slice)» {",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a page is mapped where a forgotten gather has unmapped",
        file: "edit/map.rs",
        find: "if F::RULE.breaks && «self.debt.is_flush_pending()» {",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a break leaves what else is pending",
        file: "edit/drive.rs",
        find: "fn resume(&mut self, slice: Slice) {\n        «self.complete_pending();»",
        with: "{ let mut own = crate::flush::Ranges::new(); own.add(slice, Some(Level::PAGE), \
               false); own.run::<F, P>(&self.space.platform, self.space.target()); }",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a replace breaks its own page alone",
        file: "edit/replace.rs",
        find: "self.left.ranges.add_page(slice, Level::PAGE);\n        }\n        if breaks \
               {\n            «self.complete_pending();»",
        with: "{ let mut own = crate::flush::Ranges::new(); own.add_page(slice, Level::PAGE); \
               own.run::<F, P>(&self.space.platform, self.space.target()); }",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a fork stores a block over an empty table",
        file: "edit/fork.rs",
        find: "if «F::kind(entry, at) == Kind::Table» {\n                    let child",
        with: "false",
        rules: &[
            "program",
            "walk astray",
            "freed early",
            "panic",
            "break-before-make",
            "invalidation",
        ],
    },
    // Two spaces, and a page in another frame.
    Bug {
        name: "what a fork has protected is not forgotten",
        file: "edit/fork.rs",
        find: "«self.gather.changed(self.slice, left)»;",
        with: "()",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a page is in another frame, and the first is remembered",
        file: "edit/replace.rs",
        find: "if «how == Transition::Store» {\n            space.debt.stored();",
        with: "how != Transition::Break",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a page is in another frame before the first is forgotten",
        file: "edit/replace.rs",
        find: "let now = «if breaks { 0 } else { new }»;",
        with: "new",
        rules: FORGOTTEN,
    },
    // The half that all roots share.
    Bug {
        name: "a user's space is the kernel's half as well",
        file: KERNEL_HALF,
        find: "«user.limit_to(Half::Lower);»",
        with: "",
        rules: &["freed early", "program", "walk astray"],
    },
    Bug {
        name: "a table that all roots share is detached from one",
        file: UNMAP,
        find: "«self.pinned && level == F::root_level()»",
        with: "false",
        rules: &["freed early", "program", "walk astray", "invalidation"],
    },
    // Write-protected tables, and what was looked up before.
    Bug {
        name: "a table with a claim in it is opened",
        file: PROTECT_ALL,
        find: "if «!is_taken::<F>(entry)» {\n                            claimed",
        with: "false",
        rules: SAID,
    },
    Bug {
        name: "a page is reopened by a request from before a log",
        file: LOG,
        find: "let _walk = self.space.platform().enter();\n        if \
               «!self.slots.is_current(request.version)» {\n            return \
               Err(Refused::Retry);\n        }\n        let at",
        with: "false",
        rules: SAID,
    },
    // Leaves without permissions.
    Bug {
        name: "what is parked is not invalidated",
        file: PLAN,
        find: "Transition::Invalidate => «INVALIDATE»,",
        with: "if parks { PUBLISH } else { INVALIDATE }",
        rules: FORGOTTEN,
    },
    Bug {
        name: "what is parked names memory on x86",
        file: X86,
        find: "PARKED) ^ «Self::address_mask(level)»",
        with: "0",
        rules: &["forbidden memory", "program"],
    },
    // What is lent for a time.
    Bug {
        name: "a ring moves when all of it is harvested",
        file: RING,
        find: "«self.harvested.store(number, Ordering::Relaxed);»",
        with: "if self.entry(number).flags.load(Ordering::Acquire) != WRITTEN { \
               self.harvested.store(number, Ordering::Relaxed) }",
        rules: SAID,
    },
    Bug {
        name: "two take at a time",
        file: "offer.rs",
        find: "let busy = «self.0.swap(true, Ordering::Acquire)»;",
        with: "{ self.0.swap(true, Ordering::Acquire); false }",
        rules: SAID,
    },
    Bug {
        name: "entries that are dropped are lost",
        file: RING,
        find: "«impl Collected<'_> {»",
        with: "impl Drop for Collected<'_> { fn drop(&mut self) { if PLANTED { \
               self.ring.collected.fetch_max(self.last, Ordering::Relaxed); } } } \
               impl Collected<'_> {",
        rules: SAID,
    },
    Bug {
        name: "entries are released twice",
        file: RING,
        find: "let first = «self.ring.collected.load(Ordering::Relaxed).max(self.first)»;",
        with: "self.first",
        rules: SAID,
    },
    Bug {
        name: "marks of a visitor that unwinds are lost",
        file: "dirty/bitmap.rs",
        find: "let put_back = || {\n        «word.fetch_or(bits, Ordering::Release);»",
        with: "",
        rules: SAID,
    },
    Bug {
        name: "a flush of a visitor that unwinds is lost",
        file: "hyperv/host.rs",
        find: "offer(|| «self.push(pages)», || each(pages));",
        with: "",
        rules: SAID,
    },
    Bug {
        name: "a processor that is taken off twice is not flushed",
        file: "shootdown/deferred.rs",
        find: "«self.0.fetch_or(Self::PREEMPTED, Ordering::Release);»",
        with: "self.0.store(Self::PREEMPTED, Ordering::Release);",
        rules: SAID,
    },
    Bug {
        name: "a harvest believes any slot",
        file: LOG,
        find: "if «own != Some(Packed::new(*slot))» {",
        with: "false",
        rules: SAID,
    },
    Bug {
        name: "hardware that marks nothing has a log",
        file: "guest/mod.rs",
        find: "let by_hardware = «matches!(slot.log, Log::ByHardware | Log::ByModification)»;",
        with: "false",
        rules: SAID,
    },
    Bug {
        name: "a start that is dropped is under way",
        file: PROTECT_ALL,
        find: "generation.store(«generation.load(Relaxed) & !STARTING | dropped», Release);",
        with: "generation.load(Relaxed) | dropped",
        rules: SAID,
    },
    // What a child is not told.
    Bug {
        name: "a fork does not say that it makes leaves global",
        file: FORK,
        find: "child.space.debt.add_globals(«globals»);",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a child has no runs",
        file: FORK,
        find: "child.space.note_runs(«self.space.debt.has_runs()»);",
        with: "false",
        rules: &["broken run", "break-before-make", "invalidation", "conflict", "program"],
    },
    Bug {
        name: "a page in the place of another is not global",
        file: "edit/replace.rs",
        find: "space.debt.add_globals(«attrs.global»);",
        with: "false",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a table is linked where the gather has detached one",
        file: SPLIT,
        find: "«self.complete_overlap(slice.first, slice.last);»",
        with: "",
        rules: FORGOTTEN,
    },
    Bug {
        name: "a walker goes on believing that nothing was mapped",
        file: "edit/map.rs",
        find: "if «self.space.platform.caps().invalid_entries_cached» {",
        with: "false",
        rules: &["program"],
    },
    Bug {
        name: "a run that was parked comes back before it is forgotten",
        file: PROTECT,
        find: "has_runs() && !change.gives().is_empty() {\n            \
               «self.complete_overlap(slice.first, slice.last);»",
        with: "",
        rules: FORGOTTEN,
    },
];
