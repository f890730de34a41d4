//! The connection of a front-end: messages with descriptors, without blocking.

use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::vhost_user::{HEADER_BYTES, Header, Message, REGIONS, Reply, RequestId};

/// Why a connection has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum ChannelError {
    #[error("the front-end has disconnected")]
    Closed,
    #[error("the front-end has sent a message that cannot be understood")]
    Message,
    #[error("the connection to the front-end failed: {0}")]
    Failed(Errno),
}

/// A connection.
pub(super) struct Channel {
    stream: UnixStream,
    /// What there is of a message, and the descriptors that came with it.
    input: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Channel {
    pub(super) fn new(stream: UnixStream) -> std::io::Result<Channel> {
        stream.set_nonblocking(true)?;
        Ok(Channel { stream, input: Vec::new(), descriptors: Vec::new() })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns the next message, if all of it is there. A header and its payload are read
    /// separately, so that descriptors belong to the message which they came with.
    pub(super) fn receive(&mut self) -> Result<Option<(Message, Vec<OwnedFd>)>, ChannelError> {
        loop {
            let header = match self.input.first_chunk::<HEADER_BYTES>() {
                Some(bytes) => Some(Header::parse(bytes).ok_or(ChannelError::Message)?),
                None => None,
            };
            let whole = HEADER_BYTES + header.map_or(0, |header| header.payload_bytes);
            if let Some(header) = header
                && self.input.len() == whole
            {
                let message = Message::parse(header, &self.input[HEADER_BYTES..]);
                self.input.clear();
                let descriptors = std::mem::take(&mut self.descriptors);
                return Ok(Some((message.ok_or(ChannelError::Message)?, descriptors)));
            }
            if !self.fill(whole)? {
                return Ok(None);
            }
        }
    }

    /// Reads up to `whole` bytes. Returns whether any came.
    fn fill(&mut self, whole: usize) -> Result<bool, ChannelError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(REGIONS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let before = self.input.len();
        self.input.resize(whole, 0);
        let slice = &mut [IoSliceMut::new(&mut self.input[before..])];
        let received = recvmsg(&self.stream, slice, &mut control, RecvFlags::CMSG_CLOEXEC);
        self.input.truncate(before + received.as_ref().map_or(0, |message| message.bytes));
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        match received {
            Ok(message) if message.bytes == 0 => Err(ChannelError::Closed),
            Ok(_) if self.descriptors.len() > REGIONS => Err(ChannelError::Message),
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(error) => Err(ChannelError::Failed(error)),
        }
    }

    /// Sends a reply. It fits into the buffer of the socket, because a front-end waits for it before it
    /// sends more.
    pub(super) fn reply(&mut self, request: RequestId, reply: &Reply) -> Result<(), ChannelError> {
        let sent = self.stream.write_all(&reply.emit(request));
        sent.map_err(|error| {
            ChannelError::Failed(Errno::from_io_error(&error).unwrap_or(Errno::IO))
        })
    }
}
