//! Files that are read, refused, and written again.

use proptest::prelude::*;
use tablewright_machine::*;

const LEAST: &str = r#"
name = "least"
description = ""
[system]
core = ""
kind = "vm"
ram_gib = 1
[architecture]
format = "arm64"
"#;

fn with(lines: &str) -> Result<Profile, ProfileError> {
    Profile::parse(&format!("{LEAST}{lines}"), "f")
}

fn refused(lines: &str) -> String {
    with(lines).unwrap_err().to_string()
}

#[test]
fn what_is_left_out_is_the_conservative_choice() {
    let profile = with("").unwrap();
    let regime = Regime::Arm64Stage1 { granule: Granule::K4, wide: false };
    assert_eq!(profile.architecture, Architecture::arm64(regime));
    assert_eq!(profile.costs, Costs::default());
    let x86 = LEAST.replace("arm64", "x86-64");
    assert_eq!(Profile::parse(&x86, "f").unwrap().architecture, Architecture::x86_64(4));
}

#[test]
fn costs_are_exact_to_the_picosecond_or_refused() {
    for (text, ps) in [
        ("0", 0),
        ("0.001", 1),
        ("2.7", 2_700),
        ("15.613", 15_613),
        ("1_734.6", 1_734_600),
        ("1e3", 1_000_000),
        ("999_999_999.999", 999_999_999_999),
        ("1_000_000_000", 1_000_000_000_000),
        ("-0.0", 0),
    ] {
        let costs = with(&format!("[costs]\nlock_take = {text}")).unwrap().costs;
        assert_eq!(costs.lock_take, Time::ps(ps), "{text}");
    }
    for text in [
        "-1",
        "-0.001",
        "nan",
        "-nan",
        "inf",
        "0.0001",
        "2.7000001",
        "1_000_000_000.001",
        "1_000_000_001",
        "9_223_372_036_854_775_807",
    ] {
        let message = refused(&format!("[costs]\nentry = {text}"));
        assert!(
            message.starts_with("f: line 11: costs.entry: ") && message.contains("not a cost"),
            "{message}"
        );
    }
    let message = refused("[costs]\nentry = \"1\"");
    assert!(message.starts_with("f: line 11: costs.entry: invalid type"));
}

