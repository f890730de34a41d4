//! Host NQN and host identifier from `/etc/nvme`, as in nvme-cli, or from the identity of the machine.

use std::fs;
use std::path::Path;

use nvme::Nqn;

use crate::Error;

/// File with the NQN of this host.
const HOSTNQN: &str = "/etc/nvme/hostnqn";
/// File with the identifier of this host.
const HOSTID: &str = "/etc/nvme/hostid";

/// Identifier of this installation, as in machine-id(5); any user may read it.
const MACHINE_ID: &str = "/etc/machine-id";
/// UUID of this machine in its firmware (DMI), which only root may read; or a file like it.
const FIRMWARE_UUIDS: [&str; 2] =
    ["/sys/class/dmi/id/product_uuid", "/proc/device-tree/ibm,partition-uuid"];

/// Returns the NQN and identifier of this host: as given, else from the files, else of the machine.
pub(crate) fn host(nqn: Option<&str>, id: Option<&str>) -> Result<(Nqn, [u8; 16]), Error> {
    resolve(nqn, id, Path::new(HOSTNQN), Path::new(HOSTID), || {
        let firmware = FIRMWARE_UUIDS.map(Path::new);
        machine(Path::new(MACHINE_ID), &firmware).unwrap_or_else(|| {
            tracing::error!(
                "this machine has no /etc/machine-id, so its host NQN is valid for one run only: \
                 give one with --hostnqn"
            );
            uuid::Uuid::new_v4().into_bytes()
        })
    })
}

/// The identifier that this machine keeps over runs, the same for each of its users.
///
/// The UUID of the firmware, from which libnvme generates a host NQN, is the second choice: only root
/// may read it, and root and a user would have two names. The machine id itself is to be confidential,
/// so what hosts see is derived from it.
fn machine(machine_id: &Path, firmware: &[&Path]) -> Option<[u8; 16]> {
    let read = |file: &Path| uuid(fs::read_to_string(file).ok()?.trim_matches(['\0', '\n', ' ']));
    let derived = |id| uuid::Uuid::new_v5(&uuid::Uuid::from_bytes(id), b"NVMe host").into_bytes();
    read(machine_id).map(derived).or_else(|| firmware.iter().find_map(|file| read(file)))
}

fn resolve(
    nqn: Option<&str>,
    id: Option<&str>,
    nqn_file: &Path,
    id_file: &Path,
    of_machine: impl FnOnce() -> [u8; 16],
) -> Result<(Nqn, [u8; 16]), Error> {
    let (nqn_text, nqn_from) = given_or(nqn, "--hostnqn", nqn_file)?;
    let (id_text, id_from) = given_or(id, "--hostid", id_file)?;
    let id = match id_text {
        Some(text) => Some(uuid(&text).ok_or_else(|| {
            Error::Usage(format!(
                "{id_from}: {text:?} is no UUID, such as 0f01c4e2-9bd8-4b7e-8b0b-2d6ef5a3f0aa"
            ))
        })?),
        None => None,
    };
    let nqn = match nqn_text {
        Some(text) => {
            Some(Nqn::new(&text).map_err(|e| Error::Usage(format!("{nqn_from}: {text:?}: {e}")))?)
        }
        None => None,
    };
    // As in nvme-cli: the identifier from the NQN, if only one of them is known.
    let in_name = nqn.and_then(|nqn| uuid(nqn.as_str().strip_prefix(Nqn::UUID_PREFIX)?));
    let id = id.or(in_name).unwrap_or_else(of_machine);
    let nqn = match nqn {
        Some(nqn) => nqn,
        None => {
            let name = format!("{}{}", Nqn::UUID_PREFIX, uuid::Uuid::from_bytes(id));
            Nqn::new(&name).map_err(|e| Error::Local(e.to_string()))?
        }
    };
    Ok((nqn, id))
}

