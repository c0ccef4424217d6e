//! The rounds of `map-mem`: the builder and the limit take turns over the same bytes.

use std::time::Instant;

use super::builder::{Builder, Built};
use crate::arena::{Arena, Memory};
use crate::error::Error;
use crate::limits::Tables;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::stats::{self, Samples};

/// What the rounds showed; samples are nanoseconds for the whole map.
pub struct Outcome {
    /// Who built.
    pub name: &'static str,
    /// Which version.
    pub version: &'static str,
    /// What was built, the same in every round.
    pub built: Built,
    /// How long it took.
    pub build: Samples,
    /// How long plain stores to the same bytes took.
    pub limit: Samples,
    /// What to keep in mind about the memory of the tables.
    pub huge_page_warning: Option<String>,
}

/// Builds `rounds` times, after one time that does not count.
pub fn run(plan: &Plan, builder: &mut dyn Builder, rounds: u32) -> Result<Outcome, Error> {
    let arena = Arena::new(plan.tables_bound(), plan.format.page_shift(), Memory::Warm)?;
    let mut progress = Progress::new(u64::from(rounds) + 1);
    let mut build = Samples::default();
    let mut limit = Samples::default();

    progress.step("first build");
    let (built, _) = build_once(plan, builder, arena)?;
    limit_once(built, builder.name(), arena)?;
    for _ in 0..rounds {
        progress.step("building");
        let (again, nanoseconds) = build_once(plan, builder, arena)?;
        if (again.entries, again.tables) != (built.entries, built.tables) {
            return Err(failed(builder.name(), "two builds differ".to_owned()));
        }
        build.push(nanoseconds);
        limit.push(limit_once(built, builder.name(), arena)?);
    }
    Ok(Outcome {
        name: builder.name(),
        version: builder.version(),
        built,
        build,
        limit,
        huge_page_warning: stats::huge_page_warning(arena, Memory::Warm),
    })
}

fn build_once(plan: &Plan, builder: &mut dyn Builder, arena: Arena) -> Result<(Built, f64), Error> {
    // SAFETY: the builder discarded what it built before, and the limit gave everything back.
    unsafe { arena.start_round() }?;
    let started = Instant::now();
    let built = builder.build(plan, arena);
    let nanoseconds = started.elapsed().as_nanos() as f64;
    let built = built.map_err(|problem| failed(builder.name(), problem))?;
    let taken = arena.taken();
    builder.discard();
    if taken != built.tables {
        let problem = format!("took {taken} tables and counted {}", built.tables);
        return Err(failed(builder.name(), problem));
    }
    if built.entries == 0 {
        return Err(failed(builder.name(), "mapped nothing".to_owned()));
    }
    Ok((built, nanoseconds))
}

/// As many tables, zeroed, and as many entries stored: each leaf, and each table's entry in the table above.
fn limit_once(built: Built, name: &'static str, arena: Arena) -> Result<f64, Error> {
    // SAFETY: as in `build_once`.
    unsafe { arena.start_round() }?;
    let entries = built.entries + built.tables.saturating_sub(1);
    let mut tables = Tables::new(arena, built.tables, entries);
    let started = Instant::now();
    let done = tables.zero_and_fill(built.tables);
    let nanoseconds = started.elapsed().as_nanos() as f64;
    tables.give_back();
    done.ok_or_else(|| {
        failed(
            name,
            "counted more tables than there is room for".to_owned(),
        )
    })?;
    Ok(nanoseconds)
}

fn failed(subject: &'static str, problem: String) -> Error {
    Error::Subject {
        subject,
        operation: "map",
        problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;
    use crate::iomem::{Extent, MemoryMap};
    use crate::plan::Leaves;

    /// Takes tables and says whatever it was told to say.
    struct Fake {
        tables: u64,
        extra: u64,
    }

    impl Builder for Fake {
        fn name(&self) -> &'static str {
            "fake"
        }

        fn version(&self) -> &'static str {
            "1"
        }

        fn build(&mut self, plan: &Plan, arena: Arena) -> Result<Built, String> {
            for _ in 0..self.tables {
                arena.take_zeroed().ok_or("out of tables")?;
            }
            Ok(Built {
                root: 0,
                entries: plan.bytes() / plan.format.page_bytes(),
                tables: self.tables + self.extra,
            })
        }

        fn discard(&mut self) {}
    }

    fn plan() -> Plan {
        let map = MemoryMap {
            ram: vec![Extent {
                start: 0,
                last: (8 << 20) - 1,
            }],
            ..MemoryMap::default()
        };
        Plan::new(&map, Format::COMMON, Leaves::Pages).unwrap()
    }

    #[test]
    fn an_arena_of_the_bound_is_enough_and_both_are_measured() {
        let plan = plan();
        let tables = plan.tables_bound();
        let outcome = run(&plan, &mut Fake { tables, extra: 0 }, 3).unwrap();
        assert_eq!(outcome.built.entries, 2048);
        assert!(outcome.build.median() > 0.0 && outcome.limit.median() > 0.0);
    }

    #[test]
    fn a_builder_that_miscounts_or_fails_is_named() {
        let plan = plan();
        let message = |mut fake: Fake| run(&plan, &mut fake, 1).map(drop).unwrap_err().to_string();
        let tables = plan.tables_bound();
        assert_eq!(
            message(Fake { tables, extra: 1 }),
            format!("fake: map: took {tables} tables and counted {}", tables + 1)
        );
        assert_eq!(
            message(Fake {
                tables: tables + 1,
                extra: 0
            }),
            "fake: map: out of tables"
        );
    }
}
