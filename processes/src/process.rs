//! A process, and what the engine is called for.

use core::fmt;

use tablewright::{
    AddressSpace, Attrs, Change, EditError, Encoded, Format, Inexpressible, Mapping, Pa, Perms,
    Platform, Span, Va,
};

use crate::area::{Area, Areas, Kind};

/// The source of processes' frames, and the count of each one's mappings: its *users*.
///
/// It is called for different processes by different processors at a time.
pub trait Memory {
    /// A frame full of zeros, with one user. `None` if there is none left.
    fn take(&self) -> Option<Pa>;

    /// A frame has one user more.
    fn share(&self, frame: Pa);

    /// A frame has one user less. Without any it is given back.
    fn release(&self, frame: Pa);

    /// How many users a frame has.
    fn users(&self, frame: Pa) -> u32;

    /// Makes a frame the copy of another.
    fn copy(&self, from: Pa, to: Pa);
}

impl<M: Memory> Memory for &M {
    fn take(&self) -> Option<Pa> {
        (**self).take()
    }
    fn share(&self, frame: Pa) {
        (**self).share(frame);
    }
    fn release(&self, frame: Pa) {
        (**self).release(frame);
    }
    fn users(&self, frame: Pa) -> u32 {
        (**self).users(frame)
    }
    fn copy(&self, from: Pa, to: Pa) {
        (**self).copy(from, to);
    }
}

/// The purpose of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Execute,
}

/// A fault of the program, as the processor reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The address.
    pub at: Va,
    /// The purpose.
    pub want: Want,
    /// Nothing was mapped there; otherwise it was mapped without the permission.
    pub missing: bool,
}

/// The work that was done for a fault: the program tries again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// There is a page now.
    Mapped,
    /// The page is the process's own copy now.
    Copied,
    /// The page, which has no other user any more, may be written.
    Owned,
    /// Nothing: another processor has seen to it, or the fault was of what is no longer in the
    /// tables.
    Already,
}

/// Why a call has failed. Nothing is mapped otherwise than before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessError {
    /// No frame is left.
    NoMemory,
    /// The process has nothing there, or may not do that there.
    Refused(Va),
    /// Part of the range is taken.
    Taken,
    /// The engine refuses.
    Edit(EditError<Va>),
}

impl From<EditError<Va>> for ProcessError {
    fn from(error: EditError<Va>) -> Self {
        match error {
            EditError::OutOfTables => Self::NoMemory,
            error => Self::Edit(error),
        }
    }
}

impl From<Inexpressible> for ProcessError {
    fn from(reason: Inexpressible) -> Self {
        Self::Edit(reason.into())
    }
}

impl fmt::Display for ProcessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMemory => write!(f, "no frame is left"),
            Self::Refused(at) => write!(f, "the process may not do that at {at}"),
            Self::Taken => write!(f, "part of the range is taken"),
            Self::Edit(error) => write!(f, "{error}"),
        }
    }
}

impl core::error::Error for ProcessError {}

