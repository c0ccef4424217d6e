//! The rounds of `map-mem`: the builder and the bare loop take turns over the same bytes.

use std::time::Instant;

use super::builder::Builder;
use super::check;
use super::plan::Plan;
use crate::error::Error;
use crate::memory::arena::{Arena, Memory};
use crate::memory::bare::Tables;
use crate::memory::judge::Found;
use crate::output::progress::Progress;
use crate::stats::{self, Samples};

/// Figures of all rounds; samples are nanoseconds for the whole map.
pub struct Outcome {
    /// The builder.
    pub name: &'static str,
    /// Which version.
    pub version: &'static str,
    /// Entries and tables, the same in every round.
    pub built: Found,
    /// How long it took.
    pub build: Samples,
    /// How long plain stores to the same bytes took.
    pub bare: Samples,
    pub huge_page_warning: Option<String>,
}

/// Builds `rounds` times, after one time that does not count, of which every page is checked.
pub fn run(plan: &Plan, builder: &mut dyn Builder, rounds: u32) -> Result<Outcome, Error> {
    let arena = Arena::new(plan.tables_bound(), plan.format.page_shift(), Memory::Warm)?;
    let mut build = Samples::default();
    let mut bare = Samples::default();

    let (root, _) = build_once(builder, arena)?;
    let built =
        check::every_page(plan, root, arena).map_err(|problem| failed(builder.name(), problem))?;
    bare_once(built, builder.name(), arena)?;

    let mut progress = Progress::new(u64::from(rounds));
    for _ in 0..rounds {
        progress.step("building");
        let (_, nanoseconds) = build_once(builder, arena)?;
        if arena.taken() != built.tables {
            return Err(failed(builder.name(), "two builds differ".to_owned()));
        }
        build.push(nanoseconds);
        bare.push(bare_once(built, builder.name(), arena)?);
    }
    Ok(Outcome {
        name: builder.name(),
        version: builder.version(),
        built,
        build,
        bare,
        huge_page_warning: stats::huge_page_warning(arena, Memory::Warm),
    })
}

/// The address of the root, and how long it took.
fn build_once(builder: &mut dyn Builder, arena: Arena) -> Result<(u64, f64), Error> {
    // SAFETY: the builder before keeps nothing but the address of a root, and the bare loop gave
    // everything back.
    unsafe { arena.start_round() }?;
    let started = Instant::now();
    let root = builder.build(arena);
    let nanoseconds = started.elapsed().as_nanos() as f64;
    let root = root.map_err(|problem| failed(builder.name(), problem))?;
    Ok((root, nanoseconds))
}

/// Zeroes as many tables, and stores as many entries: each leaf, and each table's entry in the
/// table above.
fn bare_once(built: Found, name: &'static str, arena: Arena) -> Result<f64, Error> {
    // SAFETY: as in `build_once`.
    unsafe { arena.start_round() }?;
    let entries = built.entries + built.tables.saturating_sub(1);
    let mut tables = Tables::new(arena, built.tables, entries);
    let started = Instant::now();
    let done = tables.zero_and_fill(built.tables);
    let nanoseconds = started.elapsed().as_nanos() as f64;
    tables.give_back();
    done.ok_or_else(|| failed(name, "counted more tables than there is room for".to_owned()))?;
    Ok(nanoseconds)
}

fn failed(subject: &'static str, problem: String) -> Error {
    Error::Subject { subject, operation: "map", problem }
}

#[cfg(test)]
mod tests {
    use super::super::builder;
    use super::super::iomem::{Extent, MemoryMap};
    use super::super::plan::Leaves;
    use super::*;
    use crate::format::Format;

    /// Takes tables, one more each time, and maps nothing.
    struct Fake {
        tables: u64,
    }

    impl Builder for Fake {
        fn name(&self) -> &'static str {
            "fake"
        }

        fn version(&self) -> &'static str {
            "1"
        }

        fn build(&mut self, arena: Arena) -> Result<u64, String> {
            let mut root = 0;
            for _ in 0..self.tables {
                root = arena.take_zeroed().ok_or("out of tables")?.addr().get() as u64;
            }
            self.tables += 1;
            Ok(root)
        }
    }

    /// Builds right the first time, and takes a table too many the second time.
    struct Fickle(Box<dyn Builder>, bool);

    impl Builder for Fickle {
        fn name(&self) -> &'static str {
            "fickle"
        }

        fn version(&self) -> &'static str {
            "1"
        }

        fn build(&mut self, arena: Arena) -> Result<u64, String> {
            let root = self.0.build(arena);
            if std::mem::replace(&mut self.1, true) {
                arena.take();
            }
            root
        }
    }

    fn plan(leaves: Leaves) -> Plan {
        let map = MemoryMap {
            ram: vec![Extent { start: 0, last: (8 << 20) - 1 }],
            ..MemoryMap::default()
        };
        Plan::new(&map, Format::COMMON, leaves).unwrap()
    }

    fn message(plan: &Plan, builder: &mut dyn Builder) -> String {
        run(plan, builder, 1).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn an_arena_of_the_bound_is_enough_and_both_are_measured() {
        let plan = plan(Leaves::Pages);
        let mut builder = builder::native(&plan).unwrap();
        let outcome = run(&plan, builder.as_mut(), 3).unwrap();
        assert_eq!(outcome.built.entries, 2048);
        assert_eq!(outcome.built.tables, plan.tables_bound());
        assert!(outcome.build.median() > 0.0 && outcome.bare.median() > 0.0);
    }

    #[test]
    fn a_builder_that_fails_is_named() {
        let pages = plan(Leaves::Pages);
        assert_eq!(
            message(&pages, &mut Fake { tables: 1 }),
            "fake: map: 0xffff800000000000 is not mapped"
        );
        let tables = pages.tables_bound() + 1;
        assert_eq!(message(&pages, &mut Fake { tables }), "fake: map: out of tables");
        let largest = plan(Leaves::Largest);
        let right = builder::native(&largest).unwrap();
        assert_eq!(message(&largest, &mut Fickle(right, false)), "fickle: map: two builds differ");
    }
}
