//! The structure of the source tree: modules, imports, layers, and the other measurements of `make
//! structure`. Sources are read as text in the form of rustfmt, without the compiler.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

mod code;
pub mod exceptions;
pub mod graph;
pub mod layers;
pub mod terminology;

pub use code::{Function, texts};

/// Packages of the checkout, their crates by name and root. Missing ones are skipped.
const ROOTS: [(&str, &str); 11] = [
    ("nvme", "nvme/src/lib.rs"),
    ("rdma", "rdma/src/lib.rs"),
    ("nvmfd-blockdev", "target/blockdev/src/lib.rs"),
    ("nvmfd-core", "target/core/src/lib.rs"),
    ("nvmfd-gateway", "target/gateway/src/lib.rs"),
    ("nvmfd", "target/src/lib.rs"),
    ("nvmfd (main)", "target/src/main.rs"),
    ("nvmfctl", "target/src/bin/nvmfctl/main.rs"),
    ("initiator", "initiator/src/lib.rs"),
    ("nvmf", "initiator/src/main.rs"),
    ("tests", "tests/src/lib.rs"),
];

/// Maximum of lines of a function of production code.
pub const FUNCTION_LINES_MAX: usize = 70;
/// Maximum of lines of a file without comments and unit tests.
pub const FILE_LINES_MAX: usize = 600;

/// Every crate of the checkout with its name, without those of single test programs.
///
/// # Errors
/// A source file cannot be read.
pub fn crates(checkout: &Path) -> io::Result<Vec<(&'static str, Crate)>> {
    let roots = ROOTS.iter().filter(|(_, root)| checkout.join(root).exists());
    roots.map(|(name, root)| Ok((*name, Crate::read(checkout, Path::new(root))?))).collect()
}

/// The kinds of threads that all crates except `tests` start, and the workers, with a file of each.
pub fn threads(crates: &[(&str, Crate)]) -> BTreeMap<String, String> {
    let read = crates.iter().filter(|(name, _)| *name != "tests").map(|(_, read)| read);
    let mut found = BTreeMap::new();
    for module in read.flat_map(|read| &read.modules) {
        let kinds = module.threads().into_iter().map(|name| format!("thread {name}"));
        let workers = module.workers().into_iter().map(|name| format!("worker {name}"));
        for line in kinds.chain(workers) {
            found.insert(line, module.file.display().to_string());
        }
    }
    found
}

/// A source file of a crate.
pub struct Module {
    /// Relative to the checkout.
    pub file: PathBuf,
    /// Module path: `["queue", "turn"]`; empty for the root.
    pub path: Vec<String>,
    /// Production code: without comments, unit tests and contents of string literals. One line for
    /// each line of the file, empty where there is none.
    pub code: Vec<String>,
    /// As `code`, with literals, and with comments on lines with code.
    text: Vec<String>,
    public: Vec<String>,
}

/// The modules of one crate, as declared by its root.
pub struct Crate {
    /// The root comes first.
    pub modules: Vec<Module>,
    by_path: BTreeMap<Vec<String>, usize>,
    /// Names that `use` brings into a module, if not defined there.
    aliases: Vec<BTreeMap<String, Vec<String>>>,
    uses: Vec<Vec<Use>>,
}

/// An item of the crate that a module names.
struct Use {
    path: Vec<String>,
    is_reexport: bool,
}

