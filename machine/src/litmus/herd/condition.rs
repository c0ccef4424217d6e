//! The condition of a test, and the parts of its ends that are reported.

use super::super::program::*;
use super::code::Thread;
use super::first::{First, Symbol, register};
use super::text::{Parsed, Words, number};

/// A statement, before the threads are known.
enum Statement {
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
    /// Register, what it holds.
    Register(usize, u8, Symbol),
    Place(usize, bool, Symbol),
    /// Thread, label, variable, the kind.
    Fault(usize, Option<String>, Option<usize>, FaultKind),
}

pub(super) struct Condition {
    pub text: String,
    line: usize,
    statement: Statement,
    /// Reported besides, by `locations`.
    also: Vec<Statement>,
}

impl Condition {
    pub fn of(part: (usize, &str), first: &mut First) -> Parsed<Self> {
        let mut words = Words::of(part)?;
        let line = words.line();
        let mut also = Vec::new();
        if words.accept("locations") {
            words.expect("[")?;
            while !words.accept("]") {
                also.push(location(&mut words, first)?);
                words.accept(";");
            }
        }
        if words.is_done() {
            let text = "true".to_owned();
            return Ok(Self { text, line, statement: Statement::All(Vec::new()), also });
        }
        if words.peek() == Some("filter") {
            return words.error("'filter' is not read");
        }
        let negated = words.accept("~");
        let quantifier = words.word()?;
        if !["exists", "forall"].contains(&quantifier) || (negated && quantifier == "forall") {
            return words.error("a test asks 'exists', '~exists' or 'forall'");
        }
        let statement = any(&mut words, first, 0)?;
        if !words.accept(";") && !words.is_done() {
            return words.error("the condition goes on with what is not read");
        }
        let text = part.1.split_whitespace().collect::<Vec<_>>().join(" ");
        Ok(Self { text, line, statement, also })
    }

    /// The variables that a fault is asked of.
    pub fn faulting(&self) -> Vec<usize> {
        fn walk(statement: &Statement, found: &mut Vec<usize>) {
            match statement {
                Statement::All(parts) | Statement::Any(parts) => {
                    parts.iter().for_each(|part| walk(part, found));
                }
                Statement::Not(part) => walk(part, found),
                Statement::Fault(_, _, variable, _) => found.extend(*variable),
                _ => {}
            }
        }
        let mut found = Vec::new();
        walk(&self.statement, &mut found);
        self.also.iter().for_each(|also| walk(also, &mut found));
        found
    }

