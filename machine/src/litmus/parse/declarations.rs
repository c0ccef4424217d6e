//! Declarations of a test, before its threads.

use super::super::program::*;
use super::tokens::{Tokens, register_number};
use super::values::value;
use super::{MOST_NAMES, MOST_THREADS, Parsed, limit, one_line};

pub(super) fn fresh(test: &Test, name: String) -> Parsed<String> {
    let reserved = [
        "stage1", "pte", "pmd", "pud", "pgd", "leaf", "block", "invalid", "table", "fault", "ok",
        "addr", "data", "and", "or", "not", "valid", "accessed", "dirty", "page", "run",
    ];
    if test.is_taken(&name) {
        Err(format!("'{name}' has a meaning already"))
    } else if reserved.contains(&name.as_str()) || register_number(&name).is_some() {
        Err(format!("'{name}' is reserved"))
    } else {
        Ok(name)
    }
}

pub(super) fn space(test: &mut Test, rest: &str) -> Parsed<()> {
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

pub(super) fn data(test: &mut Test, rest: &str) -> Parsed<()> {
    let mut tokens = Tokens::of(rest)?;
    let name = fresh(test, tokens.name("data needs a name")?)?;
    tokens.symbol("=")?;
    let value = tokens.number()?;
    let behind = match tokens.accept("at") {
        true => Some(behind(&mut tokens, test)?),
        false => None,
    };
    tokens.end()?;
    limit(test.data.len(), MOST_NAMES, "pages")?;
    test.data.push(Data { name, value, behind });
    Ok(())
}

/// `a + 3`: a place among the pages of a run.
fn behind(tokens: &mut Tokens<'_>, test: &Test) -> Parsed<(usize, u64)> {
    let first = tokens.datum(test)?;
    tokens.symbol("+")?;
    let pages = tokens.number()?;
    if test.data[first].behind.is_some() {
        return Err(format!("'{}' is behind another page", test.data[first].name));
    }
    if !(1..RUN).contains(&pages) {
        return Err(format!("a page is 1 to {} pages behind another", RUN - 1));
    }
    let place = Some((first, pages));
    if test.data.iter().any(|data| data.behind == place) {
        return Err("there is a page at this place already".to_owned());
    }
    Ok((first, pages))
}

/// Addresses lie in regions of 2 MiB, one each, unless they are placed beside another.
pub(super) fn add_address(test: &mut Test, name: String) -> Parsed<usize> {
    limit(test.addresses.len(), MOST_NAMES, "addresses")?;
    let name = fresh(test, name)?;
    let va = (16 + test.addresses.len() as u64) << 21;
    test.addresses.push(Address { name, va });
    Ok(test.addresses.len() - 1)
}

pub(super) fn at(test: &mut Test, rest: &str) -> Parsed<()> {
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
    // A run around it maps it.
    for map in test.maps.clone() {
        let first = test.addresses[map.address].va;
        if let Some(value) = member(&map.value, first, va) {
            test.maps.push(Map { address: index, value, ..map });
        }
    }
    Ok(())
}

/// Returns the translation that the run which `value` begins, at the address `first`, has of
/// another address.
fn member(value: &Value, first: u64, va: u64) -> Option<Value> {
    match *value {
        Value::Leaf { page, bits, .. }
            if value.is_contiguous() && first & !IN_RUN == va & !IN_RUN =>
        {
            Some(Value::Member { page, behind: (va & IN_RUN) >> 12, bits })
        }
        _ => None,
    }
}

pub(super) fn map(test: &mut Test, rest: &str) -> Parsed<()> {
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
        Value::Register(_)
        | Value::Of(..)
        | Value::Choose(_)
        | Value::Faulted(_)
        | Value::Table(_)
        | Value::TableOf(_)
        | Value::Member { .. }
        | Value::Intermediate { .. } => {
            Err("an address is mapped by leaf(), block(), invalid or a number".to_owned())
        }
        Value::Leaf { block: true, .. } if test.addresses[address].va & 0x1f_ffff != 0 => {
            Err(format!("'{name}' is not at the start of a block"))
        }
        value => {
            let first = test.addresses[address].va;
            if value.is_contiguous() {
                if first & IN_RUN != 0 {
                    return Err(format!("'{name}' is not at the start of a run"));
                }
                check_run(test, first, &value)?;
                for other in (0..test.addresses.len()).filter(|&other| other != address) {
                    let Some(member) = member(&value, first, test.addresses[other].va) else {
                        continue;
                    };
                    if test.map(space, other).is_some() {
                        let name = &test.addresses[other].name;
                        return Err(format!("'{name}' is in the run, and mapped already"));
                    }
                    test.maps.push(Map { space, address: other, value: member });
                }
            }
            test.maps.push(Map { space, address, value });
            Ok(())
        }
    }
}

