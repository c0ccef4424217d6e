//! Watches Debian's kernels for what is wrong with their TLB maintenance, and finds what is planted
//! in them.
//!
//! A bug is planted in the kernel's image: where an instruction of an invalidation stands, which is
//! taken out or becomes another; or at the beginning of a function, which then does nothing, or
//! something before its time. The kernel knows nothing of it. Its load changes its memory in every
//! way (`watch/guest`), so that what is wrong goes wrong within seconds.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use object::{Object as _, ObjectSegment as _};
use tablewright_watch::arm64::{self, Instruction};
use tablewright_watch::session::{self, End};
use tablewright_watch::{Finding, Rule};

use crate::debian::Release;
use crate::emulator::Emulator;
use crate::qemu::CPU_MAX;
use crate::tools;
use crate::{About as _, Arch, Error, Result, fetch, initramfs, name_of, out, say};

#[derive(Args)]
pub struct WatchArgs {
    /// The architecture; of x86-64 there is the kernel of Debian 12
    #[arg(long, value_enum, default_value_t)]
    arch: Arch,
    /// The release of Debian whose kernel is watched
    #[arg(long, value_enum, default_value = "12", value_name = "RELEASE")]
    release: Release,
    /// A kernel, instead
    #[arg(long, value_name = "FILE", conflicts_with = "release")]
    kernel: Option<PathBuf>,
    /// How many processors it has
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u8).range(1..=8))]
    cpus: u8,
    /// How often it is booted
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    boots: u32,
    /// How many changes each thread of its load makes
    #[arg(long, value_name = "N", default_value_t = 40,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rounds: u32,
    /// Plant a bug, or `all`, one after the other; may be given several times
    #[arg(long, value_name = "NAME")]
    plant: Vec<String>,
}

/// A bug, and how it is found.
struct Plant {
    name: &'static str,
    how: How,
    /// Rules that may be broken, and what has to be said to be missing.
    rules: &'static [Rule],
    missing: &'static str,
}

