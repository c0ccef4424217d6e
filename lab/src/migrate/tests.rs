//! Migrations that go well, and hosts that lose writes.

use tablewright_machine::{Profile, Time};

use super::job::{HostTimes, Job, Logging, Order, PERIOD, Ran, SLICE};
use super::run::run;
use super::writes::{Model, Writes};

const ALL: [Logging; 5] =
    [Logging::Manual, Logging::AllSet, Logging::ProtectAll, Logging::Ring, Logging::EagerSplit];

/// 8 MiB, of which 1 MiB is written, over a link of 256 MiB/s.
fn job(logging: Logging, model: Model, rate: Option<u64>) -> Job {
    Job {
        profile: Profile::load("neutral").unwrap(),
        logging,
        pages: 2048,
        used: 2048,
        mapped: 2048,
        one_lock: false,
        host: HostTimes::default(),
        vcpus: 3,
        large: false,
        bandwidth: 256 << 20,
        max_bandwidth: u64::MAX,
        downtime_limit: Time::ms(2),
        timeout: Time::ms(60),
        slice: SLICE,
        period: PERIOD,
        chunk: 512,
        ring: 64,
        writes: Writes::Model { model, set: 256, rate, seed: 1 },
        work: Time::ns(200),
        zeros: Time::ZERO,
        auto_converge: false,
        order: Order::Right,
    }
}

fn ran(job: &Job) -> Ran {
    run(job).unwrap_or_else(|error| panic!("{:?}: {error}", job.logging))
}

/// An x86 host: a flush has every vCPU leave the guest.
fn x86() -> Profile {
    let text = "name = \"x\"\ndescription = \"\"\n[system]\ncore = \"\"\nkind = \"metal\"\nram_gib \
             = 1\n\
                [architecture]\nformat = \"x86-64\"\n[costs]\nexception = 1000\ninterrupt = \
                2000\ncomplete = 100\n\
                walk = 5\naccess = 1\nexchange = 5\nload = 1\n\
                [[provenance]]\nof = \
                [\"costs.exception\", \"costs.interrupt\", \"costs.complete\", \"costs.walk\", \
                \"costs.access\", \"costs.exchange\", \"costs.load\"]\nsource = \"assumed\"\nnote \
                = \"\"\n";
    Profile::parse(text, "x.toml").unwrap()
}

#[test]
fn the_destination_is_the_source_whatever_is_written_and_however_it_is_logged() {
    for logging in ALL {
        for (model, rate) in [
            (Model::Greedy, None),
            (Model::Fixed, Some(30_000)),
            (Model::Random, Some(200_000)),
            (Model::Zipf, None),
            (Model::Sequential, None),
        ] {
            let sizes: &[bool] = match model {
                Model::Random => &[false, true],
                _ => &[false],
            };
            for &large in sizes {
                let job = Job { large, ..job(logging, model, rate) };
                let ran = ran(&job);
                assert_eq!(ran.remaining, 0);
                assert!(ran.normal >= job.pages && ran.faults > 0 && ran.syncs >= 2);
                assert!(ran.writes > 0 && ran.stall_longest > Time::ZERO);
                assert!(ran.setup + ran.downtime < ran.total);
            }
        }
    }
}

/// A page that was not mapped is mapped by a fault, under the lock if there is one, and is in the
/// log.
#[test]
fn memory_that_is_mapped_while_the_log_runs_is_logged() {
    for logging in ALL {
        let of = |mapped, one_lock| {
            let job = Job { mapped, one_lock, ..job(logging, Model::Greedy, None) };
            ran(&job)
        };
        let (before, without, with) = (of(2048, false), of(0, false), of(0, true));
        // The first round protects nothing that is mapped: each of the 256 pages faults once for
        // that, whatever is logged.
        assert!(without.faults >= before.faults.min(256), "{logging:?}");
        assert_eq!(with.remaining, 0);
        assert!(with.stall_total > Time::ZERO);
        // What maps beside others waits for them.
        if !matches!(logging, Logging::AllSet) {
            assert!(with.stall_longest >= without.stall_longest, "{logging:?}");
        }
    }
}

#[test]
fn x86_kicks_vcpus_and_loses_nothing() {
    for logging in ALL {
        let job = Job {
            profile: x86(),
            large: logging == Logging::EagerSplit,
            ..job(logging, Model::Random, Some(200_000))
        };
        // The last three stop the guest.
        assert!(ran(&job).kicks > 3, "{logging:?}");
    }
}

/// A write is lost if nothing later makes up for it: few pages, seldom written, or by several
/// vCPUs.
fn careless(logging: Logging, order: Order) -> Job {
    let (vcpus, rate) = match order {
        // Only a vCPU that has written a page before knows it by its TLB.
        Order::SentEarly => (1, Some(20_000)),
        _ => (3, None),
    };
    Job {
        vcpus,
        order,
        downtime_limit: Time::us(100),
        writes: Writes::Model { model: Model::Random, set: 32, rate, seed: 1 },
        ..job(logging, Model::Random, None)
    }
}

