//! One edit over as many pages as the command line says, for counting the instructions of its inner
//! loop.
//!
//! `loops
//! map|protect|contended|unmap|query|lookup|far|apart|fork|fault|relocate|native|replace|around|
//! mapped|exit-small|fork-small|unmap-sparse|protect-sparse|guest|walk|nothing PAGES
//! [arm64|riscv64]`, in a table of x86-64 if no other is named; without arguments, all of them over
//! a few pages, in each. With `-each` behind its name an edit is made for one page at a time, with
//! `-by-N` for `N`, in tables that exist, in a live space with one gather; `replace` has a gather
//! for each page. `far` looks up what is not near the page that was edited last, and `apart`
//! protects pages of which none is near the one before. `around` looks each page up and maps it.
//! `mapped` maps what is mapped, and is refused. `relocate` moves to addresses 8 GiB higher.
//! `native` sets a bit of the format's own. `exit-small` and `fork-small` run on programs of 16
//! pages in four places. The sparse ones unmap or protect a GiB with four pages far apart, each
//! with a gather of its own. `fault` maps a page, and `guest` looks a fault of a guest up and maps
//! it, page by page always, in tables of EPT; `walk` is what of it is not the engine's: the loop,
//! and the platform's own at the beginning and the end of a walk.

use std::hint::black_box;
use std::ops::ControlFlow;

use tablewright::format::{Arm64K4, Ept, Format, Sv48, X86_64};
use tablewright::guest::{Access, Backing, Fault, Guest, Slot, SlotCell};
use tablewright::shared::{Refused, SharedPlatform, SharedSpace};
use tablewright::{
    AddressSpace, Attrs, Change, EditError, Encoded, Ipa, Mapping, Pa, Perms, Span, Va,
};
use tablewright_hosted::{Hosted, Threads};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Edit {
    Map,
    Protect,
    Contended,
    Unmap,
    Query,
    Lookup,
    Far,
    Apart,
    Fork,
    Fault,
    Relocate,
    Native,
    Replace,
    Around,
    Mapped,
    ExitSmall,
    ForkSmall,
    UnmapSparse,
    ProtectSparse,
    Guest,
    Walk,
    Nothing,
}

const EDITS: [(&str, Edit); 22] = [
    ("map", Edit::Map),
    ("protect", Edit::Protect),
    ("contended", Edit::Contended),
    ("unmap", Edit::Unmap),
    ("query", Edit::Query),
    ("lookup", Edit::Lookup),
    ("far", Edit::Far),
    ("apart", Edit::Apart),
    ("fork", Edit::Fork),
    ("fault", Edit::Fault),
    ("relocate", Edit::Relocate),
    ("native", Edit::Native),
    ("replace", Edit::Replace),
    ("around", Edit::Around),
    ("mapped", Edit::Mapped),
    ("exit-small", Edit::ExitSmall),
    ("fork-small", Edit::ForkSmall),
    ("unmap-sparse", Edit::UnmapSparse),
    ("protect-sparse", Edit::ProtectSparse),
    ("guest", Edit::Guest),
    ("walk", Edit::Walk),
    ("nothing", Edit::Nothing),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => EDITS.iter().for_each(|(name, edit)| {
            for format in ["", "arm64", "riscv64"] {
                run(name, *edit, 4096, 4096, format);
                run(name, *edit, 4096, 1, format);
            }
        }),
        [edit, pages, format @ ..] => {
            let format = match format {
                [] => "",
                [format] if ["arm64", "riscv64"].contains(&format.as_str()) => format,
                _ => usage(),
            };
            // How many pages an edit has, if not all.
            let (name, by) = match (edit.strip_suffix("-each"), edit.split_once("-by-")) {
                (Some(name), _) => (name, Some(1)),
                (None, Some((name, by))) => (name, Some(by.parse().unwrap_or(0))),
                (None, None) => (edit.as_str(), None),
            };
            let known = EDITS.iter().find(|(known, _)| *known == name);
            match (pages.parse(), known) {
                (Ok(pages @ 1..=0x1000_0000), Some(&(_, edit))) if by != Some(0) => {
                    run(name, edit, pages, by.unwrap_or(pages), format);
                }
                _ => usage(),
            }
        }
        _ => usage(),
    }
}

