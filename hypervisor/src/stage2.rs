//! The formats of this hypervisor's tables, and the identities that tell them apart.

use tablewright::{Caps, format};

/// Whether the guest's memory is write-back whatever the guest says (`HCR_EL2.FWB`).
pub const FORCED: bool = cfg!(feature = "forced-write-back");

/// Whether hardware marks in the leaves what is written.
pub const MARKS: bool = cfg!(feature = "hardware-dirty");

/// The granule of the guest's tables.
const PAGE_SHIFT: u32 = match (cfg!(feature = "granule-16k"), cfg!(feature = "granule-64k")) {
    (false, false) => 12,
    (true, false) => 14,
    (false, true) => 16,
    (true, true) => panic!("there is one granule"),
};

/// The guest's tables: 1 TiB of addresses.
pub type Stage2 = format::Stage2<PAGE_SHIFT, 40, false, FORCED>;

/// A page of the guest's tables. All frames are of this size.
pub const PAGE: u64 = 1 << PAGE_SHIFT;

/// The format of the map that the hypervisor runs on: 39 bits, in which the `virt` machine of QEMU
/// has its devices and memory.
pub type Own = format::Arm64El2<12, 39>;

/// The identity of the hypervisor's own map.
pub const OWN: u16 = 0;
/// The identity of the guest.
pub const VMID: u16 = 1;
/// The identity of a stage 1 of EL1 that is made to be [checked](crate::check).
pub const EL1: u16 = 2;

/// The capabilities that the engine goes by. Flags are left to software, as `VTCR_EL2.HA` and `HD`
/// say, and those of `TCR_EL2`, unless the hypervisor is built for hardware that marks written
/// leaves. A table of pages is still named page by page: to flush all of a guest costs it the TLB
/// entries of both of its stages.
pub const CAPS: Caps = Caps {
    hardware_access: MARKS,
    hardware_dirty: MARKS,
    invalidate_all_above: 512,
    ..Caps::CONSERVATIVE
};

/// The operand of the call that is [`POISON`].
pub const POISONED: u64 = 0xdead;
/// The content of a free frame: as an instruction a call of the hypervisor, as an address nowhere.
pub const POISON: u64 = {
    let hvc = 0xd400_0002 | POISONED << 5;
    hvc << 32 | hvc
};