/// A process: what it has asked for, and what is mapped of it.
///
/// Edited under its lock, by whichever processor takes the fault or makes the call; processors that
/// run it walk the tables meanwhile.
///
/// Dropping it frees nothing; [`exit`](Process::exit) does.
///
/// ```
/// use core::cell::RefCell;
/// use std::collections::BTreeMap;
/// use tablewright::{Pa, Span, Va, format::Arm64K4};
/// use tablewright_hosted::Hosted;
/// use tablewright_processes::{Fault, Handled, Memory, Process, ProcessError, Want};
///
/// #[derive(Default)]
/// struct Frames(RefCell<BTreeMap<u64, u32>>);
/// impl Memory for Frames {
///     fn take(&self) -> Option<Pa> {
///         let mut users = self.0.borrow_mut();
///         let frame = (1 << 32..).step_by(4096).find(|frame| !users.contains_key(frame))?;
///         users.insert(frame, 1);
///         Some(Pa::new(frame))
///     }
///     fn share(&self, frame: Pa) {
///         *self.0.borrow_mut().entry(frame.get()).or_default() += 1;
///     }
///     fn release(&self, frame: Pa) {
///         let mut users = self.0.borrow_mut();
///         match users.get_mut(&frame.get()) {
///             Some(count) if *count > 1 => *count -= 1,
///             _ => drop(users.remove(&frame.get())),
///         }
///     }
///     fn users(&self, frame: Pa) -> u32 {
///         self.0.borrow().get(&frame.get()).copied().unwrap_or(0)
///     }
///     fn copy(&self, _: Pa, _: Pa) {}
/// }
///
/// let (platform, frames) = (Hosted::new(64, 12), Frames::default());
/// let mut parent = Process::<Arm64K4, _, _>::new(&platform, 1, &frames)?;
/// parent.reserve(Span::new(Va::new(0x10_0000), 0x4000)?, true)?;
/// let write = |at, missing| Fault { at: Va::new(at), want: Want::Write, missing };
/// assert_eq!(parent.fault(write(0x10_1008, true)), Ok(Handled::Mapped));
///
/// // The rest of it, published once.
/// let published = platform.counts().publications;
/// assert_eq!(parent.populate(Span::new(Va::new(0x10_0000), 0x4000)?), Ok(3));
/// assert_eq!(platform.counts().publications, published + 1);
/// let beyond = parent.populate(Span::new(Va::new(0x10_3000), 0x2000)?);
/// assert_eq!(beyond, Err(ProcessError::Refused(Va::new(0x10_4000))));
///
/// let mut child = parent.fork(&platform, 2)?;
/// assert_eq!(child.fault(write(0x10_1008, false)), Ok(Handled::Copied));
/// assert_eq!(parent.fault(write(0x10_1008, false)), Ok(Handled::Owned));
/// parent.protect(Span::new(Va::new(0x10_1000), 0x1000)?, false)?;
/// let at = Va::new(0x10_1008);
/// assert_eq!(parent.fault(write(at.get(), false)), Err(ProcessError::Refused(at)));
///
/// // SAFETY: no processor has loaded either.
/// unsafe {
///     child.exit();
///     parent.exit();
/// }
/// assert!(frames.0.borrow().is_empty());
/// assert_eq!((platform.counts().tables, platform.counts().bad_frees), (0, 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Process<F: Format<Input = Va>, P: Platform + Clone, M: Memory> {
    space: AddressSpace<F, P>,
    memory: M,
    areas: Areas,
    /// Templates of pages: those that may be written, and those that may not.
    writable: Encoded<F>,
    constant: Encoded<F>,
}

/// Permissions where the process may write.
const WRITABLE: Perms = Attrs::USER_DATA.perms;

impl<F: Format<Input = Va>, P: Platform + Clone, M: Memory> Process<F, P, M> {
    /// A process with nothing in it, whose root may be loaded under this identifier.
    ///
    /// # Errors
    /// [`NoMemory`](ProcessError::NoMemory), and [`Edit`](ProcessError::Edit) where the format has
    /// no memory of users.
    pub fn new(platform: P, id: u16, memory: M) -> Result<Self, ProcessError> {
        let mut process = Self::unused(platform, id, memory)?;
        process.space.make_live();
        Ok(process)
    }

    /// One that no processor may load yet.
    fn unused(platform: P, id: u16, memory: M) -> Result<Self, ProcessError> {
        // Pages alone: each may get a frame of its own. Encoded once, and not at each fault.
        let pages = |attrs| Encoded::new(Mapping::new(attrs).pages_only());
        let (writable, constant) = (pages(Attrs::USER_DATA)?, pages(Attrs::USER_RODATA)?);
        let space = AddressSpace::new(platform).ok_or(ProcessError::NoMemory)?;
        Ok(Self { space: space.with_id(id), memory, areas: Areas::default(), writable, constant })
    }

    /// Its address space, to be looked at.
    pub fn space(&self) -> &AddressSpace<F, P> {
        &self.space
    }

    /// Maps the program: a page that may be executed. The process has one of the users that the
    /// frame has from now on.
    ///
    /// # Errors
    /// [`Taken`](ProcessError::Taken), [`NoMemory`](ProcessError::NoMemory),
    /// [`Edit`](ProcessError::Edit).
    pub fn map_text(&mut self, page: Span<Va>, frame: Pa) -> Result<(), ProcessError> {
        let kind = Kind::Text;
        if !self.areas.add(Area { span: page, kind }) {
            return Err(ProcessError::Taken);
        }
        let text = Mapping::new(Attrs::USER_TEXT).pages_only();
        Ok(self.space.map(page, frame, text)?)
    }

