//! A VM: its memory in slots, its vCPUs, and its log.

use std::collections::BTreeSet;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};
use std::thread;

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
    KVM_MEM_LOG_DIRTY_PAGES, kvm_clear_dirty_log, kvm_dirty_log, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VmFd};

use crate::arch::{self, Inner, Place};
use crate::clock::{Took, timed};
use crate::error::Error;
use crate::guest::{BLOCK_BYTES, Block, Orders, written};
use crate::host::{Abilities, abilities, open};
use crate::log::{Bitmap, Protect};
use crate::memory::{Backing, Memory, available};
use crate::ring::{ENTRY, Ring, reset_rings};
use crate::stats::{Counts, Stats};
use crate::tables::{self, Area};
use crate::vcpu::{Done, Parts, Start, Turn, Vcpu, bind};

/// `_IOW(KVMIO, 0x42, struct kvm_dirty_log)`.
const KVM_GET_DIRTY_LOG: libc::c_ulong = 0x4010_ae42;
/// `_IOWR(KVMIO, 0xc0, struct kvm_clear_dirty_log)`.
const KVM_CLEAR_DIRTY_LOG: libc::c_ulong = 0xc018_aec0;

const PAGE: u64 = 4096;
/// The address of the guest's code, and that of its blocks.
const CODE: u64 = 0x1000;
const BLOCKS: u64 = 0x10_000;
/// Of a guest of the guest: its control block, and where the processor keeps the guest's state
/// meanwhile.
const INNER_BYTES: u64 = 2 * PAGE;
/// A ring has to have room for what a vCPU may write before it can be stopped.
const LEAST_RING: u32 = 1024;

/// A VM's setup.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The path of KVM: `/dev/kvm`.
    pub device: PathBuf,
    /// How many vCPUs.
    pub vcpus: u32,
    /// The backing of the memory, and its name.
    pub backing: (Backing, &'static str),
    /// How much there is of it in all.
    pub bytes: u64,
    /// The guest's first address of it; as far up as addresses go if nothing is said.
    pub first: Option<u64>,
    /// Into how many slots it is divided. Each has a multiple of 64 pages.
    pub slots: u32,
    /// The effect of reading the log.
    pub protect: Protect,
    /// Written pages are in rings of so many entries and not in a bitmap.
    pub ring: Option<u32>,
    /// The guest is as that of Linux's selftests: its tables map pages, and on x86-64 it runs at
    /// ring 0 and has interrupt controllers.
    pub as_selftests: bool,
    /// The loop runs in a guest of the guest, whose memory is the guest's.
    pub nested: bool,
    /// CPUs for the vCPUs, in their order, and one for the calling thread if there is one more.
    pub cpus: Vec<usize>,
}

/// A slot of the logged memory.
struct Slot {
    id: u32,
    first: u64,
    bytes: u64,
    at: NonNull<u8>,
}

/// A VM.
pub struct Vm {
    // Before all else: their threads use it.
    vcpus: Vec<Vcpu>,
    vm: Arc<VmFd>,
    stats: Vec<Stats>,
    slots: Vec<Slot>,
    first: u64,
    bytes: u64,
    protect: Protect,
    has_rings: bool,
    turn: Turn,
    /// How many the vCPUs may run on.
    cpus: usize,
    /// Goes when vCPUs begin for the first time.
    warm: Vec<Memory>,
    memory: Memory,
    _own: Arc<Memory>,
}

