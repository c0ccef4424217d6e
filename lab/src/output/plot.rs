//! Pictures: bars in groups, each group with its bare loop if it has one, or lines over a scale, as
//! one SVG file.
//!
//! One colour for our own bars and one for the bare loop, told apart with colour blindness too.
//! A style rule exchanges the colours on dark pages. Text is not drawn as shapes: the viewer's
//! fonts show it.

use std::fmt::Display;
use std::io;

use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::error::Error;
use crate::output::report;

/// Bars in groups.
pub struct Picture {
    /// In large letters.
    pub title: String,
    /// Below the title.
    pub subtitle: String,
    /// Unit of the axis; figures of seconds, behind the bars, are in the unit that fits.
    pub unit: String,
    /// From above to below.
    pub groups: Vec<Group>,
    /// Below everything, one a line.
    pub notes: Vec<String>,
}

/// Bars that belong together.
pub struct Group {
    pub name: String,
    /// The least that this computer takes, if there is such a figure.
    pub bare: Option<f64>,
    /// From above to below.
    pub bars: Vec<Bar>,
}

/// One bar.
pub struct Bar {
    /// Its name in the legend.
    pub name: String,
    /// How long.
    pub value: f64,
    /// Whether it is the one to look at.
    pub ours: bool,
}

impl Bar {
    /// A bar.
    pub fn new(name: &str, value: f64, ours: bool) -> Self {
        let name = name.to_owned();
        Self { name, value, ours }
    }
}

const WIDTH: i32 = 800;
const MARGIN: i32 = 20;
/// Left end of bars.
const LEFT: i32 = 220;
/// Characters that have room before that.
const LONGEST: usize = 24;
/// Right end of the axis; the value of a bar that goes so far is written behind it.
const RIGHT: i32 = WIDTH - 60;
/// Half of the widest figure below an axis, with some space.
const WIDEST: i32 = 36;
const ROW: i32 = 22;
const BAR: i32 = 15;
const LINE: i32 = 17;

const INK: RGBColor = RGBColor(0x1f, 0x23, 0x28);
const FAINT: RGBColor = RGBColor(0x59, 0x63, 0x6e);
const GRID: RGBColor = RGBColor(0xe3, 0xe6, 0xea);
const OURS: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const OTHERS: RGBColor = RGBColor(0xaa, 0xb0, 0xb8);
const BARE: RGBColor = RGBColor(0xc4, 0x4e, 0x00);

/// Colours where pages are dark.
const DARK: [(RGBColor, &str); 8] = [
    (WHITE, "#0d1117"),
    (INK, "#e6edf3"),
    (FAINT, "#9198a1"),
    (GRID, "#2a313c"),
    (OURS, "#4da3d9"),
    (OTHERS, "#6e7681"),
    (BARE, "#e8833a"),
    (RGBColor(0x55, 0x55, 0x55), "#b6bec7"),
];

/// Adds the rule of style, which goes before what an element says itself.
fn in_the_dark(svg: String) -> String {
    let rule = |(colour, dark): (RGBColor, &str)| {
        let RGBColor(r, g, b) = colour;
        let name = format!("#{r:02X}{g:02X}{b:02X}");
        format!("[fill=\"{name}\"]{{fill:{dark}}}[stroke=\"{name}\"]{{stroke:{dark}}}")
    };
    let rules: String = DARK.into_iter().map(rule).collect();
    let style = format!("<style>@media (prefers-color-scheme:dark){{{rules}}}</style>");
    match svg.find('>') {
        Some(end) => format!("{}\n{style}{}", &svg[..=end], &svg[end + 1..]),
        None => svg,
    }
}

/// The axis of bars.
struct Axis {
    /// The values at its ends; of a logarithmic one, their powers of ten.
    ends: (f64, f64),
    is_logarithmic: bool,
    ticks: Vec<f64>,
}

/// The longest bar over the shortest, up to which both can be read on one scale.
const READABLE: f64 = 50.0;

