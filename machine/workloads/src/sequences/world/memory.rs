//! Mappings, and arguments of edits: pages, addresses, attributes.

use super::*;

/// The native bits that a format has as a parameter: of pages of shadow stacks, and of memory that
/// is shared with a host. Physical addresses end below bit 51 then, which stands in 9 on arm64.
const fn marks<F: Format>() -> u64 {
    let shared = match (F::OUTPUT_BITS, F::HALVES) {
        (51, true) => 1 << 9,
        (51, false) => 1 << 51,
        _ => 0,
    };
    F::NATIVE & (1 << 54 | shared)
}

impl<'m, F: Format, G: Guests<'m, F>> World<'m, F, G> {
    /// Compares what the engine says of a space with the model.
    pub fn compare(&self, slot: &Slot<'m, F, G>, exclusive: &Exclusive<'m, F>) {
        let model = slot.model.borrow();
        let mut size = 0u64;
        let mut other = None;
        exclusive.look().walk_all(|leaf| {
            let first = leaf.input().bits();
            let last = first + (leaf.size() - 1);
            size = size.wrapping_add(leaf.size());
            let (frame, perms) = (leaf.frame().get(), leaf.attrs().perms);
            let ends = [(first, frame), (last, frame + (leaf.size() - 1))];
            if ends.iter().any(|&(at, pa)| model.at(at) != Some((pa, perms))) {
                other = other.or(Some((first, last, frame, perms, model.at(first))));
            }
        });
        if let Some(other) = other {
            self.fail(format!("the space and the model disagree: {other:x?}"));
        }
        self.check(size == model.size(), || {
            format!("{size:#x} bytes are mapped, and should be {:#x}", model.size())
        });
    }

    // ---- Pages ----

    /// A page of the machine, which is to be mapped once.
    pub fn take_page(&self) -> Option<Pa> {
        let page = self.machine.take_page()?;
        self.machine.write_page(page);
        self.frames.borrow_mut().insert(page.get(), 1);
        Some(page)
    }

    /// A page is mapped once more.
    pub fn share_page(&self, leaf: &Leaf<F>) {
        for page in self.pages_of(leaf) {
            if let Some(users) = self.frames.borrow_mut().get_mut(&page) {
                *users += 1;
            }
        }
    }

    /// One use of a page less. Whether there was one; after the last, it is free again.
    pub fn release_page(&self, page: u64) -> bool {
        let mut frames = self.frames.borrow_mut();
        let Some(users) = frames.get_mut(&page) else {
            return false;
        };
        *users -= 1;
        if *users > 0 {
            return true;
        }
        frames.remove(&page);
        drop(frames);
        self.machine.give_page(Pa::new(page));
        if self.control.is(Bug::FreedTwice) {
            self.machine.give_page(Pa::new(page));
        }
        true
    }

    /// A page that was not mapped after all.
    pub fn give_back(&self, page: Pa) {
        let known = self.release_page(page.get());
        self.check(known, || format!("{page} was not mapped, and has come out"));
    }

    /// The pages of the machine that a leaf leads to.
    pub(super) fn pages_of(&self, leaf: &Leaf<F>) -> impl Iterator<Item = u64> + use<'m, F, G> {
        let memory = self.machine.memory();
        let first = leaf.frame().get();
        let size = match (memory.first()..memory.end()).contains(&first) {
            true => leaf.size(),
            false => 0,
        };
        (first..first + size).step_by(Self::PAGE as usize)
    }

    /// A leaf has come out: its pages are free again, once each has as often as it was mapped.
    pub fn out(&self, batch: u64, leaf: &Leaf<F>) {
        if batch & 1 != 0 {
            // A host knows by itself which of its pages are free.
            return;
        }
        for page in self.pages_of(leaf) {
            let known = self.release_page(page);
            self.check(known, || {
                format!("the page {page:#x} has come out twice, or was never mapped")
            });
        }
    }

    // ---- Arguments ----

    /// Whether the space in a place translates these addresses, said in another way than the engine
    /// does.
    pub fn translates(&self, slot: &Slot<'m, F, G>, span: Span<F::Input>) -> bool {
        self.translates_all(slot, span.start().bits(), span.last().bits())
    }

    /// Compares what both say of an address.
    pub fn translates_at(&self, slot: &Slot<'m, F, G>, at: u64) -> bool {
        self.translates_all(slot, at, at)
    }

    pub fn translates_all(&self, slot: &Slot<'m, F, G>, first: u64, last: u64) -> bool {
        let bits = F::INPUT_BITS - u32::from(F::Input::SIGNED && !F::HALVES);
        let lower = last >> bits == 0;
        let upper = F::Input::SIGNED && first >= u64::MAX << bits;
        match F::HALVES {
            true if slot.half == Half::Upper => upper,
            true => lower,
            false => lower || upper,
        }
    }

    /// Some addresses of a window, or near it, or nowhere: the first and the size. Often those of
    /// an edit before, all of them or a part, or the blocks around them: what goes wrong, goes
    /// wrong where edits meet.
    pub fn addresses(&self, base: u64, dice: &Dice) -> (u64, u64) {
        let (page, block) = (Self::PAGE, Self::BLOCK);
        let slot = self.slots.iter().find(|slot| slot.base == base);
        let (first, size) = slot.map_or((0, 0), |slot| slot.recent.get());
        if size != 0 && dice.once_in(2) {
            return match dice.below(6) {
                0..=2 => (first, size),
                3 => (first + dice.below(size / page) * page, page),
                4 => (first & !(block - 1), block),
                _ => {
                    let (start, end) = (first & !(block - 1), first + size);
                    (start, (end - start).next_multiple_of(block))
                }
            };
        }
        let (first, size) = self.new_addresses(base, dice);
        let inside = first.wrapping_sub(base) < 16 * block && size <= 16 * block;
        if let (true, true, Some(slot)) = (inside, (first | size) % page == 0, slot) {
            slot.recent.set((first, size));
        }
        (first, size)
    }

    pub(super) fn new_addresses(&self, base: u64, dice: &Dice) -> (u64, u64) {
        let (page, block) = (Self::PAGE, Self::BLOCK);
        let run = page << F::contiguous(Level::PAGE).max(2);
        let bits = F::INPUT_BITS;
        match dice.below(28) {
            0..=11 => {
                let (first, count) = (dice.below(PAGES), 1 + dice.below(4));
                (base + block + first * page, count * page)
            }
            12..=20 => {
                let cuts = [
                    0,
                    page,
                    run,
                    2 * run,
                    block - run,
                    block,
                    block + page,
                    block + run,
                    2 * block,
                ];
                let first = dice.index(cuts.len() - 1);
                let end = first + 1 + dice.index(cuts.len() - 1 - first);
                (base + 4 * block + cuts[first], cuts[end] - cuts[first])
            }
            21 => (base, 16 * block),
            22 => {
                let askew = dice.pick(&[1, 0x800, 1 << 12, page / 2]);
                match dice.once_in(2) {
                    true => (base + block + askew, page),
                    false => (base + block, page + askew),
                }
            }
            23 => {
                // A whole entry of the root.
                let size = 1u64 << F::shift(F::root_level());
                (base & !(size - 1), size)
            }
            24 => match bits {
                64.. => (base, page),
                _ => (
                    base & (u64::MAX << bits),
                    1 << (bits - u32::from(F::Input::SIGNED && !F::HALVES)),
                ),
            },
            25 => {
                let end = (1u64 << bits) - dice.below(3) * page;
                (end, page * (1 + dice.below(3)))
            }
            26 => (!base & !(page - 1), page),
            _ => dice.pick(&[
                (base + block, 0),
                (u64::MAX << 12, 1 << 12),
                (0, 1 << 63),
                (1 << 63, 1 << 63),
                (1 << (bits - 1), page),
                (u64::MAX - 0xfff, 0x2000),
                // Over the hole between the halves.
                (
                    (1 << (bits - 1)) - page,
                    (u64::MAX << (bits - 1)).wrapping_sub(1 << (bits - 1)) + 2 * page,
                ),
            ]),
        }
    }

    pub fn span(&self, base: u64, dice: &Dice) -> Result<Span<F::Input>, AddressError> {
        let (first, size) = self.addresses(base, dice);
        match dice.once_in(3) {
            true => Span::inclusive(
                F::Input::from_bits(first),
                F::Input::from_bits(first.wrapping_add(size).wrapping_sub(1)),
            ),
            false => Span::new(F::Input::from_bits(first), size),
        }
    }

    /// Whether an address is in the window of a space, which no other space uses for what it maps
    /// on purpose.
    pub fn is_in_window(slot: &Slot<'m, F, G>, at: u64) -> bool {
        at.wrapping_sub(slot.base) < 16 * Self::BLOCK
    }

    /// One of the pages of a window.
    pub fn page(&self, base: u64, dice: &Dice) -> Span<F::Input> {
        let first = base + Self::BLOCK + dice.below(PAGES) * Self::PAGE;
        if let Some(slot) = self.slots.iter().find(|slot| slot.base == base) {
            slot.recent.set((first, Self::PAGE));
        }
        match Span::new(F::Input::from_bits(first), Self::PAGE) {
            Ok(span) => span,
            Err(error) => unreachable!("a page of a window: {error}"),
        }
    }

    /// Memory for some addresses that the machine does not have; rarely none that there can be.
    pub fn far(&self, base: u64, first: u64, dice: &Dice) -> Pa {
        let right = FAR + (first.wrapping_sub(base) & ((1 << 44) - 1));
        Pa::new(match dice.below(24) {
            0 => dice.pick(&[
                right + 0x800,
                right + 0x1000,
                1 << 52,
                u64::MAX - 0xfff,
                (1 << F::OUTPUT_BITS) - Self::PAGE,
            ]),
            _ => right,
        })
    }

    pub fn level(&self, dice: &Dice) -> Level {
        match dice.below(12) {
            0..=4 => Level::PAGE,
            5..=8 => Level::new(1),
            9..=10 => Level::new(2),
            _ => Level::new(dice.pick(&[3, 4, 5, 7, 63, 64, 255])),
        }
    }

    pub fn attrs(&self, dice: &Dice) -> Attrs {
        let base = match F::Input::SIGNED {
            true => dice.pick(&[
                Attrs::KERNEL_DATA,
                Attrs::USER_DATA,
                Attrs::USER_DATA,
                Attrs::KERNEL_RODATA,
                Attrs::USER_RODATA,
            ]),
            false => Attrs::GUEST_MEMORY.with_perms(dice.pick(&[
                Perms::READ.union(Perms::WRITE).and_user(),
                Perms::READ.union(Perms::WRITE).union(Perms::EXEC).and_user(),
                Perms::READ.and_user(),
            ])),
        };
        let attrs = Attrs {
            dirty: dice.once_in(2),
            accessed: !dice.once_in(4),
            software: dice.below(8) as u8 & self.machine.architecture().software(),
            global: base.global && !self.few_globals,
            ..base
        };
        let attrs = match attrs.software {
            7.. => Attrs { native: marks::<F>(), ..attrs },
            _ => attrs,
        };
        // Rarely it is parked from the start.
        match (attrs.accessed, attrs.software) {
            (false, 0..=1) => attrs.with_perms(Perms::empty()),
            _ => attrs,
        }
    }

    pub fn change(&self, dice: &Dice) -> Change {
        let change = Change::new();
        let data = Perms::READ | Perms::WRITE;
        let user = data | Perms::USER_READ | Perms::USER_WRITE;
        let perms = |perms: Perms| match F::Input::SIGNED {
            true => change.perms(perms),
            false => change.perms(perms.and_user()),
        };
        match dice.below(18) {
            0..=1 => change.write_protect(),
            2 => change.perms(Perms::empty()),
            3..=4 => perms(user),
            5 => perms(data),
            6 => perms(user - Perms::ANY_WRITE),
            7 => change.accessed(dice.once_in(2)),
            8 => change.dirty(dice.once_in(2)),
            9 => change.accessed(false).dirty(false),
            10 => change.memory(dice.pick(&[Memory::Normal, Memory::WriteThrough])),
            11 => change.global(dice.once_in(2)),
            12 => change.shareability(
                dice.pick(&[tablewright::Shareability::Inner, tablewright::Shareability::Outer]),
            ),
            13 => match (dice.pick(&[0, 1, u64::MAX]), marks::<F>()) {
                (1, marks @ 1..) => change.with_native(marks),
                (bits, _) => change.native(bits),
            },
            14 => change.perms(Perms::from_bits_truncate(dice.below(64) as u8)),
            15..=16 => change.global(true),
            _ => change.software(dice.below(8) as u8),
        }
    }

    // ---- What was gathered ----
}
