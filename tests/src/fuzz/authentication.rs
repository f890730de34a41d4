//! Fuzzes messages of DH-HMAC-CHAP, and the text of a secret.

use nvme::auth::Secret;
use nvme::auth::{Challenge, Kind, Negotiate, Notice, Reply, Success1};

/// A parsed message survives emission, never with more bytes; and each message is of one kind.
pub fn authentication(data: &[u8]) -> bool {
    if let Ok(secret) = std::str::from_utf8(data).map_err(drop).and_then(secret) {
        assert!(secret.is(&secret));
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }
    let Ok((kind, t_id)) = Kind::parse(data) else {
        assert!(Negotiate::parse(data).is_err() && Notice::parse(data).is_err());
        return false;
    };
    let mut to = vec![0xA5; data.len() + 64];
    macro_rules! survives {
        ($name:ident, $kind:ident) => {
            if let Ok(message) = $name::parse(data) {
                assert_eq!((kind, message.t_id), (Kind::$kind, t_id));
                let len = message.emit(&mut to).expect("there is room");
                assert_eq!($name::parse(&to[..len]), Ok(message));
            }
        };
    }
    survives!(Negotiate, Negotiate);
    survives!(Challenge, Challenge);
    survives!(Success1, Success1);
    if let Ok(message) = Reply::parse(data) {
        assert_eq!((kind, message.t_id), (Kind::Reply, t_id));
        // A secret of more than 64 bytes is invalid, and nothing is written for it.
        if let Some(len) = message.emit(&mut to) {
            assert_eq!(len, data.len());
            assert_eq!(Reply::parse(&to[..len]), Ok(message));
        } else {
            assert!(message.response.len() > 64);
        }
    }
    if let Ok(notice) = Notice::parse(data) {
        let len = notice.emit(t_id, &mut to).expect("there is room");
        assert_eq!(Notice::parse(&to[..len]), Ok(notice));
    }
    true
}

fn secret(text: &str) -> Result<Secret, ()> {
    Secret::parse(text).map_err(|why| assert!(!why.to_string().is_empty()))
}
