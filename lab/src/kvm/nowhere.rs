//! Stand-ins for computers without KVM.

use super::summary::{HostKind, Phase};
use super::{Able, Asked, Phases};
use crate::error::Error;

fn none<T>() -> Result<T, Error> {
    let why = "--on kvm: KVM is Linux's, on x86-64 and arm64";
    Err(Error::Usage(why.to_owned()))
}

pub fn round(_: &Asked, _: Phases) -> Result<Vec<Phase>, Error> {
    none()
}

pub fn host() -> Result<HostKind, Error> {
    none()
}

pub fn computer() -> Option<HostKind> {
    None
}

pub fn able() -> Result<Able, Error> {
    none()
}

pub fn free() -> u64 {
    0
}
