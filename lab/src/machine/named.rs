//! The name of a profile on the command line.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use tablewright_machine::Profile;

/// Takes any text, because a profile may be a file; a shell completes the names of those that come
/// with the program.
#[derive(Clone, Copy, Debug)]
pub struct Named;

impl TypedValueParser for Named {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(Profile::built_in().map(PossibleValue::new)))
    }
}
