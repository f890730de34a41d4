use super::*;
use nvmfd::config::NamespaceKind;
use proptest::prelude::*;
use serde_json::Value;

/// As nvmetcli writes it: two ports, two subsystems, most attributes as text.
const NVMET: &str = r#"{
  "hosts": [
    {"nqn": "nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11"},
    {"nqn": "nqn.2014-08.org.example:keyed", "dhchap_key": "DHHC-1:00:secret:"}
  ],
  "ports": [
    {"addr": {"adrfam": "ipv4", "traddr": "192.0.2.1", "treq": "not specified",
              "trsvcid": "4420", "trtype": "rdma", "tsas": "none"},
     "ana_groups": [{"ana": {"state": "optimized"}, "grpid": 1},
                    {"ana": {"state": "inaccessible"}, "grpid": 2},
                    {"ana": {"state": "optimized"}, "grpid": 900}],
     "param": {"inline_data_size": "16384", "pi_enable": "0", "max_queue_size": "256"},
     "portid": 3,
     "referrals": [{"addr": {"adrfam": "ipv4", "traddr": "192.0.2.9", "trsvcid": "8009",
                             "trtype": "rdma"}, "enable": 1, "name": "other"},
                   {"addr": {"traddr": "192.0.2.8", "trtype": "tcp"}, "enable": 1, "name": "t"}],
     "subsystems": ["nqn.2014-08.org.example:first", "second"]},
    {"addr": {"adrfam": "ipv4", "traddr": "192.0.2.2", "trsvcid": "4420", "trtype": "tcp"},
     "param": {"inline_data_size": "65536"}, "portid": 4, "referrals": [],
     "subsystems": ["nqn.2014-08.org.example:first"]},
    {"addr": {"trtype": "loop"}, "portid": 5, "subsystems": []}
  ],
  "subsystems": [
    {"allowed_hosts": ["nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11"],
     "attr": {"allow_any_host": "0", "cntlid_max": "65519", "cntlid_min": "1", "model": "Linux",
              "pi_enable": "0", "qid_max": "4", "serial": "0123456789abcdef", "version": "1.3"},
     "namespaces": [
       {"ana_grpid": 2, "device": {"nguid": "00000000-0000-0000-0000-000000000000",
        "path": "/dev/nvme0n1", "uuid": "d592cdf3-5d1c-44e0-8412-3fcf7d99df27"},
        "enable": 1, "nsid": 1},
       {"device": {"nguid": "ef90689c-6c46-d44c-89c1-4067801309a8", "path": "/srv/disk.img"},
        "enable": 1, "nsid": 2},
       {"device": {"path": "/srv/off.img"}, "enable": 0, "nsid": 3},
       {"device": {"path": "/srv/disk.img"}, "enable": 1, "nsid": 4}],
     "nqn": "nqn.2014-08.org.example:first"},
    {"attr": {"allow_any_host": "1", "serial": "0123456789abcdef"},
     "namespaces": [{"device": {"path": "/dev/gone"}, "enable": "1", "nsid": "1"}],
     "nqn": "second"},
    {"attr": {"allow_any_host": "1"}, "namespaces": [], "nqn": "nqn.2014-08.org.example:nowhere"}
  ]
}"#;

