//! Sets where the images lie. For the hypervisor `image.ld` is the startup crate's, and `memory.ld`
//! says where in memory.
fn main() {
    println!("cargo::rustc-link-search={}", env!("CARGO_MANIFEST_DIR"));
    for script in ["image.ld", "memory.ld"] {
        println!("cargo::rustc-link-arg-bin=tablewright-hypervisor=-T{script}");
    }
    for program in ["churn", "hostile", "small", "linear", "flushes", "formats", "smmu"] {
        for argument in [&format!("-T{program}.ld"), "--oformat=binary"] {
            println!("cargo::rustc-link-arg-bin={program}={argument}");
        }
        println!("cargo::rerun-if-changed={program}.ld");
    }
    println!("cargo::rerun-if-changed=memory.ld");
}
