//! Failed flushes, and who may declare the backing store trusted again.

use std::fs;

use nvmfd::blockdev::{Health, InjectedFault};

use super::*;

fn health(target: &TestTarget) -> std::sync::Arc<Health> {
    let nqn = Nqn::new(SUBSYSTEM).expect("a name");
    let subsystem = target.view().registry.subsystem(&nqn).expect("served");
    std::sync::Arc::clone(&subsystem.namespace(1).expect("a namespace").health)
}

/// A flush fails, and the store would do better from now on.
fn fail_a_flush(target: &TestTarget, host: &mut Host) {
    health(target).set_fault(InjectedFault::Sync);
    assert!(status(host.flush(1)).is(Status::WRITE_FAULT));
    health(target).set_fault(InjectedFault::None);
}

#[test]
fn a_failed_flush_survives_a_reload_and_a_restart() {
    let mut target = TestTarget::start();
    let mut host = target.connect(1);
    host.write(FILE, &pattern(1, 4096), false).expect("written");
    fail_a_flush(&target, &mut host);
    target.apply("");
    assert!(status(host.flush(1)).is(Status::WRITE_FAULT), "after a reload");
    drop(host);
    target.restart("");
    let mut host = target.connect(1);
    assert!(status(host.flush(1)).is(Status::WRITE_FAULT), "after a restart");
    host.disconnect();
}

/// Hosts repeat a flush that fails without Do Not Retry by themselves: its success would hide that
/// data are lost.
fn fails_once(host: &mut Host, why: &str) {
    let told = status(host.flush(1));
    assert!(told.is(Status::WRITE_FAULT) && told.dnr(), "{why}: {told}");
}

fn trust(target: &TestTarget) {
    let (view, nqn) = (target.view(), Nqn::new(SUBSYSTEM).expect("a name"));
    let monitor = view.monitor.expect("somebody looks after the stores");
    let store = monitor.find(&nqn, 1).expect("a store");
    let tell = move || view.registry.report_lost_writes(&nqn, 1);
    monitor.trust(&store, tell).expect("trusted");
}

#[test]
fn declaring_trust_clears_a_failed_flush_across_restarts() {
    let mut target = TestTarget::start();
    let mut host = target.connect(1);
    host.write(FILE, &pattern(1, 4096), false).expect("written");
    fail_a_flush(&target, &mut host);
    trust(&target);
    host.flush(1).expect("it was told before");
    fail_a_flush(&target, &mut host);
    drop(host);
    target.restart("");
    trust(&target);
    target.restart("");
    let mut host = target.connect(1);
    host.flush(1).expect("flushed");
    host.disconnect();
}

/// One host sees the failure, the other one has written the lost data and flushes later.
#[test]
fn hosts_with_unflushed_writes_fail_one_flush_after_trust() {
    let target = TestTarget::start();
    let other = |id: u8| {
        let options = Options { hostid: [id; 16], ..target.options(1) };
        let setup = HostOptions { source: None, ..target.setup() };
        Host::connect(options, setup).expect("connected")
    };
    let mut teller = target.connect(1);
    let [mut writer, mut second_path, mut flusher, mut reader] = [1, 1, 2, 3].map(other);
    for host in [&mut writer, &mut flusher] {
        host.write(FILE, &pattern(1, 4096), false).expect("written");
    }
    flusher.flush(1).expect("flushed");
    fail_a_flush(&target, &mut teller);
    trust(&target);
    teller.flush(1).expect("it was told");
    flusher.flush(1).expect("it has flushed before");
    reader.flush(1).expect("it has written nothing");
    fails_once(&mut second_path, "by any path");
    writer.flush(1).expect("once");
    for host in [teller, writer, second_path, flusher, reader] {
        host.disconnect();
    }
}

