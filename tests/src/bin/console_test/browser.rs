//! A headless Chromium, driven by the DevTools protocol over two pipes (`--remote-debugging-pipe`).

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use base64ct::{Base64, Encoding};
use serde_json::{Value, json};

/// Time limit of everything that is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// A browser with one page.
pub(crate) struct Browser {
    process: Child,
    commands: ChildStdin,
    messages: Receiver<Value>,
    session: Value,
    number: u64,
    /// Exceptions of scripts and refused resources, as the page had them.
    pub(crate) complaints: Vec<String>,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Browser {
    /// Starts the program with an empty page; its profile is in `directory`.
    pub(crate) fn start(program: &str, directory: &Path) -> Result<Browser, String> {
        let mut profile = std::ffi::OsString::from("--user-data-dir=");
        profile.push(directory.join("profile"));
        // The pipes are descriptors 3 and 4. The sandbox needs privileges; only our page is opened.
        let mut process = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >&2 2>browser.log", program])
            .args(["--remote-debugging-pipe", "--headless", "--no-sandbox", "--disable-gpu"])
            .args(["--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"])
            .arg(profile)
            .env("HOME", directory)
            .current_dir(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{program}: {error}"))?;
        let (Some(commands), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("no pipes".to_owned());
        };
        let messages = read(output);
        let mut browser = Browser {
            process,
            commands,
            messages,
            session: Value::Null,
            number: 0,
            complaints: Vec::new(),
        };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        browser.session = browser.call("Target.attachToTarget", &attach)?["sessionId"].take();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, &json!({}))?;
        }
        Ok(browser)
    }

    pub(crate) fn call(&mut self, method: &str, params: &Value) -> Result<Value, String> {
        self.number += 1;
        let mut message = json!({ "id": self.number, "method": method, "params": params });
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        let sent = self.commands.write_all(format!("{message}\0").as_bytes());
        sent.map_err(|error| format!("{method}: {error}"))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut message = self.messages.recv_timeout(left).map_err(|error| match error {
                RecvTimeoutError::Timeout => format!("{method}: no response"),
                RecvTimeoutError::Disconnected => format!("{method}: the browser has ended"),
            })?;
            if message["id"] == self.number {
                return match message["error"].take() {
                    Value::Null => Ok(message["result"].take()),
                    error => Err(format!("{method}: {error}")),
                };
            }
            self.note(&message);
        }
    }

    fn note(&mut self, message: &Value) {
        let params = &message["params"];
        let complaint = match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => &params["exceptionDetails"],
            Some("Log.entryAdded") if params["entry"]["level"] == "error" => &params["entry"],
            _ => return,
        };
        self.complaints.push(complaint.to_string());
    }

    /// Opens a page, and waits until it has replaced the one before.
    pub(crate) fn open(&mut self, url: &str) -> Result<(), String> {
        let result = self.call("Page.navigate", &json!({ "url": url }))?;
        if let Some(error) = result["errorText"].as_str() {
            return Err(format!("{url}: {error}"));
        }
        let (is_loaded, report) = ("document.readyState === 'complete'", "location.href");
        self.wait(&format!("{report} === {} && {is_loaded}", json!(url)), report)
    }

    /// The value of an expression, or of the promise that it is.
    pub(crate) fn value(&mut self, expression: &str) -> Result<Value, String> {
        let params = json!({
            "expression": expression, "returnByValue": true, "awaitPromise": true,
        });
        let mut result = self.call("Runtime.evaluate", &params)?;
        match &result["exceptionDetails"] {
            Value::Null => Ok(result["result"]["value"].take()),
            details => Err(format!("{expression}: {details}")),
        }
    }

    /// Waits until an expression is true; if it never is, reports another one.
    pub(crate) fn wait(&mut self, expression: &str, report: &str) -> Result<(), String> {
        let deadline = Instant::now() + PATIENCE;
        while self.value(expression)? != true {
            if Instant::now() > deadline {
                let found = self.value(report)?;
                let found = found.as_str().unwrap_or_default();
                return Err(format!("never: {expression}\n{found}"));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Sets the size of the window, and the colour scheme.
    pub(crate) fn show(&mut self, width: u32, scheme: &str) -> Result<(), String> {
        let metrics =
            json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", &metrics)?;
        let feature = json!({ "name": "prefers-color-scheme", "value": scheme });
        let media = json!({ "features": [feature] });
        self.call("Emulation.setEmulatedMedia", &media).map(drop)
    }

    /// Presses a key.
    pub(crate) fn press(&mut self, key: &str) -> Result<(), String> {
        let (code, number, text) = match key {
            "Tab" => ("Tab", 9, ""),
            "Enter" => ("Enter", 13, "\r"),
            "Escape" => ("Escape", 27, ""),
            " " => ("Space", 32, " "),
            letter => ("", i32::from(letter.as_bytes()[0].to_ascii_uppercase()), letter),
        };
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" { text } else { "" };
            let event = json!({
                "type": kind, "key": key, "code": code, "windowsVirtualKeyCode": number, "text": text,
            });
            self.call("Input.dispatchKeyEvent", &event)?;
        }
        Ok(())
    }

    /// Enters a text where the focus is.
    pub(crate) fn insert(&mut self, text: &str) -> Result<(), String> {
        self.call("Input.insertText", &json!({ "text": text })).map(drop)
    }

    /// A picture of what the window shows, as PNG.
    pub(crate) fn viewport(&mut self) -> Result<Vec<u8>, String> {
        self.capture(&json!({ "format": "png" }))
    }

    /// A picture of the page from its top, as PNG; of the whole page, or of so many pixels.
    pub(crate) fn picture(&mut self, height: Option<u32>) -> Result<Vec<u8>, String> {
        let size = self.call("Page.getLayoutMetrics", &json!({}))?["cssContentSize"].take();
        let height = height.map_or_else(|| size["height"].clone(), Value::from);
        let clip = json!({ "x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1 });
        self.capture(&json!({ "format": "png", "captureBeyondViewport": true, "clip": clip }))
    }

    fn capture(&mut self, params: &Value) -> Result<Vec<u8>, String> {
        let result = self.call("Page.captureScreenshot", params)?;
        let text = result["data"].as_str().unwrap_or_default();
        let mut bytes = vec![0; text.len()];
        let decoded = Base64::decode(text, &mut bytes).map(<[u8]>::len);
        bytes.truncate(decoded.map_err(|error| format!("no picture: {error}"))?);
        Ok(bytes)
    }
}

/// Reads messages, which end with NUL, until the browser ends.
fn read(output: ChildStdout) -> Receiver<Value> {
    let (sender, messages) = channel();
    thread::spawn(move || {
        let mut output = BufReader::new(output);
        let mut message = Vec::new();
        while output.read_until(0, &mut message).is_ok_and(|read| read > 0) {
            message.pop();
            let parsed = serde_json::from_slice(&message);
            if parsed.is_ok_and(|parsed| sender.send(parsed).is_err()) {
                return;
            }
            message.clear();
        }
    });
    messages
}
