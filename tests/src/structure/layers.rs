//! Layers of the source tree: a module uses modules of lower layers, and those of its own
//! directory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::{fs, io};

use super::exceptions::lines;
use super::{Crate, Module};

/// Layers of directories and modules.
pub struct Layers {
    /// The lowest layer is 0.
    layers: BTreeMap<String, usize>,
    /// Destinations of files that have not been moved yet.
    moves: BTreeMap<String, String>,
}

/// Layer of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place<'a> {
    name: &'a str,
    layer: usize,
}

impl Layers {
    /// The table of the checkout, `tests/structure/layers`, and `tests/structure/moves` while there
    /// is one.
    ///
    /// # Errors
    /// The table cannot be read, or has a duplicate entry.
    pub fn read(checkout: &Path) -> io::Result<Layers> {
        let directory = checkout.join("tests/structure");
        let moves = match fs::read_to_string(directory.join("moves")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            read => read?,
        };
        Layers::from(&fs::read_to_string(directory.join("layers"))?, &moves)
    }

    /// As [`Layers::read`], from the texts of both files.
    ///
    /// # Errors
    /// A directory or module has two layers, or a line of the moves has no destination.
    pub fn from(layers: &str, moves: &str) -> io::Result<Layers> {
        let mut table = BTreeMap::new();
        let from_below = lines(layers).collect::<Vec<_>>().into_iter().rev();
        for (layer, line) in from_below.enumerate() {
            for name in line.split_whitespace() {
                if table.insert(name.to_owned(), layer).is_some() {
                    return Err(io::Error::other(format!("{name} stands on two layers")));
                }
            }
        }
        let moves = lines(moves).map(|line| {
            let (from, to) = line.split_once('\t')?;
            Some((from.to_owned(), to.to_owned()))
        });
        let moves = moves.collect::<Option<_>>();
        let moves = moves.ok_or_else(|| io::Error::other("a move without a destination"))?;
        Ok(Layers { layers: table, moves })
    }

    /// The path of a file after all moves.
    pub fn moved<'a>(&'a self, file: &'a str) -> &'a str {
        self.moves.get(file).map_or(file, String::as_str)
    }

    /// Number of files that are still to be moved.
    pub fn moves_left(&self, checkout: &Path) -> usize {
        self.moves.keys().filter(|file| checkout.join(file).exists()).count()
    }

    /// The longest prefix of the path in the table.
    fn place(&self, file: &str) -> Option<Place<'_>> {
        let path = self.moved(file);
        let mut prefix = path.strip_suffix(".rs").unwrap_or(path);
        loop {
            if let Some((name, &layer)) = self.layers.get_key_value(prefix) {
                return Some(Place { name, layer });
            }
            (prefix, _) = prefix.rsplit_once('/')?;
        }
    }

    /// Modules without a layer.
    #[must_use]
    pub fn without_layer(&self, read: &Crate) -> Vec<String> {
        let files = read.modules.iter().map(file_of);
        files.filter(|file| self.place(file).is_none()).collect()
    }

    /// Imports upward or sideways: as in the list of exceptions, and with present paths. Re-exports
    /// of a directory's `mod.rs` do not count.
    pub fn upward(&self, read: &Crate) -> BTreeMap<String, String> {
        let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for ((from, to), is_reexport) in read.imports() {
            let (from, to) = (file_of(&read.modules[from]), file_of(&read.modules[to]));
            let (Some(above), Some(below)) = (self.place(&from), self.place(&to)) else { continue };
            let is_down = above == below || above.layer > below.layer;
            let is_face = is_reexport && self.is_face(&from, &to);
            if !is_down && !is_face {
                let line = format!("{} -> {}", self.moved(&from), below.name);
                found.entry(line).or_default().insert(format!("{from} imports {to}"));
            }
        }
        let joined = |places: BTreeSet<String>| Vec::from_iter(places).join(", ");
        found.into_iter().map(|(line, places)| (line, joined(places))).collect()
    }

    /// Whether one file is the `mod.rs` of the directory of the other.
    fn is_face(&self, face: &str, file: &str) -> bool {
        let face = self.moved(face);
        let own = ["/lib.rs", "/mod.rs", ".rs"].iter().find_map(|end| face.strip_suffix(end));
        let within = own.and_then(|own| self.moved(file).strip_prefix(own));
        within.is_some_and(|rest| rest.starts_with('/'))
    }

    /// As [`Layers::upward`], for every crate of the checkout.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn upward_of_all(&self, checkout: &Path) -> io::Result<BTreeMap<String, String>> {
        let crates = super::crates(checkout)?;
        Ok(crates.iter().flat_map(|(_, read)| self.upward(read)).collect())
    }
}

fn file_of(module: &Module) -> String {
    module.file.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::super::tests::written;
    use crate::structure::layers::*;

    const LAYERS: &str = "# from the top\nlib\nupper\nlower other\nlower/base\n";

    #[test]
    fn the_longest_prefix_determines_the_layer_also_of_moved_files() {
        let layers = Layers::from(LAYERS, "old.rs\tlower/base.rs\n").unwrap();
        let place = |file| layers.place(file).map(|place| (place.name, place.layer));
        assert_eq!(place("lower/a.rs"), Some(("lower", 1)));
        assert_eq!(place("lower/base/b.rs"), Some(("lower/base", 0)));
        assert_eq!(place("old.rs"), Some(("lower/base", 0)));
        assert_eq!(place("lowermost.rs"), None);
        assert!(Layers::from("a\nb a\n", "").is_err());
        assert!(Layers::from("a\n", "old.rs new.rs\n").is_err());
    }

    #[test]
    fn imports_up_and_sideways_are_found_and_no_others() {
        let (_directory, read) = written(&[
            ("lib.rs", "mod other;\nmod lower;\nmod upper;\npub use upper::Upper;\n"),
            ("upper.rs", "use crate::lower::a::A;\npub struct Upper;\n"),
            ("other.rs", "use crate::lower::Down;\nuse crate::lower;\npub use lower::a::A;\n"),
            ("lower.rs", "pub mod a;\nmod base;\npub use base::Down;\n"),
            ("lower/a.rs", "use super::base::Down;\npub struct A;\n"),
            ("lower/base.rs", "use crate::Upper;\npub struct Down;\n"),
        ]);
        let layers = Layers::from(LAYERS, "").unwrap();
        let upward: Vec<_> = layers.upward(&read).into_iter().collect();
        let expected = [
            ("lower/base.rs -> upper", "lower/base.rs imports upper.rs"),
            ("other.rs -> lower", "other.rs imports lower.rs, other.rs imports lower/a.rs"),
        ];
        assert_eq!(upward, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    }

    #[test]
    fn module_imports_resolve_to_where_their_names_are_defined() {
        let (_directory, read) = written(&[
            ("lib.rs", "mod lower;\nmod other;\n"),
            ("other.rs", "pub mod a;\n"),
            ("other/a.rs", "use crate::lower;\nfn f() -> lower::B {\n    B\n}\n"),
            ("lower.rs", "mod b;\npub use b::B;\n"),
            ("lower/b.rs", "pub struct B;\n"),
        ]);
        let layers = Layers::from("lib\nlower/b\nother\nlower\n", "").unwrap();
        let upward: Vec<_> = layers.upward(&read).into_keys().collect();
        assert_eq!(upward, ["other/a.rs -> lower/b"]);
    }
}
