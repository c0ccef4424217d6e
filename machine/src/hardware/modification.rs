//! Page-modification logging: hardware writes down which pages of a guest it makes dirty (SDM vol.
//! 3C 29.3.6).
//!
//! A CPU that sets the dirty flag of a leaf of EPT writes the guest's address, without its low
//! twelve bits, to the entry of its log that an index says, and counts the index down. If the index
//! is not one of the 512 entries, the CPU leaves its guest instead: the access is not made, and no
//! flag is set. Accesses through a translation whose leaf is dirty already, and is remembered so,
//! write nothing down.

use std::cell::Cell;

use tablewright::Pa;
use tablewright_walker::Regime;

use super::Hardware;
use crate::machine::Machine;

/// Entries of a log.
const ENTRIES: u16 = 512;

/// The log of a CPU: its page, and the index of the next entry. It counts down, and over zero, in
/// 16 bits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Modifications {
    page: Option<u64>,
    index: u16,
}

impl Hardware {
    fn modifications(&self, cpu: usize) -> &Cell<Modifications> {
        &self.cores[cpu].modifications
    }

    /// A dirty flag is about to be set. Whether it may be: the log is off, or has room.
    #[inline]
    pub(super) fn log_modification(&self, cpu: usize, at: u64) -> bool {
        let log = self.modifications(cpu);
        let Modifications { page, index } = log.get();
        let Some(page) = page.filter(|_| matches!(self.architecture.regime, Regime::Ept { .. }))
        else {
            return true;
        };
        if index >= ENTRIES {
            return false;
        }
        self.memory.write(page + u64::from(index) * 8, at & !0xfff);
        log.set(Modifications {
            page: Some(page),
            index: index.wrapping_sub(1),
        });
        true
    }
}

impl Machine {
    /// The running CPU logs in this page, from entry `index` down, which pages of its guest it
    /// makes dirty; or logs nothing any more. Only where tables are EPT, and hardware sets dirty
    /// flags.
    ///
    /// ```
    /// # use tablewright::{AddressSpace, Attrs, Half, Ipa, Mapping, Pa, Span, format::Ept};
    /// # use tablewright_machine::{Architecture, Machine, Memory, Request, Setup};
    /// let architecture = Architecture { hardware_access: true, hardware_dirty: true, ..Architecture::ept() };
    /// let machine = Machine::new(Setup::new(architecture, Memory::new(16, 12, 1 << 30)));
    /// let mapper = machine.new_space();
    /// let mut space = AddressSpace::<Ept<4>, _>::new(mapper).unwrap();
    /// mapper.attach(space.root(), Half::Lower, 0);
    /// let span = Span::new(Ipa::new(0), 4 << 12)?;
    /// let clean = Attrs { dirty: false, ..Attrs::GUEST_MEMORY };
    /// space.map(span, Pa::new(1 << 40), Mapping::new(clean))?;
    /// let log = machine.take_page().unwrap();
    /// machine.run(|_| {
    ///     mapper.load();
    ///     machine.log_modifications(Some(log), 511);
    ///     for at in [0x2008, 0x1000, 0x2010] {
    ///         machine.access(Request::write(at)).unwrap();
    ///     }
    ///     assert_eq!(machine.modification_index(0), 509);
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn log_modifications(&self, page: Option<Pa>, index: u16) {
        let cpu = self.cpu();
        cpu.order();
        self.hardware.modifications(cpu.id()).set(Modifications {
            page: page.map(Pa::get),
            index,
        });
    }

    /// The entry of its log that a CPU would write next, or a number from 512 on: it is full.
    pub fn modification_index(&self, of: usize) -> u16 {
        self.cpu().order();
        self.hardware.modifications(of).get().index
    }
}
