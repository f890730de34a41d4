mod in_flight;
mod openapi;
mod origins;
mod token;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use nix::sys::stat::makedev;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;

use crate::TargetView;
use crate::api::{GatewayConfigError, GatewayGroup, GatewayShared, NamespaceState};
use crate::blockdev::{FileSystemSpace, SpaceState};
use crate::config::Config;
use crate::control::handle::RunningConfig;
use crate::control::http::*;
use crate::core::message;
use crate::core::registry::{Change, Registry};
use crate::core::shared::Shared;
use crate::core::subsystem::lba_format::Progress;
use crate::core::subsystem::ns_management::{Management, UnavailableNamespace};
use crate::overlay::EffectiveConfig;
use crate::provision::devices::DeviceTable;
use crate::state::ns_catalog::tests::sample;
use crate::worker::Workers;

const TEXT: &str = r#"
[[listener]]
address = "127.0.0.1"
ana = { 2 = "inaccessible" }

[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:a"
hosts = ["nqn.2026-11.org.example:h"]
[[subsystem.namespace]]
nsid = 1
kind = "null"
size = "1GiB"
[[subsystem.namespace]]
nsid = 3
kind = "ram"
size = "1MiB"
eui64 = "0001020304050607"
hosts = []
"#;

/// The interface of a target without reactors.
struct Stage {
    directory: TempDir,
    config: Config,
    managed: ControlHandle,
}

fn stage(management: &str) -> Stage {
    stage_with(management, Vec::new())
}

/// As [`stage`], of a target with these reactors.
fn stage_with(management: &str, reactors: Vec<message::Sender>) -> Stage {
    stage_of(reactors, |_| management.to_owned())
}

/// As [`stage_with`], of a section that names files in the directory.
fn stage_of(reactors: Vec<message::Sender>, management: impl FnOnce(&Path) -> String) -> Stage {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let management = management(directory.path());
    let text = format!("{TEXT}[management]\nsocket = {socket:?}\n{management}");
    let file = directory.path().join("nvmfd.toml");
    std::fs::write(&file, text).unwrap();
    let declared = EffectiveConfig::load(&file).unwrap();
    let config = declared.config().clone();
    let registry = Arc::new(Registry::new(reactors, 4, 1 << 20));
    let view = TargetView {
        gateway: Some(Arc::default()),
        monitor: None,
        shared: Arc::new(Shared::new(Arc::clone(&registry), Workers::default(), SystemTime::now)),
        registry,
        pending: Arc::default(),
        reactors: Vec::new(),
        provider: "soft".to_owned(),
        pool_bytes: 1 << 20,
        started: Instant::now(),
    };
    let running = watch::channel(Arc::new(RunningConfig::new(declared))).1;
    // No requests are executed here.
    let managed = ControlHandle::new(view, running, mpsc::channel(1).0);
    Stage { directory, config, managed }
}

impl Stage {
    fn socket(&self) -> std::path::PathBuf {
        self.directory.path().join("s")
    }

    fn open(&self) -> Result<Server, String> {
        Server::open(&self.config.management, &self.managed)
    }

    /// Runs `visitor` while the interface is open.
    fn visit<T: Send + 'static>(&self, visitor: impl FnOnce(&Path) -> T + Send + 'static) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let _server = self.open().unwrap();
            let socket = self.socket();
            spawn_blocking(move || visitor(&socket)).await.unwrap()
        })
    }
}

fn ask(mut stream: impl Read + Write, head: &str) -> (u16, Value) {
    write!(stream, "{head}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}")))
}

/// Gets a response that is not JSON.
fn text(socket: &Path, path: &str) -> String {
    accepting(socket, path, "*/*")
}

/// As [`text`], of one of the accepted types.
fn accepting(socket: &Path, path: &str, types: &str) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nAccept: {types}");
    write!(stream, "{head}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn get(socket: &Path, path: &str) -> (u16, Value) {
    ask(UnixStream::connect(socket).unwrap(), &format!("GET {path} HTTP/1.1\r\nHost: x"))
}

