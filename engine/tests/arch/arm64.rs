//! Which instructions an arm64 processor executes for a flush.

use tablewright::arch::arm64::{Cpu, Domain, Ids};
use tablewright::format::{Arm64K4Wide, Arm64K64Wide, Stage2};
use tablewright::shootdown::arm64::{Instruction, Op, Regime};
use tablewright::{Invalidation, Level, Pa, Stale, What};

const RANGES: Ids = Ids { isar0: 2 << 56, mmfr0: 0, mmfr1: 0, mmfr2: 0 };

#[test]
fn the_encoder_follows_from_format_and_processor() {
    let encoder = Cpu::of::<Stage2<12, 40>>(&RANGES).encoder();
    assert_eq!((encoder.regime, encoder.page_shift), (Regime::Stage2, 12));
    assert!(encoder.ranges && !encoder.wide);
    // With 64 KiB, addresses of ranges count in pages whatever their size.
    assert!(!Cpu::of::<Arm64K64Wide>(&RANGES).encoder().wide);
    let wide = Cpu::of::<Arm64K4Wide>(&RANGES.and(Ids { isar0: 0, ..RANGES }));
    assert!(wide.encoder().wide && !wide.encoder().ranges);
    assert_eq!((wide.domain(), wide.alone().domain()), (Domain::Inner, Domain::Local));
}

#[test]
fn what_is_told_twice_is_told_with_a_wait_between() {
    let page = Stale { first: 0x7000, last: 0x7fff, level: Some(Level::PAGE), tables: true };
    let pages = [page];
    let of = |what| Invalidation { root: Pa::new(0x1000), id: 1, global: false, what };
    let cpu = Cpu::of::<Stage2<12, 40>>(&RANGES).twice();
    let ops = |what| {
        let mut all = Vec::new();
        cpu.instructions(&of(what), |one| {
            all.push(match one {
                Instruction::Tlbi(tlbi) => Some(tlbi.op),
                Instruction::Dsb => None,
            });
        });
        all
    };
    let once = [Some(Op::Ipas2e1), None, Some(Op::Vmalle1)];
    assert_eq!(ops(What::Ranges(&pages)), [&once[..], &[None], &once].concat());
    assert_eq!(ops(What::Everything), [Some(Op::Vmalls12e1), None, Some(Op::Vmalls12e1)]);
    assert_eq!(ops(What::Ranges(&[])), []);
}
