//! A small kernel for x86-64 on the engine: QEMU boots it, `cargo xtask example x86-64` runs it.
//!
//! It maps its image and all memory, each with its own permissions; gives memory to itself and to a
//! user when it is used; and takes a page back from a user that runs on the other processor, which
//! is told by an interrupt. Each step says what it has seen, and the last that each frame has come
//! back.
//!
//! The spaces are here, what the engine asks for in [`platform`]. The rest is what any kernel has:
//! [`boot`], [`cpu`].
#![no_std]
#![no_main]

mod boot;
mod cpu;
mod memory;
mod platform;

use core::ops::{ControlFlow, Range};
use core::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicU64, Ordering};

use spin::mutex::SpinMutex;
use tablewright::arch::x86_64::{Features, cr3, load_cr3, set_up};
use tablewright::format::X86_64;
use tablewright::linear::{LinearMap, MemoryMap};
use tablewright::{AddressSpace, Attrs, EditError, KernelHalf, Liveness, Mapping, Pa, Span, Va};
use x86_64::instructions::hlt;
use x86_64::registers::control::Cr2;

use cpu::{Frame, end, say};
use memory::{FRAMES, Frames, KERNEL, PAGE, WINDOW, linear};
use platform::{FEATURES, SPACES, Tables, add_space, here, lock};

/// Addresses of all memory in the kernel's half, of what the kernel uses by demand, and of what the
/// user does.
const LINEAR: u64 = 0xffff_8880_0000_0000;
const HEAP: Range<u64> = 0xffff_c900_0000_0000..0xffff_c900_0010_0000;
const USER_TEXT: u64 = 0x40_0000;
const USER_HEAP: u64 = 0x1000_0000;
const USER_PAGES: u64 = 16;

/// The numbers of the spaces.
const KERNELS: usize = 0;
const USERS: usize = 1;

static KERNEL_HALF: SpinMutex<Option<KernelHalf<X86_64<4>, Tables>>> = SpinMutex::new(None);
static USER: SpinMutex<Option<AddressSpace<X86_64<4>, Tables>>> = SpinMutex::new(None);
/// The end of the user's memory.
static USER_END: AtomicU64 = AtomicU64::new(USER_HEAP + USER_PAGES * PAGE);

/// How many page faults there were, and where a user was refused that watched.
static FAULTS: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);

fn span(start: u64, size: u64) -> Result<Span<Va>, &'static str> {
    Span::new(Va::new(start), size).map_err(|_| "not in whole pages")
}

/// Maps the image and all memory, and loads that. What is behind the image is free.
fn map(ram: &[Span<Pa>]) -> Result<(), &'static str> {
    let [text, rodata, data, end] = boot::image();
    let image_end = Pa::new(end - KERNEL);
    let free = ram.iter().find(|span| span.contains(image_end));
    let free_end = free.ok_or("no memory behind the image")?.last().get() + 1;
    // What the loader has mapped, so that tables are reached there.
    *lock(&FRAMES) = Frames::new(image_end.get()..free_end.min(1 << 30));

    let mut space = AddressSpace::<X86_64<4>, _>::new(Tables).ok_or("no memory")?;
    // Code and constants are read-only in the linear map too.
    let constant = Span::new(Pa::new(text - KERNEL), data - text).map_err(|_| "no whole pages")?;
    let special = [(constant, Attrs::KERNEL_RODATA)];
    let memory = MemoryMap { ram, reserved: &[], special: &special };
    let all = LinearMap::new(Va::new(LINEAR), Mapping::new(Attrs::KERNEL_DATA));
    all.build(&mut space, &memory).map_err(|_| "no linear map")?;
    for (from, to, physical, attrs) in [
        (text, rodata, text - KERNEL, Attrs::KERNEL_TEXT),
        (rodata, data, rodata - KERNEL, Attrs::KERNEL_RODATA),
        (data, end, data - KERNEL, Attrs::KERNEL_DATA),
        (
            LINEAR + cpu::CONTROLLER,
            LINEAR + cpu::CONTROLLER + PAGE,
            cpu::CONTROLLER,
            Attrs::KERNEL_DEVICE,
        ),
    ] {
        let mapped = space.map(span(from, to - from)?, Pa::new(physical), attrs);
        mapped.map_err(|_| "the kernel cannot be mapped")?;
    }
    let mut half = KernelHalf::new(space).map_err(|_| "no kernel's half")?;
    half.make_live(Liveness::Own);
    add_space(KERNELS, half.root());
    // SAFETY: the image is where it was (1.), and nothing is kept (2.).
    unsafe { load_cr3(cr3(half.root(), 0, false)) };
    WINDOW.store(LINEAR, Ordering::Relaxed);
    *lock(&KERNEL_HALF) = Some(half);
    Ok(())
}

