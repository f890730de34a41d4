mod access;

use proptest::prelude::*;

use crate::config::*;
use crate::core::subsystem::MAX_NSID;

const LEAST: &str = r#"
[[listener]]
address = "0.0.0.0"
[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:disk1"
allow_any_host = true
[[subsystem.namespace]]
nsid = 1
path = "/var/lib/nvmfd/disk1.img"
size = "10GiB"
"#;

fn mistakes(text: &str) -> Vec<String> {
    let errors = Config::parse(text).expect_err("a mistake");
    assert!(!errors.mistakes.is_empty());
    errors.mistakes.iter().map(ToString::to_string).collect()
}

#[test]
fn a_minimal_configuration_gets_the_defaults() {
    let config = Config::parse(LEAST).unwrap();
    assert_eq!(config.provider, Provider::Auto);
    assert_eq!(config.reactor, ReactorConfig::default());
    assert_eq!(config.memory, MemoryConfig::default());
    assert_eq!(config.limits, Limits::default());
    let at = |text: &str| ListenerConfig::from(text.parse::<SocketAddr>().unwrap());
    assert_eq!(config.listeners, [at("0.0.0.0:4420")]);
    assert_eq!(config.subsystems[0].offer, AccessPolicy::default());
    assert_eq!(config.discovery, DiscoveryConfig::default());
    let subsystem = &config.subsystems[0];
    assert_eq!(subsystem.model, "nvmfd");
    let namespace = &subsystem.namespaces[0];
    assert_eq!(namespace.block_size_bytes, 4096);
    assert!(!namespace.read_only);
    let path = PathBuf::from("/var/lib/nvmfd/disk1.img");
    assert_eq!(namespace.kind, NamespaceKind::File { path, size: Some(10 << 30) });
    assert!(config.warnings().is_empty());
}

#[test]
fn a_reactor_takes_about_64_mib_by_default() {
    let total = Config::parse(LEAST).unwrap().pool_plan().total_bytes();
    assert!((60 << 20..70 << 20).contains(&total), "{total}");
}

#[test]
fn documents_name_every_section_that_only_a_restart_changes() {
    let running = Config::parse(LEAST).unwrap();
    let mut changed = Config::parse(&format!(
        "provider = \"soft\"\nstate_directory = \"/s\"\n{LEAST}[reactor]\nthreads = 2\n[memory]\n\
         receives = 8192\n[limits]\nqueue_depth = 32\n[capture]\npath = \"/p\"\n[soft]\n\
         source_ports = 2\n[management]\nconsole = false\n"
    ))
    .unwrap();
    let name = || "g".to_owned();
    let (pool, gateway) = (name(), name());
    changed.group = Some(GroupConfig { name: name(), pool, gateway, slot: 0, shared: false });
    let fixed = running.needs_restart(&changed);
    assert_eq!(fixed.len(), 9, "all of them");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    for (document, begin, end) in [
        ("docs/src/troubleshooting.md", "Keys that need a restart (", ")"),
        ("configs/nvmfd.toml", "Changes of [reactor]", "next start"),
    ] {
        let text = text(document);
        let (_, rest) = text.split_once(begin).expect("the list");
        let (list, _) = rest.split_once(end).expect("its end");
        for section in &fixed {
            assert!(format!("[reactor]{list}").contains(section), "{document}: {section}");
        }
    }
    let page = text("docs/src/configuration.md");
    let marked = |section: &&&str| match section.starts_with('[') {
        true => page
            .split("\n## ")
            .any(|part| part.starts_with(&format!("`{section}`")) && part.contains("*restart*")),
        false => page.lines().any(|line| {
            line.starts_with(&format!("| `{section}` |")) && line.contains("*restart*")
        }),
    };
    let unmarked: Vec<_> = fixed.iter().filter(|section| !marked(section)).collect();
    assert!(unmarked.is_empty(), "{unmarked:?}");
    // The first one explains the mark.
    assert_eq!(page.matches("*restart*").count(), fixed.len() + 1);
}

#[test]
fn configurations_in_the_book_are_accepted() {
    let subsystem = "[[subsystem]]\nnqn = \"nqn.2026-11.org.example:a\"\nallow_any_host = true\n";
    let mut blocks = 0;
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src");
    for page in std::fs::read_dir(book).unwrap().map(|entry| entry.unwrap().path()) {
        let text = if page.is_file() { std::fs::read(&page).unwrap() } else { continue };
        let text = String::from_utf8_lossy(&text).into_owned();
        for block in text.split("```toml\n").skip(1) {
            let (block, _) = block.split_once("```").expect("its end");
            // A part has no subsystem for its namespaces.
            let of_namespace = "[[subsystem.namespace]]";
            let whole = match block.contains("[[subsystem]]") {
                true => block.to_owned(),
                false => block.replacen(of_namespace, &format!("{subsystem}{of_namespace}"), 1),
            };
            let read = Config::parse(&whole);
            assert!(read.is_ok(), "{}: {}", page.display(), read.unwrap_err());
            blocks += 1;
        }
    }
    assert!(blocks >= 7, "{blocks}");
}

#[test]
fn every_key_is_read() {
    let config = Config::parse(
        r#"
provider = "verbs"
[reactor]
threads = 2
cpus = [2, 3]
spin_us = 50
io_engine = "threads"
[memory]
data = "64MiB"
receives = 8192
[limits]
queue_depth = 64
io_queues = 4
in_capsule = "8KiB"
mdts = "256KiB"
controllers = 7
[[listener]]
address = "192.0.2.1"
port = 4421
[[listener]]
address = "::1"
[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:a"
hosts = ["nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-41d0-a765-00a0c91e6bf6"]
serial = "S 1"
model = "A model"
[[subsystem.namespace]]
nsid = 7
kind = "ram"
size = "1GB"
block_size = 512
uuid = "f81d4fae-7dec-41d0-a765-00a0c91e6bf6"
read_only = true
[[subsystem.namespace]]
nsid = 8
kind = "null"
size = 8192
[[subsystem.namespace]]
nsid = 9
kind = "file"
path = "/dev/sdz"
"#,
    )
    .unwrap();
    assert_eq!(config.provider, Provider::Verbs);
    let reactor = ReactorConfig {
        threads: Auto::Number(2),
        cpus: vec![2, 3],
        spin: Auto::Number(50),
        io_engine: IoEngine::Threads,
    };
    assert_eq!(config.reactor, reactor);
    assert_eq!(config.memory, MemoryConfig { data_bytes: 64 << 20, receives: 8192 });
    let limits = Limits {
        queue_depth: 64,
        io_queues: 4,
        in_capsule_bytes: 8192,
        mdts_bytes: 256 << 10,
        controllers: 7,
    };
    assert_eq!(config.limits, limits);
    let at = |text: &str| ListenerConfig::from(text.parse::<SocketAddr>().unwrap());
    assert_eq!(
        config.listeners,
        [at("192.0.2.1:4421"), ListenerConfig { id: 2, ..at("[::1]:4420") }]
    );
    let subsystem = &config.subsystems[0];
    assert_eq!((subsystem.serial.as_str(), subsystem.model.as_str()), ("S 1", "A model"));
    let host = subsystem.hosts.first().unwrap();
    assert!(subsystem.admits(host));
    assert!(!subsystem.admits(&Nqn::DISCOVERY));
    let [ram, null, file] = subsystem.namespaces.as_slice() else { panic!("three namespaces") };
    assert_eq!(ram.kind, NamespaceKind::Ram { size: 1_000_000_000 });
    assert_eq!((ram.nsid, ram.block_size_bytes, ram.read_only), (7, 512, true));
    assert_eq!(ram.uuid.to_string(), "f81d4fae-7dec-41d0-a765-00a0c91e6bf6");
    assert_eq!(null.kind, NamespaceKind::Null { size: 8192 });
    assert_eq!(file.kind, NamespaceKind::File { path: "/dev/sdz".into(), size: None });
}

#[test]
fn derived_identities_never_change() {
    // Hosts store these: a change makes every namespace a new one for them.
    let subsystem = Config::parse(LEAST).unwrap().subsystems.remove(0);
    assert_eq!(subsystem.serial, "1F1304E456075F0BB457");
    assert_eq!(subsystem.namespaces[0].uuid.to_string(), "c862d3b8-0e87-5244-a6b3-ca7928f80983");

    let changed = LEAST.replace("10GiB", "20GiB").replace("true", "false");
    let same = Config::parse(&changed).unwrap().subsystems.remove(0);
    assert_eq!(same.serial, subsystem.serial);
    assert_eq!(same.namespaces[0].uuid, subsystem.namespaces[0].uuid, "size is not identity");

    for (from, to) in [("nsid = 1", "nsid = 2"), ("disk1\"", "disk2\""), ("disk1.img", "2.img")] {
        let other = Config::parse(&LEAST.replace(from, to)).unwrap().subsystems.remove(0);
        assert_ne!(other.namespaces[0].uuid, subsystem.namespaces[0].uuid, "{to}");
    }
}

#[test]
fn all_errors_are_reported_at_once_with_their_positions() {
    let found = mistakes(
        r#"provider = "tcp"
colour = "blue"
[limits]
queue_deph = 64
mdts = "3MiB"
[[listener]]
address = "localhost"
[[subsystem]]
nqn = "disk1"
hosts = ["nqn.2026-11.io.nvmfd:h", 7]
[[subsystem.namespace]]
nsid = 0
path = "disk.img"
block_size = 520
"#,
    );
    let starts = [
        "line 1, column 12: `provider` is \"tcp\"",
        "line 2, column 1: unknown key `colour`",
        "line 4, column 1: unknown key `queue_deph`: did you mean `queue_depth`?",
        "line 5, column 8: `mdts` is 3MiB: write a power of two",
        "line 7, column 11: `address`: \"localhost\" is no IP address: write an IP address",
        "line 9, column 7: not an NQN: ",
        "line 10, column 36: `hosts`: the number 7 where a text is expected: write a list",
        "line 12, column 8: 0 cannot be an nsid: write a number from 1 to 1024",
        "line 13, column 8: `path` is \"disk.img\", which depends on a directory",
        "line 14, column 14: blocks of 520 bytes: write 512 or 4096",
    ];
    assert_eq!(found.len(), starts.len(), "{found:#?}");
    for (found, start) in found.iter().zip(starts) {
        assert!(found.starts_with(start), "{found}\n  does not start with\n{start}");
    }
}

#[test]
fn an_unknown_key_is_matched_to_keys_of_other_sections() {
    let found = Config::parse("queue_deph = 64\nsize = \"1GiB\"\n[[subsystem]]\n").unwrap_err();
    let says =
        "`queue_deph`: did you mean `queue_depth` of [[subsystem]] or `queue_depth` of [limits]?";
    assert!(found.to_string().contains(says), "{found}");
}

/// Changes to the minimal text, and the resulting message.
#[test]
fn each_configuration_error_has_its_own_message() {
    let second = "[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:disk2\"\n[[subsystem.namespace]]\n";
    let disk1 = "/var/lib/nvmfd/disk1.img";
    for (from, to, says) in [
        ("", "provider = \"tcp\"\n", "write one of \"auto\", \"verbs\", \"soft\""),
        ("", "reactor = 1\n", "write a section that begins with [reactor]"),
        ("", "[reactor]\nthreads = 0\n", "`threads` is 0"),
        ("", "[reactor]\nthreads = \"many\"\n", "neither a number nor \"auto\""),
        ("", "[reactor]\nthreads = -1\n", "-1 is out of range"),
        ("", "[reactor]\nthreads = 2\ncpus = [1]\n", "1 CPU for 2 reactors"),
        ("", "[reactor]\ncpus = [1, 1]\n", "a CPU is listed twice"),
        ("", "[reactor]\ncpus = []\n", "the list of CPUs is empty"),
        ("", "[reactor]\ncpus = [4000]\n", "a CPU number is 1024 or more"),
        ("", "[reactor]\nspin_us = 2000000\n", "`spin_us` is 2000000"),
        ("", "[reactor]\nio_engine = 'aio'\n", "`io_engine` is \"aio\""),
        ("", "[memory]\ndata = \"64KiB\"\n", "write at least 2304KiB"),
        ("", "[memory]\ndata = \"64 apples\"\n", "this unit of size is not known"),
        ("", "[memory]\nreceives = 100\n", "write at least 192"),
        ("", "[limits]\nqueue_depth = 1\n", "a number from 2 to 1024"),
        ("", "[limits]\nio_queues = 0\n", "a number from 1 to 256"),
        ("", "[limits]\ncontrollers = 70000\n", "a number from 1 to 4096"),
        ("", "[limits]\nin_capsule = 100\n", "0 or a multiple of \"4KiB\""),
        ("0.0.0.0\"", "224.0.0.1\"", "a multicast address"),
        ("0.0.0.0\"", "0.0.0.0\"\nport = 0", "a number from 1 to 65535"),
        ("address = \"0.0.0.0\"", "", "[[listener]] has no `address`"),
        (
            "[[subsystem]]",
            "[[listener]]\naddress = \"10.0.0.1\"\n[[subsystem]]",
            "10.0.0.1:4420 overlaps with 0.0.0.0:4420 of line 2",
        ),
        ("[[listener]]", "[listener]", "`listener` is not a list of sections"),
        ("nqn = \"nqn.2026-11.io.nvmfd:disk1\"", "", "[[subsystem]] has no `nqn`"),
        ("nqn.2026-11.io.nvmfd:disk1", "nqn.2014-08.org.nvmexpress.discovery", "the discovery"),
        ("allow_any_host = true", "allow_any_host = \"yes\"", "write true or false"),
        ("allow_any_host = true", "hosts = [\"me\"]", "not an NQN"),
        (
            "allow_any_host = true",
            "hosts = [\"nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000000\"]",
            "hosts without a name",
        ),
        ("allow_any_host = true", "serial = \"123456789012345678901\"", "1 to 20 printable"),
        ("allow_any_host = true", "serial = \"\"", "1 to 20 printable"),
        ("allow_any_host = true", "model = \"häuslich\"", "1 to 40 printable"),
        ("nsid = 1", "nsid = 1025", "1025 cannot be an nsid"),
        ("nsid = 1", "nsid = \"1\"", "write a number from 1 to 1024"),
        ("nsid = 1", "", "[[subsystem.namespace]] has no `nsid`"),
        ("10GiB", "10G", "may mean GiB or GB"),
        ("10GiB", "4097", "write a multiple of 4096, such as 8192"),
        ("10GiB", "0", "not a size of whole blocks"),
        (disk1, "/", "names no file"),
        (disk1, "", "depends on a directory"),
        ("nsid = 1", "nsid = 1\nkind = \"tape\"", "there is no kind \"tape\""),
        ("nsid = 1", "nsid = 1\nkind = \"ram\"", "of kind \"ram\" has no path"),
        ("nsid = 1", "nsid = 1\nuuid = \"1\"", "\"1\" is not a UUID"),
        ("path = \"/var/lib/nvmfd/disk1.img\"", "", "has no `path`"),
        ("nsid = 1", "nsid = 1\nfault = \"eio\"", "`fault` is \"eio\": write one of"),
        ("nsid = 1", "nsid = 1\nreadonly = true", "did you mean `read_only`?"),
    ] {
        let text = if from.is_empty() { format!("{to}{LEAST}") } else { LEAST.replace(from, to) };
        let found = mistakes(&text);
        assert!(found.iter().any(|line| line.contains(says)), "{text}\n{says}\n{found:#?}");
        assert!(found.iter().all(|line| !line.contains('\n')), "{found:#?}");
    }
    for (end, says) in [
        ("[[subsystem.namespace]]\nnsid = 1\npath = \"/b\"", "this nsid is used twice, first in"),
        ("[[subsystem.namespace]]\nnsid = 2\npath = \"/var/lib/nvmfd/./disk1.img\"", "this path"),
        ("[[subsystem.namespace]]\nnsid = 2\nkind = \"null\"", "\"null\" needs a `size`"),
        ("[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:disk1\"", "this NQN is used twice"),
        (&format!("{second}nsid = 1\npath = \"{disk1}\"\n"), "this path is used twice, first in"),
        ("[[subsystem]]\n[subsystem.namespace]\nnsid = 1", "is not a list of sections"),
    ] {
        let text = format!("{LEAST}{end}");
        let found = mistakes(&text);
        assert!(found.iter().any(|line| line.contains(says)), "{text}\n{says}\n{found:#?}");
    }
}

#[test]
fn a_broken_text_is_reported_without_follow_up_mistakes() {
    let found = mistakes("a = \nb = 1\nb = 2\n");
    assert!(found.len() >= 2, "{found:#?}");
    assert!(found[0].starts_with("line 1, column "), "{found:#?}");
    assert!(found.iter().all(|line| line.contains("not TOML")), "{found:#?}");
}

#[test]
fn an_empty_configuration_is_accepted_with_warnings() {
    let config = Config::parse("").unwrap();
    assert_eq!((config.listeners.len(), config.subsystems.len()), (0, 0));
    let found = config.warnings();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("there is no listener") && found[0].contains("[[listener]]"));
    assert!(found[1].starts_with("there is no subsystem") && found[1].contains("[[subsystem]]"));
}

#[test]
fn host_lists_that_admit_no_host_or_every_host_cause_a_warning() {
    let text = LEAST.replace("allow_any_host = true", "");
    let warnings = Config::parse(&text).unwrap().warnings();
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].contains("no host can connect"));
    let hosts = "allow_any_host = true\nhosts = [\"nqn.2026-11.io.nvmfd:h\"]";
    let text = LEAST.replace("allow_any_host = true", hosts);
    assert!(Config::parse(&text).unwrap().warnings()[0].contains("every host can connect"));
}

