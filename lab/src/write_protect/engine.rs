//! The engine's way: the slot is logged, everything is protected in one step, and the first write
//! gives a page back.

use tablewright::dirty::{Bitmap, Marker};
use tablewright::guest::{Access, Fault, Guest, Log, Slot};
use tablewright::{Format, Ipa};
use tablewright_machine::{Mapper, Rule, Time};

use super::job::Logger;
use crate::guest::Handled;

/// How long a CPU that waits for walks of others looks away.
const LOOK_AWAY: Time = Time::ns(50);

/// The log of one guest.
pub struct Engine<'m, 'g, 's, F: Format<Input = Ipa>> {
    pub mapper: Mapper<'m>,
    pub guest: &'g Guest<'s, F, Mapper<'m>>,
    pub slot: Slot,
    pub bitmap: Option<&'g Bitmap<'g>>,
}

impl<F: Format<Input = Ipa>> Engine<'_, '_, '_, F> {
    fn report(&self, what: String) {
        self.mapper.machine().report(Rule::Program, what);
    }

    fn fault(&self, at: u64, access: Access) -> Handled {
        let at = Ipa::new(at);
        // The log is being started: the guest faults again.
        let Ok(request) = self.guest.request(&Fault::new(at, access)) else {
            return Handled::Again;
        };
        match self.guest.reopen(&request) {
            Ok(true) => {
                if let (true, Some(bitmap)) = (request.is_logged_write(), self.bitmap) {
                    self.guest.mark(&Marker::Bitmap(bitmap), &request.slot(), at);
                }
                Handled::Done
            }
            Ok(false) => Handled::Lost,
            Err(_) => Handled::Again,
        }
    }
}

impl<F: Format<Input = Ipa>> Logger for Engine<'_, '_, '_, F> {
    fn start(&self) {
        // What is mapped is zapped by protecting everything.
        match self.guest.replace(self.slot.with_log(Log::ByFault)) {
            Ok(zap) => drop(zap),
            Err(error) => return self.report(error.to_string()),
        }
        match self.guest.space().protect_all() {
            Ok(start) => start.drive(|| self.mapper.machine().cpu().spend(LOOK_AWAY)),
            Err(error) => self.report(error.to_string()),
        }
    }

    fn write_fault(&self, at: u64) -> Handled {
        self.fault(at, Access::Write)
    }

    fn read_fault(&self, at: u64) -> Handled {
        self.fault(at, Access::Read)
    }
}
