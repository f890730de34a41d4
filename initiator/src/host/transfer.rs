//! Read, write and compare of any number of blocks: split by the limits of the controller, with
//! several commands in flight on all queues.

use nvme::{IoOpcode, Sqe};

use super::{Error, Host};
use crate::session::{Data, Done, Refused, Request, Response};

/// Maximum number of commands of one transfer in flight.
const UNDER_WAY: usize = 32;

/// Blocks of a namespace, starting at one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// The namespace.
    pub nsid: u32,
    /// The first block.
    pub slba: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
}

/// The bytes of the host.
enum Bytes<'a> {
    Into(&'a mut [u8]),
    From(&'a [u8]),
    /// No data are transferred: the size of the blocks in bytes.
    Count(u64),
}

impl Bytes<'_> {
    fn len(&self) -> u64 {
        match self {
            Bytes::Into(bytes) => bytes.len() as u64,
            Bytes::From(bytes) => bytes.len() as u64,
            Bytes::Count(count) => *count,
        }
    }
}

impl Host {
    /// Reads blocks.
    ///
    /// # Errors
    /// The first error status, the end of the association, or a length that is not a multiple
    /// of the block size.
    pub fn read(&mut self, range: Range, into: &mut [u8]) -> Result<(), Error> {
        let sqe = Sqe::io(IoOpcode::READ, range.nsid);
        self.transfer("Read", sqe, range, Bytes::Into(into))
    }

    /// Writes blocks; with `fua` they are on the medium on completion.
    ///
    /// # Errors
    /// As [`Host::read`].
    pub fn write(&mut self, range: Range, from: &[u8], fua: bool) -> Result<(), Error> {
        let sqe = Sqe::io(IoOpcode::WRITE, range.nsid).with_fua(fua);
        self.transfer("Write", sqe, range, Bytes::From(from))
    }

    /// Sends Compare for blocks with these bytes.
    ///
    /// # Errors
    /// As [`Host::read`]; Compare Failure if they differ.
    pub fn compare(&mut self, range: Range, with: &[u8]) -> Result<(), Error> {
        let sqe = Sqe::io(IoOpcode::COMPARE, range.nsid);
        self.transfer("Compare", sqe, range, Bytes::From(with))
    }

    /// Sends Verify: the controller reads blocks without transferring them.
    ///
    /// # Errors
    /// As [`Host::read`]: blocks that cannot be read are an error.
    pub fn verify(&mut self, range: Range, blocks: u64) -> Result<(), Error> {
        let sqe = Sqe::io(IoOpcode::VERIFY, range.nsid);
        let Some(bytes) = blocks.checked_mul(range.block_bytes.into()) else {
            return Err(Error::Local("so many blocks no namespace has".into()));
        };
        self.transfer("Verify", sqe, range, Bytes::Count(bytes))
    }

    /// Makes blocks unreadable until they are written again.
    ///
    /// # Errors
    /// As [`Host::read`]; the target may not allow it.
    pub fn write_uncorrectable(&mut self, range: Range, blocks: u64) -> Result<(), Error> {
        let sqe = Sqe::io(IoOpcode::WRITE_UNCORRECTABLE, range.nsid);
        let Some(bytes) = blocks.checked_mul(range.block_bytes.into()) else {
            return Err(Error::Local("so many blocks no namespace has".into()));
        };
        self.transfer("Write Uncorrectable", sqe, range, Bytes::Count(bytes))
    }

    /// Sends Write Zeroes for blocks; with `deac` the backing store may deallocate them.
    ///
    /// # Errors
    /// As [`Host::read`].
    pub fn write_zeroes(&mut self, range: Range, blocks: u64, deac: bool) -> Result<(), Error> {
        let sqe = Sqe::io(IoOpcode::WRITE_ZEROES, range.nsid).with_deac(deac);
        let Some(bytes) = blocks.checked_mul(range.block_bytes.into()) else {
            return Err(Error::Local("so many blocks no namespace has".into()));
        };
        self.transfer("Write Zeroes", sqe, range, Bytes::Count(bytes))
    }