#[test]
fn a_host_that_works_in_the_wrong_order_is_caught() {
    for logging in [Logging::Manual, Logging::AllSet] {
        for order in [Order::SentEarly, Order::ProtectedFirst] {
            let error = run(&careless(logging, order)).expect_err("a write is lost");
            let error = error.to_string();
            assert!(
                error.contains("the destination differs from the source"),
                "{logging:?}, {order:?}: {error}"
            );
            assert!(!error.contains('\n'));
            let right = Job { order: Order::Right, ..careless(logging, order) };
            assert!(ran(&right).syncs >= 2);
        }
    }
}

#[test]
fn with_a_fixed_rate_a_fast_start_takes_no_longer_than_a_slow_one() {
    let total = |logging| {
        let ran = ran(&job(logging, Model::Fixed, Some(20_000)));
        assert!(ran.converged, "{logging:?}");
        (ran.total, ran.setup)
    };
    let slow = total(Logging::Manual);
    for fast in [Logging::AllSet, Logging::ProtectAll] {
        let fast = total(fast);
        assert!(fast.0.as_secs_f64() <= slow.0.as_secs_f64() * 1.01);
        assert!(fast.1 <= slow.1);
    }
}

/// Looking at the log takes 128 us, in which more is written than a step of sending takes away: a
/// host that looks as soon as the rest is small enough looks for ever.
#[test]
fn a_guest_that_always_writes_is_migrated_over_a_link_that_is_faster() {
    let mut job = job(Logging::Manual, Model::Greedy, None);
    (job.pages, job.used) = (8192, 8192);
    job.writes =
        Writes::Model { model: Model::Sequential, set: 4096, rate: Some(400_000), seed: 1 };
    job.bandwidth = 6 << 30;
    job.timeout = Time::ms(300);
    job.downtime_limit = Time::us(100);
    job.slice = Time::us(400);
    job.profile.costs.load = Time::us(1);
    let ran = ran(&job);
    assert!(ran.converged && ran.syncs < 20, "{} looks", ran.syncs);
}

#[test]
fn what_is_idle_is_sent_once_and_zeros_cost_next_to_nothing() {
    let mut job = job(Logging::Manual, Model::Fixed, Some(1000));
    job.used = 1024;
    let ran = ran(&job);
    // The written pages are among the used ones.
    assert_eq!(ran.duplicate, 1024);
    assert!(ran.normal < 1024 + 100);
    assert_eq!(ran.transferred, ran.normal * (4096 + 8) + ran.duplicate * 9);
    let link = Time::ps(ran.transferred * 1_000_000_000_000 / (256 << 20));
    assert!(ran.total >= link && ran.total.as_secs_f64() < link.as_secs_f64() * 1.1);
    assert!(ran.downtime <= Time::ms(3));
}

#[test]
fn a_guest_that_writes_too_much_is_stopped_when_time_is_up_or_slowed_down() {
    let mut job = job(Logging::Manual, Model::Greedy, None);
    job.downtime_limit = Time::us(100);
    let stopped = ran(&job);
    assert!(!stopped.converged && stopped.throttle == 0);
    assert!(stopped.total >= Time::ms(60));
    // Slowing down takes two periods of a second.
    job.timeout = Time::s(4);
    job.bandwidth = 16 << 20;
    job.writes = Writes::Model { model: Model::Random, set: 2048, rate: Some(20_000), seed: 1 };
    job.auto_converge = true;
    let slowed = ran(&job);
    assert!(slowed.throttle >= 20, "{}", slowed.throttle);
}

/// QEMU's own limit holds while the guest runs; its estimate of the rest knows nothing else.
#[test]
fn the_last_round_has_all_of_the_link() {
    let mut job = job(Logging::Manual, Model::Fixed, Some(20_000));
    let whole = ran(&job);
    job.max_bandwidth = job.bandwidth;
    assert_eq!(ran(&job), whole);
    job.bandwidth *= 8;
    let limited = ran(&job);
    assert_eq!(limited.rounds, whole.rounds);
    assert_eq!(limited.expected_downtime, whole.expected_downtime);
    let eighth = whole.downtime.as_secs_f64() / 8.0;
    assert!((limited.downtime.as_secs_f64() / eighth - 1.0).abs() < 0.1, "{:?}", limited.downtime);
}

#[test]
fn runs_are_the_same_every_time() {
    let job = job(Logging::Ring, Model::Zipf, None);
    assert_eq!(ran(&job), ran(&job));
    assert!(ran(&job).full > 0);
}

/// Total and downtime in nanoseconds of a guest that writes at random, page by page.
pub fn counted(
    (pages, set): (u64, u64),
    rate: u64,
    vcpus: u64,
    bandwidth: u64,
    limit_ns: u64,
) -> (f64, f64) {
    let ran = ran(&Job {
        pages,
        used: pages,
        mapped: pages,
        vcpus: u16::try_from(vcpus).unwrap(),
        bandwidth,
        max_bandwidth: u64::MAX,
        downtime_limit: Time::ns(limit_ns),
        timeout: Time::s(60),
        chunk: 1 << 15,
        writes: Writes::Model { model: Model::Random, set, rate: Some(rate), seed: 1 },
        ..job(Logging::Manual, Model::Greedy, None)
    });
    let ns = |time: Time| time.as_secs_f64() * 1e9;
    (ns(ran.total), ns(ran.downtime))
}
