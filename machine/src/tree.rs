//! A tournament tree of the CPUs that wait for their turn: the first is read in one load.
//!
//! The leaves are the keys of the CPUs, [`NEVER`] for one that does not wait for a turn; each inner
//! node is the smaller of its two children, so the root is the first of all. **The CPU that runs is
//! not in the tree.** The root is then at once the next CPU to resume and the bound up to which the
//! running one may go on without asking.
//!
//! Both changes touch one path and nothing else. A CPU enters with [`lower`](Tree::lower), which
//! stops at the first node that is smaller already: a CPU that comes back usually goes far behind
//! the first, and its path is short. It leaves with [`remove`](Tree::remove), which plays the path
//! again: one compare and one store a level, the siblings loaded independently of each other. The
//! number of leaves is a power of two, so that every path is of the same length and the loop has no
//! branch to predict.

use std::cell::Cell;

use crate::time::MAX_CPUS;

/// The key of a CPU that waits for nothing: behind every time of every run.
pub(crate) const NEVER: u64 = u64::MAX;

/// Room for a tree of the most CPUs. A constant, so that an index is checked by masking it; a
/// smaller tree uses the front.
const NODES: usize = 2 * MAX_CPUS;

pub(crate) struct Tree {
    /// The smallest of all leaves and the ceiling.
    first: Cell<u64>,
    /// A key that plays against the winner: where the run has to end. It costs the running CPU
    /// nothing.
    ceiling: Cell<u64>,
    leaves: usize,
    /// Node 1 is the root, nodes `2 i` and `2 i + 1` the children of node `i`, the last `leaves`
    /// nodes the leaves. Node 0 is zero, smaller than any key, and ends every way up.
    nodes: Box<[Cell<u64>; NODES]>,
}

impl Tree {
    /// A tree for so many CPUs, all absent, and no ceiling.
    pub fn new(cpus: usize) -> Self {
        let leaves = cpus.next_power_of_two();
        Self {
            first: Cell::new(NEVER),
            ceiling: Cell::new(NEVER),
            leaves,
            nodes: Box::new(std::array::from_fn(|node| {
                Cell::new(if node == 0 { 0 } else { NEVER })
            })),
        }
    }

    /// The smallest key of all CPUs in the tree, or the ceiling.
    #[inline(always)]
    pub fn first(&self) -> u64 {
        self.first.get()
    }

    /// Sends all CPUs away and sets the ceiling.
    pub fn clear(&self, ceiling: u64) {
        for node in &self.nodes[1..2 * self.leaves] {
            node.set(NEVER);
        }
        self.ceiling.set(ceiling);
        self.first.set(ceiling);
    }

    /// A node. No tree has as many as to reach the mask.
    #[inline(always)]
    fn node(&self, node: usize) -> &Cell<u64> {
        &self.nodes[node % NODES]
    }

    /// The key of a CPU.
    pub fn get(&self, cpu: usize) -> u64 {
        self.node(self.leaves + cpu).get()
    }

    /// Gives a CPU an earlier key than it has: [`NEVER`] if it is not in the tree.
    #[inline(always)]
    pub fn lower(&self, cpu: usize, key: u64) {
        let mut node = self.leaves + cpu;
        while self.node(node).get() > key {
            self.node(node).set(key);
            node >>= 1;
        }
        self.first.set(self.first.get().min(key));
    }

    /// Takes a CPU out.
    #[inline(always)]
    pub fn remove(&self, cpu: usize) {
        let mut node = self.leaves + cpu;
        let mut winner = NEVER;
        self.node(node).set(winner);
        while node > 1 {
            winner = winner.min(self.node(node ^ 1).get());
            node >>= 1;
            self.node(node).set(winner);
        }
        self.first.set(winner.min(self.ceiling.get()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Time;
    use proptest::prelude::*;

    proptest! {
        /// Against a plain array, for every number of CPUs.
        #[test]
        fn the_first_is_the_smallest(
            cpus in prop_oneof![1..20_usize, 1..=MAX_CPUS],
            ceiling in 0..64_u64,
            steps in prop::collection::vec((any::<prop::sample::Index>(), 0..64_u64,
            any::<bool>()), 1..200),
        ) {
            let tree = Tree::new(cpus);
            let ceiling = Time::ps(ceiling).key(0);
            tree.clear(ceiling);
            let mut keys = vec![NEVER; cpus];
            for (cpu, time, enter) in steps {
                let cpu = cpu.index(cpus);
                let key = Time::ps(time).key(cpu);
                if !enter {
                    tree.remove(cpu);
                    keys[cpu] = NEVER;
                } else if key <= keys[cpu] {
                    tree.lower(cpu, key);
                    keys[cpu] = key;
                }
                prop_assert_eq!(tree.get(cpu), keys[cpu]);
                let first = keys.iter().copied().min().unwrap();
                prop_assert_eq!(tree.first(), first.min(ceiling));
            }
            tree.clear(NEVER);
            prop_assert_eq!(tree.first(), NEVER);
        }
    }
}
