//! Hosts that connect during a change: they see all of it, or nothing.

use std::net::SocketAddr;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use initiator::session::EndReason;
use initiator::{Error, Host, HostOptions, Options};
use nvme::Nqn;
use nvme::feature::AsyncEvent;
use nvmfd::TargetView;

use crate::target::TestTarget;

const ADDED: &str = "nqn.2026-11.io.nvmfd:added";

/// A listener, and a subsystem that is there only.
fn more(address: &str, port: u16) -> String {
    format!(
        "[[listener]]\naddress = \"{address}\"\nport = {port}\nid = 2\n[[subsystem]]\nnqn = \
         \"{ADDED}\"\nallow_any_host = true\nlisteners = [2]\n[[subsystem.namespace]]\nnsid = 5\n\
         kind = \"ram\"\nsize = \"1MiB\"\n"
    )
}

/// A host that connects to that subsystem, for as long as that takes, and lists its namespaces.
fn list(options: Options, setup: HostOptions) -> JoinHandle<Result<Vec<u32>, Error>> {
    thread::spawn(move || {
        let mut host = Host::connect(options, setup)?;
        let namespaces = host.namespaces(0, None);
        host.disconnect();
        namespaces
    })
}

/// Another address of a target, or another port; its configuration; and a host that connects there.
fn place(target: &TestTarget, port: u16) -> (SocketAddr, String, Options) {
    let address = match port {
        4420 => target.address().trim_end_matches('1').to_owned() + "3",
        _ => target.address(),
    };
    let to = format!("{address}:{port}").parse().expect("an address");
    let subnqn = Nqn::new(ADDED).expect("valid");
    (to, more(&address, port), Options { to, subnqn, ..target.options(1) })
}

/// Waits until hosts have sent so many messages to set up connections, and reactors have read them.
fn hear(view: &TargetView, all: u64) {
    let messages = || -> u64 {
        let told = view.shared.observers().iter().flat_map(|observer| observer.fabric().counters);
        told.filter(|(name, _)| *name == "message").map(|(_, count)| count).sum()
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while messages() < all {
        assert!(Instant::now() < deadline, "nothing comes");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn connects_before_a_change_is_persisted_are_served_after_it() {
    for (threads, port) in [(1, 4421), (2, 4420)] {
        let reactors = format!("[reactor]\nthreads = {threads}\n");
        let mut target = TestTarget::start_with(&reactors);
        let (to, more, options) = place(&target, port);
        let discovery = Options { subnqn: Nqn::DISCOVERY, ..target.options(0) };
        let mut watcher = Host::connect(discovery, target.setup()).expect("connected");
        let before = watcher.discovery_log().expect("read");
        let (view, mut connecting) = (target.view(), None);
        let source = target.source().trim_end_matches('2').to_owned() + "4";
        let setup =
            HostOptions { source: Some(source.parse().expect("an address")), ..target.setup() };
        let kept = || {
            connecting = Some(list(options, setup));
            // Those of the watcher are a request and a confirmation.
            hear(&view, 3);
            assert_eq!(watcher.discovery_log().expect("read"), before);
            assert_eq!(watcher.event(Instant::now()).expect("connected"), None);
            assert_eq!(view.registry.addresses().len(), 1);
            Ok(())
        };
        target.change(&(reactors + &more), kept).expect("changed");
        let listed = connecting.expect("started").join().unwrap();
        assert_eq!(listed.unwrap_or_else(|error| panic!("{to}: {error}")), [5]);
        let event = watcher.event(Instant::now() + Duration::from_secs(60)).expect("connected");
        assert_eq!(event, Some(AsyncEvent::DISCOVERY_LOG_CHANGE));
        assert_ne!(watcher.discovery_log().expect("read").genctr, before.genctr);
        watcher.disconnect();
    }
}

#[test]
fn connects_before_a_refused_change_find_no_listener() {
    for (threads, port) in [(1, 4421), (2, 4420)] {
        let reactors = format!("[reactor]\nthreads = {threads}\n");
        let mut target = TestTarget::start_with(&reactors);
        let (to, more, options) = place(&target, port);
        let (view, setup, mut connecting) = (target.view(), target.setup(), None);
        let full = || {
            connecting = Some(list(options, setup));
            hear(&view, 1);
            Err("there is no room".to_owned())
        };
        let refused = target.change(&(reactors + &more), full).unwrap_err();
        assert_eq!(refused, "there is no room");
        let refused = connecting.expect("started").join().unwrap().expect_err("nobody is there");
        assert!(
            matches!(&refused, Error::Ended(EndReason::NobodyListens { to: at }) if *at == to),
            "{refused}"
        );
    }
}
