//! The bare loop as a subject: it writes the same tables, and maps nothing.

use super::subject::{Course, Encoding, Leaf, Operation, Subject, Users, Work};
use crate::arena::Arena;
use tablewright_harness::bare::Tables;

/// Plain accesses to the bytes that the others build their tables in.
#[derive(Default)]
pub struct Bare(Option<(Tables, Work)>);

impl Bare {
    fn tables(&mut self) -> Result<&mut (Tables, Work), String> {
        self.0.as_mut().ok_or_else(|| "not begun".to_owned())
    }
}

impl Subject for Bare {
    fn encoding(&self) -> Encoding {
        Encoding::None
    }

    fn courses(&self) -> &'static [Course] {
        &[
            Course {
                users: Users::None,
                operation: Operation::Unmap,
                method: "load, store 0",
            },
            Course {
                users: Users::None,
                operation: Operation::Exchange,
                method: "xchg 0",
            },
        ]
    }

    fn begin(&mut self, arena: Arena, work: Work, _: Users) -> Result<(), String> {
        let tables = Tables::new(arena, work.tables(), work.entries());
        self.0 = Some((tables, work));
        Ok(())
    }

    fn map(&mut self) -> Result<(), String> {
        let (tables, work) = self.tables()?;
        tables
            .zero_and_fill(work.tables())
            .ok_or_else(|| "out of tables".to_owned())
    }

    fn protect(&mut self) -> Result<(), String> {
        self.tables()?.0.load_and_store();
        Ok(())
    }

    fn end(&mut self, course: Course) -> Result<(), String> {
        let (tables, _) = self.tables()?;
        match course.operation {
            Operation::Exchange => tables.exchange(),
            _ => tables.visit_and_clear(),
        }
        Ok(())
    }

    fn query(&self, _virtual_address: u64) -> Option<Leaf> {
        None
    }

    fn root(&self) -> Option<u64> {
        None
    }

    fn finish(&mut self) {
        if let Some((mut tables, _)) = self.0.take() {
            tables.give_back();
        }
    }
}
