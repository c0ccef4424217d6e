//! Litmus tests: every row over all interleavings, in every profile, and on the machine in virtual
//! time.
//!
//! `LITMUS_SEEDS` says how many seeds the machine is run with; a test that asks for a stale
//! translation may need a few hundred.

use std::fmt::Write as _;

use proptest::prelude::*;
use tablewright_machine::litmus::{
    FILES, MOST_STATES, Profile, Test, Verdict, built_in, explore, parse, simulate,
};

/// Whether an outcome is as the test says, where `silent` gives the reason why an allowed one is
/// not shown.
fn agrees(expected: Option<Verdict>, silent: bool, reached: bool, always: bool) -> bool {
    match expected {
        None => true,
        // A reason for what is shown after all is wrong too.
        Some(Verdict::Allowed) => reached != silent,
        Some(Verdict::Forbidden) => !reached,
        Some(Verdict::Required) => always,
    }
}

fn every(mut check: impl FnMut(&Test, Profile) -> String) {
    let mut wrong = String::new();
    for test in built_in().unwrap() {
        for &profile in test.profiles() {
            wrong += &check(&test, profile);
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

#[test]
fn every_verdict_holds_over_all_interleavings() {
    let mut states = 0;
    every(|test, profile| {
        let mut wrong = String::new();
        let explored = match explore(test, profile, MOST_STATES) {
            Ok(explored) => explored,
            Err(error) => return format!("{} ({profile}): {error}\n", test.name),
        };
        states += explored.states;
        for (ask, (outcome, reached)) in test.outcomes().zip(&explored.outcomes).enumerate() {
            let expected = test.expected(ask, profile);
            let silent = test.never_shown(ask).is_some();
            if !agrees(expected, silent, reached.witness.is_some(), reached.always) {
                let _ = writeln!(wrong, "{} ({profile}): {outcome}: not {expected:?}", test.name);
                for step in reached.witness.iter().flatten() {
                    let _ = writeln!(wrong, "    {step}");
                }
            }
        }
        wrong
    });
    println!("{states} states");
}

#[test]
fn the_machine_shows_what_is_allowed_and_nothing_else() {
    // What is forbidden is looked for on as many paths, and by the explorer on all; what is allowed
    // may be rare.
    let seeds = std::env::var("LITMUS_SEEDS");
    let seeds = seeds.ok().and_then(|seeds| seeds.parse().ok());
    let seeds: u64 = seeds.unwrap_or(200);
    every(|test, profile| {
        let asks = 0..test.outcomes().count();
        let silent = |ask| test.never_shown(ask).or(test.only_explored(ask)).is_some();
        let shown = |outcomes: &[(Option<u64>, bool)]| {
            asks.clone().all(|ask| {
                let allowed = test.expected(ask, profile) == Some(Verdict::Allowed);
                !allowed || silent(ask) || outcomes[ask].0.is_some()
            })
        };
        let mut simulated = simulate(test, profile, seeds).unwrap();
        if !shown(&simulated.outcomes) {
            simulated = simulate(test, profile, seeds.max(2_000)).unwrap();
        }
        let mut wrong = String::new();
        for (ask, outcome) in test.outcomes().enumerate() {
            let expected = test.expected(ask, profile);
            let (seed, always) = simulated.outcomes[ask];
            if let (Some(Verdict::Allowed), Some(why)) = (expected, test.only_explored(ask)) {
                println!("the explorer alone: {} ({profile}): {outcome}: {why}", test.name);
            }
            if !agrees(expected, silent(ask), seed.is_some(), always) {
                let name = &test.name;
                let _ = writeln!(
                    wrong,
                    "{name} ({profile}): {outcome}: not {expected:?}, seed {seed:?}"
                );
            }
        }
        wrong
    });
}

#[test]
fn runs_of_one_seed_are_alike() {
    for test in built_in().unwrap() {
        for &profile in test.profiles() {
            let run = || simulate(&test, profile, 20).unwrap().outcomes;
            assert_eq!(run(), run(), "{}", test.name);
        }
    }
}

#[test]
fn tests_have_a_source_and_a_verdict_for_every_profile() {
    let mut names = Vec::new();
    for test in built_in().unwrap() {
        assert!(!test.source.is_empty() && !test.about.is_empty(), "{}", test.name);
        for ask in 0..test.outcomes().count() {
            for &profile in test.profiles() {
                assert!(test.expected(ask, profile).is_some(), "{} ({profile})", test.name);
            }
        }
        names.push(test.name);
    }
    let before = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), before, "every test has a name of its own");
}

#[test]
fn errors_are_one_line_that_says_where() {
    let head = "test t\narch arm64\ndata a = 1\nmap x leaf(a)\nthread\n";
    for (line, what) in [
        ("STR 1, [y]", "'y' is neither a mapped address nor a location"),
        ("LDR r16, [x]", "a register, r0 to r15, is expected, and 'r16' stands there"),
        ("LDR r0, [x] addr(r1)", "r1 is used before it is written"),
        ("DMB", "SY, ISH, NSH, LD, ST, ISHLD, ISHST, NSHLD or NSHST? (the line ends)"),
        ("TLBI VAE3IS, x", "'TLBI VAE3' is not known here"),
        ("STR leaf(b), [pte(x)]", "'b' is no page: declare it with 'data'"),
        (
            "STR leaf(a, read), [pte(x)]",
            "'read' is no attribute: rw, ro, user, global, old, clean, dirty, and on arm64 dbm, \
             contiguous",
        ),
        ("STR leaf(a), [pmd(x)]", "leaf() is for pte(), and block() for pmd()"),
        ("INVLPG x", "'INVLPG' is no instruction of arm64 here"),
        ("LDR r0 [x]", "',' is expected, and '[' stands there"),
        ("LDR r0, [x] x", "'x' is too much"),
        ("ask 0:r0 = 1", "thread 0 has no 'r0'"),
        ("ask 1:r0 = 1", "there is no thread 1"),
        ("data b = 2", "'data' comes before the first thread"),
        ("expect allowed", "'expect' comes after an 'ask'"),
        ("LDR r0, [stage1(x)]", "'x' has no stage 1: say so, if only 'invalid'"),
        ("STR leaf(a, contiguous), [pte(y)]", "'y' is no address"),
    ] {
        let error = parse("f.litmus", &format!("{head}{line}\n")).unwrap_err();
        assert_eq!(error.to_string(), format!("f.litmus:6: {what}"));
    }
    let guest = "test t\narch arm64 guest\ndata a = 1\nmap p leaf(a)\nstage1 x leaf(p)\n";
    let run = "test t\ndata a = 1\ndata b = 2 at a + 3\nmap x leaf(a, contiguous)\nat y = x + 4\n";
    for (head, lines, what) in [
        (guest, "stage1 x invalid", "'x' has a stage 1 already"),
        (
            guest,
            "stage1 y leaf(a)",
            "stage 1 leads to an address of stage 2: leaf() of it, invalid or a number",
        ),
        (guest, "map q leaf(p)", "an address is mapped by leaf(), block(), invalid or a number"),
        (guest, "thread\nLDR r0, [p]", "'p' is an address of stage 2 alone"),
        (
            guest,
            "thread\nSTR leaf(a), [stage1(x)]",
            "stage1() holds the leaf() of an address of stage 2",
        ),
        (
            guest,
            "thread\nSTR leaf(p), [pte(p)]",
            "an entry of stage 2 leads to a page, not to an address",
        ),
        (guest, "stage1 y leaf(p, contiguous)", "a contiguous run of a guest is one of stage 2"),
        (
            run,
            "thread\nTLBI RVAE1IS, x, 3",
            "a range is of 2 to 64 pages, an even number, or of a multiple of 64 up to 512",
        ),
        (run, "thread\nTLBI RVAE1IS, x", "',' is expected, and the line ends"),
        (run, "thread\nTLBI VAE1, x, level 0", "a hint is of level 1, 2 or 3"),
        (
            run,
            "thread\nDSB SYNXS",
            "a DSB with nXS need not complete a TLBI without; 'DSB SY' does",
        ),
        (run, "stage1 x invalid", "'stage1' is that of a guest: 'arch arm64 guest'"),
        (run, "map y leaf(a)", "'y' is mapped already"),
        (run, "data c = 1 at b + 1", "'b' is behind another page"),
        (run, "data c = 1 at a + 16", "a page is 1 to 15 pages behind another"),
        (
            run,
            "thread\nSTR leaf(b, contiguous), [pte(y)]",
            "'b' is not the page for this place in a run",
        ),
        (run, "thread\nSTR block(a, contiguous), [pmd(y)]", "a contiguous run is of pages"),
        (
            run,
            "thread\nLDR r0, [x]\nask 0:r0 = fault(stage2)",
            "'stage2' is for guests with a stage 1",
        ),
        (run, "thread\nSVC\nSVC", "a handler has no handler of its own: 'ERET' comes first"),
        (
            run,
            "thread user\nTLBI VAE1, x",
            "'TLBI' is not for an application, which comes to EL1 by 'SVC'",
        ),
        (
            run,
            "thread user\nSVC\nERET\nERET",
            "'ERET' is not for an application, which comes to EL1 by 'SVC'",
        ),
    ] {
        let error = parse("f.litmus", &format!("{head}{lines}\n")).unwrap_err();
        let line = head.lines().count() + lines.lines().count();
        assert_eq!(error.to_string(), format!("f.litmus:{line}: {what}"));
    }
    for (text, message) in [
        ("", "f.litmus:1: no test"),
        ("thread\n", "f.litmus:1: a file starts with 'test NAME'"),
        ("test t\n", "f.litmus:1: test 't' has no thread"),
        ("test t\nthread\nISB\n", "f.litmus:1: test 't' asks nothing"),
        ("test t\nspace A id 65536\n", "f.litmus:2: an identifier has 16 bits, and 65536 has more"),
        (
            "test t\ndata a = 99999999999999999999\n",
            "f.litmus:2: '99999999999999999999' is no number of 64 bits",
        ),
    ] {
        assert_eq!(parse("f.litmus", text).unwrap_err().to_string(), message);
    }
}

/// Whatever it is given, the parser says yes or one line. What it takes can be tried.
fn swallow(text: &str) {
    match parse("random.litmus", text) {
        Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
        Ok(tests) => {
            for test in tests {
                for &profile in test.profiles() {
                    let _ = explore(&test, profile, 200);
                    let _ = simulate(&test, profile, 2);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn garbage_is_refused_in_one_line(text in "(?s).{0,200}") {
        swallow(&text);
        swallow(&format!("test t\n{text}"));
    }

    #[test]
    fn mutations_are_refused_or_tried(
        file in 0..FILES.len(),
        number in any::<prop::sample::Index>(),
        line in any::<prop::sample::Index>(),
        token in any::<prop::sample::Index>(),
        other in "pte\\(x\\)|pmd\\(x\\)|invalid|block\\(a\\)|table\\(pmd\\(x\\)\\)|r0|\\[x\\]|x|0|\
                  65535|leaf\\(a, old\\)|DSB|LD|,|",
        way in 0..4,
    ) {
        // One test of a file, with a word in it changed, dropped, doubled, or a line moved.
        let tests: Vec<&str> = FILES[file].1.split("\ntest ").skip(1).collect();
        let test = format!("test {}", number.get(&tests));
        let mut lines: Vec<String> = test.lines().map(str::to_owned).collect();
        let at = line.index(lines.len());
        let mut words: Vec<String> = lines[at].split(' ').map(str::to_owned).collect();
        let word = token.index(words.len());
        match way {
            0 => words[word] = other,
            1 => { words.remove(word); }
            2 => { let again = words[word].clone(); words.insert(word, again); }
            _ => {}
        }
        lines[at] = words.join(" ");
        if way == 3 {
            let line = lines.remove(at);
            let to = token.index(lines.len() + 1);
            lines.insert(to, line);
        }
        swallow(&lines.join("\n"));
    }
}
