//! The operations, and for each the public functions of the engine that it calls.
//!
//! A function is named by the first module of its file, its type, if it has one, and its name. The
//! test `sequences` reads the source of the engine and fails if a public function is named neither
//! here nor among the exceptions there.

/// Declares the operations, with how often each is drawn.
macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident $weight:literal [$($item:literal)*];)*) => {
        /// One kind of operation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)] // Each is what it calls.
        pub enum Kind {
            $($(#[$doc])* $name,)*
        }

        /// All of them, how often each is drawn, and what each calls.
        pub const OPERATIONS: &[(Kind, u64,
            &[&str])] = &[$((Kind::$name, $weight, &[$($item),*]),)*];
    };
}

operations! {
    // ---- Spaces ----
    /// A new space, if there is room for one.
    Create 6 ["edit::AddressSpace::new" "edit::AddressSpace::new_in" "edit::AddressSpace::with_id"];
    /// A space is made live, or the one that the code runs on.
    MakeLive 4 ["edit::AddressSpace::make_live" "edit::AddressSpace::make_own"];
    /// A space is asked for what it says of itself.
    Describe 1 [
        "edit::AddressSpace::root" "edit::AddressSpace::id" "edit::AddressSpace::half"
        "edit::AddressSpace::platform"
        "edit::AddressSpace::liveness" "edit::AddressSpace::count_tables"
        "shared::SharedSpace::root"
        "shared::SharedSpace::platform" "edit::Gather::is_clean" "shared::Gather::space"
        "shared::Gather::is_clean"
        "shared::Gather::tables" "shared::DeferredReclaim::grace_period"
    ];
    /// A space is destroyed, or refuses to be.
    Destroy 4 ["edit::AddressSpace::destroy"];
    /// A space is shared, or refuses to be.
    Share 6 ["shared::SharedSpace::new"];
    /// A space that is shared is not any more.
    Unshare 5 ["shared::SharedSpace::into_exclusive"];

    // ---- Exclusive edits ----
    /// A map by itself.
    MapOnce 4 ["edit::AddressSpace::map" "edit::AddressSpace::map_page"];
    /// A gather that is kept.
    Gather 3 ["edit::AddressSpace::gather"];
    Map 9 ["edit::Gather::map" "edit::Gather::map_page" "edit::Encoded::new"];
    /// Pages that do not adjoin, in one map.
    MapFrames 3 ["edit::Gather::map_frames"];
    Unmap 7 ["edit::Gather::unmap" "edit::Gather::unmap_page"];
    ReplacePage 4 ["edit::Gather::replace" "edit::Gather::flush_with"];
    Protect 6 [
        "edit::Gather::protect" "edit::Gather::protect_page" "edit::Change::apply"
        "edit::Change::apply_on"
    ];
    Split 4 ["edit::Gather::split"];
    Collapse 4 ["edit::Gather::collapse"];
    /// Mappings of one space are mapped in another.
    Fork 3 ["edit::Gather::fork"];
    /// Pages that are alike, one by one, as kernels edit them all day: in the place of others,
    /// where a sequence is about exclusive edits, so that all other sequences are what they were.
    PageByPage 0 ["edit::Gather::map_page" "edit::Gather::protect_page" "edit::Gather::unmap_page"];
    /// Edits of every kind with nothing complete between them, in one gather or in several of which
    /// some are forgotten.
    OneGather 0 [
        "edit::Gather::map" "edit::Gather::split" "edit::Gather::collapse" "edit::Gather::replace"
        "edit::Gather::fork"
    ];
    /// Mappings of a space are moved to other addresses of it, where a sequence says so.
    Relocate 0 ["edit::Gather::relocate"];
    /// A large leaf is forked over an empty table of the child.
    ForkOver 0 ["edit::Gather::fork"];
    /// An unmap whose visitor unwinds.
    UnwindUnmap 2 ["edit::Gather::unmap"];
    Query 4 [
        "edit::AddressSpace::query" "flush::Leaf::input" "flush::Leaf::frame" "flush::Leaf::size"
        "flush::Leaf::level"
        "flush::Leaf::attrs" "flush::Leaf::is_contiguous" "flush::Leaf::descriptor"
    ];
    Walk 3 ["edit::AddressSpace::walk" "edit::AddressSpace::walk_all"];
    Issue 5 ["edit::Gather::issue"];
    Finish 5 ["edit::Gather::finish" "edit::Gather::flush" "flush::Flushed::release"];
    /// A map of memory at an offset: built, added to, protected, removed.
    Linear 3 [
        "linear::LinearMap::build" "linear::LinearMap::add" "linear::LinearMap::remove"
        "linear::LinearMap::protect"
        "linear::LinearMap::input" "linear::LinearMap::span" "linear::MemoryMap::regions"
    ];

    // ---- What was gathered ----
    Complete 5 ["flush::Issued::complete"];
    /// Leaves that are held are released, of this flush or of another.
    Release 5 ["flush::Completed::release" "shared::DeferredReclaim::release"];
    /// Some of the leaves are visited.
    Reclaim 4 ["flush::Completed::reclaim"];
    /// A visitor unwinds.
    UnwindReclaim 1 ["flush::Completed::reclaim"];
    FinishCompleted 4 ["flush::Completed::finish"];
    TryComplete 4 ["shared::DeferredReclaim::try_complete"];
    /// A value goes to the other CPU, if its type is `Send`.
    Move 0 [];
    /// A call whose visitor unwinds, or does something else in the midst of it.
    Visit 0 [];
    /// Some value that is alive is dropped.
    Drop 4 [];
    /// Some value that is alive is forgotten.
    Forget 3 [];

    // ---- Shared edits ----
    SharedGather 3 [
        "shared::SharedSpace::gather" "guest::Guest::gather" "guest::Gather::guest"
        "guest::Guest::space"
    ];
    Tables 4 ["shared::Gather::top_up" "shared::Gather::release_tables"];
    SharedMap 10 ["shared::Gather::map" "shared::NewLeaf::new" "shared::NewLeaf::input"];
    /// A block in the place of a table.
    MapAsBlock 3 ["shared::Gather::map" "shared::Gather::space"];
    MapRange 3 ["shared::SharedSpace::map_range"];
    SharedUnmap 6 ["shared::Gather::unmap" "flush::Progress::is_done"];
    SharedProtect 4 ["shared::Gather::protect"];
    Age 2 ["shared::Gather::age"];
    ClearDirty 2 ["shared::Gather::clear_dirty"];
    SharedSplit 3 ["shared::Gather::split"];
    /// Tables that map nothing are freed, where a sequence says so.
    Prune 0 ["shared::Gather::prune" "guest::Gather::prune"];
    /// A visitor of an unmap, or of a look at flags, unwinds.
    UnwindShared 5 ["shared::Gather::unmap" "shared::Gather::age"];
    SharedQuery 3 ["shared::SharedSpace::query"];
    Relax 3 ["shared::SharedSpace::relax"];
    Open 2 ["shared::SharedSpace::open" "shared::SharedSpace::generation"];
    SharedIssue 5 ["shared::Gather::issue"];
    SharedFinish 5 ["shared::Gather::finish"];
    GracePeriod 1 [
        "shared::SharedSpace::grace_period" "shared::SharedSpace::is_over"
        "shared::GracePeriod::new" "shared::GracePeriod::get"
    ];
    ProtectAll 2 ["shared::SharedSpace::protect_all"];
    /// All memory is protected, and written where nothing allows it.
    ProtectAndSplit 3 [
        "shared::SharedSpace::protect_all" "shared::Gather::split" "shared::SharedSpace::open"
    ];
    ProtectStep 3 ["shared::Protecting::step" "shared::Protecting::drive"];

    // ---- Guests ----
    MakeGuest 5 ["guest::Guest::new"];
    IntoSpace 1 ["guest::Guest::into_space"];
    Insert 6 ["guest::Guest::insert"];
    Replace 2 ["guest::Guest::replace"];
    Remove 1 ["guest::Guest::remove"];
    SlotAt 1 ["guest::Guest::slot"];
    /// A fault is looked up, and its page after it.
    Request 7 [
        "guest::Guest::request" "guest::Fault::arm64" "guest::Fault::ept" "guest::Fault::nested"
        "guest::Request::slot"
        "guest::Request::at" "guest::Request::access" "guest::Request::host"
        "guest::Request::tables"
        "guest::Request::is_logged_write"
    ];
    /// A fault is looked up and mapped at once.
    Fault 10 ["guest::Gather::map"];
    /// A request is mapped: late, twice, or in another guest.
    MapRequest 6 ["guest::Gather::map"];
    Reopen 4 ["guest::Guest::reopen" "guest::Guest::set_accessed"];
    Mark 2 ["guest::Guest::mark" "dirty::Marker::room"];
    Harvest 3 ["guest::Gather::harvest"];
    GuestProtect 2 ["guest::Gather::protect" "guest::Guest::protect_no_more"];
    SplitRange 2 ["guest::Gather::split_range"];
    CollapseGuest 4 ["guest::Gather::collapse"];
    Zap 3 ["guest::Guest::zap" "guest::Guest::zap_all" "guest::Zap::span"];
    /// The host takes a page back.
    TakeBack 3 ["guest::Guest::zap"];
    /// A zap goes on, with a gather of its guest or of another.
    ZapStep 8 ["guest::Zap::unmap" "guest::Zap::protect"];

    // ---- Logs by themselves ----
    Bitmaps 1 [
        "dirty::Bitmap::new" "dirty::Bitmap::pages" "dirty::Bitmap::mark"
        "dirty::Bitmap::mark_range" "dirty::Bitmap::mark_all"
        "dirty::Bitmap::is_marked" "dirty::Bitmap::marks" "dirty::Bitmap::count"
        "dirty::Bitmap::harvest" "dirty::Flip::new" "dirty::Flip::current"
        "dirty::Flip::drain"
    ];
    Rings 1 [
        "dirty::Ring::new" "dirty::Ring::has_room" "dirty::Ring::push" "dirty::Ring::harvest"
        "dirty::Ring::collect" "dirty::Collected::release" "dirty::Collected::len"
        "dirty::Collected::is_empty"
    ];
    Queues 1 [];

    // ---- Walks of software by themselves ----
    Walks 1 [
        "shared::WalkSlot::new" "shared::Epochs::new" "shared::Epochs::advance"
        "shared::Epochs::is_over"
    ];

    // ---- A half that all roots share ----
    Kernel 1 [
        "kernel_half::KernelHalf::new" "kernel_half::KernelHalf::gather"
        "kernel_half::KernelHalf::user"
        "kernel_half::KernelHalf::make_live"
    ];

    // ---- The CPU ----
    /// Accesses through what is mapped.
    Access 14 [];
    /// Another space is loaded.
    Load 4 [];
    /// Time passes.
    Pause 2 [];
}

impl Kind {
    /// Whether it is about spaces that one CPU edits.
    pub fn is_exclusive(self) -> bool {
        (Self::MapOnce as u8..=Self::Linear as u8).contains(&(self as u8))
    }

    /// Whether it is about spaces that are shared.
    pub fn is_shared(self) -> bool {
        (Self::SharedGather as u8..=Self::ProtectStep as u8).contains(&(self as u8))
    }

    /// Whether a guest may write after it what it could not write before.
    pub fn lets_write(self) -> bool {
        !matches!(
            self,
            Self::Describe
                | Self::Walk
                | Self::Query
                | Self::Complete
                | Self::Release
                | Self::Reclaim
                | Self::FinishCompleted
                | Self::TryComplete
                | Self::SharedGather
                | Self::Tables
                | Self::SharedUnmap
                | Self::UnwindShared
                | Self::Age
                | Self::ClearDirty
                | Self::SharedSplit
                | Self::Prune
                | Self::SharedQuery
                | Self::Open
                | Self::SharedIssue
                | Self::SharedFinish
                | Self::GracePeriod
                | Self::SlotAt
                | Self::Request
                | Self::Mark
                | Self::Harvest
                | Self::SplitRange
                | Self::Bitmaps
                | Self::Rings
                | Self::Queues
                | Self::Walks
                | Self::Access
                | Self::Load
                | Self::Pause
        )
    }

    /// Whether it is about guests.
    pub fn is_of_guest(self) -> bool {
        (Self::Insert as u8..=Self::ZapStep as u8).contains(&(self as u8))
    }
}

/// One operation of a sequence: on which CPU, and where its arguments come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Which it is of its sequence.
    pub number: usize,
    /// The CPU that it runs on.
    pub cpu: usize,
    /// The operation.
    pub kind: Kind,
    /// The source of its arguments.
    pub seed: u64,
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { number, cpu, kind, seed } = self;
        write!(f, "{number:>3}: CPU {cpu}: {kind:?} {seed:#x}")
    }
}