/// As `rpc.py save_config` writes it: calls in the order of the parts.
const SPDK: &str = r#"{"subsystems": [
  {"subsystem": "keyring", "config": [
    {"method": "keyring_file_add_key", "params": {"name": "key0", "path": "/etc/spdk/key0"}}]},
  {"subsystem": "iobuf", "config": null},
  {"subsystem": "bdev", "config": [
    {"method": "bdev_set_options", "params": {"bdev_io_pool_size": 65535}},
    {"method": "bdev_aio_create", "params": {"name": "aio0", "block_size": 512,
      "filename": "/srv/aio.img", "readonly": true, "fallocate": false}},
    {"method": "bdev_uring_create", "params": {"name": "u0", "filename": "/dev/sdz"}},
    {"method": "bdev_malloc_create", "params": {"name": "Malloc0", "num_blocks": 131072,
      "block_size": 512, "uuid": "b1c7e70f-7ff3-4b1d-8f0e-8aa2a3d7c9f5"}},
    {"method": "bdev_null_create", "params": {"name": "Null0", "num_blocks": 10, "block_size": 520}},
    {"method": "bdev_nvme_attach_controller", "params": {"name": "Nvme0", "trtype": "PCIe",
      "traddr": "0000:5e:00.0"}},
    {"method": "bdev_wait_for_examine"}]},
  {"subsystem": "nvmf", "config": [
    {"method": "nvmf_set_config", "params": {"dhchap_digests": ["sha384", "sha512"],
      "dhchap_dhgroups": ["ffdhe3072", "null"], "discovery_filter": "match_any"}},
    {"method": "nvmf_create_transport", "params": {"trtype": "RDMA", "max_queue_depth": 128,
      "max_io_qpairs_per_ctrlr": 8, "in_capsule_data_size": 4096, "max_io_size": 131072,
      "io_unit_size": 8192, "num_shared_buffers": 4095}},
    {"method": "nvmf_create_subsystem", "params": {"nqn": "nqn.2016-06.io.spdk:cnode1",
      "allow_any_host": false, "serial_number": "SPDK00000000000001",
      "model_number": "SPDK bdev Controller", "max_namespaces": 32, "min_cntlid": 1,
      "max_cntlid": 65519, "ana_reporting": false}},
    {"method": "nvmf_subsystem_add_host", "params": {"nqn": "nqn.2016-06.io.spdk:cnode1",
      "host": "nqn.2016-06.io.spdk:host1", "dhchap_key": "key0"}},
    {"method": "nvmf_subsystem_add_ns", "params": {"nqn": "nqn.2016-06.io.spdk:cnode1",
      "namespace": {"nsid": 1, "bdev_name": "aio0", "nguid": "5C5A3F7B9E1D4F2AA1B2C3D4E5F60718",
      "uuid": "5c5a3f7b-9e1d-4f2a-a1b2-c3d4e5f60718"}}},
    {"method": "nvmf_subsystem_add_ns", "params": {"nqn": "nqn.2016-06.io.spdk:cnode1",
      "namespace": {"bdev_name": "Malloc0", "no_auto_visible": true}}},
    {"method": "nvmf_ns_add_host", "params": {"nqn": "nqn.2016-06.io.spdk:cnode1", "nsid": 2,
      "host": "nqn.2016-06.io.spdk:host1"}},
    {"method": "nvmf_subsystem_add_ns", "params": {"nqn": "nqn.2016-06.io.spdk:cnode1",
      "namespace": {"nsid": 3, "bdev_name": "Nvme0n1"}}},
    {"method": "nvmf_subsystem_add_ns", "params": {"nqn": "nqn.2016-06.io.spdk:cnode1",
      "namespace": {"nsid": 4, "bdev_name": "Null0"}}},
    {"method": "nvmf_subsystem_add_ns", "params": {"nqn": "nqn.2016-06.io.spdk:cnode1",
      "namespace": {"nsid": 5, "bdev_name": "u0"}}},
    {"method": "nvmf_subsystem_add_listener", "params": {"nqn": "nqn.2016-06.io.spdk:cnode1",
      "listen_address": {"trtype": "RDMA", "adrfam": "IPv4", "traddr": "192.0.2.1",
      "trsvcid": "4420"}, "secure_channel": false}},
    {"method": "nvmf_subsystem_add_listener", "params": {"nqn": "nqn.2016-06.io.spdk:cnode1",
      "listen_address": {"trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.1",
      "trsvcid": "4420"}, "secure_channel": true}}]}]}"#;

