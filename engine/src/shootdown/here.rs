//! What a processor does: load a space, be lazy, flush, and do what others ask.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use crate::addr::Level;
use crate::flush::{Invalidation, MAX_RANGES, What};

use super::{Actions, Costs, Cpus, Forget, Identifiers, Message, Messenger, Space};

/// So many spaces are known to a processor; of others it forgets what it had when they come back.
const VIEWS: usize = 6;

/// Up to which generation a processor has forgotten a space. Written by the processor itself, and by nobody else.
#[derive(Debug)]
struct View {
    number: AtomicU64,
    generation: AtomicU64,
}

/// What a processor asks others to do: kept from before the first is told until the last has done it. Written by the processor
/// itself, but for `left`.
#[derive(Debug)]
struct Outbox {
    /// How many have not done it.
    left: AtomicU64,
    number: AtomicU64,
    generation: AtomicU64,
    id: AtomicU64,
    /// How many ranges; all of the space has none.
    count: AtomicU64,
    ranges: [[AtomicU64; 3]; MAX_RANGES],
}

/// One processor. Each has cache lines to itself.
///
/// ```
/// use tablewright::shootdown::Cpu;
/// static CPUS: [Cpu; 4] = [const { Cpu::new() }; 4];
/// # let _ = &CPUS;
/// ```
#[derive(Debug)]
#[repr(align(128))]
pub struct Cpu {
    /// The number of the space that is loaded; 0 for none. Written by the processor itself.
    loaded: AtomicU64,
    /// It does not use the space that it has loaded. Written by the processor itself.
    lazy: AtomicBool,
    views: [View; VIEWS],
    /// The view that goes next.
    oldest: AtomicU64,
    outbox: Outbox,
}

impl Cpu {
    /// A processor that has nothing loaded, and remembers nothing.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self {
            loaded: AtomicU64::new(0),
            lazy: AtomicBool::new(false),
            views: [const {
                View {
                    number: AtomicU64::new(0),
                    generation: AtomicU64::new(0),
                }
            }; VIEWS],
            oldest: AtomicU64::new(0),
            outbox: Outbox {
                left: AtomicU64::new(0),
                number: AtomicU64::new(0),
                generation: AtomicU64::new(0),
                id: AtomicU64::new(0),
                count: AtomicU64::new(0),
                ranges: [const { [const { AtomicU64::new(0) }; 3] }; MAX_RANGES],
            },
        }
    }

    /// A processor that has nothing loaded, and remembers nothing.
    #[cfg(loom)]
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            loaded: zero(),
            lazy: AtomicBool::new(false),
            views: core::array::from_fn(|_| View {
                number: zero(),
                generation: zero(),
            }),
            oldest: zero(),
            outbox: Outbox {
                left: zero(),
                number: zero(),
                generation: zero(),
                id: zero(),
                count: zero(),
                ranges: core::array::from_fn(|_| core::array::from_fn(|_| zero())),
            },
        }
    }

    fn view(&self, number: u64) -> Option<&View> {
        let of = |view: &&View| view.number.load(Ordering::Relaxed) == number;
        self.views.iter().find(of)
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Outbox {
    /// Writes a message for so many. Who finds our bit in his queue finds what was written before it.
    fn write(&self, message: &Message<'_>, number: u64, generation: u64, left: u32) {
        self.number.store(number, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Relaxed);
        self.id.store(u64::from(message.id), Ordering::Relaxed);
        let mut count = 0;
        for one in message.what {
            if let What::Range {
                first,
                last,
                level,
                tables,
            } = one.what
            {
                let level = level.map_or(0, |level| u64::from(level.height()) + 1);
                let words = [first, last, level << 1 | u64::from(tables)];
                for (place, word) in self.ranges[count].iter().zip(words) {
                    place.store(word, Ordering::Relaxed);
                }
                count += 1;
            }
        }
        self.count.store(count as u64, Ordering::Relaxed);
        self.left.store(u64::from(left), Ordering::Relaxed);
    }

    /// The ranges, under this identifier.
    fn ranges(&self, id: u16) -> impl Iterator<Item = Invalidation> + '_ {
        let count = self.count.load(Ordering::Relaxed) as usize;
        self.ranges.iter().take(count).map(move |range| {
            let [first, last, rest] = [0, 1, 2].map(|at: usize| range[at].load(Ordering::Relaxed));
            let level = (rest >> 1).checked_sub(1);
            let what = What::Range {
                first,
                last,
                level: level.map(|height| Level::new(height as u8)),
                tables: rest & 1 != 0,
            };
            Invalidation { id, what }
        })
    }
}

