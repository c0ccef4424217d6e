//! How processors are told, by each messenger, and what the platform does with it.

use super::*;

/// A function and what it is called with.
pub(super) type Handler = (unsafe fn(*const ()), *const ());

/// Knowledge that a platform needs of its space.
pub(super) struct Link<'a, 'm> {
    pub(super) kernel: &'a Kernel<'a, 'm>,
    pub(super) mapper: Mapper<'m>,
    pub(super) batch: RefCell<Batch>,
    pub(super) space: OnceCell<Space<'a>>,
    pub(super) number: u64,
    /// CPUs that have it loaded, or edit it.
    pub(super) users: Cell<u32>,
    pub(super) locked: Cell<bool>,
}

/// The platform of one space.
#[derive(Clone)]
pub(super) struct Of<'a, 'm>(pub(super) Rc<Link<'a, 'm>>);

/// The running CPU's part in flushes.
pub(super) struct Running<'k, 'a, 'm>(pub(super) &'k Kernel<'a, 'm>, pub(super) Cell<Option<Tlbi>>);

impl<'k, 'a, 'm> Running<'k, 'a, 'm> {
    pub(super) fn new(kernel: &'k Kernel<'a, 'm>) -> Self {
        Self(kernel, Cell::new(None))
    }

    /// One of several instructions for a range, which the machine is told as one.
    pub(super) fn broadcast(&self, next: Tlbi) {
        if let Some(last) = self.1.take() {
            if let (Some((first, end)), Some((start, to))) = (last.range, next.range) {
                let joined = Tlbi { range: Some((first, to)), ..next };
                if end + 1 == start && (Tlbi { range: last.range, ..joined }) == last {
                    return self.1.set(Some(joined));
                }
            }
            self.0.machine.tlbi(last);
        }
        self.1.set(Some(next));
    }

    pub(super) fn wait(&self) {
        if let Some(last) = self.1.take() {
            self.0.machine.tlbi(last);
        }
        self.0.machine.dsb();
    }
}

impl<'a> Kernel<'a, '_> {
    pub(super) fn here(&self) -> PerCpu<'a, 'a> {
        let cpu = self.machine.cpu().id();
        // SAFETY: the running CPU (1.), whose handlers come where `poll` says (2.); the machine
        // checks what it loads (3., 4.).
        unsafe { self.shootdown.on(cpu) }.expect("a CPU of the machine")
    }

    /// Between two instructions.
    pub(super) fn poll(&self) {
        if self.machine.take_interrupt() {
            self.here().receive(&Running::new(self));
        }
    }

    pub(super) fn forget_here(&self, tlbi: Tlbi) {
        let here = Tlbi { broadcast: false, ..tlbi };
        self.machine.tlbi(here);
        self.machine.dsb();
    }

    pub(super) fn flush(&self, space: &Space<'_>, what: &Invalidation<'_>) {
        let running = Running::new(self);
        let hypercall = Hypercall {
            encoder: FlushEncoder::default(),
            cost: self.hypercall,
            calls: Running::new(self),
        };
        // SAFETY: the program that takes a CPU off is its host (1.).
        let deferred = unsafe { Deferred::new(|cpu| self.flags.get(cpu)) };
        let amd = amd::InvlpgbMessenger {
            most: self.amd.0,
            cost: self.amd.1,
            hardware: Running::new(self),
        };
        // SAFETY: the encoder is of the machine's architecture (1.).
        let arm64 = unsafe { arm64::TlbiMessenger::new(self.arm64, 0, Running::new(self)) };
        let flushes = &self.flushes[self.machine.cpu().id()];
        flushes.update(|count| count + 1);
        let messengers: &[&dyn Messenger] = match self.way {
            Way::Interrupts => &[],
            Way::Hypercall => &[&hypercall],
            Way::Deferred => &[&deferred],
            Way::Both => &[&deferred, &hypercall],
            Way::Amd => &[&amd, &deferred],
            Way::Arm64 => &[&arm64],
        };
        self.here().flush(space, what, messengers, &running);
        flushes.update(|count| count - 1);
    }

    /// An interrupt may come here, in a flush, whose handler flushes.
    pub(super) fn may_be_interrupted(&self) {
        let flushes = self.flushes[self.machine.cpu().id()].get();
        if (1..=2).contains(&flushes)
            && let Some((handler, data)) = self.handler.get()
            && self.dice.once_in(12)
        {
            // SAFETY: `run` has set it, and takes it away before what it points to is gone.
            unsafe { handler(data) };
        }
    }

    /// The number by which the hypervisor knows a CPU. It has given none to one of them.
    pub(super) fn vp_index(&self, cpu: usize) -> Option<u32> {
        let known = self.refuses == 0 || cpu != 2;
        known.then_some((cpu as u32 * 67 + 3) % 1024)
    }
}