impl Axis {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let (mut shortest, mut longest) = (f64::INFINITY, 0.0);
        for value in values.filter(|value| *value > 0.0) {
            shortest = f64::min(shortest, value);
            longest = f64::max(longest, value);
        }
        if longest > shortest * READABLE {
            let from = (shortest.log10() - 1e-9).floor();
            let ends = (from, (longest.log10() - 1e-9).ceil());
            let powers = ends.0 as i32..=ends.1 as i32;
            // No more than can be written beside each other.
            let each = (ends.1 - ends.0) as usize / 8 + 1;
            let ticks = powers.step_by(each).map(|power| 10_f64.powi(power)).collect();
            return Self { ends, is_logarithmic: true, ticks };
        }
        let step = step(longest);
        let count = (longest / step).ceil().max(1.0);
        let ticks = (0..=count as u32).map(|tick| f64::from(tick) * step).collect();
        Self { ends: (0.0, count * step), is_logarithmic: false, ticks }
    }

    fn at(&self, value: f64) -> i32 {
        let (from, to) = self.ends;
        let value = match self.is_logarithmic {
            true => value.max(f64::MIN_POSITIVE).log10(),
            false => value,
        };
        let part = ((value - from) / (to - from)).max(0.0);
        LEFT + (f64::from(RIGHT - LEFT) * part).round() as i32
    }
}

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Picture {
    /// The picture as the text of an SVG file.
    pub fn svg(&self) -> Result<String, Error> {
        let mut text = String::new();
        let canvas =
            SVGBackend::with_string(&mut text, (WIDTH as u32, self.height())).into_drawing_area();
        self.draw(&canvas).and_then(|()| canvas.present().map_err(refused))?;
        drop(canvas);
        Ok(in_the_dark(text))
    }

    fn bars(&self) -> impl Iterator<Item = &Bar> {
        self.groups.iter().flat_map(|group| &group.bars)
    }

    /// A value as it is written.
    fn shown(&self, value: f64) -> String {
        match self.unit.as_str() {
            "s" => report::time(value * 1e9),
            _ => report::figure(value),
        }
    }

    fn height(&self) -> u32 {
        // One row more for each group's name, one for the axis, half of one behind each group.
        let rows = self.bars().count() + self.groups.len() + 1;
        let space = self.groups.len() as i32 * ROW / 2;
        (2 * MARGIN + 3 * LINE + rows as i32 * ROW + space + self.notes.len() as i32 * LINE) as u32
    }

    fn draw(&self, canvas: &Canvas<'_>) -> Result<(), Error> {
        canvas.fill(&WHITE).map_err(refused)?;
        let mut y = MARGIN + LINE / 2;
        let left = Pos::new(HPos::Left, VPos::Center);
        write(canvas, &self.title, (MARGIN, y), left, &INK, 21)?;
        y += LINE + 6;
        write(canvas, &self.subtitle, (MARGIN, y), left, &FAINT, 15)?;
        y += LINE;

        let axis = Axis::of(self.bars().map(|bar| bar.value));
        let at = |value: f64| axis.at(value);
        let top = y + ROW / 2;
        let rows = (self.bars().count() + self.groups.len()) as i32;
        let bottom = top + rows * ROW + self.groups.len() as i32 * ROW / 2;
        let below = Pos::new(HPos::Center, VPos::Center);
        for &value in &axis.ticks {
            let x = at(value);
            line(canvas, (x, top), (x, bottom), &GRID, 1)?;
            let number = match axis.is_logarithmic {
                true => self.shown(value),
                false => format!("{}", (value * 1e6).round() / 1e6),
            };
            write(canvas, &number, (x, bottom + LINE / 2 + 2), below, &FAINT, 14)?;
        }
        let right = Pos::new(HPos::Right, VPos::Center);
        // The first tick of a logarithmic axis is a figure with its unit, and as wide.
        let (name, from) = match (axis.is_logarithmic, self.unit.as_str()) {
            (true, "s") => ("logarithmic".to_owned(), LEFT - WIDEST),
            (true, unit) => (format!("{unit}, logarithmic"), LEFT - WIDEST),
            (false, unit) => (unit.to_owned(), LEFT - 12),
        };
        write(canvas, &name, (from, bottom + LINE / 2 + 2), right, &FAINT, 14)?;

        y = top + ROW / 2;
        for group in &self.groups {
            y = draw_group(canvas, group, y, at, |value| self.shown(value))? + ROW / 2;
        }
        y = bottom + LINE / 2 + ROW + LINE / 2;
        for note in &self.notes {
            write(canvas, note, (MARGIN, y), left, &FAINT, 14)?;
            y += LINE;
        }
        Ok(())
    }
}

