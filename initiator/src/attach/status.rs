//! The state of a namespace that is served, for `nvmf attach --status` and for Prometheus.
//!
//! It is JSON at a Unix socket beside that of the clients: who connects there gets it, and may send
//! nothing.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::counters::{Counters, KINDS};
use crate::Error;
use crate::host::notice;
use crate::multipath::{Multipath, PathState, RequestOutcome};

/// Time for the answer of the process that serves the namespace.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// The longest answer: of some thousand paths.
const MOST_BYTES: u64 = 1 << 20;

/// The state.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(super) struct Status {
    subsystem: String,
    namespace_id: u32,
    socket: PathBuf,
    provider: String,
    size_bytes: u64,
    block_bytes: u32,
    read_only: bool,
    /// `carried-out`, `wait` or `fail`.
    requests: String,
    requests_in_flight: usize,
    /// Connections of clients whose handshake is done, and how many of them know another size.
    clients: usize,
    clients_with_old_size: usize,
    paths: Vec<PathStatus>,
    operations: Vec<OperationStatus>,
}

/// A path.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
struct PathStatus {
    address: String,
    state: String,
    ana_state: Option<String>,
    /// It has carried the last request.
    in_use: bool,
    /// Why it is not live.
    reason: Option<String>,
    /// When it is connected again.
    next_attempt_ms: Option<u64>,
    connects: u64,
    losses: u64,
    commands: u64,
}

/// Requests of clients of one kind.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
struct OperationStatus {
    operation: String,
    requests: u64,
    bytes: u64,
    errors: u64,
}

/// What is known besides the paths.
pub(super) struct Served<'a> {
    pub(super) socket: &'a Path,
    pub(super) provider: String,
    pub(super) is_read_only: bool,
    pub(super) requests_in_flight: usize,
    pub(super) counters: &'a Counters,
    /// The sizes that clients know.
    pub(super) sizes_bytes: Vec<u64>,
}

impl Status {
    pub(super) fn new(multipath: &Multipath, served: &Served<'_>, now: Instant) -> Status {
        let namespace = multipath.namespace();
        let block_bytes = namespace.map_or(0, |namespace| namespace.block_bytes);
        let blocks = namespace.map_or(0, |namespace| namespace.blocks);
        let size_bytes = blocks * u64::from(block_bytes);
        let sizes = &served.sizes_bytes;
        let fate = match multipath.request_outcome(now) {
            RequestOutcome::CarriedOut => "carried-out",
            RequestOutcome::Wait => "wait",
            RequestOutcome::Fail => "fail",
        };
        let first = multipath.path_options(0);
        Status {
            subsystem: first.map(|path| path.session.subnqn.to_string()).unwrap_or_default(),
            namespace_id: multipath.nsid(),
            socket: served.socket.to_owned(),
            provider: served.provider.clone(),
            size_bytes,
            block_bytes,
            read_only: served.is_read_only
                || namespace.is_some_and(|namespace| namespace.is_write_protected),
            requests: fate.into(),
            requests_in_flight: served.requests_in_flight,
            clients: sizes.len(),
            clients_with_old_size: sizes.iter().filter(|size| **size != size_bytes).count(),
            paths: (0..multipath.paths())
                .map(|path| PathStatus::new(multipath, path, now))
                .collect(),
            operations: KINDS
                .iter()
                .zip(served.counters.all())
                .map(|(name, counts)| OperationStatus {
                    operation: (*name).into(),
                    requests: counts.requests,
                    bytes: counts.bytes,
                    errors: counts.errors,
                })
                .collect(),
        }
    }

    /// Returns a line for `systemctl status`.
    pub(super) fn line(&self) -> String {
        let live = self.paths.iter().filter(|path| path.state == "live").count();
        let requests = if self.requests == "carried-out" { "" } else { ", requests " };
        let fate = if requests.is_empty() { "" } else { &self.requests };
        format!("{live} of {} paths live{requests}{fate}", self.paths.len())
    }

