//! What `docs/support.md` promises, held against what the target answers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use nvme::feature::{FeatureId, GetFeatures, Select};
use nvme::identify::{Cns, Identify};
use nvme::log::{GetLogPage, LogId};
use nvme::{AdminOpcode, IoOpcode, Sqe, Status};
use nvmfd::core::subsystem::Subsystem;
use nvmfd::core::subsystem::event_log::PersistentEventLog;
use nvmfd::core::subsystem::usage::Usage;

use crate::support::{World, admin, end_both, keyed, subsystem};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the checkout").to_owned()
}

/// The rows of all tables: their cells.
fn rows() -> Vec<Vec<String>> {
    let text = fs::read_to_string(root().join("docs/support.md")).expect("docs/support.md");
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect();
    let rows: Vec<Vec<String>> =
        text.lines().filter(|line| line.starts_with('|')).map(cells).collect();
    assert!(rows.len() > 50, "the tables are found");
    rows
}

/// Numbers as the documents write them: `0Dh`.
fn numbers(cell: &str) -> impl Iterator<Item = u8> + '_ {
    let words = cell.split(|c: char| !c.is_ascii_alphanumeric());
    let digits = words.filter_map(|word| word.strip_suffix('h').filter(|digits| digits.len() == 2));
    digits.filter_map(|digits| u8::from_str_radix(digits, 16).ok())
}

/// What rows that begin with this kind say is served.
fn promised(kind: &str) -> BTreeSet<u8> {
    let mut served = BTreeMap::new();
    for row in rows() {
        let Some(what) = row[1].strip_prefix(kind).filter(|rest| rest.starts_with(' ')) else {
            continue;
        };
        let refused = ["001h", "002h", "109h"].iter().any(|status| row[2].starts_with(status));
        for number in numbers(what) {
            let other = served.insert(number, !refused).filter(|before| *before == refused);
            assert_eq!(other, None, "rows contradict each other about {kind} {number:02X}h");
        }
    }
    served.into_iter().filter(|(_, served)| *served).map(|(number, _)| number).collect()
}

#[track_caller]
fn compare(kind: &str, served: &BTreeSet<u8>) {
    let promised = promised(kind);
    let hex = |of: Vec<&u8>| of.iter().map(|n| format!("{n:02X}h")).collect::<Vec<_>>().join(", ");
    let missing = hex(served.difference(&promised).collect());
    assert!(missing.is_empty(), "docs/support.md needs rows `| {kind} {missing} ..`");
    let untrue = hex(promised.difference(served).collect());
    assert!(untrue.is_empty(), "docs/support.md promises {kind} {untrue}, and it is refused");
}

/// Those of all 256 values that a controller does not refuse with `refusal`.
fn served(refusal: Status, command: impl Fn(u8) -> Sqe) -> BTreeSet<u8> {
    let mut world = World::new();
    // Where events can be kept, their log is there.
    let subsystem = subsystem();
    let usage =
        Arc::new(Usage::kept(PersistentEventLog::new(subsystem.nqn, None, sync_channel(1).0)));
    world.registry.publish(Arc::new(Subsystem { usage, ..subsystem }));
    let (mut queue, _) = admin(&mut world);
    let mut served = BTreeSet::new();
    for value in 0..=u8::MAX {
        world.send(&mut queue, &command(value).with_cid(value.into()), &[]);
        world.run(&mut queue);
        // Commands that wait for an event are served as well.
        let refused = world.completions.drain(..).any(|cqe| cqe.status.is(refusal));
        if !refused {
            served.insert(value);
        }
    }
    world.end(queue);
    served
}

#[test]
fn served_admin_functions_match_the_support_tables() {
    let opcodes = served(Status::INVALID_OPCODE, |opcode| Sqe::admin(AdminOpcode(opcode)));
    compare("admin opcode", &opcodes);
    let log = |lid| GetLogPage::new(LogId(lid), 0, 4).emit(keyed(0, 16));
    let mut logs = served(Status::INVALID_LOG_PAGE, log);
    // That of the other kind of controller, which has no other.
    assert!(logs.insert(LogId::DISCOVERY.0));
    compare("log page", &logs);
    let features = served(Status::INVALID_FIELD, |fid| {
        let get = GetFeatures { fid: FeatureId(fid), sel: Select::CAPABILITIES, nsid: 1, cdw11: 0 };
        get.emit(nvme::Sgl::NONE)
    });
    compare("feature", &features);
    let pages = served(Status::INVALID_FIELD, |cns| {
        Identify { cntid: u16::MAX, ..Identify::new(Cns(cns), 1) }.emit(keyed(0, 4096))
    });
    compare("CNS", &pages);
}

#[test]
fn served_io_opcodes_match_the_support_tables() {
    let mut served = BTreeSet::new();
    for opcode in 0..=u8::MAX {
        let (mut world, mut queue, admin, posted) = World::with_io_queue();
        let sqe = Sqe::io(IoOpcode(opcode), 1).with_sgl(keyed(0, 4096));
        world.send(&mut queue, &sqe, &[]);
        world.run(&mut queue);
        if !world.completions.iter().any(|cqe| cqe.status.is(Status::INVALID_OPCODE)) {
            served.insert(opcode);
        }
        end_both(world, queue, admin, posted);
    }
    compare("opcode", &served);
}

/// The names of all functions in the sources.
fn functions() -> BTreeSet<String> {
    let members = ["nvme", "rdma", "target", "initiator", "tests"];
    let mut directories: Vec<PathBuf> = members.iter().map(|member| root().join(member)).collect();
    let mut names = BTreeSet::new();
    while let Some(directory) = directories.pop() {
        for path in
            fs::read_dir(&directory).expect("a directory").map(|entry| entry.expect("it").path())
        {
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("text");
                let after = text.split("fn ").skip(1);
                let name = |rest: &str| rest.split(['(', '<']).next().unwrap_or(rest).to_owned();
                names.extend(after.map(name));
            }
        }
    }
    names
}

#[test]
fn every_test_named_in_the_support_tables_exists() {
    let functions = functions();
    let mut named = 0;
    for row in rows() {
        let Some(tests) = row.get(3).filter(|_| row[1] != "what" && !row[1].starts_with("---"))
        else {
            continue;
        };
        assert!(!tests.is_empty(), "no test for: {}", row[1]);
        for quoted in tests.split('`').skip(1).step_by(2) {
            let name = quoted.rsplit(": ").next().unwrap_or(quoted);
            let is_function = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            let exists = match name.starts_with("flow-") {
                true => root().join("tests/vm/guest").join(name).exists(),
                // A file, or an option of a flow.
                false => !is_function || functions.contains(name),
            };
            assert!(exists, "there is no test {name}, which is to show: {}", row[1]);
            named += 1;
        }
    }
    assert!(named > 50);
}
