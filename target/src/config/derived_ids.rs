//! Identifiers of subsystems and namespaces: as configured, else derived from stable names.

use nvme::Nqn;
use uuid::Uuid;

use super::NamespaceKind;
use super::schema::once;
use super::table_reader::{At, TableReader};

/// Name space of derived UUIDs and serial numbers. Never change it: hosts would see other namespaces.
const UUID_SPACE: Uuid = Uuid::from_u128(0x1f0c_a4a5_4d2e_4f1b_9a53_6e76_6d66_6431);

/// Configured identifiers of a namespace.
#[derive(Default)]
pub(super) struct ConfiguredIds {
    pub(super) uuid: Option<Uuid>,
    pub(super) nguid: Option<[u8; 16]>,
    pub(super) eui64: Option<[u8; 8]>,
}

/// Identifiers that may occur only once, with the place of the first.
#[derive(Default)]
pub(super) struct UsedIds {
    uuids: Vec<At<Uuid>>,
    nguids: Vec<At<[u8; 16]>>,
    eui64s: Vec<At<[u8; 8]>>,
}

pub(super) fn identity(section: &mut TableReader<'_>, seen: &mut UsedIds) -> ConfiguredIds {
    ConfiguredIds {
        uuid: uuid(section, &mut seen.uuids),
        nguid: number(section, "nguid", &mut seen.nguids),
        eui64: number(section, "eui64", &mut seen.eui64s),
    }
}

/// The first 20 digits of a hash of the name.
pub(super) fn derived_serial(nqn: &Nqn) -> String {
    let uuid = Uuid::new_v5(&UUID_SPACE, nqn.as_str().as_bytes());
    let mut serial = format!("{:X}", uuid.simple());
    serial.truncate(20);
    serial
}

/// UUID derived from everything that identifies a namespace.
pub(super) fn derived_uuid(nqn: Option<&Nqn>, nsid: u32, kind: &NamespaceKind) -> Uuid {
    let nqn = nqn.map_or("", Nqn::as_str);
    let mut name = format!("{nqn}\0{nsid}\0").into_bytes();
    match kind {
        NamespaceKind::File { path, .. } => name.extend(path.as_os_str().as_encoded_bytes()),
        NamespaceKind::Ram { .. } => name.extend(b"ram"),
        NamespaceKind::Null { .. } => name.extend(b"null"),
        NamespaceKind::Rbd { image, .. } => name.extend(format!("rbd:{image}").into_bytes()),
    }
    Uuid::new_v5(&UUID_SPACE, &name)
}

fn uuid(section: &mut TableReader<'_>, seen: &mut Vec<At<Uuid>>) -> Option<Uuid> {
    let form = "a UUID such as \"f81d4fae-7dec-41d0-a765-00a0c91e6bf6\", or leave `uuid` out";
    let At { value, span } = section.take::<String>("uuid", form)?;
    match Uuid::try_parse(&value) {
        Ok(uuid) if !uuid.is_nil() => {
            let words = ("this UUID", "give each namespace its own, or leave `uuid` out");
            once(seen, uuid, &span, words, section.report);
            Some(uuid)
        }
        _ => {
            section.add(&span, format!("{value:?} is not a UUID"), format!("write {form}"));
            None
        }
    }
}

/// Parses an IEEE identifier: `N` bytes, two digits each, in wire order. Hosts print it that
/// way, some with `.` or `-` in between.
fn number<const N: usize>(
    section: &mut TableReader<'_>,
    key: &'static str,
    seen: &mut Vec<At<[u8; N]>>,
) -> Option<[u8; N]> {
    let form = format!("{} hexadecimal digits in quotes, or leave `{key}` out", N * 2);
    let At { value, span } = section.take::<String>(key, &form)?;
    let digits: Vec<u8> = value.bytes().filter(|byte| !b".-:".contains(byte)).collect();
    let mut bytes = [0; N];
    let mut good = digits.len() == N * 2;
    for (to, two) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let two = str::from_utf8(two).ok().filter(|two| !two.starts_with('+'));
        match two.and_then(|two| u8::from_str_radix(two, 16).ok()) {
            Some(byte) => *to = byte,
            None => good = false,
        }
    }
    if !good || bytes == [0; N] {
        let what = format!("`{key}` is {value:?}, which identifies nothing");
        section.add(&span, what, format!("write {form}"));
        return None;
    }
    let what = format!("this {key}");
    let remedy = format!("give each namespace its own, or leave `{key}` out");
    once(seen, bytes, &span, (&what, &remedy), section.report);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn config(namespaces: &[&str]) -> Result<Config, String> {
        let mut text = "[[listener]]\naddress = \"::\"\n[[subsystem]]\nallow_any_host = true\n\
                        nqn = \"nqn.2026-11.io.nvmfd:x\"\n"
            .to_owned();
        for (nsid, more) in (1..).zip(namespaces) {
            text += &format!(
                "[[subsystem.namespace]]\nnsid = {nsid}\nkind = \"null\"\nsize = \"1MiB\"\n{more}\n"
            );
        }
        Config::parse(&text).map_err(|errors| errors.to_string())
    }

    #[test]
    fn identifiers_are_as_written_or_derived() {
        let config = config(&[
            "nguid = \"0001020304050607-08090a0b0c0d0e0F\"\neui64 = \"00.01.02.03.04.05.06.07\"",
            "uuid = \"f81d4fae-7dec-41d0-a765-00a0c91e6bf6\"",
        ]);
        let config = config.unwrap();
        let [first, second] = &config.subsystems[0].namespaces[..] else { panic!() };
        assert_eq!(first.nguid, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(first.eui64, Some([0, 1, 2, 3, 4, 5, 6, 7]));
        assert_eq!(second.nguid, second.uuid.into_bytes());
        assert_eq!(second.eui64, None);
    }

    #[test]
    fn invalid_identifiers_are_reported() {
        for (key, length) in [("nguid", 32), ("eui64", 16)] {
            let says = |value: &str| config(&[&format!("{key} = \"{value}\"")]).unwrap_err();
            let zeros = "0".repeat(length);
            for bad in ["", "1", &zeros, &"g".repeat(length), &"+1".repeat(length / 2)] {
                let said = says(bad);
                assert!(said.contains(&format!("write {length} hexadecimal digits")), "{said}");
            }
            assert!(!says(&"ü".repeat(length / 2)).is_empty());
            let same = format!("{key} = \"{}\"", "1".repeat(length));
            let said = config(&[&same, &same]).unwrap_err();
            assert!(said.contains(&format!("this {key} is used twice")), "{said}");
        }
    }
}
