//! Sizes in bytes, as people write them: `64G`, `512MiB`, `4096`.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(u64);

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// No digits in front.
    #[error("a size is a whole number and a unit, such as 64G or 512M")]
    NoNumber,
    /// The unit is none of ours.
    #[error("unknown unit '{0}': use K, M, G or T (powers of 1024)")]
    UnknownUnit(String),
    /// More than 64 bits.
    #[error("larger than any address")]
    TooLarge,
    /// Zero bytes.
    #[error("a size must be more than zero")]
    Zero,
}

impl Size {
    /// Returns `None` for no bytes.
    pub const fn of(bytes: u64) -> Option<Self> {
        match bytes {
            0 => None,
            _ => Some(Self(bytes)),
        }
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        if number.is_empty() {
            return Err(SizeError::NoNumber);
        }
        let shift = match unit.to_ascii_uppercase().as_str() {
            "" | "B" => 0,
            "K" | "KB" | "KIB" => 10,
            "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            "T" | "TB" | "TIB" => 40,
            _ => return Err(SizeError::UnknownUnit(unit.to_owned())),
        };
        // Ten to the twenty is more than 64 bits: an overflowing number is the only way to fail
        // here.
        let number: u64 = number.parse().map_err(|_| SizeError::TooLarge)?;
        match number.checked_mul(1 << shift) {
            None => Err(SizeError::TooLarge),
            Some(0) => Err(SizeError::Zero),
            Some(bytes) => Ok(Self(bytes)),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&human(self.0))
    }
}

/// Bytes with the largest binary unit that leaves a short number: exact when it can be, one decimal
/// otherwise.
pub fn human(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in UNITS {
        if bytes >> shift > 0 {
            return if bytes.trailing_zeros() >= shift {
                format!("{} {unit}", bytes >> shift)
            } else {
                format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64)
            };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_powers_of_1024() {
        for (text, bytes) in [
            ("1", 1),
            ("4096B", 4096),
            ("4k", 4096),
            ("4KiB", 4096),
            ("2m", 2 << 20),
            ("64G", 64 << 30),
            ("64gib", 64 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_says_why() {
        let parse = |text: &str| text.parse::<Size>().unwrap_err();
        assert_eq!(parse(""), SizeError::NoNumber);
        assert_eq!(parse("G"), SizeError::NoNumber);
        assert_eq!(parse("-1G"), SizeError::NoNumber);
        assert_eq!(parse("64Q"), SizeError::UnknownUnit("Q".into()));
        assert_eq!(parse("1.5G"), SizeError::UnknownUnit(".5G".into()));
        assert_eq!(parse("0"), SizeError::Zero);
        assert_eq!(parse("0T"), SizeError::Zero);
        assert_eq!(parse("16777216T"), SizeError::TooLarge);
        assert_eq!(parse("99999999999999999999"), SizeError::TooLarge);
    }

    #[test]
    fn people_read_the_largest_unit() {
        assert_eq!(human(16 << 30), "16 GiB");
        assert_eq!(human((16 << 30) + (1 << 29)), "16.5 GiB");
        assert_eq!(human(4096), "4 KiB");
        assert_eq!(human(100), "100 B");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".*") {
            let _ = text.parse::<Size>();
        }

        #[test]
        fn plain_bytes_come_back(bytes in 1u64..) {
            prop_assert_eq!(bytes.to_string().parse(), Ok(Size(bytes)));
        }
    }
}
