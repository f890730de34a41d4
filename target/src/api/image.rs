//! Types for snapshots and clones of images of Ceph RBD.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A snapshot of an image that is served.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ImageSnapshot {
    /// `pool/image@snapshot`, or `pool/namespace/image@snapshot`.
    pub snapshot: String,
    /// The subsystem of the namespace in the image.
    pub subsystem: String,
    /// Its namespace id.
    pub nsid: u32,
    /// The size of the image at that time.
    pub size_bytes: u64,
    /// When it was taken, in seconds since 1970.
    pub created_unix_s: u64,
    /// The cluster refuses its removal until the protection is ended. One that is not protected is
    /// not served.
    pub protected: bool,
    /// The images that share blocks with it; none: they are not known.
    pub clones: Option<Vec<String>>,
}

/// The snapshots of images that are served.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct ImageSnapshots {
    /// Those that are known.
    pub snapshots: Vec<ImageSnapshot>,
    /// What is not known, and why, a sentence each.
    pub errors: Vec<String>,
}

/// Request to take or to remove a snapshot of an image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImageSnapshotRequest {
    /// `pool/image@snapshot`, or `pool/namespace/image@snapshot`.
    pub snapshot: String,
    /// Only report whether that is possible now.
    #[serde(default)]
    pub dry_run: bool,
}

/// Request for an image that shares the blocks of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImageCloneRequest {
    /// `pool/image@snapshot`, or `pool/namespace/image@snapshot`.
    pub snapshot: String,
    /// The image to make: `pool/image`, or `pool/namespace/image`.
    pub clone: String,
    /// Only report what would be made.
    #[serde(default)]
    pub dry_run: bool,
}
