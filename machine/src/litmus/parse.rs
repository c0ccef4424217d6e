//! From text to tests.
//!
//! One statement a line; a `#` starts a comment. Names are declared before they are used, so that one pass resolves
//! them and a misspelt one is an error. The format is described in `docs/litmus.md`.

use std::fmt;

use super::program::*;

/// What is wrong with a file of tests, and where. It prints as one line.
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
    /// What is wrong.
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

/// Reads the tests in a file; `name` is for messages.
///
/// # Errors
/// The first line that cannot be understood.
pub fn parse(name: &str, text: &str) -> Result<Vec<Test>, ParseError> {
    let mut tests: Vec<Test> = Vec::new();
    let mut reader = Reader::default();
    let error = |line, what| ParseError {
        file: one_line(name),
        line,
        what,
    };
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
                return Err(error(
                    number,
                    "a test needs a name without spaces".to_owned(),
                ));
            }
            if tests.iter().any(|test| test.name == rest) {
                return Err(error(
                    number,
                    format!("there is a test '{}' already", one_line(rest)),
                ));
            }
            reader = Reader::default();
            tests.push(Test::empty(rest, &one_line(name), number));
            continue;
        }
        let Some(test) = tests.last_mut() else {
            return Err(error(number, "a file starts with 'test NAME'".to_owned()));
        };
        reader
            .statement(test, word, rest, line)
            .map_err(|what| error(number, what))?;
    }
    match tests.last() {
        Some(test) => reader.finish(test).map_err(|what| error(test.line, what))?,
        None => return Err(error(1, "no test".to_owned())),
    }
    Ok(tests)
}

/// What the user wrote, fit for a message of one line.
fn one_line(text: &str) -> String {
    let clean = text.chars().map(|c| if c.is_control() { '?' } else { c });
    let mut short: String = clean.clone().take(60).collect();
    if clean.count() > 60 {
        short.push('…');
    }
    short
}

impl Test {
    fn empty(name: &str, file: &str, line: usize) -> Self {
        Self {
            name: one_line(name),
            source: String::new(),
            about: String::new(),
            file: file.to_owned(),
            line,
            x86: false,
            guest: false,
            hardware_access: false,
            hardware_dirty: false,
            bbm: 0,
            spaces: Vec::new(),
            data: Vec::new(),
            addresses: Vec::new(),
            tables: Vec::new(),
            maps: Vec::new(),
            inits: Vec::new(),
            code: Vec::new(),
            asks: Vec::new(),
        }
    }

    fn space(&self, name: &str) -> Option<usize> {
        self.spaces.iter().position(|space| space.name == name)
    }
    fn datum(&self, name: &str) -> Option<usize> {
        self.data.iter().position(|data| data.name == name)
    }
    fn address(&self, name: &str) -> Option<usize> {
        self.addresses
            .iter()
            .position(|address| address.name == name)
    }
    fn table(&self, name: &str) -> Option<usize> {
        self.tables.iter().position(|table| table.name == name)
    }
    fn map(&self, space: usize, address: usize) -> Option<&Map> {
        let wanted = |map: &&Map| map.space == space && map.address == address;
        self.maps.iter().find(wanted)
    }
    fn is_taken(&self, name: &str) -> bool {
        self.space(name).is_some()
            || self.datum(name).is_some()
            || self.address(name).is_some()
            || self.table(name).is_some()
    }
}

type Parsed<T> = Result<T, String>;

/// Where in a test the reader is.
#[derive(Default)]
struct Reader {
    arch: bool,
    in_thread: bool,
}

