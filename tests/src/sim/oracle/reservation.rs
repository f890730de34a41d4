//! Oracle for reservations: written from the specifications, not from the implementation.
//!
//! Hosts send one request at a time for each namespace, so its outcome is certain. A command that
//! neither began before the last request was answered, nor was outstanding when the next one was
//! sent, saw one state, and must be rejected or not according to that state. Once Preempt and Abort
//! was answered, no command of the preempted host that began before may still change a block.

use std::collections::BTreeMap;

use nvme::Status;
use nvme::reservation::ReservationType;
use rdma::soft::sim::Rng;

use super::blocks::{Moment, Span};
use crate::sim::workload::command::{Kind, Op};
use crate::sim::workload::reservation::Order;

/// A reservation and its registrants.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct State {
    registrants: Vec<bool>,
    /// The type and its holder. All registrants hold types 5 and 6.
    held: Option<(ReservationType, usize)>,
}

/// What is certain about a namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Known {
    All(State),
    /// Only that this host is a registrant.
    Registrant(usize),
    /// A request had no response.
    Nothing,
}

#[derive(Debug)]
struct Model {
    known: Known,
    /// The outstanding request and its host.
    order: Option<(u32, usize, Order)>,
    /// When the last one was answered.
    settled: Moment,
    /// Outstanding changes of a host that was preempted: no request is sent before they have ended,
    /// because they may still arrive, and must be rejected.
    preempted: Vec<u32>,
    /// For each host when its last preemption ended; `MAX` while it is outstanding.
    preempted_at: Vec<Moment>,
}

/// State of the oracle for reservations.
#[derive(Debug)]
pub struct Fencing {
    models: Vec<Model>,
    hosts: usize,
    /// Requests per mille of commands; 0: none.
    chance: u16,
    /// Hosts set Persist Through Power Loss (PTPL) when they register.
    persistent: bool,
    /// Outstanding commands that change blocks: host and blocks.
    open: BTreeMap<u32, (usize, Vec<Span>)>,
}

impl Fencing {
    /// For this number of namespaces and hosts, without reservations.
    pub fn new(spaces: usize, hosts: usize, chance: u16, persistent: bool) -> Fencing {
        let model = || Model {
            known: Known::All(State { registrants: vec![false; hosts], held: None }),
            order: None,
            settled: 0,
            preempted: Vec::new(),
            preempted_at: vec![0; hosts],
        };
        let models = (0..spaces).map(|_| model()).collect();
        Fencing { models, hosts, chance, persistent, open: BTreeMap::new() }
    }

    /// The request that a host sends instead of another command, if any.
    pub fn next_order(&self, space: usize, host: usize, dice: &mut Rng) -> Option<Order> {
        // A host without access changes that, rather than being rejected again and again.
        let chance = self.chance * if self.is_barred(space, host) { 10 } else { 1 };
        if self.chance == 0 || !dice.per_mille(chance) || !self.is_free(space) {
            return None;
        }
        let rtype = ReservationType::ALL[dice.below(6) as usize];
        let state = match &self.models[space].known {
            Known::All(state) => state,
            Known::Registrant(known) if *known == host => return Some(Order::Clear),
            Known::Registrant(_) | Known::Nothing => return Some(Order::Register(self.persistent)),
        };
        if !state.registrants[host] && !dice.per_mille(100) {
            return Some(Order::Register(self.persistent));
        }
        let victim = (host + 1 + dice.below(self.hosts.max(2) as u64 - 1) as usize) % self.hosts;
        let held = state.held.map_or(rtype, |(held, _)| held);
        Some(match dice.below(10) {
            0 => Order::Unregister,
            1..=3 => Order::Acquire(rtype),
            4..=7 if victim != host => Order::Preempt(victim, rtype),
            8 => Order::Release(if dice.per_mille(800) { held } else { rtype }),
            9 if dice.per_mille(300) => Order::Clear,
            _ => Order::Register(self.persistent),
        })
    }

    /// Whether a host should not write, as far as is certain.
    pub fn is_barred(&self, space: usize, host: usize) -> bool {
        match &self.models[space].known {
            Known::All(state) => state.bars(host, true),
            Known::Registrant(_) | Known::Nothing => true,
        }
    }

