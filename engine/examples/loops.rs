//! One edit over as many pages as the command line says, for counting the instructions of its inner loop.
//!
//! `loops map|protect|contended|unmap|query PAGES`; without arguments, all of them over a few pages.

use std::hint::black_box;
use std::ops::ControlFlow;

use tablewright::format::X86_64;
use tablewright::hosted::Hosted;
use tablewright::{AddressSpace, Attrs, Change, EditError, Mapping, Pa, Perms, Span, Va};

const EDITS: [&str; 5] = ["map", "protect", "contended", "unmap", "query"];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => EDITS.iter().for_each(|edit| run(edit, 4096)),
        [edit, pages] if EDITS.contains(&edit.as_str()) => match pages.parse() {
            Ok(pages @ 1..=0x1000_0000) => run(edit, pages),
            _ => usage(),
        },
        _ => usage(),
    }
}

fn usage() {
    eprintln!("error: usage: loops [map|protect|contended|unmap|query PAGES]");
    std::process::exit(2);
}

fn run(edit: &str, pages: u64) {
    if let Err(error) = measure(edit, pages) {
        eprintln!("error: {edit}: {error}");
        std::process::exit(1);
    }
}

fn measure(edit: &str, pages: u64) -> Result<(), EditError<Va>> {
    // The same memory for each size, so that only the edit differs.
    let platform = Hosted::new(2048, 12);
    let mut space = AddressSpace::<X86_64<4>, _>::new(&platform).ok_or(EditError::OutOfTables)?;
    let all = Span::new(Va::new(0), pages << 12).map_err(|_| EditError::Misaligned)?;
    let untouched = Attrs {
        accessed: false,
        dirty: false,
        ..Attrs::KERNEL_DATA
    };
    let contended = edit == "contended";
    let attrs = if contended {
        untouched
    } else {
        Attrs::KERNEL_DATA
    };
    let mut flush = space.flush();
    let mapping = Mapping::new(attrs).pages_only();
    if edit == "map" {
        space.map(all, Pa::new(0), mapping, &mut flush)?;
        flush.finish(|_| ());
        return Ok(());
    }
    // Everything else is measured on top of a map whose share is subtracted by mapping the larger size always.
    let most = Span::new(Va::new(0), 524_288 << 12).map_err(|_| EditError::Misaligned)?;
    let whole = if pages > 524_288 { all } else { most };
    space.map(whole, Pa::new(0), mapping, &mut flush)?;
    space.make_live();
    match edit {
        "unmap" => {
            let progress = space.unmap(all, &mut flush, |_| ControlFlow::Continue(()))?;
            let mut sum = 0u64;
            flush.finish(|leaf| sum = sum.wrapping_add(leaf.frame().get()));
            black_box((sum, progress.is_done()));
        }
        "query" => {
            let mut sum = 0u64;
            space.walk(all, |leaf| {
                sum = sum.wrapping_add(leaf.frame().get());
                ControlFlow::Continue(())
            })?;
            black_box(sum);
            flush.finish(|_| ());
        }
        _ => {
            space.protect(all, Change::new().perms(Perms::READ), &mut flush)?;
            flush.finish(|_| ());
        }
    }
    Ok(())
}