    /// Returns it as JSON.
    pub(super) fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Returns it for people.
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "{}, namespace {}: {} bytes in blocks of {}{}, at {} ({})\n",
            self.subsystem,
            self.namespace_id,
            self.size_bytes,
            self.block_bytes,
            if self.read_only { ", read only" } else { "" },
            self.socket.display(),
            self.provider
        );
        let fate = match self.requests.as_str() {
            "carried-out" => "are carried out",
            "wait" => "wait for a path",
            _ => "fail: there is no path to wait for",
        };
        let _ = write!(text, "requests {fate}; {} under way", self.requests_in_flight);
        let _ = write!(text, "; connections of clients: {}", self.clients);
        if self.clients_with_old_size > 0 {
            let _ = write!(
                text,
                ", {} of them with the size before a resize: until they connect again",
                self.clients_with_old_size
            );
        }
        text.push('\n');
        self.paths.iter().for_each(|path| path.text(&mut text));
        text
    }

    /// Returns it in the text format of Prometheus.
    pub(super) fn prometheus(&self) -> String {
        let mut text = String::new();
        let namespace = format!("subsystem=\"{}\",nsid=\"{}\"", self.subsystem, self.namespace_id);
        let mut family = |name: &str, kind: &str, help: &str, samples: Vec<(String, f64)>| {
            let name = format!("nvmf_attach_{name}");
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in samples {
                let _ = writeln!(text, "{name}{{{namespace}{labels}}} {value}");
            }
        };
        let one = |value: f64| vec![(String::new(), value)];
        family("size_bytes", "gauge", "Size of the namespace.", one(self.size_bytes as f64));
        family("clients", "gauge", "Connections of clients.", one(self.clients as f64));
        let old = one(self.clients_with_old_size as f64);
        family("clients_with_old_size", "gauge", "Those that do not know the size.", old);
        let in_flight = one(self.requests_in_flight as f64);
        family("requests_in_flight", "gauge", "Requests that are not answered.", in_flight);
        let can = if self.requests == "carried-out" { 1.0 } else { 0.0 };
        family("up", "gauge", "Whether a path carries requests out.", one(can));
        let of_paths = |value: fn(&PathStatus) -> f64| {
            let path = |path: &PathStatus| (format!(",path=\"{}\"", path.address), value(path));
            self.paths.iter().map(path).collect::<Vec<_>>()
        };
        let is = |yes: bool| if yes { 1.0 } else { 0.0 };
        let live = of_paths(|path| if path.state == "live" { 1.0 } else { 0.0 });
        family("path_live", "gauge", "Whether the path is connected.", live);
        let ana = self.paths.iter().filter_map(|path| {
            let state = path.ana_state.as_ref()?;
            Some((format!(",path=\"{}\",state=\"{state}\"", path.address), is(true)))
        });
        family("path_ana_state", "gauge", "The ANA state of a live path.", ana.collect());
        let connects = of_paths(|path| path.connects as f64);
        family("path_connects_total", "counter", "How often it became live.", connects);
        let losses = of_paths(|path| path.losses as f64);
        family("path_losses_total", "counter", "How often it failed.", losses);
        let commands = of_paths(|path| path.commands as f64);
        family("path_commands_total", "counter", "Commands for the namespace.", commands);
        let of_kinds = |value: fn(&OperationStatus) -> u64| {
            let all = self.operations.iter();
            all.map(|one| (format!(",operation=\"{}\"", one.operation), value(one) as f64))
                .collect()
        };
        family("requests_total", "counter", "Answered requests.", of_kinds(|one| one.requests));
        family("request_bytes_total", "counter", "Their bytes.", of_kinds(|one| one.bytes));
        family("request_errors_total", "counter", "Failed ones.", of_kinds(|one| one.errors));
        text
    }
}

impl PathStatus {
    fn new(multipath: &Multipath, path: usize, now: Instant) -> PathStatus {
        let state = multipath.state(path);
        let counters = multipath.counters(path);
        let to = multipath.path_options(path).map(|options| options.session.to.to_string());
        PathStatus {
            address: to.unwrap_or_default(),
            state: notice::state_name(state).into(),
            ana_state: multipath.ana(path).map(|state| notice::text(state).into()),
            in_use: multipath.current() == Some(path) && state == PathState::Live,
            reason: multipath.last_loss(path).map(ToString::to_string),
            next_attempt_ms: match state {
                PathState::Resetting { until } => {
                    Some(until.saturating_duration_since(now).as_millis() as u64)
                }
                _ => None,
            },
            connects: counters.connects,
            losses: counters.losses,
            commands: counters.commands,
        }
    }

    /// Which path, its state, why, and what happens next.
    fn text(&self, text: &mut String) {
        let _ = write!(text, "path {} {}", self.address, self.state);
        if let Some(ana) = &self.ana_state {
            let _ = write!(text, ", {ana}");
        }
        if self.in_use {
            text.push_str(", in use");
        }
        if let Some(reason) = &self.reason {
            let _ = write!(text, ": {reason}");
        }
        if let Some(next_ms) = self.next_attempt_ms {
            let _ = write!(text, "; it is connected again in {} s", next_ms.div_ceil(1000));
        }
        text.push('\n');
    }
}

