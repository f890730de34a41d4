//! A namespace by one association, or over several paths: what `nvmf bench` and `nvmf verify` use.
//!
//! By one association a command is sent once, and lost with it. Over paths it waits and is repeated
//! ([`Multipath`](crate::multipath::Multipath)), so that it is lost with the last path only.

use std::time::Instant;

use rdma::{Pool, RemoteRegion};

use crate::multipath::{BlockRequest, Failure, Operation, PathState, RequestOutcome, Unaccepted};
use crate::options::{NamespaceArgs, OptionDefaults, PathArgs};
use crate::path_address::PathAddress;
use crate::session::{Data, Lost, Refused, Request, Response, Session};
use crate::source_addresses::following;
use crate::{Error, Host, HostOptions, MultipathHost, Provider};

/// How a namespace is used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    /// What options that are not given default to.
    pub(crate) usual: OptionDefaults,
    /// The longest data of a command, in bytes.
    pub(crate) piece_bytes: u32,
    /// Commands at once.
    pub(crate) depth: u32,
    /// Data of small writes are sent in the capsule.
    pub(crate) in_capsule: bool,
}

/// Properties of the namespace and its controller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamespaceProperties {
    pub(crate) block_bytes: u32,
    pub(crate) blocks: u64,
    /// Bytes of a command at most.
    pub(crate) max_transfer_bytes: u32,
    pub(crate) has_volatile_cache: bool,
    pub(crate) can_write_zeroes: bool,
    pub(crate) can_discard: bool,
    /// Deallocated blocks read as zeros.
    pub(crate) deallocated_are_zeros: bool,
}

/// A command of the namespace.
#[derive(Debug)]
pub(crate) struct BlockCommand {
    pub(crate) operation: Operation,
    pub(crate) slba: u64,
    pub(crate) blocks: u32,
    /// Those of Read and Write; the ranges of a Discard.
    pub(crate) data: Data,
    pub(crate) tag: u64,
}

/// A command that is done.
#[derive(Debug)]
pub(crate) struct BlockOutcome {
    pub(crate) tag: u64,
    pub(crate) outcome: Result<(), Failure>,
    /// The data of Read and Write.
    pub(crate) data: Data,
}

/// A connected host of one namespace.
pub(crate) enum NamespaceHost {
    Association { host: Box<Host>, nsid: u32 },
    Paths(Box<MultipathHost>),
}

impl NamespaceHost {
    /// Connects host `n` of several, from addresses of its own; over all paths if there are any.
    pub(crate) fn connect(
        args: &NamespaceArgs,
        paths: &PathArgs,
        n: u32,
        usage: Usage,
    ) -> Result<NamespaceHost, Error> {
        let mut args = args.clone();
        args.target.host.host_traddr = following(args.target.host.host_traddr, n)?;
        if paths.paths.is_empty() {
            let (mut session, host) = args.target.resolve(usage.usual)?;
            session.in_capsule = usage.in_capsule;
            let largest_bytes = host.largest_bytes.max(usage.piece_bytes);
            let host = Host::connect(session, HostOptions { largest_bytes, ..host })?;
            return Ok(NamespaceHost::Association { host: host.into(), nsid: args.namespace_id });
        }
        let mut paths = paths.clone();
        for PathAddress { source, .. } in &mut paths.paths {
            *source = following(*source, n)?;
        }
        let mut setup = args.resolve(&paths, usage.usual)?;
        setup.session.in_capsule = usage.in_capsule;
        setup.largest_bytes = setup.largest_bytes.max(usage.piece_bytes);
        setup.multipath.requests = usage.depth;
        let mut host = MultipathHost::new(setup)?;
        host.connect(|| true)?;
        Ok(NamespaceHost::Paths(host.into()))
    }

    /// Returns the properties of the namespace.
    ///
    /// # Errors
    /// There is no such namespace, or no path to it any more.
    pub(crate) fn properties(&mut self) -> Result<NamespaceProperties, Error> {
        let (page, nsid) = match self {
            NamespaceHost::Association { host, nsid } => (host.identify_namespace(*nsid)?, *nsid),
            NamespaceHost::Paths(_) => return self.properties_of_paths().ok_or_else(no_path),
        };
        let none = || Error::Local(format!("there is no namespace {nsid}"));
        let block_bytes = page.block_bytes().filter(|_| page.nsze > 0).ok_or_else(none)?;
        let session = self.session().ok_or_else(none)?;
        let controller = session.controller();
        Ok(NamespaceProperties {
            block_bytes,
            blocks: page.nsze,
            max_transfer_bytes: session.max_transfer_bytes(),
            has_volatile_cache: controller.vwc.present(),
            can_write_zeroes: controller.oncs.write_zeroes(),
            can_discard: controller.oncs.dataset_management(),
            deallocated_are_zeros: page.dlfeat & 7 == 1,
        })
    }

