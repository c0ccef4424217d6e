//! A vCPU, as its own processor has it: registers, events, and turns.

use core::arch::asm;
use core::mem::MaybeUninit;
use core::sync::atomic::Ordering;

use x86_64::registers::model_specific::Msr;

use crate::apic::Apic;
use crate::count::count;
use crate::counters::Count;
use crate::processor;
use crate::trail::Trail;
use crate::vcpu::{Order, Vcpu};
use crate::vmcb::{self, Block, Registers, Segment, event, segment};
use crate::world::World;

/// The state of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It waits to be started.
    Off,
    /// It runs, when it has a turn.
    Runnable,
    /// It waits for an interrupt.
    Halted,
}

#[repr(C, align(16))]
struct Floats([u8; 512]);

/// A vCPU, as its own processor has it.
pub struct Context {
    /// The part that all processors see.
    pub vcpu: &'static Vcpu,
    /// The control block, which lies where it says.
    pub block: &'static mut Block,
    /// The registers that are not in the block.
    pub registers: Registers,
    /// Its interrupt controller.
    pub apic: Apic,
    /// Its state.
    pub state: State,
    /// An event whose delivery was cut short.
    again: u64,
    floats: Floats,
    debug: [u64; 4],
    /// `TSC_AUX`, which RDTSCP reads.
    pub aux: u64,
    /// Its last exits.
    pub trail: Trail,
}

/// `EFER.SVME`: it has to be set while a guest runs. The guest does not see it.
pub const EFER_SVME: u64 = 1 << 12;
/// PAT after a reset.
const PAT: u64 = 0x0007_0406_0007_0406;
const TSC_AUX: u32 = 0xc000_0103;
const INTERRUPTS_ON: u64 = 1 << 9;

impl Context {
    /// A vCPU that waits to be started.
    fn new(world: &World, vcpu: &'static Vcpu, block: &'static mut Block) -> Self {
        block.intercept = [vmcb::INTERCEPT_FIRST, vmcb::INTERCEPT_SECOND];
        (block.ports, block.registers) = world.bitmaps;
        block.interrupt = vmcb::MASK_INTERRUPTS;
        block.nested = 1;
        block.nested_cr3 = world.nested;
        let mut context = Self {
            vcpu,
            block,
            registers: Registers::default(),
            apic: Apic::new(),
            state: State::Off,
            again: 0,
            floats: Floats([0; 512]),
            debug: [0; 4],
            aux: 0,
            trail: Trail::new(),
        };
        context.reset();
        context
    }

    /// Puts it into the state after INIT, in which it waits (APM vol. 2 14.1.3).
    pub fn reset(&mut self) {
        let block = &mut *self.block;
        let plain = |attributes| Segment { selector: 0, attributes, limit: 0xffff, base: 0 };
        block.segments = [plain(0x93); 10];
        block.segments[segment::CODE] = plain(0x9b);
        block.segments[segment::GLOBALS] = plain(0);
        block.segments[segment::LOCALS] = plain(0x82);
        block.segments[segment::INTERRUPTS] = plain(0);
        block.segments[segment::TASK] = plain(0x8b);
        (block.cr0, block.cr2, block.cr3, block.cr4) = (0x10, 0, 0, 0);
        (block.dr6, block.dr7) = (0xffff_0ff0, 0x400);
        block.efer = EFER_SVME;
        block.pat = PAT;
        (block.flags, block.instruction, block.stack, block.rax) = (2, 0, 0, 0);
        (block.privilege, block.inject, block.shadow) = (0, 0, 0);
        self.registers = Registers::default();
        self.apic = Apic::new();
        self.again = 0;
        // FCW and MXCSR.
        self.floats = Floats([0; 512]);
        self.floats.0[..2].copy_from_slice(&0x37f_u16.to_le_bytes());
        self.floats.0[24..28].copy_from_slice(&0x1f80_u32.to_le_bytes());
        self.state = State::Off;
    }

    /// Carries out the orders of other vCPUs.
    pub fn obey(&mut self) {
        for order in self.vcpu.orders().into_iter().flatten() {
            match order {
                Order::Reset => self.reset(),
                Order::Start(page) if self.state == State::Off => {
                    let code = &mut self.block.segments[segment::CODE];
                    code.selector = u16::from(page) << 8;
                    code.base = u64::from(page) << 12;
                    self.state = State::Runnable;
                }
                // As of a processor that runs: it is ignored.
                Order::Start(_) => {}
            }
        }
    }

    /// The address of the block.
    pub fn block_at(&self) -> u64 {
        &raw const *self.block as u64
    }

    /// The task's priority.
    pub fn task(&self) -> u64 {
        (self.block.interrupt & 0xf) << 4
    }

    /// Sets the task's priority.
    pub fn set_task(&mut self, task: u64) {
        self.block.interrupt = self.block.interrupt & !0xff | task >> 4 & 0xf;
    }

    /// Whether something ends its halt: an interrupt that it takes, or NMI.
    pub fn is_wanted(&self) -> bool {
        let takes = self.block.flags & INTERRUPTS_ON != 0;
        self.vcpu.nmi.load(Ordering::Relaxed)
            || takes && self.apic.pending(self.vcpu, self.task()).is_some()
    }

