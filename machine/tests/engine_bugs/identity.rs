//! Bugs planted into invalidations by identity, and caught where CPUs go from space to space with
//! few identifiers.

use super::Bug;

const RANGES: &str = "flush/ranges.rs";
const IDENTIFIERS: &str = "identity.rs";

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
        name: "a space that has ended is loaded for the next",
        file: IDENTIFIERS,
        find: "(self.root).compare_exchange(«joined», 0,",
        with: "0",
        rules: &["program"],
    },
];