fn usage() -> ! {
    eprintln!(
        "error: usage: loops [map|protect|contended|unmap|query|lookup|far|apart|fork|fault|\
         relocate|native|replace|around|mapped|exit-small|fork-small|unmap-sparse|\
         protect-sparse|guest|walk|nothing][-each|-by-N] PAGES [arm64|riscv64]"
    );
    std::process::exit(2);
}

fn run(name: &str, edit: Edit, pages: u64, by: u64, format: &str) {
    let measured = match edit {
        Edit::Guest | Edit::Walk => guest(pages, edit == Edit::Guest),
        _ if format == "arm64" => measure::<Arm64K4>(edit, pages, by),
        _ if format == "riscv64" => measure::<Sv48>(edit, pages, by),
        _ => measure::<X86_64<4>>(edit, pages, by),
    };
    if let Err(error) = measured {
        eprintln!("error: {name}: {error}");
        std::process::exit(1);
    }
}

/// Other memory for each page, as after a copy on write.
fn replace<F: Format<Input = Va>>(
    space: &mut AddressSpace<F, &Hosted>,
    pages: u64,
    mapping: Encoded<F>,
) -> Result<(), EditError<Va>> {
    let mut sum = 0u64;
    parts(pages, 1, |part| {
        let mut gather = space.gather();
        let frame = Pa::new(part.start().get() << 1);
        let held = gather.replace(part.start(), frame, mapping)?;
        let released = gather.flush_with(held, |_| ());
        sum = sum.wrapping_add(released.map_or(0, |leaf| leaf.frame().get()));
        Ok(())
    })?;
    black_box(sum);
    Ok(())
}

/// Looks each page up, and maps it.
fn around<F: Format<Input = Va>>(
    space: &mut AddressSpace<F, &Hosted>,
    pages: u64,
    mapping: Encoded<F>,
) -> Result<(), EditError<Va>> {
    let mut gather = space.gather();
    parts(pages, 1, |part| match gather.query(part.start()) {
        Some(_) => Ok(()),
        None => gather.map_page(part.start(), Pa::new(part.start().get()), mapping),
    })?;
    gather.finish(|_| ());
    Ok(())
}

/// Faults of a guest, in tables that exist; or all but what the engine does about them.
fn guest(pages: u64, mapped: bool) -> Result<(), String> {
    let said = |error: &dyn std::fmt::Debug| format!("{error:?}");
    let platform = Threads::new(4096, 12, 1);
    let mut cells = [const { SlotCell::new() }; 8];
    let space = AddressSpace::<Ept<4>, _>::new(&platform).ok_or("no table")?;
    let guest = Guest::new(SharedSpace::new(space).map_err(|_| "it is not empty")?, &mut cells);
    // A page of each table is mapped before what is measured, and as many tables for each size.
    let tables = pages.max(524_288).div_ceil(511);
    let memory = Span::new(Ipa::new(0), tables << 21).map_err(|error| said(&error))?;
    let slot = guest.insert(Slot::memory(memory, 0));
    slot.map_err(|error| said(&error))?;
    let mut gather = guest.gather();
    let mut fault = |page: u64| -> Result<(), String> {
        let fault = Fault::new(Ipa::new(page << 12), Access::Write);
        let request = guest.request(&fault).map_err(|error| said(&error))?;
        let backing = Backing::new(Pa::new(page << 12), 4096);
        let mut mapped = gather.map(&request, &backing);
        while let Err(Refused::NeedsTables(count)) = mapped {
            if !gather.top_up(count) {
                break;
            }
            mapped = gather.map(&request, &backing);
        }
        mapped.map(|_| ()).map_err(|refused| said(&refused))
    };
    (0..tables).try_for_each(|table| fault(table * 512))?;
    let scattered = |page: u64| page / 511 * 512 + page % 511 + 1;
    if mapped {
        return (0..pages).try_for_each(|page| fault(scattered(page)));
    }
    (0..pages).try_for_each(|page| {
        let page = scattered(page);
        let fault = Fault::new(Ipa::new(page << 12), Access::Write);
        let _ = black_box((fault, Backing::new(Pa::new(page << 12), 4096)));
        // A fault is mapped in two walks, one inside of the other.
        drop(platform.enter());
        drop(platform.enter());
        black_box(Ok(()))
    })
}