enum How {
    /// An instruction of arm64 becomes another, if it is one that is meant. It is given with those
    /// before it and those behind it.
    Becomes(fn(u32, &[u32], &[u32]) -> Option<u32>),
    /// A function of x86-64 returns at once.
    Returns(&'static str),
    /// A function of arm64 first calls another with its own argument. The code for that replaces a
    /// third, which is never executed.
    CallsFirst([&'static str; 3]),
}

const REUSED: &[Rule] = &[Rule::BreakBeforeMake, Rule::PageReused, Rule::TableReused];
const NOP: u32 = 0xd503_201f;
const PACIASP: u32 = 0xd503_233f;
const DSB_ISHST: u32 = 0xd503_3a9f;
const DSB_ISH: u32 = 0xd503_3b9f;
/// How far a barrier is from its invalidation.
const NEAR: usize = 12;

const PLANTS: &[Plant] = &[
    Plant {
        name: "no-invalidation",
        how: How::Becomes(|it, _, _| {
            is_any(it, &[(3, 1), (3, 5), (3, 2), (2, 1), (2, 5)]).then_some(NOP)
        }),
        rules: REUSED,
        missing: "no invalidation of it",
    },
    Plant {
        name: "local",
        // From the inner shareable domain to the processor's own: CRm 3 to 7, of ranges 2 to 6.
        how: How::Becomes(|it, _, _| {
            is_any(it, &[(3, 1), (3, 5), (3, 2), (2, 1), (2, 5)]).then_some(it | 4 << 8)
        }),
        rules: REUSED,
        missing: "other CPUs may remember it",
    },
    Plant {
        name: "local-identifier",
        how: How::Becomes(|it, _, _| is_any(it, &[(3, 2)]).then_some(it | 4 << 8)),
        rules: REUSED,
        missing: "other CPUs may remember it",
    },
    Plant {
        name: "no-barrier-before",
        how: How::Becomes(|it, _, behind| {
            (it == DSB_ISHST && behind.iter().any(is_tlbi)).then_some(NOP)
        }),
        rules: &[Rule::Unpublished],
        missing: "no DSB stands between the change and it",
    },
    Plant {
        name: "no-barrier-behind",
        how: How::Becomes(|it, before, _| {
            (it == DSB_ISH && before.iter().any(is_tlbi)).then_some(NOP)
        }),
        rules: REUSED,
        missing: "no DSB has completed it",
    },
    Plant {
        name: "other-identifier",
        // ASID 0 is the kernel's.
        how: How::Becomes(|it, _, _| is_any(it, &[(3, 2)]).then_some(it | 31)),
        rules: REUSED,
        missing: "",
    },
    Plant {
        name: "other-address",
        how: How::Becomes(|it, _, _| is_any(it, &[(3, 5)]).then_some(it | 31)),
        rules: REUSED,
        missing: "no invalidation of it",
    },
    Plant {
        name: "leaves-of-tables",
        how: How::Becomes(|it, _, _| is_any(it, &[(3, 1), (2, 1)]).then_some(it | 4 << 5)),
        rules: REUSED,
        missing: "it is of leaves alone, and this was a table",
    },
    Plant {
        name: "freed-early",
        how: How::CallsFirst(["tlb_finish_mmu", "tlb_batch_pages_flush", "kernel_halt"]),
        rules: &[Rule::PageReused],
        missing: "",
    },
];

/// Those of x86-64. Each of the functions does a part of a flush.
const PLANTS_X86: &[Plant] = &[
    Plant::returns("no-flush", "flush_tlb_mm_range"),
    Plant::returns("no-interrupt", "native_flush_tlb_multi"),
    Plant::returns("no-work-of-interrupt", "flush_tlb_func"),
    Plant::returns("no-invlpg", "native_flush_tlb_one_user"),
    Plant::returns("no-load-of-cr3", "native_flush_tlb_local"),
];

/// TLBI of EL1, whatever it is about.
fn is_tlbi(instruction: &u32) -> bool {
    instruction & 0xffff_f000 == 0xd508_8000
}

/// Whether it is one of these, by CRm and op2.
fn is_any(instruction: u32, these: &[(u32, u32)]) -> bool {
    let (crm, op2) = (instruction >> 8 & 15, instruction >> 5 & 7);
    is_tlbi(&instruction) && these.contains(&(crm, op2))
}

impl Plant {
    const fn returns(name: &'static str, function: &'static str) -> Self {
        let rules = &[Rule::PageReused, Rule::TableReused];
        Self { name, how: How::Returns(function), rules, missing: "no invalidation of it" }
    }

    /// Plants it in an image of arm64: how often.
    fn plant(&self, image: &mut [u8]) -> usize {
        let How::Becomes(change) = self.how else { return 0 };
        let words: Vec<u32> = image
            .chunks_exact(4)
            .map(|it| u32::from_le_bytes([it[0], it[1], it[2], it[3]]))
            .collect();
        let mut count = 0;
        for (index, &word) in words.iter().enumerate() {
            // Most words are none that matter.
            if !is_tlbi(&word) && arm64::decode(word).is_none_or(|it| !is_barrier(it)) {
                continue;
            }
            let before = &words[index.saturating_sub(NEAR)..index];
            let behind = &words[index + 1..words.len().min(index + 1 + NEAR)];
            if let Some(changed) = change(word, before, behind) {
                image[index * 4..index * 4 + 4].copy_from_slice(&changed.to_le_bytes());
                count += 1;
            }
        }
        count
    }

    /// Whether it is what was found.
    fn is_found(&self, finding: &Finding) -> bool {
        !is_known(finding)
            && self.rules.contains(&finding.rule)
            && finding.missing.contains(self.missing)
    }
}

fn is_barrier(instruction: Instruction) -> bool {
    matches!(instruction, Instruction::Barrier { .. })
}

/// Whether it is wrong with every Linux since 6.9, for a moment of its boot: the code that maps the
/// kernel at addresses that were drawn unmaps pages, invalidates, and maps them anew without a DSB
/// between the two (`map_kernel` in `arch/arm64/kernel/pi/map_kernel.c`). No other runs in the
/// lower half.
fn is_known(finding: &Finding) -> bool {
    finding.rule == Rule::BreakBeforeMake
        && finding.at.pc >> 63 == 0
        && finding.missing.contains("no DSB has completed it")
}

/// The files of a boot.
struct Files {
    arch: Arch,
    emulator: Emulator,
    plugin: PathBuf,
    initrd: PathBuf,
}

impl Files {
    /// QEMU with everything but the plugin, and the file of what the guest says.
    fn command(&self, kernel: &Path, cpus: u8, words: &str) -> Result<(Command, PathBuf)> {
        let console = tools::scratch()?.join(format!("watched-{}", std::process::id()));
        let mut command = self.emulator.command();
        let (machine, cpu, serial) = match self.arch {
            Arch::Arm64 => ("virt", CPU_MAX, "ttyAMA0"),
            Arch::X86_64 => ("q35", "max", "ttyS0"),
        };
        command.args(["-M", machine, "-cpu", cpu, "-smp", &cpus.to_string(), "-m", "512"]);
        command.args(["-display", "none", "-monitor", "none", "-nodefaults", "-no-reboot"]);
        command.args(["-accel", "tcg,thread=single", "-serial"]);
        command.arg(format!("file:{}", console.display())).arg("-kernel").arg(kernel);
        command.arg("-initrd").arg(&self.initrd).arg("-append");
        command.arg(format!("console={serial} quiet panic=-1 nokaslr {words}"));
        command.stderr(Stdio::null());
        Ok((command, console))
    }
}

/// The text of a file that is of no use any more.
fn said(console: &Path) -> String {
    let said = std::fs::read(console).unwrap_or_default();
    let _ = std::fs::remove_file(console);
    String::from_utf8_lossy(&said).into_owned()
}

/// A boot.
struct Watched {
    /// All that was found; `None`: it was ended when that was found which was looked for, or it did
    /// not come to its end.
    end: Option<End>,
    /// The one that was looked for, and after how many seconds it was found.
    found: Option<(f64, Finding)>,
    /// Kinds of findings until then.
    kinds: usize,
    console: String,
}

/// A kernel with a bug may not come to its end.
const LIMIT: Duration = Duration::from_secs(300);

/// Boots and watches, to the end or until one is found that is looked for.
fn watch(
    files: &Files,
    kernel: &Path,
    (cpus, rounds): (u8, u32),
    is_it: impl Fn(&Finding) -> bool,
) -> Result<Watched> {
    let (mut command, console) = files.command(kernel, cpus, &format!("rounds={rounds}"))?;
    let (mut found, mut kinds) = (None, 0);
    let end = session::run(&mut command, &files.plugin, Some(LIMIT), |seconds, finding| {
        kinds += usize::from(!is_known(&finding));
        match is_it(&finding) {
            true => {
                found = Some((seconds, finding));
                ControlFlow::Break(())
            }
            false => ControlFlow::Continue(()),
        }
    });
    let console = said(&console);
    Ok(Watched { end: end.about("QEMU")?, found, kinds, console })
}

/// Boots, watches, and says what was found.
///
/// # Errors
/// What cannot be had; something was found, or not what was planted.
pub fn run(args: &WatchArgs) -> Result<()> {
    let plants = chosen(args.arch, &args.plant)?;
    let files = Files {
        arch: args.arch,
        emulator: Emulator::newest(args.arch)?,
        plugin: fetch::watching_plugin()?,
        initrd: tools::scratch()?.join(format!("initrd-watched-{}", name_of(&args.arch))),
    };
    let kernel = match (&args.kernel, args.arch) {
        (Some(kernel), _) => {
            std::fs::metadata(kernel).about(kernel.display())?;
            kernel.clone()
        }
        (None, Arch::Arm64) => fetch::kernel_arm64(args.release)?,
        (None, Arch::X86_64) => fetch::guest_x86(None)?.0,
    };
    initramfs::of_one(&files.initrd, &fetch::watched_guest(args.arch)?)?;
    let name = match &args.kernel {
        Some(kernel) => kernel.display().to_string(),
        None => format!("Debian {}, {}", name_of(&args.release), name_of(&args.arch)),
    };
    let mut failed = 0;
    for _ in 0..args.boots {
        for plant in &plants {
            let started = Instant::now();
            let (image, count) = match plant {
                None => (kernel.clone(), 0),
                Some(plant) => planted(&files, &kernel, plant)?,
            };
            let size = (args.cpus, args.rounds);
            let boot = || {
                watch(&files, &image, size, |finding| {
                    plant.is_some_and(|plant| plant.is_found(finding))
                })
            };
            let mut watched = boot()?;
            // A bug may end a kernel before it has harmed what is looked at: once more.
            if plant.is_some() && watched.found.is_none() {
                watched = boot()?;
            }
            let what =
                plant.map_or_else(|| name.clone(), |plant| format!("{name}, {}", plant.name));
            let result = match plant {
                None => judge(&watched),
                Some(_) => judge_planted(count, &watched),
            };
            if plant.is_some() {
                // It is tens of MiB, and made anew each time.
                let _ = std::fs::remove_file(&image);
            }
            let seconds = started.elapsed().as_secs_f64();
            let end = result.as_ref().map_or_else(|why| format!("FAILED: {why}"), Clone::clone);
            say!("{what}, {} CPUs: {seconds:.1} s: {end}", args.cpus);
            failed += u32::from(result.is_err());
            if out::is_unread() {
                return Ok(());
            }
        }
    }
    match failed {
        0 => Ok(()),
        failed => Err(Error::Failed(format!("{failed} boots did not come out as they should"))),
    }
}

/// The bugs of these names; one that is none, if there are no names.
fn chosen(arch: Arch, names: &[String]) -> Result<Vec<Option<&'static Plant>>> {
    let plants = if arch == Arch::Arm64 { PLANTS } else { PLANTS_X86 };
    let mut chosen = Vec::new();
    for name in names {
        if name == "all" {
            chosen.extend(plants.iter().map(Some));
            continue;
        }
        let plant = plants.iter().find(|plant| plant.name == name);
        chosen.push(Some(plant.ok_or_else(|| {
            let names: Vec<_> = plants.iter().map(|plant| plant.name).collect();
            Error::Other(format!("--plant {name}: there are all, {}", names.join(", ")))
        })?));
    }
    Ok(if names.is_empty() { vec![None] } else { chosen })
}

/// The image of a kernel with a bug, and how often that is in it.
fn planted(files: &Files, kernel: &Path, plant: &Plant) -> Result<(PathBuf, usize)> {
    let mut image = std::fs::read(kernel).about(kernel.display())?;
    let file = tools::scratch()?.join(format!("kernel-planted-{}", std::process::id()));
    let count = match plant.how {
        How::Becomes(_) => plant.plant(&mut image),
        How::Returns(function) => {
            image = unpacked(&image).ok_or_else(|| {
                Error::Other(format!("{}: no kernel that LZ4 has packed", kernel.display()))
            })?;
            std::fs::write(&file, &image).about(file.display())?;
            let [address] = addresses_of(files, &file, [function])?;
            usize::from(return_at(&mut image, address).is_some())
        }
        How::CallsFirst([function, other, unused]) => {
            let names = ["_stext", function, other, unused];
            let [text, places @ ..] = addresses_of(files, kernel, names)?;
            // The image is aligned to 2 MiB, and `_stext` is less than that behind its start.
            let base = text & !((2 << 20) - 1);
            let places = places.map(|place| place.wrapping_sub(base) as usize);
            usize::from(call_first(&mut image, places).is_some())
        }
    };
    std::fs::write(&file, image).about(file.display())?;
    Ok((file, count))
}

/// The addresses at which the kernel says that functions of its own are.
fn addresses_of<const N: usize>(
    files: &Files,
    kernel: &Path,
    functions: [&str; N],
) -> Result<[u64; N]> {
    let words = format!("rounds=1 symbols={}", functions.join(","));
    let (mut command, console) = files.command(kernel, 1, &words)?;
    let mut qemu = command.spawn().about("QEMU")?;
    let started = Instant::now();
    while qemu.try_wait().about("QEMU")?.is_none() && started.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(50));
    }
    // It may have ended.
    let _ = qemu.kill();
    qemu.wait().about("QEMU")?;
    let console = said(&console);
    let mut addresses = [0; N];
    for (function, found) in functions.iter().zip(&mut addresses) {
        let lines =
            console.lines().filter_map(|line| line.strip_prefix("symbol ")?.split_once(' '));
        let address = lines
            .filter(|(name, _)| name == function)
            .find_map(|(_, address)| u64::from_str_radix(address.trim(), 16).ok());
        *found = address.ok_or_else(|| Error::Failed(format!("this kernel has no {function}")))?;
    }
    Ok(addresses)
}

