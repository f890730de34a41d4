//! The token of `http_token_file`, with which requests at the loopback address may change the target.

use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::key_files::read_private;
use super::{KeyReader, ManagementConfig};

/// The fewest characters: 128 bits, if they are hexadecimal digits.
const LEAST_CHARS: usize = 32;

/// The token (RFC 6750). It is never printed.
pub(crate) struct BearerToken(Zeroizing<String>);

impl fmt::Debug for BearerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BearerToken")
    }
}

impl BearerToken {
    /// Whether it is the presented one, in a time that depends on the length only.
    pub(crate) fn is(&self, presented: &str) -> bool {
        self.0.as_bytes().ct_eq(presented.as_bytes()).into()
    }

    /// A file with the syntax of `b64token`, so that a header can carry it.
    fn parse(text: &str) -> Option<BearerToken> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
        let is_token = text.len() >= LEAST_CHARS && text.bytes().all(is_allowed);
        is_token.then(|| BearerToken(Zeroizing::new(text.to_owned())))
    }
}

impl ManagementConfig {
    /// Reads the token; `None` if none is configured.
    ///
    /// # Errors
    /// One sentence: its file cannot be used. It has no part of the token.
    pub(crate) fn token(&self) -> Result<Option<BearerToken>, String> {
        Ok(self.token_for(KeyReader::This)?.map(|(token, _)| token))
    }

    /// As [`ManagementConfig::token`], for a reader: a warning if it may not be able to read the file.
    ///
    /// # Errors
    /// As [`ManagementConfig::token`].
    pub(crate) fn examine_token(&self, reader: KeyReader) -> Result<Option<String>, String> {
        Ok(self.token_for(reader)?.and_then(|(_, doubt)| doubt))
    }

    fn token_for(
        &self,
        reader: KeyReader,
    ) -> Result<Option<(BearerToken, Option<String>)>, String> {
        let Some(path) = &self.http_token_file else { return Ok(None) };
        let (text, doubt) = read_private(path, reader)?;
        let token = BearerToken::parse(text.trim()).ok_or_else(|| {
            format!(
                "{} holds no token: at least {LEAST_CHARS} letters, digits or `-._~+/=` in one line; \
                 `openssl rand -hex 32` makes one",
                path.display()
            )
        })?;
        Ok(Some((token, doubt)))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    use crate::config::bearer_token::*;

    const TOKEN: &str = "000102030405060708090a0b0c0d0e0f";

    #[test]
    fn a_token_has_128_bits_in_a_file_that_only_its_owner_reads() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let http_token_file = Some(path.clone());
        let config = ManagementConfig { http_token_file, ..ManagementConfig::default() };
        assert!(ManagementConfig::default().token().unwrap().is_none());
        assert!(config.token().unwrap_err().contains("cannot be read"));
        let read = |text: &str, mode| {
            write(&path, text).unwrap();
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(config.token().err(), config.examine_token(KeyReader::This).err());
            config.token().map(Option::unwrap)
        };
        let token = read(&format!("{TOKEN}\n"), 0o600).unwrap();
        assert!(token.is(TOKEN));
        for other in ["", &TOKEN[..31], &format!("{TOKEN}0"), &TOKEN.replace('f', "e")] {
            assert!(!token.is(other), "{other}");
        }
        assert_eq!(format!("{token:?}"), "BearerToken");
        for mode in [0o644, 0o640, 0o604, 0o620] {
            let says = read(TOKEN, mode).unwrap_err();
            assert!(says.contains(&format!("mode {mode:03o}")), "{says}");
        }
        for text in ["", &TOKEN[..31], &format!("{TOKEN} {TOKEN}"), &format!("{TOKEN}\u{e9}")] {
            let says = read(text, 0o600).unwrap_err();
            assert!(says.contains("holds no token") && !says.contains(&TOKEN[..31]), "{says}");
        }
    }
}
