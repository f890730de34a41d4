//! The user-space host against a real target in the same process, over the soft fabric and real
//! sockets: the library, then the tool.

#[path = "loopback/admin.rs"]
mod admin;
#[path = "loopback/allocation.rs"]
mod allocation;
#[path = "loopback/attach.rs"]
mod attach;
#[path = "loopback/authentication.rs"]
mod authentication;
#[path = "loopback/changes.rs"]
mod changes;
#[path = "loopback/copy.rs"]
mod copy;
#[path = "loopback/formatting.rs"]
mod formatting;
#[path = "loopback/judges.rs"]
mod judges;
#[path = "loopback/lba_status.rs"]
mod lba_status;
#[path = "loopback/link.rs"]
mod link;
#[path = "loopback/managed.rs"]
mod managed;
#[path = "loopback/observe.rs"]
mod observe;
#[path = "loopback/reservations.rs"]
mod reservations;
#[path = "loopback/snapshot.rs"]
mod snapshot;
#[path = "loopback/target.rs"]
mod target;
#[path = "loopback/tool.rs"]
mod tool;
#[path = "loopback/trust.rs"]
mod trust;
#[path = "loopback/waiting.rs"]
mod waiting;
#[path = "loopback/why.rs"]
mod why;

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use initiator::host::Range;
use initiator::session::EndReason;
use initiator::{Data, Error, Host, HostOptions, Lost, Options, Request};
use nvme::copy::{Copy, CopyFlags, CopyRange};
use nvme::feature::AsyncEvent;
use nvme::log::{ErrorEntry, GetLogPage, LogId, SubsystemType, changed_namespaces};
use nvme::sqe::{DsmAttributes, DsmRange};
use nvme::{IoOpcode, Nqn, Sqe, Status};

use crate::target::{BLOCKS, SUBSYSTEM, TestTarget};

const FILE: Range = Range { nsid: 1, slba: 0, block_bytes: 4096 };
const RAM: Range = Range { nsid: 2, slba: 0, block_bytes: 512 };

fn at(range: Range, slba: u64) -> Range {
    Range { slba, ..range }
}

/// Bytes of which no two blocks are alike.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = initiator::rng::Random::new(seed);
    let mut bytes: Vec<u8> = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn status(outcome: Result<(), Error>) -> Status {
    match outcome {
        Err(Error::Status { status, .. }) => status,
        other => panic!("no status: {other:?}"),
    }
}

#[test]
fn data_round_trip_for_all_sizes_and_transfer_methods() {
    let target = TestTarget::start();
    for (queues, in_capsule) in [(1, true), (4, true), (2, false)] {
        let options = Options { in_capsule, ..target.options(queues) };
        let mut host = Host::connect(options, target.setup()).expect("connected");
        assert_eq!(host.session().io_queues(), queues);
        assert_eq!(host.session().in_capsule_bytes(), if in_capsule { 4096 } else { 0 });
        assert_eq!(host.session().max_transfer_bytes(), 1 << 20);
        // A block, one in the capsule and one not, exactly MDTS, and a bit more than several.
        for (seed, len) in [4096, 8192, 1 << 20, (5 << 20) + 4096].into_iter().enumerate() {
            let data = pattern(seed as u64, len);
            let place = at(FILE, 3 + seed as u64);
            host.write(place, &data, seed == 1).expect("written");
            let mut back = vec![0; len];
            host.read(place, &mut back).expect("read");
            assert!(back == data, "{len} bytes by {queues} queues");
            host.compare(place, &data).expect("alike");
        }
        let small = pattern(9, 512 * 3);
        host.write(at(RAM, 2045), &small, false).expect("the last blocks");
        let mut back = vec![0; small.len()];
        host.read(at(RAM, 2045), &mut back).expect("read");
        assert_eq!(back, small);
        host.flush(1).expect("flushed");
        host.disconnect();
    }
}

