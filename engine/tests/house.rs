//! The house: no circle of imports between the rooms of the engine, nor between its files, and no
//! file that is too long to be read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A file of more lines holds more than one idea.
const LONGEST: usize = 910;

/// The engine, and what is as close to it.
const ENGINE: [&str; 3] = ["engine", "linear", "walker"];
/// The rest of the house.
const ELSEWHERE: [&str; 8] = [
    "processes",
    "machine",
    "kvm",
    "recorder",
    "lab",
    "hypervisor",
    "xtask",
    "examples",
];

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true if path.ends_with("target") => {}
            true => files(&path, found),
            false if path.extension().is_some_and(|it| it == "rs") => found.push(path),
            false => {}
        }
    }
}

/// The text of each module of a crate, by its path in it, without comments and tests.
fn modules(source: &Path) -> BTreeMap<String, String> {
    let mut found = Vec::new();
    files(source, &mut found);
    let module = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        let code: String = text
            .lines()
            .map(|line| line.split("//").next().unwrap().to_owned() + "\n")
            .collect();
        let name = path.strip_prefix(source).unwrap().with_extension("");
        let name = name.to_str().unwrap().replace('/', "::");
        let name = name.strip_suffix("::mod").unwrap_or(&name).to_owned();
        (name, code)
    };
    found.into_iter().map(module).collect()
}

/// What a `use` names, one path for each: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn paths(prefix: &str, tree: &str, found: &mut Vec<String>) {
    let (mut depth, mut start) = (0, 0);
    let ends = tree.char_indices().chain([(tree.len(), ',')]);
    for (at, character) in ends {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = tree[start..at].trim();
                start = (at + 1).min(tree.len());
                match part.split_once('{') {
                    Some((head, rest)) => {
                        let inside = rest.rsplit_once('}').unwrap().0;
                        paths(&format!("{prefix}{head}"), inside, found);
                    }
                    None if part.is_empty() => {}
                    None => found.push(format!("{prefix}{part}")),
                }
            }
            _ => {}
        }
    }
}

/// The modules that each imports from, as far as the name says it: what the crate's root exports is
/// of the module that it is from.
fn imports(modules: &BTreeMap<String, String>) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut exported = BTreeMap::new();
    let root = modules.get("lib").or(modules.get("main")).unwrap();
    for part in root.split("pub use ").skip(1) {
        let mut named = Vec::new();
        paths("", part.split(';').next().unwrap(), &mut named);
        for path in named {
            if let Some((module, name)) = path.rsplit_once("::") {
                exported.insert(name.to_owned(), module.to_owned());
            }
        }
    }
    let resolve = |path: &str| -> Option<&str> {
        let mut path = path;
        loop {
            if let Some((name, _)) = modules.get_key_value(path) {
                return Some(name);
            }
            match path.rsplit_once("::") {
                Some((head, _)) => path = head,
                None => {
                    let module = exported.get(path)?;
                    return modules.get_key_value(module).map(|(name, _)| &**name);
                }
            }
        }
    };
    let of = |name: &str, code: &str| {
        let parent = name.rsplit_once("::").map_or("", |(parent, _)| parent);
        let mut named = Vec::new();
        for part in code.split("use crate::").skip(1) {
            paths("", part.split(';').next().unwrap(), &mut named);
        }
        for part in code.split("crate::").skip(1) {
            let end = part.find(|it: char| !(it.is_alphanumeric() || "_:".contains(it)));
            named.push(part[..end.unwrap_or(part.len())].to_owned());
        }
        for part in code.split("use super::").skip(1) {
            let mut inner = Vec::new();
            paths("", part.split(';').next().unwrap(), &mut inner);
            named.extend(
                inner
                    .into_iter()
                    .map(|path| match path.strip_prefix("super::") {
                        Some(path) => path.to_owned(),
                        None if parent.is_empty() => path,
                        None => format!("{parent}::{path}"),
                    }),
            );
        }
        let resolved = named.iter().filter_map(|path| resolve(path));
        resolved.filter(|other| *other != name).collect()
    };
    let named = modules
        .iter()
        .filter(|(name, _)| !["lib", "main"].contains(&&***name));
    named
        .map(|(name, code)| (&**name, of(name, code)))
        .collect()
}