fn look(path: &Path) -> Option<u32> {
    match path.to_str() {
        Some("/dev/nvme0n1") => Some(512),
        Some("/dev/sdz") => Some(4096),
        _ => None,
    }
}

type Import = fn(&str) -> Result<Imported, ImportError>;

const IMPORTS: [Import; 2] = [|text| nvmet(text, look), |text| spdk(text, look)];

fn told(remarks: &[String], words: &str) {
    assert!(remarks.iter().any(|remark| remark.contains(words)), "{words}: {remarks:#?}");
}

#[test]
fn import_from_nvmet_preserves_identities_visible_to_hosts() {
    let Imported { text, remarks } = nvmet(NVMET, look).expect("a configuration");
    let config = Config::parse(&text).expect("no mistake");
    assert_eq!(config.limits.in_capsule_bytes, 16384, "TCP's size is not taken");
    assert_eq!(config.limits.queue_depth, 256);
    let listeners: Vec<String> = config.listeners.iter().map(ToString::to_string).collect();
    assert_eq!(listeners.len(), 2, "{listeners:?}");
    assert!(listeners[0].starts_with("192.0.2.1:4420 (id 3)"), "{listeners:?}");
    assert!(listeners[0].contains("inaccessible"), "{listeners:?}");
    assert_eq!(config.discovery.referrals.len(), 1);

    let [first, second] = config.subsystems.as_slice() else { panic!("{text}") };
    assert_eq!(first.nqn.as_str(), "nqn.2014-08.org.example:first");
    assert_eq!((first.serial.as_str(), first.model.as_str()), ("0123456789abcdef", "Linux"));
    assert_eq!((first.hosts.len(), first.offer.io_queues), (1, Some(4)));
    let [device, file] = first.namespaces.as_slice() else { panic!("{text}") };
    assert_eq!((device.nsid, device.block_size_bytes, device.ana_group), (1, 512, 2));
    assert_eq!(device.uuid.to_string(), "d592cdf3-5d1c-44e0-8412-3fcf7d99df27");
    assert_eq!((file.nsid, file.block_size_bytes), (2, 4096));
    assert_eq!(file.nguid[..2], [0xef, 0x90]);
    assert_eq!(second.nqn.as_str(), "nqn.2026-11.io.nvmfd:second");
    assert!(second.allow_any_host && second.serial != first.serial);
    assert_eq!(second.offer.listeners.iter().copied().collect::<Vec<_>>(), [3]);
    assert_eq!(second.namespaces[0].block_size_bytes, 512);

    let [host] = config.authentication.hosts.as_slice() else { panic!("{text}") };
    assert_eq!(host.key_file, Path::new("/etc/nvmfd/keys/nqn.2014-08.org.example_keyed"));
    assert!(!text.contains("secret"), "a key stays out of a file that others may read");
    for words in [
        "port 4 was NVMe/TCP",
        "port 5 was left out",
        "192.0.2.8 was left out: it is not RDMA",
        "(/srv/off.img) was left out: it is not enabled",
        "/srv/disk.img is another namespace's too",
        "is called nqn.2026-11.io.nvmfd:second here",
        "/dev/gone is not on this machine",
        "the serial number 0123456789abcdef",
        "nqn.2014-08.org.example:nowhere was left out: it is offered at no listener",
        "the key of nqn.2014-08.org.example:keyed is not copied",
    ] {
        told(&remarks, words);
        assert!(text.contains(words), "{words}");
    }
    assert_eq!(remarks.len(), 10, "{remarks:#?}");
}

