//! Tests in herd's notation: their outcomes are herd's.

use std::collections::{BTreeMap, BTreeSet};

use tablewright_machine::litmus::{Profile, Test, built_in, explore, herd_outcomes, parse};

/// Tests of our own in herd's notation, for what its catalogue is made of.
const SAMPLES: [(&str, &str); 14] = [
    ("again", include_str!("herd/again.litmus")),
    ("application", include_str!("herd/application.litmus")),
    ("arithmetic", include_str!("herd/arithmetic.litmus")),
    ("atomics", include_str!("herd/atomics.litmus")),
    ("break-range", include_str!("herd/break-range.litmus")),
    ("choose", include_str!("herd/choose.litmus")),
    ("depends", include_str!("herd/depends.litmus")),
    ("dirty-compare", include_str!("herd/dirty-compare.litmus")),
    ("flag-late", include_str!("herd/flag-late.litmus")),
    ("handler-jumps", include_str!("herd/handler-jumps.litmus")),
    ("handler-retry", include_str!("herd/handler-retry.litmus")),
    ("handler-skips", include_str!("herd/handler-skips.litmus")),
    ("pointer", include_str!("herd/pointer.litmus")),
    ("release-fault", include_str!("herd/release-fault.litmus")),
];

/// The ends that herd7 prints of them: test, profile, an end.
const OUTCOMES: &str = include_str!("herd/outcomes.tsv");

/// The published tests with translation tables: name, herd's verdict in base and with FEAT_ETS2,
/// and whether all outcomes are the same here (herdtools7 of 2026-08-21, 5feffe4e8).
const CATALOGUE: &str = include_str!("herd/catalogue.tsv");

fn read(name: &str, text: &str) -> Test {
    parse(&format!("{name}.litmus"), text).unwrap().remove(0)
}

#[test]
fn samples_end_as_herd_says() {
    let mut wanted: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    for line in OUTCOMES.lines().skip(1) {
        let parts: Vec<&str> = line.split('\t').collect();
        let key = (parts[0].to_owned(), parts[1].to_owned());
        wanted.entry(key).or_default().insert(parts[2].to_owned());
    }
    for (name, text) in SAMPLES {
        let test = read(name, text);
        assert!(test.is_herd());
        for &profile in test.profiles() {
            let explored = explore(&test, profile, 100_000).unwrap();
            let key = (name.to_owned(), profile.to_string());
            assert_eq!(Some(&explored.finals), wanted.get(&key), "{name} ({profile})");
            wanted.remove(&key);
        }
    }
    assert!(wanted.is_empty(), "outcomes of tests that are not tried: {wanted:?}");
}

/// The catalogue: how much of it is read, and that nothing that is read differs.
#[test]
fn nothing_in_the_catalogue_differs() {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for line in CATALOGUE.lines().skip(1) {
        let here = line.split('\t').next_back().unwrap();
        *counts.entry(here.split(':').next().unwrap()).or_default() += 1;
    }
    let none = "herd has no answer in a minute";
    assert_eq!(counts, BTreeMap::from([("same", 958), ("refused", 27), (none, 19)]));
}

/// A test of ours that is derived from one of the catalogue asks the same, but for these, which
/// ask for the opposite or for more.
const ASKS_OTHERWISE: [&str; 6] = [
    "CoWinvT+vmalle1 ",
    "LDRaf0-noHA ",
    "MP+shoot-noscope+dmbld ",
    "STR-db0-noHD ",
    "clear-accessed ",
    "clear-dirty ",
];

#[test]
fn derived_tests_have_the_verdict_of_the_catalogue() {
    let verdicts: BTreeMap<&str, [&str; 2]> = CATALOGUE
        .lines()
        .skip(1)
        .map(|line| {
            let parts: Vec<&str> = line.split('\t').collect();
            (parts[0], [parts[1], parts[2]])
        })
        .collect();
    let (mut compared, mut wrong) = (0, Vec::new());
    for test in built_in().unwrap() {
        let Some(of) = test.source.strip_prefix("H ") else { continue };
        let Some(theirs) = verdicts.get(of) else { continue };
        for (profile, &theirs) in [Profile::Base, Profile::Ets2].into_iter().zip(theirs) {
            let Some(ours) = test.expected(0, profile) else { continue };
            compared += 1;
            if theirs != "-" && ours.to_string() != theirs {
                wrong.push(format!("{} ({profile}): {ours}, and herd: {theirs}", test.name));
            }
        }
    }
    wrong.retain(|line| !ASKS_OTHERWISE.iter().any(|name| line.starts_with(name)));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(compared > 100, "{compared}");
}