/// The request is dropped if it has not begun by then.
#[test]
fn the_wait_for_a_change_ends_with_the_connection_of_its_client() {
    let stage = stage("");
    let declared = EffectiveConfig::load(&stage.directory.path().join("nvmfd.toml")).unwrap();
    let running = watch::channel(Arc::new(RunningConfig::new(declared))).1;
    let (orders, mut queued) = mpsc::channel(1);
    let managed = ControlHandle::new(stage.managed.view().clone(), running, orders);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let _server = Server::open(&stage.config.management, &managed).unwrap();
        let mut stream = UnixStream::connect(stage.socket()).unwrap();
        let body = "{\"changes\":[]}";
        let head = format!("POST /v1/changes HTTP/1.1\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all((head + body).as_bytes()).unwrap();
        let mut order = queued.recv().await.unwrap();
        assert!(!order.answer.is_closed());
        drop(stream);
        let patience = Duration::from_secs(60);
        tokio::time::timeout(patience, order.answer.closed()).await.expect("closed");
    });
}

#[test]
fn a_draining_daemon_is_not_ready() {
    let stage = stage("");
    stage.managed.view().registry.leave();
    stage.visit(|socket| {
        let (status, problem) = get(socket, "/readyz");
        assert_eq!(status, 503);
        assert!(problem["detail"].as_str().unwrap().contains("is stopping"), "{problem}");
        assert_eq!(get(socket, "/v1/status").1["degraded"][0], problem["detail"]);
    });
}

#[test]
fn refusals_of_malformed_requests_are_problem_details() {
    stage("").visit(|socket| {
        for path in ["/v1/subsystems/%ff", "/v1/watch?events=0", "/v1/watch?events=a"] {
            let (status, problem) = get(socket, path);
            assert_eq!((status, &problem["status"]), (400, &json!(400)), "{path}: {problem}");
        }
        let stream = UnixStream::connect(socket).unwrap();
        let (status, problem) = ask(stream, "POST /v1/controllers/a/fail HTTP/1.1\r\nHost: x");
        assert_eq!(status, 400);
        assert!(problem["detail"].as_str().unwrap().contains("`a`"), "{problem}");
    });
}

