//! The operations of a CPU: load a space, go lazy, flush, and execute the flushes of others.

use crate::addr::{Level, Pa};
use crate::cpus::Cpus;
use crate::identity::Identifiers;
use crate::invalidation::{Invalidation, MAX_RANGES, Stale, What};
use crate::sync::{AtomicBool, AtomicU64, Ordering, const_new, fence};

use super::{Actions, Batch, LocalFlush, Messenger, SetTooSmall, Space};

/// Spaces whose generation a CPU knows; of others it flushes all when they come back.
const VIEWS: usize = 6;

/// Orders accesses as a handler that interrupts this CPU sees them. It orders nothing between CPUs,
/// and is no instruction.
fn handler_fence() {
    // loom knows no handlers, and does not move what one thread does.
    #[cfg(not(feature = "loom"))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// The generation of a space up to which a CPU has flushed. Written by that CPU alone.
#[derive(Debug, Default)]
struct View {
    number: AtomicU64,
    generation: AtomicU64,
}

/// A message to other CPUs: kept from before the first is told until the last has done it. Written
/// by its CPU, except `left`.
#[derive(Debug, Default)]
struct Outbox {
    /// The number of CPUs that have not done it.
    left: AtomicU64,
    number: AtomicU64,
    generation: AtomicU64,
    id: AtomicU64,
    global: AtomicBool,
    /// How many ranges.
    count: AtomicU64,
    ranges: [[AtomicU64; 3]; MAX_RANGES],
}

/// Memory for one CPU, in cache lines of its own.
///
/// ```
/// use tablewright::shootdown::CpuCell;
/// let mut cells = [const { CpuCell::new() }; 4];
/// # let _ = &mut cells;
/// ```
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct CpuCell {
    /// The number of the space that is loaded; 0 for none. Written by the CPU itself.
    loaded: AtomicU64,
    /// Whether it is in lazy TLB mode. Written by the CPU itself.
    lazy: AtomicBool,
    /// Whether its TLB holds nothing, and it is told of nothing. Written by the CPU itself.
    offline: AtomicBool,
    /// Flushes of its own that are under way: one, and those of handlers in it. Written by the CPU
    /// itself.
    depth: AtomicU64,
    /// The last ticket up to which it has to flush everything. Raised by those that ring.
    must: AtomicU64,
    /// The last ticket up to which it has. Raised by the CPU itself.
    did: AtomicU64,
    views: [View; VIEWS],
    /// The view that goes next.
    oldest: AtomicU64,
    outbox: Outbox,
}

impl CpuCell {
    const_new! {
        /// A CPU that is online, has nothing loaded, and whose TLB holds nothing.
        {
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
                    global: AtomicBool::new(false),
                    count: AtomicU64::new(0),
                    ranges: [const { [const { AtomicU64::new(0) }; 3] }; MAX_RANGES],
                },
            }
        }
    }

    fn view(&self, number: u64) -> Option<&View> {
        let of = |view: &&View| view.number.load(Ordering::Relaxed) == number;
        self.views.iter().find(of)
    }
}