/// Has a function of an image of arm64 first call another, by code in the place of a third.
fn call_first(image: &mut [u8], [function, other, unused]: [usize; 3]) -> Option<()> {
    // Each begins with two NOPs for the function tracer, then PACIASP.
    let signed = |image: &[u8], at: usize| {
        (at..at + 16).step_by(4).find(|&at| image.get(at..at + 4) == Some(&PACIASP.to_le_bytes()))
    };
    let (function, unused) = (signed(image, function)?, signed(image, unused)?);
    let branch = |link: u32, from: usize, to: usize| {
        let words = (to as i64 - from as i64) / 4;
        link << 31 | 5 << 26 | words as u32 & ((1 << 26) - 1)
    };
    let code = [
        PACIASP,
        0xa9be_7bfd, // stp x29, x30, [sp, #-32]!
        0xf900_0be0, // str x0, [sp, #16]
        branch(1, unused + 12, other),
        0xf940_0be0, // ldr x0, [sp, #16]
        0xa8c2_7bfd, // ldp x29, x30, [sp], #32
        branch(0, unused + 24, function + 4),
    ];
    for (index, word) in code.into_iter().enumerate() {
        image
            .get_mut(unused + index * 4..)?
            .first_chunk_mut::<4>()?
            .copy_from_slice(&word.to_le_bytes());
    }
    let word = branch(0, function, unused).to_le_bytes();
    image.get_mut(function..)?.first_chunk_mut::<4>()?.copy_from_slice(&word);
    Some(())
}

