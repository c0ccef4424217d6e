//! Every format of RISC-V, about which a processor is asked: `cargo xtask formats` runs it.
//!
//! Tables are made at random by the engine. At random addresses the hart loads, stores and jumps,
//! as supervisor and as user; of the G-stage by the instructions of the hypervisor extension. What
//! it reaches, or that it faults, has to be what the engine says, and what a walker says that
//! shares no code with it.
//!
//! The program runs on one hart, without translation but where it asks. Each page that is mapped
//! holds its own address, and behind it code that returns.
#![no_std]
#![no_main]

#[path = "../console.rs"]
mod console;

use core::arch::{asm, global_asm};
use core::cell::Cell;
use core::fmt::Arguments;
use core::ops::ControlFlow;
use core::panic::PanicInfo;
use core::ptr::{NonNull, with_exposed_provenance_mut};

use tablewright::arch::riscv64::{Cpu, Features, Instruction, execute, satp};
use tablewright::format::{Format, Riscv64};
use tablewright::{
    Address, AddressSpace, Attrs, Barrier, Caps, Change, Entry, Invalidation, Ipa, Level, Pa,
    Perms, Platform, Span, Va,
};
use tablewright_walker::{Fault, Regime, translate};

/// This image, and what it runs on; memory for tables; memory that is mapped.
const IMAGE: u64 = 0x8020_0000;
const IMAGE_SIZE: u64 = 0x20_0000;
const TABLES: u64 = 0x8040_0000;
const TABLES_END: u64 = 0x8800_0000;
const DATA: u64 = 0x8800_0000;
const DATA_SIZE: u64 = 0x400_0000;
/// Addresses that are asked about, of each format.
const ADDRESSES: usize = 10_000;
const PAGE: u64 = 4096;

const FEATURES: Features = Features::LEAST;

/// Tables come from the start of what there is, and none goes back.
struct Tables {
    next: Cell<u64>,
    guests: bool,
}

impl Tables {
    fn take(&self, count: u64) -> Option<Pa> {
        let first = self.next.get().next_multiple_of(count * PAGE);
        self.next.set(first + count * PAGE);
        (self.next.get() <= TABLES_END).then_some(Pa::new(first))
    }

    fn cpu(&self) -> Cpu {
        if self.guests { Cpu::of_guests(FEATURES) } else { Cpu::new(FEATURES) }
    }
}

// SAFETY: a frame is handed out once (1.) and reached without translation (2.); there are no links
// (3.); the one hart forgets what it is told by itself (4. to 6.). There is one (7.), which does
// not unwind (8.), and the space has one identifier (9.).
unsafe impl Platform for &Tables {
    fn alloc_table(&self, _: Level) -> Option<Pa> {
        self.take(1)
    }

    fn alloc_root(&self, _: Level, count: usize) -> Option<Pa> {
        self.take(count as u64)
    }

    unsafe fn free_table(&self, _: Pa, _: Level) {}

    unsafe fn table(&self, frame: Pa, _: Level) -> NonNull<Entry> {
        // SAFETY: memory, and not at zero.
        unsafe { NonNull::new_unchecked(memory(frame.get())) }
    }

    fn caps(&self) -> Caps {
        FEATURES.caps()
    }

    fn invalidate(&self, flush: &Invalidation<'_>) {
        self.cpu().invalidate(flush);
    }

    fn barrier(&self, barrier: Barrier) {
        self.cpu().barrier(barrier);
    }
}

fn memory<T>(at: u64) -> *mut T {
    with_exposed_provenance_mut(at as usize)
}

/// Numbers that look random (SplitMix64).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// An access that the hart is asked to make.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Want {
    Read,
    Write,
    Execute,
}

