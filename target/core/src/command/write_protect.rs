//! Feature 84h, Namespace Write Protection Config: of one namespace, or of all at once.
//!
//! Source: NVMe Base Specification 2.0, "Namespace Write Protection Config (Feature Identifier
//! 84h)".

use std::sync::Arc;

use nvme::feature::{GetFeatures, NamespaceWriteProtect, SetFeatures, WriteProtectState};
use nvme::{NSID_ALL, Status};

use super::Plan;
use crate::controller::Controller;
use crate::subsystem::Namespace;
use crate::subsystem::write_protect::Protection;

/// Whether a controller supports the feature.
pub(super) fn is_supported(controller: &Controller) -> bool {
    controller.subsystem().is_some_and(|subsystem| subsystem.protects())
}

/// Returns the state of a namespace; one that is read only by configuration is reported as Write
/// Protect.
///
/// # Errors
/// Invalid Namespace or Format, or the path related status of the namespace.
pub(super) fn value(get: &GetFeatures, controller: &Controller) -> Result<u32, Status> {
    let subsystem = controller.subsystem().ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
    let namespace = subsystem.namespace(get.nsid)?;
    controller.association.reach.check(namespace.ana_group)?;
    namespace.check_loaded()?;
    Ok(NamespaceWriteProtect(0).with_state(state(namespace)).0)
}

