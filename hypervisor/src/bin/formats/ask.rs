//! The processor: set up for a translation regime, and asked where an address is, and whether it is
//! executed from there.
//!
//! Everything is done from EL2, with its MMU off but for the few instructions of a question. Where
//! the regime is that of EL2 itself, these few are translated by the very tables that are asked
//! about, which map the image to itself.

use core::arch::{asm, global_asm};

use tablewright::arch::arm64::{
    Ids, Translation, Unsupported, load_ttbr0_el1, load_ttbr0_el2, load_ttbr1_el1, load_vttbr_el2,
    set_up_el1, set_up_el2, set_up_stage2, tcr_el1, tcr_el2, ttbr, vtcr_el2,
};
use tablewright::{Caps, Pa};

/// A translation regime (DDI 0487 D8.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Stage 1 of EL1&0.
    El1,
    /// Stage 1 of EL2&0, with VHE.
    Host,
    /// Stage 1 of EL2 alone.
    El2,
    /// Stage 2 of EL1&0, whose stage 1 is off, and normal memory.
    Stage2,
}

/// The purpose for which an address is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    Fetch,
}

/// The processor's answer, or what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The address, and the attributes as `PAR_EL1` has them: memory type, shareability.
    Page { pa: u64, memory: u8, share: u8 },
    /// It is executed, and so mapped for that.
    Executed,
    /// The stage, and the fault status (ISS of a data abort, DFSC).
    Fault { stage: u8, status: u8 },
}

/// Kinds of faults: of translation, which has no leaf and may be at level -1, of the access flag,
/// and of permissions (DDI 0487, ISS encoding of a data abort, DFSC).
pub const TRANSLATION: u8 = 1;
/// See [`TRANSLATION`].
pub const ACCESS_FLAG: u8 = 2;
/// See [`TRANSLATION`].
pub const PERMISSION: u8 = 3;

impl Answer {
    /// An answer that no processor gives.
    pub const NONE: Self = Self::Fault { stage: 0, status: 0 };

    /// A fault of a kind, at a level of the architecture.
    pub fn fault(stage: u8, kind: u8, level: i8) -> Self {
        let status = match level {
            -1 => 0b10_1011,
            _ => kind << 2 | level as u8 & 3,
        };
        Self::Fault { stage, status }
    }

    /// The address is reached.
    pub fn reached(access: Access, pa: u64, memory: u8, reach: u8) -> Self {
        match access {
            Access::Fetch => Self::Executed,
            _ => Self::Page { pa: pa & !0xfff, memory, share: share(memory, reach) },
        }
    }
}

/// Memory that is not cacheable is outer shareable (D19.2 PAR_EL1, SH), whatever the descriptor
/// says, and QEMU 7.2 repeats.
fn share(memory: u8, share: u8) -> u8 {
    match memory {
        0..=0xf | 0x44 => 2,
        _ => share,
    }
}

// HCR_EL2 (D19.2).
const VM: u64 = 1 << 0;
const DC: u64 = 1 << 12;
const TGE: u64 = 1 << 27;
const RW: u64 = 1 << 31;
const E2H: u64 = 1 << 34;
const FWB: u64 = 1 << 46;
/// SCTLR_ELx without an MMU: what is one where features are missing, and caches. EL2 with E2H set
/// has it as EL1 has.
const SCTLR_EL1: u64 = 0x30d0_0800 | 1 << 2 | 1 << 12;
const SCTLR_EL2: u64 = 0x30c5_0830 | 1 << 2 | 1 << 12;
const MMU: u64 = 1;
/// MDCR_EL2.TDE: BRK is an exception to EL2 from everywhere.
const TDE: u64 = 1 << 8;
/// The instruction where an address is fetched from: BRK #0.
pub const BREAK: u32 = 0xd420_0000;

