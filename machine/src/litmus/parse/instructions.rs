//! Instructions of both architectures.

use super::super::program::*;
use super::declarations::check_value;
use super::tokens::{Tokens, register_number};
use super::values::value;
use super::{Parsed, one_line};

pub(super) fn instruction(test: &Test, line: &str) -> Parsed<Instruction> {
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
    let user = has_rights_of_user(test, &name, &op)?;
    if let Some(register) = op.register()
        && written(test).any(|other| other == register)
    {
        return Err(format!("r{register} is written twice, and would have two values in the end"));
    }
    for register in used(&op) {
        if !written(test).any(|other| other == register) {
            return Err(format!("r{register} is used before it is written"));
        }
    }
    if let Op::Store { at, value, .. } | Op::Atomic { at, value, .. } = &op
        && let Place::Physical(location) = at
        && !matches!(op, Op::Atomic { change: Change::Set | Change::Clear | Change::Add, .. })
    {
        check_value(test, location, value)?;
    }
    let text = line.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(Instruction { op, user, label, text: one_line(&text), when: None })
}

/// Whether an instruction is one of an application, or the one that leaves it; one that cannot be
/// is refused.
fn has_rights_of_user(test: &Test, name: &str, op: &Op) -> Parsed<bool> {
    let Some(thread) = test.code.last() else {
        return Ok(false);
    };
    let entered = |i: &Instruction| match i.op {
        Op::Exception { enters } => Some(enters),
        _ => None,
    };
    let handles = thread.code.iter().rev().find_map(entered) == Some(true);
    if handles && matches!(op, Op::Exception { enters: true }) {
        return Err("a handler has no handler of its own: 'ERET' comes first".to_owned());
    }
    let user = thread.user && !handles;
    let privileged = match op {
        Op::Exception { enters } => !enters,
        Op::Invalidate { .. } | Op::Shootdown(_) | Op::Switch(_) => true,
        _ => false,
    };
    if user && privileged && !test.x86 {
        return Err(format!("'{name}' is not for an application, which comes to EL1 by 'SVC'"));
    }
    Ok(user)
}

pub(super) fn current(test: &Test) -> &[Instruction] {
    test.code.last().map_or(&[], |thread| &thread.code)
}

pub(super) fn labels(test: &Test) -> impl Iterator<Item = &str> {
    current(test).iter().filter_map(|i| i.label.as_deref())
}

pub(super) fn written(test: &Test) -> impl Iterator<Item = usize> {
    current(test).iter().filter_map(|i| i.op.register())
}

/// The registers that an instruction needs.
pub(super) fn used(op: &Op) -> Vec<usize> {
    let of = |value: &Value| match value {
        Value::Register(register) => Some(*register),
        _ => None,
    };
    let mut all = match op {
        Op::Store { value, data, .. } => vec![of(value), *data],
        Op::Atomic { change, value, .. } => {
            let expected = match change {
                Change::CompareSwap(expected) => of(expected),
                _ => None,
            };
            vec![of(value), expected]
        }
        Op::Branch(register) => vec![Some(*register)],
        _ => Vec::new(),
    };
    all.extend(op.address().iter().map(of));
    all.into_iter().flatten().collect()
}

