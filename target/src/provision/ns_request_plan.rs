//! Plan of a namespace request with rollback, as a state machine without files, devices and
//! reactors: its driver executes each step and reports the result. The order of the steps makes a
//! request atomic, even if the process is killed or the power fails:
//!
//! * create: announce the file in the record, create it, enter the namespace in the record, open and
//!   serve it;
//! * delete: remove it from the record, stop serving it, remove its file;
//! * attach, detach: change the record, serve accordingly.
//!
//! An image of a cluster is made likewise. It is never removed by a request: one that is being made,
//! or whose namespace was deleted, stays in the record until it is (`provision/ns_images.rs`).
//!
//! The completion is last, after every reactor has the new state.

use std::collections::{BTreeSet, VecDeque};

use nvme::{NSID_ALL, Nqn, Status};
use uuid::Uuid;

use crate::config::ManagedConfig;
use crate::core::subsystem::ns_management::{Entry, HOSTS_MAX};
use crate::core::subsystem::ns_request::{CreateRequest, FAILED, NamespaceRequest};
use crate::state::ns_catalog::{CatalogImage, NamespaceCatalogRecord};

/// A step of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Write this record, so that it survives a power loss. On failure the previous one must stay.
    Keep(Box<NamespaceCatalogRecord>),
    /// Create the file or image of this namespace, which is not published yet.
    Make {
        /// Namespace id.
        nsid: u32,
        /// Its record.
        entry: Entry,
    },
    /// Publish the namespaces of the record. A created one is attached to every ring first; on
    /// failure nothing changes.
    Serve,
    /// Remove the files of these namespaces, so that a power loss does not restore them.
    Remove(BTreeSet<Uuid>),
    /// Remove the other persisted state of these namespaces.
    Forget(Vec<Uuid>),
    /// Wait until every reactor has the published state.
    Await,
    /// Complete the request with the id of the created namespace, or 0, or with an error status.
    /// The last step.
    Answer(Result<u32, Status>),
}

/// Context of a namespace request, besides the record.
#[derive(Clone, Copy)]
pub struct RequestContext<'a> {
    /// The permission and quota.
    pub granted: &'a ManagedConfig,
    /// Ids of configured namespaces.
    pub declared: &'a BTreeSet<u32>,
    /// The highest id.
    pub max_nsid: u32,
    /// Free space of the file system, in bytes.
    pub free_bytes: u64,
    /// An unused UUID.
    pub fresh: Uuid,
    /// Where a new namespace is an image; else it is a file.
    pub image: Option<&'a CatalogImage>,
    /// All controllers, and their hosts.
    pub controllers: &'a [(u16, Nqn)],
    /// Whether this namespace may be deleted, or the error status: called for each namespace before
    /// the first step.
    pub may_go: &'a dyn Fn(u32, &Entry) -> Result<(), Status>,
}

/// A request in progress: the steps that remain.
#[derive(Debug)]
pub struct RequestPlan {
    rest: VecDeque<Planned>,
    /// Steps that replace the rest if the last step failed.
    otherwise: Vec<Planned>,
}

/// A step, and the steps that follow its failure.
#[derive(Clone, Debug)]
struct Planned {
    step: Step,
    otherwise: Vec<Planned>,
}

impl RequestPlan {
    /// Plans a request.
    ///
    /// # Errors
    /// The status of the completion: the request is rejected.
    pub fn new(
        what: &NamespaceRequest,
        record: &NamespaceCatalogRecord,
        situation: &RequestContext<'_>,
    ) -> Result<RequestPlan, Status> {
        let plan = match what {
            NamespaceRequest::Create(new) => create(*new, record, situation)?,
            NamespaceRequest::Delete { nsid } => delete(*nsid, record, situation)?,
            NamespaceRequest::Attach { nsid, cntlids } => {
                change_hosts(*nsid, cntlids, true, record, situation)?
            }
            NamespaceRequest::Detach { nsid, cntlids } => {
                change_hosts(*nsid, cntlids, false, record, situation)?
            }
            // Takes long, and runs without the provisioner's lock: `provision/format_task.rs`.
            NamespaceRequest::Format(_) => return Err(FAILED),
        };
        Ok(RequestPlan { rest: plan.into(), otherwise: Vec::new() })
    }

    /// Completes or reverts unfinished requests.
    pub fn settling(record: &NamespaceCatalogRecord) -> RequestPlan {
        let then = settle(record, vec![answer(Ok(0))], vec![answer(Err(FAILED))]);
        RequestPlan { rest: then.into(), otherwise: Vec::new() }
    }

