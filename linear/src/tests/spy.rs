//! A platform that writes down which of its functions are called, so that one that is not passed on
//! is missed.

use std::cell::RefCell;
use std::ptr::NonNull;
use std::vec::Vec;

use tablewright::{
    Barrier, Caps, Entry, Hooks, Invalidation, Level, NoHooks, Pa, Platform, TableLink,
};
use tablewright_hosted::Hosted;

pub struct Spy {
    pub hosted: Hosted,
    pub accesses: NoHooks,
    pub called: RefCell<Vec<&'static str>>,
}

/// Overrides each function of a trait with one that writes its name down and passes the call on.
macro_rules! overridden {
    ($all:ident: $trait:ident of $to:ident;
        $(
            $(#[$safe:ident])? fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;
        )*) => {
        // SAFETY: everything is passed on.
        unsafe impl $trait for Spy {
            $(overridden!(
                @ $trait, $to; $(#[$safe])? fn $name($($argument: $type),*) $(-> $result)?
            );)*
        }
        /// The names of all of them.
        pub const $all: &[&str] = &[$(stringify!($name)),*];
    };
    (@ $trait:ident, $to:ident; #[not_safe]
        fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?) => {
        unsafe fn $name(&self, $($argument: $type),*) $(-> $result)? {
            self.called.borrow_mut().push(stringify!($name));
            // SAFETY: passed on.
            unsafe { $trait::$name(&self.$to, $($argument),*) }
        }
    };
    (
        @ $trait:ident, $to:ident;
        fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?
    ) => {
        fn $name(&self, $($argument: $type),*) $(-> $result)? {
            self.called.borrow_mut().push(stringify!($name));
            $trait::$name(&self.$to, $($argument),*)
        }
    };
}

overridden! {
    FUNCTIONS: Platform of hosted;
    fn alloc_table(level: Level) -> Option<Pa>;
    #[not_safe]
    fn free_table(frame: Pa, level: Level);
    #[not_safe]
    fn table(frame: Pa, level: Level) -> NonNull<Entry>;
    fn barrier(barrier: Barrier);
    fn invalidate(what: &Invalidation<'_>);
    fn alloc_root(level: Level, tables: usize) -> Option<Pa>;
    #[not_safe]
    fn free_root(root: Pa, level: Level, tables: usize);
    fn caps() -> Caps;
    fn table_done(frame: Pa, table: NonNull<Entry>);
    fn link_of(frame: Pa) -> Option<&TableLink>;
    fn prefetch(frame: Pa);
}

overridden! {
    ACCESSES: Hooks of accesses;
    #[not_safe]
    fn read(entry: NonNull<Entry>) -> u64;
    #[not_safe]
    fn load(entry: NonNull<Entry>) -> u64;
    #[not_safe]
    fn follow(entry: NonNull<Entry>) -> u64;
    #[not_safe]
    fn store(entry: NonNull<Entry>, bits: u64);
    #[not_safe]
    fn link(entry: NonNull<Entry>, bits: u64);
    #[not_safe]
    fn exchange(entry: NonNull<Entry>, bits: u64) -> u64;
    #[not_safe]
    fn compare_exchange(entry: NonNull<Entry>, current: u64, new: u64) -> Result<(), u64>;
    #[not_safe]
    fn fill(first: NonNull<Entry>, count: usize, value: u64, step: u64);
}
