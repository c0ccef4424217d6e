//! Guests on the KVM of this computer; without one the tests say so and pass.
#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use tablewright_kvm::guest::{Orders, written};
use tablewright_kvm::{Backing, Emptied, Error, Protect, Setup, Vm, host};

/// Whether this computer can run them.
fn has_kvm() -> bool {
    match host::open(Path::new("/dev/kvm")) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: {error}");
            false
        }
    }
}

fn setup(vcpus: u32, bytes: u64) -> Setup {
    Setup {
        device: PathBuf::from("/dev/kvm"),
        vcpus,
        backing: (Backing::Anonymous, "anonymous"),
        bytes,
        first: None,
        slots: 1,
        protect: Protect::Manual,
        ring: None,
        as_selftests: false,
        nested: false,
        cpus: Vec::new(),
    }
}

#[test]
fn a_guest_writes_what_it_is_told_and_the_log_says_the_same() {
    if !has_kvm() {
        return;
    }
    let can = host::abilities(&host::open(Path::new("/dev/kvm")).unwrap());
    let setup = Setup { protect: Protect::Auto, ..setup(2, 64 << 20) };
    let mut kinds = vec![setup.clone(), Setup { as_selftests: true, ..setup.clone() }];
    if can.manual {
        kinds.push(Setup { protect: Protect::Manual, ..setup.clone() });
    }
    if can.ring > 0 {
        // Smaller than what is written, so that it fills.
        kinds.push(Setup { ring: Some(2048), ..setup.clone() });
    }
    if can.nested {
        kinds.push(Setup { nested: true, ..setup });
    }
    for kind in kinds {
        let (ring, nested) = (kind.ring, kind.nested);
        for (backing, slots) in [(Backing::Anonymous, 1), (Backing::Thp, 2)] {
            let kind = Setup { slots, backing: (backing, "test"), ..kind.clone() };
            let mut vm = Vm::new(&kind).unwrap();
            vm.seed(1);
            let shares = [vm.share(0, false), vm.share(1, false)];
            vm.begin(|id| shares[id]);
            let done = vm.finish().unwrap();
            assert!(done.iter().all(|done| done.made == shares[0].pages));
            // The guest's value is in every page: the block has zero, so the memory is as it was;
            // the log knows better.
            vm.log(true).unwrap();
            for random in [false, true] {
                let orders = |id: usize| Orders {
                    random,
                    write_percent: if random { 60 } else { 100 },
                    ..shares[id]
                };
                vm.begin(orders);
                let done = vm.finish().unwrap();
                let mut expected = vm.bitmap();
                vm.mark_written(orders, &done, &mut expected);
                // The guest has drawn the host's numbers, whatever the log says.
                for (id, (vcpu, done)) in vm.vcpus().iter().zip(&done).enumerate() {
                    let next = written(&orders(id), done.seed, done.made, |_| ());
                    let drawn = vcpu.block().seed.load(Ordering::Relaxed);
                    assert_eq!(drawn, next, "vCPU {id}, {orders:?}", orders = orders(id));
                }
                let mut got = vm.bitmap();
                if ring.is_some() {
                    let emptied = done.iter().map(|done| done.emptied);
                    let emptied = emptied.reduce(Emptied::beside).unwrap();
                    assert!(random || emptied.pages > 0);
                    for took in [emptied.taking, emptied.resetting] {
                        assert_eq!(took.cpu.is_zero(), emptied.pages == 0, "{emptied:?}");
                    }
                    vm.collect(&mut got);
                    vm.reset().unwrap();
                } else {
                    vm.get(&mut got).unwrap();
                    if vm.is_manual() {
                        let mut again = vm.bitmap();
                        vm.get_often(&mut again, 3).unwrap();
                        assert_eq!(again.difference(&got), None);
                        vm.clear(&mut got).unwrap();
                    }
                }
                // Where leaves are split, or tables are of two stages at once, what is only read
                // may be mapped for a write, and is logged then.
                let mut most = expected.clone();
                if random && (nested || backing == Backing::Thp) {
                    vm.mark_accessed(orders, &done, &mut most);
                }
                let what = format!("{kind:?} {random}");
                let mut missing = expected.clone();
                missing.remove(&got);
                assert_eq!(missing.count(), 0, "{what}");
                let mut too_many = got.clone();
                too_many.remove(&most);
                assert_eq!(too_many.count(), 0, "{what}");
                assert!(random == (got.count() < vm.pages()));
            }
            // Not written, not in it.
            let mut got = vm.bitmap();
            if ring.is_none() {
                vm.get(&mut got).unwrap();
            }
            assert_eq!(got.count(), 0);
            vm.log(false).unwrap();
        }
    }
}