    /// Returns the next step; `possible`: whether the last one succeeded, true at the beginning.
    pub fn next(&mut self, possible: bool) -> Step {
        let otherwise = std::mem::take(&mut self.otherwise);
        if !possible {
            self.rest = otherwise.into();
        }
        let next = self.rest.pop_front().unwrap_or_else(|| answer(Err(FAILED)));
        self.otherwise = next.otherwise;
        next.step
    }
}

fn create(
    new: CreateRequest,
    record: &NamespaceCatalogRecord,
    situation: &RequestContext<'_>,
) -> Result<Vec<Planned>, Status> {
    let RequestContext { granted, declared, max_nsid, free_bytes, fresh, .. } = *situation;
    // A host must not make and delete images faster than they can be removed.
    let images = record.entries.len() + record.unsettled_images().count();
    if images >= granted.namespaces as usize {
        return Err(Status::NAMESPACE_ID_UNAVAILABLE.with_dnr());
    }
    let left_bytes = granted.quota_bytes.saturating_sub(record.used_bytes());
    if new.bytes > left_bytes.min(free_bytes) {
        return Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr());
    }
    let is_free = |id: &u32| !declared.contains(id) && !record.entries.contains_key(id);
    let nsid = (1..=max_nsid).find(is_free);
    let nsid = nsid.ok_or(Status::NAMESPACE_ID_UNAVAILABLE.with_dnr())?;
    let entry = Entry {
        uuid: fresh,
        bytes: new.bytes,
        block_size_bytes: new.block_size_bytes,
        ana_group: new.ana_group,
        private: new.private,
        hosts: BTreeSet::new(),
    };
    let mut kept = record.clone();
    kept.images.extend(situation.image.map(|image| (fresh, image.clone())));
    let mut announced = kept.clone();
    announced.unsettled.insert(fresh);
    let mut entered = kept;
    entered.entries.insert(nsid, entry.clone());
    let failed = || vec![answer(Err(FAILED))];
    let settled = settle(&announced, failed(), failed());
    let mut put_back =
        vec![Planned { step: Step::Keep(Box::new(announced.clone())), otherwise: failed() }];
    put_back.extend(settled.clone());
    // Of an image, more is known by then.
    let cleared = if situation.image.is_some() { put_back.clone() } else { settled };
    Ok(vec![
        Planned { step: Step::Keep(Box::new(announced)), otherwise: failed() },
        Planned { step: Step::Make { nsid, entry }, otherwise: cleared.clone() },
        Planned { step: Step::Keep(Box::new(entered)), otherwise: cleared },
        Planned { step: Step::Serve, otherwise: put_back },
        surely(Step::Await),
        answer(Ok(nsid)),
    ])
}

fn delete(
    nsid: u32,
    record: &NamespaceCatalogRecord,
    situation: &RequestContext<'_>,
) -> Result<Vec<Planned>, Status> {
    let goes = |id: &u32| nsid == NSID_ALL || *id == nsid;
    let gone: Vec<Uuid> =
        record.entries.iter().filter(|(id, _)| goes(id)).map(|(_, e)| e.uuid).collect();
    if gone.is_empty() && nsid != NSID_ALL {
        return Err(Status::INVALID_NAMESPACE.with_dnr());
    }
    let mut going = record.entries.iter().filter(|(id, _)| goes(id));
    going.try_for_each(|(id, entry)| (situation.may_go)(*id, entry))?;
    let mut struck = record.clone();
    struck.entries.retain(|id, _| !goes(id));
    struck.unsettled.extend(&gone);
    // The namespace no longer exists, even if its file cannot be removed.
    let end = vec![surely(Step::Forget(gone)), surely(Step::Await), answer(Ok(0))];
    let then = settle(&struck, end.clone(), end);
    Ok(changed(record, struck, then))
}