/// Lines in panels, two beside each other. Both scales are logarithmic.
pub struct Chart {
    /// In large letters.
    pub title: String,
    /// Below the title.
    pub subtitle: String,
    /// Unit of the horizontal axis.
    pub across: String,
    /// From left to right, from above to below.
    pub panels: Vec<Panel>,
    /// Below everything, one a line.
    pub notes: Vec<String>,
}

/// Lines that are compared with each other.
pub struct Panel {
    pub name: String,
    /// The lines.
    pub lines: Vec<Line>,
}

/// One line.
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    pub role: Role,
    /// Points from left to right. Those that are not above zero are left out.
    pub points: Vec<(f64, f64)>,
}

/// Role of a line beside the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The one to look at.
    Ours,
    /// The least that this computer takes.
    Bare,
    /// One that it is compared with.
    Other,
}

/// Height of a panel, with its name above and its axis below.
const PANEL: i32 = 230;
/// Room for numbers on the left of a panel, and for names on its right.
const NUMBERS: i32 = 50;
const NAMES: i32 = 172;
/// A piece of a line, before its name.
const SAMPLE: i32 = 24;
/// The least distance between two names.
const APART: i32 = 14;

/// How a line is drawn: lines that cross are to be told apart without colours.
#[derive(Clone, Copy)]
struct Look {
    colour: RGBColor,
    width: u32,
    /// Pixels drawn, and left out. `None`: all of it is drawn.
    dash: Option<(i32, i32)>,
    mark: Mark,
}

#[derive(Clone, Copy)]
enum Mark {
    Circle,
    Square,
    Triangle,
    Cross,
}

/// Of those that are compared with, in the order in which they come first; then again from the
/// front.
const LOOKS: [Look; 4] = [
    other(0x9a, None, Mark::Square),
    other(0x55, Some((7, 4)), Mark::Triangle),
    other(0x80, Some((2, 3)), Mark::Cross),
    other(0xb4, Some((12, 3)), Mark::Circle),
];

const fn other(grey: u8, dash: Option<(i32, i32)>, mark: Mark) -> Look {
    Look { colour: RGBColor(grey, grey, grey), width: 2, dash, mark }
}

impl Look {
    fn path(self, canvas: &Canvas<'_>, path: Vec<(i32, i32)>) -> Result<(), Error> {
        let style = ShapeStyle::from(&self.colour).stroke_width(self.width);
        match self.dash {
            None => canvas.draw(&PathElement::new(path, style)),
            Some((drawn, left_out)) => {
                canvas.draw(&DashedPathElement::new(path, drawn, left_out, style))
            }
        }
        .map_err(refused)
    }

    fn mark(self, canvas: &Canvas<'_>, at: (i32, i32)) -> Result<(), Error> {
        let filled = ShapeStyle::from(&self.colour).filled();
        let (x, y) = at;
        match self.mark {
            Mark::Circle => canvas.draw(&Circle::new(at, 3, filled)),
            Mark::Square => canvas.draw(&Rectangle::new([(x - 3, y - 3), (x + 3, y + 3)], filled)),
            Mark::Triangle => canvas.draw(&TriangleMarker::new(at, 5, filled)),
            Mark::Cross => canvas.draw(&Cross::new(at, 4, filled.stroke_width(2))),
        }
        .map_err(refused)
    }
}

