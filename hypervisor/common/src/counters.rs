//! Counts of hypervisors, and how they are found: numbers in memory under one symbol, in the order
//! of a list, so that looking costs the guest nothing.
//!
//! A hypervisor has a list of its own behind the [common one](Event), and both are one enumeration:
//! [`counters!`](crate::counters!) makes it, in the hypervisor and in the program that looks.

/// Hands the common list to a macro, before what is given.
#[doc(hidden)]
#[macro_export]
macro_rules! with_events {
    ($with:path; $($more:tt)*) => {
        $with! {
            Faults "faults of the guest's memory",
            Installed "leaves installed",
            Grown "leaves that grew or were there",
            Reopened "pages that the log gave back",
            Busy "faults sent back",
            Tables "tables in use",
            Evicted "frames taken away",
            Returned "frames given back",
            Spoiled "times that the guest was seen on a frame that is not its own any more",
            Logs "logs started",
            Roots "entries of the root in use, when one was measured",
            Starting "instructions until it had started, when one was measured",
            Marks "pages marked as written",
            Full "faults at a full ring",
            Collapsed "blocks that came back",
            Rounds "rounds of copying",
            Copied "pages copied",
            Compared "pages compared with the copy",
            Different "pages that differ from the copy",
            Resumed "guests that went on on the copy",
            $($more)*
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! enumerate_counters {
    ($($name:ident $text:literal,)*) => {
        /// One of the numbers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(dead_code, reason = "the one program counts, the other looks")]
        pub enum Count { $(#[doc = $text] $name,)* }

        /// Their names, in order.
        pub const NAMES: [&str; [$($text),*].len()] = [$($text),*];
    };
}

/// Makes `Count`, of what is common and what is listed, and `NAMES`.
#[macro_export]
macro_rules! counters {
    ($($name:ident $text:literal,)*) => {
        $crate::with_events! { $crate::enumerate_counters; $($name $text,)* }
    };
}

macro_rules! enumerate_events {
    ($($name:ident $text:literal,)*) => {
        /// Events that every hypervisor counts. The number of each is that of the same name in what
        /// [`counters!`](crate::counters!) makes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Event { $(#[doc = $text] $name,)* }
    };
}

with_events! { enumerate_events; }

#[cfg(test)]
mod tests {
    use super::Event;

    counters! {
        Own "what only this one counts",
    }

    #[test]
    fn what_is_common_has_the_same_number_everywhere() {
        for (event, count) in [
            (Event::Faults, Count::Faults),
            (Event::Marks, Count::Marks),
            (Event::Resumed, Count::Resumed),
        ] {
            assert_eq!(event as usize, count as usize);
        }
        assert_eq!(Count::Own as usize, Event::Resumed as usize + 1);
        assert_eq!(NAMES.len(), Count::Own as usize + 1);
        assert_eq!(NAMES[Count::Own as usize], "what only this one counts");
    }
}
