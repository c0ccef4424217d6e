//! A guest on nested tables, which makes one access and comes back (APM vol. 2, chapter 15 and
//! appendix B).
//!
//! The guest is in long mode, with tables of its own, and has neither vectors nor a stack: its page
//! faults are intercepted. It runs under one ASID, and what is remembered under it is forgotten
//! when that was [asked for](forget).

use core::arch::asm;
use core::sync::atomic::{AtomicBool, Ordering};

use tablewright::Pa;
use x86_64::registers::control::{Cr0, Cr4, Efer, EferFlags};
use x86_64::registers::model_specific::Msr;

use crate::cpu::{Fault, Probe};
use crate::vmcb::{Block, Segment, exit, segment};

/// In `EXITINFO1`: the address is that of what the guest wants (15.25.6).
pub const FINAL: u64 = 1 << 32;
/// In `EXITINFO1`: the address is that of a descriptor in the guest's tables.
pub const IN_WALK: u64 = 1 << 33;

// Intercepts (appendix B): page faults; shutdown; VMRUN, which has to be, and VMMCALL.
const PAGE_FAULT: u32 = 1 << 14;
const SHUTDOWN: u32 = 1 << 31;
const VMRUN_AND_VMMCALL: u32 = 0b11;

const EXIT_PAGE_FAULT: u64 = 0x40 + 14;

/// The place of SS in [`Block::segments`].
const STACK: usize = 2;

const NESTED_PAGING: u64 = 1;
const FORGET_ALL: u32 = 1;

/// The address for the processor's own state while a guest runs.
const VM_HSAVE_PA: u32 = 0xc001_0117;

static FORGET: AtomicBool = AtomicBool::new(true);

/// Has all translations of the guest forgotten before it runs again.
pub fn forget() {
    FORGET.store(true, Ordering::Relaxed);
}

/// A guest.
pub struct Guest {
    block: &'static mut Block,
}

impl Guest {
    /// A guest with tables of its own at `root`, on nested tables at `nested`. `frames` are two of
    /// memory.
    ///
    /// # Safety
    /// 1. The frames have no other user, and are mapped one to one.
    /// 2. The tables map nothing that is not meant for the guest, and the processor has nested
    ///    paging.
    pub unsafe fn new(frames: u64, root: Pa, nested: Pa) -> Self {
        let block = core::ptr::with_exposed_provenance_mut::<Block>(frames as usize);
        // SAFETY: ours (1.), and zeros are a block that does nothing.
        let block = unsafe {
            block.write_bytes(0, 1);
            &mut *block
        };
        // SAFETY: ours (1.); the processor has it (2.).
        unsafe {
            Efer::update(|efer| efer.insert(EferFlags::SECURE_VIRTUAL_MACHINE_ENABLE));
            Msr::new(VM_HSAVE_PA).write(frames + size_of::<Block>() as u64);
        }
        block.intercept_exceptions = PAGE_FAULT;
        block.intercept = [SHUTDOWN, VMRUN_AND_VMMCALL];
        block.asid = 1;
        block.nested = NESTED_PAGING;
        block.nested_cr3 = nested.get();
        block.efer = Efer::read_raw();
        block.cr4 = Cr4::read_raw();
        block.cr3 = root.get();
        block.cr0 = Cr0::read_raw();
        block.dr6 = 0xffff_0ff0;
        block.dr7 = 0x400;
        Self { block }
    }

    /// Makes an access, as the guest's supervisor or its user, and returns what it read.
    ///
    /// # Errors
    /// How it ended otherwise.
    pub fn access(&mut self, probe: &Probe, is_user: bool) -> Result<u64, Fault> {
        let level = if is_user { 3 } else { 0 };
        let flat = |kind: u16| Segment {
            selector: level,
            attributes: kind | level << 5,
            limit: u32::MAX,
            base: 0,
        };
        let block = &mut *self.block;
        // Present, of code or data, that may be written or executed, in long mode.
        block.segments[segment::CODE] = flat(0xa9b);
        block.segments[STACK] = flat(0xc93);
        block.privilege = level as u8;
        block.flags = 2;
        block.instruction = probe.instruction;
        block.rax = 0;
        block.tlb_control = match FORGET.swap(false, Ordering::Relaxed) {
            true => FORGET_ALL,
            false => 0,
        };
        // SAFETY: the guest reaches nothing but what its tables map, and the probes leave other
        // registers than RAX alone, which is that of the block.
        unsafe {
            asm!(
                "vmrun rax",
                inout("rax") &raw mut *block => _,
                in("rdi") probe.at,
                in("rsi") probe.value,
                in("rdx") probe.back,
            );
        }
        let [info, at] = block.exit_info;
        match block.exit_code {
            exit::CALL => Ok(block.rax),
            EXIT_PAGE_FAULT => Err(Fault::Page { code: info, at }),
            exit::NESTED => Err(Fault::Nested { info, at }),
            code => Err(Fault::Other(code)),
        }
    }
}