#[test]
fn hosts_with_unflushed_writes_fail_one_flush_after_trust_and_restart() {
    let mut target = TestTarget::start();
    let connect = |target: &TestTarget, id: u8| {
        let options = Options { hostid: [id; 16], ..target.options(1) };
        let setup = HostOptions { source: None, ..target.setup() };
        Host::connect(options, setup).expect("connected")
    };
    let (mut teller, mut writer) = (target.connect(1), connect(&target, 1));
    writer.write(FILE, &pattern(1, 4096), false).expect("written");
    fail_a_flush(&target, &mut teller);
    drop((teller, writer));
    // The store is trusted before the host comes back, and the daemon stops before it flushes.
    for _ in 0..2 {
        target.restart("");
        if health(&target).sync_failure().is_some() {
            trust(&target);
        }
    }
    let (mut writer, mut reader) = (connect(&target, 1), connect(&target, 2));
    fails_once(&mut writer, "after a restart");
    writer.flush(1).expect("once");
    reader.flush(1).expect("it has written nothing");
    target.restart("");
    let mut writer = connect(&target, 1);
    writer.flush(1).expect("once, also after a restart");
    writer.disconnect();
}

/// The path of the file leads elsewhere when the daemon stops.
#[test]
fn unflushed_writes_to_a_file_count_as_lost_only_if_another_one_is_trusted() {
    let mut target = TestTarget::start();
    let connect = |target: &TestTarget, id: u8| {
        let options = Options { hostid: [id; 16], ..target.options(1) };
        let setup = HostOptions { source: None, ..target.setup() };
        Host::connect(options, setup).expect("connected")
    };
    let [image, aside, other] =
        ["disk1.img", "aside", "other"].map(|name| target.directory().join(name));
    let mut hosts = [1, 2].map(|id| connect(&target, id));
    hosts[0].write(FILE, &pattern(1, 4096), false).expect("written");
    fail_a_flush(&target, &mut hosts[1]);
    trust(&target);
    // The first host still has to learn of that; the second one knows, and writes.
    hosts[1].flush(1).expect("it was told");
    hosts[1].write(FILE, &pattern(2, 4096), false).expect("written");
    drop(hosts);
    fs::rename(&image, &aside).expect("moved");
    target.restart_after("", || fs::rename(&aside, &image).expect("back"));
    assert!(!health(&target).is_untrusted());
    let [mut first, mut second] = [1, 2].map(|id| connect(&target, id));
    fails_once(&mut first, "that it returns hides no failure");
    first.flush(1).expect("once");
    second.flush(1).expect("nothing is lost");
    // Another file is there this time.
    second.write(FILE, &pattern(3, 4096), false).expect("written");
    first.disconnect();
    drop(second);
    fs::copy(&image, &other).expect("copied");
    fs::rename(&other, &image).expect("replaced");
    target.restart("");
    assert!(health(&target).is_untrusted());
    trust(&target);
    let [mut first, mut second] = [1, 2].map(|id| connect(&target, id));
    fails_once(&mut second, "its write is in the other file");
    for host in [&mut first, &mut second] {
        host.flush(1).expect("flushed");
    }
    first.disconnect();
    second.disconnect();
}

#[test]
fn reconnected_hosts_fail_one_flush_after_trust() {
    let target = TestTarget::start();
    let other = |id: u8| {
        let options = Options { hostid: [id; 16], ..target.options(1) };
        let setup = HostOptions { source: None, ..target.setup() };
        Host::connect(options, setup).expect("connected")
    };
    let (mut teller, mut writer) = (target.connect(1), other(1));
    writer.write(FILE, &pattern(1, 4096), false).expect("written");
    drop(writer);
    fail_a_flush(&target, &mut teller);
    // Another one, of which nobody knows what it has written before.
    let mut unknown = other(2);
    trust(&target);
    let mut writer = other(1);
    for host in [&mut writer, &mut unknown] {
        fails_once(host, "by another connection");
        host.flush(1).expect("once");
    }
    teller.disconnect();
}
