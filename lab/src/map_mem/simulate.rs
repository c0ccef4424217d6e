//! `map-mem --on machine`: the steps one after the other, in virtual time, beside the published
//! figures.

use tablewright_linear::Techniques;
use tablewright_machine::{Profile, Time};

use super::job::{Job, Run};
use super::plan::Plan;
use super::step::{Ran, Step, techniques_of};
use crate::error::Error;
use crate::output::columns::{self, Cell, NOT_PUBLISHED, columns};
use crate::output::report::{self, error_percent, percent};
use crate::published;

/// A step, and what was published for it.
#[derive(Clone, Debug)]
pub struct Row {
    pub step: Step,
    pub ran: Ran,
    pub published_ms: Option<f64>,
    pub fitted: bool,
    /// Gap that the profile admits.
    pub unexplained: Option<String>,
}

columns! { row: Row;
    ["step"] [0 ""] Cell::text(row.step.name);
    ["techniques"] [] row.step.techniques().map(Techniques::names).map_or(Cell::Absent, Cell::json);
    ["virtual_ms"] [1 "virtual time"] Cell::ms(ms(row.ran.time));
    ["tables"] [] Cell::Count(row.ran.tables);
    ["entries"] [] Cell::Count(row.ran.entries);
    ["windows_moved"] [2 "windows moved"] Cell::Count(row.ran.windows);
    ["invalidations_issued"] [2 "invalidations"] Cell::Count(row.ran.invalidations);
    ["waits_for_completion"] [2 "waits"] Cell::Count(row.ran.waits);
    ["barriers"] [2 "barriers"] Cell::Count(row.ran.barriers);
    ["published_ms"] [1 "published" NOT_PUBLISHED] Cell::or_nothing(row.published_ms, Cell::ms);
    ["error_percent"] [] Cell::json(row.error());
    [] [1 "error" NOT_PUBLISHED] Cell::or_nothing(row.error(), |error| Cell::text(percent(error)));
    ["fitted"] [] Cell::json(row.fitted);
    [] [1 "fitted" NOT_PUBLISHED] Cell::text(match (row.published_ms, row.fitted) {
        (None, _) => "-",
        (Some(_), true) => "yes",
        (Some(_), false) => "no",
    });
    ["unexplained"] [] row.unexplained.as_ref().map_or(Cell::Absent, Cell::text);
}

/// Picoseconds in a millisecond.
pub const PS_PER_MS: f64 = 1e9;

pub fn ms(time: Time) -> f64 {
    time.as_ps() as f64 / PS_PER_MS
}

impl Row {
    pub fn error(&self) -> Option<f64> {
        self.published_ms.map(|published| error_percent(ms(self.ran.time), published))
    }

    /// `published` are figures of the same memory, if there are any.
    fn new(
        profile: &Profile,
        step: Step,
        ran: Ran,
        published: &[published::Row],
    ) -> Result<Self, Error> {
        let mut row = Self { step, ran, published_ms: None, fitted: false, unexplained: None };
        for figure in published {
            if Some(techniques_of(figure)?) == step.techniques() {
                row.published_ms = Some(figure.after_ms()?);
                row.fitted = figure.is_fitted(profile);
                row.unexplained = figure.unexplained(profile);
            }
        }
        Ok(row)
    }
}

/// Runs the steps. `is_own` says that the memory is that for which figures were published.
pub fn rows(
    profile: &Profile,
    steps: &[Step],
    plan: &Plan,
    is_own: bool,
    run: Run<'_>,
) -> Result<Vec<Row>, Error> {
    let published = match is_own {
        true => published::of("map-mem", profile),
        false => Vec::new(),
    };
    let job = |&step: &Step| Job { profile: profile.clone(), step, plan: plan.clone() };
    let jobs: Vec<Job> = steps.iter().map(job).collect();
    let ran = steps.iter().zip(run(&jobs)?);
    ran.map(|(&step, ran)| Row::new(profile, step, ran, &published)).collect()
}

