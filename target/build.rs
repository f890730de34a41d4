//! Stops a build that would put its output among the sources: Cargo's default build directory has
//! the name of this very directory, and `cargo clean` would delete it.

fn main() {
    let directory = |name| std::env::var_os(name).map(std::path::PathBuf::from).unwrap_or_default();
    let (out, package) = (directory("OUT_DIR"), directory("CARGO_MANIFEST_DIR"));
    // The packages nested in target/ have this program as well.
    let is_source = |path: &&std::path::Path| path.ends_with("target");
    let source = package.ancestors().find(is_source).unwrap_or(&package);
    // With a path below the package, which nested ones do not have, cargo builds them every time.
    println!("cargo::rerun-if-changed={}", source.join("build.rs").display());
    if out.starts_with(source) {
        println!(
            "cargo::error=the build directory lies in {}, which is source: build with the \
             .cargo/config.toml of the checkout (target-dir = \"build\")",
            source.display()
        );
        std::process::exit(1);
    }
}
