//! Retransmission of connection management messages until they are answered, ordered by due time.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::mad::MAD_BYTES;

/// Times that an unanswered message is sent: "at most three replies to an unconfirmed peer", so
/// that nobody can make us flood a third party.
const SENDINGS: u8 = 3;
/// The wait after the first sending; each next one is three times as long.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// The wait after the last sending, before the peer is given up. With those before, it is longer than
/// Linux waits for our reply before it repeats its request: 6.1 s up to 6.1, 4.6 s since. A path that
/// fails for seconds loses all sendings, and our rejection would end what that request continues.
const LAST_WAIT: Duration = Duration::from_secs(6);
/// As [`LAST_WAIT`], in a flood.
const HURRIED_LAST_WAIT: Duration = Duration::from_secs(1);
/// As [`SENDINGS`], for our requests. We have chosen their destination, so they cannot flood a
/// third party. A target that stalls for a second in a flood that fills its socket loses all that
/// arrives meanwhile: so there is one sending more, 2.6 s after the first.
const REQUEST_SENDINGS: u8 = SENDINGS + 1;
const REQUEST_LAST_WAIT: Duration = Duration::from_millis(3200);
/// Longest time that a peer can request by an MRA.
const MOST_PATIENCE: Duration = Duration::from_secs(60);

/// A message that is sent until it is answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retry {
    pub(crate) mad: [u8; MAD_BYTES],
    pub(crate) local: IpAddr,
    pub(crate) remote: IpAddr,
    /// The connection that waits for the answer; none for a disconnect request or a challenge,
    /// whose lack of an answer has no effect.
    pub(crate) slot: Option<u32>,
    due: Instant,
    wait: Duration,
    last_wait: Duration,
    left: u8,
}

impl Retry {
    /// For a message `mad` whose first sending, from `ends.0` to `ends.1`, is done by the caller.
    pub(crate) fn new(
        mad: [u8; MAD_BYTES],
        ends: (IpAddr, IpAddr),
        slot: Option<u32>,
        now: Instant,
    ) -> Retry {
        let (due, left) = (now + FIRST_WAIT, SENDINGS - 1);
        let (wait, last_wait) = (FIRST_WAIT, LAST_WAIT);
        Retry { mad, local: ends.0, remote: ends.1, slot, due, wait, last_wait, left }
    }

    /// For a connection request of the queue pair `slot`.
    pub(crate) fn request(
        mad: [u8; MAD_BYTES],
        ends: (IpAddr, IpAddr),
        slot: u32,
        now: Instant,
    ) -> Retry {
        let left = REQUEST_SENDINGS - 1;
        Retry { last_wait: REQUEST_LAST_WAIT, left, ..Retry::new(mad, ends, Some(slot), now) }
    }

    /// With a shorter wait at the end.
    pub(crate) fn hurried(self) -> Retry {
        Retry { last_wait: HURRIED_LAST_WAIT, ..self }
    }

    /// A probe of a connection that should answer immediately: all sendings within half a second.
    pub(crate) fn question(mad: [u8; MAD_BYTES], ends: (IpAddr, IpAddr), now: Instant) -> Retry {
        let wait = FIRST_WAIT / 2;
        Retry { due: now + wait, wait, ..Retry::new(mad, ends, None, now) }
    }

    /// Called at `due`: returns true if the message is to be sent again, false if it is given up.
    fn again(&mut self, now: Instant) -> bool {
        let again = self.left > 0;
        self.left = self.left.saturating_sub(1);
        self.wait *= 3;
        self.due = now + if self.left == 0 { self.last_wait } else { self.wait };
        again
    }
}

/// Action for a message whose retransmission is due.
#[derive(Debug)]
pub(crate) enum Due {
    /// It is sent again.
    Again(Retry),
    /// It was not answered, and is not sent any more.
    GivenUp(Retry),
}

/// All such messages, by our communication ids.
#[derive(Debug, Default)]
pub(crate) struct CmRetransmitter {
    by_comm: BTreeMap<u32, Retry>,
    order: BTreeSet<(Instant, u32)>,
}

impl CmRetransmitter {
    pub(crate) fn len(&self) -> usize {
        self.by_comm.len()
    }

