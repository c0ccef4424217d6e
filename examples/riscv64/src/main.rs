//! A small kernel for RISC-V on the engine: QEMU boots it, `cargo xtask example riscv64` runs it.
//!
//! It maps its image and all memory, each with its own permissions; gives memory to itself and to a
//! process when it is used; forks the process, whose pages are copied when one of the two writes
//! them, the child on the other hart if there is one; and takes a page back from the child while it
//! reads it there, which the firmware tells that hart. Each step says what it has seen, and the
//! last that each frame has come back.
//!
//! The spaces are here, what the engine asks for in [`platform`]. The rest is what any kernel has:
//! [`boot`], [`cpu`].
#![no_std]
#![no_main]

mod boot;
mod console;
mod cpu;
#[path = "../../x86-64/src/memory.rs"]
mod memory;
mod platform;

use core::fmt::Arguments;
use core::ops::{ControlFlow, Range};
use core::panic::PanicInfo;
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use spin::mutex::SpinMutex;
use tablewright::arch::riscv64::{Instruction, execute, load_satp, satp};
use tablewright::format::Sv39;
use tablewright::linear::{LinearMap, MemoryMap};
use tablewright::{
    AddressSpace, Attrs, Change, EditError, KernelHalf, Liveness, Mapping, Pa, Perms, Span, Va,
};

use cpu::Frame;
use memory::{CPUS, FRAMES, Frames, KERNEL, PAGE, WINDOW, linear};
use platform::{FEATURES, FENCES, HARTS, SPACES, Tables, add_space, here, lock};

/// Without Svpbmt: memory is as the machine has it.
type Format = Sv39<false>;

/// Addresses of all memory in the kernel's half, of what the kernel uses by demand, and of what a
/// process does.
const LINEAR: u64 = 0xffff_ffc0_0000_0000;
const HEAP: Range<u64> = 0xffff_ffe0_0000_0000..0xffff_ffe0_0010_0000;
const USER_TEXT: u64 = 0x40_0000;
const USER_HEAP: u64 = 0x1000_0000;
const USER_PAGES: u64 = 500;
const LAST_PAGE: u64 = USER_HEAP + (USER_PAGES - 1) * PAGE;

/// The numbers of the spaces.
const KERNELS: usize = 0;
const PARENT: usize = 1;
const CHILD: usize = 2;

type Process = AddressSpace<Format, Tables>;

static KERNEL_HALF: SpinMutex<Option<KernelHalf<Format, Tables>>> = SpinMutex::new(None);
static PROCESSES: [SpinMutex<Option<Process>>; 3] = [const { SpinMutex::new(None) }; 3];
/// How many processes have a frame, behind the start of memory.
static SHARES: [AtomicU8; 1 << 18] = [const { AtomicU8::new(0) }; 1 << 18];
/// The space that each hart has loaded; what the second one is to run, and what came of it.
static LOADED: [AtomicUsize; CPUS] = [const { AtomicUsize::new(KERNELS) }; CPUS];
static WORK: SpinMutex<Option<(u64, [u64; 3])>> = SpinMutex::new(None);
static RESULT: SpinMutex<Option<u64>> = SpinMutex::new(None);
/// The child's page that is not given again.
static TAKEN: AtomicU64 = AtomicU64::new(0);
/// How many page faults there were, and in how many of them a page was copied, or taken over from
/// those that have let it go.
static FAULTS: AtomicU64 = AtomicU64::new(0);
static COPIED: AtomicU64 = AtomicU64::new(0);
static TAKEN_OVER: AtomicU64 = AtomicU64::new(0);
/// Whether the second hart has the kernel's root and takes part in shootdowns.
static ONLINE: AtomicU8 = AtomicU8::new(0);

/// Says what was seen.
fn say(what: Arguments<'_>) {
    console::line("example", what);
}

/// Says how it ended, and ends the machine.
fn end(how: Arguments<'_>) -> ! {
    say(how);
    console::switch_off()
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    end(format_args!("WRONG: {info}"))
}

fn span(start: u64, size: u64) -> Result<Span<Va>, &'static str> {
    Span::new(Va::new(start), size).map_err(|_| "not in whole pages")
}

