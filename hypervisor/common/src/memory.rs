//! Which frame is behind each page of the guest, and how frames are taken away behind its back.
//!
//! A frame that is taken away is copied to another one, and **poisoned**, so that a processor that
//! still reaches it through a translation that should have been forgotten reads nonsense, and what
//! it writes is lost. Executed, the frame calls the hypervisor; if it was written, that is seen
//! when it is used again, behind some other page.
//!
//! # Taking a page away
//!
//! 1. The look-up says that the page is on the move. Faults on it go back to the guest and come
//!    again.
//! 2. A [zap](tablewright::guest::Zap): what was looked up before is out of date, walks of others
//!    come to an end, the leaf is unmapped, every processor forgets it.
//! 3. No processor reaches the frame now. It is copied and poisoned.
//! 4. The look-up says where the page is.
//!
//! A page of a block takes the block down, and from then on the block is mapped by pages: their
//! frames are not in a row any more.

use core::marker::PhantomData;
use core::ops::ControlFlow;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use tablewright::flush::{Held, Leaf};
use tablewright::guest::{Backing, Pass, Zap};
use tablewright::{Ipa, Pa, Span};

use crate::counters::Event;
use crate::host::{Gather, Guest, Host, Mutex, relax};
use crate::pieces::Pieces;

/// How large leaves are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// Pages of 4 KiB, or of the granule.
    Pages,
    /// Blocks of 2 MiB, or what a table of pages maps, as long as their frames are in a row.
    Blocks,
    /// In turn: one block, and as much by pages.
    Mixed,
    /// Blocks of 1 GiB, as long as their frames are in a row.
    Huge,
}

impl Leaves {
    /// The kind of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "4k" => Some(Self::Pages),
            "2m" => Some(Self::Blocks),
            "mixed" => Some(Self::Mixed),
            "1g" => Some(Self::Huge),
            _ => None,
        }
    }

    /// The largest.
    pub fn largest<H: Host>(self) -> u64 {
        match self {
            Self::Pages => H::PAGE,
            Self::Blocks | Self::Mixed => H::BLOCK,
            Self::Huge => H::HUGE,
        }
    }
}

/// Of an entry of [`Memory::pages`]: the frame is being replaced.
const MOVING: u32 = 1 << 31;
/// It was replaced, and the guest has not touched it since.
const AWAY: u32 = 1 << 30;

/// The frames that are taken away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evictions {
    /// How many, of all pages together.
    pub count: u64,
    /// How many faults come first.
    pub after: u64,
    /// The most in a second; 0 is any number. Each frame that is missed is a fault, and with each
    /// fault another could be taken: without a pace the guest does little else.
    pub per_second: u64,
    /// With each page all that is mapped around it: the table is detached, and what was below it
    /// faults again.
    pub tables: bool,
}

/// Which frame is behind each page of the guest.
pub struct Memory<H: Host> {
    guest: Pieces,
    leaves: Leaves,
    /// The number of the frame of each page, and the two flags.
    pages: &'static [AtomicU32],
    /// Whether a page of this block has ever had another frame than that of its address.
    scattered: &'static [AtomicBool],
    /// Frames for pages that are taken away; first in, first out, so that a frame stays poisoned
    /// for a while.
    spare: Mutex<Spare, H>,
    evictions: Evictions,
    /// The number of frames that are still to be taken away.
    to_evict: AtomicU64,
    /// The time of the first attempt, in ticks.
    begun: AtomicU64,
    /// The address at which the next one is looked for.
    hand: AtomicU64,
    host: PhantomData<&'static H>,
}

/// A queue.
struct Spare {
    frames: [u32; Self::MOST],
    first: usize,
    len: usize,
}

impl Spare {
    const MOST: usize = 64;

    fn push(&mut self, frame: u32) {
        // No more are put in than were taken out.
        if self.len < Self::MOST {
            self.frames[(self.first + self.len) % Self::MOST] = frame;
            self.len += 1;
        }
    }

