//! Rules of the repository that no compiler checks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toml::{Table, Value};

#[path = "guards/layers.rs"]
mod layers;
#[path = "guards/sizes.rs"]
mod sizes;
#[path = "guards/terminology.rs"]
mod terminology;
#[path = "guards/threads.rs"]
mod threads;

const MEMBERS: [&str; 8] = [
    "nvme",
    "rdma",
    "target/blockdev",
    "target/core",
    "target/gateway",
    "target",
    "initiator",
    "tests",
];

fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the checkout").canonicalize().expect("the checkout")
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn table(path: &str) -> Table {
    text(path).parse().unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Every Rust file of the checkout: its path from the root, and its code without line comments.
fn sources() -> Vec<(String, Vec<String>)> {
    let nested =
        |member: &&&str| MEMBERS.iter().any(|other| member.starts_with(&format!("{other}/")));
    let members = MEMBERS.iter().filter(|member| !nested(member));
    let mut directories: Vec<PathBuf> = members.map(|member| root().join(member)).collect();
    let mut files = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in
            fs::read_dir(&directory).expect("a directory").map(|entry| entry.expect("an entry"))
        {
            let path = entry.path();
            if entry.file_type().expect("a type").is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let code = fs::read_to_string(&path).expect("text");
                let lines = code.lines().map(|line| line.split("//").next().unwrap_or(line));
                let lines = lines.map(str::to_owned).collect();
                let name = path.strip_prefix(root()).expect("inside").display().to_string();
                files.push((name, lines));
            }
        }
    }
    assert!(files.len() > 10, "the sources are found");
    files
}

/// The words of a line of code.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

fn dependencies(member: &str) -> Vec<String> {
    let manifest = table(&format!("{member}/Cargo.toml"));
    ["dependencies", "dev-dependencies", "build-dependencies"]
        .into_iter()
        .filter_map(|section| manifest.get(section).and_then(Value::as_table))
        .flat_map(|section| section.keys().cloned())
        .collect()
}

#[test]
fn the_build_directory_is_not_a_source_directory() {
    let config = table(".cargo/config.toml");
    assert_eq!(config["build"]["target-dir"].as_str(), Some("build"), ".cargo/config.toml");

    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo metadata");
    let metadata = String::from_utf8(metadata.stdout).expect("text");
    let (_, rest) = metadata.split_once("\"target_directory\":\"").expect("a build directory");
    let (directory, _) = rest.split_once('"').expect("its end");
    let directory = Path::new(directory);
    assert!(!root().starts_with(directory), "{} contains the sources", directory.display());
    for member in MEMBERS {
        let source = root().join(member);
        assert!(!directory.starts_with(&source), "{} is in {member}/", directory.display());
    }
}

#[test]
fn git_ignores_the_build_directory_and_nothing_of_the_daemon() {
    let ignored = text(".gitignore");
    for line in ["/build", "!/target/"] {
        assert!(ignored.lines().any(|each| each == line), ".gitignore needs the line {line}");
    }
}

#[test]
fn daemon_crates_refuse_a_build_inside_their_sources() {
    for nested in ["target/blockdev", "target/core", "target/gateway"] {
        let manifest = table(&format!("{nested}/Cargo.toml"));
        assert_eq!(manifest["package"]["build"].as_str(), Some("../build.rs"), "{nested}");
    }
    let guard = text("target/build.rs");
    assert!(guard.contains("OUT_DIR") && guard.contains("exit(1)"));
}

/// A package's `clippy.toml` replaces that of the root.
#[test]
fn a_clippy_file_of_a_package_only_adds_to_that_of_the_root() {
    let of_package = table("target/core/clippy.toml");
    for (key, value) in table("clippy.toml") {
        assert_eq!(of_package.get(&key), Some(&value), "{key} in target/core/clippy.toml");
    }
    assert!(of_package.contains_key("disallowed-methods"));
    assert_eq!(table("target/gateway/clippy.toml"), of_package, "without clock and threads too");
}

