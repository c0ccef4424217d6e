//! Sets where the image lies.
fn main() {
    println!("cargo::rustc-link-search={}", env!("CARGO_MANIFEST_DIR"));
    for argument in ["-Timage.ld", "--oformat=binary"] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
    println!("cargo::rerun-if-changed=image.ld");
}