fn shares(frame: Pa) -> &'static AtomicU8 {
    &SHARES[(frame.get() / PAGE) as usize % SHARES.len()]
}

/// Drops a process's share of a frame. The last share clears the frame and frees it.
fn let_go(frame: Pa) {
    if shares(frame).fetch_sub(1, Ordering::Relaxed) == 1 {
        // SAFETY: no process has it, and no hart remembers that one had.
        unsafe { linear::<u8>(frame).write_bytes(0, PAGE as usize) };
        lock(&FRAMES).put(frame);
    }
}

/// Maps the image and all memory, and loads that. What is behind the image is free.
fn map(ram: Span<Pa>) -> Result<(), &'static str> {
    let [text, rodata, data, image_end] = boot::image();
    *lock(&FRAMES) = Frames::new(image_end - KERNEL..ram.last().get() + 1);

    let mut space = AddressSpace::<Format, _>::new(Tables).ok_or("no memory")?;
    // Code and constants are read-only in the linear map too.
    let constant = Span::new(Pa::new(text - KERNEL), data - text).map_err(|_| "no whole pages")?;
    let special = [(constant, Attrs::KERNEL_RODATA)];
    let memory = MemoryMap { ram: &[ram], reserved: &[], special: &special };
    let all = LinearMap::new(Va::new(LINEAR), Mapping::new(Attrs::KERNEL_DATA));
    all.build(&mut space, &memory).map_err(|_| "no linear map")?;
    for (from, to, attrs) in [
        (text, rodata, Attrs::KERNEL_TEXT),
        (rodata, data, Attrs::KERNEL_RODATA),
        (data, image_end, Attrs::KERNEL_DATA),
    ] {
        let mapped = space.map(span(from, to - from)?, Pa::new(from - KERNEL), attrs);
        mapped.map_err(|_| "the kernel cannot be mapped")?;
    }
    let mut half = KernelHalf::new(space).map_err(|_| "no kernel's half")?;
    half.make_live(Liveness::Own);
    add_space(KERNELS, half.root());
    load(half.root());
    WINDOW.store(LINEAR, Ordering::Relaxed);
    *lock(&KERNEL_HALF) = Some(half);
    Ok(())
}

/// Loads a root, and keeps nothing: there are no identifiers.
fn load(root: Pa) {
    let value = satp::<Format>(root, 0).unwrap_or_default();
    FENCES.fetch_add(2, Ordering::Relaxed);
    // SAFETY: each root has the kernel's half, with the image where it is, and stays while a hart
    // has it loaded (1.); nothing is kept (2.).
    unsafe { load_satp(value, false) };
}

/// A page is used that is not there, or is not written by this process alone. `false` if it may
/// not be.
fn demand(at: u64, cause: u64) -> bool {
    let number = LOADED[cpu::number()].load(Ordering::Relaxed);
    let page = Va::new(at & !(PAGE - 1));
    let mut process = lock(&PROCESSES[number]);
    let allowed = (USER_HEAP..USER_HEAP + USER_PAGES * PAGE).contains(&at)
        && TAKEN.load(Ordering::Relaxed) != page.get();
    let done = match process.as_mut().filter(|_| allowed) {
        Some(process) => match process.query(page).map(|leaf| (leaf.frame(), leaf.attrs().perms)) {
            Some((frame, perms)) if cause == cpu::STORE_FAULT && !perms.contains(Perms::WRITE) => {
                write(process, page, frame)
            }
            // It is there already: this hart did not know.
            Some(_) => true,
            None => map_new(page, Attrs::USER_DATA, |page, frame, attrs| {
                shares(frame).store(1, Ordering::Relaxed);
                process.map(page, frame, attrs)
            }),
        },
        None if HEAP.contains(&at) => {
            let mut half = lock(&KERNEL_HALF);
            map_new(page, Attrs::KERNEL_DATA, |page, frame, attrs| match half.as_mut() {
                Some(half) => half.gather().map(page, frame, attrs),
                None => Err(EditError::InputOutOfRange),
            })
        }
        None => false,
    };
    if done {
        // It may remember that there was nothing.
        FENCES.fetch_add(1, Ordering::Relaxed);
        execute(Instruction::Sfence { at: Some(at), asid: None });
    }
    done
}

