//! Format NVM on a whole target: other blocks for every host and queue at once, over restarts, and
//! no I/O meanwhile.

use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use initiator::host::Range;
use initiator::{Data, Host, HostOptions, Options, Request};
use nvme::feature::{FeatureId, SetFeatures};
use nvme::identify::IdentifyNamespace;
use nvme::log::{GetLogPage, LogId, changed_namespaces};
use nvme::persistent_event::{EventType, FormatCompletion};
use nvme::{AdminOpcode, IoOpcode, Sqe, Status};

use crate::admin::events;
use crate::target::{HOST, HOSTID, SUBSYSTEM, TestTarget, ended, nvmf};
use crate::{FILE, at, pattern, status};

const BYTES: usize = 1 << 20;
const LARGE: Range = Range { nsid: 3, slba: 0, block_bytes: 4096 };
const SMALL: Range = Range { nsid: 3, slba: 0, block_bytes: 512 };
/// LBA formats, by index.
const TO_512: u8 = 0;
const TO_4096: u8 = 1;

/// Namespace 3, which may be formatted, with more keys. How many reactors there are, the start
/// alone decides.
fn with(target: &TestTarget, more: &str) -> String {
    let path = target.directory().join("disk3.img");
    format!(
        "[[subsystem.namespace]]\nnsid = 3\npath = \"{}\"\nsize = \"1MiB\"\nblock_size = 4096\n\
         allow_format = true\nwrite_uncorrectable = true\n{more}\n",
        path.display()
    )
}

fn serving(threads: u32) -> TestTarget {
    let mut target = TestTarget::start_with(&format!("[reactor]\nthreads = {threads}\n"));
    let text = with(&target, "");
    target.apply(&text);
    target
}

/// Blocks, the number of the format, and how far another one is.
fn shape(host: &mut Host) -> (u64, u8, u8) {
    let page: IdentifyNamespace = host.identify_namespace(3).expect("the page");
    assert_eq!((page.nsze, page.nlbaf_z), (page.ncap, 1));
    assert_eq!((page.lbaf[0].lbads, page.lbaf[1].lbads), (9, 12));
    (page.nsze, page.flbas, page.fpi)
}

fn contents(host: &mut Host, range: Range) -> Vec<u8> {
    let mut bytes = vec![1; BYTES];
    host.read(range, &mut bytes).expect("read");
    bytes
}

/// A host that is driven now and then only, the `n`th: each has an address of its own.
fn patient(target: &TestTarget, n: u8) -> Host {
    let source: Ipv4Addr = target.source().parse().expect("an address");
    let [a, b, c, d] = source.octets();
    let setup =
        HostOptions { source: Some(Ipv4Addr::new(a, b, c, d + n).into()), ..target.setup() };
    let (kato_ms, command_timeout) = (600_000, Duration::from_secs(600));
    let options = Options { kato_ms, command_timeout, ..target.options(2) };
    Host::connect(options, setup).expect("connected")
}

/// Begins to format where nothing gets on, until another host sees it.
fn begin(host: &mut Host, format: u8, other: &mut Host) {
    let cdw10 = u32::from(format);
    let sqe = Sqe { cdw10, ..Sqe::admin(AdminOpcode::FORMAT_NVM).with_nsid(3) };
    assert!(host.submit(0, Request { tag: 1, sqe, data: Data::None }).is_ok());
    let deadline = Instant::now() + Duration::from_secs(60);
    while shape(other).2 == 0x80 {
        host.turn();
        assert!(Instant::now() < deadline, "it never begins");
    }
}

/// The answer to the command under way.
fn answer(host: &mut Host) -> Status {
    let done = loop {
        match host.next_done() {
            Some(done) => break done,
            None => host.wait(Instant::now() + Duration::from_secs(1)),
        }
        assert_eq!(host.session().ended(), None);
    };
    if let Data::Buf(memory) = done.data {
        host.pool().give(memory);
    }
    done.outcome.expect("answered").status
}

