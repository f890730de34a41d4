//! Drives clients and the model: submits operations and reports their completions to the model.

use std::ops::Range;
use std::time::{Duration, Instant};

use nvme::Status;
use nvme::sqe::DsmRange;

use super::model::{Change, Model, Op};
use super::violation::Violation;
use super::workload::{Action, Script};
use crate::multipath::{Failure, Operation};
use crate::namespace_host::{BlockCommand, BlockOutcome, NamespaceHost};
use crate::rng::Random;
use crate::{Data, Error, Refused, Session};

/// Maximum number of violations that are reported in full.
const LISTED_MAX: usize = 10;
/// Sleep time of a driver with several clients: it cannot wait for all of them.
const NAP: Duration = Duration::from_micros(200);
/// Interval at which the caller is asked whether to continue.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Relevant capabilities of the namespace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Namespace {
    pub(super) block_bytes: u32,
    /// Completed writes are durable: there is no volatile write cache.
    pub(super) durable: bool,
    /// Deallocated blocks read as zeros.
    pub(super) trims_to_zeros: bool,
}

/// A host, and its outstanding operations.
pub(super) struct Client {
    pub(super) host: NamespaceHost,
    /// The blocks that it uses.
    pub(super) range: Range<u64>,
    flights: Vec<Option<Flight>>,
    free: Vec<u32>,
    /// A command that could not be submitted because the queue was full.
    stuck: Option<(u16, BlockCommand)>,
}

impl Client {
    pub(super) fn new(host: NamespaceHost, range: Range<u64>, depth: u32) -> Client {
        let flights = (0..depth).map(|_| None).collect();
        Client { host, range, flights, free: (0..depth).rev().collect(), stuck: None }
    }

    fn under_way(&self) -> usize {
        self.flights.len() - self.free.len()
    }
}

struct Flight {
    ops: Vec<Op>,
    operation: Operation,
}

/// End of a leg.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum End {
    /// The script, the time or the number of operations is exhausted; or the caller ended it.
    Done,
    /// A block had an invalid content.
    Violation,
    /// The target rejected a command, or an operation of this host failed.
    Refused(Error),
    /// An association has failed. All its operations are lost for the model.
    Lost(Error),
}

/// Returns the more significant of two ends; the first of two equal ones.
fn worse(one: Option<End>, other: Option<End>) -> Option<End> {
    let rank = |end: &Option<End>| match end {
        None => 0,
        Some(End::Done) => 1,
        Some(End::Refused(_)) => 2,
        Some(End::Violation) => 3,
        Some(End::Lost(_)) => 4,
    };
    if rank(&other) > rank(&one) { other } else { one }
}

/// Limits of a leg.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    pub(super) until: Option<Instant>,
    /// Operations of this leg.
    pub(super) ops: Option<u64>,
    /// Number of writes before a flush; 0 for no flushes.
    pub(super) flush_every: u32,
    /// Continue after a violation.
    pub(super) keep_going: bool,
}

/// The model and the results.
pub(super) struct Verifier {
    pub(super) model: Model,
    pub(super) namespace: Namespace,
    pub(super) random: Random,
    /// The first violations.
    pub(super) listed: Vec<Violation>,
    /// Operations submitted.
    pub(super) ops: u64,
    /// Writes since the last flush.
    unflushed: u32,
    /// From then on, no operation of a failed association is executed any more.
    pub(super) settle_at: Option<Instant>,
    /// Commands were rejected because the namespace was being formatted.
    pub(super) formatting: bool,
}

impl Verifier {
    pub(super) fn new(model: Model, namespace: Namespace, random: Random) -> Verifier {
        let listed = Vec::new();
        let (ops, unflushed, settle_at) = (0, 0, None);
        let formatting = false;
        Verifier { model, namespace, random, listed, ops, unflushed, settle_at, formatting }
    }

