//! The book's figures in virtual time are what the program says.
//!
//! A block of `docs/` that begins with `$ tablewright` is run, and what it prints is compared.
//! `TRYCMD=overwrite cargo test -p tablewright-lab --test book` writes all of them anew.

#[test]
fn every_command_of_the_book_prints_what_the_book_says() {
    let book = trycmd::TestCases::new();
    book.case("../docs/*.md")
        .case("../README.md")
        .register_bin("tablewright", trycmd::cargo::cargo_bin!("tablewright"))
        .env("COLUMNS", "100")
        .timeout(std::time::Duration::from_secs(120));
}
