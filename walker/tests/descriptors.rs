//! The walker against the table of descriptors written by hand, and what the table has to contain.

mod table;

use std::fmt::Write;
use table::{
    A4, A4W, A16, A16W, A64, A64W, E4, E5, G39, G48, G57, H4, H16W, H64, Means, N4, N5, REGIMES,
    S4, S4F, S4W, S16, S16W, S64, S64W, UNDER, V39, V48, V57, WRITTEN, X4, X5,
};
use tablewright_walker::{
    Access, Denied, Descriptor, Leaf, Permissions, Regime, decode, with_access_flag, with_dirty,
};

#[test]
fn every_row_means_what_the_manual_says() {
    let mut wrong = String::new();
    let each = |regime| table::rows().map(move |row| (regime, row));
    for (regime, row) in REGIMES.into_iter().flat_map(each) {
        if !table::holds(row, regime) {
            continue;
        }
        let &(_, level, raw, _) = row;
        let found = decode(regime, level, 0, Denied::NONE, raw);
        let expected = table::means(row);
        let same = match (&expected, &found) {
            (Means::Invalid, Descriptor::Invalid) => true,
            (Means::Table { pa, takes }, Descriptor::Table { pa: to, denied }) => {
                pa == to && *takes == taken(regime, *denied)
            }
            (Means::Leaf { leaf, .. }, Descriptor::Leaf(found)) => leaf == found,
            (Means::Reserved(rule), Descriptor::Reserved(why)) => why.starts_with(rule),
            _ => false,
        };
        if !same {
            writeln!(wrong, "{row:x?}\n  expected {expected:x?}\n  found    {found:x?}").unwrap();
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

/// Returns the access that `denied` takes away from leaves that permit everything: two of arm64,
/// because EL1 executes none that EL0 writes.
fn taken(regime: Regime, denied: Denied) -> Access {
    let (leaves, level): (&[u64], i8) = match regime {
        Regime::Arm64Stage1 { .. } | Regime::Arm64Stage1Sized { .. } => (&[0x403, 0x443], 3),
        Regime::Arm64El2 { .. } => (&[0x443], 3),
        Regime::Arm64Stage2 { .. } => (&[0x4c3], 3),
        Regime::Riscv { .. } => (&[0x1f], 0),
        // Bit 10 lets the user execute, with EPT; elsewhere it is ignored.
        _ => (&[0x407], 1),
    };
    let permitted = |leaf, denied| match decode(regime, level, 0, denied, leaf) {
        Descriptor::Leaf(leaf) => leaf.access,
        other => panic!("{other:x?}"),
    };
    let each = |class: fn(Access) -> Permissions| {
        let lost = |right: fn(Permissions) -> bool| {
            leaves.iter().any(|&leaf| {
                right(class(permitted(leaf, Denied::NONE)))
                    && !right(class(permitted(leaf, denied)))
            })
        };
        Permissions {
            read: lost(|p| p.read),
            write: lost(|p| p.write),
            execute: lost(|p| p.execute),
        }
    };
    Access { privileged: each(|access| access.privileged), user: each(|access| access.user) }
}

#[test]
fn a_leaf_permits_what_the_tables_above_it_leave() {
    for row in UNDER {
        let &(regime, tables, level, raw, expected) = row;
        let up = (regime.start_level() - regime.last_level()).signum();
        let mut denied = Denied::NONE;
        for (above, &table) in tables.iter().rev().enumerate() {
            let level = level + up * (above as i8 + 1);
            match decode(regime, level, 0, Denied::NONE, table) {
                Descriptor::Table { denied: more, .. } => denied = denied.union(more),
                other => panic!("{row:x?}: {other:x?}"),
            }
        }
        match decode(regime, level, 0, denied, raw) {
            Descriptor::Leaf(Leaf { access, .. }) => {
                assert_eq!(access, table::access(expected), "{row:x?}");
            }
            other => panic!("{row:x?}: {other:x?}"),
        }
    }
}

#[test]
fn hardware_writes_what_the_manual_says() {
    for row in WRITTEN {
        let &(regime, level, raw, used, written) = row;
        assert_eq!(with_access_flag(regime, level, raw), used, "{row:x?}");
        assert_eq!(with_dirty(regime, level, raw), written, "{row:x?}");
    }
}

#[test]
fn the_table_has_every_form_of_every_regime() {
    struct Forms {
        regime: Regime,
        leaf_levels: &'static [i8],
        table_levels: &'static [i8],
    }
    let forms = |regime, leaf_levels, table_levels| Forms { regime, leaf_levels, table_levels };
    for Forms { regime, leaf_levels, table_levels } in [
        forms(A4, &[1, 2, 3], &[0, 1, 2]),
        forms(A4W, &[0, 1, 2, 3], &[-1, 0, 1, 2]),
        forms(A16, &[2, 3], &[0, 1, 2]),
        forms(A16W, &[1, 2, 3], &[0, 1, 2]),
        forms(A64, &[2, 3], &[1, 2]),
        forms(A64W, &[1, 2, 3], &[1, 2]),
        forms(H4, &[1, 2, 3], &[0, 1, 2]),
        forms(H16W, &[1, 2, 3], &[0, 1, 2]),
        forms(H64, &[2, 3], &[2]),
        forms(X4, &[1, 2, 3], &[2, 3, 4]),
        forms(X5, &[1, 2, 3], &[2, 3, 4, 5]),
        forms(S4, &[1, 2, 3], &[1, 2]),
        forms(S4F, &[1, 2, 3], &[0, 1, 2]),
        forms(S4W, &[0, 1, 2, 3], &[0, 1, 2]),
        forms(S16, &[2, 3], &[2]),
        forms(S16W, &[1, 2, 3], &[0, 1, 2]),
        forms(S64, &[2, 3], &[2]),
        forms(S64W, &[1, 2, 3], &[1, 2]),
        forms(E4, &[1, 2, 3], &[2, 3, 4]),
        forms(E5, &[1, 2, 3], &[2, 3, 4, 5]),
        forms(N4, &[1, 2, 3], &[2, 3, 4]),
        forms(N5, &[1, 2, 3], &[2, 3, 4, 5]),
        forms(V39, &[0, 1, 2], &[1, 2]),
        forms(V48, &[0, 1, 2, 3], &[3]),
        forms(V57, &[0, 1, 3, 4], &[4]),
        forms(G39, &[0, 1, 2], &[2]),
        forms(G48, &[0, 1, 2, 3], &[3]),
        forms(G57, &[0, 1, 3, 4], &[4]),
    ] {
        let has = |wanted: &dyn Fn(i8, u64, Means) -> bool| {
            table::rows()
                .filter(|row| row.0 == regime)
                .any(|row| wanted(row.1, row.2, table::means(row)))
        };
        for &level in leaf_levels {
            let leaf = has(&|at, _, means| at == level && matches!(means, Means::Leaf { .. }));
            assert!(leaf, "{regime:?}: no leaf of level {level}");
        }
        for &level in table_levels {
            let table = has(&|at, _, means| at == level && matches!(means, Means::Table { .. }));
            assert!(table, "{regime:?}: no table of level {level}");
        }
        // A table restricts by what is set; on x86-64 by R/W and U/S where they are clear, in EPT
        // by each right.
        let restricting: &[(u32, u64)] = match regime {
            Regime::Arm64Stage1 { .. } | Regime::Arm64Stage1Sized { .. } => {
                &[(59, 1), (60, 1), (61, 1), (62, 1)]
            }
            Regime::Arm64El2 { .. } => &[(60, 1), (62, 1)],
            Regime::X86_64 { .. } | Regime::Npt { .. } => &[(1, 0), (2, 0), (63, 1)],
            Regime::Ept { .. } => &[(0, 0), (1, 0), (2, 0)],
            Regime::Arm64Stage2 { .. } | Regime::Riscv { .. } => &[],
        };
        for &(bit, value) in restricting {
            let table = has(&|_, raw, means| {
                raw >> bit & 1 == value && matches!(means, Means::Table { .. })
            });
            assert!(table, "{regime:?}: no table that restricts by bit {bit}");
        }
        assert!(has(&|_, _, means| means == Means::Invalid), "{regime:?}");
        let reserved = has(&|_, _, means| matches!(means, Means::Reserved(_)));
        assert!(reserved, "{regime:?}");
    }
}

#[test]
fn no_descriptor_makes_the_decoder_panic() {
    // Every pair of bits over each of the low forms, at every level of every regime.
    for regime in REGIMES {
        let (start, last) = (regime.start_level(), regime.last_level());
        for level in start.min(last)..=start.max(last) {
            for (a, b) in (0..64).flat_map(|a| (a..64).map(move |b| (a, b))) {
                for low in [0, 1, 3] {
                    let raw = 1 << a | 1 << b | low;
                    let found = decode(regime, level, 0, Denied::NONE, raw);
                    if let Descriptor::Leaf(leaf) = found {
                        assert_eq!((leaf.raw, leaf.level), (raw, level));
                    }
                    with_access_flag(regime, level, raw);
                    with_dirty(regime, level, raw);
                }
            }
        }
    }
}

/// A judge that shares code with the judged is none: the crate has no dependency, of no kind, and
/// takes in no source of another crate.
#[test]
fn the_walker_depends_on_nothing() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
    assert!(manifest.contains(r#"name = "tablewright-walker""#));
    assert!(!manifest.contains("dependencies"), "{manifest}");
    let mut sources = 0;
    for file in std::fs::read_dir(root.join("src")).unwrap() {
        let path = file.unwrap().path();
        let source = std::fs::read_to_string(&path).unwrap();
        for foreign in ["#[path", "include!", "extern crate"] {
            assert!(!source.contains(foreign), "{foreign} in {}", path.display());
        }
        sources += 1;
    }
    assert!(sources >= 5);
}