    /// The request with which host 0 ensures, in the end, that there is no reservation; and whether
    /// there is none left.
    pub fn last_order(&self) -> (Option<(usize, Order)>, bool) {
        let unsure = |model: &Model| match &model.known {
            Known::All(state) if state.held.is_none() => model.order.is_some(),
            _ => true,
        };
        let Some(space) = self.models.iter().position(unsure) else { return (None, true) };
        let order = match &self.models[space].known {
            Known::All(state) if state.registrants[0] => Order::Clear,
            Known::Registrant(0) => Order::Clear,
            _ => Order::Register(self.persistent),
        };
        (self.is_free(space).then_some((space, order)), false)
    }

    /// A command is sent.
    pub fn leaves(&mut self, op: &Op) {
        if let (Some(spans), true) = (op.changes(), self.chance > 0 && !op.is_admin()) {
            self.open.insert(op.id, (op.host, spans.to_vec()));
        }
        if let Kind::Order(order) = op.kind {
            let model = &mut self.models[op.span.space];
            model.order = Some((op.id, op.host, order));
            if let Order::Preempt(victim, _) = order {
                model.preempted_at[victim] = Moment::MAX;
            }
        }
    }

    /// A command has ended: answered, or lost for so long that the target has nothing of it.
    pub fn is_over(&mut self, op: &Op, now: Moment) {
        self.open.remove(&op.id);
        for model in &mut self.models {
            model.preempted.retain(|id| *id != op.id);
        }
        let model = &mut self.models[op.span.space];
        if let Some((id, _, order)) = model.order
            && id == op.id
        {
            (model.order, model.known, model.settled) = (None, Known::Nothing, now);
            if let Order::Preempt(victim, _) = order {
                model.preempted_at[victim] = now;
            }
        }
    }

    /// The target has crashed, and all reservations that are not persistent are lost. Of an outstanding
    /// command either outcome is possible.
    pub fn crash(&mut self, now: Moment) {
        self.open.clear();
        for model in &mut self.models {
            let registrants = vec![false; self.hosts];
            model.known = match (self.persistent, model.order.take()) {
                (true, None) => model.known.clone(),
                (true, Some(_)) => Known::Nothing,
                (false, _) => Known::All(State { registrants, held: None }),
            };
            model.settled = now;
            model.preempted.clear();
            for at in &mut model.preempted_at {
                *at = (*at).min(now);
            }
        }
    }

    /// A request was answered. Returns the changes that have happened by now or never will.
    ///
    /// # Errors
    /// The response is invalid.
    pub fn answered(
        &mut self,
        op: &Op,
        status: Status,
        now: Moment,
    ) -> Result<Vec<(u32, Span)>, String> {
        let model = &mut self.models[op.span.space];
        let Some((id, host, order)) = model.order.filter(|(id, ..)| *id == op.id) else {
            // The target has crashed since it was sent.
            return Ok(Vec::new());
        };
        let known = model.known.clone();
        self.is_over(op, now);
        let model = &mut self.models[op.span.space];
        let known = match known {
            Known::All(state) => {
                let mut after = state.clone();
                let expected = after.apply(host, order);
                if !status.is_success() && !is_of_orders(status) {
                    model.known = Known::All(state);
                    return Ok(Vec::new());
                }
                if !status.is(expected) {
                    return Err(format!("it was answered with {status}, for {state:?}"));
                }
                Known::All(if expected.is_success() { after } else { state })
            }
            Known::Registrant(by) if status.is_success() => match order {
                Order::Clear => {
                    Known::All(State { registrants: vec![false; self.hosts], held: None })
                }
                Order::Register(_) => Known::Registrant(host),
                _ => Known::Registrant(by),
            },
            _ if status.is_success() && matches!(order, Order::Register(_)) => {
                Known::Registrant(host)
            }
            // That one always succeeds.
            other if matches!(order, Order::Register(_) | Order::Clear) => {
                match is_of_orders(status) {
                    true => return Err(format!("it was answered with {status}, for {other:?}")),
                    false => other,
                }
            }
            other => other,
        };
        model.known = known;
        let Order::Preempt(victim, _) = order else { return Ok(Vec::new()) };
        let Known::All(state) = &model.known else { return Ok(Vec::new()) };
        if !status.is_success() || !state.bars(victim, true) {
            return Ok(Vec::new());
        }
        let of_victim = self.open.iter().filter(|(_, (host, _))| *host == victim);
        let spans = of_victim.flat_map(|(id, (_, spans))| spans.iter().map(|span| (*id, *span)));
        let ended: Vec<_> = spans.filter(|(_, span)| span.space == op.span.space).collect();
        debug_assert!(ended.iter().all(|(other, _)| *other != id));
        model.preempted = ended.iter().map(|(id, _)| *id).collect();
        Ok(ended)
    }

