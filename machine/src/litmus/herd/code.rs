//! A thread, executed on symbols.

use super::super::parse::{atomic_change, atomic_name, barrier_kind, one_line};
use super::super::program::*;
use super::first::{First, Symbol, register};
use super::text::{Line, Parsed, number};

/// How a thread goes on behind a fault for which it has no handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Faults {
    /// It ends.
    End,
    /// The instruction is executed once more.
    Again,
    /// The next instruction is executed.
    Next,
}

type Registers = Vec<Symbol>;

/// A way that ends or comes to a label: the condition on which it is taken, and the registers.
type Way = (Option<Value>, Registers);

/// A thread on the way through its instructions.
pub(super) struct Thread<'f> {
    /// The labels, and what is translated, are still to be found.
    pub draft: bool,
    /// It is an application, but for its handler.
    pub user: bool,
    first: &'f First,
    translated: &'f [bool],
    faults: Faults,
    registers: Registers,
    /// The values that were compared last.
    flags: Option<(Value, Value)>,
    /// The condition on which this place is reached; `None`: always.
    path: Option<Value>,
    /// Ways to labels further on.
    ahead: Vec<(String, Way)>,
    /// Ways to the end.
    ends: Vec<Way>,
    /// The place that a handler returns to, while one is executed.
    handling: Option<Symbol>,
    pub code: Vec<Instruction>,
    /// The instructions behind each label.
    pub labels: Vec<(String, Vec<usize>)>,
    /// Executions in which one of these is 0 are none.
    pub assumptions: Vec<Value>,
    pub invalidated: Vec<usize>,
    pub invalidates_all: bool,
}

/// Parts that a value is computed of, and a condition.
const MOST_PARTS: usize = 1000;

fn of(operation: Arithmetic, a: Value, b: Value) -> Value {
    Value::Of(operation, Box::new([a, b]))
}

/// The opposite of a condition.
fn not(value: Value) -> Value {
    of(Arithmetic::Equal, value, Value::Number(0))
}

/// Both conditions.
fn both(path: &Option<Value>, condition: Value) -> Option<Value> {
    Some(match path {
        None => condition,
        Some(path) => of(Arithmetic::Both, path.clone(), condition),
    })
}

/// The registers of the code of a thread, which it numbers by their place: `Register(n)` is what
/// instruction number `n` has read.
impl<'f> Thread<'f> {
    pub fn new(number: usize, first: &'f First, translated: &'f [bool], faults: Faults) -> Self {
        let mut registers = vec![Symbol::Value(Value::Number(0)); 31];
        for (register, symbol) in &first.registers[number] {
            registers[usize::from(*register)] = symbol.clone();
        }
        Self {
            draft: false,
            user: false,
            first,
            translated,
            faults,
            registers,
            flags: None,
            path: None,
            ahead: Vec::new(),
            ends: Vec::new(),
            handling: None,
            code: Vec::new(),
            labels: Vec::new(),
            assumptions: Vec::new(),
            invalidated: Vec::new(),
            invalidates_all: false,
        }
    }

    /// The content of a register in the end.
    pub fn last(&self, register: u8) -> Value {
        let of = |registers: &Registers| self.plain(&registers[usize::from(register)]);
        let mut ways = self.ends.iter().rev();
        let last = ways.next().map_or(Value::Number(0), |(_, registers)| of(registers));
        ways.fold(last, |other, (condition, registers)| match condition {
            Some(condition) => Value::Choose(Box::new([condition.clone(), of(registers), other])),
            None => of(registers),
        })
    }

    /// A number for a label, as the address of code.
    pub fn label(&self, label: &str) -> u64 {
        let at = self.labels.iter().position(|(known, _)| known == label);
        LABELS + at.unwrap_or(0) as u64 * 4
    }

    /// Executes the thread, with its handler for faults.
    pub fn run(&mut self, lines: &[Line<'_>], handler: Option<&[Line<'_>]>) -> Parsed<()> {
        for line in lines {
            for label in &line.labels {
                self.labels.push(((*label).to_owned(), Vec::new()));
            }
        }
        self.block(lines, handler)?;
        self.ends.push((self.path.clone(), self.registers.clone()));
        Ok(())
    }

