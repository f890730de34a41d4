//! The Persistent Event log of a subsystem.
//!
//! It is one file for each subsystem in the `state_directory`, text with a line for each event,
//! written beside its name, synced and renamed by the usage writer, a second after an event or at
//! its next interval. The newest of each kind are kept, so many events of one kind do not evict
//! those of another. Without a `state_directory` there is no such log, because nothing in it would
//! persist.
//!
//! ```text
//! nvmfd events 1
//! subsystem nqn.2026-11.io.nvmfd:disk1
//! event 4 65535 1795271415000 302e312e302020..
//! crc32 5f3a9c01
//! ```
//!
//! An event has its kind, controller (65535 for none), milliseconds since 1970 by the clock of the
//! daemon's machine, and the data as in the log. The oldest is first. The timestamps that hosts set
//! (Timestamp feature) are those of their controllers and differ; the log has one order and one clock.
//!
//! Source: NVMe Base Specification 2.0, "Persistent Event Log (Log Identifier 0Dh)".

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex};

use nvme::feature::Timestamp;
use nvme::log::{LogId, Smart};
use nvme::persistent_event::{
    ChangeNamespace, EventHeader, EventType, FormatCompletion, FormatStart, PersistentEventHeader,
    PowerOnOrReset, TimestampChange,
};
use nvme::{Nqn, Status, Text};
use nvmfd_blockdev::lock;

use crate::subsystem::power::Power;
use nvmfd_blockdev::record::Record;

/// PELS: the maximum size of the log, in units of 64 KiB.
pub(crate) const PELS_64K: u32 = 1;

/// Controller id in events of the subsystem itself.
pub const NO_CONTROLLER: u16 = u16::MAX;

/// The supported events, the maximum of each, and the length of their data.
const KINDS: [(EventType, usize, usize); 6] = [
    (EventType::SMART_SNAPSHOT, 24, Smart::BYTES),
    (EventType::TIMESTAMP_CHANGE, 64, TimestampChange::BYTES),
    (EventType::POWER_ON_OR_RESET, 48, PowerOnOrReset::BYTES),
    (EventType::CHANGE_NAMESPACE, 64, ChangeNamespace::BYTES),
    (EventType::FORMAT_START, 64, FormatStart::BYTES),
    (EventType::FORMAT_COMPLETION, 64, FormatCompletion::BYTES),
];

/// An event of the Persistent Event log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PersistentEvent<'a> {
    /// The subsystem is served from now on, or a controller is reset by its host.
    PowerOnOrReset {
        /// The firmware.
        firmware: Text<8>,
        /// The controller; [`NO_CONTROLLER`] for the subsystem.
        cntlid: u16,
    },
    /// The present SMART log.
    Smart(&'a Smart),
    /// A host has set the timestamp of this controller.
    TimestampChange(u16, TimestampChange),
    /// A host has made a namespace, or deleted one, by this controller.
    ChangeNamespace(u16, ChangeNamespace),
    /// A host has begun to format a namespace.
    FormatStart(u16, FormatStart),
    /// A format has ended.
    FormatCompletion {
        /// The controller.
        cntlid: u16,
        /// The namespace of the command.
        nsid: u32,
        /// Status of the command.
        status: Status,
    },
}

/// Subsystem fields of the log's header.
#[derive(Clone, Copy, Debug)]
pub struct LogHeader {
    /// Its name.
    pub nqn: Nqn,
    /// Serial number.
    pub serial: Text<20>,
    /// Model number.
    pub model: Text<40>,
}

/// The events of one subsystem. Locked when there is an event and when the log is read, never on
/// I/O.
#[derive(Debug)]
pub struct PersistentEventLog {
    subsystem: Nqn,
    events: Mutex<Events>,
    /// Wakes the thread that writes the file.
    wake: SyncSender<()>,
}

