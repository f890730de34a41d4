use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nvme::Nqn;
use rdma::Tag;

use crate::blockdev::monitor::DeviceMonitor;
use crate::config::Config;
use crate::core::message::{Mailbox, Message, ReactorRings, mailbox};
use crate::core::sched::offload::OpenConnection;
use crate::core::subsystem::ns_request::{CreateRequest, CreatedNsid};
use crate::core::subsystem::power::PowerMeter;
use crate::provision::Transition;
use crate::provision::devices::DeviceTable;
use crate::provision::ns_catalog::Catalogs;
use crate::state::usage::UsageStore;
use crate::worker::Workers;
use crate::worker::ns_management::*;

const HOST: &str = "nqn.2026-11.io.nvmfd:host";

fn nqn(name: &str) -> Nqn {
    format!("nqn.2026-11.io.nvmfd:{name}").parse().unwrap()
}

/// Two subsystems, each with a directory of its name.
fn config(directory: &Path) -> Config {
    let mut text = "[[listener]]\naddress = \"192.0.2.1\"\n".to_owned();
    for name in ["a", "b"] {
        let own = directory.join(name);
        fs::create_dir(&own).unwrap();
        text += &format!(
            "[[subsystem]]\nnqn = \"{}\"\nallow_any_host = true\n[subsystem.managed]\n\
             directory = {own:?}\nquota = \"4MiB\"\nhosts = [\"{HOST}\"]\n",
            nqn(name)
        );
    }
    Config::parse(&text).unwrap()
}

/// Confirms messages as a reactor does. Returns the tags and outcomes of requests.
fn reactor(mailbox: Mailbox) -> Receiver<(Tag, Result<(), Status>)> {
    let (sender, answers) = channel();
    std::thread::spawn(move || {
        loop {
            match mailbox.take() {
                Some(Message::Attach(_, _, answer)) => answer.send(Ok(())).unwrap(),
                Some(Message::Caught(answer)) => answer.send(()).unwrap(),
                Some(Message::Answer(done)) => sender.send((done.tag, done.outcome)).unwrap(),
                Some(Message::Stop) => return,
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    });
    answers
}

fn create(name: &str, tag: Tag) -> NamespaceAdminMessage {
    let what = NamespaceRequest::Create(CreateRequest {
        bytes: 1 << 20,
        block_size_bytes: 4096,
        ana_group: 1,
        private: false,
    });
    let (subsystem, host) = (nqn(name), HOST.parse().unwrap());
    let (host_id, made) = ([1; 16], CreatedNsid::default());
    let (open, cntlid, reactor) = (OpenConnection::default(), 1, 0);
    let connection = open.watch();
    std::mem::forget(open);
    let job =
        NamespaceJob { subsystem, host, host_id, cntlid, connection, what, made, reactor, tag };
    NamespaceAdminMessage::Order(Box::new(job))
}

#[test]
fn a_slow_request_for_images_names_their_pool() {
    let directory = crate::blockdev::testing::directory();
    let config = config(directory.path());
    let files = config.subsystems[0].managed.as_ref().unwrap();
    let images = ManagedConfig { pool: Some("rbd/nvmf".to_owned()), ..files.clone() };
    assert!(unresponsive(files).starts_with(": its directory "), "{}", unresponsive(files));
    let text = unresponsive(&images);
    assert!(text.starts_with(": its pool rbd/nvmf of Ceph RBD does not answer"), "{text}");
    assert!(text.contains(&files.directory.display().to_string()), "it has the record");
}

/// Opening a pipe for writing waits for a reader: so does writing the record of a directory into one.
#[test]
fn a_request_in_a_hung_directory_delays_no_other_subsystem() {
    let directory = crate::blockdev::testing::directory();
    let config = config(directory.path());
    let (sender, mailbox) = mailbox().unwrap();
    let answers = reactor(mailbox);
    let registry = Arc::new(Registry::new(vec![sender.clone()], 8, 1 << 20));
    let shared = Arc::new(Shared::new(registry, Workers::default(), SystemTime::now));
    let pool: Arc<BlockingPool> = Arc::default();
    let rings = ReactorRings(vec![sender.clone()]);
    let monitor = Arc::new(DeviceMonitor::start(rings, Arc::clone(&pool)).unwrap());
    let (stores, usage) = (DeviceTable::default(), UsageStore::open(None, PowerMeter::default()));
    let next = Transition::open(&config, &stores, &Catalogs::new()).unwrap();
    let (own, usage) = (Arc::clone(&shared), Arc::new(usage));
    let mut provisioner = Provisioner::new(config, stores, own, monitor, usage, false);
    provisioner.adopt(next, Vec::new());
    let provisioner = Arc::new(Mutex::new(provisioner));
    let worker = NamespaceAdmin::new();
    let requests = worker.sender();
    let worker = std::thread::spawn(move || worker.run(&provisioner, &shared, &pool));

    let pipe = directory.path().join("a/namespaces.new");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for request in [create("a", 1), create("a", 2), create("b", 3)] {
        requests.send(request).unwrap();
    }
    let answer = || answers.recv_timeout(Duration::from_secs(60)).expect("an answer");
    assert_eq!(answer(), (3, Ok(())), "the first two wait for the directory");
    // What is opened later is a file.
    let found = File::options().read(true).custom_flags(libc::O_PATH).open(&pipe).unwrap();
    fs::remove_file(&pipe).unwrap();
    let reader = format!("/proc/self/fd/{}", found.as_raw_fd());
    let reader = File::options().read(true).write(true).open(reader).unwrap();
    assert_eq!(answer().0, 1, "a pipe cannot be synced");
    assert_eq!(answer(), (2, Ok(())), "requests of a subsystem are executed in their order");
    drop(reader);
    requests.send(NamespaceAdminMessage::Stop).unwrap();
    worker.join().unwrap();
    sender.send(Message::Stop);
}