#[test]
fn listener_overlap_is_detected_as_by_the_kernel() {
    let two = |a: &str, b: &str, port: u16| {
        let listeners = format!(
            "[[listener]]\naddress = \"{a}\"\n[[listener]]\naddress = \"{b}\"\nport = {port}\n"
        );
        let text = LEAST.replace("[[listener]]\naddress = \"0.0.0.0\"\n", &listeners);
        Config::parse(&text).is_ok()
    };
    assert!(two("10.0.0.1", "10.0.0.2", 4420));
    assert!(two("0.0.0.0", "10.0.0.2", 4421));
    assert!(two("0.0.0.0", "::1", 4420));
    assert!(!two("10.0.0.1", "10.0.0.1", 4420));
    assert!(!two("10.0.0.1", "0.0.0.0", 4420));
    assert!(!two("::", "10.0.0.1", 4420));
    assert!(!two("::", "0.0.0.0", 4420));
}

#[test]
fn sections_that_need_a_restart_are_reported() {
    let old = Config::parse(LEAST).unwrap();
    let text = format!("{LEAST}[limits]\nqueue_depth = 32\n[reactor]\nspin_us = 9\n");
    let mut next = Config::parse(&text).unwrap();
    assert_eq!(old.needs_restart(&next), ["[reactor]", "[limits]"]);
    next.keep_fixed(&old);
    assert!(old.needs_restart(&next).is_empty());
}