impl Chart {
    /// How a line is drawn: one name is drawn alike in every panel.
    fn look(&self, line: &Line) -> Look {
        let plain = |colour, width| Look { colour, width, dash: None, mark: Mark::Circle };
        match line.role {
            Role::Ours => plain(OURS, 3),
            Role::Bare => plain(BARE, 2),
            Role::Other => {
                let mut names: Vec<&str> = Vec::new();
                for other in self.panels.iter().flat_map(|panel| &panel.lines) {
                    if other.role == Role::Other && !names.contains(&other.name.as_str()) {
                        names.push(&other.name);
                    }
                }
                let at = names.iter().position(|name| *name == line.name);
                LOOKS[at.unwrap_or(0) % LOOKS.len()]
            }
        }
    }

    /// The picture as the text of an SVG file.
    pub fn svg(&self) -> Result<String, Error> {
        let mut text = String::new();
        let rows = self.panels.len().div_ceil(2) as i32;
        let height = 2 * MARGIN + 3 * LINE + rows * PANEL + self.notes.len() as i32 * LINE;
        let canvas =
            SVGBackend::with_string(&mut text, (WIDTH as u32, height as u32)).into_drawing_area();
        self.draw(&canvas).and_then(|()| canvas.present().map_err(refused))?;
        drop(canvas);
        Ok(in_the_dark(text))
    }

    fn draw(&self, canvas: &Canvas<'_>) -> Result<(), Error> {
        canvas.fill(&WHITE).map_err(refused)?;
        let left = Pos::new(HPos::Left, VPos::Center);
        let mut y = MARGIN + LINE / 2;
        write(canvas, &self.title, (MARGIN, y), left, &INK, 21)?;
        y += LINE + 6;
        write(canvas, &self.subtitle, (MARGIN, y), left, &FAINT, 15)?;
        let top = y + LINE;
        for (number, panel) in self.panels.iter().enumerate() {
            let column = (number % 2) as i32;
            let corner =
                (MARGIN + column * (WIDTH / 2 - MARGIN / 2), top + (number / 2) as i32 * PANEL);
            self.draw_panel(canvas, panel, corner)?;
        }
        y = top + self.panels.len().div_ceil(2) as i32 * PANEL + LINE / 2;
        for note in &self.notes {
            write(canvas, note, (MARGIN, y), left, &FAINT, 14)?;
            y += LINE;
        }
        Ok(())
    }