#[test]
fn tokio_stays_in_the_control_plane() {
    let allowed = |name: &str| {
        name.starts_with("target/src/control/")
            || name.starts_with("target/src/bin/")
            || ["target/src/control/mod.rs", "target/src/main.rs", "initiator/src/main.rs"]
                .contains(&name)
    };
    for (name, lines) in sources() {
        if allowed(&name) || name == "tests/tests/guards.rs" {
            continue;
        }
        for line in &lines {
            assert!(!words(line).any(|word| word == "tokio"), "{name} uses tokio: {line}");
        }
    }
}

/// Of what is synchronised elsewhere no test would see that it is missing.
#[test]
fn the_daemon_calls_fsync_only_in_tested_modules() {
    const CALLS: [&str; 5] = ["sync_all", "sync_data", "fsync", "fdatasync", "syncfs"];
    for (name, lines) in sources() {
        let tested = ["target/blockdev/src/durable.rs", "target/blockdev/src/uring/calls.rs"];
        let is_tested = tested.contains(&name.as_str()) || name.ends_with("tests.rs");
        let is_daemon = name.starts_with("target/") && name.contains("/src/");
        if !is_daemon || is_tested {
            continue;
        }
        // Tests within a file are behind its code.
        let is_tests = |line: &String| line.ends_with("mod tests {");
        let code = lines.iter().take_while(|line| !is_tests(line));
        for line in code.filter(|line| !line.contains("durable::")) {
            let called = words(line).find(|word| CALLS.contains(word));
            assert!(called.is_none() || line.contains("fn "), "{name}: `durable` has it: {line}");
        }
    }
}

#[test]
fn unsafe_code_is_confined_to_listed_files() {
    const FENCED: [&str; 6] = [
        // Commands of ublk name memory and files by number; descriptors of requests are mapped.
        "initiator/src/attach/ublk/ring.rs",
        "rdma/src/pool/mod.rs",
        "rdma/src/verbs/ffi/mod.rs",
        "target/blockdev/src/ceph_client/ffi/mod.rs",
        "target/blockdev/src/uring/calls.rs",
        "target/blockdev/src/uring/mod.rs",
    ];
    // The files beside a fenced one inherit what it has lifted. In those of one they may use it.
    const BESIDE: [&str; 2] = ["rdma/src/pool/", "target/blockdev/src/uring/"];
    let lints = table("Cargo.toml");
    assert_eq!(lints["workspace"]["lints"]["rust"]["unsafe_code"].as_str(), Some("deny"));
    for member in MEMBERS {
        let inherits = &table(&format!("{member}/Cargo.toml"))["lints"]["workspace"];
        assert_eq!(inherits.as_bool(), Some(true), "{member}/Cargo.toml inherits the lints");
    }
    for (name, lines) in sources() {
        if FENCED.contains(&name.as_str()) || name == "tests/tests/guards.rs" {
            continue;
        }
        for line in &lines {
            let opens = words(line).any(|word| word == "unsafe_code");
            assert!(!opens, "{name} lifts the ban on unsafe code: {line}");
            let beside = BESIDE.iter().any(|directory| name.starts_with(directory))
                && !name.ends_with("/tests.rs");
            let lifts = beside && words(line).any(|word| word == "unsafe");
            assert!(!lifts, "{name} is outside the fence: {line}");
        }
    }
}

#[test]
fn dependencies_point_one_way() {
    for (member, never) in [
        ("nvme", &["rdma", "nvmfd-blockdev", "nvmfd-core", "nvmfd", "initiator"][..]),
        ("rdma", &["nvme", "nvmfd-blockdev", "nvmfd-core", "nvmfd", "initiator"]),
        ("target/blockdev", &["nvmfd-core", "nvmfd", "tokio", "initiator", "tests"]),
        ("target/core", &["nvmfd", "tokio", "initiator", "tests"]),
        ("target/gateway", &["nvmfd-blockdev", "nvmfd-core", "nvmfd", "tokio", "initiator"]),
        ("target", &["initiator", "tests"]),
        ("initiator", &["nvmfd-blockdev", "nvmfd-core", "nvmfd", "tests"]),
    ] {
        let has = dependencies(member);
        for never in never {
            assert!(!has.iter().any(|each| each == never), "{member} must not depend on {never}");
        }
    }
}

