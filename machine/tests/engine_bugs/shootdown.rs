//! Bugs planted into remote flushes, and caught where CPUs go from space to space.

use super::Bug;

const AMD: &str = "shootdown/amd.rs";
const ARM64: &str = "shootdown/arm64.rs";
const CPUS: &str = "shootdown/space.rs";
const DEFERRED: &str = "shootdown/deferred.rs";
const ENCODER: &str = "hyperv/guest.rs";
const HERE: &str = "shootdown/per_cpu.rs";
const HYPERCALL: &str = "hyperv/messenger.rs";

/// A processor uses what it should have forgotten, or is said to have forgotten, or what was given
/// back.
const STALE: &[&str] = &["invalidation", "stale use", "freed early", "walk astray", "program"];

pub const BUGS: &[Bug] = &[
    // Which CPUs are told.
    Bug {
        name: "a lazy processor is not told that tables have gone",
        file: HERE,
        find: "if «!tables» {",
        with: "true",
        rules: STALE,
    },
    Bug {
        name: "a lazy processor goes on where it was",
        file: HERE,
        find: "«self.catch_up(space, space.identity.id(), actions);»",
        with: "let _ = actions;",
        rules: STALE,
    },
    Bug {
        name: "a processor that comes back has missed nothing",
        file: HERE,
        find: "if «missed && (kept || loaded)» {",
        with: "missed && loaded",
        rules: STALE,
    },
    Bug {
        name: "of a space that is not known nothing is remembered",
        file: HERE,
        find: "None => «generation != 0»,",
        with: "false",
        rules: STALE,
    },
    Bug {
        name: "a part is flushed though a generation was missed",
        file: HERE,
        find: "let missed = «seen.is_some_and(|seen| seen + 1 != generation)»;",
        with: "let _ = seen; false",
        rules: STALE,
    },
    Bug {
        name: "a processor is out of the set before another root is loaded",
        file: HERE,
        find: "«load(id);»",
        with: "if let Some(from) = from.filter(|from| from.number != number) { \
               from.leave(self.number); } load(id);",
        rules: STALE,
    },
    Bug {
        name: "only the first 64 processors are told",
        file: CPUS,
        find: "if let Some(word) = «self.cpus.get(cpu / 64)» {\n            word.fetch_or",
        with: "self.cpus.get(usize::from(cpu > 2))",
        rules: STALE,
    },
    // What they are told.
    Bug {
        name: "a message is without its last range",
        file: HERE,
        find: "self.count.store(«count as u64», Ordering::Relaxed);",
        with: "if count > 1 { count as u64 - 1 } else { count as u64 }",
        rules: STALE,
    },
    Bug {
        name: "a flush does not wait for answers",
        file: HERE,
        find: "while «outbox.left.load(Ordering::Acquire) != 0» {",
        with: "false",
        rules: STALE,
    },
    Bug {
        name: "the sender does not forget for itself",
        file: HERE,
        find: "        if «here» {",
        with: "false",
        rules: STALE,
    },
    // Messengers.
    Bug {
        name: "a hypercall that was refused is taken for done",
        file: HYPERCALL,
        find: "told = «sent.is_ok()»;",
        with: "let _ = sent; true",
        rules: STALE,
    },
    Bug {
        name: "a processor without a VP index is taken for told",
        file: HYPERCALL,
        find: "*cpus = «left»;",
        with: "{ let _ = left; Cpus::EMPTY }",
        rules: STALE,
    },
    Bug {
        name: "the number of the operating system is taken for the VP index",
        file: HYPERCALL,
        find: "let vp = «self.calls.vp_index(cpu)»;",
        with: "self.calls.vp_index(cpu).map(|_| cpu as u32)",
        rules: STALE,
    },
    Bug {
        name: "the address space is named by more than its root",
        file: ENCODER,
        find: "let mut space = «flush.root.get()»;",
        with: "flush.root.get() | u64::from(flush.id) << 12",
        rules: STALE,
    },
    Bug {
        name: "pages of a range are counted by the floor",
        file: ENCODER,
        find: "            if «page > last» {",
        with: "page + RANGE_PAGES > last",
        rules: STALE,
    },
    Bug {
        name: "banks of the last call are left in the page",
        file: ENCODER,
        find: "                    page[at] = «bank»;",
        with: "if page[at] != 0 { page[at] } else { bank }",
        rules: STALE,
    },
    Bug {
        name: "a virtual processor that runs is taken for one that does not",
        file: DEFERRED,
        find: "let flush = |flags: u8| («flags & Self::PREEMPTED != 0»)",
        with: "true",
        rules: STALE,
    },
    Bug {
        name: "the host is not asked to flush",
        file: DEFERRED,
        find: ".then_some(«flags | Self::FLUSH»);",
        with: "flags",
        rules: STALE,
    },
    // What is global.
    Bug {
        name: "what is global is told to those alone that have the space loaded",
        file: HERE,
        find: "if «message.global» {",
        with: "false",
        rules: STALE,
    },
    Bug {
        name: "a message does not say that it means global translations",
        file: HERE,
        find: "self.global.store(«flush.global», Ordering::Relaxed);",
        with: "false",
        rules: STALE,
    },
    Bug {
        name: "a processor that has another space loaded keeps what is global",
        file: HERE,
        find: "if «global || view.is_some() && !whole» {",
        with: "view.is_some() && !whole",
        rules: STALE,
    },
    Bug {
        name: "a broadcast of AMD spares what is global",
        file: AMD,
        find: "match «global» {",
        with: "false",
        rules: STALE,
    },
    Bug {
        name: "a hypercall is of one space where what is global is meant",
        file: ENCODER,
        find: "if «flush.global» {\n            flags |= Flags::ALL_SPACES",
        with: "false",
        rules: STALE,
    },
    Bug {
        name: "all of an identifier is all that is global",
        file: ARM64,
        find: "Regime::El1 if «flush.global» => all",
        with: "false",
        rules: STALE,
    },
    // Flushes in handlers.
    Bug {
        name: "a flush in a handler writes over the message of the one that it interrupts",
        file: HERE,
        find: "let depth = «self.me.depth.load(Ordering::Relaxed)»;\n        \
               self.me.depth.store(depth + 1",
        with: "0",
        rules: &["never invalidated", "invalidation", "stale use", "freed early"],
    },
];