/// Returns the plan to set the state.
///
/// # Errors
/// Invalid Namespace or Format, Format in Progress, Invalid Field for an undefined state, Feature
/// Not Changeable if the state cannot change, or the path related status of a namespace.
pub(super) fn set(set: &SetFeatures, controller: &Controller) -> Result<Plan, Status> {
    let subsystem = controller.subsystem().ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
    let namespaces = match set.nsid {
        NSID_ALL => &subsystem.namespaces[..],
        nsid => std::slice::from_ref(subsystem.namespace(nsid)?),
    };
    let new = NamespaceWriteProtect(set.cdw11).state();
    // All or none.
    for namespace in namespaces {
        controller.association.reach.check(namespace.ana_group)?;
        namespace.check_loaded()?;
        if namespace.is_shared() {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if namespace.formatting.is_some() {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        namespace.protection.check(new)?;
        if namespace.read_only && new != state(namespace) {
            return Err(Status::FEATURE_NOT_CHANGEABLE.with_dnr());
        }
    }
    // A namespace may have been protected just before: then there are commands to wait for.
    let changes = |n: &&Namespace| {
        let protects = new != WriteProtectState::NONE;
        (protects || n.protection.state() != new) && !n.read_only
    };
    let of: Vec<Arc<Protection>> =
        namespaces.iter().filter(changes).map(|n| Arc::clone(&n.protection)).collect();
    // Earlier writes are on stable storage when write protection is reported to a host.
    let volatile = |n: &&Namespace| n.volatile_cache && new != WriteProtectState::NONE;
    let backings = namespaces.iter().filter(changes).filter(volatile).map(|n| n.backing).collect();
    match of.is_empty() {
        true => Ok(Plan::Reply(0)),
        false => Ok(Plan::Protect { of, state: new, backings }),
    }
}

fn state(namespace: &Namespace) -> WriteProtectState {
    match namespace.protection.state() {
        WriteProtectState::NONE if namespace.read_only => WriteProtectState::PROTECTED,
        state => state,
    }
}

#[cfg(test)]
mod tests {
    use nvme::feature::{FeatureId, Select};
    use nvme::log::AnaState;
    use nvme::{Sgl, Sqe};

    use crate::command::admin::tests::{ask, nvm, refused};
    use crate::command::write_protect::*;
    use crate::controller::ControllerKind;
    use crate::subsystem::ana::AnaStates;
    use crate::subsystem::persistence::tests::MemorySections;
    use crate::subsystem::reservation::Reservation;
    use nvmfd_blockdev::DeviceId;

    const FID: FeatureId = FeatureId::NAMESPACE_WRITE_PROTECT;

    fn get(nsid: u32, sel: u8) -> Sqe {
        GetFeatures { fid: FID, sel: Select(sel), nsid, cdw11: 0 }.emit(Sgl::NONE)
    }

    fn set(nsid: u32, state: u32) -> Sqe {
        SetFeatures { nsid, ..SetFeatures::new(FID, state) }.emit(Sgl::NONE)
    }

    fn protecting() -> Controller {
        let mut controller = nvm();
        let ControllerKind::Nvm(subsystem) = &mut controller.role else { panic!() };
        let subsystem = Arc::make_mut(subsystem);
        for namespace in &mut subsystem.namespaces {
            namespace.protection =
                Protection::kept(subsystem.nqn, namespace.nsid, MemorySections::default()).unwrap();
        }
        controller
    }

    #[test]
    fn write_protect_is_unsupported_without_persistence() {
        assert_eq!(refused(ask(get(1, 0), &mut nvm())), 0x002);
        assert_eq!(refused(ask(set(1, 0), &mut nvm())), 0x002);
    }

    #[test]
    fn write_protect_states_are_per_namespace_and_changes_are_atomic() {
        let mut controller = protecting();
        assert_eq!(ask(get(1, 3), &mut controller), Ok(Plan::Reply(0b110)));
        assert_eq!(ask(set(1, 0), &mut controller), Ok(Plan::Reply(0)), "nothing to do");
        let order = |plan| match plan {
            Ok(Plan::Protect { of, state, backings }) => {
                for protection in &of {
                    protection.change(state).unwrap();
                }
                (of.iter().map(|p| p.nsid).collect::<Vec<_>>(), state.0, backings)
            }
            other => panic!("{other:?}"),
        };
        let first = order(ask(set(1, 1), &mut controller));
        assert_eq!(first, (vec![1], 1, vec![DeviceId(0)]));
        assert_eq!(ask(get(1, 0), &mut controller), Ok(Plan::Reply(1)));
        assert_eq!(ask(get(1, 1), &mut controller), Ok(Plan::Reply(0)), "the default");
        assert_eq!(ask(get(2, 0), &mut controller), Ok(Plan::Reply(0)));
        let back = order(ask(set(1, 0), &mut controller));
        assert_eq!(back, (vec![1], 0, vec![]), "nothing to flush");
        assert_eq!(order(ask(set(2, 3), &mut controller)).0, [2]);
        assert_eq!(refused(ask(set(2, 0), &mut controller)), 0x10E);
        assert_eq!(refused(ask(set(NSID_ALL, 1), &mut controller)), 0x10E, "none of them");
        assert_eq!(order(ask(set(NSID_ALL, 3), &mut controller)).0, [1, 2, 7], "2 once more");
        assert_eq!(refused(ask(set(1, 4), &mut controller)), 0x002);
        for nsid in [0, 3, NSID_ALL] {
            assert_eq!(refused(ask(get(nsid, 0), &mut controller)), 0x00B);
        }
        assert_eq!(refused(ask(set(0, 1), &mut controller)), 0x00B);
        let save = SetFeatures { save: true, nsid: 1, ..SetFeatures::new(FID, 1) };
        assert_eq!(refused(ask(save.emit(Sgl::NONE), &mut controller)), 0x10D);
    }

    #[test]
    fn a_shared_namespace_is_not_protected() {
        let mut controller = protecting();
        let ControllerKind::Nvm(subsystem) = &mut controller.role else { panic!() };
        let subsystem = Arc::make_mut(subsystem);
        subsystem.namespaces[0].protection = Protection::none(subsystem.nqn, 1);
        subsystem.namespaces[0].reservation = Reservation::none(subsystem.nqn, 1);
        assert_eq!(refused(ask(set(1, 1), &mut controller)), 0x002);
        assert_eq!(refused(ask(set(NSID_ALL, 1), &mut controller)), 0x002, "none of them");
        assert!(matches!(ask(set(2, 1), &mut controller), Ok(Plan::Protect { .. })));
    }

    #[test]
    fn hosts_cannot_unprotect_a_configured_read_only_namespace() {
        let mut controller = protecting();
        let ControllerKind::Nvm(subsystem) = &mut controller.role else { panic!() };
        Arc::make_mut(subsystem).namespaces[0].read_only = true;
        assert_eq!(ask(get(1, 0), &mut controller), Ok(Plan::Reply(1)));
        assert_eq!(ask(set(1, 1), &mut controller), Ok(Plan::Reply(0)));
        for state in [0, 2, 3] {
            assert_eq!(refused(ask(set(1, state), &mut controller)), 0x10E);
        }
    }

    #[test]
    fn write_protect_fails_on_an_inaccessible_path() {
        let mut controller = protecting();
        controller.association.reach.set(&AnaStates::all(AnaState::INACCESSIBLE));
        for sqe in [get(1, 0), set(1, 1), set(NSID_ALL, 1)] {
            let status = ask(sqe, &mut controller).unwrap_err();
            assert_eq!((status.code(), status.dnr()), (0x302, false));
        }
    }

    /// What another gateway has persisted is not known yet: "nothing to do" may be untrue.
    #[test]
    fn write_protect_fails_while_the_image_is_in_standby() {
        let mut controller = protecting();
        let ControllerKind::Nvm(subsystem) = &controller.role else { panic!() };
        let health = Arc::clone(&subsystem.namespaces[0].health);
        health.set_standby(true);
        for sqe in [get(1, 0), get(1, 1), set(1, 0), set(1, 1), set(NSID_ALL, 0)] {
            let status = ask(sqe, &mut controller).unwrap_err();
            assert_eq!((status.code(), status.dnr()), (0x302, false));
        }
        assert_eq!(ask(get(2, 0), &mut controller), Ok(Plan::Reply(0)));
        health.set_standby(false);
        assert_eq!(ask(set(1, 0), &mut controller), Ok(Plan::Reply(0)));
    }
}
