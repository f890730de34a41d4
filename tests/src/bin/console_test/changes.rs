//! Changes by the page: through a forwarded socket, and with the token.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::{
    ADDRESS, BACKUP, CONSOLE, DATABASE, DISKS, PRIVATE, REFUSED, Stage, check, describe, passed,
};

/// Where the socket is forwarded to.
pub(crate) const FORWARDED: &str = "127.77.0.1:4481";
const TOKEN: &str = "000102030405060708090a0b0c0d0e0f";
const ACTIONS: &str = "document.querySelectorAll('[data-action]').length";
const FOCUS: &str = "(document.activeElement.getAttribute('aria-label') ?? \
                     (document.activeElement.id || document.activeElement.textContent))";

impl Stage<'_> {
    /// The address without a token is as it was before there were changes.
    pub(crate) fn offers_no_change_without_a_token(&mut self) -> Result<(), String> {
        self.sees("#access", "This address accepts no changes")?;
        let actions = self.browser.value(ACTIONS)?;
        check("an address without a token offers no change", actions == 0, || actions.to_string())?;
        let (name, status) = ("and refuses one", self.post("")?);
        check(name, status == 405, || status.to_string())
    }

    pub(crate) fn changes_through_a_forwarded_socket(&mut self) -> Result<(), String> {
        self.browser.open(&format!("http://{FORWARDED}/"))?;
        self.sees("#link", "live")?;
        self.sees("#access", "Changes take effect at once")?;
        self.sees("#refused", REFUSED)?;
        self.adds_a_namespace_by_the_keyboard()?;
        self.keeps_an_open_form()?;
        self.shows_refused_and_outdated_changes()?;
        self.allows_and_denies_a_host()?;
        self.sets_the_ana_state()?;
        self.disconnects_a_controller()?;
        self.removes_a_namespace()
    }

    fn adds_a_namespace_by_the_keyboard(&mut self) -> Result<(), String> {
        let button = format!("Add a namespace to {DISKS}");
        self.tab_to(&button)?;
        self.browser.press("Enter")?;
        self.focused("change-kind")?;
        self.browser.press("m")?;
        self.tab_to("change-size")?;
        self.browser.insert("32MiB")?;
        self.pictures_of_dialog("form")?;
        self.browser.press("Enter")?;
        self.sees("#change", "Differences")?;
        self.sees("#change", "+ namespace 5: ram of 32MiB")?;
        self.is_accessible("the dialog")?;
        let before = self.namespaces()?;
        check("a dry run changes nothing", !before.contains("33.55 MB"), || before.clone())?;
        self.tab_to("Add")?;
        self.browser.press("Enter")?;
        self.sees("#change", "Done")?;
        self.focused("Close")?;
        self.browser.press("Enter")?;
        self.focused(&button)?;
        self.sees("#served", "32.0 MiB")?;
        let after = self.namespaces()?;
        check(
            "a namespace is added by the keyboard, and the host has it",
            after.contains("33.55 MB"),
            || after.clone(),
        )
    }

    /// The page is rendered again and again meanwhile.
    fn keeps_an_open_form(&mut self) -> Result<(), String> {
        self.opens_dialog("Resize namespace 5")?;
        self.fill("size", "48MiB")?;
        let asked = "performance.getEntriesByType('resource').filter(({ name }) => name.endsWith('/v1/memory')).length";
        let before = self.browser.value(asked)?;
        self.browser.value("performance.clearResourceTimings()")?;
        self.browser.wait(&format!("{asked} >= 2"), &before.to_string())?;
        let (value, focus) =
            ("document.querySelector('#change-size').value", "document.activeElement.id");
        let kept = [self.browser.value(value)?, self.browser.value(focus)?];
        check(
            "an open form keeps its values and the focus",
            kept == ["48MiB", "change-size"],
            || format!("{kept:?}"),
        )?;
        self.submit("Differences")?;
        self.sees("#change", "48MiB")?;
        self.submit("Done")?;
        self.closes()?;
        self.sees("#served", "48.0 MiB")?;
        let after = self.namespaces()?;
        check(
            "a namespace is resized, and the host has its size",
            after.contains("50.33 MB"),
            || after.clone(),
        )
    }

    fn shows_refused_and_outdated_changes(&mut self) -> Result<(), String> {
        self.opens_dialog(&format!("Add a namespace to {DISKS}"))?;
        self.fill("path", "/nonexistent/disk.img")?;
        self.fill("size", "much")?;
        self.submit("a size starts with a whole number")?;
        let path = self.browser.value("document.querySelector('#change-path').value")?;
        check(
            "a dry run that is refused shows the error beside the form",
            path == "/nonexistent/disk.img",
            || path.to_string(),
        )?;
        self.fill("size", "")?;
        self.submit("Differences")?;
        self.submit("there is no directory /nonexistent yet")?;
        passed("and so is a change that is refused after its dry run")?;
        self.browser.press("Escape")?;
        self.is_closed()?;
        self.opens_dialog("Resize namespace 5")?;
        self.fill("size", "96MiB")?;
        self.submit("Differences")?;
        self.control(&["host", "allow", PRIVATE, BACKUP])?;
        self.submit("Somebody else has changed it")?;
        self.closes()?;
        let after = self.namespaces()?;
        check(
            "a change of another configuration than the one that was looked at is refused",
            after.contains("50.33 MB"),
            || after.clone(),
        )
    }

    fn allows_and_denies_a_host(&mut self) -> Result<(), String> {
        let refused = self.list(PRIVATE, REFUSED)?;
        check("a host is refused", !refused.status.success(), String::new)?;
        self.opens_dialog(&format!("Allow {REFUSED} in {PRIVATE}"))?;
        self.submit("Differences")?;
        self.submit("Done")?;
        self.closes()?;
        let allowed = self.list(PRIVATE, REFUSED)?;
        let error = || String::from_utf8_lossy(&allowed.stderr).into_owned();
        check("a host that was refused is allowed, and connects", allowed.status.success(), error)?;
        self.opens_dialog(&format!("Deny host {REFUSED} in {PRIVATE}"))?;
        self.sees("#change", "is disconnected at once")?;
        self.submit("Differences")?;
        self.submit("Done")?;
        self.closes()?;
        let refused = self.list(PRIVATE, REFUSED)?;
        check("a host is denied, and is refused again", !refused.status.success(), String::new)?;
        let strange =
            self.browser.value("document.querySelectorAll('body img, body script').length")?;
        check("names that are markup are text in the dialog", strange == 0, || strange.to_string())
    }

    fn sets_the_ana_state(&mut self) -> Result<(), String> {
        for (state, shown) in [("inaccessible", "group 2 inaccessible"), ("optimized", "optimized")]
        {
            self.opens_dialog("Set ANA state at listener 1")?;
            self.fill("group", "2")?;
            self.fill("state", state)?;
            self.submit("Differences")?;
            self.submit("Done")?;
            self.closes()?;
            let cell = "document.querySelector('#served tbody').rows[0].cells[2].textContent";
            self.browser.wait(&format!("{cell} === {}", json!(shown)), cell)?;
        }
        passed("the ANA state of a group is set at a listener")
    }

    fn disconnects_a_controller(&mut self) -> Result<(), String> {
        let _busy = self.load(DATABASE, "127.77.0.3", "2", "randread", "1")?;
        self.opens_dialog(&format!("Disconnect {DATABASE}"))?;
        self.submit("Done")?;
        self.sees("#change", "is disconnected")?;
        self.closes()?;
        self.sees("#events", "disconnected")?;
        passed("a controller is disconnected")
    }

    fn removes_a_namespace(&mut self) -> Result<(), String> {
        self.opens_dialog("Remove namespace 5")?;
        self.fill("repeated", "1")?;
        self.submit("This is not 5")?;
        self.fill("repeated", "5")?;
        self.submit("Differences")?;
        self.pictures_of_dialog("change")?;
        self.submit("Done")?;
        self.closes()?;
        let gone = "![...document.querySelectorAll('#served [data-nsid]')].some((node) => node.dataset.nsid === '5')";
        self.browser.wait(gone, "document.querySelector('#served').innerText")?;
        self.focused("main")?;
        let after = self.namespaces()?;
        check(
            "a namespace is removed after its NSID was repeated",
            !after.contains("50.33 MB"),
            || after.clone(),
        )
    }

    /// The file of the token, for the next start.
    pub(crate) fn token_file(&self) -> Result<String, String> {
        let path = self.args.directory.join("token");
        fs::write(&path, TOKEN).map_err(describe)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(describe)?;
        Ok(format!("http_token_file = {path:?}"))
    }

    pub(crate) fn changes_with_the_token(&mut self) -> Result<(), String> {
        self.browser.open(&format!("http://{CONSOLE}/"))?;
        self.sees("#access", "Changes at this address need the token")?;
        let status = self.post("")?;
        check("a change without the token is refused", status == 401, || status.to_string())?;
        let status = self.post(TOKEN)?;
        check("a change with the token is accepted", status == 200, || status.to_string())?;
        let allow = format!("Allow a host in {PRIVATE}");
        self.opens_dialog(&allow)?;
        self.fill("host", REFUSED)?;
        self.fill("token", &TOKEN.replace('f', "e"))?;
        self.submit("This is not the token")?;
        self.fill("token", TOKEN)?;
        self.submit("Differences")?;
        self.submit("Done")?;
        self.closes()?;
        let allowed = self.list(PRIVATE, REFUSED)?;
        check(
            "a host is allowed with the token, and connects",
            allowed.status.success(),
            String::new,
        )?;
        self.sees("#configuration", "by the token")?;
        passed("the history names the token")?;
        let asks = "!document.querySelector('#change-token').closest('p').hidden";
        for expected in [false, true] {
            self.opens_dialog(&allow)?;
            let found = self.browser.value(asks)?;
            check(&format!("the page asks for the token: {expected}"), found == expected, || {
                found.to_string()
            })?;
            self.closes()?;
            let stored = "localStorage.length + sessionStorage.length + document.cookie.length + location.search.length";
            let stored = self.browser.value(stored)?;
            check("nothing is stored", stored == 0, || stored.to_string())?;
            self.browser.call("Page.reload", &json!({}))?;
            self.browser.wait(&format!("{ACTIONS} > 0"), "document.readyState")?;
        }
        Ok(())
    }

    /// The status of a request that changes nothing.
    fn post(&mut self, token: &str) -> Result<Value, String> {
        let headers = match token {
            "" => json!({}),
            token => json!({ "Authorization": format!("Bearer {token}") }),
        };
        self.browser.value(&format!(
            "fetch('/v1/changes', {{ method: 'POST', headers: {headers}, body: '{{\"changes\": []}}' }})\
             .then(({{ status }}) => status)"
        ))
    }

    /// Opens a dialog by the button whose name begins so.
    fn opens_dialog(&mut self, label: &str) -> Result<(), String> {
        let find = format!(
            "[...document.querySelectorAll('[data-action]')].find((node) => \
             node.getAttribute('aria-label').startsWith({}))",
            json!(label)
        );
        self.browser
            .wait(&format!("{find} !== undefined"), "document.querySelector('main').innerText")?;
        self.browser.value(&format!("{find}.focus(); {find}.click()"))?;
        self.browser.wait("document.querySelector('#change').open", FOCUS)
    }

    fn fill(&mut self, key: &str, value: &str) -> Result<(), String> {
        let node = format!("document.querySelector('#change-{key}')");
        let set = format!(
            "{node}.value = {}; {node}.dispatchEvent(new Event('change', {{ bubbles: true }}))",
            json!(value)
        );
        self.browser.value(&set).map(drop)
    }

    /// Presses the first button, and waits for a text in the dialog.
    fn submit(&mut self, text: &str) -> Result<(), String> {
        self.browser.value("document.querySelector('#change [type=submit]').click()")?;
        self.sees("#change", text)
    }

    fn closes(&mut self) -> Result<(), String> {
        self.browser.value("[...document.querySelectorAll('#change button')].at(-1).click()")?;
        self.is_closed()
    }

    fn is_closed(&mut self) -> Result<(), String> {
        self.browser.wait("!document.querySelector('#change').hasChildNodes()", FOCUS)
    }

    fn focused(&mut self, name: &str) -> Result<(), String> {
        self.browser.wait(&format!("{FOCUS} === {}", json!(name)), FOCUS)
    }

    /// Presses the tabulator until something has the focus.
    fn tab_to(&mut self, name: &str) -> Result<(), String> {
        for _ in 0..100 {
            self.browser.press("Tab")?;
            if self.browser.value(FOCUS)? == name {
                return Ok(());
            }
        }
        Err(format!("the keyboard does not reach {name}"))
    }

    /// The namespaces of a host.
    fn namespaces(&self) -> Result<String, String> {
        let output = self.list(DISKS, DATABASE)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn list(&self, subsystem: &str, host: &str) -> Result<Output, String> {
        let list = ["list", "-a", ADDRESS, "-n", subsystem, "-q", host, "-w", "127.77.0.4"];
        Command::new(&self.args.nvmf).args(list).output().map_err(describe)
    }

    fn pictures_of_dialog(&mut self, name: &str) -> Result<(), String> {
        if !self.args.pictures {
            return Ok(());
        }
        for (form, width, scheme) in
            [("light", 960, "light"), ("dark", 1280, "dark"), ("narrow", 390, "dark")]
        {
            self.browser.show(width, scheme)?;
            let picture = self.browser.viewport()?;
            let path = self.args.directory.join(format!("console-{name}-{form}.png"));
            fs::write(path, picture).map_err(describe)?;
        }
        self.browser.show(1280, "light")
    }
}
