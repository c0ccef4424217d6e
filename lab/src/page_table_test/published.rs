//! The published figures of this test, by what they were measured with.

use tablewright_experiments::input::{Backing, Mode};
use tablewright_experiments::page_table_test::ways::How;
use tablewright_machine::Profile;

use crate::published::{self, Row, TableError};
use crate::size::Size;

/// The names of the phases in the published tables.
const METRICS: [&str; 3] = [
    "KVM_CREATE_MAPPINGS",
    "KVM_UPDATE_MAPPINGS",
    "KVM_REBUILD_BLOCKS",
];

/// What a published row was measured with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Before and after the change.
    pub hows: [How; 2],
    /// `-m`.
    pub mode: Mode,
    /// `-s`.
    pub backing: Backing,
    /// `-b`.
    pub bytes: u64,
    /// `-v`.
    pub vcpus: u16,
    /// The phase.
    pub phase: usize,
}

impl Case {
    /// What a row says: the change in words, and the options behind the semicolon.
    pub fn of(row: &Row) -> Result<Self, TableError> {
        let unknown =
            |why: &str| TableError::Configuration(row.configuration.clone(), why.to_owned());
        let (change, options) = row
            .configuration
            .split_once(';')
            .ok_or_else(|| unknown("it has no options behind a semicolon"))?;
        let hows = match change.split_whitespace().next() {
            Some("patch1") => [How::Before, How::CmoInHandler],
            // On top of the first.
            Some("patch2") => [How::CmoInHandler, How::InstallFirst],
            _ => return Err(unknown("it is of no change that this program knows")),
        };
        let words: Vec<&str> = options.split_whitespace().collect();
        let option = |name: &str| {
            let at = words.iter().position(|word| *word == name);
            at.and_then(|at| words.get(at + 1))
                .ok_or_else(|| unknown(&format!("it has no {name}")))
        };
        let phase = METRICS.iter().position(|metric| *metric == row.metric);
        Ok(Self {
            hows,
            mode: option("-m")?
                .parse()
                .map_err(|error: String| unknown(&error))?,
            backing: option("-s")?
                .parse()
                .map_err(|error: String| unknown(&error))?,
            bytes: option("-b")?
                .parse::<Size>()
                .map_err(|error| unknown(&error.to_string()))?
                .bytes(),
            vcpus: option("-v")?
                .parse()
                .map_err(|_| unknown("-v is no number"))?,
            phase: phase.ok_or_else(|| unknown("it is of no phase of the test"))?,
        })
    }
}

/// Published figures for one command line.
pub struct Figures(Vec<(How, usize, f64, bool)>);

impl Figures {
    /// Those of the system that a profile describes.
    pub fn of(profile: &Profile, mode: Mode, backing: Backing, bytes: u64, vcpus: u16) -> Self {
        let rows = published::built_in("page-table-test").unwrap_or_default();
        let ours = rows
            .iter()
            .filter(|row| profile.system.published_as.contains(&row.system));
        let mut figures = Vec::new();
        for row in ours {
            let Ok(case) = Case::of(row) else { continue };
            if (case.mode.bits, case.backing, case.bytes, case.vcpus)
                != (mode.bits, backing, bytes, vcpus)
            {
                continue;
            }
            let fitted = profile.is_fitted_on_metric(&row.system, &row.configuration, &row.metric);
            for (how, figure) in case.hows.into_iter().zip([row.before, row.after]) {
                figures.extend(figure.map(|figure| (how, case.phase, figure, fitted)));
            }
        }
        Self(figures)
    }

    /// The figure for a way and a phase, the first that was published, and whether the machine was
    /// fitted on it.
    pub fn get(&self, how: How, phase: usize) -> Option<(f64, bool)> {
        let found = self
            .0
            .iter()
            .find(|figure| (figure.0, figure.1) == (how, phase))?;
        Some((found.2, found.3))
    }
}
