//! The processor itself is asked what random tables mean, address by address, and has to say what
//! the judge says.
//!
//! The engine edits two trees at random while the processor uses them: stage 1 of EL1, with 48 bits
//! and with 39, and stage 2 below it. Then addresses are translated by `AT`, with stage 1 alone and
//! with both, to read and to write, as EL1 and as EL0. The same is done with the map that the
//! hypervisor itself runs on, where it has nothing, as EL2. The judge ([`tablewright_walker`])
//! walks the same tables by what the manual says. They agree if both find the same address, or the
//! same fault at the same level of the same stage. An emulator may walk the tables anew for each
//! `AT`, as QEMU does: then this says nothing about translations that should have been forgotten.

use core::arch::asm;
use core::ops::ControlFlow;
use core::ptr;

use arm_sysregs::el2::accessors::{read_hcr_el2, write_hcr_el2};
use arm_sysregs::el2::registers::HcrEl2;
use tablewright::arch::arm64::{Ids, Translation, tcr_el1, ttbr};
use tablewright::format::{Arm64K4, Arm64K4Va39};
use tablewright::{AddressSpace, Attrs, Format, Level, Pa, Perms, Span, Va};
use tablewright_hypervisor_common::edits::{PAGE, Random, WINDOW, Window};
use tablewright_walker::{Fault, Granule, Leaf, Permissions, Regime, translate};

use crate::count::count;
use crate::counters::Count;
use crate::cpu;
use crate::machine::Machine;
use crate::stage2::{CAPS, EL1, Own, Stage2, VMID};

/// Addresses that are edited and asked for, in each stage: 1 GiB from here on. The hypervisor
/// itself has nothing there.
const VIRTUAL: u64 = 0x10_0000_0000;
const INTERMEDIATE: u64 = 0x50_0000_0000;
const PHYSICAL: u64 = 0x100_0000_0000;

/// Edits between two rounds of questions, and questions in a round.
const EDITS: u64 = 8;
const QUESTIONS: u64 = 200;

/// Stage 1 of EL1, with so many bits.
const fn stage_1(input_bits: u32) -> Regime {
    Regime::Arm64Stage1Sized { granule: Granule::K4, input_bits: input_bits as u8, wide: false }
}
const EL2: Regime =
    Regime::Arm64El2 { granule: Granule::K4, input_bits: Own::INPUT_BITS as u8, wide: false };
const STAGE_2: Regime = Regime::Arm64Stage2 {
    granule: Granule::K4,
    input_bits: Stage2::INPUT_BITS as u8,
    wide: false,
    forced_write_back: false,
};

/// An access, as `AT` and the judge know it.
#[derive(Clone, Copy)]
struct Access {
    /// Of EL2; the next two are then false.
    el2: bool,
    both: bool,
    user: bool,
    write: bool,
}

/// An answer: an address, or the stage and the fault status of `PAR_EL1`.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Page(u64),
    Fault { stage: u8, status: u64 },
}

/// Asks the processor.
fn ask(at: u64, access: Access) -> Answer {
    let par: u64;
    macro_rules! at {
        ($operation:literal) => {
            // SAFETY: a look at a translation.
            unsafe {
                asm!(
                    concat!("at ", $operation, ", {at}"), "isb", "mrs {par}, par_el1",
                    at = in(reg) at, par = out(reg) par, options(nostack, preserves_flags)
                )
            }
        };
    }
    match (access.both, access.user, access.write) {
        (_, _, false) if access.el2 => at!("s1e2r"),
        (_, _, true) if access.el2 => at!("s1e2w"),
        (false, false, false) => at!("s1e1r"),
        (false, false, true) => at!("s1e1w"),
        (false, true, false) => at!("s1e0r"),
        (false, true, true) => at!("s1e0w"),
        (true, false, false) => at!("s12e1r"),
        (true, false, true) => at!("s12e1w"),
        (true, true, false) => at!("s12e0r"),
        (true, true, true) => at!("s12e0w"),
    }
    match par & 1 {
        0 => Answer::Page(par & 0x000f_ffff_ffff_f000),
        _ => Answer::Fault { stage: 1 + (par >> 9 & 1) as u8, status: par >> 1 & 0x3f },
    }
}

