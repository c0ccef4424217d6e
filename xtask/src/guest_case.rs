//! A test of a guest: its files, and its outcome.

use crate::cases::{self, Outcome};
use crate::fetch::Files;
use crate::qemu::Ran;
use crate::{Error, Result};

/// The files of the guests that are tested.
pub struct Context {
    /// Those of a guest of arm64.
    pub arm64: Option<Files>,
    /// Those of a guest of x86-64.
    pub x86: Option<Files>,
}

impl Context {
    /// Returns the files of a guest of arm64.
    ///
    /// # Errors
    /// It was not asked for.
    pub fn arm64(&self) -> Result<&Files> {
        let missing = || Error::Missing("nothing is there for a guest of arm64".into());
        self.arm64.as_ref().ok_or_else(missing)
    }

    /// Returns the files of a guest of x86-64.
    ///
    /// # Errors
    /// It was not asked for.
    pub fn x86(&self) -> Result<&Files> {
        let missing = || Error::Missing("nothing is there for a guest of x86-64".into());
        self.x86.as_ref().ok_or_else(missing)
    }
}

/// A test of a guest.
pub type Case = cases::Case<'static, Context>;

/// Whether each attempt of the hostile guest was answered as it should be.
///
/// # Errors
/// The line of the console that says otherwise, or that it did not come to its end.
pub fn tried_in_vain(ran: &Ran) -> std::result::Result<(), String> {
    if let Some(line) =
        ran.console.iter().find(|line| line.contains("WRONG") || line.contains("PANIC"))
    {
        return Err(line.clone());
    }
    match ran.console.iter().any(|line| line == "hostile: done, 0 wrong") {
        true => Ok(()),
        false => Err("it did not come to its end".into()),
    }
}

/// Returns a boot's outcome: how much was counted of one thing; if it is wrong, what was said last,
/// and all that was counted. Of one that was to go wrong, how it did.
pub fn outcome(
    ran: &Ran,
    verdict: std::result::Result<Option<String>, String>,
    names: &[&str],
    counted: usize,
) -> Outcome {
    let number = |place: usize| ran.counters.get(place).copied().unwrap_or(0);
    let brief = format!(
        "{:.1} s of processors, {} {}",
        ran.had.as_secs_f64(),
        number(counted),
        names[counted]
    );
    let (wrong, more) = match verdict {
        Ok(seen) => (
            None,
            seen.map(|seen| format!("as it should, it went wrong: {seen}")).into_iter().collect(),
        ),
        Err(why) => {
            let last = &ran.console[ran.console.len().saturating_sub(20)..];
            let said = last.iter().map(|line| format!("| {line}"));
            let counted = names.iter().zip(&ran.counters);
            let counted = counted.map(|(name, number)| format!("# {number} {name}"));
            (Some(why), said.chain(counted).collect())
        }
    };
    Outcome { wrong, brief, more }
}
