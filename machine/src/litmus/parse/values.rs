//! Values that can be stored.

use super::super::program::*;
use super::tokens::{Tokens, register_number};
use super::{Parsed, one_line};

pub(super) fn value(tokens: &mut Tokens<'_>, test: &Test) -> Parsed<Value> {
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
            if let Some(address) = tokens.peek_name().and_then(|name| test.address(name))
                && test.guest
                && word != "block"
            {
                tokens.skip();
                let mut bits = attributes(tokens, test, false, false)?;
                if bits & CONTIGUOUS != 0 {
                    return Err("a contiguous run of a guest is one of stage 2".to_owned());
                }
                if word == "invalid" {
                    bits &= !VALID;
                }
                tokens.symbol(")")?;
                return Ok(Value::Intermediate { address, bits });
            }
            let page = tokens.datum(test)?;
            let block = word == "block";
            let mut bits = attributes(tokens, test, block, test.guest)?;
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
                    _ => {
                        return Err("table() is of a table, or of pte(), pmd() or pud()".to_owned());
                    }
                },
            };
            tokens.symbol(")")?;
            Ok(value)
        }
        _ => bit(test, &word).map(Value::Number).ok_or_else(|| {
            format!(
                "'{}' is no value: a number, a register, invalid, leaf(), block(), table() or \
                     a bit",
                one_line(&word)
            )
        }),
    }
}

/// Bits of descriptors by name, for atomic instructions.
pub(super) fn bit(test: &Test, name: &str) -> Option<u64> {
    Some(match (test.x86, name) {
        (_, "VALID") => VALID,
        (false, "AF") => ARM_ACCESSED,
        (false, "RO") if !test.guest || test.is_nested() => ARM_READ_ONLY,
        (false, "WRITE") if test.guest => STAGE2_WRITE,
        (false, "DBM") => ARM_DBM,
        (true, "RW") => X86_WRITE,
        (true, "ACCESSED") => X86_ACCESSED,
        (true, "DIRTY") => X86_DIRTY,
        _ => return None,
    })
}

/// Reads the attributes behind the page in `leaf(page, ro user old)`.
pub(super) fn attributes(
    tokens: &mut Tokens<'_>,
    test: &Test,
    block: bool,
    second: bool,
) -> Parsed<u64> {
    let (mut ro, mut user, mut global, mut old, mut dbm, mut clean) =
        (false, false, false, false, false, None);
    let mut contiguous = false;
    tokens.accept(",");
    while let Some(word) = tokens.accept_name() {
        match word.as_str() {
            "rw" => {}
            "ro" => ro = true,
            "user" => user = true,
            "global" => global = true,
            "old" => old = true,
            "dbm" if !test.x86 => dbm = true,
            "contiguous" if !test.x86 => contiguous = true,
            "clean" => clean = Some(true),
            "dirty" => clean = Some(false),
            _ => {
                return Err(format!(
                    "'{}' is no attribute: rw, ro, user, global, old, clean, dirty, and on arm64 \
                     dbm, contiguous",
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
    if contiguous && block {
        return Err("a contiguous run is of pages".to_owned());
    }
    let on = |flag: bool, bit: u64| if flag { bit } else { 0 };
    if second && (user || global) {
        return Err("a leaf of stage 2 is rw, ro or dbm, and may be old".to_owned());
    }
    // A leaf with DBM is clean unless it says otherwise.
    let read_only = ro || (dbm && clean != Some(false));
    Ok(if second {
        VALID
            | STAGE2_LEAF
            | on(!block, 2)
            | on(!read_only, STAGE2_WRITE)
            | on(!old, ARM_ACCESSED)
            | on(dbm, ARM_DBM)
            | on(contiguous, CONTIGUOUS)
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
        VALID
            | ARM_LEAF
            | on(!block, 2)
            | on(read_only, ARM_READ_ONLY)
            | on(user, ARM_USER)
            | on(!global, ARM_NOT_GLOBAL)
            | on(!old, ARM_ACCESSED)
            | on(dbm, ARM_DBM)
            | on(contiguous, CONTIGUOUS)
    })
}
