//! The console in a real browser: a daemon, hosts and a headless Chromium, all without privileges.
//! Run by `make console-test`.

mod browser;
mod changes;
mod forward;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::Duration;

use clap::Parser;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use browser::Browser;
use forward::forward;

/// Where the target listens, and where the console is.
const ADDRESS: &str = "127.77.0.1";
const CONSOLE: &str = "127.77.0.1:4480";
const DISKS: &str = "nqn.2026-11.org.example:disks";
const PRIVATE: &str = "nqn.2026-11.org.example:private";
const DATABASE: &str = "nqn.2026-11.org.example:db1";
const BACKUP: &str = "nqn.2026-11.org.example:backup";
/// Names of hosts that are markup, as far as a name may be.
const HOSTILE: &str = "nqn.2026-11.org.example:\"><img/src=x/onerror='document.title=1'>&lt;";
const REFUSED: &str = "nqn.2026-11.org.example:<script>document.title=2</script>${1}";

/// The charts, as text.
const CHARTS: &str = "document.querySelector('#load').innerText";

/// Tests the console in a browser.
#[derive(Parser)]
struct Args {
    /// The daemon
    #[arg(long, env = "NVMFD")]
    nvmfd: PathBuf,
    /// Its tool
    #[arg(long, env = "NVMFCTL")]
    nvmfctl: PathBuf,
    /// The host
    #[arg(long, env = "NVMF")]
    nvmf: PathBuf,
    /// The browser
    #[arg(long, env = "CHROMIUM", default_value = "chromium-headless-shell")]
    chromium: String,
    /// Write pictures of the page too, which takes a minute
    #[arg(long)]
    pictures: bool,
    /// An empty directory for files and pictures
    directory: PathBuf,
}

/// A process that is asked to end with this.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
            let _ = self.0.wait();
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    match Stage::new(&args).and_then(|mut stage| stage.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("FAIL {error}");
            for log in ["nvmfd.log", "browser.log"] {
                let text = fs::read_to_string(args.directory.join(log)).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                let last = lines.len().saturating_sub(15);
                println!("the end of {log}:\n{}", lines[last..].join("\n"));
            }
            ExitCode::FAILURE
        }
    }
}

struct Stage<'a> {
    args: &'a Args,
    browser: Browser,
    daemon: Process,
}