impl Outbox {
    /// Writes a message for `left` CPUs. A CPU that finds our bit in its queue finds what was
    /// written before it.
    fn write(&self, flush: &Invalidation<'_>, number: u64, generation: u64, left: u32) {
        // A message without ranges is about everything.
        let ranges = match flush.what {
            What::Ranges(ranges) => ranges,
            What::Everything => &[],
        };
        self.number.store(number, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Relaxed);
        self.id.store(u64::from(flush.id), Ordering::Relaxed);
        self.global.store(flush.global, Ordering::Relaxed);
        let mut count = 0;
        for (place, range) in self.ranges.iter().zip(ranges) {
            let level = range.level.map_or(0, |level| u64::from(level.height()) + 1);
            let words = [range.first, range.last, level << 1 | u64::from(range.tables)];
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
        batch.global = self.global.load(Ordering::Relaxed);
        (batch, self.id.load(Ordering::Relaxed) as u16)
    }
}

/// Words of memory for the queues of so many CPUs: for each of them a bit for each.
pub const fn inbox_words(cpus: usize) -> usize {
    cpus * cpus.div_ceil(64)
}

/// Flushes on a machine whose hardware does not tell every CPU by itself: see the [module](super).
///
/// The cells of the CPUs, and their queues, are of one of these:
///
/// ```compile_fail,E0499
/// # use core::sync::atomic::AtomicU64;
/// # use tablewright::shootdown::{CpuCell, Shootdown, inbox_words};
/// # let (mut one, mut two) = ([const { AtomicU64::new(0) }; 1], [const { AtomicU64::new(0) }; 1]);
/// let mut cells = [const { CpuCell::new() }; 1];
/// let first = Shootdown::new(&mut cells, &mut one, None, 1);
/// let second = Shootdown::new(&mut cells, &mut two, None, 1); // CPUs of the first
/// # let _ = (first, second);
/// ```
#[derive(Debug)]
pub struct Shootdown<'m> {
    cpus: &'m [CpuCell],
    inboxes: &'m [AtomicU64],
    identifiers: Option<Identifiers<'m>>,
    interrupt: u64,
    /// The last ticket of a flush in a handler.
    tickets: AtomicU64,
}

impl<'m> Shootdown<'m> {
    /// CPUs, all with nothing loaded, and [so much memory](inbox_words) for their queues. Without
    /// identifiers, a load of a root flushes what was there. `interrupt` is the cost to interrupt
    /// one CPU and have its answer, in any unit: the [cost of messengers](Messenger::cost) is
    /// compared with it. `None` if there is too little memory, if there are more than
    /// [`Cpus::MOST`] CPUs, or if there are fewer holders of identifiers than CPUs.
    pub fn new(
        cpus: &'m mut [CpuCell],
        inboxes: &'m mut [AtomicU64],
        identifiers: Option<Identifiers<'m>>,
        interrupt: u64,
    ) -> Option<Self> {
        let have_holders = identifiers.as_ref().is_none_or(|it| it.holders() >= cpus.len());
        if cpus.len() > Cpus::MOST || !have_holders {
            return None;
        }
        let inboxes = inboxes.get_mut(..inbox_words(cpus.len()))?;
        inboxes.fill_with(|| AtomicU64::new(0));
        cpus.fill_with(CpuCell::new);
        Some(Self { cpus, inboxes, identifiers, interrupt, tickets: AtomicU64::new(0) })
    }

    /// The operations of CPU number `cpu`. `None` if there is no such CPU.
    ///
    /// # Safety
    /// 1. The program that uses this runs on the processor with the number `cpu`, and stays on it
    ///    while it is in one of its functions. One that is about a processor that has not started
    ///    yet is used by one program alone.
    /// 2. Interrupts are held off, and handlers refrain from functions, as [said
    ///    above](super#what-interrupt-handlers-may-do).
    /// 3. The processor loads what [`switch`](PerCpu::switch) has it load, by the `load` that it is
    ///    given, and nothing else; [`resume`](PerCpu::resume) is given the space that is loaded.
    /// 4. All processors on which a space that it is given is ever loaded are of this `Shootdown`.
    pub unsafe fn on(&self, cpu: usize) -> Option<PerCpu<'_, 'm>> {
        Some(PerCpu { shootdown: self, number: cpu, me: self.cpus.get(cpu)? })
    }

    /// The queue of a CPU.
    fn inbox(&self, cpu: usize) -> &'m [AtomicU64] {
        let words = self.cpus.len().div_ceil(64);
        &self.inboxes[cpu * words..(cpu + 1) * words]
    }

    /// The CPUs whose TLBs may hold global translations. A full fence comes before.
    fn online(&self) -> Cpus {
        let mut cpus = Cpus::EMPTY;
        for (number, cpu) in self.cpus.iter().enumerate() {
            // Acquire: a CPU that is offline has made its last use of global translations.
            if !cpu.offline.load(Ordering::Acquire) {
                cpus.insert(number);
            }
        }
        cpus
    }
}

