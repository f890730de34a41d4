//! SO_REUSEPORT groups: one fabric per reactor, each with a socket of its own at every address that any of
//! them listens at or connects from. The kernel delivers each datagram to the socket of its fabric by a
//! program (`soft/udp/sockopt.rs`) that returns the number of a socket in the order of binding. So all
//! sockets of an address are bound together, by the first fabric that needs one, and closed together when
//! no fabric uses them; each fabric takes its own.
//!
//! `soft/udp/port_users.rs` keeps two groups off one address.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::super::config::Options;
use super::super::ipv4_id::Pairs;
use super::port_users::refuse_another;
use super::socket::{Bound, SocketError};
use super::sockopt::Steering;
use crate::zone::scope_id;
use crate::{FabricError, explained};

/// Maximum of bytes received by another fabric that wait to be fetched (plus one train); more are
/// dropped, as the network may drop them.
const MOST_STRAY_BYTES: usize = 1 << 20;

/// State shared by the fabrics of a group.
#[derive(Debug)]
pub(crate) struct Shared {
    options: Options,
    /// Counts the changes of `state`.
    changes: AtomicU64,
    state: Mutex<GroupState>,
    members: Vec<Member>,
    /// State of the identifications of peers' packets.
    pairs: Arc<Pairs>,
}

#[derive(Debug)]
struct Member {
    /// Ends the sleep of this fabric.
    eventfd: EventFd,
    /// `strays` has datagrams that were not fetched.
    called: AtomicBool,
    strays: Mutex<Strays>,
}

/// Datagrams for a fabric that another one has received.
#[derive(Default, Debug)]
struct Strays {
    waiting: VecDeque<Misdelivered>,
    /// Bytes of all queued datagrams.
    bytes: usize,
    /// Unused buffers.
    spare: Vec<Vec<u8>>,
}

/// Consecutive datagrams with the same addresses.
#[derive(Debug)]
pub(super) struct Misdelivered {
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    pub(super) tos: u8,
    pub(super) bytes: Vec<u8>,
    /// Bytes of each datagram; the last one may be shorter.
    pub(super) each: usize,
}

#[derive(Default, Debug)]
struct GroupState {
    listeners: Vec<SocketAddr>,
    addresses: Vec<Address>,
}

/// An address of this group.
#[derive(Debug)]
struct Address {
    ip: IpAddr,
    /// One for each fabric, in the order of binding.
    sockets: Vec<Arc<Bound>>,
    /// Whether each fabric has fetched its socket.
    fetched: Vec<bool>,
    /// Whether each fabric has reported, since the listener was removed, that it needs no socket.
    idle: Vec<bool>,
    /// All that have fetched theirs have reported so.
    closing: bool,
    /// A connection was requested from it: it stays open.
    stays: bool,
}

/// Sockets added to and removed from one fabric.
pub(super) struct GroupChange {
    pub(super) listeners: Vec<SocketAddr>,
    pub(super) sockets: Vec<Arc<Bound>>,
    /// Addresses of its sockets without a listener, and whether it has to return the socket: only
    /// after no fabric uses the address, so that until then all datagrams are answered.
    pub(super) retired: Vec<(IpAddr, bool)>,
}

impl Shared {
    /// State of `count` fabrics (at least one).
    pub(crate) fn new(count: u32, options: Options) -> Result<Shared, FabricError> {
        let member = || -> nix::Result<Member> {
            let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
            let eventfd = EventFd::from_value_and_flags(0, flags)?;
            Ok(Member { eventfd, called: AtomicBool::new(false), strays: Mutex::default() })
        };
        let members: nix::Result<Vec<_>> = (0..count.max(1)).map(|_| member()).collect();
        let members = members.map_err(|e| {
            FabricError(format!("no eventfd for a soft fabric: {}", explained(&e.into())))
        })?;
        let state = Mutex::default();
        let pairs = Arc::new(Pairs::new(count));
        Ok(Shared { options, changes: AtomicU64::new(0), state, members, pairs })
    }

    /// Number of fabrics.
    pub(crate) fn count(&self) -> u32 {
        self.members.len() as u32
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// State of the identifications of peers' packets.
    pub(crate) fn pairs(&self) -> Arc<Pairs> {
        Arc::clone(&self.pairs)
    }

    /// Number of changes, by which a fabric finds out whether it has missed any.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Wakes a sleeping fabric.
    pub(super) fn eventfd(&self, index: u32) -> BorrowedFd<'_> {
        self.members[index as usize].eventfd.as_fd()
    }

