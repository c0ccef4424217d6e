//! Output of the program: tables, JSON, pictures, pages and progress.

pub mod columns;
pub mod page;
pub mod plot;
pub mod progress;
pub mod report;
