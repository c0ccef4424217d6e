//! Coroutines, each with a stack, on which simulated CPUs run.
//!
//! Miri interprets no switch of stacks. There a CPU is a thread, and the threads pass one turn
//! around: the same program in the same order, and each hand-over orders what comes before it ahead
//! of what comes after it.

#[cfg(not(miri))]
pub(crate) use corosensei::{Coroutine, CoroutineResult};
#[cfg(miri)]
pub(crate) use threads::{ColouredStack, Coroutine, CoroutineResult, Yielder};

#[cfg(not(miri))]
pub(crate) use crate::stack::ColouredStack;

/// How the code on a stack gives up the host's processor.
#[cfg(not(miri))]
pub(crate) type Yielder = corosensei::Yielder<(), ()>;

#[cfg(miri)]
mod threads {
    use std::io;
    use std::panic::resume_unwind;
    use std::sync::{Arc, Condvar, Mutex, PoisonError};
    use std::thread::{self, JoinHandle};

    /// A thread has a stack of its own.
    pub(crate) struct ColouredStack;

    impl ColouredStack {
        pub fn new(_size: usize, _cpu: usize) -> io::Result<Self> {
            Ok(Self)
        }
    }

    pub(crate) enum CoroutineResult<Y, R> {
        Yield(Y),
        Return(R),
    }

    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Turn {
        Caller,
        Callee,
        /// The callee is to unwind its stack.
        Unwind,
        Ended,
    }

    #[derive(Clone)]
    pub(crate) struct Yielder(Arc<(Mutex<Turn>, Condvar)>);

    impl Yielder {
        fn give(&self, turn: Turn) {
            *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = turn;
            self.0.1.notify_all();
        }

        /// Waits for one of the turns.
        fn wait(&self, turns: &[Turn]) -> Turn {
            let (turn, changed) = &*self.0;
            let turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            let turn = changed.wait_while(turn, |turn| !turns.contains(turn));
            *turn.unwrap_or_else(PoisonError::into_inner)
        }

        pub fn suspend(&self, (): ()) {
            self.give(Turn::Caller);
            if self.wait(&[Turn::Callee, Turn::Unwind]) == Turn::Unwind {
                resume_unwind(Box::new("the coroutine was dropped"));
            }
        }
    }

    /// A value that threads hand over while they take turns.
    struct Handed<T>(T);

    // SAFETY: one thread runs at a time, and the lock of the turn orders what one does before what
    // the next does. Nothing in this crate is bound to a thread.
    unsafe impl<T> Send for Handed<T> {}

    impl<T> Handed<T> {
        fn take(self) -> T {
            self.0
        }
    }

    pub(crate) struct Coroutine<R> {
        turn: Yielder,
        thread: Option<JoinHandle<Handed<Option<R>>>>,
    }

    impl<R> Coroutine<R> {
        /// # Safety
        /// 1. What the body borrows outlives the coroutine.
        pub unsafe fn with_stack_unchecked(
            _stack: ColouredStack,
            body: impl FnOnce(&Yielder, ()) -> R,
        ) -> Self {
            let turn = Yielder(Arc::new((Mutex::new(Turn::Caller), Condvar::new())));
            let callee = turn.clone();
            let run = Handed(move || {
                let started = callee.wait(&[Turn::Callee, Turn::Unwind]) == Turn::Callee;
                let result = started.then(|| body(&callee, ()));
                callee.give(Turn::Ended);
                Handed(result)
            });
            // SAFETY: the thread is joined before the coroutine is gone, and what it borrows
            // outlives that (1.).
            let thread = unsafe { thread::Builder::new().spawn_unchecked(move || (run.take())()) };
            Self { turn, thread: thread.ok() }
        }

        pub fn resume(&mut self, (): ()) -> CoroutineResult<(), R> {
            self.turn.give(Turn::Callee);
            match self.turn.wait(&[Turn::Caller, Turn::Ended]) {
                Turn::Ended => {
                    let thread = self.thread.take();
                    let joined = thread.and_then(|thread| thread.join().ok());
                    let result = joined.and_then(Handed::take);
                    CoroutineResult::Return(result.expect("a body catches its panics"))
                }
                _ => CoroutineResult::Yield(()),
            }
        }
    }

    impl<R> Drop for Coroutine<R> {
        fn drop(&mut self) {
            if let Some(thread) = self.thread.take() {
                self.turn.give(Turn::Unwind);
                self.turn.wait(&[Turn::Ended]);
                drop(thread.join());
            }
        }
    }
}
