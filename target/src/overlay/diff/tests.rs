use std::collections::{BTreeMap, BTreeSet};

use crate::config::known_keys;
use crate::overlay::diff::*;

/// A configuration with every key. `«` and `»` enclose the parts that are changed, ` | `
/// separates the old value from the new one.
const EVERY_KEY: &str = r#"
include = «"conf.d" | "more.d"»
provider = «"soft" | "auto"»
missing = «"wait" | "fail"»
state_directory = «"/var/lib/nvmfd" | "/var/lib/other"»

[reactor]
threads = «1 | 2»
cpus = «[2, 3] | [3, 2]»
spin_us = «50 | 60»
io_engine = «"io_uring" | "threads"»

[memory]
data = «"64MiB" | "65MiB"»
receives = «8192 | 8193»

[limits]
queue_depth = «64 | 65»
io_queues = «8 | 9»
in_capsule = «"8KiB" | "4KiB"»
mdts = «"512KiB" | "256KiB"»
controllers = «32 | 33»

[capture]
path = «"/tmp/a" | "/tmp/b"»
payload = «true | false»
limit = «"1MiB" | "2MiB"»

[ceph]
conf = «"/etc/ceph/a.conf" | "/etc/ceph/b.conf"»
client = «"a" | "b"»
keyring = «"/etc/ceph/a" | "/etc/ceph/b"»

[observe]
slow_ms = «10 | 11»

[soft]
source_ports = «2 | 3»

[stop]
inaccessible_ms = «20 | 21»

[management]
enabled = «true | false»
socket = «"/run/a" | "/run/b"»
mode = «"0660" | "0600"»
group = «"a" | "b"»
http = «"127.0.0.1:4480" | "127.0.0.1:4481"»
http_token_file = «"/run/a" | "/run/b"»
console = «true | false»

[authentication]
required = «true | false»
discovery = «true | false»
hashes = «["sha256", "sha512"] | ["sha512", "sha256"]»
groups = «["ffdhe2048"] | ["ffdhe3072"]»

[discovery]
nqn = «"nqn.2026-11.org.example:d" | "nqn.2026-11.org.example:e"»
by_listener = «true | false»
mdns = «true | false»
[[discovery.referral]]
address = «"192.0.2.7" | "192.0.2.8"»
port = «8009 | 8010»
nqn = «"nqn.2026-11.org.example:r" | "nqn.2026-11.org.example:s"»
hosts = «["nqn.2026-11.org.example:g"] | []»

[[listener]]
address = «"127.0.0.1" | "127.0.0.2"»
port = «4420 | 4421»
id = «7 | 8»
ana = «"optimized" | { 2 = "inaccessible" }»
keep_alive_min_ms = «5 | 6»
[[listener]]
address = "127.0.0.9"
id = 1

[[host]]
nqn = «"nqn.2026-11.org.example:h" | "nqn.2026-11.org.example:i"»
authenticate = «true | false»
dhchap_key_file = «"/k" | "/l"»
dhchap_ctrl_key_file = «"/m" | "/n"»
hashes = «["sha256"] | ["sha384"]»
groups = «["null"] | ["ffdhe2048"]»

[[qos]]
name = «"gold" | "lead"»
iops = «5 | 6»
bandwidth = «"1MiB" | "2MiB"»
burst_ms = «5 | 6»
hosts = «["nqn.2026-11.org.example:h"] | []»
[[qos]]
name = "silver"
iops = 7

[[subsystem]]
nqn = «"nqn.2026-11.io.nvmfd:a" | "nqn.2026-11.io.nvmfd:b"»
allow_any_host = «true | false»
hosts = «["nqn.2026-11.org.example:h"] | []»
serial = «"1" | "2"»
model = «"a" | "b"»
listeners = «[1] | [1, 7]»
queue_depth = «32 | 33»
io_queues = «4 | 5»
mdts = «"64KiB" | "128KiB"»
controllers = «4 | 5»
max_nsid = «8 | 9»
cntlids = «[1, 100] | [1, 101]»
duplicate_hosts = «"refuse" | "replace"»
[subsystem.managed]
directory = «"/srv/a" | "/srv/b"»
pool = «"rbd" | "rbd/space"»
quota = «"1GiB" | "2GiB"»
namespaces = «4 | 5»
hosts = «"any" | []»
[[subsystem.namespace]]
nsid = «1 | 2»
kind = «"null" | "ram"»
size = «"1GiB" | "2GiB"»
block_size = «512 | 4096»
read_only = «true | false»
uuid = «"f81d4fae-7dec-41d0-a765-00a0c91e6bf6" | "f81d4fae-7dec-41d0-a765-00a0c91e6bf7"»
nguid = «"00112233445566778899aabbccddeeff" | "00112233445566778899aabbccddeefe"»
eui64 = «"0011223344556677" | "0011223344556678"»
ana_group = «1 | 2»
hosts = «["nqn.2026-11.org.example:h"] | []»
allow_format = «true | false»
write_uncorrectable = «true | false»
fault = «"none" | "slow"»
[subsystem.namespace.limit]
iops = «5 | 6»
bandwidth = «"1MiB" | "2MiB"»
burst_ms = «5 | 6»
shared = "gold"
[[subsystem.namespace]]
nsid = 3
path = «"/srv/c" | "/srv/d"»
shared = «false | true»
limit = { shared = «"gold" | "silver"» }
"#;

/// As [`EVERY_KEY`], for what only serves images.
const GROUP_KEYS: &str = r#"
[group]
name = «"g" | "h"»
pool = «"rbd" | "other"»
gateway = «"a" | "b"»
slot = «1 | 2»
shared = «false | true»

