//! Namespaces that hosts make, on a real target: by the library, by the tool, over a restart.

use std::time::{Duration, Instant};

use initiator::Host;
use initiator::host::Range;
use nvme::Status;
use nvme::feature::AsyncEvent;
use nvme::identify::Csi;
use nvme::namespace_management::{AttachmentSelect, NewNamespace};
use nvme::persistent_event::{ChangeNamespace, EventType};

use crate::admin::events;
use crate::target::{HOST, TestTarget};
use crate::{pattern, status};

const NEW: NewNamespace = NewNamespace {
    nsze: 2048,
    ncap: 2048,
    flbas: 0,
    dps: 0,
    nmic: 1,
    anagrpid: 0,
    nvmsetid: 0,
    endgid: 0,
};

/// What grants the host 4 MiB, in a directory that is there.
fn grant(target: &TestTarget) -> String {
    let directory = target.directory().join("managed");
    std::fs::create_dir_all(&directory).expect("a directory");
    format!(
        "[subsystem.managed]\ndirectory = {directory:?}\nquota = \"4MiB\"\nhosts = [\"{HOST}\"]\n"
    )
}

fn attach(host: &mut Host, nsid: u32) {
    let cntlid = host.identify_controller().expect("told").cntlid;
    host.attach_namespace(AttachmentSelect::ATTACH, nsid, &[cntlid]).expect("attached");
}

#[test]
fn a_host_creates_uses_and_deletes_a_namespace() {
    let mut target = TestTarget::start();
    let more = grant(&target);
    target.apply(&more);
    let mut host = target.connect(1);
    let nsid = host.create_namespace(&NEW, Csi::NVM).expect("made");
    assert_eq!(nsid, 3);
    assert_eq!(host.namespaces(0, None).expect("listed"), [1, 2], "attached to nobody");
    assert_eq!(host.allocated_namespaces(0).expect("listed"), [1, 2, 3]);
    attach(&mut host, nsid);
    // What is answered holds for every queue.
    let range = Range { nsid, slba: 0, block_bytes: 512 };
    let data = pattern(7, 64 << 10);
    host.write(range, &data, true).expect("written");
    let until = Instant::now() + Duration::from_secs(60);
    let event = host.event(until).expect("connected").expect("an event");
    assert_eq!(event, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
    assert_eq!(host.namespaces(0, None).expect("listed"), [1, 2, 3]);
    let too_large = NewNamespace { nsze: 6145, ncap: 6145, ..NEW };
    let outcome = host.create_namespace(&too_large, Csi::NVM).map(drop);
    assert!(status(outcome).is(Status::NAMESPACE_INSUFFICIENT_CAPACITY));
    host.disconnect();
    // It is the host's, not the controller's.
    let mut host = target.connect(1);
    let mut found = vec![0; data.len()];
    host.read(range, &mut found).expect("read");
    assert!(found == data);
    host.delete_namespace(nsid).expect("deleted");
    let events = events(&mut host);
    let change = |nth: usize| {
        let mut changes = events.iter().filter(|(kind, ..)| *kind == EventType::CHANGE_NAMESPACE);
        let data = &changes.nth(nth).expect("told").2;
        ChangeNamespace::parse(data.first_chunk().expect("its length"))
    };
    let gone = ChangeNamespace { cdw10: 1, nsze: 2048, ncap: 2048, nmic: 1, nsid, ..change(0) };
    assert_eq!(change(0), gone, "the newest first");
    assert_eq!(change(1), ChangeNamespace { cdw10: 0, ..gone });
    assert!(status(host.read(range, &mut found)).is(Status::INVALID_NAMESPACE));
    assert_eq!(host.allocated_namespaces(0).expect("listed"), [1, 2]);
    let denied = status(host.delete_namespace(1));
    assert!(denied.is(Status::OPERATION_DENIED) && denied.dnr());
    host.disconnect();
}

#[test]
fn the_tool_creates_attaches_lists_and_deletes_namespaces() {
    let mut target = TestTarget::start();
    let more = grant(&target);
    target.apply(&more);
    let made = target.nvmf("create-ns", &["--nsze", "256", "-b", "4096", "--json"]).good().json();
    assert_eq!(made["namespace-id"], 3);
    assert_eq!(target.nvmf("list-ns", &[]).good().text().lines().count(), 2);
    assert_eq!(target.nvmf("list-ns", &["--all"]).good().text().lines().count(), 3);
    let args = ["--namespace-id", "3"];
    target.nvmf("attach-ns", &args).good();
    let again = target.nvmf("attach-ns", &args);
    assert!(again.error().contains("Namespace Already Attached"), "{}", again.error());
    let found = target.nvmf("id-ns", &["--namespace-id", "3", "--json"]).good().json();
    assert_eq!((&found["nsze"], &found["nmic"]), (&256.into(), &1.into()));
    target.nvmf("detach-ns", &args).good();
    assert_eq!(target.nvmf("list-ns", &[]).good().text().lines().count(), 2);
    target.nvmf("delete-ns", &["--namespace-id", "0xffffffff"]).good();
    assert_eq!(target.nvmf("list-ns", &["--all"]).good().text().lines().count(), 2);
    target.apply("");
    let refused = target.nvmf("create-ns", &["--nsze", "256"]);
    assert!(refused.error().contains("Invalid Command Opcode"), "{}", refused.error());
}
