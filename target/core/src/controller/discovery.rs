//! The Discovery log: subsystems and addresses that this host may connect to.
//!
//! Source: NVMe Base Specification 2.0, "Discovery Log Page (Log Identifier 70h)"; NVMe RDMA
//! Transport Specification 1.0, "Transport Specific Address Subtype".

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;

use nvme::log::{
    AddressFamily, DiscoveryEntry, DiscoveryHeader, EntryFlags, RdmaCms, RdmaProvider, RdmaQpType,
    TransportType, Treq,
};
use nvme::{Nqn, Text};

/// Kind of the subsystem of a record ("Discovery Log Page Entry", SUBTYPE).
pub use nvme::log::SubsystemType as Subtype;

/// Entries of an admin queue that every host may count on.
const ADMIN_QUEUE_ENTRIES: u16 = 32;

/// Controller id of a subsystem that makes a controller for each association.
const DYNAMIC_CONTROLLER: u16 = 0xFFFF;

/// One way to reach one subsystem.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Kind of subsystem: an NVM subsystem, or this discovery subsystem.
    pub subtype: Subtype,
    /// Its name.
    pub nqn: Nqn,
    /// Its address, never a wildcard, for which the address that the host used is inserted.
    pub address: SocketAddr,
    /// The listener, as a number of our own choice.
    pub port_id: u16,
}

impl Record {
    /// The record as the log has it ("Discovery Log Page Entry").
    fn entry(&self) -> DiscoveryEntry {
        // A dual-stack socket names an IPv4 peer ::ffff:a.b.c.d; the host knows a.b.c.d.
        let ip = self.address.ip().to_canonical();
        // Our discovery controllers support Keep Alive and raise an event on change, so a host may
        // stay connected; nvme-cli does so only if the record has this flag.
        let persistent = self.subtype == Subtype::CURRENT_DISCOVERY;
        DiscoveryEntry {
            trtype: TransportType::RDMA,
            adrfam: if ip.is_ipv4() { AddressFamily::IPV4 } else { AddressFamily::IPV6 },
            subtype: self.subtype,
            // "Not specified" for the secure channel: nvme-cli names no other value with this bit.
            treq: Treq(0).with_sq_flow_control_disable(true),
            portid: self.port_id,
            cntlid: DYNAMIC_CONTROLLER,
            asqsz: ADMIN_QUEUE_ENTRIES,
            eflags: EntryFlags(0).with_persistent(persistent),
            trsvcid: Text::lossy(&self.address.port().to_string()),
            subnqn: self.nqn.into(),
            traddr: Text::lossy(&ip.to_string()),
            rdma_qptype: RdmaQpType::CONNECTED,
            rdma_prtype: RdmaProvider::UNSPECIFIED,
            rdma_cms: RdmaCms::RDMA_CM,
            rdma_pkey: 0,
        }
    }
}

/// State of a discovery controller.
#[derive(Debug)]
pub struct DiscoveryLog {
    /// The name of its subsystem.
    pub nqn: Nqn,
    /// The log as it was when its beginning was last read, so that a host which reads in pieces
    /// never sees two generations mixed.
    snapshot: Vec<u8>,
    /// Its generation.
    generation: Option<u64>,
    /// Digest of the records that its host knows, or was notified of.
    known: u64,
}

impl DiscoveryLog {
    /// For a host that sees these records.
    pub fn new(nqn: Nqn, records: &[Record]) -> DiscoveryLog {
        DiscoveryLog { nqn, snapshot: Vec::new(), generation: None, known: digest(records) }
    }

    /// The log, for a read from `at` bytes on. A read of its beginning takes a new snapshot, and all
    /// later parts are from that one. `current`: the generation and its records, unless the
    /// generation is the one that it is given. A host may read a few bytes of the beginning as often
    /// as it likes, and there may be thousands of records.
    pub fn log(
        &mut self,
        at: u64,
        current: &dyn Fn(Option<u64>) -> Option<(u64, Vec<Record>)>,
    ) -> &[u8] {
        if (at == 0 || self.generation.is_none())
            && let Some((generation, records)) = current(self.generation)
        {
            self.snapshot = log(generation, &records);
            self.generation = Some(generation);
        }
        &self.snapshot
    }

    /// Called after a change, with the records that the host sees now; returns whether they differ
    /// from those before.
    pub fn is_news(&mut self, records: &[Record]) -> bool {
        let new = digest(records);
        std::mem::replace(&mut self.known, new) != new
    }
}

fn digest(records: &[Record]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for Record { subtype, nqn, address, port_id } in records {
        (subtype.0, nqn.as_bytes(), address, port_id).hash(&mut hasher);
    }
    hasher.finish()
}

