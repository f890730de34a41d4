//! Crash points: a test kills its own process between two steps of an operation that has to be
//! crash-consistent.

/// Marks a point between two steps.
pub fn crash_point() {
    #[cfg(any(test, feature = "testing"))]
    testing::crash_point();
}

/// For tests, also of other packages.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use std::cell::RefCell;
    use std::env;
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;
    use std::path::{Path, PathBuf};
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicU32, Ordering};

    use nix::sys::signal::{Signal, raise};

    const DIRECTORY: &str = "NVMFD_TEST_KILLED_DIRECTORY";
    const STEPS: &str = "NVMFD_TEST_KILLED_STEPS";

    /// Crash points left before the process is killed; 0: disabled.
    static LEFT: AtomicU32 = AtomicU32::new(0);

    type Action = Box<dyn FnOnce()>;

    thread_local! {
        /// What runs in this thread, and after how many crash points.
        static NEXT: RefCell<Option<(u32, Action)>> = const { RefCell::new(None) };
    }

    /// Runs `how` at crash point number `step` of this thread, counted from 1.
    pub fn run_before(step: u32, how: impl FnOnce() + 'static) {
        NEXT.set(Some((step, Box::new(how))));
    }

    /// Kills this process at its crash point number `step`, counted from 1.
    pub fn kill_before(step: u32) {
        LEFT.store(step, Ordering::Relaxed);
    }

    /// In a process started by [`run_killed`]: its directory, and the crash point at which it is
    /// killed.
    pub fn killed_process() -> (PathBuf, u32) {
        let directory = env::var_os(DIRECTORY).expect("run by another test");
        let steps = env::var(STEPS).expect("run by another test");
        (directory.into(), steps.parse().unwrap())
    }

    /// Runs the test `own` in a process that is killed at crash point number `steps`. Returns how
    /// many lines with "done" it printed, and whether it was killed before its end.
    pub fn run_killed(own: &str, directory: &Path, steps: u32) -> (usize, bool) {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", own, "--ignored", "--nocapture", "--test-threads=1"])
            .env(DIRECTORY, directory)
            .env(STEPS, steps.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // The first line follows the name of the test on the same line.
        let done = lines.filter(|line| line.as_ref().unwrap().contains("done ")).count();
        let status = child.wait().unwrap();
        assert!(status.success() || status.signal() == Some(libc::SIGKILL), "{status}");
        (done, !status.success())
    }

    pub(super) fn crash_point() {
        if LEFT.load(Ordering::Relaxed) > 0 && LEFT.fetch_sub(1, Ordering::Relaxed) == 1 {
            raise(Signal::SIGKILL).unwrap();
        }
        match NEXT.take() {
            Some((..=1, how)) => how(),
            Some((steps, how)) => NEXT.set(Some((steps - 1, how))),
            None => {}
        }
    }
}
