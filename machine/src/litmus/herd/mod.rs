//! Tests of herd, as they are published.
//!
//! [`parse`] reads herd's notation of AArch64 tests with translation tables: a header, what
//! registers and memory hold at first, columns of instructions, and a condition. Each thread is
//! executed on symbols, so that a register is a [`Value`] of what the loads before have read; a
//! branch forward becomes a condition on the instructions that it skips, and a fault one on those
//! of its handler. The rest is a [`Test`] like any other. What cannot be said so is refused, with
//! its line.

mod code;
mod condition;
mod first;
mod show;
mod text;

use super::parse::{ParseError, one_line, visible};
use super::program::*;
use code::{Faults, Thread as Source};
use first::First;
use text::{Line, Parsed, Sections};

pub use show::outcomes as herd_outcomes;
pub(crate) use show::{canonical, show};

/// Whether a text is in herd's notation.
///
/// ```
/// use tablewright_machine::litmus::is_herd;
/// assert!(is_herd("AArch64 MP\n{}\n P0;\n") && !is_herd("test MP\n"));
/// ```
pub fn is_herd(text: &str) -> bool {
    text.trim_start().strip_prefix("AArch64").is_some_and(|rest| rest.starts_with([' ', '\t']))
}

/// Reads one test; `name` is for messages.
pub(super) fn parse(name: &str, text: &str) -> Result<Test, ParseError> {
    read(name, text).map_err(|(line, what)| ParseError { file: visible(name), line, what })
}

fn read(file: &str, text: &str) -> Parsed<Test> {
    let clean = text::without_comments(text);
    let sections = Sections::of(&clean)?;
    let mut test = Test::empty(&sections.name, &visible(file), 1);
    test.spaces.push(Space { name: "main".to_owned(), id: 1 });
    let (threads, handlers) = columns(&sections.program)?;
    let header = Header::of(&sections.header, threads.len())?;
    let mut first = First::of(sections.initial, threads.len())?;
    let condition = condition::Condition::of(sections.condition, &mut first)?;
    first.bound(threads.iter().chain(handlers.iter().map(|(_, lines)| lines)).flatten());
    let run = |number: usize, translated, draft| {
        let handler = handlers.iter().find(|(of, _)| *of == number);
        let mut source = Source::new(number, &first, translated, header.faults);
        source.draft = draft;
        source.user = header.user.contains(&number);
        source.run(&threads[number], handler.map(|(_, lines)| lines.as_slice()))?;
        Ok(source)
    };
    let run_all = |translated, draft| -> Parsed<Vec<Source<'_>>> {
        (0..threads.len()).map(|number| run(number, translated, draft)).collect()
    };
    // A variable is translated if its entry or an invalidation names it. The others are as good as
    // words of memory, and have far fewer states.
    let every = vec![true; first.variables.len()];
    let drafts = run_all(&every, true)?;
    let all = drafts.iter().any(|draft| draft.invalidates_all);
    let mut translated: Vec<bool> = first.entries.iter().map(|&entry| entry || all).collect();
    let named = drafts.iter().flat_map(|draft| &draft.invalidated);
    named.chain(&condition.faulting()).for_each(|&variable| translated[variable] = true);
    let sources = run_all(&translated, false)?;
    finish(&mut test, &header, &first, &translated, sources, &condition)?;
    Ok(test)
}

/// Fills in a test whose threads are executed.
fn finish(
    test: &mut Test,
    header: &Header,
    first: &First,
    translated: &[bool],
    sources: Vec<Source<'_>>,
    condition: &condition::Condition,
) -> Parsed<()> {
    for (number, variable) in first.variables.iter().enumerate() {
        let value = first.words[number];
        test.data.push(Data { name: variable.clone(), value, behind: None });
        test.addresses.push(Address { name: variable.clone(), va: first::address(number) });
        if translated[number] {
            let value = first.leaves[number].clone();
            test.maps.push(Map { space: 0, address: number, value });
        }
    }
    test.herd = true;
    test.profile = header.profile;
    test.hardware_access = header.access.contains(&true);
    test.hardware_dirty = header.dirty.contains(&true);
    let (seen, outcome) = condition.on(first, &sources)?;
    let text = one_line(&condition.text);
    let asked = Ask { text, outcome, verdicts: Vec::new(), only_explored: None, never_shown: None };
    test.asks.push(asked);
    test.seen = seen;
    for (thread, source) in sources.into_iter().enumerate() {
        test.assumptions.extend(source.assumptions.into_iter().map(|value| (thread, value)));
        let user = header.user.contains(&thread);
        let of_entry =
            |i: &Instruction| matches!(i.op.place(), Some(Place::Physical(Location::Entry { .. })));
        if user && source.code.iter().any(of_entry) {
            return Err((1, format!("P{thread} is an application, and accesses an entry")));
        }
        let leaves = (!header.access[thread], !header.dirty[thread]);
        test.code.push(Thread { space: 0, user, leaves, code: source.code });
        if test.code[thread].code.len() >= PLACES {
            return Err((1, format!("P{thread} has more than {} instructions", PLACES - 1)));
        }
    }
    Ok(())
}

