//! The mutants of a file: what is changed in it, and the text in which all of them are.
//!
//! A mutant stands beside what it changes: `a < b` is `(if crate::mutant(7) { a > b } else { a < b
//! })`. In the mutant its operands are as they were, so that only one mutant is there at a time and
//! the text grows by no more than it is deep.

use std::ops::Range;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{
    Arm, Attribute, BinOp, Block, Expr, ExprBinary, GenericArgument, Item, ItemFn, ItemImpl, Local,
    Pat, PathArguments, ReturnType, Signature, Stmt, Type, UnOp,
};

/// A mutant.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// The file, below `engine/src`.
    pub file: String,
    /// The line.
    pub line: usize,
    /// The function that it is in.
    pub function: String,
    /// The change.
    pub what: String,
}

/// A text that stands in the place of another, if its mutant is chosen.
enum Instead {
    /// Before what follows: returns this value.
    Return(String),
    /// Nothing, for a statement.
    Nothing,
    /// An operator, between the same operands.
    Operator { left: Range<usize>, right: Range<usize>, is: Range<usize>, with: &'static str },
    /// The operand without its operator.
    Operand(Range<usize>),
    /// A condition that is true, or false.
    Condition(bool),
    /// An arm that is passed over.
    NoArm,
}

struct Place {
    at: Range<usize>,
    function: String,
    what: String,
    instead: Instead,
}

/// Calls that are not deleted. Loom explores orderings, and no test sees a hint.
const UNSEEN: &[&str] = &[
    "compiler_fence",
    "fence",
    "handler_fence",
    "interrupt",
    "prefetch_ahead",
    "relax",
    "spin_loop",
];

struct Finder<'a> {
    text: &'a str,
    functions: Vec<String>,
    places: Vec<Place>,
}

fn range(of: &impl Spanned) -> Range<usize> {
    of.span().byte_range()
}

fn is_of_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let is_cfg = attribute.path().is_ident("cfg") || attribute.path().is_ident("test");
        let text = attribute.meta.span().source_text().unwrap_or_default();
        is_cfg && (text.contains("test") || text.contains("loom") && !text.contains("not("))
    })
}

/// Whether there is a `let` in an expression, which cannot be put in parentheses.
fn binds(expression: &Expr) -> bool {
    match expression {
        Expr::Let(_) => true,
        Expr::Binary(binary) => binds(&binary.left) || binds(&binary.right),
        _ => false,
    }
}

/// The operators that stand instead of one.
fn others(operator: &BinOp) -> &'static [&'static str] {
    match operator {
        BinOp::Add(_) => &["-"],
        BinOp::Sub(_) | BinOp::Mul(_) => &["+"],
        BinOp::Div(_) => &["*"],
        BinOp::Rem(_) => &["/"],
        BinOp::And(_) => &["||"],
        BinOp::Or(_) => &["&&"],
        BinOp::BitAnd(_) => &["|"],
        // Most are of bits that are not in both, where `^` is the same.
        BinOp::BitOr(_) => &["&"],
        BinOp::BitXor(_) => &["&", "|"],
        BinOp::Shl(_) => &[">>"],
        BinOp::Shr(_) => &["<<"],
        BinOp::Eq(_) => &["!="],
        BinOp::Ne(_) => &["=="],
        BinOp::Lt(_) => &["<=", ">"],
        BinOp::Gt(_) => &[">=", "<"],
        BinOp::Le(_) => &["<", ">"],
        BinOp::Ge(_) => &[">", "<"],
        BinOp::AddAssign(_) => &["-="],
        BinOp::SubAssign(_) => &["+="],
        BinOp::BitAndAssign(_) => &["|="],
        BinOp::BitOrAssign(_) => &["&="],
        BinOp::BitXorAssign(_) => &["|="],
        BinOp::ShlAssign(_) => &[">>="],
        BinOp::ShrAssign(_) => &["<<="],
        _ => &[],
    }
}

