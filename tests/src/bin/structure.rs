//! Prints what can be measured of the structure of the source tree: `make structure`. With
//! `upward`, what the list of exceptions `tests/structure/upward` has to have.

use std::io;
use std::path::Path;

use tests::structure::Crate;
use tests::structure::layers::Layers;

/// Roots of the packages that are measured.
const ROOTS: [(&str, &str); 7] = [
    ("nvme", "nvme/src/lib.rs"),
    ("rdma", "rdma/src/lib.rs"),
    ("nvmfd", "target/src/lib.rs"),
    ("nvmfd (main)", "target/src/main.rs"),
    ("nvmfctl", "target/src/bin/nvmfctl/main.rs"),
    ("initiator", "initiator/src/lib.rs"),
    ("nvmf", "initiator/src/main.rs"),
];
const FUNCTION_LINES_MAX: usize = 70;
const FILE_LINES_MAX: usize = 600;

fn main() -> io::Result<()> {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    if std::env::args().nth(1).as_deref() == Some("upward") {
        let layers = Layers::read(&checkout)?;
        layers.upward_of_all(&checkout)?.keys().for_each(|line| println!("{line}"));
        return Ok(());
    }
    println!(
        "{:<13} {:>7} {:>7} {:>6} {:>6} {:>6} {:>7} {:>5} {:>6} {:>6}",
        "crate",
        "modules",
        "imports",
        "cycle",
        "upward",
        "layers",
        "pub mod",
        "names",
        "files",
        "lines"
    );
    let (mut lines, mut long, mut large) = (0, Vec::new(), Vec::new());
    let (mut queue, mut threads, mut fabric) = (0, 0, 0);
    for (name, root) in ROOTS.iter().filter(|(_, root)| checkout.join(root).exists()) {
        let read = Crate::read(&checkout, Path::new(root))?;
        let top = read.top_level();
        let own: usize = read.modules.iter().map(tests::structure::Module::lines).sum();
        println!(
            "{name:<13} {:>7} {:>7} {:>6} {:>6} {:>6} {:>7} {:>5} {:>6} {own:>6}",
            top.nodes(),
            top.edges(),
            top.largest_cycle().len(),
            top.upward(),
            top.layers(),
            read.public_modules(),
            read.type_names().values().filter(|&&times| times > 1).count(),
            read.modules.len(),
        );
        lines += own;
        queue += read.files_with_impl("Queue") + read.files_with_impl("QueuePair");
        threads += read.lines_with("thread::Builder::new()") + read.lines_with("thread::spawn(");
        fabric += read.trait_functions("Fabric");
        let functions = read.functions().filter(|(_, f)| f.lines > FUNCTION_LINES_MAX);
        long.extend(functions.map(|(m, f)| format!("{} {} {}", m.file.display(), f.name, f.lines)));
        let files = read.modules.iter().filter(|module| module.lines() > FILE_LINES_MAX);
        large.extend(files.map(|module| format!("{} {}", module.file.display(), module.lines())));
    }
    println!("\nlines of production code: {lines}");
    println!("files with `impl Queue` or `impl QueuePair`: {queue}");
    println!("functions of `trait Fabric`: {fabric}");
    println!("places that start a thread: {threads}");
    println!("functions above {FUNCTION_LINES_MAX} lines: {}", long.len());
    long.iter().for_each(|function| println!("  {function}"));
    println!("files above {FILE_LINES_MAX} lines without tests: {}", large.len());
    large.iter().for_each(|file| println!("  {file}"));
    println!(
        "\nmodules: top-level ones. cycle: modules in the largest import cycle. upward: imports\n\
         between modules that have to be cut until there is no cycle. names: of types, defined\n\
         more than once. lines: with code, without comments and unit tests."
    );
    Ok(())
}
