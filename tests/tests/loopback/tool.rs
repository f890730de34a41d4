//! The tool `nvmf` as people and programs use it.

use std::fs;

use serde_json::{Value, json};

use crate::pattern;
use crate::target::{BLOCKS, HOST, HOSTID, SUBSYSTEM, TestTarget, run};

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn discover_and_list_show_subsystems_and_namespaces() {
    let target = TestTarget::start();
    let log = target.nvmf_bare("discover", &["-q", HOST, "-o", "json"]).good().json();
    let entry = |subtype: &str, subnqn: &str, eflags: &str| {
        json!({
            "trtype": "rdma", "adrfam": "ipv4", "subtype": subtype,
            "treq": "not specified, sq flow control disable supported",
            "portid": 1, "trsvcid": "4420", "subnqn": subnqn, "traddr": target.address(),
            "eflags": eflags, "rdma_prtype": "not specified", "rdma_qptype": "connected",
            "rdma_cms": "rdma-cm", "rdma_pkey": 0,
        })
    };
    let expected = json!([
        entry(
            "current discovery subsystem",
            "nqn.2014-08.org.nvmexpress.discovery",
            "explicit discovery connections"
        ),
        entry("nvme subsystem", SUBSYSTEM, "none"),
    ]);
    assert_eq!(log["records"], expected);
    let text = target.nvmf_bare("discover", &["-q", HOST]).good();
    assert!(text.text().contains("\nsubnqn:  nqn.2026-11.io.nvmfd:disk1\n"), "{}", text.text());

    let device = |nsid: u32, blocks: u64, block: u64| {
        json!({
            "NameSpace": nsid,
            "DevicePath": format!("rdma://{}:4420/{SUBSYSTEM}/{nsid}", target.address()),
            "Firmware": env!("CARGO_PKG_VERSION"), "ModelNumber": "nvmfd",
            "SerialNumber": "", "UsedBytes": blocks * block, "MaximumLBA": blocks,
            "PhysicalSize": blocks * block, "SectorSize": block,
        })
    };
    // By the discovery service, and by name.
    let all = target.nvmf_bare("list", &["-q", HOST, "--json"]).good().json();
    assert_eq!(all, target.nvmf("list", &["--json"]).good().json());
    let mut devices = all["Devices"].clone();
    for device in devices.as_array_mut().expect("a list") {
        assert_eq!(device["SerialNumber"].as_str().map(str::len), Some(20));
        device["SerialNumber"] = "".into();
        // Of a sparse file, what is allocated.
        assert!(device["UsedBytes"].as_u64() <= device["PhysicalSize"].as_u64());
        device["UsedBytes"] = device["PhysicalSize"].clone();
    }
    assert_eq!(devices, json!([device(1, BLOCKS, 4096), device(2, 2048, 512)]));
    let table = target.nvmf("list", &[]).good();
    assert!(table.text().starts_with("Node ") && table.text().lines().count() == 4);
}

