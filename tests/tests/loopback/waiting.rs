//! Addresses and stores that come later than the daemon: the rest is served meanwhile, and they
//! are when they are there.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::target::{HOST, SUBSYSTEM, TestTarget, nvmf, nvmfd};

/// Until something is so; a machine may stall for long.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn missing_devices_stay_pending_and_are_not_recreated() {
    let late = |directory: &std::path::Path| directory.join("mount/late.img");
    let more = |directory: &std::path::Path| {
        format!(
            "[[subsystem.namespace]]\nnsid = 3\npath = {:?}\nsize = \"1MiB\"\nblock_size = 4096\n",
            late(directory)
        )
    };
    let mut target = TestTarget::start();
    let directory = target.directory().to_owned();
    target.apply(&more(&directory));
    let pending = target.pending();
    assert_eq!(pending.len(), 1, "{pending:?}");
    assert!(
        pending[0].contains("namespace 3") && pending[0].contains("no directory"),
        "{pending:?}"
    );
    assert!(!directory.join("mount").exists(), "nothing is made for it");
    let mut host = target.connect(1);
    assert_eq!(host.namespaces(0, None).expect("listed"), [1, 2], "the rest is served");

    fs::create_dir(directory.join("mount")).expect("the directory");
    until("the namespace is served", || target.pending().is_empty());
    assert_eq!(fs::metadata(late(&directory)).expect("made").len(), 1 << 20);
    // The host's reactor applies it a moment after the registry.
    until("the host sees it", || host.namespaces(0, None).expect("listed") == [1, 2, 3]);
    host.disconnect();

    // Its file system is not there at the next start: what was served is not made anew, even
    // though the directory, where it would be mounted, is there.
    fs::rename(late(&directory), directory.join("elsewhere")).expect("moved away");
    target.restart(&more(&directory));
    let pending = target.pending();
    assert!(pending[0].contains("was served before"), "{pending:?}");
    assert!(!late(&directory).exists());
    fs::rename(directory.join("elsewhere"), late(&directory)).expect("moved back");
    until("the namespace is served again", || target.pending().is_empty());
    let mut host = target.connect(1);
    until("the host sees it again", || host.namespaces(0, None).expect("listed") == [1, 2, 3]);
    host.disconnect();
}

#[test]
fn an_unusable_device_does_not_delay_other_namespaces() {
    let mut target = TestTarget::start();
    let directory = target.directory().to_owned();
    let namespace = |nsid: u32| {
        let path = directory.join(format!("mount/{nsid}.img"));
        format!("[[subsystem.namespace]]\nnsid = {nsid}\npath = {path:?}\nsize = \"1MiB\"\n")
    };
    target.apply(&(namespace(3) + &namespace(4)));
    assert_eq!(target.pending().len(), 2);
    // Both appear at the same time, one of them as neither file nor device.
    fs::create_dir_all(directory.join("new/3.img")).expect("the directories");
    fs::rename(directory.join("new"), directory.join("mount")).expect("there");
    until("the other is served", || target.pending().len() == 1);
    let pending = target.pending();
    assert!(pending[0].contains("namespace 3") && pending[0].contains("3.img"), "{pending:?}");
    let mut host = target.connect(1);
    until("the host sees it", || host.namespaces(0, None).expect("listed") == [1, 2, 4]);
    // A reload that changes something else is none of its business either.
    target.apply(&(namespace(3) + &namespace(4) + &namespace(5)));
    // Its reactor is notified a moment later.
    let listed = [1, 2, 4, 5];
    until("it is carried out", || host.namespaces(0, None).expect("listed") == listed);
    fs::remove_dir(directory.join("mount/3.img")).expect("gone");
    until("it is served as well", || target.pending().is_empty());
    let listed = [1, 2, 3, 4, 5];
    until("the host is told", || host.namespaces(0, None).expect("listed") == listed);
    host.disconnect();
}

#[test]
fn missing_devices_fail_the_start_if_so_configured() {
    let mut target = TestTarget::start();
    let text = target.config_text(
        "[[subsystem.namespace]]\nnsid = 3\npath = \"/nvmfd-no-such-directory/x\"\nsize = \"1MiB\"\n",
    );
    target.take().stop(Instant::now() + Duration::from_secs(60));
    let config = nvmfd::config::Config::parse(&format!("missing = \"fail\"\n{text}")).unwrap();
    let fatal = nvmfd::RunningTarget::start(config).err().expect("refused").to_string();
    assert!(fatal.contains("namespace 3") && fatal.contains("/nvmfd-no-such-directory"), "{fatal}");
}

/// In a network of its own, where an address can be taken and given.
#[test]
fn a_listener_is_pending_until_its_address_is_assigned() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("nvmfd.toml");
    let text = format!(
        "provider = \"soft\"\n[management]\nsocket = {:?}\n[[listener]]\naddress = \
         \"192.0.2.77\"\n[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
         \"{SUBSYSTEM}\"\nallow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\nkind = \
         \"ram\"\nsize = \"1MiB\"\n",
        directory.path().join("socket")
    );
    fs::write(&config, text).unwrap();
    let script = r#"
        ip link set lo up
        "$NVMFD" --config "$CONFIG" > "$LOG" 2>&1 &
        pid=$!
        holds() {
            for i in $(seq 600); do
                grep -qF "$1" "$LOG" && return
                kill -0 $pid 2>/dev/null || break
                sleep 0.1
            done
            echo "not in the log: $1"; cat "$LOG"; kill $pid; exit 1
        }
        discover() { "$NVMF" discover -t rdma -a $1 -s 4420 -w $2 -q "$HOST" --provider soft; }
        holds "pending: listener 192.0.2.77:4420: no interface of this machine has the address"
        holds "listening at=127.0.0.1:4420"
        discover 127.0.0.1 127.0.0.2 > "$LOG.before" || exit 1
        grep -q 192.0.2.77 "$LOG.before" && { echo "told of what nobody reaches"; exit 1; }
        ip addr add 192.0.2.77/32 dev lo
        ip addr add 192.0.2.78/32 dev lo
        holds "listening at=192.0.2.77:4420"
        holds "all configured devices and addresses are available"
        discover 192.0.2.77 192.0.2.78 > "$LOG.after" || exit 1
        grep -q 192.0.2.77 "$LOG.after" || { echo "not told of it"; exit 1; }
        kill $pid; wait $pid
    "#;
    let ran = Command::new("unshare")
        .args(["--map-root-user", "--net", "sh", "-c", script])
        .env("NVMFD", nvmfd())
        .env("NVMF", nvmf())
        .env("CONFIG", &config)
        .env("LOG", directory.path().join("log"))
        .env("HOST", HOST)
        .output()
        .expect("unshare runs");
    let told = [ran.stdout, ran.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(ran.status.success(), "{}\n{}", told[0], told[1]);
}