    /// Runs a script until its end, a limit, or the end by the caller, and until all outstanding
    /// operations are completed. `goes_on` is called ten times a second.
    pub(super) fn leg(
        &mut self,
        clients: &mut [Client],
        script: &mut Script,
        limits: Limits,
        mut goes_on: impl FnMut(&Verifier) -> bool,
    ) -> End {
        let mut end = None;
        let mut looked = Instant::now();
        let last = limits.ops.map(|ops| self.ops.saturating_add(ops));
        let mut turn = 0usize;
        loop {
            let now = Instant::now();
            if now >= looked + LOOK_EVERY {
                looked = now;
                self.settle(now);
                if !goes_on(self) {
                    let _ = end.get_or_insert(End::Done);
                    clients.iter_mut().for_each(|client| client.host.stop_waiting());
                }
            }
            let over = limits.until.is_some_and(|until| now >= until)
                || last.is_some_and(|last| self.ops >= last);
            if over {
                let _ = end.get_or_insert(End::Done);
            }
            let mut busy = false;
            for (n, client) in clients.iter_mut().enumerate() {
                if end.is_none() {
                    end = self.refill(n as u16, client, script, &limits).err();
                }
                let refused = self.retry(client);
                busy |= client.host.turn();
                let answered = self.collect(client, &limits);
                end = [refused, answered].into_iter().fold(end, worse);
            }
            if clients.iter().all(|client| client.under_way() == 0)
                && let Some(end) = end.take()
            {
                return end;
            }
            if !busy {
                turn = (turn + 1) % clients.len();
                let nap = if clients.len() == 1 { LOOK_EVERY } else { NAP };
                clients[turn].host.wait(Instant::now() + nap);
            }
        }
    }

    fn settle(&mut self, now: Instant) {
        if self.settle_at.is_some_and(|at| now >= at) {
            self.settle_at = None;
            self.model.settle();
        }
    }

    /// Uses the free slots of a client, or returns why the leg ends.
    fn refill(
        &mut self,
        n: u16,
        client: &mut Client,
        script: &mut Script,
        limits: &Limits,
    ) -> Result<(), End> {
        while client.stuck.is_none()
            && let Some(&slot) = client.free.last()
        {
            let flush = limits.flush_every > 0 && self.unflushed >= limits.flush_every;
            let action = match flush {
                true => Some(Action::Flush),
                false => script.next(&client.range),
            };
            let Some(action) = action else { return Err(End::Done) };
            if flush {
                self.unflushed = 0;
            }
            let _ = client.free.pop();
            self.ops += 1;
            self.prepare(n, client, slot, action);
            if let Some(refused) = self.retry(client) {
                return Err(refused);
            }
        }
        Ok(())
    }

    /// Announces the operation to the model, and builds the command.
    fn prepare(&mut self, n: u16, client: &mut Client, slot: u32, action: Action) {
        let Namespace { durable, trims_to_zeros, .. } = self.namespace;
        let range = |lbas: &Range<u64>| (lbas.start, (lbas.end - lbas.start) as u32);
        let mut ops = Vec::with_capacity(1);
        let (operation, (slba, blocks), data) = match action {
            Action::Read(lbas) => {
                let (place, bytes) = (range(&lbas), self.bytes(&lbas));
                ops.push(self.model.read(lbas));
                (Operation::Read, place, Some(vec![0xEE; bytes]))
            }
            Action::Write { lbas, fua } => {
                let (place, mut bytes) = (range(&lbas), vec![0; self.bytes(&lbas)]);
                let op = self.model.write(n, lbas, Change::Data, fua || durable);
                self.model.fill(&op, &mut bytes);
                ops.push(op);
                (Operation::Write { fua }, place, Some(bytes))
            }
            Action::Zeros { lbas, deallocate } => {
                let place = range(&lbas);
                ops.push(self.model.write(n, lbas, Change::Zeros, durable));
                (Operation::WriteZeroes { deallocate, fua: false }, place, None)
            }
            Action::Deallocate(all) => {
                let mut bytes = Vec::new();
                for lbas in &all {
                    let (slba, blocks) = range(lbas);
                    bytes.extend(DsmRange { attributes: 0, blocks, slba }.emit());
                    let change = Change::Deallocate { sure: trims_to_zeros };
                    ops.push(self.model.write(n, lbas.clone(), change, durable));
                }
                (Operation::Discard, (0, 0), Some(bytes))
            }
            Action::Flush => {
                ops.push(self.model.flush());
                (Operation::Flush, (0, 0), None)
            }
        };
        if operation.is_change() {
            self.unflushed = self.unflushed.saturating_add(1);
        }
        client.flights[slot as usize] = Some(Flight { ops, operation });
        let data = match data {
            None => Data::None,
            Some(bytes) => match client.host.pool().take_data(bytes.len() as u32) {
                Some(mut buf) => {
                    client.host.pool().bytes_mut(&mut buf).copy_from_slice(&bytes);
                    Data::Buf(buf)
                }
                // The pool has a buffer for every slot, so this does not happen: a request
                // without its data is rejected, and its operations have then failed.
                None => Data::None,
            },
        };
        let queues = client.host.session().map_or(1, Session::io_queues).max(1);
        let queue = 1 + self.random.below(queues.into()) as u16;
        let tag = u64::from(slot);
        client.stuck = Some((queue, BlockCommand { operation, slba, blocks, data, tag }));
    }

