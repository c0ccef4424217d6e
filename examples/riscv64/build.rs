//! Sets where the images lie: the kernel's and that of the check of formats.
fn main() {
    println!("cargo::rustc-link-search={}", env!("CARGO_MANIFEST_DIR"));
    println!("cargo::rustc-link-arg-bins=--no-pie");
    for (name, script) in [("example-riscv64", "image.ld"), ("formats-riscv64", "formats.ld")] {
        println!("cargo::rustc-link-arg-bin={name}=-T{script}");
        println!("cargo::rerun-if-changed={script}");
    }
}