#[test]
fn what_is_wrong_is_named_in_one_line() {
    for (lines, says) in [
        ("bbm = 4", "architecture.bbm: 4"),
        ("bbm = 256", "line 10: architecture.bbm: "),
        ("bmb = 1", "line 10: architecture.bmb: unknown field `bmb`"),
        ("granule = \"8K\"", "line 10: architecture.granule: unknown variant"),
        ("address_bits = 57", "architecture.address_bits: 57: this format has [48, 52]"),
        ("ordering = \"x86\"", "architecture.ordering: arm64 has"),
        ("hardware_dirty = true", "architecture.hardware_dirty: "),
        ("tlb_sets = 3", "architecture.tlb_sets: 3: a power of two"),
        ("tlb_ways = 0", "architecture.tlb_ways: 0"),
        ("walk_cache = 131072", "architecture.walk_cache: 131072"),
        ("[costs]\nentri = 1", "line 11: costs.entri: unknown field `entri`"),
        ("[cots]", "line 10: cots: unknown field `cots`"),
        ("[[fitted_on]]\nsystm = \"a\"", "line 11: fitted_on[0].systm: unknown field"),
        ("[[unexplained]]", "line 10: unexplained[0]: missing field `what`"),
        (
            "[[provenance]]\nof = [\"costs.entri\"]\nsource = \"fitted\"\nnote = \"\"",
            "provenance.of: there is no key costs.entri",
        ),
        (
            "[[provenance]]\nof = [\"costs.bus\", \"costs.bus\"]\nsource = \"fitted\"\nnote = \"\"",
            "provenance.of: costs.bus is named twice",
        ),
        (
            "[[provenance]]\nof = []\nsource = \"guessed\"\nnote = \"\"",
            "line 12: provenance[0].source: unknown variant `guessed`",
        ),
        ("= 1", "line 10: "),
        ("idc = true\nidc = true", "line 11: "),
    ] {
        let message = refused(lines);
        assert!(message.starts_with(&format!("f: {says}")), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
    for (from, to, says) in [
        ("least", "Least", "f: name: 'Least'"),
        ("\"least\"", "\"\"", "f: name: ''"),
        ("ram_gib = 1", "ram_gib = 0", "f: system.ram_gib: 0"),
        ("ram_gib = 1", "", "f: line 4: system: missing field `ram_gib`"),
        ("ram_gib = 1", "ram_gib = 1\ncpus = 1025", "f: system.cpus: 1025"),
        (
            "format = \"arm64\"",
            "format = \"x86-64\"\ngranule = \"64K\"",
            "f: architecture.granule: ",
        ),
    ] {
        let message = Profile::parse(&LEAST.replace(from, to), "f").unwrap_err().to_string();
        assert!(message.starts_with(says), "{message}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let message = |name: &str| Profile::load(name).unwrap_err().to_string();
    assert!(message("./neutral").starts_with("./neutral: "));
    assert!(message("altra").contains("ampere-altra-vm-64g, "));
    assert!(message("/").starts_with("/: "));
    assert!(message("").starts_with("no profile ''"));
}

/// Built-in profiles keep what they say of themselves: each cost that one has comes from somewhere,
/// and what is said to be fitted has rows that it was fitted on.
#[test]
fn built_in_profiles_say_where_everything_comes_from() {
    for name in Profile::built_in() {
        let profile = Profile::load(name).unwrap();
        assert_eq!(profile.name, name);
        for cost in Cost::all() {
            let known = profile.provenance_of(cost.key());
            assert!(
                known.is_some() || cost.get(&profile.costs) == Time::ZERO,
                "{name}: {}",
                cost.key()
            );
        }
        let fitted = |entry: &Provenance| entry.source == Source::Fitted;
        assert_eq!(profile.provenance.iter().any(fitted), !profile.fitted_on.is_empty(), "{name}");
        assert_eq!(Profile::parse(&profile.to_toml(), "again").unwrap(), profile);
    }
}

/// On at most two rows of its own column: the others are tests of the model.
#[test]
fn no_column_of_the_linear_map_is_fitted_on_more_than_two_rows() {
    for name in Profile::built_in() {
        let profile = Profile::load(name).unwrap();
        let map_mem = |row: &&RowSelector| row.metric.is_none();
        let of_map_mem: Vec<_> = profile.fitted_on.iter().filter(map_mem).collect();
        assert!(of_map_mem.len() <= 2, "{name}");
        assert!(
            of_map_mem.iter().all(|row| row.configuration.is_some()
                && profile.system.published_as.contains(&row.system)),
            "{name}"
        );
    }
}

/// Pieces of profiles, right and wrong, in any order.
fn pieces() -> impl Strategy<Value = String> {
    let key = prop_oneof![
        "name|description|format|bbm|entry|of|source|note|system|what|ruled_out|tlb_sets",
        "[a-z_.\"]{0,8}"
    ];
    let value = prop_oneof![
        "-?[0-9]{1,20}(\\.[0-9]{0,5})?(e[0-9]{1,4})?|nan|inf|true",
        "\"(arm64|x86-64|4K|vm|fitted|costs\\.entry|.{0,4})\"",
        "\\[(\"[a-z.]{0,12}\",?){0,3}\\]",
        ".{0,6}",
    ];
    let header = prop_oneof![
        "\\[\\[?(costs|system|architecture|provenance|fitted_on|unexplained)\\]?\\]",
        Just(LEAST.to_owned()),
    ];
    let line =
        prop_oneof![(key, value).prop_map(|(key, value)| format!("{key} = {value}")), header];
    prop::collection::vec(line, 0..8).prop_map(|lines| lines.join("\n"))
}

proptest! {
    #[test]
    fn no_text_panics_and_every_refusal_is_one_line(text in prop_oneof![pieces(), ".*"]) {
        match Profile::parse(&text, "f") {
            Ok(profile) => prop_assert_eq!(Profile::parse(&profile.to_toml(), "g").unwrap(),
                profile),
            Err(error) => prop_assert!(!error.to_string().contains('\n')),
        }
    }

    #[test]
    fn every_cost_comes_back_exactly(ps in 0..=Time::s(1).as_ps(),
        which in 0..Cost::all().count()) {
        let mut profile = with("").unwrap();
        let cost = Cost::all().nth(which).unwrap();
        cost.set(&mut profile.costs, Time::ps(ps));
        let again = Profile::parse(&profile.to_toml(), "f").unwrap();
        prop_assert_eq!(again.costs, profile.costs);
    }
}