#[test]
fn an_unreadable_configuration_file_is_reported_by_name() {
    let errors = Config::load(Path::new("/nonexistent/nvmfd.toml")).unwrap_err();
    let said = errors.to_string();
    assert!(
        said.starts_with("/nonexistent/nvmfd.toml: the configuration cannot be read"),
        "{said}"
    );
}

#[test]
fn the_printed_configuration_names_every_part() {
    let said = Config::parse(LEAST).unwrap().to_string();
    for part in
        ["provider    auto", "0.0.0.0:4420", "10GiB", "4096 receives x 8192", "allow_any_host true"]
    {
        assert!(said.contains(part), "{part}\n{said}");
    }
}

/// Fragments of configurations, so that random text is not rejected at its first character.
fn pieces() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "[[listener]]",
            "[[subsystem]]",
            "[[subsystem.namespace]]",
            "[limits]",
            "[memory]",
            "[reactor]",
            "nqn",
            "nsid",
            "hosts",
            "path",
            "size",
            "kind",
            "uuid",
            "serial",
            "port",
            "address",
            "data",
            "receives",
            "threads",
            "mdts",
            "=",
            "\n",
            "\n",
            " = ",
            "1",
            "0",
            "-7",
            "4096",
            "\"ram\"",
            "\"/a\"",
            "\"10GiB\"",
            "\"::\"",
            "\"auto\"",
            "true",
            "[",
            "]",
            "{",
            "}",
            "\"",
            "'",
            ".",
            ",",
            "#",
            "nan",
            "0x7f",
            "9223372036854775807",
            "1979-05-27",
            "\"nqn.2026-11.io.nvmfd:disk1\"",
            "\"\\u0000\"",
            "ü",
        ])
        .prop_map(str::to_owned),
        ".{0,4}",
    ];
    prop::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn parsing_arbitrary_text_never_panics(text: String) {
        let _ = Config::parse(&text);
    }

    #[test]
    fn parsing_nearly_valid_text_never_panics(text in pieces()) {
        if let Err(errors) = Config::parse(&text) {
            prop_assert!(!errors.mistakes.is_empty());
            let _ = errors.to_string();
        }
    }

    #[test]
    fn parsing_text_with_cuts_and_patches_never_panics(
        start in 0..LEAST.len(),
        len in 0..80usize,
        patch in ".{0,8}",
    ) {
        let end = (start + len).min(LEAST.len());
        let text = format!("{}{patch}{}", &LEAST[..start], &LEAST[end..]);
        let _ = Config::parse(&text);
    }

    #[test]
    fn valid_values_are_parsed_unchanged(
        nsid in 1..=MAX_NSID,
        blocks in 1..1u64 << 40,
        depth in 2..=1024u16,
        port in 1..=65535u16,
        read_only: bool,
    ) {
        let text = format!(
            "[limits]\nqueue_depth = {depth}\n[[listener]]\naddress = \"::1\"\nport = {port}\n\
             [[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:x\"\n[[subsystem.namespace]]\n\
             nsid = {nsid}\nkind = \"null\"\nsize = {}\nread_only = {read_only}\n",
            blocks * 4096
        );
        let config = Config::parse(&text).unwrap();
        let namespace = &config.subsystems[0].namespaces[0];
        prop_assert_eq!(namespace.nsid, nsid);
        prop_assert_eq!(&namespace.kind, &NamespaceKind::Null { size: blocks * 4096 });
        prop_assert_eq!(namespace.read_only, read_only);
        prop_assert_eq!(config.limits.queue_depth, depth);
        prop_assert_eq!(config.listeners[0].address.port(), port);
    }
}

