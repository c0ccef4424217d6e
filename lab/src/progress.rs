//! A progress bar for work that turns out to be long.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Work shorter than this shows nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// A bar that appears on a terminal once its user may start to wonder. It draws only when stepped, so that it never
/// disturbs what is being measured.
pub struct Progress {
    bar: ProgressBar,
    started: Instant,
    shown: bool,
}

impl Progress {
    /// A bar of that many steps, not shown yet.
    pub fn new(steps: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{msg:28} {wide_bar} {pos}/{len} {eta}") {
            bar.set_style(style);
        }
        Self {
            bar,
            started: Instant::now(),
            shown: false,
        }
    }

    /// One step done; `next` is what comes now.
    pub fn step(&mut self, next: &str) {
        self.bar.set_message(next.to_owned());
        self.bar.inc(1);
        if !self.shown && self.started.elapsed() >= PATIENCE {
            self.shown = true;
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
