//! What all ways to handle a guest's faults have in common.

use tablewright_machine::Fault;

use super::backing::{Backing, Owner};

/// A hypervisor's side of stage 2. All is done by the running CPU.
pub trait Handler<'m>: Owner {
    /// A vCPU has faulted: does what can be done. The guest makes its access again.
    fn fault(&self, ipa: u64, write: bool, fault: Fault, backing: &Backing<'m>);
    /// From now on the guest's writes are to be seen, page by page.
    fn start_logging(&self);
    /// And not any more.
    fn stop_logging(&self);
    /// Makes leaves as large as the memory is, where faults do not.
    fn grow(&self, backing: &Backing<'m>);
    /// Faults that found nothing to do, or nothing that could be done at that time.
    fn retries(&self) -> u64;
}
