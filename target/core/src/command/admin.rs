//! Admin commands other than Fabrics: which are allowed in which state, and their dispatch.
//!
//! Source: NVMe Base Specification 2.0, "Admin Command Set" and "Controller Architecture". The order of
//! checks is the least surprising one: flags, controller state, opcode, namespace, fields, SGL.

use std::time::Instant;

use nvme::persistent_event::TimestampChange;
use nvme::{AdminOpcode, Nqn, Sqe, Status};

use super::{
    CapsuleInfo, Plan, features, format_nvm, identify, lba_status, log_page, no_data, ns_management,
};
use crate::controller::{ABORTS, Controller, ControllerState, discovery};
use crate::subsystem::power::Power;

/// State that the admin queue lends to a command: all that is not part of the controller.
pub struct AdminContext<'a> {
    /// The queue slot that holds the command.
    pub slot: u16,
    /// Transport properties of the capsule.
    pub received: CapsuleInfo,
    /// The time of this turn.
    pub now: Instant,
    /// Power-on time of the target, and how it lost power.
    pub power: Power,
    /// Queries the registry: generation counter, and the records that this host may see; none if they
    /// are those of a generation that is known.
    pub discovery: &'a dyn Fn(Option<u64>) -> Option<(u64, Vec<discovery::Record>)>,
    /// Queries the registry: the live controllers of the subsystem, ascending, with their hosts.
    pub controllers: &'a dyn Fn() -> Vec<(u16, Nqn)>,
}

/// Decides on an admin command that is not a fabrics command ("Admin Command Set").
///
/// # Errors
/// The status to answer with; the controller is unchanged then.
pub fn plan(
    sqe: &Sqe,
    controller: &mut Controller,
    env: &AdminContext<'_>,
) -> Result<Plan, Status> {
    sqe.check_flags()?;
    let opcode = sqe.admin_opcode();
    check_life(opcode, controller.life())?;
    match opcode {
        AdminOpcode::IDENTIFY => identify::plan(sqe, controller, env),
        AdminOpcode::GET_LOG_PAGE => log_page::plan(sqe, controller, env),
        AdminOpcode::GET_FEATURES => features::get(sqe, controller, env),
        AdminOpcode::SET_FEATURES => features::set(sqe, controller, env),
        AdminOpcode::KEEP_ALIVE => keep_alive(sqe, controller),
        AdminOpcode::ASYNC_EVENT_REQUEST => async_event_request(sqe, controller, env.slot),
        AdminOpcode::NAMESPACE_MANAGEMENT | AdminOpcode::NAMESPACE_ATTACHMENT => {
            ns_management::plan(sqe, controller, env.received)
        }
        AdminOpcode::FORMAT_NVM => format_nvm::plan(sqe, controller),
        AdminOpcode::GET_LBA_STATUS => lba_status::plan(sqe, controller, env.received),
        AdminOpcode::ABORT if !controller.is_discovery() => abort(sqe, controller),
        _ => Err(Status::INVALID_OPCODE.with_dnr()),
    }
}

/// Executes a Set Features command whose data were pulled ("Set Features command"). Returns the
/// event that a change of the timestamp is.
///
/// # Errors
/// The status to answer with; the controller is unchanged then.
pub fn set_feature_with_data(
    sqe: &Sqe,
    data: &[u8],
    controller: &mut Controller,
    now: Instant,
) -> Result<Option<TimestampChange>, Status> {
    // The controller may have been reset during the transfer of the data.
    check_life(sqe.admin_opcode(), controller.life())?;
    features::set_with_data(sqe, data, controller, now)
}

/// Checks that the controller is ready; one that was shut down still accepts Keep Alive, so that
/// the host can read its status for as long as it needs ("Keep Alive", "Controller Shutdown").
fn check_life(opcode: AdminOpcode, life: ControllerState) -> Result<(), Status> {
    match (life, opcode) {
        (ControllerState::Ready, _)
        | (
            ControllerState::ShuttingDown | ControllerState::ShutDown | ControllerState::Unflushed,
            AdminOpcode::KEEP_ALIVE,
        ) => Ok(()),
        _ => Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()),
    }
}

/// Keep Alive: its arrival suffices; the queue records traffic of any kind ("Keep Alive command").
fn keep_alive(sqe: &Sqe, controller: &Controller) -> Result<Plan, Status> {
    if controller.kato_ms() == 0 {
        return Err(Status::KEEP_ALIVE_INVALID.with_dnr());
    }
    no_data(sqe)?;
    Ok(Plan::Reply(0))
}

/// Asynchronous Event Request: held until there is an event to report ("Asynchronous Event Request
/// command").
fn async_event_request(sqe: &Sqe, controller: &mut Controller, slot: u16) -> Result<Plan, Status> {
    no_data(sqe)?;
    if !controller.events.park(slot) {
        return Err(Status::AER_LIMIT_EXCEEDED.with_dnr());
    }
    Ok(Plan::Park)
}

