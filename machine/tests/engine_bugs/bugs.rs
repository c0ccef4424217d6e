//! Planted bugs: a place in the engine, and what stands there instead.

use super::Bug;

const RECLAIM: &str = "flush/reclaim.rs";
const FAULT: &str = "shared/fault.rs";
const RANGE: &str = "shared/range.rs";
const GATHER: &str = "shared/gather.rs";
const GUEST: &str = "guest/mod.rs";
const ZAP: &str = "guest/zap.rs";
const LOG: &str = "guest/log.rs";
const PROTECT_ALL: &str = "shared/protect_all.rs";
const PRUNE: &str = "shared/prune.rs";

pub const BUGS: &[Bug] = &[
    // Claims, and CPUs that lose one.
    Bug {
        name: "an entry is claimed by a load and a store",
        file: FAULT,
        find: "«found.replace(expected, claim)?;»\n        work(self);",
        with: "if found.table.load(found.index) != expected { return \
               Err(found.table.load(found.index)); } found.table.store(found.index, claim);",
        rules: &[
            "break-before-make",
            "freed early",
            "flag lost",
            "program",
            "stale use",
            "invalidation",
        ],
    },
    Bug {
        name: "a CPU that loses the race for a table takes that of the winner",
        file: FAULT,
        find: "«// Another processor was first. The tables go back as they came.»\n",
        with: "let now = if PLANTED { found.table.load(found.index) } else { 0 }; \
               if F::kind(now, found.level) == Kind::Table { tables.push(F::address(now, \
               found.level)); }",
        rules: &[
            "crash",
            "break-before-make",
            "freed early",
            "walk astray",
            "program",
            "no progress",
            "linked early",
            "flag lost",
        ],
    },
    Bug {
        name: "a thaw makes holes of the claims of others",
        file: GATHER,
        find: "if «table.load(index) == self.mark» {",
        with: "{ let entry = table.load(index); entry != 0 && entry & 3 == 0 }",
        rules: &["break-before-make", "freed early", "program", "no progress"],
    },
    // Tables.
    Bug {
        name: "an entry of a new table is not zeroed",
        file: GATHER,
        find: "table.fill(«0..1 << F::INDEX_BITS», 0, 0);",
        with: "1..1 << F::INDEX_BITS",
        rules: &["linked early"],
    },
    Bug {
        name: "a table is linked by a plain store",
        file: FAULT,
        find: "if «found.replace(0, F::table(top, Perms::empty()))».is_err() {",
        with: "if found.table.load(found.index) == 0 { \
               found.table.store(found.index, F::table(top, Perms::empty())); Ok(()) } else { \
               Err(1) }",
        rules: &["linked early"],
    },
    Bug {
        name: "the first table of what was detached is not freed",
        file: RECLAIM,
        find: "«unsafe { platform.free_table(root.frame, root.level) };»\n            if \
               reclaim.stop",
        with: "",
        rules: &["program"],
    },
    Bug {
        name: "tables are freed while walks may hold them",
        file: GATHER,
        find: "if «self.completed.is_empty() || self.completed.platform().is_over(self.period)» {",
        with: "true",
        rules: &["freed early"],
    },
    Bug {
        name: "an edit does not wait for processors to forget",
        file: GATHER,
        find: "«if core::mem::take(&mut self.wait) {\n            \
               self.space.platform().barrier(Barrier::Complete);\n        }»",
        with: "",
        rules: &["freed early", "break-before-make"],
    },
    Bug {
        name: "a table that was empty at a look is cut off",
        file: PRUNE,
        find: "if «!self.seal(&child)» {",
        with: "false",
        rules: &["program", "flag lost", "break-before-make"],
    },
    Bug {
        name: "a table that is not cut off stays sealed",
        file: PRUNE,
        find: "if «sealed < entries» {",
        with: "false",
        rules: &["no progress", "program"],
    },
    Bug {
        name: "an empty table is cut off, and not forgotten",
        file: PRUNE,
        find: "«flush.ranges.add(slice, None, true);»\n        Step::Next",
        with: "flush.ranges.add(slice, Some(level), false);",
        rules: &["invalidation", "freed early", "break-before-make"],
    },
    // Breaks.
    Bug {
        name: "an unmap leaves a hole where a break is demanded",
        file: GATHER,
        find: "self.mark = «F::frozen(serial.wrapping_sub(self.space.base) | TAKEN)»;",
        with: "0",
        rules: &["break-before-make"],
    },
    Bug {
        name: "a collapse forgets leaves of its own level, and not the table",
        file: FAULT,
        find: "«ranges.add(leaf.slice(), None, true);»",
        with: "ranges.add(leaf.slice(), Some(leaf.level), false);",
        rules: &["invalidation", "break-before-make"],
    },
    Bug {
        name: "a table is detached, and leaves are forgotten",
        file: RANGE,
        find: "«self.flush.ranges.add(slice, None, true);»\n                    return",
        with: "self.flush.ranges.add(slice, Some(level), false);",
        rules: &["invalidation", "freed early"],
    },
    Bug {
        name: "a split that needs no break is forgotten later",
        file: RANGE,
        find: "true => {\n                        «ranges.run::<F, P>(space.platform(), \
               space.target(true));»",
        with: "self.flush.ranges.add(slice, Some(at), false);",
        rules: &["freed early", "program", "break-before-make", "stale use"],
    },
    Bug {
        name: "the edits of others are taken to be complete",
        file: GATHER,
        find: "«self.unfinished.load(Ordering::Acquire) > own»",
        with: "false",
        rules: &["freed early", "program", "stale use"],
    },
    Bug {
        name: "what is protected is not forgotten",
        file: RANGE,
        find: "if «plan.invalidate» {\n                        self.flush.ranges.add(extent",
        with: "false",
        rules: &["program", "never invalidated", "freed early", "break-before-make"],
    },
    // Zaps, and what was looked up before.
    Bug {
        name: "a fault maps what it looked up before a change",
        file: GUEST,
        find: "if «!guest.slots.is_current(request.version)» {",
        with: "false",
        rules: &["freed early", "program", "stale use"],
    },
    Bug {
        name: "a fault maps outside of a walk",
        file: GUEST,
        find: "«let _walk = guest.space.platform().enter();»\n        if",
        with: "let _walk = (!PLANTED).then(|| guest.space.platform().enter());",
        rules: &["freed early", "program", "stale use"],
    },
    Bug {
        name: "a zap does not wait for walks",
        file: ZAP,
        find: "State::Wait(period) if «!self.guest.space.is_over(period)» =>",
        with: "false",
        rules: &["freed early", "program", "stale use", "cache maintenance"],
    },
    // A page that is put straight where there is a hole for it.
    Bug {
        name: "a hole is filled for a look-up that is out of date",
        file: GUEST,
        find: "let ready = «guest.slots.is_current(request.version)» &&",
        with: "true",
        rules: &["freed early", "program", "forbidden memory"],
    },
    Bug {
        name: "a hole is filled with the attributes of another page",
        file: GUEST,
        find: "&& «of == like»",
        with: "true",
        rules: &["program", "forbidden memory"],
    },
    // Caches.
    Bug {
        name: "memory is cleaned after it was mapped",
        file: FAULT,
        find: "let installed = if «clean || instructions» {",
        with: "false",
        rules: &["cache maintenance"],
    },
    Bug {
        name: "a page in the place of another is not cleaned",
        file: FAULT,
        find: "ranges.run::<F, P>(space.platform(), space.target(true));\n                    \
               «space.maintain(leaf.frame, leaf.size(), clean, instructions);»",
        with: "",
        rules: &["cache maintenance"],
    },
    Bug {
        name: "a collapse does not clean what was not mapped",
        file: FAULT,
        find: "«space.maintain(frame, size, clean, instructions);»",
        with: "let _ = (frame, size, clean, instructions);",
        rules: &["cache maintenance"],
    },
    // Flags, and what they are for.
    Bug {
        name: "a collapse loses that a page was written",
        file: FAULT,
        find: "«survey.dirty |= attrs.dirty || attrs.perms.intersects(Perms::ANY_WRITE);»",
        with: "",
        rules: &["flag lost"],
    },
    Bug {
        name: "a collapse loses that other memory was written",
        file: FAULT,
        find: "let fate = match «strangers» {",
        with: "false",
        rules: &["flag lost"],
    },
    Bug {
        name: "a logged write makes a whole block writable",
        file: GUEST,
        find: "|| «slot.log().is_on()» {\n            return Level::PAGE;",
        with: "false",
        rules: &["program"],
    },
    Bug {
        name: "a CPU that was second to add a permission faults for ever",
        file: FAULT,
        find: "fn relaxed(&self, slice: Slice, level: Level) {«»",
        with: "if PLANTED { return; }",
        rules: &["no progress"],
    },
    // The log of what is written, and write-protected tables.
    Bug {
        name: "a table is opened and its leaves stay writable",
        file: PROTECT_ALL,
        find: "entry ^ «flip»\n",
        with: "0",
        rules: &["program"],
    },
    Bug {
        name: "a table is opened and the tables below it stay open",
        file: PROTECT_ALL,
        find: "Kind::Table => «F::protect_table(entry)»,",
        with: "entry",
        rules: &["program"],
    },
    Bug {
        name: "two processors wake a table",
        file: PROTECT_ALL,
        find: "if «entry & F::OPENING != 0» {\n            return",
        with: "false",
        rules: &["break-before-make", "program", "freed early", "stale use"],
    },
    Bug {
        name: "tables are opened before all is protected",
        file: PROTECT_ALL,
        find: "if «generation & STARTING != 0» {\n                    return",
        with: "false",
        rules: &["break-before-make", "program"],
    },
    Bug {
        name: "all is protected and nothing is forgotten",
        file: PROTECT_ALL,
        find: "«ranges.everything = true;»",
        with: "",
        rules: &["program", "never invalidated", "break-before-make", "freed early", "stale use"],
    },
    Bug {
        name: "a large leaf is reopened while its slot is logged",
        file: LOG,
        find: "«(level == Level::PAGE || !logged)»",
        with: "true",
        rules: &["program"],
    },
    Bug {
        name: "a page that the host protects is reopened",
        file: LOG,
        find: "let host = «attrs.software & HOST_WRITES != 0»",
        with: "true",
        rules: &["program", "stale use", "freed early"],
    },
    Bug {
        name: "what the host protects for good can be reopened",
        file: ZAP,
        find: "true => «change.software(0)»,",
        with: "change",
        rules: &["program", "stale use", "freed early"],
    },
];