    fn pop(&mut self) -> Option<u32> {
        self.len = self.len.checked_sub(1)?;
        let frame = self.frames[self.first];
        self.first = (self.first + 1) % Self::MOST;
        Some(frame)
    }
}

impl<H: Host> Memory<H> {
    /// Memory of the guest, on frames in a row from that of its first address on.
    pub fn new(
        guest: Pieces,
        leaves: Leaves,
        evictions: Evictions,
        pages: &'static [AtomicU32],
        scattered: &'static [AtomicBool],
        machine: &H,
    ) -> Self {
        let first = guest.start().get() / H::PAGE;
        for (index, page) in pages.iter().enumerate() {
            page.store((first + index as u64) as u32, Ordering::Relaxed);
        }
        let mut spare = Spare { frames: [0; Spare::MOST], first: 0, len: 0 };
        while evictions.count != 0 && spare.len < Spare::MOST {
            let Some(frame) = machine.take_frame() else {
                break;
            };
            // SAFETY: just taken: it has no other owner.
            unsafe { poison::<H>(frame.get()) };
            spare.push((frame.get() / H::PAGE) as u32);
        }
        Self {
            guest,
            leaves,
            pages,
            scattered,
            spare: spin::mutex::SpinMutex::new(spare),
            evictions,
            to_evict: AtomicU64::new(evictions.count),
            begun: AtomicU64::new(0),
            hand: AtomicU64::new(0),
            host: PhantomData,
        }
    }

    /// The place of its block: the first may begin in front of the memory.
    fn block(&self, index: usize) -> usize {
        let before = self.guest.start().get() % H::BLOCK;
        ((before + index as u64 * H::PAGE) / H::BLOCK) as usize
    }

    /// How many blocks this memory has a part of. Pieces but the first begin with one.
    pub fn blocks(guest: &Pieces) -> u64 {
        (guest.start().get() % H::BLOCK + guest.size()).div_ceil(H::BLOCK)
    }

    /// Returns the number of the page of an address.
    pub fn page(&self, at: Ipa) -> Option<u64> {
        Some(self.guest.offset(at)? / H::PAGE)
    }

    fn index(&self, at: Ipa) -> Option<usize> {
        self.page(at).map(|page| page as usize)
    }

    /// How many pages there are.
    pub fn pages(&self) -> u64 {
        self.pages.len() as u64
    }

    /// How many bytes there are.
    pub fn size(&self) -> u64 {
        self.pages() * H::PAGE
    }

    /// Returns the address of a page.
    pub fn at(&self, page: u64) -> Option<Ipa> {
        self.guest.at(page * H::PAGE)
    }

    /// The page behind an address; `None` while it is on the move.
    pub fn look_up(&self, at: Ipa) -> Option<Backing> {
        let index = self.index(at)?;
        let page = self.pages.get(index)?.load(Ordering::Acquire);
        if page & MOVING != 0 {
            return None;
        }
        let block = at.get() / H::BLOCK;
        let large = match self.leaves {
            Leaves::Pages => false,
            Leaves::Blocks | Leaves::Huge => true,
            Leaves::Mixed => block.is_multiple_of(2),
        };
        let scattered = |block: &AtomicBool| block.load(Ordering::Acquire);
        let size = match large && !scattered(self.scattered.get(self.block(index))?) {
            true if self.leaves == Leaves::Huge => {
                // Those of this address up to where a block of blocks begins, and from there on.
                let before = ((at.get() & (H::HUGE - 1)) / H::BLOCK) as usize;
                let first = self.block(index).saturating_sub(before);
                let blocks = self.scattered.iter().skip(first);
                match blocks.take((H::HUGE / H::BLOCK) as usize).any(scattered) {
                    true => H::BLOCK,
                    false => H::HUGE,
                }
            }
            true => H::BLOCK,
            false => H::PAGE,
        };
        Some(Backing::new(Pa::new(u64::from(page & !AWAY) * H::PAGE), size))
    }