#[test]
fn identify_prints_pages_as_nvme_cli_does() {
    let target = TestTarget::start();
    let page = target.nvmf("id-ctrl", &["-o", "json"]).good().json();
    for (key, value) in [
        ("mn", json!("nvmfd                                   ")),
        ("mdts", json!(8)),
        ("sgls", json!(0x10_0005)),
        ("subnqn", json!(SUBSYSTEM)),
        ("tnvmcap", json!("0")),
        ("ioccsz", json!((64 + 4096) / 16)),
    ] {
        assert_eq!(page[key], value, "{key}");
    }
    let golden = include_str!("../../../initiator/tests/nvme-cli/id-ctrl.json");
    let golden: Value = serde_json::from_str(golden).expect("JSON");
    assert_eq!(keys(&page), keys(&golden));
    let raw = target.nvmf("id-ctrl", &["--raw-binary"]).good();
    assert_eq!((raw.out().len(), &raw.out()[24..29]), (4096, &b"nvmfd"[..]));

    let page = target.nvmf("id-ns", &["--namespace-id", "2", "--json"]).good().json();
    assert_eq!(page["nsze"], 2048);
    assert_eq!(page["lbafs"], json!([{ "ms": 0, "ds": 9, "rp": 0 }]));
    let list = target.nvmf("list-ns", &["--json"]).good().json();
    assert_eq!(list, json!({ "nsid_list": [{ "nsid": 1 }, { "nsid": 2 }] }));
    let list = target.nvmf("list-ns", &["--namespace-id", "2"]).good();
    assert_eq!(list.text(), "[   0]:0x2\n");

    let found = target.nvmf("ns-descs", &["--json"]).good().json();
    let [uuid, nguid, csi] = found["ns-descs"].as_array().expect("a list").as_slice() else {
        panic!("{found}")
    };
    assert_eq!(
        (&uuid["type"], &uuid["loc"], &uuid["nidl"]),
        (&json!("uuid"), &json!(0), &json!(16))
    );
    let text = uuid["uuid"].as_str().expect("a UUID").replace('-', "");
    assert_eq!(nguid["nguid"], text);
    assert_eq!(csi, &json!({ "loc": 40, "nidt": 4, "nidl": 1, "type": "csi", "csi": "0" }));
}

#[test]
fn logs_features_and_registers_are_read() {
    let target = TestTarget::start();
    // Something for the log of the namespace: a good read of 1000 units.
    target.nvmf("read", &["-z", "512000", "-d", "/dev/null"]).good();
    // The log of errors is that of the controller, which ends with each command of the tool.
    let log = target.nvmf("error-log", &["-e", "3", "--json"]).good().json();
    let counts = log["errors"].as_array().expect("a list").iter();
    assert!(counts.map(|entry| &entry["error_count"]).eq([0, 0, 0].map(Value::from).iter()));

    let log = target.nvmf("smart-log", &["--namespace-id", "1", "-o", "json"]).good().json();
    let number = |key: &str| -> u64 { log[key].as_str().expect("text").parse().expect("a number") };
    assert_eq!((number("data_units_read"), number("media_errors")), (1, 0));
    assert!(number("host_read_commands") >= 1);
    let raw =
        target.nvmf("get-log", &["--namespace-id", "1", "--log-id", "2", "-l", "512", "-b"]).good();
    assert_eq!((raw.out().len(), raw.out()[32]), (512, 1));
    let dump = target
        .nvmf("get-log", &["--namespace-id=1", "--log-id=2", "-l", "16", "--lpo", "32"])
        .good();
    assert!(
        dump.text().ends_with(
            "0000: 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 \"................\"\n"
        )
    );

    let effects = target.nvmf("effects-log", &["--json"]).good().json();
    assert_eq!(effects[0]["io_cmd_set"]["IOCS_1 (Write)"], 3);
    let pages = target.nvmf("supported-log-pages", &[]).good();
    assert!(pages.text().contains("LID 0x2 (SMART / Health Information), supports 0x1\n"));
    let features = target.nvmf("fid-support-effects-log", &["--json"]).good().json();
    assert_eq!(features["fid_support"][0], json!({ "fid_1": 0x20_0001 }));

    let feature = target.nvmf("get-feature", &["-f", "7", "-i", "3", "--json"]).good().json();
    let expected = json!({ "feature: 0x07": [
        { "name": "Number of Queues", "Current": "0x00020002" }
    ] });
    assert_eq!(feature, expected);
    let id = target.nvmf("get-feature", &["-f", "0x81", "-b"]).good();
    assert_eq!(id.out(), uuid(HOSTID));
    target.nvmf("set-feature", &["-f", "0x0b", "-v", "0x100"]).good();
    let fixed = target.nvmf("set-feature", &["-f", "6", "-v", "0"]);
    assert_eq!(fixed.code(), 1);
    assert!(fixed.error().contains("Feature Not Changeable"), "{}", fixed.error());

    let registers = target.nvmf("show-regs", &["--json"]).good().json();
    assert_eq!((&registers["vs"], &registers["csts"]), (&json!(0x2_0100), &json!(1)));
    assert_eq!((&registers["cc"], &registers["asq"]), (&json!(0x46_0001), &json!(u64::MAX)));
}