impl Stage<'_> {
    fn new(args: &Args) -> Result<Stage<'_>, String> {
        let directory = &args.directory;
        let store = directory.join("disk.img");
        // allocated as a whole, so that it is no problem how full the file system is
        fs::write(&store, vec![0; 256 << 20]).map_err(describe)?;
        let text = |more: &str| {
            format!(
                "provider = 'soft'\nstate_directory = {directory:?}\n\
                 [management]\nsocket = {socket:?}\nhttp = '{CONSOLE}'\n\
                 [observe]\nslow_ms = 1\n[reactor]\nthreads = 1\n\
                 [[listener]]\naddress = '{ADDRESS}'\n\
                 [[subsystem]]\nnqn = '{DISKS}'\nallow_any_host = true\n\
                 [[subsystem.namespace]]\nnsid = 1\nkind = 'ram'\nsize = '64MiB'\n\
                 limit = {{ iops = 800 }}\n\
                 [[subsystem.namespace]]\nnsid = 2\npath = {store:?}\n\
                 limit = {{ iops = 300 }}\n\
                 [[subsystem.namespace]]\nnsid = 3\nkind = 'ram'\nsize = '64MiB'\n\
                 limit = {{ iops = 1 }}\n\
                 [[subsystem]]\nnqn = '{PRIVATE}'\nhosts = ['{DATABASE}']\n{more}",
                socket = directory.join("api.sock"),
            )
        };
        let write = |name: &str, text: String| {
            fs::write(directory.join(name), text).map_err(|error| format!("{name}: {error}"))
        };
        write("nvmfd.toml", text(""))?;
        write("pending.toml", text(&missing_namespace(directory)))?;
        let daemon = start(args)?;
        forward(changes::FORWARDED, directory.join("api.sock")).map_err(describe)?;
        let mut browser = Browser::start(&args.chromium, directory)?;
        browser.show(1280, "light")?;
        Ok(Stage { args, browser, daemon })
    }

    fn run(&mut self) -> Result<(), String> {
        self.opens()?;
        self.shows_hosts_and_rates()?;
        self.shows_commands_that_do_not_end()?;
        self.shows_why_a_host_is_refused()?;
        self.shows_plan_and_pending_devices()?;
        self.is_accessible_in_every_form()?;
        self.offers_no_change_without_a_token()?;
        self.changes_through_a_forwarded_socket()?;
        self.browser.open(&format!("http://{CONSOLE}/"))?;
        self.sees("#link", "live")?;
        // Those that were provoked: the policy, a refused change, and files with errors.
        let provoked =
            ["'TrustedHTML'", "status of 404", "status of 405", "status of 412", "status of 422"];
        let complaints = &mut self.browser.complaints;
        complaints.retain(|complaint| !provoked.iter().any(|text| complaint.contains(text)));
        let is_quiet = complaints.is_empty();
        check("scripts and the policy raise no other errors", is_quiet, || complaints.join("\n"))?;
        self.survives_a_restart()?;
        self.changes_with_the_token()
    }

    fn opens(&mut self) -> Result<(), String> {
        self.browser.open(&format!("http://{CONSOLE}/"))?;
        self.sees("#link", "live")?;
        self.sees(
            "#health",
            "Everything that is configured is served: 2 subsystems, 3 namespaces",
        )?;
        self.sees("#served", DISKS)?;
        self.sees("#served", "64.0 MiB")?;
        self.sees("#served", "serving")?;
        self.sees("#memory", "64.5 MiB")?;
        self.sees("#controllers", "No host is connected")?;
        passed("the console shows what is served, its health, and the memory")
    }

    fn shows_hosts_and_rates(&mut self) -> Result<(), String> {
        let busy = self.load(HOSTILE, "127.77.0.2", "1", "randrw", "16")?;
        self.sees("#controllers", HOSTILE)?;
        self.sees("#controllers", "live")?;
        self.sees("#events", "connected")?;
        self.sees("#rates", HOSTILE)?;
        self.sees("#slow", HOSTILE)?;
        passed("a host appears when it connects, with its slow commands and events")?;
        let _other = self.load(DATABASE, "127.77.0.3", "2", "randread", "16")?;
        self.sees("#rates", DATABASE)?;
        let figure = "document.querySelector('#figures dd').textContent";
        self.browser.wait(&format!("parseFloat({figure}) > 0"), figure)?;
        // Two snapshots make a point, two points a line.
        self.browser.wait(
            "[...document.querySelectorAll('#charts path.stroke.pull')]\
             .every((path) => path.getAttribute('d').includes('L'))",
            CHARTS,
        )?;
        self.browser.wait("document.querySelectorAll('#charts figure').length === 4", CHARTS)?;
        self.browser
            .wait("document.querySelectorAll('#rates svg.bar path').length === 12", CHARTS)?;
        passed("rates, latencies and stages are those of the load")?;
        self.pictures("console")?;
        drop(busy);
        self.sees("#events", "disconnected")?;
        passed("a host disappears when it disconnects")
    }

    /// A limit holds them back, as a device that hangs does: one a second ends, of 24.
    fn shows_commands_that_do_not_end(&mut self) -> Result<(), String> {
        self.sees("#progress", "No command is in progress")?;
        let waiting = self.load(BACKUP, "127.77.0.5", "3", "randread", "24")?;
        self.sees("#progress", BACKUP)?;
        self.sees("#progress", "wait")?;
        passed("commands in progress are listed, with their stage")?;
        self.sees("#health", "Commands are in progress for more than 15 s, the oldest for")?;
        let old = "document.querySelectorAll('#progress .badge.bad').length > 0";
        self.browser.wait(old, "document.querySelector('#progress').innerText")?;
        passed("a command that does not end is a problem")?;
        drop(waiting);
        self.sees("#health", "Everything that is configured is served")?;
        passed("the problem ends with it")
    }

    fn shows_why_a_host_is_refused(&mut self) -> Result<(), String> {
        let refused = Command::new(&self.args.nvmf)
            .args(["list", "-a", ADDRESS, "-n", PRIVATE, "-q", REFUSED, "-w", "127.77.0.4"])
            .output()
            .map_err(|error| error.to_string())?;
        check("another host is refused", !refused.status.success(), String::new)?;
        self.sees("#refused", REFUSED)?;
        self.sees("#refused", PRIVATE)?;
        self.sees("#refused", "Remedy: ")?;
        self.sees("#refused", "Add its NQN to the subsystem's hosts")?;
        passed("the page shows why, and the remedy")?;
        self.pictures("refused")?;
        let strange = "document.querySelectorAll('body img, body script, main form').length";
        let strange = self.browser.value(strange)?;
        let title = self.browser.value("document.title")?;
        check("names that are markup are text", strange == 0 && title == "nvmfd", || {
            format!("{strange} elements, title {title}")
        })?;
        let raw = "try { document.body.innerHTML = '<b>' } catch { 'refused' }";
        let raw = self.browser.value(raw)?;
        check("the policy refuses markup from text", raw == "refused", || raw.to_string())
    }

    fn shows_plan_and_pending_devices(&mut self) -> Result<(), String> {
        let directory = &self.args.directory;
        let next = fs::read_to_string(directory.join("pending.toml")).map_err(describe)?;
        fs::write(directory.join("nvmfd.toml"), next).map_err(describe)?;
        self.sees("#configuration", "+ subsystem nqn.2026-11.org.example:late")?;
        passed("the page shows what a reload would change")?;
        self.control(&["reload"])?;
        self.sees("#configuration", "Nothing: the files are what is in force.")?;
        self.sees("#events", "configuration changed")?;
        self.sees("#health", "1 problem")?;
        self.sees("#health", "late.img")?;
        let title = self.browser.value("document.title")?;
        check("a pending device is a problem", title == "nvmfd: 1 problem", || title.to_string())?;
        self.control(&["namespace", "add", DISKS, "auto", "--kind", "null", "--size", "1GiB"])?;
        self.sees("#configuration", "add namespace")?;
        self.sees("#configuration", "user ")?;
        let past = "[...document.querySelectorAll('#configuration h3')]\
             .find(({ textContent }) => textContent === 'History').nextElementSibling.innerText";
        let newest = format!("{past}.includes('add namespace') && {past}.includes('reload')");
        self.browser.wait(&newest, past)?;
        passed("the history has both, the latest first")?;
        passed("the page shows unsaved changes, and by whom")?;
        fs::write(directory.join("nvmfd.toml"), "provider = 1\n").map_err(describe)?;
        self.sees("#configuration", "A reload would be refused:")?;
        passed("the page shows the errors of files before a reload")
    }

    fn is_accessible_in_every_form(&mut self) -> Result<(), String> {
        self.is_accessible("the page")?;
        // From the top: the link that skips the navigation, then the button, visibly focused.
        for id in ["A.skip", "BUTTON."] {
            self.browser.press("Tab")?;
            let focused = self.browser.value(
                "(({ tagName, className }) => `${tagName}.${className}`)(document.activeElement)",
            )?;
            let outline = "getComputedStyle(document.activeElement).outlineStyle";
            let outline = self.browser.value(outline)?;
            let good = focused == id && outline == "solid";
            check(&format!("the keyboard reaches {id}"), good, || format!("{focused} {outline}"))?;
        }
        self.browser.press(" ")?;
        self.sees("#link", "paused")?;
        self.browser.value("document.querySelector('#pause').click()")?;
        self.sees("#link", "live")
    }

    /// Structure, names, contrast and width, in each width and colour scheme.
    fn is_accessible(&mut self, what: &str) -> Result<(), String> {
        for (width, scheme) in [(1280, "light"), (1280, "dark"), (390, "light"), (320, "dark")] {
            self.browser.show(width, scheme)?;
            let found = self.browser.value(include_str!("checks.js"))?;
            let name =
                format!("structure, contrast and width of {what} at {width} pixels, {scheme}");
            check(&name, found == json!([]), || format!("{found:#}"))?;
        }
        self.browser.show(1280, "light")
    }

    fn survives_a_restart(&mut self) -> Result<(), String> {
        let directory = &self.args.directory;
        let next = fs::read_to_string(directory.join("pending.toml")).map_err(describe)?;
        let next = next.replace("[management]", &format!("[management]\n{}", self.token_file()?));
        fs::write(directory.join("nvmfd.toml"), next).map_err(describe)?;
        let pid = Pid::from_raw(self.daemon.0.id().cast_signed());
        kill(pid, Signal::SIGTERM).map_err(|error| error.to_string())?;
        let ended = self.daemon.0.wait().map_err(describe)?;
        check("the daemon ends while it is watched", ended.success(), || ended.to_string())?;
        self.sees("#link", "no answer since")?;
        self.daemon = start(self.args)?;
        self.sees("#link", "live")?;
        self.sees("#refused", "No host was refused")?;
        passed("the page connects again to a daemon that was restarted")
    }

    /// Waits until a part of the page has a text.
    fn sees(&mut self, selector: &str, text: &str) -> Result<(), String> {
        let (selector, text) = (json!(selector), json!(text));
        let inside = format!("document.querySelector({selector})?.innerText");
        self.browser.wait(&format!("{inside}?.includes({text}) === true"), &inside)
    }

    /// A host that loads a namespace until it is dropped.
    fn load(
        &self,
        host: &str,
        source: &str,
        nsid: &str,
        rw: &str,
        depth: &str,
    ) -> Result<Process, String> {
        // An identifier of its own, as every host has.
        let id = format!("00000000-0000-4000-8000-00000000000{nsid}");
        let load = Command::new(&self.args.nvmf)
            .args([
                "bench", "-I", &id, "-a", ADDRESS, "-n", DISKS, "-q", host, "-w", source, "--rw",
                rw,
            ])
            .args(["--namespace-id", nsid, "--iodepth", depth, "--runtime", "3600"])
            .args(["--progress", "never"])
            .stdout(Stdio::null())
            .spawn();
        load.map(Process).map_err(describe)
    }

    fn control(&self, arguments: &[&str]) -> Result<(), String> {
        let socket = self.args.directory.join("api.sock");
        let output = Command::new(&self.args.nvmfctl)
            .arg("--socket")
            .arg(socket)
            .args(arguments)
            .output()
            .map_err(describe)?;
        let error = || String::from_utf8_lossy(&output.stderr).into_owned();
        check(&format!("nvmfctl {}", arguments[0]), output.status.success(), error)
    }

    fn pictures(&mut self, name: &str) -> Result<(), String> {
        if !self.args.pictures {
            return Ok(());
        }
        // Charts of half a minute.
        self.browser.wait(
            "document.querySelector('#charts path.stroke').getAttribute('d').split('L').length > 15",
            CHARTS,
        )?;
        for (form, width, scheme, height) in [
            ("light", 1280, "light", Some(1150)),
            ("dark", 1280, "dark", Some(1150)),
            ("narrow", 390, "dark", Some(1300)),
            ("whole", 1280, "light", None),
            ("whole-narrow", 390, "light", None),
        ] {
            self.browser.show(width, scheme)?;
            let picture = self.browser.picture(height)?;
            let path = self.args.directory.join(format!("{name}-{form}.png"));
            fs::write(path, picture).map_err(describe)?;
        }
        self.browser.show(1280, "light")
    }
}

