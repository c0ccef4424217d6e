//! Random tables of x86-64 and of AMD's nested paging, and what the processor makes of them
//! ([`check`]).
//!
//! # What is fixed
//! What the judge takes for granted: CR0.WP and EFER.NXE are set, CR4.SMEP and SMAP are clear.
//! CR4.PGE is set. The processor has nested paging; the tables have 5 levels where it can, else 4,
//! and leaves of 1 GiB where it has them. There are 2 GiB of memory.
//!
//! # What comes of it
//! One line for each part says how many addresses were asked for, and QEMU ends with a
//! [status](Status). The command line is `check=N`, so many addresses, and `omit=leaves` or
//! `omit=everything`: so is a bug planted.
#![no_std]
#![no_main]

mod boot;
mod check;
mod console;
mod cpu;
mod judge;
mod memory;
mod svm;
#[path = "host/vmcb.rs"]
#[allow(dead_code, reason = "the hypervisor enters guests by it, and has more exits")]
mod vmcb;

use core::fmt::Write as _;

use raw_cpuid::CpuId;
use tablewright::Level;
use x86_64::registers::control::{Cr4, Cr4Flags};

use check::Failed;
use console::{Console, Status, exit};
use memory::Omit;

/// The command line.
struct Options {
    questions: u32,
    omit: Option<Omit>,
}

impl Options {
    fn parse(text: &str) -> Option<Self> {
        let mut options = Self { questions: 100_000, omit: None };
        for word in text.split_whitespace() {
            match word.split_once('=')? {
                ("check", number) => options.questions = number.parse().ok()?,
                ("omit", name) => options.omit = Some(Omit::named(name)?),
                _ => return None,
            }
        }
        Some(options)
    }
}

fn run(options: &Options) -> Result<(), Failed> {
    let cpuid = CpuId::new();
    if !cpuid.get_svm_info().is_some_and(|svm| svm.has_nested_paging()) {
        return Err("the processor has no nested paging".into());
    }
    let features = cpuid.get_extended_processor_and_feature_identifiers();
    let has_gigabytes = features.is_some_and(|features| features.has_1gib_pages());
    let largest = Level::new(if has_gigabytes { 2 } else { 1 });
    // SAFETY: it is called once, the memory is there and holds nothing (1.), and the processor is
    // as it says (2.).
    unsafe {
        match Cr4::read().contains(Cr4Flags::L5_PAGING) {
            true => check::run::<5>(options.questions, largest, options.omit),
            false => check::run::<4>(options.questions, largest, options.omit),
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn main(info: u64) -> ! {
    // SAFETY: the first that is done.
    unsafe { cpu::init() };
    // SAFETY: the loader's.
    let text = unsafe { boot::command_line(info) };
    let Some(options) = Options::parse(text) else {
        let _ = writeln!(Console, "there is no such option: {text}");
        exit(Status::Failed)
    };
    match run(&options) {
        Ok(()) => exit(Status::Right),
        Err(Failed::Disagreed) => exit(Status::Wrong),
        Err(Failed::Other(why)) => {
            let _ = writeln!(Console, "{why}");
            exit(Status::Failed)
        }
    }
}
