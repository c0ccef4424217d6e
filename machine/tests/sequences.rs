//! Random sequences of calls of every safe function of the engine (see `examples/sequences.rs`): a slice of them, what they
//! find when the embedder breaks a promise, and that no public function is left out.

#[allow(dead_code)] // What only the example uses.
#[path = "../examples/sequences/mod.rs"]
mod sequences;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use sequences::operations::OPERATIONS;
use sequences::{Bug, Sequence, silence};
use syn::visit::Visit;

/// Sequences of the slice.
const SLICE: u64 = if cfg!(miri) { 12 } else { 400 };

#[test]
fn a_slice_of_all_sequences_is_clean() {
    silence();
    for seed in 1..=SLICE {
        if let Err(failure) = Sequence::new(seed).run(None) {
            let (shortest, _) = Sequence::new(seed).shorten(None);
            panic!(
                "{} (seed {seed}); again: {}",
                failure.what,
                shortest.command()
            );
        }
    }
}

/// What comes of memory that is used again before it is forgotten.
const FORGOTTEN: &[&str] = &[
    "break-before-make",
    "conflict",
    "freed early",
    "never invalidated",
    "stale use",
];

/// Bugs of the embedder, within how many sequences each is found, and the rules of which one is broken first.
const PLANTED: [(Bug, u64, &[&str]); 6] = [
    (Bug::SkipsInvalidation, 4_000, FORGOTTEN),
    (Bug::SkipsCompletion, 2_000, FORGOTTEN),
    (Bug::SkipsPublication, 2_000, FORGOTTEN),
    (Bug::ReusesEarly, 4_000, &["break-before-make"]),
    (Bug::FreesEarly, 1_000, &["freed early", "stale use"]),
    (Bug::FreesTwice, 1_000, &["freed early"]),
];

#[test]
fn what_an_embedder_does_wrong_is_found_and_found_again() {
    silence();
    for (bug, within, rules) in PLANTED {
        let fails = |seed| Sequence::new(seed).run(Some(bug)).err();
        let found = (1..=within).find_map(|seed| fails(seed).map(|failure| (seed, failure)));
        let Some((seed, failure)) = found else {
            panic!("{bug:?} is not found within {within} sequences");
        };
        assert!(
            rules.contains(&failure.rule.as_str()),
            "{bug:?}: {failure:?}"
        );
        assert_eq!(
            fails(seed),
            Some(failure.clone()),
            "{bug:?}: seed {seed} is not the same again"
        );
        let (shortest, again) = Sequence::new(seed).shorten(Some(bug));
        let before = Sequence::new(seed).operations.len();
        assert!(shortest.operations.len() <= before && again.rule == failure.rule);
        assert_eq!(
            shortest.run(Some(bug)),
            Err(again),
            "{bug:?}: what was made short is clean"
        );
    }
}

// ---- No function is left out ----

/// Public functions that no operation calls, and why.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("guest::Gather::age", "passed on to the shared gather"),
    ("guest::Gather::finish", "passed on to the shared gather"),
    ("guest::Gather::issue", "passed on to the shared gather"),
    (
        "guest::Gather::release_tables",
        "passed on to the shared gather",
    ),
    ("guest::Gather::split", "passed on to the shared gather"),
    ("guest::Gather::top_up", "passed on to the shared gather"),
    ("guest::Gather::unmap", "passed on to the shared gather"),
    // Whole modules.
    ("hosted::", "a platform for tests, not for the machine"),
    (
        "hyperv::",
        "wire formats: fuzzed by bytes in the engine's tests",
    ),
    ("shootdown::", "has its own workload, `shootdown`"),
    (
        "format::",
        "values and descriptors: tested one by one against the walker",
    ),
    ("addr::", "values: used by every operation"),
    (
        "bbm::",
        "a function of values, with a table of its own in the engine's tests",
    ),
    (
        "entry::",
        "an entry of a table: what hooks are made of, used by the machine",
    ),
    // Values that arguments are made of.
    ("edit::Mapping::", "a value: every mapping of an operation"),
    ("edit::Change::", "a value: every change of an operation"),
    ("guest::Slot::", "a value: every slot of an operation"),
    (
        "guest::SlotCell::",
        "room for a slot, which guests are made with",
    ),
    ("guest::Log::", "a value"),
    ("guest::Access::", "a value"),
    ("guest::Fault::new", "a value: every fault of an operation"),
    ("guest::Backing::", "a value: every page of a host"),
    (
        "dirty::RingEntry::",
        "room for an entry, which rings are made with",
    ),
    (
        "linear::LinearMap::new",
        "a value: every linear map of an operation",
    ),
    // What platforms are made of.
    (
        "shared::Slot::",
        "the machine knows walks by itself; epochs are explored by loom",
    ),
    (
        "shared::Epochs::",
        "the machine knows walks by itself; epochs are explored by loom",
    ),
    (
        "shared::Quiescence::",
        "the machine knows walks by itself; states are explored by loom",
    ),
    (
        "linear::Slots::",
        "windows have their own workload, `windows`",
    ),
    (
        "linear::Coarse::",
        "windows have their own workload, `windows`",
    ),
    (
        "arch::",
        "what a processor executes, and what its registers hold: the machine has its own",
    ),
    (
        "kernel_half::KernelHalf::",
        "the machine has each table in one space",
    ),
];

/// The public functions of the engine, by the first module of their file, their type and their name.
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

    /// Whether a function of this type can be called: one that is public where it is named, or imported there.
    fn is_public(&self, module: &str, of: &str) -> bool {
        let here = self
            .types
            .iter()
            .find(|(at, name, _)| at == module && name == of);
        let (_, _, public) = match here {
            Some(it) => it,
            None => match self
                .types
                .iter()
                .find(|(_, name, public)| name == of && *public)
            {
                Some(it) => it,
                None => return false,
            },
        };
        *public
    }

    fn names(&self) -> BTreeSet<String> {
        let name = |(module, of, name): &(String, Option<String>, String)| match of {
            Some(of) => self
                .is_public(module, of)
                .then(|| format!("{module}::{of}::{name}")),
            None => Some(format!("{module}::{name}")),
        };
        self.functions.iter().filter_map(name).collect()
    }

    fn read(&mut self, directory: &Path, module: Option<&str>) {
        for entry in fs::read_dir(directory).expect("the engine's source") {
            let path = entry.expect("a file").path();
            let stem = path
                .file_stem()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
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
        let it = (
            self.module.clone(),
            item.ident.to_string(),
            is_public(&item.vis),
        );
        self.types.insert(it);
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        let it = (
            self.module.clone(),
            item.ident.to_string(),
            is_public(&item.vis),
        );
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
    let excepted = |name: &str| {
        EXCEPTIONS
            .iter()
            .any(|(prefix, _)| name.starts_with(prefix))
    };
    let left_out: Vec<_> = names
        .iter()
        .filter(|name| !called.contains(name.as_str()) && !excepted(name))
        .collect();
    assert!(left_out.is_empty(), "no operation calls {left_out:#?}");
    let unknown: Vec<_> = called
        .iter()
        .filter(|name| !names.contains(**name))
        .collect();
    assert!(unknown.is_empty(), "the engine has no {unknown:#?}");
    let idle: Vec<_> = EXCEPTIONS
        .iter()
        .filter(|(prefix, _)| !names.iter().any(|name| name.starts_with(prefix)))
        .collect();
    assert!(idle.is_empty(), "nothing is excepted by {idle:#?}");
}
