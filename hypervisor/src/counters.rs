//! Counts of this hypervisor, behind those of all. The numbers are in memory under the symbol
//! `COUNTERS`, in this order, so that looking costs the guest nothing. The file is part of two
//! programs: the hypervisor and `xtask`.

tablewright_hypervisor_common::counters! {
    Injected "aborts given to the guest",
    Emulated "registers emulated",
    Identified "identification registers read",
    Calls "firmware calls",
    Ranges "ranges invalidated",
    Flushes "invalidations of everything",
    Publications "publications",
    Completions "completions",
    Foreign "faults on a processor that has another VMID",
    Turns "turns of vCPUs",
    RollOvers "times that VMIDs rolled over",
    Forgotten "times that a processor forgot everything under all VMIDs",
    Lent "flushes of guests that were not loaded",
    Interrupts "interrupts given to vCPUs",
    Ended "guests that have switched themselves off",
    Own "pages of guests looked at in the end",
    Strays "of them on a frame that is not theirs alone, or mapped elsewhere",
    Asked "addresses asked of the processor",
    Translated "of them translated",
    Disagreed "answers that the judge does not agree with",
}
