//! Features: the supported ones, their values, and what a host may set.
//!
//! Source: NVMe Base Specification 2.0, "Get Features command" and "Set Features command"; NVM
//! Command Set Specification 1.0, "Features".
//!
//! A value that has no effect here is *fixed*: Get reports it, Set accepts only that value and answers
//! Feature Not Changeable to any other, because success would be untrue. No value is saved, as
//! [`nvme::identify::Oncs`] reports.

use std::sync::Arc;
use std::time::Instant;

use nvme::feature::{
    Arbitration, AsyncEventConfig, Capabilities, ErrorRecovery, FeatureId, GetFeatures,
    HostBehavior, HostIdentifier, InterruptVectorConfig, KeepAliveTimer, NumberOfQueues,
    PowerManagement, Select, SetFeatures, TemperatureThreshold, Timestamp, VolatileWriteCache,
    WriteAtomicity,
};
use nvme::log::{FeatureEffects, FeaturesSupported};
use nvme::persistent_event::TimestampChange;
use nvme::reservation::{NotificationMask, Persistence};
use nvme::{NSID_ALL, Sqe, Status};

use super::admin::AdminContext;
use super::{Plan, destination, no_data, source, write_protect};
use crate::controller::aer::Event;
use crate::controller::{Controller, Features};
use crate::subsystem::Namespace;
use crate::subsystem::reservation::Order;

/// Answer of Get Features.
enum Value {
    /// In dword 0.
    Dword(u32),
    /// As data.
    Data(Vec<u8>),
}

/// Decision of Set Features.
enum Change {
    /// The feature has that value already.
    Nothing,
    WriteAtomicity(WriteAtomicity),
    AsyncEvents(AsyncEventConfig),
    KeepAliveMs(u32),
    /// The number of I/O queues.
    Queues(u16),
}

/// Decides on a Get Features command ("Get Features command").
///
/// # Errors
/// Invalid Field for an unsupported feature or value, and errors of the SGL.
pub fn get(sqe: &Sqe, controller: &Controller, env: &AdminContext<'_>) -> Result<Plan, Status> {
    let get = GetFeatures::parse(sqe);
    if !is_supported(get.fid, controller) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let value = match get.sel {
        Select::CURRENT if get.fid == FeatureId::TIMESTAMP => {
            Value::Data(controller.timestamp.at(env.now).emit().into())
        }
        Select::CURRENT => value(&get, controller, &controller.features)?,
        Select::DEFAULT => default_value(&get, controller)?,
        Select::CAPABILITIES => Value::Dword(capabilities(get.fid).0),
        // No value is saved.
        _ => return Err(Status::INVALID_FIELD.with_dnr()),
    };
    match value {
        Value::Dword(dword) => {
            no_data(sqe)?;
            Ok(Plan::Reply(dword.into()))
        }
        Value::Data(page) => {
            let to = destination(sqe, env.received, page.len() as u32, false)?;
            Ok(Plan::Give { page, to })
        }
    }
}

/// Decides on a Set Features command ("Set Features command").
///
/// # Errors
/// Invalid Field for an unsupported feature or value, the statuses of features that cannot be saved
/// or changed, and errors of the SGL.
pub fn set(sqe: &Sqe, controller: &mut Controller, env: &AdminContext<'_>) -> Result<Plan, Status> {
    let set = SetFeatures::parse(sqe);
    if !is_supported(set.fid, controller) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    if set.save {
        return Err(Status::FEATURE_NOT_SAVEABLE.with_dnr());
    }
    if is_of_reservations(set.fid) {
        no_data(sqe)?;
        return set_of_reservations(&set, controller);
    }
    if set.fid == FeatureId::NAMESPACE_WRITE_PROTECT {
        no_data(sqe)?;
        return write_protect::set(&set, controller);
    }
    check_scope(&set, controller)?;
    if let Some(bytes) = data_bytes(set.fid) {
        let from = source(sqe, env.received, bytes, false)?;
        return Ok(Plan::SetFeature { from });
    }
    let change = decide(&set, controller)?;
    no_data(sqe)?;
    Ok(Plan::Reply(apply(change, controller, env).into()))
}

/// Number of data bytes of a feature that a host sets by data.
fn data_bytes(fid: FeatureId) -> Option<u32> {
    match fid {
        FeatureId::HOST_BEHAVIOR => Some(HostBehavior::BYTES as u32),
        FeatureId::TIMESTAMP => Some(Timestamp::BYTES as u32),
        _ => None,
    }
}

/// Sets a feature whose value is data, which were pulled. Returns the event that a change of the
/// timestamp is.
///
/// # Errors
/// Invalid Field for undefined values, Data SGL Length Invalid for too few data.
pub(super) fn set_with_data(
    sqe: &Sqe,
    data: &[u8],
    controller: &mut Controller,
    now: Instant,
) -> Result<Option<TimestampChange>, Status> {
    let set = SetFeatures::parse(sqe);
    if !is_supported(set.fid, controller) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let short = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
    match set.fid {
        FeatureId::HOST_BEHAVIOR => {
            let behavior = HostBehavior::parse(data.first_chunk().ok_or(short)?);
            set_host_behavior(behavior, controller).map(|()| None)
        }
        FeatureId::TIMESTAMP => {
            let stamp = Timestamp::parse(data.first_chunk().ok_or(short)?);
            Ok(Some(controller.timestamp.set(&stamp, now)))
        }
        _ => Err(Status::INVALID_FIELD.with_dnr()),
    }
}

