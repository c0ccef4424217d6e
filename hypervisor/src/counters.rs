//! What the hypervisor counts. The numbers are in memory under the symbol `COUNTERS`, in this order, so that looking costs
//! the guest nothing. The file is part of two programs: the hypervisor and `xtask`.

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
    Faults "faults",
    Installed "leaves installed",
    Grown "leaves that grew or were there",
    Reopened "pages that the log gave back",
    Busy "faults sent back",
    Injected "aborts given to the guest",
    Emulated "registers emulated",
    Identified "identification registers read",
    Calls "firmware calls",
    Tables "tables in use",
    Ranges "ranges invalidated",
    Flushes "invalidations of everything",
    Publications "publications",
    Completions "completions",
    Evicted "frames taken away",
    Returned "frames given back",
    Spoiled "times that the guest was seen on a frame that is not its own any more",
    Foreign "faults on a processor that has another VMID",
    Logs "logs started",
    Roots "entries of the root in use, when one was measured",
    Starting "instructions until it had started, when one was measured",
    Marks "pages marked as written",
    Full "faults at a full ring",
    Recovered "blocks that came back",
    Rounds "rounds of copying",
    Copied "pages copied",
    Compared "pages compared with the copy",
    Different "pages that differ from the copy",
    Asked "addresses asked of the processor",
    Translated "of them translated",
    Disagreed "answers that the judge does not agree with",
    Resumed "guests that went on on the copy",
}
