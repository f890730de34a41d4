//! `nvmfctl image`.

use clap::Subcommand;
use hyper::Method;
use nvmfd::api::{ImageCloneRequest, ImageSnapshot, ImageSnapshotRequest, ImageSnapshots};
use nvmfd::config::Size;

use crate::change;
use crate::client::Client;
use crate::namespace::snapshot_text;
use crate::output::{Failure, joined, table};
use crate::time::at_s;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List the snapshots of all images that are served, and their clones
    List,
    /// Take a snapshot of an image as it is at one moment, and protect it; hosts go on
    Snapshot {
        /// Name it: POOL/IMAGE@SNAPSHOT
        snapshot: String,
    },
    /// Make an image of a snapshot, whose blocks it shares
    Clone {
        /// Select the snapshot: POOL/IMAGE@SNAPSHOT
        snapshot: String,
        /// Name the new image: POOL/IMAGE
        clone: String,
    },
    /// Remove a snapshot that has no clones and is not served
    Remove {
        /// Select the snapshot: POOL/IMAGE@SNAPSHOT
        snapshot: String,
    },
}

pub(crate) async fn run(command: Command, client: &Client) -> Result<(), Failure> {
    let dry_run = client.output.dry_run;
    match command {
        Command::List => {
            let listed = client.get::<ImageSnapshots>("/v1/images/snapshots").await?;
            client.output.answer(&listed, |listed| list(&listed.snapshots));
            let errors = listed.0.errors;
            if errors.is_empty() { Ok(()) } else { Err(Failure::new(errors.join("; "))) }
        }
        Command::Snapshot { snapshot } => {
            let wanted = ImageSnapshotRequest { snapshot, dry_run };
            let taken = client.send(Method::POST, "/v1/images/snapshots", &wanted).await?;
            client.output.answer(&taken, snapshot_text);
            Ok(())
        }
        Command::Clone { snapshot, clone } => {
            let wanted = ImageCloneRequest { snapshot, clone, dry_run };
            change::post("/v1/images/clones", &wanted, client).await
        }
        Command::Remove { snapshot } => {
            let wanted = ImageSnapshotRequest { snapshot, dry_run };
            change::post("/v1/images/snapshots/remove", &wanted, client).await
        }
    }
}

fn list(all: &[ImageSnapshot]) -> String {
    let rows = all.iter().map(|each| {
        [
            each.snapshot.clone(),
            Size(each.size_bytes).to_string(),
            at_s(each.created_unix_s),
            if each.protected { "yes" } else { "no" }.to_owned(),
            each.clones.as_ref().map_or("unknown".to_owned(), |clones| joined(clones, "none")),
        ]
    });
    let heads = ["SNAPSHOT", "SIZE", "CREATED", "PROTECTED", "CLONES"];
    table(heads, rows, "no image that is served has a snapshot")
}
