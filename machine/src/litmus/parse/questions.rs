//! Questions.

use super::super::program::*;
use super::tokens::Tokens;
use super::values::value;
use super::{DEEPEST, Parsed, one_line};

pub(super) fn implication(tokens: &mut Tokens<'_>, test: &Test, depth: usize) -> Parsed<Outcome> {
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

pub(super) fn disjunction(tokens: &mut Tokens<'_>, test: &Test, depth: usize) -> Parsed<Outcome> {
    let mut left = conjunction(tokens, test, depth)?;
    while tokens.accept_word("or") {
        let right = conjunction(tokens, test, depth)?;
        left = Outcome::Or(Box::new(left), Box::new(right));
    }
    Ok(left)
}

pub(super) fn conjunction(tokens: &mut Tokens<'_>, test: &Test, depth: usize) -> Parsed<Outcome> {
    let mut left = statement(tokens, test, depth)?;
    while tokens.accept_word("and") {
        let right = statement(tokens, test, depth)?;
        left = Outcome::And(Box::new(left), Box::new(right));
    }
    Ok(left)
}

pub(super) fn statement(tokens: &mut Tokens<'_>, test: &Test, depth: usize) -> Parsed<Outcome> {
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
        let outcome = if tokens.accept_word("run") {
            tokens.symbol("(")?;
            let (space, address) = tokens.spaced_address(test)?;
            tokens.symbol(")")?;
            Outcome::RunFlag(flag, tokens.entry(test, space, address, 0)?)
        } else {
            Outcome::Flag(flag, tokens.term(test)?)
        };
        tokens.symbol(")")?;
        return Ok(outcome);
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
        fault(tokens, test, term)?
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
    Ok(if negated { Outcome::Not(Box::new(outcome)) } else { outcome })
}

/// `fault`, `fault(permission)`, `fault(translation pmd)`, `fault(stage2)`.
pub(super) fn fault(tokens: &mut Tokens<'_>, test: &Test, term: Term) -> Parsed<Outcome> {
    let mut kind = FaultKind::Any;
    let (mut depth, mut stage) = (None, None);
    if tokens.accept("(") {
        while let Some(word) = tokens.accept_name() {
            match word.as_str() {
                "translation" => kind = FaultKind::Translation,
                "access" => kind = FaultKind::AccessFlag,
                "permission" => kind = FaultKind::Permission,
                "stage1" if test.is_nested() => stage = Some(Stage::First),
                "stage2" if test.is_nested() => stage = Some(Stage::Second),
                "stage1" | "stage2" => {
                    return Err(format!("'{word}' is for guests with a stage 1"));
                }
                "pte" => depth = Some(0),
                "pmd" => depth = Some(1),
                "pud" => depth = Some(2),
                "pgd" => depth = Some(3),
                _ => {
                    return Err(format!(
                        "'{}' is no fault: translation, access, permission; pte, pmd, pud, pgd; \
                         stage1, stage2",
                        one_line(&word)
                    ));
                }
            }
        }
        tokens.symbol(")")?;
    }
    Ok(Outcome::Fault(term, kind, depth, stage))
}