    /// Maximum number of bytes that one command of [`Host::read`] and similar methods transfers.
    pub fn piece_bytes(&self, block_bytes: u32) -> u32 {
        let most = self.session.max_transfer_bytes().min(self.largest_bytes);
        let most = most.min(block_bytes.saturating_mul(1 << 16));
        (most - most % block_bytes.max(1)).max(block_bytes)
    }

    fn transfer(
        &mut self,
        what: &'static str,
        sqe: Sqe,
        range: Range,
        mut bytes: Bytes<'_>,
    ) -> Result<(), Error> {
        let block = u64::from(range.block_bytes.max(1));
        let total = bytes.len();
        if total == 0 || !total.is_multiple_of(block) {
            let text = format!("{total} bytes are no whole blocks of {block} bytes");
            return Err(Error::Local(text));
        }
        let piece = match bytes {
            // Blocks without data: limited by the field only.
            Bytes::Count(_) => block << 16,
            _ => self.piece_bytes(range.block_bytes).into(),
        };
        let (mut sent, mut done, mut queue) = (0, 0, 0);
        let mut failed = None;
        let pieces = total.div_ceil(piece);
        while done < sent || (sent < pieces && failed.is_none()) {
            let room = sent < pieces && failed.is_none() && (sent - done) < UNDER_WAY as u64;
            if room {
                let at = sent * piece;
                let len = piece.min(total - at);
                let slba = range.slba.wrapping_add(at / block);
                let sqe = sqe.with_range(slba, (len / block - 1) as u16);
                queue = queue % self.session.io_queues().max(1) + 1;
                match self.send_piece(queue, sqe, &bytes, at, len) {
                    Ok(true) => {
                        sent += 1;
                        continue;
                    }
                    // No free slot now: a command has to complete first.
                    Ok(false) if sent > done => {}
                    Ok(false) => failed = Some(Error::Local(Refused::NoBuffer.to_string())),
                    Err(error) => failed = Some(error),
                }
            }
            if sent > done
                && let Some(home) = self.own_done()
            {
                done += 1;
                if let Err(error) = self.take_piece(what, home, piece, &mut bytes) {
                    failed.get_or_insert(error);
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Sends one piece; false if there is no free slot at present.
    fn send_piece(
        &mut self,
        queue: u16,
        sqe: Sqe,
        bytes: &Bytes<'_>,
        at: u64,
        len: u64,
    ) -> Result<bool, Error> {
        let data = match bytes {
            Bytes::Count(_) => Data::None,
            Bytes::Into(_) => match self.pool.take_data(len as u32) {
                Some(buf) => Data::Buf(buf),
                None => return Ok(false),
            },
            Bytes::From(from) => match self.filled(&from[at as usize..][..len as usize]) {
                Ok(buf) => Data::Buf(buf),
                Err(_) => return Ok(false),
            },
        };
        let request = Request { sqe, data, tag: super::OWN_TAGS | at };
        match self.submit(queue, request) {
            Ok(()) => Ok(true),
            Err((back, why)) => {
                self.give_back(back.data);
                match why {
                    Refused::Full | Refused::NoBuffer => Ok(false),
                    why => Err(self.refused(why)),
                }
            }
        }
    }

    /// Returns the next piece that is done.
    fn own_done(&mut self) -> Option<Done> {
        let mut found = None;
        self.drive(None, |host| {
            while found.is_none()
                && let Some(done) = host.session.next_done()
            {
                match done.tag >= super::OWN_TAGS {
                    true => found = Some(done),
                    false => host.others.push_back(done),
                }
            }
            found.is_some()
        });
        found
    }

    fn take_piece(
        &mut self,
        what: &'static str,
        done: Done,
        piece: u64,
        bytes: &mut Bytes<'_>,
    ) -> Result<(), Error> {
        let at = (done.tag & !super::OWN_TAGS) as usize;
        let good = matches!(done.outcome, Ok(Response { status, .. }) if status.is_success());
        if let (Bytes::Into(into), Data::Buf(buf), true) = (bytes, &done.data, good) {
            let end = into.len().min(at + piece as usize);
            into[at..end].copy_from_slice(self.pool.bytes(buf));
        }
        self.give_back(done.data);
        match done.outcome {
            Ok(Response { status, .. }) if status.is_success() => Ok(()),
            Ok(Response { status, .. }) => Err(Error::Status { what, status }),
            Err(_) => Err(self.why()),
        }
    }
}