/// A circle that goes through a module, if there is one.
fn circle<'m>(
    at: &'m str,
    imports: &BTreeMap<&'m str, BTreeSet<&'m str>>,
    way: &mut Vec<&'m str>,
    done: &mut BTreeSet<&'m str>,
) -> Option<Vec<&'m str>> {
    if let Some(start) = way.iter().position(|other| *other == at) {
        return Some(way[start..].to_vec());
    }
    if !done.insert(at) {
        return None;
    }
    way.push(at);
    let found = imports.get(at).into_iter().flatten();
    let found = found
        .into_iter()
        .find_map(|next| circle(next, imports, way, done));
    way.pop();
    found
}

#[test]
fn no_circle_of_imports() {
    let modules = modules(&source());
    let imports = imports(&modules);
    // It would find nothing if it read nothing.
    assert!(imports["platform"].contains("entry"));
    assert!(imports["edit::space"].contains("format"));
    assert!(imports["edit::gather"].contains("edit::space"));
    assert_no_circle(&imports);
    let rooms = rooms(&imports);
    assert!(rooms["shared"].contains("edit") && rooms["edit"].contains("flush"));
    assert_no_circle(&rooms);
}

#[test]
fn no_circle_of_rooms_elsewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (part, room, from) in [
        ("lab", "reproduce", "dirty_log"),
        ("lab/harness", "report", "error"),
        ("lab/experiments", "dirty_log", "write_protect"),
        ("lab/compare", "runner", "subject"),
        ("linear", "engine", "fixmap"),
    ] {
        let modules = modules(&root.join(part).join("src"));
        let imports = imports(&modules);
        let rooms = rooms(&imports);
        assert!(rooms[room].contains(from), "{part}: {:?}", rooms[room]);
        assert_no_circle(&rooms);
    }
}

/// The same of rooms, which are what is at the root of the crate: a file, or a directory of them.
fn rooms<'m>(
    imports: &BTreeMap<&'m str, BTreeSet<&'m str>>,
) -> BTreeMap<&'m str, BTreeSet<&'m str>> {
    let room = |module: &'m str| module.split("::").next().unwrap();
    let mut rooms: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (module, others) in imports {
        let from = room(module);
        let others = others.iter().map(|other| room(other));
        let others = others.filter(|other| *other != from);
        rooms.entry(from).or_default().extend(others);
    }
    rooms
}

fn assert_no_circle(imports: &BTreeMap<&str, BTreeSet<&str>>) {
    let mut done = BTreeSet::new();
    for module in imports.keys() {
        let found = circle(module, imports, &mut Vec::new(), &mut done);
        assert_eq!(
            found, None,
            "each imports from the next, and the last from the first"
        );
    }
}

#[test]
fn a_circle_is_found() {
    let text = |code: &str| code.to_owned();
    let modules = BTreeMap::from([
        (text("lib"), text("pub use a::{A, B};\n")),
        (text("a"), text("use crate::b::c::{D, E};\n")),
        (text("b"), text("")),
        (
            text("b::c"),
            text("use super::super::{A};\nuse core::fmt;\n"),
        ),
    ]);
    let imports = imports(&modules);
    let found = circle("a", &imports, &mut Vec::new(), &mut BTreeSet::new());
    assert_eq!(found, Some(vec!["a", "b::c"]));
    // Rooms may be a circle where files are none.
    let files = BTreeMap::from([
        ("a::b", BTreeSet::from(["c"])),
        ("c", BTreeSet::from(["a::d"])),
    ]);
    assert_eq!(
        circle("a::b", &files, &mut Vec::new(), &mut BTreeSet::new()),
        None
    );
    let rooms = rooms(&files);
    let found = circle("a", &rooms, &mut Vec::new(), &mut BTreeSet::new());
    assert_eq!(found, Some(vec!["a", "c"]));
}

#[test]
fn no_file_is_too_long() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    for room in ENGINE.iter().chain(&ELSEWHERE) {
        files(&root.join(room), &mut found);
    }
    assert!(found.len() > 300, "{} files", found.len());
    for path in found {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= LONGEST, "{}: {lines} lines", path.display());
    }
}

/// Words that a reader would have to guess at. A processor and an edit are things, and have names
/// of things; what an edit does has the field's names: reclaim, grace period, clear dirty, zap,
/// defer, cache maintenance, write-protect, set accessed, collapse.
const NOT_THE_FIELDS: &[&str] = &[
    "nobody",
    "somebody",
    "whoever",
    "everybody",
    "anyone",
    "someone",
    "he",
    "him",
    "his",
    "himself",
    "settle",
    "settles",
    "settled",
    "settling",
    "moment",
    "moments",
    "quiet",
    "wash",
    "washes",
    "washed",
    "sweep",
    "upkeep",
    "lull",
    "lulls",
    "asleep",
    "recover",
    "recovers",
];