#[test]
fn every_dependency_is_justified_and_used() {
    let manifest = table("Cargo.toml");
    let shared = manifest["workspace"]["dependencies"].as_table().expect("a table");
    let reasons = text("Cargo.toml");
    let lines: Vec<&str> = reasons.lines().collect();
    let used: Vec<String> = MEMBERS.iter().flat_map(|member| dependencies(member)).collect();
    let own =
        ["nvme", "rdma", "nvmfd-blockdev", "nvmfd-core", "nvmfd-gateway", "nvmfd", "initiator"];
    for name in shared.keys().filter(|name| !own.contains(&name.as_str())) {
        let at = lines.iter().position(|line| line.starts_with(&format!("{name} = ")));
        let reason = at.and_then(|at| lines.get(at.checked_sub(1)?));
        let is_justified = reason.is_some_and(|line| line.starts_with("# "));
        assert!(is_justified, "Cargo.toml has no comment with the reason above `{name}`");
        assert!(used.contains(name), "no crate uses `{name}`: remove it from Cargo.toml");
    }
}

/// rdma-sys needs the headers of rdma-core and a libclang that current distributions do not have.
#[test]
fn programs_are_built_without_rdma_sys() {
    for member in MEMBERS {
        let manifest = table(&format!("{member}/Cargo.toml"));
        let features = manifest.get("features").and_then(Value::as_table);
        for (name, enables) in features.into_iter().flatten() {
            let mut enables = enables.as_array().into_iter().flatten().filter_map(Value::as_str);
            let needs = enables.any(|it| it.contains("rdma-sys") || it.contains("layout-test"));
            assert!(!needs || name == "layout-test", "{member}: {name} enables rdma-sys");
        }
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let dependency = manifest.get(section).and_then(|all| all.get("rdma-sys"));
            let optional = |it: &Value| it.get("optional").and_then(Value::as_bool) == Some(true);
            assert!(dependency.is_none_or(optional), "{member} depends on rdma-sys");
        }
    }
}

#[test]
fn scripts_can_be_run_and_stop_at_the_first_failure() {
    use std::os::unix::fs::PermissionsExt;
    let scripts = [
        ".ci/run",
        "tests/vm/demo",
        "tests/package/container",
        "tests/package/run",
        "configs/debian/build",
        "configs/rpm/build",
        "configs/sbom",
        "configs/licenses",
    ];
    for script in scripts {
        let mode = root().join(script).metadata().expect(script).permissions().mode();
        // A checkout under an umask of 077 has no other bits.
        assert!(mode & 0o100 != 0, "{script} is executable");
        assert!(text(script).contains("set -euo pipefail"), "{script}");
    }
}

/// `promtool` is of Debian's package `prometheus`; `make test-packages` takes it out of there, so
/// that no server is installed.
#[test]
fn the_alerts_are_rules_that_prometheus_loads() {
    let beside = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../promtool");
    let own = beside.exists().then(|| beside.into_os_string());
    let output = Command::new(own.unwrap_or_else(|| "promtool".into()))
        .args(["check", "rules"])
        .arg(root().join("configs/prometheus-alerts.yml"))
        .output()
        .expect("promtool is there: `make test-packages` fetches it");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

/// Commands that a limit holds back are in the stage "wait" as well.
#[test]
fn the_buffer_alert_ignores_commands_delayed_by_a_limit() {
    let alerts = text("configs/prometheus-alerts.yml");
    let of_buffers: Vec<&str> =
        alerts.split("- alert: ").filter(|alert| alert.contains("data buffers")).collect();
    assert_eq!(of_buffers.len(), 1);
    let lines = of_buffers[0].lines().filter(|line| !line.trim_start().starts_with('#'));
    let read: String = lines.collect();
    assert!(
        read.contains("nvmfd_commands_waiting_for_buffer") && !read.contains("stage="),
        "{read}"
    );
}

/// Files of the book, and what else leads there.
fn pages() -> Vec<String> {
    let directory = fs::read_dir(root().join("docs/src")).expect("the book");
    let names = directory.map(|entry| entry.expect("an entry").file_name());
    let pages = names.filter_map(|name| name.into_string().ok().filter(|n| n.ends_with(".md")));
    pages.map(|name| format!("docs/src/{name}")).collect()
}

/// Where the links of a text of Markdown lead.
fn links(markdown: &str) -> impl Iterator<Item = &str> {
    markdown.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0))
}

