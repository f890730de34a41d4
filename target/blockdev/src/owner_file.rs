//! Owner file of an image on network and cluster file systems (`IMAGE.nvmfd-owner`): prevents two
//! machines from serving one image. Locks of such file systems may be local to a machine, or be
//! lost with a server.
//!
//! It is created with `O_EXCL`, which such file systems support. It never expires: a daemon that
//! resumes after an hour still owns its image. A file left by this machine is recognised, because
//! its process does not exist or the machine has restarted, and is replaced; one of another machine
//! is removed by the administrator only.
//!
//! The lock is taken first. It is valid within a machine, so only one process at a time replaces a
//! file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::{info, warn};

use super::file_system::file_system;
use super::open_error::OpenError;
use crate::durable;
use crate::record::{self, seal, unseal};

/// NFS, CIFS (1, 2 and the old one), FUSE (also virtiofs, GlusterFS), 9p, OCFS2, GFS2, Ceph,
/// Lustre, GPFS, AFS, Coda, BeeGFS, vboxsf.
const OF_SEVERAL_MACHINES: [u32; 15] = [
    0x6969,
    0xff53_4d42,
    0xfe53_4d42,
    0x517b,
    0x6573_5546,
    0x0102_1997,
    0x7461_636f,
    0x0116_1970,
    0x00c3_6400,
    0x0bd0_0bd0,
    0x4750_4653,
    0x5346_414f,
    0x7375_7245,
    0x1983_0326,
    0x786f_4256,
];

/// Whether other machines that do not see our locks may use the file system of a file.
pub(super) fn may_have_other_machines(file: &File) -> bool {
    #[cfg(test)]
    if tests::is_pretended() {
        return true;
    }
    file_system(file).is_some_and(|kind| OF_SEVERAL_MACHINES.contains(&kind))
}

/// Identity of a daemon, as seen from other machines.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Daemon {
    /// `/etc/machine-id`; empty if missing.
    machine: String,
    boot: String,
    process: u32,
    /// Start time of that process in ticks since boot: process ids are reused.
    begun: u64,
    /// Host name, for output.
    host: String,
}

impl Daemon {
    /// The identity of this daemon.
    pub(super) fn this() -> Daemon {
        let text = |path: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            text.trim().replace(char::is_whitespace, "_")
        };
        Daemon {
            machine: text("/etc/machine-id"),
            boot: text("/proc/sys/kernel/random/boot_id"),
            process: process::id(),
            begun: begun(process::id()).unwrap_or(0),
            host: text("/proc/sys/kernel/hostname"),
        }
    }

    /// Whether the owner of a file here has certainly ended, or is `self`, seen from `self`.
    fn outlives(&self, other: &Daemon) -> bool {
        if self.boot == other.boot {
            let is_alive = begun(other.process) == Some(other.begun);
            return !is_alive || self.process == other.process;
        }
        !self.machine.is_empty() && self.machine == other.machine
    }
}

