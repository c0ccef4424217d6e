//! Random sequences of calls of every safe function of the engine (see `examples/sequences.rs`): a
//! slice of them, what they find when the embedder breaks a promise, and that no public function is
//! left out.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use syn::visit::Visit;
use tablewright_workloads::sequences::operations::OPERATIONS;
use tablewright_workloads::sequences::{Bug, Sequence, silence};

/// Sequences of the slice. Under Miri, which takes ten seconds for one, a short one for some
/// formats.
fn slice() -> Vec<u64> {
    match cfg!(miri) {
        true => vec![93, 58, 39, 44, 47],
        false => (1..=400).collect(),
    }
}

/// Fails with what is wrong, which is said as panics are said again.
fn judge(result: Result<(), String>) {
    drop(std::panic::take_hook());
    if let Err(wrong) = result {
        panic!("{wrong}");
    }
}

#[test]
fn a_slice_of_all_sequences_is_clean() {
    silence();
    let result = slice().into_iter().try_for_each(|seed| {
        if cfg!(miri) {
            println!("{}", Sequence::new(seed).describe());
        }
        Sequence::new(seed).run(None).map_err(|failure| {
            let (shortest, _) = Sequence::new(seed).shorten(None);
            let again = shortest.command();
            format!("{} (seed {seed}); again: {again}", failure.what)
        })
    });
    judge(result);
}

/// Rules that memory breaks which is used again before it is forgotten.
const FORGOTTEN: &[&str] = &[
    "break-before-make",
    "conflict",
    "freed early",
    "invalidation",
    "never invalidated",
    "stale use",
];

/// Rules that stores break which are not visible yet.
const UNSEEN: &[&str] = &["linked early", "never invalidated", "stale use", "invalidation"];

/// Bugs of the embedder, within how many sequences each is found, and the rules of which one is
/// broken first.
const PLANTED: [(Bug, u64, &[&str]); 5] = [
    (Bug::SkipsInvalidation, 4_000, FORGOTTEN),
    (Bug::NoWait, 2_000, FORGOTTEN),
    (Bug::NoBarrier, 2_000, UNSEEN),
    (Bug::FreedBeforeCompletion, 1_000, &["freed early", "stale use"]),
    (Bug::FreedTwice, 1_000, &["freed early"]),
];

/// Whether a bug is found, by the right rule, again by its seed, and by a sequence that is no
/// longer.
fn find(bug: Bug, within: u64, rules: &[&str]) -> Result<(), String> {
    let fails = |seed| Sequence::new(seed).run(Some(bug)).err();
    let found = (1..=within).find_map(|seed| fails(seed).map(|failure| (seed, failure)));
    let (seed, failure) = found.ok_or(format!("not found within {within} sequences"))?;
    if !rules.contains(&failure.rule.as_str()) {
        return Err(format!("another rule: {failure:?}"));
    }
    if fails(seed) != Some(failure.clone()) {
        return Err(format!("seed {seed} is not the same again"));
    }
    let (shortest, again) = Sequence::new(seed).shorten(Some(bug));
    let before = Sequence::new(seed).operations.len();
    if shortest.operations.len() > before || again.rule != failure.rule {
        return Err(format!("seed {seed} is made short to something else"));
    }
    match shortest.run(Some(bug)) == Err(again) {
        true => Ok(()),
        false => Err(format!("what seed {seed} was made short to is clean")),
    }
}

#[test]
fn what_an_embedder_does_wrong_is_found_and_found_again() {
    silence();
    let result = PLANTED.into_iter().try_for_each(|(bug, within, rules)| {
        find(bug, within, rules).map_err(|wrong| format!("{bug:?}: {wrong}"))
    });
    judge(result);
}

// ---- No function is left out ----

/// Public functions that no operation calls, and why.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("linear::usable_ram", "sorts a list: tested against a map of bytes"),
    ("guest::Gather::age", "passed on to the shared gather"),
    ("guest::Gather::finish", "passed on to the shared gather"),
    ("guest::Gather::issue", "passed on to the shared gather"),
    ("guest::Gather::release_tables", "passed on to the shared gather"),
    ("guest::Gather::split", "passed on to the shared gather"),
    ("guest::Gather::top_up", "passed on to the shared gather"),
    ("guest::Gather::unmap", "passed on to the shared gather"),
    ("flush::Leaf::memory", "the frame and the size, of every leaf"),
    ("flush::Held::memory", "what is released, without its attributes: `engine/tests/runs.rs`"),
    ("flush::Held::join", "the same, of several"),
    ("dirty::marked", "a word, as ranges: `engine/tests/runs.rs`"),
    (
        "guest::Gather::begin_modification_log",
        "hardware writes the log: the workload `log` has it, and `modification.rs`",
    ),
    ("guest::Guest::drain", "the same"),
    ("dirty::ModificationLog::", "the same"),
    // Whole modules.
    ("hyperv::", "wire formats: fuzzed by bytes in the engine's tests"),
    ("shootdown::", "has its own workload, `shootdown`"),
    ("identity::", "has its own workload, `identities`"),
    ("cpus::", "a value: sets of the workload `shootdown`, and the engine's own tests"),
    ("invalidation::", "a value, which platforms are given: the machine's reads it"),
    ("format::", "values and descriptors: tested one by one against the walker"),
    ("addr::", "values: used by every operation"),
    ("bbm::", "a function of values, with a table of its own in the engine's tests"),
    ("entry::", "an entry of a table: what hooks are made of, used by the machine"),
    // Values that arguments are made of.
    ("edit::Mapping::", "a value: every mapping of an operation"),
    ("edit::Change::", "a value: every change of an operation"),
    ("guest::Slot::", "a value: every slot of an operation"),
    ("guest::Log::", "a value"),
    ("guest::Access::", "a value"),
    ("guest::Abort::", "what a register holds, decoded: `engine/tests/guest.rs`"),
    ("guest::Fault::new", "a value: every fault of an operation"),
    ("guest::Backing::", "a value: every page of a host"),
    ("linear::LinearMap::new", "a value: every linear map of an operation"),
    // What platforms are made of.
    ("linear::Slots::", "windows have their own workload, `windows`"),
    ("linear::Coarse::", "windows have their own workload, `windows`"),
    ("arch::", "what a processor executes, and what its registers hold: the machine has its own"),
];