/// Attaches a namespace to the hosts of controllers, or detaches it: all or none.
fn change_hosts(
    nsid: u32,
    cntlids: &[u16],
    attach: bool,
    record: &NamespaceCatalogRecord,
    situation: &RequestContext<'_>,
) -> Result<Vec<Planned>, Status> {
    let live = situation.controllers;
    let host_of = |id: &u16| live.iter().find(|(cntlid, _)| cntlid == id).map(|(_, h)| *h);
    let hosts: Option<BTreeSet<Nqn>> = cntlids.iter().map(host_of).collect();
    let hosts = hosts.ok_or(Status::CONTROLLER_LIST_INVALID.with_dnr())?;
    let mut new = record.clone();
    let entry = new.entries.get_mut(&nsid);
    let entry = entry.ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
    match attach {
        true if !entry.hosts.is_disjoint(&hosts) => {
            return Err(Status::NAMESPACE_ALREADY_ATTACHED.with_dnr());
        }
        true if entry.private && entry.hosts.len() + hosts.len() > 1 => {
            return Err(Status::NAMESPACE_IS_PRIVATE.with_dnr());
        }
        true => entry.hosts.extend(&hosts),
        false if !entry.hosts.is_superset(&hosts) => {
            return Err(Status::NAMESPACE_NOT_ATTACHED.with_dnr());
        }
        false => entry.hosts.retain(|host| !hosts.contains(host)),
    }
    if entry.hosts.len() > HOSTS_MAX {
        return Err(Status::ATTACHMENT_LIMIT_EXCEEDED.with_dnr());
    }
    Ok(changed(record, new, vec![surely(Step::Await), answer(Ok(0))]))
}

/// Writes a record and publishes its namespaces, none of which is new; then executes the rest.
fn changed(
    before: &NamespaceCatalogRecord,
    new: NamespaceCatalogRecord,
    then: Vec<Planned>,
) -> Vec<Planned> {
    let failed = vec![answer(Err(FAILED))];
    let mut put_back =
        vec![Planned { step: Step::Keep(Box::new(before.clone())), otherwise: failed.clone() }];
    put_back.extend(failed.clone());
    let mut plan = vec![
        Planned { step: Step::Keep(Box::new(new)), otherwise: failed },
        Planned { step: Step::Serve, otherwise: put_back },
    ];
    plan.extend(then);
    plan
}

/// Removes files of unfinished requests, and their entries in the record, if there are any. Failures
/// are retried when the catalog is opened, or with the next request.
fn settle(
    record: &NamespaceCatalogRecord,
    then: Vec<Planned>,
    otherwise: Vec<Planned>,
) -> Vec<Planned> {
    let gone = record.unsettled_files();
    if gone.is_empty() {
        return then;
    }
    let mut settled = record.clone();
    settled.unsettled.retain(|uuid| !gone.contains(uuid));
    let mut plan = vec![
        Planned { step: Step::Remove(gone), otherwise: otherwise.clone() },
        Planned { step: Step::Keep(Box::new(settled)), otherwise },
    ];
    plan.extend(then);
    plan
}

/// A step that cannot fail.
fn surely(step: Step) -> Planned {
    Planned { step, otherwise: Vec::new() }
}

fn answer(outcome: Result<u32, Status>) -> Planned {
    surely(Step::Answer(outcome))
}

#[cfg(test)]
mod tests {
    use crate::provision::ns_request_plan::*;
    use crate::state::ns_catalog::tests::{being_made, sample, sample_of_images};

    const NEW: Uuid = Uuid::from_bytes([0x42; 16]);

    /// Simulated directory, open devices and served state.
    #[derive(Clone, Debug)]
    struct Bench {
        kept: NamespaceCatalogRecord,
        image: Option<CatalogImage>,
        files: BTreeSet<Uuid>,
        open: BTreeSet<Uuid>,
        served: NamespaceCatalogRecord,
        quota_bytes: u64,
        namespaces: u32,
    }

    impl Bench {
        fn new() -> Bench {
            Bench::of(sample(), None)
        }

        fn of(kept: NamespaceCatalogRecord, image: Option<CatalogImage>) -> Bench {
            let served = kept.clone();
            let open: BTreeSet<Uuid> = kept.entries.values().map(|entry| entry.uuid).collect();
            let files = open.iter().chain(&kept.unsettled).copied().collect();
            // The unsettled image counts.
            let limit = if kept.images.is_empty() { 3 } else { 4 };
            let (quota_bytes, namespaces) = (limit << 20, limit as u32);
            Bench { kept, image, files, open, served, quota_bytes, namespaces }
        }

        fn plan(&self, what: &NamespaceRequest) -> Result<RequestPlan, Status> {
            let host = |n: u8| format!("nqn.2026-11.io.nvmfd:host{n}").parse().unwrap();
            let granted = ManagedConfig {
                directory: "/m".into(),
                pool: None,
                cluster: Default::default(),
                quota_bytes: self.quota_bytes,
                namespaces: self.namespaces,
                any_host: true,
                hosts: BTreeSet::new(),
            };
            let situation = RequestContext {
                granted: &granted,
                declared: &[1].into(),
                max_nsid: 8,
                free_bytes: 1 << 30,
                fresh: NEW,
                image: self.image.as_ref(),
                controllers: &[(1, host(1)), (3, host(3))],
                may_go: &|_, _| Ok(()),
            };
            RequestPlan::new(what, &self.kept, &situation)
        }