/// The operations of one CPU: see [`Shootdown::on`].
#[derive(Clone, Copy, Debug)]
pub struct PerCpu<'s, 'm> {
    shootdown: &'s Shootdown<'m>,
    number: usize,
    me: &'s CpuCell,
}

impl PerCpu<'_, '_> {
    /// Loads another space, or none: before the CPU idles, say. Interrupts are held off.
    ///
    /// `load` loads the root of `to` with the identifier that it is given, or that of a kernel that
    /// has no space. It need not flush anything; without identifiers, which are 0 then, a load
    /// flushes all but global translations.
    ///
    /// # Errors
    /// [`SetTooSmall`] if the space has no bit for this CPU; nothing has happened.
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

    /// Enters lazy TLB mode: this CPU does not use the space that it has loaded, until it
    /// [resumes](PerCpu::resume) or switches; nor do handlers that interrupt it.
    pub fn be_lazy(&self) {
        // Release: after the last use.
        self.me.lazy.store(true, Ordering::Release);
    }

    /// Leaves lazy TLB mode: the CPU uses the space again that it has loaded.
    pub fn resume(&self, space: &Space<'_>, actions: &impl Actions) {
        self.me.lazy.store(false, Ordering::Relaxed);
        self.catch_up(space, space.identity.id(), actions);
    }

    /// Has this CPU told of flushes that are [global](Invalidation::global) from here on, and
    /// flushes everything. Interrupts are held off.
    ///
    /// All CPUs are online at first.
    pub fn go_online(&self, actions: &impl Actions) {
        self.me.offline.store(false, Ordering::Relaxed);
        // A flush that does not see it has changed its entries before our walks from here on: see
        // the essay.
        fence(Ordering::SeqCst);
        actions.flush_local(LocalFlush::Everything);
    }