fn span(first: u64, pages: u64) -> Result<Span<Va>, EditError<Va>> {
    Span::new(Va::new(first << 12), pages << 12).map_err(|_| EditError::Misaligned)
}

fn measure<F: Format<Input = Va>>(edit: Edit, pages: u64, by: u64) -> Result<(), String> {
    let measured = match by {
        _ if edit == Edit::Mapped => mapped::<F>(pages),
        _ if matches!(edit, Edit::ExitSmall | Edit::ForkSmall) => programs::<F>(edit, pages),
        _ if matches!(edit, Edit::UnmapSparse | Edit::ProtectSparse) => sparse::<F>(edit, pages),
        1 => edit_pages::<F, true>(edit, pages, 1),
        by => edit_pages::<F, false>(edit, pages, by),
    };
    measured.map_err(|error| error.to_string())
}

/// Faults of pages that are mapped already.
fn mapped<F: Format<Input = Va>>(pages: u64) -> Result<(), EditError<Va>> {
    // A type of platform that is of this loop alone, so that what it calls is compiled for it, as
    // in a kernel that has one fault handler.
    let platform = &Hosted::new(4096, 12);
    let mut space = AddressSpace::<F, _>::new(&platform).ok_or(EditError::OutOfTables)?;
    let mapping = Encoded::<F>::new(Mapping::new(Attrs::KERNEL_DATA).pages_only())?;
    space.map(span(0, pages.max(524_288))?, Pa::new(0), mapping)?;
    space.make_live();
    let mut refused = 0u64;
    parts(pages, 1, |part| {
        let done = space.map_page(part.start(), Pa::new(part.start().get()), mapping);
        refused += u64::from(done.is_err());
        Ok(())
    })?;
    black_box(refused);
    Ok(())
}

/// Addresses of a small program's pages, four in each place: text, heap, a library, the stack.
const PLACES: [u64; 4] = [0x400, 0x600, 0x3f8_0000, 0x7ff_fff0];

/// Programs of 16 pages: as many as have so many pages exit, or are forked, place by place.
fn programs<F: Format<Input = Va>>(edit: Edit, pages: u64) -> Result<(), EditError<Va>> {
    // As many for each size, so that only the edit differs.
    let most = pages.max(1024) / 16;
    let platform = Hosted::new(8192, 12);
    let mapping = Encoded::<F>::new(Mapping::new(Attrs::USER_DATA).pages_only())?;
    let program = || {
        let mut space = AddressSpace::<F, _>::new(&platform).ok_or(EditError::OutOfTables)?;
        for place in PLACES {
            space.map(span(place, 4)?, Pa::new(place << 12), mapping)?;
        }
        space.make_live();
        Ok(space)
    };
    let mut sum = 0u64;
    if edit == Edit::ExitSmall {
        let mut spaces = (0..most).map(|_| program()).collect::<Result<Vec<_>, EditError<Va>>>()?;
        parts(pages / 16, 1, |_| {
            if let Some(mut space) = spaces.pop() {
                // SAFETY: no processor walks tables on the hosted platform.
                unsafe { space.make_dead() };
                let gone = space.destroy(|leaf| sum = sum.wrapping_add(leaf.frame().get()));
                debug_assert!(gone.is_ok());
            }
            Ok(())
        })?;
    } else {
        let mut parent = program()?;
        let change = Change::new().write_protect();
        let mut children = Vec::with_capacity(most as usize);
        parts(pages / 16, 1, |_| {
            let mut child = AddressSpace::<F, _>::new(&platform).ok_or(EditError::OutOfTables)?;
            for place in PLACES {
                // More than is mapped, as the places of a program are.
                let all = span(place & !0xff, 256)?;
                let (mut gather, mut into) = (parent.gather(), child.gather());
                gather.fork(all, change, &mut into, |leaf| {
                    sum = sum.wrapping_add(leaf.frame().get());
                })?;
                into.finish(|_| ());
                gather.finish(|_| ());
            }
            children.push(child);
            Ok(())
        })?;
    }
    black_box(sum);
    Ok(())
}

