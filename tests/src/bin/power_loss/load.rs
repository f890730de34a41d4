//! The load: stamped writes over an association, some with Force Unit Access, and flushes between
//! them. The guarantee of each completion is recorded as soon as it has arrived.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use initiator::rng::Random;
use initiator::verify::block_stamp::Stamp;
use initiator::{Data, Done, Error, Host, Request};
use nvme::{IoOpcode, Sqe};

use crate::acks::{Extent, Writer};
use crate::oracle::BLOCK_BYTES;

/// Largest write in blocks.
const BLOCKS_LIMIT: u64 = 8;

/// Range and pattern of the writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Namespace.
    pub(crate) nsid: u32,
    /// Number of blocks used.
    pub(crate) blocks: u64,
    /// Total number of writes.
    pub(crate) writes: u64,
    /// Commands outstanding.
    pub(crate) depth: usize,
    /// Percentage of writes with Force Unit Access.
    pub(crate) fua: u8,
    /// Number of writes between flushes.
    pub(crate) flush_every: u64,
    /// Run number in the stamps.
    pub(crate) run: u64,
}

enum Flight {
    Write {
        extent: Extent,
        fua: bool,
    },
    /// Writes that had completed when it was sent.
    Flush(Vec<Extent>),
}

struct Load<'a> {
    plan: Plan,
    host: &'a mut Host,
    acks: &'a Writer,
    random: &'a mut Random,
    sequence: u64,
    tag: u64,
    busy: BTreeSet<u64>,
    flights: BTreeMap<u64, Flight>,
    /// Completed, and not yet durable.
    answered: Vec<Extent>,
    unflushed: u64,
}

/// Writes, and returns the number of flushes.
///
/// # Errors
/// A command failed, or its guarantee cannot be recorded.
pub(crate) fn run(
    plan: Plan,
    host: &mut Host,
    acks: &Writer,
    random: &mut Random,
) -> Result<u64, Error> {
    let (sequence, tag, unflushed) = (0, 0, 0);
    let (busy, flights, answered) = (BTreeSet::new(), BTreeMap::new(), Vec::new());
    let mut load =
        Load { plan, host, acks, random, sequence, tag, busy, flights, answered, unflushed };
    let mut flushes = 0;
    loop {
        while load.flights.len() < plan.depth && load.sequence < plan.writes {
            if load.unflushed >= plan.flush_every {
                load.flush()?;
                flushes += 1;
            } else {
                load.write()?;
            }
        }
        if load.flights.is_empty() {
            if load.answered.is_empty() {
                return Ok(flushes);
            }
            load.flush()?;
            flushes += 1;
        }
        load.host.wait(Instant::now() + Duration::from_secs(1));
        while let Some(done) = load.host.next_done() {
            load.done(done)?;
        }
        if let Some(ended) = load.host.session().ended() {
            return Err(Error::Ended(ended.clone()));
        }
    }
}

impl Load<'_> {
    fn write(&mut self) -> Result<(), Error> {
        let blocks = 1 + self.random.below(BLOCKS_LIMIT);
        let lba = self.random.below(self.plan.blocks - blocks);
        if self.busy.range(lba..lba + blocks).next().is_some() {
            return Ok(()); // two writes of one block at once have no order
        }
        self.sequence += 1;
        self.unflushed += 1;
        self.busy.extend(lba..lba + blocks);
        let len = blocks as usize * BLOCK_BYTES;
        let Some(mut buf) = self.host.pool().take_data(len as u32) else {
            return Err(Error::Local("the pool is too small".into()));
        };
        for (lba, block) in
            (lba..).zip(self.host.pool().bytes_mut(&mut buf).chunks_exact_mut(BLOCK_BYTES))
        {
            let (run, sequence) = (self.plan.run, self.sequence);
            Stamp { run, sequence, lba, client: 0, generation: 1 }.fill(block);
        }
        let fua = self.random.percent(self.plan.fua);
        let sqe = Sqe::io(IoOpcode::WRITE, self.plan.nsid);
        let sqe = sqe.with_range(lba, (blocks - 1) as u16).with_fua(fua);
        let extent = Extent { lba, blocks: blocks as u32, sequence: self.sequence };
        self.send(sqe, Data::Buf(buf), Flight::Write { extent, fua })
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.unflushed = 0;
        let answered = std::mem::take(&mut self.answered);
        let sqe = Sqe::io(IoOpcode::FLUSH, self.plan.nsid);
        self.send(sqe, Data::None, Flight::Flush(answered))
    }

    fn send(&mut self, sqe: Sqe, data: Data, flight: Flight) -> Result<(), Error> {
        self.tag += 1;
        let queues = u64::from(self.host.session().io_queues());
        let queue = 1 + self.random.below(queues) as u16;
        let sent = self.host.submit(queue, Request { sqe, data, tag: self.tag });
        sent.map_err(|(_, why)| Error::Local(why.to_string()))?;
        self.flights.insert(self.tag, flight);
        Ok(())
    }

    fn done(&mut self, done: Done) -> Result<(), Error> {
        if let Data::Buf(buf) = done.data {
            self.host.pool().give(buf);
        }
        let answer = done.outcome.map_err(|_| Error::Local("a command was lost".into()))?;
        if !answer.status.is_success() {
            return Err(Error::Status { what: "a command of the load", status: answer.status });
        }
        match self.flights.remove(&done.tag) {
            None => return Err(Error::Local("an answer to no command".into())),
            Some(Flight::Flush(promised)) => self.promised(&promised)?,
            Some(Flight::Write { extent, fua }) => {
                for lba in extent.lba..extent.lba + u64::from(extent.blocks) {
                    self.busy.remove(&lba);
                }
                match fua {
                    true => self.promised(&[extent])?,
                    false => self.answered.push(extent),
                }
            }
        }
        Ok(())
    }

    fn promised(&mut self, extents: &[Extent]) -> Result<(), Error> {
        let written = self.acks.extents(extents);
        written.map_err(|error| Error::Local(format!("the acknowledgements: {error}")))
    }
}

/// Replaces files in a directory of a file system, one after the other, durably: written beside,
/// synced, renamed, and the directory synced.
///
/// # Errors
/// The error of the system.
pub(crate) fn files(
    directory: &Path,
    count: u64,
    run: u64,
    acks: &Writer,
    random: &mut Random,
) -> std::io::Result<()> {
    for sequence in 1..=count {
        let number = random.below(32);
        let blocks = 1 + random.below(16);
        let mut bytes = vec![0; blocks as usize * BLOCK_BYTES];
        for block in bytes.chunks_exact_mut(BLOCK_BYTES) {
            Stamp { run, sequence, lba: number, client: 0, generation: 1 }.fill(block);
        }
        let new = directory.join("new");
        let mut file = File::create(&new)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&new, directory.join(format!("file{number}")))?;
        File::open(directory)?.sync_all()?;
        acks.extents(&[Extent { lba: number, blocks: 1, sequence }])?;
    }
    Ok(())
}