    /// Submits the pending command. Returns the reason if that is impossible.
    fn retry(&mut self, client: &mut Client) -> Option<End> {
        let (queue, command) = client.stuck.take()?;
        let (command, why) = client.host.submit(queue, command).err()?;
        if matches!(why, Refused::Full | Refused::NoBuffer) {
            client.stuck = Some((queue, command));
            return None;
        }
        client.host.give_back(command.data);
        self.lose(client, command.tag);
        Some(End::Refused(Error::Local(why.to_string())))
    }

    /// A command was never sent, or never completed.
    fn lose(&mut self, client: &mut Client, tag: u64) {
        let flight = client.flights.get_mut(tag as usize).and_then(Option::take);
        let Some(flight) = flight else { return };
        client.free.push(tag as u32);
        for op in flight.ops {
            self.model.lost(op);
        }
    }

    /// Takes all completions, and reports them to the model. Returns an error, if any.
    fn collect(&mut self, client: &mut Client, limits: &Limits) -> Option<End> {
        let mut bad = None;
        while let Some(BlockOutcome { tag, outcome, data }) = client.host.next_done() {
            if let Err(why @ (Failure::NoPath | Failure::Closed)) = outcome {
                client.host.give_back(data);
                self.lose(client, tag);
                let lost = client.host.ended().unwrap_or_else(|| Error::Local(why.to_string()));
                bad = worse(bad, Some(End::Lost(lost)));
                continue;
            }
            let flight = client.flights.get_mut(tag as usize).and_then(Option::take);
            let Some(Flight { ops, operation }) = flight else {
                client.host.give_back(data);
                continue;
            };
            client.free.push(tag as u32);
            for op in ops {
                match (operation, &data) {
                    _ if outcome.is_err() => self.model.failed(op),
                    (Operation::Read, Data::Buf(buf)) => {
                        let found = self.model.check(op, client.host.pool().bytes(buf));
                        if !found.is_empty() && !limits.keep_going {
                            bad = Some(End::Violation);
                        }
                        let room = LISTED_MAX.saturating_sub(self.listed.len());
                        self.listed.extend(found.into_iter().take(room));
                    }
                    _ => self.model.done(op),
                }
            }
            client.host.give_back(data);
            if let Err(Failure::Status(status)) = outcome {
                self.formatting |= status.is(Status::FORMAT_IN_PROGRESS);
                let refused = End::Refused(Error::Status { what: operation.name(), status });
                let _ = bad.get_or_insert(refused);
            }
        }
        match client.host.ended() {
            Some(ended) => Some(End::Lost(ended)),
            None => bad,
        }
    }

    fn bytes(&self, lbas: &Range<u64>) -> usize {
        ((lbas.end - lbas.start) * u64::from(self.namespace.block_bytes)) as usize
    }
}
