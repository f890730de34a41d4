//! Admin commands whose truth shows only on a whole target: over connections, restarts and reactors.

use std::thread;
use std::time::{Duration, Instant};

use initiator::{Data, Host, HostOptions, Request};
use nvme::feature::{FeatureId, GetFeatures, Select, SetFeatures, Timestamp};
use nvme::log::{ErrorEntry, GetLogPage, LogId, Smart};
use nvme::persistent_event::{
    Action, EventHeader, EventType, FormatCompletion, FormatStart, PersistentEventHeader,
    TimestampChange,
};
use nvme::{AdminOpcode, IoOpcode, Sqe, Status};

use crate::target::TestTarget;
use crate::{FILE, RAM, at, pattern, status};

/// Counters are handed in a few times a second.
fn settled(host: &mut Host, enough: impl Fn(&Smart) -> bool) -> Smart {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let found = smart(host, u32::MAX);
        if enough(&found) {
            return found;
        }
        assert!(Instant::now() < deadline, "{found:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

fn smart(host: &mut Host, nsid: u32) -> Smart {
    let get = GetLogPage { nsid, ..GetLogPage::new(LogId::SMART, 0, 128) };
    let page = host.log(get, Smart::BYTES).expect("the log");
    Smart::parse(&page.try_into().expect("its length"))
}

fn newest_error(host: &mut Host) -> ErrorEntry {
    let page = host.log(GetLogPage::new(LogId::ERROR, 0, 16), ErrorEntry::BYTES).expect("the log");
    ErrorEntry::parse(&page.try_into().expect("its length"))
}

#[test]
fn smart_counters_survive_reconnects_and_restarts() {
    let mut target = TestTarget::start();
    let mut host = target.connect(1);
    let data = pattern(1, 1 << 20);
    host.write(FILE, &data, false).expect("written");
    host.write(RAM, &data[..8192], false).expect("written");
    let beyond = at(FILE, 1 << 40);
    assert!(status(host.read(beyond, &mut [0; 4096])).is(Status::LBA_OUT_OF_RANGE));
    let first = settled(&mut host, |smart| smart.host_writes >= 2);
    assert_eq!((first.data_units_written, first.error_entries), (3, 1));
    assert_eq!(newest_error(&mut host).error_count, 1);
    assert_eq!(smart(&mut host, 1).data_units_written, 3);
    host.disconnect();

    let mut host = target.connect(1);
    let again = smart(&mut host, 0);
    assert_eq!((again.host_writes, again.data_units_written), (first.host_writes, 3));
    assert_eq!(newest_error(&mut host).error_count, 0, "the log is of this controller");
    host.disconnect();

    target.restart("");
    let mut host = target.connect(1);
    let after = smart(&mut host, 0);
    assert_eq!((after.host_writes, after.data_units_written), (first.host_writes, 3));
    assert_eq!((after.host_reads, after.power_cycles), (first.host_reads, 2));
    assert_eq!(smart(&mut host, 1).data_units_written, 3, "of a namespace as well");
    assert!(status(host.read(beyond, &mut [0; 4096])).is(Status::LBA_OUT_OF_RANGE));
    assert_eq!(newest_error(&mut host).error_count, 2, "no number comes twice");
    assert_eq!(smart(&mut host, 0).error_entries, 2);
    host.disconnect();
}

/// The events of the log, newest first: kind, controller, data.
pub(crate) fn events(host: &mut Host) -> Vec<(EventType, u16, Vec<u8>)> {
    let get = |action: Action| {
        let get = GetLogPage::new(LogId::PERSISTENT_EVENT, 0, 128);
        GetLogPage { lsp: action.0, ..get }
    };
    let page = host.log(get(Action::ESTABLISH), PersistentEventHeader::BYTES).expect("a context");
    let header = PersistentEventHeader::parse(&page.try_into().expect("its length"));
    let page = host.log(get(Action::READ), header.total_bytes as usize).expect("all of it");
    let release = get(Action::RELEASE).emit(nvme::Sgl::NONE);
    host.command(0, "Get Log Page", release, Data::None).expect("released");
    let mut rest = &page[PersistentEventHeader::BYTES..];
    let mut events = Vec::new();
    for _ in 0..header.events {
        let (event, behind) = rest.split_first_chunk().expect("a header");
        let event = EventHeader::parse(event);
        let (data, next) = behind.split_at(event.event_bytes.into());
        events.push((event.kind, event.cntlid, data.to_vec()));
        rest = next;
    }
    assert!(rest.is_empty(), "{} bytes behind the last event", rest.len());
    events
}

#[test]
fn starts_ends_and_formats_are_persistent_events() {
    let mut target = TestTarget::start();
    let path = target.directory().join("disk3.img");
    target.apply(&format!(
        "[[subsystem.namespace]]\nnsid = 3\npath = \"{}\"\nsize = \"1MiB\"\n\
         block_size = 4096\nallow_format = true\n",
        path.display()
    ));
    let mut host = target.connect(1);
    let kinds = |events: &[(EventType, u16, Vec<u8>)]| {
        events.iter().map(|(kind, ..)| *kind).collect::<Vec<_>>()
    };
    let start = [EventType::SMART_SNAPSHOT, EventType::POWER_ON_OR_RESET];
    assert_eq!(kinds(&events(&mut host)), start, "the newest first");
    let format =
        |nsid| Sqe { cdw10: 1 << 9, ..Sqe::admin(AdminOpcode::FORMAT_NVM).with_nsid(nsid) };
    assert!(host.command(0, "Format", format(1), Data::None).is_err(), "that is not allowed");
    host.command(0, "Format", format(3), Data::None).expect("formatted");
    let found = events(&mut host);
    let cntlid = host.session().cntlid();
    let formatted = [EventType::FORMAT_COMPLETION, EventType::FORMAT_START];
    assert_eq!(kinds(&found), [formatted, start].concat(), "what was refused did not begin");
    assert_eq!((found[0].1, found[1].1), (cntlid, cntlid));
    let begun = FormatStart::parse(found[1].2.first_chunk().expect("its length"));
    let done = FormatCompletion::parse(found[0].2.first_chunk().expect("its length"));
    assert_eq!((begun.nsid, begun.cdw10), (3, 1 << 9));
    assert_eq!((done.nsid, done.status, done.outcome), (3, 0, 0));
    host.disconnect();
    target.restart("");
    let mut host = target.connect(1);
    let again = events(&mut host);
    let end = [EventType::SMART_SNAPSHOT];
    assert_eq!(kinds(&again[..3]), [&start[..], &end].concat());
    assert_eq!(again[3..], found, "and all of what was before");
    host.disconnect();
}

#[test]
fn the_timestamp_is_that_of_one_controller_and_a_change_is_an_event() {
    const NOON_MS: u64 = 1_764_244_800_000;
    let target = TestTarget::start();
    let mut host = target.connect(1);
    let setup = HostOptions { source: None, ..target.setup() };
    let mut other = Host::connect(target.options(1), setup).expect("connected");
    assert!(host.session().controller().oncs.timestamp());
    let timestamp = |host: &mut Host| {
        let (fid, sel) = (FeatureId::TIMESTAMP, Select::CURRENT);
        let mut data = [0; Timestamp::BYTES];
        host.feature(GetFeatures { fid, sel, nsid: 0, cdw11: 0 }, &mut data).expect("its value");
        let stamp = Timestamp::parse(&data);
        (stamp.origin(), stamp.ms())
    };
    let set = SetFeatures::new(FeatureId::TIMESTAMP, 0);
    host.set_feature(set, 0, &Timestamp::new(NOON_MS).emit()).expect("set");
    let (origin, ms) = timestamp(&mut host);
    assert_eq!(origin, Timestamp::ORIGIN_HOST);
    assert!((NOON_MS..NOON_MS + 3_600_000).contains(&ms), "{ms}");
    let (origin, ms) = timestamp(&mut other);
    assert_eq!(origin, Timestamp::ORIGIN_RESET, "its host has not set it");
    assert!(ms < 3_600_000, "{ms}");

    let found = events(&mut host);
    let (kind, cntlid, data) = &found[0];
    assert_eq!((*kind, *cntlid), (EventType::TIMESTAMP_CHANGE, host.session().cntlid()));
    let change = TimestampChange::parse(data.first_chunk().expect("its length"));
    assert_eq!(change.previous, Timestamp::new(change.since_reset_ms), "counted from the Connect");

    host.disconnect();
    other.disconnect();
}

/// Namespace for the tests of Abort: a file with an injected fault.
fn with_fault(target: &TestTarget, fault: &str) -> String {
    let path = target.directory().join("disk3.img");
    let path = path.display();
    format!(
        "[[subsystem.namespace]]\nnsid = 3\npath = \"{path}\"\nsize = \"1MiB\"\nblock_size = 4096\n\
         fault = \"{fault}\"\n[reactor]\nthreads = 2\n"
    )
}

/// Sends an Abort command for each id that the host may have given, until one is told that its
/// command has ended. Some may come before the command, so it is tried more than once.
fn abort_whatever_it_is_called(host: &mut Host, queue: u16) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let slots = u32::from(host.session().capacity(queue));
    let ids = || (0..slots).flat_map(|slot| (1..6u32).map(move |uses| uses << 12 | slot));
    loop {
        for cid in ids() {
            let cdw10 = u32::from(queue) | cid << 16;
            let abort = Sqe { cdw10, ..Sqe::admin(AdminOpcode::ABORT) };
            let (result, _) = host.command(0, "Abort", abort, Data::None).expect("answered");
            if result == 0 {
                return;
            }
        }
        assert!(Instant::now() < deadline, "nothing could be aborted on queue {queue}");
    }
}

/// Three queues on two reactors: at least one of them is not where the admin queue is.
#[test]
fn an_abort_finds_its_command_on_whichever_reactor() {
    let mut target = TestTarget::start_with("[reactor]\nthreads = 2\n");
    target.apply(&with_fault(&target, "stall"));
    let mut host = target.connect(3);
    for queue in 1..=host.session().io_queues() {
        for opcode in [IoOpcode::READ, IoOpcode::WRITE, IoOpcode::FLUSH] {
            let (data, sqe) = match opcode {
                IoOpcode::FLUSH => (Data::None, Sqe::io(opcode, 3)),
                _ => (
                    Data::Buf(host.pool().take_data(4096).expect("memory")),
                    Sqe::io(opcode, 3).with_range(5, 0),
                ),
            };
            let tag = u64::from(queue) << 8 | u64::from(opcode.0);
            assert!(host.submit(queue, Request { sqe, data, tag }).is_ok());
            host.ring();
            abort_whatever_it_is_called(&mut host, queue);
            // The response to the command may arrive after that to the Abort.
            let deadline = Instant::now() + Duration::from_secs(60);
            let done = loop {
                if let Some(done) = host.next_done() {
                    break done;
                }
                assert!(Instant::now() < deadline, "the command is answered");
                host.wait(deadline);
            };
            assert_eq!(done.tag, tag);
            let cqe = done.outcome.expect("answered");
            assert!(cqe.status.is(Status::ABORT_REQUESTED), "{opcode} {}", cqe.status);
            if let Data::Buf(buf) = done.data {
                host.pool().give(buf);
            }
        }
    }
    // What was aborted has changed nothing, and the queues serve on.
    target.apply(&with_fault(&target, "none"));
    let mut found = vec![1; 4096];
    let place = initiator::host::Range { nsid: 3, slba: 5, block_bytes: 4096 };
    host.read(place, &mut found).expect("read");
    assert!(found.iter().all(|byte| *byte == 0));
    host.disconnect();
}

/// A host that times out reconnects repeatedly, and leaves operations at a device each time.
#[test]
fn reconnects_are_granted_all_queues_while_a_device_stalls() {
    const ROUNDS: usize = 12;
    // Room for three such hosts at once, each with an admin queue and two of 64 entries.
    let memory = "[memory]\nreceives = 640\n[limits]\nqueue_depth = 64\n";
    let mut target = TestTarget::start_with(&format!("{memory}[reactor]\nthreads = 2\n"));
    target.apply(&(with_fault(&target, "stall") + memory));
    for round in 0..ROUNDS {
        let mut host = target.connect(2);
        assert_eq!(host.session().io_queues(), 2, "in round {round}");
        for queue in 1..=2 {
            let data = Data::Buf(host.pool().take_data(4096).expect("memory"));
            let sqe = Sqe::io(IoOpcode::READ, 3).with_range(5, 0);
            assert!(host.submit(queue, Request { sqe, data, tag: 1 }).is_ok());
        }
        host.ring();
        // Without waiting for the shutdown, which the stalled disk would not let happen.
        drop(host);
    }
    target.apply(&(with_fault(&target, "none") + memory));
    let mut host = target.connect(2);
    let place = initiator::host::Range { nsid: 3, slba: 5, block_bytes: 4096 };
    host.read(place, &mut [0; 4096]).expect("read");
    host.disconnect();
}
