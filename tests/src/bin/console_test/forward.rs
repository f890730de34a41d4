//! Forwards an address to a Unix socket, as `ssh -L` does.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;

/// Forwards connections of an address until the process ends.
pub(crate) fn forward(address: &str, socket: PathBuf) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            // Without a daemon the connection is closed.
            if let Ok(daemon) = UnixStream::connect(&socket) {
                let _ = join(client, daemon);
            }
        }
    });
    Ok(())
}

fn join(client: TcpStream, daemon: UnixStream) -> io::Result<()> {
    let (mut requests, mut to_daemon) = (client.try_clone()?, daemon.try_clone()?);
    thread::spawn(move || {
        let _ = io::copy(&mut requests, &mut to_daemon);
        let _ = to_daemon.shutdown(Shutdown::Write);
    });
    let (mut responses, mut to_client) = (daemon, client);
    thread::spawn(move || {
        let _ = io::copy(&mut responses, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
    });
    Ok(())
}
