//! Tests of what is offered to whom, and of authentication.

use super::{LEAST, mistakes};
use crate::config::*;
use crate::core::subsystem::{DuplicateHosts, Referral};

#[test]
fn authentication_keys_and_policies_are_parsed() {
    let config = Config::parse(LEAST).unwrap();
    assert_eq!(config.authentication, AuthenticationConfig::default());
    assert!(!config.to_string().contains("host        "));
    let text = format!(
        r#"{LEAST}
[authentication]
required = true
discovery = true
hashes = ["sha512"]
groups = ["ffdhe4096", "null"]
[[host]]
nqn = "nqn.2026-11.host:a"
dhchap_key_file = "/etc/nvmfd/keys/a"
dhchap_ctrl_key_file = "/etc/nvmfd/keys/ours"
[[host]]
nqn = "nqn.2026-11.host:b"
dhchap_key_file = "/etc/nvmfd/keys/b"
hashes = ["sha384"]
[[host]]
nqn = "nqn.2026-11.host:c"
authenticate = false
"#
    );
    let config = Config::parse(&text).unwrap();
    let AuthenticationConfig { required, discovery, policy, hosts, exempt } =
        &config.authentication;
    assert!(*required && *discovery);
    assert_eq!(policy.hashes, [nvme::auth::HashId::SHA512]);
    assert_eq!(policy.groups, [nvme::auth::GroupId::FFDHE4096, nvme::auth::GroupId::NULL]);
    assert_eq!(hosts[0].key_file, PathBuf::from("/etc/nvmfd/keys/a"));
    assert_eq!(hosts[0].controller_key_file, Some(PathBuf::from("/etc/nvmfd/keys/ours")));
    assert_eq!((hosts.len(), &hosts[1].controller_key_file), (2, &None));
    assert!(!hosts[0].has_own_policy() && hosts[0].policy(policy) == *policy);
    let own = hosts[1].policy(policy);
    assert_eq!(own.hashes, [nvme::auth::HashId::SHA384]);
    assert_eq!(own.groups, policy.groups, "of which it says nothing");
    assert_eq!(exempt[..], ["nqn.2026-11.host:c".parse().unwrap()]);
    assert!(config.warnings().iter().any(|each| each.contains("nqn.2026-11.host:c is refused")));
    let printed = config.to_string();
    for line in [
        "required true, discovery true, hashes [SHA-512], groups [ffdhe4096, NULL]\n",
        "host        key of nqn.2026-11.host:a, and the controller's: SHA-512 with ffdhe4096, NULL\n",
        "host        key of nqn.2026-11.host:b: SHA-384 with ffdhe4096, NULL\n",
        "host        nqn.2026-11.host:c need not authenticate\n",
    ] {
        assert!(printed.contains(line), "{line:?} is not in {printed}");
    }
}

#[test]
fn invalid_authentication_settings_are_reported() {
    let says = |more: &str| mistakes(&format!("{LEAST}\n{more}")).join("\n");
    let hashes = says("[authentication]\nhashes = [\"md5\", \"sha256\", \"sha256\"]");
    assert!(hashes.contains("lists \"md5\"") && hashes.contains("twice"), "{hashes}");
    assert!(says("[authentication]\ngroups = []").contains("`groups` is empty"));
    assert!(says("[authentication]\nrequire = true").contains("did you mean `required`?"));
    assert!(says("[[host]]\nnqn = \"nqn.2026-11.host:a\"").contains("no `dhchap_key_file`"));
    let host = "[[host]]\nnqn = \"nqn.2026-11.host:a\"\ndhchap_key_file = \"a\"\n";
    let unknown = says(&format!("{host}hashes = [\"md5\"]\ngroups = []"));
    assert!(unknown.contains("lists \"md5\"") && unknown.contains("`groups` is empty"));
    let twice = says(&format!("{host}{host}"));
    assert!(twice.contains("not absolute") && twice.contains("was there before"), "{twice}");
    let lonely = format!("{LEAST}\n[authentication]\nrequired = true");
    let warnings = Config::parse(&lonely).unwrap().warnings();
    assert!(warnings[0].contains("no host can"), "{warnings:?}");
}