/// The served state may differ from the configured one.
#[test]
fn degraded_and_missing_objects_are_reported_in_lists_and_metrics() {
    let directory = tempfile::tempdir().unwrap();
    let more = format!(
        "[[listener]]\naddress = \"127.0.0.2\"\n[[subsystem]]\nnqn = \
         \"nqn.2026-11.io.nvmfd:b\"\nallow_any_host = true\n[subsystem.managed]\ndirectory = \
         {:?}\nquota = \"4MiB\"\nnamespaces = 3\nhosts = [\"nqn.2026-11.org.example:h\"]\n",
        directory.path()
    );
    let stage = stage(&more);
    let mut configs = stage.config.subsystems.clone();
    let managed = configs[1].managed.clone().unwrap();
    let missing = configs[0].namespaces.remove(1).nsid;
    let mut more = configs[0].namespaces[0].clone();
    (more.nsid, more.uuid) = (2, uuid::Uuid::max());
    configs[0].namespaces.push(more);
    let stores = DeviceTable::default().next(&configs).unwrap();
    let [mut served, mut made] = [0, 1].map(|at| stores.subsystem(&configs[at], Arc::default()));
    served.namespaces[0].geometry.power_fail_atomic_bytes = 512;
    served.namespaces[1].geometry.power_fail_atomic_bytes = 0;
    let health = |nsid| &served.namespace(nsid).unwrap().health;
    assert!(health(1).set_down());
    health(1).allocation().set_allocated_bytes(8192);
    let space = FileSystemSpace {
        device: makedev(253, 1),
        size_bytes: 1000,
        free_bytes: 20,
        unallocated_bytes: 40,
        state: SpaceState::Low,
    };
    for nsid in [1, 2] {
        health(nsid).allocation().set_file_system(space);
    }
    assert!(health(2).fail_sync(nvme::Status::WRITE_FAULT));
    assert!(health(2).set_detached(Some(crate::blockdev::Detached::Replaced)));
    let [lost, pending] = [(7, false), (3, true)].map(|(nsid, is_pending)| {
        let entry = sample().entries.remove(&nsid).unwrap();
        UnavailableNamespace { nsid, entry, is_pending }
    });
    let management = Management {
        grant: managed.grant(),
        allocated: Vec::new(),
        absent: vec![pending, lost],
        used_bytes: 0,
        images: [(3, "rbd/3".to_owned())].into(),
    };
    made.management = Some(Arc::new(management));
    let listeners = Some(stage.config.listeners[..1].to_vec());
    let subsystems = vec![Arc::new(served), Arc::new(made)];
    let registry = &stage.managed.view().registry;
    registry.change(Change { subsystems, listeners, ..Change::default() });
    let (metrics, all, status) = stage.visit(|socket| {
        let all = get(socket, "/v1/namespaces").1;
        let (code, problem) = get(socket, "/readyz");
        assert!(code == 503 && problem["detail"].as_str().unwrap().contains("7 of"), "{problem}");
        (text(socket, "/metrics"), all, get(socket, "/v1/status").1)
    });
    let (a, b) = ("nqn.2026-11.io.nvmfd:a", "nqn.2026-11.io.nvmfd:b");
    let expected = [
        (a, 1, "down"),
        (a, missing, "pending"),
        (a, 2, "sync_failed"),
        (b, 3, "pending"),
        (b, 7, "lost"),
    ];
    let has = |line: &str| assert!(metrics.lines().any(|own| own == line), "{line}\n{metrics}");
    assert_eq!(all.as_array().unwrap().len(), expected.len(), "{all}");
    for ((subsystem, nsid, state), told) in expected.into_iter().zip(all.as_array().unwrap()) {
        let found = (&told["subsystem"], &told["nsid"], &told["state"]);
        assert_eq!(found, (&subsystem.into(), &nsid.into(), &state.into()));
        for other in NamespaceState::ALL.map(NamespaceState::name) {
            let labels = format!("subsystem=\"{subsystem}\",nsid=\"{nsid}\",state=\"{other}\"");
            has(&format!("nvmfd_namespace_state{{{labels}}} {}", u8::from(other == state)));
        }
    }
    has("nvmfd_config_last_reload_successful 1");
    has(&format!("nvmfd_oldest_command_seconds{{subsystem=\"{a}\",nsid=\"1\"}} 0.0"));
    has(&format!("nvmfd_controllers{{subsystem=\"{a}\"}} 0"));
    has(&format!("nvmfd_namespace_size_bytes{{subsystem=\"{a}\",nsid=\"1\"}} {}", 1 << 30));
    has(&format!("nvmfd_namespace_allocated_bytes{{subsystem=\"{a}\",nsid=\"1\"}} 8192"));
    let hosts = [3, 4].map(|at| (&all[at]["kind"], &all[at]["path"], &all[at]["allow_format"]));
    let managed = &Value::from("managed");
    let image = (managed, &Value::from("rbd/3"), &Value::from(false));
    assert_eq!(hosts, [image, (managed, &Value::Null, &Value::from(true))]);
    let allocated = [0, 2].map(|at| &all[at]["allocated_bytes"]);
    assert_eq!(allocated, [&8192.into(), &Value::Null]);
    for (name, value) in [("size", 1000), ("free", 20), ("unallocated", 40)] {
        has(&format!("nvmfd_file_system_{name}_bytes{{file_system=\"253:1\"}} {value}"));
    }
    let file_system = json!({
        "device": "253:1", "size_bytes": 1000, "free_bytes": 20, "unallocated_bytes": 40,
        "state": "low",
    });
    assert_eq!((&all[0]["file_system"], &all[1]["file_system"]), (&file_system, &Value::Null));
    let low = status["low_space"].as_array().unwrap();
    let names = "the file system of namespace 1 of nqn.2026-11.io.nvmfd:a (and of 1 more) is";
    assert!(low.len() == 1 && low[0].as_str().unwrap().starts_with(names), "{low:?}");
    has("nvmfd_listener_up{address=\"127.0.0.1:4420\"} 1");
    has("nvmfd_listener_up{address=\"127.0.0.2:4420\"} 0");
    for (nsid, detached) in [(1, 0), (2, 1)] {
        let labels = format!("subsystem=\"{a}\",nsid=\"{nsid}\"");
        has(&format!("nvmfd_namespace_detached{{{labels}}} {detached}"));
    }
    let whole = [0, 2].map(|at| &all[at]["power_fail_atomic_bytes"]);
    assert_eq!(whole, [&512.into(), &Value::Null]);
    assert_eq!((&all[0]["detached"], &all[2]["detached"]), (&Value::Null, &"replaced".into()));
    has(&format!("nvmfd_managed_directory_up{{subsystem=\"{b}\"}} 1"));
    let degraded = status["degraded"].as_array().unwrap();
    let tells = |word: &str| degraded.iter().any(|one| one.as_str().unwrap().contains(word));
    assert!(tells("namespace 7 of nqn.2026-11.io.nvmfd:b is lost") && !tells("namespace 3 of"));
    assert!(tells("2 of nqn.2026-11.io.nvmfd:a is served from a file or device that was replaced"));
    assert!(tells("`nvmfctl namespace trust nqn.2026-11.io.nvmfd:a 2`"));
}

