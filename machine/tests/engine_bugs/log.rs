//! Bugs planted into the log of a guest's writes, and caught where a guest is migrated.

use super::Bug;

const BITMAP: &str = "dirty/bitmap.rs";
const FAULT: &str = "shared/fault.rs";
const GUEST: &str = "guest/mod.rs";
const LOG: &str = "guest/log.rs";
const RING: &str = "dirty/ring.rs";
const PROTECT_ALL: &str = "shared/protect_all.rs";
const ZAP: &str = "guest/zap.rs";

pub const BUGS: &[Bug] = &[
    // Harvests.
    Bug {
        name: "a harvest does not mark again what it has passed over",
        file: LOG,
        find: "_ => «bitmap.mark_range(run)»,",
        with: "drop(run);",
        rules: &["program"],
    },
    Bug {
        name: "a harvest of some pages takes the marks of their neighbours",
        file: BITMAP,
        find: "_ => «word.fetch_and(!mask, Ordering::AcqRel) & mask»,",
        with: "word.swap(0, Ordering::AcqRel) & mask",
        rules: &["program"],
    },
    Bug {
        name: "a harvest protects nothing",
        file: LOG,
        find: "let protects = «slot.log == Log::ByFault && !how.contains(Harvest::KEEP)»;",
        with: "false",
        rules: &["program"],
    },
    Bug {
        name: "a harvest has hardware log nothing again",
        file: LOG,
        find: "let cleans = «slot.log == Log::ByModification»;",
        with: "false",
        rules: &["program"],
    },
    Bug {
        name: "a log by modification begins, and large leaves can be written",
        file: LOG,
        find: "«add(self.protect(slot, page(large.get())..page(end) + 1)?);»",
        with: "",
        rules: &["program"],
    },
    Bug {
        name: "a log by modification begins, and pages are dirty",
        file: LOG,
        find: "«add(self.clean(slot.guest));»",
        with: "",
        rules: &["program"],
    },
    Bug {
        name: "a write that faults is left to hardware's log",
        file: GUEST,
        find: "let is_marked = «matches!(self.slot.log(), Log::ByFault | Log::ByModification)»;",
        with: "self.slot.log() == Log::ByFault",
        rules: &["program"],
    },
    Bug {
        name: "a harvest clears what hardware has marked",
        file: LOG,
        find: "«bitmap.mark_range(from..to);»",
        with: "let _ = from..to;",
        rules: &["program"],
    },
    Bug {
        name: "a large leaf that hardware has marked is one page in the log",
        file: LOG,
        find: "let to = «(first + size).saturating_sub(start) >> F::PAGE_SHIFT»;",
        with: "from + 1",
        rules: &["program"],
    },
    // What is writable without having been marked.
    Bug {
        name: "a read reopens a page to be written",
        file: LOG,
        find: "false => «Perms::empty()»,\n        };\n        let is_right",
        with: "Perms::ANY_WRITE",
        rules: &["program"],
    },
    Bug {
        name: "a read maps a page to be written",
        file: GUEST,
        find: "if «slot.log == Log::ByFault && access != Access::Write» {",
        with: "false",
        rules: &["program"],
    },
    Bug {
        name: "a log that starts again finds tables open as after the last",
        file: PROTECT_ALL,
        find: "let next = «generation & !OFF | STARTING»;",
        with: "generation | STARTING",
        rules: &["program"],
    },
    Bug {
        name: "a zap does not come back for what it has passed over",
        file: ZAP,
        find: "«self.again |= passed_over;»",
        with: "let _ = passed_over;",
        rules: &["program", "freed early", "stale use"],
    },
    Bug {
        name: "a block that takes the place of a table has it forgotten later",
        file: FAULT,
        find: "true => «forget_now(space)»,",
        with: "self.flush.ranges.add(leaf.slice(), None, true)",
        rules: &["break-before-make", "freed early", "stale use", "program"],
    },
    Bug {
        name: "a collapse in place does not count as an edit",
        file: FAULT,
        find: "if «!now» {\n                self.count.begin();",
        with: "!F::RULE.spares_other_levels",
        rules: &["break-before-make", "freed early", "stale use", "program"],
    },
    // Rings.
    Bug {
        name: "a ring always has room",
        file: RING,
        find: "«next.flags.load(Ordering::Acquire) == EMPTY»\n",
        with: "true",
        rules: &["program"],
    },
    Bug {
        name: "an entry of a ring is empty when it is harvested",
        file: RING,
        find: "entry.flags.store(«HARVESTED», Ordering::Release);",
        with: "EMPTY",
        rules: &["program"],
    },
    Bug {
        name: "what was collected from a ring is collected again",
        file: RING,
        find: "«self.ring.collected.store(self.last, Ordering::Relaxed);»",
        with: "",
        rules: &["program"],
    },
];