#[derive(Debug, Default)]
struct Events {
    /// The oldest first.
    all: VecDeque<LogEntry>,
    generation: u16,
    /// The file is not up to date.
    unsaved: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct LogEntry {
    kind: EventType,
    cntlid: u16,
    unix_ms: u64,
    data: Vec<u8>,
}

impl PersistentEventLog {
    /// With the saved events, unless they are of another subsystem. Each further event notifies
    /// `wake`.
    pub fn new(
        subsystem: Nqn,
        saved: Option<SavedEvents>,
        wake: SyncSender<()>,
    ) -> PersistentEventLog {
        let own = saved.filter(|saved| saved.subsystem == subsystem);
        let all = own.map_or_else(VecDeque::new, |saved| saved.events);
        PersistentEventLog {
            subsystem,
            events: Mutex::new(Events { all, ..Events::default() }),
            wake,
        }
    }

    /// The subsystem.
    pub fn subsystem(&self) -> &Nqn {
        &self.subsystem
    }

    /// Adds an event. The file is written soon, except for a Timestamp Change: every Linux host
    /// sets the timestamp when it connects, and a connect is no reason to write a file. It is
    /// written with the next other event, at the next interval, or at the end.
    pub fn note(&self, happening: PersistentEvent<'_>, power: &Power) {
        let (kind, cntlid, data) = describe(happening, power);
        let is_urgent = kind != EventType::TIMESTAMP_CHANGE;
        let mut events = lock(&self.events);
        events.push(LogEntry { kind, cntlid, unix_ms: power.unix_ms, data });
        events.unsaved = true;
        drop(events);
        if is_urgent {
            // A thread that was already notified will find this as well.
            let _ = self.wake.try_send(());
        }
    }

    /// The log for a reporting context: header and events, the newest first.
    pub fn report(&self, about: &LogHeader, power: &Power) -> Arc<[u8]> {
        let mut events = lock(&self.events);
        events.generation = events.generation.wrapping_add(1);
        let mut page = vec![0; PersistentEventHeader::BYTES];
        events.all.iter().rev().for_each(|event| event.emit(&mut page));
        let mut supported = [0; 32];
        for (kind, ..) in KINDS {
            supported[usize::from(kind.0 / 8)] |= 1 << (kind.0 % 8);
        }
        let header = PersistentEventHeader {
            lid: LogId::PERSISTENT_EVENT,
            events: events.all.len() as u32,
            total_bytes: page.len() as u64,
            revision: 2,
            header_bytes: PersistentEventHeader::REST_BYTES,
            timestamp: Timestamp::new(power.unix_ms),
            power_on_hours: power.on_hours.into(),
            power_cycles: power.cycles,
            sn: about.serial,
            mn: about.model,
            subnqn: about.nqn.into(),
            generation: events.generation,
            supported,
            ..PersistentEventHeader::default()
        };
        page[..PersistentEventHeader::BYTES].copy_from_slice(&header.emit());
        page.into()
    }

    /// Saves it, if there were events since the last time.
    ///
    /// # Errors
    /// The error of `save`. It is not saved then.
    pub fn save<E>(&self, save: impl FnOnce(&SavedEvents) -> Result<(), E>) -> Result<(), E> {
        let saved = {
            let mut events = lock(&self.events);
            if !std::mem::take(&mut events.unsaved) {
                return Ok(());
            }
            SavedEvents { subsystem: self.subsystem, events: events.all.clone() }
        };
        save(&saved).inspect_err(|_| lock(&self.events).unsaved = true)
    }
}

impl Events {
    /// Adds an event; if there are too many of its kind, the oldest is removed.
    fn push(&mut self, event: LogEntry) {
        let Some((_, most, _)) = KINDS.iter().find(|(kind, ..)| *kind == event.kind) else {
            return;
        };
        let alike = |other: &LogEntry| other.is_like(&event);
        if self.all.iter().filter(|other| alike(other)).count() >= *most
            && let Some(oldest) = self.all.iter().position(alike)
        {
            self.all.remove(oldest);
        }
        self.all.push_back(event);
    }
}

impl LogEntry {
    /// Whether one may push out the other: resets, of which hosts can make many, no starts.
    fn is_like(&self, other: &LogEntry) -> bool {
        let of_subsystem = |event: &LogEntry| event.cntlid == NO_CONTROLLER;
        self.kind == other.kind && of_subsystem(self) == of_subsystem(other)
    }