    /// Listens at an address with all fabrics.
    pub(super) fn listen(&self, at: SocketAddr) -> Result<(), FabricError> {
        let mut state = self.lock();
        self.open(&mut state, at, false)?;
        if !state.listeners.contains(&at) {
            state.listeners.push(at);
        }
        self.announce();
        Ok(())
    }

    pub(super) fn unlisten(&self, at: SocketAddr) {
        let mut state = self.lock();
        state.listeners.retain(|listener| *listener != at);
        if let Some(address) = state.addresses.iter_mut().find(|address| address.ip == at.ip()) {
            address.keep();
        }
        // A socket that was not fetched would never be returned.
        let GroupState { listeners, addresses } = &mut *state;
        addresses.retain(|address| address.is_wanted(listeners) || address.is_open());
        drop(state);
        self.announce();
    }

    /// Opens an address for outgoing connections.
    pub(super) fn open_source(&self, at: SocketAddr) -> Result<(), FabricError> {
        self.open(&mut self.lock(), at, true)?;
        self.announce();
        Ok(())
    }

    fn open(&self, state: &mut GroupState, at: SocketAddr, stays: bool) -> Result<(), FabricError> {
        let ip = at.ip();
        if let Some(address) = state.addresses.iter_mut().find(|address| address.ip == ip) {
            if let Some(bound) = address.sockets.first().filter(|it| it.scope_id != scope_id(at)) {
                return Err(FabricError(format!(
                    "{ip} is in use with the zone {}: give the interface another address",
                    bound.scope_id
                )));
            }
            address.stays |= stays;
            address.keep();
            return Ok(());
        }
        let address = self.bind(at, stays)?;
        self.report(&address);
        state.addresses.push(address);
        Ok(())
    }

    /// Binds the sockets of an address for the caller only.
    pub(crate) fn reserve(&self, at: SocketAddr) -> Result<impl Sized + use<>, FabricError> {
        self.bind(at, false)
    }

    fn bind(&self, at: SocketAddr, stays: bool) -> Result<Address, FabricError> {
        let ip = at.ip();
        let bind = || -> Result<Address, SocketError> {
            refuse_another(ip, &[])?;
            let steering = Steering::new(self.count());
            let several = self.count() > 1;
            let bound = (0..self.count()).map(|index| {
                let first = (several && index == 0).then_some(&steering);
                Bound::new(at, &self.options, first).map(Arc::new)
            });
            let sockets: Vec<_> = bound.collect::<Result<_, _>>()?;
            refuse_another(ip, &sockets)?;
            let none = vec![false; self.members.len()];
            let (fetched, idle) = (none.clone(), none);
            Ok(Address { ip, sockets, fetched, idle, closing: false, stays })
        };
        bind().map_err(|refusal| FabricError(refusal.sentence(ip)))
    }

    fn report(&self, address: &Address) {
        let Some(buffers) = address.sockets.first().map(|bound| bound.buffers) else { return };
        let (ip, asked) = (address.ip, self.options.receive_buffer_bytes);
        let super::SocketBuffers { receive_bytes, send_bytes, window_bytes, .. } = buffers;
        tracing::info!(address = %ip, receive_bytes, send_bytes, "UDP port 4791 opened");
        if receive_bytes < window_bytes {
            tracing::warn!(
                "the receive buffer of {ip} is {receive_bytes} bytes, one connection may fill \
                 {window_bytes}: packets will be dropped; `sysctl -w net.core.rmem_max={asked}`"
            );
        }
    }

    /// The changes for a fabric that has the sockets of these addresses.
    pub(super) fn news(&self, index: u32, has: impl Fn(IpAddr) -> bool) -> GroupChange {
        let mut state = self.lock();
        let GroupState { listeners, addresses } = &mut *state;
        let mut sockets = Vec::new();
        let mut retired = Vec::new();
        for address in addresses {
            let wanted = address.is_wanted(listeners);
            if has(address.ip) {
                retired.extend((!wanted).then_some((address.ip, address.closing)));
            } else if let (true, Some(socket)) = (wanted, address.sockets.get(index as usize)) {
                address.fetched[index as usize] = true;
                sockets.push(Arc::clone(socket));
            }
        }
        GroupChange { listeners: listeners.clone(), sockets, retired }
    }

