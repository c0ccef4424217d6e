//! The initial state: registers, memory and entries.

use super::super::program::*;
use super::text::{Line, Parsed, Words, is_name, number};

/// The content of a register.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Symbol {
    Value(Value),
    /// The address of a variable; the values that it is computed with, whose sum is 0.
    Address {
        of: usize,
        after: Vec<Value>,
    },
    /// The address of its entry.
    Entry {
        of: usize,
        after: Vec<Value>,
    },
    /// The number of its page, which a TLBI takes.
    Page {
        of: usize,
        after: Vec<Value>,
    },
    Label(String),
    /// An instruction so many behind the one that has faulted, and the label of that.
    Fault(u64, Option<String>),
}

/// The initial state of a test.
pub(super) struct First {
    pub variables: Vec<String>,
    /// By variable: the value of its page, and of its entry.
    pub words: Vec<u64>,
    pub leaves: Vec<Value>,
    /// By variable: the test names its entry.
    pub entries: Vec<bool>,
    /// By variable: it holds the address of another.
    pub pointers: Vec<Option<usize>>,
    /// By thread: the registers that hold something.
    pub registers: Vec<Vec<(u8, Symbol)>>,
    /// A power of two above all numbers of the test.
    pub bound: u64,
}

/// The virtual address of a variable: each has a region of 2 MiB.
pub(super) fn address(variable: usize) -> u64 {
    (16 + variable as u64) << 21
}

/// A number for the address of its entry, which no test computes with.
pub(super) fn entry_address(variable: usize) -> u64 {
    LABELS - 4096 + variable as u64
}

/// Bits of an entry that the notation has no word for.
const ALWAYS: u64 = ARM_LEAF | ARM_NOT_GLOBAL | 2;

/// An entry that leads to a page, with herd's defaults.
fn leaf(page: usize) -> Value {
    Value::Leaf { page, bits: ALWAYS | VALID | ARM_ACCESSED | ARM_USER, block: false }
}

/// The number of a register: X3 and W3 are one.
pub(super) fn register(word: &str) -> Option<u8> {
    let number = word.strip_prefix(['X', 'W', 'x', 'w'])?;
    number.parse().ok().filter(|&number: &u8| number <= 30)
}

impl First {
    pub fn of(part: (usize, &str), threads: usize) -> Parsed<Self> {
        let mut first = Self {
            variables: Vec::new(),
            words: Vec::new(),
            leaves: Vec::new(),
            entries: Vec::new(),
            pointers: Vec::new(),
            registers: vec![Vec::new(); threads],
            bound: 1,
        };
        let mut words = Words::of(part)?;
        while !words.is_done() {
            if !words.accept(";") {
                first.statement(&mut words)?;
            }
        }
        Ok(first)
    }

    /// The number of a variable, which is new where it has not been named yet.
    pub fn variable(&mut self, name: &str) -> usize {
        if let Some(number) = self.variables.iter().position(|known| known == name) {
            return number;
        }
        let number = self.variables.len();
        self.variables.push(name.to_owned());
        self.words.push(0);
        self.leaves.push(leaf(number));
        self.entries.push(false);
        self.pointers.push(None);
        number
    }

