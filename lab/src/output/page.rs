//! A report as a page: text, tables and bars that are read on a screen of any width, in the light
//! and in the dark, and fetch nothing.
//!
//! It is well-formed XML as well as HTML, so that a program can read it.

use std::fmt::Write;

/// Style of a page, which makes a list of each row where a table has no room.
const STYLE: &str = "\
:root { color-scheme: light dark; --line: #8885; --other: #8a8f98; --machine: #2f6fde; --ours: \
#e07b00; }
@media (prefers-color-scheme: dark) { :root { --other: #767c86; --machine: #6ea0ff; --ours: \
#ffa033; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; \
overflow-wrap: anywhere; }
h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
th, td { padding: 0.2rem 0.5rem; text-align: right; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; overflow-wrap: normal; }
td { font-variant-numeric: tabular-nums; }
td:nth-child(n + 3) { white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; }
tr.noted td { border-bottom: none; }
td.note { font-size: 13px; text-align: left; padding-bottom: 0.6rem; opacity: 0.8; }
figure { margin: 1.5rem 0; }
figcaption, p.about { font-size: 14px; opacity: 0.8; }
figure p { margin: 0.6rem 0 0.1rem; font-size: 14px; }
.bar { display: grid; grid-template-columns: 9rem 1fr 5.5rem; gap: 0.5rem; font-size: 13px; \
line-height: 1.35; align-items: center; }
.bar b { font-weight: normal; font-variant-numeric: tabular-nums; }
.bar i { display: block; height: 0.8rem; min-width: 1px; background: var(--other); border-radius: \
0 2px 2px 0; }
.scale span { display: flex; justify-content: space-between; border-top: 1px solid var(--line); }
.scale span:first-child { border: none; }
small { opacity: 0.7; }
.warnings { border-left: 3px solid var(--ours); padding-left: 1.5rem; }
code { font-size: 0.9em; }
.machine i { background: var(--machine); }
.tablewright i { background: var(--ours); }
.tablewright { font-weight: 600; }
@media (max-width: 62rem) {
  table, tbody, tr, td { display: block; width: 100%; }
  tr.head { display: none; }
  tr { border-bottom: 1px solid var(--line); padding: 0.5rem 0; }
  tr.noted { border-bottom: none; padding-bottom: 0; }
  td, td:first-child { border: none; padding: 0.05rem 0; text-align: right; }
  td.note { text-align: left; }
  td[data-of]::before { content: attr(data-of); float: left; margin-right: 1rem; opacity: 0.7; }
  td:first-child:not(.note) { font-weight: 600; text-align: left; }
  td:nth-child(n + 3) { white-space: normal; }
  td:first-child::before { content: none !important; }
  .bar { grid-template-columns: 6.8rem 1fr 4.6rem; font-size: 12px; }
}";

/// The page with this title around what is in it.
pub fn around(title: &str, body: &str) -> String {
    let title = escaped(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, \
         initial-scale=1\"/>\n<title>Tablewright: {title}</title>\n\
         <style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}</body>\n</html>\n"
    )
}

/// A table. Below a row stands what is to be noted of it.
#[derive(Debug)]
pub struct Table<'a> {
    columns: &'a [&'a str],
    page: String,
}

impl<'a> Table<'a> {
    /// An empty one.
    pub fn new(columns: &'a [&'a str]) -> Self {
        let mut page = String::from("<table>\n<tr class=\"head\">");
        for column in columns {
            // Writing to a string cannot fail.
            let _ = write!(page, "<th>{}</th>", escaped(column));
        }
        page.push_str("</tr>\n");
        Self { columns, page }
    }

    /// A row, with a cell for each column.
    pub fn row(&mut self, cells: &[String], note: &str) {
        let noted = if note.is_empty() { "" } else { " class=\"noted\"" };
        let _ = write!(self.page, "<tr{noted}>");
        for (column, cell) in self.columns.iter().zip(cells) {
            let _ = write!(self.page, "<td data-of=\"{}\">{}</td>", escaped(column), escaped(cell));
        }
        self.page.push_str("</tr>\n");
        if !note.is_empty() {
            let width = self.columns.len();
            let _ = writeln!(
                self.page,
                "<tr class=\"about\"><td class=\"note\" colspan=\"{width}\">{}</td></tr>",
                escaped(note)
            );
        }
    }

    /// The table as part of a page.
    pub fn finish(mut self) -> String {
        self.page.push_str("</table>\n");
        self.page
    }
}