    /// A fabric reports that it does not need its socket of an address without a listener.
    pub(super) fn resign(&self, index: u32, ip: IpAddr) {
        let mut state = self.lock();
        let Some(address) = state.addresses.iter_mut().find(|address| address.ip == ip) else {
            return;
        };
        address.idle[index as usize] = true;
        if address.is_idle() {
            address.closing = true;
            self.announce();
        }
    }

    /// Takes back the socket of an address that is being closed; the last one closes all. It is
    /// returned to the fabric when a listener is added again.
    pub(super) fn give_back(&self, index: u32, socket: Arc<Bound>) -> Result<(), Arc<Bound>> {
        let mut state = self.lock();
        let GroupState { listeners, addresses } = &mut *state;
        let of_it = |address: &Address| address.ip == socket.address;
        let Some(at) = addresses.iter().position(of_it) else { return Ok(()) };
        if addresses[at].is_wanted(listeners) {
            return Err(socket);
        }
        drop(socket);
        addresses[at].fetched[index as usize] = false;
        if !addresses[at].is_open() {
            addresses.swap_remove(at);
        }
        Ok(())
    }

    /// Passes datagrams with the same addresses, each of `each` bytes but the last one, to their
    /// fabric. Leaves an empty buffer.
    pub(super) fn forward(
        &self,
        index: u32,
        (from, to, tos): (SocketAddr, SocketAddr, u8),
        each: usize,
        datagrams: &mut Vec<u8>,
    ) {
        let Some(member) = self.members.get(index as usize) else { return };
        let mut strays = member.strays.lock().unwrap_or_else(PoisonError::into_inner);
        if strays.bytes < MOST_STRAY_BYTES {
            strays.bytes += datagrams.len();
            let bytes = std::mem::replace(datagrams, strays.spare.pop().unwrap_or_default());
            strays.waiting.push_back(Misdelivered { from, to, tos, bytes, each });
            if !member.called.swap(true, Ordering::AcqRel) {
                member.ring();
            }
        }
        datagrams.clear();
    }

    /// Whether other fabrics have passed datagrams.
    pub(super) fn is_called(&self, index: u32) -> bool {
        self.members[index as usize].called.load(Ordering::Acquire)
    }

    /// Takes what other fabrics have passed, in order, and reuses the buffers of what was taken
    /// before. All at once: they may pass more while it is processed.
    pub(super) fn take_strays(&self, index: u32, taken: &mut VecDeque<Misdelivered>) {
        let member = &self.members[index as usize];
        let mut strays = member.strays.lock().unwrap_or_else(PoisonError::into_inner);
        strays.spare.extend(taken.drain(..).map(|stray| stray.bytes));
        std::mem::swap(&mut strays.waiting, taken);
        strays.bytes = 0;
        member.called.store(false, Ordering::Release);
    }

    /// Clears the eventfd: before a sleep, and before the last check of its causes.
    pub(super) fn hush(&self, index: u32) {
        if self.members.len() > 1 {
            let _ = self.members[index as usize].eventfd.read();
        }
    }

    /// Notifies the other fabrics of changes.
    fn announce(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        if self.members.len() > 1 {
            self.members.iter().for_each(Member::ring);
        }
    }

    fn lock(&self) -> MutexGuard<'_, GroupState> {
        // A panic leaves no partial change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    fn ring(&self) {
        // It can only fail if it is already signalled.
        let _ = self.eventfd.write(1);
    }
}

impl Address {
    /// Starts to ask again which fabrics need it.
    fn keep(&mut self) {
        self.closing = false;
        self.idle.fill(false);
    }

    /// Whether any fabric has its socket.
    fn is_open(&self) -> bool {
        self.fetched.contains(&true)
    }

    /// Whether all fabrics with a socket have reported that they do not need it. The others, which
    /// slept while there was a listener, report nothing.
    fn is_idle(&self) -> bool {
        self.fetched.iter().zip(&self.idle).all(|(fetched, idle)| *idle || !fetched)
    }

    fn is_wanted(&self, listeners: &[SocketAddr]) -> bool {
        self.stays || listeners.iter().any(|listener| listener.ip() == self.ip)
    }
}