    fn properties_of_paths(&self) -> Option<NamespaceProperties> {
        let NamespaceHost::Paths(host) = self else { return None };
        let namespace = host.multipath().namespace()?;
        let zeroes_bytes = namespace.max_zeroes_blocks.saturating_mul(namespace.block_bytes);
        Some(NamespaceProperties {
            block_bytes: namespace.block_bytes,
            blocks: namespace.blocks,
            max_transfer_bytes: namespace.max_transfer_bytes.min(zeroes_bytes),
            has_volatile_cache: self.session()?.controller().vwc.present(),
            can_write_zeroes: namespace.can_write_zeroes,
            can_discard: namespace.can_discard,
            deallocated_are_zeros: namespace.deallocated_are_zeros,
        })
    }

    /// Returns the association: over paths, that of the first path that is live.
    pub(crate) fn session(&self) -> Option<&Session> {
        match self {
            NamespaceHost::Association { host, .. } => Some(host.session()),
            NamespaceHost::Paths(host) => {
                let paths = host.multipath();
                let live = (0..paths.paths()).find(|n| paths.state(*n) == PathState::Live);
                paths.session(live?)
            }
        }
    }

    pub(crate) fn provider(&self) -> Provider {
        match self {
            NamespaceHost::Association { host, .. } => host.provider(),
            NamespaceHost::Paths(host) => host.provider(),
        }
    }

    pub(crate) fn pool(&mut self) -> &mut Pool {
        match self {
            NamespaceHost::Association { host, .. } => host.pool(),
            NamespaceHost::Paths(host) => host.pool(),
        }
    }

    /// Returns memory with these contents for many commands: exposed once, as far as there is one
    /// association. An exposure ends with its association, so over paths each command has its own.
    ///
    /// # Errors
    /// The pool has no such buffer, or the fabric cannot expose it.
    pub(crate) fn memory(&mut self, contents: &[u8]) -> Result<Data, Error> {
        let len = contents.len() as u32;
        match self {
            NamespaceHost::Association { host, .. } => {
                let mut memory: RemoteRegion = host.expose(len)?;
                host.pool().copy_in(&mut memory, 0, contents);
                Ok(Data::Exposed { memory, at: 0, len })
            }
            NamespaceHost::Paths(host) => {
                let full = || Error::Local(Refused::NoBuffer.to_string());
                let mut buf = host.pool().take_data(len).ok_or_else(full)?;
                host.pool().bytes_mut(&mut buf).copy_from_slice(contents);
                Ok(Data::Buf(buf))
            }
        }
    }

    /// Submits a command, by this queue where there is one association.
    ///
    /// # Errors
    /// The reason; the command is returned.
    pub(crate) fn submit(
        &mut self,
        queue: u16,
        command: BlockCommand,
    ) -> Result<(), (BlockCommand, Refused)> {
        let BlockCommand { operation, slba, blocks, data, tag } = command;
        match self {
            NamespaceHost::Association { host, nsid } => {
                let ranges = if let Data::Buf(buf) = &data { operation.ranges(buf) } else { 1 };
                let sqe = operation.command(*nsid, slba, blocks, ranges, false);
                host.submit(queue, Request { sqe, data, tag }).map_err(|(request, why)| {
                    (BlockCommand { operation, slba, blocks, data: request.data, tag }, why)
                })
            }
            NamespaceHost::Paths(host) => {
                let data = match data {
                    Data::Buf(buf) => Some(buf),
                    Data::None => None,
                    Data::Exposed { .. } => {
                        let command = BlockCommand { operation, slba, blocks, data, tag };
                        return Err((command, Refused::Data));
                    }
                };
                let request = BlockRequest { operation, slba, blocks, data, tag };
                host.submit(request).map_err(|(request, why)| {
                    let data = request.data.map_or(Data::None, Data::Buf);
                    let why = match why {
                        Unaccepted::Full => Refused::Full,
                        Unaccepted::NotReady => Refused::NotReady,
                    };
                    (BlockCommand { operation, slba, blocks, data, tag }, why)
                })
            }
        }
    }