#[test]
fn io_commands_transfer_between_files_and_the_namespace() {
    let target = TestTarget::start();
    let file = |name: &str| target.directory().join(name).display().to_string();
    let (from, to) = (file("from"), file("to"));
    let data = pattern(3, (2 << 20) + 1000);
    fs::write(&from, &data).expect("a file");
    let size = data.len().to_string();
    let size = ["-z", &size];
    let at = ["--start-block", "0x10"];
    let written = target.nvmf("write", &[&size[..], &at, &["-d", &from, "-f"]].concat()).good();
    assert!(written.text().is_empty() && written.error() == "write: Success\n");
    target.nvmf("read", &[&size[..], &at, &["-d", &to]].concat()).good();
    assert!(fs::read(&to).expect("a file") == data);
    let read = target.nvmf("read", &[&size[..], &at].concat()).good();
    assert!(read.out() == data && read.error() == "read: Success\n");
    let done = target.nvmf("compare", &[&size[..], &at, &["-d", &from, "--json"]].concat());
    let done = done.good().json();
    assert_eq!((&done["command"], &done["bytes"]), (&json!("compare"), &json!((2 << 20) + 4096)));

    let differs = target.nvmf("compare", &["-c", "0", "-d", &from]);
    assert_eq!(differs.code(), 1);
    let sentence = "nvmf: Compare: Compare Failure (sct 2h, sc 85h)";
    assert!(differs.error().starts_with(sentence), "{}", differs.error());

    target.nvmf("flush", &[]).good();
    target.nvmf("write-zeroes", &["--start-block", "16", "-c", "1"]).good();
    target.nvmf("dsm", &["--slbs", "18,20", "-b", "1,2", "-d"]).good();
    let read = target.nvmf("read", &["--start-block", "16", "-c", "7"]).good();
    for (block, bytes) in read.out().chunks(4096).enumerate() {
        match block {
            3 | 6 | 7 => assert_eq!(bytes, &data[block * 4096..][..4096], "block {block}"),
            _ => assert!(bytes.iter().all(|&byte| byte == 0), "block {block}"),
        }
    }
}

#[test]
fn errors_are_reported_with_a_remedy_and_an_exit_code() {
    let target = TestTarget::start();
    let other = ["-q", "nqn.2026-11.io.nvmfd:stranger"];
    let cases: [(i32, &str, &[&str], &str); 11] = [
        (1, "id-ctrl", &["-n", SUBSYSTEM, other[0], other[1]], "does not admit this host: add"),
        (1, "id-ctrl", &["-n", "nqn.2026-11.io.nvmfd:none"], "ask it with `nvmf discover`"),
        (2, "id-ctrl", &[], "Name it with --nqn"),
        (2, "id-ctrl", &["-n", "disk1"], "--nqn \"disk1\": the name does not begin with"),
        (2, "discover", &["-n", SUBSYSTEM], "leave out --nqn"),
        (2, "read", &["-n", SUBSYSTEM, "-q", HOST, "--json"], "name a file for them with --data"),
        (2, "read", &["-n", SUBSYSTEM, "-q", HOST, "-c", "0", "-z", "4097"], "hold only 4096"),
        (2, "write", &["-n", SUBSYSTEM, "-q", HOST, "-d", "/etc/hostname"], "no whole blocks of"),
        (1, "write", &["-n", SUBSYSTEM, "-q", HOST, "-c", "0", "-d", "/dev/null"], "has 0 bytes"),
        (2, "dsm", &["-n", SUBSYSTEM, "--slbs", "1,2", "--blocks", "1"], "as many ranges each"),
        (2, "bogus", &[], "unrecognized subcommand"),
    ];
    for (code, command, args, text) in cases {
        let ran = target.nvmf_bare(command, args);
        assert_eq!(ran.code(), code, "{command} {args:?}: {}", ran.error());
        assert!(ran.error().contains(text), "{command} {args:?}: {}", ran.error());
        assert!(ran.text().is_empty() || args.contains(&"--json"), "{}", ran.text());
    }
    let ran = target.nvmf("flush", &["--namespace-id", "77", "--json"]);
    assert_eq!(ran.code(), 1);
    let error = ran.json()["error"].as_str().expect("a sentence").to_owned();
    assert_eq!(ran.error(), format!("nvmf: {error}\n"));
    // Its port of RoCEv2 belongs to the target.
    let ran = target.nvmf("flush", &["-w", &target.address()]);
    assert_eq!(ran.code(), 1);
    assert!(ran.error().contains("cannot open UDP port 4791"), "{}", ran.error());
    // Help is no mistake.
    let ran = run(&["--help"]).good();
    for command in ["discover", "id-ctrl", "write-zeroes", "show-regs", "bench", "verify"] {
        assert!(ran.text().contains(&format!("\n  {command} ")), "{command}");
    }
}

