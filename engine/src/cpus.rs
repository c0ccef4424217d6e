//! Sets of processors.

/// A set of processors, by numbers below 4096: those of the operating system, or of a hypervisor,
/// which knows processors by numbers of its own.
///
/// ```
/// use tablewright::shootdown::Cpus;
/// let mut cpus = Cpus::EMPTY;
/// assert!(cpus.insert(5) && cpus.insert(130) && !cpus.insert(4096));
/// cpus.retain(|cpu| cpu > 5);
/// assert_eq!((cpus.len(), cpus.iter().next()), (1, Some(130)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpus {
    pub(crate) banks: [u64; 64],
}

impl Cpus {
    /// The empty set.
    pub const EMPTY: Self = Self { banks: [0; 64] };
    /// The number of processors that a set can hold: all numbers are below it.
    pub const MOST: usize = 64 * 64;

    /// Adds a processor. Returns `false` if its number is not below [`MOST`](Self::MOST).
    pub fn insert(&mut self, cpu: usize) -> bool {
        let bank = self.banks.get_mut(cpu / 64);
        bank.map(|bank| *bank |= 1 << (cpu % 64)).is_some()
    }

    /// Removes a processor.
    pub fn remove(&mut self, cpu: usize) {
        if let Some(bank) = self.banks.get_mut(cpu / 64) {
            *bank &= !(1 << (cpu % 64));
        }
    }

    /// Removes all processors.
    pub fn clear(&mut self) {
        *self = Self::EMPTY;
    }

    /// Removes the processors for which the predicate is false.
    pub fn retain(&mut self, mut keep: impl FnMut(usize) -> bool) {
        let before = *self;
        let gone = before.iter().filter(|&cpu| !keep(cpu));
        gone.for_each(|cpu| self.remove(cpu));
    }

    /// Whether a processor is in the set.
    pub fn contains(&self, cpu: usize) -> bool {
        let bank = self.banks.get(cpu / 64);
        bank.is_some_and(|bank| bank >> (cpu % 64) & 1 != 0)
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.banks.iter().all(|&bank| bank == 0)
    }

    /// The number of processors in the set.
    pub fn len(&self) -> u32 {
        self.banks.iter().map(|bank| bank.count_ones()).sum()
    }

    /// The processors in the set, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..).zip(self.banks).flat_map(|(number, bank)| {
            let rest = |bits: &u64| Some(bits & (bits - 1)).filter(|&rest| rest != 0);
            let bits = core::iter::successors(Some(bank).filter(|&bank| bank != 0), rest);
            bits.map(move |bits| number * 64 + bits.trailing_zeros() as usize)
        })
    }

    /// A bit for each bank of 64 that is not empty.
    pub(crate) fn valid_banks(&self) -> u64 {
        let bit = |(number, &bank): (usize, &u64)| u64::from(bank != 0) << number;
        self.banks.iter().enumerate().map(bit).sum()
    }
}
