//! How a leaf is taken out of its table.

use crate::addr::Level;
use crate::edit::space::Conditions;
use crate::format::Format;
use crate::platform::Platform;
use crate::run;
use crate::table::Table;

/// Takes one leaf out of its table.
#[inline(always)]
pub(super) fn take<F: Format, P: Platform>(
    table: &Table<'_, P>,
    conditions: Conditions,
    index: usize,
    level: Level,
    entry: u64,
) -> u64 {
    if conditions.is_contended::<F>(entry, level) {
        return table.exchange(index, 0);
    }
    table.store(index, 0);
    entry
}

/// The same of a leaf that may be a member of a run.
#[inline(always)]
pub(super) fn take_any<F: Format, P: Platform>(
    table: &Table<'_, P>,
    conditions: Conditions,
    index: usize,
    level: Level,
    entry: u64,
) -> u64 {
    match entry & F::CONTIGUOUS {
        0 => take::<F, P>(table, conditions, index, level, entry),
        _ => take_run::<F, P>(table, conditions, index, level),
    }
}

/// The same of the run that it is a member of. The ends of the range have been cleaved: it is
/// whole.
#[inline(never)]
pub(super) fn take_run<F: Format, P: Platform>(
    table: &Table<'_, P>,
    conditions: Conditions,
    index: usize,
    level: Level,
) -> u64 {
    run::gather::<F>(run::members::<F>(index, level), level, &mut |member| {
        take::<F, P>(table, conditions, member, level, table.load(member))
    })
}
