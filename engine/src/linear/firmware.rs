//! A firmware's memory map made usable: unsorted, overlapping, with odd ends, and no allocator yet.
//!
//! A page is usable if every byte of it lies in usable ranges, and none in another.

use crate::addr::{Pa, Span};

/// One range of a firmware's memory map.
///
/// ```
/// use tablewright::linear::FirmwareRange;
/// let range = FirmwareRange { start: 0, last: 0x9_fbff, usable: true };
/// assert!(range.usable);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirmwareRange {
    /// The first byte.
    pub start: u64,
    /// The last byte. A range that ends before it starts is empty.
    pub last: u64,
    /// Whether it is RAM that may be used. A range that is not takes away what it overlaps.
    pub usable: bool,
}

impl FirmwareRange {
    const fn contains(&self, at: u64) -> bool {
        self.start <= at && at <= self.last
    }
}

/// Writes the usable RAM of a firmware's map into `into`, in ascending order and in whole pages of
/// `page` bytes, a power of two: the [`ram`](super::MemoryMap::ram) of a memory map that has
/// nothing else reserved.
///
/// Takes time by the square of the number of ranges, and no memory.
///
/// # Errors
/// `into` is too small: the number of stretches that there are.
///
/// ```
/// use tablewright::linear::{FirmwareRange, usable_ram};
/// use tablewright::{Pa, Span};
/// let range = |start, last, usable| FirmwareRange { start, last, usable };
/// let map = [
///     range(0x10_0000, 0x7fff_ffff, true),
///     range(0, 0x9_fbff, true),
///     range(0x9_f000, 0xf_ffff, false),
///     range(0x4000_0800, 0x4000_0fff, false), // takes its page
/// ];
/// let mut into = [Span::new(Pa::new(0), 4096)?; 8];
/// let ram = usable_ram(map.iter().copied(), 4096, &mut into).unwrap();
/// let ends = |span: &Span<Pa>| (span.start().get(), span.last().get());
/// assert_eq!(ram.iter().map(ends).collect::<Vec<_>>(),
///     [(0, 0x9_efff), (0x10_0000, 0x3fff_ffff), (0x4000_1000, 0x7fff_ffff)]);
/// # Ok::<(), tablewright::AddressError>(())
/// ```
pub fn usable_ram(
    ranges: impl Iterator<Item = FirmwareRange> + Clone,
    page: u64,
    into: &mut [Span<Pa>],
) -> Result<&[Span<Pa>], usize> {
    let mut count = 0;
    let mut at = Some(0);
    while let Some((first, last)) = at.and_then(|at| next_stretch(&ranges, at)) {
        at = last.checked_add(1);
        // A page that the stretch has a part of is not usable as a whole.
        let Some(first) = first.checked_next_multiple_of(page) else { break };
        let last = match last & (page - 1) == page - 1 {
            true => last,
            false => match (last & !(page - 1)).checked_sub(1) {
                Some(last) => last,
                None => continue,
            },
        };
        if first > last {
            continue;
        }
        let Ok(span) = Span::inclusive(Pa::new(first), Pa::new(last)) else { continue };
        if let Some(place) = into.get_mut(count) {
            *place = span;
        }
        count += 1;
    }
    match count <= into.len() {
        true => Ok(&into[..count]),
        false => Err(count),
    }
}

/// The first stretch of usable bytes that starts at or behind `at`, as long as it goes on.
fn next_stretch(
    ranges: &(impl Iterator<Item = FirmwareRange> + Clone),
    mut at: u64,
) -> Option<(u64, u64)> {
    let usable = || ranges.clone().filter(|it| it.usable && it.start <= it.last);
    let taken = || ranges.clone().filter(|it| !it.usable && it.start <= it.last);
    let first = loop {
        let ahead = usable().filter(|it| it.last >= at);
        let first = ahead.map(|it| it.start.max(at)).min()?;
        match taken().filter(|it| it.contains(first)).map(|it| it.last).max() {
            None => break first,
            Some(last) => at = last.checked_add(1)?,
        }
    };
    let mut last = first;
    // Ranges that overlap or continue each other are one.
    while let Some(more) = usable()
        .filter(|it| it.last > last && it.start <= last.saturating_add(1))
        .map(|it| it.last)
        .max()
    {
        last = more;
    }
    let cut = taken().map(|it| it.start).filter(|&start| start > first && start <= last).min();
    Some((first, cut.map_or(last, |start| start - 1)))
}