impl Setup {
    /// That it can be had, before anything is made of it.
    ///
    /// # Errors
    /// KVM, or the host, has less.
    pub fn check(&self, can: &Abilities) -> Result<(), Error> {
        let setup = self;
        if setup.vcpus > can.vcpus {
            return Err(Error::TooManyVcpus { asked: setup.vcpus, most: can.vcpus });
        }
        if let Some(entries) = setup.ring {
            if can.ring == 0 {
                return Err(Error::Lacks {
                    what: "ring of dirty pages (Linux 5.11 on x86, 6.2 on arm64)",
                });
            }
            if !entries.is_power_of_two() || !(LEAST_RING..=can.ring).contains(&entries) {
                return Err(Error::Ring { entries, least: LEAST_RING, most: can.ring });
            }
        }
        let manual = match setup.protect {
            Protect::Auto => true,
            Protect::Manual => can.manual,
            Protect::ManualAllSet => can.all_set,
        };
        if !manual {
            return Err(Error::Lacks {
                what: "manual protection of a dirty log (Linux 5.1; all set from the start, 5.7): \
                       give -g",
            });
        }
        if setup.nested && !can.nested {
            return Err(Error::Lacks {
                what: "guests of guests as they are made here (AMD with nested paging, and \
                       kvm_amd's nested on)",
            });
        }
        let free = available();
        // A pool of huge pages is not free memory.
        let is_pool = matches!(setup.backing.0, Backing::Hugetlb { .. });
        let needed = setup.bytes + setup.bytes / 64 + (u64::from(setup.vcpus) * BLOCK_BYTES);
        if !is_pool && needed > free {
            let mib = |bytes: u64| format!("{} MiB", bytes.div_ceil(1 << 20));
            return Err(Error::NotEnough { needed: mib(needed), available: mib(free) });
        }
        Ok(())
    }
}

impl Vm {
    /// Makes it, with vCPUs that wait for work.
    ///
    /// # Errors
    /// KVM, or the host, cannot give what is asked for: nothing is left behind.
    pub fn new(setup: &Setup) -> Result<Self, Error> {
        let kvm = open(&setup.device)?;
        let can = abilities(&kvm);
        setup.check(&can)?;
        Self::make(&kvm, &can, setup)
    }

