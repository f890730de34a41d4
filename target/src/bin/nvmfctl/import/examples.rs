//! Tests with the published examples of other targets.

use super::*;
use nvmfd::config::NamespaceKind;

fn nothing_there(_: &Path) -> Option<u32> {
    None
}

fn from_nvmetcli(text: &str) -> Imported {
    nvmet(text, nothing_there).unwrap_or_else(|error| panic!("{error}"))
}

fn told(imported: &Imported, words: &[&str]) {
    for words in words {
        let found = imported.remarks.iter().any(|remark| remark.contains(words));
        assert!(found, "{words}: {:#?}", imported.remarks);
    }
    assert_eq!(imported.remarks.len(), words.len(), "{:#?}", imported.remarks);
}

#[test]
fn the_examples_of_nvmetcli_are_read() {
    let rdma = from_nvmetcli(include_str!("examples/nvmetcli-rdma.json"));
    told(&rdma, &["is called nqn.2026-11.io.nvmfd:testnqn here", "512 bytes a block are a guess"]);
    let config = Config::parse(&rdma.text).unwrap();
    assert_eq!(config.addresses(), ["192.168.6.68:4420".parse().unwrap()]);
    assert_eq!(config.listeners[0].id, 2);
    let subsystem = &config.subsystems[0];
    assert!(subsystem.allow_any_host);
    let namespace = &subsystem.namespaces[0];
    assert_eq!(namespace.nguid[..4], [0xEF, 0x90, 0x68, 0x9C]);
    assert_eq!((namespace.nsid, namespace.block_size_bytes), (1, 512));

    // A later version: names, model, serial number; no NGUID.
    let tcp = from_nvmetcli(include_str!("examples/nvmetcli-tcp.json"));
    let words = ["was NVMe/TCP", "nqn.2026-11.io.nvmfd:nvmet-always", "512 bytes a block"];
    told(&tcp, &words);
    let config = Config::parse(&tcp.text).unwrap();
    let subsystem = &config.subsystems[0];
    assert_eq!((subsystem.serial.as_str(), subsystem.model.as_str()), ("123456789abcdef", "Linux"));
    let namespace = &subsystem.namespaces[0];
    assert_eq!(namespace.uuid.to_string(), "d592cdf3-5d1c-44e0-8412-3fcf7d99df27");
    assert_eq!(
        namespace.nguid,
        namespace.uuid.into_bytes(),
        "an NGUID of zeros is reported to no host"
    );
}

#[test]
fn examples_that_cannot_be_served_report_the_reason() {
    for (text, why) in [
        (include_str!("examples/nvmetcli-loop.json"), "its transport is \"loop\""),
        (include_str!("examples/nvmetcli-fc.json"), "its transport is \"fc\""),
        (include_str!("examples/nvmetcli-first.json"), "it is offered at no listener"),
    ] {
        let Err(ImportError::Nothing(remarks)) = nvmet(text, nothing_there) else {
            panic!("{why}");
        };
        assert!(remarks.iter().any(|remark| remark.contains(why)), "{why}: {remarks:#?}");
    }
}

#[test]
fn a_saved_spdk_configuration_is_imported() {
    let saved = spdk(include_str!("examples/spdk-saved.json"), nothing_there).unwrap();
    told(
        &saved,
        &[
            "/etc/spdk/key0, the key of nqn.2014-08",
            "w_mbytes_per_sec of \"aio0\" was left out",
            "\"Nvme0n1\" is the NVMe device at 0000:11:00.0",
            "\"lvs/lvol0\" is not described in the file",
            "calls without a counterpart here: bdev_lvol_create_lvstore, bdev_nvme_set_hotplug, \
             bdev_nvme_set_options, bdev_set_options, nvmf_set_crdt, nvmf_set_max_subsystems, \
             sock_impl_set_options",
        ],
    );
    let config = Config::parse(&saved.text).unwrap();
    let (limits, [one, two]) = (config.limits, &config.subsystems[..]) else {
        panic!("two subsystems: {}", saved.text)
    };
    assert_eq!((limits.queue_depth, limits.io_queues, limits.mdts_bytes), (128, 8, 128 << 10));
    assert_eq!((one.allow_any_host, one.hosts.len(), one.offer.max_nsid), (false, 1, 32));
    assert_eq!(config.authentication.hosts[0].key_file.to_str(), Some("/etc/spdk/key0"));
    let [aio, uring] = &one.namespaces[..] else { panic!("two namespaces") };
    assert_eq!((aio.limit.iops, aio.limit.bandwidth), (Some(20_000), Some(100 << 20)));
    assert_eq!((aio.block_size_bytes, uring.block_size_bytes), (512, 4096));
    assert_eq!(uring.eui64, Some([0, 1, 2, 3, 4, 5, 6, 7]));
    assert!(two.allow_any_host, "it was allowed by a call of its own");
    let memory = &two.namespaces[0];
    assert_eq!(memory.kind, NamespaceKind::Ram { size: 512 << 20 });
    let uuid = "e0dff819-e259-427c-b0a8-1cba85c25830";
    assert_eq!(memory.uuid.to_string(), uuid, "without its own, that of its block device");
}
