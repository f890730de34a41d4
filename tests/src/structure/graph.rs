//! A directed graph of names: cycles, layers, and edges against the layers.

use std::collections::{BTreeMap, BTreeSet};

/// A directed graph of uses.
#[derive(Default)]
pub struct Graph {
    uses: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    /// Adds a node.
    pub fn add(&mut self, name: &str) {
        self.uses.entry(name.to_owned()).or_default();
    }

    /// `from` uses `to`. A node does not use itself.
    pub fn connect(&mut self, from: &str, to: &str) {
        self.add(to);
        if from != to {
            self.uses.entry(from.to_owned()).or_default().insert(to.to_owned());
        }
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.uses.len()
    }

    /// Number of edges.
    pub fn edges(&self) -> usize {
        self.uses.values().map(BTreeSet::len).sum()
    }

    /// Strongly connected components, each after those that it uses (Tarjan 1972).
    pub fn components(&self) -> Vec<Vec<&str>> {
        let mut search = Search::new(self);
        for name in self.uses.keys() {
            if !search.index.contains_key(name.as_str()) {
                search.visit(name);
            }
        }
        search.found
    }

    /// The largest strongly connected component; one node if there is no cycle.
    pub fn largest_cycle(&self) -> Vec<&str> {
        self.components().into_iter().max_by_key(Vec::len).unwrap_or_default()
    }

    /// Number of layers, if each component is one above the highest that it uses.
    pub fn layers(&self) -> usize {
        let mut of: BTreeMap<&str, usize> = BTreeMap::new();
        for component in self.components() {
            let below = component.iter().flat_map(|name| &self.uses[*name]);
            let below = below.filter_map(|name| of.get(name.as_str())).max();
            let layer = below.map_or(1, |layer| layer + component.len());
            // Within a cycle every node counts as a layer.
            let layer = if below.is_none() { component.len() } else { layer };
            of.extend(component.iter().map(|name| (*name, layer)));
        }
        of.into_values().max().unwrap_or(0)
    }

    /// Edges against a greedily found order (Eades, Lin and Smyth 1993): about as many as have to
    /// be cut to remove all cycles.
    pub fn upward(&self) -> usize {
        let mut left: BTreeSet<&str> = self.uses.keys().map(String::as_str).collect();
        let (mut top, mut bottom) = (Vec::new(), Vec::new());
        while !left.is_empty() {
            let out =
                |name: &str| self.uses[name].iter().filter(|to| left.contains(&to[..])).count();
            let into =
                |name: &str| left.iter().filter(|from| self.uses[**from].contains(name)).count();
            let next = if let Some(sink) = left.iter().find(|name| out(name) == 0) {
                bottom.push(*sink);
                *sink
            } else {
                let surplus = |name: &str| out(name).cast_signed() - into(name).cast_signed();
                let best = *left.iter().max_by_key(|name| surplus(name)).expect("not empty");
                top.push(best);
                best
            };
            left.remove(next);
        }
        top.extend(bottom.into_iter().rev());
        let place: BTreeMap<&str, usize> =
            top.into_iter().enumerate().map(|(i, n)| (n, i)).collect();
        let edges = self.uses.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
        edges.filter(|(from, to)| place[to.as_str()] < place[from.as_str()]).count()
    }
}

struct Search<'a> {
    graph: &'a Graph,
    index: BTreeMap<&'a str, usize>,
    low: BTreeMap<&'a str, usize>,
    stack: Vec<&'a str>,
    found: Vec<Vec<&'a str>>,
}

impl<'a> Search<'a> {
    fn new(graph: &'a Graph) -> Search<'a> {
        Search {
            graph,
            index: BTreeMap::new(),
            low: BTreeMap::new(),
            stack: Vec::new(),
            found: Vec::new(),
        }
    }

    fn visit(&mut self, name: &'a str) {
        let index = self.index.len();
        self.index.insert(name, index);
        self.low.insert(name, index);
        self.stack.push(name);
        for to in &self.graph.uses[name] {
            let reached = match self.index.get(to.as_str()) {
                None => {
                    self.visit(to);
                    self.low[to.as_str()]
                }
                Some(&index) if self.stack.contains(&to.as_str()) => index,
                Some(_) => continue,
            };
            let low = self.low[name].min(reached);
            self.low.insert(name, low);
        }
        if self.low[name] == index {
            let first = self.stack.iter().position(|other| *other == name).expect("on the stack");
            self.found.push(self.stack.split_off(first));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::structure::graph::*;

    fn graph(edges: &[(&str, &str)]) -> Graph {
        let mut graph = Graph::default();
        edges.iter().for_each(|(from, to)| graph.connect(from, to));
        graph
    }

    #[test]
    fn a_chain_has_a_layer_for_each_node_and_nothing_upward() {
        let chain = graph(&[("c", "b"), ("b", "a"), ("c", "a")]);
        assert_eq!((chain.layers(), chain.upward(), chain.largest_cycle().len()), (3, 0, 1));
    }

    #[test]
    fn a_cycle_is_found_with_the_edge_that_closes_it() {
        let cycle = graph(&[("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("c", "e")]);
        assert_eq!(cycle.largest_cycle().len(), 3);
        assert_eq!((cycle.upward(), cycle.layers()), (1, 5));
    }
}