impl Crate {
    /// Reads the crate whose root is `root`, a path relative to `checkout`.
    ///
    /// # Errors
    /// A file that a module declaration names cannot be read.
    pub fn read(checkout: &Path, root: &Path) -> io::Result<Crate> {
        let mut modules = Vec::new();
        load(checkout, root, root.parent().unwrap_or(root), Vec::new(), &mut modules)?;
        let by_path: BTreeMap<_, _> =
            modules.iter().enumerate().map(|(i, module)| (module.path.clone(), i)).collect();
        let mut aliases = Vec::new();
        let mut uses = Vec::new();
        for module in &modules {
            let is_child = |name: &String| by_path.contains_key(&within(&module.path, [name]));
            let absolute = |path: &[String]| match path.first() {
                Some(first) if is_child(first) => Some(within(&module.path, path)),
                _ => absolute(&module.path, path),
            };
            let imports = code::imports(&module.code);
            let named = imports
                .iter()
                .filter_map(|import| Some((import.name.clone(), absolute(&import.path)?)));
            let named: BTreeMap<String, Vec<String>> = named.collect();
            // A name that was imported may begin a path as well.
            let absolute = |path: &[String]| match named.get(&path[0]).filter(|_| path.len() > 1) {
                Some(alias) => Some(within(alias, &path[1..])),
                None => absolute(path),
            };
            let inline = code::inline_paths(&module.code);
            let inline = inline.iter().filter_map(|path| absolute(path));
            let paths = imports.iter().filter_map(|import| {
                Some(Use { path: absolute(&import.path)?, is_reexport: import.is_reexport })
            });
            let inline = inline.map(|path| Use { path, is_reexport: false });
            uses.push(paths.chain(inline).collect());
            aliases.push(named);
        }
        Ok(Crate { modules, by_path, aliases, uses })
    }

    /// The module that defines the item of `path` (from the root of the crate), after re-exports.
    fn definition(&self, path: &[String], depth: usize) -> Option<usize> {
        let mut known = 0;
        while known < path.len() && self.by_path.contains_key(&path[..=known]) {
            known += 1;
        }
        let module = *self.by_path.get(&path[..known])?;
        let Some(name) = path.get(known) else { return Some(module) };
        match self.aliases[module].get(name) {
            Some(target) if depth < 8 && target[..] != *path => {
                let rest = target.iter().chain(&path[known + 1..]).cloned().collect::<Vec<_>>();
                self.definition(&rest, depth + 1).or(Some(module))
            }
            _ => Some(module),
        }
    }

    /// Imports between files, (from, to) as indices of `modules`, and whether one is only a
    /// re-export.
    pub fn imports(&self) -> BTreeMap<(usize, usize), bool> {
        let mut found = BTreeMap::new();
        for (from, uses) in self.uses.iter().enumerate() {
            for used in uses {
                if let Some(to) = self.definition(&used.path, 0).filter(|&to| to != from) {
                    *found.entry((from, to)).or_insert(true) &= used.is_reexport;
                }
            }
        }
        found
    }

    /// Imports between top-level modules (without the root), by name.
    pub fn top_level(&self) -> graph::Graph {
        let mut graph = graph::Graph::default();
        for module in &self.modules {
            if let [top, ..] = &module.path[..] {
                graph.add(top);
            }
        }
        for (from, to) in self.imports().into_keys() {
            let (from, to) = (&self.modules[from].path, &self.modules[to].path);
            if let ([from, ..], [to, ..]) = (&from[..], &to[..]) {
                graph.connect(from, to);
            }
        }
        graph
    }

    /// All functions of production code.
    pub fn functions(&self) -> impl Iterator<Item = (&Module, Function)> {
        let all = self.modules.iter();
        all.flat_map(|module| code::functions(&module.code).into_iter().map(move |f| (module, f)))
    }

    /// Functions above the maximum: file, name and number of lines.
    pub fn long_functions(&self) -> Vec<String> {
        let long = self.functions().filter(|(_, function)| function.lines > FUNCTION_LINES_MAX);
        long.map(|(m, f)| format!("{} {} {}", m.file.display(), f.name, f.lines)).collect()
    }

    /// Files above the maximum, and their numbers of lines.
    pub fn long_files(&self) -> Vec<String> {
        let long = self.modules.iter().filter(|module| module.lines() > FILE_LINES_MAX);
        long.map(|module| format!("{} {}", module.file.display(), module.lines())).collect()
    }

    /// Number of definitions of each type name.
    pub fn type_names(&self) -> BTreeMap<String, usize> {
        let mut names = BTreeMap::new();
        for (name, _) in self.modules.iter().flat_map(|module| code::type_names(&module.code)) {
            *names.entry(name).or_insert(0) += 1;
        }
        names
    }