    fn make(kvm: &Kvm, can: &Abilities, setup: &Setup) -> Result<Self, Error> {
        let page = setup.backing.0.page().max(2 << 20);
        let top = 1_u64 << can.address_bits;
        let first = match setup.first {
            Some(first) => first,
            None => top.saturating_sub(setup.bytes) & !(page - 1),
        };
        let end = first.checked_add(setup.bytes);
        let address = Error::Address { end: end.unwrap_or(u64::MAX), bits: can.address_bits };
        // The guest's own: code, a block for each vCPU, tables, and the page by which it leaves,
        // which has no memory.
        let tables_at = BLOCKS + u64::from(setup.vcpus) * BLOCK_BYTES;
        // Where blocks of 2 MiB do not lie so in the guest, it has pages.
        let has_blocks = first.is_multiple_of(2 << 20) && !setup.as_selftests;
        let of_pages = match has_blocks {
            true => 0,
            false => (setup.bytes >> 21) + 2,
        };
        let tables = (setup.bytes >> 30) + (tables_at >> 21) + of_pages + 16;
        // Of a guest of the guest two pages for each vCPU, and its tables, one more for what the
        // guest does not map itself.
        let inner_bytes = match setup.nested {
            true => u64::from(setup.vcpus) * INNER_BYTES + (tables + 1) * PAGE,
            false => 0,
        };
        let own_bytes = (tables_at + tables * PAGE + inner_bytes).next_multiple_of(2 << 20);
        let inner_at = own_bytes - inner_bytes;
        let inner_tables_at = inner_at + u64::from(setup.vcpus) * INNER_BYTES;
        let exit = own_bytes;
        if end.is_none_or(|end| end > top) {
            return Err(address);
        }
        let least = own_bytes + PAGE;
        if first < least {
            return Err(Error::Low { first, least });
        }
        let memory = Memory::new(setup.backing.0, setup.backing.1, setup.bytes)?;
        let own = Arc::new(Memory::new(Backing::Anonymous, "the guest's own", own_bytes)?);
        let code = arch::code();
        // SAFETY: the place is within the guest's own memory, of which this function is the only
        // user, and it has room for the code before the blocks begin.
        unsafe {
            let to = own.first().byte_add(CODE as usize);
            to.copy_from_nonoverlapping(NonNull::from(code).cast(), code.len());
        }
        let areas = [
            Area { first: CODE, bytes: PAGE, attrs: arch::CODE },
            Area { first: BLOCKS, bytes: tables_at - BLOCKS, attrs: arch::data() },
            Area { first: exit, bytes: PAGE, attrs: arch::data() },
            Area { first, bytes: setup.bytes.next_multiple_of(PAGE), attrs: arch::data() },
        ];
        // SAFETY: `tables::build`: 1. the guest's own memory is as large, and no other thread knows
        // of it yet.
        let root = unsafe {
            tables::build(own.first(), (tables_at, inner_at), &areas, setup.as_selftests)
        };
        let Some(root) = root else {
            return Err(address);
        };
        // What is the guest's is its guest's as well, at the same address; its tables have to be
        // read, and marked.
        let [code, _, exit_page, logged] = areas;
        let below = Area { first: 0, bytes: code.first, attrs: arch::data() };
        let rest = Area {
            first: code.first + PAGE,
            bytes: own_bytes - code.first - PAGE,
            attrs: arch::data(),
        };
        let inner_root = setup.nested.then(|| {
            let areas = [below, code, rest, exit_page, logged];
            // SAFETY: `tables::build`: 1. as before.
            unsafe { tables::build(own.first(), (inner_tables_at, own_bytes), &areas, false) }
        });
        let inner_root = match inner_root {
            Some(None) => return Err(address),
            root => root.flatten(),
        };

        let vm = Arc::new(kvm.create_vm().map_err(Error::of("KVM_CREATE_VM"))?);
        arch::prepare(&vm, setup.as_selftests)?;
        enable(&vm, setup)?;
        let per_slot = setup.bytes / u64::from(setup.slots);
        let mut slots = Vec::new();
        for number in 0..setup.slots {
            let offset = u64::from(number) * per_slot;
            slots.push(Slot {
                id: number + 1,
                first: first + offset,
                bytes: per_slot,
                // SAFETY: the slots together are the memory.
                at: unsafe { memory.first().byte_add(offset as usize) },
            });
        }
        let own_slot = Slot { id: 0, first: 0, bytes: own_bytes, at: own.first() };
        for slot in slots.iter().chain([&own_slot]) {
            set(&vm, slot, 0)?;
        }
        let mut fds = Vec::new();
        for id in 0..setup.vcpus {
            fds.push(vm.create_vcpu(id.into()).map_err(Error::of("KVM_CREATE_VCPU"))?);
        }
        let mut stats: Vec<Stats> = Stats::of(&*vm).into_iter().collect();
        let mut vcpus = Vec::new();
        let turn = Turn::default();
        let fixed = setup.cpus.iter().take(setup.vcpus as usize);
        let cpus = match fixed.collect::<BTreeSet<_>>().len() {
            0 => thread::available_parallelism().map_or(1, usize::from),
            fixed => fixed,
        };
        let mut warm = Vec::new();
        for (id, fd) in (0..).zip(fds) {
            let block = BLOCKS + u64::from(id) * BLOCK_BYTES;
            let place = Place { root, code: CODE, block, exit };
            let inner = inner_root.map(|root| {
                let at = inner_at + u64::from(id) * INNER_BYTES;
                Inner {
                    // SAFETY: the two pages lie in the guest's own memory, and are this vCPU's.
                    block: unsafe { own.first().byte_add(at as usize) },
                    at,
                    root,
                }
            });
            arch::set_up(kvm, &vm, &fd, &place, setup.as_selftests, inner.as_ref())?;
            stats.extend(Stats::of(&fd));
            // SAFETY: the blocks lie in the guest's own memory, one after the other.
            let at: NonNull<Block> = unsafe { own.first().byte_add(block as usize) }.cast();
            // SAFETY: a block is atomics, for which zeros are values, and the memory is aligned to
            // a page.
            let known = unsafe { at.as_ref() };
            known.exit.store(exit, std::sync::atomic::Ordering::Relaxed);
            let ring = match setup.ring {
                Some(entries) => {
                    let bitmap = Bitmap::new(setup.slots.into(), per_slot / PAGE);
                    Some((Ring::new(&fd, entries)?, bitmap))
                }
                None => None,
            };
            let (vcpu, touched) = Vcpu::start(Parts {
                id,
                frequency: arch::frequency(&fd)?,
                fd,
                vm: Arc::clone(&vm),
                memory: Arc::clone(&own),
                block: at,
                ring,
                turn: Arc::clone(&turn),
                cpu: setup.cpus.get(id as usize).copied(),
                touches: (setup.backing.0, setup.backing.1, setup.bytes / u64::from(setup.vcpus)),
            })?;
            vcpus.push(vcpu);
            warm.extend(touched);
        }
        if let Some(&cpu) = setup.cpus.get(setup.vcpus as usize) {
            bind(cpu)?;
        }
        Ok(Self {
            vcpus,
            vm,
            stats,
            slots,
            first,
            bytes: setup.bytes,
            protect: setup.protect,
            has_rings: setup.ring.is_some(),
            turn,
            cpus,
            warm,
            memory,
            _own: own,
        })
    }

