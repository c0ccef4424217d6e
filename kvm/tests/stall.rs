//! A planted stall, alone: other tests would be stalls as well.
#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::path::Path;
use std::time::Duration;

use tablewright_kvm::{Backing, Protect, Setup, Vm, host};

#[test]
fn a_planted_stall_is_seen() {
    if let Err(error) = host::open(Path::new("/dev/kvm")) {
        return eprintln!("skipped: {error}");
    }
    let setup = Setup {
        device: "/dev/kvm".into(),
        vcpus: 1,
        backing: (Backing::Anonymous, "anonymous"),
        bytes: 16 << 20,
        first: None,
        slots: 1,
        protect: Protect::Manual,
        ring: None,
        as_selftests: false,
        nested: false,
        cpus: Vec::new(),
    };
    let mut vm = Vm::new(&setup).unwrap();
    let share = vm.share(0, false);
    vm.begin(|_| share);
    vm.finish().unwrap();
    let planted = Duration::from_millis(5);
    // Another program may take the CPU at the same time: the shortest of a few is the planted one.
    let mut seen = Vec::new();
    while seen.len() < 8 || seen.len() < 100 && seen.iter().all(|part| *part >= 1.1) {
        vm.begin(|_| share.endless());
        std::thread::sleep(Duration::from_millis(20));
        vm.vcpus()[0].pause(planted);
        std::thread::sleep(Duration::from_millis(20));
        let done = vm.stop().unwrap();
        seen.push(done[0].stalls.longest().as_secs_f64() / planted.as_secs_f64());
        assert!(done[0].stalls.quantile(0.999) < planted);
        assert!(done[0].stalls.count() == done[0].made);
    }
    assert!(seen.iter().all(|part| *part > 0.99), "{seen:?}");
    let nearest = seen.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(nearest < 1.1, "{seen:?}");
}