/// The kernel in an image of x86-64 (Linux' `Documentation/arch/x86/boot.rst`: `setup_sects`,
/// `payload_offset`, `payload_length`), if it is packed as LZ4 packs kernels: blocks of up to 8
/// MiB, each behind its length.
fn unpacked(image: &[u8]) -> Option<Vec<u8>> {
    const MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
    const BLOCK: usize = 8 << 20;
    let word =
        |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    let payload = (usize::from(*image.get(0x1f1)?) + 1) * 512 + word(0x248)?;
    let end = payload + word(0x24c)?;
    if image.get(payload..payload + 4)? != MAGIC {
        return None;
    }
    let (mut at, mut kernel) = (payload + 4, Vec::new());
    // Behind the blocks stands the length of what was packed.
    while at + 8 <= end {
        let length = word(at)?;
        let block = image.get(at + 4..at + 4 + length)?;
        kernel.extend(lz4_flex::block::decompress(block, BLOCK).ok()?);
        at += 4 + length;
    }
    Some(kernel)
}

/// Has the function at an address of a program return at once.
fn return_at(program: &mut [u8], address: u64) -> Option<()> {
    const RET: u8 = 0xc3;
    let file = object::File::parse(&*program).ok()?;
    let at = file.segments().find_map(|segment| {
        let (at, _) = segment.file_range();
        let into = address.checked_sub(segment.address())?;
        (into < segment.size()).then_some(at + into)
    })?;
    *program.get_mut(at as usize)? = RET;
    Some(())
}