    /// Whether reservations permit this response to a command on blocks.
    pub fn check(&self, op: &Op, status: Status) -> Result<(), String> {
        let host = op.host;
        let writes = match op.kind {
            Kind::Read | Kind::Compare(_) => false,
            Kind::Flush => true,
            _ if op.changes().is_some() => true,
            _ => return Ok(()),
        };
        let model = &self.models[op.span.space];
        let refused = status.is(Status::RESERVATION_CONFLICT);
        if status.is(Status::ABORTED_PREEMPT) {
            return match model.preempted_at[host] >= op.began {
                true => Ok(()),
                false => Err("it was aborted, and nobody has preempted its host".to_owned()),
            };
        }
        let (Known::All(state), None) = (&model.known, model.order) else { return Ok(()) };
        if model.settled >= op.began {
            return Ok(());
        }
        match (state.bars(host, writes), refused, status.is_success()) {
            (true, _, true) => Err(format!("it was carried out, but must not be: {state:?}")),
            (false, true, _) => Err(format!("it was refused, but must not be: {state:?}")),
            _ => Ok(()),
        }
    }

    /// Whether reservations may explain a failed command.
    pub fn excuses(&self, status: Status) -> bool {
        let of_reservations = [Status::RESERVATION_CONFLICT, Status::ABORTED_PREEMPT];
        self.chance > 0 && of_reservations.iter().any(|of| status.is(*of))
    }

    fn is_free(&self, space: usize) -> bool {
        let model = &self.models[space];
        model.order.is_none() && model.preempted.is_empty()
    }
}

/// Statuses of failed reservation commands.
fn is_of_orders(status: Status) -> bool {
    status.is(Status::RESERVATION_CONFLICT) || status.is(Status::INVALID_FIELD)
}

impl State {
    fn is_held_by(&self, host: usize) -> bool {
        match self.held {
            Some((rtype, holder)) => {
                holder == host || (rtype.is_held_by_all() && self.registrants[host])
            }
            None => false,
        }
    }

    /// Whether a host must not read, or write.
    fn bars(&self, host: usize, writes: bool) -> bool {
        let Some((rtype, holder)) = self.held else { return false };
        let admitted = match rtype.0 {
            1 | 2 => holder == host,
            3 | 4 => holder == host || self.registrants[host],
            _ => self.registrants[host],
        };
        !admitted && (writes || matches!(rtype.0, 2 | 4 | 6))
    }

    /// Applies a request; returns its status.
    fn apply(&mut self, host: usize, order: Order) -> Status {
        if !matches!(order, Order::Register(_)) && !self.registrants[host] {
            return Status::RESERVATION_CONFLICT;
        }
        match order {
            Order::Register(_) => self.registrants[host] = true,
            Order::Unregister => {
                self.registrants[host] = false;
                self.leave(host);
            }
            Order::Acquire(rtype) => match self.held {
                None => self.held = Some((rtype, host)),
                Some((held, _)) if held == rtype && self.is_held_by(host) => {}
                Some(_) => return Status::RESERVATION_CONFLICT,
            },
            Order::Preempt(victim, _) if !self.registrants[victim] => {
                return Status::RESERVATION_CONFLICT;
            }
            Order::Preempt(victim, rtype) => {
                self.registrants[victim] = false;
                if let Some((held, holder)) = self.held
                    && !held.is_held_by_all()
                    && holder == victim
                {
                    self.held = Some((rtype, host));
                }
            }
            Order::Release(_) if !self.is_held_by(host) => {}
            Order::Release(rtype) if self.held.is_some_and(|(held, _)| held == rtype) => {
                self.held = None;
            }
            Order::Release(_) => return Status::INVALID_FIELD,
            Order::Clear => {
                self.registrants.fill(false);
                self.held = None;
            }
        }
        Status::SUCCESS
    }