#[test]
fn compare_write_zeroes_and_deallocate_work_as_specified() {
    let target = TestTarget::start();
    let mut host = target.connect(1);
    let data = pattern(1, 8 * 4096);
    host.write(FILE, &data, false).expect("written");
    let mut other = data.clone();
    other[5 * 4096] ^= 1;
    assert!(status(host.compare(FILE, &other)).is(Status::COMPARE_FAILURE));
    host.compare(FILE, &data).expect("alike");

    host.write_zeroes(at(FILE, 1), 2, false).expect("zeroed");
    host.write_zeroes(at(FILE, 3), 1, true).expect("zeroed");
    let attributes = DsmAttributes(0).with_deallocate(true);
    let ranges = [5, 7].map(|slba| DsmRange { attributes: 0, blocks: 1, slba });
    host.dataset_management(1, attributes, &ranges).expect("deallocated");
    let mut back = vec![1; data.len()];
    host.read(FILE, &mut back).expect("read");
    for (block, (back, data)) in back.chunks(4096).zip(data.chunks(4096)).enumerate() {
        match block {
            0 | 4 | 6 => assert_eq!(back, data, "block {block}"),
            _ => assert!(back.iter().all(|&byte| byte == 0), "block {block}"),
        }
    }
    // More than one command's worth, and all there is.
    host.write_zeroes(FILE, BLOCKS, false).expect("zeroed");
    host.deallocate(1, 0, BLOCKS as u32).expect("deallocated");
    host.disconnect();
}

#[test]
fn blocks_are_copied_and_verified_without_the_host() {
    let target = TestTarget::start();
    let mut host = target.connect(1);
    let data = pattern(3, 16 * 4096);
    host.write(FILE, &data, false).expect("written");
    for format in [0, 1] {
        let copy = Copy { sdlba: 100, flags: CopyFlags(0).with_format(format) };
        // All 256 ranges, the last block first.
        let ranges: Vec<_> =
            (0..256).map(|at| CopyRange { slba: 15 - at % 16, nlb_z: 0 }).collect();
        host.copy(1, copy, &ranges).expect("copied");
        let mut back = vec![0; 256 * 4096];
        host.read(at(FILE, 100), &mut back).expect("read");
        for (block, lba) in back.chunks(4096).zip((0..16).rev().cycle()) {
            assert_eq!(block, &data[lba * 4096..][..4096], "block {lba}");
        }
        let long = [CopyRange { slba: 0, nlb_z: 255 }, CopyRange { slba: 0, nlb_z: 0 }];
        let refused = status(host.copy(1, copy, &long));
        assert!(refused.is(Status::COMMAND_SIZE_LIMIT_EXCEEDED), "{refused}");
        host.deallocate(1, 100, 256).expect("deallocated");
    }
    host.verify(FILE, BLOCKS).expect("read");
    assert!(status(host.verify(at(FILE, BLOCKS), 1)).is(Status::LBA_OUT_OF_RANGE));
    host.disconnect();
}

#[test]
fn in_capsule_data_size_follows_the_configuration() {
    for (size, bytes) in [("4KiB", 4096), ("16KiB", 16384)] {
        let target = TestTarget::start_with(&format!("[limits]\nin_capsule = \"{size}\"\n"));
        let options = Options { in_capsule: true, ..target.options(1) };
        let mut host = Host::connect(options, target.setup()).expect("connected");
        assert_eq!(host.session().in_capsule_bytes(), bytes);
        let page = host.identify_controller().expect("identified");
        assert_eq!((page.ioccsz_16, page.mdts), ((64 + bytes) / 16, 8));
        // Up to the limit, across it, and as much as one command moves.
        for (seed, len) in [4096, 8192, 16384, 20480, 1 << 20].into_iter().enumerate() {
            let data = pattern(seed as u64, len);
            let mut back = vec![0; len];
            host.write(at(FILE, 300), &data, true).expect("written");
            host.read(at(FILE, 300), &mut back).expect("read");
            assert!(back == data, "{len} bytes, {size} in the capsule");
            host.compare(at(FILE, 300), &data).expect("alike");
        }
        host.disconnect();
    }
}

