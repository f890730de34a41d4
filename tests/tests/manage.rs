//! The management interface of a real target, with a host that is connected while things change:
//! all in one process, over the soft fabric and real sockets.

#[path = "manage/damaged.rs"]
mod damaged;
#[path = "manage/unkept.rs"]
mod unkept;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use initiator::host::Range;
use initiator::{Host, HostOptions, Options, Provider};
use nvme::Nqn;
use nvmfd::control::{ControlRequest, run_for};
use nvmfd::overlay::EffectiveConfig;
use serde_json::{Value, json};
use tempfile::TempDir;

const NQN: &str = "nqn.2026-11.io.nvmfd:managed";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11";
/// Where daemons listen: each test has one of its own, because they run side by side.
const ADDRESS: &str = "127.0.44.1";
const OTHER_ADDRESS: &str = "127.0.45.1";

/// A daemon on threads of its own.
struct Daemon {
    directory: TempDir,
    asks: Sender<ControlRequest>,
    thread: JoinHandle<Result<(), String>>,
}

impl Daemon {
    fn start(address: &str) -> Daemon {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("state")).unwrap();
        let text = format!(
            "provider = \"soft\"\nstate_directory = {:?}\n[management]\nsocket = {:?}\n\
             [memory]\nreceives = 512\ndata = \"4MiB\"\n[[listener]]\naddress = \"{address}\"\n\
             [[subsystem]]\nnqn = \"{NQN}\"\nhosts = [\"{HOST}\"]\n\
             [[subsystem.namespace]]\nnsid = 1\nkind = \"ram\"\nsize = \"1MiB\"\n",
            directory.path().join("state"),
            directory.path().join("s")
        );
        std::fs::write(directory.path().join("nvmfd.toml"), text).unwrap();
        Daemon::begin(directory)
    }

    /// With the configuration and the state in a directory.
    fn begin(directory: TempDir) -> Daemon {
        let file = directory.path().join("nvmfd.toml");
        let declared = EffectiveConfig::load(&file).unwrap_or_else(|errors| panic!("{errors}"));
        let (asks, heard) = channel();
        let thread = spawn(move || run_for(declared, heard));
        let daemon = Daemon { directory, asks, thread };
        while UnixStream::connect(daemon.socket()).is_err() {
            assert!(!daemon.thread.is_finished(), "it serves");
            sleep(Duration::from_millis(5));
        }
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("s")
    }

    fn get(&self, path: &str) -> Value {
        let (status, value) = ask(&self.socket(), "GET", path, "");
        assert_eq!(status, 200, "{path}: {value}");
        value
    }

    fn change(&self, change: Value) -> (u16, Value) {
        let wanted = json!({"changes": [change]}).to_string();
        ask(&self.socket(), "POST", "/v1/changes", &wanted)
    }

    fn made(&self, change: Value) {
        let (status, outcome) = self.change(change);
        assert_eq!((status, &outcome["kept"]), (200, &json!(true)), "{outcome}");
    }

    fn stop(self) -> TempDir {
        self.asks.send(ControlRequest::Stop).unwrap();
        self.thread.join().expect("no panic").expect("stopped in good order");
        self.directory
    }
}

fn ask(socket: &Path, method: &str, path: &str, body: &str) -> (u16, Value) {
    let mut stream = UnixStream::connect(socket).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}")))
}

/// Waits for a condition; a machine may stall for long.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        sleep(Duration::from_millis(5));
    }
}

fn nqn() -> Nqn {
    NQN.parse().expect("a name")
}

fn host(source: &str) -> Result<Host, initiator::Error> {
    host_at(ADDRESS, source, nqn())
}

fn host_at(address: &str, source: &str, subsystem: Nqn) -> Result<Host, initiator::Error> {
    let at = format!("{address}:4420").parse().expect("an address");
    let name = HOST.parse().expect("a name");
    let options = Options { queue_entries: 32, ..Options::new(at, subsystem, name, [7; 16]) };
    let source = Some(source.parse().expect("an address"));
    Host::connect(
        options,
        HostOptions { provider: Provider::Soft, source, ..HostOptions::default() },
    )
}

