//! What the processor-specific parts execute and load, against the manuals.

mod arm64;
mod features;
mod registers;
mod x86_64;
