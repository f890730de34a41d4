//! Signals as requests to the control plane.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::ControlRequest;

/// Handles SIGTERM and SIGINT as requests to stop, and SIGHUP as a request to reload; none kills
/// the process.
pub(super) fn listen() -> io::Result<mpsc::Receiver<ControlRequest>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let (asks, heard) = mpsc::channel(4);
    tokio::spawn(async move {
        loop {
            let ask = tokio::select! {
                Some(()) = terminate.recv() => ControlRequest::Stop,
                Some(()) = interrupt.recv() => ControlRequest::Stop,
                Some(()) = hang_up.recv() => ControlRequest::Reload,
                else => return,
            };
            if asks.send(ask).await.is_err() {
                return;
            }
        }
    });
    Ok(heard)
}
