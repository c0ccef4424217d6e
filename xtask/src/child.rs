//! Programs that are run beside this one, and end with it: however it ends, no emulator stays
//! behind.

use std::process::Command;

/// Has the kernel kill the program when the thread that starts it ends, as it does when it is
/// killed itself. Where the kernel knows nothing of the kind, the program ends with its owner
/// alone.
#[cfg(target_os = "linux")]
pub fn ends_with_us(command: &mut Command) {
    use std::io::{Error, ErrorKind};
    use std::os::unix::process::CommandExt as _;

    let ours = std::process::id();
    let tie = move || {
        // SAFETY: a number is set, of this process alone (prctl(2), `PR_SET_PDEATHSIG`).
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(Error::last_os_error());
        }
        // What was killed before that sends no signal any more.
        match std::os::unix::process::parent_id() == ours {
            true => Ok(()),
            false => Err(Error::from(ErrorKind::Interrupted)),
        }
    };
    // SAFETY: two system calls, and neither allocates nor takes a lock.
    unsafe { command.pre_exec(tie) };
}

/// Nothing: the program ends with its owner alone.
#[cfg(not(target_os = "linux"))]
pub fn ends_with_us(_: &mut Command) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use super::ends_with_us;

    #[test]
    fn a_program_ends_with_what_started_it() {
        let start = || {
            let mut command = Command::new("sleep");
            command.arg("60");
            ends_with_us(&mut command);
            command.spawn()
        };
        // The signal comes when a thread ends, and so when a process does.
        let child = std::thread::spawn(start).join();
        let status = child.unwrap().and_then(|mut child| child.wait()).unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL));
    }
}