    fn emit(&self, page: &mut Vec<u8>) {
        let header = EventHeader {
            kind: self.kind,
            revision: 1,
            header_bytes: EventHeader::REST_BYTES,
            cntlid: self.cntlid,
            timestamp: Timestamp::new(self.unix_ms),
            event_bytes: self.data.len() as u16,
            ..EventHeader::default()
        };
        page.extend(header.emit());
        page.extend(&self.data);
    }
}

/// The maximum of all kinds fits: twice the starts and resets.
const _: () = {
    let mut bytes = PersistentEventHeader::BYTES;
    let mut i = 0;
    while i < KINDS.len() {
        let (_, most, data_bytes) = KINDS[i];
        bytes += 2 * most * (EventHeader::BYTES + data_bytes);
        i += 1;
    }
    assert!(bytes <= (PELS_64K as usize) << 16);
};

fn describe(happening: PersistentEvent<'_>, power: &Power) -> (EventType, u16, Vec<u8>) {
    match happening {
        PersistentEvent::PowerOnOrReset { firmware, cntlid } => {
            let data = PowerOnOrReset {
                firmware,
                cntlid,
                power_cycles: power.cycles.try_into().unwrap_or(u32::MAX),
                power_on_ms: power.on_ms,
                timestamp: Timestamp::new(power.unix_ms),
                ..PowerOnOrReset::default()
            };
            (EventType::POWER_ON_OR_RESET, cntlid, data.emit().to_vec())
        }
        PersistentEvent::Smart(smart) => {
            (EventType::SMART_SNAPSHOT, NO_CONTROLLER, smart.emit().to_vec())
        }
        PersistentEvent::TimestampChange(cntlid, data) => {
            (EventType::TIMESTAMP_CHANGE, cntlid, data.emit().to_vec())
        }
        PersistentEvent::ChangeNamespace(cntlid, data) => {
            (EventType::CHANGE_NAMESPACE, cntlid, data.emit().to_vec())
        }
        PersistentEvent::FormatStart(cntlid, data) => {
            (EventType::FORMAT_START, cntlid, data.emit().to_vec())
        }
        PersistentEvent::FormatCompletion { cntlid, nsid, status } => {
            // Failed, and so not complete.
            let outcome = if status.is_success() { 0 } else { 0b11 };
            let status = u32::from(status.field() >> 1);
            let data = FormatCompletion { nsid, outcome, status, ..FormatCompletion::default() };
            (EventType::FORMAT_COMPLETION, cntlid, data.emit().to_vec())
        }
    }
}

/// Contents of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedEvents {
    subsystem: Nqn,
    events: VecDeque<LogEntry>,
}

impl Record for SavedEvents {
    const KIND: &'static str = "events";
    const REMEDY: &'static str = "remove it";

    fn emit(&self) -> String {
        let mut text = format!("subsystem {}\n", self.subsystem);
        for LogEntry { kind, cntlid, unix_ms, data } in &self.events {
            // Writing to a string does not fail.
            let _ = write!(text, "event {} {cntlid} {unix_ms} ", kind.0);
            for byte in data {
                let _ = write!(text, "{byte:02x}");
            }
            text.push('\n');
        }
        text
    }

    fn parse(body: &str) -> Option<SavedEvents> {
        let mut lines = body.lines();
        let subsystem = lines.next()?.strip_prefix("subsystem ")?.parse().ok()?;
        let mut events = Events::default();
        for line in lines {
            let mut words = line.strip_prefix("event ")?.splitn(4, ' ');
            let kind = EventType(words.next()?.parse().ok()?);
            let (cntlid, unix_ms) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            let data = digits(words.next()?)?;
            let known = KINDS.iter().any(|(k, _, bytes)| *k == kind && *bytes == data.len());
            known.then(|| events.push(LogEntry { kind, cntlid, unix_ms, data }))?;
        }
        Some(SavedEvents { subsystem, events: events.all })
    }
}