/// The lines of each thread, and those of handlers with the threads that they are of.
type Columns<'t> = (Vec<Vec<Line<'t>>>, Vec<(usize, Vec<Line<'t>>)>);

/// Takes the columns of a program apart.
fn columns<'t>(rows: &[(usize, &'t str)]) -> Parsed<Columns<'t>> {
    let mut rows = rows.iter();
    let Some((line, heads)) = rows.next() else {
        return Err((1, "a test needs a program".to_owned()));
    };
    let mut kinds = Vec::new();
    for head in heads.split('|') {
        let head = head.trim();
        let (thread, handler) = match head.strip_suffix(".F") {
            Some(thread) => (thread, true),
            None => (head, false),
        };
        let number = thread.strip_prefix('P').and_then(|number| number.parse::<usize>().ok());
        match number {
            Some(number) => kinds.push((number, handler)),
            None => return Err((*line, format!("'{}' is no thread: P0, P1.F", one_line(head)))),
        }
    }
    let count = kinds.iter().filter(|(_, handler)| !handler).count();
    let mut threads: Vec<Vec<Line<'t>>> = vec![Vec::new(); count];
    if count > 4 || kinds.iter().any(|(number, _)| *number >= count) {
        return Err((*line, "threads are P0 to P3, without a gap".to_owned()));
    }
    let mut handlers: Vec<(usize, Vec<Line<'t>>)> = Vec::new();
    for &(number, handler) in &kinds {
        if handler {
            handlers.push((number, Vec::new()));
        }
    }
    for (line, row) in rows {
        let cells: Vec<_> = row.split('|').collect();
        if cells.len() > kinds.len() {
            return Err((*line, format!("a row has {} cells at most", kinds.len())));
        }
        for (cell, &(number, handler)) in cells.into_iter().zip(&kinds) {
            let lines = match handler {
                false => &mut threads[number],
                true => match handlers.iter_mut().find(|(of, _)| *of == number) {
                    Some((_, lines)) => lines,
                    None => continue,
                },
            };
            Line::add(*line, cell, lines);
        }
    }
    Ok((threads, handlers))
}

/// The header of a test.
struct Header {
    faults: Faults,
    /// The rules that it is for, if not for all.
    profile: Option<Profile>,
    /// Threads that run as applications do.
    user: Vec<usize>,
    /// By thread: walkers set the access flag, and the dirty state.
    access: Vec<bool>,
    dirty: Vec<bool>,
}

impl Header {
    fn of(lines: &[(usize, &str)], threads: usize) -> Parsed<Self> {
        let mut header = Self {
            faults: Faults::End,
            profile: None,
            user: Vec::new(),
            access: vec![false; threads],
            dirty: vec![false; threads],
        };
        for &(line, text) in lines {
            let Some((key, value)) = text.split_once('=') else { continue };
            let words = value.split([' ', ',', '\t']).filter(|word| !word.is_empty());
            let thread_of = |word: &str| -> Parsed<usize> {
                let number = word.strip_prefix('P').and_then(|number| number.parse().ok());
                number
                    .filter(|&number: &usize| number < threads)
                    .ok_or_else(|| (line, format!("'{}' is no thread of the test", one_line(word))))
            };
            match key.trim().to_ascii_lowercase().as_str() {
                "variant" => {
                    for word in words {
                        header.faults = match word.to_ascii_lowercase().as_str() {
                            "precise" | "fatal" => Faults::End,
                            "imprecise" | "handled" => Faults::Again,
                            "faulttonext" | "skip" => Faults::Next,
                            "vmsa" | "kvm" => continue,
                            "ets2" => {
                                header.profile = Some(Profile::Ets2);
                                continue;
                            }
                            _ => {
                                let what = format!("variant '{}' is not read", one_line(word));
                                return Err((line, what));
                            }
                        };
                    }
                }
                "tthm" => {
                    for word in words {
                        let (thread, feature) = match word.split_once(':') {
                            Some((thread, feature)) => (Some(thread_of(thread)?), feature),
                            None => (None, word),
                        };
                        let of = |set: &mut Vec<bool>| match thread {
                            Some(thread) => set[thread] = true,
                            None => set.fill(true),
                        };
                        match feature {
                            "HA" => of(&mut header.access),
                            "HD" => {
                                of(&mut header.access);
                                of(&mut header.dirty);
                            }
                            _ => {
                                let what = format!("'{}' is not HA or HD", one_line(feature));
                                return Err((line, what));
                            }
                        }
                    }
                }
                "el0" => {
                    for word in words {
                        header.user.push(thread_of(word)?);
                    }
                }
                _ => {}
            }
        }
        Ok(header)
    }
}