    /// Finds the parts that are reported, and the outcome, in the code of the threads.
    pub fn on(&self, first: &First, threads: &[Thread<'_>]) -> Parsed<(Vec<Seen>, Outcome)> {
        let mut seen = Vec::new();
        for statement in &self.also {
            self.resolve(statement, first, threads, &mut seen)?;
        }
        let outcome = self.resolve(&self.statement, first, threads, &mut seen)?;
        seen.sort_by(|a, b| a.name.cmp(&b.name));
        seen.dedup_by(|a, b| a.name == b.name);
        Ok((seen, outcome))
    }

    fn resolve(
        &self,
        statement: &Statement,
        first: &First,
        threads: &[Thread<'_>],
        seen: &mut Vec<Seen>,
    ) -> Parsed<Outcome> {
        let plain = |thread: usize, of: usize, symbol: &Symbol| -> Parsed<Value> {
            Ok(match symbol {
                Symbol::Value(Value::Leaf { page: usize::MAX, .. }) if of == usize::MAX => {
                    return Err((self.line, "an entry in a register needs oa:PA(x)".to_owned()));
                }
                Symbol::Value(Value::Leaf { page: usize::MAX, bits, block }) => {
                    Value::Leaf { page: of, bits: *bits, block: *block }
                }
                Symbol::Value(value) => value.clone(),
                Symbol::Address { of, .. } => Value::Number(super::first::address(*of)),
                Symbol::Label(label) => Value::Number(threads[thread].label(label)),
                Symbol::Entry { of, .. } => Value::Number(super::first::entry_address(*of)),
                Symbol::Page { .. } | Symbol::Fault(..) => {
                    return Err((self.line, "this is compared with nothing".to_owned()));
                }
            })
        };
        let thread_of = |thread: usize| match threads.get(thread) {
            Some(thread) => Ok(thread),
            None => Err((self.line, format!("there is no thread {thread}"))),
        };
        Ok(match statement {
            Statement::All(parts) | Statement::Any(parts) => {
                let mut outcome = None;
                for part in parts {
                    let next = Box::new(self.resolve(part, first, threads, seen)?);
                    outcome = Some(match (outcome, statement) {
                        (None, _) => *next,
                        (Some(outcome), Statement::All(_)) => Outcome::And(Box::new(outcome), next),
                        (Some(outcome), _) => Outcome::Or(Box::new(outcome), next),
                    });
                }
                outcome.unwrap_or(Outcome::Completed(Term::Computed(0, Value::Number(0))))
            }
            Statement::Not(part) => {
                Outcome::Not(Box::new(self.resolve(part, first, threads, seen)?))
            }
            Statement::Register(thread, register, symbol) => {
                let value = thread_of(*thread)?.last(*register);
                let term = Term::Computed(*thread, value);
                let named = thread_of(*thread)?.labels.iter();
                let labels = named.map(|(label, _)| format!("P{thread}:{label}")).collect();
                let name = format!("{thread}:X{register}");
                let what = Observed::Value(term.clone(), labels);
                seen.push(Seen { name, thread: *thread, what });
                Outcome::Equal(term, plain(*thread, usize::MAX, symbol)?)
            }
            Statement::Place(variable, is_entry, symbol) => {
                let name = &first.variables[*variable];
                let (location, name) = match is_entry {
                    true => {
                        let address = *variable;
                        (Location::Entry { space: 0, address, depth: 0 }, format!("[PTE({name})]"))
                    }
                    false => (Location::Data(*variable), format!("[{name}]")),
                };
                let term = Term::Memory(location);
                let what = Observed::Value(term.clone(), Vec::new());
                seen.push(Seen { name, thread: 0, what });
                Outcome::Equal(term, plain(0, *variable, symbol)?)
            }
            Statement::Fault(thread, label, variable, kind) => {
                let source = thread_of(*thread)?;
                let labelled = |at: &usize| match label {
                    None => true,
                    Some(label) => {
                        source.labels.iter().any(|(l, of)| l == label && of.contains(at))
                    }
                };
                let about = |at: &usize| match (source.code[*at].op.place(), variable) {
                    (Some(Place::Virtual(of)), Some(variable)) => of == variable,
                    (Some(Place::Virtual(_)), None) => true,
                    _ => false,
                };
                let places = (0..source.code.len()).filter(labelled).filter(about);
                let places: Vec<usize> = places.collect();
                let mut name = format!("P{thread}");
                if let Some(label) = label {
                    name += &format!(":{label}");
                }
                if let Some(variable) = variable {
                    name += &format!(",{}", first.variables[*variable]);
                }
                let what = Observed::Fault(places.clone(), *kind);
                seen.push(Seen { name, thread: *thread, what });
                Outcome::FaultOf(*thread, places, *kind)
            }
        })
    }
}

/// Levels of parentheses.
const DEEPEST: usize = 64;

fn any(words: &mut Words<'_>, first: &mut First, depth: usize) -> Parsed<Statement> {
    if depth > DEEPEST {
        return words.error("too many parentheses");
    }
    let mut parts = vec![all(words, first, depth)?];
    while words.accept("\\/") {
        parts.push(all(words, first, depth)?);
    }
    Ok(Statement::Any(parts))
}

fn all(words: &mut Words<'_>, first: &mut First, depth: usize) -> Parsed<Statement> {
    let mut parts = vec![one(words, first, depth)?];
    while words.accept("/\\") {
        parts.push(one(words, first, depth)?);
    }
    Ok(Statement::All(parts))
}

fn one(words: &mut Words<'_>, first: &mut First, depth: usize) -> Parsed<Statement> {
    if depth > DEEPEST {
        return words.error("too many parentheses");
    }
    if words.accept("~") || words.accept("not") {
        return Ok(Statement::Not(Box::new(one(words, first, depth + 1)?)));
    }
    if words.accept("(") {
        let inner = any(words, first, depth + 1)?;
        words.expect(")")?;
        return Ok(inner);
    }
    location(words, first)
}

/// `1:X3=...`, `x=...`, `[PTE(x)]=...`, `fault(P1:L0,x)`, and the same without a value.
fn location(words: &mut Words<'_>, first: &mut First) -> Parsed<Statement> {
    if words.accept("fault") {
        return fault(words, first);
    }
    let thread = match words.peek().and_then(|word| word.strip_prefix('P')) {
        Some(digits) if words.peek_at(1) == Some(":") => {
            words.word()?;
            number(digits)
        }
        _ => words.number(),
    };
    if let Some(thread) = thread {
        words.expect(":")?;
        let name = words.word()?;
        let Some(register) = register(name) else {
            return words.error("a register is X0 to X30");
        };
        let symbol = value(words, first)?;
        return Ok(Statement::Register(thread as usize, register, symbol));
    }
    let bracket = words.accept("[");
    let (variable, is_entry) = first.place(words)?;
    if bracket {
        words.expect("]")?;
    }
    let symbol = value(words, first)?;
    Ok(Statement::Place(variable, is_entry, symbol))
}

fn value(words: &mut Words<'_>, first: &mut First) -> Parsed<Symbol> {
    if !words.accept("=") {
        return Ok(Symbol::Value(Value::Number(0)));
    }
    if words.accept("label") {
        words.expect(":")?;
        words.expect("\"")?;
        words.name()?;
        words.expect(":")?;
        let label = words.name()?.to_owned();
        words.expect("\"")?;
        return Ok(Symbol::Label(label));
    }
    if words.accept("-") {
        let number = words.number().unwrap_or(0);
        return Ok(Symbol::Value(Value::Number(number.wrapping_neg())));
    }
    first.symbol(words)
}

fn fault(words: &mut Words<'_>, first: &mut First) -> Parsed<Statement> {
    words.expect("(")?;
    let word = words.name()?;
    let Some(thread) = word.strip_prefix('P').and_then(|number| number.parse().ok()) else {
        return words.error("a fault is of a thread: fault(P0:L0,x)");
    };
    let label = match words.accept(":") {
        true => Some(words.name()?.to_owned()),
        false => None,
    };
    let (mut variable, mut kind) = (None, FaultKind::Any);
    while words.accept(",") {
        let word = words.name()?;
        match word {
            "MMU" | "D" if words.accept(":") || words.accept("-") => {
                if word == "D" {
                    words.expect("MMU")?;
                    words.expect(":")?;
                }
                kind = match words.name()? {
                    "Translation" => FaultKind::Translation,
                    "AccessFlag" => FaultKind::AccessFlag,
                    "Permission" => FaultKind::Permission,
                    _ => return words.error("a fault is Translation, AccessFlag or Permission"),
                };
            }
            "MMU" => {}
            name if name.starts_with("pte_") || ["PTE", "TTD"].contains(&name) => {
                return words.error("an access to an entry has no translation here");
            }
            name => variable = Some(first.variable(name)),
        }
    }
    words.expect(")")?;
    Ok(Statement::Fault(thread, label, variable, kind))
}
