//! The words of a line, and the names among them.

use super::super::program::*;
use super::{MOST_REGISTERS, Parsed, one_line};

pub(super) fn register_number(word: &str) -> Option<usize> {
    let number: usize = word.strip_prefix('r')?.parse().ok()?;
    (number < MOST_REGISTERS).then_some(number)
}

/// The words and signs of a line, and how far it has been read.
pub(super) struct Tokens<'l> {
    tokens: Vec<&'l str>,
    next: usize,
}

impl<'l> Tokens<'l> {
    pub fn of(line: &'l str) -> Parsed<Self> {
        let mut tokens = Vec::new();
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let length = if is_word(first) {
                rest.find(|c| !is_word(c)).unwrap_or(rest.len())
            } else if rest.starts_with("=>") || rest.starts_with("!=") {
                2
            } else if "[](),:=+".contains(first) {
                1
            } else {
                return Err(format!("'{}' has no meaning here", one_line(&first.to_string())));
            };
            let (token, after) = rest.split_at(length);
            tokens.push(token);
            rest = after.trim_start();
        }
        Ok(Self { tokens, next: 0 })
    }

    pub fn peek(&self) -> Option<&'l str> {
        self.tokens.get(self.next).copied()
    }
    pub fn peek_is(&self, token: &str) -> bool {
        self.peek() == Some(token)
    }
    pub fn peek_name(&self) -> Option<&'l str> {
        self.peek().filter(|t| t.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_'))
    }
    pub fn is_number(&self) -> bool {
        self.peek().is_some_and(|t| t.starts_with(|c: char| c.is_ascii_digit()))
    }
    pub fn skip(&mut self) {
        self.next += 1;
    }
    pub fn accept(&mut self, token: &str) -> bool {
        let there = self.peek_is(token);
        self.next += usize::from(there);
        there
    }
    pub fn accept_word(&mut self, word: &str) -> bool {
        let there = self.peek().is_some_and(|t| t.eq_ignore_ascii_case(word));
        self.next += usize::from(there);
        there
    }
    pub fn accept_name(&mut self) -> Option<String> {
        let name = self.peek_name()?;
        self.skip();
        Some(name.to_owned())
    }
    pub fn found(&self) -> String {
        self.peek()
            .map_or("the line ends".to_owned(), |t| format!("'{}' stands there", one_line(t)))
    }
    pub fn symbol(&mut self, symbol: &str) -> Parsed<()> {
        if self.accept(symbol) {
            Ok(())
        } else {
            Err(format!("'{symbol}' is expected, and {}", self.found()))
        }
    }
    pub fn word(&mut self, word: &str) -> Parsed<()> {
        self.symbol(word)
    }
    pub fn name(&mut self, what: &str) -> Parsed<String> {
        self.accept_name().ok_or_else(|| format!("{what} ({})", self.found()))
    }
    pub fn number(&mut self) -> Parsed<u64> {
        let Some(token) = self.peek().filter(|_| self.is_number()) else {
            return Err(format!("a number is expected, and {}", self.found()));
        };
        let parsed = match token.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => token.parse(),
        };
        self.skip();
        parsed.map_err(|_| format!("'{}' is no number of 64 bits", one_line(token)))
    }
    pub fn end(&self) -> Parsed<()> {
        match self.peek() {
            None => Ok(()),
            Some(token) => Err(format!("'{}' is too much", one_line(token))),
        }
    }

    pub fn register(&mut self) -> Parsed<usize> {
        let found = self.found();
        let register = self.peek_name().and_then(register_number);
        self.skip();
        register.ok_or_else(|| {
            format!("a register, r0 to r{}, is expected, and {found}", MOST_REGISTERS - 1)
        })
    }
    pub fn datum(&mut self, test: &Test) -> Parsed<usize> {
        let name = self.name("the name of a page is missing")?;
        test.datum(&name)
            .ok_or_else(|| format!("'{}' is no page: declare it with 'data'", one_line(&name)))
    }
    pub fn space(&mut self, test: &Test) -> Parsed<usize> {
        let name = self.name("the name of a space is missing")?;
        test.space(&name).ok_or_else(|| format!("'{}' is no space", one_line(&name)))
    }
    pub fn address(&mut self, test: &Test) -> Parsed<usize> {
        let name = self.name("the name of an address is missing")?;
        test.address(&name).ok_or_else(|| format!("'{}' is no address", one_line(&name)))
    }
    /// `name` or `space:name`.
    pub fn spaced(&mut self, test: &Test) -> Parsed<(usize, String)> {
        let name = self.name("the name of an address is missing")?;
        if !self.accept(":") {
            return Ok((0, name));
        }
        let space =
            test.space(&name).ok_or_else(|| format!("'{}' is no space", one_line(&name)))?;
        Ok((space, self.name("the name of an address is missing")?))
    }
    pub fn spaced_address(&mut self, test: &Test) -> Parsed<(usize, usize)> {
        let (space, name) = self.spaced(test)?;
        let address =
            test.address(&name).ok_or_else(|| format!("'{}' is no address", one_line(&name)))?;
        Ok((space, address))
    }
    /// A word of physical memory: `name`, `pte(x)`, `table[x]`.
    pub fn location(&mut self, test: &Test) -> Parsed<Location> {
        let name = self.name("a location is missing")?;
        let depth = match name.as_str() {
            "pte" => 0,
            "pmd" => 1,
            "pud" => 2,
            "pgd" => 3,
            "stage1" => {
                self.symbol("(")?;
                let address = self.address(test)?;
                self.symbol(")")?;
                if !test.has_first(address) {
                    let name = &test.addresses[address].name;
                    return Err(format!("'{name}' has no stage 1: say so, if only 'invalid'"));
                }
                return Ok(Location::First(address));
            }
            _ => {
                if let Some(datum) = test.datum(&name) {
                    return Ok(Location::Data(datum));
                }
                if let Some(table) = test.table(&name) {
                    self.symbol("[")?;
                    let address = self.address(test)?;
                    self.symbol("]")?;
                    return Ok(Location::Slot { table, address });
                }
                return Err(format!(
                    "'{}' is neither a mapped address nor a location",
                    one_line(&name)
                ));
            }
        };
        self.symbol("(")?;
        let (space, address) = self.spaced_address(test)?;
        self.symbol(")")?;
        self.entry(test, space, address, depth)
    }
    /// The entry that translates an address, with so many levels below it.
    pub fn entry(&self, test: &Test, space: usize, address: usize, depth: u8) -> Parsed<Location> {
        let Some(map) = test.map(space, address) else {
            return Err(format!(
                "'{}' has no tables in this space: map it, if only as invalid",
                test.addresses[address].name
            ));
        };
        if depth == 0 && matches!(map.value, Value::Leaf { block: true, .. }) {
            return Err(format!(
                "'{}' is mapped by a block and has no pte()",
                test.addresses[address].name
            ));
        }
        Ok(Location::Entry { space, address, depth })
    }
    /// `[x]`, `[flag]`, `[pte(x)]`.
    pub fn place(&mut self, test: &Test) -> Parsed<Place> {
        self.symbol("[")?;
        let place = match self.peek_name().and_then(|name| test.address(name)) {
            Some(address) => {
                self.skip();
                if test.is_nested() && !test.has_first(address) {
                    let name = &test.addresses[address].name;
                    return Err(format!("'{name}' is an address of stage 2 alone"));
                }
                Place::Virtual(address)
            }
            None => Place::Physical(self.location(test)?),
        };
        self.symbol("]")?;
        Ok(place)
    }
    /// `addr(r0)` and `data(r0)`.
    pub fn dependencies(&mut self) -> Parsed<(Vec<Value>, Option<usize>)> {
        let (mut address, mut data) = (None, None);
        loop {
            let slot = if self.accept_word("addr") {
                &mut address
            } else if self.accept_word("data") {
                &mut data
            } else {
                return Ok((address.into_iter().map(Value::Register).collect(), data));
            };
            self.symbol("(")?;
            *slot = Some(self.register()?);
            self.symbol(")")?;
        }
    }
    /// `0:r1`, `0:label`, `[pte(x)]`.
    pub fn term(&mut self, test: &Test) -> Parsed<Term> {
        if self.accept("[") {
            let location = self.location(test)?;
            self.symbol("]")?;
            return Ok(Term::Memory(location));
        }
        let number = self.number()?;
        let thread = usize::try_from(number).ok().filter(|&thread| thread < test.code.len());
        let thread = thread.ok_or_else(|| format!("there is no thread {number}"))?;
        self.symbol(":")?;
        let name = self.name("a register or a label is missing")?;
        let register = register_number(&name);
        let code = &test.code[thread].code;
        let at = code.iter().position(|i| {
            i.label.as_deref() == Some(&name) || (register.is_some() && i.op.register() == register)
        });
        let at = at.ok_or_else(|| format!("thread {thread} has no '{}'", one_line(&name)))?;
        Ok(Term::Result(thread, at))
    }
}
