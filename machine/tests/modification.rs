//! Page-modification logging: what a processor writes down when it makes a page of its guest dirty
//! (SDM vol. 3C 29.3.6).

use tablewright::format::Ept;
use tablewright::{AddressSpace, Attrs, Half, Ipa, Level, Mapping, Pa, Platform, Span};
use tablewright_machine::{Architecture, Fault, Machine, Mapper, Memory, Request, Setup};

const PAGES: u64 = 1024;

fn machine(cpus: usize, dirty: bool) -> Machine {
    let architecture =
        Architecture { hardware_access: dirty, hardware_dirty: dirty, ..Architecture::ept() };
    let mut setup = Setup::new(architecture, Memory::new(32, 12, 1 << 30));
    setup.scheduler.cpus = cpus;
    Machine::new(setup)
}

/// Pages that can be written and are clean.
fn space<'m>(mapper: Mapper<'m>) -> AddressSpace<Ept<4>, Mapper<'m>> {
    let mut space = AddressSpace::<Ept<4>, _>::new(mapper).expect("a root");
    mapper.attach(space.root(), Half::Lower, 0);
    let span = Span::new(Ipa::new(0), PAGES << 12).expect("a span");
    let clean = Attrs { dirty: false, ..Attrs::GUEST_MEMORY };
    let mapping = Mapping::new(clean).largest(Level::PAGE);
    space.map(span, Pa::new(1 << 40), mapping).expect("a map");
    space
}

fn entry(mapper: Mapper<'_>, log: Pa, index: usize) -> u64 {
    // SAFETY: a page of the machine's, and an entry of it.
    unsafe { mapper.table(log, Level::PAGE).add(index).as_ref() }.load()
}

#[test]
fn what_becomes_dirty_is_logged_once_from_the_last_entry_down() {
    let machine = machine(1, true);
    let mapper = machine.new_space();
    let space = space(mapper);
    let log = machine.take_page().expect("a page");
    let done = machine.run(|_| {
        mapper.load();
        machine.log_modifications(Some(log), 511);
        for at in [0x7ff8, 0x3000, 0x7000] {
            assert!(machine.access(Request::write(at)).is_ok());
        }
        // Reading makes nothing dirty.
        assert!(machine.access(Request::read(0x9000)).is_ok());
    });
    assert!(done.is_ok());
    assert_eq!(machine.modification_index(0), 509);
    let entries: Vec<u64> = (509..512).map(|index| entry(mapper, log, index)).collect();
    assert_eq!(entries, [0, 0x3000, 0x7000]);
    let dirty = |at| space.query(Ipa::new(at)).expect("mapped").attrs().dirty;
    assert_eq!([dirty(0x3000), dirty(0x7000), dirty(0x9000)], [true, true, false]);
}

#[test]
fn a_log_that_is_full_stops_the_access_and_loses_nothing() {
    let machine = machine(1, true);
    let mapper = machine.new_space();
    let space = space(mapper);
    let log = machine.take_page().expect("a page");
    let done = machine.run(|_| {
        mapper.load();
        machine.log_modifications(Some(log), 511);
        for page in 0..512u64 {
            assert!(machine.access(Request::write(page << 12)).is_ok());
        }
        // The entry 0 was used: the index has gone below it.
        assert_eq!(machine.modification_index(0), u16::MAX);
        let full = machine.access(Request::write(512 << 12));
        assert_eq!(full, Err(Fault::LogFull));
        let dirty = |page: u64| space.query(Ipa::new(page << 12)).expect("mapped").attrs().dirty;
        assert!(dirty(511) && !dirty(512));
        // What is dirty already is written without the log, and what is read needs none.
        assert!(machine.access(Request::write(511 << 12)).is_ok());
        assert!(machine.access(Request::read(512 << 12)).is_ok());
        assert_eq!(machine.access(Request::write(512 << 12)), Err(Fault::LogFull));
        machine.log_modifications(Some(log), 511);
        assert!(machine.access(Request::write(512 << 12)).is_ok());
        assert!(dirty(512));
        assert_eq!(entry(mapper, log, 511), 512 << 12);
    });
    assert!(done.is_ok(), "{done:?}");
}

#[test]
fn each_processor_has_a_log_of_its_own_and_hardware_without_flags_has_none() {
    for dirty in [true, false] {
        let machine = machine(2, dirty);
        let mapper = machine.new_space();
        let _space = space(mapper);
        let logs = [(); 2].map(|()| machine.take_page().expect("a page"));
        let done = machine.run(|cpu| {
            mapper.load();
            machine.log_modifications(Some(logs[cpu.id()]), 511);
            let page = 10 + cpu.id() as u64;
            assert!(machine.access(Request::write(page << 12)).is_ok());
        });
        assert!(done.is_ok());
        for (cpu, log) in logs.into_iter().enumerate() {
            let logged = if dirty { (10 + cpu as u64) << 12 } else { 0 };
            assert_eq!(entry(mapper, log, 511), logged);
            assert_eq!(machine.modification_index(cpu), 511 - u16::from(dirty));
        }
    }
}