    /// Files with an inherent `impl` of a type.
    pub fn files_with_impl(&self, name: &str) -> usize {
        let has = |line: &String| code::inherent_impl(line) == Some(name);
        self.modules.iter().filter(|module| module.code.iter().any(has)).count()
    }

    /// Functions of the trait `name`.
    pub fn trait_functions(&self, name: &str) -> usize {
        self.modules.iter().map(|module| code::trait_functions(&module.code, name)).sum()
    }

    /// Lines of production code that contain `text`.
    pub fn lines_with(&self, text: &str) -> usize {
        let code = self.modules.iter().flat_map(|module| &module.code);
        code.filter(|line| line.contains(text)).count()
    }

    /// Public modules of the root.
    pub fn public_modules(&self) -> usize {
        self.modules[0].public.len()
    }
}

impl Module {
    /// Lines with production code.
    pub fn lines(&self) -> usize {
        self.code.iter().filter(|line| !line.trim().is_empty()).count()
    }

    /// Names of the threads started here; the file if there is no name.
    fn threads(&self) -> Vec<String> {
        let text = self.text.join("\n");
        let builders = text.split("thread::Builder::new()").skip(1).map(|rest| {
            let name = rest.split_once(".name(").and_then(|(_, rest)| rest.split('"').nth(1));
            name.unwrap_or("").to_owned()
        });
        let nameless = text.matches("thread::spawn(").map(|_| String::new());
        let names = builders.chain(nameless);
        let file = self.file.display().to_string();
        names.map(|name| if name.is_empty() { file.clone() } else { name }).collect()
    }

    /// Worker threads started here.
    fn workers(&self) -> Vec<String> {
        let text = self.text.join("\n");
        let starts = text.split("WorkerThread::start(").skip(1);
        starts.map(|rest| rest.split('"').nth(1).unwrap_or("").to_owned()).collect()
    }

    /// File formats that this module writes or reads: their first line or word.
    pub fn formats(&self) -> Vec<String> {
        let first_lines = self.text.iter().flat_map(|line| line.split('"').skip(1).step_by(2));
        let first_lines = first_lines.filter(|literal| {
            let mut words = literal.split(' ');
            let version = words.next_back().unwrap_or("");
            let is_number = !version.is_empty() && version.bytes().all(|c| c.is_ascii_digit());
            // All kinds of records have one format.
            let is_record = literal.starts_with("nvmfd {} {}");
            is_record || is_number && words.next() == Some("nvmfd") && words.next().is_some()
        });
        let magic = self.text.iter().filter_map(|line| {
            let (_, rest) = line.split_once("const MAGIC: ")?;
            rest.split('"').nth(1)
        });
        first_lines.chain(magic).map(str::to_owned).collect()
    }

    /// Kinds of the records that this module defines.
    pub fn records(&self) -> Vec<String> {
        let kinds = self.text.iter().filter_map(|line| {
            line.trim_start().strip_prefix("const KIND: &'static str = \"")?.strip_suffix("\";")
        });
        kinds.map(str::to_owned).collect()
    }
}

/// A path below `base`.
fn within<'a>(base: &'a [String], rest: impl IntoIterator<Item = &'a String>) -> Vec<String> {
    base.iter().chain(rest).cloned().collect()
}

/// `path` as written in `module`, from the root of the crate; `None` if it leads elsewhere.
fn absolute(module: &[String], path: &[String]) -> Option<Vec<String>> {
    let mut base = match path.first().map(String::as_str)? {
        "crate" => Vec::new(),
        "self" => module.to_vec(),
        "super" => module[..module.len().checked_sub(1)?].to_vec(),
        _ => return None,
    };
    let mut rest = &path[1..];
    while rest.first().is_some_and(|part| part == "super") {
        base.pop()?;
        rest = &rest[1..];
    }
    base.extend_from_slice(rest);
    Some(base)
}

