//! Figures of a run, and the published ones.

use serde::Serialize;
use tablewright_machine::Time;

use crate::published;

/// How many zaps took so many milliseconds: powers of two, as `funclatency -m` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bucket {
    pub from_ms: u64,
    pub to_ms: u64,
    pub count: u64,
}

/// The place of so many milliseconds: 0 and 1, 2 and 3, 4 to 7 ...
fn place(ms: u64) -> usize {
    (ms.max(1).ilog2()) as usize
}

/// All buckets up to the last that is not empty; each time counts so often.
pub fn histogram(times: &[Time], each: u64) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    for time in times {
        let at = place(time.as_ps() / 1_000_000_000);
        while buckets.len() <= at {
            let from = 1u64 << buckets.len();
            buckets.push(Bucket {
                from_ms: if from == 1 { 0 } else { from },
                to_ms: 2 * from - 1,
                count: 0,
            });
        }
        buckets[at].count += each;
    }
    buckets
}

/// How many of a hundred zaps are in another bucket than published: `published` has the first
/// millisecond of each, and how many.
pub fn misplaced(buckets: &[Bucket], published: &[(u64, u64)]) -> Option<f64> {
    let all: u64 = buckets.iter().map(|bucket| bucket.count).sum();
    let rights = buckets.iter().map(|bucket| {
        let of = published.iter().find(|(from, _)| *from == bucket.from_ms);
        of.map_or(0, |(_, count)| bucket.count.min(*count))
    });
    let right: u64 = rights.sum();
    (all > 0).then(|| (all - right) as f64 / all as f64 * 100.0)
}

/// Of stalls, each of which there are so many: the longest, that which 999 of 1000 do not exceed,
/// and their sum in seconds.
pub fn stalls(stalls: &[(Time, u64)]) -> (Time, Time, f64) {
    let mut sorted = stalls.to_vec();
    sorted.sort_unstable();
    let all: u64 = sorted.iter().map(|(_, count)| count).sum();
    let seconds = |(time, count): &(Time, u64)| time.as_secs_f64() * *count as f64;
    let total = sorted.iter().map(seconds).fold(0.0, |sum, it| sum + it);
    // The first that fewer than one in a thousand exceed.
    let mut above = all;
    let p999 = sorted.iter().find(|(_, count)| {
        above -= count;
        above * 1000 <= all
    });
    let time = |stall: Option<&(Time, u64)>| stall.map_or(Time::ZERO, |(time, _)| *time);
    (time(sorted.last()), time(p999), total)
}

/// A figure of the published table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Seconds.
    Disabling,
    /// Zaps that took from so many milliseconds to so many.
    Calls { from_ms: u64, to_ms: u64 },
}

/// Which of them a row is, if it is one.
pub fn metric(row: &published::Row) -> Option<Metric> {
    if row.metric == DISABLING {
        return Some(Metric::Disabling);
    }
    let range = row.metric.strip_prefix("calls with latency ")?;
    let (from, to) = range.strip_suffix(" ms")?.split_once('-')?;
    Some(Metric::Calls { from_ms: from.parse().ok()?, to_ms: to.parse().ok()? })
}

/// In the words of the well-known test.
pub const DISABLING: &str = "Disabling dirty logging time";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_those_of_the_published_table() {
        let ms = [0, 1, 2, 3, 128, 255, 256, 4095].map(Time::ms);
        let found = histogram(&ms, 3);
        let of = |from, to| {
            let bucket = found.iter().find(|it| (it.from_ms, it.to_ms) == (from, to));
            bucket.map(|bucket| bucket.count)
        };
        assert_eq!(of(0, 1), Some(6));
        assert_eq!(of(2, 3), Some(6));
        assert_eq!(of(4, 7), Some(0));
        assert_eq!(of(128, 255), Some(6));
        assert_eq!(of(256, 511), Some(3));
        assert_eq!((of(2048, 4095), of(4096, 8191)), (Some(3), None));
        // Every row of the first system is one of them, or the total.
        let mut calls = 0;
        for row in published::built_in("dirty-log").iter().take(13) {
            match metric(row).unwrap_or_else(|| panic!("{row:?}")) {
                Metric::Disabling => assert_eq!(row.unit, "s"),
                Metric::Calls { from_ms, to_ms } => {
                    assert!(of(from_ms, to_ms).is_some(), "{row:?}");
                    calls += row.before.unwrap_or(0.0) as u64;
                }
            }
        }
        assert_eq!(calls, 416);
    }

    #[test]
    fn what_is_in_another_bucket_is_counted_once() {
        let found = histogram(&[130, 140, 300, 700].map(Time::ms), 1);
        let published = [(0, 0), (128, 1), (256, 2), (512, 1)];
        assert_eq!(misplaced(&found, &published), Some(25.0));
        assert_eq!(misplaced(&found, &[]), Some(100.0));
        assert_eq!(misplaced(&[], &published), None);
    }

    #[test]
    fn one_in_a_thousand_may_be_longer() {
        let (short, long) = (Time::us(1), Time::ms(1));
        let (longest, p999, total) = stalls(&[(long, 1), (short, 999)]);
        assert_eq!((longest, p999), (long, short));
        assert!((total - 0.001_999).abs() < 1e-9);
        assert_eq!(stalls(&[(long, 2), (short, 998)]).1, long);
        assert_eq!(stalls(&[]), (Time::ZERO, Time::ZERO, 0.0));
    }
}