#[test]
fn halves_of_blocks_are_written_alone() {
    if !has_kvm() {
        return;
    }
    let mut vm = Vm::new(&setup(1, 8 << 20)).unwrap();
    vm.log(true).unwrap();
    let share = vm.share(0, false);
    let orders = |_| Orders { pages: share.pages / 2, count: share.pages / 2, half: 256, ..share };
    vm.begin(orders);
    let done = vm.finish().unwrap();
    let (mut got, mut expected) = (vm.bitmap(), vm.bitmap());
    vm.get(&mut got).unwrap();
    vm.mark_written(orders, &done, &mut expected);
    assert_eq!(got.difference(&expected), None);
    let by_hand = (0..2048).filter(|page| page % 512 >= 256);
    let mut halves = vm.bitmap();
    by_hand.for_each(|page| halves.insert(page));
    assert_eq!(got.difference(&halves), None);
}

#[test]
fn what_cannot_be_had_is_refused_in_one_line() {
    let cases: Vec<(Setup, &str)> = vec![
        (Setup { device: "/no/such".into(), ..setup(1, 2 << 20) }, "there is no KVM"),
        (Setup { device: "/dev/null".into(), ..setup(1, 2 << 20) }, "not KVM"),
        (Setup { device: "/".into(), ..setup(1, 2 << 20) }, "not KVM"),
    ];
    let mut cases = cases;
    if has_kvm() {
        cases.extend([
            (setup(1 << 20, 2 << 20), "vCPUs in a VM"),
            (setup(1, 1 << 45), "to spare"),
            (Setup { first: Some(1 << 50), ..setup(1, 2 << 20) }, "bits of address"),
            (
                Setup { first: Some(0x1000), ..setup(1, 2 << 20) },
                "begins at 0x1000, and its code and tables end at",
            ),
            (Setup { ring: Some(1000), ..setup(1, 2 << 20) }, "ring"),
            (
                Setup {
                    backing: (
                        Backing::Hugetlb { shift: 34, shared: false },
                        "anonymous_hugetlb_16gb",
                    ),
                    ..setup(1, 16 << 30)
                },
                "huge pages",
            ),
            (Setup { cpus: vec![100_000], ..setup(1, 2 << 20) }, "may not run"),
        ]);
    }
    for (setup, says) in cases {
        let error = Vm::new(&setup).err().expect("refused");
        let line = error.to_string();
        assert!(line.contains(says) && !line.contains('\n'), "{line}");
        assert!(error.is_refusal(), "{line}");
        assert!(!matches!(error, Error::Call { .. }));
    }
}

#[test]
fn a_user_without_the_right_is_told_so() {
    use std::os::unix::fs::PermissionsExt as _;
    let path = std::env::temp_dir().join(format!("tablewright-closed-{}", std::process::id()));
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    let opened = std::thread::scope(|scope| {
        let open = || {
            // Root may all: this thread alone is another user, which the system call, unlike the
            // library's function, can do. SAFETY: `setresuid`: plain numbers; the thread ends with
            // this.
            unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            host::open(&path).map(|_| ())
        };
        scope.spawn(open).join().unwrap()
    });
    std::fs::remove_file(&path).unwrap();
    let error = opened.expect_err("refused");
    assert!(matches!(error, Error::Permission { .. }), "{error}");
    let line = error.to_string();
    assert!(error.is_refusal() && line.contains("no permission") && !line.contains('\n'), "{line}");
}
