//! Tests of the engine that go through millions of cases, in `tests/`.
//!
//! They are a package of their own because a package is built with one level of optimisation. The
//! engine's other tests take longer to build than to run, and are built without.
