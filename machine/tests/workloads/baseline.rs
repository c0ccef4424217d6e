use tablewright::{Format, Va};
use tablewright_machine::{Machine, Outcome, RunError};
use super::faulty::Fault;
use super::{Dice, Kind};
pub fn run<F: Format<Input = Va>>(
    machine: &Machine,
    fault: &Fault,
    dice: &Dice,
    kind: Kind,
    between: impl FnOnce(u64),
) -> Result<Outcome, RunError> {
    let _ = (fault, dice, kind);
    between(machine.digest());
    machine.run(|_| ())
}