    /// Returns the next command that is done. [`Failure::NoPath`]: whether it was executed is unknown.
    pub(crate) fn next_done(&mut self) -> Option<BlockOutcome> {
        match self {
            NamespaceHost::Association { host, .. } => {
                let done = host.next_done()?;
                let outcome = match done.outcome {
                    Ok(Response { status, .. }) => status.ok().map_err(Failure::Status),
                    Err(Lost) => Err(Failure::NoPath),
                };
                Some(BlockOutcome { tag: done.tag, outcome, data: done.data })
            }
            NamespaceHost::Paths(host) => {
                let done = host.next_done()?;
                let data = done.data.map_or(Data::None, Data::Buf);
                Some(BlockOutcome { tag: done.tag, outcome: done.outcome, data })
            }
        }
    }

    /// Takes data back whose command was refused or is done.
    pub(crate) fn give_back(&mut self, data: Data) {
        match (self, data) {
            (_, Data::None) => {}
            (host, Data::Buf(buf)) => host.pool().give(buf),
            (NamespaceHost::Association { host, .. }, Data::Exposed { memory, .. }) => {
                host.revoke(memory);
            }
            // Nothing is exposed over paths.
            (NamespaceHost::Paths(_), Data::Exposed { .. }) => {}
        }
    }

    /// Returns why no command can be carried out any more, if so.
    pub(crate) fn ended(&self) -> Option<Error> {
        match self {
            NamespaceHost::Association { host, .. } => {
                host.session().ended().cloned().map(Error::Ended)
            }
            NamespaceHost::Paths(host) => host.multipath().is_lost().then(no_path),
        }
    }

    /// Returns how often a path was lost, or could not be connected.
    pub(crate) fn path_losses(&self) -> u64 {
        match self {
            NamespaceHost::Association { .. } => 0,
            NamespaceHost::Paths(host) => {
                let paths = host.multipath();
                (0..paths.paths()).map(|n| paths.counters(n).losses).sum()
            }
        }
    }

    /// Ends the wait for a path, if commands wait for one: they fail.
    pub(crate) fn stop_waiting(&mut self) {
        if let NamespaceHost::Paths(host) = self
            && host.multipath().request_outcome(Instant::now()) == RequestOutcome::Wait
        {
            host.close();
        }
    }

    /// As [`Host::poll`].
    pub(crate) fn poll(&mut self) -> bool {
        match self {
            NamespaceHost::Association { host, .. } => host.poll(),
            NamespaceHost::Paths(host) => {
                let any = host.poll();
                while host.next_notice().is_some() {}
                any
            }
        }
    }

    /// As [`Host::ring`].
    pub(crate) fn ring(&mut self) {
        match self {
            NamespaceHost::Association { host, .. } => host.ring(),
            NamespaceHost::Paths(host) => host.flush(),
        }
    }

    /// As [`Host::turn`].
    pub(crate) fn turn(&mut self) -> bool {
        let any = self.poll();
        self.ring();
        any
    }

    /// As [`Host::wait`].
    pub(crate) fn wait(&mut self, until: Instant) {
        match self {
            NamespaceHost::Association { host, .. } => host.wait(until),
            NamespaceHost::Paths(host) => host.wait(until),
        }
    }

    /// Returns an error for the user if another host has formatted the namespace: as
    /// `Host::was_formatted`. Paths report a changed block size themselves, and are reset.
    pub(crate) fn was_formatted(&mut self, block_bytes: u32, refused: bool) -> Option<Error> {
        match self {
            NamespaceHost::Association { host, nsid } => {
                host.was_formatted(*nsid, block_bytes, refused)
            }
            NamespaceHost::Paths(_) => None,
        }
    }

    /// Shuts the controllers down, and waits for that.
    pub(crate) fn disconnect(self) {
        match self {
            NamespaceHost::Association { host, .. } => host.disconnect(),
            NamespaceHost::Paths(mut host) => host.disconnect(),
        }
    }
}

fn no_path() -> Error {
    Error::Local(Failure::NoPath.to_string())
}