fn digits(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    let bytes = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?));
    rest.is_empty().then(|| bytes.collect())?
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, sync_channel};

    use crate::subsystem::event_log::*;
    use nvmfd_blockdev::record::{seal, unseal};

    fn nqn() -> Nqn {
        "nqn.2026-11.io.nvmfd:history".parse().unwrap()
    }

    fn about() -> LogHeader {
        LogHeader { nqn: nqn(), serial: Text::lossy("S"), model: Text::lossy("M") }
    }

    fn opened(saved: Option<SavedEvents>) -> (PersistentEventLog, Receiver<()>) {
        let (wake, woken) = sync_channel(1);
        (PersistentEventLog::new(nqn(), saved, wake), woken)
    }

    /// The saved contents, as read again.
    fn saved(log: &PersistentEventLog) -> Option<SavedEvents> {
        let mut text = None;
        log.save(|saved| {
            text = Some(seal(saved));
            Ok::<(), ()>(())
        })
        .unwrap();
        text.map(|text| unseal(text.as_bytes()).unwrap())
    }

    fn power(unix_ms: u64) -> Power {
        Power { cycles: 7, on_hours: 5, on_ms: 42, unix_ms, ..Power::default() }
    }

    fn reset(cntlid: u16) -> PersistentEvent<'static> {
        PersistentEvent::PowerOnOrReset { firmware: Text::lossy("1.2.3"), cntlid }
    }

    /// Kind, controller, time and data of an event.
    type Told = (EventType, u16, u64, Vec<u8>);

    /// Reads a log as nvme-cli does.
    fn walk(page: &[u8]) -> (PersistentEventHeader, Vec<Told>) {
        let (header, mut rest) = page.split_first_chunk().unwrap();
        let header = PersistentEventHeader::parse(header);
        assert_eq!(header.total_bytes, page.len() as u64);
        let mut events = Vec::new();
        while !rest.is_empty() {
            let event = EventHeader::parse(rest.first_chunk().unwrap());
            let (_, behind) = rest.split_at(usize::from(event.header_bytes) + 3);
            let (data, next) = behind.split_at(event.event_bytes.into());
            assert_eq!((event.revision, event.vendor_bytes), (1, 0));
            assert_eq!(
                header.supported[usize::from(event.kind.0 / 8)] >> (event.kind.0 % 8) & 1,
                1,
                "{}",
                event.kind
            );
            events.push((event.kind, event.cntlid, event.timestamp.ms(), data.to_vec()));
            rest = next;
        }
        assert_eq!(header.events as usize, events.len());
        (header, events)
    }

    #[test]
    fn events_are_reported_newest_first_and_survive_restarts() {
        let (history, woken) = opened(None);
        history.note(reset(NO_CONTROLLER), &power(1000));
        history
            .note(PersistentEvent::Smart(&Smart { busy_min: 3, ..Smart::default() }), &power(1001));
        let start = FormatStart { nsid: 2, fna: 8, cdw10: 0x200 };
        history.note(PersistentEvent::FormatStart(4, start), &power(2000));
        let status = Status::WRITE_FAULT;
        history
            .note(PersistentEvent::FormatCompletion { cntlid: 4, nsid: 2, status }, &power(3000));
        assert_eq!((woken.try_recv(), woken.try_recv().is_err()), (Ok(()), true), "rung once");

        let first = history.report(&about(), &power(4000));
        let (header, events) = walk(&first);
        assert_eq!((header.lid.0, header.revision, header.generation), (0x0D, 2, 1));
        assert_eq!(
            (header.power_cycles, header.power_on_hours, header.timestamp.ms()),
            (7, 5, 4000)
        );
        assert_eq!(
            (header.sn, header.mn, header.subnqn.nqn()),
            (about().serial, about().model, Ok(nqn()))
        );
        assert_eq!((header.vid, header.context, header.supported[0]), (0, 0, 0b1101_1010));
        assert_eq!(header.supported[1], 1);
        let told: Vec<_> =
            events.iter().map(|(kind, cntlid, at, _)| (kind.0, *cntlid, *at)).collect();
        assert_eq!(told, [(8, 4, 3000), (7, 4, 2000), (1, 0xFFFF, 1001), (4, 0xFFFF, 1000)]);
        let completion = FormatCompletion::parse(events[0].3.first_chunk().unwrap());
        assert_eq!((completion.nsid, completion.outcome), (2, 3));
        assert_eq!(completion.status, u32::from(status.code()));
        assert_eq!(FormatStart::parse(events[1].3.first_chunk().unwrap()), start);
        assert_eq!(Smart::parse(events[2].3.first_chunk().unwrap()).busy_min, 3);
        let begin = PowerOnOrReset::parse(events[3].3.first_chunk().unwrap());
        assert_eq!((begin.cntlid, begin.power_cycles, begin.power_on_ms), (0xFFFF, 7, 42));
        assert_eq!((begin.firmware, begin.timestamp.ms()), (Text::lossy("1.2.3"), 1000));

        let (again, _woken) = opened(saved(&history));
        let found = again.report(&about(), &power(4000));
        assert!(found == first, "the same after a restart");
        assert_eq!(walk(&again.report(&about(), &power(4000))).0.generation, 2);
    }

    #[test]
    fn a_timestamp_change_is_saved_without_a_wakeup() {
        let (history, woken) = opened(None);
        let change = TimestampChange { previous: Timestamp::new(77), since_reset_ms: 5 };
        history.note(PersistentEvent::TimestampChange(9, change), &power(1));
        assert!(woken.try_recv().is_err());
        let (again, _woken) = opened(saved(&history));
        assert_eq!(walk(&again.report(&about(), &power(2))).1.len(), 1, "at the next interval");
        history.note(reset(9), &power(2));
        assert_eq!(woken.try_recv(), Ok(()));
    }

    #[test]
    fn event_types_do_not_evict_each_other_and_the_log_is_bounded() {
        let (history, _woken) = opened(None);
        history.note(reset(NO_CONTROLLER), &power(1));
        let start = FormatStart { nsid: 1, fna: 8, cdw10: 0 };
        history.note(PersistentEvent::FormatStart(1, start), &power(2));
        for at in 0..500 {
            history.note(reset(9), &power(1000 + at));
        }
        let change = TimestampChange { previous: Timestamp::new(77), since_reset_ms: 5 };
        for at in 0..100 {
            history.note(PersistentEvent::TimestampChange(9, change), &power(2000 + at));
        }
        let page = history.report(&about(), &power(9999));
        let (_, mut events) = walk(&page);
        let changes: Vec<_> = events.drain(..64).collect();
        assert!(changes.iter().all(|e| (e.0, e.1) == (EventType::TIMESTAMP_CHANGE, 9)));
        assert_eq!((changes[0].2, changes[63].2), (2099, 2036));
        assert_eq!(TimestampChange::parse(changes[0].3.first_chunk().unwrap()), change);
        let of = |kind, cntlid| events.iter().filter(|e| (e.0, e.1) == (kind, cntlid)).count();
        assert_eq!(of(EventType::POWER_ON_OR_RESET, 9), 48);
        assert_eq!(of(EventType::POWER_ON_OR_RESET, NO_CONTROLLER), 1);
        assert_eq!(of(EventType::FORMAT_START, 1), 1);
        assert_eq!((events[0].2, events[47].2), (1499, 1452), "the newest have stayed");
        for _ in 0..200 {
            history.note(PersistentEvent::Smart(&Smart::default()), &power(1));
            history.note(reset(NO_CONTROLLER), &power(1));
            history.note(PersistentEvent::FormatStart(1, start), &power(1));
            let done =
                PersistentEvent::FormatCompletion { cntlid: 1, nsid: 1, status: Status::SUCCESS };
            history.note(done, &power(1));
        }
        assert!(history.report(&about(), &power(1)).len() <= (PELS_64K as usize) << 16);
        assert_eq!(
            walk(&opened(saved(&history)).0.report(&about(), &power(1))).1.len(),
            24 + 96 + 128 + 64
        );
    }
}
