//! Prints measurements of the structure of the source tree: `make structure`. With `upward` or
//! `names`, the present contents for the lists of exceptions in `tests/structure`.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use tests::structure::layers::Layers;
use tests::structure::{self, Crate, FILE_LINES_MAX, FUNCTION_LINES_MAX, terminology};

fn main() -> io::Result<()> {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match std::env::args().nth(1).as_deref() {
        None => {
            let mut crates = structure::crates(&checkout)?;
            table(&crates);
            rules(&checkout, &crates)?;
            crates.retain(|(name, _)| *name != "tests");
            sizes(&crates);
            lists(&crates);
        }
        Some("upward") => {
            let layers = Layers::read(&checkout)?;
            layers.upward_of_all(&checkout)?.keys().for_each(|line| println!("{line}"));
        }
        Some("names") => {
            terminology::found_in_all(&checkout)?.keys().for_each(|line| println!("{line}"));
        }
        Some(other) => return Err(io::Error::other(format!("{other}: neither upward nor names"))),
    }
    Ok(())
}

fn table(crates: &[(&str, Crate)]) {
    println!(
        "{:<14} {:>7} {:>7} {:>6} {:>6} {:>6} {:>7} {:>5} {:>6} {:>6}",
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
    for (name, read) in crates {
        let top = read.top_level();
        println!(
            "{name:<14} {:>7} {:>7} {:>6} {:>6} {:>6} {:>7} {:>5} {:>6} {:>6}",
            top.nodes(),
            top.edges(),
            top.largest_cycle().len(),
            top.upward(),
            top.layers(),
            read.public_modules(),
            read.type_names().values().filter(|&&times| times > 1).count(),
            read.modules.len(),
            lines(read),
        );
    }
    println!(
        "\nmodules: top-level ones. cycle: modules in the largest import cycle. upward: imports\n\
         between modules that have to be cut until there is no cycle. names: of types, defined\n\
         more than once. lines: with code, without comments and unit tests. Below, what is counted\n\
         is of all crates but `tests`, except where a rule holds for them all.\n"
    );
}

fn lines(read: &Crate) -> usize {
    read.modules.iter().map(structure::Module::lines).sum()
}

/// Exceptions from the rules checked by `tests/tests/guards.rs`.
fn rules(checkout: &Path, crates: &[(&str, Crate)]) -> io::Result<()> {
    let layers = Layers::read(checkout)?;
    let upward: Vec<_> =
        crates.iter().map(|(name, read)| (name, layers.upward(read).len())).collect();
    let all: usize = upward.iter().map(|(_, count)| count).sum();
    println!("imports up or sideways by the table of layers (tests/structure/layers): {all}");
    for (name, count) in upward.iter().filter(|(_, count)| *count > 0) {
        println!("  {name} {count}");
    }
    println!("files that have not been moved: {}", layers.moves_left(checkout));
    println!(
        "names with words that are not allowed (tests/structure/words): {}",
        terminology::found_in_all(checkout)?.len()
    );
    Ok(())
}

fn sizes(crates: &[(&str, Crate)]) {
    let sum =
        |count: &dyn Fn(&Crate) -> usize| crates.iter().map(|(_, it)| count(it)).sum::<usize>();
    println!("lines of production code: {}", sum(&lines));
    println!("`pub mod` in the roots of libraries: {}", sum(&Crate::public_modules));
    let core = crates.iter().find(|(name, _)| *name == "nvmfd-core");
    println!(
        "files with `impl QueuePair` of the target: {}",
        core.map_or(0, |(_, core)| core.files_with_impl("QueuePair"))
    );
    println!("functions of `trait Fabric`: {}", sum(&|it| it.trait_functions("Fabric")));
    println!(
        "places that start a thread: {}",
        sum(&|it| it.lines_with("thread::Builder::new()") + it.lines_with("thread::spawn("))
    );
}

fn lists(crates: &[(&str, Crate)]) {
    let modules = || crates.iter().flat_map(|(_, read)| &read.modules);
    let list = |what: &str, all: Vec<String>| {
        println!("{what}: {}", all.len());
        all.iter().for_each(|each| println!("  {each}"));
    };
    let of = |kind: &str| {
        let threads = structure::threads(crates).into_keys();
        threads.filter_map(|line| Some(line.strip_prefix(kind)?.to_owned())).collect()
    };
    list("kinds of threads", of("thread "));
    list("worker threads", of("worker "));
    let formats: BTreeSet<_> = modules().flat_map(structure::Module::formats).collect();
    list("formats of files, by their first words", Vec::from_iter(formats));
    list("kinds of records", modules().flat_map(structure::Module::records).collect());
    let functions = crates.iter().flat_map(|(_, read)| read.long_functions());
    list(&format!("functions above {FUNCTION_LINES_MAX} lines"), functions.collect());
    let files = crates.iter().flat_map(|(_, read)| read.long_files());
    list(&format!("files above {FILE_LINES_MAX} lines without tests"), files.collect());
}