/// Whether a kernel as it is came out clean.
fn judge(watched: &Watched) -> std::result::Result<String, String> {
    let Some(End { counts, findings, .. }) = &watched.end else {
        return Err(format!("it did not end: {}", watched.console.trim()));
    };
    let unknown = findings.iter().find(|finding| !is_known(finding));
    if let Some(Finding { rule, missing, then, at, .. }) = unknown {
        return Err(format!("{rule}: {missing}; {then}: CPU {} at {:#x}", at.cpu, at.pc));
    }
    if !watched.console.contains("watched: done") {
        return Err(format!("the load did not end well: {}", watched.console.trim()));
    }
    let known: u64 = findings.iter().map(|finding| finding.count).sum();
    let known = match known {
        0 => String::new(),
        known => format!(", and {known} pages of the kernel's that it maps anew without a DSB"),
    };
    Ok(format!(
        "clean: {} changes in up to {} tables, {} invalidations, {} barriers{known}",
        counts.changes, counts.tables, counts.invalidations, counts.barriers
    ))
}

/// Whether what was planted was found.
fn judge_planted(count: usize, watched: &Watched) -> std::result::Result<String, String> {
    if count == 0 {
        return Err("there is no place for it in this kernel".into());
    }
    let Some((seconds, Finding { rule, missing, .. })) = &watched.found else {
        return Err(format!("at {count} places, and not found, but {} others", watched.kinds));
    };
    Ok(format!("at {count} places, found after {seconds:.1} s: {rule}: {missing}"))
}