/// Returns the judge's answer for one stage.
fn judge(
    stage: u8,
    regime: Regime,
    root: Pa,
    at: u64,
    allows: impl Fn(&Leaf) -> bool,
) -> Result<u64, Answer> {
    let mut read = |table: u64, index: usize| {
        // SAFETY: a table of one of the trees, mapped one to one.
        unsafe { ptr::with_exposed_provenance::<u64>(table as usize).add(index).read_volatile() }
    };
    // DDI 0487, ISS encoding of a data abort, DFSC: translation, access flag, permission, each with
    // the level.
    let fault =
        |kind: u64, level: i8| Answer::Fault { stage, status: kind << 2 | level as u64 & 3 };
    match translate(regime, root.get(), at, &mut read) {
        Ok(leaf) if !leaf.accessed => Err(fault(2, leaf.level)),
        Ok(leaf) if !allows(&leaf) => Err(fault(3, leaf.level)),
        Ok(leaf) => Ok(leaf.physical(at) & !(PAGE - 1)),
        Err(Fault::NotMapped { level }) => Err(fault(1, level)),
        // The engine writes no such thing; no processor answers so.
        Err(_) => Err(Answer::Fault { stage: 0, status: 0 }),
    }
}

fn expected(at: u64, access: Access, first: (Regime, Pa), root_2: Pa) -> Answer {
    let allows = |perms: &Permissions| {
        if access.write { perms.write } else { perms.read }
    };
    let allows_1 =
        |leaf: &Leaf| allows(if access.user { &leaf.access.user } else { &leaf.access.privileged });
    let answer = judge(1, first.0, first.1, at, allows_1).and_then(|page| match access.both {
        true => judge(2, STAGE_2, root_2, page, |leaf| allows(&leaf.access.privileged)),
        false => Ok(page),
    });
    answer.map_or_else(|fault| fault, Answer::Page)
}

/// Asks, and counts what comes of it.
fn question(at: u64, access: Access, first: (Regime, Pa), root_2: Pa) {
    let answer = ask(at, access);
    let is_right = answer == expected(at, access, first, root_2);
    count(Count::Asked, 1);
    count(Count::Translated, u64::from(matches!(answer, Answer::Page(_))));
    count(Count::Disagreed, u64::from(!is_right));
}

/// Asks the processor so many times of each. `tables` is the memory in which tables are, which
/// stage 1 is read through stage 2 from; `own` is the map that the hypervisor runs on.
///
/// # Errors
/// There is no memory for tables.
pub fn run(
    machine: &Machine,
    tables: Span<Pa>,
    own: &mut AddressSpace<Own, &Machine>,
    questions: u64,
) -> Result<(), &'static str> {
    of_el1::<Arm64K4>(machine, tables, questions)?;
    of_el1::<Arm64K4Va39>(machine, tables, questions)?;
    of_el2(own, questions)
}

fn of_el2(own: &mut AddressSpace<Own, &Machine>, questions: u64) -> Result<(), &'static str> {
    let mut random = Random(0x0e12_7ab1_e3f1_5eed);
    let window = Window {
        from: VIRTUAL,
        to: PHYSICAL,
        attrs: &[
            Attrs::KERNEL_DATA,
            Attrs::KERNEL_RODATA,
            Attrs::KERNEL_TEXT,
            Attrs::KERNEL_DEVICE,
        ],
        largest: Level::new(2),
    };
    let mut asked = 0;
    while asked < questions {
        for _ in 0..EDITS {
            window.edit(own, &mut random);
        }
        for _ in 0..QUESTIONS {
            let access =
                Access { el2: true, both: false, user: false, write: random.below(2) == 0 };
            let at = VIRTUAL + random.below(WINDOW);
            question(at, access, (EL2, own.root()), own.root());
            asked += 1;
        }
    }
    let all = Span::new(Va::new(VIRTUAL), WINDOW).map_err(|_| "no such addresses")?;
    let mut gather = own.gather();
    let unmapped = gather.unmap(all, |_| ControlFlow::Continue(())).is_ok();
    gather.finish(|_| ());
    match unmapped {
        true => Ok(()),
        false => Err("what was checked cannot be unmapped"),
    }
}