        fn take(&mut self, step: Step) {
            match step {
                Step::Keep(record) => self.kept = *record,
                Step::Make { entry, .. } => {
                    assert!(self.kept.unsettled.contains(&entry.uuid), "it was announced");
                    self.files.insert(entry.uuid);
                }
                Step::Serve => {
                    self.served = self.kept.clone();
                    let served = self.uuids();
                    assert!(served.is_subset(&self.files), "what is served has a file");
                    self.open = served;
                }
                Step::Remove(uuids) => {
                    assert!(uuids.is_disjoint(&self.open), "nobody uses it");
                    self.files.retain(|uuid| !uuids.contains(uuid));
                }
                Step::Forget(_) | Step::Await | Step::Answer(_) => {}
            }
        }

        fn uuids(&self) -> BTreeSet<Uuid> {
            self.kept.entries.values().map(|entry| entry.uuid).collect()
        }

        /// Simulates a restart.
        fn restart(&mut self) {
            self.open = self.uuids();
            let mut settling = RequestPlan::settling(&self.kept);
            loop {
                match settling.next(true) {
                    Step::Answer(outcome) => break assert_eq!(outcome, Ok(0)),
                    step => self.take(step),
                }
            }
            assert_eq!((&self.files, self.kept.unsettled.len()), (&self.uuids(), 0));
        }
    }

    fn orders() -> Vec<NamespaceRequest> {
        let new =
            CreateRequest { bytes: 1 << 20, block_size_bytes: 512, ana_group: 1, private: false };
        vec![
            NamespaceRequest::Create(new),
            NamespaceRequest::Delete { nsid: 7 },
            NamespaceRequest::Delete { nsid: NSID_ALL },
            NamespaceRequest::Attach { nsid: 7, cntlids: vec![3] },
            NamespaceRequest::Detach { nsid: 7, cntlids: vec![1] },
        ]
    }

    /// Executes all steps, of which the one of this number fails.
    fn run(
        what: &NamespaceRequest,
        bench: &mut Bench,
        failing: Option<usize>,
    ) -> (usize, Result<u32, Status>) {
        let mut plan = bench.plan(what).unwrap();
        let mut possible = true;
        for number in 0.. {
            let step = plan.next(possible);
            if let Step::Answer(outcome) = step {
                return (number, outcome);
            }
            possible = failing != Some(number) || always(&step);
            if possible {
                bench.take(step);
            }
        }
        unreachable!()
    }

    fn always(step: &Step) -> bool {
        matches!(step, Step::Forget(_) | Step::Await)
    }

    #[test]
    fn a_request_interrupted_between_steps_is_complete_or_undone() {
        for what in orders() {
            let mut after = Bench::new();
            let (steps, outcome) = run(&what, &mut after, None);
            assert_eq!(
                outcome,
                Ok(if matches!(what, NamespaceRequest::Create(_)) { 2 } else { 0 })
            );
            assert_eq!((&after.open, &after.uuids()), (&after.uuids(), &after.open));
            let mut done = 0;
            for cut in 0..=steps {
                let mut bench = Bench::new();
                let before = bench.kept.entries.clone();
                let mut plan = bench.plan(&what).unwrap();
                for _ in 0..cut {
                    bench.take(plan.next(true));
                }
                let was_seen = bench.served.entries != before;
                bench.restart();
                let is_done = bench.kept.entries == after.kept.entries;
                assert!(is_done || bench.kept.entries == before, "{what:?} at {cut}");
                assert!(is_done || !was_seen, "{what:?} at {cut}: seen, and undone");
                done += usize::from(is_done);
            }
            assert!(done > 0 && done <= steps, "{what:?}: {done} of {steps}");
        }
    }

    #[test]
    fn a_request_with_a_failing_step_is_refused_or_completes() {
        for what in orders() {
            let mut after = Bench::new();
            let (steps, _) = run(&what, &mut after, None);
            let mut refused = 0;
            for failing in 0..steps {
                let mut bench = Bench::new();
                let before = bench.kept.entries.clone();
                let (_, outcome) = run(&what, &mut bench, Some(failing));
                let expected = if outcome.is_ok() { &after.kept.entries } else { &before };
                assert_eq!(&bench.kept.entries, expected, "{what:?} without step {failing}");
                assert_eq!(bench.open, bench.uuids(), "{what:?} without step {failing}");
                refused += usize::from(outcome.is_err());
                bench.restart();
                assert_eq!(&bench.kept.entries, expected, "{what:?} without step {failing}");
            }
            assert!(refused > 0, "{what:?}");
        }
    }