    fn draw_panel(
        &self,
        canvas: &Canvas<'_>,
        panel: &Panel,
        (x, y): (i32, i32),
    ) -> Result<(), Error> {
        let left = Pos::new(HPos::Left, VPos::Center);
        let right = Pos::new(HPos::Right, VPos::Center);
        let below = Pos::new(HPos::Center, VPos::Center);
        write(canvas, &panel.name, (x, y + LINE / 2), left, &INK, 17)?;
        let points = || {
            let all = panel.lines.iter().flat_map(|line| &line.points);
            all.filter(|(x, y)| *x > 0.0 && *y > 0.0)
        };
        let mut marks: Vec<f64> = points().map(|(x, _)| *x).collect();
        marks.sort_by(f64::total_cmp);
        marks.dedup();
        let (Some(&first), Some(&last)) = (marks.first(), marks.last()) else {
            return Ok(());
        };
        let low = points().map(|(_, y)| *y).fold(f64::INFINITY, f64::min);
        let high = points().map(|(_, y)| *y).fold(0.0, f64::max);
        let (from, to) = (low.log10().floor(), (high.log10() + 1e-9).ceil());
        let (start, end) = (x + NUMBERS, x + WIDTH / 2 - 2 * MARGIN - NAMES);
        let (top, bottom) = (y + LINE + 8, y + PANEL - 3 * LINE);
        let across = |value: f64| {
            let part = (value / first).log10() / (last / first).log10().max(1e-9);
            start + 6 + (f64::from(end - start - 12) * part).round() as i32
        };
        let up = |value: f64| {
            let part = (value.log10() - from) / (to - from).max(1.0);
            bottom - (f64::from(bottom - top) * part).round() as i32
        };
        for power in from as i32..=to as i32 {
            let value = 10_f64.powi(power);
            let at = up(value);
            line(canvas, (start, at), (end, at), &GRID, 1)?;
            let number = format!("{}", (value * 1e9).round() / 1e9);
            write(canvas, &number, (start - 6, at), right, &FAINT, 13)?;
        }
        for &mark in &marks {
            let at = across(mark);
            line(canvas, (at, top), (at, bottom), &GRID, 1)?;
            let number = format!("{mark}");
            write(canvas, &number, (at, bottom + LINE / 2 + 2), below, &FAINT, 13)?;
        }
        let unit = ((start + end) / 2, bottom + LINE / 2 + LINE);
        write(canvas, &self.across, unit, below, &FAINT, 13)?;

        // What is to be looked at is drawn last, above the rest.
        let mut lines: Vec<&Line> = panel.lines.iter().collect();
        lines.sort_by_key(|line| match line.role {
            Role::Other => 0,
            Role::Bare => 1,
            Role::Ours => 2,
        });
        let mut names: Vec<(i32, &Line)> = Vec::new();
        for this in lines {
            let look = self.look(this);
            let path: Vec<(i32, i32)> = this
                .points
                .iter()
                .filter(|(x, y)| *x > 0.0 && *y > 0.0)
                .map(|(x, y)| (across(*x), up(*y)))
                .collect();
            let Some(&(_, last)) = path.last() else {
                continue;
            };
            names.push((last, this));
            for at in &path {
                look.mark(canvas, *at)?;
            }
            look.path(canvas, path)?;
        }
        names.sort_by_key(|(at, _)| *at);
        // Names that would lie on each other move apart; the last is not to leave the panel.
        let mut least = top;
        let count = names.len() as i32;
        for (number, (at, this)) in names.into_iter().enumerate() {
            let most = bottom + LINE - (count - 1 - number as i32) * APART;
            let place = at.max(least).min(most);
            least = place + APART;
            let colour = match this.role {
                Role::Ours => &OURS,
                Role::Bare => &BARE,
                Role::Other => &FAINT,
            };
            let look = self.look(this);
            let (from, to) = (end + 8, end + 8 + SAMPLE);
            look.path(canvas, vec![(from, place), (to, place)])?;
            look.mark(canvas, ((from + to) / 2, place))?;
            write(canvas, &this.name, (to + 6, place), left, colour, 13)?;
        }
        Ok(())
    }
}

/// Draws from the row with its middle at `y` on, and tells where the next row is.
fn draw_group(
    canvas: &Canvas<'_>,
    group: &Group,
    mut y: i32,
    at: impl Fn(f64) -> i32,
    shown: impl Fn(f64) -> String,
) -> Result<i32, Error> {
    let left = Pos::new(HPos::Left, VPos::Center);
    let right = Pos::new(HPos::Right, VPos::Center);
    // A name that is longer than the margin has a line of its own.
    let (from, position) = match group.name.chars().count() {
        ..=LONGEST => (LEFT - 12, right),
        _ => (MARGIN, left),
    };
    write(canvas, &group.name, (from, y), position, &INK, 17)?;
    let bare = group.bare.map(|bare| (at(bare), shown(bare)));
    if let Some((x, figure)) = &bare {
        let text = format!("bare {figure}");
        write(canvas, &text, (x + 6, y), left, &BARE, 14)?;
    }
    let first = y;
    for bar in &group.bars {
        y += ROW;
        let ink = if bar.ours { INK } else { FAINT };
        write(canvas, &bar.name, (LEFT - 12, y), right, &ink, 15)?;
        let corners = [(LEFT, y - BAR / 2), (at(bar.value).max(LEFT + 1), y + BAR / 2)];
        let colour = if bar.ours { OURS } else { OTHERS };
        let shape = Rectangle::new(corners, ShapeStyle::from(&colour).filled());
        canvas.draw(&shape).map_err(refused)?;
        // Behind the line of the bare loop, where the two would meet.
        let behind = at(bar.value).max(bare.as_ref().map_or(0, |(x, _)| *x)) + 6;
        let value = shown(bar.value);
        write(canvas, &value, (behind, y), left, &ink, 15)?;
    }
    if let Some((x, _)) = bare {
        line(canvas, (x, first - ROW / 3), (x, y + ROW / 2), &BARE, 2)?;
    }
    Ok(y + ROW)
}