/// The public functions of the engine, by the first module of their file, their type and their
/// name.
#[derive(Default)]
struct Surface {
    module: String,
    /// Types, by module, and whether they are public.
    types: BTreeSet<(String, String, bool)>,
    /// Functions, with the type that they are of.
    functions: BTreeSet<(String, Option<String>, String)>,
}

fn is_public(visibility: &syn::Visibility) -> bool {
    matches!(visibility, syn::Visibility::Public(_))
}

/// For a build that is neither that of tests nor that of models.
fn is_built(attributes: &[syn::Attribute]) -> bool {
    !attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else {
            return false;
        };
        let text = list.tokens.to_string();
        list.path.is_ident("cfg")
            && matches!(
                text.as_str(),
                "test" | "feature = \"loom\"" | "all (test , not (feature = \"loom\"))"
            )
    })
}

impl Surface {
    fn function(&mut self, of: Option<String>, signature: &syn::Signature) {
        if signature.unsafety.is_none() {
            let name = signature.ident.to_string();
            self.functions.insert((self.module.clone(), of, name));
        }
    }

    /// Whether a function of this type can be called: one that is public where it is named, or
    /// imported there.
    fn is_public(&self, module: &str, of: &str) -> bool {
        let here = self.types.iter().find(|(at, name, _)| at == module && name == of);
        let (_, _, public) = match here {
            Some(it) => it,
            None => match self.types.iter().find(|(_, name, public)| name == of && *public) {
                Some(it) => it,
                None => return false,
            },
        };
        *public
    }

    fn names(&self) -> BTreeSet<String> {
        let name = |(module, of, name): &(String, Option<String>, String)| match of {
            Some(of) => self.is_public(module, of).then(|| format!("{module}::{of}::{name}")),
            None => Some(format!("{module}::{name}")),
        };
        self.functions.iter().filter_map(name).collect()
    }

    fn read(&mut self, directory: &Path, module: Option<&str>) {
        for entry in fs::read_dir(directory).expect("the engine's source") {
            let path = entry.expect("a file").path();
            let stem = path.file_stem().expect("a name").to_string_lossy().into_owned();
            let module = module.unwrap_or(&stem);
            if path.is_dir() {
                self.read(&path, Some(module));
            } else if path.extension().is_some_and(|it| it == "rs") {
                let text = fs::read_to_string(&path).expect("a file of the engine");
                let file = syn::parse_file(&text).expect("Rust");
                self.module = module.to_owned();
                self.visit_file(&file);
            }
        }
    }
}

impl<'a> Visit<'a> for Surface {
    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        let it = (self.module.clone(), item.ident.to_string(), is_public(&item.vis));
        self.types.insert(it);
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        let it = (self.module.clone(), item.ident.to_string(), is_public(&item.vis));
        self.types.insert(it);
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if is_built(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        if is_public(&item.vis) && is_built(&item.attrs) {
            self.function(None, &item.sig);
        }
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        let syn::Type::Path(path) = &*item.self_ty else {
            return;
        };
        let of = path.path.segments.last().expect("a type").ident.to_string();
        for part in &item.items {
            if let syn::ImplItem::Fn(function) = part
                && item.trait_.is_none()
                && is_public(&function.vis)
                && is_built(&function.attrs)
                && is_built(&item.attrs)
            {
                self.function(Some(of.clone()), &function.sig);
            }
        }
    }
}

#[test]
fn every_public_function_is_called_by_an_operation_or_is_an_exception() {
    let mut surface = Surface::default();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/src");
    surface.read(&source, None);
    let names = surface.names();
    assert!(names.len() > 150, "{} functions were found", names.len());
    let called: BTreeSet<&str> = OPERATIONS.iter().flat_map(|it| it.2).copied().collect();
    let excepted = |name: &str| EXCEPTIONS.iter().any(|(prefix, _)| name.starts_with(prefix));
    let left_out: Vec<_> =
        names.iter().filter(|name| !called.contains(name.as_str()) && !excepted(name)).collect();
    assert!(left_out.is_empty(), "no operation calls {left_out:#?}");
    let unknown: Vec<_> = called.iter().filter(|name| !names.contains(**name)).collect();
    assert!(unknown.is_empty(), "the engine has no {unknown:#?}");
    let idle: Vec<_> = EXCEPTIONS
        .iter()
        .filter(|(prefix, _)| !names.iter().any(|name| name.starts_with(prefix)))
        .collect();
    assert!(idle.is_empty(), "nothing is excepted by {idle:#?}");
}