// SAFETY: the machine forgets (1.), interrupts are polled between any two accesses (2.), and no
// other CPU runs in the function (3.).
unsafe impl Actions for Running<'_, '_, '_> {
    fn flush_local(&self, what: LocalFlush) {
        self.0.may_be_interrupted();
        let tlbi = match what {
            // INVPCID type 2.
            LocalFlush::Everything => Tlbi::ALL,
            LocalFlush::All => Tlbi::invpcid(None, None),
            LocalFlush::Space(_) if !self.0.identified => Tlbi::invpcid(None, None),
            LocalFlush::Space(id) => Tlbi::invpcid(Some(id), None),
            // An address for each leaf.
            LocalFlush::Range { id, range, global } => {
                let addresses = (range.first, range.last);
                let stride = range.level.map(|level| 12 + 9 * level.height());
                let tlbi = match global {
                    true => Tlbi::invlpg(id, addresses),
                    false => Tlbi::invpcid(Some(id), Some(addresses)),
                };
                Tlbi { stride, ..tlbi }
            }
        };
        self.0.forget_here(tlbi);
        self.0.may_be_interrupted();
    }

    fn interrupt(&self, cpus: &Cpus) {
        self.0.may_be_interrupted();
        cpus.iter().for_each(|cpu| self.0.machine.interrupt(cpu));
        self.0.may_be_interrupted();
    }

    fn allocator(&self, with: &mut dyn FnMut(&mut Allocator<'_>)) {
        with(&mut self.0.allocator.borrow_mut());
    }

    fn relax(&self) {
        let cpu = self.0.machine.cpu();
        cpu.spend(Time::ns(200));
        cpu.order();
        self.0.may_be_interrupted();
    }
}