#[test]
fn discovery_and_access_settings_are_parsed() {
    let text = r#"
[discovery]
nqn = "nqn.2026-11.io.nvmfd:discovery"
by_listener = true
mdns = true
[[discovery.referral]]
address = "192.0.2.7"
[[discovery.referral]]
address = "2001:db8::7"
port = 8009
nqn = "nqn.2026-11.io.other:discovery"
hosts = ["nqn.2026-11.host:a"]
[[listener]]
address = "192.0.2.1"
[[listener]]
address = "192.0.2.2"
id = 9
[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:a"
allow_any_host = true
listeners = [9]
queue_depth = 32
io_queues = 2
mdts = "64KiB"
controllers = 3
max_nsid = 8
cntlids = [100, 199]
duplicate_hosts = "replace"
[[subsystem.namespace]]
nsid = 8
kind = "null"
size = 8192
hosts = ["nqn.2026-11.host:a"]
"#;
    let config = Config::parse(text).unwrap();
    assert_eq!(config.listeners.iter().map(|l| l.id).collect::<Vec<_>>(), [1, 9]);
    let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
    let offer = AccessPolicy {
        listeners: [9].into(),
        queue_depth: Some(32),
        io_queues: Some(2),
        mdts_bytes: Some(64 << 10),
        controllers: Some(3),
        max_nsid: 8,
        cntlids: 100..=199,
        duplicates: DuplicateHosts::Replace,
        masks: [(8, [host].into())].into(),
    };
    assert_eq!(config.subsystems[0].offer, offer);
    let own = "nqn.2026-11.io.nvmfd:discovery".parse().unwrap();
    let referral = |nqn: &str, address: &str, hosts: Option<BTreeSet<Nqn>>| Referral {
        nqn: nqn.parse().unwrap(),
        address: address.parse().unwrap(),
        hosts,
    };
    let referrals = vec![
        referral("nqn.2014-08.org.nvmexpress.discovery", "192.0.2.7:4420", None),
        referral("nqn.2026-11.io.other:discovery", "[2001:db8::7]:8009", Some([host].into())),
    ];
    assert_eq!(
        config.discovery,
        DiscoveryConfig {
            nqn: own,
            by_listener: true,
            mdns: true,
            referrals,
            ..DiscoveryConfig::default()
        }
    );
    let printed = config.to_string();
    for line in [
        "listener    192.0.2.2:4420 (id 9)",
        "listeners [9], queue_depth 32, io_queues 2, mdts 64KiB, controllers 3, max_nsid 8, \
         cntlids [100, 199], duplicate_hosts replace",
        "`hosts` of namespace 8 [nqn.2026-11.host:a]",
        "discovery   nqn nqn.2026-11.io.nvmfd:discovery, by_listener true, mdns true",
        "(nqn nqn.2026-11.io.other:discovery, address [2001:db8::7]:8009, hosts \
         [nqn.2026-11.host:a])",
    ] {
        assert!(printed.contains(line), "{line:?} is not in {printed}");
    }
    let nobody = text.replace(r#"hosts = ["nqn.2026-11.host:a"]"#, "hosts = []");
    let printed = Config::parse(&nobody).unwrap().to_string();
    for part in ["`hosts` of namespace 8 nobody", "address [2001:db8::7]:8009, hosts nobody)"] {
        assert!(printed.contains(part), "{part:?} is not in {printed}");
    }
}

#[test]
fn invalid_discovery_and_access_settings_are_reported() {
    let says = |from: &str, to: &str| mistakes(&LEAST.replace(from, to)).join("\n");
    let with = |more: &str| says("allow_any_host = true\n", &format!("{more}\n"));
    assert!(with("listeners = [2]").contains("there is no listener 2"));
    assert!(with("listeners = []").contains("leave `listeners` out"));
    assert!(with("queue_depth = 129").contains("write a number from 2 to 128"));
    assert!(with("io_queues = 17").contains("write a number from 1 to 16"));
    assert!(with("mdts = \"2MiB\"").contains("from \"8KiB\" to \"1MiB\""));
    assert!(with("controllers = 0").contains("write a number from 1 to 64"));
    assert!(with("cntlids = [5, 4]").contains("`cntlids` are from 5 to 4"));
    assert!(with("cntlids = [0, 4]").contains("two numbers from 1 to 65519"));
    assert!(
        with("duplicate_hosts = \"ask\"").contains("one of \"allow\", \"refuse\", \"replace\"")
    );
    assert!(says("nsid = 1", "nsid = 2\nhosts = [\"x\"]").contains("not an NQN"));
    let beyond =
        LEAST.replace("nsid = 1", "nsid = 2").replace("allow_any", "max_nsid = 1\nallow_any");
    assert!(mistakes(&beyond)[0].contains("write an nsid up to 1"));
    let more = |text: &str| mistakes(&format!("{LEAST}\n{text}")).join("\n");
    assert!(more("[[listener]]\naddress = \"::1\"\nport = 1\nid = 1").contains("has id 1, like"));
    assert!(
        more("[discovery]\nnqn = \"nqn.2026-11.io.nvmfd:disk1\"").contains("a name of its own")
    );
    let referral = more("[[discovery.referral]]\naddress = \"0.0.0.0\"");
    assert!(referral.contains("no host can connect to 0.0.0.0"), "{referral}");
    let referral = more("[[discovery.referral]]\naddress = \"192.0.2.7\"\nhosts = [\"x\"]");
    assert!(referral.contains("not an NQN"), "{referral}");

    let masked = LEAST.replace("allow_any_host = true", "hosts = [\"nqn.2026-11.host:a\"]");
    let masked = masked.replace("nsid = 1", "nsid = 1\nhosts = [\"nqn.2026-11.host:b\"]");
    let warnings = Config::parse(&masked).unwrap().warnings();
    assert!(warnings[0].contains("shown to nqn.2026-11.host:b, which may not"), "{warnings:?}");
}