#[test]
fn packet_capture_is_off_unless_a_path_is_configured() {
    assert_eq!(Config::parse(LEAST).unwrap().capture, None);
    let section = "[capture]\npath = \"/run/a.pcapng\"\n";
    let mut config = Config::parse(&format!("{LEAST}\n{section}")).unwrap();
    let headers =
        CaptureConfig { path: "/run/a.pcapng".into(), payload: false, limit_bytes: 1 << 30 };
    assert_eq!(config.capture, Some(headers));
    assert!(
        config.to_string().contains("path /run/a.pcapng, payload false, limit 1GiB"),
        "{config}"
    );
    let running = Config::parse(LEAST).unwrap();
    assert_eq!(running.needs_restart(&config), ["[capture]"]);
    config.keep_fixed(&running);
    assert!(running.needs_restart(&config).is_empty());

    let all = format!("{LEAST}\n{section}payload = true\nlimit = \"10MiB\"");
    let all = Config::parse(&all).unwrap();
    assert_eq!(all.capture.as_ref().map(|c| (c.payload, c.limit_bytes)), Some((true, 10 << 20)));
    assert!(all.warnings().iter().any(|line| line.contains("the data of hosts")));

    let errors = Config::parse(&format!("{LEAST}\n[capture]\npath = \"a\"")).unwrap_err();
    assert!(errors.to_string().contains("the path is not absolute"), "{errors}");
    let errors = Config::parse(&format!("{LEAST}\n[capture]")).unwrap_err();
    assert!(errors.to_string().contains("path"), "{errors}");
}

