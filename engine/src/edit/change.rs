//! A change of attributes: what of a leaf becomes what, whatever the rest of it is.

use core::fmt;

use crate::bbm::Rule;
use crate::format::{Attrs, Memory, Perms, Shareability};
use crate::platform::Caps;

/// The attributes of leaves that an edit changes; those that are not set stay as they are.
///
/// ```
/// use tablewright::{Attrs, Change, Perms};
/// let seal = Change::new().perms(Perms::READ | Perms::EXEC);
/// assert_eq!(seal.apply(Attrs::KERNEL_DATA).dirty, Attrs::KERNEL_DATA.dirty);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Change {
    /// What is changed, one bit or field for each: two words, so that two changes are compared at once.
    set: u64,
    native: u64,
}

// Of `set`: permissions, and that they are set.
const PERMS: u64 = 0xff;
const HAS_PERMS: u64 = 1 << 8;
const WRITE_PROTECT: u64 = 1 << 9;
// Flags: the value, and above it that it is set.
const GLOBAL: u32 = 10;
const ACCESSED: u32 = 12;
const DIRTY: u32 = 14;
// One more than the number of the variant; 0 if it is not set.
const MEMORY: u32 = 16;
const SHAREABILITY: u32 = 20;
const SOFTWARE: u32 = 24;
const HAS_SOFTWARE: u64 = 1 << 32;
const HAS_NATIVE: u64 = 1 << 33;

const MEMORIES: [Memory; 6] = [
    Memory::Normal,
    Memory::WriteThrough,
    Memory::NonCacheable,
    Memory::Device,
    Memory::DeviceStrict,
    Memory::Tagged,
];
const SHAREABILITIES: [Shareability; 3] =
    [Shareability::Non, Shareability::Outer, Shareability::Inner];
// Each is at its number.
const _: () = {
    let mut number = 0;
    while number < MEMORIES.len() {
        assert!(MEMORIES[number] as usize == number);
        number += 1;
    }
    number = 0;
    while number < SHAREABILITIES.len() {
        assert!(SHAREABILITIES[number] as usize == number);
        number += 1;
    }
};

impl Change {
    /// A change that changes nothing; the methods add to it.
    pub const fn new() -> Self {
        Self { set: 0, native: 0 }
    }

    const fn field(mut self, shift: u32, mask: u64, value: u64) -> Self {
        self.set = self.set & !(mask << shift) | value << shift;
        self
    }

    const fn flag(self, shift: u32, value: bool) -> Self {
        self.field(shift, 3, 2 | value as u64)
    }

    const fn get_flag(&self, shift: u32) -> Option<bool> {
        match self.set >> shift & 3 {
            0 | 1 => None,
            value => Some(value & 1 != 0),
        }
    }

    const fn has(&self, bit: u64) -> bool {
        self.set & bit != 0
    }