/// Source of a bar's figure.
#[derive(Clone, Copy, Debug)]
pub enum Of {
    /// Published, or measured before.
    Others,
    /// The machine.
    Machine,
    /// The engine's.
    Tablewright,
}

impl Of {
    const fn class(self) -> &'static str {
        match self {
            Self::Others => "bar",
            Self::Machine => "bar machine",
            Self::Tablewright => "bar tablewright",
        }
    }
}

/// One bar.
#[derive(Debug)]
pub struct Bar {
    pub name: String,
    /// How long it is.
    pub value: f64,
    /// Which colour it has.
    pub of: Of,
}

/// Bars that belong together.
#[derive(Debug)]
pub struct Group {
    /// Heading; none if it is empty.
    pub name: String,
    /// From above to below.
    pub bars: Vec<Bar>,
}

/// The most by which values may differ on a linear scale, for its shortest bar to be seen.
const LINEAR: f64 = 50.0;

/// A scale of bars, from its left end to its right one.
struct Scale {
    /// Value at the left end: zero, or a power of ten where the scale is logarithmic.
    left: f64,
    right: f64,
}

impl Scale {
    /// For these values. A bar of zero has no length on either.
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let positive = values.filter(|value| *value > 0.0);
        let (least, most) = positive.fold((f64::MAX, f64::MIN_POSITIVE), |(least, most), value| {
            (least.min(value), most.max(value))
        });
        match most / least > LINEAR {
            true => Self { left: 10_f64.powf((least / 2.0).log10().floor()), right: most },
            false => Self { left: 0.0, right: most },
        }
    }

    /// How long a bar is, in percent of the longest.
    fn percent(&self, value: f64) -> f64 {
        match self.left {
            0.0 => 100.0 * value / self.right,
            left => (100.0 * (value / left).ln() / (self.right / left).ln()).max(0.0),
        }
    }
}

/// Bars on one scale, each with its figure as `said` puts it into words; below them the ends of the
/// scale.
pub fn bars(caption: &str, groups: &[Group], said: impl Fn(f64) -> String) -> String {
    let all = groups.iter().flat_map(|group| &group.bars);
    let scale = Scale::of(all.map(|bar| bar.value));
    let kind = if scale.left > 0.0 { "; logarithmic" } else { "" };
    let mut page = format!("<figure>\n<figcaption>{}{kind}</figcaption>\n", escaped(caption));
    for group in groups {
        if !group.name.is_empty() {
            let _ = writeln!(page, "<p>{}</p>", escaped(&group.name));
        }
        for bar in &group.bars {
            let kind = bar.of.class();
            let _ = writeln!(
                page,
                "<div class=\"{kind}\"><span>{}</span><span><i style=\"width: \
                 {:.1}%\"></i></span><b>{}</b></div>",
                escaped(&bar.name),
                scale.percent(bar.value),
                escaped(&said(bar.value)),
            );
        }
    }
    let left = if scale.left > 0.0 { said(scale.left) } else { "0".to_owned() };
    let _ = writeln!(
        page,
        "<div class=\"bar scale\"><span></span><span><small>{}</small><small>{}</small></span>\
         <b></b></div>",
        escaped(&left),
        escaped(&said(scale.right)),
    );
    page.push_str("</figure>\n");
    page
}

/// Prose as it stands in a page, with what is between backticks as code.
pub fn prose(text: &str) -> String {
    let parts: Vec<String> = text.split('`').map(escaped).collect();
    let mut page = String::new();
    for (number, part) in parts.iter().enumerate() {
        // A last backtick without another is one.
        match (number % 2 == 1, number + 1 == parts.len()) {
            (true, false) => page += &format!("<code>{part}</code>"),
            (true, true) => page += &format!("`{part}"),
            (false, _) => page += part,
        }
    }
    page
}

