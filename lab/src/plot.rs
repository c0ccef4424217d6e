//! Pictures: bars in groups, each group with its limit if it has one, as one SVG file.
//!
//! White behind everything, because a page may be dark; one colour for our own bars and one for the limit, which people
//! who see few colours can tell apart. Text stays text: no fonts are read, and what shows the file brings its own.

use std::fmt::Display;
use std::io;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::error::Error;
use crate::report;

/// What is drawn.
pub struct Picture {
    /// In large letters.
    pub title: String,
    /// Below the title.
    pub subtitle: String,
    /// What the axis counts.
    pub unit: String,
    /// From above to below.
    pub groups: Vec<Group>,
    /// Below everything, one a line.
    pub notes: Vec<String>,
}

/// Bars that belong together.
pub struct Group {
    /// What was done.
    pub name: String,
    /// What the computer can do at best, where there is such a thing.
    pub limit: Option<f64>,
    /// From above to below.
    pub bars: Vec<Bar>,
}

/// One bar.
pub struct Bar {
    /// Whose.
    pub name: String,
    /// How long.
    pub value: f64,
    /// Whether it is the one to look at.
    pub ours: bool,
}

const WIDTH: i32 = 800;
const MARGIN: i32 = 20;
/// Where bars begin.
const LEFT: i32 = 220;
/// Characters that have room before that.
const LONGEST: usize = 24;
/// Where the axis ends; the value of a bar that goes so far is written behind it.
const RIGHT: i32 = WIDTH - 60;
const ROW: i32 = 22;
const BAR: i32 = 15;
const LINE: i32 = 17;

const INK: RGBColor = RGBColor(0x1f, 0x23, 0x28);
const FAINT: RGBColor = RGBColor(0x59, 0x63, 0x6e);
const GRID: RGBColor = RGBColor(0xe3, 0xe6, 0xea);
const OURS: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const OTHERS: RGBColor = RGBColor(0xaa, 0xb0, 0xb8);
const LIMIT: RGBColor = RGBColor(0xc4, 0x4e, 0x00);

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Picture {
    /// The picture as the text of an SVG file.
    pub fn svg(&self) -> Result<String, Error> {
        let mut text = String::new();
        let canvas =
            SVGBackend::with_string(&mut text, (WIDTH as u32, self.height())).into_drawing_area();
        self.draw(&canvas)
            .and_then(|()| canvas.present().map_err(refused))?;
        drop(canvas);
        Ok(text)
    }

    fn bars(&self) -> impl Iterator<Item = &Bar> {
        self.groups.iter().flat_map(|group| &group.bars)
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

        let longest = self.bars().map(|bar| bar.value).fold(0.0, f64::max);
        let step = step(longest);
        let end = (longest / step).ceil().max(1.0) * step;
        let at = |value: f64| LEFT + (f64::from(RIGHT - LEFT) * value / end).round() as i32;
        let top = y + ROW / 2;
        let rows = (self.bars().count() + self.groups.len()) as i32;
        let bottom = top + rows * ROW + self.groups.len() as i32 * ROW / 2;
        let below = Pos::new(HPos::Center, VPos::Center);
        for tick in 0..=(end / step).round() as u32 {
            let value = f64::from(tick) * step;
            let x = at(value);
            line(canvas, (x, top), (x, bottom), &GRID, 1)?;
            let number = format!("{}", (value * 1e6).round() / 1e6);
            write(
                canvas,
                &number,
                (x, bottom + LINE / 2 + 2),
                below,
                &FAINT,
                14,
            )?;
        }
        let right = Pos::new(HPos::Right, VPos::Center);
        let unit = (LEFT - 12, bottom + LINE / 2 + 2);
        write(canvas, &self.unit, unit, right, &FAINT, 14)?;

        y = top + ROW / 2;
        for group in &self.groups {
            y = draw_group(canvas, group, y, at)? + ROW / 2;
        }
        y = bottom + LINE / 2 + ROW + LINE / 2;
        for note in &self.notes {
            write(canvas, note, (MARGIN, y), left, &FAINT, 14)?;
            y += LINE;
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
) -> Result<i32, Error> {
    let left = Pos::new(HPos::Left, VPos::Center);
    let right = Pos::new(HPos::Right, VPos::Center);
    // A name that is longer than the margin has a line of its own.
    let (from, position) = match group.name.chars().count() {
        ..=LONGEST => (LEFT - 12, right),
        _ => (MARGIN, left),
    };
    write(canvas, &group.name, (from, y), position, &INK, 17)?;
    let limit = group.limit.map(|limit| (at(limit), report::figure(limit)));
    if let Some((x, figure)) = &limit {
        let text = format!("limit {figure}");
        write(canvas, &text, (x + 6, y), left, &LIMIT, 14)?;
    }
    let first = y;
    for bar in &group.bars {
        y += ROW;
        let ink = if bar.ours { INK } else { FAINT };
        write(canvas, &bar.name, (LEFT - 12, y), right, &ink, 15)?;
        let corners = [
            (LEFT, y - BAR / 2),
            (at(bar.value).max(LEFT + 1), y + BAR / 2),
        ];
        let colour = if bar.ours { OURS } else { OTHERS };
        let shape = Rectangle::new(corners, ShapeStyle::from(&colour).filled());
        canvas.draw(&shape).map_err(refused)?;
        // Behind the line of the limit, where the two would meet.
        let behind = at(bar.value).max(limit.as_ref().map_or(0, |(x, _)| *x)) + 6;
        let value = report::figure(bar.value);
        write(canvas, &value, (behind, y), left, &ink, 15)?;
    }
    if let Some((x, _)) = limit {
        line(canvas, (x, first - ROW / 3), (x, y + ROW / 2), &LIMIT, 2)?;
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
    let style = ("sans-serif", size)
        .into_text_style(canvas)
        .color(colour)
        .pos(anchor);
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
            groups: vec![Group {
                name: "group".into(),
                limit: Some(0.5),
                bars: bars(values),
            }],
            notes: vec!["note".into(), "note & note".into()],
        }
    }

    /// Everything that the picture puts somewhere is within it, whatever the values are.
    fn assert_well_formed(picture: &Picture) {
        let svg = picture.svg().unwrap();
        let document = roxmltree::Document::parse(&svg).expect("well-formed XML");
        let root = document.root_element();
        let number = |node: &roxmltree::Node<'_, '_>, name: &str| {
            node.attribute(name)
                .map(|value| value.parse::<f64>().expect(name))
        };
        let (width, height) = (
            number(&root, "width").unwrap(),
            number(&root, "height").unwrap(),
        );
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
        for values in [
            &[][..],
            &[0.0],
            &[1e-9, 0.0],
            &[0.24, 1.2, 6.6],
            &[0.3, 1e6],
            &[7.0],
            &[10.0],
        ] {
            let mut picture = picture(values);
            assert_well_formed(&picture);
            assert!(picture.svg().unwrap().contains("limit 0.5"));
            picture.groups[0].limit = None;
            assert_well_formed(&picture);
            assert!(!picture.svg().unwrap().contains("limit"));
        }
    }

    #[test]
    fn steps_are_round_and_few() {
        for (longest, round) in [
            (6.0, 1.0),
            (7.4, 2.0),
            (0.6, 0.1),
            (25.0, 5.0),
            (60.0, 10.0),
        ] {
            assert!((step(longest) / round - 1.0).abs() < 1e-9, "{longest}");
        }
    }
}