/// A page is used that is not there. `false` if it may not be.
fn demand(at: u64) -> bool {
    let (Ok(page), Some(frame)) = (span(at & !(PAGE - 1), PAGE), lock(&FRAMES).take()) else {
        return false;
    };
    // SAFETY: a frame that nothing else uses yet.
    unsafe { linear::<u8>(frame).write_bytes(0, PAGE as usize) };
    let mapped = if HEAP.contains(&at) {
        let mut half = lock(&KERNEL_HALF);
        half.as_mut().map(|half| half.gather().map(page, frame, Attrs::KERNEL_DATA))
    } else {
        let mut user = lock(&USER);
        // Asked under the lock under which it is taken back.
        let may = (USER_HEAP..USER_END.load(Ordering::Relaxed)).contains(&at);
        user.as_mut().filter(|_| may).map(|user| user.map(page, frame, Attrs::USER_DATA))
    };
    if mapped != Some(Ok(())) {
        lock(&FRAMES).put(frame);
    }
    // The other processor may have been first.
    matches!(mapped, Some(Ok(()) | Err(EditError::AlreadyMapped(_))))
}

/// Takes the user's last page back.
fn take_back() -> Result<(), &'static str> {
    let mut user = lock(&USER);
    let last = USER_END.fetch_sub(PAGE, Ordering::Relaxed) - PAGE;
    let mut gather = user.as_mut().ok_or("no user")?.gather();
    let mut held = None;
    let unmapped = gather.unmap(span(last, PAGE)?, |leaf| {
        held = Some(leaf);
        ControlFlow::Continue(())
    });
    if !unmapped.is_ok_and(|progress| progress.is_done()) {
        return Err("it cannot be unmapped");
    }
    let completed = gather.issue().complete();
    // From here on no processor remembers the page: now its frame comes out.
    let leaf = held.and_then(|held| completed.release(held).ok());
    completed.finish(|_| ());
    lock(&FRAMES).put(leaf.ok_or("it was not mapped")?.frame());
    Ok(())
}

/// A trap, on either processor.
#[unsafe(no_mangle)]
extern "C" fn trapped(frame: &Frame) {
    match frame.vector {
        cpu::SHOOTDOWN => {
            if let Some(here) = here() {
                here.receive(&Tables);
            }
            cpu::end_of_interrupt();
        }
        // SAFETY: only users call, and there is nothing here to drop (1.).
        cpu::CALL => unsafe { cpu::leave_user(0) },
        cpu::PAGE_FAULT => {
            let at = Cr2::read_raw();
            FAULTS.fetch_add(1, Ordering::Relaxed);
            // Bit 0 of the code: a page is there, and does not permit it (SDM vol. 3A 4.7).
            if frame.error & 1 != 0 || !demand(at) {
                assert!(frame.is_user(), "page fault at {at:#x}, from {:#x}", frame.at);
                // SAFETY: of a user's, and there is nothing here to drop (1.).
                unsafe { cpu::leave_user(at) };
            }
        }
        vector => panic!("trap {vector} from {:#x}, code {:#x}", frame.at, frame.error),
    }
}

/// This processor goes over to another space; the kernel's half is in each.
fn switch(from: usize, to: usize) {
    let of = |number: usize| SPACES[number].get().filter(|_| number != KERNELS);
    let root = SPACES[to].get().map(|space| space.root());
    if let (Some(here), Some(root)) = (here(), root) {
        // SAFETY: a root stays while a processor has it loaded (1.), and nothing is kept (2.).
        let load = |_| unsafe { load_cr3(cr3(root, 0, false)) };
        let switched = here.switch(of(from), of(to), &Tables, load);
        switched.expect("a word for each processor");
    }
}