// SAFETY: the call is made with the page that it is given (1.), and nothing interrupts it (2.); the
// numbers are those that `call` knows (3.).
unsafe impl Hypercalls for Running<'_, '_, '_> {
    fn vp_index(&self, cpu: usize) -> Option<u32> {
        self.0.vp_index(cpu)
    }

    fn with_page(&self, with: &mut dyn FnMut(&mut [u64; PAGE_WORDS])) {
        let cpu = self.0.machine.cpu().id();
        with(&mut self.0.inputs[cpu].borrow_mut());
    }

    fn call(&self, input: Input, page: &[u64; PAGE_WORDS]) -> Output {
        let Kernel { machine, refuses, .. } = self.0;
        self.0.calls.update(|calls| calls + 1);
        // 0: none.
        if self.0.calls.get().is_multiple_of(*refuses) {
            return Output::new(Status::PARAMETER, 0);
        }
        let host = HostCaps {
            processors: 1024,
            xmm_input: false,
            extended_ranges: false,
            guest_physical: false,
        };
        let flush = match hyperv::decode(input, 0, page, &host) {
            Ok(flush) => flush,
            Err(status) => return Output::new(status, 0),
        };
        let links = self.0.links.borrow();
        let of = |link: &&Rc<Link<'_, '_>>| {
            let space = link.space.get();
            space.is_some_and(|space| flush.space.is_none_or(|root| root == space.root().get()))
        };
        // Of all spaces it is under every identifier.
        let mut ids: Vec<Option<u16>> = (links.iter().filter(of))
            .filter_map(|link| link.space.get())
            .map(|space| self.0.identified.then(|| space.identity().id()))
            .collect();
        if flush.space.is_none() {
            ids = vec![None];
        }
        drop(links);
        for cpu in 0..self.0.flags.len() {
            let vp = (cpu as u32 * 67 + 3) % 1024;
            if !flush.targets.is_none_or(|set| set.contains(vp as usize)) {
                continue;
            }
            for &id in &ids {
                let all = Tlbi {
                    id,
                    // What is global belongs to no one space (TLFS, on the flag for all of them).
                    globals: if flush.non_global_only || flush.space.is_some() {
                        Globals::Spared
                    } else {
                        Globals::ByAddress
                    },
                    ..Tlbi::ALL
                };
                if flush.is_everything() {
                    machine.forget_on(cpu, all);
                }
                for pages in flush.ranges() {
                    let last = pages.first + (pages.count * pages.size - 1);
                    let range = Some((pages.first, last));
                    machine.forget_on(cpu, Tlbi { range, ..all });
                }
            }
        }
        Output::new(Status::SUCCESS, input.reps())
    }
}

// SAFETY: the machine's TLBs are invalidated (1.), and waited for (2.).
unsafe impl amd::Amd for Running<'_, '_, '_> {
    fn invlpgb(&self, operands: amd::Invlpgb) {
        self.broadcast(Tlbi::of_invlpgb(operands));
    }

    fn tlbsync(&self) {
        self.wait();
    }
}

// SAFETY: as for `Amd` (1., 2.).
unsafe impl arm64::Arm64 for Running<'_, '_, '_> {
    fn tlbi(&self, instruction: arm64::Tlbi) {
        let arm64::Encoder { page_shift, wide, .. } = self.0.arm64;
        self.broadcast(Tlbi::of_instruction(instruction, page_shift, wide));
    }

    fn dsb(&self) {
        self.wait();
    }
}

// SAFETY: all but the last two functions pass on to the machine; a completion returns when all CPUs
// that have the space loaded have forgotten, and the others will before they load it (5., 6.); a
// clone is of the same space (7.).
unsafe impl Platform for Of<'_, '_> {
    fn alloc_table(&self, level: Level) -> Option<Pa> {
        self.0.mapper.alloc_table(level)
    }
    unsafe fn free_table(&self, frame: Pa, level: Level) {
        // SAFETY: passed on.
        unsafe { self.0.mapper.free_table(frame, level) }
    }
    unsafe fn table(&self, frame: Pa, level: Level) -> NonNull<Entry> {
        // SAFETY: passed on.
        unsafe { self.0.mapper.table(frame, level) }
    }
    fn caps(&self) -> Caps {
        Caps { invalidate_all_above: self.0.kernel.all_above, ..self.0.mapper.caps() }
    }
    fn link_of(&self, frame: Pa) -> Option<&TableLink> {
        self.0.mapper.link_of(frame)
    }
    fn hooks(&self) -> Option<impl Hooks + '_> {
        self.0.mapper.hooks()
    }

    fn barrier(&self, barrier: Barrier) {
        let Link { kernel, mapper, batch, space, .. } = &*self.0;
        if barrier == Barrier::Publish {
            return mapper.barrier(barrier);
        }
        // The fence with which a flush begins.
        announce(kernel.machine);
        let batch = batch.borrow_mut().take();
        if let Some(space) = space.get() {
            kernel.flush(space, &batch.flush(space.root(), 0));
            mapper.claim(&batch.flush(space.root(), space.identity().id()));
            kernel.machine.dsb();
        }
    }

    fn invalidate(&self, what: &Invalidation<'_>) {
        self.0.batch.borrow_mut().add(what);
    }
}