/// It answers, and all its listeners and namespaces are there.
#[test]
fn a_gateway_that_serves_nothing_is_degraded() {
    let stage = stage("");
    let status = |fresh, refused| {
        let (gateway, at_unix_s) = (None, None);
        let shared = Some(GatewayShared { version: 5, gateway, at_unix_s, applied: 4, refused });
        let (name, gateway) = ("g1".to_owned(), "a".to_owned());
        let group = GatewayGroup { name, gateway, fresh, shared, ..GatewayGroup::default() };
        stage.managed.view().gateway.as_ref().unwrap().set(group);
        stage.visit(|socket| get(socket, "/v1/status").1)
    };
    let cut = status(false, None);
    let sentence = cut["degraded"][0].as_str().unwrap();
    assert!(sentence.starts_with("gateway a of the group g1 serves nothing: "), "{sentence}");
    let behind = status(true, Some(GatewayConfigError { version: 5, why: "no image".to_owned() }));
    let sentence = "version 5 of the shared configuration is not in force here: no image";
    assert_eq!((&behind["degraded"], &behind["version"]), (&json!([]), &crate::VERSION.into()));
    assert!(behind["warnings"].as_array().unwrap().contains(&sentence.into()), "{behind}");
}

#[test]
fn write_protection_is_refused_during_a_format() {
    let stage = stage("");
    let stores = DeviceTable::default().next(&stage.config.subsystems).unwrap();
    let mut subsystem = stores.subsystem(&stage.config.subsystems[0], Arc::default());
    subsystem.namespaces[0].formatting = Some(Arc::new(Progress::none()));
    let subsystems = vec![Arc::new(subsystem)];
    stage.managed.view().registry.change(Change { subsystems, ..Change::default() });
    let (status, problem) = stage.visit(|socket| {
        let body = r#"{"state": "protected", "dry_run": true}"#;
        let path = "/v1/subsystems/nqn.2026-11.io.nvmfd:a/namespaces/1/protection";
        let mut stream = UnixStream::connect(socket).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    });
    assert!(status.contains(" 409 ") && problem.contains("formatting"), "{status} {problem}");
}

#[test]
fn configured_objects_are_reported_by_the_api() {
    stage("").visit(|socket| {
        let (_, subsystems) = get(socket, "/v1/subsystems");
        let namespaces = subsystems[0]["namespaces"].as_array().unwrap();
        assert_eq!(namespaces[0]["size_bytes"], 1 << 30);
        assert_eq!(namespaces[1]["eui64"], "0001020304050607");
        assert_eq!(namespaces[1]["hosts"], Value::Array(Vec::new()));
        let (_, listeners) = get(socket, "/v1/listeners");
        assert_eq!(listeners[0]["address"], "127.0.0.1:4420");
        assert_eq!(listeners[0]["ana"]["2"], "inaccessible");
        let (_, hosts) = get(socket, "/v1/hosts");
        assert_eq!(hosts[0]["nqn"], "nqn.2026-11.org.example:h");
        assert_eq!(hosts[0]["subsystems"][0], "nqn.2026-11.io.nvmfd:a");
    });
}

