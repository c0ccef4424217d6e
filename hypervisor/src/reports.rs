//! Events that a program which watches the hypervisor from outside cannot see by itself. The file
//! is part of two programs: the hypervisor and the plugin of QEMU's (`xtask/plugin`).

/// An event, each in a word of its own, which is stored to before or after the thing happens. There
/// is no answer: it is a store, and nothing else, in each build and each run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "the one program says them, the other listens")]
pub enum Report {
    /// The operand of the next invalidation of this processor: an emulator's plugin sees
    /// instructions, and no registers.
    Operand,
    /// The next root for `VTTBR_EL2`.
    Root,
    /// Tables, and some pages, lie from here on ...
    First,
    /// ... to here.
    Last,
    /// A frame is taken for a table.
    Taken,
    /// A frame is taken for anything else.
    Data,
    /// A frame was given back.
    Given,
    /// The machine is switched off next.
    End,
    /// A root in which nothing is, and stays.
    Empty,
}

/// How many there are.
#[allow(dead_code, reason = "a reader of what was written down does not count them")]
pub const REPORTS: usize = 9;
