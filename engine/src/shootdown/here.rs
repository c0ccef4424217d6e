//! What a CPU does: load a space, be lazy, flush, and do what others ask.

#[cfg(not(feature = "loom"))]
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use crate::addr::{Level, Pa};
use crate::invalidation::{Invalidation, MAX_RANGES, Stale, What};

use super::{Actions, Batch, Cpus, Forget, Identifiers, Message, Messenger, SetTooSmall, Space};

/// So many spaces are known to a CPU; of others it forgets what it had when they come back.
const VIEWS: usize = 6;

/// What comes before stays before what comes after, as a handler that interrupts this CPU sees it.
/// Between CPUs it orders nothing, and it is no instruction.
fn handler_fence() {
    // loom knows no handlers, and does not move what one thread does.
    #[cfg(not(feature = "loom"))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// Up to which generation a CPU has forgotten a space. Written by the CPU itself alone.
#[derive(Debug)]
struct View {
    number: AtomicU64,
    generation: AtomicU64,
}

/// What a CPU asks others to do: kept from before the first is told until the last has done it.
/// Written by the CPU itself, but for `left`.
#[derive(Debug)]
struct Outbox {
    /// How many have not done it.
    left: AtomicU64,
    number: AtomicU64,
    generation: AtomicU64,
    id: AtomicU64,
    /// Bits: see [`Outbox::GLOBAL`].
    kind: AtomicU64,
    /// How many ranges.
    count: AtomicU64,
    ranges: [[AtomicU64; 3]; MAX_RANGES],
}

/// The state of one CPU, in cache lines of its own.
///
/// ```
/// use tablewright::shootdown::Cpu;
/// static CPUS: [Cpu; 4] = [const { Cpu::new() }; 4];
/// # let _ = &CPUS;
/// ```
#[derive(Debug)]
#[repr(align(128))]
pub struct Cpu {
    /// The number of the space that is loaded; 0 for none. Written by the CPU itself.
    loaded: AtomicU64,
    /// It does not use the space that it has loaded. Written by the CPU itself.
    lazy: AtomicBool,
    /// It remembers nothing, and is told of nothing. Written by the CPU itself.
    offline: AtomicBool,
    /// Flushes of its own that are under way: one, and those of handlers in it. Written by the CPU
    /// itself.
    depth: AtomicU64,
    /// The last ticket up to which it has to forget everything. Raised by those that ring.
    must: AtomicU64,
    /// The last ticket up to which it has. Raised by the CPU itself.
    did: AtomicU64,
    views: [View; VIEWS],
    /// The view that goes next.
    oldest: AtomicU64,
    outbox: Outbox,
}

impl Cpu {
    /// A CPU that is online, has nothing loaded, and remembers nothing.
    #[cfg(not(feature = "loom"))]
    pub const fn new() -> Self {
        Self {
            loaded: AtomicU64::new(0),
            lazy: AtomicBool::new(false),
            offline: AtomicBool::new(false),
            depth: AtomicU64::new(0),
            must: AtomicU64::new(0),
            did: AtomicU64::new(0),
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
                kind: AtomicU64::new(0),
                count: AtomicU64::new(0),
                ranges: [const { [const { AtomicU64::new(0) }; 3] }; MAX_RANGES],
            },
        }
    }

    /// A CPU that is online, has nothing loaded, and remembers nothing.
    #[cfg(feature = "loom")]
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            loaded: zero(),
            lazy: AtomicBool::new(false),
            offline: AtomicBool::new(false),
            depth: zero(),
            must: zero(),
            did: zero(),
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
                kind: zero(),
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
    const GLOBAL: u64 = 1 << 0;
    const EVERYTHING: u64 = 1 << 1;

    /// Writes a message for so many. A CPU that finds our bit in its queue finds what was written
    /// before it.
    fn write(&self, message: &Message<'_>, number: u64, generation: u64, left: u32) {
        let flush = &message.flush;
        let mut kind = 0;
        if flush.global {
            kind |= Self::GLOBAL;
        }
        let ranges = match flush.what {
            What::Ranges(ranges) => ranges,
            What::Everything => {
                kind |= Self::EVERYTHING;
                &[]
            }
        };
        self.number.store(number, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Relaxed);
        self.id.store(u64::from(flush.id), Ordering::Relaxed);
        self.kind.store(kind, Ordering::Relaxed);
        let mut count = 0;
        for (place, range) in self.ranges.iter().zip(ranges) {
            let level = range.level.map_or(0, |level| u64::from(level.height()) + 1);
            let words = [
                range.first,
                range.last,
                level << 1 | u64::from(range.tables),
            ];
            for (place, word) in place.iter().zip(words) {
                place.store(word, Ordering::Relaxed);
            }
            count += 1;
        }
        self.count.store(count as u64, Ordering::Relaxed);
        self.left.store(u64::from(left), Ordering::Relaxed);
    }

    /// The message, as a batch, and its identifier.
    fn read(&self) -> (Batch, u16) {
        let mut batch = Batch::new();
        let kind = self.kind.load(Ordering::Relaxed);
        let count = self.count.load(Ordering::Relaxed) as usize;
        for range in self.ranges.iter().take(count) {
            let [first, last, rest] = [0, 1, 2].map(|at: usize| range[at].load(Ordering::Relaxed));
            let level = (rest >> 1).checked_sub(1);
            batch.push(Stale {
                first,
                last,
                level: level.map(|height| Level::new(height as u8)),
                tables: rest & 1 != 0,
            });
        }
        batch.global = kind & Self::GLOBAL != 0;
        batch.everything |= kind & Self::EVERYTHING != 0;
        (batch, self.id.load(Ordering::Relaxed) as u16)
    }
}

