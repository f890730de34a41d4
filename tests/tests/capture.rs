//! A capture of the daemon, as Wireshark sees it: every packet understood, and the commands named.

mod pair;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use initiator::Data;
use nvme::{IoOpcode, Sqe};
use nvmfd::RunningTarget;

const NQN: &str = "nqn.2026-11.io.nvmfd:capture";

/// Whether this process, of which the target is a part, still has the file open.
fn is_open(file: &Path) -> bool {
    let mut open = fs::read_dir("/proc/self/fd").unwrap();
    open.any(|each| each.and_then(|each| fs::read_link(each.path())).is_ok_and(|to| to == file))
}

/// What tshark prints for the packets that a filter lets through.
fn tshark(file: &Path, filter: &str) -> String {
    let output = Command::new("tshark").arg("-r").arg(file).args(["-Y", filter]).output();
    let output = output.expect("tshark is there: `make packages` installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn wireshark_understands_every_packet_of_a_capture() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().canonicalize().unwrap().join("packets.pcapng");
    let rest = format!(
        "[[subsystem.namespace]]\nnsid = 1\nkind = 'ram'\nsize = '16MiB'\n\
         [capture]\npath = '{}'\n",
        file.display()
    );
    let target = RunningTarget::start(pair::config("127.60.0.1", NQN, &rest)).unwrap();
    let mut host = pair::host("127.60.0.1", "127.60.0.2", NQN);
    for opcode in [IoOpcode::WRITE, IoOpcode::READ] {
        let mut buf = host.pool().take_data(65536).unwrap();
        host.pool().bytes_mut(&mut buf).fill(0xa5);
        let sqe = Sqe::io(opcode, 1).with_range(0, 15);
        let (_, data) = host.command(1, "an I/O command", sqe, Data::Buf(buf)).unwrap();
        let Data::Buf(buf) = data else { panic!("other data came home") };
        host.pool().give(buf);
    }
    host.disconnect();
    assert!(is_open(&file));
    target.stop(Instant::now() + Duration::from_secs(60));

    // The last reactor has ended; the file is complete when its writer has seen that.
    let deadline = Instant::now() + Duration::from_secs(60);
    while is_open(&file) {
        assert!(Instant::now() < deadline, "the capture never ends");
        std::thread::sleep(Duration::from_millis(10));
    }
    let all = tshark(&file, "frame");
    for part in [
        "CM: ConnectRequest",
        "NVMeOF Connect",
        "Property Get Controller Capabilities",
        "NVMe Identify",
        "NVMe Write",
        "NVMe Read",
        "CM: DisconnectReply",
    ] {
        assert!(all.contains(part), "{part:?} is missing in\n{all}");
    }
    assert_eq!(tshark(&file, "_ws.malformed"), "");
    // Payload was not asked for.
    let bytes = std::fs::read(&file).unwrap();
    assert!(!bytes.windows(32).any(|window| window == [0xa5; 32]), "data of the host");
}