fn range(nsid: u32) -> Range {
    Range { nsid, slba: 0, block_bytes: 4096 }
}

#[test]
fn connected_hosts_are_reported_and_survive_changes() {
    let daemon = Daemon::start(ADDRESS);
    assert_eq!(daemon.get("/v1/controllers"), json!([]));
    let mut one = host("127.0.44.2").expect("a connection");
    let controllers = daemon.get("/v1/controllers");
    let controller = &controllers[0];
    assert_eq!(controller["host"], HOST);
    assert_eq!(controller["source"], "127.0.44.2");
    assert_eq!(controller["local"], format!("{ADDRESS}:4420"));
    assert_eq!((&controller["state"], &controller["queue_depth"]), (&json!("live"), &json!(128)));
    assert_eq!(controller["io_queues"], one.session().io_queues());
    // A discovery controller is listed and not counted.
    let asking = host_at(ADDRESS, "127.0.44.7", Nqn::DISCOVERY).expect("a connection");
    assert_eq!(daemon.get("/v1/controllers").as_array().map(Vec::len), Some(2));
    assert_eq!(daemon.get("/v1/status")["controllers"], 1);
    assert_eq!(daemon.get("/v1/hosts")[0]["controllers"], 1);
    assert_eq!(daemon.get("/v1/listeners")[0]["controllers"], 1);
    asking.disconnect();

    // A client watches events.
    let mut watcher = UnixStream::connect(daemon.socket()).unwrap();
    write!(watcher, "GET /v1/watch HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut watched = BufReader::new(watcher).lines().map(|line| line.expect("a line"));
    let mut until = move |word: &str| {
        let found = watched.find(|line| line.contains(word));
        found.unwrap_or_else(|| panic!("{word} is told"))
    };
    until("\"watching\"");

    // A disk more, and a disk less, under a host that stays.
    let block = vec![0x5A; 4096];
    assert!(one.write(range(2), &block, false).is_err(), "there is none yet");
    daemon.made(json!({"change": "add_namespace", "subsystem": NQN, "nsid": 2,
                       "settings": {"kind": "ram", "size": "1MiB"}}));
    one.write(range(2), &block, false).expect("there is one now");
    assert!(until("\"changed\"").contains("+ namespace 2"));
    daemon.made(json!({"change": "remove_namespace", "subsystem": NQN, "nsid": 2}));
    assert!(one.write(range(2), &block, false).is_err(), "it is gone");
    one.write(range(1), &block, false).expect("the other is as it was");

    // What cannot be served changes nothing.
    let (status, problem) = daemon.change(json!({"change": "add_namespace", "subsystem": NQN,
                                                 "nsid": 3, "settings": {"path": "/nonexistent"}}));
    assert_eq!(status, 422, "{problem}");
    assert!(problem["remedy"].as_str().unwrap().contains("nothing was changed"));
    assert_eq!(daemon.change(json!({"change": "no such"})).0, 400);
    assert_eq!(daemon.get("/v1/namespaces").as_array().unwrap().len(), 1);
    one.write(range(1), &block, false).expect("as it was");

    // A controller is disconnected, or fails; whoever asks for one that is not there is told so.
    // The one before may be listed for a moment more.
    let id = |daemon: &Daemon, source: &str| {
        let all = daemon.get("/v1/controllers");
        let own = all.as_array().unwrap().iter().find(|each| each["source"] == source);
        own.expect("it is listed")["id"].clone()
    };
    for (what, cause, source) in
        [("disconnect", "disconnected", "127.0.44.8"), ("fail", "failed-on-purpose", "127.0.44.10")]
    {
        let mut other = host(source).expect("a connection");
        one.disconnect();
        let order = format!("/v1/controllers/{}/{what}", id(&daemon, source));
        let (status, outcome) = ask(&daemon.socket(), "POST", &order, "");
        assert_eq!(status, 200, "{outcome}");
        assert!(outcome["differences"][0].as_str().unwrap().contains(HOST));
        while other.write(range(1), &block, false).is_ok() {}
        eventually(cause, || daemon.get("/v1/why").to_string().contains(cause));
        drop(other);
        one = host("127.0.44.9").expect("it connects again");
        one.write(range(1), &block, false).expect("and is served");
        assert_eq!(
            ask(&daemon.socket(), "POST", &format!("/v1/controllers/99999/{what}"), "").0,
            404
        );
    }

    // A removed host is disconnected, and reconnects when it is admitted again.
    daemon.made(json!({"change": "deny_host", "subsystem": NQN, "host": HOST}));
    while one.write(range(1), &block, false).is_ok() {}
    let Err(refused) = host("127.0.44.4") else { panic!("it is let in") };
    assert!(!refused.to_string().contains("UDP"), "that is the target's word: {refused}");
    daemon.made(json!({"change": "allow_host", "subsystem": NQN, "host": HOST}));
    assert!(until("\"disconnected\"").contains(HOST));
    let mut again = host("127.0.44.5").expect("let in");
    assert!(until("\"connected\"").contains(HOST));
    again.write(range(1), &block, false).expect("served");
    assert_eq!(daemon.get("/v1/changes")["kept"].as_array().unwrap().len(), 4);
    again.disconnect();
    daemon.stop();
}

#[test]
fn write_protection_is_set_through_the_management_api() {
    let daemon = Daemon::start(OTHER_ADDRESS);
    let mut host = host_at(OTHER_ADDRESS, "127.0.45.6", nqn()).expect("a connection");
    let block = vec![0xA5; 4096];
    host.write(range(1), &block, false).expect("not protected yet");
    let protect = |nsid: u32, body: &str| {
        let path = format!("/v1/subsystems/{NQN}/namespaces/{nsid}/protection");
        ask(&daemon.socket(), "POST", &path, body)
    };
    let protected = || daemon.get("/v1/namespaces")[0]["write_protected"].clone();
    let (status, outcome) = protect(1, r#"{"state": "protected", "dry_run": true}"#);
    assert_eq!(status, 200, "{outcome}");
    assert!(
        outcome["differences"][0]
            .as_str()
            .unwrap()
            .ends_with("No Write Protect becomes Write Protect")
    );
    assert_eq!(protected(), false, "only told");
    host.write(range(1), &block, false).expect("only told");

    let (status, outcome) = protect(1, r#"{"state": "protected"}"#);
    assert_eq!((status, protected()), (200, json!(true)), "{outcome}");
    let refused = host.write(range(1), &block, false).expect_err("protected").to_string();
    assert!(refused.contains("Write Protect"), "{refused}");
    let mut read = vec![0; 4096];
    host.read(range(1), &mut read).expect("reads go on");
    assert_eq!(read, block);
    assert_eq!(protect(1, r#"{"state": "protected"}"#).1["differences"], json!([]));
    assert_eq!(protect(1, r#"{"state": "none"}"#).0, 200);
    host.write(range(1), &block, false).expect("no longer protected");

    // What lasts until a power cycle, lasts until then.
    assert_eq!(protect(1, r#"{"state": "until-power-cycle"}"#).0, 200);
    let (status, problem) = protect(1, r#"{"state": "none"}"#);
    assert_eq!(status, 409, "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains("Until Power Cycle"), "{problem}");
    assert!(host.write(range(1), &block, false).is_err());
    assert_eq!(protect(2, r#"{"state": "protected"}"#).0, 404);
    assert_eq!(protect(1, r#"{"state": "a bit"}"#).0, 400);

    // A namespace that the configuration makes read only needs none.
    daemon.made(json!({"change": "add_namespace", "subsystem": NQN, "nsid": 2,
                       "settings": {"kind": "ram", "size": "1MiB", "read_only": true}}));
    assert_eq!(protect(2, r#"{"state": "protected"}"#).0, 422);
    host.disconnect();
    daemon.stop();
}

#[test]
fn an_apply_is_all_or_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let socket = directory.path().join("s");
    let disks = |nsid: u32| {
        format!("[[subsystem.namespace]]\nnsid = {nsid}\nkind = \"ram\"\nsize = \"1MiB\"\n")
    };
    let text = |namespaces: &str| {
        format!(
            "provider = \"soft\"\n[management]\nsocket = {socket:?}\n[memory]\nreceives = 512\n\
             data = \"4MiB\"\n[[listener]]\naddress = \"127.0.44.3\"\n[[subsystem]]\n\
             nqn = \"{NQN}\"\nallow_any_host = true\n{namespaces}"
        )
    };
    let file = directory.path().join("nvmfd.toml");
    std::fs::write(&file, text(&disks(1))).unwrap();
    let (asks, heard) = channel();
    let declared = EffectiveConfig::load(&file).unwrap();
    let thread = spawn(move || run_for(declared, heard));
    while UnixStream::connect(&socket).is_err() {
        assert!(!thread.is_finished(), "it serves");
        sleep(Duration::from_millis(5));
    }
    let apply = |text: &str| {
        let wanted = json!({"changes": [{"change": "replace", "text": text}]}).to_string();
        ask(&socket, "POST", "/v1/changes", &wanted)
    };
    let before = ask(&socket, "GET", "/v1/namespaces", "").1;
    // The first two can be served, the third cannot.
    let bad = format!("{}{}", disks(2), disks(3))
        + &format!("[[subsystem.namespace]]\nnsid = 4\npath = {missing:?}\n");
    let (status, problem) = apply(&text(&bad));
    assert_eq!(status, 422, "{problem}");
    assert_eq!(ask(&socket, "GET", "/v1/namespaces", "").1, before);
    let (status, outcome) = apply(&text(&(disks(2) + &disks(3))));
    assert_eq!((status, &outcome["kept"]), (200, &json!(false)), "nowhere to keep it: {outcome}");
    let after = ask(&socket, "GET", "/v1/namespaces", "").1;
    assert_eq!((&after[0]["nsid"], &after[1]["nsid"]), (&json!(2), &json!(3)));
    // A reload reads the file, and what was changed since stays.
    assert_eq!(ask(&socket, "POST", "/v1/reload", "").0, 200);
    assert_eq!(ask(&socket, "GET", "/v1/namespaces", "").1, after);
    asks.send(ControlRequest::Stop).unwrap();
    thread.join().expect("no panic").expect("stopped in good order");
}

#[test]
fn the_last_listener_and_the_last_subsystem_are_removed_and_others_added() {
    let at = "127.0.44.20";
    let daemon = Daemon::start(at);
    let host = host_at(at, "127.0.44.21", nqn()).expect("a connection");
    daemon.made(json!({"change": "remove_subsystem", "nqn": NQN}));
    daemon.made(json!({"change": "remove_listener", "id": 1}));
    drop(host);
    let none = |daemon: &Daemon| {
        assert_eq!(daemon.get("/v1/listeners"), json!([]));
        assert_eq!(daemon.get("/v1/status")["subsystems"], 0);
        assert_eq!(ask(&daemon.socket(), "POST", "/v1/reload", "").0, 200);
    };
    none(&daemon);
    let daemon = Daemon::begin(daemon.stop());
    none(&daemon);
    // From nothing, one after the other.
    daemon.made(json!({"change": "add_listener", "id": 7, "settings": {"address": at}}));
    daemon.made(json!({"change": "add_subsystem", "nqn": NQN}));
    daemon.made(json!({"change": "add_namespace", "subsystem": NQN, "nsid": 1,
                       "settings": {"kind": "ram", "size": "1MiB"}}));
    assert!(host_at(at, "127.0.44.22", nqn()).is_err(), "it is not allowed yet");
    daemon.made(json!({"change": "allow_host", "subsystem": NQN, "host": HOST}));
    let mut host = host_at(at, "127.0.44.23", nqn()).expect("a connection");
    host.write(range(1), &[0x11; 4096], false).expect("served");
    host.disconnect();
    daemon.stop();
}