/// Start time of a process, if it exists.
fn begun(process: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field is a name in parentheses, which may contain any characters.
    let rest = &stat[stat.rfind(')')? + 1..];
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// Contents of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
struct OwnerRecord {
    daemon: Daemon,
    /// Seconds since 1970.
    since: u64,
    /// Distinguishes the images that one daemon serves in turn at the same path.
    number: u64,
}

impl record::Record for OwnerRecord {
    const KIND: &'static str = "owner";
    const REMEDY: &'static str = "remove it if no daemon serves the image";

    fn emit(&self) -> String {
        let Daemon { machine, boot, process, begun, host } = &self.daemon;
        let OwnerRecord { since, number, .. } = self;
        format!(
            "machine {machine}\nboot {boot}\nprocess {process}\nbegun {begun}\nhost {host}\nsince \
             {since}\nnumber {number}\n"
        )
    }

    fn parse(body: &str) -> Option<OwnerRecord> {
        let mut lines = body.lines();
        let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
        let daemon = Daemon {
            machine: field("machine")?.to_owned(),
            boot: field("boot")?.to_owned(),
            process: field("process")?.parse().ok()?,
            begun: field("begun")?.parse().ok()?,
            host: field("host")?.to_owned(),
        };
        let (since, number) = (field("since")?.parse().ok()?, field("number")?.parse().ok()?);
        Some(OwnerRecord { daemon, since, number })
    }
}

/// The file, while we own it. Drop may block on a server.
#[derive(Debug)]
pub(super) struct Owner {
    path: PathBuf,
    text: String,
}

impl Owner {
    /// Creates the owner file of an image that we have locked. For a shared image, only checks that
    /// no other machine owns it.
    ///
    /// # Errors
    /// Another daemon owns it, or the file cannot be created.
    pub(super) fn guard(
        image: &Path,
        daemon: &Daemon,
        is_shared: bool,
    ) -> Result<Option<Owner>, OpenError> {
        match is_shared {
            true => Owner::look(image, daemon).map(|()| None),
            false => Owner::take(image, daemon).map(Some),
        }
    }

    /// Creates the owner file of an image that we have locked.
    ///
    /// # Errors
    /// Another daemon owns it, or the file cannot be created.
    fn take(image: &Path, daemon: &Daemon) -> Result<Owner, OpenError> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let path = path_of(image).map_err(|error| unusable(image, &error))?;
        if let Some(stale) = foreign(&path, daemon)? {
            info!("{} is a stale owner file of {stale}: taking it over", path.display());
            durable::remove_file(&path).map_err(|error| unusable(&path, &error))?;
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let text = seal(&OwnerRecord { daemon: daemon.clone(), since, number });
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o644);
        let mut file = match options.open(&path) {
            // Another machine created it meanwhile.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(held(&path, "another nvmfd"));
            }
            outcome => outcome.map_err(|error| unusable(&path, &error))?,
        };
        let owner = Owner { path, text };
        durable::write(&mut file, &owner.path, owner.text.as_bytes())
            .and_then(|()| durable::sync(&file, &owner.path))
            .and_then(|()| durable::sync_directory(owner.path.parent().unwrap_or(Path::new("/"))))
            .map_err(|error| unusable(&owner.path, &error))?;
        Ok(owner)
    }

    /// Checks that no other machine owns an image, without creating a file.
    ///
    /// # Errors
    /// Another daemon owns it.
    fn look(image: &Path, daemon: &Daemon) -> Result<(), OpenError> {
        let path = path_of(image).map_err(|error| unusable(image, &error))?;
        foreign(&path, daemon).map(drop)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // The file may have been removed, and created by another daemon.
        let is_ours = fs::read_to_string(&self.path).is_ok_and(|text| text == self.text);
        if is_ours && let Err(error) = fs::remove_file(&self.path) {
            warn!("{} cannot be removed: {error}", self.path.display());
        }
    }
}

/// Next to the image itself, wherever a link to it is.
fn path_of(image: &Path) -> io::Result<PathBuf> {
    let mut path = fs::canonicalize(image)?.into_os_string();
    path.push(".nvmfd-owner");
    Ok(path.into())
}

/// Describes the owner of a leftover file, if there is one that certainly does not serve the image
/// any more.
///
/// # Errors
/// The owner may still serve the image.
fn foreign(path: &Path, daemon: &Daemon) -> Result<Option<String>, OpenError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == ErrorKind::InvalidData => String::new(),
        Err(error) => return Err(unusable(path, &error)),
    };
    let Ok(record) = unseal::<OwnerRecord>(text.as_bytes()) else {
        return Err(held(path, "some nvmfd (the file is damaged)"));
    };
    let Daemon { machine, process, host, .. } = &record.daemon;
    let since = record.since;
    let owner = format!("process {process} of {host} (machine {machine}) since `date -d @{since}`");
    match daemon.outlives(&record.daemon) {
        true => Ok(Some(owner)),
        false => Err(held(path, &owner)),
    }
}

fn held(path: &Path, by: &str) -> OpenError {
    let sentence = format!(
        "{} says that the image is served by {by}: stop that nvmfd first, and if it was ended without \
         a stop (its machine was switched off), be sure that it does not write any more and remove \
         the file; where several are to serve it, say `shared = true` at each",
        path.display()
    );
    OpenError { sentence, may_pass: true }
}

