//! The instructions and register values of the processor-specific parts, against the manuals.

mod arm64;
mod features;
mod registers;
mod riscv64;
mod x86_64;