/// Sets the capabilities of the host. Of those only retry delays (ACRE) have an effect here.
fn set_host_behavior(behavior: HostBehavior, controller: &mut Controller) -> Result<(), Status> {
    if [behavior.acre, behavior.etdas, behavior.lbafee].iter().any(|&flag| flag > 1) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    controller.association.allow_retry_delays(behavior.acre == 1);
    controller.features.host_behavior = behavior;
    Ok(())
}

/// "Feature Identifiers Supported and Effects (Log Identifier 12h)".
pub(super) fn effects(controller: &Controller) -> Vec<u8> {
    let mut log = FeaturesSupported::default();
    for (fid, entry) in (0..=u8::MAX).map(FeatureId).zip(&mut log.features) {
        if is_supported(fid, controller) {
            let of_namespace = capabilities(fid).namespace_specific();
            *entry = FeatureEffects(0)
                .with_supported(true)
                .with_of_namespace(of_namespace)
                .with_of_controller(!of_namespace);
        }
    }
    log.emit().to_vec()
}

fn is_supported(fid: FeatureId, controller: &Controller) -> bool {
    match fid {
        FeatureId::ASYNC_EVENT_CONFIG | FeatureId::KEEP_ALIVE_TIMER => true,
        FeatureId::ARBITRATION
        | FeatureId::POWER_MANAGEMENT
        | FeatureId::TEMPERATURE_THRESHOLD
        | FeatureId::ERROR_RECOVERY
        | FeatureId::NUMBER_OF_QUEUES
        | FeatureId::INTERRUPT_COALESCING
        | FeatureId::INTERRUPT_VECTOR_CONFIG
        | FeatureId::WRITE_ATOMICITY
        | FeatureId::TIMESTAMP
        | FeatureId::HOST_BEHAVIOR
        | FeatureId::SOFTWARE_PROGRESS
        | FeatureId::HOST_IDENTIFIER
        | FeatureId::RESERVATION_NOTIFICATION_MASK
        | FeatureId::RESERVATION_PERSISTENCE
        | FeatureId::VOLATILE_WRITE_CACHE => !controller.is_discovery(),
        FeatureId::NAMESPACE_WRITE_PROTECT => write_protect::is_supported(controller),
        _ => false,
    }
}

/// Returns the capabilities of a supported feature ("Supported Capabilities").
fn capabilities(fid: FeatureId) -> Capabilities {
    let changeable = matches!(
        fid,
        FeatureId::NUMBER_OF_QUEUES
            | FeatureId::WRITE_ATOMICITY
            | FeatureId::ASYNC_EVENT_CONFIG
            | FeatureId::KEEP_ALIVE_TIMER
            | FeatureId::TIMESTAMP
            | FeatureId::HOST_BEHAVIOR
            | FeatureId::RESERVATION_NOTIFICATION_MASK
            | FeatureId::RESERVATION_PERSISTENCE
            | FeatureId::NAMESPACE_WRITE_PROTECT
    );
    let specific = is_of_reservations(fid)
        || matches!(fid, FeatureId::ERROR_RECOVERY | FeatureId::NAMESPACE_WRITE_PROTECT);
    Capabilities(0).with_changeable(changeable).with_namespace_specific(specific)
}

/// Checks the namespace id of Set Features: none or all for a feature of the controller. Get
/// Features does not check it: Feature Not Namespace Specific is a status of Set Features alone,
/// and tools pass the namespace with which they were started.
fn check_scope(set: &SetFeatures, controller: &Controller) -> Result<(), Status> {
    if matches!(set.nsid, 0 | NSID_ALL) {
        return Ok(());
    }
    let subsystem = controller.subsystem().ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
    subsystem.namespace(set.nsid)?;
    if set.fid == FeatureId::ERROR_RECOVERY {
        return Ok(());
    }
    Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.with_dnr())
}

/// Returns the current value of a feature; `features` may be those of a new controller.
fn value(get: &GetFeatures, controller: &Controller, features: &Features) -> Result<Value, Status> {
    let dword = match get.fid {
        FeatureId::NUMBER_OF_QUEUES => match controller.association.granted_queues() {
            0 => queues(controller.limits.io_queues),
            granted => queues(granted),
        },
        FeatureId::WRITE_ATOMICITY => features.write_atomicity.0,
        FeatureId::ASYNC_EVENT_CONFIG => features.async_events.0,
        FeatureId::KEEP_ALIVE_TIMER => controller.kato_ms(),
        FeatureId::HOST_BEHAVIOR => return Ok(Value::Data(features.host_behavior.emit().into())),
        FeatureId::HOST_IDENTIFIER => {
            // The id is that of Connect and has 128 bits; half of it is no identification.
            return match HostIdentifier(get.cdw11).extended() {
                true => Ok(Value::Data(controller.association.host_id.into())),
                false => Err(Status::INVALID_FIELD.with_dnr()),
            };
        }
        FeatureId::NAMESPACE_WRITE_PROTECT => write_protect::value(get, controller)?,
        fid if is_of_reservations(fid) => value_of_reservations(get, controller)?,
        fid => fixed(fid, get.cdw11)?,
    };
    Ok(Value::Dword(dword))
}

