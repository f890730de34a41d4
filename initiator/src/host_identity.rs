//! Host NQN and host identifier from `/etc/nvme`, as in nvme-cli.

use std::fs;
use std::path::Path;

use nvme::Nqn;

use crate::Error;

/// File with the NQN of this host.
const HOSTNQN: &str = "/etc/nvme/hostnqn";
/// File with the identifier of this host.
const HOSTID: &str = "/etc/nvme/hostid";

/// Returns the NQN and identifier of this host: as given, else from the files, else random. A random NQN is
/// valid for one run only, so it is not in the list of a target that restricts access.
pub(crate) fn host(nqn: Option<&str>, id: Option<&str>) -> Result<(Nqn, [u8; 16]), Error> {
    resolve(nqn, id, Path::new(HOSTNQN), Path::new(HOSTID))
}

fn resolve(
    nqn: Option<&str>,
    id: Option<&str>,
    nqn_file: &Path,
    id_file: &Path,
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
    let id = id.or(in_name).unwrap_or_else(|| uuid::Uuid::new_v4().into_bytes());
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

fn uuid(text: &str) -> Option<[u8; 16]> {
    uuid::Uuid::parse_str(text).ok().map(uuid::Uuid::into_bytes)
}

#[cfg(test)]
mod tests {
    use crate::host_identity::*;

    const ID: &str = "0f01c4e2-9bd8-4b7e-8b0b-2d6ef5a3f0aa";

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
        resolve(nqn, id, &nqn_file, &id_file)
    }

    #[test]
    fn the_command_line_wins_over_the_files() {
        let (nqn, id) = with_files(Some("nqn.2014-08.org.a\n"), Some(&format!("{ID}\n"))).unwrap();
        assert_eq!((nqn.as_str(), id), ("nqn.2014-08.org.a", uuid(ID).unwrap()));
        let (nqn, _) = given(Some("nqn.b"), None, Some("nqn.a"), Some(ID)).unwrap();
        assert_eq!(nqn.as_str(), "nqn.b");
    }

    #[test]
    fn what_is_missing_is_taken_from_the_other_or_made_up() {
        let name = format!("{}{ID}", Nqn::UUID_PREFIX);
        assert_eq!(with_files(Some(&name), None).unwrap().1, uuid(ID).unwrap());
        assert_eq!(with_files(None, Some(ID)).unwrap().0.as_str(), name);
        let (one, other) = (with_files(None, None).unwrap(), with_files(Some("\n"), None).unwrap());
        assert_ne!(one, other);
        assert!(one.0.as_str().starts_with(Nqn::UUID_PREFIX));
    }

    #[test]
    fn what_is_no_name_is_told_with_its_place() {
        let error = given(None, Some("me"), None, None).unwrap_err().to_string();
        assert!(error.starts_with("--hostid: \"me\" is no UUID"), "{error}");
        let error = with_files(Some("host name"), None).unwrap_err().to_string();
        assert!(error.contains("hostnqn: \"host name\": byte 4"), "{error}");
    }
}
