//! Costs of a machine's operations.

use crate::time::Time;

/// The price of each operation of a CPU, in virtual time.
///
/// Costs add up: an edit of an entry behind a window, say, is `entry` and `publish`, and the table
/// walk that the first use of the window needs is one `walk` for each level. What a machine profile
/// does not know is zero.
///
/// ```
/// use tablewright_machine::{Costs, Time};
/// let costs = Costs { entry: Time::ps(2_700), publish: Time::ns(16), ..Costs::default() };
/// # assert_eq!(costs.complete, Time::ZERO);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// To write one entry of a table, and whatever a loop does for each entry besides.
    pub entry: Time,
    /// To read one entry by a load.
    pub load: Time,
    /// An atomic exchange of an entry.
    pub exchange: Time,
    /// To allocate a table and give it its first content, besides its entries.
    pub table: Time,
    /// A barrier that makes stores visible to table walkers (arm64: `dsb ishst; isb`).
    pub publish: Time,
    /// To issue one invalidation.
    pub issue: Time,
    /// To wait until the invalidations issued are complete.
    pub complete: Time,
    /// How long the system's bus for invalidations is busy with one; all CPUs share it.
    pub bus: Time,
    /// For a table walker to read one descriptor.
    pub walk: Time,
    /// An access to memory whose translation is cached.
    pub access: Time,
    /// To enter and leave a fault handler.
    pub exception: Time,
    /// A cache line that another CPU has: what its transfer costs more than a line that is here.
    pub transfer: Time,
    /// To take a free lock.
    pub lock_take: Time,
    /// From the release of a lock until the next in its queue goes on.
    pub lock_hand_over: Time,
    /// To clean and invalidate one page of 4 KiB to the point of coherency; the port is shared by
    /// all CPUs.
    pub clean: Time,
    /// Cleaning one of the pages that were cleaned last, by whichever CPU: nothing has to be looked
    /// for, nor written back. Zero: no different.
    pub clean_again: Time,
    /// To zero one page of 4 KiB, before a guest gets it.
    pub zero: Time,
    /// How long the memory of the whole machine is busy with zeroing one page of 4 KiB; all CPUs
    /// share it.
    pub zero_shared: Time,
    /// For a host to find or make the memory of a page that a guest uses for the first time,
    /// besides zeroing it. Once for a page of the host's size.
    pub find_page: Time,
    /// To fetch a line from memory; the memory is shared by all CPUs.
    pub fetch: Time,
    /// How long a line takes from memory besides: what one CPU waits for, and others need not.
    pub latency: Time,
    /// How much longer it takes for each other CPU that works on memory at the time.
    pub latency_shared: Time,
    /// To deliver an interrupt to another CPU, until its handler runs.
    pub interrupt: Time,
    /// An interrupt of a hypervisor's or a kernel's on the hardware itself, answered.
    pub host_interrupt: Time,
    /// For a CPU that has nothing to do, and sleeps, to start after an interrupt.
    pub wake: Time,
    /// For a vCPU to leave its guest for the host, or to enter it.
    pub exit: Time,
    /// To find the entry that maps a page by the page, as a kernel does that keeps a map back.
    pub reverse_map: Time,
    /// For a kernel to map a range, to handle the first fault in it and to unmap it, but for having
    /// others forget.
    pub cycle: Time,
    /// For a host to be called and to return, however little it is asked for.
    pub call: Time,
    /// To copy one line of marks for a program. Zero: eight loads, as if each word were looked at.
    pub copy: Time,
    /// To take one word of marks away, besides what is done to the entries of its pages.
    pub word: Time,
    /// To change a slot of a guest's memory, besides what is done for its pages.
    pub slot: Time,
    /// For a kernel that goes through a guest's leaves to come by one, and to note in the record of
    /// its page what the entry has said, besides what it does to the entry and its line.
    pub visit: Time,
}