/// Reads the guests' stage-1 translation of an address: another, which stage 2 translates.
pub(super) fn stage1(test: &mut Test, rest: &str) -> Parsed<()> {
    if !test.guest {
        return Err("'stage1' is that of a guest: 'arch arm64 guest'".to_owned());
    }
    if test.hardware_access {
        return Err("'af' and 'dirty' are not for guests with a stage 1 here".to_owned());
    }
    let mut tokens = Tokens::of(rest)?;
    let name = tokens.name("an address needs a name")?;
    let address = match test.address(&name) {
        Some(address) => address,
        None => add_address(test, name.clone())?,
    };
    let value = value(&mut tokens, test)?;
    tokens.end()?;
    if test.has_first(address) {
        return Err(format!("'{name}' has a stage 1 already"));
    }
    match value {
        Value::Intermediate { .. } | Value::Number(_) => {
            test.stage1.push((address, value));
            Ok(())
        }
        _ => {
            Err("stage 1 leads to an address of stage 2: leaf() of it, invalid or a number"
                .to_owned())
        }
    }
}

pub(super) fn table(test: &mut Test, rest: &str) -> Parsed<()> {
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

pub(super) fn init(test: &mut Test, rest: &str) -> Parsed<()> {
    let mut tokens = Tokens::of(rest)?;
    let location = tokens.location(test)?;
    tokens.symbol("=")?;
    let value = value(&mut tokens, test)?;
    tokens.end()?;
    if matches!(value, Value::Register(_)) {
        return Err("no register has a value yet".to_owned());
    }
    check_value(test, &location, &value)?;
    limit(test.inits.len(), 64, "initial values")?;
    test.inits.push((location, value));
    Ok(())
}

/// Memory of a run is as aligned as its addresses are: what its entries lead to differs from run to
/// run only.
fn check_run(test: &Test, va: u64, value: &Value) -> Parsed<()> {
    match *value {
        Value::Leaf { page, .. } if value.is_contiguous() => {
            let behind = test.data[page].behind.map_or(0, |(_, pages)| pages);
            if behind != (va & IN_RUN) >> 12 {
                let name = &test.data[page].name;
                return Err(format!("'{name}' is not the page for this place in a run"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A leaf of pages is none where blocks are, nor the other way round.
pub(super) fn check_value(test: &Test, location: &Location, value: &Value) -> Parsed<()> {
    if let Location::Entry { address, .. } | Location::Slot { address, .. } = location {
        check_run(test, test.addresses[*address].va, value)?;
    }
    match (location, value) {
        (
            Location::First(_),
            Value::Intermediate { .. } | Value::Number(_) | Value::Register(_),
        ) => {}
        (Location::First(_), _) => {
            return Err("stage1() holds the leaf() of an address of stage 2".to_owned());
        }
        (Location::Entry { .. } | Location::Slot { .. }, Value::Intermediate { .. }) => {
            return Err("an entry of stage 2 leads to a page, not to an address".to_owned());
        }
        _ => {}
    }
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

pub(super) fn thread(test: &mut Test, rest: &str) -> Parsed<()> {
    if !test.asks.is_empty() {
        return Err("'thread' comes before 'ask'".to_owned());
    }
    limit(test.code.len(), MOST_THREADS, "threads")?;
    let mut thread = Thread { space: 0, user: false, leaves: (false, false), code: Vec::new() };
    let mut words = rest.split_whitespace();
    while let Some(word) = words.next() {
        match word {
            "user" => thread.user = true,
            "in" => {
                let name = words.next().unwrap_or_default();
                thread.space =
                    test.space(name).ok_or_else(|| format!("'{}' is no space", one_line(name)))?;
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

pub(super) fn verdict(test: &mut Test, word: &str, rest: &str) -> Parsed<()> {
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
        return Err(format!("the architecture of this test has no profile {named}"));
    }
    Ok(())
}
