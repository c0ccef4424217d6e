//! What every experiment of the program `tablewright` uses: [runs] of the software machine beside
//! each other, one [report] as a table or as JSON, pictures, [errors](error) with their exit
//! status; and for what is measured on this computer, [memory](arena) for tables, the [platform] on
//! it, and the [judge] that reads what was written.

pub mod arena;
pub mod bare;
pub mod columns;
pub mod error;
pub mod file;
pub mod format;
pub mod judge;
pub mod platform;
pub mod plot;
pub mod progress;
pub mod random;
pub mod report;
pub mod runs;
pub mod size;
pub mod stats;