/// Words of memory for what is queued at so many processors: for each of them a bit for each.
pub const fn inbox_words(cpus: usize) -> usize {
    cpus * cpus.div_ceil(64)
}

/// Flushes on a machine whose hardware does not tell everybody by itself: see the [module](super).
#[derive(Debug)]
pub struct Shootdown<'m> {
    cpus: &'m [Cpu],
    inboxes: &'m [AtomicU64],
    identifiers: Option<Identifiers<'m>>,
    costs: Costs,
}

impl<'m> Shootdown<'m> {
    /// Such hardware has pages of this size.
    const PAGE_SHIFT: u32 = 12;

    /// Processors, all with nothing loaded, and [so much memory](inbox_words) for what is queued at them. Without identifiers, a load of
    /// a root forgets what was there. `None` if there is too little memory, or more than [`Cpus::MOST`] processors.
    pub fn new(
        cpus: &'m [Cpu],
        inboxes: &'m [AtomicU64],
        identifiers: Option<Identifiers<'m>>,
        costs: Costs,
    ) -> Option<Self> {
        if cpus.len() > Cpus::MOST {
            return None;
        }
        let inboxes = inboxes.get(..inbox_words(cpus.len()))?;
        for word in inboxes {
            word.store(0, Ordering::Relaxed);
        }
        Some(Self {
            cpus,
            inboxes,
            identifiers,
            costs,
        })
    }

    /// What processor number `cpu` does, for itself: nobody else uses this, and the program that does stays on the processor
    /// while it does. `None` if there is no such processor.
    pub fn on(&self, cpu: usize) -> Option<Here<'_, 'm>> {
        Some(Here {
            shootdown: self,
            number: cpu,
            me: self.cpus.get(cpu)?,
        })
    }

    /// What is queued at a processor.
    fn inbox(&self, cpu: usize) -> &'m [AtomicU64] {
        let words = self.cpus.len().div_ceil(64);
        &self.inboxes[cpu * words..(cpu + 1) * words]
    }
}

/// What the running processor does.
#[derive(Clone, Copy, Debug)]
pub struct Here<'s, 'm> {
    shootdown: &'s Shootdown<'m>,
    number: usize,
    me: &'s Cpu,
}

impl Here<'_, '_> {
    /// Loads another space, or none: before the processor sleeps, say. Interrupts are held off.
    ///
    /// `load` loads the root of `to` with the identifier that it is given, or that of a kernel that has no space. It need not forget
    /// anything; without identifiers, which are 0 then, a load forgets what is not global.
    pub fn switch(
        &self,
        from: Option<&Space<'_>>,
        to: Option<&Space<'_>>,
        actions: &impl Actions,
        load: impl FnOnce(u16),
    ) {
        // Before the fence below, as being in the set.
        self.me.lazy.store(false, Ordering::Relaxed);
        let mut id = 0;
        if let Some(space) = to {
            id = self.identify(space, actions);
            space.enter(self.number);
            self.catch_up(space, id, actions);
        }
        let number = to.map_or(0, |space| space.number);
        self.me.loaded.store(number, Ordering::Relaxed);
        load(id);
        // Only now that its root is loaded no more.
        if let Some(from) = from.filter(|from| from.number != number) {
            from.leave(self.number);
        }
    }