    /// Sets the permissions. With none of them a leaf is parked: hardware takes it for unmapped, and it keeps its frame, size,
    /// memory type, flags, software bits, and all else, until a change gives permissions back. It is mapped: what maps is told
    /// so, what unmaps gives it out.
    ///
    /// Parking is invalidated like any change that takes away; giving back is no more than a store, which is published.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Change, EditError, Pa, Perms, Span, Va, format::X86_64, hosted::Hosted};
    /// # let platform = Hosted::new(64, 12);
    /// # let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).unwrap();
    /// let pages = Span::new(Va::new(0x5000), 0x3000)?;
    /// space.map(pages, Pa::new(0x8000), Attrs { software: 3, ..Attrs::USER_DATA })?;
    /// space.make_live();
    ///
    /// // mprotect(PROT_NONE), and back.
    /// let mut gather = space.gather();
    /// gather.protect(pages, Change::new().perms(Perms::empty()))?;
    /// gather.finish(|_| ());
    /// let parked = space.query(Va::new(0x6000)).unwrap();
    /// assert_eq!((parked.frame(), parked.attrs().perms), (Pa::new(0x9000), Perms::empty()));
    /// assert_eq!(space.map(pages, Pa::new(0), Attrs::USER_DATA), Err(EditError::AlreadyMapped(Va::new(0x5000))));
    ///
    /// let mut gather = space.gather();
    /// gather.protect(pages, Change::new().perms(Attrs::USER_DATA.perms))?;
    /// gather.finish(|_| ());
    /// assert_eq!(platform.counts().invalidations, 1); // the first
    /// let back = space.query(Va::new(0x6000)).unwrap().attrs();
    /// assert_eq!(back, Attrs { software: 3, ..Attrs::USER_DATA });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub const fn perms(self, perms: Perms) -> Self {
        self.field(0, PERMS | HAS_PERMS, perms.bits() as u64 | HAS_PERMS)
    }

    /// Takes the permission to write away and leaves the others.
    pub const fn write_protect(mut self) -> Self {
        self.set |= WRITE_PROTECT;
        self
    }

    /// Sets the memory type.
    pub const fn memory(self, memory: Memory) -> Self {
        self.field(MEMORY, 0xf, memory as u64 + 1)
    }

    /// Sets the shareability.
    pub const fn shareability(self, shareability: Shareability) -> Self {
        self.field(SHAREABILITY, 0xf, shareability as u64 + 1)
    }

    /// Sets or clears the global attribute.
    pub const fn global(self, global: bool) -> Self {
        self.flag(GLOBAL, global)
    }

    /// Sets or clears the accessed flag.
    pub const fn accessed(self, accessed: bool) -> Self {
        self.flag(ACCESSED, accessed)
    }

    /// Sets or clears the dirty state.
    pub const fn dirty(self, dirty: bool) -> Self {
        self.flag(DIRTY, dirty)
    }

    /// Sets the software bits.
    pub const fn software(mut self, bits: u8) -> Self {
        self.set |= HAS_SOFTWARE;
        self.field(SOFTWARE, 0xff, bits as u64)
    }

    /// Sets the bits that are the format's own.
    pub const fn native(mut self, bits: u64) -> Self {
        self.set |= HAS_NATIVE;
        self.native = bits;
        self
    }

    /// The permissions that it sets.
    #[inline(always)]
    pub(super) fn new_perms(&self) -> Option<Perms> {
        let perms = Perms::from_bits_truncate((self.set & PERMS) as u8);
        self.has(HAS_PERMS).then_some(perms)
    }

    fn new_memory(&self) -> Option<Memory> {
        let number = (self.set >> MEMORY & 0xf).checked_sub(1)?;
        MEMORIES.get(number as usize).copied()
    }

    fn new_shareability(&self) -> Option<Shareability> {
        let number = (self.set >> SHAREABILITY & 0xf).checked_sub(1)?;
        SHAREABILITIES.get(number as usize).copied()
    }

    /// Whether it may change how memory is cached or shared, or where it is.
    #[inline(always)]
    pub(super) fn changes_type(&self) -> bool {
        self.set & (0xf << MEMORY | 0xf << SHAREABILITY | HAS_NATIVE) != 0
    }

    /// Whether it may make a leaf global that was not.
    #[inline(always)]
    pub(crate) fn turns_global(&self) -> bool {
        self.get_flag(GLOBAL) == Some(true)
    }

    /// Whether it makes leaves local.
    #[inline(always)]
    pub(super) fn turns_local(&self) -> bool {
        self.get_flag(GLOBAL) == Some(false)
    }

    /// Whether what can be written cannot be any more.
    pub(crate) fn takes_writing_away(&self) -> bool {
        let gives = |perms: Perms| perms.intersects(Perms::ANY_WRITE);
        self.has(WRITE_PROTECT) || self.new_perms().is_some_and(|perms| !gives(perms))
    }

    /// The attributes after the change.
    pub fn apply(&self, attrs: Attrs) -> Attrs {
        let mut new = attrs;
        if let Some(perms) = self.new_perms() {
            new.perms = perms;
        }
        if self.has(WRITE_PROTECT) {
            new.perms -= Perms::ANY_WRITE;
        }
        if let Some(memory) = self.new_memory() {
            new.memory = memory;
        }
        if let Some(shareability) = self.new_shareability() {
            new.shareability = shareability;
        }
        for (flag, shift) in [
            (&mut new.global, GLOBAL),
            (&mut new.accessed, ACCESSED),
            (&mut new.dirty, DIRTY),
        ] {
            if let Some(value) = self.get_flag(shift) {
                *flag = value;
            }
        }
        if self.has(HAS_SOFTWARE) {
            new.software = (self.set >> SOFTWARE) as u8;
        }
        if self.has(HAS_NATIVE) {
            new.native = self.native;
        }
        new
    }

    /// The attributes that [`protect`](crate::Gather::protect) gives a leaf, under a rule and with these capabilities: those of
    /// [`apply`](Self::apply), and dirty where that is what makes a leaf writable. On arm64 a leaf that is not dirty cannot be
    /// written until hardware has marked it; where hardware does not, what is made writable is made dirty, unless the change
    /// says otherwise.
    ///
    /// ```
    /// use tablewright::{Attrs, Caps, Change, bbm::Rule};
    /// let caps = Caps { hardware_dirty: false, ..Caps::CONSERVATIVE };
    /// let writable = Change::new().perms(Attrs::USER_DATA.perms);
    /// assert!(writable.apply_on(Attrs::USER_RODATA, Rule::Arm, &caps).dirty);
    /// assert!(!writable.apply_on(Attrs::USER_RODATA, Rule::X86, &caps).dirty);
    /// assert!(!writable.dirty(false).apply_on(Attrs::USER_RODATA, Rule::Arm, &caps).dirty);
    /// assert!(!writable.write_protect().apply_on(Attrs::USER_RODATA, Rule::Arm, &caps).dirty);
    /// ```
    pub fn apply_on(&self, attrs: Attrs, rule: Rule, caps: &Caps) -> Attrs {
        let mut new = self.apply(attrs);
        if rule.writes_when_dirty() && !caps.hardware_dirty {
            let gives = self.has(HAS_PERMS) && new.perms.intersects(Perms::ANY_WRITE);
            new.dirty |= gives && self.get_flag(DIRTY).is_none();
        }
        new
    }
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Change")
            .field("perms", &self.new_perms())
            .field("write_protect", &self.has(WRITE_PROTECT))
            .field("memory", &self.new_memory())
            .field("shareability", &self.new_shareability())
            .field("global", &self.get_flag(GLOBAL))
            .field("accessed", &self.get_flag(ACCESSED))
            .field("dirty", &self.get_flag(DIRTY))
            .field(
                "software",
                &self
                    .has(HAS_SOFTWARE)
                    .then_some((self.set >> SOFTWARE) as u8),
            )
            .field("native", &self.has(HAS_NATIVE).then_some(self.native))
            .finish()
    }
}