#[test]
fn a_plan_has_what_a_reload_would_change_or_the_errors_of_the_files() {
    let stage = stage("");
    let file = stage.directory.path().join("nvmfd.toml");
    stage.visit(move |socket| {
        let none = serde_json::json!({"differences": [], "needs_restart": [], "kept": true});
        assert_eq!(get(socket, "/v1/plan"), (200, none));
        let text = std::fs::read_to_string(&file).unwrap();
        let next = text
            .replace("1MiB", "2MiB")
            .replace("[management]", "[limits]\nio_queues = 3\n[management]");
        std::fs::write(&file, next).unwrap();
        let (_, plan) = get(socket, "/v1/plan");
        assert!(plan["differences"][0].as_str().unwrap().contains("2MiB"), "{plan}");
        assert_eq!(plan["needs_restart"][0], "[limits]");
        std::fs::write(&file, "provider = 1").unwrap();
        let (status, problem) = get(socket, "/v1/plan");
        assert_eq!(status, 422, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains("nvmfd.toml:1:12: "), "{problem}");
    });
}

#[test]
fn memory_report_matches_the_formula() {
    stage("").visit(|socket| {
        let (_, memory) = get(socket, "/v1/memory");
        let sections = memory["pool"].as_array().unwrap();
        let sizes: Vec<u64> =
            sections.iter().map(|one| one["size_bytes"].as_u64().unwrap()).collect();
        assert_eq!(sizes, [512 << 10, 32 << 20, 32 << 20]);
        let host = &memory["host"];
        let [io_queues, queue, controller, sum] =
            ["io_queues", "io_queue_bytes", "controller_bytes", "size_bytes"]
                .map(|key| host[key].as_u64().unwrap());
        assert_eq!((io_queues, controller + io_queues * queue), (16, sum));
        assert!(memory["resident_bytes"].as_u64().unwrap() > 1 << 20);
    });
}

#[test]
fn the_socket_has_its_configured_mode_and_a_single_server() {
    let first = stage("mode = \"0600\"\n");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _inside = runtime.enter();
    let path = first.socket();
    let server = first.open().unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    assert!(first.open().err().unwrap().contains("another daemon has"));
    drop(server);
    assert!(!path.exists(), "it goes with its server");
    // A socket left by a killed daemon does not prevent a start.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(first.open().unwrap());
    std::fs::write(&path, "precious").unwrap();
    assert!(first.open().err().unwrap().contains("is no socket"));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");

    let second = stage("group = \"there is no such group\"\n");
    assert!(second.open().err().unwrap().contains("has no group"));
    let left = std::fs::read_dir(second.directory.path()).unwrap().count();
    assert_eq!(left, 1, "nothing but the configuration");
}