#[test]
fn no_io_is_done_while_a_host_formats() {
    // Of one reactor every queue knows what one knows.
    let mut target = serving(1);
    let (mut one, mut two) = (patient(&target, 0), patient(&target, 1));
    let data = pattern(1, BYTES);
    one.write(LARGE, &data, false).expect("written");
    assert!(contents(&mut two, LARGE) == data);
    assert_eq!(shape(&mut two), (256, TO_4096, 0x80));

    target.apply(&with(&target, "fault = \"stall\""));
    begin(&mut one, TO_512, &mut two);
    assert_eq!(shape(&mut two), (256, TO_4096, 0x80 | 100), "as before, until it is done");
    let refused = |outcome| {
        let status = status(outcome);
        assert!(status.is(Status::FORMAT_IN_PROGRESS) && !status.dnr(), "{status}");
    };
    refused(two.read(LARGE, &mut [0; 4096]));
    refused(two.write(LARGE, &[1; 4096], false));
    refused(two.write_zeroes(LARGE, 1, true));
    refused(two.flush(3));
    refused(two.deallocate(3, 0, 1));
    refused(two.format(3, TO_4096, 1));
    let protect =
        SetFeatures { nsid: 3, ..SetFeatures::new(FeatureId::NAMESPACE_WRITE_PROTECT, 1) };
    refused(two.set_feature(protect, 0, &[]).map(drop));
    two.write(FILE, &data[..8192], false).expect("others are served");
    target.apply(&with(&target, ""));
    assert_eq!(answer(&mut one), Status::SUCCESS);
    assert!(contents(&mut two, SMALL) == vec![0; BYTES], "and it serves again");
    one.disconnect();
    two.disconnect();
}

#[test]
fn a_new_block_size_is_effective_for_every_host_at_once() {
    let mut target = serving(2);
    let (mut one, mut two) = (patient(&target, 0), patient(&target, 1));
    let data = pattern(1, BYTES);
    two.write(LARGE, &data, false).expect("written");
    one.format(3, TO_512, 0).expect("formatted");
    for host in [&mut one, &mut two] {
        let event = host.event(Instant::now() + Duration::from_secs(60)).expect("connected");
        assert!(event.is_some(), "it is told");
        let log = host.log(GetLogPage::new(LogId::CHANGED_NAMESPACES, 0, 1024), 4096);
        let log = log.expect("the log").try_into().expect("its length");
        assert_eq!(changed_namespaces(&log).collect::<Vec<_>>(), [3]);
        assert_eq!(shape(host), (2048, TO_512, 0x80));
        assert!(contents(host, SMALL) == vec![0; BYTES], "erased");
        // What a host means that has not looked yet is refused, not misunderstood.
        let wrong = status(host.read(LARGE, &mut [0; 8192]));
        assert!(wrong.is(Status::DATA_SGL_LENGTH_INVALID), "{wrong}");
        let beyond = status(host.read(at(SMALL, 2048), &mut [0; 512]));
        assert!(beyond.is(Status::LBA_OUT_OF_RANGE), "{beyond}");
    }
    two.write(SMALL, &data, false).expect("written");
    assert!(contents(&mut one, SMALL) == data);
    one.disconnect();
    two.disconnect();

    let text = with(&target, "");
    target.restart(&text);
    let mut host = target.connect(1);
    assert_eq!(shape(&mut host), (2048, TO_512, 0x80));
    assert!(contents(&mut host, SMALL) == data, "the same blocks after a restart");
    host.format(3, TO_4096, 1).expect("formatted");
    assert_eq!(shape(&mut host), (256, TO_4096, 0x80));
    assert!(contents(&mut host, LARGE) == vec![0; BYTES]);
    host.disconnect();
}

#[test]
fn pending_writes_are_never_executed_in_the_new_block_size() {
    let mut target = serving(2);
    let [mut one, mut two, mut three] = [0, 1, 2].map(|n| patient(&target, n));
    target.apply(&with(&target, "fault = \"stall\""));
    // An earlier write, which the device executes as long as it stalls.
    let sqe = Sqe::io(IoOpcode::WRITE, 3).with_range(100, 0);
    let mut memory = three.pool().take_data(4096).expect("memory");
    three.pool().bytes_mut(&mut memory).fill(0xA5);
    let request = Request { tag: 1, sqe, data: Data::Buf(memory) };
    assert!(three.submit(1, request).is_ok());
    assert_eq!(shape(&mut three), (256, TO_4096, 0x80));
    begin(&mut one, TO_512, &mut two);
    target.apply(&with(&target, ""));
    assert_eq!(answer(&mut one), Status::SUCCESS);
    // Done before, or refused if it came late after all: never in blocks of the new size.
    let status = answer(&mut three);
    assert!(status.is_success() || status.is(Status::FORMAT_IN_PROGRESS), "{status}");
    assert!(contents(&mut two, SMALL) == vec![0; BYTES]);
    [one, two, three].into_iter().for_each(Host::disconnect);
}