/// The heading that a link means, as the book names it.
fn has_heading(markdown: &str, anchor: &str) -> bool {
    let mut is_code = false;
    let headings = markdown.lines().filter(|line| {
        is_code ^= line.starts_with("```");
        !is_code && line.starts_with('#')
    });
    let named = |line: &str| -> String {
        let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
        let title = line.trim_start_matches('#').trim().to_lowercase();
        title.chars().filter(kept).collect::<String>().replace(' ', "-")
    };
    { headings }.any(|line| named(line) == anchor)
}

#[test]
fn documentation_links_resolve() {
    let summary = text("docs/src/SUMMARY.md");
    let others = [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "docs/reliability.md",
        "docs/support.md",
        "docs/why.md",
        "tests/vm/README.md",
    ];
    for page in pages().into_iter().chain(others.map(str::to_owned)) {
        let markdown = text(&page);
        let directory = root().join(&page).parent().expect("a directory").to_owned();
        for link in links(&markdown).filter(|link| !link.contains("://")) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let file = if path.is_empty() { root().join(&page) } else { directory.join(path) };
            let found = fs::read_to_string(&file).unwrap_or_default();
            assert!(file.exists(), "{page}: {link}");
            assert!(anchor.is_empty() || has_heading(&found, anchor), "{page}: {link}");
        }
        let name = page.strip_prefix("docs/src/").filter(|name| *name != "SUMMARY.md");
        let is_told = name.is_none_or(|name| links(&summary).any(|link| link == name));
        assert!(is_told, "{page} is not in the book's summary");
    }
}

#[test]
fn alerts_and_dashboard_use_exactly_the_exported_metrics() {
    let told = text("target/src/telemetry/prometheus.rs");
    for file in ["configs/prometheus-alerts.yml", "configs/grafana-dashboard.json"] {
        let asked = text(file);
        let metrics: Vec<&str> = words(&asked).filter(|word| word.starts_with("nvmfd_")).collect();
        assert!(metrics.len() > 5, "{file}");
        for metric in metrics {
            let parts = ["_total", "_bucket", "_sum", "_count"];
            let name = parts.iter().find_map(|part| metric.strip_suffix(part)).unwrap_or(metric);
            assert!(told.contains(&format!("\"{name}\"")), "{file}: {metric}");
        }
    }
    // The book has some of both; `nvmfd_config` is a variable of Ansible, and so is `nvmfd_restart`.
    let rules = text("configs/prometheus-alerts.yml");
    for page in pages() {
        let page = text(&page);
        for word in words(&page).filter(|word| !word.ends_with('_')) {
            let name = word.strip_suffix("_total").unwrap_or(word);
            let is_lower = !word.contains(|c: char| c.is_ascii_uppercase());
            let is_other = ["nvmfd_config", "nvmfd_restart"].contains(&word);
            let is_metric = word.starts_with("nvmfd_") && is_lower && !is_other;
            assert!(!is_metric || told.contains(&format!("\"{name}\"")), "{word}");
            let is_alert = word.strip_prefix("Nvmfd").is_some_and(|rest| !rest.is_empty());
            assert!(!is_alert || rules.contains(&format!("alert: {word}\n")), "{word}");
        }
    }
    let asked = text("configs/prometheus-alerts.yml") + &text("configs/grafana-dashboard.json");
    let (metrics, _) = told.split_once("#[cfg(test)]").expect("tests");
    for metric in words(metrics).filter(|word| word.starts_with("nvmfd_")) {
        assert!(asked.contains(metric), "neither an alert nor the dashboard shows {metric}");
    }
    // What the alerts call causes are some.
    let (alerts, causes) = (text("configs/prometheus-alerts.yml"), text("docs/why.md"));
    for each in alerts.split("cause=~").skip(1) {
        let names = each.split('"').nth(1).expect("names in quotes").split('|');
        for name in names {
            assert!(causes.contains(&format!("| `{name}` |")), "{name}");
        }
    }
}