/// Words of memory for what is queued at so many CPUs: for each of them a bit for each.
pub const fn inbox_words(cpus: usize) -> usize {
    cpus * cpus.div_ceil(64)
}

/// Flushes on a machine whose hardware does not tell every CPU by itself: see the [module](super).
#[derive(Debug)]
pub struct Shootdown<'m> {
    cpus: &'m [Cpu],
    inboxes: &'m [AtomicU64],
    identifiers: Option<Identifiers<'m>>,
    interrupt: u64,
    /// The last ticket of a flush in a handler.
    tickets: AtomicU64,
}

impl<'m> Shootdown<'m> {
    /// CPUs, all with nothing loaded, and [so much memory](inbox_words) for what is queued at them.
    /// Without identifiers, a load of a root forgets what was there. `interrupt` is what it costs
    /// to interrupt one CPU and have its answer, in any unit: what [messengers
    /// cost](Messenger::cost) is compared with it. `None` if there is too little memory, or more
    /// than [`Cpus::MOST`] CPUs.
    pub fn new(
        cpus: &'m [Cpu],
        inboxes: &'m [AtomicU64],
        identifiers: Option<Identifiers<'m>>,
        interrupt: u64,
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
            interrupt,
            tickets: AtomicU64::new(0),
        })
    }

    /// What CPU number `cpu` does, for itself: no other CPU uses this, and the program that does
    /// stays on the CPU while it does. `None` if there is no such CPU.
    pub fn on(&self, cpu: usize) -> Option<Here<'_, 'm>> {
        Some(Here {
            shootdown: self,
            number: cpu,
            me: self.cpus.get(cpu)?,
        })
    }

    /// What is queued at a CPU.
    fn inbox(&self, cpu: usize) -> &'m [AtomicU64] {
        let words = self.cpus.len().div_ceil(64);
        &self.inboxes[cpu * words..(cpu + 1) * words]
    }

    /// The CPUs that may remember what is global. A full fence comes before.
    fn online(&self) -> Cpus {
        let mut cpus = Cpus::EMPTY;
        for (number, cpu) in self.cpus.iter().enumerate() {
            // Acquire: a CPU that is offline has made its last use of what is global.
            if !cpu.offline.load(Ordering::Acquire) {
                cpus.insert(number);
            }
        }
        cpus
    }
}

/// The operations of the running CPU.
///
/// What may be called with interrupts on, and what by handlers, is [said
/// above](super#what-interrupt-handlers-may-do).
#[derive(Clone, Copy, Debug)]
pub struct Here<'s, 'm> {
    shootdown: &'s Shootdown<'m>,
    number: usize,
    me: &'s Cpu,
}