/// Values of a type, as far as it can be told from its name.
fn values(of: &Type) -> Vec<String> {
    let last = match of {
        Type::Tuple(tuple) if tuple.elems.is_empty() => return vec!["()".into()],
        Type::Path(path) => path.path.segments.last(),
        _ => None,
    };
    let Some(last) = last else { return Vec::new() };
    let inner = match &last.arguments {
        PathArguments::AngleBracketed(all) => match all.args.first() {
            Some(GenericArgument::Type(of)) => values(of),
            _ => Vec::new(),
        },
        _ => Vec::new(),
    };
    let within = |name: &str| inner.iter().map(|value| format!("{name}({value})")).collect();
    match last.ident.to_string().as_str() {
        "bool" => vec!["true".into(), "false".into()],
        "u8" | "u16" | "u32" | "u64" | "usize" => vec!["0".into(), "1".into()],
        "Option" => [vec!["None".into()], within("Some")].concat(),
        "Result" => within("Ok"),
        _ => Vec::new(),
    }
}

impl Finder<'_> {
    fn add(&mut self, at: Range<usize>, what: String, instead: Instead) {
        let function = self.functions.last().cloned().unwrap_or_default();
        self.places.push(Place { at, function, what, instead });
    }

    fn function(&mut self, signature: &Signature, block: &Block) {
        // One that the compiler may run cannot ask which mutant is chosen.
        if signature.constness.is_some() {
            return;
        }
        let name = signature.ident.to_string();
        self.functions.push(name.clone());
        let mut returned = match &signature.output {
            ReturnType::Default => vec!["()".into()],
            ReturnType::Type(_, of) => values(of),
        };
        if !block.stmts.is_empty() && !UNSEEN.contains(&name.as_str()) {
            let start = block.brace_token.span.open().byte_range().end;
            let is_it = |value: &String| match &block.stmts[..] {
                // Nothing is done with its arguments.
                [first @ Stmt::Local(Local { pat: Pat::Wild(_), .. }), rest @ ..] => {
                    let last = rest.last().unwrap_or(first);
                    rest.is_empty() && value == "()" || self.text[range(last)] == **value
                }
                [only] => self.text[range(only)] == **value,
                _ => false,
            };
            returned.retain(|value| !is_it(value));
            for value in returned {
                let what = format!("return {value}");
                self.add(start..start, what, Instead::Return(value));
            }
        }
        visit::visit_block(self, block);
        self.functions.pop();
    }

    /// The text of a place, on one line.
    fn said(&self, at: Range<usize>) -> String {
        let said = self.text[at].split_whitespace().collect::<Vec<_>>().join(" ");
        said.chars().take(60).collect()
    }

    fn binary(&mut self, at: Range<usize>, binary: &ExprBinary) {
        let (left, right) = (range(&binary.left), range(&binary.right));
        let is = range(&binary.op);
        for &with in others(&binary.op) {
            let (operator, all) = (&self.text[is.clone()], self.said(at.clone()));
            let what = format!("{with} for {operator} in {all}");
            let (left, right, is) = (left.clone(), right.clone(), is.clone());
            self.add(at.clone(), what, Instead::Operator { left, right, is, with });
        }
    }

    fn arms(&mut self, arms: &[Arm]) {
        let is_rest = |arm: &Arm| matches!(arm.pat, Pat::Wild(_)) && arm.guard.is_none();
        let rest = arms.iter().position(is_rest);
        for (number, arm) in arms.iter().enumerate() {
            let pattern = range(&arm.pat);
            match &arm.guard {
                Some((_, guard)) if !binds(guard) => {
                    for is in [true, false] {
                        let what = format!("{is} for the guard of {}", self.said(pattern.clone()));
                        self.add(range(guard), what, Instead::Condition(is));
                    }
                }
                None if rest.is_some_and(|rest| number < rest) => {
                    let what = format!("no arm {}", self.said(pattern.clone()));
                    self.add(pattern.end..pattern.end, what, Instead::NoArm);
                }
                _ => {}
            }
        }
    }
}