/// Two hosts, each on a reactor of its own, count on one block: ten thousand rounds.
#[test]
fn concurrent_compare_and_writes_lose_no_update() {
    const ROUNDS: u64 = 10_000;
    let target = TestTarget::start_with("[reactor]\nthreads = 2\n");
    let count = |host: &mut Host, place: Range| {
        let (mut counted, mut missed) = (0, 0);
        for round in 0..ROUNDS / 2 {
            let mut old = vec![0; 4096];
            host.read(place, &mut old).expect("read");
            let value = u64::from_le_bytes(*old.first_chunk().expect("a block"));
            let new = (value + 1).to_le_bytes().repeat(512);
            match host.compare_and_write(1, place, &old, &new, false) {
                Ok(()) => counted += 1,
                Err(error) => {
                    assert!(status(Err(error)).is(Status::COMPARE_FAILURE));
                    missed += 1;
                }
            }
            if round % 64 == 0 {
                // A write beside it, and one in the way of nobody.
                host.write(at(place, 1), &new, false).expect("written");
            }
        }
        (counted, missed)
    };
    let counts: Vec<(u64, u64)> = thread::scope(|scope| {
        let hosts = ["2", "3"].map(|last| {
            let (target, count) = (&target, &count);
            scope.spawn(move || {
                // Each has an address of its own, as two machines have.
                let source = target.source();
                let source = format!("{}{last}", source.strip_suffix('2').unwrap_or(&source));
                let source = Some(source.parse().expect("an address"));
                let setup = HostOptions { source, ..target.setup() };
                let mut host = Host::connect(target.options(1), setup).expect("connected");
                let counts = count(&mut host, at(FILE, 7));
                host.disconnect();
                counts
            })
        });
        hosts.into_iter().map(|host| host.join().expect("no panic")).collect()
    });
    let mut host = target.connect(1);
    let mut block = vec![0; 4096];
    host.read(at(FILE, 7), &mut block).expect("read");
    let found = u64::from_le_bytes(*block.first_chunk().expect("a block"));
    println!("counted {found}: {counts:?}");
    assert_eq!(found, counts.iter().map(|(counted, _)| counted).sum::<u64>());
    assert_eq!(counts.iter().map(|(a, b)| a + b).sum::<u64>(), ROUNDS);
    assert!(block == found.to_le_bytes().repeat(512), "nor is a block torn");
    let refused = host.compare_and_write(1, FILE, &[0; 8192], &[1; 8192], false);
    assert!(status(refused).is(Status::ATOMIC_WRITE_UNIT_EXCEEDED));
    host.disconnect();
}