#[cfg(test)]
mod tests {
    use super::{DSB_ISH, DSB_ISHST, NOP, PACIASP, PLANTS, call_first, chosen, unpacked};
    use crate::Arch;

    /// dsb ishst; tlbi vale1is, x1; tlbi vae1is, x1; tlbi aside1is, x1; dsb ish; nop; dsb ish
    const CODE: [u32; 7] =
        [DSB_ISHST, 0xd508_83a1, 0xd508_8321, 0xd508_8341, DSB_ISH, 0xd503_201f, 0xd503_3b9f];

    #[test]
    fn each_bug_changes_what_it_says() {
        let becomes: [(&str, &[(usize, u32)]); 8] = [
            ("no-invalidation", &[(1, NOP), (2, NOP), (3, NOP)]),
            ("local", &[(1, 0xd508_87a1), (2, 0xd508_8721), (3, 0xd508_8741)]),
            ("local-identifier", &[(3, 0xd508_8741)]),
            ("no-barrier-before", &[(0, NOP)]),
            ("no-barrier-behind", &[(4, NOP), (6, NOP)]),
            ("other-identifier", &[(3, 0xd508_835f)]),
            ("other-address", &[(1, 0xd508_83bf)]),
            ("leaves-of-tables", &[(2, 0xd508_83a1)]),
        ];
        for (plant, (name, changes)) in PLANTS.iter().zip(becomes) {
            assert_eq!(plant.name, name);
            let mut image: Vec<u8> = CODE.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(plant.plant(&mut image), changes.len(), "{name}");
            let mut expected = CODE;
            for &(at, word) in changes {
                expected[at] = word;
            }
            let expected: Vec<u8> = expected.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(image, expected, "{name}");
        }
    }

    /// At 0 a function, at 32 the other, at 64 the one that is never executed.
    #[test]
    fn a_function_calls_another_first() {
        let mut words = [NOP; 40];
        (words[2], words[10], words[18]) = (PACIASP, PACIASP, PACIASP);
        let mut image: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(call_first(&mut image, [0, 32, 64]), Some(()));
        // b .+64 over the signing of the first, which is done in the third.
        words[2] = 0x1400_0010;
        words[18..25].copy_from_slice(&[
            PACIASP,
            0xa9be_7bfd,
            0xf900_0be0,
            0x97ff_fff3, // bl .-52
            0xf940_0be0,
            0xa8c2_7bfd,
            0x17ff_ffeb, // b .-84
        ]);
        let expected: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(image, expected);
        assert_eq!(call_first(&mut image, [96, 32, 64]), None);
    }

    #[test]
    fn a_bug_that_is_none_is_refused() {
        let names = |names: &[&str]| {
            chosen(Arch::Arm64, &names.iter().map(|&it| it.into()).collect::<Vec<_>>())
        };
        assert!(names(&[]).is_ok_and(|all| all.len() == 1 && all[0].is_none()));
        assert!(names(&["all"]).is_ok_and(|all| all.len() == PLANTS.len()));
        assert!(names(&["local", "nothing"]).is_err_and(|why| why.to_string().contains("--plant")));
    }

    #[test]
    fn what_is_no_kernel_is_not_unpacked() {
        assert_eq!(unpacked(b""), None);
        assert_eq!(unpacked(&[0; 4096]), None);
        // One block of `ab`, behind a payload that begins at once.
        let block = lz4_flex::block::compress(b"ababababababababababab");
        let length = (4 + 4 + block.len() + 4) as u32;
        let mut image = vec![0; 0x400];
        image[0x1f1] = 1;
        image[0x24c..0x250].copy_from_slice(&length.to_le_bytes());
        image.extend([0x02, 0x21, 0x4c, 0x18]);
        image.extend((block.len() as u32).to_le_bytes());
        image.extend(&block);
        image.extend(22_u32.to_le_bytes());
        assert_eq!(unpacked(&image).as_deref(), Some(&b"ababababababababababab"[..]));
    }
}