    /// Finds the bound of all numbers, those in the code too.
    pub fn bound<'l>(&mut self, lines: impl Iterator<Item = &'l Line<'l>>) {
        let moved = lines.filter(|line| line.text.to_ascii_uppercase().starts_with("MOV"));
        let moved = moved.filter_map(|line| number(line.text.rsplit(['#', ',']).next()?.trim()));
        let held = self.registers.iter().flatten().filter_map(|(_, symbol)| match symbol {
            Symbol::Value(Value::Number(number)) => Some(*number),
            _ => None,
        });
        let most = moved.chain(held).chain(self.words.iter().copied()).max().unwrap_or(0);
        self.bound = (most + 1).checked_next_power_of_two().unwrap_or(1 << 63);
    }

    fn statement(&mut self, words: &mut Words<'_>) -> Parsed<()> {
        // A type says nothing here.
        while let (Some(word), Some(next)) = (words.peek(), words.peek_at(1)) {
            let typed = is_name(word)
                && !["PTE", "TTD", "PA"].contains(&word)
                && (is_name(next) || next == "*" || number(next).is_some());
            if !typed || register(word).is_some() {
                break;
            }
            words.word()?;
            words.accept("*");
        }
        if let Some(thread) = words.number() {
            words.expect(":")?;
            let name = words.word()?;
            let Some(number) = register(name) else {
                return words.error("a register is X0 to X30");
            };
            // The type alone.
            if words.is_done() || words.peek() == Some(";") {
                return Ok(());
            }
            words.expect("=")?;
            let symbol = self.symbol(words)?;
            if matches!(symbol, Symbol::Value(Value::Leaf { page: usize::MAX, .. })) {
                return words.error("an entry in a register needs oa:PA(x)");
            }
            let Some(registers) = self.registers.get_mut(thread as usize) else {
                return words.error("there is no such thread");
            };
            registers.push((number, symbol));
            return Ok(());
        }
        let bracket = words.accept("[");
        let (variable, is_entry) = self.place(words)?;
        if bracket {
            words.expect("]")?;
        }
        if words.peek() == Some("[") {
            return words.error("an array is not read");
        }
        if !words.accept("=") {
            return Ok(());
        }
        if is_entry {
            self.leaves[variable] = match self.symbol(words)? {
                Symbol::Entry { of, .. } => self.leaves[of].clone(),
                Symbol::Value(value @ Value::Leaf { .. }) => value,
                _ => return words.error("an entry is set to (oa:PA(x), ...)"),
            };
            // Without an address, it stays its own.
            if let Value::Leaf { page, .. } = &mut self.leaves[variable]
                && *page == usize::MAX
            {
                *page = variable;
            }
        } else {
            match self.symbol(words)? {
                Symbol::Value(Value::Number(number)) => self.words[variable] = number,
                Symbol::Address { of, .. } => self.pointers[variable] = Some(of),
                _ => return words.error("memory holds a number or an address"),
            }
        }
        Ok(())
    }

    /// A variable, or its entry: `x`, `pte_x`, `PTE(x)`, `TTD(x)`.
    pub fn place(&mut self, words: &mut Words<'_>) -> Parsed<(usize, bool)> {
        let word = words.name()?;
        let (name, is_entry) = match word {
            "PTE" | "TTD" => {
                words.expect("(")?;
                let name = words.name()?;
                words.expect(")")?;
                (name, true)
            }
            _ => match word.strip_prefix("pte_") {
                Some(name) => (name, true),
                None => (word, false),
            },
        };
        if name.starts_with("PTE") || name.starts_with("pmd_") || name == "PMD" {
            return words.error("entries above the last level are not read");
        }
        let variable = self.variable(name);
        self.entries[variable] |= is_entry;
        Ok((variable, is_entry))
    }

    /// A value: a number, an address, an entry's address, an entry.
    pub fn symbol(&mut self, words: &mut Words<'_>) -> Parsed<Symbol> {
        if let Some(number) = words.number() {
            return Ok(Symbol::Value(Value::Number(number)));
        }
        if words.accept("(") {
            let value = self.entry(words)?;
            return Ok(Symbol::Value(value));
        }
        if words.accept("label") {
            return words.error("a label is a value in a condition alone");
        }
        words.accept("&");
        let (of, is_entry) = self.place(words)?;
        let none = Vec::new();
        Ok(match is_entry {
            true => Symbol::Entry { of, after: none },
            false => Symbol::Address { of, after: none },
        })
    }

    /// Reads `oa:PA(x), valid:0, af:0, db:0, dbm:1, el0:0)`. The page is `usize::MAX` where it is
    /// not said.
    fn entry(&mut self, words: &mut Words<'_>) -> Parsed<Value> {
        let mut page = usize::MAX;
        let Value::Leaf { mut bits, .. } = leaf(0) else {
            return words.error("");
        };
        while !words.accept(")") {
            let key = words.name()?;
            if key == "oa" {
                words.expect(":")?;
                let word = words.name()?;
                let name = if word == "PA" {
                    words.expect("(")?;
                    let name = words.name()?;
                    words.expect(")")?;
                    name
                } else {
                    match word.strip_prefix("phy_") {
                        Some(name) => name,
                        None => return words.error("oa: is PA(x) or phy_x"),
                    }
                };
                page = self.variable(name);
                words.accept(",");
                continue;
            }
            if !words.accept(":") {
                return words.error(&format!("'{key}' is not read: memory types are all one here"));
            }
            let on = match words.number() {
                Some(0) => false,
                Some(1) => true,
                _ => return words.error(&format!("{key} is 0 or 1")),
            };
            let (bit, set) = match key {
                "valid" => (VALID, on),
                "af" => (ARM_ACCESSED, on),
                "db" => (ARM_READ_ONLY, !on),
                "dbm" => (ARM_DBM, on),
                "el0" => (ARM_USER, on),
                _ => return words.error(&format!("'{key}' is no part of an entry")),
            };
            bits = if set { bits | bit } else { bits & !bit };
            words.accept(",");
        }
        Ok(Value::Leaf { page, bits, block: false })
    }
}