fn unusable(path: &Path, error: &io::Error) -> OpenError {
    OpenError::new(format!(
        "{}, which keeps nvmfd on other machines from the image, cannot be used: {error}; give the \
         user of nvmfd the right to make files there",
        path.display()
    ))
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    use crate::durable::testing::calls;
    use crate::owner_file::*;

    thread_local! {
        static IS_PRETENDED: Cell<bool> = const { Cell::new(false) };
    }

    pub(super) fn is_pretended() -> bool {
        IS_PRETENDED.get()
    }

    /// While this exists, every file counts as on a file system of several machines.
    pub(crate) struct Pretence;

    impl Drop for Pretence {
        fn drop(&mut self) {
            IS_PRETENDED.set(false);
        }
    }

    pub(crate) fn pretend_several_machines() -> Pretence {
        IS_PRETENDED.set(true);
        Pretence
    }

    /// The owner file of a daemon on another machine.
    pub(crate) fn taken_by_another_machine(image: &Path) -> Owner {
        Owner::take(image, &storage2()).unwrap()
    }

    /// The identity of a daemon on another machine.
    fn storage2() -> Daemon {
        let (machine, boot) = ("f".repeat(32), "other".to_owned());
        Daemon { machine, boot, host: "storage2".to_owned(), ..Daemon::this() }
    }

    fn image() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        fs::write(&path, "").unwrap();
        (directory, path)
    }

    fn refusal(image: &Path, daemon: &Daemon) -> String {
        let refused = Owner::take(image, daemon).unwrap_err();
        assert!(refused.may_pass && Owner::look(image, daemon).is_err());
        refused.sentence
    }

    #[test]
    fn an_image_owned_by_another_machine_is_refused_until_released() {
        let (_directory, path) = image();
        let (this, other) = (Daemon::this(), storage2());
        let (owner, calls) = calls(|| Owner::take(&path, &other).unwrap());
        let name = "disk.img.nvmfd-owner";
        assert_eq!(calls[..2], [format!("write {name}"), format!("sync {name}")]);
        assert!(calls[2].starts_with("sync directory "), "{calls:?}");
        let sentence = refusal(&path, &this);
        for part in [name, "storage2", &other.machine, &this.process.to_string(), "date -d @"] {
            assert!(sentence.contains(part), "{sentence}");
        }
        // By any of its names.
        let link = path.with_file_name("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(refusal(&link, &this).contains("storage2"));
        assert!(Owner::guard(&path, &this, true).is_err(), "nor is it shared with one that is not");
        drop(owner);
        assert!(Owner::guard(&path, &this, true).unwrap().is_none());
        let ours = Owner::guard(&path, &this, false).unwrap();
        assert!(ours.is_some() && Owner::guard(&path, &other, true).is_err());
        drop(ours);
        assert!(!path.with_file_name(name).exists());
    }

    #[test]
    fn only_stale_owner_files_of_this_machine_are_taken_over() {
        let (_directory, path) = image();
        let this = Daemon::this();
        let alive = Daemon { process: 1, begun: begun(1).unwrap(), ..this.clone() };
        let ended = Daemon { begun: this.begun + 1, process: 1, ..this.clone() };
        let before = Daemon { boot: "before".to_owned(), ..alive.clone() };
        let nameless = Daemon { machine: String::new(), ..before.clone() };
        for (left, is_taken) in [
            (&alive, false),
            (&ended, true),
            (&before, !this.machine.is_empty()),
            (&nameless, false),
        ] {
            std::mem::forget(Owner::take(&path, left).unwrap());
            assert_eq!(Owner::look(&path, &this).is_ok(), is_taken, "{left:?}");
            match Owner::take(&path, &this) {
                Ok(owner) => drop(owner),
                Err(_) => fs::remove_file(path_of(&path).unwrap()).unwrap(),
            }
        }
        // A machine without an id is identified by its boot.
        std::mem::forget(Owner::take(&path, &nameless).unwrap());
        let nameless = Daemon { boot: "since".to_owned(), ..nameless };
        assert!(refusal(&path, &nameless).contains("served by"));
    }

    /// The image is opened again while the old file is still owned.
    #[test]
    fn an_owner_file_survives_the_drop_of_an_earlier_owner() {
        let (_directory, path) = image();
        let first = Owner::take(&path, &Daemon::this()).unwrap();
        let second = Owner::take(&path, &Daemon::this()).unwrap();
        drop(first);
        assert!(path_of(&path).unwrap().exists());
        drop(second);
        assert!(!path_of(&path).unwrap().exists());
    }

    #[test]
    fn a_corrupt_owner_file_prevents_takeover() {
        let (_directory, path) = image();
        std::mem::forget(Owner::take(&path, &Daemon::this()).unwrap());
        let at = path_of(&path).unwrap();
        let good = fs::read(&at).unwrap();
        assert!(Owner::look(&path, &Daemon::this()).is_ok());
        for cut in 0..good.len() {
            fs::write(&at, &good[..cut]).unwrap();
            assert!(refusal(&path, &Daemon::this()).contains("is damaged"), "{cut} bytes");
        }
        for at_byte in 0..good.len() {
            let mut bad = good.clone();
            bad[at_byte] ^= 0x80;
            fs::write(&at, bad).unwrap();
            assert!(refusal(&path, &Daemon::this()).contains("is damaged"), "{at_byte}");
        }
    }
}
