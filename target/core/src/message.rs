//! The channel of a reactor: a bounded message queue, and an eventfd that wakes it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};
use rdma::{FabricError, Incoming};

use crate::auth::DhResult;
use crate::sched::abort::AbortToken;
use crate::sched::{Adoption, DrainBarrier, RequestPlace, Waker};
use crate::stats::in_flight::InFlight;
use crate::subsystem::Subsystem;
use nvmfd_blockdev::monitor::Rings;
use nvmfd_blockdev::{BackingDevice, DeviceId, IoCompletion};

/// Letters that may wait. A sender of the control plane waits for room; a reactor never waits.
const CAPACITY: usize = 1024;

/// A connection request, and its place on the reactor that serves it.
#[derive(Debug)]
pub struct PlacedRequest {
    /// The request.
    pub incoming: Incoming,
    /// Its place.
    pub place: RequestPlace,
}

/// A message to a reactor.
#[derive(Debug)]
pub enum Message {
    /// A connection request that another reactor received and this one shall serve.
    Incoming(PlacedRequest),
    /// A backing store to serve from now on; the sender receives whether the ring attached it.
    Attach(DeviceId, Arc<BackingDevice>, SyncSender<io::Result<()>>),
    /// A backing store that no namespace uses any more.
    Detach(DeviceId),
    /// A new or changed subsystem.
    Subsystem(Arc<Subsystem>, Arc<Adoption>),
    /// The discovery log has changed.
    DiscoveryChanged,
    /// Result of a reservation command.
    Answer(IoCompletion),
    /// Commands of preempted hosts shall end.
    Fence(Arc<DrainBarrier>),
    /// A host requests that a command is aborted.
    Errand(AbortToken),
    /// The arithmetic of an authentication is done.
    Authenticated {
        /// The queue that it is for.
        key: u32,
        /// The number of the task: the queue may have become another one.
        ticket: u64,
        /// Result of the computation.
        worked: DhResult,
    },
    /// Describe the commands in progress.
    InFlight(SyncSender<Vec<InFlight>>),
    /// Confirm that all earlier messages were processed.
    Caught(SyncSender<()>),
    /// Accept connections at an address.
    Listen(std::net::SocketAddr, SyncSender<Result<(), FabricError>>),
    /// Stop accepting connections at an address.
    Unlisten(std::net::SocketAddr),
    /// Disconnect everything, then end.
    Stop,
}

/// The sending end: cheap to clone, for any thread.
#[derive(Clone, Debug)]
pub struct Sender {
    messages: SyncSender<Message>,
    eventfd: Arc<EventFd>,
}

impl Sender {
    /// Sends, waiting for room. For the control plane. False when the reactor has ended.
    pub fn send(&self, message: Message) -> bool {
        let sent = self.messages.send(message).is_ok();
        self.ring();
        sent
    }

    /// Sends if there is room. For reactors. Returns the message otherwise.
    ///
    /// # Errors
    /// The message, if the channel is full or its reactor has ended.
    pub fn try_send(&self, message: Message) -> Result<(), Message> {
        let result = self.messages.try_send(message).map_err(|e| match e {
            std::sync::mpsc::TrySendError::Full(message)
            | std::sync::mpsc::TrySendError::Disconnected(message) => message,
        });
        self.ring();
        result
    }

    /// Wakes the reactor without a message: shared state has changed.
    pub fn ring(&self) {
        self.eventfd.wake();
    }

    /// Wakes the reactor without a message.
    pub fn waker(&self) -> Arc<dyn Waker> {
        Arc::clone(&self.eventfd) as Arc<dyn Waker>
    }
}

impl Waker for EventFd {
    fn wake(&self) {
        // The counter cannot overflow in practice, and a full one wakes just as well.
        let _ = self.write(1);
    }
}

/// Whether reactors have read everything that was sent before. A completion that must not contradict
/// what was published waits for it.
#[derive(Debug)]
pub struct MessageBarrier(Vec<(usize, Receiver<()>)>);

impl MessageBarrier {
    /// Sends the question to these reactors, waiting for room.
    #[must_use]
    pub fn send(reactors: &[Sender]) -> MessageBarrier {
        let asked = |(index, reactor): (usize, &Sender)| {
            let (answer, answered) = sync_channel(1);
            reactor.send(Message::Caught(answer)).then_some((index, answered))
        };
        MessageBarrier(reactors.iter().enumerate().filter_map(asked).collect())
    }

    /// Whether all reactors have passed it or have ended.
    pub fn is_passed(&self) -> bool {
        self.0.iter().all(|(_, answered)| answered.try_recv() != Err(TryRecvError::Empty))
    }

    /// Blocks until all reactors have, for each at most for `patience`. The numbers of those that do
    /// not answer.
    #[must_use]
    pub fn wait(self, patience: Duration) -> Vec<usize> {
        let silent = |(_, answered): &(usize, Receiver<()>)| {
            answered.recv_timeout(patience) == Err(RecvTimeoutError::Timeout)
        };
        self.0.into_iter().filter(silent).map(|(index, _)| index).collect()
    }
}

/// The mailboxes of all reactors, whose rings have every store.
#[derive(Clone, Debug)]
pub struct ReactorRings(pub Vec<Sender>);

impl Rings for ReactorRings {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn attach(
        &self,
        ring: usize,
        id: DeviceId,
        backing: &Arc<BackingDevice>,
    ) -> Receiver<io::Result<()>> {
        let (answer, answered) = sync_channel(1);
        self.0[ring].send(Message::Attach(id, Arc::clone(backing), answer));
        answered
    }

    fn wake(&self) {
        self.0.iter().for_each(Sender::ring);
    }
}

/// The receiving end, owned by the reactor.
#[derive(Debug)]
pub struct Mailbox {
    messages: Receiver<Message>,
    eventfd: Arc<EventFd>,
}

impl Mailbox {
    /// Readable after a wake-up.
    pub fn fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }

    /// Clears the wake-up; before messages are read, so that none is missed. Returns whether there
    /// was one.
    pub fn hush(&self) -> bool {
        self.eventfd.read().is_ok()
    }

    /// The next message.
    pub fn take(&self) -> Option<Message> {
        self.messages.try_recv().ok()
    }
}

/// A mailbox and its first sender.
///
/// # Errors
/// No eventfd to be had.
pub fn mailbox() -> io::Result<(Sender, Mailbox)> {
    let (messages, inbox) = sync_channel(CAPACITY);
    let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
    let eventfd = Arc::new(EventFd::from_value_and_flags(0, flags)?);
    Ok((Sender { messages, eventfd: Arc::clone(&eventfd) }, Mailbox { messages: inbox, eventfd }))
}