    /// Has an event delivered when it is entered: one that was cut short, NMI, an interrupt; or has
    /// it leave when it takes interrupts.
    pub fn prepare(&mut self) {
        let task = self.task();
        let block = &mut *self.block;
        block.intercept[0] &= !vmcb::INTERCEPT_WINDOW;
        block.interrupt &= !vmcb::WINDOW;
        if block.inject == 0 {
            block.inject = core::mem::take(&mut self.again);
        }
        if block.inject == 0 && self.vcpu.nmi.swap(false, Ordering::Acquire) {
            block.inject = event::VALID | event::NMI | 2;
        }
        let Some(vector) = self.apic.pending(self.vcpu, task) else {
            return;
        };
        let takes = block.flags & INTERRUPTS_ON != 0 && block.shadow & 1 == 0;
        if takes && block.inject == 0 {
            self.apic.take(self.vcpu, vector);
            block.inject = event::VALID | event::INTERRUPT | u64::from(vector);
        } else {
            block.intercept[0] |= vmcb::INTERCEPT_WINDOW;
            block.interrupt |= vmcb::WINDOW;
        }
    }

    /// Keeps an event whose delivery was cut short by its exit. A software interrupt begins again
    /// by itself.
    pub fn left(&mut self) {
        self.block.inject = 0;
        let cut_short = self.block.interrupted;
        let by_itself = match cut_short & event::KIND {
            event::SOFTWARE => true,
            event::EXCEPTION => matches!(cut_short as u8, 3 | 4),
            _ => false,
        };
        self.again = match cut_short & event::VALID != 0 && !by_itself {
            true => cut_short,
            false => 0,
        };
    }

    /// Gives it a fault, instead of the event that was being delivered.
    pub fn fault(&mut self, vector: u8, code: Option<u32>) {
        count(Count::Injected, 1);
        self.again = 0;
        let code = code.map_or(0, |code| event::CODE | u64::from(code) << 32);
        self.block.inject = event::VALID | event::EXCEPTION | u64::from(vector) | code;
    }

    /// Gives it the fault of an instruction that is not there.
    pub fn undefined(&mut self) {
        self.fault(6, None);
    }

    /// Gives it the fault of a forbidden access.
    pub fn protection(&mut self) {
        self.fault(13, Some(0));
    }

    /// It goes on behind an instruction of this length.
    pub fn skip(&mut self, length: u64) {
        self.block.instruction = self.block.instruction.wrapping_add(length);
        self.block.shadow = 0;
    }

    // ---- A turn ----

    /// Loads the registers that the block has not, and that stay in the processor while the host
    /// runs.
    pub fn load(&mut self) {
        let block = self.block_at();
        // SAFETY: registers that the host does not use; the block and the area are of this vCPU.
        unsafe {
            asm!("vmload rax", in("rax") block, options(nostack));
            asm!("fxrstor64 [{}]", in(reg) &raw const self.floats, options(nostack));
            asm!(
                "mov dr0, {}", "mov dr1, {}", "mov dr2, {}", "mov dr3, {}",
                in(reg) self.debug[0], in(reg) self.debug[1], in(reg) self.debug[2],
                in(reg) self.debug[3],
                options(nostack),
            );
        }
        self.load_aux();
    }

    /// Loads `TSC_AUX`.
    pub fn load_aux(&self) {
        // SAFETY: the host does not use it, and its upper half is zero.
        unsafe { Msr::new(TSC_AUX).write(self.aux) };
    }

    /// Stores these registers.
    pub fn store(&mut self) {
        let block = self.block_at();
        self.store_floats();
        // SAFETY: registers that the host does not use; the block is of this vCPU.
        unsafe {
            asm!("vmsave rax", in("rax") block, options(nostack));
            asm!(
                "mov {}, dr0", "mov {}, dr1", "mov {}, dr2", "mov {}, dr3",
                out(reg) self.debug[0], out(reg) self.debug[1], out(reg) self.debug[2],
                out(reg) self.debug[3],
                options(nostack),
            );
        }
    }

    fn store_floats(&mut self) {
        // SAFETY: the area is of this vCPU.
        unsafe {
            asm!("fxsave64 [{}]", in(reg) &raw mut self.floats, options(nostack));
        }
    }

    /// Quadwords of XMM0 to XMM5, of the vCPU that has its turn.
    pub fn wide(&mut self) -> [u64; 12] {
        self.store_floats();
        let mut words = [0; 12];
        // APM vol. 2 11.5.3: XMM0 is at 160.
        for (word, bytes) in words.iter_mut().zip(self.floats.0[160..].chunks_exact(8)) {
            *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        }
        words
    }
}

/// Makes the vCPUs of this processor, in frames of their own: they are too large for a stack.
#[expect(clippy::mut_from_ref, reason = "frames of their own, each time")]
pub fn all(world: &'static World) -> Option<&'static mut [Context]> {
    let machine = *world.vm.guest.space().platform();
    let number = processor::number();
    let mine = || world.vcpus.iter().filter(|vcpu| vcpu.home == number);
    // SAFETY: a context is written before it is used.
    let all = unsafe { machine.take::<MaybeUninit<Context>>(mine().count() as u64) }?;
    for (place, vcpu) in all.iter_mut().zip(mine()) {
        // SAFETY: zeros are a block that does nothing.
        let block = unsafe { machine.take::<Block>(1) }?.first_mut()?;
        place.write(Context::new(world, vcpu, block));
    }
    let first = all.as_mut_ptr().cast::<Context>();
    // SAFETY: all are written.
    Some(unsafe { core::slice::from_raw_parts_mut(first, all.len()) })
}
