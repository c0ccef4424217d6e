//! What is said on the standard output, for as long as there is a reader; and whether the user wants it to end.

use std::io::{IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::{About as _, Result};

static UNREAD: AtomicBool = AtomicBool::new(false);

/// A line. Where nothing reads any more, as behind `| head -1`, it is dropped.
pub fn line(text: std::fmt::Arguments<'_>) {
    if writeln!(std::io::stdout(), "{text}").is_err() {
        UNREAD.store(true, Ordering::Relaxed);
    }
}

/// Whether the reader has gone.
pub fn is_unread() -> bool {
    UNREAD.load(Ordering::Relaxed)
}

/// Says a line on the standard output.
#[macro_export]
macro_rules! say {
    ($($format:tt)*) => { $crate::out::line(format_args!($($format)*)) };
}

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From here on Ctrl-C does not end the program, nor do the other signals that ask it to: [`is_interrupted`] says so. A second one
/// ends it.
///
/// # Errors
/// Signals cannot be had.
pub fn take_interrupts() -> Result<()> {
    let interrupted = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register_conditional_default(signal, interrupted.clone()).about("signals")?;
        flag::register(signal, interrupted.clone()).about("signals")?;
    }
    Ok(())
}

/// Whether interrupts are [taken](take_interrupts).
pub fn takes_interrupts() -> bool {
    INTERRUPTED.get().is_some()
}

/// Whether Ctrl-C was pressed.
pub fn is_interrupted() -> bool {
    INTERRUPTED
        .get()
        .is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// Runs what takes a while, under a sign that it does: a line where no terminal is, and there a clock.
pub fn slowly<T>(what: &str, run: impl FnOnce() -> T) -> T {
    if !std::io::stderr().is_terminal() {
        eprintln!("{what} ...");
    }
    clocked(what, run)
}

/// Whether there is a clock.
static CLOCK: AtomicBool = AtomicBool::new(false);

/// Runs something with a clock, where there is a terminal, and no clock yet.
pub fn clocked<T>(what: &str, run: impl FnOnce() -> T) -> T {
    if CLOCK.swap(true, Ordering::Relaxed) {
        return run();
    }
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
        bar.set_style(style);
    }
    bar.set_message(what.to_string());
    bar.enable_steady_tick(Duration::from_millis(200));
    let done = run();
    bar.finish_and_clear();
    CLOCK.store(false, Ordering::Relaxed);
    done
}
