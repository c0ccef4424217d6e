//! What can be made wrong.

/// One way in which a program is wrong. In everything else it is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code)] // The example has no use for bugs.
pub enum Bug {
    // The engine on a platform that does not keep its promises.
    /// No barrier after stores to tables.
    NoBarrier,
    /// None between the store and the invalidation.
    NoBarrierBeforeInvalidation,
    /// None after a new mapping is stored.
    NoBarrierAfterMap,
    /// Nobody waits for invalidations.
    NoWait,
    /// Nobody waits between break and make.
    NoWaitInBreak,
    /// Nobody waits before what was cut off is reused.
    NoWaitInFlush,
    /// Nothing is invalidated.
    NoInvalidation,
    /// Nothing is invalidated between break and make.
    NoInvalidationInBreak,
    /// Only this CPU is told.
    OnlyLocal,
    /// A hint, of the wrong level.
    HintOfAnotherLevel,
    /// A hint where leaves of several levels or tables were changed.
    HintWhereThereIsNone,
    /// Only leaves are invalidated where tables were cut off.
    TablesForgotten,
    /// A range without its last page.
    RangeTooShort,
    /// A range of which only the first page is invalidated.
    OnlyFirstPage,
    /// The identifier of another space.
    AnotherIdentifier,
    /// More ranges than a flush holds: the rest is dropped.
    FlushHoldsOne,
    /// The engine is told a better level of FEAT_BBM than the machine has.
    BreakLevelTooHigh,
    /// It is not told that hardware sets accessed flags.
    HardwareAccessUnknown,
    /// It is not told that hardware sets dirty state.
    HardwareDirtyUnknown,
    /// A table is linked by a plain store.
    LinkedByPlainStore,
    /// A table is linked, and its end has not been zeroed.
    NotZeroed,
    /// An exchange is a load and a store.
    ExchangeInTwoSteps,
    /// A store that nobody is told about.
    HiddenStore,

    // The program around the engine.
    /// Pages go back as soon as they are unmapped.
    FreedBeforeCompletion,
    /// Pages go back while they are mapped.
    FreedWhileMapped,
    /// An address is mapped again before its invalidation is complete.
    ReusedBeforeCompletion,
    /// An address is edited again before that, where what it said before decides how it may be edited.
    EditedTwice,
    /// A flush is dropped.
    FlushDropped,
    /// A page is mapped uncached without having been cleaned.
    NotCleaned,
    /// Code is executed that was not cleaned.
    CodeNotCleaned,
    /// Code is executed, and the instruction cache was not told.
    CodeNotRefetched,
    /// The memory map does not say what must not be mapped.
    ReservedMemoryMapped,
    /// Blocks of table memory are mapped whole.
    WholeBlocksMapped,

    // Identifiers.
    /// When they have run out they are used again, and nothing is invalidated.
    IdentifierNotInvalidated,
    /// What is invalidated is another identifier.
    WrongIdentifierInvalidated,
    /// What is invalidated is so on this CPU only.
    IdentifiersInvalidatedHere,
    /// Two spaces have the same.
    SameIdentifierTwice,
    /// The pages of one space are said to be those of all.
    UserPagesGlobal,
}