    /// Executes the lines of a thread, or of its handler.
    fn block(&mut self, lines: &[Line<'_>], handler: Option<&[Line<'_>]>) -> Parsed<()> {
        for (place, line) in lines.iter().enumerate() {
            for label in &line.labels {
                self.arrive(label);
            }
            let from = self.code.len();
            self.instruction(line, &lines[place..], handler)?;
            self.check_size(line)?;
            for (label, instructions) in &mut self.labels {
                if line.labels.contains(&label.as_str()) {
                    *instructions = (from..self.code.len()).collect();
                }
            }
        }
        Ok(())
    }

    /// Refuses what is computed of too much: what is used twice in each line doubles with each.
    fn check_size(&self, line: &Line<'_>) -> Parsed<()> {
        let values = self.registers.iter().filter_map(|symbol| match symbol {
            Symbol::Value(value) => Some(value),
            _ => None,
        });
        let largest = values.chain(&self.path).map(Value::parts).max();
        match largest > Some(MOST_PARTS) {
            true => Err((line.number, format!("a value is computed of more than {MOST_PARTS}"))),
            false => Ok(()),
        }
    }

    /// The ways that lead to a label come together with the one that falls through to it.
    fn arrive(&mut self, label: &str) {
        for (to, way) in std::mem::take(&mut self.ahead) {
            match to == label {
                true => self.merge(way),
                false => self.ahead.push((to, way)),
            }
        }
    }

    /// Another way comes to this place.
    fn merge(&mut self, (condition, registers): Way) {
        let Some(condition) = condition else { return };
        let mine = std::mem::take(&mut self.registers);
        for (mine, other) in mine.into_iter().zip(registers) {
            let symbol = if mine == other {
                mine
            } else {
                let parts = [condition.clone(), self.plain(&other), self.plain(&mine)];
                Symbol::Value(Value::Choose(Box::new(parts)))
            };
            self.registers.push(symbol);
        }
        self.path = self.path.take().map(|path| of(Arithmetic::Either, path, condition));
    }

    /// The content of a register, as a number.
    fn plain(&self, symbol: &Symbol) -> Value {
        match symbol {
            Symbol::Value(value) => value.clone(),
            Symbol::Address { of, .. } => Value::Number(super::first::address(*of)),
            Symbol::Entry { of, .. } => Value::Number(super::first::entry_address(*of)),
            Symbol::Label(label) | Symbol::Fault(0, Some(label)) => {
                Value::Number(self.label(label))
            }
            Symbol::Page { .. } | Symbol::Fault(..) => Value::Number(0),
        }
    }