#[test]
fn import_of_spdk_rpc_calls_yields_equivalent_namespaces() {
    let Imported { text, remarks } = spdk(SPDK, look).expect("a configuration");
    let config = Config::parse(&text).expect("no mistake");
    assert_eq!((config.limits.queue_depth, config.limits.io_queues), (128, 8));
    assert_eq!((config.limits.in_capsule_bytes, config.limits.mdts_bytes), (4096, 131_072));
    assert_eq!(config.listeners.len(), 1, "TCP and RDMA at one address are one listener");
    let [subsystem] = config.subsystems.as_slice() else { panic!("{text}") };
    assert_eq!(subsystem.serial, "SPDK00000000000001");
    assert_eq!((subsystem.offer.max_nsid, subsystem.hosts.len()), (32, 1));
    let [aio, ram, uring] = subsystem.namespaces.as_slice() else { panic!("{text}") };
    assert!(aio.read_only && aio.block_size_bytes == 512);
    assert_eq!(aio.uuid.to_string(), "5c5a3f7b-9e1d-4f2a-a1b2-c3d4e5f60718");
    assert_eq!((ram.nsid, &ram.kind), (2, &NamespaceKind::Ram { size: 64 << 20 }));
    assert_eq!(subsystem.offer.masks.get(&2).map(|hosts| hosts.len()), Some(1));
    assert_eq!((uring.nsid, uring.block_size_bytes), (5, 4096));
    let [host] = config.authentication.hosts.as_slice() else { panic!("{text}") };
    assert_eq!(host.key_file, Path::new("/etc/spdk/key0"));
    assert_eq!(config.authentication.policy.hashes.len(), 2);
    assert_eq!(config.authentication.policy.groups.len(), 2);
    for words in [
        "\"Nvme0n1\" is the NVMe device at 0000:5e:00.0",
        "namespace 4 of nqn.2016-06.io.spdk:cnode1 was left out: blocks have 512 or 4096",
        "NVMe/TCP at 192.0.2.1",
        "wanted TLS",
        "/etc/spdk/key0, the key of nqn.2016-06.io.spdk:host1, must be readable",
        "calls without a counterpart here: bdev_set_options",
    ] {
        told(&remarks, words);
    }
    assert_eq!(remarks.len(), 6, "{remarks:#?}");
}

#[test]
fn guessed_block_sizes_are_reported() {
    // SPDK omits values that it has detected itself.
    let elsewhere = |_: &Path| None;
    let text = r#"{"subsystems": [{"subsystem": "bdev", "config": [
      {"method": "bdev_aio_create", "params": {"name": "a", "filename": "/dev/sdq"}},
      {"method": "bdev_aio_create", "params": {"name": "b", "filename": "/dev/sdr",
        "block_size": 4096}}]},
      {"subsystem": "nvmf", "config": [
      {"method": "nvmf_create_subsystem", "params": {"nqn": "nqn.2016-06.io.spdk:c",
        "allow_any_host": true}},
      {"method": "nvmf_subsystem_add_ns", "params": {"nqn": "nqn.2016-06.io.spdk:c",
        "namespace": {"nsid": 1, "bdev_name": "a"}}},
      {"method": "nvmf_subsystem_add_ns", "params": {"nqn": "nqn.2016-06.io.spdk:c",
        "namespace": {"nsid": 2, "bdev_name": "b"}}},
      {"method": "nvmf_subsystem_add_listener", "params": {"nqn": "nqn.2016-06.io.spdk:c",
        "listen_address": {"trtype": "RDMA", "adrfam": "IPv4", "traddr": "192.0.2.1",
        "trsvcid": "4420"}}}]}]}"#;
    let Imported { text: made, remarks } = spdk(text, elsewhere).expect("a configuration");
    let config = Config::parse(&made).expect("no mistake");
    let blocks = |at: usize| config.subsystems[0].namespaces[at].block_size_bytes;
    assert_eq!((blocks(0), blocks(1)), (512, 4096));
    let guesses: Vec<_> = remarks.iter().filter(|each| each.contains("are a guess")).collect();
    assert_eq!(guesses.len(), 1, "{remarks:#?}");
    assert!(guesses[0].starts_with("/dev/sdq is not on this machine"), "{guesses:?}");
    let here = spdk(text, |_| Some(4096)).expect("a configuration");
    assert!(!here.remarks.iter().any(|each| each.contains("are a guess")));
}