/// GiB in which four pages are mapped: as many as have so many pages are unmapped, or protected.
fn sparse<F: Format<Input = Va>>(edit: Edit, pages: u64) -> Result<(), EditError<Va>> {
    const GIB: u64 = 0x4_0000;
    let most = pages.max(1024) / 4;
    let platform = Hosted::new(8192, 12);
    let mut space = AddressSpace::<F, _>::new(&platform).ok_or(EditError::OutOfTables)?;
    let mapping = Encoded::<F>::new(Mapping::new(Attrs::USER_DATA).pages_only())?;
    for gib in 0..most {
        for page in [0x1_0020, 0x1_8000, 0x2_01ff, 0x3_0100] {
            // By `map`, so that `map_page` is compiled into the loop that is measured.
            space.map(span(gib * GIB + page, 1)?, Pa::new(page << 12), mapping)?;
        }
    }
    space.make_live();
    let mut sum = 0u64;
    parts(pages / 4, 1, |part| {
        let all = span(part.start().get() / 4096 * GIB, GIB)?;
        let mut gather = space.gather();
        match edit {
            Edit::UnmapSparse => {
                let progress = gather.unmap(all, |_| ControlFlow::Continue(()))?;
                debug_assert!(progress.is_done());
            }
            _ => gather.protect(all, Change::new().perms(Perms::READ))?,
        }
        gather.finish(|leaf| sum = sum.wrapping_add(leaf.frame().get()));
        Ok(())
    })?;
    black_box(sum);
    Ok(())
}