global_asm!(
    r#"
    .pushsection .start, "ax"
    .global start
    start:
    la sp, stack_end
    call formats_main
    .popsection

    // Makes an access, of the kind in a1, to the address in a0, by the root in a2, which is loaded
    // for that; as user if a3 is not zero. Returns what was read, and why it faulted, or zero.
    .global probe
    .balign 4
    probe:
    mv t5, ra
    mv a4, a0
    li a0, 0
    csrw satp, a2
    sfence.vma
    la t0, 2f
    csrw stvec, t0
    li t2, 0x40100              // SUM, SPP
    csrs sstatus, t2
    beqz a3, 1f
    li t2, 0x100
    csrc sstatus, t2            // to the user
    la t1, user_probe
    li t2, 0x100000000          // where it has this page
    sub t2, t2, a5
    add t1, t1, t2
    csrw sepc, t1
    sret
    1: li t1, 1
    beq a1, t1, 3f
    bgtu a1, t1, 4f
    ld a0, 0(a4)
    j 5f
    3: ld a0, 0(a4)
    sd a0, 0(a4)
    j 5f
    4: addi a4, a4, 8
    jalr ra, a4
    5: li a1, 0
    j 6f
    .balign 4
    2: csrr a1, scause
    6: csrw satp, zero
    sfence.vma
    // An ECALL of the user is its end.
    li t1, 8
    bne a1, t1, 7f
    li a1, 0
    7: mv ra, t5
    ret

    // The user's page.
    .balign 4096
    .global user_page
    user_page:
    user_probe:
    li t1, 1
    beq a1, t1, 1f
    bgtu a1, t1, 2f
    ld a0, 0(a4)
    ecall
    1: ld a0, 0(a4)
    sd a0, 0(a4)
    ecall
    2: addi a4, a4, 8
    jalr ra, a4
    ecall
    .balign 4096

    // Makes an access of a guest's, whose stage 1 is off, to the address in a0: HLV.D, HSV.D.
    .global guest_probe
    guest_probe:
    mv a4, a0
    li a0, 0
    la t0, 2f
    csrw stvec, t0
    csrw 0x680, a2              // hgatp
    csrw 0x280, zero            // vsatp
    .insn r 0x73, 0, 0x31, x0, x0, x0
    li t2, 0x100                // hstatus.SPVP: the guest's supervisor
    csrs 0x600, t2
    .insn r 0x73, 4, 0x36, a0, a4, x0
    beqz a1, 5f
    .insn r 0x73, 4, 0x37, x0, a4, a0
    5: li a1, 0
    j 6f
    .balign 4
    2: csrr a1, scause
    6: csrw 0x680, zero
    ret
    "#
);

unsafe extern "C" {
    safe static user_page: u8;
}

/// A pair of results, in a0 and a1.
#[repr(C)]
struct Probed {
    value: u64,
    fault: u64,
}

unsafe extern "C" {
    fn probe(at: u64, want: u64, root: u64, user: u64, _: u64, page: u64) -> Probed;
    fn guest_probe(at: u64, want: u64, root: u64) -> Probed;
}

/// The address at which the user has its page.
const USER_TEXT: u64 = 0x1_0000_0000;

/// Whether the hart makes an access, and what it finds.
fn ask<F: Format>(root: Pa, at: u64, want: Want, user: bool) -> Option<u64> {
    let value = satp::<F>(root, 0).unwrap_or_default();
    let page = &raw const user_page as u64;
    // SAFETY: the image is mapped where it is; what is reached is memory that is given away to it,
    // in which each word is written with itself.
    let Probed { value, fault } = unsafe {
        match F::SIGNED {
            true => probe(at, want as u64, value, u64::from(user), 0, page),
            false => guest_probe(at, want as u64, value),
        }
    };
    (fault == 0).then_some(value)
}

/// Whether the hart has a format: a mode that it has not is not taken (PRIV 10.1.11, 18.2.10). The
/// root is that of tables which have the image where it is.
fn is_there<F: Format>(root: Pa) -> bool {
    let value = satp::<F>(root, 0).unwrap_or_default();
    let found: u64;
    // SAFETY: this code is where it was while the root is loaded, and no guest runs.
    unsafe {
        match F::SIGNED {
            true => asm!(
                "sfence.vma", "csrw satp, {value}", "csrr {found}, satp", "csrw satp, zero",
                "sfence.vma", value = in(reg) value, found = out(reg) found
            ),
            false => asm!(
                "csrw 0x680, {value}", "csrr {found}, 0x680", "csrw 0x680, zero",
                value = in(reg) value, found = out(reg) found
            ),
        }
    }
    found == value
}