/// Returns the value of a feature before any Set Features. For the host identifier and fixed values
/// that is the current one.
fn default_value(get: &GetFeatures, controller: &Controller) -> Result<Value, Status> {
    match get.fid {
        FeatureId::NUMBER_OF_QUEUES => Ok(Value::Dword(queues(controller.limits.io_queues))),
        FeatureId::KEEP_ALIVE_TIMER => Ok(Value::Dword(0)),
        FeatureId::TIMESTAMP => Ok(Value::Data(Timestamp::default().emit().into())),
        fid if is_of_reservations(fid) => {
            value_of_reservations(get, controller).map(|_| Value::Dword(0))
        }
        FeatureId::NAMESPACE_WRITE_PROTECT => {
            write_protect::value(get, controller).map(|_| Value::Dword(0))
        }
        _ => value(get, controller, &Features::default()),
    }
}

/// Whether it is a reservation feature, with a value for each namespace.
fn is_of_reservations(fid: FeatureId) -> bool {
    let mask = FeatureId::RESERVATION_NOTIFICATION_MASK;
    fid == mask || fid == FeatureId::RESERVATION_PERSISTENCE
}

/// Returns "Reservation Notification Mask" or "Reservation Persistence": of one namespace, never of
/// all.
fn value_of_reservations(get: &GetFeatures, controller: &Controller) -> Result<u32, Status> {
    let subsystem = controller.subsystem().ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
    let namespace = subsystem.namespace(get.nsid)?;
    controller.association.reach.check(namespace.ana_group)?;
    match get.fid {
        FeatureId::RESERVATION_PERSISTENCE => {
            namespace.check_loaded()?;
            Ok(Persistence(0).with_ptpl(namespace.reservation.persists()).0)
        }
        _ => Ok(controller.association.reservations.mask(get.nsid).0),
    }
}

/// Sets either for one namespace, or for all of them (FFFFFFFFh).
fn set_of_reservations(set: &SetFeatures, controller: &Controller) -> Result<Plan, Status> {
    let subsystem = controller.subsystem().ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
    let namespaces: Vec<&Namespace> = match set.nsid {
        // Those that have reservations.
        NSID_ALL => subsystem.namespaces.iter().filter(|n| !n.is_shared()).collect(),
        nsid => vec![subsystem.namespace(nsid)?],
    };
    let reach = &controller.association.reach;
    namespaces.iter().try_for_each(|n| reach.check(n.ana_group))?;
    if set.fid == FeatureId::RESERVATION_PERSISTENCE {
        let of = namespaces.iter().map(|n| Arc::clone(&n.reservation)).collect();
        return Ok(Plan::Keep { of, order: Order::Persist(Persistence(set.cdw11).ptpl()) });
    }
    let mask = NotificationMask(set.cdw11);
    let known = NotificationMask(0)
        .with_registration_preempted(true)
        .with_reservation_released(true)
        .with_reservation_preempted(true);
    if mask.0 & !known.0 != 0 {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    namespaces.iter().for_each(|n| controller.association.reservations.set_mask(n.nsid, mask));
    Ok(Plan::Reply(0))
}

/// Returns the value of a fixed feature. `cdw11` selects one, if there are several.
fn fixed(fid: FeatureId, cdw11: u32) -> Result<u32, Status> {
    const NO_LIMIT: u8 = 7;
    let invalid = Status::INVALID_FIELD.with_dnr();
    match fid {
        // Queues are served in turn, each with all commands that have arrived.
        FeatureId::ARBITRATION => Ok(Arbitration(0).with_burst(NO_LIMIT).0),
        FeatureId::POWER_MANAGEMENT => Ok(PowerManagement(0).0),
        FeatureId::TEMPERATURE_THRESHOLD => threshold(TemperatureThreshold(cdw11)),
        FeatureId::ERROR_RECOVERY => Ok(ErrorRecovery(0).0),
        FeatureId::VOLATILE_WRITE_CACHE => Ok(VolatileWriteCache(0).with_wce(true).0),
        // A fabric has no interrupts: nothing is coalesced, and there is no vector but the first.
        FeatureId::INTERRUPT_COALESCING => Ok(0),
        FeatureId::INTERRUPT_VECTOR_CONFIG if InterruptVectorConfig(cdw11).vector() == 0 => Ok(0),
        // Pre-boot software, which would increment it, cannot connect.
        FeatureId::SOFTWARE_PROGRESS => Ok(0),
        _ => Err(invalid),
    }
}

/// Returns a temperature threshold that is never crossed: there is no sensor. In bits 15:0, as in
/// Get Features.
fn threshold(asked: TemperatureThreshold) -> Result<u32, Status> {
    const COMPOSITE: u8 = 0;
    match (asked.sensor(), asked.kind()) {
        (COMPOSITE, 0) => Ok(u16::MAX.into()),
        (COMPOSITE, 1) => Ok(0),
        _ => Err(Status::INVALID_FIELD.with_dnr()),
    }
}

/// Decides on a Set Features without data. Nothing is changed here.
fn decide(set: &SetFeatures, controller: &Controller) -> Result<Change, Status> {
    match set.fid {
        FeatureId::NUMBER_OF_QUEUES => number_of_queues(NumberOfQueues(set.cdw11), controller),
        FeatureId::WRITE_ATOMICITY => {
            let asked = WriteAtomicity(set.cdw11);
            let kept = WriteAtomicity(0).with_disable_normal(asked.disable_normal());
            Ok(Change::WriteAtomicity(kept))
        }
        FeatureId::ASYNC_EVENT_CONFIG => match set.cdw11 & !possible_events(controller) {
            0 => Ok(Change::AsyncEvents(AsyncEventConfig(set.cdw11))),
            _ => Err(Status::INVALID_FIELD.with_dnr()),
        },
        FeatureId::KEEP_ALIVE_TIMER => {
            let kato_ms = KeepAliveTimer(set.cdw11).kato_ms();
            match kato_ms <= controller.keep_alive_max_ms() {
                true => Ok(Change::KeepAliveMs(kato_ms)),
                false => Err(Status::KEEP_ALIVE_INVALID.with_dnr()),
            }
        }
        // Connect has set it ("Host Identifier").
        FeatureId::HOST_IDENTIFIER => Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()),
        fid => keep_fixed(fid, set.cdw11),
    }
}

