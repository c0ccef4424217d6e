//! Memory of this computer to build tables in: frames, the engine's platform on them, a bare loop
//! over them, and the judge that reads what was written.

pub mod arena;
pub mod bare;
pub mod judge;
pub mod platform;