global_asm!(
    // From EL2 with its own stack pointer, and from below: what it was, and back to where X30 says.
    ".balign 2048",
    "vectors:",
    ".rept 16",
    "mrs x0, esr_el2",
    "msr elr_el2, x30",
    "mov x1, #0x3c9",
    "msr spsr_el2, x1",
    "eret",
    ".balign 128",
    ".endr",
);

/// A processor that is set up for tables.
#[derive(Clone, Copy)]
pub struct Cpu {
    setting: Setting,
    /// SCTLR_EL2 in a question, and at other times.
    during: u64,
    otherwise: u64,
}

impl Cpu {
    /// Sets the registers up for tables of a format: under `lower`, and where the regime has two
    /// halves under `upper`.
    ///
    /// # Errors
    /// What the processor lacks.
    pub fn set_up<F: Translation>(
        setting: Setting,
        ids: &Ids,
        caps: &Caps,
        lower: Pa,
        upper: Pa,
    ) -> Result<Self, Unsupported> {
        let forced = if F::FORCED { FWB } else { 0 };
        let (hcr, control) = match setting {
            Setting::El1 => (RW, tcr_el1::<F, F>(ids, caps)?),
            // EPD1: nothing above.
            Setting::Host => (RW | E2H | TGE, tcr_el1::<F, F>(ids, caps)? | 1 << 23),
            Setting::El2 => (RW, tcr_el2::<F>(ids, caps)?),
            Setting::Stage2 => (RW | VM | DC | forced, vtcr_el2::<F>(ids, caps)?),
        };
        let sctlr = match setting {
            Setting::Host => SCTLR_EL1,
            _ => SCTLR_EL2,
        };
        let own = matches!(setting, Setting::Host | Setting::El2);
        let sctlr_el1 = match setting {
            Setting::El1 => SCTLR_EL1 | MMU,
            _ => SCTLR_EL1,
        };
        let [lower, upper] = [lower, upper].map(|root| ttbr::<F>(root, 1, false));
        // SAFETY: EL2 runs with its MMU off, and nothing else runs. Tables of EL2 map what is
        // executed while they are used. Everything is forgotten before.
        unsafe {
            asm!(
                "adr {vectors}, vectors",
                "msr vbar_el2, {vectors}",
                "msr mdcr_el2, {tde}",
                "msr hcr_el2, {hcr}",
                "isb",
                "msr sctlr_el2, {sctlr}",
                "isb",
                vectors = out(reg) _,
                tde = in(reg) TDE,
                hcr = in(reg) hcr,
                sctlr = in(reg) sctlr,
                options(nostack, preserves_flags)
            );
            match setting {
                Setting::El1 => {
                    set_up_el1(F::MAIR, control);
                    load_ttbr0_el1(lower);
                    load_ttbr1_el1(upper);
                }
                Setting::Host | Setting::El2 => {
                    set_up_el2(F::MAIR, control);
                    load_ttbr0_el2(lower);
                }
                Setting::Stage2 => {
                    set_up_stage2(control);
                    load_vttbr_el2(lower);
                }
            }
            // With TGE these are of EL2&0 as well.
            asm!(
                "msr sctlr_el1, {sctlr_el1}", "isb",
                sctlr_el1 = in(reg) sctlr_el1, options(nostack, preserves_flags)
            );
        }
        let cpu = Self { setting, during: if own { sctlr | MMU } else { sctlr }, otherwise: sctlr };
        cpu.forget();
        Ok(cpu)
    }

    /// Has everything forgotten.
    pub fn forget(&self) {
        // SAFETY: what is forgotten is found again.
        unsafe {
            asm!(
                "dsb ish",
                "tlbi alle1",
                "tlbi alle2",
                "dsb nsh",
                "ic iallu",
                "dsb nsh",
                "isb",
                options(nostack, preserves_flags)
            )
        }
    }