/// Whether it calls a function whose effect no test of one thread sees; or `drop`, behind which
/// something may not be borrowed.
fn is_unseen(call: &Expr) -> bool {
    let name = match call {
        Expr::Call(call) => match &*call.func {
            Expr::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()),
            _ => None,
        },
        Expr::MethodCall(call) => Some(call.method.to_string()),
        _ => None,
    };
    name.is_some_and(|name| name == "drop" || UNSEEN.contains(&name.as_str()))
}

impl<'x> Visit<'x> for Finder<'_> {
    fn visit_item(&mut self, item: &'x Item) {
        match item {
            // The compiler evaluates constants.
            Item::Const(_) | Item::Static(_) | Item::Enum(_) => {}
            Item::Mod(module) if is_of_tests(&module.attrs) => {}
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_item_impl(&mut self, item: &'x ItemImpl) {
        let name = item.trait_.as_ref().and_then(|(_, path, _)| path.segments.last());
        let is_said = name.is_some_and(|name| {
            ["Debug", "Display", "Error"].contains(&name.ident.to_string().as_str())
        });
        if !is_said && !is_of_tests(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'x ItemFn) {
        if !is_of_tests(&item.attrs) {
            self.function(&item.sig, &item.block);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'x syn::ImplItemFn) {
        if !is_of_tests(&item.attrs) {
            self.function(&item.sig, &item.block);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'x syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.function(&item.sig, block);
        }
    }

    fn visit_trait_item_const(&mut self, _: &'x syn::TraitItemConst) {}
    fn visit_impl_item_const(&mut self, _: &'x syn::ImplItemConst) {}
    fn visit_type(&mut self, _: &'x Type) {}
    fn visit_generic_argument(&mut self, _: &'x GenericArgument) {}
    fn visit_pat(&mut self, _: &'x Pat) {}
    fn visit_expr_const(&mut self, _: &'x syn::ExprConst) {}

    fn visit_expr_repeat(&mut self, repeat: &'x syn::ExprRepeat) {
        self.visit_expr(&repeat.expr);
    }

    fn visit_stmt(&mut self, statement: &'x Stmt) {
        if let Stmt::Expr(expression, Some(_)) = statement {
            let is_left_out = match expression {
                Expr::Call(_) | Expr::MethodCall(_) => !is_unseen(expression),
                // A variable may have no value before.
                Expr::Assign(assign) => !matches!(*assign.left, Expr::Path(_)),
                _ => false,
            };
            if is_left_out {
                let at = range(statement);
                let what = format!("no {}", self.said(at.clone()));
                self.add(at, what, Instead::Nothing);
            }
        }
        visit::visit_stmt(self, statement);
    }

    fn visit_expr(&mut self, expression: &'x Expr) {
        match expression {
            Expr::Binary(binary) if !binds(expression) => self.binary(range(expression), binary),
            Expr::Unary(unary) if matches!(unary.op, UnOp::Not(_)) => {
                let operand = range(&unary.expr);
                let what = format!("no ! in {}", self.said(range(expression)));
                self.add(range(expression), what, Instead::Operand(operand));
            }
            Expr::Match(matched) => self.arms(&matched.arms),
            _ => {}
        }
        visit::visit_expr(self, expression);
    }
}

/// The text of a part, with the mutants of the places that lie in it from number `from` on.
fn render(text: &str, places: &[(usize, Place)], from: usize, part: Range<usize>) -> String {
    let (mut out, mut at, mut next) = (String::new(), part.start, from);
    while let Some((_, place)) = places.get(next) {
        if place.at.start < at || place.at.end > part.end {
            next += 1;
            continue;
        }
        out += &text[at..place.at.start];
        // All that is changed in one place.
        let is_same = |(_, other): &&(usize, Place)| other.at == place.at;
        let count = places[next..].iter().take_while(is_same).count();
        let inner = render(text, places, next + count, place.at.clone());
        let mut operands = None;
        let mut closed = String::new();
        for (number, Place { at, instead, .. }) in &places[next..next + count] {
            let is = format!("crate::mutant({number})");
            match instead {
                Instead::Return(value) => out += &format!(" if {is} {{ return {value}; }}"),
                Instead::Nothing => {
                    out += &format!("if !{is} {{ ");
                    closed += " }";
                }
                Instead::Operator { left, right, is: operator, with } => {
                    let start = if operands.is_none() { "(" } else { "" };
                    out += start;
                    let (a, b) = (&text[left.clone()], &text[right.clone()]);
                    out += &format!("if {is} {{ {a} {with} {b} }} else ");
                    let a = render(text, places, next + count, left.clone());
                    let b = render(text, places, next + count, right.clone());
                    operands = Some(format!("{{ {a} {} {b} }})", &text[operator.clone()]));
                }
                Instead::Operand(operand) => {
                    out += &format!("(if {is} {{ {} }} else {{ ", &text[operand.clone()]);
                    closed += " })";
                }
                Instead::Condition(true) => {
                    out += &format!("({is} || ");
                    closed += ")";
                }
                Instead::Condition(false) => {
                    out += &format!("!{is} && (");
                    closed += ")";
                }
                Instead::NoArm => out += &format!(" if !{is}"),
            }
            debug_assert_eq!(*at, place.at);
        }
        out += &operands.unwrap_or(inner);
        out += &closed;
        at = place.at.end;
        next += count;
    }
    out + &text[at..part.end]
}

/// Plants every mutant of a file, but those of the numbers in `off`. They have numbers from
/// `mutants.len()` on, and are added there.
///
/// # Errors
/// It is no Rust.
pub fn plant(
    file: &str,
    text: &str,
    mutants: &mut Vec<Mutant>,
    off: &[usize],
) -> syn::Result<String> {
    let mut finder = Finder { text, functions: Vec::new(), places: Vec::new() };
    finder.visit_file(&syn::parse_file(text)?);
    let mut places = finder.places;
    // From the outside in.
    places.sort_by_key(|place| (place.at.start, std::cmp::Reverse(place.at.end)));
    let mut numbered = Vec::new();
    for place in places {
        let number = mutants.len();
        let line = text[..place.at.start].lines().count().max(1);
        let (function, what) = (place.function.clone(), place.what.clone());
        mutants.push(Mutant { file: file.into(), line, function, what });
        if !off.contains(&number) {
            numbered.push((number, place));
        }
    }
    Ok(render(text, &numbered, 0, 0..text.len()))
}

#[cfg(test)]
mod tests {
    use super::plant;

    #[test]
    fn a_mutant_stands_beside_what_it_changes() {
        let planted = |text: &str| {
            let mut all = Vec::new();
            let text = plant("", text, &mut all, &[]).unwrap();
            (text, all.into_iter().map(|one| one.what).collect::<Vec<_>>())
        };
        let (text, what) = planted("fn f(a: u8, b: u8) -> X { g(); a + b > 3 }");
        let changes = [">= for > in a + b > 3", "< for > in a + b > 3", "- for + in a + b"];
        assert_eq!(what, [&["no g();"], &changes[..]].concat());
        assert_eq!(
            text,
            "fn f(a: u8, b: u8) -> X { if !crate::mutant(0) { g(); } \
             (if crate::mutant(1) { a + b >= 3 } else if crate::mutant(2) { a + b < 3 } \
             else { (if crate::mutant(3) { a - b } else { a + b }) > 3 }) }"
        );
        let (text, what) =
            planted("fn f() -> Option<bool> { match x { 1 => !y, a if a => z, _ => w } }");
        assert_eq!(what.len(), 7);
        assert!(text.contains("1 if !crate::mutant(3) => (if crate::mutant(4) { y } else { !y })"));
        assert!(text.contains("if (crate::mutant(5) || !crate::mutant(6) && (a)) =>"));
        assert!(text.starts_with("fn f() -> Option<bool> { if crate::mutant(0) { return None; }"));
        // The compiler's, and orderings.
        for text in
            ["const fn f() -> u8 { 1 + 1 }", "const A: u8 = 1 + 1;", "fn f() -> X { fence(A); }"]
        {
            assert_eq!(planted(text), (text.to_string(), vec![]));
        }
    }
}
