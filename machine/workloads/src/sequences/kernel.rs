//! A kernel's half that all roots share, where one root translates both halves.
//!
//! One operation is all of it: the half is made, user spaces beside it come, are used and go, and
//! what is mapped in the half comes and goes meanwhile. Its tables are never freed, and are left
//! behind.

use std::ops::ControlFlow;

use tablewright::shared::SharedSpace;
use tablewright::{
    AddressSpace, Attrs, Format, Half, KernelHalf, Level, Liveness, Mapping, Span, Va,
};
use tablewright_machine::{Mapper, Request, Tlbi};

use super::operations::Kind;
use super::world::{Guests, World};
use crate::dice::Dice;
use crate::platform::Faulty;

/// There are no guests, and a half for the kernel.
pub enum Halves {}

type User<'m, F> = AddressSpace<F, Faulty<'m>>;

impl<'m, F: Format<Input = Va>> Guests<'m, F> for Halves {
    type Local = ();

    fn make(
        _: &World<'m, F, Self>,
        space: SharedSpace<F, Faulty<'m>>,
    ) -> Result<Self, SharedSpace<F, Faulty<'m>>> {
        Err(space)
    }
    fn space(&self) -> &SharedSpace<F, Faulty<'m>> {
        match *self {}
    }
    fn into_space(self) -> SharedSpace<F, Faulty<'m>> {
        match self {}
    }
    fn operate(world: &World<'m, F, Self>, cpu: usize, kind: Kind, dice: &Dice) {
        if kind == Kind::Kernel {
            kernel(world, cpu, dice);
        }
    }
    fn lose(_: &World<'m, F, Self>, _: usize, _: &Dice, _: bool) -> bool {
        false
    }
    fn retire(_: &World<'m, F, Self>, _: usize) {}
    fn forget((): &()) {}
}

/// A root, which the machine knows by another number than the half's.
struct Attached<'m, F: Format<Input = Va>> {
    user: User<'m, F>,
    mapper: Mapper<'m>,
}

fn kernel<'m, F: Format<Input = Va>>(world: &World<'m, F, Halves>, cpu: usize, dice: &Dice) {
    let machine = world.machine;
    // Half of the root's entries have a table each: more than there is for a second.
    if machine.memory().frames() - machine.memory().used() < 280 {
        return;
    }
    let tables = world.control.tables.replace(u32::MAX);
    world.leaked.set(true);
    let plat = Faulty::new(machine, world.control);
    let space = AddressSpace::<F, _>::new(plat);
    let space = space.map(|space| space.with_id(world.number() as u16));
    if let Some(Ok(mut kernel)) = space.map(KernelHalf::new) {
        plat.mapper.attach(kernel.root(), Half::Lower, kernel.id());
        kernel.make_live(Liveness::Live);
        plat.mapper.load();
        // What is global of another space is remembered under this root as well.
        forget_all(world);
        live(world, &mut kernel, dice);
        machine.unload();
        plat.mapper.detach();
        forget_all(world);
    }
    world.locals[cpu].loaded.set(None);
    world.control.tables.set(tables);
}

fn forget_all<'m, F: Format<Input = Va>>(world: &World<'m, F, Halves>) {
    let machine = world.machine;
    machine.dsb_stores();
    machine.tlbi(Tlbi::ALL);
    machine.dsb();
}

/// A page of the half, or a window in it.
fn window<F: Format<Input = Va>>(dice: &Dice) -> Option<Span<Va>> {
    let page = 1u64 << F::PAGE_SHIFT;
    let start = u64::MAX << (F::INPUT_BITS - 1);
    let root = 1 << F::shift(F::root_level());
    let (at, size) = match dice.below(6) {
        0 => (start, root),
        1 => (start + (page << 9), page << 9),
        2 => (start + root, page),
        _ => (start + dice.below(4) * page, page),
    };
    Span::new(Va::new(at), size).ok()
}