/// Accepts only the present value of a fixed feature.
fn keep_fixed(fid: FeatureId, cdw11: u32) -> Result<Change, Status> {
    let (selector, asked) = match fid {
        FeatureId::POWER_MANAGEMENT => {
            let asked = PowerManagement(cdw11);
            // There is one power state; the workload is a hint.
            return match asked.power_state() {
                0 => Ok(Change::Nothing),
                _ => Err(Status::INVALID_FIELD.with_dnr()),
            };
        }
        FeatureId::TEMPERATURE_THRESHOLD => {
            const ALL_SENSORS: u8 = 0xF;
            let asked = TemperatureThreshold(cdw11);
            let selector = match asked.sensor() {
                ALL_SENSORS => asked.with_sensor(0),
                _ => asked,
            };
            (selector.0, asked.threshold_k().into())
        }
        FeatureId::INTERRUPT_VECTOR_CONFIG => {
            let asked = InterruptVectorConfig(cdw11);
            (cdw11, asked.coalescing_disable().into())
        }
        _ => (cdw11, cdw11),
    };
    match fixed(fid, selector)? == asked {
        true => Ok(Change::Nothing),
        false => Err(Status::FEATURE_NOT_CHANGEABLE.with_dnr()),
    }
}

/// "Number of Queues": set before the first I/O queue connects. A queue pair is one connection
/// here, so the numbers of submission and completion queues are equal.
fn number_of_queues(asked: NumberOfQueues, controller: &Controller) -> Result<Change, Status> {
    let (submission_z, completion_z) = (asked.submission_z(), asked.completion_z());
    if submission_z == u16::MAX || completion_z == u16::MAX {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    if controller.association.io_queues() > 0 {
        return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr());
    }
    let pairs = submission_z.min(completion_z) + 1;
    Ok(Change::Queues(pairs.min(controller.limits.io_queues)))
}

/// Returns the events that can be enabled on a controller. Of the SMART warnings only that of
/// reliability is ever raised, but enabling the others is permitted.
fn possible_events(controller: &Controller) -> u32 {
    if controller.is_discovery() {
        return Event::DiscoveryLog.enable_bit();
    }
    let warnings = AsyncEventConfig(0).with_smart_warnings(u8::MAX);
    warnings.0 | Event::NamespaceAttribute.enable_bit() | Event::Ana.enable_bit()
}

/// Executes a decision; returns dword 0 of the completion.
fn apply(change: Change, controller: &mut Controller, env: &AdminContext<'_>) -> u32 {
    match change {
        Change::Nothing => {}
        Change::WriteAtomicity(value) => controller.features.write_atomicity = value,
        Change::AsyncEvents(value) => controller.features.async_events = value,
        Change::KeepAliveMs(ms) => controller.set_kato_ms(ms, env.now),
        Change::Queues(granted) => {
            controller.association.grant_queues(granted);
            return queues(granted);
        }
    }
    0
}

