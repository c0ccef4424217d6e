//! A vCPU, as other processors see it: requests of interrupts, and orders.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tablewright::shootdown::Space;

/// A vCPU, as any processor sees it.
pub struct Vcpu {
    /// Its number, and that of its interrupt controller.
    pub number: u32,
    /// The number by which hypercalls name it (TLFS, "Virtual Processor Index").
    pub index: u32,
    /// The processor that runs it.
    pub home: usize,
    /// Its TLB entries, and the processors that have some.
    pub space: Space<'static>,
    /// The interrupts that it is to get.
    pub requests: Requests,
    /// Whether it is to get an NMI.
    pub nmi: AtomicBool,
    /// Whether it is to be reset, or started, and where.
    start: AtomicU32,
}

const RESET: u32 = 1 << 31;
const START: u32 = 1 << 30;

/// A command that its processor carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// It stops, and waits to be started.
    Reset,
    /// It starts, in the page of this number, if it was reset before.
    Start(u8),
}

impl Vcpu {
    /// A vCPU of which no processor has TLB entries.
    pub fn new(number: u32, index: u32, home: usize, space: Space<'static>) -> Self {
        Self {
            number,
            index,
            home,
            space,
            requests: Requests::default(),
            nmi: AtomicBool::new(false),
            start: AtomicU32::new(0),
        }
    }

    /// Has it reset.
    pub fn reset(&self) {
        self.start.store(RESET, Ordering::Release);
    }

    /// Has it started.
    pub fn start(&self, page: u8) {
        let order = START | u32::from(page);
        // A reset that was not seen yet comes first.
        let _ = self.start.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |before| {
            Some(before & RESET | order)
        });
    }

    /// Takes the orders: first the one, then the other.
    pub fn orders(&self) -> [Option<Order>; 2] {
        if self.start.load(Ordering::Relaxed) == 0 {
            return [None; 2];
        }
        let orders = self.start.swap(0, Ordering::Acquire);
        [
            (orders & RESET != 0).then_some(Order::Reset),
            (orders & START != 0).then_some(Order::Start(orders as u8)),
        ]
    }
}

/// Vectors that wait for a vCPU.
#[derive(Default)]
pub struct Requests([AtomicU32; 8]);

impl Requests {
    /// The words of all vectors.
    pub fn word(&self, number: usize) -> u32 {
        self.0[number].load(Ordering::Relaxed)
    }

    /// Adds one.
    pub fn post(&self, vector: u8) {
        self.0[usize::from(vector) / 32].fetch_or(1 << (vector % 32), Ordering::Release);
    }

    /// Returns the highest.
    pub fn highest(&self) -> Option<u8> {
        let words = self.0.iter().map(|word| word.load(Ordering::Acquire));
        highest(words.rev())
    }

    /// Takes one away.
    pub fn take(&self, vector: u8) {
        self.0[usize::from(vector) / 32].fetch_and(!(1 << (vector % 32)), Ordering::Acquire);
    }
}

/// Returns the highest vector of 8 words, the last of which comes first.
pub fn highest(words: impl Iterator<Item = u32>) -> Option<u8> {
    (0..8u8)
        .rev()
        .zip(words)
        .find(|(_, word)| *word != 0)
        .map(|(index, word)| index * 32 + (31 - word.leading_zeros() as u8))
}