/// Maps a page of cleared memory. The other hart may have been first.
fn map_new(
    page: Va,
    attrs: Attrs,
    map: impl FnOnce(Span<Va>, Pa, Attrs) -> Result<(), EditError<Va>>,
) -> bool {
    let (Ok(page), Some(frame)) = (span(page.get(), PAGE), lock(&FRAMES).take()) else {
        return false;
    };
    // SAFETY: a frame that nothing else uses yet.
    unsafe { linear::<u8>(frame).write_bytes(0, PAGE as usize) };
    let mapped = map(page, frame, attrs);
    if mapped.is_err() {
        lock(&FRAMES).put(frame);
    }
    matches!(mapped, Ok(()) | Err(EditError::AlreadyMapped(_)))
}

/// A process writes a page that others may have: it gets a copy, or the page, if there are none.
fn write(process: &mut Process, page: Va, frame: Pa) -> bool {
    let mut gather = process.gather();
    if shares(frame).load(Ordering::Relaxed) == 1 {
        let Ok(span) = span(page.get(), PAGE) else { return false };
        let change = Change::new().perms(Attrs::USER_DATA.perms).dirty(true);
        let protected = gather.protect(span, change);
        gather.finish(|_| ());
        TAKEN_OVER.fetch_add(1, Ordering::Relaxed);
        return protected.is_ok();
    }
    let Some(copy) = lock(&FRAMES).take() else { return false };
    // SAFETY: the copy is a fresh frame. Every process has the original read-only.
    unsafe { linear::<u8>(copy).copy_from_nonoverlapping(linear(frame), PAGE as usize) };
    shares(copy).store(1, Ordering::Relaxed);
    let Ok(held) = gather.replace(page, copy, Attrs::USER_DATA) else { return false };
    let completed = gather.issue().complete();
    // From here on no hart remembers the page as it was.
    let released = completed.release(held);
    completed.finish(|_| ());
    COPIED.fetch_add(1, Ordering::Relaxed);
    released.is_ok_and(|leaf| {
        let_go(leaf.frame());
        true
    })
}

/// A trap, on either hart.
#[unsafe(no_mangle)]
extern "C" fn trapped(frame: &Frame) {
    match frame.cause {
        cpu::SHOOTDOWN => {
            cpu::end_of_interrupt();
            if let Some(here) = here() {
                here.receive(&Tables);
            }
        }
        // SAFETY: only users call, and there is nothing here to drop (1.).
        cpu::CALL => unsafe { cpu::leave_user(0) },
        cause if cpu::PAGE_FAULTS.contains(&cause) => {
            FAULTS.fetch_add(1, Ordering::Relaxed);
            if !demand(frame.value, cause) {
                let at = frame.value;
                assert!(frame.is_user(), "page fault at {at:#x}, from {:#x}", frame.at);
                // SAFETY: of a user's, and there is nothing here to drop (1.).
                unsafe { cpu::leave_user(at) };
            }
        }
        cause => panic!("trap {cause:#x} from {:#x}, {:#x}", frame.at, frame.value),
    }
}

/// This hart goes over to another space; the kernel's half is in each.
fn switch(to: usize) {
    let from = LOADED[cpu::number()].swap(to, Ordering::Relaxed);
    let of = |number: usize| SPACES[number].get().filter(|_| number != KERNELS);
    let root = SPACES[to].get().map(|space| space.root());
    if let (Some(here), Some(root)) = (here(), root) {
        let switched = here.switch(of(from), of(to), &Tables, |_| load(root));
        switched.expect("a word for each hart");
    }
}

/// Runs a program of a process on this hart.
fn run_in(process: usize, at: u64, arguments: [u64; 3]) -> u64 {
    switch(process);
    let result = cpu::run_user(at, arguments);
    switch(KERNELS);
    result
}

/// Has the second hart run a program of the child, if there is one, and this one otherwise.
fn run_child(at: u64, arguments: [u64; 3], is_alone: bool) -> u64 {
    if is_alone {
        return run_in(CHILD, at, arguments);
    }
    start_child(at, arguments);
    result_of_child()
}

