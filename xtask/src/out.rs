//! The standard output, for as long as there is a reader; and whether the user wants it to end.

use std::io::{IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::{About as _, Result};

static UNREAD: AtomicBool = AtomicBool::new(false);

/// A line. Where nothing reads any more, as behind `| head -1`, it is dropped.
pub fn line(text: std::fmt::Arguments<'_>) {
    if cfg!(test) {
        // Which the test keeps, unless it fails.
        return println!("{text}");
    }
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

/// From here on Ctrl-C does not end the program, nor do the other signals that ask it to:
/// [`is_interrupted`] says so. A second one ends it.
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
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// How long there is no sign that something is being done.
pub const SILENCE: Duration = Duration::from_secs(4);

/// Runs what takes a while, under a sign that it does: a line where no terminal is, and there a
/// clock.
pub fn slowly<T>(what: &str, run: impl FnOnce() -> T) -> T {
    if !std::io::stderr().is_terminal() {
        eprintln!("{what} ...");
    }
    clocked(what, run)
}

/// Runs something with a clock, if there is none yet.
pub fn clocked<T>(what: &str, run: impl FnOnce() -> T) -> T {
    let _clock = Clock::start(what);
    run()
}

/// Whether there is a clock.
static CLOCK: AtomicBool = AtomicBool::new(false);

/// Shows what is being done, and for how long: on a terminal in one line, and elsewhere in a line
/// now and then. There is one at a time: the others show nothing.
pub struct Clock(Option<Shown>);

struct Shown {
    bar: ProgressBar,
    message: Arc<Mutex<String>>,
    /// The thread that says the lines where no terminal is: it ends when the sender is gone.
    lines: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Clock {
    /// Begins.
    pub fn start(what: &str) -> Self {
        Self::with(what, SILENCE, |line| eprintln!("{line}"))
    }

    fn with(what: &str, silence: Duration, say: impl Fn(String) + Send + 'static) -> Self {
        if CLOCK.swap(true, Ordering::Relaxed) {
            return Self(None);
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
            bar.set_style(style);
        }
        let message = Arc::new(Mutex::new(what.to_string()));
        let lines = bar.is_hidden().then(|| {
            let (ends, ended) = channel::<()>();
            let (message, started) = (message.clone(), Instant::now());
            let tell = move || {
                while ended.recv_timeout(silence) == Err(RecvTimeoutError::Timeout) {
                    let message = message.lock().map_or_else(|_| String::new(), |it| it.clone());
                    say(format!("  {} s: {message}", started.elapsed().as_secs()));
                }
            };
            (ends, std::thread::spawn(tell))
        });
        bar.enable_steady_tick(Duration::from_millis(200));
        let clock = Self(Some(Shown { bar, message, lines }));
        clock.message(what.to_string());
        clock
    }

    /// Says the work from here on.
    pub fn message(&self, what: String) {
        if let Some(shown) = &self.0 {
            if let Ok(mut message) = shown.message.lock() {
                message.clone_from(&what);
            }
            shown.bar.set_message(what);
        }
    }

    /// Says a line on the standard output, above the clock.
    pub fn line(&self, text: &str) {
        match &self.0 {
            Some(shown) => shown.bar.suspend(|| say!("{text}")),
            None => say!("{text}"),
        }
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        let Some(shown) = self.0.take() else {
            return;
        };
        shown.bar.finish_and_clear();
        if let Some((ends, lines)) = shown.lines {
            drop(ends);
            // It has nothing to say any more.
            let _ = lines.join();
        }
        CLOCK.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::{Clock, SILENCE};

    #[test]
    fn what_takes_long_says_so_where_no_terminal_is() {
        assert!(SILENCE < Duration::from_secs(5));
        let (says, said) = channel();
        let say = move |line| says.send(line).unwrap_or_default();
        let clock = Clock::with("one", Duration::from_millis(10), say);
        // Other tests may have one, or a terminal: then this shows nothing.
        if clock.0.as_ref().is_some_and(|shown| shown.lines.is_some()) {
            let second = Duration::from_secs(60);
            assert_eq!(said.recv_timeout(second).as_deref(), Ok("  0 s: one"));
            clock.message("two".into());
            let mut lines = std::iter::from_fn(|| said.recv_timeout(second).ok());
            assert!(lines.any(|line| line.ends_with(": two")));
            drop(clock);
            assert!(said.iter().count() < 100, "it ends with its clock");
        }
    }
}