    #[test]
    fn images_that_are_not_removed_yet_count_against_both_limits() {
        let create = orders().remove(0);
        let bench = || Bench::of(sample_of_images(), Some(being_made("rbd")));
        assert!(bench().plan(&create).is_ok());
        for (bench, refused) in [
            (Bench { namespaces: 3, ..bench() }, Status::NAMESPACE_ID_UNAVAILABLE),
            (Bench { quota_bytes: 3 << 20, ..bench() }, Status::NAMESPACE_INSUFFICIENT_CAPACITY),
        ] {
            let said = bench.plan(&create).map(|_| ()).unwrap_err();
            assert!(said.is(refused) && said.dnr(), "{said}");
        }
    }

    /// Images are removed later, and only those that the record has.
    #[test]
    fn an_image_is_in_the_record_as_long_as_it_may_exist() {
        let known = |record: &NamespaceCatalogRecord| -> BTreeSet<Uuid> {
            let entries = record.entries.values().map(|entry| entry.uuid);
            entries.chain(record.unsettled.iter().copied()).collect()
        };
        for (what, pool) in orders().into_iter().flat_map(|it| [(it.clone(), true), (it, false)]) {
            let new = || {
                let mut record = sample_of_images();
                record.unsettled.insert(Uuid::from_bytes([8; 16]));
                Bench::of(record, pool.then(|| being_made("rbd")))
            };
            let (steps, _) = run(&what, &mut new(), None);
            for failing in (0..=steps).map(Some).chain([None]) {
                let mut bench = new();
                let (mut plan, mut possible) = (bench.plan(&what).unwrap(), true);
                for number in 0.. {
                    let step = plan.next(possible);
                    if let Step::Remove(uuids) = &step {
                        assert!(uuids.iter().all(|uuid| !bench.kept.images.contains_key(uuid)));
                    }
                    if let Step::Answer(_) = step {
                        break;
                    }
                    possible = failing != Some(number) || always(&step);
                    // An image may exist although it could not be made.
                    if let (Step::Make { entry, .. }, true) = (&step, pool) {
                        bench.files.insert(entry.uuid);
                    }
                    if possible {
                        bench.take(step);
                    }
                    let is_known = bench.files.is_subset(&known(&bench.kept));
                    assert!(is_known, "{what:?} without step {failing:?}");
                    let images = bench.kept.images.keys().copied().collect::<BTreeSet<_>>();
                    assert!(images.is_subset(&known(&bench.kept)), "no other has an image");
                    assert_eq!(images.contains(&NEW), pool && known(&bench.kept).contains(&NEW));
                }
            }
        }
    }

    #[test]
    fn invalid_namespace_requests_are_refused_with_dnr() {
        let bench = Bench::new();
        let create = |bytes| {
            NamespaceRequest::Create(CreateRequest {
                bytes,
                block_size_bytes: 512,
                ana_group: 1,
                private: false,
            })
        };
        for (what, refused) in [
            (create((1 << 20) + 512), Status::NAMESPACE_INSUFFICIENT_CAPACITY),
            (NamespaceRequest::Delete { nsid: 2 }, Status::INVALID_NAMESPACE),
            (NamespaceRequest::Attach { nsid: 2, cntlids: vec![1] }, Status::INVALID_NAMESPACE),
            (
                NamespaceRequest::Attach { nsid: 7, cntlids: vec![1, 3] },
                Status::NAMESPACE_ALREADY_ATTACHED,
            ),
            (
                NamespaceRequest::Attach { nsid: 3, cntlids: vec![1, 3] },
                Status::NAMESPACE_IS_PRIVATE,
            ),
            (
                NamespaceRequest::Attach { nsid: 7, cntlids: vec![2] },
                Status::CONTROLLER_LIST_INVALID,
            ),
            (
                NamespaceRequest::Detach { nsid: 7, cntlids: vec![3] },
                Status::NAMESPACE_NOT_ATTACHED,
            ),
        ] {
            let said = bench.plan(&what).map(|_| ()).unwrap_err();
            assert!(said.is(refused) && said.dnr(), "{what:?}: {said}");
        }
    }
}
