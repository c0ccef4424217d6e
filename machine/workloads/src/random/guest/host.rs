//! The host's memory behind a guest, which is locked while it is looked up.

use super::*;

/// Pages of the host that come one by one, and those of a block that are used.
pub(super) const SMALL: usize = 10;
pub(super) const IN_BLOCK: [u64; 6] = [0, 1, 2, 17, 255, 511];
pub(super) const PAGES: usize = SMALL + IN_BLOCK.len();
/// The guest does not write to this one, and fetches from it.
pub(super) const CODE: usize = 3;
/// The first of the host's memory that never moves.
pub(super) const FIXED: u64 = 1 << 40;
/// Its first address, and that of blocks that are too large for the machine's memory.
pub(super) const FAR: u64 = 1 << 41;

/// The host's backing of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Now {
    /// Nothing yet: it is zero.
    Empty,
    /// A frame.
    Here { frame: Pa, writable: bool },
    /// It is on its way.
    Moving,
    /// Another frame, which the guest does not see.
    Away(Pa),
}

pub(super) struct Page {
    pub(super) now: Now,
    /// Its earlier backings that may still be reached, with or without the permission to write.
    pub(super) before: Vec<(Pa, bool)>,
    /// All frames that it had since the host has last looked whether it was written: leaves may be
    /// seen late.
    pub(super) past: Vec<Pa>,
    /// Changes so far.
    pub(super) version: u32,
    /// A CPU is at it.
    pub(super) busy: bool,
    /// It was written since the host has last looked, and a leaf has said so.
    pub(super) written: bool,
    pub(super) reported: bool,
    /// Words that each CPU has written; `None`: something that was lost with memory that is not
    /// simulated.
    pub(super) words: HashMap<usize, Option<u64>>,
}

/// The host's backing of the second block of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Block {
    /// Nothing, but for single pages.
    Gone,
    Whole(Pa),
    /// Taken apart: each page by itself, some of them given back.
    Parts(Pa),
}

pub(super) struct Host<'m> {
    pub(super) machine: &'m Machine,
    pub(super) page: u64,
    /// The size of a block.
    pub(super) block: u64,
    /// A block is made of frames of the machine.
    pub(super) simulated: bool,
    pub(super) pages: RefCell<Vec<Page>>,
    pub(super) second: Cell<Block>,
    /// A CPU is changing the second block.
    pub(super) busy: Cell<bool>,
    /// Pages of it that were given back one by one.
    pub(super) lost: RefCell<HashSet<u64>>,
    /// Blocks that are not made of frames of the machine.
    pub(super) far: RefCell<Vec<Pa>>,
}

