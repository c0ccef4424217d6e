//! A progress bar for work that turns out to be long.

use std::fmt::Write;
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// Work shorter than this shows nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// A bar that appears on a terminal once its user may start to wonder. What is measured is not
/// disturbed by it: it draws only when stepped, unless time is [virtual](Progress::ticking).
pub struct Progress {
    bar: ProgressBar,
    started: Instant,
    shown: bool,
}

impl Progress {
    /// A bar of that many steps, not shown yet.
    pub fn new(steps: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::hidden());
        style(&bar, "{msg:28} {wide_bar} {pos}/{len} {left}");
        Self { bar, started: Instant::now(), shown: false }
    }

    /// One for work that is known to be long: it is shown from the first step on.
    pub fn at_once(steps: u64) -> Self {
        let mut progress = Self::new(steps);
        progress.shown = true;
        progress.bar.set_draw_target(ProgressDrawTarget::stderr());
        progress
    }

    /// One for runs in virtual time, which a thread that draws does not disturb: it appears and
    /// moves within a step as well.
    pub fn ticking(steps: u64) -> Self {
        let mut progress = Self::new(steps);
        progress.shown = true;
        style(&progress.bar, "{spinner} {elapsed:>3} {msg:24} {wide_bar} {pos}/{len} {left}");
        let bar = progress.bar.downgrade();
        thread::spawn(move || {
            thread::sleep(PATIENCE);
            if let Some(bar) = bar.upgrade().filter(|bar| !bar.is_finished()) {
                bar.set_draw_target(ProgressDrawTarget::stderr());
                bar.enable_steady_tick(Duration::from_millis(500));
            }
        });
        progress
    }

    /// One for something that takes so long: it moves by itself.
    pub fn of_time(duration: Duration, what: &str) -> Self {
        let seconds = duration.as_secs_f64().ceil().max(1.0) as u64;
        let mut progress = Self::new(seconds);
        progress.shown = true;
        progress.bar.set_message(what.to_owned());
        style(&progress.bar, "{msg:28} {wide_bar} {pos} of {len} s");
        let (bar, started) = (progress.bar.downgrade(), progress.started);
        thread::spawn(move || {
            thread::sleep(PATIENCE);
            if let Some(bar) = bar.upgrade() {
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            while let Some(bar) = bar.upgrade().filter(|bar| !bar.is_finished()) {
                bar.set_position(started.elapsed().as_secs().min(seconds));
                drop(bar);
                thread::sleep(Duration::from_millis(500));
            }
        });
        progress
    }

    /// One step done; `next` is what comes now.
    pub fn step(&mut self, next: &str) {
        self.at(self.bar.position() + 1, next);
    }

    /// Moves to `steps`; `next` is what comes now.
    pub fn at(&mut self, steps: u64, next: &str) {
        self.bar.set_message(next.to_owned());
        self.bar.set_position(steps);
        if !self.shown && self.started.elapsed() >= PATIENCE {
            self.shown = true;
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }
}

fn style(bar: &ProgressBar, template: &str) {
    if let Ok(style) = ProgressStyle::with_template(template) {
        let show = |state: &ProgressState, to: &mut dyn Write| {
            // A terminal that takes no more has nothing to be told.
            let _ = to.write_str(&left(state.pos(), state.eta()));
        };
        bar.set_style(style.with_key("left", show));
    }
}

/// How long it will take, which nothing is known of before the first step is done.
fn left(steps: u64, eta: Duration) -> String {
    match steps {
        0 => String::new(),
        _ => format!("{:#}", HumanDuration(eta)),
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_promised_before_the_first_step() {
        assert_eq!(left(0, Duration::ZERO), "");
        assert_eq!(left(1, Duration::from_secs(40)), "40s");
    }
}
