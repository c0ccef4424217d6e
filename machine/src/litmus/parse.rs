//! From text to tests.
//!
//! One statement a line; a `#` starts a comment. Names are declared before they are used, so that
//! one pass resolves them and a misspelt one is an error. The format is described in
//! `docs/MACHINE.md`.

mod declarations;
mod instructions;
mod questions;
mod tokens;
mod values;

use std::fmt;

use super::program::*;
use declarations::*;
use instructions::instruction;
pub(super) use instructions::{atomic_change, atomic_name, barrier_kind};
use questions::implication;
use tokens::Tokens;

/// An error in a file of tests, and its place. It prints as one line.
///
/// ```
/// use tablewright_machine::litmus::parse;
/// let error = parse("x.litmus", "test t\nthread\n  LDR r0, [y]\n").unwrap_err();
/// assert_eq!(error.to_string(), "x.litmus:3: 'y' is neither a mapped address nor a location");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// The name of the file.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// The error.
    pub what: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, what } = self;
        write!(f, "{file}:{line}: {what}")
    }
}

impl std::error::Error for ParseError {}

// A test that is larger has more executions than can be waited for.
const MOST_THREADS: usize = 4;
const MOST_INSTRUCTIONS: usize = 16;
const MOST_NAMES: usize = 16;
const MOST_REGISTERS: usize = 16;
/// Levels of parentheses.
const DEEPEST: usize = 64;

/// Reads the tests in a file in the notation of this crate.
pub(super) fn parse(name: &str, text: &str) -> Result<Vec<Test>, ParseError> {
    let mut tests: Vec<Test> = Vec::new();
    let mut reader = Reader::default();
    let error = |line, what| ParseError { file: visible(name), line, what };
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let (word, rest) = match line.split_once(char::is_whitespace) {
            Some((word, rest)) => (word, rest.trim()),
            None => (line, ""),
        };
        if word == "test" {
            if let Some(test) = tests.last() {
                reader.finish(test).map_err(|what| error(test.line, what))?;
            }
            if rest.is_empty() || rest.contains(char::is_whitespace) {
                return Err(error(number, "a test needs a name without spaces".to_owned()));
            }
            if tests.iter().any(|test| test.name == rest) {
                return Err(error(number, format!("there is a test '{}' already", one_line(rest))));
            }
            reader = Reader::default();
            tests.push(Test::empty(rest, &visible(name), number));
            continue;
        }
        let Some(test) = tests.last_mut() else {
            return Err(error(number, "a file starts with 'test NAME'".to_owned()));
        };
        reader.statement(test, word, rest, line).map_err(|what| error(number, what))?;
    }
    match tests.last() {
        Some(test) => reader.finish(test).map_err(|what| error(test.line, what))?,
        None => return Err(error(1, "no test".to_owned())),
    }
    Ok(tests)
}

/// Returns a name without what would break a line. It is whole: a file is opened by it.
pub(super) fn visible(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Returns the user's words, fit for a message of one line.
pub(super) fn one_line(text: &str) -> String {
    let clean = visible(text);
    match clean.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &clean[..end]),
        None => clean,
    }
}

impl Test {
    pub(super) fn empty(name: &str, file: &str, line: usize) -> Self {
        Self {
            name: one_line(name),
            source: String::new(),
            about: String::new(),
            file: file.to_owned(),
            line,
            x86: false,
            guest: false,
            herd: false,
            profile: None,
            hardware_access: false,
            hardware_dirty: false,
            bbm: 0,
            spaces: Vec::new(),
            data: Vec::new(),
            addresses: Vec::new(),
            tables: Vec::new(),
            maps: Vec::new(),
            stage1: Vec::new(),
            inits: Vec::new(),
            code: Vec::new(),
            asks: Vec::new(),
            assumptions: Vec::new(),
            seen: Vec::new(),
        }
    }

    fn space(&self, name: &str) -> Option<usize> {
        self.spaces.iter().position(|space| space.name == name)
    }
    fn datum(&self, name: &str) -> Option<usize> {
        self.data.iter().position(|data| data.name == name)
    }
    fn address(&self, name: &str) -> Option<usize> {
        self.addresses.iter().position(|address| address.name == name)
    }
    fn table(&self, name: &str) -> Option<usize> {
        self.tables.iter().position(|table| table.name == name)
    }
    fn map(&self, space: usize, address: usize) -> Option<&Map> {
        let wanted = |map: &&Map| map.space == space && map.address == address;
        self.maps.iter().find(wanted)
    }
    fn has_first(&self, address: usize) -> bool {
        self.stage1.iter().any(|(mapped, _)| *mapped == address)
    }
    fn is_taken(&self, name: &str) -> bool {
        self.space(name).is_some()
            || self.datum(name).is_some()
            || self.address(name).is_some()
            || self.table(name).is_some()
    }
}

