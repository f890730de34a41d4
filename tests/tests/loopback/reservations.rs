//! Reservations between hosts, on a target of two reactors: what Preempt and Abort promises, under
//! load.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use initiator::host::Range;
use initiator::{Error, Host, HostOptions, Options};
use nvme::feature::AsyncEvent;
use nvme::log::{GetLogPage, LogId};
use nvme::reservation::{
    Acquire, AcquireAction, AcquireKeys, NotificationPage, NotificationType, Register,
    RegisterKeys, Release, ReleaseKey, ReservationType,
};
use nvme::{Sgl, Sqe, Status};

use crate::FILE;
use crate::target::TestTarget;

const HOLDER: [u8; 16] = [0xA; 16];
const WRITER: [u8; 16] = [0xB; 16];
const HOLDERS_KEY: u64 = 0xA1;
const WRITERS_KEY: u64 = 0xB1;

/// Registrants may write, others only read.
const RTYPE: ReservationType = ReservationType::WRITE_EXCLUSIVE_REGISTRANTS;

/// A plain Preempt is caught about once in 50: no promise binds it to wait.
const ROUNDS: u32 = 60;

/// Bytes that are written over and over.
const BYTES: usize = 1 << 20;

/// Hosts; each connection uses an address of its own.
fn who(target: &TestTarget, hostid: [u8; 16]) -> (Options, HostOptions) {
    let options = Options { hostid, ..target.options(1) };
    (options, HostOptions { source: None, ..target.setup() })
}

fn connect(target: &TestTarget, hostid: [u8; 16]) -> Host {
    let (options, setup) = who(target, hostid);
    Host::connect(options, setup).expect("connected")
}

fn send(host: &mut Host, sqe: Sqe, data: &[u8]) -> Result<(), Error> {
    host.command_out(1, "a reservation command", sqe, data).map(|_| ())
}

fn register(host: &mut Host, new: u64) -> Result<(), Error> {
    send(host, Register(0).emit(1, Sgl::NONE), &RegisterKeys { current: 0, new }.emit())
}

fn acquire(host: &mut Host, action: AcquireAction, preempt: u64) -> Result<(), Error> {
    let how = Acquire(0).with_action(action).with_rtype(RTYPE);
    let keys = AcquireKeys { current: HOLDERS_KEY, preempt };
    send(host, how.emit(1, Sgl::NONE), &keys.emit())
}

/// Writes all over the range until told to end. While its host is not registered, every write must
/// be refused.
fn write_on(mut host: Host, seed: usize, end: &AtomicBool, written: &AtomicU32) {
    const PIECE: usize = 64 << 10;
    let data = vec![0xBB; PIECE];
    let mut piece = seed;
    while !end.load(Ordering::Relaxed) {
        piece = (piece * 5 + 3) % (BYTES / PIECE);
        let place = Range { slba: (piece * PIECE / 4096) as u64, ..FILE };
        match host.write(place, &data, false) {
            Ok(()) => drop(written.fetch_add(1, Ordering::Relaxed)),
            Err(Error::Status { status, .. }) => {
                let expected = [Status::RESERVATION_CONFLICT, Status::ABORTED_PREEMPT];
                assert!(expected.iter().any(|e| status.is(*e)), "{status}");
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("{error}"),
        }
    }
    host.disconnect();
}

#[test]
fn preempt_and_abort_stops_all_writes_of_the_preempted_host() {
    let target = TestTarget::start_with("[reactor]\nthreads = 2\n");
    let mut holder = connect(&target, HOLDER);
    let mut other = connect(&target, WRITER);
    register(&mut holder, HOLDERS_KEY).expect("registered");
    acquire(&mut holder, AcquireAction::ACQUIRE, 0).expect("acquired");
    let (end, written) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        for seed in 0..4 {
            let (options, setup) = who(&target, WRITER);
            let (end, written) = (&end, &written);
            scope.spawn(move || {
                let host = Host::connect(options, setup).expect("connected");
                write_on(host, seed, end, written);
            });
        }
        // The writers shall end after any failure below.
        let _guard = EndOnDrop(&end);
        let own = vec![0xAA; BYTES];
        let mut found = vec![0; BYTES];
        for round in 0..ROUNDS {
            let before = written.load(Ordering::Relaxed);
            register(&mut other, WRITERS_KEY).expect("registered");
            let deadline = Instant::now() + Duration::from_secs(60);
            while written.load(Ordering::Relaxed) < before + 8 {
                assert!(Instant::now() < deadline, "the writers write in round {round}");
                thread::sleep(Duration::from_millis(1));
            }
            acquire(&mut holder, AcquireAction::PREEMPT_AND_ABORT, WRITERS_KEY).expect("preempted");
            holder.write(FILE, &own, false).expect("written");
            // Something that came late would be here at once, or a little later.
            for pause in [0, 5] {
                thread::sleep(Duration::from_millis(pause));
                holder.read(FILE, &mut found).expect("read");
                let late = found.iter().filter(|byte| **byte != 0xAA).count();
                assert_eq!(late, 0, "bytes of the preempted host in round {round}");
            }
        }
    });
    assert!(written.load(Ordering::Relaxed) >= ROUNDS * 8);
    holder.disconnect();
    other.disconnect();
}

struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_release_is_an_event_at_the_other_registrant() {
    let target = TestTarget::start();
    let mut holder = connect(&target, HOLDER);
    let mut other = connect(&target, WRITER);
    register(&mut holder, HOLDERS_KEY).expect("registered");
    register(&mut other, WRITERS_KEY).expect("registered");
    acquire(&mut holder, AcquireAction::ACQUIRE, 0).expect("acquired");
    let release = Release(0).with_rtype(RTYPE).emit(1, Sgl::NONE);
    send(&mut holder, release, &ReleaseKey { current: HOLDERS_KEY }.emit()).expect("released");
    let until = Instant::now() + Duration::from_secs(60);
    let event = other.event(until).expect("connected");
    assert_eq!(event, Some(AsyncEvent::RESERVATION_LOG_AVAILABLE));
    let log = GetLogPage::new(LogId::RESERVATION_NOTIFICATION, 0, 1);
    let log = GetLogPage { rae: false, ..log };
    let bytes = other.log(log, NotificationPage::BYTES).expect("read");
    let page = NotificationPage::parse(bytes.first_chunk().expect("whole"));
    assert_eq!((page.count, page.nsid), (1, 1));
    assert_eq!(page.kind, NotificationType::RESERVATION_RELEASED);
    holder.disconnect();
    other.disconnect();
}
