//! What may be typed wrong, and what the program says of it: one line that names what and where, exit status 2, and nothing done.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Files that are there when the lines are run.
const FILES: &[(&str, &[u8])] = &[
    ("short.toml", b"name = \"x\"\n"),
    ("bad.csv", b"a,b\n1,2\n"),
    ("bytes", b"\xff\xfe"),
    ("empty", b""),
    ("other.json", b"{\"a\":1}"),
    ("list.json", b"[]"),
    ("cut.twr", b"TWRECORD"),
    ("bad.iomem", b"zz-yy : System RAM\n"),
    ("noram.iomem", b"0-fff : Reserved\n"),
    ("bad.litmus", b"test t\nthread\n    FLY r0\n"),
];

/// Command lines, and a part of what is said of each.
#[rustfmt::skip]
const WRONG: &[(&str, &str)] = &[
    ("fly", "unrecognized subcommand 'fly'"),
    ("--fly", "unexpected argument '--fly' found"),
    ("map-mem --fly", "unexpected argument '--fly' found"),
    ("map-mem extra", "unexpected argument 'extra' found"),
    ("map-mem --ram", "a value is required for '--ram <SIZE>' but none was supplied"),
    ("map-mem --ram 0", "a size must be more than zero"),
    ("map-mem --ram -5G", "a size is a whole number and a unit, such as 64G or 512M"),
    ("map-mem --ram five", "a size is a whole number and a unit, such as 64G or 512M"),
    ("map-mem --ram 1X", "unknown unit 'X'"),
    ("map-mem --ram 1.5G", "unknown unit '.5G'"),
    ("map-mem --ram 99999999999G", "larger than any address"),
    ("map-mem --ram 1000", "--ram of 1000 bytes is not a multiple of the page size, 4 KiB"),
    ("map-mem --ram 1G --iomem noram.iomem", "the argument '--ram <SIZE>' cannot be used with '--iomem <FILE>'"),
    ("map-mem --iomem", "a value is required for '--iomem <FILE>' but none was supplied"),
    ("map-mem --iomem missing", "missing: No such file or directory"),
    ("map-mem --iomem dir", "dir: Is a directory"),
    ("map-mem --iomem empty", "empty: empty; expected lines such as '00100000-bfffffff : System RAM'"),
    ("map-mem --iomem bytes", "bytes: line 1: expected 'START-END : NAME' in hexadecimal, found"),
    ("map-mem --iomem bad.iomem", "bad.iomem: line 1: expected 'START-END : NAME' in hexadecimal, found"),
    ("map-mem --iomem noram.iomem", "noram.iomem: no 'System RAM' in 1 line"),
    ("map-mem --ram 1G --rounds 0", "0 is not in 1..=10000"),
    ("map-mem --ram 1G --rounds few", "invalid digit found in string"),
    ("map-mem --ram 1G --rounds 4294967296", "4294967296 is not in 1..=10000"),
    ("map-mem --ram 1G --rounds -1", "unexpected argument '-1' found"),
    ("map-mem --ram 1G --format vax", "invalid value 'vax' for '--format <FORMAT>'"),
    ("map-mem --ram 1G --granule 8K", "invalid value '8K' for '--granule <GRANULE>'"),
    ("map-mem --ram 1G --format x86-64 --granule 16K", "x86-64 has pages of 4K only: leave out --granule, or use --format arm64"),
    ("map-mem --ram 1G --address-bits 49", "x86-64 has no addresses of 49 bits: --address-bits is 48 (four levels)"),
    ("map-mem --ram 1G --format arm64 --address-bits 57", "arm64 has no addresses of 57 bits: --address-bits is 48 or 52"),
    ("map-mem --ram 1G --format x86-64 --address-bits 52", "x86-64 has no addresses of 52 bits: --address-bits is 48 (four levels)"),
    ("map-mem --ram 1G --on moon", "invalid value 'moon' for '--on <ON>'"),
    ("map-mem --ram 1G --on native --machine neutral", "--machine goes with --on machine"),
    ("map-mem --ram 1G --step all", "--step goes with --on machine"),
    ("map-mem --ram 1G --threads 2", "--threads goes with --on machine"),
    ("map-mem --ram 1G --on machine", "--on machine needs --machine with the path of a profile"),
    ("map-mem --ram 1G --on machine --machine none-such", "no profile 'none-such': give the path of a file"),
    ("map-mem --ram 1G --on machine --machine short.toml", "short.toml: line 1: missing field `description`"),
    ("map-mem --ram 1G --on machine --machine bytes", "bytes: stream did not contain valid UTF-8"),
    ("map-mem --ram 1G --on machine --machine neutral --step none-such", "invalid value 'none-such' for '--step <STEP>'"),
    ("map-mem --ram 1G --on machine --machine neutral --steps a,b", "no step is called 'a'"),
    ("map-mem --ram 1G --on machine --machine neutral --step all --steps base", "the argument '--step <STEP>' cannot be used with '--steps <STEPS>'"),
    ("map-mem --ram 1G --on machine --machine neutral --threads 0", "0 is not in 1..=64"),
    ("map-mem --ram 1G --on machine --machine neutral --rounds 3", "--rounds goes with --on native: a profile says what its machine has,"),
    ("map-mem --ram 1G --on machine --machine x86-416-vcpus --format arm64", "--format goes with --on native: a profile says what its machine has,"),
    ("page-table-test -m none", "no such mode"),
    ("page-table-test -s none", "no such backing"),
    ("page-table-test -b 0", "a size must be more than zero"),
    ("page-table-test -b 1", "-b 1 B: not a multiple of the 4 KiB that anonymous has"),
    ("page-table-test -b 64T", "-b 64 TiB: P40V48_4K has addresses for 1 TiB"),
    ("page-table-test -v 0", "0 is not in 1..=65535"),
    ("page-table-test -v 100000", "100000 is not in 1..=65535"),
    ("page-table-test -v many", "invalid digit found in string"),
    ("page-table-test -p 1", "-p 0x1: not a multiple of 1 GiB"),
    ("page-table-test -p 0x", "unknown unit 'x'"),
    ("page-table-test --how none", "invalid value 'none' for '--how <HOW>'"),
    ("page-table-test --scale 0", "0 is not in 1..18446744073709551615"),
    ("page-table-test --scale 3", "--scale 3: 1 GiB of anonymous_hugetlb_1gb is no multiple of 1 GiB"),
    ("page-table-test --machine none-such", "no profile 'none-such': give the path of a file"),
    ("page-table-test --on native --how before", "--how: only tablewright runs natively, with all phases"),
    ("page-table-test --on moon", "invalid value 'moon' for '--on <ON>'"),
    ("page-table-test --rounds 3", "--rounds: only with --on kvm"),
    ("page-table-test --ring", "--ring: only with --on kvm"),
    ("page-table-test --stalls", "--stalls: only with --on kvm"),
    ("page-table-test -s anonymous_hugetlb_3gb", "no such backing"),
    ("page-table-test --on kvm --scale 2", "--scale: not with --on kvm"),
    ("page-table-test --on kvm --machine neutral", "--machine: not with --on kvm"),
    ("page-table-test --on native --machine neutral", "--machine: not with --on native"),
    ("write-protect -b 0", "a size must be more than zero"),
    ("write-protect -b 4097", "-b 4097: not a multiple of 4 KiB"),
    ("write-protect -b 64T", "-b 64 TiB: at most 32 GiB in pages of 4 KiB; --sizes takes more"),
    ("write-protect -v 0", "0 is not in 1..=65535"),
    ("write-protect -s anonymous", "-s: only with --on kvm"),
    ("write-protect --format vax", "invalid value 'vax' for '--format <FORMAT>'"),
    ("write-protect --how none", "invalid value 'none' for '--how <HOW>'"),
    ("write-protect --sizes 0", "a size must be more than zero"),
    ("write-protect --sizes 1X", "unknown unit 'X'"),
    ("write-protect --sizes 1G --plot a.svg", "unexpected argument '--plot' found"),
    ("write-protect --machine none-such", "no profile 'none-such': give the path of a file"),
    ("tlb-flush -t 0", "0 is not in 1..=65535"),
    ("tlb-flush -r 0", "0 is not in 1..=100000"),
    ("tlb-flush -c 0", "0 is not in 1..=10000"),
    ("tlb-flush -p 0", "0 is not in 1..=1073741824"),
    ("tlb-flush -v 0", "0 is not in 1..=65535"),
    ("tlb-flush -v 100000", "100000 is not in 1..=65535"),
    ("tlb-flush --cpus 0", "0 is not in 1..=65535"),
    ("tlb-flush --cpus 32", "--cpus 32: 16 vCPUs run on no more than as many"),
    ("tlb-flush --slice 0", "0 is not in 1..=1000000"),
    ("tlb-flush --ranges 0", "0 is not in 1..=509"),
    ("tlb-flush --how none", "invalid value 'none' for '--how <HOW>'"),
    ("tlb-flush --on moon", "invalid value 'moon' for '--on <ON>'"),
    ("tlb-flush --file short.toml", "--file: only with --on native"),
    ("tlb-flush --on native --file dir", "--file dir: it has 4096 bytes, and 67149824 bytes are mapped"),
    ("tlb-flush --on native --how before", "invalid value 'before' for '--how <HOW>'"),
    ("tlb-flush --on native --machine neutral", "--machine: not with --on native"),
    ("tlb-flush --from other.json", "other.json: line 1: missing field `vcpus` at line 1 column 7"),
    ("tlb-flush --from missing", "missing: No such file or directory"),
    ("tlb-flush --from list.json", "list.json: line 1: invalid length 0, expected struct Line with 5"),
    ("tlb-flush --on native --machine neutral", "--machine: not with --on native"),
    ("tlb-flush --on native --how list", "--how: not with --on native"),
    ("tlb-flush --on native --cpus 2", "--cpus: not with --on native"),
    ("dirty-log -v 0", "0 is not in 1..=65535"),
    ("dirty-log -v 1000000", "1000000 is not in 1..=65535"),
    ("dirty-log -i 0", "0 is not in 1..=1000"),
    ("dirty-log -w 101", "101 is not in 0..=100"),
    ("dirty-log -w -1", "unexpected argument '-1' found"),
    ("dirty-log -x 0", "0 is not in 1..=1024"),
    ("dirty-log -x 1000000", "1000000 is not in 1..=1024"),
    ("dirty-log -r x", "invalid digit found in string"),
    ("dirty-log -b 0", "a size must be more than zero"),
    ("dirty-log -b 1", "-b 1 B: not a multiple of the 4 KiB that anonymous has"),
    ("dirty-log -p 1", "-p 0x1: not a multiple of 2 MiB"),
    ("dirty-log --how none", "invalid value 'none' for '--how <HOW>'"),
    ("dirty-log --scale 0", "0 is not in 1..18446744073709551615"),
    ("dirty-log --machine kunpeng-920 --how after", "--how after: tables are taken apart so on x86; kunpeng-920 is arm64"),
    ("dirty-log --machine kunpeng-920 -n", "-n: kunpeng-920 is arm64, and that is x86's"),
    ("dirty-log --machine kunpeng-920 --log modification", "--log modification: kunpeng-920 is arm64, and that is x86's"),
    ("dirty-log --log modification --all-set", "--all-set: not with --log modification"),
    ("dirty-log --log none", "invalid value 'none' for '--log <LOG>'"),
    ("dirty-log --all-set -g", "--all-set: not with -g"),
    ("dirty-log -c 1 -v 3", "-c: 1 CPUs for 3 vCPUs: one for each"),
    ("dirty-log -c 0,0 -v 2", "-c 0: twice, and each CPU of the machine runs one"),
    ("dirty-log -c 128 -v 1 --machine kunpeng-920", "-c 128: kunpeng-920 has CPUs 0 to 127"),
    ("dirty-log -c x", "invalid digit found in string"),
    ("dirty-log --on kvm --log modification", "--log: not with --on kvm"),
    ("dirty-log --plot", "a value is required for '--plot <FILE>' but none was supplied"),
    ("dirty-log --plot dir", "--plot dir: is a directory"),
    ("dirty-log --plot missing/a.svg", "--plot missing/a.svg: No such file or directory"),
    ("dirty-log --predict neutral", "--predict: only with --on kvm"),
    ("dirty-log --ring 3", "--ring: only with --on kvm"),
    ("dirty-log --on kvm --machine neutral", "--machine: not with --on kvm"),
    ("dirty-log --on kvm --threads 2", "--threads: not with --on kvm"),
    ("dirty-log --on kvm -g --all-set", "--all-set: only with manual protection, which -g does without"),
    ("dirty-log --on kvm --all-set --ring", "the argument '--all-set' cannot be used with '--ring [<ENTRIES>]'"),
    ("write-protect --on kvm --ring", "--ring: not with --on kvm"),
    ("write-protect --on kvm --predict neutral", "--predict: not with --on kvm"),
    ("page-table-test --on kvm --predict neutral", "--predict: not with --on kvm"),
    ("page-table-test --on kvm --threads 2", "--threads: not with --on kvm"),
    ("doctor --guest 0", "a size must be more than zero"),
    ("doctor --guest five", "a size is a whole number and a unit, such as 64G or 512M"),
    ("doctor --vcpus 0", "0 is not in 1..=500"),
    ("doctor --vcpus many", "invalid digit found in string"),
    ("doctor --report short.toml", "--report short.toml: File exists"),
    ("fit", "the following required arguments were not provided: --machine <PROFILE>"),
    ("fit --machine none-such", "no profile 'none-such': give the path of a file"),
    ("fit --machine neutral", "neutral has no fitted costs: say with --free which may change"),
    ("fit --machine apple-m2-vm-16g --table missing", "missing: No such file or directory"),
    ("fit --machine apple-m2-vm-16g --table bad.csv", "bad.csv: line 1: unknown column \"a\": expected"),
    ("fit --machine apple-m2-vm-16g --table empty", "empty: no rows; expected the columns"),
    ("fit --machine apple-m2-vm-16g --rows none", "--rows 'none': no row of map-mem is of that system or"),
    ("fit --machine apple-m2-vm-16g --free none", "no cost is called 'none'"),
    ("fit --machine apple-m2-vm-16g --free entry,publish,complete,table --rows base", "--rows 'base': no row of map-mem is of that system or"),
    ("fit --machine apple-m2-vm-16g -o dir", "--output dir: is a directory"),
    ("fit --machine apple-m2-vm-16g --from other.json", "other.json: no run of dirty-log --on kvm or doctor: missing field"),
    ("fit --from other.json", "other.json: no run of dirty-log --on kvm or doctor: missing field"),
    ("fit --from missing", "missing: No such file or directory"),
    ("fit --from bytes", "bytes: no run of dirty-log --on kvm or doctor: expected value at line 1"),
    ("reproduce --only none", "invalid value 'none' for '--only <EXPERIMENT>...'"),
    ("reproduce --threads 0", "0 is not in 1..=64"),
    ("reproduce --report short.toml", "--report short.toml: File exists"),
    ("reproduce extra", "unexpected argument 'extra' found"),
    ("litmus missing", "missing: No such file or directory"),
    ("litmus dir", "dir: no file *.litmus in this directory"),
    ("litmus bad.litmus", "bad.litmus:3: 'FLY' is no instruction of arm64 here"),
    ("litmus bytes", "bytes: not a text in UTF-8"),
    ("litmus --profile none", "invalid value 'none' for '--profile <PROFILE>'"),
    ("litmus --only none-such-test", "no test has this name and this profile"),
    ("litmus --seeds -1", "unexpected argument '-1' found"),
    ("litmus --list --witness", "the argument '--list' cannot be used with '--witness'"),
    ("compare --size 0", "a size must be more than zero"),
    ("compare --size 1", "--size 1 B is not a multiple of 2 MiB, which one table of pages covers"),
    ("compare --size 99999999G", "--size 97656.2 TiB is more than the 127.5 TiB that the address space"),
    ("compare --memory none", "invalid value 'none' for '--memory <MEMORY>'"),
    ("compare --pages 0", "0 is not in 1..=512"),
    ("compare --pages 513", "513 is not in 1..=512"),
    ("compare --pages 1,x", "invalid digit found in string"),
    ("compare --pages 4 --size 1G", "the argument '--pages [<N>]' cannot be used with '--size <SIZE>'"),
    ("compare --pages 4 --memory warm", "the argument '--pages [<N>]' cannot be used with '--memory <MEMORY>'"),
    ("compare --only none", "invalid value 'none' for '--only <CRATE>...'"),
    ("compare --rounds 0", "0 is not in 1..=10000"),
    ("compare --plot", "a value is required for '--plot <FILE>' but none was supplied"),
    ("compare --plot dir", "--plot dir: is a directory"),
    ("record", "nothing to record: give a command after '--', or --pid PID, or --show"),
    ("record --pid 0", "0 is not in 1..=2147483647"),
    ("record --pid 4294967295", "4294967295 is not in 1..=2147483647"),
    ("record --pid 1 --interval 0", "0 is not in 1..=3600000"),
    ("record --interval 0 -- true", "0 is not in 1..=3600000"),
    ("record --duration 0 -- true", "a duration is a number of seconds, more than zero"),
    ("record --intervals 0 -- true", "0 is not in 1..18446744073709551615"),
    ("record --method none -- true", "invalid value 'none' for '--method <METHOD>'"),
    ("record --show missing", "missing: No such file or directory"),
    ("record --show empty", "empty: byte 0: the file ends in the middle of the header: it is truncated"),
    ("record --show cut.twr", "cut.twr: byte 8: the file ends in the middle of the header: it is truncated"),
    ("record --show other.json --pid 1", "the argument '--show <FILE>' cannot be used with '--pid <PID>'"),
    ("record -o dir -- true", "--output dir: is a directory"),
    ("record -o missing/x.twr -- true", "--output missing/x.twr: No such file or directory"),
    ("record -- none-such-program", "none-such-program: cannot be started: No such file or directory"),
    ("migrate --memory 0", "a size must be more than zero"),
    ("migrate --memory 1", "--memory 1 B: not a multiple of 4 KiB"),
    ("migrate --used 1G --memory 1M", "--used 1 GiB: the guest has 1 MiB of memory"),
    ("migrate --vcpus 0", "0 is not in 1..=65535"),
    ("migrate --page-size 8K", "invalid value '8K' for '--page-size <PAGE_SIZE>'"),
    ("migrate --bandwidth 0", "a size must be more than zero"),
    ("migrate --timeout 0", "0 is not in 1..=3600"),
    ("migrate --logging none", "invalid value 'none' for '--logging <LOGGING>'"),
    ("migrate --chunk 1", "--chunk 1 B: not a multiple of 4 KiB"),
    ("migrate --ring-size 3", "--ring-size 3: a ring of 3 entries: it has to be a power of two"),
    ("migrate --ring-size 0", "--ring-size 0: a ring of 0 entries: it has to be a power of two"),
    ("migrate --writes none", "invalid value 'none' for '--writes <WRITES>'"),
    ("migrate --set 1G --memory 1M", "--set 1 GiB: the guest has 1 MiB of memory"),
    ("migrate --rate 5", "--rate: --writes greedy is as fast as it can"),
    ("migrate --rate 0 --writes fixed", "0 is not in 1..=1000000000"),
    ("migrate --writes fixed", "--writes fixed: needs a --rate"),
    ("migrate --work x", "invalid digit found in string"),
    ("migrate --recording missing", "missing: No such file or directory"),
    ("migrate --recording empty", "empty: byte 0: the file ends in the middle of the header: it is truncated"),
    ("migrate --recording cut.twr", "cut.twr: byte 8: the file ends in the middle of the header: it is truncated"),
    ("migrate --recording dir", "dir: Is a directory"),
    ("migrate --profile none-such", "no profile 'none-such': give the path of a file"),
    ("migrate --profile neutral --machine neutral", "the argument '--profile <PROFILE>' cannot be used multiple times"),
    ("migrate --from other.json", "other.json: no run of dirty-log --on kvm or doctor: missing field"),
    ("migrate --from missing", "missing: No such file or directory"),
    ("migrate --plot dir", "--plot dir: is a directory"),
    ("migrate --seed -1", "unexpected argument '-1' found"),
    ("machine", "List the machines that experiments can be run on, check one of your"),
    ("machine fly", "unrecognized subcommand 'fly'"),
    ("machine check", "the following required arguments were not provided: <PROFILE>"),
    ("machine check missing", "no profile 'missing': give the path of a file"),
    ("machine check short.toml", "short.toml: line 1: missing field `description`"),
    ("machine check bytes", "bytes: stream did not contain valid UTF-8"),
    ("machine check dir", "dir: Is a directory"),
    ("completions", "the following required arguments were not provided: <SHELL>"),
    ("completions fishy", "invalid value 'fishy' for '<SHELL>'"),
];