#[test]
fn a_format_interrupted_by_a_target_stop_changes_nothing() {
    let mut target = serving(2);
    let (mut one, mut two) = (patient(&target, 0), patient(&target, 1));
    let data = pattern(1, BYTES);
    one.write(LARGE, &data, false).expect("written");
    one.flush(3).expect("flushed");
    target.apply(&with(&target, "fault = \"stall\""));
    begin(&mut one, TO_512, &mut two);
    drop((one, two));
    // It could not open the store again that somebody still erases.
    let text = with(&target, "");
    target.restart(&text);
    let mut host = target.connect(1);
    assert_eq!(shape(&mut host), (256, TO_4096, 0x80));
    assert!(contents(&mut host, LARGE) == data, "nothing was reached");
    host.disconnect();
}

#[test]
fn a_format_completes_after_its_host_disconnects() {
    let mut target = serving(2);
    let (mut one, mut two) = (patient(&target, 0), patient(&target, 1));
    one.write(LARGE, &pattern(1, BYTES), false).expect("written");
    one.write_uncorrectable(at(LARGE, 7), 2).expect("unreadable");
    assert!(status(two.read(at(LARGE, 8), &mut [0; 4096])).is(Status::UNRECOVERED_READ_ERROR));
    target.apply(&with(&target, "fault = \"stall\""));
    begin(&mut one, TO_512, &mut two);
    let cntlid = one.session().cntlid();
    drop(one);
    target.apply(&with(&target, ""));
    let deadline = Instant::now() + Duration::from_secs(60);
    while shape(&mut two) != (2048, TO_512, 0x80) {
        assert!(Instant::now() < deadline, "it never ends");
        thread::sleep(Duration::from_millis(5));
    }
    assert!(contents(&mut two, SMALL) == vec![0; BYTES], "no block is unreadable any more");
    let completion = loop {
        let found = events(&mut two);
        if let Some(event) = found.iter().find(|event| event.0 == EventType::FORMAT_COMPLETION) {
            break event.clone();
        }
        assert!(Instant::now() < deadline, "that it is done is never told");
    };
    let done = FormatCompletion::parse(completion.2.first_chunk().expect("its length"));
    assert_eq!((completion.1, done.nsid, done.status, done.outcome), (cntlid, 3, 0, 0));
    // No such state remains for a later command.
    let verify = Sqe::io(IoOpcode::VERIFY, 3).with_range(0, 2047);
    two.command(1, "Verify", verify, Data::None).expect("all can be read");
    two.disconnect();
}

/// A verification or measurement cannot continue, and reports why.
#[test]
fn tools_report_a_format_by_another_host() {
    let target = serving(2);
    let source: Ipv4Addr = target.source().parse().expect("an address");
    let [a, b, c, d] = source.octets();
    let source = Ipv4Addr::new(a, b, c, d + 1).to_string();
    let runs: [(&[&str], Range, u8); 2] = [
        (&["verify", "--size", "1m", "--bs", "16k"], LARGE, TO_512),
        (&["bench", "--rw", "randrw", "--bs", "4k"], SMALL, TO_4096),
    ];
    for (command, range, format) in runs {
        let mut tool = Command::new(nvmf());
        tool.args(command).args(["-t", "rdma", "-a", &target.address(), "-s", "4420"]);
        tool.args(["-n", SUBSYSTEM, "-q", HOST, "-I", HOSTID, "-w", &source]);
        tool.args(["--provider", "soft"]);
        tool.args(["--namespace-id", "3", "--runtime", "3600"]);
        tool.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = tool.spawn().expect("nvmf runs");
        let mut one = patient(&target, 0);
        while contents(&mut one, range) == vec![0; BYTES] {
            assert_eq!(child.try_wait().expect("a child"), None, "it goes on");
        }
        one.format(3, format, 0).expect("formatted");
        one.disconnect();
        let ran = ended(child);
        assert_eq!(ran.code(), 1, "{command:?}: {}", ran.error());
        // Of how large they are now it knows when the other has done.
        let (said, gone) = ("another host has formatted namespace 3: ", "its data are lost");
        assert!(ran.error().contains(said) && ran.error().contains(gone), "{}", ran.error());
        assert!(!ran.text().contains("violation"), "{}", ran.text());
    }
}