[[listener]]
address = "127.0.0.9"

[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:a"
"#;

/// The text with the old values, except for one place (from 0), which has the new value.
fn written(keys: &str, changed: Option<usize>) -> String {
    let mut text = String::new();
    for (place, part) in keys.split('«').enumerate() {
        let Some((choice, rest)) = part.split_once('»') else {
            text.push_str(part);
            continue;
        };
        let (was, is) = choice.split_once(" | ").expect("two values");
        text.push_str(if changed == Some(place - 1) { is } else { was });
        text.push_str(rest);
    }
    text
}

/// The lines that are changed, in the order of their places: title of the section, key.
fn places(keys: &str) -> Vec<(String, String)> {
    let mut title = "the file".to_owned();
    let mut places = Vec::new();
    for line in keys.lines() {
        if line.starts_with('[') {
            title = line.to_owned();
        }
        if line.contains('«') {
            let in_limit = line.starts_with("limit = {");
            let line = line.replace("limit = { shared", "shared");
            let title = if in_limit { "[subsystem.namespace.limit]" } else { &title };
            let key = line.split(' ').next().unwrap_or_default();
            places.push((title.to_owned(), key.to_owned()));
        }
    }
    places
}

fn compare_each(keys: &str) {
    let read = |text: &str| Config::parse(text).unwrap_or_else(|errors| panic!("{errors}\n{text}"));
    let base = read(&written(keys, None));
    assert_eq!(differences(&base, &base), Vec::<String>::new());
    let places = places(keys);
    for (place, (title, key)) in places.iter().enumerate() {
        let mut text = written(keys, Some(place));
        // References to a name change with it.
        if (title.as_str(), key.as_str()) == ("[[qos]]", "name") {
            text = text.replace("shared = \"gold\"", "shared = \"lead\"");
        }
        let changed = read(&text);
        assert_ne!(base, changed, "{title} {key} is a key without a meaning");
        for (old, new) in [(&base, &changed), (&changed, &base)] {
            let lines = differences(old, new);
            assert!(!lines.is_empty(), "{title} {key} is changed, and nothing is told");
            let told = |line: &String| line.contains(key) || told_as_a_thing(title, key);
            assert!(lines.iter().any(told), "{title} {key}: {lines:?}");
        }
    }
}

#[test]
fn the_diff_has_a_line_for_each_changed_key() {
    [EVERY_KEY, GROUP_KEYS].into_iter().for_each(compare_each);
    // No key is missing.
    let mut written: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (title, key) in [EVERY_KEY, GROUP_KEYS].into_iter().flat_map(places) {
        written.entry(title).or_default().insert(key);
    }
    for (title, keys) in known_keys() {
        for key in keys.into_iter().filter(|key| !is_a_section(title, key)) {
            assert!(written.get(title).is_some_and(|has| has.contains(key)), "{title} {key}");
        }
    }
}

/// Whether the difference has a line of its own for this key.
fn told_as_a_thing(title: &str, key: &str) -> bool {
    let things = ["[[listener]]", "[[host]]", "[[qos]]", "[[subsystem]]"];
    things.contains(&title) && ["nqn", "name", "hosts", "allow_any_host"].contains(&key)
        || ["[[listener]]", "[[host]]"].contains(&title)
        || title == "[[discovery.referral]]"
        || key == "nsid"
        || key == "shared"
}

fn is_a_section(title: &str, key: &str) -> bool {
    let inside = [format!("[{key}]"), format!("[[{key}]]")];
    let title = title.trim_matches(['[', ']']);
    let nested = [format!("[{title}.{key}]"), format!("[[{title}.{key}]]")];
    let all: Vec<&str> = known_keys().into_keys().collect();
    let is = |name: &String| all.contains(&name.as_str());
    if title == "the file" { inside.iter().any(is) } else { nested.iter().any(is) }
}

#[test]
fn diff_lines_show_the_old_and_the_new_value() {
    let base = Config::parse(&written(EVERY_KEY, None)).unwrap();
    let said = |from: &str, to: &str| {
        let text = written(EVERY_KEY, None);
        assert!(text.contains(from), "{from}");
        differences(&base, &Config::parse(&text.replacen(from, to, 1)).unwrap())
    };
    let one = |from, to, says: &str| assert_eq!(said(from, to), [says], "{from}");
    one("slow_ms = 10", "slow_ms = 20", "~ observe slow_ms 10 becomes 20");
    one("[observe]\nslow_ms = 10", "", "~ observe slow_ms 10 becomes 100");
    one("iops = 5", "iops = 6", "~ qos gold iops 5 becomes 6");
    one("iops = 5\n", "", "~ qos gold iops 5 becomes none");
    one(
        "quota = \"1GiB\"",
        "quota = \"2GiB\"",
        "~ nqn.2026-11.io.nvmfd:a managed quota 1GiB becomes 2GiB",
    );
    one("provider = \"soft\"", "", "~ provider soft becomes auto");
    let limit = said("[[qos]]\nname = \"silver\"\niops = 7\n", "");
    assert_eq!(limit, ["- qos (name silver, iops 7, burst_ms 100)"]);
    let size = said("size = \"1GiB\"", "size = \"3GiB\"");
    assert!(size[0].starts_with("~ namespace 1: null of 3GiB"), "{size:?}");
    assert!(size[0].ends_with("(size 1GiB becomes 3GiB)"), "{size:?}");
}