/// Returns the given value, or the first line of the file if it exists; and its origin.
fn given_or(
    given: Option<&str>,
    option: &'static str,
    file: &Path,
) -> Result<(Option<String>, String), Error> {
    if let Some(given) = given {
        return Ok((Some(given.to_owned()), option.to_owned()));
    }
    let name = file.display().to_string();
    match fs::read_to_string(file) {
        Ok(text) => {
            let line = text.lines().next().unwrap_or_default().trim();
            Ok(((!line.is_empty()).then(|| line.to_owned()), name))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok((None, name)),
        Err(error) => Err(Error::Local(format!("{name} cannot be read: {error}"))),
    }
}

/// All bits alike are the fields of a machine that was never given one.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let uuid = uuid::Uuid::parse_str(text).ok()?;
    (!uuid.is_nil() && !uuid.is_max()).then(|| uuid.into_bytes())
}

#[cfg(test)]
mod tests {
    use crate::host_identity::*;

    const ID: &str = "0f01c4e2-9bd8-4b7e-8b0b-2d6ef5a3f0aa";
    const MACHINE: [u8; 16] = [7; 16];

    fn with_files(nqn: Option<&str>, id: Option<&str>) -> Result<(Nqn, [u8; 16]), Error> {
        given(None, None, nqn, id)
    }

    fn given(
        nqn: Option<&str>,
        id: Option<&str>,
        nqn_text: Option<&str>,
        id_text: Option<&str>,
    ) -> Result<(Nqn, [u8; 16]), Error> {
        let directory = tempfile::tempdir().unwrap();
        let (nqn_file, id_file) =
            (directory.path().join("hostnqn"), directory.path().join("hostid"));
        nqn_text.into_iter().for_each(|text| fs::write(&nqn_file, text).unwrap());
        id_text.into_iter().for_each(|text| fs::write(&id_file, text).unwrap());
        resolve(nqn, id, &nqn_file, &id_file, || MACHINE)
    }

    #[test]
    fn the_command_line_wins_over_the_files() {
        let (nqn, id) = with_files(Some("nqn.2014-08.org.a\n"), Some(&format!("{ID}\n"))).unwrap();
        assert_eq!((nqn.as_str(), id), ("nqn.2014-08.org.a", uuid(ID).unwrap()));
        let (nqn, _) = given(Some("nqn.b"), None, Some("nqn.a"), Some(ID)).unwrap();
        assert_eq!(nqn.as_str(), "nqn.b");
    }

    #[test]
    fn a_missing_hostnqn_or_hostid_is_derived() {
        let name = format!("{}{ID}", Nqn::UUID_PREFIX);
        assert_eq!(with_files(Some(&name), None).unwrap().1, uuid(ID).unwrap());
        assert_eq!(with_files(None, Some(ID)).unwrap().0.as_str(), name);
        let (nqn, id) = with_files(Some("\n"), None).unwrap();
        assert_eq!(
            nqn.as_str(),
            format!("{}{}", Nqn::UUID_PREFIX, uuid::Uuid::from_bytes(MACHINE))
        );
        assert_eq!(id, MACHINE);
    }

    #[test]
    fn machine_derived_hostid_is_stable_and_hides_the_machine_id() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let (machine_id, firmware) = (path("machine-id"), path("product_uuid"));
        let of = || machine(&machine_id, &[&path("missing"), &firmware]);
        assert_eq!(of(), None);
        fs::write(&firmware, format!("{ID}\n")).unwrap();
        assert_eq!(of(), uuid(ID));
        for none in ["uninitialized\n", "", "00000000000000000000000000000000\n"] {
            fs::write(&machine_id, none).unwrap();
            assert_eq!(of(), uuid(ID));
        }
        fs::write(&machine_id, "4a1f0bd9cc4b4a0e9d3c2f6c1f2e7b55\n").unwrap();
        let name = uuid::Uuid::from_bytes(of().unwrap()).to_string();
        assert_eq!(name, uuid::Uuid::from_bytes(of().unwrap()).to_string());
        assert_eq!(name, "9d06e1f2-995d-56de-8315-b6e4ccc2e33c");
    }

    #[test]
    fn invalid_names_are_reported_with_their_source() {
        let error = given(None, Some("me"), None, None).unwrap_err().to_string();
        assert!(error.starts_with("--hostid: \"me\" is no UUID"), "{error}");
        let error = with_files(Some("host name"), None).unwrap_err().to_string();
        assert!(error.contains("hostnqn: \"host name\": byte 4"), "{error}");
    }
}