    /// Returns the guest's first address of the memory.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// How many pages of 4 KiB there are.
    pub fn pages(&self) -> u64 {
        self.bytes / PAGE
    }

    /// The host's view of the memory.
    pub fn memory(&self) -> NonNull<u8> {
        debug_assert_eq!(self.memory.bytes() as u64, self.bytes);
        self.memory.first()
    }

    /// Its vCPUs.
    pub fn vcpus(&mut self) -> &mut [Vcpu] {
        &mut self.vcpus
    }

    /// Has random accesses of each vCPU go on from another seed.
    pub fn seed(&self, seed: u64) {
        for (id, vcpu) in (1_u64..).zip(&self.vcpus) {
            let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(id << 32);
            vcpu.block().seed.store(seed, std::sync::atomic::Ordering::Relaxed);
        }
    }

    /// All pages divided among the vCPUs, or all of them for each; accesses as ordered for that.
    pub fn share(&self, vcpu: usize, overlap: bool) -> Orders {
        match overlap {
            true => Orders::write(self.first, self.pages()),
            false => {
                let each = self.pages() / self.vcpus.len().max(1) as u64;
                Orders::write(self.first + vcpu as u64 * each * PAGE, each)
            }
        }
    }

    /// Has all vCPUs begin, together where each has a CPU.
    pub fn begin(&mut self, orders: impl Fn(usize) -> Orders) {
        self.warm.clear();
        let start = Start::of(self.vcpus.len(), self.cpus);
        for (id, vcpu) in self.vcpus.iter_mut().enumerate() {
            vcpu.begin(&orders(id), &start);
        }
    }

    /// Waits for all of them.
    ///
    /// # Errors
    /// One did not come to its end.
    pub fn finish(&mut self) -> Result<Vec<Done>, Error> {
        let done: Vec<_> = self.vcpus.iter_mut().map(Vcpu::finish).collect();
        done.into_iter().collect()
    }

    /// Has all leave, and waits for them.
    ///
    /// # Errors
    /// One left for another reason.
    pub fn stop(&mut self) -> Result<Vec<Done>, Error> {
        for vcpu in &self.vcpus {
            vcpu.stop();
        }
        self.finish()
    }

    /// Marks what the vCPUs wrote by these orders.
    pub fn mark_written(&self, orders: impl Fn(usize) -> Orders, done: &[Done], into: &mut Bitmap) {
        for (id, done) in done.iter().enumerate() {
            let orders = orders(id);
            let offset = (orders.first - self.first) / PAGE;
            let stride = orders.stride / PAGE;
            // What is written in order more often than there are pages is all of them.
            let plain = orders.write_percent >= 100 && !orders.random;
            let made = if plain { done.made.min(orders.pages) } else { done.made };
            let _next =
                written(&orders, done.seed, made, |page| into.insert(offset + page * stride));
        }
    }

    /// Marks what the vCPUs wrote or read by these orders.
    pub fn mark_accessed(
        &self,
        orders: impl Fn(usize) -> Orders,
        done: &[Done],
        into: &mut Bitmap,
    ) {
        let all = |id| Orders { write_percent: 100, ..orders(id) };
        self.mark_written(all, done, into);
    }