/// Makes tables of a format at random, and asks about addresses.
fn check<F: Format>(regime: Regime) -> Result<(), &'static str>
where
    F::Input: Address,
{
    let tables = Tables { next: Cell::new(TABLES), guests: !F::SIGNED };
    let mut space = AddressSpace::<F, _>::new(&tables).ok_or("no memory")?;
    let mut dice = Dice(u64::from(F::LEVELS) + 100 * u64::from(F::SIGNED));
    let span = |at: u64, size: u64| Span::new(F::Input::from_bits(at), size);
    let all = Perms::READ | Perms::WRITE | Perms::EXEC;
    if F::SIGNED {
        let image = span(IMAGE, IMAGE_SIZE).map_err(|_| "the image")?;
        let attrs = Attrs::KERNEL_DATA.with_perms(all);
        space.map(image, Pa::new(IMAGE), attrs).map_err(|_| "the image")?;
        let page = span(USER_TEXT, PAGE).map_err(|_| "the user's page")?;
        let frame = Pa::new(&raw const user_page as u64);
        space.map(page, frame, Attrs::USER_TEXT).map_err(|_| "the user's page")?;
    }
    if !is_there::<F>(space.root()) {
        say(format_args!("skipped: {}", F::NAME));
        return Ok(());
    }
    space.make_live();

    // Addresses near each other, and far, in both halves. QEMU 7.2 takes the highest bit of a
    // guest's for a sign.
    let top = F::INPUT_BITS - 1;
    let address = |dice: &mut Dice| {
        let bits = [22, 26, 31, top][dice.below(4) as usize].min(top);
        let low = dice.next() & ((1 << bits) - 1);
        let at = if F::SIGNED && dice.below(2) == 0 { !low } else { low };
        at & !(PAGE - 1)
    };
    let perms = |dice: &mut Dice| {
        let some = [Perms::READ, Perms::READ | Perms::WRITE, all, Perms::READ | Perms::EXEC];
        let some = some[dice.below(4) as usize];
        match (F::SIGNED, dice.below(3)) {
            (false, 0) => Perms::EXEC.and_user(),
            (false, _) => some.and_user(),
            (true, 0) => some.and_user().difference(Perms::EXEC),
            (true, _) => some,
        }
    };
    let mut mapped = [(0, 0); 512];
    let mut count = 0;
    for _ in 0..6000 {
        let level = [0, 0, 0, 1][dice.below(4) as usize];
        let size = (1 + dice.below(4)) << (12 + 9 * level);
        let at = address(&mut dice) & !((1 << (12 + 9 * level)) - 1);
        let place = dice.below((DATA_SIZE - size) >> (12 + 9 * level)) << (12 + 9 * level);
        let attrs = Attrs {
            accessed: dice.below(2) == 0,
            dirty: dice.below(2) == 0,
            ..match F::SIGNED {
                true => Attrs { global: false, ..Attrs::KERNEL_DATA },
                false => Attrs::GUEST_MEMORY,
            }
        };
        let Ok(span) = span(at, size) else { continue };
        match dice.below(8) {
            0 if count > 0 => {
                let (at, size) = mapped[dice.below(count as u64) as usize];
                let Ok(span) = self::span::<F>(at, size) else { continue };
                let change = Change::new().perms(perms(&mut dice));
                let mut gather = space.gather();
                let _ = gather.protect(span, change);
                gather.finish(|_| ());
            }
            1 if count > 8 => {
                let (at, size) = mapped[dice.below(count as u64) as usize];
                let Ok(span) = self::span::<F>(at, size) else { continue };
                let mut gather = space.gather();
                let _ = gather.unmap(span, |_| ControlFlow::Continue(()));
                gather.finish(|_| ());
            }
            _ => {
                let frame = Pa::new(DATA + place);
                let attrs = attrs.with_perms(perms(&mut dice));
                if space.map(span, frame, attrs).is_ok() && count < mapped.len() {
                    mapped[count] = (at, size);
                    count += 1;
                }
            }
        }
    }

    let (mut reached, mut refused) = (0, 0);
    for number in 0..ADDRESSES {
        // Of what was mapped once, and of anything.
        let at = match dice.below(8) {
            0 => address(&mut dice),
            _ => {
                let (at, size) = mapped[dice.below(count as u64) as usize];
                at + (dice.below(size) & !(PAGE - 1))
            }
        };
        // Not the program itself.
        if F::SIGNED && (IMAGE..IMAGE + IMAGE_SIZE).contains(&at) || at == USER_TEXT {
            continue;
        }
        // Not every emulator has HLVX ask for X in the G-stage.
        let kinds = if F::SIGNED { 3 } else { 2 };
        let want = [Want::Read, Want::Write, Want::Execute][number % kinds];
        let user = F::SIGNED && dice.below(2) == 0;
        let root = space.root();
        let leaf = space.query(F::Input::from_bits(at));
        let by_engine = leaf.and_then(|leaf| {
            let perms = leaf.attrs().perms;
            let right = match (want, user) {
                (Want::Read, false) => Perms::READ,
                (Want::Write, false) => Perms::WRITE,
                (Want::Execute, false) => Perms::EXEC,
                (Want::Read, true) => Perms::USER_READ,
                (Want::Write, true) => Perms::USER_WRITE,
                (Want::Execute, true) => Perms::USER_EXEC,
            };
            let frame = leaf.frame().get() + (at - leaf.input().bits());
            perms.contains(right).then_some(frame)
        });
        // SAFETY: a table of the space's, without another editor.
        let mut read = |table: u64, index: usize| unsafe { *memory::<u64>(table).add(index) };
        let by_walker = match translate(regime, root.get(), at, &mut read) {
            Ok(leaf) => {
                let access = if user { leaf.access.user } else { leaf.access.privileged };
                let may = match want {
                    Want::Read => access.read,
                    Want::Write => access.write,
                    Want::Execute => access.execute,
                };
                may.then_some(leaf.physical(at))
            }
            Err(Fault::NotMapped { .. } | Fault::NonCanonical) => None,
            Err(_) => return Err("the walker takes a descriptor for reserved"),
        };
        if by_engine != by_walker {
            say(format_args!("WRONG: {at:#x}: {by_engine:x?} and, by the walker, {by_walker:x?}"));
            return Err("engine and walker");
        }
        let found = ask::<F>(root, at, want, user);
        // A jump returns no data.
        let right = match want {
            Want::Read | Want::Write => found == by_engine,
            Want::Execute => found.is_some() == by_engine.is_some(),
        };
        if !right {
            say(format_args!(
                "WRONG: {}: {want:?} of {at:#x}, as user: {user}: {found:x?}, and by the tables \
                 {by_engine:x?}",
                F::NAME
            ));
            return Err("engine and processor");
        }
        // The flags that hardware has set are seen, where it does that.
        let now = space.query(F::Input::from_bits(at)).map(|leaf| leaf.attrs());
        if let (Some(_), Some(now)) = (found, now)
            && !(now.accessed && (now.dirty || want != Want::Write))
        {
            return Err("a flag of what was used is clear");
        }
        match by_engine {
            Some(_) => reached += 1,
            None => refused += 1,
        }
    }
    if reached < 1000 || refused < 1000 {
        return Err("too few of one kind");
    }
    say(format_args!("ok: {}: {reached} accesses, {refused} faults", F::NAME));
    Ok(())
}