fn uuid(text: &str) -> Vec<u8> {
    let digits = text.replace('-', "");
    let bytes = digits.as_bytes().chunks(2);
    bytes
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("text"), 16).expect("hex"))
        .collect()
}

#[test]
fn reservations_of_two_hosts_appear_in_the_report() {
    let target = TestTarget::start();
    let other = "99999999-7a80-4c0f-9d68-0d6c2f3b5a11";
    let as_other =
        |command: &str, more: &[&str]| target.nvmf(command, &[&["-I", other], more].concat());
    target.nvmf("resv-register", &["--nrkey", "0xa1", "-p", "3"]).good();
    as_other("resv-register", &["--nrkey", "0xb1"]).good();
    target.nvmf("resv-acquire", &["-c", "0xa1", "--rtype", "1"]).good();
    let refused = as_other("write", &["-z", "4096", "-d", "/dev/zero"]);
    assert_eq!(refused.code(), 1);
    assert!(refused.error().contains("Reservation Conflict"), "{}", refused.error());
    as_other("read", &["-z", "4096", "-d", "/dev/null"]).good();
    let report = as_other("resv-report", &["--eds", "--json"]).good().json();
    let holder =
        json!({ "cntlid": 0xFFFF, "rcsts": 1, "rkey": 0xA1, "hostid": HOSTID.replace('-', "") });
    let second =
        json!({ "cntlid": 0xFFFF, "rcsts": 0, "rkey": 0xB1, "hostid": other.replace('-', "") });
    assert_eq!(report["regctlext"], json!([holder, second]));
    assert_eq!((&report["rtype"], &report["ptpls"]), (&json!(1), &json!(1)));
    let short = target.nvmf("resv-report", &[]);
    assert!(short.error().contains("Host Identifier Inconsistent Format"), "{}", short.error());

    // Each connection of the tool is a controller of its own, and a notice is for those there are.
    as_other("resv-acquire", &["-c", "0xb1", "-p", "0xa1", "--rtype", "2", "--racqa", "2"]).good();
    let refused = target.nvmf("read", &["-z", "4096", "-d", "/dev/null"]);
    assert!(refused.error().contains("Reservation Conflict"), "{}", refused.error());
    let page = target.nvmf("resv-notif-log", &["--json"]).good().json();
    assert_eq!(page, json!({ "count": 0, "rn_log_type": 0, "num_logs": 0, "nsid": 0 }));
    as_other("resv-release", &["-c", "0xb1", "--rrela", "1"]).good();
    target.nvmf("write", &["-z", "4096", "-d", "/dev/zero"]).good();
}
