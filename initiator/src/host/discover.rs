//! Discovery: reads the log page consistently (one generation).

use nvme::log::{DiscoveryEntry, DiscoveryHeader, GetLogPage, LogId};

use super::{Error, Host, HostOptions};
use crate::session::Options;

/// Maximum number of records that are read: a discovery service with more is faulty or malicious.
const MOST_RECORDS: u64 = 1 << 14;
/// Number of attempts to read a log that changes while it is read.
const ATTEMPTS: u32 = 10;

/// Contents of a Discovery log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Discovery {
    /// Generation of the log.
    pub genctr: u64,
    /// Its records, in order.
    pub records: Vec<DiscoveryEntry>,
}

impl Host {
    /// Gets the Discovery log of the discovery service at `options.to`, and disconnects.
    ///
    /// # Errors
    /// The reason of the failure.
    pub fn discover(options: Options, setup: HostOptions) -> Result<Discovery, Error> {
        let mut host = Host::connect(options, setup)?;
        let found = host.discovery_log();
        host.disconnect();
        found
    }

    /// Returns the Discovery log page of the controller, which must be a discovery controller.
    ///
    /// # Errors
    /// The status, the end of the association, or a log that is invalid.
    pub fn discovery_log(&mut self) -> Result<Discovery, Error> {
        for _ in 0..ATTEMPTS {
            let before = self.discovery_header()?;
            if before.recfmt != 0 {
                return Err(Error::Local("the discovery log has an unknown format".into()));
            }
            if before.numrec > MOST_RECORDS {
                let many = before.numrec;
                return Err(Error::Local(format!("the discovery log claims {many} records")));
            }
            let len = before.numrec as usize * DiscoveryEntry::BYTES;
            let page = GetLogPage::new(LogId::DISCOVERY, DiscoveryHeader::BYTES as u64, 1);
            let bytes = self.log(page, len)?;
            let after = self.discovery_header()?;
            if (after.genctr, after.numrec) == (before.genctr, before.numrec) {
                let records = bytes.as_chunks().0.iter().map(DiscoveryEntry::parse).collect();
                return Ok(Discovery { genctr: after.genctr, records });
            }
        }
        Err(Error::Local("the discovery log changes faster than it can be read".into()))
    }

    fn discovery_header(&mut self) -> Result<DiscoveryHeader, Error> {
        let page = GetLogPage { rae: false, ..GetLogPage::new(LogId::DISCOVERY, 0, 1) };
        let bytes = self.log(page, DiscoveryHeader::BYTES)?;
        let header = bytes.first_chunk().map(DiscoveryHeader::parse);
        header.ok_or_else(|| Error::Local("the discovery log is too short".into()))
    }
}
