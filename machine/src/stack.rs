//! Stacks of simulated CPUs: guarded by an inaccessible page, and coloured.
//!
//! The system hands out stacks at multiples of a page, so the few hot cache lines near the top of
//! each would all fall into the same few sets of the host's caches, and 416 CPUs would evict each
//! other at every switch. Each stack starts a different number of lines below the top of its page.
//! Memory is committed when it is first touched: a large stack costs address space, not memory.

use std::io;

use corosensei::stack::{DefaultStack, MIN_STACK_SIZE, Stack, StackPointer};

/// Bytes of a cache line of the host, near enough; and how many of them make a page.
const LINE: usize = 64;
const COLOURS: usize = 64;

pub(crate) struct ColouredStack {
    inner: DefaultStack,
    base: StackPointer,
}

impl ColouredStack {
    pub fn new(size: usize, cpu: usize) -> io::Result<Self> {
        let inner = DefaultStack::new(size.clamp(MIN_STACK_SIZE, 1 << 30) + LINE * COLOURS)?;
        // Multiplicative hashing: neighbours, and CPUs any power of two apart, get colours far from
        // each other.
        let colour = (cpu.wrapping_mul(0x9e37_79b9) >> 26) % COLOURS;
        let base = StackPointer::new(inner.base().get() - LINE * colour)
            .expect("a stack lies above its size");
        Ok(Self { inner, base })
    }
}

// SAFETY: the stack is that of `inner`, with its guard page, used from a little below its top: at
// most `LINE * COLOURS` bytes, by which it was made larger than the minimum or more. `LINE` is a
// multiple of the alignment of a stack.
unsafe impl Stack for ColouredStack {
    fn base(&self) -> StackPointer {
        self.base
    }

    fn limit(&self) -> StackPointer {
        self.inner.limit()
    }

    #[cfg(windows)]
    fn teb_fields(&self) -> corosensei::stack::StackTebFields {
        self.inner.teb_fields()
    }

    #[cfg(windows)]
    fn update_teb_fields(&mut self, stack_limit: usize, guaranteed_stack_bytes: usize) {
        self.inner.update_teb_fields(stack_limit, guaranteed_stack_bytes);
    }
}