/// How often all of them may be in what is not the engine's: `quiet` is an option of cargo and of
/// Linux.
const MOST_ELSEWHERE: usize = 29;

/// The words of the list in a line of source or of prose, and a sentence that begins with *who*.
fn found_in(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut begins = true;
    let letters = |character: char| character.is_alphabetic();
    let mut rest = line.trim_start();
    while let Some(start) = rest.find(letters) {
        let (between, from) = rest.split_at(start);
        let end = from.find(|it| !letters(it)).unwrap_or(from.len());
        let (word, after) = from.split_at(end);
        begins |= between.contains(['.', ':', ';', '|', '"', '*']);
        let lower = word.to_lowercase();
        let not_quoted = !between.ends_with("--");
        if NOT_THE_FIELDS.contains(&&*lower) && not_quoted
            || begins && ["Who", "Whoever"].contains(&word)
        {
            found.push(word.to_owned());
        }
        (begins, rest) = (false, after);
    }
    found
}

#[test]
fn words_are_found() {
    let found = |line| found_in(line).join(" ");
    assert_eq!(found("// He is told, and SETTLES it."), "He SETTLES");
    assert_eq!(found("/// Who has it. Who writes?"), "Who Who");
    assert_eq!(found("let asleep_now = is_quiet(cpu);"), "asleep quiet");
    assert_eq!(found("what a guest who heals needs: the sweeps"), "");
    assert_eq!(found("args([\"--quiet\"])"), "");
}

#[test]
fn words_are_the_fields() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut in_engine, mut elsewhere) = (Vec::new(), Vec::new());
    let mut texts = Vec::new();
    for room in ENGINE {
        files(&root.join(room), &mut texts);
    }
    let engine = texts.len();
    assert!(engine > 100, "{engine} files of the engine");
    for room in ELSEWHERE {
        files(&root.join(room), &mut texts);
    }
    for prose in ["README.md", "CONTRIBUTING.md", "engine/README.md"] {
        texts.push(root.join(prose));
    }
    for page in fs::read_dir(root.join("docs")).unwrap() {
        let page = page.unwrap().path();
        texts.extend(
            page.extension()
                .is_some_and(|it| it == "md")
                .then_some(page),
        );
    }
    for (number, path) in texts.iter().enumerate() {
        if path.ends_with("engine/tests/house.rs") {
            continue;
        }
        let text = fs::read_to_string(path).unwrap();
        for (line, words) in (1..).zip(text.lines().map(found_in)) {
            for word in words {
                let place = format!("{}:{line}: {word}", path.display());
                match number < engine {
                    true => in_engine.push(place),
                    false => elsewhere.push(place),
                }
            }
        }
    }
    assert!(in_engine.is_empty(), "{in_engine:#?}");
    assert!(elsewhere.len() <= MOST_ELSEWHERE, "{elsewhere:#?}");
}

/// The pages of experiments, and what is run for each.
const EXPERIMENTS: &[(&str, &[&str])] = &[
    ("compare", &["lab/compare/src"]),
    (
        "dirty-log",
        &["lab/experiments/src/dirty_log", "lab/src/dirty_log"],
    ),
    (
        "map-mem",
        &[
            "lab/experiments/src/linear_map",
            "lab/src/map_mem",
            "linear/src",
        ],
    ),
    ("migrate", &["lab/experiments/src/migrate"]),
    (
        "page-table-test",
        &[
            "lab/experiments/src/page_table_test",
            "lab/experiments/src/host.rs",
        ],
    ),
    ("tlb-flush", &["lab/experiments/src/tlb_flush"]),
    (
        "write-protect",
        &["lab/experiments/src/write_protect", "lab/src/write_protect"],
    ),
];