/// The rows as tables: what they take, why, and what the model does not explain.
pub fn text(rows: &[Row]) -> String {
    let mut text = [1, 2].map(|number| columns::table(number, 1, rows)).join("\n");
    // A gap may show in several steps.
    let mut said: Vec<&String> = Vec::new();
    for gap in rows.iter().filter_map(|row| row.unexplained.as_ref()) {
        if said.is_empty() {
            text += "\nnot explained by the model, says the profile:\n";
        }
        if !said.contains(&gap) {
            text += &format!("- {}\n", report::wrapped(gap, 78, "  "));
            said.push(gap);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::job::{format_of, plan_of};
    use super::super::step::Choice;
    use super::*;
    use crate::fakes;
    use crate::runs::{Threads, software};

    fn rows_of(name: &str, bytes: u64) -> Vec<Row> {
        let profile = Profile::load(name).unwrap();
        let plan = plan_of(&profile, bytes).unwrap();
        rows(&profile, &Choice::All.steps(), &plan, true, &fakes::linear_map).unwrap()
    }

    #[test]
    fn published_figures_stand_beside_their_step() {
        let rows = rows_of("ampere-altra-vm-64g", 64 << 30);
        let published: Vec<_> = rows.iter().filter_map(|row| row.published_ms).collect();
        assert_eq!(published, [2191.0, 429.0, 375.0, 330.0, 61.0]);
        let fitted: Vec<_> = rows.iter().map(|row| row.fitted).collect();
        assert_eq!(fitted, [&[true; 2][..], &[false; 6]].concat());
        assert!(rows.iter().all(|row| row.error().is_none_or(|error| error.abs() < 15.0)));
    }

    #[test]
    fn what_a_profile_cannot_explain_is_said_at_the_row_and_once_in_the_text() {
        let rows = rows_of("apple-m2-vm-16g", 16 << 30);
        let lazy = &rows[3];
        assert!(!lazy.fitted && lazy.error().unwrap() > 12.0);
        assert!(lazy.unexplained.as_ref().unwrap().starts_with("lazy-unmap: "));
        assert!(rows[0].unexplained.is_none());
        let text = text(&rows);
        assert!(rows.iter().all(|row| text.contains(row.step.name)), "{text}");
        assert_eq!(text.matches("\n- lazy-unmap: ").count(), 1, "{text}");
    }

    #[test]
    fn any_order_comes_to_the_same_end() {
        let profile = Profile::load("ampere-altra-vm-256g").unwrap();
        let plan = plan_of(&profile, profile.system.ram_bytes()).unwrap();
        let figures = |order: &str| -> Vec<_> {
            let order: super::super::step::Order = order.parse().unwrap();
            let rows = rows(&profile, &order.steps(), &plan, true, &fakes::linear_map);
            rows.unwrap().iter().map(|row| row.published_ms).collect()
        };
        let published = figures("base,no-cont-remap,no-alloc-remap,lazy-unmap,batch-barriers");
        assert_eq!(published.last(), Some(&Some(261.0)));
        let other = figures("batch-barriers,lazy-unmap,no-alloc-remap,no-cont-remap");
        assert_eq!(other, [None, None, None, Some(261.0)]);
    }

    #[test]
    fn runs_do_not_depend_on_threads_and_the_first_failure_is_told() {
        let profile = Profile::load("neutral").unwrap();
        let plan = plan_of(&profile, 64 << 20).unwrap();
        let job = |step| Job { profile: profile.clone(), step, plan: plan.clone() };
        let steps = Choice::All.steps().into_iter().cycle().take(20);
        let mut jobs: Vec<Job> = steps.map(job).collect();
        let with = |threads| software(Threads { threads: Some(threads) });
        let one = with(1)(&jobs).unwrap();
        assert_eq!(one.len(), jobs.len());
        for threads in [2, 3, 64] {
            assert_eq!(with(threads)(&jobs).unwrap(), one);
        }
        assert_eq!(with(2)(&[]).unwrap(), []);

        let small = plan_of(&profile, 64 << 10).unwrap();
        for number in [7, 3] {
            jobs[number].plan = small.clone();
            jobs[number].plan.spans[0].end -= number as u64 * 4096;
            let says = software(Threads::default())(&jobs).unwrap_err().to_string();
            assert!(says.starts_with("no range of RAM"), "{says}");
        }
    }

    #[test]
    fn every_profile_has_a_format() {
        for name in Profile::built_in() {
            let profile = Profile::load(name).unwrap();
            let page = 1 << profile.architecture.regime.page_shift();
            assert_eq!(format_of(&profile).unwrap().page_bytes(), page);
            plan_of(&profile, profile.system.ram_bytes()).unwrap();
        }
    }

    #[test]
    fn errors_have_a_sign_and_no_negative_zero() {
        assert_eq!(percent(error_percent(110.0, 100.0)), "+10.0 %");
        assert_eq!(percent(error_percent(90.0, 100.0)), "-10.0 %");
        assert_eq!(percent(-0.04), "+0.0 %");
    }
}