/// Abort: best effort by definition, and the response reports the outcome ("Abort command").
fn abort(sqe: &Sqe, controller: &Controller) -> Result<Plan, Status> {
    no_data(sqe)?;
    if controller.aborts.len() == ABORTS {
        return Err(Status::ABORT_LIMIT_EXCEEDED.with_dnr());
    }
    Ok(Plan::Abort { sqid: sqe.cdw10 as u16, cid: (sqe.cdw10 >> 16) as u16 })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use nvme::log::{GetLogPage, LogId};
    use nvme::property::Property;
    use nvme::sqe::Flags;
    use nvme::{Nqn, Sgl};
    use proptest::prelude::*;

    use crate::command::Source;
    use crate::command::admin::*;
    use crate::controller::aer::REQUESTS;
    use crate::controller::association::Association;
    use crate::controller::{ControllerKind, Limits};
    use crate::subsystem;

    pub(crate) const MDTS: u32 = 1 << 20;

    pub(crate) const RECEIVED: CapsuleInfo =
        CapsuleInfo { tail_bytes: 0, in_capsule_bytes: 8192, mdts_bytes: MDTS };

    const SIZES: u64 = 0x46_0000;

    fn controller_host() -> Nqn {
        "nqn.2026-11.io.nvmfd:host".parse().unwrap()
    }

    fn made(role: ControllerKind) -> Controller {
        let nqn: Nqn = "nqn.2026-11.io.nvmfd:test".parse().unwrap();
        let host = controller_host();
        let mut association = Association::new(1, 5, nqn, host, [0xA5; 16]);
        if let ControllerKind::Nvm(subsystem) = &role {
            association.subsystem_usage = Arc::clone(&subsystem.usage);
        }
        let association = Arc::new(association);
        let limits =
            Limits { queue_depth: 128, io_queues: 8, in_capsule_bytes: 8192, mdts_bytes: MDTS };
        let local = "192.0.2.1:4420".parse().unwrap();
        Controller::new(association, role, limits, local, 5000, Instant::now())
    }

    fn enabled(mut controller: Controller) -> Controller {
        configure(&mut controller, SIZES | 1);
        assert_eq!(controller.life(), ControllerState::Ready);
        controller
    }

    fn configure(controller: &mut Controller, cc: u64) {
        controller.set_property(Property::CC, Some(4), cc).unwrap();
    }

    pub(crate) fn nvm() -> Controller {
        enabled(made(ControllerKind::Nvm(Arc::new(subsystem::testing::sample()))))
    }

    pub(crate) fn discovery_controller() -> Controller {
        enabled(made(ControllerKind::Discovery(Box::new(discovery::DiscoveryLog::new(
            Nqn::DISCOVERY,
            &[],
        )))))
    }

    /// With no discovery records, and queue slot 9.
    pub(crate) fn ask(sqe: Sqe, controller: &mut Controller) -> Result<Plan, Status> {
        let discovery = |_| Some((1, Vec::new()));
        let now = Instant::now();
        let power = Power { cycles: 3, on_hours: 5, unsafe_shutdowns: 1, ..Power::default() };
        let other = "nqn.2026-11.io.nvmfd:other".parse().unwrap();
        let controllers = || vec![(5, controller_host()), (8, other)];
        let (received, controllers) = (RECEIVED, &controllers);
        let env =
            AdminContext { slot: 9, received, now, power, discovery: &discovery, controllers };
        plan(&sqe, controller, &env)
    }

    /// The code of a rejection; each has do not retry set.
    #[track_caller]
    pub(crate) fn refused<T: std::fmt::Debug>(result: Result<T, Status>) -> u16 {
        let status = result.expect_err("refused");
        assert!(status.dnr(), "{status}");
        status.code()
    }

    /// The contents of the host's memory.
    #[track_caller]
    pub(crate) fn given(result: Result<Plan, Status>) -> Vec<u8> {
        let Ok(Plan::Give { mut page, to }) = result else { panic!("{result:?}") };
        assert!(page.len() <= to.len as usize);
        page.resize(to.len as usize, 0);
        page
    }

    pub(crate) fn keyed(len: u32) -> Sgl {
        Sgl::keyed(0x1000, len, 0x77, true).unwrap()
    }

    fn command(opcode: u8) -> Sqe {
        Sqe::admin(AdminOpcode(opcode))
    }

    #[test]
    fn invalid_command_flags_are_checked_first() {
        for flags in [0x00, 0x80, 0xC0, 0x41, 0x42, 0x43] {
            for opcode in 0..=u8::MAX {
                let sqe = command(opcode).with_flags(Flags(flags));
                assert_eq!(refused(ask(sqe, &mut made(nvm().role))), 0x002, "{flags:#x}");
            }
        }
    }

    #[test]
    fn only_a_ready_controller_takes_commands() {
        type Reach = fn(&mut Controller);
        let none: Reach = |_| {};
        let lives: [(ControllerState, Reach, bool); 5] = [
            (ControllerState::Disabled, none, false),
            (ControllerState::Failed, |c| configure(c, 1), false),
            (ControllerState::Failed, Controller::fail, false),
            (ControllerState::ShuttingDown, |c| configure(c, SIZES | 0x4001), true),
            (
                ControllerState::ShutDown,
                |c| {
                    configure(c, SIZES | 0x4001);
                    c.shut_down_complete(1, true);
                },
                true,
            ),
        ];
        for (life, reach, kept_alive) in lives {
            let mut controller = match kept_alive {
                true => nvm(),
                false => made(nvm().role),
            };
            reach(&mut controller);
            assert_eq!(controller.life(), life);
            for opcode in (0..=u8::MAX).filter(|o| *o != AdminOpcode::KEEP_ALIVE.0) {
                assert_eq!(refused(ask(command(opcode), &mut controller)), 0x00C, "{life:?}");
            }
            let alive = ask(Sqe::admin(AdminOpcode::KEEP_ALIVE), &mut controller);
            assert_eq!(alive.is_ok(), kept_alive, "{life:?}");
        }
    }

    #[test]
    fn unknown_opcodes_fail_with_invalid_opcode() {
        let served = [0x02, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x18, 0x86];
        let (mut nvm, mut discovery) = (nvm(), discovery_controller());
        for opcode in 0..=u8::MAX {
            let sqe = command(opcode);
            let unknown = |result: &Result<Plan, Status>| match result {
                Err(status) => status.is(Status::INVALID_OPCODE) && status.dnr(),
                Ok(_) => false,
            };
            assert_eq!(unknown(&ask(sqe, &mut nvm)), !served.contains(&opcode), "{opcode:#x}");
            let of_namespaces = [AdminOpcode::ABORT.0, AdminOpcode::GET_LBA_STATUS.0];
            let known = served.contains(&opcode) && !of_namespaces.contains(&opcode);
            assert_eq!(unknown(&ask(sqe, &mut discovery)), !known, "{opcode:#x}");
        }
    }

    #[test]
    fn keep_alive_needs_a_timeout() {
        let sqe = Sqe::admin(AdminOpcode::KEEP_ALIVE);
        for mut controller in [nvm(), discovery_controller()] {
            assert_eq!(ask(sqe.with_nsid(7), &mut controller), Ok(Plan::Reply(0)));
            assert_eq!(refused(ask(sqe.with_sgl(keyed(4)), &mut controller)), 0x00F);
            controller.set_kato_ms(0, Instant::now());
            assert_eq!(refused(ask(sqe, &mut controller)), 0x01A);
        }
    }

    #[test]
    fn event_requests_are_held_up_to_the_limit() {
        let sqe = Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST);
        for mut controller in [nvm(), discovery_controller()] {
            assert_eq!(refused(ask(sqe.with_sgl(keyed(1)), &mut controller)), 0x00F);
            for _ in 0..REQUESTS {
                assert_eq!(ask(sqe.with_nsid(1), &mut controller), Ok(Plan::Park));
            }
            assert_eq!(refused(ask(sqe, &mut controller)), 0x105);
            assert_eq!(controller.events.take_parked().collect::<Vec<_>>(), [9; REQUESTS]);
        }
    }

    #[test]
    fn abort_names_a_queue_and_a_command_and_has_no_data() {
        let sqe = Sqe { cdw10: 0x0003_0001, ..Sqe::admin(AdminOpcode::ABORT) };
        assert_eq!(ask(sqe.with_nsid(3), &mut nvm()), Ok(Plan::Abort { sqid: 1, cid: 3 }));
        assert_eq!(refused(ask(sqe.with_sgl(keyed(16)), &mut nvm())), 0x00F);
    }

    /// "SGL and data length", for a command that reads and for one that has no data.
    #[test]
    fn invalid_sgl_descriptors_are_refused() {
        let log = |sgl| GetLogPage::new(LogId::SMART, 0, 128).emit(sgl);
        let raw = |kind: u8| Sqe {
            dptr: std::array::from_fn(|i| if i == 15 { kind } else { 0 }),
            ..log(Sgl::NONE)
        };
        let mut controller = nvm();
        let table = [
            ("keyed, unknown sub type", raw(0x41), 0x011),
            ("data block that is no offset", raw(0x00), 0x011),
            ("bit bucket", raw(0x10), 0x011),
            ("segment", raw(0x20), 0x011),
            ("last segment", raw(0x30), 0x011),
            ("transport data block", raw(0x50), 0x011),
            ("in the capsule", log(Sgl::in_capsule(0, 512)), 0x002),
            ("empty", log(keyed(0)), 0x00F),
            ("too short", log(keyed(511)), 0x00F),
        ];
        for (what, sqe, code) in table {
            assert_eq!(refused(ask(sqe, &mut controller)), code, "{what}");
        }
        assert_eq!(given(ask(log(keyed(512)), &mut controller)).len(), 512);
        assert_eq!(given(ask(log(keyed(4096)), &mut controller)).len(), 512, "cut");
    }

    /// Arbitrary bytes, and bytes that are nearly commands.
    fn any_sqe() -> impl Strategy<Value = [u8; 64]> {
        let near = (
            prop::array::uniform32(any::<u8>()),
            prop::array::uniform32(any::<u8>()),
            prop::sample::select(vec![0x02u8, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x18, 0x86]),
            prop::sample::select(vec![0u32, 1, 2, 3, 7, 1024, 1025, u32::MAX - 1, u32::MAX]),
            (any::<bool>(), 0u8..0x20, any::<bool>(), 0u32..=0x2_0000),
            prop::sample::select(vec![0x40u8, 0x4F, 0x01]),
        );
        prop_oneof![
            (prop::array::uniform32(any::<u8>()), prop::array::uniform32(any::<u8>()))
                .prop_map(|(a, b)| std::array::from_fn(|i| if i < 32 { a[i] } else { b[i - 32] })),
            near.prop_map(|(a, b, opcode, nsid, (low, id, zero, len), kind)| {
                let random: [u8; 64] =
                    std::array::from_fn(|i| if i < 32 { a[i] } else { b[i - 32] });
                let mut sqe = Sqe::parse(&random).with_flags(Flags::SGL).with_nsid(nsid);
                sqe.opcode = opcode;
                sqe.cdw10 = sqe.cdw10 & 0x03FF_0000 | u32::from(id);
                if low {
                    (sqe.cdw11, sqe.cdw13) = (sqe.cdw11 & 0xFF, 0);
                    sqe.cdw12 &= 0x1FFC;
                }
                if zero {
                    (sqe.cdw11, sqe.cdw12, sqe.cdw13, sqe.cdw14) = (0, 0, 0, 0);
                }
                sqe.dptr[8..12].copy_from_slice(&len.to_le_bytes());
                sqe.dptr[15] = kind;
                sqe.emit()
            }),
        ]
    }

    fn check_bounds(sqe: &Sqe, received: CapsuleInfo, plan: Plan) {
        let sgl_bytes = sqe.sgl().map_or(0, Sgl::len_bytes);
        match plan {
            Plan::Reply(_) | Plan::Park | Plan::Abort { .. } => {}
            Plan::Give { page, to } => {
                assert!(page.len() <= to.len as usize, "a page longer than asked for");
                assert!(to.len <= sgl_bytes && to.len <= received.mdts_bytes);
            }
            Plan::LbaStatus(query) => {
                assert!(query.to.len <= sgl_bytes && query.to.len <= received.mdts_bytes);
                assert!(query.search.at < query.search.end);
                let room = query.search.most * 16 + 8;
                assert!(room <= query.to.len as usize || query.search.most == 0);
            }
            Plan::SetFeature { from } => {
                assert!(from.len_bytes() <= sgl_bytes);
                match from {
                    Source::Capsule { offset, len } => {
                        assert!(u64::from(offset) + u64::from(len) <= received.tail_bytes.into());
                    }
                    Source::Host(remote) => assert!(remote.len <= received.mdts_bytes),
                }
            }
            other => panic!("not the plan of an admin command: {other:?}"),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn any_command_is_answered_within_bounds(
            bytes in any_sqe(),
            tail_bytes in 0u32..=8192,
            mdts_bytes in prop::sample::select(vec![4096u32, 1 << 17, MDTS]),
            discovers: bool,
            data in prop::collection::vec(0u8..3, 0..600),
        ) {
            let sqe = Sqe::parse(&bytes);
            let received = CapsuleInfo { tail_bytes, in_capsule_bytes: 8192, mdts_bytes };
            let mut controller = if discovers { discovery_controller() } else { nvm() };
            let discovery = |_| Some((1, Vec::new()));
            let (now, power) = (Instant::now(), Power::default());
            let controllers = || Vec::new();
            let (slot, controllers) = (0, &controllers);
            let env = AdminContext { slot, received, now, power, discovery: &discovery, controllers };
            match plan(&sqe, &mut controller, &env) {
                Ok(plan) => check_bounds(&sqe, received, plan),
                Err(status) => prop_assert!(status.dnr() && !status.is_success()),
            }
            if let Err(status) = set_feature_with_data(&sqe, &data, &mut controller, now) {
                prop_assert!(status.dnr() && !status.is_success());
            }
        }
    }
}
