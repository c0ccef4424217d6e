//! A change of attributes: what of a leaf becomes what, whatever the rest of it is.

use core::fmt;

use crate::addr::Level;
use crate::bbm::Rule;
use crate::format::packed::{
    ACCESSED, DIRTY, GLOBAL, MEMORY, PERMS, Packed, SHAREABILITY, SOFTWARE, TYPE,
};
use crate::format::{Attrs, Format, Inexpressible, Memory, Perms, Shareability};
use crate::platform::Caps;
use crate::walk::Slice;

/// The attributes of leaves that an edit changes; those that are not set stay as they are.
///
/// ```
/// use tablewright::{Attrs, Change, Perms};
/// let seal = Change::new().perms(Perms::READ | Perms::EXEC);
/// assert_eq!(seal.apply(Attrs::KERNEL_DATA).dirty, Attrs::KERNEL_DATA.dirty);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Change {
    /// The fields of [`Packed`] attributes: in the low half what they become, in the high half
    /// which of them are changed, with the marks below. Two words, so that two changes are compared
    /// at once.
    set: u64,
    native: u64,
}

// In the high half, beside the fields.
/// Whatever permissions are given, none is to write.
const WRITE_PROTECT: u32 = 1 << 30;
const NATIVE: u32 = 1 << 31;
/// Of the native bits also those that are not named are cleared.
const ALL: u32 = 1 << 11;
/// Of the native bits those that are named are cleared, and not set.
const CLEARS: u32 = 1 << 12;
const _: () = assert!((ALL | CLEARS) & (Packed::FIELDS | WRITE_PROTECT | NATIVE) == 0);

impl Change {
    /// A change that changes nothing; the methods add to it.
    pub const fn new() -> Self {
        Self { set: 0, native: 0 }
    }

    /// Whether another change that has no native bits either is this one if the first word says so.
    #[inline]
    pub(super) fn is_told_by_a_word(&self) -> bool {
        self.mask() & NATIVE == 0
    }

    /// Whether it is this change, if that [is told by a word](Self::is_told_by_a_word).
    #[inline]
    pub(super) fn is_alike(&self, other: &Self) -> bool {
        self.set == other.set
    }

    /// Sets a field.
    const fn field(mut self, mask: u32, value: u32) -> Self {
        self.set = self.set & !(mask as u64) | (mask as u64) << 32 | value as u64;
        self
    }

    const fn flag(self, flag: u32, value: bool) -> Self {
        self.field(flag, if value { flag } else { 0 })
    }

    /// All bits, if a mark is there.
    #[inline]
    const fn of(&self, mark: u32) -> u64 {
        ((self.set << (31 - mark.trailing_zeros())) as i64 >> 63) as u64
    }

    /// Which fields are changed.
    #[inline]
    const fn mask(&self) -> u32 {
        (self.set >> 32) as u32
    }

    /// Returns the attributes that leaves become, if any of these are.
    const fn new_packed(&self, mask: u32) -> Option<Attrs> {
        let packed = Packed { word: self.set as u32, native: self.native };
        if self.mask() & mask == 0 {
            return None;
        }
        Some(packed.attrs())
    }

    const fn get_flag(&self, flag: u32) -> Option<bool> {
        match self.mask() & flag {
            0 => None,
            _ => Some(self.set as u32 & flag != 0),
        }
    }

