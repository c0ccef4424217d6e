//! Sets where images lie. They are loaded where they are linked to, and move nowhere.
fn main() {
    println!("cargo::rustc-link-search={}", env!("CARGO_MANIFEST_DIR"));
    println!("cargo::rustc-link-arg-bins=--no-pie");
    for program in ["tablewright-check-x86", "tablewright-hypervisor-x86"] {
        println!("cargo::rustc-link-arg-bin={program}=-Timage.ld");
    }
    // The file is loaded as it is.
    for argument in ["-Thostile.ld", "--oformat=binary"] {
        println!("cargo::rustc-link-arg-bin=hostile-x86={argument}");
    }
    println!("cargo::rerun-if-changed=image.ld");
    println!("cargo::rerun-if-changed=hostile.ld");
}