/// Any user of the machine may have it, while the daemon restarts.
#[test]
fn an_http_address_in_use_prevents_no_start_and_is_served_when_it_is_free() {
    let at = "127.0.43.11:4480";
    let held = std::net::TcpListener::bind(at).unwrap();
    stage(&format!("http = \"{at}\"\n")).visit(move |socket| {
        assert_eq!(get(socket, "/v1/status").0, 200);
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(60);
        let stream = loop {
            match std::net::TcpStream::connect(at) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(ask(stream, &format!("GET /v1/status HTTP/1.1\r\nHost: {at}")).0, 200);
    });
}

#[test]
fn the_socket_is_restricted_if_its_group_cannot_be_set() {
    use std::os::unix::fs::MetadataExt;

    let stage = stage("group = \"root\"\nmode = \"0660\"\n");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _inside = runtime.enter();
    let server = stage.open().unwrap();
    let found = std::fs::metadata(stage.socket()).unwrap();
    let ours = nix::unistd::getegid().as_raw();
    assert!([0, ours].contains(&found.gid()), "{}", found.gid());
    let mode = if found.gid() == 0 { 0o660 } else { 0o600 };
    assert_eq!(found.permissions().mode() & 0o777, mode);
    drop(server);
}

/// A client that is stopped, or reads no response, keeps nobody out.
#[test]
fn the_oldest_connection_makes_room_for_a_new_one() {
    stage("").visit(|socket| {
        const REQUEST: &str = "GET /console/sections.js HTTP/1.1\r\nHost: x\r\n\r\n";
        let standing = |_| {
            let mut stream = UnixStream::connect(socket).unwrap();
            // The responses are longer than what a socket holds.
            stream.write_all(REQUEST.repeat(200).as_bytes()).unwrap();
            stream
        };
        let mut standing: Vec<_> = (0..40).map(standing).collect();
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(ask(stream, "GET /v1/status HTTP/1.1\r\nHost: x").0, 200);
        let mut response = Vec::new();
        let _ = standing[0].read_to_end(&mut response);
        let responses = String::from_utf8_lossy(&response).matches("HTTP/1.1 200").count();
        assert!(responses < 200, "it was closed");
    });
}

#[test]
fn disconnect_causes_are_listed_for_all_hosts_or_a_given_one() {
    use crate::core::diag::cause::{Cause, DisconnectRecord};
    let stage = stage("");
    let (remote, local) = (([192, 0, 2, 9], 4000).into(), ([192, 0, 2, 1], 4420).into());
    let disconnects = &stage.managed.view().shared.disconnects;
    disconnects.note(DisconnectRecord::nameless(Cause::NoReads, remote, local));
    let host = Some("nqn.2026-11.org.example:h".parse().unwrap());
    let named =
        DisconnectRecord { host, ..DisconnectRecord::nameless(Cause::WrongSecret, remote, local) };
    disconnects.note(named.clone());
    disconnects.note(named);
    stage.visit(|socket| {
        let (status, all) = get(socket, "/v1/why");
        let causes: Vec<_> =
            all.as_array().unwrap().iter().map(|why| why["cause"].as_str().unwrap()).collect();
        assert_eq!((status, causes), (200, vec!["wrong-secret", "no-reads"]));
        assert_eq!((&all[0]["count"], &all[0]["stage"]), (&2.into(), &"authentication".into()));
        assert!(all[0]["remedy"].as_str().unwrap().contains("dhchap_key_file"));
        let (_, of_host) = get(socket, "/v1/why?host=nqn.2026-11.org.example:h");
        assert_eq!((of_host.as_array().unwrap().len(), &of_host[0]), (1, &all[0]));
        let (_, of_address) = get(socket, "/v1/why?host=192.0.2.9");
        assert_eq!(of_address.as_array().unwrap().len(), 2);
        assert_eq!(get(socket, "/v1/why?host=nobody").1, Value::Array(Vec::new()));
    });
}

#[test]
fn probes_answer_and_metrics_honour_the_accept_header() {
    stage("").visit(|socket| {
        for path in ["/healthz", "/readyz"] {
            let answer = text(socket, path);
            assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("ok\n"), "{answer}");
        }
        let plain = accepting(socket, "/metrics", "text/plain;version=0.0.4, */*;q=0.1");
        assert!(plain.contains("content-type: text/plain; version=0.0.4"), "{plain}");
        assert!(!plain.contains("# EOF"));
        let open = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";
        let open = accepting(socket, "/metrics", open);
        assert!(open.contains("content-type: application/openmetrics-text; version=1.0.0"));
        assert!(open.ends_with("# EOF\n"), "{open}");
    });
}

#[test]
fn if_match_entity_tags_are_parsed_as_http_specifies() {
    let of = |fields: &[&str]| {
        let mut headers = axum::http::HeaderMap::new();
        for field in fields {
            headers.append("if-match", field.parse().unwrap());
        }
        changes::if_match(&headers)
    };
    let tags = |tags: &[&str]| Some(tags.iter().map(|&tag| tag.to_owned()).collect::<Vec<_>>());
    assert_eq!(of(&[]), None);
    assert_eq!(of(&["*"]), None);
    assert_eq!(of(&["\"a\", \"b\"", "\"c\""]), tags(&["a", "b", "c"]));
    // Weak tags never match, and nonsense does not either.
    assert_eq!(of(&["W/\"a\""]), tags(&[]));
    assert_eq!(of(&["a"]), tags(&[]));
}