    /// Unregisters a host: a reservation that it alone held is released.
    fn leave(&mut self, host: usize) {
        let Some((rtype, holder)) = self.held else { return };
        let gone = match rtype.is_held_by_all() {
            true => self.registrants.iter().all(|registrant| !registrant),
            false => holder == host,
        };
        if gone {
            self.held = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::sim::oracle::reservation::*;

    const SPAN: Span = Span { space: 0, lba: 0, blocks: 1 };
    const CONFLICT: Status = Status::RESERVATION_CONFLICT;

    fn op(host: usize, id: u32, began: Moment, kind: Kind) -> Op {
        Op { kind, host, id, span: SPAN, began, half: 0, shift: 0 }
    }

    /// Two hosts. Completes a request with its status.
    fn order(fencing: &mut Fencing, host: usize, at: Moment, order: Order, status: Status) {
        let order = op(host, at as u32, at, Kind::Order(order));
        fencing.leaves(&order);
        fencing.answered(&order, status, at + 1).unwrap();
    }

    #[test]
    fn only_fenced_hosts_must_get_reservation_conflicts() {
        let mut fencing = Fencing::new(1, 2, 10, false);
        let rtype = ReservationType::ALL[0];
        order(&mut fencing, 0, 10, Order::Register(false), Status::SUCCESS);
        order(&mut fencing, 0, 20, Order::Acquire(rtype), Status::SUCCESS);
        let check = |fencing: &Fencing, host, began, status| {
            fencing.check(&op(host, 99, began, Kind::Write { fua: false }), status).is_ok()
        };
        assert!(check(&fencing, 1, 30, CONFLICT) && !check(&fencing, 1, 30, Status::SUCCESS));
        assert!(check(&fencing, 0, 30, Status::SUCCESS) && !check(&fencing, 0, 30, CONFLICT));
        assert!(check(&fencing, 1, 15, Status::SUCCESS), "it may have been there before");
        assert!(fencing.check(&op(1, 99, 30, Kind::Read), Status::SUCCESS).is_ok());
        assert!(!check(&fencing, 1, 30, Status::ABORTED_PREEMPT), "nobody was preempted");
        fencing.leaves(&op(0, 40, 40, Kind::Order(Order::Release(rtype))));
        assert!(check(&fencing, 1, 30, Status::SUCCESS), "an order is under way");
    }

    #[test]
    fn only_persistent_reservations_survive_a_crash() {
        for persistent in [false, true] {
            let mut fencing = Fencing::new(1, 2, 10, persistent);
            order(&mut fencing, 0, 10, Order::Register(persistent), Status::SUCCESS);
            let acquire = Order::Acquire(ReservationType::ALL[0]);
            order(&mut fencing, 0, 20, acquire, Status::SUCCESS);
            fencing.crash(30);
            let write = op(1, 99, 40, Kind::Write { fua: false });
            assert_eq!(fencing.check(&write, Status::SUCCESS).is_err(), persistent);
            assert_eq!(fencing.check(&write, Status::RESERVATION_CONFLICT).is_ok(), persistent);
            // An outstanding command was executed, or not.
            fencing.leaves(&op(0, 50, 50, Kind::Order(Order::Clear)));
            fencing.crash(51);
            let write = op(1, 99, 60, Kind::Write { fua: false });
            assert!(fencing.check(&write, Status::SUCCESS).is_ok());
            assert_eq!(fencing.check(&write, Status::RESERVATION_CONFLICT).is_ok(), persistent);
        }
    }

    #[test]
    fn reservation_commands_of_non_registrants_must_fail() {
        let mut fencing = Fencing::new(1, 2, 10, false);
        let wrong = op(1, 5, 5, Kind::Order(Order::Clear));
        fencing.leaves(&wrong);
        assert!(fencing.answered(&wrong, Status::SUCCESS, 6).is_err(), "it is no registrant");
    }

    #[test]
    fn preempt_ends_pending_writes_of_the_preempted_host() {
        let mut fencing = Fencing::new(1, 2, 10, false);
        let rtype = ReservationType::ALL[0];
        for (host, at) in [(0, 10), (1, 12)] {
            order(&mut fencing, host, at, Order::Register(false), Status::SUCCESS);
        }
        order(&mut fencing, 1, 14, Order::Acquire(rtype), Status::SUCCESS);
        let write = op(1, 50, 50, Kind::Write { fua: false });
        fencing.leaves(&write);
        let preempt = op(0, 60, 60, Kind::Order(Order::Preempt(1, rtype)));
        fencing.leaves(&preempt);
        assert_eq!(fencing.answered(&preempt, Status::SUCCESS, 61), Ok(vec![(50, SPAN)]));
        assert!(fencing.check(&write, Status::ABORTED_PREEMPT).is_ok());
        assert!(!fencing.is_free(0), "nobody lets it in again while the write may still come");
        fencing.is_over(&write, 70);
        assert!(fencing.is_free(0));
    }
}