/// As SPDK's `fused_ordering`: eight writes of zeros, and a fused pair behind them that compares
/// with zeros, over and over.
#[test]
fn fused_pairs_see_data_from_before_or_after_pending_writes() {
    const ROUNDS: usize = 1000;
    const WRITES: u64 = 8;
    let target = TestTarget::start();
    let mut host = target.connect(1);
    let submit = |host: &mut Host, sqe: Sqe, len: u32, tag: u64| {
        let mut buf = host.pool().take_data(len).expect("memory");
        host.pool().bytes_mut(&mut buf).fill(0);
        host.submit(1, Request { sqe, data: Data::Buf(buf), tag }).expect("room");
    };
    let half = |opcode, fuse| {
        Sqe::io(opcode, 1).with_range(0, 0).with_flags(nvme::sqe::Flags::SGL.with_fuse(fuse))
    };
    let round = |host: &mut Host| -> Status {
        for tag in 0..WRITES {
            submit(host, Sqe::io(IoOpcode::WRITE, 1).with_range(0, 15), 16 * 4096, tag);
        }
        submit(host, half(IoOpcode::COMPARE, 1), 4096, WRITES);
        submit(host, half(IoOpcode::WRITE, 2), 4096, WRITES + 1);
        let (mut compared, mut home) = (None, 0);
        while home < WRITES + 2 {
            host.wait(Instant::now() + Duration::from_secs(60));
            while let Some(done) = host.next_done() {
                give(host, done.data);
                let status = done.outcome.expect("answered").status;
                if done.tag == WRITES {
                    compared = Some(status);
                } else if done.tag < WRITES {
                    assert!(status.is_success(), "{status}");
                }
                home += 1;
            }
            assert!(host.session().ended().is_none());
        }
        compared.expect("answered")
    };
    let (zeros, mut found) = (vec![0; 4096], vec![0; 4096]);
    let (dirty, mut missed) = (pattern(7, 4096), 0);
    for _ in 0..ROUNDS / 10 {
        host.write(FILE, &dirty, false).expect("written");
        let status = round(&mut host);
        assert!(status.is_success() || status.is(Status::COMPARE_FAILURE), "{status}");
        missed += usize::from(!status.is_success());
        host.read(FILE, &mut found).expect("read");
        assert_eq!(found, zeros);
    }
    println!("overtaken in {missed} of {} rounds", ROUNDS / 10);
    // The blocks may only contain zeros: every overtaking is found.
    for n in 0..ROUNDS {
        let status = round(&mut host);
        assert!(status.is_success(), "round {n}: {status}");
    }
    host.disconnect();
}

#[test]
fn refused_commands_fail_and_leave_the_connection_usable() {
    let target = TestTarget::start();
    let mut host = target.connect(2);
    let mut page = vec![0; 4096];
    let log = GetLogPage { nsid: nvme::NSID_ALL, ..GetLogPage::new(LogId::ERROR, 0, 1) };
    assert!(status(host.read(at(FILE, BLOCKS), &mut page)).is(Status::LBA_OUT_OF_RANGE));
    let entries = host.log(log, 2 * ErrorEntry::BYTES).expect("read");
    let [newest, older] = *entries.as_chunks().0 else { panic!("two entries") };
    let (newest, older) = (ErrorEntry::parse(&newest), ErrorEntry::parse(&older));
    assert_eq!((newest.lba, newest.nsid, older.error_count), (BLOCKS, 1, 0));
    assert!(newest.sqid > 0 && newest.status.is(Status::LBA_OUT_OF_RANGE));
    let nowhere = Range { nsid: 77, ..FILE };
    assert!(status(host.read(nowhere, &mut page)).is(Status::INVALID_NAMESPACE));
    assert!(status(host.flush(77)).is(Status::INVALID_NAMESPACE));
    // In the middle of a long transfer: pieces after the first refusal are not sent.
    let mut much = vec![0; 8 << 20];
    assert!(status(host.read(at(FILE, BLOCKS - 512), &mut much)).is(Status::LBA_OUT_OF_RANGE));
    let uneven = host.write(FILE, &page[1..], false).expect_err("no whole blocks").to_string();
    assert_eq!(uneven, "4095 bytes are no whole blocks of 4096 bytes");
    host.read(FILE, &mut page).expect("and it still works");
    host.disconnect();
}

#[test]
fn refused_connects_report_their_cause() {
    let target = TestTarget::start();
    let nqn = |name| Nqn::new(name).expect("valid");
    let refusal =
        |options| Host::connect(options, target.setup()).expect_err("refused").to_string();
    let options = Options { hostnqn: nqn("nqn.2026-11.io.nvmfd:stranger"), ..target.options(1) };
    let expected = format!(
        "the subsystem {SUBSYSTEM} does not admit this host: add nqn.2026-11.io.nvmfd:stranger to \
         its hosts, or give another name with --hostnqn"
    );
    assert_eq!(refusal(options), expected);
    let options = Options { subnqn: nqn("nqn.2026-11.io.nvmfd:none"), ..target.options(1) };
    let expected = "the target has no subsystem nqn.2026-11.io.nvmfd:none: ask it with `nvmf \
                    discover`";
    assert_eq!(refusal(options), expected);
    let mut options = target.options(1);
    options.to.set_port(4421);
    let expected =
        format!("{} refused the connection: nothing listens on port 4421 there", target.address());
    assert_eq!(refusal(options), expected);
}

