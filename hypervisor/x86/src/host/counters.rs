//! What the hypervisor counts. The numbers are in memory under the symbol `COUNTERS`, in this order, so that looking costs the
//! guest nothing. The file is part of two programs: the hypervisor and `xtask`.

macro_rules! counters {
    ($($name:ident $text:literal,)*) => {
        /// One of the numbers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(dead_code, reason = "the one program counts, the other looks")]
        pub enum Count { $(#[doc = $text] $name,)* }

        /// What they are called, in order.
        pub const NAMES: [&str; [$($text),*].len()] = [$($text),*];
    };
}

counters! {
    Exits "exits",
    Interrupts "exits for an interrupt of the host's",
    Windows "exits because the guest takes interrupts again",
    Cpuids "exits for CPUID",
    Halts "exits for HLT",
    Ports "exits for a port",
    Registers "exits for a register other than those below",
    Ends "exits for the end of an interrupt",
    Timers "exits for the timer's deadline",
    Commands "exits to interrupt other vCPUs",
    Calls "exits for a hypercall",
    Faults "exits for nested page faults",
    Others "exits for anything else",
    Injected "faults given to the guest",
    Ipis "interrupts between vCPUs",
    Space "hypercalls: flush of a space",
    List "hypercalls: flush of a list",
    SpaceEx "hypercalls: flush of a space, by a set",
    ListEx "hypercalls: flush of a list, by a set",
    Refused "hypercalls refused",
    Continued "hypercalls that took another exit",
    Ranges "ranges in lists",
    Pages "pages in lists",
    Named "vCPUs named in flushes",
    Told "processors told of a flush",
    Here "flushes of the vCPU that asked",
    Entered "vCPUs that forgot on entry",
    WaitTotal "ns waited for flushes",
    WaitLongest "ns of the longest wait for one flush",
    Slices "time slices that ended with another vCPU waiting",
    Installed "leaves installed",
    Tables "tables in use",
    NestedFlushes "flushes of nested tables",
    Busy "faults sent back",
    Evicted "frames taken away",
    Returned "frames given back",
    Spoiled "times that the guest was seen on a frame that is not its own any more",
    Missed "pages in lists that were not forgotten",
}