impl Reader {
    fn statement(&mut self, test: &mut Test, word: &str, rest: &str, line: &str) -> Parsed<()> {
        let header = ["arch", "space", "data", "at", "map", "table", "init"];
        if header.contains(&word) && !(test.code.is_empty() && test.asks.is_empty()) {
            return Err(format!("'{word}' comes before the first thread"));
        }
        if test.spaces.is_empty() && !["source", "about", "arch", "space"].contains(&word) {
            test.spaces.push(Space {
                name: "main".to_owned(),
                id: 1,
            });
        }
        match word {
            "source" => test.source = one_line(rest),
            "about" => test.about = rest.chars().filter(|c| !c.is_control()).collect(),
            "arch" => self.arch(test, rest)?,
            "space" => space(test, rest)?,
            "data" => data(test, rest)?,
            "at" => at(test, rest)?,
            "map" => map(test, rest)?,
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
                limit(
                    thread.code.len(),
                    MOST_INSTRUCTIONS,
                    "instructions in a thread",
                )?;
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
        if test.guest && test.hardware_dirty {
            return Err("'dirty' is not for stage 2 here".to_owned());
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
    if there < most {
        Ok(())
    } else {
        Err(format!("more than {most} {what}"))
    }
}

// ---- Declarations ----

fn fresh(test: &Test, name: String) -> Parsed<String> {
    let reserved = [
        "pte", "pmd", "pud", "pgd", "leaf", "block", "invalid", "table", "fault", "ok", "addr",
        "data", "and", "or", "not", "valid", "accessed", "dirty", "page",
    ];
    if test.is_taken(&name) {
        Err(format!("'{name}' has a meaning already"))
    } else if reserved.contains(&name.as_str()) || register_number(&name).is_some() {
        Err(format!("'{name}' is reserved"))
    } else {
        Ok(name)
    }
}

fn space(test: &mut Test, rest: &str) -> Parsed<()> {
    let mut tokens = Tokens::of(rest)?;
    let name = fresh(test, tokens.name("a space needs a name")?)?;
    tokens.word("id")?;
    let id = tokens.number()?;
    tokens.end()?;
    limit(test.spaces.len(), 4, "spaces")?;
    let id =
        u16::try_from(id).map_err(|_| format!("an identifier has 16 bits, and {id} has more"))?;
    test.spaces.push(Space { name, id });
    Ok(())
}

fn data(test: &mut Test, rest: &str) -> Parsed<()> {
    let mut tokens = Tokens::of(rest)?;
    let name = fresh(test, tokens.name("data needs a name")?)?;
    tokens.symbol("=")?;
    let value = tokens.number()?;
    tokens.end()?;
    limit(test.data.len(), MOST_NAMES, "pages")?;
    test.data.push(Data { name, value });
    Ok(())
}

/// Addresses lie in regions of 2 MiB, one each, unless they are placed beside another.
fn add_address(test: &mut Test, name: String) -> Parsed<usize> {
    limit(test.addresses.len(), MOST_NAMES, "addresses")?;
    let name = fresh(test, name)?;
    let va = (16 + test.addresses.len() as u64) << 21;
    test.addresses.push(Address { name, va });
    Ok(test.addresses.len() - 1)
}

fn at(test: &mut Test, rest: &str) -> Parsed<()> {
    let mut tokens = Tokens::of(rest)?;
    let name = tokens.name("an address needs a name")?;
    tokens.symbol("=")?;
    let beside = tokens.address(test)?;
    tokens.symbol("+")?;
    let pages = tokens.number()?;
    tokens.end()?;
    if !(1..512).contains(&pages) {
        return Err("an address is 1 to 511 pages from another".to_owned());
    }
    let va = test.addresses[beside].va + (pages << 12);
    if test.addresses.iter().any(|other| other.va == va) {
        return Err("there is an address at this place already".to_owned());
    }
    if va >> 21 != test.addresses[beside].va >> 21 {
        return Err("it would lie in another table".to_owned());
    }
    let index = add_address(test, name)?;
    test.addresses[index].va = va;
    Ok(())
}

fn map(test: &mut Test, rest: &str) -> Parsed<()> {
    let mut tokens = Tokens::of(rest)?;
    let (space, name) = tokens.spaced(test)?;
    let address = match test.address(&name) {
        Some(address) => address,
        None => add_address(test, name.clone())?,
    };
    let value = value(&mut tokens, test)?;
    tokens.end()?;
    if test.map(space, address).is_some() {
        return Err(format!("'{name}' is mapped already"));
    }
    match value {
        Value::Register(_) | Value::Table(_) | Value::TableOf(_) => {
            Err("an address is mapped by leaf(), block(), invalid or a number".to_owned())
        }
        Value::Leaf { block: true, .. } if test.addresses[address].va & 0x1f_ffff != 0 => {
            Err(format!("'{name}' is not at the start of a block"))
        }
        value => {
            test.maps.push(Map {
                space,
                address,
                value,
            });
            Ok(())
        }
    }
}

fn table(test: &mut Test, rest: &str) -> Parsed<()> {
    let mut tokens = Tokens::of(rest)?;
    let name = fresh(test, tokens.name("a table needs a name")?)?;
    tokens.word("of")?;
    let level = tokens.name("a table is of pte, pmd or pud")?;
    tokens.end()?;
    let depth = match level.as_str() {
        "pte" => 0,
        "pmd" => 1,
        "pud" => 2,
        _ => return Err("a table is of pte, pmd or pud".to_owned()),
    };
    limit(test.tables.len(), 8, "tables")?;
    test.tables.push(Table { name, depth });
    Ok(())
}

fn init(test: &mut Test, rest: &str) -> Parsed<()> {
    let mut tokens = Tokens::of(rest)?;
    let location = tokens.location(test)?;
    tokens.symbol("=")?;
    let value = value(&mut tokens, test)?;
    tokens.end()?;
    if matches!(value, Value::Register(_)) {
        return Err("no register has a value yet".to_owned());
    }
    check_value(&location, &value)?;
    limit(test.inits.len(), 64, "initial values")?;
    test.inits.push((location, value));
    Ok(())
}

/// A leaf of pages is none where blocks are, nor the other way round.
fn check_value(location: &Location, value: &Value) -> Parsed<()> {
    let Location::Entry { depth, .. } = location else {
        return Ok(());
    };
    match value {
        Value::Leaf { block, .. } if *block != (*depth > 0) => {
            Err("leaf() is for pte(), and block() for pmd()".to_owned())
        }
        Value::Leaf { block: true, .. } if *depth > 1 => Err("block() is for pmd()".to_owned()),
        Value::Table(_) | Value::TableOf(_) if *depth == 0 => {
            Err("below pte() there is no table".to_owned())
        }
        _ => Ok(()),
    }
}

fn thread(test: &mut Test, rest: &str) -> Parsed<()> {
    if !test.asks.is_empty() {
        return Err("'thread' comes before 'ask'".to_owned());
    }
    limit(test.code.len(), MOST_THREADS, "threads")?;
    let mut thread = Thread {
        space: 0,
        user: false,
        code: Vec::new(),
    };
    let mut words = rest.split_whitespace();
    while let Some(word) = words.next() {
        match word {
            "user" => thread.user = true,
            "in" => {
                let name = words.next().unwrap_or_default();
                thread.space = test
                    .space(name)
                    .ok_or_else(|| format!("'{}' is no space", one_line(name)))?;
            }
            other => {
                return Err(format!(
                    "a thread is 'user' or 'in' a space, not '{}'",
                    one_line(other)
                ));
            }
        }
    }
    test.code.push(thread);
    Ok(())
}

fn verdict(test: &mut Test, word: &str, rest: &str) -> Parsed<()> {
    let verdict = match rest {
        "allowed" => Verdict::Allowed,
        "forbidden" => Verdict::Forbidden,
        "required" => Verdict::Required,
        _ => return Err("a verdict is allowed, forbidden or required".to_owned()),
    };
    let profiles = test.profiles();
    let Some(ask) = test.asks.last_mut() else {
        return Err(format!("'{word}' comes after an 'ask'"));
    };
    let named = match word {
        "base" => Some(Profile::Base),
        "ets2" => Some(Profile::Ets2),
        "x86" => Some(Profile::X86),
        _ => None,
    };
    for &profile in profiles {
        if named.is_none_or(|named| named == profile) {
            if ask.verdicts.iter().any(|(given, _)| *given == profile) {
                return Err(format!("there is a verdict for {profile} already"));
            }
            ask.verdicts.push((profile, verdict));
        }
    }
    if let Some(named) = named
        && !profiles.contains(&named)
    {
        return Err(format!(
            "the architecture of this test has no profile {named}"
        ));
    }
    Ok(())
}

// ---- Instructions ----

fn instruction(test: &Test, line: &str) -> Parsed<Instruction> {
    let mut tokens = Tokens::of(line)?;
    let mut word = tokens.name("an instruction starts with its name")?;
    let mut label = None;
    if tokens.accept(":") {
        if register_number(&word).is_some() {
            return Err(format!("'{word}' is a register, not a label"));
        }
        if labels(test).any(|other| other == word) {
            return Err(format!("there is a label '{word}' already"));
        }
        label = Some(word);
        word = tokens.name("an instruction starts with its name")?;
    }
    let name = word.to_ascii_uppercase();
    let op = if test.x86 {
        x86_instruction(&name, &mut tokens, test)?
    } else {
        arm_instruction(&name, &mut tokens, test)?
    };
    tokens.end()?;
    if let Some(register) = op.register()
        && written(test).any(|other| other == register)
    {
        return Err(format!(
            "r{register} is written twice, and would have two values in the end"
        ));
    }
    for register in used(&op) {
        if !written(test).any(|other| other == register) {
            return Err(format!("r{register} is used before it is written"));
        }
    }
    if let Op::Store { at, value, .. } | Op::Atomic { at, value, .. } = &op
        && let Place::Physical(location) = at
        && !matches!(
            op,
            Op::Atomic {
                change: Change::Set | Change::Clear | Change::Add,
                ..
            }
        )
    {
        check_value(location, value)?;
    }
    let text = line.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(Instruction {
        op,
        label,
        text: one_line(&text),
    })
}

fn current(test: &Test) -> &[Instruction] {
    test.code.last().map_or(&[], |thread| &thread.code)
}

fn labels(test: &Test) -> impl Iterator<Item = &str> {
    current(test).iter().filter_map(|i| i.label.as_deref())
}

fn written(test: &Test) -> impl Iterator<Item = usize> {
    current(test).iter().filter_map(|i| i.op.register())
}

/// The registers that an instruction needs.
fn used(op: &Op) -> Vec<usize> {
    let of = |value: &Value| match value {
        Value::Register(register) => Some(*register),
        _ => None,
    };
    let all = match op {
        Op::Load { address, .. } => vec![*address],
        Op::Store {
            value,
            address,
            data,
            ..
        } => vec![of(value), *address, *data],
        Op::Atomic {
            change,
            value,
            address,
            ..
        } => {
            let expected = match change {
                Change::CompareSwap(expected) => of(expected),
                _ => None,
            };
            vec![of(value), expected, *address]
        }
        Op::Branch(register) => vec![Some(*register)],
        _ => Vec::new(),
    };
    all.into_iter().flatten().collect()
}

fn arm_instruction(name: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Op> {
    match name {
        "LDR" | "LDAR" => load(tokens, test, name == "LDAR"),
        "STR" | "STLR" => {
            let stored = value(tokens, test)?;
            tokens.symbol(",")?;
            let at = tokens.place(test)?;
            let (address, data) = tokens.dependencies()?;
            Ok(Op::Store {
                value: stored,
                at,
                release: name == "STLR",
                address,
                data,
            })
        }
        "DMB" => Ok(Op::Fence(arm_kind(tokens)?.0)),
        "DSB" => {
            let (kind, shared) = arm_kind(tokens)?;
            Ok(Op::Barrier { kind, shared })
        }
        "ISB" | "ERET" => Ok(Op::Synchronise),
        "TLBI" => {
            let word = tokens.name("which TLBI?")?.to_ascii_uppercase();
            let (word, broadcast) = match word.strip_suffix("IS") {
                Some(word) => (word.to_owned(), true),
                None => (word, false),
            };
            let scope = arm_scope(&word, tokens, test)?;
            Ok(Op::Invalidate { scope, broadcast })
        }
        "SHOOTDOWN" => {
            let word = tokens.name("which TLBI?")?.to_ascii_uppercase();
            Ok(Op::Shootdown(arm_scope(&word, tokens, test)?))
        }
        "MSR" => {
            let register = tokens.name("which register?")?;
            let root = if test.guest { "VTTBR" } else { "TTBR0" };
            if !register.eq_ignore_ascii_case(root) {
                return Err(format!("MSR is for {root}"));
            }
            tokens.symbol(",")?;
            Ok(Op::Switch(tokens.space(test)?))
        }
        "CBZ" | "CBNZ" => Ok(Op::Branch(tokens.register()?)),
        _ => atomic(name, tokens, test),
    }
}

/// SWP, CAS, and LDSET and its kin with A, L or both.
fn atomic(name: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Op> {
    let unknown = || format!("'{}' is no instruction of arm64 here", one_line(name));
    let names = [
        "SWP", "CAS", "LDSET", "LDCLR", "LDADD", "STSET", "STCLR", "STADD",
    ];
    let base = names
        .into_iter()
        .find(|base| name.starts_with(base))
        .ok_or_else(unknown)?;
    let (acquire, release) = match &name[base.len()..] {
        "" => (false, false),
        "A" => (true, false),
        "L" => (false, true),
        "AL" => (true, true),
        _ => return Err(unknown()),
    };
    let mut register = None;
    if !base.starts_with("ST") {
        register = Some(tokens.register()?);
        tokens.symbol(",")?;
    } else if acquire {
        return Err(unknown());
    }
    let change = match &base[base.len() - 3..] {
        "SWP" => Change::Swap,
        "CAS" => {
            let expected = value(tokens, test)?;
            tokens.symbol(",")?;
            Change::CompareSwap(expected)
        }
        "SET" => Change::Set,
        "CLR" => Change::Clear,
        _ => Change::Add,
    };
    let operand = value(tokens, test)?;
    tokens.symbol(",")?;
    let at = tokens.place(test)?;
    let (address, data) = tokens.dependencies()?;
    if data.is_some() {
        return Err("data() is for a store; give the register as the value".to_owned());
    }
    Ok(Op::Atomic {
        change,
        register,
        value: operand,
        at,
        acquire,
        release,
        address,
    })
}

fn arm_kind(tokens: &mut Tokens<'_>) -> Parsed<(Kind, bool)> {
    let word = tokens.name("SY, ISH, NSH, LD, ST, ISHLD, ISHST, NSHLD or NSHST?")?;
    Ok(match word.to_ascii_uppercase().as_str() {
        "SY" | "ISH" | "OSH" => (Kind::All, true),
        "NSH" => (Kind::All, false),
        "LD" | "ISHLD" | "OSHLD" => (Kind::Loads, true),
        "NSHLD" => (Kind::Loads, false),
        "ST" | "ISHST" | "OSHST" => (Kind::Stores, true),
        "NSHST" => (Kind::Stores, false),
        _ => return Err(format!("'{word}' is no kind of barrier")),
    })
}

fn arm_scope(word: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Scope> {
    if test.guest {
        return guest_scope(word, tokens, test);
    }
    Ok(match word {
        "VMALLE1" => Scope::All,
        "ASIDE1" => {
            tokens.symbol(",")?;
            Scope::Space(tokens.space(test)?)
        }
        "VAE1" | "VALE1" | "VAAE1" | "VAALE1" => {
            tokens.symbol(",")?;
            let (space, address) = tokens.spaced_address(test)?;
            Scope::Address {
                address,
                space: (!word.contains("AA")).then_some(space),
                leaves_only: word.contains("LE1") && word != "VMALLE1",
            }
        }
        _ => return Err(format!("'TLBI {}' is not known here", one_line(word))),
    })
}

/// Under a guest: of the first space where none is named.
fn guest_scope(word: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Scope> {
    let space = |tokens: &mut Tokens<'_>| match tokens.accept(",") {
        true => tokens.space(test),
        false => Ok(0),
    };
    Ok(match word {
        "VMALLS12E1" => Scope::Space(space(tokens)?),
        "VMALLE1" => Scope::Combined {
            address: None,
            space: space(tokens)?,
        },
        "IPAS2E1" | "IPAS2LE1" | "VAE1" => {
            tokens.symbol(",")?;
            let (space, address) = tokens.spaced_address(test)?;
            match word {
                "VAE1" => Scope::Combined {
                    address: Some(address),
                    space,
                },
                _ => Scope::Second {
                    address,
                    space,
                    leaves_only: word == "IPAS2LE1",
                },
            }
        }
        _ => {
            return Err(format!(
                "'TLBI {}' is not known here: a guest has IPAS2E1, IPAS2LE1, VAE1, VMALLE1, VMALLS12E1",
                one_line(word)
            ));
        }
    })
}

fn x86_instruction(name: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Op> {
    match name {
        "MOV" if tokens.accept_word("CR3") => {
            tokens.symbol(",")?;
            Ok(Op::Switch(tokens.space(test)?))
        }
        "MOV" if tokens.peek_is("[") => {
            let at = tokens.place(test)?;
            tokens.symbol(",")?;
            let value = value(tokens, test)?;
            Ok(Op::Store {
                value,
                at,
                release: false,
                address: None,
                data: None,
            })
        }
        "MOV" => load(tokens, test, false),
        "MFENCE" => Ok(Op::Fence(Kind::All)),
        "INVLPG" => {
            let (space, address) = tokens.spaced_address(test)?;
            Ok(Op::InvalidateNow(Scope::Address {
                address,
                space: Some(space),
                leaves_only: false,
            }))
        }
        "SHOOTDOWN" => {
            let (space, address) = tokens.spaced_address(test)?;
            Ok(Op::Shootdown(Scope::Address {
                address,
                space: Some(space),
                leaves_only: false,
            }))
        }
        "IRET" | "CPUID" => Ok(Op::Synchronise),
        "XCHG" | "CMPXCHG" | "OR" | "AND" | "XADD" => {
            let register = Some(tokens.register()?);
            tokens.symbol(",")?;
            let change = match name {
                "XCHG" => Change::Swap,
                "CMPXCHG" => {
                    let expected = value(tokens, test)?;
                    tokens.symbol(",")?;
                    Change::CompareSwap(expected)
                }
                "OR" => Change::Set,
                "AND" => Change::Clear,
                _ => Change::Add,
            };
            let operand = value(tokens, test)?;
            tokens.symbol(",")?;
            let at = tokens.place(test)?;
            Ok(Op::Atomic {
                change,
                register,
                value: operand,
                at,
                acquire: true,
                release: true,
                address: None,
            })
        }
        _ => Err(format!(
            "'{}' is no instruction of x86-64 here",
            one_line(name)
        )),
    }
}

fn load(tokens: &mut Tokens<'_>, test: &Test, acquire: bool) -> Parsed<Op> {
    let register = tokens.register()?;
    tokens.symbol(",")?;
    let at = tokens.place(test)?;
    let (address, data) = tokens.dependencies()?;
    if data.is_some() {
        return Err("a load has no data to depend on".to_owned());
    }
    Ok(Op::Load {
        register,
        at,
        acquire,
        address,
    })
}

// ---- Values ----

fn value(tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Value> {
    if tokens.is_number() {
        return Ok(Value::Number(tokens.number()?));
    }
    let word = tokens.name("a value is missing")?;
    if let Some(register) = register_number(&word) {
        return Ok(Value::Register(register));
    }
    match word.as_str() {
        "invalid" if !tokens.peek_is("(") => Ok(Value::Number(0)),
        "invalid" | "leaf" | "block" => {
            tokens.symbol("(")?;
            let page = tokens.datum(test)?;
            let block = word == "block";
            let mut bits = attributes(tokens, test, block)?;
            if word == "invalid" {
                bits &= !VALID;
            }
            tokens.symbol(")")?;
            Ok(Value::Leaf { page, bits, block })
        }
        "table" => {
            tokens.symbol("(")?;
            let value = match tokens.peek_name().and_then(|name| test.table(name)) {
                Some(table) => {
                    tokens.skip();
                    Value::Table(table)
                }
                None => match tokens.location(test)? {
                    location @ Location::Entry { depth: 0..=2, .. } => Value::TableOf(location),
                    _ => return Err("table() is of a table, or of pte(), pmd() or pud()".to_owned()),
                },
            };
            tokens.symbol(")")?;
            Ok(value)
        }
        _ => bit(test, &word).map(Value::Number).ok_or_else(|| {
            format!("'{}' is no value: a number, a register, invalid, leaf(), block(), table() or a bit", one_line(&word))
        }),
    }
}

/// Bits of descriptors by name, for atomic instructions.
fn bit(test: &Test, name: &str) -> Option<u64> {
    Some(match (test.x86, name) {
        (_, "VALID") => VALID,
        (false, "AF") => ARM_ACCESSED,
        (false, "RO") => ARM_READ_ONLY,
        (false, "DBM") => ARM_DBM,
        (true, "RW") => X86_WRITE,
        (true, "ACCESSED") => X86_ACCESSED,
        (true, "DIRTY") => X86_DIRTY,
        _ => return None,
    })
}

/// What follows the page in `leaf(page, ro user old)`.
fn attributes(tokens: &mut Tokens<'_>, test: &Test, block: bool) -> Parsed<u64> {
    let (mut ro, mut user, mut global, mut old, mut dbm, mut clean) =
        (false, false, false, false, false, None);
    tokens.accept(",");
    while let Some(word) = tokens.accept_name() {
        match word.as_str() {
            "rw" => {}
            "ro" => ro = true,
            "user" => user = true,
            "global" => global = true,
            "old" => old = true,
            "dbm" if !test.x86 => dbm = true,
            "clean" => clean = Some(true),
            "dirty" => clean = Some(false),
            _ => {
                return Err(format!(
                    "'{}' is no attribute: rw, ro, user, global, old, clean, dirty, and on arm64 dbm",
                    one_line(&word)
                ));
            }
        }
        tokens.accept(",");
    }
    if clean.is_some() && (ro || !(test.x86 || dbm)) {
        return Err(
            "'clean' and 'dirty' are for what hardware may make dirty: dbm on arm64, rw on x86-64"
                .to_owned(),
        );
    }
    let on = |flag: bool, bit: u64| if flag { bit } else { 0 };
    if test.guest && (user || global || dbm) {
        return Err("a leaf of stage 2 is rw or ro, and may be old".to_owned());
    }
    Ok(if test.guest {
        VALID | STAGE2_LEAF | on(!block, 2) | on(!ro, STAGE2_WRITE) | on(!old, ARM_ACCESSED)
    } else if test.x86 {
        VALID
            | X86_NO_EXECUTE
            | on(!ro, X86_WRITE)
            | on(user, X86_USER)
            | on(global, X86_GLOBAL)
            | on(!old, X86_ACCESSED)
            | on(!ro && clean != Some(true), X86_DIRTY)
            | on(block, X86_SIZE)
    } else {
        // A leaf with DBM is clean unless it says otherwise.
        let read_only = ro || (dbm && clean != Some(false));
        VALID
            | ARM_LEAF
            | on(!block, 2)
            | on(read_only, ARM_READ_ONLY)
            | on(user, ARM_USER)
            | on(!global, ARM_NOT_GLOBAL)
            | on(!old, ARM_ACCESSED)
            | on(dbm, ARM_DBM)
    })
}

// ---- Outcomes ----

fn implication(tokens: &mut Tokens<'_>, test: &Test, depth: usize) -> Parsed<Outcome> {
    if depth > DEEPEST {
        return Err("too many parentheses".to_owned());
    }
    let left = disjunction(tokens, test, depth)?;
    if tokens.accept("=>") {
        let right = implication(tokens, test, depth + 1)?;
        return Ok(Outcome::Implies(Box::new(left), Box::new(right)));
    }
    Ok(left)
}

fn disjunction(tokens: &mut Tokens<'_>, test: &Test, depth: usize) -> Parsed<Outcome> {
    let mut left = conjunction(tokens, test, depth)?;
    while tokens.accept_word("or") {
        let right = conjunction(tokens, test, depth)?;
        left = Outcome::Or(Box::new(left), Box::new(right));
    }
    Ok(left)
}

fn conjunction(tokens: &mut Tokens<'_>, test: &Test, depth: usize) -> Parsed<Outcome> {
    let mut left = statement(tokens, test, depth)?;
    while tokens.accept_word("and") {
        let right = statement(tokens, test, depth)?;
        left = Outcome::And(Box::new(left), Box::new(right));
    }
    Ok(left)
}

fn statement(tokens: &mut Tokens<'_>, test: &Test, depth: usize) -> Parsed<Outcome> {
    if depth > DEEPEST {
        return Err("too many parentheses".to_owned());
    }
    if tokens.accept_word("not") {
        return Ok(Outcome::Not(Box::new(statement(tokens, test, depth + 1)?)));
    }
    if tokens.accept("(") {
        let inner = implication(tokens, test, depth + 1)?;
        tokens.symbol(")")?;
        return Ok(inner);
    }
    let flag = match tokens.peek_name() {
        Some("valid") => Some(Flag::Valid),
        Some("accessed") => Some(Flag::Accessed),
        Some("dirty") => Some(Flag::Dirty),
        _ => None,
    };
    if let Some(flag) = flag {
        tokens.skip();
        tokens.symbol("(")?;
        let term = tokens.term(test)?;
        tokens.symbol(")")?;
        return Ok(Outcome::Flag(flag, term));
    }
    if tokens.accept_word("page") {
        tokens.symbol("(")?;
        let term = tokens.term(test)?;
        tokens.symbol(")")?;
        tokens.symbol("=")?;
        return Ok(Outcome::LeadsTo(term, tokens.datum(test)?));
    }
    let term = tokens.term(test)?;
    let negated = tokens.accept("!=");
    if !negated {
        tokens.symbol("=")?;
    }
    let outcome = if tokens.accept_word("fault") {
        let (kind, depth) = fault(tokens)?;
        Outcome::Fault(term, kind, depth)
    } else if tokens.accept_word("ok") {
        Outcome::Completed(term)
    } else {
        match value(tokens, test)? {
            Value::Register(_) => {
                return Err("an outcome is compared with a value, not with a register".to_owned());
            }
            value => Outcome::Equal(term, value),
        }
    };
    Ok(if negated {
        Outcome::Not(Box::new(outcome))
    } else {
        outcome
    })
}

/// `fault`, `fault(permission)`, `fault(translation pmd)`.
fn fault(tokens: &mut Tokens<'_>) -> Parsed<(FaultKind, Option<u8>)> {
    let mut kind = FaultKind::Any;
    let mut depth = None;
    if tokens.accept("(") {
        while let Some(word) = tokens.accept_name() {
            match word.as_str() {
                "translation" => kind = FaultKind::Translation,
                "access" => kind = FaultKind::AccessFlag,
                "permission" => kind = FaultKind::Permission,
                "pte" => depth = Some(0),
                "pmd" => depth = Some(1),
                "pud" => depth = Some(2),
                "pgd" => depth = Some(3),
                _ => {
                    return Err(format!(
                        "'{}' is no fault: translation, access, permission; pte, pmd, pud, pgd",
                        one_line(&word)
                    ));
                }
            }
        }
        tokens.symbol(")")?;
    }
    Ok((kind, depth))
}

// ---- Tokens ----

fn register_number(word: &str) -> Option<usize> {
    let number: usize = word.strip_prefix('r')?.parse().ok()?;
    (number < MOST_REGISTERS).then_some(number)
}

/// The words and signs of a line, and how far it has been read.
struct Tokens<'l> {
    tokens: Vec<&'l str>,
    next: usize,
}

impl<'l> Tokens<'l> {
    fn of(line: &'l str) -> Parsed<Self> {
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
                return Err(format!(
                    "'{}' has no meaning here",
                    one_line(&first.to_string())
                ));
            };
            let (token, after) = rest.split_at(length);
            tokens.push(token);
            rest = after.trim_start();
        }
        Ok(Self { tokens, next: 0 })
    }

    fn peek(&self) -> Option<&'l str> {
        self.tokens.get(self.next).copied()
    }
    fn peek_is(&self, token: &str) -> bool {
        self.peek() == Some(token)
    }
    fn peek_name(&self) -> Option<&'l str> {
        self.peek()
            .filter(|t| t.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_'))
    }
    fn is_number(&self) -> bool {
        self.peek()
            .is_some_and(|t| t.starts_with(|c: char| c.is_ascii_digit()))
    }
    fn skip(&mut self) {
        self.next += 1;
    }
    fn accept(&mut self, token: &str) -> bool {
        let there = self.peek_is(token);
        self.next += usize::from(there);
        there
    }
    fn accept_word(&mut self, word: &str) -> bool {
        let there = self.peek().is_some_and(|t| t.eq_ignore_ascii_case(word));
        self.next += usize::from(there);
        there
    }
    fn accept_name(&mut self) -> Option<String> {
        let name = self.peek_name()?;
        self.skip();
        Some(name.to_owned())
    }
    fn found(&self) -> String {
        self.peek().map_or("the line ends".to_owned(), |t| {
            format!("'{}' stands there", one_line(t))
        })
    }
    fn symbol(&mut self, symbol: &str) -> Parsed<()> {
        if self.accept(symbol) {
            Ok(())
        } else {
            Err(format!("'{symbol}' is expected, and {}", self.found()))
        }
    }
    fn word(&mut self, word: &str) -> Parsed<()> {
        self.symbol(word)
    }
    fn name(&mut self, what: &str) -> Parsed<String> {
        self.accept_name()
            .ok_or_else(|| format!("{what} ({})", self.found()))
    }
    fn number(&mut self) -> Parsed<u64> {
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
    fn end(&self) -> Parsed<()> {
        match self.peek() {
            None => Ok(()),
            Some(token) => Err(format!("'{}' is too much", one_line(token))),
        }
    }

    fn register(&mut self) -> Parsed<usize> {
        let found = self.found();
        let register = self.peek_name().and_then(register_number);
        self.skip();
        register.ok_or_else(|| {
            format!(
                "a register, r0 to r{}, is expected, and {found}",
                MOST_REGISTERS - 1
            )
        })
    }
    fn datum(&mut self, test: &Test) -> Parsed<usize> {
        let name = self.name("the name of a page is missing")?;
        test.datum(&name)
            .ok_or_else(|| format!("'{}' is no page: declare it with 'data'", one_line(&name)))
    }
    fn space(&mut self, test: &Test) -> Parsed<usize> {
        let name = self.name("the name of a space is missing")?;
        test.space(&name)
            .ok_or_else(|| format!("'{}' is no space", one_line(&name)))
    }
    fn address(&mut self, test: &Test) -> Parsed<usize> {
        let name = self.name("the name of an address is missing")?;
        test.address(&name)
            .ok_or_else(|| format!("'{}' is no address", one_line(&name)))
    }
    /// `name` or `space:name`.
    fn spaced(&mut self, test: &Test) -> Parsed<(usize, String)> {
        let name = self.name("the name of an address is missing")?;
        if !self.accept(":") {
            return Ok((0, name));
        }
        let space = test
            .space(&name)
            .ok_or_else(|| format!("'{}' is no space", one_line(&name)))?;
        Ok((space, self.name("the name of an address is missing")?))
    }
    fn spaced_address(&mut self, test: &Test) -> Parsed<(usize, usize)> {
        let (space, name) = self.spaced(test)?;
        let address = test
            .address(&name)
            .ok_or_else(|| format!("'{}' is no address", one_line(&name)))?;
        Ok((space, address))
    }
    /// A word of physical memory: `name`, `pte(x)`, `table[x]`.
    fn location(&mut self, test: &Test) -> Parsed<Location> {
        let name = self.name("a location is missing")?;
        let depth = match name.as_str() {
            "pte" => 0,
            "pmd" => 1,
            "pud" => 2,
            "pgd" => 3,
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
        Ok(Location::Entry {
            space,
            address,
            depth,
        })
    }
    /// `[x]`, `[flag]`, `[pte(x)]`.
    fn place(&mut self, test: &Test) -> Parsed<Place> {
        self.symbol("[")?;
        let place = match self.peek_name().and_then(|name| test.address(name)) {
            Some(address) => {
                self.skip();
                Place::Virtual(address)
            }
            None => Place::Physical(self.location(test)?),
        };
        self.symbol("]")?;
        Ok(place)
    }
    /// `addr(r0)` and `data(r0)`.
    fn dependencies(&mut self) -> Parsed<(Option<usize>, Option<usize>)> {
        let (mut address, mut data) = (None, None);
        loop {
            let slot = if self.accept_word("addr") {
                &mut address
            } else if self.accept_word("data") {
                &mut data
            } else {
                return Ok((address, data));
            };
            self.symbol("(")?;
            *slot = Some(self.register()?);
            self.symbol(")")?;
        }
    }
    /// `0:r1`, `0:label`, `[pte(x)]`.
    fn term(&mut self, test: &Test) -> Parsed<Term> {
        if self.accept("[") {
            let location = self.location(test)?;
            self.symbol("]")?;
            return Ok(Term::Memory(location));
        }
        let number = self.number()?;
        let thread = usize::try_from(number)
            .ok()
            .filter(|&thread| thread < test.code.len());
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
