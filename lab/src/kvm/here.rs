//! Guests on the KVM of this computer.

mod sequence;

use tablewright_kvm::host::{Host, Paging};

use super::summary::{HostKind, Phase};
use super::{Able, Asked, Phases};
use crate::error::Error;

/// Returns the kind of host; refuses where there is no KVM.
pub fn host() -> Result<HostKind, Error> {
    sequence::able()?;
    Ok(kind(&Host::read()))
}

/// Describes this computer, whether or not it runs guests.
pub fn computer() -> Option<HostKind> {
    Some(kind(&Host::read()))
}

pub fn able() -> Result<Able, Error> {
    let can = sequence::able()?;
    Ok(Able { manual: can.manual, all_set: can.all_set })
}

/// How much memory a guest can have.
pub fn free() -> u64 {
    tablewright_kvm::available()
}

/// A new guest, once through these phases.
pub fn round(asked: &Asked, phases: Phases) -> Result<Vec<Phase>, Error> {
    match phases {
        Phases::Log => sequence::dirty_log(asked),
        Phases::Start(then) => sequence::start(asked, then),
        Phases::Faults => sequence::faults(asked),
    }
}

fn kind(host: &Host) -> HostKind {
    HostKind {
        line: host.to_string(),
        vendor: host.vendor.clone(),
        kernel: host.kernel.clone(),
        paging: match host.paging {
            Paging::Nested(name) => name,
            Paging::Software => "software",
            Paging::Unknown => "unknown",
        }
        .to_owned(),
        is_guest: host.is_guest,
        tdp_mmu: host.tdp_mmu,
        eager_split: host.eager_split,
        modification_log: host.modification_log,
        cpus: host.cpus,
        version: host.version(),
    }
}