    /// No page, of this VM's slots.
    pub fn bitmap(&self) -> Bitmap {
        let slots = self.slots.len() as u64;
        Bitmap::new(slots, self.pages() / slots.max(1))
    }

    /// Has writes logged from now on, or no more.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn log(&self, on: bool) -> Result<Took, Error> {
        let flags = if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        let (done, took) =
            timed(|| self.slots.iter().try_for_each(|slot| set(&self.vm, slot, flags)));
        done.map(|()| took)
    }

    /// Reads the log.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn get(&self, into: &mut Bitmap) -> Result<Took, Error> {
        let (done, took) = timed(|| self.read(into));
        done.map(|()| took)
    }

    /// Reads the log so often, and says what it took each time on average. It is as it was only if
    /// reading leaves it so.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn get_often(&self, into: &mut Bitmap, times: u32) -> Result<Took, Error> {
        let (done, took) = timed(|| (0..times).try_for_each(|_| self.read(into)));
        done.map(|()| took.each_of(times))
    }

    fn read(&self, into: &mut Bitmap) -> Result<(), Error> {
        for (slot, words) in self.slots.iter().zip(into.slots()) {
            let mut request = kvm_dirty_log { slot: slot.id, ..kvm_dirty_log::default() };
            request.__bindgen_anon_1.dirty_bitmap = words.as_mut_ptr().cast();
            // SAFETY: `ioctl`: the bitmap has a bit for each page of the slot.
            let got = unsafe {
                libc::ioctl(self.vm.as_raw_fd(), KVM_GET_DIRTY_LOG as _, &raw mut request)
            };
            if got < 0 {
                return Err(Error::last("KVM_GET_DIRTY_LOG"));
            }
        }
        Ok(())
    }

    /// Clears of the log what was read, and has those pages protected again.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn clear(&self, read: &mut Bitmap) -> Result<Took, Error> {
        let (done, took) = timed(|| {
            self.slots.iter().zip(read.slots()).try_for_each(|(slot, words)| {
                let mut request = kvm_clear_dirty_log {
                    slot: slot.id,
                    num_pages: u32::try_from(slot.bytes / PAGE).unwrap_or(u32::MAX),
                    first_page: 0,
                    ..kvm_clear_dirty_log::default()
                };
                request.__bindgen_anon_1.dirty_bitmap = words.as_mut_ptr().cast();
                // SAFETY: `ioctl`: the bitmap has a bit for each page of the slot.
                let cleared = unsafe {
                    libc::ioctl(self.vm.as_raw_fd(), KVM_CLEAR_DIRTY_LOG as _, &raw mut request)
                };
                if cleared < 0 { Err(Error::last("KVM_CLEAR_DIRTY_LOG")) } else { Ok(()) }
            })
        });
        done.map(|()| took)
    }

    /// Whether reading the log leaves it as it is.
    pub fn is_manual(&self) -> bool {
        self.protect != Protect::Auto
    }

    /// Whether written pages are in rings.
    pub fn has_rings(&self) -> bool {
        self.has_rings
    }

    /// Takes what is in the rings.
    pub fn collect(&self, into: &mut Bitmap) -> Took {
        let ((), took) = timed(|| {
            for vcpu in &self.vcpus {
                vcpu.collect(into);
            }
        });
        took
    }

    /// Gives KVM what was taken from the rings.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn reset(&self) -> Result<Took, Error> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (done, took) = timed(|| reset_rings(&self.vm));
        done.map(|()| took)
    }

    /// Returns KVM's counts so far, of the VM and all its vCPUs.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for stats in &self.stats {
            stats.add_to(&mut counts);
        }
        counts
    }
}

