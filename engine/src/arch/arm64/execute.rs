//! Instructions, as they are executed. Everything here is for EL1 or EL2; elsewhere it ends in an
//! exception.

use core::arch::asm;

use super::{Domain, Ids};
use crate::shootdown::arm64::{Instruction, Op};

/// An instruction that makes stores visible, or discards what was fetched. It is a compiler barrier
/// as well: no `nomem`.
macro_rules! barrier {
    ($(#[$doc:meta])* $name:ident, $text:literal) => {
        $(#[$doc])*
        #[inline]
        pub(super) fn $name() {
            // SAFETY: a barrier orders, and changes nothing.
            unsafe { asm!($text, options(nostack, preserves_flags)) }
        }
    };
}

barrier!(dsb_ishst, "dsb ishst");
barrier!(dsb_nshst, "dsb nshst");
barrier!(dsb_ish, "dsb ish");
barrier!(dsb_nsh, "dsb nsh");
barrier!(isb, "isb");

/// Executes one instruction of a flush.
#[inline]
pub fn execute(instruction: Instruction, domain: Domain) {
    // By its word: an assembler knows the forms with ranges only if it is told that the processor
    // has them.
    macro_rules! tlbi {
        ($tlbi:ident: $($op:ident)*) => {
            match ($tlbi.op, domain) {
                $(
                    (Op::$op, Domain::Inner) => tlbi!(@ $tlbi, Op::$op, word),
                    (Op::$op, Domain::Local) => tlbi!(@ $tlbi, Op::$op, local_word),
                )*
            }
        };
        (@ $tlbi:ident, $op:path, $word:ident) => {{
            // Where everything is meant, the register that is named is the zero register (C5.5).
            const REGISTER: u8 = if $op.is_everything() { 31 } else { 0 };
            // SAFETY: what is forgotten is found again in the tables, which it is always allowed to
            // be. It is a compiler barrier as well: no `nomem`.
            unsafe {
                asm!(
                    ".inst {}", const $op.$word(REGISTER), in("x0") $tlbi.operand,
                    options(nostack, preserves_flags)
                )
            }
        }};
    }
    match (instruction, domain) {
        (Instruction::Tlbi(tlbi), _) => tlbi!(tlbi:
            Vmalle1 Aside1 Vae1 Vale1 Vaae1 Vaale1 Rvae1 Rvale1 Rvaae1 Rvaale1
            Vmalls12e1 Ipas2e1 Ipas2le1 Ripas2e1 Ripas2le1 Alle1 Alle2 Vae2 Vale2 Rvae2 Rvale2
        ),
        (Instruction::Dsb, Domain::Inner) => dsb_ish(),
        (Instruction::Dsb, Domain::Local) => dsb_nsh(),
    }
}

macro_rules! read {
    ($register:literal) => {{
        let value: u64;
        // SAFETY: an ID register is read, which changes nothing.
        unsafe {
            asm!(concat!("mrs {}, ", $register), out(reg) value,
                options(nomem, nostack, preserves_flags))
        };
        value
    }};
}

impl Ids {
    /// Reads the ID registers of this processor.
    pub fn read() -> Self {
        Self {
            isar0: read!("id_aa64isar0_el1"),
            mmfr0: read!("id_aa64mmfr0_el1"),
            mmfr1: read!("id_aa64mmfr1_el1"),
            mmfr2: read!("id_aa64mmfr2_el1"),
        }
    }
}

macro_rules! load {
    ($(#[$doc:meta])* $name:ident, $register:literal) => {
        $(#[$doc])*
        ///
        /// What was written to the tables before is published; an `ISB` follows, so that what comes
        /// next is translated by them.
        ///
        /// # Safety
        /// 1. The value is [`ttbr`](super::ttbr) of the root of tables that translate everything
        ///    that this processor uses through them, as it uses it, and that stay while they are
        ///    loaded.
        /// 2. Under the identifier nothing else was loaded since all that is remembered of it was
        ///    invalidated: it is the space's for good, or root and identifier are what
        ///    [`Identifiers::switch`](crate::shootdown::Identifiers::switch) has told this
        ///    processor last. Or the tables map nothing, and nothing is remembered of them.
        #[inline]
        pub unsafe fn $name(value: u64) {
            // SAFETY: what is translated from now on is what the caller vouches for (1., 2.).
            unsafe {
                asm!(
                    concat!("msr ", $register, ", {}"), "isb",
                    in(reg) value, options(nostack, preserves_flags)
                )
            }
        }
    };
}

load!(
    /// Loads tables for the lower half.
    load_ttbr0_el1, "ttbr0_el1"
);
load!(
    /// Loads tables for the upper half.
    load_ttbr1_el1, "ttbr1_el1"
);
load!(
    /// Loads tables for EL2.
    load_ttbr0_el2, "ttbr0_el2"
);
load!(
    /// Loads a guest's tables.
    load_vttbr_el2, "vttbr_el2"
);

macro_rules! set_up {
    ($(#[$doc:meta])* $name:ident, $($argument:ident $register:literal),*) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// 1. The values are right for the tables that are loaded: what the tables describe is
        ///    translated as it is used, before and after. They are written one after the other, so
        ///    best while the tables are not in use yet.
        /// 2. What was remembered under other values is invalidated before it is used.
        #[inline]
        pub unsafe fn $name($($argument: u64),*) {
            // SAFETY: how tables are read from now on is what the caller vouches for (1., 2.).
            unsafe {
                asm!(
                    $(concat!("msr ", $register, ", {", stringify!($argument), "}"),)* "isb",
                    $($argument = in(reg) $argument,)* options(nostack, preserves_flags)
                )
            }
        }
    };
}

set_up!(
    /// Says how tables of EL1 are read: [`MAIR`](super::Translation::MAIR), and
    /// [`tcr_el1`](super::tcr_el1).
    set_up_el1, mair "mair_el1", tcr "tcr_el1"
);
set_up!(
    /// Says how tables of EL2 are read: [`MAIR`](super::Translation::MAIR), and
    /// [`tcr_el2`](super::tcr_el2), or with `HCR_EL2.E2H` set [`tcr_el1`](super::tcr_el1).
    set_up_el2, mair "mair_el2", tcr "tcr_el2"
);
set_up!(
    /// Says how a guest's tables are read: [`vtcr_el2`](super::vtcr_el2).
    set_up_stage2, vtcr "vtcr_el2"
);
