//! The manuals' answer to an access: the judge's walk through tables, and through nested ones below
//! them.

use core::ptr;

use arrayvec::ArrayVec;
use tablewright::Pa;
use tablewright_walker::{self as walker, Leaf, Regime, Walk, with_access_flag, with_dirty};

use crate::cpu::{Access, Fault, Kind};
use crate::svm;

/// Reads memory, which is mapped one to one.
pub fn peek(at: u64) -> u64 {
    // SAFETY: a descriptor or a token, which walkers write, too.
    unsafe { ptr::with_exposed_provenance::<u64>(at as usize).read_volatile() }
}

/// A tree of tables: what they are, and where.
pub type Tree = (Regime, Pa);

/// The judge of one question.
pub struct Judge {
    tables: Tree,
    nested: Option<Tree>,
    /// Descriptors on the way, and what they are afterwards: of two addresses at most 5 each, and
    /// the nested ones of these and of the end.
    passed: ArrayVec<(u64, u64), { 2 * (5 + 6 * 5) }>,
}

impl Judge {
    /// A judge of accesses through `tables`, which are a guest's if there are nested ones.
    pub fn new(tables: Tree, nested: Option<Tree>) -> Self {
        Self { tables, nested, passed: ArrayVec::new() }
    }

    /// The address of what is accessed in memory.
    ///
    /// # Errors
    /// The fault that it ends in.
    pub fn access(&mut self, at: u64, access: Access) -> Result<u64, Fault> {
        let fault = |code| Fault::Page { code, at };
        // To nested tables, what is done to descriptors is to write (APM vol. 2 15.25.5).
        let write = Access { kind: Kind::Write, ..access };
        let descriptor = |judge: &mut Self, at| judge.below(at, write, svm::IN_WALK);
        let reached = self.walk(self.tables, at, access, fault, descriptor)?;
        self.below(reached, access, svm::FINAL)
    }

    /// The descriptors that were passed, and what they should be by now.
    pub fn passed(&self) -> impl Iterator<Item = (u64, u64)> {
        self.passed.iter().copied()
    }

    /// Returns the place in memory of an address that the tables hold. To nested ones, every access
    /// is a user's (15.25.5).
    fn below(&mut self, at: u64, access: Access, of: u64) -> Result<u64, Fault> {
        let Some(tables) = self.nested else {
            return Ok(at);
        };
        let access = Access { user: true, ..access };
        let fault = |code| Fault::Nested { info: code | of, at };
        self.walk(tables, at, access, fault, |_, at| Ok(at))
    }

    fn walk(
        &mut self,
        (regime, root): Tree,
        at: u64,
        access: Access,
        fault: impl Fn(u64) -> Fault,
        descriptor_at: impl Fn(&mut Self, u64) -> Result<u64, Fault>,
    ) -> Result<u64, Fault> {
        let mut walk = Walk::new(regime, root.get(), at).map_err(|_| Fault::Other(0))?;
        loop {
            let level = walk.level();
            let entry = descriptor_at(self, walk.table() + 8 * walk.index() as u64)?;
            let descriptor = peek(entry);
            let found = match walk.step(descriptor) {
                Ok(found) => found,
                Err(walker::Fault::NotMapped { .. }) => return Err(fault(code(access))),
                // The engine writes no such thing; no processor answers so.
                Err(_) => return Err(Fault::Other(0)),
            };
            if found.is_some_and(|leaf| !allows(&leaf, access)) {
                return Err(fault(PRESENT | code(access)));
            }
            let mut after = with_access_flag(regime, level, descriptor).unwrap_or(descriptor);
            if found.is_some() && access.kind == Kind::Write {
                after = with_dirty(regime, level, after).unwrap_or(after);
            }
            self.passed.push((entry, after));
            if let Some(leaf) = found {
                return Ok(leaf.physical(at));
            }
        }
    }
}

/// In the error code of a page fault, and of a nested one: something is mapped, and does not allow
/// it.
const PRESENT: u64 = 1 << 0;

/// The bits of an error code that say what was tried (SDM vol. 3A 5.7; APM vol. 2 8.4.2, 15.25.6).
fn code(access: Access) -> u64 {
    let kind = match access.kind {
        Kind::Read => 0,
        Kind::Write => 1 << 1,
        Kind::Fetch => 1 << 4,
    };
    kind | u64::from(access.user) << 2
}

fn allows(leaf: &Leaf, access: Access) -> bool {
    let permissions = if access.user { leaf.access.user } else { leaf.access.privileged };
    match access.kind {
        Kind::Read => permissions.read,
        Kind::Write => permissions.write,
        Kind::Fetch => permissions.execute,
    }
}
