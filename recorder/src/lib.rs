//! Which pages a program writes, interval by interval: what records it, on Linux, and the
//! [file](recording) that it goes to, which is read everywhere.
//!
//! A [`Session`] watches a process by one of the [methods](Method) that its kernel has: write
//! protection without a handler and scans of the page map, or soft-dirty bits.
#![cfg_attr(
    target_os = "linux",
    doc = "
```no_run
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tablewright_recorder::{Method, Options, Process, Session, recording::Recording};

// For ten seconds, or until it ends.
let options = Options { interval: Duration::from_millis(100),
    duration: Some(Duration::from_secs(10)), intervals: None };
let fault = Method::Scan.probe()?;
let mut session = Session::begin(&options, &[(Method::Scan, fault)], Process::open(4711)?)?;
session.run(&options, &AtomicBool::new(false), || ());
let recording = Recording::parse(session.finish())?;
println!(\"{} pages\", recording.pages());
# Ok::<(), Box<dyn std::error::Error>>(())
```
"
)]

#[cfg(target_os = "linux")]
mod harvest;
#[cfg(target_os = "linux")]
mod layout;
#[cfg(target_os = "linux")]
mod method;
#[cfg(target_os = "linux")]
mod process;
pub mod recording;
#[cfg(target_os = "linux")]
mod scan;
#[cfg(target_os = "linux")]
mod session;
#[cfg(target_os = "linux")]
mod soft_dirty;
#[cfg(target_os = "linux")]
mod sys;
#[cfg(all(test, target_os = "linux"))]
mod tests;
#[cfg(target_os = "linux")]
mod tracee;

#[cfg(target_os = "linux")]
pub use method::Method;
#[cfg(target_os = "linux")]
pub use process::{Process, ProcessError};
#[cfg(target_os = "linux")]
pub use session::{Options, Outcome, Session};
