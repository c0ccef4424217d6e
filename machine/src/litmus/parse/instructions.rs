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
        check_value(test, location, value)?;
    }
    let text = line.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(Instruction {
        op,
        user,
        label,
        text: one_line(&text),
    })
}

/// Whether an instruction is one of an application, or the one that leaves it; one that cannot be is refused.
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
        return Err(format!(
            "'{name}' is not for an application, which comes to EL1 by 'SVC'"
        ));
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

pub(super) fn arm_instruction(name: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Op> {
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
        "ISB" => Ok(Op::Synchronise),
        "SVC" => Ok(Op::Exception { enters: true }),
        "ERET" => Ok(Op::Exception { enters: false }),
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
pub(super) fn atomic(name: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Op> {
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

pub(super) fn arm_kind(tokens: &mut Tokens<'_>) -> Parsed<(Kind, bool)> {
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
pub(super) fn guest_scope(word: &str, tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Scope> {
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

pub(super) fn load(tokens: &mut Tokens<'_>, test: &Test, acquire: bool) -> Parsed<Op> {
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