/// Returns the socket of the state beside that of the clients; for a device, one in `/run`.
pub(super) fn socket(clients: &Path) -> PathBuf {
    let mut name = match clients.strip_prefix("/dev") {
        Ok(device) => Path::new("/run").join(format!("nvmf-{}", device.display())).into(),
        Err(_) => OsString::from(clients),
    };
    name.push(".status");
    name.into()
}

/// Answers all who have connected. Those that do not read get what the socket holds.
pub(super) fn answer(listener: &UnixListener, status: impl Fn() -> Status) {
    while let Ok((mut stream, _)) = listener.accept() {
        if stream.set_nonblocking(true).is_ok() {
            let _ = stream.write_all(status().json().as_bytes());
        }
    }
}

/// Returns the state of what is served at a socket.
pub(super) fn ask(clients: &Path) -> Result<Status, Error> {
    let failed = |why: String| Error::Local(format!("{}: {why}", clients.display()));
    let ask = || {
        let stream = UnixStream::connect(socket(clients))?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        let mut json = String::new();
        stream.take(MOST_BYTES).read_to_string(&mut json)?;
        Ok::<_, std::io::Error>(json)
    };
    let json = ask().map_err(|error| failed(format!("no nvmf attach answers: {error}")))?;
    serde_json::from_str(&json).map_err(|error| failed(format!("its answer is not valid: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        let path = |address: &str| PathStatus {
            address: address.into(),
            state: "live".into(),
            ana_state: Some("optimized".into()),
            in_use: true,
            ..PathStatus::default()
        };
        let down = PathStatus {
            state: "down".into(),
            ana_state: None,
            in_use: false,
            reason: Some("the target closed the connection".into()),
            next_attempt_ms: Some(6_100),
            losses: 3,
            ..path("192.0.2.1:4421")
        };
        Status {
            subsystem: "nqn.2026-11.io.nvmfd:d".into(),
            namespace_id: 1,
            socket: "/run/d.nbd".into(),
            provider: "soft".into(),
            size_bytes: 1 << 20,
            block_bytes: 4096,
            requests: "carried-out".into(),
            clients: 2,
            clients_with_old_size: 1,
            paths: vec![path("192.0.2.1:4420"), down],
            ..Status::default()
        }
    }

    #[test]
    fn status_text_shows_state_and_reason_of_each_path() {
        assert_eq!(
            status().text(),
            "nqn.2026-11.io.nvmfd:d, namespace 1: 1048576 bytes in blocks of 4096, at /run/d.nbd \
             (soft)\n\
             requests are carried out; 0 under way; connections of clients: 2, 1 of them with the \
             size before a resize: until they connect again\n\
             path 192.0.2.1:4420 live, optimized, in use\n\
             path 192.0.2.1:4421 down: the target closed the connection; it is connected again in \
             7 s\n"
        );
        assert_eq!(status().line(), "1 of 2 paths live");
        let waiting = Status { requests: "wait".into(), ..status() };
        assert_eq!(waiting.line(), "1 of 2 paths live, requests wait");
    }

    #[test]
    fn clients_of_the_status_socket_receive_the_full_status() {
        let directory = tempfile::tempdir().expect("a directory");
        let clients = directory.path().join("d.nbd");
        assert!(ask(&clients).is_err_and(|why| why.to_string().contains("no nvmf attach answers")));
        let listener = UnixListener::bind(socket(&clients)).expect("a socket");
        let client = std::thread::spawn(move || ask(&clients));
        listener.set_nonblocking(true).expect("possible");
        while !client.is_finished() {
            answer(&listener, status);
        }
        assert_eq!(client.join().expect("no panic"), Ok(status()));
    }

    #[test]
    fn each_family_of_metrics_has_its_labels() {
        let text = status().prometheus();
        let namespace = "subsystem=\"nqn.2026-11.io.nvmfd:d\",nsid=\"1\"";
        for line in [
            format!("nvmf_attach_up{{{namespace}}} 1"),
            format!("nvmf_attach_path_live{{{namespace},path=\"192.0.2.1:4421\"}} 0"),
            format!("nvmf_attach_path_losses_total{{{namespace},path=\"192.0.2.1:4421\"}} 3"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }
}