impl Here<'_, '_> {
    /// Loads another space, or none: before the CPU idles, say. Interrupts are held off.
    ///
    /// `load` loads the root of `to` with the identifier that it is given, or that of a kernel that
    /// has no space. It need not forget anything; without identifiers, which are 0 then, a load
    /// forgets what is not global.
    ///
    /// # Errors
    /// Nothing has happened where the space has no bit for this CPU.
    pub fn switch(
        &self,
        from: Option<&Space<'_>>,
        to: Option<&Space<'_>>,
        actions: &impl Actions,
        load: impl FnOnce(u16),
    ) -> Result<(), SetTooSmall> {
        if to.is_some_and(|space| !space.has_bit_for(self.number)) {
            return Err(SetTooSmall);
        }
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
        Ok(())
    }

    /// From here on this CPU does not use the space that it has loaded, until it
    /// [resumes](Here::resume) or switches; nor do handlers that interrupt it.
    pub fn be_lazy(&self) {
        // Release: after the last use.
        self.me.lazy.store(true, Ordering::Release);
    }

    /// Ends laziness: the CPU uses the space again that it has had loaded.
    pub fn resume(&self, space: &Space<'_>, actions: &impl Actions) {
        self.me.lazy.store(false, Ordering::Relaxed);
        self.catch_up(space, space.identity.id(), actions);
    }

    /// From here on this CPU is told of flushes that are [global](Invalidation::global). It forgets
    /// everything. Interrupts are held off.
    ///
    /// All CPUs are online at first.
    pub fn go_online(&self, actions: &impl Actions) {
        self.me.offline.store(false, Ordering::Relaxed);
        // A flush that does not see it has changed its entries before what we walk from here on:
        // see the essay.
        fence(Ordering::SeqCst);
        actions.forget(Forget::Everything);
    }

    /// From here on this CPU is told of nothing: it has no space loaded, and uses nothing global
    /// that is flushed before it goes [online](Here::go_online) again. Interrupts are held off. It
    /// returns when the flushes that may have told it are over.
    ///
    /// The CPU that boots calls it for those that it has not started yet, before any flush; a CPU
    /// that starts goes online by itself.
    ///
    /// ```
    /// # use std::sync::atomic::AtomicU64;
    /// # use tablewright::shootdown::{Actions, Allocator, Cpu, Cpus, Forget, Shootdown, Space, inbox_words};
    /// # use tablewright::{Invalidation, Pa, What};
    /// # struct Kernel;
    /// # // SAFETY: there is no TLB, and no other CPU.
    /// # unsafe impl Actions for Kernel {
    /// #     fn forget(&self, _: Forget) {}
    /// #     fn interrupt(&self, _: &Cpus) { panic!("nothing to interrupt") }
    /// #     fn allocator(&self, _: &mut dyn FnMut(&mut Allocator<'_>)) {}
    /// # }
    /// # let (kernel, set) = (Kernel, [const { AtomicU64::new(0) }; 1]);
    /// # let cpus = [const { Cpu::new() }; 4];
    /// # let inboxes = [const { AtomicU64::new(0) }; inbox_words(4)];
    /// # let shootdown = Shootdown::new(&cpus, &inboxes, None, 1).ok_or("memory")?;
    /// # let space = Space::new(1, Pa::new(0x1000), &set);
    /// for cpu in 1..4 {
    ///     shootdown.on(cpu).ok_or("no such CPU")?.go_offline(&kernel); // not started yet
    /// }
    /// let here = shootdown.on(0).ok_or("no such CPU")?;
    /// let everything = Invalidation { root: space.root(), id: 0, global: true, what: What::Everything };
    /// here.flush(&space, &everything, &[], &kernel); // waits for no other
    /// # Ok::<(), &str>(())
    /// ```
    pub fn go_offline(&self, actions: &impl Actions) {
        // Release: after the last use.
        self.me.offline.store(true, Ordering::Release);
        // Its other half is in `flush`, between the depth and which CPUs are online: a flush that
        // does not see that we are offline is seen to be under way, and waits for us.
        fence(Ordering::SeqCst);
        for cpu in self.shootdown.cpus {
            while !core::ptr::eq(cpu, self.me) && cpu.depth.load(Ordering::Relaxed) != 0 {
                self.receive(actions);
                actions.relax();
            }
        }
    }

