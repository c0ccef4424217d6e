//! Errors of these programs.

/// The reason why a program came to no end.
pub type Error = Box<dyn std::error::Error>;