fn span<F: Format>(at: u64, size: u64) -> Result<Span<F::Input>, &'static str> {
    Span::new(F::Input::from_bits(at), size).map_err(|_| "no whole pages")
}

fn all() -> Result<(), &'static str> {
    for page in (DATA..DATA + DATA_SIZE).step_by(PAGE as usize) {
        // SAFETY: memory that nothing else uses.
        unsafe {
            memory::<u64>(page).write_volatile(page);
            memory::<u16>(page + 8).write_volatile(0x8082); // C.RET
        }
    }
    // SAFETY: what is fetched from now on is what was stored.
    unsafe { asm!("fence.i") };
    execute(Instruction::Sfence { at: None, asid: None });
    let of = |levels, guest| Regime::Riscv { levels, guest };
    check::<Riscv64<3, false, Va>>(of(3, false))?;
    check::<Riscv64<4, false, Va>>(of(4, false))?;
    check::<Riscv64<5, false, Va>>(of(5, false))?;
    check::<Riscv64<3, false, Ipa>>(of(3, true))?;
    check::<Riscv64<4, false, Ipa>>(of(4, true))?;
    check::<Riscv64<5, false, Ipa>>(of(5, true))
}

fn say(what: Arguments<'_>) {
    console::line("formats", what);
}

#[unsafe(no_mangle)]
extern "C" fn formats_main() -> ! {
    match all() {
        Ok(()) => say(format_args!("done, 0 wrong")),
        Err(why) => say(format_args!("WRONG: {why}")),
    }
    console::switch_off()
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    say(format_args!("WRONG: {info}"));
    console::switch_off()
}