fn live<'m, F: Format<Input = Va>>(
    world: &World<'m, F, Halves>,
    kernel: &mut KernelHalf<F, Faulty<'m>>,
    dice: &Dice,
) {
    let machine = world.machine;
    let mut users: Vec<Attached<'m, F>> = Vec::new();
    for _ in 0..8 + dice.below(16) {
        let Some(span) = window::<F>(dice) else {
            return;
        };
        match dice.below(10) {
            0..=2 => {
                let Some(page) = world.take_page() else {
                    continue;
                };
                let at = Span::new(span.start(), 1 << F::PAGE_SHIFT);
                let mapping = Mapping::new(Attrs::KERNEL_DATA).pages_only();
                let mapped = at.map(|at| kernel.gather().map(at, page, mapping));
                if !matches!(mapped, Ok(Ok(()))) {
                    world.give_back(page);
                }
            }
            3..=4 => {
                let batch = world.number();
                let mut held = Vec::new();
                let mut gather = kernel.gather();
                let unmapped = gather.unmap(span, |leaf| {
                    held.push(leaf);
                    ControlFlow::Continue(())
                });
                world.check(unmapped.is_ok(), || format!("{span}: {unmapped:?}"));
                let completed = gather.issue().complete();
                for leaf in held {
                    match completed.release(leaf) {
                        Ok(leaf) => world.out(batch, &leaf),
                        Err(_) => world.fail("a leaf is not released by its own flush"),
                    }
                }
                completed.finish(|leaf| world.out(batch, &leaf));
            }
            5 => {
                let mut gather = kernel.gather();
                let _full = gather.collapse(span, Level::new(dice.below(3) as u8), false);
                gather.finish(|_| ());
            }
            6 => {
                let Some(user) = kernel.user() else { continue };
                let mut user = user.with_id(world.number() as u16);
                let refused = user.map(span, world.far(0, 0, dice), Attrs::USER_DATA);
                world.check(refused.is_err(), || format!("a user's space maps {span}"));
                let low = Span::new(Va::new(1 << 30), 1 << 21);
                let _full = low.map(|low| user.map(low, world.far(0, 0, dice), Attrs::USER_DATA));
                user.make_live();
                let mapper = machine.new_space();
                mapper.attach(user.root(), Half::Lower, user.id());
                mapper.load();
                users.push(Attached { user, mapper });
            }
            7 if !users.is_empty() => {
                let Attached { mut user, mapper } = users.swap_remove(dice.index(users.len()));
                take_down(world, &mut user, mapper);
                let _freed = user.destroy(|_| ());
                kernel.platform().mapper.load();
            }
            _ => {
                let at = span.start().get();
                let mapped = kernel.query(span.start()).is_some();
                let found = machine.touch(Request::write(at)).is_ok();
                world.check(mapped == found, || {
                    format!("{at:#x} is mapped: {mapped}, and found: {found}")
                });
            }
        }
    }
    for Attached { mut user, mapper } in users {
        take_down(world, &mut user, mapper);
        let _freed = user.destroy(|_| ());
    }
    let mut gather = kernel.gather();
    let batch = world.number();
    let mut held = Vec::new();
    let start = u64::MAX << (F::INPUT_BITS - 1);
    let last = Va::new(u64::MAX);
    if let Ok(all) = Span::inclusive(Va::new(start), last) {
        let _unmapped = gather.unmap(all, |leaf| {
            held.push(leaf);
            ControlFlow::Continue(())
        });
    }
    let completed = gather.issue().complete();
    for leaf in held {
        if let Ok(leaf) = completed.release(leaf) {
            world.out(batch, &leaf);
        }
    }
    completed.finish(|leaf| world.out(batch, &leaf));
}

/// A user's space is not used any more.
fn take_down<'m, F: Format<Input = Va>>(
    world: &World<'m, F, Halves>,
    user: &mut User<'m, F>,
    mapper: Mapper<'m>,
) {
    mapper.detach();
    forget_all(world);
    // SAFETY: no processor has the root loaded, and everything is forgotten.
    unsafe { user.make_dead() };
}