fn run() -> Result<(), &'static str> {
    let faults = || FAULTS.swap(0, Ordering::Relaxed);
    for at in HEAP.step_by(PAGE as usize) {
        // SAFETY: memory of this loop's.
        unsafe { with_exposed_provenance_mut::<u64>(at as usize).write_volatile(at) };
    }
    say(format_args!("heap: mapped by {} faults", faults()));

    // A user: its program, and memory by demand.
    let (frame, _) = boot::programs();
    let before = lock(&FRAMES).used;
    let user = lock(&KERNEL_HALF).as_ref().and_then(KernelHalf::user);
    let mut user = user.ok_or("no memory")?;
    let mapped = user.map(span(USER_TEXT, PAGE)?, frame, Attrs::USER_TEXT);
    mapped.map_err(|_| "no memory")?;
    user.make_live();
    add_space(USERS, user.root());
    *lock(&USER) = Some(user);
    switch(KERNELS, USERS);
    if cpu::run_user(USER_TEXT, USER_HEAP, USER_PAGES) != 0 {
        return Err("the user may not use its own memory");
    }
    say(format_args!("user: mapped by {} faults", faults()));

    // On the other processor it reads the last page, and counts in the first, until the last is
    // taken back.
    cpu::start(1);
    let count = with_exposed_provenance::<AtomicU64>(USER_HEAP as usize);
    // SAFETY: the user has had it mapped, and it is not taken back.
    let count = unsafe { &*count };
    let start = count.load(Ordering::Relaxed);
    while count.load(Ordering::Relaxed) < start + 1000 {
        core::hint::spin_loop();
    }
    take_back()?;
    while REFUSED.load(Ordering::Acquire) == 0 {
        core::hint::spin_loop();
    }
    let at = REFUSED.load(Ordering::Acquire);
    if at != USER_HEAP + (USER_PAGES - 1) * PAGE {
        return Err("the user was refused another page");
    }
    say(format_args!("shootdown: the other processor was refused {at:#x}"));

    // The end of the user: neither processor has it loaded.
    switch(USERS, KERNELS);
    let mut user = lock(&USER).take().ok_or("no user")?;
    // SAFETY: both have loaded the kernel's root (1.), and there are no identifiers (2.).
    unsafe { user.retire() };
    let pages = user.destroy(|leaf| {
        if leaf.frame() != frame {
            lock(&FRAMES).put(leaf.frame());
        }
    });
    match pages.is_ok() && lock(&FRAMES).used == before {
        true => Ok(()),
        false => Err("frames are missing"),
    }
}

/// The first processor, with what the loader handed over.
#[unsafe(no_mangle)]
extern "C" fn first_main(info: u64) -> ! {
    // SAFETY: the loader's, and nothing has used memory yet (1.).
    let ram = unsafe { boot::memory(info) };
    let features = FEATURES.call_once(Features::read);
    // SAFETY: the loader's map has no page that these registers change (1.), and there is no other
    // processor (3.).
    unsafe { set_up(features, false) };
    let done = map(&ram).and_then(|()| {
        let size: u64 = ram.iter().map(|part| part.size()).sum();
        say(format_args!("map: {} MiB, {} tables", size >> 20, lock(&FRAMES).used));
        cpu::set_up(0);
        platform::shootdown().ok_or("too many processors")?;
        run()
    });
    match done {
        Ok(()) => end(format_args!("done")),
        Err(why) => end(format_args!("WRONG: {why}")),
    }
}

/// The second one.
#[unsafe(no_mangle)]
extern "C" fn second_main() -> ! {
    if let (Some(kernel), Some(features)) = (SPACES[KERNELS].get(), FEATURES.get()) {
        // SAFETY: the image is where it was, and stays (1.); nothing is kept (2.); the registers
        // are as on the first (1., 3.).
        unsafe {
            load_cr3(cr3(kernel.root(), 0, false));
            set_up(features, false);
        }
    }
    cpu::set_up(cpu::number());
    if let Some(here) = here() {
        here.go_online(&Tables);
    }
    switch(KERNELS, USERS);
    let watch = USER_TEXT + boot::programs().1;
    let at = cpu::run_user(watch, USER_HEAP + (USER_PAGES - 1) * PAGE, USER_HEAP);
    switch(USERS, KERNELS);
    REFUSED.store(at, Ordering::Release);
    loop {
        hlt();
    }
}