    /// Adds a message, and replaces an older one of the same connection.
    pub(crate) fn insert(&mut self, comm: u32, retry: Retry) {
        self.remove(comm);
        self.order.insert((retry.due, comm));
        self.by_comm.insert(comm, retry);
    }

    pub(crate) fn remove(&mut self, comm: u32) -> Option<Retry> {
        let retry = self.by_comm.remove(&comm)?;
        self.order.remove(&(retry.due, comm));
        Some(retry)
    }

    pub(crate) fn get(&self, comm: u32) -> Option<&Retry> {
        self.by_comm.get(&comm)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Retry> {
        self.by_comm.values()
    }

    /// Time of the next one.
    #[inline]
    pub(crate) fn next(&self) -> Option<Instant> {
        // Read in every iteration. A set that is empty again has a node, which `first` searches.
        if self.order.is_empty() { None } else { self.order.first().map(|(due, _)| *due) }
    }

    pub(crate) fn take_due(&mut self, now: Instant) -> Option<Due> {
        let (_, comm) = self.order.first().copied().filter(|(due, _)| *due <= now)?;
        let mut retry = self.remove(comm)?;
        if !retry.again(now) {
            return Some(Due::GivenUp(retry));
        }
        self.insert(comm, retry);
        Some(Due::Again(retry))
    }

    /// An MRA has arrived: the peer has the message, and needs `time` for its answer.
    pub(crate) fn be_patient(&mut self, comm: u32, now: Instant, time: Duration) {
        if let Some(mut retry) = self.remove(comm) {
            retry.left = 0;
            retry.due = retry.due.max(now + time.min(MOST_PATIENCE));
            self.insert(comm, retry);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::cm::retransmit::*;

    fn retry(now: Instant) -> Retry {
        let address = IpAddr::from([10, 0, 0, 1]);
        Retry::new([0; MAD_BYTES], (address, address), None, now)
    }

    /// Times of sending and of giving up, in milliseconds.
    fn moments(retry: Retry, start: Instant) -> Vec<u128> {
        let mut retries = CmRetransmitter::default();
        retries.insert(5, retry);
        let mut moments = Vec::new();
        while let Some(due) = retries.next() {
            assert!(retries.take_due(due - Duration::from_nanos(1)).is_none());
            moments.push((due - start).as_millis());
            match retries.take_due(due) {
                Some(Due::Again(_)) => {}
                Some(Due::GivenUp(_)) => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((retries.len(), retries.next()), (0, None));
        moments
    }

    #[test]
    fn cm_messages_are_sent_three_times_before_giving_up() {
        let start = Instant::now();
        assert_eq!(moments(retry(start), start), [200, 800, 6800]);
    }

    #[test]
    fn cm_retries_in_a_flood_give_up_sooner() {
        let start = Instant::now();
        assert_eq!(moments(retry(start).hurried(), start), [200, 800, 1800]);
    }

    #[test]
    fn connection_requests_are_sent_four_times_before_giving_up() {
        let start = Instant::now();
        let address = IpAddr::from([10, 0, 0, 1]);
        let request = Retry::request([0; MAD_BYTES], (address, address), 7, start);
        assert_eq!(moments(request, start), [200, 800, 2600, 5800]);
    }

    #[test]
    fn cm_retries_expire_in_order_and_mra_delay_is_bounded() {
        let start = Instant::now();
        let mut retries = CmRetransmitter::default();
        retries.insert(1, retry(start + Duration::from_millis(2)));
        retries.insert(2, retry(start + Duration::from_millis(1)));
        retries.insert(3, retry(start));
        retries.insert(3, retry(start + Duration::from_millis(3)));
        retries.be_patient(2, start, Duration::from_secs(3600));
        let far = start + Duration::from_secs(1);
        for comm in [1, 3] {
            assert!(matches!(retries.take_due(far), Some(Due::Again(_))));
            assert!(retries.get(comm).is_some_and(|retry| retry.due > far), "{comm} was first");
        }
        assert!(retries.remove(1).is_some() && retries.remove(3).is_some());
        assert_eq!(retries.next(), Some(start + MOST_PATIENCE));
        let far = start + MOST_PATIENCE;
        assert!(matches!(retries.take_due(far), Some(Due::GivenUp(_))));
    }
}
