//! `nvmf get-feature`, `set-feature`.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use initiator::Error;
use nvme::feature::{
    AsyncEventConfig, Capabilities, FeatureId, GetFeatures, KeepAliveTimer, NumberOfQueues, Select,
    SetFeatures, TemperatureThreshold, Timestamp, VolatileWriteCache,
};
use serde_json::Value;

use super::nvme_cli_json::{hex, object};
use super::output::{Raw, dump};
use super::read_write::input;
use super::{CommonArgs, narrow};

/// Options of `nvmf get-feature`.
#[derive(ClapArgs, Debug)]
pub(crate) struct GetArgs {
    /// Feature identifier
    #[arg(short = 'f', long, value_name = "FID", value_parser = narrow::<u8>)]
    feature_id: u8,
    /// Which value: 0 current, 1 default, 2 saved, 3 supported capabilities
    #[arg(long, default_value = "0", value_parser = clap::value_parser!(u8).range(0..=3))]
    sel: u8,
    /// Namespace, for a feature that each has
    #[arg(long, value_name = "NSID", default_value = "0", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// Bytes of its data [default: as specified for the feature]
    #[arg(short = 'l', long, value_name = "BYTES", value_parser = data_length)]
    data_len: Option<u32>,
    /// Dword 11
    #[arg(long, default_value = "0", value_parser = narrow::<u32>)]
    cdw11: u32,
    /// Explain the value
    #[arg(short = 'H', long)]
    human_readable: bool,
    #[command(flatten)]
    raw: Raw,
}

/// Options of `nvmf set-feature`.
#[derive(ClapArgs, Debug)]
pub(crate) struct SetArgs {
    /// Feature identifier
    #[arg(short = 'f', long, value_name = "FID", value_parser = narrow::<u8>)]
    feature_id: u8,
    /// Its value: dword 11
    #[arg(short = 'v', long, value_parser = narrow::<u32>)]
    value: u32,
    /// Dword 12
    #[arg(long, default_value = "0", value_parser = narrow::<u32>)]
    cdw12: u32,
    /// Namespace, for a feature that each has
    #[arg(long, value_name = "NSID", default_value = "0", value_parser = narrow::<u32>)]
    namespace_id: u32,
    /// Bytes of its data [default: as specified for the feature]
    #[arg(short = 'l', long, value_name = "BYTES", value_parser = data_length)]
    data_len: Option<u32>,
    /// File with its data [default: standard input]
    #[arg(short = 'd', long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Keep the value through power loss and reset
    #[arg(long)]
    save: bool,
}

fn data_length(text: &str) -> Result<u32, String> {
    match narrow::<u32>(text)? {
        len @ 0..=0x10_0000 => Ok(len),
        _ => Err("no feature has more than 1 MiB".into()),
    }
}

/// Number of data bytes of a feature.
fn usual_length(fid: FeatureId) -> u32 {
    match fid {
        FeatureId::LBA_RANGE_TYPE => 4096,
        FeatureId::AUTONOMOUS_POWER_STATE => 256,
        FeatureId::TIMESTAMP => 8,
        FeatureId::HOST_BEHAVIOR => 512,
        FeatureId::HOST_IDENTIFIER => 16,
        _ => 0,
    }
}

pub(crate) fn get(args: &GetArgs, common: &CommonArgs) -> Result<(), Error> {
    let fid = FeatureId(args.feature_id);
    let sel = Select(args.sel);
    let usual = if sel == Select::CAPABILITIES { 0 } else { usual_length(fid) };
    let mut data = vec![0; args.data_len.unwrap_or(usual) as usize];
    // Over a fabric the host identifier always has 16 bytes, and must be requested with that length.
    let wide = fid == FeatureId::HOST_IDENTIFIER && data.len() == 16;
    let cdw11 = args.cdw11 | u32::from(wide);
    let feature = GetFeatures { fid, sel, nsid: args.namespace_id, cdw11 };
    let value = common.with(|host| host.feature(feature, &mut data))?;
    let json = || {
        let mut fields = vec![("name", name(fid).into())];
        fields.push((select_name(sel), format!("{value:#010x}").into()));
        if !data.is_empty() {
            fields.push(("data", hex(&data).into()));
        }
        let fields: serde_json::Map<String, Value> =
            fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let key = format!("feature: {:#04x}", fid.0);
        object([(key.as_str(), vec![Value::Object(fields)].into())])
    };
    let text = || {
        let (name, which) = (name(fid), select_name(sel));
        let mut text =
            format!("get-feature:{:#04x} ({name}), {which} value:{value:#010x}\n", fid.0);
        if args.human_readable {
            text += &explained(fid, sel, value, &data);
        }
        if !data.is_empty() {
            text += &dump(&data);
        }
        text
    };
    common.print_or_raw(args.raw, &data, json, text)
}