/// A round number of which a few make `longest`.
fn step(longest: f64) -> f64 {
    let rough = longest.max(1e-6) / 6.0;
    let power = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|digit| digit * power)
        .find(|step| *step >= rough)
        .unwrap_or(10.0 * power)
}

fn write(
    canvas: &Canvas<'_>,
    text: &str,
    at: (i32, i32),
    anchor: Pos,
    colour: &RGBColor,
    size: i32,
) -> Result<(), Error> {
    let style = ("sans-serif", size).into_text_style(canvas).color(colour).pos(anchor);
    canvas.draw(&Text::new(text, at, style)).map_err(refused)
}

fn line(
    canvas: &Canvas<'_>,
    from: (i32, i32),
    to: (i32, i32),
    colour: &RGBColor,
    width: u32,
) -> Result<(), Error> {
    let style = ShapeStyle::from(colour).stroke_width(width);
    let path = PathElement::new(vec![from, to], style);
    canvas.draw(&path).map_err(refused)
}

fn refused(error: impl Display) -> Error {
    Error::Write(io::Error::other(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(values: &[f64]) -> Picture {
        let bars = |values: &[f64]| {
            values
                .iter()
                .enumerate()
                .map(|(number, &value)| Bar {
                    name: format!("bar <{number}> & \"more\""),
                    value,
                    ours: number == 0,
                })
                .collect()
        };
        Picture {
            title: "a < b".into(),
            subtitle: "below".into(),
            unit: "ns".into(),
            groups: vec![Group { name: "group".into(), bare: Some(0.5), bars: bars(values) }],
            notes: vec!["note".into(), "note & note".into()],
        }
    }

    /// A stall of microseconds beside minutes was drawn as 0.00000.
    #[test]
    fn seconds_are_written_in_the_unit_that_fits() {
        let seconds = Picture { unit: "s".into(), ..picture(&[4.63e-6, 2.5]) };
        let svg = seconds.svg().unwrap();
        assert!(svg.contains("4.63 us") && svg.contains("2.50 s"), "{svg}");
    }

    /// Everything that the picture puts somewhere is within it, whatever the values are.
    fn assert_well_formed(picture: &Picture) {
        let svg = picture.svg().unwrap();
        let document = roxmltree::Document::parse(&svg).expect("well-formed XML");
        let root = document.root_element();
        let number = |node: &roxmltree::Node<'_, '_>, name: &str| {
            node.attribute(name).map(|value| value.parse::<f64>().expect(name))
        };
        let (width, height) = (number(&root, "width").unwrap(), number(&root, "height").unwrap());
        for node in root.descendants() {
            for (attributes, most) in [(["x", "x1", "x2"], width), (["y", "y1", "y2"], height)] {
                for value in attributes.iter().filter_map(|name| number(&node, name)) {
                    assert!((0.0..=most).contains(&value), "{node:?}");
                }
            }
            let right = number(&node, "x").unwrap_or(0.0) + number(&node, "width").unwrap_or(0.0);
            let below = number(&node, "y").unwrap_or(0.0) + number(&node, "height").unwrap_or(0.0);
            assert!(right <= width && below <= height, "{node:?}");
        }
        for bar in picture.bars() {
            assert!(
                document
                    .descendants()
                    .any(|node| node.text().is_some_and(|text| text.trim() == bar.name)),
                "{}",
                bar.name
            );
        }
    }

    #[test]
    fn pictures_are_well_formed_whatever_the_values() {
        for values in
            [&[][..], &[0.0], &[1e-9, 0.0], &[0.24, 1.2, 6.6], &[0.3, 1e6], &[7.0], &[10.0]]
        {
            let mut picture = picture(values);
            assert_well_formed(&picture);
            assert!(picture.svg().unwrap().contains("bare 0.5"));
            picture.groups[0].bare = None;
            assert_well_formed(&picture);
            assert!(!picture.svg().unwrap().contains("bare"));
        }
    }

    #[test]
    fn charts_are_well_formed_whatever_the_values() {
        for values in [&[][..], &[0.0], &[3.0], &[1e-6, 1e6], &[1.0, 1.0, 1.0]] {
            let line = |name: &str, role| Line {
                name: name.to_owned(),
                role,
                points: (1..).map(f64::from).zip(values.iter().copied()).collect(),
            };
            let panel = || Panel {
                name: "a < b".into(),
                lines: vec![
                    line("ours & <mine>", Role::Ours),
                    line("bare", Role::Bare),
                    line("other", Role::Other),
                ],
            };
            let chart = Chart {
                title: "title".into(),
                subtitle: "below".into(),
                across: "count".into(),
                panels: vec![panel(), panel(), panel()],
                notes: vec!["note & note".into()],
            };
            let svg = chart.svg().unwrap();
            let document = roxmltree::Document::parse(&svg).expect("well-formed XML");
            let root = document.root_element();
            let height: f64 = root.attribute("height").unwrap().parse().unwrap();
            for text in root.descendants().filter(|node| node.has_tag_name("text")) {
                let y: f64 = text.attribute("y").unwrap().parse().unwrap();
                assert!((0.0..=height).contains(&y), "{text:?}");
            }
            let has_names = svg.contains("mine");
            assert_eq!(has_names, values.iter().any(|value| *value > 0.0));
        }
    }

    #[test]
    fn an_axis_is_logarithmic_where_bars_could_not_be_compared() {
        let ends = |values: &[f64]| {
            let axis = Axis::of(values.iter().copied());
            (axis.is_logarithmic, axis.ends, axis.ticks.len())
        };
        assert_eq!(ends(&[1.0, 50.0]), (false, (0.0, 50.0), 6));
        assert_eq!(ends(&[1.0, 51.0]), (true, (-1.0, 2.0), 4));
        assert_eq!(ends(&[2e-6, 3.0, 0.0]), (true, (-6.0, 1.0), 8));
        assert_eq!(ends(&[]), (false, (0.0, step(0.0)), 2));
        // The shortest has a length, and one of nothing has none.
        let axis = Axis::of([2e-6, 3.0].into_iter());
        assert!(axis.at(2e-6) > LEFT && axis.at(0.0) == LEFT && axis.at(10.0) == RIGHT);
        let svg = picture(&[0.3, 1e6]).svg().unwrap();
        assert!(svg.contains("ns, logarithmic"), "{svg}");
    }

    #[test]
    fn every_colour_has_one_for_dark_pages() {
        let svg = picture(&[1.0, 2.0]).svg().unwrap();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let style = document.descendants().find(|node| node.has_tag_name("style")).unwrap();
        let rules = style.text().unwrap();
        for name in ["fill", "stroke"] {
            for colour in document.descendants().filter_map(|node| node.attribute(name)) {
                let known = colour == "none" || rules.contains(&format!("[{name}=\"{colour}\"]"));
                assert!(known, "{name} {colour}");
            }
        }
    }

    #[test]
    fn steps_are_round_and_few() {
        for (longest, round) in [(6.0, 1.0), (7.4, 2.0), (0.6, 0.1), (25.0, 5.0), (60.0, 10.0)] {
            assert!((step(longest) / round - 1.0).abs() < 1e-9, "{longest}");
        }
    }
}
