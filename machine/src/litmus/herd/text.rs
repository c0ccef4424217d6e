//! The parts of a test, and its words.

use super::super::parse::one_line;

/// The line, and what is wrong there.
pub(super) type Parsed<T> = Result<T, (usize, String)>;

/// The parts of a test, with the lines that they stand on.
pub(super) struct Sections<'t> {
    pub name: String,
    pub header: Vec<(usize, &'t str)>,
    pub initial: (usize, &'t str),
    pub program: Vec<(usize, &'t str)>,
    pub condition: (usize, &'t str),
}

/// Replaces comments by spaces, and leaves the ends of lines.
pub(super) fn without_comments(text: &str) -> String {
    let mut depth = 0usize;
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let opens = rest.starts_with("(*");
        let closes = depth > 0 && rest.starts_with("*)");
        if opens || closes {
            depth = if opens { depth + 1 } else { depth - 1 };
            clean.push_str("  ");
            rest = &rest[2..];
        } else {
            clean.push(if depth > 0 && c != '\n' { ' ' } else { c });
            rest = &rest[c.len_utf8()..];
        }
    }
    clean
}

/// The words that begin what is asked.
const QUESTIONS: [&str; 5] = ["locations", "exists", "~exists", "forall", "filter"];

impl<'t> Sections<'t> {
    /// Takes a text without comments apart.
    pub fn of(text: &'t str) -> Parsed<Self> {
        let line_of = |at: usize| text[..at].matches('\n').count() + 1;
        let open =
            text.find('{').ok_or((1, "a test needs '{' and what holds at first".to_owned()))?;
        let close = text[open..].find("\n}").map(|at| open + at + 1);
        let close = close.or_else(|| text[open..].rfind('}').map(|at| open + at));
        let close = close.ok_or((line_of(open), "the '{' is not closed".to_owned()))?;
        let mut header = text[..open].lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
        let heading = header.find(|(_, line)| !line.is_empty());
        let name = heading.and_then(|(_, line)| line.split_whitespace().nth(1));
        let name = name.ok_or((1, "a test needs a name".to_owned()))?.to_owned();
        let body = close + 1;
        let is_question = |line: &str| {
            let word = line.trim_start();
            QUESTIONS.iter().any(|question| {
                let rest = word.strip_prefix(question);
                rest.is_some_and(|rest| {
                    !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_')
                })
            })
        };
        let mut end = body;
        for line in text[body..].split_inclusive('\n') {
            if is_question(line) {
                break;
            }
            end += line.len();
        }
        let mut program = Vec::new();
        let mut at = body;
        for row in text[body..end].split(';') {
            let start = at + (row.len() - row.trim_start().len());
            if !row.trim().is_empty() {
                program.push((line_of(start), row.trim()));
            }
            at += row.len() + 1;
        }
        Ok(Self {
            name,
            header: header.filter(|(_, line)| !line.is_empty()).collect(),
            initial: (line_of(open), &text[open + 1..close]),
            program,
            condition: (line_of(end), text[end..].trim()),
        })
    }
}

/// The words and signs of a part of a test.
pub(super) struct Words<'t> {
    words: Vec<(usize, &'t str)>,
    next: usize,
    last: usize,
}

impl<'t> Words<'t> {
    pub fn of((first, text): (usize, &'t str)) -> Parsed<Self> {
        let mut words = Vec::new();
        let mut number = first;
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
            let length = if c.is_whitespace() {
                number += usize::from(c == '\n');
                rest = &rest[c.len_utf8()..];
                continue;
            } else if is_word(c) {
                rest.find(|c| !is_word(c)).unwrap_or(rest.len())
            } else if rest.starts_with("/\\") || rest.starts_with("\\/") {
                2
            } else if "[](){},:;=~*&\"-".contains(c) {
                1
            } else {
                return Err((number, format!("'{}' is not read", one_line(&c.to_string()))));
            };
            words.push((number, &rest[..length]));
            rest = &rest[length..];
        }
        Ok(Self { words, next: 0, last: number })
    }

    pub fn line(&self) -> usize {
        self.words.get(self.next).map_or(self.last, |(line, _)| *line)
    }
    pub fn peek(&self) -> Option<&'t str> {
        self.words.get(self.next).map(|(_, word)| *word)
    }
    pub fn peek_at(&self, ahead: usize) -> Option<&'t str> {
        self.words.get(self.next + ahead).map(|(_, word)| *word)
    }
    pub fn is_done(&self) -> bool {
        self.next >= self.words.len()
    }
    pub fn accept(&mut self, word: &str) -> bool {
        let there = self.peek().is_some_and(|is| is.eq_ignore_ascii_case(word));
        self.next += usize::from(there);
        there
    }
    pub fn expect(&mut self, word: &str) -> Parsed<()> {
        match self.accept(word) {
            true => Ok(()),
            false => self.error(&format!("'{word}' is missing")),
        }
    }
    pub fn word(&mut self) -> Parsed<&'t str> {
        match self.peek() {
            Some(word) => {
                self.next += 1;
                Ok(word)
            }
            None => self.error("the test ends too early"),
        }
    }
    pub fn name(&mut self) -> Parsed<&'t str> {
        match self.peek() {
            Some(word) if is_name(word) => self.word(),
            Some(word) => self.error(&format!("'{}' is no name", one_line(word))),
            None => self.error("the test ends too early"),
        }
    }
    /// A number, if there is one.
    pub fn number(&mut self) -> Option<u64> {
        let number = number(self.peek()?)?;
        self.next += 1;
        Some(number)
    }
    pub fn error<T>(&self, what: &str) -> Parsed<T> {
        Err((self.line(), what.to_owned()))
    }
}

/// Reads a number, decimal or hexadecimal.
pub(super) fn number(word: &str) -> Option<u64> {
    match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}

/// An instruction, and the labels before it. The last of a thread may have labels alone.
#[derive(Clone)]
pub(super) struct Line<'t> {
    pub number: usize,
    pub labels: Vec<&'t str>,
    pub text: &'t str,
}

impl<'t> Line<'t> {
    /// Adds what a cell says to the lines of its thread.
    pub fn add(number: usize, cell: &'t str, lines: &mut Vec<Self>) {
        let mut rest = cell.trim();
        let open = |line: &&mut Self| line.text.is_empty();
        while let Some((label, after)) = rest.split_once(':') {
            if !is_name(label.trim()) {
                break;
            }
            match lines.last_mut().filter(open) {
                Some(line) => line.labels.push(label.trim()),
                None => lines.push(Self { number, labels: vec![label.trim()], text: "" }),
            }
            rest = after.trim();
        }
        if rest.is_empty() {
            return;
        }
        match lines.last_mut().filter(open) {
            Some(line) => (line.number, line.text) = (number, rest),
            None => lines.push(Self { number, labels: Vec::new(), text: rest }),
        }
    }
}

pub(super) fn is_name(word: &str) -> bool {
    let mut chars = word.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.')
}
