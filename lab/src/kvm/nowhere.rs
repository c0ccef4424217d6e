//! Where there is no KVM at all.

use super::Asked;
use super::measured::Measured;
use super::summary::{HostKind, PhaseRow};
use crate::error::Error;

fn none() -> Error {
    Error::Usage("--on kvm: KVM is Linux's, on x86-64 and arm64".to_owned())
}

/// Refuses.
pub fn dirty_log(_: &Asked, _: bool) -> Result<(), Error> {
    Err(none())
}

/// Refuses.
pub fn write_protect(
    _: &Asked,
    _: Option<&[u64]>,
    _: Option<String>,
    _: bool,
) -> Result<(), Error> {
    Err(none())
}

/// Refuses.
pub fn page_table_test(_: &Asked, _: bool) -> Result<(), Error> {
    Err(none())
}

/// Refuses.
pub fn measure(_: &Asked) -> Result<Vec<PhaseRow>, Error> {
    Err(none())
}

/// Refuses.
pub fn measured(_: &Asked, _: &[PhaseRow]) -> Result<Measured, Error> {
    Err(none())
}

/// Refuses.
pub fn host() -> Result<HostKind, Error> {
    Err(none())
}

/// Nothing.
pub fn computer() -> Option<HostKind> {
    None
}

/// Refuses.
pub fn has_manual() -> Result<bool, Error> {
    Err(none())
}

/// There are no guests.
pub fn free() -> u64 {
    0
}
