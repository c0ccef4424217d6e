//! The house: no circle of imports between the files and between the rooms of any crate, and files,
//! lines and comments that can be read. A room is a directory of modules.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Lines of a file at most.
const LONGEST: usize = 910;
/// Columns of a line at most.
const WIDEST: usize = 100;
/// Words that no doc comment opens with.
const OPENERS: [&str; 7] = ["The same", "What", "Who", "Whether that", "Where", "So", "As"];

/// The faults that no crate has.
const KINDS: [&str; 4] = ["files in circles", "rooms in circles", "wide lines", "openers"];

type Imports = BTreeMap<String, BTreeSet<String>>;

/// All files of Rust below a directory, each with the directory of its crate.
fn files(directory: &Path, of: &Path, found: &mut Vec<(PathBuf, PathBuf)>) {
    let of = match directory.join("Cargo.toml").exists() {
        true => directory,
        false => of,
    };
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.extension() {
            _ if path.ends_with("target") || path.ends_with(".git") => {}
            _ if path.is_dir() => files(&path, of, found),
            Some(extension) if extension == "rs" => found.push((of.to_owned(), path)),
            _ => {}
        }
    }
}

/// The paths of a `use` tree: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn paths(prefix: &str, tree: &str, found: &mut Vec<String>) {
    let (mut depth, mut start) = (0, 0);
    for (at, character) in tree.char_indices().chain([(tree.len(), ',')]) {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = tree[start..at].trim();
                start = (at + 1).min(tree.len());
                match part.split_once('{') {
                    Some((head, rest)) => {
                        let inside = rest.rsplit_once('}').map_or(rest, |(inside, _)| inside);
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

/// The modules that each module imports from. A name that the crate's root exports counts as its
/// module's.
fn imports(modules: &BTreeMap<String, String>) -> Imports {
    let trees = |code: &str, keyword: &str| {
        let mut found = Vec::new();
        for part in code.split(keyword).skip(1) {
            paths("", part.split(';').next().unwrap(), &mut found);
        }
        found
    };
    let root = modules.get("lib").or(modules.get("main")).map_or("", |it| it);
    let exported = trees(root, "pub use ").into_iter();
    let exported = exported.filter_map(|path| {
        let (module, name) = path.rsplit_once("::")?;
        Some((name.to_owned(), module.trim_start_matches("crate::").to_owned()))
    });
    let exported: BTreeMap<String, String> = exported.collect();
    let resolve = |path: &str| {
        let mut path = path;
        loop {
            if modules.contains_key(path) {
                return Some(path.to_owned());
            }
            match path.rsplit_once("::") {
                Some((head, _)) => path = head,
                None => {
                    return exported.get(path).filter(|it| modules.contains_key(*it)).cloned();
                }
            }
        }
    };
    let of = |name: &str, code: &str| {
        let mut named = trees(code, "use crate::");
        for part in code.split("crate::").skip(1) {
            let end = part.find(|it: char| !(it.is_alphanumeric() || "_:".contains(it)));
            named.push(part[..end.unwrap_or(part.len())].to_owned());
        }
        for path in trees(code, "use super::") {
            let mut parent = name.rsplit_once("::").map_or("", |(parent, _)| parent);
            let mut path = path.as_str();
            while let Some(above) = path.strip_prefix("super::") {
                (path, parent) = (above, parent.rsplit_once("::").map_or("", |(above, _)| above));
            }
            named.push(format!("{parent}::{path}").trim_start_matches("::").to_owned());
        }
        let others = named.iter().filter_map(|path| resolve(path));
        others.filter(|other| other != name).collect()
    };
    let inner = modules.iter().filter(|(name, _)| !["lib", "main"].contains(&&***name));
    inner.map(|(name, code)| (name.clone(), of(name, code))).collect()
}

/// The imports between rooms: the first part of each path.
fn rooms(imports: &Imports) -> Imports {
    let room = |module: &String| module.split("::").next().unwrap().to_owned();
    let mut rooms = Imports::new();
    for (module, others) in imports {
        let others = others.iter().map(room).filter(|other| *other != room(module));
        rooms.entry(room(module)).or_default().extend(others);
    }
    rooms
}

/// The modules that import from themselves by way of others.
fn in_circles(imports: &Imports) -> Vec<String> {
    let reaches_itself = |start: &&String| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![*start]);
        while let Some(at) = next.pop() {
            next.extend(imports.get(at).into_iter().flatten().filter(|it| seen.insert(*it)));
        }
        seen.contains(start)
    };
    imports.keys().filter(reaches_itself).cloned().collect()
}

/// Whether a line begins a doc comment, of a text whose line before is given, with an opener.
fn opens_badly(before: &str, line: &str) -> bool {
    let text = |line: &str| {
        let line = line.trim_start();
        let text = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        text.map(|text| text.trim_start().to_owned())
    };
    let opens = |text: &str| {
        let rest = OPENERS.iter().find_map(|opener| text.strip_prefix(opener));
        rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
    };
    text(before).is_none() && text(line).is_some_and(|text| opens(&text))
}

#[test]
fn the_house_is_in_order() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut found = Vec::new();
    files(root, root, &mut found);
    assert!(found.len() > 300, "{} files", found.len());
    type Crate = (BTreeMap<String, String>, [Vec<String>; 4]);
    let mut crates: BTreeMap<&Path, Crate> = BTreeMap::new();
    for (of, path) in &found {
        let text = fs::read_to_string(path).unwrap();
        let (modules, faults) = crates.entry(of.strip_prefix(root).unwrap()).or_default();
        let lines = text.lines().count();
        assert!(lines <= LONGEST, "{}: {lines} lines", path.display());
        let mut before = "";
        for (number, line) in (1..).zip(text.lines()) {
            let place = format!("{}:{number}: {}", path.display(), line.trim());
            if opens_badly(before, line) {
                faults[3].push(place.clone());
            }
            if line.chars().count() > WIDEST {
                faults[2].push(place);
            }
            before = line;
        }
        if let Ok(module) = path.strip_prefix(of.join("src")) {
            let name = module.with_extension("").to_str().unwrap().replace('/', "::");
            let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
            let code = code.lines().map(|line| line.split("//").next().unwrap().to_owned() + "\n");
            modules.insert(name.trim_end_matches("::mod").to_owned(), code.collect());
        }
    }
    for (of, (modules, mut faults)) in crates {
        let imports = imports(&modules);
        faults[0] = in_circles(&imports);
        faults[1] = in_circles(&rooms(&imports));
        for (what, faults) in KINDS.iter().zip(faults) {
            assert!(faults.is_empty(), "{}: {what}: {faults:#?}", of.display());
        }
    }
}