impl Host<'_> {
    /// Returns the number of a page among the host's own.
    pub(super) fn at(&self, page: usize) -> u64 {
        match page.checked_sub(SMALL) {
            None => page as u64 * self.page,
            Some(part) => self.block + self.inside(part),
        }
    }

    pub(super) fn inside(&self, part: usize) -> u64 {
        // The last of a table, whatever its size.
        let last = self.block / self.page - 1;
        IN_BLOCK[part].min(last) * self.page
    }

    pub(super) fn page_at(&self, at: u64) -> Option<usize> {
        (0..PAGES).find(|&page| self.at(page) == at)
    }

    /// Whether a page stands in its place in a block that was taken apart, and goes with the block.
    pub(super) fn is_part(&self, frame: Pa, of: Block) -> bool {
        let (Block::Whole(base) | Block::Parts(base)) = of else {
            return false;
        };
        let block = base.get()..base.get() + self.block;
        block.contains(&frame.get()) && !self.lost.borrow().contains(&frame.get())
    }

    pub(super) fn is_simulated(&self, frame: Pa) -> bool {
        let memory = self.machine.memory();
        (memory.first()..memory.end()).contains(&frame.get())
    }

    pub(super) fn take_block(&self) -> Option<Pa> {
        if self.simulated {
            return self.machine.take_pages((self.block / self.page) as usize);
        }
        self.far.borrow_mut().pop()
    }

    /// Gives a block back, but for what was given back before.
    pub(super) fn give_block(&self, base: Pa) {
        if !self.simulated {
            self.far.borrow_mut().push(base);
            return;
        }
        let lost = std::mem::take(&mut *self.lost.borrow_mut());
        for frame in (base.get()..base.get() + self.block).step_by(self.page as usize) {
            if !lost.contains(&frame) {
                self.machine.give_page(Pa::new(frame));
            }
        }
    }

    /// Gives a page back.
    pub(super) fn give(&self, frame: Pa) {
        if let Block::Parts(base) = self.second.get()
            && (base.get()..base.get() + self.block).contains(&frame.get())
        {
            self.lost.borrow_mut().insert(frame.get());
        }
        if self.is_simulated(frame) {
            self.machine.give_page(frame);
        }
    }

    pub(super) fn copy(&self, from: Pa, to: Pa) {
        if self.is_simulated(from) && self.is_simulated(to) {
            self.machine.copy_page(from, to);
        }
    }

    /// No CPU is at a page.
    pub(super) fn is_steady(&self, page: usize) -> bool {
        let page = &self.pages.borrow()[page];
        !page.busy && page.now != Now::Moving
    }

    /// Takes a page, if no other CPU has it. Gives its frame.
    pub(super) fn lock(&self, number: usize) -> Option<Pa> {
        if !self.is_steady(number) || (number >= SMALL && self.busy.get()) {
            return None;
        }
        let page = &mut self.pages.borrow_mut()[number];
        let Now::Here { frame, .. } = page.now else {
            return None;
        };
        page.busy = true;
        // A page of a block is one by itself from now on.
        if let (true, Block::Whole(base)) = (number >= SMALL, self.second.get()) {
            self.second.set(Block::Parts(base));
        }
        Some(frame)
    }

    pub(super) fn unlock(&self, page: usize) {
        self.pages.borrow_mut()[page].busy = false;
    }

    /// A page becomes something else; what it was may be reached for some time.
    pub(super) fn change(&self, page: usize, now: Now) {
        let page = &mut self.pages.borrow_mut()[page];
        if let Now::Here { frame, writable } = page.now {
            page.before.push((frame, writable));
            page.past.push(frame);
        }
        page.now = now;
        page.version += 1;
    }

    /// Forgets the earlier backings, which cannot be reached any more.
    pub(super) fn forget_past(&self, page: usize) {
        let page = &mut self.pages.borrow_mut()[page];
        page.before.clear();
        page.version += 1;
    }

    /// The host looks a page up, for an access.
    pub(super) fn look_up(&self, at: u64, access: Access) -> Option<Backing> {
        if at >= FIXED {
            let frame = Pa::new(FAR + (at - FIXED));
            return Some(Backing::new(frame, 1 << 39));
        }
        let number = self.page_at(at & !(self.page - 1))?;
        let now = self.pages.borrow()[number].now;
        match now {
            Now::Moving => None,
            Now::Here { frame, writable } => {
                let whole = matches!(self.second.get(), Block::Whole(_)) && number >= SMALL;
                let size = if whole { self.block } else { self.page };
                let backing = Backing::new(Pa::new(frame.get() + at % self.page), size);
                if writable {
                    return Some(backing);
                }
                let perms = Perms::all().difference(Perms::ANY_WRITE);
                (access != Access::Write).then_some(backing.with_perms(perms))
            }
            Now::Empty | Now::Away(_) => {
                let frame = self.machine.take_page()?;
                let mut pages = self.pages.borrow_mut();
                let page = &mut pages[number];
                if page.now != now {
                    // Another CPU was first.
                    drop(pages);
                    self.machine.give_page(frame);
                    return None;
                }
                page.now = Now::Moving;
                drop(pages);
                if let Now::Away(from) = now {
                    self.copy(from, frame);
                    self.machine.give_page(from);
                }
                self.machine.write_page(frame);
                let mut pages = self.pages.borrow_mut();
                pages[number].now = Now::Here { frame, writable: true };
                pages[number].version += 1;
                drop(pages);
                self.look_up(at, access)
            }
        }
    }

    /// A leaf is gone, and says whether its memory was written.
    pub(super) fn report<F: Format>(&self, leaf: &Leaf<F>) {
        if !leaf.attrs().dirty {
            return;
        }
        let memory = leaf.frame().get()..leaf.frame().get() + leaf.size();
        for page in self.pages.borrow_mut().iter_mut() {
            let now = match page.now {
                Now::Here { frame, .. } => Some(frame),
                _ => None,
            };
            let mut frames = page.past.iter().copied().chain(now);
            page.reported |= frames.any(|frame| memory.contains(&frame.get()));
        }
    }
}

// ---- The guest ----