pub(crate) fn set(args: &SetArgs, common: &CommonArgs) -> Result<(), Error> {
    let fid = FeatureId(args.feature_id);
    let len = args.data_len.unwrap_or(usual_length(fid)) as usize;
    let data = match len {
        0 => Vec::new(),
        len => input(args.data.as_deref(), Some(len))?,
    };
    let feature = SetFeatures { fid, save: args.save, nsid: args.namespace_id, cdw11: args.value };
    let result = common.with(|host| host.set_feature(feature, args.cdw12, &data))?;
    let json = || {
        object([
            ("feature-id", fid.0.into()),
            ("name", name(fid).into()),
            ("value", args.value.into()),
            ("cdw12", args.cdw12.into()),
            ("save", args.save.into()),
            ("result", result.into()),
        ])
    };
    let text = || {
        format!(
            "set-feature:{:#04x} ({}), value:{:#010x}, cdw12:{:#010x}, save:{}\n",
            fid.0,
            name(fid),
            args.value,
            args.cdw12,
            u8::from(args.save)
        )
    };
    common.print(json, text)
}

fn name(fid: FeatureId) -> &'static str {
    fid.name().unwrap_or("Unknown")
}

fn select_name(sel: Select) -> &'static str {
    match sel {
        Select::CURRENT => "Current",
        Select::DEFAULT => "Default",
        Select::SAVED => "Saved",
        _ => "Supported capabilities",
    }
}

/// Explains the bits of the features that nvmfd supports.
fn explained(fid: FeatureId, sel: Select, value: u32, data: &[u8]) -> String {
    let enabled = |on: bool| if on { "enabled" } else { "disabled" };
    if sel == Select::CAPABILITIES {
        let can = Capabilities(value);
        return format!(
            "\tsaveable: {}, namespace specific: {}, changeable: {}\n",
            can.saveable(),
            can.namespace_specific(),
            can.changeable()
        );
    }
    match fid {
        FeatureId::VOLATILE_WRITE_CACHE => {
            let on = VolatileWriteCache(value).wce();
            format!("\tVolatile Write Cache Enable (WCE): {}\n", enabled(on))
        }
        FeatureId::NUMBER_OF_QUEUES => {
            let count = NumberOfQueues(value);
            format!(
                "\tNumber of IO Completion Queues Allocated (NCQA): {}\n\
                 \tNumber of IO Submission Queues Allocated (NSQA): {}\n",
                u32::from(count.completion_z()) + 1,
                u32::from(count.submission_z()) + 1
            )
        }
        FeatureId::ASYNC_EVENT_CONFIG => {
            let config = AsyncEventConfig(value);
            format!(
                "\tSMART / Health Critical Warnings: {:#04x}\n\
                 \tNamespace Attribute Notices: {}\n\
                 \tFirmware Activation Notices: {}\n\
                 \tAsymmetric Namespace Access Change Notices: {}\n\
                 \tDiscovery Log Page Change Notices: {}\n",
                config.smart_warnings(),
                enabled(config.namespace_attribute()),
                enabled(config.firmware_activation()),
                enabled(config.ana_change()),
                enabled(config.discovery_log())
            )
        }
        FeatureId::KEEP_ALIVE_TIMER => {
            format!("\tKeep Alive Timeout (KATO): {} ms\n", KeepAliveTimer(value).kato_ms())
        }
        FeatureId::TEMPERATURE_THRESHOLD => {
            let threshold = TemperatureThreshold(value).threshold_k();
            format!("\tTemperature Threshold (TMPTH): {} °C\n", i32::from(threshold) - 273)
        }
        FeatureId::TIMESTAMP => match data.first_chunk().map(Timestamp::parse) {
            Some(stamp) => timestamp(&stamp),
            None => String::new(),
        },
        _ => String::new(),
    }
}

/// The fields of a timestamp ("Timestamp (Feature Identifier 0Eh)").
fn timestamp(stamp: &Timestamp) -> String {
    let origin = match stamp.origin() {
        Timestamp::ORIGIN_RESET => "counted since a Controller Level Reset",
        Timestamp::ORIGIN_HOST => "set by a host, in ms since 1970",
        _ => "reserved",
    };
    let synch = if stamp.may_have_stopped() { "may have stopped" } else { "counted continuously" };
    format!("\tTimestamp: {} ms ({origin}; {synch})\n", stamp.ms())
}
