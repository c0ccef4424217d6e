//! Several guests at once, each with vCPUs of its own: more of them than there are processors, and,
//! if that is asked for, more than there are VMIDs.
//!
//! Each guest sees memory of its own at the same addresses as the others, on other frames; what is
//! not memory is [emulated](devices). First come those that boot the kernel that was loaded, then
//! small ones (`src/bin/small`).
//!
//! | | |
//! |---|---|
//! | [`crowd`] | the guests, and what each has beside its memory |
//! | [`vcpu`] | the registers of a vCPU that does not run |
//! | [`gic`] | interrupts |
//! | [`life`] | work between two guests, and the end |
//! | [`schedule`] | turns |
//! | [`devices`] | a guest's devices and firmware |
//! | [`start`] | the memory and vCPUs that each guest begins with |
//! | [`identifiers`](crate::identifiers) | VMIDs |
//!
//! A guest that is not loaded is edited like any other: a processor that goes from one guest to the
//! next takes frames away from guests in turn, and one that has no guest at all logs their writes.

pub mod crowd;
pub mod devices;
pub mod gic;
pub mod life;
pub mod schedule;
pub mod start;
pub mod vcpu;