/// Returns dword 0 for so many queue pairs.
fn queues(pairs: u16) -> u32 {
    let pairs_z = pairs.saturating_sub(1);
    NumberOfQueues(0).with_submission_z(pairs_z).with_completion_z(pairs_z).0
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nvme::Sgl;
    use nvme::log::AnaState;
    use proptest::prelude::*;

    use crate::command::Source;
    use crate::command::admin::set_feature_with_data;
    use crate::command::admin::tests::{ask, discovery_controller, given, keyed, nvm, refused};
    use crate::command::features::*;
    use crate::controller::ControllerKind;
    use crate::subsystem::Subsystem;
    use crate::subsystem::ana::AnaStates;
    use crate::subsystem::reservation::Reservation;

    const SERVED: [u8; 15] =
        [0x01, 0x02, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0A, 0x0B, 0x0E, 0x0F, 0x16, 0x80, 0x81];

    fn get(fid: u8, sel: u8, cdw11: u32) -> Sqe {
        let sgl = match (sel, fid) {
            (0 | 1, 0x16) => keyed(512),
            (0 | 1, 0x81) => keyed(16),
            (0 | 1, 0x0E) => keyed(8),
            _ => Sgl::NONE,
        };
        GetFeatures { fid: FeatureId(fid), sel: Select(sel), nsid: 0, cdw11 }.emit(sgl)
    }

    fn set(fid: u8, cdw11: u32) -> Sqe {
        SetFeatures::new(FeatureId(fid), cdw11).emit(Sgl::NONE)
    }

    fn set_with(
        sqe: &Sqe,
        data: &[u8],
        controller: &mut Controller,
    ) -> Result<Option<TimestampChange>, Status> {
        set_feature_with_data(sqe, data, controller, Instant::now())
    }

    #[track_caller]
    fn reply(result: Result<Plan, Status>) -> u32 {
        match result {
            Ok(Plan::Reply(dword)) => dword.try_into().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn namespace_features_fail_with_the_ana_status_of_the_path() {
        let mut controller = nvm();
        for (state, code) in [(3, 0x302), (4, 0x301), (0xF, 0x303)] {
            controller.association.reach.set(&AnaStates::all(AnaState(state)));
            for fid in [0x82, 0x83] {
                for sqe in [get(fid, 0, 0), set(fid, 0)] {
                    let status = ask(sqe.with_nsid(1), &mut controller).unwrap_err();
                    assert_eq!((status.code(), status.dnr()), (code, false), "{fid:#04x}");
                }
            }
            assert_eq!(reply(ask(get(0x0B, 0, 0).with_nsid(1), &mut controller)), 0);
        }
    }

    #[test]
    fn reservation_persistence_of_an_image_in_standby_is_unknown() {
        let mut controller = nvm();
        let ControllerKind::Nvm(subsystem) = &controller.role else { panic!() };
        let health = Arc::clone(&subsystem.namespaces[0].health);
        health.set_standby(true);
        let status = ask(get(0x83, 0, 0).with_nsid(1), &mut controller).unwrap_err();
        assert_eq!((status.code(), status.dnr()), (0x302, false));
        assert_eq!(reply(ask(get(0x82, 0, 0).with_nsid(1), &mut controller)), 0, "of the host");
        health.set_standby(false);
        assert_eq!(reply(ask(get(0x83, 0, 0).with_nsid(1), &mut controller)), 0);
    }

    #[test]
    fn unknown_features_are_refused() {
        let of_reservations = [0x82, 0x83];
        let served = |fid: &u8| SERVED.contains(fid) || of_reservations.contains(fid);
        for fid in (0..=u8::MAX).filter(|fid| !served(fid)) {
            assert_eq!(refused(ask(get(fid, 0, 0), &mut nvm())), 0x002, "{fid:#04x}");
            assert_eq!(refused(ask(set(fid, 0), &mut nvm())), 0x002, "{fid:#04x}");
        }
        for fid in (0..=u8::MAX).filter(|fid| ![0x0B, 0x0F].contains(fid)) {
            let mut controller = discovery_controller();
            assert_eq!(refused(ask(get(fid, 0, 0), &mut controller)), 0x002, "{fid:#04x}");
            assert_eq!(refused(ask(set(fid, 0), &mut controller)), 0x002, "{fid:#04x}");
        }
    }

    #[test]
    fn feature_values_and_capabilities_are_reported() {
        let changeable = 4;
        let table: [(u8, u32, u32, u32, u32); 14] = [
            // id, dword 11, current, default, capabilities
            (0x01, 0, 7, 7, 0),
            (0x02, 0, 0, 0, 0),
            (0x04, 0, 0xFFFF, 0xFFFF, 0),
            (0x04, 1 << 20, 0, 0, 0),
            (0x05, 0, 0, 0, 2),
            (0x06, 0, 1, 1, 0),
            (0x07, 0, 0x0007_0007, 0x0007_0007, changeable),
            (0x08, 0, 0, 0, 0),
            (0x09, 0, 0, 0, 0),
            (0x0A, 0, 0, 0, changeable),
            (0x0B, 0, 0, 0, changeable),
            (0x0F, 0, 5000, 0, changeable),
            (0x80, 0, 0, 0, 0),
            (0x0F, 77, 5000, 0, changeable),
        ];
        let mut controller = nvm();
        for (fid, cdw11, current, default, capabilities) in table {
            for (sel, value) in [(0, current), (1, default), (3, capabilities)] {
                let told = reply(ask(get(fid, sel, cdw11), &mut controller));
                assert_eq!(told, value, "{fid:#04x}, select {sel}");
            }
            let named = get(fid, 0, cdw11).with_nsid(1);
            assert_eq!(reply(ask(named, &mut controller)), current, "tools name a namespace");
        }
        for fid in SERVED {
            for sel in [2, 4, 5, 6, 7] {
                assert_eq!(refused(ask(get(fid, sel, 1), &mut controller)), 0x002, "saved");
            }
        }
        let table = [
            ("another sensor", get(0x04, 0, 1 << 16), 0x002),
            ("another kind", get(0x04, 0, 2 << 20), 0x002),
            ("another vector", get(0x09, 0, 1), 0x002),
            ("a buffer without data", get(0x07, 0, 0).with_sgl(keyed(4)), 0x00F),
        ];
        for (what, sqe, code) in table {
            assert_eq!(refused(ask(sqe, &mut controller)), code, "{what}");
        }
    }

    #[test]
    fn features_accept_only_supported_values() {
        let table: [(u8, u32, Option<u16>); 22] = [
            (0x01, 7, None),
            (0x01, 0, Some(0x10E)),
            (0x02, 0x20, None),
            (0x02, 1, Some(0x002)),
            (0x04, 0xFFFF, None),
            (0x04, 0x000F_FFFF, None),
            (0x04, 0x0010_0000, None),
            (0x04, 350, Some(0x10E)),
            (0x04, 0x0001_FFFF, Some(0x002)),
            (0x04, 0x0030_0000, Some(0x002)),
            (0x05, 0, None),
            (0x05, 0x1_0000, Some(0x10E)),
            (0x06, 1, None),
            (0x06, 0, Some(0x10E)),
            (0x08, 0, None),
            (0x08, 0x101, Some(0x10E)),
            (0x09, 0, None),
            (0x09, 0x1_0000, Some(0x10E)),
            (0x09, 1, Some(0x002)),
            (0x80, 0, None),
            (0x80, 1, Some(0x10E)),
            (0x81, 0, Some(0x00C)),
        ];
        let mut controller = nvm();
        for (fid, cdw11, refusal) in table {
            let result = ask(set(fid, cdw11), &mut controller);
            match refusal {
                None => assert_eq!(reply(result), 0, "{fid:#04x} {cdw11:#x}"),
                Some(code) => assert_eq!(refused(result), code, "{fid:#04x} {cdw11:#x}"),
            }
        }
        let host_id = set(0x81, 1).with_sgl(keyed(16));
        assert_eq!(refused(ask(host_id, &mut controller)), 0x00C, "whatever its data");
        assert_eq!(refused(ask(set(0x0A, 1).with_sgl(keyed(4)), &mut controller)), 0x00F);
        assert_eq!(reply(ask(get(0x0A, 0, 0), &mut controller)), 0);
    }

    #[test]
    fn features_are_not_saveable_and_their_scope_is_checked() {
        for fid in SERVED {
            let mut controller = nvm();
            let saved = SetFeatures { save: true, ..SetFeatures::new(FeatureId(fid), 0) };
            assert_eq!(refused(ask(saved.emit(Sgl::NONE), &mut controller)), 0x10D, "{fid:#04x}");
            let inactive = set(fid, 0).with_nsid(3);
            assert_eq!(refused(ask(inactive, &mut controller)), 0x00B, "{fid:#04x}");
            if fid != 0x05 {
                let named = set(fid, 0).with_nsid(2);
                assert_eq!(refused(ask(named, &mut controller)), 0x10F, "{fid:#04x}");
            }
        }
        assert_eq!(reply(ask(set(0x05, 0).with_nsid(2), &mut nvm())), 0);
        assert_eq!(reply(ask(set(0x0B, 0).with_nsid(NSID_ALL), &mut nvm())), 0);
        let named = set(0x0B, 0).with_nsid(1);
        assert_eq!(refused(ask(named, &mut discovery_controller())), 0x00B);
    }

    #[test]
    fn the_write_cache_stays_enabled_without_namespaces() {
        let mut controller = nvm();
        let ControllerKind::Nvm(subsystem) = &mut controller.role else { panic!() };
        Arc::make_mut(subsystem).namespaces.clear();
        assert_eq!(reply(ask(get(0x06, 0, 0), &mut controller)), 1);
        assert_eq!(refused(ask(set(0x06, 0), &mut controller)), 0x10E);
    }

    #[test]
    fn queues_are_granted_up_to_the_limit_and_before_the_first_connects() {
        let mut controller = nvm();
        let table =
            [(0, 1), (0x0003_0003, 4), (0x0003_0001, 2), (0x0007_0007, 8), (0xFFFE_FFFE, 8)];
        for (asked, granted) in table {
            let both = (granted - 1) * 0x1_0001;
            assert_eq!(reply(ask(set(0x07, asked), &mut controller)), both);
            assert_eq!(u32::from(controller.association.granted_queues()), granted);
            assert_eq!(reply(ask(get(0x07, 0, 0), &mut controller)), both);
        }
        for asked in [0xFFFF_0000, 0x0000_FFFF, 0xFFFF_FFFF] {
            assert_eq!(refused(ask(set(0x07, asked), &mut controller)), 0x002);
        }
        controller.association.count_io_queue(true);
        assert_eq!(refused(ask(set(0x07, 0), &mut controller)), 0x00C);
        controller.association.count_io_queue(false);
        assert_eq!(reply(ask(set(0x07, 0), &mut controller)), 0);
    }

    #[test]
    fn only_supported_async_events_can_be_enabled() {
        let mut controller = nvm();
        assert_eq!(reply(ask(set(0x0B, 0x93F), &mut controller)), 0);
        assert_eq!(controller.features.async_event_config(), 0x93F);
        assert_eq!(reply(ask(get(0x0B, 0, 0), &mut controller)), 0x93F);
        for bit in (9..32).filter(|bit| *bit != 11) {
            assert_eq!(refused(ask(set(0x0B, 1 << bit), &mut controller)), 0x002, "{bit}");
        }
        assert_eq!(controller.features.async_event_config(), 0x93F, "unchanged");
        let mut controller = discovery_controller();
        assert_eq!(reply(ask(set(0x0B, 1 << 31), &mut controller)), 0);
        for bit in 0..31 {
            assert_eq!(refused(ask(set(0x0B, 1 << bit), &mut controller)), 0x002, "{bit}");
        }
    }

    #[test]
    fn the_keep_alive_timeout_is_rounded_up_and_reported_as_granted() {
        for (mut controller, longest) in [(nvm(), 7_200_000), (discovery_controller(), 600_000)] {
            for (asked, granted) in
                [(1, 1000), (15_500, 16_000), (longest, longest), (0, 0), (30_000, 30_000)]
            {
                assert_eq!(reply(ask(set(0x0F, asked), &mut controller)), 0);
                assert_eq!(reply(ask(get(0x0F, 0, 0), &mut controller)), granted);
            }
            for asked in [longest + 1, u32::MAX] {
                assert_eq!(refused(ask(set(0x0F, asked), &mut controller)), 0x01A);
            }
            assert_eq!(reply(ask(get(0x0F, 0, 0), &mut controller)), 30_000, "unchanged");
            assert!(!controller.expired(Instant::now()));
        }
    }

    #[test]
    fn the_host_identifier_has_sixteen_bytes() {
        let mut controller = nvm();
        assert_eq!(given(ask(get(0x81, 0, 1), &mut controller)), [0xA5; 16]);
        assert_eq!(given(ask(get(0x81, 1, 1), &mut controller)), [0xA5; 16]);
        assert_eq!(refused(ask(get(0x81, 0, 0), &mut controller)), 0x002, "eight bytes");
        assert_eq!(refused(ask(get(0x81, 0, 1).with_sgl(keyed(8)), &mut controller)), 0x00F);
        assert_eq!(reply(ask(get(0x81, 3, 0), &mut controller)), 0);
    }

    #[test]
    fn host_behavior_is_transferred_validated_and_returned() {
        let mut controller = nvm();
        let sqe = set(0x16, 0).with_sgl(keyed(4096));
        let Ok(Plan::SetFeature { from: Source::Host(remote) }) = ask(sqe, &mut controller) else {
            panic!("data are pulled");
        };
        assert_eq!(remote.len, 512, "cut to what the feature has");
        assert_eq!(refused(ask(set(0x16, 0).with_sgl(keyed(511)), &mut controller)), 0x00F);
        let mut data = HostBehavior { acre: 1, etdas: 0, lbafee: 0 }.emit();
        assert_eq!(set_with(&sqe, &data, &mut controller), Ok(None));
        assert_eq!(given(ask(get(0x16, 0, 0), &mut controller)), data);
        assert_eq!(given(ask(get(0x16, 1, 0), &mut controller)), [0; 512], "default");
        assert_eq!(reply(ask(get(0x16, 3, 0), &mut controller)), 4);
        data[2] = 2;
        assert_eq!(refused(set_with(&sqe, &data, &mut controller)), 0x002);
        assert_eq!(refused(set_with(&sqe, &data[..511], &mut controller)), 0x00F);
        assert_eq!(refused(set_with(&set(7, 0), &data, &mut controller)), 0x002);
        controller.fail();
        assert_eq!(refused(set_with(&sqe, &data, &mut controller)), 0x00C);
    }

    #[test]
    fn a_timestamp_is_transferred_and_counts_from_the_host_value() {
        let mut controller = nvm();
        let read = |controller: &mut Controller| {
            let bytes: [u8; 8] = given(ask(get(0x0E, 0, 0), controller)).try_into().unwrap();
            let stamp = Timestamp::parse(&bytes);
            (stamp.ms(), stamp.origin(), stamp.may_have_stopped(), bytes[7])
        };
        let (since_reset_ms, origin, stopped, _) = read(&mut controller);
        assert_eq!((origin, stopped), (Timestamp::ORIGIN_RESET, false));
        assert!(since_reset_ms < 3_600_000, "since the reset, not since 1970");

        let sqe = set(0x0E, 0).with_sgl(keyed(4096));
        let Ok(Plan::SetFeature { from: Source::Host(remote) }) = ask(sqe, &mut controller) else {
            panic!("data are pulled");
        };
        assert_eq!(remote.len, 8, "cut to what the feature has");
        assert_eq!(refused(ask(set(0x0E, 0).with_sgl(keyed(7)), &mut controller)), 0x00F);
        assert_eq!(refused(ask(set(0x0E, 0), &mut controller)), 0x00F);
        assert_eq!(refused(ask(sqe.with_nsid(1), &mut controller)), 0x10F);

        // An hour ago; the two bytes behind the timestamp are reserved.
        let (now, hour) = (Instant::now(), Duration::from_secs(3600));
        let data = 0xFFFF_0181_2345_6789u64.to_le_bytes();
        let Ok(Some(change)) = set_feature_with_data(&sqe, &data, &mut controller, now - hour)
        else {
            panic!("a change of the timestamp is an event");
        };
        assert!(change.previous.ms() <= since_reset_ms + 1);
        let (ms, origin, stopped, reserved) = read(&mut controller);
        assert_eq!((origin, stopped, reserved), (Timestamp::ORIGIN_HOST, false, 0));
        assert!((0x0181_2345_6789..).contains(&(ms - 3_600_000)), "{ms}");
        assert!((..0x0181_2345_6789 + 3_600_000).contains(&(ms - 3_600_000)), "{ms}");
        assert_eq!(given(ask(get(0x0E, 1, 0), &mut controller)), [0; 8], "default");
        assert_eq!(reply(ask(get(0x0E, 3, 0), &mut controller)), 4);
        assert_eq!(refused(set_with(&sqe, &data[..7], &mut controller)), 0x00F);
        assert_eq!(refused(ask(get(0x0E, 0, 0).with_sgl(keyed(7)), &mut controller)), 0x00F);
        assert_eq!(refused(set_with(&sqe, &data, &mut discovery_controller())), 0x002);
    }

    #[test]
    fn reservation_features_are_set_per_namespace_or_for_all() {
        let mut controller = nvm();
        let of = |sqe: Sqe, nsid| sqe.with_nsid(nsid);
        for fid in [0x82, 0x83] {
            for nsid in [0, 3, NSID_ALL] {
                assert_eq!(refused(ask(of(get(fid, 0, 0), nsid), &mut controller)), 0x00B);
            }
            for nsid in [0, 3] {
                assert_eq!(refused(ask(of(set(fid, 0), nsid), &mut controller)), 0x00B);
            }
            let save = SetFeatures { save: true, nsid: 1, ..SetFeatures::new(FeatureId(fid), 0) };
            assert_eq!(refused(ask(save.emit(Sgl::NONE), &mut controller)), 0x10D);
            assert_eq!(reply(ask(of(get(fid, 1, 0), 1), &mut controller)), 0, "default");
            assert_eq!(reply(ask(get(fid, 3, 0), &mut controller)), 6, "capabilities");
            let data = of(set(fid, 0), 1).with_sgl(keyed(16));
            assert_eq!(refused(ask(data, &mut controller)), 0x00F);
        }
        let mask =
            |controller: &mut Controller, nsid| reply(ask(of(get(0x82, 0, 0), nsid), controller));
        assert_eq!(reply(ask(of(set(0x82, 0b0110), 2), &mut controller)), 0);
        assert_eq!([1, 2, 7].map(|nsid| mask(&mut controller, nsid)), [0, 6, 0]);
        assert_eq!(reply(ask(of(set(0x82, 0b1000), NSID_ALL), &mut controller)), 0);
        assert_eq!([1, 2, 7].map(|nsid| mask(&mut controller, nsid)), [8; 3]);
        for wrong in [1, 0x10, 1 << 31] {
            assert_eq!(refused(ask(of(set(0x82, wrong), 1), &mut controller)), 0x002);
        }
        let kept = |plan| match plan {
            Ok(Plan::Keep { of, order }) => (of.iter().map(|r| r.nsid).collect::<Vec<_>>(), order),
            other => panic!("{other:?}"),
        };
        let on = ask(of(set(0x83, 1), 7), &mut controller);
        assert_eq!(kept(on), (vec![7], Order::Persist(true)));
        let off = ask(of(set(0x83, 0), NSID_ALL), &mut controller);
        assert_eq!(kept(off), (vec![1, 2, 7], Order::Persist(false)));
        // Namespaces without reservations are not concerned: one would refuse what others have done.
        let mut subsystem = Subsystem::clone(controller.subsystem().unwrap());
        subsystem.namespaces[1].reservation = Reservation::none(subsystem.nqn, 2);
        controller.replace_subsystem(Arc::new(subsystem));
        let on = ask(of(set(0x83, 1), NSID_ALL), &mut controller);
        assert_eq!(kept(on), (vec![1, 7], Order::Persist(true)));
    }

    proptest! {
        #[test]
        fn a_refused_change_changes_nothing(fid: u8, cdw11: u32, nsid in 0u32..4, save: bool) {
            let mut controller = nvm();
            let before = format!("{controller:?}");
            let set = SetFeatures { fid: FeatureId(fid), save, nsid, cdw11 };
            if ask(set.emit(Sgl::NONE), &mut controller).is_err() {
                prop_assert_eq!(format!("{controller:?}"), before);
            }
        }
    }
}
