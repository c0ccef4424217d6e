//! Bugs that are planted, one at a time.

/// One way in which a program, or the platform below it, is wrong. In everything else it is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    // The engine on a platform that does not keep its promises.
    /// No barrier after stores to tables.
    NoBarrier,
    /// None between the store and the invalidation.
    NoBarrierBeforeInvalidation,
    /// None after a new mapping is stored.
    NoBarrierAfterMap,
    /// Invalidations are not waited for.
    NoWait,
    /// No wait between break and make.
    NoWaitInBreak,
    /// No wait before what was detached is reused.
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
    /// Only leaves are invalidated where tables were detached.
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
    /// A table is linked, and one of its entries has not been zeroed.
    NotZeroed,
    /// An exchange is a load and a store.
    ExchangeInTwoSteps,
    /// A store that the machine is not told about.
    HiddenStore,

    /// One invalidation in three is not made.
    SkipsInvalidation,
    /// Walks of software are over as soon as they begin.
    ForgetsWalks,

    // The same where guests have a stage 1.
    /// Combined translations of stage 1 are not invalidated.
    CombinedForgotten,
    /// It is invalidated first, and what stage 2 says alone after that.
    CombinedFirst,
    /// It is invalidated second, without a wait for the first.
    CombinedInOneStep,
    /// Nothing else is invalidated.
    CombinedAlone,
    /// Both are invalidated on this CPU only.
    BothOnlyLocal,

    // The program around the engine.
    /// Pages go back as soon as they are unmapped.
    FreedBeforeCompletion,
    /// Pages that were released go back twice.
    FreedTwice,
    /// A guest's page goes back when its zap begins.
    FreedBeforeZap,
    /// Pages go back while they are mapped.
    FreedWhileMapped,
    /// Gathers are forgotten, and not finished.
    GatherForgotten,
    /// The last gather is.
    LastGatherForgotten,
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
    /// Another identifier is invalidated.
    WrongIdentifierInvalidated,
    /// Identifiers are invalidated on this CPU only.
    IdentifiersInvalidatedHere,
    /// Two spaces have the same.
    SameIdentifierTwice,
    /// The pages of one space are said to be those of all.
    UserPagesGlobal,
    /// A space that is given another is invalidated under the one that it had first.
    IdentityOfBefore,
    /// It is loaded under the one that it had first.
    LoadedAsBefore,
    /// A CPU that enters a generation forgets nothing.
    NothingForgottenAtSwitch,

    // Tables by hand, on one CPU: what published crates do, and what is known of others.
    /// `x86_64`: a new table is linked, and then zeroed.
    LinkedBeforeZeroed,
    /// `page_table_multiarch`: no barrier between the store and the invalidation.
    NoBarrierBeforeTlbi,
    /// `page_table_multiarch`: more than 32 pages are invalidated on this CPU only.
    AllOnlyLocal,
    /// `page-table-generic`: leaves are invalidated, then their table is detached and freed.
    TableFreedUnforgotten,
    /// A table is detached in one step, and its leaves are invalidated.
    TableFreedAfterLeaves,
    /// `ostd`: attributes are loaded, worked out, and stored.
    ProtectedByStore,
    /// `ostd`, on arm64: a block becomes a table in one store.
    SplitInOneStore,
    /// `hvisor`: the function that invalidates is empty.
    FlushIsEmpty,
    /// `patina_paging`: invalidations are for this CPU only.
    TlbiIsLocal,
    /// The invalidation comes before the store.
    InvalidatedBeforeStore,
    /// A table is empty if its first entry is.
    EmptyByFirstEntry,
    /// A block is mapped over a table.
    MappedOverTable,
    /// A table that was freed is linked again.
    FreedTableLinkedAgain,
    /// A page has the form of a block.
    PageWrittenAsBlock,
    /// Some pages of a contiguous run are unmapped.
    PartOfRunUnmapped,
    /// A contiguous run of which only half is there.
    HalfARun,

    // A kernel's half that all roots share.
    /// Pages are forgotten at a stride of large leaves.
    StrideOverPages,
    /// A table goes, and only leaves are forgotten.
    FinalOnly,
    /// A global leaf goes, and what is broadcast spares it.
    GlobalBitMissing,
    /// A global leaf goes that one root leads to, and CPUs that have another loaded are not told.
    GlobalToldToHolders,
    /// A page goes at one of two addresses.
    OtherAddressForgotten,
    /// A page goes, and is forgotten under the identifier of one root.
    OtherRootsForgotten,

    // Tables by hand, on all CPUs at once.
    /// An entry is not claimed before it is written.
    NotClaimed,
    /// An entry is left to others before it is forgotten.
    EntryLeftToOthersEarly,
    /// A leaf is taken out by a load and a store.
    FrozenByStore,
    /// A page goes back before its invalidation.
    PageFreedBeforeInvalidation,
    /// A table goes back while others may be in it.
    TableFreedUnderOthers,

    // The log of what a guest writes: the handlers of faults.
    /// A page is marked, and then made writable.
    MarkedBeforeWritable,
    /// The guest goes on, and then the page is marked.
    MarkedAfterwards,
    /// Whether a ring has room is asked when the page is writable.
    RoomAskedAfterwards,
    /// The host writes, and marks nothing.
    DeviceUnmarked,
    /// The host marks, and then writes.
    DeviceMarkedBefore,
    /// A leaf goes that hardware has marked, and that is not looked at.
    FlagOfLeafIgnored,

    // The same: the harvest.
    /// Pages are copied before every CPU has forgotten that they could be written.
    CopiedBeforeFlush,
    /// Pages are protected, and then their marks are taken away.
    HarvestedAfterProtection,
    /// Pages stay writable in a harvest, and nothing is protected after it.
    KeptAndNotProtected,
    /// Entries of a ring are released, and their pages copied, before they are protected.
    ReleasedBeforeProtection,
    /// A log with rings starts with everything marked.
    RingStartsMarked,
    /// A log starts, and what is mapped is not zapped.
    StartNotZapped,
    /// A log starts with everything marked, and walks from before are not waited for.
    StartNotAwaited,
    /// The log of the hardware is not marked.
    LogThrownAway,
    /// Hardware is to log, and pages are dirty from before.
    StartNotCleaned,
    /// Pages are made clean, and then their marks are taken away.
    CleanedBeforeHarvest,
    /// The guest stops after the last harvest.
    LastHarvestBeforeStop,
    /// The guest stops in a handler.
    StoppedInHandler,
}

impl Bug {
    /// Bugs of the embedder that sequences of calls find, as they are named on a command line.
    pub const OF_EMBEDDERS: [(&'static str, Self); 8] = [
        ("skips-invalidation", Self::SkipsInvalidation),
        ("skips-completion", Self::NoWait),
        ("skips-publication", Self::NoBarrier),
        ("short-range", Self::RangeTooShort),
        ("frees-early", Self::FreedBeforeCompletion),
        ("frees-twice", Self::FreedTwice),
        ("frees-before-zap", Self::FreedBeforeZap),
        ("forgets-walks", Self::ForgetsWalks),
    ];
}
