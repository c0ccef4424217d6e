//! AMD nested paging: the entries of [x86-64](crate::x86_64), read for a guest.
//!
//! Every access of a guest, of its kernel too and of its table walks, is one of a user to the
//! nested tables (APM vol. 2 15.25.5), so that U/S has to be set at all levels, and R/W and XD bind
//! both alike. A walk writes the tables of the guest that it comes to, whether it sets flags in
//! them or not. G has no meaning, nor have protection keys; PAT, PCD and PWT index the host's PAT
//! (15.25.8). An address is not signed: those of 4 levels have 48 bits, all of which select.

use crate::regime::Shape;
use crate::walk::Format;
use crate::x86_64::Paging;
use crate::{Access, Denied, Descriptor, Leaf, Permissions};

/// The format with 4 or 5 levels.
#[derive(Clone, Copy)]
pub(crate) struct Nested(Paging);

impl Nested {
    pub(crate) const fn new(levels: u8) -> Self {
        Self(Paging::nested(levels))
    }
}

impl Format for Nested {
    #[inline(always)]
    fn shape(&self) -> Shape {
        self.0.shape()
    }

    #[inline(always)]
    fn decode(&self, depth: u32, va: u64, denied: Denied, descriptor: u64) -> Descriptor {
        match self.0.decode(depth, va, denied, descriptor) {
            Descriptor::Leaf(leaf) => {
                let guest: Permissions = leaf.access.user;
                Descriptor::Leaf(Leaf {
                    access: Access { privileged: guest, user: guest },
                    global: false,
                    ..leaf
                })
            }
            other => other,
        }
    }

    #[inline(always)]
    fn used(&self, leaf: u64) -> u64 {
        self.0.used(leaf)
    }

    #[inline(always)]
    fn table_used(&self, table: u64) -> u64 {
        self.0.table_used(table)
    }

    #[inline(always)]
    fn written(&self, leaf: u64) -> u64 {
        self.0.written(leaf)
    }
}
