//! One page at a time, as a fault handler edits: nanoseconds for each call in a live space whose
//! tables exist, with one gather for all calls.
//!
//! `small [ROUNDS]`. Each round unmaps, maps and write-protects 1 GiB page by page, upwards and in
//! an order that no prefetcher foresees; what is printed is the median.

use std::error::Error;
use std::ops::ControlFlow;
use std::time::Instant;

use tablewright::format::{Arm64K4, X86_64};
use tablewright::{
    AddressSpace, Attrs, Change, EditError, Encoded, Format, Gather, Mapping, Pa, Span, Va,
};
use tablewright_hosted::Hosted;

const PAGES: u64 = 1 << 18;

fn main() {
    let rounds = match std::env::args().nth(1).map(|rounds| rounds.parse()) {
        None => 9,
        Some(Ok(rounds @ 1..=1000)) => rounds,
        Some(_) => {
            eprintln!("error: usage: small [ROUNDS], from 1 to 1000");
            std::process::exit(2);
        }
    };
    for measured in [measure::<X86_64<4>>(rounds), measure::<Arm64K4>(rounds)] {
        if let Err(error) = measured {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    }
}

type Space<'p, F> = AddressSpace<F, &'p Hosted>;

fn measure<F: Format<Input = Va>>(rounds: usize) -> Result<(), Box<dyn Error>> {
    let platform = Hosted::new(1024, 12);
    let mut space = Space::<F>::new(&platform).ok_or("no frame for the root")?;
    let mapping = Encoded::<F>::new(Mapping::new(Attrs::KERNEL_DATA).pages_only())?;
    let all = Span::new(Va::new(0), PAGES << 12)?;
    space.map(all, Pa::new(0), mapping)?;
    space.make_live();

    let upwards: Vec<u64> = (0..PAGES).collect();
    // A linear congruential generator of full period passes each page once.
    let scattered: Vec<u64> =
        std::iter::successors(Some(1), |page| Some((page * 0x5851_f42d + 0x1405_7b7f) % PAGES))
            .take(PAGES as usize)
            .collect();
    println!("{}", F::NAME);
    for (order, pages) in [("upwards", upwards), ("scattered", scattered)] {
        let [mut unmap, mut map, mut protect] = [const { Vec::new() }; 3];
        for _ in 0..rounds {
            unmap.push(each(&mut space, &pages, |gather, page| {
                let _ = gather.unmap(page, |_| ControlFlow::Continue(()))?;
                Ok(())
            })?);
            map.push(each(&mut space, &pages, |gather, page| {
                gather.map(page, Pa::new(page.start().get()), mapping)
            })?);
            protect.push(each(&mut space, &pages, |gather, page| {
                gather.protect(page, Change::new().write_protect())
            })?);
        }
        for (name, mut times) in [("unmap", unmap), ("map", map), ("protect", protect)] {
            times.sort_by(f64::total_cmp);
            println!("  {name:8}{order:10}{:6.1} ns", times[rounds / 2]);
        }
    }
    Ok(())
}

/// Edits each of the pages by a call of its own. Returns nanoseconds for each.
fn each<'p, F: Format<Input = Va>>(
    space: &mut Space<'p, F>,
    pages: &[u64],
    mut edit: impl FnMut(&mut Gather<'_, F, &'p Hosted>, Span<Va>) -> Result<(), EditError<Va>>,
) -> Result<f64, Box<dyn Error>> {
    let mut gather = space.gather();
    let started = Instant::now();
    for page in pages {
        edit(&mut gather, Span::new(Va::new(page << 12), 4096)?)?;
    }
    let elapsed = started.elapsed();
    gather.finish(|_| ());
    Ok(elapsed.as_secs_f64() * 1e9 / pages.len() as f64)
}