    /// A way to a label; one back is taken by no execution that is looked at.
    fn go(&mut self, label: &str, rest: &[Line<'_>], condition: Option<Value>) -> Parsed<()> {
        let later = rest.iter().skip(1).any(|line| line.labels.contains(&label));
        if later {
            self.ahead.push((label.to_owned(), (condition, self.registers.clone())));
        } else if self.labels.iter().any(|(known, _)| known == label) {
            self.assumptions.extend(condition.map(not));
        } else {
            let line = rest.first().map_or(1, |line| line.number);
            return Err((line, format!("there is no label '{}'", one_line(label))));
        }
        Ok(())
    }

    fn instruction(
        &mut self,
        line: &Line<'_>,
        rest: &[Line<'_>],
        handler: Option<&[Line<'_>]>,
    ) -> Parsed<()> {
        let text = line.text;
        if text.is_empty() {
            return Ok(());
        }
        let error = |what: String| Err((line.number, what));
        let (mnemonic, operands) = match text.split_once(char::is_whitespace) {
            Some((mnemonic, operands)) => (mnemonic, operands),
            None => (text, ""),
        };
        let mnemonic = mnemonic.to_ascii_uppercase();
        let operands = split(operands);
        let operands: Vec<&str> = operands.iter().map(String::as_str).collect();
        if let Some(name) = atomic_name(&mnemonic) {
            return self.atomic(line, name, &operands, rest, handler);
        }
        match (mnemonic.as_str(), operands.as_slice()) {
            ("NOP", []) => {}
            ("MOV", [to, from]) => {
                let symbol = self.operand(line, from)?;
                self.set(line, to, symbol)?;
            }
            ("ADR", [to, label]) => {
                self.set(line, to, Symbol::Label((*label).to_owned()))?;
            }
            ("EOR" | "ADD" | "SUB" | "AND" | "ORR" | "BIC" | "LSR" | "LSL", [to, a, b]) => {
                let symbol = self.compute(line, &mnemonic, a, b)?;
                self.set(line, to, symbol)?;
            }
            ("ADD", [to, a, b, extend]) if extend.eq_ignore_ascii_case("SXTW") => {
                let symbol = self.compute(line, &mnemonic, a, b)?;
                self.set(line, to, symbol)?;
            }
            ("CMP", [a, b]) => {
                self.flags = Some((self.value(line, a)?, self.value(line, b)?));
            }
            ("CSEL", [to, a, b, condition]) => {
                let condition = self.condition(line, condition)?;
                let (a, b) = (self.value(line, a)?, self.value(line, b)?);
                let chosen = Value::Choose(Box::new([condition, a, b]));
                self.set(line, to, Symbol::Value(chosen))?;
            }
            ("CSET", [to, condition]) => {
                let condition = self.condition(line, condition)?;
                let parts = [condition, Value::Number(1), Value::Number(0)];
                self.set(line, to, Symbol::Value(Value::Choose(Box::new(parts))))?;
            }
            ("B", [label]) => {
                let path = self.path.clone();
                self.go(label, rest, Some(path.unwrap_or(Value::Number(1))))?;
                self.path = Some(Value::Number(0));
            }
            ("CBZ" | "CBNZ", [register, label]) => {
                let value = self.value(line, register)?;
                let taken = if mnemonic == "CBZ" { not(value) } else { not(not(value)) };
                self.branch(line, taken, label, rest)?;
            }
            (branch, [label]) if branch.starts_with("B.") => {
                let taken = self.condition(line, &branch[2..])?;
                self.branch(line, taken, label, rest)?;
            }
            ("MSR", [to, from]) if to.eq_ignore_ascii_case("ELR_EL1") => {
                let symbol = self.operand(line, from)?;
                match (&mut self.handling, symbol) {
                    (Some(to), symbol @ (Symbol::Label(_) | Symbol::Fault(..))) => *to = symbol,
                    _ => return error("ELR_EL1 takes a label, in a handler".to_owned()),
                }
            }
            ("MRS", [to, from]) if from.eq_ignore_ascii_case("ELR_EL1") => {
                let Some(symbol) = self.handling.clone() else {
                    return error("ELR_EL1 is read in a handler".to_owned());
                };
                self.set(line, to, symbol)?;
            }
            ("ERET", []) => {
                if self.handling.is_none() {
                    return error("ERET stands in a handler".to_owned());
                }
            }
            // Behind a store-release, the weaker acquire need not wait for it.
            ("LDAPR", _) if self.code.iter().any(|i| i.op.acquires_releases().1) => {
                return error("LDAPR behind a store-release is not read".to_owned());
            }
            ("LDR" | "LDAR" | "LDAPR", [to, at]) => {
                let (at, address) = self.place(line, at)?;
                let acquire = mnemonic != "LDR";
                let op = Op::Load { register: self.code.len(), at, acquire, address };
                self.access(line, op, Some(*to), rest, handler)?;
            }
            ("STR" | "STLR", [from, at]) => {
                let value = self.value(line, from)?;
                let (at, address) = self.place(line, at)?;
                let release = mnemonic == "STLR";
                let op = Op::Store { value, at, release, address, data: None };
                self.access(line, op, None, rest, handler)?;
            }
            ("DMB" | "DSB", [kind]) => {
                let Some((kind, shared)) = barrier_kind(&kind.to_ascii_uppercase()) else {
                    return error(format!("'{}' is no barrier", one_line(text)));
                };
                let op = match mnemonic.as_str() {
                    "DMB" => Op::Fence(kind),
                    _ => Op::Barrier { kind, shared },
                };
                self.push(line, op);
            }
            ("ISB", []) => self.push(line, Op::Synchronise),
            ("TLBI", [operation, from @ ..]) => {
                let at = match from {
                    [] => None,
                    [from] => match self.operand(line, from)? {
                        Symbol::Page { of, after } => {
                            after.iter().for_each(|value| self.decide(line, value));
                            Some(of)
                        }
                        _ => return error("a TLBI takes the number of a page".to_owned()),
                    },
                    _ => return error(format!("'{}' is no TLBI", one_line(text))),
                };
                let op = self.invalidation(line, operation, at)?;
                self.push(line, op);
            }
            _ => return error(format!("'{}' is not read", one_line(text))),
        }
        Ok(())
    }

    fn invalidation(&mut self, line: &Line<'_>, operation: &str, at: Option<usize>) -> Parsed<Op> {
        let name = operation.to_ascii_uppercase();
        let base = name.strip_suffix("IS").or_else(|| name.strip_suffix("OS"));
        let broadcast = base.is_some();
        let base = base.unwrap_or(&name);
        let scope = match (base, at) {
            ("VMALLE1", None) => {
                self.invalidates_all = true;
                Scope::All
            }
            ("VAE1" | "VALE1" | "VAAE1" | "VAALE1", Some(of)) => {
                self.invalidated.push(of);
                let leaves_only = base.contains("AL");
                let at = Named { leaves_only, ..Named::one(of) };
                let space = (!base.starts_with("VAA")).then_some(0);
                Scope::Address { at, space }
            }
            _ => return Err((line.number, format!("TLBI {} is not read", one_line(operation)))),
        };
        Ok(Op::Invalidate { scope, broadcast })
    }

    fn branch(
        &mut self,
        line: &Line<'_>,
        taken: Value,
        label: &str,
        rest: &[Line<'_>],
    ) -> Parsed<()> {
        self.decide(line, &taken);
        let way = both(&self.path, taken.clone());
        self.go(label, rest, way)?;
        self.path = both(&self.path, not(taken));
        Ok(())
    }

    /// Makes all that follows depend on these values, as on a branch.
    fn decide(&mut self, line: &Line<'_>, value: &Value) {
        let mut read = Vec::new();
        value.registers(&mut read);
        for register in read {
            self.push(line, Op::Branch(register));
        }
    }

    fn push(&mut self, line: &Line<'_>, op: Op) {
        let text = line.text.to_owned();
        let when = self.path.clone();
        let user = self.user && self.handling.is_none();
        self.code.push(Instruction { op, user, label: None, text, when });
    }

    fn atomic(
        &mut self,
        line: &Line<'_>,
        (base, acquire, release): (&str, bool, bool),
        operands: &[&str],
        rest: &[Line<'_>],
        handler: Option<&[Line<'_>]>,
    ) -> Parsed<()> {
        let (operand, expected, to, at) = match (base, operands) {
            // What CAS expects is where it leaves what it has read.
            ("CAS", &[to, operand, at]) => (operand, to, Some(to), at),
            (_, &[operand, to, at]) if !base.starts_with("ST") => (operand, "WZR", Some(to), at),
            (_, &[operand, at]) if base.starts_with("ST") => (operand, "WZR", None, at),
            _ => return Err((line.number, format!("'{}' is not read", one_line(line.text)))),
        };
        let change = atomic_change(base, self.value(line, expected)?);
        let value = self.value(line, operand)?;
        let (at, address) = self.place(line, at)?;
        // One that returns nothing is no load to barriers for loads (DDI 0487 B2.3.7).
        let to = to.filter(|to| !is_zero_register(to));
        let register = to.map(|_| self.code.len());
        let op = Op::Atomic { change, register, value, at, acquire, release, address };
        self.access(line, op, to, rest, handler)
    }

    /// An access: what it reads goes to a register, and a fault goes where faults go.
    fn access(
        &mut self,
        line: &Line<'_>,
        op: Op,
        to: Option<&str>,
        rest: &[Line<'_>],
        handler: Option<&[Line<'_>]>,
    ) -> Parsed<()> {
        let faults = matches!(op.place(), Some(Place::Virtual(_)));
        let at = self.code.len();
        self.push(line, op.clone());
        let (path, registers) = (self.path.clone(), self.registers.clone());
        if let Some(to) = to {
            self.set(line, to, Symbol::Value(Value::Register(at)))?;
        }
        if !faults {
            return Ok(());
        }
        let faulted = Value::Faulted(at);
        let goes_on = both(&path, not(faulted.clone()));
        // In a handler: no execution that is looked at.
        if self.handling.is_some() {
            self.assumptions.push(not(faulted));
            return Ok(());
        }
        let after = std::mem::replace(&mut self.registers, registers);
        self.path = both(&path, faulted);
        let to_go = match handler {
            Some(handler) => {
                let label = rest.first().and_then(|line| line.labels.first());
                self.handling = Some(Symbol::Fault(0, label.map(|label| (*label).to_owned())));
                self.block(handler, None)?;
                let to_go = self.handling.take();
                let returns = handler.iter().any(|line| line.text.eq_ignore_ascii_case("ERET"));
                to_go.filter(|_| returns)
            }
            None => match self.faults {
                Faults::End => None,
                Faults::Again => Some(Symbol::Fault(0, None)),
                Faults::Next => Some(Symbol::Fault(1, None)),
            },
        };
        let here = |label: &String| line.labels.contains(&label.as_str());
        let to_go = match to_go {
            Some(Symbol::Label(label)) if here(&label) => Some(Symbol::Fault(0, None)),
            to_go => to_go,
        };
        // Executed once more, it does not fault in an execution that is looked at.
        if matches!(to_go, Some(Symbol::Fault(0, _))) {
            let again = self.code.len();
            self.push(line, op.renumbered(again));
            self.assumptions.push(not(Value::Faulted(again)));
            if let Some(to) = to {
                self.set(line, to, Symbol::Value(Value::Register(again)))?;
            }
        }
        let way = (self.path.take(), std::mem::replace(&mut self.registers, after));
        self.path = goes_on;
        let further =
            |label: &String| rest.iter().skip(1).any(|l| l.labels.contains(&label.as_str()));
        match to_go {
            None => self.ends.push(way),
            Some(Symbol::Fault(0 | 1, _)) => self.merge(way),
            Some(Symbol::Label(label)) if further(&label) => self.ahead.push((label, way)),
            _ if self.draft => {}
            _ => {
                let what = "a handler returns to a label behind the instruction";
                return Err((line.number, what.to_owned()));
            }
        }
        Ok(())
    }

    fn set(&mut self, line: &Line<'_>, to: &str, symbol: Symbol) -> Parsed<()> {
        if is_zero_register(to) {
            return Ok(());
        }
        match register(to) {
            Some(number) => {
                self.registers[usize::from(number)] = symbol;
                Ok(())
            }
            None => Err((line.number, format!("'{}' is no register", one_line(to)))),
        }
    }

    fn operand(&self, line: &Line<'_>, operand: &str) -> Parsed<Symbol> {
        if is_zero_register(operand) {
            return Ok(Symbol::Value(Value::Number(0)));
        }
        if let Some(number) = register(operand) {
            return Ok(self.registers[usize::from(number)].clone());
        }
        let digits = operand.strip_prefix('#').unwrap_or(operand);
        match number(digits) {
            Some(number) => Ok(Symbol::Value(Value::Number(number))),
            None => Err((line.number, format!("'{}' is no operand", one_line(operand)))),
        }
    }

    fn value(&self, line: &Line<'_>, operand: &str) -> Parsed<Value> {
        match self.operand(line, operand)? {
            Symbol::Value(value) => Ok(value),
            _ => Err((line.number, format!("{operand} holds an address, and is used as a value"))),
        }
    }

    fn condition(&self, line: &Line<'_>, name: &str) -> Parsed<Value> {
        let Some((a, b)) = self.flags.clone() else {
            return Err((line.number, "nothing has been compared".to_owned()));
        };
        let equal = of(Arithmetic::Equal, a, b);
        match name.to_ascii_uppercase().as_str() {
            "EQ" => Ok(equal),
            "NE" => Ok(not(equal)),
            _ => Err((line.number, format!("condition {} is not read", one_line(name)))),
        }
    }

    fn compute(&self, line: &Line<'_>, name: &str, a: &str, b: &str) -> Parsed<Symbol> {
        let (left, right) = (self.operand(line, a)?, self.operand(line, b)?);
        let refused =
            || Err((line.number, format!("{name} of {a} and {b}: an address is only added to 0")));
        match (name, left, right) {
            (_, Symbol::Value(a), Symbol::Value(b)) => {
                let operation = match name {
                    "EOR" => Arithmetic::Xor,
                    "ADD" => Arithmetic::Add,
                    "SUB" => Arithmetic::Subtract,
                    "AND" => Arithmetic::And,
                    "ORR" => Arithmetic::Or,
                    "BIC" => Arithmetic::AndNot,
                    "LSR" => Arithmetic::Right,
                    _ => Arithmetic::Left,
                };
                let value = of(operation, a, b);
                let mut read = Vec::new();
                value.registers(&mut read);
                let number = value.constant().filter(|_| read.is_empty());
                Ok(Symbol::Value(number.map_or(value, Value::Number)))
            }
            ("LSR", Symbol::Address { of, after }, Symbol::Value(Value::Number(12))) => {
                Ok(Symbol::Page { of, after })
            }
            ("ADD", Symbol::Address { of, after }, Symbol::Value(offset))
            | ("ADD", Symbol::Value(offset), Symbol::Address { of, after }) => {
                let after = self.offset(line, after, offset)?;
                Ok(Symbol::Address { of, after })
            }
            ("ADD", Symbol::Entry { of, after }, Symbol::Value(offset))
            | ("ADD", Symbol::Value(offset), Symbol::Entry { of, after }) => {
                let after = self.offset(line, after, offset)?;
                Ok(Symbol::Entry { of, after })
            }
            ("ADD", Symbol::Fault(on, label), Symbol::Value(Value::Number(bytes))) => {
                Ok(Symbol::Fault(on.saturating_add(bytes / 4), label))
            }
            _ => refused(),
        }
    }

    /// Adds what an address is computed with, which has to be 0.
    fn offset(&self, line: &Line<'_>, mut after: Vec<Value>, offset: Value) -> Parsed<Vec<Value>> {
        if !offset.is_zero(self.first.bound) {
            return Err((line.number, "an address is computed, and not by adding 0".to_owned()));
        }
        if offset.constant().is_none() {
            after.push(offset);
        }
        Ok(after)
    }

    /// Reads `[X1]`, `[X1,W2,SXTW]`, and finds the values that the address waits for. Those that
    /// choose among them are as branches.
    fn place(&mut self, line: &Line<'_>, at: &str) -> Parsed<(Place, Vec<Value>)> {
        let inner = at.strip_prefix('[').and_then(|at| at.strip_suffix(']'));
        let Some(inner) = inner else {
            return Err((line.number, format!("'{}' is no address", one_line(at))));
        };
        let mut parts = inner.split(',').map(str::trim);
        let base = parts.next().unwrap_or_default();
        let mut symbol = self.operand(line, base)?;
        if let Some(offset) = parts.next() {
            symbol = self.compute(line, "ADD", base, offset)?;
        }
        let extended = parts.next().is_none_or(|extend| extend.eq_ignore_ascii_case("SXTW"));
        if !extended || parts.next().is_some() {
            return Err((line.number, format!("'{}' is no address", one_line(at))));
        }
        // Follows a pointer: the word has held this address from the start.
        if let Symbol::Value(Value::Register(from)) = symbol
            && let Some(Place::Physical(Location::Data(page)) | Place::Virtual(page)) =
                self.code.get(from).and_then(|i| i.op.place())
            && let Some(of) = self.first.pointers[*page]
        {
            symbol = Symbol::Address { of, after: vec![Value::Register(from)] };
        }
        let (place, after) = match symbol {
            Symbol::Address { of, after } if self.translated[of] => (Place::Virtual(of), after),
            Symbol::Address { of, after } => (Place::Physical(Location::Data(of)), after),
            Symbol::Entry { of, after } => {
                (Place::Physical(Location::Entry { space: 0, address: of, depth: 0 }), after)
            }
            _ => return Err((line.number, format!("{base} holds no address"))),
        };
        let mut choosers = Vec::new();
        after.iter().for_each(|value| value.choosers(&mut choosers));
        choosers.into_iter().for_each(|register| self.push(line, Op::Branch(register)));
        Ok((place, after))
    }
}

fn is_zero_register(word: &str) -> bool {
    ["WZR", "XZR"].iter().any(|zero| zero.eq_ignore_ascii_case(word))
}

/// Splits operands at commas that stand in no bracket.
fn split(operands: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut depth = 0;
    for c in operands.chars().filter(|c| !c.is_whitespace()) {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    if parts.len() == 1 && parts[0].is_empty() { Vec::new() } else { parts }
}
