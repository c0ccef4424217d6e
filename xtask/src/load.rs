//! The load: what the guest does while its memory is taken away, and how to tell that none of it
//! went wrong.
//!
//! Each worker fills files in memory, forks processes that read, sort and compare them, and says
//! the hash of what it has got; which hash that is, is known here. There is one worker more than
//! there are CPUs, so that they are moved about.

use sha2::{Digest, Sha256};

/// The number of lines of the text whose hash is known.
const LINES: u32 = 30_000;

/// The bell, which the hypervisor has as `BELL` of `exits.rs`.
const BELL: u32 = 0xb00_0000;

/// How the guest rings a bell when its load is at work, and asks whether it was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bell {
    /// By a register in memory.
    Memory,
    /// By a port, which the guest's own program knows.
    Port,
}

impl Bell {
    /// Returns the command that rings.
    fn ring(self) -> String {
        match self {
            Self::Memory => format!("devmem {BELL:#x} 32 1"),
            Self::Port => "tlb ring".into(),
        }
    }

    /// Returns the command that succeeds when it is over.
    fn is_over(self) -> String {
        match self {
            Self::Memory => format!("[ \"$(devmem {BELL:#x} 32)\" != 0x00000000 ]"),
            Self::Port => "tlb copied".into(),
        }
    }
}

/// The beginning of a worker's line.
const SAYS: &str = "load: hash ";
/// The guest's line when all workers are done.
const DONE: &str = "load: done";
/// Words that must not be said.
const FORBIDDEN: [&str; 5] = ["PANIC", "Kernel panic", "Oops", "Unable to handle kernel", "BUG:"];

/// The program that the guest runs first, on this console. What was said last is given so many
/// seconds to come out.
///
/// Of the words of the kernel's command line `load=N` is the load, so many rounds of it; with
/// `copy` it goes on until the guest was copied, or the time of several guests is over; of several,
/// `guest=N` has each write another text. It rings a bell when it is at work, a register of the
/// hypervisor's, where it reads whether the copy is through.
pub fn script(console: &str, last: u32, bell: Bell) -> String {
    let (rings, is_over) = (bell.ring(), bell.is_over());
    format!(
        r#"#!/bin/busybox sh
/bin/busybox mkdir -p /dev /proc /tmp
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t tmpfs tmp /tmp
/bin/busybox --install -s /bin
export PATH=/bin
dmesg | grep 'remote TLB flush'
rounds=0
guest=0
goes_on=
ring() {{
    [ -z "$goes_on" ] || {rings}
}}
is_over() {{
    [ -z "$goes_on" ] || {is_over}
}}
for word in $(cat /proc/cmdline); do
    case $word in
    copy) goes_on=yes ;;
    guest=*) guest=${{word#guest=}} ;;
    load=*) rounds=${{word#load=}} ;;
    spin) for cpu in $(seq $(nproc)); do while :; do :; done & done; ring; wait ;;
    shell) ring; setsid sh -c 'exec sh < /dev/{console} > /dev/{console} 2>&1'; poweroff -f ;;
    tlb=*) tlb $(echo ${{word#tlb=}} | tr , ' '); sleep {last}; poweroff -f ;;
    esac
done
work() {{
    round=0
    until [ $round -ge $rounds ] && is_over; do
        round=$((round + 1))
        seq $((1 + guest)) $(({LINES} + guest)) > /tmp/$1
        ring
        sort -r /tmp/$1 | sort -n > /tmp/$1.sorted
        cmp /tmp/$1 /tmp/$1.sorted
        for copy in 1 2 3 4; do cp /tmp/$1.sorted /tmp/$1.$copy; done
        for copy in 1 2 3 4; do cmp /tmp/$1 /tmp/$1.$copy; rm /tmp/$1.$copy; done
        for child in $(seq 20); do (true); done
        set -- $1 $(sha256sum /tmp/$1.sorted)
        echo "{SAYS}$2"
    done
}}
echo "guest: $(nproc) CPUs, Linux $(uname -r)"
for worker in $(seq 0 $(nproc)); do work $worker & done
wait
echo "{DONE}"
sleep {last}
poweroff -f
"#
    )
}

/// The system that the guest has said it is.
pub fn kernel(console: &[String]) -> Option<&str> {
    let line = console.iter().find_map(|line| line.strip_prefix("guest: "))?;
    line.split_once("CPUs, ").map(|(_, kernel)| kernel)
}

/// How many hashes were said.
pub fn hashes(console: &[String]) -> usize {
    console.iter().filter(|line| line.starts_with(SAYS)).count()
}

/// Whether the load came out right, by what the guest said: each worker has done so many rounds, or
/// more if it was to go on until the guest was copied.
///
/// # Errors
/// What is wrong.
pub fn check(console: &[String], cpus: u8, rounds: u32, goes_on: bool) -> Result<(), String> {
    check_of(console, cpus, rounds, goes_on, 0)
}

/// Checks a guest that was told `guest=` this number: its text is another.
///
/// # Errors
/// What is wrong.
pub fn check_of(
    console: &[String],
    cpus: u8,
    rounds: u32,
    goes_on: bool,
    guest: u32,
) -> Result<(), String> {
    let text: String = (1 + guest..=LINES + guest).map(|line| format!("{line}\n")).collect();
    let right: String = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
    if let Some(line) = console.iter().find(|line| FORBIDDEN.iter().any(|word| line.contains(word)))
    {
        return Err(format!("the console says: {line}"));
    }
    let hashes: Vec<_> =
        console.iter().filter_map(|line| line.trim_end().strip_prefix(SAYS)).collect();
    if let Some(wrong) = hashes.iter().find(|hash| **hash != right) {
        return Err(format!("a hash is {wrong} and should be {right}"));
    }
    let expected = (u32::from(cpus) + 1) * rounds;
    let said = hashes.len() as u32;
    if said < expected || said > expected && !goes_on {
        return Err(format!("{said} of {expected} hashes were said"));
    }
    match console.iter().any(|line| line.trim_end() == DONE) {
        true => Ok(()),
        false => Err("the load did not end".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::{DONE, SAYS, check};

    const RIGHT: &str = "3b1f7d9d9a5e";

    #[test]
    fn a_load_is_right_only_with_every_hash() {
        let wrong = vec![format!("{SAYS}{RIGHT}"), DONE.into()];
        assert!(check(&wrong, 1, 1, false).is_err_and(|why| why.contains("should be")));
        let right = check(&wrong, 1, 1, false)
            .err()
            .and_then(|why| why.rsplit(' ').next().map(String::from));
        let line = format!("{SAYS}{}", right.unwrap_or_default());
        let said = [line.clone(), line.clone(), DONE.into()];
        assert_eq!(check(&said, 1, 1, false), Ok(()));
        assert!(check(&said[1..], 1, 1, true).is_err(), "a hash is missing");
        assert!(check(&said[..2], 1, 1, true).is_err(), "it did not end");
        let more = [line.clone(), line.clone(), line, DONE.into()];
        assert!(check(&more, 1, 1, false).is_err(), "one too many");
        assert_eq!(check(&more, 1, 1, true), Ok(()));
        let mut said = said.to_vec();
        said.push("Kernel panic - not syncing".into());
        assert!(check(&said, 1, 1, false).is_err());
    }
}
