//! Completions: of devices, of work that no device reports, and their way into a batch.

use crate::verbs::Verbs;
use crate::verbs::device::Device;
use crate::verbs::work_requests::Flight;
use crate::{Completion, Event, Fault, Qp, ReceivedWith, Tag, Work};

/// The fault of a work request. What fails on a connection that was closed only follows from that,
/// whatever the code: `rdma_rxe` of Linux 6.1 has an "operation error" for work of a queue pair that
/// was stopped.
fn reported(fault: Fault, is_closing: bool) -> Fault {
    if is_closing { Fault::Flushed } else { fault }
}

impl Verbs {
    /// A work request has completed: removes it, and its own registration if it has one.
    pub(super) fn complete(
        &mut self,
        id: u64,
        outcome: Result<u32, Fault>,
        with: ReceivedWith,
    ) -> Option<Completion> {
        let Some(Flight { qp, tag, work, sink }) = self.flights.take(id) else {
            // Left over from a queue pair that had to be destroyed.
            tracing::debug!(id, "stale completion");
            return None;
        };
        drop(sink);
        let (mut died, mut is_closing) = (false, false);
        let connection = self.connections.get_mut(qp.0 as usize).and_then(Option::as_mut);
        if let Some(connection) = connection {
            is_closing = connection.is_closing();
            if let Some(capture) = &mut connection.capture {
                capture.completed(id, &work, outcome, with, &self.region);
            }
            match work {
                Work::Recv(_) => connection.receives -= 1,
                _ => connection.sends -= 1,
            }
            died = outcome.is_err() && !connection.dead;
        }
        if died {
            self.stop_queue_pair(qp);
        }
        let outcome = outcome.map_err(|fault| reported(fault, is_closing));
        let outcome = match &work {
            Work::Recv(buf) => outcome.map(|len| len.min(buf.len())),
            other => outcome.map(|_| other.buf().len()),
        };
        Some(Completion { qp, tag, work, outcome, with })
    }

    /// The completion queue of sends has reported a work request. Sends and Writes complete in
    /// order, and not each is reported: those before it on their queue pair have completed, too.
    /// What the batch has no room for is returned by the next poll.
    pub(super) fn complete_in_order(
        &mut self,
        id: u64,
        outcome: Result<u32, Fault>,
        end: usize,
        batch: &mut Vec<Event>,
    ) {
        let work = self.flights.get(id).map(|flight| (flight.qp, &flight.work));
        if let Some((qp, work)) = work
            && !matches!(work, Work::Read { .. })
        {
            while let Some(earlier) = self.next_posted(qp).filter(|earlier| *earlier != id) {
                let completion = self.complete(earlier, Ok(0), ReceivedWith::Nothing);
                self.report(completion, end, batch);
            }
        }
        let completion = self.complete(id, outcome, ReceivedWith::Nothing);
        self.report(completion, end, batch);
    }

    pub(super) fn next_posted(&mut self, qp: Qp) -> Option<u64> {
        let connection = self.connections.get_mut(qp.0 as usize)?.as_mut()?;
        self.flights.next(&mut connection.posted).map(|(id, _)| id)
    }

    pub(super) fn report(
        &mut self,
        completion: Option<Completion>,
        end: usize,
        batch: &mut Vec<Event>,
    ) {
        match completion {
            Some(completion) if batch.len() < end => batch.push(Event::Done(completion)),
            Some(completion) => self.defer(completion),
            None => {}
        }
    }

    /// As `complete`, for work that no completion queue reports.
    pub(super) fn complete_unreported(&mut self, id: u64, outcome: Result<u32, Fault>) {
        if let Some(completion) = self.complete(id, outcome, ReceivedWith::Nothing) {
            self.defer(completion);
        }
    }

    /// Queues a completion for the next poll.
    pub(super) fn defer(&mut self, completion: Completion) {
        if let Some(connection) = self.connection(completion.qp) {
            connection.deferred += 1;
        }
        self.ready.push_back(Event::Done(completion));
    }

    pub(super) fn poll_devices(&mut self, end: usize, batch: &mut Vec<Event>) {
        for index in 0..self.devices.len() {
            while batch.len() < end {
                let Some(attached) = self.devices.get(index) else { return };
                let most = end - batch.len();
                // Completions of sends first: a message that follows the response to its
                // predecessor then finds its slot free.
                let Device { sent, received, .. } = &*attached.device;
                let (of_sends, polled) = match sent.poll(&mut self.completions, most) {
                    Ok(0) => (false, received.poll(&mut self.completions, most)),
                    other => (true, other),
                };
                let got = match polled {
                    Ok(0) => break,
                    Ok(got) => {
                        self.devices[index].announced = true;
                        got
                    }
                    Err(_) => {
                        let key = attached.device.key();
                        self.device_lost(key, "its completions cannot be read");
                        break;
                    }
                };
                for entry in 0..got {
                    let (id, outcome) = self.completions.get(entry);
                    if of_sends {
                        self.complete_in_order(id, outcome, end, batch);
                    } else {
                        let with = self.completions.received_with(entry);
                        batch.extend(self.complete(id, outcome, with).map(Event::Done));
                    }
                }
            }
        }
        // The device that filled the batch is polled last the next time.
        if batch.len() >= end && self.devices.len() > 1 {
            self.devices.rotate_left(1);
        }
    }

    pub(super) fn deliver(&mut self, end: usize, batch: &mut Vec<Event>) {
        while batch.len() < end {
            let Some(event) = self.ready.pop_front() else { return };
            match &event {
                Event::Gone(qp, _) => self.departed.push(*qp),
                Event::Done(done) => {
                    if let Some(connection) = self.connection(done.qp) {
                        connection.deferred = connection.deferred.saturating_sub(1);
                    }
                }
                Event::Incoming(_) | Event::Established(_) | Event::ListenerLost(_) => {}
            }
            batch.push(event);
        }
    }

    /// Fails work that was not even added to the table. (Work for a handle whose `Gone` was
    /// returned can only complete after it.)
    pub(super) fn refuse(&mut self, qp: Qp, tag: Tag, work: Work, fault: Fault) {
        self.defer(Completion::new(qp, tag, work, Err(fault)));
    }
}

#[cfg(test)]
mod tests {
    use crate::verbs::completions::*;

    #[test]
    fn work_that_fails_after_its_connection_was_closed_is_flushed() {
        for fault in [Fault::Local(2), Fault::Unreachable, Fault::Flushed] {
            assert_eq!(reported(fault, true), Fault::Flushed);
            assert_eq!(reported(fault, false), fault);
        }
    }
}