/// The whole log, header and records, of one generation ("Discovery Log Page").
fn log(generation: u64, records: &[Record]) -> Vec<u8> {
    let header = DiscoveryHeader { genctr: generation, numrec: records.len() as u64, recfmt: 0 };
    let mut log = Vec::with_capacity((records.len() + 1) * DiscoveryEntry::BYTES);
    log.extend(header.emit());
    for record in records {
        log.extend(record.entry().emit());
    }
    log
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use crate::controller::discovery::*;

    fn record(subtype: Subtype, address: &str) -> Record {
        let nqn = match subtype {
            Subtype::CURRENT_DISCOVERY => Nqn::DISCOVERY,
            _ => "nqn.2026-11.io.nvmfd:a".parse().unwrap(),
        };
        Record { subtype, nqn, address: address.parse().unwrap(), port_id: 3 }
    }

    #[test]
    fn records_follow_the_header() {
        let records = [
            record(Subtype::CURRENT_DISCOVERY, "192.0.2.1:4420"),
            record(Subtype::NVM, "[2001:db8::1]:4421"),
            record(Subtype::NVM, "[::ffff:192.0.2.9]:65535"),
        ];
        let log = log(77, &records);
        let (chunks, rest) = log.as_chunks::<1024>();
        assert_eq!((chunks.len(), rest.len()), (4, 0));
        let header = DiscoveryHeader::parse(&chunks[0]);
        assert_eq!((header.genctr, header.numrec, header.recfmt), (77, 3, 0));
        let expected = [
            (AddressFamily::IPV4, "192.0.2.1", "4420", true),
            (AddressFamily::IPV6, "2001:db8::1", "4421", false),
            (AddressFamily::IPV4, "192.0.2.9", "65535", false),
        ];
        for ((chunk, record), (adrfam, address, port, persistent)) in
            chunks[1..].iter().zip(records).zip(expected)
        {
            let entry = DiscoveryEntry::parse(chunk);
            assert_eq!((entry.trtype, entry.adrfam), (TransportType::RDMA, adrfam));
            assert_eq!((entry.subtype, entry.portid), (record.subtype, 3));
            assert_eq!((entry.treq.0, entry.cntlid, entry.asqsz), (0b100, 0xFFFF, 32));
            assert_eq!(entry.eflags.persistent(), persistent);
            assert_eq!(entry.subnqn.nqn(), Ok(record.nqn));
            assert_eq!(entry.traddr.trimmed(), address.as_bytes());
            assert_eq!(entry.trsvcid.trimmed(), port.as_bytes());
            assert_eq!(chunk[768..771], [1, 1, 1]);
        }
    }

    #[test]
    fn an_empty_discovery_log_is_only_a_header() {
        assert_eq!(log(1, &[]).len(), 1024);
    }

    #[test]
    fn a_change_notifies_only_hosts_whose_records_differ() {
        let (own, disk) = (
            record(Subtype::CURRENT_DISCOVERY, "192.0.2.1:4420"),
            record(Subtype::NVM, "192.0.2.1:4420"),
        );
        let mut service = DiscoveryLog::new(Nqn::DISCOVERY, &[own]);
        assert!(!service.is_news(&[own]));
        assert!(service.is_news(&[own, disk]) && !service.is_news(&[own, disk]));
        assert!(service.is_news(&[own, Record { port_id: 4, ..disk }]));
        assert!(service.is_news(&[own]), "what it saw before is gone");
    }

    #[test]
    fn a_log_read_in_pieces_has_one_generation() {
        let disk = record(Subtype::NVM, "192.0.2.1:4420");
        let mut service = DiscoveryLog::new(Nqn::DISCOVERY, &[]);
        let first = service.log(0, &|_| Some((1, vec![disk; 3]))).to_vec();
        assert_eq!(service.log(1024, &|_| Some((2, Vec::new()))), first);
        assert_eq!(service.log(0, &|_| Some((2, Vec::new()))).len(), 1024, "a new beginning");
    }

    #[test]
    fn a_log_whose_generation_is_current_is_not_made_again() {
        let disk = record(Subtype::NVM, "192.0.2.1:4420");
        let mut service = DiscoveryLog::new(Nqn::DISCOVERY, &[]);
        let (current, made) = (Cell::new(1), Cell::new(0));
        let records = |known| {
            let new = (known != Some(current.get())).then(|| (current.get(), vec![disk; 3]));
            made.set(made.get() + usize::from(new.is_some()));
            new
        };
        for generation in [1, 1, 2, 2, 1] {
            current.set(generation);
            let log = service.log(0, &records);
            assert_eq!((log.len(), u64::from(log[0])), (4096, generation));
        }
        assert_eq!(made.get(), 3);
    }
}