/// The package installs the book: `make install` has the directory.
#[test]
fn each_alert_links_to_a_section_of_the_book() {
    let alerts = text("configs/prometheus-alerts.yml");
    for alert in alerts.split("- alert: ").skip(1) {
        let name = alert.lines().next().expect("a name");
        let (_, url) = alert.split_once("runbook_url: \"").expect(name);
        let url = url.split('"').next().expect("its end");
        let installed = url.strip_prefix("file:///usr/share/doc/nvmfd/").expect(name);
        let (page, anchor) = installed.split_once('#').expect(name);
        assert!(has_heading(&text(page), anchor), "{name}: {url}");
    }
}

/// At each boot and with each upgrade: a directory that an administrator has closed stays closed.
#[test]
fn tmpfiles_keep_owner_and_mode_of_configuration_directories() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    let root = tempfile::tempdir().expect("a directory");
    let at = |path: &str| root.path().join(path);
    fs::create_dir_all(at("etc/nvmfd/keys")).expect("a directory");
    // Only root can give directories to others.
    if chown(at("etc/nvmfd"), Some(0), Some(4711)).is_err() {
        return;
    }
    for path in ["etc/nvmfd", "etc/nvmfd/keys"] {
        fs::set_permissions(at(path), fs::Permissions::from_mode(0o700)).expect("its mode");
    }
    fs::write(at("etc/passwd"), "root:x:0:0::/:/bin/sh\nnvmfd:x:4712:4712::/:/bin/sh\n").unwrap();
    fs::write(at("etc/group"), "root:x:0:\nnvmfd:x:4712:\n").unwrap();
    let mut command = Command::new("systemd-tmpfiles");
    command.args(["--create", "--root"]).arg(root.path());
    let Ok(status) = command.arg(self::root().join("configs/tmpfiles.conf")).status() else {
        return;
    };
    assert!(status.success());
    let of = |path: &str| {
        let found = at(path).metadata().expect(path);
        (found.mode() & 0o7777, found.uid(), found.gid())
    };
    assert_eq!(of("etc/nvmfd"), (0o700, 0, 4711));
    assert_eq!(of("etc/nvmfd/keys"), (0o700, 0, 0));
    assert_eq!(of("etc/nvmfd/conf.d"), (0o755, 0, 0), "it is made");
    assert_eq!(of("var/lib/nvmfd"), (0o750, 4712, 4712));
}

#[test]
fn package_purge_lists_every_state_file() {
    let postrm = text("configs/debian/postrm");
    let (_, names) = postrm.split_once("for name in ").expect("a loop");
    let names: Vec<&str> = names.split(';').next().expect("its list").split(' ').collect();
    for (file, constant) in [
        ("target/src/state/served.rs", "SERVED"),
        ("target/src/state/lock.rs", "NAME"),
        ("target/src/overlay/change_log.rs", "NAME"),
        ("target/src/control/history.rs", "NAME"),
        ("target/src/state/usage.rs", "NAME"),
        ("target/src/state/identity.rs", "FILE"),
        ("target/src/state/power.rs", "NAME"),
        ("target/src/state/revoked_hosts.rs", "NAME"),
        ("target/src/state/shared_config.rs", "COPY"),
        ("target/src/config/ceph.rs", "ADDRESSES"),
    ] {
        let source = text(file);
        let (_, rest) = source.split_once(&format!("const {constant}: &str = \"")).expect(file);
        let (name, _) = rest.split_once('"').expect("its end");
        assert!(names.contains(&name), "{name} of {file}");
    }
    assert!(postrm.contains("/$name.damaged"), "copies of damaged ones");
    // Those of earlier versions as well.
    let earlier = ["reservation", "protection", "uncorrectable", "format", "trust"];
    for kind in earlier.iter().chain(&["namespace", "events"]) {
        assert!(names.contains(&&*format!("\"$id.{kind}\"")), "{kind}");
    }
}
