//! `nvmf resv-register`, `resv-acquire`, `resv-release`, `resv-report`, `resv-notif-log`.

use clap::Args as ClapArgs;
use initiator::{Error, Host};
use nvme::log::{GetLogPage, LogId};
use nvme::reservation::{
    Acquire, AcquireAction, AcquireKeys, ChangePersistence, EXTENDED_STATUS_BYTES,
    ExtendedRegistrant, NotificationPage, Register, RegisterAction, RegisterKeys, Release,
    ReleaseAction, ReleaseKey, Report, ReservationStatus, ReservationType,
};
use nvme::{NSID_ALL, Sgl, Sqe};
use serde_json::Value;

use super::nvme_cli_json::{hex, object};
use super::output::Raw;
use super::{CommonArgs, narrow, number};

/// Options of `nvmf resv-register`.
#[derive(ClapArgs, Debug)]
pub(crate) struct RegisterArgs {
    /// Namespace
    #[arg(long, value_name = "NSID", default_value = "1", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// Current key, to unregister or replace it
    #[arg(short = 'c', long, value_name = "KEY", default_value = "0", value_parser = number)]
    crkey: u64,
    /// New key, to register it or to replace the current one
    #[arg(long, value_name = "KEY", default_value = "0", value_parser = number)]
    nrkey: u64,
    /// What to do: 0 register, 1 unregister, 2 replace
    #[arg(short = 'r', long, default_value = "0", value_parser = clap::value_parser!(u8).range(0..=7))]
    rrega: u8,
    /// Persist through power loss: 0 unchanged, 2 no, 3 yes
    #[arg(short = 'p', long, default_value = "0", value_parser = clap::value_parser!(u8).range(0..=3))]
    cptpl: u8,
    /// Ignore the current key
    #[arg(long)]
    iekey: bool,
}

/// Options of `nvmf resv-acquire`.
#[derive(ClapArgs, Debug)]
pub(crate) struct AcquireArgs {
    /// Namespace
    #[arg(long, value_name = "NSID", default_value = "1", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// Our key
    #[arg(short = 'c', long, value_name = "KEY", default_value = "0", value_parser = number)]
    crkey: u64,
    /// The key to preempt
    #[arg(short = 'p', long, value_name = "KEY", default_value = "0", value_parser = number)]
    prkey: u64,
    /// Type: 1 write exclusive, 2 exclusive access, 3 and 4 the same for registrants only, 5 and 6
    /// for all registrants
    #[arg(long, default_value = "0", value_parser = narrow::<u8>)]
    rtype: u8,
    /// What to do: 0 acquire, 1 preempt, 2 preempt and abort
    #[arg(long, default_value = "0", value_parser = clap::value_parser!(u8).range(0..=7))]
    racqa: u8,
    /// Ignore the current key (controllers since NVMe 1.3 refuse that)
    #[arg(long)]
    iekey: bool,
}

/// Options of `nvmf resv-release`.
#[derive(ClapArgs, Debug)]
pub(crate) struct ReleaseArgs {
    /// Namespace
    #[arg(long, value_name = "NSID", default_value = "1", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// Our key
    #[arg(short = 'c', long, value_name = "KEY", default_value = "0", value_parser = number)]
    crkey: u64,
    /// Type of the reservation, as in resv-acquire
    #[arg(long, default_value = "0", value_parser = narrow::<u8>)]
    rtype: u8,
    /// What to do: 0 release, 1 clear
    #[arg(long, default_value = "0", value_parser = clap::value_parser!(u8).range(0..=7))]
    rrela: u8,
    /// Ignore the current key (controllers since NVMe 1.3 refuse that)
    #[arg(long)]
    iekey: bool,
}

/// Options of `nvmf resv-report`.
#[derive(ClapArgs, Debug)]
pub(crate) struct ReportArgs {
    /// Namespace
    #[arg(long, value_name = "NSID", default_value = "1", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// Dwords to read [default: all there are]
    #[arg(short = 'd', long, value_name = "COUNT", value_parser = dwords)]
    numd: Option<u32>,
    /// Request host identifiers of 128 bits, as required on fabrics
    #[arg(short = 'e', long)]
    eds: bool,
    #[command(flatten)]
    raw: Raw,
}

fn dwords(text: &str) -> Result<u32, String> {
    match narrow::<u32>(text)? {
        count @ 6..=0x4_0000 => Ok(count),
        _ => Err("a report has 6 dwords or more, and 1 MiB at most".into()),
    }
}

pub(crate) fn register(args: &RegisterArgs, common: &CommonArgs) -> Result<(), Error> {
    let how = Register(0)
        .with_action(RegisterAction(args.rrega))
        .with_ignore_key(args.iekey)
        .with_persistence(ChangePersistence(args.cptpl));
    let keys = RegisterKeys { current: args.crkey, new: args.nrkey };
    let sqe = how.emit(args.namespace_id, Sgl::NONE);
    send("Reservation Register", sqe, &keys.emit(), common)?;
    common.done("resv-register", args.namespace_id, "NVME Reservation  success")
}