/// Text as it stands in a page.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
pub mod tests {
    use std::fs;
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// By what names a browser without a window is found.
    const BROWSERS: [&str; 4] =
        ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];

    #[test]
    fn a_scale_is_logarithmic_where_a_linear_one_hides_a_bar() {
        let near = Scale::of([1.0, 0.0, 50.0].into_iter());
        assert_eq!((near.left, near.percent(25.0), near.percent(0.0)), (0.0, 50.0, 0.0));
        let far = Scale::of([3.0, 0.0, 1000.0].into_iter());
        assert_eq!((far.left, far.percent(1000.0), far.percent(0.0)), (1.0, 100.0, 0.0));
        assert!((far.percent(10.0) - 100.0 / 3.0).abs() < 1e-9);
        // The shortest bar is seen, too.
        assert_eq!(Scale::of([1.0, 1000.0].into_iter()).left, 0.1);
        assert_eq!(Scale::of(std::iter::empty()).percent(0.0), 0.0);
    }

    #[test]
    fn code_in_prose_is_code() {
        assert_eq!(prose("see `a < b`, or `c"), "see <code>a &lt; b</code>, or `c");
        assert_eq!(prose("`a``b`"), "<code>a</code><code>b</code>");
    }

    /// Nothing of the page is beyond the right edge of a screen, of a telephone or of a computer.
    /// Where there is no browser nothing is tested, and that is said.
    pub fn fits_screens(page: &str) {
        let Some(browser) = BROWSERS.into_iter().find(|name| {
            let version = Command::new(name)
                .arg("--version")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            version.is_ok_and(|status| status.success())
        }) else {
            eprintln!("skipped: there is no browser, such as chromium, to look at a page with");
            return;
        };
        // The page in a frame of each width, beside a script that says how wide it has become.
        const WIDTHS: [u32; 4] = [360, 400, 768, 1280];
        let page = escaped(page);
        let frames = WIDTHS.map(|width| {
            format!(
                "<iframe width=\"{width}\" height=\"800\" style=\"border: 0\" srcdoc=\"{page}\" \
                 onload=\"document.title += ' ' + this.width + ':' + \
                 this.contentDocument.documentElement.scrollWidth\"></iframe>"
            )
        });
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let file = format!("tablewright-page-{}-{number}.html", std::process::id());
        let file = std::env::temp_dir().join(file);
        fs::write(&file, format!("<!DOCTYPE html><body>{}", frames.concat())).unwrap();
        let output = Command::new(browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu"])
            .args(["--window-size=1400,900", "--virtual-time-budget=5000", "--dump-dom"])
            .arg(format!("file://{}", file.display()))
            .output();
        fs::remove_file(&file).unwrap();
        let dom = String::from_utf8(output.unwrap().stdout).unwrap();
        let title = dom.split("<title>").nth(1).and_then(|rest| rest.split('<').next());
        let said: Vec<(u32, u32)> = title
            .expect("the script has run")
            .split_whitespace()
            .map(|one| one.split_once(':').expect("two numbers"))
            .map(|(width, wide)| (width.parse().unwrap(), wide.parse().unwrap()))
            .collect();
        assert_eq!(said.len(), WIDTHS.len(), "{said:?}");
        for (width, wide) in said {
            assert!(wide <= width, "{wide} in {width}");
        }
    }

    #[test]
    fn words_and_figures_of_any_length_fit() {
        let long = "an_identifier_without_a_place_to_break_it".repeat(4);
        let bar = |name: &str, value, of| Bar { name: name.to_owned(), value, of };
        let groups = [Group {
            name: long.clone(),
            bars: vec![
                bar(&long, 1.0, Of::Others),
                bar("machine", 0.0, Of::Machine),
                bar("tablewright", 1e12, Of::Tablewright),
            ],
        }];
        let mut table =
            Table::new(&["configuration", "a rather long name of a column", "c", "d", "e", "f"]);
        let figure = || "123.4 ms".to_owned();
        let cells = [long.clone(), long.clone(), figure(), figure(), figure(), figure()];
        table.row(&cells, &long);
        let bars = bars("shorter is better", &groups, |value| value.to_string());
        fits_screens(&around(&long, &(bars + &table.finish())));
    }
}