    /// Puts other frames behind all pages: those of `area`, in a row.
    pub fn move_to(&self, area: Span<Pa>) {
        let first = area.start().get() / H::PAGE;
        for (number, page) in (first..).zip(self.pages) {
            page.store(number as u32, Ordering::Relaxed);
        }
        for block in self.scattered {
            block.store(false, Ordering::Release);
        }
    }

    /// The frame behind each page, in order.
    pub fn frames(&self) -> impl Iterator<Item = u64> + '_ {
        let number = |page: &AtomicU32| page.load(Ordering::Acquire) & !(MOVING | AWAY);
        self.pages.iter().map(move |page| u64::from(number(page)) * H::PAGE)
    }

    /// The guest has this page again.
    pub fn returned(&self, at: Ipa) {
        let Some(page) = self.index(at).and_then(|index| self.pages.get(index)) else {
            return;
        };
        let now = page.load(Ordering::Relaxed);
        if now & (AWAY | MOVING) == AWAY
            && page.compare_exchange(now, now & !AWAY, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            H::count(Event::Returned, 1);
        }
    }

    /// Whether the pace allows to take one more frame.
    fn is_due(&self) -> bool {
        let per_second = self.evictions.per_second;
        if per_second == 0 {
            return true;
        }
        let (now, relaxed) = (H::now(), Ordering::Relaxed);
        let begun = match self.begun.compare_exchange(0, now, relaxed, relaxed) {
            Ok(_) => now,
            Err(begun) => begun,
        };
        let due = now.saturating_sub(begun).saturating_mul(per_second)
            / (H::ticks_per_ms() * 1000).max(1);
        H::counted(Event::Evicted) < due
    }

    /// Takes the frame of one page away, if it is time. Calls `moved` with the page once it is
    /// elsewhere.
    pub fn evict_one(&self, guest: &'static Guest<H>, gather: &mut Gather<H>, moved: impl Fn(u64)) {
        let one_less = |left: u64| left.checked_sub(1);
        if !self.is_due()
            || H::counted(Event::Faults) < self.evictions.after
            || self.to_evict.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_err()
        {
            return;
        }
        // Steps of a prime number come by every page; most are not mapped.
        for _ in 0..32 {
            let index = self.hand.fetch_add(7919, Ordering::Relaxed) as usize % self.pages.len();
            let Some(at) = self.at(index as u64) else {
                continue;
            };
            if guest.space().query(at).is_some() && self.evict(guest, at, index, gather, &moved) {
                H::count(Event::Evicted, 1);
                return;
            }
        }
        self.to_evict.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes the frame of this page away. Whether it was there to be taken.
    fn evict(
        &self,
        guest: &'static Guest<H>,
        at: Ipa,
        index: usize,
        gather: &mut Gather<H>,
        moved: impl Fn(u64),
    ) -> bool {
        let page = &self.pages[index];
        let size = if self.evictions.tables { H::BLOCK } else { H::PAGE };
        let Ok(span) = Span::new(Ipa::new(at.get() & !(size - 1)), size) else {
            return false;
        };
        let Some(spare) = self.spare.lock().pop() else {
            return false;
        };
        let now = page.load(Ordering::Relaxed);
        let is_claimed = now & (MOVING | AWAY) == 0
            && page
                .compare_exchange(now, now | MOVING, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
        if !is_claimed {
            self.spare.lock().push(spare);
            return false;
        }
        self.scattered[self.block(index)].store(true, Ordering::Release);
        // What hardware has marked of its neighbours is in no log yet.
        take_away(guest.zap(span), gather, |leaf| {
            if H::MARKS {
                self.written(leaf, &moved);
            }
        });
        let (from, to) = (u64::from(now) * H::PAGE, u64::from(spare) * H::PAGE);
        // The guest may have written past the caches.
        guest.space().platform().clean(Pa::new(from), H::PAGE);
        // SAFETY: two frames, mapped here one to one; no processor reaches the first any more, and
        // none the second yet.
        unsafe {
            H::count(Event::Spoiled, u64::from(!is_poisoned::<H>(to)));
            ptr::copy_nonoverlapping(
                ptr::with_exposed_provenance::<u64>(from as usize),
                ptr::with_exposed_provenance_mut(to as usize),
                (H::PAGE / 8) as usize,
            );
            poison::<H>(from);
        }
        page.store(spare | AWAY, Ordering::Release);
        moved(index as u64);
        self.spare.lock().push(now);
        true
    }

    /// Tells of each page of a leaf that hardware has marked as written.
    pub fn written(&self, leaf: &Leaf<H::Format>, each: impl Fn(u64)) {
        if !leaf.attrs().dirty {
            return;
        }
        let first = leaf.input().get();
        for at in (first..first + leaf.size()).step_by(H::PAGE as usize) {
            if let Some(index) = self.index(Ipa::new(at)).filter(|index| *index < self.pages.len())
            {
                each(index as u64);
            }
        }
    }

    /// Whether the guest's memory holds this address.
    pub fn holds(&self, at: Ipa) -> bool {
        self.guest.offset(at).is_some()
    }
}

/// Makes a frame useless to what still reaches it.
///
/// # Safety
/// 1. It is a frame, mapped at its address, and what it holds is not needed.
pub unsafe fn poison<H: Host>(frame: u64) {
    let words = ptr::with_exposed_provenance_mut::<u64>(frame as usize);
    for word in 0..(H::PAGE / 8) as usize {
        // SAFETY: inside of the frame (1.).
        unsafe { words.add(word).write(H::POISON) };
    }
}

/// Whether a frame was not written since it was [poisoned](poison).
///
/// # Safety
/// 1. It is a frame, mapped at its address, and should not be written.
unsafe fn is_poisoned<H: Host>(frame: u64) -> bool {
    let words = ptr::with_exposed_provenance::<u64>(frame as usize);
    // SAFETY: inside of the frame (1.). Volatile, because it may be written all the same.
    (0..(H::PAGE / 8) as usize).all(|word| unsafe { words.add(word).read_volatile() } == H::POISON)
}

/// Takes away what is mapped, for good. `seen` is shown each leaf.
pub fn take_away<H: Host>(
    mut zap: Zap<'static, 'static, H::Format, &'static H>,
    gather: &mut Gather<H>,
    seen: impl Fn(&Leaf<H::Format>),
) {
    loop {
        let each = |leaf: Held<Leaf<H::Format>>| {
            // SAFETY: it is looked at, and its frame is no other's before the flush is complete.
            seen(&unsafe { leaf.assume_complete() });
            ControlFlow::Continue(())
        };
        match zap.unmap(gather, each) {
            Ok(Pass::Waiting) => relax::<H>(),
            Ok(Pass::Went) => reclaim_seen(gather, &seen),
            Ok(Pass::Over) => return,
            Err(error) => panic!("the guest's memory cannot be unmapped: {error}"),
        }
    }
}

/// Completes what was gathered and frees what was detached. Until no walk holds that it waits:
/// walks take microseconds, and none waits for anything.
pub fn reclaim<H: Host>(gather: &mut Gather<H>) {
    reclaim_seen(gather, |_| ());
}

/// Reclaims a gather, and shows its leaves; `seen` is shown each leaf of the tables that were
/// detached.
fn reclaim_seen<H: Host>(gather: &mut Gather<H>, seen: impl Fn(&Leaf<H::Format>)) {
    let mut done = gather.finish(|leaf| seen(&leaf));
    while let Err(deferred) = done {
        relax::<H>();
        done = deferred.try_complete().map(|completed| completed.finish(|leaf| seen(&leaf)));
    }
}
