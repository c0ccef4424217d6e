//! Tells the program with which profile it was built.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // `<target>/<profile>/build/<package>/out`: there is no variable for a profile's name.
    let out = env::var("OUT_DIR").unwrap_or_default();
    let profile = Path::new(&out).ancestors().nth(3).and_then(Path::file_name);
    let profile = profile.unwrap_or_default().to_string_lossy();
    println!("cargo:rustc-env=TABLEWRIGHT_PROFILE={profile}");
}