    /// From here on this processor does not use the space that it has loaded, until it [resumes](Here::resume) or switches.
    pub fn be_lazy(&self) {
        // Release: after the last use.
        self.me.lazy.store(true, Ordering::Release);
    }

    /// Goes on with the space that was loaded all the time.
    pub fn resume(&self, space: &Space<'_>, actions: &impl Actions) {
        self.me.lazy.store(false, Ordering::Relaxed);
        self.catch_up(space, space.identity.id(), actions);
    }

    /// Does what others ask. The handler of the interrupt calls it; so may anybody who waits with interrupts held off.
    pub fn receive(&self, actions: &impl Actions) {
        for (word, senders) in self.shootdown.inbox(self.number).iter().enumerate() {
            if senders.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // Acquire: what was written to the outbox, and the entries that were changed.
            let mut senders = senders.swap(0, Ordering::Acquire);
            while senders != 0 {
                let sender = word * 64 + senders.trailing_zeros() as usize;
                senders &= senders - 1;
                if let Some(Cpu { outbox, .. }) = self.shootdown.cpus.get(sender) {
                    let id = outbox.id.load(Ordering::Relaxed) as u16;
                    self.obey(
                        outbox.number.load(Ordering::Relaxed),
                        outbox.generation.load(Ordering::Relaxed),
                        id,
                        outbox.ranges(id),
                        actions,
                    );
                    // Release: it is done, and its outbox is the sender's again.
                    outbox.left.fetch_sub(1, Ordering::Release);
                }
            }
        }
    }

