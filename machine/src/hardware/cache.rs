//! Caches, as far as software has to maintain them: by page, not by line.
//!
//! Data written through a cacheable mapping is in a cache. An access through a mapping that is not
//! cacheable, or that the hardware makes with its caches off, goes to the point of coherency and
//! finds what was there before, until the page is cleaned. An instruction cache keeps what it
//! fetched until it is told, and fetches from where data caches meet it. (DDI 0487 D7.5;
//! `CTR_EL0.IDC` and `DIC` say what need not be done.)
//!
//! A page whose state was not recorded is clean.

use std::cell::RefCell;
use std::collections::HashMap;

use super::{Hardware, Request, Want};
use crate::architecture::{Architecture, Regime};
use crate::rules::Rule;
use crate::tlb::Cached;
use crate::trace::Event;

/// Maintenance that a page needs before others see what was written to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Page {
    /// Written in a cache, and not cleaned to the point of coherency.
    dirty: bool,
    /// Written since the instruction cache forgot it, and not cleaned to where it fetches.
    code_dirty: bool,
    /// The instruction cache may hold what was there before.
    code_old: bool,
    /// Written in a cache by this alias, marked or not, and not cleaned.
    alias: Option<bool>,
}

/// The state of the pages that are not clean.
pub(crate) struct Caches {
    pages: RefCell<HashMap<u64, Page>>,
    /// The caches need no maintenance.
    coherent: bool,
    /// Memory types are those of stage 2, and whether it forces write-back.
    stage2: bool,
    /// A guest without a stage 1 on the machine has its caches off.
    off: bool,
    forced: bool,
    idc: bool,
    dic: bool,
    aliasing: bool,
    /// The address bit that tells two aliases of memory apart, which caches do not keep coherent.
    marked: u64,
    /// The bits of an address within a page.
    offset: u64,
}

impl Caches {
    pub fn new(architecture: &Architecture) -> Self {
        Self {
            pages: RefCell::default(),
            coherent: architecture.family().coherent,
            stage2: matches!(architecture.regime, Regime::Arm64Stage2 { .. }),
            off: architecture.guest_caches_off,
            forced: matches!(
                architecture.regime,
                Regime::Arm64Stage2 { forced_write_back: true, .. }
            ),
            idc: architecture.idc,
            dic: architecture.dic,
            aliasing: architecture.icache_aliasing,
            marked: architecture.marked,
            offset: (1 << architecture.regime.page_shift()) - 1,
        }
    }

    /// A page is written in a cache.
    pub fn write(&self, pa: u64) {
        if !self.coherent {
            let mut pages = self.pages.borrow_mut();
            let page = pages.entry(pa).or_default();
            page.dirty = true;
            page.code_dirty = !self.idc;
            page.code_old = !self.dic;
        }
    }

    /// A page is cleaned and invalidated to the point of coherency.
    pub fn clean(&self, pa: u64) {
        let mut pages = self.pages.borrow_mut();
        if let Some(page) = pages.get_mut(&pa) {
            page.dirty = false;
            page.code_dirty = false;
            page.alias = None;
            if *page == Page::default() {
                pages.remove(&pa);
            }
        }
    }

    /// The instruction cache forgets a page; all of them, if it aliases and this is not `all`, are
    /// as they were.
    pub fn refetch(&self, pa: u64, all: bool) {
        let mut pages = self.pages.borrow_mut();
        if all {
            pages.values_mut().for_each(|page| page.code_old = false);
        } else if !self.aliasing
            && let Some(page) = pages.get_mut(&pa)
        {
            page.code_old = false;
        }
    }

    /// Whether anything was said of a page, by its first address or one within.
    #[inline(always)]
    pub fn is_known(&self, pa: u64) -> bool {
        let pages = self.pages.borrow();
        !pages.is_empty() && pages.contains_key(&(pa & !self.offset))
    }

    /// An access to a page through a translation.
    #[inline(always)]
    pub fn access(
        &self,
        hardware: &Hardware,
        cpu: usize,
        entry: &Cached,
        request: Request,
        pa: u64,
    ) {
        self.access_alias(hardware, cpu, request, pa);
        if self.coherent || (self.pages.borrow().is_empty() && request.want != Want::Write) {
            return;
        }
        let page = pa & !((1 << hardware.memory.page_shift()) - 1);
        let cacheable = if self.stage2 {
            // MemAttr: write-back and write-through, with the guest's caches on; or forced (DDI
            // 0487 D8.6.5, D8.6.6).
            let off = entry.guest.map_or(self.off, |guest| guest.asid.is_none());
            match entry.raw >> 2 & 0xf {
                0b1111 | 0b1010 => !off && !self.forced,
                0b0110 => self.forced,
                _ => false,
            }
        } else {
            // AttrIndx: 0, 4 and 5 are cacheable in the engine's MAIR.
            matches!(entry.raw >> 2 & 7, 0 | 4 | 5)
        };
        let state = self.pages.borrow().get(&page).copied().unwrap_or_default();
        let wrong = match request.want {
            Want::Execute if state.code_dirty => {
                Some("code was written, and the data cache was not cleaned")
            }
            Want::Execute if state.code_old => {
                Some("code was written, and the instruction cache was not invalidated")
            }
            Want::Read | Want::Write if state.dirty && !cacheable => {
                Some("the mapping is not cacheable, and a cache has newer data")
            }
            _ => None,
        };
        if let Some(why) = wrong {
            hardware.violate(
                Rule::CacheMaintenance,
                cpu,
                format!("an access to {:#x} at {pa:#x}: {why}", request.va),
            );
        }
        if request.want == Want::Write && cacheable {
            self.write(page);
        }
    }
}

impl Caches {
    /// Whether caches keep two aliases of memory apart.
    pub fn has_aliases(&self) -> bool {
        self.marked != 0
    }

    /// An access by one of two aliases of a page.
    #[inline(always)]
    fn access_alias(&self, hardware: &Hardware, cpu: usize, request: Request, pa: u64) {
        if !self.has_aliases() {
            return;
        }
        let (page, alias) = (pa & !self.offset & !self.marked, pa & self.marked != 0);
        let mut pages = self.pages.borrow_mut();
        if pages.get(&page).is_some_and(|page| page.alias == Some(!alias)) {
            drop(pages);
            let (va, why) = (request.va, "a cache has newer data of the other alias");
            let what = format!("an access to {va:#x} at {pa:#x}: {why}");
            return hardware.violate(Rule::CacheMaintenance, cpu, what);
        }
        if request.want == Want::Write {
            pages.entry(page).or_default().alias = Some(alias);
        }
    }
}

impl Hardware {
    /// Cleans and invalidates a page to the point of coherency.
    pub(crate) fn clean_page(&self, cpu: usize, pa: u64) {
        self.trace(cpu, || Event::Clean { pa });
        self.caches.clean(pa);
    }

    /// Invalidates a page in the instruction caches, or all of them.
    pub(crate) fn refetch_page(&self, cpu: usize, pa: u64, all: bool) {
        self.trace(cpu, || Event::Refetch { pa });
        self.caches.refetch(pa, all);
    }
}