    /// Sets the permissions. With none of them a leaf is parked: hardware takes it for unmapped,
    /// and it keeps its frame, size, memory type, flags, software bits, and all else, until a
    /// change gives permissions back. It is mapped: what maps is told so, what unmaps gives it out.
    ///
    /// Parking is invalidated like any change that takes away; giving back is no more than a store,
    /// which is published.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Change, EditError, Pa, Perms, Span, Va,
    /// #     format::X86_64};
    /// # use tablewright_hosted::Hosted;
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
    /// assert_eq!(space.map(pages, Pa::new(0), Attrs::USER_DATA),
    ///     Err(EditError::AlreadyMapped(Va::new(0x5000))));
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
        let perms = match self.mask() & WRITE_PROTECT {
            0 => perms,
            _ => perms.difference(Perms::ANY_WRITE),
        };
        self.field(PERMS, perms.bits() as u32)
    }

    /// Takes the permission to write away and leaves the others.
    pub const fn write_protect(self) -> Self {
        self.field(WRITE_PROTECT | Perms::ANY_WRITE.bits() as u32, 0)
    }

    /// Sets the memory type.
    pub const fn memory(self, memory: Memory) -> Self {
        self.field(7 << MEMORY, (memory as u32) << MEMORY)
    }

    /// Sets the shareability.
    pub const fn shareability(self, shareability: Shareability) -> Self {
        self.field(3 << SHAREABILITY, (shareability as u32) << SHAREABILITY)
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
    pub const fn software(self, bits: u8) -> Self {
        self.field(0xff << SOFTWARE, (bits as u32) << SOFTWARE)
    }

    /// Sets the bits that are the format's own to `bits`, all of them.
    pub const fn native(self, bits: u64) -> Self {
        self.native_by(ALL, bits)
    }

    /// Sets these of the bits that are the format's own, and leaves the others: memory becomes
    /// encrypted, or shared, and keeps its protection key. Of this,
    /// [`without_native`](Self::without_native) and [`native`](Self::native) the last one holds.
    ///
    /// ```
    /// use tablewright::format::{PAT, X86_64, shared};
    /// use tablewright::{Attrs, Change};
    /// type Tdx = X86_64<4, PAT, { shared(47) }>;
    /// let private = Attrs { native: 3 << 59, ..Attrs::USER_DATA }; // protection key 3
    /// let given = Change::new().with_native(Tdx::MARK).apply(private);
    /// assert_eq!(given.native, Tdx::MARK | 3 << 59);
    /// assert_eq!(Change::new().without_native(Tdx::MARK).apply(given), private);
    /// ```
    pub const fn with_native(self, bits: u64) -> Self {
        self.native_by(0, bits)
    }

    /// Clears these of the bits that are the format's own, and leaves the others: see
    /// [`with_native`](Self::with_native).
    pub const fn without_native(self, bits: u64) -> Self {
        self.native_by(CLEARS, bits)
    }

    const fn native_by(mut self, how: u32, bits: u64) -> Self {
        self.native = bits;
        self.set &= !(((ALL | CLEARS) as u64) << 32);
        self.set |= (how as u64) << 32;
        self.field(NATIVE, 0)
    }

    /// Checks that what the change makes of the leaves in `slice` can be encoded.
    ///
    /// The parts of a change are independent of each other and of what was there, so that what can
    /// be encoded on top of one leaf can be on top of any. A leaf that is larger than the range is
    /// split before it is changed.
    pub(crate) fn check_encoding<F: Format>(&self, slice: Slice) -> Result<(), Inexpressible> {
        let mut level = Level::PAGE;
        while slice.holds::<F>(level) {
            F::encode(&self.apply(F::PLAIN), level)?;
            level = level.up();
        }
        Ok(())
    }

    /// The permissions that it gives.
    #[inline]
    pub(super) const fn gives(&self) -> Perms {
        Perms::from_bits_truncate((self.set as u32 & PERMS) as u8)
    }

    /// The permissions that it sets.
    #[inline]
    pub(super) fn new_perms(&self) -> Option<Perms> {
        self.has_perms().then_some(self.gives())
    }

    /// Whether it sets permissions, and does not only take writing away.
    #[inline]
    const fn has_perms(&self) -> bool {
        self.mask() & Perms::READ.bits() as u32 != 0
    }

    /// Whether it may change how memory is cached or shared, or where it is.
    #[inline]
    pub(super) fn changes_type(&self) -> bool {
        self.mask() & (TYPE | NATIVE) != 0
    }

    /// Whether it may make a leaf global that was not.
    #[inline]
    pub(crate) fn turns_global(&self) -> bool {
        self.set as u32 & GLOBAL != 0
    }

    /// Whether it makes leaves local.
    #[inline]
    pub(super) fn turns_local(&self) -> bool {
        self.mask() & !(self.set as u32) & GLOBAL != 0
    }

    /// Whether what can be written cannot be any more.
    pub(crate) fn takes_writing_away(&self) -> bool {
        let writes = Perms::ANY_WRITE.bits() as u32;
        self.mask() & writes != 0 && self.set as u32 & writes == 0
    }

    /// The attributes after the change.
    #[inline]
    pub(super) const fn apply_to(&self, attrs: Packed) -> Packed {
        Packed {
            word: attrs.word & !self.mask() | self.set as u32,
            native: attrs.native & !(self.native | self.of(ALL)) | self.native & !self.of(CLEARS),
        }
    }

    /// The attributes after the change.
    pub fn apply(&self, attrs: Attrs) -> Attrs {
        self.apply_to(Packed::of(&attrs)).attrs()
    }

    /// The attributes that [`protect`](crate::Gather::protect) gives a leaf, under a rule and with
    /// these capabilities: those of [`apply`](Self::apply), and dirty where that is what makes a
    /// leaf writable. On arm64 a leaf that is not dirty cannot be written until hardware has marked
    /// it; where hardware does not, what is made writable is made dirty, unless the change says
    /// otherwise.
    ///
    /// ```
    /// use tablewright::{Attrs, Caps, Change, bbm::Rule};
    /// let caps = Caps { hardware_dirty: false, ..Caps::CONSERVATIVE };
    /// let writable = Change::new().perms(Attrs::USER_DATA.perms);
    /// assert!(writable.apply_on(Attrs::USER_RODATA, Rule::ARM, &caps).dirty);
    /// assert!(!writable.apply_on(Attrs::USER_RODATA, Rule::X86, &caps).dirty);
    /// assert!(!writable.dirty(false).apply_on(Attrs::USER_RODATA, Rule::ARM, &caps).dirty);
    /// assert!(!writable.write_protect().apply_on(Attrs::USER_RODATA, Rule::ARM, &caps).dirty);
    /// ```
    pub fn apply_on(&self, attrs: Attrs, rule: Rule, caps: &Caps) -> Attrs {
        self.apply_to_on(Packed::of(&attrs), rule, caps).attrs()
    }

    #[inline]
    pub(super) const fn apply_to_on(&self, attrs: Packed, rule: Rule, caps: &Caps) -> Packed {
        let mut new = self.apply_to(attrs);
        let gives = self.has_perms() && self.set as u32 & Perms::ANY_WRITE.bits() as u32 != 0;
        let is_silent = self.mask() & DIRTY == 0;
        if rule.writes_when_dirty && !caps.hardware_dirty && gives && is_silent {
            new.word |= DIRTY;
        }
        new
    }
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let native = match (self.mask() & NATIVE, self.mask() & (ALL | CLEARS)) {
            (0, _) => None,
            (_, ALL) => Some(("=", self.native)),
            (_, CLEARS) => Some(("& !", self.native)),
            _ => Some(("|", self.native)),
        };
        f.debug_struct("Change")
            .field("perms", &self.new_perms())
            .field("write_protect", &(self.mask() & WRITE_PROTECT != 0))
            .field("memory", &self.new_packed(7 << MEMORY).map(|it| it.memory))
            .field("shareability", &self.new_packed(3 << SHAREABILITY).map(|it| it.shareability))
            .field("global", &self.get_flag(GLOBAL))
            .field("accessed", &self.get_flag(ACCESSED))
            .field("dirty", &self.get_flag(DIRTY))
            .field("software", &self.new_packed(0xff << SOFTWARE).map(|it| it.software))
            .field("native", &native)
            .finish()
    }
}