fn start_child(at: u64, arguments: [u64; 3]) {
    *lock(&RESULT) = None;
    *lock(&WORK) = Some((at, arguments));
}

fn result_of_child() -> u64 {
    loop {
        if let Some(result) = *lock(&RESULT) {
            return result;
        }
        core::hint::spin_loop();
    }
}

/// The word at an address of a process.
fn word(process: usize, at: u64) -> Option<*mut u64> {
    let process = lock(&PROCESSES[process]);
    let leaf = process.as_ref()?.query(Va::new(at))?;
    Some(linear(Pa::new(leaf.frame().get() + (at - leaf.input().get()))))
}

/// Makes the child: all pages of the parent, which neither writes from now on.
fn fork(text: Pa) -> Result<(), &'static str> {
    let child = lock(&KERNEL_HALF).as_ref().and_then(KernelHalf::user);
    let mut child = child.ok_or("no memory")?;
    let mapped = child.map(span(USER_TEXT, PAGE)?, text, Attrs::USER_TEXT);
    mapped.map_err(|_| "no memory")?;
    child.make_live();
    let mut parent = lock(&PROCESSES[PARENT]);
    let mut gather = parent.as_mut().ok_or("no parent")?.gather();
    let mut into = child.gather();
    let heap = span(USER_HEAP, USER_PAGES * PAGE)?;
    let forked = gather.fork(heap, Change::new().write_protect(), &mut into, |leaf| {
        shares(leaf.frame()).fetch_add(1, Ordering::Relaxed);
    });
    gather.finish(|_| ());
    into.finish(|_| ());
    forked.map_err(|_| "it cannot fork")?;
    add_space(CHILD, child.root());
    *lock(&PROCESSES[CHILD]) = Some(child);
    Ok(())
}

/// Takes the child's last page back.
fn take_back() -> Result<(), &'static str> {
    let mut child = lock(&PROCESSES[CHILD]);
    TAKEN.store(LAST_PAGE, Ordering::Relaxed);
    let mut gather = child.as_mut().ok_or("no child")?.gather();
    let mut held = None;
    let unmapped = gather.unmap(span(LAST_PAGE, PAGE)?, |leaf| {
        held = Some(leaf);
        ControlFlow::Continue(())
    });
    if !unmapped.is_ok_and(|progress| progress.is_done()) {
        return Err("it cannot be unmapped");
    }
    let completed = gather.issue().complete();
    let leaf = held.and_then(|held| completed.release(held).ok());
    completed.finish(|_| ());
    let_go(leaf.ok_or("it was not mapped")?.frame());
    Ok(())
}