fn of_el1<F: Translation<Input = Va>>(
    machine: &Machine,
    own: Span<Pa>,
    questions: u64,
) -> Result<(), &'static str> {
    const WRITABLE: Perms = Perms::READ.union(Perms::WRITE);
    const NO_MEMORY: &str = "no memory for the tables that are checked";
    // Nothing above: EPD1, bit 23.
    let tcr = tcr_el1::<F, F>(&Ids::read(), &CAPS).map_err(|why| why.0)? | 1 << 23;
    let of_el1 = [
        Attrs::KERNEL_DATA,
        Attrs::KERNEL_RODATA,
        Attrs::KERNEL_TEXT,
        Attrs::USER_DATA,
        Attrs::USER_RODATA,
        Attrs::USER_TEXT,
    ];
    let of_guest = [
        Attrs::GUEST_MEMORY,
        Attrs::GUEST_DEVICE,
        Attrs::GUEST_MEMORY.with_perms(Perms::READ.and_user()),
        Attrs::GUEST_MEMORY.with_perms(Perms::WRITE.and_user()),
        Attrs::GUEST_MEMORY.with_perms(WRITABLE.and_user()),
    ];
    let mut random = Random(0x7ab1_e3f1_9e0d_5eed);
    let stage_1 = AddressSpace::<F, _>::new(machine).ok_or(NO_MEMORY)?;
    let mut stage_1 = stage_1.with_id(EL1);
    let stage_2 = AddressSpace::<Stage2, _>::new(machine).ok_or(NO_MEMORY)?;
    let mut stage_2 = stage_2.with_id(VMID);
    let tables =
        Span::new(tablewright::Ipa::new(own.start().get()), own.size()).map_err(|_| NO_MEMORY)?;
    stage_2.map(tables, own.start(), Attrs::GUEST_MEMORY).map_err(|_| NO_MEMORY)?;
    stage_1.make_live();
    stage_2.make_live();
    // SAFETY: EL1 does not run, and is set up anew before it does; its stage 1 is read through a
    // stage 2 that maps the tables.
    unsafe {
        cpu::confine(stage_2.root());
        asm!(
            "msr ttbr0_el1, {root}", "msr tcr_el1, {tcr}", "msr mair_el1, {mair}",
            "msr sctlr_el1, {sctlr}", "isb",
            "tlbi vmalls12e1", "dsb nsh", "isb",
            root = in(reg) ttbr::<F>(stage_1.root(), EL1, false),
            tcr = in(reg) tcr,
            mair = in(reg) F::MAIR,
            sctlr = in(reg) cpu::SCTLR_EL1 | 1,
            options(nostack, preserves_flags),
        );
    }
    let largest = Level::new(2);
    let first = Window { from: VIRTUAL, to: INTERMEDIATE, attrs: &of_el1, largest };
    let second = Window { from: INTERMEDIATE, to: PHYSICAL, attrs: &of_guest, largest };
    let mut asked = 0;
    while asked < questions {
        for _ in 0..EDITS {
            first.edit(&mut stage_1, &mut random);
            second.edit(&mut stage_2, &mut random);
        }
        for both in [false, true] {
            let stage_2_bits = HcrEl2::VM | HcrEl2::PTW;
            let hcr = read_hcr_el2().difference(stage_2_bits);
            let stages = if both { hcr | stage_2_bits } else { hcr };
            // SAFETY: whether EL1, which does not run, has a stage 2.
            unsafe {
                write_hcr_el2(stages);
                asm!("isb", options(nostack, preserves_flags));
            }
            for _ in 0..QUESTIONS {
                let at = VIRTUAL + random.below(WINDOW);
                let access = Access {
                    el2: false,
                    both,
                    user: random.below(2) == 0,
                    write: random.below(2) == 0,
                };
                let first = (self::stage_1(F::INPUT_BITS), stage_1.root());
                question(at, access, first, stage_2.root());
                asked += 1;
            }
        }
    }
    // SAFETY: EL1 has no stage 1 and no stage 2 any more, and no TLB holds them; the guest's is
    // loaded before it runs.
    unsafe {
        asm!(
            "msr sctlr_el1, {sctlr}", "msr ttbr0_el1, xzr", "msr vttbr_el2, xzr", "isb",
            "tlbi alle1is", "dsb ish", "isb",
            sctlr = in(reg) cpu::SCTLR_EL1,
            options(nostack, preserves_flags),
        );
        stage_1.make_dead();
        stage_2.make_dead();
    }
    match stage_1.destroy(|_| ()).is_ok() && stage_2.destroy(|_| ()).is_ok() {
        true => Ok(()),
        false => Err("tables that were checked are still in use"),
    }
}