fn load(
    checkout: &Path,
    file: &Path,
    directory: &Path,
    path: Vec<String>,
    modules: &mut Vec<Module>,
) -> io::Result<()> {
    let text = fs::read_to_string(checkout.join(file))?;
    let code = code::production(&text);
    let declared = code::declared_modules(&code);
    let public = declared.iter().filter(|(_, public)| *public).map(|(name, _)| name.clone());
    let public = public.collect();
    let is_code = |line: &String| !line.trim().is_empty();
    let whole = text.lines().zip(&code).filter(|(_, code)| is_code(code));
    let text = whole.map(|(line, _)| line.to_owned()).collect();
    modules.push(Module { file: file.to_owned(), path: path.clone(), code, text, public });
    for (name, _) in declared {
        let within = within(&path, [&name]);
        let own = directory.join(&name);
        let flat = directory.join(format!("{name}.rs"));
        let file = if checkout.join(&flat).exists() { flat } else { own.join("mod.rs") };
        load(checkout, &file, &own, within, modules)?;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::structure::*;

    pub(super) fn written(files: &[(&str, &str)]) -> (tempfile::TempDir, Crate) {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let read = Crate::read(directory.path(), Path::new("lib.rs")).unwrap();
        (directory, read)
    }

    #[test]
    fn imports_lead_to_where_a_name_is_defined() {
        let (_directory, read) = written(&[
            ("lib.rs", "pub mod a;\nmod b;\nmod c;\n"),
            ("a.rs", "use crate::b::{self, Deep};\nfn f() {\n    crate::c::g();\n}\n"),
            ("b.rs", "pub(crate) use self::inner::Deep;\nmod inner;\n"),
            (
                "b/inner.rs",
                "pub(crate) struct Deep;\n#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n",
            ),
            ("c.rs", "//! use crate::a;\npub(crate) fn g() {\n    println!(\"crate::a::x\");\n}\n"),
        ]);
        let file = |i: usize| read.modules[i].file.display().to_string();
        let seen: Vec<_> = read.imports().keys().map(|&(a, b)| (file(a), file(b))).collect();
        let expected =
            [("a.rs", "b.rs"), ("a.rs", "b/inner.rs"), ("a.rs", "c.rs"), ("b.rs", "b/inner.rs")];
        let expected: Vec<_> = expected.map(|(a, b)| (a.to_owned(), b.to_owned())).to_vec();
        assert_eq!(seen, expected);
        assert_eq!(read.public_modules(), 1);
        assert_eq!(read.top_level().largest_cycle().len(), 1);
    }

    #[test]
    fn functions_and_files_one_line_too_long_are_found() {
        let function = |lines| format!("fn f() {{\n{}}}\n", "    g();\n".repeat(lines - 2));
        let file = |lines| "const A: u8 = 0;\n".repeat(lines);
        let (longest, longer) = (function(FUNCTION_LINES_MAX), function(FUNCTION_LINES_MAX + 1));
        let (largest, larger) = (file(FILE_LINES_MAX), file(FILE_LINES_MAX + 1));
        let (_directory, read) = written(&[
            ("lib.rs", "mod a;\nmod b;\nmod c;\nmod d;\n"),
            ("a.rs", &longest),
            ("b.rs", &longer),
            ("c.rs", &largest),
            ("d.rs", &larger),
        ]);
        assert_eq!(read.long_functions(), ["b.rs f 71"]);
        assert_eq!(read.long_files(), ["d.rs 601"]);
    }

    #[test]
    fn names_functions_and_impls_are_counted_in_production_code_alone() {
        let (_directory, read) = written(&[
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "struct Entry;\nimpl Entry {\n    fn one() {\n        two();\n    }\n}\n"),
            (
                "b.rs",
                "enum Entry {}\nimpl<T> Drop for Entry<T> {\n    fn drop() {}\n}\n#[cfg(test)]\nmod tests {\n    struct Entry;\n}\n",
            ),
        ]);
        assert_eq!(read.type_names()["Entry"], 2);
        assert_eq!(read.files_with_impl("Entry"), 1);
        let lengths: Vec<_> = read.functions().map(|(_, f)| (f.name, f.lines)).collect();
        assert_eq!(lengths, [("one".to_owned(), 3), ("drop".to_owned(), 1)]);
    }
}