/// Enables what has to be chosen before a VM has vCPUs.
fn enable(vm: &VmFd, setup: &Setup) -> Result<(), Error> {
    let enable = |cap: u32, first: u64| {
        let cap = kvm_enable_cap { cap, args: [first, 0, 0, 0], ..kvm_enable_cap::default() };
        vm.enable_cap(&cap)
    };
    if let Some(entries) = setup.ring {
        let bytes = u64::from(entries * ENTRY);
        enable(KVM_CAP_DIRTY_LOG_RING_ACQ_REL, bytes)
            .or_else(|_| enable(KVM_CAP_DIRTY_LOG_RING, bytes))
            .map_err(Error::of("KVM_ENABLE_CAP for rings"))?;
    }
    let manual = match setup.protect {
        Protect::Auto => return Ok(()),
        Protect::Manual => 1,
        Protect::ManualAllSet => 3,
    };
    enable(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, manual)
        .map_err(Error::of("KVM_ENABLE_CAP for manual protection"))
}

fn set(vm: &VmFd, slot: &Slot, flags: u32) -> Result<(), Error> {
    let region = kvm_userspace_memory_region {
        slot: slot.id,
        flags,
        guest_phys_addr: slot.first,
        memory_size: slot.bytes,
        userspace_addr: slot.at.addr().get() as u64,
    };
    // SAFETY: the memory is mapped until the VM, and all threads that enter it, are gone.
    unsafe { vm.set_user_memory_region(region) }.map_err(Error::of("KVM_SET_USER_MEMORY_REGION"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that a guest may ask for.
    const ABLE: Abilities = Abilities {
        vcpus: 4,
        address_bits: 40,
        manual: true,
        all_set: true,
        ring: 65536,
        nested: true,
    };

    fn setup(protect: Protect, ring: Option<u32>) -> Setup {
        Setup {
            device: PathBuf::new(),
            vcpus: 1,
            backing: (Backing::Anonymous, "anonymous"),
            bytes: 2 << 20,
            first: None,
            slots: 1,
            protect,
            ring,
            as_selftests: false,
            nested: false,
            cpus: Vec::new(),
        }
    }

    fn check(protect: Protect, ring: Option<u32>, can: Abilities) -> Result<(), String> {
        setup(protect, ring).check(&can).map_err(|error| {
            assert!(error.is_refusal(), "{error}");
            error.to_string()
        })
    }

    #[test]
    fn a_kernel_without_rings_refuses_them_and_nothing_else() {
        let old = Abilities { ring: 0, ..ABLE };
        let why = check(Protect::Auto, Some(4096), old).unwrap_err();
        assert!(why.contains("no ring of dirty pages"), "{why}");
        assert_eq!(check(Protect::ManualAllSet, None, old), Ok(()));
        let few = Abilities { ring: 2048, ..ABLE };
        assert_eq!(check(Protect::Auto, Some(2048), few), Ok(()));
        let why = check(Protect::Auto, Some(4096), few).unwrap_err();
        assert!(why.contains("from 1024 to 2048"), "{why}");
    }

    #[test]
    fn a_kernel_without_manual_protection_refuses_it_and_says_what_to_give() {
        let old = Abilities { manual: false, all_set: false, ..ABLE };
        for protect in [Protect::Manual, Protect::ManualAllSet] {
            let why = check(protect, None, old).unwrap_err();
            assert!(why.contains("manual protection") && why.contains("-g"), "{why}");
        }
        assert_eq!(check(Protect::Auto, None, old), Ok(()));
        // Linux 5.1 to 5.6.
        let between = Abilities { all_set: false, ..ABLE };
        assert_eq!(check(Protect::Manual, None, between), Ok(()));
        assert!(check(Protect::ManualAllSet, None, between).is_err());
    }

    #[test]
    fn a_kernel_without_guests_of_guests_refuses_them_alone() {
        let old = Abilities { nested: false, ..ABLE };
        let setup = |nested| Setup { nested, ..setup(Protect::Auto, None) };
        let why = setup(true).check(&old).unwrap_err();
        assert!(why.is_refusal() && why.to_string().contains("guests of guests"), "{why}");
        assert!(setup(true).check(&ABLE).is_ok() && setup(false).check(&old).is_ok());
    }
}