    /// Whether it can be asked this in this regime. There is no address translation instruction for
    /// a fetch: it is made, and only from EL2 and below a stage 2 have its faults a handler here.
    pub fn can(&self, access: Access, user: bool) -> bool {
        match (self.setting, access) {
            (Setting::El1, Access::Fetch) => false,
            (Setting::El2, _) => !user,
            _ => true,
        }
    }

    /// Whether the regime has EL0.
    pub fn has_user(&self) -> bool {
        self.setting != Setting::El2
    }

    /// Asks.
    pub fn ask(&self, at: u64, access: Access, user: bool) -> Answer {
        let par: u64;
        macro_rules! at {
            ($operation:literal) => {
                // SAFETY: a look at a translation. What is executed here is mapped to itself if the
                // MMU is on.
                unsafe {
                    asm!(
                        "msr sctlr_el2, {during}",
                        "isb",
                        concat!("at ", $operation, ", {at}"),
                        "isb",
                        "mrs {par}, par_el1",
                        "msr sctlr_el2, {otherwise}",
                        "isb",
                        at = in(reg) at,
                        par = out(reg) par,
                        during = in(reg) self.during,
                        otherwise = in(reg) self.otherwise,
                        options(nostack, preserves_flags)
                    )
                }
            };
        }
        match (self.setting, access, user) {
            (_, Access::Fetch, _) => return self.fetch(at, user),
            (Setting::El1 | Setting::Host, Access::Read, false) => at!("s1e1r"),
            (Setting::El1 | Setting::Host, Access::Write, false) => at!("s1e1w"),
            (Setting::El1 | Setting::Host, Access::Read, true) => at!("s1e0r"),
            (Setting::El1 | Setting::Host, Access::Write, true) => at!("s1e0w"),
            (Setting::El2, Access::Read, _) => at!("s1e2r"),
            (Setting::El2, Access::Write, _) => at!("s1e2w"),
            (Setting::Stage2, Access::Read, false) => at!("s12e1r"),
            (Setting::Stage2, Access::Write, false) => at!("s12e1w"),
            (Setting::Stage2, Access::Read, true) => at!("s12e0r"),
            (Setting::Stage2, Access::Write, true) => at!("s12e0w"),
        }
        match par & 1 {
            0 => {
                let memory = (par >> 56) as u8;
                Answer::Page {
                    pa: par & 0x000f_ffff_ffff_f000,
                    memory,
                    share: share(memory, (par >> 7 & 3) as u8),
                }
            }
            _ => Answer::Fault { stage: 1 + (par >> 9 & 1) as u8, status: (par >> 1 & 0x3f) as u8 },
        }
    }

    /// Executes what is at an address, which is BRK or cannot be fetched.
    fn fetch(&self, at: u64, user: bool) -> Answer {
        // Interrupts masked; EL2 with its own stack pointer, EL1 with its own, EL0.
        let mode: u64 = match (self.setting, user) {
            (_, true) => 0x3c0,
            (Setting::Stage2, false) => 0x3c5,
            (_, false) => 0x3c9,
        };
        let syndrome: u64;
        // SAFETY: an exception that is taken at once, by the handler above, which changes these
        // registers and comes back.
        unsafe {
            asm!(
                "adr x30, 2f",
                "msr elr_el2, {at}",
                "msr spsr_el2, {mode}",
                "msr sctlr_el2, {during}",
                "isb",
                "eret",
                "2:",
                "msr sctlr_el2, {otherwise}",
                "isb",
                at = in(reg) at,
                mode = in(reg) mode,
                during = in(reg) self.during,
                otherwise = in(reg) self.otherwise,
                out("x0") syndrome,
                out("x1") _,
                out("x30") _,
            )
        }
        // EC, 31:26: BRK, or an instruction abort.
        match syndrome >> 26 & 0x3f {
            0x3c => Answer::Executed,
            _ => Answer::Fault {
                stage: if self.setting == Setting::Stage2 { 2 } else { 1 },
                status: (syndrome & 0x3f) as u8,
            },
        }
    }
}