    /// Executes the flushes that other CPUs have queued here. The handler of the interrupt calls
    /// it; so must every wait with interrupts held off.
    pub fn receive(&self, actions: &impl Actions) {
        // Acquire: the entries that were changed before the tickets were taken.
        let must = self.me.must.load(Ordering::Acquire);
        if must > self.me.did.load(Ordering::Relaxed) {
            actions.forget(Forget::Everything);
            // Release: it is done. Raised and not stored, because a handler may have done more
            // meanwhile.
            self.me.did.fetch_max(must, Ordering::Release);
        }
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
                    let (batch, id) = outbox.read();
                    self.obey(
                        outbox.number.load(Ordering::Relaxed),
                        outbox.generation.load(Ordering::Relaxed),
                        // No root is needed to forget.
                        &batch.flush(Pa::new(0), id),
                        actions,
                    );
                    // Release: it is done, and its outbox is the sender's again.
                    outbox.left.fetch_sub(1, Ordering::Release);
                }
            }
        }
    }

    /// Has all CPUs forget that have the space loaded or will load it, and if the flush is global
    /// all CPUs. The entries are changed.
    ///
    /// `flush` is of this space: the root and the identifier in it mean nothing. Messengers are
    /// tried in this order, those that cost more than interrupts left out. On return all CPUs have
    /// forgotten, or will before they use the space. Tables that were detached may still be in the
    /// hands of [software](super#tables).
    ///
    /// It may be called by a handler that has interrupted another flush on this CPU, where it costs
    /// more: see [above](super#flushes-in-interrupt-handlers).
    pub fn flush(
        &self,
        space: &Space<'_>,
        flush: &Invalidation<'_>,
        messengers: &[&dyn Messenger],
        actions: &impl Actions,
    ) {
        let what = match flush.what {
            What::Ranges([]) => return,
            What::Ranges(ranges) if ranges.len() > MAX_RANGES => What::Everything,
            what => what,
        };
        let mut message = Message {
            from: self.number,
            flush: Invalidation {
                root: space.root(),
                id: 0,
                what,
                ..*flush
            },
        };
        let others = |mut cpus: Cpus| {
            cpus.remove(self.number);
            cpus
        };
        let is_worth = |messenger: &&&dyn Messenger, message: &Message<'_>, cpus: &Cpus| {
            let interrupts = u64::from(cpus.len()).saturating_mul(self.shootdown.interrupt);
            messenger.cost(message, cpus.len()) <= interrupts
        };
        // The CPUs that are in the set by now say what it costs, and no more.
        let about = || others(self.concerned(space, &message));
        let mut broadcasts = messengers.iter().filter(|one| one.reaches_all());
        if let Some(messenger) = broadcasts.find(|one| is_worth(one, &message, &about())) {
            // The entries before the identifier.
            fence(Ordering::SeqCst);
            message.flush.id = space.identity.id();
            // Those that have it not loaded are told too, and miss nothing.
            return messenger.tell(&message, &mut self.concerned(space, &message));
        }
        // From here on handlers find this flush under way. They leave the depth as they have found
        // it.
        let depth = self.me.depth.load(Ordering::Relaxed);
        self.me.depth.store(depth + 1, Ordering::Relaxed);
        handler_fence();
        // Release, and acquire: a CPU that is told of this flush, and makes up for those before it,
        // reads their entries too.
        let generation = space.generation.fetch_add(1, Ordering::AcqRel) + 1;
        // The entries, the generation and the depth before the identifier, the set, and which are
        // online: see the essay.
        fence(Ordering::SeqCst);
        message.flush.id = space.identity.id();
        let cpus = self.concerned(space, &message);
        let here = cpus.contains(self.number);
        let mut cpus = others(cpus);
        for messenger in messengers.iter().filter(|one| !one.reaches_all()) {
            if !cpus.is_empty() && is_worth(&messenger, &message, &cpus) {
                messenger.tell(&message, &mut cpus);
            }
        }
        let outbox = &self.me.outbox;
        let mut ticket = 0;
        if !cpus.is_empty() {
            if depth == 0 {
                outbox.write(&message, space.number, generation, cpus.len());
                let bit = 1 << (self.number % 64);
                for cpu in cpus.iter() {
                    // Release: with the outbox, and the entries.
                    self.shootdown.inbox(cpu)[self.number / 64].fetch_or(bit, Ordering::Release);
                }
            } else {
                // Release: with the entries. Acquire: those of tickets before this one.
                ticket = self.shootdown.tickets.fetch_add(1, Ordering::AcqRel) + 1;
                for cpu in self.these(&cpus) {
                    // Release: with the entries, and those of tickets before this one.
                    cpu.must.fetch_max(ticket, Ordering::Release);
                }
            }
            actions.interrupt(&cpus);
        }
        if here {
            self.obey(space.number, generation, &message.flush, actions);
        }
        if depth == 0 {
            // Acquire: what they have done with the space is done.
            while outbox.left.load(Ordering::Acquire) != 0 {
                // Others may wait for us meanwhile.
                self.receive(actions);
                actions.relax();
            }
        } else {
            for cpu in self.these(&cpus) {
                // The same.
                while cpu.did.load(Ordering::Acquire) < ticket {
                    self.receive(actions);
                    actions.relax();
                }
            }
        }
        handler_fence();
        self.me.depth.store(depth, Ordering::Relaxed);
    }

    /// The CPUs that a flush has to reach. A full fence comes before, where it matters.
    fn concerned(&self, space: &Space<'_>, message: &Message<'_>) -> Cpus {
        if message.flush.global {
            return self.shootdown.online();
        }
        let mut cpus = space.cpus();
        let tables = message.has_tables();
        if !tables {
            // Acquire: a CPU that is lazy has made its last use of the space.
            let lazy = |cpu: usize| {
                let cpu = self.shootdown.cpus.get(cpu);
                cpu.is_some_and(|cpu| cpu.lazy.load(Ordering::Acquire))
            };
            cpus.retain(|cpu| !lazy(cpu));
        }
        cpus
    }

    fn these(&self, cpus: &Cpus) -> impl Iterator<Item = &Cpu> {
        cpus.iter().filter_map(|cpu| self.shootdown.cpus.get(cpu))
    }

    /// Forgets what a message names. A handler may do the same in the midst of it.
    fn obey(&self, number: u64, generation: u64, flush: &Invalidation<'_>, actions: &impl Actions) {
        // A CPU that has another space loaded looks at the generation when it comes back.
        let loaded = self.me.loaded.load(Ordering::Relaxed) == number;
        let view = self.me.view(number).filter(|_| loaded);
        let seen = view.map(|view| view.generation.load(Ordering::Relaxed));
        let view = view.filter(|_| seen.is_some_and(|seen| seen < generation));
        let missed = seen.is_some_and(|seen| seen + 1 != generation);
        let (id, global) = (flush.id, flush.global);
        let ranges = match flush.what {
            What::Ranges(ranges) => ranges,
            What::Everything => &[],
        };
        // Tables that global translations were found in are cached under any identifier.
        if global && (ranges.is_empty() || ranges.iter().any(|range| range.tables)) {
            actions.forget(Forget::Everything);
        } else {
            let whole = missed || ranges.is_empty();
            if view.is_some() && whole {
                actions.forget(Forget::Space(id));
            }
            // That leaves what is global.
            if global || view.is_some() && !whole {
                for &range in ranges {
                    actions.forget(Forget::Range { id, range, global });
                }
            }
        }
        if let Some(view) = view {
            view.generation.store(generation, Ordering::Relaxed);
        }
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
        // There are as many holders as CPUs, or it is 0, under which nothing is kept.
        id.unwrap_or(0)
    }

    /// Forgets what this CPU has missed of a space. It is in the set, and not lazy.
    fn catch_up(&self, space: &Space<'_>, id: u16, actions: &impl Actions) {
        fence(Ordering::SeqCst);
        // Acquire: a CPU that is not told reads the entries that were changed before.
        let generation = space.generation.load(Ordering::Acquire);
        let view = self.me.view(space.number);
        let missed = match view {
            Some(view) => view.generation.load(Ordering::Relaxed) != generation,
            // It may have been here long ago; if there was no flush since, there is nothing to
            // forget.
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