pub(super) fn arm_instruction(name: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Op> {
    match name {
        "LDR" | "LDAR" => load(tokens, test, name == "LDAR"),
        "STR" | "STLR" => {
            let stored = value(tokens, test)?;
            tokens.symbol(",")?;
            let at = tokens.place(test)?;
            let (address, data) = tokens.dependencies()?;
            Ok(Op::Store { value: stored, at, release: name == "STLR", address, data })
        }
        "DMB" => Ok(Op::Fence(arm_kind(tokens)?.0)),
        "DSB" => {
            let (kind, shared) = arm_kind(tokens)?;
            Ok(Op::Barrier { kind, shared })
        }
        "ISB" => Ok(Op::Synchronise),
        "SVC" => Ok(Op::Exception { enters: true }),
        "ERET" => Ok(Op::Exception { enters: false }),
        "TLBI" => {
            let word = tokens.name("which TLBI?")?.to_ascii_uppercase();
            // No memory here has the XS attribute, so that with nXS it completes as without.
            let plain = word.strip_suffix("NXS").unwrap_or(&word);
            // All CPUs are in one inner shareable domain.
            let shared = plain.strip_suffix("IS").or_else(|| plain.strip_suffix("OS"));
            let scope = arm_scope(shared.unwrap_or(plain), tokens, test)?;
            let broadcast = shared.is_some();
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

/// Reads the name of an atomic instruction: without its suffix, and whether that acquires and
/// releases.
pub(in super::super) fn atomic_name(name: &str) -> Option<(&'static str, bool, bool)> {
    let names = ["SWP", "CAS", "LDSET", "LDCLR", "LDADD", "STSET", "STCLR", "STADD"];
    let base = names.into_iter().find(|base| name.starts_with(base))?;
    let (acquire, release) = match &name[base.len()..] {
        "" => (false, false),
        "A" => (true, false),
        "L" => (false, true),
        "AL" => (true, true),
        _ => return None,
    };
    // What returns nothing acquires nothing.
    (!(acquire && base.starts_with("ST"))).then_some((base, acquire, release))
}

/// Returns the change that an atomic instruction makes, given what CAS expects.
pub(in super::super) fn atomic_change(base: &str, expected: Value) -> Change {
    match &base[base.len() - 3..] {
        "SWP" => Change::Swap,
        "CAS" => Change::CompareSwap(expected),
        "SET" => Change::Set,
        "CLR" => Change::Clear,
        _ => Change::Add,
    }
}

/// SWP, CAS, and LDSET and its kin with A, L or both.
pub(super) fn atomic(name: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Op> {
    let unknown = || format!("'{}' is no instruction of arm64 here", one_line(name));
    let (base, acquire, release) = atomic_name(name).ok_or_else(unknown)?;
    let mut register = None;
    if !base.starts_with("ST") {
        register = Some(tokens.register()?);
        tokens.symbol(",")?;
    }
    let mut expected = Value::Number(0);
    if base == "CAS" {
        expected = value(tokens, test)?;
        tokens.symbol(",")?;
    }
    let change = atomic_change(base, expected);
    let operand = value(tokens, test)?;
    tokens.symbol(",")?;
    let at = tokens.place(test)?;
    let (address, data) = tokens.dependencies()?;
    if data.is_some() {
        return Err("data() is for a store; give the register as the value".to_owned());
    }
    Ok(Op::Atomic { change, register, value: operand, at, acquire, release, address })
}

/// Which accesses a barrier of this kind is about, and whether it is for the other CPUs too.
pub(in super::super) fn barrier_kind(kind: &str) -> Option<(Kind, bool)> {
    Some(match kind {
        "SY" | "ISH" | "OSH" => (Kind::All, true),
        "NSH" => (Kind::All, false),
        "LD" | "ISHLD" | "OSHLD" => (Kind::Loads, true),
        "NSHLD" => (Kind::Loads, false),
        "ST" | "ISHST" | "OSHST" => (Kind::Stores, true),
        "NSHST" => (Kind::Stores, false),
        _ => return None,
    })
}

pub(super) fn arm_kind(tokens: &mut Tokens<'_>) -> Parsed<(Kind, bool)> {
    let word = tokens.name("SY, ISH, NSH, LD, ST, ISHLD, ISHST, NSHLD or NSHST?")?;
    let kind = word.to_ascii_uppercase();
    barrier_kind(&kind).ok_or_else(|| match kind.ends_with("NXS") {
        true => "a DSB with nXS need not complete a TLBI without; 'DSB SY' does".to_owned(),
        false => format!("'{word}' is no kind of barrier"),
    })
}

pub(super) fn arm_scope(word: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Scope> {
    if test.guest {
        return guest_scope(word, tokens, test);
    }
    Ok(match word {
        "VMALLE1" => Scope::All,
        "ASIDE1" => {
            tokens.symbol(",")?;
            Scope::Space(tokens.space(test)?)
        }
        _ if is_by_address(word) => {
            let (space, at) = named(word, tokens, test)?;
            Scope::Address { at, space: (!word.contains("AA")).then_some(space) }
        }
        _ => return Err(format!("'TLBI {}' is not known here", one_line(word))),
    })
}

/// Whether a TLBI is by virtual address.
fn is_by_address(word: &str) -> bool {
    let one = word.strip_prefix('R').unwrap_or(word);
    ["VAE1", "VALE1", "VAAE1", "VAALE1"].contains(&one)
}

/// `x`, `A:x`; of a range `x, 16`, the number of pages; and `level 3`, a hint.
fn named(word: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<(usize, Named)> {
    tokens.symbol(",")?;
    let (space, address) = tokens.spaced_address(test)?;
    let mut at = Named { leaves_only: word.ends_with("LE1"), ..Named::one(address) };
    if word.starts_with('R') {
        tokens.symbol(",")?;
        at.pages = tokens.number()?;
        // With NUM from 0 to 31 and SCALE 0 or 1 (DDI 0487 C5.5, TLBI RVAE1).
        let fits = match at.pages {
            2..=64 => at.pages.is_multiple_of(2),
            65..=512 => at.pages.is_multiple_of(64),
            _ => false,
        };
        if !fits {
            let what =
                "a range is of 2 to 64 pages, an even number, or of a multiple of 64 up to 512";
            return Err(what.to_owned());
        }
    }
    if tokens.accept(",") {
        tokens.word("level")?;
        let level = tokens.number()?;
        let depth = (1..=3).contains(&level).then(|| (3 - level) as u8);
        at.depth = Some(depth.ok_or("a hint is of level 1, 2 or 3")?);
    }
    Ok((space, at))
}

/// Under a guest: of the first space where none is named.
pub(super) fn guest_scope(word: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Scope> {
    let space = |tokens: &mut Tokens<'_>| match tokens.accept(",") {
        true => tokens.space(test),
        false => Ok(0),
    };
    Ok(match word {
        "ALLE1" => Scope::All,
        "VMALLS12E1" => Scope::Space(space(tokens)?),
        // A guest's stage 1 is under one identifier.
        "VMALLE1" | "ASIDE1" => Scope::Combined { at: None, space: space(tokens)? },
        "IPAS2E1" | "IPAS2LE1" | "RIPAS2E1" | "RIPAS2LE1" => {
            let (space, at) = named(word, tokens, test)?;
            Scope::Second { at, space }
        }
        _ if is_by_address(word) => {
            let (space, at) = named(word, tokens, test)?;
            let at = Some(at);
            Scope::Combined { at, space }
        }
        _ => {
            return Err(format!(
                "'TLBI {}' is not known here: a guest has IPAS2E1, IPAS2LE1, VAE1 and its like, \
                 VMALLE1, ASIDE1, VMALLS12E1, ALLE1",
                one_line(word)
            ));
        }
    })
}

pub(super) fn x86_instruction(name: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Op> {
    match name {
        "MOV" if tokens.accept_word("CR3") => {
            tokens.symbol(",")?;
            Ok(Op::Switch(tokens.space(test)?))
        }
        "MOV" if tokens.peek_is("[") => {
            let at = tokens.place(test)?;
            tokens.symbol(",")?;
            let value = value(tokens, test)?;
            Ok(Op::Store { value, at, release: false, address: Vec::new(), data: None })
        }
        "MOV" => load(tokens, test, false),
        "MFENCE" => Ok(Op::Fence(Kind::All)),
        "INVLPG" => {
            let (space, address) = tokens.spaced_address(test)?;
            Ok(Op::InvalidateNow(Scope::Address { at: Named::one(address), space: Some(space) }))
        }
        "SHOOTDOWN" => {
            let (space, address) = tokens.spaced_address(test)?;
            Ok(Op::Shootdown(Scope::Address { at: Named::one(address), space: Some(space) }))
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
                address: Vec::new(),
            })
        }
        _ => Err(format!("'{}' is no instruction of x86-64 here", one_line(name))),
    }
}

pub(super) fn load(tokens: &mut Tokens<'_>, test: &Test, acquire: bool) -> Parsed<Op> {
    let register = tokens.register()?;
    tokens.symbol(",")?;
    let at = tokens.place(test)?;
    let (address, data) = tokens.dependencies()?;
    if data.is_some() {
        return Err("a load has no data to depend on".to_owned());
    }
    Ok(Op::Load { register, at, acquire, address })
}