fn files(directory: &Path) -> BTreeSet<(String, Vec<u8>)> {
    let entries = fs::read_dir(directory).expect("a directory");
    let file = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.expect("an entry").path();
        let contents = if path.is_dir() {
            Vec::new()
        } else {
            fs::read(&path).expect("a file")
        };
        (path.display().to_string(), contents)
    };
    entries.map(file).collect()
}

#[test]
fn every_wrong_input_is_one_line_and_nothing_is_done() {
    let path = std::env::temp_dir().join(format!("tablewright-{}-wrong", std::process::id()));
    fs::create_dir(&path).expect("a directory");
    for (name, contents) in FILES {
        fs::write(path.join(name), contents).expect("a file");
    }
    fs::create_dir(path.join("dir")).expect("a directory");
    let before = files(&path);

    let mut failures = Vec::new();
    for (line, says) in WRONG {
        let output = Command::new(env!("CARGO_BIN_EXE_tablewright"))
            .args(line.split(' '))
            .current_dir(&path)
            .stdin(Stdio::null())
            .output()
            .expect("the program runs");
        let said = String::from_utf8_lossy(&output.stderr);
        let is_refused = output.status.code() == Some(2)
            && output.stdout.is_empty()
            && said.starts_with("error: ")
            && said.matches('\n').count() == 1;
        if !is_refused || !said.contains(says) {
            failures.push(format!("{line}: {}: {said}", output.status));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(WRONG.len() >= 200);
    assert_eq!(files(&path), before, "files were made or changed");
    fs::remove_dir_all(&path).expect("it goes");
}