#[test]
fn what_cannot_be_read_is_refused_with_its_line() {
    let with = |initial: &str, code: &str| {
        format!("AArch64 t\n{{\n{initial}\n}}\n P0 ;\n {code} ;\nexists 0:X0=1\n")
    };
    for (text, line, what) in [
        (with("0:X1=x;", "LDXR W0,[X1]"), 6, "'LDXR W0,[X1]' is not read"),
        (with("0:X1=x;", "UDF #0"), 6, "'UDF #0' is not read"),
        (with("0:X1=x;", "LDR W0,[X2]"), 6, "X2 holds no address"),
        (with("0:X1=x;", "B L0"), 6, "there is no label 'L0'"),
        (with("0:X1=x;", "TLBI VAE1IS,X1"), 6, "a TLBI takes the number of a page"),
        (with("0:X1=x;", "ERET"), 6, "ERET stands in a handler"),
        (with("0:X1=x;", "CSET W0,EQ"), 6, "nothing has been compared"),
        (with("0:X1=x;", "ADD X2,X1,#8"), 6, "an address is computed, and not by adding 0"),
        (with("0:X1=(valid:0);", "NOP"), 3, "an entry in a register needs oa:PA(x)"),
        (with("int x[2]={1,1};", "NOP"), 3, "an array is not read"),
        (with("[PTE(x)]=(attrs:(nGnRnE));", "NOP"), 3, "attrs is 0 or 1"),
        (with("0:X1=x", "NOP | NOP"), 6, "a row has 1 cells at most"),
        ("AArch64 t\n".to_owned(), 1, "a test needs '{' and what holds at first"),
        (
            "AArch64 t\n{\n}\n P1 ;\nexists 0:X0=1\n".to_owned(),
            4,
            "threads are P0 to P3, without a gap",
        ),
        ("AArch64 t\nTTHM=HX\n{\n}\n P0 ;\nexists 0:X0=1\n".to_owned(), 2, "'HX' is not HA or HD"),
        (
            "AArch64 t\n{\n}\n P0 ;\n NOP ;\nforsome 0:X0=1\n".to_owned(),
            6,
            "'forsome 0:X0=1' is not read",
        ),
        (
            "AArch64 t\n{\n}\n P0 ;\n NOP ;\nexists 0:X0=1 /\\\n".to_owned(),
            6,
            "the test ends too early",
        ),
    ] {
        let error = parse("t.litmus", &text).expect_err(&text);
        assert_eq!((error.line, error.what.as_str()), (line, what), "{text}");
    }
}

/// A few lines that each use what the line before has computed twice took all memory.
#[test]
fn what_is_computed_of_too_much_is_refused() {
    let lines = |line: &dyn Fn(usize) -> String| (0..40).map(line).collect::<String>();
    for (head, body) in [
        ("LDR X0,[X1]", lines(&|_| " ADD X0,X0,X0 ;\n".to_owned())),
        ("MOV X0,#0", lines(&|n| format!(" CBZ X0,L{n} ;\nL{n}: NOP ;\n"))),
    ] {
        let text = format!("AArch64 t\n{{\n0:X1=x;\n}}\n P0 ;\n {head} ;\n{body}exists 0:X0=1\n");
        let error = parse("t.litmus", &text).unwrap_err();
        assert_eq!(error.what, "a value is computed of more than 1000");
    }
    let stores = " STR X1,[X2] ;\n".repeat(31);
    let text = format!("AArch64 t\n{{\n0:X2=x;\n}}\n P0 ;\n{stores}exists 0:X0=1\n");
    let error = parse("t.litmus", &text).unwrap_err();
    assert_eq!(error.what, "P0 has more than 30 instructions");
}

/// Cut, doubled and changed texts are refused, or tried: none ends the program.
#[test]
fn damaged_texts_end_nothing() {
    let mut state = 42u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let mut tried = 0;
    for round in 0..1_500 {
        let mut text: Vec<u8> = SAMPLES[round % SAMPLES.len()].1.bytes().collect();
        for _ in 0..=random(3) {
            let at = random(text.len());
            let other = text[random(text.len())];
            match random(4) {
                0 => text[at] = other,
                1 => drop(text.remove(at)),
                2 => text.insert(at, other),
                _ => {
                    let end = (at + random(40)).min(text.len());
                    let part = text[at..end].to_vec();
                    text.splice(at..at, part);
                }
            }
        }
        let Ok(text) = String::from_utf8(text) else { continue };
        if let Ok(tests) = parse("damaged.litmus", &text) {
            for test in tests {
                let _ = explore(&test, Profile::Base, 2_000);
                tried += 1;
            }
        }
    }
    assert!(tried > 100, "{tried}");
}

#[test]
fn what_herd_prints_is_read() {
    assert_eq!(herd_outcomes("nothing"), None);
    assert_eq!(herd_outcomes("States 2\n0:X0=1;\n0:X0=1;\nOk\n"), None);
    let ends = herd_outcomes("States 1\n [x]=1;  Fault(P0:L0,x,D-MMU:Permission); 0:X1=2;\n");
    let one = "0:X1=2; Fault(P0:L0,x,MMU:Permission); [x]=1".to_owned();
    assert_eq!(ends, Some(BTreeSet::from([one])));
}