    /// Has everybody forget, who may have the space loaded or will load it. The entries are changed.
    ///
    /// Messengers are tried in this order, those that cost more than interrupts left out. On return all have forgotten, or will before they
    /// use the space. Tables that were cut off may still be in the hands of [software](super#tables).
    pub fn flush(
        &self,
        space: &Space<'_>,
        what: &[Invalidation],
        messengers: &[&dyn Messenger],
        actions: &impl Actions,
    ) {
        if what.is_empty() {
            return;
        }
        let mut message = Message {
            from: self.number,
            id: 0,
            root: space.root(),
            what,
        };
        let tables = message.has_tables();
        let costs = self.shootdown.costs;
        if costs.prefer_whole(what, Shootdown::PAGE_SHIFT) {
            message.what = &[Invalidation {
                id: 0,
                what: What::Everything,
            }];
        }
        let others = |mut cpus: Cpus| {
            cpus.remove(self.number);
            cpus
        };
        let is_worth = |messenger: &&&dyn Messenger, message: &Message<'_>, cpus: &Cpus| {
            let interrupts = u64::from(cpus.len()).saturating_mul(costs.interrupt);
            messenger.cost(message, cpus.len()) <= interrupts
        };
        // Who is in the set by now says what it costs, and no more.
        let about = others(space.cpus());
        let mut broadcasts = messengers.iter().filter(|one| one.reaches_all());
        if let Some(messenger) = broadcasts.find(|one| is_worth(one, &message, &about)) {
            // The entries before the identifier.
            fence(Ordering::SeqCst);
            message.id = space.identity.id();
            // Those who have it not loaded are told too, and miss nothing.
            return messenger.tell(&message, &mut space.cpus());
        }
        // Release, and acquire: who is told of this flush, and makes up for those before it, reads their entries too.
        let generation = space.generation.fetch_add(1, Ordering::AcqRel) + 1;
        // The entries and the generation before the identifier and the set: see the essay.
        fence(Ordering::SeqCst);
        let id = space.identity.id();
        message.id = id;
        let mut cpus = space.cpus();
        if !tables {
            // Acquire: who is lazy has made his last use of the space.
            let lazy = |cpu: usize| {
                let cpu = self.shootdown.cpus.get(cpu);
                cpu.is_some_and(|cpu| cpu.lazy.load(Ordering::Acquire))
            };
            cpus.retain(|cpu| !lazy(cpu));
        }
        let here = cpus.contains(self.number);
        cpus = others(cpus);
        for messenger in messengers.iter().filter(|one| !one.reaches_all()) {
            if !cpus.is_empty() && is_worth(&messenger, &message, &cpus) {
                messenger.tell(&message, &mut cpus);
            }
        }
        let outbox = &self.me.outbox;
        if !cpus.is_empty() {
            outbox.write(&message, space.number, generation, cpus.len());
            let bit = 1 << (self.number % 64);
            for cpu in cpus.iter() {
                // Release: with the outbox, and the entries.
                self.shootdown.inbox(cpu)[self.number / 64].fetch_or(bit, Ordering::Release);
            }
            actions.interrupt(&cpus);
        }
        if here {
            let ranges = message.what.iter().filter(|_| !message.is_whole());
            let ranges = ranges.map(|one| Invalidation { id, ..*one });
            self.obey(space.number, generation, id, ranges, actions);
        }
        // Acquire: what they have done with the space is done.
        while outbox.left.load(Ordering::Acquire) != 0 {
            // Others may wait for us meanwhile.
            self.receive(actions);
            actions.relax();
        }
    }

    /// Forgets what a message names, which is all of the space if it names no range.
    fn obey(
        &self,
        number: u64,
        generation: u64,
        id: u16,
        ranges: impl Iterator<Item = Invalidation>,
        actions: &impl Actions,
    ) {
        // Who has another space loaded looks at the generation when he comes back.
        let loaded = self.me.loaded.load(Ordering::Relaxed) == number;
        let Some(view) = self.me.view(number).filter(|_| loaded) else {
            return;
        };
        let seen = view.generation.load(Ordering::Relaxed);
        if seen >= generation {
            return;
        }
        let mut ranges = ranges.peekable();
        if seen + 1 == generation && ranges.peek().is_some() {
            ranges.for_each(|range| actions.forget(Forget::Range(range)));
        } else {
            actions.forget(Forget::Space(id));
        }
        view.generation.store(generation, Ordering::Relaxed);
    }

    /// The identifier to load a space with.
    fn identify(&self, space: &Space<'_>, actions: &impl Actions) -> u16 {
        let Some(identifiers) = &self.shootdown.identifiers else {
            return 0;
        };
        let id = identifiers.load(
            self.number,
            &space.identity,
            |with| actions.allocator(with),
            || actions.forget(Forget::All),
        );
        // There are as many holders as processors, or it is 0, under which nothing is kept.
        id.unwrap_or(0)
    }

    /// Forgets what this processor has missed of a space. It is in the set, and not lazy.
    fn catch_up(&self, space: &Space<'_>, id: u16, actions: &impl Actions) {
        fence(Ordering::SeqCst);
        // Acquire: who is not told reads the entries that were changed before.
        let generation = space.generation.load(Ordering::Acquire);
        let view = self.me.view(space.number);
        let missed = match view {
            Some(view) => view.generation.load(Ordering::Relaxed) != generation,
            // It may have been here long ago; if there was no flush since, there is nothing to forget.
            None => generation != 0,
        };
        // Without identifiers the load will forget.
        let kept = self.shootdown.identifiers.is_some();
        let loaded = self.me.loaded.load(Ordering::Relaxed) == space.number;
        if missed && (kept || loaded) {
            actions.forget(Forget::Space(id));
        }
        let view = view.unwrap_or_else(|| {
            let place = self.me.oldest.load(Ordering::Relaxed);
            let next = (place + 1) % VIEWS as u64;
            self.me.oldest.store(next, Ordering::Relaxed);
            &self.me.views[place as usize]
        });
        view.number.store(space.number, Ordering::Relaxed);
        view.generation.store(generation, Ordering::Relaxed);
    }
}