/// The files of the library, the judge and the machine that name RISC-V in code and have another
/// subject: each has an entry in a list, or values of a table.
const LISTS: [&str; 8] = [
    "engine/src/arch/mod.rs",
    "engine/src/format/mod.rs",
    "machine/src/architecture.rs",
    "machine/src/profile/file.rs",
    "machine/workloads/src/hardware.rs",
    "machine/workloads/src/sequences/mod.rs",
    "walker/src/lib.rs",
    "walker/src/regime.rs",
];

#[test]
fn an_architecture_is_a_format_and_entries_in_lists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut found = Vec::new();
    for part in ["engine/src", "walker/src", "machine/src", "machine/workloads/src"] {
        files(&root.join(part), root, &mut found);
    }
    let names = ["riscv", "sv39", "sv48", "sv57"];
    let is_about = |text: &str| names.iter().any(|name| text.to_lowercase().contains(name));
    let named = found.iter().map(|(_, path)| path.strip_prefix(root).unwrap().to_str().unwrap());
    let mut others: Vec<&str> = named
        .filter(|path| !is_about(path))
        .filter(|path| {
            let text = fs::read_to_string(root.join(path)).unwrap();
            text.lines().any(|line| is_about(line.split("//").next().unwrap()))
        })
        .collect();
    others.sort_unstable();
    assert_eq!(others, LISTS);
}

#[test]
fn faults_are_found() {
    let text = |code: &str| code.to_owned();
    let modules = BTreeMap::from([
        (text("lib"), text("pub use a::{A, B};\n")),
        (text("a"), text("use crate::b::c::{D, E};\n")),
        (text("b"), text("")),
        (text("b::c"), text("use super::super::{A};\nuse core::fmt;\n")),
        (text("d"), text("use crate::A;\n")),
    ]);
    assert_eq!(in_circles(&imports(&modules)), ["a", "b::c"]);
    // Rooms may be in a circle where no files are.
    let modules = [("a::b", "c"), ("c", "a::d"), ("a::d", "e")];
    let imports = modules.map(|(from, to)| (text(from), BTreeSet::from([text(to)])));
    let imports = Imports::from(imports);
    assert!(in_circles(&imports).is_empty());
    assert_eq!(in_circles(&rooms(&imports)), ["a", "c"]);
    let bad = ["/// What it is", "    //! As, say", "/// The same of b", "/// Where: here"];
    assert!(bad.iter().all(|line| opens_badly("", line)));
    assert!(!opens_badly("", "/// Sounds, Assets") && !opens_badly("/// Is", "/// What it is"));
}