    /// mmap: a range that the kernel remembers. The engine is not asked.
    ///
    /// # Errors
    /// [`Taken`](ProcessError::Taken).
    pub fn reserve(&mut self, span: Span<Va>, writable: bool) -> Result<(), ProcessError> {
        let kind = Kind::Anonymous { writable };
        match self.areas.add(Area { span, kind }) {
            true => Ok(()),
            false => Err(ProcessError::Taken),
        }
    }

    /// mmap with `MAP_POPULATE`: maps what is missing of a range now, so that no fault comes, and
    /// publishes it once. Returns how many pages were mapped; those that were before a frame was
    /// missing stay.
    ///
    /// # Errors
    /// [`Refused`](ProcessError::Refused) where nothing is reserved, or the program;
    /// [`NoMemory`](ProcessError::NoMemory), [`Edit`](ProcessError::Edit).
    pub fn populate(&mut self, span: Span<Va>) -> Result<u64, ProcessError> {
        let mut gather = self.space.gather();
        let mut mapped = 0;
        let pages = (span.start().get()..=span.last().get()).step_by(1 << F::PAGE_SHIFT);
        for page in pages.map(Va::new) {
            let template = match self.areas.at(page).map(|area| area.kind) {
                Some(Kind::Anonymous { writable: true }) => self.writable,
                Some(Kind::Anonymous { writable: false }) => self.constant,
                Some(Kind::Text) | None => return Err(ProcessError::Refused(page)),
            };
            if gather.query(page).is_some() {
                continue;
            }
            let frame = self.memory.take().ok_or(ProcessError::NoMemory)?;
            if let Err(error) = gather.map_page(page, frame, template) {
                self.memory.release(frame);
                return Err(error.into());
            }
            mapped += 1;
        }
        gather.flush(|_| ());
        Ok(mapped)
    }

    /// The program has faulted.
    ///
    /// # Errors
    /// [`Refused`](ProcessError::Refused): a kernel ends the program, or has it told.
    /// [`NoMemory`](ProcessError::NoMemory), [`Edit`](ProcessError::Edit).
    pub fn fault(&mut self, fault: Fault) -> Result<Handled, ProcessError> {
        let refused = ProcessError::Refused(fault.at);
        let area = self.areas.at(fault.at).ok_or(refused)?;
        let writable = match (area.kind, fault.want) {
            (Kind::Anonymous { writable }, Want::Read) => writable,
            (Kind::Anonymous { writable: true }, Want::Write) => true,
            (Kind::Text, Want::Read | Want::Execute) => return Ok(Handled::Already),
            _ => return Err(refused),
        };
        let page = Va::new(fault.at.get() & !((1 << F::PAGE_SHIFT) - 1));
        if fault.missing {
            self.demand(page, writable)
        } else if fault.want == Want::Write {
            self.copy_on_write(page)
        } else {
            Ok(Handled::Already)
        }
    }

    fn demand(&mut self, page: Va, writable: bool) -> Result<Handled, ProcessError> {
        let template = if writable { self.writable } else { self.constant };
        let frame = self.memory.take().ok_or(ProcessError::NoMemory)?;
        // Nothing was there, so nothing is remembered: it is published, and that is all.
        match self.space.map_page(page, frame, template) {
            Ok(()) => Ok(Handled::Mapped),
            Err(error) => {
                self.memory.release(frame);
                match error {
                    EditError::AlreadyMapped(_) => Ok(Handled::Already),
                    error => Err(error.into()),
                }
            }
        }
    }