    /// Has this CPU told of nothing from here on: it has no space loaded, and uses no global
    /// translation that is flushed before it goes [online](PerCpu::go_online) again. Interrupts are
    /// held off. Returns when the flushes that may have told it are over.
    ///
    /// The CPU that boots calls it for those that it has not started yet, before any flush; a CPU
    /// that starts goes online by itself.
    ///
    /// ```
    /// # use std::sync::atomic::AtomicU64;
    /// # use tablewright::shootdown::{Actions, Allocator, CpuCell, Cpus, LocalFlush};
    /// # use tablewright::shootdown::{Shootdown, Space};
    /// # use tablewright::{Invalidation, Pa, What, shootdown::inbox_words};
    /// # struct Kernel;
    /// # // SAFETY: there is no TLB, and no other CPU.
    /// # unsafe impl Actions for Kernel {
    /// #     fn flush_local(&self, _: LocalFlush) {}
    /// #     fn interrupt(&self, _: &Cpus) { panic!("nothing to interrupt") }
    /// #     fn allocator(&self, _: &mut dyn FnMut(&mut Allocator<'_>)) {}
    /// # }
    /// # let (kernel, mut set) = (Kernel, [const { AtomicU64::new(0) }; 1]);
    /// # let mut cpus = [const { CpuCell::new() }; 4];
    /// # let mut inboxes = [const { AtomicU64::new(0) }; inbox_words(4)];
    /// # let shootdown = Shootdown::new(&mut cpus, &mut inboxes, None, 1).ok_or("memory")?;
    /// # let space = Space::new(Pa::new(0x1000), &mut set);
    /// for cpu in 1..4 {
    ///     // SAFETY: it is not started yet (1.) and loads nothing (2. to 4.).
    ///     let other = unsafe { shootdown.on(cpu) };
    ///     other.ok_or("no such CPU")?.go_offline(&kernel);
    /// }
    /// // SAFETY: this CPU (1.), without interrupts (2.), loads nothing (3., 4.).
    /// let me = unsafe { shootdown.on(0) }.ok_or("no such CPU")?;
    /// let root = space.root();
    /// let everything = Invalidation { root, id: 0, global: true, what: What::Everything };
    /// me.flush(&space, &everything, &[], &kernel); // waits for no other
    ///     
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
            actions.flush_local(LocalFlush::Everything);
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
                if let Some(CpuCell { outbox, .. }) = self.shootdown.cpus.get(sender) {
                    let (batch, id) = outbox.read();
                    self.obey(
                        outbox.number.load(Ordering::Relaxed),
                        outbox.generation.load(Ordering::Relaxed),
                        // A local flush needs no root.
                        &batch.flush(Pa::new(0), id),
                        actions,
                    );
                    // Release: it is done, and its outbox is the sender's again.
                    outbox.left.fetch_sub(1, Ordering::Release);
                }
            }
        }
    }

    /// Flushes the TLBs of every CPU that has the space loaded or will load it; of all online CPUs
    /// if the flush is global. The entries are changed.
    ///
    /// `flush` is of this space: the root and the identifier in it mean nothing. Messengers are
    /// tried in this order, those that cost more than interrupts left out. On return all CPUs have
    /// flushed, or will before they use the space. Tables that were detached may still be in the
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
        let mut message = Invalidation { root: space.root(), id: 0, what, ..*flush };
        let others = |mut cpus: Cpus| {
            cpus.remove(self.number);
            cpus
        };
        let is_worth = |messenger: &&&dyn Messenger, message: &Invalidation<'_>, cpus: &Cpus| {
            let interrupts = u64::from(cpus.len()).saturating_mul(self.shootdown.interrupt);
            messenger.cost(message, cpus.len()) <= interrupts
        };
        // The CPUs that are in the set by now say what it costs, and no more.
        let about = || others(self.concerned(space, &message));
        let mut broadcasts = messengers.iter().filter(|one| one.reaches_all());
        if let Some(messenger) = broadcasts.find(|one| is_worth(one, &message, &about())) {
            // The entries before the identifier.
            fence(Ordering::SeqCst);
            message.id = space.identity.id();
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
        message.id = space.identity.id();
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
            self.obey(space.number, generation, &message, actions);
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
                // Acquire: as above.
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
    fn concerned(&self, space: &Space<'_>, message: &Invalidation<'_>) -> Cpus {
        if message.global {
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

    fn these(&self, cpus: &Cpus) -> impl Iterator<Item = &CpuCell> {
        cpus.iter().filter_map(|cpu| self.shootdown.cpus.get(cpu))
    }

    /// Executes a message on this CPU. A handler may execute another in the midst of it.
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
            actions.flush_local(LocalFlush::Everything);
        } else {
            let whole = missed || ranges.is_empty();
            if view.is_some() && whole {
                actions.flush_local(LocalFlush::Space(id));
            }
            // That leaves what is global.
            if global || view.is_some() && !whole {
                for &range in ranges {
                    actions.flush_local(LocalFlush::Range { id, range, global });
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
        // SAFETY: `Shootdown::on` (1., 4.); `Actions` (2., 3.).
        let id = unsafe {
            identifiers.load(
                self.number,
                &space.identity,
                |with| actions.allocator(with),
                || actions.flush_local(LocalFlush::All),
            )
        };
        // `new` has seen that each CPU has a holder.
        id.unwrap_or(0)
    }

    /// Flushes what this CPU has missed of a space. It is in the set, and not lazy.
    fn catch_up(&self, space: &Space<'_>, id: u16, actions: &impl Actions) {
        fence(Ordering::SeqCst);
        // Acquire: a CPU that is not told reads the entries that were changed before.
        let generation = space.generation.load(Ordering::Acquire);
        let view = self.me.view(space.number);
        let missed = match view {
            Some(view) => view.generation.load(Ordering::Relaxed) != generation,
            // It may have been here long ago; without a flush since, nothing is stale.
            None => generation != 0,
        };
        // Without identifiers the load will flush.
        let kept = self.shootdown.identifiers.is_some();
        let loaded = self.me.loaded.load(Ordering::Relaxed) == space.number;
        if missed && (kept || loaded) {
            actions.flush_local(LocalFlush::Space(id));
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
