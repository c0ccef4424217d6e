//! Sets where the image lies. It is loaded where it is linked to, and moves nowhere.
fn main() {
    println!("cargo::rustc-link-search={}", env!("CARGO_MANIFEST_DIR"));
    for argument in ["-Timage.ld", "--no-pie"] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
    println!("cargo::rerun-if-changed=image.ld");
}
