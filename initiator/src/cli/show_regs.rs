//! `nvmf show-regs`: the properties of the controller.

use initiator::{Error, Host};
use nvme::Status;
use nvme::fabrics::PropertyGet;
use nvme::property::Property;
use serde_json::{Map, Value};

use super::CommonArgs;

/// nvme-cli's names in its order, whether 8 bytes wide, and the offset of those that a controller
/// over a fabric may have.
const REGISTERS: [(&str, bool, Option<Property>); 25] = [
    ("cap", true, Some(Property::CAP)),
    ("vs", false, Some(Property::VS)),
    ("intms", false, None),
    ("intmc", false, None),
    ("cc", false, Some(Property::CC)),
    ("csts", false, Some(Property::CSTS)),
    ("nssr", false, Some(Property::NSSR)),
    ("crto", false, Some(Property::CRTO)),
    ("aqa", false, None),
    ("asq", true, None),
    ("acq", true, None),
    ("cmbloc", false, None),
    ("cmbsz", false, None),
    ("bpinfo", false, None),
    ("bprsel", false, None),
    ("bpmbl", true, None),
    ("cmbmsc", true, None),
    ("cmbsts", false, None),
    ("pmrcap", false, None),
    ("pmrctl", false, None),
    ("pmrsts", false, None),
    ("pmrebs", false, None),
    ("pmrswtp", false, None),
    ("pmrmscl", false, None),
    ("pmrmscu", false, None),
];

pub(crate) fn run((): &(), common: &CommonArgs) -> Result<(), Error> {
    let values: Vec<_> = common
        .with(|host| REGISTERS.iter().map(|(.., property)| value(host, *property)).collect())?;
    common.print(|| json(&values), || text(&values))
}

/// Gets a property, unless the controller does not have it.
fn value(host: &mut Host, property: Option<Property>) -> Result<Option<u64>, Error> {
    let Some(property) = property else { return Ok(None) };
    match host.property(PropertyGet::new(property)) {
        Ok(value) => Ok(Some(value)),
        Err(Error::Status { status, .. }) if status.is(Status::INVALID_FIELD) => Ok(None),
        Err(error) => Err(error),
    }
}

/// All ones for missing properties, which nvme-cli prints as -1 if they have 32 bits.
fn json(values: &[Option<u64>]) -> Value {
    let fields: Map<String, Value> = REGISTERS
        .iter()
        .zip(values)
        .map(|((name, wide, _), value)| {
            let value = match (value, wide) {
                (Some(value), _) => (*value).into(),
                (None, true) => u64::MAX.into(),
                (None, false) => (-1).into(),
            };
            ((*name).to_owned(), value)
        })
        .collect();
    Value::Object(fields)
}

fn text(values: &[Option<u64>]) -> String {
    let there =
        REGISTERS.iter().zip(values).filter_map(|((name, ..), value)| Some((name, (*value)?)));
    there
        .map(|(name, value)| {
            let name = if *name == "vs" { "version" } else { name };
            format!("{name:<8}: {value:x}\n")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use crate::cli::show_regs::*;

    #[test]
    fn registers_are_as_nvme_cli_prints_them() {
        let there = [("cap", 0x0820_1601_0401), ("vs", 0x1_0400), ("cc", 0x46_0001), ("csts", 1)];
        let values: Vec<Option<u64>> = REGISTERS
            .iter()
            .map(|(name, ..)| match *name {
                "nssr" => Some(0),
                name => there.iter().find(|(each, _)| *each == name).map(|(_, value)| *value),
            })
            .collect();
        let expected: Value =
            serde_json::from_str(include_str!("../../tests/nvme-cli/show-regs.json"))
                .expect("JSON");
        assert_eq!(format!("{:#}", json(&values)), format!("{expected:#}"));
        assert_eq!(
            text(&values),
            "cap     : 82016010401\nversion : 10400\ncc      : 460001\ncsts    : 1\nnssr    : 0\n"
        );
    }
}