/// The public functions of a file: its types, each with the names of their methods.
fn methods(text: &str) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let is_block = [
            "impl",
            "unsafe impl",
            "pub trait",
            "pub unsafe trait",
            "pub struct",
        ];
        if !is_block.iter().any(|begins| line.starts_with(begins)) {
            continue;
        }
        let mut head = line.to_owned();
        while !head.contains(['{', ';', '}']) {
            match lines.next() {
                Some(more) => head.push_str(more),
                None => break,
            }
        }
        let of_trait = head.contains(" for ") || head.contains("trait ");
        let bare = without_generics(&head);
        let words = bare.split(|it: char| !(it.is_alphanumeric() || it == '_'));
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        let after = words.iter().position(|word| *word == "for");
        let skipped = ["impl", "unsafe", "pub", "trait", "struct"];
        let Some(name) = after
            .map(|at| words[at + 1])
            .or_else(|| words.iter().find(|word| !skipped.contains(word)).copied())
        else {
            continue;
        };
        found.insert((name.to_owned(), String::new()));
        if head.contains(';') || head.contains('}') {
            continue;
        }
        for line in lines.by_ref().take_while(|line| !line.starts_with('}')) {
            let Some((qualifiers, rest)) = line.split_once("fn ") else {
                continue;
            };
            let is_public = qualifiers.trim_start().starts_with("pub ") || of_trait;
            let end = rest.find(['(', '<']);
            if let (true, Some(end)) = (is_public && !line.trim_start().starts_with("//"), end) {
                found.insert((name.to_owned(), rest[..end].to_owned()));
            }
        }
    }
    found
}

/// The head of a block, without what is between angle brackets.
fn without_generics(head: &str) -> String {
    let mut depth = 0i32;
    let mut bare = String::new();
    let mut before = ' ';
    for character in head.chars() {
        match character {
            '<' => depth += 1,
            '>' if before != '-' => depth -= 1,
            '{' => break,
            other if depth == 0 => bare.push(other),
            _ => {}
        }
        before = character;
    }
    bare
}

/// The functions that a page says its column calls: `module::Type::function`, or a type alone.
fn said_calls(page: &str) -> Vec<String> {
    let Some((_, rest)) = page.split_once("**What `tablewright` calls**") else {
        return Vec::new();
    };
    let paragraph = rest.split("\n\n").next().unwrap();
    let quoted = paragraph.split('`').skip(1).step_by(2);
    let paths = quoted.filter(|it| it.contains("::"));
    paths.map(str::to_owned).collect()
}

#[test]
fn pages_name_what_their_column_calls() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    let mut sources = Vec::new();
    files(&source(), &mut sources);
    let public: Vec<(String, BTreeSet<(String, String)>)> = sources
        .iter()
        .map(|path| {
            let module = path.strip_prefix(source()).unwrap();
            (module.to_str().unwrap().to_owned(), methods(&read(path)))
        })
        .collect();
    for (page, places) in EXPERIMENTS {
        let calls = said_calls(&read(&root.join(format!("docs/{page}.md"))));
        assert!(calls.len() > 3, "docs/{page}.md says {calls:?}");
        let mut run = Vec::new();
        for place in *places {
            match root.join(place) {
                file if file.is_file() => run.push(file),
                directory => files(&directory, &mut run),
            }
        }
        let run: String = run.iter().map(|path| read(path)).collect();
        for call in calls {
            let mut parts: Vec<&str> = call.split("::").collect();
            let last = parts.pop().unwrap();
            let is_type = last.starts_with(char::is_uppercase);
            let (of, function) = match is_type {
                true => (last, ""),
                false => (parts.pop().unwrap(), last),
            };
            let module = parts.first().copied().unwrap_or("");
            let exists = public.iter().any(|(path, methods)| {
                path.starts_with(module) && methods.contains(&(of.to_owned(), function.to_owned()))
            });
            assert!(
                exists,
                "docs/{page}.md: {call} is no public item of the engine"
            );
            let is_used = match is_type {
                true => run.contains(of),
                false => run.contains(&format!("{function}(")),
            };
            assert!(
                is_used,
                "docs/{page}.md: {call} is not called in {places:?}"
            );
        }
    }
}

#[test]
fn public_functions_are_found() {
    let text = "impl<F: Format<Input = Va>, P> Deref\n    for Cut<F, P>\n{\n    fn deref(&self) {}\n}\n\
        impl<'s, F> Gather<'s, F> {\n    pub const fn map(&self) {}\n    fn inner<T>() {}\n}\npub struct One;\n";
    let found = methods(text);
    let has = |of: &str, function: &str| found.contains(&(of.to_owned(), function.to_owned()));
    assert!(has("Cut", "deref") && has("Gather", "map") && has("One", ""));
    assert!(!has("Gather", "inner"));
    let page = "The\n\n**What `tablewright` calls**: `a::B::c`, `D`,\n`E::f`.\n\n`G::h`\n";
    assert_eq!(said_calls(page), ["a::B::c", "E::f"]);
}