fn edit_pages<F: Format<Input = Va>, const EACH: bool>(
    edit: Edit,
    pages: u64,
    by: u64,
) -> Result<(), EditError<Va>> {
    // The same memory for each size, so that only the edit differs.
    let platform = Hosted::new(4096, 12);
    let mut space = AddressSpace::<F, _>::new(&platform).ok_or(EditError::OutOfTables)?;
    let untouched = Attrs { accessed: false, dirty: false, ..Attrs::KERNEL_DATA };
    let contended = edit == Edit::Contended;
    let attrs = if contended { untouched } else { Attrs::KERNEL_DATA };
    let mapping = Encoded::<F>::new(Mapping::new(attrs).pages_only())?;
    let maps = matches!(edit, Edit::Map | Edit::Fault | Edit::Around);
    if !maps || by < pages {
        // What is measured finds its tables there. Their share is subtracted by mapping the larger
        // size always.
        let most = pages.max(524_288);
        let mut gather = space.gather();
        gather.map(span(0, most)?, Pa::new(0), mapping)?;
        if maps {
            // Page by page, so that the tables stay.
            for page in 0..most {
                let _ = gather.unmap(span(page, 1)?, |_| ControlFlow::Continue(()))?;
            }
        }
        gather.finish(|_| ());
        space.make_live();
    }
    let mut sum = 0u64;
    if edit == Edit::Fault {
        return parts(pages, 1, |part| {
            space.map_page(part.start(), Pa::new(part.start().get()), mapping)
        });
    }
    if edit == Edit::Replace {
        return replace(&mut space, pages, mapping);
    }
    if edit == Edit::Around {
        return around(&mut space, pages, mapping);
    }
    if edit == Edit::Lookup {
        // What is looked up is near the page that was edited last.
        space.gather().protect_page(Va::new(0), Change::new().perms(attrs.perms))?;
    }
    if matches!(edit, Edit::Lookup | Edit::Far) {
        parts(pages, 1, |part| {
            if let Some(leaf) = space.query(part.start()) {
                let writable = leaf.attrs().perms.contains(Perms::WRITE);
                sum = sum.wrapping_add(leaf.frame().get() + u64::from(writable));
            }
            Ok(())
        })?;
        black_box(sum);
        return Ok(());
    }
    let mut child = AddressSpace::<F, _>::new(&platform).ok_or(EditError::OutOfTables)?;
    let mut gather = space.gather();
    let change = Change::new();
    match edit {
        Edit::Map if EACH => parts(pages, by, |part| {
            gather.map_page(part.start(), Pa::new(part.start().get()), mapping)
        })?,
        Edit::Map => {
            parts(pages, by, |part| gather.map(part, Pa::new(part.start().get()), mapping))?
        }
        // What the loop itself takes.
        Edit::Nothing => parts(pages, by, |part| {
            sum = sum.wrapping_add(black_box(part.start().get()));
            Ok(())
        })?,
        Edit::Fork => parts(pages, by, |part| {
            let mut into = child.gather();
            gather.fork(part, change.write_protect(), &mut into, |leaf| {
                sum = sum.wrapping_add(leaf.frame().get());
            })?;
            into.finish(|_| ());
            Ok(())
        })?,
        Edit::Unmap if EACH => parts(pages, by, |part| {
            sum += u64::from(gather.unmap_page(part.start())?.is_some());
            Ok(())
        })?,
        Edit::Unmap => parts(pages, by, |part| {
            let progress = gather.unmap(part, |_| ControlFlow::Continue(()))?;
            debug_assert!(progress.is_done());
            Ok(())
        })?,
        Edit::Query => parts(pages, by, |part| {
            gather.walk(part, |leaf| {
                sum = sum.wrapping_add(leaf.frame().get());
                ControlFlow::Continue(())
            })
        })?,
        Edit::Native => {
            let bit = F::NATIVE & F::NATIVE.wrapping_neg();
            parts(pages, by, |part| gather.protect(part, change.native(bit)))?
        }
        Edit::Relocate => {
            parts(pages, by, |part| gather.relocate(part, Va::new(part.start().get() + (8 << 30))))?
        }
        // Half of them lie a GiB higher.
        Edit::Apart => parts(pages, by, |part| {
            let page = part.start().get();
            let page = Va::new(page | (page & 0x1000) << 18);
            gather.protect_page(page, change.perms(Perms::READ))
        })?,
        _ if EACH => {
            parts(pages, by, |part| gather.protect_page(part.start(), change.perms(Perms::READ)))?
        }
        _ => parts(pages, by, |part| gather.protect(part, change.perms(Perms::READ)))?,
    }
    gather.finish(|leaf| sum = sum.wrapping_add(leaf.frame().get()));
    black_box(sum);
    Ok(())
}

/// Calls `edit` for so many pages at a time. A function of its own for each edit, as a kernel has
/// one.
#[inline(never)]
fn parts(
    pages: u64,
    by: u64,
    mut edit: impl FnMut(Span<Va>) -> Result<(), EditError<Va>>,
) -> Result<(), EditError<Va>> {
    let mut first = 0;
    while first < pages {
        edit(span(black_box(first), by.min(pages - first))?)?;
        first += by;
    }
    Ok(())
}