    fn copy_on_write(&mut self, page: Va) -> Result<Handled, ProcessError> {
        let Some(leaf) = self.space.query(page) else {
            return Ok(Handled::Already);
        };
        if leaf.attrs().perms.contains(WRITABLE) {
            return Ok(Handled::Already);
        }
        let shared = leaf.frame();
        // One user is this process, and only its own fork, under the same lock, makes it two.
        if self.memory.users(shared) == 1 {
            let own = Change::new().perms(WRITABLE);
            let mut gather = self.space.gather();
            gather.protect(page_at::<F>(page)?, own)?;
            // Where it stands: to finish it would move it, which is more than the edit.
            gather.flush(|_| ());
            return Ok(Handled::Owned);
        }
        let copy = self.memory.take().ok_or(ProcessError::NoMemory)?;
        self.memory.copy(shared, copy);
        let mut gather = self.space.gather();
        let held = match gather.replace(page, copy, self.writable) {
            Ok(held) => held,
            // Nothing has changed.
            Err(error) => {
                drop(gather);
                self.memory.release(copy);
                return Err(error.into());
            }
        };
        // Not before: until then a processor may read the old frame through what it remembers.
        if let Ok(old) = gather.flush_with(held, |_| ()) {
            self.memory.release(old.frame());
        }
        Ok(Handled::Copied)
    }

    /// Makes a child that has what this process has: each frame has one user more, and whichever of
    /// the two writes first gets a copy.
    ///
    /// # Errors
    /// [`NoMemory`](ProcessError::NoMemory), [`Edit`](ProcessError::Edit). There is no child then.
    pub fn fork(&mut self, platform: P, id: u16) -> Result<Self, ProcessError>
    where
        M: Clone,
    {
        let mut child = Self::unused(platform, id, self.memory.clone())?;
        match self.fork_into(&mut child) {
            Ok(()) => {
                child.space.make_live();
                Ok(child)
            }
            Err(error) => {
                child.free();
                Err(error)
            }
        }
    }

    fn fork_into(&mut self, child: &mut Self) -> Result<(), ProcessError> {
        let (mut gather, mut into) = (self.space.gather(), child.space.gather());
        for area in self.areas.iter() {
            let change = match area.kind {
                Kind::Text => Change::new(),
                Kind::Anonymous { .. } => Change::new().write_protect(),
            };
            // A user more before the child can run.
            let share = |leaf: tablewright::Leaf<F>| self.memory.share(leaf.frame());
            gather.fork(area.span, change, &mut into, share)?;
            // There is room: the child had nothing, and the parent's areas do not overlap.
            let _ = child.areas.add(*area);
        }
        into.finish(|_| ());
        // One invalidation for all areas.
        gather.finish(|_| ());
        Ok(())
    }

    /// mprotect: whether memory may be written.
    ///
    /// To take the permission away is an edit. To give it back is none: a page may be another
    /// process's as well, so that the write that comes has to fault in any case.
    ///
    /// # Errors
    /// [`Refused`](ProcessError::Refused) where the process has no memory of its own,
    /// [`NoMemory`](ProcessError::NoMemory), [`Edit`](ProcessError::Edit).
    pub fn protect(&mut self, span: Span<Va>, writable: bool) -> Result<(), ProcessError> {
        if let Some(at) = self.areas.missing(span) {
            return Err(ProcessError::Refused(at));
        }
        if !writable {
            let mut gather = self.space.gather();
            gather.protect(span, Change::new().write_protect())?;
            gather.finish(|_| ());
        }
        self.areas.set_writable(span, writable);
        Ok(())
    }

    /// exit: everything is forgotten that processors remember under its identifier, frames have one
    /// user less, and tables are freed.
    ///
    /// # Safety
    /// 1. No processor has the root loaded, and none loads it any more.
    /// 2. The identifier that the platform invalidates is that under which it was loaded.
    pub unsafe fn exit(mut self) {
        // SAFETY: no processor has the root loaded (1.), and the identifier is that of the platform
        // (2.).
        unsafe { self.space.retire() };
        self.free();
    }

    /// Frees a space that is dead.
    fn free(self) {
        let Self { space, memory, .. } = self;
        // One that is live is given back, and leaks.
        let _ = space.destroy(|leaf| memory.release(leaf.frame()));
    }
}

fn page_at<F: Format>(page: Va) -> Result<Span<Va>, ProcessError> {
    Span::new(page, 1 << F::PAGE_SHIFT).map_err(|_| ProcessError::Refused(page))
}