#[test]
fn write_uncorrectable_is_allowed_only_if_configured() {
    // The state directory may be that of the service manager.
    let config = Config::parse(&format!("{LEAST}write_uncorrectable = true\n")).unwrap();
    assert!(config.subsystems[0].namespaces[0].write_uncorrectable);
    assert!(config.subsystems[0].namespaces[0].needs_state());
    assert!(config.to_string().contains("hosts may make blocks unreadable"), "{config}");
    assert!(!Config::parse(LEAST).unwrap().subsystems[0].namespaces[0].write_uncorrectable);
}

#[test]
fn state_directory_of_the_unit_applies_to_its_configuration_file() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().to_str().unwrap();
    let given = |file: &str, state| unit_state_directory(Path::new(file), Path::new("/a"), state);
    assert_eq!(given("/a/nvmfd.toml", state).unwrap(), state);
    assert_eq!(given("/b/nvmfd.toml", state), None);
    assert_eq!(given("nvmfd.toml", state), None);
    assert_eq!(given("/a/nvmfd.toml", "/nonexistent"), None);
}

#[test]
fn state_directory_is_configured_or_given_by_the_service_manager() {
    let silent = Config::parse(LEAST).unwrap();
    assert_eq!(silent.state_directory, None);
    assert!(silent.to_string().contains("reservations end with the daemon"), "{silent}");
    let config = Config::parse(&format!("state_directory = \"/var/lib/x\"\n{LEAST}")).unwrap();
    assert_eq!(config.state_directory.as_deref(), Some(Path::new("/var/lib/x")));
    assert!(config.to_string().contains("state_directory /var/lib/x"), "{config}");
    assert_eq!(silent.needs_restart(&config), ["state_directory"]);
    let errors = Config::parse(&format!("state_directory = \"x\"\n{LEAST}")).unwrap_err();
    assert!(errors.to_string().contains("the path is not absolute"), "{errors}");

    // The directory of the service manager applies if none is configured.
    let given = |text: &str| Some(std::ffi::OsString::from(text));
    let state =
        |config: &Config, text| config.clone().or_state_directory(given(text)).state_directory;
    assert_eq!(state(&silent, "/run/a:/run/b").as_deref(), Some(Path::new("/run/a")));
    assert_eq!(state(&silent, ""), None);
    assert_eq!(state(&silent, "relative"), None);
    assert_eq!(state(&config, "/run/a").as_deref(), Some(Path::new("/var/lib/x")));
}

#[test]
fn shared_namespaces_refuse_settings_local_to_one_daemon() {
    let config = Config::parse(&format!("{LEAST}shared = true\n")).unwrap();
    assert!(config.subsystems[0].namespaces[0].shared);
    assert!(!Config::parse(LEAST).unwrap().subsystems[0].namespaces[0].shared);
    for key in ["write_uncorrectable", "allow_format"] {
        let said = mistakes(&format!("{LEAST}shared = true\n{key} = true\n")).join("\n");
        assert!(said.contains(&format!("no other daemon would know of `{key}`")), "{said}");
    }
}