#[test]
fn discovery_lists_only_subsystems_that_admit_the_host() {
    let target = TestTarget::start();
    let discovery = |options: Options| {
        let options = Options { subnqn: Nqn::DISCOVERY, kato_ms: 0, ..options };
        Host::discover(options, target.setup()).expect("discovered")
    };
    let kinds = |found: &initiator::host::Discovery| -> Vec<SubsystemType> {
        found.records.iter().map(|record| record.subtype).collect()
    };
    let found = discovery(target.options(0));
    assert_eq!(kinds(&found), [SubsystemType::CURRENT_DISCOVERY, SubsystemType::NVM]);
    let record = &found.records[1];
    assert_eq!(record.subnqn.nqn().expect("a name").as_str(), SUBSYSTEM);
    assert_eq!(record.traddr.to_string(), target.address());
    assert_eq!(record.trsvcid.to_string(), "4420");
    let stranger = Nqn::new("nqn.2026-11.io.nvmfd:stranger").expect("valid");
    let found = discovery(Options { hostnqn: stranger, ..target.options(0) });
    assert_eq!(kinds(&found), [SubsystemType::CURRENT_DISCOVERY]);
}

#[test]
fn a_new_namespace_is_an_event() {
    let mut target = TestTarget::start();
    let mut host = target.connect(1);
    assert_eq!(host.namespaces(0, None).expect("listed"), [1, 2]);
    target.apply("[[subsystem.namespace]]\nnsid = 9\nkind = \"ram\"\nsize = \"1MiB\"\n");
    let until = Instant::now() + Duration::from_secs(120);
    let event = host.event(until).expect("connected").expect("an event");
    assert_eq!(event, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
    let page = GetLogPage {
        nsid: nvme::NSID_ALL,
        rae: false,
        ..GetLogPage::new(LogId::CHANGED_NAMESPACES, 0, 1)
    };
    let log = host.log(page, 4096).expect("read");
    let changed: Vec<u32> = changed_namespaces(log.first_chunk().expect("a page")).collect();
    assert_eq!(changed, [9]);
    assert_eq!(host.namespaces(0, None).expect("listed"), [1, 2, 9]);
    assert_eq!(host.namespaces(2, None).expect("listed"), [9]);
    // Acknowledged, so that the next event is reported.
    target.apply("");
    assert_eq!(host.event(until).expect("connected"), Some(event));
    host.disconnect();
}

/// Queues are on two reactors, and each round gives them another chance to lag behind.
#[test]
fn a_completed_reload_is_effective_on_every_queue() {
    const MORE: &str = "[[subsystem.namespace]]\nnsid = 3\nkind = \"ram\"\nsize = \"1MiB\"\n";
    let mut target = TestTarget::start_with("[reactor]\nthreads = 2\n");
    let mut host = target.connect(3);
    let flush = |host: &mut Host, queue| {
        let sqe = Sqe::io(IoOpcode::FLUSH, 3);
        host.command(queue, "Flush", sqe, Data::None).map(drop)
    };
    for round in 0..200 {
        target.apply(MORE);
        for queue in 1..=3 {
            flush(&mut host, queue).unwrap_or_else(|error| panic!("{round}, {queue}: {error}"));
        }
        target.apply("");
        for queue in 1..=3 {
            let refused = status(flush(&mut host, queue));
            assert!(refused.is(Status::INVALID_NAMESPACE), "{round}, {queue}: {refused}");
        }
    }
    host.disconnect();
}

#[test]
fn hosts_on_the_target_machine_get_source_addresses() {
    let target = TestTarget::start();
    let setup = HostOptions { source: None, ..target.setup() };
    let connect = || Host::connect(target.options(2), setup).expect("connected");
    let mut hosts = [connect(), connect(), connect()];
    hosts.iter_mut().for_each(|host| host.flush(1).expect("flushed"));
    hosts.into_iter().for_each(Host::disconnect);
}

#[test]
fn dropped_hosts_disconnect_their_controllers() {
    // The target has room for few at once, and each would stay for its keep alive timeout.
    let target = TestTarget::start_with("[limits]\ncontrollers = 4\n");
    for _ in 0..20 {
        drop(target.connect(1));
    }
}

#[test]
fn an_idle_host_stays_connected_by_keep_alive() {
    let target = TestTarget::start();
    // Half of it is how long this machine may keep the host from running.
    let mut host = Host::connect(Options { kato_ms: 5000, ..target.options(1) }, target.setup())
        .expect("connected");
    // Longer than any target waits for a sign of life with this timeout.
    let none = host.event(Instant::now() + Duration::from_secs(12)).expect("still connected");
    assert_eq!(none, None);
    host.flush(1).expect("alive");
    host.disconnect();
}

#[test]
fn a_target_that_stops_under_load_may_lose_commands_but_no_buffer() {
    let mut target = TestTarget::start();
    let mut host = target.connect(2);
    let depth = host.session().capacity(1);
    assert_eq!(depth, 127);
    let mut sent = 0u64;
    let mut home = BTreeSet::new();
    let mut lost = 0;
    let (under_load, stop) = mpsc::channel();
    let stopping = thread::spawn({
        let running = target.take();
        move || {
            stop.recv().expect("it comes under load");
            running.stop(Instant::now() + Duration::from_secs(60));
        }
    });
    while host.session().ended().is_none() {
        for queue in 1..=2 {
            while host.session().ended().is_none() && host.session().outstanding(queue) < 60 {
                let data = Data::Buf(host.pool().take_data(4096).expect("memory"));
                let sqe = Sqe::io(IoOpcode::READ, 1).with_range(sent % BLOCKS, 0);
                let request = Request { sqe, data, tag: sent };
                match host.submit(queue, request) {
                    Ok(()) => sent += 1,
                    Err((back, _)) => {
                        give(&mut host, back.data);
                        break;
                    }
                }
            }
        }
        host.wait(Instant::now() + Duration::from_secs(5));
        lost += collect(&mut host, &mut home);
        if home.len() > 1000 {
            // Nobody listens to the second one.
            let _ = under_load.send(());
        }
    }
    // Until the last connection has ended.
    let until = Instant::now() + Duration::from_secs(60);
    while host.session().phase() != initiator::Phase::Ended && Instant::now() < until {
        host.turn();
    }
    lost += collect(&mut host, &mut home);
    stopping.join().expect("stopped");
    let ended = host.session().ended().cloned();
    assert!(matches!(ended, Some(EndReason::Peer { .. })), "{ended:?}");
    assert_eq!(home.len() as u64, sent, "each request came home once");
    // The target may happen to have answered all of them.
    assert!(home.len() as u64 > lost, "{lost} of {sent} lost");
    assert!(host.pool().is_full(), "{:?} are free", host.pool().free());
}

fn give(host: &mut Host, data: Data) {
    if let Data::Buf(buf) = data {
        host.pool().give(buf);
    }
}

/// Takes what is done; returns how many were lost.
fn collect(host: &mut Host, home: &mut BTreeSet<u64>) -> u64 {
    let mut lost = 0;
    while let Some(done) = host.next_done() {
        assert!(home.insert(done.tag), "request {} came home twice", done.tag);
        lost += u64::from(done.outcome == Err(Lost));
        give(host, done.data);
    }
    lost
}
