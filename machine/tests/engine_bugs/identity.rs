//! Bugs planted into invalidations by identity, and caught where CPUs go from space to space with
//! few identifiers.

use super::Bug;

const RANGES: &str = "flush/ranges.rs";
const IDENTIFIERS: &str = "identity.rs";
/// Rules that a translation breaks under an identifier of another.
const REUSED: &[&str] = &["identifier reused", "program", "freed early", "stale use"];

pub const BUGS: &[Bug] = &[
    Bug {
        name: "an identity is read before its changes are published",
        file: RANGES,
        find: "«platform.barrier(Barrier::Publish);»\n        let operations",
        with: "if PLANTED {
            let early = target.forgetting(platform, What::Everything);
            platform.barrier(Barrier::Publish);
            platform.invalidate(&early);
            return true;
        }
        platform.barrier(Barrier::Publish);",
        rules: &["invalidation", "freed early"],
    },
    Bug {
        name: "an identity is not read at all",
        file: RANGES,
        find: ".map_or(id, «Identity::id_after_changes»);",
        with: "|identity: &Identity| if PLANTED { id } else { identity.id_after_changes() }",
        rules: &["invalidation"],
    },
    Bug {
        name: "an identifier is used again and nothing is forgotten",
        file: IDENTIFIERS,
        find: "        if «pending» {",
        with: "false",
        rules: REUSED,
    },
    Bug {
        name: "an identifier that is loaded is given to another space",
        file: IDENTIFIERS,
        find: "«allocator.take(kept as u16);»",
        with: "let _ = kept;",
        rules: &[
            "identifier reused",
            "program",
            "freed early",
            "stale use",
            "invalidation",
            "conflict",
        ],
    },
    Bug {
        name: "an identifier of an old generation is loaded",
        file: IDENTIFIERS,
        find: "if active != 0 && «current» {",
        with: "word != 0",
        rules: REUSED,
    },
    Bug {
        name: "what a processor leaves is not reserved",
        file: IDENTIFIERS,
        find: "«allocator.take(holder.before.load(Ordering::Relaxed) as u16)»;",
        with: "false",
        rules: &["identifier reused", "freed early", "invalidation"],
    },
    Bug {
        name: "a space that has ended is loaded for the next",
        file: IDENTIFIERS,
        find: "(self.root).compare_exchange(«joined», 0,",
        with: "0",
        rules: &["program"],
    },
];