/// A subsystem with a namespace whose file is missing.
fn missing_namespace(directory: &Path) -> String {
    format!(
        "[[subsystem]]\nnqn = 'nqn.2026-11.org.example:late'\nallow_any_host = true\n\
         [[subsystem.namespace]]\nnsid = 1\npath = {:?}\n",
        directory.join("late.img")
    )
}

/// Starts the daemon, until its console answers.
fn start(args: &Args) -> Result<Process, String> {
    let log = File::options().create(true).append(true).open(args.directory.join("nvmfd.log"));
    let daemon = Command::new(&args.nvmfd)
        .arg("--config")
        .arg(args.directory.join("nvmfd.toml"))
        .stderr(log.map_err(describe)?)
        .spawn();
    let mut daemon = daemon.map(Process).map_err(describe)?;
    for _ in 0..600 {
        if is_ready().is_ok_and(|is_ready| is_ready) {
            return Ok(daemon);
        }
        if let Some(ended) = daemon.0.try_wait().map_err(describe)? {
            return Err(format!("nvmfd has ended: {ended}"));
        }
        thread::sleep(Duration::from_millis(100));
    }
    Err("nvmfd does not answer".to_owned())
}

fn is_ready() -> io::Result<bool> {
    let mut stream = TcpStream::connect(CONSOLE)?;
    write!(stream, "GET /healthz HTTP/1.1\r\nHost: {CONSOLE}\r\nConnection: close\r\n\r\n")?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    Ok(response.starts_with("HTTP/1.1 200 "))
}

fn check(name: &str, holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if !holds {
        return Err(format!("{name}: {}", otherwise()));
    }
    passed(name)
}

fn passed(name: &str) -> Result<(), String> {
    println!("ok   {name}");
    Ok(())
}

fn describe(error: io::Error) -> String {
    error.to_string()
}