type Parsed<T> = Result<T, String>;

/// The reader's place in a test.
#[derive(Default)]
struct Reader {
    arch: bool,
    in_thread: bool,
}

impl Reader {
    fn statement(&mut self, test: &mut Test, word: &str, rest: &str, line: &str) -> Parsed<()> {
        let header = ["arch", "space", "data", "at", "map", "stage1", "table", "init"];
        if header.contains(&word) && !(test.code.is_empty() && test.asks.is_empty()) {
            return Err(format!("'{word}' comes before the first thread"));
        }
        if test.spaces.is_empty() && !["source", "about", "arch", "space"].contains(&word) {
            test.spaces.push(Space { name: "main".to_owned(), id: 1 });
        }
        match word {
            "source" => test.source = one_line(rest),
            "about" => test.about = rest.chars().filter(|c| !c.is_control()).collect(),
            "arch" => self.arch(test, rest)?,
            "space" => space(test, rest)?,
            "data" => data(test, rest)?,
            "at" => at(test, rest)?,
            "map" => map(test, rest)?,
            "stage1" => stage1(test, rest)?,
            "table" => table(test, rest)?,
            "init" => init(test, rest)?,
            "thread" => {
                thread(test, rest)?;
                self.in_thread = true;
            }
            "ask" => {
                self.in_thread = false;
                if test.code.is_empty() {
                    return Err("'ask' comes after the threads".to_owned());
                }
                limit(test.asks.len(), MOST_NAMES, "questions")?;
                let mut tokens = Tokens::of(rest)?;
                let outcome = implication(&mut tokens, test, 0)?;
                tokens.end()?;
                test.asks.push(Ask {
                    text: one_line(rest),
                    outcome,
                    verdicts: Vec::new(),
                    only_explored: None,
                    never_shown: None,
                });
            }
            "expect" | "base" | "ets2" | "x86" => verdict(test, word, rest)?,
            "only-explored" | "never-shown" => {
                let Some(ask) = test.asks.last_mut() else {
                    return Err(format!("'{word}' comes after an 'ask'"));
                };
                if rest.is_empty() {
                    return Err(format!("'{word}' needs a reason"));
                }
                let slot = if word == "never-shown" {
                    &mut ask.never_shown
                } else {
                    &mut ask.only_explored
                };
                *slot = Some(rest.chars().filter(|c| !c.is_control()).collect());
            }
            _ if self.in_thread => {
                let instruction = instruction(test, line)?;
                let Some(thread) = test.code.last_mut() else {
                    return Err("an instruction outside of a thread".to_owned());
                };
                limit(thread.code.len(), MOST_INSTRUCTIONS, "instructions in a thread")?;
                thread.code.push(instruction);
            }
            _ => return Err(format!("'{}' is no statement", one_line(word))),
        }
        Ok(())
    }

    fn arch(&mut self, test: &mut Test, rest: &str) -> Parsed<()> {
        if self.arch || !test.maps.is_empty() || !test.data.is_empty() {
            return Err("'arch' is said once, and first".to_owned());
        }
        self.arch = true;
        let mut words = rest.split_whitespace();
        match words.next() {
            Some("arm64") => {}
            Some("x86-64") => test.x86 = true,
            _ => return Err("an architecture is arm64 or x86-64".to_owned()),
        }
        for word in words {
            match word {
                "af" if !test.x86 => test.hardware_access = true,
                "dirty" if !test.x86 => {
                    test.hardware_access = true;
                    test.hardware_dirty = true;
                }
                "bbm1" if !test.x86 => test.bbm = 1,
                "bbm2" if !test.x86 => test.bbm = 2,
                "guest" if !test.x86 => test.guest = true,
                other => {
                    return Err(format!(
                        "'{}' is no feature: arm64 has af, dirty, bbm1, bbm2, guest",
                        one_line(other)
                    ));
                }
            }
        }
        Ok(())
    }

    /// A test has to say something.
    fn finish(&self, test: &Test) -> Parsed<()> {
        if test.code.is_empty() {
            return Err(format!("test '{}' has no thread", test.name));
        }
        if test.asks.is_empty() {
            return Err(format!("test '{}' asks nothing", test.name));
        }
        Ok(())
    }
}

fn limit(there: usize, most: usize, what: &str) -> Parsed<()> {
    if there < most { Ok(()) } else { Err(format!("more than {most} {what}")) }
}