fn run(is_alone: bool) -> Result<(), &'static str> {
    let faults = || FAULTS.swap(0, Ordering::Relaxed);
    for at in HEAP.step_by(PAGE as usize) {
        // SAFETY: memory of this loop's.
        unsafe { with_exposed_provenance_mut::<u64>(at as usize).write_volatile(at) };
    }
    say(format_args!("heap: mapped by {} faults", faults()));

    // A process: its program, and memory by demand.
    let (text, watch) = boot::programs();
    let before = lock(&FRAMES).used;
    let parent = lock(&KERNEL_HALF).as_ref().and_then(KernelHalf::user);
    let mut parent = parent.ok_or("no memory")?;
    let mapped = parent.map(span(USER_TEXT, PAGE)?, text, Attrs::USER_TEXT);
    mapped.map_err(|_| "no memory")?;
    parent.make_live();
    add_space(PARENT, parent.root());
    *lock(&PROCESSES[PARENT]) = Some(parent);
    let touch = |value| [USER_HEAP, USER_PAGES, value];
    if run_in(PARENT, USER_TEXT, touch(1)) != 0 {
        return Err("the process may not use its own memory");
    }
    say(format_args!("process: mapped by {} faults", faults()));

    // Both write every page: the first gets a copy, the second the page.
    fork(text)?;
    FENCES.store(0, Ordering::Relaxed);
    cpu::mark::<1>();
    let written = run_child(USER_TEXT, touch(2), is_alone) + run_in(PARENT, USER_TEXT, touch(3));
    cpu::mark::<2>();
    let fences = FENCES.load(Ordering::Relaxed);
    let (copied, taken) = (COPIED.load(Ordering::Relaxed), TAKEN_OVER.load(Ordering::Relaxed));
    for page in (USER_HEAP..).step_by(PAGE as usize).take(USER_PAGES as usize) {
        for (process, value) in [(PARENT, 3), (CHILD, 2)] {
            // SAFETY: neither runs.
            let found = word(process, page).map(|at| unsafe { at.read() });
            if written != 0 || found != Some(value) {
                return Err("a process has what the other has written");
            }
        }
    }
    let faults_of_both = faults();
    say(format_args!(
        "fork: {faults_of_both} faults, {copied} pages copied and {taken} taken over, by {fences} \
         fences"
    ));
    // Each fault has what was remembered of the page forgotten, and that there was nothing; each of
    // four loads of a root is between two fences.
    if (faults_of_both, copied, taken, fences)
        != (2 * USER_PAGES, USER_PAGES, USER_PAGES, 4 * USER_PAGES + 8)
    {
        return Err("another number of faults, copies or fences");
    }

    // On the other hart the child reads the last page, and counts in the first, until the last is
    // taken back.
    if !is_alone {
        start_child(USER_TEXT + watch, [LAST_PAGE, USER_HEAP, 0]);
        let count = word(CHILD, USER_HEAP).ok_or("no page")?;
        // SAFETY: the child writes it, and it is not taken back.
        let read = || unsafe { count.read_volatile() };
        let start = read();
        while read() < start + 1000 {
            core::hint::spin_loop();
        }
        take_back()?;
        let at = result_of_child();
        if at != LAST_PAGE {
            return Err("the child was refused another page");
        }
        say(format_args!("shootdown: the other hart was refused {at:#x}"));
    }

    // The end of both: no hart has them loaded.
    for process in [PARENT, CHILD] {
        let mut process = lock(&PROCESSES[process]).take().ok_or("no process")?;
        // SAFETY: both harts have loaded the kernel's root (1.), and there are no identifiers (2.).
        unsafe { process.retire() };
        let pages = process.destroy(|leaf| {
            if leaf.frame() != text {
                let_go(leaf.frame());
            }
        });
        if pages.is_err() {
            return Err("it cannot be taken down");
        }
    }
    match lock(&FRAMES).used == before {
        true => Ok(()),
        false => Err("frames are missing"),
    }
}

/// The first hart, with what the firmware handed over.
#[unsafe(no_mangle)]
extern "C" fn first_main(tree: u64, hart: u64) -> ! {
    cpu::set_up(0);
    // SAFETY: the firmware's, and nothing has used memory yet (1.).
    let Some((ram, features, harts)) = (unsafe { boot::machine(tree, hart) }) else {
        end(format_args!("WRONG: no machine"))
    };
    FEATURES.call_once(|| features);
    HARTS.call_once(|| harts);
    let is_alone = harts[0] == harts[1];
    let done = map(ram).and_then(|()| {
        let tables = lock(&FRAMES).used;
        say(format_args!("map: {} MiB, {tables} tables", ram.size() >> 20));
        platform::shootdown().ok_or("too many harts")?;
        if !is_alone {
            let started = sbi_rt::hart_start(harts[1] as usize, boot::start_address() as usize, 0);
            if started.is_err() {
                return Err("the second hart does not start");
            }
            // Its start has fences of its own, which would fall into the count of `run`.
            while ONLINE.load(Ordering::Acquire) == 0 {
                core::hint::spin_loop();
            }
        }
        run(is_alone)
    });
    match done {
        Ok(()) => end(format_args!("done")),
        Err(why) => end(format_args!("WRONG: {why}")),
    }
}

/// The second one.
#[unsafe(no_mangle)]
extern "C" fn second_main() -> ! {
    cpu::set_up(1);
    if let Some(kernel) = SPACES[KERNELS].get() {
        load(kernel.root());
    }
    if let Some(here) = here() {
        here.go_online(&Tables);
    }
    ONLINE.store(1, Ordering::Release);
    loop {
        let work = lock(&WORK).take();
        if let Some((at, arguments)) = work {
            let result = run_in(CHILD, at, arguments);
            *lock(&RESULT) = Some(result);
        }
        core::hint::spin_loop();
    }
}