#[test]
fn files_that_are_no_saved_configuration_are_refused_with_a_reason() {
    for import in IMPORTS {
        assert!(matches!(import("{"), Err(ImportError::NotJson(_))));
        for text in ["{}", "[]", "1", "{\"subsystems\": 1}"] {
            assert!(matches!(import(text), Err(ImportError::NotThis(_))), "{text}");
        }
    }
    assert!(matches!(nvmet(SPDK, look), Err(ImportError::NotThis(_))));
    assert!(matches!(spdk(NVMET, look), Err(ImportError::NotThis(_))));
    let nothing = nvmet(r#"{"ports": [], "subsystems": [{"nqn": "nqn.x"}]}"#, look);
    assert!(matches!(nothing, Err(ImportError::Nothing(remarks)) if remarks.len() == 1));
}

#[test]
fn imported_text_cannot_escape_from_comments() {
    let text = NVMET.replace("192.0.2.8", "x\\nprovider = \\\"verbs\\\"\\u0085\\u2028");
    let imported = nvmet(&text, look).expect("a configuration");
    let config = Config::parse(&imported.text).expect("no mistake");
    assert_eq!(config.provider, nvmfd::config::Provider::Auto);
    told(&imported.remarks, "to x provider = \"verbs\"");
}

/// Values of unexpected types.
fn strange() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        Just(Value::from(0)),
        Just(Value::from(-1)),
        Just(Value::from(u64::MAX)),
        Just(Value::from(4_294_967_296_u64)),
        Just(Value::from(true)),
        Just(Value::from(Vec::<Value>::new())),
        Just(serde_json::json!({"nqn": "nqn.x"})),
        any::<u16>().prop_map(Value::from),
        prop::sample::select(vec![
            "",
            " ",
            "0",
            "65536",
            "4420",
            "::",
            "0.0.0.0",
            "192.0.2.1",
            "fe80::1%eth0",
            "a\nb = 1",
            "\"]",
            "'''",
            "nqn.",
            "nqn.2014-08.org.nvmexpress.discovery",
            "nqn.a b",
            "rdma",
            "tcp",
            "RDMA",
            "change",
            "/",
            "/dev/..",
            "rel/ative",
            "/srv/aio.img",
            "ffdhe2048",
            "\u{0}",
            "é",
            "00000000000000000000000000000001",
            "d592cdf35d1c44e084123fcf7d99df27",
        ])
        .prop_map(Value::from),
        "\\PC{0,300}".prop_map(Value::from),
    ]
}

/// Replaces the value with this number by `new`, or duplicates it in its list.
fn disturb(value: &mut Value, countdown: &mut usize, new: &Value, double: bool) {
    if *countdown == 0 {
        *value = new.clone();
    }
    let before = *countdown;
    *countdown = countdown.wrapping_sub(1);
    if before == 0 {
        return;
    }
    match value {
        Value::Array(values) => {
            for n in 0..values.len() {
                if *countdown == 0 && double {
                    values.push(values[n].clone());
                    *countdown = usize::MAX;
                }
                disturb(&mut values[n], countdown, new, double);
            }
        }
        Value::Object(members) => {
            members.values_mut().for_each(|value| disturb(value, countdown, new, double));
        }
        _ => {}
    }
}

proptest! {
    #[test]
    fn imported_configurations_never_contain_errors(
        changes in prop::collection::vec((0_usize..170, strange(), any::<bool>()), 1..8)
    ) {
        for import in IMPORTS {
            for text in [NVMET, SPDK] {
                let mut value: Value = serde_json::from_str(text).expect("JSON");
                for (at, new, double) in &changes {
                    disturb(&mut value, &mut at.clone(), new, *double);
                }
                let done = import(&value.to_string());
                prop_assert!(!matches!(done, Err(ImportError::Mistakes { .. })), "{done:?}");
            }
        }
    }
}