pub(crate) fn acquire(args: &AcquireArgs, common: &CommonArgs) -> Result<(), Error> {
    let how = Acquire(0)
        .with_action(AcquireAction(args.racqa))
        .with_ignore_key(args.iekey)
        .with_rtype(ReservationType(args.rtype));
    let keys = AcquireKeys { current: args.crkey, preempt: args.prkey };
    let sqe = how.emit(args.namespace_id, Sgl::NONE);
    send("Reservation Acquire", sqe, &keys.emit(), common)?;
    common.done("resv-acquire", args.namespace_id, "NVME Reservation Acquire success")
}

pub(crate) fn release(args: &ReleaseArgs, common: &CommonArgs) -> Result<(), Error> {
    let how = Release(0)
        .with_action(ReleaseAction(args.rrela))
        .with_ignore_key(args.iekey)
        .with_rtype(ReservationType(args.rtype));
    let key = ReleaseKey { current: args.crkey };
    let sqe = how.emit(args.namespace_id, Sgl::NONE);
    send("Reservation Release", sqe, &key.emit(), common)?;
    common.done("resv-release", args.namespace_id, "NVME Reservation Release success")
}

pub(crate) fn report(args: &ReportArgs, common: &CommonArgs) -> Result<(), Error> {
    let bytes = common.with(|host| read_report(host, args))?;
    let Some(status) = bytes.first_chunk().map(ReservationStatus::parse) else {
        return Err(Error::Local("the report is shorter than specified".into()));
    };
    let entries = bytes.get(EXTENDED_STATUS_BYTES..).unwrap_or_default();
    let (entries, _) = entries.as_chunks();
    let entries: Vec<ExtendedRegistrant> =
        entries.iter().map(ExtendedRegistrant::parse).take(status.registrants.into()).collect();
    common.print_or_raw(
        args.raw,
        &bytes,
        || report_document(&status, &entries),
        || report_text(&status, &entries),
    )
}

pub(crate) fn notification(raw: &Raw, common: &CommonArgs) -> Result<(), Error> {
    let page = GetLogPage::new(LogId::RESERVATION_NOTIFICATION, 0, 1);
    let page = GetLogPage { nsid: NSID_ALL, rae: false, ..page };
    let bytes = common.with(|host| host.log(page, NotificationPage::BYTES))?;
    let Some(log) = bytes.first_chunk().map(NotificationPage::parse) else {
        return Err(Error::Local("the log page is shorter than specified".into()));
    };
    let json = || {
        object([
            ("count", log.count.into()),
            ("rn_log_type", log.kind.0.into()),
            ("num_logs", log.waiting.into()),
            ("nsid", log.nsid.into()),
        ])
    };
    let text = || {
        format!(
            "Reservation Notif Log for device: {}\n\
             Log Page Count\t\t\t: {:x}\n\
             Resv Notif Log Page Type\t: {} ({})\n\
             Num of Available Log Pages\t: {}\n\
             Namespace ID:\t\t\t: {:x}\n",
            common.target.traddr, log.count, log.kind.0, log.kind, log.waiting, log.nsid
        )
    };
    common.print_or_raw(*raw, &bytes, json, text)
}

fn send(what: &'static str, sqe: Sqe, data: &[u8], common: &CommonArgs) -> Result<(), Error> {
    common.with(|host| host.command_out(1, what, sqe, data)).map(drop)
}

/// Reads the requested length; by default all of it, as determined from its header.
fn read_report(host: &mut Host, args: &ReportArgs) -> Result<Vec<u8>, Error> {
    let mut read = |bytes: usize| {
        let mut into = vec![0; bytes];
        let report = Report { numd_z: (bytes / 4 - 1) as u32, extended: args.eds };
        let sqe = report.emit(args.namespace_id, Sgl::NONE);
        host.command_in(1, "Reservation Report", sqe, &mut into).map(|_| into)
    };
    if let Some(count) = args.numd {
        return read(count as usize * 4);
    }
    let begin = read(EXTENDED_STATUS_BYTES)?;
    let count = begin.first_chunk().map_or(0, |b| ReservationStatus::parse(b).registrants);
    read(EXTENDED_STATUS_BYTES + usize::from(count) * ExtendedRegistrant::BYTES)
}

fn report_document(status: &ReservationStatus, entries: &[ExtendedRegistrant]) -> Value {
    let entry = |entry: &ExtendedRegistrant| {
        object([
            ("cntlid", entry.cntlid.into()),
            ("rcsts", entry.rcsts.into()),
            ("rkey", entry.key.into()),
            ("hostid", hex(&entry.hostid).into()),
        ])
    };
    object([
        ("gen", status.generation.into()),
        ("rtype", status.rtype.0.into()),
        ("regctl", status.registrants.into()),
        ("ptpls", status.ptpls.into()),
        ("regctlext", entries.iter().map(entry).collect()),
    ])
}

fn report_text(status: &ReservationStatus, entries: &[ExtendedRegistrant]) -> String {
    let mut text = format!(
        "\nNVME Reservation status:\n\n\
         gen       : {}\n\
         rtype     : {} ({})\n\
         regctl    : {}\n\
         ptpls     : {}\n",
        status.generation, status.rtype.0, status.rtype, status.registrants, status.ptpls
    );
    for (index, entry) in entries.iter().enumerate() {
        text += &format!(
            "regctlext[{index}] :\n  cntlid     : {:x}\n  rcsts      : {:x}\n  rkey       : {:x}\n  \
             hostid     : {}\n",
            entry.cntlid,
            entry.rcsts,
            entry.key,
            hex(&entry.hostid)
        );
    }
    text
}
