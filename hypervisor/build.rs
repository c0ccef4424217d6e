//! Where the images lie. For the hypervisor `image.ld` is the startup crate's, and `memory.ld` says where in memory.
fn main() {
    println!("cargo::rustc-link-search={}", env!("CARGO_MANIFEST_DIR"));
    for script in ["image.ld", "memory.ld"] {
        println!("cargo::rustc-link-arg-bin=tablewright-hypervisor=-T{script}");
    }
    for argument in ["-Thostile.ld", "--oformat=binary"] {
        println!("cargo::rustc-link-arg-bin=hostile={argument}");
    }
    println!("cargo::rerun-if-changed=memory.ld");
    println!("cargo::rerun-if-changed=hostile.ld");
}
